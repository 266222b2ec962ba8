//! An experiment as data: what is varied, what is measured, and what was published.
//!
//! The files are TOML; `docs/LAB.md` shows how to write one. [`Definition::cells`] makes the combinations,
//! without a word about the machine: that is the plan's business.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::check::Check;
use crate::record::{Parameters, Value};

/// Most cells that one experiment may have: the largest published one has 300.
const CELLS_MAX: usize = 10_000;

/// One figure or table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// Study and name, as `icpe24.fig2`.
    pub id: String,
    /// What it shows, in a sentence.
    pub title: String,
    /// Where in the paper it is discussed.
    #[serde(default)]
    pub section: String,
    /// The parameter along the horizontal axis.
    pub x: String,
    /// The metric that is shown.
    pub y: String,
    /// Where the horizontal axis is a metric as well, as throughput in a figure of latency over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x_metric: Option<String>,
    /// The role whose metrics are shown.
    #[serde(default = "fg")]
    pub role: String,
    /// The parameters that tell the lines of the figure apart.
    pub series: Vec<String>,
    /// `curve`, `bars`, `table`, `cdf`, `heatmap` or `breakdown`.
    #[serde(default = "curve")]
    pub shape: String,
    /// Experiments whose records this one shows. It has no cells of its own then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub derived_from: Vec<String>,
    /// Values are shown relative to the cell with these parameters.
    #[serde(default, skip_serializing_if = "Parameters::is_empty")]
    pub relative_to: Parameters,
    /// What is measured beside the generator's results: `counters`, `profile`, `tokens`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measure: Vec<String>,
    /// What to know before comparing with the paper, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub traps: Vec<String>,
    /// Times of the published runs.
    #[serde(default)]
    pub time: Time,
    /// Parameters that all cells share.
    #[serde(default)]
    pub fixed: Parameters,
    /// Parameters whose values are combined with one another.
    #[serde(default)]
    pub vary: BTreeMap<String, Vec<Value>>,
    /// Sets of parameters that go together, combined with what is varied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Parameters>,
    /// What `--quick` varies instead.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quick: BTreeMap<String, Vec<Value>>,
    /// Further groups of cells, as SPDK's beside the schedulers'.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Also>,
    /// What changes some of the cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule: Vec<Rule>,
    /// fio options of the foreground jobs.
    #[serde(default, skip_serializing_if = "Parameters::is_empty")]
    pub options: Parameters,
    /// fio options of the background jobs.
    #[serde(default, skip_serializing_if = "Parameters::is_empty")]
    pub background_options: Parameters,
    /// Published values in the study's data files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reference: Vec<Reference>,
    /// Published values that are printed in the text only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<Published>,
    /// The published shape: orderings, ratios, knees, saturation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub check: Vec<Check>,
}

fn fg() -> String {
    "fg".to_string()
}

fn curve() -> String {
    "curve".to_string()
}

/// How long the published runs took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// Measuring, in seconds.
    pub runtime_s: f64,
    /// Before it, in seconds.
    pub ramp_s: f64,
    /// How often.
    #[serde(default = "once")]
    pub repetitions: u32,
}

fn once() -> u32 {
    1
}

impl Default for Time {
    fn default() -> Time {
        Time { runtime_s: 120.0, ramp_s: 20.0, repetitions: 1 }
    }
}

/// A further group of cells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Also {
    /// Over those that all cells share.
    #[serde(default)]
    pub fixed: Parameters,
    /// Instead of what is varied otherwise.
    #[serde(default)]
    pub vary: BTreeMap<String, Vec<Value>>,
    /// What `--quick` varies instead.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quick: BTreeMap<String, Vec<Value>>,
}

/// What changes the cells that it fits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// The cells that are meant: all of these parameters are so.
    #[serde(rename = "where", default)]
    pub fits: Parameters,
    /// Parameters that they get.
    #[serde(default, skip_serializing_if = "Parameters::is_empty")]
    pub set: Parameters,
    /// Of them, only those with one of these values stay.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keep: BTreeMap<String, Vec<Value>>,
}

/// Published values in a data file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// The file's name without its end, in the study's folder.
    pub csv: String,
    /// The rows that are meant, by column.
    #[serde(rename = "where", default)]
    pub fits: BTreeMap<String, String>,
    /// Parameters that all of its rows have, and no column says.
    #[serde(default)]
    pub fixed: Parameters,
    /// Columns that mean something else here than their name says: column to parameter or metric.
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
}

/// A published value that no data file holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The cell.
    #[serde(rename = "where", default)]
    pub fits: Parameters,
    /// What it says of it.
    pub metrics: BTreeMap<String, f64>,
    /// Rounded, read off, or computed from other numbers.
    #[serde(default)]
    pub approximate: bool,
}

/// How much of an experiment is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Few values, a second each: does everything work, and what is the shape?
    Quick,
    /// All values, some seconds each.
    #[default]
    Default,
    /// All values, for as long and as often as published, on preconditioned devices.
    Paper,
}

