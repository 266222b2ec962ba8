//! From cells to figures: each drawn as its paper draws it, with what was published beside it.
//!
//! An experiment's definition says what lies along the axes and what tells lines apart. Parameters that
//! it does not name, and that still vary, become panels. Where the published values lie on the same
//! scale as those measured, both share a chart; where they do not, two charts stand side by side, since
//! it is the shape that is compared.

mod bars;
mod curve;
mod distribution;
#[cfg(test)]
mod tests;

use experiments::{Definition, Parameters, Value};

use crate::cells::Cell;
use crate::metric;

pub use distribution::points as distribution_points;

/// Most panels of one figure; the table holds what is not drawn.
const PANELS_MAX: usize = 12;

/// A figure, drawn.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// One for each panel of the paper, or for each value of what is not on an axis.
    pub panels: Vec<Panel>,
    /// What a reader has to know of the drawing.
    pub notes: Vec<String>,
}

/// One panel.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// What tells it from the others; empty where there is one.
    pub title: String,
    /// One chart for both, or one each.
    pub charts: Vec<Drawn>,
}

/// One chart.
#[derive(Clone, Debug, Default)]
pub struct Drawn {
    /// Whose values.
    pub whose: Whose,
    /// The `<svg>` element.
    pub svg: String,
}

/// Whose values a chart shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Whose {
    /// Those measured here.
    #[default]
    Here,
    /// Those published.
    Published,
    /// Both.
    Both,
}

impl Whose {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Whose::Here => "this machine",
            Whose::Published => "published",
            Whose::Both => "this machine (solid) and published (dashed, light)",
        }
    }
}

/// One cell of a figure.
#[derive(Clone, Copy)]
pub(crate) struct Sample<'a> {
    pub(crate) cell: &'a Cell<'a>,
    pub(crate) published: bool,
}

/// What a figure is made of.
pub(crate) struct Frame<'a> {
    pub(crate) definition: &'a Definition,
    pub(crate) panel: String,
    pub(crate) samples: Vec<Sample<'a>>,
}

/// Draws the figure of a definition. `beside` adds the processor time to a figure of throughput, where no
/// other figure shows it.
pub fn draw(definition: &Definition, here: &[&Cell<'_>], published: &[&Cell<'_>], beside: bool) -> Figure {
    let mut samples: Vec<Sample<'_>> = Vec::new();
    samples.extend(here.iter().map(|cell| Sample { cell, published: false }));
    samples.extend(published.iter().map(|cell| Sample { cell, published: true }));
    let seen = |sample: &Sample<'_>| sample.cell.measured().next().is_some();
    samples.retain(seen);
    let mut figure = Figure::default();
    let mut frames = split(definition, samples);
    if frames.len() > PANELS_MAX {
        let more = frames.len() - PANELS_MAX;
        figure.notes.push(format!("{more} more panels are not drawn; the table holds their values."));
        frames.truncate(PANELS_MAX);
    }
    for frame in &frames {
        figure.panels.extend(panels(frame, beside));
    }
    figure.panels.retain(|panel| !panel.charts.is_empty());
    figure
}

fn panels(frame: &Frame<'_>, beside: bool) -> Vec<Panel> {
    let numeric = || frame.samples.iter().any(|sample| frame.x(sample).and_then(|x| x.as_f64()).is_some());
    match frame.definition.shape.as_str() {
        "cdf" => distribution::draw(frame),
        "heatmap" => vec![bars::heat(frame)],
        "table" => bars::table(frame),
        "breakdown" if bars::has_shares(frame) => vec![bars::breakdown(frame)],
        "curve" if numeric() => curve::draw(frame, beside),
        // A curve over names is bars.
        _ => bars::draw(frame),
    }
}

