//! Packed virtqueues (virtio 1.3, section 2.8).

use std::sync::atomic::{Ordering, fence};

use wire_vhost_user::VringAddress;
use wire_virtio::packed::{EventSuppression, FLAGS, PackedDescriptor, RingPosition};
use wire_virtio::{Features, QUEUE_SIZE_MAX, descriptor_flags, needs_event};

use super::inflight::{PackedChain, PackedInflight};
use super::{ChainId, RingArea, RingSetup};
use crate::chain::{Chain, ChainCollector, GuestRange};
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
    inflight: Option<PackedInflight>,
    /// Chains that an earlier process has fetched, oldest last.
    resubmitted: Vec<PackedChain>,
    /// The descriptors of the chain that is being fetched, for the area of requests in flight.
    fetched: Vec<PackedDescriptor>,
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
    pub(super) fn new(memory: &GuestMemory, address: &VringAddress, setup: RingSetup) -> Option<PackedRing> {
        let RingSetup { size, base, features, inflight } = setup;
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
            inflight: None,
            resubmitted: Vec::new(),
            fetched: Vec::new(),
        };
        if let Some(area) = inflight {
            ring.recover(area);
        }
        ring.disable_notifications();
        Some(ring)
    }

    /// Begins with the chains that were in flight.
    fn recover(&mut self, area: RingArea) {
        let is_used = |at: RingPosition| {
            let flags = self.areas.ring.load_u16(u64::from(at.index) * PackedDescriptor::SIZE as u64 + FLAGS);
            flags & (descriptor_flags::AVAILABLE | descriptor_flags::USED) == at.used_flags()
        };
        let (inflight, recovered) = PackedInflight::open(area, self.size, self.next_used, is_used);
        self.inflight = Some(inflight);
        let Some((next_used, mut chains)) = recovered else { return };
        let descriptors = chains.iter().map(|chain| chain.descriptors.len() as u16).sum();
        self.next_used = next_used;
        self.published = next_used;
        self.next_available = next_used.advanced(descriptors, self.size);
        chains.reverse();
        self.resubmitted = chains;
    }

    pub(super) fn has_begun(&self) -> bool {
        self.next_available != RingPosition::START
    }

    pub(super) fn relocate(&mut self, memory: &GuestMemory, address: &VringAddress) -> Option<()> {
        self.areas = PackedAreas::resolve(memory, address, self.size)?;
        Some(())
    }

    /// A chain occupies a descriptor at least.
    pub(super) fn available_max(&self) -> u16 {
        (self.resubmitted.len() as u16).saturating_add(self.size)
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
        if let Some(resubmitted) = self.resubmitted.pop() {
            return self.resubmit(memory, resubmitted, chain).map(Some);
        }
        if !self.is_available() {
            return Ok(None);
        }
        let mut chain = chain.begin();
        self.fetched.clear();
        let mut at = self.next_available;
        let mut count = 0;
        let id = loop {
            // The driver makes the first descriptor of a chain available last, so the others are complete.
            let descriptor = self.descriptor(at.index);
            at = at.advanced(1, self.size);
            count += 1;
            let is_last = self.add(memory, &descriptor, count, &mut chain)?;
            if self.inflight.is_some() {
                self.fetched.push(descriptor);
            }
            if is_last {
                break descriptor.id;
            }
            if count == self.size {
                return Err(RingError::ChainLength);
            }
        };
        chain.finish();
        self.next_available = at;
        let mut entry = 0;
        if let Some(inflight) = &mut self.inflight {
            entry = inflight.fetched(&self.fetched).ok_or(RingError::InflightArea)?;
        }
        Ok(Some(ChainId { id, descriptors: count, entry }))
    }

    /// Fetches a chain again that was in flight.
    #[cold]
    fn resubmit(
        &self,
        memory: &GuestMemory,
        resubmitted: PackedChain,
        chain: &mut Chain,
    ) -> Result<ChainId, RingError> {
        let mut chain = chain.begin();
        let mut count = 0;
        for descriptor in &resubmitted.descriptors {
            count += 1;
            if self.add(memory, descriptor, count, &mut chain)? {
                chain.finish();
                let id = descriptor.id;
                return Ok(ChainId { id, descriptors: count, entry: resubmitted.entry });
            }
        }
        Err(RingError::InflightArea)
    }

    /// Adds a descriptor, the `count`th of its chain, to the chain. Returns whether it is the last.
    #[inline]
    fn add(
        &self,
        memory: &GuestMemory,
        descriptor: &PackedDescriptor,
        count: u16,
        chain: &mut ChainCollector<'_>,
    ) -> Result<bool, RingError> {
        let has_next = descriptor.flags & descriptor_flags::NEXT != 0;
        if descriptor.flags & descriptor_flags::INDIRECT != 0 {
            if !self.indirect || has_next || count > 1 {
                return Err(RingError::IndirectTable);
            }
            walk_indirect(memory, descriptor, chain)?;
        } else {
            let range = GuestRange { address: descriptor.address, length: descriptor.length };
            chain.add(range, descriptor.flags)?;
        }
        Ok(!has_next)
    }

    #[inline]
    fn descriptor(&self, index: u16) -> PackedDescriptor {
        let at = u64::from(index) * PackedDescriptor::SIZE as u64;
        PackedDescriptor::from_words(self.areas.ring.snapshot_u64_pair(at))
    }

    #[inline]
    pub(super) fn push_used(&mut self, id: ChainId, written: u32) {
        let at = u64::from(self.next_used.index) * PackedDescriptor::SIZE as u64;
        let next_used = self.next_used.advanced(id.descriptors, self.size);
        if let Some(inflight) = &mut self.inflight {
            inflight.begin_use(id.entry, next_used);
        }
        let ring = &self.areas.ring;
        ring.store_u32(at + 8, written);
        ring.store_u16(at + 12, id.id);
        // Release: the flags make the rest, and the data, visible.
        ring.store_u16(at + FLAGS, self.next_used.used_flags());
        if let Some(inflight) = &mut self.inflight {
            inflight.end_use(id.entry, next_used);
        }
        self.next_used = next_used;
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
        !self.resubmitted.is_empty() || self.is_available()
    }

    pub(super) fn written_areas(&self, address: &VringAddress) -> [(u64, u64); 2] {
        let ring = PackedDescriptor::SIZE as u64 * u64::from(self.size);
        [(address.descriptors, ring), (address.used, EventSuppression::SIZE as u64)]
    }

    pub(super) fn stop(self) -> u32 {
        if let Some(inflight) = &self.inflight {
            inflight.close();
        }
        u32::from(self.next_available.to_bits()) | u32::from(self.next_used.to_bits()) << 16
    }
}

/// Collects the buffers of an indirect table, all of it (section 2.8.7).
fn walk_indirect(
    memory: &GuestMemory,
    table: &PackedDescriptor,
    chain: &mut ChainCollector<'_>,
) -> Result<(), RingError> {
    let piece = memory.piece(table.address, table.length).filter(|piece| piece.length == table.length);
    let Some(piece) = piece.filter(|piece| piece.length.is_multiple_of(PackedDescriptor::SIZE as u32)) else {
        return Err(RingError::IndirectTable);
    };
    for index in 0..u64::from(piece.length) / PackedDescriptor::SIZE as u64 {
        let at = piece.offset + index * PackedDescriptor::SIZE as u64;
        let descriptor = PackedDescriptor::from_words(piece.region().snapshot_u64_pair(at));
        if descriptor.flags & descriptor_flags::INDIRECT != 0 {
            return Err(RingError::IndirectTable);
        }
        chain.add(GuestRange { address: descriptor.address, length: descriptor.length }, descriptor.flags)?;
    }
    Ok(())
}
