//! Objects as they are copied to other replicas: which extents are allocated, and the parts that are not zero.
//!
//! The content begins with 8 bytes, a bit for each extent, the first one's the lowest. A part is its offset and its length,
//! 4 bytes each, then its bytes; parts are in their order, whole blocks, and at most as long as a request.
//!
//! A copy has the extents that the original has, so that both have the same space: the primary decides for all.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

use objects::SpaceNeed;
use reactor::Core;
use replica::ReplicaEvent;
use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, EXTENTS_PER_OBJECT, EntryHeader, OBJECT_BYTES, ObjectId, OnodeContent,
    Operation,
};

use super::Shard;
use super::messages::{ControlReply, Reply};
use crate::once::once;
use crate::{StoreError, TRANSFER_BYTES_MAX};

/// Bytes of the head of a part.
const PART_HEAD: usize = 8;
const EXTENT_BYTES: usize = BLOCKS_PER_EXTENT * BLOCK_BYTES;

/// Extents of an object, a bit each.
type ExtentBits = u64;
const _: () = assert!(EXTENTS_PER_OBJECT == ExtentBits::BITS as usize);

/// The content of a copied object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CopiedObject {
    extents: ExtentBits,
    /// Offset and bytes of each.
    parts: Vec<(u32, Vec<u8>)>,
}

/// Objects that other replicas want.
#[derive(Default)]
pub(super) struct ObjectReads {
    wanted: VecDeque<(u64, Option<ObjectId>)>,
    waker: Option<Waker>,
}

impl ObjectReads {
    /// The first object after another is wanted.
    pub(super) fn push(&mut self, read: u64, after: Option<ObjectId>) {
        self.wanted.push_back((read, after));
        self.wake();
    }

    pub(super) fn clear(&mut self) {
        self.wanted.clear();
    }

    /// What an object read waited for may be there.
    pub(super) fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// Starts the task that reads objects.
pub(super) fn start(core: &Core, shard: &Rc<RefCell<Shard>>) -> Result<(), StoreError> {
    let shard = Rc::downgrade(shard);
    let task = async move {
        loop {
            let next = std::future::poll_fn(|context| {
                let Some(shard) = shard.upgrade() else { return Poll::Ready(None) };
                let mut shard = shard.borrow_mut();
                let is_failed = shard.failed.is_some();
                match &mut shard.replication {
                    Some(replication) if !is_failed && replication.is_redoing() => {
                        replication.object_reads.waker = Some(context.waker().clone());
                        Poll::Pending
                    }
                    Some(replication) if !is_failed => match replication.object_reads.wanted.pop_front() {
                        Some(wanted) => Poll::Ready(Some(wanted)),
                        None => {
                            replication.object_reads.waker = Some(context.waker().clone());
                            Poll::Pending
                        }
                    },
                    _ => Poll::Ready(None),
                }
            });
            let (Some((read, after)), Some(shard)) = (next.await, shard.upgrade()) else { return };
            match read_object(&shard, after).await {
                Ok(object) => {
                    if let Some(replication) = &mut shard.borrow_mut().replication {
                        replication.object_was_read(ReplicaEvent::ObjectRead { read, object });
                    }
                }
                Err(error) => shard.borrow_mut().fail(&error),
            }
        }
    };
    if core.spawn(task) { Ok(()) } else { Err(StoreError::Closed) }
}

/// The first object after another, with its content.
async fn read_object(
    shard: &RefCell<Shard>,
    after: Option<ObjectId>,
) -> Result<Option<(ObjectId, std::sync::Arc<[u8]>)>, StoreError> {
    let Some((object, extents)) = shard.borrow().object_to_copy(after) else { return Ok(None) };
    let mut content = extents.to_le_bytes().to_vec();
    for offset in (0..OBJECT_BYTES as u32).step_by(TRANSFER_BYTES_MAX as usize) {
        let (sender, receiver) = once();
        shard.borrow_mut().read_for_copy(object, offset, TRANSFER_BYTES_MAX, Reply::Control(sender));
        match receiver.await {
            Some(ControlReply::Data(bytes)) => push_parts(offset, &bytes, &mut content),
            Some(ControlReply::Done(status)) => {
                return Err(StoreError::Failed { what: "reading an object for a copy", status });
            }
            _ => return Err(StoreError::Closed),
        }
    }
    Ok(Some((object, content.into())))
}

impl Shard {
    /// The first object after another, of those that exist when the committed entries are in place, and its extents then.
    fn object_to_copy(&self, mut after: Option<ObjectId>) -> Option<(ObjectId, ExtentBits)> {
        loop {
            let object = self.object_after(after)?;
            if let Some(extents) = self.extents_of(object) {
                return Some((object, extents));
            }
            after = Some(object);
        }
    }

