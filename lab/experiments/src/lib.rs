//! Repeats published storage studies: experiments as data, and a runner that measures them on this machine.
//!
//! [`runner::run`] measures the cells of a [`RunPlan`] and appends a [`CellRecord`] for each, one combination of
//! parameters measured once, to a [`RunDirectory`]. `docs/LAB-SCHEMA.md` describes the files.
//!
//! ```
//! use lab_experiments::{CellRecord, ParameterValue};
//! let mut record = CellRecord::new("cheops23.fig5a", "iou");
//! record.parameters.insert("iodepth".into(), ParameterValue::from(8));
//! record.role_mut("fg").set("iops", 474_000.0);
//! assert_eq!(record.metric("fg", "iops"), Some(474_000.0));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod capabilities;
mod catalog;
mod check;
mod cpu_time;
mod definition;
pub mod devices;
pub mod doctor;
mod fio_histogram_log;
mod fio_output;
pub mod generator;
pub mod host;
mod job_file;
pub mod journal;
mod kyber_tokens;
pub mod locks;
pub mod loops;
mod meters;
mod order;
pub mod plan;
pub mod processes;
mod queue_settings;
mod record;
pub mod reference;
pub mod runner;
mod scaling;
mod scatter;
mod settings;
pub mod steady;

pub use catalog::{CatalogError, ExperimentCatalog};
pub use check::{
    Aggregation, CheckOutcome, Finding, FindingCheck, FindingOutcome, MetricQuery, Precision, Relation,
    Verdict,
};
pub use definition::{
    CellGroup, CellRule, ExperimentDefinition, PublishedPoint, PublishedTable, PublishedTimes, Scale,
};
pub use order::{PlannedMeasurement, is_second_side, measurement_order};
pub use record::{
    CellParameters, CellRecord, GeneratorInfo, MachineRecord, ParameterValue, PlannedCell, PlannedDevice,
    PlannedExperiment, RoleRecord, RunDirectory, RunDirectoryError, RunPlan, RunWriter, SCHEMA,
    SchedulerState, TimelineSlice,
};
pub use scatter::{Scatter, pooled_scatter};

/// The available counters by name: `yes`, or why one is not available.
pub fn available_counters() -> Vec<(String, String)> {
    perf_counters::probe()
}
