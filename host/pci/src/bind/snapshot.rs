//! A snapshot of the PCI functions of a system and their use, for planning.

use crate::bind::block_devices::BlockDevices;
use crate::bind::host_system::HostSystem;
use crate::bind::usage::{BlockDeviceUsage, RefusalReason, inspect_contents};
use crate::{NVME_CLASS, PciAddress, is_ioat, sysfs};

/// The driver binding of a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Binding {
    /// The bound driver, if any.
    pub driver: Option<String>,
    /// The `driver_override` in sysfs: the only driver that may bind the function, if set.
    pub driver_override: Option<String>,
}

/// A function that may be bound, with its use.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The address of the function.
    pub address: PciAddress,
    /// The class code, 24 bits.
    pub class: u32,
    /// Vendor and device ID.
    pub id: (u16, u16),
    /// The closest NUMA node, if known.
    pub numa_node: Option<u32>,
    /// The current binding.
    pub binding: Binding,
    /// The IOMMU group, if any.
    pub iommu_group: Option<u32>,
    /// The other functions of the group except bridges, with their drivers.
    pub group_members: Vec<(PciAddress, Option<String>)>,
    /// The names of its block devices: disks and partitions.
    pub disks: Vec<String>,
    /// The device nodes to claim until the function is unbound.
    pub(crate) claims: Vec<String>,
    /// Reasons not to unbind it.
    pub reasons: Vec<RefusalReason>,
}

impl Candidate {
    /// Whether it is an NVMe controller.
    pub fn is_nvme(&self) -> bool {
        self.class == NVME_CLASS
    }

    /// Whether it is a channel of Intel's I/OAT DMA engine.
    pub fn is_ioat(&self) -> bool {
        is_ioat(self.id.0, self.id.1)
    }
}

/// The state of a system that planning needs.
#[derive(Clone, Debug, Default)]
pub struct BindSnapshot {
    /// NVMe controllers, I/OAT DMA engines and other requested functions, in order of address.
    pub candidates: Vec<Candidate>,
    /// The names of the available PCI drivers.
    pub drivers: Vec<String>,
    /// Whether vfio-pci accepts functions without an IOMMU.
    pub unsafe_no_iommu: bool,
    /// The number of 2 MiB hugepages; `None` if the kernel does not support them.
    pub hugepages: Option<u64>,
}

/// The sysfs file with the number of 2 MiB hugepages.
pub(crate) const HUGEPAGES: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

impl BindSnapshot {
    /// Reads the state of every NVMe controller, of every I/OAT DMA engine, and of the functions in `others`.
    pub fn read(machine: &dyn HostSystem, others: &[PciAddress]) -> BindSnapshot {
        let blocks = BlockDevices::read(machine);
        let usage = BlockDeviceUsage::read(machine, &blocks);
        let names = machine.list("sys/bus/pci/devices").unwrap_or_default();
        let mut candidates = Vec::new();
        for address in names.iter().filter_map(|name| name.parse().ok()) {
            let class = class_of(machine, address);
            let (vendor, device) = id_of(machine, address);
            if class == NVME_CLASS || is_ioat(vendor, device) || others.contains(&address) {
                candidates.push(candidate(machine, &blocks, &usage, address, class));
            }
        }
        candidates.sort_by_key(|candidate| candidate.address);
        let unsafe_no_iommu = machine.read("sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
        BindSnapshot {
            candidates,
            drivers: machine.list("sys/bus/pci/drivers").unwrap_or_default(),
            unsafe_no_iommu: unsafe_no_iommu.is_ok_and(|text| text.trim() == "Y"),
            hugepages: read_hugepages(machine),
        }
    }

    /// The candidate with this address.
    pub fn candidate(&self, address: PciAddress) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.address == address)
    }
}

fn candidate(
    machine: &dyn HostSystem,
    blocks: &BlockDevices,
    usage: &BlockDeviceUsage,
    address: PciAddress,
    class: u32,
) -> Candidate {
    let devices = blocks.dependents_of(machine, address);
    let mut reasons = usage.reasons(blocks, &devices);
    let (mut disks, mut claims) = (Vec::new(), Vec::new());
    for own in devices.iter().filter(|device| device.own) {
        disks.push(own.name.clone());
        let Some(block) = blocks.get(&own.name).filter(|block| !block.hidden) else { continue };
        if own.through.is_empty() {
            // An exclusive claim of the disk also prevents use of its partitions.
            claims.push(format!("dev/{}", own.name));
        }
        reasons.extend(inspect_contents(machine, &own.name, block.bytes));
    }
    reasons.extend(dma_users(machine, address));
    let binding = binding(machine, address);
    reasons.extend(open_node(machine, address).map(|(node, process)| RefusalReason::Open { node, process }));
    let iommu_group = group_of(machine, address);
    Candidate {
        address,
        class,
        id: id_of(machine, address),
        numa_node: attribute(machine, address, "numa_node").and_then(|text| text.parse().ok()),
        binding,
        iommu_group,
        group_members: iommu_group.map(|group| mates(machine, group, address)).unwrap_or_default(),
        disks,
        claims,
        reasons,
    }
}

/// Reads the binding of a function.
pub(crate) fn binding(machine: &dyn HostSystem, address: PciAddress) -> Binding {
    let only =
        attribute(machine, address, "driver_override").filter(|only| only != "(null)" && !only.is_empty());
    Binding { driver: driver(machine, address), driver_override: only }
}

