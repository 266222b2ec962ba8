//! Packed virtqueues (virtio 1.3, section 2.8).

use std::sync::atomic::{Ordering, fence};

use wire_vhost_user::VringAddress;
use wire_virtio::packed::{EventSuppression, FLAGS, PackedDescriptor, RingPosition};
use wire_virtio::{Features, QUEUE_SIZE_MAX, descriptor_flags, needs_event};

use super::{ChainId, RingArea};
use crate::chain::{Chain, GuestRange};
use crate::failure::RingError;
use crate::memory::GuestMemory;

/// A packed virtqueue.
pub(crate) struct PackedRing {
    areas: PackedAreas,
    size: u16,
    event_index: bool,
    indirect: bool,
    /// Where the next chain is made available.
    next_available: RingPosition,
    /// Where the next used descriptor is written.
    next_used: RingPosition,
    /// `next_used` when the driver's decision on a notification was last asked.
    published: RingPosition,
    /// Descriptors that were used since then.
    unpublished: u16,
}

struct PackedAreas {
    ring: RingArea,
    /// The driver's event suppression: which notifications it wants.
    driver: RingArea,
    /// The device's event suppression.
    device: RingArea,
}

impl PackedAreas {
    fn resolve(memory: &GuestMemory, address: &VringAddress, size: u16) -> Option<PackedAreas> {
        let bytes = PackedDescriptor::SIZE as u64 * u64::from(size);
        let event = EventSuppression::SIZE as u64;
        Some(PackedAreas {
            ring: RingArea::resolve(memory, address.descriptors, bytes, 16)?,
            driver: RingArea::resolve(memory, address.available, event, 4)?,
            device: RingArea::resolve(memory, address.used, event, 4)?,
        })
    }
}

/// Offset of the flags in an event suppression structure.
const EVENT_FLAGS: u64 = 2;

impl PackedRing {
    pub(super) fn new(
        memory: &GuestMemory,
        address: &VringAddress,
        size: u16,
        base: u32,
        features: Features,
    ) -> Option<PackedRing> {
        if size == 0 || size > QUEUE_SIZE_MAX {
            return None;
        }
        let areas = PackedAreas::resolve(memory, address, size)?;
        let next_available = RingPosition::from_bits(base as u16);
        // Front-ends that know no used index send only the lower half: nothing is in flight then.
        let next_used = match base >> 16 {
            0 => next_available,
            used => RingPosition::from_bits(used as u16),
        };
        if next_available.index >= size || next_used.index >= size {
            return None;
        }
        let mut ring = PackedRing {
            areas,
            size,
            event_index: features.contains(Features::EVENT_IDX),
            indirect: features.contains(Features::INDIRECT_DESC),
            next_available,
            next_used,
            published: next_used,
            unpublished: 0,
        };
        ring.disable_notifications();
        Some(ring)
    }

    pub(super) fn relocate(&mut self, memory: &GuestMemory, address: &VringAddress) -> Option<()> {
        self.areas = PackedAreas::resolve(memory, address, self.size)?;
        Some(())
    }

    #[inline]
    fn is_available(&self) -> bool {
        let at = u64::from(self.next_available.index) * PackedDescriptor::SIZE as u64;
        // Acquire: the descriptor is read after its flags.
        self.next_available.is_available(self.areas.ring.load_u16(at + FLAGS))
    }

