//! The notification log page, its event and its mask.

use super::*;

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
    assert_eq!(run(&mut harness, get.to_sqe(3)).result, u64::from(reservation_mask::RESERVATION_PREEMPTED));
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
