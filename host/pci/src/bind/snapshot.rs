//! The functions of a machine as they are now, read before anything is decided.

use crate::bind::blocks::Blocks;
use crate::bind::machine::Machine;
use crate::bind::usage::{Reason, Usage, inspect};
use crate::{Address, NVME_CLASS};

/// What a function is bound to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Binding {
    /// Its driver.
    pub driver: Option<String>,
    /// The only driver that it may be bound to, if one was set.
    pub only: Option<String>,
}

/// One function.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Where it is.
    pub address: Address,
    /// Its class code.
    pub class: u32,
    /// Vendor and device ID.
    pub id: (u16, u16),
    /// The memory node that it is closest to.
    pub numa_node: Option<u32>,
    /// What it is bound to.
    pub binding: Binding,
    /// Its IOMMU group.
    pub iommu_group: Option<u32>,
    /// The other functions of the group that are no bridges, with their drivers.
    pub mates: Vec<(Address, Option<String>)>,
    /// Its block devices: disks and partitions.
    pub disks: Vec<String>,
    /// Those to claim while it is taken from the kernel.
    pub(crate) claims: Vec<String>,
    /// Why it should be left alone.
    pub reasons: Vec<Reason>,
}

impl Candidate {
    /// Whether it is an NVMe controller.
    pub fn is_nvme(&self) -> bool {
        self.class == NVME_CLASS
    }
}

/// A machine, as far as binding goes.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// NVMe controllers, and what else was asked for, in order.
    pub candidates: Vec<Candidate>,
    /// PCI drivers that are there.
    pub drivers: Vec<String>,
    /// Whether vfio-pci takes functions behind no IOMMU.
    pub unsafe_no_iommu: bool,
    /// 2 MiB hugepages.
    pub hugepages: Option<u64>,
}

/// How many 2 MiB hugepages there are, and are to be.
pub(crate) const HUGEPAGES: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

impl Snapshot {
    /// Looks at every NVMe controller, and at the functions named besides.
    pub fn read(machine: &dyn Machine, besides: &[Address]) -> Snapshot {
        let blocks = Blocks::read(machine);
        let usage = Usage::read(machine, &blocks);
        let names = machine.list("sys/bus/pci/devices").unwrap_or_default();
        let mut candidates = Vec::new();
        for address in names.iter().filter_map(|name| name.parse().ok()) {
            let class = class_of(machine, address);
            if class == NVME_CLASS || besides.contains(&address) {
                candidates.push(candidate(machine, &blocks, &usage, address, class));
            }
        }
        candidates.sort_by_key(|candidate| candidate.address);
        let unsafe_no_iommu = machine.read("sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
        Snapshot {
            candidates,
            drivers: machine.list("sys/bus/pci/drivers").unwrap_or_default(),
            unsafe_no_iommu: unsafe_no_iommu.is_ok_and(|text| text.trim() == "Y"),
            hugepages: read_hugepages(machine),
        }
    }

    /// One function.
    pub fn candidate(&self, address: Address) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.address == address)
    }
}

fn candidate(
    machine: &dyn Machine,
    blocks: &Blocks,
    usage: &Usage,
    address: Address,
    class: u32,
) -> Candidate {
    let reached = blocks.on(machine, address);
    let mut reasons = usage.of(blocks, &reached);
    let (mut disks, mut claims) = (Vec::new(), Vec::new());
    for own in reached.iter().filter(|reached| reached.own) {
        disks.push(own.name.clone());
        let Some(block) = blocks.get(&own.name).filter(|block| !block.hidden) else { continue };
        if own.through.is_empty() {
            // A claim of the disk keeps everybody from its partitions too.
            claims.push(format!("dev/{}", own.name));
        }
        reasons.extend(inspect(machine, &own.name, block.bytes));
    }
    let binding = binding(machine, address);
    reasons.extend(open_node(machine, address).map(|(node, process)| Reason::Open { node, process }));
    let iommu_group = group_of(machine, address);
    let number = |file: &str| hexadecimal(machine, address, file).unwrap_or(0) as u16;
    Candidate {
        address,
        class,
        id: (number("vendor"), number("device")),
        numa_node: attribute(machine, address, "numa_node").and_then(|text| text.parse().ok()),
        binding,
        iommu_group,
        mates: iommu_group.map(|group| mates(machine, group, address)).unwrap_or_default(),
        disks,
        claims,
        reasons,
    }
}

