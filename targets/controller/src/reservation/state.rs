//! The pure state machine of registrations and the reservation of one namespace.

use block_io::Status;
use wire_nvme::reservation::{
    AcquireAction, PersistChange, RegisterAction, ReleaseAction, ReservationAcquire, ReservationRegister,
    ReservationRelease, ReservationType,
};

use crate::INVALID_FIELD;

/// A host identifier. A 64-bit identifier occupies the first eight bytes.
pub type HostId = [u8; 16];

/// Most registrants of a namespace. A change of the reservation visits each.
pub const REGISTRANTS_MAX: usize = 256;

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();

/// Command classes that reservations distinguish (Base 2.0, section 8.19, command behavior in the presence of
/// a reservation), as bits.
pub mod access {
    /// Commands that read: Read, Compare, Verify, the source of a Copy.
    pub const READ: u8 = 1;
    /// Commands that write, including Flush and Dataset Management.
    pub const WRITE: u8 = 2;
}

/// A registrant: a registered host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Identifier of the host.
    pub host: HostId,
    /// Its reservation key, never 0.
    pub key: u64,
}

/// The reservation of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveReservation {
    /// Reservation type.
    pub kind: ReservationType,
    /// The host that acquired it. With the All Registrants types every registrant is a holder; this is the
    /// oldest one.
    pub holder: HostId,
}

/// Registrations and the reservation of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReservationState {
    /// Number of successful changes of registrations (GEN).
    pub generation: u32,
    /// The reservation, if one is held.
    pub reservation: Option<ActiveReservation>,
    /// The registrants, oldest first.
    pub registrations: Vec<Registration>,
    /// The state persists through power loss (PTPL).
    pub persistent: bool,
}

/// A command that changes a [`ReservationState`], with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationCommand {
    /// Reservation Register: the current and the new key.
    Register(ReservationRegister, u64, u64),
    /// Reservation Acquire: the current key, and the one to preempt.
    Acquire(ReservationAcquire, u64, u64),
    /// Reservation Release: the current key.
    Release(ReservationRelease, u64),
}

/// The effects of a command on other hosts, besides the new state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Hosts to notify of Registration Preempted.
    pub preempted: Vec<HostId>,
    /// Hosts to notify of Reservation Released.
    pub released: Vec<HostId>,
    /// Hosts to notify of Reservation Preempted, after Clear.
    pub cleared: Vec<HostId>,
    /// Hosts whose I/O must be drained before the command completes.
    pub abort: Vec<HostId>,
}

const fn is_all_registrants(kind: ReservationType) -> bool {
    matches!(kind, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll)
}

/// The access that a reservation of this type denies to a host: bits of [`access`].
///
/// The table of Base 2.0, section 8.19: a holder has full access, as has a registrant unless the type is for
/// the holder only; other hosts may read with the Write Exclusive types.
pub const fn denied(kind: ReservationType, holder: bool, registrant: bool) -> u8 {
    use ReservationType::{
        ExclusiveAccess, ExclusiveAccessAll, ExclusiveAccessRegistrants, WriteExclusive, WriteExclusiveAll,
        WriteExclusiveRegistrants,
    };
    let for_registrants = !matches!(kind, WriteExclusive | ExclusiveAccess);
    if holder || (registrant && for_registrants) {
        return 0;
    }
    match kind {
        WriteExclusive | WriteExclusiveRegistrants | WriteExclusiveAll => access::WRITE,
        ExclusiveAccess | ExclusiveAccessRegistrants | ExclusiveAccessAll => access::READ | access::WRITE,
    }
}

