//! Grouped bar charts and stacked columns.

use super::legend::{ColumnNames, Legend, LegendEntry, LegendSample, WIDTH};
use super::number::{format_number, tick_label};
use super::palette::styles;
use super::plot::truncate_label;
use super::scale::{AxisScale, FittedAxis};
use super::svg::{Anchor, ChartData, Rect, Svg, text_width};
use crate::stats::ConfidenceInterval;

/// A grouped bar chart.
#[derive(Clone, Debug)]
pub struct BarChart {
    /// The accessible name (`aria-label`).
    pub title: String,
    /// The label of the y axis, with its unit.
    pub label: String,
    /// The label of the x axis; empty for none.
    pub x_label: String,
    /// The groups from left to right.
    pub groups: Vec<BarGroup>,
}

/// The bars of one x value.
#[derive(Clone, Debug, Default)]
pub struct BarGroup {
    /// The label below.
    pub name: String,
    /// The bars from left to right.
    pub bars: Vec<ChartBar>,
}

/// One bar.
#[derive(Clone, Debug, Default)]
pub struct ChartBar {
    /// The series name, which determines the colour.
    pub name: String,
    /// The value in the unit of the y axis; NaN leaves a gap.
    pub value: f64,
    /// The confidence interval of the value, drawn as an error bar.
    pub interval: Option<ConfidenceInterval>,
    /// A published value: drawn as an outline.
    pub published: bool,
}

const HEIGHT: f64 = 330.0;
const TOP: f64 = 34.0;
/// Two rows of names and the title of the axis.
const BOTTOM: f64 = 62.0;

impl BarChart {
    /// Whether the chart has no finite value.
    pub fn is_empty(&self) -> bool {
        !self.groups.iter().flat_map(|group| &group.bars).any(|bar| bar.value.is_finite())
    }

    /// The chart as an `<svg>` element; an empty string if it has no finite value.
    pub fn svg(&self) -> String {
        let bars = || self.groups.iter().flat_map(|group| &group.bars).filter(|bar| bar.value.is_finite());
        let tops = bars().map(|bar| bar.interval.map_or(bar.value, |interval| interval.high.max(bar.value)));
        let Some(y) = FittedAxis::new(AxisScale::Linear, tops, (HEIGHT - BOTTOM, TOP)) else {
            return String::new();
        };
        let styles = styles(bars().map(|bar| bar.name.as_str()));
        let names: Vec<(&str, usize)> =
            bars().map(|bar| bar.name.as_str()).zip(styles.iter().map(|style| style.colour)).collect();
        let ticks = y.ticks(8);
        let left = ticks
            .iter()
            .map(|(value, _)| text_width(&tick_label(*value), 11.0))
            .fold(0.0, f64::max)
            .max(16.0)
            + 14.0;
        // `legend` is empty if the group labels already name every bar.
        let legend = self.legend();
        let entry = |name: String| {
            let colour = names.iter().find(|(other, _)| *other == name).map_or(0, |(_, colour)| *colour);
            LegendEntry { name, class: format!("s c{colour}") }
        };
        let legend = Legend::new(legend.into_iter().map(entry).collect());
        let right = WIDTH - 8.0;
        let columns = ["series", "source", &self.x_label, &self.label, "95 % from", "95 % to"];
        let mut svg = Svg::with_label(WIDTH, HEIGHT + legend.height(), &self.title, &columns, &self.label);
        let floor = HEIGHT - BOTTOM;
        svg.group("ax");
        for (value, _) in &ticks {
            let Some(at) = y.position(*value) else { continue };
            svg.line("g", (left, at), (right, at));
            svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick_label(*value));
        }
        svg.text("a", (left + right) / 2.0, HEIGHT - 8.0, Anchor::Middle, &self.x_label);
        svg.end();
        let step = (right - left) / self.groups.len().max(1) as f64;
        let group_names = ColumnNames::new(self.groups.iter().map(|group| group.name.as_str()), step);
        let mut colour = names.iter().map(|(_, colour)| *colour);
        for (index, group) in self.groups.iter().enumerate() {
            let from = left + step * index as f64;
            let place = |bar: usize| (from, step, bar, group.bars.len());
            for (position, bar) in group.bars.iter().enumerate().filter(|(_, bar)| bar.value.is_finite()) {
                draw(&mut svg, bar, &group.name, colour.next().unwrap_or(0), place(position), (&y, floor));
            }
            if let Some(row) = group_names.row(index) {
                let y = floor + 17.0 + row as f64 * ColumnNames::ROW;
                svg.text("t", from + step / 2.0, y, Anchor::Middle, &truncate_label(&group.name));
            }
        }
        svg.line("b", (left, floor), (right, floor));
        legend.draw(&mut svg, HEIGHT, LegendSample::Bar);
        svg.finish()
    }

    /// Names of the bars that differ from their group's name, at most 14.
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
}

fn draw(
    svg: &mut Svg,
    bar: &ChartBar,
    group: &str,
    colour: usize,
    (from, step, position, count): (f64, f64, usize, usize),
    (y, floor): (&FittedAxis, f64),
) {
    let Some(top) = y.position(bar.value) else { return };
    let inner = step * 0.78;
    let each = (inner / count.max(1) as f64).min(54.0);
    let begin = from + (step - each * count as f64) / 2.0 + each * position as f64;
    let place = Rect { x: begin + each * 0.06, y: top, width: each * 0.88, height: floor - top };
    let kind = if bar.published { " pub" } else { "" };
    let suffix = if bar.published { " (published)" } else { "" };
    let name = if bar.name == group { group.to_string() } else { format!("{group} · {}", bar.name) };
    let mut data = ChartData::default();
    let (low, high) = bar.interval.map_or((f64::NAN, f64::NAN), |interval| (interval.low, interval.high));
    data.push(&[group], &[bar.value, low, high]);
    svg.series_with_data(&format!("s c{colour}{kind}"), &bar.name, &data);
    svg.rect("r", place, None, &format!("{name}{suffix}: {}", format_number(bar.value)));
    // The number is above the bar and its interval.
    let mut above = top;
    if let Some(interval) = bar.interval
        && let (Some(low), Some(high)) = (y.position(interval.low), y.position(interval.high))
        && (low - high).abs() > 3.0
    {
        svg.line("e2", (begin + each / 2.0, low), (begin + each / 2.0, high));
        above = top.min(high);
    }
    let text = format_number(bar.value);
    if text_width(&text, 10.5) < each + 4.0 {
        svg.text("v", begin + each / 2.0, above - 4.0, Anchor::Middle, &text);
    }
    svg.end();
}

