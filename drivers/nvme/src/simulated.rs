//! A controller in software, on the thread that steps it: for tests, fuzzing and measurements of the driver.
//!
//! It sees memory as a device does: through addresses of its own, page by page, and through a mapping that
//! is not the driver's. It can be told to [misbehave](Mischief) in every way that a broken or hostile
//! device could. The arena must be made with `shared: true`.

mod commands;
mod memory_map;
mod namespaces;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use ::memory::{ChunkMemory, SharedRegion};
use reactor::{Poller, Work};
use ring::Status;
use wire_nvme::doorbell::AdminQueueAttributes;
use wire_nvme::identify::{IdentifyController, IdentifyNamespace, LbaFormat, oacs, oncs};
use wire_nvme::queue::{CreateIoCq, CreateIoSq};
use wire_nvme::registers::{
    Capabilities, Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus, Version, offset,
};
use wire_nvme::{Cqe, Sqe, cqe, sqe};

use crate::device::{Device, DeviceError, Dma, Doorbells, Registers};
use crate::shared::lock;
use memory_map::MemoryMap;

/// What the controller is.
#[derive(Clone, Debug)]
pub struct Config {
    /// CAP.
    pub capabilities: Capabilities,
    /// VS.
    pub version: Version,
    /// Identify Controller.
    pub identity: IdentifyController,
    /// The namespaces, the first is 1.
    pub namespaces: Vec<IdentifyNamespace>,
    /// I/O queues that it grants.
    pub queues: u32,
    /// Bytes of BAR0.
    pub bar_bytes: u64,
    /// Doorbell Buffer Config fails, whatever the identity says that there is.
    pub refuses_shadow: bool,
}

impl Config {
    /// A controller with a namespace of `blocks` blocks of `block_size` bytes, and capacity for as much again.
    pub fn new(blocks: u64, block_size: u32) -> Config {
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
            // Half of it belongs to no namespace.
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
            ver: Version::new(2, 0, 0),
            ..IdentifyController::default()
        };
        Config {
            capabilities: Capabilities {
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
            version: Version::new(2, 0, 0),
            identity,
            namespaces: vec![namespace],
            queues: 8,
            bar_bytes: 0x2000,
            refuses_shadow: false,
        }
    }
}

/// What the device does instead of the right thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mischief {
    /// The next I/O completes with another command identifier: this is added to the right one.
    WrongCid(u16),
    /// The next I/O completes twice.
    Twice,
    /// The next completion names a submission queue head outside of the queue.
    WrongHead,
    /// The next completion names another submission queue.
    WrongQueue,
    /// The next I/O is never answered.
    Forget,
    /// The next I/O fails with this status.
    Fail(Status),
    /// CSTS.CFS from now until a reset.
    Fatal,
    /// All ones from now on: pulled out.
    Remove,
    /// Nothing is executed from now until a reset.
    Stall,
    /// Nothing is executed from the next reset on, until the one after it.
    StallAfterReset,
    /// CSTS.RDY does not change any more.
    NeverReady,
    /// CAP is another one after the next reset.
    ChangeCapabilities,
}

/// The device; what is cloned is the same one.
#[derive(Clone)]
pub struct Simulated {
    state: Arc<Mutex<State>>,
    bells: Arc<SharedRegion>,
}

