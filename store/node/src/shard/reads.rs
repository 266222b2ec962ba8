//! Reads: from the log where that has the newest bytes, from the device else.

use std::rc::Rc;

use bdev::{Completion, Request};
use block_io::{Payload, Status, Tag};
use dma::{Buffer, Data};
use objects::{BlockChecksums, ReadPiece, ReadSource};
use reactor::Core;
use slots::Slot;
use wire_store::{BLOCK_BYTES, ObjectId};

use super::checksums::{BlockRead, BlockReader, ChecksumReads};
use super::overlay::Segment;
use super::store_thread::{ReadOutcome, StoreRead, StoreRequest};
use super::{DeviceIo, FAILED, RETRY_NS, Reply, Shard};
use crate::threads::WakeCause;

/// Lists of runs that are kept for later reads.
const SPARE_RUNS_MAX: usize = 256;

/// A read. Its pieces on the device are read one after another; nearly all reads have one.
pub(super) struct ReadState {
    object: ObjectId,
    offset: u32,
    length: u32,
    /// Whether blocks are compared with their checksums.
    verify: bool,
    reply: Reply,
    /// `None` while the device reads into it, or the non-priority thread into memory of its own.
    result: Option<Buffer>,
    /// Bytes from the log, as the read was planned.
    segments: Vec<Segment>,
    /// What is still to be read, the last first.
    runs: Vec<DeviceRun>,
    /// The batch in place before which it was planned, and the count of overwritten blocks.
    generation: u64,
    overwritten: u64,
    /// It waited until what the log had of its object was in place.
    waited: bool,
    /// Held until it is complete.
    _reading: Option<Rc<()>>,
}

/// Blocks of the device that a read needs.
pub(super) struct DeviceRun {
    pub(super) block: u64,
    blocks: u32,
    /// Bytes of the first block before the needed ones.
    skip: u32,
    /// Where in the result, and how much.
    at: u32,
    length: u32,
}

impl ReadState {
    /// The read ends without a result.
    pub(super) fn into_reply(self) -> Reply {
        self.reply
    }

    /// Whether everything that the read needs of a run's block comes from the log.
    fn is_from_log(&self, run: &DeviceRun, index: u32) -> bool {
        let start = (self.offset + run.at + index * BLOCK_BYTES as u32).saturating_sub(run.skip);
        let end = (start + BLOCK_BYTES as u32).min(self.offset + self.length);
        let mut at = start.max(self.offset);
        for segment in self.segments.iter().filter(|segment| segment.end > start) {
            if segment.start > at {
                break;
            }
            at = at.max(segment.end);
        }
        at >= end
    }
}

/// The read of a run, for a read.
pub(super) struct RunRead {
    read: ReadState,
    run: DeviceRun,
}

impl RunRead {
    /// The read ends without a result.
    pub(super) fn into_reply(self) -> Reply {
        self.read.into_reply()
    }
}

impl BlockRead for RunRead {
    fn first_block(&self) -> u64 {
        self.run.block
    }

    fn is_verified(&self) -> bool {
        self.read.verify
    }

    fn is_from_log(&self, index: u32) -> bool {
        self.read.is_from_log(&self.run, index)
    }
}

impl Shard {
    /// Starts a read.
    pub(super) fn read(&mut self, object: ObjectId, offset: u32, length: u32, reply: Reply) {
        self.read_as(object, offset, length, true, reply);
    }

    /// Starts a read. Without `verify`, its blocks need not have their checksums.
    pub(super) fn read_as(&mut self, object: ObjectId, offset: u32, length: u32, verify: bool, reply: Reply) {
        self.stats.reads += 1;
        let runs = self.spare_runs.pop().unwrap_or_default();
        self.plan(ReadState {
            object,
            offset,
            length,
            verify,
            reply,
            result: None,
            segments: Vec::new(),
            runs,
            generation: 0,
            overwritten: 0,
            waited: false,
            _reading: None,
        });
    }

