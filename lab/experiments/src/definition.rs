//! Definitions of experiments: parameters, metrics and published values.
//!
//! Definitions are TOML files; `docs/LAB.md` shows how to write one. [`ExperimentDefinition::cells`] expands the
//! parameter combinations independently of the machine; [`crate::plan`] decides which of them can run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::check::FindingCheck;
use crate::record::{CellParameters, ParameterValue};

/// Most cells of one experiment; the largest published one has 300.
const CELLS_MAX: usize = 10_000;

/// One figure or table of a study.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentDefinition {
    /// Study and name, for example `icpe24.fig2`.
    pub id: String,
    /// What it shows, as a sentence.
    pub title: String,
    /// Section of the paper.
    #[serde(default)]
    pub section: String,
    /// The parameter of the horizontal axis.
    pub x: String,
    /// The metric of the vertical axis.
    pub y: String,
    /// The metric of the horizontal axis, if it is a metric too: latency over throughput.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_metric: Option<String>,
    /// The role whose metrics are shown.
    #[serde(default = "fg")]
    pub role: String,
    /// The parameters that distinguish the lines of the figure.
    pub series: Vec<String>,
    /// `curve`, `bars`, `table`, `cdf`, `heatmap` or `breakdown`.
    #[serde(default = "curve")]
    pub shape: String,
    /// Experiments whose records this one shows. A derived experiment has no cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub derived_from: Vec<String>,
    /// Values are shown relative to the cell with these parameters.
    #[serde(default, skip_serializing_if = "CellParameters::is_empty")]
    pub relative_to: CellParameters,
    /// Additional measurements: `counters`, `profile`, `tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measure: Vec<String>,
    /// Caveats of a comparison with the paper, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub traps: Vec<String>,
    /// Durations of the published runs.
    #[serde(default)]
    pub time: PublishedTimes,
    /// Parameters that all cells share.
    #[serde(default)]
    pub fixed: CellParameters,
    /// Parameters whose values are combined with each other.
    #[serde(default)]
    pub vary: BTreeMap<String, Vec<ParameterValue>>,
    /// Sets of parameters, each combined with the values of `vary`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<CellParameters>,
    /// Values that replace those of `vary` with `--quick`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quick: BTreeMap<String, Vec<ParameterValue>>,
    /// Further groups of cells, for example SPDK's next to the schedulers'.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<CellGroup>,
    /// Rules that change or remove cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule: Vec<CellRule>,
    /// fio options of the foreground jobs.
    #[serde(default, skip_serializing_if = "CellParameters::is_empty")]
    pub options: CellParameters,
    /// fio options of the background jobs.
    #[serde(default, skip_serializing_if = "CellParameters::is_empty")]
    pub background_options: CellParameters,
    /// Published values in the study's CSV files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reference: Vec<PublishedTable>,
    /// Published values that only the text of the paper contains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<PublishedPoint>,
    /// The published results: orderings, ratios, knees, saturation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub check: Vec<FindingCheck>,
}

fn fg() -> String {
    "fg".to_string()
}

fn curve() -> String {
    "curve".to_string()
}

/// Durations of the published runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedTimes {
    /// Duration of the measurement, in seconds.
    pub runtime_s: f64,
    /// Warm-up before it, in seconds.
    pub ramp_s: f64,
    /// Measurements of each cell.
    #[serde(default = "once")]
    pub repetitions: u32,
}

fn once() -> u32 {
    1
}

impl Default for PublishedTimes {
    fn default() -> PublishedTimes {
        PublishedTimes { runtime_s: 120.0, ramp_s: 20.0, repetitions: 1 }
    }
}

/// A further group of cells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellGroup {
    /// Parameters of the group, added to those that all cells share.
    #[serde(default)]
    pub fixed: CellParameters,
    /// Replaces the experiment's `vary`.
    #[serde(default)]
    pub vary: BTreeMap<String, Vec<ParameterValue>>,
    /// Values that replace those of `vary` with `--quick`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quick: BTreeMap<String, Vec<ParameterValue>>,
}

