//! The addresses at which devices of one IOMMU see this process's memory.

use std::collections::BTreeMap;

use crate::uapi::Range;

/// What is mapped, and where there is room. Pure: the caller tells the IOMMU.
#[derive(Debug)]
pub(crate) struct Space {
    /// Where a device may be told to go, in order.
    ranges: Vec<Range>,
    /// By the address in this process.
    mapped: BTreeMap<u64, Mapping>,
    /// The same, by the device's address: its first and the one behind its last byte.
    taken: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    iova: u64,
    bytes: u64,
    users: u32,
}

/// What to do for a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placed {
    /// It is mapped at this address already.
    Already(u64),
    /// Map it at this address.
    New(u64),
}

/// What to do when memory is no longer used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// Others still use it.
    Kept,
    /// Unmap so many bytes at this address of the device.
    Unmap {
        /// The device's address.
        iova: u64,
        /// How many bytes.
        bytes: u64,
    },
}

impl Space {
    /// Alignment of addresses that are not the process's own: a hugepage, so that the IOMMU can use
    /// one large entry. The first such piece stays free, since 0 is no address to give out.
    const ALIGNMENT: u64 = 2 << 20;

    /// A space of the given ranges; where the kernel does not say, the 39 bits that every IOMMU has,
    /// without the window of x86's interrupts.
    pub(crate) fn new(ranges: Option<Vec<Range>>) -> Space {
        let ranges = ranges.unwrap_or_else(|| {
            vec![Range { first: 0, last: 0xfedf_ffff }, Range { first: 0xfef0_0000, last: (1 << 39) - 1 }]
        });
        let mut space = Space { ranges: Vec::new(), mapped: BTreeMap::new(), taken: BTreeMap::new() };
        space.set_ranges(ranges);
        space
    }

    /// Changes where there is room; what is mapped stays.
    pub(crate) fn set_ranges(&mut self, mut ranges: Vec<Range>) {
        ranges.retain(|range| range.first <= range.last);
        ranges.sort_by_key(|range| range.first);
        self.ranges = ranges;
    }

    /// Finds the address for `bytes` at `start`: the process's own where the device can reach it.
    /// `None` if there is no room, nothing to place, or the memory is mapped in another size.
    pub(crate) fn place(&mut self, start: u64, bytes: u64) -> Option<Placed> {
        if bytes == 0 {
            return None;
        }
        if let Some(mapping) = self.mapped.get_mut(&start) {
            if mapping.bytes != bytes {
                return None;
            }
            mapping.users = mapping.users.checked_add(1)?;
            return Some(Placed::Already(mapping.iova));
        }
        let iova = if self.is_free(start, bytes) { start } else { self.find(bytes)? };
        self.mapped.insert(start, Mapping { iova, bytes, users: 1 });
        self.taken.insert(iova, iova + bytes);
        Some(Placed::New(iova))
    }

    /// Gives up one use; `None` if the memory is not mapped.
    pub(crate) fn release(&mut self, start: u64) -> Option<Released> {
        let mapping = self.mapped.get_mut(&start)?;
        mapping.users -= 1;
        if mapping.users > 0 {
            return Some(Released::Kept);
        }
        let Mapping { iova, bytes, .. } = *mapping;
        self.mapped.remove(&start);
        self.taken.remove(&iova);
        Some(Released::Unmap { iova, bytes })
    }

    /// Whether the device can reach all of the piece, and none of it is taken.
    fn is_free(&self, iova: u64, bytes: u64) -> bool {
        let Some(end) = iova.checked_add(bytes) else { return false };
        let reachable = self.ranges.iter().any(|range| range.first <= iova && end - 1 <= range.last);
        // The last taken piece that begins before the end is the only one that may reach in.
        let before = self.taken.range(..end).next_back();
        reachable && before.is_none_or(|(_, taken_end)| *taken_end <= iova)
    }

