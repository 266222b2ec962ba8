//! One core's channels to the block devices of a target, and the batches of requests for them.

use std::collections::HashMap;
use std::sync::Arc;

use bdev::Descriptor;
use block_io::{Channel, Op, Payload, Status};
use reactor::Core;

/// The open block devices of a target, by a key that the target assigns. Keys are indices: they should be small.
///
/// A key may be used for another device only after all cores have applied a configuration without it.
pub type DeviceMap = HashMap<u32, Arc<Descriptor>>;

/// One channel and one batch of requests per block device of a target, by its key in the [`DeviceMap`].
///
/// Order: [`apply`](Self::apply) for each configuration; in each poll any number of [`submit`](Self::submit), then one
/// [`drive`](Self::drive). Devices without requests cost nothing.
#[derive(Default)]
pub struct CoreDevices {
    by_key: Vec<Option<CoreDevice>>,
    active: Vec<u32>,
    /// Removed from the configuration, but with requests outstanding.
    removed: Vec<CoreDevice>,
}

struct CoreDevice {
    channel: bdev::BdevChannel,
    batch: Vec<bdev::Request>,
    active: bool,
    /// Reads may leave the buffer unmodified (`reads_undefined`): it is zeroed first, because it may hold
    /// another host's data.
    clear_first: bool,
}

impl CoreDevices {
    /// Adds a request to the batch of its device.
    ///
    /// # Errors
    /// The device was removed: `NAMESPACE_NOT_READY`.
    // A request is larger than what a call passes in registers.
    #[inline(always)]
    pub fn submit(&mut self, key: u32, mut request: bdev::Request) -> Result<(), Status> {
        let Some(Some(device)) = self.by_key.get_mut(key as usize) else {
            return Err(Status::NAMESPACE_NOT_READY);
        };
        if device.clear_first && request.op == Op::Read {
            match &mut request.payload {
                // A lent buffer is the requester's own memory and holds no other host's data.
                Payload::Data(data) if !data.is_external() => data.clear(),
                Payload::Protected(protected) if !protected.data.is_external() => protected.data.clear(),
                _ => {}
            }
        }
        device.batch.push(request);
        if !device.active {
            device.active = true;
            self.active.push(key);
        }
        Ok(())
    }

    /// No device has requests queued or outstanding.
    #[inline]
    pub fn are_idle(&self) -> bool {
        self.active.is_empty() && self.removed.is_empty()
    }

    /// Submits every batch and polls completions.
    pub fn drive(&mut self, completions: &mut Vec<bdev::Completion>) {
        let CoreDevices { by_key, active, removed } = self;
        active.retain(|key| {
            let Some(Some(device)) = by_key.get_mut(*key as usize) else { return false };
            device.drive(completions);
            device.active = !device.is_idle();
            device.active
        });
        removed.retain_mut(|device| {
            device.drive(completions);
            !device.is_idle()
        });
    }

    /// Opens channels to new devices and closes those of removed devices, the latter once their requests complete.
    pub fn apply(&mut self, core: &Core, devices: &DeviceMap, log_target: &str) {
        for (key, entry) in self.by_key.iter_mut().enumerate() {
            if !devices.contains_key(&(key as u32))
                && let Some(device) = entry.take()
                && !device.is_idle()
            {
                self.removed.push(device);
            }
        }
        let by_key: &mut Vec<Option<CoreDevice>> = &mut self.by_key;
        for (key, descriptor) in devices {
            let index = *key as usize;
            if by_key.len() <= index {
                by_key.resize_with(index + 1, || None);
            }
            if by_key[index].is_some() {
                continue;
            }
            match descriptor.channel(core) {
                Ok(channel) => {
                    let clear_first = channel.device().bdev().reads_undefined();
                    by_key[index] =
                        Some(CoreDevice { channel, batch: Vec::new(), active: false, clear_first });
                }
                Err(error) => {
                    let name = descriptor.device().name();
                    log::error!(target: log_target, "{name} cannot be used on core {}: {error}", core.index());
                }
            }
        }
    }

    /// Time of the next [`drive`](Self::drive) that no event triggers.
    pub fn deadline(&self) -> Option<u64> {
        let devices = self.active.iter().filter_map(|key| self.by_key.get(*key as usize)?.as_ref());
        devices.chain(&self.removed).filter_map(CoreDevice::deadline).min()
    }
}

impl CoreDevice {
    #[inline]
    fn drive(&mut self, completions: &mut Vec<bdev::Completion>) {
        if !self.batch.is_empty() {
            self.channel.submit(&mut self.batch);
        }
        self.channel.poll(completions);
    }

    fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.channel.outstanding() == 0
    }

    fn deadline(&self) -> Option<u64> {
        if self.batch.is_empty() { self.channel.deadline() } else { Some(0) }
    }
}
