//! Seeks for data and holes of a file. `lseek` may read the file's metadata and has no form for io_uring or
//! AIO, so that the [thread](super::worker) of the device executes it.

use std::fs::File;
use std::io;
use std::sync::Arc;

use block_io::{Op, Payload, Status};
use reactor::{Core, MailboxReceiver, MailboxSender};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use slots::{Slab, Slot};

use super::DEPTH;
use super::worker::{FileJob, FileWorker};
use crate::{Completion, Request};

/// Seeks of a file system for one of a device whose blocks are larger than the file's extents.
const SEEKS_MAX: u32 = 1000;

/// A range in which a thread seeks.
pub(super) struct SeekJob {
    file: Arc<File>,
    op: Op,
    lba: u64,
    blocks: u32,
    block_size: u32,
    slot: Slot,
    reply: MailboxSender<SeekResult>,
}

/// The block that was found, if any.
type SeekResult = (Slot, Option<u64>);

pub(super) fn execute(job: SeekJob) {
    let seek = |op, offset| {
        let from = if op == Op::SeekData { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) };
        match rustix::fs::seek(&job.file, from) {
            Ok(found) => Ok(Some(found)),
            // Nothing from there to the end of the file.
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    };
    let found = find(job.op, job.lba, job.blocks, job.block_size, seek);
    // A channel that is gone needs no answer, and the mailbox of another has room for each of its requests.
    let _ = job.reply.send((job.slot, found));
}

/// The first block of a range with data, or without any, by `seek(op, offset)`, which returns the offset of the next data
/// or hole. What cannot be found out is data.
fn find(
    op: Op,
    lba: u64,
    blocks: u32,
    block_size: u32,
    seek: impl Fn(Op, u64) -> io::Result<Option<u64>>,
) -> Option<u64> {
    let (end, block_size) = (lba + u64::from(blocks), u64::from(block_size));
    let mut block = lba;
    for _ in 0..SEEKS_MAX {
        let Ok(found) = seek(op, block * block_size) else { return (op == Op::SeekData).then_some(block) };
        if op == Op::SeekData {
            return found.map(|offset| (offset / block_size).max(block)).filter(|found| *found < end);
        }
        // A hole that ends within the block does not count.
        block = block.max(found.unwrap_or(block * block_size).div_ceil(block_size));
        if block >= end {
            return None;
        }
        match seek(Op::SeekData, block * block_size) {
            Ok(None) => return Some(block),
            Ok(Some(data)) if data >= (block + 1) * block_size => return Some(block),
            Ok(Some(_)) => block += 1,
            Err(_) => return None,
        }
        if block >= end {
            return None;
        }
    }
    None
}

/// The seeks of one channel.
pub(super) struct ChannelSeeks {
    requests: Slab<Request>,
    sender: MailboxSender<SeekResult>,
    receiver: MailboxReceiver<SeekResult>,
}

impl ChannelSeeks {
    pub(super) fn new(core: &Core) -> ChannelSeeks {
        let (sender, receiver) = core.mailbox(DEPTH as usize);
        ChannelSeeks { requests: Slab::with_capacity(DEPTH), sender, receiver }
    }

    /// Starts a seek; returns the completion if it ends at once.
    pub(super) fn start(
        &mut self,
        request: Request,
        block_size: u32,
        worker: &FileWorker,
    ) -> Option<Completion> {
        let Some(file) = worker.file() else {
            return Some(request.complete(Status::INVALID_NAMESPACE_OR_FORMAT));
        };
        let (op, lba, blocks) = (request.op, request.lba, request.blocks);
        let Ok(slot) = self.requests.insert(request) else {
            unreachable!("the layer admits no more than {DEPTH} requests")
        };
        let job = SeekJob { file, op, lba, blocks, block_size, slot, reply: self.sender.clone() };
        if worker.send(FileJob::Seek(job)) {
            return None;
        }
        self.requests.remove(slot).map(|request| request.complete(Status::COMMAND_INTERRUPTED))
    }

    /// Whether seeks have ended.
    pub(super) fn have_ended(&self) -> bool {
        !self.receiver.is_empty()
    }

    /// Adds the completions of seeks that have ended.
    pub(super) fn poll(&mut self, sink: &mut Vec<Completion>) {
        while let Some((slot, found)) = self.receiver.receive() {
            if let Some(mut request) = self.requests.remove(slot) {
                request.payload = Payload::Found(found);
                sink.push(request.complete(Status::SUCCESS));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a file of extents of 1 KiB, block by block.
        #[test]
        fn data_and_holes_are_those_of_an_oracle(
            extents in prop::collection::vec(any::<bool>(), 1..64),
            block_kib in prop::sample::select(vec![1u64, 4, 8]),
            from in 0u64..32,
            blocks in 1u32..64,
        ) {
            let total = (extents.len() as u64).div_ceil(block_kib);
            let lba = from.min(total - 1);
            let blocks = blocks.min((total - lba) as u32);
            let seek = |op: Op, offset: u64| {
                let first = offset / 1024;
                let wanted = op == Op::SeekData;
                let found = (first..extents.len() as u64).find(|at| extents[*at as usize] == wanted);
                // A file ends with a hole.
                let found = found.or((!wanted && first <= extents.len() as u64).then_some(extents.len() as u64));
                Ok(found.map(|at| (at * 1024).max(offset)))
            };
            for op in [Op::SeekData, Op::SeekHole] {
                let expected = (lba..lba + u64::from(blocks)).find(|block| {
                    let of_block = extents.iter().skip((block * block_kib) as usize).take(block_kib as usize);
                    of_block.into_iter().any(|has_data| *has_data) == (op == Op::SeekData)
                });
                prop_assert_eq!(find(op, lba, blocks, block_kib as u32 * 1024, seek), expected, "{:?}", op);
            }
        }
    }

    #[test]
    fn a_file_system_that_cannot_seek_has_data_everywhere() {
        let seek = |_, _| Err(io::Error::from(io::ErrorKind::InvalidInput));
        assert_eq!(find(Op::SeekData, 7, 100, 512, seek), Some(7));
        assert_eq!(find(Op::SeekHole, 7, 100, 512, seek), None);
    }
}
