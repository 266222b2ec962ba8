//! A run's records, repetitions together.

use std::collections::HashMap;

use experiments::{CellRecord, Parameters};

use crate::stats::{Interval, median, median_interval};

/// Seed of all resampling: the same run gives the same report.
const SEED: u64 = 0x5269_6e67;

/// One combination of parameters, with everything that was measured of it.
#[derive(Clone, Debug)]
pub struct Cell<'a> {
    /// The experiment, as `icpe24.fig2`.
    pub experiment: &'a str,
    /// The line of the figure.
    pub series: &'a str,
    /// What tells it from its neighbours.
    pub parameters: &'a Parameters,
    /// Its repetitions, those that were skipped or failed included.
    pub records: Vec<&'a CellRecord>,
}

impl<'a> Cell<'a> {
    /// The repetitions that hold measurements.
    pub fn measured(&self) -> impl Iterator<Item = &'a CellRecord> + '_ {
        self.records.iter().copied().filter(|record| record.is_measured())
    }

    /// A metric, repetition by repetition. `iops_per_core` is computed: throughput over the processor
    /// time of the role and of the kernel threads that work for it.
    pub fn values(&self, role: &str, metric: &str) -> Vec<f64> {
        self.measured().filter_map(|record| value(record, role, metric)).collect()
    }

    /// The middle of a metric's repetitions.
    pub fn median(&self, role: &str, metric: &str) -> Option<f64> {
        median(&self.values(role, metric))
    }

    /// How sure the middle is; `None` with one repetition.
    pub fn interval(&self, role: &str, metric: &str) -> Option<Interval> {
        median_interval(&self.values(role, metric), 0.95, SEED)
    }

    /// Why there is nothing, where there is nothing.
    pub fn absent(&self) -> Option<&'a str> {
        if self.records.iter().any(|record| record.is_measured()) {
            return None;
        }
        let reason = |record: &&'a CellRecord| record.skipped.as_deref().or(record.failed.as_deref());
        Some(self.records.iter().find_map(reason).unwrap_or("nothing was measured"))
    }

    /// The parameters as `api iou, iodepth 8`.
    pub fn words(&self) -> String {
        let parts: Vec<String> =
            self.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        parts.join(", ")
    }
}

fn value(record: &CellRecord, role: &str, metric: &str) -> Option<f64> {
    if metric != "iops_per_core" {
        return record.metric(role, metric).filter(|value| value.is_finite());
    }
    // Kernel threads poll and submit for the whole run: they belong to it, whoever asked.
    let cores =
        record.metric(role, "cpu_cores")? + record.metric("all", "kernel_thread_cores").unwrap_or(0.0);
    let iops = record.metric(role, "iops")?;
    // Below a hundredth of a core the clock's tick is what is measured.
    (cores >= 0.01).then(|| iops / cores)
}

/// Groups records into cells, in the order in which they first appear.
pub fn cells(records: &[CellRecord]) -> Vec<Cell<'_>> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut cells: Vec<Cell<'_>> = Vec::new();
    for record in records {
        let mut key = record.experiment.clone();
        key.push('\u{1}');
        key.push_str(&record.series);
        for (name, value) in &record.parameters {
            key.push('\u{1}');
            key.push_str(name);
            key.push('=');
            key.push_str(&value.to_string());
        }
        let place = *places.entry(key).or_insert(cells.len());
        if place == cells.len() {
            cells.push(Cell {
                experiment: &record.experiment,
                series: &record.series,
                parameters: &record.parameters,
                records: Vec::new(),
            });
        }
        cells[place].records.push(record);
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use experiments::Value;

    fn record(depth: i64, repetition: u32, iops: f64) -> CellRecord {
        let mut record = CellRecord::new("t.fig", "iou");
        record.parameters.insert("iodepth".into(), Value::from(depth));
        record.repetition = repetition;
        record.role_mut("fg").set("iops", iops);
        record
    }

    #[test]
    fn repetitions_are_one_cell() {
        let records = [record(1, 0, 10.0), record(2, 0, 20.0), record(1, 1, 14.0), record(1, 2, 11.0)];
        let cells = cells(&records);
        assert_eq!(cells.len(), 2);
        assert_eq!(cells[0].values("fg", "iops"), [10.0, 14.0, 11.0]);
        assert_eq!(cells[0].median("fg", "iops"), Some(11.0));
        assert!(cells[0].interval("fg", "iops").is_some() && cells[1].interval("fg", "iops").is_none());
    }

    #[test]
    fn a_cell_without_a_measurement_says_why() {
        let mut skipped = record(1, 0, 1.0);
        skipped.skipped = Some("no bfq in this kernel".into());
        let records = [skipped];
        assert_eq!(cells(&records)[0].absent(), Some("no bfq in this kernel"));
        assert!(cells(&records)[0].values("fg", "iops").is_empty());
    }

    #[test]
    fn throughput_a_core_counts_kernel_threads() {
        let mut record = record(1, 0, 1000.0);
        record.role_mut("fg").set("cpu_cores", 0.5);
        record.role_mut("all").set("kernel_thread_cores", 0.5);
        let records = [record];
        assert_eq!(cells(&records)[0].median("fg", "iops_per_core"), Some(1000.0));
    }
}
