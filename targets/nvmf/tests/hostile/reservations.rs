//! Reservations of a namespace that two hosts share.

use std::time::{Duration, Instant};

use block_io::Status;
use nvmf::{NamespaceConfig, NvmfTargetError};
use wire_nvme::admin::GetLogPage;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::log::{LogId, NotificationType, ReservationNotification};
use wire_nvme::opcode::AdminOpcode;
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationAcquire, ReservationRegister,
    ReservationRelease, ReservationReport, ReservationStatus, ReservationType, encode_keys,
};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{RawTcpHost, ReceivedPdu, pattern, write};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig};

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();
const A: [u8; 16] = [0xa; 16];
const B: [u8; 16] = [0xb; 16];

/// A host with an admin queue and an I/O queue, on different cores if there are two.
struct ReservationHost {
    admin: RawTcpHost,
    io: RawTcpHost,
}

impl ReservationHost {
    fn new(rig: &TcpTestTarget, id: [u8; 16]) -> ReservationHost {
        let admin = RawTcpHost::admin_as(rig, id);
        let io = RawTcpHost::io_as(rig, &admin, 1, 32, false, id);
        ReservationHost { admin, io }
    }

    /// A reservation command with its keys as in-capsule data.
    fn reserve(&mut self, sqe: Sqe, data: &[u8]) -> Status {
        self.io.command(in_capsule(sqe, data), data).status
    }

    fn register(&mut self, key: u64, persist: PersistChange) -> Status {
        let register = ReservationRegister { action: RegisterAction::Register, ignore_key: false, persist };
        self.reserve(register.to_sqe(), &encode_keys(0, key))
    }

    fn acquire(&mut self, action: AcquireAction, kind: ReservationType, key: u64, victim: u64) -> Status {
        let acquire = ReservationAcquire { action, ignore_key: false, kind };
        self.reserve(acquire.to_sqe(), &encode_keys(key, victim))
    }

    fn release(&mut self, action: ReleaseAction, kind: ReservationType, key: u64) -> Status {
        let release = ReservationRelease { action, ignore_key: false, kind };
        self.reserve(release.to_sqe(), &key.to_le_bytes())
    }

    fn report(&mut self) -> ReservationStatus {
        let sqe = ReservationReport { extended: true, length_bytes: 512 }.to_sqe();
        self.io.capsule(Sqe { nsid: 1, cid: 9, data: DataPointer::transport(512), ..sqe }, &[]);
        let ReceivedPdu::Data(_, data) = self.io.receive_pdu() else { panic!("no report") };
        assert_eq!(self.io.expect_response().status, Status::SUCCESS);
        ReservationStatus::decode(&data, true).unwrap()
    }

    /// Waits for the reservation event and reads the notification log page.
    fn notification(&mut self) -> ReservationNotification {
        let event = self.admin.expect_response();
        assert_eq!(AsyncEvent::from_result(event.result), Some(AsyncEvent::RESERVATION_LOG));
        let log = GetLogPage {
            lid: LogId::ReservationNotification.to_wire(),
            length_bytes: 64,
            ..Default::default()
        };
        self.admin.capsule(Sqe { cid: 11, data: DataPointer::transport(64), ..log.to_sqe(0) }, &[]);
        let ReceivedPdu::Data(_, data) = self.admin.receive_pdu() else { panic!("no page") };
        assert_eq!(self.admin.expect_response().status, Status::SUCCESS);
        ReservationNotification::decode(data.as_slice().try_into().unwrap()).unwrap()
    }

    fn request_event(&mut self) {
        let event = Sqe::new(AdminOpcode::AsyncEventRequest.to_wire());
        self.admin.capsule(Sqe { cid: 10, data: DataPointer::transport(0), ..event }, &[]);
    }
}

fn in_capsule(sqe: Sqe, data: &[u8]) -> Sqe {
    Sqe { nsid: 1, cid: 9, data: DataPointer::capsule(0, data.len() as u32), ..sqe }
}

