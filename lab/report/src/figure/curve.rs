//! Line charts: a metric over a parameter, or over another metric with the parameter along the curve.

use lab_experiments::ParameterValue;

use super::{FigurePanel, FigureSource, PanelData, PlottedCell, RenderedChart};
use crate::chart::{Axis, AxisScale, Plot, Series, format_number};
use crate::metric;

/// Maximum ratio of measured to published values on one linear axis; beyond it the smaller ones look flat.
const LINEAR_RATIO_MAX: f64 = 3.0;
/// The same for a logarithmic axis.
const LOG_RATIO_MAX: f64 = 40.0;
/// Values source maximum exceeds the minimum by more than this factor use a logarithmic axis.
const LOG_SPAN: f64 = 40.0;

/// Renders the panel. `with_cpu_use` adds one of CPU use to a panel of throughput, as the papers do.
pub(super) fn draw(data: &PanelData<'_>, with_cpu_use: bool) -> Vec<FigurePanel> {
    let definition = data.definition;
    let mut panels = vec![panel(data, &definition.y, definition.x_metric.as_deref())];
    let cost = "cpu_cores";
    if with_cpu_use && definition.x_metric.is_none() && definition.y == "iops" {
        let mut cpu_panel = panel(data, cost, None);
        let title = "CPU use";
        cpu_panel.title =
            if cpu_panel.title.is_empty() { title.into() } else { format!("{}: {title}", cpu_panel.title) };
        panels.push(cpu_panel);
    }
    panels
}

fn panel(data: &PanelData<'_>, y_metric: &str, x_metric: Option<&str>) -> FigurePanel {
    let role = &data.definition.role;
    let value = |metric: &str, plotted: &PlottedCell<'_>| plotted.cell.median(role, metric);
    let values: Vec<f64> = data.cells.iter().filter_map(|plotted| value(y_metric, plotted)).collect();
    let y_scale = scale_of_metric(&values);
    let ratio_max = if y_scale == AxisScale::Log10 { LOG_RATIO_MAX } else { LINEAR_RATIO_MAX };
    let mut shared = data.fits_one_scale(ratio_max, |plotted| value(y_metric, plotted));
    if let Some(metric) = x_metric {
        shared &= data.fits_one_scale(LINEAR_RATIO_MAX, |plotted| value(metric, plotted));
    }
    let charts = data.chart_sources(shared).into_iter().filter_map(|source| {
        let svg = chart(data, source, y_metric, x_metric).svg();
        (!svg.is_empty()).then_some(RenderedChart { source, svg })
    });
    FigurePanel { title: data.panel.clone(), charts: charts.collect() }
}

fn chart(data: &PanelData<'_>, source: FigureSource, y_metric: &str, x_metric: Option<&str>) -> Plot {
    let role = &data.definition.role;
    let largest = |metric: &str| {
        data.cells_from(source).filter_map(|plotted| plotted.cell.median(role, metric)).fold(0.0, f64::max)
    };
    let heights: Vec<f64> =
        data.cells_from(source).filter_map(|plotted| plotted.cell.median(role, y_metric)).collect();
    let logarithmic = scale_of_metric(&heights) == AxisScale::Log10;
    let y = metric::axis_unit(y_metric, heights.iter().copied(), logarithmic);
    let x = x_metric.map(|name| (name, metric::display_unit(name, largest(name))));
    let mut series = Vec::new();
    let mut all_y = Vec::new();
    for published in [false, true] {
        for name in data.series_names() {
            let mut cells: Vec<(f64, &PlottedCell<'_>)> = data
                .cells_from(source)
                .filter(|plotted| plotted.published == published && data.series_name(plotted) == name)
                .filter_map(|plotted| Some((data.x_value(plotted)?.as_f64()?, plotted)))
                .collect();
            cells.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut line = Series { name, published, marked: true, ..Series::default() };
            for (parameter, plotted) in cells {
                let Some(height) = plotted.cell.median(role, y_metric) else { continue };
                let along = match x {
                    Some((name, shown)) => match plotted.cell.median(role, name) {
                        Some(value) => value / shown.divisor,
                        None => continue,
                    },
                    None => parameter,
                };
                let height = height / y.divisor;
                let interval = plotted.cell.interval(role, y_metric).map(|found| found.divided_by(y.divisor));
                line.tips.push(tip(
                    data,
                    parameter,
                    (height, y.unit),
                    x.map(|(_, shown)| (along, shown.unit)),
                ));
                line.points.push((along, height));
                line.intervals.push(interval);
                all_y.push(height);
            }
            if !line.points.is_empty() {
                series.push(line);
            }
        }
    }
    let x_axis = match x {
        Some((name, shown)) => Axis::new(metric::label_with_unit(name, shown), AxisScale::Linear),
        None => Axis::new(metric::parameter_name(&data.definition.x), scale_of_parameter(&data.x_values())),
    };
    let y_axis = Axis::new(metric::label_with_unit(y_metric, y), scale_of_metric(&all_y));
    Plot { title: data.title(&metric::display_name(y_metric)), x: x_axis, y: y_axis, series, legend: false }
}

fn tip(data: &PanelData<'_>, at: f64, (y, y_unit): (f64, &str), x: Option<(f64, &str)>) -> String {
    let mut tip = format!(
        "{} {}: {} {y_unit}",
        metric::parameter_name(&data.definition.x),
        format_number(at),
        format_number(y)
    );
    if let Some((x, unit)) = x {
        tip.push_str(&format!(" at {} {unit}", format_number(x)));
    }
    tip
}

/// Logarithmic for values that span more than [`LOG_SPAN`].
pub(super) fn scale_of_metric(values: &[f64]) -> AxisScale {
    let positive = values.iter().copied().filter(|value| *value > 0.0 && value.is_finite());
    let (low, high) =
        positive.fold((f64::INFINITY, 0.0), |(low, high), value| (value.min(low), value.max(high)));
    if high > low * LOG_SPAN { AxisScale::Log10 } else { AxisScale::Linear }
}

/// Powers of two are spaced evenly; so are powers of two that are preceded by 0.
fn scale_of_parameter(values: &[ParameterValue]) -> AxisScale {
    let values: Vec<f64> = values.iter().filter_map(ParameterValue::as_f64).collect();
    let power = |value: f64| {
        value >= 1.0
            && value <= 2f64.powi(40)
            && (value as u64 as f64) == value
            && (value as u64).is_power_of_two()
    };
    let wide = values.last().is_some_and(|last| *last >= 8.0) && values.len() > 2;
    match values.split_first() {
        Some((first, rest)) if wide && *first == 0.0 && rest.iter().all(|value| power(*value)) => {
            AxisScale::Ordinal
        }
        Some(_) if wide && values.iter().all(|value| power(*value)) => AxisScale::Log2,
        _ => AxisScale::Linear,
    }
}
