//! Patterns with several files or sizes, an alignment other than the I/O size, a share of sequential I/O,
//! steps, sequences or strided zones.

use block_io::{Op, Request};
use dma::Data;

use super::random_map::RandomMap;
use super::strided::ZoneCursor;
use super::{Geometry, OpMix, SetupError, file_region, random_op};
use crate::WyRand;
use crate::direction_stats::direction_index;
use crate::distribution::{OffsetSampler, Permutation};
use crate::spec::{BlockSizes, FileService, JobSpec, OffsetSequence};

/// Draws the file, offset and size of each I/O.
///
/// Each file has a sequential position for each direction, as in fio. A pass over a file ends when an I/O
/// finds no place in it: its direction is at the end, not even its smallest size fits, or random I/O has
/// covered everything. When all files have ended, all positions return to the start. A job with one file and
/// `time_based` returns the one direction that is exactly at the end.
pub(super) struct GeneralPattern {
    regions: Vec<FileRegion>,
    /// Of reads, writes and trims.
    sizes: [BlockSizes; 3],
    block_bytes: u32,
    /// Distance of random positions, of reads, writes and trims.
    align_blocks: [u64; 3],
    service: FileService,
    /// An I/O is random if a random 64-bit number is below this; otherwise it follows the last I/O of its
    /// direction.
    random_below: [u64; 3],
    file: usize,
    ios_left_in_turn: u32,
    /// Whether the first turn has begun, which goes to file 0 in round-robin.
    has_begun: bool,
    step_blocks: i64,
    sequence: OffsetSequence,
    /// I/Os until the next random offset; 0 at a random one.
    ios_left_in_sequence: u32,
    zone: Option<ZoneCursor>,
    time_based: bool,
}

/// Sizes and alignments of reads, writes and trims, in bytes; those of unused directions mean nothing.
pub(super) struct Layout<'a> {
    pub(super) sizes: &'a [BlockSizes; 3],
    pub(super) align: [u64; 3],
    /// Largest I/O.
    pub(super) largest: u32,
    /// A logical block of the device.
    pub(super) block_bytes: u32,
}

/// Whether random I/O covers each part of a file once in a pass; sequential I/O of a random job does not
/// count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Covers {
    /// Offsets repeat.
    Nothing,
    /// All I/O is of one size, which is its alignment.
    Permuted,
    /// Any other, in units of this many bytes.
    Mapped(u64),
}

/// The region of one file, in logical blocks.
struct FileRegion {
    first_lba: u64,
    blocks: u64,
    /// Blocks of the whole file.
    file_blocks: u64,
    /// Number of random positions of reads, writes and trims.
    positions: [u64; 3],
    /// Behind the last I/O of each direction.
    next: [u64; 3],
    /// Start of the last I/O of each direction.
    last: [u64; 3],
    samplers: [OffsetSampler; 3],
    coverage: Coverage,
    /// The pass over this file has ended, and that over others has not.
    has_ended: bool,
}

/// What a pass over a file has covered; see [`Covers`].
enum Coverage {
    Nothing,
    Permuted(Permutation),
    /// With the length of a unit of the map in blocks.
    Mapped(RandomMap, u64),
}

/// Offset from the start of the region, and length, in blocks.
type Place = (u64, u64);

/// What an I/O of a random job does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Random,
    /// Follows the last I/O of its direction.
    Follows,
    /// Has the offset of the last I/O of its direction.
    Repeats,
}

impl GeneralPattern {
    pub(super) fn new(
        spec: &JobSpec,
        files: &[Geometry],
        layout: &Layout<'_>,
        covers: Covers,
    ) -> Result<GeneralPattern, SetupError> {
        let block_bytes = layout.block_bytes;
        let regions = (0u64..).zip(files).map(|(number, file)| {
            let (offset, size) = file_region(spec, *file, files.len() as u64, layout.largest)?;
            let seed = spec.seed.wrapping_add(number.wrapping_mul(0x9e37_79b9));
            Ok(FileRegion::new(spec, *file, (offset, size), layout, covers, seed))
        });
        let random_below = |percent: u8| (f64::from(percent.min(100)) / 100.0 * u64::MAX as f64) as u64;
        Ok(GeneralPattern {
            regions: regions.collect::<Result<_, _>>()?,
            sizes: layout.sizes.clone(),
            block_bytes,
            align_blocks: layout.align.map(|bytes| (bytes / u64::from(block_bytes)).max(1)),
            service: spec.file_service,
            random_below: spec.random_percent.map(random_below),
            file: 0,
            ios_left_in_turn: 0,
            has_begun: false,
            step_blocks: spec.sequence.step_bytes / i64::from(block_bytes),
            sequence: spec.sequence,
            ios_left_in_sequence: 0,
            zone: spec.zones.map(|zones| ZoneCursor::new(zones, block_bytes)),
            time_based: spec.time_based,
        })
    }

