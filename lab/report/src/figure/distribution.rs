//! Cumulative distributions of latency.

use std::collections::BTreeMap;

use experiments::CellRecord;

use super::{Drawn, Frame, Panel, Sample, value_words};
use crate::cells::Cell;
use crate::chart::{Axis, Plot, Scale, Series};
use crate::metric;

/// The papers plot five depths of nine; so many tell the story.
const PANELS_MAX: usize = 6;
/// The last ten-thousandth would push everything else to the left.
const SHOWN: f64 = 0.9995;

/// A panel for each of up to six values along the horizontal axis of the definition.
pub(super) fn draw(frame: &Frame<'_>) -> Vec<Panel> {
    let values = frame.xs();
    let chosen: Vec<usize> = if values.len() <= PANELS_MAX {
        (0..values.len()).collect()
    } else {
        (0..PANELS_MAX).map(|index| index * (values.len() - 1) / (PANELS_MAX - 1)).collect()
    };
    let mut panels = Vec::new();
    for value in chosen.into_iter().map(|index| &values[index]) {
        let at: Vec<Sample<'_>> = frame
            .samples
            .iter()
            .filter(|sample| frame.x(sample).is_some_and(|found| found.same(value)))
            .copied()
            .collect();
        let name = &frame.definition.x;
        let said = format!("{} {}", metric::parameter(name), value_words(name, value));
        let panel = if frame.panel.is_empty() { said } else { format!("{}, {said}", frame.panel) };
        panels.push(draw_one(&Frame { definition: frame.definition, panel, samples: at }));
    }
    panels
}

fn draw_one(frame: &Frame<'_>) -> Panel {
    let role = &frame.definition.role;
    let middle = |sample: &Sample<'_>| at_half(&points(sample.cell, role));
    // Distributions are compared by where they rise, on a logarithmic axis.
    let together = frame.together(30.0, middle);
    let mut charts = Vec::new();
    for whose in frame.sides(together) {
        let mut series: Vec<Series> = Vec::new();
        for sample in frame.of(whose) {
            let mut line = points(sample.cell, role);
            let end = line.iter().position(|point| point.1 >= SHOWN).map_or(line.len(), |index| index + 1);
            line.truncate(end.max(2));
            if line.len() > 1 {
                let few = line.len() <= 24;
                let name = frame.name(sample);
                series.push(Series {
                    name,
                    published: sample.published,
                    points: line,
                    marked: few,
                    ..Series::default()
                });
            }
        }
        let largest = series.iter().flat_map(|line| &line.points).map(|point| point.0).fold(0.0, f64::max);
        let shown = metric::shown("clat_us", largest);
        let mut lows = Vec::new();
        for point in series.iter_mut().flat_map(|line| &mut line.points) {
            point.0 /= shown.per;
            lows.push(point.0);
        }
        let low = lows.iter().copied().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
        let scale = if largest / shown.per > low * 8.0 { Scale::Log10 } else { Scale::Tight };
        let x = Axis::new(format!("completion latency, {}", shown.unit), scale);
        let y = Axis::new("fraction of I/Os", Scale::Linear);
        let title = frame.title("distribution of latency");
        let svg = Plot { title, x, y, series, listed: true }.svg();
        if !svg.is_empty() {
            charts.push(Drawn { whose, svg });
        }
    }
    Panel { title: frame.panel.clone(), charts }
}

fn at_half(points: &[(f64, f64)]) -> Option<f64> {
    points.iter().find(|point| point.1 >= 0.5).map(|point| point.0)
}

/// A cell's distribution: microseconds, and the fraction of I/Os that took no longer. From the
/// histograms of all repetitions; from percentiles where only those are known.
pub fn points(cell: &Cell<'_>, role: &str) -> Vec<(f64, f64)> {
    let mut merged: BTreeMap<u64, u64> = BTreeMap::new();
    for record in cell.measured() {
        let histograms = record.roles.get(role).map(|role| &role.histograms);
        let Some(histograms) = histograms else { continue };
        let Some(pairs) = histograms.get("clat").or_else(|| histograms.get("lat")) else { continue };
        for (ns, count) in pairs {
            let sum = merged.entry(*ns).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
    let total: u128 = merged.values().map(|count| u128::from(*count)).sum();
    if total == 0 {
        return cell.measured().next().map(|record| percentiles(record, role)).unwrap_or_default();
    }
    let mut below = 0u128;
    let mut points = Vec::with_capacity(merged.len());
    for (ns, count) in merged {
        below += u128::from(count);
        points.push((ns as f64 / 1e3, below as f64 / total as f64));
    }
    points
}

/// From metrics as `clat_p99_us`; `p999` is 99.9 %.
fn percentiles(record: &CellRecord, role: &str) -> Vec<(f64, f64)> {
    let Some(role) = record.roles.get(role) else { return Vec::new() };
    let mut points: Vec<(f64, f64)> = role
        .metrics
        .iter()
        .filter_map(|(name, value)| {
            let digits = name.strip_prefix("clat_p")?.strip_suffix("_us")?;
            let number: f64 = digits.parse().ok()?;
            let fraction =
                if digits.len() > 2 { number / 10f64.powi(digits.len() as i32) } else { number / 100.0 };
            (0.0..=1.0).contains(&fraction).then_some((*value, fraction))
        })
        .collect();
    points.sort_by(|a, b| a.1.total_cmp(&b.1));
    points
}
