//! A device behind a socket.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use memory::{ChunkMemory, SharedRegion};
use wire_vfio_user::{
    Capabilities, Command, DATA_BYTES_DEFAULT, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionAccess,
    RegionInfo, RegionReply, SetIrqs, SparseArea, Version, device_flags, irq, irq_set, region_flags,
};

use crate::ClientError;
use crate::link::{DESCRIPTORS_MAX, Link};

/// Name of the socket in a directory that stands for a device.
const SOCKET: &str = "cntrl";
/// Regions that are asked about: a PCI device's, and a few more.
const REGIONS_MAX: u32 = 32;
/// Room for a region's capabilities.
const REGION_REPLY_BYTES: u32 = 1024;
/// Descriptors of one message to a server that did not say how many it takes. libvfio-user says 8.
const DESCRIPTORS: u32 = 8;

/// How a device is reached.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long one exchange may take, a reset included.
    pub timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        // A reset waits for the I/O that is under way.
        Config { timeout: Duration::from_secs(10) }
    }
}

/// A region of the device.
#[derive(Debug)]
pub struct Region {
    /// Bytes; 0 where there is none.
    pub size: u64,
    /// It can be read.
    pub readable: bool,
    /// It can be written.
    pub writable: bool,
    /// The parts that can be mapped.
    pub areas: Vec<SparseArea>,
    /// Where in the descriptor it begins.
    offset: u64,
    descriptor: Option<OwnedFd>,
}

/// A connection to a server, and the device that it serves. Dropped, it closes the connection, which
/// takes memory and interrupts away from the device.
pub struct Client {
    path: PathBuf,
    link: Mutex<Link>,
    regions: Vec<Region>,
    capabilities: Capabilities,
    resets: bool,
    msix_vectors: u32,
}

impl Client {
    /// Connects to the server that listens at `path`, a socket or a directory with a socket `cntrl` in
    /// it, agrees on a version and learns what the device is.
    ///
    /// # Errors
    /// Nobody listens there, the server is busy with another client, it is no server of a PCI device,
    /// or it takes too long.
    pub fn connect(path: &Path, config: &Config) -> Result<Client, ClientError> {
        let socket = if path.is_dir() { path.join(SOCKET) } else { path.to_owned() };
        let stream = UnixStream::connect(&socket).map_err(|error| ClientError::Connect(socket, error))?;
        let mut link = Link::new(stream, config.timeout)?;
        let capabilities = negotiate(&mut link)?;
        let info = DeviceInfo { argsz: DeviceInfo::SIZE as u32, ..DeviceInfo::default() };
        let command = Command::DeviceGetInfo;
        let answer = link.call(command, &[&info.to_bytes()], &[])?;
        let info =
            DeviceInfo::decode(&answer.payload).map_err(|error| ClientError::Answer(command, error))?;
        if info.flags & device_flags::PCI == 0 || info.regions <= crate::CONFIG || info.regions > REGIONS_MAX
        {
            return Err(ClientError::Nonsense(command, "it is not a PCI device"));
        }
        let regions = (0..info.regions).map(|index| region(&mut link, index));
        let regions = regions.collect::<Result<_, _>>()?;
        let msix_vectors = if info.irqs > irq::MSIX { vectors(&mut link)? } else { 0 };
        let resets = info.flags & device_flags::RESET != 0;
        let path = path.to_owned();
        Ok(Client { path, link: Mutex::new(link), regions, capabilities, resets, msix_vectors })
    }

    /// Where it was connected to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device's regions, by index.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// How many MSI-X vectors the device has.
    pub fn msix_vectors(&self) -> u32 {
        self.msix_vectors
    }

    /// Whether the server is still there, as far as this machine's kernel knows. Costs a system call.
    pub fn is_present(&self) -> bool {
        self.link().is_open()
    }

