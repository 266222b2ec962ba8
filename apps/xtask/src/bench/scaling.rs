//! Scaling of the NVMe driver over cores.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::{RunContext, RunOutcome};

/// Measures the driver time of queue pairs of one controller, each on its own core.
pub(super) const DRIVER: Example = Example { package: "ringbolt-nvme", name: "scaling" };

const DEPTH: &str = "128";
const RUN_MAX: Duration = Duration::from_secs(30);

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
}
