//! The core that owns a controller: its admin queue, its resets, its events.
//!
//! One poller looks at the admin queue and the mailbox every turn; everything that takes more than one
//! command is a task. Nothing here is on the path of an I/O.

mod attach;
mod events;
mod reset;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memory::Buffer;
use reactor::{Core, Poller, Receiver, Shutdown, Work};
use ring::{Status, Tag};
use sys::clock::now_ns;
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::queue::{CreateIoCq, CreateIoSq, DeleteQueue};
use wire_nvme::{Sqe, admin};

use crate::command::{Command, Executed};
use crate::error::{AdminError, Failure};
use crate::queue::Queue;
use crate::registers::RegisterFile;
use crate::shared::{AdminAnswer, AdminData, Ask, Phase, Record, Reply, ResetKind, Shared, State};

pub(crate) use attach::{attach, opening};

/// Commands on the admin queue at once.
const ADMIN_DEPTH: u32 = 31;
/// Entries of the admin rings.
const ADMIN_ENTRIES: u32 = 32;
/// Asks that can wait.
pub(crate) const ASKS_MAX: usize = 256;
/// Asks taken in one turn, so that data pollers get theirs.
const ASKS_PER_TURN_MAX: usize = 16;
/// How often the admin queue is looked at when nothing but events is expected.
const IDLE_POLL_NS: u64 = 50_000_000;
/// How often the controller is asked how it is.
const HEALTH_NS: u64 = 500_000_000;
/// How long the owner's reactor waits, when it stops, for the controller's users to let go.
const USERS_GRACE_NS: u64 = 100_000_000;

/// The owner of a controller.
pub(crate) struct Owner {
    core: Core,
    shared: Arc<Shared>,
    /// `None` until the admin queue was made.
    queue: RefCell<Option<Queue>>,
    asks: RefCell<Receiver<Ask>>,
    waiting: RefCell<HashMap<Tag, Waiting>>,
    next_tag: Cell<u64>,
    /// A reset is under way.
    resetting: Cell<bool>,
    /// When the latest resets began.
    resets: RefCell<Vec<u64>>,
    /// Asynchronous Event Requests that the controller has.
    event_requests: Cell<u32>,
    /// Where the device finds the shadow doorbells, if it has any.
    shadow_at: Cell<Option<u64>>,
    health_due_ns: Cell<u64>,
    polled_ns: Cell<u64>,
    over: Cell<bool>,
    shutdown_ns: Cell<u64>,
}

/// Who waits for an admin command.
struct Waiting {
    deadline_ns: u64,
    reply: Arc<Reply<Executed>>,
}

/// Tags from here on are Asynchronous Event Requests.
const EVENT_TAG: u64 = 1 << 63;

impl Owner {
    fn new(core: &Core, shared: &Arc<Shared>, asks: Receiver<Ask>) -> Rc<Owner> {
        Rc::new(Owner {
            core: core.clone(),
            shared: shared.clone(),
            queue: RefCell::new(None),
            asks: RefCell::new(asks),
            waiting: RefCell::default(),
            next_tag: Cell::new(0),
            resetting: Cell::new(false),
            resets: RefCell::default(),
            event_requests: Cell::new(0),
            shadow_at: Cell::new(None),
            // Not before it was brought up.
            health_due_ns: Cell::new(u64::MAX),
            polled_ns: Cell::new(0),
            over: Cell::new(false),
            shutdown_ns: Cell::new(0),
        })
    }

