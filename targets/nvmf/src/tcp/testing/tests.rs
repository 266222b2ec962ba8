//! Data integrity and exactly-one completion per command, whatever the network does to the streams.

use std::collections::VecDeque;

use block_io::Channel;
use nvme_auth::AuthMessageKind;
use nvme_tcp::{
    DataPlacement, FlushStatus, PduConsumer, PduReceiver, PduSender, ReceiveStatus, SegmentSource,
};
use random::WyRand;
use wire_nvme::Cqe;
use wire_nvme::admin::{GetLogPage, SetFeatures};
use wire_nvme::feature::FeatureId;
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::tcp::{C2hData, FatalError, IcResp, PduLayout, R2t};

use super::*;

/// Maximum outstanding commands of a host.
const DEPTH: usize = 8;
/// Maximum blocks of a command.
const BLOCKS_MAX: usize = 96;

/// A PDU that the host has received.
enum HostEvent {
    Initialized(IcResp),
    Response(Cqe),
    /// All data of a read with this CID, and the SUCCESS flag.
    Data(u16, bool),
    R2tReceived(R2t),
}

/// Data buffers by CID, and received PDUs.
#[derive(Default)]
struct Buffers {
    by_cid: Vec<Vec<u8>>,
    current: Option<C2hData>,
    events: VecDeque<HostEvent>,
}

impl PduConsumer for Buffers {
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError> {
        let short = header.first_chunk::<SHORT_SIZE>().unwrap();
        match kind {
            PduType::IcResp => {
                let response = IcResp::decode(header.first_chunk().unwrap()).unwrap();
                self.events.push_back(HostEvent::Initialized(response));
            }
            PduType::CapsuleResp => self.events.push_back(HostEvent::Response(CapsuleResp::decode(short))),
            PduType::R2t => self.events.push_back(HostEvent::R2tReceived(R2t::decode(short))),
            PduType::C2hData => {
                let data = C2hData::decode(short);
                assert_eq!((data.length, data.offset, data.last), (layout.data_length, 0, true));
                self.current = Some(data);
                return Ok(DataPlacement::Buffer);
            }
            other => panic!("unexpected {other:?} for a conforming host: {header:x?}"),
        }
        Ok(DataPlacement::Discard)
    }

    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let cid = self.current.expect("data is being received").cccid;
        &mut self.by_cid[usize::from(cid)][offset..offset + length]
    }

    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        assert!(digest_ok);
        if let Some(data) = self.current.take() {
            self.events.push_back(HostEvent::Data(data.cccid, data.success));
        }
        Ok(())
    }
}

impl SegmentSource for Buffers {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        &self.by_cid[slot as usize][start..start + length]
    }

    fn sent(&mut self, _slot: u32) {}
}

/// The host's side of a queue.
struct SimulatedHostQueue {
    id: ConnectionId,
    receiver: PduReceiver,
    sender: PduSender,
    framing: Framing,
    buffers: Buffers,
}

/// The simulated network broke the connection.
struct ConnectionBroken;

impl SimulatedHostQueue {
    fn new(world: &mut SimulatedTarget, dice: &mut WyRand) -> SimulatedHostQueue {
        let buffers = Buffers { by_cid: vec![Vec::new(); DEPTH], ..Buffers::default() };
        let mut queue = SimulatedHostQueue {
            id: world.connect(),
            receiver: PduReceiver::default(),
            sender: PduSender::default(),
            framing: Framing::PLAIN,
            buffers,
        };
        let request = IcReq {
            host_data_alignment_bytes: (dice.index(32) as u8 + 1) * 4,
            header_digest: dice.index(2) == 0,
            data_digest: dice.index(2) == 0,
            r2t_max: 1,
        };
        let mut pdu = [0; IC_SIZE];
        request.encode(&mut pdu);
        queue.sender.push_bytes(&pdu);
        // The host receives with the alignment that it requested.
        queue.framing.data_alignment_bytes = request.host_data_alignment_bytes;
        queue
    }

    fn capsule(&mut self, sqe: Sqe, slot: u32, length: usize) {
        let mut header = [0; CAPSULE_CMD_SIZE];
        let layout = CapsuleCmd { sqe, data_length: length as u32 }.encode(&self.framing, &mut header);
        self.sender.push_header(&header, &layout);
        self.data(slot, 0, length, layout.data_digest);
    }

