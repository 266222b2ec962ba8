//! Objects as they are copied to other replicas, in parts as long as a request: which extents are allocated,
//! and the blocks that were written.
//!
//! Blocks that were written with zeroes are among them: in a volume with a parent, a block that was not
//! written is what the parent has.
//!
//! A part begins with 8 bytes, a bit for each extent, the first one's the lowest; only in the first part of
//! an object any is set. Runs of blocks follow: offset and length, 4 bytes each, then the bytes; in their
//! order, and at most as long as a request. Parts without allocated extents are left out, but for the first.
//!
//! A copy has the extents that the original has, so that both have the same space: the primary decides for
//! all.
//!
//! What cannot be read here is read as a client reads it, so that it comes from another replica, and is
//! written here again.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

use objects::SpaceNeed;
use reactor::Core;
use replica::{ClientReply, ClientRequest, CopiedPart, ObjectPart, ReplicaEvent};
use wire_store::{
    BLOCK_BYTES, BLOCKS_PER_EXTENT, BlockBitmap, EXTENTS_PER_OBJECT, EntryHeader, OBJECT_BYTES, ObjectId,
    OnodeContent, Operation,
};

use super::Shard;
use super::messages::{ControlReply, Reply};
use crate::once::{OnceSender, once};
use crate::{StoreError, TRANSFER_BYTES_MAX};

/// Bytes of the head of a run.
const RUN_HEAD: usize = 8;
pub(super) const EXTENT_BYTES: usize = BLOCKS_PER_EXTENT * BLOCK_BYTES;

/// Of a part.
pub(super) const PART_BYTES: u32 = TRANSFER_BYTES_MAX;
const BLOCKS_PER_PART: usize = PART_BYTES as usize / BLOCK_BYTES;
/// Parts of an object.
const PARTS: u32 = OBJECT_BYTES as u32 / PART_BYTES;
const EXTENTS_PER_PART: u32 = PART_BYTES / EXTENT_BYTES as u32;

/// The client and the number of a read that repairs a part: no client has them.
const REPAIR_CLIENT: u64 = 0;
const REPAIR_READ: u64 = u64::MAX;
/// How often a repair is tried while the replica is busy, and the time between.
const REPAIRS_MAX: u32 = 100;
const REPAIR_RETRY_NS: u64 = 10_000_000;

/// Extents of an object, a bit each.
pub(super) type ExtentBits = u64;
const _: () = assert!(EXTENTS_PER_OBJECT == ExtentBits::BITS as usize);

/// The content of a part of a copied object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PartContent {
    extents: ExtentBits,
    /// Offset and bytes of each.
    runs: Vec<(u32, Vec<u8>)>,
}

/// Objects that other replicas want.
#[derive(Default)]
pub(super) struct ObjectReads {
    wanted: VecDeque<(u64, Option<ObjectPart>)>,
    waker: Option<Waker>,
    /// Gets the answer to the read that repairs a part.
    repair: Option<OnceSender<ClientReply>>,
}

impl ObjectReads {
    /// The first part after another is wanted.
    pub(super) fn push(&mut self, read: u64, after: Option<ObjectPart>) {
        self.wanted.push_back((read, after));
        self.wake();
    }

    pub(super) fn clear(&mut self) {
        self.wanted.clear();
    }

    /// Takes the answer to a read that repairs a part; hands back that of a client.
    pub(super) fn take_reply(&mut self, client: u64, number: u64, reply: ClientReply) -> Option<ClientReply> {
        if (client, number) != (REPAIR_CLIENT, REPAIR_READ) {
            return Some(reply);
        }
        self.repair.take().into_iter().for_each(|repair| repair.send(reply.clone()));
        None
    }

    /// What an object read waited for may be there.
    pub(super) fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// Starts the task that reads objects.
pub(super) fn start(core: &Core, shard: &Rc<RefCell<Shard>>) -> Result<(), StoreError> {
    let (shard, of_task) = (Rc::downgrade(shard), core.clone());
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
            match read_or_repair(&of_task, &shard, after).await {
                Ok(part) => {
                    if let Some(replication) = &mut shard.borrow_mut().replication {
                        replication.object_was_read(ReplicaEvent::ObjectRead { read, part });
                    }
                }
                Err(error) => shard.borrow_mut().fail(&error),
            }
        }
    };
    if core.spawn(task) { Ok(()) } else { Err(StoreError::Closed) }
}

