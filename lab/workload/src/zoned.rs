//! Zones with write pointers: fio's `zonemode=zbd`.
//!
//! [`ZonedDevice`] is the state of a device's zones, which the jobs on it share: they are threads of one process.
//! [`ZonedJob`] is a job's access. It moves each drawn I/O to where the zones permit it ([`ZonedJob::place`]): a write to
//! the write pointer of an open zone, a read to written data, a trim to a whole zone, which it resets. Each placed I/O
//! is [completed](ZonedJob::completed) or [cancelled](ZonedJob::cancel) once. One lock for all zones is taken twice an I/O.
//!
//! Files and devices without zones have zones of the size that the job gives, whose write pointers exist here alone.

mod devices;
mod table;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use block_io::Op;

pub(crate) use devices::{ZonedDevices, align_region};
use table::{Zone, ZoneTable};

/// `zonemode=zbd` and its options.
#[derive(Clone, Debug, PartialEq)]
pub struct ZonedOptions {
    /// `zonesize`: that of the device, or that of the zones which a device without has here.
    pub zone_bytes: Option<u64>,
    /// `zonecapacity`: bytes of a zone that can be written, of devices without zones.
    pub capacity_bytes: Option<u64>,
    /// `read_beyond_wp`: reads go where they were drawn.
    pub reads_beyond_pointer: bool,
    /// `max_open_zones`: zones that all jobs write at a time; 0 for the limit of the device.
    pub open_max: u32,
    /// `job_max_open_zones`: zones that this job writes at a time; 0 for no limit of its own.
    pub job_open_max: u32,
    /// `ignore_zone_limits`: the limit of the device does not count.
    pub ignores_limit: bool,
    /// `zone_reset_threshold`: share of the region with data above which zones are reset, 0 to 1.
    pub reset_threshold: f64,
    /// `zone_reset_frequency`: resets a write, 0 to 1.
    pub reset_frequency: f64,
}

impl Default for ZonedOptions {
    /// fio's defaults.
    fn default() -> Self {
        ZonedOptions {
            zone_bytes: None,
            capacity_bytes: None,
            reads_beyond_pointer: false,
            open_max: 0,
            job_open_max: 0,
            ignores_limit: false,
            reset_threshold: 1.0,
            reset_frequency: 0.0,
        }
    }
}

/// Sizes in zones, as `8z`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionInZones {
    /// `size`.
    pub size: Option<u64>,
    /// `offset`.
    pub offset: Option<u64>,
    /// `io_size`.
    pub io_size: Option<u64>,
    /// `offset_increment`.
    pub increment: Option<u64>,
}

/// Resets zones of a device and queries their write pointers.
pub(crate) trait ZoneCommands: Send + Sync + std::fmt::Debug {
    /// Resets the zone, which starts there and has this length, in bytes.
    fn reset(&self, start: u64, length: u64) -> io::Result<()>;
    /// The write pointer of the zone that starts there.
    fn pointer(&self, start: u64) -> io::Result<u64>;
}

/// The zones of a device, or of a file that pretends to have some.
#[derive(Debug)]
pub(crate) struct ZonedDevice {
    pub(crate) zone_bytes: u64,
    /// `None` where the zones exist here alone.
    commands: Option<Box<dyn ZoneCommands>>,
    /// Zones that may be written at a time; 0 for any number.
    open_max: u32,
    table: Mutex<ZoneTable>,
}

/// Where an I/O goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// At this offset, with this length; in bytes.
    At(u64, u64),
    /// Nowhere now: another I/O must complete first.
    Busy,
    /// There is no zone for it, and no I/O will change that.
    Exhausted,
    /// A command to the device failed.
    Failed(String),
}

/// A job on zones.
#[derive(Debug)]
pub(crate) struct ZonedJob {
    device: Arc<ZonedDevice>,
    options: ZonedOptions,
    /// Number of the job among those of the device.
    member: u32,
    region: Range<u64>,
    zones: Range<usize>,
    /// Smallest read, write and trim.
    min_bytes: [u64; 3],
    writes: bool,
    resets: u64,
}

#[cfg(test)]
impl ZonedDevice {
    /// Zones of a size, on which these commands work.
    pub(crate) fn of_test(bytes: u64, options: &ZonedOptions, commands: Box<dyn ZoneCommands>) -> Arc<Self> {
        let mut device = devices::emulated("x", bytes, options).unwrap();
        device.commands = Some(commands);
        Arc::new(device)
    }
}

