//! Lines over an axis: J-curves, scaling, distributions.

use super::labels::spread;
use super::number::{short, tick};
use super::palette::colours;
use super::scale::{Fitted, Scale};
use super::svg::{Anchor, Svg, text_width};
use crate::stats::Interval;

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it shows, with its unit.
    pub label: String,
    /// How it is divided.
    pub scale: Scale,
}

impl Axis {
    /// An axis.
    pub fn new(label: impl Into<String>, scale: Scale) -> Axis {
        Axis { label: label.into(), scale }
    }
}

/// One line.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Its name; the colour hangs on it, so that the same name looks the same in every chart.
    pub name: String,
    /// Published elsewhere, and not measured here: dashed and lighter.
    pub published: bool,
    /// In the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// Of y, for each point; empty where nothing is known.
    pub intervals: Vec<Option<Interval>>,
    /// More about each point, as its tip says it; empty for none.
    pub tips: Vec<String>,
    /// Whether the points themselves are marked: not where there are hundreds.
    pub marked: bool,
}

impl Series {
    /// A marked line of this machine.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points, marked: true, ..Series::default() }
    }

    fn label(&self) -> String {
        if self.published { format!("{} · publ.", self.name) } else { self.name.clone() }
    }
}

/// Lines over an axis.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What a screen reader says.
    pub title: String,
    /// Along.
    pub x: Axis,
    /// Up.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
    /// Whether names stand in a list, rather than at the ends of their lines: where those all meet.
    pub listed: bool,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 340.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
const LABEL_PX: f64 = 11.5;
/// Room for a piece of the line beside its name.
const KEY: f64 = 20.0;
/// More lines than this no reader follows; the table has them all.
const SERIES_MAX: usize = 24;
/// More marks than this are a blot.
const MARKS_MAX: usize = 400;

impl Plot {
    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        self.fitted(0.0, 1.0).is_none()
    }

    /// The chart as an `<svg>` element; empty where there is nothing to draw.
    pub fn svg(&self) -> String {
        let drawn = &self.series[..self.series.len().min(SERIES_MAX)];
        let wide = drawn.iter().map(|series| text_width(&series.label(), LABEL_PX)).fold(0.0, f64::max);
        let key = if self.listed { KEY } else { 0.0 };
        let right = WIDTH - (wide + key + 22.0).clamp(24.0, 210.0);
        let Some((_, y)) = self.fitted(0.0, right) else { return String::new() };
        let labels = y.ticks(8);
        let wide = labels.iter().filter(|tick| tick.1).map(|(value, _)| text_width(&tick(*value), 11.0));
        let left = (wide.fold(0.0, f64::max) + 14.0).max(30.0);
        let Some((x, y)) = self.fitted(left, right) else { return String::new() };
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title);
        self.axes(&mut svg, (&x, &y), (left, right));
        let colours = colours(drawn.iter().map(|series| series.name.as_str()));
        let mut marks = drawn.iter().map(|series| series.points.len()).sum::<usize>();
        if marks <= MARKS_MAX {
            marks = 0;
        }
        let mut ends = Vec::new();
        // What was published lies beneath what was measured.
        for published in [true, false] {
            for (series, colour) in
                drawn.iter().zip(&colours).filter(|(series, _)| series.published == published)
            {
                let Some(end) = draw(&mut svg, series, *colour, (&x, &y), marks == 0) else { continue };
                ends.push((end, series, *colour));
            }
        }
        if self.listed {
            // As they are listed in the definition, those published after those measured.
            ends.sort_by_key(|(_, series, _)| {
                let place = drawn.iter().position(|other| other.name == series.name);
                (series.published, place)
            });
            list(&mut svg, &ends, right);
        } else {
            label_ends(&mut svg, ends, right);
        }
        svg.finish()
    }

    /// Both axes, if there is at least one point on them.
    fn fitted(&self, left: f64, right: f64) -> Option<(Fitted, Fitted)> {
        let points = || self.series.iter().take(SERIES_MAX).flat_map(|series| series.points.iter());
        let ends = self.series.iter().take(SERIES_MAX).flat_map(|series| series.intervals.iter().flatten());
        let ends: Vec<f64> = ends.flat_map(|interval| [interval.low, interval.high]).collect();
        let x = Fitted::new(self.x.scale, points().map(|point| point.0), (left, right - 8.0))?;
        let y = points().map(|point| point.1).chain(ends);
        let y = Fitted::new(self.y.scale, y, (HEIGHT - BOTTOM, TOP))?;
        points().any(|point| x.at(point.0).is_some() && y.at(point.1).is_some()).then_some((x, y))
    }

    fn axes(&self, svg: &mut Svg, (x, y): (&Fitted, &Fitted), (left, right): (f64, f64)) {
        let floor = HEIGHT - BOTTOM;
        svg.group("ax");
        for (value, labelled) in y.ticks(8) {
            let Some(at) = y.at(value) else { continue };
            svg.line(if labelled { "g" } else { "g2" }, (left, at), (right, at));
            if labelled {
                svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick(value));
            }
        }
        for (value, labelled) in x.ticks(16) {
            let Some(at) = x.at(value) else { continue };
            svg.line("tk", (at, floor), (at, floor + if labelled { 5.0 } else { 3.0 }));
            if labelled {
                svg.text("t", at, floor + 18.0, Anchor::Middle, &tick(value));
            }
        }
        svg.line("b", (left, floor), (right, floor));
        svg.text("a", 2.0, 14.0, Anchor::Start, &self.y.label);
        svg.text("a", (left + right) / 2.0, HEIGHT - 8.0, Anchor::Middle, &self.x.label);
        svg.end();
    }
}