impl Scale {
    /// Its name in files and options.
    pub fn name(self) -> &'static str {
        match self {
            Scale::Quick => "quick",
            Scale::Default => "default",
            Scale::Paper => "paper",
        }
    }

    /// The scale of a name.
    pub fn from_name(name: &str) -> Option<Scale> {
        [Scale::Quick, Scale::Default, Scale::Paper].into_iter().find(|scale| scale.name() == name)
    }
}

impl Definition {
    /// Reads a definition.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Definition, String> {
        let definition: Definition = toml::from_str(text).map_err(|error| error.to_string())?;
        definition.validate()?;
        Ok(definition)
    }

    /// The study, as `icpe24`; the whole identifier where it names none.
    pub fn study(&self) -> &str {
        self.id.split_once('.').map_or(&self.id, |(study, _)| study)
    }

    fn validate(&self) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if self.id.is_empty() || !self.id.chars().all(plain) {
            return Err(format!("id = {:?}: letters, digits, dots and dashes, please", self.id));
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
            return Err("an experiment that is derived has no cells of its own".to_string());
        }
        if let Some(said) = self.check.iter().find_map(|check| check.misunderstood()) {
            return Err(said);
        }
        let times = [self.time.runtime_s, self.time.ramp_s];
        if times.iter().any(|time| !(0.0..=86_400.0).contains(time)) || self.time.repetitions == 0 {
            return Err("time: seconds up to a day, and at least one repetition".to_string());
        }
        Ok(())
    }

    /// The parameters of every cell, in order: the first varied name changes slowest.
    ///
    /// # Errors
    /// More cells than are allowed.
    pub fn cells(&self, scale: Scale) -> Result<Vec<Parameters>, String> {
        if !self.derived_from.is_empty() {
            return Ok(Vec::new());
        }
        let mut cells = product(&self.fixed, &chosen(&self.vary, &self.quick, scale), &self.rows)?;
        for also in &self.also {
            let mut fixed = self.fixed.clone();
            fixed.extend(also.fixed.clone());
            let vary = chosen(&also.vary, &also.quick, scale);
            fixed.retain(|name, _| !vary.contains_key(name));
            cells.extend(product(&fixed, &vary, &[])?);
        }
        for rule in &self.rule {
            cells.retain_mut(|cell| rule.apply(cell));
        }
        let mut unique: Vec<Parameters> = Vec::new();
        for cell in cells {
            if !unique.contains(&cell) {
                unique.push(cell);
            }
        }
        Ok(unique)
    }

    /// Whether cells differ in this parameter by design: it is an axis, or tells lines apart.
    pub fn varies(&self, name: &str) -> bool {
        self.x == name
            || self.vary.contains_key(name)
            || self.also.iter().any(|also| also.vary.contains_key(name))
            || self.rows.iter().any(|row| row.contains_key(name))
    }

    /// The line of the figure that a cell belongs to.
    pub fn series_of(&self, cell: &Parameters) -> String {
        let parts: Vec<String> =
            self.series.iter().filter_map(|name| cell.get(name)).map(Value::to_string).collect();
        match (parts.is_empty(), cell.get("api")) {
            // SPDK knows no scheduler.
            (true, Some(api)) => api.to_string(),
            _ => parts.join("/"),
        }
    }
}

impl Rule {
    /// Changes the cell; says whether it stays.
    fn apply(&self, cell: &mut Parameters) -> bool {
        if !fits(cell, &self.fits) {
            return true;
        }
        cell.extend(self.set.clone());
        self.keep.iter().all(|(name, values)| {
            cell.get(name).is_some_and(|value| values.iter().any(|kept| kept.same(value)))
        })
    }
}

/// Whether all of `wanted` are so in `cell`. A wanted value that begins with `!` must not be there.
pub(crate) fn fits(cell: &Parameters, wanted: &Parameters) -> bool {
    wanted.iter().all(|(name, value)| match value.as_str().and_then(|text| text.strip_prefix('!')) {
        Some(not) => cell.get(name).is_none_or(|found| found.as_str() != Some(not)),
        None => cell.get(name).is_some_and(|found| found.same(value)),
    })
}

type Lists = BTreeMap<String, Vec<Value>>;

fn chosen(vary: &Lists, quick: &Lists, scale: Scale) -> Lists {
    let mut lists = vary.clone();
    if scale == Scale::Quick {
        lists.extend(quick.clone());
    }
    lists
}

fn product(fixed: &Parameters, vary: &Lists, rows: &[Parameters]) -> Result<Vec<Parameters>, String> {
    let mut cells = vec![fixed.clone()];
    // Schedulers outermost: each change of one waits for the device to drain.
    let mut names: Vec<&String> = vary.keys().collect();
    names.sort_by_key(|name| (name.as_str() != "scheduler", name.as_str() != "api", name.as_str()));
    for name in names {
        let values = &vary[name];
        let count = cells.len().saturating_mul(values.len());
        if count > CELLS_MAX {
            return Err(format!("{count} cells are too many; at most {CELLS_MAX}"));
        }
        let with = |cell: &Parameters, value: &Value| {
            let mut cell = cell.clone();
            cell.insert(name.clone(), value.clone());
            cell
        };
        cells = cells.iter().flat_map(|cell| values.iter().map(move |value| with(cell, value))).collect();
    }
    if !rows.is_empty() {
        let with = |cell: &Parameters, row: &Parameters| {
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