impl Frame<'_> {
    /// Where a cell lies on the horizontal axis.
    pub(crate) fn x<'b>(&self, sample: &Sample<'b>) -> Option<&'b Value> {
        sample.cell.parameters.get(&self.definition.x)
    }

    /// The values along the horizontal axis: numbers ascending, then names as they come.
    pub(crate) fn xs(&self) -> Vec<Value> {
        let mut values: Vec<Value> = Vec::new();
        for value in self.samples.iter().filter_map(|sample| self.x(sample)) {
            if !values.iter().any(|other| other.same(value)) {
                values.push(value.clone());
            }
        }
        values.sort_by(|a, b| match (a.as_f64(), b.as_f64()) {
            (Some(a), Some(b)) => a.total_cmp(&b),
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (None, None) => std::cmp::Ordering::Equal,
        });
        values
    }

    /// The names of the lines, as they come.
    pub(crate) fn series(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for sample in &self.samples {
            let name = self.name(sample);
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The line that a cell belongs to.
    pub(crate) fn name(&self, sample: &Sample<'_>) -> String {
        series_name(self.definition, sample.cell)
    }

    /// The title of a chart for those who cannot see it.
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

    /// Whether what was measured and what was published can share a linear scale.
    pub(crate) fn together(&self, times: f64, value: impl Fn(&Sample<'_>) -> Option<f64>) -> bool {
        let largest = |published: bool| {
            let side = self.samples.iter().filter(|sample| sample.published == published);
            side.filter_map(&value).filter(|value| value.is_finite()).fold(0.0, f64::max)
        };
        let (here, published) = (largest(false), largest(true));
        here <= 0.0 || published <= 0.0 || (here / published < times && published / here < times)
    }

    /// The sides that a panel needs a chart for: both in one, or one each.
    pub(crate) fn sides(&self, together: bool) -> Vec<Whose> {
        let any = |published: bool| self.samples.iter().any(|sample| sample.published == published);
        match (any(false), any(true)) {
            (true, true) if together => vec![Whose::Both],
            (true, true) => vec![Whose::Here, Whose::Published],
            (true, false) => vec![Whose::Here],
            (false, true) => vec![Whose::Published],
            (false, false) => Vec::new(),
        }
    }

    pub(crate) fn of(&self, whose: Whose) -> impl Iterator<Item = &Sample<'_>> {
        self.samples.iter().filter(move |sample| match whose {
            Whose::Both => true,
            Whose::Here => !sample.published,
            Whose::Published => sample.published,
        })
    }
}

/// The name of a line: what the definition tells lines apart by, as people say it.
fn series_name(definition: &Definition, cell: &Cell<'_>) -> String {
    let mut name = String::new();
    for parameter in &definition.series {
        let Some(value) = cell.parameters.get(parameter) else { continue };
        let said = match (parameter.as_str(), value.as_f64()) {
            ("jobs", Some(count)) => format!("{count} proc"),
            ("iodepth", Some(depth)) => format!("depth {depth}"),
            _ => value_words(parameter, value),
        };
        if !name.is_empty() {
            name.push_str(if said.contains(' ') { ", " } else { "/" });
        }
        name.push_str(&said);
    }
    match (name.is_empty(), cell.series.is_empty()) {
        (false, _) => name,
        (true, false) => cell.series.to_string(),
        (true, true) => cell.experiment.to_string(),
    }
}

fn size(bytes: f64) -> String {
    match bytes {
        _ if bytes >= 1024.0 && bytes % 1024.0 == 0.0 => format!("{} KiB", bytes / 1024.0),
        _ => format!("{bytes} B"),
    }
}

/// A parameter's value in words.
pub(crate) fn value_words(name: &str, value: &Value) -> String {
    match (name, value.as_f64()) {
        ("block_bytes" | "background_block_bytes", Some(bytes)) => size(bytes),
        _ => value.to_string(),
    }
}

/// Divides the samples until each panel holds no two cells at one place.
fn split<'a>(definition: &'a Definition, samples: Vec<Sample<'a>>) -> Vec<Frame<'a>> {
    /// Each division is by a parameter that still varies; there are about a dozen in all.
    const DEPTH_MAX: usize = 12;
    let mut frames = vec![Frame { definition, panel: String::new(), samples }];
    for _ in 0..DEPTH_MAX {
        let mut divided = Vec::new();
        let mut changed = false;
        for frame in frames {
            match dividing(&frame) {
                Some(name) => {
                    changed = true;
                    divided.extend(divide(frame, &name));
                }
                None => divided.push(frame),
            }
        }
        frames = divided;
        if !changed {
            break;
        }
    }
    frames
}

/// A parameter that tells two cells apart which would be drawn at one place.
fn dividing(frame: &Frame<'_>) -> Option<String> {
    use std::collections::HashMap;
    let mut places: HashMap<(bool, String, String), &Parameters> = HashMap::new();
    for sample in &frame.samples {
        let x = frame.x(sample).map(Value::to_string).unwrap_or_default();
        let place = (sample.published, frame.name(sample), x);
        let Some(other) = places.insert(place, sample.cell.parameters) else { continue };
        let differs = sample.cell.parameters.iter().find(|(name, value)| {
            let drawn = **name == frame.definition.x || frame.definition.series.contains(name);
            !drawn && other.get(*name).is_none_or(|found| !found.same(value))
        });
        if let Some((name, _)) = differs {
            return Some(name.clone());
        }
    }
    None
}

fn divide<'a>(frame: Frame<'a>, name: &str) -> Vec<Frame<'a>> {
    let mut frames: Vec<(Value, Frame<'a>)> = Vec::new();
    let mut everywhere = Vec::new();
    for sample in frame.samples {
        let Some(value) = sample.cell.parameters.get(name) else {
            everywhere.push(sample);
            continue;
        };
        match frames.iter_mut().find(|(other, _)| other.same(value)) {
            Some((_, part)) => part.samples.push(sample),
            None => {
                let said = format!("{} {}", metric::parameter(name), value_words(name, value));
                let panel = if frame.panel.is_empty() { said } else { format!("{}, {said}", frame.panel) };
                let part = Frame { definition: frame.definition, panel, samples: vec![sample] };
                frames.push((value.clone(), part));
            }
        }
    }
    frames.sort_by(|(a, _), (b, _)| a.as_f64().partial_cmp(&b.as_f64()).unwrap_or(std::cmp::Ordering::Equal));
    let mut frames: Vec<Frame<'a>> = frames.into_iter().map(|(_, frame)| frame).collect();
    // What does not say is at home in every panel.
    for part in &mut frames {
        part.samples.extend(everywhere.iter().copied());
    }
    frames
}
