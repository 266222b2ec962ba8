//! Logical volumes beside the device below them, first writes to their clusters, and the loading of a large
//! store: by examples of the volumes' crate, which measure in one process.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::{RunContext, RunOutcome};

/// Volumes and the device alone, in turn.
pub(super) const COST: Example = Example { package: "ringbolt-lvol", name: "volume_cost" };
/// First writes on a device of 100 µs.
pub(super) const FIRST_WRITE: Example = Example { package: "ringbolt-lvol", name: "first_write" };
/// A large store.
pub(super) const STORE: Example = Example { package: "ringbolt-lvol", name: "store_cost" };

/// TiB of the large store. Its file is sparse, and larger than one of ext4 can be.
const STORE_TIB: &str = "16";
const STORE_VOLUMES: &str = "1000";
const RUN_MAX: Duration = Duration::from_secs(300);

/// What was done to the large store before it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreState {
    Clean,
    /// Its program ended without unloading it.
    Killed,
    /// The same, by another program than ours.
    Foreign,
}

/// Reads (`op` `Read`) or writes of a volume at a queue depth, beside its device.
pub(super) fn volume(
    context: &RunContext<'_>,
    name: &str,
    op: &str,
    depth: u32,
) -> anyhow::Result<RunOutcome> {
    let mut command = Command::new(context.examples.path(COST)?);
    command.args(["256", &depth.to_string(), op, name]);
    let output = output(context, &mut command)?;
    let line = |device: &str| output.lines().find(|line| line.starts_with(&format!("{op} {device}:")));
    let values = line(&format!("lvs/{name}")).and_then(|line| {
        Some([
            (BenchMetric::Iops, 1e9 / number(line, ": ")?),
            (BenchMetric::BareDeviceRatio, number(line, "ns, ")? / 100.0),
            (BenchMetric::LeastLayerRatio, number(line, "of bare, ")? / 100.0),
        ])
    });
    let values = values.with_context(|| format!("{}: {output}", describe(&command)))?;
    Ok(RunOutcome::measured(values, vec![describe(&command)]))
}

/// First writes of a kind, as a multiple of writes to clusters that are there.
pub(super) fn first_write(context: &RunContext<'_>, kind: &str) -> anyhow::Result<RunOutcome> {
    let mut command = Command::new(context.examples.path(FIRST_WRITE)?);
    let output = output(context, &mut command)?;
    // The last are those of a device with blocks of 4 KiB, as most are.
    let line = output.lines().rfind(|line| line.starts_with(&format!("{kind}:")));
    let values = line.and_then(|line| {
        Some([
            (BenchMetric::MeanUs, number(line, ": ")?),
            (BenchMetric::FirstWriteRatio, number(line, "µs, ")?),
            (BenchMetric::StallMs, number(line, "others ")? / 1000.0),
        ])
    });
    let values = values.with_context(|| format!("{}: {output}", describe(&command)))?;
    Ok(RunOutcome::measured(values, vec![describe(&command)]))
}

/// Loads a store of 16 TiB with 1,000 volumes.
pub(super) fn load(context: &RunContext<'_>, state: StoreState) -> anyhow::Result<RunOutcome> {
    let directory = Path::new("/dev/shm");
    if !directory.is_dir() {
        return Ok(RunOutcome::Skipped("no /dev/shm, on which files may have 16 TiB".to_string()));
    }
    let file = directory.join(format!("ringbolt-bench-{}.lvs", std::process::id()));
    let measured = load_file(context, state, &file);
    _ = std::fs::remove_file(&file);
    measured
}

fn load_file(context: &RunContext<'_>, state: StoreState, file: &Path) -> anyhow::Result<RunOutcome> {
    let program = context.examples.path(STORE)?;
    let run = |step: &str, more: &[&str]| {
        let mut command = Command::new(program);
        command.arg(step).arg(file).args(more);
        Ok::<_, anyhow::Error>((output(context, &mut command)?, describe(&command)))
    };
    let (_, made) = run("make", &[STORE_TIB, STORE_VOLUMES, "0"])?;
    let mut commands = vec![made];
    let mut floors = Vec::new();
    if state == StoreState::Foreign {
        let (output, command) = run("foreign", &[])?;
        commands.push(command);
        let read = number(&output, "order in ").context("no time of reading")?;
        let decoded = number(&output, "decoded in ").context("no time of decoding")?;
        floors = vec![
            (BenchMetric::MetadataReadMs, BenchMetric::MetadataReadRatio, read * 1000.0),
            (BenchMetric::MetadataDecodeMs, BenchMetric::MetadataDecodeRatio, decoded * 1000.0),
        ];
    }
    if state == StoreState::Clean {
        // It is unloaded at the end.
        commands.push(run("load", &[])?.1);
    }
    let (output, command) = run("load", &[])?;
    commands.push(command);
    let seconds = number(&output, "loaded: ").with_context(|| output.clone())?;
    let mut values = vec![(BenchMetric::StoreLoadMs, seconds * 1000.0)];
    if let Some(mib) = number(&output, "resident: ") {
        values.push((BenchMetric::RssMib, mib));
    }
    for (floor, ratio, milliseconds) in floors {
        values.extend([(floor, milliseconds), (ratio, seconds * 1000.0 / milliseconds)]);
    }
    Ok(RunOutcome::measured(values, commands))
}

/// Runs an example on one core, and returns what it printed.
fn output(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<String> {
    let mut process = ChildProcess::start(command, context.directory, "lvol")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(command), context.directory.tail("lvol.err"));
    Ok(std::fs::read_to_string(context.directory.file("lvol.out"))?)
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
    fn figures_are_parsed_from_the_output() {
        let line = "Read lvs/chain: 321.4 ns, 93.5 % (92.0 to 95.1) of bare, 98.0 % (97.0 to 99.1) of split";
        assert_eq!((number(line, ": "), number(line, "ns, ")), (Some(321.4), Some(93.5)));
        assert_eq!(number(line, "of bare, "), Some(98.0));
        let line = "a whole cluster: 214 µs, 1.98 x 108 µs; longest read of others 140 µs";
        assert_eq!((number(line, "µs, "), number(line, "others ")), (Some(1.98), Some(140.0)));
        assert_eq!(number("loaded: 0.250 s\nunloaded: 0.125 s\n", "loaded: "), Some(0.25));
        assert_eq!(number("no memory", ": "), None);
    }
}