    /// Decides where the bytes are now, and begins to read them.
    pub(super) fn plan(&mut self, mut read: ReadState) {
        if self.failed.is_some() {
            return read.reply.send(FAILED, None);
        }
        let end = read.offset.saturating_add(read.length);
        // Zero bytes, or too many, have no buffer ever.
        if read.length == 0 || read.length > crate::TRANSFER_BYTES_MAX {
            return read.reply.send(Status::INVALID_FIELD, None);
        }
        read.segments = self.overlay.segments(read.object, read.offset..end);
        read.runs.clear();
        read.generation = self.generation;
        read.overwritten = self.placed.written;
        let from_log: u32 = read.segments.iter().map(|segment| segment.end - segment.start).sum();
        // Once: while an object is written without end, what is committed of it later comes from the log.
        if self.reads_flush && !read.waited && self.overlay.has_entries(read.object) {
            self.stats.reads_flushed += 1;
            read.waited = true;
            return self.waiting_for_flush.push(read);
        }
        self.pieces.clear();
        if from_log < read.length
            && self.partition.plan_read(read.object, read.offset, read.length, &mut self.pieces).is_err()
        {
            return read.reply.send(Status::INVALID_FIELD, None);
        }
        if !self.take_result(&mut read) {
            return self.park(read);
        }
        if from_log == read.length {
            self.stats.reads_from_log += 1;
            return self.finish_read(read);
        }
        self.stats.reads_overlaid += u64::from(from_log > 0);
        let mut at = 0;
        for ReadPiece { length, source } in self.pieces.drain(..) {
            let range = at as usize..(at + length) as usize;
            let mut out = read.result.as_mut().map(|result| &mut result.as_mut_slice()[range]);
            match source {
                ReadSource::Zeroes => out.iter_mut().for_each(|out| out.fill(0)),
                ReadSource::Inline(bytes) => out.iter_mut().for_each(|out| out.copy_from_slice(&bytes)),
                ReadSource::Stored { block, skip } => {
                    let blocks = (skip + length).div_ceil(BLOCK_BYTES as u32);
                    read.runs.push(DeviceRun { block, blocks, skip, at, length });
                }
            }
            at += length;
        }
        // A block that is being written in place may be torn; one that is new there has another object's
        // bytes.
        let is_busy = |block| self.busy_blocks.contains(&block);
        let mut needed = read.runs.iter().flat_map(|run| run.block..run.block + u64::from(run.blocks));
        if !self.busy_blocks.is_empty() && needed.any(is_busy) {
            return self.park(read);
        }
        if self.is_uncertain(&read.runs) {
            return self.placed.waiting.push(read);
        }
        read._reading = Some(self.reading.clone());
        self.read_next_run(read);
    }

    /// Takes memory for a planned read; `false` if there is none. What the non-priority thread reads as a
    /// whole needs none here: it is in that thread's memory.
    fn take_result(&mut self, read: &mut ReadState) -> bool {
        let is_sent = self.store.is_some()
            && match *self.pieces {
                [ReadPiece { length, source: ReadSource::Stored { skip: 0, .. } }] => {
                    length == read.length && length.is_multiple_of(BLOCK_BYTES as u32)
                }
                _ => false,
            };
        if read.result.is_none() && !is_sent {
            read.result = self.core.pool().take(read.length as usize);
        }
        read.result.is_some() || is_sent
    }

    /// The read is tried again after the batch that is being written in place, or in the next poll.
    fn park(&mut self, mut read: ReadState) {
        if self.failed.is_some() {
            // Nothing would.
            return read.reply.send(FAILED, None);
        }
        // A checkpoint does not wait for it.
        read._reading = None;
        self.parked.push(read);
    }

    /// The read is tried again later, when other reads may have given memory back.
    fn park_for_memory(&mut self, read: ReadState) {
        self.parked_until_ns = self.core.now_ns() + RETRY_NS;
        self.park(read);
    }

