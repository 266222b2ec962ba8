//! Performance counters, and a sampling profiler that attributes CPU time to parts of the storage stack.
//!
//! [`ProcessCounters`] count events of a process and its descendants, [`SystemCounters`] those of the whole
//! machine. A [`CpuProfiler`] samples call chains on all CPUs and assigns each sample to a class by its
//! kernel symbols ([`SymbolClasses`], a data file). On machines without a cycle counter, such as most
//! virtual machines, [`probe`] reports that, and the profiler samples by time.
//!
//! ```
//! use perf_counters::SymbolClasses;
//! let classes = SymbolClasses::built_in();
//! assert_eq!(classes.classify(&["blk_mq_submit_bio", "io_submit_sqe"], false), "block_layer");
//! assert_eq!(classes.classify(&["_raw_spin_lock", "dd_insert_requests"], false), "locks");
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod classes;
mod counter;
mod profile;
mod symbols;

pub use classes::SymbolClasses;
pub use counter::{CounterEvent, CounterValue, ProcessCounters, SystemCounters, probe};
pub use profile::{CpuProfiler, ProfileShares};
pub use symbols::KernelSymbols;
