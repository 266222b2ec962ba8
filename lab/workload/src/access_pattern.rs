//! The access pattern of a job: its regions of the files, and the offset, size and operation of the next I/O.

mod strided;

use block_io::{Op, Request};
use dma::Data;

use crate::WyRand;
use crate::direction_stats::direction_index;
use crate::distribution::OffsetSampler;
use crate::spec::{BlockSizes, FileService, JobSpec, OffsetSequence, Verify, Workload};
use strided::ZoneCursor;

/// Geometry of the device behind a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Number of logical blocks.
    pub blocks: u64,
}

/// Why a job cannot run on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The I/O size is not a multiple of the block size.
    #[error("--bs={bs} is not a multiple of the device's {block_bytes}-byte blocks")]
    BlockSize {
        /// Greatest common divisor of the I/O sizes, bytes.
        bs: u32,
        /// Bytes of the device's logical blocks.
        block_bytes: u32,
    },
    /// The I/O size is above the largest buffer or transfer.
    #[error("--bs={bs} is above the largest buffer, {max} bytes")]
    BlockTooLarge {
        /// Largest I/O size, bytes.
        bs: u32,
        /// The limit, bytes.
        max: usize,
    },
    /// The region does not fit the device.
    #[error("--offset={offset} and --size={size} do not fit a device of {device} bytes")]
    Region {
        /// Start of the region, bytes.
        offset: u64,
        /// Size of the region, bytes.
        size: u64,
        /// Size of the device, bytes.
        device: u64,
    },
    /// The I/O depth is out of range.
    #[error("--iodepth={depth} is not between 1 and {max}")]
    Depth {
        /// I/O depth.
        depth: u32,
        /// Its limit.
        max: u32,
    },
    /// With verification, the I/O depth is above the number of positions.
    #[error("--verify needs at least --iodepth={depth} I/O positions: the job has {positions}; raise --size")]
    DepthAbovePositions {
        /// I/O depth.
        depth: u32,
        /// I/O positions in the region.
        positions: u64,
    },
    /// Too many positions to verify.
    #[error(
        "--verify tracks at most {positions_max} I/O positions, not {positions}; lower --size or raise --bs"
    )]
    VerifyTooLarge {
        /// I/O positions in the region.
        positions: u64,
        /// Their limit.
        positions_max: u64,
    },
    /// A time-based job has no runtime.
    #[error("--time_based needs --runtime; for example --runtime=10s")]
    NoRuntime,
    /// The files have different block sizes.
    #[error("the files have blocks of {0} and of {1} bytes; one job takes files of one kind")]
    MixedBlocks(u32, u32),
    /// No files, or more than 65536.
    #[error("{0} files are not between 1 and 65536")]
    FileCount(usize),
    /// Verification with several files or I/O sizes, or with other alignments or sequential shares.
    #[error(
        "--verify needs one file, one block size and no sequence in --rw; give each file or size a job of its own"
    )]
    VerifyMixed,
    /// A block is too short for its header, or an I/O is not whole blocks with headers.
    #[error(
        "--verify_interval={interval} does not divide --bs={bs}, or is below the {min} bytes that --verify needs"
    )]
    VerifyInterval {
        /// Bytes of a block with a header.
        interval: usize,
        /// Bytes of an I/O.
        bs: u32,
        /// The smallest block.
        min: usize,
    },
    /// The alignment is not a multiple of the block size.
    #[error("--blockalign={align} is not a multiple of the device's {block_bytes}-byte blocks")]
    Align {
        /// Alignment, bytes.
        align: u64,
        /// Bytes of the device's logical blocks.
        block_bytes: u32,
    },
    /// The step is not a multiple of the block size.
    #[error("--rw={workload}:{step} is not a multiple of the device's {block_bytes}-byte blocks")]
    Step {
        /// Name of the workload.
        workload: &'static str,
        /// Step, bytes.
        step: i64,
        /// Bytes of the device's logical blocks.
        block_bytes: u32,
    },
    /// The buffer pool is exhausted.
    #[error("no memory for {0} buffers of {1} bytes; lower --iodepth, --numjobs or --bs")]
    NoMemory(u32, u32),
}

