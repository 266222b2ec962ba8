//! Allocation of I/O virtual addresses (IOVAs) in one IOMMU address space.

use std::collections::BTreeMap;

use crate::uapi::IovaRange;

/// Allocates IOVAs for memory of this process, with a reference count for each mapping. Pure: the caller programs
/// the IOMMU.
#[derive(Debug)]
pub(crate) struct IovaAllocator {
    /// The usable IOVA ranges, in order.
    ranges: Vec<IovaRange>,
    /// Mappings by virtual address.
    mapped: BTreeMap<u64, Mapping>,
    /// Allocated IOVA ranges: start to end (exclusive).
    allocated: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    iova: u64,
    bytes: u64,
    users: u32,
}

/// The result of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IovaAllocation {
    /// The memory is mapped at this IOVA already.
    Existing(u64),
    /// The caller must map the memory at this IOVA.
    New(u64),
}

/// The result of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IovaRelease {
    /// The mapping has other users.
    InUse,
    /// The caller must unmap this range.
    Unmap {
        /// The start of the range.
        iova: u64,
        /// The length of the range.
        bytes: u64,
    },
}

impl IovaAllocator {
    /// Alignment of IOVAs that differ from the virtual address: a hugepage, so that the IOMMU can use one large
    /// page table entry. The first 2 MiB stay free, so that 0 is never an IOVA.
    const ALIGNMENT: u64 = 2 << 20;

    /// An allocator for the given ranges; if the kernel does not report any, for the 39 bits that every IOMMU
    /// supports, less the x86 MSI window.
    pub(crate) fn new(ranges: Option<Vec<IovaRange>>) -> IovaAllocator {
        let ranges = ranges.unwrap_or_else(|| {
            vec![
                IovaRange { first: 0, last: 0xfedf_ffff },
                IovaRange { first: 0xfef0_0000, last: (1 << 39) - 1 },
            ]
        });
        let mut space =
            IovaAllocator { ranges: Vec::new(), mapped: BTreeMap::new(), allocated: BTreeMap::new() };
        space.set_ranges(ranges);
        space
    }

    /// Replaces the usable ranges; existing mappings stay.
    pub(crate) fn set_ranges(&mut self, mut ranges: Vec<IovaRange>) {
        ranges.retain(|range| range.first <= range.last);
        ranges.sort_by_key(|range| range.first);
        self.ranges = ranges;
    }

    /// Allocates an IOVA for `bytes` at virtual address `start`: the same address if it is usable. `None` if no IOVA
    /// is free, `bytes` is 0, or the memory is mapped with another size.
    pub(crate) fn allocate(&mut self, start: u64, bytes: u64) -> Option<IovaAllocation> {
        if bytes == 0 {
            return None;
        }
        if let Some(mapping) = self.mapped.get_mut(&start) {
            if mapping.bytes != bytes {
                return None;
            }
            mapping.users = mapping.users.checked_add(1)?;
            return Some(IovaAllocation::Existing(mapping.iova));
        }
        let iova = if self.is_free(start, bytes) { start } else { self.lowest_free(bytes)? };
        self.mapped.insert(start, Mapping { iova, bytes, users: 1 });
        self.allocated.insert(iova, iova + bytes);
        Some(IovaAllocation::New(iova))
    }

    /// The IOVA and length of a mapping that has one user; `None` if it has more, or there is none.
    pub(crate) fn sole_use(&self, start: u64) -> Option<(u64, u64)> {
        self.mapped
            .get(&start)
            .filter(|mapping| mapping.users == 1)
            .map(|mapping| (mapping.iova, mapping.bytes))
    }

    /// Releases one use of the mapping; `None` if the memory is not mapped.
    pub(crate) fn release(&mut self, start: u64) -> Option<IovaRelease> {
        let mapping = self.mapped.get_mut(&start)?;
        mapping.users -= 1;
        if mapping.users > 0 {
            return Some(IovaRelease::InUse);
        }
        let Mapping { iova, bytes, .. } = *mapping;
        self.mapped.remove(&start);
        self.allocated.remove(&iova);
        Some(IovaRelease::Unmap { iova, bytes })
    }

    /// Whether the whole range is usable and not allocated.
    fn is_free(&self, iova: u64, bytes: u64) -> bool {
        let Some(end) = iova.checked_add(bytes) else { return false };
        let reachable = self.ranges.iter().any(|range| range.first <= iova && end - 1 <= range.last);
        // Only the last allocated range that starts before the end can overlap.
        let before = self.allocated.range(..end).next_back();
        reachable && before.is_none_or(|(_, allocated_end)| *allocated_end <= iova)
    }

