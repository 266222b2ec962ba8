//! Turns the cells of an experiment into a figure in the style of its paper, next to the published values.
//!
//! An experiment's definition names the axes and the parameters that distinguish series. Other parameters that
//! vary split the figure into panels. If published and measured values fit one scale, they share a chart;
//! otherwise they get two charts side by side, because only the shapes are comparable.

mod bars;
mod curve;
mod distribution;
mod over_time;
#[cfg(test)]
mod tests;

use lab_experiments::reference::APPROXIMATE;
use lab_experiments::{CellParameters, ExperimentDefinition, ParameterValue};

use crate::cells::ExperimentCell;
use crate::chart::canonical_rank;
use crate::metric;

pub use distribution::points as distribution_points;
pub use over_time::over_time;

/// Maximum number of panels of one figure; the table of values holds the rest.
const PANELS_MAX: usize = 12;

/// A rendered figure.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// One panel for each combination of the parameters that are neither an axis nor a series.
    pub panels: Vec<FigurePanel>,
    /// Notes for the reader, for example about panels that were left out.
    pub notes: Vec<String>,
}

/// One panel of a figure.
#[derive(Clone, Debug, Default)]
pub struct FigurePanel {
    /// The parameters of the panel; empty if there is only one panel.
    pub title: String,
    /// One chart for measured and published values together, or one for each.
    pub charts: Vec<RenderedChart>,
}

/// One rendered chart.
#[derive(Clone, Debug, Default)]
pub struct RenderedChart {
    /// The source of the values.
    pub source: FigureSource,
    /// The `<svg>` element.
    pub svg: String,
}

/// The source of the values in a chart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FigureSource {
    /// Measured in this run.
    #[default]
    Measured,
    /// Published by the study.
    Published,
    /// Measured and published values.
    Both,
}

impl FigureSource {
    /// The caption of a chart with this source.
    pub fn label(self) -> &'static str {
        match self {
            FigureSource::Measured => "this machine",
            FigureSource::Published => "published",
            FigureSource::Both => "this machine (solid) and published (dashed, light)",
        }
    }
}

/// A cell in a figure.
#[derive(Clone, Copy)]
pub(crate) struct PlottedCell<'a> {
    pub(crate) cell: &'a ExperimentCell<'a>,
    pub(crate) published: bool,
}

/// The input of one panel: the definition, the panel's title and the cells in it.
pub(crate) struct PanelData<'a> {
    pub(crate) definition: &'a ExperimentDefinition,
    pub(crate) panel: String,
    pub(crate) cells: Vec<PlottedCell<'a>>,
}

