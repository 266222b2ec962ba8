//! Error, health and firmware log pages.

use block_io::Status;

use crate::le::{array_at, put, put16, put32, put64, u16_at, u32_at, u64_at, u128_at};

/// One entry of the Error Information log, newest first (Base 2.0, section 5.16.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Error Count: number of the error over the life of the controller; 0 for an unused entry.
    pub count: u64,
    /// Submission Queue Identifier.
    pub sqid: u16,
    /// Command Identifier.
    pub cid: u16,
    /// Status Field.
    pub status: Status,
    /// Parameter Error Location: byte (bits 7:0) and bit (10:8) of the command; FFFFh for none.
    pub location: u16,
    /// First LBA with the error.
    pub lba: u64,
    /// Namespace.
    pub nsid: u32,
    /// Transport type (TRTYPE).
    pub transport: u8,
    /// Command specific information.
    pub command_specific: u64,
    /// Transport type specific information.
    pub transport_specific: u16,
}

impl ErrorEntry {
    /// Size in bytes of an entry.
    pub const SIZE: usize = 64;

    /// Decodes 64 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> ErrorEntry {
        ErrorEntry {
            count: u64_at(from, 0),
            sqid: u16_at(from, 8),
            cid: u16_at(from, 10),
            status: Status::from_field(u16_at(from, 12) >> 1),
            location: u16_at(from, 14),
            lba: u64_at(from, 16),
            nsid: u32_at(from, 24),
            transport: from[29],
            command_specific: u64_at(from, 32),
            transport_specific: u16_at(from, 40),
        }
    }

    /// Encodes an entry.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        put64(into, 0, self.count);
        put16(into, 8, self.sqid);
        put16(into, 10, self.cid);
        put16(into, 12, self.status.field() << 1);
        put16(into, 14, self.location);
        put64(into, 16, self.lba);
        put32(into, 24, self.nsid);
        into[29] = self.transport;
        put64(into, 32, self.command_specific);
        put16(into, 40, self.transport_specific);
    }
}

/// SMART / Health Information (Base 2.0, section 5.16.1.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthLog {
    /// Critical warnings.
    pub critical_warning: u8,
    /// Composite temperature in kelvins.
    pub temperature_kelvins: u16,
    /// Available spare in percent.
    pub spare_percent: u8,
    /// Available spare threshold in percent.
    pub spare_threshold_percent: u8,
    /// Percentage Used; may exceed 100.
    pub used_percent: u8,
    /// Data read in units of 1000 blocks of 512 bytes, rounded up.
    pub data_units_read: u128,
    /// Data written in units of 1000 blocks of 512 bytes, rounded up.
    pub data_units_written: u128,
    /// Read commands completed.
    pub host_reads: u128,
    /// Write commands completed.
    pub host_writes: u128,
    /// Controller Busy Time in minutes.
    pub busy_minutes: u128,
    /// Power cycles.
    pub power_cycles: u128,
    /// Power On Hours.
    pub power_on_hours: u128,
    /// Unsafe Shutdowns.
    pub unsafe_shutdowns: u128,
    /// Media and Data Integrity Errors.
    pub media_errors: u128,
    /// Number of Error Information Log Entries over the life of the controller.
    pub error_log_entries: u128,
    /// Warning Composite Temperature Time in minutes.
    pub warning_temperature_minutes: u32,
    /// Critical Composite Temperature Time in minutes.
    pub critical_temperature_minutes: u32,
    /// Temperature sensors 1 to 8 in kelvins; 0 for none.
    pub sensors_kelvins: [u16; 8],
}

impl HealthLog {
    /// Size in bytes of the page.
    pub const SIZE: usize = 512;

    /// Decodes 512 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> HealthLog {
        let counter = |index: usize| u128_at(from, 32 + 16 * index);
        let mut sensors_kelvins = [0; 8];
        for (index, sensor) in sensors_kelvins.iter_mut().enumerate() {
            *sensor = u16_at(from, 200 + 2 * index);
        }
        HealthLog {
            critical_warning: from[0],
            temperature_kelvins: u16_at(from, 1),
            spare_percent: from[3],
            spare_threshold_percent: from[4],
            used_percent: from[5],
            data_units_read: counter(0),
            data_units_written: counter(1),
            host_reads: counter(2),
            host_writes: counter(3),
            busy_minutes: counter(4),
            power_cycles: counter(5),
            power_on_hours: counter(6),
            unsafe_shutdowns: counter(7),
            media_errors: counter(8),
            error_log_entries: counter(9),
            warning_temperature_minutes: u32_at(from, 192),
            critical_temperature_minutes: u32_at(from, 196),
            sensors_kelvins,
        }
    }

    /// Encodes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        into[0] = self.critical_warning;
        put16(into, 1, self.temperature_kelvins);
        into[3] = self.spare_percent;
        into[4] = self.spare_threshold_percent;
        into[5] = self.used_percent;
        let counters = [
            self.data_units_read,
            self.data_units_written,
            self.host_reads,
            self.host_writes,
            self.busy_minutes,
            self.power_cycles,
            self.power_on_hours,
            self.unsafe_shutdowns,
            self.media_errors,
            self.error_log_entries,
        ];
        for (index, counter) in counters.iter().enumerate() {
            put(into, 32 + 16 * index, &counter.to_le_bytes());
        }
        put32(into, 192, self.warning_temperature_minutes);
        put32(into, 196, self.critical_temperature_minutes);
        for (index, &sensor) in self.sensors_kelvins.iter().enumerate() {
            put16(into, 200 + 2 * index, sensor);
        }
    }
}

/// Firmware Slot Information (Base 2.0, section 5.16.1.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirmwareSlots {
    /// Slot of the active firmware, 1 to 7.
    pub active: u8,
    /// Slot to be activated by the next reset; 0 if not reported.
    pub next: u8,
    /// Revisions of slots 1 to 7; zero for an empty slot.
    pub revisions: [[u8; 8]; 7],
}

impl FirmwareSlots {
    /// Size in bytes of the page.
    pub const SIZE: usize = 512;

    /// Decodes 512 bytes; every value is valid.
    pub fn decode(from: &[u8; Self::SIZE]) -> FirmwareSlots {
        let mut revisions = [[0; 8]; 7];
        for (index, revision) in revisions.iter_mut().enumerate() {
            *revision = array_at(from, 8 + 8 * index);
        }
        FirmwareSlots { active: from[0] & 7, next: from[0] >> 4 & 7, revisions }
    }

    /// Encodes the page.
    pub fn encode(&self, into: &mut [u8; Self::SIZE]) {
        *into = [0; Self::SIZE];
        into[0] = self.active & 7 | (self.next & 7) << 4;
        for (index, revision) in self.revisions.iter().enumerate() {
            put(into, 8 + 8 * index, revision);
        }
    }
}
