//! The SCSI host (virtio 1.3, section 5.6).

use crate::DecodeError;

/// Index of the queue of task management functions and asynchronous notifications.
pub const CONTROL_QUEUE: usize = 0;
/// Index of the queue of events.
pub const EVENT_QUEUE: usize = 1;
/// Index of the first queue of commands.
pub const REQUEST_QUEUE: usize = 2;
/// Bytes of a CDB, unless the driver writes another length to the configuration.
pub const CDB_BYTES: usize = 32;
/// Bytes of sense data, unless the driver writes another length to the configuration.
pub const SENSE_BYTES: usize = 96;
/// Bytes that the device reads before the data of a command: a [`CommandHeader`] and the CDB.
pub const COMMAND_BYTES: usize = CommandHeader::SIZE + CDB_BYTES;
/// Bytes that the device writes before the data of a command: a [`ResponseHeader`] and sense data.
pub const RESPONSE_BYTES: usize = ResponseHeader::SIZE + SENSE_BYTES;

/// Place of a logical unit: its target and its number there.
///
/// The field of eight bytes is 1, the target, and a single-level LUN of flat space addressing (section 5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitAddress {
    /// Target.
    pub target: u8,
    /// Logical unit number, below 16,384.
    pub lun: u16,
}

impl UnitAddress {
    /// Largest logical unit number.
    pub const LUN_MAX: u16 = 0x3fff;

    /// Decodes the field, whose first byte is the lowest. Peripheral device addressing, of numbers below 256, is
    /// understood too.
    ///
    /// # Errors
    /// It is not of this form.
    pub const fn decode(field: u64) -> Result<UnitAddress, DecodeError> {
        let [kind, target, high, low, rest @ ..] = field.to_le_bytes();
        let is_known = kind == 1 && (high >> 6 == 1 || high == 0) && matches!(rest, [0, 0, 0, 0]);
        if !is_known {
            return Err(DecodeError::value("LUN of virtio-scsi", 0, field));
        }
        Ok(UnitAddress { target, lun: u16::from_be_bytes([high & 0x3f, low]) })
    }

    /// Encodes the field; bits of the number above [`LUN_MAX`](Self::LUN_MAX) are lost.
    pub const fn to_field(self) -> u64 {
        let [high, low] = self.lun.to_be_bytes();
        u64::from_le_bytes([1, self.target, 0x40 | high & 0x3f, low, 0, 0, 0, 0])
    }

    /// Encodes the field of an event: numbers below 256 in peripheral device addressing, since Linux takes the two bytes
    /// for the number.
    pub const fn to_event_field(self) -> u64 {
        let [high, low] = self.lun.to_be_bytes();
        let method = if high == 0 { 0 } else { 0x40 };
        u64::from_le_bytes([1, self.target, method | high & 0x3f, low, 0, 0, 0, 0])
    }
}

codec::fields! {
    /// What a command begins with, before the CDB.
    CommandHeader, 19 {
        /// [`UnitAddress`].
        lun: u64,
        /// The driver's identifier of the command.
        tag: u64,
        /// Task attribute: 0 simple, 1 ordered, 2 head of queue, 3 ACA.
        attribute: u8,
        /// Priority, in the lower four bits.
        priority: u8,
        /// Command reference number, 0 for none.
        reference_number: u8,
    }
}

codec::fields! {
    /// What the answer to a command begins with, before the sense data.
    ResponseHeader, 12 {
        /// Bytes of sense data.
        sense_length: u32,
        /// Bytes of the data buffers that were not used.
        residual: u32,
        /// Status qualifier.
        status_qualifier: u16,
        /// SCSI status, valid with [`ScsiResponse::Ok`].
        status: u8,
        /// [`ScsiResponse`].
        response: u8,
    }
}

