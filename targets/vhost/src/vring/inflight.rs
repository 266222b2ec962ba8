//! Requests in flight in memory that survives this process (vhost-user, "Inflight I/O tracking").
//!
//! The front-end keeps the memory. After a crash the next process finds there which chains were fetched and not used, and
//! fetches them again, in order. Each step leaves the area in a state from which that is possible: the comments below
//! name the steps of the specification.

use wire_virtio::packed::{PackedDescriptor, RingPosition};

use super::RingArea;

/// The area of a split virtqueue.
pub(super) struct SplitInflight {
    area: RingArea,
    counter: u64,
    last_batch_head: u16,
    /// Chains that were used since the last publication.
    batch: Vec<u16>,
}

impl SplitInflight {
    /// Opens an area. Returns the heads of the chains in flight, oldest first; `None` if the area was new.
    pub(super) fn open(area: RingArea, size: u16, used_index: u16) -> (SplitInflight, Option<Vec<u16>>) {
        use wire_vhost_user::inflight::{self, split};
        let is_known =
            area.load_u16(split::VERSION) == inflight::VERSION && area.load_u16(split::ENTRIES) == size;
        let mut opened = SplitInflight { area, counter: 0, last_batch_head: 0, batch: Vec::new() };
        let area = &opened.area;
        if !is_known {
            (0..size).for_each(|head| area.store_u8(split::entry(head) + split::INFLIGHT, 0));
            area.store_u16(split::ENTRIES, size);
            area.store_u16(split::LAST_BATCH_HEAD, 0);
            area.store_u16(split::USED_INDEX, used_index);
            area.store_u16(split::VERSION, inflight::VERSION);
            return (opened, None);
        }
        // A batch was published, but its chains are still marked. After a restart of the driver the index may be any.
        let unmarked = used_index.wrapping_sub(area.load_u16(split::USED_INDEX));
        let mut head = area.load_u16(split::LAST_BATCH_HEAD);
        for _ in 0..if unmarked <= size { unmarked } else { 0 } {
            if head >= size {
                break;
            }
            area.store_u8(split::entry(head) + split::INFLIGHT, 0);
            head = area.load_u16(split::entry(head) + split::NEXT);
        }
        area.store_u16(split::USED_INDEX, used_index);
        opened.last_batch_head = area.load_u16(split::LAST_BATCH_HEAD);
        let is_marked = |head: &u16| area.load_u8(split::entry(*head) + split::INFLIGHT) == 1;
        let counted = |head: u16| (area.load_u64(split::entry(head) + split::COUNTER), head);
        let mut marked: Vec<(u64, u16)> = (0..size).filter(is_marked).map(counted).collect();
        marked.sort_unstable();
        opened.counter = marked.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        (opened, Some(marked.into_iter().map(|(_, head)| head).collect()))
    }

    /// The virtqueue was stopped with nothing in flight: where it begins next is the front-end's to say.
    pub(super) fn close(&self) {
        self.area.store_u16(wire_vhost_user::inflight::split::VERSION, 0);
    }