    fn registers(&self) -> RegisterFile<'_> {
        RegisterFile(self.shared.device())
    }

    /// Executes an admin command. Buffers stay with the command if the caller gives up.
    async fn execute(&self, sqe: Sqe, data: Option<Buffer>) -> Result<Executed, AdminError> {
        self.run(Command::raw(Tag(0), sqe, data, None)).await
    }

    /// Executes a command of ours whose data pointer is filled in.
    async fn execute_raw(&self, sqe: Sqe) -> Result<u64, AdminError> {
        let executed = self.run(Command::pointing(sqe)).await?;
        match executed.status() {
            status if status.is_success() => Ok(executed.result),
            status => Err(AdminError::Status(status)),
        }
    }

    async fn run(&self, mut command: Command) -> Result<Executed, AdminError> {
        let tag = Tag(self.next_tag.get());
        self.next_tag.set((tag.0 + 1) & (EVENT_TAG - 1));
        let deadline_ns = now_ns() + self.shared.options.timeout_ns;
        let reply = Reply::new();
        command.tag = tag;
        let mut batch = vec![command];
        let mut refused = Vec::new();
        loop {
            match &mut *self.queue.borrow_mut() {
                Some(queue) if self.shared.signal().state() != State::Dead => {
                    queue.submit_commands(&mut batch, &mut refused, now_ns());
                }
                _ => return Err(AdminError::Failure(self.reason())),
            }
            if batch.is_empty() {
                break;
            }
            if now_ns() > deadline_ns {
                return Err(AdminError::Busy);
            }
            // Full: there is no event for room, and control may wait.
            self.core.sleep_ns(100_000).await;
        }
        if let Some(executed) = refused.pop() {
            return Err(AdminError::Status(executed.status()));
        }
        self.waiting.borrow_mut().insert(tag, Waiting { deadline_ns, reply: reply.clone() });
        let executed = reply.take().await;
        if executed.status() == Status::ABORTED_BY_HOST {
            return Err(self.shared.failure().map_or(AdminError::Reset, AdminError::Failure));
        }
        Ok(executed)
    }

    /// The same, with data in and out of a buffer of the core's.
    async fn execute_with(&self, sqe: Sqe, data: AdminData) -> Result<AdminAnswer, AdminError> {
        let take = |length: usize| {
            if length == 0 || length > memory::BUFFER_BYTES_MAX {
                return Err(AdminError::Length(length));
            }
            self.core.pool().take(length).ok_or(AdminError::NoMemory)
        };
        let buffer = match &data {
            AdminData::None => None,
            AdminData::In(length) => {
                // What the controller does not write must not be what lay there.
                let mut buffer = take(*length)?;
                buffer.clear();
                Some(buffer)
            }
            AdminData::Out(bytes) => {
                let mut buffer = take(bytes.len())?;
                buffer.as_mut_slice().copy_from_slice(bytes);
                Some(buffer)
            }
        };
        let executed = self.execute(sqe, buffer).await?;
        if !executed.status().is_success() {
            return Err(AdminError::Status(executed.status()));
        }
        let back = executed.command.data.as_ref().filter(|_| matches!(data, AdminData::In(_)));
        let data = back.map_or_else(Vec::new, |buffer| buffer.as_slice().to_vec());
        Ok(AdminAnswer { result: executed.result, data })
    }

    fn reason(&self) -> Failure {
        self.shared.failure().unwrap_or(Failure::Detached)
    }

    /// Looks at the admin queue; returns how much there was.
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
            self.spawn_offline(Failure::Queue { qid: 0, what });
        }
        count
    }

    fn deliver(self: &Rc<Self>, executed: Executed) {
        if executed.tag().0 & EVENT_TAG != 0 {
            self.event_arrived(&executed);
        } else if let Some(waiting) = self.waiting.borrow_mut().remove(&executed.tag()) {
            waiting.reply.put(executed);
        }
    }

    /// Takes what was asked; each ask is a task of its own.
    fn take_asks(self: &Rc<Self>) -> usize {
        let mut count = 0;
        while count < ASKS_PER_TURN_MAX {
            let Some(ask) = self.asks.borrow_mut().receive() else { break };
            count += 1;
            let owner = self.clone();
            // A core with thousands of tasks refuses one: then whoever asked asks again, or gives up.
            self.core.spawn(async move { owner.answer(ask).await });
        }
        if self.shared.detach.swap(false, Ordering::AcqRel) {
            count += 1;
            let owner = self.clone();
            self.core.spawn(async move { owner.answer(Ask::Detach).await });
        }
        count
    }

    async fn answer(self: Rc<Self>, ask: Ask) {
        match ask {
            Ask::Create(record) => self.create_queue(&record).await,
            Ask::Delete(record) => self.delete_queue(&record).await,
            Ask::Admin { sqe, data, reply } => reply.put(self.execute_with(sqe, data).await),
            Ask::Abort { qid, cid } => {
                let sqe = Sqe { flags: 0, ..admin::Abort { sqid: qid, cid }.to_sqe() };
                // Whether it was aborted shows in the command's own completion.
                let _ = self.execute(sqe, None).await;
            }
            Ask::Namespace { nsid, reply } => reply.put(self.learn_namespace(nsid).await.map(|_| ())),
            Ask::Reset { how, reply } => {
                let outcome = self.reset(how).await;
                if let Some(reply) = reply {
                    reply.put(outcome);
                }
            }
            Ask::Broken(failure) => self.offline(failure).await,
            Ask::Detach => self.detach().await,
        }
    }

    /// Makes a queue pair whose memory is ready, in the epoch that it is ready for.
    async fn create_queue(&self, record: &Arc<Record>) {
        let signal = self.shared.signal();
        if record.phase() != Phase::Empty(signal.epoch()) || signal.state() != State::Running {
            // It was made ready for another epoch, or this one has not begun: its core asks again.
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
            // It may have begun to leave meanwhile, or a reset may have come in between.
            Ok(_)
                if self.shared.signal().epoch() == signal.epoch()
                    && record.phase() == Phase::Empty(signal.epoch()) =>
            {
                record.set_phase(Phase::Live(signal.epoch()));
            }
            Err(AdminError::Status(status)) => record.set_phase(Phase::Refused(status.field())),
            _ => {}
        }
    }

    async fn delete_queue(&self, record: &Arc<Record>) {
        let epoch = self.shared.signal().epoch();
        for opcode in [AdminOpcode::DeleteIoSq, AdminOpcode::DeleteIoCq] {
            let sqe = DeleteQueue { qid: record.qid }.to_sqe(opcode);
            if let Err(AdminError::Status(_)) = self.execute_with(sqe, AdminData::None).await {
                // Only a reset can make sure of the memory then.
                if self.shared.signal().epoch() == epoch {
                    let _ = self.reset_now().await;
                }
                return;
            }
        }
        if self.shared.signal().epoch() == epoch {
            record.set_phase(Phase::Gone);
        }
    }

    /// Starts looking after overdue commands and the controller's health.
    fn watch(self: &Rc<Self>, now_ns: u64) {
        let is_overdue = |waiting: &Waiting| now_ns > waiting.deadline_ns;
        if self.waiting.borrow().values().any(is_overdue) {
            if self.resetting.get() {
                // A reset that gets no answer has failed; it is who waits. The command keeps its slot and
                // its memory until the device is off.
                self.give_up(is_overdue);
            } else {
                // Who waits is told once; the reset ends every command.
                self.waiting.borrow_mut().values_mut().for_each(|waiting| waiting.deadline_ns = u64::MAX);
                self.spawn_reset();
            }
        }
        if now_ns < self.health_due_ns.get() {
            return;
        }
        self.health_due_ns.set(now_ns + HEALTH_NS);
        if self.shared.signal().state() != State::Running || self.resetting.get() {
            return;
        }
        if !self.shared.device().is_present() {
            self.spawn_offline(Failure::Removed);
            return;
        }
        match self.registers().status() {
            Ok(status) if status.fatal => self.spawn_reset(),
            // Somebody else has disabled it.
            Ok(status) if !status.ready => self.spawn_reset(),
            Ok(_) => {}
            Err(failure) => self.spawn_offline(failure),
        }
    }

    /// Tells those who wait for overdue commands that there is no answer.
    fn give_up(&self, is_overdue: impl Fn(&Waiting) -> bool) {
        let overdue: Vec<(Tag, Waiting)> =
            self.waiting.borrow_mut().extract_if(|_, waiting| is_overdue(waiting)).collect();
        for (tag, waiting) in overdue {
            let nothing = Command::raw(tag, Sqe::default(), None, None);
            waiting.reply.put(nothing.refuse(Status::ABORTED_BY_HOST));
        }
    }

    fn spawn_reset(self: &Rc<Self>) {
        let owner = self.clone();
        self.core.spawn(async move {
            let _ = owner.reset(ResetKind::Controller).await;
        });
    }

    fn spawn_offline(self: &Rc<Self>, failure: Failure) {
        let owner = self.clone();
        self.core.spawn(async move { owner.offline(failure).await });
    }
}

