//! NVMe/TCP with TLS, compared with the same load without, and with what the cipher costs alone.

use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::json;

use super::load::{self, BenchDevice, IoPattern};
use super::metric::BenchMetric;
use super::process::describe;
use super::server::{NQN, TargetNamespaces, TargetServer, TargetTransport};
use super::{Measurement, RunContext, RunOutcome};

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsComparison {
    /// CPU time of both ends; they sleep while they wait.
    Cpu,
    /// Latency; both ends spin.
    Latency,
}

/// A host with a key, and the key: the bytes 0 to 31, for AES-128-GCM with SHA-256.
const HOST: &str = "nqn.2025-01.io.ringbolt:tls-host";
const KEY: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// Plaintext of a record.
const RECORD_BYTES: u32 = 16 << 10;

/// Reads of a memory device with TLS and without, which take turns in being the first.
pub(super) fn compare(
    context: &RunContext<'_>,
    pattern: &IoPattern,
    comparison: TlsComparison,
) -> anyhow::Result<RunOutcome> {
    let [target, host, ..] = *context.cores else { return Ok(load::skipped_one_core()) };
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
    load::fill(context, &plain_uri)?;
    let secure_uri = secure(context, &server)?;
    let command = |uri: &str| {
        let mut command = load::base(context, uri, pattern);
        let (ramp, runtime) = (load::ramp(context), if context.quick { "500ms" } else { "2s" });
        command.args(["--time_based", &format!("--ramp_time={ramp}"), &format!("--runtime={runtime}")]);
        command.args([format!("--idle={idle}"), format!("--cpus_allowed={host}")]);
        command
    };
    let (mut plain, mut secure) = (command(&plain_uri), command(&secure_uri));
    let mut commands = vec![server.command.clone(), describe(&plain), describe(&secure)];
    let (plain, secure) = match context.run % 2 {
        0 => {
            let plain = measure(context, &server, &mut plain)?;
            (plain, measure(context, &server, &mut secure)?)
        }
        _ => {
            let secure = measure(context, &server, &mut secure)?;
            (measure(context, &server, &mut plain)?, secure)
        }
    };
    server.end()?;
    let mut values = secure.clone();
    match comparison {
        TlsComparison::Cpu => {
            commands.push(format!("openssl speed -evp aes-128-gcm -bytes {RECORD_BYTES}"));
            let cpu_ns = |values: &BTreeMap<BenchMetric, f64>| -> anyhow::Result<f64> {
                Ok(value(values, BenchMetric::TargetCpuNs)? + value(values, BenchMetric::HostCpuNs)?)
            };
            let bytes = value(&secure, BenchMetric::Gibps)? * (1u64 << 30) as f64
                / value(&secure, BenchMetric::Iops)?;
            // One end encrypts, the other decrypts.
            let cipher_ns = 2.0 * bytes / cipher_bytes * 1e9;
            let (plain_ns, secure_ns) = (cpu_ns(&plain)?, cpu_ns(&secure)?);
            values.insert(BenchMetric::PlainCpuNs, plain_ns);
            values.insert(BenchMetric::CipherCpuNs, cipher_ns);
            values.insert(BenchMetric::TlsCpuRatio, secure_ns / (plain_ns + cipher_ns));
        }
        TlsComparison::Latency => {
            let (secure_us, plain_us) =
                (value(&secure, BenchMetric::MeanUs)?, value(&plain, BenchMetric::MeanUs)?);
            values.insert(BenchMetric::TlsAddedUs, secure_us - plain_us);
        }
    }
    Ok(RunOutcome::Measured(Measurement { values, commands, ..Measurement::default() }))
}

fn value(values: &BTreeMap<BenchMetric, f64>, metric: BenchMetric) -> anyhow::Result<f64> {
    values.get(&metric).copied().with_context(|| format!("the load generator has not reported: {metric}"))
}

/// Gives the target a listener with TLS, and a host the key; returns the URI of namespace 2 with it.
fn secure(context: &RunContext<'_>, server: &TargetServer) -> anyhow::Result<String> {
    let file = context.directory.file("tls.key");
    if !file.exists() {
        let mut options = std::fs::OpenOptions::new();
        let mut key = options.write(true).create_new(true).mode(0o600).open(&file)?;
        std::io::Write::write_all(&mut key, KEY.as_bytes())?;
    }
    let port = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut rpc = server.rpc(context)?;
    rpc.call("keyring_file_add_key", &json!({ "name": "tls", "path": file }))?;
    rpc.call("nvmf_subsystem_add_host", &json!({ "nqn": NQN, "host": HOST, "psk": "tls" }))?;
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() });
    let listener = json!({ "nqn": NQN, "listen_address": address, "secure_channel": true });
    rpc.call("nvmf_subsystem_add_listener", &listener)?;
    Ok(format!("nvme+tcp://127.0.0.1:{port}/{NQN}?ns=2&hostnqn={HOST}&psk={}", file.display()))
}

/// The metrics of a load, with the CPU time of the target.
fn measure(
    context: &RunContext<'_>,
    server: &TargetServer,
    command: &mut Command,
) -> anyhow::Result<BTreeMap<BenchMetric, f64>> {
    let (begun, before) = (Instant::now(), server.cpu_seconds()?);
    let result = load::perf(context, command)?;
    let busy = (server.cpu_seconds()? - before) / begun.elapsed().as_secs_f64();
    let mut values = load::values(&result)?;
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
