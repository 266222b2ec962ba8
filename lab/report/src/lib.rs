//! What a run of the lab says: reports, comparisons and advice.
//!
//! [`stats`] holds the statistics that verdicts stand on, [`chart`] draws figures as inline SVG.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod advise;
pub mod chart;
pub mod figure;
pub mod metric;
pub mod stats;

mod cells;

pub use cells::{Cell, cells};