/// Polls the owner. Dropped before it is over, it takes memory away from the device at once.
pub(crate) struct OwnerPoller {
    owner: Rc<Owner>,
    name: String,
}

impl Poller for OwnerPoller {
    fn name(&self) -> &str {
        &self.name
    }

    fn poll(&mut self, now_ns: u64) -> Work {
        let owner = &self.owner;
        if owner.over.get() {
            return Work::Finished;
        }
        owner.polled_ns.set(now_ns);
        let count = owner.poll_queue() + owner.take_asks();
        owner.watch(now_ns);
        Work::count(count)
    }

    fn deadline(&self) -> Option<u64> {
        if self.owner.over.get() || !self.owner.waiting.borrow().is_empty() {
            return Some(0);
        }
        Some(self.owner.polled_ns.get() + IDLE_POLL_NS)
    }

    fn shutdown(&mut self, now_ns: u64) -> Shutdown {
        let owner = &self.owner;
        if owner.over.get() {
            return Shutdown::Done;
        }
        if owner.shutdown_ns.get() == 0 {
            owner.shutdown_ns.set(now_ns.max(1));
        } else if now_ns > owner.shutdown_ns.get() + USERS_GRACE_NS {
            owner.shutdown_ns.set(u64::MAX - USERS_GRACE_NS);
            owner.shared.detach.store(true, Ordering::Release);
        }
        Shutdown::Draining
    }
}

impl Drop for OwnerPoller {
    fn drop(&mut self) {
        if self.owner.over.get() {
            return;
        }
        // The reactor ends without having drained. Nobody will ask the controller anything any more.
        self.owner.shared.set_failure(Failure::Detached);
        self.owner.let_go();
    }
}
