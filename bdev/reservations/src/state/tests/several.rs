//! Commands that concern several registrants.

use super::*;

const KIND: ReservationType = ReservationType::WriteExclusiveRegistrants;

#[test]
fn several_registrants_change_together_or_not_at_all() {
    let mut state = ReservationState::default();
    let others = hosts(&[B, C]);
    state.apply_with(&host(A), &others, &register(1)).unwrap();
    assert_eq!((state.registrations.len(), state.generation), (3, 1));
    state.apply(&host(C), &ReservationCommand::Replace { expected: Some(1), key: 2, persist: None }).unwrap();
    let before = state.clone();
    let replace = ReservationCommand::Replace { expected: Some(1), key: 3, persist: Some(true) };
    assert_eq!(state.apply_with(&host(A), &others, &replace), Err(ReservationError::Conflict));
    assert_eq!(state, before);
    state.apply_with(&host(A), &others[..1], &replace).unwrap();
    assert_eq!((state.key_of(&host(B)), state.key_of(&host(C)), state.persistent), (Some(3), Some(2), true));
    // The reservation is released with its holder's registration: the remaining registrant is notified, and no sender.
    state.apply(&host(A), &acquire(KIND, 3)).unwrap();
    let unregister = ReservationCommand::Unregister { expected: Some(3), persist: None };
    let effects = state.apply_with(&host(A), &hosts(&[B, 0xd]), &unregister).unwrap();
    assert_eq!(effects.notified(LossEvent::ReservationReleased), hosts(&[C]));
    assert_eq!(effects.notices.len(), 1);
    assert!(state.reservation.is_none() && state.is_valid());
    let mut too_many = hosts(&(0..=255).collect::<Vec<u8>>());
    too_many.push(Registrant::nvme_host(*b"one more than all".first_chunk().unwrap()));
    let before = state.clone();
    assert_eq!(
        state.apply_with(&host(A), &too_many, &register(2)),
        Err(ReservationError::TooManyRegistrants)
    );
    assert_eq!(state, before);
}

#[test]
fn a_holder_moves_its_reservation() {
    let kinds = ReservationType::ALL.into_iter();
    for kind in kinds {
        let mut state = three_registrants();
        let to =
            |key, new_key, unregister| ReservationCommand::Move { key, new_key, unregister, persist: None };
        let conflict = Err(ReservationError::Conflict);
        assert_eq!(state.apply_with(&host(A), &hosts(&[0xd]), &to(0xa, 4, true)), conflict);
        state.apply(&host(A), &acquire(kind, 0xa)).unwrap();
        if kind.is_all_registrants() {
            assert_eq!(state.apply_with(&host(A), &hosts(&[0xd]), &to(0xa, 4, true)), conflict);
            continue;
        }
        assert_eq!(state.apply(&host(A), &to(0xa, 4, true)), conflict, "it names no other registrant");
        assert_eq!(state.apply_with(&host(B), &hosts(&[0xd]), &to(0xb, 4, true)), conflict);
        assert_eq!(state.apply_with(&host(A), &hosts(&[0xd]), &to(0xc, 4, true)), conflict);
        let zero = state.apply_with(&host(A), &hosts(&[0xd]), &to(0xa, 0, true));
        assert_eq!(zero, Err(ReservationError::ZeroKey));
        let effects = state.apply_with(&host(A), &hosts(&[0xd]), &to(0xa, 4, true)).unwrap();
        assert_eq!((effects, state.generation), (Effects::default(), 4));
        assert!(state.is_holder(&host(0xd)) && state.key_of(&host(A)).is_none() && state.is_valid());
        // To one that is registered, whose key changes.
        state.apply_with(&host(0xd), &hosts(&[B]), &to(4, 5, false)).unwrap();
        assert_eq!((state.key_of(&host(B)), state.key_of(&host(0xd))), (Some(5), Some(4)));
        assert!(state.is_holder(&host(B)) && !state.is_holder(&host(0xd)));
    }
}
