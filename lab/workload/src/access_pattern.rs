//! The access pattern of a job: its regions of the files, and the offset, size and operation of the next I/O.

mod general;
mod random_map;
mod strided;

use block_io::{Op, Request};
use dma::Data;

use crate::WyRand;
use crate::distribution::{Distribution, OffsetSampler};
use crate::spec::{BlockSizes, JobSpec, Verify, Workload};
use general::{Covers, GeneralPattern, Layout};

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
    /// Verification of I/O that is not at whole positions of one file.
    #[error("--verify excludes {0}: each block is verified at a multiple of its size, in one file")]
    VerifyMixed(&'static str),
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
    /// The next position of a sequential job with one operation, and of a read-back.
    pub(crate) position: u64,
    /// The next positions of reads and writes of a sequential mix, as in fio.
    mixed_positions: [u64; 2],
    /// A direction at the end of the region returns to its start alone; otherwise both do.
    returns_alone: bool,
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
        let align = [0, 1, 2].map(|index| spec.align_bytes[index].unwrap_or(u64::from(sizes[index].min())));
        for index in (0..3).filter(used) {
            if align[index] == 0 || !align[index].is_multiple_of(u64::from(block_bytes)) {
                return Err(SetupError::Align { align: align[index], block_bytes });
            }
        }
        let step = spec.sequence.step_bytes;
        if !step.unsigned_abs().is_multiple_of(u64::from(block_bytes)) {
            return Err(SetupError::Step { workload: spec.workload.name(), step, block_bytes });
        }
        let is_aligned_to_size = (0..3).filter(used).all(|index| align[index] == u64::from(smallest));
        let is_all_random = (0..3).filter(used).all(|index| spec.random_percent[index] >= 100);
        let is_simple = smallest == largest
            && count == 1
            && is_aligned_to_size
            && is_all_random
            && step == 0
            && spec.zones.is_none()
            && spec.zoned.is_none()
            && spec.sequence.length <= 1;
        if spec.verify != Verify::Off
            && let Some(reason) = partial_positions(spec, count, smallest == largest && is_aligned_to_size)
        {
            return Err(SetupError::VerifyMixed(reason));
        }
        let layout = Layout { sizes, align, largest, block_bytes };
        let covers_once = spec.random_map
            && spec.workload.is_random()
            && spec.distribution == Distribution::Uniform
            // With an alignment of their own, offsets repeat, as in fio.
            && (is_aligned_to_size || (0..3).filter(used).all(|index| spec.align_bytes[index].is_none()));
        let coverage = if !covers_once {
            Covers::Nothing
        } else if smallest == largest && is_aligned_to_size && spec.zones.is_none() {
            Covers::Permuted
        } else if (0..3).filter(used).all(|index| align[index].is_multiple_of(smallest.into())) {
            Covers::Mapped(smallest.into())
        } else {
            Covers::Nothing
        };
        let (offset, size) = file_region(spec, *first, count as u64, largest)?;
        let positions = size / u64::from(smallest);
        let each_once = coverage == Covers::Permuted;
        let sampler =
            OffsetSampler::new(&spec.distribution, each_once, positions, smallest.into(), spec.seed);
        let general = match is_simple {
            true => None,
            false => Some(Box::new(GeneralPattern::new(spec, files, &layout, coverage)?)),
        };
        Ok(AccessPattern {
            random: WyRand::new(spec.seed),
            is_random: spec.workload.is_random(),
            mix: op_mix(spec),
            position: 0,
            mixed_positions: [0; 2],
            // What is left at the end and too short for an I/O ends the pass of both, as in fio.
            returns_alone: spec.time_based && size.is_multiple_of(largest.into()),
            positions,
            io_blocks: largest / block_bytes,
            first_lba: offset / u64::from(block_bytes),
            sampler,
            general,
        })
    }

    /// Bytes of one pass over all regions.
    pub(crate) fn total_bytes(&self, block_bytes: u32) -> u64 {
        match &self.general {
            None => self.positions * u64::from(self.io_blocks) * u64::from(block_bytes),
            Some(general) => general.blocks() * u64::from(block_bytes),
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
            OpMix::Mixed(below) if !self.is_random => self.assign_mixed(requests, keep_ops, below, start),
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

    /// Assigns the next I/Os of a sequential mix: reads and writes have a position each, as in fio.
    fn assign_mixed(
        &mut self,
        requests: &mut [Request<Data>],
        keep_ops: bool,
        reads_below: u64,
        mut start: impl FnMut(&mut Request<Data>),
    ) {
        for request in requests {
            self.assign_one_mixed(request, keep_ops, reads_below);
            start(request);
        }
    }

    #[inline]
    fn assign_one_mixed(&mut self, request: &mut Request<Data>, keep_op: bool, reads_below: u64) {
        if !keep_op {
            request.op = random_op(&mut self.random, reads_below);
        }
        let mut stream = usize::from(request.op != Op::Read);
        if self.mixed_positions[stream] == self.positions {
            if self.returns_alone {
                self.mixed_positions[stream] = 0;
            } else {
                self.mixed_positions = [0; 2];
                // The next pass has another draw.
                if !keep_op {
                    request.op = random_op(&mut self.random, reads_below);
                    stream = usize::from(request.op != Op::Read);
                }
            }
        }
        request.lba = self.first_lba + self.mixed_positions[stream] * u64::from(self.io_blocks);
        request.blocks = self.io_blocks;
        self.mixed_positions[stream] += 1;
    }

    /// Assigns the next I/O of a simple pattern to one request, as [`next_batch`](Self::next_batch) does for
    /// many; for a single request it is faster to change the state in place.
    #[inline]
    pub(crate) fn next_one(&mut self, request: &mut Request<Data>) {
        request.op = match self.mix {
            OpMix::Single(op) => op,
            OpMix::Mixed(below) if !self.is_random => return self.assign_one_mixed(request, false, below),
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
        general.next(request, op, self.mix, self.is_random, &mut self.random);
    }

    /// Draws the operation of the next I/O.
    pub(crate) fn draw_op(&mut self) -> Op {
        match self.mix {
            OpMix::Single(op) => op,
            OpMix::Mixed(below) => random_op(&mut self.random, below),
        }
    }

    /// The last I/O of this file and operation was moved: the next one in sequence follows it.
    pub(crate) fn moved_to(&mut self, file: u16, op: Op, lba: u64, blocks: u32) {
        if let Some(general) = &mut self.general {
            general.moved_to(file, op, lba, blocks);
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

/// What keeps the I/Os of a job from being at multiples of their size in one file, so that no position is
/// written as a whole; `None` if they all are.
fn partial_positions(spec: &JobSpec, files: usize, has_one_size: bool) -> Option<&'static str> {
    let unit = u64::from(spec.block_bytes);
    let cases = [
        (files != 1, "several files"),
        (!has_one_size, "several block sizes and --blockalign"),
        (!spec.sequence.step_bytes.unsigned_abs().is_multiple_of(unit), "a step that is no multiple of --bs"),
        (spec.sequence.step_bytes < 0, "steps backwards"),
        (spec.zones.is_some(), "--zonemode=strided"),
    ];
    cases.into_iter().find(|(is_given, _)| *is_given).map(|(_, option)| option)
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