    /// The lowest free IOVA.
    fn lowest_free(&self, bytes: u64) -> Option<u64> {
        for range in &self.ranges {
            let mut at = range.first.max(Self::ALIGNMENT).checked_next_multiple_of(Self::ALIGNMENT)?;
            while at.checked_add(bytes).is_some_and(|end| end - 1 <= range.last) {
                let Some((_, end)) =
                    self.allocated.range(..at + bytes).next_back().filter(|(_, end)| **end > at)
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

    fn space(ranges: &[(u64, u64)]) -> IovaAllocator {
        IovaAllocator::new(Some(
            ranges.iter().map(|(first, last)| IovaRange { first: *first, last: *last }).collect(),
        ))
    }

    #[test]
    fn only_the_last_user_unmaps_a_region() {
        let mut space = space(&[(0, (1 << 48) - 1)]);
        let start = 0x7f00_0000_0000;
        assert_eq!(space.sole_use(start), None);
        space.allocate(start, 3 * MIB);
        assert_eq!(space.sole_use(start), Some((start, 3 * MIB)));
        space.allocate(start, 3 * MIB);
        assert_eq!(space.sole_use(start), None);
        assert_eq!(space.release(start), Some(IovaRelease::InUse));
        assert_eq!(space.sole_use(start), Some((start, 3 * MIB)), "asking changes nothing");
        assert_eq!(space.release(start), Some(IovaRelease::Unmap { iova: start, bytes: 3 * MIB }));
    }

    #[test]
    fn the_iova_equals_the_virtual_address_if_usable() {
        let mut space = space(&[(0, (1 << 48) - 1)]);
        assert_eq!(space.allocate(0x7f00_0000_0000, 2 * MIB), Some(IovaAllocation::New(0x7f00_0000_0000)));
    }

    #[test]
    fn memory_beyond_the_aperture_gets_another_iova() {
        let mut space = space(&[(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        assert_eq!(space.allocate(0x7f00_0000_0000, 2 * MIB), Some(IovaAllocation::New(2 * MIB)));
        assert_eq!(space.allocate(0x7f00_0020_0000, 2 * MIB), Some(IovaAllocation::New(4 * MIB)));
        assert_eq!(space.allocate(0x7f00_0000_0000, 2 * MIB), Some(IovaAllocation::Existing(2 * MIB)));
        // Two users: the first release keeps the mapping.
        assert_eq!(space.release(0x7f00_0000_0000), Some(IovaRelease::InUse));
        let unmap = IovaRelease::Unmap { iova: 2 * MIB, bytes: 2 * MIB };
        assert_eq!(space.release(0x7f00_0000_0000), Some(unmap));
        assert_eq!(space.release(0x7f00_0000_0000), None);
        assert_eq!(space.allocate(0x7e00_0000_0000, MIB), Some(IovaAllocation::New(2 * MIB)));
    }

    #[test]
    fn allocation_fails_without_a_free_range() {
        let mut space = space(&[(0, 4 * MIB - 1), (8 * MIB, 9 * MIB - 1), (5, 4)]);
        assert_eq!(space.allocate(1 << 40, 2 * MIB), Some(IovaAllocation::New(2 * MIB)));
        assert_eq!(space.allocate(2 << 40, 2 * MIB), None);
        assert_eq!(space.allocate(3 << 40, MIB), Some(IovaAllocation::New(8 * MIB)));
        assert_eq!(space.allocate(1 << 40, MIB), None, "another size");
        assert_eq!(space.allocate(u64::MAX, 0), None);
        assert_eq!(IovaAllocator::new(Some(vec![])).allocate(4096, 4096), None);
    }

    proptest! {
        /// Compared with a list of all allocations: none overlap, and all are in a usable range.
        #[test]
        fn allocations_never_overlap(
            steps in proptest::collection::vec((any::<bool>(), 0u64..12, 1u64..4), 1..120),
        ) {
            let ranges = [(3 * MIB, 9 * MIB - 1), (16 * MIB, 40 * MIB - 1)];
            let mut space = space(&ranges);
            let mut out: Vec<(u64, u64, u64, u32)> = Vec::new();
            for (map, place, size) in steps {
                // Some of these addresses are usable as IOVAs, others collide with allocations.
                let (start, bytes) = (place * 4 * MIB, size * MIB);
                let known = out.iter().position(|piece| piece.0 == start);
                if map {
                    match space.allocate(start, bytes) {
                        Some(IovaAllocation::New(iova)) => {
                            prop_assert!(known.is_none());
                            let inside = |(first, last): &(u64, u64)| *first <= iova && iova + bytes - 1 <= *last;
                            prop_assert!(ranges.iter().any(inside));
                            prop_assert!(out.iter().all(|p| p.1 + p.2 <= iova || iova + bytes <= p.1));
                            out.push((start, iova, bytes, 1));
                        }
                        Some(IovaAllocation::Existing(iova)) => {
                            let piece = &mut out[known.unwrap()];
                            prop_assert_eq!((piece.1, piece.2), (iova, bytes));
                            piece.3 += 1;
                        }
                        None => prop_assert!(known.is_none_or(|at| out[at].2 != bytes)),
                    }
                } else {
                    match (space.release(start), known) {
                        (None, None) => {}
                        (Some(IovaRelease::InUse), Some(at)) => {
                            out[at].3 -= 1;
                            prop_assert!(out[at].3 > 0);
                        }
                        (Some(IovaRelease::Unmap { iova, bytes }), Some(at)) => {
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
