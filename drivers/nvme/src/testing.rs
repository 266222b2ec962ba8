//! A simulated controller, executed on the thread that steps it: for tests, fuzzing and benchmarks of the driver.
//!
//! It accesses memory as a device does: through its own device addresses, PRPs and SGLs, and through mappings
//! separate from the driver's. [`DeviceFault`] injects the faults of a broken or hostile device. The arena must be
//! created with `shared: true`.

mod commands;
mod memory_map;
mod namespaces;
mod registers;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use ::dma::SharedRegion;
use block_io::Status;
use reactor::{PollResult, Poller};
use wire_nvme::identify::{IdentifyController, IdentifyNamespace, LbaFormat, oacs, oncs};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::queue::{CreateIoCq, CreateIoSq};
use wire_nvme::registers::{ControllerCapabilities, NvmeVersion, ShutdownStatus};
use wire_nvme::{Cqe, Sqe, cqe, sqe};

use crate::device::NvmeDevice;
use commands::CommandOutcome;
use memory_map::MemoryMap;

/// Configuration of a simulated controller.
#[derive(Clone, Debug)]
pub struct SimulatedConfig {
    /// Controller Capabilities register.
    pub capabilities: ControllerCapabilities,
    /// Version register.
    pub version: NvmeVersion,
    /// Identify Controller data structure.
    pub identity: IdentifyController,
    /// Namespaces in order of identifier, from 1.
    pub namespaces: Vec<IdentifyNamespace>,
    /// Number of I/O queue pairs granted.
    pub queues: u32,
    /// Size of BAR0 in bytes.
    pub bar_bytes: u64,
    /// Doorbell Buffer Config fails even if OACS reports support.
    pub reject_doorbell_buffer: bool,
}

impl SimulatedConfig {
    /// A controller with one namespace of `blocks` blocks of `block_size` bytes, and as much unallocated capacity.
    pub fn new(blocks: u64, block_size: u32) -> SimulatedConfig {
        let format = LbaFormat { metadata_bytes: 0, data_log2: block_size.ilog2() as u8, performance: 0 };
        let namespace = IdentifyNamespace {
            nsze: blocks,
            ncap: blocks,
            nuse: blocks,
            formats: vec![format],
            ..IdentifyNamespace::default()
        };
        let identity = IdentifyController {
            mdts: 7,
            sqes: 0x66,
            cqes: 0x44,
            nn: 4,
            // Half of the capacity is unallocated.
            tnvmcap: 2 * u128::from(blocks) * u128::from(block_size),
            oaes: wire_nvme::identify::oaes::NAMESPACE,
            async_events_max: 4,
            oacs: oacs::FORMAT | oacs::NAMESPACE_MANAGEMENT,
            oncs: oncs::COMPARE
                | oncs::WRITE_UNCORRECTABLE
                | oncs::DATASET_MANAGEMENT
                | oncs::WRITE_ZEROES
                | oncs::VERIFY
                | oncs::COPY,
            fuses: 1,
            ver: NvmeVersion::new(2, 0, 0),
            ..IdentifyController::default()
        };
        SimulatedConfig {
            capabilities: ControllerCapabilities {
                queue_entries_max: 1024,
                contiguous_queues_required: true,
                arbitration: 0,
                ready_timeout_500ms: 1,
                doorbell_stride_log2: 0,
                subsystem_reset: true,
                nvm_command_set: true,
                io_command_sets: false,
                no_io_command_set: false,
                boot_partitions: false,
                page_min_log2: 12,
                page_max_log2: 16,
                persistent_memory: false,
                memory_buffer: false,
                subsystem_shutdown: false,
                ready_modes: 0,
            },
            version: NvmeVersion::new(2, 0, 0),
            identity,
            namespaces: vec![namespace],
            queues: 8,
            bar_bytes: 0x2000,
            reject_doorbell_buffer: false,
        }
    }
}

