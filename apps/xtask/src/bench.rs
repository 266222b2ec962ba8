//! Benchmarks of Ringbolt, compared with reference figures of SPDK and with goals.
//!
//! Each benchmark runs several times, interleaved with the others, so that drift of the machine affects all
//! of them. Each run records the CPU time used by other processes; results from a busy machine are marked.
//! `docs/BENCHMARKS.md` explains the output.

mod attack;
mod bare;
mod cases;
mod examples;
mod fio;
mod idle;
mod instructions;
mod iscsi;
mod load;
mod lvol;
mod machine_info;
mod metric;
mod nbd;
mod page;
mod placement;
mod process;
mod reference;
mod report;
mod rpc;
mod scale;
mod scaling;
mod server;
mod spdk;
mod stacked;
mod store;
mod ublk;
mod vhost;

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use cases::Benchmark;
use examples::BuiltExamples;
use machine_info::{LoadMonitor, MachineInfo};
use metric::BenchMetric;
use placement::RunPlacement;
use process::BenchDirectory;
use report::BenchReport;
use spdk::SpdkPrograms;

pub(crate) use idle::host as idle_host;

/// Options of `./x bench`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ./x bench                            # all benchmarks, 5 runs each, about 15 minutes
  ./x bench tcp --runs 3               # all benchmarks whose names start with tcp-
  ./x bench null-qd128 tcp-null-read-qd1 --json result.json
  ./x bench tcp --against /tmp/ringbolt-before
  ./x bench --list")]
pub(crate) struct BenchOptions {
    /// Names or name prefixes of benchmarks [default: all]
    names: Vec<String>,
    /// Shorter runs, and three of each unless --runs is given: for a quick estimate
    #[arg(long)]
    quick: bool,
    /// Runs of each benchmark
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: Option<u32>,
    /// Write machine, commands and the results of every run to a JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure this program instead of building one
    #[arg(long, value_name = "PROGRAM")]
    ringbolt: Option<PathBuf>,
    /// Measure this program too, interleaved with the other, and compare
    #[arg(long, value_name = "PROGRAM")]
    against: Option<PathBuf>,
    /// Measure the target of an SPDK that was built in this directory too, in turn with ours, both with SPDK's
    /// spdk_nvme_perf
    #[arg(long, value_name = "DIR")]
    spdk: Option<PathBuf>,
    /// Length of store-churn, in seconds [default: 180, or 30 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(10..=86_400))]
    churn_seconds: Option<u64>,
    /// List the benchmarks and exit
    #[arg(long)]
    list: bool,
}

/// The inputs of a run: programs, directory, cores.
struct RunContext<'a> {
    binary: &'a std::path::Path,
    examples: &'a BuiltExamples,
    directory: &'a BenchDirectory,
    cores: &'a [u32],
    quick: bool,
    churn_seconds: Option<u64>,
    /// Number of the run of this benchmark, from 0.
    run: u32,
    spdk: Option<&'a SpdkPrograms>,
}

/// The outcome of a run that did not fail.
enum RunOutcome {
    Measured(Measurement),
    /// The machine lacks something; the reason.
    Skipped(String),
}

impl RunOutcome {
    fn measured(values: impl IntoIterator<Item = (BenchMetric, f64)>, commands: Vec<String>) -> RunOutcome {
        let values = values.into_iter().collect();
        RunOutcome::Measured(Measurement { values, commands, ..Measurement::default() })
    }
}

/// The values of one run, and the commands that were run.
#[derive(Default)]
struct Measurement {
    values: BTreeMap<BenchMetric, f64>,
    commands: Vec<String>,
    /// Round trips between the two cores, measured during the run.
    round_trips_ns: Vec<f64>,
}

/// A run, with the load of the machine during it.
struct BenchRun {
    /// 0, or 1 for the program of `--against`.
    binary: usize,
    /// Load average before the run.
    load: f64,
    /// CPUs used by other processes, on average.
    other_cpus: f64,
    /// Of a benchmark on two cores.
    placement: Option<RunPlacement>,
    values: BTreeMap<BenchMetric, f64>,
}

/// All runs of a benchmark.
struct BenchmarkResult {
    case: &'static Benchmark,
    runs: Vec<BenchRun>,
    commands: Vec<String>,
    skipped: Option<String>,
    failed: Option<String>,
}

