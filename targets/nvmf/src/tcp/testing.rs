//! A poll group on the simulated network, for tests that segment, stall and break connections, and for
//! fuzzing.

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Descriptor, Registry};
use nvme_auth::{AuthKey, AuthKeys, AuthOptions, AuthParties, DhGroup, HostAuth};
use nvme_controller::{ControllerDirectory, Subsystem, SubsystemListener, SubsystemNamespace};
use reactor::Reactor;
use sockets::{ConnectionId, Network, NetworkFaults, SimulatedNetwork};
use target_shell::{ConnectionGroup, PollGroup};
use wire_nvme::auth::AuthCommand;
use wire_nvme::digest::crc32c;
use wire_nvme::fabrics::Nqn;
use wire_nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData};
use wire_nvme::fabrics::{ConnectResponse, PropertySet};
use wire_nvme::registers::offset;
use wire_nvme::tcp::{
    CAPSULE_CMD_SIZE, CapsuleCmd, CapsuleResp, CommonHeader, Framing, H2cData, IC_SIZE, IcReq, PduType,
    SHORT_SIZE,
};
use wire_nvme::{DataPointer, Sqe};

use super::protocol::TcpProtocol;
use crate::TcpTransportConfig;
use crate::snapshot::ConfigSnapshot;

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
const BLOCK_BYTES: usize = 512;
/// Blocks of each device.
const BLOCKS: usize = 512;
const NAMESPACES: u32 = 3;
/// Port identifier of the listener.
const PORT: u16 = 1;
/// Configuration bit: the host has to authenticate.
const KEYED: u32 = 1 << 5;
/// Configuration bit: the subsystem is on another port only.
const OTHER_PORT: u32 = 1 << 6;
/// Configuration bit: the subsystem does not exist.
const REMOVED: u32 = 1 << 7;
/// Value of CC that Linux writes to enable a controller.
const ENABLE: u64 = 0x0046_0001;
/// Simulated time of one poll.
const POLL_NS: u64 = 10_000;
/// Polls between moves of all I/O queues: fewer than most commands take.
const MOVE_POLLS: u64 = 5;
/// Maximum polls without progress before a test fails.
const IDLE_POLLS_MAX: usize = 200_000;

/// One poll group, the hosts' side of its network, and the simulated clock.
struct SimulatedTarget {
    group: ConnectionGroup<TcpProtocol, SimulatedNetwork>,
    hosts: SimulatedNetwork,
    now_ns: u64,
    /// I/O queues move all the time.
    moves: bool,
    devices: Vec<Arc<Descriptor>>,
    // Dropped last: the fields above use its buffers.
    reactor: Reactor,
}

/// The keys of the host.
fn keys() -> AuthKeys {
    AuthKeys { host: AuthKey::new(None, &[1; 32]).expect("32 bytes are a key"), controller: None }
}

fn address() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 4420))
}

impl SimulatedTarget {
    fn new(transport: &TcpTransportConfig, seed: u64, faults: NetworkFaults) -> SimulatedTarget {
        SimulatedTarget::with_memory(transport, seed, faults, dma::ArenaConfig::default())
    }

    fn with_memory(
        transport: &TcpTransportConfig,
        seed: u64,
        faults: NetworkFaults,
        memory: dma::ArenaConfig,
    ) -> SimulatedTarget {
        let arena = dma::Arena::new(memory);
        let config = reactor::ReactorConfig { arena, ..reactor::ReactorConfig::default() };
        let reactor = Reactor::new(&config).expect("a reactor for a test");
        let core = reactor.core();
        let registry = Registry::new();
        let device = |n| {
            let name = format!("Malloc{n}");
            bdev::malloc::create(&registry, MallocConfig::new(&name, BLOCKS as u64, BLOCK_BYTES as u32))
                .expect("a new name");
            Arc::new(registry.open(&name, Access::Exclusive { by: "test" }).expect("it was just made"))
        };
        let devices = (0..NAMESPACES).map(device).collect();
        let (hosts, network) = SimulatedNetwork::pair(seed, faults);
        let limits = transport.limits().expect("the options are in range");
        let group_limits = limits.connections.clone();
        let protocol = TcpProtocol::new(limits, Arc::new(ControllerDirectory::new()), None);
        let mut group = ConnectionGroup::standalone(&core, network, protocol, group_limits);
        group.listen(&address().into(), PORT).expect("room for a listener");
        let mut world = SimulatedTarget { group, hosts, now_ns: 1, moves: false, devices, reactor };
        world.configure((1 << NAMESPACES) - 1);
        world
    }

