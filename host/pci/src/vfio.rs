//! The VFIO backend (`vfio-pci`): through an IOMMU group (with or without an IOMMU), or through the
//! function's character device and iommufd.
//!
//! A group can be opened only once, and all its functions share one address space, so this process has
//! one [`IommuDomain`] per group as long as any function of the group is open.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::CapabilitySet;

use crate::flock::flock_exclusive;
use crate::iova::{IovaAllocation, IovaAllocator, IovaRelease};
use crate::uapi::{self, IovaRange, VfioIrq, VfioRegion};
use crate::{PciAddress, PciBackend, PciError, Sysfs};

/// The open domains of this process.
static DOMAINS: Mutex<Vec<(DomainKey, Weak<IommuDomain>)>> = Mutex::new(Vec::new());

/// Identifies a domain: system, IOMMU group and backend.
type DomainKey = (Sysfs, u32, PciBackend);

/// The address space and descriptors that the functions of one IOMMU group share.
struct IommuDomain {
    interface: IommuInterface,
    space: Mutex<IovaAllocator>,
    /// Held while a region is mapped or unmapped, which takes long: `space` is locked in between only.
    region_lock: Mutex<()>,
    /// The open functions of the group; VFIO itself would allow a second open.
    open: Mutex<BTreeSet<PciAddress>>,
}

/// Bytes of regions that this process has mapped, in all domains: they count as locked memory.
static REGION_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of a region that one call of the kernel maps: the kernel keeps others waiting that map memory meanwhile, those
/// of reactors too, and may have to clear every page.
const PART_BYTES: u64 = 64 << 20;

enum IommuInterface {
    /// The group is closed first, which detaches it from the container.
    Container {
        group: OwnedFd,
        container: OwnedFd,
    },
    /// A container without an IOMMU.
    NoIommu {
        group: OwnedFd,
        _container: OwnedFd,
    },
    Iommufd {
        iommufd: OwnedFd,
        ioas: u32,
    },
}

/// A function opened through VFIO.
pub(crate) struct VfioDevice {
    address: PciAddress,
    file: File,
    config: VfioRegion,
    can_reset: bool,
    regions: u32,
    interrupts: u32,
    enabled: Mutex<Option<VfioIrq>>,
    /// After `file`, which is closed first.
    domain: DomainLease,
}

/// A function's reference to its domain.
struct DomainLease {
    /// `None` only during drop.
    domain: Option<Arc<IommuDomain>>,
    address: PciAddress,
}

impl Deref for DomainLease {
    type Target = IommuDomain;

    fn deref(&self) -> &IommuDomain {
        self.domain.as_ref().expect("the domain is taken only in drop")
    }
}

impl Drop for DomainLease {
    fn drop(&mut self) {
        // With the list locked, so that no other thread opens the group between its removal and its close.
        let mut domains = sync::lock(&DOMAINS);
        if let Some(domain) = self.domain.take() {
            sync::lock(&domain.open).remove(&self.address);
        }
        domains.retain(|(_, domain)| domain.strong_count() > 0);
    }
}