/// Generates the offset, size and operation of each I/O. One multiplication per offset in the simple case of one
/// file and one I/O size; [`GeneralPattern`] has the rest.
pub(crate) struct AccessPattern {
    pub(crate) random: WyRand,
    is_random: bool,
    pub(crate) mix: OpMix,
    pub(crate) position: u64,
    pub(crate) positions: u64,
    pub(crate) io_blocks: u32,
    pub(crate) first_lba: u64,
    sampler: OffsetSampler,
    /// For several files, I/O sizes or alignments.
    general: Option<Box<GeneralPattern>>,
}

/// The operations of a job.
#[derive(Clone, Copy)]
pub(crate) enum OpMix {
    /// One operation.
    Single(Op),
    /// Reads where a random 64-bit number is below this, otherwise writes.
    Mixed(u64),
}

/// Patterns with several files or sizes, an alignment other than the I/O size, a share of sequential I/O, steps or
/// sequences.
struct GeneralPattern {
    regions: Vec<FileRegion>,
    sizes: [BlockSizes; 3],
    block_bytes: u32,
    align_blocks: u64,
    service: FileService,
    /// An I/O is random if a random 64-bit number is below this; otherwise it follows the last I/O.
    random_below: u64,
    file: usize,
    ios_left_in_turn: u32,
    step_blocks: i64,
    sequence: OffsetSequence,
    /// I/Os until the next random offset; 0 at a random one.
    ios_left_in_sequence: u32,
    zone: Option<ZoneCursor>,
}

/// The region of one file, in logical blocks.
struct FileRegion {
    first_lba: u64,
    blocks: u64,
    /// Number of random positions, `align_blocks` apart.
    positions: u64,
    next: u64,
    /// Start of the last I/O.
    last: u64,
    sampler: OffsetSampler,
}

impl AccessPattern {
    pub(crate) fn new(spec: &JobSpec, files: &[Geometry]) -> Result<AccessPattern, SetupError> {
        let count = files.len();
        let first = files.first().filter(|_| count <= 1 << 16).ok_or(SetupError::FileCount(count))?;
        let block_bytes = first.block_bytes;
        if let Some(other) = files.iter().find(|file| file.block_bytes != block_bytes) {
            return Err(SetupError::MixedBlocks(block_bytes, other.block_bytes));
        }
        let fixed_sizes = [
            BlockSizes::Fixed(spec.block_bytes),
            BlockSizes::Fixed(spec.block_bytes),
            BlockSizes::Fixed(spec.block_bytes),
        ];
        let sizes = spec.sizes.as_deref().unwrap_or(&fixed_sizes);
        let directions = spec.workload.directions(spec.read_percent);
        let used = |index: &usize| directions[*index];
        for index in (0..3).filter(used) {
            let bs = sizes[index].unit();
            if bs == 0 || !bs.is_multiple_of(block_bytes) {
                return Err(SetupError::BlockSize { bs, block_bytes });
            }
        }
        if spec.io_depth == 0 || spec.io_depth > JobSpec::IO_DEPTH_MAX {
            return Err(SetupError::Depth { depth: spec.io_depth, max: JobSpec::IO_DEPTH_MAX });
        }
        let smallest = (0..3).filter(used).map(|index| sizes[index].min()).min().unwrap_or(spec.block_bytes);
        let largest = (0..3).filter(used).map(|index| sizes[index].max()).max().unwrap_or(spec.block_bytes);
        let align = spec.align_bytes.unwrap_or(u64::from(smallest));
        if align == 0 || !align.is_multiple_of(u64::from(block_bytes)) {
            return Err(SetupError::Align { align, block_bytes });
        }
        let step = spec.sequence.step_bytes;
        if !step.unsigned_abs().is_multiple_of(u64::from(block_bytes)) {
            return Err(SetupError::Step { workload: spec.workload.name(), step, block_bytes });
        }
        let is_simple = smallest == largest
            && count == 1
            && align == u64::from(smallest)
            && spec.random_percent == 100
            && step == 0
            && spec.zones.is_none()
            && spec.zoned.is_none()
            && spec.sequence.length <= 1;
        if spec.verify != Verify::Off && !is_simple && !has_whole_positions(spec, count, largest) {
            return Err(SetupError::VerifyMixed);
        }
        // With several sizes I/Os may overlap, so covering each offset exactly once has no meaning.
        let covers_once = spec.random_map && smallest == largest && align == u64::from(smallest);
        let mut regions = Vec::with_capacity(count);
        for (number, file) in files.iter().enumerate() {
            let (offset, size) = file_region(spec, *file, count as u64, largest)?;
            let positions = if is_simple { size / align } else { (size - u64::from(largest)) / align + 1 };
            let seed = spec.seed.wrapping_add((number as u64).wrapping_mul(0x9e37_79b9));
            let sampler = OffsetSampler::new(&spec.distribution, covers_once, positions, align, seed);
            let (first_lba, blocks) = (offset / u64::from(block_bytes), size / u64::from(block_bytes));
            regions.push(FileRegion { first_lba, blocks, positions, next: 0, last: 0, sampler });
        }
        let mix = op_mix(spec);
        let (first_lba, positions, sampler) =
            (regions[0].first_lba, regions[0].positions, regions[0].sampler.clone());
        let general = (!is_simple).then(|| {
            let (sizes, align_blocks) = (sizes.clone(), align / u64::from(block_bytes));
            let random_below = (f64::from(spec.random_percent.min(100)) / 100.0 * u64::MAX as f64) as u64;
            let service = spec.file_service;
            Box::new(GeneralPattern {
                regions,
                sizes,
                block_bytes,
                align_blocks,
                service,
                random_below,
                file: 0,
                ios_left_in_turn: 0,
                step_blocks: step / i64::from(block_bytes),
                sequence: spec.sequence,
                ios_left_in_sequence: 0,
                zone: spec.zones.map(|zones| ZoneCursor::new(zones, block_bytes)),
            })
        });
        Ok(AccessPattern {
            random: WyRand::new(spec.seed),
            is_random: spec.workload.is_random(),
            mix,
            position: 0,
            positions,
            io_blocks: largest / block_bytes,
            first_lba,
            sampler,
            general,
        })
    }

