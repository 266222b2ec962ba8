//! When a command completes: every resource is booked at the moment of submission.
//!
//! A command passes the front end (a rate of commands, a rate of bytes), then its dies, then a path
//! that is as long as its distribution says. Each resource is one number, the time at which it is next
//! free, so that a command costs a few additions and one or two table loads. Writes to a buffered
//! device gather into units; each unit is a program booked on a die, and the buffer is as many units
//! as may be under way: a write waits for the end of the unit that many before it.

use std::sync::Arc;

use ring::Op;

use crate::curve::Curve;
use crate::profile::{Profile, State};
use crate::random::{Random, scatter};
use crate::wear::{AMPLIFICATION_SHIFT, Wear};

/// The facts of a command that its time depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// What is asked for.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u32,
    /// Whether a write is to be on the medium when it is acknowledged.
    pub fua: bool,
}

/// A profile made ready: distributions tabulated, rates as times. Shared by all that book on it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) profile: Profile,
    read_die: Curve,
    large_die: Curve,
    read_path: Curve,
    write_die: Curve,
    write_path: Curve,
    flush: Curve,
    deallocate: Curve,
    /// Nanoseconds a command, and nanoseconds a byte as fixed point: to the host, from the host.
    read_step_ns: f64,
    write_step_ns: f64,
    read_byte_ns: f64,
    write_byte_ns: f64,
    split_read_ns: u64,
    split_write_ns: u64,
    /// Nanoseconds a byte of commands of several parts, as fixed point.
    split_byte_ns: f64,
    page_shift: u32,
    large_shift: u32,
    /// Out of 2^32.
    suspend: u64,
    suspend_ns: u64,
    erase_ns: u64,
    /// Out of 2^32.
    erase: u64,
    unit_bytes: u64,
    buffer_units: f64,
    program_ns: u64,
    slc_program_ns: u64,
    burst_ns: u64,
}

/// Fixed-point position of a time a byte.
const BYTE_SHIFT: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
struct Die {
    /// When the reads that are booked are done.
    free: u64,
    /// When the programs that are booked are done.
    programmed: u64,
}

/// One core's share of a device in time. Times are nanoseconds of any clock that does not go back.
#[derive(Debug)]
pub(crate) struct Timing {
    plan: Arc<Plan>,
    wear: Arc<Wear>,
    random: Random,
    now: u64,
    share: f64,
    front: u64,
    link_in: u64,
    link_out: u64,
    read_step: u64,
    write_step: u64,
    read_byte: u64,
    split_byte: u64,
    write_byte: u64,
    /// The same of the whole device: what a transfer itself takes.
    read_transfer: u64,
    write_transfer: u64,
    /// What a read takes beside its transfer, where that is always the same and no die is asked.
    plain_read_ns: Option<u64>,
    dies: Box<[Die]>,
    /// Of `dies`, those in this share.
    dies_used: u64,
    /// 2^64 divided by `dies_used`, rounded up: a division for the price of a multiplication.
    stripe_inverse: u64,
    buffer: Buffer,
}

/// The write buffer of a share.
#[derive(Debug)]
struct Buffer {
    /// Bytes gathered for the next unit.
    gathered: u64,
    /// The end of each unit under way, in a ring.
    ends: Box<[u64]>,
    /// Of `ends`, those in this share.
    used: usize,
    position: usize,
    /// When there is room for the unit that gathers.
    room_at: u64,
    /// When everything that was booked is programmed.
    drained_at: u64,
    next_die: u64,
    /// Work of garbage collection that is put off, in nanoseconds of every die.
    debt_ns: u64,
    /// Share of writes that do not continue another, 0 to 255, as a moving average times 256.
    randomness: u32,
    /// Where the last sequential streams ended.
    streams: [u64; 4],
    stream: usize,
}