    /// Reads from a region by message.
    ///
    /// # Errors
    /// The range is not in the region, or the server refuses; a device may refuse sizes and alignments.
    pub fn region_read(&self, region: u32, offset: u64, out: &mut [u8]) -> Result<(), ClientError> {
        self.check(region, offset, out.len() as u64)?;
        let step = self.capabilities.max_data_xfer_size.clamp(8, DATA_BYTES_DEFAULT) as usize;
        for (index, part) in out.chunks_mut(step).enumerate() {
            let offset = offset + (index * step) as u64;
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            let command = Command::RegionRead;
            let answer = self.link().call(command, &[&access.to_bytes()], &[])?;
            let echo = RegionAccess::decode(&answer.payload);
            let echo = echo.map_err(|error| ClientError::Answer(command, error))?;
            let data = &answer.payload[RegionAccess::SIZE..];
            if echo.count != access.count || data.len() != part.len() {
                return Err(ClientError::Nonsense(command, "it has another length"));
            }
            part.copy_from_slice(data);
        }
        Ok(())
    }

    /// Writes to a region by message, and waits until the device has taken it.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.check(region, offset, data.len() as u64)?;
        let step = self.capabilities.max_data_xfer_size.clamp(8, DATA_BYTES_DEFAULT) as usize;
        for (index, part) in data.chunks(step).enumerate() {
            let offset = offset + (index * step) as u64;
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            self.link().call(Command::RegionWrite, &[&access.to_bytes(), part], &[])?;
        }
        Ok(())
    }

    /// Reads a 32-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn read_u32(&self, region: u32, offset: u64) -> Result<u32, ClientError> {
        let mut bytes = [0; 4];
        self.region_read(region, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a 64-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn read_u64(&self, region: u32, offset: u64) -> Result<u64, ClientError> {
        let mut bytes = [0; 8];
        self.region_read(region, offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a 32-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn write_u32(&self, region: u32, offset: u64, value: u32) -> Result<(), ClientError> {
        self.region_write(region, offset, &value.to_le_bytes())
    }

    /// Writes a 64-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn write_u64(&self, region: u32, offset: u64, value: u64) -> Result<(), ClientError> {
        self.region_write(region, offset, &value.to_le_bytes())
    }

    /// Maps part of a region; both ends are multiples of the page size. What is written there is seen by
    /// the server without a message: it polls.
    ///
    /// # Errors
    /// The server does not let that part be mapped, or the kernel does not.
    pub fn map_region(&self, region: u32, offset: u64, bytes: u64) -> Result<SharedRegion, ClientError> {
        self.check(region, offset, bytes)?;
        let refused = || ClientError::NotMappable { region, offset, bytes };
        let found = self.regions.get(region as usize).ok_or_else(refused)?;
        let covers = |area: &SparseArea| {
            let end = area.offset.saturating_add(area.size);
            area.offset <= offset && offset + bytes <= end
        };
        let descriptor = found.descriptor.as_ref().filter(|_| found.areas.iter().any(covers));
        let descriptor = descriptor.ok_or_else(refused)?;
        let at = found.offset.checked_add(offset).ok_or_else(refused)?;
        Ok(SharedRegion::map(descriptor.as_fd(), at, bytes, found.writable)?)
    }

    /// Lets the device read and write a chunk of buffers, under the address that it has in this process,
    /// which is returned.
    ///
    /// # Errors
    /// The arena's memory is private to this process, or the server refuses.
    pub fn dma_map(&self, chunk: &ChunkMemory) -> Result<u64, ClientError> {
        let file = chunk.file.as_ref().ok_or(ClientError::PrivateMemory)?;
        let address = chunk.start.addr() as u64;
        self.dma_map_file(address, file.as_fd(), 0, chunk.bytes as u64, true)?;
        Ok(address)
    }

    /// Lets the device read, and write if `writable`, `bytes` bytes of a file from `offset` as `address`.
    ///
    /// # Errors
    /// The server refuses: the range overlaps another, for example, or there are too many.
    pub fn dma_map_file(
        &self,
        address: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<(), ClientError> {
        let map = DmaMap::new(address, bytes, offset, writable);
        self.link().call(Command::DmaMap, &[&map.to_bytes()], &[file])?;
        Ok(())
    }

    /// Takes memory away from the device. When this returns, the device no longer reads or writes it.
    ///
    /// # Errors
    /// It was not mapped like this.
    pub fn dma_unmap(&self, address: u64, bytes: u64) -> Result<(), ClientError> {
        self.link().call(Command::DmaUnmap, &[&DmaUnmap::new(address, bytes).to_bytes()], &[])?;
        Ok(())
    }

    /// Lets the device signal MSI-X vectors, from the first on, through eventfds; none takes all away.
    ///
    /// # Errors
    /// The device has fewer vectors, or the server refuses.
    pub fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let want = u32::try_from(eventfds.len()).unwrap_or(u32::MAX);
        if want > self.msix_vectors {
            return Err(ClientError::Interrupts { have: self.msix_vectors, want });
        }
        let set = |flags, start, count| SetIrqs {
            argsz: SetIrqs::SIZE as u32,
            flags: flags | irq_set::ACTION_TRIGGER,
            index: irq::MSIX,
            start,
            count,
        };
        if eventfds.is_empty() {
            let none = set(irq_set::DATA_NONE, 0, 0);
            self.link().call(Command::DeviceSetIrqs, &[&none.to_bytes()], &[])?;
            return Ok(());
        }
        let step = (self.capabilities.max_msg_fds as usize).clamp(1, DESCRIPTORS_MAX);
        for (index, part) in eventfds.chunks(step).enumerate() {
            let set = set(irq_set::DATA_EVENTFD, (index * step) as u32, part.len() as u32);
            self.link().call(Command::DeviceSetIrqs, &[&set.to_bytes()], part)?;
        }
        Ok(())
    }

    /// Resets the device. What it had under way has ended when this returns.
    ///
    /// # Errors
    /// The server cannot, or takes too long.
    pub fn reset(&self) -> Result<(), ClientError> {
        if !self.resets {
            return Err(ClientError::Nonsense(Command::DeviceReset, "the device has no reset"));
        }
        self.link().call(Command::DeviceReset, &[], &[])?;
        Ok(())
    }

    fn check(&self, region: u32, offset: u64, bytes: u64) -> Result<(), ClientError> {
        let size = self.regions.get(region as usize).map_or(0, |region| region.size);
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(ClientError::Range { region, offset, bytes, size });
        }
        Ok(())
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        // A call that panicked has marked the link as broken.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "vfio-user:{}", self.path.display())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Client").field("path", &self.path).finish_non_exhaustive()
    }
}

