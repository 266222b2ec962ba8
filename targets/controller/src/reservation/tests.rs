use std::collections::BTreeMap;

use proptest::prelude::*;
use wire_nvme::fabrics::CNTLID_DYNAMIC;
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationType, encode_keys,
};
use wire_nvme::{DataPointer, NSID_ALL};

use super::*;
use crate::harness::{connect_data, connect_sqe, subnqn, subsystem};
use crate::{ConnectOk, Kind, Limits, NamespaceTable, Place, Port, Subsystem, connect, io};

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const A: HostId = [1; 16];
const B: HostId = [2; 16];
const C: HostId = [3; 16];

fn register(action: RegisterAction, ignore_key: bool) -> Register {
    Register { action, ignore_key, persist: PersistChange::None }
}

fn acquire(action: AcquireAction, kind: ReservationType) -> Acquire {
    Acquire { action, ignore_key: false, kind }
}

fn release(action: ReleaseAction, kind: ReservationType) -> Release {
    Release { action, ignore_key: false, kind }
}

fn enter(key: u64) -> Command {
    Command::Register(register(RegisterAction::Register, false), 0, key)
}

fn take(kind: ReservationType, key: u64) -> Command {
    Command::Acquire(acquire(AcquireAction::Acquire, kind), key, 0)
}

fn preempt(kind: ReservationType, key: u64, victim: u64) -> Command {
    Command::Acquire(acquire(AcquireAction::Preempt, kind), key, victim)
}

/// A, B and C are registered with keys 0xa, 0xb and 0xc.
fn three() -> State {
    let mut state = State::default();
    for (host, key) in [(A, 0xa), (B, 0xb), (C, 0xc)] {
        state.apply(host, &enter(key), false).unwrap();
    }
    state
}

/// Base 2.0, section 8.19, Command Behavior in the Presence of a Reservation: for each type the rows are read and
/// write, the columns other hosts, registrants, and holders; `A` is allowed and `C` a conflict.
const MATRIX: [(ReservationType, [&str; 2]); 6] = [
    (ReservationType::WriteExclusive, ["AAA", "CCA"]),
    (ReservationType::ExclusiveAccess, ["CCA", "CCA"]),
    (ReservationType::WriteExclusiveRegistrants, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessRegistrants, ["CAA", "CAA"]),
    (ReservationType::WriteExclusiveAll, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessAll, ["CAA", "CAA"]),
];

/// A controller's view of the subsystem, as a host of its own.
struct Member {
    admin: crate::AdminConnect,
    table: NamespaceTable,
}

fn member(directory: &Arc<Directory>, subsystem: &Arc<Subsystem>, host: HostId) -> Member {
    let limits = Limits::default();
    let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
    data[..16].copy_from_slice(&host);
    let place = Place { directory, limits: &limits, port: Port::default() };
    let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
    let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
    let table = NamespaceTable::of(subsystem, 0, &limits, directory, &admin.membership.association);
    Member { admin, table }
}