/// Renders the figure of a definition from `measured` and `published` cells. `with_cpu_use` adds a panel of
/// CPU use to a figure of throughput; callers pass `false` if another figure shows it.
pub fn draw(
    definition: &ExperimentDefinition,
    measured: &[&ExperimentCell<'_>],
    published: &[&ExperimentCell<'_>],
    with_cpu_use: bool,
) -> Figure {
    let mut plotted_cells: Vec<PlottedCell<'_>> = Vec::new();
    plotted_cells.extend(measured.iter().map(|cell| PlottedCell { cell, published: false }));
    plotted_cells.extend(published.iter().map(|cell| PlottedCell { cell, published: true }));
    let is_measured = |plotted: &PlottedCell<'_>| plotted.cell.measured().next().is_some();
    plotted_cells.retain(is_measured);
    let mut figure = Figure::default();
    let mut inferred: Vec<String> = Vec::new();
    for plotted in plotted_cells.iter().filter(|plotted| plotted.published) {
        let approximate =
            plotted.cell.records.iter().any(|record| record.notes.iter().any(|note| note == APPROXIMATE));
        let name = plotted.cell.parameter_label();
        if approximate && !inferred.contains(&name) {
            inferred.push(name);
        }
    }
    if !inferred.is_empty() {
        figure.notes.push(format!("≈ Published values that are {APPROXIMATE}: {}.", inferred.join("; ")));
    }
    let mut panels_data = split_into_panels(definition, plotted_cells);
    if panels_data.len() > PANELS_MAX {
        let more = panels_data.len() - PANELS_MAX;
        figure.notes.push(format!("{more} more panels are not drawn; the table holds their values."));
        panels_data.truncate(PANELS_MAX);
    }
    for data in &panels_data {
        figure.panels.extend(panels(data, with_cpu_use));
    }
    figure.panels.retain(|panel| !panel.charts.is_empty());
    figure
}

fn panels(data: &PanelData<'_>, with_cpu_use: bool) -> Vec<FigurePanel> {
    let numeric =
        || data.cells.iter().any(|plotted| data.x_value(plotted).and_then(|x| x.as_f64()).is_some());
    match data.definition.shape.as_str() {
        "cdf" => distribution::draw(data),
        "heatmap" => vec![bars::heatmap(data)],
        "table" => bars::table(data),
        "breakdown" if bars::has_shares(data) => vec![bars::breakdown(data)],
        "curve" if numeric() => curve::draw(data, with_cpu_use),
        // Values without a numeric x axis are drawn as bars.
        _ => bars::draw(data),
    }
}

impl PanelData<'_> {
    /// The value of a cell on the x axis.
    pub(crate) fn x_value<'b>(&self, plotted: &PlottedCell<'b>) -> Option<&'b ParameterValue> {
        plotted.cell.parameters.get(&self.definition.x)
    }

    /// The distinct values on the x axis: numbers ascending, then names in the order of all charts.
    pub(crate) fn x_values(&self) -> Vec<ParameterValue> {
        let mut values: Vec<ParameterValue> = Vec::new();
        for value in self.cells.iter().filter_map(|plotted| self.x_value(plotted)) {
            if !values.iter().any(|other| other.same(value)) {
                values.push(value.clone());
            }
        }
        values.sort_by(|a, b| match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (None, None) => rank(a).cmp(&rank(b)),
        });
        values
    }

    /// The distinct names of the series: numbers ascending, stacks and schedulers in the order of all charts.
    pub(crate) fn series_names(&self) -> Vec<String> {
        let mut named: Vec<(String, Vec<(f64, usize)>)> = Vec::new();
        for plotted in &self.cells {
            let name = self.series_name(plotted);
            if !named.iter().any(|(known, _)| *known == name) {
                let value = |parameter| plotted.cell.parameters.get(parameter);
                let place = |value: Option<&ParameterValue>| {
                    let number = value.and_then(ParameterValue::as_f64);
                    (number.unwrap_or(f64::INFINITY), value.map_or(usize::MAX, rank))
                };
                let places = self.definition.series.iter().map(|parameter| place(value(parameter)));
                named.push((name, places.collect()));
            }
        }
        named.sort_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
        named.into_iter().map(|(name, _)| name).collect()
    }

    /// The parameters that distinguish series, for the title of an axis.
    pub(crate) fn series_label(&self) -> String {
        let names = self.definition.series.iter().map(|name| metric::parameter_name(name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The name of the series that a cell belongs to.
    pub(crate) fn series_name(&self, plotted: &PlottedCell<'_>) -> String {
        series_name(self.definition, plotted.cell)
    }

    /// The accessible name of a chart (`aria-label`).
    pub(crate) fn title(&self, what: &str) -> String {
        let mut title = self.definition.title.clone();
        for more in [self.panel.as_str(), what] {
            if !more.is_empty() {
                title.push_str(": ");
                title.push_str(more);
            }
        }
        title
    }

    /// Whether the maxima of measured and published values differ by less than `ratio_max`, so that they can
    /// share a chart. True if either side has no positive value.
    pub(crate) fn fits_one_scale(
        &self,
        ratio_max: f64,
        value: impl Fn(&PlottedCell<'_>) -> Option<f64>,
    ) -> bool {
        let largest = |published: bool| {
            let side = self.cells.iter().filter(|plotted| plotted.published == published);
            side.filter_map(&value).filter(|value| value.is_finite()).fold(0.0, f64::max)
        };
        let (measured, published) = (largest(false), largest(true));
        measured <= 0.0
            || published <= 0.0
            || (measured / published < ratio_max && published / measured < ratio_max)
    }

    /// The charts that a panel needs: one for both sources, or one for each that has cells.
    pub(crate) fn chart_sources(&self, one_chart: bool) -> Vec<FigureSource> {
        let any = |published: bool| self.cells.iter().any(|plotted| plotted.published == published);
        match (any(false), any(true)) {
            (true, true) if one_chart => vec![FigureSource::Both],
            (true, true) => vec![FigureSource::Measured, FigureSource::Published],
            (true, false) => vec![FigureSource::Measured],
            (false, true) => vec![FigureSource::Published],
            (false, false) => Vec::new(),
        }
    }

    pub(crate) fn cells_from(&self, source: FigureSource) -> impl Iterator<Item = &PlottedCell<'_>> {
        self.cells.iter().filter(move |plotted| match source {
            FigureSource::Both => true,
            FigureSource::Measured => !plotted.published,
            FigureSource::Published => plotted.published,
        })
    }
}

/// The place of a name among stacks and schedulers.
fn rank(value: &ParameterValue) -> usize {
    value.as_str().map_or(0, canonical_rank)
}

/// The display name of a series: the values of the parameters that distinguish series.
fn series_name(definition: &ExperimentDefinition, cell: &ExperimentCell<'_>) -> String {
    let mut name = String::new();
    for parameter in &definition.series {
        let Some(value) = cell.parameters.get(parameter) else { continue };
        let label = match (parameter.as_str(), value.as_f64()) {
            ("jobs", Some(count)) => format!("{count} proc"),
            ("iodepth", Some(depth)) => format!("depth {depth}"),
            _ => format_parameter_value(parameter, value),
        };
        if !name.is_empty() {
            name.push_str(if label.contains(' ') { ", " } else { "/" });
        }
        name.push_str(&label);
    }
    match (name.is_empty(), cell.series.is_empty()) {
        (false, _) => name,
        (true, false) => cell.series.to_string(),
        (true, true) => cell.experiment.to_string(),
    }
}

fn format_size(bytes: f64) -> String {
    match bytes {
        _ if bytes >= 1024.0 && bytes % 1024.0 == 0.0 => format!("{} KiB", bytes / 1024.0),
        _ => format!("{bytes} B"),
    }
}

/// The display form of a parameter's value; sizes are in B or KiB.
pub(crate) fn format_parameter_value(name: &str, value: &ParameterValue) -> String {
    match (name, value.as_f64()) {
        ("block_bytes" | "background_block_bytes", Some(bytes)) => format_size(bytes),
        _ => value.to_string(),
    }
}

/// Splits cells into panels until no two cells of a panel have the same series and x value.
fn split_into_panels<'a>(
    definition: &'a ExperimentDefinition,
    plotted_cells: Vec<PlottedCell<'a>>,
) -> Vec<PanelData<'a>> {
    /// Each round splits by one parameter that varies; there are about a dozen parameters.
    const DEPTH_MAX: usize = 12;
    let mut panels_data = vec![PanelData { definition, panel: String::new(), cells: plotted_cells }];
    for _ in 0..DEPTH_MAX {
        let mut parts = Vec::new();
        let mut changed = false;
        for data in panels_data {
            match splitting_parameter(&data) {
                Some(name) => {
                    changed = true;
                    parts.extend(split_by(data, &name));
                }
                None => parts.push(data),
            }
        }
        panels_data = parts;
        if !changed {
            break;
        }
    }
    panels_data
}

