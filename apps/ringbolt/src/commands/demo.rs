//! `ringbolt demo`: serves a file over NVMe/TCP, runs a verified load on it with our own initiator, and
//! prints IOPS, latency and the CPU time of both sides.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bdev::{Registry, malloc, uring};
use clap::Args;
use comfy_table::{Table, presets};
use nvmf::{ListenAddress, NamespaceConfig, NvmfTargetError, SubsystemConfig, TcpTransportConfig};
use os::{EventBackend, clock};
use reactor::ReactorHandle;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use workload::units::{format_count, format_ns, format_rate};
use workload::{Direction, JobResult, JobSpec, Source, Verify, Workload};

use crate::app::{App, StartOptions};
use crate::command_error::CommandError;
use crate::console::stdout_line;
use crate::options::{EngineChoice, Idle, ReactorOptions, parse_time};
use crate::reactor_runtime::ReactorRuntime;

#[derive(Args)]
#[command(after_help = "Examples:\n  \
    ringbolt demo            # serves until Ctrl-C, and prints how to connect a Linux host\n  \
    ringbolt demo --once     # exits after a few seconds")]
pub(crate) struct Demo {
    /// Exit when the measurement is done
    #[arg(long)]
    pub(crate) once: bool,
    /// Address to listen on; other machines reach any but a loopback address, without authentication
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) address: std::net::IpAddr,
    /// Duration of the load
    #[arg(long, default_value = "3s", value_parser = parse_time)]
    pub(crate) runtime: u64,
}

const NQN: &str = "nqn.2025-01.io.ringbolt:demo";
const DEVICE_BYTES: u64 = 1 << 30;
/// Of a program that was built to be there soon.
const BUILD_NOTE: &str = match option_env!("RINGBOLT_BUILD_NOTE") {
    Some(note) => note,
    None => "",
};

/// The NVMe/TCP port registered with IANA, and those tried next when it is in use.
const PORTS: std::ops::RangeInclusive<u16> = 4420..=4519;
/// The part of the device under load. Random writes all over a sparse file make an extent of each write, and
/// some file systems take longer to delete these than the demonstration runs.
const LOAD_BYTES: u64 = 64 << 20;
const IO_DEPTH: u32 = 32;

/// A temporary directory, removed on drop.
pub(super) struct TemporaryDirectory(pub(super) PathBuf);

pub(crate) fn run(options: &Demo) -> Result<(), CommandError> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(CommandError::environment)?;
    let scratch = TemporaryDirectory::new().map_err(CommandError::environment)?;
    let reactor_options =
        ReactorOptions { idle: Idle::Adaptive, memory: Some("256m".to_string()), engine: EngineChoice::Auto };
    // One reactor for the target, one for the initiator.
    let runtime = ReactorRuntime::start(&reactor_options, None, 2)?;
    runtime.describe()?.iter().for_each(|line| stdout_line!("{line}"));
    let reactors = runtime.reactors()?;
    let [target, initiator] = runtime.handles() else {
        return Err(CommandError::environment("the demonstration needs two reactors"));
    };
    let target_reactors = reactors.into_iter().take(1).collect();
    let app = App::start(runtime.registry(), target_reactors, StartOptions::default())
        .map_err(CommandError::environment)?;
    stdout_line!("device: {}", create_bdev(&app.registry, runtime.engine()?, &scratch.0)?);
    let port = serve(&app, options.address)?;
    let load_mib = LOAD_BYTES >> 20;
    stdout_line!(
        "load: random 4 KiB reads and writes of {load_mib} MiB, queue depth {IO_DEPTH}, every block verified"
    );

    let before = cpu_ns(target)?;
    let result = run_load(options, port, &app.registry, initiator, &mut signals)?;
    let target_ns = cpu_ns(target)?.saturating_sub(before);
    stdout_line!("{}", table(&result, target_ns, &runtime));
    check(&result)?;
    stdout_line!("{}", connect_instructions(options.address, local_address(), port));
    if !options.once {
        stdout_line!("serving until Ctrl-C");
        signals.forever().next();
    }
    app.control.drain();
    runtime.reactors.stop();
    app.control.stop();
    Ok(())
}