impl VfioDevice {
    pub(crate) fn open(
        sysfs: &Sysfs,
        address: PciAddress,
        group: Option<u32>,
        backend: PciBackend,
    ) -> Result<VfioDevice, PciError> {
        let group = group.ok_or(PciError::NoGroup(address))?;
        let failed = |what| move |error| PciError::Operation { address, what, error };
        let (domain, file) = match backend {
            PciBackend::VfioCdev => {
                let node = cdev_node(sysfs, address)
                    .ok_or(PciError::Unsupported("VFIO's device nodes (CONFIG_VFIO_DEVICE_CDEV)"))?;
                let file = open(&node)?;
                // The kernel allows several opens of the node; only the first bind succeeds.
                flock_exclusive(&file).map_err(|error| PciError::Node { path: node, error })?;
                let domain = IommuDomain::acquire((sysfs.clone(), group, backend), address, || {
                    IommuDomain::iommufd(sysfs, address)
                })?;
                let IommuInterface::Iommufd { iommufd, ioas } = &domain.interface else {
                    unreachable!("the domain key contains the backend")
                };
                uapi::bind_iommufd(file.as_fd(), iommufd.as_fd())
                    .map_err(failed("binding it to the iommufd"))?;
                uapi::attach(file.as_fd(), *ioas).map_err(failed("attaching it to an address space"))?;
                domain.query_iova_ranges(address)?;
                (domain, file)
            }
            _ => {
                let open = || IommuDomain::group(sysfs, address, group, backend == PciBackend::VfioNoIommu);
                let domain = IommuDomain::acquire((sysfs.clone(), group, backend), address, open)?;
                let (IommuInterface::Container { group, .. } | IommuInterface::NoIommu { group, .. }) =
                    &domain.interface
                else {
                    unreachable!("the domain key contains the backend")
                };
                let file = uapi::device(group.as_fd(), &address.to_string());
                let file = file.map_err(failed("getting it from its group"))?;
                (domain, file)
            }
        };
        let abilities =
            uapi::device_attributes(file.as_fd()).map_err(failed("querying its device information"))?;
        if !abilities.is_pci || abilities.regions <= uapi::CONFIG_REGION {
            return Err(PciError::Unsupported("PCI support of VFIO for this function"));
        }
        let config = uapi::region(file.as_fd(), uapi::CONFIG_REGION);
        Ok(VfioDevice {
            address,
            config: config.map_err(failed("querying its configuration space"))?,
            file: file.into(),
            can_reset: abilities.can_reset,
            regions: abilities.regions,
            interrupts: abilities.interrupts,
            enabled: Mutex::new(None),
            domain,
        })
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The location of a BAR in the descriptor; `None` if it does not exist.
    pub(crate) fn bar(&self, index: u8) -> io::Result<Option<VfioRegion>> {
        if u32::from(index) >= self.regions.min(6) {
            return Ok(None);
        }
        let region = uapi::region(self.file.as_fd(), index.into())?;
        Ok((region.bytes > 0).then_some(region))
    }

    pub(crate) fn read_config(&self, offset: u16, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, self.config.offset + u64::from(offset))
    }

