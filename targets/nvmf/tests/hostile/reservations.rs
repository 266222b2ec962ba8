//! Hosts that share a namespace, of which one has reserved it.

use std::time::{Duration, Instant};

use nvmf::{NamespaceConfig, TargetError};
use ring::Status;
use wire_nvme::admin::GetLogPage;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::log::{LogId, NotificationType, ReservationNotification};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction, Report,
    Reservation, ReservationType, encode_keys,
};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{Peer, Said, pattern, write};
use crate::rig::{NQN, Parts, Rig};

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const A: [u8; 16] = [0xa; 16];
const B: [u8; 16] = [0xb; 16];

/// A host with an admin queue and an I/O queue, which are on different cores where there are two.
struct Host {
    admin: Peer,
    io: Peer,
}

impl Host {
    fn new(rig: &Rig, id: [u8; 16]) -> Host {
        let admin = Peer::admin_as(rig, id);
        let io = Peer::io_as(rig, &admin, 1, 32, false, id);
        Host { admin, io }
    }

    /// A reservation command whose keys come with it.
    fn reserve(&mut self, sqe: Sqe, data: &[u8]) -> Status {
        self.io.command(in_capsule(sqe, data), data).status
    }

    fn register(&mut self, key: u64, persist: PersistChange) -> Status {
        let register = Register { action: RegisterAction::Register, ignore_key: false, persist };
        self.reserve(register.to_sqe(), &encode_keys(0, key))
    }

    fn acquire(&mut self, action: AcquireAction, kind: ReservationType, key: u64, victim: u64) -> Status {
        let acquire = Acquire { action, ignore_key: false, kind };
        self.reserve(acquire.to_sqe(), &encode_keys(key, victim))
    }

    fn release(&mut self, action: ReleaseAction, kind: ReservationType, key: u64) -> Status {
        let release = Release { action, ignore_key: false, kind };
        self.reserve(release.to_sqe(), &key.to_le_bytes())
    }

    fn report(&mut self) -> Reservation {
        let sqe = Report { extended: true, length_bytes: 512 }.to_sqe();
        self.io.capsule(Sqe { nsid: 1, cid: 9, data: DataPointer::transport(512), ..sqe }, &[]);
        let Said::Data(_, data) = self.io.hear() else { panic!("no report") };
        assert_eq!(self.io.hear_response().status, Status::SUCCESS);
        Reservation::decode(&data, true).unwrap()
    }

    /// Waits for the notification that was asked for, and reads it.
    fn told(&mut self) -> ReservationNotification {
        let event = self.admin.hear_response();
        assert_eq!(AsyncEvent::from_result(event.result), Some(AsyncEvent::RESERVATION_LOG));
        let log = GetLogPage {
            lid: LogId::ReservationNotification.to_wire(),
            length_bytes: 64,
            ..Default::default()
        };
        self.admin.capsule(Sqe { cid: 11, data: DataPointer::transport(64), ..log.to_sqe(0) }, &[]);
        let Said::Data(_, data) = self.admin.hear() else { panic!("no page") };
        assert_eq!(self.admin.hear_response().status, Status::SUCCESS);
        ReservationNotification::decode(data.as_slice().try_into().unwrap()).unwrap()
    }

    fn listen(&mut self) {
        let event = Sqe::new(AdminOpcode::AsyncEventRequest.to_wire());
        self.admin.capsule(Sqe { cid: 10, data: DataPointer::transport(0), ..event }, &[]);
    }
}

fn in_capsule(sqe: Sqe, data: &[u8]) -> Sqe {
    Sqe { nsid: 1, cid: 9, data: DataPointer::capsule(0, data.len() as u32), ..sqe }
}

fn two(rig: &Rig) -> (Host, Host) {
    (Host::new(rig, A), Host::new(rig, B))
}

