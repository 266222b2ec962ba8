//! Throughput and latency over the time of a measurement: lines of throughput above a heat map of latencies with lines of
//! percentiles.

use super::labels::spread_labels;
use super::legend::WIDTH;
use super::number::tick_label;
use super::palette::COLOURS;
use super::plot::truncate_label;
use super::scale::{AxisScale, FittedAxis};
use super::svg::{Anchor, ChartData, Rect, Svg, text_width};

/// Throughput and latency over time.
#[derive(Clone, Debug)]
pub struct OverTime {
    /// The accessible name (`aria-label`).
    pub title: String,
    /// Time, with its unit.
    pub x_label: String,
    /// Throughput, with its unit.
    pub rate_label: String,
    /// Latency, with its unit.
    pub latency_label: String,
    /// Lines of throughput: name and points.
    pub rates: Vec<(String, Vec<(f64, f64)>)>,
    /// Lines of latency: name and points.
    pub percentiles: Vec<(String, Vec<(f64, f64)>)>,
    /// The heat map.
    pub cells: Vec<HeatCell>,
}

/// A cell of the heat map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeatCell {
    /// Start and end of the interval.
    pub time: (f64, f64),
    /// Lowest and highest latency, above 0.
    pub latency: (f64, f64),
    /// I/Os.
    pub count: u64,
}

const HEIGHT: f64 = 356.0;
/// Top and bottom of both charts.
const RATE: (f64, f64) = (26.0, 118.0);
const LATENCY: (f64, f64) = (158.0, 312.0);
/// Colours of the heat map; each is for a tenth of the I/Os of the one before it.
const LEVELS: usize = 5;
const LABEL_PX: f64 = 11.5;

impl OverTime {
    /// The chart as an `<svg>` element; an empty string without a point of throughput and of latency.
    pub fn svg(&self) -> String {
        let lines = || self.rates.iter().chain(&self.percentiles);
        let names = lines().map(|(name, _)| text_width(&truncate_label(name), LABEL_PX)).fold(0.0, f64::max);
        let right = WIDTH - (names + 22.0).clamp(24.0, 130.0);
        let rates = || self.rates.iter().flat_map(|(_, points)| points);
        let latencies = self.percentiles.iter().flat_map(|(_, points)| points).map(|point| point.1);
        let latencies = latencies.chain(self.cells.iter().flat_map(|cell| [cell.latency.0, cell.latency.1]));
        let rate = FittedAxis::new(AxisScale::Linear, rates().map(|point| point.1), (RATE.1, RATE.0));
        let latency = FittedAxis::new(AxisScale::Log10, latencies, (LATENCY.1, LATENCY.0));
        let (Some(rate), Some(latency)) = (rate, latency) else { return String::new() };
        let ticks = [rate.ticks(4), latency.ticks(8)].concat();
        let widths =
            ticks.iter().filter(|tick| tick.1).map(|(value, _)| text_width(&tick_label(*value), 11.0));
        let left = (widths.fold(0.0, f64::max) + 14.0).max(30.0);
        let times = lines().flat_map(|(_, points)| points).map(|point| point.0);
        let times = times.chain(self.cells.iter().flat_map(|cell| [cell.time.0, cell.time.1]));
        let Some(time) = FittedAxis::new(AxisScale::Linear, times, (left, right - 8.0)) else {
            return String::new();
        };
        let columns = ["series", "source", &self.x_label, "value", "I/Os"];
        let mut svg = Svg::new(WIDTH, HEIGHT, &self.title, &columns);
        self.axes(&mut svg, &time, (&rate, RATE), (&latency, LATENCY), (left, right));
        self.heat(&mut svg, &time, &latency);
        for (first, lines, y, place) in
            [(0, &self.rates, &rate, RATE), (9, &self.percentiles, &latency, LATENCY)]
        {
            draw_lines(&mut svg, first, lines, (&time, y), right, place);
        }
        svg.finish()
    }

