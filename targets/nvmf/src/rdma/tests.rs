//! The protocol on queue pairs in memory: verified data, and hosts that do what they must not.

mod pairs;

use std::net::SocketAddr;
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Descriptor, Registry};
use block_io::Status;
use nvme_controller::{ControllerDirectory, Subsystem, SubsystemListener, SubsystemNamespace};
use proptest::prelude::*;
use random::WyRand;
use reactor::Reactor;
use target_shell::{ConnectionGroup, PollGroup};
use wire_nvme::admin::Identify;
use wire_nvme::fabrics::{
    CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, ConnectResponse, PropertySet,
};
use wire_nvme::identify::{self, Cns};
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::offset;
use wire_nvme::sqe::Sgl;
use wire_nvme::{Cqe, DataPointer, Sqe, sqe};

use super::RdmaTransportConfig;
use super::protocol::RdmaProtocol;
use crate::snapshot::ConfigSnapshot;
use pairs::{Fabric, KEY, MEMORY_AT, MEMORY_BYTES, SimulatedPairs, fabric};

const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
const BLOCK_BYTES: usize = 512;
const BLOCKS: usize = 512;
const PORT: u16 = 1;
/// Value of CC that Linux writes to enable a controller.
const ENABLE: u64 = 0x0046_0001;
const ENTRIES: u32 = 16;
const POLLS_MAX: usize = 20_000;

fn address() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 4420))
}

struct SimulatedTarget {
    group: ConnectionGroup<RdmaProtocol, SimulatedPairs>,
    fabric: Fabric,
    now_ns: u64,
    _device: Arc<Descriptor>,
    // Dropped last: the fields above use its buffers.
    reactor: Reactor,
}

impl SimulatedTarget {
    fn new(seed: u64, transport: &RdmaTransportConfig) -> SimulatedTarget {
        let reactor = Reactor::new(&reactor::ReactorConfig::default()).unwrap();
        let core = reactor.core();
        let registry = Registry::new();
        let config = MallocConfig::new("Malloc0", BLOCKS as u64, BLOCK_BYTES as u32);
        bdev::malloc::create(&registry, config).unwrap();
        let device = Arc::new(registry.open("Malloc0", Access::Exclusive { by: "test" }).unwrap());
        let (fabric, limits) = (fabric(seed), transport.limits().unwrap());
        let group_limits = limits.connections.clone();
        let protocol = RdmaProtocol::new(&core, limits, Arc::new(ControllerDirectory::new()), None);
        let network = SimulatedPairs::new(&fabric);
        let mut group = ConnectionGroup::standalone(&core, network, protocol, group_limits);
        group.listen(&address().into(), PORT).unwrap();
        let mut snapshot = ConfigSnapshot::default();
        let nqn: wire_nvme::fabrics::Nqn = NQN.parse().unwrap();
        let mut subsystem = Subsystem { allow_any_host: true, ..Subsystem::new(nqn.clone()) };
        let namespace = SubsystemNamespace::new(1, BLOCKS as u64);
        subsystem.namespaces.push(SubsystemNamespace { backend: 0, ..namespace });
        subsystem.listeners.push(SubsystemListener { portid: PORT, ana: Vec::new() });
        snapshot.devices.insert(0, device.clone());
        snapshot.subsystems.insert(nqn, Arc::new(subsystem));
        group.apply(&core, Arc::new(snapshot), 1);
        SimulatedTarget { group, fabric, now_ns: 1, _device: device, reactor }
    }

    fn poll(&mut self) {
        self.now_ns += 10_000;
        self.group.poll(&self.reactor.core(), self.now_ns);
    }

    fn send(&mut self, host: usize, capsule: Vec<u8>) {
        self.fabric.borrow_mut().hosts[host].sent.push_back(capsule);
    }

    /// The next response to a host; `None` if its connection ends instead.
    fn response(&mut self, host: usize) -> Option<Cqe> {
        for _ in 0..POLLS_MAX {
            self.poll();
            let mut fabric = self.fabric.borrow_mut();
            if let Some(message) = fabric.hosts[host].received.pop_front() {
                return Some(Cqe::decode(&message));
            }
            if fabric.hosts[host].is_closed {
                return None;
            }
        }
        panic!("no response to host {host}");
    }

    fn execute(&mut self, host: usize, sqe: Sqe, data: &[u8]) -> Option<Cqe> {
        self.send(host, capsule(&sqe, data));
        self.response(host)
    }

    fn connect(&mut self, qid: u16, cntlid: u16) -> (usize, Cqe) {
        let host = self.fabric.borrow_mut().connect();
        let (sqe, data) = connect(qid, cntlid);
        (host, self.execute(host, sqe, &data).expect("Connect is answered"))
    }

