//! Benchmarks of the iSCSI target, with libiscsi's iscsi-perf and an idle session.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::load::BenchDevice;
use super::metric::BenchMetric;
use super::process::describe;
use super::server::{TargetNamespaces, TargetServer, TargetTransport};
use super::{RunContext, RunOutcome};

const NODE: &str = "iqn.2016-06.io.spdk:bench";
/// Blocks of 512 bytes in an I/O of 4 KiB.
const IO_BLOCKS: &str = "8";
/// Time for the adaptive reactors to go to sleep.
const SETTLE: Duration = Duration::from_secs(1);

/// Commands in flight of each of several sessions.
const SESSION_DEPTH: u32 = 32;
/// Polls until the sessions have logged in, and the time between two.
const LOGIN_POLLS: u32 = 100;
const LOGIN_POLL: Duration = Duration::from_millis(10);

/// Random reads of 4 KiB by an iscsi-perf with `depth` commands in flight; target and initiator have a core each.
pub(super) fn reads(context: &RunContext<'_>, device: BenchDevice, depth: u32) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = *context.cores else {
        return Ok(RunOutcome::Skipped("target and initiator need two cores".to_string()));
    };
    if let Some(reason) = missing() {
        return Ok(RunOutcome::Skipped(reason));
    }
    let rate = measure(context, device, "spin", &[first], &[second], depth)?;
    let values = [(BenchMetric::Iops, rate.iops), (BenchMetric::TargetCpuNs, rate.target_cpu_ns)];
    Ok(RunOutcome::measured(values, rate.commands))
}

/// The same of one unit by two sessions, each on a reactor of its own, as a multiple of one session's rate. With four
/// cores, each reactor and each initiator has one; with fewer, the reactor and the initiator of a session share one, so that
/// the second session has as much processor time as the first.
pub(super) fn two_sessions(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let (reactors, initiators, idle) = match *context.cores {
        [first, second, third, fourth, ..] => ([first, second], [third, fourth], "spin"),
        [first, second, ..] => ([first, second], [first, second], "sleep"),
        _ => return Ok(RunOutcome::Skipped("two reactors need two cores".to_string())),
    };
    if let Some(reason) = missing() {
        return Ok(RunOutcome::Skipped(reason));
    }
    let run = |sessions: usize| {
        let (reactors, initiators) = (&reactors[..sessions], &initiators[..sessions]);
        measure(context, BenchDevice::Null, idle, reactors, initiators, SESSION_DEPTH)
    };
    let (one, two) = (run(1)?, run(2)?);
    let values = [
        (BenchMetric::Iops, two.iops),
        (BenchMetric::TargetCpuNs, two.target_cpu_ns),
        (BenchMetric::OneSessionRatio, two.iops / one.iops),
    ];
    Ok(RunOutcome::measured(values, two.commands))
}

/// Why there are no sessions.
fn missing() -> Option<String> {
    let found = Command::new("iscsi-perf").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    (!found).then(|| "iscsi-perf is not installed: apt install libiscsi-bin".to_string())
}

struct SessionRate {
    iops: f64,
    target_cpu_ns: f64,
    commands: Vec<String>,
}

