//! Compares two sides, each one run or several, cell by cell: faster, slower, the same, or too noisy to tell.
//!
//! Two cells match if experiment and parameters are equal. Each metric is compared by the ratio of the
//! geometric means, with an interval that covers the variation between runs ([`compare_replicates`]). Whether
//! a change is real is decided for all rows together, by the method of Benjamini and Hochberg, since a
//! hundred comparisons at 95 % would find five changes where there is none. A cell that was measured once in
//! either run has a ratio but no interval, and is never reported as faster or slower.

mod many;
mod render;
mod render_many;
mod self_check;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use lab_experiments::{CellRecord, RunDirectory};
use serde::Serialize;

use crate::cells::ExperimentCell;
use crate::metric::{MetricDirection, direction};
use crate::stats::{
    ConfidenceInterval, ReplicateEffect, ReplicateOrder, ReplicatedCell, compare_replicates,
    corrected_p_values,
};

pub use many::{ManyComparison, compare_many};
pub use render::{html, text};
pub use render_many::{html_of_many, text_of_many};
pub use self_check::{SelfCheck, self_check};

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
    /// The smallest difference that matters, in percent: what cannot be told from it is too noisy. 5 by
    /// default.
    pub difference_percent: f64,
}

impl Default for CompareOptions {
    fn default() -> CompareOptions {
        CompareOptions { confidence_level: 0.95, noise_percent: 1.0, difference_percent: 5.0 }
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
    /// The interval excludes a difference that matters, or a significant one is within the noise threshold.
    Same,
    /// Not significantly different, but the interval does not exclude a difference that matters.
    TooNoisy,
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
            ChangeVerdict::Same => "same",
            ChangeVerdict::TooNoisy => "too noisy to tell",
            ChangeVerdict::NoInterval => "no interval",
            ChangeVerdict::NotComparable => "not comparable",
        }
    }

    const ALL: [ChangeVerdict; 6] = [
        ChangeVerdict::Slower,
        ChangeVerdict::Faster,
        ChangeVerdict::TooNoisy,
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
    /// The geometric mean of the first side, in the metric's unit.
    pub a: Option<f64>,
    /// The geometric mean of the second side.
    pub b: Option<f64>,
    /// Second run divided by first run.
    pub ratio: Option<f64>,
    /// The confidence interval of the ratio. It covers the variation between runs.
    pub interval: Option<ConfidenceInterval>,
    /// Probability of such a ratio if nothing has changed, corrected for the number of rows.
    pub corrected_p_value: Option<f64>,
    /// The classification of the change.
    pub verdict: ChangeVerdict,
    /// Why the cells are not comparable; empty otherwise.
    pub remark: String,
}

impl ComparisonRow {
    /// Regression of the second side in per cent; negative for an improvement.
    pub fn worse_percent(&self) -> Option<f64> {
        Some(worse_percent(self.metric, self.ratio.filter(|ratio| *ratio > 0.0)?))
    }

    /// The largest regression in per cent that the interval does not exclude; infinite without an interval.
    pub fn worst_percent(&self) -> f64 {
        let worst = |interval: ConfidenceInterval| {
            worse_percent(self.metric, interval.low).max(worse_percent(self.metric, interval.high))
        };
        self.interval.map_or(f64::INFINITY, worst)
    }
}

fn worse_percent(metric: &str, ratio: f64) -> f64 {
    match direction(metric) {
        MetricDirection::HigherIsBetter => (1.0 / ratio - 1.0) * 100.0,
        MetricDirection::LowerIsBetter | MetricDirection::Neutral => (ratio - 1.0) * 100.0,
    }
}

/// A metric over all comparable cells.
#[derive(Clone, Debug, Serialize)]
pub struct OverallRow {
    /// The metric, one of [`METRICS`].
    pub metric: &'static str,
    /// The geometric mean of the ratios of all cells.
    pub ratio: f64,
    /// Its confidence interval.
    pub interval: Option<ConfidenceInterval>,
    /// The number of cells.
    pub cells: usize,
}

