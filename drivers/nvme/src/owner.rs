//! The owner core of a controller: admin queue, resets and asynchronous events.
//!
//! One poller processes the admin queue and the mailbox every reactor turn; an operation of more than one
//! command is a task. Nothing here is on the I/O path.

mod attach;
mod events;
mod reset;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use block_io::Tag;
use dma::Buffer;
use reactor::{Core, MailboxReceiver, PollResult, Poller, Shutdown};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};
use wire_nvme::{Sqe, admin};

use crate::command::{Command, CommandCompletion};
use crate::error::{AdminError, ControllerFailure};
use crate::queue::MemoryQueue;
use crate::registers::RegisterFile;
use crate::shared::{
    AdminData, AdminOutput, Oneshot, OwnerRequest, QpairRecord, QpairState, ResetKind, RunState,
    SharedController,
};

pub(crate) use attach::{attach, identify_page};

/// Most admin commands in flight.
const ADMIN_DEPTH: u32 = 31;
/// Entries of the admin submission and completion queues.
const ADMIN_ENTRIES: u32 = 32;
/// Capacity of the owner's mailbox.
pub(crate) const OWNER_REQUESTS_MAX: usize = 256;
/// Most requests taken from the mailbox in one turn, so that I/O pollers on the core are not starved.
const REQUESTS_PER_TURN_MAX: usize = 16;
/// Interval at which the admin queue is polled when only asynchronous events are outstanding.
const IDLE_POLL_NS: u64 = 50_000_000;
/// Interval of the health check: presence and CSTS.
const HEALTH_CHECK_NS: u64 = 500_000_000;
/// How long a stopping reactor waits for users to drop their handles before it detaches the controller.
const USERS_GRACE_NS: u64 = 100_000_000;

/// The owner of a controller: it executes admin commands, creates and deletes I/O queues, resets and shuts down.
///
/// It lives on one core. [`attach()`] creates it with its [`OwnerPoller`] and initializes the controller. Other
/// cores send an [`OwnerRequest`] through [`SharedController`]; each request runs as a task of its own.
/// After [`detach`](Self::detach) the poller finishes and the owner is dropped.
pub(crate) struct ControllerOwner {
    core: Core,
    shared: Arc<SharedController>,
    /// `None` until the admin queue is created.
    queue: RefCell<Option<MemoryQueue>>,
    requests: RefCell<MailboxReceiver<OwnerRequest>>,
    pending: RefCell<HashMap<Tag, PendingAdmin>>,
    next_tag: Cell<u64>,
    /// A reset, shutdown or failure is in progress.
    resetting: Cell<bool>,
    /// Start times of recent resets, in nanoseconds.
    resets: RefCell<Vec<u64>>,
    /// Asynchronous Event Requests outstanding.
    event_requests: Cell<u32>,
    /// Device address of the shadow doorbells, if they are in use.
    shadow_address: Cell<Option<u64>>,
    /// `None` until the controller is initialized.
    health_due_ns: Cell<Option<u64>>,
    polled_ns: Cell<u64>,
    finished: Cell<bool>,
    shutdown: Cell<OwnerShutdown>,
}

/// How far the shutdown is that a stopping reactor requests.
#[derive(Clone, Copy)]
enum OwnerShutdown {
    No,
    /// Users may drop their handles until this time, in nanoseconds.
    GraceUntil(u64),
    Detaching,
}

/// The requester of an admin command in flight.
struct PendingAdmin {
    /// `None` once it has passed and a reset was started, which aborts the command.
    deadline_ns: Option<u64>,
    reply: Arc<Oneshot<AdminOutcome>>,
}

/// How an admin command ended. A controller may itself complete a command with any status, so that a status cannot
/// tell that the driver has aborted it.
enum AdminOutcome {
    Completed(CommandCompletion),
    /// The driver aborted the command, because of a reset, a failure or its deadline.
    Aborted,
}

/// Tag bit of Asynchronous Event Requests.
const EVENT_TAG: u64 = 1 << 63;

