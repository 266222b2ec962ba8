//! A power failure after any write or flush of a random workload loses nothing that is in the log, and nothing else.
//!
//! The disk keeps each sector that was not flushed in any of its versions, so that writes are lost, torn and reordered.
//! After each write and flush, an image is loaded, the entries since the last complete checkpoint are applied again, and
//! every object is compared with an oracle.
#![allow(clippy::unwrap_used)]

mod rig;

use rig::{Fault, run_seed};

const SEEDS: u64 = 32;

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("RINGBOLT_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).unwrap(),
        Err(_) => 0..SEEDS,
    }
}

#[test]
fn every_crash_image_and_the_log_make_the_state_of_the_oracle() {
    let mut images = 0;
    for seed in seeds() {
        images += run_seed(seed, Fault::None).unwrap_or_else(|error| panic!("RINGBOLT_SEED={seed}: {error}"));
    }
    println!("{images} images");
}

/// The test finds each fault that its caller can make in the order of a checkpoint, and finds that it needs delayed
/// deallocation.
#[test]
fn planted_faults_are_found() {
    for fault in [Fault::NoDataFlush, Fault::LogFreedEarly, Fault::NoChecksum, Fault::FreedAtOnce] {
        let found = (0..SEEDS).find_map(|seed| run_seed(seed, fault).err());
        println!("{fault:?}: {}", found.unwrap_or_else(|| panic!("{fault:?} is not found")));
    }
}