    fn axes(
        &self,
        svg: &mut Svg,
        time: &FittedAxis,
        (rate, rate_place): (&FittedAxis, (f64, f64)),
        (latency, latency_place): (&FittedAxis, (f64, f64)),
        (left, right): (f64, f64),
    ) {
        svg.group("ax");
        for (axis, most) in [(rate, 4), (latency, 8)] {
            for (value, labelled) in axis.ticks(most) {
                let Some(at) = axis.position(value) else { continue };
                svg.line(if labelled { "g" } else { "g2" }, (left, at), (right, at));
                if labelled {
                    svg.text("t", left - 7.0, at + 3.8, Anchor::End, &tick_label(value));
                }
            }
        }
        for floor in [rate_place.1, latency_place.1] {
            svg.line("b", (left, floor), (right, floor));
        }
        for (value, labelled) in time.ticks(8) {
            let Some(at) = time.position(value) else { continue };
            svg.line("tk", (at, latency_place.1), (at, latency_place.1 + if labelled { 5.0 } else { 3.0 }));
            if labelled {
                svg.text("t", at, latency_place.1 + 18.0, Anchor::Middle, &tick_label(value));
            }
        }
        svg.text("a", 2.0, rate_place.0 - 12.0, Anchor::Start, &self.rate_label);
        svg.text("a", 2.0, latency_place.0 - 14.0, Anchor::Start, &self.latency_label);
        svg.text("a", (left + right) / 2.0, HEIGHT - 8.0, Anchor::Middle, &self.x_label);
        svg.end();
    }

    /// One path for each colour: a rectangle for each cell would be five times as long.
    fn heat(&self, svg: &mut Svg, time: &FittedAxis, latency: &FittedAxis) {
        let most = self.cells.iter().map(|cell| cell.count).max().unwrap_or(0);
        let mut data = ChartData::default();
        let mut levels: [Vec<Rect>; LEVELS] = Default::default();
        for cell in self.cells.iter().filter(|cell| cell.count > 0) {
            let ends = [time.position(cell.time.0), time.position(cell.time.1)];
            let [Some(from), Some(to)] = ends else { continue };
            let ends = [latency.position(cell.latency.0), latency.position(cell.latency.1)];
            let [Some(low), Some(high)] = ends else { continue };
            data.push(&[], &[cell.time.1, cell.latency.1, cell.count as f64]);
            let below = (most as f64 / cell.count as f64).log10().floor() as usize;
            let level = LEVELS - 1 - below.min(LEVELS - 1);
            levels[level].push(Rect { x: from, y: high, width: to - from, height: low - high });
        }
        svg.series_with_data("s c0", "I/Os up to this latency", &data);
        for (level, cells) in levels.iter().enumerate().filter(|(_, cells)| !cells.is_empty()) {
            svg.rects(["q0", "q1", "q2", "q3", "q4"][level], cells);
        }
        svg.end();
    }
}

/// Draws lines with their names at the ends; the first has the colour of index `first`.
fn draw_lines(
    svg: &mut Svg,
    first: usize,
    lines: &[(String, Vec<(f64, f64)>)],
    (time, y): (&FittedAxis, &FittedAxis),
    right: f64,
    (top, bottom): (f64, f64),
) {
    let mut ends = Vec::new();
    for (index, (name, points)) in lines.iter().enumerate() {
        let placed: Vec<(f64, f64)> =
            points.iter().filter_map(|(x, value)| Some((time.position(*x)?, y.position(*value)?))).collect();
        let Some(end) = placed.last() else { continue };
        let colour = (first + index) % COLOURS;
        let mut data = ChartData::default();
        points.iter().for_each(|(x, value)| data.push(&[], &[*x, *value]));
        svg.series_with_data(&format!("s c{colour}"), name, &data);
        svg.path("l", &placed);
        svg.end();
        ends.push((*end, name, colour));
    }
    ends.sort_by(|a, b| a.0.1.total_cmp(&b.0.1));
    let wanted: Vec<f64> = ends.iter().map(|(end, ..)| end.1).collect();
    let places = spread_labels(&wanted, 13.5, top, bottom);
    for ((end, name, colour), place) in ends.into_iter().zip(places) {
        svg.series(&format!("s c{colour}"), name);
        if (end.1 - place).abs() > 3.0 || right - end.0 > 14.0 {
            svg.path("h", &[(end.0 + 4.0, end.1), (right, place), (right + 5.0, place)]);
        }
        svg.text("n", right + 8.0, place + 4.0, Anchor::Start, &truncate_label(name));
        svg.end();
    }
}