/// Creates the bdev: a sparse file through io_uring, or memory where io_uring or the file is not available.
/// Returns its description.
fn create_bdev(registry: &Registry, engine: EventBackend, scratch: &Path) -> Result<String, CommandError> {
    let path = scratch.join("demo.img");
    let reason = if engine == EventBackend::Uring {
        let mut config = uring::UringConfig::new("Demo0", &path);
        config.create_bytes = Some(DEVICE_BYTES);
        match uring::create(registry, config) {
            Ok(device) => {
                let (path, class) = (path.display(), device.durability().name());
                return Ok(format!(
                    "{path}, 1 GiB, sparse, through io_uring (durability: {class} once flushed or written with FUA, memory until \
                     then)"
                ));
            }
            Err(error) => error.to_string(),
        }
    } else {
        "io_uring is not allowed here".to_string()
    };
    let config = malloc::MallocConfig::new("Demo0", DEVICE_BYTES / 512, 512);
    malloc::create(registry, config).map_err(CommandError::environment)?;
    Ok(format!("1 GiB of memory (durability: memory), because no file can be used: {reason}"))
}

/// Configures the target and returns its port.
fn serve(app: &App, address: IpAddr) -> Result<u16, CommandError> {
    let target = app.target();
    let subsystem = SubsystemConfig {
        serial_number: "RINGBOLTDEMO".to_string(),
        allow_any_host: true,
        ..SubsystemConfig::default()
    };
    target.create_transport(TcpTransportConfig::default()).map_err(CommandError::environment)?;
    target.create_subsystem(NQN, subsystem).map_err(CommandError::environment)?;
    target.add_namespace(NQN, NamespaceConfig::new("Demo0")).map_err(CommandError::environment)?;
    for port in PORTS {
        match target.add_listener(NQN, ListenAddress::tcp(&address.to_string(), &port.to_string())) {
            Ok(_) => {
                stdout_line!("target: NVMe/TCP on {}, subsystem {NQN}", SocketAddr::new(address, port));
                return Ok(port);
            }
            // In use; try the next port.
            Err(NvmfTargetError::Listen(..)) => {}
            Err(error) => return Err(CommandError::environment(error)),
        }
    }
    Err(CommandError::environment(format!("every port from {} to {} is in use", PORTS.start(), PORTS.end())))
}

fn run_load(
    options: &Demo,
    port: u16,
    registry: &Registry,
    initiator: &ReactorHandle,
    signals: &mut Signals,
) -> Result<JobResult, CommandError> {
    let spec = JobSpec {
        name: "demo".to_string(),
        workload: Workload::RandRw,
        io_depth: IO_DEPTH,
        size_bytes: Some(LOAD_BYTES),
        read_percent: 70,
        runtime_ns: Some(options.runtime),
        time_based: true,
        verify: Verify::Crc32c,
        ..JobSpec::default()
    };
    let uri = format!("nvme+tcp://{}/{NQN}?ns=1", SocketAddr::new(options.address, port));
    let source = Source::parse(&uri).map_err(CommandError::environment)?;
    let remotes = std::slice::from_ref(initiator);
    let mut running =
        workload::start(&spec, 1, &source, registry, remotes).map_err(CommandError::operation)?;
    while !running.wait(Duration::from_millis(200)) {
        if signals.pending().next().is_some() {
            running.stop();
        }
    }
    let result = running.into_results().pop();
    result.ok_or_else(|| CommandError::environment("the initiator's reactor ended before its job"))
}

/// The commands that connect a Linux host, on this machine and on others.
fn connect_instructions(address: IpAddr, local: Option<IpAddr>, port: u16) -> String {
    let connect = |address: IpAddr| format!("  nvme connect -t tcp -a {address} -s {port} -n {NQN}");
    let head = "connect a Linux kernel to it, as root, after `modprobe nvme-tcp`";
    if !address.is_loopback() {
        return format!("{head}, on this machine or another:\n{}", connect(address));
    }
    let mut text = format!("{head}, on this machine:\n{}", connect(address));
    if let Some(local) = local {
        // Every host that reaches the port may write, so the user has to ask for it.
        text += &format!(
            "\nor on another machine; this lets every host that reaches {local} write to it:\n  \
             ringbolt demo --address {local}\nthen\n{}",
            connect(local)
        );
    }
    text
}

