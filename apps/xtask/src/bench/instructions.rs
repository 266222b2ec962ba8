//! Instructions an I/O, counted by Valgrind: they come out nearly the same on every machine.
//!
//! Counted is the difference between two runs, one with twice the I/Os of the other, so that what
//! starting and ending cost falls out.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::load::{Load, base};
use super::metric::Metric;
use super::process::{Process, describe};
use super::{Outcome, Sample, Setting};

/// Start-up waits for clocks and so differs by some hundred thousand instructions from run to run:
/// less than one an I/O.
const IOS: u64 = 1_000_000;
/// Under Valgrind a program takes about fifty times as long.
const RUN_MAX: Duration = Duration::from_secs(120);

/// Of the load generator on the null device, the generator itself included.
pub(super) fn null(setting: &Setting<'_>, depth: u32) -> anyhow::Result<Outcome> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        return Ok(Outcome::Skipped(format!("valgrind cannot be started: {error}")));
    }
    let load = Load { rw: "randread", block: "4k", depth };
    let mut counts = [0u64; 2];
    let mut commands = Vec::new();
    for (count, ios) in counts.iter_mut().zip([IOS, 2 * IOS]) {
        let plain = base(setting, "null:1g", &load);
        let mut command = Command::new("valgrind");
        command.arg("--tool=callgrind");
        command.arg(format!("--callgrind-out-file={}", setting.scratch.file("callgrind.out").display()));
        command.arg(plain.get_program()).args(plain.get_args());
        command.args([&format!("--number_ios={ios}"), "--size=1g", "--idle=spin", "--eta=never"]);
        commands.push(describe(&command));
        let mut process = Process::start(&mut command, setting.scratch, "valgrind")?;
        let status = process.wait(RUN_MAX).context("valgrind")?;
        let said = std::fs::read_to_string(setting.scratch.file("valgrind.err"))?;
        if let Some(refusal) = refusal(&said) {
            return Ok(Outcome::Skipped(format!("valgrind: {refusal}")));
        }
        ensure!(status.success(), "valgrind: {status}: {}", setting.scratch.tail("valgrind.err"));
        *count = collected(&said).context("valgrind counted nothing")?;
    }
    let each = counts[1].saturating_sub(counts[0]) as f64 / IOS as f64;
    Ok(Outcome::Measured(Sample { values: [(Metric::Instructions, each)].into(), commands }))
}

/// Of the target: not yet.
pub(super) fn target() -> anyhow::Result<Outcome> {
    // Valgrind runs one thread at a time and takes io_uring_enter for a call that returns at once:
    // a reactor that sleeps in it keeps all other threads from running.
    Ok(Outcome::Skipped(
        "a reactor asleep in io_uring_enter stops every thread under Valgrind 3.19, and serve has no \
         option for epoll"
            .to_string(),
    ))
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