/// Whether a side has become slower.
#[derive(Clone, Debug)]
pub enum RegressionVerdict<'a> {
    /// No row is worse by more than the limit, with confidence.
    None,
    /// These rows are worse: by more than the limit, and significantly.
    Worse(Vec<&'a ComparisonRow>),
    /// No row is proved worse, but these may be worse by more than the limit: they are too noisy, or measured
    /// once.
    Undecided(Vec<&'a ComparisonRow>),
}

/// The result of comparing two sides.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The directories of the first side.
    pub a: String,
    /// The directories of the second side.
    pub b: String,
    /// What the intervals cover, in one sentence.
    pub intervals: &'static str,
    /// Differences between machines and plans, one sentence each.
    pub differences: Vec<String>,
    /// One row for each metric of each cell.
    pub rows: Vec<ComparisonRow>,
    /// Each metric over all comparable cells.
    pub overall: Vec<OverallRow>,
}

impl Comparison {
    /// Number of rows with this verdict.
    pub fn count(&self, verdict: ChangeVerdict) -> usize {
        self.rows.iter().filter(|row| row.verdict == verdict).count()
    }

    /// Whether a row is worse by more than `percent`, or whether that cannot be told.
    pub fn regression(&self, percent: f64) -> RegressionVerdict<'_> {
        let rows = |wanted: fn(&ComparisonRow, f64) -> bool| -> Vec<&ComparisonRow> {
            self.rows.iter().filter(|row| wanted(row, percent)).collect()
        };
        let worse = rows(|row, percent| {
            row.verdict == ChangeVerdict::Slower && row.worse_percent().is_some_and(|worse| worse > percent)
        });
        if !worse.is_empty() {
            return RegressionVerdict::Worse(worse);
        }
        let undecided = rows(|row, percent| {
            matches!(row.verdict, ChangeVerdict::TooNoisy | ChangeVerdict::NoInterval)
                && row.worst_percent() > percent
        });
        match undecided.is_empty() {
            true => RegressionVerdict::None,
            false => RegressionVerdict::Undecided(undecided),
        }
    }
}

/// Compares side `b` with the baseline `a`. Each side has at least one run. If a side has several, the runs
/// are the replicates, and the variation between runs is measured; otherwise the blocks of repetitions are,
/// and it is extrapolated from how the blocks differ.
pub fn compare(a: &[RunDirectory], b: &[RunDirectory], rules: CompareOptions) -> Comparison {
    let mut comparison = undecided(a, b, rules);
    decide(comparison.rows.iter_mut(), rules);
    comparison
}

/// The comparison of both sides, without verdicts.
fn undecided(a: &[RunDirectory], b: &[RunDirectory], rules: CompareOptions) -> Comparison {
    let by_runs = a.len() + b.len() > 2;
    let (a_side, b_side) = (replicated_records(a, by_runs), replicated_records(b, by_runs));
    let order = if by_runs { ReplicateOrder::Exchangeable } else { ReplicateOrder::SeparateRuns };
    let names = |runs: &[RunDirectory]| {
        runs.iter().map(|run| run.path.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    let intervals = if by_runs {
        "Intervals cover the variation between runs, as the runs of a side show it."
    } else {
        "Intervals cover the variation between two successive runs, extrapolated from the blocks of each run; several \
         runs of a side (--a-run, --b-run) measure it."
    };
    let differences = match (a.first(), b.first()) {
        (Some(a), Some(b)) => differences(a, b),
        _ => Vec::new(),
    };
    let (rows, overall) = undecided_records(&a_side, &b_side, order, rules);
    Comparison { a: names(a), b: names(b), intervals, differences, rows, overall }
}

/// A record and the replicate that it belongs to.
struct ReplicatedRecord<'a> {
    replicate: usize,
    record: &'a CellRecord,
}

fn replicated_records(runs: &[RunDirectory], by_runs: bool) -> Vec<ReplicatedRecord<'_>> {
    let mut replicated = Vec::new();
    for (run, directory) in runs.iter().enumerate() {
        for record in &directory.records {
            let replicate = if by_runs { run } else { record.repetition as usize };
            replicated.push(ReplicatedRecord { replicate, record });
        }
    }
    replicated
}

