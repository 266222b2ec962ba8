//! A test host for controllers, and the fuzz entry that drives one with arbitrary bytes.

use std::collections::BTreeSet;
use std::sync::Arc;

use wire_nvme::fabrics::{CNTLID_DYNAMIC, CONNECT_DATA_SIZE, Connect, ConnectAttributes, ConnectData, Nqn};
use wire_nvme::log::{AddressFamily, AnaState, SubsystemType, TransportAddress, TransportType};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::registers::offset;
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::{
    AdminCompletion, AllowedHosts, ConnectContext, ConnectOk, Controller, ControllerAction,
    ControllerDirectory, ControllerEvent, ControllerLimits, DiscoveryLog, DiscoveryRecord, HealthCounters,
    NamespaceTable, QueueLease, Subsystem, SubsystemKind, SubsystemListener, SubsystemNamespace,
    SubsystemPort, TerminationReason, connect, io,
};

/// A controller and a host that checks its invariants: every command completes exactly once, except for a
/// bounded number of outstanding Asynchronous Event Requests, and data fits the host's buffer.
#[derive(Debug)]
pub struct Harness {
    /// The controller under test.
    pub controller: Controller,
    /// The directory that contains the controller.
    pub directory: Arc<ControllerDirectory>,
    /// The limits of the controller.
    pub limits: Arc<ControllerLimits>,
    /// The current time in nanoseconds.
    pub now_ns: u64,
    /// Identifiers of outstanding commands: Asynchronous Event Requests.
    pub pending: BTreeSet<u16>,
    /// Completions that have not been returned by [`command`](Self::command), oldest first: those of
    /// Asynchronous Event Requests.
    pub completed: Vec<Cqe>,
    /// Actions other than completions, oldest first.
    pub actions: Vec<ControllerAction>,
    next_cid: u16,
    leases: Vec<QueueLease>,
}

/// The host NQN of the harness.
pub(crate) fn host() -> Nqn {
    "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11".parse().expect("an NQN")
}

/// The subsystem NQN of the harness.
pub(crate) fn subnqn() -> Nqn {
    "nqn.2026-11.io.ringbolt:one".parse().expect("an NQN")
}

/// A Connect command of the harness's host; `kato_ms` is the keep alive timeout.
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

/// An NVM subsystem with namespaces 1 and 3 of 1 MiB each, which allows every host.
pub(crate) fn subsystem() -> Subsystem {
    let mut subsystem = Subsystem::new(subnqn());
    subsystem.allow_any_host = true;
    subsystem.namespaces = vec![
        SubsystemNamespace {
            backend: 11,
            nguid: [1; 16],
            eui64: [2; 8],
            uuid: uuid::Uuid::from_bytes([3; 16]),
            volatile_cache: true,
            can_unmap: true,
            can_write_zeroes: true,
            can_write_uncorrectable: true,
            ..SubsystemNamespace::new(1, 2048)
        },
        SubsystemNamespace {
            backend: 33,
            block_size: 4096,
            anagrpid: 2,
            can_write_zeroes: true,
            ..SubsystemNamespace::new(3, 256)
        },
    ];
    subsystem
}

/// A discovery log with the first `count` of these records: the discovery service and one subsystem for every
/// host, and one subsystem for another host.
pub(crate) fn discovery(generation: u64, count: usize) -> DiscoveryLog {
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
        secure_channel: false,
        portid: 1,
        hosts,
        admin_label: None,
    };
    let other: Nqn = "nqn.2026-11.io.ringbolt:other-host".parse().expect("an NQN");
    let records = vec![
        record(Nqn::discovery(), SubsystemType::CurrentDiscovery, AllowedHosts::Any),
        record(subnqn(), SubsystemType::Nvm, AllowedHosts::Any),
        record(
            "nqn.2026-11.io.ringbolt:two".parse().expect("an NQN"),
            SubsystemType::Nvm,
            AllowedHosts::Only([other].into()),
        ),
    ];
    DiscoveryLog::new(generation, move || records.into_iter().take(count).collect())
}

impl Harness {
    /// A newly connected, disabled controller of the default subsystem.
    pub fn new(kind: SubsystemKind, kato_ms: u32) -> Harness {
        let subsystem = match kind {
            SubsystemKind::Nvm => subsystem(),
            SubsystemKind::Discovery => Subsystem::discovery(Nqn::discovery()),
        };
        Harness::with_subsystem(subsystem, kato_ms)
    }

