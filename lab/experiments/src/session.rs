//! From what the user asks for to what a plan needs to know of the machine.

use std::path::PathBuf;

use crate::generator::{Generator, Style};
use crate::host::Host;
use crate::plan::Surroundings;
use crate::processes::Processes;
use crate::target::{Device, Kind};

/// A target that is reached over the network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkTarget {
    /// Its name in definitions: `ringbolt`, `nvmet`.
    pub name: String,
    /// How the generator reaches it.
    pub uri: String,
    /// Its process; a kernel target has none.
    pub process: Option<u32>,
}

/// Who makes targets, and ends them: a target has its device to itself, and so must a cell without one.
pub trait Network {
    /// The target of this name, started as one of `processes` where it is not there yet. None where nobody
    /// knows it.
    ///
    /// # Errors
    /// Why it cannot be made, in one line.
    fn reach(&self, name: &str, processes: &mut Processes) -> Result<Option<NetworkTarget>, String>;

    /// Ends the targets that were made here: the next cell drives the devices themselves.
    fn leave(&self);
}

/// Targets that are there already, and stay.
impl Network for Vec<NetworkTarget> {
    fn reach(&self, name: &str, _processes: &mut Processes) -> Result<Option<NetworkTarget>, String> {
        Ok(self.iter().find(|target| target.name == name).cloned())
    }

    fn leave(&self) {}
}

/// What the machine offers to cells that use all of `devices`.
pub fn surroundings(
    host: &Host,
    devices: &[Device],
    cpus: Vec<u32>,
    generator: &Generator,
    own: &Generator,
    network_targets: &[String],
) -> Surroundings {
    let root = rustix::process::geteuid().is_root();
    let kernel_devices = devices.iter().all(|device| device.kind != Kind::Uri);
    let blocks: Vec<_> =
        devices.iter().filter_map(|device| Some(host.block(device.name.as_ref()?))).collect();
    let kinds = |kind: Kind| devices.iter().any(|device| device.kind == kind);
    // Loop devices that are not made yet will offer what the first one does.
    let unmade = devices.iter().any(|device| device.kind == Kind::Loop && device.name.is_none());
    let (mut schedulers, mut missing) = match blocks.split_first() {
        Some((first, rest)) => {
            let everywhere = |name: &&String| rest.iter().all(|block| block.schedulers.contains(name));
            (first.schedulers.iter().filter(everywhere).cloned().collect(), String::new())
        }
        None if unmade => {
            (host.block("loop0").schedulers, "loop devices offer no scheduler here".to_string())
        }
        None if kinds(Kind::File) => (
            Vec::new(),
            "a file has no scheduler: run as root without --file, or name a --device".to_string(),
        ),
        None => (Vec::new(), "the devices have no scheduler of the kernel".to_string()),
    };
    if !root && !schedulers.is_empty() {
        (schedulers, missing) = (Vec::new(), "only root sets a scheduler".to_string());
    }
    let read_only = devices.iter().find(|device| !device.writable).map(|device| {
        format!("it would write over {}: --destroy-data {} allows it", device.place, device.place)
    });
    let kernel = host.kernel();
    let no_io_uring = match kernel.io_uring_disabled {
        Some(2) => Some("io_uring is switched off (sysctl kernel.io_uring_disabled=0)".to_string()),
        Some(1) if !root => {
            Some("io_uring is for root alone (sysctl kernel.io_uring_disabled=0)".to_string())
        }
        _ => None,
    };
    Surroundings {
        cpus,
        devices: devices.len(),
        kernel_devices,
        schedulers,
        schedulers_missing: missing,
        polls: !blocks.is_empty() && blocks.iter().all(|block| block.polls),
        read_only,
        no_io_uring,
        own_engine: generator.has_own_engine() || own.style == Style::Options,
        own_devices: if own.takes_job_files() { usize::MAX } else { 1 },
        network_targets: network_targets.to_vec(),
    }
}

/// Where the user's own definitions are looked for.
pub fn definitions_directory() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    config.or(home).map(|folder| folder.join("ringbolt/experiments"))
}
