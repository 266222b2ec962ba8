//! The decoding of commands, and their status codes.

use super::*;

/// A and B are registered with keys 0xa and 0xb, and A holds a Write Exclusive reservation.
fn two_hosts() -> [TestHost; 2] {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let hosts = [A, B].map(|host| test_host(&directory, &subsystem, host));
    hosts[0].register(0xa);
    hosts[1].register(0xb);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(hosts[0].execute(sqe, &encode_keys(0xa, 0)), Status::SUCCESS);
    hosts
}

#[test]
fn commands_fail_with_the_status_of_the_specification() {
    use ReservationType::{ExclusiveAccess, WriteExclusive};
    let with_persistence =
        |persist| ReservationRegister { persist, ..register(RegisterAction::Register, false) }.to_sqe();
    let ignoring = |sqe: Sqe| Sqe { cdw10: sqe.cdw10 | 1 << 3, ..sqe };
    let preempt = acquire(AcquireAction::Preempt, WriteExclusive).to_sqe();
    let releases = release(ReleaseAction::Release, WriteExclusive).to_sqe();
    let clears = release(ReleaseAction::Clear, WriteExclusive).to_sqe();
    // Commands of B, with the keys that they carry.
    let rows = [
        ("registers again", register(RegisterAction::Register, false).to_sqe(), (0, 0xb), Status::SUCCESS),
        ("another key", register(RegisterAction::Register, false).to_sqe(), (0, 5), CONFLICT),
        ("key 0", register(RegisterAction::Register, false).to_sqe(), (0, 0), INVALID_FIELD),
        ("no file", with_persistence(PersistChange::Persistent), (0, 0xb), INVALID_FIELD),
        ("volatile", with_persistence(PersistChange::Volatile), (0, 0xb), Status::SUCCESS),
        ("replaces", register(RegisterAction::Replace, false).to_sqe(), (0xb, 5), Status::SUCCESS),
        ("replaces another", register(RegisterAction::Replace, false).to_sqe(), (1, 5), CONFLICT),
        ("replaces any", register(RegisterAction::Replace, true).to_sqe(), (1, 5), Status::SUCCESS),
        ("unregisters", register(RegisterAction::Unregister, false).to_sqe(), (0xb, 0), Status::SUCCESS),
        ("unregisters another", register(RegisterAction::Unregister, false).to_sqe(), (1, 0), CONFLICT),
        ("unregisters any", register(RegisterAction::Unregister, true).to_sqe(), (1, 0), Status::SUCCESS),
        ("acquires", acquire(AcquireAction::Acquire, WriteExclusive).to_sqe(), (0xb, 0), CONFLICT),
        ("preempts", preempt, (0xb, 0xa), Status::SUCCESS),
        ("preempts no registrant", preempt, (0xb, 7), CONFLICT),
        ("preempts key 0", preempt, (0xb, 0), INVALID_FIELD),
        ("preempts with another key", preempt, (0xa, 0xa), CONFLICT),
        ("preempts with IEKEY", ignoring(preempt), (0xb, 0xa), INVALID_FIELD),
        ("is not the holder", releases, (0xb, 0), Status::SUCCESS),
        ("another type", release(ReleaseAction::Release, ExclusiveAccess).to_sqe(), (0xb, 0), INVALID_FIELD),
        ("releases with IEKEY", ignoring(releases), (0xb, 0), INVALID_FIELD),
        ("clears", clears, (0xb, 0), Status::SUCCESS),
        ("clears without a type", Sqe { cdw10: 1, ..clears }, (0xb, 0), Status::SUCCESS),
        ("clears with another key", clears, (0xa, 0), CONFLICT),
        ("reserved action", Sqe { cdw10: 7, ..releases }, (0xb, 0), INVALID_FIELD),
        ("reserved type", Sqe { cdw10: 7 << 8, ..preempt }, (0xb, 0xa), INVALID_FIELD),
    ];
    for (name, sqe, (key, other), expected) in rows {
        let [_, host] = two_hosts();
        assert_eq!(host.execute(sqe, &encode_keys(key, other)), expected, "{name}");
    }
}

#[test]
fn host_without_an_identifier_cannot_reserve() {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let host = test_host(&directory, &subsystem, A);
    let request = crate::directory::ControllerRequest {
        concatenates: false,
        hostnqn: &crate::harness::host(),
        host_id: [0; 16],
        extended: None,
        io_queues_max: 1,
        portid: 0,
        exclusive: false,
    };
    let association = directory.add_controller(&subsystem, request).unwrap();
    let anonymous = Requester { association, directory };
    drop(host);
    let sqe = register(RegisterAction::Register, false).to_sqe();
    let outcome = subsystem.namespaces[0].reservations.execute(&anonymous, &sqe, &encode_keys(0, 1));
    let ReservationOutcome::Done(status) = outcome else { panic!("{outcome:?}") };
    assert_eq!(status, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
}

#[test]
fn every_type_is_reported_as_it_was_acquired() {
    for kind in ReservationType::ALL.iter().copied() {
        let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
        let host = test_host(&directory, &subsystem, A);
        host.register(1);
        let sqe = acquire(AcquireAction::Acquire, kind).to_sqe();
        assert_eq!(host.execute(sqe, &encode_keys(1, 0)), Status::SUCCESS);
        let report = ReservationReport { extended: true, length_bytes: 128 }.to_sqe();
        let ReservationOutcome::Report(bytes) = host.reserve(report, &[]) else { panic!("no report") };
        assert_eq!(ReservationStatus::decode(&bytes, true).unwrap().kind, Some(kind));
    }
}
