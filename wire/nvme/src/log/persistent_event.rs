//! Persistent Event log page (Base 2.0, section 5.16.1.14).

use crate::DecodeError;
use crate::identify;
use crate::le::{array_at, put, put16, put32, put64, u16_at, u32_at, u64_at, u128_at};

/// Values of the Action field of the Log Specific Parameter, bits 1:0.
pub mod persistent_event_action {
    /// Bits of the field.
    pub const MASK: u8 = 3;
    /// Read data of the reporting context.
    pub const READ: u8 = 0;
    /// Establish a reporting context, and read its data.
    pub const ESTABLISH: u8 = 1;
    /// Release the reporting context.
    pub const RELEASE: u8 = 2;
}

wire_enum! {
    /// Persistent Event Type.
    PersistentEventType: u8 {
        /// SMART / Health Log Snapshot; the data is that page.
        HealthSnapshot = 0x01,
        /// Firmware Commit.
        FirmwareCommit = 0x02,
        /// Timestamp Change.
        TimestampChange = 0x03,
        /// Power-on or Reset; see [`ControllerReset`].
        PowerOnOrReset = 0x04,
        /// NVM Subsystem Hardware Error.
        HardwareError = 0x05,
        /// Change Namespace; see [`ChangeNamespace`].
        ChangeNamespace = 0x06,
        /// Format NVM Start.
        FormatStart = 0x07,
        /// Format NVM Completion.
        FormatCompletion = 0x08,
        /// Sanitize Start.
        SanitizeStart = 0x09,
        /// Sanitize Completion.
        SanitizeCompletion = 0x0a,
        /// Set Feature; see [`SetFeature`].
        SetFeature = 0x0b,
        /// Telemetry Log Created.
        TelemetryLogCreated = 0x0c,
        /// Thermal Excursion.
        ThermalExcursion = 0x0d,
    }
}

/// A time of the wall clock in the format of the Timestamp feature (Base 2.0, section 5.27.1.8): 48 bits of
/// milliseconds since 1970, and 001b as Timestamp Origin, because 000b counts from a reset.
pub const fn event_timestamp(unix_ms: u64) -> u64 {
    unix_ms & 0x0000_ffff_ffff_ffff | 1 << 49
}

/// The header of the page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistentEventHeader {
    /// Total Number of Events.
    pub events: u32,
    /// Total Log Length in bytes, the header included.
    pub length_bytes: u64,
    /// Timestamp when the context was established; see [`event_timestamp`].
    pub timestamp: u64,
    /// Power on Hours.
    pub power_on_hours: u128,
    /// Power Cycle Count.
    pub power_cycles: u64,
    /// PCI Vendor ID.
    pub vid: u16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: u16,
    /// Serial Number.
    pub serial: [u8; 20],
    /// Model Number.
    pub model: [u8; 40],
    /// NQN of the subsystem, at most 255 bytes.
    pub subnqn: String,
    /// Generation Number: changes with each context.
    pub generation: u16,
    /// The port through which the context that already existed was established; `None` if there was none.
    pub context_port: Option<u16>,
    /// Supported Events Bitmap: bit n for [`PersistentEventType`] n.
    pub supported: u128,
}

impl PersistentEventHeader {
    /// Size in bytes.
    pub const SIZE: usize = 512;
    /// Log Revision of Base 2.0, the first with the Generation Number.
    const REVISION: u8 = 3;
    /// Log Header Length: bytes after the field, which ends at 20.
    const LHL: u16 = 512 - 20;

