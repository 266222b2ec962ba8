//! Whatever a network does to streams, data is right and every command is answered once.

use std::collections::VecDeque;

use nvme_tcp::{Consumer, Flushed, Place, Pumped, Receiver, Segments, Sender};
use ring::Channel;
use wire_nvme::Cqe;
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::tcp::{C2hData, Fatal, IcResp, Layout, R2t};

use super::*;

/// Commands that a host has outstanding, at most.
const DEPTH: usize = 8;
/// Most blocks of a command.
const BLOCKS_MAX: usize = 96;

/// Numbers from a seed (xorshift64*).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

/// What a host heard.
enum Heard {
    Initialized(IcResp),
    Answer(Cqe),
    /// All data of a read, and whether that says that it succeeded.
    Data(u16, bool),
    Asked(R2t),
}

/// Buffers by command identifier, and what is arriving.
#[derive(Default)]
struct Buffers {
    by_cid: Vec<Vec<u8>>,
    current: Option<C2hData>,
    heard: VecDeque<Heard>,
}

impl Consumer for Buffers {
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal> {
        let short = header.first_chunk::<SHORT_SIZE>().unwrap();
        match kind {
            PduType::IcResp => {
                let response = IcResp::decode(header.first_chunk().unwrap()).unwrap();
                self.heard.push_back(Heard::Initialized(response));
            }
            PduType::CapsuleResp => self.heard.push_back(Heard::Answer(CapsuleResp::decode(short))),
            PduType::R2t => self.heard.push_back(Heard::Asked(R2t::decode(short))),
            PduType::C2hData => {
                let data = C2hData::decode(short);
                assert_eq!((data.length, data.offset, data.last), (layout.data_length, 0, true));
                self.current = Some(data);
                return Ok(Place::Here);
            }
            other => panic!("{other:?} of a target whose host keeps to the rules: {header:x?}"),
        }
        Ok(Place::Nowhere)
    }

    fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let cid = self.current.expect("data is arriving").cccid;
        &mut self.by_cid[usize::from(cid)][offset..offset + length]
    }

    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal> {
        assert!(digest_ok);
        if let Some(data) = self.current.take() {
            self.heard.push_back(Heard::Data(data.cccid, data.success));
        }
        Ok(())
    }
}

impl Segments for Buffers {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        &self.by_cid[slot as usize][start..start + length]
    }

    fn sent(&mut self, _slot: u32) {}
}

/// A host's end of a queue.
struct Queue {
    id: ConnectionId,
    receiver: Receiver,
    sender: Sender,
    framing: Framing,
    buffers: Buffers,
}

/// The connection broke.
struct Broken;

