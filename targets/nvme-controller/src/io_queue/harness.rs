//! A host, a transport and block devices for one queue, driven by arbitrary bytes: the fuzz entry.

use std::collections::BTreeMap;
use std::rc::Rc;

use block_io::{Op, Payload, Request, RequestFlags, Status};
use dma::{Arena, ArenaConfig, Data, Pool};
use slots::Slot;
use target_shell::{CoreMemory, MemoryLimits, MemoryShare, PeerMemory};
use wire_nvme::io::{COPY_RANGE_SIZE, CopyCommand, DatasetManagement, ReadWrite};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::{DataPointer, NSID_ALL, Sqe};

use super::{CommandData, CommandToken, HostData, HostLink, HostTransfer, IoQueue, IoTransport, Transferred};
use crate::harness::ByteSource;
use crate::{ControllerLimits, NamespaceTable, Subsystem, SubsystemNamespace};

/// Slots of the queue.
const SLOTS: u32 = 16;
/// Blocks of 512 bytes of each namespace.
const BLOCKS: u64 = 256;

/// How a command was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its status.
    pub status: Status,
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// The data that was sent.
    pub data: Vec<u8>,
}

/// Where the harness's host has data: whether it arrives at once, or later.
#[derive(Debug, Default)]
pub struct FakeLocation {
    later: bool,
}

/// A transport and its host: every command is answered once, and requests stay within their namespaces.
pub struct FakeTransport {
    /// Commands that are not answered.
    pub outstanding: BTreeMap<u16, Sqe>,
    /// Answers, in order.
    pub answers: Vec<(u16, Answer)>,
    /// Device requests in flight, oldest first.
    pub requests: Vec<Request<Data>>,
    /// Commands whose data arrives later.
    pub receiving: Vec<Slot>,
    /// Slots whose data is being sent.
    pub sending: Vec<u32>,
    /// What the host sends: each byte of a command's data.
    pub host_byte: u8,
    /// How the next commands find their data.
    pub lends: bool,
    /// Data arrives, or is sent, later.
    pub later: bool,
    /// Data follows its command and cannot wait.
    pub immediate: bool,
    /// The pool has no buffers.
    pub starved: bool,
    /// Most bytes of a slice of data: what a pool has that is used up but for small buffers.
    pub slice_bytes_max: usize,
    /// Bytes that arrive before a command's data.
    pub room_before: u32,
    /// Devices are gone.
    pub devices_gone: bool,
    /// The first block of the write that must be submitted next.
    fused_write: Option<u64>,
    pool: Pool,
}

impl FakeTransport {
    /// A host without commands, with buffers and devices.
    pub fn new() -> FakeTransport {
        let arena = Arena::new(ArenaConfig { limit_bytes: 8 << 20, hugepages: false, shared: false });
        FakeTransport {
            outstanding: BTreeMap::new(),
            answers: Vec::new(),
            requests: Vec::new(),
            receiving: Vec::new(),
            sending: Vec::new(),
            host_byte: 0,
            lends: false,
            later: false,
            immediate: false,
            starved: false,
            slice_bytes_max: usize::MAX,
            room_before: 0,
            devices_gone: false,
            fused_write: None,
            pool: Pool::new(&arena),
        }
    }

    /// Memory in slices of at most `slice_bytes_max`.
    fn memory(&self, bytes: usize) -> Option<Data> {
        let lengths =
            (0..bytes).step_by(self.slice_bytes_max).map(|at| (bytes - at).min(self.slice_bytes_max));
        Data::gather(lengths.map(|length| self.pool.take(length)).collect::<Option<_>>()?)
    }

    fn answer(&mut self, cid: u16, answer: Answer) {
        assert!(self.outstanding.remove(&cid).is_some(), "{cid} was answered twice: {answer:?}");
        self.answers.push((cid, answer));
    }
}

impl Default for FakeTransport {
    fn default() -> Self {
        FakeTransport::new()
    }
}

