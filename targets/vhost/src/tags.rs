//! Tags of device requests: an index of 16 bits and 26 bits of a generation.

use slots::{Slab, Slot};

use crate::limits::{REQUESTS_MAX, SCSI_COMMANDS_MAX};

const INDEX_BITS: u32 = 16;
const GENERATION_MASK: u64 = (1 << (target_shell::REQUEST_TAG_BITS - INDEX_BITS)) - 1;
const _: () = assert!(REQUESTS_MAX <= 1 << INDEX_BITS && SCSI_COMMANDS_MAX <= 1 << INDEX_BITS);

/// The tag of the requests of a slot.
#[inline]
pub(crate) fn tag_of(slot: Slot) -> u64 {
    (slot.to_bits() >> 32 & GENERATION_MASK) << INDEX_BITS | u64::from(slot.index())
}

/// The slot of a completion's tag, unless it was removed.
#[inline]
pub(crate) fn find<T>(slab: &Slab<T>, tag: u64) -> Option<Slot> {
    let tag = tag & ((1 << target_shell::REQUEST_TAG_BITS) - 1);
    let index = (tag & ((1 << INDEX_BITS) - 1)) as u32;
    slab.slot_at(index).filter(|slot| tag_of(*slot) == tag)
}
