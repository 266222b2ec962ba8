//! The PCI function of one client: an NVMe controller's registers, queues, memory and interrupts.

mod admin;
mod io;
mod link;
mod regions;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block_io::Status;
use dma::Pool;
use nvme_controller::queues::QueueLookup;
use nvme_controller::{
    AdminConnect, Controller, ControllerAction, ControllerAssociation, ControllerDirectory, ControllerEvent,
    ControllerLimits, IoQueue, NamespaceTable, Subsystem,
};
use rustix::io::Errno;
use target_shell::{MemoryShare, Polling};
use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::sqe;
use wire_vfio_user::{DmaMap, DmaUnmap, IrqInfo, SetIrqs};

use super::connection::ClientEndpoint;
use super::data::DataSegment;
use super::doorbells::{BAR0_BYTES, ControllerDoorbells, DOORBELLS_BYTES};
use super::interrupts::{ClientInterrupts, VectorSet};
use super::limits::VfioUserLimits;
use super::memory::{ClientMemory, UnmappedRanges};
use super::pci::PciConfigSpace;
use super::protocol::ClientQueueReport;
use super::queue::{CompletionQueue, QueueMemory, SubmissionQueue, SubmissionQueueState, SubmissionRing};
use crate::queue_totals::QueueTotals;
use crate::snapshot::ConfigSnapshot;

pub(super) use link::SegmentList;

/// Queue pairs that have doorbells, the admin queue included.
pub(super) const QUEUES_MAX: u16 = (DOORBELLS_BYTES / 8) as u16;
/// Commands of a queue that a request's tag can address.
const COMMANDS_MAX: u32 = 1 << 16;
/// Submission queue entries that are fetched at a time.
const FETCHED_MAX: usize = 32;
/// Commands of a client in one poll, and bytes of their data: then the core turns to its other work. A device
/// in memory copies that many bytes within a millisecond or two, and nothing that polls cost is noticeable
/// beside them. A client may have 500 queues with 1023 commands of 128 KiB.
const POLL_COMMANDS_MAX: u32 = 1024;
const POLL_BYTES_MAX: u64 = 4 << 20;
/// A poll completes half of a queue's commands, or that many if that is more: the host works on their
/// completions while the core works on the others. A poll costs as much as about seven commands.
const POLL_QUEUE_COMMANDS_MIN: u32 = 16;

/// Injected faults; see the RPC `nvmf_vfio_user_inject`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InjectedFaults {
    /// Surprise removal: registers read as all ones, and commands are not fetched.
    pub(super) surprise_removed: bool,
    /// Number of completions to drop.
    pub(super) drop_completions: u32,
    /// A submission queue from which nothing is fetched.
    pub(super) stalled: Option<u16>,
}

/// The NVMe controller of one vfio-user client, as a PCI function.
///
/// It owns the client's DMA ranges, queues, doorbells, interrupts and commands in flight, all on one core;
/// the transport-independent [`Controller`] executes admin commands. Its session passes messages to it
/// (registers, DMA ranges, interrupts). Order of calls in a poll: [`fetch`](Self::fetch);
/// [`complete_direct`](Self::complete_direct) and [`complete`](Self::complete) when device requests have
/// completed; [`flush_completions`](Self::flush_completions). Each submission queue has an [`IoQueue`], which
/// executes its commands; a read or write whose data is contiguous needs no slot there, no pool buffer and no
/// copy.
pub(super) struct VfioUserFunction {
    controller: Controller,
    directory: Arc<ControllerDirectory>,
    subsystem: Arc<Subsystem>,
    namespaces: Rc<NamespaceTable>,
    portid: u16,
    totals: Rc<QueueTotals>,
    memory: ClientMemory,
    config: PciConfigSpace,
    interrupts: ClientInterrupts,
    /// The MSI-X table as the client wrote it. It is only stored: the client masks vectors itself.
    msix_table: Vec<u8>,
    doorbells: ControllerDoorbells,
    /// BAR0 is not mappable: doorbells are written by message.
    doorbells_trapped: bool,
    aqa: u32,
    asq: u64,
    acq: u64,
    sqs: Vec<Option<SubmissionQueue>>,
    cqs: Vec<Option<CompletionQueue>>,
    /// Identifiers of the submission queues that commands are fetched from, in ascending order.
    active_sqids: Vec<u16>,
    /// The I/O queue that is the first of the next poll, by its place among the active ones.
    next_io_queue: usize,
    /// Identifiers of completion queues with new entries.
    dirty_cqids: Vec<u16>,
    /// Some completion queue may have blocked completions.
    has_blocked_completions: bool,
    /// Scratch space for fetched submission queue entries.
    fetched: Box<[[u8; sqe::SIZE]; FETCHED_MAX]>,
    /// Some queue may have commands that can continue at once, or that wait for a buffer.
    has_ready: bool,
    has_deferred: bool,
    /// A command may have changed the deadline, or is deferred.
    rescheduled: bool,
    /// For fair queueing in the block device layer.
    flow: u16,
    segments: Vec<DataSegment>,
    actions: Vec<ControllerAction>,
    running: bool,
    /// Nothing is fetched, and the client is disconnected when the commands in flight have completed.
    draining: bool,
    /// Time of the last fetched command or doorbell message.
    last_activity_ns: u64,
    pub(super) faults: InjectedFaults,
}