impl HostLink for FakeTransport {
    type Location = FakeLocation;

    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.answer(token.answered(), Answer { status, result, data: Vec::new() });
    }

    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &FakeLocation,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        let data = data.parts(0, length).flatten().copied().collect();
        self.answer(token.answered(), Answer { status: Status::SUCCESS, result, data });
        if !location.later {
            return Transferred::Now;
        }
        self.sending.push(slot.index());
        Transferred::Later
    }
}

impl IoTransport for FakeTransport {
    fn locate(&mut self, sqe: &Sqe, transfer: HostTransfer) -> Result<HostData<FakeLocation>, Status> {
        assert_eq!(sqe.data.length(), transfer.bytes);
        if self.lends && transfer.lend_alignment.is_some() {
            let data = self.memory(transfer.bytes as usize).ok_or(Status::DATA_TRANSFER_ERROR)?;
            return Ok(HostData::Lent(data));
        }
        let location = FakeLocation { later: self.later };
        Ok(HostData::Moved { location, room: self.room_before + transfer.bytes, immediate: self.immediate })
    }

    fn receive(
        &mut self,
        slot: Slot,
        _cid: u16,
        location: &mut FakeLocation,
        into: &mut CommandData,
    ) -> Result<Transferred, Status> {
        into.parts_mut(0, into.len()).for_each(|part| part.fill(self.host_byte));
        if !location.later {
            return Ok(Transferred::Now);
        }
        self.receiving.push(slot);
        Ok(Transferred::Later)
    }

    fn take_data(&mut self, bytes: usize) -> Option<Data> {
        if self.starved { None } else { self.memory(bytes) }
    }

    fn submit(&mut self, backend: u32, request: Request<Data>) -> Result<(), Status> {
        // Not the last of `requests`: the write may be completed before its compare.
        if let Some(lba) = self.fused_write.take() {
            assert_eq!((request.op, request.lba), (Op::Write, lba), "a fused pair is adjacent");
        } else if self.devices_gone {
            return Err(Status::NAMESPACE_NOT_READY);
        }
        assert!((1..=3).contains(&backend), "{request:?}");
        let is_within = |lba: u64| lba + u64::from(request.blocks) <= BLOCKS;
        assert!(is_within(request.lba), "{request:?}");
        if let Payload::CopySource(lba) = request.payload {
            assert!(is_within(lba), "{request:?}");
        }
        self.fused_write = request.flags.contains(RequestFlags::FUSED).then_some(request.lba);
        self.requests.push(request);
        Ok(())
    }
}

/// Namespaces 1 to 3, each on the device with its number; `shift` gives them other devices.
pub fn namespaces(present: u8, shift: u32) -> Rc<NamespaceTable> {
    let mut subsystem = Subsystem::new(crate::harness::subnqn());
    for nsid in (1..=3).filter(|nsid| present >> nsid & 1 != 0) {
        subsystem.namespaces.push(SubsystemNamespace {
            backend: (nsid + shift) % 3 + 1,
            can_unmap: true,
            can_write_zeroes: true,
            can_write_uncorrectable: true,
            ..SubsystemNamespace::new(nsid, BLOCKS)
        });
    }
    let limits = ControllerLimits { compare_and_write: true, ..ControllerLimits::default() };
    Rc::new(NamespaceTable::new(&subsystem, 0, &limits))
}

/// A queue with its transport, and a host that uses every path of it.
pub struct QueueHarness {
    /// The queue under test.
    pub queue: IoQueue<FakeLocation>,
    /// Its transport.
    pub transport: FakeTransport,
    next_cid: u16,
}

/// Windows of the queue: at first, and at most.
const WINDOWS: [(usize, usize); 4] =
    [(1 << 12, 1 << 12), (1 << 12, 1 << 16), (1 << 20, 1 << 20), (usize::MAX, usize::MAX)];

/// A share of memory of which there is enough, with a window of `bytes` that widens to `bytes_max`.
pub fn window(bytes: usize, bytes_max: usize) -> MemoryShare {
    let limits = MemoryLimits { first_window_min: bytes, first_window_max: bytes, ..MemoryLimits::UNLIMITED };
    let core = Rc::new(CoreMemory::new(limits));
    MemoryShare::new(Rc::new(PeerMemory::new(core, usize::MAX)), bytes_max)
}

