//! The malloc device: a RAM disk whose contents are lost when the process ends.

mod device_copies;

use std::sync::Arc;

use accel::{Accel, AccelChannel, AccelOp, DeviceFailure, DeviceOutcome, Effect};
use block_io::{Op, Payload, Status};
use uuid::Uuid;

use self::device_copies::DeviceCopies;
use super::protected::{self, MetadataConfig, ProtectedBlocks};
use super::written_pages::WrittenPages;
use super::zeroing::{self, ZeroingQueue};
use crate::{
    BadBlocks, Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, DeviceMemory,
    Durability, IoLimits, Registry, Request,
};

/// Configuration of a malloc device.
#[derive(Clone, Debug)]
pub struct MallocConfig {
    /// Name of the device.
    pub name: String,
    /// UUID; random if none is given.
    pub uuid: Option<Uuid>,
    /// Capacity in blocks.
    pub num_blocks: u64,
    /// Size of a block's data in bytes, a multiple of 512.
    pub block_size: u32,
    /// Size of a physical block in bytes; 0 for `block_size`.
    pub physical_block_size: u32,
    /// Optimal I/O boundary in blocks; 0 for none.
    pub optimal_io_boundary_blocks: u32,
    /// Metadata and protection information; none by default.
    pub metadata: MetadataConfig,
}

impl MallocConfig {
    /// `num_blocks` blocks of `block_size` bytes, a random UUID, and no boundary.
    pub fn new(name: &str, num_blocks: u64, block_size: u32) -> MallocConfig {
        MallocConfig {
            name: name.to_string(),
            uuid: None,
            num_blocks,
            block_size,
            physical_block_size: 0,
            optimal_io_boundary_blocks: 0,
            metadata: MetadataConfig::default(),
        }
    }
}

/// The module's object of a malloc device.
pub struct MallocBdev {
    geometry: BdevGeometry,
    region: Arc<DeviceMemory>,
    written: Arc<WrittenPages>,
    bad_blocks: Arc<BadBlocks>,
    accel: Accel,
}

struct MallocChannel {
    region: Arc<DeviceMemory>,
    written: Arc<WrittenPages>,
    bad_blocks: Arc<BadBlocks>,
    /// Bytes of a stored block, metadata included.
    block_size: u32,
    protected: Option<ProtectedBlocks>,
    accel: AccelChannel,
    /// What a DMA engine executes.
    copies: DeviceCopies,
    outcomes: Vec<DeviceOutcome>,
    completed: Vec<Completion>,
    /// Unmaps and writes of zeroes that are too long for one poll.
    zeroing: ZeroingQueue,
}

/// Creates and registers a zeroed malloc device. Its memory is allocated by the first write of each page, and
/// counts as used at once ([`Registry::limit_memory`]).
pub fn create(registry: &Registry, config: MallocConfig) -> Result<Arc<BlockDevice>, BdevError> {
    let mut geometry = super::geometry(config.num_blocks, config.block_size, &config.metadata)?;
    super::set_physical_block_size(&mut geometry, config.physical_block_size)?;
    geometry.optimal_io_boundary_blocks = config.optimal_io_boundary_blocks;
    let bytes = geometry.blocks * u64::from(protected::stored_bytes(&geometry));
    let region = registry.allocate_memory(&config.name, bytes)?;
    let written = Arc::new(WrittenPages::new(bytes));
    let module =
        MallocBdev { geometry, region, written, bad_blocks: Arc::default(), accel: registry.accel().clone() };
    registry.register(&config.name, config.uuid, &[], Arc::new(module))
}

