//! A device that does nothing, at once: what is left is the cost of everything around it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::{Op, Status};
use uuid::Uuid;

use crate::{Bdev, BdevError, BoxedChannel, Completion, Device, Geometry, Registry, Request, Value};

/// How a null device is made.
#[derive(Clone, Debug)]
pub struct NullConfig {
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
}

impl NullConfig {
    /// A device of `num_blocks` blocks of `block_size` bytes.
    pub fn new(name: &str, num_blocks: u64, block_size: u32) -> NullConfig {
        NullConfig { name: name.to_string(), uuid: None, num_blocks, block_size, physical_block_size: 0 }
    }
}

/// The module's object.
pub struct Null {
    geometry: Geometry,
    /// Number of blocks now.
    blocks: AtomicU64,
}

struct Channel {
    done: Vec<Request>,
}

/// Makes a null device and registers it.
pub fn create(registry: &Registry, config: NullConfig) -> Result<Arc<Device>, BdevError> {
    let mut geometry = super::geometry(config.num_blocks, config.block_size)?;
    if config.physical_block_size != 0 {
        geometry.physical_block_size = config.physical_block_size;
    }
    let blocks = AtomicU64::new(geometry.blocks);
    registry.register(&config.name, config.uuid, &[], Arc::new(Null { geometry, blocks }))
}

/// Gives a null device another number of blocks, and tells whoever has it open.
pub fn resize(registry: &Registry, name: &str, num_blocks: u64) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    let Some(module) = device.module::<Null>() else {
        return Err(BdevError::WrongKind { name: name.to_string(), wanted: "Null disk" });
    };
    super::geometry(num_blocks, module.geometry.block_size)?;
    module.blocks.store(num_blocks, Ordering::Relaxed);
    registry.notify_resized(device.name())
}

impl Bdev for Null {
    fn product_name(&self) -> &'static str {
        "Null disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn supports(&self, op: Op) -> bool {
        // The layer's own reset and compare do all that there is to do, and nothing can be made unreadable
        // where nothing is kept.
        !matches!(op, Op::Reset | Op::Compare | Op::WriteUncorrectable)
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(Channel { done: Vec::new() }))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        vec![("durability", "none: nothing is stored".into())]
    }

    fn reads_undefined(&self) -> bool {
        true
    }
}

impl ring::Channel for Channel {
    type Request = Request;
    type Completion = Completion;

    #[inline]
    fn submit(&mut self, batch: &mut Vec<Request>) {
        if self.done.is_empty() {
            std::mem::swap(&mut self.done, batch);
        } else {
            self.done.append(batch);
        }
    }

    #[inline]
    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.done.len();
        if count == 1
            && let Some(request) = self.done.pop()
        {
            // Draining costs more than one request does.
            sink.push(request.complete(Status::SUCCESS));
            return 1;
        }
        sink.extend(self.done.drain(..).map(|request| request.complete(Status::SUCCESS)));
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.done.is_empty()).then_some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resized_device_tells_its_size_and_refuses_none() {
        let registry = Registry::new();
        let device = create(&registry, NullConfig::new("Null0", 8, 512)).unwrap();
        resize(&registry, "Null0", 16).unwrap();
        assert_eq!(device.geometry().blocks, 16);
        assert!(matches!(resize(&registry, "Null0", 0), Err(BdevError::Invalid { .. })));
        assert!(matches!(resize(&registry, "none", 1), Err(BdevError::NotFound { .. })));
        assert_eq!(device.geometry().blocks, 16);
    }
}
