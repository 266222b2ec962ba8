//! Instructions an I/O, counted by Valgrind: they come out nearly the same on every machine.
//!
//! Counted is the difference between two runs, one with twice the I/Os of the other, so that what
//! starting and ending cost falls out.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::load::{Load, base};
use super::metric::Metric;
use super::process::{Process, describe};
use super::server::{Namespaces, Server};
use super::{Outcome, Sample, Setting};

/// Start-up waits for clocks and so differs by some hundred thousand instructions from run to run:
/// less than one an I/O.
const IOS: u64 = 1_000_000;
/// The same for the target, of which an I/O takes ten times as many.
const IOS_TARGET: u64 = 50_000;
/// Of the load generator only what its job does: a reactor that spins while the program starts and ends
/// would add as much as that takes.
const COLLECT_JOB: &str = "--toggle-collect=*JobPoller as reactor::poller::Poller>::poll*";
/// Under Valgrind a program takes about fifty times as long.
const RUN_MAX: Duration = Duration::from_secs(120);

/// What the driver does for its user, and nothing of the controller that answers it.
const COLLECT_DRIVER: [&str; 3] =
    ["--collect-atstart=no", "--toggle-collect=*submit_batch*", "--toggle-collect=*poll_batch*"];
/// Submits and polls in rounds of so many reads.
pub(super) const DRIVER: Example = Example { package: "ringbolt-nvme", name: "cost" };
const DRIVER_DEPTH: u64 = 128;

/// Of the load generator on the null device, the generator itself included.
pub(super) fn null(setting: &Setting<'_>, depth: u32, options: &[&str]) -> anyhow::Result<Outcome> {
    let load = Load { rw: "randread", block: "4k", depth };
    difference(
        IOS,
        |ios| {
            let mut command = valgrind(setting, &[COLLECT_JOB]);
            command.args(base(setting, "null:1g", &load).get_args()).args(options);
            command.args([&format!("--number_ios={ios}"), "--size=1g", "--idle=spin", "--eta=never"]);
            let mut process = Process::start(&mut command, setting.scratch, "valgrind")?;
            let status = process.wait(RUN_MAX).context("valgrind")?;
            Ok((status.success(), "valgrind.err", vec![describe(&command)]))
        },
        setting,
    )
}

/// Of the target that reads a memory device over TCP: user space only.
pub(super) fn target(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let load = Load { rw: "randread", block: "4k", depth: 128 };
    difference(
        IOS_TARGET,
        |ios| {
            let server = Server::start_counted(setting, valgrind(setting, &[]), &Namespaces::NullAndMalloc)?;
            let mut command = base(setting, &server.uri(2), &load);
            command.args([&format!("--number_ios={ios}"), "--size=256m", "--eta=never"]);
            let mut process = Process::start(&mut command, setting.scratch, "perf")?;
            let status = process.wait(RUN_MAX).context("perf")?;
            let commands = vec![server.command.clone(), describe(&command)];
            server.end()?;
            Ok((status.success(), "serve.err", commands))
        },
        setting,
    )
}

/// Of the driver, from submission to completion of a read.
pub(super) fn driver(setting: &Setting<'_>) -> anyhow::Result<Outcome> {
    let program = setting.examples.path(DRIVER)?;
    difference(
        IOS,
        |ios| {
            let mut command = valgrind_of(setting, program, &COLLECT_DRIVER);
            command.args([DRIVER_DEPTH.to_string(), (ios / DRIVER_DEPTH).to_string()]);
            let mut process = Process::start(&mut command, setting.scratch, "valgrind")?;
            let status = process.wait(RUN_MAX).context("valgrind")?;
            Ok((status.success(), "valgrind.err", vec![describe(&command)]))
        },
        setting,
    )
}

fn valgrind(setting: &Setting<'_>, options: &[&str]) -> Command {
    valgrind_of(setting, setting.binary, options)
}

/// The program under Valgrind. Without fair scheduling a thread that spins keeps the others waiting
/// for as long as it likes.
fn valgrind_of(setting: &Setting<'_>, program: &Path, options: &[&str]) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--fair-sched=yes"]).args(options);
    command.arg(format!("--callgrind-out-file={}", setting.scratch.file("callgrind.out").display()));
    command.arg(program);
    command
}

/// Instructions an I/O: of a run with twice as many less those of one with so many. A run tells
/// whether it went well, where Valgrind's words are, and its commands.
fn difference(
    ios: u64,
    run: impl Fn(u64) -> anyhow::Result<(bool, &'static str, Vec<String>)>,
    setting: &Setting<'_>,
) -> anyhow::Result<Outcome> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        return Ok(Outcome::Skipped(format!("valgrind cannot be started: {error}")));
    }
    let mut counts = [0u64; 2];
    let mut commands = Vec::new();
    for (count, ios) in counts.iter_mut().zip([ios, 2 * ios]) {
        let (success, log, said_by) = run(ios)?;
        let said = std::fs::read_to_string(setting.scratch.file(log))?;
        if let Some(refusal) = refusal(&said) {
            return Ok(Outcome::Skipped(format!("valgrind: {refusal}")));
        }
        ensure!(success, "{}: {}", said_by.join("; "), setting.scratch.tail(log));
        *count = collected(&said).context("valgrind counted nothing")?;
        commands.extend(said_by);
    }
    let each = counts[1].saturating_sub(counts[0]) as f64 / ios as f64;
    Ok(Outcome::Measured(Sample { values: [(Metric::Instructions, each)].into(), commands }))
}

/// What Valgrind could not do, in its words.
fn refusal(said: &str) -> Option<String> {
    let lines: Vec<&str> =
        said.lines().map(|line| line.rsplit("== ").next().unwrap_or(line).trim()).collect();
    let hard =
        ["Process terminating with default action of signal", "unhandled instruction", "unhandled amd64"];
    let at = lines.iter().position(|line| hard.iter().any(|start| line.contains(start)))?;
    let place = lines[at..].iter().find(|line| line.starts_with("at 0x")).unwrap_or(&"");
    Some(format!("{} {place}", lines[at]).trim().to_string())
}

fn collected(said: &str) -> Option<u64> {
    let (_, rest) = said.split_once("Collected : ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_valgrind_says_is_understood() {
        let well = "==7== Events    : Ir\n==7== Collected : 212249770\n==7== \n";
        assert_eq!((refusal(well), collected(well)), (None, Some(212_249_770)));
        let badly = "==7== Process terminating with default action of signal 11 (SIGSEGV)\n\
                     ==7==  Access not within mapped region at address 0x7F25FFACF000\n\
                     ==7==    at 0x3B85AA: check_elf_base (equality.rs:157)\n==7== Collected : 5\n";
        let reason = "Process terminating with default action of signal 11 (SIGSEGV) \
                      at 0x3B85AA: check_elf_base (equality.rs:157)";
        assert_eq!(refusal(badly).as_deref(), Some(reason));
    }
}
