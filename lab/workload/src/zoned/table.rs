//! The state of all zones of a device.

use std::ops::Range;

use os::{DeviceZone, ZoneCondition};

use super::writes_per_reset;

/// One zone. Offsets are bytes from the start of the device.
#[derive(Clone, Debug)]
pub(super) struct Zone {
    pub(super) start: u64,
    /// Start of the next zone.
    pub(super) end: u64,
    pub(super) capacity_end: u64,
    /// Where the next write goes.
    pub(super) pointer: u64,
    /// Up to here writes have completed.
    pub(super) written: u64,
    /// It has a write pointer.
    pub(super) is_sequential: bool,
    /// It is neither read-only nor offline.
    pub(super) is_usable: bool,
    /// It was open when the zones were reported.
    pub(super) was_open: bool,
    /// The job whose write opened it, with a limit of open zones.
    pub(super) opened_by: Option<u32>,
    /// The job whose I/Os are in flight, if any are: others wait, as in fio.
    pub(super) owner: u32,
    pub(super) in_flight: u32,
    /// Those of them that are writes.
    pub(super) writes: u32,
    /// It is reset before the next write.
    pub(super) reset_is_due: bool,
    /// A write failed: the pointer must be read again.
    pub(super) is_stale: bool,
}

impl Zone {
    pub(super) fn new(zone: &DeviceZone) -> Zone {
        Zone {
            start: zone.start,
            end: zone.start + zone.length,
            capacity_end: zone.start + zone.capacity,
            pointer: zone.pointer,
            written: zone.pointer,
            is_sequential: zone.condition != ZoneCondition::Conventional,
            is_usable: zone.condition != ZoneCondition::Unusable,
            was_open: zone.condition == ZoneCondition::Open,
            opened_by: None,
            owner: 0,
            in_flight: 0,
            writes: 0,
            reset_is_due: false,
            is_stale: false,
        }
    }

    /// Bytes that can be written.
    pub(super) fn room(&self) -> u64 {
        self.capacity_end.saturating_sub(self.pointer)
    }

    /// Whether a job may start an I/O here.
    pub(super) fn is_free_for(&self, member: u32) -> bool {
        self.in_flight == 0 || self.owner == member
    }
}

/// The zones, with their open ones.
#[derive(Debug, Default)]
pub(super) struct ZoneTable {
    /// In order, without gaps.
    pub(super) zones: Vec<Zone>,
    /// Indices of open zones, where their number is limited.
    pub(super) open: Vec<usize>,
    /// Jobs that have joined.
    pub(super) members: u32,
    /// Zones of all jobs that write, whose data counts for the threshold of resets.
    pub(super) counted: Range<usize>,
    /// Written bytes in them.
    pub(super) data_bytes: u64,
    /// Writes until the next reset, above the threshold.
    pub(super) writes_to_reset: u64,
}

impl ZoneTable {
    /// The zone at an offset; the last one for offsets behind it.
    pub(super) fn index_of(&self, at: u64) -> usize {
        self.zones.partition_point(|zone| zone.end <= at).min(self.zones.len() - 1)
    }

    /// Counts the data of further zones.
    pub(super) fn count(&mut self, zones: Range<usize>, reset_frequency: f64) {
        self.counted = match self.counted.is_empty() {
            true => zones,
            false => self.counted.start.min(zones.start)..self.counted.end.max(zones.end),
        };
        let counted = self.zones[self.counted.clone()].iter().filter(|zone| zone.is_sequential);
        self.data_bytes = counted.map(|zone| zone.pointer - zone.start).sum();
        self.writes_to_reset = writes_per_reset(reset_frequency);
    }

    /// The next zone behind `from` that `fits`, or for random I/O the nearest one on either side, within `range`.
    pub(super) fn nearest(
        &self,
        from: usize,
        range: &Range<usize>,
        is_random: bool,
        fits: impl Fn(&Zone) -> bool,
    ) -> Option<usize> {
        (1..range.len()).find_map(|distance| {
            let behind = Some(from + distance).filter(|index| *index < range.end);
            let before = from.checked_sub(distance).filter(|index| is_random && range.contains(index));
            behind.into_iter().chain(before).find(|index| fits(&self.zones[*index]))
        })
    }

    pub(super) fn close(&mut self, index: usize) {
        self.zones[index].opened_by = None;
        self.open.retain(|open| *open != index);
    }

    /// The zone is empty.
    pub(super) fn was_reset(&mut self, index: usize) {
        let is_counted = self.counted.contains(&index);
        let zone = &mut self.zones[index];
        let bytes = zone.pointer - zone.start;
        (zone.pointer, zone.written) = (zone.start, zone.start);
        (zone.reset_is_due, zone.was_open, zone.is_stale) = (false, false, false);
        if is_counted {
            self.data_bytes = self.data_bytes.saturating_sub(bytes);
        }
    }
}
