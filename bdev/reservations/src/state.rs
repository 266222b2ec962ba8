//! The pure state: registrations and the reservation of one device, and the commands that change them.

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeSet;

use crate::{Registrant, RegistrantKind};

/// Most registrants of a device. A change of the reservation visits each.
pub const REGISTRANTS_MAX: usize = 256;

/// Command classes that reservations distinguish (NVMe Base 2.0, section 8.19; SPC-4, section 5.13.1), as bits.
pub mod access {
    /// Commands that read: Read, Compare, Verify, the source of a Copy.
    pub const READ: u8 = 1;
    /// Commands that write, including Flush and Dataset Management.
    pub const WRITE: u8 = 2;
}

/// Reservation types, the same six in NVMe and SPC-4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationType {
    /// Others may read.
    WriteExclusive,
    /// Others have no access.
    ExclusiveAccess,
    /// Registrants have full access, others may read.
    WriteExclusiveRegistrants,
    /// Registrants have full access, others have none.
    ExclusiveAccessRegistrants,
    /// Every registrant is a holder, others may read.
    WriteExclusiveAll,
    /// Every registrant is a holder, others have no access.
    ExclusiveAccessAll,
}

/// A registrant and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Who is registered.
    pub registrant: Registrant,
    /// Its reservation key, never 0.
    pub key: u64,
}

/// The reservation of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveReservation {
    /// Reservation type.
    pub kind: ReservationType,
    /// The registrant that acquired it. With the All Registrants types every registrant is a holder; this is the
    /// oldest one.
    pub holder: Registrant,
}

/// Registrations and the reservation of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationState {
    /// Number of successful commands that may change registrations: NVMe's GEN, SPC-4's PRgeneration. Acquiring and
    /// releasing a reservation do not count.
    pub generation: u32,
    /// The reservation, if one is held.
    pub reservation: Option<ActiveReservation>,
    /// The registrants, oldest first.
    pub registrations: Vec<Registration>,
    /// The state persists through power loss (NVMe's PTPL, SPC-4's APTPL).
    pub persistent: bool,
}

/// A command that changes a [`ReservationState`].
///
/// `key` is the key of the registrant that sends the command, except in `Register` and `Replace`, where it is the new
/// one. `persist` changes whether the state persists through power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationCommand {
    /// Registers; succeeds again with the same key.
    Register {
        /// The new key.
        key: u64,
        /// New persistence.
        persist: Option<bool>,
    },
    /// Replaces the key of a registrant. Without `expected` (Register and Ignore Existing Key) it also registers.
    Replace {
        /// The current key.
        expected: Option<u64>,
        /// The new key.
        key: u64,
        /// New persistence.
        persist: Option<bool>,
    },
    /// Removes the registration.
    Unregister {
        /// The current key; `None` ignores it.
        expected: Option<u64>,
        /// New persistence.
        persist: Option<bool>,
    },
    /// Acquires the reservation (SCSI: RESERVE).
    Acquire {
        /// Key of the registrant.
        key: u64,
        /// Type of the reservation.
        kind: ReservationType,
    },
    /// Removes the registrants with a key, and takes over their reservation.
    Preempt {
        /// Key of the registrant.
        key: u64,
        /// Key of the registrants to remove; 0 with an All Registrants reservation: all others.
        victim: u64,
        /// Type of the new reservation.
        kind: ReservationType,
        /// Abort the I/O of the removed registrants.
        abort: bool,
    },
    /// Releases the reservation.
    Release {
        /// Key of the registrant.
        key: u64,
        /// Type of the reservation.
        kind: ReservationType,
    },
    /// Removes the reservation and all registrations.
    Clear {
        /// Key of the registrant.
        key: u64,
    },
    /// Registers another registrant, or changes its key, and moves the reservation to it (REGISTER AND MOVE). Only with
    /// [`ReservationState::apply_with`], which is given the other one.
    Move {
        /// Key of the registrant, which is the holder.
        key: u64,
        /// Key of the other one.
        new_key: u64,
        /// Remove the registration of the former holder.
        unregister: bool,
        /// New persistence.
        persist: Option<bool>,
    },
    /// Changes only the persistence; anyone may.
    SetPersistent(bool),
}

