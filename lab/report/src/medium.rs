//! What a run measured: a real device, a file system with its page cache, a model, or an emulated device. Only the first
//! says something about hardware.

use lab_experiments::{PlannedDevice, RunDirectory};
use serde::Serialize;
use serde_json::Value as Json;

/// The kind of storage behind the devices of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Medium {
    /// Hardware, as far as this program can see.
    RealDevice,
    /// A file or a loop device: a file system, its page cache and the disk below it.
    PageCache,
    /// A model of a device, in this program.
    Model,
    /// Memory, or a virtual machine's disk, that behaves like a device.
    Emulated,
    /// Devices of different kinds, or none.
    Mixed,
}

impl Medium {
    /// A noun phrase for reports.
    pub fn description(self) -> &'static str {
        match self {
            Medium::RealDevice => "a real device",
            Medium::PageCache => "page cache: a file or loop device over a file system, not a device",
            Medium::Model => "a model of a device, not hardware",
            Medium::Emulated => "an emulated device: memory or a virtual disk, not hardware",
            Medium::Mixed => "devices of different kinds",
        }
    }
}

/// What a run measured.
pub fn medium(run: &RunDirectory) -> Medium {
    let mut media = run.plan.targets.iter().map(|target| medium_of(target, &run.machine.facts));
    match media.next() {
        Some(first) if media.all(|other| other == first) => first,
        _ => Medium::Mixed,
    }
}

fn medium_of(target: &PlannedDevice, facts: &Json) -> Medium {
    match target.kind.as_str() {
        "file" | "loop" => Medium::PageCache,
        "block" => medium_of_block_device(&target.path, &device_model(target, facts)),
        "uri" => match target.path.split_once(':') {
            Some(("model", _)) => Medium::Model,
            Some(("nvme+pci", _)) => Medium::RealDevice,
            Some(("uring", path)) if path.starts_with("/dev/") => {
                medium_of_block_device(path, &device_model(target, facts))
            }
            Some(("uring", _)) => Medium::PageCache,
            _ => Medium::Emulated,
        },
        _ => Medium::Emulated,
    }
}

fn medium_of_block_device(path: &str, model: &str) -> Medium {
    let name = path.trim_start_matches("/dev/");
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if begins(&["loop"]) {
        return Medium::PageCache;
    }
    let hypervisors = ["QEMU", "VMware", "VBOX", "Virtual", "Msft"];
    let virtual_disk = hypervisors.iter().any(|word| model.contains(word));
    if virtual_disk || begins(&["vd", "xvd", "zram", "ram", "nullb", "pmem"]) {
        return Medium::Emulated;
    }
    Medium::RealDevice
}

/// The model of a block device: from the machine's facts, or from the plan's description.
pub(crate) fn device_model(target: &PlannedDevice, facts: &Json) -> String {
    let name = target.path.trim_start_matches("/dev/");
    let devices = facts.get("devices").and_then(Json::as_array);
    let found = devices.into_iter().flatten().find(|device| device["name"] == *name);
    let model =
        found.and_then(|device| device["model"].as_str()).map(str::trim).filter(|model| !model.is_empty());
    model.unwrap_or(&target.described).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_device_is_named() {
        let of = |kind: &str, path: &str, described: &str| {
            let mut run = RunDirectory::default();
            run.plan.targets = vec![PlannedDevice {
                kind: kind.into(),
                path: path.into(),
                described: described.into(),
                ..PlannedDevice::default()
            }];
            medium(&run)
        };
        for (kind, path, described, expected) in [
            ("block", "/dev/nvme0n1", "Example SSD 1 TB", Medium::RealDevice),
            ("block", "/dev/nvme0n1", "QEMU NVMe Ctrl", Medium::Emulated),
            ("block", "/dev/vda", "", Medium::Emulated),
            ("block", "/dev/loop3", "", Medium::PageCache),
            ("loop", "/dev/loop3", "", Medium::PageCache),
            ("file", "/tmp/disk", "", Medium::PageCache),
            ("null_blk", "/dev/nullb0", "", Medium::Emulated),
            ("uri", "model:optane", "", Medium::Model),
            ("uri", "null:1g", "", Medium::Emulated),
            ("uri", "malloc:64m", "", Medium::Emulated),
            ("uri", "nvme+pci://0000:01:00.0", "", Medium::RealDevice),
            ("uri", "uring:/tmp/disk", "", Medium::PageCache),
        ] {
            assert_eq!(of(kind, path, described), expected, "{kind} {path}");
        }
        assert_eq!(medium(&RunDirectory::default()), Medium::Mixed);
    }

    #[test]
    fn the_model_that_the_machine_reported_counts() {
        let mut run = RunDirectory::default();
        run.plan.targets =
            vec![PlannedDevice { kind: "block".into(), path: "/dev/sda".into(), ..Default::default() }];
        run.machine.facts =
            serde_json::json!({ "devices": [{ "name": "sda", "model": "QEMU HARDDISK   " }] });
        assert_eq!(medium(&run), Medium::Emulated);
        assert_eq!(device_model(&run.plan.targets[0], &run.machine.facts), "QEMU HARDDISK");
    }
}
