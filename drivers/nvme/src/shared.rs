//! What the cores that use a controller share: its device, its state, and how its owner is asked.
//!
//! The admin queue belongs to one core, the owner's. Everything else asks that core by mailbox, and learns
//! of resets and failures from one word, [`Signal`], that a queue pair compares on every poll.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Poll, Waker};

use memory::{Arena, ChunkMemory};
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::identify::{IdentifyController, NvmController};
use wire_nvme::registers::{Capabilities, Version};

use crate::device::{Device, DeviceError, Doorbells};
use crate::error::{AdminError, Failure};
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::shadow::Pages;

/// What became of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Queues may be used, each once it was created in this epoch.
    Running,
    /// It is being stopped; nothing may be submitted, and memory is still the device's.
    Stopping,
    /// The device has let go of all memory; it will run again.
    Stopped,
    /// The same, for good.
    Dead,
}

/// State, epoch and a count of changes, in one word that queue pairs compare.
///
/// An epoch ends when the controller is stopped. What was submitted in one is over in the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signal(pub(crate) u64);

impl Signal {
    fn new(state: State, epoch: u32, changes: u32) -> Signal {
        Signal(state as u64 | u64::from(epoch & 0x3fff_ffff) << 2 | u64::from(changes) << 32)
    }

    pub(crate) fn state(self) -> State {
        match self.0 & 3 {
            0 => State::Running,
            1 => State::Stopping,
            2 => State::Stopped,
            _ => State::Dead,
        }
    }

    pub(crate) fn epoch(self) -> u32 {
        (self.0 >> 2) as u32 & 0x3fff_ffff
    }

    pub(crate) fn changes(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// What was found out when the controller was attached.
pub(crate) struct Facts {
    pub(crate) capabilities: Capabilities,
    pub(crate) version: Version,
    pub(crate) identity: IdentifyController,
    pub(crate) limits: NvmController,
    pub(crate) doorbells: Doorbells,
    pub(crate) page_log2: u32,
    pub(crate) queues_max: u16,
    pub(crate) vectors: Vec<OwnedFd>,
    pub(crate) shadow: Option<Arc<Pages>>,
}

/// Something that the controller told unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub AsyncEvent);

/// Most events that wait to be looked at; older ones are dropped.
const EVENTS_MAX: usize = 64;

pub(crate) struct Shared {
    /// `None` once the last of all has let go.
    device: Option<Box<dyn Device>>,
    pub(crate) options: Options,
    /// Under what other openers find it.
    pub(crate) key: OnceLock<String>,
    signal: AtomicU64,
    failure: Mutex<Option<Failure>>,
    pub(crate) facts: OnceLock<Facts>,
    /// Namespaces that somebody asked for; `None` for one that is gone, and may come back.
    namespaces: Mutex<HashMap<u32, Option<NamespaceInfo>>>,
    refusals: Mutex<HashMap<u32, &'static str>>,
    /// Device addresses of chunks, by where they start.
    chunks: Mutex<BTreeMap<usize, u64>>,
    /// Arenas whose chunks the device may know: they must outlive the mappings.
    arenas: Mutex<Vec<Arc<Arena>>>,
    /// Shadow doorbells that the device was shown, for the same reason.
    pages: Mutex<Option<Arc<Pages>>>,
    records: Mutex<Vec<Weak<Record>>>,
    qids: Mutex<Vec<u16>>,
    events: Mutex<VecDeque<Event>>,
    pub(crate) asks: reactor::Sender<Ask>,
    /// The last handle is gone.
    pub(crate) detach: AtomicBool,
    /// The device could not be kept from memory: what it may write is never used again.
    forsaken: AtomicBool,
    pub(crate) resets: AtomicU64,
    pub(crate) aborts: AtomicU64,
}

/// What the owner is asked.
pub(crate) enum Ask {
    Create(Arc<Record>),
    Delete(Arc<Record>),
    Admin {
        sqe: Sqe,
        data: AdminData,
        reply: Arc<Reply<Result<AdminAnswer, AdminError>>>,
    },
    Abort {
        qid: u16,
        cid: u16,
    },
    Namespace {
        nsid: u32,
        reply: Arc<Reply<Result<(), AdminError>>>,
    },
    Reset {
        how: ResetKind,
        reply: Option<Arc<Reply<Result<(), Failure>>>>,
    },
    /// A queue pair found that the device cannot be trusted.
    Broken(Failure),
    Detach,
}

/// Which reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetKind {
    /// CC.EN.
    Controller,
    /// NSSR.
    Subsystem,
    /// The whole function.
    Function,
}

/// Data of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminData {
    /// None.
    None,
    /// So many bytes from the controller.
    In(usize),
    /// These bytes to the controller.
    Out(Vec<u8>),
}