/// Why a command fails. A command that fails changes nothing, except with [`NotDrained`](Self::NotDrained).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReservationError {
    /// The reservation, or a key that is not the expected one, forbids it (both protocols: RESERVATION CONFLICT).
    #[error("reservation conflict")]
    Conflict,
    /// The new key is 0, or the key to preempt is 0 and the reservation is not of an All Registrants type.
    #[error("a reservation key of 0")]
    ZeroKey,
    /// Release names another type than the reservation's.
    #[error("the reservation has another type")]
    WrongType,
    /// There are [`REGISTRANTS_MAX`] registrants.
    #[error("too many registrants")]
    TooManyRegistrants,
    /// Persistence through power loss was requested of a device that has no file for it.
    #[error("reservations of this device cannot persist through power loss")]
    CannotPersist,
    /// The change could not be written to stable storage and was undone.
    #[error("the change could not be saved")]
    NotSaved,
    /// The preemption is in force, but I/O of a preempted registrant did not end in time: it may still reach the medium.
    #[error("I/O of a preempted registrant did not end in time")]
    NotDrained,
    /// Too many commands wait for stable storage.
    #[error("too many commands wait")]
    Busy,
}

/// What a registrant loses by the command of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossEvent {
    /// Its registration was removed by Preempt (SCSI: REGISTRATIONS PREEMPTED).
    RegistrationPreempted,
    /// The reservation was released, or its type changed (SCSI: RESERVATIONS RELEASED).
    ReservationReleased,
    /// Its registration and the reservation were removed by Clear (SCSI: RESERVATIONS PREEMPTED).
    ReservationPreempted,
}

/// A registrant to notify, and of what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationNotice {
    /// Whom to notify.
    pub registrant: Registrant,
    /// Of what.
    pub event: LossEvent,
}

/// The effects of a command on others, besides the new state. The sender of the command is never among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Notices, at most one for a registrant.
    pub notices: Vec<ReservationNotice>,
    /// Registrants whose I/O must be aborted or complete before the command completes.
    pub abort: Vec<Registrant>,
}

impl ReservationType {
    /// All types.
    pub const ALL: [ReservationType; 6] = [
        ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrants,
        ReservationType::ExclusiveAccessRegistrants,
        ReservationType::WriteExclusiveAll,
        ReservationType::ExclusiveAccessAll,
    ];

    /// Whether every registrant is a holder.
    pub const fn is_all_registrants(self) -> bool {
        matches!(self, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll)
    }

    /// Whether only the holder has full access, and no other registrant.
    pub const fn is_for_holder_only(self) -> bool {
        matches!(self, ReservationType::WriteExclusive | ReservationType::ExclusiveAccess)
    }

    /// The access that a reservation of this type denies: bits of [`access`]. A holder has full access, as has a
    /// registrant unless the type is for the holder only; others may read with the Write Exclusive types.
    pub const fn denied(self, holder: bool, registrant: bool) -> u8 {
        if holder || (registrant && !self.is_for_holder_only()) {
            return 0;
        }
        match self {
            ReservationType::WriteExclusive
            | ReservationType::WriteExclusiveRegistrants
            | ReservationType::WriteExclusiveAll => access::WRITE,
            ReservationType::ExclusiveAccess
            | ReservationType::ExclusiveAccessRegistrants
            | ReservationType::ExclusiveAccessAll => access::READ | access::WRITE,
        }
    }
}

impl ReservationCommand {
    /// The persistence that the command asks for.
    pub fn persist(&self) -> Option<bool> {
        match *self {
            ReservationCommand::Register { persist, .. }
            | ReservationCommand::Replace { persist, .. }
            | ReservationCommand::Unregister { persist, .. }
            | ReservationCommand::Move { persist, .. } => persist,
            ReservationCommand::SetPersistent(persist) => Some(persist),
            _ => None,
        }
    }
}

impl Effects {
    fn notify(&mut self, registrants: Vec<Registrant>, event: LossEvent) {
        let notices = registrants.into_iter().map(|registrant| ReservationNotice { registrant, event });
        self.notices.extend(notices);
    }

    /// The registrants to notify of an event.
    pub fn notified(&self, event: LossEvent) -> Vec<Registrant> {
        let notices = self.notices.iter().filter(|notice| notice.event == event);
        notices.map(|notice| notice.registrant.clone()).collect()
    }
}

impl ReservationState {
    /// The key of a registrant; `None` if it is not registered.
    pub fn key_of(&self, registrant: &Registrant) -> Option<u64> {
        let mut found = self.registrations.iter().filter(|one| one.registrant == *registrant);
        found.next().map(|one| one.key)
    }

