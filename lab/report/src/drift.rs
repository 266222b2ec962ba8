//! Estimates how much a run drifted: how its metrics changed with time, independently of the cells' parameters.
//!
//! The cells are measured in shuffled blocks, so that drift adds to the scatter of repetitions instead of shifting
//! some cells. Repetitions of one cell at different times show it: a common slope is fitted through the logarithms of
//! all cells, each with a level of its own (the regression with fixed effects).

use lab_experiments::RunDirectory;

use crate::cells::{ExperimentCell, group_into_cells};
use crate::metric;
use crate::stats::{ConfidenceInterval, t_reach};

/// The metrics whose drift is estimated.
pub const METRICS: [&str; 2] = ["iops", "clat_p99_us"];

/// The drift of one metric from the start of the first measurement to that of the last.
#[derive(Clone, Debug, PartialEq)]
pub struct Drift {
    /// One of [`METRICS`].
    pub metric: &'static str,
    /// The last value divided by the first, as the common slope predicts it.
    pub ratio: f64,
    /// The 95 % confidence interval of the ratio.
    pub interval: ConfidenceInterval,
    /// Number of cells with at least two repetitions.
    pub cells: usize,
}

impl Drift {
    /// Whether the interval excludes that nothing changed.
    pub fn is_significant(&self) -> bool {
        !self.interval.contains(1.0)
    }

    /// For example `throughput drifted by -3.1 % over the run (95 %: -4.0 to -2.2 %, 12 cells)`.
    pub fn sentence(&self) -> String {
        let percent = |ratio: f64| format!("{:+.1}", (ratio - 1.0) * 100.0);
        let name = metric::display_name(self.metric);
        let what = match self.is_significant() {
            true => format!("{name} drifted by"),
            false => format!("{name} has no significant drift:"),
        };
        format!(
            "{what} {} % over the run (95 %: {} to {} %, {} cells)",
            percent(self.ratio),
            percent(self.interval.low),
            percent(self.interval.high),
            self.cells
        )
    }
}

/// The drift of each metric that can be estimated: it needs repetitions at different times, and at least three
/// degrees of freedom.
pub fn drift(run: &RunDirectory) -> Vec<Drift> {
    let cells = group_into_cells(&run.records);
    METRICS.iter().filter_map(|metric| drift_of(&cells, metric)).collect()
}

fn drift_of(cells: &[ExperimentCell<'_>], metric: &'static str) -> Option<Drift> {
    let points: Vec<Vec<(f64, f64)>> = cells.iter().map(|cell| points(cell, metric)).collect();
    let times = || points.iter().flatten().map(|point| point.0);
    let duration_s = times().fold(0.0, f64::max) - times().fold(f64::INFINITY, f64::min);
    let repeated: Vec<&Vec<(f64, f64)>> = points.iter().filter(|points| points.len() > 1).collect();
    // Sums of squares and products of the deviations from each cell's means.
    let (mut tt, mut ty, mut yy, mut count) = (0.0, 0.0, 0.0, 0);
    for points in &repeated {
        let size = points.len() as f64;
        let (mean_t, mean_y) =
            points.iter().fold((0.0, 0.0), |(sum_t, sum_y), (t, y)| (sum_t + t / size, sum_y + y / size));
        for (t, y) in points.iter() {
            tt += (t - mean_t).powi(2);
            ty += (t - mean_t) * (y - mean_y);
            yy += (y - mean_y).powi(2);
        }
        count += points.len();
    }
    let degrees_of_freedom = count.checked_sub(repeated.len() + 1).filter(|df| *df >= 3)? as f64;
    if tt <= 0.0 {
        return None;
    }
    let slope = ty / tt;
    let residual = (yy - slope * ty).max(0.0) / degrees_of_freedom;
    let reach = t_reach(0.95, degrees_of_freedom)? * (residual / tt).sqrt() * duration_s;
    let change = slope * duration_s;
    let interval = ConfidenceInterval { low: (change - reach).exp(), high: (change + reach).exp() };
    (interval.low.is_finite() && interval.high.is_finite()).then(|| Drift {
        metric,
        ratio: change.exp(),
        interval,
        cells: repeated.len(),
    })
}

/// Start times in seconds and logarithms of the values of a cell's repetitions.
fn points(cell: &ExperimentCell<'_>, metric: &str) -> Vec<(f64, f64)> {
    let point = |record: &lab_experiments::CellRecord| {
        let value = record.metric("fg", metric).filter(|value| *value > 0.0)?;
        (record.started_unix_ms > 0).then(|| (record.started_unix_ms as f64 / 1e3, value.ln()))
    };
    cell.measured().filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use lab_experiments::{CellRecord, ParameterValue, measurement_order};
    use random::WyRand;

    use super::*;

    const CELLS: i64 = 12;

    /// A shuffled run of twelve cells with three repetitions that becomes slower by `percent` from its start to its
    /// end, with a scatter of 1 %.
    fn run(percent: f64, seed: u64) -> RunDirectory {
        let mut random = WyRand::new(seed);
        let mut run = RunDirectory::default();
        run.plan.order_seed = seed;
        let cell = lab_experiments::PlannedCell { repetitions: 3, ..Default::default() };
        let cells = vec![cell; CELLS as usize];
        run.plan.experiments = vec![lab_experiments::PlannedExperiment { cells, ..Default::default() }];
        let order = measurement_order(&run.plan);
        for measurement in &order {
            let mut record = CellRecord::new("t.fig", "none");
            record.parameters.insert("iodepth".into(), ParameterValue::from(measurement.cell as i64));
            record.repetition = measurement.repetition;
            record.started_unix_ms = 1_000_000 + 2_500 * u64::from(measurement.position);
            let time = f64::from(measurement.position) / (order.len() - 1) as f64;
            let level = 1e4 * (1 + measurement.cell) as f64;
            let noise = (0.01 * random.normal()).exp();
            record.role_mut("fg").set("iops", level * (1.0 - percent / 100.0 * time) * noise);
            run.records.push(record);
        }
        run
    }

    #[test]
    fn drift_is_estimated_across_cells_of_different_levels() {
        let found = drift(&run(20.0, 1));
        assert_eq!(found.len(), 1, "no tail latency was measured");
        assert!((found[0].ratio - 0.8).abs() < 0.02 && found[0].is_significant(), "{found:?}");
        assert_eq!(found[0].cells, CELLS as usize);
        let text = found[0].sentence();
        assert!(text.starts_with("throughput drifted by -") && text.contains("(95 %: -"), "{text}");
    }

    #[test]
    fn a_run_without_drift_is_rarely_reported_as_drifting() {
        let wrong = (0..400).filter(|seed| drift(&run(0.0, *seed))[0].is_significant()).count();
        assert!(wrong <= 32, "{wrong} of 400, of which 20 are expected");
        let text = drift(&run(0.0, 3))[0].sentence();
        assert!(text.starts_with("throughput has no significant drift: "), "{text}");
    }

    #[test]
    fn without_repetitions_or_times_there_is_no_estimate() {
        let mut once = run(20.0, 1);
        once.records.retain(|record| record.repetition == 0);
        assert_eq!(drift(&once), []);
        let mut untimed = run(20.0, 1);
        for record in &mut untimed.records {
            record.started_unix_ms = 0;
        }
        assert_eq!(drift(&untimed), []);
        assert_eq!(drift(&RunDirectory::default()), []);
    }
}
