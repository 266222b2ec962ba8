//! An opened PCI function.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard};

use dma::{ChunkMemory, RegionMapping, SharedRegion};

use crate::sysfs::BarKind;
use crate::{PciAddress, PciError, PciFunctionInfo, Sysfs, pagemap, sysfs, uio, vfio};

/// The kernel interface to a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PciBackend {
    /// VFIO through the function's IOMMU group.
    VfioGroup,
    /// VFIO through the function's character device and iommufd.
    VfioCdev,
    /// VFIO without an IOMMU: the device can access all memory.
    VfioNoIommu,
    /// `uio_pci_generic`: no IOMMU, no interrupts.
    Uio,
}

impl fmt::Display for PciBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PciBackend::VfioGroup => "VFIO (group)",
            PciBackend::VfioCdev => "VFIO (iommufd)",
            PciBackend::VfioNoIommu => "VFIO without IOMMU",
            PciBackend::Uio => "UIO",
        })
    }
}

/// An opened PCI function, for the exclusive use of this process.
///
/// Order of calls: [`open`](Self::open), [`map_bar`](Self::map_bar), [`map_dma`](Self::map_dma) for each chunk,
/// [`enable_bus_master`](Self::enable_bus_master), then [`enable_interrupts`](Self::enable_interrupts). Drop disables
/// bus mastering and interrupts, removes the DMA mappings and closes the function. Regions from `map_bar` may outlive
/// it, but register access through them is then unreliable: a removed device reads as all ones or raises SIGBUS.
pub struct PciFunction {
    info: PciFunctionInfo,
    backend: PciBackend,
    sysfs: Sysfs,
    /// The configuration space in sysfs, which reads the hardware; VFIO emulates parts of it.
    sysfs_config: File,
    /// Device addresses of the mapped chunks, by virtual address.
    mapped: Mutex<BTreeMap<u64, u64>>,
    /// Virtual addresses of the mapped regions.
    regions: Mutex<BTreeSet<u64>>,
    device: OpenedDevice,
}

enum OpenedDevice {
    Vfio(vfio::VfioDevice),
    Uio(uio::UioDevice),
}

/// Offset and bits of the command register.
const COMMAND: u16 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Size of the PCI Express extended configuration space.
const CONFIG_BYTES: usize = 4096;

impl PciFunction {
    /// Opens a function that is bound to a VFIO or UIO driver, with the given backend or the one that matches.
    /// Afterwards memory decoding is on and bus mastering off.
    pub fn open(
        sysfs: &Sysfs,
        address: PciAddress,
        backend: Option<PciBackend>,
    ) -> Result<PciFunction, PciError> {
        let info = sysfs::function_info(sysfs, address)?;
        let backend = select_backend(sysfs, &info, backend)?;
        let config = sysfs.function(address).join("config");
        let sysfs_config = File::open(&config).map_err(|error| PciError::File { path: config, error })?;
        let device = match backend {
            PciBackend::Uio => OpenedDevice::Uio(uio::UioDevice::open(sysfs, address)?),
            _ => OpenedDevice::Vfio(vfio::VfioDevice::open(sysfs, address, info.iommu_group, backend)?),
        };
        let mapped = Mutex::default();
        let (sysfs, regions) = (sysfs.clone(), Mutex::default());
        let function = PciFunction { info, backend, sysfs, sysfs_config, mapped, regions, device };
        function.change_command(COMMAND_BUS_MASTER, COMMAND_MEMORY)?;
        Ok(function)
    }

    /// The address of the function.
    pub fn address(&self) -> PciAddress {
        self.info.address
    }

    /// Its attributes at the time of open.
    pub fn info(&self) -> &PciFunctionInfo {
        &self.info
    }

    /// The backend in use.
    pub fn backend(&self) -> PciBackend {
        self.backend
    }

