use super::*;
use crate::ReservationError::{Conflict, TooManyRegistrants, ZeroKey};

#[test]
fn keys_are_registered_replaced_and_unregistered() {
    let replace = |expected, key| ReservationCommand::Replace { expected, key, persist: None };
    let unregister = |expected| ReservationCommand::Unregister { expected, persist: None };
    let rows = [
        // The key afterwards of A, which is registered, and of a host that is not; 0 if it is not registered.
        (register(0xa), Ok(0xa), Ok(0xa)),
        (register(5), Err(Conflict), Ok(5)),
        (register(0), Err(ZeroKey), Err(ZeroKey)),
        (replace(Some(0xa), 5), Ok(5), Err(Conflict)),
        (replace(Some(1), 5), Err(Conflict), Err(Conflict)),
        (replace(None, 5), Ok(5), Ok(5)),
        (replace(None, 0), Err(ZeroKey), Err(ZeroKey)),
        (replace(Some(0xa), 0), Err(ZeroKey), Err(ZeroKey)),
        (unregister(Some(0xa)), Ok(0), Err(Conflict)),
        (unregister(Some(1)), Err(Conflict), Err(Conflict)),
        (unregister(None), Ok(0), Err(Conflict)),
    ];
    for (command, registered, stranger) in rows {
        for (id, expected) in [(A, registered), (4, stranger)] {
            let mut state = three_registrants();
            let found = state.apply(&host(id), &command).map(|_| state.key_of(&host(id)).unwrap_or(0));
            assert_eq!(found, expected, "{command:?} of {id:#x}");
            if expected.is_err() {
                assert_eq!(state, three_registrants(), "nothing changes");
            } else {
                assert_eq!(state.generation, three_registrants().generation + 1);
            }
        }
    }
}

#[test]
fn persistence_changes_with_commands_that_succeed() {
    let mut state = ReservationState::default();
    let register = |persist| ReservationCommand::Register { key: 1, persist };
    state.apply(&host(A), &register(Some(true))).unwrap();
    assert!(state.persistent);
    state.apply(&host(A), &register(None)).unwrap();
    assert!(state.persistent);
    let wrong_key = ReservationCommand::Unregister { expected: Some(2), persist: Some(false) };
    assert_eq!(state.apply(&host(A), &wrong_key), Err(Conflict));
    assert!(state.persistent);
    let generation = state.generation;
    state.apply(&host(B), &ReservationCommand::SetPersistent(false)).unwrap();
    assert_eq!((state.persistent, state.generation), (false, generation));
}

#[test]
fn registrants_are_limited() {
    let mut state = ReservationState::default();
    let number = |index: usize| Registrant::scsi_nexus(&format!("initiator{index}"), "target").unwrap();
    for index in 0..REGISTRANTS_MAX {
        state.apply(&number(index), &register(1)).unwrap();
    }
    assert_eq!(state.apply(&number(REGISTRANTS_MAX), &register(1)), Err(TooManyRegistrants));
    let replace = ReservationCommand::Replace { expected: None, key: 1, persist: None };
    assert_eq!(state.apply(&number(REGISTRANTS_MAX), &replace), Err(TooManyRegistrants));
    assert!(state.is_valid());
    assert!(state.apply(&number(0), &register(1)).is_ok());
}
