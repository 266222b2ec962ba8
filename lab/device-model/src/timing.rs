//! Completion times: every resource is scheduled at the moment of submission.
//!
//! A command passes the front end (a command rate and a byte rate), then its dies, then a path latency
//! drawn from a distribution. Each resource is a single number, the time at which it is next free, so a
//! command costs a few additions and one or two table loads. Writes to a buffered device are collected
//! into units; each unit is a program operation scheduled on a die. The buffer is the maximum number of
//! programs in flight, n: a write waits for the end of the nth program before its own.

use std::sync::Arc;

use block_io::Op;

use crate::flash::{AMPLIFICATION_SHIFT, FlashState};
use crate::profile::{DeviceProfile, MediaState};
use crate::quantile::QuantileTable;
use crate::rng::{ModelRng, mix_address};

/// The properties of a command that its latency depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoCommand {
    /// Operation.
    pub op: Op,
    /// Byte offset on the device.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Force Unit Access: a write completes only once it is on the medium.
    pub fua: bool,
}

/// A profile prepared for scheduling: distributions as tables, rates as times. Shared by all cores.
#[derive(Debug)]
pub(crate) struct TimingParams {
    pub(crate) profile: DeviceProfile,
    read_die: QuantileTable,
    large_die: QuantileTable,
    read_path: QuantileTable,
    write_die: QuantileTable,
    write_path: QuantileTable,
    flush: QuantileTable,
    deallocate: QuantileTable,
    /// Nanoseconds per command, and nanoseconds per byte to the host and from the host.
    read_step_ns: f64,
    write_step_ns: f64,
    read_byte_ns: f64,
    write_byte_ns: f64,
    split_read_ns: u64,
    split_write_ns: u64,
    /// Nanoseconds per byte of commands that are split over several dies.
    split_byte_ns: f64,
    page_shift: u32,
    large_shift: u32,
    /// Probability times 2^32 that a read suspends a program.
    suspend: u64,
    suspend_ns: u64,
    erase_ns: u64,
    /// Share of erases in the program and erase time, times 2^32.
    erase: u64,
    unit_bytes: u64,
    buffer_units: f64,
    program_ns: u64,
    slc_program_ns: u64,
    burst_ns: u64,
}

/// Fractional bits of a time per byte.
const BYTE_SHIFT: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
struct Die {
    /// End of the scheduled reads.
    free: u64,
    /// End of the scheduled programs.
    programs_end: u64,
}

/// The queueing model of one core's share of a device.
///
/// It owns the time at which each resource is next free: front end, link in both directions, dies and
/// write buffer. [`schedule`](Self::schedule) is called once per command, in order of arrival, and
/// returns the completion time; [`set_share`](Self::set_share) resizes the share at any time. A command
/// costs a few additions and one or two table loads, without an event per stage. Times are nanoseconds
/// of any monotonic clock.
#[derive(Debug)]
pub(crate) struct TimingModel {
    params: Arc<TimingParams>,
    flash: Arc<FlashState>,
    random: ModelRng,
    now: u64,
    share: f64,
    front: u64,
    link_from_host: u64,
    link_to_host: u64,
    read_step: u64,
    write_step: u64,
    read_byte: u64,
    split_byte: u64,
    write_byte: u64,
    /// Time per byte of a single transfer at the rate of the whole device, not of the share.
    read_transfer: u64,
    write_transfer: u64,
    /// Latency of a read besides its transfer, if it is constant and involves no die.
    constant_read_ns: Option<u64>,
    dies: Box<[Die]>,
    /// Number of dies in this share.
    dies_used: u64,
    /// 2^64 divided by `dies_used`, rounded up: replaces a division by a multiplication.
    stripe_inverse: u64,
    buffer: WriteBuffer,
}

/// No write starts at this offset, which no device has.
const NO_STREAM: u64 = u64::MAX;

/// The write buffer and garbage collection state of a share.
#[derive(Debug)]
struct WriteBuffer {
    /// Bytes collected for the next unit.
    pending_bytes: u64,
    /// Program end of each unit in the buffer, as a ring.
    program_ends: Box<[u64]>,
    /// Number of units in this share.
    used: usize,
    position: usize,
    /// When the buffer has space for the unit being collected.
    space_at: u64,
    /// When all scheduled programs are complete.
    drained_at: u64,
    next_die: u64,
    /// Deferred garbage collection work in nanoseconds, summed over the dies.
    gc_debt_ns: u64,
    /// Moving average of the share of random writes, 0 to 255, times 256.
    randomness: u32,
    /// Ends of the most recent write streams, or [`NO_STREAM`], to detect sequential writes.
    streams: [u64; 4],
    stream: usize,
}

