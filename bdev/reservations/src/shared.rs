//! The reservations of one device, shared by every target, subsystem and logical unit that exports it.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::{
    ChangeWaker, Effects, PendingChange, PendingGuard, Registrant, ReservationAction, ReservationCommand,
    ReservationEvent, ReservationMachine, ReservationNotice, ReservationState,
};

/// The access to a device that reservations deny to a registrant: an atomic byte that I/O queues load and
/// reservation commands store. 0 without a reservation.
#[derive(Debug, Default)]
pub struct DenyMask(AtomicU8);

impl DenyMask {
    /// Whether commands of a class are denied; see [`access`](crate::access).
    #[inline(always)]
    pub fn denies(&self, class: u8) -> bool {
        self.0.load(Ordering::Acquire) & class != 0
    }
}

/// Saves reservations that persist through power loss.
pub trait ReservationStore: Send + Sync + fmt::Debug {
    /// Saves a state; one that is not [persistent](ReservationState::persistent) removes the saved state. Called by a
    /// reactor, without a lock held: the implementation queues the state and returns. The next call follows the
    /// completion of this one.
    fn save(&self, state: &ReservationState, completion: SaveCompletion);
}

/// A pending save. Dropping it is a failure.
#[derive(Debug)]
pub struct SaveCompletion(Option<Arc<Reservations>>);

/// A target that exports a device, or a part of it, such as a namespace: learns what its registrants lose.
pub trait ReservationSubscriber: Send + Sync + fmt::Debug {
    /// Notifies registrants. Those of other subscribers are among them.
    fn notify(&self, notices: &[ReservationNotice]);

    /// Aborts the I/O of registrants, or waits for its end, for a bounded time. Clones of the guard delay the completion
    /// of the command until they are dropped.
    fn abort(&self, registrants: &[Registrant], guard: &PendingGuard);
}

/// Registrations and the reservation of one device.
///
/// It owns the [`ReservationMachine`] and a [`DenyMask`] for each registrant that has a connection. A change runs under
/// the lock: it puts the new state into force and stores the masks. Saves, notices and aborts follow after the lock, on
/// the thread that sent the command or that completed the save. I/O costs one atomic load and takes no lock.
#[derive(Debug)]
pub struct Reservations {
    inner: Mutex<ReservationsInner>,
    store: Option<Box<dyn ReservationStore>>,
}

#[derive(Debug)]
struct ReservationsInner {
    machine: ReservationMachine<PendingGuard>,
    deny_masks: Vec<(Registrant, Weak<DenyMask>)>,
    subscribers: Vec<Weak<dyn ReservationSubscriber>>,
}

impl Default for Reservations {
    fn default() -> Self {
        Reservations::new(ReservationState::default(), None)
    }
}

impl Reservations {
    /// Reservations with a state that was loaded, or an empty one. Without a store they do not persist through power
    /// loss.
    pub fn new(state: ReservationState, store: Option<Box<dyn ReservationStore>>) -> Reservations {
        let machine = ReservationMachine::new(state, store.is_some());
        let inner = ReservationsInner { machine, deny_masks: Vec::new(), subscribers: Vec::new() };
        Reservations { inner: Mutex::new(inner), store }
    }

    /// Whether the state can persist through power loss.
    pub fn can_persist(&self) -> bool {
        self.store.is_some()
    }

    /// A copy of the state in force.
    pub fn state(&self) -> ReservationState {
        self.lock().machine.state().clone()
    }

    /// The mask that I/O commands of a registrant, or of one that could become it, check. Every change updates it.
    pub fn deny_mask(&self, registrant: &Registrant) -> Arc<DenyMask> {
        let mut inner = self.lock();
        inner.deny_masks.retain(|(_, mask)| mask.strong_count() > 0);
        let mut masks = inner.deny_masks.iter().filter(|(of, _)| of == registrant);
        if let Some(mask) = masks.next().and_then(|(_, mask)| mask.upgrade()) {
            return mask;
        }
        let mask = Arc::new(DenyMask(AtomicU8::new(inner.machine.state().denied(registrant))));
        inner.deny_masks.push((registrant.clone(), Arc::downgrade(&mask)));
        mask
    }

    /// Adds a subscriber. Dropping it removes it.
    pub fn subscribe(&self, subscriber: &Arc<impl ReservationSubscriber + 'static>) {
        let mut inner = self.lock();
        inner.subscribers.retain(|one| one.strong_count() > 0);
        let subscriber = Arc::downgrade(subscriber);
        inner.subscribers.push(subscriber);
    }

    /// Executes a command. The change that it returns may have completed already; otherwise `waker` is called when it
    /// does.
    pub fn execute(
        self: &Arc<Self>,
        registrant: &Registrant,
        command: ReservationCommand,
        waker: Arc<dyn ChangeWaker>,
    ) -> Arc<PendingChange> {
        self.execute_with(registrant, Vec::new(), command, waker)
    }

    /// As [`execute`](Self::execute), for a command that concerns other registrants too: see
    /// [`ReservationState::apply_with`].
    pub fn execute_with(
        self: &Arc<Self>,
        registrant: &Registrant,
        others: Vec<Registrant>,
        command: ReservationCommand,
        waker: Arc<dyn ChangeWaker>,
    ) -> Arc<PendingChange> {
        let (pending, token) = PendingChange::new(waker);
        self.handle(ReservationEvent::Command { registrant: registrant.clone(), others, command, token });
        pending
    }

    fn lock(&self) -> MutexGuard<'_, ReservationsInner> {
        sync::lock(&self.inner)
    }

    fn handle(self: &Arc<Self>, event: ReservationEvent<PendingGuard>) {
        let mut actions = Vec::new();
        let subscribers = {
            let mut inner = self.lock();
            inner.machine.handle(event, &mut actions);
            let ReservationsInner { machine, deny_masks, subscribers } = &*inner;
            for (registrant, mask) in deny_masks {
                if let Some(mask) = mask.upgrade() {
                    mask.0.store(machine.state().denied(registrant), Ordering::Release);
                }
            }
            subscribers.clone()
        };
        for action in actions {
            match action {
                ReservationAction::Save(state) => {
                    let completion = SaveCompletion(Some(self.clone()));
                    // Without a store the machine saves nothing.
                    if let Some(store) = &self.store {
                        store.save(&state, completion);
                    }
                }
                ReservationAction::Finish { token, outcome: Ok(effects) } => {
                    report(&subscribers, &effects, &token);
                }
                ReservationAction::Finish { token, outcome: Err(error) } => token.fail(error),
            }
        }
    }
}

/// Reports the effects of a command, which `token` keeps pending.
fn report(subscribers: &[Weak<dyn ReservationSubscriber>], effects: &Effects, token: &PendingGuard) {
    for subscriber in subscribers.iter().filter_map(Weak::upgrade) {
        if !effects.abort.is_empty() {
            subscriber.abort(&effects.abort, token);
        }
        if !effects.notices.is_empty() {
            subscriber.notify(&effects.notices);
        }
    }
}

impl SaveCompletion {
    /// The save ended; whether the state is on stable storage.
    pub fn finish(mut self, succeeded: bool) {
        self.complete(succeeded);
    }

    fn complete(&mut self, succeeded: bool) {
        if let Some(reservations) = self.0.take() {
            reservations.handle(ReservationEvent::Saved(succeeded));
        }
    }
}

impl Drop for SaveCompletion {
    fn drop(&mut self) {
        self.complete(false);
    }
}