    /// Applies a configuration with the namespaces whose bit is set; namespace 1 is bit 0. See also
    /// [`OTHER_PORT`] and [`REMOVED`].
    fn configure(&mut self, present: u32) {
        let mut snapshot = ConfigSnapshot::default();
        let nqn: Nqn = NQN.parse().expect("a name");
        let mut subsystem = Subsystem { allow_any_host: true, ..Subsystem::new(nqn.clone()) };
        for key in (0..NAMESPACES).filter(|key| present >> key & 1 != 0) {
            let namespace = SubsystemNamespace::new(key + 1, BLOCKS as u64);
            let (can_unmap, can_write_zeroes) = (true, true);
            subsystem.namespaces.push(SubsystemNamespace {
                backend: key,
                can_unmap,
                can_write_zeroes,
                ..namespace
            });
            snapshot.devices.insert(key, self.devices[key as usize].clone());
        }
        if present & KEYED != 0 {
            subsystem.host_keys.insert(HOST.parse().expect("a name"), keys());
        }
        let portid = if present & OTHER_PORT == 0 { PORT } else { PORT + 1 };
        subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() });
        if present & REMOVED == 0 {
            snapshot.subsystems.insert(nqn, Arc::new(subsystem));
        }
        self.group.apply(&self.reactor.core(), Arc::new(snapshot), self.now_ns);
    }

    fn poll(&mut self) {
        self.now_ns += POLL_NS;
        if self.moves && (self.now_ns / POLL_NS).is_multiple_of(MOVE_POLLS) {
            self.group.move_all(self.now_ns);
        }
        self.group.poll(&self.reactor.core(), self.now_ns);
    }

    fn connect(&mut self) -> ConnectionId {
        let stream = self.hosts.connect(address());
        self.hosts.add(stream).expect("room for a connection")
    }

    /// Polls until all connections are closed, after every host has disconnected.
    fn run_until_idle(&mut self) {
        for _ in 0..IDLE_POLLS_MAX {
            if self.group.connections().is_empty() {
                return;
            }
            self.poll();
            self.now_ns += 10 * POLL_NS;
        }
        panic!("{} connections remain after their hosts disconnected", self.group.connections().len());
    }
}

fn connect(
    qid: u16,
    queue_entries: u32,
    cntlid: u16,
    attributes: ConnectAttributes,
) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let command = Connect { record_format: 0, qid, queue_entries, attributes, kato_ms: 0 };
    let mut data = [0; CONNECT_DATA_SIZE];
    let (subnqn, hostnqn) = (NQN.parse().expect("a name"), HOST.parse().expect("a name"));
    ConnectData { host_id: [1; 16], cntlid, subnqn, hostnqn }.encode(&mut data);
    (Sqe { data: DataPointer::capsule(0, CONNECT_DATA_SIZE as u32), ..command.to_sqe() }, data)
}

fn enable() -> Sqe {
    PropertySet { wide: false, offset: offset::CC, value: ENABLE }.to_sqe()
}

/// A host that sends what the fuzz input describes, for [`any_bytes`].
struct FuzzHost<'a> {
    world: &'a mut SimulatedTarget,
    id: ConnectionId,
    framing: Framing,
    /// Maximum bytes of a segment of the stream.
    segment_bytes: usize,
    received: Vec<u8>,
}

