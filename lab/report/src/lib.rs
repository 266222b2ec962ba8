//! Reports on a run of the lab: an HTML page, a comparison of two runs, a recommendation, CSV and JSON.
//!
//! [`lab_experiments::RunDirectory`] reads a run directory. [`page::render_html`] renders one self-contained HTML
//! file, [`compare::compare`] compares two runs, [`advise::advise`] recommends an API and a scheduler with
//! the evidence, and [`export`] writes CSV and JSON. [`study`] pairs a run with the published studies,
//! [`figure`] selects and arranges the data that an experiment's definition describes, [`chart`] renders SVG
//! and [`stats`] computes medians, confidence intervals and ratios. This crate measures nothing and opens
//! no connection.
//!
//! ```no_run
//! let run = lab_experiments::RunDirectory::open(std::path::Path::new("runs/today"))?;
//! std::fs::write("report.html", lab_report::page::render_html(&run)?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod advise;
pub mod chart;
pub mod compare;
pub mod drift;
pub mod export;
pub mod figure;
pub mod medium;
pub mod metric;
pub mod page;
pub mod stats;
pub mod study;

mod cells;

pub use cells::{ExperimentCell, group_into_cells};
