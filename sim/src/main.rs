//! Runs scenarios by the thousand and prints the seed of each failure.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use sim::scenario::{PlantedFault, PlantedReplicaFault, RunFailure, SeedReport, run_multipath, run_replicas};

/// Simulates systems with faults in virtual time, one run a seed.
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
    /// What is simulated
    #[arg(long, value_enum, default_value_t = Scenario::Multipath)]
    scenario: Scenario,
    /// A planted fault, by its name, which the checks must find; an unknown name lists them
    #[arg(long)]
    fault: Option<String>,
    /// Runs each planted fault of the scenario until it is found, and fails if one is not within SEEDS seeds
    #[arg(long, requires = "seeds", conflicts_with = "fault")]
    planted: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Hosts with two paths to a namespace on one disk
    Multipath,
    /// Replicas of a logical group of the store
    Replicas,
}

/// A scenario with a planted fault or none.
#[derive(Clone, Copy)]
enum Experiment {
    Multipath(Option<PlantedFault>),
    Replicas(Option<PlantedReplicaFault>),
}

impl Experiment {
    fn of(scenario: Scenario, fault: Option<&str>) -> Result<Experiment, String> {
        let plain = match scenario {
            Scenario::Multipath => Experiment::Multipath(None),
            Scenario::Replicas => Experiment::Replicas(None),
        };
        let Some(name) = fault else {
            return Ok(plain);
        };
        let planted = plain.planted();
        let found = planted.iter().find(|experiment| experiment.fault() == Some(name));
        let names: Vec<&str> = planted.iter().filter_map(Experiment::fault).collect();
        found.copied().ok_or_else(|| format!("no planted fault '{name}': one of {}", names.join(", ")))
    }

    /// The scenario with each of its planted faults.
    fn planted(&self) -> Vec<Experiment> {
        match self {
            Experiment::Multipath(_) => {
                PlantedFault::ALL.map(|fault| Experiment::Multipath(Some(fault))).to_vec()
            }
            Experiment::Replicas(_) => {
                PlantedReplicaFault::ALL.map(|fault| Experiment::Replicas(Some(fault))).to_vec()
            }
        }
    }

    fn fault(&self) -> Option<&'static str> {
        match self {
            Experiment::Multipath(fault) => fault.map(PlantedFault::name),
            Experiment::Replicas(fault) => fault.map(PlantedReplicaFault::name),
        }
    }

    fn run(&self, seed: u64) -> Result<SeedReport, RunFailure> {
        match self {
            Experiment::Multipath(fault) => run_multipath(seed, *fault),
            Experiment::Replicas(fault) => run_replicas(seed, *fault),
        }
    }

    /// The arguments that repeat a seed.
    fn arguments(&self, seed: u64) -> String {
        let scenario = match self {
            Experiment::Multipath(_) => "",
            Experiment::Replicas(_) => " --scenario replicas",
        };
        let fault = self.fault().map_or(String::new(), |name| format!(" --fault {name}"));
        format!("--seed {seed}{scenario}{fault}")
    }
}

/// Failures after which no more seeds are begun: thousands of reports show no more than the first few.
const FAILURES_MAX: u64 = 10;

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
    let experiment = match Experiment::of(arguments.scenario, arguments.fault.as_deref()) {
        Ok(experiment) => experiment,
        Err(error) => {
            eprintln!("ringbolt-sim: {error}");
            return ExitCode::from(2);
        }
    };
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
    if arguments.planted {
        return find_planted(&experiment.planted(), first, count);
    }
    let started = Instant::now();
    let end = arguments.seconds.map(|seconds| started + Duration::from_secs(seconds));
    let jobs = arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let totals = Totals::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| work(&totals, first, count, end, experiment));
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
fn work(totals: &Totals, first: u64, count: u64, end: Option<Instant>, experiment: Experiment) {
    loop {
        let number = totals.next.fetch_add(1, Ordering::Relaxed);
        let late = end.is_some_and(|end| Instant::now() >= end);
        if number >= count || late || totals.stop.load(Ordering::Relaxed) {
            return;
        }
        let seed = first + number;
        SEED.set(Some(seed));
        let outcome = std::panic::catch_unwind(|| experiment.run(seed));
        totals.runs.fetch_add(1, Ordering::Relaxed);
        match outcome {
            Ok(Ok(report)) => add(totals, &report),
            failed => {
                if let Ok(Err(failure)) = failed {
                    println!("{failure}");
                }
                println!("seed {seed}: reproduce with ./x sim {}", experiment.arguments(seed));
                if totals.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
                    totals.stop.store(true, Ordering::Relaxed);
                }
            }
        }
        SEED.set(None);
    }
}

/// Runs seeds with each planted fault until one finds it.
fn find_planted(planted: &[Experiment], first: u64, count: u64) -> ExitCode {
    // A panic is a find, and not printed.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = 0;
    for experiment in planted {
        let started = Instant::now();
        let name = experiment.fault().expect("it has a fault");
        let finds = |seed: &u64| !matches!(std::panic::catch_unwind(|| experiment.run(*seed)), Ok(Ok(_)));
        match (first..first + count).find(finds) {
            Some(seed) => {
                let (seeds, seconds) = (seed - first + 1, started.elapsed().as_secs_f64());
                println!("{name}: found by the seed {seed}, after {seeds} seeds and {seconds:.1} s");
            }
            None => {
                missed += 1;
                println!("{name}: NOT FOUND in {count} seeds");
            }
        }
    }
    println!("{} of {} planted faults found", planted.len() - missed, planted.len());
    if missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn add(totals: &Totals, report: &SeedReport) {
    let add = |counter: &AtomicU64, value| _ = counter.fetch_add(value, Ordering::Relaxed);
    add(&totals.requests, report.succeeded + report.failed);
    add(&totals.failed_requests, report.failed);
    add(&totals.faults, report.faults);
    add(&totals.simulated_ms, report.simulated_ns / 1_000_000);
}