/// A fault of the simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFault {
    /// The next I/O completes with a wrong command identifier: this value is added to the correct one.
    WrongCid(u16),
    /// The next I/O completes twice.
    DuplicateCompletion,
    /// The next I/O completes with an SQHD outside of the queue.
    WrongSqHead,
    /// The next I/O completes with the SQID of another queue.
    WrongSqid,
    /// The next I/O never completes.
    DropCompletion,
    /// The next I/O fails with this status.
    Fail(Status),
    /// The next admin command other than Asynchronous Event Request fails with this status.
    FailAdmin(Status),
    /// CSTS.CFS is set until a reset.
    FatalStatus,
    /// Surprise removal: registers read as all ones.
    SurpriseRemoval,
    /// No command is executed until a reset.
    Stall,
    /// No command is executed between the next reset and the one after it.
    StallAfterReset,
    /// CSTS.RDY no longer changes.
    ReadyStuck,
    /// CAP changes at the next reset.
    ChangeCapabilities,
}

/// A simulated controller; clones refer to the same one.
///
/// [`device`](Self::device) is what the driver attaches to. Commands execute in [`step`](Self::step), or in the
/// poller that [`poller`](Self::poller) returns.
#[derive(Clone)]
pub struct SimulatedController {
    state: Arc<Mutex<SimulatedState>>,
}

struct SimulatedState {
    config: SimulatedConfig,
    doorbells: Arc<SharedRegion>,
    memory: MemoryMap,
    /// Memory that the device can map, by the address that the host has it at.
    lendable: HashMap<usize, SharedRegion>,
    /// Lent memory that is mapped.
    lent_mapped: usize,
    started: bool,
    removed: bool,
    fatal: bool,
    stalled: bool,
    stall_after_reset: bool,
    never_ready: bool,
    change_capabilities: bool,
    cc: u32,
    ready: bool,
    shutdown: ShutdownStatus,
    aqa: u32,
    asq: u64,
    acq: u64,
    submission: HashMap<u16, SubmissionRing>,
    completion: HashMap<u16, CompletionRing>,
    shadow: Option<(u64, u64)>,
    faults: VecDeque<DeviceFault>,
    event_requests: VecDeque<u16>,
    changed_namespaces: BTreeSet<u32>,
    event_masked: bool,
    stores: Vec<NamespaceStore>,
    /// Namespaces attached to the controller.
    attached: BTreeSet<u32>,
    /// LBA formats of new namespaces.
    formats: Vec<LbaFormat>,
    /// Status of a fused compare that awaits its write, by submission queue.
    fused: HashMap<u16, Status>,
    events: Vec<Arc<OwnedFd>>,
    resets: u32,
    executed: u64,
}

struct SubmissionRing {
    address: u64,
    entries: u32,
    head: u32,
    cqid: u16,
}

struct CompletionRing {
    address: u64,
    entries: u32,
    tail: u32,
    phase: bool,
    vector: Option<u16>,
}

/// Contents of a namespace.
struct NamespaceStore {
    data: Vec<u8>,
    metadata: Vec<u8>,
    /// Blocks marked by Write Uncorrectable.
    uncorrectable: BTreeSet<u64>,
}

/// Most commands executed in one step of a queue.
const STEP_MAX: usize = 1024;