    /// Bytes of one pass over all regions.
    pub(crate) fn total_bytes(&self, block_bytes: u32) -> u64 {
        match &self.general {
            None => self.positions * u64::from(self.io_blocks) * u64::from(block_bytes),
            Some(general) => {
                general.regions.iter().map(|region| region.blocks * u64::from(block_bytes)).sum()
            }
        }
    }

    /// Whether there is one file and one I/O size, aligned to itself.
    pub(crate) fn is_simple(&self) -> bool {
        self.general.is_none()
    }

    /// Assigns the next I/Os of a simple pattern to `requests`, in order, and calls `start` with each. With
    /// `keep_ops` each request keeps its operation.
    ///
    /// The pattern is matched once, outside of the loops.
    #[inline]
    pub(crate) fn next_batch(
        &mut self,
        requests: &mut [Request<Data>],
        keep_ops: bool,
        start: impl FnMut(&mut Request<Data>),
    ) {
        match self.mix {
            _ if keep_ops => self.assign_batch(requests, |request, _| request.op, start),
            OpMix::Single(op) => self.assign_batch(requests, |_, _| op, start),
            OpMix::Mixed(below) => self.assign_batch(requests, |_, random| random_op(random, below), start),
        }
    }

    #[inline]
    fn assign_batch(
        &mut self,
        requests: &mut [Request<Data>],
        op: impl Fn(&Request<Data>, &mut WyRand) -> Op,
        mut start: impl FnMut(&mut Request<Data>),
    ) {
        let (first_lba, io_blocks, positions) = (self.first_lba, self.io_blocks, self.positions);
        // Loops change local copies, which the compiler can keep in registers: they cannot alias a request.
        let mut random = self.random.clone();
        let mut assign = |request: &mut Request<Data>, op: Op, position: u64| {
            request.lba = first_lba + position * u64::from(io_blocks);
            request.op = op;
            request.blocks = io_blocks;
            start(request);
        };
        match &mut self.sampler {
            _ if !self.is_random => {
                let mut position = self.position;
                for request in requests {
                    assign(request, op(request, &mut random), position);
                    position = if position + 1 == positions { 0 } else { position + 1 };
                }
                self.position = position;
            }
            OffsetSampler::Uniform => {
                for request in requests {
                    let op = op(request, &mut random);
                    assign(request, op, random.below(positions));
                }
            }
            OffsetSampler::Permuted(permutation) => {
                let mut order = permutation.clone();
                for request in requests {
                    assign(request, op(request, &mut random), order.next());
                }
                *permutation = order;
            }
            nonuniform => {
                for request in requests {
                    let op = op(request, &mut random);
                    assign(request, op, nonuniform.next(&mut random, positions));
                }
            }
        }
        self.random = random;
    }

