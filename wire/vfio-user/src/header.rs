//! The header of every message.

use crate::DecodeError;

/// The command of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum VfioUserCommand {
    /// Propose a version and capabilities; the first message of a client.
    Version = 1,
    /// Map a range of the client's memory for DMA.
    DmaMap = 2,
    /// Unmap a range of the client's memory.
    DmaUnmap = 3,
    /// Query the device.
    DeviceGetInfo = 4,
    /// Query a region of the device.
    DeviceGetRegionInfo = 5,
    /// Get file descriptors that signal writes to a region (ioeventfds).
    DeviceGetRegionIoFds = 6,
    /// Query an interrupt type.
    DeviceGetIrqInfo = 7,
    /// Set up, mask or trigger interrupts.
    DeviceSetIrqs = 8,
    /// Read from a region.
    RegionRead = 9,
    /// Write to a region.
    RegionWrite = 10,
    /// Sent by the server: read the client's memory.
    DmaRead = 11,
    /// Sent by the server: write the client's memory.
    DmaWrite = 12,
    /// Reset the device.
    DeviceReset = 13,
    /// Several small writes to regions.
    RegionWriteMulti = 15,
    /// Get, set or probe a feature of the device.
    DeviceFeature = 16,
    /// Read the device's migration state.
    MigrationRead = 17,
    /// Write the device's migration state.
    MigrationWrite = 18,
}

impl VfioUserCommand {
    /// All commands, by ascending number.
    pub const ALL: [VfioUserCommand; 17] = [
        VfioUserCommand::Version,
        VfioUserCommand::DmaMap,
        VfioUserCommand::DmaUnmap,
        VfioUserCommand::DeviceGetInfo,
        VfioUserCommand::DeviceGetRegionInfo,
        VfioUserCommand::DeviceGetRegionIoFds,
        VfioUserCommand::DeviceGetIrqInfo,
        VfioUserCommand::DeviceSetIrqs,
        VfioUserCommand::RegionRead,
        VfioUserCommand::RegionWrite,
        VfioUserCommand::DmaRead,
        VfioUserCommand::DmaWrite,
        VfioUserCommand::DeviceReset,
        VfioUserCommand::RegionWriteMulti,
        VfioUserCommand::DeviceFeature,
        VfioUserCommand::MigrationRead,
        VfioUserCommand::MigrationWrite,
    ];

    /// The command with this number; `None` if it is unknown.
    pub fn from_wire(value: u16) -> Option<VfioUserCommand> {
        VfioUserCommand::ALL.into_iter().find(|command| command.to_wire() == value)
    }

    /// The command's number on the wire.
    pub const fn to_wire(self) -> u16 {
        self as u16
    }
}

/// The type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// A request.
    Request,
    /// The reply to the request with the same message ID.
    Reply,
}

/// The first 16 bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Message ID, chosen by the requester; a reply has that of its request.
    pub id: u16,
    /// Command number; see [`VfioUserCommand`]. It may be unknown.
    pub command: u16,
    /// Bytes of the message, including this header.
    pub size: u32,
    /// Request or reply.
    pub kind: MessageType,
    /// Of a request: the requester expects no reply.
    pub no_reply: bool,
    /// Of a reply: the request failed. There is no payload then.
    pub failed: bool,
    /// Of a failed reply: the errno, or 0.
    pub errno: u32,
}

const TYPE_MASK: u32 = 0xf;
const NO_REPLY: u32 = 0x10;
const FAILED: u32 = 0x20;

impl Header {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// The header of a request that expects a reply.
    ///
    /// # Panics
    /// If the message size does not fit into 32 bits.
    pub fn request(id: u16, command: VfioUserCommand, payload_bytes: usize) -> Header {
        Header {
            id,
            command: command.to_wire(),
            size: message_size(payload_bytes),
            kind: MessageType::Request,
            no_reply: false,
            failed: false,
            errno: 0,
        }
    }

    /// The header of the reply to this request.
    ///
    /// # Panics
    /// If the message size does not fit into 32 bits.
    pub fn reply(&self, payload_bytes: usize) -> Header {
        Header {
            size: message_size(payload_bytes),
            kind: MessageType::Reply,
            no_reply: false,
            failed: false,
            errno: 0,
            ..*self
        }
    }

    /// The header of the reply that fails this request.
    pub fn failure(&self, errno: u32) -> Header {
        Header { failed: true, errno, ..self.reply(0) }
    }

    /// Bytes of payload after the header.
    pub const fn payload_bytes(&self) -> usize {
        self.size as usize - Header::SIZE
    }

    /// Decodes a header. Unknown commands are accepted; undefined flags are ignored.
    ///
    /// # Errors
    /// The type is neither request nor reply, or the size is less than that of the header.
    pub fn decode(from: &[u8; Header::SIZE]) -> Result<Header, DecodeError> {
        let mut rest: &[u8] = from;
        let id = u16::from_le_bytes(codec::next_field(&mut rest));
        let command = u16::from_le_bytes(codec::next_field(&mut rest));
        let size = u32::from_le_bytes(codec::next_field(&mut rest));
        let flags = u32::from_le_bytes(codec::next_field(&mut rest));
        let errno = u32::from_le_bytes(codec::next_field(&mut rest));
        let kind = match flags & TYPE_MASK {
            0 => MessageType::Request,
            1 => MessageType::Reply,
            other => return Err(DecodeError::value("message type", 8, other.into())),
        };
        if (size as usize) < Header::SIZE {
            return Err(DecodeError::value("message size", 4, size.into()));
        }
        let (no_reply, failed) = (flags & NO_REPLY != 0, flags & FAILED != 0);
        Ok(Header { id, command, size, kind, no_reply, failed, errno })
    }

    /// Encodes the header; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> [u8; Header::SIZE] {
        let kind = match self.kind {
            MessageType::Request => 0,
            MessageType::Reply => 1,
        };
        let flags = kind | if self.no_reply { NO_REPLY } else { 0 } | if self.failed { FAILED } else { 0 };
        let mut bytes = [0; Header::SIZE];
        let mut rest: &mut [u8] = &mut bytes;
        codec::put_field(&mut rest, &self.id.to_le_bytes());
        codec::put_field(&mut rest, &self.command.to_le_bytes());
        codec::put_field(&mut rest, &self.size.to_le_bytes());
        codec::put_field(&mut rest, &flags.to_le_bytes());
        codec::put_field(&mut rest, &self.errno.to_le_bytes());
        bytes
    }
}

fn message_size(payload_bytes: usize) -> u32 {
    u32::try_from(Header::SIZE + payload_bytes).expect("a message is below 4 GiB")
}