/// A chart of stacked columns, each up to 100 %: for example CPU samples by class of functions.
#[derive(Clone, Debug)]
pub struct StackedColumns {
    /// The accessible name (`aria-label`).
    pub title: String,
    /// The label of the y axis, with its unit.
    pub label: String,
    /// The label of the x axis; empty for none.
    pub x_label: String,
    /// The columns from left to right.
    pub columns: Vec<StackedColumn>,
}

/// One stacked column.
#[derive(Clone, Debug, Default)]
pub struct StackedColumn {
    /// The label below.
    pub name: String,
    /// Published values: drawn as outlines.
    pub published: bool,
    /// Names and percentages of the parts, from the bottom up. A part `other` is added up to 100 %; parts of more than
    /// 100 %, as medians may be, are drawn in proportion.
    pub parts: Vec<(String, f64)>,
}

impl StackedColumn {
    /// The parts that are drawn, which together are 100 %: name, percentage as given, percentage as drawn.
    fn drawn(&self) -> Vec<(&str, f64, f64)> {
        let parts = self.parts.iter().filter(|(_, value)| value.is_finite() && *value > 0.0);
        let sum: f64 = parts.clone().map(|(_, value)| value).sum();
        let factor = if sum > 100.0 { 100.0 / sum } else { 1.0 };
        let mut drawn: Vec<_> = parts.map(|(name, value)| (name.as_str(), *value, value * factor)).collect();
        // Less is the rounding of published numbers.
        if !drawn.is_empty() && sum < 99.0 {
            drawn.push((OTHER, 100.0 - sum, 100.0 - sum));
        }
        drawn
    }
}

/// The part of a column that is in no class.
const OTHER: &str = "other";

impl StackedColumns {
    /// Whether the chart has no finite value.
    pub fn is_empty(&self) -> bool {
        self.columns.iter().all(|column| column.parts.iter().all(|(_, value)| !value.is_finite()))
    }

    /// The chart as an `<svg>` element; an empty string if it has no finite value.
    pub fn svg(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        let mut names: Vec<&str> = Vec::new();
        for (name, ..) in self.columns.iter().flat_map(StackedColumn::drawn) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.sort_by_key(|name| *name == OTHER);
        let colours: Vec<usize> = styles(names.iter().copied()).iter().map(|style| style.colour).collect();
        // From the top down, in the order of the parts.
        let entry = |(name, colour): (&&str, &usize)| LegendEntry {
            name: name.to_string(),
            class: format!("s c{colour}"),
        };
        let legend = Legend::new(names.iter().zip(&colours).rev().map(entry).collect());
        let (left, right, floor) = (38.0, WIDTH - 8.0, HEIGHT - BOTTOM);
        let fields = ["part", "source", &self.x_label, &self.label];
        let mut svg = Svg::with_label(WIDTH, HEIGHT + legend.height(), &self.title, &fields, &self.label);
        svg.group("ax");
        for value in [0.0, 25.0, 50.0, 75.0, 100.0] {
            let at = floor - value / 100.0 * (floor - TOP);
            svg.line("g", (left, at), (right, at));
            svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick_label(value));
        }
        svg.text("a", (left + right) / 2.0, HEIGHT - 8.0, Anchor::Middle, &self.x_label);
        svg.end();
        let step = (right - left) / self.columns.len().max(1) as f64;
        let column_names = ColumnNames::new(self.columns.iter().map(|column| column.name.as_str()), step);
        for (index, column) in self.columns.iter().enumerate() {
            let StackedColumn { name, published, .. } = column;
            let width = (step * 0.72).min(72.0);
            let x = left + step * (index as f64 + 0.5) - width / 2.0;
            let mut base = floor;
            for (part, value, drawn) in column.drawn() {
                let height = drawn / 100.0 * (floor - TOP);
                base -= height;
                let colour = names.iter().position(|other| *other == part).map_or(0, |at| colours[at]);
                let kind = if *published { " pub" } else { "" };
                let mut data = ChartData::default();
                data.push(&[name], &[value]);
                svg.series_with_data(&format!("s c{colour}{kind}"), part, &data);
                let place = Rect { x, y: base, width, height };
                svg.rect("r", place, None, &format!("{name} · {part}: {} %", format_number(value)));
                let text = format_number(value);
                if height > 13.0 && text_width(&text, 10.5) < step {
                    let class = if *published { "v" } else { "i" };
                    svg.text(class, x + width / 2.0, base + height / 2.0 + 3.6, Anchor::Middle, &text);
                }
                svg.end();
            }
            if let Some(row) = column_names.row(index) {
                let y = floor + 17.0 + row as f64 * ColumnNames::ROW;
                svg.text("t", x + width / 2.0, y, Anchor::Middle, &truncate_label(name));
            }
        }
        svg.line("b", (left, floor), (right, floor));
        legend.draw(&mut svg, HEIGHT, LegendSample::Bar);
        svg.finish()
    }
}