/// As [`read_part`]; what is damaged is repaired first.
async fn read_or_repair(
    core: &Core,
    shard: &RefCell<Shard>,
    after: Option<ObjectPart>,
) -> Result<Option<CopiedPart>, StoreError> {
    let mut repairs = 0;
    loop {
        let damaged = match read_part(shard, after).await {
            Err(error @ StoreError::Failed { .. }) if repairs < REPAIRS_MAX => error,
            read => return read,
        };
        repairs += 1;
        match repair_part(shard, after).await {
            Some(ClientReply::Data(_)) => {}
            Some(ClientReply::Busy) => core.sleep_ns(REPAIR_RETRY_NS).await,
            _ => return Err(damaged),
        }
    }
}

/// Reads a part as a client does; `None` if there is none, or the replica is gone.
async fn repair_part(shard: &RefCell<Shard>, after: Option<ObjectPart>) -> Option<ClientReply> {
    let (sender, receiver) = once();
    {
        let mut shard = shard.borrow_mut();
        let (ObjectPart { object, number }, _) = shard.part_to_copy(after)?;
        let replication = shard.replication.as_mut()?;
        replication.object_reads.repair = Some(sender);
        replication.read_for_repair(ClientRequest::Read {
            client: REPAIR_CLIENT,
            number: REPAIR_READ,
            object,
            offset: number * PART_BYTES,
            length: PART_BYTES,
        });
    }
    receiver.await
}

/// The first part after another, with its content.
async fn read_part(
    shard: &RefCell<Shard>,
    after: Option<ObjectPart>,
) -> Result<Option<CopiedPart>, StoreError> {
    let Some((part, extents)) = shard.borrow().part_to_copy(after) else { return Ok(None) };
    let is_last = next_part(extents, part.number).is_none();
    let mut content = if part.number == 0 { extents } else { 0 }.to_le_bytes().to_vec();
    if extents_of_part(extents, part.number) != 0 {
        let offset = part.number * PART_BYTES;
        // As of one time: a block that is written meanwhile has it read again.
        let mut written = written_of_part(&shard.borrow(), part);
        loop {
            let (sender, receiver) = once();
            shard.borrow_mut().read_for_copy(part.object, offset, PART_BYTES, Reply::Control(sender));
            let bytes = match receiver.await {
                Some(ControlReply::Data(bytes)) => bytes,
                Some(ControlReply::Done(status)) => {
                    return Err(StoreError::Failed { what: "reading an object for a copy", status });
                }
                _ => return Err(StoreError::Closed),
            };
            let before = std::mem::replace(&mut written, written_of_part(&shard.borrow(), part));
            if written == before {
                push_runs(offset, &bytes, |block| written.has(block), &mut content);
                break;
            }
        }
    }
    Ok(Some(CopiedPart { part, is_last, content: content.into() }))
}

/// The blocks of a part that are written when the committed entries are in place.
fn written_of_part(shard: &Shard, part: ObjectPart) -> BlockBitmap {
    let first = part.number as usize * BLOCKS_PER_PART;
    shard.written_blocks(part.object).and(&BlockBitmap::of(first..first + BLOCKS_PER_PART))
}

/// The extents of a part, of those of its object.
pub(super) fn extents_of_part(extents: ExtentBits, number: u32) -> ExtentBits {
    let of_first = (1 << EXTENTS_PER_PART) - 1;
    extents & of_first << (number * EXTENTS_PER_PART)
}

/// The next part after one that has extents.
fn next_part(extents: ExtentBits, number: u32) -> Option<u32> {
    (number.saturating_add(1)..PARTS).find(|number| extents_of_part(extents, *number) != 0)
}

impl Shard {
    /// The first part after another, of the objects that exist when the committed entries are in place, and
    /// the extents of its object then.
    pub(super) fn part_to_copy(&self, after: Option<ObjectPart>) -> Option<(ObjectPart, ExtentBits)> {
        let rest = after.and_then(|ObjectPart { object, number }| {
            let extents = self.extents_of(object)?;
            Some((ObjectPart { object, number: next_part(extents, number)? }, extents))
        });
        let first = |(object, extents)| (ObjectPart { object, number: 0 }, extents);
        rest.or_else(|| self.object_to_copy(after.map(|part| part.object)).map(first))
    }

    /// The first object after another, of those that exist when the committed entries are in place, and its
    /// extents then.
    fn object_to_copy(&self, mut after: Option<ObjectId>) -> Option<(ObjectId, ExtentBits)> {
        loop {
            let object = self.object_after(after)?;
            if let Some(extents) = self.extents_of(object) {
                return Some((object, extents));
            }
            after = Some(object);
        }
    }