    fn data(&mut self, slot: u32, start: usize, length: usize, digest: bool) {
        if length > 0 {
            self.sender.push_data(slot, start as u32, length as u32, false);
            if digest {
                let crc = crc32c(self.buffers.bytes(slot, start, length));
                self.sender.push_bytes(&crc.to_le_bytes());
            }
        }
    }

    fn connect(&mut self, qid: u16, cntlid: u16, attributes: ConnectAttributes) {
        let (sqe, data) = connect(qid, 32, cntlid, attributes);
        self.buffers.by_cid[0] = data.to_vec();
        self.capsule(sqe, 0, data.len());
    }

    /// Answers an R2T with H2CData PDUs of random sizes.
    fn answer_r2t(&mut self, r2t: &R2t, dice: &mut WyRand) {
        let (mut start, end) = (r2t.offset, r2t.offset + r2t.length);
        while start < end {
            let left = end - start;
            let length = if dice.index(2) == 0 { left } else { 1 + dice.index(left as usize) as u32 };
            let (cccid, ttag) = (r2t.cccid, r2t.ttag);
            let pdu = H2cData { cccid, ttag, offset: start, length, last: length == left };
            let mut header = [0; SHORT_SIZE];
            let layout = pdu.encode(&self.framing, &mut header);
            self.sender.push_header(&header, &layout);
            self.data(cccid.into(), start as usize, length as usize, layout.data_digest);
            start += length;
        }
    }

    /// Sends, and receives a random number of bytes.
    fn drive(&mut self, world: &mut SimulatedTarget, dice: &mut WyRand) -> Result<(), ConnectionBroken> {
        if let FlushStatus::Failed(_) = self.sender.flush(&mut world.hosts.stream(self.id), &mut self.buffers)
        {
            return Err(ConnectionBroken);
        }
        let mut scratch = vec![0; 1 + dice.index(9000)];
        let pumped = nvme_tcp::receive_pdus(
            &mut self.receiver,
            &mut self.buffers,
            &mut world.hosts.stream(self.id),
            &mut scratch,
        );
        match pumped.expect("the target conforms to the protocol") {
            ReceiveStatus::Closed | ReceiveStatus::Failed(_) => Err(ConnectionBroken),
            _ => Ok(()),
        }
    }

    fn initialized(&mut self, response: &IcResp) {
        let (header_digest, data_digest) = (response.header_digest, response.data_digest);
        let incoming = Framing { header_digest, data_digest, ..self.framing };
        self.receiver.set_framing(incoming);
        let data_alignment_bytes = response.controller_data_alignment_bytes;
        self.framing = Framing { data_alignment_bytes, ..incoming };
    }

    /// Waits for one PDU.
    fn wait(
        &mut self,
        world: &mut SimulatedTarget,
        dice: &mut WyRand,
    ) -> Result<HostEvent, ConnectionBroken> {
        for _ in 0..IDLE_POLLS_MAX {
            if let Some(event) = self.buffers.events.pop_front() {
                return Ok(event);
            }
            self.drive(world, dice)?;
            world.poll();
        }
        panic!("no answer");
    }

    fn handshake(
        &mut self,
        world: &mut SimulatedTarget,
        dice: &mut WyRand,
        qid: u16,
        cntlid: u16,
        attributes: ConnectAttributes,
    ) -> Result<Cqe, ConnectionBroken> {
        let HostEvent::Initialized(response) = self.wait(world, dice)? else { panic!("no ICResp") };
        self.initialized(&response);
        self.connect(qid, cntlid, attributes);
        let HostEvent::Response(cqe) = self.wait(world, dice)? else { panic!("no response") };
        Ok(cqe)
    }
}

/// An outstanding command.
struct OutstandingIo {
    write: bool,
    start: usize,
    /// The data that is written, or the expected data of a read.
    bytes: Vec<u8>,
    data_came: bool,
}

/// The expected content of the device.
struct ReferenceModel {
    medium: Vec<u8>,
    /// Maximum bytes of in-capsule data.
    in_capsule: usize,
    done: usize,
    sessions: usize,
}