    /// Blocks of all regions.
    pub(super) fn blocks(&self) -> u64 {
        self.regions.iter().map(|region| region.blocks).sum()
    }

    /// The last I/O of this file and operation was moved: the next one in sequence follows it.
    pub(super) fn moved_to(&mut self, file: u16, op: Op, lba: u64, blocks: u32) {
        let (region, direction) = (&mut self.regions[usize::from(file)], direction_index(op));
        let at = lba.saturating_sub(region.first_lba);
        (region.last[direction], region.next[direction]) = (at, at + u64::from(blocks));
    }

    /// Assigns the next I/O to a request; `op` overrides the drawn operation. Flushes, which have no size, do
    /// not come here.
    pub(super) fn next(
        &mut self,
        request: &mut Request<Data>,
        op: Option<Op>,
        mix: OpMix,
        is_random: bool,
        random: &mut WyRand,
    ) {
        // At the start of a pass each direction has a place in each file, so that this ends after at most one
        // attempt more than there are files.
        loop {
            self.choose_file(random);
            let op = match (op, mix) {
                (Some(op), _) | (None, OpMix::Single(op)) => op,
                (None, OpMix::Mixed(below)) => random_op(random, below),
            };
            let direction = direction_index(op);
            let place = match self.zone {
                Some(_) => self.place_in_zone(direction, is_random, random),
                None => self.place(direction, is_random, random),
            };
            if let Some((at, blocks)) = place {
                let region = &mut self.regions[self.file];
                (region.last[direction], region.next[direction]) = (at, at + blocks);
                (request.lba, request.blocks) = (region.first_lba + at, blocks as u32);
                (request.op, request.flow) = (op, self.file as u16);
                return;
            }
            self.end_file();
        }
    }

    fn choose_file(&mut self, random: &mut WyRand) {
        let count = self.regions.len();
        if count == 1 {
            return;
        }
        if self.ios_left_in_turn > 0 && !self.regions[self.file].has_ended {
            self.ios_left_in_turn -= 1;
            return;
        }
        match self.service {
            FileService::Sequential => {}
            FileService::RoundRobin(turn) | FileService::Random(turn) => {
                self.ios_left_in_turn = turn.max(1) - 1;
                self.file = match self.service {
                    FileService::Random(_) => random.below(count as u64) as usize,
                    // The first turn goes to file 0.
                    _ if !self.has_begun => 0,
                    _ => (self.file + 1) % count,
                };
                self.has_begun = true;
            }
        }
        while self.regions[self.file].has_ended {
            self.file = (self.file + 1) % count;
        }
    }

    /// The pass over the current file has ended.
    fn end_file(&mut self) {
        self.regions[self.file].has_ended = true;
        if self.regions.iter().all(|region| region.has_ended) {
            self.regions.iter_mut().for_each(FileRegion::restart);
            if let Some(zone) = &mut self.zone {
                zone.restart();
            }
            if self.service == FileService::Sequential {
                self.file = 0;
            }
        }
    }

    /// Blocks of the smallest I/O of a direction.
    fn min_blocks(&self, direction: usize) -> u64 {
        u64::from(self.sizes[direction].min() / self.block_bytes)
    }

    /// Whether a direction that is at the end of the file returns to the start, and others do not.
    fn returns_alone(&self) -> bool {
        self.time_based && self.regions.len() == 1
    }

    /// Where the next I/O of a random job is to be.
    fn draw_order(&mut self, direction: usize, random: &mut WyRand) -> Order {
        let continues = self.ios_left_in_sequence > 0;
        self.ios_left_in_sequence =
            if continues { self.ios_left_in_sequence - 1 } else { self.sequence.length.max(1) - 1 };
        let below = self.random_below[direction];
        match continues {
            true if self.sequence.repeats => Order::Repeats,
            false if below == u64::MAX || random.next_bits() < below => Order::Random,
            _ => Order::Follows,
        }
    }

    fn place(&mut self, direction: usize, is_random: bool, random: &mut WyRand) -> Option<Place> {
        let (min, returns_alone) = (self.min_blocks(direction), self.returns_alone());
        if !is_random {
            let region = &mut self.regions[self.file];
            let at = region.after_step(direction, self.step_blocks, min, returns_alone)?;
            return Some((at, self.draw_blocks(at, direction, random)?));
        }
        let order = self.draw_order(direction, random);
        let region = &mut self.regions[self.file];
        let sequential = match order {
            Order::Random => None,
            Order::Repeats => Some(region.last[direction]).filter(|at| at + min <= region.blocks),
            // Behind the last block there is a random one.
            Order::Follows => region.after_step(direction, 0, min, returns_alone),
        };
        if let Some(at) = sequential {
            // As in fio, it does not count for the coverage of random I/O.
            return Some((at, self.draw_blocks(at, direction, random)?));
        }
        let at = self.draw_offset(direction, random)?;
        let blocks = self.draw_blocks(at, direction, random)?;
        let shrinks = !matches!(self.sizes[direction], BlockSizes::Fixed(_));
        Some((at, self.regions[self.file].take(at, blocks, shrinks)))
    }

