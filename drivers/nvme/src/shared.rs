//! State of a controller that all cores share: its device, its lifecycle state and the owner's mailbox.
//!
//! The admin queue belongs to one core, the owner. Other cores send an [`OwnerRequest`] to the owner's mailbox.
//! They detect resets and failures through one atomic word, [`StateWord`], that a queue pair compares on every
//! poll.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::{Poll, Waker};

use dma::{Buffer, DeviceMappings, MappingConfig, Pool};
use wire_nvme::Sqe;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::identify::{IdentifyController, NvmController};
use wire_nvme::registers::{ControllerCapabilities, NvmeVersion};

use crate::device::{DoorbellRegion, NvmeDevice};
use crate::error::{AdminError, ControllerFailure};
use crate::namespace_info::NamespaceInfo;
use crate::options::Options;
use crate::shadow::ShadowDoorbellPages;

/// Lifecycle of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    /// I/O queues may be used, each after its creation in this epoch.
    Running,
    /// The controller is being disabled: no submissions; the device may still access memory.
    Stopping,
    /// The controller is disabled and accesses no memory; it will be enabled again.
    Stopped,
    /// The controller is disabled permanently and accesses no memory.
    Dead,
}

/// Run state (2 bits), epoch (30 bits) and count of namespace changes (32 bits) in one atomic word.
///
/// An epoch ends when the controller is stopped. Commands of an epoch are aborted at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateWord(pub(crate) u64);

impl StateWord {
    fn new(state: RunState, epoch: u32, changes: u32) -> StateWord {
        StateWord(state as u64 | u64::from(epoch & 0x3fff_ffff) << 2 | u64::from(changes) << 32)
    }

    pub(crate) fn state(self) -> RunState {
        match self.0 & 3 {
            0 => RunState::Running,
            1 => RunState::Stopping,
            2 => RunState::Stopped,
            _ => RunState::Dead,
        }
    }

    pub(crate) fn epoch(self) -> u32 {
        (self.0 >> 2) as u32 & 0x3fff_ffff
    }

    pub(crate) fn changes(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Capabilities and resources of a controller, read once when it is attached.
pub(crate) struct ControllerParams {
    pub(crate) capabilities: ControllerCapabilities,
    pub(crate) version: NvmeVersion,
    pub(crate) identity: IdentifyController,
    pub(crate) limits: NvmController,
    pub(crate) doorbells: DoorbellRegion,
    pub(crate) page_log2: u32,
    pub(crate) queues_max: u16,
    pub(crate) vectors: Vec<OwnedFd>,
    pub(crate) shadow: Option<Arc<ShadowDoorbellPages>>,
}

/// An asynchronous event that the controller reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeEvent(pub AsyncEvent);

/// Most events pending for the user; when full, the oldest is dropped.
const EVENTS_MAX: usize = 64;

/// State of one controller, shared by its owner core and by every core with a queue pair.
///
/// Its [`DeviceMappings`] own the device, and retain until the device is dropped the memory that it may
/// access, and its key in the registry. The mutexes guard control paths only; the I/O path reads nothing but
/// [`state_word`](Self::state_word).
pub(crate) struct SharedController {
    mappings: Arc<DeviceMappings<dyn NvmeDevice>>,
    pub(crate) options: Options,
    state_word: AtomicU64,
    failure: Mutex<Option<ControllerFailure>>,
    pub(crate) params: OnceLock<ControllerParams>,
    /// Namespaces that were opened; `None` for one that is inactive now and may become active again.
    namespaces: Mutex<HashMap<u32, Option<NamespaceInfo>>>,
    unsupported: Mutex<HashMap<u32, &'static str>>,
    records: Mutex<Vec<Weak<QpairRecord>>>,
    free_qids: Mutex<Vec<u16>>,
    events: Mutex<VecDeque<NvmeEvent>>,
    pub(crate) requests: reactor::MailboxSender<OwnerRequest>,
    /// Set when the last handle is dropped.
    pub(crate) detach: AtomicBool,
    /// The device's DMA could not be stopped: memory that it may write is leaked instead of reused.
    memory_quarantined: AtomicBool,
    pub(crate) resets: AtomicU64,
    pub(crate) aborts: AtomicU64,
}

/// A request to the owner core.
pub(crate) enum OwnerRequest {
    CreateQpair(Arc<QpairRecord>),
    DeleteQpair(Arc<QpairRecord>),
    Admin {
        sqe: Sqe,
        data: AdminData,
        reply: Arc<Oneshot<Result<AdminOutput, AdminError>>>,
    },
    Abort {
        qid: u16,
        cid: u16,
    },
    IdentifyNamespace {
        nsid: u32,
        reply: Arc<Oneshot<Result<(), AdminError>>>,
    },
    Reset {
        kind: ResetKind,
        reply: Option<Arc<Oneshot<Result<(), ControllerFailure>>>>,
    },
    /// A queue pair received an invalid completion: take the controller offline.
    Fail(ControllerFailure),
    Detach,
}

/// Kind of a controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResetKind {
    /// Controller Reset: CC.EN cleared to 0.
    Controller,
    /// NVM Subsystem Reset through register NSSR.
    Subsystem,
    /// Function Level Reset.
    Function,
}

/// Data transfer of an admin or passthrough command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminData {
    /// No data.
    None,
    /// Controller to host, length in bytes.
    In(usize),
    /// Host to controller, the bytes to send.
    Out(Vec<u8>),
}