impl ReferenceModel {
    /// One session of a host: until `ios` commands have completed or the network breaks the connection.
    fn run_session(
        &mut self,
        world: &mut SimulatedTarget,
        dice: &mut WyRand,
        ios: usize,
    ) -> Result<(), ConnectionBroken> {
        self.sessions += 1;
        let mut admin = SimulatedHostQueue::new(world, dice);
        let outcome = self.associate(world, dice, ios, &mut admin);
        world.hosts.close(admin.id);
        outcome
    }

    fn associate(
        &mut self,
        world: &mut SimulatedTarget,
        dice: &mut WyRand,
        ios: usize,
        admin: &mut SimulatedHostQueue,
    ) -> Result<(), ConnectionBroken> {
        let attributes = if dice.index(2) == 0 {
            ConnectAttributes::DISABLE_SQ_FLOW_CONTROL
        } else {
            ConnectAttributes::empty()
        };
        let cqe = admin.handshake(world, dice, 0, CNTLID_DYNAMIC, attributes)?;
        assert!(cqe.status.is_success(), "{cqe:?}");
        admin.capsule(enable(), 0, 0);
        let HostEvent::Response(enabled) = admin.wait(world, dice)? else { panic!("no response") };
        assert!(enabled.status.is_success());
        let mut io = SimulatedHostQueue::new(world, dice);
        let cntlid = ConnectResponse::from_result(cqe.result).cntlid;
        let mut outstanding: [Option<OutstandingIo>; DEPTH] = Default::default();
        let outcome = match io.handshake(world, dice, 1, cntlid, attributes) {
            Ok(cqe) => {
                assert!(cqe.status.is_success(), "{cqe:?}");
                self.commands(world, dice, ios, &mut io, &mut outstanding)
            }
            Err(broken) => Err(broken),
        };
        world.hosts.close(io.id);
        // Each block of an outstanding write may have been written or not; read the device to find out.
        for lost in outstanding.into_iter().flatten().filter(|io| io.write) {
            world.settle_after(admin.id);
            self.resync(world, &lost);
        }
        outcome
    }

    /// Updates the model from the device where a write was outstanding when the connection broke.
    fn resync(&mut self, world: &mut SimulatedTarget, lost: &OutstandingIo) {
        let range = lost.start..lost.start + lost.bytes.len();
        let found = world.read_device(lost.start, lost.bytes.len());
        for (at, block) in found.chunks(BLOCK_BYTES).enumerate() {
            let at = at * BLOCK_BYTES;
            let old = &self.medium[range.start + at..][..BLOCK_BYTES];
            assert!(
                block == old || block == &lost.bytes[at..at + BLOCK_BYTES],
                "a block is neither old nor new"
            );
        }
        self.medium[range].copy_from_slice(&found);
    }

    fn commands(
        &mut self,
        world: &mut SimulatedTarget,
        dice: &mut WyRand,
        ios: usize,
        queue: &mut SimulatedHostQueue,
        outstanding: &mut [Option<OutstandingIo>; DEPTH],
    ) -> Result<(), ConnectionBroken> {
        let mut idle = 0;
        while self.done < ios {
            if let Some(cid) = outstanding.iter().position(Option::is_none)
                && dice.index(4) != 0
            {
                self.begin(dice, queue, outstanding, cid);
            }
            queue.drive(world, dice)?;
            idle += 1;
            while let Some(event) = queue.buffers.events.pop_front() {
                idle = 0;
                self.on_event(dice, queue, outstanding, event);
            }
            assert!(idle < IDLE_POLLS_MAX, "commands never complete");
            world.poll();
        }
        Ok(())
    }