impl SimulatedController {
    /// Creates a disabled controller.
    ///
    /// # Panics
    /// If the doorbell memory cannot be allocated.
    pub fn new(config: SimulatedConfig) -> SimulatedController {
        let doorbells =
            SharedRegion::new(config.bar_bytes.max(0x2000)).expect("doorbell memory can be allocated");
        let disks = config.namespaces.iter().map(NamespaceStore::new).collect();
        let exists = |(index, namespace): (u32, &IdentifyNamespace)| (namespace.nsze > 0).then_some(index);
        let attached = (1..).zip(&config.namespaces).filter_map(exists).collect();
        let formats = config.namespaces.first().map(|first| first.formats.clone()).unwrap_or_default();
        let state = SimulatedState {
            config,
            doorbells: Arc::new(doorbells),
            memory: MemoryMap::default(),
            lendable: HashMap::new(),
            lent_mapped: 0,
            started: false,
            removed: false,
            fatal: false,
            stalled: false,
            stall_after_reset: false,
            never_ready: false,
            change_capabilities: false,
            cc: 0,
            ready: false,
            shutdown: ShutdownStatus::Normal,
            aqa: 0,
            asq: 0,
            acq: 0,
            submission: HashMap::new(),
            completion: HashMap::new(),
            shadow: None,
            faults: VecDeque::new(),
            event_requests: VecDeque::new(),
            changed_namespaces: BTreeSet::new(),
            event_masked: false,
            stores: disks,
            attached,
            formats,
            fused: HashMap::new(),
            events: Vec::new(),
            resets: 0,
            executed: 0,
        };
        SimulatedController { state: Arc::new(Mutex::new(state)) }
    }

    /// The device to pass to the driver.
    pub fn device(&self) -> Box<dyn NvmeDevice> {
        Box::new(self.clone())
    }

    /// A poller that steps it every turn.
    pub fn poller(&self) -> Box<dyn Poller> {
        Box::new(Stepper(self.clone()))
    }

    /// Executes the commands in all submission queues up to their tail doorbells; returns their number.
    pub fn step(&self) -> usize {
        let mut state = self.lock();
        let mut qids: Vec<u16> = state.submission.keys().copied().collect();
        qids.sort_unstable();
        qids.into_iter().map(|qid| state.run_queue(qid)).sum()
    }

    /// Executes the commands in one submission queue, so that each core can step its own; returns their number.
    pub fn step_queue(&self, qid: u16) -> usize {
        self.lock().run_queue(qid)
    }

    /// Injects a fault: some take effect at once, others at the completion of the next I/O.
    pub fn inject_fault(&self, fault: DeviceFault) {
        let mut state = self.lock();
        match fault {
            DeviceFault::FatalStatus => state.fatal = true,
            DeviceFault::SurpriseRemoval => state.removed = true,
            DeviceFault::Stall => state.stalled = true,
            DeviceFault::StallAfterReset => state.stall_after_reset = true,
            DeviceFault::ReadyStuck => state.never_ready = true,
            DeviceFault::ChangeCapabilities => state.change_capabilities = true,
            other => state.faults.push_back(other),
        }
    }

    /// Replaces a namespace and reports the change by an asynchronous event. An `nsze` of 0 deletes it.
    ///
    /// # Panics
    /// If the namespace never existed.
    pub fn change_namespace(&self, nsid: u32, to: IdentifyNamespace) {
        let mut state = self.lock();
        let index = nsid as usize - 1;
        state.stores[index] = NamespaceStore::new(&to);
        if to.nsze > 0 {
            state.attached.insert(nsid);
        } else {
            state.attached.remove(&nsid);
        }
        state.config.namespaces[index] = to;
        state.namespace_changed(nsid);
    }

    /// Data of a namespace, without metadata.
    pub fn namespace_data(&self, nsid: u32) -> Vec<u8> {
        self.lock().stores[nsid as usize - 1].data.clone()
    }

    /// Number of controller resets: transitions of CC.EN to 0, subsystem and function resets.
    pub fn resets(&self) -> u32 {
        self.lock().resets
    }

    /// Number of I/O commands executed.
    pub fn executed(&self) -> u64 {
        self.lock().executed
    }

    /// Lets the device map the memory that the host has at `start` and lends: `memory` is another mapping of it. Other
    /// memory that is lent cannot be mapped.
    pub fn add_lendable(&self, start: usize, memory: SharedRegion) {
        self.lock().lendable.insert(start, memory);
    }

    /// Regions of lent memory that are mapped for the device.
    pub fn lent_regions(&self) -> usize {
        self.lock().lent_mapped
    }

