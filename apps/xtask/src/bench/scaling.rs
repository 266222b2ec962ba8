//! Use of several cores: by the NVMe driver, and by connections that move between a target's reactors.
//! Examples have all of it in one process.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::{RunContext, RunOutcome};

/// Measures the driver time of queue pairs of one controller, each on its own core.
pub(super) const DRIVER: Example = Example { package: "ringbolt-nvme", name: "scaling" };

/// A queue that moves under load.
pub(super) const STALL: Example = Example { package: "ringbolt-nvmf", name: "moves" };
/// Queues that all begin on one reactor.
pub(super) const SPREAD: Example = Example { package: "ringbolt-nvmf", name: "balance" };

const DEPTH: &str = "128";
const RUN_MAX: Duration = Duration::from_secs(30);
const MOVES_RUN_MAX: Duration = Duration::from_secs(120);

pub(super) fn driver(context: &RunContext<'_>, pairs: usize) -> anyhow::Result<RunOutcome> {
    let Some(cores) = context.cores.get(..pairs) else {
        return Ok(RunOutcome::Skipped(format!("{pairs} queue pairs need {pairs} cores")));
    };
    let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
    let mut command = Command::new(context.examples.path(DRIVER)?);
    command.arg(cores.join(",")).args([DEPTH, if context.quick { "1" } else { "2" }]);
    let mut process = ChildProcess::start(&mut command, context.directory, "scaling")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), context.directory.tail("scaling.err"));
    let output = context.directory.tail("scaling.out");
    let rate = rate(&output).with_context(|| format!("{}: {output}", describe(&command)))?;
    Ok(RunOutcome::measured([(BenchMetric::Iops, rate)], vec![describe(&command)]))
}

/// The rate in the last line of the example's output.
fn rate(output: &str) -> Option<f64> {
    output.strip_suffix(" reads/s")?.rsplit(' ').next()?.parse().ok()
}

/// The pause of a queue that moves, with `depth` reads in flight.
pub(super) fn stall(context: &RunContext<'_>, depth: u32) -> anyhow::Result<RunOutcome> {
    let mut command = Command::new(context.examples.path(STALL)?);
    command.arg(depth.to_string()).arg(if context.quick { "50" } else { "200" });
    let values = |output: &str| {
        let moves = output.lines().find(|line| line.starts_with("moves: "))?;
        let stays = output.lines().find(|line| line.starts_with("stays: "))?;
        Some(vec![
            (BenchMetric::MoveMedianUs, number(moves, "median ")?),
            (BenchMetric::MoveMaxUs, number(moves, "maximum ")?),
            (BenchMetric::StayMedianUs, number(stays, "median ")?),
            (BenchMetric::StayMaxUs, number(stays, "maximum ")?),
        ])
    };
    measure_moves(context, &mut command, values)
}

/// The reads a second of queues that all begin on one reactor, as a fraction of those of an even start.
pub(super) fn spread(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let mut command = Command::new(context.examples.path(SPREAD)?);
    command.args(["16", "1"]);
    let values = |output: &str| {
        let line = output.lines().find(|line| line.starts_with("one reactor "))?;
        let (even, dynamic) = (number(line, "even ")?, number(line, "dynamic ")?);
        Some(vec![(BenchMetric::Iops, dynamic), (BenchMetric::EvenRatio, dynamic / even.max(1.0))])
    };
    measure_moves(context, &mut command, values)
}

fn measure_moves(
    context: &RunContext<'_>,
    command: &mut Command,
    values: impl FnOnce(&str) -> Option<Vec<(BenchMetric, f64)>>,
) -> anyhow::Result<RunOutcome> {
    if context.cores.len() < 2 {
        return Ok(RunOutcome::Skipped("two reactors need two cores".to_string()));
    }
    let mut process = ChildProcess::start(command, context.directory, "balance")?;
    let status = process.wait(MOVES_RUN_MAX).with_context(|| describe(command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(command), context.directory.tail("balance.err"));
    let output = std::fs::read_to_string(context.directory.file("balance.out"))?;
    let values = values(&output).with_context(|| format!("{}: {output}", describe(command)))?;
    Ok(RunOutcome::measured(values, vec![describe(command)]))
}

/// The number that follows this text.
fn number(text: &str, before: &str) -> Option<f64> {
    let (_, rest) = text.split_once(before)?;
    let end = rest.find(|character: char| !character.is_ascii_digit() && character != '.');
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_parsed_from_the_output() {
        assert_eq!(
            rate("2 queue pairs at depth 128, in the driver alone: 51200000 reads/s"),
            Some(51_200_000.0)
        );
        assert_eq!(rate("no memory"), None);
    }

    #[test]
    fn numbers_are_those_of_the_examples() {
        let line = "moves: median 153 us, maximum 801 us, of 200";
        assert_eq!((number(line, "median "), number(line, "maximum ")), (Some(153.0), Some(801.0)));
        let line = "one reactor 100 reads/s, even 203 reads/s, dynamic 199 reads/s: 0.980 of even";
        assert_eq!((number(line, "even "), number(line, "dynamic ")), (Some(203.0), Some(199.0)));
        assert_eq!(number(line, "odd "), None);
    }
}