impl Bdev for MallocBdev {
    fn product_name(&self) -> &'static str {
        "Malloc disk"
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        Durability::Process
    }

    fn supports(&self, op: Op) -> bool {
        let moves = matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes);
        moves || matches!(op, Op::WriteUncorrectable | Op::SeekData | Op::SeekHole)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits::NONE
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let block_size = protected::stored_bytes(&self.geometry);
        Ok(Box::new(MallocChannel {
            protected: ProtectedBlocks::new(&self.geometry),
            region: self.region.clone(),
            written: self.written.clone(),
            bad_blocks: self.bad_blocks.clone(),
            block_size,
            accel: self.accel.channel(core.index()),
            copies: DeviceCopies::new(&self.accel, core),
            outcomes: Vec::new(),
            completed: Vec::new(),
            zeroing: ZeroingQueue::default(),
        }))
    }
}

impl MallocChannel {
    /// Has a DMA engine execute a request, if one is assigned and takes it, or else the CPU.
    fn execute(&mut self, request: Request) {
        if self.copies.takes(request.op) && self.protected.is_none() {
            self.execute_on_device(request);
        } else {
            self.execute_on_cpu(request);
        }
    }

    #[inline(never)]
    fn execute_on_device(&mut self, request: Request) {
        let (offset, bytes) = super::bytes_of(&request, self.block_size);
        let (lba, blocks) = (request.lba, request.blocks);
        let is_for_cpu = match request.op {
            Op::Read => self.bad_blocks.overlaps(lba, blocks),
            Op::Write => self.bad_blocks.clear(lba, blocks).is_err(),
            _ => bytes > zeroing::PIECE_BYTES || self.bad_blocks.clear(lba, blocks).is_err(),
        };
        if is_for_cpu {
            return self.execute_instead(request);
        }
        let op = request.op;
        match self.copies.submit(request, &self.region, offset, bytes) {
            // What is written is data from now on: a read before the completion returns either.
            Ok(()) if op == Op::Write => self.written.mark(offset, bytes),
            Ok(()) if op != Op::Read => self.written.clear(offset, bytes),
            Ok(()) => {}
            Err(request) => self.execute_instead(request),
        }
    }

    /// Completes what a DMA engine has executed, and executes what it has failed at.
    #[inline(never)]
    fn poll_device(&mut self) {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        self.copies.poll(&mut outcomes);
        for DeviceOutcome { mut request, result } in outcomes.drain(..) {
            let (_, bytes) = super::bytes_of(&request, self.block_size);
            let op = device_copies::operation(request.op).unwrap_or(AccelOp::Copy);
            match result {
                Ok(()) => {
                    self.accel.executed(op, bytes);
                    self.completed.push(request.complete(Status::SUCCESS));
                }
                Err(DeviceFailure::Stopped) => self.execute_instead(request),
                Err(DeviceFailure::Running) => {
                    self.accel.failed(op);
                    if request.op == Op::Read {
                        // The engine may still write to this memory: nothing else ever has it.
                        std::mem::forget(std::mem::take(&mut request.payload));
                    }
                    self.completed.push(request.complete(Status::INTERNAL_ERROR));
                }
            }
        }
        self.outcomes = outcomes;
    }

    /// As [`execute_on_cpu`](Self::execute_on_cpu), for a request that a DMA engine does not execute after
    /// all.
    #[cold]
    fn execute_instead(&mut self, request: Request) {
        self.execute_on_cpu(request);
    }

