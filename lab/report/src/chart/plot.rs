//! Line charts: latency over throughput, scaling, distributions.

use super::labels::spread_labels;
use super::legend::{Legend, LegendEntry, LegendSample, WIDTH};
use super::number::{format_number, tick_label};
use super::palette::{SeriesStyle, styles};
use super::scale::{AxisScale, FittedAxis};
use super::svg::{Anchor, ChartData, Svg, text_width};
use crate::stats::ConfidenceInterval;

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The quantity, with its unit.
    pub label: String,
    /// The mapping of values to positions.
    pub scale: AxisScale,
}

impl Axis {
    /// Creates an axis.
    pub fn new(label: impl Into<String>, scale: AxisScale) -> Axis {
        Axis { label: label.into(), scale }
    }
}

/// One line of a chart.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// The series name, which determines the colour consistently across charts.
    pub name: String,
    /// Published values: drawn dashed and lighter.
    pub published: bool,
    /// The points in the order in which the line connects them.
    pub points: Vec<(f64, f64)>,
    /// The confidence interval of y for each point; empty if there are none.
    pub intervals: Vec<Option<ConfidenceInterval>>,
    /// The tooltip text of each point; empty for the default text.
    pub tips: Vec<String>,
    /// Whether points have marks; `false` for lines of hundreds of points.
    pub marked: bool,
}

impl Series {
    /// A measured line with marks.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points, marked: true, ..Series::default() }
    }

    fn label(&self) -> String {
        if self.published { format!("{} · publ.", self.name) } else { self.name.clone() }
    }
}

/// A line chart.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The accessible name (`aria-label`).
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines; at most 24 are drawn.
    pub series: Vec<Series>,
    /// Whether names are in a legend below rather than at the ends of the lines; for lines that end in one point. Long
    /// names always are.
    pub legend: bool,
}

const HEIGHT: f64 = 300.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
const LABEL_PX: f64 = 11.5;
/// Widest names at the ends of lines, in pixels: they leave two thirds of the chart to the lines.
const END_LABEL_MAX: f64 = 96.0;
/// Maximum number of lines that stay readable; the table of values has all of them.
const SERIES_MAX: usize = 24;
/// Maximum number of marks; a chart with more points has none.
const MARKS_MAX: usize = 400;

impl Plot {
    /// Whether no point can be drawn.
    pub fn is_empty(&self) -> bool {
        self.fitted(0.0, 1.0).is_none()
    }

    /// The chart as an `<svg>` element; an empty string if no point can be drawn.
    pub fn svg(&self) -> String {
        let drawn = &self.series[..self.series.len().min(SERIES_MAX)];
        let wide = drawn.iter().map(|series| text_width(&series.label(), LABEL_PX)).fold(0.0, f64::max);
        let has_legend = self.legend || wide > END_LABEL_MAX;
        let right = if has_legend { WIDTH - 10.0 } else { WIDTH - (wide + 22.0).max(24.0) };
        let Some((_, y)) = self.fitted(0.0, right) else { return String::new() };
        let labels = y.ticks(8);
        let wide =
            labels.iter().filter(|tick| tick.1).map(|(value, _)| text_width(&tick_label(*value), 11.0));
        let left = (wide.fold(0.0, f64::max) + 14.0).max(30.0);
        let Some((x, y)) = self.fitted(left, right) else { return String::new() };
        let styles = styles(drawn.iter().map(|series| series.name.as_str()));
        // In the order of the definition, published lines after measured ones.
        let in_order = [false, true].into_iter().flat_map(|published| {
            drawn.iter().zip(&styles).filter(move |(series, _)| has_legend && series.published == published)
        });
        let is_drawn = |series: &Series| {
            series.points.iter().any(|point| x.position(point.0).is_some() && y.position(point.1).is_some())
        };
        let entries = in_order.filter(|(series, _)| is_drawn(series)).map(|(series, style)| {
            let kind = if series.published { " pub" } else { "" };
            LegendEntry { name: series.label(), class: format!("s c{}{kind}", style.colour) }
        });
        let legend = Legend::new(entries.collect());
        let columns = ["series", "source", &self.x.label, &self.y.label];
        let mut svg = Svg::with_label(WIDTH, HEIGHT + legend.height(), &self.title, &columns, &self.y.label);
        self.axes(&mut svg, (&x, &y), (left, right));
        let mut marks = drawn.iter().map(|series| series.points.len()).sum::<usize>();
        if marks <= MARKS_MAX {
            marks = 0;
        }
        let mut ends = Vec::new();
        // Published lines are drawn first, below the measured ones.
        for published in [true, false] {
            for (series, style) in
                drawn.iter().zip(&styles).filter(|(series, _)| series.published == published)
            {
                let Some(end) = draw(&mut svg, series, *style, (&x, &y), marks == 0) else { continue };
                ends.push((end, series, style.colour));
            }
        }
        if has_legend {
            legend.draw(&mut svg, HEIGHT, LegendSample::Line);
        } else {
            label_ends(&mut svg, ends, right);
        }
        svg.finish()
    }