impl VfioUserFunction {
    /// A function after power-on: the controller is disabled and has no queues.
    pub(super) fn new(
        admin: AdminConnect,
        transport: &VfioUserLimits,
        directory: &Arc<ControllerDirectory>,
        settings: &ConfigSnapshot,
        endpoint: &ClientEndpoint,
        flow: u16,
        now_ns: u64,
    ) -> Result<VfioUserFunction, Errno> {
        let limits = settings.controller_limits(&transport.controller);
        let vectors = limits.interrupt_vectors;
        let table_bytes = (u32::from(vectors) * 16).next_power_of_two().max(4096);
        let core = Controller::new(admin, limits.clone(), settings.discovery.clone(), now_ns);
        let subsystem = core.subsystem().clone();
        Ok(VfioUserFunction {
            namespaces: Rc::new(NamespaceTable::for_controller(
                &subsystem,
                endpoint.portid,
                &limits,
                directory,
                core.association(),
            )),
            directory: directory.clone(),
            controller: core,
            subsystem,
            portid: endpoint.portid,
            totals: endpoint.totals.clone(),
            memory: ClientMemory::default(),
            config: PciConfigSpace::new(BAR0_BYTES as u32, vectors, table_bytes, 4096),
            interrupts: ClientInterrupts::new(vectors)
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
            msix_table: vec![0; table_bytes as usize],
            doorbells: ControllerDoorbells::new()?,
            doorbells_trapped: transport.doorbells_trapped,
            aqa: 0,
            asq: 0,
            acq: 0,
            sqs: Vec::new(),
            cqs: Vec::new(),
            active_sqids: Vec::new(),
            next_io_queue: 0,
            dirty_cqids: Vec::new(),
            has_blocked_completions: false,
            fetched: Box::new([[0; sqe::SIZE]; FETCHED_MAX]),
            has_ready: false,
            has_deferred: false,
            rescheduled: false,
            flow,
            segments: Vec::new(),
            actions: Vec::new(),
            running: false,
            draining: false,
            last_activity_ns: now_ns,
            faults: InjectedFaults::default(),
        })
    }

    pub(super) fn association(&self) -> &Arc<ControllerAssociation> {
        self.controller.association()
    }

    /// Whether the controller is enabled and commands are fetched.
    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// How commands arrive: without a message through mapped doorbells, with one through those that are
    /// trapped.
    #[inline]
    pub(super) fn polling(&self) -> Polling {
        match (self.running, self.doorbells_trapped) {
            (false, _) => Polling::Off,
            (true, false) => Polling::Timed { active_ns: self.last_activity_ns },
            (true, true) => Polling::WhileAwake,
        }
    }

    /// Starts to drain: fetches nothing more, and signals the client's device request interrupt.
    pub(super) fn begin_drain(&mut self) {
        self.running = false;
        if !self.draining {
            self.draining = true;
            self.interrupts.request();
        }
    }

    #[inline]
    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether commands are in flight that a drain waits for.
    pub(super) fn has_pending(&self) -> bool {
        self.sqs.iter().flatten().any(|queue| queue.io.has_pending(|_| false))
    }

    /// Whether no device requests are outstanding.
    pub(super) fn is_idle(&self) -> bool {
        self.sqs.iter().flatten().all(|queue| queue.io.device_requests() == 0)
    }

    /// Whether [`resume`](Self::resume) has work, or the deadline may have changed.
    #[inline]
    pub(super) fn wants_resume(&self) -> bool {
        self.has_ready || self.rescheduled
    }

