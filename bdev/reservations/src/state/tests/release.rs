use super::*;
use crate::LossEvent::{ReservationPreempted, ReservationReleased};
use crate::ReservationError::{Conflict, WrongType};
use crate::ReservationType::{ExclusiveAccess, WriteExclusive};

fn release(kind: ReservationType, key: u64) -> ReservationCommand {
    ReservationCommand::Release { key, kind }
}

/// A state with three registrants, of which A has acquired a reservation.
fn held(kind: ReservationType) -> ReservationState {
    let mut state = three_registrants();
    state.apply(&host(A), &acquire(kind, 0xa)).unwrap();
    state
}

fn other_type(kind: ReservationType) -> ReservationType {
    if kind == WriteExclusive { ExclusiveAccess } else { WriteExclusive }
}

#[test]
fn release_notifies_remaining_registrants() {
    for kind in ReservationType::ALL {
        let notified = if kind.is_for_holder_only() { vec![] } else { hosts(&[B, C]) };
        let mut state = held(kind);
        let effects = state.apply(&host(A), &release(kind, 0xa)).unwrap();
        assert_eq!(effects.notified(ReservationReleased), notified);
        assert_eq!((&state.reservation, state.generation), (&None, 3));
        // A release by another registrant has no effect, unless all hold the reservation.
        let mut state = held(kind);
        state.apply(&host(B), &release(kind, 0xb)).unwrap();
        assert_eq!(state.reservation.is_none(), kind.is_all_registrants(), "{kind:?}");
    }
}

#[test]
fn release_of_another_type_fails_unless_a_nexus_holds_nothing() {
    for kind in ReservationType::ALL {
        let mut state = held(kind);
        assert_eq!(state.apply(&host(A), &release(other_type(kind), 0xa)), Err(WrongType));
        assert_eq!(state.apply(&host(B), &release(other_type(kind), 0xb)), Err(WrongType));
        // SPC-4 completes the release of a registrant that is not the holder with GOOD, whatever the type.
        let nexus = Registrant::scsi_nexus("initiator", "target").unwrap();
        state.apply(&nexus, &register(7)).unwrap();
        let expected = if kind.is_all_registrants() { Err(WrongType) } else { Ok(Effects::default()) };
        assert_eq!(state.apply(&nexus, &release(other_type(kind), 7)), expected);
        assert!(state.reservation.is_some());
    }
}

#[test]
fn unregistering_the_last_holder_releases() {
    for kind in ReservationType::ALL {
        let unregister = |key| ReservationCommand::Unregister { expected: Some(key), persist: None };
        let mut state = held(kind);
        let effects = state.apply(&host(A), &unregister(0xa)).unwrap();
        let is_for_all = kind.is_all_registrants();
        assert_eq!(state.reservation.is_some(), is_for_all, "{kind:?}");
        let is_notified = !is_for_all && !kind.is_for_holder_only();
        let notified = if is_notified { hosts(&[B, C]) } else { vec![] };
        assert_eq!(effects.notified(ReservationReleased), notified);
        state.apply(&host(B), &unregister(0xb)).unwrap();
        state.apply(&host(C), &unregister(0xc)).unwrap();
        assert_eq!((state.reservation, state.registrations.len()), (None, 0));
    }
}

#[test]
fn every_registrant_may_clear() {
    for kind in ReservationType::ALL {
        let mut state = held(kind);
        let effects = state.apply(&host(B), &ReservationCommand::Clear { key: 0xb }).unwrap();
        assert_eq!(effects.notified(ReservationPreempted), hosts(&[A, C]));
        assert_eq!((effects.notices.len(), effects.abort.len()), (2, 0));
        assert_eq!((state.reservation, state.registrations.len(), state.generation), (None, 0, 4));
    }
}

#[test]
fn only_a_holder_acquires_again_and_only_the_same_type() {
    for kind in ReservationType::ALL {
        let mut state = held(kind);
        assert!(state.apply(&host(A), &acquire(kind, 0xa)).is_ok());
        assert_eq!(state.apply(&host(A), &acquire(other_type(kind), 0xa)), Err(Conflict));
        assert_eq!(state.apply(&host(B), &acquire(kind, 0xb)).is_ok(), kind.is_all_registrants());
        assert_eq!(state.apply(&host(B), &acquire(kind, 0xa)), Err(Conflict), "not its key");
        assert_eq!(state.apply(&host(4), &acquire(kind, 0)), Err(Conflict), "not registered");
    }
}
