//! `--output-format=normal`: results as text.

use std::fmt::Write as _;

use os::clock;
use workload::fio::{ReportedJob, RunReport, percentiles_of};
use workload::units::{format_count, format_ns, format_rate};
use workload::{Direction, DirectionResult, Histogram, Verify};

/// The report of all jobs and disks.
pub(super) fn report(run: &RunReport) -> String {
    let mut text: String = run.jobs.iter().map(job).collect();
    for (name, stats, elapsed_ms) in &run.disks {
        let util = (stats.busy_ms as f64 / (*elapsed_ms).max(1) as f64 * 100.0).min(100.0);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "disk {name}: reads {} writes {} merged {}/{} busy {util:.1} %",
            stats.ios[0], stats.ios[1], stats.merges[0], stats.merges[1],
        );
    }
    text
}

fn job(reported: &ReportedJob) -> String {
    let mut text = String::new();
    let (result, spec) = (&reported.result, &reported.result.spec);
    let mut line = |line: String| {
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
    let sides: Vec<(&str, DirectionResult)> = match reported.job.unified {
        true => vec![("mixed", result.unified())],
        false => {
            Direction::ALL.map(|direction| (direction.name(), result.direction(direction).clone())).to_vec()
        }
    };
    let open = !spec.rates.is_closed_loop();
    for (name, side) in sides.iter().filter(|(_, side)| side.total_ios > 0) {
        line(format!(
            "  {name:<5} {:>9} IOPS  {:>12}  latency{} {}",
            format_count(side.iops()),
            rate(side.bytes_per_second(), reported.job.rates_in_bits),
            if open { " from the scheduled start" } else { "" },
            figures(&side.latency_ticks),
        ));
        if side.submission_ticks.count() > 0 {
            let [slat, _, _] = percentiles_of(&reported.job);
            let submission = if slat {
                figures(&side.submission_ticks)
            } else {
                format!("mean {}", mean(&side.submission_ticks))
            };
            line(format!("        submission {submission}  completion {}", figures(&side.completion_ticks)));
        }
    }
    if result.sync.total_ios > 0 {
        line(format!(
            "  sync  {:>9} flushes  {}",
            result.sync.total_ios,
            figures(&result.sync.latency_ticks)
        ));
    }
    let cost = match reported.generator_cost_ns {
        Some(ns) => format!(", of which the generator {}", format_ns_exact(ns)),
        None => String::new(),
    };
    line(format!(
        "  cpu   {} per I/O{cost}, {:.0} % of {} job(s)",
        format_ns_exact(result.cpu_ns_per_io()),
        result.usage.cpu_ns as f64 / (result.elapsed_ns().max(1) * u64::from(result.jobs)) as f64 * 100.0,
        result.jobs,
    ));
    let kernel = result.kernel;
    if kernel.submission_ns + kernel.workers_ns > 0 {
        let percent = |ns: u64| ns as f64 / result.elapsed_ns().max(1) as f64 * 100.0;
        line(format!(
            "  kernel threads: polling for submissions {:.0} % of a core, io_uring's workers {:.0} %",
            percent(kernel.submission_ns),
            percent(kernel.workers_ns),
        ));
    }
    if let Some(depth) = result.latency_depth {
        line(format!("  depth {depth} keeps the latency target"));
    }
    if let (Some(options), Some(steady)) = (&spec.steady, &result.steady) {
        let criterion = options.criterion;
        line(format!(
            "  steady state {}: {} {:.3}{}",
            if steady.attained { "attained" } else { "not attained" },
            criterion.metric(),
            steady.criterion,
            if criterion.in_percent { " %" } else { "" },
        ));
    }
    if spec.verify != Verify::Off {
        line(format!("  verify {} blocks checked, {} wrong", result.checked_blocks, result.mismatch_count));
    }
    if result.errors > 0 || result.never_completed > 0 {
        line(format!("  errors {} failed, {} never completed", result.errors, result.never_completed));
    }
    text
}

fn figures(ticks: &Histogram) -> String {
    let at = |percent: f64| format_ns(clock::ticks_to_ns(ticks.percentile(percent)) as f64);
    format!(
        "mean {}  p50 {}  p90 {}  p99 {}  p99.9 {}  p99.99 {}",
        mean(ticks),
        at(50.0),
        at(90.0),
        at(99.0),
        at(99.9),
        at(99.99),
    )
}

fn mean(ticks: &Histogram) -> String {
    format_ns(clock::ticks_to_ns((ticks.mean() * 1024.0) as u64) as f64 / 1024.0)
}

fn rate(bytes_per_second: f64, bits: bool) -> String {
    if bits {
        format!("{}bit/s", format_count(bytes_per_second * 8.0))
    } else {
        format_rate(bytes_per_second)
    }
}

/// With tenths of a nanosecond below a microsecond.
fn format_ns_exact(ns: f64) -> String {
    if ns < 1000.0 { format!("{ns:.1} ns") } else { format_ns(ns) }
}