fn two_hosts(rig: &TcpTestTarget) -> (ReservationHost, ReservationHost) {
    (ReservationHost::new(rig, A), ReservationHost::new(rig, B))
}

#[test]
fn a_reservation_is_effective_on_every_core_when_its_command_completes() {
    use ReservationType::*;
    let rig = TcpTestTarget::new(TestTargetConfig::default());
    let (mut one, mut other) = two_hosts(&rig);
    other.request_event();
    let data = pattern(4096, 1);
    assert_eq!(one.register(1, PersistChange::None), Status::SUCCESS);
    // Repeatedly: a change that completed on one core must be visible on the other immediately.
    for round in 0..200 {
        assert_eq!(one.acquire(AcquireAction::Acquire, ExclusiveAccess, 1, 0), Status::SUCCESS);
        assert_eq!(other.io.write(1, 0, &data), CONFLICT, "round {round}");
        assert_eq!(other.io.read_back(1, 0, 512), Err(CONFLICT));
        assert_eq!(one.io.write(1, 0, &data), Status::SUCCESS);
        assert_eq!(one.release(ReleaseAction::Release, ExclusiveAccess, 1), Status::SUCCESS);
        assert_eq!(other.io.write(1, 8, &data), Status::SUCCESS);
    }
    // Write Exclusive permits reads by anyone; with Registrants Only, registrants may write.
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
    // A release notifies the other registrant, on whichever core its admin queue is.
    assert_eq!(one.release(ReleaseAction::Release, WriteExclusiveRegistrants, 1), Status::SUCCESS);
    let notification = other.notification();
    let expected = ReservationNotification {
        count: 1,
        kind: NotificationType::ReservationReleased,
        available: 0,
        nsid: 1,
    };
    assert_eq!(notification, expected);
    other.request_event();
    assert_eq!(one.acquire(AcquireAction::Preempt, WriteExclusive, 1, 2), Status::SUCCESS);
    assert_eq!(other.notification().kind, NotificationType::RegistrationPreempted);
    assert_eq!(other.release(ReleaseAction::Clear, WriteExclusive, 2), CONFLICT, "no longer registered");
    // Persistence cannot be requested without a ptpl_file.
    assert_eq!(one.register(1, PersistChange::Persistent), Status::INVALID_FIELD.do_not_retry());
}

#[test]
fn data_that_arrives_after_the_reservation_is_not_written() {
    let rig = TcpTestTarget::new(TestTargetConfig::default());
    let (mut one, mut other) = two_hosts(&rig);
    assert_eq!(one.io.write(1, 0, &pattern(4096, 1)), Status::SUCCESS);
    // The other host's write was accepted, and its R2T sent, before the reservation.
    other.io.capsule(write(1, 0, 4096), &[]);
    let r2t = other.io.expect_r2t();
    assert_eq!(one.register(1, PersistChange::None), Status::SUCCESS);
    let kind = ReservationType::WriteExclusive;
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::SUCCESS);
    other.io.data(&r2t, 0, &pattern(4096, 2), true);
    assert_eq!(other.io.expect_response().status, CONFLICT);
    assert_eq!(one.io.read_back(1, 0, 4096), Ok(pattern(4096, 1)));
}