    pub(crate) fn write_config(&self, offset: u16, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.config.offset + u64::from(offset))
    }

    /// `None` if the function does not support reset.
    pub(crate) fn reset(&self) -> Option<io::Result<()>> {
        self.can_reset.then(|| uapi::reset(self.file.as_fd()))
    }

    /// The number and kind of the available interrupts.
    pub(crate) fn interrupts(&self) -> io::Result<(u32, VfioIrq)> {
        for kind in [VfioIrq::Msix, VfioIrq::Msi] {
            if (kind as u32) < self.interrupts {
                let count = uapi::interrupt_count(self.file.as_fd(), kind)?;
                if count > 0 {
                    return Ok((count, kind));
                }
            }
        }
        Ok((0, VfioIrq::Msix))
    }

    /// Enables the first `count` interrupts; returns one eventfd for each.
    pub(crate) fn enable_interrupts(&self, count: u32) -> Result<Vec<OwnedFd>, PciError> {
        let address = self.address;
        let failed = |error| PciError::Operation { address, what: "enabling its interrupts", error };
        let (available, kind) = self.interrupts().map_err(failed)?;
        if count == 0 || count > available {
            return Err(PciError::Interrupts { address, wanted: count, available });
        }
        self.disable_interrupts().map_err(failed)?;
        let new = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(io::Error::from);
        let events = (0..count).map(|_| new()).collect::<Result<Vec<_>, _>>().map_err(failed)?;
        let borrowed: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        let fewer = uapi::set_interrupts(self.file.as_fd(), kind, &borrowed).map_err(failed)?;
        if fewer > 0 {
            return Err(PciError::Interrupts { address, wanted: count, available: fewer });
        }
        *sync::lock(&self.enabled) = Some(kind);
        Ok(events)
    }

    pub(crate) fn disable_interrupts(&self) -> io::Result<()> {
        match sync::lock(&self.enabled).take() {
            Some(kind) => uapi::set_interrupts(self.file.as_fd(), kind, &[]).map(drop),
            None => Ok(()),
        }
    }

    /// An eventfd that the kernel signals when it requests the function back.
    pub(crate) fn removal_request(&self) -> Result<Option<OwnedFd>, PciError> {
        let address = self.address;
        let failed = |error| PciError::Operation { address, what: "enabling its removal event", error };
        let file = self.file.as_fd();
        let supported = VfioIrq::Request as u32 <= self.interrupts.saturating_sub(1)
            && uapi::interrupt_count(file, VfioIrq::Request).map_err(failed)? > 0;
        if !supported {
            return Ok(None);
        }
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let event = event.map_err(io::Error::from).map_err(failed)?;
        uapi::set_interrupts(file, VfioIrq::Request, &[event.as_fd()]).map_err(failed)?;
        Ok(Some(event))
    }

    /// Whether device addresses are physical addresses.
    pub(crate) fn is_physical(&self) -> bool {
        matches!(self.domain.interface, IommuInterface::NoIommu { .. })
    }

    /// Maps memory for the group; returns its IOVA.
    pub(crate) fn map(&self, start: u64, bytes: u64) -> Result<u64, PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let mut space = sync::lock(&domain.space);
        let iova = match space.allocate(start, bytes) {
            Some(IovaAllocation::Existing(iova)) => return Ok(iova),
            Some(IovaAllocation::New(iova)) => iova,
            None => return Err(PciError::NoAddress { address, bytes }),
        };
        domain.interface.map(start, bytes, iova).map_err(|error| {
            space.release(start);
            map_error(address, bytes, error)
        })?;
        Ok(iova)
    }

    /// Maps memory in parts of [`PART_BYTES`]; returns its IOVA. Fails if `reserve_bytes` of locked memory would not be
    /// left.
    pub(crate) fn map_region(&self, start: u64, bytes: u64, reserve_bytes: u64) -> Result<u64, PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let bytes = whole_pages(bytes);
        let _guard = sync::lock(&domain.region_lock);
        if let Some(limit) = locked_memory_limit() {
            let used = REGION_BYTES.load(Ordering::Relaxed).saturating_add(reserve_bytes);
            if used.saturating_add(bytes) > limit {
                return Err(PciError::LockedMemory { address, bytes, limit_bytes: Some(limit) });
            }
        }
        let allocated = sync::lock(&domain.space).allocate(start, bytes);
        let iova = match allocated {
            Some(IovaAllocation::Existing(iova)) => return Ok(iova),
            Some(IovaAllocation::New(iova)) => iova,
            None => return Err(PciError::NoAddress { address, bytes }),
        };
        let mut mapped = 0;
        while mapped < bytes {
            let part = PART_BYTES.min(bytes - mapped);
            if let Err(error) = domain.interface.map(start + mapped, part, iova + mapped) {
                // Should this fail, the range stays allocated, and nothing else is mapped there.
                if mapped == 0 || domain.interface.unmap(mapped, iova).is_ok() {
                    sync::lock(&domain.space).release(start);
                }
                return Err(map_error(address, part, error));
            }
            mapped += part;
        }
        REGION_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Ok(iova)
    }

    /// Releases one use of a region.
    pub(crate) fn unmap_region(&self, start: u64) -> Result<(), PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let _guard = sync::lock(&domain.region_lock);
        let last = sync::lock(&domain.space).sole_use(start);
        if let Some((iova, bytes)) = last {
            // Before the range is free: another mapping must not get it while the device can still access it.
            let unmapped = domain.interface.unmap(bytes, iova);
            unmapped.map_err(|error| PciError::Operation { address, what: "unmapping memory", error })?;
            REGION_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        }
        let released = sync::lock(&domain.space).release(start);
        released.map(|_| ()).ok_or(PciError::NotMapped { address, start })
    }

    /// Releases one use of a mapping.
    pub(crate) fn unmap(&self, start: u64) -> Result<(), PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let mut space = sync::lock(&domain.space);
        let (iova, bytes) = match space.release(start) {
            None => return Err(PciError::NotMapped { address, start }),
            Some(IovaRelease::InUse) => return Ok(()),
            Some(IovaRelease::Unmap { iova, bytes }) => (iova, bytes),
        };
        let unmapped = domain.interface.unmap(bytes, iova);
        unmapped.map_err(|error| PciError::Operation { address, what: "unmapping memory", error })
    }
}

