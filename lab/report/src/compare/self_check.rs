//! Evaluates a run that measured the same thing twice: whether it finds differences where there are none, and which
//! differences it could find.

use lab_experiments::{CellRecord, RunDirectory, is_second_side};
use serde::Serialize;

use super::{ChangeVerdict, CompareOptions, ComparisonRow, METRICS, ReplicatedRecord, compare_records};
use crate::chart::format_number;
use crate::metric;
use crate::stats::{ReplicateOrder, quantile};

/// Share of metrics that may differ by chance, in percent.
const SHARE_MAX_PERCENT: f64 = 5.0;

/// The resolution of throughput, in percent, beyond which findings are mostly undecided: the studies' effects of
/// schedulers are 5 to 50 %.
const RESOLUTION_MAX_PERCENT: f64 = 25.0;

/// The result of a self-check.
#[derive(Clone, Debug, Serialize)]
pub struct SelfCheck {
    /// Number of metrics of cells that were compared.
    pub compared: usize,
    /// Number of those that differ significantly, after the correction for their number.
    pub significant: usize,
    /// As [`SelfCheck::significant`], had the sides been two successive runs.
    pub significant_between_runs: usize,
    /// The differences that this machine can resolve.
    pub resolutions: Vec<Resolution>,
}

/// Half the width of the 95 % interval of a cell's ratio, in percent: a smaller difference cannot be told from noise.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Resolution {
    /// The metric.
    pub metric: &'static str,
    /// In half of the cells, between sides that are interleaved in one run.
    pub interleaved_percent: f64,
    /// In nine of ten cells.
    pub interleaved_p90_percent: f64,
    /// In half of the cells, between two successive runs, which is what `lab compare` compares.
    pub between_runs_percent: f64,
    /// In nine of ten cells.
    pub between_runs_p90_percent: f64,
}

impl SelfCheck {
    /// The share of metrics that differ significantly, in percent.
    pub fn share_percent(&self) -> f64 {
        100.0 * self.significant as f64 / self.compared.max(1) as f64
    }

    /// Whether the share is at most 5 %, and anything was compared.
    pub fn passes(&self) -> bool {
        self.compared > 0 && self.share_percent() <= SHARE_MAX_PERCENT
    }

    /// The result for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!(
            "Self-check: {} of {} metrics differ significantly ({} %; at most {SHARE_MAX_PERCENT} % are acceptable), {} \
             if the two halves were successive runs.\n",
            self.significant,
            self.compared,
            format_number(self.share_percent()),
            self.significant_between_runs,
        );
        text.push_str("Smallest difference that this machine resolves, in half and in nine of ten cells:\n");
        for one in &self.resolutions {
            text.push_str(&format!(
                "  {:<26} {:>6} % {:>6} % within a run, {:>6} % {:>6} % between two runs\n",
                metric::display_name(one.metric),
                format_number(one.interleaved_percent),
                format_number(one.interleaved_p90_percent),
                format_number(one.between_runs_percent),
                format_number(one.between_runs_p90_percent),
            ));
        }
        if let Some(percent) = self.too_coarse_percent() {
            text.push_str(&format!(
                "Too noisy for most findings: a throughput that differs by less than {} % is not seen here. `--repetitions` \
                 and `--runtime` narrow it; `ringbolt lab doctor` lists what distorts results.\n",
                format_number(percent)
            ));
        }
        text
    }

    /// The resolution of throughput within a run, in half of the cells, if it is too coarse to decide most findings. A check
    /// that passes then shows nothing but wide intervals.
    pub fn too_coarse_percent(&self) -> Option<f64> {
        let throughput = self.resolutions.iter().find(|one| one.metric == METRICS[0])?;
        Some(throughput.interleaved_percent).filter(|percent| *percent > RESOLUTION_MAX_PERCENT)
    }
}

/// Evaluates a run with `self_check` in its plan: its blocks belong alternately to two sides.
pub fn self_check(run: &RunDirectory) -> SelfCheck {
    let side = |second: bool| -> Vec<ReplicatedRecord<'_>> {
        let belongs = |record: &&CellRecord| is_second_side(record.repetition) == second;
        let replicated = |record| -> ReplicatedRecord<'_> {
            let record: &CellRecord = record;
            ReplicatedRecord { replicate: record.repetition as usize, record }
        };
        run.records.iter().filter(belongs).map(replicated).collect()
    };
    let (a, b) = (side(false), side(true));
    let rows = |order| compare_records(&a, &b, order, CompareOptions::default()).0;
    let interleaved = rows(ReplicateOrder::Exchangeable);
    let separate = rows(ReplicateOrder::SeparateRuns);
    let resolution = |metric: &'static str| {
        let near = |rows: &[ComparisonRow], q| quantile(&half_widths(rows, metric), q);
        Some(Resolution {
            metric,
            interleaved_percent: near(&interleaved, 0.5)?,
            interleaved_p90_percent: near(&interleaved, 0.9)?,
            between_runs_percent: near(&separate, 0.5)?,
            between_runs_p90_percent: near(&separate, 0.9)?,
        })
    };
    SelfCheck {
        compared: interleaved.iter().filter(|row| row.corrected_p_value.is_some()).count(),
        significant: significant(&interleaved),
        significant_between_runs: significant(&separate),
        resolutions: METRICS.iter().filter_map(|metric| resolution(metric)).collect(),
    }
}

fn significant(rows: &[ComparisonRow]) -> usize {
    let changed = [ChangeVerdict::Faster, ChangeVerdict::Slower];
    rows.iter().filter(|row| changed.contains(&row.verdict)).count()
}

/// Half the widths of the intervals of a metric, in percent.
fn half_widths(rows: &[ComparisonRow], metric: &str) -> Vec<f64> {
    let rows = rows.iter().filter(|row| row.metric == metric);
    rows.filter_map(|row| {
        let interval = row.interval?;
        Some((((interval.high / interval.low).ln() / 2.0).exp() - 1.0) * 100.0)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_resolves_little_is_reported() {
        for (percent, coarse) in [(3.0, false), (25.0, false), (56.0, true)] {
            let resolution = Resolution {
                metric: METRICS[0],
                interleaved_percent: percent,
                interleaved_p90_percent: percent,
                between_runs_percent: percent,
                between_runs_p90_percent: percent,
            };
            let check = SelfCheck {
                compared: 64,
                significant: 0,
                significant_between_runs: 0,
                resolutions: vec![resolution],
            };
            assert!(check.passes());
            assert_eq!(check.too_coarse_percent().is_some(), coarse, "{percent}");
            assert_eq!(check.text().contains("Too noisy for most findings"), coarse, "{percent}");
        }
    }
}
