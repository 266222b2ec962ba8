//! A group on a network in memory: for tests that cut and break it, and for fuzzing.

#[cfg(test)]
mod tests;

use bdev::malloc::MallocConfig;
use bdev::{Access, Descriptor, Registry};
use controller::{Listener, Namespace, Subsystem};
use net::{Faults, Simulation};
use reactor::Reactor;
use wire_nvme::digest::crc32c;
use wire_nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData};
use wire_nvme::fabrics::{Connected, PropertySet};
use wire_nvme::registers::offset;
use wire_nvme::tcp::{
    CAPSULE_CMD_SIZE, CapsuleCmd, CapsuleResp, CommonHeader, Framing, H2cData, IC_SIZE, IcReq, PduType,
    SHORT_SIZE,
};
use wire_nvme::{DataPointer, Sqe};

use super::*;
use crate::TransportConfig;

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
const BLOCK_BYTES: usize = 512;
/// Blocks of each device.
const BLOCKS: usize = 512;
const NAMESPACES: u32 = 3;
/// The port that hosts come in by.
const PORT: u16 = 1;
/// Of what is configured: the subsystem is reached through another port.
const ELSEWHERE: u32 = 1 << 6;
/// Of what is configured: there is no subsystem.
const REMOVED: u32 = 1 << 7;
/// CC as Linux writes it to enable a controller.
const ENABLE: u64 = 0x0046_0001;
/// A turn of the loop takes so long.
const TURN_NS: u64 = 10_000;
/// Idle turns after which whatever is still to happen never will.
const TURNS_MAX: usize = 200_000;

/// One group, the hosts' end of its network, and the time.
struct World {
    group: Group<Simulation>,
    hosts: Simulation,
    now_ns: u64,
    devices: Vec<Arc<Descriptor>>,
    // Last: what it lent goes first.
    reactor: Reactor,
}

fn address() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 4420))
}

impl World {
    fn new(transport: &TransportConfig, seed: u64, faults: Faults) -> World {
        let reactor = Reactor::new(&reactor::Config::default()).expect("a reactor for a test");
        let core = reactor.core();
        let registry = Registry::new();
        let device = |n| {
            let name = format!("Malloc{n}");
            bdev::malloc::create(&registry, MallocConfig::new(&name, BLOCKS as u64, BLOCK_BYTES as u32))
                .expect("a new name");
            Arc::new(registry.open(&name, Access::Exclusive { by: "test" }).expect("it was just made"))
        };
        let devices = (0..NAMESPACES).map(device).collect();
        let (hosts, network) = Simulation::pair(seed, faults);
        let (_, messages) = core.mailbox(16);
        let limits = transport.limits().expect("the options are in range");
        let boards: Arc<[Board]> = [Board::default()].into();
        let mut group = Group::new(&core, network, limits, Arc::new(Directory::new()), boards, messages);
        group.listen(address(), PORT).expect("room for a listener");
        let mut world = World { group, hosts, now_ns: 1, devices, reactor };
        world.configure((1 << NAMESPACES) - 1);
        world
    }

    /// Serves the namespaces that have a bit; namespace 1 is bit 0. See also [`ELSEWHERE`] and [`REMOVED`].
    fn configure(&mut self, present: u32) {
        let mut picture = Picture::default();
        let nqn: Nqn = NQN.parse().expect("a name");
        let mut subsystem = Subsystem { allow_any_host: true, ..Subsystem::new(nqn.clone()) };
        for key in (0..NAMESPACES).filter(|key| present >> key & 1 != 0) {
            let namespace = Namespace::new(key + 1, BLOCKS as u64);
            let (can_unmap, can_write_zeroes) = (true, true);
            subsystem.namespaces.push(Namespace { backend: key, can_unmap, can_write_zeroes, ..namespace });
            picture.devices.insert(key, self.devices[key as usize].clone());
        }
        let portid = if present & ELSEWHERE == 0 { PORT } else { PORT + 1 };
        subsystem.listeners.push(Listener { portid, ana: Vec::new() });
        if present & REMOVED == 0 {
            picture.subsystems.insert(nqn, Arc::new(subsystem));
        }
        self.group.apply(&self.reactor.core(), Arc::new(picture), self.now_ns);
    }

    fn turn(&mut self) {
        self.now_ns += TURN_NS;
        self.group.turn(&self.reactor.core(), self.now_ns);
    }

    fn dial(&mut self) -> ConnectionId {
        let stream = self.hosts.connect(address());
        self.hosts.add(stream).expect("room for a connection")
    }