    /// Fits both axes to the data; `None` if no point can be drawn.
    fn fitted(&self, left: f64, right: f64) -> Option<(FittedAxis, FittedAxis)> {
        let points = || self.series.iter().take(SERIES_MAX).flat_map(|series| series.points.iter());
        let ends = self.series.iter().take(SERIES_MAX).flat_map(|series| series.intervals.iter().flatten());
        let ends: Vec<f64> = ends.flat_map(|interval| [interval.low, interval.high]).collect();
        let x = FittedAxis::new(self.x.scale, points().map(|point| point.0), (left, right - 8.0))?;
        let y = points().map(|point| point.1).chain(ends);
        let y = FittedAxis::new(self.y.scale, y, (HEIGHT - BOTTOM, TOP))?;
        points().any(|point| x.position(point.0).is_some() && y.position(point.1).is_some()).then_some((x, y))
    }

    fn axes(&self, svg: &mut Svg, (x, y): (&FittedAxis, &FittedAxis), (left, right): (f64, f64)) {
        let floor = HEIGHT - BOTTOM;
        svg.group("ax");
        for (value, labelled) in y.ticks(8) {
            let Some(at) = y.position(value) else { continue };
            svg.line(if labelled { "g" } else { "g2" }, (left, at), (right, at));
            if labelled {
                svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick_label(value));
            }
        }
        for (value, labelled) in x.ticks(10) {
            let Some(at) = x.position(value) else { continue };
            svg.line("tk", (at, floor), (at, floor + if labelled { 5.0 } else { 3.0 }));
            if labelled {
                svg.text("t", at, floor + 18.0, Anchor::Middle, &tick_label(value));
            }
        }
        svg.line("b", (left, floor), (right, floor));
        svg.text("a", (left + right) / 2.0, HEIGHT - 8.0, Anchor::Middle, &self.x.label);
        svg.end();
    }
}

/// Draws a line and returns its end point; `None` if no point is on the axes.
fn draw(
    svg: &mut Svg,
    series: &Series,
    style: SeriesStyle,
    (x, y): (&FittedAxis, &FittedAxis),
    marks: bool,
) -> Option<(f64, f64)> {
    let at = |point: &(f64, f64)| Some((x.position(point.0)?, y.position(point.1)?));
    let placed: Vec<(usize, (f64, f64))> =
        series.points.iter().enumerate().filter_map(|(index, point)| Some((index, at(point)?))).collect();
    let end = placed.last()?.1;
    let kind = if series.published { " pub" } else { "" };
    let visible = drop_subpixel_points(&placed);
    let mut data = ChartData::default();
    for (index, _) in &visible {
        let (x, y) = series.points[*index];
        data.push(&[], &[x, y]);
    }
    svg.series_with_data(&format!("s c{}{kind}", style.colour), &series.label(), &data);
    for (index, place) in &placed {
        let Some(Some(interval)) = series.intervals.get(*index) else { continue };
        if let (Some(low), Some(high)) = (y.position(interval.low), y.position(interval.high))
            && (low - high).abs() > 3.0
        {
            svg.line("e", (place.0, low), (place.0, high));
        }
    }
    if placed.len() > 1 {
        let line: Vec<(f64, f64)> = visible.iter().map(|(_, place)| *place).collect();
        svg.path("l", &line);
    }
    if marks && series.marked {
        for (index, place) in &placed {
            let (px, py) = series.points[*index];
            let tip = match series.tips.get(*index) {
                Some(tip) if !tip.is_empty() => format!("{} · {tip}", series.label()),
                _ => format!("{} · {}, {}", series.label(), format_number(px), format_number(py)),
            };
            svg.mark(style.mark, *place, &tip);
        }
    }
    svg.end();
    Some(end)
}

/// Drops points less than a pixel from the previous one: a distribution may have more points than pixels.
fn drop_subpixel_points(line: &[(usize, (f64, f64))]) -> Vec<(usize, (f64, f64))> {
    let mut out: Vec<(usize, (f64, f64))> = Vec::with_capacity(line.len().min(256));
    for (position, (index, point)) in line.iter().enumerate() {
        let far =
            out.last().is_none_or(|(_, last)| (point.0 - last.0).abs() + (point.1 - last.1).abs() >= 1.0);
        if far || position + 1 == line.len() {
            out.push((*index, *point));
        }
    }
    out
}

/// Writes each line's name at its end without overlap, with a leader line to a label that had to move.
fn label_ends(svg: &mut Svg, mut ends: Vec<((f64, f64), &Series, usize)>, right: f64) {
    ends.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
    let wanted: Vec<f64> = ends.iter().map(|(end, ..)| end.1).collect();
    let places = spread_labels(&wanted, 13.5, TOP - 2.0, HEIGHT - BOTTOM);
    for ((end, series, colour), place) in ends.into_iter().zip(places) {
        let kind = if series.published { " pub" } else { "" };
        svg.series(&format!("s c{colour}{kind}"), &series.label());
        if (end.1 - place).abs() > 3.0 || right - end.0 > 14.0 {
            svg.path("h", &[(end.0 + 4.0, end.1), (right, place), (right + 5.0, place)]);
        }
        svg.text("n", right + 8.0, place + 4.0, Anchor::Start, &truncate_label(&series.label()));
        svg.end();
    }
}

/// Truncates a label to 28 characters.
pub(super) fn truncate_label(text: &str) -> String {
    const CHARS_MAX: usize = 28;
    if text.chars().count() <= CHARS_MAX {
        return text.to_string();
    }
    text.chars().take(CHARS_MAX - 1).chain(['…']).collect()
}