/// What an admin command returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAnswer {
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// Its data, for [`AdminData::In`].
    pub data: Vec<u8>,
}

/// A queue pair, as its owner core and the controller's see it.
pub(crate) struct Record {
    pub(crate) shared: Arc<Shared>,
    pub(crate) qid: u16,
    pub(crate) sq: u64,
    pub(crate) cq: u64,
    pub(crate) entries: u32,
    pub(crate) vector: Option<u16>,
    phase: AtomicU64,
    core: sys::Waker,
    task: Mutex<Option<Waker>>,
}

/// How far a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its memory is zeroed and it waits to be created, in this epoch.
    Empty(u32),
    /// It was created in this epoch.
    Live(u32),
    /// The controller refused it, with this status field.
    Refused(u16),
    /// It is to be deleted.
    Leaving,
    /// It was deleted.
    Gone,
}

impl Record {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        qid: u16,
        (sq, cq): (u64, u64),
        entries: u32,
        vector: Option<u16>,
        core: sys::Waker,
    ) -> Arc<Record> {
        let record = Arc::new(Record {
            shared: shared.clone(),
            qid,
            sq,
            cq,
            entries,
            vector,
            phase: AtomicU64::new(0),
            core,
            task: Mutex::default(),
        });
        let mut records = lock(&shared.records);
        records.retain(|record| record.strong_count() > 0);
        records.push(Arc::downgrade(&record));
        record
    }

    pub(crate) fn phase(&self) -> Phase {
        let word = self.phase.load(Ordering::Acquire);
        let value = (word >> 8) as u32;
        match word & 0xff {
            0 => Phase::Empty(value),
            1 => Phase::Live(value),
            2 => Phase::Refused(value as u16),
            3 => Phase::Leaving,
            _ => Phase::Gone,
        }
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        let (kind, value) = match phase {
            Phase::Empty(epoch) => (0, epoch),
            Phase::Live(epoch) => (1, epoch),
            Phase::Refused(status) => (2, status.into()),
            Phase::Leaving => (3, 0),
            Phase::Gone => (4, 0),
        };
        self.phase.store(kind | u64::from(value) << 8, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.wake();
        }
        self.core.wake();
    }

    /// Ends when the phase is no longer [`Phase::Empty`], or the controller is dead.
    pub(crate) async fn settled(&self) -> Phase {
        std::future::poll_fn(|context| {
            *lock(&self.task) = Some(context.waker().clone());
            match self.phase() {
                Phase::Empty(_) if self.shared.signal().state() != State::Dead => Poll::Pending,
                phase => Poll::Ready(phase),
            }
        })
        .await
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        lock(&self.shared.qids).push(self.qid);
    }
}

impl Shared {
    pub(crate) fn new(device: Box<dyn Device>, options: Options, asks: reactor::Sender<Ask>) -> Arc<Shared> {
        Arc::new(Shared {
            device: Some(device),
            options,
            key: OnceLock::new(),
            signal: AtomicU64::new(Signal::new(State::Stopped, 0, 0).0),
            failure: Mutex::default(),
            facts: OnceLock::new(),
            namespaces: Mutex::default(),
            refusals: Mutex::default(),
            chunks: Mutex::default(),
            arenas: Mutex::default(),
            pages: Mutex::default(),
            records: Mutex::default(),
            qids: Mutex::default(),
            events: Mutex::default(),
            asks,
            detach: AtomicBool::new(false),
            forsaken: AtomicBool::new(false),
            resets: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
        })
    }

    pub(crate) fn device(&self) -> &dyn Device {
        &**self.device.as_ref().expect("the device is let go of when this is dropped")
    }

    pub(crate) fn facts(&self) -> &Facts {
        self.facts.get().expect("nobody has a handle before the controller was identified")
    }

    #[inline]
    pub(crate) fn signal(&self) -> Signal {
        Signal(self.signal.load(Ordering::Acquire))
    }

    /// Changes the state; the owner's alone. Stopping ends the epoch. Dead is for good.
    pub(crate) fn set_state(&self, state: State) {
        let old = self.signal();
        if old.state() == State::Dead {
            return;
        }
        let epoch = old.epoch().wrapping_add(u32::from(state == State::Stopping));
        self.signal.store(Signal::new(state, epoch, old.changes()).0, Ordering::Release);
        self.wake_all();
    }

