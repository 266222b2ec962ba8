//! The seeds that are run, and the faults that they find.

use std::time::{Duration, Instant};

use super::runner::{RunOptions, run_seed};
use crate::fs::FileFault;

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Runs some seconds, or as many seeds as the environment says.
#[test]
fn seeds_of_crashes_leave_what_was_synced() {
    let (first, seeds) = (number("BLOBFS_FIRST_SEED", 0), number("BLOBFS_SEEDS", 0));
    let time = if seeds > 0 { Duration::MAX } else { Duration::from_secs(6) };
    let seeds = if seeds > 0 { seeds } else { 3000 };
    let began = Instant::now();
    let mut ran = 0;
    for seed in first..first + seeds {
        if let Err(problem) = run_seed(seed, RunOptions::default()) {
            panic!("seed {seed}:\n{problem}");
        }
        ran += 1;
        if began.elapsed() > time {
            break;
        }
    }
    println!("{ran} seeds");
}

#[test]
fn a_crash_after_each_step_leaves_what_was_synced() {
    let began = Instant::now();
    for seed in 0..u64::MAX {
        for steps in 0..150 {
            let options = RunOptions { steps: Some(steps), ..RunOptions::default() };
            if let Err(problem) = run_seed(seed, options) {
                panic!("seed {seed} with {steps} steps:\n{problem}");
            }
            if began.elapsed() > Duration::from_secs(3) {
                return;
            }
        }
    }
}

#[test]
fn each_planted_fault_is_found() {
    for fault in FileFault::ALL {
        let options = RunOptions { fault: Some(fault), ..RunOptions::default() };
        let found = (0..5000).find(|seed| {
            std::panic::catch_unwind(|| run_seed(*seed, options)).map_or(true, |result| result.is_err())
        });
        assert!(found.is_some(), "{fault:?} was not found");
        println!("{fault:?} was found by seed {found:?}");
    }
}
