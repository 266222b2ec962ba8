//! The NVMe function of one client: registers, queues, memory and interrupts.

mod admin;
mod fused;
mod io;
mod regions;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use controller::io::Pairing;
use controller::queues::Existing;
use controller::reservation::{Drain, Parked, Ticket};
use controller::{
    Action, AdminConnect, Association, Controller, Directory, Event, Limits, NamespaceTable, Subsystem,
};
use memory::Pool;
use ring::Status;
use rustix::io::Errno;
use slots::{Slab, Slot};
use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::{Sqe, sqe};
use wire_vfio_user::{DmaMap, DmaUnmap, IrqInfo, SetIrqs};

use super::Shared;
use super::data::Piece;
use super::doorbells::{BAR0_BYTES, DOORBELLS_BYTES, Doorbells};
use super::interrupts::Interrupts;
use super::memory::{Leaving, Memory};
use super::pci::Config;
use super::queue::{Completion, Place, State, Submission};
use crate::connection::LEAVE_NS_MAX;
use crate::group::devices::Devices;

/// Queue pairs, the admin queue included, that doorbells are there for.
pub(super) const QUEUES_MAX: u16 = (DOORBELLS_BYTES / 8) as u16;
/// Commands under way that a request's tag can name by their slot.
const COMMANDS_MAX: u32 = 1 << 16;
/// Entries fetched in one piece.
const FETCHED_MAX: usize = 32;

/// What a core lends to a function.
pub(super) struct Lent<'a> {
    pub(super) pool: &'a Pool,
    pub(super) devices: &'a mut Devices,
    pub(super) shared: &'a Shared,
    pub(super) now_ns: u64,
    /// The part of requests' tags that says whose they are.
    pub(super) tag_base: u64,
    pub(super) flow: u16,
}

/// What goes wrong on purpose; see `nvmf_vfio_user_inject`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// The device has gone: registers read as ones, nothing is done.
    pub(super) gone: bool,
    /// Completions that are not written.
    pub(super) drop_completions: u32,
    /// A submission queue of which nothing is fetched.
    pub(super) stalled: Option<u16>,
}

pub(super) struct Function {
    core: Controller,
    directory: Arc<Directory>,
    subsystem: Arc<Subsystem>,
    namespaces: NamespaceTable,
    portid: u16,
    memory: Memory,
    config: Config,
    interrupts: Interrupts,
    /// What the client made of the MSI-X table. Where vectors are masked, it is the client that does it.
    table: Vec<u8>,
    doorbells: Doorbells,
    /// Nobody looks at doorbells unless they are rung by message.
    trapped: bool,
    aqa: u32,
    asq: u64,
    acq: u64,
    submissions: Vec<Option<Submission>>,
    completions: Vec<Option<Completion>>,
    /// Submission queues that are fetched from.
    active: Vec<u16>,
    /// Commands with something to do when devices are done with them.
    commands: Slab<io::Command>,
    /// So many more have nothing of that: their requests' tags say all that there is to know.
    direct: u32,
    /// Completion queues with something new.
    dirty: Vec<u16>,
    /// Some completion queue may hold entries back.
    holds: bool,
    /// Submission queue entries that were just fetched.
    fetched: Box<[[u8; sqe::SIZE]; FETCHED_MAX]>,
    /// Commands that wait for a buffer.
    aside: VecDeque<(u16, Sqe)>,
    /// Queues whose last command was the first of a fused operation, by identifier.
    pairings: Vec<(u16, Pairing<Sqe>)>,
    /// Fused operations that wait for buffers.
    pairs_aside: VecDeque<(u16, Sqe, Sqe)>,
    /// Copies whose next piece can be begun, and those that have no buffer yet.
    going: Vec<Slot>,
    starved: Vec<Slot>,
    /// Reservation commands, by queue and identifier, that are answered when there is nothing left to wait for.
    parked: Parked<(u16, u16)>,
    /// Others wait for what devices have of it; until that is back nothing is fetched.
    drains: Vec<Ticket>,
    pieces: Vec<Piece>,
    actions: Vec<Action>,
    running: bool,
    /// Nothing more is fetched, and the client is let go of when what was is answered, or at this time.
    leaving_until_ns: Option<u64>,
    /// When something was last fetched.
    pub(super) last_ns: u64,
    pub(super) faults: Faults,
}