    /// Whether a block has what may be given up.
    fn is_uncertain(&self, runs: &[DeviceRun]) -> bool {
        let mut blocks = runs.iter().flat_map(|run| run.block..run.block + u64::from(run.blocks));
        self.placed.has_uncommitted() && blocks.any(|block| self.placed.is_uncertain(block))
    }

    /// Reads the next run from the device, or ends the read.
    fn read_next_run(&mut self, mut read: ReadState) {
        let Some(run) = read.runs.last() else { return self.finish_read(read) };
        let bytes = run.blocks as usize * BLOCK_BYTES;
        // The whole read at once goes into its result; else through a buffer of the blocks.
        let is_direct = run.length == read.length && bytes == run.length as usize;
        if self.store.is_some() {
            return self.send_read(read, is_direct);
        }
        let buffer = if is_direct { read.result.take() } else { self.core.pool().take(bytes) };
        let Some(buffer) = buffer else { return self.park(read) };
        let (block, blocks, verify) = (run.block, run.blocks, read.verify);
        match self.ios.insert(DeviceIo::Read(read)) {
            Ok(slot) => {
                self.requests.push(read_request(slot, block, buffer, self.block_bytes));
                if verify {
                    self.prefetch_checksums(block, blocks);
                }
            }
            // As many as possible are in flight: it starts again.
            Err(DeviceIo::Read(read)) => self.park(read),
            Err(_) => unreachable!("it was a read"),
        }
    }

    /// Has the thread with the blocks read the next run.
    fn send_read(&mut self, mut read: ReadState, is_direct: bool) {
        let (Some(run), Some(store)) = (read.runs.last(), &mut self.store) else { return };
        if store.is_closed() {
            return read.reply.send(Status::NAMESPACE_NOT_READY, None);
        }
        let DeviceRun { block, blocks, .. } = *run;
        let from_log = match read.segments.is_empty() {
            true => Vec::new(),
            false => (0..blocks).filter(|index| read.is_from_log(run, *index)).collect(),
        };
        let verify = read.verify;
        if is_direct {
            // The thread has memory for it.
            read.result = None;
        }
        match self.ios.insert(DeviceIo::Read(read)) {
            Ok(slot) => {
                let read = StoreRead { tag: slot.to_bits(), block, blocks, verify, from_log };
                store.send(StoreRequest::Read(read), WakeCause::Read);
            }
            // As many as possible are in flight: it starts again.
            Err(DeviceIo::Read(read)) => self.park(read),
            Err(_) => unreachable!("it was a read"),
        }
    }

    /// The thread has read a run, or not.
    pub(super) fn store_read_completed(&mut self, mut read: ReadState, outcome: ReadOutcome) {
        let Some(run) = read.runs.pop() else { return };
        let (parcel, damaged) = match outcome {
            ReadOutcome::Done(parcel, damaged) => (parcel, damaged),
            ReadOutcome::Failed(status) => return read.reply.send(status, None),
            ReadOutcome::NoMemory => return self.park_for_memory(read),
        };
        match self.core.pool().adopt(parcel) {
            Ok(data) => {
                let buffer = data.into_single().expect("a run is read to one buffer");
                self.read_verified(RunRead { read, run }, buffer, damaged);
            }
            // Too much is adopted: it starts again.
            Err(_) => self.park_for_memory(read),
        }
    }

    /// A read of a run has ended.
    pub(super) fn read_completed(&mut self, mut read: ReadState, completion: Completion) {
        let status = completion.status();
        let Some(run) = read.runs.pop() else { return };
        let buffer = match completion.into_request().payload {
            Payload::Data(Data::One(buffer)) => buffer,
            _ => return read.reply.send(Status::INTERNAL_ERROR, None),
        };
        if !status.is_success() {
            return read.reply.send(status, None);
        }
        self.verify(RunRead { read, run }, buffer);
    }

    /// Plans a read again, of which something was changed meanwhile.
    fn repeat(&mut self, mut read: ReadState, buffer: Buffer) {
        if read.result.is_none() {
            read.result = Some(buffer);
        }
        read._reading = None;
        self.stats.reads_repeated += 1;
        self.plan(read);
    }