impl Plan {
    pub(crate) fn new(profile: Profile) -> Plan {
        let ns = |us: f64| (us * 1000.0).round() as u64;
        let (read, write) = (&profile.read, &profile.write);
        let unit_bytes = ((write.unit_kib * 1024.0) as u64).max(512);
        Plan {
            read_die: Curve::new(&read.die_us),
            large_die: Curve::new(if read.large_die_us.is_empty() {
                &read.die_us
            } else {
                &read.large_die_us
            }),
            read_path: Curve::new(&read.path_us),
            write_die: Curve::new(&write.die_us),
            write_path: Curve::new(&write.path_us),
            flush: Curve::new(&profile.flush_us),
            deallocate: Curve::new(&profile.deallocate_us),
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

    /// About the shortest time that a command takes.
    pub(crate) fn least_ns(&self) -> u64 {
        let read = self.read_die.least_ns() + self.read_path.least_ns();
        let write = self.write_die.least_ns() + self.write_path.least_ns();
        read.min(write)
    }
}

impl Timing {
    /// The whole device; [`set_share`](Self::set_share) makes it a part.
    pub(crate) fn new(plan: Arc<Plan>, wear: Arc<Wear>, seed: u64) -> Timing {
        let dies = vec![Die::default(); plan.profile.media.dies as usize].into_boxed_slice();
        let units = if plan.profile.is_buffered() { plan.buffer_units.round() as usize } else { 0 };
        let buffer = Buffer {
            gathered: 0,
            ends: vec![0; units].into_boxed_slice(),
            used: units,
            position: 0,
            room_at: 0,
            drained_at: 0,
            next_die: 0,
            debt_ns: 0,
            randomness: 255 << 8,
            streams: [u64::MAX; 4],
            stream: 0,
        };
        let is_plain = dies.is_empty() && plan.split_byte_ns == plan.read_byte_ns;
        let plain_read_ns = plan.read_path.constant_ns_if_any().filter(|_| is_plain);
        let mut timing = Timing {
            plan,
            wear,
            random: Random::new(seed),
            now: 0,
            share: 0.0,
            front: 0,
            link_in: 0,
            link_out: 0,
            read_step: 0,
            write_step: 0,
            read_byte: 0,
            split_byte: 0,
            write_byte: 0,
            read_transfer: 0,
            write_transfer: 0,
            plain_read_ns,
            dies,
            dies_used: 0,
            stripe_inverse: 0,
            buffer,
        };
        timing.set_share(1.0);
        timing
    }

    /// A device of its own, with nobody to share with.
    pub(crate) fn alone(profile: &Profile, bytes: u64, state: State, seed: u64) -> Timing {
        let wear = Arc::new(Wear::new(profile, bytes, state));
        Timing::new(Arc::new(Plan::new(profile.clone())), wear, seed)
    }

    /// Takes a part of the device, over 0 and up to 1: of its rates, its dies and its buffer.
    pub(crate) fn set_share(&mut self, share: f64) {
        let plan = &*self.plan;
        let share = share.clamp(1e-6, 1.0);
        if share == self.share {
            return;
        }
        self.share = share;
        self.read_step = (plan.read_step_ns / share).round() as u64;
        self.write_step = (plan.write_step_ns / share).round() as u64;
        let fixed = |byte_ns: f64| (byte_ns * f64::from(1 << BYTE_SHIFT)).round() as u64;
        self.read_byte = fixed(plan.read_byte_ns / share);
        self.split_byte = fixed(plan.split_byte_ns / share);
        self.write_byte = fixed(plan.write_byte_ns / share);
        self.read_transfer = fixed(plan.read_byte_ns);
        self.write_transfer = fixed(plan.write_byte_ns);
        if !self.dies.is_empty() {
            self.dies_used = ((self.dies.len() as f64 * share).round() as u64).max(1);
            // Of one die 2^64 is no number; every page is a stripe then, but for rounding.
            self.stripe_inverse = (u64::MAX / self.dies_used).saturating_add(1);
        }
        if !self.buffer.ends.is_empty() {
            self.buffer.used = ((self.buffer.ends.len() as f64 * share).round() as usize).max(1);
            self.buffer.position %= self.buffer.used;
        }
    }

    /// Books a command that arrives now; gives the time at which it completes.
    #[inline(always)]
    pub(crate) fn book(&mut self, now: u64, io: &Io) -> u64 {
        self.now = self.now.max(now);
        match io.op {
            Op::Read => match self.plain_read_ns {
                Some(path_ns) => self.read_plain(io, path_ns),
                None => self.read(io),
            },
            Op::Write if self.buffer.ends.is_empty() => self.write_through(io),
            Op::Write => self.write(io),
            Op::Flush => self.flush(),
            Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable => self.deallocate(io),
            Op::Reset | Op::Compare => self.now,
        }
    }

    /// Whether neither chance nor place matters to reads: no dies, and a path that is a constant.
    #[inline]
    pub(crate) fn is_plain_read(&self) -> bool {
        self.plain_read_ns.is_some()
    }

    /// Books so many reads of one size of a device for which [`is_plain_read`](Self::is_plain_read).
    #[inline]
    pub(crate) fn book_alike(&mut self, now: u64, bytes: u32, count: usize, ends: &mut Vec<u64>) {
        self.now = self.now.max(now);
        let path_ns = self.plain_read_ns.unwrap_or(0);
        let cost = self.plain_cost(bytes, path_ns);
        ends.extend((0..count).map(|_| self.pass_plain(cost)));
    }

    /// A read of a device without dies whose path is a constant: neither chance nor place matters.
    #[inline(always)]
    fn read_plain(&mut self, io: &Io, path_ns: u64) -> u64 {
        self.pass_plain(self.plain_cost(io.bytes, path_ns))
    }

    /// How long a read keeps the link busy, and how long it takes behind it.
    #[inline(always)]
    fn plain_cost(&self, bytes: u32, path_ns: u64) -> (u64, u64) {
        let bytes = u64::from(bytes);
        let transfer = (bytes * self.read_transfer) >> BYTE_SHIFT;
        ((bytes * self.read_byte) >> BYTE_SHIFT, path_ns + transfer)
    }

    #[inline(always)]
    fn pass_plain(&mut self, (link_ns, rest_ns): (u64, u64)) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.read_step;
        let begin = begin.max(self.link_out);
        self.link_out = begin + link_ns;
        begin + rest_ns
    }

    #[inline(never)]
    fn read(&mut self, io: &Io) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.read_step;
        let transfer = (u64::from(io.bytes) * self.read_transfer) >> BYTE_SHIFT;
        let large_shift = self.plan.large_shift;
        let last_byte = io.offset + u64::from(io.bytes).max(1) - 1;
        let parts = (last_byte >> large_shift) - (io.offset >> large_shift);
        // The link is booked on the way in, so that one slow die holds up nobody else's data.
        let begin = begin.max(self.link_out);
        let byte = if parts == 0 { self.read_byte } else { self.split_byte };
        self.link_out = begin + ((u64::from(io.bytes) * byte) >> BYTE_SHIFT);
        let bits = self.random.bits();
        let path = self.plan.read_path.at(bits as u32) + transfer;
        if self.dies_used == 0 {
            return begin + path;
        }
        let page_shift = self.plan.page_shift;
        let first = io.offset >> page_shift;
        let last = last_byte >> page_shift;
        if first == last {
            let service = self.plan.read_die.at((bits >> 32) as u32);
            return self.read_page(first, begin, service) + path;
        }
        let first = io.offset >> large_shift;
        let mut done = begin;
        // Neighbours were written together, to the same kind of page of each die, and take equally long.
        let service = self.plan.large_die.at((bits >> 32) as u32);
        for part in first..=first + parts {
            done = done.max(self.read_page(part, begin, service));
        }
        done + path + if parts == 0 { 0 } else { self.plan.split_read_ns }
    }

