//! Where I/O goes: the part of the device that a job uses, and the next position in it.

use memory::Buffer;
use ring::{Op, Request};

use crate::Random;
use crate::distribution::Draw;
use crate::side::side_of;
use crate::spec::{FileService, JobSpec, Sizes, Verify, Workload};

/// Size of the device under a channel.
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
    /// I/Os are not whole blocks.
    #[error("--bs={bs} is not a multiple of the device's {block_bytes}-byte blocks")]
    BlockSize {
        /// What was asked for.
        bs: u32,
        /// What the device has.
        block_bytes: u32,
    },
    /// An I/O is larger than a buffer.
    #[error("--bs={bs} is above the largest buffer, {max} bytes")]
    BlockTooLarge {
        /// What was asked for.
        bs: u32,
        /// What a buffer holds.
        max: usize,
    },
    /// The part of the device is not there.
    #[error("--offset={offset} and --size={size} do not fit a device of {device} bytes")]
    Region {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        size: u64,
        /// The device's bytes.
        device: u64,
    },
    /// Depth out of range.
    #[error("--iodepth={depth} is not between 1 and {max}")]
    Depth {
        /// What was asked for.
        depth: u32,
        /// The most.
        max: u32,
    },
    /// More I/Os in flight than places to do them.
    #[error(
        "--verify needs more room than --iodepth={depth} I/Os: the job has {positions} places; raise --size"
    )]
    DepthAbovePositions {
        /// I/Os in flight.
        depth: u32,
        /// Places.
        positions: u64,
    },
    /// Too much to remember.
    #[error(
        "--verify remembers at most {positions_max} I/Os' places, not {positions}; lower --size or raise --bs"
    )]
    VerifyTooLarge {
        /// Places.
        positions: u64,
        /// The most.
        positions_max: u64,
    },
    /// A job that runs by time needs a time.
    #[error("--time_based needs --runtime; for example --runtime=10s")]
    NoRuntime,
    /// Blocks of more than one size.
    #[error("the files have blocks of {0} and of {1} bytes; one job takes files of one kind")]
    MixedBlocks(u32, u32),
    /// Files that one job cannot count.
    #[error("{0} files are not between 1 and 65536")]
    Files(usize),
    /// A check needs to know what each place holds.
    #[error("--verify needs one file and one block size; give each file or size a job of its own")]
    VerifyMixed,
    /// No I/O can go where it is wanted.
    #[error("--blockalign={align} is not a multiple of the device's {block_bytes}-byte blocks")]
    Align {
        /// What was asked for.
        align: u64,
        /// What the device has.
        block_bytes: u32,
    },
    /// No memory.
    #[error("no memory for {0} buffers of {1} bytes; lower --iodepth, --numjobs or --bs")]
    NoMemory(u32, u32),
}

/// Where the next I/O goes, and which way.
pub(crate) struct Place {
    pub(crate) random: Random,
    is_random: bool,
    pub(crate) mix: Mix,
    pub(crate) position: u64,
    pub(crate) positions: u64,
    pub(crate) io_blocks: u32,
    pub(crate) first_lba: u64,
    draw: Draw,
    /// Several files, or I/Os of several sizes.
    general: Option<Box<General>>,
}

/// Which way the I/Os go.
#[derive(Clone, Copy)]
pub(crate) enum Mix {
    /// All the same.
    Only(Op),
    /// Reads where a draw of 64 bits is below this.
    Reads(u64),
}

/// What needs more than one multiplication to find the next place.
struct General {
    regions: Vec<Region>,
    sizes: [Sizes; 3],
    block_bytes: u32,
    align_blocks: u64,
    service: FileService,
    /// Draws of 64 bits below this are random, the others follow the last I/O.
    random_below: u64,
    file: usize,
    left: u32,
}

/// The part of one file that is used, in blocks.
struct Region {
    first_lba: u64,
    blocks: u64,
    /// Random positions, each `align_blocks` from the next.
    positions: u64,
    next: u64,
    draw: Draw,
}