    /// A newly connected, disabled controller of this subsystem.
    pub fn with_subsystem(subsystem: Subsystem, kato_ms: u32) -> Harness {
        Harness::with_limits(subsystem, ControllerLimits::default(), Arc::default(), kato_ms)
    }

    /// A newly connected, disabled controller of this subsystem, with these limits and in this directory.
    pub(crate) fn with_limits(
        subsystem: Subsystem,
        limits: ControllerLimits,
        directory: Arc<ControllerDirectory>,
        kato_ms: u32,
    ) -> Harness {
        let (limits, subsystem) = (Arc::new(limits), Arc::new(subsystem));
        let data = connect_data(subsystem.nqn.clone(), CNTLID_DYNAMIC);
        let address = TransportAddress {
            trtype: TransportType::Tcp,
            adrfam: AddressFamily::Ipv4,
            traddr: "192.0.2.1".to_owned(),
            trsvcid: "4420".to_owned(),
        };
        let context = ConnectContext {
            secure: None,
            directory: &directory,
            limits: &limits,
            port: SubsystemPort { portid: 1, address, secure: false },
        };
        let connected = connect(&connect_sqe(0, 32, kato_ms), &data, &context, |_| Some(subsystem));
        let Ok(ConnectOk::Admin(admin)) = connected else {
            panic!("the harness's own Connect failed: {connected:?}");
        };
        let controller = Controller::new(admin, limits.clone(), Arc::new(discovery(1, 3)), 0);
        Harness {
            controller,
            directory,
            limits,
            now_ns: 0,
            pending: BTreeSet::new(),
            completed: Vec::new(),
            actions: Vec::new(),
            next_cid: 0,
            leases: Vec::new(),
        }
    }

    /// An enabled controller of the default subsystem.
    pub fn enabled(kind: SubsystemKind) -> Harness {
        let mut harness = Harness::new(kind, 5000);
        harness.enable();
        harness
    }

    /// Enables the controller with the CC value that Linux writes.
    pub fn enable(&mut self) {
        let completion = self.command(property_set(offset::CC, LINUX_CC), &[]).expect("a completion");
        assert!(completion.cqe.status.is_success(), "{completion:?}");
    }

    /// Sends a command and returns its completion; `None` for an Asynchronous Event Request that stays
    /// outstanding.
    ///
    /// # Panics
    /// If the controller violates an invariant.
    pub fn command(&mut self, sqe: Sqe, data: &[u8]) -> Option<AdminCompletion> {
        let cid = loop {
            self.next_cid = self.next_cid.wrapping_add(1);
            if !self.pending.contains(&self.next_cid) {
                break self.next_cid;
            }
        };
        let sqe = Sqe { cid, ..sqe };
        self.pending.insert(cid);
        let before = self.completed.len();
        let mut own_completion = None;
        for completion in self.deliver(ControllerEvent::Command { sqe: &sqe, data }) {
            if completion.cqe.cid == cid {
                own_completion = Some(completion);
            }
        }
        let is_event_request = sqe.opcode == AdminOpcode::AsyncEventRequest.to_wire();
        match &own_completion {
            None => assert!(is_event_request, "{sqe:?} did not complete"),
            Some(completion) => {
                let data = completion.data.len();
                assert!(data == 0 || completion.cqe.status.is_success(), "{completion:?} of {sqe:?}");
                assert!(data == 0 || data as u32 == sqe.data.length(), "{data} bytes for {sqe:?}");
                assert!(data as u64 <= self.limits.transfer_max_bytes.into(), "{data} bytes for {sqe:?}");
                if !is_event_request {
                    self.completed.retain(|cqe| cqe.cid != cid);
                }
            }
        }
        assert!(
            self.pending.len() <= self.limits.async_events_max.into(),
            "{:?} are all outstanding",
            self.pending
        );
        assert!(self.completed.len() >= before, "completions were lost");
        own_completion
    }

    /// Delivers an event and returns the completions.
    ///
    /// # Panics
    /// If a command completes that is not outstanding.
    pub fn deliver(&mut self, event: ControllerEvent<'_>) -> Vec<AdminCompletion> {
        let mut actions = Vec::new();
        self.controller.handle(event, self.now_ns, &mut actions);
        let mut completions = Vec::new();
        for action in actions {
            match action {
                ControllerAction::Complete(completion) => {
                    let cid = completion.cqe.cid;
                    assert!(self.pending.remove(&cid), "command {cid:#x} completed but is not outstanding");
                    self.completed.push(completion.cqe);
                    completions.push(completion);
                }
                other => self.actions.push(other),
            }
        }
        completions
    }

