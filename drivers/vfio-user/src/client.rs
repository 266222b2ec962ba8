//! The client of one device.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use dma::{ChunkMemory, SharedRegion};
use sockets::StreamAddress;
use wire_vfio_user::{
    DATA_BYTES_DEFAULT, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, ProtocolCapabilities, RegionAccess,
    RegionInfo, RegionReply, SetIrqs, SparseArea, VersionMessage, VfioUserCommand, device_flags, irq,
    irq_set, region_flags,
};

use crate::VfioUserError;
use crate::connection::{ClientConnection, DESCRIPTORS_MAX};

/// Name of the socket in a device's directory, as in SPDK.
const SOCKET: &str = "cntrl";
/// Most regions of a device: the 9 of a PCI device, and some device-specific ones.
const REGIONS_MAX: u32 = 32;
/// Reply size for region information with capabilities.
const REGION_REPLY_BYTES: u32 = 1024;
/// Most descriptors in one message to a server, whatever limit it advertises. libvfio-user accepts 8.
const SERVER_DESCRIPTORS_MAX: u32 = 8;

/// Options of a [`VfioUserClient`].
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Time that the server may take for replies, including those of a reset, to one request or to several
    /// that follow each other: what they take is added up, less a tenth of the time that passes.
    pub timeout: Duration,
    /// Replies that take no longer cost nothing of `timeout`: for devices whose doorbells are messages.
    pub prompt: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        // A reset waits for the I/O in flight.
        ClientConfig { timeout: Duration::from_secs(10), prompt: Duration::ZERO }
    }
}

/// A region of the device.
#[derive(Debug)]
pub struct DeviceRegion {
    /// Size in bytes; 0 if the region does not exist.
    pub size: u64,
    /// The region can be read.
    pub readable: bool,
    /// The region can be written.
    pub writable: bool,
    /// The areas that can be mapped.
    pub areas: Vec<SparseArea>,
    /// Offset of the region in the descriptor's file.
    offset: u64,
    descriptor: Option<OwnedFd>,
}