    /// Once every host has gone, nothing of them is left after a while.
    fn settle(&mut self) {
        for _ in 0..TURNS_MAX {
            if self.group.connections.is_empty() {
                return;
            }
            self.turn();
            self.now_ns += 10 * TURN_NS;
        }
        panic!("{} connections stay without hosts", self.group.connections.len());
    }
}

fn connect(qid: u16, queue_entries: u32, cntlid: u16, attributes: u8) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let attributes = ConnectAttributes(attributes);
    let command = Connect { record_format: 0, qid, queue_entries, attributes, kato_ms: 0 };
    let mut data = [0; CONNECT_DATA_SIZE];
    let (subnqn, hostnqn) = (NQN.parse().expect("a name"), HOST.parse().expect("a name"));
    ConnectData { host_id: [1; 16], cntlid, subnqn, hostnqn }.encode(&mut data);
    (Sqe { data: DataPointer::capsule(0, CONNECT_DATA_SIZE as u32), ..command.to_sqe() }, data)
}

fn enable() -> Sqe {
    PropertySet { wide: false, offset: offset::CC, value: ENABLE }.to_sqe()
}

/// A host that sends what bytes say, for [`any_bytes`].
struct Babbler<'a> {
    world: &'a mut World,
    id: ConnectionId,
    framing: Framing,
    /// Bytes of each piece that the stream is cut into.
    cut: usize,
    heard: Vec<u8>,
}

impl Babbler<'_> {
    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let piece = bytes.len().min(self.cut);
            match self.world.hosts.send(self.id, &[std::io::IoSlice::new(&bytes[..piece])]) {
                net::Transfer::Bytes(count) => bytes = &bytes[count..],
                net::Transfer::Blocked => {}
                net::Transfer::Closed | net::Transfer::Failed(_) => return,
            }
            self.world.turn();
            self.hear();
        }
    }

    fn hear(&mut self) {
        let mut scratch = [0; 4096];
        let parts = &mut [std::io::IoSliceMut::new(&mut scratch)];
        while let net::Transfer::Bytes(count) = self.world.hosts.receive(self.id, parts) {
            self.heard.extend_from_slice(&parts[0][..count]);
            if self.heard.len() > 64 << 10 {
                self.heard.clear();
            }
        }
    }

    fn pdu(&mut self, header: &[u8], layout: &wire_nvme::tcp::Layout, data: &[u8]) {
        let mut pdu = header.to_vec();
        if layout.header_digest {
            pdu.extend(crc32c(header).to_le_bytes());
        }
        pdu.resize(layout.prefix_length(), 0);
        pdu.extend(data);
        if layout.data_digest {
            pdu.extend(crc32c(data).to_le_bytes());
        }
        self.send(&pdu);
    }

    fn capsule(&mut self, sqe: Sqe, data: &[u8]) {
        let mut header = [0; CAPSULE_CMD_SIZE];
        let layout = CapsuleCmd { sqe, data_length: data.len() as u32 }.encode(&self.framing, &mut header);
        self.pdu(&header, &layout, data);
    }

    fn initialize(&mut self, digests: u8) {
        let (header_digest, data_digest) = (digests & 1 != 0, digests & 2 != 0);
        let mut pdu = [0; IC_SIZE];
        let request = IcReq { host_data_alignment_bytes: 4, header_digest, data_digest, r2t_max: 1 };
        request.encode(&mut pdu);
        self.send(&pdu);
        self.framing = Framing { header_digest, data_digest, ..Framing::PLAIN };
    }

    /// The result of the last response, if the last PDU was one.
    fn result(&self) -> Option<u64> {
        let digest = if self.framing.header_digest { 4 } else { 0 };
        let start = self.heard.len().checked_sub(SHORT_SIZE + digest)?;
        let pdu = self.heard[start..].first_chunk::<SHORT_SIZE>()?;
        let common = CommonHeader::decode(pdu.first_chunk()?).ok()?;
        (common.kind == PduType::CapsuleResp).then(|| CapsuleResp::decode(pdu).result)
    }
}

/// Bytes that never end, but are zero at some point.
struct Source<'a>(&'a [u8]);

impl<'a> Source<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }
}

thread_local! {
    static WORLD: std::cell::RefCell<Option<World>> = const { std::cell::RefCell::new(None) };
}

/// Does what the bytes say to a target: connections of every stage, PDUs that are right, nearly right and
/// not at all, and a configuration that changes meanwhile. The entry for fuzzers.
///
/// # Panics
/// When the target breaks a promise: above all, when something of a host stays once it has gone.
pub fn any_bytes(bytes: &[u8]) {
    WORLD.with_borrow_mut(|world| {
        let transport = TransportConfig { in_capsule_data_size: 4096, ..TransportConfig::default() };
        let world = world.get_or_insert_with(|| World::new(&transport, 1, Faults::default()));
        world.configure((1 << NAMESPACES) - 1);
        babble(world, &mut Source(bytes));
        world.settle();
    });
}

