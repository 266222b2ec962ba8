//! Crashes: random changes of a store on a disk whose power fails at any moment.
//!
//! A run makes a store, changes it with many I/O in flight, and cuts the power: writes that were not durable
//! are lost, torn at what the disk writes as a whole, or reordered. What is left is loaded, checked and
//! compared with a model: what was acknowledged is there, and each change that was in flight is there as a
//! whole or not at all. The run continues with what was loaded.
//!
//! `BLOBSTORE_SEEDS=1000000 BLOBSTORE_FIRST_SEED=0 cargo test -p ringbolt-blobstore --lib seeds` runs as
//! many; a failure names its seed.

mod disk;
mod model;
mod repair;
mod runner;
mod tests;

/// Bytes of a cluster.
const CLUSTER: usize = 16 << 10;
/// Bytes of a part of a cluster that is written at once.
const UNIT: usize = 4096;
/// Parts of a cluster.
const UNITS: usize = CLUSTER / UNIT;
