//! Measures Ringbolt, and sets what it finds beside what SPDK does and what Ringbolt is to reach.
//!
//! Each benchmark runs several times, in turn with the others, so that a change of the machine's
//! mood meets them all. Every run also says how much of the processors others took meanwhile: a
//! number from a busy machine is marked. `docs/BENCHMARKS.md` tells how to read the result.

mod cases;
mod examples;
mod facts;
mod fio;
mod idle;
mod instructions;
mod load;
mod metric;
mod page;
mod process;
mod reference;
mod report;
mod scaling;
mod server;

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, bail, ensure};

use cases::Case;
use examples::Built;
use facts::{Facts, Watch};
use metric::Metric;
use process::Scratch;

pub(crate) use idle::host as idle_host;

/// What is measured, and how often.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  ./x bench                            # everything, 5 runs each, about a quarter of an hour
  ./x bench tcp --runs 3               # all whose names start with tcp-
  ./x bench null-qd128 tcp-null-read-qd1 --json result.json
  ./x bench tcp --against /tmp/ringbolt-before
  ./x bench --list")]
pub(crate) struct Bench {
    /// Benchmarks, or what their names start with; without any, all
    names: Vec<String>,
    /// Shorter runs, and three of each unless --runs says otherwise: for a first look
    #[arg(long)]
    quick: bool,
    /// Runs of each benchmark
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: Option<u32>,
    /// Write machine, commands and every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure this program rather than building one
    #[arg(long, value_name = "PROGRAM")]
    ringbolt: Option<PathBuf>,
    /// Measure this program too, in turn with the other, and compare
    #[arg(long, value_name = "PROGRAM")]
    against: Option<PathBuf>,
    /// Name the benchmarks and leave
    #[arg(long)]
    list: bool,
}

/// What every run of a benchmark is given.
struct Setting<'a> {
    binary: &'a std::path::Path,
    examples: &'a Built,
    scratch: &'a Scratch,
    cores: &'a [u32],
    quick: bool,
}

/// What a run came to.
enum Outcome {
    Measured(Sample),
    /// The machine lacks something.
    Skipped(String),
}

/// The numbers of one run, and the commands that made them.
#[derive(Default)]
struct Sample {
    values: BTreeMap<Metric, f64>,
    commands: Vec<String>,
}

/// One run, with what the machine did meanwhile.
struct Run {
    /// 0, or 1 for the program that it is compared with.
    binary: usize,
    load: f64,
    /// Processors that others used on average.
    others: f64,
    values: BTreeMap<Metric, f64>,
}

/// All runs of one benchmark.
struct Record {
    case: &'static Case,
    runs: Vec<Run>,
    commands: Vec<String>,
    skipped: Option<String>,
    failed: Option<String>,
}

/// Measures what `options` name.
pub(crate) fn run(options: &Bench) -> anyhow::Result<ExitCode> {
    if options.list {
        for case in cases::ALL {
            println!("{:<28} {}", case.name, case.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = cases::choose(&options.names)?;
    let mut binaries = vec![match &options.ringbolt {
        Some(path) => path.clone(),
        None => build(&["-p", "ringbolt"], "release/ringbolt")?,
    }];
    binaries.extend(options.against.clone());
    for binary in &binaries {
        ensure!(binary.is_file(), "{}: there is no such program", binary.display());
    }
    let examples = Built::of(chosen.iter().filter_map(|case| case.example()))?;
    let runs = options.runs.unwrap_or(if options.quick { 3 } else { 5 });
    let mut facts = Facts::of_this_machine();
    if options.ringbolt.is_some() {
        // Not necessarily this checkout's.
        facts.revision = "unknown".to_string();
    }
    eprintln!("{facts}");
    let records = measure(&chosen, &binaries, &examples, &facts, runs, options.quick)?;
    println!("{}", report::table(&records, binaries.len() > 1));
    if let Some(path) = &options.json {
        let document = report::json(&records, &facts, &binaries, runs, options.quick);
        let text = serde_json::to_string_pretty(&document)? + "\n";
        std::fs::write(path, text).with_context(|| format!("--json={}", path.display()))?;
    }
    let failed = records.iter().any(|record| record.failed.is_some());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Builds a release program, which cargo puts into that file of its target folder; where it is.
fn build(target: &[&str], file: &str) -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = [&["build", "--release", "--locked"], target].concat();
    eprintln!("+ cargo {}", arguments.join(" "));
    let status = Command::new(cargo).args(&arguments).status().context("cargo cannot be started")?;
    ensure!(status.success(), "{} does not build", target.join(" "));
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(folder.join(file).canonicalize()?)
}

fn measure(
    chosen: &[&'static Case],
    binaries: &[PathBuf],
    examples: &Built,
    facts: &Facts,
    runs: u32,
    quick: bool,
) -> anyhow::Result<Vec<Record>> {
    let scratch = Scratch::new()?;
    let new = |case: &&'static Case| Record {
        case,
        runs: Vec::new(),
        commands: Vec::new(),
        skipped: None,
        failed: None,
    };
    let mut records: Vec<Record> = chosen.iter().map(new).collect();
    let rounds = chosen.iter().map(|case| case.repeats(runs)).max().unwrap_or(0);
    let total: usize = chosen.iter().map(|case| case.repeats(runs) as usize * binaries.len()).sum();
    let mut progress = Progress::new(total);
    for round in 0..rounds {
        for record in records.iter_mut().filter(|record| round < record.case.repeats(runs)) {
            for (index, binary) in binaries.iter().enumerate() {
                progress.step(record.case.name, round + 1);
                let again = index > 0 && !record.case.is_of_program();
                if record.skipped.is_some() || record.failed.is_some() || again {
                    continue;
                }
                let setting = Setting { binary, examples, scratch: &scratch, cores: &facts.cores, quick };
                one(record, index, &setting, &mut progress);
            }
        }
    }
    progress.end();
    if records.is_empty() {
        bail!("nothing to measure");
    }
    Ok(records)
}

fn one(record: &mut Record, binary: usize, setting: &Setting<'_>, progress: &mut Progress) {
    let watch = Watch::start();
    match record.case.run(setting) {
        Ok(Outcome::Measured(sample)) => {
            let (load, others) = watch.end();
            if record.commands.is_empty() {
                for command in &sample.commands {
                    progress.say(&format!("{}: {command}", record.case.name));
                }
                record.commands = sample.commands;
            }
            record.runs.push(Run { binary, load, others, values: sample.values });
        }
        Ok(Outcome::Skipped(reason)) => {
            progress.say(&format!("{}: SKIPPED: {reason}", record.case.name));
            record.skipped = Some(reason);
        }
        Err(error) => {
            progress.say(&format!("{}: FAILED: {error:#}", record.case.name));
            record.failed = Some(format!("{error:#}"));
        }
    }
}

/// The line that says how far it is.
struct Progress {
    total: usize,
    done: usize,
    begun: Instant,
    shown: bool,
}

impl Progress {
    fn new(total: usize) -> Progress {
        Progress { total, done: 0, begun: Instant::now(), shown: std::io::stderr().is_terminal() }
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
            // A progress line that cannot be shown is not missed.
            let _ = std::io::stderr().flush();
        } else if self.done.is_multiple_of(10) {
            eprintln!("[{}/{}] {name}, run {round}", self.done + 1, self.total);
        }
        self.done += 1;
    }

    /// A line that stays.
    fn say(&self, line: &str) {
        eprintln!("{}{line}", if self.shown { "\r\x1b[K" } else { "" });
    }

    fn end(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
