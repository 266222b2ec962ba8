//! One opened function.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memory::{ChunkMemory, SharedRegion};

use crate::sysfs::BarKind;
use crate::{Address, Info, PciError, Sysfs, pagemap, sysfs, uio, vfio};

/// The way to a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// VFIO through the function's IOMMU group.
    VfioGroup,
    /// VFIO through the function's own node and an iommufd.
    VfioCdev,
    /// VFIO without an IOMMU: nothing keeps the device from any memory.
    VfioNoIommu,
    /// `uio_pci_generic`: no IOMMU, no interrupts.
    Uio,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::VfioGroup => "VFIO (group)",
            Backend::VfioCdev => "VFIO (iommufd)",
            Backend::VfioNoIommu => "VFIO without IOMMU",
            Backend::Uio => "UIO",
        })
    }
}

/// An opened function: it is this process's alone until the value is dropped.
///
/// Dropped, it keeps the device from memory (bus mastering off), ends interrupts and mappings, and
/// gives the function back to be opened by others. Regions from [`map_bar`](Function::map_bar) outlive
/// it, but reading a register through one is then the reader's risk: a device that is gone reads as all
/// ones or raises SIGBUS.
pub struct Function {
    info: Info,
    backend: Backend,
    sysfs: Sysfs,
    /// The configuration space as the hardware has it: VFIO shows some of it from memory.
    presence: File,
    /// Device addresses of the chunks that are mapped for it, by where they start.
    mapped: Mutex<BTreeMap<u64, u64>>,
    opened: Opened,
}

enum Opened {
    Vfio(vfio::Device),
    Uio(uio::Device),
}

/// Offset of the command register, and its bits.
const COMMAND: u16 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// PCI Express's extended configuration space.
const CONFIG_BYTES: usize = 4096;

impl Function {
    /// Opens a function that no driver of the kernel has, the way that it is bound, or the given way.
    /// Memory decoding is on and bus mastering off afterwards.
    pub fn open(sysfs: &Sysfs, address: Address, backend: Option<Backend>) -> Result<Function, PciError> {
        let info = sysfs::info(sysfs, address)?;
        let backend = choose(sysfs, &info, backend)?;
        let config = sysfs.function(address).join("config");
        let presence = File::open(&config).map_err(|error| PciError::File { path: config, error })?;
        let opened = match backend {
            Backend::Uio => Opened::Uio(uio::Device::open(sysfs, address)?),
            _ => Opened::Vfio(vfio::Device::open(sysfs, address, info.iommu_group, backend)?),
        };
        let mapped = Mutex::default();
        let function = Function { info, backend, sysfs: sysfs.clone(), presence, mapped, opened };
        function.change_command(COMMAND_BUS_MASTER, COMMAND_MEMORY)?;
        Ok(function)
    }

    /// Where it is.
    pub fn address(&self) -> Address {
        self.info.address
    }

