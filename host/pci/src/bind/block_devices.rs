//! The kernel's block devices and their dependencies.

use std::collections::{BTreeMap, BTreeSet};

use crate::PciAddress;
use crate::bind::host_system::HostSystem;

/// All block devices, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockDevices {
    all: BTreeMap<String, SysfsBlockDevice>,
}

/// One block device.
#[derive(Clone, Debug)]
pub(crate) struct SysfsBlockDevice {
    /// Its sysfs directory, with all links resolved.
    path: String,
    /// Major and minor number, as `259:1`.
    pub(crate) number: String,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Whether it is a hidden path of a native NVMe multipath device, which has no device node.
    pub(crate) hidden: bool,
    /// A description for users: kind and name of a device-mapper device, or an array.
    pub(crate) label: String,
    /// The device-mapper name, if any.
    mapper: Option<String>,
    /// Its partitions and the devices built on it.
    dependents: BTreeSet<String>,
}

/// A block device that depends on a function.
#[derive(Clone, Debug)]
pub(crate) struct DependentDevice {
    /// Its name.
    pub(crate) name: String,
    /// Whether it is a disk of the function or a partition of one.
    pub(crate) own: bool,
    /// The devices between it and the function, from the function's disk up.
    pub(crate) through: Vec<String>,
}

