//! A bounded generational slab for operations that are in flight.
//!
//! [`Slab`] stores up to a fixed number of values. A [`Slot`] identifies a value by index and
//! generation and becomes stale when the value is removed, so a late or forged completion is
//! rejected and never reaches the operation that reuses the index.
//!
//! ```
//! let mut slab = slots::Slab::with_capacity(2);
//! let first = slab.insert("read").expect("room for two");
//! assert_eq!(slab.remove(first), Some("read"));
//! let second = slab.insert("write").expect("room for two");
//! assert_eq!(first.index(), second.index());
//! assert_eq!(slab.remove(first), None);
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

/// Identifies a value: its index, and the generation that tells it from earlier values at that index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u32,
    generation: u32,
}

impl Slot {
    /// Index, from 0 to the capacity less one.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Index and generation in one word, for use as a tag or as io_uring `user_data`.
    pub const fn to_bits(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The inverse of [`to_bits`](Self::to_bits). Every word gives a slot; [`Slab`] checks that it is live.
    pub const fn from_bits(bits: u64) -> Slot {
        Slot { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
enum SlabEntry<T> {
    Vacant { next: u32 },
    Occupied(T),
}

/// A bounded collection of values identified by [`Slot`]s.
///
/// Insertion and removal are O(1) and allocate only when the number of values exceeds its previous peak.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<(u32, SlabEntry<T>)>,
    free_head: u32,
    len: u32,
    capacity: u32,
}

const NONE: u32 = u32::MAX;

impl<T> Slab<T> {
    /// A slab for at most `capacity` values. Memory is allocated as it fills.
    ///
    /// # Panics
    /// If `capacity` is 2^32 - 1.
    pub fn with_capacity(capacity: u32) -> Self {
        assert!(capacity < NONE, "a slab's capacity is below 2^32 - 1, not {capacity}");
        Slab { entries: Vec::new(), free_head: NONE, len: 0, capacity }
    }

    /// Inserts a value, or returns it as the error if the slab is full.
    // Inlined, a large value is made in its entry.
    #[inline(always)]
    pub fn insert(&mut self, value: T) -> Result<Slot, T> {
        if self.free_head != NONE {
            let index = self.free_head;
            let (generation, entry) = &mut self.entries[index as usize];
            let SlabEntry::Vacant { next } = *entry else {
                unreachable!("slot {index} is on the free list and occupied")
            };
            self.free_head = next;
            *entry = SlabEntry::Occupied(value);
            self.len += 1;
            return Ok(Slot { index, generation: *generation });
        }
        self.append(value)
    }

    /// Inserts a value behind all entries, of which none is vacant.
    #[cold]
    fn append(&mut self, value: T) -> Result<Slot, T> {
        if self.len == self.capacity {
            return Err(value);
        }
        let index = self.len;
        self.entries.push((0, SlabEntry::Occupied(value)));
        self.len += 1;
        Ok(Slot { index, generation: 0 })
    }

    /// The value; `None` if the slot is stale.
    pub fn get(&self, slot: Slot) -> Option<&T> {
        match self.entries.get(slot.index as usize) {
            Some((generation, SlabEntry::Occupied(value))) if *generation == slot.generation => Some(value),
            _ => None,
        }
    }

    /// The value for modification; `None` if the slot is stale.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        match self.entries.get_mut(slot.index as usize) {
            Some((generation, SlabEntry::Occupied(value))) if *generation == slot.generation => Some(value),
            _ => None,
        }
    }

    /// Removes the value, which makes the slot stale; `None` if it was stale already.
    pub fn remove(&mut self, slot: Slot) -> Option<T> {
        let (generation, entry) = self.entries.get_mut(slot.index as usize)?;
        if *generation != slot.generation || matches!(entry, SlabEntry::Vacant { .. }) {
            return None;
        }
        let old = std::mem::replace(entry, SlabEntry::Vacant { next: self.free_head });
        *generation = generation.wrapping_add(1);
        self.free_head = slot.index;
        self.len -= 1;
        match old {
            SlabEntry::Occupied(value) => Some(value),
            SlabEntry::Vacant { .. } => None,
        }
    }

    /// Removes the value as [`remove`](Self::remove) does, but drops it where it is: a large value is not moved. Returns
    /// what `read` took from it.
    #[inline]
    pub fn drop_value<R>(&mut self, slot: Slot, read: impl FnOnce(&mut T) -> R) -> Option<R> {
        let next = self.free_head;
        let (generation, entry) = self.entries.get_mut(slot.index as usize)?;
        if *generation != slot.generation {
            return None;
        }
        let SlabEntry::Occupied(value) = entry else { return None };
        let taken = read(value);
        *entry = SlabEntry::Vacant { next };
        *generation = generation.wrapping_add(1);
        self.free_head = slot.index;
        self.len -= 1;
        Some(taken)
    }

    /// As [`drop_value`](Self::drop_value), for the value at `index`.
    #[inline]
    pub fn drop_value_at<R>(&mut self, index: u32, read: impl FnOnce(&mut T) -> R) -> Option<R> {
        let next = self.free_head;
        let (generation, entry) = self.entries.get_mut(index as usize)?;
        let SlabEntry::Occupied(value) = entry else { return None };
        let taken = read(value);
        *entry = SlabEntry::Vacant { next };
        *generation = generation.wrapping_add(1);
        self.free_head = index;
        self.len -= 1;
        Some(taken)
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the slab has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether [`insert`](Self::insert) would fail.
    pub fn is_full(&self) -> bool {
        self.len == self.capacity
    }

    /// Maximum number of values.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// The value at `index`, if there is one.
    #[inline]
    pub fn value_at(&self, index: u32) -> Option<&T> {
        match self.entries.get(index as usize)? {
            (_, SlabEntry::Occupied(value)) => Some(value),
            _ => None,
        }
    }

    /// The live slot at `index`, if there is one.
    pub fn slot_at(&self, index: u32) -> Option<Slot> {
        match self.entries.get(index as usize)? {
            (generation, SlabEntry::Occupied(_)) => Some(Slot { index, generation: *generation }),
            _ => None,
        }
    }

    /// Every value with its slot, in order of index.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, (generation, entry))| match entry {
            SlabEntry::Occupied(value) => {
                Some((Slot { index: index as u32, generation: *generation }, value))
            }
            SlabEntry::Vacant { .. } => None,
        })
    }

    /// Every value with its slot, in order of index, for modification.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Slot, &mut T)> {
        self.entries.iter_mut().enumerate().filter_map(|(index, (generation, entry))| match entry {
            SlabEntry::Occupied(value) => {
                Some((Slot { index: index as u32, generation: *generation }, value))
            }
            SlabEntry::Vacant { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_forged_slots_are_rejected() {
        let mut slab = Slab::with_capacity(1);
        let old = slab.insert(1).unwrap();
        assert_eq!(slab.remove(old), Some(1));
        let new = slab.insert(2).unwrap();
        assert_ne!(old, new);
        assert_eq!(slab.get(old), None);
        assert_eq!(slab.get_mut(old), None);
        assert_eq!(slab.remove(old), None);
        assert_eq!(slab.get(Slot::from_bits(77)), None);
        assert_eq!(slab.get(Slot::from_bits(new.to_bits())), Some(&2));
    }

    #[test]
    fn a_value_that_is_dropped_in_place_leaves_a_stale_slot() {
        let mut slab = Slab::with_capacity(2);
        let value = std::rc::Rc::new(5);
        let (first, second) = (slab.insert(value.clone()).unwrap(), slab.insert(value.clone()).unwrap());
        assert_eq!(slab.drop_value(first, |value| **value), Some(5));
        assert_eq!((slab.len(), std::rc::Rc::strong_count(&value)), (1, 2));
        assert_eq!(slab.drop_value(first, |_| unreachable!("the slot is stale")), None::<()>);
        let third = slab.insert(value.clone()).unwrap();
        assert_eq!((third.index(), slab.drop_value(first, |_| ())), (first.index(), None));
        assert_eq!((slab.get(second).is_some(), slab.len()), (true, 2));
        slab.drop_value(second, |_| ());
        assert_eq!((slab.value_at(second.index()), slab.value_at(2)), (None, None));
        assert_eq!(slab.value_at(third.index()), slab.get(third));
    }

    #[test]
    fn insert_into_a_full_slab_returns_the_value() {
        let mut slab = Slab::with_capacity(2);
        let slots: Vec<Slot> = (0..2).map(|value| slab.insert(value).unwrap()).collect();
        assert_eq!(slab.insert(9), Err(9));
        slab.remove(slots[0]).unwrap();
        assert!(slab.insert(9).is_ok() && slab.is_full());
        assert_eq!(slab.iter().map(|(_, value)| *value).collect::<Vec<_>>(), [9, 1]);
    }

    #[test]
    fn a_slab_of_capacity_zero_rejects_every_value() {
        assert_eq!(Slab::with_capacity(0).insert(()), Err(()));
    }
}
