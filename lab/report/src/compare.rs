//! Compares two runs cell by cell and classifies each change: faster, slower, or within noise.
//!
//! Two cells match if experiment and parameters are equal. Each metric is compared by the ratio of the
//! geometric means of its repetitions, with Welch's confidence interval. A cell that was measured once in
//! either run has a ratio but no interval, and is never reported as faster or slower.

mod render;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use lab_experiments::RunDirectory;
use serde::Serialize;

use crate::cells::{ExperimentCell, group_into_cells};
use crate::metric::{MetricDirection, direction};
use crate::stats::{ConfidenceInterval, geometric_mean_ratio};

pub use render::{html, text};

/// The metrics that are compared.
pub const METRICS: [&str; 4] = ["iops", "clat_p99_us", "clat_p999_us", "cpu_ns_per_io"];

/// Thresholds of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct CompareOptions {
    /// Confidence level of the intervals, between 0 and 1; 0.95 by default.
    pub confidence_level: f64,
    /// Differences below this percentage count as noise (clock resolution, position on the medium).
    /// 1 by default.
    pub noise_percent: f64,
}

impl Default for CompareOptions {
    fn default() -> CompareOptions {
        CompareOptions { confidence_level: 0.95, noise_percent: 1.0 }
    }
}

/// The classification of one metric of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeVerdict {
    /// Significantly better, and by more than the noise threshold.
    Faster,
    /// Significantly worse, and by more than the noise threshold.
    Slower,
    /// Not significantly different, or within the noise threshold.
    Same,
    /// Measured once in either run: a ratio without a confidence interval.
    NoInterval,
    /// Not measured in one of the runs, or measured by different means (generator, submission path).
    NotComparable,
}

impl ChangeVerdict {
    /// The text of reports.
    pub fn label(self) -> &'static str {
        match self {
            ChangeVerdict::Faster => "faster",
            ChangeVerdict::Slower => "slower",
            ChangeVerdict::Same => "same within noise",
            ChangeVerdict::NoInterval => "no interval",
            ChangeVerdict::NotComparable => "not comparable",
        }
    }

    const ALL: [ChangeVerdict; 5] = [
        ChangeVerdict::Slower,
        ChangeVerdict::Faster,
        ChangeVerdict::Same,
        ChangeVerdict::NoInterval,
        ChangeVerdict::NotComparable,
    ];
}

/// The comparison of one metric of one cell.
#[derive(Clone, Debug, Serialize)]
pub struct ComparisonRow {
    /// The experiment's identifier.
    pub experiment: String,
    /// The cell's parameters, for example `api iou, iodepth 8`.
    pub cell: String,
    /// The metric, one of [`METRICS`].
    pub metric: &'static str,
    /// The median of the first run's repetitions, in the metric's unit.
    pub a: Option<f64>,
    /// The median of the second run's repetitions.
    pub b: Option<f64>,
    /// Second run divided by first run.
    pub ratio: Option<f64>,
    /// The confidence interval of the ratio.
    pub interval: Option<ConfidenceInterval>,
    /// The classification of the change.
    pub verdict: ChangeVerdict,
    /// Why the cells are not comparable; empty otherwise.
    pub remark: String,
}

impl ComparisonRow {
    /// Regression of the second run in per cent; negative for an improvement.
    pub fn worse_percent(&self) -> Option<f64> {
        let ratio = self.ratio.filter(|ratio| *ratio > 0.0)?;
        Some(match direction(self.metric) {
            MetricDirection::HigherIsBetter => (1.0 / ratio - 1.0) * 100.0,
            MetricDirection::LowerIsBetter | MetricDirection::Neutral => (ratio - 1.0) * 100.0,
        })
    }
}

/// The result of comparing two runs.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The directory of the first run.
    pub a: String,
    /// The directory of the second run.
    pub b: String,
    /// Differences between machines and plans, one sentence each.
    pub differences: Vec<String>,
    /// One row for each metric of each cell.
    pub rows: Vec<ComparisonRow>,
    /// For each metric: the geometric mean of the ratios of all comparable cells, and their number.
    pub overall: Vec<(&'static str, f64, usize)>,
}

impl Comparison {
    /// Number of rows with this verdict.
    pub fn count(&self, verdict: ChangeVerdict) -> usize {
        self.rows.iter().filter(|row| row.verdict == verdict).count()
    }

    /// Rows that are worse by more than `percent`. Rows without an interval count too: otherwise a regression
    /// that was measured only once would pass the gate.
    pub fn regressions(&self, percent: f64) -> impl Iterator<Item = &ComparisonRow> {
        self.rows.iter().filter(move |row| {
            matches!(row.verdict, ChangeVerdict::Slower | ChangeVerdict::NoInterval)
                && row.worse_percent().is_some_and(|worse| worse > percent)
        })
    }
}