#[test]
fn a_reservation_holds_on_every_core_when_its_command_is_answered() {
    use ReservationType::*;
    let rig = Rig::new(Parts::default());
    let (mut one, mut other) = two(&rig);
    other.listen();
    let data = pattern(4096, 1);
    assert_eq!(one.register(1, PersistChange::None), Status::SUCCESS);
    // Over and over: what was answered on one core is so on the other, without a moment's delay.
    for round in 0..200 {
        assert_eq!(one.acquire(AcquireAction::Acquire, ExclusiveAccess, 1, 0), Status::SUCCESS);
        assert_eq!(other.io.write(1, 0, &data), CONFLICT, "round {round}");
        assert_eq!(other.io.read_back(1, 0, 512), Err(CONFLICT));
        assert_eq!(one.io.write(1, 0, &data), Status::SUCCESS);
        assert_eq!(one.release(ReleaseAction::Release, ExclusiveAccess, 1), Status::SUCCESS);
        assert_eq!(other.io.write(1, 8, &data), Status::SUCCESS);
    }
    // Readers read where writing is exclusive; registrants write where it is theirs.
    assert_eq!(one.acquire(AcquireAction::Acquire, WriteExclusiveRegistrants, 1, 0), Status::SUCCESS);
    assert_eq!(other.io.read_back(1, 0, 4096), Ok(data.clone()));
    assert_eq!(other.io.write(1, 0, &data), CONFLICT);
    assert_eq!(other.register(2, PersistChange::None), Status::SUCCESS);
    assert_eq!(other.io.write(1, 0, &data), Status::SUCCESS);
    let report = other.report();
    assert_eq!(
        (report.kind, report.generation, report.persistent),
        (Some(WriteExclusiveRegistrants), 2, false)
    );
    let listed: Vec<_> =
        report.registrants.iter().map(|one| (one.cntlid, one.host_id, one.key, one.holder)).collect();
    assert_eq!(listed, [(one.admin.cntlid, A, 1, true), (other.admin.cntlid, B, 2, false)]);
    // What is released is told to the other registrant, wherever its admin queue lives.
    assert_eq!(one.release(ReleaseAction::Release, WriteExclusiveRegistrants, 1), Status::SUCCESS);
    let told = other.told();
    let expected = ReservationNotification {
        count: 1,
        kind: NotificationType::ReservationReleased,
        available: 0,
        nsid: 1,
    };
    assert_eq!(told, expected);
    other.listen();
    assert_eq!(one.acquire(AcquireAction::Preempt, WriteExclusive, 1, 2), Status::SUCCESS);
    assert_eq!(other.told().kind, NotificationType::RegistrationPreempted);
    assert_eq!(other.release(ReleaseAction::Clear, WriteExclusive, 2), CONFLICT, "no longer registered");
    // Without persistence nothing can be asked to persist.
    assert_eq!(one.register(1, PersistChange::Persistent), Status::INVALID_FIELD.do_not_retry());
}

#[test]
fn data_that_comes_after_the_reservation_is_not_written() {
    let rig = Rig::new(Parts::default());
    let (mut one, mut other) = two(&rig);
    assert_eq!(one.io.write(1, 0, &pattern(4096, 1)), Status::SUCCESS);
    // The other's write was taken, and its data asked for, before.
    other.io.capsule(write(1, 0, 4096), &[]);
    let r2t = other.io.hear_r2t();
    assert_eq!(one.register(1, PersistChange::None), Status::SUCCESS);
    let kind = ReservationType::WriteExclusive;
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::SUCCESS);
    other.io.data(&r2t, 0, &pattern(4096, 2), true);
    assert_eq!(other.io.hear_response().status, CONFLICT);
    assert_eq!(one.io.read_back(1, 0, 4096), Ok(pattern(4096, 1)));
}

#[test]
fn preempt_and_abort_is_answered_after_what_the_other_had_under_way() {
    let latency = Duration::from_millis(400);
    let rig = Rig::new(Parts { latency_us: latency.as_micros() as u64, ..Parts::default() });
    let (mut one, mut other) = two(&rig);
    for (host, key) in [(&mut one, 1), (&mut other, 2)] {
        assert_eq!(host.register(key, PersistChange::None), Status::SUCCESS);
    }
    let kind = ReservationType::WriteExclusiveAll;
    assert_eq!(other.acquire(AcquireAction::Acquire, kind, 2, 0), Status::SUCCESS);
    // Preempting alone does not wait.
    let sqe = crate::peer::write_in_capsule(1, 0, 4096);
    let start = Instant::now();
    other.io.capsule(sqe, &pattern(4096, 2));
    // A second command that is read only when the first is with the device.
    other.io.capsule(Sqe { cid: 8, ..crate::peer::read(2, 0, 512) }, &[]);
    assert_eq!(other.io.hear_response().cid, 8);
    let kind = ReservationType::ExclusiveAccess;
    assert_eq!(one.acquire(AcquireAction::PreemptAndAbort, kind, 1, 2), Status::SUCCESS);
    assert!(start.elapsed() >= latency, "{:?}", start.elapsed());
    assert_eq!(other.io.hear_response().status, Status::SUCCESS);
    // And from then on nothing of it comes any more.
    assert_eq!(other.io.write(1, 0, &pattern(4096, 3)), CONFLICT);
    let start = Instant::now();
    assert_eq!(other.register(3, PersistChange::None), Status::SUCCESS);
    assert_eq!(one.acquire(AcquireAction::PreemptAndAbort, kind, 1, 3), Status::SUCCESS);
    assert!(start.elapsed() < latency, "there was nothing to wait for");
    assert_eq!(one.io.read_back(1, 0, 4096), Ok(pattern(4096, 2)));
}

