//! Instructions per I/O, counted by Valgrind's callgrind: nearly the same on every machine.
//!
//! The result is the difference of two runs, one with twice the I/Os of the other: start-up and exit cancel.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::examples::Example;
use super::load::{IoPattern, base};
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer};
use super::{RunContext, RunOutcome};

/// I/Os of the shorter run. Start-up waits for clocks and so varies by some hundred thousand instructions
/// from run to run: less than one per I/O.
const IOS: u64 = 1_000_000;
/// The same for the target, whose I/Os take ten times as many instructions.
const IOS_TARGET: u64 = 50_000;
/// Counts only the load generator's job: a reactor that spins during start-up and exit would add instructions
/// that depend on their duration.
const COLLECT_JOB: &str = "--toggle-collect=*JobPoller as reactor::poller::Poller>::poll*";
/// Time limit of a run: Valgrind slows a program down about fifty times.
const RUN_MAX: Duration = Duration::from_secs(120);

/// An example that executes reads in rounds of [`ROUND`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CountedExample {
    pub(super) example: Example,
    /// What of it is counted.
    collect: &'static [&'static str],
    /// Its arguments before the number of rounds.
    arguments: &'static [&'static str],
}

/// Reads of a round.
const ROUND: u64 = 128;

/// Submission and completion in the driver, not the simulated controller.
pub(super) const DRIVER: CountedExample = CountedExample {
    example: Example { package: "ringbolt-nvme", name: "cost" },
    collect: &["--collect-atstart=no", "--toggle-collect=*submit_batch*", "--toggle-collect=*poll_batch*"],
    arguments: &["128"],
};

/// The vfio-user target, not its host: both are polled by one core.
pub(super) const VFIO_USER: CountedExample = CountedExample {
    example: Example { package: "ringbolt-nvmf", name: "vfio_user" },
    collect: &["--toggle-collect=*GroupPoller*poll*"],
    arguments: &["count", "128"],
};

/// The vhost-user target, not the driver: both are polled by one core.
pub(super) const VHOST: CountedExample = CountedExample {
    example: Example { package: "ringbolt-vhost", name: "vhost_blk" },
    collect: &["--toggle-collect=*GroupPoller*poll*"],
    arguments: &["count", "128"],
};

const LVOL_COLLECT: &[&str] = &["--collect-atstart=no", "--toggle-collect=*submit_and_poll*"];

/// A thick volume with its device in memory.
pub(super) const LVOL_THICK: CountedExample = CountedExample {
    example: Example { package: "ringbolt-lvol", name: "volume_cost" },
    collect: LVOL_COLLECT,
    arguments: &["count", "thick", "read", "128"],
};

/// A volume that reads through ten snapshots.
pub(super) const LVOL_CHAIN: CountedExample =
    CountedExample { arguments: &["count", "chain", "read", "128"], ..LVOL_THICK };

/// Instructions of the bdev layer and the load generator, on the null device.
pub(super) fn null(context: &RunContext<'_>, depth: u32, options: &[&str]) -> anyhow::Result<RunOutcome> {
    null_device(context, "null:1g", depth, options)
}

fn null_device(
    context: &RunContext<'_>,
    device: &str,
    depth: u32,
    options: &[&str],
) -> anyhow::Result<RunOutcome> {
    let pattern = IoPattern { rw: "randread", block: "4k", depth };
    difference(
        IOS,
        |ios| {
            let mut command = valgrind(context, &[COLLECT_JOB]);
            command.args(base(context, device, &pattern).get_args()).args(options);
            command.args([&format!("--number_ios={ios}"), "--size=1g", "--idle=spin", "--eta=never"]);
            let mut process = ChildProcess::start(&mut command, context.directory, "valgrind")?;
            let status = process.wait(RUN_MAX).context("valgrind")?;
            Ok((status.success(), "valgrind.err", vec![describe(&command)]))
        },
        context,
    )
}

/// The same at depth 128 on `device`: one of the null devices `Null0` and `Null1` of a configuration file, or
/// what the file's further call makes of them.
pub(super) fn configured(
    context: &RunContext<'_>,
    device: &str,
    method: &str,
    params: &str,
) -> anyhow::Result<RunOutcome> {
    let file = context.directory.file("null.json");
    let params: Value = serde_json::from_str(params)?;
    let null_device_call = |name: &str| {
        let params = json!({ "name": name, "num_blocks": 2 << 20, "block_size": 512 });
        json!({ "method": "bdev_null_create", "params": params })
    };
    let calls =
        json!([null_device_call("Null0"), null_device_call("Null1"), { "method": method, "params": params }]);
    std::fs::write(&file, json!({ "subsystems": [{ "subsystem": "bdev", "config": calls }] }).to_string())?;
    null_device(context, device, 128, &["-c", &file.display().to_string()])
}