/// Compares run `b` with the baseline `a`.
pub fn compare(a: &RunDirectory, b: &RunDirectory, rules: CompareOptions) -> Comparison {
    let (cells_a, cells_b) = (group_into_cells(&a.records), group_into_cells(&b.records));
    let key = |cell: &ExperimentCell<'_>| format!("{} {}", cell.experiment, cell.parameter_label());
    let places: HashMap<String, usize> =
        cells_b.iter().enumerate().map(|(at, cell)| (key(cell), at)).collect();
    let mut matched = vec![false; cells_b.len()];
    let mut rows = Vec::new();
    for cell in &cells_a {
        let other = places.get(&key(cell)).copied();
        if let Some(place) = other {
            matched[place] = true;
        }
        rows.extend(compare_cell(cell, other.map(|place| &cells_b[place]), rules));
    }
    for (cell, _) in cells_b.iter().zip(matched).filter(|(_, matched)| !matched) {
        rows.push(missing_row(cell, "missing in the first run"));
    }
    let overall = METRICS
        .iter()
        .filter_map(|metric| {
            let logs: Vec<f64> = rows
                .iter()
                .filter(|row| row.metric == *metric && row.verdict != ChangeVerdict::NotComparable)
                .filter_map(|row| row.ratio.filter(|ratio| *ratio > 0.0).map(f64::ln))
                .collect();
            let count = logs.len();
            (count > 0).then(|| (*metric, (logs.iter().sum::<f64>() / count as f64).exp(), count))
        })
        .collect();
    let name = |run: &RunDirectory| run.path.display().to_string();
    Comparison { a: name(a), b: name(b), differences: differences(a, b), rows, overall }
}

fn compare_cell(
    a: &ExperimentCell<'_>,
    b: Option<&ExperimentCell<'_>>,
    rules: CompareOptions,
) -> Vec<ComparisonRow> {
    let Some(b) = b else { return vec![missing_row(a, "missing in the second run")] };
    for (cell, which) in [(a, "first"), (b, "second")] {
        if let Some(reason) = cell.missing_reason() {
            return vec![missing_row(a, &format!("not measured in the {which} run: {reason}"))];
        }
    }
    let incomparable = incomparable_reason(a, b);
    let mut rows = Vec::new();
    for metric in METRICS {
        let (left, right) = (a.values("fg", metric), b.values("fg", metric));
        let Some((ratio, interval)) = geometric_mean_ratio(&left, &right, rules.confidence_level) else {
            continue;
        };
        let verdict = match (&incomparable, interval) {
            (Some(_), _) => ChangeVerdict::NotComparable,
            (None, None) => ChangeVerdict::NoInterval,
            (None, Some(interval)) => verdict(metric, ratio, interval, rules),
        };
        rows.push(ComparisonRow {
            experiment: a.experiment.to_string(),
            cell: a.parameter_label(),
            metric,
            a: a.median("fg", metric),
            b: b.median("fg", metric),
            ratio: Some(ratio),
            interval,
            verdict,
            remark: incomparable.clone().unwrap_or_default(),
        });
    }
    if rows.is_empty() {
        rows.push(missing_row(a, "no metric in common"));
    }
    rows
}

fn verdict(metric: &str, ratio: f64, interval: ConfidenceInterval, rules: CompareOptions) -> ChangeVerdict {
    let small = (ratio - 1.0).abs() * 100.0 < rules.noise_percent;
    if interval.contains(1.0) || small {
        return ChangeVerdict::Same;
    }
    let more = direction(metric) == MetricDirection::HigherIsBetter;
    if (ratio > 1.0) == more { ChangeVerdict::Faster } else { ChangeVerdict::Slower }
}

/// Why two matching cells are not comparable: another generator or submission path.
fn incomparable_reason(a: &ExperimentCell<'_>, b: &ExperimentCell<'_>) -> Option<String> {
    let generator =
        |cell: &ExperimentCell<'_>| cell.measured().next().map(|record| record.generator.name.clone());
    if let (Some(left), Some(right)) = (generator(a), generator(b))
        && left != right
    {
        return Some(format!("different generators: {left} and {right}"));
    }
    let path = |cell: &ExperimentCell<'_>| cell.measured().find_map(|record| record.submission_path.clone());
    if let (Some(left), Some(right)) = (path(a), path(b))
        && left != right
        && left != "unknown"
        && right != "unknown"
    {
        return Some(format!("different submission paths: {left} and {right}"));
    }
    None
}

fn missing_row(cell: &ExperimentCell<'_>, remark: &str) -> ComparisonRow {
    ComparisonRow {
        experiment: cell.experiment.to_string(),
        cell: cell.parameter_label(),
        metric: METRICS[0],
        a: None,
        b: None,
        ratio: None,
        interval: None,
        verdict: ChangeVerdict::NotComparable,
        remark: remark.to_string(),
    }
}

/// Differences of plans and machines that may explain a change in performance.
fn differences(a: &RunDirectory, b: &RunDirectory) -> Vec<String> {
    let mut out = Vec::new();
    let mut add_if_different = |what: &str, left: String, right: String| {
        if left != right {
            out.push(format!("{what}: {} against {}", shortened(&left), shortened(&right)));
        }
    };
    add_if_different("scale", a.plan.scale.clone(), b.plan.scale.clone());
    add_if_different("program", a.plan.program.clone(), b.plan.program.clone());
    add_if_different("generator", a.plan.generator.clone(), b.plan.generator.clone());
    let targets = |run: &RunDirectory| {
        let words = run
            .plan
            .targets
            .iter()
            .map(|target| format!("{} {} {}", target.kind, target.path, target.described));
        words.collect::<Vec<_>>().join(", ")
    };
    add_if_different("devices", targets(a), targets(b));
    let (left, right) = (crate::page::machine_facts(a), crate::page::machine_facts(b));
    for (name, value) in &left {
        if let Some((_, other)) = right.iter().find(|(other, _)| other == name) {
            add_if_different(name, value.clone(), other.clone());
        }
    }
    /// Limits the list to what a reader can take in; the run directories hold everything.
    const DIFFERENCES_MAX: usize = 30;
    out.truncate(DIFFERENCES_MAX);
    out
}

fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    match text.chars().count() {
        0 => "nothing".to_string(),
        count if count > CHARS_MAX => text.chars().take(CHARS_MAX).chain(['…']).collect(),
        _ => text.to_string(),
    }
}
