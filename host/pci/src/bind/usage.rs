//! Who uses a function's disks, and what is on them.

use std::fmt;

use crate::Address;
use crate::bind::blocks::{Blocks, Reached};
use crate::bind::machine::Machine;
use crate::bind::signature::{self, Extract, Signature};

/// Why a function is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The machine boots from it or stands on it.
    Boot {
        /// The block device.
        device: String,
        /// What hangs on it.
        what: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// A file system on it is mounted.
    Mounted {
        /// The block device.
        device: String,
        /// Where.
        at: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// It is swapped to.
    Swap {
        /// The block device.
        device: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// Another block device stands on it.
    Held {
        /// The block device.
        device: String,
        /// What stands on it.
        by: String,
        /// What that is.
        label: String,
    },
    /// The kernel or a program has it for itself.
    Busy {
        /// The block device.
        device: String,
    },
    /// It cannot be looked at.
    Unreadable {
        /// The block device.
        device: String,
        /// Why not.
        error: String,
    },
    /// Somebody's data may be on it.
    Data {
        /// The block device.
        device: String,
        /// What was recognised.
        signature: Signature,
    },
    /// It is bound to no driver, so that nobody knows what is on it.
    Unknown,
    /// A program has the function open.
    Open {
        /// The node that it was opened by.
        node: String,
        /// Which process, where that can be seen.
        process: Option<u32>,
    },
    /// It is no NVMe controller.
    NotNvme {
        /// Its class code.
        class: u32,
    },
    /// It is not there.
    Missing,
    /// `--deny` names it.
    Denied,
    /// `--allow` names others.
    NotAllowed,
    /// The driver is not there.
    NoDriver {
        /// Its name.
        driver: String,
    },
    /// VFIO needs an IOMMU.
    NoIommu,
    /// VFIO needs the other functions of the group as well.
    Shared {
        /// The group.
        group: u32,
        /// A function of it.
        with: Address,
        /// Its driver.
        driver: String,
    },
}

impl Reason {
    /// Whether `--force-signature` overrides it: it is about what is on the disk, not about who uses it.
    pub fn is_about_contents(&self) -> bool {
        matches!(self, Reason::Data { .. } | Reason::Unreadable { .. } | Reason::Unknown)
    }

    /// A word for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Reason::Boot { .. } => "boot",
            Reason::Mounted { .. } => "mounted",
            Reason::Swap { .. } => "swap",
            Reason::Held { .. } => "held",
            Reason::Busy { .. } => "busy",
            Reason::Unreadable { .. } => "unreadable",
            Reason::Data { .. } => "data",
            Reason::Unknown => "unknown",
            Reason::Open { .. } => "open",
            Reason::NotNvme { .. } => "not-nvme",
            Reason::Missing => "missing",
            Reason::Denied => "denied",
            Reason::NotAllowed => "not-allowed",
            Reason::NoDriver { .. } => "no-driver",
            Reason::NoIommu => "no-iommu",
            Reason::Shared { .. } => "shared-group",
        }
    }
}

/// ` (through md0, dm-1)`, without the disk that the sentence is about anyway.
fn way(through: &[String]) -> String {
    if through.is_empty() { String::new() } else { format!(" (through {})", through.join(", ")) }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Boot { device, what, through } => {
                write!(f, "{device} is needed to boot: {what}{}", way(through))
            }
            Reason::Mounted { device, at, through } => {
                write!(f, "{device} is mounted at {at}{}", way(through))
            }
            Reason::Swap { device, through } => write!(f, "{device} is swapped to{}", way(through)),
            Reason::Held { device, by, label } => write!(f, "{device} is held by {by} ({label})"),
            Reason::Busy { device } => write!(f, "{device} is open exclusively (O_EXCL)"),
            Reason::Unreadable { device, error } => write!(f, "{device} cannot be looked at: {error}"),
            Reason::Data { device, signature } => write!(f, "{device} has the mark of a {signature}"),
            Reason::Unknown => f.write_str("it is bound to no driver, so that its contents are unknown"),
            Reason::Open { node, process: None } => write!(f, "a program has it open (/{node})"),
            Reason::Open { node, process: Some(process) } => {
                write!(f, "a program has it open (/{node}, process {process})")
            }
            Reason::NotNvme { class } => write!(f, "it is no NVMe controller (class {class:#08x})"),
            Reason::Missing => f.write_str("there is no such PCI function"),
            Reason::Denied => f.write_str("--deny names it"),
            Reason::NotAllowed => f.write_str("--allow does not name it"),
            Reason::NoDriver { driver } => {
                write!(f, "the driver {driver} is not loaded: modprobe {}", driver.replace('-', "_"))
            }
            Reason::NoIommu => f.write_str(
                "it is behind no IOMMU, which vfio-pci needs: enable it in the firmware and on the kernel's \
                 command line (intel_iommu=on), or take --driver uio_pci_generic",
            ),
            Reason::Shared { group, with, driver } => {
                write!(f, "its IOMMU group {group} is shared with {with}, which {driver} has")
            }
        }
    }
}