    /// Starts a read or write of blocks that no outstanding command accesses.
    fn begin(
        &self,
        dice: &mut WyRand,
        queue: &mut SimulatedHostQueue,
        outstanding: &mut [Option<OutstandingIo>; DEPTH],
        cid: usize,
    ) {
        let blocks = 1 + if dice.index(3) == 0 { dice.index(BLOCKS_MAX) } else { dice.index(16) };
        let lba = dice.index(BLOCKS - blocks);
        let (start, length) = (lba * BLOCK_BYTES, blocks * BLOCK_BYTES);
        let meets = |io: &OutstandingIo| start < io.start + io.bytes.len() && io.start < start + length;
        if outstanding.iter().flatten().any(meets) {
            return;
        }
        let write = dice.index(2) == 0;
        let command = ReadWrite { lba: lba as u64, blocks: blocks as u32, ..ReadWrite::default() };
        let mut sqe = command.to_sqe(if write { NvmOpcode::Write } else { NvmOpcode::Read });
        (sqe.cid, sqe.nsid, sqe.data) = (cid as u16, 1, DataPointer::transport(length as u32));
        let bytes = if write {
            let salt = dice.index(256);
            (0..length).map(|at| (at * 31 + salt) as u8).collect()
        } else {
            self.medium[start..start + length].to_vec()
        };
        queue.buffers.by_cid[cid] = if write { bytes.clone() } else { vec![0xee; length] };
        let mut in_capsule = 0;
        if write && length <= self.in_capsule && (dice.index(2) == 0) {
            in_capsule = length;
            sqe.data = DataPointer::capsule(0, length as u32);
        }
        queue.capsule(sqe, cid as u32, in_capsule);
        outstanding[cid] = Some(OutstandingIo { write, start, bytes, data_came: false });
    }

    fn on_event(
        &mut self,
        dice: &mut WyRand,
        queue: &mut SimulatedHostQueue,
        outstanding: &mut [Option<OutstandingIo>; DEPTH],
        event: HostEvent,
    ) {
        let cid = match event {
            HostEvent::Initialized(_) => panic!("a second ICResp"),
            HostEvent::R2tReceived(r2t) => {
                let io =
                    outstanding[usize::from(r2t.cccid)].as_ref().expect("no such command is outstanding");
                assert!(io.write && r2t.offset == 0 && r2t.length as usize == io.bytes.len());
                return queue.answer_r2t(&r2t, dice);
            }
            HostEvent::Data(cid, success) => {
                let io = outstanding[usize::from(cid)].as_mut().expect("no such command is outstanding");
                assert!(!io.write && !io.data_came);
                io.data_came = true;
                if !success {
                    return;
                }
                cid
            }
            HostEvent::Response(cqe) => {
                assert!(cqe.status.is_success(), "{cqe:?}");
                cqe.cid
            }
        };
        let cid = usize::from(cid);
        let io = outstanding[cid].take().expect("it completes twice");
        if io.write {
            self.medium[io.start..io.start + io.bytes.len()].copy_from_slice(&io.bytes);
        } else {
            assert!(
                io.data_came && queue.buffers.by_cid[cid] == io.bytes,
                "wrong data is read at {}",
                io.start
            );
        }
        self.done += 1;
    }
}

impl SimulatedTarget {
    /// Closes the admin queue and polls until all connections are closed.
    fn settle_after(&mut self, admin: ConnectionId) {
        self.hosts.close(admin);
        self.run_until_idle();
    }

    /// Leaves the core half of its memory, in pages of which no two are neighbours. Returns what holds the
    /// others.
    fn scatter_memory(&mut self) -> Vec<dma::Buffer> {
        let core = self.reactor.core();
        let pages: Vec<dma::Buffer> = std::iter::from_fn(|| core.pool().take(4096)).collect();
        pages.into_iter().enumerate().filter_map(|(index, page)| (index % 2 == 0).then_some(page)).collect()
    }

    /// Reads the first device directly, without the target.
    fn read_device(&mut self, start: usize, bytes: usize) -> Vec<u8> {
        let core = self.reactor.core();
        let mut channel = self.devices[0].channel(&core).unwrap();
        let data = core.pool().take_data(bytes).unwrap();
        let (lba, blocks) = ((start / BLOCK_BYTES) as u64, (bytes / BLOCK_BYTES) as u32);
        let mut batch = vec![block_io::Request::read(block_io::Tag(0), lba, blocks, data)];
        let mut done = Vec::new();
        while done.is_empty() {
            channel.submit(&mut batch);
            channel.poll(&mut done);
        }
        let data = done.pop().unwrap().into_request().take_data().unwrap();
        data.parts(0, bytes).flatten().copied().collect()
    }
}