    /// The lowest free place.
    fn find(&self, bytes: u64) -> Option<u64> {
        for range in &self.ranges {
            let mut at = range.first.max(Self::ALIGNMENT).checked_next_multiple_of(Self::ALIGNMENT)?;
            while at.checked_add(bytes).is_some_and(|end| end - 1 <= range.last) {
                let Some((_, end)) = self.taken.range(..at + bytes).next_back().filter(|(_, end)| **end > at)
                else {
                    return Some(at);
                };
                at = end.checked_next_multiple_of(Self::ALIGNMENT)?;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn space(ranges: &[(u64, u64)]) -> Space {
        Space::new(Some(ranges.iter().map(|(first, last)| Range { first: *first, last: *last }).collect()))
    }

    #[test]
    fn memory_keeps_its_address_where_the_device_can_reach_it() {
        let mut space = space(&[(0, (1 << 48) - 1)]);
        assert_eq!(space.place(0x7f00_0000_0000, 2 * MIB), Some(Placed::New(0x7f00_0000_0000)));
    }

    #[test]
    fn memory_beyond_the_aperture_gets_another_address() {
        let mut space = space(&[(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        assert_eq!(space.place(0x7f00_0000_0000, 2 * MIB), Some(Placed::New(2 * MIB)));
        assert_eq!(space.place(0x7f00_0020_0000, 2 * MIB), Some(Placed::New(4 * MIB)));
        assert_eq!(space.place(0x7f00_0000_0000, 2 * MIB), Some(Placed::Already(2 * MIB)));
        // Two users: the first that leaves changes nothing.
        assert_eq!(space.release(0x7f00_0000_0000), Some(Released::Kept));
        let unmap = Released::Unmap { iova: 2 * MIB, bytes: 2 * MIB };
        assert_eq!(space.release(0x7f00_0000_0000), Some(unmap));
        assert_eq!(space.release(0x7f00_0000_0000), None);
        assert_eq!(space.place(0x7e00_0000_0000, MIB), Some(Placed::New(2 * MIB)));
    }

    #[test]
    fn no_room_is_an_answer() {
        let mut space = space(&[(0, 4 * MIB - 1), (8 * MIB, 9 * MIB - 1), (5, 4)]);
        assert_eq!(space.place(1 << 40, 2 * MIB), Some(Placed::New(2 * MIB)));
        assert_eq!(space.place(2 << 40, 2 * MIB), None);
        assert_eq!(space.place(3 << 40, MIB), Some(Placed::New(8 * MIB)));
        assert_eq!(space.place(1 << 40, MIB), None, "another size");
        assert_eq!(space.place(u64::MAX, 0), None);
        assert_eq!(Space::new(Some(vec![])).place(4096, 4096), None);
    }

    proptest! {
        /// Against a list of everything that is out: no two pieces overlap, and all are reachable.
        #[test]
        fn pieces_never_overlap(
            steps in proptest::collection::vec((any::<bool>(), 0u64..12, 1u64..4), 1..120),
        ) {
            let ranges = [(3 * MIB, 9 * MIB - 1), (16 * MIB, 40 * MIB - 1)];
            let mut space = space(&ranges);
            let mut out: Vec<(u64, u64, u64, u32)> = Vec::new();
            for (map, place, size) in steps {
                // Some of these are reachable as they are, and some collide with what was given out.
                let (start, bytes) = (place * 4 * MIB, size * MIB);
                let known = out.iter().position(|piece| piece.0 == start);
                if map {
                    match space.place(start, bytes) {
                        Some(Placed::New(iova)) => {
                            prop_assert!(known.is_none());
                            let inside = |(first, last): &(u64, u64)| *first <= iova && iova + bytes - 1 <= *last;
                            prop_assert!(ranges.iter().any(inside));
                            prop_assert!(out.iter().all(|p| p.1 + p.2 <= iova || iova + bytes <= p.1));
                            out.push((start, iova, bytes, 1));
                        }
                        Some(Placed::Already(iova)) => {
                            let piece = &mut out[known.unwrap()];
                            prop_assert_eq!((piece.1, piece.2), (iova, bytes));
                            piece.3 += 1;
                        }
                        None => prop_assert!(known.is_none_or(|at| out[at].2 != bytes)),
                    }
                } else {
                    match (space.release(start), known) {
                        (None, None) => {}
                        (Some(Released::Kept), Some(at)) => {
                            out[at].3 -= 1;
                            prop_assert!(out[at].3 > 0);
                        }
                        (Some(Released::Unmap { iova, bytes }), Some(at)) => {
                            prop_assert_eq!((out[at].1, out[at].2, out[at].3), (iova, bytes, 1));
                            out.remove(at);
                        }
                        (answer, known) => prop_assert!(false, "{:?} for {:?}", answer, known),
                    }
                }
            }
        }
    }
}
