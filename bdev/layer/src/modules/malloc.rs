//! A device in memory: fast, and gone with the process.

use std::sync::Arc;

use memory::SharedRegion;
use ring::{Op, Status};
use uuid::Uuid;

use crate::{Bdev, BdevError, BoxedChannel, Completion, Device, Geometry, Registry, Request, Value};

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
}

struct Channel {
    region: Arc<SharedRegion>,
    block_size: u32,
    done: Vec<Completion>,
}

/// Makes a zeroed memory device and registers it. Memory is the machine's until it is written.
pub fn create(registry: &Registry, config: MallocConfig) -> Result<Arc<Device>, BdevError> {
    let mut geometry = super::geometry(config.num_blocks, config.block_size)?;
    if config.physical_block_size != 0 {
        geometry.physical_block_size = config.physical_block_size;
    }
    geometry.optimal_io_boundary_blocks = config.optimal_io_boundary_blocks;
    let region = Arc::new(SharedRegion::new(geometry.bytes())?);
    registry.register(&config.name, config.uuid, &[], Arc::new(Malloc { geometry, region }))
}

impl Bdev for Malloc {
    fn product_name(&self) -> &'static str {
        "Malloc disk"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn supports(&self, op: Op) -> bool {
        // The layer's own reset does all that there is to do.
        op != Op::Reset
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let block_size = self.geometry.block_size;
        Ok(Box::new(Channel { region: self.region.clone(), block_size, done: Vec::new() }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        vec![("durability", "memory".into())]
    }
}

impl Channel {
    fn execute(&self, request: &mut Request) -> Status {
        let (offset, bytes) = super::bytes_of(request, self.block_size);
        match (request.op, &mut request.buffer) {
            (Op::Read, Some(buffer)) => self.region.read(offset, buffer.as_mut_slice()),
            (Op::Write, Some(buffer)) => self.region.write(offset, buffer.as_slice()),
            (Op::Unmap | Op::WriteZeroes, _) => {
                self.region.zero(offset, bytes);
            }
            // What is acknowledged is in the region, which is all that memory promises.
            (Op::Flush, _) => {}
            (Op::Read | Op::Write | Op::Reset, _) => return Status::INTERNAL_ERROR,
        }
        Status::SUCCESS
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for mut request in batch.drain(..) {
            let status = self.execute(&mut request);
            self.done.push(request.complete(status));
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.done.is_empty()).then_some(0)
    }
}