    /// A random offset that has not been accessed in this pass, where there is one.
    fn draw_offset(&mut self, direction: usize, random: &mut WyRand) -> Option<u64> {
        let align = self.align_blocks[direction];
        let (time_based, min) = (self.time_based, self.min_blocks(direction));
        let region = &mut self.regions[self.file];
        let positions = region.positions[direction];
        match &mut region.coverage {
            Coverage::Nothing => Some(region.samplers[direction].next(random, positions) * align),
            Coverage::Permuted(order) => Some(order.next() * align),
            Coverage::Mapped(map, unit) => {
                let position = random.below(positions);
                let drawn = position * align / *unit;
                if time_based && map.next_free(0).is_none() {
                    region.restart();
                    return Some(position * align);
                }
                let free = if map.is_free(drawn) { Some(drawn) } else { map.next_free(drawn) };
                let free = free.or_else(|| map.next_free(0))?;
                // What is aligned to more than a unit may begin before the free one.
                let at = free * *unit / align * align;
                Some(at.min((positions - 1) * align)).filter(|at| at + min <= region.blocks)
            }
        }
    }

    fn place_in_zone(&mut self, direction: usize, is_random: bool, random: &mut WyRand) -> Option<Place> {
        let length = self.regions[self.file].blocks;
        let zone = self.zone.as_mut()?;
        let begins = zone.advance(length);
        let (start, end) = zone.range();
        if begins {
            self.regions.iter_mut().for_each(|region| region.enter(start, end));
        }
        let order = if is_random { self.draw_order(direction, random) } else { Order::Follows };
        let region = &mut self.regions[self.file];
        let is_inside = |at: &u64| (start..end).contains(at);
        let at = match order {
            Order::Random => {
                region.draw_between(start, end.min(length), self.align_blocks[direction], random)
            }
            Order::Repeats => Some(region.last[direction]).filter(is_inside).unwrap_or(start),
            Order::Follows => match region.next[direction] {
                next if next == start || !is_inside(&next) => start,
                next => {
                    let at = next.saturating_add_signed(self.step_blocks);
                    if at < region.file_blocks || self.step_blocks == 0 { at } else { start }
                }
            },
        };
        let blocks = self.draw_blocks(at, direction, random)?;
        if order == Order::Random {
            self.regions[self.file].mark(at, blocks);
        }
        if let Some(zone) = &mut self.zone {
            zone.count(blocks);
        }
        Some((at, blocks))
    }

    /// The size of an I/O at an offset, in blocks: of those that fit. `None` if none does.
    fn draw_blocks(&self, at: u64, direction: usize, random: &mut WyRand) -> Option<u64> {
        let space = self.regions[self.file].blocks.saturating_sub(at).saturating_mul(self.block_bytes.into());
        let fits = |bytes: u32| u64::from(bytes) <= space;
        let bytes = match &self.sizes[direction] {
            BlockSizes::Fixed(bytes) => Some(*bytes).filter(|bytes| fits(*bytes))?,
            BlockSizes::Range { min, max } => {
                let most = space.min((*max).into()) / u64::from(*min);
                if most == 0 {
                    return None;
                }
                min * (1 + random.below(most) as u32)
            }
            BlockSizes::Split(parts) => {
                let fitting = || parts.iter().filter(|(bytes, _)| fits(*bytes));
                let total: u64 = fitting().map(|(_, weight)| u64::from(*weight)).sum();
                let mut drawn = random.below(total.max(1));
                let part = fitting().find(|(_, weight)| {
                    let here = drawn < u64::from(*weight);
                    drawn = drawn.saturating_sub(u64::from(*weight));
                    here
                });
                part.or_else(|| fitting().next()).map(|(bytes, _)| *bytes)?
            }
        };
        Some(u64::from(bytes / self.block_bytes))
    }
}