    /// Executes a request, or queues it if it takes more than one poll.
    #[inline(always)]
    fn execute_on_cpu(&mut self, mut request: Request) {
        let (offset, bytes) = super::bytes_of(&request, self.block_size);
        let (lba, blocks) = (request.lba, request.blocks);
        let status = match (request.op, &mut request.payload) {
            (Op::Read, _) if self.bad_blocks.overlaps(lba, blocks) => Status::UNRECOVERED_READ_ERROR,
            (Op::Write | Op::Unmap | Op::WriteZeroes, _) if self.bad_blocks.clear(lba, blocks).is_err() => {
                Status::WRITE_FAULT
            }
            (Op::Read | Op::Write, _) if self.protected.is_some() => {
                self.execute_protected(&mut request, offset)
            }
            (Op::Read, Payload::Data(data)) => match self.accel.begin(AccelOp::Copy, bytes) {
                Ok(effect) => {
                    let mut offset = offset;
                    for slice in data.slices_mut() {
                        self.region.read_into(offset, slice);
                        offset += slice.len() as u64;
                    }
                    if effect != Effect::None {
                        corrupt_data(data);
                    }
                    Status::SUCCESS
                }
                Err(_) => Status::INTERNAL_ERROR,
            },
            (Op::Write, Payload::Data(data)) => match self.accel.begin(AccelOp::Copy, bytes) {
                Ok(effect) => {
                    let mut at = offset;
                    for slice in data.slices() {
                        self.region.write_from(at, slice);
                        at += slice.len() as u64;
                    }
                    self.written.mark(offset, bytes);
                    if effect != Effect::None {
                        corrupt_region(&self.region, offset);
                    }
                    Status::SUCCESS
                }
                // Nothing was written.
                Err(_) => Status::INTERNAL_ERROR,
            },
            (Op::Unmap | Op::WriteZeroes, _) if bytes > zeroing::PIECE_BYTES => {
                self.zeroing.push(request, offset, bytes);
                return;
            }
            (Op::Unmap | Op::WriteZeroes, _) => {
                zero(&self.written, &self.region, offset, bytes);
                Status::SUCCESS
            }
            (Op::SeekData | Op::SeekHole, payload) => {
                *payload = Payload::Found(self.written.find(request.op, lba, blocks, self.block_size));
                Status::SUCCESS
            }
            // Completed writes are in memory, which is all that this device promises.
            (Op::Flush, _) => Status::SUCCESS,
            (Op::WriteUncorrectable, _) => match self.bad_blocks.set(lba, blocks) {
                Ok(()) => Status::SUCCESS,
                Err(_) => Status::WRITE_FAULT,
            },
            _ => Status::INTERNAL_ERROR,
        };
        self.completed.push(request.complete(status));
    }

    /// Executes a read or write of a device with metadata.
    #[cold]
    fn execute_protected(&mut self, request: &mut Request, offset: u64) -> Status {
        let Some(blocks) = &mut self.protected else { return Status::INTERNAL_ERROR };
        let (region, stored) = (&self.region, u64::from(self.block_size));
        match request.op {
            Op::Read => blocks.read(request, |index, block| region.read(offset + index * stored, block)),
            _ => {
                let status =
                    blocks.write(request, |index, block| region.write(offset + index * stored, block));
                self.written.mark(offset, u64::from(request.blocks) * stored);
                status
            }
        }
    }
}

/// A fault of the engine that copied: one bit of the data is wrong.
#[cold]
fn corrupt_data(data: &mut dma::Data) {
    let mut byte = [0];
    data.copy_to(0, &mut byte);
    data.copy_from(0, &[byte[0] ^ 1]);
}

#[cold]
fn corrupt_region(region: &DeviceMemory, offset: u64) {
    let mut byte = [0];
    region.read(offset, &mut byte);
    region.write(offset, &[byte[0] ^ 1]);
}

#[cold]
fn zero(written: &WrittenPages, region: &DeviceMemory, offset: u64, bytes: u64) {
    written.clear(offset, bytes);
    region.zero(offset, bytes);
}

impl block_io::Channel for MallocChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            self.execute(request);
        }
        self.copies.flush();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        if self.copies.in_flight() > 0 {
            self.poll_device();
        }
        if !self.zeroing.is_empty() {
            let MallocChannel { zeroing, written, region, .. } = self;
            let done = zeroing.zero_next_piece(|offset, bytes| zero(written, region, offset, bytes));
            self.completed.extend(done.map(|request| request.complete(Status::SUCCESS)));
        }
        let count = self.completed.len();
        sink.append(&mut self.completed);
        count
    }

    fn deadline(&self) -> Option<u64> {
        let is_busy = !self.completed.is_empty() || !self.zeroing.is_empty() || self.copies.in_flight() > 0;
        is_busy.then_some(0)
    }
}