    /// Advances the time; returns the reason if the controller terminates.
    pub fn advance(&mut self, ns: u64) -> Option<TerminationReason> {
        self.now_ns += ns;
        let before = self.actions.len();
        self.deliver(ControllerEvent::Tick);
        self.actions[before..].iter().find_map(|action| match action {
            ControllerAction::Terminate(reason) => Some(*reason),
            _ => None,
        })
    }

    /// The fuzz entry: interprets the bytes as commands and events.
    ///
    /// # Panics
    /// If the controller violates an invariant.
    pub fn run(bytes: &[u8]) {
        let mut bytes = ByteSource(bytes);
        let kind = if bytes.u8().is_multiple_of(4) { SubsystemKind::Discovery } else { SubsystemKind::Nvm };
        let kato_ms = u32::from(bytes.u8()) * 100;
        let mut harness = Harness::new(kind, kato_ms);
        if !bytes.u8().is_multiple_of(8) {
            harness.enable();
        }
        // Continue for some steps after termination: commands that still arrive must complete.
        let mut steps_left = 8;
        while !bytes.0.is_empty() && steps_left > 0 {
            harness.step(&mut bytes);
            steps_left -= u8::from(
                harness.actions.iter().any(|action| matches!(action, ControllerAction::Terminate(_))),
            );
        }
        let association = harness.controller.association().clone();
        let cntlid = association.cntlid();
        harness.leases.clear();
        assert!(association.queues().is_empty());
        drop(harness.controller);
        assert!(!association.is_alive() && harness.directory.find(association.subnqn(), cntlid).is_none());
    }