    /// Maps a whole BAR; `index` is 0 to 5, for a 64-bit BAR the first of its two indices.
    pub fn map_bar(&self, index: u8) -> Result<SharedRegion, PciError> {
        let address = self.info.address;
        let bars = sysfs::bars(&self.sysfs, address)?;
        let bar = bars.iter().find(|bar| bar.index == index);
        let bar = bar.ok_or(PciError::BarMissing { address, index })?;
        if bar.kind == BarKind::Ports {
            return Err(PciError::BarPorts { address, index });
        }
        let whole_pages = |bytes: u64| match bytes.is_multiple_of(rustix::param::page_size() as u64) {
            true => Ok(bytes),
            false => Err(PciError::BarSize { address, index, bytes }),
        };
        let mapped = match &self.device {
            OpenedDevice::Uio(device) => {
                let bytes = whole_pages(bar.bytes)?;
                SharedRegion::map(device.bar(index)?.as_fd(), 0, bytes, true)
            }
            OpenedDevice::Vfio(device) => {
                let region = device.bar(index).map_err(|error| self.failed("querying a BAR", error))?;
                let region = region.ok_or(PciError::BarMissing { address, index })?;
                let bytes = whole_pages(region.bytes)?;
                if !region.mappable {
                    return Err(self.not_offered("mapping of this BAR"));
                }
                SharedRegion::map(device.file(), region.offset, bytes, true)
            }
        };
        mapped.map_err(|error| PciError::BarMap { address, index, error })
    }

    /// Maps a chunk for device reads and writes; returns the device address (IOVA) of its first byte. Idempotent.
    /// Without an IOMMU only hugepages can be mapped.
    ///
    /// The chunk's arena must live until [`unmap_dma`](PciFunction::unmap_dma) or until the function is dropped:
    /// otherwise the pages stay mapped for the device, but the process no longer sees them at that address.
    pub fn map_dma(&self, chunk: &ChunkMemory) -> Result<u64, PciError> {
        let (start, bytes) = (chunk.start.addr() as u64, chunk.bytes as u64);
        let mut mapped = self.lock_mapped();
        if let Some(known) = mapped.get(&start) {
            return Ok(*known);
        }
        let device_address = match &self.device {
            OpenedDevice::Vfio(device) if !device.is_physical() => device.map(start, bytes)?,
            _ => self.physical(chunk)?,
        };
        mapped.insert(start, device_address);
        Ok(device_address)
    }

    /// Reverts [`map_dma`](PciFunction::map_dma). The device must no longer use the chunk.
    pub fn unmap_dma(&self, chunk: &ChunkMemory) -> Result<(), PciError> {
        let start = chunk.start.addr() as u64;
        let known = self.lock_mapped().remove(&start);
        known.ok_or(PciError::NotMapped { address: self.info.address, start })?;
        self.unmap(start)
    }

    /// Maps memory of another process, a guest's for example, for device reads and writes; returns the device address of
    /// its first byte. It pins every page of it, and so takes long: call it on a thread that may wait. Mapping of chunks
    /// beside it does not wait for more than a part. Requires an IOMMU.
    ///
    /// Undo it with [`unmap_region`](Self::unmap_region) before the region's memory is unmapped.
    ///
    /// # Errors
    /// [`PciError::LockedMemory`] if little locked memory would be left (`reserve_bytes`); otherwise as
    /// [`map_dma`](Self::map_dma).
    pub fn map_region(&self, region: &RegionMapping, reserve_bytes: u64) -> Result<u64, PciError> {
        let OpenedDevice::Vfio(device) = &self.device else { return Err(self.needs_iommu()) };
        if device.is_physical() {
            return Err(self.needs_iommu());
        }
        let start = region.start() as u64;
        let device_address = device.map_region(start, region.len(), reserve_bytes)?;
        sync::lock(&self.regions).insert(start);
        Ok(device_address)
    }