impl FuzzHost<'_> {
    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let segment = bytes.len().min(self.segment_bytes);
            match self.world.hosts.send(self.id, &[std::io::IoSlice::new(&bytes[..segment])]) {
                sockets::TransferResult::Bytes(count) => bytes = &bytes[count..],
                sockets::TransferResult::Blocked => {}
                sockets::TransferResult::Closed | sockets::TransferResult::Failed(_) => return,
            }
            self.world.poll();
            self.receive();
        }
    }

    fn receive(&mut self) {
        let mut scratch = [0; 4096];
        let parts = &mut [std::io::IoSliceMut::new(&mut scratch)];
        while let sockets::TransferResult::Bytes(count) = self.world.hosts.receive(self.id, parts) {
            self.received.extend_from_slice(&parts[0][..count]);
            if self.received.len() > 64 << 10 {
                self.received.clear();
            }
        }
    }

    fn pdu(&mut self, header: &[u8], layout: &wire_nvme::tcp::PduLayout, data: &[u8]) {
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
        let start = self.received.len().checked_sub(SHORT_SIZE + digest)?;
        let pdu = self.received[start..].first_chunk::<SHORT_SIZE>()?;
        let common = CommonHeader::decode(pdu.first_chunk()?).ok()?;
        (common.kind == PduType::CapsuleResp).then(|| CapsuleResp::decode(pdu).result)
    }
}

/// Fuzz input; reads zeros after its end.
struct FuzzInput<'a>(&'a [u8]);

impl<'a> FuzzInput<'a> {
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
    static WORLD: std::cell::RefCell<Option<SimulatedTarget>> = const { std::cell::RefCell::new(None) };
}

/// Runs a fuzz input against a target: connections in every stage, valid, nearly valid and invalid PDUs, and
/// concurrent configuration changes. The entry point for fuzzers.
///
/// # Panics
/// When the target violates an invariant: in particular, when resources of a host remain after it
/// disconnected.
pub fn any_bytes(bytes: &[u8]) {
    WORLD.with_borrow_mut(|world| {
        let transport = TcpTransportConfig { in_capsule_data_size: 4096, ..TcpTransportConfig::default() };
        let world =
            world.get_or_insert_with(|| SimulatedTarget::new(&transport, 1, NetworkFaults::default()));
        world.configure((1 << NAMESPACES) - 1);
        run_input(world, &mut FuzzInput(bytes));
        world.run_until_idle();
    });
}

fn run_input(world: &mut SimulatedTarget, source: &mut FuzzInput<'_>) {
    let stage = source.byte();
    let digests = source.byte();
    let segment_bytes = match source.byte() {
        0 => 1,
        small @ 1..128 => usize::from(small),
        _ => 1 << 20,
    };
    // Bit 2 is that of DISABLE_SQ_FLOW_CONTROL.
    let attributes = ConnectAttributes::from_bits_retain(digests & 4);
    if stage & 0x80 != 0 {
        world.configure(((1 << NAMESPACES) - 1) | KEYED);
    }
    world.moves = stage & 0x40 != 0;
    let (id, received) = (world.connect(), Vec::new());
    // The fixed handshake is not segmented.
    let mut host = FuzzHost { world, id, framing: Framing::PLAIN, segment_bytes: 1 << 20, received };
    let admin = host.id;
    if !stage.is_multiple_of(8) {
        host.initialize(digests);
    }
    if stage % 8 > 1 {
        let (sqe, data) = connect(0, 32, CNTLID_DYNAMIC, attributes);
        host.capsule(sqe, &data);
        let cntlid = host.result().map_or(0, |result| ConnectResponse::from_result(result).cntlid);
        host.capsule(enable(), &[]);
        if stage % 8 > 3 {
            (host.id, host.framing) = (host.world.connect(), Framing::PLAIN);
            host.initialize(digests);
            let (sqe, data) = connect(1, 8, cntlid, attributes);
            host.capsule(sqe, &data);
        }
    }
    host.segment_bytes = segment_bytes;
    while !source.0.is_empty() {
        run_step(&mut host, source);
    }
    let FuzzHost { world, id, .. } = host;
    world.hosts.close(id);
    if admin != id {
        // The admin queue closes last, and its controller with it.
        world.poll();
        world.hosts.close(admin);
    }
}