    /// Decodes the header. Reserved types of events in the bitmap from 128 are ignored.
    ///
    /// # Errors
    /// Another log page, another revision, or an NQN that is not UTF-8 or not terminated.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<PersistentEventHeader, DecodeError> {
        if from[0] != super::LogId::PersistentEvents.to_wire() {
            return Err(DecodeError::value("log identifier", 0, from[0].into()));
        }
        if from[16] != Self::REVISION {
            return Err(DecodeError::value("persistent event log revision", 16, from[16].into()));
        }
        let nqn = &from[116..372];
        let end = nqn.iter().position(|byte| *byte == 0);
        let nqn = end.and_then(|end| std::str::from_utf8(&nqn[..end]).ok());
        let context = u32_at(from, 374);
        Ok(PersistentEventHeader {
            events: u32_at(from, 4),
            length_bytes: u64_at(from, 8),
            timestamp: u64_at(from, 20),
            power_on_hours: u128_at(from, 28),
            power_cycles: u64_at(from, 44),
            vid: u16_at(from, 52),
            ssvid: u16_at(from, 54),
            serial: array_at(from, 56),
            model: array_at(from, 76),
            subnqn: nqn.ok_or(DecodeError::value("NQN", 116, 0))?.to_owned(),
            generation: u16_at(from, 372),
            context_port: (context & Self::CONTEXT == Self::CONTEXT).then_some(context as u16),
            supported: u128_at(from, 480),
        })
    }

    /// Reporting Context Exists, and that a port of the subsystem established it.
    const CONTEXT: u32 = 1 << 18 | 1 << 16;

    /// Sets `context_port` in an encoded page.
    pub fn mark_existing(page: &mut [u8], port: u16) {
        put32(page, 374, Self::CONTEXT | u32::from(port));
    }

    /// Encodes the header.
    ///
    /// # Panics
    /// If the NQN has more than 255 bytes.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        into[0] = super::LogId::PersistentEvents.to_wire();
        put32(into, 4, self.events);
        put64(into, 8, self.length_bytes);
        into[16] = Self::REVISION;
        put16(into, 18, Self::LHL);
        put64(into, 20, self.timestamp);
        put(into, 28, &self.power_on_hours.to_le_bytes());
        put64(into, 44, self.power_cycles);
        put16(into, 52, self.vid);
        put16(into, 54, self.ssvid);
        put(into, 56, &self.serial);
        put(into, 76, &self.model);
        assert!(self.subnqn.len() <= 255, "an NQN of {} bytes", self.subnqn.len());
        put(into, 116, self.subnqn.as_bytes());
        put16(into, 372, self.generation);
        put32(into, 374, self.context_port.map_or(0, |port| Self::CONTEXT | u32::from(port)));
        put(into, 480, &self.supported.to_le_bytes());
    }
}

/// The header of an event, before its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PersistentEvent {
    /// Type of the event.
    pub kind: PersistentEventType,
    /// The controller that it is about; FFFFh for none.
    pub cntlid: u16,
    /// When it occurred; see [`event_timestamp`].
    pub timestamp: u64,
    /// The subsystem's port that it is about; `None` for none.
    pub port: Option<u16>,
    /// Bytes of data after the header.
    pub data_bytes: u16,
}

impl PersistentEvent {
    /// Size in bytes of the header.
    pub const SIZE: usize = 24;
    /// Event Type Revision of all types.
    const REVISION: u8 = 1;
    /// Event Header Length: bytes after the field, which ends at 3.
    const EHL: u8 = 24 - 3;
    /// Port Identifier Type: a port of the subsystem.
    const PORT: u8 = 1;
    /// Port Identifier Type: not associated with a port.
    const NO_PORT: u8 = 3;

    /// Decodes the header.
    ///
    /// # Errors
    /// A reserved type, another length, another kind of port, or vendor specific information.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<PersistentEvent, DecodeError> {
        let kind = PersistentEventType::from_wire(from[0]);
        if from[2] != Self::EHL {
            return Err(DecodeError::value("event header length", 2, from[2].into()));
        }
        let port = match from[3] & 3 {
            Self::PORT => Some(u16_at(from, 14)),
            0 | Self::NO_PORT => None,
            other => return Err(DecodeError::value("port identifier type", 3, other.into())),
        };
        if u16_at(from, 20) != 0 {
            return Err(DecodeError::value("vendor specific bytes", 20, u16_at(from, 20).into()));
        }
        Ok(PersistentEvent {
            kind: kind.ok_or(DecodeError::value("persistent event type", 0, from[0].into()))?,
            cntlid: u16_at(from, 4),
            timestamp: u64_at(from, 6),
            port,
            data_bytes: u16_at(from, 22),
        })
    }

    /// Encodes the header.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        into[0] = self.kind.to_wire();
        into[1] = Self::REVISION;
        into[2] = Self::EHL;
        into[3] = if self.port.is_some() { Self::PORT } else { Self::NO_PORT };
        put16(into, 4, self.cntlid);
        put64(into, 6, self.timestamp);
        put16(into, 14, self.port.unwrap_or(0));
        put16(into, 22, self.data_bytes);
    }
}