macro_rules! numbers {
    ($(#[$meta:meta])* $name:ident: $repr:ident, $what:literal { $($(#[$vmeta:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)* }

        impl $name {
            /// Decodes the number.
            ///
            /// # Errors
            /// It is undefined.
            pub const fn decode(value: $repr) -> Result<$name, DecodeError> {
                match value {
                    $($value => Ok($name::$variant),)*
                    other => Err(DecodeError::value($what, 0, other as u64)),
                }
            }

            /// The number on the wire.
            pub const fn to_wire(self) -> $repr {
                self as $repr
            }
        }
    };
}

numbers! {
    /// The outcome of a command, a task management function, or a request of the control queue.
    ScsiResponse: u8, "response of virtio-scsi" {
        /// The command has a SCSI status; a function is complete, a request was executed.
        Ok = 0,
        /// The command has more data than its buffers take.
        Overrun = 1,
        /// The command was aborted by a task management function.
        Aborted = 2,
        /// There is no such target.
        BadTarget = 3,
        /// The command was aborted by a reset.
        Reset = 4,
        /// The device is busy: try again.
        Busy = 5,
        /// The path has failed; another may work.
        TransportFailure = 6,
        /// The target has failed; another path does not help.
        TargetFailure = 7,
        /// The nexus has failed; another path may work.
        NexusFailure = 8,
        /// Another failure.
        Failure = 9,
        /// A task management function has the answer "yes".
        FunctionSucceeded = 10,
        /// A task management function is not supported.
        FunctionRejected = 11,
        /// There is no such logical unit.
        IncorrectLun = 12,
    }
}

numbers! {
    /// Kind of a request of the control queue.
    ControlKind: u32, "request of virtio-scsi's control queue" {
        /// Task management: a [`TaskManagementRequest`].
        TaskManagement = 0,
        /// Asks which asynchronous notifications are reported: an [`AsyncRequest`].
        AsyncQuery = 1,
        /// Asks for asynchronous notifications: an [`AsyncRequest`].
        AsyncSubscribe = 2,
    }
}

numbers! {
    /// Task management functions.
    TaskFunction: u32, "task management function of virtio-scsi" {
        /// Aborts a command.
        AbortTask = 0,
        /// Aborts the commands of the nexus.
        AbortTaskSet = 1,
        /// Clears an auto contingent allegiance.
        ClearAca = 2,
        /// Aborts the commands of all nexuses.
        ClearTaskSet = 3,
        /// Resets the nexus.
        NexusReset = 4,
        /// Resets the logical unit.
        LogicalUnitReset = 5,
        /// Asks whether a command is in the task set.
        QueryTask = 6,
        /// Asks whether there is any command of the nexus.
        QueryTaskSet = 7,
    }
}

codec::fields! {
    /// A task management function.
    TaskManagementRequest, 24 {
        /// [`ControlKind::TaskManagement`].
        kind: u32,
        /// [`TaskFunction`].
        function: u32,
        /// [`UnitAddress`].
        lun: u64,
        /// Identifier of the command that is concerned.
        tag: u64,
    }
}

codec::fields! {
    /// A query or subscription of asynchronous notifications.
    AsyncRequest, 16 {
        /// [`ControlKind::AsyncQuery`] or [`ControlKind::AsyncSubscribe`].
        kind: u32,
        /// [`UnitAddress`].
        lun: u64,
        /// Events asked for.
        requested: u32,
    }
}

codec::fields! {
    /// The answer to an [`AsyncRequest`].
    AsyncResponse, 5 {
        /// Events that the device reports.
        actual: u32,
        /// [`ScsiResponse`].
        response: u8,
    }
}

codec::fields! {
    /// An event.
    ScsiEvent, 16 {
        /// One of the constants, maybe with [`MISSED`](Self::MISSED).
        event: u32,
        /// [`UnitAddress`].
        lun: u64,
        /// What has happened; depends on the event.
        reason: u32,
    }
}

impl ScsiEvent {
    /// Flag: events were lost for lack of buffers.
    pub const MISSED: u32 = 1 << 31;
    /// No event.
    pub const NONE: u32 = 0;
    /// A logical unit has appeared, has gone, or was reset.
    pub const TRANSPORT_RESET: u32 = 1;
    /// Parameters of a logical unit have changed; the reason is the additional sense code, and its qualifier in the next
    /// byte.
    pub const PARAMETER_CHANGE: u32 = 3;
    /// Reason of a transport reset: a logical unit was reset.
    pub const RESET_HARD: u32 = 0;
    /// Reason of a transport reset: a logical unit has appeared.
    pub const RESET_RESCAN: u32 = 1;
    /// Reason of a transport reset: a logical unit has gone.
    pub const RESET_REMOVED: u32 = 2;
}

codec::fields! {
    /// The configuration of a SCSI host.
    ScsiConfig, 36 {
        /// Number of queues of commands.
        request_queues: u32,
        /// Largest number of data segments of a command.
        seg_max: u32,
        /// Hint: largest transfer, in sectors of 512 bytes.
        max_sectors: u32,
        /// Largest number of commands of a logical unit.
        commands_per_lun: u32,
        /// Bytes of an event.
        event_info_size: u32,
        /// Bytes of sense data. The driver may write it.
        sense_size: u32,
        /// Bytes of a CDB. The driver may write it.
        cdb_size: u32,
        /// Largest channel.
        max_channel: u16,
        /// Largest target.
        max_target: u16,
        /// Largest logical unit number.
        max_lun: u32,
    }
}

impl ScsiConfig {
    /// Offset of [`sense_size`](Self::sense_size).
    pub const SENSE_SIZE: usize = 20;
    /// Offset of [`cdb_size`](Self::cdb_size).
    pub const CDB_SIZE: usize = 24;
}