fn run_step(host: &mut FuzzHost<'_>, source: &mut FuzzInput<'_>) {
    match source.byte() % 8 {
        0 => {
            let length = usize::from(source.byte());
            host.send(source.take(length));
        }
        1 => {
            let mut bytes = [0; 64];
            let bytes_taken = source.take(64);
            bytes[..bytes_taken.len()].copy_from_slice(bytes_taken);
            host.capsule(Sqe::decode(&bytes), &[]);
        }
        2..=4 => {
            let (sqe, data) = plausible_command(source);
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
        _ => match source.byte() % 5 {
            0 => host.world.now_ns += u64::from(source.byte()) * 50_000_000,
            1 => host.world.configure(source.byte().into()),
            2 => host.world.poll(),
            3 => authenticate(host, source),
            _ => host.segment_bytes = 1 + usize::from(source.byte()),
        },
    }
}

/// Authentication Receive, or Authentication Send of the host's first message or of another.
fn authenticate(host: &mut FuzzHost<'_>, source: &mut FuzzInput<'_>) {
    let shape = source.byte();
    if shape & 1 != 0 {
        let length = if shape & 2 != 0 { 4096 } else { source.short().into() };
        let sqe = AuthCommand::new(length).to_receive();
        return host.capsule(Sqe { data: DataPointer::transport(length), ..sqe }, &[]);
    }
    let message = match shape & 2 {
        0 => {
            let options = AuthOptions { groups: vec![DhGroup::Null], ..AuthOptions::default() };
            HostAuth::new(keys(), AuthParties::new(HOST, NQN), &options, 1).1
        }
        _ => source.take(shape.into()).to_vec(),
    };
    let length = message.len() as u32;
    let pointer = match shape & 4 {
        0 => DataPointer::capsule(0, length),
        _ => DataPointer::transport(length),
    };
    let data = if shape & 4 == 0 { &message[..] } else { &[] };
    host.capsule(Sqe { data: pointer, ..AuthCommand::new(length).to_send() }, data);
}

/// A command that is likely to be accepted, with or without in-capsule data.
fn plausible_command(source: &mut FuzzInput<'_>) -> (Sqe, Vec<u8>) {
    const OPCODES: [u8; 16] = [0, 1, 2, 1, 2, 5, 8, 9, 0x0c, 0x7f, 0x09, 0x0a, 0x06, 0x02, 0x18, 0x08];
    let opcode = OPCODES[usize::from(source.byte() % 16)];
    let blocks = u32::from(source.byte() % 9);
    let lba = u32::from(source.short()) % (BLOCKS as u32 + 2);
    let shape = source.byte();
    let bytes = (blocks + 1) * BLOCK_BYTES as u32;
    let data =
        if shape & 1 != 0 { vec![shape; bytes as usize + usize::from(shape >> 6)] } else { Vec::new() };
    let pointer = match shape >> 1 & 7 {
        0 => DataPointer::capsule(u64::from(shape >> 6), bytes),
        1 => DataPointer::capsule(source.short().into(), source.short().into()),
        2 => DataPointer::transport(source.short().into()),
        3 => DataPointer::transport(512),
        4 if shape & 1 != 0 => DataPointer::capsule(0, bytes),
        _ => DataPointer::transport(bytes),
    };
    let mut sqe = Sqe::new(opcode);
    sqe.cid = u16::from(source.byte() % 4);
    sqe.nsid = u32::from(source.byte() % 5);
    (sqe.cdw10, sqe.cdw12, sqe.data) = (lba, blocks, pointer);
    if shape & 0x10 != 0 {
        // Other dword values, for features, log pages and ranges.
        (sqe.cdw10, sqe.cdw11) = (u32::from(source.short()), u32::from(source.byte()));
    }
    (sqe, data)
}