    /// Assigns the next I/O of a simple pattern to one request, as [`next_batch`](Self::next_batch) does for
    /// many; for a single request it is faster to change the state in place.
    #[inline]
    pub(crate) fn next_one(&mut self, request: &mut Request<Data>) {
        request.op = match self.mix {
            OpMix::Single(op) => op,
            OpMix::Mixed(below) => random_op(&mut self.random, below),
        };
        let position = if self.is_random {
            self.sampler.next(&mut self.random, self.positions)
        } else {
            let position = self.position;
            self.position = if position + 1 == self.positions { 0 } else { position + 1 };
            position
        };
        request.lba = self.first_lba + position * u64::from(self.io_blocks);
        request.blocks = self.io_blocks;
    }

    /// Assigns the next I/O of any pattern to a request; `op` overrides the drawn operation.
    pub(crate) fn next_with_op(&mut self, request: &mut Request<Data>, op: Option<Op>) {
        if let Some(op) = op {
            request.op = op;
        }
        let Some(general) = &mut self.general else {
            return self.next_batch(std::slice::from_mut(request), op.is_some(), |_| ());
        };
        let op = match (op, self.mix) {
            (Some(op), _) | (None, OpMix::Single(op)) => op,
            (None, OpMix::Mixed(below)) => random_op(&mut self.random, below),
        };
        general.next(request, op, self.is_random, &mut self.random);
    }
}

impl AccessPattern {
    /// The last I/O of this file was moved: the next one in sequence follows it.
    pub(crate) fn moved_to(&mut self, file: u16, lba: u64, blocks: u32) {
        if let Some(general) = &mut self.general {
            let region = &mut general.regions[usize::from(file)];
            let at = lba.saturating_sub(region.first_lba);
            (region.last, region.next) = (at, at + u64::from(blocks));
        }
    }

    pub(crate) fn is_random(&self) -> bool {
        self.is_random
    }
}

/// The operations of a job.
fn op_mix(spec: &JobSpec) -> OpMix {
    match spec.workload {
        Workload::Read | Workload::RandRead => OpMix::Single(Op::Read),
        Workload::Write | Workload::RandWrite => OpMix::Single(Op::Write),
        Workload::Trim | Workload::RandTrim | Workload::TrimWrite | Workload::RandTrimWrite => {
            OpMix::Single(Op::Unmap)
        }
        Workload::ReadWrite | Workload::RandRw => match spec.read_percent {
            0 => OpMix::Single(Op::Write),
            100.. => OpMix::Single(Op::Read),
            percent => OpMix::Mixed(u64::MAX / 100 * u64::from(percent)),
        },
    }
}

#[inline]
fn random_op(random: &mut WyRand, reads_below: u64) -> Op {
    if random.next_bits() < reads_below { Op::Read } else { Op::Write }
}

impl GeneralPattern {
    fn next(&mut self, request: &mut Request<Data>, op: Op, is_random: bool, random: &mut WyRand) {
        self.choose_file(random);
        // Flushes, which have no size, do not come here.
        let size = match &self.sizes[direction_index(op)] {
            BlockSizes::Fixed(bytes) => *bytes,
            BlockSizes::Range { min, max } => min * (1 + random.below(u64::from(max / min)) as u32),
            BlockSizes::Split(parts) => {
                let total: u64 = parts.iter().map(|(_, weight)| u64::from(*weight)).sum();
                let mut drawn = random.below(total.max(1));
                let part = parts.iter().find(|(_, weight)| {
                    let here = drawn < u64::from(*weight);
                    drawn = drawn.saturating_sub(u64::from(*weight));
                    here
                });
                part.or(parts.last()).map_or(0, |(bytes, _)| *bytes)
            }
        };
        let blocks = size / self.block_bytes;
        let region = &mut self.regions[self.file];
        if let Some(zone) = &mut self.zone {
            let at =
                zone.next(region.blocks, blocks.into(), is_random.then_some((random, self.align_blocks)));
            request.lba = region.first_lba + at;
            (request.op, request.blocks, request.flow) = (op, blocks, self.file as u16);
            return;
        }
        let continues = is_random && self.ios_left_in_sequence > 0;
        self.ios_left_in_sequence =
            if continues { self.ios_left_in_sequence - 1 } else { self.sequence.length.max(1) - 1 };
        let fits = region.next + u64::from(blocks) <= region.blocks;
        let is_random_io =
            is_random && (self.random_below == u64::MAX || random.next_bits() < self.random_below);
        let at = match continues {
            true if self.sequence.repeats && region.last + u64::from(blocks) <= region.blocks => region.last,
            true if !self.sequence.repeats && fits => region.next,
            _ if is_random_io => region.sampler.next(random, region.positions) * self.align_blocks,
            _ => region.after_step(self.step_blocks, u64::from(blocks)),
        };
        (region.last, region.next) = (at, at + u64::from(blocks));
        request.lba = region.first_lba + at;
        (request.op, request.blocks, request.flow) = (op, blocks, self.file as u16);
    }