    /// The extents that an object has when the committed entries are in place; `None` if it does not exist then.
    fn extents_of(&self, object: ObjectId) -> Option<ExtentBits> {
        let extents = self.partition.onode(object).map(|onode| match &onode.content {
            OnodeContent::Mapped(map) => {
                map.extents.iter().rev().fold(0, |bits, extent| bits << 1 | ExtentBits::from(*extent != 0))
            }
            OnodeContent::Inline(_) => 0,
        });
        let entries = self.committed.iter().map(|entry| &entry.header);
        entries.filter(|entry| entry.object == object && !entry.withheld).fold(extents, extents_after)
    }
}

/// The extents of an object after an operation; `None` if there is no object.
fn extents_after(extents: Option<ExtentBits>, entry: &EntryHeader) -> Option<ExtentBits> {
    let bits = |extents: std::ops::Range<usize>| extents.fold(0, |bits, index| bits | 1 << index);
    let (start, end) = (entry.offset as usize, (entry.offset + entry.length) as usize);
    match entry.operation {
        Operation::Preallocate if entry.length == 0 => Some(ExtentBits::MAX),
        Operation::Write | Operation::Preallocate => {
            Some(extents.unwrap_or(0) | bits(start / EXTENT_BYTES..end.div_ceil(EXTENT_BYTES)))
        }
        Operation::WriteZeroes => {
            extents.map(|extents| extents & !bits(start.div_ceil(EXTENT_BYTES)..end / EXTENT_BYTES))
        }
        Operation::Remove => None,
    }
}

/// Appends the blocks that are not zero, adjacent ones together.
fn push_parts(offset: u32, bytes: &[u8], out: &mut Vec<u8>) {
    let mut blocks = bytes.chunks(BLOCK_BYTES).enumerate().peekable();
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    while let Some((first, block)) = blocks.next() {
        if is_zero(block) {
            continue;
        }
        let mut end = (first + 1) * BLOCK_BYTES;
        while blocks.next_if(|(_, block)| !is_zero(block)).is_some() {
            end += BLOCK_BYTES;
        }
        let part = &bytes[first * BLOCK_BYTES..end];
        out.extend_from_slice(&(offset + (first * BLOCK_BYTES) as u32).to_le_bytes());
        out.extend_from_slice(&(part.len() as u32).to_le_bytes());
        out.extend_from_slice(part);
    }
}

impl CopiedObject {
    /// Decodes the content of an object; `None` if it is none.
    pub(super) fn decode(content: &[u8]) -> Option<CopiedObject> {
        let (extents, parts) = content.split_first_chunk()?;
        Some(CopiedObject { extents: ExtentBits::from_le_bytes(*extents), parts: decode_parts(parts)? })
    }

    /// The space that it needs where it is not.
    pub(super) fn space_need(&self) -> SpaceNeed {
        SpaceNeed { extents: self.extents.count_ones(), onodes: 1 }
    }

    /// The operations that make the object where there is none, with their data.
    pub(super) fn into_operations(self, object: ObjectId) -> Vec<(EntryHeader, Vec<u8>)> {
        let allocation = |operation, extents: std::ops::Range<usize>| {
            let length = extents.len() * EXTENT_BYTES;
            let header =
                EntryHeader::new(operation, object, (extents.start * EXTENT_BYTES) as u32, length as u32);
            (header, Vec::new())
        };
        let mut operations: Vec<_> = runs(self.extents)
            .map(|extents| allocation(Operation::Preallocate, extents))
            .chain(self.parts.into_iter().map(|(offset, data)| {
                (EntryHeader::new(Operation::Write, object, offset, data.len() as u32), data)
            }))
            .collect();
        if operations.is_empty() {
            // It exists, and has no extent.
            operations
                .extend([Operation::Preallocate, Operation::WriteZeroes].map(|it| allocation(it, 0..1)));
        }
        operations
    }
}

/// The runs of ones.
fn runs(extents: ExtentBits) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = extents.checked_shr(at)?;
        let start = at + rest.trailing_zeros();
        let ones = extents.checked_shr(start)?.trailing_ones();
        at = start + ones;
        (ones > 0).then_some(start as usize..at as usize)
    })
}