#[test]
fn preempt_and_abort_completes_after_the_commands_in_flight_of_the_preempted_host() {
    let latency = Duration::from_millis(400);
    let rig = TcpTestTarget::new(TestTargetConfig {
        latency_us: latency.as_micros() as u64,
        ..TestTargetConfig::default()
    });
    let (mut one, mut other) = two_hosts(&rig);
    for (host, key) in [(&mut one, 1), (&mut other, 2)] {
        assert_eq!(host.register(key, PersistChange::None), Status::SUCCESS);
    }
    let kind = ReservationType::WriteExclusiveAll;
    assert_eq!(other.acquire(AcquireAction::Acquire, kind, 2, 0), Status::SUCCESS);
    // Preempt without abort does not wait.
    let sqe = crate::peer::write_in_capsule(1, 0, 4096);
    let start = Instant::now();
    other.io.capsule(sqe, &pattern(4096, 2));
    // The second command is processed only after the first was submitted to the device.
    other.io.capsule(Sqe { cid: 8, ..crate::peer::read(2, 0, 512) }, &[]);
    assert_eq!(other.io.expect_response().cid, 8);
    let kind = ReservationType::ExclusiveAccess;
    assert_eq!(one.acquire(AcquireAction::PreemptAndAbort, kind, 1, 2), Status::SUCCESS);
    assert!(start.elapsed() >= latency, "{:?}", start.elapsed());
    assert_eq!(other.io.expect_response().status, Status::SUCCESS);
    // No later command of the preempted host takes effect.
    assert_eq!(other.io.write(1, 0, &pattern(4096, 3)), CONFLICT);
    let start = Instant::now();
    assert_eq!(other.register(3, PersistChange::None), Status::SUCCESS);
    assert_eq!(one.acquire(AcquireAction::PreemptAndAbort, kind, 1, 3), Status::SUCCESS);
    assert!(start.elapsed() < latency, "there was nothing to wait for");
    assert_eq!(one.io.read_back(1, 0, 4096), Ok(pattern(4096, 2)));
}

#[test]
fn a_queue_with_a_pending_reservation_command_can_be_closed() {
    let rig = TcpTestTarget::new(TestTargetConfig { latency_us: 300_000, ..TestTargetConfig::default() });
    let (mut one, mut other) = two_hosts(&rig);
    for (host, key) in [(&mut one, 1), (&mut other, 2)] {
        assert_eq!(host.register(key, PersistChange::None), Status::SUCCESS);
    }
    other.request_event();
    other.io.capsule(crate::peer::write_in_capsule(1, 0, 4096), &pattern(4096, 2));
    let acquire = ReservationAcquire {
        action: AcquireAction::PreemptAndAbort,
        ignore_key: false,
        kind: ReservationType::WriteExclusive,
    };
    one.io.capsule(in_capsule(acquire.to_sqe(), &[0; 16]), &encode_keys(1, 2));
    // The preemption took effect; its completion is pending.
    assert_eq!(other.notification().kind, NotificationType::RegistrationPreempted);
    drop(one);
    assert_eq!(other.io.expect_response().status, Status::SUCCESS);
    let mut one = ReservationHost::new(&rig, A);
    assert_eq!(one.report().registrants.len(), 1);
    one.io.round_trip(3);
}