    /// The blocks of a run were compared with their checksums, up to the first that is damaged.
    fn run_verified(&mut self, mut read: ReadState, run: DeviceRun, buffer: Buffer, damaged: Option<u64>) {
        if self.failed.is_some() {
            // What a batch has written in part may be there.
            return read.reply.send(FAILED, None);
        }
        // What was overwritten since may be there, with a checksum that the block does not have yet or had
        // before.
        let is_uncertain = self.is_uncertain(std::slice::from_ref(&run));
        if is_uncertain || (damaged.is_some() && read.overwritten != self.placed.written) {
            return self.repeat(read, buffer);
        }
        let is_overtaken = read.generation != self.generation;
        // What the log had may be older than what is in place now.
        if is_overtaken && (damaged.is_some() || !read.segments.is_empty() || !read.runs.is_empty()) {
            return self.repeat(read, buffer);
        }
        if let Some(block) = damaged {
            self.stats.damaged_blocks += 1;
            let name = self.channel.device().name().to_string();
            let consequence = match self.replication {
                Some(_) => "other replicas are asked",
                None => "the read fails",
            };
            log::error!("store on {name}: block {block} is damaged: its checksum is another; {consequence}");
            return read.reply.send(Status::UNRECOVERED_READ_ERROR, None);
        }
        match read.result.as_mut() {
            None => read.result = Some(buffer),
            Some(result) => {
                let out = &mut result.as_mut_slice()[run.at as usize..(run.at + run.length) as usize];
                buffer.copy_to(run.skip as usize, out);
            }
        }
        self.read_next_run(read);
    }

    /// Everything from the device is there: what the log has replaces it.
    fn finish_read(&mut self, read: ReadState) {
        let mut result = read.result.expect("a planned read has its result");
        for segment in &read.segments {
            let range = (segment.start - read.offset) as usize..(segment.end - read.offset) as usize;
            segment.source.copy_to(&mut result.as_mut_slice()[range]);
        }
        // Its allocation serves another read.
        if self.spare_runs.len() < SPARE_RUNS_MAX {
            self.spare_runs.push(read.runs);
        }
        read.reply.send(Status::SUCCESS, Some(Data::One(result)));
    }
}

/// Reads blocks of the store from a device with blocks of `block_bytes`, as many as the buffer has.
pub(super) fn read_request(slot: Slot, block: u64, buffer: Buffer, block_bytes: u64) -> Request {
    let (lba, blocks) = (block * BLOCK_BYTES as u64 / block_bytes, buffer.len() as u64 / block_bytes);
    Request::read(Tag(slot.to_bits()), lba, blocks as u32, buffer)
}

impl BlockReader for Shard {
    type Read = RunRead;

    fn core(&self) -> &Core {
        &self.core
    }

    fn checksums(&mut self) -> &mut BlockChecksums {
        self.partition.checksums_mut()
    }

    fn waiting(&mut self) -> &mut ChecksumReads<RunRead> {
        &mut self.checksums
    }

    fn read_table(&mut self, table_block: u64, buffer: Buffer) -> Result<(), Buffer> {
        let Ok(slot) = self.ios.insert(DeviceIo::Checksums(table_block)) else { return Err(buffer) };
        self.requests.push(read_request(slot, table_block, buffer, self.block_bytes));
        Ok(())
    }

    fn count_lookup(&mut self, is_in_memory: bool) {
        match is_in_memory {
            true => self.stats.checksum_hits += 1,
            false => self.stats.checksum_misses += 1,
        }
    }

    fn read_verified(&mut self, RunRead { read, run }: RunRead, buffer: Buffer, damaged: Option<u64>) {
        self.run_verified(read, run, buffer, damaged);
    }

    fn read_failed(&mut self, read: RunRead, status: Status) {
        read.into_reply().send(status, None);
    }
}
