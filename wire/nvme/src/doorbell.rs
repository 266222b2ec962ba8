//! Doorbells and shadow doorbells of memory-based transports, and Admin Queue Attributes.

use crate::opcode::AdminOpcode;
use crate::{DataPointer, Sqe};

/// Offset in BAR0 of the first doorbell (PCIe Transport 1.0, section 3.1.2).
pub const DOORBELLS_OFFSET: u32 = 0x1000;

/// Admin Queue Attributes (AQA; Base 2.0, section 3.1.3.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminQueueAttributes {
    /// Entries of the admin submission queue, 2 to 4096.
    pub submission_entries: u32,
    /// Entries of the admin completion queue, 2 to 4096.
    pub completion_entries: u32,
}

impl AdminQueueAttributes {
    /// Decodes the register; reserved bits are ignored.
    pub const fn decode(value: u32) -> AdminQueueAttributes {
        AdminQueueAttributes {
            submission_entries: (value & 0xfff) + 1,
            completion_entries: (value >> 16 & 0xfff) + 1,
        }
    }

    /// Encodes the register.
    ///
    /// # Panics
    /// If a number is not 2 to 4096.
    pub const fn encode(&self) -> u32 {
        assert!(self.submission_entries >= 2 && self.submission_entries <= 4096);
        assert!(self.completion_entries >= 2 && self.completion_entries <= 4096);
        (self.submission_entries - 1) | (self.completion_entries - 1) << 16
    }
}

/// Doorbell Buffer Config (Base 2.0, section 5.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellBuffer {
    /// PRP1: the page of shadow doorbells.
    pub shadow: u64,
    /// PRP2: the page of EventIdx values.
    pub events: u64,
}

impl DoorbellBuffer {
    /// Decodes the command dwords; every value is valid.
    pub const fn from_sqe(sqe: &Sqe) -> DoorbellBuffer {
        DoorbellBuffer { shadow: sqe.data.low, events: sqe.data.high }
    }

    /// Encodes the command; CID, NSID and data pointer are left to the caller.
    pub fn to_sqe(&self) -> Sqe {
        Sqe {
            flags: 0,
            data: DataPointer::prp(self.shadow, self.events),
            ..Sqe::new(AdminOpcode::DoorbellBufferConfig.to_wire())
        }
    }
}