/// Changes or removes the cells that match it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellRule {
    /// The rule applies to cells with all of these parameters.
    #[serde(rename = "where", default)]
    pub filter: CellParameters,
    /// Parameters to set.
    #[serde(default, skip_serializing_if = "CellParameters::is_empty")]
    pub set: CellParameters,
    /// Matching cells whose parameter has none of these values are removed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keep: BTreeMap<String, Vec<ParameterValue>>,
}

/// Published values in a CSV file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedTable {
    /// Name of the file in the study's folder, without `.csv`.
    pub csv: String,
    /// Values by column of the rows to use.
    #[serde(rename = "where", default)]
    pub filter: BTreeMap<String, String>,
    /// Parameters of all these rows that no column contains.
    #[serde(default)]
    pub fixed: CellParameters,
    /// Columns whose meaning differs from the default: column to parameter or metric.
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
}

/// A published value that no CSV file contains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedPoint {
    /// Parameters of the cell.
    #[serde(rename = "where", default)]
    pub filter: CellParameters,
    /// Published metrics of the cell.
    pub metrics: BTreeMap<String, f64>,
    /// Whether the value is rounded, read off a figure, or computed from other numbers.
    #[serde(default)]
    pub approximate: bool,
}

/// How much of an experiment runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Few values, about a second each: a check that everything works, and rough shapes.
    Quick,
    /// All values, a few seconds each.
    #[default]
    Default,
    /// All values, with the published durations and repetitions, on preconditioned devices.
    Paper,
}

impl Scale {
    /// Name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Scale::Quick => "quick",
            Scale::Default => "default",
            Scale::Paper => "paper",
        }
    }

    /// The scale with this [`Scale::name`].
    pub fn from_name(name: &str) -> Option<Scale> {
        [Scale::Quick, Scale::Default, Scale::Paper].into_iter().find(|scale| scale.name() == name)
    }
}

impl ExperimentDefinition {
    /// Parses and validates a TOML definition.
    ///
    /// # Errors
    /// What is invalid, as a sentence.
    pub fn parse(text: &str) -> Result<ExperimentDefinition, String> {
        let definition: ExperimentDefinition = toml::from_str(text).map_err(|error| error.to_string())?;
        definition.validate()?;
        Ok(definition)
    }

    /// The study, for example `icpe24`; the whole id if it has no dot.
    pub fn study(&self) -> &str {
        self.id.split_once('.').map_or(&self.id, |(study, _)| study)
    }

    fn validate(&self) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.id.is_empty() || !self.id.chars().all(plain) {
            return Err(format!("id = {:?}: only letters, digits, dots, dashes and underscores", self.id));
        }
        if self.series.is_empty() {
            return Err("series names no parameter".to_string());
        }
        let known = ["counters", "profile", "tokens"];
        if let Some(other) = self.measure.iter().find(|name| !known.contains(&name.as_str())) {
            return Err(format!("measure: {other:?} is none of {}", known.join(", ")));
        }
        if self.derived_from.is_empty() {
            if self.cells(Scale::Paper)?.is_empty() {
                return Err("it has no cell".to_string());
            }
            if self.cells(Scale::Quick)?.is_empty() {
                return Err("it has no cell with --quick".to_string());
            }
        } else if !self.vary.is_empty() || !self.also.is_empty() {
            return Err("a derived experiment has no cells".to_string());
        }
        if let Some(message) = self.check.iter().find_map(|check| check.requirement_error()) {
            return Err(message);
        }
        let times = [self.time.runtime_s, self.time.ramp_s];
        if times.iter().any(|time| !(0.0..=86_400.0).contains(time)) || self.time.repetitions == 0 {
            return Err("time: seconds up to a day, and at least one repetition".to_string());
        }
        Ok(())
    }

    /// The parameters of every cell. The first varied parameter changes slowest, so that schedulers and APIs change
    /// rarely.
    ///
    /// # Errors
    /// More than 10 000 cells.
    pub fn cells(&self, scale: Scale) -> Result<Vec<CellParameters>, String> {
        if !self.derived_from.is_empty() {
            return Ok(Vec::new());
        }
        let mut cells = combine(&self.fixed, &values_at_scale(&self.vary, &self.quick, scale), &self.rows)?;
        for also in &self.also {
            let mut fixed = self.fixed.clone();
            fixed.extend(also.fixed.clone());
            let vary = values_at_scale(&also.vary, &also.quick, scale);
            fixed.retain(|name, _| !vary.contains_key(name));
            cells.extend(combine(&fixed, &vary, &[])?);
        }
        for rule in &self.rule {
            cells.retain_mut(|cell| rule.apply(cell));
        }
        let mut unique: Vec<CellParameters> = Vec::new();
        for cell in cells {
            if !unique.contains(&cell) {
                unique.push(cell);
            }
        }
        Ok(unique)
    }

    /// Whether cells differ in this parameter by design: it is an axis, or distinguishes lines.
    pub fn varies(&self, name: &str) -> bool {
        self.x == name
            || self.vary.contains_key(name)
            || self.also.iter().any(|also| also.vary.contains_key(name))
            || self.rows.iter().any(|row| row.contains_key(name))
    }

    /// The line of the figure to which a cell belongs.
    pub fn series_of(&self, cell: &CellParameters) -> String {
        let parts: Vec<String> =
            self.series.iter().filter_map(|name| cell.get(name)).map(ParameterValue::to_string).collect();
        match (parts.is_empty(), cell.get("api")) {
            // SPDK bypasses the kernel's schedulers.
            (true, Some(api)) => api.to_string(),
            _ => parts.join("/"),
        }
    }
}

