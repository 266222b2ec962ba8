//! A function bound to `vfio-pci`: through its group (with or without an IOMMU), or through its own
//! node and an iommufd.
//!
//! A group can be opened once only, and all its functions share one address space, so that this
//! process keeps one [`Domain`] a group, as long as one of the group's functions is open.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};

use crate::space::{Placed, Released, Space};
use crate::uapi::{self, Interrupt, Range, Region};
use crate::{Address, Backend, PciError, Sysfs, uio};

/// The groups that this process has open.
static DOMAINS: Mutex<Vec<(Key, Weak<Domain>)>> = Mutex::new(Vec::new());

/// A group, and how it was opened.
type Key = (Sysfs, u32, Backend);

/// What the functions of one group share.
struct Domain {
    kind: Kind,
    space: Mutex<Space>,
    /// Functions of the group that are open: VFIO would open one twice.
    open: Mutex<BTreeSet<Address>>,
}

enum Kind {
    /// The group is dropped first: it leaves the container.
    Container {
        group: OwnedFd,
        container: OwnedFd,
    },
    /// As above, without an IOMMU behind it.
    NoIommu {
        group: OwnedFd,
        _container: OwnedFd,
    },
    Iommufd {
        iommufd: OwnedFd,
        ioas: u32,
    },
}

/// An opened function.
pub(crate) struct Device {
    address: Address,
    file: File,
    config: Region,
    can_reset: bool,
    regions: u32,
    interrupts: u32,
    enabled: Mutex<Option<Interrupt>>,
    /// Behind the descriptor, which is closed first.
    domain: Lease,
}

/// One function's hold on its domain.
struct Lease {
    /// `None` only within drop.
    domain: Option<Arc<Domain>>,
    address: Address,
}

impl Deref for Lease {
    type Target = Domain;

    fn deref(&self) -> &Domain {
        self.domain.as_ref().expect("it is taken in drop only")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // With the list locked: nobody is to find a group gone that is yet to be closed.
        let mut domains = lock(&DOMAINS);
        if let Some(domain) = self.domain.take() {
            lock(&domain.open).remove(&self.address);
        }
        domains.retain(|(_, domain)| domain.strong_count() > 0);
    }
}

