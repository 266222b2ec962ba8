//! Benchmarks with `ringbolt perf`.

use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{NQN, TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome, spdk};

/// The device under load.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BenchDevice {
    Null,
    Malloc,
}

/// The I/O pattern: fio's `rw`, `bs` and `iodepth`.
pub(super) struct IoPattern {
    pub(super) rw: &'static str,
    pub(super) block: &'static str,
    pub(super) depth: u32,
}

/// Time allowed beyond the runtime, for connecting and exit.
const EXTRA: Duration = Duration::from_secs(30);

/// The load generator alone.
pub(super) fn local(
    context: &RunContext<'_>,
    device: BenchDevice,
    pattern: &IoPattern,
) -> anyhow::Result<RunOutcome> {
    let name = match device {
        BenchDevice::Null => "null:1g",
        BenchDevice::Malloc => "malloc:512m",
    };
    // The ramp time covers the first writes to each page, whose page faults may take milliseconds.
    let ramp = if device == BenchDevice::Malloc { "2s" } else { ramp(context) };
    let mut command = timed(context, name, pattern, ramp);
    command.arg(format!("--cpus_allowed={}", second_core(context)));
    let result = perf(context, &mut command)?;
    Ok(RunOutcome::measured(values(&result)?, vec![describe(&command)]))
}

/// A load on a target over a transport.
pub(super) struct RemoteLoad<'a> {
    pub(super) transport: TargetTransport,
    pub(super) device: BenchDevice,
    pub(super) pattern: &'a IoPattern,
    /// Idle policy of the target.
    pub(super) idle: &'static str,
    /// Further parameters of the namespace's URI.
    pub(super) query: &'static str,
}

/// Target and load generator on a core each; and SPDK's load generator with either target, where there is an
/// SPDK.
pub(super) fn remote(context: &RunContext<'_>, load: &RemoteLoad<'_>) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(skipped_one_core()) };
    let cores = [target, host];
    let mut measured = measure_remote(context, load, cores)?;
    if let Some(spdk) = context.spdk.filter(|_| load.idle == "spin") {
        spdk::compare(context, spdk, load, cores, &mut measured)?;
    }
    Ok(RunOutcome::Measured(measured))
}

/// Target and load generator on a core each.
pub(super) fn measure_remote(
    context: &RunContext<'_>,
    load: &RemoteLoad<'_>,
    [target, host]: [u32; 2],
) -> anyhow::Result<Measurement> {
    let namespaces = TargetNamespaces::NullAndMalloc;
    let server = TargetServer::start(context, &target.to_string(), load.idle, &namespaces, load.transport)?;
    let uri = match load.device {
        BenchDevice::Null => server.uri(1),
        BenchDevice::Malloc => server.uri(2),
    };
    if load.device == BenchDevice::Malloc {
        fill(context, &uri)?;
    }
    let mut command = timed(context, &format!("{uri}{}", load.query), load.pattern, ramp(context));
    command.arg(format!("--cpus_allowed={host}"));
    with_target(context, server, &mut command)
}

/// Writes all blocks of a memory device: pages that were never written would all map to the kernel's zero
/// page.
pub(super) fn fill(context: &RunContext<'_>, uri: &str) -> anyhow::Result<()> {
    let pattern = IoPattern { rw: "write", block: "128k", depth: 16 };
    perf(context, &mut base(context, uri, &pattern)).map(drop)
}

/// What `framework_set_scheduler` has the target do.
#[derive(Clone, Copy)]
pub(super) enum TargetScheduler {
    Static,
    Dynamic,
}

/// 16 connections; target and load generator both run on the same two cores. The target assigns connections
/// by their number, so that admin queues are on one reactor and I/O queues on the other when they begin.
pub(super) fn shared(context: &RunContext<'_>, scheduler: TargetScheduler) -> anyhow::Result<RunOutcome> {
    let [first, second, ..] = context.cores else { return Ok(skipped_one_core()) };
    let cores = format!("{first},{second}");
    let server = TargetServer::start(
        context,
        &cores,
        "adaptive",
        &TargetNamespaces::NullAndMalloc,
        TargetTransport::Tcp,
    )?;
    if matches!(scheduler, TargetScheduler::Dynamic) {
        server.rpc(context)?.call("framework_set_scheduler", &json!({ "name": "dynamic" }))?;
    }
    let pattern = IoPattern { rw: "randread", block: "4k", depth: 8 };
    let mut command = timed(context, &server.uri(1), &pattern, ramp(context));
    command.args(["--numjobs=16", "--group_reporting", &format!("--cpus_allowed={cores}")]);
    with_target(context, server, &mut command).map(RunOutcome::Measured)
}