struct State {
    config: Config,
    memory: MemoryMap,
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
    mischief: VecDeque<Mischief>,
    event_requests: VecDeque<u16>,
    changed_namespaces: BTreeSet<u32>,
    event_masked: bool,
    disks: Vec<Disk>,
    /// Namespaces that are attached to the controller.
    attached: BTreeSet<u32>,
    /// Formats that a new namespace can have.
    formats: Vec<LbaFormat>,
    /// A compare that the next command of its queue is fused to, and how it ended.
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

/// What a namespace holds.
struct Disk {
    data: Vec<u8>,
    metadata: Vec<u8>,
    /// Blocks that cannot be read.
    bad: BTreeSet<u64>,
}

/// Commands executed in one step of a queue at most.
const STEP_MAX: usize = 1024;

impl Simulated {
    /// A controller, reset and disabled.
    ///
    /// # Panics
    /// When there is no memory for its doorbells.
    pub fn new(config: Config) -> Simulated {
        let bells = SharedRegion::new(config.bar_bytes.max(0x2000)).expect("memory for doorbells");
        let disks = config.namespaces.iter().map(Disk::new).collect();
        let exists = |(index, namespace): (u32, &IdentifyNamespace)| (namespace.nsze > 0).then_some(index);
        let attached = (1..).zip(&config.namespaces).filter_map(exists).collect();
        let formats = config.namespaces.first().map(|first| first.formats.clone()).unwrap_or_default();
        let state = State {
            config,
            memory: MemoryMap::default(),
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
            mischief: VecDeque::new(),
            event_requests: VecDeque::new(),
            changed_namespaces: BTreeSet::new(),
            event_masked: false,
            disks,
            attached,
            formats,
            fused: HashMap::new(),
            events: Vec::new(),
            resets: 0,
            executed: 0,
        };
        Simulated { state: Arc::new(Mutex::new(state)), bells: Arc::new(bells) }
    }

    /// What the driver is given.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(self.clone())
    }

    /// A poller that steps it every turn.
    pub fn poller(&self) -> Box<dyn Poller> {
        Box::new(Stepper(self.clone()))
    }

    /// Executes what is in the submission queues, as far as doorbells tell; returns how many commands.
    pub fn step(&self) -> usize {
        let mut state = self.lock();
        let mut qids: Vec<u16> = state.submission.keys().copied().collect();
        qids.sort_unstable();
        qids.into_iter().map(|qid| state.run_queue(qid, &self.bells)).sum()
    }

    /// The same for one submission queue, so that each core can step its own.
    pub fn step_queue(&self, qid: u16) -> usize {
        self.lock().run_queue(qid, &self.bells)
    }

    /// Misbehaves; some kinds at once, others with the next I/O that completes.
    pub fn misbehave(&self, mischief: Mischief) {
        let mut state = self.lock();
        match mischief {
            Mischief::Fatal => state.fatal = true,
            Mischief::Remove => state.removed = true,
            Mischief::Stall => state.stalled = true,
            Mischief::StallAfterReset => state.stall_after_reset = true,
            Mischief::NeverReady => state.never_ready = true,
            Mischief::ChangeCapabilities => state.change_capabilities = true,
            other => state.mischief.push_back(other),
        }
    }

    /// Makes a namespace another one and tells the host. `nsze` of 0 takes it away.
    ///
    /// # Panics
    /// When there was never such a namespace.
    pub fn change_namespace(&self, nsid: u32, to: IdentifyNamespace) {
        let mut state = self.lock();
        let index = nsid as usize - 1;
        state.disks[index] = Disk::new(&to);
        if to.nsze > 0 {
            state.attached.insert(nsid);
        } else {
            state.attached.remove(&nsid);
        }
        state.config.namespaces[index] = to;
        state.namespace_changed(nsid);
    }

    /// Bytes of a namespace, for a test to look at.
    pub fn disk(&self, nsid: u32) -> Vec<u8> {
        self.lock().disks[nsid as usize - 1].data.clone()
    }

    /// Resets of the controller so far: how often CC.EN went to 0.
    pub fn resets(&self) -> u32 {
        self.lock().resets
    }

    /// I/O commands executed so far.
    pub fn executed(&self) -> u64 {
        self.lock().executed
    }

    /// Whether the device may write memory: enabled, with bus mastering on.
    pub fn reaches_memory(&self) -> bool {
        let state = self.lock();
        state.started && state.ready && !state.removed
    }