    /// Reverts [`map_region`](Self::map_region). The device must no longer use the region at `start`.
    pub fn unmap_region(&self, start: usize) -> Result<(), PciError> {
        let start = start as u64;
        let not_mapped = PciError::NotMapped { address: self.info.address, start };
        match &self.device {
            OpenedDevice::Vfio(device) if sync::lock(&self.regions).remove(&start) => {
                device.unmap_region(start)
            }
            _ => Err(not_mapped),
        }
    }

    fn needs_iommu(&self) -> PciError {
        self.not_offered("mapping of others' memory, which needs an IOMMU")
    }

    fn unmap(&self, start: u64) -> Result<(), PciError> {
        match &self.device {
            OpenedDevice::Vfio(device) if !device.is_physical() => device.unmap(start),
            _ => Ok(()),
        }
    }

    /// The physical address of a hugepage.
    fn physical(&self, chunk: &ChunkMemory) -> Result<u64, PciError> {
        if !chunk.huge {
            return Err(PciError::NeedsHugepages(self.info.address));
        }
        // If a child process shared the page, the next write would move it (copy on write).
        // SAFETY: the chunk is mapped memory of an arena; the advice does not change its contents.
        let advised = unsafe {
            rustix::mm::madvise(chunk.start.cast(), chunk.bytes, rustix::mm::Advice::LinuxDontFork)
        };
        advised.map_err(|errno| self.failed("excluding its memory from child processes", errno.into()))?;
        let physical = pagemap::physical(chunk.start.addr() as u64);
        let physical = physical.map_err(|error| self.failed("reading a physical address", error))?;
        physical.ok_or(PciError::NoPhysicalAddress(self.info.address))
    }

    /// Enables bus mastering: without it the device can neither do DMA nor signal MSI or MSI-X.
    pub fn enable_bus_master(&self) -> Result<(), PciError> {
        self.change_command(0, COMMAND_BUS_MASTER)
    }

    /// Disables bus mastering, and so all DMA of the device.
    pub fn disable_bus_master(&self) -> Result<(), PciError> {
        self.change_command(COMMAND_BUS_MASTER, 0)
    }

    fn change_command(&self, clear: u16, set: u16) -> Result<(), PciError> {
        let mut command = [0; 2];
        self.read_config(COMMAND, &mut command)?;
        let before = u16::from_le_bytes(command);
        // A removed device reads as all ones; a write would have no effect.
        let after = before & !clear | set;
        if before != u16::MAX && before != after {
            self.write_config(COMMAND, &after.to_le_bytes())?;
        }
        Ok(())
    }

    /// Resets the function: by function-level reset, or by another method of the kernel.
    pub fn reset(&self) -> Result<(), PciError> {
        match &self.device {
            OpenedDevice::Uio(device) => device.reset(),
            OpenedDevice::Vfio(device) => match device.reset() {
                Some(done) => done.map_err(|error| self.failed("resetting it", error)),
                None => Err(self.not_offered("reset that the function supports")),
            },
        }
    }