impl ControllerOwner {
    fn new(
        core: &Core,
        shared: &Arc<SharedController>,
        requests: MailboxReceiver<OwnerRequest>,
    ) -> Rc<ControllerOwner> {
        Rc::new(ControllerOwner {
            core: core.clone(),
            shared: shared.clone(),
            queue: RefCell::new(None),
            requests: RefCell::new(requests),
            pending: RefCell::default(),
            next_tag: Cell::new(0),
            resetting: Cell::new(false),
            resets: RefCell::default(),
            event_requests: Cell::new(0),
            shadow_address: Cell::new(None),
            health_due_ns: Cell::new(None),
            polled_ns: Cell::new(0),
            finished: Cell::new(false),
            shutdown: Cell::new(OwnerShutdown::No),
        })
    }

    fn registers(&self) -> RegisterFile<'_> {
        RegisterFile(self.shared.device())
    }

    /// Executes an admin command. If the caller is dropped, the buffer stays with the command until it completes.
    async fn execute(&self, sqe: Sqe, data: Option<Buffer>) -> Result<CommandCompletion, AdminError> {
        self.run(Command::raw(Tag(0), sqe, data, None)).await
    }

    /// Executes a command whose data pointer the driver has filled in.
    async fn execute_raw(&self, sqe: Sqe) -> Result<u64, AdminError> {
        let executed = self.run(Command::with_data_pointer(sqe)).await?;
        match executed.status() {
            status if status.is_success() => Ok(executed.result),
            status => Err(AdminError::Status(status)),
        }
    }

    async fn run(&self, mut command: Command) -> Result<CommandCompletion, AdminError> {
        let tag = Tag(self.next_tag.get());
        self.next_tag.set((tag.0 + 1) & (EVENT_TAG - 1));
        let deadline_ns = self.core.now_ns() + self.shared.options.timeout_ns;
        let reply = Oneshot::new();
        command.tag = tag;
        let mut batch = vec![command];
        let mut refused = Vec::new();
        loop {
            match &mut *self.queue.borrow_mut() {
                Some(queue) if self.shared.state_word().state() != RunState::Dead => {
                    queue.submit_commands(&mut batch, &mut refused, self.core.now_ns());
                }
                _ => return Err(AdminError::Failure(self.reason())),
            }
            if batch.is_empty() {
                break;
            }
            if self.core.now_ns() > deadline_ns {
                return Err(AdminError::Busy);
            }
            // The queue is full: retry; admin commands are not latency-critical.
            self.core.sleep_ns(100_000).await;
        }
        if let Some(executed) = refused.pop() {
            return Err(AdminError::Status(executed.status()));
        }
        self.pending
            .borrow_mut()
            .insert(tag, PendingAdmin { deadline_ns: Some(deadline_ns), reply: reply.clone() });
        match reply.receive().await {
            AdminOutcome::Completed(executed) => Ok(executed),
            AdminOutcome::Aborted => {
                Err(self.shared.failure().map_or(AdminError::Reset, AdminError::Failure))
            }
        }
    }

    /// Executes an admin command and copies its data through a buffer of this core's pool.
    async fn execute_with(&self, sqe: Sqe, data: AdminData) -> Result<AdminOutput, AdminError> {
        let executed = self.execute(sqe, data.take_buffer(self.core.pool())?).await?;
        if !executed.status().is_success() {
            return Err(AdminError::Status(executed.status()));
        }
        let data = data.read_back(executed.command.data.as_ref());
        Ok(AdminOutput { result: executed.result, data })
    }

    fn reason(&self) -> ControllerFailure {
        self.shared.failure().unwrap_or(ControllerFailure::Detached)
    }

    /// Polls the admin queue; returns the number of completions.
    fn poll_queue(self: &Rc<Self>) -> usize {
        let (mut ios, mut done) = (Vec::new(), Vec::new());
        let reaped = match &mut *self.queue.borrow_mut() {
            Some(queue) => queue.reap(&mut ios, &mut done),
            None => Ok(0),
        };
        let count = done.len();
        for executed in done {
            self.deliver(executed);
        }
        if let Err(what) = reaped {
            self.spawn_offline(ControllerFailure::BadCompletion { qid: 0, what });
        }
        count
    }

    fn deliver(self: &Rc<Self>, executed: CommandCompletion) {
        if executed.tag().0 & EVENT_TAG != 0 {
            self.on_async_event(&executed);
        } else if let Some(pending) = self.pending.borrow_mut().remove(&executed.tag()) {
            pending.reply.send(AdminOutcome::Completed(executed));
        }
    }

    /// Receives requests from the mailbox and spawns a task for each; returns their number.
    fn receive_requests(self: &Rc<Self>) -> usize {
        let mut count = 0;
        while count < REQUESTS_PER_TURN_MAX {
            let Some(request) = self.requests.borrow_mut().receive() else { break };
            count += 1;
            let owner = self.clone();
            // A core at its task limit rejects the spawn: the requester retries or times out.
            self.core.spawn(async move { owner.handle_request(request).await });
        }
        if self.shared.detach.swap(false, Ordering::AcqRel) {
            count += 1;
            let owner = self.clone();
            self.core.spawn(async move { owner.handle_request(OwnerRequest::Detach).await });
        }
        count
    }

    async fn handle_request(self: Rc<Self>, request: OwnerRequest) {
        match request {
            OwnerRequest::CreateQpair(record) => self.create_queue(&record).await,
            OwnerRequest::DeleteQpair(record) => self.delete_queue(&record).await,
            OwnerRequest::Admin { sqe, data, reply } => reply.send(self.execute_with(sqe, data).await),
            OwnerRequest::Abort { qid, cid } => {
                let sqe = Sqe { flags: 0, ..admin::Abort { sqid: qid, cid }.to_sqe() };
                // The completion of the aborted command itself shows the outcome.
                let _ = self.execute(sqe, None).await;
            }
            OwnerRequest::IdentifyNamespace { nsid, reply } => {
                reply.send(self.refresh_namespace(nsid).await.map(|_| ()))
            }
            OwnerRequest::Reset { kind, reply } => {
                let outcome = self.reset(kind).await;
                if let Some(reply) = reply {
                    reply.send(outcome);
                }
            }
            OwnerRequest::Fail(failure) => self.take_offline(failure).await,
            OwnerRequest::Detach => self.detach().await,
        }
    }

    /// Creates the I/O queues of a queue pair, if its rings are prepared for the present epoch.
    async fn create_queue(&self, record: &Arc<QpairRecord>) {
        let word = self.shared.state_word();
        if record.state() != QpairState::Pending(word.epoch()) || word.state() != RunState::Running {
            // Prepared for another epoch, or the controller is not running: its core requests creation again.
            return;
        }
        let cq = CreateIoCq {
            address: record.cq,
            qid: record.qid,
            entries: record.entries,
            contiguous: true,
            interrupts: record.vector.is_some(),
            vector: record.vector.unwrap_or(0),
        };
        let sq = CreateIoSq {
            address: record.sq,
            qid: record.qid,
            entries: record.entries,
            contiguous: true,
            priority: 0,
            cqid: record.qid,
        };
        let mut outcome = self.execute_raw(cq.to_sqe()).await;
        if outcome.is_ok() {
            outcome = self.execute_raw(sq.to_sqe()).await;
            if matches!(outcome, Err(AdminError::Status(_))) {
                let delete = DeleteQueue { qid: record.qid }.to_sqe(AdminOpcode::DeleteIoCq);
                let _ = self.execute_with(delete, AdminData::None).await;
            }
        }
        match outcome {
            // Meanwhile its deletion may have been requested, or a reset may have happened.
            Ok(_)
                if self.shared.state_word().epoch() == word.epoch()
                    && record.state() == QpairState::Pending(word.epoch()) =>
            {
                record.set_state(QpairState::Live(word.epoch()));
            }
            Err(AdminError::Status(status)) => record.set_state(QpairState::Rejected(status.field())),
            _ => {}
        }
    }

    async fn delete_queue(&self, record: &Arc<QpairRecord>) {
        let epoch = self.shared.state_word().epoch();
        for opcode in [AdminOpcode::DeleteIoSq, AdminOpcode::DeleteIoCq] {
            let sqe = DeleteQueue { qid: record.qid }.to_sqe(opcode);
            if let Err(AdminError::Status(_)) = self.execute_with(sqe, AdminData::None).await {
                // The queue may still exist: only a reset guarantees that the device no longer accesses its memory.
                if self.shared.state_word().epoch() == epoch {
                    let _ = self.reset_controller().await;
                }
                return;
            }
        }
        if self.shared.state_word().epoch() == epoch {
            record.set_state(QpairState::Deleted);
        }
    }

    /// Starts recovery of timed-out admin commands, and checks the controller's health when it is due.
    fn check_timeouts_and_health(self: &Rc<Self>, now_ns: u64) {
        let is_overdue = |pending: &PendingAdmin| pending.deadline_ns.is_some_and(|at_ns| now_ns > at_ns);
        if self.pending.borrow().values().any(is_overdue) {
            if self.resetting.get() {
                // The requester is the reset itself, which fails when its commands time out. A command keeps its
                // slot and its memory until the device is disabled.
                self.fail_overdue(is_overdue);
            } else {
                // Trigger one reset only; it aborts every command.
                self.pending.borrow_mut().values_mut().for_each(|pending| pending.deadline_ns = None);
                self.spawn_reset();
            }
        }
        if self.health_due_ns.get().is_none_or(|due_ns| now_ns < due_ns) {
            return;
        }
        self.health_due_ns.set(Some(now_ns + HEALTH_CHECK_NS));
        if self.shared.state_word().state() != RunState::Running || self.resetting.get() {
            return;
        }
        if !self.shared.device().is_present() {
            self.spawn_offline(ControllerFailure::Removed);
            return;
        }
        match self.registers().status() {
            Ok(status) if status.fatal => self.spawn_reset(),
            // Another party has disabled the controller.
            Ok(status) if !status.ready => self.spawn_reset(),
            Ok(_) => {}
            Err(failure) => self.spawn_offline(failure),
        }
    }

    /// Ends overdue commands towards their requesters.
    fn fail_overdue(&self, is_overdue: impl Fn(&PendingAdmin) -> bool) {
        for (_, pending) in self.pending.borrow_mut().extract_if(|_, pending| is_overdue(pending)) {
            pending.reply.send(AdminOutcome::Aborted);
        }
    }

    fn spawn_reset(self: &Rc<Self>) {
        let owner = self.clone();
        self.core.spawn(async move {
            let _ = owner.reset(ResetKind::Controller).await;
        });
    }

    fn spawn_offline(self: &Rc<Self>, failure: ControllerFailure) {
        let owner = self.clone();
        self.core.spawn(async move { owner.take_offline(failure).await });
    }
}