impl Member {
    /// A reservation command with its data, on namespace 1.
    fn reserve(&self, sqe: Sqe, data: &[u8]) -> Outcome {
        let length = if data.is_empty() { Report::of(&sqe).length_bytes as usize } else { data.len() };
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(length as u32), ..sqe };
        let plan = io::plan(&sqe, &self.table).unwrap();
        assert_eq!(plan.op, io::Op::Reservation);
        self.table.reserve(&plan, data)
    }

    fn done(&self, sqe: Sqe, data: &[u8]) -> Status {
        match self.reserve(sqe, data) {
            Outcome::Done(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn enter(&self, key: u64) {
        let sqe = register(RegisterAction::Register, false).to_sqe();
        assert_eq!(self.done(sqe, &encode_keys(0, key)), Status::SUCCESS);
    }
}

/// Every command class of the specification's table, as commands of hosts, for every type and every host.
#[test]
fn commands_conflict_as_the_specification_says() {
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
    let zeroes =
        WriteZeroes { lba: 0, blocks: 1, fua: false, deallocate: false, prinfo: wire_nvme::io::Prinfo(0) };
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
                ("advice", dsm(false)),
            ],
        ),
    ];
    for (kind, rows) in MATRIX {
        let (directory, subsystem) = (Arc::new(Directory::new()), Arc::new(subsystem()));
        let [other, registrant, holder] = [C, B, A].map(|host| member(&directory, &subsystem, host));
        registrant.enter(0xb);
        holder.enter(0xa);
        let sqe = acquire(AcquireAction::Acquire, kind).to_sqe();
        assert_eq!(holder.done(sqe, &encode_keys(0xa, 0)), Status::SUCCESS);
        for (row, commands) in classes {
            for (member, expected) in [&other, &registrant, &holder].into_iter().zip(rows[row].bytes()) {
                for (name, sqe) in commands {
                    let sqe = Sqe { nsid: if sqe.nsid == 0 { 1 } else { sqe.nsid }, ..*sqe };
                    let answer = io::plan(&sqe, &member.table).map(|_| ());
                    let expected = if expected == b'A' { Ok(()) } else { Err(CONFLICT) };
                    assert_eq!(
                        answer, expected,
                        "{kind:?}: {name} of {:?}",
                        member.admin.membership.association
                    );
                    // The other namespace is nobody's.
                    if sqe.nsid == 1 && *name != "deallocate" {
                        let data =
                            if sqe.data.length() == 512 { DataPointer::transport(4096) } else { sqe.data };
                        assert!(io::plan(&Sqe { nsid: 3, data, ..sqe }, &member.table).is_ok(), "{name}");
                    }
                }
            }
        }
        // Register and Report are for everyone; Acquire and Release are for registrants.
        other.enter(0xc);
        let sqe = release(ReleaseAction::Release, kind).to_sqe();
        let stranger = member(&directory, &subsystem, [9; 16]);
        assert_eq!(stranger.done(sqe, &0xau64.to_le_bytes()), CONFLICT);
        assert_eq!(
            stranger.done(acquire(AcquireAction::Preempt, kind).to_sqe(), &encode_keys(0, 0xa)),
            CONFLICT
        );
        assert_eq!(holder.done(sqe, &0xau64.to_le_bytes()), Status::SUCCESS);
        assert!(io::plan(&Sqe { nsid: 1, ..rw(Write) }, &stranger.table).is_ok(), "nothing is reserved");
    }
}

#[test]
fn a_plan_that_waits_is_overtaken_by_a_reservation() {
    let (directory, subsystem) = (Arc::new(Directory::new()), Arc::new(subsystem()));
    let [one, other] = [A, B].map(|host| member(&directory, &subsystem, host));
    let write = wire_nvme::io::ReadWrite { blocks: 1, ..Default::default() }.to_sqe(NvmOpcode::Write);
    let write = Sqe { nsid: 1, data: DataPointer::transport(512), ..write };
    let plan = io::plan(&write, &other.table).unwrap();
    one.enter(7);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(one.done(sqe, &encode_keys(7, 0)), Status::SUCCESS);
    assert_eq!(other.table.admit(&plan), Err(CONFLICT));
    assert_eq!(one.table.admit(&plan), Ok(()));
}

#[test]
fn keys_are_registered_replaced_and_given_back() {
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
            let mut state = three();
            let command = Command::Register(register(action, ignore), current, new);
            let answer = state.apply(host, &command, false);
            let found = answer.map(|_| state.key_of(&host).unwrap_or(0));
            assert_eq!(found, expected, "{command:?} of {host:?}");
            if expected.is_err() {
                assert_eq!(state, three(), "nothing changes");
            } else {
                assert_eq!(state.generation, three().generation + 1);
            }
        }
    }
}

#[test]
fn persistence_needs_somewhere_to_keep() {
    let with = |persist| Register { persist, ..register(RegisterAction::Register, false) };
    let mut state = State::default();
    let persistent = Command::Register(with(PersistChange::Persistent), 0, 1);
    assert_eq!(state.apply(A, &persistent, false), Err(INVALID_FIELD));
    assert_eq!(state, State::default());
    state.apply(A, &persistent, true).unwrap();
    assert!(state.persistent);
    state.apply(A, &Command::Register(with(PersistChange::None), 0, 1), true).unwrap();
    assert!(state.persistent);
    state.apply(A, &Command::Register(with(PersistChange::Volatile), 0, 1), true).unwrap();
    assert!(!state.persistent);
}