    /// I/O queues that exist.
    pub fn queues(&self) -> usize {
        self.lock().submission.keys().filter(|qid| **qid != 0).count()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Disk {
    fn new(namespace: &IdentifyNamespace) -> Disk {
        let format = namespace.formats[usize::from(namespace.format)];
        let blocks = namespace.nsze as usize;
        Disk {
            data: vec![0; blocks << format.data_log2],
            metadata: vec![0; blocks * usize::from(format.metadata_bytes)],
            bad: BTreeSet::new(),
        }
    }
}

struct Stepper(Simulated);

impl Poller for Stepper {
    fn name(&self) -> &str {
        "simulated-nvme"
    }

    fn poll(&mut self, _now_ns: u64) -> Work {
        Work::count(self.0.step())
    }

    fn deadline(&self) -> Option<u64> {
        // Doorbells raise no event: a device never sleeps.
        Some(0)
    }
}

impl State {
    fn run_queue(&mut self, qid: u16, bells: &SharedRegion) -> usize {
        if self.removed || self.fatal || self.stalled || !self.ready || !self.started {
            return 0;
        }
        let stride = 4u64 << self.config.capabilities.doorbell_stride_log2;
        let at = 2 * u64::from(qid) * stride;
        let mut count = 0;
        while count < STEP_MAX {
            let Some(ring) = self.submission.get(&qid) else { break };
            let (address, entries, head, cqid) = (ring.address, ring.entries, ring.head, ring.cqid);
            let tail = match self.shadow.filter(|_| qid != 0) {
                Some((shadow, events)) => {
                    // The event index follows what was seen, one behind: the next step rings the bell.
                    let tail = self.memory.read_u32(shadow + at).unwrap_or(0);
                    let _ = self.memory.write(events + at, &tail.to_le_bytes());
                    tail
                }
                None => bells.load_u32(0x1000 + at),
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
            let outcome = if qid == 0 { self.admin(&sqe) } else { self.io(qid, &sqe) };
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

    /// Completes an I/O, rightly or not.
    fn complete_io(&mut self, cqid: u16, cqe: Cqe) {
        match self.mischief.pop_front() {
            None => self.post(cqid, cqe),
            Some(Mischief::WrongCid(add)) => {
                self.post(cqid, Cqe { cid: cqe.cid.wrapping_add(add), ..cqe });
            }
            Some(Mischief::Twice) => {
                self.post(cqid, cqe);
                self.post(cqid, cqe);
            }
            Some(Mischief::WrongHead) => self.post(cqid, Cqe { sqhd: u16::MAX, ..cqe }),
            Some(Mischief::WrongQueue) => self.post(cqid, Cqe { sqid: cqe.sqid + 1, ..cqe }),
            Some(Mischief::Fail(status)) => self.post(cqid, Cqe { status, ..cqe }),
            Some(_) => {}
        }
    }

    fn post(&mut self, cqid: u16, cqe: Cqe) {
        let Some(ring) = self.completion.get_mut(&cqid) else { return };
        let bytes = Cqe { phase: ring.phase, ..cqe }.to_bytes();
        let at = ring.address + u64::from(ring.tail) * cqe::SIZE as u64;
        ring.tail = (ring.tail + 1) % ring.entries;
        ring.phase ^= ring.tail == 0;
        let vector = ring.vector;
        // The word with the phase is written last.
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

    fn configure(&mut self, value: u32, bells: &SharedRegion) {
        let old = std::mem::replace(&mut self.cc, value);
        let enable = value & 1 != 0;
        if old & 1 != 0 && !enable {
            self.resets += 1;
            self.disable(bells);
        }
        if old & 1 == 0 && enable {
            self.enable();
        }
        let notified = Configuration::decode(value).map(|configuration| configuration.shutdown);
        if notified.is_ok_and(|shutdown| shutdown != ShutdownNotification::None) {
            self.shutdown = ShutdownStatus::Complete;
        }
    }

    fn disable(&mut self, bells: &SharedRegion) {
        if !self.never_ready {
            self.ready = false;
        }
        if std::mem::take(&mut self.change_capabilities) {
            // Another number, and one that a register can say.
            let entries = &mut self.config.capabilities.queue_entries_max;
            *entries = if *entries >= 4 { *entries / 2 } else { *entries + 1 };
        }
        (self.fatal, self.stalled, self.shutdown) = (false, false, ShutdownStatus::Normal);
        self.submission.clear();
        self.completion.clear();
        self.event_requests.clear();
        self.fused.clear();
        self.shadow = None;
        self.event_masked = false;
        bells.zero(0x1000, bells.len() - 0x1000);
    }

    fn enable(&mut self) {
        let AdminQueueAttributes { submission_entries, completion_entries } =
            AdminQueueAttributes::decode(self.aqa);
        let sq = SubmissionRing { address: self.asq, entries: submission_entries, head: 0, cqid: 0 };
        let cq = CompletionRing {
            address: self.acq,
            entries: completion_entries,
            tail: 0,
            phase: true,
            vector: None,
        };
        self.submission.insert(0, sq);
        self.completion.insert(0, cq);
        self.stalled = std::mem::take(&mut self.stall_after_reset);
        if !self.never_ready {
            self.ready = true;
        }
    }

    fn create_completion(&mut self, view: CreateIoCq) -> Status {
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

    fn create_submission(&mut self, view: CreateIoSq) -> Status {
        let known = self.submission.contains_key(&view.qid);
        if view.qid == 0 || known || !self.completion.contains_key(&view.cqid) {
            return Status::INVALID_QUEUE_IDENTIFIER.do_not_retry();
        }
        let ring = SubmissionRing { address: view.address, entries: view.entries, head: 0, cqid: view.cqid };
        self.submission.insert(view.qid, ring);
        Status::SUCCESS
    }
}

impl Registers for Simulated {
    fn read_u32(&self, at: u32) -> Result<u32, DeviceError> {
        let state = self.lock();
        if state.removed {
            return Ok(u32::MAX);
        }
        Ok(match at {
            offset::VS => state.config.version.encode(),
            offset::CC => state.cc,
            offset::CSTS => ControllerStatus {
                ready: state.ready,
                fatal: state.fatal,
                shutdown: state.shutdown,
                ..ControllerStatus::RESET
            }
            .encode(),
            offset::AQA => state.aqa,
            _ => 0,
        })
    }

    fn read_u64(&self, at: u32) -> Result<u64, DeviceError> {
        let state = self.lock();
        if state.removed {
            return Ok(u64::MAX);
        }
        Ok(if at == offset::CAP { state.config.capabilities.encode() } else { 0 })
    }

    fn write_u32(&self, at: u32, value: u32) -> Result<(), DeviceError> {
        let mut state = self.lock();
        match at {
            _ if state.removed => {}
            offset::CC => state.configure(value, &self.bells),
            offset::AQA => state.aqa = value,
            offset::NSSR => {
                state.cc &= !1;
                state.resets += 1;
                state.disable(&self.bells);
            }
            _ => {}
        }
        Ok(())
    }

    fn write_u64(&self, at: u32, value: u64) -> Result<(), DeviceError> {
        let mut state = self.lock();
        match at {
            offset::ASQ => state.asq = value,
            offset::ACQ => state.acq = value,
            _ => {}
        }
        Ok(())
    }

    fn doorbells(&self, _bytes: u64) -> Result<Doorbells, DeviceError> {
        let bytes = self.lock().config.bar_bytes.saturating_sub(0x1000);
        Ok(Doorbells { region: self.bells.clone(), offset: 0x1000, bytes })
    }
}

impl Dma for Simulated {
    fn map(&self, chunk: &ChunkMemory) -> Result<u64, DeviceError> {
        self.lock().memory.add(chunk)
    }

    fn start(&self) -> Result<(), DeviceError> {
        self.lock().started = true;
        Ok(())
    }

    fn stop(&self) -> Result<(), DeviceError> {
        self.lock().started = false;
        Ok(())
    }
}

impl Device for Simulated {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn is_present(&self) -> bool {
        !self.lock().removed
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>, DeviceError> {
        let failed = |error: rustix::io::Errno| DeviceError::Other(error.to_string());
        let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..vectors {
            let fd = rustix::event::eventfd(0, flags).map_err(failed)?;
            ours.push(Arc::new(fd.try_clone().map_err(|error| DeviceError::Other(error.to_string()))?));
            theirs.push(fd);
        }
        self.lock().events = ours;
        Ok(theirs)
    }

    fn reset(&self) -> Result<(), DeviceError> {
        let mut state = self.lock();
        state.cc = 0;
        state.resets += 1;
        (state.never_ready, state.started) = (false, false);
        state.disable(&self.bells);
        Ok(())
    }
}
