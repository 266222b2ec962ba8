//! I/O queue pairs: one per core, created by a request to the controller's owner core.

mod deleting;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::{Completion, Request, Status};
use dma::{Data, DeviceBuffer};
use reactor::{Core, Period};
use wire_nvme::{cqe, sqe};

use crate::command::{Command, CommandCompletion};
use crate::descriptors::DescriptorBuilder;
use crate::error::{ControllerFailure, NvmeOpenError};
use crate::handle::ControllerHandle;
use crate::inject::CompletionInjection;
use crate::interrupt::QpairInterrupt;
use crate::namespace_info::NamespaceLayout;
use crate::options::{InterruptMode, Options};
use crate::queue::{DEPTH_MAX, MemoryQueue, Overdue};
use crate::rings::{ENTRIES_MIN, Rings};
use crate::shared::{OwnerRequest, QpairRecord, QpairState, ResetKind, RunState, StateWord};
use crate::stats::{CostMeter, Costs, QueueStats};
use crate::wait::race;
use deleting::DeletingQpair;

/// An I/O submission queue and its completion queue, for one core.
///
/// It belongs to the core that created it and shares nothing on the I/O path: no locks, and no atomic operations
/// except the doorbells and one load of the controller's state. Using one from two threads does not compile:
///
/// ```compile_fail,E0277
/// fn sendable<T: Send>() {}
/// sendable::<nvme::QueuePair>(); // `Rc<…>` cannot be sent between threads safely
/// ```
///
/// ```compile_fail,E0277
/// fn shareable<T: Sync>() {}
/// shareable::<nvme::QueuePair>(); // nor shared
/// ```
///
/// ```compile_fail,E0277
/// fn other_thread(mut pair: nvme::QueuePair) {
///     std::thread::spawn(move || pair.poll_commands(&mut Vec::new()));
/// }
/// ```
///
/// It reconnects by itself after a controller reset; commands in flight then complete with
/// [`Status::ABORTED_BY_HOST`]. If it is dropped with commands in flight, a poller keeps their memory until the
/// controller has deleted the queue.
pub struct QueuePair {
    /// `None` only while `self` is dropped.
    queue: Option<Box<MemoryQueue>>,
    core: Core,
    handle: Arc<ControllerHandle>,
    record: Arc<QpairRecord>,
    observed: StateWord,
    /// Epoch of the commands in flight.
    epoch: u32,
    submission: SubmissionState,
    interrupt: Option<QpairInterrupt>,
    /// Completions not returned yet, because they arose outside of the poll for their kind.
    ios: Vec<Completion<Data>>,
    done: Vec<CommandCompletion>,
    meter: CostMeter,
    io_timeout_ns: u64,
    timeouts: Timeouts,
    changed: bool,
}

/// Whether commands can be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubmissionState {
    /// Commands can be submitted.
    Live,
    /// The controller is being stopped, or an invalid completion was reported to its owner.
    Paused,
    /// The rings are reset and the queue awaits its creation; `requested` once the owner was asked.
    Connecting { requested: bool },
    /// The queue pair has failed permanently.
    Failed,
}

/// State of I/O timeout handling.
#[derive(Default)]
struct Timeouts {
    next_check_ns: u64,
    /// Commands for which an abort was requested, and when (ns).
    aborted: Vec<(u16, u64)>,
    found: Vec<Overdue>,
    reset_requested: bool,
}

/// Timeout checks per timeout period.
const CHECKS_PER_TIMEOUT: u64 = 8;
/// Interval at which a queue pair that waits for the controller checks its state; the owner also wakes it.
const STATE_CHECK_NS: u64 = 1_000_000;

