//! The multipath scenario: it holds, repeats exactly, and its checks find planted faults.
#![allow(clippy::unwrap_used)]

use sim::scenario::{PlantedFault, run_multipath};

/// Seeds within which a planted fault is found; the rarest needs some tens.
const SEEDS_MAX: u64 = 1000;

#[test]
fn no_seed_loses_an_acknowledged_write() {
    let (mut requests, mut failed, mut faults) = (0, 0, 0);
    for seed in 1..=40 {
        let report = run_multipath(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
        requests += report.succeeded;
        failed += report.failed;
        faults += report.faults;
    }
    // The load runs, is disturbed, and mostly survives that.
    assert!(requests > 5_000 && faults > 100 && failed < requests / 10, "{requests} {failed} {faults}");
}

#[test]
fn a_seed_repeats_exactly_and_another_differs() {
    for seed in [3, 17, 99] {
        let run = |seed| run_multipath(seed, None).unwrap_or_else(|failure| panic!("{failure}"));
        let (one, other) = (run(seed), run(seed));
        assert_eq!(one, other, "seed {seed} does not repeat");
        assert_ne!(one.trace, run(seed + 1).trace);
    }
}

#[test]
fn planted_faults_are_found_and_reproduced_by_their_seed() {
    for fault in PlantedFault::ALL {
        let found = (1..=SEEDS_MAX).find_map(|seed| run_multipath(seed, Some(fault)).err());
        let failure = found.unwrap_or_else(|| panic!("{} is not found in {SEEDS_MAX} seeds", fault.name()));
        assert!(failure.why.contains("block"), "{failure}");
        assert!(failure.to_string().starts_with(&format!("seed {}:", failure.seed)));
        assert_eq!(run_multipath(failure.seed, Some(fault)), Err(failure));
    }
}
