//! Runs scenarios by the thousand and prints the seed of each failure.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use sim::scenario::{PlantedFault, RunReport, run_multipath};

/// Simulates hosts and targets with faults in virtual time, one run a seed.
#[derive(Parser)]
#[command(name = "ringbolt-sim")]
struct Arguments {
    /// Number of seeds to run; without it and --seconds, one
    seeds: Option<u64>,
    /// First seed; without SEEDS, the only one
    #[arg(long)]
    seed: Option<u64>,
    /// Runs seeds for this many seconds instead of a number of them
    #[arg(long, conflicts_with = "seeds")]
    seconds: Option<u64>,
    /// Threads; by default one a core
    #[arg(long)]
    jobs: Option<usize>,
    /// A planted fault, which the checks must find: early-acknowledge, late-command or ignored-fua
    #[arg(long, value_parser = planted_fault)]
    fault: Option<PlantedFault>,
}

/// Failures after which no more seeds are begun: thousands of reports show no more than the first few.
const FAILURES_MAX: u64 = 10;

fn planted_fault(name: &str) -> Result<PlantedFault, String> {
    let found = PlantedFault::ALL.into_iter().find(|fault| fault.name() == name);
    found.ok_or_else(|| format!("one of {}", PlantedFault::ALL.map(PlantedFault::name).join(", ")))
}

/// What all threads have done.
#[derive(Default)]
struct Totals {
    next: AtomicU64,
    runs: AtomicU64,
    failures: AtomicU64,
    stop: AtomicBool,
    requests: AtomicU64,
    failed_requests: AtomicU64,
    faults: AtomicU64,
    simulated_ms: AtomicU64,
}

thread_local! {
    static SEED: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let first = arguments.seed.unwrap_or(1);
    let count = match (arguments.seeds, arguments.seconds) {
        (Some(seeds), _) => seeds,
        (None, Some(_)) => u64::MAX - first,
        (None, None) => 1,
    };
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Some(seed) = SEED.get() {
            eprintln!("seed {seed}: panicked:");
        }
        hook(info);
    }));
    let started = Instant::now();
    let end = arguments.seconds.map(|seconds| started + Duration::from_secs(seconds));
    let jobs = arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let totals = Totals::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| work(&totals, first, count, end, arguments.fault));
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (runs, failures) = (load(&totals.runs), load(&totals.failures));
    println!(
        "{runs} seeds from {first} in {seconds:.1} s ({:.1} a second), {failures} failed: {} requests, {} of them \
         failed, {} faults, {:.0} s simulated",
        runs as f64 / seconds,
        load(&totals.requests),
        load(&totals.failed_requests),
        load(&totals.faults),
        load(&totals.simulated_ms) as f64 / 1000.0,
    );
    if failures > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs seeds until there are no more, the time is over, or enough have failed.
fn work(totals: &Totals, first: u64, count: u64, end: Option<Instant>, fault: Option<PlantedFault>) {
    loop {
        let number = totals.next.fetch_add(1, Ordering::Relaxed);
        let late = end.is_some_and(|end| Instant::now() >= end);
        if number >= count || late || totals.stop.load(Ordering::Relaxed) {
            return;
        }
        let seed = first + number;
        SEED.set(Some(seed));
        let outcome = std::panic::catch_unwind(|| run_multipath(seed, fault));
        totals.runs.fetch_add(1, Ordering::Relaxed);
        match outcome {
            Ok(Ok(report)) => add(totals, &report),
            failed => {
                if let Ok(Err(failure)) = failed {
                    println!("{failure}");
                }
                let plant = fault.map_or(String::new(), |fault| format!(" --fault {}", fault.name()));
                println!("seed {seed}: reproduce with ./x sim --seed {seed}{plant}");
                if totals.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
                    totals.stop.store(true, Ordering::Relaxed);
                }
            }
        }
        SEED.set(None);
    }
}

fn add(totals: &Totals, report: &RunReport) {
    let add = |counter: &AtomicU64, value| _ = counter.fetch_add(value, Ordering::Relaxed);
    add(&totals.requests, report.succeeded + report.failed);
    add(&totals.failed_requests, report.failed);
    add(&totals.faults, report.faults);
    add(&totals.simulated_ms, report.simulated_ns / 1_000_000);
}
