//! How a connection begins.

use serde_json::{Map, Value, json};

use crate::{DATA_BYTES_DEFAULT, DESCRIPTORS_DEFAULT, DMA_MAPS_DEFAULT, DecodeError};

/// Payload of `VERSION` and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Must be the same on both sides.
    pub major: u16,
    /// The reply's is at most the request's.
    pub minor: u16,
    /// What the sender can do.
    pub capabilities: Capabilities,
}

/// What the sender of a [`Version`] can do. What it does not say has the value of
/// [`Capabilities::default`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Descriptors that it takes with one message.
    pub max_msg_fds: u32,
    /// Bytes of data that it takes with one message.
    pub max_data_xfer_size: u32,
    /// Ranges of memory that can be mapped at a time.
    pub max_dma_maps: u32,
    /// Sizes of pages that ranges of memory can have, or'ed together.
    pub pgsizes: u64,
    /// It knows `REGION_WRITE_MULTI`.
    pub write_multiple: bool,
    /// It wants, or gives, a second socket for what the server asks of the client.
    pub twin_socket: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Capabilities {
            max_msg_fds: DESCRIPTORS_DEFAULT,
            max_data_xfer_size: DATA_BYTES_DEFAULT,
            max_dma_maps: DMA_MAPS_DEFAULT,
            pgsizes: 4096,
            write_multiple: false,
            twin_socket: false,
        }
    }
}

impl Version {
    /// The major version of the protocol described here.
    pub const MAJOR: u16 = 0;
    /// The minor version of the protocol described here.
    pub const MINOR: u16 = 1;
    /// Most bytes that a payload may have. What is said in it takes a few hundred.
    pub const BYTES_MAX: usize = 4096;

    /// Reads a payload.
    ///
    /// # Errors
    /// It is too short or too long, the capabilities do not end with a zero byte, are not a JSON object,
    /// or one of them is of another type than it has.
    pub fn decode(from: &[u8]) -> Result<Version, DecodeError> {
        let Some((head, text)) = from.split_first_chunk::<4>() else {
            return Err(DecodeError::Length { what: "Version", got: from.len(), need: 4 });
        };
        if from.len() > Version::BYTES_MAX {
            return Err(DecodeError::Value { what: "bytes of a Version", value: from.len() as u64 });
        }
        let mut head: &[u8] = head;
        let major = u16::from_le_bytes(crate::fields::next(&mut head));
        let minor = u16::from_le_bytes(crate::fields::next(&mut head));
        let capabilities = match text.split_last() {
            None => Capabilities::default(),
            Some((0, text)) => Capabilities::parse(text)?,
            Some(_) => return Err(DecodeError::Capabilities("no zero byte at the end")),
        };
        Ok(Version { major, minor, capabilities })
    }

    /// As bytes; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.major.to_le_bytes().to_vec();
        bytes.extend(self.minor.to_le_bytes());
        bytes.extend(json!({ "capabilities": self.capabilities.to_json() }).to_string().as_bytes());
        bytes.push(0);
        bytes
    }
}

impl Capabilities {
    fn parse(text: &[u8]) -> Result<Capabilities, DecodeError> {
        let value: Value = serde_json::from_slice(text).map_err(|_| DecodeError::Capabilities("no JSON"))?;
        let Value::Object(top) = value else { return Err(DecodeError::Capabilities("no object")) };
        let mut capabilities = Capabilities::default();
        let all = match top.get("capabilities") {
            None => return Ok(capabilities),
            Some(Value::Object(all)) => all,
            Some(_) => return Err(DecodeError::Capabilities("'capabilities' is no object")),
        };
        if let Some(count) = number(all, "max_msg_fds")? {
            capabilities.max_msg_fds = clamp(count);
        }
        if let Some(bytes) = number(all, "max_data_xfer_size")? {
            capabilities.max_data_xfer_size = clamp(bytes);
        }
        if let Some(count) = number(all, "max_dma_maps")? {
            capabilities.max_dma_maps = clamp(count);
        }
        if let Some(sizes) = number(all, "pgsizes")? {
            capabilities.pgsizes = sizes;
        }
        capabilities.write_multiple = boolean(all, "write_multiple")?;
        capabilities.twin_socket = match all.get("twin_socket") {
            None => false,
            Some(Value::Object(twin)) => boolean(twin, "supported")?,
            Some(_) => return Err(DecodeError::Capabilities("'twin_socket' is no object")),
        };
        Ok(capabilities)
    }

    fn to_json(self) -> Value {
        let mut all = json!({
            "max_msg_fds": self.max_msg_fds,
            "max_data_xfer_size": self.max_data_xfer_size,
            "max_dma_maps": self.max_dma_maps,
            "pgsizes": self.pgsizes,
            "write_multiple": self.write_multiple,
        });
        if self.twin_socket {
            all["twin_socket"] = json!({ "supported": true });
        }
        all
    }
}

fn clamp(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn number(all: &Map<String, Value>, name: &str) -> Result<Option<u64>, DecodeError> {
    match all.get(name) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(DecodeError::Capabilities("a number is none")),
    }
}

fn boolean(all: &Map<String, Value>, name: &str) -> Result<bool, DecodeError> {
    match all.get(name) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or(DecodeError::Capabilities("a boolean is none")),
    }
}