impl BlockDevices {
    pub(crate) fn read(machine: &dyn HostSystem) -> BlockDevices {
        let mut all = BTreeMap::new();
        let mut edges: Vec<(String, String)> = Vec::new();
        for name in machine.list("sys/class/block").unwrap_or_default() {
            let Ok(path) = machine.resolve(&format!("sys/class/block/{name}")) else { continue };
            let text = |file: &str| machine.read(&format!("{path}/{file}")).ok();
            let trimmed = |file: &str| text(file).map(|text| text.trim().to_string());
            let list = |directory: &str| machine.list(&format!("{path}/{directory}")).unwrap_or_default();
            if text("partition").is_some()
                && let Some(disk) = path.rsplit('/').nth(1)
            {
                edges.push((disk.to_string(), name.clone()));
            }
            edges.extend(list("holders").into_iter().map(|holder| (name.clone(), holder)));
            edges.extend(list("slaves").into_iter().map(|below| (below, name.clone())));
            // A loop device on a block device instead of a file: only the path of the backing file shows it.
            if let Some(file) = trimmed("loop/backing_file")
                && let Some(below) = file.strip_prefix("/dev/")
            {
                edges.push((below.to_string(), name.clone()));
            }
            let mapper = trimmed("dm/name");
            let block = SysfsBlockDevice {
                number: trimmed("dev").unwrap_or_default(),
                bytes: trimmed("size").and_then(|size| size.parse::<u64>().ok()).unwrap_or(0) * 512,
                hidden: trimmed("hidden").is_some_and(|hidden| hidden == "1"),
                label: label(&name, mapper.as_deref(), trimmed("dm/uuid"), trimmed("md/level")),
                mapper,
                dependents: BTreeSet::new(),
                path,
            };
            all.insert(name, block);
        }
        for (below, above) in edges {
            if let Some(block) = all.get_mut(&below) {
                block.dependents.insert(above);
            }
        }
        BlockDevices { all }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&SysfsBlockDevice> {
        self.all.get(name)
    }

    /// The device with this number.
    pub(crate) fn by_number(&self, number: &str) -> Option<&str> {
        let found = self.all.iter().find(|(_, block)| block.number == number && !number.is_empty());
        found.map(|(name, _)| name.as_str())
    }

    /// Resolves a path in `/dev`, or a tag such as `UUID=`, to a device.
    pub(crate) fn by_path(&self, machine: &dyn HostSystem, source: &str) -> Option<&str> {
        let path = match source.split_once('=') {
            Some(("UUID", id)) => format!("dev/disk/by-uuid/{id}"),
            Some(("PARTUUID", id)) => format!("dev/disk/by-partuuid/{id}"),
            Some(("LABEL", id)) => format!("dev/disk/by-label/{id}"),
            Some(("PARTLABEL", id)) => format!("dev/disk/by-partlabel/{id}"),
            _ => source.strip_prefix('/').filter(|path| path.starts_with("dev/"))?.to_string(),
        };
        let resolved = machine.resolve(&path).unwrap_or_else(|_| path.clone());
        let name = resolved.strip_prefix("dev/").unwrap_or(&resolved);
        if let Some((known, _)) = self.all.get_key_value(name) {
            return Some(known);
        }
        // Without udev the device-mapper nodes are not links.
        let mapped = path.strip_prefix("dev/mapper/")?;
        let found = self.all.iter().find(|(_, block)| block.mapper.as_deref() == Some(mapped));
        found.map(|(name, _)| name.as_str())
    }

    /// All devices that depend on a function: its disks, their partitions, and transitively the devices built on
    /// them.
    pub(crate) fn dependents_of(
        &self,
        machine: &dyn HostSystem,
        function: PciAddress,
    ) -> Vec<DependentDevice> {
        self.dependents_on(self.disks(machine, function))
    }

    /// All devices that depend on others, and these.
    pub(crate) fn dependents_on(&self, own: Vec<String>) -> Vec<DependentDevice> {
        let mut reached: Vec<DependentDevice> = Vec::new();
        let mut todo: Vec<DependentDevice> =
            own.into_iter().map(|name| DependentDevice { name, own: true, through: Vec::new() }).collect();
        while let Some(next) = todo.pop() {
            if reached.iter().any(|known| known.name == next.name) {
                continue;
            }
            let block = self.all.get(&next.name);
            for above in block.into_iter().flat_map(|block| &block.dependents) {
                let inside = |outer: &SysfsBlockDevice| {
                    self.all
                        .get(above)
                        .is_some_and(|inner| inner.path.starts_with(&format!("{}/", outer.path)))
                };
                let mut through = next.through.clone();
                through.push(next.name.clone());
                let own = next.own && block.is_some_and(inside);
                todo.push(DependentDevice { name: above.clone(), own, through });
            }
            reached.push(next);
        }
        reached.sort_by(|one, other| (one.through.len(), &one.name).cmp(&(other.through.len(), &other.name)));
        reached
    }

    /// The function's disks: those below its sysfs directory, and with native multipath those of the subsystems of
    /// its controllers.
    fn disks(&self, machine: &dyn HostSystem, function: PciAddress) -> Vec<String> {
        let address = function.to_string();
        let mut directorys = Vec::new();
        let controllers = machine.list(&format!("sys/bus/pci/devices/{address}/nvme")).unwrap_or_default();
        for subsystem in machine.list("sys/class/nvme-subsystem").unwrap_or_default() {
            let Ok(path) = machine.resolve(&format!("sys/class/nvme-subsystem/{subsystem}")) else {
                continue;
            };
            let members = machine.list(&path).unwrap_or_default();
            if members.iter().any(|member| controllers.contains(member)) {
                directorys.push(format!("{path}/"));
            }
        }
        let is_own = |path: &str| {
            path.split('/').any(|part| part == address)
                || directorys.iter().any(|directory| path.starts_with(directory))
        };
        // Partitions are found through their disks.
        let is_disk =
            |path: &str| !path.rsplit('/').nth(1).is_some_and(|parent| self.all.contains_key(parent));
        let own = self.all.iter().filter(|(_, block)| is_own(&block.path) && is_disk(&block.path));
        own.map(|(name, _)| name.clone()).collect()
    }
}

fn label(name: &str, mapper: Option<&str>, uuid: Option<String>, level: Option<String>) -> String {
    let uuid = uuid.unwrap_or_default();
    match (mapper, level) {
        (Some(mapper), _) => {
            let kinds = [("LVM-", "LVM volume"), ("CRYPT-", "dm-crypt"), ("mpath-", "multipath")];
            let kind = kinds.iter().find(|(prefix, _)| uuid.starts_with(prefix));
            format!("{} {mapper}", kind.map_or("device mapper", |(_, kind)| kind))
        }
        (None, Some(level)) => format!("MD array, {level}"),
        (None, None) if name.starts_with("bcache") => "bcache".to_string(),
        (None, None) if name.starts_with("loop") => "loop device".to_string(),
        (None, None) if name.starts_with("drbd") => "DRBD".to_string(),
        (None, None) => "block device".to_string(),
    }
}