impl Function {
    /// A function that was just plugged in.
    pub(super) fn new(
        admin: AdminConnect,
        shared: &Shared,
        portid: u16,
        now_ns: u64,
    ) -> Result<Function, Errno> {
        let limits = Arc::new(shared.limits.controller.clone());
        let vectors = limits.interrupt_vectors;
        let table_bytes = (u32::from(vectors) * 16).next_power_of_two().max(4096);
        let core = Controller::new(admin, limits.clone(), shared.picture.discovery.clone(), now_ns);
        let subsystem = core.subsystem().clone();
        Ok(Function {
            namespaces: NamespaceTable::of(
                &subsystem,
                portid,
                &limits,
                &shared.directory,
                core.association(),
            ),
            directory: shared.directory.clone(),
            core,
            subsystem,
            portid,
            memory: Memory::default(),
            config: Config::new(BAR0_BYTES as u32, vectors, table_bytes, 4096),
            interrupts: Interrupts::new(vectors),
            table: vec![0; table_bytes as usize],
            doorbells: Doorbells::new()?,
            trapped: shared.limits.doorbells_trapped,
            aqa: 0,
            asq: 0,
            acq: 0,
            submissions: Vec::new(),
            completions: Vec::new(),
            active: Vec::new(),
            commands: Slab::with_capacity(COMMANDS_MAX),
            direct: 0,
            dirty: Vec::new(),
            holds: false,
            fetched: Box::new([[0; sqe::SIZE]; FETCHED_MAX]),
            aside: VecDeque::new(),
            pairings: Vec::new(),
            pairs_aside: VecDeque::new(),
            going: Vec::new(),
            starved: Vec::new(),
            parked: Parked::default(),
            drains: Vec::new(),
            pieces: Vec::new(),
            actions: Vec::new(),
            running: false,
            leaving_until_ns: None,
            last_ns: now_ns,
            faults: Faults::default(),
        })
    }

    pub(super) fn association(&self) -> &Arc<Association> {
        self.core.association()
    }

    /// Whether commands are fetched.
    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// Fetches nothing more; the client is asked to let go of the device, and let go of when what it has under
    /// way is answered.
    pub(super) fn leave(&mut self, now_ns: u64) {
        self.running = false;
        if self.leaving_until_ns.is_none() {
            self.leaving_until_ns = Some(now_ns.saturating_add(LEAVE_NS_MAX));
            self.interrupts.request();
        }
    }

    /// Whether the client is to be let go of now.
    pub(super) fn is_over(&self, now_ns: u64) -> bool {
        let answered = self.is_idle() && self.aside.is_empty() && self.pairs_aside.is_empty();
        self.leaving_until_ns.is_some_and(|until_ns| answered || until_ns <= now_ns)
    }

    /// Whether devices have nothing of it.
    pub(super) fn is_idle(&self) -> bool {
        self.direct == 0 && self.commands.is_empty()
    }

    /// Whether commands wait for a buffer.
    pub(super) fn is_waiting(&self) -> bool {
        !self.aside.is_empty() || !self.starved.is_empty() || !self.pairs_aside.is_empty()
    }

    /// Where the client's memory was taken away, it is not to be used any longer.
    pub(super) fn is_poisoned(&self) -> bool {
        let submissions = self.submissions.iter().flatten().filter_map(|queue| queue.place.as_ref());
        self.memory.is_poisoned()
            || self.doorbells.is_poisoned()
            || submissions.into_iter().any(Place::is_poisoned)
            || self.completions.iter().flatten().any(Completion::is_poisoned)
    }