pub(super) fn skipped_one_core() -> RunOutcome {
    RunOutcome::Skipped("target and load generator need two cores".to_string())
}

/// The core of the load generator: not the first, where most interrupts arrive.
pub(super) fn second_core(context: &RunContext<'_>) -> u32 {
    context.cores.get(1).or(context.cores.first()).copied().unwrap_or(0)
}

fn with_target(
    context: &RunContext<'_>,
    server: TargetServer,
    command: &mut Command,
) -> anyhow::Result<Measurement> {
    let values = measure_with_target(context, &server, command)?;
    let commands = vec![server.command.clone(), describe(command)];
    server.end()?;
    Ok(Measurement { values, commands, ..Measurement::default() })
}

/// `ringbolt perf` on a device, without a limit of time or I/Os.
pub(super) fn base(context: &RunContext<'_>, device: &str, pattern: &IoPattern) -> Command {
    let mut command = Command::new(context.binary);
    command.args(["perf", &format!("--filename={device}"), &format!("--rw={}", pattern.rw)]);
    command.args([format!("--bs={}", pattern.block), format!("--iodepth={}", pattern.depth)]);
    // Random offsets as in bdevperf, and no measurement of the generator's own cost.
    command.args(["--norandommap", "--generator_cost=0"]);
    command
}

/// The ramp time, which is not measured.
pub(super) fn ramp(context: &RunContext<'_>) -> &'static str {
    if context.quick { "200ms" } else { "500ms" }
}

pub(super) fn timed(context: &RunContext<'_>, device: &str, pattern: &IoPattern, ramp: &str) -> Command {
    let mut command = base(context, device, pattern);
    let runtime = if context.quick { "500ms" } else { "2s" };
    command.args(["--time_based", &format!("--ramp_time={ramp}"), &format!("--runtime={runtime}")]);
    command.args(["--idle=spin"]);
    command
}

/// Runs `ringbolt perf`, or fio, with JSON output, and returns the first job of the result.
pub(super) fn perf(context: &RunContext<'_>, command: &mut Command) -> anyhow::Result<Value> {
    start_perf(context, command)?.finish(context)
}

/// A load that runs.
pub(super) struct RunningPerf {
    process: ChildProcess,
    output: PathBuf,
    command: String,
}

/// Starts `ringbolt perf`, or fio, with JSON output.
pub(super) fn start_perf(context: &RunContext<'_>, command: &Command) -> anyhow::Result<RunningPerf> {
    let output = context.directory.file("perf.json");
    let mut with_output = Command::new(command.get_program());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => with_output.env(name, value),
            None => with_output.env_remove(name),
        };
    }
    with_output.args(command.get_args()).args(["--eta=never", "--output-format=json"]);
    with_output.arg(format!("--output={}", output.display()));
    let process = ChildProcess::start(&mut with_output, context.directory, "perf")?;
    Ok(RunningPerf { process, output, command: describe(command) })
}

impl RunningPerf {
    /// Waits until it ends, and returns the first job of the result.
    pub(super) fn finish(self, context: &RunContext<'_>) -> anyhow::Result<Value> {
        self.finish_within(context, Duration::ZERO)
    }

    /// The same for a load that takes so long.
    pub(super) fn finish_within(
        mut self,
        context: &RunContext<'_>,
        runtime: Duration,
    ) -> anyhow::Result<Value> {
        let status = self.process.wait(runtime + EXTRA).with_context(|| self.command.clone())?;
        ensure!(status.success(), "{}: {status}: {}", self.command, context.directory.tail("perf.err"));
        let mut document: Value = serde_json::from_slice(&std::fs::read(self.output)?)?;
        Ok(document["jobs"][0].take())
    }
}

/// IOPS of a job that reads and writes, and the longer of both 99th percentiles in microseconds.
pub(super) fn mixed(job: &Value) -> anyhow::Result<(f64, f64)> {
    let mut sum = (0.0, 0.0_f64);
    for side in [&job["read"], &job["write"]] {
        let p99_ns =
            side["clat_ns"]["percentile"]["99.000000"].as_f64().context("no percentile in the result")?;
        sum = (sum.0 + side["iops"].as_f64().context("no iops in the result")?, sum.1.max(p99_ns / 1e3));
    }
    Ok(sum)
}

