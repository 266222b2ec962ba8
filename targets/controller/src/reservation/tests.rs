use std::collections::BTreeMap;

use proptest::prelude::*;
use wire_nvme::fabrics::CNTLID_DYNAMIC;
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationType, encode_keys,
};
use wire_nvme::{DataPointer, NSID_ALL};

use super::*;
use crate::harness::{connect_data, connect_sqe, subnqn, subsystem};
use crate::{
    ConnectContext, ConnectOk, ControllerLimits, NamespaceTable, Subsystem, SubsystemKind, SubsystemPort,
    connect, io,
};

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const A: HostId = [1; 16];
const B: HostId = [2; 16];
const C: HostId = [3; 16];

fn register(action: RegisterAction, ignore_key: bool) -> ReservationRegister {
    ReservationRegister { action, ignore_key, persist: PersistChange::None }
}

fn acquire(action: AcquireAction, kind: ReservationType) -> ReservationAcquire {
    ReservationAcquire { action, ignore_key: false, kind }
}

fn release(action: ReleaseAction, kind: ReservationType) -> ReservationRelease {
    ReservationRelease { action, ignore_key: false, kind }
}

fn register_command(key: u64) -> ReservationCommand {
    ReservationCommand::Register(register(RegisterAction::Register, false), 0, key)
}

fn acquire_command(kind: ReservationType, key: u64) -> ReservationCommand {
    ReservationCommand::Acquire(acquire(AcquireAction::Acquire, kind), key, 0)
}

fn preempt(kind: ReservationType, key: u64, victim: u64) -> ReservationCommand {
    ReservationCommand::Acquire(acquire(AcquireAction::Preempt, kind), key, victim)
}

/// A state in which A, B and C are registered with keys 0xa, 0xb and 0xc.
fn three_registrants() -> ReservationState {
    let mut state = ReservationState::default();
    for (host, key) in [(A, 0xa), (B, 0xb), (C, 0xc)] {
        state.apply(host, &register_command(key), false).unwrap();
    }
    state
}

/// Base 2.0, section 8.19, Command Behavior in the Presence of a Reservation: for each type the rows are read
/// and write, the columns other hosts, registrants, and holders; `A` is allowed and `C` a conflict.
const MATRIX: [(ReservationType, [&str; 2]); 6] = [
    (ReservationType::WriteExclusive, ["AAA", "CCA"]),
    (ReservationType::ExclusiveAccess, ["CCA", "CCA"]),
    (ReservationType::WriteExclusiveRegistrants, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessRegistrants, ["CAA", "CAA"]),
    (ReservationType::WriteExclusiveAll, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessAll, ["CAA", "CAA"]),
];

/// A host with its own controller of the subsystem.
struct TestHost {
    admin: crate::AdminConnect,
    table: NamespaceTable,
}

fn test_host(directory: &Arc<ControllerDirectory>, subsystem: &Arc<Subsystem>, host: HostId) -> TestHost {
    let limits = ControllerLimits::default();
    let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
    data[..16].copy_from_slice(&host);
    let place = ConnectContext { directory, limits: &limits, port: SubsystemPort::default() };
    let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
    let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
    let table =
        NamespaceTable::for_controller(subsystem, 0, &limits, directory, &admin.registration.association);
    TestHost { admin, table }
}

