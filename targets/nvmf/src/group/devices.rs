//! The block devices, as one core reaches them.

use std::collections::HashMap;

use reactor::Core;
use ring::{Channel, Op, Status};

use crate::picture::Picture;

/// The block devices, as this core reaches them.
#[derive(Default)]
pub(crate) struct Devices {
    by_key: Vec<Option<Device>>,
    active: Vec<u32>,
    /// No longer in the picture, but with requests under way.
    leaving: Vec<Device>,
}

struct Device {
    channel: bdev::Channel,
    batch: Vec<bdev::Request>,
    active: bool,
    /// Reads leave a buffer as it was, and what was there is somebody else's.
    clear_first: bool,
}

impl Devices {
    /// Puts a request into the batch for its device.
    ///
    /// # Errors
    /// The device is not there any more.
    #[inline]
    pub(crate) fn put(&mut self, key: u32, mut request: bdev::Request) -> Result<(), Status> {
        let Some(Some(device)) = self.by_key.get_mut(key as usize) else {
            return Err(Status::NAMESPACE_NOT_READY);
        };
        if device.clear_first
            && request.op == Op::Read
            && let Some(buffer) = &mut request.buffer
            // What lies in the reader's own memory is no stranger's.
            && !buffer.is_lent()
        {
            buffer.clear();
        }
        device.batch.push(request);
        if !device.active {
            device.active = true;
            self.active.push(key);
        }
        Ok(())
    }

    /// Whether no device has anything of ours.
    #[inline]
    pub(crate) fn are_idle(&self) -> bool {
        self.active.is_empty() && self.leaving.is_empty()
    }

    /// Hands every batch over and takes back what completed.
    pub(crate) fn drive(&mut self, completions: &mut Vec<bdev::Completion>) {
        let Devices { by_key, active, leaving } = self;
        active.retain(|key| {
            let Some(Some(device)) = by_key.get_mut(*key as usize) else { return false };
            device.drive(completions);
            device.active = !device.is_idle();
            device.active
        });
        leaving.retain_mut(|device| {
            device.drive(completions);
            !device.is_idle()
        });
    }

    /// Opens what is new, and lets go of what is gone.
    pub(crate) fn apply(&mut self, core: &Core, picture: &Picture) {
        for (key, entry) in self.by_key.iter_mut().enumerate() {
            if !picture.devices.contains_key(&(key as u32))
                && let Some(device) = entry.take()
                && !device.is_idle()
            {
                self.leaving.push(device);
            }
        }
        let by_key: &mut Vec<Option<Device>> = &mut self.by_key;
        let devices: &HashMap<u32, _> = &picture.devices;
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
                    by_key[index] = Some(Device { channel, batch: Vec::new(), active: false, clear_first });
                }
                Err(error) => {
                    let name = descriptor.device().name();
                    eprintln!("nvmf: {name} cannot be used on core {}: {error}", core.index());
                }
            }
        }
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        let devices = self.active.iter().filter_map(|key| self.by_key.get(*key as usize)?.as_ref());
        devices.chain(&self.leaving).filter_map(Device::deadline).min()
    }
}

impl Device {
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