/// The metrics of a job that reads or writes.
pub(super) fn values(job: &Value) -> anyhow::Result<BTreeMap<BenchMetric, f64>> {
    let sides = ["read", "write"].map(|name| &job[name]);
    let side = sides.into_iter().find(|side| side["total_ios"].as_u64() > Some(0));
    let side = side.context("the load generator did no I/O")?;
    let number =
        |value: &Value, what: &str| value.as_f64().with_context(|| format!("no {what} in the result"));
    Ok([
        (BenchMetric::Iops, number(&side["iops"], "iops")?),
        (BenchMetric::Gibps, number(&side["bw_bytes"], "bandwidth")? / (1u64 << 30) as f64),
        (BenchMetric::MeanUs, number(&side["lat_ns"]["mean"], "latency")? / 1e3),
        (BenchMetric::P99Us, number(&side["clat_ns"]["percentile"]["99.000000"], "percentile")? / 1e3),
        (BenchMetric::HostCpuNs, number(&job["cpu_ns_per_io"], "CPU time")?),
    ]
    .into())
}

/// What is compared of NVMe/TCP with TLS and the same load without.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsComparison {
    /// CPU time of both ends; they sleep while they wait.
    Cpu,
    /// Latency; both ends spin.
    Latency,
}

/// A host with a key of TLS, and the key: the bytes 0 to 31, for AES-128-GCM with SHA-256.
const TLS_HOST: &str = "nqn.2025-01.io.ringbolt:tls-host";
const TLS_KEY: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// Plaintext of a record.
const RECORD_BYTES: u32 = 16 << 10;

/// Reads of a memory device with TLS and without, which take turns in being the first.
pub(super) fn compare_tls(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    comparison: TlsComparison,
) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(skipped_one_core()) };
    let idle = match comparison {
        TlsComparison::Cpu => "sleep",
        TlsComparison::Latency => "spin",
    };
    let Some(cipher_bytes) = cipher_bytes_per_second(host)? else {
        return Ok(RunOutcome::Skipped("the program openssl is not installed".to_string()));
    };
    let namespaces = TargetNamespaces::NullAndMalloc;
    let server = TargetServer::start(context, &target.to_string(), idle, &namespaces, TargetTransport::Tcp)?;
    let plain_uri = server.uri(2);
    fill(context, &plain_uri)?;
    let secure_uri = listen_with_tls(context, &server)?;
    let command = |uri: &str| {
        let mut command = base(context, uri, pattern);
        let (ramp, runtime) = (ramp(context), if context.quick { "500ms" } else { "2s" });
        command.args(["--time_based", &format!("--ramp_time={ramp}"), &format!("--runtime={runtime}")]);
        command.args([format!("--idle={idle}"), format!("--cpus_allowed={host}")]);
        command
    };
    let (mut plain, mut secure) = (command(&plain_uri), command(&secure_uri));
    let mut commands = vec![server.command.clone(), describe(&plain), describe(&secure)];
    let (plain, secure) = match context.run % 2 {
        0 => {
            let plain = measure_with_target(context, &server, &mut plain)?;
            (plain, measure_with_target(context, &server, &mut secure)?)
        }
        _ => {
            let secure = measure_with_target(context, &server, &mut secure)?;
            (measure_with_target(context, &server, &mut plain)?, secure)
        }
    };
    server.end()?;
    let mut values = secure.clone();
    match comparison {
        TlsComparison::Cpu => {
            commands.push(format!("openssl speed -evp aes-128-gcm -bytes {RECORD_BYTES}"));
            let cpu_ns = |values: &BTreeMap<BenchMetric, f64>| -> anyhow::Result<f64> {
                Ok(value_of(values, BenchMetric::TargetCpuNs)? + value_of(values, BenchMetric::HostCpuNs)?)
            };
            let bytes = value_of(&secure, BenchMetric::Gibps)? * (1u64 << 30) as f64
                / value_of(&secure, BenchMetric::Iops)?;
            // One end encrypts, the other decrypts.
            let cipher_ns = 2.0 * bytes / cipher_bytes * 1e9;
            let (plain_ns, secure_ns) = (cpu_ns(&plain)?, cpu_ns(&secure)?);
            values.insert(BenchMetric::PlainCpuNs, plain_ns);
            values.insert(BenchMetric::CipherCpuNs, cipher_ns);
            values.insert(BenchMetric::TlsCpuRatio, secure_ns / (plain_ns + cipher_ns));
        }
        TlsComparison::Latency => {
            let (secure_us, plain_us) =
                (value_of(&secure, BenchMetric::MeanUs)?, value_of(&plain, BenchMetric::MeanUs)?);
            values.insert(BenchMetric::TlsAddedUs, secure_us - plain_us);
        }
    }
    Ok(RunOutcome::Measured(Measurement { values, commands, ..Measurement::default() }))
}