#[test]
fn what_preempting_does_depends_on_type_and_key() {
    use ReservationType::*;
    let told = |preempted: &[HostId], released: &[HostId]| {
        Ok(Effects { preempted: preempted.to_vec(), released: released.to_vec(), ..Effects::default() })
    };
    // Held by A; B preempts for a new type. The answer, who is left, and who holds what.
    let rows = [
        (None, 0xa, WriteExclusive, told(&[A], &[]), vec![B, C], None),
        (None, 5, WriteExclusive, Err(CONFLICT), vec![A, B, C], None),
        (Some(WriteExclusive), 0xa, WriteExclusive, told(&[A], &[]), vec![B, C], Some((WriteExclusive, B))),
        (
            Some(WriteExclusive),
            0xa,
            ExclusiveAccess,
            told(&[A], &[C]),
            vec![B, C],
            Some((ExclusiveAccess, B)),
        ),
        (Some(ExclusiveAccess), 0xc, WriteExclusive, told(&[C], &[]), vec![A, B], Some((ExclusiveAccess, A))),
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
            told(&[A], &[]),
            vec![B, C],
            Some((WriteExclusiveRegistrants, B)),
        ),
        (Some(WriteExclusiveAll), 0, WriteExclusive, told(&[A, C], &[]), vec![B], Some((WriteExclusive, B))),
        (
            Some(WriteExclusiveAll),
            0xa,
            WriteExclusive,
            told(&[A], &[]),
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
    for (held, victim, kind, expected, left, then) in rows {
        let mut state = three();
        if let Some(held) = held {
            state.apply(A, &take(held, 0xa), false).unwrap();
        }
        let generation = state.generation;
        let name = format!("{held:?}, {victim:#x} for {kind:?}");
        assert_eq!(state.apply(B, &preempt(kind, 0xb, victim), false), expected, "{name}");
        assert_eq!(state.registrations.iter().map(|one| one.host).collect::<Vec<_>>(), left, "{name}");
        assert_eq!(state.held.map(|held| (held.kind, held.holder)), then, "{name}");
        assert_eq!(state.generation, generation + u32::from(expected.is_ok()), "{name}");
    }
    // A holder changes the type by preempting itself.
    let mut state = three();
    state.apply(A, &take(WriteExclusive, 0xa), false).unwrap();
    assert_eq!(state.apply(A, &preempt(ExclusiveAccess, 0xa, 0xa), false), told(&[], &[B, C]));
    assert_eq!(state.held, Some(Held { kind: ExclusiveAccess, holder: A }));
    // Aborting is preempting, and waiting for what the others have under way.
    let abort = Command::Acquire(acquire(AcquireAction::PreemptAndAbort, ExclusiveAccess), 0xb, 0xa);
    let effects = state.apply(B, &abort, false).unwrap();
    assert_eq!((effects.preempted, effects.abort), (vec![A], vec![A]));
}

#[test]
fn what_is_released_is_told_to_those_whom_it_concerns() {
    use ReservationType::*;
    for kind in ReservationType::ALL.iter().copied() {
        let told = if matches!(kind, WriteExclusive | ExclusiveAccess) { vec![] } else { vec![B, C] };
        let held = || {
            let mut state = three();
            state.apply(A, &take(kind, 0xa), false).unwrap();
            state
        };
        let free = |action, kind| Command::Release(release(action, kind), 0xa);
        let mut state = held();
        assert_eq!(state.apply(A, &free(ReleaseAction::Release, kind), false).unwrap().released, told);
        assert_eq!((state.held, state.generation), (None, 3));
        // Of another type it is a mistake; of another host nothing happens.
        let other = if kind == WriteExclusive { ExclusiveAccess } else { WriteExclusive };
        assert_eq!(held().apply(A, &free(ReleaseAction::Release, other), false), Err(INVALID_FIELD));
        let is_for_all = matches!(kind, WriteExclusiveAll | ExclusiveAccessAll);
        let mut state = held();
        state.apply(B, &Command::Release(release(ReleaseAction::Release, kind), 0xb), false).unwrap();
        assert_eq!(state.held.is_none(), is_for_all, "{kind:?}");
        // With its last holder a reservation goes.
        let mut state = held();
        let leave = |key| Command::Register(register(RegisterAction::Unregister, false), key, 0);
        let effects = state.apply(A, &leave(0xa), false).unwrap();
        assert_eq!(state.held.is_some(), is_for_all, "{kind:?}");
        assert_eq!(effects.released, if is_for_all { vec![] } else { told });
        state.apply(B, &leave(0xb), false).unwrap();
        state.apply(C, &leave(0xc), false).unwrap();
        assert_eq!((state.held, state.registrations.len()), (None, 0));
        // Clear is for every registrant.
        let mut state = held();
        let effects =
            state.apply(B, &Command::Release(release(ReleaseAction::Clear, kind), 0xb), false).unwrap();
        assert_eq!(effects, Effects { cleared: vec![A, C], ..Effects::default() });
        assert_eq!((state.held, state.registrations.len(), state.generation), (None, 0, 4));
        // Acquiring again is no change, and of another type or by another it is a conflict.
        let mut state = held();
        assert!(state.apply(A, &take(kind, 0xa), false).is_ok());
        assert_eq!(state.apply(A, &take(other, 0xa), false), Err(CONFLICT));
        assert_eq!(state.apply(B, &take(kind, 0xb), false).is_ok(), is_for_all);
        assert_eq!(state.apply(B, &take(kind, 0xa), false), Err(CONFLICT), "not its key");
        let ignored = Acquire { ignore_key: true, ..acquire(AcquireAction::Acquire, kind) };
        assert_eq!(state.apply(A, &Command::Acquire(ignored, 0xa, 0), false), Err(INVALID_FIELD));
    }
}

/// A model that keeps, for every host, its key and whether it holds: no lists, no notion of an oldest.
#[derive(Clone, Debug, Default)]
struct Model {
    keys: BTreeMap<u8, u64>,
    kind: Option<ReservationType>,
    holders: Vec<u8>,
}

impl Model {
    fn everyone_holds(&self) -> bool {
        matches!(self.kind, Some(ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll))
    }

    fn settle(&mut self) {
        if self.everyone_holds() {
            self.holders = self.keys.keys().copied().collect();
        }
        self.holders.retain(|host| self.keys.contains_key(host));
        if self.holders.is_empty() {
            self.kind = None;
        }
    }

    fn drop_key(&mut self, key: u64, but: Option<u8>) {
        self.keys.retain(|host, of| *of != key || Some(*host) == but);
    }

    /// Whether it is done.
    fn apply(&mut self, host: u8, command: &Command) -> bool {
        let own = self.keys.get(&host).copied();
        let done = match *command {
            Command::Register(view, current, new) => match (view.action, own) {
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
            Command::Acquire(_, current, _) | Command::Release(_, current) if own != Some(current) => false,
            Command::Acquire(view, _, victim) if view.action != AcquireAction::Acquire => {
                let holds_victim = self.holders.iter().any(|holder| self.keys[holder] == victim);
                let takes_over =
                    if self.everyone_holds() { victim == 0 } else { self.kind.is_some() && holds_victim };
                if takes_over {
                    if victim == 0 {
                        self.keys.retain(|one, _| *one == host);
                    }
                    self.drop_key(victim, Some(host));
                    (self.kind, self.holders) = (Some(view.kind), vec![host]);
                    true
                } else {
                    let any = self.keys.values().any(|key| *key == victim);
                    self.drop_key(victim, None);
                    any
                }
            }
            Command::Acquire(view, ..) => match self.kind {
                None => {
                    (self.kind, self.holders) = (Some(view.kind), vec![host]);
                    true
                }
                Some(kind) => kind == view.kind && self.holders.contains(&host),
            },
            Command::Release(view, _) if view.action == ReleaseAction::Clear => {
                *self = Model::default();
                true
            }
            Command::Release(view, _) => match self.kind {
                Some(kind) if kind != view.kind => false,
                _ => {
                    if self.holders.contains(&host) {
                        (self.kind, self.holders) = (None, Vec::new());
                    }
                    true
                }
            },
        };
        self.settle();
        done
    }

    /// Whether a host may read and write.
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

fn any_command() -> impl Strategy<Value = Command> {
    let key = || 0..4u64;
    let kind = || prop::sample::select(ReservationType::ALL);
    let registers = (prop::sample::select(RegisterAction::ALL), any::<bool>(), key(), key());
    prop_oneof![
        3 => registers.prop_map(|(action, ignore, current, new)| {
            Command::Register(register(action, ignore), current, new)
        }),
        4 => (prop::sample::select(AcquireAction::ALL), kind(), key(), key()).prop_map(
            |(action, kind, current, victim)| Command::Acquire(acquire(action, kind), current, victim)
        ),
        2 => (prop::sample::select(ReleaseAction::ALL), kind(), key())
            .prop_map(|(action, kind, current)| Command::Release(release(action, kind), current)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_commands_come_to_what_the_model_says(
        commands in prop::collection::vec((1..5u8, any_command()), 0..60),
    ) {
        let (mut state, mut model) = (State::default(), Model::default());
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
            prop_assert!(state.is_sound());
            prop_assert_eq!(state.held.map(|held| held.kind), model.kind);
            for host in 1..6u8 {
                prop_assert_eq!(state.key_of(&[host; 16]), model.keys.get(&host).copied());
                prop_assert_eq!(state.is_holder(&[host; 16]), model.holders.contains(&host));
                let denied = state.denied(&[host; 16]);
                prop_assert_eq!((denied & access::READ == 0, denied & access::WRITE == 0), model.may(host));
            }
            // Who is told was there, is told once, and is not who did it.
            if let Ok(Effects { preempted, released, cleared, abort }) = answer {
                for told in [&preempted, &released, &cleared, &abort] {
                    prop_assert!(told.iter().all(|told| *told != [host; 16] && before.key_of(told).is_some()));
                }
                prop_assert!(released.iter().all(|told| state.key_of(told).is_some()));
                prop_assert!(preempted.iter().chain(&cleared).all(|told| state.key_of(told).is_none()));
            }
        }
    }
}

#[test]
fn reports_name_every_controller_of_a_registered_host() {
    let (directory, subsystem) = (Arc::new(Directory::new()), Arc::new(subsystem()));
    let members = [A, A, B].map(|host| member(&directory, &subsystem, host));
    let [first, second, other] = &members;
    first.enter(0xa);
    other.enter(0xb);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::ExclusiveAccess).to_sqe();
    assert_eq!(second.done(sqe, &encode_keys(0xa, 0)), Status::SUCCESS, "hosts reserve, not controllers");
    let report = Report { extended: true, length_bytes: 4096 }.to_sqe();
    let Outcome::Report(bytes) = other.reserve(report, &[]) else { panic!("no report") };
    assert_eq!(bytes.len(), 4096);
    let report = Reservation::decode(&bytes, true).unwrap();
    let entry = |member: &Member, host_id, key, holder| Registrant {
        cntlid: member.admin.membership.association.cntlid(),
        holder,
        host_id,
        key,
    };
    let expected = vec![entry(first, A, 0xa, true), entry(second, A, 0xa, true), entry(other, B, 0xb, false)];
    let expected = Reservation {
        generation: 2,
        kind: Some(ReservationType::ExclusiveAccess),
        persistent: false,
        registrants: expected,
    };
    assert_eq!(report, expected);
    // Identifiers are long over fabrics.
    let short = Report { extended: false, length_bytes: 64 }.to_sqe();
    assert_eq!(other.done(short, &[]), Status::HOST_ID_INCONSISTENT.do_not_retry());
    // A host without a controller is still registered.
    let [first, second, other] = members;
    drop((first, second));
    let report = Report { extended: true, length_bytes: 128 }.to_sqe();
    let Outcome::Report(bytes) = other.reserve(report, &[]) else { panic!("no report") };
    let report = Reservation::decode(&bytes, true).unwrap();
    assert_eq!(report.registrants[0], Registrant { cntlid: 0xffff, holder: true, host_id: A, key: 0xa });
}

/// Keeps what it is given until the test lets it go.
#[derive(Debug, Default)]
struct Slow(Arc<Mutex<Vec<(State, Ticket)>>>);

impl Keeper for Slow {
    fn keep(&self, state: &State, ticket: Ticket) {
        self.0.lock().unwrap().push((state.clone(), ticket));
    }
}

#[test]
fn a_command_is_answered_when_its_change_is_kept_and_drained() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let mut subsystem = subsystem();
    let reservations = Reservations::kept(State::default(), Box::new(Slow(kept.clone())));
    assert_eq!(reservations.capabilities(), 0xff);
    subsystem.namespaces[0].reservations = Arc::new(reservations);
    let (directory, subsystem) = (Arc::new(Directory::new()), Arc::new(subsystem));
    let rings = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = rings.clone();
    let bell = directory.bell(Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let [one, other] = [A, B].map(|host| member(&directory, &subsystem, host));
    let persist =
        Register { persist: PersistChange::Persistent, ..register(RegisterAction::Register, false) };
    let Outcome::Pending(pending) = one.reserve(persist.to_sqe(), &encode_keys(0, 0xa)) else { panic!() };
    assert_eq!((pending.outcome(), rings.load(Ordering::Relaxed)), (None, 0));
    let (state, ticket) = kept.lock().unwrap().pop().unwrap();
    assert!(state.persistent && state.key_of(&A) == Some(0xa));
    drop(ticket);
    assert_eq!((pending.outcome(), rings.load(Ordering::Relaxed)), (Some(Status::SUCCESS), 1));
    assert!(bell.take().is_some_and(|drains| drains.is_empty()) && bell.take().is_none());
    // What cannot be kept fails.
    let Outcome::Pending(pending) = other.reserve(persist.to_sqe(), &encode_keys(0, 0xb)) else { panic!() };
    kept.lock().unwrap().pop().unwrap().1.fail();
    assert_eq!(pending.outcome(), Some(Status::INTERNAL_ERROR));
    // Preempt and Abort waits for the medium and for what others have under way.
    let abort = acquire(AcquireAction::PreemptAndAbort, ReservationType::WriteExclusive).to_sqe();
    let Outcome::Pending(pending) = other.reserve(abort, &encode_keys(0xb, 0xa)) else { panic!() };
    let mut drains = bell.take().unwrap();
    let drain = drains.pop().unwrap();
    assert_eq!((&drain.hosts[..], drains.len()), (&[A][..], 0));
    kept.lock().unwrap().clear();
    assert_eq!(pending.outcome(), None);
    drop(drain);
    assert_eq!(pending.outcome(), Some(Status::SUCCESS));
    let told = one.admin.membership.association.take_notices().0;
    assert_eq!(Vec::from(told), [(1, NotificationType::RegistrationPreempted)]);
}

#[test]
fn hosts_are_told_once_read_in_order_and_may_not_want_to_know() {
    use wire_nvme::admin::{GetFeatures, GetLogPage, SetFeatures};
    use wire_nvme::aer::AsyncEvent;
    use wire_nvme::feature::{FeatureId, reservation_mask};
    use wire_nvme::log::{LogId, ReservationNotification};
    use wire_nvme::opcode::AdminOpcode;
    let mut harness = crate::Harness::enabled(Kind::Nvm);
    let subsystem = harness.controller.subsystem().clone();
    let other = member(&harness.directory, &subsystem, B);
    // The harness's host registers as its identifier says.
    let own = member(&harness.directory, &subsystem, harness.controller.association().host_id());
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
    let round = |harness: &mut crate::Harness| {
        own.enter(5);
        other.enter(6);
        let clear = release(ReleaseAction::Clear, ReservationType::WriteExclusive).to_sqe();
        assert_eq!(other.done(clear, &6u64.to_le_bytes()), Status::SUCCESS);
        harness.deliver(crate::Event::Bell)
    };
    let told = round(&mut harness);
    assert_eq!(told.len(), 1);
    assert_eq!(AsyncEvent::from_result(told[0].cqe.result), Some(AsyncEvent::RESERVATION_LOG));
    assert_eq!(round(&mut harness), [], "not again before it is read");
    let cleared = |count, available| ReservationNotification {
        count,
        kind: NotificationType::ReservationPreempted,
        available,
        nsid: 1,
    };
    assert_eq!(page(&mut harness, true), cleared(1, 1));
    assert_eq!(harness.waiting.len(), 1);
    assert_eq!(page(&mut harness, false), cleared(1, 1));
    assert_eq!(harness.waiting.len(), 0, "there is more to read");
    assert_eq!(page(&mut harness, false), cleared(2, 0));
    assert_eq!(page(&mut harness, false), ReservationNotification::EMPTY);
    // What the host does not want to know of is not even logged.
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
    assert_eq!(round(&mut harness), []);
    assert_eq!(page(&mut harness, false), ReservationNotification::EMPTY);
    // Nothing can be kept here.
    let fid = FeatureId::ReservationPersistence.to_wire();
    let set = SetFeatures { fid, cdw11: 1, ..Default::default() };
    assert_eq!(run(&mut harness, set.to_sqe(1)).status, INVALID_FIELD);
    assert_eq!(run(&mut harness, set.to_sqe(NSID_ALL)).status, Status::SUCCESS);
    let get = GetFeatures { fid, select: 0, cdw11: 0, uuid_index: 0 };
    assert_eq!(run(&mut harness, get.to_sqe(1)).result, 0);
}

/// Without Connect it is the Host Identifier feature that says who a host is: once, and in one length.
#[test]
fn a_host_with_queues_in_memory_says_who_it_is() {
    use wire_nvme::admin::{GetFeatures, SetFeatures};
    use wire_nvme::feature::{FeatureId, HOST_ID_EXTENDED};
    let directory = Arc::new(Directory::new());
    let limits = Arc::new(Limits { memory_based: true, interrupt_vectors: 2, ..Limits::default() });
    let subsystem = Arc::new(subsystem());
    let plug = |made_up: u8| {
        let mut data = connect_data(subnqn(), CNTLID_DYNAMIC);
        data[..16].fill(made_up);
        let place = Place { directory: &directory, limits: &limits, port: Port::default() };
        let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
        let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
        let mut controller = crate::Controller::new(admin, limits.clone(), Arc::default(), 0);
        controller.configure(crate::harness::LINUX_CC, &mut Vec::new());
        controller
    };
    let run = |controller: &mut crate::Controller, sqe: Sqe, data: &[u8]| {
        let sqe = Sqe { flags: 0, ..sqe };
        assert_eq!(crate::data_from_host(&sqe) as usize, data.len());
        let mut actions = Vec::new();
        controller.handle(crate::Event::Command { sqe: &sqe, data }, 0, &mut actions);
        match actions.pop() {
            Some(crate::Action::Complete(completion)) => (completion.cqe.status, completion.data),
            other => panic!("{other:?}"),
        }
    };
    let fid = FeatureId::HostIdentifier.to_wire();
    let set = |cdw11| SetFeatures { fid, cdw11, ..Default::default() }.to_sqe(0);
    let get = |cdw11| GetFeatures { fid, select: 0, cdw11, uuid_index: 0 }.to_sqe(0);
    let (mut one, mut other) = (plug(0x11), plug(0x22));
    // Nothing was said: zeroes, in either length, and a host of its own all the same.
    assert_eq!(run(&mut one, get(HOST_ID_EXTENDED), &[]), (Status::SUCCESS, vec![0; 16]));
    assert_eq!(run(&mut one, get(0), &[]), (Status::SUCCESS, vec![0; 8]));
    assert_eq!(one.association().host_id(), [0x11; 16]);
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &A).0, Status::SUCCESS);
    assert_eq!(run(&mut one, get(HOST_ID_EXTENDED), &[]), (Status::SUCCESS, A.to_vec()));
    assert_eq!(run(&mut one, get(0), &[]).0, Status::HOST_ID_INCONSISTENT.do_not_retry());
    // The same again is no change; another one is out of sequence.
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &A).0, Status::SUCCESS);
    assert_eq!(run(&mut one, set(HOST_ID_EXTENDED), &B).0, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
    // Not both lengths in one subsystem.
    assert_eq!(run(&mut other, set(0), &[5; 8]).0, Status::HOST_ID_INCONSISTENT.do_not_retry());
    drop(one);
    assert_eq!(run(&mut other, set(0), &[5; 8]).0, Status::SUCCESS);
    // Reports are in the length of identifiers.
    let table = NamespaceTable::of(&subsystem, 0, &limits, &directory, other.association());
    let reserve = |sqe: Sqe, data: &[u8]| {
        let plan = io::plan(&Sqe { nsid: 1, flags: 0, ..sqe }, &table).unwrap();
        table.reserve(&plan, data)
    };
    let enter = register(RegisterAction::Register, false).to_sqe();
    assert!(matches!(reserve(enter, &encode_keys(0, 9)), Outcome::Done(Status::SUCCESS)));
    let Outcome::Report(bytes) = reserve(Report { extended: false, length_bytes: 48 }.to_sqe(), &[]) else {
        panic!("no report")
    };
    let report = Reservation::decode(&bytes, false).unwrap();
    assert_eq!((report.registrants[0].key, &report.registrants[0].host_id[..8]), (9, &[5; 8][..]));
    let Outcome::Done(status) = reserve(Report { extended: true, length_bytes: 128 }.to_sqe(), &[]) else {
        panic!("a report")
    };
    assert_eq!(status, Status::HOST_ID_INCONSISTENT.do_not_retry());
}
