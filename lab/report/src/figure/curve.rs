//! Lines: a metric over a parameter, or over another metric while the parameter grows.

use experiments::Value;

use super::{Drawn, Frame, Panel, Sample, Whose};
use crate::chart::{Axis, Plot, Scale, Series, short};
use crate::metric;

/// How far apart two sides may lie on one linear axis before one of them is a line on the floor.
const LINEAR_TIMES: f64 = 3.0;
/// The same on a logarithmic one.
const LOG_TIMES: f64 = 40.0;
/// Values that span more are drawn on a logarithmic axis.
const LOG_SPAN: f64 = 40.0;

/// The panel, and one of the processor time beside a panel of throughput, as the papers have it.
pub(super) fn draw(frame: &Frame<'_>, beside: bool) -> Vec<Panel> {
    let definition = frame.definition;
    let mut panels = vec![panel(frame, &definition.y, definition.x_metric.as_deref())];
    let cost = "cpu_cores";
    if beside && definition.x_metric.is_none() && definition.y == "iops" {
        let mut beside = panel(frame, cost, None);
        let title = "CPU use";
        beside.title =
            if beside.title.is_empty() { title.into() } else { format!("{}: {title}", beside.title) };
        panels.push(beside);
    }
    panels
}

fn panel(frame: &Frame<'_>, y_metric: &str, x_metric: Option<&str>) -> Panel {
    let role = &frame.definition.role;
    let value = |metric: &str, sample: &Sample<'_>| sample.cell.median(role, metric);
    let values: Vec<f64> = frame.samples.iter().filter_map(|sample| value(y_metric, sample)).collect();
    let y_scale = scale_of_metric(&values);
    let times = if y_scale == Scale::Log10 { LOG_TIMES } else { LINEAR_TIMES };
    let mut together = frame.together(times, |sample| value(y_metric, sample));
    if let Some(metric) = x_metric {
        together &= frame.together(LINEAR_TIMES, |sample| value(metric, sample));
    }
    let charts = frame.sides(together).into_iter().filter_map(|whose| {
        let svg = chart(frame, whose, y_metric, x_metric).svg();
        (!svg.is_empty()).then_some(Drawn { whose, svg })
    });
    Panel { title: frame.panel.clone(), charts: charts.collect() }
}

fn chart(frame: &Frame<'_>, whose: Whose, y_metric: &str, x_metric: Option<&str>) -> Plot {
    let role = &frame.definition.role;
    let largest = |metric: &str| {
        frame.of(whose).filter_map(|sample| sample.cell.median(role, metric)).fold(0.0, f64::max)
    };
    let y = metric::shown(y_metric, largest(y_metric));
    let x = x_metric.map(|name| (name, metric::shown(name, largest(name))));
    let mut series = Vec::new();
    let mut all_y = Vec::new();
    for published in [false, true] {
        for name in frame.series() {
            let mut cells: Vec<(f64, &Sample<'_>)> = frame
                .of(whose)
                .filter(|sample| sample.published == published && frame.name(sample) == name)
                .filter_map(|sample| Some((frame.x(sample)?.as_f64()?, sample)))
                .collect();
            cells.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut line = Series { name, published, marked: true, ..Series::default() };
            for (parameter, sample) in cells {
                let Some(height) = sample.cell.median(role, y_metric) else { continue };
                let along = match x {
                    Some((name, shown)) => match sample.cell.median(role, name) {
                        Some(value) => value / shown.per,
                        None => continue,
                    },
                    None => parameter,
                };
                let height = height / y.per;
                let interval = sample.cell.interval(role, y_metric).map(|found| found.per(y.per));
                line.tips.push(tip(
                    frame,
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
        Some((name, shown)) => Axis::new(metric::label(name, shown), Scale::Linear),
        None => Axis::new(metric::parameter(&frame.definition.x), scale_of_parameter(&frame.xs())),
    };
    let y_axis = Axis::new(metric::label(y_metric, y), scale_of_metric(&all_y));
    Plot { title: frame.title(&metric::words(y_metric)), x: x_axis, y: y_axis, series, listed: false }
}

fn tip(frame: &Frame<'_>, at: f64, (y, y_unit): (f64, &str), x: Option<(f64, &str)>) -> String {
    let mut tip = format!("{} {}: {} {y_unit}", metric::parameter(&frame.definition.x), short(at), short(y));
    if let Some((x, unit)) = x {
        tip.push_str(&format!(" at {} {unit}", short(x)));
    }
    tip
}

/// Logarithmic where the values span too much for the eye.
pub(super) fn scale_of_metric(values: &[f64]) -> Scale {
    let positive = values.iter().copied().filter(|value| *value > 0.0 && value.is_finite());
    let (low, high) =
        positive.fold((f64::INFINITY, 0.0), |(low, high), value| (value.min(low), value.max(high)));
    if high > low * LOG_SPAN { Scale::Log10 } else { Scale::Linear }
}

/// Powers of two are drawn evenly; so is a list that begins with none at all.
fn scale_of_parameter(values: &[Value]) -> Scale {
    let values: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
    let power = |value: f64| {
        value >= 1.0
            && value <= 2f64.powi(40)
            && (value as u64 as f64) == value
            && (value as u64).is_power_of_two()
    };
    let wide = values.last().is_some_and(|last| *last >= 8.0) && values.len() > 2;
    match values.split_first() {
        Some((first, rest)) if wide && *first == 0.0 && rest.iter().all(|value| power(*value)) => {
            Scale::Steps
        }
        Some(_) if wide && values.iter().all(|value| power(*value)) => Scale::Log2,
        _ => Scale::Linear,
    }
}