impl Drop for VfioDevice {
    fn drop(&mut self) {
        // On failure the interrupts stay enabled until the descriptor is closed.
        let _ = self.disable_interrupts();
    }
}

impl IommuInterface {
    fn map(&self, start: u64, bytes: u64, iova: u64) -> io::Result<()> {
        match self {
            IommuInterface::Container { container, .. } => {
                uapi::container_map(container.as_fd(), start, bytes, iova)
            }
            IommuInterface::Iommufd { iommufd, ioas } => {
                uapi::ioas_map(iommufd.as_fd(), *ioas, start, bytes, iova)
            }
            IommuInterface::NoIommu { .. } => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Unmaps what was mapped in one part or several.
    fn unmap(&self, bytes: u64, iova: u64) -> io::Result<()> {
        match self {
            IommuInterface::Container { container, .. } => {
                uapi::container_unmap(container.as_fd(), bytes, iova)
            }
            IommuInterface::Iommufd { iommufd, ioas } => {
                uapi::ioas_unmap(iommufd.as_fd(), *ioas, bytes, iova)
            }
            IommuInterface::NoIommu { .. } => Ok(()),
        }
    }
}

impl IommuDomain {
    /// Finds the open domain with this key, or opens it, for one of its functions.
    fn acquire(
        key: DomainKey,
        address: PciAddress,
        open: impl FnOnce() -> Result<IommuDomain, PciError>,
    ) -> Result<DomainLease, PciError> {
        let mut domains = sync::lock(&DOMAINS);
        let known = domains.iter().find(|(known, _)| *known == key).and_then(|(_, domain)| domain.upgrade());
        let domain = match known {
            Some(domain) => domain,
            None => {
                let domain = Arc::new(open()?);
                domains.push((key, Arc::downgrade(&domain)));
                domain
            }
        };
        if !sync::lock(&domain.open).insert(address) {
            return Err(PciError::AlreadyOpen(address));
        }
        Ok(DomainLease { domain: Some(domain), address })
    }

    fn new(interface: IommuInterface, ranges: Option<Vec<IovaRange>>) -> IommuDomain {
        let space = Mutex::new(IovaAllocator::new(ranges));
        IommuDomain { interface, space, region_lock: Mutex::default(), open: Mutex::default() }
    }

    fn group(
        sysfs: &Sysfs,
        address: PciAddress,
        number: u32,
        no_iommu: bool,
    ) -> Result<IommuDomain, PciError> {
        let failed = |what| move |error| PciError::Operation { address, what, error };
        let container = open(&sysfs.path("dev/vfio/vfio"))?;
        if !uapi::container_version_matches(container.as_fd()).map_err(failed("querying the VFIO version"))? {
            return Err(PciError::Unsupported("VFIO API version 0"));
        }
        let kind = if no_iommu { uapi::NO_IOMMU } else { uapi::TYPE1V2 };
        if !uapi::container_supports(container.as_fd(), kind).map_err(failed("querying VFIO for an IOMMU"))? {
            return Err(PciError::Unsupported(match no_iommu {
                true => "VFIO's no-IOMMU mode (enable_unsafe_noiommu_mode=1 of the module vfio)",
                false => "VFIO's type 1 IOMMU (modprobe vfio_iommu_type1)",
            }));
        }
        let name = if no_iommu { format!("dev/vfio/noiommu-{number}") } else { format!("dev/vfio/{number}") };
        let group = open(&sysfs.path(name))?;
        if !uapi::group_is_viable(group.as_fd()).map_err(failed("querying its group"))? {
            return Err(PciError::NotViable { address, group: number, others: members(sysfs, number) });
        }
        uapi::set_container(group.as_fd(), container.as_fd())
            .map_err(failed("adding its group to a container"))?;
        uapi::set_iommu(container.as_fd(), kind).map_err(failed("setting the IOMMU type"))?;
        if no_iommu {
            return Ok(IommuDomain::new(
                IommuInterface::NoIommu { group, _container: container },
                Some(Vec::new()),
            ));
        }
        let ranges = uapi::container_ranges(container.as_fd()).map_err(failed("querying the IOVA ranges"))?;
        Ok(IommuDomain::new(IommuInterface::Container { group, container }, ranges))
    }

    fn iommufd(sysfs: &Sysfs, address: PciAddress) -> Result<IommuDomain, PciError> {
        let iommufd = open(&sysfs.path("dev/iommu"))?;
        let ioas = uapi::ioas_alloc(iommufd.as_fd());
        let ioas =
            ioas.map_err(|error| PciError::Operation { address, what: "creating an address space", error })?;
        // The usable ranges are known once the first function is attached.
        Ok(IommuDomain::new(IommuInterface::Iommufd { iommufd, ioas }, Some(Vec::new())))
    }

    /// Queries the usable IOVA ranges from the iommufd. Attaching another function can only reduce them, and the
    /// kernel rejects that if it excludes a mapped range.
    fn query_iova_ranges(&self, address: PciAddress) -> Result<(), PciError> {
        let IommuInterface::Iommufd { iommufd, ioas } = &self.interface else { return Ok(()) };
        let ranges = uapi::ioas_ranges(iommufd.as_fd(), *ioas);
        let ranges = ranges.map_err(|error| PciError::Operation {
            address,
            what: "querying the IOVA ranges",
            error,
        })?;
        sync::lock(&self.space).set_ranges(ranges);
        Ok(())
    }
}

/// The character device of the function, if the kernel has one.
pub(crate) fn cdev_node(sysfs: &Sysfs, address: PciAddress) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(sysfs.function(address).join("vfio-dev")).ok()?;
    let name = entries.next()?.ok()?.file_name();
    let node = sysfs.path("dev/vfio/devices").join(name);
    node.exists().then_some(node)
}

/// The functions of an IOMMU group.
fn members(sysfs: &Sysfs, group: u32) -> Vec<PciAddress> {
    let entries = std::fs::read_dir(sysfs.path(format!("sys/kernel/iommu_groups/{group}/devices")));
    let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut members: Vec<PciAddress> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    members.sort();
    members
}

fn open(path: &Path) -> Result<OwnedFd, PciError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|error| PciError::Node { path: path.to_path_buf(), error })
}

fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(rustix::param::page_size() as u64)
}

/// The limit of locked memory, if there is one for this process.
fn locked_memory_limit() -> Option<u64> {
    let effective = rustix::thread::capabilities(None).map(|sets| sets.effective);
    if effective.is_ok_and(|capabilities| capabilities.contains(CapabilitySet::IPC_LOCK)) {
        return None;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// VFIO fails with ENOMEM if the limit of locked memory is exceeded.
fn map_error(address: PciAddress, bytes: u64, error: io::Error) -> PciError {
    if error.raw_os_error() == Some(libc::ENOMEM) {
        let limit_bytes = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if limit_bytes.is_some() {
            return PciError::LockedMemory { address, bytes, limit_bytes };
        }
    }
    PciError::Operation { address, what: "mapping memory for it", error }
}