impl ZonedDevice {
    /// Whether the device itself has zones.
    pub(crate) fn is_zoned(&self) -> bool {
        self.commands.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, ZoneTable> {
        sync::lock(&self.table)
    }

    /// Adds a job, before any job starts, with its region in bytes and its smallest I/Os.
    ///
    /// # Errors
    /// Zones that are open beyond the limits cannot be reset; limits that contradict each other.
    pub(crate) fn join(
        self: &Arc<Self>,
        options: &ZonedOptions,
        region: Range<u64>,
        min_bytes: [u64; 3],
        writes: bool,
    ) -> Result<ZonedJob, String> {
        if options.job_open_max > 0 && self.open_max == 0 {
            return Err("--job_max_open_zones needs --max_open_zones, or a device with a limit".to_string());
        }
        if options.open_max > 0 && options.open_max != self.open_max {
            return Err("--max_open_zones is the same for all jobs of a device".to_string());
        }
        let mut table = self.lock();
        let zones = table.index_of(region.start)..table.index_of(region.end.saturating_sub(1)) + 1;
        table.members += 1;
        let mut job = ZonedJob {
            device: self.clone(),
            options: options.clone(),
            member: table.members,
            region,
            zones: zones.clone(),
            min_bytes,
            writes,
            resets: 0,
        };
        if writes {
            table.count(zones.clone(), options.reset_frequency);
            for index in zones {
                if table.zones[index].was_open && !job.open(&mut table, index) {
                    // As fio does with those beyond the limit.
                    drop(table);
                    job.reset(index)?;
                    table = self.lock();
                }
            }
        }
        drop(table);
        Ok(job)
    }
}

impl ZonedJob {
    /// Write pointers that this job has reset.
    pub(crate) fn resets(&self) -> u64 {
        self.resets
    }

    /// Offset of the job's region, bytes.
    pub(crate) fn region_start(&self) -> u64 {
        self.region.start
    }

    /// The operation of a drawn I/O of a mixed job: a write while there is nothing to read, as in fio.
    pub(crate) fn op_of_mix(&self, op: Op) -> Op {
        let nothing_to_read = op == Op::Read
            && self.writes
            && !self.options.reads_beyond_pointer
            && self.device.lock().data_bytes == 0;
        if nothing_to_read { Op::Write } else { op }
    }

    /// Moves an I/O that was drawn at `at`, of `bytes` bytes, to where the zones permit it. All are bytes from the start
    /// of the device.
    pub(crate) fn place(&mut self, op: Op, at: u64, bytes: u64, is_random: bool) -> Placement {
        let device = self.device.clone();
        let mut table = device.lock();
        let index = table.index_of(at);
        let zone = &table.zones[index];
        if !zone.is_sequential {
            // It does not reach into a zone with a write pointer.
            let room = (zone.end - at).min(bytes);
            return Placement::At(at, if op == Op::Unmap { bytes } else { room });
        }
        match op {
            Op::Read if self.options.reads_beyond_pointer && zone.is_usable => Placement::At(at, bytes),
            Op::Read => self.place_read(&mut table, index, (at, bytes), is_random),
            Op::Write => self.place_write(table, index, (at, bytes)),
            _ => self.place_reset(&mut table, index, is_random),
        }
    }

    fn place_read(
        &self,
        table: &mut ZoneTable,
        drawn: usize,
        (at, bytes): (u64, u64),
        is_random: bool,
    ) -> Placement {
        let min = self.min_bytes[0];
        let has_data = |zone: &Zone| zone.is_usable && zone.written - zone.start >= min;
        let (is_here, from_start) = {
            let zone = &table.zones[drawn];
            let fits = is_random || at + min <= zone.written;
            (has_data(zone) && fits, at - zone.start)
        };
        let index = match is_here {
            true => drawn,
            false => match table.nearest(drawn, &self.zones, is_random, has_data) {
                Some(index) => index,
                None if table.zones[self.zones.clone()].iter().any(|zone| zone.writes > 0) => {
                    return Placement::Busy;
                }
                None => return Placement::Exhausted,
            },
        };
        let zone = &mut table.zones[index];
        let written = zone.written - zone.start;
        let start = match () {
            () if written <= bytes => zone.start,
            () if is_random => zone.start + from_start % (written - bytes) / min * min,
            () if is_here => at,
            () => zone.start,
        };
        if !zone.is_free_for(self.member) {
            return Placement::Busy;
        }
        let length = bytes.min(zone.written - start) / min * min;
        if zone.is_sequential {
            (zone.owner, zone.in_flight) = (self.member, zone.in_flight + 1);
        }
        Placement::At(start, length)
    }