    /// Books a page on its die.
    #[inline]
    fn read_page(&mut self, page: u64, begin: u64, service: u64) -> u64 {
        let die = self.die_of(page);
        let at = &mut self.dies[die];
        let mut start = begin.max(at.free);
        if start < at.programmed {
            start += Self::interrupt(&self.plan, &mut self.random, at, start, service);
        }
        at.free = start + service;
        at.free
    }

    /// How long a read waits for a die that programs; the program then ends later.
    #[cold]
    fn interrupt(plan: &Plan, random: &mut Random, at: &mut Die, start: u64, service: u64) -> u64 {
        let left = at.programmed - start;
        let wait = if random.bits() >> 32 < plan.suspend {
            plan.suspend_ns.min(left)
        } else {
            // Programs and erasures stand behind one another; a read goes in between.
            let erases = random.bits() >> 32 < plan.erase && plan.erase_ns > 0;
            left % if erases { plan.erase_ns } else { plan.program_ns.max(1) }
        };
        at.programmed += service + wait.min(plan.suspend_ns);
        wait
    }

    /// Neighbouring pages are on different dies, and which comes first changes from stripe to stripe.
    #[inline]
    fn die_of(&self, page: u64) -> usize {
        let high = |left: u64, right: u64| ((u128::from(left) * u128::from(right)) >> 64) as u64;
        let stripe = high(page, self.stripe_inverse);
        // Rounding may put the last page of a stripe that is far out into the next one.
        let place = page.wrapping_sub(stripe.wrapping_mul(self.dies_used)).min(self.dies_used - 1);
        let turned = place + high(scatter(stripe), self.dies_used);
        (if turned >= self.dies_used { turned - self.dies_used } else { turned }) as usize
    }

