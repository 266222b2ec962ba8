//! Commands that complete when their change is saved and the I/O of preempted hosts has ended.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use reservations::{ReservationStore, SaveCompletion};

use super::*;

/// A store that keeps saves pending until the test completes them.
#[derive(Clone, Debug, Default)]
struct PendingSaves(Arc<Mutex<Vec<(ReservationState, SaveCompletion)>>>);

impl ReservationStore for PendingSaves {
    fn save(&self, state: &ReservationState, completion: SaveCompletion) {
        self.0.lock().unwrap().push((state.clone(), completion));
    }
}

impl PendingSaves {
    fn take(&self) -> (ReservationState, SaveCompletion) {
        self.0.lock().unwrap().pop().expect("a save is pending")
    }
}

fn pending(outcome: ReservationOutcome) -> Arc<PendingChange> {
    match outcome {
        ReservationOutcome::Pending(pending) => pending,
        other => panic!("{other:?}"),
    }
}

#[test]
fn command_completes_after_save_and_drain() {
    let saves = PendingSaves::default();
    let mut subsystem = subsystem();
    let device = Reservations::new(ReservationState::default(), Some(Box::new(saves.clone())));
    let reservations = NamespaceReservations::new(Arc::new(device));
    assert_eq!(reservations.capabilities(), 0xff);
    subsystem.namespaces[0].reservations = Arc::new(reservations);
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem));
    let wakeups = Arc::new(AtomicU32::new(0));
    let count = wakeups.clone();
    let notifier = directory.add_notifier(Box::new(move || _ = count.fetch_add(1, Ordering::Relaxed)));
    let [one, other] = [A, B].map(|host| test_host(&directory, &subsystem, host));
    let persist = ReservationRegister {
        persist: PersistChange::Persistent,
        ..register(RegisterAction::Register, false)
    };
    let change = pending(one.reserve(persist.to_sqe(), &encode_keys(0, 0xa)));
    assert_eq!((outcome_status(&change), wakeups.load(Ordering::Relaxed)), (None, 0));
    let (state, completion) = saves.take();
    assert!(state.persistent && state.key_of(&Registrant::nvme_host(A)) == Some(0xa));
    completion.finish(true);
    assert_eq!((outcome_status(&change), wakeups.load(Ordering::Relaxed)), (Some(Status::SUCCESS), 1));
    assert!(notifier.take().is_some_and(|drains| drains.is_empty()) && notifier.take().is_none());
    // A failed save fails the command, and the registration is not there.
    let change = pending(other.reserve(persist.to_sqe(), &encode_keys(0, 0xb)));
    saves.take().1.finish(false);
    assert_eq!(outcome_status(&change), Some(Status::INTERNAL_ERROR));
    let abort = acquire(AcquireAction::PreemptAndAbort, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(other.execute(abort, &encode_keys(0xb, 0xa)), CONFLICT);
    let change = pending(other.reserve(persist.to_sqe(), &encode_keys(0, 0xb)));
    saves.take().1.finish(true);
    assert_eq!(outcome_status(&change), Some(Status::SUCCESS));
    // Preempt and Abort takes effect when it is saved, and waits for the drain.
    let change = pending(other.reserve(abort, &encode_keys(0xb, 0xa)));
    assert_eq!(notifier.take().map(|drains| drains.len()), Some(0));
    assert!(one.admin.registration.association.take_notifications().0.is_empty());
    saves.take().1.finish(true);
    let mut drains = notifier.take().unwrap();
    let drain = drains.pop().unwrap();
    assert_eq!((&drain.hosts[..], drains.len()), (&[A][..], 0));
    assert_eq!(outcome_status(&change), None);
    drop(drain);
    assert_eq!(outcome_status(&change), Some(Status::SUCCESS));
    let notified = one.admin.registration.association.take_notifications().0;
    assert_eq!(Vec::from(notified), [(1, NotificationType::RegistrationPreempted)]);
}

#[test]
fn command_fails_when_the_io_of_a_preempted_host_does_not_end_in_time() {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let notifier = directory.add_notifier(Box::new(|| {}));
    let hosts = [A, B, C].map(|host| test_host(&directory, &subsystem, host));
    let [one, other, third] = &hosts;
    one.register(1);
    other.register(2);
    third.register(2);
    let abort = acquire(AcquireAction::PreemptAndAbort, ReservationType::WriteExclusive).to_sqe();
    let change = pending(one.reserve(abort, &encode_keys(1, 2)));
    let drains = notifier.take().unwrap();
    let association = |host: &TestHost| host.admin.registration.association.clone();
    let guards_of = |host: &TestHost| {
        let mut guards = DrainGuards::default();
        (guards.add(&drains, &association(host), 1000), guards)
    };
    assert!(!guards_of(one).0 && guards_of(one).1.deadline_ns().is_none());
    // The I/O of one host ends, that of the other one does not.
    let ((_, mut ended), (_, mut stuck)) = (guards_of(other), guards_of(third));
    drop(drains);
    assert!(!ended.is_empty());
    ended.release();
    let deadline_ns = stuck.deadline_ns().unwrap();
    assert_eq!(deadline_ns, 1000 + PREEMPT_TIMEOUT_NS);
    assert!(!stuck.expire(deadline_ns - 1) && !ended.expire(deadline_ns));
    assert_eq!(outcome_status(&change), None);
    assert!(stuck.expire(deadline_ns) && stuck.is_empty() && !stuck.expire(deadline_ns));
    assert_eq!(outcome_status(&change), Some(Status::INTERNAL_ERROR));
}
