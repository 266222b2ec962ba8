//! The I/O of the files, for a [`PlanRunner`](bdev::PlanRunner) on their device.
//!
//! Reads and writes are divided into parts that the core's pool has memory for. A flush goes through a
//! channel of its own, so that it is no barrier for what other files do: the files wait themselves for what
//! has to be before and after.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bdev::stacking::BaseChannel;
use bdev::{PlannedAction, PlannedData, PlannedIo, PlannedOutcome, Planner, Request};
use blobfs::{BlobFs, BlobFsAction};
use blobstore::StoreIoFailed;
use block_io::{Op, Tag};
use reactor::Core;

use crate::buffers::WriteBuffers;

/// Bytes of a part.
const PART_BYTES_MAX: usize = 1 << 20;

/// The files, and the state of the I/O that they have asked for.
pub(crate) struct FsPlan {
    core: Core,
    buffers: Arc<WriteBuffers>,
    pub(crate) fs: BlobFs,
    flushes: BaseChannel,
    /// Space that was freed is deallocated on the bdev. A file below it gets holes, and allocates again.
    discards: bool,
    ready: VecDeque<PlannedIo>,
    /// By the number that the runner knows: an I/O of the files, and where the part is in its data.
    parts: HashMap<u64, (u64, usize)>,
    ios: HashMap<u64, DividedIo>,
    next_part: u64,
    /// A large write, of which not all parts have begun.
    write: Option<DividedWrite>,
    /// Bytes of it that were copied in this turn.
    copied: usize,
}

struct DividedWrite {
    io: u64,
    offset: u64,
    data: Vec<u8>,
    /// Where the next part begins in the data.
    at: usize,
    durable: bool,
}

/// An I/O in parts.
struct DividedIo {
    parts: usize,
    /// Of a read.
    data: Vec<u8>,
    has_failed: bool,
}

impl FsPlan {
    pub(crate) fn new(
        core: &Core,
        fs: BlobFs,
        flushes: BaseChannel,
        discards: bool,
        buffers: Arc<WriteBuffers>,
    ) -> FsPlan {
        FsPlan {
            core: core.clone(),
            buffers,
            fs,
            flushes,
            discards,
            ready: VecDeque::new(),
            parts: HashMap::new(),
            ios: HashMap::new(),
            next_part: 0,
            write: None,
            copied: 0,
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.ios.is_empty() && self.flushes.is_idle() && self.fs.is_idle()
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.flushes.deadline()
    }

    /// Continues what is not on the runner's channel. Returns how many I/Os have ended.
    pub(crate) fn turn(&mut self) -> usize {
        let ended: Vec<(u64, bool)> = self
            .flushes
            .poll()
            .map(|completion| (completion.tag().0, completion.status().is_success()))
            .collect();
        for (id, is_done) in &ended {
            self.fs.complete(*id, if *is_done { Ok(Vec::new()) } else { Err(StoreIoFailed) });
        }
        ended.len()
    }

    fn push(&mut self, io: u64, at: usize, action: PlannedAction) {
        self.next_part += 1;
        self.parts.insert(self.next_part, (io, at));
        self.ready.push_back(PlannedIo { id: self.next_part, action });
    }

    /// Pushes the next part of a large write. False if there is none.
    fn take_part(&mut self) -> bool {
        let Some(mut write) = self.write.take() else { return false };
        let end = write.data.len().min(write.at + PART_BYTES_MAX);
        let data = self.part_data(&write.data[write.at..end]);
        self.copied += end - write.at;
        let (offset, durable) = (write.offset + write.at as u64, write.durable);
        self.push(write.io, 0, PlannedAction::Write { offset, data, durable });
        write.at = end;
        match end < write.data.len() {
            true => self.write = Some(write),
            false => self.buffers.put(write.data),
        }
        true
    }

    /// Whether there is more to begin in another turn of the runner: the device gets a part of a large write
    /// while the next is copied.
    pub(crate) fn has_more(&mut self) -> bool {
        std::mem::take(&mut self.copied) >= PART_BYTES_MAX
    }

    /// A part of a write in memory of the pool, so that it is copied once; else in a copy that waits for
    /// memory.
    fn part_data(&self, part: &[u8]) -> PlannedData {
        match self.core.pool().take_data(part.len()) {
            Some(mut data) => {
                data.copy_from(0, part);
                data.into()
            }
            None => part.to_vec().into(),
        }
    }

    /// Divides an I/O of the files. False if there was none.
    fn take_io(&mut self) -> bool {
        let Some(io) = self.fs.next_io() else { return false };
        let mut divided = DividedIo { parts: 1, data: Vec::new(), has_failed: false };
        match io.action {
            BlobFsAction::Flush => {
                self.flushes.push(Request::new(Tag(io.id), Op::Flush, 0, 0));
                self.flushes.submit();
                return true;
            }
            BlobFsAction::Read { offset, bytes } => {
                divided.parts = bytes.div_ceil(PART_BYTES_MAX);
                divided.data = vec![0; bytes];
                for at in (0..bytes).step_by(PART_BYTES_MAX) {
                    let bytes = PART_BYTES_MAX.min(bytes - at);
                    self.push(io.id, at, PlannedAction::Read { offset: offset + at as u64, bytes });
                }
            }
            BlobFsAction::Write { offset, data, durable } if data.len() <= PART_BYTES_MAX => {
                self.push(io.id, 0, PlannedAction::Write { offset, data: data.into(), durable });
            }
            BlobFsAction::Write { offset, data, durable } => {
                divided.parts = data.len().div_ceil(PART_BYTES_MAX);
                self.write = Some(DividedWrite { io: io.id, offset, data, at: 0, durable });
            }
            BlobFsAction::WriteZeroes { offset, bytes } => {
                self.push(io.id, 0, PlannedAction::WriteZeroes { offset, bytes });
            }
            BlobFsAction::Deallocate { .. } if !self.discards => {
                self.fs.complete(io.id, Ok(Vec::new()));
                return true;
            }
            BlobFsAction::Deallocate { offset, bytes } => {
                self.push(io.id, 0, PlannedAction::Deallocate { offset, bytes });
            }
        }
        self.ios.insert(io.id, divided);
        true
    }
}

impl Planner for FsPlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        if self.copied >= PART_BYTES_MAX {
            return None;
        }
        while self.ready.is_empty() && (self.take_part() || self.take_io()) {}
        self.ready.pop_front()
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let Some((io, at)) = self.parts.remove(&id) else { return };
        let Some(divided) = self.ios.get_mut(&io) else { return };
        match outcome {
            Ok(Some(data)) => {
                if let Some(to) = divided.data.get_mut(at..).filter(|to| !to.is_empty()) {
                    let length = data.len().min(to.len());
                    data.copy_to(0, &mut to[..length]);
                }
            }
            Ok(None) => {}
            Err(_) => divided.has_failed = true,
        }
        divided.parts -= 1;
        if divided.parts == 0
            && let Some(divided) = self.ios.remove(&io)
        {
            self.fs.complete(io, if divided.has_failed { Err(StoreIoFailed) } else { Ok(divided.data) });
        }
    }
}
