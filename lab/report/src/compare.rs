//! Two runs, cell by cell: what became faster, what slower, and what only chance tells apart.
//!
//! Cells are the same where experiment and parameters are. Of each metric the ratio of the geometric
//! means is taken, with Welch's interval over repetitions. A cell that was measured once on a side has a
//! ratio and no interval, and is never called faster or slower.

mod show;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use experiments::Run;
use serde::Serialize;

use crate::cells::{Cell, cells};
use crate::metric::{Better, better};
use crate::stats::{Interval, ratio_of_means};

pub use show::{html, text};

/// The metrics that are compared.
pub const METRICS: [&str; 4] = ["iops", "clat_p99_us", "clat_p999_us", "cpu_ns_per_io"];

/// How two runs are compared.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Confidence of the intervals, 0.95 say.
    pub level: f64,
    /// A difference below this, in per cent, is no difference: clocks, and positions on the medium.
    pub noise_percent: f64,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules { level: 0.95, noise_percent: 1.0 }
    }
}

/// What became of a metric of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Better by more than chance.
    Faster,
    /// Worse by more than chance.
    Slower,
    /// Chance may have done it.
    Same,
    /// Measured once on a side: a ratio, and no interval.
    NoInterval,
    /// One side has no measurement, or measured in another way.
    NotComparable,
}

impl Verdict {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::Same => "same within noise",
            Verdict::NoInterval => "no interval",
            Verdict::NotComparable => "not comparable",
        }
    }

    const ALL: [Verdict; 5] =
        [Verdict::Slower, Verdict::Faster, Verdict::Same, Verdict::NoInterval, Verdict::NotComparable];
}

/// One metric of one cell.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The experiment.
    pub experiment: String,
    /// The cell's parameters in words.
    pub cell: String,
    /// The metric.
    pub metric: &'static str,
    /// The middle of the first run's repetitions.
    pub a: Option<f64>,
    /// Of the second's.
    pub b: Option<f64>,
    /// The second over the first.
    pub ratio: Option<f64>,
    /// How sure that is.
    pub interval: Option<Interval>,
    /// What became of it.
    pub verdict: Verdict,
    /// Why it cannot be compared, or what to know.
    pub remark: String,
}

impl Row {
    /// By how many per cent the second run is worse; negative where it is better.
    pub fn worse_percent(&self) -> Option<f64> {
        let ratio = self.ratio.filter(|ratio| *ratio > 0.0)?;
        Some(match better(self.metric) {
            Better::More => (1.0 / ratio - 1.0) * 100.0,
            Better::Less | Better::Neither => (ratio - 1.0) * 100.0,
        })
    }
}

/// Two runs, compared.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The first run.
    pub a: String,
    /// The second.
    pub b: String,
    /// What differs between the machines or the plans, one sentence each.
    pub differences: Vec<String>,
    /// Every metric of every cell.
    pub rows: Vec<Row>,
    /// For each metric, the geometric mean of the ratios of all cells that have one, and their number.
    pub overall: Vec<(&'static str, f64, usize)>,
}

impl Comparison {
    /// How many rows have a verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.rows.iter().filter(|row| row.verdict == verdict).count()
    }

    /// Rows that are worse by more than `percent`. One without an interval counts as well: a gate that
    /// lets through what was measured once is none.
    pub fn regressions(&self, percent: f64) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| {
            matches!(row.verdict, Verdict::Slower | Verdict::NoInterval)
                && row.worse_percent().is_some_and(|worse| worse > percent)
        })
    }
}

/// Compares `b` with `a`.
pub fn compare(a: &Run, b: &Run, rules: Rules) -> Comparison {
    let (cells_a, cells_b) = (cells(&a.records), cells(&b.records));
    let key = |cell: &Cell<'_>| format!("{} {}", cell.experiment, cell.words());
    let places: HashMap<String, usize> =
        cells_b.iter().enumerate().map(|(at, cell)| (key(cell), at)).collect();
    let mut met = vec![false; cells_b.len()];
    let mut rows = Vec::new();
    for cell in &cells_a {
        let other = places.get(&key(cell)).copied();
        if let Some(place) = other {
            met[place] = true;
        }
        rows.extend(row_of(cell, other.map(|place| &cells_b[place]), rules));
    }
    for (cell, _) in cells_b.iter().zip(met).filter(|(_, met)| !met) {
        rows.push(missing(cell, "only the second run has it"));
    }
    let overall = METRICS
        .iter()
        .filter_map(|metric| {
            let logs: Vec<f64> = rows
                .iter()
                .filter(|row| row.metric == *metric && row.verdict != Verdict::NotComparable)
                .filter_map(|row| row.ratio.filter(|ratio| *ratio > 0.0).map(f64::ln))
                .collect();
            let count = logs.len();
            (count > 0).then(|| (*metric, (logs.iter().sum::<f64>() / count as f64).exp(), count))
        })
        .collect();
    let name = |run: &Run| run.path.display().to_string();
    Comparison { a: name(a), b: name(b), differences: differences(a, b), rows, overall }
}

