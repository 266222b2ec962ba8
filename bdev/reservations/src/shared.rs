//! The reservations of one device, shared by every target, subsystem and logical unit that exports it.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::{
    ChangeWaker, Effects, PendingChange, PendingGuard, Registrant, ReservationAction, ReservationCommand,
    ReservationError, ReservationEvent, ReservationMachine, ReservationNotice, ReservationState, access,
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

/// The device itself: learns what reservations deny to users that are no registrants, and cannot become one.
pub trait ReservedDevice: Send + Sync + fmt::Debug {
    /// Replaces what is denied to them: bits of [`access`]. Called with the lock of the reservations, in the
    /// order of their changes: it stores and returns.
    fn set_denied(&self, denied: u8);
}

/// Registrations and the reservation of one device.
///
/// It owns the [`ReservationMachine`] and a [`DenyMask`] for each registrant that has a connection. A change runs under
/// the lock: it puts the new state into force and stores the masks, of the [`ReservedDevice`] too. Saves,
/// notices and aborts follow after the lock, on the thread that sent the command or that completed the save.
/// I/O costs one atomic load and takes no lock.
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
    devices: Vec<Weak<dyn ReservedDevice>>,
    /// Who reserved a logical unit of the device by SPC-2's RESERVE, and how many such units there are.
    unit_holder: Option<(Registrant, usize)>,
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
        let inner = ReservationsInner {
            machine,
            deny_masks: Vec::new(),
            subscribers: Vec::new(),
            devices: Vec::new(),
            unit_holder: None,
        };
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
        let mask = Arc::new(DenyMask(AtomicU8::new(inner.denied(Some(registrant)))));
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

    /// Has a device obey the reservations, from now on until [`close`](Self::close).
    pub fn attach_device(&self, device: &Arc<impl ReservedDevice + 'static>) {
        let mut inner = self.lock();
        let device: Arc<dyn ReservedDevice> = device.clone();
        device.set_denied(inner.denied(None));
        let is_other = |one: &Weak<dyn ReservedDevice>| {
            one.strong_count() > 0 && !std::ptr::addr_eq(one.as_ptr(), Arc::as_ptr(&device))
        };
        inner.devices.retain(is_other);
        inner.devices.push(Arc::downgrade(&device));
    }

    /// No target uses the reservations any more: the device is as without a reservation. Returns it: its last
    /// reference is not to be dropped under a lock.
    pub fn close(&self) -> Vec<Arc<dyn ReservedDevice>> {
        let devices = std::mem::take(&mut self.lock().devices);
        let devices: Vec<_> = devices.iter().filter_map(Weak::upgrade).collect();
        devices.iter().for_each(|device| device.set_denied(0));
        devices
    }

    /// Reserves a logical unit of the device for a registrant (SPC-2, section 5.5.1, RESERVE): no other
    /// initiator has access to the device, by whatever protocol, and [`execute`](Self::execute) fails.
    /// Returns whether it is reserved: neither registrations nor a unit that another one reserved may be
    /// there. Each call needs a [`release_unit`](Self::release_unit).
    pub fn reserve_unit(&self, registrant: &Registrant) -> bool {
        let mut inner = self.lock();
        if !inner.machine.state().registrations.is_empty() {
            return false;
        }
        match &mut inner.unit_holder {
            Some((holder, _)) if holder != registrant => return false,
            Some((_, units)) => *units += 1,
            none => *none = Some((registrant.clone(), 1)),
        }
        let _devices = store_denied(inner);
        true
    }

    /// Ends the reservation of a unit by [`reserve_unit`](Self::reserve_unit).
    pub fn release_unit(&self) {
        let mut inner = self.lock();
        inner.unit_holder = match inner.unit_holder.take() {
            Some((holder, units)) if units > 1 => Some((holder, units - 1)),
            _ => None,
        };
        let _devices = store_denied(inner);
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
        if self.lock().unit_holder.is_some() {
            token.fail(ReservationError::Conflict);
            return pending;
        }
        self.handle(ReservationEvent::Command { registrant: registrant.clone(), others, command, token });
        pending
    }

    fn lock(&self) -> MutexGuard<'_, ReservationsInner> {
        sync::lock(&self.inner)
    }

    fn handle(self: &Arc<Self>, event: ReservationEvent<PendingGuard>) {
        let mut actions = Vec::new();
        let mut inner = self.lock();
        inner.machine.handle(event, &mut actions);
        let subscribers = inner.subscribers.clone();
        let _devices = store_denied(inner);
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

impl ReservationsInner {
    /// The access that is denied to a registrant, or one that could become it; with `None`, to anyone else.
    fn denied(&self, registrant: Option<&Registrant>) -> u8 {
        match &self.unit_holder {
            Some((holder, _)) if Some(holder) != registrant => access::READ | access::WRITE,
            _ => registrant.map_or_else(
                || self.machine.state().denied_to_others(),
                |registrant| self.machine.state().denied(registrant),
            ),
        }
    }
}

/// Stores what is denied after a change, where I/O reads it, and releases the lock. The last reference to a
/// device is not dropped under it, since its module's end may be anything.
fn store_denied(inner: MutexGuard<'_, ReservationsInner>) -> Vec<Arc<dyn ReservedDevice>> {
    for (registrant, mask) in &inner.deny_masks {
        if let Some(mask) = mask.upgrade() {
            mask.0.store(inner.denied(Some(registrant)), Ordering::Release);
        }
    }
    let denied = inner.denied(None);
    let devices: Vec<_> = inner.devices.iter().filter_map(Weak::upgrade).collect();
    devices.iter().for_each(|device| device.set_denied(denied));
    devices
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
