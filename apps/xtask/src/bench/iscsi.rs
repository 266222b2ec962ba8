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

/// Random reads of 4 KiB: each session is an iscsi-perf with `depth` commands in flight. With one session, target and
/// initiator have a core each; with several, the target has two, which the initiators share with it.
pub(super) fn reads(
    context: &RunContext<'_>,
    device: BenchDevice,
    depth: u32,
    sessions: u32,
) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = context.cores else {
        return Ok(RunOutcome::Skipped("target and initiator need two cores".to_string()));
    };
    if Command::new("iscsi-perf").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return Ok(RunOutcome::Skipped("iscsi-perf is not installed: apt install libiscsi-bin".to_string()));
    }
    let both = format!("{first},{second}");
    let is_one = sessions == 1;
    let (of_target, of_initiator) =
        if is_one { (first.to_string(), second.to_string()) } else { (both.clone(), both) };
    let idle = if is_one { "spin" } else { "adaptive" };
    let (server, address) = start(context, &of_target, idle, device)?;
    let seconds = if context.quick { "3" } else { "8" };
    let mut command = Command::new("taskset");
    command.args(["-c", &of_initiator, "iscsi-perf", "-r", "-b", IO_BLOCKS, "-m", &depth.to_string()]);
    command.args(["-t", seconds, &format!("iscsi://{address}/{NODE}/0")]);
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let mut running = Vec::new();
    for _ in 0..sessions {
        running.push(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?);
    }
    let mut iops = 0.0;
    for one in running {
        let output = one.wait_with_output()?;
        ensure!(output.status.success(), "iscsi-perf: {}", String::from_utf8_lossy(&output.stderr));
        iops += average(&String::from_utf8_lossy(&output.stdout))?;
    }
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    let values = [(BenchMetric::Iops, iops), (BenchMetric::TargetCpuNs, busy / iops * 1e9)];
    let commands = vec![server.command.clone(), describe(&command)];
    server.end()?;
    Ok(RunOutcome::measured(values, commands))
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
