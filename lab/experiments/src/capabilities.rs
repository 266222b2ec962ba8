//! What the machine, the devices and the generator can do, as input of a plan.

use std::path::PathBuf;

use crate::devices::{Device, DeviceKind};
use crate::generator::{GeneratorInput, LoadGenerator};
use crate::host::HostInfo;
use crate::plan::MachineCapabilities;
use crate::processes::RunProcesses;

/// An NVMe-oF target that cells drive over the network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkTarget {
    /// Name in experiment definitions: `ringbolt`, `nvmet`.
    pub name: String,
    /// URI that the generator connects to.
    pub uri: String,
    /// Process of the target; none for a target in the kernel.
    pub process: Option<u32>,
}

/// Starts and stops the targets that cells drive. A target has its device exclusively, so none may run during a cell
/// that drives the device itself.
pub trait NetworkTargets {
    /// The target of this name, started as one of `processes` if it is not running. `None` if the name is unknown.
    ///
    /// # Errors
    /// Why it cannot be started, in one line.
    fn start(&self, name: &str, processes: &mut RunProcesses) -> Result<Option<NetworkTarget>, String>;

    /// Stops the targets that [`NetworkTargets::start`] started.
    fn stop_all(&self);
}

/// Targets that run independently of the lab: they are never started or stopped.
impl NetworkTargets for Vec<NetworkTarget> {
    fn start(&self, name: &str, _processes: &mut RunProcesses) -> Result<Option<NetworkTarget>, String> {
        Ok(self.iter().find(|target| target.name == name).cloned())
    }

    fn stop_all(&self) {}
}

/// Reads what the machine offers to cells that use all of `devices`.
pub fn machine_capabilities(
    host: &HostInfo,
    devices: &[Device],
    cpus: Vec<u32>,
    generator: &LoadGenerator,
    own: &LoadGenerator,
    network_targets: &[String],
) -> MachineCapabilities {
    let root = rustix::process::geteuid().is_root();
    let kernel_devices = devices.iter().all(|device| device.kind != DeviceKind::Uri);
    let blocks: Vec<_> =
        devices.iter().filter_map(|device| Some(host.block(device.name.as_ref()?))).collect();
    let kinds = |kind: DeviceKind| devices.iter().any(|device| device.kind == kind);
    // Loop devices that do not exist yet will have the schedulers of loop0.
    let unmade = devices.iter().any(|device| device.kind == DeviceKind::Loop && device.name.is_none());
    let (mut schedulers, mut missing) = match blocks.split_first() {
        Some((first, rest)) => {
            let everywhere = |name: &&String| rest.iter().all(|block| block.schedulers.contains(name));
            (first.schedulers.iter().filter(everywhere).cloned().collect(), String::new())
        }
        None if unmade => {
            (host.block("loop0").schedulers, "loop devices offer no scheduler here".to_string())
        }
        None if kinds(DeviceKind::File) => (
            Vec::new(),
            "a file has no scheduler: run as root without --file, or name a --device".to_string(),
        ),
        None => (Vec::new(), "the devices have no kernel scheduler".to_string()),
    };
    if !root && !schedulers.is_empty() {
        (schedulers, missing) = (Vec::new(), "only root sets a scheduler".to_string());
    }
    let read_only = devices.iter().find(|device| !device.writable).map(|device| {
        format!("it would write over {}: --destroy-data {} allows it", device.location, device.location)
    });
    let kernel = host.kernel();
    let io_uring_unavailable = match kernel.io_uring_disabled {
        Some(2) => Some("io_uring is disabled (sysctl kernel.io_uring_disabled=0)".to_string()),
        Some(1) if !root => {
            Some("only root may use io_uring (sysctl kernel.io_uring_disabled=0)".to_string())
        }
        _ => None,
    };
    let user_space = |device: &Device| device.location.starts_with("nvme+pci:");
    MachineCapabilities {
        user_space_driver: !devices.is_empty() && devices.iter().all(user_space),
        cpus,
        devices: devices.len(),
        kernel_devices,
        schedulers,
        schedulers_unavailable: missing,
        polled_io: !blocks.is_empty() && blocks.iter().all(|block| block.polls),
        read_only,
        io_uring_unavailable,
        bdev_engine: generator.has_bdev_engine() || own.input == GeneratorInput::Arguments,
        bdev_devices_max: if own.accepts_job_files() { usize::MAX } else { 1 },
        network_targets: network_targets.to_vec(),
    }
}

/// The directory of the user's own definitions: `ringbolt/experiments` in `$XDG_CONFIG_HOME` or `~/.config`.
pub fn user_definitions_directory() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    config.or(home).map(|folder| folder.join("ringbolt/experiments"))
}