/// Runs a seed. Returns the numbers of commands, of sessions, and of moves of queues.
fn run(seed: u64) -> (usize, usize, u64) {
    let mut dice = WyRand::new(seed);
    let transport = TcpTransportConfig {
        in_capsule_data_size: [0, 4096][dice.index(2)],
        // Buffers for one command at a time, for some, or for all.
        connection_bytes_max: [1, 100_000, 16 << 20][dice.index(3)],
        c2h_success: dice.index(2) == 0,
        max_io_size: 64 << 10,
        ..TcpTransportConfig::default()
    };
    let faults = NetworkFaults {
        cut_per_mille: [0, 300, 900][dice.index(3)],
        stall_per_mille: [0, 100, 600][dice.index(3)],
        break_per_mille: [0, 1, 10][dice.index(3)],
    };
    // Half of the targets have nothing left but scattered pages: commands take their data in several.
    let arena = dma::ArenaConfig { limit_bytes: dma::CHUNK_BYTES, hugepages: false, shared: false };
    let mut world = SimulatedTarget::with_memory(&transport, seed, faults, arena);
    let held = if dice.index(2) == 0 { world.scatter_memory() } else { Vec::new() };
    world.moves = seed.is_multiple_of(2);
    let in_capsule = transport.in_capsule_data_size as usize;
    let mut oracle =
        ReferenceModel { medium: vec![0; BLOCKS * BLOCK_BYTES], in_capsule, done: 0, sessions: 0 };
    while oracle.done < 60 && oracle.sessions < 40 {
        let _ = oracle.run_session(&mut world, &mut dice, 60);
        world.run_until_idle();
    }
    drop(held);
    assert!(world.read_device(0, 64 << 10) == oracle.medium[..64 << 10]);
    (oracle.done, oracle.sessions, world.group.totals().moved)
}

#[test]
fn every_command_completes_once_with_correct_data_on_a_faulty_network() {
    // RINGBOLT_SEED=N runs only seed N.
    let one = std::env::var("RINGBOLT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seeds = one.map_or(0..400, |seed| seed..seed + 1);
    let (start, mut done, mut sessions, mut moves, mut count) = (std::time::Instant::now(), 0, 0, 0, 0);
    for seed in seeds {
        if start.elapsed().as_secs() >= 20 {
            break;
        }
        let ran = std::panic::catch_unwind(|| run(seed));
        let Ok((more_done, more_lives, moved)) = ran else { panic!("failed with RINGBOLT_SEED={seed}") };
        (done, sessions, count) = (done + more_done, sessions + more_lives, count + 1);
        moves += moved;
    }
    println!("{count} seeds, {done} commands, {sessions} sessions, {moves} moves");
    assert!(one.is_some() || moves > count as u64 * 5, "only {moves} moves in {count} seeds");
    assert!(one.is_some() || done > count * 20, "only {done} commands in {count} seeds");
}

/// A host with an enabled controller and an I/O queue, on which it sends. Its keep alive timeout is
/// `kato_ms`.
fn io_host(world: &mut SimulatedTarget, kato_ms: u32) -> FuzzHost<'_> {
    let (id, received) = (world.connect(), Vec::new());
    let mut host = FuzzHost { world, id, framing: Framing::PLAIN, segment_bytes: 1 << 20, received };
    host.initialize(0);
    let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, ConnectAttributes::empty());
    host.capsule(sqe, &data);
    let cntlid = ConnectResponse::from_result(host.result().unwrap()).cntlid;
    host.capsule(enable(), &[]);
    let fid = FeatureId::KeepAliveTimer.to_wire();
    host.capsule(SetFeatures { fid, cdw11: kato_ms, ..SetFeatures::default() }.to_sqe(0), &[]);
    host.id = host.world.connect();
    host.initialize(0);
    let (sqe, data) = connect(1, 8, cntlid, ConnectAttributes::empty());
    host.capsule(sqe, &data);
    host
}

/// The first byte of the first device.
fn first_byte(world: &SimulatedTarget) -> u8 {
    let core = world.reactor.core();
    let mut channel = world.devices[0].channel(&core).unwrap();
    let buffer = core.pool().take(BLOCK_BYTES).unwrap();
    channel.submit(&mut vec![bdev::Request::read(block_io::Tag(0), 0, 1, buffer)]);
    let mut done = Vec::new();
    while channel.poll(&mut done) == 0 {}
    done.remove(0).into_data().unwrap().single().unwrap().as_slice()[0]
}

