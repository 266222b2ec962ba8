//! Use and contents of a function's disks.

use std::fmt;

use crate::PciAddress;
use crate::bind::block_devices::{BlockDevices, DependentDevice};
use crate::bind::host_system::HostSystem;
use crate::bind::signature::{self, DeviceExtract, Signature};

/// Why a function must not be rebound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The system boots from the device or runs on it.
    Boot {
        /// The block device.
        device: String,
        /// The dependency.
        what: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// A file system on the device is mounted.
    Mounted {
        /// The block device.
        device: String,
        /// The mount point.
        at: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// The device is used for swap.
    Swap {
        /// The block device.
        device: String,
        /// What is between the disk and the device.
        through: Vec<String>,
    },
    /// Another block device uses it.
    Held {
        /// The block device.
        device: String,
        /// The other block device.
        by: String,
        /// A description of the other block device.
        label: String,
    },
    /// The kernel or a program has opened it exclusively.
    Busy {
        /// The block device.
        device: String,
    },
    /// The device cannot be read.
    Unreadable {
        /// The block device.
        device: String,
        /// The kernel's error.
        error: String,
    },
    /// The device has a known signature and may have data.
    Data {
        /// The block device.
        device: String,
        /// The detected signature.
        signature: Signature,
    },
    /// The function is bound to no driver, so that its contents are unknown.
    Unknown,
    /// A program has the function open.
    Open {
        /// The device node.
        node: String,
        /// The process, if known.
        process: Option<u32>,
    },
    /// A channel of the DMA engine has users in the kernel.
    DmaInUse {
        /// Its name in `/sys/class/dma`.
        channel: String,
        /// Number of its users.
        users: u32,
    },
    /// The function is neither an NVMe controller nor an I/OAT DMA engine; or the latter, for the kernel's
    /// `nvme`.
    NotNvme {
        /// Its class code.
        class: u32,
    },
    /// The function does not exist.
    Missing,
    /// `--deny` names it.
    Denied,
    /// `--allow` names others.
    NotAllowed,
    /// The driver is not loaded.
    NoDriver {
        /// Its name.
        driver: String,
    },
    /// VFIO needs an IOMMU.
    NoIommu,
    /// VFIO needs the other functions of the group as well.
    Shared {
        /// The IOMMU group.
        group: u32,
        /// The other function.
        with: PciAddress,
        /// The driver of the other function.
        driver: String,
    },
}

impl RefusalReason {
    /// Whether `--force-signature` overrides it: it concerns the contents of the disk, not its use.
    pub fn is_overridable(&self) -> bool {
        matches!(self, RefusalReason::Data { .. } | RefusalReason::Unreadable { .. } | RefusalReason::Unknown)
    }

    /// The machine-readable kind, for JSON output.
    pub fn kind(&self) -> &'static str {
        match self {
            RefusalReason::Boot { .. } => "boot",
            RefusalReason::Mounted { .. } => "mounted",
            RefusalReason::Swap { .. } => "swap",
            RefusalReason::Held { .. } => "held",
            RefusalReason::Busy { .. } => "busy",
            RefusalReason::Unreadable { .. } => "unreadable",
            RefusalReason::Data { .. } => "data",
            RefusalReason::Unknown => "unknown",
            RefusalReason::Open { .. } => "open",
            RefusalReason::DmaInUse { .. } => "dma-in-use",
            RefusalReason::NotNvme { .. } => "not-nvme",
            RefusalReason::Missing => "missing",
            RefusalReason::Denied => "denied",
            RefusalReason::NotAllowed => "not-allowed",
            RefusalReason::NoDriver { .. } => "no-driver",
            RefusalReason::NoIommu => "no-iommu",
            RefusalReason::Shared { .. } => "shared-group",
        }
    }
}

