//! Split virtqueues (virtio 1.3, section 2.7).

use std::sync::atomic::{AtomicU64, Ordering, fence};

use wire_vhost_user::VringAddress;
use wire_virtio::split::{Descriptor, available, table_bytes, used};
use wire_virtio::{Features, QUEUE_SIZE_MAX, descriptor_flags, needs_event};

use super::inflight::SplitInflight;
use super::{ChainId, RingArea, RingSetup};
use crate::chain::{Chain, ChainCollector, GuestRange};
use crate::failure::RingError;
use crate::limits::CHAIN_MAX;
use crate::memory::GuestMemory;

/// Used chains that the driver does not see yet: it works on some while the device returns others. Fewer, and the index's
/// cache line moves between the cores more often than it has to.
const UNSTORED_MAX: u16 = 8;

/// A split virtqueue.
pub(crate) struct SplitRing {
    areas: SplitAreas,
    size: u16,
    event_index: bool,
    indirect: bool,
    /// Index of the next available entry to fetch.
    next_available: u16,
    /// The driver's index when it was last read: entries before it are available.
    available: u16,
    /// Index of the next used entry to write.
    next_used: u16,
    /// The used index that the driver sees.
    stored_used: u16,
    /// The used index that was published, and the driver's decision on a notification was last asked at.
    published: u16,
    /// A bit for each chain that is in flight, by its head.
    heads: Box<[u64]>,
    inflight: Option<SplitInflight>,
    /// Chains that an earlier process has fetched, oldest last.
    resubmitted: Vec<u16>,
}

struct SplitAreas {
    table: RingArea,
    available: RingArea,
    used: RingArea,
}

impl SplitAreas {
    fn resolve(
        memory: &GuestMemory,
        address: &VringAddress,
        size: u16,
        event_index: bool,
    ) -> Option<SplitAreas> {
        Some(SplitAreas {
            table: RingArea::resolve(memory, address.descriptors, table_bytes(size), 16)?,
            available: RingArea::resolve(memory, address.available, available::bytes(size, event_index), 2)?,
            used: RingArea::resolve(memory, address.used, used::bytes(size, event_index), 4)?,
        })
    }
}

impl SplitRing {
    pub(super) fn new(memory: &GuestMemory, address: &VringAddress, setup: RingSetup) -> Option<SplitRing> {
        let RingSetup { size, base, features, inflight } = setup;
        // Indices wrap at 2^16, so the size has to divide that.
        if !size.is_power_of_two() || size > QUEUE_SIZE_MAX {
            return None;
        }
        let event_index = features.contains(Features::EVENT_IDX);
        let areas = SplitAreas::resolve(memory, address, size, event_index)?;
        let next_used = areas.used.load_u16(used::INDEX);
        let mut ring = SplitRing {
            areas,
            size,
            event_index,
            indirect: features.contains(Features::INDIRECT_DESC),
            next_available: base as u16,
            available: base as u16,
            next_used,
            stored_used: next_used,
            published: next_used,
            heads: vec![0; usize::from(size).div_ceil(64)].into(),
            inflight: None,
            resubmitted: Vec::new(),
        };
        if let Some(area) = inflight {
            let (inflight, recovered) = SplitInflight::open(area, size, next_used);
            ring.inflight = Some(inflight);
            if let Some(mut heads) = recovered {
                // What is neither used nor in flight is available, whatever the front-end knows.
                ring.next_available = next_used.wrapping_add(heads.len() as u16);
                ring.available = ring.next_available;
                heads.reverse();
                ring.resubmitted = heads;
            }
        }
        ring.disable_notifications();
        Some(ring)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.next_available != 0
    }

    pub(super) fn relocate(&mut self, memory: &GuestMemory, address: &VringAddress) -> Option<()> {
        self.areas = SplitAreas::resolve(memory, address, self.size, self.event_index)?;
        Some(())
    }

    /// Reads how many chains are available, once for all of them: the driver writes the index at the same time, and each
    /// look at it moves its cache line between the cores.
    #[inline]
    pub(super) fn look(&mut self) -> Result<(), RingError> {
        // Acquire: entries and descriptors are read after the index.
        let available = self.areas.available.load_u16(available::INDEX);
        let pending = available.wrapping_sub(self.next_available);
        if pending > self.size {
            return Err(RingError::IndexJump(pending));
        }
        self.available = available;
        Ok(())
    }