    /// A chain was fetched; `head` is in the table.
    #[inline]
    pub(super) fn fetched(&mut self, head: u16) {
        use wire_vhost_user::inflight::split;
        self.area.store_u64(split::entry(head) + split::COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.area.store_u8(split::entry(head) + split::INFLIGHT, 1);
    }

    /// A chain is in the used ring, before the index says so.
    #[inline]
    pub(super) fn used(&mut self, head: u16) {
        use wire_vhost_user::inflight::split;
        self.area.store_u16(split::entry(head) + split::NEXT, self.last_batch_head);
        self.area.store_u16(split::LAST_BATCH_HEAD, head);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// The used index was published.
    #[inline]
    pub(super) fn published(&mut self, used_index: u16) {
        use wire_vhost_user::inflight::split;
        for head in self.batch.drain(..) {
            self.area.store_u8(split::entry(head) + split::INFLIGHT, 0);
        }
        self.area.store_u16(split::USED_INDEX, used_index);
    }
}

/// The area of a packed virtqueue. It keeps the descriptors, because used ones overwrite them in the ring.
pub(super) struct PackedInflight {
    area: RingArea,
    size: u16,
    counter: u64,
    free_head: u16,
}

/// A chain that was in flight.
pub(super) struct PackedChain {
    /// The first entry, which names the chain.
    pub(super) entry: u16,
    pub(super) descriptors: Vec<PackedDescriptor>,
}

impl PackedInflight {
    /// Opens an area. `is_used` tells whether the descriptor at a position was used. Returns where the next used
    /// descriptor is written and the chains in flight, oldest first; `None` if the area was new or makes no sense.
    pub(super) fn open(
        area: RingArea,
        size: u16,
        next_used: RingPosition,
        is_used: impl Fn(RingPosition) -> bool,
    ) -> (PackedInflight, Option<(RingPosition, Vec<PackedChain>)>) {
        let mut opened = PackedInflight { area, size, counter: 0, free_head: 0 };
        let recovered = opened.recover(is_used);
        if recovered.is_none() {
            opened.reset(next_used);
        }
        (opened, recovered)
    }

    fn reset(&mut self, next_used: RingPosition) {
        use wire_vhost_user::inflight::{self, packed};
        let area = &self.area;
        for index in 0..self.size {
            area.store_u8(packed::entry(index) + packed::INFLIGHT, 0);
            area.store_u16(packed::entry(index) + packed::NEXT, (index + 1) % self.size);
        }
        area.store_u16(packed::ENTRIES, self.size);
        (self.free_head, self.counter) = (0, 0);
        self.store_free_head();
        self.store_used(next_used);
        self.commit(next_used);
        area.store_u16(packed::VERSION, inflight::VERSION);
    }

    fn store_free_head(&self) {
        self.area.store_u16(wire_vhost_user::inflight::packed::FREE_HEAD, self.free_head);
    }

    fn store_used(&self, at: RingPosition) {
        use wire_vhost_user::inflight::packed;
        self.area.store_u16(packed::USED_INDEX, at.index);
        self.area.store_u8(packed::USED_WRAP, at.wrap.into());
    }

    /// What was updated is valid from now on.
    fn commit(&self, used: RingPosition) {
        use wire_vhost_user::inflight::packed;
        self.area.store_u16(packed::OLD_FREE_HEAD, self.free_head);
        self.area.store_u16(packed::OLD_USED_INDEX, used.index);
        self.area.store_u8(packed::OLD_USED_WRAP, used.wrap.into());
    }

    fn recover(
        &mut self,
        is_used: impl Fn(RingPosition) -> bool,
    ) -> Option<(RingPosition, Vec<PackedChain>)> {
        use wire_vhost_user::inflight::{self, packed};
        let (area, size) = (&self.area, self.size);
        if area.load_u16(packed::VERSION) != inflight::VERSION || area.load_u16(packed::ENTRIES) != size {
            return None;
        }
        let position = |index: u64, wrap: u64| {
            let position = RingPosition { index: area.load_u16(index), wrap: area.load_u8(wrap) != 0 };
            (position.index < size).then_some(position)
        };
        let mut used = position(packed::USED_INDEX, packed::USED_WRAP)?;
        let old_used = position(packed::OLD_USED_INDEX, packed::OLD_USED_WRAP)?;
        let mut free_head = area.load_u16(packed::FREE_HEAD);
        if used != old_used && is_used(old_used) {
            // The chain was used, but is still marked: it is the first free entry.
            if free_head >= size {
                return None;
            }
            area.store_u8(packed::entry(free_head) + packed::INFLIGHT, 0);
        } else {
            // A fetch or a use had begun.
            used = old_used;
            free_head = area.load_u16(packed::OLD_FREE_HEAD);
        }
        if free_head >= size {
            return None;
        }
        let is_marked = |entry: &u16| area.load_u8(packed::entry(*entry) + packed::INFLIGHT) == 1;
        let counted = |entry: u16| (area.load_u64(packed::entry(entry) + packed::COUNTER), entry);
        let mut marked: Vec<(u64, u16)> = (0..size).filter(is_marked).map(counted).collect();
        marked.sort_unstable();
        let counter = marked.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let mut chains = Vec::with_capacity(marked.len());
        let mut total = 0_u32;
        for (_, entry) in marked {
            let count = area.load_u16(packed::entry(entry) + packed::COUNT);
            total += u32::from(count);
            // Together they occupy no more than the ring.
            if count == 0 || total > size.into() {
                return None;
            }
            chains.push(PackedChain { entry, descriptors: self.descriptors(entry, count)? });
        }
        (self.free_head, self.counter) = (free_head, counter);
        self.store_free_head();
        self.store_used(used);
        self.commit(used);
        Some((used, chains))
    }

    /// The descriptors of a chain; `None` if its list leaves the area.
    fn descriptors(&self, entry: u16, count: u16) -> Option<Vec<PackedDescriptor>> {
        use wire_vhost_user::inflight::packed;
        let mut descriptors = Vec::with_capacity(count.into());
        let mut at = entry;
        for _ in 0..count {
            if at >= self.size {
                return None;
            }
            let from = packed::entry(at);
            descriptors.push(PackedDescriptor {
                address: self.area.load_u64(from + packed::ADDRESS),
                length: self.area.load_u32(from + packed::LENGTH),
                id: self.area.load_u16(from + packed::ID),
                flags: self.area.load_u16(from + packed::FLAGS),
            });
            at = self.area.load_u16(from + packed::NEXT);
        }
        Some(descriptors)
    }

    /// A chain was fetched. Returns the entry that names it; `None` if the front-end has damaged the list of free entries.
    pub(super) fn fetched(&mut self, descriptors: &[PackedDescriptor]) -> Option<u16> {
        use wire_vhost_user::inflight::packed;
        let first = self.free_head;
        let mut last = first;
        for descriptor in descriptors {
            let entry = packed::entry(self.free_head);
            self.area.store_u64(entry + packed::ADDRESS, descriptor.address);
            self.area.store_u32(entry + packed::LENGTH, descriptor.length);
            self.area.store_u16(entry + packed::ID, descriptor.id);
            self.area.store_u16(entry + packed::FLAGS, descriptor.flags);
            last = self.free_head;
            self.free_head = self.area.load_u16(entry + packed::NEXT);
            if self.free_head >= self.size {
                self.free_head = first;
                return None;
            }
        }
        let entry = packed::entry(first);
        self.area.store_u16(entry + packed::LAST, last);
        self.area.store_u16(entry + packed::COUNT, descriptors.len() as u16);
        self.area.store_u64(entry + packed::COUNTER, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.store_free_head();
        self.area.store_u8(entry + packed::INFLIGHT, 1);
        self.area.store_u16(packed::OLD_FREE_HEAD, self.free_head);
        Some(first)
    }

    /// As [`SplitInflight::close`].
    pub(super) fn close(&self) {
        self.area.store_u16(wire_vhost_user::inflight::packed::VERSION, 0);
    }

    /// A chain is about to be used; `next_used` is where the next one will be.
    pub(super) fn begin_use(&mut self, entry: u16, next_used: RingPosition) {
        use wire_vhost_user::inflight::packed;
        let last = self.area.load_u16(packed::entry(entry) + packed::LAST);
        // The front-end may have damaged it: then the list of free entries is shorter.
        let last = if last < self.size { last } else { entry };
        self.area.store_u16(packed::entry(last) + packed::NEXT, self.free_head);
        self.free_head = entry;
        self.store_free_head();
        self.store_used(next_used);
    }

    /// The chain was used.
    pub(super) fn end_use(&mut self, entry: u16, next_used: RingPosition) {
        use wire_vhost_user::inflight::packed;
        self.area.store_u8(packed::entry(entry) + packed::INFLIGHT, 0);
        self.commit(next_used);
    }
}