/// A parameter that differs between two cells with the same series and x value.
fn splitting_parameter(data: &PanelData<'_>) -> Option<String> {
    use std::collections::HashMap;
    let mut positions: HashMap<(bool, String, String), &CellParameters> = HashMap::new();
    for plotted in &data.cells {
        let x = data.x_value(plotted).map(ParameterValue::to_string).unwrap_or_default();
        let position = (plotted.published, data.series_name(plotted), x);
        let Some(other) = positions.insert(position, plotted.cell.parameters) else { continue };
        let differs = plotted.cell.parameters.iter().find(|(name, value)| {
            let drawn = **name == data.definition.x || data.definition.series.contains(name);
            !drawn && other.get(*name).is_none_or(|found| !found.same(value))
        });
        if let Some((name, _)) = differs {
            return Some(name.clone());
        }
    }
    None
}

fn split_by<'a>(data: PanelData<'a>, name: &str) -> Vec<PanelData<'a>> {
    let mut panels_data: Vec<(ParameterValue, PanelData<'a>)> = Vec::new();
    let mut in_all_panels = Vec::new();
    for plotted in data.cells {
        let Some(value) = plotted.cell.parameters.get(name) else {
            in_all_panels.push(plotted);
            continue;
        };
        match panels_data.iter_mut().find(|(other, _)| other.same(value)) {
            Some((_, part)) => part.cells.push(plotted),
            None => {
                let label =
                    format!("{} {}", metric::parameter_name(name), format_parameter_value(name, value));
                let panel = if data.panel.is_empty() { label } else { format!("{}, {label}", data.panel) };
                let part = PanelData { definition: data.definition, panel, cells: vec![plotted] };
                panels_data.push((value.clone(), part));
            }
        }
    }
    panels_data
        .sort_by(|(a, _), (b, _)| a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(std::cmp::Ordering::Equal));
    let mut panels_data: Vec<PanelData<'a>> = panels_data.into_iter().map(|(_, data)| data).collect();
    // A cell without the parameter appears in every panel.
    for part in &mut panels_data {
        part.cells.extend(in_all_panels.iter().copied());
    }
    panels_data
}
