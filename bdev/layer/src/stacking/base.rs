//! An open base.

use std::sync::{Arc, Mutex};

use crate::{Access, BdevChannel, BdevError, BlockDevice, Closing, Descriptor, DeviceReader, Registry};

/// A base bdev, open for the device on top of it.
///
/// It is closed, and its claim released, by [`release`](Self::release) or its drop, once the channels are
/// closed too.
pub struct BaseBdev {
    device: Arc<BlockDevice>,
    first_lba: u64,
    descriptor: Mutex<Option<Descriptor>>,
}

impl BaseBdev {
    /// Opens the base `name`, as [`Registry::open`].
    ///
    /// # Errors
    /// [`BdevError::NotFound`] with `name` as it is given; [`BdevError::Claimed`]; [`BdevError::Removed`];
    /// [`BdevError::Invalid`] if it is on level [`STACK_LEVELS_MAX`](crate::STACK_LEVELS_MAX) already.
    pub fn open(registry: &Registry, name: &str, access: Access<'_>) -> Result<BaseBdev, BdevError> {
        let descriptor = registry.open(name, access)?;
        let device = descriptor.device().clone();
        registry.check_levels(&device, None)?;
        Ok(BaseBdev { device, first_lba: 0, descriptor: Mutex::new(Some(descriptor)) })
    }

    /// The same with data from a block on: [`BaseChannels`](super::BaseChannels) add it to the block of each
    /// request.
    pub fn with_first_lba(self, first_lba: u64) -> BaseBdev {
        BaseBdev { first_lba, ..self }
    }

    /// The block at which the data of the device on top begins: 0, unless it was set.
    pub fn first_lba(&self) -> u64 {
        self.first_lba
    }

    /// [Opens](Self::open) `name` with an exclusive claim of `by`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn claim(registry: &Registry, name: &str, by: &str) -> Result<BaseBdev, BdevError> {
        BaseBdev::open(registry, name, Access::Exclusive { by })
    }

    /// The base.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.device
    }

    /// Opens a channel to it on this core.
    ///
    /// # Errors
    /// [`BdevError::Removed`] if it was removed or released; an error of its module.
    pub fn channel(&self, core: &reactor::Core) -> Result<BdevChannel, BdevError> {
        match &*sync::lock(&self.descriptor) {
            Some(descriptor) => descriptor.channel(core),
            None => Err(BdevError::Removed { name: self.device.name().to_string() }),
        }
    }

    /// What reads the base on any thread, until it is closed. `None` if its module can do so on cores only.
    pub fn reader(&self) -> Option<DeviceReader> {
        DeviceReader::new(&self.device)
    }

    /// What ends with the last channel after its release: a method waits for it, so that others can use the
    /// base then. Before [`release`](Self::release).
    pub fn closing(&self) -> Closing {
        Closing::of(sync::lock(&self.descriptor).as_ref())
    }

    /// Opens no more channels. The base is closed with the last one that is open.
    pub fn release(&self) {
        let descriptor = sync::lock(&self.descriptor).take();
        drop(descriptor);
    }
}
