//! Bar charts, heat maps, and stacked columns of shares.

use std::collections::BTreeSet;

use lab_experiments::ParameterValue;

use super::{FigurePanel, FigureSource, PanelData, PlottedCell, RenderedChart, format_parameter_value};
use crate::chart::{BarChart, BarGroup, ChartBar, Heatmap, StackedColumn, StackedColumns};
use crate::metric;

/// Maximum ratio of measured to published values for one scale; see `curve`.
const LINEAR_RATIO_MAX: f64 = 4.0;

/// Bars grouped by x value. A metric that was also measured for the whole machine gets a second panel.
pub(super) fn draw(data: &PanelData<'_>) -> Vec<FigurePanel> {
    let role = data.definition.role.as_str();
    let mut panels = vec![role_panel(data, role)];
    let machine = |plotted: &PlottedCell<'_>| plotted.cell.median("all", &data.definition.y).is_some();
    // Where nothing else worked for the generator, both are the same.
    let differs = |plotted: &PlottedCell<'_>| {
        let value = |role| plotted.cell.median(role, &data.definition.y);
        value(role).zip(value("all")).is_some_and(|(own, all)| (own - all).abs() > 0.01 * all.abs())
    };
    if role != "all" && data.cells.iter().any(machine) && data.cells.iter().any(differs) {
        for panel in &mut panels {
            panel.title = join_titles(&panel.title, "generator only");
        }
        let mut whole = role_panel(data, "all");
        whole.title = join_titles(&whole.title, "whole machine");
        panels.push(whole);
    }
    panels
}

fn join_titles(title: &str, more: &str) -> String {
    if title.is_empty() { more.to_string() } else { format!("{title}, {more}") }
}

fn role_panel(data: &PanelData<'_>, role: &str) -> FigurePanel {
    let definition = data.definition;
    let median = |plotted: &PlottedCell<'_>| plotted.cell.median(role, &definition.y);
    let mut charts = Vec::new();
    for source in data.chart_sources(data.fits_one_scale(LINEAR_RATIO_MAX, median)) {
        let largest = data.cells_from(source).filter_map(median).fold(0.0, f64::max);
        let shown = metric::display_unit(&definition.y, largest);
        let groups = groups(data, source, role, shown);
        let title = data.title(&metric::display_name(&definition.y));
        let label = metric::label_with_unit(&definition.y, shown);
        let svg = BarChart { title, label, x_label: group_label(data), groups }.svg();
        if !svg.is_empty() {
            charts.push(RenderedChart { source, svg });
        }
    }
    FigurePanel { title: data.panel.clone(), charts }
}

