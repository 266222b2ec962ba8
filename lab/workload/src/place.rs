//! Where I/O goes: the part of the device that a job uses, and the next position in it.

use memory::Buffer;
use ring::{Op, Request};

use crate::Random;
use crate::spec::{JobSpec, Workload};

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
    /// No memory.
    #[error("no memory for {0} buffers of {1} bytes; lower --iodepth, --numjobs or --bs")]
    NoMemory(u32, u32),
}

/// Where the next I/O goes, and which way.
pub(crate) struct Place {
    pub(crate) random: Random,
    pub(crate) is_random: bool,
    pub(crate) mix: Mix,
    pub(crate) position: u64,
    pub(crate) positions: u64,
    pub(crate) io_blocks: u32,
    pub(crate) first_lba: u64,
}

/// Which way the I/Os go.
#[derive(Clone, Copy)]
pub(crate) enum Mix {
    /// All the same.
    Only(Op),
    /// Reads where a draw of 64 bits is below this.
    Reads(u64),
}

impl Place {
    pub(crate) fn new(spec: &JobSpec, geometry: Geometry) -> Result<Place, SetupError> {
        let (bs, block_bytes) = (spec.block_bytes, geometry.block_bytes);
        if bs == 0 || !bs.is_multiple_of(block_bytes) {
            return Err(SetupError::BlockSize { bs, block_bytes });
        }
        if bs as usize > memory::BUFFER_BYTES_MAX {
            return Err(SetupError::BlockTooLarge { bs, max: memory::BUFFER_BYTES_MAX });
        }
        if spec.io_depth == 0 || spec.io_depth > JobSpec::IO_DEPTH_MAX {
            return Err(SetupError::Depth { depth: spec.io_depth, max: JobSpec::IO_DEPTH_MAX });
        }
        let device = geometry.blocks.saturating_mul(u64::from(block_bytes));
        let offset = spec.offset_bytes;
        let size = spec.size_bytes.unwrap_or(device.saturating_sub(offset));
        let fits = offset.checked_add(size).is_some_and(|end| end <= device);
        if !fits || !offset.is_multiple_of(u64::from(block_bytes)) || size < u64::from(bs) {
            return Err(SetupError::Region { offset, size, device });
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
        Ok(Place {
            random: Random::new(spec.seed),
            is_random: spec.workload.is_random(),
            mix,
            position: 0,
            positions: size / u64::from(bs),
            io_blocks: bs / block_bytes,
            first_lba: offset / u64::from(block_bytes),
        })
    }

    #[inline]
    /// Makes a request the next one.
    pub(crate) fn next(&mut self, request: &mut Request<Buffer>) {
        let position = if self.is_random {
            self.random.below(self.positions)
        } else {
            let position = self.position;
            self.position = if position + 1 == self.positions { 0 } else { position + 1 };
            position
        };
        request.lba = self.first_lba + position * u64::from(self.io_blocks);
        request.op = match self.mix {
            Mix::Only(op) => op,
            Mix::Reads(below) if self.random.next_bits() < below => Op::Read,
            Mix::Reads(_) => Op::Write,
        };
        request.blocks = self.io_blocks;
    }
}
