//! The target and the load generator, compared with an echo of the same bytes over bare sockets, and with the least target
//! and client, an echo that does what the framing of NVMe/TCP demands.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::examples::Example;
use super::load::{self, BenchDevice, IoPattern, RemoteLoad};
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::TargetTransport;
use super::{Measurement, RunContext, RunOutcome, placement};

/// Requests and responses of NVMe/TCP's sizes, with both ends spinning.
pub(super) const ECHO: Example = Example { package: "ringbolt-sockets", name: "echo" };

const RUN_MAX: Duration = Duration::from_secs(30);

/// Measures reads or writes of the null device over TCP, then the echoes on the same two cores, and their ratios.
pub(super) fn compare(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    data_digest: bool,
) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(load::skipped_one_core()) };
    let remote = RemoteLoad {
        transport: TargetTransport::Tcp,
        device: BenchDevice::Null,
        pattern,
        idle: "spin",
        query: if data_digest { "&ddgst=1" } else { "" },
    };
    let mut measured = load::measure_remote(context, &remote, [target, host])?;
    let ours = measured.values.get(&BenchMetric::Iops).copied().context("no IOPS")?;
    let bare = echo(context, pattern, data_digest.then_some("digest"), [target, host], &mut measured)?;
    measured.values.insert(BenchMetric::BareIops, bare);
    measured.values.insert(BenchMetric::BareRatio, ours / bare);
    if !data_digest {
        let least = echo(context, pattern, Some("parts+copy"), [target, host], &mut measured)?;
        measured.values.insert(BenchMetric::LeastPairRatio, ours / least);
        measured.values.insert(BenchMetric::LeastPairBareRatio, least / bare);
    }
    Ok(RunOutcome::Measured(measured))
}

/// The messages per second of an echo in a mode.
fn echo(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    mode: Option<&str>,
    [target, host]: [u32; 2],
    measured: &mut Measurement,
) -> anyhow::Result<f64> {
    measured.round_trips_ns.extend(placement::measure([target, host]));
    let mut command = Command::new(context.examples.path(ECHO)?);
    command.args([if pattern.rw == "randread" { "read" } else { "write" }, &pattern.depth.to_string()]);
    command.args([if context.quick { "0.5" } else { "2" }, &host.to_string(), &target.to_string()]);
    command.args(mode);
    let mut process = ChildProcess::start(&mut command, context.directory, "echo")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(&command))?;
    ensure!(status.success(), "{}: {status}: {}", describe(&command), context.directory.tail("echo.err"));
    let output = context.directory.tail("echo.out");
    measured.commands.push(describe(&command));
    rate(&output).with_context(|| format!("{}: {output}", describe(&command)))
}

/// The rate in the last line of the echo's output.
fn rate(output: &str) -> Option<f64> {
    output.strip_suffix(" messages/s")?.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_parsed_from_the_output() {
        assert_eq!(rate("read at depth 32 over bare sockets: 512000 messages/s"), Some(512_000.0));
        assert_eq!(rate("a digest is wrong"), None);
    }
}
