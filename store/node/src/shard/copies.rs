//! Objects as they are copied to other replicas: the parts that are not zero.
//!
//! A part is its offset and its length, 4 bytes each, then its bytes; parts are in their order, whole blocks, and at most
//! as long as a request.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

use reactor::Core;
use replica::ReplicaEvent;
use wire_store::{BLOCK_BYTES, OBJECT_BYTES, ObjectId};

use super::Shard;
use super::messages::{ControlReply, Reply};
use crate::once::once;
use crate::{StoreError, TRANSFER_BYTES_MAX};

/// Bytes of the head of a part.
const PART_HEAD: usize = 8;

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
    let Some(object) = shard.borrow().object_after(after) else { return Ok(None) };
    let mut content = Vec::new();
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

/// The parts of a copied object; `None` if they are none.
pub(super) fn parts_of_copy(mut content: &[u8]) -> Option<Vec<(u32, Vec<u8>)>> {
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
        let mut content = Vec::new();
        for (index, bytes) in object.chunks(TRANSFER_BYTES_MAX as usize).enumerate() {
            push_parts(index as u32 * TRANSFER_BYTES_MAX, bytes, &mut content);
        }
        let parts = parts_of_copy(&content).unwrap();
        let mut copy = vec![0; OBJECT_BYTES];
        for (offset, bytes) in &parts {
            copy[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        assert!(copy == object);
        assert_eq!(content.len(), 6 * BLOCK_BYTES + parts.len() * PART_HEAD);
        for length in 1..PART_HEAD + BLOCK_BYTES {
            assert_eq!(parts_of_copy(&content[..length]), None);
        }
        for (at, value) in [(0, 1), (4, 0), (3, 1), (7, 1)] {
            let mut malformed = content.clone();
            malformed[at] = value;
            malformed[5] = if at == 4 { 0 } else { malformed[5] };
            assert_eq!(parts_of_copy(&malformed), None, "byte {at} is {value}");
        }
    }
}