/// The path of a file for persistent reservations that does not exist yet.
fn file(name: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("ringbolt-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

fn add_persistent_namespace(rig: &TcpTestTarget, path: &std::path::Path) -> Result<u32, NvmfTargetError> {
    let ptpl_file = Some(path.to_str().unwrap().to_owned());
    rig.target.add_namespace(NQN, NamespaceConfig { ptpl_file, ..NamespaceConfig::new("Malloc1") })
}

#[test]
fn completed_reservation_changes_persist_and_an_invalid_file_is_rejected() {
    let path = file("ptpl");
    let rig = TcpTestTarget::new(TestTargetConfig::default());
    let recreate = |rig: &TcpTestTarget| {
        rig.target.remove_namespace(NQN, 1).unwrap();
        add_persistent_namespace(rig, &path)
    };
    assert_eq!(recreate(&rig).unwrap(), 1);
    let (mut one, mut other) = two_hosts(&rig);
    assert_eq!(one.register(1, PersistChange::Persistent), Status::SUCCESS);
    let kind = ReservationType::WriteExclusive;
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::SUCCESS);
    // A namespace that is added again has the reservations that were completed.
    assert_eq!(recreate(&rig).unwrap(), 1);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), CONFLICT);
    let report = other.report();
    assert_eq!((report.kind, report.persistent, report.registrants[0].key), (Some(kind), true, 1));
    // Without PTPL the reservations are lost.
    let register = ReservationRegister {
        action: RegisterAction::Replace,
        ignore_key: true,
        persist: PersistChange::Volatile,
    };
    assert_eq!(one.reserve(register.to_sqe(), &encode_keys(0, 2)), Status::SUCCESS);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), CONFLICT);
    assert_eq!(recreate(&rig).unwrap(), 1);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), Status::SUCCESS);
    rig.target.remove_namespace(NQN, 1).unwrap();
    for content in ["", "{\"ptpl\":true,\"rtype\":1", "not ours", "{}"] {
        std::fs::write(&path, content).unwrap();
        let error = add_persistent_namespace(&rig, &path).unwrap_err();
        assert!(matches!(error, NvmfTargetError::Reservations(_)), "{error}");
        assert!(error.to_string().starts_with("ptpl_file /"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content, "the file is unchanged");
    }
    std::fs::remove_file(&path).unwrap();
    let error = add_persistent_namespace(&rig, std::path::Path::new("/nonexistent/ptpl")).unwrap_err();
    assert!(matches!(error, NvmfTargetError::Reservations(_)), "{error}");
    // The claim on the device was released each time.
    assert_eq!(add_persistent_namespace(&rig, &path).unwrap(), 1);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_change_that_cannot_be_written_fails_and_is_undone() {
    let directory = file("ptpl-directory");
    std::fs::create_dir(&directory).unwrap();
    let rig = TcpTestTarget::new(TestTargetConfig::default());
    rig.target.remove_namespace(NQN, 1).unwrap();
    add_persistent_namespace(&rig, &directory.join("file")).unwrap();
    let (mut one, mut other) = two_hosts(&rig);
    assert_eq!(one.register(1, PersistChange::Persistent), Status::SUCCESS);
    assert_eq!(other.register(2, PersistChange::None), Status::SUCCESS);
    // The directory vanishes: nothing can be written.
    std::fs::remove_dir_all(&directory).unwrap();
    let kind = ReservationType::WriteExclusive;
    let before = one.report();
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::INTERNAL_ERROR);
    assert_eq!(one.acquire(AcquireAction::Preempt, kind, 1, 2), Status::INTERNAL_ERROR);
    assert_eq!(one.release(ReleaseAction::Clear, kind, 1), Status::INTERNAL_ERROR);
    assert_eq!(one.report(), before);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), Status::SUCCESS);
    std::fs::create_dir(&directory).unwrap();
    assert_eq!(one.acquire(AcquireAction::Acquire, kind, 1, 0), Status::SUCCESS);
    assert_eq!(other.io.write(1, 0, &pattern(512, 1)), CONFLICT);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn preempt_and_abort_does_not_wait_for_a_device_that_hangs() {
    let latency = Duration::from_secs(12);
    let rig = TcpTestTarget::new(TestTargetConfig {
        latency_us: latency.as_micros() as u64,
        ..TestTargetConfig::default()
    });
    let (mut one, mut other) = two_hosts(&rig);
    for (host, key) in [(&mut one, 1), (&mut other, 2)] {
        assert_eq!(host.register(key, PersistChange::None), Status::SUCCESS);
    }
    let start = Instant::now();
    other.io.capsule(crate::peer::write_in_capsule(1, 0, 4096), &pattern(4096, 2));
    other.io.capsule(Sqe { cid: 8, ..crate::peer::read(2, 0, 512) }, &[]);
    assert_eq!(other.io.expect_response().cid, 8);
    // The write may still reach the medium, so that this is no success; but it completes, and is in force.
    let kind = ReservationType::WriteExclusive;
    assert_eq!(one.acquire(AcquireAction::PreemptAndAbort, kind, 1, 2), Status::INTERNAL_ERROR);
    assert_eq!(one.report().registrants.len(), 1);
    // The preempted host is disconnected before the device answers.
    assert_eq!(other.io.receive_pdu(), ReceivedPdu::Closed);
    assert!(start.elapsed() < latency, "{:?}", start.elapsed());
}
