//! One block device as a namespace of two subsystems, beside a target of another protocol.

use super::*;

/// Two subsystems whose namespaces 1 are one device; the second has another identifier for it.
fn two_subsystems(device: &Arc<Reservations>) -> [Arc<Subsystem>; 2] {
    let face = || Arc::new(NamespaceReservations::new(device.clone()));
    let mut first = subsystem();
    first.namespaces[0].reservations = face();
    let mut second = Subsystem { nqn: "nqn.2026-11.io.ringbolt:second".parse().unwrap(), ..subsystem() };
    second.namespaces[0].reservations = face();
    [first, second].map(Arc::new)
}

fn host_of(directory: &Arc<ControllerDirectory>, subsystem: &Arc<Subsystem>, host: HostId) -> TestHost {
    let limits = ControllerLimits::default();
    let mut data = connect_data(subsystem.nqn.clone(), CNTLID_DYNAMIC);
    data[..16].copy_from_slice(&host);
    let place = ConnectContext { directory, limits: &limits, port: SubsystemPort::default(), secure: None };
    let connected = connect(&connect_sqe(0, 32, 0), &data, &place, |_| Some(subsystem.clone()));
    let Ok(ConnectOk::Admin(admin)) = connected else { panic!("refused: {connected:?}") };
    let association = &admin.registration.association;
    let table = NamespaceTable::for_controller(subsystem, 0, &limits, directory, association);
    TestHost { admin, table }
}

fn write() -> Sqe {
    let write = wire_nvme::io::ReadWrite { blocks: 1, ..Default::default() }.to_sqe(NvmOpcode::Write);
    Sqe { nsid: 1, data: DataPointer::transport(512), ..write }
}

#[test]
fn subsystems_with_one_device_share_its_reservations() {
    let device = Arc::new(Reservations::default());
    let [first, second] = two_subsystems(&device);
    let directory = Arc::new(ControllerDirectory::new());
    let notifier = directory.add_notifier(Box::new(|| {}));
    let (one, other) = (host_of(&directory, &first, A), host_of(&directory, &second, B));
    one.register(1);
    other.register(2);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(one.execute(sqe, &encode_keys(1, 0)), Status::SUCCESS);
    assert_eq!(io::plan(&write(), &other.table).map(|_| ()), Err(CONFLICT));
    // A report has the controllers of its own subsystem; hosts of another one have an unknown controller.
    let report = ReservationReport { extended: true, length_bytes: 256 }.to_sqe();
    let ReservationOutcome::Report(bytes) = other.reserve(report, &[]) else { panic!("no report") };
    let report = ReservationStatus::decode(&bytes, true).unwrap();
    let controllers: Vec<_> = report.registrants.iter().map(|one| (one.cntlid, one.host_id)).collect();
    assert_eq!(controllers, [(0xffff, A), (other.admin.registration.association.cntlid(), B)]);
    // A preemption is reported, and drained, in the other subsystem.
    _ = notifier.take();
    let abort = acquire(AcquireAction::PreemptAndAbort, ReservationType::WriteExclusive).to_sqe();
    let ReservationOutcome::Pending(pending) = other.reserve(abort, &encode_keys(2, 1)) else { panic!() };
    let drains = notifier.take().unwrap();
    let concerned =
        |host: &TestHost| DrainRequest::guards_for(&drains, &host.admin.registration.association).len();
    assert_eq!((concerned(&one), concerned(&other)), (1, 0));
    drop(drains);
    assert_eq!(outcome_status(&pending), Some(Status::SUCCESS));
    let notified = |host: &TestHost| Vec::from(host.admin.registration.association.take_notifications().0);
    assert_eq!(notified(&one), [(1, NotificationType::RegistrationPreempted)]);
    assert_eq!(notified(&other), []);
    assert_eq!(io::plan(&write(), &one.table).map(|_| ()), Err(CONFLICT));
}

#[test]
fn nexus_of_another_target_is_a_registrant_without_host_identifier() {
    let device = Arc::new(Reservations::default());
    let [first, _] = two_subsystems(&device);
    let directory = Arc::new(ControllerDirectory::new());
    let host = host_of(&directory, &first, A);
    let nexus = Registrant::scsi_nexus("initiator", "target").unwrap();
    let kind = reservations::ReservationType::ExclusiveAccess;
    for command in
        [ReservationCommand::Register { key: 9, persist: None }, ReservationCommand::Acquire { key: 9, kind }]
    {
        let change = device.execute(&nexus, command, directory.notifiers());
        assert_eq!(change.outcome(), Some(Ok(())));
    }
    assert_eq!(io::plan(&write(), &host.table).map(|_| ()), Err(CONFLICT));
    let report = ReservationReport { extended: true, length_bytes: 128 }.to_sqe();
    let ReservationOutcome::Report(bytes) = host.reserve(report, &[]) else { panic!("no report") };
    let report = ReservationStatus::decode(&bytes, true).unwrap();
    let expected = wire::RegisteredController { cntlid: 0xffff, holder: true, host_id: [0; 16], key: 9 };
    assert_eq!((report.kind, report.registrants), (Some(ReservationType::ExclusiveAccess), vec![expected]));
    host.register(1);
    let sqe = acquire(AcquireAction::Preempt, ReservationType::ExclusiveAccess).to_sqe();
    assert_eq!(host.execute(sqe, &encode_keys(1, 9)), Status::SUCCESS);
    assert!(io::plan(&write(), &host.table).is_ok());
    assert!(device.deny_mask(&nexus).denies(reservations::access::READ));
}