impl TestHost {
    /// Executes a reservation command with its data on namespace 1.
    fn reserve(&self, sqe: Sqe, data: &[u8]) -> ReservationOutcome {
        let length = if data.is_empty() {
            ReservationReport::from_sqe(&sqe).length_bytes as usize
        } else {
            data.len()
        };
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(length as u32), ..sqe };
        let plan = io::plan(&sqe, &self.table).unwrap();
        assert_eq!(plan.op, io::IoOp::Reservation);
        self.table.execute_reservation(&plan, data)
    }

    fn execute(&self, sqe: Sqe, data: &[u8]) -> Status {
        match self.reserve(sqe, data) {
            ReservationOutcome::Done(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn register(&self, key: u64) {
        let sqe = register(RegisterAction::Register, false).to_sqe();
        assert_eq!(self.execute(sqe, &encode_keys(0, key)), Status::SUCCESS);
    }
}

/// Every command class of the specification's table, for every reservation type and role of the host.
#[test]
fn reservation_conflicts_match_the_specification() {
    use wire_nvme::io::{DatasetManagement, ReadWrite, WriteZeroes};
    use wire_nvme::opcode::NvmOpcode::{Compare, Flush, Read, Verify, Write};
    let rw = |opcode| Sqe {
        data: DataPointer::transport(512),
        ..ReadWrite { blocks: 1, ..ReadWrite::default() }.to_sqe(opcode)
    };
    let dsm = |deallocate| {
        let view = DatasetManagement { ranges: 1, integral_read: false, integral_write: false, deallocate };
        Sqe { data: DataPointer::transport(16), ..view.to_sqe() }
    };
    let zeroes = WriteZeroes {
        lba: 0,
        blocks: 1,
        fua: false,
        deallocate: false,
        prinfo: wire_nvme::io::Prinfo::empty(),
    };
    let flush = Sqe { data: DataPointer::transport(0), ..Sqe::new(Flush.to_wire()) };
    let all = Sqe { nsid: NSID_ALL, ..flush };
    let classes: [(usize, &[(&str, Sqe)]); 2] = [
        (0, &[("read", rw(Read)), ("compare", rw(Compare)), ("verify", rw(Verify))]),
        (
            1,
            &[
                ("write", rw(Write)),
                ("write zeroes", zeroes.to_sqe()),
                ("flush", flush),
                ("flush of all", all),
                ("deallocate", dsm(true)),
                ("access hints", dsm(false)),
            ],
        ),
    ];
    for (kind, rows) in MATRIX {
        let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
        let [other, registrant, holder] = [C, B, A].map(|host| test_host(&directory, &subsystem, host));
        registrant.register(0xb);
        holder.register(0xa);
        let sqe = acquire(AcquireAction::Acquire, kind).to_sqe();
        assert_eq!(holder.execute(sqe, &encode_keys(0xa, 0)), Status::SUCCESS);
        for (row, commands) in classes {
            for (member, expected) in [&other, &registrant, &holder].into_iter().zip(rows[row].bytes()) {
                for (name, sqe) in commands {
                    let sqe = Sqe { nsid: if sqe.nsid == 0 { 1 } else { sqe.nsid }, ..*sqe };
                    let answer = io::plan(&sqe, &member.table).map(|_| ());
                    let expected = if expected == b'A' { Ok(()) } else { Err(CONFLICT) };
                    assert_eq!(
                        answer, expected,
                        "{kind:?}: {name} of {:?}",
                        member.admin.registration.association
                    );
                    // The other namespace is not reserved.
                    if sqe.nsid == 1 && *name != "deallocate" {
                        let data =
                            if sqe.data.length() == 512 { DataPointer::transport(4096) } else { sqe.data };
                        assert!(io::plan(&Sqe { nsid: 3, data, ..sqe }, &member.table).is_ok(), "{name}");
                    }
                }
            }
        }
        // Every host may send Register and Report; Acquire and Release require a registrant.
        other.register(0xc);
        let sqe = release(ReleaseAction::Release, kind).to_sqe();
        let stranger = test_host(&directory, &subsystem, [9; 16]);
        assert_eq!(stranger.execute(sqe, &0xau64.to_le_bytes()), CONFLICT);
        assert_eq!(
            stranger.execute(acquire(AcquireAction::Preempt, kind).to_sqe(), &encode_keys(0, 0xa)),
            CONFLICT
        );
        assert_eq!(holder.execute(sqe, &0xau64.to_le_bytes()), Status::SUCCESS);
        assert!(io::plan(&Sqe { nsid: 1, ..rw(Write) }, &stranger.table).is_ok(), "nothing is reserved");
    }
}

#[test]
fn deferred_plan_is_checked_against_new_reservation() {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let [one, other] = [A, B].map(|host| test_host(&directory, &subsystem, host));
    let write = wire_nvme::io::ReadWrite { blocks: 1, ..Default::default() }.to_sqe(NvmOpcode::Write);
    let write = Sqe { nsid: 1, data: DataPointer::transport(512), ..write };
    let plan = io::plan(&write, &other.table).unwrap();
    one.register(7);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(one.execute(sqe, &encode_keys(7, 0)), Status::SUCCESS);
    assert_eq!(other.table.check_reservation(&plan), Err(CONFLICT));
    assert_eq!(one.table.check_reservation(&plan), Ok(()));
}

#[test]
fn keys_are_registered_replaced_and_unregistered() {
    use RegisterAction::{Register, Replace, Unregister};
    let invalid = Err(INVALID_FIELD);
    let rows = [
        // Action, IEKEY, current key, new key; of A, which is registered, and of D, which is not.
        (Register, false, 0, 0xa, Ok(0xa), Ok(0xa)),
        (Register, false, 0, 5, Err(CONFLICT), Ok(5)),
        (Register, true, 0, 5, Err(CONFLICT), Ok(5)),
        (Register, false, 0, 0, invalid, invalid),
        (Replace, false, 0xa, 5, Ok(5), Err(CONFLICT)),
        (Replace, false, 1, 5, Err(CONFLICT), Err(CONFLICT)),
        (Replace, true, 1, 5, Ok(5), Ok(5)),
        (Replace, true, 0xa, 0, invalid, invalid),
        (Unregister, false, 0xa, 0, Ok(0), Err(CONFLICT)),
        (Unregister, false, 1, 0, Err(CONFLICT), Err(CONFLICT)),
        (Unregister, true, 1, 0, Ok(0), Err(CONFLICT)),
    ];
    for (action, ignore, current, new, registered, stranger) in rows {
        for (host, expected) in [(A, registered), ([4; 16], stranger)] {
            let mut state = three_registrants();
            let command = ReservationCommand::Register(register(action, ignore), current, new);
            let answer = state.apply(host, &command, false);
            let found = answer.map(|_| state.key_of(&host).unwrap_or(0));
            assert_eq!(found, expected, "{command:?} of {host:?}");
            if expected.is_err() {
                assert_eq!(state, three_registrants(), "nothing changes");
            } else {
                assert_eq!(state.generation, three_registrants().generation + 1);
            }
        }
    }
}

#[test]
fn persistence_requires_a_store() {
    let with = |persist| ReservationRegister { persist, ..register(RegisterAction::Register, false) };
    let mut state = ReservationState::default();
    let persistent = ReservationCommand::Register(with(PersistChange::Persistent), 0, 1);
    assert_eq!(state.apply(A, &persistent, false), Err(INVALID_FIELD));
    assert_eq!(state, ReservationState::default());
    state.apply(A, &persistent, true).unwrap();
    assert!(state.persistent);
    state.apply(A, &ReservationCommand::Register(with(PersistChange::None), 0, 1), true).unwrap();
    assert!(state.persistent);
    state.apply(A, &ReservationCommand::Register(with(PersistChange::Volatile), 0, 1), true).unwrap();
    assert!(!state.persistent);
}

#[test]
fn preempt_depends_on_type_and_key() {
    use ReservationType::*;
    let effects_of = |preempted: &[HostId], released: &[HostId]| {
        Ok(Effects { preempted: preempted.to_vec(), released: released.to_vec(), ..Effects::default() })
    };
    // A holds the reservation; B preempts with a new type. Expected result, remaining hosts, and reservation.
    let rows = [
        (None, 0xa, WriteExclusive, effects_of(&[A], &[]), vec![B, C], None),
        (None, 5, WriteExclusive, Err(CONFLICT), vec![A, B, C], None),
        (
            Some(WriteExclusive),
            0xa,
            WriteExclusive,
            effects_of(&[A], &[]),
            vec![B, C],
            Some((WriteExclusive, B)),
        ),
        (
            Some(WriteExclusive),
            0xa,
            ExclusiveAccess,
            effects_of(&[A], &[C]),
            vec![B, C],
            Some((ExclusiveAccess, B)),
        ),
        (
            Some(ExclusiveAccess),
            0xc,
            WriteExclusive,
            effects_of(&[C], &[]),
            vec![A, B],
            Some((ExclusiveAccess, A)),
        ),
        (Some(ExclusiveAccess), 5, WriteExclusive, Err(CONFLICT), vec![A, B, C], Some((ExclusiveAccess, A))),
        (
            Some(ExclusiveAccess),
            0,
            WriteExclusive,
            Err(INVALID_FIELD),
            vec![A, B, C],
            Some((ExclusiveAccess, A)),
        ),
        (
            Some(WriteExclusiveRegistrants),
            0xa,
            WriteExclusiveRegistrants,
            effects_of(&[A], &[]),
            vec![B, C],
            Some((WriteExclusiveRegistrants, B)),
        ),
        (
            Some(WriteExclusiveAll),
            0,
            WriteExclusive,
            effects_of(&[A, C], &[]),
            vec![B],
            Some((WriteExclusive, B)),
        ),
        (
            Some(WriteExclusiveAll),
            0xa,
            WriteExclusive,
            effects_of(&[A], &[]),
            vec![B, C],
            Some((WriteExclusiveAll, B)),
        ),
        (
            Some(ExclusiveAccessAll),
            5,
            WriteExclusive,
            Err(CONFLICT),
            vec![A, B, C],
            Some((ExclusiveAccessAll, A)),
        ),
    ];
    for (held, victim, kind, expected, remaining, then) in rows {
        let mut state = three_registrants();
        if let Some(held) = held {
            state.apply(A, &acquire_command(held, 0xa), false).unwrap();
        }
        let generation = state.generation;
        let name = format!("{held:?}, {victim:#x} for {kind:?}");
        assert_eq!(state.apply(B, &preempt(kind, 0xb, victim), false), expected, "{name}");
        assert_eq!(state.registrations.iter().map(|one| one.host).collect::<Vec<_>>(), remaining, "{name}");
        assert_eq!(state.reservation.map(|held| (held.kind, held.holder)), then, "{name}");
        assert_eq!(state.generation, generation + u32::from(expected.is_ok()), "{name}");
    }
    // A holder changes the type by preempting its own key.
    let mut state = three_registrants();
    state.apply(A, &acquire_command(WriteExclusive, 0xa), false).unwrap();
    assert_eq!(state.apply(A, &preempt(ExclusiveAccess, 0xa, 0xa), false), effects_of(&[], &[B, C]));
    assert_eq!(state.reservation, Some(ActiveReservation { kind: ExclusiveAccess, holder: A }));
    // Preempt and Abort is Preempt plus a drain of the preempted hosts.
    let abort =
        ReservationCommand::Acquire(acquire(AcquireAction::PreemptAndAbort, ExclusiveAccess), 0xb, 0xa);
    let effects = state.apply(B, &abort, false).unwrap();
    assert_eq!((effects.preempted, effects.abort), (vec![A], vec![A]));
}

#[test]
fn release_notifies_remaining_registrants() {
    use ReservationType::*;
    for kind in ReservationType::ALL.iter().copied() {
        let notified = if matches!(kind, WriteExclusive | ExclusiveAccess) { vec![] } else { vec![B, C] };
        let held = || {
            let mut state = three_registrants();
            state.apply(A, &acquire_command(kind, 0xa), false).unwrap();
            state
        };
        let release_command = |action, kind| ReservationCommand::Release(release(action, kind), 0xa);
        let mut state = held();
        assert_eq!(
            state.apply(A, &release_command(ReleaseAction::Release, kind), false).unwrap().released,
            notified
        );
        assert_eq!((state.reservation, state.generation), (None, 3));
        // Another type is invalid; a release by another host has no effect.
        let other = if kind == WriteExclusive { ExclusiveAccess } else { WriteExclusive };
        assert_eq!(
            held().apply(A, &release_command(ReleaseAction::Release, other), false),
            Err(INVALID_FIELD)
        );
        let is_for_all = matches!(kind, WriteExclusiveAll | ExclusiveAccessAll);
        let mut state = held();
        state
            .apply(B, &ReservationCommand::Release(release(ReleaseAction::Release, kind), 0xb), false)
            .unwrap();
        assert_eq!(state.reservation.is_none(), is_for_all, "{kind:?}");
        // Unregistering the last holder releases the reservation.
        let mut state = held();
        let unregister_command =
            |key| ReservationCommand::Register(register(RegisterAction::Unregister, false), key, 0);
        let effects = state.apply(A, &unregister_command(0xa), false).unwrap();
        assert_eq!(state.reservation.is_some(), is_for_all, "{kind:?}");
        assert_eq!(effects.released, if is_for_all { vec![] } else { notified });
        state.apply(B, &unregister_command(0xb), false).unwrap();
        state.apply(C, &unregister_command(0xc), false).unwrap();
        assert_eq!((state.reservation, state.registrations.len()), (None, 0));
        // Every registrant may clear.
        let mut state = held();
        let effects = state
            .apply(B, &ReservationCommand::Release(release(ReleaseAction::Clear, kind), 0xb), false)
            .unwrap();
        assert_eq!(effects, Effects { cleared: vec![A, C], ..Effects::default() });
        assert_eq!((state.reservation, state.registrations.len(), state.generation), (None, 0, 4));
        // Acquiring again changes nothing; another type or another host is a conflict.
        let mut state = held();
        assert!(state.apply(A, &acquire_command(kind, 0xa), false).is_ok());
        assert_eq!(state.apply(A, &acquire_command(other, 0xa), false), Err(CONFLICT));
        assert_eq!(state.apply(B, &acquire_command(kind, 0xb), false).is_ok(), is_for_all);
        assert_eq!(state.apply(B, &acquire_command(kind, 0xa), false), Err(CONFLICT), "not its key");
        let ignored = ReservationAcquire { ignore_key: true, ..acquire(AcquireAction::Acquire, kind) };
        assert_eq!(state.apply(A, &ReservationCommand::Acquire(ignored, 0xa, 0), false), Err(INVALID_FIELD));
    }
}

/// A reference model: for every host its key and whether it is a holder, without an order of registrations.
#[derive(Clone, Debug, Default)]
struct ReferenceModel {
    keys: BTreeMap<u8, u64>,
    kind: Option<ReservationType>,
    holders: Vec<u8>,
}

impl ReferenceModel {
    fn is_all_registrants(&self) -> bool {
        matches!(self.kind, Some(ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll))
    }

    fn release_without_holders(&mut self) {
        if self.is_all_registrants() {
            self.holders = self.keys.keys().copied().collect();
        }
        self.holders.retain(|host| self.keys.contains_key(host));
        if self.holders.is_empty() {
            self.kind = None;
        }
    }

    fn remove_key(&mut self, key: u64, but: Option<u8>) {
        self.keys.retain(|host, of| *of != key || Some(*host) == but);
    }

    /// Returns whether the command succeeds.
    fn apply(&mut self, host: u8, command: &ReservationCommand) -> bool {
        let own = self.keys.get(&host).copied();
        let done = match *command {
            ReservationCommand::Register(view, current, new) => match (view.action, own) {
                (RegisterAction::Unregister, Some(key)) if view.ignore_key || key == current => {
                    self.keys.remove(&host);
                    true
                }
                (RegisterAction::Unregister, _) => false,
                (_, _) if new == 0 => false,
                (RegisterAction::Register, Some(key)) => key == new,
                (RegisterAction::Replace, Some(key)) if !view.ignore_key && key != current => false,
                (RegisterAction::Replace, None) if !view.ignore_key => false,
                _ => {
                    self.keys.insert(host, new);
                    true
                }
            },
            ReservationCommand::Acquire(_, current, _) | ReservationCommand::Release(_, current)
                if own != Some(current) =>
            {
                false
            }
            ReservationCommand::Acquire(view, _, victim) if view.action != AcquireAction::Acquire => {
                let holds_victim = self.holders.iter().any(|holder| self.keys[holder] == victim);
                let takes_over =
                    if self.is_all_registrants() { victim == 0 } else { self.kind.is_some() && holds_victim };
                if takes_over {
                    if victim == 0 {
                        self.keys.retain(|one, _| *one == host);
                    }
                    self.remove_key(victim, Some(host));
                    (self.kind, self.holders) = (Some(view.kind), vec![host]);
                    true
                } else {
                    let any = self.keys.values().any(|key| *key == victim);
                    self.remove_key(victim, None);
                    any
                }
            }
            ReservationCommand::Acquire(view, ..) => match self.kind {
                None => {
                    (self.kind, self.holders) = (Some(view.kind), vec![host]);
                    true
                }
                Some(kind) => kind == view.kind && self.holders.contains(&host),
            },
            ReservationCommand::Release(view, _) if view.action == ReleaseAction::Clear => {
                *self = ReferenceModel::default();
                true
            }
            ReservationCommand::Release(view, _) => match self.kind {
                Some(kind) if kind != view.kind => false,
                _ => {
                    if self.holders.contains(&host) {
                        (self.kind, self.holders) = (None, Vec::new());
                    }
                    true
                }
            },
        };
        self.release_without_holders();
        done
    }

    /// Whether a host may read, and whether it may write.
    fn may(&self, host: u8) -> (bool, bool) {
        let Some((_, rows)) = MATRIX.iter().find(|(kind, _)| Some(*kind) == self.kind) else {
            return (true, true);
        };
        let column = match (self.holders.contains(&host), self.keys.contains_key(&host)) {
            (true, _) => 2,
            (_, true) => 1,
            _ => 0,
        };
        (rows[0].as_bytes()[column] == b'A', rows[1].as_bytes()[column] == b'A')
    }
}

fn any_command() -> impl Strategy<Value = ReservationCommand> {
    let key = || 0..4u64;
    let kind = || prop::sample::select(ReservationType::ALL);
    let registers = (prop::sample::select(RegisterAction::ALL), any::<bool>(), key(), key());
    prop_oneof![
        3 => registers.prop_map(|(action, ignore, current, new)| {
            ReservationCommand::Register(register(action, ignore), current, new)
        }),
        4 => (prop::sample::select(AcquireAction::ALL), kind(), key(), key()).prop_map(
            |(action, kind, current, victim)| ReservationCommand::Acquire(acquire(action, kind), current, victim)
        ),
        2 => (prop::sample::select(ReleaseAction::ALL), kind(), key())
            .prop_map(|(action, kind, current)| ReservationCommand::Release(release(action, kind), current)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn random_commands_match_the_reference_model(
        commands in prop::collection::vec((1..5u8, any_command()), 0..60),
    ) {
        let (mut state, mut model) = (ReservationState::default(), ReferenceModel::default());
        for (host, command) in commands {
            let before = state.clone();
            let answer = state.apply([host; 16], &command, false);
            let mut after = model.clone();
            let done = after.apply(host, &command);
            prop_assert_eq!(answer.is_ok(), done, "{:?} of {} on {:?}", command, host, model);
            if done {
                model = after;
            } else {
                prop_assert_eq!(&state, &before);
            }
            prop_assert!(state.is_valid());
            prop_assert_eq!(state.reservation.map(|held| held.kind), model.kind);
            for host in 1..6u8 {
                prop_assert_eq!(state.key_of(&[host; 16]), model.keys.get(&host).copied());
                prop_assert_eq!(state.is_holder(&[host; 16]), model.holders.contains(&host));
                let denied = state.denied(&[host; 16]);
                prop_assert_eq!((denied & access::READ == 0, denied & access::WRITE == 0), model.may(host));
            }
            // Notified hosts were registered before and did not send the command.
            if let Ok(Effects { preempted, released, cleared, abort }) = answer {
                for notified in [&preempted, &released, &cleared, &abort] {
                    prop_assert!(notified.iter().all(|notified| *notified != [host; 16] && before.key_of(notified).is_some()));
                }
                prop_assert!(released.iter().all(|notified| state.key_of(notified).is_some()));
                prop_assert!(preempted.iter().chain(&cleared).all(|notified| state.key_of(notified).is_none()));
            }
        }
    }
}

#[test]
fn report_lists_every_controller_of_registered_hosts() {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let members = [A, A, B].map(|host| test_host(&directory, &subsystem, host));
    let [first, second, other] = &members;
    first.register(0xa);
    other.register(0xb);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::ExclusiveAccess).to_sqe();
    assert_eq!(second.execute(sqe, &encode_keys(0xa, 0)), Status::SUCCESS, "hosts reserve, not controllers");
    let report = ReservationReport { extended: true, length_bytes: 4096 }.to_sqe();
    let ReservationOutcome::Report(bytes) = other.reserve(report, &[]) else { panic!("no report") };
    assert_eq!(bytes.len(), 4096);
    let report = ReservationStatus::decode(&bytes, true).unwrap();
    let entry = |member: &TestHost, host_id, key, holder| Registrant {
        cntlid: member.admin.registration.association.cntlid(),
        holder,
        host_id,
        key,
    };
    let expected = vec![entry(first, A, 0xa, true), entry(second, A, 0xa, true), entry(other, B, 0xb, false)];
    let expected = ReservationStatus {
        generation: 2,
        kind: Some(ReservationType::ExclusiveAccess),
        persistent: false,
        registrants: expected,
    };
    assert_eq!(report, expected);
    // Over fabrics identifiers have 128 bits.
    let short = ReservationReport { extended: false, length_bytes: 64 }.to_sqe();
    assert_eq!(other.execute(short, &[]), Status::HOST_ID_INCONSISTENT.do_not_retry());
    // A host without a controller is still registered.
    let [first, second, other] = members;
    drop((first, second));
    let report = ReservationReport { extended: true, length_bytes: 128 }.to_sqe();
    let ReservationOutcome::Report(bytes) = other.reserve(report, &[]) else { panic!("no report") };
    let report = ReservationStatus::decode(&bytes, true).unwrap();
    assert_eq!(report.registrants[0], Registrant { cntlid: 0xffff, holder: true, host_id: A, key: 0xa });
}

/// A store that holds saves until the test completes them.
#[derive(Debug, Default)]
struct HeldSaves(Arc<Mutex<Vec<(ReservationState, PendingGuard)>>>);

impl ReservationStore for HeldSaves {
    fn save(&self, state: &ReservationState, guard: PendingGuard) {
        self.0.lock().unwrap().push((state.clone(), guard));
    }
}

#[test]
fn command_completes_after_save_and_drain() {
    let saves = Arc::new(Mutex::new(Vec::new()));
    let mut subsystem = subsystem();
    let reservations =
        Reservations::with_store(ReservationState::default(), Box::new(HeldSaves(saves.clone())));
    assert_eq!(reservations.capabilities(), 0xff);
    subsystem.namespaces[0].reservations = Arc::new(reservations);
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem));
    let wakeups = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = wakeups.clone();
    let notifier = directory.add_notifier(Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let [one, other] = [A, B].map(|host| test_host(&directory, &subsystem, host));
    let persist = ReservationRegister {
        persist: PersistChange::Persistent,
        ..register(RegisterAction::Register, false)
    };
    let ReservationOutcome::Pending(pending) = one.reserve(persist.to_sqe(), &encode_keys(0, 0xa)) else {
        panic!()
    };
    assert_eq!((pending.outcome(), wakeups.load(Ordering::Relaxed)), (None, 0));
    let (state, guard) = saves.lock().unwrap().pop().unwrap();
    assert!(state.persistent && state.key_of(&A) == Some(0xa));
    drop(guard);
    assert_eq!((pending.outcome(), wakeups.load(Ordering::Relaxed)), (Some(Status::SUCCESS), 1));
    assert!(notifier.take().is_some_and(|drains| drains.is_empty()) && notifier.take().is_none());
    // A failed save fails the command.
    let ReservationOutcome::Pending(pending) = other.reserve(persist.to_sqe(), &encode_keys(0, 0xb)) else {
        panic!()
    };
    saves.lock().unwrap().pop().unwrap().1.fail();
    assert_eq!(pending.outcome(), Some(Status::INTERNAL_ERROR));
    // Preempt and Abort waits for the save and for the drain.
    let abort = acquire(AcquireAction::PreemptAndAbort, ReservationType::WriteExclusive).to_sqe();
    let ReservationOutcome::Pending(pending) = other.reserve(abort, &encode_keys(0xb, 0xa)) else { panic!() };
    let mut drains = notifier.take().unwrap();
    let drain = drains.pop().unwrap();
    assert_eq!((&drain.hosts[..], drains.len()), (&[A][..], 0));
    saves.lock().unwrap().clear();
    assert_eq!(pending.outcome(), None);
    drop(drain);
    assert_eq!(pending.outcome(), Some(Status::SUCCESS));
    let notified = one.admin.registration.association.take_notifications().0;
    assert_eq!(Vec::from(notified), [(1, NotificationType::RegistrationPreempted)]);
}

#[test]
fn notifications_are_logged_in_order_and_maskable() {
    use wire_nvme::admin::{GetFeatures, GetLogPage, SetFeatures};
    use wire_nvme::aer::AsyncEvent;
    use wire_nvme::feature::{FeatureId, reservation_mask};
    use wire_nvme::log::{LogId, ReservationNotification};
    use wire_nvme::opcode::AdminOpcode;
    let mut harness = crate::Harness::enabled(SubsystemKind::Nvm);
    let subsystem = harness.controller.subsystem().clone();
    let other = test_host(&harness.directory, &subsystem, B);
    // A member with the host identifier of the harness.
    let own = test_host(&harness.directory, &subsystem, harness.controller.association().host_id());
    let page = |harness: &mut crate::Harness, retain_event| {
        let log = GetLogPage {
            lid: LogId::ReservationNotification.to_wire(),
            length_bytes: 64,
            retain_event,
            ..Default::default()
        };
        let sqe = Sqe { data: DataPointer::transport(64), ..log.to_sqe(0) };
        let data = harness.command(sqe, &[]).unwrap().data;
        ReservationNotification::decode(data.as_slice().try_into().unwrap()).unwrap()
    };
    assert_eq!(page(&mut harness, false), ReservationNotification::EMPTY);
    let event = Sqe { data: DataPointer::transport(0), ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) };
    assert_eq!(harness.command(event, &[]), None);
    assert_eq!(harness.command(event, &[]), None);
    let log_cleared = |harness: &mut crate::Harness| {
        own.register(5);
        other.register(6);
        let clear = release(ReleaseAction::Clear, ReservationType::WriteExclusive).to_sqe();
        assert_eq!(other.execute(clear, &6u64.to_le_bytes()), Status::SUCCESS);
        harness.deliver(crate::ControllerEvent::ReservationChanged)
    };
    let notified = log_cleared(&mut harness);
    assert_eq!(notified.len(), 1);
    assert_eq!(AsyncEvent::from_result(notified[0].cqe.result), Some(AsyncEvent::RESERVATION_LOG));
    assert_eq!(log_cleared(&mut harness), [], "masked until the log is read");
    let cleared = |count, available| ReservationNotification {
        count,
        kind: NotificationType::ReservationPreempted,
        available,
        nsid: 1,
    };
    assert_eq!(page(&mut harness, true), cleared(1, 1));
    assert_eq!(harness.pending.len(), 1);
    assert_eq!(page(&mut harness, false), cleared(1, 1));
    assert_eq!(harness.pending.len(), 0, "another notification is unread");
    assert_eq!(page(&mut harness, false), cleared(2, 0));
    assert_eq!(page(&mut harness, false), ReservationNotification::EMPTY);
    // Masked notifications are not logged.
    let fid = FeatureId::ReservationMask.to_wire();
    let set = SetFeatures { fid, cdw11: reservation_mask::RESERVATION_PREEMPTED, ..Default::default() };
    let run = |harness: &mut crate::Harness, sqe| harness.command(sqe, &[]).unwrap().cqe;
    assert_eq!(run(&mut harness, set.to_sqe(NSID_ALL)).status, Status::SUCCESS);
    let get = GetFeatures { fid, select: 0, cdw11: 0, uuid_index: 0 };
    assert_eq!(run(&mut harness, get.to_sqe(3)).result, reservation_mask::RESERVATION_PREEMPTED.into());
    let none = Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry();
    assert_eq!(
        (run(&mut harness, get.to_sqe(0)).status, run(&mut harness, set.to_sqe(2)).status),
        (none, none)
    );
    assert_eq!(log_cleared(&mut harness), []);
    assert_eq!(page(&mut harness, false), ReservationNotification::EMPTY);
    // No store: persistence is not supported.
    let fid = FeatureId::ReservationPersistence.to_wire();
    let set = SetFeatures { fid, cdw11: 1, ..Default::default() };
    assert_eq!(run(&mut harness, set.to_sqe(1)).status, INVALID_FIELD);
    assert_eq!(run(&mut harness, set.to_sqe(NSID_ALL)).status, Status::SUCCESS);
    let get = GetFeatures { fid, select: 0, cdw11: 0, uuid_index: 0 };
    assert_eq!(run(&mut harness, get.to_sqe(1)).result, 0);
}

/// Without Connect the Host Identifier feature sets the identifier: once, and in one length.
#[test]
fn memory_based_host_sets_its_identifier() {
    use wire_nvme::admin::{GetFeatures, SetFeatures};
    use wire_nvme::feature::{FeatureId, HOST_ID_EXTENDED};
    let directory = Arc::new(ControllerDirectory::new());
    let limits = Arc::new(ControllerLimits {
        memory_based: true,
        interrupt_vectors: 2,
        ..ControllerLimits::default()
    });
    let subsystem = Arc::new(subsystem());
    let connect_host = |generated: u8| {
        let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
        data[..16].fill(generated);
        let place = ConnectContext { directory: &directory, limits: &limits, port: SubsystemPort::default() };
        let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
        let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
        let mut controller = crate::Controller::new(admin, limits.clone(), Arc::default(), 0);
        controller.write_cc(crate::harness::LINUX_CC, &mut Vec::new());
        controller
    };
    let run = |controller: &mut crate::Controller, sqe: Sqe, data: &[u8]| {
        let sqe = Sqe { flags: 0, ..sqe };
        assert_eq!(crate::data_from_host(&sqe) as usize, data.len());
        let mut actions = Vec::new();
        controller.handle(crate::ControllerEvent::Command { sqe: &sqe, data }, 0, &mut actions);
        match actions.pop() {
            Some(crate::ControllerAction::Complete(completion)) => (completion.cqe.status, completion.data),
            other => panic!("{other:?}"),
        }
    };
    let fid = FeatureId::HostIdentifier.to_wire();
    let set = |cdw11| SetFeatures { fid, cdw11, ..Default::default() }.to_sqe(0);
    let get = |cdw11| GetFeatures { fid, select: 0, cdw11, uuid_index: 0 }.to_sqe(0);
    let (mut one, mut other) = (connect_host(0x11), connect_host(0x22));
    // Not set yet: zeroes in either length; the generated identifier is in use.
    assert_eq!(run(&mut one, get(HOST_ID_EXTENDED), &[]), (Status::SUCCESS, vec![0; 16]));
    assert_eq!(run(&mut one, get(0), &[]), (Status::SUCCESS, vec![0; 8]));
    assert_eq!(one.association().host_id(), [0x11; 16]);
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &A).0, Status::SUCCESS);
    assert_eq!(run(&mut one, get(HOST_ID_EXTENDED), &[]), (Status::SUCCESS, A.to_vec()));
    assert_eq!(run(&mut one, get(0), &[]).0, Status::HOST_ID_INCONSISTENT.do_not_retry());
    // Setting the same identifier succeeds; another one is a sequence error.
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &A).0, Status::SUCCESS);
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &B).0, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
    // One subsystem cannot mix both lengths.
    assert_eq!(run(&mut other, set(0), &[5; 8]).0, Status::HOST_ID_INCONSISTENT.do_not_retry());
    drop(one);
    assert_eq!(run(&mut other, set(0), &[5; 8]).0, Status::SUCCESS);
    // The report's data structure matches the length of identifiers.
    let table = NamespaceTable::for_controller(&subsystem, 0, &limits, &directory, other.association());
    let reserve = |sqe: Sqe, data: &[u8]| {
        let plan = io::plan(&Sqe { nsid: 1, flags: 0, ..sqe }, &table).unwrap();
        table.execute_reservation(&plan, data)
    };
    let enter = register(RegisterAction::Register, false).to_sqe();
    assert!(matches!(reserve(enter, &encode_keys(0, 9)), ReservationOutcome::Done(Status::SUCCESS)));
    let ReservationOutcome::Report(bytes) =
        reserve(ReservationReport { extended: false, length_bytes: 48 }.to_sqe(), &[])
    else {
        panic!("no report")
    };
    let report = ReservationStatus::decode(&bytes, false).unwrap();
    assert_eq!((report.registrants[0].key, &report.registrants[0].host_id[..8]), (9, &[5; 8][..]));
    let ReservationOutcome::Done(status) =
        reserve(ReservationReport { extended: true, length_bytes: 128 }.to_sqe(), &[])
    else {
        panic!("a report")
    };
    assert_eq!(status, Status::HOST_ID_INCONSISTENT.do_not_retry());
}
