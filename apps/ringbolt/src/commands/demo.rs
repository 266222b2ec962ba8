//! Everything in a few seconds: a file, served over NVMe/TCP, driven by our own initiator with every
//! block checked, and what it cost on either side.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bdev::{Registry, malloc, uring};
use comfy_table::{Table, presets};
use nvmf::{ListenAddress, NamespaceConfig, SubsystemConfig, TargetError, TransportConfig};
use reactor::Remote;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use sys::{Engine, clock};
use workload::units::{format_count, format_ns, format_rate};
use workload::{Direction, JobResult, JobSpec, Source, Verify, Workload};

use crate::cli::{self, Demo, Idle};
use crate::failure::Failure;
use crate::machine::Machine;
use crate::say::say;
use crate::state::App;

const NQN: &str = "nqn.2025-01.io.ringbolt:demo";
const DEVICE_BYTES: u64 = 1 << 30;
/// The registered port, and where else to look when it is taken.
const PORTS: std::ops::RangeInclusive<u16> = 4420..=4519;
/// The part that is driven. Random writes all over a sparse file leave it in as many pieces as there are
/// writes, and some file systems take longer to delete those than the demonstration runs.
const DRIVEN_BYTES: u64 = 64 << 20;
const IO_DEPTH: u32 = 32;

/// A directory that goes when the demonstration ends.
struct Scratch(PathBuf);

pub(crate) fn run(options: &Demo) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(Failure::machine)?;
    let scratch = Scratch::new().map_err(Failure::machine)?;
    let machine_options =
        cli::Machine { idle: Idle::Adaptive, memory: "256m".to_string(), engine: cli::EngineChoice::Auto };
    // One reactor is the target, the other the initiator.
    let machine = Machine::start(&machine_options, None, 2)?;
    machine.describe()?.iter().for_each(|line| say!("{line}"));
    let reactors = machine.reactors()?;
    let [target, initiator] = machine.remotes() else {
        return Err(Failure::machine("the demonstration needs two reactors"));
    };
    let served = reactors.into_iter().take(1).collect();
    let app = App::new(Registry::new(), served, None);
    say!("device: {}", make_device(&app.registry, machine.engine()?, &scratch.0)?);
    let port = serve(&app, options.address)?;
    let driven = DRIVEN_BYTES >> 20;
    say!("driving: random 4 KiB reads and writes of {driven} MiB, {IO_DEPTH} in flight, every block checked");

    let before = used_ns(target)?;
    let result = drive(options, port, &app.registry, initiator, &mut signals)?;
    let target_ns = used_ns(target)?.saturating_sub(before);
    say!("{}", table(&result, target_ns, &machine));
    verdict(&result)?;
    say!("{}", invitation(options.address, own_address(), port));
    if !options.once {
        say!("serving until Ctrl-C");
        signals.forever().next();
    }
    app.close_target();
    machine.reactors.stop();
    app.remove_devices();
    Ok(())
}

/// A sparse file through io_uring; memory where there is none. Says which.
fn make_device(registry: &Registry, engine: Engine, scratch: &Path) -> Result<String, Failure> {
    let path = scratch.join("demo.img");
    let refused = if engine == Engine::Uring {
        let mut config = uring::UringConfig::new("Demo0", &path);
        config.create_bytes = Some(DEVICE_BYTES);
        match uring::create(registry, config) {
            Ok(_) => {
                return Ok(format!(
                    "{}, 1 GiB, sparse, through io_uring (durability: disk once flushed or written with FUA, memory until then)",
                    path.display()
                ));
            }
            Err(error) => error.to_string(),
        }
    } else {
        "io_uring is not allowed here".to_string()
    };
    let config = malloc::MallocConfig::new("Demo0", DEVICE_BYTES / 512, 512);
    malloc::create(registry, config).map_err(Failure::machine)?;
    Ok(format!("1 GiB of memory (durability: memory), because no file can be used: {refused}"))
}

/// Makes the target; the port that it got.
fn serve(app: &App, address: IpAddr) -> Result<u16, Failure> {
    let target = &app.target;
    let subsystem = SubsystemConfig {
        serial_number: "RINGBOLTDEMO".to_string(),
        allow_any_host: true,
        ..SubsystemConfig::default()
    };
    target.create_transport(TransportConfig::default()).map_err(Failure::machine)?;
    target.create_subsystem(NQN, subsystem).map_err(Failure::machine)?;
    target.add_namespace(NQN, NamespaceConfig::new("Demo0")).map_err(Failure::machine)?;
    for port in PORTS {
        match target.add_listener(NQN, ListenAddress::tcp(&address.to_string(), &port.to_string())) {
            Ok(_) => {
                say!("target: NVMe/TCP on {}, subsystem {NQN}", SocketAddr::new(address, port));
                return Ok(port);
            }
            // Another target, or another demonstration; the next port may be free.
            Err(TargetError::Listen(..)) => {}
            Err(error) => return Err(Failure::machine(error)),
        }
    }
    Err(Failure::machine(format!("every port from {} to {} is taken", PORTS.start(), PORTS.end())))
}