impl FileRegion {
    fn new(
        spec: &JobSpec,
        file: Geometry,
        (offset, size): (u64, u64),
        layout: &Layout<'_>,
        covers: Covers,
        seed: u64,
    ) -> FileRegion {
        let block_bytes = u64::from(layout.block_bytes);
        // Unused directions may have no size that fits.
        let positions = [0, 1, 2].map(|index: usize| {
            size.saturating_sub(layout.sizes[index].min().into()) / layout.align[index].max(1) + 1
        });
        let samplers = [0, 1, 2].map(|index: usize| {
            let apart = layout.align[index].max(1);
            OffsetSampler::new(&spec.distribution, false, positions[index], apart, seed)
        });
        let coverage = match covers {
            Covers::Permuted => {
                let used = spec.workload.directions(spec.read_percent);
                let direction = used.iter().position(|used| *used).unwrap_or(0);
                Coverage::Permuted(Permutation::new(positions[direction], seed))
            }
            Covers::Mapped(unit) if size / unit <= RandomMap::UNITS_MAX => {
                Coverage::Mapped(RandomMap::new(size / unit), unit / block_bytes)
            }
            Covers::Mapped(_) | Covers::Nothing => Coverage::Nothing,
        };
        FileRegion {
            first_lba: offset / block_bytes,
            blocks: size / block_bytes,
            file_blocks: file.blocks,
            positions,
            next: [0; 3],
            last: [0; 3],
            samplers,
            coverage,
            has_ended: false,
        }
    }

    /// A pass begins.
    fn restart(&mut self) {
        (self.next, self.last, self.has_ended) = ([0; 3], [0; 3], false);
        if let Coverage::Mapped(map, _) = &mut self.coverage {
            map.clear(0, map.units());
        }
    }

    /// A strided zone begins: all directions are at its start, and nothing of it is covered.
    fn enter(&mut self, start: u64, end: u64) {
        self.next = [start; 3];
        self.forget(start, end);
    }

    fn forget(&mut self, start: u64, end: u64) {
        if let Coverage::Mapped(map, unit) = &mut self.coverage {
            map.clear(start / *unit, (end - start).div_ceil(*unit));
        }
    }

    /// An aligned offset between two others that has not been accessed in this visit.
    fn draw_between(&mut self, start: u64, end: u64, align: u64, random: &mut WyRand) -> u64 {
        let positions = (end.saturating_sub(start) / align).max(1);
        let drawn = start + random.below(positions) * align;
        let Coverage::Mapped(map, unit) = &self.coverage else { return drawn };
        let unit = *unit;
        let next = |from: u64| {
            let free = map.next_free(from / unit).map(|free| start.max(free * unit));
            free.filter(|at| at + align <= end.max(start + align))
                .map(|at| start + (at - start) / align * align)
        };
        match next(drawn).or_else(|| next(start)) {
            Some(at) => at,
            None => {
                self.forget(start, end);
                drawn
            }
        }
    }

    /// Marks blocks as accessed.
    fn mark(&mut self, at: u64, blocks: u64) {
        if let Coverage::Mapped(map, unit) = &mut self.coverage {
            map.mark(at / *unit, blocks.div_ceil(*unit));
        }
    }

    /// Marks the blocks of a random I/O as accessed. As in fio, one of a drawn size ends where others were
    /// accessed before. Returns how many blocks are left of it.
    fn take(&mut self, at: u64, blocks: u64, shrinks: bool) -> u64 {
        let Coverage::Mapped(map, unit) = &mut self.coverage else { return blocks };
        let (first, wanted) = (at / *unit, blocks.div_ceil(*unit));
        let run = match map.free_run(first, wanted) {
            // Its alignment makes it begin in what was accessed.
            0 => wanted,
            _ if !shrinks => wanted,
            run => run,
        };
        map.mark(first, run);
        blocks.min(run * *unit)
    }

    /// The start of the next sequential I/O of a direction: a step from the end of its last one. Beyond the
    /// end of the file steps continue at the other end. `None` if the direction is at the end of its region.
    fn after_step(
        &mut self,
        direction: usize,
        step_blocks: i64,
        min_blocks: u64,
        returns_alone: bool,
    ) -> Option<u64> {
        if returns_alone && self.next[direction] >= self.blocks && step_blocks >= 0 {
            self.next[direction] = 0;
        }
        let last_start = self.blocks.saturating_sub(min_blocks);
        let Some(from) = self.step_origin(direction, step_blocks) else { return Some(0) };
        match from.checked_add(step_blocks).and_then(|at| u64::try_from(at).ok()) {
            Some(at) if at <= last_start => Some(at),
            _ if step_blocks < 0 => Some(self.blocks.saturating_add_signed(step_blocks).min(last_start)),
            Some(at) if at < self.file_blocks || step_blocks == 0 => None,
            _ => Some(0),
        }
    }

    /// Where the next step starts, relative to the region; `None` for an I/O at the region's start. The first
    /// I/O backwards is a step from fio's origin: the size of the region minus its offset, if that has one.
    fn step_origin(&self, direction: usize, step_blocks: i64) -> Option<i64> {
        let signed = |blocks: u64| i64::try_from(blocks).unwrap_or(i64::MAX);
        let from = match self.next[direction] {
            0 if step_blocks < 0 && self.first_lba > 0 => signed(self.blocks) - signed(self.first_lba),
            next => signed(next),
        };
        (from != 0).then_some(from)
    }
}