fn value_of(values: &BTreeMap<BenchMetric, f64>, metric: BenchMetric) -> anyhow::Result<f64> {
    values.get(&metric).copied().with_context(|| format!("the load generator has not reported: {metric}"))
}

/// Gives the target a listener with TLS, and a host the key; returns the URI of namespace 2 with it.
fn listen_with_tls(context: &RunContext<'_>, server: &TargetServer) -> anyhow::Result<String> {
    let file = context.directory.file("tls.key");
    if !file.exists() {
        let mut options = std::fs::OpenOptions::new();
        let mut key = options.write(true).create_new(true).mode(0o600).open(&file)?;
        std::io::Write::write_all(&mut key, TLS_KEY.as_bytes())?;
    }
    let port = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut rpc = server.rpc(context)?;
    rpc.call("keyring_file_add_key", &json!({ "name": "tls", "path": file }))?;
    rpc.call("nvmf_subsystem_add_host", &json!({ "nqn": NQN, "host": TLS_HOST, "psk": "tls" }))?;
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    let listener = json!({ "nqn": NQN, "listen_address": address, "secure_channel": true });
    rpc.call("nvmf_subsystem_add_listener", &listener)?;
    Ok(format!("nvme+tcp://127.0.0.1:{port}/{NQN}?ns=2&hostnqn={TLS_HOST}&psk={}", file.display()))
}

/// The metrics of a load, with the CPU time of the target.
fn measure_with_target(
    context: &RunContext<'_>,
    server: &TargetServer,
    command: &mut Command,
) -> anyhow::Result<BTreeMap<BenchMetric, f64>> {
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let result = perf(context, command)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    let mut values = values(&result)?;
    if let Some(iops) = values.get(&BenchMetric::Iops) {
        values.insert(BenchMetric::TargetCpuNs, busy / iops * 1e9);
    }
    Ok(values)
}

/// Bytes of records a second of the cipher alone, on a core; `None` without OpenSSL's program.
fn cipher_bytes_per_second(core: u32) -> anyhow::Result<Option<f64>> {
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string(), "openssl", "speed", "-mr", "-evp", "aes-128-gcm"]);
    command.args(["-bytes", &RECORD_BYTES.to_string(), "-seconds", "1"]);
    let is_there = Command::new("openssl").arg("version").stdout(Stdio::null()).status().is_ok();
    if !is_there {
        return Ok(None);
    }
    let output = command.stdin(Stdio::null()).output().with_context(|| describe(&command))?;
    ensure!(output.status.success(), "{}: {}", describe(&command), output.status);
    rate_of_openssl(&String::from_utf8_lossy(&output.stdout)).map(Some)
}

/// Of `openssl speed -mr`: `+F:NUMBER:NAME:BYTES_PER_SECOND`.
fn rate_of_openssl(output: &str) -> anyhow::Result<f64> {
    let line = output.lines().find(|line| line.starts_with("+F:"));
    let rate = line.and_then(|line| line.rsplit(':').next()?.parse().ok()).filter(|rate: &f64| *rate > 0.0);
    rate.with_context(|| format!("no rate in {output}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_the_cipher_is_read_from_what_openssl_prints() {
        let output = "+H:16384\n+F:25:AES-128-GCM:6135653797.65\n";
        assert_eq!(rate_of_openssl(output).ok(), Some(6_135_653_797.65));
        assert!(rate_of_openssl("+H:16384\n").is_err());
        assert!(rate_of_openssl("+F:25:AES-128-GCM:0\n").is_err());
    }
}
