//! The published storage studies as data, and what reruns them on this machine.
//!
//! A [`Run`] is the directory that one run leaves behind, and a [`CellRecord`] one line of its results:
//! one combination of parameters, measured once. `docs/LAB-SCHEMA.md` describes the files.
//!
//! ```
//! use lab_experiments::{CellRecord, Value};
//! let mut record = CellRecord::new("cheops23.fig5a", "iou");
//! record.parameters.insert("iodepth".into(), Value::from(8));
//! record.role_mut("fg").set("iops", 474_000.0);
//! assert_eq!(record.metric("fg", "iops"), Some(474_000.0));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod catalog;
mod check;
mod conditions;
mod definition;
pub mod doctor;
pub mod generator;
pub mod host;
mod job;
pub mod journal;
pub mod locks;
pub mod loops;
mod meters;
mod outcome;
pub mod plan;
pub mod processes;
mod queue;
mod record;
pub mod reference;
pub mod runner;
mod scaling;
pub mod session;
pub mod steady;
pub mod target;
mod tokens;
mod watch;

pub use catalog::{Catalog, CatalogError};
pub use check::{Check, Finding, FindingOutcome, Outcome, Pick, Relation, Take, Verdict};
pub use definition::{Also, Definition, Published, Reference, Rule, Scale, Time};
pub use record::{
    CellRecord, Error, GeneratorUse, Machine, Parameters, Plan, PlannedCell, PlannedExperiment, RoleRecord,
    Run, RunWriter, SCHEMA, SchedulerState, Target, Value,
};

/// What can be counted on this machine, by name: `yes`, or why not.
pub fn counting() -> Vec<(String, String)> {
    perf_counters::probe()
}