impl Place {
    pub(crate) fn new(spec: &JobSpec, files: &[Geometry]) -> Result<Place, SetupError> {
        let count = files.len();
        let first = files.first().filter(|_| count <= 1 << 16).ok_or(SetupError::Files(count))?;
        let block_bytes = first.block_bytes;
        if let Some(other) = files.iter().find(|file| file.block_bytes != block_bytes) {
            return Err(SetupError::MixedBlocks(block_bytes, other.block_bytes));
        }
        let plain =
            [Sizes::Fixed(spec.block_bytes), Sizes::Fixed(spec.block_bytes), Sizes::Fixed(spec.block_bytes)];
        let sizes = spec.sizes.as_deref().unwrap_or(&plain);
        let directions = spec.workload.directions(spec.read_percent);
        let used = |index: &usize| directions[*index];
        for index in (0..3).filter(used) {
            let bs = sizes[index].unit();
            if bs == 0 || !bs.is_multiple_of(block_bytes) {
                return Err(SetupError::BlockSize { bs, block_bytes });
            }
            if sizes[index].max() as usize > memory::BUFFER_BYTES_MAX {
                return Err(SetupError::BlockTooLarge {
                    bs: sizes[index].max(),
                    max: memory::BUFFER_BYTES_MAX,
                });
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
        let plain =
            smallest == largest && count == 1 && align == u64::from(smallest) && spec.random_percent == 100;
        if spec.verify != Verify::Off && !plain {
            return Err(SetupError::VerifyMixed);
        }
        // Where sizes vary, a place may be touched by its neighbour's I/O: each comes about once.
        let once = spec.each_once && smallest == largest && align == u64::from(smallest);
        let mut regions = Vec::with_capacity(count);
        for (number, file) in files.iter().enumerate() {
            let (offset, size) = region(spec, *file, count as u64, largest)?;
            let positions = if plain { size / align } else { (size - u64::from(largest)) / align + 1 };
            let seed = spec.seed.wrapping_add((number as u64).wrapping_mul(0x9e37_79b9));
            let draw = Draw::new(&spec.distribution, once, positions, align, seed);
            let (first_lba, blocks) = (offset / u64::from(block_bytes), size / u64::from(block_bytes));
            regions.push(Region { first_lba, blocks, positions, next: 0, draw });
        }
        let mix = match spec.workload {
            Workload::Read | Workload::RandRead => Mix::Only(Op::Read),
            Workload::Write | Workload::RandWrite => Mix::Only(Op::Write),
            Workload::Trim | Workload::RandTrim => Mix::Only(Op::Unmap),
            Workload::ReadWrite | Workload::RandRw => match spec.read_percent {
                0 => Mix::Only(Op::Write),
                100.. => Mix::Only(Op::Read),
                percent => Mix::Reads(u64::MAX / 100 * u64::from(percent)),
            },
        };
        let (first_lba, positions, draw) =
            (regions[0].first_lba, regions[0].positions, regions[0].draw.clone());
        let general = (!plain).then(|| {
            let (sizes, align_blocks) = (sizes.clone(), align / u64::from(block_bytes));
            let random_below = (f64::from(spec.random_percent.min(100)) / 100.0 * u64::MAX as f64) as u64;
            let service = spec.service;
            Box::new(General {
                regions,
                sizes,
                block_bytes,
                align_blocks,
                service,
                random_below,
                file: 0,
                left: 0,
            })
        });
        Ok(Place {
            random: Random::new(spec.seed),
            is_random: spec.workload.is_random(),
            mix,
            position: 0,
            positions,
            io_blocks: largest / block_bytes,
            first_lba,
            draw,
            general,
        })
    }

    /// Bytes of all that is used, once.
    pub(crate) fn total_bytes(&self, block_bytes: u32) -> u64 {
        match &self.general {
            None => self.positions * u64::from(self.io_blocks) * u64::from(block_bytes),
            Some(general) => {
                general.regions.iter().map(|region| region.blocks * u64::from(block_bytes)).sum()
            }
        }
    }

    /// Whether every I/O has the same size, and there is one file.
    pub(crate) fn is_plain(&self) -> bool {
        self.general.is_none()
    }

    /// Makes requests the next ones of a plain job, in their order, and hands each to `start`. With `given`
    /// each keeps the operation that it has.
    ///
    /// What the job does is looked up once here, and each way has a loop of its own.
    #[inline]
    pub(crate) fn next_all(
        &mut self,
        requests: &mut [Request<Buffer>],
        given: bool,
        start: impl FnMut(&mut Request<Buffer>),
    ) {
        match self.mix {
            _ if given => self.place_all(requests, |request, _| request.op, start),
            Mix::Only(op) => self.place_all(requests, |_, _| op, start),
            Mix::Reads(below) => self.place_all(requests, |_, random| drawn_op(random, below), start),
        }
    }

    #[inline]
    fn place_all(
        &mut self,
        requests: &mut [Request<Buffer>],
        op: impl Fn(&Request<Buffer>, &mut Random) -> Op,
        mut start: impl FnMut(&mut Request<Buffer>),
    ) {
        let (first_lba, io_blocks, positions) = (self.first_lba, self.io_blocks, self.positions);
        // What is changed in the loops is at hand there, and not in memory that a request might be in.
        let mut random = self.random.clone();
        let mut place = |request: &mut Request<Buffer>, op: Op, position: u64| {
            request.lba = first_lba + position * u64::from(io_blocks);
            request.op = op;
            request.blocks = io_blocks;
            start(request);
        };
        match &mut self.draw {
            _ if !self.is_random => {
                let mut position = self.position;
                for request in requests {
                    place(request, op(request, &mut random), position);
                    position = if position + 1 == positions { 0 } else { position + 1 };
                }
                self.position = position;
            }
            Draw::Uniform => {
                for request in requests {
                    let op = op(request, &mut random);
                    place(request, op, random.below(positions));
                }
            }
            Draw::Each(permutation) => {
                let mut order = permutation.clone();
                for request in requests {
                    place(request, op(request, &mut random), order.next());
                }
                *permutation = order;
            }
            shaped => {
                for request in requests {
                    let op = op(request, &mut random);
                    place(request, op, shaped.next(&mut random, positions));
                }
            }
        }
        self.random = random;
    }

    /// Makes one request the next of a plain job, as [`next_all`](Self::next_all) does many: with nothing to
    /// be saved by doing alike things together, state is better changed where it lies.
    #[inline]
    pub(crate) fn next_one(&mut self, request: &mut Request<Buffer>) {
        request.op = match self.mix {
            Mix::Only(op) => op,
            Mix::Reads(below) => drawn_op(&mut self.random, below),
        };
        let position = if self.is_random {
            self.draw.next(&mut self.random, self.positions)
        } else {
            let position = self.position;
            self.position = if position + 1 == self.positions { 0 } else { position + 1 };
            position
        };
        request.lba = self.first_lba + position * u64::from(self.io_blocks);
        request.blocks = self.io_blocks;
    }

    /// Makes a request the next one, of the direction that is given, if any is.
    pub(crate) fn next_as(&mut self, request: &mut Request<Buffer>, op: Option<Op>) {
        if let Some(op) = op {
            request.op = op;
        }
        let Some(general) = &mut self.general else {
            return self.next_all(std::slice::from_mut(request), op.is_some(), |_| ());
        };
        let op = match (op, self.mix) {
            (Some(op), _) | (None, Mix::Only(op)) => op,
            (None, Mix::Reads(below)) => drawn_op(&mut self.random, below),
        };
        general.next(request, op, self.is_random, &mut self.random);
    }
}

#[inline]
fn drawn_op(random: &mut Random, reads_below: u64) -> Op {
    if random.next_bits() < reads_below { Op::Read } else { Op::Write }
}

impl General {
    fn next(&mut self, request: &mut Request<Buffer>, op: Op, is_random: bool, random: &mut Random) {
        self.choose_file(random);
        // What has no place, a flush, is not asked for here.
        let size = match &self.sizes[side_of(op)] {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Range { min, max } => min * (1 + random.below(u64::from(max / min)) as u32),
            Sizes::Split(parts) => {
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
        let anywhere = is_random && (self.random_below == u64::MAX || random.next_bits() < self.random_below);
        let at = if anywhere {
            region.draw.next(random, region.positions) * self.align_blocks
        } else if region.next + u64::from(blocks) > region.blocks {
            0
        } else {
            region.next
        };
        region.next = at + u64::from(blocks);
        request.lba = region.first_lba + at;
        (request.op, request.blocks, request.flow) = (op, blocks, self.file as u16);
    }

    fn choose_file(&mut self, random: &mut Random) {
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
                if self.left > 0 {
                    self.left -= 1;
                    return;
                }
                // The first of all is file 0.
                self.file = match self.service {
                    FileService::Random(_) => random.below(count as u64) as usize,
                    _ if self.regions.iter().all(|region| region.next == 0) => 0,
                    _ => (self.file + 1) % count,
                };
                self.left = turn.max(1) - 1;
            }
        }
    }
}

/// The part of a file that a job uses: where it begins, and its bytes.
fn region(spec: &JobSpec, file: Geometry, files: u64, largest: u32) -> Result<(u64, u64), SetupError> {
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