/// Reads the driver of a function.
pub(crate) fn driver(machine: &dyn HostSystem, address: PciAddress) -> Option<String> {
    link_name(machine, address, "driver")
}

/// Whether the function exists.
pub(crate) fn exists(machine: &dyn HostSystem, address: PciAddress) -> bool {
    machine.resolve(&format!("sys/bus/pci/devices/{address}")).is_ok()
}

pub(crate) fn read_hugepages(machine: &dyn HostSystem) -> Option<u64> {
    machine.read(HUGEPAGES).ok()?.trim().parse().ok()
}

/// The VFIO or UIO node of the function that a program has open, if any, and the process if known.
///
/// Unbinding a function in use makes the kernel wait for its user without a time limit.
fn open_node(machine: &dyn HostSystem, address: PciAddress) -> Option<(String, Option<u32>)> {
    let directory = format!("sys/bus/pci/devices/{address}");
    let list = |name: &str| machine.list(&format!("{directory}/{name}")).unwrap_or_default();
    let mut nodes: Vec<String> = list("uio").iter().map(|name| format!("dev/{name}")).collect();
    nodes.extend(list("vfio-dev").iter().map(|name| format!("dev/vfio/devices/{name}")));
    if driver(machine, address).is_some_and(|driver| driver.contains("vfio"))
        && let Some(group) = group_of(machine, address)
    {
        nodes.push(format!("dev/vfio/{group}"));
        nodes.push(format!("dev/vfio/noiommu-{group}"));
    }
    if nodes.is_empty() {
        return None;
    }
    // A claim does not detect users that do not lock the node; their open descriptors do.
    let user = users(machine).find(|(node, _)| nodes.contains(node));
    let is_busy =
        |node: &String| machine.claim(node).is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY));
    let user = user.map(|(node, process)| (node, Some(process)));
    user.or_else(|| nodes.into_iter().find(is_busy).map(|node| (node, None)))
}

/// The VFIO and UIO nodes that processes have open, as far as this process has permission to see.
fn users(machine: &dyn HostSystem) -> impl Iterator<Item = (String, u32)> {
    let processes = machine.list("proc").unwrap_or_default();
    let processes = processes.into_iter().filter_map(|name| name.parse::<u32>().ok());
    processes.flat_map(move |process| {
        let directory = format!("proc/{process}/fd");
        let descriptors = machine.list(&directory).unwrap_or_default();
        let nodes =
            descriptors.into_iter().filter_map(move |fd| machine.resolve(&format!("{directory}/{fd}")).ok());
        let nodes = nodes.filter(|node| node.starts_with("dev/vfio/") || node.starts_with("dev/uio"));
        nodes.map(move |node| (node, process))
    })
}

fn mates(machine: &dyn HostSystem, group: u32, address: PciAddress) -> Vec<(PciAddress, Option<String>)> {
    /// VFIO allows bridges of the group to stay bound to a kernel driver.
    const BRIDGE: u32 = 0x06;
    let names = machine.list(&format!("sys/kernel/iommu_groups/{group}/devices")).unwrap_or_default();
    let others = names.iter().filter_map(|name| name.parse().ok()).filter(|other| *other != address);
    let others = others.filter(|other| class_of(machine, *other) >> 16 != BRIDGE);
    others.map(|other| (other, driver(machine, other))).collect()
}

fn group_of(machine: &dyn HostSystem, address: PciAddress) -> Option<u32> {
    link_name(machine, address, "iommu_group")?.parse().ok()
}

/// The file name of the target of one of the function's symbolic links.
fn link_name(machine: &dyn HostSystem, address: PciAddress, link: &str) -> Option<String> {
    let path = machine.resolve(&format!("sys/bus/pci/devices/{address}/{link}")).ok()?;
    path.rsplit('/').next().map(str::to_string)
}

/// The channels of a DMA engine that have users in the kernel: network, RAID, or a driver that has one for
/// itself.
fn dma_users(machine: &dyn HostSystem, address: PciAddress) -> impl Iterator<Item = RefusalReason> {
    let directory = format!("sys/bus/pci/devices/{address}/dma");
    let channels = machine.list(&directory).unwrap_or_default().into_iter();
    channels.filter_map(move |channel| {
        let users = machine.read(&format!("{directory}/{channel}/in_use")).ok()?;
        let users = users.trim().parse().ok().filter(|users| *users > 0)?;
        Some(RefusalReason::DmaInUse { channel, users })
    })
}

/// Vendor and device ID.
fn id_of(machine: &dyn HostSystem, address: PciAddress) -> (u16, u16) {
    let number = |file: &str| hexadecimal(machine, address, file).unwrap_or(0) as u16;
    (number("vendor"), number("device"))
}

fn class_of(machine: &dyn HostSystem, address: PciAddress) -> u32 {
    hexadecimal(machine, address, "class").unwrap_or(0) & 0xff_ffff
}

fn hexadecimal(machine: &dyn HostSystem, address: PciAddress, file: &str) -> Option<u32> {
    sysfs::hexadecimal(&attribute(machine, address, file)?)?.try_into().ok()
}

fn attribute(machine: &dyn HostSystem, address: PciAddress, file: &str) -> Option<String> {
    let text = machine.read(&format!("sys/bus/pci/devices/{address}/{file}")).ok()?;
    Some(text.trim().to_string())
}