    fn place_write(
        &mut self,
        mut table: MutexGuard<'_, ZoneTable>,
        drawn: usize,
        (at, bytes): (u64, u64),
    ) -> Placement {
        let min = self.min_bytes[1];
        let Some(index) = self.zone_to_write(&mut table, drawn, at) else {
            let sequential = |zone: &Zone| zone.is_sequential && zone.is_usable;
            let any = table.zones[self.zones.clone()].iter().any(sequential);
            return if any { Placement::Busy } else { Placement::Exhausted };
        };
        let mut zone = &mut table.zones[index];
        if !zone.is_free_for(self.member) || (zone.is_stale && zone.in_flight > 0) {
            return Placement::Busy;
        }
        if zone.is_stale
            && let Err(message) = self.refresh(zone)
        {
            return Placement::Failed(message);
        }
        let is_full = zone.room() < min;
        if !is_full && !zone.reset_is_due && self.reset_is_due(&mut table) {
            table.zones[index].reset_is_due = true;
        }
        zone = &mut table.zones[index];
        if is_full || zone.reset_is_due {
            if zone.in_flight > 0 {
                return Placement::Busy;
            }
            // No other job uses the zone while it is reset, without the lock.
            (zone.owner, zone.in_flight) = (self.member, 1);
            drop(table);
            let outcome = self.reset(index);
            let mut table = self.device.lock();
            table.zones[index].in_flight = 0;
            return match outcome {
                Ok(()) => self.write_at_pointer(&mut table, index, bytes),
                Err(message) => Placement::Failed(message),
            };
        }
        self.write_at_pointer(&mut table, index, bytes)
    }

    fn write_at_pointer(&self, table: &mut ZoneTable, index: usize, bytes: u64) -> Placement {
        let (min, is_counted) = (self.min_bytes[1], table.counted.contains(&index));
        let zone = &mut table.zones[index];
        let length = bytes.min(zone.room()) / min * min;
        if length == 0 {
            return Placement::Failed(format!(
                "a zone has room for {} bytes, less than a write",
                zone.room()
            ));
        }
        let at = zone.pointer;
        zone.pointer += length;
        (zone.owner, zone.in_flight, zone.writes) = (self.member, zone.in_flight + 1, zone.writes + 1);
        table.data_bytes += if is_counted { length } else { 0 };
        Placement::At(at, length)
    }

    /// A trim resets a zone; a random one has a zone with data.
    fn place_reset(&self, table: &mut ZoneTable, drawn: usize, is_random: bool) -> Placement {
        let has_data = |zone: &Zone| zone.is_sequential && zone.is_usable && zone.pointer > zone.start;
        let index = match has_data(&table.zones[drawn]) || !is_random {
            true => drawn,
            false => match table.nearest(drawn, &self.zones, true, has_data) {
                Some(index) => index,
                None => return Placement::Exhausted,
            },
        };
        let zone = &mut table.zones[index];
        if zone.in_flight > 0 {
            return Placement::Busy;
        }
        (zone.owner, zone.in_flight) = (self.member, 1);
        Placement::At(zone.start, zone.end - zone.start)
    }

    /// The zone of a write that was drawn in zone `drawn`: that one, or an open one where no other may be opened. `None`
    /// if all open ones are about to be full.
    fn zone_to_write(&self, table: &mut ZoneTable, drawn: usize, at: u64) -> Option<usize> {
        if self.open(table, drawn) {
            return Some(drawn);
        }
        let (count, length) = (table.open.len(), (self.region.end - self.region.start).max(1));
        let first = u128::from(at - self.region.start) * count as u128 / u128::from(length);
        (0..count)
            .map(|step| table.open[(first as usize + step) % count])
            .find(|index| self.zones.contains(index) && self.takes_write(&table.zones[*index]))
    }

