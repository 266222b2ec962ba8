//! Features: identifiers, and values that Set Features and Get Features carry in dwords.

use crate::DecodeError;

wire_enum! {
    /// Feature identifiers (Base 2.0, section 5.27.1; NVM 1.0, section 4.1.3).
    FeatureId: u8 {
        /// Arbitration.
        Arbitration = 0x01,
        /// Power Management.
        PowerManagement = 0x02,
        /// LBA Range Type.
        LbaRangeType = 0x03,
        /// Temperature Threshold.
        TemperatureThreshold = 0x04,
        /// Error Recovery.
        ErrorRecovery = 0x05,
        /// Volatile Write Cache.
        VolatileWriteCache = 0x06,
        /// Number of Queues.
        NumberOfQueues = 0x07,
        /// Interrupt Coalescing; memory-based transports only.
        InterruptCoalescing = 0x08,
        /// Interrupt Vector Configuration; memory-based transports only.
        InterruptVector = 0x09,
        /// Write Atomicity Normal.
        WriteAtomicity = 0x0a,
        /// Asynchronous Event Configuration.
        AsyncEventConfiguration = 0x0b,
        /// Autonomous Power State Transition.
        AutonomousPower = 0x0c,
        /// Host Memory Buffer.
        HostMemoryBuffer = 0x0d,
        /// Timestamp.
        Timestamp = 0x0e,
        /// Keep Alive Timer.
        KeepAliveTimer = 0x0f,
        /// Host Controlled Thermal Management.
        ThermalManagement = 0x10,
        /// Non-Operational Power State Config.
        NonOperationalPower = 0x11,
        /// Host Behavior Support.
        HostBehavior = 0x16,
        /// Sanitize Config.
        SanitizeConfig = 0x17,
        /// I/O Command Set Profile.
        IoCommandSetProfile = 0x19,
        /// Software Progress Marker.
        SoftwareProgress = 0x80,
        /// Host Identifier.
        HostIdentifier = 0x81,
        /// Reservation Notification Mask.
        ReservationMask = 0x82,
        /// Reservation Persistence.
        ReservationPersistence = 0x83,
        /// Namespace Write Protection Config.
        WriteProtection = 0x84,
    }
}

wire_enum! {
    /// Select field of Get Features: which value is returned (Base 2.0, section 5.15).
    Select: u8 {
        /// Current value.
        Current = 0,
        /// Default value: that after a reset without a saved value.
        Default = 1,
        /// Saved value.
        Saved = 2,
        /// Supported capabilities; see [`Capabilities`].
        Supported = 3,
    }
}

/// Result of Get Features for [`Select::Supported`] (Base 2.0, section 5.15).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FeatureCapabilities {
    /// The value can be saved.
    pub saveable: bool,
    /// The feature belongs to a namespace, not to the controller.
    pub namespace_specific: bool,
    /// The value can be changed.
    pub changeable: bool,
}

impl FeatureCapabilities {
    /// Encodes dword 0 of the completion.
    pub const fn to_wire(self) -> u32 {
        self.saveable as u32 | (self.namespace_specific as u32) << 1 | (self.changeable as u32) << 2
    }

    /// Decodes dword 0 of a completion.
    pub const fn from_wire(value: u32) -> FeatureCapabilities {
        FeatureCapabilities {
            saveable: value & 1 != 0,
            namespace_specific: value & 2 != 0,
            changeable: value & 4 != 0,
        }
    }
}

/// Number of Queues: I/O queues requested or allocated (Base 2.0, section 5.27.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberOfQueues {
    /// Submission queues, at least 1.
    pub submission: u32,
    /// Completion queues, at least 1.
    pub completion: u32,
}

impl NumberOfQueues {
    /// Decodes dword 11 of Set Features or dword 0 of its completion.
    ///
    /// # Errors
    /// The value 65535 (65536 queues), which is not allowed.
    pub fn from_wire(value: u32) -> Result<NumberOfQueues, DecodeError> {
        let (submission, completion) = (value & 0xffff, value >> 16);
        if submission == 0xffff || completion == 0xffff {
            return Err(DecodeError::value("number of queues", 44, value.into()));
        }
        Ok(NumberOfQueues { submission: submission + 1, completion: completion + 1 })
    }

    /// Encodes the dword.
    ///
    /// # Panics
    /// If a number is not 1 to 65535.
    pub fn to_wire(self) -> u32 {
        let zero_based = |count: u32| {
            assert!((1..=65535).contains(&count), "{count} queues are not 1 to 65535");
            count - 1
        };
        zero_based(self.submission) | zero_based(self.completion) << 16
    }
}

