//! What modules that stand on another device share: the claim, and following its fate.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::{Access, BdevError, Channel, Descriptor, Device, DeviceEvent, Registry};

/// The device below, claimed for the one above.
pub(super) struct Base {
    device: Arc<Device>,
    descriptor: Mutex<Option<Descriptor>>,
}

impl Base {
    /// Opens `name` so that nobody else writes it.
    pub(super) fn claim(registry: &Registry, name: &str, by: &str) -> Result<Base, BdevError> {
        let descriptor = registry.open(name, Access::Exclusive { by })?;
        Ok(Base { device: descriptor.device().clone(), descriptor: Mutex::new(Some(descriptor)) })
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn channel(&self, core: &reactor::Core) -> Result<Channel, BdevError> {
        match &*self.descriptor.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(descriptor) => descriptor.channel(core),
            None => Err(BdevError::Removed { name: self.device.name().to_string() }),
        }
    }

    /// Gives the claim up.
    pub(super) fn release(&self) {
        let descriptor = self.descriptor.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(descriptor);
    }
}

/// Removes `upper` when `base` is removed, and resizes it when `base` is resized.
pub(super) fn follow(registry: &Registry, base: &Arc<Device>, upper: &Arc<Device>) {
    let weak = registry.downgrade();
    let (base_ref, upper_ref) = (Arc::downgrade(base), Arc::downgrade(upper));
    let id = Arc::new(OnceLock::new());
    let own_id = id.clone();
    let subscription = registry.subscribe(Box::new(move |event| {
        let Some(registry) = weak.upgrade() else { return };
        let is = |of: &std::sync::Weak<Device>| std::ptr::eq(of.as_ptr(), Arc::as_ptr(event.device()));
        let Some(upper) = upper_ref.upgrade() else {
            own_id.get().into_iter().for_each(|id| registry.unsubscribe(*id));
            return;
        };
        // The device above may be gone already; then there is nothing left to do.
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
    // The one setter; a callback that ran before this only leaves the subscription for later.
    let _ = id.set(subscription);
    if base.is_removed() {
        let _ = registry.unregister(upper.name());
    }
}

/// A generator of numbers that a seed decides (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
