//! Any bytes as the life of a controller, for fuzzing.

use std::collections::BTreeSet;
use std::sync::Arc;

use wire_nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Nqn};
use wire_nvme::log::{AddressFamily, AnaState, SubsystemType, TransportAddress, TransportType};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::offset;
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::{
    Action, Completion, ConnectOk, Controller, Directory, DiscoveryLog, DiscoveryRecord, Event,
    HealthCounters, Hosts, Kind, Limits, Listener, Namespace, NamespaceTable, Place, Port, QueueLease,
    Reason, Subsystem, connect, io,
};

/// A controller with a host that holds it to its promises: every command is answered exactly once,
/// except Asynchronous Event Requests, of which a bounded number may wait; what is sent fits the
/// host's buffer.
#[derive(Debug)]
pub struct Harness {
    /// The controller.
    pub controller: Controller,
    /// The directory that it is in.
    pub directory: Arc<Directory>,
    /// Its limits.
    pub limits: Arc<Limits>,
    /// The time.
    pub now_ns: u64,
    /// Identifiers of Asynchronous Event Requests that wait.
    pub waiting: BTreeSet<u16>,
    /// Completions of Asynchronous Event Requests, oldest first.
    pub notices: Vec<Cqe>,
    /// What was to be done besides completing, oldest first.
    pub asked: Vec<Action>,
    next_cid: u16,
    leases: Vec<QueueLease>,
}

/// The host's name in the harness.
pub(crate) fn host() -> Nqn {
    "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11".parse().expect("an NQN")
}

/// The subsystem's name in the harness.
pub(crate) fn subnqn() -> Nqn {
    "nqn.2026-11.io.ringbolt:one".parse().expect("an NQN")
}

/// A Connect command of the harness's host.
pub(crate) fn connect_sqe(qid: u16, queue_entries: u32, kato_ms: u32) -> Sqe {
    let attributes = ConnectAttributes::default();
    let connect = Connect { record_format: 0, qid, queue_entries, attributes, kato_ms };
    Sqe { data: DataPointer::capsule(0, CONNECT_DATA_SIZE as u32), ..connect.to_sqe() }
}

/// The data of a Connect command of the harness's host.
pub(crate) fn connect_data(subnqn: Nqn, cntlid: u16) -> [u8; CONNECT_DATA_SIZE] {
    let mut data = [0; CONNECT_DATA_SIZE];
    ConnectData { host_id: [7; 16], cntlid, subnqn, hostnqn: host() }.encode(&mut data);
    data
}

/// An NVM subsystem with namespaces 1 and 3 of 1 MiB, open to every host.
pub(crate) fn subsystem() -> Subsystem {
    let mut subsystem = Subsystem::new(subnqn());
    subsystem.allow_any_host = true;
    subsystem.namespaces = vec![
        Namespace {
            backend: 11,
            nguid: [1; 16],
            eui64: [2; 8],
            uuid: uuid::Uuid::from_bytes([3; 16]),
            volatile_cache: true,
            can_unmap: true,
            can_write_zeroes: true,
            can_write_uncorrectable: true,
            buffer_alignment: 4096,
            ..Namespace::new(1, 2048)
        },
        Namespace {
            backend: 33,
            block_size: 4096,
            anagrpid: 2,
            can_write_zeroes: true,
            ..Namespace::new(3, 256)
        },
    ];
    subsystem
}

/// A discovery log with one subsystem for every host and one for another host.
pub(crate) fn discovery(generation: u64) -> DiscoveryLog {
    let address = |traddr: &str| TransportAddress {
        trtype: TransportType::Tcp,
        adrfam: AddressFamily::Ipv4,
        traddr: traddr.to_owned(),
        trsvcid: "4420".to_owned(),
    };
    let record = |subnqn, subtype, hosts| DiscoveryRecord {
        subnqn,
        subtype,
        address: address("0.0.0.0"),
        portid: 1,
        hosts,
    };
    let other: Nqn = "nqn.2026-11.io.ringbolt:other-host".parse().expect("an NQN");
    DiscoveryLog {
        generation,
        records: vec![
            record(Nqn::discovery(), SubsystemType::CurrentDiscovery, Hosts::Any),
            record(subnqn(), SubsystemType::Nvm, Hosts::Any),
            record(
                "nqn.2026-11.io.ringbolt:two".parse().expect("an NQN"),
                SubsystemType::Nvm,
                Hosts::Only([other].into()),
            ),
        ],
    }
}