fn row_of(a: &Cell<'_>, b: Option<&Cell<'_>>, rules: Rules) -> Vec<Row> {
    let Some(b) = b else { return vec![missing(a, "only the first run has it")] };
    for (cell, which) in [(a, "first"), (b, "second")] {
        if let Some(reason) = cell.absent() {
            return vec![missing(a, &format!("not measured in the {which} run: {reason}"))];
        }
    }
    let unlike = unlike(a, b);
    let mut rows = Vec::new();
    for metric in METRICS {
        let (left, right) = (a.values("fg", metric), b.values("fg", metric));
        let Some((ratio, interval)) = ratio_of_means(&left, &right, rules.level) else { continue };
        let verdict = match (&unlike, interval) {
            (Some(_), _) => Verdict::NotComparable,
            (None, None) => Verdict::NoInterval,
            (None, Some(interval)) => verdict(metric, ratio, interval, rules),
        };
        rows.push(Row {
            experiment: a.experiment.to_string(),
            cell: a.words(),
            metric,
            a: a.median("fg", metric),
            b: b.median("fg", metric),
            ratio: Some(ratio),
            interval,
            verdict,
            remark: unlike.clone().unwrap_or_default(),
        });
    }
    if rows.is_empty() {
        rows.push(missing(a, "no metric that both runs have"));
    }
    rows
}

fn verdict(metric: &str, ratio: f64, interval: Interval, rules: Rules) -> Verdict {
    let small = (ratio - 1.0).abs() * 100.0 < rules.noise_percent;
    if interval.contains(1.0) || small {
        return Verdict::Same;
    }
    let more = better(metric) == Better::More;
    if (ratio > 1.0) == more { Verdict::Faster } else { Verdict::Slower }
}

/// Why the two did not measure the same thing.
fn unlike(a: &Cell<'_>, b: &Cell<'_>) -> Option<String> {
    let generator = |cell: &Cell<'_>| cell.measured().next().map(|record| record.generator.name.clone());
    if let (Some(left), Some(right)) = (generator(a), generator(b))
        && left != right
    {
        return Some(format!("driven by {left} and by {right}"));
    }
    let path = |cell: &Cell<'_>| cell.measured().find_map(|record| record.submission_path.clone());
    if let (Some(left), Some(right)) = (path(a), path(b))
        && left != right
        && left != "unknown"
        && right != "unknown"
    {
        return Some(format!("requests went by way of {left} and of {right}"));
    }
    None
}

fn missing(cell: &Cell<'_>, remark: &str) -> Row {
    Row {
        experiment: cell.experiment.to_string(),
        cell: cell.words(),
        metric: METRICS[0],
        a: None,
        b: None,
        ratio: None,
        interval: None,
        verdict: Verdict::NotComparable,
        remark: remark.to_string(),
    }
}

/// What differs in the plans and the machines, of what would explain a difference.
fn differences(a: &Run, b: &Run) -> Vec<String> {
    let mut out = Vec::new();
    let mut differ = |what: &str, left: String, right: String| {
        if left != right {
            out.push(format!("{what}: {} against {}", shown(&left), shown(&right)));
        }
    };
    differ("scale", a.plan.scale.clone(), b.plan.scale.clone());
    differ("program", a.plan.program.clone(), b.plan.program.clone());
    differ("generator", a.plan.generator.clone(), b.plan.generator.clone());
    let targets = |run: &Run| {
        let words = run
            .plan
            .targets
            .iter()
            .map(|target| format!("{} {} {}", target.kind, target.path, target.described));
        words.collect::<Vec<_>>().join(", ")
    };
    differ("devices", targets(a), targets(b));
    let (left, right) = (crate::page::facts_of(a), crate::page::facts_of(b));
    for (name, value) in &left {
        if let Some((_, other)) = right.iter().find(|(other, _)| other == name) {
            differ(name, value.clone(), other.clone());
        }
    }
    /// More would hide those that matter; the runs hold them all.
    const DIFFERENCES_MAX: usize = 30;
    out.truncate(DIFFERENCES_MAX);
    out
}

fn shown(text: &str) -> String {
    const LETTERS_MAX: usize = 120;
    match text.chars().count() {
        0 => "nothing".to_string(),
        count if count > LETTERS_MAX => text.chars().take(LETTERS_MAX).chain(['…']).collect(),
        _ => text.to_string(),
    }
}