/// ` (through md0, dm-1)`, or an empty string.
fn through_suffix(through: &[String]) -> String {
    if through.is_empty() { String::new() } else { format!(" (through {})", through.join(", ")) }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefusalReason::Boot { device, what, through } => {
                write!(f, "{device} is needed to boot: {what}{}", through_suffix(through))
            }
            RefusalReason::Mounted { device, at, through } => {
                write!(f, "{device} is mounted at {at}{}", through_suffix(through))
            }
            RefusalReason::Swap { device, through } => {
                write!(f, "{device} is swapped to{}", through_suffix(through))
            }
            RefusalReason::Held { device, by, label } => write!(f, "{device} is held by {by} ({label})"),
            RefusalReason::Busy { device } => write!(f, "{device} is open exclusively (O_EXCL)"),
            RefusalReason::Unreadable { device, error } => write!(f, "{device} cannot be read: {error}"),
            RefusalReason::Data { device, signature } => write!(f, "{device} has the mark of a {signature}"),
            RefusalReason::Unknown => {
                f.write_str("it is bound to no driver, so that its contents are unknown")
            }
            RefusalReason::Open { node, process: None } => write!(f, "a program has it open (/{node})"),
            RefusalReason::Open { node, process: Some(process) } => {
                write!(f, "a program has it open (/{node}, process {process})")
            }
            RefusalReason::DmaInUse { channel, users } => {
                write!(f, "the kernel uses its DMA channel {channel} ({users} users)")
            }
            RefusalReason::NotNvme { class } => {
                write!(f, "it is no NVMe controller and no I/OAT DMA engine (class {class:#08x})")
            }
            RefusalReason::Missing => f.write_str("there is no such PCI function"),
            RefusalReason::Denied => f.write_str("--deny names it"),
            RefusalReason::NotAllowed => f.write_str("--allow does not name it"),
            RefusalReason::NoDriver { driver } => {
                write!(f, "the driver {driver} is not loaded: modprobe {}", driver.replace('-', "_"))
            }
            RefusalReason::NoIommu => f.write_str(
                "it is behind no IOMMU, which vfio-pci needs: enable it in the firmware and on the kernel's \
                 command line (intel_iommu=on), or use --driver uio_pci_generic",
            ),
            RefusalReason::Shared { group, with, driver } => {
                write!(f, "its IOMMU group {group} is shared with {with}, which is bound to {driver}")
            }
        }
    }
}

/// The use of block devices: mounts, boot dependencies and swap.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockDeviceUsage {
    /// Device name and mount point.
    mounts: Vec<(String, String)>,
    boot: Vec<(String, String)>,
    swaps: Vec<String>,
}

/// Mount points of the system's own file systems.
const BOOT_MOUNT_POINTS: [&str; 6] = ["/", "/boot", "/boot/efi", "/boot/firmware", "/efi", "/usr"];

impl BlockDeviceUsage {
    pub(crate) fn read(machine: &dyn HostSystem, blocks: &BlockDevices) -> BlockDeviceUsage {
        let mut usage = BlockDeviceUsage::default();
        usage.read_mounts(machine, blocks);
        usage.read_boot(machine, blocks);
        let swaps = machine.read("proc/swaps").unwrap_or_default();
        for line in swaps.lines().skip(1) {
            let path = unescape(line.split_ascii_whitespace().next().unwrap_or_default());
            usage.swaps.extend(blocks.by_path(machine, &path).map(str::to_string));
        }
        usage
    }

    fn add_mount(&mut self, device: &str, at: &str, whose: &str) {
        let entry = (device.to_string(), format!("{at}{whose}"));
        if BOOT_MOUNT_POINTS.contains(&at) && whose.is_empty() {
            let entry = (entry.0, format!("{at} is mounted from it"));
            if !self.boot.contains(&entry) {
                self.boot.push(entry);
            }
        } else if !self.mounts.contains(&entry) {
            self.mounts.push(entry);
        }
    }

    /// Reads the mounts of this process's mount namespace and of all other visible ones.
    fn read_mounts(&mut self, machine: &dyn HostSystem, blocks: &BlockDevices) {
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
        // A multi-device file system is mounted from one device and has its own device number.
        for id in machine.list("sys/fs/btrfs").unwrap_or_default() {
            for device in machine.list(&format!("sys/fs/btrfs/{id}/devices")).unwrap_or_default() {
                self.add_mount(&device, &format!("btrfs {id}"), "");
            }
        }
    }