/// Who uses block devices, as far as the kernel says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    /// Name of the device, and why it is in use.
    mounts: Vec<(String, String)>,
    boot: Vec<(String, String)>,
    swaps: Vec<String>,
}

/// Where a machine's own file systems are mounted.
const BOOT_PLACES: [&str; 6] = ["/", "/boot", "/boot/efi", "/boot/firmware", "/efi", "/usr"];

impl Usage {
    pub(crate) fn read(machine: &dyn Machine, blocks: &Blocks) -> Usage {
        let mut usage = Usage::default();
        usage.read_mounts(machine, blocks);
        usage.read_boot(machine, blocks);
        let swaps = machine.read("proc/swaps").unwrap_or_default();
        for line in swaps.lines().skip(1) {
            let path = unescape(line.split_ascii_whitespace().next().unwrap_or_default());
            usage.swaps.extend(blocks.by_path(machine, &path).map(str::to_string));
        }
        usage
    }

    fn note_mount(&mut self, device: &str, at: &str, whose: &str) {
        let entry = (device.to_string(), format!("{at}{whose}"));
        if BOOT_PLACES.contains(&at) && whose.is_empty() {
            let entry = (entry.0, format!("{at} is mounted from it"));
            if !self.boot.contains(&entry) {
                self.boot.push(entry);
            }
        } else if !self.mounts.contains(&entry) {
            self.mounts.push(entry);
        }
    }

    /// Mounts of this process's namespace and of every other one that can be seen.
    fn read_mounts(&mut self, machine: &dyn Machine, blocks: &Blocks) {
        let own = machine.read("proc/self/mountinfo").unwrap_or_default();
        self.read_mountinfo(machine, blocks, &own, "");
        let mut seen = vec![own];
        let processes = machine.list("proc").unwrap_or_default();
        let processes = processes.iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        let mut namespaces = Vec::new();
        for process in processes {
            let namespace = machine.resolve(&format!("proc/{process}/ns/mnt")).ok();
            if namespace.is_some() && namespaces.contains(&namespace) {
                continue;
            }
            namespaces.push(namespace);
            let Ok(text) = machine.read(&format!("proc/{process}/mountinfo")) else { continue };
            if !seen.contains(&text) {
                self.read_mountinfo(
                    machine,
                    blocks,
                    &text,
                    &format!(" in the namespace of process {process}"),
                );
                seen.push(text);
            }
        }
        // A file system of several devices is mounted from one of them, and has a number of its own.
        for id in machine.list("sys/fs/btrfs").unwrap_or_default() {
            for device in machine.list(&format!("sys/fs/btrfs/{id}/devices")).unwrap_or_default() {
                self.note_mount(&device, &format!("btrfs {id}"), "");
            }
        }
    }

