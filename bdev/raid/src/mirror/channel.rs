//! The channel of a mirror.

use std::sync::Arc;

use bdev::stacking::{BaseChannels, FanOut, FanOutResult};
use bdev::{Completion, Request};
use block_io::{Channel, Op, Status};

use super::Mirror;

/// Reads from the least busy member, and writes to all.
///
/// A write waits until the bitmap has its regions, and is acknowledged when all members have it that the
/// superblock says have all data: where one fails, when the superblock says so.
pub(crate) struct MirrorChannel {
    mirror: Arc<Mirror>,
    channels: BaseChannels,
    fan_out: FanOut,
    /// Blocks that are being read from each member.
    outstanding: Vec<u64>,
    /// Writes whose regions are not in the bitmap yet, with the failures before.
    unmarked: Vec<(Request, u64)>,
    /// Writes that a member lacks whose failure is not recorded yet.
    unrecorded: Vec<(FanOutResult, u64)>,
    finished: Vec<Completion>,
    /// Empty between calls.
    completions: Vec<Completion>,
}

impl MirrorChannel {
    pub(crate) fn new(mirror: Arc<Mirror>, channels: BaseChannels, depth: u32) -> MirrorChannel {
        let places = mirror.places();
        MirrorChannel {
            mirror,
            channels,
            fan_out: FanOut::new(depth, places),
            outstanding: vec![0; places],
            unmarked: Vec::new(),
            unrecorded: Vec::new(),
            finished: Vec::new(),
            completions: Vec::new(),
        }
    }

    #[inline]
    fn start(&mut self, request: Request) {
        match request.op {
            Op::Read => self.read(request),
            Op::Flush => self.send_to_all(request),
            _ if self.mirror.regions().begin(request.lba, request.blocks) => self.send_to_all(request),
            _ => {
                self.unmarked.push((request, self.mirror.failures()));
                self.mirror.request_marks();
            }
        }
    }

    fn read(&mut self, request: Request) {
        let candidates = self.mirror.in_sync() & self.channels.present();
        let (lba, blocks) = (request.lba, request.blocks);
        let place = if self.mirror.regions().may_differ(lba, blocks) {
            // Always the same, so that no other version is seen later.
            (candidates != 0).then(|| self.mirror.first_of(candidates).trailing_zeros() as usize)
        } else {
            self.least_busy(candidates)
        };
        match place {
            Some(place) => {
                self.outstanding[place] += u64::from(blocks);
                self.fan_out.forward(request, place, lba, &mut self.channels);
            }
            None => self.finished.push(request.complete(Status::INTERNAL_PATH_ERROR)),
        }
    }

    #[inline]
    fn least_busy(&self, mut candidates: u64) -> Option<usize> {
        let mut best: Option<usize> = None;
        while candidates != 0 {
            let place = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            if best.is_none_or(|best| self.outstanding[place] < self.outstanding[best]) {
                best = Some(place);
            }
        }
        best
    }

    fn send_to_all(&mut self, request: Request) {
        match self.channels.present() {
            0 => self.end_write(request.complete(Status::INTERNAL_PATH_ERROR)),
            places => self.fan_out.copy_to(request, places, &mut self.channels),
        }
    }

    /// Ends a request, or sends it elsewhere.
    #[inline]
    fn finish(&mut self, result: FanOutResult) {
        if result.request.op == Op::Read {
            return self.finish_read(result);
        }
        let recorded = self.mirror.recorded();
        if result.failed == 0 && recorded & !result.succeeded == 0 {
            return self.end_write(result.complete());
        }
        self.finish_failed_write(result);
    }

    #[inline]
    fn finish_read(&mut self, result: FanOutResult) {
        let tried = result.succeeded | result.failed;
        if tried.is_power_of_two() {
            let place = tried.trailing_zeros() as usize;
            self.outstanding[place] -= u64::from(result.request.blocks);
        }
        if result.failed == 0 {
            return self.finished.push(result.complete());
        }
        self.finish_failed_read(result);
    }

    /// A read that has failed on a member, and may have succeeded on another.
    #[cold]
    fn finish_failed_read(&mut self, result: FanOutResult) {
        if result.succeeded != 0 {
            let (lba, blocks) = (result.request.lba, result.request.blocks);
            self.mirror.repair(lba, blocks, result.failed);
            return self.finished.push(result.complete_with(Status::SUCCESS));
        }
        let others = self.mirror.in_sync() & self.channels.present() & !result.failed;
        match others & others.wrapping_neg() {
            0 => self.finished.push(result.complete()),
            other => self.fan_out.retry(result, other, &mut self.channels),
        }
    }

    /// A write, or a flush, that a member has not done.
    #[cold]
    fn finish_failed_write(&mut self, result: FanOutResult) {
        let mut failed = result.failed;
        while failed != 0 {
            // Before the completion: from then on no core reads what the member does not have.
            self.mirror.fail(failed.trailing_zeros() as usize);
            failed &= failed - 1;
        }
        if result.succeeded & self.mirror.in_sync() == 0 {
            let status = if result.status.is_success() { Status::WRITE_FAULT } else { result.status };
            return self.end_write(result.complete_with(status));
        }
        if self.mirror.recorded() & !result.succeeded == 0 {
            return self.end_write(result.complete_with(Status::SUCCESS));
        }
        self.unrecorded.push((result, self.mirror.failures()));
    }

    /// Completes what [`start`](Self::start) has begun.
    #[inline]
    fn end_write(&mut self, completion: Completion) {
        let request = completion.request();
        if request.op.has_range() {
            self.mirror.regions().end(request.lba, request.blocks);
        }
        self.finished.push(completion);
    }

    /// Looks whether what waits may continue: each change wakes the core.
    #[cold]
    fn resume(&mut self) {
        let failures = self.mirror.failures();
        for (request, before) in std::mem::take(&mut self.unmarked) {
            if self.mirror.regions().is_stored(request.lba, request.blocks) {
                self.send_to_all(request);
            } else if before != failures {
                self.end_write(request.complete(Status::WRITE_FAULT));
            } else {
                self.unmarked.push((request, before));
            }
        }
        for (result, before) in std::mem::take(&mut self.unrecorded) {
            if result.succeeded & self.mirror.in_sync() == 0 || before != failures {
                self.end_write(result.complete_with(Status::WRITE_FAULT));
            } else if self.mirror.recorded() & !result.succeeded == 0 {
                self.end_write(result.complete_with(Status::SUCCESS));
            } else {
                self.unrecorded.push((result, before));
            }
        }
    }
}

impl Channel for MirrorChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        self.channels.sync();
        for request in batch.drain(..) {
            self.start(request);
        }
        self.channels.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let mut completions = std::mem::take(&mut self.completions);
        self.channels.poll(&mut completions);
        for completion in completions.drain(..) {
            if let Some(result) = self.fan_out.complete(completion, &mut self.channels) {
                self.finish(result);
            }
        }
        self.completions = completions;
        if !self.unmarked.is_empty() || !self.unrecorded.is_empty() {
            self.resume();
            self.channels.submit();
        }
        sink.append(&mut self.finished);
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        if !self.finished.is_empty() {
            return Some(0);
        }
        self.channels.deadline()
    }
}