fn babble(world: &mut World, source: &mut Source<'_>) {
    let stage = source.byte();
    let digests = source.byte();
    let cut = match source.byte() {
        0 => 1,
        small @ 1..128 => usize::from(small),
        _ => 1 << 20,
    };
    let (id, heard) = (world.dial(), Vec::new());
    // What is always the same comes in one piece.
    let mut host = Babbler { world, id, framing: Framing::PLAIN, cut: 1 << 20, heard };
    let admin = host.id;
    if !stage.is_multiple_of(8) {
        host.initialize(digests);
    }
    if stage % 8 > 1 {
        let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, digests & 4);
        host.capsule(sqe, &data);
        let cntlid = host.result().map_or(0, |result| Connected::from_result(result).cntlid);
        host.capsule(enable(), &[]);
        if stage % 8 > 3 {
            (host.id, host.framing) = (host.world.dial(), Framing::PLAIN);
            host.initialize(digests);
            let (sqe, data) = connect(1, 8, cntlid, digests & 4);
            host.capsule(sqe, &data);
        }
    }
    host.cut = cut;
    while !source.0.is_empty() {
        step(&mut host, source);
    }
    let Babbler { world, id, .. } = host;
    world.hosts.close(id);
    if admin != id {
        // Its admin queue is the last to go, and takes along what is left.
        world.turn();
        world.hosts.close(admin);
    }
}

fn step(host: &mut Babbler<'_>, source: &mut Source<'_>) {
    match source.byte() % 8 {
        0 => {
            let length = usize::from(source.byte());
            host.send(source.take(length));
        }
        1 => {
            let mut bytes = [0; 64];
            let taken = source.take(64);
            bytes[..taken.len()].copy_from_slice(taken);
            host.capsule(Sqe::decode(&bytes), &[]);
        }
        2..=4 => {
            let (sqe, data) = shaped(source);
            host.capsule(sqe, &data);
        }
        5 | 6 => {
            let (cccid, ttag) = (u16::from(source.byte() % 4), u16::from(source.byte() % 9));
            let blocks = u32::from(source.byte() % 9);
            let (offset, more) = (u32::from(source.byte() % 9) * 512, source.byte());
            let data = vec![more; blocks as usize * 512 + usize::from(more & 3)];
            let mut header = [0; SHORT_SIZE];
            let length = data.len() as u32;
            let pdu = H2cData { cccid, ttag, offset, length, last: more & 4 != 0 };
            let layout = pdu.encode(&host.framing, &mut header);
            host.pdu(&header, &layout, &data);
        }
        _ => match source.byte() % 4 {
            0 => host.world.now_ns += u64::from(source.byte()) * 50_000_000,
            1 => host.world.configure(source.byte().into()),
            2 => host.world.turn(),
            _ => host.cut = 1 + usize::from(source.byte()),
        },
    }
}

/// A command that has a chance, with data in its capsule or none.
fn shaped(source: &mut Source<'_>) -> (Sqe, Vec<u8>) {
    const OPCODES: [u8; 16] = [0, 1, 2, 1, 2, 5, 8, 9, 0x0c, 0x7f, 0x09, 0x0a, 0x06, 0x02, 0x18, 0x08];
    let opcode = OPCODES[usize::from(source.byte() % 16)];
    let blocks = u32::from(source.byte() % 9);
    let lba = u32::from(source.short()) % (BLOCKS as u32 + 2);
    let how = source.byte();
    let bytes = (blocks + 1) * BLOCK_BYTES as u32;
    let data = if how & 1 != 0 { vec![how; bytes as usize + usize::from(how >> 6)] } else { Vec::new() };
    let pointer = match how >> 1 & 7 {
        0 => DataPointer::capsule(u64::from(how >> 6), bytes),
        1 => DataPointer::capsule(source.short().into(), source.short().into()),
        2 => DataPointer::transport(source.short().into()),
        3 => DataPointer::transport(512),
        4 if how & 1 != 0 => DataPointer::capsule(0, bytes),
        _ => DataPointer::transport(bytes),
    };
    let mut sqe = Sqe::new(opcode);
    sqe.cid = u16::from(source.byte() % 4);
    sqe.nsid = u32::from(source.byte() % 5);
    (sqe.cdw10, sqe.cdw12, sqe.data) = (lba, blocks, pointer);
    if how & 0x10 != 0 {
        // What is seldom right: features, log pages, ranges.
        (sqe.cdw10, sqe.cdw11) = (u32::from(source.short()), u32::from(source.byte()));
    }
    (sqe, data)
}