/// Data of a Power-on or Reset event: the firmware revision, and the reset of one controller, or of none if
/// the subsystem was switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerReset {
    /// The controller.
    pub cntlid: u16,
    /// Controller Power Cycle.
    pub power_cycle: u32,
    /// Milliseconds since power-on.
    pub power_on_ms: u64,
    /// Controller Timestamp; see [`event_timestamp`].
    pub timestamp: u64,
}

impl ControllerReset {
    /// Size in bytes of one controller's part.
    const PART: usize = 36;

    /// Encodes the event's data.
    pub fn encode(firmware: &str, reset: Option<&ControllerReset>) -> Vec<u8> {
        let mut data = identify::ascii::<8>(firmware).to_vec();
        if let Some(reset) = reset {
            let mut part = [0; Self::PART];
            put16(&mut part, 0, reset.cntlid);
            put32(&mut part, 16, reset.power_cycle);
            put64(&mut part, 20, reset.power_on_ms);
            put64(&mut part, 28, reset.timestamp);
            data.extend(part);
        }
        data
    }

    /// Decodes the event's data.
    ///
    /// # Errors
    /// Not the length of at most one reset.
    pub fn decode(data: &[u8]) -> Result<Option<ControllerReset>, DecodeError> {
        match data.len() {
            8 => Ok(None),
            44 => Ok(Some(ControllerReset {
                cntlid: u16_at(data, 8),
                power_cycle: u32_at(data, 24),
                power_on_ms: u64_at(data, 28),
                timestamp: u64_at(data, 36),
            })),
            other => Err(DecodeError::value("length of a reset event", 0, other as u64)),
        }
    }
}

/// Data of a Change Namespace event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeNamespace {
    /// The namespace was deleted; else created (SEL of Namespace Management).
    pub deleted: bool,
    /// Size and capacity in blocks; 0 if it was deleted.
    pub blocks: u64,
    /// Whether several controllers may attach it (NMIC).
    pub shared: bool,
    /// ANA group; 0 for none.
    pub anagrpid: u32,
    /// The namespace.
    pub nsid: u32,
}

impl ChangeNamespace {
    /// Size in bytes.
    pub const SIZE: usize = 48;

    /// Decodes the event's data.
    ///
    /// # Errors
    /// A reserved operation.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<ChangeNamespace, DecodeError> {
        let select = u32_at(from, 0) & 0xf;
        if select > 1 {
            return Err(DecodeError::value("namespace management operation", 0, select.into()));
        }
        Ok(ChangeNamespace {
            deleted: select == 1,
            blocks: u64_at(from, 8),
            shared: from[34] & 1 != 0,
            anagrpid: u32_at(from, 36),
            nsid: u32_at(from, 44),
        })
    }

    /// Encodes the event's data.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        put32(into, 0, self.deleted.into());
        put64(into, 8, self.blocks);
        put64(into, 24, self.blocks);
        into[34] = self.shared.into();
        put32(into, 36, self.anagrpid);
        put32(into, 44, self.nsid);
    }
}

/// Data of a Set Feature event: dwords 10 and 11 of the command, and no memory buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetFeature {
    /// Command Dword 10: the feature.
    pub cdw10: u32,
    /// Command Dword 11: its value.
    pub cdw11: u32,
}

impl SetFeature {
    /// Size in bytes.
    pub const SIZE: usize = 12;
    /// Dword Count.
    const DWORDS: u32 = 2;

    /// Decodes the event's data.
    ///
    /// # Errors
    /// Another layout.
    pub fn decode(from: &[u8; Self::SIZE]) -> Result<SetFeature, DecodeError> {
        match u32_at(from, 0) {
            Self::DWORDS => Ok(SetFeature { cdw10: u32_at(from, 4), cdw11: u32_at(from, 8) }),
            other => Err(DecodeError::value("layout of a set feature event", 0, other.into())),
        }
    }

    /// Encodes the event's data.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        put32(into, 0, Self::DWORDS);
        put32(into, 4, self.cdw10);
        put32(into, 8, self.cdw11);
    }
}

#[cfg(test)]
mod tests;