impl TimingParams {
    pub(crate) fn new(profile: DeviceProfile) -> TimingParams {
        let ns = |us: f64| (us * 1000.0).round() as u64;
        let (read, write) = (&profile.read, &profile.write);
        let unit_bytes = ((write.unit_kib * 1024.0) as u64).max(512);
        TimingParams {
            read_die: QuantileTable::new(&read.die_us),
            large_die: QuantileTable::new(if read.large_die_us.is_empty() {
                &read.die_us
            } else {
                &read.large_die_us
            }),
            read_path: QuantileTable::new(&read.path_us),
            write_die: QuantileTable::new(&write.die_us),
            write_path: QuantileTable::new(&write.path_us),
            flush: QuantileTable::new(&profile.flush_us),
            deallocate: QuantileTable::new(&profile.deallocate_us),
            read_step_ns: 1e9 / profile.front.read_iops,
            write_step_ns: 1e9 / profile.front.write_iops,
            read_byte_ns: 1e3 / profile.front.read_mb_s,
            write_byte_ns: 1e3 / profile.front.write_mb_s,
            split_read_ns: ns(read.split_us),
            split_write_ns: ns(write.split_us),
            split_byte_ns: 1e3
                / if read.split_mb_s > 0.0 { read.split_mb_s } else { profile.front.read_mb_s },
            page_shift: profile.device.page_bytes.trailing_zeros(),
            large_shift: profile.device.page_bytes.max(read.large_page_bytes).trailing_zeros(),
            suspend: (read.suspend_probability * 2f64.powi(32)) as u64,
            suspend_ns: ns(read.suspend_us),
            erase_ns: ns(profile.gc.as_ref().map_or(0.0, |gc| gc.erase_us)),
            erase: (profile.gc.as_ref().map_or(0.0, |gc| gc.erase_percent) / 100.0 * 2f64.powi(32)) as u64,
            unit_bytes,
            buffer_units: (write.buffer_kib * 1024.0 / unit_bytes as f64).max(1.0),
            program_ns: ns(write.program_us),
            slc_program_ns: ns(profile.slc.as_ref().map_or(0.0, |slc| slc.program_us)),
            burst_ns: ns(profile.gc.as_ref().map_or(0.0, |gc| gc.burst_ms) * 1000.0),
            profile,
        }
    }

    /// Approximate minimum latency of a command.
    pub(crate) fn min_latency_ns(&self) -> u64 {
        let read = self.read_die.min_ns() + self.read_path.min_ns();
        let write = self.write_die.min_ns() + self.write_path.min_ns();
        read.min(write)
    }
}

impl TimingModel {
    /// A model of the whole device; [`set_share`](Self::set_share) reduces it to a share.
    pub(crate) fn new(params: Arc<TimingParams>, flash: Arc<FlashState>, seed: u64) -> TimingModel {
        let dies = vec![Die::default(); params.profile.media.dies as usize].into_boxed_slice();
        let units = if params.profile.is_buffered() { params.buffer_units.round() as usize } else { 0 };
        let buffer = WriteBuffer {
            pending_bytes: 0,
            program_ends: vec![0; units].into_boxed_slice(),
            used: units,
            position: 0,
            space_at: 0,
            drained_at: 0,
            next_die: 0,
            gc_debt_ns: 0,
            randomness: 255 << 8,
            streams: [NO_STREAM; 4],
            stream: 0,
        };
        let is_constant = dies.is_empty() && params.split_byte_ns == params.read_byte_ns;
        let constant_read_ns = params.read_path.constant_value_ns().filter(|_| is_constant);
        let mut timing = TimingModel {
            params,
            flash,
            random: ModelRng::new(seed),
            now: 0,
            share: 0.0,
            front: 0,
            link_from_host: 0,
            link_to_host: 0,
            read_step: 0,
            write_step: 0,
            read_byte: 0,
            split_byte: 0,
            write_byte: 0,
            read_transfer: 0,
            write_transfer: 0,
            constant_read_ns,
            dies,
            dies_used: 0,
            stripe_inverse: 0,
            buffer,
        };
        timing.set_share(1.0);
        timing
    }

