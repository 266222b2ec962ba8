//! Cumulative distributions of latency.

use std::collections::BTreeMap;

use lab_experiments::CellRecord;

use super::{FigurePanel, PanelData, PlottedCell, RenderedChart, format_parameter_value};
use crate::cells::ExperimentCell;
use crate::chart::{Axis, AxisScale, Plot, Series};
use crate::metric;

/// Maximum number of x values that get a panel; the papers plot five depths of nine.
const PANELS_MAX: usize = 6;
/// Fraction of I/Os shown; the extreme tail would compress the rest of the axis.
const FRACTION_MAX: f64 = 0.9995;

/// One panel for each of up to six values of the x axis.
pub(super) fn draw(data: &PanelData<'_>) -> Vec<FigurePanel> {
    let values = data.x_values();
    let selected: Vec<usize> = if values.len() <= PANELS_MAX {
        (0..values.len()).collect()
    } else {
        (0..PANELS_MAX).map(|index| index * (values.len() - 1) / (PANELS_MAX - 1)).collect()
    };
    let mut panels = Vec::new();
    for value in selected.into_iter().map(|index| &values[index]) {
        let at: Vec<PlottedCell<'_>> = data
            .cells
            .iter()
            .filter(|plotted| data.x_value(plotted).is_some_and(|found| found.same(value)))
            .copied()
            .collect();
        let name = &data.definition.x;
        let label = format!("{} {}", metric::parameter_name(name), format_parameter_value(name, value));
        let panel = if data.panel.is_empty() { label } else { format!("{}, {label}", data.panel) };
        panels.push(draw_one(&PanelData { definition: data.definition, panel, cells: at }));
    }
    panels
}

fn draw_one(data: &PanelData<'_>) -> FigurePanel {
    let role = &data.definition.role;
    let median = |plotted: &PlottedCell<'_>| distribution_median(&points(plotted.cell, role));
    // Distributions are compared by their medians, on a logarithmic axis.
    let shared = data.fits_one_scale(30.0, median);
    let mut charts = Vec::new();
    for source in data.chart_sources(shared) {
        let mut series: Vec<Series> = Vec::new();
        for plotted in data.cells_from(source) {
            let mut line = points(plotted.cell, role);
            let end =
                line.iter().position(|point| point.1 >= FRACTION_MAX).map_or(line.len(), |index| index + 1);
            line.truncate(end.max(2));
            if line.len() > 1 {
                let marked = line.len() <= 24;
                let name = data.series_name(plotted);
                series.push(Series {
                    name,
                    published: plotted.published,
                    points: line,
                    marked,
                    ..Series::default()
                });
            }
        }
        let largest = series.iter().flat_map(|line| &line.points).map(|point| point.0).fold(0.0, f64::max);
        let latencies = || series.iter().flat_map(|line| &line.points).map(|point| point.0);
        let low = latencies().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
        let logarithmic = largest > low * 8.0;
        let shown = metric::axis_unit("clat_us", latencies(), logarithmic);
        for point in series.iter_mut().flat_map(|line| &mut line.points) {
            point.0 /= shown.divisor;
        }
        let scale = if logarithmic { AxisScale::Log10 } else { AxisScale::LinearFromMin };
        let x = Axis::new(format!("completion latency, {}", shown.unit), scale);
        let y = Axis::new("fraction of I/Os", AxisScale::Linear);
        let title = data.title("latency distribution");
        let svg = Plot { title, x, y, series, legend: true }.svg();
        if !svg.is_empty() {
            charts.push(RenderedChart { source, svg });
        }
    }
    FigurePanel { title: data.panel.clone(), charts }
}

fn distribution_median(points: &[(f64, f64)]) -> Option<f64> {
    points.iter().find(|point| point.1 >= 0.5).map(|point| point.0)
}

/// A cell's cumulative distribution as (latency in us, fraction of I/Os at or below it). Merges the histograms
/// of all repetitions; without histograms, uses the percentiles of the first repetition.
pub fn points(cell: &ExperimentCell<'_>, role: &str) -> Vec<(f64, f64)> {
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

/// The distribution from percentile metrics such as `clat_p99_us`; `p999` is 99.9 %.
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
