//! The driver on one core and on several.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::Metric;
use super::process::{Process, describe};
use super::{Outcome, Sample, Setting};

/// Counts the time that queue pairs of one controller take, each on a core of its own.
pub(super) const DRIVER: Example = Example { package: "ringbolt-nvme", name: "scaling" };

const DEPTH: &str = "128";
const RUN_MAX: Duration = Duration::from_secs(30);

pub(super) fn driver(setting: &Setting<'_>, pairs: usize) -> anyhow::Result<Outcome> {
    let Some(cores) = setting.cores.get(..pairs) else {
        return Ok(Outcome::Skipped(format!("{pairs} queue pairs need {pairs} cores")));
    };
    let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
    let mut command = Command::new(setting.examples.path(DRIVER)?);
    command.arg(cores.join(",")).args([DEPTH, if setting.quick { "1" } else { "2" }]);
    let mut process = Process::start(&mut command, setting.scratch, "scaling")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), setting.scratch.tail("scaling.err"));
    let said = setting.scratch.tail("scaling.out");
    let rate = rate(&said).with_context(|| format!("{}: {said}", describe(&command)))?;
    Ok(Outcome::Measured(Sample {
        values: [(Metric::Iops, rate)].into(),
        commands: vec![describe(&command)],
    }))
}

/// The number before the last unit.
fn rate(said: &str) -> Option<f64> {
    said.strip_suffix(" reads/s")?.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_the_last_word_but_the_unit() {
        assert_eq!(
            rate("2 queue pairs at depth 128, in the driver alone: 51200000 reads/s"),
            Some(51_200_000.0)
        );
        assert_eq!(rate("no memory"), None);
    }
}