    /// Reads `out.len()` bytes of the configuration space.
    pub fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        self.inside_config(offset, out.len())?;
        let read = match &self.device {
            OpenedDevice::Vfio(device) => device.read_config(offset, out),
            OpenedDevice::Uio(device) => device.read_config(offset, out),
        };
        read.map_err(|error| self.failed("reading its configuration space", error))
    }

    /// Writes `data` to the configuration space.
    pub fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        self.inside_config(offset, data.len())?;
        let written = match &self.device {
            OpenedDevice::Vfio(device) => device.write_config(offset, data),
            OpenedDevice::Uio(device) => device.write_config(offset, data),
        };
        written.map_err(|error| self.failed("writing its configuration space", error))
    }

    fn inside_config(&self, offset: u16, length: usize) -> Result<(), PciError> {
        match usize::from(offset) + length.min(CONFIG_BYTES + 1) <= CONFIG_BYTES {
            true => Ok(()),
            false => Err(PciError::ConfigRange { address: self.info.address, offset, length }),
        }
    }

    /// Maximum number of interrupts for [`enable_interrupts`](PciFunction::enable_interrupts); 0 with UIO.
    pub fn interrupts_max(&self) -> Result<u32, PciError> {
        match &self.device {
            OpenedDevice::Vfio(device) => match device.interrupts() {
                Ok((count, _)) => Ok(count),
                Err(error) => Err(self.failed("querying its interrupts", error)),
            },
            OpenedDevice::Uio(_) => Ok(0),
        }
    }

    /// Enables the first `count` MSI-X (or MSI) vectors; returns one eventfd for each. It replaces the vectors of an
    /// earlier call. Requires bus mastering. Not supported with UIO: poll, or bind to vfio-pci.
    pub fn enable_interrupts(&self, count: u32) -> Result<Vec<OwnedFd>, PciError> {
        match &self.device {
            OpenedDevice::Vfio(device) => device.enable_interrupts(count),
            OpenedDevice::Uio(_) => Err(self.not_offered("interrupts: poll, or bind it to vfio-pci")),
        }
    }

    /// Disables all interrupts.
    pub fn disable_interrupts(&self) -> Result<(), PciError> {
        match &self.device {
            OpenedDevice::Vfio(device) => {
                device.disable_interrupts().map_err(|error| self.failed("disabling its interrupts", error))
            }
            OpenedDevice::Uio(_) => Ok(()),
        }
    }

    /// An eventfd that the kernel signals when it requests the function back, for example before an orderly removal:
    /// drop the function then. `None` if the backend does not support it.
    pub fn removal_event(&self) -> Result<Option<OwnedFd>, PciError> {
        match &self.device {
            OpenedDevice::Vfio(device) => device.removal_request(),
            OpenedDevice::Uio(_) => Ok(None),
        }
    }

    /// Whether the device is still present. Costs one read of its configuration space, about a microsecond.
    pub fn is_present(&self) -> bool {
        let mut identity = [0; 4];
        self.sysfs_config.read_exact_at(&mut identity, 0).is_ok() && identity != [0xff; 4]
    }

    fn failed(&self, what: &'static str, error: std::io::Error) -> PciError {
        PciError::Operation { address: self.info.address, what, error }
    }

    fn not_offered(&self, what: &'static str) -> PciError {
        PciError::NotOffered { address: self.info.address, backend: self.backend, what }
    }

    fn lock_mapped(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        sync::lock(&self.mapped)
    }
}

impl Drop for PciFunction {
    fn drop(&mut self) {
        // Before its memory is unmapped. This fails only if the device was removed.
        let _ = self.disable_bus_master();
        let mapped = std::mem::take(&mut *self.lock_mapped());
        for start in mapped.into_keys() {
            let _ = self.unmap(start);
        }
        let regions = std::mem::take(&mut *sync::lock(&self.regions));
        if let OpenedDevice::Vfio(device) = &self.device {
            for start in regions {
                let _ = device.unmap_region(start);
            }
        }
    }
}