/// The groups of bars. Every group has a place for each series that has a bar in one of them, in the same order; the
/// value of a missing one is NaN.
fn groups(
    data: &PanelData<'_>,
    source: FigureSource,
    role: &str,
    shown: metric::DisplayUnit,
) -> Vec<BarGroup> {
    let y = &data.definition.y;
    let cells: Vec<(&PlottedCell<'_>, String)> =
        data.cells_from(source).map(|plotted| (plotted, data.series_name(plotted))).collect();
    let has_x = |plotted: &PlottedCell<'_>| data.x_value(plotted).is_some();
    let mut places: Vec<(String, bool)> = Vec::new();
    for name in data.series_names() {
        for published in [false, true] {
            let mut same = cells.iter().filter(|(cell, of)| *of == name && cell.published == published);
            if same.any(|(cell, _)| has_x(cell) && cell.cell.median(role, y).is_some()) {
                places.push((name.clone(), published));
            }
        }
    }
    // A series that is in one group only leaves no gap in the others.
    let one_series = data.definition.series.contains(&data.definition.x);
    let mut groups = Vec::new();
    for x in group_names(data) {
        let bar = |name: &str, published: bool| {
            let mut same = cells.iter().filter(|(cell, of)| of == name && cell.published == published);
            let found = same.find(|(cell, _)| group_name(data, cell) == x);
            let value = found.and_then(|(cell, _)| cell.cell.median(role, y));
            let interval = found.and_then(|(cell, _)| cell.cell.interval(role, y));
            ChartBar {
                name: name.to_string(),
                value: value.map_or(f64::NAN, |value| value / shown.divisor),
                interval: interval.map(|found| found.divided_by(shown.divisor)),
                published,
            }
        };
        // A series without an x value is a group of its own.
        let own = cells.iter().any(|(cell, of)| *of == x && !has_x(cell));
        let bars: Vec<ChartBar> = if own {
            [false, true]
                .map(|published| bar(&x, published))
                .into_iter()
                .filter(|bar| !bar.value.is_nan())
                .collect()
        } else {
            let bars = places.iter().map(|(name, published)| bar(name, *published));
            bars.filter(|bar| !one_series || bar.value.is_finite()).collect()
        };
        if bars.iter().any(|bar| bar.value.is_finite()) {
            groups.push(BarGroup { name: x, bars });
        }
    }
    groups
}

/// The title of the axis of groups.
fn group_label(data: &PanelData<'_>) -> String {
    let any = data.cells.iter().any(|plotted| data.x_value(plotted).is_some());
    if any { metric::parameter_name(&data.definition.x) } else { data.series_label() }
}

fn group_name(data: &PanelData<'_>, plotted: &PlottedCell<'_>) -> String {
    let x = &data.definition.x;
    data.x_value(plotted).map_or_else(|| data.series_name(plotted), |value| format_parameter_value(x, value))
}

/// Names of the groups in the order of the x axis; series without an x value come last, under their own name.
fn group_names(data: &PanelData<'_>) -> Vec<String> {
    let x = &data.definition.x;
    let mut names: Vec<String> =
        data.x_values().iter().map(|value| format_parameter_value(x, value)).collect();
    for plotted in &data.cells {
        let name = group_name(data, plotted);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// A published table as heat maps: the reader's values, and the writer's where both were measured.
pub(super) fn table(data: &PanelData<'_>) -> Vec<FigurePanel> {
    let mut panels = vec![heatmap(data)];
    let writer = |plotted: &PlottedCell<'_>| plotted.cell.median("bg", &data.definition.y).is_some();
    if data.definition.role == "fg" && data.cells.iter().any(writer) {
        panels[0].title = join_titles(&panels[0].title, "the reader");
        let mut other = role_heatmap(data, "bg");
        other.title = join_titles(&other.title, "the concurrent writer");
        panels.push(other);
    }
    panels
}

/// A heat map of series by x value, relative to a baseline cell if the definition names one.
pub(super) fn heatmap(data: &PanelData<'_>) -> FigurePanel {
    role_heatmap(data, &data.definition.role)
}

fn role_heatmap(data: &PanelData<'_>, role: &str) -> FigurePanel {
    let definition = data.definition;
    let value = |plotted: &PlottedCell<'_>| {
        let base = baseline(data, plotted.published);
        let found = plotted.cell.median(role, &definition.y)?;
        if definition.relative_to.is_empty() { Some(found) } else { base.map(|base| found / base) }
    };
    let sources = match data.chart_sources(true).first() {
        Some(FigureSource::Both) => vec![FigureSource::Measured, FigureSource::Published],
        Some(source) => vec![*source],
        None => Vec::new(),
    };
    // Both maps share a colour range, unless one of them would then use only its pale end.
    let shared = data.fits_one_scale(LINEAR_RATIO_MAX * 2.0, value);
    let mut charts = Vec::new();
    for source in sources {
        let largest = data.cells_from(source).filter_map(value).fold(0.0, f64::max);
        let relative = !definition.relative_to.is_empty();
        let shown = if relative {
            metric::DisplayUnit { divisor: 1.0, unit: "times" }
        } else {
            metric::display_unit(&definition.y, largest)
        };
        let range = data.cells_from(if shared { FigureSource::Both } else { source }).filter_map(value);
        let range = Heatmap::range_of(range.map(|value| value / shown.divisor));
        let columns = data.x_values();
        let row = |name: &String| {
            let of = |x: &ParameterValue| {
                let mut cells = data.cells_from(source).filter(|plotted| data.series_name(plotted) == *name);
                cells.find(|plotted| data.x_value(plotted).is_some_and(|found| found.same(x)))
            };
            let values: Vec<Option<f64>> =
                columns.iter().map(|x| of(x).and_then(value).map(|value| value / shown.divisor)).collect();
            (name.clone(), values)
        };
        let names = data.series_names();
        let rows: Vec<_> =
            names.iter().map(row).filter(|(_, values)| values.iter().any(Option::is_some)).collect();
        let x = &definition.x;
        let label = if relative {
            let baseline_label: Vec<String> =
                definition.relative_to.iter().map(|(name, value)| format!("{name} {value}")).collect();
            format!("{}, relative to {}", metric::display_name(&definition.y), baseline_label.join(", "))
        } else {
            metric::label_with_unit(&definition.y, shown)
        };
        let columns = columns.iter().map(|value| format_parameter_value(x, value)).collect();
        let title = data.title(&metric::display_name(&definition.y));
        let (x_label, y_label) = (metric::parameter_name(x), data.series_label());
        let svg = Heatmap { title, label, x_label, y_label, columns, rows, range }.svg();
        if !svg.is_empty() {
            charts.push(RenderedChart { source, svg });
        }
    }
    FigurePanel { title: data.panel.clone(), charts }
}

/// The baseline value of measured or published cells.
fn baseline(data: &PanelData<'_>, published: bool) -> Option<f64> {
    let definition = data.definition;
    let is_base = |plotted: &&PlottedCell<'_>| {
        plotted.published == published
            && definition
                .relative_to
                .iter()
                .all(|(name, value)| plotted.cell.parameters.get(name).is_some_and(|found| found.same(value)))
    };
    let found = data.cells.iter().find(is_base)?;
    found.cell.median(&definition.role, &definition.y).filter(|base| *base > 0.0)
}

fn class_name(class: &str) -> String {
    match class {
        "io_library" => "I/O library".to_string(),
        "driver" => "NVMe driver".to_string(),
        other => other.replace('_', " "),
    }
}

/// Whether any cell has a profile by class of functions (`share_*` metrics).
pub(super) fn has_shares(data: &PanelData<'_>) -> bool {
    let records = data.cells.iter().flat_map(|plotted| plotted.cell.measured());
    let roles = records.filter_map(|record| record.roles.get(&data.definition.role));
    roles.flat_map(|role| role.metrics.keys()).any(|name| name.starts_with("share_"))
}

/// A stacked column for each series, with one part for each class of functions in the profile.
pub(super) fn breakdown(data: &PanelData<'_>) -> FigurePanel {
    /// From the bottom up, in the order in which a request passes the layers.
    const ORDER: [&str; 8] =
        ["generator", "io_library", "kernel", "block_layer", "scheduler", "locks", "driver", "idle"];
    let role = &data.definition.role;
    let mut classes: BTreeSet<String> = BTreeSet::new();
    for record in data.cells.iter().flat_map(|plotted| plotted.cell.measured()) {
        let Some(role) = record.roles.get(role) else { continue };
        classes.extend(
            role.metrics
                .keys()
                .filter_map(|name| Some(name.strip_prefix("share_")?.strip_suffix("_pct")?.to_string())),
        );
    }
    let mut classes: Vec<String> = classes.into_iter().collect();
    classes.sort_by_key(|class| ORDER.iter().position(|known| known == class).unwrap_or(ORDER.len()));
    let mut columns = Vec::new();
    for name in data.series_names() {
        for plotted in data.cells.iter().filter(|plotted| data.series_name(plotted) == name) {
            let share = |class: &String| {
                let value = plotted.cell.median(role, &format!("share_{class}_pct"))?;
                Some((class_name(class), value))
            };
            let parts: Vec<(String, f64)> = classes.iter().filter_map(share).collect();
            if parts.is_empty() {
                continue;
            }
            let label = if plotted.published { format!("{name}, publ.") } else { name.clone() };
            columns.push(StackedColumn { name: label, published: plotted.published, parts });
        }
    }
    let (title, label) = (data.title("shares"), "share of samples, %".to_string());
    let stack = StackedColumns { title, label, x_label: data.series_label(), columns };
    let source = data.chart_sources(true).first().copied().unwrap_or_default();
    let charts = if stack.is_empty() { Vec::new() } else { vec![RenderedChart { source, svg: stack.svg() }] };
    FigurePanel { title: data.panel.clone(), charts }
}
