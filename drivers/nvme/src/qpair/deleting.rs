//! Deletion of queue pairs that were dropped.

use std::sync::Arc;

use block_io::Status;
use os::clock::Clock;
use reactor::{Core, PollResult, Poller, Shutdown};

use super::STATE_CHECK_NS;
use crate::handle::ControllerHandle;
use crate::interrupt::QpairInterrupt;
use crate::queue::MemoryQueue;
use crate::shared::{OwnerRequest, QpairRecord, QpairState, RunState};

/// A dropped queue pair: holds its memory until the controller has deleted the queues.
pub(super) struct DeletingQpair {
    /// Not the core, which would own itself through its new pollers.
    clock: Clock,
    queue: Option<Box<MemoryQueue>>,
    handle: Arc<ControllerHandle>,
    record: Arc<QpairRecord>,
    epoch: u32,
    interrupt: Option<QpairInterrupt>,
    requested: bool,
}

impl DeletingQpair {
    pub(super) fn new(
        core: &Core,
        queue: Box<MemoryQueue>,
        handle: Arc<ControllerHandle>,
        record: Arc<QpairRecord>,
        epoch: u32,
        interrupt: Option<QpairInterrupt>,
    ) -> DeletingQpair {
        let clock = core.clock().clone();
        DeletingQpair { clock, queue: Some(queue), handle, record, epoch, interrupt, requested: false }
    }

    /// Whether the device no longer accesses the queue's memory.
    fn is_released(&self) -> bool {
        let word = self.handle.shared.state_word();
        let stopped =
            matches!(word.state(), RunState::Stopped | RunState::Dead) || word.epoch() != self.epoch;
        let stopping = word.state() == RunState::Stopping;
        let never_live = !matches!(self.record.state(), QpairState::Live(_) | QpairState::Deleting);
        (stopped && !stopping) || never_live
    }

    fn finish(&mut self) {
        self.interrupt = None;
        if let Some(mut queue) = self.queue.take()
            && self.handle.shared.is_memory_quarantined()
        {
            let (mut ios, mut done) = (Vec::new(), Vec::new());
            queue.abort_all(Status::ABORTED_BY_HOST, &mut ios, &mut done);
            std::mem::forget((queue, ios, done));
        }
    }
}

impl Poller for DeletingQpair {
    fn name(&self) -> &str {
        "nvme-qpair-delete"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        if self.is_released() {
            self.finish();
            return PollResult::Finished;
        }
        if !self.requested && self.handle.shared.state_word().state() == RunState::Running {
            self.requested =
                self.handle.shared.requests.send(OwnerRequest::DeleteQpair(self.record.clone())).is_ok();
        }
        PollResult::Idle
    }

    fn deadline(&self) -> Option<u64> {
        Some(self.clock.now_ns() + STATE_CHECK_NS)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        if self.queue.is_none() || self.is_released() { Shutdown::Done } else { Shutdown::Draining }
    }
}

impl Drop for DeletingQpair {
    fn drop(&mut self) {
        if self.queue.is_none() {
            return;
        }
        if !self.is_released() {
            // The reactor ends before the deletion has completed. Stop the device's DMA, because the memory is about
            // to be reused.
            let shared = &self.handle.shared;
            if shared.device().disable_dma().is_err() && shared.device().is_present() {
                shared.quarantine_memory();
            }
        }
        self.finish();
    }
}
