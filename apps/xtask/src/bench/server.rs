//! The target of a run: a `ringbolt serve` process.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::RunContext;
use super::load::BenchDevice;
use super::process::{ChildProcess, describe};
use super::rpc::RpcConnection;
use super::spdk::{self, SpdkPrograms};

pub(super) const NQN: &str = "nqn.2025-01.io.ringbolt:bench";
const START_MAX: Duration = Duration::from_secs(10);
/// Size of the memory device over TCP: much larger than the caches.
const MALLOC_BYTES: u64 = 512 << 20;
const BLOCK_BYTES: u64 = 512;

/// The namespaces that the target exports.
pub(super) enum TargetNamespaces {
    /// Null device as namespace 1, memory device as namespace 2.
    NullAndMalloc,
    /// One device.
    One(BenchDevice),
    /// Ten null devices.
    Ten,
    /// A block device.
    Device(PathBuf),
    /// None in the benchmark's own subsystem; so many others, each with ten null devices and a listener at another address.
    InSubsystems(u32),
}

/// Null devices of each of [`TargetNamespaces::InSubsystems`].
pub(super) const SUBSYSTEM_BDEVS: u32 = 10;

/// Name of such a subsystem, and of its device `number`.
pub(super) fn subsystem_nqn(subsystem: u32) -> String {
    format!("{NQN}-{subsystem}")
}

pub(super) fn subsystem_bdev(subsystem: u32, number: u32) -> String {
    format!("Null{subsystem}-{number}")
}

/// The transport of the host. The target listens on TCP in any case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TargetTransport {
    Tcp,
    VfioUser,
}

/// A running `ringbolt serve`, with its own TCP port and vfio-user directory.
pub(super) struct TargetServer {
    process: ChildProcess,
    port: u16,
    /// Directory of the vfio-user socket.
    directory: PathBuf,
    transport: TargetTransport,
    /// From exec to the first accepted connection.
    pub(super) startup_time: Duration,
    pub(super) command: String,
}

impl TargetServer {
    pub(super) fn start(
        context: &RunContext<'_>,
        cores: &str,
        idle: &str,
        namespaces: &TargetNamespaces,
        transport: TargetTransport,
    ) -> anyhow::Result<TargetServer> {
        let options = ["--cores", cores, "--idle", idle];
        TargetServer::launch(context, Command::new(context.binary), &options, namespaces, transport)
    }

    /// Starts the target under Valgrind. It uses epoll, because Valgrind treats `epoll_wait` but not
    /// `io_uring_enter` as a blocking call, and sleeps when idle, so that only I/O costs instructions.
    pub(super) fn start_under_valgrind(
        context: &RunContext<'_>,
        valgrind: Command,
        namespaces: &TargetNamespaces,
    ) -> anyhow::Result<TargetServer> {
        TargetServer::launch(
            context,
            valgrind,
            &["--idle", "sleep", "--engine", "epoll"],
            namespaces,
            TargetTransport::Tcp,
        )
    }

    /// Starts SPDK's target, which spins, with the same configuration.
    pub(super) fn start_spdk(
        context: &RunContext<'_>,
        programs: &SpdkPrograms,
        core: u32,
        namespaces: &TargetNamespaces,
        transport: TargetTransport,
    ) -> anyhow::Result<TargetServer> {
        let mask = spdk::mask(core);
        let options = [programs.memory_options(), vec!["-m", &mask]].concat();
        TargetServer::launch_command(context, Command::new(&programs.target), &options, namespaces, transport)
    }

    /// `command` is the program, or a wrapper with the program as its last argument.
    fn launch(
        context: &RunContext<'_>,
        mut command: Command,
        options: &[&str],
        namespaces: &TargetNamespaces,
        transport: TargetTransport,
    ) -> anyhow::Result<TargetServer> {
        command.arg("serve");
        TargetServer::launch_command(context, command, options, namespaces, transport)
    }

    /// `command` is complete but for configuration file, RPC socket and `options`.
    fn launch_command(
        context: &RunContext<'_>,
        mut command: Command,
        options: &[&str],
        namespaces: &TargetNamespaces,
        transport: TargetTransport,
    ) -> anyhow::Result<TargetServer> {
        // The port is free now; if another program binds it first, the start fails with a message.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let directory = context.directory.folder("vfio-user")?;
        let file = context.directory.file("target.json");
        let config =
            config(port, (transport == TargetTransport::VfioUser).then_some(&*directory), namespaces);
        std::fs::write(&file, serde_json::to_string_pretty(&config)?)?;
        command.arg("-c").arg(&file).arg("-r").arg(context.directory.file("rpc.sock"));
        command.args(options);
        let begun = Instant::now();
        let mut process = ChildProcess::start(&mut command, context.directory, "serve")?;
        while TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_err() {
            if let Some(status) = process.ended()? {
                bail!("serve: {status}: {}", context.directory.tail("serve.err"));
            }
            ensure!(
                begun.elapsed() < START_MAX,
                "serve accepts no connection: {}",
                context.directory.tail("serve.err")
            );
            std::thread::sleep(Duration::from_micros(200));
        }
        let started = begun.elapsed();
        Ok(TargetServer {
            process,
            port,
            directory,
            transport,
            startup_time: started,
            command: describe(&command),
        })
    }

