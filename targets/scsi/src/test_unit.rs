//! A unit on a disk in memory, and an initiator that executes commands one by one.
#![cfg_attr(not(test), allow(dead_code, reason = "the fuzz entry needs a part"))]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use bdev::{BdevGeometry, Completion, Request, Uuid};
use block_io::{Mismatch, Op, Payload, RequestFlags, Status, Tag};
use dma::{Arena, ArenaConfig, Data, Pool};
use wire_scsi::{AdditionalSense, ScsiStatus, Sense};

use crate::{
    Command, DataIn, LogicalUnit, NexusPorts, Residual, Response, SanitizeExecutor, SanitizeJob, SanitizeRun,
    SessionPeers, Step, Task, TaskContext, TaskEvent, UnitConfig, UnitNexus, no_waker,
};

/// A configuration with every optional operation.
pub(crate) fn config(block_bytes: u32, blocks: u64) -> UnitConfig {
    let geometry = BdevGeometry { write_cache: true, ..BdevGeometry::new(block_bytes, blocks) };
    let uuid = Uuid::from_bytes(*b"unit of the test");
    UnitConfig { can_unmap: true, can_write_zeroes: true, can_flush: true, ..UnitConfig::new(uuid, geometry) }
}

pub(crate) fn unit(block_bytes: u32, blocks: u64) -> Arc<LogicalUnit> {
    LogicalUnit::new(config(block_bytes, blocks), Arc::default())
}

/// A nexus of the initiator with this number.
pub(crate) fn nexus(unit: &LogicalUnit, initiator: u64) -> Arc<UnitNexus> {
    unit.attach(&NexusPorts::iscsi("iqn.test:host", initiator, "iqn.test:disk", 1)).unwrap()
}

/// A disk in memory.
pub(crate) struct MemoryDisk {
    pub(crate) bytes: Vec<u8>,
    block_bytes: usize,
    /// The status of the next request, which is not executed.
    pub(crate) failure: Option<Status>,
    /// The statuses of the requests after that; those with success are executed.
    pub(crate) failures: VecDeque<Status>,
    /// Operations and flags of what was executed.
    pub(crate) log: Vec<(Op, RequestFlags)>,
}

impl MemoryDisk {
    /// Executes a batch. A fused write that follows a failed compare is not executed.
    pub(crate) fn execute(&mut self, requests: &mut Vec<Request>) -> Vec<Completion> {
        let mut fused = None;
        let completions = requests.drain(..).map(|request| {
            let is_first = request.flags.contains(RequestFlags::FUSED);
            let completion = match fused.take() {
                Some(status) if status != Status::SUCCESS => request.complete(Status::FUSED_FAILED),
                _ => self.execute_one(request),
            };
            fused = is_first.then(|| completion.status());
            completion
        });
        completions.collect()
    }

    fn execute_one(&mut self, mut request: Request) -> Completion {
        self.log.push((request.op, request.flags - RequestFlags::FUSED));
        let failure = self.failure.take().or_else(|| self.failures.pop_front());
        if let Some(status) = failure.filter(|status| !status.is_success()) {
            return request.complete(status);
        }
        let start = request.lba as usize * self.block_bytes;
        let end = start + request.blocks as usize * self.block_bytes;
        if request.op.has_range() && end > self.bytes.len() {
            return request.complete(Status::LBA_OUT_OF_RANGE);
        }
        let mut status = Status::SUCCESS;
        match request.op {
            Op::Read => request.data_mut().unwrap().copy_from(0, &self.bytes[start..end]),
            Op::Write => request.data().unwrap().copy_to(0, &mut self.bytes[start..end]),
            Op::Unmap | Op::WriteZeroes => self.bytes[start..end].fill(0),
            Op::Compare => {
                let mut expected = vec![0; end - start];
                request.data().unwrap().copy_to(0, &mut expected);
                let mut pairs = expected.iter().zip(&self.bytes[start..end]);
                if let Some(offset) = pairs.position(|(one, other)| one != other) {
                    let mismatch = Mismatch { data: request.take_data().unwrap(), offset: offset as u64 };
                    request.payload = Payload::Mismatch(Box::new(mismatch));
                    status = Status::COMPARE_FAILURE;
                }
            }
            Op::SeekData | Op::SeekHole => {
                // A block of zeroes is not allocated.
                let wants_data = request.op == Op::SeekData;
                let mut blocks = self.bytes[start..end].chunks(self.block_bytes);
                let found = blocks.position(|block| block.iter().any(|byte| *byte != 0) == wants_data);
                request.payload = Payload::Found(found.map(|at| request.lba + at as u64));
            }
            Op::Copy => {
                let Payload::CopySource(source) = request.payload else { panic!() };
                let source = source as usize * self.block_bytes;
                self.bytes.copy_within(source..source + end - start, start);
            }
            _ => {}
        }
        request.complete(status)
    }
}

