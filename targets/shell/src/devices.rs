//! One core's channels to the block devices of a target, and the batches of requests for them.

use std::sync::Arc;

use block_io::{Channel, Op, Payload, Status};
use dma::Data;
use reactor::Core;

use crate::device_map::{DeviceMap, DevicePage, PAGE_DEVICES};

/// One channel and one batch of requests per block device of a target, by its key in the [`DeviceMap`].
///
/// Order: [`apply`](Self::apply) for each configuration; in each poll any number of [`submit`](Self::submit), then one
/// [`drive`](Self::drive). Devices without requests cost nothing.
#[derive(Default)]
pub struct CoreDevices {
    by_key: Vec<Option<CoreDevice>>,
    active: Vec<u32>,
    /// Requests of removed devices, empty between calls: a request whose address is taken, as for a drop, would be
    /// written to the stack before it is moved to its batch.
    refused: Vec<bdev::Request>,
    /// Removed from the configuration, but with requests outstanding.
    removed: Vec<CoreDevice>,
    /// The pages of the configuration that are in force; `None` where a device could not be opened.
    applied: Vec<Option<Arc<DevicePage>>>,
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
    pub fn submit(&mut self, key: u32, request: bdev::Request) -> Result<(), Status> {
        let Some(Some(device)) = self.by_key.get_mut(key as usize) else {
            self.refused.push(request);
            return Err(self.refuse());
        };
        // A lent buffer is the requester's own memory and holds no other host's data.
        let is_lent = matches!(&request.payload, Payload::Data(Data::One(buffer)) if buffer.is_external());
        let clears = device.clear_first && request.op == Op::Read && !is_lent;
        device.batch.push(request);
        // In its place, for the same reason.
        if clears && let Some(request) = device.batch.last_mut() {
            clear(request);
        }
        if !device.active {
            device.active = true;
            self.active.push(key);
        }
        Ok(())
    }

    /// Drops the requests of a device that was removed. Their status.
    #[cold]
    fn refuse(&mut self) -> Status {
        self.refused.clear();
        Status::NAMESPACE_NOT_READY
    }

    /// No device has requests queued or outstanding.
    #[inline]
    pub fn are_idle(&self) -> bool {
        self.active.is_empty() && self.removed.is_empty()
    }

    /// Submits every batch and polls completions.
    pub fn drive(&mut self, completions: &mut Vec<bdev::Completion>) {
        let CoreDevices { by_key, active, removed, .. } = self;
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
    /// It looks only at pages of the map that were changed.
    pub fn apply(&mut self, core: &Core, devices: &DeviceMap, log_target: &str) {
        let count = self.applied.len().max(devices.pages().len());
        self.applied.resize_with(count, || None);
        for index in 0..count {
            let page = devices.pages().get(index);
            match (&self.applied[index], page) {
                (Some(applied), Some(page)) if Arc::ptr_eq(applied, page) => continue,
                _ => {}
            }
            let is_applied = self.apply_page(core, index * PAGE_DEVICES, page, log_target);
            self.applied[index] = page.filter(|_| is_applied).cloned();
        }
        self.applied.truncate(devices.pages().len());
    }

    /// Returns whether every device of the page could be opened.
    fn apply_page(
        &mut self,
        core: &Core,
        first: usize,
        page: Option<&Arc<DevicePage>>,
        log_target: &str,
    ) -> bool {
        if self.by_key.len() < first + PAGE_DEVICES {
            self.by_key.resize_with(first + PAGE_DEVICES, || None);
        }
        let mut all_open = true;
        for (offset, entry) in self.by_key[first..first + PAGE_DEVICES].iter_mut().enumerate() {
            let Some(descriptor) = page.and_then(|page| page[offset].as_ref()) else {
                self.removed.extend(entry.take().filter(|device| !device.is_idle()));
                continue;
            };
            if entry.is_some() {
                continue;
            }
            match descriptor.channel(core) {
                Ok(channel) => {
                    let clear_first = channel.device().bdev().reads_undefined();
                    *entry = Some(CoreDevice { channel, batch: Vec::new(), active: false, clear_first });
                }
                Err(error) => {
                    all_open = false;
                    let name = descriptor.device().name();
                    log::error!(target: log_target, "{name} cannot be used on core {}: {error}", core.index());
                }
            }
        }
        all_open
    }

    /// Time of the next [`drive`](Self::drive) that no event triggers.
    pub fn deadline(&self) -> Option<u64> {
        let devices = self.active.iter().filter_map(|key| self.by_key.get(*key as usize)?.as_ref());
        devices.chain(&self.removed).filter_map(CoreDevice::deadline).min()
    }
}

/// Sets the data of a read to zero.
#[inline(never)]
fn clear(read: &mut bdev::Request) {
    match &mut read.payload {
        Payload::Data(data) if !data.is_external() => data.clear(),
        Payload::Protected(protected) if !protected.data.is_external() => protected.data.clear(),
        _ => {}
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
