//! The seeds that are run, and the faults that they find.

use std::time::{Duration, Instant};

use super::runner::{RunOptions, run_seed};
use crate::write::Fault;

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn run(seeds: std::ops::Range<u64>, options: RunOptions, time: Duration) -> u64 {
    let began = Instant::now();
    for seed in seeds.clone() {
        if let Err(problem) = run_seed(seed, options) {
            panic!("seed {seed} with {options:?}:\n{problem}");
        }
        if began.elapsed() > time {
            return seed - seeds.start + 1;
        }
    }
    seeds.end - seeds.start
}

/// Runs a second or so, or as many seeds as the environment says.
#[test]
fn seeds_of_crashes_leave_what_was_acknowledged() {
    let (first, seeds) = (number("BLOBSTORE_FIRST_SEED", 0), number("BLOBSTORE_SEEDS", 0));
    let time = if seeds > 0 { Duration::MAX } else { Duration::from_secs(10) };
    let seeds = if seeds > 0 { seeds } else { 3000 };
    let ran = run(first..first + seeds, RunOptions::default(), time);
    println!("{ran} seeds");
}

#[test]
fn a_crash_after_each_step_leaves_what_was_acknowledged() {
    let began = Instant::now();
    for seed in 0..u64::MAX {
        for steps in 0..150 {
            let options = RunOptions { steps: Some(steps), ..RunOptions::default() };
            run(seed..seed + 1, options, Duration::MAX);
        }
        if began.elapsed() > Duration::from_secs(4) {
            return;
        }
    }
}

#[test]
fn failed_io_leaves_a_store_that_loads() {
    let options = RunOptions { failing: 2, ..RunOptions::default() };
    let first = number("BLOBSTORE_FIRST_SEED", 0);
    run(first..first + 20_000, options, Duration::from_secs(4));
}

#[test]
fn each_planted_fault_is_found() {
    for fault in Fault::ALL {
        let options = RunOptions { fault: Some(fault), ..RunOptions::default() };
        let found = (0..20_000).find(|seed| {
            std::panic::catch_unwind(|| run_seed(*seed, options)).map_or(true, |result| result.is_err())
        });
        assert!(found.is_some(), "{fault:?} was not found");
        println!("{fault:?} was found by seed {found:?}");
    }
}

/// Passes stores to the reader of `tests/blob`, which shares no code with this crate: unloaded ones, and some
/// that were not.
#[test]
fn another_reader_finds_nothing_wrong_with_what_is_written() {
    let reader = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/blob/read_store.py");
    let python =
        |arguments: &[&std::ffi::OsStr]| std::process::Command::new("python3").args(arguments).output();
    if python(&["--version".as_ref()]).is_err() {
        println!("SKIPPED: there is no python3");
        return;
    }
    let mut checked = 0;
    for seed in 0..10 {
        let options = RunOptions { dirty: seed % 3 == 0, steps: Some(600), ..RunOptions::default() };
        let Some(image) = run_seed(seed, options).unwrap() else { continue };
        let path = std::env::temp_dir().join(format!("blobstore-{}-{seed}.img", std::process::id()));
        std::fs::write(&path, image).unwrap();
        let output = python(&["-B".as_ref(), reader.as_ref(), "check".as_ref(), path.as_ref()]).unwrap();
        std::fs::remove_file(&path).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "seed {seed}: {text}{}", String::from_utf8_lossy(&output.stderr));
        checked += 1;
    }
    assert!(checked > 3, "{checked} stores were checked");
}
