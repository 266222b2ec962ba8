//! Zones of block devices: `linux/blkzoned.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `BLKREPORTZONE`, `_IOWR(0x12, 130, struct blk_zone_report)`, and `BLKRESETZONE`, `_IOW(0x12, 131, struct
/// blk_zone_range)`.
const REPORT: libc::Ioctl = 0xc010_1282u32 as libc::Ioctl;
const RESET: libc::Ioctl = 0x4010_1283;
/// The unit of offsets and lengths of these requests, whatever the device's blocks are.
const SECTOR_BYTES: u64 = 512;
/// Zones of one request: a quarter of a MiB of memory.
const ZONES_PER_REPORT: usize = 4096;
const TYPE_CONVENTIONAL: u8 = 1;

/// `struct blk_zone`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawZone {
    start: u64,
    length: u64,
    pointer: u64,
    kind: u8,
    condition: u8,
    non_sequential: u8,
    reset_recommended: u8,
    reserved: [u8; 4],
    capacity: u64,
    reserved_at_end: [u8; 24],
}
const _: () = assert!(size_of::<RawZone>() == 64);

/// `struct blk_zone_report` with its zones.
#[repr(C)]
struct RawReport {
    sector: u64,
    count: u32,
    flags: u32,
    zones: [RawZone; ZONES_PER_REPORT],
}
const _: () = assert!(std::mem::offset_of!(RawReport, zones) == 16);
/// `BLK_ZONE_REP_CAPACITY`: the kernel reports capacities.
const HAS_CAPACITY: u32 = 1;

/// The state of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneCondition {
    /// A conventional zone, without write pointer.
    Conventional,
    /// Empty or closed: it can be written.
    Writable,
    /// Open, implicitly or explicitly.
    Open,
    /// Full.
    Full,
    /// Read-only or offline.
    Unusable,
}

/// A zone of a block device; offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceZone {
    /// Offset of its first byte.
    pub start: u64,
    /// Distance to the next zone.
    pub length: u64,
    /// Bytes that can be used, from its start.
    pub capacity: u64,
    /// Where the next write must be; of conventional and full zones the end of the capacity.
    pub pointer: u64,
    /// Its state.
    pub condition: ZoneCondition,
}

impl RawZone {
    fn decode(&self, has_capacity: bool) -> DeviceZone {
        let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
        let capacity = if has_capacity { self.capacity } else { self.length };
        let condition = match self.condition {
            // `BLK_ZONE_COND_*`.
            _ if self.kind == TYPE_CONVENTIONAL => ZoneCondition::Conventional,
            0 => ZoneCondition::Conventional,
            2 | 3 => ZoneCondition::Open,
            0xe => ZoneCondition::Full,
            0xd | 0xf => ZoneCondition::Unusable,
            _ => ZoneCondition::Writable,
        };
        let pointer = match condition {
            ZoneCondition::Conventional | ZoneCondition::Full => self.start + capacity,
            _ => self.pointer.clamp(self.start, self.start + capacity),
        };
        DeviceZone {
            start: bytes(self.start),
            length: bytes(self.length),
            capacity: bytes(capacity),
            pointer: bytes(pointer),
            condition,
        }
    }
}

/// The zones of a block device from the one at `start` on, up to `max`; fewer where the device ends.
///
/// # Errors
/// The kernel's error: `ENOTTY` or `EOPNOTSUPP` if the device has no zones.
pub fn report_zones(device: impl AsFd, start: u64, max: usize) -> io::Result<Vec<DeviceZone>> {
    let mut zones: Vec<DeviceZone> = Vec::new();
    let empty = RawZone::default();
    let mut report = Box::new(RawReport { sector: 0, count: 0, flags: 0, zones: [empty; ZONES_PER_REPORT] });
    let mut next = start;
    while zones.len() < max {
        report.sector = next / SECTOR_BYTES;
        report.count = (max - zones.len()).min(ZONES_PER_REPORT) as u32;
        report.flags = 0;
        let pointer = &raw mut *report;
        // SAFETY: the kernel reads `count` and writes at most as many zones, for which there is room; the memory is
        // local and lives until the call returns.
        if unsafe { libc::ioctl(device.as_fd().as_raw_fd(), REPORT, pointer) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let count = (report.count as usize).min(ZONES_PER_REPORT);
        let has_capacity = report.flags & HAS_CAPACITY != 0;
        zones.extend(report.zones[..count].iter().map(|zone| zone.decode(has_capacity)));
        match zones.last() {
            Some(last) if count > 0 && last.start + last.length > next => next = last.start + last.length,
            _ => break,
        }
    }
    Ok(zones)
}

/// Resets the write pointer of a zone, which discards its data, and waits for completion.
///
/// # Errors
/// The kernel's error: `EINVAL` if the range is no whole zone.
pub fn reset_zone(device: impl AsFd, start: u64, length: u64) -> io::Result<()> {
    let range = [start / SECTOR_BYTES, length / SECTOR_BYTES];
    // SAFETY: BLKRESETZONE reads two words, which live until the call returns.
    match unsafe { libc::ioctl(device.as_fd().as_raw_fd(), RESET, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_decoded_in_bytes() {
        let zone = |kind, condition, pointer| {
            let capacity = 6;
            RawZone { start: 8, length: 8, pointer, kind, condition, capacity, ..RawZone::default() }
        };
        let sequential = zone(2, 2, 10).decode(true);
        assert_eq!((sequential.start, sequential.length, sequential.capacity), (4096, 4096, 3072));
        assert_eq!((sequential.pointer, sequential.condition), (5120, ZoneCondition::Open));
        assert_eq!(zone(2, 1, 8).decode(true).condition, ZoneCondition::Writable);
        // Write pointers of full and conventional zones are invalid.
        assert_eq!(zone(2, 0xe, u64::MAX).decode(true).pointer, 4096 + 3072);
        assert_eq!(zone(1, 0, u64::MAX).decode(false).pointer, 8192);
        assert_eq!(zone(2, 0xf, u64::MAX).decode(true).condition, ZoneCondition::Unusable);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri does not implement ioctl")]
    fn files_have_no_zones() {
        let null = std::fs::File::open("/dev/null").unwrap();
        for error in [report_zones(&null, 0, 8).unwrap_err(), reset_zone(&null, 0, 4096).unwrap_err()] {
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "{error}");
        }
    }
}