    /// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`: the third field is the device's
    /// number, the fifth the mount point; the source is the second field after the hyphen.
    fn read_mountinfo(&mut self, machine: &dyn HostSystem, blocks: &BlockDevices, text: &str, whose: &str) {
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let (Some(number), Some(at)) = (fields.get(2), fields.get(4)) else { continue };
            let at = unescape(at);
            let hyphen = fields.iter().position(|field| *field == "-");
            let source = hyphen.and_then(|hyphen| fields.get(hyphen + 2)).map(|source| unescape(source));
            let by_source = source.and_then(|source| blocks.by_path(machine, &source).map(str::to_string));
            for device in blocks.by_number(number).map(str::to_string).into_iter().chain(by_source) {
                self.add_mount(&device, &at, whose);
            }
        }
    }

    /// Devices that boot needs even if they are not mounted now: `root=` and `resume=` of the command line,
    /// and the boot mount points in `/etc/fstab`.
    fn read_boot(&mut self, machine: &dyn HostSystem, blocks: &BlockDevices) {
        let line = machine.read("proc/cmdline").unwrap_or_default();
        for word in line.split_ascii_whitespace() {
            let Some((name @ ("root" | "resume"), source)) = word.split_once('=') else { continue };
            if let Some(device) = blocks.by_path(machine, source) {
                self.boot
                    .push((device.to_string(), format!("{name}= on the kernel's command line refers to it")));
            }
        }
        let table = machine.read("etc/fstab").unwrap_or_default();
        for line in table.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let mut fields = line.split_ascii_whitespace();
            let (Some(source), Some(at)) = (fields.next(), fields.next()) else { continue };
            if BOOT_MOUNT_POINTS.contains(&at)
                && let Some(device) = blocks.by_path(machine, &unescape(source))
            {
                self.boot.push((device.to_string(), format!("/etc/fstab mounts it at {at}")));
            }
        }
    }

    /// The reasons why the devices are in use.
    pub(crate) fn reasons(&self, blocks: &BlockDevices, devices: &[DependentDevice]) -> Vec<RefusalReason> {
        let mut reasons = Vec::new();
        for DependentDevice { name, own, through } in devices {
            let device = name.clone();
            // The relation between a partition and its disk is obvious.
            let through = if *own { Vec::new() } else { through.clone() };
            if !own {
                let below = through.last().cloned().unwrap_or_default();
                let label =
                    blocks.get(name).map_or_else(|| "block device".to_string(), |block| block.label.clone());
                reasons.push(RefusalReason::Held { device: below, by: name.clone(), label });
            }
            for (_, what) in self.boot.iter().filter(|(boot, _)| boot == name) {
                let (device, through) = (device.clone(), through.clone());
                reasons.push(RefusalReason::Boot { device, what: what.clone(), through });
            }
            for (_, at) in self.mounts.iter().filter(|(mounted, _)| mounted == name) {
                let (device, through) = (device.clone(), through.clone());
                reasons.push(RefusalReason::Mounted { device, at: at.clone(), through });
            }
            if self.swaps.contains(name) {
                reasons.push(RefusalReason::Swap { device, through });
            }
        }
        reasons
    }
}

/// What uses a block device or depends on it: mounts, swap, other block devices, and the boot of the system.
/// `number` is `MAJOR:MINOR` of the device. The kernel may know of users that this does not find: it refuses
/// to open the device with `O_EXCL` then.
pub fn users_of_block_device(machine: &dyn HostSystem, number: &str) -> Vec<RefusalReason> {
    let blocks = BlockDevices::read(machine);
    let Some(name) = blocks.by_number(number).map(str::to_string) else { return Vec::new() };
    let usage = BlockDeviceUsage::read(machine, &blocks);
    usage.reasons(&blocks, &blocks.dependents_on(vec![name]))
}

/// Checks whether a disk or partition can be claimed exclusively, and detects signatures on it.
pub(crate) fn inspect_contents(machine: &dyn HostSystem, name: &str, bytes: u64) -> Vec<RefusalReason> {
    let (device, node) = (name.to_string(), format!("dev/{name}"));
    let mut reasons = Vec::new();
    match machine.claim(&node) {
        Ok(_claim) => {}
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            reasons.push(RefusalReason::Busy { device: device.clone() });
        }
        Err(error) => return vec![RefusalReason::Unreadable { device, error: error.to_string() }],
    }
    let head_bytes = bytes.min(signature::HEAD_BYTES);
    let tail_bytes = bytes.min(signature::TAIL_BYTES);
    let (mut head, mut tail) = (vec![0; head_bytes as usize], vec![0; tail_bytes as usize]);
    let read = machine.read_device(&node, 0, &mut head);
    let read = read.and_then(|()| machine.read_device(&node, bytes - tail_bytes, &mut tail));
    match read {
        Err(error) => reasons.push(RefusalReason::Unreadable { device, error: error.to_string() }),
        Ok(()) => {
            let found = signature::detect_signatures(DeviceExtract { bytes, head: &head, tail: &tail });
            let data = |signature| RefusalReason::Data { device: device.clone(), signature };
            reasons.extend(found.into_iter().map(data));
        }
    }
    reasons
}

/// Decodes octal escapes in the kernel's tables, such as `\040` for a blank.
fn unescape(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.as_bytes();
    while let Some((first, rest)) = bytes.split_first() {
        let octal = (*first == b'\\').then(|| rest.get(..3)).flatten();
        // Digits only, because `from_str_radix` accepts a sign.
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
    fn octal_escapes_are_decoded() {
        assert_eq!(unescape(r"/mnt/my\040disk\134"), r"/mnt/my disk\");
        assert_eq!(unescape(r"\04"), r"\04");
        assert_eq!(unescape(r"\999x"), r"\999x");
        assert_eq!(unescape(r"\+12"), r"\+12");
    }
}