/// Selects the backend that matches the driver of the function.
fn select_backend(
    sysfs: &Sysfs,
    info: &PciFunctionInfo,
    wanted: Option<PciBackend>,
) -> Result<PciBackend, PciError> {
    let address = info.address;
    let driver = info.driver.clone().unwrap_or_default();
    // Vendor variants such as nvme_vfio_pci have the same interface.
    let (is_vfio, is_uio) = (driver.contains("vfio"), driver.contains("uio"));
    if !is_vfio && !is_uio {
        return Err(PciError::Driver { address, driver: info.driver.clone() });
    }
    if let Some(backend) = wanted {
        return match (backend == PciBackend::Uio) == is_uio {
            true => Ok(backend),
            false => Err(PciError::Backend { address, backend, driver }),
        };
    }
    if is_uio {
        return Ok(PciBackend::Uio);
    }
    let group = info.iommu_group.ok_or(PciError::NoGroup(address))?;
    if sysfs.path(format!("dev/vfio/noiommu-{group}")).exists() {
        return Ok(PciBackend::VfioNoIommu);
    }
    // Every kernel has the group node unless it is built without groups; then use the function's node.
    let group_exists = sysfs.path(format!("dev/vfio/{group}")).exists();
    match !group_exists && vfio::cdev_node(sysfs, address).is_some() {
        true => Ok(PciBackend::VfioCdev),
        false => Ok(PciBackend::VfioGroup),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::tests::FakeSysfs;

    const ADDRESS: &str = "0000:00:04.0";

    fn open(machine: &FakeSysfs, backend: Option<PciBackend>) -> Result<PciFunction, PciError> {
        PciFunction::open(&machine.sysfs(), ADDRESS.parse().unwrap(), backend)
    }

    fn open_error(machine: &FakeSysfs, backend: Option<PciBackend>) -> String {
        match open(machine, backend) {
            Ok(_) => panic!("it was opened"),
            Err(error) => error.to_string(),
        }
    }

    /// A function bound to UIO; regular files stand for its registers.
    fn uio_sysfs(name: &str) -> FakeSysfs {
        let machine = FakeSysfs::new(name);
        machine.function(ADDRESS, "0x010802\n", Some("uio_pci_generic"));
        let folder = format!("sys/bus/pci/devices/{ADDRESS}");
        machine.file(&format!("{folder}/uio/uio3/name"), "uio_pci_generic\n");
        machine.file("dev/uio3", "");
        machine.file(&format!("{folder}/resource0"), &"\0".repeat(16384));
        machine
            .file(&format!("{folder}/config"), &format!("\u{36}\u{1b}\u{10}\0\u{6}\0{}", "\0".repeat(250)));
        machine
    }

    #[test]
    fn the_backend_is_selected_by_the_bound_driver() {
        let machine = FakeSysfs::new("choose");
        machine.function(ADDRESS, "0x010802\n", Some("vfio-pci"));
        let selected = |wanted| {
            let info = sysfs::function_info(&machine.sysfs(), ADDRESS.parse().unwrap()).unwrap();
            select_backend(&machine.sysfs(), &info, wanted)
        };
        assert!(selected(None).unwrap_err().to_string().contains("no IOMMU group: enable the IOMMU"));
        machine.link(&format!("sys/bus/pci/devices/{ADDRESS}/iommu_group"), "../../../kernel/iommu_groups/5");
        assert_eq!(selected(None).unwrap(), PciBackend::VfioGroup);
        machine.file(&format!("sys/bus/pci/devices/{ADDRESS}/vfio-dev/vfio0/dev"), "511:0\n");
        assert_eq!(selected(None).unwrap(), PciBackend::VfioGroup, "there is no device node");
        machine.file("dev/vfio/devices/vfio0", "");
        assert_eq!(selected(None).unwrap(), PciBackend::VfioCdev);
        machine.file("dev/vfio/5", "");
        assert_eq!(selected(None).unwrap(), PciBackend::VfioGroup);
        assert_eq!(selected(Some(PciBackend::VfioCdev)).unwrap(), PciBackend::VfioCdev);
        machine.file("dev/vfio/noiommu-5", "");
        assert_eq!(selected(None).unwrap(), PciBackend::VfioNoIommu);
        assert!(matches!(selected(Some(PciBackend::Uio)), Err(PciError::Backend { .. })));
    }

    #[test]
    fn a_function_bound_to_a_kernel_driver_is_rejected() {
        let machine = FakeSysfs::new("kernel");
        machine.function(ADDRESS, "0x010802\n", Some("nvme"));
        assert!(open_error(&machine, None).contains("bound to nvme; `ringbolt nvme bind 0000:00:04.0`"));
        assert!(matches!(open(&FakeSysfs::new("none"), None), Err(PciError::NotFound(_))));
    }

    #[test]
    fn errors_of_missing_nodes_contain_advice() {
        let machine = FakeSysfs::new("nodes");
        machine.function(ADDRESS, "0x010802\n", Some("vfio-pci"));
        machine.file(&format!("sys/bus/pci/devices/{ADDRESS}/config"), &"\0".repeat(256));
        machine.link(&format!("sys/bus/pci/devices/{ADDRESS}/iommu_group"), "../../../kernel/iommu_groups/5");
        assert!(open_error(&machine, None).contains("modprobe vfio-pci"));
        machine.file("dev/vfio/vfio", "");
        // A regular file instead of VFIO: the kernel rejects the ioctl.
        assert!(open_error(&machine, None).contains("querying the VFIO version"));
    }

    #[test]
    fn a_uio_function_is_opened_exclusively_and_mapped() {
        let machine = uio_sysfs("uio");
        let function = open(&machine, None).unwrap();
        assert_eq!(function.backend(), PciBackend::Uio);
        assert!(function.is_present());
        let mut command = [0; 2];
        function.read_config(4, &mut command).unwrap();
        assert_eq!(u16::from_le_bytes(command), COMMAND_MEMORY, "bus mastering is off after open");
        function.enable_bus_master().unwrap();
        function.read_config(4, &mut command).unwrap();
        assert_eq!(u16::from_le_bytes(command), COMMAND_MEMORY | COMMAND_BUS_MASTER);
        assert!(open_error(&machine, None).contains("another process has it open"));
        let registers = function.map_bar(0).unwrap();
        assert_eq!(registers.len(), 16384);
        registers.store_u32(0x14, 1);
        drop(function);
        assert_eq!(registers.load_u32(0x14), 1);
        let config = machine.root.join(format!("sys/bus/pci/devices/{ADDRESS}/config"));
        assert_eq!(std::fs::read(config).unwrap()[4], COMMAND_MEMORY as u8, "and after drop");
        open(&machine, None).unwrap();
    }

    #[test]
    fn invalid_bars_and_unsupported_operations_are_errors() {
        let machine = uio_sysfs("invalid-bars");
        let function = open(&machine, None).unwrap();
        let why = |index| match function.map_bar(index) {
            Ok(_) => panic!("BAR {index} was mapped"),
            Err(error) => error,
        };
        assert!(matches!(why(1), PciError::BarMissing { index: 1, .. }));
        assert!(matches!(why(2), PciError::BarPorts { index: 2, .. }));
        assert!(matches!(why(3), PciError::BarSize { index: 3, bytes: 256, .. }));
        assert!(matches!(why(6), PciError::BarMissing { index: 6, .. }));
        assert!(matches!(function.read_config(4095, &mut [0; 2]), Err(PciError::ConfigRange { .. })));
        assert!(matches!(function.enable_interrupts(1), Err(PciError::NotOffered { .. })));
        assert!(matches!(function.reset(), Err(PciError::NotOffered { .. })));
    }

    #[test]
    fn a_removed_function_is_not_present() {
        let machine = uio_sysfs("pulled");
        let function = open(&machine, None).unwrap();
        let config = machine.root.join(format!("sys/bus/pci/devices/{ADDRESS}/config"));
        std::fs::write(&config, [0xff; 256]).unwrap();
        assert!(!function.is_present());
        std::fs::write(&config, []).unwrap();
        assert!(!function.is_present());
    }

    #[test]
    fn without_an_iommu_ordinary_pages_are_rejected() {
        let machine = uio_sysfs("pages");
        let function = open(&machine, None).unwrap();
        let config = dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, shared: false };
        let pool = dma::Pool::new(&dma::Arena::new(config));
        let buffer = pool.take(4096).unwrap();
        let chunk = buffer.chunk().unwrap();
        assert!(function.map_dma(&chunk).unwrap_err().to_string().contains("nr_hugepages"));
        assert!(matches!(function.unmap_dma(&chunk), Err(PciError::NotMapped { .. })));
    }

    #[test]
    fn functions_can_be_shared_between_cores() {
        fn shared<T: Send + Sync>() {}
        shared::<PciFunction>();
    }
}