    /// A device that is used by one core alone.
    pub(crate) fn whole_device(
        profile: &DeviceProfile,
        bytes: u64,
        state: MediaState,
        seed: u64,
    ) -> TimingModel {
        let flash = Arc::new(FlashState::new(profile, bytes, state));
        TimingModel::new(Arc::new(TimingParams::new(profile.clone())), flash, seed)
    }

    /// Sets the share of the device's rates, dies and buffer: above 0 and at most 1.
    pub(crate) fn set_share(&mut self, share: f64) {
        let params = &*self.params;
        let share = share.clamp(1e-6, 1.0);
        if share == self.share {
            return;
        }
        self.share = share;
        self.read_step = (params.read_step_ns / share).round() as u64;
        self.write_step = (params.write_step_ns / share).round() as u64;
        let to_fixed = |byte_ns: f64| (byte_ns * f64::from(1 << BYTE_SHIFT)).round() as u64;
        self.read_byte = to_fixed(params.read_byte_ns / share);
        self.split_byte = to_fixed(params.split_byte_ns / share);
        self.write_byte = to_fixed(params.write_byte_ns / share);
        self.read_transfer = to_fixed(params.read_byte_ns);
        self.write_transfer = to_fixed(params.write_byte_ns);
        if !self.dies.is_empty() {
            self.dies_used = ((self.dies.len() as f64 * share).round() as u64).max(1);
            // With one die 2^64 would overflow; every page is a stripe then, except for rounding.
            self.stripe_inverse = (u64::MAX / self.dies_used).saturating_add(1);
        }
        if !self.buffer.program_ends.is_empty() {
            self.buffer.used = ((self.buffer.program_ends.len() as f64 * share).round() as usize).max(1);
            self.buffer.position %= self.buffer.used;
        }
    }

    /// Schedules a command that arrives at `now` and returns its completion time.
    #[inline(always)]
    pub(crate) fn schedule(&mut self, now: u64, io: &IoCommand) -> u64 {
        self.now = self.now.max(now);
        match io.op {
            Op::Read => match self.constant_read_ns {
                Some(path_ns) => self.read_constant(io, path_ns),
                None => self.read(io),
            },
            Op::Write if self.buffer.program_ends.is_empty() => self.write_through(io),
            Op::Write => self.write(io),
            Op::Flush => self.flush(),
            Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable => self.deallocate(io),
            _ => self.now,
        }
    }

    /// Whether the read latency is independent of randomness and offset: no dies and a constant path.
    #[inline]
    pub(crate) fn has_constant_read_time(&self) -> bool {
        self.constant_read_ns.is_some()
    }

    /// Schedules `count` reads of one size; requires
    /// [`has_constant_read_time`](Self::has_constant_read_time).
    #[inline]
    pub(crate) fn schedule_identical_reads(
        &mut self,
        now: u64,
        bytes: u32,
        count: usize,
        completion_times: &mut Vec<u64>,
    ) {
        self.now = self.now.max(now);
        let path_ns = self.constant_read_ns.unwrap_or(0);
        let cost = self.constant_read_cost(bytes, path_ns);
        completion_times.extend((0..count).map(|_| self.schedule_constant_read(cost)));
    }

    /// A read of a device without dies whose path latency is a constant.
    #[inline(always)]
    fn read_constant(&mut self, io: &IoCommand, path_ns: u64) -> u64 {
        self.schedule_constant_read(self.constant_read_cost(io.bytes, path_ns))
    }

    /// Link occupancy and remaining latency of a read, in nanoseconds.
    #[inline(always)]
    fn constant_read_cost(&self, bytes: u32, path_ns: u64) -> (u64, u64) {
        let bytes = u64::from(bytes);
        let transfer = (bytes * self.read_transfer) >> BYTE_SHIFT;
        ((bytes * self.read_byte) >> BYTE_SHIFT, path_ns + transfer)
    }

