//! Scenarios: what runs in a world, which faults happen to it, and what must hold.

mod multipath;

use std::fmt;

pub use replica::PlantedReplicaFault;

/// Errors that a scenario plants on purpose, to show that its checks find them. They exist in this crate
/// only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedFault {
    /// A target's disk acknowledges writes before it has them.
    EarlyAcknowledge,
    /// The host repeats a write on another path although its silent target may still execute it.
    LateCommand,
    /// The disk completes FUA writes from its volatile cache.
    IgnoredFua,
}

impl PlantedFault {
    /// All, by the names that [`name`](Self::name) returns.
    pub const ALL: [PlantedFault; 3] =
        [PlantedFault::EarlyAcknowledge, PlantedFault::LateCommand, PlantedFault::IgnoredFua];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PlantedFault::EarlyAcknowledge => "early-acknowledge",
            PlantedFault::LateCommand => "late-command",
            PlantedFault::IgnoredFua => "ignored-fua",
        }
    }
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeedReport {
    /// Requests of the hosts that succeeded.
    pub succeeded: u64,
    /// Requests of the hosts that failed.
    pub failed: u64,
    /// Faults that happened: crashes, power failures, pauses, partitions.
    pub faults: u64,
    /// Primaries that handed over to the preferred one.
    pub transfers: u64,
    /// Disks that were put back from a copy, and logs that lost their ends.
    pub aged: u64,
    /// Blocks that primaries compared with what the members have.
    pub scrubbed: u64,
    /// Copies of these that could not be read, and were written again.
    pub scrub_repairs: u64,
    /// Such a disk was alone, and nothing outside of it showed that: the run ended there, since acknowledged
    /// data may be lost.
    pub may_have_lost: bool,
    /// Simulated nanoseconds.
    pub simulated_ns: u64,
    /// Turns of all cores.
    pub turns: u64,
    /// Hash of all turns: equal seeds have equal ones.
    pub trace: u64,
}

/// A run found an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFailure {
    /// Reproduces the run.
    pub seed: u64,
    /// Simulated time, in nanoseconds.
    pub at_ns: u64,
    /// What is wrong.
    pub why: String,
}

impl fmt::Display for RunFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunFailure { seed, at_ns, why } = self;
        let time = *at_ns as f64 / 1e9;
        write!(formatter, "seed {seed}: at {time:.6} s: {why}")
    }
}

/// One or two hosts whose namespace has a path to each of two targets, on one disk, while targets crash, lose
/// power, pause and come back, and links are cut in one or both directions.
///
/// # Errors
/// A block had contents that it cannot have, or requests did not complete although everything works again.
pub fn run_multipath(seed: u64, fault: Option<PlantedFault>) -> Result<SeedReport, RunFailure> {
    multipath::run(seed, fault)
}

/// Replicas of a logical group with clients, while nodes crash, pause and lose their disks, links are cut,
/// lose, delay, repeat and reorder messages, clocks differ in rate, the map is out of reach, and placement
/// prefers one primary or another.
///
/// # Errors
/// What the clients saw of a block is not linearizable, replicas differ at rest, or requests did not complete
/// although everything works again.
pub fn run_replicas(seed: u64, fault: Option<PlantedReplicaFault>) -> Result<SeedReport, RunFailure> {
    crate::replicas::run(seed, fault)
}