    /// Whether commands or completions wait for what no event reports.
    pub(super) fn is_waiting(&self) -> bool {
        self.has_deferred || self.has_ready || self.has_blocked_completions
    }

    /// Whether an access to client memory raised SIGBUS; the memory must not be used any longer.
    pub(super) fn is_poisoned(&self) -> bool {
        let submissions = self.sqs.iter().flatten().filter_map(|queue| queue.ring.memory.as_ref());
        self.memory.is_poisoned()
            || self.doorbells.is_poisoned()
            || submissions.into_iter().any(QueueMemory::is_poisoned)
            || self.cqs.iter().flatten().any(CompletionQueue::is_poisoned)
    }

    /// The submission queues.
    pub(super) fn sq_stats(&self) -> impl Iterator<Item = ClientQueueReport> + '_ {
        let stats = |(qid, queue): (usize, &Option<SubmissionQueue>)| {
            let ring = &queue.as_ref()?.ring;
            Some(ClientQueueReport {
                qid: qid as u16,
                entries: ring.entries,
                commands: ring.commands,
                errors: ring.errors,
                completed: ring.completed(),
            })
        };
        self.sqs.iter().enumerate().filter_map(stats)
    }

    /// The next timeout of the controller.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.controller.deadline()
    }

    /// Adds a DMA range. Queues whose memory was unmapped may become usable again.
    pub(super) fn map(&mut self, map: &DmaMap, file: Option<OwnedFd>, pool: &Pool) -> Result<(), Errno> {
        self.memory.map(pool, map, file)?;
        self.doorbells.remap(&self.memory);
        for queue in self.sqs.iter_mut().flatten().filter(|queue| queue.ring.memory.is_none()) {
            queue.ring.remap(&self.memory);
        }
        for queue in self.cqs.iter_mut().flatten() {
            queue.remap(&self.memory);
        }
        Ok(())
    }

    /// Removes DMA ranges. Queues in them stop; the reply waits for buffers that are lent to devices.
    pub(super) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<UnmappedRanges, Errno> {
        let unmapped = self.memory.unmap(unmap)?;
        self.doorbells.remap(&self.memory);
        for queue in self.sqs.iter_mut().flatten() {
            queue.ring.remap(&self.memory);
        }
        for queue in self.cqs.iter_mut().flatten() {
            queue.remap(&self.memory);
        }
        Ok(unmapped)
    }

    pub(super) fn interrupt_info(&self, request: &IrqInfo) -> Result<IrqInfo, Errno> {
        self.interrupts.info(request)
    }

    pub(super) fn set_interrupts(
        &mut self,
        set: &SetIrqs,
        data: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Errno> {
        self.interrupts.set(set, data, descriptors)
    }

    /// Releases the client's memory and interrupts after it disconnected. Buffers lent to devices stay mapped
    /// until they are returned.
    pub(super) fn disconnect(&mut self) {
        self.stop();
        self.sqs.iter_mut().flatten().for_each(|queue| queue.ring.count_completed());
        self.interrupts.clear();
        let _ = self.memory.unmap_all();
    }

    /// Starts a function reset. It is complete when [`is_idle`](Self::is_idle).
    pub(super) fn begin_reset(&mut self) {
        self.stop();
    }

    /// Disables the controller and closes all queues; commands in flight get no completion.
    fn stop(&mut self) {
        self.running = false;
        let mut actions = std::mem::take(&mut self.actions);
        self.controller.write_cc(0, &mut actions);
        actions.clear();
        self.actions = actions;
        self.close_queues(true);
        (self.aqa, self.asq, self.acq) = (0, 0, 0);
    }

    /// Closes the I/O queues and, if `admin`, the admin queue. Commands in flight get no completion.
    fn close_queues(&mut self, admin: bool) {
        self.active_sqids.retain(|qid| *qid == 0 && !admin);
        for qid in if admin { 0 } else { 1 }..self.sqs.len() as u16 {
            let Some(queue) = self.sq(qid) else { continue };
            queue.ring.state = SubmissionQueueState::Closed;
            if qid == 0 {
                // Admin commands have no device requests.
                queue.ring.in_flight = 0;
            }
            self.abort_pending(qid);
            self.reap(qid);
        }
        for (qid, queue) in self.cqs.iter_mut().enumerate() {
            if qid > 0 || admin {
                *queue = None;
            }
        }
        self.doorbells.reset(admin);
    }

    /// Applies a new configuration snapshot.
    pub(super) fn apply(&mut self, limits: &VfioUserLimits, config: &ConfigSnapshot, now_ns: u64) {
        match config.subsystem(&self.subsystem.nqn) {
            Some(subsystem) if !Arc::ptr_eq(&subsystem, &self.subsystem) => {
                self.subsystem = subsystem.clone();
                self.rebuild_namespace_table(&limits.controller);
                self.controller_event(ControllerEvent::SubsystemChanged(subsystem), now_ns);
            }
            Some(_) => {}
            None => {
                // Its backend keys may soon be reused for other devices: deferred commands are rejected.
                self.set_namespaces(NamespaceTable::default());
                self.controller_event(ControllerEvent::SubsystemRemoved, now_ns);
            }
        }
    }

    /// Rebuilds the table of namespaces.
    fn rebuild_namespace_table(&mut self, limits: &ControllerLimits) {
        let association = self.controller.association();
        self.set_namespaces(NamespaceTable::for_controller(
            &self.subsystem,
            self.portid,
            limits,
            &self.directory,
            association,
        ));
    }

    fn set_namespaces(&mut self, namespaces: NamespaceTable) {
        self.namespaces = Rc::new(namespaces);
        for queue in self.sqs.iter_mut().flatten() {
            queue.io.set_namespaces(self.namespaces.clone());
        }
    }

    /// Sets the controller's fatal status.
    pub(super) fn fail(&mut self) {
        self.controller.fail();
        self.running = false;
    }

    /// Passes an event to the controller and performs the resulting actions.
    pub(super) fn controller_event(&mut self, event: ControllerEvent<'_>, now_ns: u64) {
        let mut actions = std::mem::take(&mut self.actions);
        self.controller.handle(event, now_ns, &mut actions);
        let mut closes = false;
        for action in actions.drain(..) {
            match action {
                // Only Asynchronous Event Requests complete asynchronously.
                ControllerAction::Complete(completion) => self.complete_event_request(&completion.cqe),
                ControllerAction::CloseIoQueues => closes = true,
                // The queues close with the function, when the commands in flight have completed.
                ControllerAction::Terminate(_) => {
                    closes = false;
                    self.begin_drain();
                }
            }
        }
        self.actions = actions;
        if closes {
            // An NVM Subsystem Reset. Commands that it aborts get no completion.
            self.close_queues(true);
        }
        self.running &= self.controller.is_enabled();
    }

    /// Handles a write to CC.
    fn write_cc(&mut self, value: u32) {
        let was_enabled = self.controller.is_enabled();
        let mut actions = std::mem::take(&mut self.actions);
        self.controller.write_cc(value, &mut actions);
        // Commands that a reset aborts get no completion: their queue is gone.
        let closes = actions.contains(&ControllerAction::CloseIoQueues);
        actions.clear();
        self.actions = actions;
        let enabled = value & 1 != 0;
        if closes {
            self.close_queues(!enabled);
        }
        self.running = self.controller.is_enabled() && !self.draining;
        if !was_enabled && self.running {
            self.enable();
        }
        self.running &= enabled;
    }

    /// Handles a write to CSTS or NSSR.
    fn write_reset_register(&mut self, at: u32, value: u32) {
        let mut actions = std::mem::take(&mut self.actions);
        self.controller.write_reset_register(at, value, &mut actions);
        if actions.contains(&ControllerAction::CloseIoQueues) {
            self.close_queues(true);
        }
        actions.clear();
        self.actions = actions;
        self.running &= self.controller.is_enabled();
    }

    /// Creates the admin queues from AQA, ASQ and ACQ; sets CSTS.CFS if they are invalid.
    fn enable(&mut self) {
        let AdminQueueAttributes { submission_entries, completion_entries } =
            AdminQueueAttributes::decode(self.aqa);
        let (asq, acq) = (self.asq, self.acq);
        let aligned = (asq | acq).is_multiple_of(super::data::PAGE);
        let valid_sizes = submission_entries >= 2 && completion_entries >= 2;
        let bytes = |entries: u32, entry_bytes: u64| u64::from(entries) * entry_bytes;
        let submission =
            QueueMemory::locate(&self.memory, asq, bytes(submission_entries, SubmissionRing::BYTES), false);
        let completion =
            QueueMemory::locate(&self.memory, acq, bytes(completion_entries, CompletionQueue::BYTES), true);
        let (Some(place), Some(completion), true, true) = (submission, completion, aligned, valid_sizes)
        else {
            return self.fail();
        };
        self.create_sq(0, submission_entries, asq, place, 0, None);
        self.create_cq(0, completion_entries, acq, completion, Some(0));
    }

    fn create_sq(
        &mut self,
        qid: u16,
        entries: u32,
        address: u64,
        place: QueueMemory,
        cqid: u16,
        lease: Option<nvme_controller::QueueLease>,
    ) {
        let doorbell = u64::from(qid) * 2;
        self.doorbells.reset_doorbell(doorbell);
        self.totals.opened(qid);
        let ring = SubmissionRing {
            qid,
            totals: self.totals.clone(),
            entries,
            head: 0,
            cqid,
            doorbell,
            address,
            memory: Some(place),
            in_flight: 0,
            state: SubmissionQueueState::Active,
            lease,
            invalid_tail: 0,
            commands: 0,
            errors: 0,
        };
        // A command in flight has an entry of the completion queue. The client's memory bounds what lends
        // buffers; those of the pool are bounded by the pool.
        let slots = self.cq(cqid).map_or(0, |completions| completions.entries).min(COMMANDS_MAX);
        let io = IoQueue::new(slots, MemoryShare::unlimited(), self.namespaces.clone());
        let queue = SubmissionQueue { ring, io };
        insert_queue(&mut self.sqs, qid, queue);
        self.active_sqids.push(qid);
        self.active_sqids.sort_unstable();
    }

    fn create_cq(&mut self, qid: u16, entries: u32, address: u64, place: QueueMemory, vector: Option<u16>) {
        let doorbell = u64::from(qid) * 2 + 1;
        self.doorbells.reset_doorbell(doorbell);
        insert_queue(&mut self.cqs, qid, CompletionQueue::new(entries, address, place, doorbell, vector));
    }

    #[inline]
    fn sq(&mut self, qid: u16) -> Option<&mut SubmissionQueue> {
        self.sqs.get_mut(usize::from(qid))?.as_mut()
    }

    #[inline]
    fn cq(&mut self, qid: u16) -> Option<&mut CompletionQueue> {
        self.cqs.get_mut(usize::from(qid))?.as_mut()
    }

    /// Writes blocked completions that fit now, and signals interrupts.
    #[inline]
    pub(super) fn flush_completions(&mut self) {
        if self.has_blocked_completions {
            self.flush_each_blocked();
            // Retried also when nothing is fetched.
            self.rescheduled = self.has_blocked_completions && !self.running;
        }
        if !self.dirty_cqids.is_empty() {
            self.interrupt();
        }
    }

    /// Signals the interrupt vectors of completion queues with new entries, each vector once.
    fn interrupt(&mut self) {
        let mut signalled = VectorSet::default();
        for index in 0..self.dirty_cqids.len() {
            let qid = self.dirty_cqids[index];
            let Some(Some(queue)) = self.cqs.get_mut(usize::from(qid)) else { continue };
            queue.dirty = false;
            if let Some(vector) = queue.vector
                && signalled.insert(vector)
            {
                self.interrupts.trigger(vector);
            }
        }
        self.dirty_cqids.clear();
    }

    /// Writes blocked completions. Returns the number of queues that were written.
    #[cold]
    fn flush_each_blocked(&mut self) -> usize {
        let (mut any_blocked, mut written) = (false, 0);
        for (qid, queue) in self.cqs.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            if !queue.has_blocked() {
                continue;
            }
            let was_dirty = queue.dirty;
            queue.flush_blocked(&self.doorbells);
            any_blocked |= queue.has_blocked();
            if queue.dirty && !was_dirty {
                self.dirty_cqids.push(qid as u16);
                written += 1;
            }
        }
        self.has_blocked_completions = any_blocked;
        written
    }
}

impl QueueLookup for VfioUserFunction {
    fn has_submission(&self, qid: u16) -> bool {
        self.sqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    fn has_completion(&self, qid: u16) -> bool {
        self.cqs.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    fn is_in_use(&self, cqid: u16) -> bool {
        self.sqs.iter().skip(1).flatten().any(|queue| queue.ring.cqid == cqid)
    }
}

fn insert_queue<T>(queues: &mut Vec<Option<T>>, qid: u16, queue: T) {
    let index = usize::from(qid);
    if queues.len() <= index {
        queues.resize_with(index + 1, || None);
    }
    queues[index] = Some(queue);
}

/// Status of a command whose data or queue memory is not mapped.
const MEMORY_NOT_MAPPED: Status = Status::DATA_TRANSFER_ERROR;
