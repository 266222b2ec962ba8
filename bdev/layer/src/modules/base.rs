//! Shared by virtual devices (modules on top of a base bdev): the claim of the base, and its removal and resize.

use std::sync::{Arc, Mutex, OnceLock};

use crate::{Access, BdevChannel, BdevError, BlockDevice, Descriptor, DeviceEvent, Registry};

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

/// Removes `upper` when `base` is removed, and resizes it when `base` is resized.
pub(super) fn track_base(registry: &Registry, base: &Arc<BlockDevice>, upper: &Arc<BlockDevice>) {
    let weak = registry.downgrade();
    let (base_ref, upper_ref) = (Arc::downgrade(base), Arc::downgrade(upper));
    let id = Arc::new(OnceLock::new());
    let own_id = id.clone();
    let subscription = registry.subscribe(Box::new(move |event| {
        let Some(registry) = weak.upgrade() else { return };
        let is = |device: &std::sync::Weak<BlockDevice>| {
            std::ptr::eq(device.as_ptr(), Arc::as_ptr(event.device()))
        };
        let Some(upper) = upper_ref.upgrade() else {
            own_id.get().into_iter().for_each(|id| registry.unsubscribe(*id));
            return;
        };
        // The upper device may already be removed; an error is expected then.
        let _ = match event {
            DeviceEvent::Removed(_) if is(&base_ref) => registry.unregister(upper.name()).map(drop),
            DeviceEvent::Resized(_) if is(&base_ref) => registry.notify_resized(upper.name()),
            DeviceEvent::Removed(_) if is(&upper_ref) => {
                own_id.get().into_iter().for_each(|id| registry.unsubscribe(*id));
                Ok(())
            }
            _ => Ok(()),
        };
    }));
    // Set once, here; a callback that runs earlier leaves the subscription for a later one to end.
    let _ = id.set(subscription);
    if base.is_removed() {
        let _ = registry.unregister(upper.name());
    }
}