impl Queue {
    fn new(world: &mut World, dice: &mut Dice) -> Queue {
        let buffers = Buffers { by_cid: vec![Vec::new(); DEPTH], ..Buffers::default() };
        let mut queue = Queue {
            id: world.dial(),
            receiver: Receiver::default(),
            sender: Sender::default(),
            framing: Framing::PLAIN,
            buffers,
        };
        let request = IcReq {
            host_data_alignment_bytes: (dice.below(32) as u8 + 1) * 4,
            header_digest: dice.one_in(2),
            data_digest: dice.one_in(2),
            r2t_max: 1,
        };
        let mut pdu = [0; IC_SIZE];
        request.encode(&mut pdu);
        queue.sender.push_bytes(&pdu);
        // What we receive is laid out as we ask.
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

    fn connect(&mut self, qid: u16, cntlid: u16, attributes: u8) {
        let (sqe, data) = connect(qid, 32, cntlid, attributes);
        self.buffers.by_cid[0] = data.to_vec();
        self.capsule(sqe, 0, data.len());
    }

    /// Answers an R2T in pieces of any size.
    fn answer(&mut self, r2t: &R2t, dice: &mut Dice) {
        let (mut start, end) = (r2t.offset, r2t.offset + r2t.length);
        while start < end {
            let left = end - start;
            let length = if dice.one_in(2) { left } else { 1 + dice.below(left as usize) as u32 };
            let (cccid, ttag) = (r2t.cccid, r2t.ttag);
            let pdu = H2cData { cccid, ttag, offset: start, length, last: length == left };
            let mut header = [0; SHORT_SIZE];
            let layout = pdu.encode(&self.framing, &mut header);
            self.sender.push_header(&header, &layout);
            self.data(cccid.into(), start as usize, length as usize, layout.data_digest);
            start += length;
        }
    }

    /// Moves bytes both ways, a random amount.
    fn drive(&mut self, world: &mut World, dice: &mut Dice) -> Result<(), Broken> {
        if let Flushed::Failed(_) = self.sender.flush(&mut world.hosts, self.id, &mut self.buffers) {
            return Err(Broken);
        }
        let mut scratch = vec![0; 1 + dice.below(9000)];
        let pumped =
            nvme_tcp::pump(&mut self.receiver, &mut self.buffers, &mut world.hosts, self.id, &mut scratch);
        match pumped.expect("the target keeps to the rules") {
            Pumped::Closed | Pumped::Failed(_) => Err(Broken),
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

    /// Waits for one answer; data of others is not expected.
    fn wait(&mut self, world: &mut World, dice: &mut Dice) -> Result<Heard, Broken> {
        for _ in 0..TURNS_MAX {
            if let Some(heard) = self.buffers.heard.pop_front() {
                return Ok(heard);
            }
            self.drive(world, dice)?;
            world.turn();
        }
        panic!("no answer");
    }

    fn handshake(
        &mut self,
        world: &mut World,
        dice: &mut Dice,
        qid: u16,
        cntlid: u16,
        attributes: u8,
    ) -> Result<Cqe, Broken> {
        let Heard::Initialized(response) = self.wait(world, dice)? else { panic!("no ICResp") };
        self.initialized(&response);
        self.connect(qid, cntlid, attributes);
        let Heard::Answer(cqe) = self.wait(world, dice)? else { panic!("no response") };
        Ok(cqe)
    }
}

/// A command under way.
struct Io {
    write: bool,
    start: usize,
    /// What is written, or what the read is to find.
    bytes: Vec<u8>,
    data_came: bool,
}

/// What the device holds.
struct Oracle {
    medium: Vec<u8>,
    /// Bytes of data that a capsule may have.
    in_capsule: usize,
    done: usize,
    lives: usize,
}

impl Oracle {
    /// One life of a host: until `ios` commands are done or the network breaks.
    fn live(&mut self, world: &mut World, dice: &mut Dice, ios: usize) -> Result<(), Broken> {
        self.lives += 1;
        let mut admin = Queue::new(world, dice);
        let outcome = self.associate(world, dice, ios, &mut admin);
        world.hosts.close(admin.id);
        outcome
    }

    fn associate(
        &mut self,
        world: &mut World,
        dice: &mut Dice,
        ios: usize,
        admin: &mut Queue,
    ) -> Result<(), Broken> {
        let attributes = if dice.one_in(2) { ConnectAttributes::DISABLE_SQ_FLOW_CONTROL } else { 0 };
        let cqe = admin.handshake(world, dice, 0, CNTLID_DYNAMIC, attributes)?;
        assert!(cqe.status.is_success(), "{cqe:?}");
        admin.capsule(enable(), 0, 0);
        let Heard::Answer(enabled) = admin.wait(world, dice)? else { panic!("no response") };
        assert!(enabled.status.is_success());
        let mut io = Queue::new(world, dice);
        let cntlid = Connected::from_result(cqe.result).cntlid;
        let mut under_way: [Option<Io>; DEPTH] = Default::default();
        let outcome = match io.handshake(world, dice, 1, cntlid, attributes) {
            Ok(cqe) => {
                assert!(cqe.status.is_success(), "{cqe:?}");
                self.commands(world, dice, ios, &mut io, &mut under_way)
            }
            Err(broken) => Err(broken),
        };
        world.hosts.close(io.id);
        // What was under way may have happened or not, block by block; the next life finds out.
        for lost in under_way.into_iter().flatten().filter(|io| io.write) {
            world.settle_after(admin.id);
            self.look(world, &lost);
        }
        outcome
    }

    /// Takes over what the device holds where a write was lost.
    fn look(&mut self, world: &mut World, lost: &Io) {
        let range = lost.start..lost.start + lost.bytes.len();
        let found = world.read_device(lost.start, lost.bytes.len());
        for (at, block) in found.chunks(BLOCK_BYTES).enumerate() {
            let at = at * BLOCK_BYTES;
            let old = &self.medium[range.start + at..][..BLOCK_BYTES];
            assert!(block == old || block == &lost.bytes[at..at + BLOCK_BYTES], "neither old nor new");
        }
        self.medium[range].copy_from_slice(&found);
    }

    fn commands(
        &mut self,
        world: &mut World,
        dice: &mut Dice,
        ios: usize,
        queue: &mut Queue,
        under_way: &mut [Option<Io>; DEPTH],
    ) -> Result<(), Broken> {
        let mut idle = 0;
        while self.done < ios {
            if let Some(cid) = under_way.iter().position(Option::is_none)
                && !dice.one_in(4)
            {
                self.begin(dice, queue, under_way, cid);
            }
            queue.drive(world, dice)?;
            idle += 1;
            while let Some(heard) = queue.buffers.heard.pop_front() {
                idle = 0;
                self.heard(dice, queue, under_way, heard);
            }
            assert!(idle < TURNS_MAX, "commands are never answered");
            world.turn();
        }
        Ok(())
    }

    /// Starts a read or a write of blocks that no other command is at.
    fn begin(&self, dice: &mut Dice, queue: &mut Queue, under_way: &mut [Option<Io>; DEPTH], cid: usize) {
        let blocks = 1 + if dice.one_in(3) { dice.below(BLOCKS_MAX) } else { dice.below(16) };
        let lba = dice.below(BLOCKS - blocks);
        let (start, length) = (lba * BLOCK_BYTES, blocks * BLOCK_BYTES);
        let meets = |io: &Io| start < io.start + io.bytes.len() && io.start < start + length;
        if under_way.iter().flatten().any(meets) {
            return;
        }
        let write = dice.one_in(2);
        let command = ReadWrite { lba: lba as u64, blocks: blocks as u32, ..ReadWrite::default() };
        let mut sqe = command.to_sqe(if write { NvmOpcode::Write } else { NvmOpcode::Read });
        (sqe.cid, sqe.nsid, sqe.data) = (cid as u16, 1, DataPointer::transport(length as u32));
        let bytes = if write {
            let salt = dice.below(256);
            (0..length).map(|at| (at * 31 + salt) as u8).collect()
        } else {
            self.medium[start..start + length].to_vec()
        };
        queue.buffers.by_cid[cid] = if write { bytes.clone() } else { vec![0xee; length] };
        let mut in_capsule = 0;
        if write && length <= self.in_capsule && dice.one_in(2) {
            in_capsule = length;
            sqe.data = DataPointer::capsule(0, length as u32);
        }
        queue.capsule(sqe, cid as u32, in_capsule);
        under_way[cid] = Some(Io { write, start, bytes, data_came: false });
    }

    fn heard(
        &mut self,
        dice: &mut Dice,
        queue: &mut Queue,
        under_way: &mut [Option<Io>; DEPTH],
        heard: Heard,
    ) {
        let cid = match heard {
            Heard::Initialized(_) => panic!("a second ICResp"),
            Heard::Asked(r2t) => {
                let io = under_way[usize::from(r2t.cccid)].as_ref().expect("nothing is under way");
                assert!(io.write && r2t.offset == 0 && r2t.length as usize == io.bytes.len());
                return queue.answer(&r2t, dice);
            }
            Heard::Data(cid, success) => {
                let io = under_way[usize::from(cid)].as_mut().expect("nothing is under way");
                assert!(!io.write && !io.data_came);
                io.data_came = true;
                if !success {
                    return;
                }
                cid
            }
            Heard::Answer(cqe) => {
                assert!(cqe.status.is_success(), "{cqe:?}");
                cqe.cid
            }
        };
        let cid = usize::from(cid);
        let io = under_way[cid].take().expect("it is answered twice");
        if io.write {
            self.medium[io.start..io.start + io.bytes.len()].copy_from_slice(&io.bytes);
        } else {
            assert!(
                io.data_came && queue.buffers.by_cid[cid] == io.bytes,
                "other data is read at {}",
                io.start
            );
        }
        self.done += 1;
    }
}

impl World {
    /// Turns until the I/O queue has ended and only the admin queue may be left.
    fn settle_after(&mut self, admin: ConnectionId) {
        self.hosts.close(admin);
        self.settle();
    }

    /// What the first device holds, read around the target.
    fn read_device(&mut self, start: usize, bytes: usize) -> Vec<u8> {
        let core = self.reactor.core();
        let mut channel = self.devices[0].channel(&core).unwrap();
        let buffer = core.pool().take(bytes).unwrap();
        let (lba, blocks) = ((start / BLOCK_BYTES) as u64, (bytes / BLOCK_BYTES) as u32);
        let mut batch = vec![ring::Request::read(ring::Tag(0), lba, blocks, buffer)];
        let mut done = Vec::new();
        while done.is_empty() {
            channel.submit(&mut batch);
            channel.poll(&mut done);
        }
        done.pop().unwrap().into_request().buffer.unwrap().as_slice().to_vec()
    }
}

fn run(seed: u64) -> (usize, usize) {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let transport = TransportConfig {
        in_capsule_data_size: [0, 4096][dice.below(2)],
        // One command at a time, or some, or all.
        connection_bytes_max: [1, 100_000, 16 << 20][dice.below(3)],
        c2h_success: dice.one_in(2),
        max_io_size: 64 << 10,
        ..TransportConfig::default()
    };
    let faults = Faults {
        cut_per_mille: [0, 300, 900][dice.below(3)],
        stall_per_mille: [0, 100, 600][dice.below(3)],
        break_per_mille: [0, 1, 10][dice.below(3)],
    };
    let mut world = World::new(&transport, seed, faults);
    let in_capsule = transport.in_capsule_data_size as usize;
    let mut oracle = Oracle { medium: vec![0; BLOCKS * BLOCK_BYTES], in_capsule, done: 0, lives: 0 };
    while oracle.done < 60 && oracle.lives < 40 {
        let _ = oracle.live(&mut world, &mut dice, 60);
        world.settle();
    }
    assert!(world.read_device(0, 64 << 10) == oracle.medium[..64 << 10]);
    (oracle.done, oracle.lives)
}

#[test]
fn commands_are_answered_once_and_data_is_right_whatever_the_network_does() {
    // RINGBOLT_SEED=N runs that one.
    let one = std::env::var("RINGBOLT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let seeds = one.map_or(0..400, |seed| seed..seed + 1);
    let (start, mut done, mut lives, mut count) = (std::time::Instant::now(), 0, 0, 0);
    for seed in seeds {
        if start.elapsed().as_secs() >= 20 {
            break;
        }
        let ran = std::panic::catch_unwind(|| run(seed));
        let Ok((more_done, more_lives)) = ran else { panic!("failed with RINGBOLT_SEED={seed}") };
        (done, lives, count) = (done + more_done, lives + more_lives, count + 1);
    }
    println!("{count} seeds, {done} commands, {lives} lives");
    assert!(one.is_some() || done > count * 20, "{done} commands of {count} seeds prove little");
}

#[test]
fn a_host_that_owes_data_does_not_keep_a_queue_that_is_to_end_for_ever() {
    for gone in [REMOVED, ELSEWHERE] {
        let mut world = World::new(&TransportConfig::default(), 1, Faults::default());
        let id = world.dial();
        let mut host =
            Babbler { world: &mut world, id, framing: Framing::PLAIN, cut: 1 << 20, heard: Vec::new() };
        host.initialize(0);
        let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, 0);
        host.capsule(sqe, &data);
        let cntlid = Connected::from_result(host.result().unwrap()).cntlid;
        host.capsule(enable(), &[]);
        host.id = host.world.dial();
        host.initialize(0);
        let (sqe, data) = connect(1, 8, cntlid, 0);
        host.capsule(sqe, &data);
        let write = ReadWrite { lba: 0, blocks: 8, ..ReadWrite::default() }.to_sqe(NvmOpcode::Write);
        host.capsule(Sqe { nsid: 1, data: DataPointer::transport(4096), ..write }, &[]);
        world.configure(gone | 1);
        for _ in 0..100 {
            world.turn();
        }
        assert_eq!(world.group.connections.len(), 2, "the data may still come");
        world.now_ns += crate::connection::LEAVE_NS_MAX;
        for _ in 0..3 {
            world.turn();
        }
        assert!(world.group.connections.is_empty());
    }
}

#[test]
fn nothing_stays_of_hosts_that_say_anything_while_their_subsystem_comes_and_goes() {
    let start = std::time::Instant::now();
    for seed in 1..=2000 {
        if start.elapsed().as_secs() >= 10 {
            break;
        }
        let mut dice = Dice(seed);
        let mut bytes: Vec<u8> = (0..64 + dice.below(512)).map(|_| dice.below(256) as u8).collect();
        // Mostly an I/O queue, which is where there is most to lose.
        bytes[0] = if dice.one_in(4) { bytes[0] } else { 7 };
        let ran = std::panic::catch_unwind(|| any_bytes(&bytes));
        assert!(ran.is_ok(), "seed {seed}: {bytes:?}");
    }
}