/// Connects without waiting: a blocking connect has no time limit while the server accepts nothing.
fn open(socket: &Path) -> io::Result<UnixStream> {
    let stream = sockets::connect(&StreamAddress::Unix(socket.to_path_buf()))?;
    let stream = UnixStream::from(OwnedFd::from(stream));
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A connection to a server, and the device that it serves.
///
/// It owns the socket and the regions' file descriptors. Calls block until the reply arrives or the server
/// has used up its time, [`ClientConfig::timeout`] for all of them together; after a timeout or a protocol
/// violation every further call fails, since the stream is out of sync. Dropping the client closes the
/// connection, which unmaps all memory from the device and removes its interrupts.
pub struct VfioUserClient {
    path: PathBuf,
    connection: Mutex<ClientConnection>,
    regions: Vec<DeviceRegion>,
    capabilities: ProtocolCapabilities,
    supports_reset: bool,
    msix_vectors: u32,
}

impl VfioUserClient {
    /// Connects to the server at `path`, a socket or a directory with a socket `cntrl`, negotiates the
    /// version and reads the device's description.
    ///
    /// # Errors
    /// No server listens there, it is busy with another client, does not serve a PCI device, or times out.
    pub fn connect(path: &Path, config: &ClientConfig) -> Result<VfioUserClient, VfioUserError> {
        let socket = if path.is_dir() { path.join(SOCKET) } else { path.to_owned() };
        let stream = open(&socket).map_err(|error| VfioUserError::Connect(socket, error))?;
        let mut connection = ClientConnection::new(stream, config.timeout, config.prompt)?;
        let capabilities = negotiate(&mut connection)?;
        let info = DeviceInfo { argsz: DeviceInfo::SIZE as u32, ..DeviceInfo::default() };
        let command = VfioUserCommand::DeviceGetInfo;
        let response = connection.call(command, &[&info.to_bytes()], &[])?;
        let info = DeviceInfo::decode(&response.payload)
            .map_err(|error| VfioUserError::InvalidReply(command, error))?;
        if info.flags & device_flags::PCI == 0 || info.regions <= crate::CONFIG || info.regions > REGIONS_MAX
        {
            return Err(VfioUserError::ProtocolViolation(command, "the device is not a PCI device"));
        }
        let regions = (0..info.regions).map(|index| query_region(&mut connection, index));
        let regions = regions.collect::<Result<_, _>>()?;
        let msix_vectors = if info.irqs > irq::MSIX { query_msix_vectors(&mut connection)? } else { 0 };
        let supports_reset = info.flags & device_flags::RESET != 0;
        let path = path.to_owned();
        Ok(VfioUserClient {
            path,
            connection: Mutex::new(connection),
            regions,
            capabilities,
            supports_reset,
            msix_vectors,
        })
    }

    /// The path that was passed to [`connect`](Self::connect).
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The device's regions, by index.
    pub fn regions(&self) -> &[DeviceRegion] {
        &self.regions
    }

    /// Number of MSI-X vectors of the device.
    pub fn msix_vectors(&self) -> u32 {
        self.msix_vectors
    }

    /// Whether the connection is still open. Costs a system call.
    pub fn is_present(&self) -> bool {
        self.connection().is_open()
    }

    /// Whether the server has closed the connection: one that does not answer has not, and may still use what
    /// is mapped for it. Costs a system call.
    pub fn has_ended(&self) -> bool {
        self.connection().is_closed()
    }

    /// Reads from a region by message.
    ///
    /// # Errors
    /// The range is not in the region, or the server rejects the access; a device may reject sizes and
    /// alignments.
    pub fn region_read(&self, region: u32, offset: u64, out: &mut [u8]) -> Result<(), VfioUserError> {
        self.check_range(region, offset, out.len() as u64)?;
        let step = self.capabilities.max_data_xfer_size.clamp(8, DATA_BYTES_DEFAULT) as usize;
        for (index, part) in out.chunks_mut(step).enumerate() {
            let offset = offset + (index * step) as u64;
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            let command = VfioUserCommand::RegionRead;
            let response = self.connection().call(command, &[&access.to_bytes()], &[])?;
            let echo = RegionAccess::decode(&response.payload);
            let echo = echo.map_err(|error| VfioUserError::InvalidReply(command, error))?;
            let data = &response.payload[RegionAccess::SIZE..];
            if echo.count != access.count || data.len() != part.len() {
                return Err(VfioUserError::ProtocolViolation(command, "the length differs from the request"));
            }
            part.copy_from_slice(data);
        }
        Ok(())
    }

    /// Writes to a region by message, and waits for the reply.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), VfioUserError> {
        self.check_range(region, offset, data.len() as u64)?;
        let step = self.capabilities.max_data_xfer_size.clamp(8, DATA_BYTES_DEFAULT) as usize;
        for (index, part) in data.chunks(step).enumerate() {
            let offset = offset + (index * step) as u64;
            let access = RegionAccess { offset, region, count: part.len() as u32 };
            self.connection().call(VfioUserCommand::RegionWrite, &[&access.to_bytes(), part], &[])?;
        }
        Ok(())
    }

    /// Reads a 32-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn read_u32(&self, region: u32, offset: u64) -> Result<u32, VfioUserError> {
        let mut bytes = [0; 4];
        self.region_read(region, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a 64-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn read_u64(&self, region: u32, offset: u64) -> Result<u64, VfioUserError> {
        let mut bytes = [0; 8];
        self.region_read(region, offset, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a 32-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn write_u32(&self, region: u32, offset: u64, value: u32) -> Result<(), VfioUserError> {
        self.region_write(region, offset, &value.to_le_bytes())
    }

    /// Writes a 64-bit register.
    ///
    /// # Errors
    /// As [`region_read`](Self::region_read).
    pub fn write_u64(&self, region: u32, offset: u64, value: u64) -> Result<(), VfioUserError> {
        self.region_write(region, offset, &value.to_le_bytes())
    }

    /// Maps a part of a region; `offset` and `bytes` are multiples of the page size. The server polls the
    /// mapped memory, so stores reach it without a message.
    ///
    /// # Errors
    /// The part is not in a mappable area, or mmap fails.
    pub fn map_region(&self, region: u32, offset: u64, bytes: u64) -> Result<SharedRegion, VfioUserError> {
        self.check_range(region, offset, bytes)?;
        let not_mappable = || VfioUserError::NotMappable { region, offset, bytes };
        let found = self.regions.get(region as usize).ok_or_else(not_mappable)?;
        let covers = |area: &SparseArea| {
            let end = area.offset.saturating_add(area.size);
            area.offset <= offset && offset + bytes <= end
        };
        let descriptor = found.descriptor.as_ref().filter(|_| found.areas.iter().any(covers));
        let descriptor = descriptor.ok_or_else(not_mappable)?;
        let at = found.offset.checked_add(offset).ok_or_else(not_mappable)?;
        Ok(SharedRegion::map(descriptor.as_fd(), at, bytes, found.writable)?)
    }

    /// Maps a chunk of buffer memory for DMA at its address in this process, and returns that address.
    ///
    /// # Errors
    /// The arena's memory is private to this process, or the server rejects the mapping.
    pub fn dma_map(&self, chunk: &ChunkMemory) -> Result<u64, VfioUserError> {
        let file = chunk.file.as_ref().ok_or(VfioUserError::PrivateMemory)?;
        let address = chunk.start.addr() as u64;
        self.dma_map_file(address, file.as_fd(), 0, chunk.bytes as u64, true)?;
        Ok(address)
    }

    /// Maps `bytes` bytes of a file from `offset` for DMA at `address`: readable and, if `writable`,
    /// writable.
    ///
    /// # Errors
    /// The server rejects the mapping: it overlaps another one, for example, or there are too many.
    pub fn dma_map_file(
        &self,
        address: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<(), VfioUserError> {
        let map = DmaMap::new(address, bytes, offset, writable);
        self.connection().call(VfioUserCommand::DmaMap, &[&map.to_bytes()], &[file])?;
        Ok(())
    }

    /// Unmaps memory from the device. After the call returns, the device no longer accesses it.
    ///
    /// # Errors
    /// No mapping has exactly this address and size.
    pub fn dma_unmap(&self, address: u64, bytes: u64) -> Result<(), VfioUserError> {
        self.connection().call(
            VfioUserCommand::DmaUnmap,
            &[&DmaUnmap::new(address, bytes).to_bytes()],
            &[],
        )?;
        Ok(())
    }

    /// Sets the eventfds of the MSI-X vectors, from vector 0; an empty list removes all.
    ///
    /// # Errors
    /// The device has fewer vectors, or the server rejects the request.
    pub fn set_interrupts(&self, eventfds: &[BorrowedFd<'_>]) -> Result<(), VfioUserError> {
        let requested = u32::try_from(eventfds.len()).unwrap_or(u32::MAX);
        if requested > self.msix_vectors {
            return Err(VfioUserError::Interrupts { have: self.msix_vectors, want: requested });
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
            self.connection().call(VfioUserCommand::DeviceSetIrqs, &[&none.to_bytes()], &[])?;
            return Ok(());
        }
        let step = (self.capabilities.max_msg_fds as usize).clamp(1, DESCRIPTORS_MAX);
        for (index, part) in eventfds.chunks(step).enumerate() {
            let set = set(irq_set::DATA_EVENTFD, (index * step) as u32, part.len() as u32);
            self.connection().call(VfioUserCommand::DeviceSetIrqs, &[&set.to_bytes()], part)?;
        }
        Ok(())
    }

    /// Resets the device. No I/O is in flight when the call returns.
    ///
    /// # Errors
    /// The device does not support reset, the server fails it, or it times out.
    pub fn reset(&self) -> Result<(), VfioUserError> {
        if !self.supports_reset {
            return Err(VfioUserError::ResetUnsupported);
        }
        self.connection().call(VfioUserCommand::DeviceReset, &[], &[])?;
        Ok(())
    }

    fn check_range(&self, region: u32, offset: u64, bytes: u64) -> Result<(), VfioUserError> {
        let size = self.regions.get(region as usize).map_or(0, |region| region.size);
        if bytes == 0 || offset.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(VfioUserError::OutOfRange { region, offset, bytes, size });
        }
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, ClientConnection> {
        // A call that panicked left the connection marked as broken.
        sync::lock(&self.connection)
    }
}

impl fmt::Display for VfioUserClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "vfio-user:{}", self.path.display())
    }
}

impl fmt::Debug for VfioUserClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("VfioUserClient").field("path", &self.path).finish_non_exhaustive()
    }
}