/// Draws a line; where it ends, if it can be seen at all.
fn draw(
    svg: &mut Svg,
    series: &Series,
    colour: usize,
    (x, y): (&Fitted, &Fitted),
    marks: bool,
) -> Option<(f64, f64)> {
    let at = |point: &(f64, f64)| Some((x.at(point.0)?, y.at(point.1)?));
    let placed: Vec<(usize, (f64, f64))> =
        series.points.iter().enumerate().filter_map(|(index, point)| Some((index, at(point)?))).collect();
    let end = placed.last()?.1;
    let kind = if series.published { " pub" } else { "" };
    svg.series(&format!("s c{colour}{kind}"), &series.label());
    for (index, place) in &placed {
        let Some(Some(interval)) = series.intervals.get(*index) else { continue };
        if let (Some(low), Some(high)) = (y.at(interval.low), y.at(interval.high))
            && (low - high).abs() > 3.0
        {
            svg.line("e", (place.0, low), (place.0, high));
        }
    }
    let line: Vec<(f64, f64)> = placed.iter().map(|(_, place)| *place).collect();
    if line.len() > 1 {
        svg.path("l", &thinned(&line));
    }
    if marks && series.marked {
        for (index, place) in &placed {
            let (px, py) = series.points[*index];
            let tip = match series.tips.get(*index) {
                Some(tip) if !tip.is_empty() => format!("{} · {tip}", series.label()),
                _ => format!("{} · {}, {}", series.label(), short(px), short(py)),
            };
            svg.mark(colour as u8, *place, &tip);
        }
    }
    svg.end();
    Some(end)
}

/// Leaves out what moves less than a pixel: a distribution has more points than the screen.
fn thinned(line: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut out: Vec<(f64, f64)> = Vec::with_capacity(line.len().min(256));
    for (index, point) in line.iter().enumerate() {
        let far = out.last().is_none_or(|last| (point.0 - last.0).abs() + (point.1 - last.1).abs() >= 1.0);
        if far || index + 1 == line.len() {
            out.push(*point);
        }
    }
    out
}

/// Writes each line's name at its end, moved apart, with a thin line where a label had to move.
fn label_ends(svg: &mut Svg, mut ends: Vec<((f64, f64), &Series, usize)>, right: f64) {
    ends.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
    let wanted: Vec<f64> = ends.iter().map(|(end, ..)| end.1).collect();
    let places = spread(&wanted, 13.5, TOP - 2.0, HEIGHT - BOTTOM);
    for ((end, series, colour), place) in ends.into_iter().zip(places) {
        let kind = if series.published { " pub" } else { "" };
        svg.series(&format!("s c{colour}{kind}"), &series.label());
        if (end.1 - place).abs() > 3.0 || right - end.0 > 14.0 {
            svg.path("h", &[(end.0 + 4.0, end.1), (right, place), (right + 5.0, place)]);
        }
        svg.text("n", right + 8.0, place + 4.0, Anchor::Start, &cut(&series.label()));
        svg.end();
    }
}

/// Writes the names in a list, each beside a piece of its line.
fn list(svg: &mut Svg, ends: &[((f64, f64), &Series, usize)], right: f64) {
    for (index, (_, series, colour)) in ends.iter().enumerate() {
        let at = TOP + 8.0 + 15.0 * index as f64;
        let kind = if series.published { " pub" } else { "" };
        svg.series(&format!("s c{colour}{kind}"), &series.label());
        svg.path("l", &[(right + 8.0, at), (right + 8.0 + KEY - 4.0, at)]);
        svg.text("n", right + 8.0 + KEY, at + 4.0, Anchor::Start, &cut(&series.label()));
        svg.end();
    }
}

/// A label no longer than its place.
pub(super) fn cut(text: &str) -> String {
    const LETTERS_MAX: usize = 28;
    if text.chars().count() <= LETTERS_MAX {
        return text.to_string();
    }
    text.chars().take(LETTERS_MAX - 1).chain(['…']).collect()
}