bitflags::bitflags! {
    /// Asynchronous Event Configuration: which events are enabled (Base 2.0, section 5.27.1). Other bits are
    /// kept as received.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct AsyncEventConfiguration: u32 {
        /// SMART / Health Critical Warnings, with the bits of the log page.
        const HEALTH = 0xff;
        /// The critical warning for the temperature.
        const TEMPERATURE = 1 << 1;
        /// Namespace Attribute Notices.
        const NAMESPACE = 1 << 8;
        /// Firmware Activation Notices.
        const FIRMWARE = 1 << 9;
        /// Telemetry Log Notices.
        const TELEMETRY = 1 << 10;
        /// Asymmetric Namespace Access Change Notices.
        const ANA = 1 << 11;
        /// Discovery Log Page Change Notification.
        const DISCOVERY = 1 << 31;
    }
}

/// Temperature Threshold (Base 2.0, section 5.27.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// Kelvins.
    pub kelvins: u16,
    /// Sensor: 0 composite, 1 to 8, 15 all.
    pub sensor: u8,
    /// Under temperature threshold, instead of over temperature.
    pub under: bool,
}

impl TemperatureThreshold {
    /// Decodes dword 11.
    ///
    /// # Errors
    /// Reserved sensors and threshold types.
    pub fn from_wire(value: u32) -> Result<TemperatureThreshold, DecodeError> {
        let sensor = (value >> 16 & 0xf) as u8;
        let kind = value >> 20 & 3;
        if kind > 1 || (9..=14).contains(&sensor) {
            return Err(DecodeError::value("temperature threshold", 44, value.into()));
        }
        Ok(TemperatureThreshold { kelvins: value as u16, sensor, under: kind == 1 })
    }

    /// Encodes the dword.
    pub const fn to_wire(self) -> u32 {
        self.kelvins as u32 | (self.sensor as u32 & 0xf) << 16 | (self.under as u32) << 20
    }
}

/// Size in bytes of the Host Behavior Support data (Base 2.0, section 5.27.1).
pub const HOST_BEHAVIOR_SIZE: usize = 512;

/// Host Behavior Support: what the host can deal with (Base 2.0, section 5.27.1; NVM 1.0, section 4.1.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostBehavior {
    /// Advanced Command Retry Enable (ACRE): the host honours retry delays.
    pub command_retry: bool,
    /// LBA Format Extension Enable (LBAFEE): the host knows extended LBA formats.
    pub extended_formats: bool,
}

impl HostBehavior {
    /// Decodes the data.
    ///
    /// # Errors
    /// A reserved value.
    pub fn decode(from: &[u8; HOST_BEHAVIOR_SIZE]) -> Result<HostBehavior, DecodeError> {
        let flag = |at: usize| match from[at] {
            value @ 0..=1 => Ok(value == 1),
            value => Err(DecodeError::value("host behavior", at as u32, value.into())),
        };
        Ok(HostBehavior { command_retry: flag(0)?, extended_formats: flag(2)? })
    }

    /// Encodes the data.
    pub fn encode(&self, into: &mut [u8; HOST_BEHAVIOR_SIZE]) {
        *into = [0; HOST_BEHAVIOR_SIZE];
        (into[0], into[2]) = (self.command_retry.into(), self.extended_formats.into());
    }
}
/// Size in bytes of a Host Identifier over fabrics: always extended (Base 2.0, section 5.27.1).
pub const HOST_ID_SIZE: usize = 16;
/// Size in bytes of the Timestamp data (Base 2.0, section 5.27.1).
pub const TIMESTAMP_SIZE: usize = 8;

/// Host Identifier, dword 11: the host identifier is 128 bits long.
pub const HOST_ID_EXTENDED: u32 = 1;

/// Bits of Reservation Notification Mask: notifications that are suppressed (Base 2.0, section 5.27.1).
pub mod reservation_mask {
    /// Registration Preempted.
    pub const REGISTRATION_PREEMPTED: u32 = 1 << 1;
    /// Reservation Released.
    pub const RESERVATION_RELEASED: u32 = 1 << 2;
    /// Reservation Preempted.
    pub const RESERVATION_PREEMPTED: u32 = 1 << 3;
}

/// Reservation Persistence, dword 11: registrations and the reservation survive a power loss (PTPL).
pub const PERSIST_THROUGH_POWER_LOSS: u32 = 1;