impl QueuePair {
    /// Creates a queue pair on this core. The owner core executes the admin commands.
    pub(crate) async fn open(
        core: &Core,
        handle: &Arc<ControllerHandle>,
        options: &Options,
    ) -> Result<QueuePair, NvmeOpenError> {
        let shared = &handle.shared;
        let params = shared.params();
        if !(1..=DEPTH_MAX).contains(&options.queue_depth) {
            return Err(NvmeOpenError::InvalidArgument("the queue depth must be 1 to 1023"));
        }
        let entries = ring_entries(options.queue_depth, params.capabilities.queue_entries_max);
        let depth = options.queue_depth.min(entries - 1);
        let page = 1usize << params.page_log2;
        let take = |bytes: usize| core.pool().take(bytes.max(page)).ok_or(NvmeOpenError::NoMemory);
        let sq = take(entries as usize * sqe::SIZE)?;
        let cq = take(entries as usize * cqe::SIZE)?;
        let ranges = take(depth as usize * wire_nvme::io::DSM_RANGE_SIZE)?;
        let mut descriptors = DescriptorBuilder::new(shared, core.pool(), params.page_log2);
        descriptors.use_sgls(params.identity.sgls);
        let qid = shared.alloc_qid().ok_or(NvmeOpenError::NoFreeQueue(params.queues_max.into()))?;
        let stride = params.capabilities.doorbell_stride_log2;
        let (sq, cq) = (DeviceBuffer::new(sq), DeviceBuffer::new(cq));
        let mut rings = Rings::new(sq, cq, entries, qid, params.doorbells.clone(), stride);
        rings.set_shadow(params.shadow.as_ref().and_then(|pages| pages.for_queue(qid, stride)));
        let created = MemoryQueue::new(rings, descriptors, depth, core.pool(), ranges)
            .and_then(|mut queue| Ok((queue.ring_addresses()?, queue)));
        let (addresses, queue) = match created {
            Ok(created) => created,
            Err(error) => {
                shared.free_qid(qid);
                return Err(NvmeOpenError::Device(shared.device().name(), error));
            }
        };
        let wanted = match options.interrupts {
            InterruptMode::Off => false,
            InterruptMode::Auto => !core.spins(),
            InterruptMode::On => true,
        };
        let interrupt = match params.vectors.get(usize::from(qid)).filter(|_| wanted) {
            Some(_) => QpairInterrupt::watch(core, handle, qid),
            None => None,
        };
        let vector = interrupt.as_ref().map(|_| qid);
        let record = QpairRecord::new(shared, qid, addresses, entries, vector, core.event_loop().waker());
        let mut pair = QueuePair {
            queue: Some(Box::new(queue)),
            core: core.clone(),
            handle: handle.clone(),
            record,
            observed: shared.state_word(),
            epoch: 0,
            submission: SubmissionState::Connecting { requested: false },
            interrupt,
            ios: Vec::new(),
            done: Vec::new(),
            meter: CostMeter::default(),
            io_timeout_ns: options.io_timeout_ns,
            timeouts: Timeouts::default(),
            changed: false,
        };
        pair.meter.set_enabled(options.count_costs);
        pair.connect(options.timeout_ns).await?;
        Ok(pair)
    }

    async fn connect(&mut self, timeout_ns: u64) -> Result<(), NvmeOpenError> {
        let deadline_ns = self.core.now_ns() + timeout_ns;
        loop {
            self.sync_state();
            match self.submission {
                SubmissionState::Live => return Ok(()),
                SubmissionState::Failed => {
                    if let QpairState::Rejected(status) = self.record.state() {
                        return Err(NvmeOpenError::Command("Create I/O Queue", Status::from_field(status)));
                    }
                    return Err(self.failure().unwrap_or(ControllerFailure::Detached).into());
                }
                SubmissionState::Paused | SubmissionState::Connecting { .. } => {}
            }
            if self.core.now_ns() > deadline_ns {
                return Err(NvmeOpenError::Timeout("Create I/O Queue"));
            }
            let settled = std::pin::pin!(self.record.wait_created());
            let timer = std::pin::pin!(self.core.sleep_ns(STATE_CHECK_NS));
            race(settled, timer).await;
        }
    }

    /// Queue identifier, 1 to [`Controller::queues_max`](crate::Controller::queues_max).
    pub fn qid(&self) -> u16 {
        self.record.qid
    }

    /// Most commands in flight.
    pub fn depth(&self) -> usize {
        self.queue().depth()
    }

    /// Commands that can be submitted now; 0 while the queue pair is not connected.
    pub fn room(&self) -> usize {
        if self.submission == SubmissionState::Live { self.queue().room() } else { 0 }
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queue().in_flight()
    }

    /// Counters since the queue pair was created.
    pub fn stats(&self) -> QueueStats {
        let queue = self.queue();
        let (tails, heads) = (queue.rings.sq_doorbell_counts, queue.rings.cq_doorbell_counts);
        QueueStats {
            doorbells: tails.register_writes + heads.register_writes,
            sq_doorbells: tails.register_writes,
            cq_doorbells: heads.register_writes,
            sq_shadows: tails.shadow_updates,
            cq_shadows: heads.shadow_updates,
            ..queue.stats
        }
    }