impl AdminData {
    /// Takes a buffer for the data. It is cleared for reads: the controller may write less than the whole buffer.
    pub(crate) fn take_buffer(&self, pool: &Pool) -> Result<Option<Buffer>, AdminError> {
        let length = match self {
            AdminData::None => return Ok(None),
            AdminData::In(length) => *length,
            AdminData::Out(bytes) => bytes.len(),
        };
        if length == 0 || length > dma::BUFFER_BYTES_MAX {
            return Err(AdminError::InvalidLength(length));
        }
        let mut buffer = pool.take(length).ok_or(AdminError::NoMemory)?;
        match self {
            AdminData::Out(bytes) => buffer.as_mut_slice().copy_from_slice(bytes),
            _ => buffer.clear(),
        }
        Ok(Some(buffer))
    }

    /// What the controller wrote to the buffer; empty if it wrote nothing.
    pub(crate) fn read_back(&self, buffer: Option<&Buffer>) -> Vec<u8> {
        let written = buffer.filter(|_| matches!(self, AdminData::In(_)));
        written.map_or_else(Vec::new, |buffer| buffer.as_slice().to_vec())
    }
}

/// Result of a successful admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminOutput {
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// Data that the controller returned for [`AdminData::In`]; empty otherwise.
    pub data: Vec<u8>,
}

/// State of an I/O queue pair that the core that uses it and the controller's owner core share.
pub(crate) struct QpairRecord {
    pub(crate) shared: Arc<SharedController>,
    pub(crate) qid: u16,
    pub(crate) sq: u64,
    pub(crate) cq: u64,
    pub(crate) entries: u32,
    pub(crate) vector: Option<u16>,
    state: AtomicU64,
    core: os::Waker,
    task: Mutex<Option<Waker>>,
}

/// Lifecycle of a queue pair on the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QpairState {
    /// The rings are zeroed and ready for creation in this epoch.
    Pending(u32),
    /// The controller has created the queues in this epoch.
    Live(u32),
    /// The controller rejected the creation with this status field.
    Rejected(u16),
    /// Deletion is requested.
    Deleting,
    /// The controller has deleted both queues.
    Deleted,
}

impl QpairRecord {
    pub(crate) fn new(
        shared: &Arc<SharedController>,
        qid: u16,
        (sq, cq): (u64, u64),
        entries: u32,
        vector: Option<u16>,
        core: os::Waker,
    ) -> Arc<QpairRecord> {
        let record = Arc::new(QpairRecord {
            shared: shared.clone(),
            qid,
            sq,
            cq,
            entries,
            vector,
            state: AtomicU64::new(0),
            core,
            task: Mutex::default(),
        });
        let mut records = sync::lock(&shared.records);
        records.retain(|record| record.strong_count() > 0);
        records.push(Arc::downgrade(&record));
        record
    }

    pub(crate) fn state(&self) -> QpairState {
        let word = self.state.load(Ordering::Acquire);
        let value = (word >> 8) as u32;
        match word & 0xff {
            0 => QpairState::Pending(value),
            1 => QpairState::Live(value),
            2 => QpairState::Rejected(value as u16),
            3 => QpairState::Deleting,
            _ => QpairState::Deleted,
        }
    }

    pub(crate) fn set_state(&self, phase: QpairState) {
        let (kind, value) = match phase {
            QpairState::Pending(epoch) => (0, epoch),
            QpairState::Live(epoch) => (1, epoch),
            QpairState::Rejected(status) => (2, status.into()),
            QpairState::Deleting => (3, 0),
            QpairState::Deleted => (4, 0),
        };
        self.state.store(kind | u64::from(value) << 8, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Some(task) = sync::lock(&self.task).take() {
            task.wake();
        }
        self.core.wake();
    }

    /// Waits until the state is no longer [`QpairState::Pending`] or the controller is dead; returns the state.
    pub(crate) async fn wait_created(&self) -> QpairState {
        std::future::poll_fn(|context| {
            *sync::lock(&self.task) = Some(context.waker().clone());
            match self.state() {
                QpairState::Pending(_) if self.shared.state_word().state() != RunState::Dead => Poll::Pending,
                phase => Poll::Ready(phase),
            }
        })
        .await
    }
}

impl Drop for QpairRecord {
    fn drop(&mut self) {
        sync::lock(&self.shared.free_qids).push(self.qid);
    }
}

impl SharedController {
    pub(crate) fn new(
        device: Box<dyn NvmeDevice>,
        options: Options,
        requests: reactor::MailboxSender<OwnerRequest>,
    ) -> Arc<SharedController> {
        let map_lent_memory = options.map_lent_memory;
        let config = MappingConfig { name: device.name(), log_target: "nvme", map_lent_memory };
        Arc::new(SharedController {
            mappings: DeviceMappings::new(device, config),
            options,
            state_word: AtomicU64::new(StateWord::new(RunState::Stopped, 0, 0).0),
            failure: Mutex::default(),
            params: OnceLock::new(),
            namespaces: Mutex::default(),
            unsupported: Mutex::default(),
            records: Mutex::default(),
            free_qids: Mutex::default(),
            events: Mutex::default(),
            requests,
            detach: AtomicBool::new(false),
            memory_quarantined: AtomicBool::new(false),
            resets: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
        })
    }