    fn step(&mut self, bytes: &mut ByteSource<'_>) {
        match bytes.u8() % 16 {
            0..=7 => {
                let sqe = self.plausible_command(bytes);
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
                let terminated = self.advance(u64::from(bytes.u8()) * u64::from(bytes.u8()) * 100_000);
                assert!(
                    self.controller.deadline().is_none_or(|deadline| deadline > self.now_ns),
                    "{terminated:?}"
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
                let generation = bytes.u8().into();
                let log = discovery(generation, (bytes.u8() % 4).into());
                self.deliver(ControllerEvent::DiscoveryChanged(Arc::new(log)));
            }
            14 => {
                let health = HealthCounters { reads: bytes.u8().into(), ..HealthCounters::default() };
                self.deliver(ControllerEvent::Health(health));
            }
            _ => self.plan(bytes),
        }
    }

    /// A command that is likely to be accepted.
    fn plausible_command(&self, bytes: &mut ByteSource<'_>) -> Sqe {
        const COMMON: [AdminOpcode; 7] = [
            AdminOpcode::Identify,
            AdminOpcode::GetLogPage,
            AdminOpcode::GetFeatures,
            AdminOpcode::SetFeatures,
            AdminOpcode::AsyncEventRequest,
            AdminOpcode::KeepAlive,
            AdminOpcode::Abort,
        ];
        let choice = usize::from(bytes.u8());
        let opcode = match COMMON.get(choice % 8) {
            Some(&opcode) => opcode,
            None => AdminOpcode::ALL[choice / 8 % AdminOpcode::ALL.len()],
        };
        let lengths = [4096, 4096, 1024, 512, 4, 16, 3072, 128 << 10];
        let length = lengths[usize::from(bytes.u8() % 8)];
        let mut sqe = Sqe::new(opcode.to_wire());
        sqe.nsid = [0, 0, 1, 2, 3, 33, u32::MAX - 1, u32::MAX][usize::from(bytes.u8() % 8)];
        sqe.data = DataPointer::transport(length);
        // Log page, CNS and feature identifiers are mostly small numbers.
        let selected =
            [bytes.u8() % 0x20, 0x70, 0x81, bytes.u8()][bytes.u8().trailing_zeros().min(3) as usize];
        sqe.cdw10 = u32::from(selected) | u32::from(bytes.u8() & bytes.u8() & bytes.u8()) << 8;
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

    fn change_subsystem(&mut self, bytes: &mut ByteSource<'_>) {
        if self.controller.subsystem().kind == SubsystemKind::Discovery {
            return;
        }
        let mut next = Subsystem::clone(self.controller.subsystem());
        let mask = bytes.u8();
        let blocks = u64::from(bytes.u8()) + 1;
        let present = (0..8u32).filter(|bit| mask >> bit & 1 != 0);
        next.namespaces = present
            .map(|bit| SubsystemNamespace {
                anagrpid: bit % 3 + 1,
                ..SubsystemNamespace::new(bit + 1, blocks)
            })
            .collect();
        next.ana_reporting = bytes.u8().is_multiple_of(2);
        let state = AnaState::ALL[usize::from(bytes.u8()) % AnaState::ALL.len()];
        next.listeners = vec![SubsystemListener { portid: 1, ana: vec![(1, state)] }];
        match bytes.u8() {
            0 => _ = self.deliver(ControllerEvent::SubsystemRemoved),
            1 => {
                next.allow_any_host = false;
                self.deliver(ControllerEvent::SubsystemChanged(Arc::new(next)));
            }
            _ => _ = self.deliver(ControllerEvent::SubsystemChanged(Arc::new(next))),
        }
    }

    /// Plans an I/O command and checks that the plan stays within its namespace.
    fn plan(&self, bytes: &mut ByteSource<'_>) {
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
            io::IoOp::Read
            | io::IoOp::Write
            | io::IoOp::Compare
            | io::IoOp::FusedCompare
            | io::IoOp::FusedWrite
            | io::IoOp::WriteUncorrectable
            | io::IoOp::WriteZeroes => {
                let end = plan.lba.checked_add(plan.blocks.into());
                assert!(
                    plan.blocks > 0 && end.is_some_and(|end| end <= table.entry(&plan).blocks),
                    "{plan:?}"
                );
            }
            io::IoOp::Unmap => {
                let data: Vec<u8> = (0..4096).map(|_| bytes.u8()).collect();
                let Ok(ranges) = io::unmap_ranges(&plan, &table, &data) else { return };
                for (lba, blocks) in ranges {
                    assert!(blocks > 0 && lba + u64::from(blocks) <= table.entry(&plan).blocks);
                }
            }
            io::IoOp::Copy => {
                let data: Vec<u8> = (0..4096).map(|_| bytes.u8()).collect();
                let Ok(mut copying) = io::CopyOperation::new(&plan, &table, &data) else { return };
                let (end, mut total) = (table.entry(&plan).blocks, 0);
                while let Some(range) = copying.current_range() {
                    let (from, to, blocks) = (range.from, range.to, range.blocks);
                    let length = u64::from(blocks);
                    assert!(blocks > 0 && from + length <= end && to + length <= end, "{copying:?}");
                    assert!(to == plan.lba + total && copying.index() < plan.blocks, "{copying:?}");
                    total += length;
                    copying.complete_range();
                }
                assert!(total > 0 && copying.index() == plan.blocks, "{copying:?}");
            }
            _ => {}
        }
        if let io::DataTransfer::ToHost(length)
        | io::DataTransfer::FromHost(length)
        | io::DataTransfer::Fused(length)
        | io::DataTransfer::ControllerData(length) = plan.data
        {
            assert!(length == sqe.data.length() && length <= self.limits.transfer_max_bytes, "{plan:?}");
        }
    }
}

/// The CC value that Linux writes to enable a controller.
pub(crate) const LINUX_CC: u32 = 0x0046_0001;

pub(crate) fn property_set(offset: u32, value: u32) -> Sqe {
    wire_nvme::fabrics::PropertySet { wide: false, offset, value: value.into() }.to_sqe()
}

/// The fuzz input as numbers; 0 after its end.
pub(crate) struct ByteSource<'a>(pub(crate) &'a [u8]);

impl ByteSource<'_> {
    pub(crate) fn u8(&mut self) -> u8 {
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
        fn invariants_hold_for_arbitrary_input(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            Harness::run(&bytes);
        }
    }

    #[test]
    fn harness_tracks_outstanding_event_requests() {
        let mut harness = Harness::enabled(SubsystemKind::Nvm);
        assert_eq!(harness.command(Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()), &[]), None);
        assert_eq!(harness.pending.len(), 1);
        let completion = harness.command(Sqe::new(AdminOpcode::KeepAlive.to_wire()), &[]).unwrap();
        assert_eq!(completion.cqe.status, block_io::Status::SUCCESS);
    }
}