/// The rate of sessions that read at the same time, one for each core of `initiators`.
fn measure(
    context: &RunContext<'_>,
    device: BenchDevice,
    idle: &str,
    reactors: &[u32],
    initiators: &[u32],
    depth: u32,
) -> anyhow::Result<SessionRate> {
    let of_target: Vec<String> = reactors.iter().map(ToString::to_string).collect();
    let (server, address) = start(context, &of_target.join(","), idle, device)?;
    let seconds = if context.quick { "3" } else { "8" };
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let mut commands = vec![server.command.clone()];
    let (mut running, mut served_by) = (Vec::new(), Vec::new());
    for core in initiators {
        let mut command = Command::new("taskset");
        command.args([
            "-c",
            &core.to_string(),
            "iscsi-perf",
            "-r",
            "-b",
            IO_BLOCKS,
            "-m",
            &depth.to_string(),
        ]);
        command.args(["-t", seconds, &format!("iscsi://{address}/{NODE}/0")]);
        commands.push(describe(&command));
        running.push(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
        // One after the other, so that each is on the reactor of its core, if they share one.
        served_by.push(reactor_of_new_session(context, &server, &served_by)?);
    }
    let mut iops = 0.0;
    for one in running {
        let output = one.wait_with_output()?;
        ensure!(output.status.success(), "iscsi-perf: {}", String::from_utf8_lossy(&output.stderr));
        iops += average(&String::from_utf8_lossy(&output.stdout))?;
    }
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    ensure!(served_by == reactors, "the sessions are served by the cores {served_by:?}, not {reactors:?}");
    server.end()?;
    Ok(SessionRate { iops, target_cpu_ns: busy / iops * 1e9, commands })
}

/// Waits until one more session has logged in than those on the cores `others`. Returns its reactor's core.
fn reactor_of_new_session(
    context: &RunContext<'_>,
    server: &TargetServer,
    others: &[u32],
) -> anyhow::Result<u32> {
    let mut rpc = server.rpc(context)?;
    for _ in 0..LOGIN_POLLS {
        let connections = rpc.call("iscsi_get_connections", &json!({}))?;
        let connections = connections.as_array().context("connections are a list")?;
        if connections.len() > others.len() {
            let cores = connections.iter().filter_map(|one| one["lcore_id"].as_u64());
            let mut cores: Vec<u32> = cores.filter_map(|core| u32::try_from(core).ok()).collect();
            for other in others {
                cores.iter().position(|core| core == other).map(|at| cores.swap_remove(at));
            }
            return cores.first().copied().context("a connection has a core");
        }
        std::thread::sleep(LOGIN_POLL);
    }
    bail!("a session has not logged in")
}

/// CPU time of an adaptive target with a session that sends nothing.
pub(super) fn idle(context: &RunContext<'_>) -> anyhow::Result<RunOutcome> {
    let Some(core) = context.cores.first() else { bail!("no core to run on") };
    let (server, address) = start(context, &core.to_string(), "adaptive", BenchDevice::Null)?;
    let mut session = TcpStream::connect(&address)?;
    session.write_all(&login())?;
    let mut answer = [0; 48];
    session.read_exact(&mut answer)?;
    ensure!(answer[0] == 0x23 && answer[36..38] == [0, 0], "the login has failed: {answer:02x?}");
    std::thread::sleep(SETTLE);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    std::thread::sleep(Duration::from_secs(if context.quick { 3 } else { 10 }));
    let percent = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64() * 100.0;
    let connections = server.rpc(context)?.call("iscsi_get_connections", &json!({}))?;
    ensure!(connections.as_array().is_some_and(|all| all.len() == 1), "the session has ended: {connections}");
    let values = [(BenchMetric::CpuPercent, percent)];
    let commands = vec![server.command.clone()];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
}

/// Starts a target with a device as the only logical unit of a target node. Returns its address.
fn start(
    context: &RunContext<'_>,
    cores: &str,
    idle: &str,
    device: BenchDevice,
) -> anyhow::Result<(TargetServer, String)> {
    let server =
        TargetServer::start(context, cores, idle, &TargetNamespaces::NullAndMalloc, TargetTransport::Tcp)?;
    let mut rpc = server.rpc(context)?;
    // A device has one writer: the NVMe target gives it up.
    let (bdev, nsid) = if device == BenchDevice::Null { ("Null0", 1) } else { ("Malloc0", 2) };
    if device == BenchDevice::Malloc {
        super::load::fill(context, &server.uri(nsid))?;
    }
    let namespace = json!({ "nqn": super::server::NQN, "nsid": nsid });
    rpc.call("nvmf_subsystem_remove_ns", &namespace)?;
    let portal = json!({ "host": "127.0.0.1", "port": "0" });
    rpc.call("iscsi_create_portal_group", &json!({ "tag": 1, "portals": [portal] }))?;
    rpc.call(
        "iscsi_create_initiator_group",
        &json!({ "tag": 1, "initiators": ["ANY"], "netmasks": ["ANY"] }),
    )?;
    let node = json!({
        "name": "bench",
        "pg_ig_maps": [{ "pg_tag": 1, "ig_tag": 1 }],
        "luns": [{ "bdev_name": bdev, "lun_id": 0 }],
    });
    rpc.call("iscsi_create_target_node", &node)?;
    let groups: Value = rpc.call("iscsi_get_portal_groups", &json!({}))?;
    let port = groups[0]["portals"][0]["port"].as_str().context("a portal has a port")?.to_string();
    Ok((server, format!("127.0.0.1:{port}")))
}

/// The IOPS that iscsi-perf reports last.
fn average(output: &str) -> anyhow::Result<f64> {
    let last = output.rsplit("iops average ").next().filter(|_| output.contains("iops average "));
    let number = last.and_then(|rest| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no result in {output}"))
}

/// A login request that asks for the full feature phase at once.
fn login() -> Vec<u8> {
    let mut text = format!("InitiatorName=iqn.2026-11.io.ringbolt:bench\0TargetName={NODE}\0").into_bytes();
    let mut bytes = vec![0; 48];
    (bytes[0], bytes[1], bytes[7]) = (0x43, 0x87, text.len() as u8);
    (bytes[8], bytes[13], bytes[27], bytes[31]) = (0x80, 1, 1, 1);
    text.resize(text.len().next_multiple_of(4), 0);
    bytes.extend(text);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_average_is_the_result() {
        let output = "\r00:00:01 - lba 1, iops current 5 (0 MB/s), iops average 7 (0 MB/s)  \riops average 47453 (185 MB/s)\n";
        assert_eq!(average(output).ok(), Some(47453.0));
        assert!(average("finished.").is_err());
    }

    #[test]
    fn the_length_of_the_login_fits_its_field() {
        let bytes = login();
        assert_eq!(bytes.len(), 48 + usize::from(bytes[7]).next_multiple_of(4));
    }
}
