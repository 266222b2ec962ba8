//! Shared by virtual devices (modules on top of a base bdev): the claim of the base.

use std::sync::{Arc, Mutex};

use crate::{Access, BdevChannel, BdevError, BlockDevice, Descriptor, Registry};

/// A base bdev, opened with an exclusive claim for the device on top of it.
pub(super) struct BaseBdev {
    device: Arc<BlockDevice>,
    descriptor: Mutex<Option<Descriptor>>,
}

impl BaseBdev {
    /// Opens `name` with an exclusive claim of `by`.
    pub(super) fn claim(registry: &Registry, name: &str, by: &str) -> Result<BaseBdev, BdevError> {
        let descriptor = registry.open(name, Access::Exclusive { by })?;
        Ok(BaseBdev { device: descriptor.device().clone(), descriptor: Mutex::new(Some(descriptor)) })
    }

    pub(super) fn device(&self) -> &Arc<BlockDevice> {
        &self.device
    }

    pub(super) fn channel(&self, core: &reactor::Core) -> Result<BdevChannel, BdevError> {
        match &*sync::lock(&self.descriptor) {
            Some(descriptor) => descriptor.channel(core),
            None => Err(BdevError::Removed { name: self.device.name().to_string() }),
        }
    }

    /// Releases the claim.
    pub(super) fn release(&self) {
        let descriptor = sync::lock(&self.descriptor).take();
        drop(descriptor);
    }
}
