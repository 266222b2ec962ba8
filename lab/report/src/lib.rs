//! What a run of the lab says: a page, a comparison, advice, tables for other programs.
//!
//! A run is read with [`experiments::Run`]. [`page::report`] makes one HTML file of it, [`compare::compare`]
//! sets it against another, [`advise::advise`] names an API and a scheduler with the evidence, and
//! [`export`] hands the numbers on. Underneath, [`study`] puts a run beside the published studies,
//! [`figure`] draws what an experiment's definition describes, [`chart`] is the drawing and [`stats`] what
//! verdicts stand on. Nothing here measures anything or opens a connection.
//!
//! ```no_run
//! let run = experiments::Run::open(std::path::Path::new("runs/today"))?;
//! std::fs::write("report.html", report::page::report(&run)?)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod advise;
pub mod chart;
pub mod compare;
pub mod export;
pub mod figure;
pub mod metric;
pub mod page;
pub mod stats;
pub mod study;

mod cells;

pub use cells::{Cell, cells};