    #[inline(always)]
    fn schedule_constant_read(&mut self, (link_ns, rest_ns): (u64, u64)) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.read_step;
        let begin = begin.max(self.link_to_host);
        self.link_to_host = begin + link_ns;
        begin + rest_ns
    }

    #[inline(never)]
    fn read(&mut self, io: &IoCommand) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.read_step;
        let transfer = (u64::from(io.bytes) * self.read_transfer) >> BYTE_SHIFT;
        let large_shift = self.params.large_shift;
        let last_byte = io.offset + u64::from(io.bytes).max(1) - 1;
        let parts = (last_byte >> large_shift) - (io.offset >> large_shift);
        // The link is scheduled at submission, so a slow die does not delay the data of other commands.
        let begin = begin.max(self.link_to_host);
        let byte = if parts == 0 { self.read_byte } else { self.split_byte };
        self.link_to_host = begin + ((u64::from(io.bytes) * byte) >> BYTE_SHIFT);
        let bits = self.random.next_u64();
        let path = self.params.read_path.sample(bits as u32) + transfer;
        if self.dies_used == 0 {
            return begin + path;
        }
        let page_shift = self.params.page_shift;
        let first = io.offset >> page_shift;
        let last = last_byte >> page_shift;
        if first == last {
            let service = self.params.read_die.sample((bits >> 32) as u32);
            return self.read_page(first, begin, service) + path;
        }
        let first = io.offset >> large_shift;
        let mut done = begin;
        // Adjacent pages were written together to the same page type on each die: same service time.
        let service = self.params.large_die.sample((bits >> 32) as u32);
        for part in first..=first + parts {
            done = done.max(self.read_page(part, begin, service));
        }
        done + path + if parts == 0 { 0 } else { self.params.split_read_ns }
    }

    /// Schedules a page read on its die and returns its end.
    #[inline]
    fn read_page(&mut self, page: u64, begin: u64, service: u64) -> u64 {
        let die = self.die_of(page);
        let at = &mut self.dies[die];
        let mut start = begin.max(at.free);
        if start < at.programs_end {
            start += Self::suspend_program(&self.params, &mut self.random, at, start, service);
        }
        at.free = start + service;
        at.free
    }

    /// Delay of a read that meets a program or erase on its die; the program end is postponed.
    #[cold]
    fn suspend_program(
        params: &TimingParams,
        random: &mut ModelRng,
        at: &mut Die,
        start: u64,
        service: u64,
    ) -> u64 {
        let left = at.programs_end - start;
        let wait = if random.next_u64() >> 32 < params.suspend {
            params.suspend_ns.min(left)
        } else {
            // Programs and erases are queued; a read is served between two of them.
            let erases = random.next_u64() >> 32 < params.erase && params.erase_ns > 0;
            left % if erases { params.erase_ns } else { params.program_ns.max(1) }
        };
        at.programs_end += service + wait.min(params.suspend_ns);
        wait
    }

    /// The die of a page: round robin within a stripe, with a start that varies by stripe.
    #[inline]
    fn die_of(&self, page: u64) -> usize {
        let high = |left: u64, right: u64| ((u128::from(left) * u128::from(right)) >> 64) as u64;
        let stripe = high(page, self.stripe_inverse);
        // For large offsets, rounding may assign the last page of a stripe to the next one.
        let place = page.wrapping_sub(stripe.wrapping_mul(self.dies_used)).min(self.dies_used - 1);
        let rotated = place + high(mix_address(stripe), self.dies_used);
        (if rotated >= self.dies_used { rotated - self.dies_used } else { rotated }) as usize
    }

    /// A write to a device without a buffer.
    #[inline]
    fn write_through(&mut self, io: &IoCommand) -> u64 {
        let begin = self.schedule_write_transfer(io);
        let bits = self.random.next_u64();
        let path = self.params.write_path.sample(bits as u32);
        if self.dies_used == 0 {
            return begin + path;
        }
        let page_shift = self.params.page_shift;
        let first = io.offset >> page_shift;
        let last = (io.offset + u64::from(io.bytes).max(1) - 1) >> page_shift;
        let mut done = begin;
        for page in first..=last {
            let service = self.params.write_die.sample(self.random.next_u64() as u32);
            let die = self.die_of(page);
            let at = &mut self.dies[die];
            at.free = begin.max(at.free) + service;
            done = done.max(at.free);
        }
        done + path + if first == last { 0 } else { self.params.split_write_ns }
    }

    #[inline]
    fn schedule_write_transfer(&mut self, io: &IoCommand) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.write_step;
        let begin = begin.max(self.link_from_host);
        self.link_from_host = begin + ((u64::from(io.bytes) * self.write_byte) >> BYTE_SHIFT);
        // A write starts once its data has arrived.
        begin + ((u64::from(io.bytes) * self.write_transfer) >> BYTE_SHIFT)
    }

    fn write(&mut self, io: &IoCommand) -> u64 {
        let begin = self.schedule_write_transfer(io);
        self.track_write_order(io);
        let page = u64::from(self.params.profile.device.page_bytes);
        // A partial page is programmed as a whole page.
        self.buffer.pending_bytes += u64::from(io.bytes).next_multiple_of(page);
        let mut space_at = self.buffer.space_at;
        while self.buffer.pending_bytes >= self.params.unit_bytes {
            self.buffer.pending_bytes -= self.params.unit_bytes;
            self.program(begin);
            space_at = space_at.max(self.buffer.space_at);
        }
        let acknowledged = begin.max(space_at) + self.params.write_path.sample(self.random.next_u64() as u32);
        if io.fua && !self.params.profile.device.power_loss_protection {
            return acknowledged.max(self.buffer.drained_at) + self.params.program_ns;
        }
        acknowledged
    }

    /// Schedules the program of a unit on the next die, and the garbage collection it causes.
    fn program(&mut self, begin: u64) {
        let params = &*self.params;
        let buffer = &mut self.buffer;
        let cost = self.flash.write(begin, params.unit_bytes, buffer.randomness >> 8);
        let mut duration = if cost.to_slc { params.slc_program_ns } else { params.program_ns };
        let extra = u64::from(cost.amplification) - (1 << AMPLIFICATION_SHIFT);
        let work = (params.program_ns * extra) >> AMPLIFICATION_SHIFT;
        if params.burst_ns == 0 {
            duration += work;
        } else {
            buffer.gc_debt_ns += work;
            let burst_ns = params.burst_ns;
            if buffer.gc_debt_ns >= burst_ns * self.dies_used {
                buffer.gc_debt_ns -= burst_ns * self.dies_used;
                for at in &mut self.dies[..self.dies_used as usize] {
                    at.programs_end = at.programs_end.max(begin) + burst_ns;
                }
            }
        }
        let at = &mut self.dies[buffer.next_die as usize];
        buffer.next_die = if buffer.next_die + 1 >= self.dies_used { 0 } else { buffer.next_die + 1 };
        at.programs_end = at.programs_end.max(begin).max(at.free) + duration;
        let end = at.programs_end;
        buffer.program_ends[buffer.position] = end;
        buffer.position = if buffer.position + 1 >= buffer.used { 0 } else { buffer.position + 1 };
        buffer.space_at = buffer.program_ends[buffer.position];
        buffer.drained_at = buffer.drained_at.max(end);
    }

    /// Tracks the share of random writes; a write that starts at the end of a stream is sequential.
    fn track_write_order(&mut self, io: &IoCommand) {
        let buffer = &mut self.buffer;
        let end = io.offset + u64::from(io.bytes);
        let continues = buffer.streams.iter_mut().find(|stream| **stream == io.offset);
        let random = match continues {
            Some(stream) => {
                *stream = end;
                0
            }
            None => {
                buffer.streams[buffer.stream] = end;
                buffer.stream = (buffer.stream + 1) % buffer.streams.len();
                255
            }
        };
        buffer.randomness = buffer.randomness - (buffer.randomness >> 8) + random;
    }

    fn flush(&mut self) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.write_step;
        let mut done = begin;
        if !self.params.profile.device.power_loss_protection && !self.buffer.program_ends.is_empty() {
            if self.buffer.pending_bytes > 0 {
                self.buffer.pending_bytes = 0;
                self.program(begin);
            }
            done = done.max(self.buffer.drained_at);
        }
        done + self.params.flush.sample(self.random.next_u64() as u32)
    }

    fn deallocate(&mut self, io: &IoCommand) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.write_step;
        self.flash.deallocate(u64::from(io.bytes));
        begin + self.params.deallocate.sample(self.random.next_u64() as u32)
    }
}
