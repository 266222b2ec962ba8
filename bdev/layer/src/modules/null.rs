//! The null device: completes every I/O at once and stores nothing, to measure the cost of the layers above.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Op, Status};
use uuid::Uuid;

use super::protected::{MetadataConfig, ProtectedBlocks};
use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, IoLimits, Registry,
    Request,
};

/// Configuration of a null device.
#[derive(Clone, Debug)]
pub struct NullConfig {
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
    /// Metadata and protection information; none by default.
    pub metadata: MetadataConfig,
}

impl NullConfig {
    /// `num_blocks` blocks of `block_size` bytes, a random UUID, and no larger physical block.
    pub fn new(name: &str, num_blocks: u64, block_size: u32) -> NullConfig {
        NullConfig {
            name: name.to_string(),
            uuid: None,
            num_blocks,
            block_size,
            physical_block_size: 0,
            metadata: MetadataConfig::default(),
        }
    }
}

/// The module's object of a null device.
pub struct NullBdev {
    geometry: BdevGeometry,
    metadata: MetadataConfig,
    /// Current number of blocks.
    blocks: AtomicU64,
}

struct NullChannel {
    completed: Vec<Request>,
}

/// Creates and registers a null device.
pub fn create(registry: &Registry, config: NullConfig) -> Result<Arc<BlockDevice>, BdevError> {
    let mut geometry = super::geometry(config.num_blocks, config.block_size, &config.metadata)?;
    super::set_physical_block_size(&mut geometry, config.physical_block_size)?;
    let blocks = AtomicU64::new(geometry.blocks);
    registry.register(
        &config.name,
        config.uuid,
        &[],
        Arc::new(NullBdev { geometry, metadata: config.metadata, blocks }),
    )
}

/// Changes the number of blocks of a null device and notifies its users.
pub fn resize(registry: &Registry, name: &str, num_blocks: u64) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<NullBdev>() else {
        return Err(BdevError::WrongKind { name: name.to_string(), expected: "Null disk" });
    };
    super::geometry(num_blocks, module.geometry.data_block_size(), &module.metadata)?;
    module.blocks.store(num_blocks, Ordering::Relaxed);
    registry.notify_resized(device.name())
}

impl Bdev for NullBdev {
    fn product_name(&self) -> &'static str {
        "Null disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        // A device that stores nothing has no uncorrectable blocks.
        matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits::NONE
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let channel = NullChannel { completed: Vec::new() };
        Ok(match ProtectedBlocks::new(&self.geometry) {
            None => Box::new(channel),
            Some(blocks) => Box::new(ProtectedNullChannel { blocks, channel, failed: Vec::new() }),
        })
    }

    fn reads_undefined(&self) -> bool {
        true
    }
}

impl block_io::Channel for NullChannel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        if self.completed.is_empty() {
            std::mem::swap(&mut self.completed, batch);
        } else {
            self.completed.append(batch);
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.completed.len();
        if count == 1
            && let Some(request) = self.completed.pop()
        {
            // Cheaper than a drain for a single request.
            sink.push(request.complete(Status::SUCCESS));
            return 1;
        }
        sink.extend(self.completed.drain(..).map(|request| request.complete(Status::SUCCESS)));
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.completed.is_empty()).then_some(0)
    }
}

/// The channel of a device with metadata: writes are checked, and reads get valid protection information.
struct ProtectedNullChannel {
    blocks: ProtectedBlocks,
    channel: NullChannel,
    failed: Vec<Completion>,
}

impl block_io::Channel for ProtectedNullChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        let (blocks, failed) = (&mut self.blocks, &mut self.failed);
        let is_valid = |request: &mut Request| match request.op {
            Op::Read => {
                blocks.generate_read(request);
                Status::SUCCESS
            }
            Op::Write => blocks.write(request, |_, _| {}),
            _ => Status::SUCCESS,
        };
        let statuses: Vec<Status> = batch.iter_mut().map(is_valid).collect();
        for (request, status) in std::mem::take(batch).into_iter().zip(statuses) {
            match status.is_success() {
                true => self.channel.completed.push(request),
                false => failed.push(request.complete(status)),
            }
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let failed = self.failed.len();
        sink.append(&mut self.failed);
        failed + self.channel.poll(sink)
    }

    fn deadline(&self) -> Option<u64> {
        if self.failed.is_empty() { self.channel.deadline() } else { Some(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resize_changes_the_size_and_rejects_zero() {
        let registry = Registry::new();
        let device = create(&registry, NullConfig::new("Null0", 8, 512)).unwrap();
        resize(&registry, "Null0", 16).unwrap();
        assert_eq!(device.geometry().blocks, 16);
        assert!(matches!(resize(&registry, "Null0", 0), Err(BdevError::Invalid { .. })));
        assert!(matches!(resize(&registry, "none", 1), Err(BdevError::NotFound { .. })));
        assert_eq!(device.geometry().blocks, 16);
    }
}
