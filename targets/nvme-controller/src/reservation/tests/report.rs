//! Reservation Report.

use wire_nvme::reservation::RegisteredController;

use super::*;

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
    let entry = |member: &TestHost, host_id, key, holder| RegisteredController {
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
    assert_eq!(
        report.registrants[0],
        RegisteredController { cntlid: 0xffff, holder: true, host_id: A, key: 0xa }
    );
}