/// Both sides of a cell.
struct MatchedCell<'a> {
    a: Option<ReplicatedSide<'a>>,
    b: Option<ReplicatedSide<'a>>,
}

/// One side of a cell: its records, and the replicate of each.
struct ReplicatedSide<'a> {
    cell: ExperimentCell<'a>,
    replicates: Vec<usize>,
}

impl ReplicatedSide<'_> {
    /// Each replicate with the mean of its values.
    fn values(&self, metric: &str) -> Vec<(usize, f64)> {
        let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for (record, replicate) in self.cell.records.iter().zip(&self.replicates) {
            let value = record.metric("fg", metric).filter(|value| record.is_measured() && *value > 0.0);
            let Some(value) = value else { continue };
            let sum = sums.entry(*replicate).or_default();
            *sum = (sum.0 + value.ln(), sum.1 + 1.0);
        }
        sums.into_iter().map(|(replicate, (sum, count))| (replicate, (sum / count).exp())).collect()
    }

    /// The geometric mean: the ratio of both sides' is that of the comparison.
    fn mean(&self, metric: &str) -> Option<f64> {
        let values = self.values(metric);
        let sum: f64 = values.iter().map(|(_, value)| value.ln()).sum();
        (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
    }
}

/// Matches the cells of both sides, in the order in which they first appear.
fn matched_cells<'a>(a: &[ReplicatedRecord<'a>], b: &[ReplicatedRecord<'a>]) -> Vec<MatchedCell<'a>> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut cells: Vec<MatchedCell<'a>> = Vec::new();
    for (second, side) in [(false, a), (true, b)] {
        for ReplicatedRecord { replicate, record } in side {
            let place = *places.entry(record.cell_key()).or_insert(cells.len());
            if place == cells.len() {
                cells.push(MatchedCell { a: None, b: None });
            }
            let cell = if second { &mut cells[place].b } else { &mut cells[place].a };
            let cell = cell.get_or_insert_with(|| ReplicatedSide {
                cell: ExperimentCell {
                    experiment: &record.experiment,
                    series: &record.series,
                    parameters: &record.parameters,
                    records: Vec::new(),
                },
                replicates: Vec::new(),
            });
            cell.cell.records.push(record);
            cell.replicates.push(*replicate);
        }
    }
    cells
}