    /// An enabled controller, and its I/O queue.
    fn queues(&mut self) -> [usize; 2] {
        let (admin, connected) = self.connect(0, CNTLID_DYNAMIC);
        assert!(connected.status.is_success(), "{connected:?}");
        let enable = PropertySet { wide: false, offset: offset::CC, value: ENABLE }.to_sqe();
        assert!(self.execute(admin, enable, &[]).unwrap().status.is_success());
        let (io, connected) = self.connect(1, ConnectResponse::from_result(connected.result).cntlid);
        assert!(connected.status.is_success(), "{connected:?}");
        [admin, io]
    }

    /// Disconnects all hosts, and polls until the target has no connection.
    fn end(mut self) {
        self.fabric.borrow_mut().hosts.iter_mut().for_each(|host| host.has_disconnected = true);
        for _ in 0..POLLS_MAX {
            if self.group.connections().is_empty() {
                assert_eq!(self.fabric.borrow().buffers_in_use, 0, "every receive buffer is given back");
                return;
            }
            self.poll();
        }
        panic!("{} connections remain", self.group.connections().len());
    }
}

fn capsule(sqe: &Sqe, data: &[u8]) -> Vec<u8> {
    let mut entry = [0; sqe::SIZE];
    sqe.encode(&mut entry);
    [&entry[..], data].concat()
}

fn connect(qid: u16, cntlid: u16) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let attributes = ConnectAttributes::empty();
    let entries = if qid == 0 { 32 } else { ENTRIES };
    let command = Connect { record_format: 0, qid, queue_entries: entries, attributes, kato_ms: 0 };
    let mut data = [0; CONNECT_DATA_SIZE];
    let (subnqn, hostnqn) = (NQN.parse().unwrap(), HOST.parse().unwrap());
    ConnectData { host_id: [1; 16], cntlid, subnqn, hostnqn }.encode(&mut data);
    (Sqe { data: DataPointer::capsule(0, CONNECT_DATA_SIZE as u32), ..command.to_sqe() }, data)
}

/// A descriptor of the host's memory.
fn keyed(at: usize, length: usize, invalidate: bool) -> DataPointer {
    Sgl::Keyed { address: MEMORY_AT + at as u64, length: length as u32, key: KEY, invalidate }.into()
}