impl ReservationState {
    /// The key of a host; `None` if it is not registered.
    pub fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrations
            .iter()
            .find(|registration| registration.host == *host)
            .map(|registration| registration.key)
    }

    /// Whether the host is a holder of the reservation.
    pub fn is_holder(&self, host: &HostId) -> bool {
        match self.reservation {
            Some(ActiveReservation { kind, .. }) if is_all_registrants(kind) => self.key_of(host).is_some(),
            Some(ActiveReservation { holder, .. }) => holder == *host,
            None => false,
        }
    }

    /// The access that is denied to a host: bits of [`access`].
    pub fn denied(&self, host: &HostId) -> u8 {
        self.reservation.map_or(0, |held| {
            let registrant = self.key_of(host).is_some();
            denied(held.kind, self.is_holder(host), registrant)
        })
    }

    /// Whether commands can produce this state. Validates a state that was loaded from a file.
    pub fn is_valid(&self) -> bool {
        let hosts: std::collections::BTreeSet<HostId> =
            self.registrations.iter().map(|registration| registration.host).collect();
        hosts.len() == self.registrations.len()
            && hosts.len() <= REGISTRANTS_MAX
            && self.registrations.iter().all(|registration| registration.key != 0)
            && self.reservation.is_none_or(|held| hosts.contains(&held.holder))
    }

    /// Executes a command of a host. A command that fails changes nothing.
    ///
    /// `can_persist` says whether the state can persist through power loss.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub fn apply(
        &mut self,
        host: HostId,
        command: &ReservationCommand,
        can_persist: bool,
    ) -> Result<Effects, Status> {
        match *command {
            ReservationCommand::Register(register, current, new) => {
                self.register(host, register, current, new, can_persist)
            }
            ReservationCommand::Acquire(acquire, current, preempt) => {
                self.check_key(&host, acquire.ignore_key, current)?;
                match acquire.action {
                    AcquireAction::Acquire => self.acquire(host, acquire.kind),
                    AcquireAction::Preempt => self.preempt(host, acquire.kind, preempt),
                    AcquireAction::PreemptAndAbort => {
                        let effects = self.preempt(host, acquire.kind, preempt)?;
                        Ok(Effects { abort: effects.preempted.clone(), ..effects })
                    }
                }
            }
            ReservationCommand::Release(release, current) => {
                self.check_key(&host, release.ignore_key, current)?;
                match release.action {
                    ReleaseAction::Release => self.release(host, release.kind),
                    ReleaseAction::Clear => Ok(self.clear(host)),
                }
            }
        }
    }

    /// Acquire and Release require a registrant and its key, and IEKEY must be clear (Base 2.0, sections 7.2
    /// and 7.4).
    fn check_key(&self, host: &HostId, ignore_key: bool, current: u64) -> Result<(), Status> {
        if ignore_key {
            return Err(INVALID_FIELD);
        }
        if self.key_of(host) == Some(current) { Ok(()) } else { Err(CONFLICT) }
    }

    /// Base 2.0, sections 7.3, 8.19.3 and 8.19.4.
    fn register(
        &mut self,
        host: HostId,
        register: ReservationRegister,
        current: u64,
        new: u64,
        can_persist: bool,
    ) -> Result<Effects, Status> {
        if register.persist == PersistChange::Persistent && !can_persist {
            return Err(INVALID_FIELD);
        }
        let registered = self.key_of(&host);
        let mut effects = Effects::default();
        match (register.action, registered) {
            // A key of 0 stands for no key.
            (RegisterAction::Register | RegisterAction::Replace, _) if new == 0 => return Err(INVALID_FIELD),
            (RegisterAction::Register, Some(key)) if key != new => return Err(CONFLICT),
            (RegisterAction::Register, Some(_)) => {}
            (RegisterAction::Register, None) => self.add_registrant(host, new)?,
            (RegisterAction::Replace, None) if register.ignore_key => self.add_registrant(host, new)?,
            (RegisterAction::Replace, Some(key)) if register.ignore_key || key == current => {
                for registration in
                    self.registrations.iter_mut().filter(|registration| registration.host == host)
                {
                    registration.key = new;
                }
            }
            (RegisterAction::Unregister, Some(key)) if register.ignore_key || key == current => {
                effects.released = self.remove_registrants(|registration| registration.host == host, &host).1;
            }
            (RegisterAction::Replace | RegisterAction::Unregister, _) => return Err(CONFLICT),
        }
        self.generation = self.generation.wrapping_add(1);
        match register.persist {
            PersistChange::None => {}
            PersistChange::Volatile => self.persistent = false,
            PersistChange::Persistent => self.persistent = true,
        }
        Ok(effects)
    }

    fn add_registrant(&mut self, host: HostId, key: u64) -> Result<(), Status> {
        if self.registrations.len() == REGISTRANTS_MAX {
            return Err(Status::INTERNAL_ERROR.do_not_retry());
        }
        self.registrations.push(Registration { host, key });
        Ok(())
    }

    /// Unregisters hosts. Returns these hosts, and the hosts to notify if that released the reservation;
    /// `by`, which sent the command, is not among them.
    fn remove_registrants(
        &mut self,
        which: impl Fn(&Registration) -> bool,
        by: &HostId,
    ) -> (Vec<HostId>, Vec<HostId>) {
        let removed = self
            .registrations
            .iter()
            .filter(|registration| which(registration))
            .map(|registration| registration.host)
            .collect();
        self.registrations.retain(|registration| !which(registration));
        let Some(held) = self.reservation else { return (removed, Vec::new()) };
        // An All Registrants reservation is held until the last registrant unregisters (Base 2.0, section
        // 8.19.4).
        let next = self.registrations.first().map(|registration| registration.host);
        match (self.key_of(&held.holder), next) {
            (Some(_), _) => {}
            (None, Some(holder)) if is_all_registrants(held.kind) => {
                self.reservation = Some(ActiveReservation { holder, ..held })
            }
            (None, _) => {
                self.reservation = None;
                return (removed, self.notified_of_release(held.kind, by));
            }
        }
        (removed, Vec::new())
    }

    /// The hosts to notify of a release: the remaining registrants, unless the type was for the holder only.
    fn notified_of_release(&self, kind: ReservationType, by: &HostId) -> Vec<HostId> {
        match kind {
            ReservationType::WriteExclusive | ReservationType::ExclusiveAccess => Vec::new(),
            _ => self.other_registrants(by),
        }
    }

    fn other_registrants(&self, by: &HostId) -> Vec<HostId> {
        self.registrations.iter().map(|registration| registration.host).filter(|host| host != by).collect()
    }

    /// Base 2.0, section 8.19.5.
    fn acquire(&mut self, host: HostId, kind: ReservationType) -> Result<Effects, Status> {
        match self.reservation {
            None => self.reservation = Some(ActiveReservation { kind, holder: host }),
            // Succeeds without a change.
            Some(held) if held.kind == kind && self.is_holder(&host) => {}
            Some(_) => return Err(CONFLICT),
        }
        Ok(Effects::default())
    }

    /// Base 2.0, section 8.19.7.
    fn preempt(&mut self, host: HostId, kind: ReservationType, victim: u64) -> Result<Effects, Status> {
        let previous = self.reservation;
        let takes_over = match previous {
            None => false,
            Some(held) if is_all_registrants(held.kind) => victim == 0,
            Some(held) => match self.key_of(&held.holder) {
                Some(key) if key == victim => true,
                _ if victim == 0 => return Err(INVALID_FIELD),
                _ => false,
            },
        };
        let mut effects = Effects::default();
        if takes_over {
            // Unregister all hosts, or those with that key, but not the host that sent the command.
            let all = victim == 0;
            self.reservation = None;
            let (removed, _) = self.remove_registrants(
                |registration| registration.host != host && (all || registration.key == victim),
                &host,
            );
            effects.preempted = removed;
            self.reservation = Some(ActiveReservation { kind, holder: host });
            if previous.is_some_and(|held| held.kind != kind) {
                effects.released = self.other_registrants(&host);
            }
        } else {
            if !self.registrations.iter().any(|registration| registration.key == victim) {
                return Err(CONFLICT);
            }
            let (removed, released) =
                self.remove_registrants(|registration| registration.key == victim, &host);
            effects.preempted = removed.into_iter().filter(|other| *other != host).collect();
            effects.released = released;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// Base 2.0, section 8.19.6.
    fn release(&mut self, host: HostId, kind: ReservationType) -> Result<Effects, Status> {
        let mut effects = Effects::default();
        match self.reservation {
            None => {}
            Some(held) if held.kind != kind => return Err(INVALID_FIELD),
            Some(held) if self.is_holder(&host) => {
                self.reservation = None;
                effects.released = self.notified_of_release(held.kind, &host);
            }
            // A registrant that is not a holder: succeeds without a change.
            Some(_) => {}
        }
        Ok(effects)
    }

    /// Base 2.0, section 8.19.8.
    fn clear(&mut self, host: HostId) -> Effects {
        let cleared = self.other_registrants(&host);
        self.registrations.clear();
        self.reservation = None;
        self.generation = self.generation.wrapping_add(1);
        Effects { cleared, ..Effects::default() }
    }
}