fn drive(
    options: &Demo,
    port: u16,
    registry: &Registry,
    initiator: &Remote,
    signals: &mut Signals,
) -> Result<JobResult, Failure> {
    let spec = JobSpec {
        name: "demo".to_string(),
        workload: Workload::RandRw,
        io_depth: IO_DEPTH,
        size_bytes: Some(DRIVEN_BYTES),
        read_percent: 70,
        runtime_ns: Some(options.runtime),
        time_based: true,
        verify: Verify::Crc32c,
        ..JobSpec::default()
    };
    let uri = format!("nvme+tcp://{}/{NQN}?ns=1", SocketAddr::new(options.address, port));
    let source = Source::parse(&uri).map_err(Failure::machine)?;
    let remotes = std::slice::from_ref(initiator);
    let mut running = workload::start(&spec, 1, &source, registry, remotes).map_err(Failure::work)?;
    while !running.wait(Duration::from_millis(200)) {
        if signals.pending().next().is_some() {
            running.stop();
        }
    }
    let result = running.into_results().pop();
    result.ok_or_else(|| Failure::machine("the initiator's reactor ended before its job"))
}

/// How a Linux kernel connects, here and elsewhere.
fn invitation(address: IpAddr, own: Option<IpAddr>, port: u16) -> String {
    let connect = |address: IpAddr| format!("  nvme connect -t tcp -a {address} -s {port} -n {NQN}");
    let head = "connect a Linux kernel to it, as root, after `modprobe nvme-tcp`";
    if !address.is_loopback() {
        return format!("{head}, on this machine or another:\n{}", connect(address));
    }
    let mut text = format!("{head}, on this machine:\n{}", connect(address));
    if let Some(own) = own {
        // Whoever reaches the port may write: that is for the user to decide.
        text += &format!(
            "\nor on another, once it is served to everybody who reaches {own}\n  \
             ringbolt demo --address {own}\nwith\n{}",
            connect(own)
        );
    }
    text
}

/// The address that other machines know this one by: the source of what goes to the outside.
fn own_address() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    // Picks a route and sends nothing; the address is one for documentation (RFC 5737).
    socket.connect("192.0.2.1:9").ok()?;
    let own = socket.local_addr().ok()?.ip();
    (!own.is_loopback() && !own.is_unspecified()).then_some(own)
}

/// Processor time of a reactor's thread so far.
fn used_ns(remote: &Remote) -> Result<u64, Failure> {
    remote.call(|_| sys::thread_cpu_ns()).map_err(Failure::machine)
}

fn table(result: &JobResult, target_ns: u64, machine: &Machine) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["", "IOPS", "bandwidth", "mean latency", "p99 latency"]);
    for direction in [Direction::Read, Direction::Write] {
        let side = result.side(direction);
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
        "{table}\nCPU an I/O: target {}, initiator {} (checking included)\nchecked: {} blocks, {} wrong; memory: {} MiB of buffers, {} MiB of the process",
        per_io(target_ns),
        per_io(result.usage.cpu_ns),
        result.checked_blocks,
        result.mismatch_count,
        machine.arena.taken_bytes() >> 20,
        resident_bytes() >> 20,
    )
}

fn verdict(result: &JobResult) -> Result<(), Failure> {
    if let Some(mismatch) = result.mismatches.first() {
        return Err(Failure::work(format!(
            "{} block(s) wrong; the first: {mismatch}",
            result.mismatch_count
        )));
    }
    if let Some(failure) = result.failures.first() {
        return Err(Failure::work(format!("{} I/O(s) failed; the first: {failure}", result.errors)));
    }
    if !result.is_clean() || result.total_ios() == 0 {
        return Err(Failure::work(format!(
            "{} I/O(s) done, {} never came back",
            result.total_ios(),
            result.stuck
        )));
    }
    Ok(())
}

/// proc(5): the second number of `statm` is resident pages.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

impl Scratch {
    /// Beside other temporary files, for this user alone.
    fn new() -> std::io::Result<Scratch> {
        use std::os::unix::fs::DirBuilderExt;
        let name = format!("ringbolt-demo-{}-{:x}", std::process::id(), clock::ticks());
        let path = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machine_is_told_an_address_that_it_can_reach() {
        let own = Some(IpAddr::from([192, 168, 0, 7]));
        let text = invitation(IpAddr::from([127, 0, 0, 1]), own, 4420);
        assert!(text.contains("nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn."), "{text}");
        assert!(text.contains("nvme connect -t tcp -a 192.168.0.7 -s 4420 -n nqn."), "{text}");
        assert!(text.contains("ringbolt demo --address 192.168.0.7"), "{text}");
        let text = invitation(IpAddr::from([10, 0, 0, 1]), own, 4421);
        assert!(text.contains("-a 10.0.0.1 -s 4421") && !text.contains("192.168"), "{text}");
    }
}