impl Harness {
    /// A controller that was just connected and is not enabled.
    pub fn new(kind: Kind, kato_ms: u32) -> Harness {
        let subsystem = match kind {
            Kind::Nvm => subsystem(),
            Kind::Discovery => Subsystem::discovery(Nqn::discovery()),
        };
        Harness::with(subsystem, kato_ms)
    }

    /// The same for a subsystem of one's own.
    pub fn with(subsystem: Subsystem, kato_ms: u32) -> Harness {
        let limits = Arc::new(Limits::default());
        let directory = Arc::new(Directory::new());
        let subsystem = Arc::new(subsystem);
        let data = connect_data(subsystem.nqn.clone(), CNTLID_DYNAMIC);
        let address = TransportAddress {
            trtype: TransportType::Tcp,
            adrfam: AddressFamily::Ipv4,
            traddr: "192.0.2.1".to_owned(),
            trsvcid: "4420".to_owned(),
        };
        let place = Place { directory: &directory, limits: &limits, port: Port { portid: 1, address } };
        let connected = connect(&connect_sqe(0, 32, kato_ms), &data, &place, |_| Some(subsystem));
        let Ok(ConnectOk::Admin(admin)) = connected else {
            panic!("the harness's own Connect was refused: {connected:?}");
        };
        let controller = Controller::new(admin, limits.clone(), Arc::new(discovery(1)), 0);
        Harness {
            controller,
            directory,
            limits,
            now_ns: 0,
            waiting: BTreeSet::new(),
            notices: Vec::new(),
            asked: Vec::new(),
            next_cid: 0,
            leases: Vec::new(),
        }
    }

    /// The same, enabled.
    pub fn enabled(kind: Kind) -> Harness {
        let mut harness = Harness::new(kind, 5000);
        harness.enable();
        harness
    }

    /// Enables the controller as Linux does.
    pub fn enable(&mut self) {
        let completion = self.command(property_set(offset::CC, LINUX_CC), &[]).expect("an answer");
        assert!(completion.cqe.status.is_success(), "{completion:?}");
    }

    /// Sends a command and returns its answer; `None` for an Asynchronous Event Request that waits.
    ///
    /// # Panics
    /// When the controller breaks a promise.
    pub fn command(&mut self, sqe: Sqe, data: &[u8]) -> Option<Completion> {
        let cid = loop {
            self.next_cid = self.next_cid.wrapping_add(1);
            if !self.waiting.contains(&self.next_cid) {
                break self.next_cid;
            }
        };
        let sqe = Sqe { cid, ..sqe };
        self.waiting.insert(cid);
        let before = self.notices.len();
        let mut own = None;
        for completion in self.deliver(Event::Command { sqe: &sqe, data }) {
            if completion.cqe.cid == cid {
                own = Some(completion);
            }
        }
        let is_request = sqe.opcode == AdminOpcode::AsyncEventRequest.to_wire();
        match &own {
            None => assert!(is_request, "{sqe:?} was not answered"),
            Some(completion) => {
                let data = completion.data.len();
                assert!(data == 0 || completion.cqe.status.is_success(), "{completion:?} of {sqe:?}");
                assert!(data == 0 || data as u32 == sqe.data.length(), "{data} bytes for {sqe:?}");
                assert!(data as u64 <= self.limits.transfer_max_bytes.into(), "{data} bytes for {sqe:?}");
                if !is_request {
                    self.notices.retain(|cqe| cqe.cid != cid);
                }
            }
        }
        assert!(self.waiting.len() <= self.limits.async_events_max.into(), "{:?} all wait", self.waiting);
        assert!(self.notices.len() >= before, "notices were lost");
        own
    }

