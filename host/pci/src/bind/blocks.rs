//! The kernel's block devices, and what stands on what.

use std::collections::{BTreeMap, BTreeSet};

use crate::Address;
use crate::bind::machine::Machine;

/// Every block device, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    all: BTreeMap<String, Block>,
}

/// One block device.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Its folder, with all links followed.
    path: String,
    /// Major and minor number, as `259:1`.
    pub(crate) number: String,
    /// Size.
    pub(crate) bytes: u64,
    /// A path of a multipath device: it has no node.
    pub(crate) hidden: bool,
    /// What it is, for people: a device-mapper device's kind and name, an array.
    pub(crate) label: String,
    /// The device-mapper name.
    mapper: Option<String>,
    /// Partitions of it, and devices made of it.
    above: BTreeSet<String>,
}

/// A block device that stands on a function.
#[derive(Clone, Debug)]
pub(crate) struct Reached {
    /// Its name.
    pub(crate) name: String,
    /// Whether it is the function's own: a disk, or a partition of it.
    pub(crate) own: bool,
    /// What it stands on, down to the function's own.
    pub(crate) through: Vec<String>,
}

impl Blocks {
    pub(crate) fn read(machine: &dyn Machine) -> Blocks {
        let mut all = BTreeMap::new();
        let mut edges: Vec<(String, String)> = Vec::new();
        for name in machine.list("sys/class/block").unwrap_or_default() {
            let Ok(path) = machine.resolve(&format!("sys/class/block/{name}")) else { continue };
            let text = |file: &str| machine.read(&format!("{path}/{file}")).ok();
            let trimmed = |file: &str| text(file).map(|text| text.trim().to_string());
            let list = |folder: &str| machine.list(&format!("{path}/{folder}")).unwrap_or_default();
            if text("partition").is_some()
                && let Some(disk) = path.rsplit('/').nth(1)
            {
                edges.push((disk.to_string(), name.clone()));
            }
            edges.extend(list("holders").into_iter().map(|holder| (name.clone(), holder)));
            edges.extend(list("slaves").into_iter().map(|below| (below, name.clone())));
            // A loop device over a device, not over a file: nothing but its name tells.
            if let Some(file) = trimmed("loop/backing_file")
                && let Some(below) = file.strip_prefix("/dev/")
            {
                edges.push((below.to_string(), name.clone()));
            }
            let mapper = trimmed("dm/name");
            let block = Block {
                number: trimmed("dev").unwrap_or_default(),
                bytes: trimmed("size").and_then(|size| size.parse::<u64>().ok()).unwrap_or(0) * 512,
                hidden: trimmed("hidden").is_some_and(|hidden| hidden == "1"),
                label: label(&name, mapper.as_deref(), trimmed("dm/uuid"), trimmed("md/level")),
                mapper,
                above: BTreeSet::new(),
                path,
            };
            all.insert(name, block);
        }
        for (below, above) in edges {
            if let Some(block) = all.get_mut(&below) {
                block.above.insert(above);
            }
        }
        Blocks { all }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Block> {
        self.all.get(name)
    }

    /// The device with this number.
    pub(crate) fn by_number(&self, number: &str) -> Option<&str> {
        let found = self.all.iter().find(|(_, block)| block.number == number && !number.is_empty());
        found.map(|(name, _)| name.as_str())
    }

    /// The device that a path of `/dev` means, or `UUID=` and the like.
    pub(crate) fn by_path(&self, machine: &dyn Machine, source: &str) -> Option<&str> {
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
        // Without udev the nodes of device mapper are no links.
        let mapped = path.strip_prefix("dev/mapper/")?;
        let found = self.all.iter().find(|(_, block)| block.mapper.as_deref() == Some(mapped));
        found.map(|(name, _)| name.as_str())
    }

    /// Everything that stands on a function: its disks, their partitions, what is made of those, and
    /// what is made of that.
    pub(crate) fn on(&self, machine: &dyn Machine, function: Address) -> Vec<Reached> {
        let mut reached: Vec<Reached> = Vec::new();
        let own = self.own(machine, function);
        let mut todo: Vec<Reached> =
            own.into_iter().map(|name| Reached { name, own: true, through: Vec::new() }).collect();
        while let Some(next) = todo.pop() {
            if reached.iter().any(|known| known.name == next.name) {
                continue;
            }
            let block = self.all.get(&next.name);
            for above in block.into_iter().flat_map(|block| &block.above) {
                let inside = |outer: &Block| {
                    self.all
                        .get(above)
                        .is_some_and(|inner| inner.path.starts_with(&format!("{}/", outer.path)))
                };
                let mut through = next.through.clone();
                through.push(next.name.clone());
                let own = next.own && block.is_some_and(inside);
                todo.push(Reached { name: above.clone(), own, through });
            }
            reached.push(next);
        }
        reached.sort_by(|one, other| (one.through.len(), &one.name).cmp(&(other.through.len(), &other.name)));
        reached
    }

    /// The function's disks: below its folder, and, where several paths make one disk, those of the
    /// subsystems that its controllers belong to.
    fn own(&self, machine: &dyn Machine, function: Address) -> Vec<String> {
        let address = function.to_string();
        let mut folders = Vec::new();
        let controllers = machine.list(&format!("sys/bus/pci/devices/{address}/nvme")).unwrap_or_default();
        for subsystem in machine.list("sys/class/nvme-subsystem").unwrap_or_default() {
            let Ok(path) = machine.resolve(&format!("sys/class/nvme-subsystem/{subsystem}")) else {
                continue;
            };
            let members = machine.list(&path).unwrap_or_default();
            if members.iter().any(|member| controllers.contains(member)) {
                folders.push(format!("{path}/"));
            }
        }
        let is_own = |path: &str| {
            path.split('/').any(|part| part == address)
                || folders.iter().any(|folder| path.starts_with(folder))
        };
        // Partitions are found from their disks.
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