    /// A connection to its RPC socket.
    pub(super) fn rpc(&self, context: &RunContext<'_>) -> anyhow::Result<RpcConnection> {
        RpcConnection::open(&context.directory.file("rpc.sock"))
    }

    /// The driver's URI of namespace `nsid`.
    pub(super) fn uri(&self, nsid: u32) -> String {
        match self.transport {
            TargetTransport::Tcp => format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns={nsid}", self.port),
            TargetTransport::VfioUser => format!("nvme+vfio-user:{}?ns={nsid}", self.directory.display()),
        }
    }

    /// Its TCP listener.
    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The name of its subsystem.
    pub(super) fn nqn(&self) -> &'static str {
        NQN
    }

    /// SPDK's transport identifier of its subsystem.
    pub(super) fn transport_id(&self) -> String {
        match self.transport {
            TargetTransport::Tcp => {
                format!("trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:{} subnqn:{NQN}", self.port)
            }
            TargetTransport::VfioUser => {
                format!("trtype:VFIOUSER traddr:{} subnqn:{NQN}", self.directory.display())
            }
        }
    }

    /// CPU time of the process so far, in seconds.
    pub(super) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        super::machine_info::process_seconds(&self.process.id().to_string(), false)
            .context("serve ended early")
    }

    /// Resident memory in MiB.
    pub(super) fn resident_mib(&self) -> anyhow::Result<f64> {
        resident_mib(&self.process.id().to_string())
    }

    pub(super) fn end(mut self) -> anyhow::Result<()> {
        let status = self.process.end().context("serve")?;
        ensure!(status.success(), "serve ended with {status}");
        Ok(())
    }
}

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

/// The calls that create one of [`TargetNamespaces::InSubsystems`]. It listens at another address than the benchmark's own.
fn subsystem_calls(subsystem: u32, port: u16) -> Vec<Value> {
    let nqn = subsystem_nqn(subsystem);
    let mut calls = vec![call(
        "nvmf_create_subsystem",
        json!({ "nqn": nqn, "allow_any_host": true, "serial_number": format!("S{subsystem}") }),
    )];
    calls.extend((0..SUBSYSTEM_BDEVS).map(|number| {
        let namespace = json!({ "bdev_name": subsystem_bdev(subsystem, number) });
        call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": namespace }))
    }));
    let address =
        json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.2", "trsvcid": port.to_string() });
    calls.push(call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address })));
    calls
}

fn config(port: u16, directory: Option<&Path>, namespaces: &TargetNamespaces) -> Value {
    let null = |name: &str| {
        let blocks = (1u64 << 30) / BLOCK_BYTES;
        call("bdev_null_create", json!({ "name": name, "num_blocks": blocks, "block_size": BLOCK_BYTES }))
    };
    let malloc = || {
        let blocks = MALLOC_BYTES / BLOCK_BYTES;
        call(
            "bdev_malloc_create",
            json!({ "name": "Malloc0", "num_blocks": blocks, "block_size": BLOCK_BYTES }),
        )
    };
    let (bdevs, names) = match namespaces {
        TargetNamespaces::NullAndMalloc => {
            (vec![null("Null0"), malloc()], vec!["Null0".to_string(), "Malloc0".to_string()])
        }
        TargetNamespaces::One(BenchDevice::Null) => (vec![null("Null0")], vec!["Null0".to_string()]),
        TargetNamespaces::One(BenchDevice::Malloc) => (vec![malloc()], vec!["Malloc0".to_string()]),
        TargetNamespaces::Ten => {
            let names: Vec<String> = (0..10).map(|number| format!("Null{number}")).collect();
            (names.iter().map(|name| null(name)).collect(), names)
        }
        TargetNamespaces::Device(path) => {
            let device = call("bdev_uring_create", json!({ "name": "Device", "filename": path }));
            (vec![device], vec!["Device".to_string()])
        }
        TargetNamespaces::InSubsystems(count) => {
            let of_each = |subsystem| (0..SUBSYSTEM_BDEVS).map(move |one| subsystem_bdev(subsystem, one));
            ((0..*count).flat_map(of_each).map(|name| null(&name)).collect(), Vec::new())
        }
    };
    let mut nvmf = vec![
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call(
            "nvmf_create_subsystem",
            json!({ "nqn": NQN, "allow_any_host": true, "serial_number": "RINGBOLTBENCH", "max_namespaces": 32 }),
        ),
    ];
    nvmf.extend(names.iter().map(|name| {
        call("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": name } }))
    }));
    let listener = |address: Value| {
        call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address }))
    };
    if let TargetNamespaces::InSubsystems(count) = namespaces {
        nvmf.extend((0..*count).flat_map(|subsystem| subsystem_calls(subsystem, port)));
    }
    if let Some(directory) = directory {
        nvmf.push(call("nvmf_create_transport", json!({ "trtype": "VFIOUSER" })));
        nvmf.push(listener(json!({ "trtype": "VFIOUSER", "traddr": directory, "trsvcid": "0" })));
    }
    // The TCP listener is last: once it accepts connections, everything else is configured.
    nvmf.push(listener(json!({
        "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() })));
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": bdevs },
        { "subsystem": "nvmf", "config": nvmf },
    ] })
}

/// Resident memory of a process.
pub(super) fn resident_mib(process: &str) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    Ok(kib / 1024.0)
}
