//! What every message begins with.

use crate::DecodeError;

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Command {
    /// Propose a version and capabilities; the first message of a client.
    Version = 1,
    /// Let the server reach a range of the client's memory.
    DmaMap = 2,
    /// Take that back.
    DmaUnmap = 3,
    /// What the device is.
    DeviceGetInfo = 4,
    /// What a region of the device is.
    DeviceGetRegionInfo = 5,
    /// Descriptors that tell the server of writes to a region.
    DeviceGetRegionIoFds = 6,
    /// What a kind of interrupt is.
    DeviceGetIrqInfo = 7,
    /// Set interrupts up, mask them, or trigger them.
    DeviceSetIrqs = 8,
    /// Read from a region.
    RegionRead = 9,
    /// Write to a region.
    RegionWrite = 10,
    /// Of the server: read the client's memory.
    DmaRead = 11,
    /// Of the server: write the client's memory.
    DmaWrite = 12,
    /// Reset the device.
    DeviceReset = 13,
    /// Several small writes to regions.
    RegionWriteMulti = 15,
    /// Get, set or probe a feature of the device.
    DeviceFeature = 16,
    /// Read the device's state for its migration.
    MigrationRead = 17,
    /// Write the device's state for its migration.
    MigrationWrite = 18,
}

impl Command {
    /// Every command, by rising number.
    pub const ALL: [Command; 17] = [
        Command::Version,
        Command::DmaMap,
        Command::DmaUnmap,
        Command::DeviceGetInfo,
        Command::DeviceGetRegionInfo,
        Command::DeviceGetRegionIoFds,
        Command::DeviceGetIrqInfo,
        Command::DeviceSetIrqs,
        Command::RegionRead,
        Command::RegionWrite,
        Command::DmaRead,
        Command::DmaWrite,
        Command::DeviceReset,
        Command::RegionWriteMulti,
        Command::DeviceFeature,
        Command::MigrationRead,
        Command::MigrationWrite,
    ];

    /// The command with this number.
    pub fn from_wire(value: u16) -> Option<Command> {
        Command::ALL.into_iter().find(|command| command.to_wire() == value)
    }

    /// Its number.
    pub const fn to_wire(self) -> u16 {
        self as u16
    }
}

/// Whether a message asks or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It asks.
    Request,
    /// It answers the request with the same identifier.
    Reply,
}

/// The first 16 bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's name for the message; a reply carries that of its request.
    pub id: u16,
    /// What is asked for, raw; see [`Command`].
    pub command: u16,
    /// Bytes of the whole message, this header included.
    pub size: u32,
    /// Request or reply.
    pub kind: Kind,
    /// Of a request: it is not to be answered.
    pub no_reply: bool,
    /// Of a reply: what was asked for failed. There is no payload then.
    pub failed: bool,
    /// Of a reply that failed: the error number, or 0.
    pub errno: u32,
}

const TYPE_MASK: u32 = 0xf;
const NO_REPLY: u32 = 0x10;
const FAILED: u32 = 0x20;

impl Header {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// The header of a request that is to be answered, with so many bytes of payload.
    ///
    /// # Panics
    /// If the message would not fit 32 bits.
    pub fn request(id: u16, command: Command, payload_bytes: usize) -> Header {
        Header {
            id,
            command: command.to_wire(),
            size: whole(payload_bytes),
            kind: Kind::Request,
            no_reply: false,
            failed: false,
            errno: 0,
        }
    }

    /// The header of the answer to this request, with so many bytes of payload.
    ///
    /// # Panics
    /// If the message would not fit 32 bits.
    pub fn reply(&self, payload_bytes: usize) -> Header {
        Header {
            size: whole(payload_bytes),
            kind: Kind::Reply,
            no_reply: false,
            failed: false,
            errno: 0,
            ..*self
        }
    }

    /// The header of the answer to this request that says that it failed.
    pub fn failure(&self, errno: u32) -> Header {
        Header { failed: true, errno, ..self.reply(0) }
    }

    /// Bytes that follow the header.
    pub const fn payload_bytes(&self) -> usize {
        self.size as usize - Header::SIZE
    }

    /// Reads a header. The command may be one that nobody knows; flags that have no meaning are dropped.
    ///
    /// # Errors
    /// A type that is neither request nor reply, and a size that does not even hold the header.
    pub fn decode(from: &[u8; Header::SIZE]) -> Result<Header, DecodeError> {
        let mut rest: &[u8] = from;
        let id = u16::from_le_bytes(crate::fields::next(&mut rest));
        let command = u16::from_le_bytes(crate::fields::next(&mut rest));
        let size = u32::from_le_bytes(crate::fields::next(&mut rest));
        let flags = u32::from_le_bytes(crate::fields::next(&mut rest));
        let errno = u32::from_le_bytes(crate::fields::next(&mut rest));
        let kind = match flags & TYPE_MASK {
            0 => Kind::Request,
            1 => Kind::Reply,
            other => return Err(DecodeError::Value { what: "message type", value: other.into() }),
        };
        if (size as usize) < Header::SIZE {
            return Err(DecodeError::Value { what: "message size", value: size.into() });
        }
        let (no_reply, failed) = (flags & NO_REPLY != 0, flags & FAILED != 0);
        Ok(Header { id, command, size, kind, no_reply, failed, errno })
    }

    /// As bytes; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> [u8; Header::SIZE] {
        let kind = match self.kind {
            Kind::Request => 0,
            Kind::Reply => 1,
        };
        let flags = kind | if self.no_reply { NO_REPLY } else { 0 } | if self.failed { FAILED } else { 0 };
        let mut bytes = [0; Header::SIZE];
        let mut rest: &mut [u8] = &mut bytes;
        crate::fields::put(&mut rest, &self.id.to_le_bytes());
        crate::fields::put(&mut rest, &self.command.to_le_bytes());
        crate::fields::put(&mut rest, &self.size.to_le_bytes());
        crate::fields::put(&mut rest, &flags.to_le_bytes());
        crate::fields::put(&mut rest, &self.errno.to_le_bytes());
        bytes
    }
}

fn whole(payload_bytes: usize) -> u32 {
    u32::try_from(Header::SIZE + payload_bytes).expect("a message is below 4 GiB")
}