    /// Hands in an event and returns what was completed.
    ///
    /// # Panics
    /// When something is completed that does not wait.
    pub fn deliver(&mut self, event: Event<'_>) -> Vec<Completion> {
        let mut actions = Vec::new();
        self.controller.handle(event, self.now_ns, &mut actions);
        let mut completions = Vec::new();
        for action in actions {
            match action {
                Action::Complete(completion) => {
                    let cid = completion.cqe.cid;
                    assert!(self.waiting.remove(&cid), "command {cid:#x} was answered but does not wait");
                    self.notices.push(completion.cqe);
                    completions.push(completion);
                }
                other => self.asked.push(other),
            }
        }
        completions
    }

    /// Lets time pass; returns the reason if the controller ended.
    pub fn advance(&mut self, ns: u64) -> Option<Reason> {
        self.now_ns += ns;
        let before = self.asked.len();
        self.deliver(Event::Tick);
        self.asked[before..].iter().find_map(|action| match action {
            Action::Terminate(reason) => Some(*reason),
            _ => None,
        })
    }

    /// Does what the bytes say: the entry for fuzzers.
    ///
    /// # Panics
    /// When the controller breaks a promise.
    pub fn run(bytes: &[u8]) {
        let mut bytes = Bytes(bytes);
        let kind = if bytes.u8().is_multiple_of(4) { Kind::Discovery } else { Kind::Nvm };
        let kato_ms = u32::from(bytes.u8()) * 100;
        let mut harness = Harness::new(kind, kato_ms);
        if !bytes.u8().is_multiple_of(8) {
            harness.enable();
        }
        // An end is followed through for some steps: whatever still comes in must be answered.
        let mut left = 8;
        while !bytes.0.is_empty() && left > 0 {
            harness.step(&mut bytes);
            left -= u8::from(harness.asked.iter().any(|action| matches!(action, Action::Terminate(_))));
        }
        let lost = harness.controller.association().clone();
        let cntlid = lost.cntlid();
        harness.leases.clear();
        assert!(lost.queues().is_empty());
        drop(harness.controller);
        assert!(!lost.is_alive() && harness.directory.find(lost.subnqn(), cntlid).is_none());
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 16 {
            0..=7 => {
                let sqe = self.shaped(bytes);
                let data = vec![bytes.u8(); usize::from(bytes.u8()) * 4];
                self.command(sqe, &data);
            }
            8 => {
                let sqe = Sqe::decode(&std::array::from_fn(|_| bytes.u8()));
                self.command(sqe, &[]);
            }
            9 => {
                const VALUES: [u32; 6] = [LINUX_CC, LINUX_CC & !1, LINUX_CC | 1 << 14, 1, 0, 0x0146_88e1];
                let value = match VALUES.get(usize::from(bytes.u8() % 8)) {
                    Some(&value) => value,
                    None => bytes.u32(),
                };
                self.command(property_set(offset::CC, value), &[]);
            }
            10 => {
                let ended = self.advance(u64::from(bytes.u8()) * u64::from(bytes.u8()) * 100_000);
                assert!(
                    self.controller.deadline().is_none_or(|deadline| deadline > self.now_ns),
                    "{ended:?}"
                );
            }
            11 => self.change_subsystem(bytes),
            12 => {
                if bytes.u8().is_multiple_of(2) {
                    self.leases.pop();
                } else {
                    let lease = self.controller.association().lease(bytes.u8().into());
                    self.leases.extend(lease);
                }
            }
            13 => {
                let mut log = discovery(bytes.u8().into());
                log.records.truncate((bytes.u8() % 4).into());
                self.deliver(Event::Discovery(Arc::new(log)));
            }
            14 => {
                let health = HealthCounters { reads: bytes.u8().into(), ..HealthCounters::default() };
                self.deliver(if bytes.u8().is_multiple_of(2) {
                    Event::Traffic
                } else {
                    Event::Health(health)
                });
            }
            _ => self.plan(bytes),
        }
    }