/// Instructions of a TCP target per read of a memory device, user space only.
pub(super) fn target(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let pattern = IoPattern { rw: "randread", block: "4k", depth: 128 };
    difference(
        IOS_TARGET,
        |ios| {
            let server = TargetServer::start_under_valgrind(
                context,
                valgrind(context, &[]),
                &TargetNamespaces::NullAndMalloc,
            )?;
            let mut command = base(context, &server.uri(2), &pattern);
            command.args([&format!("--number_ios={ios}"), "--size=256m", "--eta=never"]);
            let mut process = ChildProcess::start(&mut command, context.directory, "perf")?;
            let status = process.wait(RUN_MAX).context("perf")?;
            let commands = vec![server.command.clone(), describe(&command)];
            server.end()?;
            Ok((status.success(), "serve.err", commands))
        },
        context,
    )
}

/// Instructions of an example per read.
pub(super) fn example(context: &RunContext<'_>, counted: &CountedExample) -> anyhow::Result<RunOutcome> {
    let program = context.examples.path(counted.example)?;
    difference(
        IOS,
        |ios| {
            let mut command = valgrind_of(context, program, counted.collect);
            command.args(counted.arguments).arg((ios / ROUND).to_string());
            let mut process = ChildProcess::start(&mut command, context.directory, "valgrind")?;
            let status = process.wait(RUN_MAX).context("valgrind")?;
            Ok((status.success(), "valgrind.err", vec![describe(&command)]))
        },
        context,
    )
}

fn valgrind(context: &RunContext<'_>, options: &[&str]) -> Command {
    valgrind_of(context, context.binary, options)
}

/// The program under Valgrind. Without fair scheduling, a spinning thread starves the others.
fn valgrind_of(context: &RunContext<'_>, program: &Path, options: &[&str]) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--fair-sched=yes"]).args(options);
    command.arg(format!("--callgrind-out-file={}", context.directory.file("callgrind.out").display()));
    command.arg(program);
    command
}

/// Instructions per I/O: those of a run with `2 * ios` I/Os less those of a run with `ios`. `run` returns
/// whether it succeeded, the file with Valgrind's output, and its commands.
fn difference(
    ios: u64,
    run: impl Fn(u64) -> anyhow::Result<(bool, &'static str, Vec<String>)>,
    context: &RunContext<'_>,
) -> anyhow::Result<RunOutcome> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        return Ok(RunOutcome::Skipped(format!("valgrind cannot be started: {error}")));
    }
    let mut counts = [0u64; 2];
    let mut commands = Vec::new();
    for (count, ios) in counts.iter_mut().zip([ios, 2 * ios]) {
        let (success, log, run_commands) = run(ios)?;
        let output = std::fs::read_to_string(context.directory.file(log))?;
        if let Some(error) = valgrind_error(&output) {
            return Ok(RunOutcome::Skipped(format!("valgrind: {error}")));
        }
        ensure!(success, "{}: {}", run_commands.join("; "), context.directory.tail(log));
        *count = collected(&output).context("no count in valgrind's output")?;
        commands.extend(run_commands);
    }
    let each = counts[1].saturating_sub(counts[0]) as f64 / ios as f64;
    Ok(RunOutcome::measured([(BenchMetric::Instructions, each)], commands))
}

/// Valgrind's message if it could not run the program.
fn valgrind_error(output: &str) -> Option<String> {
    let lines: Vec<&str> =
        output.lines().map(|line| line.rsplit("== ").next().unwrap_or(line).trim()).collect();
    let errors =
        ["Process terminating with default action of signal", "unhandled instruction", "unhandled amd64"];
    let at = lines.iter().position(|line| errors.iter().any(|start| line.contains(start)))?;
    let place = lines[at..].iter().find(|line| line.starts_with("at 0x")).unwrap_or(&"");
    Some(format!("{} {place}", lines[at]).trim().to_string())
}

/// The instruction count in callgrind's output.
fn collected(output: &str) -> Option<u64> {
    let (_, rest) = output.split_once("Collected : ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valgrind_output_is_parsed() {
        let success = "==7== Events    : Ir\n==7== Collected : 212249770\n==7== \n";
        assert_eq!((valgrind_error(success), collected(success)), (None, Some(212_249_770)));
        let failure = "==7== Process terminating with default action of signal 11 (SIGSEGV)\n\
                     ==7==  Access not within mapped region at address 0x7F25FFACF000\n\
                     ==7==    at 0x3B85AA: check_elf_base (equality.rs:157)\n==7== Collected : 5\n";
        let reason = "Process terminating with default action of signal 11 (SIGSEGV) \
                      at 0x3B85AA: check_elf_base (equality.rs:157)";
        assert_eq!(valgrind_error(failure).as_deref(), Some(reason));
    }
}
