//! Bars side by side, and bars made of parts.

use super::number::{short, tick};
use super::palette::colours;
use super::plot::cut;
use super::scale::{Fitted, Scale};
use super::svg::{Anchor, Rect, Svg, text_width};
use crate::stats::Interval;

/// Bars side by side.
#[derive(Clone, Debug)]
pub struct Bars {
    /// What a screen reader says.
    pub title: String,
    /// What the height shows, with its unit.
    pub label: String,
    /// From left to right.
    pub groups: Vec<Group>,
}

/// Bars that belong together.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// What stands beneath.
    pub name: String,
    /// From left to right.
    pub bars: Vec<Bar>,
}

/// One bar.
#[derive(Clone, Debug, Default)]
pub struct Bar {
    /// Its name; the colour hangs on it.
    pub name: String,
    /// Its height.
    pub value: f64,
    /// How sure that is.
    pub interval: Option<Interval>,
    /// Published elsewhere, and not measured here: an outline.
    pub published: bool,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 40.0;

impl Bars {
    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        !self.groups.iter().flat_map(|group| &group.bars).any(|bar| bar.value.is_finite())
    }

    /// The chart as an `<svg>` element; empty where there is nothing to draw.
    pub fn svg(&self) -> String {
        let bars = || self.groups.iter().flat_map(|group| &group.bars).filter(|bar| bar.value.is_finite());
        let tops = bars().map(|bar| bar.interval.map_or(bar.value, |interval| interval.high.max(bar.value)));
        let Some(y) = Fitted::new(Scale::Linear, tops, (HEIGHT - BOTTOM, TOP)) else { return String::new() };
        let colours = colours(bars().map(|bar| bar.name.as_str()));
        let names: Vec<(&str, usize)> = bars().map(|bar| bar.name.as_str()).zip(colours).collect();
        let ticks = y.ticks(8);
        let left =
            ticks.iter().map(|(value, _)| text_width(&tick(*value), 11.0)).fold(0.0, f64::max).max(16.0)
                + 14.0;
        // Where the groups themselves are the names, a legend would only repeat them.
        let legend = self.legend();
        let wide = legend.iter().map(|name| text_width(name, 11.5)).fold(0.0, f64::max);
        let right = if legend.is_empty() { WIDTH - 8.0 } else { WIDTH - (wide + 30.0).min(190.0) };
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title);
        let floor = HEIGHT - BOTTOM;
        svg.group("ax");
        for (value, _) in &ticks {
            let Some(at) = y.at(*value) else { continue };
            svg.line("g", (left, at), (right, at));
            svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick(*value));
        }
        svg.text("a", 2.0, 14.0, Anchor::Start, &self.label);
        svg.end();
        let step = (right - left) / self.groups.len().max(1) as f64;
        let every = (self.widest_name() + 8.0) / step;
        let mut colour = names.iter().map(|(_, colour)| *colour);
        for (index, group) in self.groups.iter().enumerate() {
            let from = left + step * index as f64;
            let place = |bar: usize| (from, step, bar, group.bars.len());
            for (position, bar) in group.bars.iter().enumerate().filter(|(_, bar)| bar.value.is_finite()) {
                draw(&mut svg, bar, &group.name, colour.next().unwrap_or(0), place(position), (&y, floor));
            }
            if every <= 1.0 || index.is_multiple_of(every.ceil() as usize) {
                svg.text("t", from + step / 2.0, floor + 17.0, Anchor::Middle, &cut(&group.name));
            }
        }
        svg.line("b", (left, floor), (right, floor));
        for (index, name) in legend.iter().enumerate() {
            let top = TOP + 19.0 * index as f64;
            let colour = names.iter().find(|(other, _)| other == name).map_or(0, |(_, colour)| *colour);
            svg.series(&format!("s c{colour}"), name);
            let key = Rect { x: right + 10.0, y: top, width: 10.0, height: 10.0 };
            svg.rect("r", key, None, "");
            svg.text("n", right + 25.0, top + 9.0, Anchor::Start, &cut(name));
            svg.end();
        }
        svg.finish()
    }

    /// The names that are not their group's.
    fn legend(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for group in &self.groups {
            for bar in group.bars.iter().filter(|bar| bar.name != group.name) {
                if !names.contains(&bar.name) {
                    names.push(bar.name.clone());
                }
            }
        }
        names.truncate(14);
        names
    }

    fn widest_name(&self) -> f64 {
        self.groups.iter().map(|group| text_width(&cut(&group.name), 11.0)).fold(0.0, f64::max)
    }
}