    /// Whether the device may access memory: enabled, present and with DMA enabled.
    pub fn can_access_memory(&self) -> bool {
        let state = self.lock();
        state.started && state.ready && !state.removed
    }

    /// Number of I/O queue pairs that exist.
    pub fn queues(&self) -> usize {
        self.lock().submission.keys().filter(|qid| **qid != 0).count()
    }

    fn lock(&self) -> MutexGuard<'_, SimulatedState> {
        sync::lock(&self.state)
    }
}

impl NamespaceStore {
    fn new(namespace: &IdentifyNamespace) -> NamespaceStore {
        let format = namespace.formats[usize::from(namespace.format)];
        let blocks = namespace.nsze as usize;
        NamespaceStore {
            data: vec![0; blocks << format.data_log2],
            metadata: vec![0; blocks * usize::from(format.metadata_bytes)],
            uncorrectable: BTreeSet::new(),
        }
    }
}

struct Stepper(SimulatedController);

impl Poller for Stepper {
    fn name(&self) -> &str {
        "simulated-nvme"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        PollResult::from_count(self.0.step())
    }

    fn deadline(&self) -> Option<u64> {
        // Doorbell writes raise no event, so that the device must be polled.
        Some(0)
    }
}

impl SimulatedState {
    fn run_queue(&mut self, qid: u16) -> usize {
        if self.removed || self.fatal || self.stalled || !self.ready || !self.started {
            return 0;
        }
        let at = self.sq_doorbell_at(qid);
        let mut count = 0;
        while count < STEP_MAX {
            let Some(ring) = self.submission.get(&qid) else { break };
            let (address, entries, head, cqid) = (ring.address, ring.entries, ring.head, ring.cqid);
            let tail = match self.shadow.filter(|_| qid != 0) {
                Some((shadow, events)) => {
                    // The event index is the tail just read, so that the next tail update writes the register.
                    let tail = self.memory.read_u32(shadow + at).unwrap_or(0);
                    let _ = self.memory.write(events + at, &tail.to_le_bytes());
                    tail
                }
                None => self.doorbells.load_u32(0x1000 + at),
            };
            if tail == head || tail >= entries {
                break;
            }
            let mut bytes = [0; sqe::SIZE];
            if self.memory.read(address + u64::from(head) * sqe::SIZE as u64, &mut bytes).is_none() {
                self.fatal = true;
                break;
            }
            if let Some(ring) = self.submission.get_mut(&qid) {
                ring.head = (head + 1) % entries;
            }
            count += 1;
            let sqe = Sqe::decode(&bytes);
            let outcome = if qid == 0 { self.admin_or_fault(&sqe) } else { self.io(qid, &sqe) };
            let Some((status, result)) = outcome else { continue };
            let cqe =
                Cqe { result, sqhd: ((head + 1) % entries) as u16, sqid: qid, ..Cqe::new(sqe.cid, status) };
            if qid != 0 {
                self.executed += 1;
                self.complete_io(cqid, cqe);
            } else {
                self.post(cqid, cqe);
            }
        }
        count
    }

    /// Executes an admin command, or fails it if the next injected fault says so.
    fn admin_or_fault(&mut self, sqe: &Sqe) -> CommandOutcome {
        match self.faults.front() {
            Some(DeviceFault::FailAdmin(status))
                if sqe.opcode != AdminOpcode::AsyncEventRequest.to_wire() =>
            {
                let status = *status;
                self.faults.pop_front();
                Some((status, 0))
            }
            _ => self.admin(sqe),
        }
    }