    /// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`: the third field is the device's
    /// number, the fifth the place; the source is the second after the hyphen.
    fn read_mountinfo(&mut self, machine: &dyn Machine, blocks: &Blocks, text: &str, whose: &str) {
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let (Some(number), Some(at)) = (fields.get(2), fields.get(4)) else { continue };
            let at = unescape(at);
            let hyphen = fields.iter().position(|field| *field == "-");
            let source = hyphen.and_then(|hyphen| fields.get(hyphen + 2)).map(|source| unescape(source));
            let by_source = source.and_then(|source| blocks.by_path(machine, &source).map(str::to_string));
            for device in blocks.by_number(number).map(str::to_string).into_iter().chain(by_source) {
                self.note_mount(&device, &at, whose);
            }
        }
    }

    /// What is not mounted now but named for booting: root and resume of the command line, and the boot
    /// places of `/etc/fstab`.
    fn read_boot(&mut self, machine: &dyn Machine, blocks: &Blocks) {
        let line = machine.read("proc/cmdline").unwrap_or_default();
        for word in line.split_ascii_whitespace() {
            let Some((name @ ("root" | "resume"), source)) = word.split_once('=') else { continue };
            if let Some(device) = blocks.by_path(machine, source) {
                self.boot.push((device.to_string(), format!("the kernel's command line has {name}= of it")));
            }
        }
        let table = machine.read("etc/fstab").unwrap_or_default();
        for line in table.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let mut fields = line.split_ascii_whitespace();
            let (Some(source), Some(at)) = (fields.next(), fields.next()) else { continue };
            if BOOT_PLACES.contains(&at)
                && let Some(device) = blocks.by_path(machine, &unescape(source))
            {
                self.boot.push((device.to_string(), format!("/etc/fstab mounts it at {at}")));
            }
        }
    }

    /// Why the devices are in use.
    pub(crate) fn of(&self, blocks: &Blocks, reached: &[Reached]) -> Vec<Reason> {
        let mut reasons = Vec::new();
        for Reached { name, own, through } in reached {
            let device = name.clone();
            // That a partition is on its disk needs no saying.
            let through = if *own { Vec::new() } else { through.clone() };
            if !own {
                let below = through.last().cloned().unwrap_or_default();
                let label =
                    blocks.get(name).map_or_else(|| "block device".to_string(), |block| block.label.clone());
                reasons.push(Reason::Held { device: below, by: name.clone(), label });
            }
            for (_, what) in self.boot.iter().filter(|(boot, _)| boot == name) {
                let (device, through) = (device.clone(), through.clone());
                reasons.push(Reason::Boot { device, what: what.clone(), through });
            }
            for (_, at) in self.mounts.iter().filter(|(mounted, _)| mounted == name) {
                let (device, through) = (device.clone(), through.clone());
                reasons.push(Reason::Mounted { device, at: at.clone(), through });
            }
            if self.swaps.contains(name) {
                reasons.push(Reason::Swap { device, through });
            }
        }
        reasons
    }
}

/// What is on a disk or partition, and whether it can be had for oneself.
pub(crate) fn inspect(machine: &dyn Machine, name: &str, bytes: u64) -> Vec<Reason> {
    let (device, node) = (name.to_string(), format!("dev/{name}"));
    let mut reasons = Vec::new();
    match machine.claim(&node) {
        Ok(_claim) => {}
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            reasons.push(Reason::Busy { device: device.clone() });
        }
        Err(error) => return vec![Reason::Unreadable { device, error: error.to_string() }],
    }
    let head_bytes = bytes.min(signature::HEAD_BYTES);
    let tail_bytes = bytes.min(signature::TAIL_BYTES);
    let (mut head, mut tail) = (vec![0; head_bytes as usize], vec![0; tail_bytes as usize]);
    let read = machine.read_device(&node, 0, &mut head);
    let read = read.and_then(|()| machine.read_device(&node, bytes - tail_bytes, &mut tail));
    match read {
        Err(error) => reasons.push(Reason::Unreadable { device, error: error.to_string() }),
        Ok(()) => {
            let found = signature::recognise(Extract { bytes, head: &head, tail: &tail });
            let data = |signature| Reason::Data { device: device.clone(), signature };
            reasons.extend(found.into_iter().map(data));
        }
    }
    reasons
}

/// `\040` is a blank, in the kernel's tables.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.as_bytes();
    while let Some((first, rest)) = bytes.split_first() {
        let octal = (*first == b'\\').then(|| rest.get(..3)).flatten();
        // Digits alone: a number may have a sign.
        let octal = octal.filter(|digits| digits.iter().all(u8::is_ascii_digit));
        let octal = octal.and_then(|digits| str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                bytes = &rest[3..];
            }
            None => {
                out.push(*first);
                bytes = rest;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_in_the_kernels_tables_are_read() {
        assert_eq!(unescape(r"/mnt/my\040disk\134"), r"/mnt/my disk\");
        assert_eq!(unescape(r"\04"), r"\04");
        assert_eq!(unescape(r"\999x"), r"\999x");
        assert_eq!(unescape(r"\+12"), r"\+12");
    }
}
