//! A target for one run.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::Setting;
use super::process::{Process, describe};

const NQN: &str = "nqn.2025-01.io.ringbolt:bench";
const START_MAX: Duration = Duration::from_secs(10);
/// Of the memory device over TCP: far beyond the caches.
const MALLOC_BYTES: u64 = 512 << 20;
const BLOCK_BYTES: u64 = 512;

/// What it serves.
pub(super) enum Namespaces {
    /// Null is 1, memory is 2.
    NullAndMalloc,
    /// Ten of the null device.
    Ten,
}

/// How hosts reach it, besides over TCP.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    Tcp,
    VfioUser,
}

/// A running `ringbolt serve`, on a port and in a directory of its own.
pub(super) struct Server {
    process: Process,
    port: u16,
    /// Where the socket of its controller over vfio-user is.
    directory: PathBuf,
    reach: Reach,
    /// From exec to the first accepted connection.
    pub(super) started: Duration,
    pub(super) command: String,
}

impl Server {
    pub(super) fn start(
        setting: &Setting<'_>,
        cores: &str,
        idle: &str,
        namespaces: &Namespaces,
        reach: Reach,
    ) -> anyhow::Result<Server> {
        let options = ["--cores", cores, "--idle", idle];
        Server::launch(setting, Command::new(setting.binary), &options, namespaces, reach)
    }

    /// Starts it under Valgrind, which knows `epoll_wait` for a call that blocks, but not
    /// `io_uring_enter`. It sleeps where it can, so that only I/O costs instructions.
    pub(super) fn start_counted(
        setting: &Setting<'_>,
        valgrind: Command,
        namespaces: &Namespaces,
    ) -> anyhow::Result<Server> {
        Server::launch(setting, valgrind, &["--idle", "sleep", "--engine", "epoll"], namespaces, Reach::Tcp)
    }

    /// `command` is the program, or what runs it with the program as its last argument.
    fn launch(
        setting: &Setting<'_>,
        mut command: Command,
        options: &[&str],
        namespaces: &Namespaces,
        reach: Reach,
    ) -> anyhow::Result<Server> {
        // Free now; should another program take it meanwhile, the start fails and says so.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let directory = setting.scratch.folder("vfio-user")?;
        let file = setting.scratch.file("target.json");
        let config = config(port, (reach == Reach::VfioUser).then_some(&*directory), namespaces);
        std::fs::write(&file, serde_json::to_string_pretty(&config)?)?;
        command.arg("serve").arg("-c").arg(&file).arg("-r").arg(setting.scratch.file("rpc.sock"));
        command.args(options);
        let begun = Instant::now();
        let mut process = Process::start(&mut command, setting.scratch, "serve")?;
        while TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_err() {
            if let Some(status) = process.ended()? {
                bail!("serve: {status}: {}", setting.scratch.tail("serve.err"));
            }
            ensure!(
                begun.elapsed() < START_MAX,
                "serve accepts no connection: {}",
                setting.scratch.tail("serve.err")
            );
            std::thread::sleep(Duration::from_micros(200));
        }
        let started = begun.elapsed();
        Ok(Server { process, port, directory, reach, started, command: describe(&command) })
    }

    /// What the driver calls namespace `nsid`.
    pub(super) fn uri(&self, nsid: u32) -> String {
        match self.reach {
            Reach::Tcp => format!("nvme+tcp://127.0.0.1:{}/{NQN}?ns={nsid}", self.port),
            Reach::VfioUser => format!("nvme+vfio-user:{}?ns={nsid}", self.directory.display()),
        }
    }

    /// Processor time so far.
    pub(super) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        super::facts::process_seconds(&self.process.id().to_string(), false).context("serve ended early")
    }

    /// Resident memory in MiB.
    pub(super) fn resident_mib(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kib / 1024.0)
    }

    pub(super) fn end(mut self) -> anyhow::Result<()> {
        let status = self.process.end().context("serve")?;
        ensure!(status.success(), "serve ended with {status}");
        Ok(())
    }
}

fn config(port: u16, directory: Option<&Path>, namespaces: &Namespaces) -> Value {
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let null = |name: &str| {
        let blocks = (1u64 << 30) / BLOCK_BYTES;
        call("bdev_null_create", json!({ "name": name, "num_blocks": blocks, "block_size": BLOCK_BYTES }))
    };
    let (bdevs, names) = match namespaces {
        Namespaces::NullAndMalloc => {
            let blocks = MALLOC_BYTES / BLOCK_BYTES;
            let params = json!({ "name": "Malloc0", "num_blocks": blocks, "block_size": BLOCK_BYTES });
            let names = vec!["Null0".to_string(), "Malloc0".to_string()];
            (vec![null("Null0"), call("bdev_malloc_create", params)], names)
        }
        Namespaces::Ten => {
            let names: Vec<String> = (0..10).map(|number| format!("Null{number}")).collect();
            (names.iter().map(|name| null(name)).collect(), names)
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
    if let Some(directory) = directory {
        nvmf.push(call("nvmf_create_transport", json!({ "trtype": "VFIOUSER" })));
        nvmf.push(listener(json!({ "trtype": "VFIOUSER", "traddr": directory, "trsvcid": "0" })));
    }
    // The last: when it accepts connections, everything else is there.
    nvmf.push(listener(json!({
        "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() })));
    json!({ "subsystems": [
        { "subsystem": "bdev", "config": bdevs },
        { "subsystem": "nvmf", "config": nvmf },
    ] })
}