#[test]
fn a_write_that_a_paused_target_finds_is_executed_only_before_keep_alive_expires() {
    for (pause_ns, expected) in [(900_000_000, 7), (1_100_000_000, 0)] {
        let mut world = SimulatedTarget::new(&TcpTransportConfig::default(), 1, NetworkFaults::default());
        let mut host = io_host(&mut world, 1000);
        let id = host.id;
        let write = ReadWrite { lba: 0, blocks: 1, ..ReadWrite::default() }.to_sqe(NvmOpcode::Write);
        let sqe = Sqe { nsid: 1, data: DataPointer::capsule(0, BLOCK_BYTES as u32), ..write };
        let mut pdu = vec![0; CAPSULE_CMD_SIZE];
        let capsule = CapsuleCmd { sqe, data_length: BLOCK_BYTES as u32 };
        capsule.encode(&host.framing, pdu.first_chunk_mut().unwrap());
        pdu.extend([7; BLOCK_BYTES]);
        host.receive();
        let sent = world.hosts.send(id, &[std::io::IoSlice::new(&pdu)]);
        assert!(matches!(sent, sockets::TransferResult::Bytes(count) if count == pdu.len()));
        world.now_ns += pause_ns;
        for _ in 0..100 {
            world.poll();
        }
        assert_eq!(first_byte(&world), expected, "after a pause of {pause_ns} ns");
        assert_eq!(world.group.connections().is_empty(), expected == 0);
    }
}

#[test]
fn a_draining_queue_closes_after_the_timeout_when_a_host_withholds_h2c_data() {
    for gone in [REMOVED, OTHER_PORT] {
        let mut world = SimulatedTarget::new(&TcpTransportConfig::default(), 1, NetworkFaults::default());
        let mut host = io_host(&mut world, 0);
        let write = ReadWrite { lba: 0, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Write);
        host.capsule(Sqe { nsid: 1, data: DataPointer::transport(4096), ..write }, &[]);
        world.configure(gone | 1);
        for _ in 0..100 {
            world.poll();
        }
        assert_eq!(world.group.connections().len(), 2, "the data may still arrive");
        world.now_ns += crate::queue_report::DRAIN_TIMEOUT_NS;
        for _ in 0..3 {
            world.poll();
        }
        assert!(world.group.connections().is_empty());
    }
}

#[test]
fn fuzzed_hosts_leave_no_state_behind_when_subsystems_come_and_go() {
    let start = std::time::Instant::now();
    for seed in 1..=2000 {
        if start.elapsed().as_secs() >= 10 {
            break;
        }
        let mut dice = WyRand::new(seed);
        let mut bytes: Vec<u8> = (0..64 + dice.index(512)).map(|_| dice.index(256) as u8).collect();
        // Mostly an I/O queue, which has the most state.
        bytes[0] = if dice.index(4) == 0 { bytes[0] } else { [7, 0x47][dice.index(2)] };
        let ran = std::panic::catch_unwind(|| any_bytes(&bytes));
        assert!(ran.is_ok(), "seed {seed}: {bytes:?}");
    }
}

/// Commands that one core's connections have begun.
fn begun(world: &SimulatedTarget) -> u64 {
    world.group.connections().open().map(|connection| connection.state.fabrics.link.responses.commands).sum()
}

/// Connections with bursts of commands.
const OTHERS: usize = 8;