fn compare_records(
    a: &[ReplicatedRecord<'_>],
    b: &[ReplicatedRecord<'_>],
    order: ReplicateOrder,
    rules: CompareOptions,
) -> (Vec<ComparisonRow>, Vec<OverallRow>) {
    let (mut rows, overall) = undecided_records(a, b, order, rules);
    decide(rows.iter_mut(), rules);
    (rows, overall)
}

/// Rows without verdicts.
fn undecided_records(
    a: &[ReplicatedRecord<'_>],
    b: &[ReplicatedRecord<'_>],
    order: ReplicateOrder,
    rules: CompareOptions,
) -> (Vec<ComparisonRow>, Vec<OverallRow>) {
    let matched = matched_cells(a, b);
    let mut rows: Vec<Vec<ComparisonRow>> = matched.iter().map(|cell| missing_rows(cell)).collect();
    let mut overall = Vec::new();
    for metric in METRICS {
        let comparable = |cell: &MatchedCell<'_>| match (&cell.a, &cell.b) {
            (Some(a), Some(b)) if incomparable_reason(&a.cell, &b.cell).is_none() => {
                ReplicatedCell { a: a.values(metric), b: b.values(metric) }
            }
            _ => ReplicatedCell::default(),
        };
        let cells: Vec<ReplicatedCell> = matched.iter().map(comparable).collect();
        let effects = compare_replicates(&cells, order, rules.confidence_level);
        let count = effects.cells.iter().flatten().count();
        overall.extend(effects.overall.map(|effect| OverallRow {
            metric,
            ratio: effect.ratio,
            interval: effect.interval,
            cells: count,
        }));
        for ((cell, effect), rows) in matched.iter().zip(effects.cells).zip(&mut rows) {
            rows.extend(row(cell, metric, effect));
        }
    }
    (rows.into_iter().flatten().collect(), overall)
}

/// The row of a metric whose cells both sides have; its verdict is set by [`decide`].
fn row(
    cell: &MatchedCell<'_>,
    metric: &'static str,
    effect: Option<ReplicateEffect>,
) -> Option<ComparisonRow> {
    let (a, b) = (cell.a.as_ref()?, cell.b.as_ref()?);
    let incomparable = incomparable_reason(&a.cell, &b.cell);
    let (mean_a, mean_b) = (a.mean(metric)?, b.mean(metric)?);
    if effect.is_none() && incomparable.is_none() {
        return None;
    }
    let ratio = effect.map(|effect| effect.ratio).or((mean_a > 0.0).then_some(mean_b / mean_a));
    Some(ComparisonRow {
        experiment: a.cell.experiment.to_string(),
        cell: a.cell.parameter_label(),
        metric,
        a: Some(mean_a),
        b: Some(mean_b),
        ratio,
        interval: effect.and_then(|effect| effect.interval),
        corrected_p_value: effect.and_then(|effect| effect.p_value),
        verdict: if incomparable.is_some() {
            ChangeVerdict::NotComparable
        } else {
            ChangeVerdict::NoInterval
        },
        remark: incomparable.unwrap_or_default(),
    })
}

/// Corrects the p-values for their number and sets the verdicts of all rows that have an interval.
fn decide<'a>(rows: impl Iterator<Item = &'a mut ComparisonRow>, rules: CompareOptions) {
    let tested: Vec<&mut ComparisonRow> = rows.filter(|row| row.corrected_p_value.is_some()).collect();
    let p_values: Vec<f64> = tested.iter().filter_map(|row| row.corrected_p_value).collect();
    let corrected = corrected_p_values(&p_values);
    for (row, corrected) in tested.into_iter().zip(corrected) {
        row.corrected_p_value = Some(corrected);
        if row.verdict == ChangeVerdict::NoInterval {
            row.verdict = verdict(row, corrected, rules);
        }
    }
}

fn verdict(row: &ComparisonRow, corrected_p_value: f64, rules: CompareOptions) -> ChangeVerdict {
    let (Some(ratio), Some(interval)) = (row.ratio, row.interval) else { return ChangeVerdict::NoInterval };
    let within = |percent: f64, ratio: f64| ratio.ln().abs() <= (percent / 100.0).ln_1p();
    if corrected_p_value > 1.0 - rules.confidence_level {
        let matters = rules.difference_percent.max(rules.noise_percent);
        let same = within(matters, interval.low) && within(matters, interval.high);
        return if same { ChangeVerdict::Same } else { ChangeVerdict::TooNoisy };
    }
    if within(rules.noise_percent, ratio) {
        return ChangeVerdict::Same;
    }
    let more = direction(row.metric) == MetricDirection::HigherIsBetter;
    if (ratio > 1.0) == more { ChangeVerdict::Faster } else { ChangeVerdict::Slower }
}

/// The row of a cell that a side lacks or has not measured.
fn missing_rows(cell: &MatchedCell<'_>) -> Vec<ComparisonRow> {
    match (&cell.a, &cell.b) {
        (Some(a), None) => vec![missing_row(&a.cell, "missing in the second run")],
        (None, Some(b)) => vec![missing_row(&b.cell, "missing in the first run")],
        (Some(a), Some(b)) => {
            let reason = [(&a.cell, "first"), (&b.cell, "second")].into_iter().find_map(|(cell, which)| {
                Some(format!("not measured in the {which} run: {}", cell.missing_reason()?))
            });
            let common = || METRICS.iter().any(|metric| a.mean(metric).is_some() && b.mean(metric).is_some());
            match reason {
                Some(reason) => vec![missing_row(&a.cell, &reason)],
                None if !common() => vec![missing_row(&a.cell, "no metric in common")],
                None => Vec::new(),
            }
        }
        (None, None) => Vec::new(),
    }
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
        corrected_p_value: None,
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
    // Free memory is never the same twice, and says nothing.
    for (name, value) in left.iter().filter(|(name, _)| !name.ends_with("available memory bytes")) {
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
