//! Crashes: random requests on a disk whose power fails at any moment.
//!
//! A run has several requests and I/O in flight, and cuts the power: writes that were not durable are lost,
//! torn at what the disk writes as a whole, or reordered. What is left is opened and compared with a model:
//! what was synced is there, and each request that was in flight has happened as a whole or not at all.
//!
//! `BLOBFS_SEEDS=1000000 BLOBFS_FIRST_SEED=0 cargo test -p ringbolt-blobfs --lib seeds` runs as many; a
//! failure names its seed.

mod disk;
mod model;
mod runner;
mod tests;