    /// What was known of it when it was opened.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// How it was opened.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Maps a whole BAR, 0 to 5: of a 64-bit one, the first of its two.
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
        let mapped = match &self.opened {
            Opened::Uio(device) => {
                let bytes = whole_pages(bar.bytes)?;
                SharedRegion::map(device.bar(index)?.as_fd(), 0, bytes, true)
            }
            Opened::Vfio(device) => {
                let region = device.bar(index).map_err(|error| self.failed("finding a BAR", error))?;
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

    /// Lets the device read and write a chunk; returns the address by which the device knows its first
    /// byte. Mapping it again changes nothing. Without an IOMMU only hugepages can be mapped.
    ///
    /// The chunk's arena must live until [`unmap_dma`](Function::unmap_dma), or until the function is
    /// dropped: the pages stay with the device, but are no longer what the process sees there.
    pub fn map_dma(&self, chunk: &ChunkMemory) -> Result<u64, PciError> {
        let (start, bytes) = (chunk.start.addr() as u64, chunk.bytes as u64);
        let mut mapped = self.lock_mapped();
        if let Some(known) = mapped.get(&start) {
            return Ok(*known);
        }
        let device_address = match &self.opened {
            Opened::Vfio(device) if !device.is_physical() => device.map(start, bytes)?,
            _ => self.physical(chunk)?,
        };
        mapped.insert(start, device_address);
        Ok(device_address)
    }

    /// Ends [`map_dma`](Function::map_dma). The device must not be using the chunk any more.
    pub fn unmap_dma(&self, chunk: &ChunkMemory) -> Result<(), PciError> {
        let start = chunk.start.addr() as u64;
        let known = self.lock_mapped().remove(&start);
        known.ok_or(PciError::NotMapped { address: self.info.address, start })?;
        self.unmap(start)
    }

    fn unmap(&self, start: u64) -> Result<(), PciError> {
        match &self.opened {
            Opened::Vfio(device) if !device.is_physical() => device.unmap(start),
            _ => Ok(()),
        }
    }

    /// The physical address of a hugepage.
    fn physical(&self, chunk: &ChunkMemory) -> Result<u64, PciError> {
        if !chunk.huge {
            return Err(PciError::NeedsHugepages(self.info.address));
        }
        // A child of this process that shared the page would make the next write move it.
        // SAFETY: the chunk is mapped memory of an arena; the advice changes no contents of ours.
        let advised = unsafe {
            rustix::mm::madvise(chunk.start.cast(), chunk.bytes, rustix::mm::Advice::LinuxDontFork)
        };
        advised.map_err(|errno| self.failed("keeping its memory from children", errno.into()))?;
        let physical = pagemap::physical(chunk.start.addr() as u64);
        let physical = physical.map_err(|error| self.failed("asking for a physical address", error))?;
        physical.ok_or(PciError::NoPhysicalAddress(self.info.address))
    }

    /// Lets the device reach memory on its own. Without it, it neither reads commands nor interrupts.
    pub fn enable_bus_master(&self) -> Result<(), PciError> {
        self.change_command(0, COMMAND_BUS_MASTER)
    }

    /// Keeps the device from memory.
    pub fn disable_bus_master(&self) -> Result<(), PciError> {
        self.change_command(COMMAND_BUS_MASTER, 0)
    }

    fn change_command(&self, clear: u16, set: u16) -> Result<(), PciError> {
        let mut command = [0; 2];
        self.read_config(COMMAND, &mut command)?;
        let before = u16::from_le_bytes(command);
        // A device that is gone reads as all ones; nothing can be told to it.
        let after = before & !clear | set;
        if before != u16::MAX && before != after {
            self.write_config(COMMAND, &after.to_le_bytes())?;
        }
        Ok(())
    }

    /// Resets the function (function-level reset, or what the kernel knows instead).
    pub fn reset(&self) -> Result<(), PciError> {
        match &self.opened {
            Opened::Uio(device) => device.reset(),
            Opened::Vfio(device) => match device.reset() {
                Some(done) => done.map_err(|error| self.failed("resetting it", error)),
                None => Err(self.not_offered("reset that the function supports")),
            },
        }
    }

    /// Reads the configuration space.
    pub fn read_config(&self, offset: u16, out: &mut [u8]) -> Result<(), PciError> {
        self.inside_config(offset, out.len())?;
        let read = match &self.opened {
            Opened::Vfio(device) => device.read_config(offset, out),
            Opened::Uio(device) => device.read_config(offset, out),
        };
        read.map_err(|error| self.failed("reading its configuration space", error))
    }

    /// Writes the configuration space.
    pub fn write_config(&self, offset: u16, data: &[u8]) -> Result<(), PciError> {
        self.inside_config(offset, data.len())?;
        let written = match &self.opened {
            Opened::Vfio(device) => device.write_config(offset, data),
            Opened::Uio(device) => device.write_config(offset, data),
        };
        written.map_err(|error| self.failed("writing its configuration space", error))
    }

    fn inside_config(&self, offset: u16, length: usize) -> Result<(), PciError> {
        match usize::from(offset) + length.min(CONFIG_BYTES + 1) <= CONFIG_BYTES {
            true => Ok(()),
            false => Err(PciError::ConfigRange { address: self.info.address, offset, length }),
        }
    }

    /// How many interrupts [`enable_interrupts`](Function::enable_interrupts) can give.
    pub fn interrupts_max(&self) -> Result<u32, PciError> {
        match &self.opened {
            Opened::Vfio(device) => match device.interrupts() {
                Ok((count, _)) => Ok(count),
                Err(error) => Err(self.failed("asking for its interrupts", error)),
            },
            Opened::Uio(_) => Ok(0),
        }
    }

    /// Eventfds that the first `count` MSI-X vectors (or MSI) signal; those of an earlier call go
    /// silent. Needs bus mastering. Not with UIO: poll, or bind to vfio-pci.
    pub fn enable_interrupts(&self, count: u32) -> Result<Vec<OwnedFd>, PciError> {
        match &self.opened {
            Opened::Vfio(device) => device.enable_interrupts(count),
            Opened::Uio(_) => Err(self.not_offered("interrupts: poll, or bind it to vfio-pci")),
        }
    }

    /// Turns interrupts off.
    pub fn disable_interrupts(&self) -> Result<(), PciError> {
        match &self.opened {
            Opened::Vfio(device) => {
                device.disable_interrupts().map_err(|error| self.failed("disabling its interrupts", error))
            }
            Opened::Uio(_) => Ok(()),
        }
    }

    /// An eventfd that the kernel signals when it wants the function back, as before an orderly removal:
    /// drop the function then. `None` where the backend does not tell.
    pub fn removal_request(&self) -> Result<Option<OwnedFd>, PciError> {
        match &self.opened {
            Opened::Vfio(device) => device.removal_request(),
            Opened::Uio(_) => Ok(None),
        }
    }

    /// Whether the function is still there. One read of its configuration space, about a microsecond.
    pub fn is_present(&self) -> bool {
        let mut identity = [0; 4];
        self.presence.read_exact_at(&mut identity, 0).is_ok() && identity != [0xff; 4]
    }

    fn failed(&self, what: &'static str, error: std::io::Error) -> PciError {
        PciError::Operation { address: self.info.address, what, error }
    }

    fn not_offered(&self, what: &'static str) -> PciError {
        PciError::NotOffered { address: self.info.address, backend: self.backend, what }
    }

    fn lock_mapped(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // Before memory is taken from it. What fails here fails because the device is gone.
        let _ = self.disable_bus_master();
        let mapped = std::mem::take(&mut *self.lock_mapped());
        for start in mapped.into_keys() {
            let _ = self.unmap(start);
        }
    }
}

/// The way to a function, from what it is bound to.
fn choose(sysfs: &Sysfs, info: &Info, wanted: Option<Backend>) -> Result<Backend, PciError> {
    let address = info.address;
    let driver = info.driver.clone().unwrap_or_default();
    // Vendors' variants, as nvme_vfio_pci, offer the same.
    let (is_vfio, is_uio) = (driver.contains("vfio"), driver.contains("uio"));
    if !is_vfio && !is_uio {
        return Err(PciError::Driver { address, driver: info.driver.clone() });
    }
    if let Some(backend) = wanted {
        return match (backend == Backend::Uio) == is_uio {
            true => Ok(backend),
            false => Err(PciError::Backend { address, backend, driver }),
        };
    }
    if is_uio {
        return Ok(Backend::Uio);
    }
    let group = info.iommu_group.ok_or(PciError::NoGroup(address))?;
    if sysfs.path(format!("dev/vfio/noiommu-{group}")).exists() {
        return Ok(Backend::VfioNoIommu);
    }
    // The group is what every kernel has; one that is built without groups has the function's node.
    let group_exists = sysfs.path(format!("dev/vfio/{group}")).exists();
    match !group_exists && vfio::cdev_node(sysfs, address).is_some() {
        true => Ok(Backend::VfioCdev),
        false => Ok(Backend::VfioGroup),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::tests::Machine;

    const ADDRESS: &str = "0000:00:04.0";

    fn open(machine: &Machine, backend: Option<Backend>) -> Result<Function, PciError> {
        Function::open(&machine.sysfs(), ADDRESS.parse().unwrap(), backend)
    }

    fn refused(machine: &Machine, backend: Option<Backend>) -> String {
        match open(machine, backend) {
            Ok(_) => panic!("it was opened"),
            Err(error) => error.to_string(),
        }
    }

    /// A function bound to UIO, with files where the kernel has registers.
    fn uio_machine(name: &str) -> Machine {
        let machine = Machine::new(name);
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
    fn the_way_is_chosen_by_what_the_function_is_bound_to() {
        let machine = Machine::new("choose");
        machine.function(ADDRESS, "0x010802\n", Some("vfio-pci"));
        let chosen = |wanted| {
            let info = sysfs::info(&machine.sysfs(), ADDRESS.parse().unwrap()).unwrap();
            choose(&machine.sysfs(), &info, wanted)
        };
        assert!(chosen(None).unwrap_err().to_string().contains("no IOMMU group: enable the IOMMU"));
        machine.link(&format!("sys/bus/pci/devices/{ADDRESS}/iommu_group"), "../../../kernel/iommu_groups/5");
        assert_eq!(chosen(None).unwrap(), Backend::VfioGroup);
        machine.file(&format!("sys/bus/pci/devices/{ADDRESS}/vfio-dev/vfio0/dev"), "511:0\n");
        assert_eq!(chosen(None).unwrap(), Backend::VfioGroup, "there is no node");
        machine.file("dev/vfio/devices/vfio0", "");
        assert_eq!(chosen(None).unwrap(), Backend::VfioCdev);
        machine.file("dev/vfio/5", "");
        assert_eq!(chosen(None).unwrap(), Backend::VfioGroup);
        assert_eq!(chosen(Some(Backend::VfioCdev)).unwrap(), Backend::VfioCdev);
        machine.file("dev/vfio/noiommu-5", "");
        assert_eq!(chosen(None).unwrap(), Backend::VfioNoIommu);
        assert!(matches!(chosen(Some(Backend::Uio)), Err(PciError::Backend { .. })));
    }

    #[test]
    fn a_function_of_the_kernel_is_left_alone() {
        let machine = Machine::new("kernel");
        machine.function(ADDRESS, "0x010802\n", Some("nvme"));
        assert!(refused(&machine, None).contains("bound to nvme; `ringbolt nvme bind 0000:00:04.0`"));
        assert!(matches!(open(&Machine::new("none"), None), Err(PciError::NotFound(_))));
    }

    #[test]
    fn missing_nodes_say_what_to_do() {
        let machine = Machine::new("nodes");
        machine.function(ADDRESS, "0x010802\n", Some("vfio-pci"));
        machine.file(&format!("sys/bus/pci/devices/{ADDRESS}/config"), &"\0".repeat(256));
        machine.link(&format!("sys/bus/pci/devices/{ADDRESS}/iommu_group"), "../../../kernel/iommu_groups/5");
        assert!(refused(&machine, None).contains("modprobe vfio-pci"));
        machine.file("dev/vfio/vfio", "");
        // A file that is no VFIO: the kernel does not know the request.
        assert!(refused(&machine, None).contains("asking VFIO's version"));
    }

    #[test]
    fn a_uio_function_is_opened_once_and_mapped() {
        let machine = uio_machine("uio");
        let function = open(&machine, None).unwrap();
        assert_eq!(function.backend(), Backend::Uio);
        assert!(function.is_present());
        let mut command = [0; 2];
        function.read_config(4, &mut command).unwrap();
        assert_eq!(u16::from_le_bytes(command), COMMAND_MEMORY, "bus mastering is off after open");
        function.enable_bus_master().unwrap();
        function.read_config(4, &mut command).unwrap();
        assert_eq!(u16::from_le_bytes(command), COMMAND_MEMORY | COMMAND_BUS_MASTER);
        assert!(refused(&machine, None).contains("another process has it open"));
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
    fn a_device_that_lies_is_named() {
        let machine = uio_machine("lies");
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
    fn a_function_that_was_pulled_out_is_noticed() {
        let machine = uio_machine("pulled");
        let function = open(&machine, None).unwrap();
        let config = machine.root.join(format!("sys/bus/pci/devices/{ADDRESS}/config"));
        std::fs::write(&config, [0xff; 256]).unwrap();
        assert!(!function.is_present());
        std::fs::write(&config, []).unwrap();
        assert!(!function.is_present());
    }

    #[test]
    fn without_an_iommu_ordinary_pages_are_refused() {
        let machine = uio_machine("pages");
        let function = open(&machine, None).unwrap();
        let config = memory::Config { limit_bytes: 2 << 20, hugepages: false, shared: false };
        let pool = memory::Pool::new(&memory::Arena::new(config));
        let buffer = pool.take(4096).unwrap();
        let chunk = buffer.chunk().unwrap();
        assert!(function.map_dma(&chunk).unwrap_err().to_string().contains("nr_hugepages"));
        assert!(matches!(function.unmap_dma(&chunk), Err(PciError::NotMapped { .. })));
    }

    #[test]
    fn functions_can_be_shared_between_cores() {
        fn shared<T: Send + Sync>() {}
        shared::<Function>();
    }
}