#[test]
fn a_queue_that_waits_for_its_own_answer_can_be_closed() {
    let rig = Rig::new(Parts { latency_us: 300_000, ..Parts::default() });
    let (mut one, mut other) = two(&rig);
    for (host, key) in [(&mut one, 1), (&mut other, 2)] {
        assert_eq!(host.register(key, PersistChange::None), Status::SUCCESS);
    }
    other.listen();
    other.io.capsule(crate::peer::write_in_capsule(1, 0, 4096), &pattern(4096, 2));
    let acquire = Acquire {
        action: AcquireAction::PreemptAndAbort,
        ignore_key: false,
        kind: ReservationType::WriteExclusive,
    };
    one.io.capsule(in_capsule(acquire.to_sqe(), &[0; 16]), &encode_keys(1, 2));
    // It is done, and waits.
    assert_eq!(other.told().kind, NotificationType::RegistrationPreempted);
    drop(one);
    assert_eq!(other.io.hear_response().status, Status::SUCCESS);
    let mut one = Host::new(&rig, A);
    assert_eq!(one.report().registrants.len(), 1);
    one.io.round_trip(3);
}

/// A file for reservations that does not exist yet.
fn file(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

fn keep(rig: &Rig, path: &std::path::Path) -> Result<u32, TargetError> {
    let ptpl_file = Some(path.to_str().unwrap().to_owned());
    rig.target.add_namespace(NQN, NamespaceConfig { ptpl_file, ..NamespaceConfig::new("Malloc1") })
}

#[test]
fn what_was_answered_survives_and_what_is_no_reservation_is_refused() {
    let path = file("ptpl");
    let rig = Rig::new(Parts::default());
    let again = |rig: &Rig| {
        rig.target.remove_namespace(NQN, 1).unwrap();
        keep(rig, &path)
    };
    assert_eq!(again(&rig).unwrap(), 1);
    let (mut one, mut other) = two(&rig);
    assert_eq!(one.register(1, PersistChange::Persistent), Status::SUCCESS);
    let kind = ReservationType::WriteExclusive;
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::SUCCESS);
    // A namespace that comes back finds what was answered.
    assert_eq!(again(&rig).unwrap(), 1);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), CONFLICT);
    let report = other.report();
    assert_eq!((report.kind, report.persistent, report.registrants[0].key), (Some(kind), true, 1));
    // What is no longer to survive does not.
    let register =
        Register { action: RegisterAction::Replace, ignore_key: true, persist: PersistChange::Volatile };
    assert_eq!(one.reserve(register.to_sqe(), &encode_keys(0, 2)), Status::SUCCESS);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), CONFLICT);
    assert_eq!(again(&rig).unwrap(), 1);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), Status::SUCCESS);
    rig.target.remove_namespace(NQN, 1).unwrap();
    for content in ["", "{\"ptpl\":true,\"rtype\":1", "not ours", "{}"] {
        std::fs::write(&path, content).unwrap();
        let error = keep(&rig, &path).unwrap_err();
        assert!(matches!(error, TargetError::Ptpl(_)), "{error}");
        assert!(error.to_string().starts_with("ptpl_file /"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content, "it is left as it was");
    }
    std::fs::remove_file(&path).unwrap();
    let error = keep(&rig, std::path::Path::new("/nonexistent/ptpl")).unwrap_err();
    assert!(matches!(error, TargetError::Ptpl(_)), "{error}");
    // The device was given back each time.
    assert_eq!(keep(&rig, &path).unwrap(), 1);
    std::fs::remove_file(&path).unwrap();
}