fn transfer(opcode: NvmOpcode, cid: u16, lba: usize, blocks: usize, data: DataPointer) -> Sqe {
    let command = ReadWrite { lba: lba as u64, blocks: blocks as u32, ..ReadWrite::default() };
    Sqe { cid, nsid: 1, data, ..command.to_sqe(opcode) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn data_is_what_was_written_however_it_travels(seed: u64) {
        let mut target = SimulatedTarget::new(seed, &RdmaTransportConfig::default());
        let [_, io] = target.queues();
        let mut dice = WyRand::new(seed);
        let mut disk = vec![0; BLOCKS * BLOCK_BYTES];
        for step in 0..200u16 {
            let blocks = 1 + dice.index(64);
            let lba = dice.index(BLOCKS - blocks + 1);
            let (bytes, at) = (blocks * BLOCK_BYTES, dice.index(MEMORY_BYTES - 64 * BLOCK_BYTES));
            let range = lba * BLOCK_BYTES..lba * BLOCK_BYTES + bytes;
            let invalidate = dice.happens(500);
            let before = target.fabric.borrow().hosts[io].invalidated.len();
            let is_in_capsule = blocks <= 8 && dice.happens(700);
            let response = if dice.happens(500) {
                let data: Vec<u8> = (0..bytes).map(|_| dice.next_bits() as u8).collect();
                disk[range].copy_from_slice(&data);
                if is_in_capsule {
                    let sqe = transfer(NvmOpcode::Write, step, lba, blocks, DataPointer::capsule(0, bytes as u32));
                    target.execute(io, sqe, &data)
                } else {
                    target.fabric.borrow_mut().hosts[io].memory[at..at + bytes].copy_from_slice(&data);
                    let sqe = transfer(NvmOpcode::Write, step, lba, blocks, keyed(at, bytes, invalidate));
                    target.execute(io, sqe, &[])
                }
            } else {
                let sqe = transfer(NvmOpcode::Read, step, lba, blocks, keyed(at, bytes, invalidate));
                let response = target.execute(io, sqe, &[]);
                prop_assert_eq!(&target.fabric.borrow().hosts[io].memory[at..at + bytes], &disk[range]);
                response
            };
            let response = response.expect("the connection is open");
            prop_assert!(response.status.is_success() && response.cid == step, "{response:?}");
            let invalidated = target.fabric.borrow().hosts[io].invalidated.len() - before;
            prop_assert!(invalidated <= 1 && (invalidated == 0 || invalidate));
        }
        target.end();
    }

    #[test]
    fn a_full_queue_is_answered_whole_and_in_any_order(seed: u64) {
        let mut target = SimulatedTarget::new(seed, &RdmaTransportConfig::default());
        let [_, io] = target.queues();
        for round in 0..8 {
            // One entry of a queue stays empty.
            let cids: Vec<u16> = (0..ENTRIES as u16 - 1).map(|n| round * 100 + n).collect();
            for cid in &cids {
                let data = keyed(usize::from(cid % 100) * 4096, 4096, true);
                let opcode = if cid % 2 == 0 { NvmOpcode::Read } else { NvmOpcode::Write };
                target.send(io, capsule(&transfer(opcode, *cid, usize::from(cid % 100) * 8, 8, data), &[]));
            }
            let mut answered: Vec<u16> = cids.iter().map(|_| target.response(io).expect("open").cid).collect();
            answered.sort_unstable();
            prop_assert_eq!(answered, cids);
        }
        prop_assert_eq!(target.fabric.borrow().hosts[io].invalidated.len(), 8 * (ENTRIES as usize - 1));
        target.end();
    }

    /// Capsules of any bytes, or of commands with some changed, on queues of any state, while hosts come and
    /// go.
    #[test]
    fn hosts_that_send_anything_harm_nothing(seed: u64, capsules in prop::collection::vec(
        (0..4usize, 0..3u8, prop::collection::vec(any::<u8>(), 0..200), 0..64usize, any::<u8>()), 1..80)
    ) {
        let mut target = SimulatedTarget::new(seed, &RdmaTransportConfig::default());
        let [admin, io] = target.queues();
        let [first, second] = [(); 2].map(|()| target.fabric.borrow_mut().connect());
        let hosts = [admin, io, first, second];
        for (host, kind, bytes, at, value) in capsules {
            let host = hosts[host];
            let mut sent = match kind {
                0 => bytes,
                1 => capsule(&transfer(NvmOpcode::Write, value.into(), at, 8, keyed(at, 4096, true)), &bytes),
                _ => {
                    let (sqe, data) = connect(value.into(), CNTLID_DYNAMIC);
                    capsule(&sqe, &data)
                }
            };
            if let Some(byte) = sent.get_mut(at) {
                *byte = value;
            }
            target.send(host, sent);
            if value % 4 == 0 {
                target.poll();
            }
        }
        for _ in 0..50 {
            target.poll();
        }
        target.end();
    }
}

#[test]
fn identify_goes_where_the_host_has_asked_for_it() {
    let mut target = SimulatedTarget::new(1, &RdmaTransportConfig::default());
    let [admin, _] = target.queues();
    let view = Identify { cns: Cns::Controller.to_wire(), ..Identify::default() };
    let sqe = Sqe { cid: 9, data: keyed(8192, identify::SIZE, true), ..view.to_sqe(0) };
    let response = target.execute(admin, sqe, &[]).unwrap();
    assert!(response.status.is_success() && response.cid == 9, "{response:?}");
    let data = target.fabric.borrow().hosts[admin].memory[8192..8192 + identify::SIZE].to_vec();
    let identified = identify::IdentifyController::decode(data.first_chunk().unwrap()).unwrap();
    let expected = identify::sgls::SUPPORTED | identify::sgls::KEYED | identify::sgls::OFFSET;
    assert_eq!((identified.sgls, identified.msdbd), (expected, 1));
    assert_eq!(target.fabric.borrow().hosts[admin].invalidated, [KEY]);
    target.end();
}

#[test]
fn what_a_host_must_not_do_ends_its_command_or_its_connection_alone() {
    let mut target = SimulatedTarget::new(2, &RdmaTransportConfig::default());
    let [_, bystander] = target.queues();
    let flush = |cid| Sqe { cid, nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    let rejected = |target: &mut SimulatedTarget, sqe: Sqe, data: &[u8], status: Status| {
        let [_, io] = target.queues();
        let response = target.execute(io, sqe, data).expect("the command is answered");
        assert!(response.status.same_code(status), "{response:?}, and not {status}");
        assert!(target.execute(io, flush(7), &[]).unwrap().status.is_success());
    };
    // A descriptor that is too short, of another type, beyond the capsule.
    let write = |data| transfer(NvmOpcode::Write, 1, 0, 8, data);
    rejected(&mut target, write(keyed(0, 4095, false)), &[], Status::DATA_SGL_LENGTH_INVALID);
    rejected(&mut target, write(DataPointer::transport(4096)), &[], Status::SGL_TYPE_INVALID);
    rejected(&mut target, write(DataPointer::capsule(8, 4096)), &[0; 4096], Status::DATA_SGL_LENGTH_INVALID);
    let read = transfer(NvmOpcode::Read, 1, 0, 8, DataPointer::capsule(0, 4096));
    rejected(&mut target, read, &[0; 4096], Status::SGL_TYPE_INVALID);
    // A short capsule, one with too much data, a key that the host has not, and a command too many.
    let closed = |target: &mut SimulatedTarget, capsules: Vec<Vec<u8>>| {
        let [_, io] = target.queues();
        capsules.into_iter().for_each(|capsule| target.send(io, capsule));
        while target.response(io).is_some() {}
    };
    closed(&mut target, vec![vec![0; sqe::SIZE - 1]]);
    closed(&mut target, vec![capsule(&flush(1), &vec![0; 64 << 10])]);
    let stranger = Sgl::Keyed { address: MEMORY_AT, length: 4096, key: KEY + 1, invalidate: false };
    closed(&mut target, vec![capsule(&write(stranger.into()), &[])]);
    closed(&mut target, (0..2 * ENTRIES as u16).map(|cid| capsule(&flush(cid), &[])).collect());
    assert!(target.execute(bystander, flush(3), &[]).unwrap().status.is_success());
    target.end();
}

/// Polls a second at a time until the target has closed the connection of a host; returns the seconds.
fn seconds_until_closed(target: &mut SimulatedTarget, host: usize) -> u64 {
    for second in 0..60 {
        if target.fabric.borrow().hosts[host].is_closed {
            return second;
        }
        for _ in 0..20 {
            target.poll();
        }
        target.now_ns += 1_000_000_000;
    }
    panic!("the connection of host {host} is open after a minute");
}

#[test]
fn a_host_that_takes_no_answers_is_closed_after_its_time() {
    let mut target = SimulatedTarget::new(3, &RdmaTransportConfig::default());
    let [_, bystander] = target.queues();
    let flush = |cid| Sqe { cid, nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    let read = transfer(NvmOpcode::Read, 1, 0, 8, keyed(0, 4096, false));
    let write = transfer(NvmOpcode::Write, 1, 0, 8, keyed(0, 4096, false));
    for sqe in [flush(1), read, write] {
        let [_, io] = target.queues();
        target.fabric.borrow_mut().hosts[io].is_stuck = true;
        target.send(io, capsule(&sqe, &[]));
        let seconds = seconds_until_closed(&mut target, io);
        assert!((10..=25).contains(&seconds), "closed after {seconds} s");
        assert!(target.execute(bystander, flush(3), &[]).unwrap().status.is_success());
    }
    target.end();
}

#[test]
fn a_host_that_takes_no_answers_has_three_queues_of_them_at_most() {
    let mut target = SimulatedTarget::new(4, &RdmaTransportConfig::default());
    let [_, io] = target.queues();
    target.fabric.borrow_mut().hosts[io].is_stuck = true;
    let mut sent = 0;
    while !target.fabric.borrow().hosts[io].is_closed {
        assert!(sent <= 4 * ENTRIES, "{sent} commands were taken");
        let flush = Sqe { cid: sent as u16, nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
        target.send(io, capsule(&flush, &[]));
        sent += 1;
        (0..20).for_each(|_| target.poll());
    }
    // Those that were sent after the last that counts, too.
    assert!((3 * ENTRIES..=3 * ENTRIES + 2).contains(&sent), "closed after {sent} commands");
    target.end();
}

#[test]
fn works_are_given_to_the_device_one_by_one_if_so_configured() {
    for (no_wr_batching, expected) in [(false, 2..=6), (true, 1..=1)] {
        let config = RdmaTransportConfig { no_wr_batching, ..RdmaTransportConfig::default() };
        let mut target = SimulatedTarget::new(5, &config);
        let [_, io] = target.queues();
        for cid in 0..ENTRIES as u16 - 1 {
            let flush = Sqe { cid, nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
            target.send(io, capsule(&flush, &[]));
        }
        for _ in 1..ENTRIES {
            assert!(target.response(io).unwrap().status.is_success());
        }
        let batch_max = target.fabric.borrow().batch_max;
        assert!(expected.contains(&batch_max), "{batch_max} works at once");
        target.end();
    }
}