    /// The extents that an object has when the committed entries are in place; `None` if it does not exist
    /// then.
    pub(super) fn extents_of(&self, object: ObjectId) -> Option<ExtentBits> {
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

fn extent_bits(extents: std::ops::Range<usize>) -> ExtentBits {
    extents.fold(0, |bits, index| bits | 1 << index)
}

/// The extents of an object after an operation; `None` if there is no object.
fn extents_after(extents: Option<ExtentBits>, entry: &EntryHeader) -> Option<ExtentBits> {
    let (start, end) = (entry.offset as usize, (entry.offset + entry.length) as usize);
    match entry.operation {
        Operation::Preallocate if entry.length == 0 => Some(ExtentBits::MAX),
        Operation::Write | Operation::Preallocate => {
            Some(extents.unwrap_or(0) | extent_bits(start / EXTENT_BYTES..end.div_ceil(EXTENT_BYTES)))
        }
        Operation::WriteZeroes => {
            extents.map(|extents| extents & !extent_bits(start.div_ceil(EXTENT_BYTES)..end / EXTENT_BYTES))
        }
        Operation::Remove => None,
    }
}

/// Appends the blocks that were written, or are not zero, adjacent ones together. `is_written` gets the
/// number of a block of the object.
fn push_runs(offset: u32, bytes: &[u8], is_written: impl Fn(usize) -> bool, out: &mut Vec<u8>) {
    let first_block = offset as usize / BLOCK_BYTES;
    let is_copied = |(place, block): &(usize, &[u8])| {
        is_written(first_block + place) || block.iter().any(|byte| *byte != 0)
    };
    let mut blocks = bytes.chunks(BLOCK_BYTES).enumerate().peekable();
    while let Some((first, block)) = blocks.next() {
        if !is_copied(&(first, block)) {
            continue;
        }
        let mut end = (first + 1) * BLOCK_BYTES;
        while blocks.next_if(is_copied).is_some() {
            end += BLOCK_BYTES;
        }
        let run = &bytes[first * BLOCK_BYTES..end];
        out.extend_from_slice(&(offset + (first * BLOCK_BYTES) as u32).to_le_bytes());
        out.extend_from_slice(&(run.len() as u32).to_le_bytes());
        out.extend_from_slice(run);
    }
}

impl PartContent {
    /// Decodes the content of a part; `None` if it is none.
    pub(super) fn decode(content: &[u8]) -> Option<PartContent> {
        let (extents, runs) = content.split_first_chunk()?;
        Some(PartContent { extents: ExtentBits::from_le_bytes(*extents), runs: decode_runs(runs)? })
    }

    /// The space that an object needs where it is not, or extents that its first part did not name: entries
    /// that follow the copy allocate those.
    pub(super) fn space_need(&self, number: u32, has: ExtentBits) -> SpaceNeed {
        let written = self.runs.iter().map(|(offset, bytes)| {
            let start = *offset as usize;
            extent_bits(start / EXTENT_BYTES..(start + bytes.len()).div_ceil(EXTENT_BYTES))
        });
        let extents = written.fold(self.extents, |bits, run| bits | run) & !has;
        SpaceNeed { extents: extents.count_ones(), onodes: u32::from(number == 0) }
    }

    /// The operations that make the object where there is none, or write a later part of it, with their data.
    pub(super) fn into_operations(self, part: ObjectPart) -> Vec<(EntryHeader, Vec<u8>)> {
        let object = part.object;
        let allocation = |operation, extents: std::ops::Range<usize>| {
            let length = extents.len() * EXTENT_BYTES;
            let header =
                EntryHeader::new(operation, object, (extents.start * EXTENT_BYTES) as u32, length as u32);
            (header, Vec::new())
        };
        let mut operations: Vec<_> = runs(self.extents)
            .map(|extents| allocation(Operation::Preallocate, extents))
            .chain(self.runs.into_iter().map(|(offset, data)| {
                (EntryHeader::new(Operation::Write, object, offset, data.len() as u32), data)
            }))
            .collect();
        if operations.is_empty() && part.number == 0 {
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

fn decode_runs(mut content: &[u8]) -> Option<Vec<(u32, Vec<u8>)>> {
    let mut runs = Vec::new();
    let mut end = 0;
    while !content.is_empty() {
        let (head, rest) = content.split_at_checked(RUN_HEAD)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (offset, length) = (number(0), number(4));
        let (bytes, rest) = rest.split_at_checked(length as usize)?;
        let is_whole = [offset, length].iter().all(|number| number.is_multiple_of(BLOCK_BYTES as u32));
        let next = offset.checked_add(length).filter(|next| *next <= OBJECT_BYTES as u32)?;
        if !is_whole || length == 0 || length > TRANSFER_BYTES_MAX || offset < end {
            return None;
        }
        runs.push((offset, bytes.to_vec()));
        (end, content) = (next, rest);
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_blocks_that_are_not_zero_or_were_written() {
        let mut object = vec![0; OBJECT_BYTES];
        for block in [0, 1, 31, 32, 500, 1023] {
            object[block * BLOCK_BYTES + block] = 7;
        }
        let mut content = 6_u64.to_le_bytes().to_vec();
        for (index, bytes) in object.chunks(PART_BYTES as usize).enumerate() {
            push_runs(index as u32 * PART_BYTES, bytes, |block| block == 700, &mut content);
        }
        let PartContent { extents, runs } = PartContent::decode(&content).unwrap();
        assert_eq!(extents, 6);
        let mut copy = vec![0; OBJECT_BYTES];
        for (offset, bytes) in &runs {
            copy[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        assert!(copy == object);
        assert!(
            runs.iter()
                .any(|(offset, bytes)| *offset as usize == 700 * BLOCK_BYTES && bytes.len() == BLOCK_BYTES)
        );
        assert_eq!(content.len(), 8 + 7 * BLOCK_BYTES + runs.len() * RUN_HEAD);
        for length in (0..8 + RUN_HEAD + BLOCK_BYTES).filter(|length| *length != 8) {
            assert_eq!(PartContent::decode(&content[..length]), None);
        }
        for (at, value) in [(0, 1), (4, 0), (3, 1), (7, 1)] {
            let mut malformed = content.clone();
            malformed[8 + at] = value;
            malformed[8 + 5] = if at == 4 { 0 } else { malformed[8 + 5] };
            assert_eq!(PartContent::decode(&malformed), None, "byte {at} is {value}");
        }
    }

    #[test]
    fn a_copy_gets_the_extents_of_the_original() {
        let object = ObjectId { group: 1, volume: 2, index: 3, suffix: 0 };
        let operations_of = |number, extents, runs| {
            let part = ObjectPart { object, number };
            let operations = PartContent { extents, runs }.into_operations(part).into_iter();
            let described = operations.map(|(header, data)| {
                assert_eq!(header.data_bytes(), data.len());
                (header.operation, header.offset as usize / EXTENT_BYTES, header.length as usize)
            });
            described.collect::<Vec<_>>()
        };
        let operations = |extents, runs| operations_of(0, extents, runs);
        let preallocate = |first, count| (Operation::Preallocate, first, count * EXTENT_BYTES);
        assert_eq!(operations(u64::MAX, vec![]), [preallocate(0, 64)]);
        assert_eq!(operations(1 << 63, vec![]), [preallocate(63, 1)]);
        let run = (5 * EXTENT_BYTES as u32, vec![7; BLOCK_BYTES]);
        let expected = [preallocate(0, 1), preallocate(4, 3), (Operation::Write, 5, BLOCK_BYTES)];
        assert_eq!(operations(0b111_0001, vec![run.clone()]), expected);
        // Later parts change what the first has made.
        assert_eq!(operations_of(2, 0, vec![run]), [(Operation::Write, 5, BLOCK_BYTES)]);
        assert_eq!(operations_of(2, 0, vec![]), []);
        // Space that was given back leaves an object without extents.
        let expected = [preallocate(0, 1), (Operation::WriteZeroes, 0, EXTENT_BYTES)];
        assert_eq!(operations(0, vec![]), expected);
    }

    #[test]
    fn parts_without_extents_are_left_out_but_for_the_first() {
        let last = PARTS - 1;
        assert_eq!(next_part(0, 0), None);
        assert_eq!(next_part(u64::MAX, 0), Some(1));
        assert_eq!(next_part(1 << 63 | 1 << 7, 0), Some(3));
        assert_eq!(next_part(1 << 63 | 1 << 7, 3), Some(last));
        assert_eq!(next_part(u64::MAX, last), None);
        // What another replica names may be anything.
        assert_eq!(next_part(u64::MAX, u32::MAX), None);
    }

    #[test]
    fn a_part_needs_the_extents_that_its_object_does_not_have() {
        let run = |extent: usize, blocks| ((extent * EXTENT_BYTES) as u32, vec![7; blocks * BLOCK_BYTES]);
        let need = |number, extents, runs, has| {
            let SpaceNeed { extents, onodes } = PartContent { extents, runs }.space_need(number, has);
            (extents, onodes)
        };
        assert_eq!(need(0, 0b111, vec![run(0, 1)], 0), (3, 1));
        assert_eq!(need(1, 0, vec![run(2, 1), run(3, 16)], 0b111), (1, 0));
        assert_eq!(need(1, 0, vec![], 0b111), (0, 0));
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
