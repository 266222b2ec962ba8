//! Our NVMe/TCP target in a process of its own, for cells that drive one.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lab_experiments::devices::{Device, DeviceKind};
use lab_experiments::processes::{RunProcess, RunProcesses};
use serde_json::json;

use crate::command_error::CommandError;

const NQN: &str = "nqn.2025-01.io.ringbolt:lab";
/// How long the target may take to listen, and to end.
const START_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Blocks of the null bdev that replaces a bdev of the generator's.
const NULL_BLOCKS: u64 = 1 << 21;

/// A target process, terminated on drop.
pub(crate) struct TargetProcess {
    child: RunProcess,
    config: PathBuf,
    /// URI that the generator connects to.
    pub(crate) uri: String,
}

impl TargetProcess {
    /// Serves a device on a free port of the loopback interface.
    pub(crate) fn start(
        device: &Device,
        folder: &Path,
        processes: &mut RunProcesses,
    ) -> Result<TargetProcess, CommandError> {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = free.map_err(CommandError::environment)?.port();
        let bdev = match device.kind {
            DeviceKind::Uri => json!({ "method": "bdev_null_create",
                "params": { "name": "Lab0", "num_blocks": NULL_BLOCKS, "block_size": 512 } }),
            _ => {
                json!({ "method": "bdev_uring_create", "params": { "name": "Lab0", "filename": device.location } })
            }
        };
        let calls = json!({ "subsystems": [
            { "subsystem": "bdev", "config": [bdev] },
            { "subsystem": "nvmf", "config": [
                { "method": "nvmf_create_transport", "params": { "trtype": "TCP" } },
                { "method": "nvmf_create_subsystem", "params": { "nqn": NQN, "allow_any_host": true } },
                { "method": "nvmf_subsystem_add_ns", "params": { "nqn": NQN, "namespace": { "bdev_name": "Lab0" } } },
                { "method": "nvmf_subsystem_add_listener", "params": { "nqn": NQN, "listen_address":
                    { "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() } } },
            ] },
        ] });
        let config = folder.join("target.json");
        let text = serde_json::to_string_pretty(&calls).map_err(CommandError::operation)?;
        std::fs::write(&config, text)
            .map_err(|error| CommandError::operation(format!("{}: {error}", config.display())))?;
        let program = std::env::current_exe().map_err(CommandError::environment)?;
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg("--config")
            .arg(&config)
            .arg("--rpc-socket")
            .arg(folder.join("target.sock"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = processes.spawn(&mut command).map_err(CommandError::environment)?;
        let uri = format!("nvme+tcp://127.0.0.1:{port}/{NQN}?ns=1");
        let mut target_process = TargetProcess { child, config, uri };
        target_process.wait_until_listening(port)?;
        Ok(target_process)
    }

    fn wait_until_listening(&mut self, port: u16) -> Result<(), CommandError> {
        let began = Instant::now();
        while began.elapsed() < START_STOP_TIMEOUT {
            if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let config = self.config.display();
                return Err(CommandError::environment(format!(
                    "the target ended with {status}; `ringbolt serve -c {config}` says why"
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(CommandError::environment("the target did not listen in time"))
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        self.child.terminate(START_STOP_TIMEOUT);
    }
}