    /// A command that has a chance to be accepted.
    fn shaped(&self, bytes: &mut Bytes<'_>) -> Sqe {
        const USUAL: [AdminOpcode; 7] = [
            AdminOpcode::Identify,
            AdminOpcode::GetLogPage,
            AdminOpcode::GetFeatures,
            AdminOpcode::SetFeatures,
            AdminOpcode::AsyncEventRequest,
            AdminOpcode::KeepAlive,
            AdminOpcode::Abort,
        ];
        let choice = usize::from(bytes.u8());
        let opcode = match USUAL.get(choice % 8) {
            Some(&opcode) => opcode,
            None => AdminOpcode::ALL[choice / 8 % AdminOpcode::ALL.len()],
        };
        let lengths = [4096, 4096, 1024, 512, 4, 16, 3072, 128 << 10];
        let length = lengths[usize::from(bytes.u8() % 8)];
        let mut sqe = Sqe::new(opcode.to_wire());
        sqe.nsid = [0, 0, 1, 2, 3, 33, u32::MAX - 1, u32::MAX][usize::from(bytes.u8() % 8)];
        sqe.data = DataPointer::transport(length);
        // Small numbers are where identifiers of pages, structures and features are.
        let chosen = [bytes.u8() % 0x20, 0x70, 0x81, bytes.u8()][bytes.u8().trailing_zeros().min(3) as usize];
        sqe.cdw10 = u32::from(chosen) | u32::from(bytes.u8() & bytes.u8() & bytes.u8()) << 8;
        sqe.cdw11 = u32::from(bytes.u8()) << [0, 0, 8, 24][usize::from(bytes.u8() % 4)];
        (sqe.cdw12, sqe.cdw13, sqe.cdw14) = ((bytes.u8() & bytes.u8() & bytes.u8()).into(), 0, 0);
        match opcode {
            AdminOpcode::GetLogPage => {
                let dwords = length / 4 - 1;
                sqe.cdw10 |= dwords << 16;
                sqe.cdw11 = dwords >> 16;
            }
            AdminOpcode::Identify => {
                sqe.data = DataPointer::transport(4096);
                sqe.cdw11 &= 0xff;
            }
            AdminOpcode::GetFeatures if bytes.u8().is_multiple_of(2) => sqe.data = DataPointer::transport(16),
            _ => {}
        }
        if bytes.u8().is_multiple_of(16) {
            (sqe.flags, sqe.cdw13, sqe.cdw14) = (bytes.u8(), bytes.u32(), bytes.u32());
            sqe.data.high = sqe.data.high.rotate_left(bytes.u8().into());
        }
        sqe
    }

    fn change_subsystem(&mut self, bytes: &mut Bytes<'_>) {
        if self.controller.subsystem().kind == Kind::Discovery {
            return;
        }
        let mut next = Subsystem::clone(self.controller.subsystem());
        let mask = bytes.u8();
        let blocks = u64::from(bytes.u8()) + 1;
        let present = (0..8u32).filter(|bit| mask >> bit & 1 != 0);
        next.namespaces = present
            .map(|bit| Namespace { anagrpid: bit % 3 + 1, ..Namespace::new(bit + 1, blocks) })
            .collect();
        next.ana_reporting = bytes.u8().is_multiple_of(2);
        let state = AnaState::ALL[usize::from(bytes.u8()) % AnaState::ALL.len()];
        next.listeners = vec![Listener { portid: 1, ana: vec![(1, state)] }];
        match bytes.u8() {
            0 => _ = self.deliver(Event::SubsystemRemoved),
            1 => {
                next.allow_any_host = false;
                self.deliver(Event::Subsystem(Arc::new(next)));
            }
            _ => _ = self.deliver(Event::Subsystem(Arc::new(next))),
        }
    }

