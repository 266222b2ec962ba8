//! The load generator: runs fio-style jobs, closed or open loop, over any block I/O channel and measures
//! them.
//!
//! A [`JobSpec`] describes a job in fio's terms. A [`Generator`] runs one job over one channel on one core
//! and records latencies in a [`Histogram`] of its own. [`run`] places jobs on reactors, waits for them and
//! returns their results; [`fio`] formats results as fio's JSON.
//!
//! ```
//! use workload::{JobSpec, Workload};
//! let spec = JobSpec { workload: Workload::RandRead, io_depth: 32, ..JobSpec::default() };
//! assert_eq!(spec.block_bytes, 4096);
//! assert_eq!(workload::units::parse_bytes("4k"), Some(4096));
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod accel_device;
mod access_pattern;
mod arrivals;
mod batches;
pub mod devices;
mod direction_stats;
mod distribution;
mod exponential;
pub mod fio;
mod flow;
mod generator;
mod histogram;
pub mod import;
mod job_groups;
mod job_runner;
pub mod jobfile;
mod kernel;
mod log;
mod multi_channel;
mod poller;
mod priorities;
mod rate_minimum;
mod result;
mod run;
mod source;
mod spec;
mod steady;
mod timeline;
mod transfer;
mod tuner;
pub mod units;
mod usage;
mod verify;
mod work;
mod zoned;

pub use accel_device::AccelSource;
pub use access_pattern::{Geometry, SetupError};
pub use arrivals::{ArrivalProcess, Rates};
pub use distribution::{AccessZone, Distribution, ZoneSize};
pub use flow::FlowOptions;
pub use generator::{Generator, IoChannel};
pub use histogram::Histogram;
pub use job_runner::{
    BdevReactors, FinishedJob, JobRunner, ProgressTotals, generator_cost_ns, kernel_workers_ns, worker,
};
pub use log::LogOptions;
pub use poller::{DynChannel, JobPoller, Progress};
pub use priorities::{CommandPriorities, PriorityShare};
pub(crate) use random::WyRand;
pub use result::{DepthCounts, Direction, DirectionResult, IoFailure, JobResult, KernelThreads, Samples};
pub use run::{RunError, RunningJob, run, start};
pub use source::{PreparedSource, Source, SourceError};
pub use spec::{
    BlockSizes, BufferContent, ErrorPolicy, FileService, FioVerify, JobSpec, LatencyTarget, OffsetSequence,
    RateMinima, ReducibleContent, StridedZones, ThinkTime, Verify, Workload,
};
pub use steady::{SteadyCriterion, SteadyOptions, SteadyResult};
pub use timeline::TimelineEntry;
pub use usage::Usage;
pub use verify::{FioHeaderField, Verifier, VerifyFault, VerifyMismatch};
pub use work::{WorkKind, WorkOptions};
pub use zoned::{RegionInZones, ZonedOptions};
