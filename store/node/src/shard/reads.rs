//! Reads: from the log where that has the newest bytes, from the device else.

use std::rc::Rc;

use bdev::{Completion, Request};
use block_io::{Payload, Status, Tag};
use dma::{Buffer, Data, Parcel};
use objects::{ReadPiece, ReadSource};
use wire_store::{BLOCK_BYTES, ObjectId};

use super::checksums::UnverifiedRead;
use super::overlay::Segment;
use super::store_thread::{StoreRead, StoreRequest};
use super::{DeviceIo, Reply, Shard};
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

    /// Whether its blocks are compared with their checksums.
    pub(super) fn is_verified(&self) -> bool {
        self.verify
    }

    /// Whether everything that the read needs of a run's block comes from the log.
    pub(super) fn is_from_log(&self, run: &DeviceRun, index: u32) -> bool {
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
        let end = read.offset.saturating_add(read.length);
        if read.result.is_none() {
            // Zero bytes, or too many, have no buffer ever.
            if read.length == 0 || read.length > crate::TRANSFER_BYTES_MAX {
                return read.reply.send(Status::INVALID_FIELD, None);
            }
            read.result = self.core.pool().take(read.length as usize);
        }
        let Some(result) = read.result.as_mut() else { return self.parked.push(read) };
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
        if from_log == read.length {
            self.stats.reads_from_log += 1;
            return self.finish_read(read);
        }
        self.stats.reads_overlaid += u64::from(from_log > 0);
        self.pieces.clear();
        if self.partition.plan_read(read.object, read.offset, read.length, &mut self.pieces).is_err() {
            return read.reply.send(Status::INVALID_FIELD, None);
        }
        let mut at = 0;
        for ReadPiece { length, source } in self.pieces.drain(..) {
            let out = &mut result.as_mut_slice()[at as usize..(at + length) as usize];
            match source {
                ReadSource::Zeroes => out.fill(0),
                ReadSource::Inline(bytes) => out.copy_from_slice(&bytes),
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
            return self.parked.push(read);
        }
        if self.is_uncertain(&read.runs) {
            return self.placed.waiting.push(read);
        }
        read._reading = Some(self.reading.clone());
        self.read_next_run(read);
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
        let block_bytes = self.block_bytes;
        let (lba, blocks) = (run.block * BLOCK_BYTES as u64 / block_bytes, bytes as u64 / block_bytes);
        // The whole read at once goes into its result; else through a buffer of the blocks.
        let is_direct = run.length == read.length && bytes == run.length as usize;
        if self.store.is_some() {
            return self.send_read(read, is_direct);
        }
        let buffer = if is_direct { read.result.take() } else { self.core.pool().take(bytes) };
        let Some(buffer) = buffer else {
            read._reading = None;
            return self.parked.push(read);
        };
        let (first, blocks_of_run, verify) = (run.block, run.blocks, read.verify);
        match self.ios.insert(DeviceIo::Read(read)) {
            Ok(slot) => {
                self.requests.push(Request::read(Tag(slot.to_bits()), lba, blocks as u32, buffer));
                if verify {
                    self.prefetch_checksums(first, blocks_of_run);
                }
            }
            Err(DeviceIo::Read(mut read)) => {
                // As many as possible are in flight: it starts again.
                read._reading = None;
                self.parked.push(read);
            }
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
            Err(DeviceIo::Read(mut read)) => {
                // As many as possible are in flight: it starts again.
                read._reading = None;
                self.parked.push(read);
            }
            Err(_) => unreachable!("it was a read"),
        }
    }

    /// The thread has read a run.
    pub(super) fn store_read_completed(
        &mut self,
        mut read: ReadState,
        result: Result<(Parcel, Option<u64>), Status>,
    ) {
        let Some(run) = read.runs.pop() else { return };
        let (parcel, damaged) = match result {
            Ok(result) => result,
            Err(status) => return read.reply.send(status, None),
        };
        match self.core.pool().adopt(parcel) {
            Ok(data) => {
                let buffer = data.into_single().expect("a run is read to one buffer");
                self.read_verified(read, run, buffer, damaged);
            }
            Err(_) => {
                // Too much is adopted: it starts again.
                read._reading = None;
                self.parked.push(read);
            }
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
        self.verify(UnverifiedRead { read, run, buffer, verified: 0 });
    }

    /// The blocks of a run were compared with their checksums, up to the first that is damaged.
    pub(super) fn read_verified(
        &mut self,
        mut read: ReadState,
        run: DeviceRun,
        buffer: Buffer,
        damaged: Option<u64>,
    ) {
        // What was overwritten since may be there, with a checksum that the block does not have yet or had
        // before.
        let is_uncertain = self.is_uncertain(std::slice::from_ref(&run));
        if is_uncertain || (damaged.is_some() && read.overwritten != self.placed.written) {
            if read.result.is_none() {
                read.result = Some(buffer);
            }
            read._reading = None;
            self.stats.reads_repeated += 1;
            return self.plan(read);
        }
        let is_overtaken = read.generation != self.generation;
        // What the log had may be older than what is in place now.
        if is_overtaken && (damaged.is_some() || !read.segments.is_empty() || !read.runs.is_empty()) {
            if read.result.is_none() {
                read.result = Some(buffer);
            }
            read._reading = None;
            self.stats.reads_repeated += 1;
            return self.plan(read);
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