/// Begun commands, of bursts on [`OTHERS`] connections, when one of another connection is answered that was
/// sent with them.
fn begun_before_another(burst: usize, command: Sqe) -> u64 {
    let transport = TcpTransportConfig::default();
    let mut world = SimulatedTarget::new(&transport, 1, NetworkFaults::default());
    let mut dice = WyRand::new(1);
    let none = ConnectAttributes::empty();
    let mut admin = SimulatedHostQueue::new(&mut world, &mut dice);
    let Ok(cqe) = admin.handshake(&mut world, &mut dice, 0, CNTLID_DYNAMIC, none) else { panic!("broken") };
    admin.capsule(enable(), 0, 0);
    assert!(matches!(admin.wait(&mut world, &mut dice), Ok(HostEvent::Response(_))));
    let cntlid = ConnectResponse::from_result(cqe.result).cntlid;
    let mut queues = Vec::new();
    for qid in 1..=OTHERS as u16 + 1 {
        let mut queue = SimulatedHostQueue::new(&mut world, &mut dice);
        let Ok(HostEvent::Initialized(response)) = queue.wait(&mut world, &mut dice) else {
            panic!("no ICResp")
        };
        queue.initialized(&response);
        let (sqe, data) = connect(qid, 128, cntlid, none);
        queue.buffers.by_cid[0] = data.to_vec();
        queue.capsule(sqe, 0, data.len());
        assert!(
            matches!(queue.wait(&mut world, &mut dice), Ok(HostEvent::Response(cqe)) if cqe.status.is_success())
        );
        queue.buffers.by_cid = vec![vec![0; command.data.length() as usize]; burst];
        queues.push(queue);
    }
    let flush = Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    let mut honest = queues.pop().expect("there are several");
    let before = begun(&world);
    for queue in &mut queues {
        (0..burst as u16).for_each(|cid| queue.capsule(Sqe { cid, ..command }, 0, 0));
        _ = queue.sender.flush(&mut world.hosts.stream(queue.id), &mut queue.buffers);
    }
    honest.capsule(flush, 0, 0);
    _ = honest.sender.flush(&mut world.hosts.stream(honest.id), &mut honest.buffers);
    let mut begun_when_answered = 0;
    for _ in 0..IDLE_POLLS_MAX {
        world.poll();
        assert!(honest.drive(&mut world, &mut dice).is_ok());
        if begun_when_answered == 0 && !honest.buffers.events.is_empty() {
            begun_when_answered = begun(&world) - before;
        }
        for queue in &mut queues {
            assert!(queue.drive(&mut world, &mut dice).is_ok());
        }
        if begun(&world) - before == (OTHERS * burst) as u64 + 1 {
            break;
        }
    }
    assert_eq!(begun(&world) - before, (OTHERS * burst) as u64 + 1, "every command is executed");
    let answers: usize = queues.iter().map(|queue| queue.buffers.events.len()).sum();
    assert!(answers > 0);
    begun_when_answered
}

/// What all others may begin in the turn in which a command arrives and in the one before, and the command.
fn two_turns(commands: usize) -> std::ops::RangeInclusive<u64> {
    1..=(2 * OTHERS * commands) as u64 + 1
}

#[test]
fn a_command_waits_for_a_bounded_number_of_commands_of_other_connections() {
    let begun = begun_before_another(120, Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) });
    assert!(two_turns(target_shell::TURN_COMMANDS_MAX as usize).contains(&begun), "{begun} came first");
}

#[test]
fn a_command_waits_for_a_bounded_amount_of_data_of_other_connections() {
    // 128 KiB count as four commands.
    let read = ReadWrite { blocks: 256, ..ReadWrite::default() }.to_sqe(NvmOpcode::Read);
    let begun = begun_before_another(24, Sqe { nsid: 1, data: DataPointer::transport(128 << 10), ..read });
    assert!(two_turns(target_shell::TURN_COMMANDS_MAX as usize / 4).contains(&begun), "{begun} came first");
}

#[test]
fn a_host_that_takes_no_answers_of_its_admin_queue_costs_little_memory() {
    const COMMANDS: u16 = 30;
    const BYTES: u32 = 128 << 10;
    let mut world = SimulatedTarget::new(&TcpTransportConfig::default(), 1, NetworkFaults::default());
    let (id, received) = (world.connect(), Vec::new());
    let mut host =
        FuzzHost { world: &mut world, id, framing: Framing::PLAIN, segment_bytes: 1 << 20, received };
    host.initialize(0);
    let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, ConnectAttributes::empty());
    host.capsule(sqe, &data);
    host.capsule(enable(), &[]);
    let log = GetLogPage { lid: 0, length_bytes: BYTES.into(), ..GetLogPage::default() };
    let mut stream = Vec::new();
    for cid in 0..COMMANDS {
        let sqe = Sqe { cid, data: DataPointer::transport(BYTES), ..log.to_sqe(0) };
        let mut header = [0; CAPSULE_CMD_SIZE];
        CapsuleCmd { sqe, data_length: 0 }.encode(&Framing::PLAIN, &mut header);
        stream.extend(header);
    }
    let sent = host.world.hosts.send(id, &[std::io::IoSlice::new(&stream)]);
    assert!(matches!(sent, sockets::TransferResult::Bytes(count) if count == stream.len()));
    let unsent = |world: &SimulatedTarget| {
        world.group.connections().open().map(|one| one.state.fabrics.queue.unsent_bytes()).sum::<usize>()
    };
    for _ in 0..1000 {
        host.world.poll();
    }
    // What the network has taken, and one answer.
    assert_eq!(unsent(host.world), BYTES as usize);
    let mut answers = 0;
    for _ in 0..IDLE_POLLS_MAX {
        host.world.poll();
        let mut scratch = vec![0; 4096];
        let parts = &mut [std::io::IoSliceMut::new(&mut scratch)];
        if let sockets::TransferResult::Bytes(count) = host.world.hosts.receive(id, parts) {
            answers += count;
        }
        assert!(unsent(host.world) <= BYTES as usize);
        if answers >= usize::from(COMMANDS) * BYTES as usize {
            return;
        }
    }
    panic!("{answers} bytes of answers");
}

