//! The memory of requests in flight: made here, kept by the front-end. It also has the cache's mode, at its end, because
//! a driver that has switched the cache to write-through flushes no more, and does not notice that a target is new.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use dma::SharedRegion;
use rustix::fs::MemfdFlags;
use wire_vhost_user::inflight::{ALIGNMENT, InflightDescription, packed, split};
use wire_virtio::{Features, QUEUE_SIZE_MAX};

use crate::failure::RequestError;
use crate::limits::QUEUES_MAX;
use crate::memory::{GuestPlace, MemoryError, SharedPlace};
use crate::vring::RingArea;

/// The memory of requests in flight of all virtqueues.
pub(crate) struct InflightRegion {
    place: GuestPlace,
    description: InflightDescription,
}

/// The memory of a core's, on its way to another one.
pub(crate) struct SharedInflightRegion {
    place: SharedPlace,
    description: InflightDescription,
}

impl From<SharedInflightRegion> for InflightRegion {
    fn from(SharedInflightRegion { place, description }: SharedInflightRegion) -> InflightRegion {
        InflightRegion { place: place.into(), description }
    }
}

/// Bytes of the device's state behind the areas of virtqueues.
const STATE_BYTES: u64 = ALIGNMENT;
/// The state of a device whose driver has switched the cache to write-through. Front-ends drop or clear the memory when
/// the guest is reset; that of other back-ends has something else there, or nothing.
const WRITE_THROUGH: u64 = u64::from_le_bytes(*b"WRITETHR");

/// Bytes of a virtqueue's area.
fn area_bytes(size: u16, features: Features) -> u64 {
    if features.contains(Features::RING_PACKED) { packed::bytes(size) } else { split::bytes(size) }
}

fn check(description: &InflightDescription) -> Result<(), RequestError> {
    let InflightDescription { queues, queue_size, .. } = *description;
    let is_valid = (1..=QUEUES_MAX).contains(&queues.into()) && (1..=QUEUE_SIZE_MAX).contains(&queue_size);
    if is_valid { Ok(()) } else { Err(RequestError::Payload) }
}

impl InflightRegion {
    /// Makes the memory for virtqueues of this number and size.
    pub(crate) fn create(
        description: &InflightDescription,
        features: Features,
    ) -> Result<(InflightDescription, OwnedFd), RequestError> {
        check(description)?;
        let mmap_size =
            area_bytes(description.queue_size, features) * u64::from(description.queues) + STATE_BYTES;
        let made = rustix::fs::memfd_create("ringbolt-vhost-inflight", MemfdFlags::CLOEXEC);
        let file = made.and_then(|file| rustix::fs::ftruncate(&file, mmap_size).map(|()| file));
        let file = file.map_err(|_| RequestError::NoMemory)?;
        Ok((InflightDescription { mmap_size, mmap_offset: 0, ..*description }, file))
    }

    /// Maps memory that the front-end has kept.
    pub(crate) fn open(
        description: &InflightDescription,
        file: &OwnedFd,
    ) -> Result<InflightRegion, RequestError> {
        check(description)?;
        if !description.mmap_offset.is_multiple_of(ALIGNMENT) {
            return Err(RequestError::Payload);
        }
        let mapped =
            SharedRegion::map_peer_memory(file.as_fd(), description.mmap_offset, description.mmap_size);
        let (region, offset) = mapped.map_err(MemoryError::Map)?;
        let place = GuestPlace { region: Rc::new(region), offset };
        Ok(InflightRegion { place, description: *description })
    }

    /// The same memory, for another core.
    pub(crate) fn share(&self) -> SharedInflightRegion {
        SharedInflightRegion { place: self.place.share(), description: self.description }
    }

    /// The area of a virtqueue; `None` if it has none.
    pub(crate) fn area(&self, index: usize, size: u16, features: Features) -> Option<RingArea> {
        let bytes = area_bytes(self.description.queue_size, features);
        let start = bytes.checked_mul(index as u64)?;
        let end = start.checked_add(bytes)?;
        let is_inside = index < usize::from(self.description.queues) && end <= self.description.mmap_size;
        if !is_inside || size > self.description.queue_size {
            return None;
        }
        let place = GuestPlace { region: self.place.region.clone(), offset: self.place.offset + start };
        Some(RingArea::at(place))
    }

    /// Whether the driver has switched the device's cache to write-through.
    pub(crate) fn is_write_through(&self, features: Features) -> bool {
        self.state(features).is_some_and(|at| self.place.region.load_u64(at) == WRITE_THROUGH)
    }

    /// Keeps the mode of the device's cache, if the memory has room.
    pub(crate) fn set_write_through(&self, is_write_through: bool, features: Features) {
        if let Some(at) = self.state(features) {
            self.place.region.store_u64(at, if is_write_through { WRITE_THROUGH } else { 0 });
        }
    }

    /// Where the state of the device is in the region.
    fn state(&self, features: Features) -> Option<u64> {
        let InflightDescription { mmap_size, queues, queue_size, .. } = self.description;
        let areas = area_bytes(queue_size, features) * u64::from(queues);
        let at = mmap_size.checked_sub(STATE_BYTES)?;
        (at >= areas && at.is_multiple_of(8)).then_some(self.place.offset + at)
    }

    /// Whether its file was truncated.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.place.region.is_poisoned()
    }
}