    /// The queues that there are: identifier, entries, commands and errors.
    pub(super) fn queues(&self) -> impl Iterator<Item = (u16, u32, u64, u64)> + '_ {
        let one = |(qid, queue): (usize, &Option<Submission>)| {
            let queue = queue.as_ref()?;
            Some((qid as u16, queue.entries, queue.commands, queue.errors))
        };
        self.submissions.iter().enumerate().filter_map(one)
    }

    /// The next time that the controller has something to do by itself.
    pub(super) fn deadline(&self) -> Option<u64> {
        [self.core.deadline(), self.leaving_until_ns].into_iter().flatten().min()
    }

    /// The client lets the device reach memory. Queues that had lost theirs may have it back.
    pub(super) fn map(&mut self, map: &DmaMap, file: Option<OwnedFd>, pool: &Pool) -> Result<(), Errno> {
        self.memory.map(pool, map, file)?;
        self.doorbells.replace(&self.memory);
        for queue in self.submissions.iter_mut().flatten().filter(|queue| queue.place.is_none()) {
            queue.replace(&self.memory);
        }
        for queue in self.completions.iter_mut().flatten() {
            queue.replace(&self.memory);
        }
        Ok(())
    }

    /// The client takes memory back. Queues in it stand still; what devices have of it is waited for.
    pub(super) fn unmap(&mut self, unmap: &DmaUnmap) -> Result<Leaving, Errno> {
        let leaving = self.memory.unmap(unmap)?;
        self.doorbells.replace(&self.memory);
        for queue in self.submissions.iter_mut().flatten() {
            queue.replace(&self.memory);
        }
        for queue in self.completions.iter_mut().flatten() {
            queue.replace(&self.memory);
        }
        Ok(leaving)
    }

    pub(super) fn interrupt_info(&self, asked: &IrqInfo) -> Result<IrqInfo, Errno> {
        self.interrupts.info(asked)
    }

    pub(super) fn set_interrupts(
        &mut self,
        set: &SetIrqs,
        data: &[u8],
        given: Vec<OwnedFd>,
    ) -> Result<(), Errno> {
        self.interrupts.set(set, data, given)
    }

    /// The client has gone: its memory and interrupts are not used any more, but for what devices have.
    pub(super) fn disconnect(&mut self) {
        self.stop();
        self.interrupts.clear();
        let _ = self.memory.unmap_all();
    }

    /// Begins a reset of the whole function. It has ended when [`is_idle`](Self::is_idle).
    pub(super) fn begin_reset(&mut self) {
        self.stop();
    }

    /// Stops everything without a word to the client.
    fn stop(&mut self) {
        self.running = false;
        let mut actions = std::mem::take(&mut self.actions);
        self.core.configure(0, &mut actions);
        actions.clear();
        self.actions = actions;
        self.close_queues(true);
        (self.aqa, self.asq, self.acq) = (0, 0, 0);
    }

    /// Closes I/O queues and, if asked, the admin queue. What is under way is not answered.
    fn close_queues(&mut self, admin: bool) {
        self.drop_copies();
        let parked: Vec<_> = self.parked.drain().map(|(qid, _)| qid).collect();
        let aside = std::mem::take(&mut self.aside).into_iter().map(|(qid, _)| qid);
        let pairs = self.take_pairs(None).into_iter().map(|(qid, _)| qid);
        for qid in aside.chain(parked).chain(pairs) {
            if let Some(queue) = self.submission(qid) {
                queue.in_flight -= 1;
            }
        }
        self.active.retain(|qid| *qid == 0 && !admin);
        for qid in 0..self.submissions.len() {
            if qid == 0 && !admin {
                continue;
            }
            if let Some(queue) = &mut self.submissions[qid] {
                queue.state = State::Closed;
                // The admin queue's commands wait for no device.
                if queue.in_flight == 0 || qid == 0 {
                    self.submissions[qid] = None;
                }
            }
        }
        for (qid, queue) in self.completions.iter_mut().enumerate() {
            if qid > 0 || admin {
                *queue = None;
            }
        }
        self.doorbells.reset(admin);
    }

    /// Takes over a new picture of the subsystem.
    pub(super) fn apply(&mut self, shared: &Shared, now_ns: u64) {
        match shared.picture.subsystem(&self.subsystem.nqn) {
            Some(subsystem) if !Arc::ptr_eq(&subsystem, &self.subsystem) => {
                self.subsystem = subsystem.clone();
                self.tabulate(&shared.limits.controller);
                self.tell(Event::Subsystem(subsystem), now_ns);
            }
            Some(_) => {}
            None => {
                // Keys of its devices may soon be those of others: what waits for a buffer is refused.
                self.namespaces = NamespaceTable::default();
                self.tell(Event::SubsystemRemoved, now_ns);
            }
        }
    }

    /// Makes the table of namespaces anew.
    fn tabulate(&mut self, limits: &Limits) {
        let association = self.core.association();
        self.namespaces =
            NamespaceTable::of(&self.subsystem, self.portid, limits, &self.directory, association);
    }

    /// Others want to be told when what devices have of some hosts is back; what of that is of this one.
    pub(super) fn drain(&mut self, drains: &[Drain]) {
        if self.is_idle() {
            return;
        }
        self.drains.extend(Drain::tickets(drains, self.core.association()));
    }

    /// Whether nobody waits for what devices have of it.
    #[inline]
    pub(super) fn is_drained(&mut self) -> bool {
        if !self.drains.is_empty() && self.is_idle() {
            self.drains.clear();
        }
        self.drains.is_empty()
    }

    /// Answers reservation commands that have nothing left to wait for.
    pub(super) fn unpark(&mut self) {
        while let Some(((qid, cid), status)) = self.parked.pop_done() {
            self.answer(qid, cid, status, 0);
        }
    }

    /// Sets the controller's fatal status.
    pub(super) fn fail(&mut self) {
        self.core.fail();
        self.running = false;
    }

    /// Tells the controller of something, and does what comes of it.
    pub(super) fn tell(&mut self, event: Event<'_>, now_ns: u64) {
        let mut actions = std::mem::take(&mut self.actions);
        self.core.handle(event, now_ns, &mut actions);
        for action in actions.drain(..) {
            match action {
                // Nothing but an Asynchronous Event Request is answered out of turn.
                Action::Complete(completion) => self.answer_event(&completion.cqe),
                // Queues close with the function, when what is under way is answered.
                Action::CloseIoQueues => {}
                Action::Terminate(_) => self.leave(now_ns),
            }
        }
        self.actions = actions;
        self.running &= self.core.is_enabled();
    }

    /// The client writes CC.
    fn configure(&mut self, value: u32) {
        let was = self.core.is_enabled();
        let mut actions = std::mem::take(&mut self.actions);
        self.core.configure(value, &mut actions);
        // Commands that a reset aborts are not answered: their queue is gone.
        let closes = actions.contains(&Action::CloseIoQueues);
        actions.clear();
        self.actions = actions;
        let enabled = value & 1 != 0;
        if closes {
            self.close_queues(!enabled);
        }
        self.running = self.core.is_enabled() && self.leaving_until_ns.is_none();
        if !was && self.running {
            self.enable();
        }
        self.running &= enabled;
    }

    /// Sets the admin queue up; a controller that cannot is a failed one.
    fn enable(&mut self) {
        let AdminQueueAttributes { submission_entries, completion_entries } =
            AdminQueueAttributes::decode(self.aqa);
        let (asq, acq) = (self.asq, self.acq);
        let aligned = (asq | acq).is_multiple_of(super::data::PAGE);
        let sizes = submission_entries >= 2 && completion_entries >= 2;
        let bytes = |entries: u32, each: u64| u64::from(entries) * each;
        let submission = Place::find(&self.memory, asq, bytes(submission_entries, Submission::BYTES), false);
        let completion = Place::find(&self.memory, acq, bytes(completion_entries, Completion::BYTES), true);
        let (Some(place), Some(completion), true, true) = (submission, completion, aligned, sizes) else {
            return self.fail();
        };
        self.make_submission(0, submission_entries, asq, place, 0, None);
        self.make_completion(0, completion_entries, acq, completion, Some(0));
    }

    fn make_submission(
        &mut self,
        qid: u16,
        entries: u32,
        address: u64,
        place: Place,
        cqid: u16,
        lease: Option<controller::QueueLease>,
    ) {
        let doorbell = u64::from(qid) * 2;
        self.doorbells.clear(doorbell);
        let queue = Submission {
            entries,
            head: 0,
            cqid,
            doorbell,
            address,
            place: Some(place),
            in_flight: 0,
            state: State::Active,
            _lease: lease,
            refused: 0,
            commands: 0,
            errors: 0,
        };
        put(&mut self.submissions, qid, queue);
        self.active.push(qid);
        self.active.sort_unstable();
    }

    fn make_completion(&mut self, qid: u16, entries: u32, address: u64, place: Place, vector: Option<u16>) {
        let doorbell = u64::from(qid) * 2 + 1;
        self.doorbells.clear(doorbell);
        put(&mut self.completions, qid, Completion::new(entries, address, place, doorbell, vector));
    }

    #[inline]
    fn submission(&mut self, qid: u16) -> Option<&mut Submission> {
        self.submissions.get_mut(usize::from(qid))?.as_mut()
    }

    #[inline]
    fn completion(&mut self, qid: u16) -> Option<&mut Completion> {
        self.completions.get_mut(usize::from(qid))?.as_mut()
    }

    /// Signals what was completed since the last time, each vector once.
    #[inline]
    pub(super) fn interrupt(&mut self) {
        for index in 0..self.dirty.len() {
            let qid = self.dirty[index];
            let Some(Some(queue)) = self.completions.get_mut(usize::from(qid)) else { continue };
            queue.dirty = false;
            if let Some(vector) = queue.vector {
                self.interrupts.trigger(vector);
            }
        }
        self.dirty.clear();
    }

    /// Writes completions that had no room; whether some still have none.
    #[inline]
    pub(super) fn unhold(&mut self) -> bool {
        if self.holds {
            self.holds = self.unhold_some();
        }
        self.holds
    }

    #[cold]
    fn unhold_some(&mut self) -> bool {
        let mut holds = false;
        for (qid, queue) in self.completions.iter_mut().enumerate() {
            let Some(queue) = queue else { continue };
            if !queue.holds() {
                continue;
            }
            let was = queue.dirty;
            queue.unhold(&self.doorbells);
            holds |= queue.holds();
            if queue.dirty && !was {
                self.dirty.push(qid as u16);
            }
        }
        holds
    }
}

impl Existing for Function {
    fn has_submission(&self, qid: u16) -> bool {
        self.submissions.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    fn has_completion(&self, qid: u16) -> bool {
        self.completions.get(usize::from(qid)).is_some_and(Option::is_some)
    }

    fn is_in_use(&self, cqid: u16) -> bool {
        self.submissions.iter().skip(1).flatten().any(|queue| queue.cqid == cqid)
    }
}

fn put<T>(queues: &mut Vec<Option<T>>, qid: u16, queue: T) {
    let index = usize::from(qid);
    if queues.len() <= index {
        queues.resize_with(index + 1, || None);
    }
    queues[index] = Some(queue);
}

/// The status of a command whose queue's memory cannot be reached.
const UNREACHABLE: Status = Status::DATA_TRANSFER_ERROR;