    /// Completes an I/O and applies the next injected fault.
    fn complete_io(&mut self, cqid: u16, cqe: Cqe) {
        if matches!(self.faults.front(), None | Some(DeviceFault::FailAdmin(_))) {
            return self.post(cqid, cqe);
        }
        match self.faults.pop_front() {
            Some(DeviceFault::WrongCid(add)) => {
                self.post(cqid, Cqe { cid: cqe.cid.wrapping_add(add), ..cqe });
            }
            Some(DeviceFault::DuplicateCompletion) => {
                self.post(cqid, cqe);
                self.post(cqid, cqe);
            }
            Some(DeviceFault::WrongSqHead) => self.post(cqid, Cqe { sqhd: u16::MAX, ..cqe }),
            Some(DeviceFault::WrongSqid) => self.post(cqid, Cqe { sqid: cqe.sqid + 1, ..cqe }),
            Some(DeviceFault::Fail(status)) => self.post(cqid, Cqe { status, ..cqe }),
            // Dropped.
            _ => {}
        }
    }

    fn post(&mut self, cqid: u16, cqe: Cqe) {
        let Some(ring) = self.completion.get_mut(&cqid) else { return };
        let bytes = Cqe { phase: ring.phase, ..cqe }.to_bytes();
        let at = ring.address + u64::from(ring.tail) * cqe::SIZE as u64;
        ring.tail = (ring.tail + 1) % ring.entries;
        ring.phase ^= ring.tail == 0;
        let vector = ring.vector;
        // The dword with the phase tag is written last.
        let _ = self.memory.write(at, &bytes[..8]);
        let _ = self.memory.write(at + 8, &bytes[8..12]);
        let _ =
            self.memory.write_u32(at + 12, u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]));
        if let Some(event) = vector.and_then(|vector| self.events.get(usize::from(vector))) {
            let _ = rustix::io::write(&**event, &1u64.to_ne_bytes());
        }
    }

    fn namespace_changed(&mut self, nsid: u32) {
        self.changed_namespaces.insert(nsid);
        if self.event_masked {
            return;
        }
        if let Some(cid) = self.event_requests.pop_front() {
            self.event_masked = true;
            let result = wire_nvme::aer::AsyncEvent::NAMESPACE_CHANGED.to_result();
            self.post(0, Cqe::new(cid, Status::SUCCESS).with_result(result));
        }
    }

    fn create_io_cq(&mut self, view: CreateIoCq) -> Status {
        let known = self.completion.contains_key(&view.qid);
        if view.qid == 0 || known || u32::from(view.qid) > self.config.queues {
            return Status::INVALID_QUEUE_IDENTIFIER.do_not_retry();
        }
        if view.entries < 2 || view.entries > self.config.capabilities.queue_entries_max {
            return Status::INVALID_QUEUE_SIZE.do_not_retry();
        }
        if !view.contiguous || !view.address.is_multiple_of(4096) {
            return Status::INVALID_FIELD.do_not_retry();
        }
        let vector = view.interrupts.then_some(view.vector);
        let ring =
            CompletionRing { address: view.address, entries: view.entries, tail: 0, phase: true, vector };
        self.completion.insert(view.qid, ring);
        Status::SUCCESS
    }

    fn create_io_sq(&mut self, view: CreateIoSq) -> Status {
        let known = self.submission.contains_key(&view.qid);
        if view.qid == 0 || known || !self.completion.contains_key(&view.cqid) {
            return Status::INVALID_QUEUE_IDENTIFIER.do_not_retry();
        }
        let ring = SubmissionRing { address: view.address, entries: view.entries, head: 0, cqid: view.cqid };
        self.submission.insert(view.qid, ring);
        // The register may hold the tail of a deleted queue of the same identifier. A shadow doorbell is in host
        // memory, and the host clears it.
        self.doorbells.store_u32(0x1000 + self.sq_doorbell_at(view.qid), 0);
        Status::SUCCESS
    }

    /// Offset of a queue's tail doorbell from the first doorbell, in the registers and in shadow doorbells.
    fn sq_doorbell_at(&self, qid: u16) -> u64 {
        2 * u64::from(qid) * (4 << self.config.capabilities.doorbell_stride_log2)
    }
}