    /// Measured cost of submission and completion; see [`Options::count_costs`].
    pub fn costs(&self) -> Costs {
        self.meter.costs()
    }

    /// Enables or disables cost measurement.
    pub fn count_costs(&mut self, on: bool) {
        self.meter.set_enabled(on);
    }

    /// Memory use in bytes: host memory, and memory that the device accesses.
    pub fn memory_bytes(&self) -> (usize, usize) {
        let (own, device) = self.queue().bytes();
        (own + size_of::<QueuePair>() + size_of::<QpairRecord>(), device)
    }

    /// Why the queue pair can no longer be used, if it has failed.
    pub fn failure(&self) -> Option<ControllerFailure> {
        if let QpairState::Rejected(status) = self.record.state() {
            return Some(ControllerFailure::QueueRejected(self.record.qid, Status::from_field(status)));
        }
        self.handle.shared.failure().filter(|_| self.submission == SubmissionState::Failed)
    }

    /// Injects a fault into the next completions of an opcode. Returns `false` if 16 injections are active already or
    /// the count is 0.
    pub fn inject(&mut self, injection: CompletionInjection) -> bool {
        self.queue_mut().injections.add(injection)
    }

    /// Removes all fault injections.
    pub fn clear_injections(&mut self) {
        self.queue_mut().injections.clear();
    }

    /// Whether the device reaches data in place: see [`IoQueue::can_access`](crate::IoQueue::can_access).
    pub(crate) fn can_access(&mut self, data: &Data) -> bool {
        self.queue_mut().descriptors.can_access(data.slices())
    }

    /// Submits requests from the front of the batch; requests without a free slot stay in it.
    #[inline]
    pub(crate) fn submit(&mut self, layout: &NamespaceLayout, batch: &mut Vec<Request<Data>>) {
        if self.submission != SubmissionState::Live || self.handle.shared.state_word() != self.observed {
            self.sync_state();
            if self.submission != SubmissionState::Live {
                if self.submission == SubmissionState::Failed {
                    self.ios
                        .extend(batch.drain(..).map(|request| request.complete(Status::HOST_PATHING_ERROR)));
                }
                return;
            }
        }
        let mark = self.meter.begin();
        let before = batch.len();
        let now_ns = self.submit_time_ns();
        let Some(queue) = &mut self.queue else { return };
        queue.submit(layout, batch, &mut self.ios, now_ns);
        if let Some(mark) = mark {
            self.meter.submitted(mark, before - batch.len());
        }
    }

