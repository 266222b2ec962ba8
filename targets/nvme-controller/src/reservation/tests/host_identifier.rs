//! The Host Identifier feature of memory-based transports.

use super::*;

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
        let place = ConnectContext {
            directory: &directory,
            limits: &limits,
            port: SubsystemPort::default(),
            secure: None,
        };
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
