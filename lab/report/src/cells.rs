//! Groups the records of a run into cells: all repetitions of one combination of parameters.

use std::collections::HashMap;

use lab_experiments::{CellParameters, CellRecord};

use crate::stats::{ConfidenceInterval, median, median_interval};

/// Seed of all bootstrap resampling, fixed so that the same run always renders the same report.
const SEED: u64 = 0x5269_6e67;

/// One combination of parameters of an experiment, with the records of its repetitions.
#[derive(Clone, Debug)]
pub struct ExperimentCell<'a> {
    /// The experiment's identifier, for example `icpe24.fig2`.
    pub experiment: &'a str,
    /// The series (line) of the figure that the cell belongs to.
    pub series: &'a str,
    /// The parameters that identify the cell within its experiment.
    pub parameters: &'a CellParameters,
    /// The records of all repetitions, including skipped and failed ones.
    pub records: Vec<&'a CellRecord>,
}

impl<'a> ExperimentCell<'a> {
    /// The repetitions that hold measurements.
    pub fn measured(&self) -> impl Iterator<Item = &'a CellRecord> + '_ {
        self.records.iter().copied().filter(|record| record.is_measured())
    }

    /// The values of a metric, one for each repetition that has it. `iops_per_core` is derived: IOPS divided
    /// by the cores that the role's processes and the kernel threads keep busy.
    pub fn values(&self, role: &str, metric: &str) -> Vec<f64> {
        self.measured().filter_map(|record| value(record, role, metric)).collect()
    }

    /// The median of a metric over the repetitions.
    pub fn median(&self, role: &str, metric: &str) -> Option<f64> {
        median(&self.values(role, metric))
    }

    /// The 95 % confidence interval of the median; `None` for fewer than two repetitions.
    pub fn interval(&self, role: &str, metric: &str) -> Option<ConfidenceInterval> {
        median_interval(&self.values(role, metric), 0.95, SEED)
    }

    /// Why the cell has no measurement; `None` if it has one.
    pub fn missing_reason(&self) -> Option<&'a str> {
        if self.records.iter().any(|record| record.is_measured()) {
            return None;
        }
        let reason = |record: &&'a CellRecord| record.skipped.as_deref().or(record.failed.as_deref());
        Some(self.records.iter().find_map(reason).unwrap_or("no measurement was recorded"))
    }

    /// The parameters as `api iou, iodepth 8`.
    pub fn parameter_label(&self) -> String {
        let parts: Vec<String> =
            self.parameters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        parts.join(", ")
    }
}

fn value(record: &CellRecord, role: &str, metric: &str) -> Option<f64> {
    if metric != "iops_per_core" {
        return record.metric(role, metric).filter(|value| value.is_finite());
    }
    // Kernel threads poll and submit on behalf of the run, so their CPU time counts towards its cost.
    let cores =
        record.metric(role, "cpu_cores")? + record.metric("all", "kernel_thread_cores").unwrap_or(0.0);
    let iops = record.metric(role, "iops")?;
    // Below 0.01 cores, the resolution of CPU accounting dominates.
    (cores >= 0.01).then(|| iops / cores)
}

/// Groups records into cells, in the order in which they first appear.
pub fn group_into_cells(records: &[CellRecord]) -> Vec<ExperimentCell<'_>> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut cells: Vec<ExperimentCell<'_>> = Vec::new();
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
            cells.push(ExperimentCell {
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
    use lab_experiments::ParameterValue;

    fn record(depth: i64, repetition: u32, iops: f64) -> CellRecord {
        let mut record = CellRecord::new("t.fig", "iou");
        record.parameters.insert("iodepth".into(), ParameterValue::from(depth));
        record.repetition = repetition;
        record.role_mut("fg").set("iops", iops);
        record
    }

    #[test]
    fn repetitions_form_one_cell() {
        let records = [record(1, 0, 10.0), record(2, 0, 20.0), record(1, 1, 14.0), record(1, 2, 11.0)];
        let cells = group_into_cells(&records);
        assert_eq!(cells.len(), 2);
        assert_eq!(cells[0].values("fg", "iops"), [10.0, 14.0, 11.0]);
        assert_eq!(cells[0].median("fg", "iops"), Some(11.0));
        assert!(cells[0].interval("fg", "iops").is_some() && cells[1].interval("fg", "iops").is_none());
    }

    #[test]
    fn a_cell_without_a_measurement_has_a_reason() {
        let mut skipped = record(1, 0, 1.0);
        skipped.skipped = Some("no bfq in this kernel".into());
        let records = [skipped];
        assert_eq!(group_into_cells(&records)[0].missing_reason(), Some("no bfq in this kernel"));
        assert!(group_into_cells(&records)[0].values("fg", "iops").is_empty());
    }

    #[test]
    fn iops_per_core_includes_kernel_threads() {
        let mut record = record(1, 0, 1000.0);
        record.role_mut("fg").set("cpu_cores", 0.5);
        record.role_mut("all").set("kernel_thread_cores", 0.5);
        let records = [record];
        assert_eq!(group_into_cells(&records)[0].median("fg", "iops_per_core"), Some(1000.0));
    }
}