    #[inline]
    pub(super) fn fetch(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<ChainId>, RingError> {
        if !self.is_available() {
            return Ok(None);
        }
        chain.clear();
        let mut at = self.next_available;
        let mut descriptors = 0;
        loop {
            // The driver makes the first descriptor of a chain available last, so the others are complete.
            let descriptor = self.descriptor(at.index);
            at = at.advanced(1, self.size);
            descriptors += 1;
            if descriptor.flags & descriptor_flags::INDIRECT != 0 {
                if !self.indirect || descriptor.flags & descriptor_flags::NEXT != 0 || descriptors > 1 {
                    return Err(RingError::IndirectTable);
                }
                walk_indirect(memory, &descriptor, chain)?;
            } else {
                let range = GuestRange { address: descriptor.address, length: descriptor.length };
                chain.add(range, descriptor.flags)?;
            }
            if descriptor.flags & descriptor_flags::NEXT == 0 {
                self.next_available = at;
                return Ok(Some(ChainId { id: descriptor.id, descriptors }));
            }
            if descriptors == self.size {
                return Err(RingError::ChainLength);
            }
        }
    }

    fn descriptor(&self, index: u16) -> PackedDescriptor {
        decode(&self.areas.ring.snapshot(u64::from(index) * PackedDescriptor::SIZE as u64))
    }

    #[inline]
    pub(super) fn push_used(&mut self, id: ChainId, written: u32) {
        let at = u64::from(self.next_used.index) * PackedDescriptor::SIZE as u64;
        let ring = &self.areas.ring;
        ring.store_u32(at + 8, written);
        ring.store_u16(at + 12, id.id);
        // Release: the flags make the rest, and the data, visible.
        ring.store_u16(at + FLAGS, self.next_used.used_flags());
        self.next_used = self.next_used.advanced(id.descriptors.min(self.size), self.size);
        self.unpublished = self.unpublished.saturating_add(id.descriptors);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        if self.unpublished == 0 {
            return false;
        }
        let (old, new) = (self.published, self.next_used);
        let count = std::mem::take(&mut self.unpublished);
        self.published = new;
        fence(Ordering::SeqCst);
        match self.areas.driver.load_u16(EVENT_FLAGS) {
            EventSuppression::DISABLE => false,
            EventSuppression::DESCRIPTOR if self.event_index && count < self.size => {
                let event = RingPosition::from_bits(self.areas.driver.load_u16(0));
                // Positions as indices that do not wrap between the two.
                let behind = |at: RingPosition| if at.wrap == new.wrap { 0 } else { self.size };
                let index = |at: RingPosition| at.index.wrapping_sub(behind(at));
                needs_event(index(event), index(new), index(old))
            }
            _ => true,
        }
    }

    pub(super) fn disable_notifications(&mut self) {
        self.areas.device.store_u16(EVENT_FLAGS, EventSuppression::DISABLE);
    }

    pub(super) fn enable_notifications(&mut self) -> bool {
        if self.event_index {
            self.areas.device.store_u16(0, self.next_available.to_bits());
            self.areas.device.store_u16(EVENT_FLAGS, EventSuppression::DESCRIPTOR);
        } else {
            self.areas.device.store_u16(EVENT_FLAGS, EventSuppression::ENABLE);
        }
        fence(Ordering::SeqCst);
        self.is_available()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next_available.to_bits()) | u32::from(self.next_used.to_bits()) << 16
    }
}

/// Collects the buffers of an indirect table, all of it (section 2.8.7).
fn walk_indirect(memory: &GuestMemory, table: &PackedDescriptor, chain: &mut Chain) -> Result<(), RingError> {
    let piece = memory.piece(table.address, table.length).filter(|piece| piece.length == table.length);
    let Some(piece) = piece.filter(|piece| piece.length.is_multiple_of(PackedDescriptor::SIZE as u32)) else {
        return Err(RingError::IndirectTable);
    };
    for index in 0..u64::from(piece.length) / PackedDescriptor::SIZE as u64 {
        let at = piece.offset + index * PackedDescriptor::SIZE as u64;
        let descriptor = decode(&piece.region().snapshot(at));
        if descriptor.flags & descriptor_flags::INDIRECT != 0 {
            return Err(RingError::IndirectTable);
        }
        chain.add(GuestRange { address: descriptor.address, length: descriptor.length }, descriptor.flags)?;
    }
    Ok(())
}

#[inline]
fn decode(bytes: &[u8; PackedDescriptor::SIZE]) -> PackedDescriptor {
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, i0, i1, f0, f1] = *bytes;
    PackedDescriptor {
        address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
        length: u32::from_le_bytes([l0, l1, l2, l3]),
        id: u16::from_le_bytes([i0, i1]),
        flags: u16::from_le_bytes([f0, f1]),
    }
}