impl Device {
    pub(crate) fn open(
        sysfs: &Sysfs,
        address: Address,
        group: Option<u32>,
        backend: Backend,
    ) -> Result<Device, PciError> {
        let group = group.ok_or(PciError::NoGroup(address))?;
        let failed = |what| move |error| PciError::Operation { address, what, error };
        let (domain, file) = match backend {
            Backend::VfioCdev => {
                let node = cdev_node(sysfs, address)
                    .ok_or(PciError::Unsupported("VFIO's device nodes (CONFIG_VFIO_DEVICE_CDEV)"))?;
                let file = open(&node)?;
                // The kernel lets everybody open the node; who binds it first has it.
                uio::lock(&file, node)?;
                let domain =
                    Domain::of((sysfs.clone(), group, backend), address, || Domain::iommufd(sysfs, address))?;
                let Kind::Iommufd { iommufd, ioas } = &domain.kind else {
                    unreachable!("a domain is found by its backend")
                };
                uapi::bind_iommufd(file.as_fd(), iommufd.as_fd())
                    .map_err(failed("giving it to the iommufd"))?;
                uapi::attach(file.as_fd(), *ioas).map_err(failed("attaching it to an address space"))?;
                domain.learn_ranges(address)?;
                (domain, file)
            }
            _ => {
                let open = || Domain::group(sysfs, address, group, backend == Backend::VfioNoIommu);
                let domain = Domain::of((sysfs.clone(), group, backend), address, open)?;
                let (Kind::Container { group, .. } | Kind::NoIommu { group, .. }) = &domain.kind else {
                    unreachable!("a domain is found by its backend")
                };
                let file = uapi::device(group.as_fd(), &address.to_string());
                let file = file.map_err(failed("taking it from its group"))?;
                (domain, file)
            }
        };
        let abilities = uapi::abilities(file.as_fd()).map_err(failed("asking what it can do"))?;
        if !abilities.is_pci || abilities.regions <= uapi::CONFIG_REGION {
            return Err(PciError::Unsupported("VFIO of this function as a PCI function"));
        }
        let config = uapi::region(file.as_fd(), uapi::CONFIG_REGION);
        Ok(Device {
            address,
            config: config.map_err(failed("finding its configuration space"))?,
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

    /// Where a BAR lies in the descriptor; `None` if there is none.
    pub(crate) fn bar(&self, index: u8) -> io::Result<Option<Region>> {
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

    /// `None` where the function has no reset.
    pub(crate) fn reset(&self) -> Option<io::Result<()>> {
        self.can_reset.then(|| uapi::reset(self.file.as_fd()))
    }

    /// How many interrupts can be had, and of which kind.
    pub(crate) fn interrupts(&self) -> io::Result<(u32, Interrupt)> {
        for kind in [Interrupt::Msix, Interrupt::Msi] {
            if (kind as u32) < self.interrupts {
                let count = uapi::interrupt_count(self.file.as_fd(), kind)?;
                if count > 0 {
                    return Ok((count, kind));
                }
            }
        }
        Ok((0, Interrupt::Msix))
    }

    /// Eventfds that the first `count` interrupts signal.
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
        *lock(&self.enabled) = Some(kind);
        Ok(events)
    }

    pub(crate) fn disable_interrupts(&self) -> io::Result<()> {
        match lock(&self.enabled).take() {
            Some(kind) => uapi::set_interrupts(self.file.as_fd(), kind, &[]).map(drop),
            None => Ok(()),
        }
    }

    /// An eventfd that the kernel signals when it wants the function back.
    pub(crate) fn removal_request(&self) -> Result<Option<OwnedFd>, PciError> {
        let address = self.address;
        let failed = |error| PciError::Operation { address, what: "asking to be told of removal", error };
        let file = self.file.as_fd();
        let there = Interrupt::Request as u32 <= self.interrupts.saturating_sub(1)
            && uapi::interrupt_count(file, Interrupt::Request).map_err(failed)? > 0;
        if !there {
            return Ok(None);
        }
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let event = event.map_err(io::Error::from).map_err(failed)?;
        uapi::set_interrupts(file, Interrupt::Request, &[event.as_fd()]).map_err(failed)?;
        Ok(Some(event))
    }

    /// Whether device addresses are physical ones.
    pub(crate) fn is_physical(&self) -> bool {
        matches!(self.domain.kind, Kind::NoIommu { .. })
    }

    /// Lets the group reach memory, and says where.
    pub(crate) fn map(&self, start: u64, bytes: u64) -> Result<u64, PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let mut space = lock(&domain.space);
        let iova = match space.place(start, bytes) {
            Some(Placed::Already(iova)) => return Ok(iova),
            Some(Placed::New(iova)) => iova,
            None => return Err(PciError::NoAddress { address, bytes }),
        };
        let mapped = match &domain.kind {
            Kind::Container { container, .. } => uapi::container_map(container.as_fd(), start, bytes, iova),
            Kind::Iommufd { iommufd, ioas } => uapi::ioas_map(iommufd.as_fd(), *ioas, start, bytes, iova),
            Kind::NoIommu { .. } => Err(io::ErrorKind::Unsupported.into()),
        };
        mapped.map_err(|error| {
            space.release(start);
            map_error(address, bytes, error)
        })?;
        Ok(iova)
    }

    /// Ends one use of memory.
    pub(crate) fn unmap(&self, start: u64) -> Result<(), PciError> {
        let (address, domain) = (self.address, &*self.domain);
        let mut space = lock(&domain.space);
        let (iova, bytes) = match space.release(start) {
            None => return Err(PciError::NotMapped { address, start }),
            Some(Released::Kept) => return Ok(()),
            Some(Released::Unmap { iova, bytes }) => (iova, bytes),
        };
        let unmapped = match &domain.kind {
            Kind::Container { container, .. } => uapi::container_unmap(container.as_fd(), bytes, iova),
            Kind::Iommufd { iommufd, ioas } => uapi::ioas_unmap(iommufd.as_fd(), *ioas, bytes, iova),
            Kind::NoIommu { .. } => Ok(()),
        };
        unmapped.map_err(|error| PciError::Operation { address, what: "unmapping memory", error })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A failure leaves interrupts that nobody listens to; closing the descriptor ends them.
        let _ = self.disable_interrupts();
    }
}

impl Domain {
    /// The open domain of that name, or what `open` makes, for one of its functions.
    fn of(
        key: Key,
        address: Address,
        open: impl FnOnce() -> Result<Domain, PciError>,
    ) -> Result<Lease, PciError> {
        let mut domains = lock(&DOMAINS);
        let known = domains.iter().find(|(known, _)| *known == key).and_then(|(_, domain)| domain.upgrade());
        let domain = match known {
            Some(domain) => domain,
            None => {
                let domain = Arc::new(open()?);
                domains.push((key, Arc::downgrade(&domain)));
                domain
            }
        };
        if !lock(&domain.open).insert(address) {
            return Err(PciError::AlreadyOpen(address));
        }
        Ok(Lease { domain: Some(domain), address })
    }

    fn new(kind: Kind, ranges: Option<Vec<Range>>) -> Domain {
        Domain { kind, space: Mutex::new(Space::new(ranges)), open: Mutex::default() }
    }

    fn group(sysfs: &Sysfs, address: Address, number: u32, no_iommu: bool) -> Result<Domain, PciError> {
        let failed = |what| move |error| PciError::Operation { address, what, error };
        let container = open(&sysfs.path("dev/vfio/vfio"))?;
        if !uapi::container_is_known(container.as_fd()).map_err(failed("asking VFIO's version"))? {
            return Err(PciError::Unsupported("the version of VFIO that is known here (0)"));
        }
        let kind = if no_iommu { uapi::NO_IOMMU } else { uapi::TYPE1V2 };
        if !uapi::container_has(container.as_fd(), kind).map_err(failed("asking VFIO for an IOMMU"))? {
            return Err(PciError::Unsupported(match no_iommu {
                true => "VFIO's no-IOMMU mode (enable_unsafe_noiommu_mode=1 of the module vfio)",
                false => "VFIO's type 1 IOMMU (modprobe vfio_iommu_type1)",
            }));
        }
        let name = if no_iommu { format!("dev/vfio/noiommu-{number}") } else { format!("dev/vfio/{number}") };
        let group = open(&sysfs.path(name))?;
        if !uapi::group_is_viable(group.as_fd()).map_err(failed("asking for its group"))? {
            return Err(PciError::NotViable { address, group: number, others: members(sysfs, number) });
        }
        uapi::set_container(group.as_fd(), container.as_fd()).map_err(failed("opening its group"))?;
        uapi::set_iommu(container.as_fd(), kind).map_err(failed("choosing the IOMMU"))?;
        if no_iommu {
            return Ok(Domain::new(Kind::NoIommu { group, _container: container }, Some(Vec::new())));
        }
        let ranges = uapi::container_ranges(container.as_fd()).map_err(failed("asking for addresses"))?;
        Ok(Domain::new(Kind::Container { group, container }, ranges))
    }

    fn iommufd(sysfs: &Sysfs, address: Address) -> Result<Domain, PciError> {
        let iommufd = open(&sysfs.path("dev/iommu"))?;
        let ioas = uapi::ioas_new(iommufd.as_fd());
        let ioas =
            ioas.map_err(|error| PciError::Operation { address, what: "making an address space", error })?;
        // What can be reached is known once the first function is attached.
        Ok(Domain::new(Kind::Iommufd { iommufd, ioas }, Some(Vec::new())))
    }

    /// Asks the iommufd what its functions can reach. Another function can only take away from that,
    /// and the kernel refuses to attach it if it takes away what is in use.
    fn learn_ranges(&self, address: Address) -> Result<(), PciError> {
        let Kind::Iommufd { iommufd, ioas } = &self.kind else { return Ok(()) };
        let ranges = uapi::ioas_ranges(iommufd.as_fd(), *ioas);
        let ranges =
            ranges.map_err(|error| PciError::Operation { address, what: "asking for addresses", error })?;
        lock(&self.space).set_ranges(ranges);
        Ok(())
    }
}

/// The function's own node, if the kernel made one.
pub(crate) fn cdev_node(sysfs: &Sysfs, address: Address) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(sysfs.function(address).join("vfio-dev")).ok()?;
    let name = entries.next()?.ok()?.file_name();
    let node = sysfs.path("dev/vfio/devices").join(name);
    node.exists().then_some(node)
}

/// The functions of a group.
fn members(sysfs: &Sysfs, group: u32) -> Vec<Address> {
    let entries = std::fs::read_dir(sysfs.path(format!("sys/kernel/iommu_groups/{group}/devices")));
    let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut members: Vec<Address> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    members.sort();
    members
}

fn open(path: &Path) -> Result<OwnedFd, PciError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map(OwnedFd::from).map_err(|error| PciError::Node { path: path.to_path_buf(), error })
}

/// The kernel says ENOMEM where memory may not be locked.
fn map_error(address: Address, bytes: u64, error: io::Error) -> PciError {
    if error.raw_os_error() == Some(libc::ENOMEM) {
        let limit_bytes = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if limit_bytes.is_some() {
            return PciError::LockedMemory { address, bytes, limit_bytes };
        }
    }
    PciError::Operation { address, what: "mapping memory for it", error }
}

/// Nothing panics with one of these locks held but on a broken invariant of ours.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
