//! The header of every message.

use crate::DecodeError;

macro_rules! requests {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl $name {
            /// All requests, by ascending number.
            pub const ALL: &[$name] = &[$($name::$variant,)*];

            /// The request with this number; `None` if it is unknown.
            pub const fn from_wire(value: u32) -> Option<$name> {
                match value {
                    $($value => Some($name::$variant),)*
                    _ => None,
                }
            }

            /// The number of the request.
            pub const fn to_wire(self) -> u32 {
                self as u32
            }
        }
    };
}

requests! {
    /// A request of the front-end. Those that only other devices than block devices have are left out.
    FrontendRequest {
        /// Get the features that the device supports.
        GetFeatures = 1,
        /// Set the features that were negotiated.
        SetFeatures = 2,
        /// The first request of a session.
        SetOwner = 3,
        /// Deprecated.
        ResetOwner = 4,
        /// Set all memory regions.
        SetMemTable = 5,
        /// Set the memory of the log of dirty pages.
        SetLogBase = 6,
        /// Set the eventfd that is signalled when the log was written.
        SetLogFd = 7,
        /// Set the size of a virtqueue.
        SetVringNum = 8,
        /// Set the addresses of a virtqueue.
        SetVringAddr = 9,
        /// Set the next available index of a virtqueue.
        SetVringBase = 10,
        /// Stop a virtqueue and get its next available index.
        GetVringBase = 11,
        /// Set the eventfd that the driver signals; starts the virtqueue.
        SetVringKick = 12,
        /// Set the eventfd that the device signals.
        SetVringCall = 13,
        /// Set the eventfd that the device signals when an error occurs.
        SetVringErr = 14,
        /// Get [`ProtocolFeatures`](crate::ProtocolFeatures).
        GetProtocolFeatures = 15,
        /// Set the protocol features that were negotiated.
        SetProtocolFeatures = 16,
        /// Get the maximum number of virtqueues.
        GetQueueNum = 17,
        /// Enable or disable a virtqueue.
        SetVringEnable = 18,
        /// Set the socket for the back-end's requests.
        SetBackendReqFd = 21,
        /// Set the byte order of a virtqueue of a legacy device.
        SetVringEndian = 23,
        /// Read the configuration space.
        GetConfig = 24,
        /// Write the configuration space.
        SetConfig = 25,
        /// Get memory for requests in flight.
        GetInflightFd = 31,
        /// Set memory with requests in flight.
        SetInflightFd = 32,
        /// Reset the device.
        ResetDevice = 34,
        /// Get the maximum number of memory regions.
        GetMaxMemSlots = 36,
        /// Add a memory region.
        AddMemReg = 37,
        /// Remove a memory region.
        RemMemReg = 38,
        /// Set the device status of virtio.
        SetStatus = 39,
        /// Get the device status of virtio.
        GetStatus = 40,
    }
}

requests! {
    /// A request of the back-end.
    BackendRequest {
        /// The configuration space has changed.
        ConfigChange = 2,
    }
}

/// The first 12 bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VhostUserHeader {
    /// Number of the request; it may be unknown. A reply has that of its request.
    pub request: u32,
    /// It is a reply.
    pub is_reply: bool,
    /// With `REPLY_ACK`, of a request that has no reply otherwise: an acknowledgement is expected.
    pub needs_reply: bool,
    /// Bytes of the payload after the header.
    pub payload_bytes: u32,
}

const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

impl VhostUserHeader {
    /// Bytes on the wire.
    pub const SIZE: usize = 12;

    /// The header of a request without acknowledgement.
    pub const fn request(request: u32, payload_bytes: u32) -> VhostUserHeader {
        VhostUserHeader { request, is_reply: false, needs_reply: false, payload_bytes }
    }

    /// The header of the reply to this request.
    pub const fn reply(&self, payload_bytes: u32) -> VhostUserHeader {
        VhostUserHeader { request: self.request, is_reply: true, needs_reply: false, payload_bytes }
    }

    /// Decodes a header. Undefined flags are ignored.
    ///
    /// # Errors
    /// The version is not 1.
    pub fn decode(from: &[u8; VhostUserHeader::SIZE]) -> Result<VhostUserHeader, DecodeError> {
        let mut rest: &[u8] = from;
        let request = u32::from_le_bytes(codec::next_field(&mut rest));
        let flags = u32::from_le_bytes(codec::next_field(&mut rest));
        let payload_bytes = u32::from_le_bytes(codec::next_field(&mut rest));
        if flags & VERSION_MASK != VERSION {
            return Err(DecodeError::value("vhost-user version", 4, (flags & VERSION_MASK).into()));
        }
        Ok(VhostUserHeader {
            request,
            is_reply: flags & REPLY != 0,
            needs_reply: flags & NEED_REPLY != 0,
            payload_bytes,
        })
    }

    /// Encodes the header; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> [u8; VhostUserHeader::SIZE] {
        let reply = if self.is_reply { REPLY } else { 0 };
        let flags = VERSION | reply | if self.needs_reply { NEED_REPLY } else { 0 };
        let mut bytes = [0; VhostUserHeader::SIZE];
        let mut rest: &mut [u8] = &mut bytes;
        codec::put_field(&mut rest, &self.request.to_le_bytes());
        codec::put_field(&mut rest, &flags.to_le_bytes());
        codec::put_field(&mut rest, &self.payload_bytes.to_le_bytes());
        bytes
    }
}