    /// Appends completed requests to `sink` and returns their number.
    #[inline]
    pub(crate) fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        let before = sink.len();
        if self.handle.shared.state_word() != self.observed || self.submission != SubmissionState::Live {
            self.sync_state();
        }
        let mark = self.meter.begin();
        let count = self.reap(|ios| std::mem::swap(ios, sink));
        if let Some(mark) = mark {
            self.meter.completed(mark, count);
        }
        if !self.ios.is_empty() {
            sink.append(&mut self.ios);
        }
        sink.len() - before
    }

    /// Submits typed commands from the front of the batch; commands without a free slot stay in it. An invalid
    /// command completes with an error at the next [`poll_commands`](Self::poll_commands).
    pub fn submit_commands(&mut self, batch: &mut Vec<Command>) {
        self.sync_state();
        match self.submission {
            SubmissionState::Live => {}
            SubmissionState::Paused | SubmissionState::Connecting { .. } => return,
            SubmissionState::Failed => {
                let refused = batch.drain(..).map(|command| command.reject(Status::HOST_PATHING_ERROR));
                self.done.extend(refused);
                return;
            }
        }
        let mark = self.meter.begin();
        let before = batch.len();
        let now_ns = self.submit_time_ns();
        let Some(queue) = &mut self.queue else { return };
        queue.submit_commands(batch, &mut self.done, now_ns);
        if let Some(mark) = mark {
            self.meter.submitted(mark, before - batch.len());
        }
    }

    /// Appends completed typed commands to `sink` and returns their number.
    pub fn poll_commands(&mut self, sink: &mut Vec<CommandCompletion>) -> usize {
        self.sync_state();
        self.reap(|_| ());
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }

    /// Whether a namespace has changed since the last call.
    pub(crate) fn take_change(&mut self) -> bool {
        std::mem::replace(&mut self.changed, false)
    }

    #[inline]
    pub(crate) fn has_change(&self) -> bool {
        self.changed
    }

    /// When to poll next; see [`block_io::Channel::deadline`].
    pub(crate) fn deadline(&self) -> Option<u64> {
        if !self.ios.is_empty() || !self.done.is_empty() {
            return Some(0);
        }
        match self.submission {
            SubmissionState::Paused | SubmissionState::Connecting { .. } => {
                return Some(self.core.now_ns() + STATE_CHECK_NS);
            }
            SubmissionState::Failed => return None,
            SubmissionState::Live => {}
        }
        if self.handle.shared.state_word() != self.observed {
            return Some(0);
        }
        match &self.interrupt {
            _ if self.queue().in_flight() == 0 => None,
            None => Some(0),
            Some(_) if self.io_timeout_ns == 0 => None,
            Some(_) => Some(self.timeouts.next_check_ns.max(1)),
        }
    }

    fn queue(&self) -> &MemoryQueue {
        self.queue.as_ref().expect("a queue pair has its queue until it is dropped")
    }

    fn queue_mut(&mut self) -> &mut MemoryQueue {
        self.queue.as_mut().expect("a queue pair has its queue until it is dropped")
    }

    /// Submission time of commands; 0, without reading the clock, if I/O timeouts are off.
    #[inline]
    fn submit_time_ns(&self) -> u64 {
        if self.io_timeout_ns == 0 { 0 } else { self.core.now_ns() }
    }

    /// Processes completions. `exchange` swaps `ios` with the caller's sink, to avoid copying, and back.
    #[inline]
    fn reap(&mut self, mut exchange: impl FnMut(&mut Vec<Completion<Data>>)) -> usize {
        let Some(queue) = &mut self.queue else { return 0 };
        if self.submission != SubmissionState::Live {
            return 0;
        }
        if let Some(interrupt) = &mut self.interrupt {
            interrupt.drain();
        }
        queue.stats.polls += 1;
        exchange(&mut self.ios);
        let reaped = queue.reap(&mut self.ios, &mut self.done);
        exchange(&mut self.ios);
        match reaped {
            Ok(0) => {
                queue.stats.idle_polls += 1;
                if queue.in_flight() > 0 && self.io_timeout_ns > 0 && queue.stats.idle_polls & 63 == 0
                    || self.interrupt.is_some()
                {
                    self.check_timeouts();
                }
                0
            }
            Ok(count) => count,
            Err(what) => {
                self.report_bad_completion(what);
                0
            }
        }
    }

    /// Reports an invalid completion to the owner, which takes the controller offline; stops submission and polling.
    #[cold]
    fn report_bad_completion(&mut self, what: crate::error::BadCompletion) {
        if self.submission != SubmissionState::Live {
            return;
        }
        let failure = ControllerFailure::BadCompletion { qid: self.record.qid, what };
        if self.handle.shared.requests.send(OwnerRequest::Fail(failure)).is_ok() {
            self.submission = SubmissionState::Paused;
        }
    }

    /// Applies a change of the controller's run state or epoch.
    #[cold]
    fn sync_state(&mut self) {
        let word = self.handle.shared.state_word();
        let changed = word != self.observed;
        if changed {
            self.changed |= word.changes() != self.observed.changes();
            self.observed = word;
        }
        match word.state() {
            RunState::Dead => {
                if self.submission != SubmissionState::Failed {
                    self.abort_in_flight(Status::HOST_PATHING_ERROR);
                    self.submission = SubmissionState::Failed;
                }
            }
            RunState::Stopping => {
                if self.submission == SubmissionState::Live {
                    self.submission = SubmissionState::Paused;
                }
            }
            RunState::Stopped => self.enter_epoch(word.epoch()),
            RunState::Running => {
                self.enter_epoch(word.epoch());
                self.reconnect();
            }
        }
    }

    /// Aborts the commands of an earlier epoch and resets the rings for this one.
    fn enter_epoch(&mut self, epoch: u32) {
        if self.submission == SubmissionState::Failed || self.epoch == epoch {
            return;
        }
        self.abort_in_flight(Status::ABORTED_BY_HOST);
        let was_live = matches!(self.submission, SubmissionState::Live | SubmissionState::Paused);
        self.epoch = epoch;
        let queue = self.queue_mut();
        queue.rings.reset();
        queue.stats.resets += u64::from(was_live);
        self.timeouts = Timeouts::default();
        self.submission = SubmissionState::Connecting { requested: false };
        self.record.set_state(QpairState::Pending(epoch));
    }

    fn reconnect(&mut self) {
        let SubmissionState::Connecting { requested } = self.submission else { return };
        match self.record.state() {
            QpairState::Live(epoch) if epoch == self.epoch => self.submission = SubmissionState::Live,
            QpairState::Rejected(_) => self.submission = SubmissionState::Failed,
            _ if !requested => {
                let sent =
                    self.handle.shared.requests.send(OwnerRequest::CreateQpair(self.record.clone())).is_ok();
                self.submission = SubmissionState::Connecting { requested: sent };
            }
            _ => {}
        }
    }

    /// Completes every command in flight with `status`. The device no longer accesses their memory, or its DMA could
    /// not be stopped: then the buffers are leaked.
    fn abort_in_flight(&mut self, status: Status) {
        let quarantined = self.handle.shared.is_memory_quarantined();
        let (mut ios, mut done) = (Vec::new(), Vec::new());
        self.queue_mut().abort_all(status, &mut ios, &mut done);
        if quarantined {
            let leak = |completion: Completion<Data>| {
                let mut request = completion.into_request();
                std::mem::forget(request.take_data());
                request.complete(status)
            };
            ios = ios.into_iter().map(leak).collect();
            for executed in &mut done {
                std::mem::forget((executed.command.data.take(), executed.command.metadata.take()));
            }
        }
        self.ios.append(&mut ios);
        self.done.append(&mut done);
    }

    /// Requests an abort for each timed-out command, and a controller reset one timeout after that.
    #[cold]
    fn check_timeouts(&mut self) {
        let now_ns = self.core.now_ns();
        if self.io_timeout_ns == 0
            || now_ns < self.timeouts.next_check_ns
            || self.submission != SubmissionState::Live
        {
            return;
        }
        self.timeouts.next_check_ns = now_ns + self.io_timeout_ns / CHECKS_PER_TIMEOUT;
        let Some(queue) = &mut self.queue else { return };
        let Timeouts { aborted, found, reset_requested, .. } = &mut self.timeouts;
        found.clear();
        queue.overdue(now_ns, self.io_timeout_ns, found);
        aborted.retain(|(cid, _)| queue.is_in_flight(*cid));
        let shared = &self.handle.shared;
        for Overdue { cid } in found.drain(..) {
            match aborted.iter().find(|(known, _)| *known == cid) {
                None => {
                    queue.stats.timeouts += 1;
                    if shared.requests.send(OwnerRequest::Abort { qid: self.record.qid, cid }).is_ok() {
                        shared.aborts.fetch_add(1, Ordering::Relaxed);
                        aborted.push((cid, now_ns));
                    }
                }
                Some((_, since_ns)) if now_ns > since_ns + self.io_timeout_ns => {
                    if !*reset_requested {
                        let request = OwnerRequest::Reset { kind: ResetKind::Controller, reply: None };
                        *reset_requested = shared.requests.send(request).is_ok();
                    }
                }
                Some(_) => {}
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        let (handle, record) = (self.handle.clone(), self.record.clone());
        let deleting =
            DeletingQpair::new(&self.core, queue, handle, record, self.epoch, self.interrupt.take());
        // The queues exist on the controller, or may be about to.
        let requested = matches!(self.submission, SubmissionState::Connecting { requested: true });
        if self.record.state() == QpairState::Live(self.epoch)
            || requested && self.record.state() == QpairState::Pending(self.epoch)
        {
            self.record.set_state(QpairState::Deleting);
            self.core.add_poller(Box::new(deleting), Period::EveryTurn);
        } else {
            drop(deleting);
        }
    }
}

/// Entries of the rings: the least power of two above `depth`, limited to what the controller supports.
fn ring_entries(depth: u32, entries_max: u32) -> u32 {
    let mut entries = (depth + 1).next_power_of_two().max(ENTRIES_MIN);
    while entries > entries_max {
        entries /= 2;
    }
    entries
}