/// Runs `./x bench`.
pub(crate) fn run(options: &BenchOptions) -> anyhow::Result<ExitCode> {
    if options.list {
        for case in cases::ALL {
            println!("{:<28} {}", case.name, case.description);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let selected = cases::select(&options.names)?;
    let mut binaries = vec![match &options.ringbolt {
        Some(path) => path.clone(),
        None => build(&["-p", "ringbolt"], "release/ringbolt")?,
    }];
    binaries.extend(options.against.clone());
    for binary in &binaries {
        ensure!(binary.is_file(), "{}: no such program", binary.display());
    }
    let spdk = options.spdk.as_deref().map(SpdkPrograms::find).transpose()?;
    let examples = BuiltExamples::of(selected.iter().flat_map(|case| case.examples()).copied())?;
    let runs = options.runs.unwrap_or(if options.quick { 3 } else { 5 });
    let mut machine = MachineInfo::of_this_machine();
    if options.ringbolt.is_some() {
        // The program is not necessarily built from this checkout.
        machine.revision = "unknown".to_string();
    }
    eprintln!("{machine}");
    let plan = BenchPlan {
        binaries: &binaries,
        examples: &examples,
        machine: &machine,
        runs,
        quick: options.quick,
        churn_seconds: options.churn_seconds,
        spdk: spdk.as_ref(),
    };
    let records = measure(&selected, &plan)?;
    let report = BenchReport::new(&records, spdk.is_some());
    println!("{}", report.table(binaries.len() > 1));
    if let Some(path) = &options.json {
        let document = report::json(&report, &machine, &binaries, runs, options.quick);
        let text = serde_json::to_string_pretty(&document)? + "\n";
        std::fs::write(path, text).with_context(|| format!("--json={}", path.display()))?;
    }
    let failed = records.iter().any(|record| record.failed.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Builds a release program and returns its path. `file` is its path in Cargo's target directory.
fn build(target: &[&str], file: &str) -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = [&["build", "--release", "--locked"], target].concat();
    eprintln!("+ cargo {}", arguments.join(" "));
    let status = Command::new(cargo).args(&arguments).status().context("cargo cannot be started")?;
    ensure!(status.success(), "{} does not build", target.join(" "));
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(folder.join(file).canonicalize()?)
}

/// What all benchmarks of a session share.
struct BenchPlan<'a> {
    binaries: &'a [PathBuf],
    examples: &'a BuiltExamples,
    machine: &'a MachineInfo,
    runs: u32,
    quick: bool,
    churn_seconds: Option<u64>,
    spdk: Option<&'a SpdkPrograms>,
}

fn measure(selected: &[&'static Benchmark], plan: &BenchPlan<'_>) -> anyhow::Result<Vec<BenchmarkResult>> {
    let &BenchPlan { binaries, examples, machine, runs, quick, churn_seconds, spdk } = plan;
    let scratch = BenchDirectory::new()?;
    let new = |case: &&'static Benchmark| BenchmarkResult {
        case,
        runs: Vec::new(),
        commands: Vec::new(),
        skipped: None,
        failed: None,
    };
    let mut records: Vec<BenchmarkResult> = selected.iter().map(new).collect();
    let rounds = selected.iter().map(|case| case.run_count(runs)).max().unwrap_or(0);
    let total: usize = selected.iter().map(|case| case.run_count(runs) as usize * binaries.len()).sum();
    let mut progress = ProgressLine::new(total);
    for round in 0..rounds {
        for record in records.iter_mut().filter(|record| round < record.case.run_count(runs)) {
            for (index, binary) in binaries.iter().enumerate() {
                progress.step(record.case.name, round + 1);
                let is_repetition = index > 0 && !record.case.measures_ringbolt();
                if record.skipped.is_some() || record.failed.is_some() || is_repetition {
                    continue;
                }
                let context = RunContext {
                    binary,
                    examples,
                    directory: &scratch,
                    cores: &machine.cores,
                    quick,
                    churn_seconds,
                    run: round,
                    spdk,
                };
                run_once(record, index, &context, &mut progress);
            }
        }
    }
    progress.end();
    if records.is_empty() {
        bail!("nothing to measure");
    }
    Ok(records)
}

fn run_once(
    record: &mut BenchmarkResult,
    binary: usize,
    context: &RunContext<'_>,
    progress: &mut ProgressLine,
) {
    let pair = match *context.cores {
        [first, second, ..] if record.case.uses_two_cores() => Some([first, second]),
        _ => None,
    };
    let before = pair.and_then(placement::measure);
    let watch = LoadMonitor::start();
    match record.case.run(context) {
        Ok(RunOutcome::Measured(sample)) => {
            let (load, others) = watch.finish();
            let after = pair.and_then(placement::measure);
            let placement = RunPlacement::of(before.into_iter().chain(sample.round_trips_ns).chain(after));
            if record.commands.is_empty() {
                for command in &sample.commands {
                    progress.print(&format!("{}: {command}", record.case.name));
                }
                record.commands = sample.commands;
            }
            record.runs.push(BenchRun { binary, load, other_cpus: others, placement, values: sample.values });
        }
        Ok(RunOutcome::Skipped(reason)) => {
            progress.print(&format!("{}: SKIPPED: {reason}", record.case.name));
            record.skipped = Some(reason);
        }
        Err(error) => {
            progress.print(&format!("{}: FAILED: {error:#}", record.case.name));
            record.failed = Some(format!("{error:#}"));
        }
    }
}

/// A progress line on standard error, where that is a terminal.
struct ProgressLine {
    total: usize,
    done: usize,
    begun: Instant,
    shown: bool,
}

impl ProgressLine {
    fn new(total: usize) -> ProgressLine {
        ProgressLine { total, done: 0, begun: Instant::now(), shown: std::io::stderr().is_terminal() }
    }

    fn step(&mut self, name: &str, round: u32) {
        if self.shown {
            let left = match self.done {
                0 => String::new(),
                done => {
                    let each = self.begun.elapsed().as_secs_f64() / done as f64;
                    format!(", about {:.0} s left", each * (self.total - done) as f64)
                }
            };
            eprint!("\r\x1b[K[{}/{}] {name}, run {round}{left}", self.done + 1, self.total);
            // A failure to show progress is ignored.
            let _ = std::io::stderr().flush();
        } else if self.done.is_multiple_of(10) {
            eprintln!("[{}/{}] {name}, run {round}", self.done + 1, self.total);
        }
        self.done += 1;
    }

    /// Prints a line above the progress line.
    fn print(&self, line: &str) {
        eprintln!("{}{line}", if self.shown { "\r\x1b[K" } else { "" });
    }

    fn end(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
