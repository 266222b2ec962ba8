use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::ReservationAction::{Finish, Save};
use crate::ReservationType;
use crate::state::tests::oracle::any_command;
use crate::state::tests::{acquire, host, register};

fn command(id: u8, command: ReservationCommand, token: usize) -> ReservationEvent<usize> {
    ReservationEvent::Command { registrant: host(id), others: Vec::new(), command, token }
}

fn persistent(key: u64) -> ReservationCommand {
    ReservationCommand::Register { key, persist: Some(true) }
}

fn handle(
    machine: &mut ReservationMachine<usize>,
    event: ReservationEvent<usize>,
) -> Vec<ReservationAction<usize>> {
    let mut actions = Vec::new();
    machine.handle(event, &mut actions);
    actions
}

fn done(token: usize) -> ReservationAction<usize> {
    Finish { token, outcome: Ok(Effects::default()) }
}

fn failed(token: usize, error: ReservationError) -> ReservationAction<usize> {
    Finish { token, outcome: Err(error) }
}

#[test]
fn volatile_changes_complete_at_once() {
    for can_persist in [false, true] {
        let mut machine = ReservationMachine::new(ReservationState::default(), can_persist);
        assert_eq!(handle(&mut machine, command(1, register(1), 0)), [done(0)]);
        assert_eq!(machine.state().registrations.len(), 1);
    }
    let mut machine = ReservationMachine::new(ReservationState::default(), false);
    let refused = handle(&mut machine, command(1, persistent(1), 0));
    assert_eq!(refused, [failed(0, ReservationError::CannotPersist)]);
    let set = ReservationCommand::SetPersistent(true);
    assert_eq!(handle(&mut machine, command(1, set, 1)), [failed(1, ReservationError::CannotPersist)]);
    assert_eq!(*machine.state(), ReservationState::default());
}

#[test]
fn failed_save_undoes_the_change_and_only_that() {
    let mut machine = ReservationMachine::new(ReservationState::default(), true);
    let [Save(saved)] = &handle(&mut machine, command(1, persistent(1), 0))[..] else { panic!("no save") };
    assert!(saved.persistent && saved.key_of(&host(1)) == Some(1));
    // Not in force before it is saved, and later commands wait.
    assert_eq!(*machine.state(), ReservationState::default());
    assert_eq!(handle(&mut machine, command(2, register(2), 1)), []);
    // The command that waited runs without the change. What the file holds is unknown: it is saved.
    let actions = handle(&mut machine, ReservationEvent::Saved(false));
    let [first, Save(second)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(*first, failed(0, ReservationError::NotSaved));
    assert_eq!((second.persistent, second.registrations.len(), second.key_of(&host(2))), (false, 1, Some(2)));
    assert_eq!(handle(&mut machine, ReservationEvent::Saved(true)), [done(1)]);
    assert_eq!((machine.state().persistent, machine.is_saving()), (false, false));
    // Volatile changes are not saved any more.
    assert_eq!(handle(&mut machine, command(3, register(3), 2)), [done(2)]);
}

#[test]
fn commands_that_change_nothing_are_not_saved() {
    let mut machine = ReservationMachine::new(ReservationState::default(), true);
    handle(&mut machine, command(1, persistent(1), 0));
    handle(&mut machine, ReservationEvent::Saved(true));
    let kind = ReservationType::WriteExclusive;
    assert!(matches!(handle(&mut machine, command(1, acquire(kind, 1), 1))[..], [Save(_)]));
    assert_eq!(handle(&mut machine, ReservationEvent::Saved(true)), [done(1)]);
    assert_eq!(handle(&mut machine, command(1, acquire(kind, 1), 2)), [done(2)]);
    let refused = handle(&mut machine, command(2, acquire(kind, 1), 3));
    assert_eq!(refused, [failed(3, ReservationError::Conflict)]);
}

#[test]
fn waiting_commands_are_limited() {
    let mut machine = ReservationMachine::new(ReservationState::default(), true);
    handle(&mut machine, command(1, persistent(1), 0));
    for token in 1..=WAITING_MAX {
        assert_eq!(handle(&mut machine, command(2, register(2), token)), []);
    }
    let refused = handle(&mut machine, command(2, register(2), 1000));
    assert_eq!(refused, [failed(1000, ReservationError::Busy)]);
}

proptest! {
    /// Saves that fail and succeed at any time have the same outcome as commands one by one, of which those fail whose
    /// save fails.
    #[test]
    fn saves_serialize_commands(
        commands in prop::collection::vec((1..4u8, any_command()), 1..60),
        saves in prop::collection::vec(any::<bool>(), 61),
        interleaving in prop::collection::vec(any::<bool>(), 1..40),
    ) {
        let mut machine = ReservationMachine::new(ReservationState::default(), true);
        let mut outcomes = Vec::new();
        let mut stored: Option<ReservationState> = None;
        let mut to_send: VecDeque<_> = commands.iter().copied().enumerate().collect();
        let (mut saves_left, mut steps) = (saves.iter(), interleaving.iter().cycle());
        let mut pending: Option<ReservationState> = None;
        while !to_send.is_empty() || machine.is_saving() {
            let sends = *steps.next().unwrap() || !machine.is_saving();
            let event = match to_send.pop_front().filter(|_| sends) {
                Some((token, (id, next))) => command(id, next, token),
                None if machine.is_saving() => {
                    let succeeded = *saves_left.next().unwrap_or(&true);
                    if let Some(state) = pending.take().filter(|_| succeeded) {
                        stored = Some(state);
                    }
                    ReservationEvent::Saved(succeeded)
                }
                None => continue,
            };
            for action in handle(&mut machine, event) {
                match action {
                    Save(state) => prop_assert!(pending.replace(state).is_none(), "one save at a time"),
                    Finish { token, outcome } => outcomes.push((token, outcome)),
                }
            }
        }
        // The reference: one command after the other, with the same results of the saves.
        let (mut state, mut saves_left, mut is_uncertain) = (ReservationState::default(), saves.iter(), false);
        for (token, outcome) in outcomes {
            let (id, command) = commands[token];
            let mut changed = state.clone();
            let mut expected = changed.apply(&host(id), &command);
            let is_saved = changed.persistent || state.persistent || is_uncertain;
            if is_saved && expected.is_ok() && changed != state {
                is_uncertain = !*saves_left.next().unwrap_or(&true);
                if is_uncertain {
                    expected = Err(ReservationError::NotSaved);
                }
            }
            if expected.is_ok() {
                state = changed;
            }
            prop_assert_eq!(outcome, expected);
        }
        prop_assert_eq!(&state, machine.state());
        // What is in force and persistent is what is stored.
        if state.persistent {
            prop_assert_eq!(stored.as_ref(), Some(&state));
        } else if !is_uncertain {
            prop_assert!(stored.is_none_or(|stored| !stored.persistent));
        }
    }
}