    /// A write to a device without a buffer.
    #[inline]
    fn write_through(&mut self, io: &Io) -> u64 {
        let begin = self.enter_write(io);
        let bits = self.random.bits();
        let path = self.plan.write_path.at(bits as u32);
        if self.dies_used == 0 {
            return begin + path;
        }
        let page_shift = self.plan.page_shift;
        let first = io.offset >> page_shift;
        let last = (io.offset + u64::from(io.bytes).max(1) - 1) >> page_shift;
        let mut done = begin;
        for page in first..=last {
            let service = self.plan.write_die.at(self.random.bits() as u32);
            let die = self.die_of(page);
            let at = &mut self.dies[die];
            at.free = begin.max(at.free) + service;
            done = done.max(at.free);
        }
        done + path + if first == last { 0 } else { self.plan.split_write_ns }
    }

    #[inline]
    fn enter_write(&mut self, io: &Io) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.write_step;
        let begin = begin.max(self.link_in);
        self.link_in = begin + ((u64::from(io.bytes) * self.write_byte) >> BYTE_SHIFT);
        // A write begins where its data is there.
        begin + ((u64::from(io.bytes) * self.write_transfer) >> BYTE_SHIFT)
    }

    fn write(&mut self, io: &Io) -> u64 {
        let begin = self.enter_write(io);
        self.note_order(io);
        let page = u64::from(self.plan.profile.device.page_bytes);
        // A part of a page is programmed as a page.
        self.buffer.gathered += u64::from(io.bytes).next_multiple_of(page);
        let mut room_at = self.buffer.room_at;
        while self.buffer.gathered >= self.plan.unit_bytes {
            self.buffer.gathered -= self.plan.unit_bytes;
            self.program(begin);
            room_at = room_at.max(self.buffer.room_at);
        }
        let acknowledged = begin.max(room_at) + self.plan.write_path.at(self.random.bits() as u32);
        if io.fua && !self.plan.profile.device.power_loss_protection {
            return acknowledged.max(self.buffer.drained_at) + self.plan.program_ns;
        }
        acknowledged
    }

    /// Books a unit on the next die, and what it makes garbage collection do.
    fn program(&mut self, begin: u64) {
        let plan = &*self.plan;
        let buffer = &mut self.buffer;
        let charge = self.wear.write(begin, plan.unit_bytes, buffer.randomness >> 8);
        let mut duration = if charge.fast { plan.slc_program_ns } else { plan.program_ns };
        let extra = u64::from(charge.amplification) - (1 << AMPLIFICATION_SHIFT);
        let work = (plan.program_ns * extra) >> AMPLIFICATION_SHIFT;
        if plan.burst_ns == 0 {
            duration += work;
        } else {
            buffer.debt_ns += work;
            let burst_ns = plan.burst_ns;
            if buffer.debt_ns >= burst_ns * self.dies_used {
                buffer.debt_ns -= burst_ns * self.dies_used;
                for at in &mut self.dies[..self.dies_used as usize] {
                    at.programmed = at.programmed.max(begin) + burst_ns;
                }
            }
        }
        let at = &mut self.dies[buffer.next_die as usize];
        buffer.next_die = if buffer.next_die + 1 >= self.dies_used { 0 } else { buffer.next_die + 1 };
        at.programmed = at.programmed.max(begin).max(at.free) + duration;
        let end = at.programmed;
        buffer.ends[buffer.position] = end;
        buffer.position = if buffer.position + 1 >= buffer.used { 0 } else { buffer.position + 1 };
        buffer.room_at = buffer.ends[buffer.position];
        buffer.drained_at = buffer.drained_at.max(end);
    }

    /// Whether writes are sequential: each that begins where a stream ended continues it.
    fn note_order(&mut self, io: &Io) {
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
        if !self.plan.profile.device.power_loss_protection && !self.buffer.ends.is_empty() {
            if self.buffer.gathered > 0 {
                self.buffer.gathered = 0;
                self.program(begin);
            }
            done = done.max(self.buffer.drained_at);
        }
        done + self.plan.flush.at(self.random.bits() as u32)
    }

    fn deallocate(&mut self, io: &Io) -> u64 {
        let begin = self.now.max(self.front);
        self.front = begin + self.write_step;
        self.wear.deallocate(u64::from(io.bytes));
        begin + self.plan.deallocate.at(self.random.bits() as u32)
    }
}