/// How a command ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: ScsiStatus,
    pub(crate) sense: Option<Sense>,
    pub(crate) data: Vec<u8>,
    pub(crate) residual: Residual,
}

impl Reply {
    pub(crate) fn of(response: Response) -> Reply {
        let Response { status, sense, data, residual, .. } = response;
        let data = match data {
            DataIn::None => Vec::new(),
            DataIn::Bytes(bytes) => bytes,
            DataIn::Data(data, valid) => {
                let mut bytes = vec![0; valid as usize];
                data.copy_to(0, &mut bytes);
                bytes
            }
        };
        Reply { status, sense, data, residual }
    }

    /// The additional sense code, if it failed with CHECK CONDITION.
    pub(crate) fn additional(&self) -> Option<AdditionalSense> {
        assert_eq!(self.sense.is_some(), self.status == ScsiStatus::CheckCondition);
        self.sense.map(|sense| sense.additional)
    }

    /// The data of a command that succeeded.
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!((self.status, self.sense), (ScsiStatus::Good, None));
        self.data
    }
}

/// A target descriptor of EXTENDED COPY that names a unit.
pub(crate) fn copy_target(unit: &LogicalUnit) -> [u8; wire_scsi::copy::TARGET_BYTES] {
    use wire_scsi::inquiry::{Association, ProtocolId};
    let mut target = [0; wire_scsi::copy::TARGET_BYTES];
    target[0] = wire_scsi::copy::TARGET_IDENTIFICATION;
    let serial = crate::identity::serial(unit);
    let [naa, ..] = crate::identity::unit_designators(unit, &serial);
    let mut bytes = Vec::new();
    naa.encode(Association::Unit, ProtocolId::None, &mut bytes);
    target[4..4 + bytes.len()].copy_from_slice(&bytes);
    target
}

/// Another unit of the session.
pub(crate) struct TestPeer {
    pub(crate) nexus: Arc<UnitNexus>,
    pub(crate) disk: MemoryDisk,
}

/// The other units of the session, whose requests are executed at once.
#[derive(Default)]
pub(crate) struct TestPeers {
    pub(crate) peers: Vec<TestPeer>,
    completions: Vec<Completion>,
    tags: Vec<Tag>,
}

impl TestPeers {
    /// What has been executed since the last call, of a command with this tag.
    pub(crate) fn take_completions(&mut self, tag: Tag) -> Vec<Completion> {
        assert!(self.tags.drain(..).all(|of_request| of_request == tag));
        std::mem::take(&mut self.completions)
    }
}

impl std::fmt::Debug for TestPeers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} peers", self.peers.len())
    }
}

impl SessionPeers for TestPeers {
    fn nexus(&self, index: usize) -> Option<&Arc<UnitNexus>> {
        self.peers.get(index).map(|peer| &peer.nexus)
    }

    fn submit(&mut self, nexus: &Arc<UnitNexus>, request: Request) -> Result<(), Request> {
        let peer = self.peers.iter_mut().find(|peer| Arc::ptr_eq(&peer.nexus, nexus));
        let Some(peer) = peer else { return Err(request) };
        self.tags.push(request.tag);
        self.completions.extend(peer.disk.execute(&mut vec![request]));
        Ok(())
    }
}

/// A unit, its disk, and memory for commands.
pub(crate) struct TestUnit {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) disk: MemoryDisk,
    pub(crate) pool: Pool,
    pub(crate) peers: TestPeers,
    pub(crate) sanitizes: Arc<QueuedSanitizes>,
}

/// Sanitize operations that wait for their execution.
#[derive(Debug, Default)]
pub(crate) struct QueuedSanitizes(Mutex<VecDeque<SanitizeJob>>);

impl SanitizeExecutor for QueuedSanitizes {
    fn execute(&self, job: SanitizeJob) {
        sync::lock(&self.0).push_back(job);
    }
}

impl TestUnit {
    pub(crate) fn new(config: UnitConfig) -> TestUnit {
        TestUnit::on(LogicalUnit::new(config, Arc::default()))
    }

