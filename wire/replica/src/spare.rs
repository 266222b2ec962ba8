//! Memory of log entries and of messages' heads, used again. An entry lives for as long as a log retains it, which is
//! thousands of others, and the head of a message with several entries is large: the system's allocator would merge their
//! memory with what is next to it, and cut it off again, for each.
//!
//! Each thread has its own, which [`share_data`], [`share_entry`] and [`Frame::encode`](crate::Frame::encode) take from, and
//! [`recycle`] and [`recycle_head`] give to.

use std::cell::RefCell;
use std::sync::Arc;

use wire_store::BLOCK_BYTES;

use crate::ReplicatedEntry;

/// Most entries, and blocks of data, that a thread has: as many as eight logs free at once, 32 MiB.
const SPARE_MAX: usize = 8192;
/// Most heads of messages that a thread has, and the bytes of one.
const HEADS_MAX: usize = 16;
const HEAD_BYTES_MAX: usize = 16 << 10;

#[derive(Default)]
struct Spare {
    blocks: Vec<Arc<[u8]>>,
    entries: Vec<Arc<ReplicatedEntry>>,
    heads: Vec<Vec<u8>>,
}

thread_local! {
    static SPARE: RefCell<Spare> = RefCell::default();
}

/// Memory for the head of a message of this many bytes.
pub(crate) fn empty_head(bytes: usize) -> Vec<u8> {
    let mut head = SPARE.with_borrow_mut(|spare| spare.heads.pop()).unwrap_or_default();
    head.reserve(bytes);
    head
}

/// The head of a message is written: its memory is used again.
pub fn recycle_head(mut head: Vec<u8>) {
    SPARE.with_borrow_mut(|spare| {
        if spare.heads.len() < HEADS_MAX && head.capacity() <= HEAD_BYTES_MAX {
            head.clear();
            spare.heads.push(head);
        }
    });
}

/// Copies data. That of one block, which most writes have, is where an earlier entry's was.
pub fn share_data(data: &[u8]) -> Arc<[u8]> {
    if data.len() == BLOCK_BYTES
        && let Some(mut block) = SPARE.with_borrow_mut(|spare| spare.blocks.pop())
        && let Some(out) = Arc::get_mut(&mut block)
    {
        out.copy_from_slice(data);
        return block;
    }
    data.into()
}

/// The entry, for a log and for messages.
pub fn share_entry(entry: ReplicatedEntry) -> Arc<ReplicatedEntry> {
    if let Some(mut shared) = SPARE.with_borrow_mut(|spare| spare.entries.pop())
        && let Some(out) = Arc::get_mut(&mut shared)
    {
        *out = entry;
        return shared;
    }
    Arc::new(entry)
}

/// A log does not have the entry any more. Its memory is used again if no message has it either.
pub fn recycle(mut entry: Arc<ReplicatedEntry>) {
    let Some(unshared) = Arc::get_mut(&mut entry) else { return };
    let mut data = std::mem::take(&mut unshared.data);
    SPARE.with_borrow_mut(|spare| {
        if spare.entries.len() < SPARE_MAX {
            spare.entries.push(entry);
        }
        if data.len() == BLOCK_BYTES && spare.blocks.len() < SPARE_MAX && Arc::get_mut(&mut data).is_some() {
            spare.blocks.push(data);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire_store::{EntryHeader, ObjectId, Operation};

    #[test]
    fn memory_is_used_again_once_nothing_else_has_it() {
        let object = ObjectId { group: 0, volume: 1, index: 0, suffix: 0 };
        let header = EntryHeader::new(Operation::Write, object, 0, BLOCK_BYTES as u32);
        let entry = |byte| ReplicatedEntry { header: header.clone(), data: share_data(&[byte; BLOCK_BYTES]) };
        let first = share_entry(entry(1));
        let (at, data_at) = (Arc::as_ptr(&first), first.data.as_ptr());
        let in_message = first.clone();
        recycle(first);
        let second = share_entry(entry(2));
        assert_ne!((Arc::as_ptr(&second), second.data.as_ptr()), (at, data_at));
        assert!(in_message.data.iter().all(|byte| *byte == 1));
        let reader = in_message.data.clone();
        recycle(in_message);
        let third = share_entry(entry(3));
        assert_eq!(Arc::as_ptr(&third), at);
        assert!(reader.iter().all(|byte| *byte == 1) && third.data.iter().all(|byte| *byte == 3));
        drop(reader);
        let data_at = third.data.as_ptr();
        recycle(third);
        assert_eq!(share_entry(entry(4)).data.as_ptr(), data_at);
    }

    #[test]
    fn heads_are_used_again_but_for_large_ones() {
        let mut head = empty_head(100);
        head.extend_from_slice(b"bytes of another message");
        let at = head.as_ptr();
        recycle_head(head);
        let again = empty_head(50);
        assert_eq!((again.as_ptr(), again.len()), (at, 0));
        recycle_head(empty_head(HEAD_BYTES_MAX + 1));
        assert_eq!(empty_head(0).capacity(), 0, "it was kept");
    }
}