fn negotiate(connection: &mut ClientConnection) -> Result<ProtocolCapabilities, VfioUserError> {
    let command = VfioUserCommand::Version;
    let capabilities =
        ProtocolCapabilities { max_msg_fds: DESCRIPTORS_MAX as u32, ..ProtocolCapabilities::default() };
    let proposed =
        VersionMessage { major: VersionMessage::MAJOR, minor: VersionMessage::MINOR, capabilities };
    let response = connection.call(command, &[&proposed.to_bytes()], &[])?;
    let server_version = VersionMessage::decode(&response.payload)
        .map_err(|error| VfioUserError::InvalidReply(command, error))?;
    if server_version.major != VersionMessage::MAJOR || server_version.minor > VersionMessage::MINOR {
        return Err(VfioUserError::Version(server_version.major, server_version.minor));
    }
    let max_msg_fds = server_version.capabilities.max_msg_fds.clamp(1, SERVER_DESCRIPTORS_MAX);
    Ok(ProtocolCapabilities { max_msg_fds, ..server_version.capabilities })
}

fn query_region(connection: &mut ClientConnection, index: u32) -> Result<DeviceRegion, VfioUserError> {
    let command = VfioUserCommand::DeviceGetRegionInfo;
    let info = RegionInfo { argsz: REGION_REPLY_BYTES, index, ..RegionInfo::default() };
    let response = connection.call(command, &[&info.to_bytes()], &[])?;
    let reply = RegionReply::decode(&response.payload)
        .map_err(|error| VfioUserError::InvalidReply(command, error))?;
    let RegionInfo { flags, size, offset, .. } = reply.info;
    let mappable = flags & region_flags::MMAP != 0;
    let areas = match (mappable, reply.areas.is_empty()) {
        (false, _) => Vec::new(),
        (true, true) => vec![SparseArea { offset: 0, size }],
        (true, false) => reply.areas,
    };
    let descriptor = response.descriptors.into_iter().next().filter(|_| mappable);
    Ok(DeviceRegion {
        size,
        readable: flags & region_flags::READ != 0,
        writable: flags & region_flags::WRITE != 0,
        areas,
        offset,
        descriptor,
    })
}

fn query_msix_vectors(connection: &mut ClientConnection) -> Result<u32, VfioUserError> {
    let command = VfioUserCommand::DeviceGetIrqInfo;
    let info = IrqInfo { argsz: IrqInfo::SIZE as u32, index: irq::MSIX, ..IrqInfo::default() };
    let response = connection.call(command, &[&info.to_bytes()], &[])?;
    let info =
        IrqInfo::decode(&response.payload).map_err(|error| VfioUserError::InvalidReply(command, error))?;
    Ok(info.count)
}