fn negotiate(link: &mut Link) -> Result<Capabilities, ClientError> {
    let command = Command::Version;
    let capabilities = Capabilities { max_msg_fds: DESCRIPTORS_MAX as u32, ..Capabilities::default() };
    let ours = Version { major: Version::MAJOR, minor: Version::MINOR, capabilities };
    let answer = link.call(command, &[&ours.to_bytes()], &[])?;
    let theirs = Version::decode(&answer.payload).map_err(|error| ClientError::Answer(command, error))?;
    if theirs.major != Version::MAJOR || theirs.minor > Version::MINOR {
        return Err(ClientError::Version(theirs.major, theirs.minor));
    }
    let max_msg_fds = theirs.capabilities.max_msg_fds.clamp(1, DESCRIPTORS);
    Ok(Capabilities { max_msg_fds, ..theirs.capabilities })
}

fn region(link: &mut Link, index: u32) -> Result<Region, ClientError> {
    let command = Command::DeviceGetRegionInfo;
    let info = RegionInfo { argsz: REGION_REPLY_BYTES, index, ..RegionInfo::default() };
    let answer = link.call(command, &[&info.to_bytes()], &[])?;
    let reply = RegionReply::decode(&answer.payload).map_err(|error| ClientError::Answer(command, error))?;
    let RegionInfo { flags, size, offset, .. } = reply.info;
    let mappable = flags & region_flags::MMAP != 0;
    let areas = match (mappable, reply.areas.is_empty()) {
        (false, _) => Vec::new(),
        (true, true) => vec![SparseArea { offset: 0, size }],
        (true, false) => reply.areas,
    };
    let descriptor = answer.descriptors.into_iter().next().filter(|_| mappable);
    Ok(Region {
        size,
        readable: flags & region_flags::READ != 0,
        writable: flags & region_flags::WRITE != 0,
        areas,
        offset,
        descriptor,
    })
}

fn vectors(link: &mut Link) -> Result<u32, ClientError> {
    let command = Command::DeviceGetIrqInfo;
    let info = IrqInfo { argsz: IrqInfo::SIZE as u32, index: irq::MSIX, ..IrqInfo::default() };
    let answer = link.call(command, &[&info.to_bytes()], &[])?;
    let info = IrqInfo::decode(&answer.payload).map_err(|error| ClientError::Answer(command, error))?;
    Ok(info.count)
}