    /// Whether it is a holder of the reservation.
    pub fn is_holder(&self, registrant: &Registrant) -> bool {
        match &self.reservation {
            Some(held) if held.kind.is_all_registrants() => self.key_of(registrant).is_some(),
            Some(held) => held.holder == *registrant,
            None => false,
        }
    }

    /// The access that is denied to a registrant, or to anyone else: bits of [`access`].
    pub fn denied(&self, registrant: &Registrant) -> u8 {
        self.reservation.as_ref().map_or(0, |held| {
            let registered = self.key_of(registrant).is_some();
            held.kind.denied(self.is_holder(registrant), registered)
        })
    }

    /// The access that is denied to initiators that are not registered: bits of [`access`].
    pub fn denied_to_others(&self) -> u8 {
        self.reservation.as_ref().map_or(0, |held| held.kind.denied(false, false))
    }

    /// Whether commands can produce this state. Validates a state that was loaded from a file.
    pub fn is_valid(&self) -> bool {
        let registrants: BTreeSet<&Registrant> =
            self.registrations.iter().map(|registration| &registration.registrant).collect();
        registrants.len() == self.registrations.len()
            && registrants.len() <= REGISTRANTS_MAX
            && self.registrations.iter().all(|registration| registration.key != 0)
            && self.reservation.as_ref().is_none_or(|held| registrants.contains(&held.holder))
    }

    /// Executes a command of a registrant, or of one that becomes it. A command that fails changes nothing.
    ///
    /// # Errors
    /// Why the command fails.
    pub fn apply(
        &mut self,
        registrant: &Registrant,
        command: &ReservationCommand,
    ) -> Result<Effects, ReservationError> {
        let effects = match *command {
            ReservationCommand::Register { key, .. } => self.register(registrant, key)?,
            ReservationCommand::Replace { expected, key, .. } => self.replace(registrant, expected, key)?,
            ReservationCommand::Unregister { expected, .. } => self.unregister(registrant, expected)?,
            ReservationCommand::Acquire { key, kind } => {
                self.check_key(registrant, key)?;
                self.acquire(registrant, kind)?
            }
            ReservationCommand::Preempt { key, victim, kind, abort } => {
                self.check_key(registrant, key)?;
                self.preempt(registrant, kind, victim, abort)?
            }
            ReservationCommand::Release { key, kind } => {
                self.check_key(registrant, key)?;
                self.release(registrant, kind)?
            }
            ReservationCommand::Clear { key } => {
                self.check_key(registrant, key)?;
                self.clear(registrant)
            }
            // It has to name another registrant.
            ReservationCommand::Move { .. } => return Err(ReservationError::Conflict),
            ReservationCommand::SetPersistent(_) => Effects::default(),
        };
        self.persistent = command.persist().unwrap_or(self.persistent);
        Ok(effects)
    }

    /// As [`apply`](Self::apply), for a command that concerns `others` too: commands that register apply to each of them,
    /// or to none at all, and [`ReservationCommand::Move`] moves the reservation to the first.
    ///
    /// # Errors
    /// Why the command fails.
    pub fn apply_with(
        &mut self,
        registrant: &Registrant,
        others: &[Registrant],
        command: &ReservationCommand,
    ) -> Result<Effects, ReservationError> {
        let Some(first) = others.first() else { return self.apply(registrant, command) };
        let mut changed = self.clone();
        let mut effects = match *command {
            ReservationCommand::Move { key, new_key, unregister, .. } => {
                changed.check_key(registrant, key)?;
                changed.move_to(registrant, first, new_key, unregister)?;
                changed.persistent = command.persist().unwrap_or(changed.persistent);
                Effects::default()
            }
            _ => changed.apply(registrant, command)?,
        };
        let registers = matches!(
            command,
            ReservationCommand::Register { .. }
                | ReservationCommand::Replace { .. }
                | ReservationCommand::Unregister { .. }
        );
        for other in others.iter().filter(|_| registers) {
            // One that is not registered has nothing to remove.
            let is_unregister = matches!(command, ReservationCommand::Unregister { .. });
            if is_unregister && changed.key_of(other).is_none() {
                continue;
            }
            effects.notices.extend(changed.apply(other, command)?.notices);
        }
        // They are all the sender.
        let is_sender = |one: &Registrant| registers && others.contains(one) || one == registrant;
        effects.notices.retain(|notice| !is_sender(&notice.registrant));
        changed.generation = self.generation.wrapping_add(1);
        *self = changed;
        Ok(effects)
    }

