//! Tags of requests that the layer itself submits to a module.

use std::sync::atomic::{AtomicU32, Ordering};

use block_io::{RequestFlags, Tag};
use slots::Slot;

use crate::{Completion, Request};

/// Bits of a slot's index that a tag keeps: no table of internal requests has more entries.
const INDEX_BITS: u32 = 12;
/// Most entries of such a table.
pub(crate) const INTERNAL_MAX: u32 = 1 << INDEX_BITS;
const OWNER_MAX: u32 = 1 << (32 - INDEX_BITS);

static NEXT_OWNER: AtomicU32 = AtomicU32::new(0);

/// The tags of one table of internal requests.
///
/// Virtual devices stack channels, and each channel sees the internal requests of those above it as its caller's. So a
/// tag names its table besides the slot: 20 bits that the 2^20th table after it would use again.
pub(crate) struct InternalTags(u32);

impl InternalTags {
    pub(crate) fn new() -> InternalTags {
        InternalTags(NEXT_OWNER.fetch_add(1, Ordering::Relaxed) % OWNER_MAX)
    }

    /// Makes a request an internal one of this table.
    pub(crate) fn mark(&self, request: &mut Request, slot: Slot) {
        request.tag = Tag(slot.to_bits() | u64::from(self.0) << INDEX_BITS);
        request.flags |= RequestFlags::INTERNAL;
    }

    /// The slot of a completion, if its request is one of this table.
    pub(crate) fn slot(&self, completion: &Completion) -> Option<Slot> {
        if !completion.request().flags.contains(RequestFlags::INTERNAL) {
            return None;
        }
        let bits = completion.tag().0;
        let owner = (bits as u32) >> INDEX_BITS;
        (owner == self.0).then(|| Slot::from_bits(bits & !(u64::from(OWNER_MAX - 1) << INDEX_BITS)))
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Op, Status};
    use slots::Slab;

    use super::*;

    #[test]
    fn a_tag_is_known_to_its_own_table_only() {
        let (one, other) = (InternalTags::new(), InternalTags::new());
        let mut slab = Slab::with_capacity(INTERNAL_MAX);
        let slots: Vec<Slot> = (0..INTERNAL_MAX).map(|value| slab.insert(value).unwrap()).collect();
        let slot = *slots.last().unwrap();
        let mut request = Request::new(Tag(0), Op::Flush, 0, 0);
        one.mark(&mut request, slot);
        let completion = request.complete(Status::SUCCESS);
        assert_eq!((one.slot(&completion), other.slot(&completion)), (Some(slot), None));
        let mut request = completion.into_request();
        request.flags = RequestFlags::NONE;
        assert_eq!(one.slot(&request.complete(Status::SUCCESS)), None);
    }
}