impl QueueHarness {
    /// A queue on three namespaces whose buffers count in `memory`.
    pub fn new(memory: MemoryShare) -> QueueHarness {
        let queue = IoQueue::new(SLOTS, memory, namespaces(0xff, 0));
        QueueHarness { queue, transport: FakeTransport::new(), next_cid: 0 }
    }

    /// Sends a command. Returns its identifier.
    pub fn command(&mut self, sqe: Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        let sqe = Sqe { cid, ..sqe };
        self.transport.outstanding.insert(cid, sqe);
        // Both do the same.
        match cid % 3 {
            0 => self.queue.command(CommandToken::new(cid), &sqe, &mut self.transport),
            _ => self.queue.entry(&sqe.to_bytes(), &mut self.transport),
        }
        cid
    }

    /// Completes the device request at `index`, oldest first.
    pub fn complete(&mut self, index: usize, status: Status) {
        let request = self.transport.requests.remove(index);
        self.queue.complete(request.tag, request.complete(status), &mut self.transport);
    }

    /// Reports that the data of the command at `index` of those that receive has arrived.
    pub fn receive(&mut self, index: usize, received: Result<usize, Status>) {
        let slot = self.transport.receiving.remove(index);
        assert!(self.queue.data_received(slot, received, &mut self.transport).is_none());
    }

    /// Reports that the data at `index` of that being sent was sent.
    pub fn sent(&mut self, index: usize) {
        let slot = self.transport.sending.remove(index);
        self.queue.sent(slot);
    }

    /// The answer to a command; `None` while it is outstanding.
    pub fn answer(&self, cid: u16) -> Option<&Answer> {
        self.transport.answers.iter().find(|(of, _)| *of == cid).map(|(_, answer)| answer)
    }

    /// Replaces the queue, as a move to another core does.
    pub fn change(&mut self, change: impl FnOnce(IoQueue<FakeLocation>) -> IoQueue<FakeLocation>) {
        let placeholder = IoQueue::new(1, MemoryShare::unlimited(), Rc::default());
        self.queue = change(std::mem::replace(&mut self.queue, placeholder));
    }

    /// Completes all that can be completed.
    pub fn settle(&mut self) {
        self.transport.starved = false;
        self.queue.unpause();
        loop {
            if !self.transport.requests.is_empty() {
                self.complete(0, Status::SUCCESS);
            } else if !self.transport.receiving.is_empty() {
                self.receive(0, Ok(0));
            } else if !self.transport.sending.is_empty() {
                self.sent(0);
            } else if self.queue.is_waiting() || self.queue.has_ready() {
                self.queue.retry(&mut self.transport);
            } else {
                return;
            }
        }
    }

    /// Runs what the bytes say, then settles and checks that every command was answered once and that nothing
    /// is left.
    pub fn run(bytes: &[u8]) {
        QueueHarness::run_with(bytes, |_, _| ());
    }

    /// As [`run`](Self::run), with a queue that moves whenever it can: it is paused in every other four
    /// steps.
    pub fn run_moving(bytes: &[u8]) {
        QueueHarness::run_with(bytes, |harness, step| match step % 8 {
            0 => harness.queue.pause(),
            4.. if harness.queue.is_detachable() => {
                harness.change(|queue| IoQueue::attach(queue.detach(), window(1 << 16, 1 << 16)));
            }
            7 => harness.queue.unpause(),
            _ => {}
        });
    }

    fn run_with(bytes: &[u8], mut before: impl FnMut(&mut QueueHarness, usize)) {
        let mut bytes = ByteSource(bytes);
        let (first, max) = WINDOWS[usize::from(bytes.u8() % 4)];
        let mut harness = QueueHarness::new(window(first, max));
        for step in 0.. {
            if bytes.0.is_empty() {
                break;
            }
            before(&mut harness, step);
            harness.step(&mut bytes);
        }
        harness.settle();
        assert!(!harness.queue.has_pending(|_| false));
        // A first fused command without its second may be left.
        let left = harness.transport.outstanding.len();
        assert!(left <= 1, "{:?}", harness.transport.outstanding);
        harness.queue.abort_pending(Status::ABORTED_SQ_DELETION, &mut harness.transport);
        assert!(harness.transport.outstanding.is_empty());
        assert_eq!(harness.queue.free_slots(), SLOTS as usize);
        assert_eq!((harness.queue.device_requests(), harness.queue.memory.held()), (0, 0));
    }