    /// A namespace is not what it was.
    pub(crate) fn note_change(&self) {
        let old = self.signal();
        let changes = old.changes().wrapping_add(1);
        self.signal.store(Signal::new(old.state(), old.epoch(), changes).0, Ordering::Release);
        self.wake_all();
    }

    fn wake_all(&self) {
        let records: Vec<_> = lock(&self.records).iter().filter_map(Weak::upgrade).collect();
        records.iter().for_each(|record| record.wake());
    }

    /// Why the controller cannot be used any more. The first reason stays.
    pub(crate) fn set_failure(&self, failure: Failure) {
        lock(&self.failure).get_or_insert(failure);
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        *lock(&self.failure)
    }

    /// Where the device sees a chunk, which it is shown if it was not before.
    pub(crate) fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        let mut chunks = lock(&self.chunks);
        let start = chunk.start.addr();
        if let Some(&device) = chunks.get(&start) {
            return Ok(device);
        }
        let device = self.device().map(chunk)?;
        chunks.insert(start, device);
        Ok(device)
    }

    /// Keeps an arena for as long as the device may know its chunks.
    pub(crate) fn keep(&self, arena: &Arc<Arena>) {
        let mut arenas = lock(&self.arenas);
        if !arenas.iter().any(|kept| Arc::ptr_eq(kept, arena)) {
            arenas.push(arena.clone());
        }
    }

    /// Keeps shadow doorbells for as long as the device may know them.
    pub(crate) fn keep_pages(&self, pages: &Arc<Pages>) {
        *lock(&self.pages) = Some(pages.clone());
    }

    pub(crate) fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        lock(&self.namespaces).get(&nsid).cloned().flatten()
    }

    pub(crate) fn namespaces(&self) -> Vec<u32> {
        lock(&self.namespaces).keys().copied().collect()
    }

    /// Puts in what is known of a namespace, or that it is gone; whether that is news.
    pub(crate) fn set_namespace(&self, nsid: u32, info: Option<NamespaceInfo>) -> bool {
        let mut namespaces = lock(&self.namespaces);
        match (namespaces.get_mut(&nsid), info) {
            (Some(known), info) if *known == info => false,
            (Some(known), info) => {
                *known = info;
                true
            }
            (None, None) => false,
            (None, info) => {
                namespaces.insert(nsid, info);
                true
            }
        }
    }

    /// Why a namespace that is there cannot be used.
    pub(crate) fn set_refusal(&self, nsid: u32, why: &'static str) {
        lock(&self.refusals).insert(nsid, why);
    }

    pub(crate) fn refusal(&self, nsid: u32) -> Option<&'static str> {
        lock(&self.refusals).get(&nsid).copied()
    }

    pub(crate) fn forsake(&self) {
        self.forsaken.store(true, Ordering::Release);
    }

    pub(crate) fn is_forsaken(&self) -> bool {
        self.forsaken.load(Ordering::Acquire)
    }

    /// Queue identifiers that are free, at first.
    pub(crate) fn set_qids(&self, max: u16) {
        *lock(&self.qids) = (1..=max).rev().collect();
    }

    pub(crate) fn take_qid(&self) -> Option<u16> {
        lock(&self.qids).pop()
    }

    pub(crate) fn give_qid(&self, qid: u16) {
        lock(&self.qids).push(qid);
    }

    pub(crate) fn push_event(&self, event: Event) {
        let mut events = lock(&self.events);
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(event);
    }

    pub(crate) fn pop_event(&self) -> Option<Event> {
        lock(&self.events).pop_front()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The device first: whoever finds the name free may open it at once.
        self.device = None;
        if let Some(key) = self.key.get() {
            crate::registry::forget(key);
        }
    }
}

/// One answer, from one thread to a task of another.
pub(crate) struct Reply<T>(Mutex<(Option<T>, Option<Waker>)>);

impl<T> Reply<T> {
    pub(crate) fn new() -> Arc<Reply<T>> {
        Arc::new(Reply(Mutex::new((None, None))))
    }

    pub(crate) fn put(&self, answer: T) {
        let mut inner = lock(&self.0);
        inner.0 = Some(answer);
        if let Some(waker) = inner.1.take() {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> impl Future<Output = T> {
        std::future::poll_fn(|context| {
            let mut inner = lock(&self.0);
            match inner.0.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    inner.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

/// Nothing panics with one of these locks held but on a broken invariant of ours.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