/// Polls the owner. If it is dropped before the owner has finished, it stops the device's DMA at once.
pub(crate) struct OwnerPoller {
    owner: Rc<ControllerOwner>,
    name: String,
}

impl Poller for OwnerPoller {
    fn name(&self) -> &str {
        &self.name
    }

    fn poll(&mut self, now_ns: u64) -> PollResult {
        let owner = &self.owner;
        if owner.finished.get() {
            return PollResult::Finished;
        }
        owner.polled_ns.set(now_ns);
        let count = owner.poll_queue() + owner.receive_requests();
        owner.check_timeouts_and_health(now_ns);
        PollResult::from_count(count)
    }

    fn deadline(&self) -> Option<u64> {
        if self.owner.finished.get() || !self.owner.pending.borrow().is_empty() {
            return Some(0);
        }
        Some(self.owner.polled_ns.get() + IDLE_POLL_NS)
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        let owner = &self.owner;
        if owner.finished.get() {
            return Shutdown::Done;
        }
        match owner.shutdown.get() {
            OwnerShutdown::No => owner.shutdown.set(OwnerShutdown::GraceUntil(now_ns + USERS_GRACE_NS)),
            OwnerShutdown::GraceUntil(until_ns) if now_ns > until_ns => {
                owner.shutdown.set(OwnerShutdown::Detaching);
                owner.shared.detach.store(true, Ordering::Release);
            }
            OwnerShutdown::GraceUntil(_) | OwnerShutdown::Detaching => {}
        }
        Shutdown::Draining
    }
}

impl Drop for OwnerPoller {
    fn drop(&mut self) {
        if self.owner.finished.get() {
            return;
        }
        // The reactor ended without draining pollers: the controller has no owner any more.
        self.owner.shared.set_failure(ControllerFailure::Detached);
        self.owner.force_stop();
    }
}
