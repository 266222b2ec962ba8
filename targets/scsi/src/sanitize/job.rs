//! What a sanitize operation does at the unit's device, sans-IO.

use std::sync::{Arc, OnceLock};

use block_io::{Op, Status, Tag};
use dma::Data;
use reservations::ChangeWaker;
use wire_scsi::blocks::OverwriteParameters;

use super::RunningSanitize;
use crate::limits::{RANGE_BLOCKS_MAX, repeat_blocks_max};
use crate::operation::result_of;
use crate::response::Failure;
use crate::unit::LogicalUnit;

/// How an operation has ended, for the command that waits for it.
#[derive(Debug)]
pub(super) struct JobResult {
    result: OnceLock<Result<(), Failure>>,
    waker: Arc<dyn ChangeWaker>,
}

impl JobResult {
    pub(super) fn new(waker: &Arc<dyn ChangeWaker>) -> Arc<JobResult> {
        Arc::new(JobResult { result: OnceLock::new(), waker: waker.clone() })
    }

    /// `None` while the operation runs.
    pub(super) fn get(&self) -> Option<Result<(), Failure>> {
        self.result.get().copied()
    }
}

/// The passes over the blocks.
#[derive(Debug)]
pub(super) struct SanitizeWork {
    /// BLOCK ERASE without a pattern; OVERWRITE with a block of it.
    pattern: Option<Vec<u8>>,
    /// Each pass writes the inverse of the one before (SBC-4, section 5.25.2.2).
    inverts: bool,
    passes: u8,
}

impl SanitizeWork {
    pub(super) fn erase() -> SanitizeWork {
        SanitizeWork { pattern: None, inverts: false, passes: 1 }
    }

    pub(super) fn overwrite(parameters: &OverwriteParameters<'_>, block_bytes: u32) -> SanitizeWork {
        let pattern = parameters.pattern.iter().copied().cycle().take(block_bytes as usize).collect();
        SanitizeWork { pattern: Some(pattern), inverts: parameters.inverts, passes: parameters.passes }
    }
}

/// A sanitize operation that has begun. The unit reports its progress until it is dropped, and then that it
/// has failed, unless it has finished.
#[derive(Debug)]
pub struct SanitizeJob {
    /// `Some` until the drop.
    running: Option<RunningSanitize>,
    work: SanitizeWork,
    block_bytes: u32,
    /// Writes are a multiple of this many blocks.
    unit_blocks: u32,
    can_flush: bool,
    outcome: Option<Result<(), Failure>>,
    result: Arc<JobResult>,
}

impl SanitizeJob {
    pub(super) fn new(
        mut running: RunningSanitize,
        work: SanitizeWork,
        unit: &LogicalUnit,
        result: Arc<JobResult>,
    ) -> SanitizeJob {
        running.start();
        SanitizeJob {
            running: Some(running),
            work,
            block_bytes: unit.block_bytes(),
            unit_blocks: unit.config().geometry.write_unit_blocks,
            can_flush: unit.config().can_flush,
            outcome: None,
            result,
        }
    }

    /// Bytes of memory that [`SanitizeRun::new`] needs; 0 for none.
    pub fn memory_bytes(&self) -> u32 {
        match self.work.pattern {
            Some(_) => repeat_blocks_max(self.block_bytes, self.unit_blocks) * self.block_bytes,
            None => 0,
        }
    }
}

impl Drop for SanitizeJob {
    fn drop(&mut self) {
        // The command's answer follows the unit's state.
        drop(self.running.take());
        let dropped = Err(crate::sense::failure_of(Status::INTERNAL_ERROR));
        let _ = self.result.result.set(self.outcome.unwrap_or(dropped));
        self.result.waker.wake();
    }
}

/// A job on the core that executes it, one request at a time: [`next_request`](Self::next_request), and
/// [`complete`](Self::complete) with its completion, until there is none.
#[derive(Debug)]
pub struct SanitizeRun {
    job: SanitizeJob,
    memory: Option<Data>,
    /// What the write in flight leaves out of it, at the end of a pass.
    unused: Option<Data>,
    is_filled: bool,
    passes_done: u8,
    /// First block that this pass has not sanitized.
    next_lba: u64,
    is_flushing: bool,
}

impl SanitizeRun {
    /// Begins a job with the memory that it needs.
    pub fn new(job: SanitizeJob, memory: Option<Data>) -> SanitizeRun {
        SanitizeRun {
            job,
            memory,
            unused: None,
            is_filled: false,
            passes_done: 0,
            next_lba: 0,
            is_flushing: false,
        }
    }

    /// The next request; `None` if the operation has ended, or its unit is not there any more.
    pub fn next_request(&mut self) -> Option<bdev::Request> {
        if self.job.outcome.is_some() {
            return None;
        }
        let running = self.job.running.as_ref()?;
        // It may have been resized.
        let blocks = running.unit.upgrade()?.blocks();
        let done = u64::from(self.passes_done) * blocks + self.next_lba.min(blocks);
        running.set_progress(done, u64::from(self.job.work.passes) * blocks);
        while self.next_lba >= blocks {
            (self.passes_done, self.next_lba) = (self.passes_done + 1, 0);
            if self.passes_done >= self.job.work.passes {
                return self.flush();
            }
            if let (true, Some(pattern)) = (self.job.work.inverts, &mut self.job.work.pattern) {
                pattern.iter_mut().for_each(|byte| *byte = !*byte);
                self.is_filled = false;
            }
        }
        self.sanitize(blocks - self.next_lba)
    }

    /// Makes everything durable, at last.
    fn flush(&mut self) -> Option<bdev::Request> {
        if !self.job.can_flush {
            self.finish();
            return None;
        }
        self.is_flushing = true;
        Some(bdev::Request::new(Tag(0), Op::Flush, 0, 0))
    }

    fn sanitize(&mut self, blocks: u64) -> Option<bdev::Request> {
        let lba = self.next_lba;
        let Some(pattern) = &self.job.work.pattern else {
            let piece = blocks.min(RANGE_BLOCKS_MAX.into());
            self.next_lba += piece;
            return Some(bdev::Request::new(Tag(0), Op::Unmap, lba, piece as u32));
        };
        let mut memory = self.memory.take()?;
        if !std::mem::replace(&mut self.is_filled, true) {
            for at in (0..memory.len()).step_by(pattern.len()) {
                memory.copy_from(at, pattern);
            }
        }
        let piece = blocks.min((memory.len() / pattern.len()) as u64);
        let bytes = piece as usize * pattern.len();
        self.unused = (bytes < memory.len()).then(|| memory.split_off(bytes));
        self.next_lba += piece;
        Some(bdev::Request::write(Tag(0), lba, piece as u32, memory))
    }

    /// The request has completed.
    pub fn complete(&mut self, completion: bdev::Completion) {
        if let Err(failure) = result_of(&completion) {
            self.job.outcome = Some(Err(failure));
        } else if self.is_flushing {
            self.finish();
        }
        let written = completion.into_data();
        if self.memory.is_none() {
            self.memory = written.map(|written| self.unused.take().into_iter().fold(written, Data::join));
        }
    }

    /// Whether all blocks are sanitized.
    pub fn has_finished(&self) -> bool {
        self.job.outcome == Some(Ok(()))
    }

    fn finish(&mut self) {
        if let Some(running) = &mut self.job.running {
            running.finish();
        }
        self.job.outcome = Some(Ok(()));
    }
}
