//! A client of the device: its messages, sans-IO.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use wire_vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, Header, IrqInfo, MessageType, ProtocolCapabilities, RegionAccess,
    RegionInfo, RegionReply, SetIrqs, VersionMessage, VfioUserCommand, device_flags, irq_set, region,
    region_flags,
};

use crate::IoatModel;
use crate::client_memory::ClientMemory;

/// Bytes of BAR 0, as of the processors.
const BAR_BYTES: u64 = 16 << 10;
const CONFIG_BYTES: u64 = 256;
/// Interrupt indices of a PCI device: INTx, MSI, MSI-X, error, request. None has a vector.
const IRQS: u32 = 5;
/// Vendor and device ID of the configuration space: Skylake's.
const IDENTITY: u32 = 0x2021_8086;
/// Offset and value of class and revision: another system peripheral.
const CLASS: (u64, u32) = (8, 0x0880_0000);

/// The memory and the negotiated state of a client.
#[derive(Default)]
pub(crate) struct ClientSession {
    pub(crate) memory: ClientMemory,
    has_version: bool,
}

impl ClientSession {
    /// The reply to a message; `None` if the client wants none.
    ///
    /// # Errors
    /// A violation of the protocol: the connection is to be closed.
    pub(crate) fn handle(
        &mut self,
        model: &mut IoatModel,
        header: &Header,
        payload: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<Vec<u8>>, &'static str> {
        if header.kind != MessageType::Request {
            return Err("a reply to no request");
        }
        let command = VfioUserCommand::from_wire(header.command);
        if self.has_version == (command == Some(VfioUserCommand::Version)) {
            return Err("the version is negotiated first, and once");
        }
        let result = match command {
            Some(command) => self.execute(model, command, payload, descriptors),
            None => Err(Errno::NOTSUP),
        };
        if header.no_reply {
            return Ok(None);
        }
        let reply = match result {
            Ok(payload) => [&header.reply(payload.len()).to_bytes()[..], &payload].concat(),
            Err(errno) => header.failure(errno.raw_os_error() as u32).to_bytes().to_vec(),
        };
        Ok(Some(reply))
    }

    fn execute(
        &mut self,
        model: &mut IoatModel,
        command: VfioUserCommand,
        payload: &[u8],
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Errno> {
        match command {
            VfioUserCommand::Version => {
                let theirs = VersionMessage::decode(payload).map_err(|_| Errno::INVAL)?;
                if theirs.major != VersionMessage::MAJOR {
                    return Err(Errno::NOTSUP);
                }
                self.has_version = true;
                let (major, minor) = (VersionMessage::MAJOR, VersionMessage::MINOR);
                let capabilities = ProtocolCapabilities::default();
                Ok(VersionMessage { major, minor, capabilities }.to_bytes())
            }
            VfioUserCommand::DeviceGetInfo => {
                let flags = device_flags::PCI | device_flags::RESET;
                let (argsz, regions) = (DeviceInfo::SIZE as u32, region::COUNT);
                Ok(DeviceInfo { argsz, flags, regions, irqs: IRQS }.to_bytes().to_vec())
            }
            VfioUserCommand::DeviceGetRegionInfo => {
                let info = RegionInfo::decode(payload).map_err(|_| Errno::INVAL)?;
                let (size, flags) = match info.index {
                    region::BAR0 => (BAR_BYTES, region_flags::READ | region_flags::WRITE),
                    region::CONFIG => (CONFIG_BYTES, region_flags::READ | region_flags::WRITE),
                    index if index < region::COUNT => (0, 0),
                    _ => return Err(Errno::INVAL),
                };
                let info = RegionInfo { flags, size, offset: 0, ..info };
                Ok(RegionReply { info, areas: Vec::new() }.to_bytes(info.argsz as usize))
            }
            VfioUserCommand::DeviceGetIrqInfo => {
                let info = IrqInfo::decode(payload).map_err(|_| Errno::INVAL)?;
                Ok(IrqInfo { argsz: IrqInfo::SIZE as u32, flags: 0, index: info.index, count: 0 }
                    .to_bytes()
                    .to_vec())
            }
            VfioUserCommand::DeviceSetIrqs => {
                let set = SetIrqs::decode(payload).map_err(|_| Errno::INVAL)?;
                if set.count == 0 && set.flags & irq_set::DATA_NONE != 0 {
                    Ok(Vec::new())
                } else {
                    Err(Errno::INVAL)
                }
            }
            VfioUserCommand::DmaMap => {
                let map = DmaMap::decode(payload).map_err(|_| Errno::INVAL)?;
                self.memory.map(&map, descriptors.pop()).map(|()| Vec::new())
            }
            VfioUserCommand::DmaUnmap => {
                let unmap = DmaUnmap::decode(payload).map_err(|_| Errno::INVAL)?;
                self.memory.unmap(&unmap).map(|()| payload[..DmaUnmap::SIZE].to_vec())
            }
            VfioUserCommand::RegionRead => read_region(model, payload),
            VfioUserCommand::RegionWrite => write_region(model, payload),
            VfioUserCommand::DeviceReset => {
                model.power_on();
                Ok(Vec::new())
            }
            _ => Err(Errno::NOTSUP),
        }
    }
}

fn access(payload: &[u8]) -> Result<RegionAccess, Errno> {
    let access = RegionAccess::decode(payload).map_err(|_| Errno::INVAL)?;
    let size = match access.region {
        region::BAR0 => BAR_BYTES,
        region::CONFIG => CONFIG_BYTES,
        _ => return Err(Errno::INVAL),
    };
    let is_inside = access.offset.checked_add(access.count.into()).is_some_and(|end| end <= size);
    if !is_inside || !matches!(access.count, 1 | 2 | 4 | 8) {
        return Err(Errno::INVAL);
    }
    Ok(access)
}

fn read_region(model: &IoatModel, payload: &[u8]) -> Result<Vec<u8>, Errno> {
    let access = access(payload)?;
    let count = access.count as usize;
    let value = match (access.region, access.offset) {
        (region::BAR0, offset) => model.read(offset as u32, count),
        (_, 0) => IDENTITY.into(),
        (_, 2) => u64::from(IDENTITY >> 16),
        (_, offset) if offset == CLASS.0 => CLASS.1.into(),
        _ => 0,
    };
    Ok([&access.to_bytes()[..], &value.to_le_bytes()[..count]].concat())
}

fn write_region(model: &mut IoatModel, payload: &[u8]) -> Result<Vec<u8>, Errno> {
    let access = access(payload)?;
    let data = payload.get(RegionAccess::SIZE..).unwrap_or_default();
    let count = access.count as usize;
    if data.len() != count {
        return Err(Errno::INVAL);
    }
    if access.region == region::BAR0 {
        let mut value = [0; 8];
        value[..count].copy_from_slice(data);
        model.write(access.offset as u32, count, u64::from_le_bytes(value));
    }
    Ok(access.to_bytes().to_vec())
}