    /// SPC-4, section 5.13.8.
    fn move_to(
        &mut self,
        registrant: &Registrant,
        to: &Registrant,
        new_key: u64,
        unregister: bool,
    ) -> Result<(), ReservationError> {
        match &self.reservation {
            Some(held) if !held.kind.is_all_registrants() && held.holder == *registrant => {}
            _ => return Err(ReservationError::Conflict),
        }
        if new_key == 0 {
            return Err(ReservationError::ZeroKey);
        }
        match self.registrations.iter_mut().find(|one| one.registrant == *to) {
            Some(found) => found.key = new_key,
            None => self.add_registration(to, new_key)?,
        }
        if let Some(held) = &mut self.reservation {
            held.holder = to.clone();
        }
        if unregister {
            self.registrations.retain(|one| one.registrant != *registrant);
        }
        Ok(())
    }

    /// Commands other than those that register require a registrant and its key.
    fn check_key(&self, registrant: &Registrant, key: u64) -> Result<(), ReservationError> {
        if self.key_of(registrant) == Some(key) { Ok(()) } else { Err(ReservationError::Conflict) }
    }

    fn count_change(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    /// NVMe Base 2.0, sections 7.3 and 8.19.3; SPC-4, section 5.13.7.
    fn register(&mut self, registrant: &Registrant, key: u64) -> Result<Effects, ReservationError> {
        match self.key_of(registrant) {
            _ if key == 0 => return Err(ReservationError::ZeroKey),
            Some(current) if current != key => return Err(ReservationError::Conflict),
            Some(_) => {}
            None => self.add_registration(registrant, key)?,
        }
        self.count_change();
        Ok(Effects::default())
    }

    fn replace(
        &mut self,
        registrant: &Registrant,
        expected: Option<u64>,
        key: u64,
    ) -> Result<Effects, ReservationError> {
        if key == 0 {
            return Err(ReservationError::ZeroKey);
        }
        let registration = self.registrations.iter_mut().find(|one| one.registrant == *registrant);
        match (registration, expected) {
            (None, None) => self.add_registration(registrant, key)?,
            (Some(found), expected) if expected.is_none_or(|expected| expected == found.key) => {
                found.key = key;
            }
            _ => return Err(ReservationError::Conflict),
        }
        self.count_change();
        Ok(Effects::default())
    }

    /// NVMe Base 2.0, section 8.19.4; SPC-4, section 5.13.11.3.
    fn unregister(
        &mut self,
        registrant: &Registrant,
        expected: Option<u64>,
    ) -> Result<Effects, ReservationError> {
        match self.key_of(registrant) {
            Some(key) if expected.is_none_or(|expected| expected == key) => {}
            _ => return Err(ReservationError::Conflict),
        }
        let mut effects = Effects::default();
        let (_, released) = self.remove_registrations(|one| one.registrant == *registrant, registrant);
        effects.notify(released, LossEvent::ReservationReleased);
        self.count_change();
        Ok(effects)
    }

    fn add_registration(&mut self, registrant: &Registrant, key: u64) -> Result<(), ReservationError> {
        if self.registrations.len() == REGISTRANTS_MAX {
            return Err(ReservationError::TooManyRegistrants);
        }
        self.registrations.push(Registration { registrant: registrant.clone(), key });
        Ok(())
    }

    /// Removes registrations. Returns whose, and whom to notify if that released the reservation; `by`, which sent the
    /// command, is not among the latter.
    fn remove_registrations(
        &mut self,
        which: impl Fn(&Registration) -> bool,
        by: &Registrant,
    ) -> (Vec<Registrant>, Vec<Registrant>) {
        let removed =
            self.registrations.iter().filter(|one| which(one)).map(|one| one.registrant.clone()).collect();
        self.registrations.retain(|one| !which(one));
        let Some(held) = self.reservation.clone() else { return (removed, Vec::new()) };
        if self.key_of(&held.holder).is_some() {
            return (removed, Vec::new());
        }
        // An All Registrants reservation is held until the last registrant unregisters.
        match self.registrations.first() {
            Some(next) if held.kind.is_all_registrants() => {
                self.reservation =
                    Some(ActiveReservation { holder: next.registrant.clone(), kind: held.kind });
                (removed, Vec::new())
            }
            _ => {
                self.reservation = None;
                (removed, self.notified_of_release(held.kind, by))
            }
        }
    }

    /// Whom to notify of a release: the remaining registrants, unless the type was for the holder only.
    fn notified_of_release(&self, kind: ReservationType, by: &Registrant) -> Vec<Registrant> {
        if kind.is_for_holder_only() { Vec::new() } else { self.other_registrants(by) }
    }

    fn other_registrants(&self, by: &Registrant) -> Vec<Registrant> {
        let registrants = self.registrations.iter().map(|one| &one.registrant);
        registrants.filter(|registrant| *registrant != by).cloned().collect()
    }

    /// NVMe Base 2.0, section 8.19.5; SPC-4, section 5.13.9.
    fn acquire(
        &mut self,
        registrant: &Registrant,
        kind: ReservationType,
    ) -> Result<Effects, ReservationError> {
        match &self.reservation {
            None => self.reservation = Some(ActiveReservation { kind, holder: registrant.clone() }),
            // Succeeds without a change.
            Some(held) if held.kind == kind && self.is_holder(registrant) => {}
            Some(_) => return Err(ReservationError::Conflict),
        }
        Ok(Effects::default())
    }

    /// NVMe Base 2.0, section 8.19.7; SPC-4, sections 5.13.11.4 and 5.13.11.5.
    fn preempt(
        &mut self,
        registrant: &Registrant,
        kind: ReservationType,
        victim: u64,
        abort: bool,
    ) -> Result<Effects, ReservationError> {
        let previous = self.reservation.as_ref().map(|held| held.kind);
        let takes_over = match &self.reservation {
            None => false,
            Some(held) if held.kind.is_all_registrants() => victim == 0,
            Some(_) if victim == 0 => return Err(ReservationError::ZeroKey),
            Some(held) => self.key_of(&held.holder) == Some(victim),
        };
        let mut effects = Effects::default();
        let preempted: Vec<Registrant> = if takes_over {
            // Removes all registrants, or those with that key, but not the one that sent the command.
            self.reservation = None;
            let (removed, _) = self.remove_registrations(
                |one| one.registrant != *registrant && (victim == 0 || one.key == victim),
                registrant,
            );
            self.reservation = Some(ActiveReservation { kind, holder: registrant.clone() });
            if previous != Some(kind) {
                effects.notify(self.other_registrants(registrant), LossEvent::ReservationReleased);
            }
            removed
        } else {
            if !self.registrations.iter().any(|one| one.key == victim) {
                return Err(ReservationError::Conflict);
            }
            let (removed, released) = self.remove_registrations(|one| one.key == victim, registrant);
            effects.notify(released, LossEvent::ReservationReleased);
            removed.into_iter().filter(|other| other != registrant).collect()
        };
        if abort {
            effects.abort.clone_from(&preempted);
        }
        effects.notify(preempted, LossEvent::RegistrationPreempted);
        self.count_change();
        Ok(effects)
    }

    /// NVMe Base 2.0, section 8.19.6; SPC-4, section 5.13.11.2.
    fn release(
        &mut self,
        registrant: &Registrant,
        kind: ReservationType,
    ) -> Result<Effects, ReservationError> {
        let mut effects = Effects::default();
        let Some(held) = &self.reservation else { return Ok(effects) };
        let is_holder = self.is_holder(registrant);
        // SPC-4 compares the type only if a holder releases.
        let ignores_type = registrant.kind() == RegistrantKind::ScsiNexus && !is_holder;
        let held = held.kind;
        if held != kind && !ignores_type {
            return Err(ReservationError::WrongType);
        }
        // A registrant that is not a holder succeeds without a change.
        if is_holder {
            self.reservation = None;
            effects.notify(self.notified_of_release(held, registrant), LossEvent::ReservationReleased);
        }
        Ok(effects)
    }

    /// NVMe Base 2.0, section 8.19.8; SPC-4, section 5.13.11.6.
    fn clear(&mut self, registrant: &Registrant) -> Effects {
        let mut effects = Effects::default();
        effects.notify(self.other_registrants(registrant), LossEvent::ReservationPreempted);
        self.registrations.clear();
        self.reservation = None;
        self.count_change();
        effects
    }
}