    pub(crate) fn on(unit: Arc<LogicalUnit>) -> TestUnit {
        let arena = Arena::new(ArenaConfig { limit_bytes: 16 << 20, hugepages: false, shared: false });
        let block_bytes = unit.block_bytes() as usize;
        let bytes = vec![0; block_bytes * unit.blocks() as usize];
        let disk =
            MemoryDisk { bytes, block_bytes, failure: None, failures: VecDeque::new(), log: Vec::new() };
        let sanitizes: Arc<QueuedSanitizes> = Arc::default();
        unit.set_sanitizer(sanitizes.clone());
        TestUnit { unit, disk, pool: Pool::new(&arena), peers: TestPeers::default(), sanitizes }
    }

    /// The next sanitize operation.
    pub(crate) fn next_sanitize(&self) -> Option<SanitizeRun> {
        let job = sync::lock(&self.sanitizes.0).pop_front()?;
        let memory = match job.memory_bytes() {
            0 => None,
            bytes => Some(self.sliced(&vec![0xee; bytes as usize])),
        };
        Some(SanitizeRun::new(job, memory))
    }

    /// Executes the sanitize operations.
    pub(crate) fn sanitize(&mut self) {
        while let Some(mut run) = self.next_sanitize() {
            while let Some(request) = run.next_request() {
                run.complete(self.disk.execute(&mut vec![request]).remove(0));
            }
        }
    }

    /// Makes a unit another one of the session.
    pub(crate) fn add_peer(&mut self, other: TestUnit) {
        self.peers.peers.push(TestPeer { nexus: nexus(&other.unit, 1), disk: other.disk });
    }

    /// A nexus whose first unit attention was reported.
    pub(crate) fn nexus(&mut self, initiator: u64) -> Arc<UnitNexus> {
        let nexus = nexus(&self.unit, initiator);
        let first = self.run(&nexus, &[0; 6], &[], 0);
        assert_eq!(first.additional(), Some(AdditionalSense::POWER_ON));
        nexus
    }

    /// Data of a pool, in slices of at most 1000 bytes.
    pub(crate) fn sliced(&self, bytes: &[u8]) -> Data {
        let slices = bytes.chunks(1000).map(|chunk| {
            let mut buffer = self.pool.take(chunk.len()).unwrap();
            buffer.copy_from(0, chunk);
            buffer
        });
        Data::gather(slices.collect()).unwrap()
    }

    /// Executes a command to its end, whatever it is.
    pub(crate) fn run(
        &mut self,
        nexus: &UnitNexus,
        cdb: &[u8],
        data_out: &[u8],
        data_in_bytes: u32,
    ) -> Reply {
        let waker = no_waker();
        let mut requests = Vec::new();
        let mut peers = std::mem::take(&mut self.peers);
        let command = Command {
            cdb,
            data_out_bytes: data_out.len() as u32,
            data_in_bytes,
            tag: Tag(5),
            ..Command::default()
        };
        macro_rules! context {
            () => {
                &mut TaskContext {
                    nexus,
                    luns: &[0, 7],
                    waker: &waker,
                    requests: &mut requests,
                    peers: &mut peers,
                }
            };
        }
        let (mut task, mut step) = Task::start(&command, context!());
        let mut early = None;
        let mut completions = Vec::new();
        let reply = loop {
            let event = match step {
                Step::Done(response) => {
                    self.sanitize();
                    break Reply::of(response);
                }
                Step::Aborted => break early.expect("a task that is not aborted answers"),
                Step::DataOut(bytes) => TaskEvent::DataOut(self.sliced(&data_out[..bytes as usize])),
                Step::DataIn(bytes) | Step::Memory(bytes) => {
                    assert!(bytes > 0 && bytes <= crate::TRANSFER_BYTES_MAX);
                    let event =
                        if matches!(step, Step::DataIn(_)) { TaskEvent::DataIn } else { TaskEvent::Memory };
                    event(self.sliced(&vec![0xee; bytes as usize]))
                }
                Step::Pending => {
                    self.sanitize();
                    TaskEvent::Changed
                }
                Step::InFlight | Step::Respond(_) => {
                    if let Step::Respond(response) = step {
                        early = Some(Reply::of(response));
                    }
                    assert!(requests.iter().all(|request| request.tag == Tag(5)));
                    completions.extend(self.disk.execute(&mut requests));
                    completions.extend(peers.take_completions(Tag(5)));
                    assert!(task.is_in_flight());
                    TaskEvent::Completed(completions.remove(0))
                }
            };
            step = task.resume(event, context!());
        };
        self.peers = peers;
        reply
    }
}