    #[inline]
    pub(super) fn fetch(
        &mut self,
        memory: &GuestMemory,
        chain: &mut Chain,
    ) -> Result<Option<ChainId>, RingError> {
        if let Some(head) = self.resubmitted.pop() {
            self.walk(memory, head, chain)?;
            self.claim(head)?;
            return Ok(Some(ChainId { id: head, ..ChainId::default() }));
        }
        if self.next_available == self.available {
            return Ok(None);
        }
        let head = self.areas.available.load_u16(available::entry(self.next_available, self.size));
        self.next_available = self.next_available.wrapping_add(1);
        self.walk(memory, head, chain)?;
        self.claim(head)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.fetched(head);
        }
        Ok(Some(ChainId { id: head, ..ChainId::default() }))
    }

    pub(super) fn available_max(&self) -> u16 {
        let pending = self.areas.available.load_u16(available::INDEX).wrapping_sub(self.next_available);
        // An index that jumps is found when the next chain is fetched.
        (self.resubmitted.len() as u16).saturating_add(pending.min(self.size))
    }

    /// Puts the chain at `head`, which is in the table, in flight. A driver may not offer it again before it is used.
    #[inline]
    fn claim(&mut self, head: u16) -> Result<(), RingError> {
        let (heads, bit) = (&mut self.heads[usize::from(head / 64)], 1 << (head % 64));
        if *heads & bit != 0 {
            return Err(RingError::InFlight(head));
        }
        *heads |= bit;
        Ok(())
    }

    /// Collects the buffers of the chain that begins at `head`.
    #[inline]
    fn walk(&self, memory: &GuestMemory, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        let mut chain = chain.begin();
        let table = self.areas.table.descriptors(self.size);
        let mut index = head;
        loop {
            let Some([address, rest]) = table.get(usize::from(index)) else {
                return Err(RingError::Descriptor(index));
            };
            let load = |word: &AtomicU64| u64::from_le(word.load(Ordering::Relaxed));
            let descriptor = Descriptor::from_words([load(address), load(rest)]);
            if descriptor.flags & descriptor_flags::INDIRECT != 0 {
                if !self.indirect || descriptor.flags & descriptor_flags::NEXT != 0 {
                    return Err(RingError::IndirectTable);
                }
                return walk_indirect(memory, &descriptor, chain);
            }
            let range = GuestRange { address: descriptor.address, length: descriptor.length };
            // Also ends loops: a chain has a maximum length.
            chain.add(range, descriptor.flags)?;
            if descriptor.flags & descriptor_flags::NEXT == 0 {
                chain.finish();
                return Ok(());
            }
            index = descriptor.next;
        }
    }

    #[inline]
    pub(super) fn push_used(&mut self, id: ChainId, written: u32) {
        let at = used::entry(self.next_used, self.size);
        self.areas.used.store_u32_pair(at, id.id.into(), written);
        self.next_used = self.next_used.wrapping_add(1);
        self.heads[usize::from(id.id / 64)] &= !(1 << (id.id % 64));
        if let Some(inflight) = &mut self.inflight {
            inflight.used(id.id);
        }
        if self.next_used.wrapping_sub(self.stored_used) >= UNSTORED_MAX {
            self.store_index();
        }
    }

    /// Makes used chains visible, without a notification.
    #[inline]
    fn store_index(&mut self) {
        // Release: the entries, and the data before them, are visible before the index.
        self.areas.used.store_u16(used::INDEX, self.next_used);
        self.stored_used = self.next_used;
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.next_used);
        }
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_used);
        if old == new {
            return false;
        }
        if self.stored_used != new {
            self.store_index();
        }
        self.published = new;
        // The index is visible before the driver's wish is read (section 2.7.10).
        fence(Ordering::SeqCst);
        if self.event_index {
            let event = self.areas.available.load_u16(available::used_event(self.size));
            return needs_event(event, new, old);
        }
        self.areas.available.load_u16(available::FLAGS) & available::NO_INTERRUPT == 0
    }

    pub(super) fn disable_notifications(&mut self) {
        // With event indices, one that stays behind asks for no notification until the index wraps.
        if !self.event_index {
            self.areas.used.store_u16(used::FLAGS, used::NO_NOTIFY);
        }
    }

    pub(super) fn enable_notifications(&mut self) -> bool {
        if self.event_index {
            self.areas.used.store_u16(used::available_event(self.size), self.next_available);
        } else {
            self.areas.used.store_u16(used::FLAGS, 0);
        }
        // The wish is visible before the index is read.
        fence(Ordering::SeqCst);
        !self.resubmitted.is_empty() || self.areas.available.load_u16(available::INDEX) != self.next_available
    }

    pub(super) fn written_areas(&self, address: &VringAddress) -> [(u64, u64); 2] {
        [(address.used, used::bytes(self.size, self.event_index)), (0, 0)]
    }

    pub(super) fn stop(self) -> u32 {
        if let Some(inflight) = &self.inflight {
            inflight.close();
        }
        self.next_available.into()
    }
}

/// Collects the buffers of an indirect table (section 2.7.5.3).
fn walk_indirect(
    memory: &GuestMemory,
    table: &Descriptor,
    mut chain: ChainCollector<'_>,
) -> Result<(), RingError> {
    let entries = table.length as usize / Descriptor::SIZE;
    let piece = memory.piece(table.address, table.length).filter(|piece| piece.length == table.length);
    let Some(piece) = piece else { return Err(RingError::IndirectTable) };
    if entries == 0 || !table.length.is_multiple_of(Descriptor::SIZE as u32) {
        return Err(RingError::IndirectTable);
    }
    let mut index = 0_usize;
    for _ in 0..CHAIN_MAX {
        if index >= entries {
            return Err(RingError::IndirectTable);
        }
        let at = piece.offset + (index * Descriptor::SIZE) as u64;
        let descriptor = Descriptor::from_words(piece.region().snapshot_u64_pair(at));
        if descriptor.flags & descriptor_flags::INDIRECT != 0 {
            return Err(RingError::IndirectTable);
        }
        chain.add(GuestRange { address: descriptor.address, length: descriptor.length }, descriptor.flags)?;
        if descriptor.flags & descriptor_flags::NEXT == 0 {
            chain.finish();
            return Ok(());
        }
        index = descriptor.next.into();
    }
    Err(RingError::ChainLength)
}
