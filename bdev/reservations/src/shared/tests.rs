use std::sync::atomic::AtomicUsize;

use super::*;
use crate::state::tests::{acquire, host, preempt, register};
use crate::{LossEvent, ReservationError, ReservationType, access};

/// Counts the changes that completed.
#[derive(Debug, Default)]
struct CountingWaker(AtomicUsize);

impl ChangeWaker for CountingWaker {
    fn wake(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A store that keeps saves pending until the test completes them.
#[derive(Clone, Debug, Default)]
struct PendingSaves(Arc<Mutex<Vec<(ReservationState, SaveCompletion)>>>);

impl ReservationStore for PendingSaves {
    fn save(&self, state: &ReservationState, completion: SaveCompletion) {
        sync::lock(&self.0).push((state.clone(), completion));
    }
}

impl PendingSaves {
    fn take(&self) -> (ReservationState, SaveCompletion) {
        let mut saves = sync::lock(&self.0);
        assert_eq!(saves.len(), 1, "one save is pending");
        saves.remove(0)
    }
}

/// Records notices, and keeps the guards of aborts.
#[derive(Debug, Default)]
struct Recorder {
    notices: Mutex<Vec<ReservationNotice>>,
    guards: Mutex<Vec<PendingGuard>>,
}

impl ReservationSubscriber for Recorder {
    fn notify(&self, notices: &[ReservationNotice]) {
        sync::lock(&self.notices).extend_from_slice(notices);
    }

    fn abort(&self, _: &[Registrant], guard: &PendingGuard) {
        sync::lock(&self.guards).push(guard.clone());
    }
}

struct Device {
    reservations: Arc<Reservations>,
    waker: Arc<CountingWaker>,
    saves: PendingSaves,
    /// Two targets that export the device.
    targets: [Arc<Recorder>; 2],
}

impl Device {
    fn new() -> Device {
        let saves = PendingSaves::default();
        let store = Some(Box::new(saves.clone()) as Box<dyn ReservationStore>);
        let reservations = Arc::new(Reservations::new(ReservationState::default(), store));
        let targets = [(); 2].map(|()| Arc::new(Recorder::default()));
        targets.iter().for_each(|target| reservations.subscribe(target));
        Device { reservations, waker: Arc::default(), saves, targets }
    }

    fn execute(&self, id: u8, command: ReservationCommand) -> Arc<PendingChange> {
        self.reservations.execute(&host(id), command, self.waker.clone())
    }

    fn woken(&self) -> usize {
        self.waker.0.load(Ordering::Relaxed)
    }
}

const KIND: ReservationType = ReservationType::WriteExclusive;

#[test]
fn a_change_is_enforced_and_reported_when_it_is_saved() {
    let device = Device::new();
    let mask = device.reservations.deny_mask(&host(2));
    let persistent = |key| ReservationCommand::Register { key, persist: Some(true) };
    let first = device.execute(1, persistent(1));
    assert_eq!((first.outcome(), device.woken()), (None, 0));
    device.saves.take().1.finish(true);
    assert_eq!((first.outcome(), device.woken()), (Some(Ok(())), 1));
    let second = device.execute(1, acquire(KIND, 1));
    let third = device.execute(2, register(2));
    let (state, completion) = device.saves.take();
    assert!(state.is_holder(&host(1)));
    assert!(!mask.denies(access::WRITE), "not saved");
    completion.finish(true);
    assert_eq!((second.outcome(), third.outcome()), (Some(Ok(())), None));
    assert!(mask.denies(access::WRITE) && !mask.denies(access::READ));
    // A dropped completion is a failed save.
    drop(device.saves.take());
    assert_eq!((third.outcome(), device.woken()), (Some(Err(ReservationError::NotSaved)), 3));
    assert_eq!(device.reservations.state(), state);
}

#[test]
fn a_change_that_is_undone_notifies_no_registrant() {
    let device = Device::new();
    let mask = device.reservations.deny_mask(&host(2));
    for (id, persist) in [(1, None), (2, Some(true))] {
        device.execute(id, ReservationCommand::Register { key: id.into(), persist });
    }
    device.saves.take().1.finish(true);
    let before = device.reservations.state();
    let undone =
        device.execute(1, ReservationCommand::Preempt { key: 1, victim: 2, kind: KIND, abort: true });
    device.saves.take().1.finish(false);
    assert_eq!(undone.outcome(), Some(Err(ReservationError::NotSaved)));
    assert_eq!((device.reservations.state(), mask.denies(access::WRITE)), (before, false));
    for target in &device.targets {
        assert!(sync::lock(&target.notices).is_empty() && sync::lock(&target.guards).is_empty());
    }
}

#[test]
fn every_target_is_notified_and_delays_an_abort() {
    let device = Device::new();
    for id in [1, 2] {
        assert_eq!(device.execute(id, register(id.into())).outcome(), Some(Ok(())));
    }
    let abort = ReservationCommand::Preempt { key: 1, victim: 2, kind: KIND, abort: true };
    let pending = device.execute(1, abort);
    let notice = ReservationNotice { registrant: host(2), event: LossEvent::RegistrationPreempted };
    for target in &device.targets {
        assert_eq!(pending.outcome(), None);
        assert_eq!(*sync::lock(&target.notices), std::slice::from_ref(&notice));
        sync::lock(&target.guards).clear();
    }
    assert_eq!((pending.outcome(), device.woken()), (Some(Ok(())), 3));
    // A target that is gone delays nothing.
    let Device { reservations, waker, targets, .. } = device;
    drop(targets);
    let again = reservations.execute(&host(2), register(2), waker.clone());
    assert_eq!(again.outcome(), Some(Ok(())));
    assert_eq!(reservations.execute(&host(1), preempt(KIND, 1, 2), waker).outcome(), Some(Ok(())));
}

#[test]
fn connections_of_one_registrant_share_a_mask() {
    let device = Device::new();
    let masks = [1, 1, 2].map(|id| device.reservations.deny_mask(&host(id)));
    assert!(Arc::ptr_eq(&masks[0], &masks[1]) && !Arc::ptr_eq(&masks[0], &masks[2]));
    device.execute(1, register(1));
    device.execute(1, acquire(ReservationType::ExclusiveAccess, 1));
    assert_eq!(masks.map(|mask| mask.denies(access::READ)), [false, false, true]);
    assert!(device.reservations.deny_mask(&host(3)).denies(access::READ), "a later connection too");
}

/// What was set last.
#[derive(Debug, Default)]
struct Obedient(AtomicU8);

impl ReservedDevice for Obedient {
    fn set_denied(&self, denied: u8) {
        self.0.store(denied, Ordering::Relaxed);
    }
}

#[test]
fn the_device_denies_to_others_what_each_type_says() {
    let device = Device::new();
    let disk = Arc::new(Obedient::default());
    let denied = || disk.0.load(Ordering::Relaxed);
    device.reservations.attach_device(&disk);
    for kind in ReservationType::ALL {
        device.execute(1, register(1));
        assert_eq!(denied(), 0, "a registration alone excludes no initiator");
        device.execute(1, acquire(kind, 1));
        assert_eq!(denied(), kind.denied(false, false));
        assert!(denied() & access::WRITE != 0);
        device.execute(1, ReservationCommand::Clear { key: 1 });
        assert_eq!(denied(), 0);
    }
    device.execute(1, register(1));
    device.execute(1, acquire(KIND, 1));
    // One that comes later, and the end.
    let later = Arc::new(Obedient::default());
    device.reservations.attach_device(&later);
    assert_eq!(later.0.load(Ordering::Relaxed), access::WRITE);
    device.reservations.close();
    assert_eq!((denied(), later.0.load(Ordering::Relaxed)), (0, 0));
    device.execute(1, ReservationCommand::Clear { key: 1 });
    device.execute(1, register(1));
    device.execute(1, acquire(KIND, 1));
    assert_eq!(denied(), 0, "no target keeps them any more");
}

#[test]
fn a_reserved_unit_excludes_everyone_else_from_the_device() {
    let device = Device::new();
    let disk = Arc::new(Obedient::default());
    let all = access::READ | access::WRITE;
    let denied = || disk.0.load(Ordering::Relaxed);
    device.reservations.attach_device(&disk);
    let masks = [1, 2].map(|id| device.reservations.deny_mask(&host(id)));
    assert!(device.reservations.reserve_unit(&host(1)) && device.reservations.reserve_unit(&host(1)));
    assert!(!device.reservations.reserve_unit(&host(2)));
    assert_eq!(denied(), all);
    assert!(!masks[0].denies(all) && masks[1].denies(access::READ) && masks[1].denies(access::WRITE));
    let conflict = Some(Err(ReservationError::Conflict));
    assert_eq!(device.execute(2, register(2)).outcome(), conflict);
    device.reservations.release_unit();
    assert_eq!(denied(), all, "another unit of it is reserved");
    device.reservations.release_unit();
    assert_eq!((denied(), masks[1].denies(all)), (0, false));
    assert_eq!(device.execute(2, register(2)).outcome(), Some(Ok(())));
    assert!(!device.reservations.reserve_unit(&host(1)), "a registration excludes it");
}
