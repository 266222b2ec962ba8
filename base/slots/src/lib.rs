//! Slots: what is in flight has an index and a generation.
//!
//! [`Slab`] holds at most a fixed number of values. Each is named by a [`Slot`] that goes stale
//! when the value is taken out, so a late or forged completion is refused and never reaches
//! whoever has the index now.
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

/// A value's name: where it lies, and which of the values that lay there it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u32,
    generation: u32,
}

impl Slot {
    /// Position, from 0 to the capacity less one.
    pub const fn index(self) -> u32 {
        self.index
    }

    /// Both halves in one word, to travel as a tag or as `user_data`.
    pub const fn to_bits(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The inverse of [`to_bits`](Self::to_bits). Any word gives a slot; [`Slab`] says if it is live.
    pub const fn from_bits(bits: u64) -> Slot {
        Slot { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
enum Entry<T> {
    Free { next: u32 },
    Taken(T),
}

/// A bounded store of values named by [`Slot`]s. Inserting and removing are O(1) and, below the
/// highest number ever held, allocate nothing.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<(u32, Entry<T>)>,
    free: u32,
    len: u32,
    capacity: u32,
}

const NONE: u32 = u32::MAX;

impl<T> Slab<T> {
    /// A slab for at most `capacity` values. Memory is taken as it fills.
    pub fn with_capacity(capacity: u32) -> Self {
        assert!(capacity < NONE, "a slab's capacity is below 2^32 - 1, not {capacity}");
        Slab { entries: Vec::new(), free: NONE, len: 0, capacity }
    }

    /// Puts a value in, or gives it back if the slab is full.
    pub fn insert(&mut self, value: T) -> Result<Slot, T> {
        if self.free != NONE {
            let index = self.free;
            let (generation, entry) = &mut self.entries[index as usize];
            let Entry::Free { next } = *entry else {
                unreachable!("slot {index} is on the free list and taken")
            };
            self.free = next;
            *entry = Entry::Taken(value);
            self.len += 1;
            return Ok(Slot { index, generation: *generation });
        }
        if self.len == self.capacity {
            return Err(value);
        }
        let index = self.len;
        self.entries.push((0, Entry::Taken(value)));
        self.len += 1;
        Ok(Slot { index, generation: 0 })
    }

    /// The value, unless the slot is stale.
    pub fn get(&self, slot: Slot) -> Option<&T> {
        match self.entries.get(slot.index as usize) {
            Some((generation, Entry::Taken(value))) if *generation == slot.generation => Some(value),
            _ => None,
        }
    }

    /// The value, to change it, unless the slot is stale.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        match self.entries.get_mut(slot.index as usize) {
            Some((generation, Entry::Taken(value))) if *generation == slot.generation => Some(value),
            _ => None,
        }
    }

    /// Takes the value out and makes the slot stale.
    pub fn remove(&mut self, slot: Slot) -> Option<T> {
        let (generation, entry) = self.entries.get_mut(slot.index as usize)?;
        if *generation != slot.generation || matches!(entry, Entry::Free { .. }) {
            return None;
        }
        let old = std::mem::replace(entry, Entry::Free { next: self.free });
        *generation = generation.wrapping_add(1);
        self.free = slot.index;
        self.len -= 1;
        match old {
            Entry::Taken(value) => Some(value),
            Entry::Free { .. } => None,
        }
    }

    /// Number of values held.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether [`insert`](Self::insert) would give the value back.
    pub fn is_full(&self) -> bool {
        self.len == self.capacity
    }

    /// Most values that it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// The slot that lies at `index` now, if one does.
    pub fn slot_at(&self, index: u32) -> Option<Slot> {
        match self.entries.get(index as usize)? {
            (generation, Entry::Taken(_)) => Some(Slot { index, generation: *generation }),
            _ => None,
        }
    }

    /// Every value with its slot, by index.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, (generation, entry))| match entry {
            Entry::Taken(value) => Some((Slot { index: index as u32, generation: *generation }, value)),
            Entry::Free { .. } => None,
        })
    }

    /// Every value with its slot, by index, to change it.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Slot, &mut T)> {
        self.entries.iter_mut().enumerate().filter_map(|(index, (generation, entry))| match entry {
            Entry::Taken(value) => Some((Slot { index: index as u32, generation: *generation }, value)),
            Entry::Free { .. } => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_and_foreign_slots_are_refused() {
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
    fn full_gives_the_value_back() {
        let mut slab = Slab::with_capacity(2);
        let slots: Vec<Slot> = (0..2).map(|value| slab.insert(value).unwrap()).collect();
        assert_eq!(slab.insert(9), Err(9));
        slab.remove(slots[0]).unwrap();
        assert!(slab.insert(9).is_ok() && slab.is_full());
        assert_eq!(slab.iter().map(|(_, value)| *value).collect::<Vec<_>>(), [9, 1]);
    }

    #[test]
    fn a_slab_of_nothing_takes_nothing() {
        assert_eq!(Slab::with_capacity(0).insert(()), Err(()));
    }
}