/// The address that other machines reach this one by: the source address of outgoing packets.
fn local_address() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    // Selects a route and sends nothing; 192.0.2.1 is reserved for documentation (RFC 5737).
    socket.connect("192.0.2.1:9").ok()?;
    let local = socket.local_addr().ok()?.ip();
    (!local.is_loopback() && !local.is_unspecified()).then_some(local)
}

/// CPU time of a reactor's thread so far.
fn cpu_ns(remote: &ReactorHandle) -> Result<u64, CommandError> {
    remote.call(|_| os::thread_cpu_ns()).map_err(CommandError::environment)
}

fn table(result: &JobResult, target_ns: u64, runtime: &ReactorRuntime) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["", "IOPS", "bandwidth", "mean latency", "p99 latency"]);
    for direction in [Direction::Read, Direction::Write] {
        let side = result.direction(direction);
        let ns = |ticks: u64| format_ns(clock::ticks_to_ns(ticks) as f64);
        table.add_row([
            direction.name().to_string(),
            format_count(side.iops()),
            format_rate(side.bytes_per_second()),
            ns(side.latency_ticks.mean() as u64),
            ns(side.latency_ticks.percentile(99.0)),
        ]);
    }
    let per_io = |ns: u64| format_ns(ns as f64 / result.total_ios().max(1) as f64);
    format!(
        "{table}\nCPU per I/O: target {}, initiator {} (verification included{BUILD_NOTE})\nverified: {} blocks, {} wrong; memory: {} MiB of buffers, {} MiB of the process",
        per_io(target_ns),
        per_io(result.usage.cpu_ns),
        result.checked_blocks,
        result.mismatch_count,
        runtime.arena.allocated_bytes() >> 20,
        resident_bytes() >> 20,
    )
}

/// Fails if an I/O failed, never completed or returned wrong data.
pub(super) fn check(result: &JobResult) -> Result<(), CommandError> {
    if let Some(mismatch) = result.mismatches.first() {
        return Err(CommandError::operation(format!(
            "{} block(s) wrong; the first: {mismatch}",
            result.mismatch_count
        )));
    }
    if let Some(failure) = result.failures.first() {
        return Err(CommandError::operation(format!(
            "{} I/O(s) failed; the first: {failure}",
            result.errors
        )));
    }
    if !result.is_clean() || result.total_ios() == 0 {
        return Err(CommandError::operation(format!(
            "{} I/O(s) completed, {} never completed",
            result.total_ios(),
            result.never_completed
        )));
    }
    Ok(())
}

/// Resident memory of this process; the second field of `statm` is in pages (proc(5)).
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

impl TemporaryDirectory {
    /// Creates it with mode 0700.
    pub(super) fn new() -> std::io::Result<TemporaryDirectory> {
        use std::os::unix::fs::DirBuilderExt;
        let name = format!("ringbolt-demo-{}-{:x}", std::process::id(), clock::ticks());
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(TemporaryDirectory(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_for_other_machines_have_a_reachable_address() {
        let local = Some(IpAddr::from([192, 168, 0, 7]));
        let text = connect_instructions(IpAddr::from([127, 0, 0, 1]), local, 4420);
        assert!(text.contains("nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn."), "{text}");
        assert!(text.contains("nvme connect -t tcp -a 192.168.0.7 -s 4420 -n nqn."), "{text}");
        assert!(text.contains("ringbolt demo --address 192.168.0.7"), "{text}");
        let text = connect_instructions(IpAddr::from([10, 0, 0, 1]), local, 4421);
        assert!(text.contains("-a 10.0.0.1 -s 4421") && !text.contains("192.168"), "{text}");
    }
}
