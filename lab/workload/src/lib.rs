//! The load generator: closed loops of reads and writes over any ring, measured.
//!
//! A [`JobSpec`] says what a job does, in fio's terms. A [`Generator`] does it over one channel on one
//! core and keeps the latencies in a [`Histogram`] of its own. [`run`] puts jobs on reactors, waits
//! for them and merges what they measured; [`fio`] writes that as fio's JSON.
//!
//! ```
//! use workload::{JobSpec, Workload};
//! let spec = JobSpec { workload: Workload::RandRead, io_depth: 32, ..JobSpec::default() };
//! assert_eq!(spec.block_bytes, 4096);
//! assert_eq!(workload::units::parse_bytes("4k"), Some(4096));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod batches;
mod conduct;
pub mod devices;
mod distribution;
mod fan;
pub mod fio;
mod generator;
mod histogram;
pub mod import;
pub mod jobfile;
mod kernel;
mod log;
mod pace;
mod place;
mod poller;
mod random;
mod result;
mod run;
mod side;
mod source;
mod spec;
mod transfer;
mod tuner;
pub mod units;
mod usage;
mod verify;

pub use conduct::{Conductor, Finished, Stage, Totals, generator_cost_ns, kernel_workers_ns, worker};
pub use distribution::{Distribution, Extent, Zone};
pub use generator::{Generator, IoChannel};
pub use histogram::Histogram;
pub use log::LogOptions;
pub use pace::{Arrivals, Rates};
pub use place::{Geometry, SetupError};
pub use poller::{DynChannel, JobPoller, Progress};
pub use random::Random;
pub use result::{Depths, Direction, IoFailure, JobResult, KernelThreads, Samples, SideResult};
pub use run::{RunError, Running, run, start};
pub use source::{Source, SourceError};
pub use spec::{Content, FileService, JobSpec, LatencyTarget, Sizes, Think, Verify, Workload};
pub use usage::Usage;
pub use verify::{Fault, Mismatch, Verifier};