    pub(crate) fn device(&self) -> &dyn NvmeDevice {
        self.mappings.device()
    }

    /// The device, and the memory that is mapped for it.
    pub(crate) fn mappings(&self) -> &Arc<DeviceMappings<dyn NvmeDevice>> {
        &self.mappings
    }

    pub(crate) fn params(&self) -> &ControllerParams {
        self.params.get().expect("handles exist only after the controller is identified")
    }

    #[inline]
    pub(crate) fn state_word(&self) -> StateWord {
        StateWord(self.state_word.load(Ordering::Acquire))
    }

    /// Sets the run state; only the owner calls this. `Stopping` ends the epoch, and `Dead` is final.
    pub(crate) fn set_state(&self, state: RunState) {
        let old = self.state_word();
        if old.state() == RunState::Dead {
            return;
        }
        let epoch = old.epoch().wrapping_add(u32::from(state == RunState::Stopping));
        self.state_word.store(StateWord::new(state, epoch, old.changes()).0, Ordering::Release);
        self.wake_all();
    }

    /// Notifies every queue pair that a namespace has changed.
    pub(crate) fn notify_namespace_change(&self) {
        let old = self.state_word();
        let changes = old.changes().wrapping_add(1);
        self.state_word.store(StateWord::new(old.state(), old.epoch(), changes).0, Ordering::Release);
        self.wake_all();
    }

    fn wake_all(&self) {
        let records: Vec<_> = sync::lock(&self.records).iter().filter_map(Weak::upgrade).collect();
        records.iter().for_each(|record| record.wake());
    }

    /// Records why the controller failed. The first failure is kept.
    pub(crate) fn set_failure(&self, failure: ControllerFailure) {
        sync::lock(&self.failure).get_or_insert(failure);
    }

    pub(crate) fn failure(&self) -> Option<ControllerFailure> {
        *sync::lock(&self.failure)
    }

    pub(crate) fn namespace(&self, nsid: u32) -> Option<NamespaceInfo> {
        sync::lock(&self.namespaces).get(&nsid).cloned().flatten()
    }

    pub(crate) fn namespaces(&self) -> Vec<u32> {
        sync::lock(&self.namespaces).keys().copied().collect()
    }

    /// Stores what Identify returned for a namespace, `None` if it is inactive; returns whether it changed.
    pub(crate) fn set_namespace(&self, nsid: u32, info: Option<NamespaceInfo>) -> bool {
        let mut namespaces = sync::lock(&self.namespaces);
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

    /// Records why an active namespace is not supported.
    pub(crate) fn set_unsupported_reason(&self, nsid: u32, why: &'static str) {
        sync::lock(&self.unsupported).insert(nsid, why);
    }

    pub(crate) fn unsupported_reason(&self, nsid: u32) -> Option<&'static str> {
        sync::lock(&self.unsupported).get(&nsid).copied()
    }

    pub(crate) fn quarantine_memory(&self) {
        self.memory_quarantined.store(true, Ordering::Release);
    }

    pub(crate) fn is_memory_quarantined(&self) -> bool {
        self.memory_quarantined.load(Ordering::Acquire)
    }

    /// Makes queue identifiers 1 to `max` free.
    pub(crate) fn set_free_qids(&self, max: u16) {
        *sync::lock(&self.free_qids) = (1..=max).rev().collect();
    }

    pub(crate) fn alloc_qid(&self) -> Option<u16> {
        sync::lock(&self.free_qids).pop()
    }

    pub(crate) fn free_qids(&self) -> usize {
        sync::lock(&self.free_qids).len()
    }

    pub(crate) fn free_qid(&self, qid: u16) {
        sync::lock(&self.free_qids).push(qid);
    }

    pub(crate) fn push_event(&self, event: NvmeEvent) {
        let mut events = sync::lock(&self.events);
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(event);
    }

    pub(crate) fn pop_event(&self) -> Option<NvmeEvent> {
        sync::lock(&self.events).pop_front()
    }
}

/// A one-shot channel: one value from any thread to a task on another.
pub(crate) struct Oneshot<T>(Mutex<(Option<T>, Option<Waker>)>);

impl<T> Oneshot<T> {
    pub(crate) fn new() -> Arc<Oneshot<T>> {
        Arc::new(Oneshot(Mutex::new((None, None))))
    }

    pub(crate) fn send(&self, answer: T) {
        let mut inner = sync::lock(&self.0);
        inner.0 = Some(answer);
        if let Some(waker) = inner.1.take() {
            waker.wake();
        }
    }

    pub(crate) fn receive(&self) -> impl Future<Output = T> {
        std::future::poll_fn(|context| {
            let mut inner = sync::lock(&self.0);
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