    /// Plans a command of an I/O queue and checks that the plan stays within its namespace.
    fn plan(&self, bytes: &mut Bytes<'_>) {
        let mut sqe = Sqe::decode(&std::array::from_fn(|_| bytes.u8()));
        if !bytes.u8().is_multiple_of(8) {
            (sqe.opcode, sqe.nsid) = (sqe.opcode % 32, sqe.nsid % 10);
            sqe.flags = Sqe::FLAGS_SGL | sqe.flags & 3;
            (sqe.cdw10, sqe.cdw11, sqe.mptr) = (sqe.cdw10 % 512, 0, 0);
            sqe.cdw12 &= 0xff;
            sqe.data = DataPointer::transport((sqe.cdw12 + 1) * 512);
        }
        let table = NamespaceTable::new(self.controller.subsystem(), 1, &self.limits);
        let Ok(plan) = io::plan(&sqe, &table) else { return };
        match plan.op {
            io::Op::Read
            | io::Op::Write
            | io::Op::Compare
            | io::Op::FusedCompare
            | io::Op::FusedWrite
            | io::Op::WriteUncorrectable
            | io::Op::WriteZeroes => {
                let end = plan.lba.checked_add(plan.blocks.into());
                assert!(
                    plan.blocks > 0 && end.is_some_and(|end| end <= table.entry(&plan).blocks),
                    "{plan:?}"
                );
            }
            io::Op::Unmap => {
                let data: Vec<u8> = (0..4096).map(|_| bytes.u8()).collect();
                let Ok(ranges) = io::unmaps(&plan, &table, &data) else { return };
                for (lba, blocks) in ranges {
                    assert!(blocks > 0 && lba + u64::from(blocks) <= table.entry(&plan).blocks);
                }
            }
            io::Op::Copy => {
                let data: Vec<u8> = (0..4096).map(|_| bytes.u8()).collect();
                let Ok(mut copying) = io::Copying::new(&plan, &table, &data) else { return };
                let (end, mut total) = (table.entry(&plan).blocks, 0);
                while let Some(io::Piece { from, to, blocks }) = copying.next() {
                    let length = u64::from(blocks);
                    assert!(blocks > 0 && from + length <= end && to + length <= end, "{copying:?}");
                    assert!(to == plan.lba + total && copying.range() < plan.blocks, "{copying:?}");
                    total += length;
                    copying.done();
                }
                assert!(total > 0 && copying.range() == plan.blocks, "{copying:?}");
            }
            _ => {}
        }
        if let io::Transfer::ToHost(length)
        | io::Transfer::FromHost(length)
        | io::Transfer::Fused(length)
        | io::Transfer::Answer(length) = plan.data
        {
            assert!(length == sqe.data.length() && length <= self.limits.transfer_max_bytes, "{plan:?}");
        }
    }
}

/// CC as Linux writes it to enable a controller.
pub(crate) const LINUX_CC: u32 = 0x0046_0001;

pub(crate) fn property_set(offset: u32, value: u32) -> Sqe {
    wire_nvme::fabrics::PropertySet { wide: false, offset, value: value.into() }.to_sqe()
}

/// Bytes that never end, but are zero at some point.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        first
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn any_life_keeps_every_promise(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            Harness::run(&bytes);
        }
    }

    #[test]
    fn the_harness_notices_what_it_should() {
        let mut harness = Harness::enabled(Kind::Nvm);
        assert_eq!(harness.command(Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()), &[]), None);
        assert_eq!(harness.waiting.len(), 1);
        let answer = harness.command(Sqe::new(AdminOpcode::KeepAlive.to_wire()), &[]).unwrap();
        assert_eq!(answer.cqe.status, ring::Status::SUCCESS);
    }
}