/// What a function is bound to now.
pub(crate) fn binding(machine: &dyn Machine, address: Address) -> Binding {
    let only =
        attribute(machine, address, "driver_override").filter(|only| only != "(null)" && !only.is_empty());
    Binding { driver: driver(machine, address), only }
}

/// A function's driver.
pub(crate) fn driver(machine: &dyn Machine, address: Address) -> Option<String> {
    let path = machine.resolve(&format!("sys/bus/pci/devices/{address}/driver")).ok()?;
    path.rsplit('/').next().map(str::to_string)
}

/// Whether the function is still there.
pub(crate) fn exists(machine: &dyn Machine, address: Address) -> bool {
    machine.resolve(&format!("sys/bus/pci/devices/{address}")).is_ok()
}

pub(crate) fn read_hugepages(machine: &dyn Machine) -> Option<u64> {
    machine.read(HUGEPAGES).ok()?.trim().parse().ok()
}

/// The node by which a program has the function, if one has, and which process that is.
///
/// Taking a function from under its user makes the kernel wait for that user, without an end.
fn open_node(machine: &dyn Machine, address: Address) -> Option<(String, Option<u32>)> {
    let folder = format!("sys/bus/pci/devices/{address}");
    let list = |name: &str| machine.list(&format!("{folder}/{name}")).unwrap_or_default();
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
    // Not every node can be claimed against users who do not lock it; their descriptors tell.
    let user = users(machine).find(|(node, _)| nodes.contains(node));
    let is_busy =
        |node: &String| machine.claim(node).is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY));
    let user = user.map(|(node, process)| (node, Some(process)));
    user.or_else(|| nodes.into_iter().find(is_busy).map(|node| (node, None)))
}

/// Nodes of VFIO and UIO that processes have open, as far as this one may look.
fn users(machine: &dyn Machine) -> impl Iterator<Item = (String, u32)> {
    let processes = machine.list("proc").unwrap_or_default();
    let processes = processes.into_iter().filter_map(|name| name.parse::<u32>().ok());
    processes.flat_map(move |process| {
        let folder = format!("proc/{process}/fd");
        let descriptors = machine.list(&folder).unwrap_or_default();
        let nodes =
            descriptors.into_iter().filter_map(move |fd| machine.resolve(&format!("{folder}/{fd}")).ok());
        let nodes = nodes.filter(|node| node.starts_with("dev/vfio/") || node.starts_with("dev/uio"));
        nodes.map(move |node| (node, process))
    })
}

fn mates(machine: &dyn Machine, group: u32, address: Address) -> Vec<(Address, Option<String>)> {
    /// Bridges stay with the kernel; VFIO does not mind.
    const BRIDGE: u32 = 0x06;
    let names = machine.list(&format!("sys/kernel/iommu_groups/{group}/devices")).unwrap_or_default();
    let others = names.iter().filter_map(|name| name.parse().ok()).filter(|other| *other != address);
    let others = others.filter(|other| class_of(machine, *other) >> 16 != BRIDGE);
    others.map(|other| (other, driver(machine, other))).collect()
}

fn group_of(machine: &dyn Machine, address: Address) -> Option<u32> {
    let path = machine.resolve(&format!("sys/bus/pci/devices/{address}/iommu_group")).ok()?;
    path.rsplit('/').next()?.parse().ok()
}

fn class_of(machine: &dyn Machine, address: Address) -> u32 {
    hexadecimal(machine, address, "class").unwrap_or(0) & 0xff_ffff
}

fn hexadecimal(machine: &dyn Machine, address: Address, file: &str) -> Option<u32> {
    let text = attribute(machine, address, file)?;
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn attribute(machine: &dyn Machine, address: Address, file: &str) -> Option<String> {
    let text = machine.read(&format!("sys/bus/pci/devices/{address}/{file}")).ok()?;
    Some(text.trim().to_string())
}