/// Authenticates with one of the world's keys or with another, until the host has the outcome.
fn authenticate_with(host: &mut FuzzHost<'_>, key: u8, takes_outcome: bool) {
    let options = AuthOptions { groups: vec![DhGroup::Null], ..AuthOptions::default() };
    let own = AuthKeys { host: AuthKey::new(None, &[key; 32]).unwrap(), controller: None };
    let (mut exchange, mut message) = HostAuth::new(own, AuthParties::new(HOST, NQN), &options, 1);
    loop {
        let send = AuthCommand::new(message.len() as u32).to_send();
        host.capsule(Sqe { data: DataPointer::capsule(0, message.len() as u32), ..send }, &message);
        assert!(host.result().is_some(), "the message is answered");
        if AuthMessageKind::of(&message) == Some(AuthMessageKind::Reply) && !takes_outcome {
            return;
        }
        host.received.clear();
        host.capsule(Sqe { data: DataPointer::transport(4096), ..AuthCommand::new(4096).to_receive() }, &[]);
        let answer = host.received[24..24 + 4096].to_vec();
        match exchange.receive(&answer, &mut nvme_auth::SystemNonces) {
            nvme_auth::HostAction::Send(next) => message = next,
            _ => return,
        }
    }
}

/// Writes whose data is missing when an authentication fails are not executed.
#[test]
fn a_host_that_fails_to_authenticate_anew_writes_nothing_more() {
    for (key, expected) in [(1, 7), (2, 0)] {
        let mut world = SimulatedTarget::new(&TcpTransportConfig::default(), 1, NetworkFaults::default());
        world.configure(((1 << NAMESPACES) - 1) | KEYED);
        let (id, received) = (world.connect(), Vec::new());
        let mut host =
            FuzzHost { world: &mut world, id, framing: Framing::PLAIN, segment_bytes: 1 << 20, received };
        host.initialize(0);
        let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, ConnectAttributes::empty());
        host.capsule(sqe, &data);
        let cntlid = ConnectResponse::from_result(host.result().unwrap()).cntlid;
        authenticate_with(&mut host, 1, true);
        host.capsule(enable(), &[]);
        host.id = host.world.connect();
        host.initialize(0);
        let (sqe, data) = connect(1, 8, cntlid, ConnectAttributes::empty());
        host.capsule(sqe, &data);
        authenticate_with(&mut host, 1, true);
        let write = ReadWrite { lba: 0, blocks: 1, ..ReadWrite::default() }.to_sqe(NvmOpcode::Write);
        let bytes = BLOCK_BYTES as u32;
        host.received.clear();
        host.capsule(Sqe { nsid: 1, cid: 5, data: DataPointer::transport(bytes), ..write }, &[]);
        let r2t = R2t::decode(host.received.first_chunk().expect("an R2T"));
        authenticate_with(&mut host, key, false);
        host.received.clear();
        let mut header = [0; SHORT_SIZE];
        let pdu = H2cData { cccid: 5, ttag: r2t.ttag, offset: 0, length: bytes, last: true };
        let layout = pdu.encode(&host.framing, &mut header);
        host.pdu(&header, &layout, &[7; BLOCK_BYTES]);
        let mut answer = None;
        for _ in 0..100 {
            host.world.poll();
            host.receive();
            answer = answer.or_else(|| host.received.first_chunk().map(CapsuleResp::decode));
        }
        let answer = answer.expect("the write is answered");
        assert_eq!(answer.status.is_success(), expected == 7, "{answer:?}");
        assert_eq!(first_byte(&world), expected, "key {key}");
    }
}
