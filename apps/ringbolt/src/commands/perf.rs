//! The load generator's front: fio's options in, fio's results out.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use bdev::Registry;
use sys::clock;
use workload::units::{format_count, format_ns, format_rate};
use workload::{Direction, JobResult, JobSpec, RunError, Running, Source, Verify};

use crate::cli::{Eta, Format, Perf};
use crate::config::Config;
use crate::failure::Failure;
use crate::machine::Machine;
use crate::say::complain;
use crate::state::App;

pub(crate) fn run(options: &Perf) -> Result<(), Failure> {
    let source = Source::parse(&options.filename).map_err(Failure::usage)?;
    let config = options.config.as_deref().map(Config::read).transpose()?;
    if options.numjobs == 0 {
        return Err(Failure::usage("--numjobs=0 does nothing; it is at least 1"));
    }
    let machine =
        Machine::start(&options.machine, options.cpus_allowed.as_deref(), options.numjobs as usize)?;
    let registry = Registry::new();
    let app = App::new(registry.clone(), machine.reactors()?, None);
    if let Some(config) = config {
        config.apply(&app).map_err(|error| Failure::config(error.message))?;
    }
    let spec = spec(options);
    let running = workload::start(&spec, options.numjobs, &source, &registry, machine.remotes());
    let mut results = watch(running.map_err(failure)?, options, &spec);
    machine.reactors.stop();
    if options.group_reporting {
        results = JobResult::merged(&results).into_iter().collect();
    }
    let text = match options.output_format {
        Format::Normal => results.iter().map(report).collect(),
        Format::Json => json(&results, options)?,
    };
    write(options, &text)?;
    verdict(&results)
}

fn spec(options: &Perf) -> JobSpec {
    JobSpec {
        name: options.name.clone(),
        workload: options.rw,
        block_bytes: options.bs,
        io_depth: options.iodepth,
        size_bytes: options.size,
        offset_bytes: options.offset,
        runtime_ns: options.runtime,
        time_based: options.time_based,
        ramp_ns: options.ramp_time,
        number_ios: options.number_ios,
        read_percent: options.rwmixread,
        verify: options.verify.unwrap_or(Verify::Off),
        seed: options.randseed,
        continue_on_error: options.continue_on_error,
    }
}

fn failure(error: RunError) -> Failure {
    match error {
        RunError::Source(_) | RunError::Setup(_) => Failure::usage(error),
        RunError::Gone(_) => Failure::machine(error),
    }
}

/// Waits for the jobs, with a line each second where somebody looks.
fn watch(mut running: Running, options: &Perf, spec: &JobSpec) -> Vec<JobResult> {
    let shown = match options.eta {
        Eta::Always => true,
        Eta::Never => false,
        Eta::Auto => std::io::stderr().is_terminal(),
    };
    let (mut before, mut then, begun) = (0, Instant::now(), Instant::now());
    while !running.wait(Duration::from_secs(1)) {
        if !shown {
            continue;
        }
        let (ios, faults) = running.totals();
        let rate = (ios - before) as f64 / then.elapsed().as_secs_f64();
        complain!(
            "{:>4} s  {} IOPS  {}  {faults} faults",
            begun.elapsed().as_secs(),
            format_count(rate),
            format_rate(rate * f64::from(spec.block_bytes)),
        );
        (before, then) = (ios, Instant::now());
    }
    running.into_results()
}

fn report(result: &JobResult) -> String {
    let mut text = String::new();
    let spec = &result.spec;
    let mut line = |line: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
    };
    line(format!(
        "{}: rw={} bs={} iodepth={} jobs={} {:.2} s",
        spec.name,
        spec.workload.name(),
        spec.block_bytes,
        spec.io_depth,
        result.jobs,
        result.elapsed_ns() as f64 / 1e9,
    ));
    for direction in Direction::ALL {
        let side = result.side(direction);
        if side.total_ios == 0 {
            continue;
        }
        let latency = &side.latency_ticks;
        let at = |percent: f64| format_ns(clock::ticks_to_ns(latency.percentile(percent)) as f64);
        let mean = clock::ticks_to_ns((latency.mean() * 1024.0) as u64) as f64 / 1024.0;
        line(format!(
            "  {:<5} {:>9} IOPS  {:>12}  latency mean {}  p50 {}  p90 {}  p99 {}  p99.9 {}  p99.99 {}",
            direction.name(),
            format_count(side.iops()),
            format_rate(side.bytes_per_second()),
            format_ns(mean),
            at(50.0),
            at(90.0),
            at(99.0),
            at(99.9),
            at(99.99),
        ));
    }
    line(format!(
        "  cpu   {} an I/O, {:.0} % of {} thread(s)",
        format_ns_exact(result.cpu_ns_per_io()),
        result.usage.cpu_ns as f64 / (result.elapsed_ns().max(1) * u64::from(result.jobs)) as f64 * 100.0,
        result.jobs,
    ));
    if spec.verify != Verify::Off {
        line(format!("  verify {} blocks checked, {} wrong", result.checked_blocks, result.mismatch_count));
    }
    if result.errors > 0 || result.stuck > 0 {
        line(format!("  errors {} failed, {} never came back", result.errors, result.stuck));
    }
    text
}

/// Below a microsecond a tenth of a nanosecond matters.
fn format_ns_exact(ns: f64) -> String {
    if ns < 1000.0 { format!("{ns:.1} ns") } else { format_ns(ns) }
}

fn json(results: &[JobResult], options: &Perf) -> Result<String, Failure> {
    let document = workload::fio::document(results, &options.filename, std::time::SystemTime::now());
    let mut text = serde_json::to_string_pretty(&document).map_err(Failure::work)?;
    text.push('\n');
    Ok(text)
}

fn write(options: &Perf, text: &str) -> Result<(), Failure> {
    match &options.output {
        Some(path) => std::fs::write(path, text)
            .map_err(|error| Failure::work(format!("--output={}: {error}", path.display()))),
        None => match std::io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::work(error)),
            _ => Ok(()),
        },
    }
}

/// The first thing that went wrong, if any did.
fn verdict(results: &[JobResult]) -> Result<(), Failure> {
    let bad = results.iter().find(|result| !result.is_clean());
    let Some(result) = bad else { return Ok(()) };
    if let Some(mismatch) = result.mismatches.first() {
        return Err(Failure::work(format!(
            "verify: {} block(s) wrong; the first: {mismatch}",
            result.mismatch_count
        )));
    }
    if let Some(failure) = result.failures.first() {
        return Err(Failure::work(format!("{} I/O(s) failed; the first: {failure}", result.errors)));
    }
    Err(Failure::work(format!("{} I/O(s) never came back", result.stuck)))
}