    fn step(&mut self, bytes: &mut ByteSource<'_>) {
        let pick = |bytes: &mut ByteSource<'_>, length: usize| usize::from(bytes.u8()) % length;
        match bytes.u8() % 10 {
            0..=3 if self.queue.free_slots() > 0 => {
                let flags = bytes.u8();
                self.transport.lends = flags & 3 == 3;
                self.transport.later = flags & 4 != 0;
                self.transport.immediate = flags & 8 != 0;
                self.transport.starved = flags & 0x30 == 0x30;
                self.transport.devices_gone = flags & 0xc0 == 0xc0;
                let choices = bytes.u8();
                self.transport.host_byte = choices & 1;
                self.transport.slice_bytes_max = if choices & 2 == 0 { usize::MAX } else { 1024 };
                let sqe = arbitrary_command(bytes);
                self.command(sqe);
            }
            4 | 5 if !self.transport.requests.is_empty() => {
                let index = pick(bytes, self.transport.requests.len());
                let status = [Status::SUCCESS, Status::UNRECOVERED_READ_ERROR]
                    [usize::from(bytes.u8().is_multiple_of(8))];
                self.complete(index, status);
            }
            6 if !self.transport.receiving.is_empty() => {
                let index = pick(bytes, self.transport.receiving.len());
                let failed = bytes.u8().is_multiple_of(8);
                self.receive(index, if failed { Err(Status::TRANSIENT_TRANSPORT_ERROR) } else { Ok(0) });
            }
            7 if !self.transport.sending.is_empty() => self.sent(pick(bytes, self.transport.sending.len())),
            8 => self.queue.retry(&mut self.transport),
            9 => self.queue.set_namespaces(namespaces(bytes.u8(), u32::from(bytes.u8() & 1))),
            _ => self.transport.starved = false,
        }
    }
}

/// A command that is likely to be accepted.
fn arbitrary_command(bytes: &mut ByteSource<'_>) -> Sqe {
    let nsid = [1, 2, 3, NSID_ALL][usize::from(bytes.u8() % 4)];
    let (lba, blocks) = (u64::from(bytes.u8()), u32::from(bytes.u8() % 16) + 1);
    let range = |opcode| ReadWrite { lba, blocks, ..ReadWrite::default() }.to_sqe(opcode);
    let (sqe, length) = match bytes.u8() % 12 {
        0 | 1 => (range(NvmOpcode::Read), blocks * 512),
        2 | 3 => (range(NvmOpcode::Write), blocks * 512),
        4 => (range(NvmOpcode::Compare), blocks * 512),
        5 => (range(NvmOpcode::Verify), 0),
        6 => (range(NvmOpcode::WriteZeroes), 0),
        7 => (Sqe::new(NvmOpcode::Flush.to_wire()), 0),
        8 => {
            let ranges = bytes.u8() % 4 + 1;
            // The ranges in the data are all zeroes or all ones: blocks 0, or beyond the end.
            let command =
                DatasetManagement { ranges: ranges.into(), deallocate: true, ..DatasetManagement::default() };
            (command.to_sqe(), u32::from(ranges) * 16)
        }
        9 => {
            let command = CopyCommand { lba: 128, ranges: 1, ..CopyCommand::default() };
            (command.to_sqe(), COPY_RANGE_SIZE as u32)
        }
        10 => {
            let sqe = range(NvmOpcode::Compare);
            (Sqe { flags: sqe.flags | 1, ..sqe }, blocks * 512)
        }
        _ => {
            let sqe = range(NvmOpcode::Write);
            (Sqe { flags: sqe.flags | 2, ..sqe }, blocks * 512)
        }
    };
    Sqe { nsid, flags: sqe.flags | Sqe::FLAGS_SGL, data: DataPointer::transport(length), ..sqe }
}
