//! A device in memory: fast, and gone with the process.

use std::collections::VecDeque;
use std::sync::Arc;

use memory::SharedRegion;
use ring::{Op, Status};
use uuid::Uuid;

use crate::{
    BadBlocks, Bdev, BdevError, BoxedChannel, Completion, Device, Geometry, Registry, Request, Value,
};

/// How a memory device is made.
#[derive(Clone, Debug)]
pub struct MallocConfig {
    /// Its name.
    pub name: String,
    /// Its UUID; made up where none is given.
    pub uuid: Option<Uuid>,
    /// Number of blocks.
    pub num_blocks: u64,
    /// Bytes of a block, a multiple of 512.
    pub block_size: u32,
    /// Bytes of a physical block; 0 for the same as `block_size`.
    pub physical_block_size: u32,
    /// I/O is best kept inside multiples of this many blocks; 0 where it does not matter.
    pub optimal_io_boundary_blocks: u32,
}

impl MallocConfig {
    /// A device of `num_blocks` blocks of `block_size` bytes.
    pub fn new(name: &str, num_blocks: u64, block_size: u32) -> MallocConfig {
        MallocConfig {
            name: name.to_string(),
            uuid: None,
            num_blocks,
            block_size,
            physical_block_size: 0,
            optimal_io_boundary_blocks: 0,
        }
    }
}

/// The module's object.
pub struct Malloc {
    geometry: Geometry,
    region: Arc<SharedRegion>,
    bad: Arc<BadBlocks>,
}

struct Channel {
    region: Arc<SharedRegion>,
    bad: Arc<BadBlocks>,
    block_size: u32,
    done: Vec<Completion>,
    /// Long ranges to be made zero, a piece a poll, oldest first.
    zeroing: VecDeque<Zeroing>,
}

/// A range that takes longer to make zero than a core may be kept from others.
struct Zeroing {
    request: Request,
    offset: u64,
    left: u64,
}

/// Bytes made zero at a time: about a tenth of a millisecond of a core.
const ZERO_PIECE_BYTES: u64 = 1 << 20;

/// Makes a zeroed memory device and registers it. Memory is the machine's until it is written.
pub fn create(registry: &Registry, config: MallocConfig) -> Result<Arc<Device>, BdevError> {
    let mut geometry = super::geometry(config.num_blocks, config.block_size)?;
    if config.physical_block_size != 0 {
        geometry.physical_block_size = config.physical_block_size;
    }
    geometry.optimal_io_boundary_blocks = config.optimal_io_boundary_blocks;
    let region = Arc::new(SharedRegion::new(geometry.bytes())?);
    registry.register(
        &config.name,
        config.uuid,
        &[],
        Arc::new(Malloc { geometry, region, bad: Arc::default() }),
    )
}

impl Bdev for Malloc {
    fn product_name(&self) -> &'static str {
        "Malloc disk"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn supports(&self, op: Op) -> bool {
        // The layer's own reset and compare do all that there is to do.
        !matches!(op, Op::Reset | Op::Compare)
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let block_size = self.geometry.block_size;
        Ok(Box::new(Channel {
            region: self.region.clone(),
            bad: self.bad.clone(),
            block_size,
            done: Vec::new(),
            zeroing: VecDeque::new(),
        }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        vec![("durability", "memory".into())]
    }
}

impl Channel {
    /// Does a request, or as much of it as a turn allows.
    fn execute(&mut self, mut request: Request) {
        let (offset, bytes) = super::bytes_of(&request, self.block_size);
        let (lba, blocks) = (request.lba, request.blocks);
        let status = match (request.op, &mut request.buffer) {
            (Op::Read, Some(_)) if self.bad.touches(lba, blocks) => Status::UNRECOVERED_READ_ERROR,
            (Op::Write | Op::Unmap | Op::WriteZeroes, _) if self.bad.heal(lba, blocks).is_err() => {
                Status::WRITE_FAULT
            }
            (Op::Read, Some(buffer)) => {
                self.region.read_into(offset, buffer);
                Status::SUCCESS
            }
            (Op::Write, Some(buffer)) => {
                self.region.write_from(offset, buffer);
                Status::SUCCESS
            }
            (Op::Unmap | Op::WriteZeroes, _) if bytes > ZERO_PIECE_BYTES => {
                self.zeroing.push_back(Zeroing { request, offset, left: bytes });
                return;
            }
            (Op::Unmap | Op::WriteZeroes, _) => {
                self.region.zero(offset, bytes);
                Status::SUCCESS
            }
            // What is acknowledged is in the region, which is all that memory promises.
            (Op::Flush, _) => Status::SUCCESS,
            (Op::WriteUncorrectable, _) => match self.bad.mark(lba, blocks) {
                Ok(()) => Status::SUCCESS,
                Err(_) => Status::WRITE_FAULT,
            },
            (Op::Read | Op::Write | Op::Reset | Op::Compare, _) => Status::INTERNAL_ERROR,
        };
        self.done.push(request.complete(status));
    }

    #[cold]
    fn zero_on(&mut self) {
        let Some(mut zeroing) = self.zeroing.pop_front() else { return };
        let piece = zeroing.left.min(ZERO_PIECE_BYTES);
        self.region.zero(zeroing.offset, piece);
        zeroing.offset += piece;
        zeroing.left -= piece;
        if zeroing.left == 0 {
            self.done.push(zeroing.request.complete(Status::SUCCESS));
        } else {
            self.zeroing.push_front(zeroing);
        }
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.execute(request);
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        if !self.zeroing.is_empty() {
            self.zero_on();
        }
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.done.is_empty() || !self.zeroing.is_empty()).then_some(0)
    }
}
