//! Version and capability negotiation.

use serde_json::{Map, Value, json};

use crate::{DATA_BYTES_DEFAULT, DESCRIPTORS_DEFAULT, DMA_MAPS_DEFAULT, DecodeError};

/// Payload of `VERSION` and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionMessage {
    /// Major version; must be equal on both sides.
    pub major: u16,
    /// Minor version; that of the reply is at most that of the request.
    pub minor: u16,
    /// Capabilities of the sender.
    pub capabilities: ProtocolCapabilities,
}

/// The capabilities of the sender of a [`VersionMessage`]. Missing ones have the value of
/// [`ProtocolCapabilities::default`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolCapabilities {
    /// Most file descriptors that it accepts with one message.
    pub max_msg_fds: u32,
    /// Most bytes of data that it accepts in one message.
    pub max_data_xfer_size: u32,
    /// Most memory ranges that are mapped at a time.
    pub max_dma_maps: u32,
    /// Supported page sizes of memory ranges, as a bit mask.
    pub pgsizes: u64,
    /// It supports `REGION_WRITE_MULTI`.
    pub write_multiple: bool,
    /// It supports a second socket for requests of the server.
    pub twin_socket: bool,
}

impl Default for ProtocolCapabilities {
    fn default() -> Self {
        ProtocolCapabilities {
            max_msg_fds: DESCRIPTORS_DEFAULT,
            max_data_xfer_size: DATA_BYTES_DEFAULT,
            max_dma_maps: DMA_MAPS_DEFAULT,
            pgsizes: 4096,
            write_multiple: false,
            twin_socket: false,
        }
    }
}

impl VersionMessage {
    /// The supported major version.
    pub const MAJOR: u16 = 0;
    /// The supported minor version.
    pub const MINOR: u16 = 1;
    /// Most bytes of a payload; typical ones have a few hundred.
    pub const BYTES_MAX: usize = 4096;

    /// Decodes a payload.
    ///
    /// # Errors
    /// The payload is too short or too long, the capabilities do not end with a zero byte or are not a JSON
    /// object, or a capability has the wrong JSON type.
    pub fn decode(from: &[u8]) -> Result<VersionMessage, DecodeError> {
        let Some((version, text)) = from.split_first_chunk::<4>() else {
            return Err(DecodeError::Length { what: "VersionMessage", got: from.len(), need: 4 });
        };
        if from.len() > VersionMessage::BYTES_MAX {
            return Err(DecodeError::value("bytes of a VersionMessage", 0, from.len() as u64));
        }
        let mut version: &[u8] = version;
        let major = u16::from_le_bytes(codec::next_field(&mut version));
        let minor = u16::from_le_bytes(codec::next_field(&mut version));
        let capabilities = match text.split_last() {
            None => ProtocolCapabilities::default(),
            Some((0, text)) => ProtocolCapabilities::parse(text)?,
            Some(_) => return Err(invalid("no zero byte at the end")),
        };
        Ok(VersionMessage { major, minor, capabilities })
    }

    /// Encodes the payload; the inverse of [`decode`](Self::decode).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.major.to_le_bytes().to_vec();
        bytes.extend(self.minor.to_le_bytes());
        bytes.extend(json!({ "capabilities": self.capabilities.to_json() }).to_string().as_bytes());
        bytes.push(0);
        bytes
    }
}

impl ProtocolCapabilities {
    fn parse(text: &[u8]) -> Result<ProtocolCapabilities, DecodeError> {
        let value: Value = serde_json::from_slice(text).map_err(|_| invalid("not JSON"))?;
        let Value::Object(top) = value else { return Err(invalid("not an object")) };
        let mut capabilities = ProtocolCapabilities::default();
        let all = match top.get("capabilities") {
            None => return Ok(capabilities),
            Some(Value::Object(all)) => all,
            Some(_) => return Err(invalid("'capabilities' is not an object")),
        };
        if let Some(count) = number(all, "max_msg_fds")? {
            capabilities.max_msg_fds = saturate(count);
        }
        if let Some(bytes) = number(all, "max_data_xfer_size")? {
            capabilities.max_data_xfer_size = saturate(bytes);
        }
        if let Some(count) = number(all, "max_dma_maps")? {
            capabilities.max_dma_maps = saturate(count);
        }
        if let Some(sizes) = number(all, "pgsizes")? {
            capabilities.pgsizes = sizes;
        }
        capabilities.write_multiple = boolean(all, "write_multiple")?;
        capabilities.twin_socket = match all.get("twin_socket") {
            None => false,
            Some(Value::Object(twin)) => boolean(twin, "supported")?,
            Some(_) => return Err(invalid("'twin_socket' is not an object")),
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

fn saturate(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The capabilities are not a JSON object that ends with a zero byte.
fn invalid(reason: &'static str) -> DecodeError {
    DecodeError::Text { what: "the capabilities are not a JSON object", reason }
}

fn number(all: &Map<String, Value>, name: &str) -> Result<Option<u64>, DecodeError> {
    match all.get(name) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(invalid("a value is not a number")),
    }
}

fn boolean(all: &Map<String, Value>, name: &str) -> Result<bool, DecodeError> {
    match all.get(name) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or(invalid("a value is not a boolean")),
    }
}
