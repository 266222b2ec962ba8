//! The state and its stable storage, sans-IO: a change takes effect when it is saved, or not at all.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use crate::{Effects, Registrant, ReservationCommand, ReservationError, ReservationState};

/// Most commands that wait for a save. A host has at most a queue of them, and a save takes milliseconds.
pub const WAITING_MAX: usize = 256;

/// The reservations of a device with their stable storage, sans-IO. `T` identifies a command for its owner.
///
/// It owns the [`ReservationState`] that is in force. A command that changes a persistent state, or makes it persistent
/// or volatile, is applied to a copy, which the owner saves; commands that follow wait in their order. A save that
/// succeeds puts the copy into force. One that fails discards it: no host was notified, no mask has changed, and the
/// command fails with [`ReservationError::NotSaved`].
///
/// Order: [`handle`](Self::handle) an event, perform the actions, and answer each [`ReservationAction::Save`], of which
/// at most one is pending, with [`ReservationEvent::Saved`].
#[derive(Debug)]
pub struct ReservationMachine<T> {
    state: ReservationState,
    can_persist: bool,
    saving: Option<SavingChange<T>>,
    waiting: VecDeque<WaitingCommand<T>>,
    // A save failed: the stored state may be the one that was discarded. The next change is saved whatever it is.
    storage_is_uncertain: bool,
}

#[derive(Debug)]
struct SavingChange<T> {
    state: ReservationState,
    effects: Effects,
    token: T,
}

#[derive(Debug)]
struct WaitingCommand<T> {
    registrant: Registrant,
    others: Vec<Registrant>,
    command: ReservationCommand,
    token: T,
}

/// What happens to a [`ReservationMachine`].
#[derive(Debug)]
pub enum ReservationEvent<T> {
    /// A registrant, or one that becomes it, sends a command.
    Command {
        /// Who sends it.
        registrant: Registrant,
        /// Whom it concerns besides; see [`ReservationState::apply_with`].
        others: Vec<Registrant>,
        /// The command.
        command: ReservationCommand,
        /// Identifies the command in [`ReservationAction::Finish`].
        token: T,
    },
    /// The pending save ended; whether it succeeded.
    Saved(bool),
}

/// What the owner of a [`ReservationMachine`] does next.
#[derive(Debug, PartialEq, Eq)]
pub enum ReservationAction<T> {
    /// Save this state. One that is not persistent removes what is stored.
    Save(ReservationState),
    /// Complete a command: notify and abort as its effects say first.
    Finish {
        /// The command.
        token: T,
        /// Its effects on others, or why it failed.
        outcome: Result<Effects, ReservationError>,
    },
}

impl<T> ReservationMachine<T> {
    /// Starts with a state that was loaded, or an empty one. `can_persist` says whether states can be saved.
    pub fn new(state: ReservationState, can_persist: bool) -> ReservationMachine<T> {
        ReservationMachine {
            state,
            can_persist,
            saving: None,
            waiting: VecDeque::new(),
            storage_is_uncertain: false,
        }
    }

    /// The state in force.
    pub fn state(&self) -> &ReservationState {
        &self.state
    }

    /// Whether states can be saved.
    pub fn can_persist(&self) -> bool {
        self.can_persist
    }

    /// Whether a save is pending.
    pub fn is_saving(&self) -> bool {
        self.saving.is_some()
    }

    /// Handles an event; appends the actions to perform, in order.
    ///
    /// # Panics
    /// On [`ReservationEvent::Saved`] if no save is pending.
    pub fn handle(&mut self, event: ReservationEvent<T>, actions: &mut Vec<ReservationAction<T>>) {
        match event {
            ReservationEvent::Command { token, .. } if self.waiting.len() == WAITING_MAX => {
                actions.push(ReservationAction::Finish { token, outcome: Err(ReservationError::Busy) });
            }
            ReservationEvent::Command { registrant, others, command, token } => {
                self.waiting.push_back(WaitingCommand { registrant, others, command, token });
            }
            ReservationEvent::Saved(succeeded) => {
                let SavingChange { state, effects, token } = self.saving.take().expect("one save is pending");
                self.storage_is_uncertain = !succeeded;
                let outcome = if succeeded {
                    self.state = state;
                    Ok(effects)
                } else {
                    Err(ReservationError::NotSaved)
                };
                actions.push(ReservationAction::Finish { token, outcome });
            }
        }
        while self.saving.is_none()
            && let Some(command) = self.waiting.pop_front()
        {
            self.execute(command, actions);
        }
    }

    fn execute(&mut self, waiting: WaitingCommand<T>, actions: &mut Vec<ReservationAction<T>>) {
        let WaitingCommand { registrant, others, command, token } = waiting;
        let mut changed = self.state.clone();
        let outcome = if command.persist() == Some(true) && !self.can_persist {
            Err(ReservationError::CannotPersist)
        } else {
            changed.apply_with(&registrant, &others, &command)
        };
        match outcome {
            Ok(effects) if self.must_save(&changed) => {
                actions.push(ReservationAction::Save(changed.clone()));
                self.saving = Some(SavingChange { state: changed, effects, token });
            }
            outcome => {
                if outcome.is_ok() {
                    self.state = changed;
                }
                actions.push(ReservationAction::Finish { token, outcome });
            }
        }
    }

    fn must_save(&self, changed: &ReservationState) -> bool {
        let concerns_storage = changed.persistent || self.state.persistent || self.storage_is_uncertain;
        self.can_persist && concerns_storage && *changed != self.state
    }
}