fn draw(
    svg: &mut Svg,
    bar: &Bar,
    group: &str,
    colour: usize,
    (from, step, position, count): (f64, f64, usize, usize),
    (y, floor): (&Fitted, f64),
) {
    let Some(top) = y.at(bar.value) else { return };
    let inner = step * 0.78;
    let each = (inner / count.max(1) as f64).min(54.0);
    let begin = from + (step - each * count as f64) / 2.0 + each * position as f64;
    let place = Rect { x: begin + each * 0.06, y: top, width: each * 0.88, height: floor - top };
    let kind = if bar.published { " pub" } else { "" };
    let said = if bar.published { " (published)" } else { "" };
    let name = if bar.name == group { group.to_string() } else { format!("{group} · {}", bar.name) };
    svg.series(&format!("s c{colour}{kind}"), &bar.name);
    svg.rect("r", place, None, &format!("{name}{said}: {}", short(bar.value)));
    if let Some(interval) = bar.interval
        && let (Some(low), Some(high)) = (y.at(interval.low), y.at(interval.high))
        && (low - high).abs() > 3.0
    {
        svg.line("e2", (begin + each / 2.0, low), (begin + each / 2.0, high));
    }
    let text = short(bar.value);
    if text_width(&text, 10.0) < each + 4.0 {
        svg.text("v", begin + each / 2.0, top - 4.0, Anchor::Middle, &text);
    }
    svg.end();
}

/// Columns of 100 %, each made of parts: where the instructions go.
#[derive(Clone, Debug)]
pub struct Stack {
    /// What a screen reader says.
    pub title: String,
    /// What the whole is, with its unit.
    pub label: String,
    /// From left to right.
    pub columns: Vec<Column>,
}

/// One column of parts.
#[derive(Clone, Debug, Default)]
pub struct Column {
    /// What stands beneath.
    pub name: String,
    /// Published elsewhere, and not measured here.
    pub published: bool,
    /// Names and per cents from the bottom up.
    pub parts: Vec<(String, f64)>,
}

impl Stack {
    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        self.columns.iter().all(|column| column.parts.iter().all(|(_, value)| !value.is_finite()))
    }

    /// The chart as an `<svg>` element; empty where there is nothing to draw.
    pub fn svg(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in self.columns.iter().flat_map(|column| &column.parts) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let colours = colours(names.iter().copied());
        let wide = names.iter().map(|name| text_width(name, 11.5)).fold(0.0, f64::max);
        let (left, right, floor) = (38.0, WIDTH - (wide + 32.0).min(190.0), HEIGHT - BOTTOM);
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title);
        svg.group("ax");
        for value in [0.0, 25.0, 50.0, 75.0, 100.0] {
            let at = floor - value / 100.0 * (floor - TOP);
            svg.line("g", (left, at), (right, at));
            svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick(value));
        }
        svg.text("a", 2.0, 14.0, Anchor::Start, &self.label);
        svg.end();
        let step = (right - left) / self.columns.len().max(1) as f64;
        for (index, column) in self.columns.iter().enumerate() {
            let Column { name, published, parts } = column;
            let width = (step * 0.72).min(72.0);
            let x = left + step * (index as f64 + 0.5) - width / 2.0;
            let mut base = floor;
            for (part, value) in parts.iter().filter(|(_, value)| value.is_finite() && *value > 0.0) {
                let height = value.min(100.0) / 100.0 * (floor - TOP);
                base -= height;
                let colour = names.iter().position(|other| other == part).map_or(0, |at| colours[at]);
                let kind = if *published { " pub" } else { "" };
                svg.series(&format!("s c{colour}{kind}"), part);
                let place = Rect { x, y: base, width, height };
                svg.rect("r", place, None, &format!("{name} · {part}: {} %", short(*value)));
                if height > 13.0 {
                    let class = if *published { "v" } else { "i" };
                    svg.text(
                        class,
                        x + width / 2.0,
                        base + height / 2.0 + 3.6,
                        Anchor::Middle,
                        &short(*value),
                    );
                }
                svg.end();
            }
            svg.text("t", x + width / 2.0, floor + 17.0, Anchor::Middle, &cut(name));
        }
        svg.line("b", (left, floor), (right, floor));
        // From the top down, as the parts lie.
        for (index, (name, colour)) in names.iter().zip(&colours).rev().enumerate() {
            let top = TOP + 19.0 * index as f64;
            svg.series(&format!("s c{colour}"), name);
            svg.rect("r", Rect { x: right + 10.0, y: top, width: 10.0, height: 10.0 }, None, "");
            svg.text("n", right + 25.0, top + 9.0, Anchor::Start, &cut(name));
            svg.end();
        }
        svg.finish()
    }
}