impl CellRule {
    /// Applies the rule to a cell; returns false if the cell is removed.
    fn apply(&self, cell: &mut CellParameters) -> bool {
        if !matches(cell, &self.filter) {
            return true;
        }
        cell.extend(self.set.clone());
        self.keep.iter().all(|(name, values)| {
            cell.get(name).is_some_and(|value| values.iter().any(|allowed| allowed.same(value)))
        })
    }
}

/// Whether `cell` has all `wanted` parameters. A text `x|y` matches these values, and `!x|y` every value except these.
pub(crate) fn matches(cell: &CellParameters, wanted: &CellParameters) -> bool {
    let is_one_of = |found: &ParameterValue, texts: &str| {
        texts.split('|').any(|text| found.as_str().is_some_and(|found| found == text))
    };
    wanted.iter().all(|(name, value)| match (cell.get(name), value.as_str()) {
        (found, Some(texts)) if let Some(texts) = texts.strip_prefix('!') => {
            found.is_none_or(|found| !is_one_of(found, texts))
        }
        (Some(found), Some(texts)) => found.same(value) || is_one_of(found, texts),
        (Some(found), None) => found.same(value),
        (None, _) => false,
    })
}

type ParameterLists = BTreeMap<String, Vec<ParameterValue>>;

fn values_at_scale(vary: &ParameterLists, quick: &ParameterLists, scale: Scale) -> ParameterLists {
    let mut lists = vary.clone();
    if scale == Scale::Quick {
        lists.extend(quick.clone());
    }
    lists
}

fn combine(
    fixed: &CellParameters,
    vary: &ParameterLists,
    rows: &[CellParameters],
) -> Result<Vec<CellParameters>, String> {
    let mut cells = vec![fixed.clone()];
    // Schedulers outermost: each switch waits until the device is drained.
    let mut names: Vec<&String> = vary.keys().collect();
    names.sort_by_key(|name| (name.as_str() != "scheduler", name.as_str() != "api", name.as_str()));
    for name in names {
        let values = &vary[name];
        let count = cells.len().saturating_mul(values.len());
        if count > CELLS_MAX {
            return Err(format!("{count} cells are too many; at most {CELLS_MAX}"));
        }
        let with = |cell: &CellParameters, value: &ParameterValue| {
            let mut cell = cell.clone();
            cell.insert(name.clone(), value.clone());
            cell
        };
        cells = cells.iter().flat_map(|cell| values.iter().map(move |value| with(cell, value))).collect();
    }
    if !rows.is_empty() {
        let with = |cell: &CellParameters, row: &CellParameters| {
            let mut cell = cell.clone();
            cell.extend(row.clone());
            cell
        };
        cells = cells.iter().flat_map(|cell| rows.iter().map(move |row| with(cell, row))).collect();
    }
    Ok(cells)
}

#[cfg(test)]
mod tests;