    /// Whether a zone may be written: it is open, or the limits permit to open it.
    fn open(&self, table: &mut ZoneTable, index: usize) -> bool {
        let (limit, job_limit) = (self.device.open_max as usize, self.options.job_open_max as usize);
        let zone = &table.zones[index];
        if !zone.is_usable || !zone.is_sequential {
            return false;
        }
        if limit == 0 {
            return true;
        }
        if zone.opened_by.is_some() {
            return self.takes_write(zone);
        }
        let own = || table.zones.iter().filter(|zone| zone.opened_by == Some(self.member)).count();
        if table.open.len() >= limit || (job_limit > 0 && own() >= job_limit) {
            return false;
        }
        table.open.push(index);
        table.zones[index].opened_by = Some(self.member);
        true
    }

    /// Whether an open zone takes a write, or will once it is reset. One that writes in flight fill does not: it closes.
    fn takes_write(&self, zone: &Zone) -> bool {
        zone.room() >= self.min_bytes[1] || zone.writes == 0
    }

    /// Counts a write; returns whether it resets its zone, by the threshold and the frequency of resets.
    fn reset_is_due(&self, table: &mut ZoneTable) -> bool {
        let size = (self.region.end - self.region.start) as f64;
        if self.options.reset_frequency == 0.0
            || (table.data_bytes as f64) < size * self.options.reset_threshold
        {
            return false;
        }
        table.writes_to_reset = table.writes_to_reset.saturating_sub(1);
        if table.writes_to_reset > 0 {
            return false;
        }
        table.writes_to_reset = writes_per_reset(self.options.reset_frequency);
        true
    }

    /// Resets a zone that no other I/O uses. The caller has no lock.
    fn reset(&mut self, index: usize) -> Result<(), String> {
        let device = self.device.clone();
        let (start, end, has_data) = {
            let zone = &device.lock().zones[index];
            (zone.start, zone.end, zone.pointer > zone.start)
        };
        if let (Some(commands), true) = (&device.commands, has_data) {
            commands
                .reset(start, end - start)
                .map_err(|error| format!("the zone at {start} cannot be reset: {error}"))?;
        }
        self.resets += u64::from(has_data);
        device.lock().was_reset(index);
        Ok(())
    }

    /// Reads the write pointer of a zone again, after a write in it failed.
    fn refresh(&self, zone: &mut Zone) -> Result<(), String> {
        if let Some(commands) = &self.device.commands {
            let failed = |error| format!("the zone at {} cannot be queried: {error}", zone.start);
            let pointer = commands.pointer(zone.start).map_err(failed)?;
            (zone.pointer, zone.written) = (pointer, pointer);
        }
        zone.is_stale = false;
        Ok(())
    }

    /// A placed I/O has completed.
    pub(crate) fn completed(&mut self, op: Op, at: u64, success: bool) {
        let device = self.device.clone();
        let mut table = device.lock();
        let index = table.index_of(at);
        let zone = &mut table.zones[index];
        if !zone.is_sequential || (op == Op::Read && self.options.reads_beyond_pointer) {
            return;
        }
        zone.in_flight = zone.in_flight.saturating_sub(1);
        match op {
            Op::Write => {
                zone.is_stale |= !success;
                zone.writes = zone.writes.saturating_sub(1);
                if zone.writes == 0 {
                    zone.written = zone.pointer;
                    if zone.room() < self.min_bytes[1] {
                        table.close(index);
                    }
                }
            }
            Op::Unmap if success => {
                self.resets += u64::from(zone.pointer > zone.start);
                table.was_reset(index);
            }
            _ => {}
        }
    }

    /// A placed I/O is not submitted. Those of one zone are cancelled from the last one on.
    pub(crate) fn cancel(&mut self, op: Op, at: u64) {
        let device = self.device.clone();
        let mut table = device.lock();
        let index = table.index_of(at);
        let is_counted = table.counted.contains(&index);
        let zone = &mut table.zones[index];
        if !zone.is_sequential || (op == Op::Read && self.options.reads_beyond_pointer) {
            return;
        }
        zone.in_flight = zone.in_flight.saturating_sub(1);
        if op == Op::Write {
            zone.writes = zone.writes.saturating_sub(1);
            let length = zone.pointer.saturating_sub(at);
            zone.pointer = zone.pointer.min(at);
            table.data_bytes -= if is_counted { length.min(table.data_bytes) } else { 0 };
        }
    }
}

/// Writes from one reset to the next.
fn writes_per_reset(frequency: f64) -> u64 {
    if frequency > 0.0 { (1.0 / frequency) as u64 } else { u64::MAX }
}