    fn choose_file(&mut self, random: &mut WyRand) {
        let count = self.regions.len();
        match self.service {
            _ if count == 1 => {}
            FileService::Sequential => {
                let region = &mut self.regions[self.file];
                if region.next >= region.blocks {
                    region.next = 0;
                    self.file = (self.file + 1) % count;
                }
            }
            FileService::RoundRobin(turn) | FileService::Random(turn) => {
                if self.ios_left_in_turn > 0 {
                    self.ios_left_in_turn -= 1;
                    return;
                }
                // The first turn goes to file 0.
                self.file = match self.service {
                    FileService::Random(_) => random.below(count as u64) as usize,
                    _ if self.regions.iter().all(|region| region.next == 0) => 0,
                    _ => (self.file + 1) % count,
                };
                self.ios_left_in_turn = turn.max(1) - 1;
            }
        }
    }
}

impl FileRegion {
    /// The start of the next sequential I/O: a step from the end of the last one, or beyond the region, its other end.
    fn after_step(&self, step_blocks: i64, blocks: u64) -> u64 {
        let last_start = self.blocks.saturating_sub(blocks);
        let Some(from) = self.step_origin(step_blocks) else { return 0 };
        match from.checked_add(step_blocks).and_then(|at| u64::try_from(at).ok()) {
            Some(at) if at <= last_start => at,
            _ if step_blocks < 0 => self.blocks.saturating_add_signed(step_blocks).min(last_start),
            _ => 0,
        }
    }

    /// Where the next step starts, relative to the region; `None` for an I/O at the region's start. The first
    /// I/O backwards is a step from fio's origin: the size of the region minus its offset, if that has one.
    fn step_origin(&self, step_blocks: i64) -> Option<i64> {
        let signed = |blocks: u64| i64::try_from(blocks).unwrap_or(i64::MAX);
        let from = match self.next {
            0 if step_blocks < 0 && self.first_lba > 0 => signed(self.blocks) - signed(self.first_lba),
            next => signed(next),
        };
        (from != 0).then_some(from)
    }
}

/// Whether all I/Os of a job with a step are at multiples of their size in one file, so that each position is written as a
/// whole.
fn has_whole_positions(spec: &JobSpec, files: usize, io_bytes: u32) -> bool {
    let step = spec.sequence.step_bytes;
    let is_multiple = step > 0 && step.unsigned_abs().is_multiple_of(io_bytes.into());
    files == 1 && spec.sizes.is_none() && spec.zones.is_none() && !spec.workload.is_random() && is_multiple
}

/// The region of a file that a job uses: offset and size in bytes.
pub(crate) fn file_region(
    spec: &JobSpec,
    file: Geometry,
    files: u64,
    largest: u32,
) -> Result<(u64, u64), SetupError> {
    let block_bytes = u64::from(file.block_bytes);
    let device = file.blocks.saturating_mul(block_bytes);
    let whole_blocks = |bytes: u64| bytes / block_bytes * block_bytes;
    let percent = |percent: u8| (u128::from(device) * u128::from(percent) / 100) as u64;
    let offset = spec.offset_bytes.saturating_add(whole_blocks(percent(spec.offset_percent)));
    let rest = device.saturating_sub(offset);
    let size = match (spec.size_bytes, spec.size_percent) {
        (Some(bytes), _) => whole_blocks(bytes / files),
        (None, Some(share)) => whole_blocks(percent(share)).min(rest),
        (None, None) => whole_blocks(rest),
    };
    let fits = offset.checked_add(size).is_some_and(|end| end <= device);
    if !fits || !offset.is_multiple_of(block_bytes) || size < u64::from(largest) {
        return Err(SetupError::Region { offset, size, device });
    }
    Ok((offset, size))
}

#[cfg(test)]
mod tests;