fn decode_parts(mut content: &[u8]) -> Option<Vec<(u32, Vec<u8>)>> {
    let mut parts = Vec::new();
    let mut end = 0;
    while !content.is_empty() {
        let (head, rest) = content.split_at_checked(PART_HEAD)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (offset, length) = (number(0), number(4));
        let (bytes, rest) = rest.split_at_checked(length as usize)?;
        let is_whole = [offset, length].iter().all(|number| number.is_multiple_of(BLOCK_BYTES as u32));
        let next = offset.checked_add(length).filter(|next| *next <= OBJECT_BYTES as u32)?;
        if !is_whole || length == 0 || length > TRANSFER_BYTES_MAX || offset < end {
            return None;
        }
        parts.push((offset, bytes.to_vec()));
        (end, content) = (next, rest);
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_an_object_are_its_blocks_that_are_not_zero() {
        let mut object = vec![0; OBJECT_BYTES];
        for block in [0, 1, 31, 32, 500, 1023] {
            object[block * BLOCK_BYTES + block] = 7;
        }
        let mut content = 6_u64.to_le_bytes().to_vec();
        for (index, bytes) in object.chunks(TRANSFER_BYTES_MAX as usize).enumerate() {
            push_parts(index as u32 * TRANSFER_BYTES_MAX, bytes, &mut content);
        }
        let CopiedObject { extents, parts } = CopiedObject::decode(&content).unwrap();
        assert_eq!(extents, 6);
        let mut copy = vec![0; OBJECT_BYTES];
        for (offset, bytes) in &parts {
            copy[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        assert!(copy == object);
        assert_eq!(content.len(), 8 + 6 * BLOCK_BYTES + parts.len() * PART_HEAD);
        for length in (0..8 + PART_HEAD + BLOCK_BYTES).filter(|length| *length != 8) {
            assert_eq!(CopiedObject::decode(&content[..length]), None);
        }
        for (at, value) in [(0, 1), (4, 0), (3, 1), (7, 1)] {
            let mut malformed = content.clone();
            malformed[8 + at] = value;
            malformed[8 + 5] = if at == 4 { 0 } else { malformed[8 + 5] };
            assert_eq!(CopiedObject::decode(&malformed), None, "byte {at} is {value}");
        }
    }

    #[test]
    fn a_copy_gets_the_extents_of_the_original() {
        let object = ObjectId { group: 1, volume: 2, index: 3, suffix: 0 };
        let operations = |extents, parts| {
            let operations = CopiedObject { extents, parts }.into_operations(object).into_iter();
            let described = operations.map(|(header, data)| {
                assert_eq!(header.data_bytes(), data.len());
                (header.operation, header.offset as usize / EXTENT_BYTES, header.length as usize)
            });
            described.collect::<Vec<_>>()
        };
        let preallocate = |first, count| (Operation::Preallocate, first, count * EXTENT_BYTES);
        assert_eq!(operations(u64::MAX, vec![]), [preallocate(0, 64)]);
        assert_eq!(operations(1 << 63, vec![]), [preallocate(63, 1)]);
        let part = (5 * EXTENT_BYTES as u32, vec![7; BLOCK_BYTES]);
        let expected = [preallocate(0, 1), preallocate(4, 3), (Operation::Write, 5, BLOCK_BYTES)];
        assert_eq!(operations(0b111_0001, vec![part]), expected);
        // Space that was given back leaves an object without extents.
        let expected = [preallocate(0, 1), (Operation::WriteZeroes, 0, EXTENT_BYTES)];
        assert_eq!(operations(0, vec![]), expected);
    }

    #[test]
    fn extents_follow_the_operations_of_the_log() {
        let object = ObjectId { group: 1, volume: 2, index: 3, suffix: 0 };
        let extent = EXTENT_BYTES as u32;
        for (before, operation, offset, length, after) in [
            (None, Operation::Write, extent - 4096, 8192, Some(0b11)),
            (Some(0b100), Operation::Write, 0, 4096, Some(0b101)),
            // Only whole extents are given back, and an object that does not exist stays so.
            (Some(0b111), Operation::WriteZeroes, 4096, 2 * extent, Some(0b101)),
            (None, Operation::WriteZeroes, 0, extent, None),
            (None, Operation::Preallocate, extent, 4096, Some(0b10)),
            (None, Operation::Preallocate, 0, 0, Some(ExtentBits::MAX)),
            (Some(0b1), Operation::Remove, 0, 0, None),
        ] {
            let entry = EntryHeader::new(operation, object, offset, length);
            assert_eq!(extents_after(before, &entry), after, "{before:?} {operation:?} {offset} {length}");
        }
    }
}
