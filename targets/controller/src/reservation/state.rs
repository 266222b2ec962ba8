//! What is registered and reserved on one namespace, and what each command makes of it: pure decisions.

use ring::Status;
use wire_nvme::reservation::{
    Acquire, AcquireAction, PersistChange, Register, RegisterAction, Release, ReleaseAction, ReservationType,
};

use crate::INVALID_FIELD;

/// A host: its identifier, of which a 64-bit one takes the first eight bytes.
pub type HostId = [u8; 16];

/// Most hosts that can be registered with a namespace. Each is looked at when a reservation changes.
pub const REGISTRANTS_MAX: usize = 256;

const CONFLICT: Status = Status::RESERVATION_CONFLICT.do_not_retry();

/// Classes of commands that a reservation tells apart (Base 2.0, section 8.19, command behavior in the
/// presence of a reservation), as bits.
pub mod access {
    /// Commands that read: Read, Compare, Verify, the source of a Copy.
    pub const READ: u8 = 1;
    /// Commands that write, and Flush and Dataset Management, which count as such.
    pub const WRITE: u8 = 2;
}

/// A registered host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The host.
    pub host: HostId,
    /// Its key, never 0.
    pub key: u64,
}

/// A reservation that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Its type.
    pub kind: ReservationType,
    /// Who acquired it. Of the types for all registrants each registrant is a holder, and this is the oldest.
    pub holder: HostId,
}

/// Registrations and the reservation of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Counts successful changes of registrations (GEN).
    pub generation: u32,
    /// The reservation, if there is one.
    pub held: Option<Held>,
    /// Who is registered, oldest first.
    pub registrations: Vec<Registration>,
    /// All of it survives a power loss.
    pub persistent: bool,
}

/// A command that changes a [`State`], with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reservation Register: the current and the new key.
    Register(Register, u64, u64),
    /// Reservation Acquire: the current key, and the one to preempt.
    Acquire(Acquire, u64, u64),
    /// Reservation Release: the current key.
    Release(Release, u64),
}

/// What comes of a command beside the new state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Hosts to tell that their registration was preempted.
    pub preempted: Vec<HostId>,
    /// Hosts to tell that the reservation was released.
    pub released: Vec<HostId>,
    /// Hosts to tell that reservation and registrations were cleared.
    pub cleared: Vec<HostId>,
    /// Hosts whose commands are to end before this one is answered.
    pub abort: Vec<HostId>,
}

const fn is_for_all(kind: ReservationType) -> bool {
    matches!(kind, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll)
}

/// What a host may not do while a reservation of this type is held.
///
/// The table of Base 2.0, section 8.19: holders may do everything; registrants too, unless the type is for the
/// holder alone; everyone may read where the type is Write Exclusive.
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

impl State {
    /// The key of a host, if it is registered.
    pub fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrations.iter().find(|one| one.host == *host).map(|one| one.key)
    }

    /// Whether a host holds the reservation.
    pub fn is_holder(&self, host: &HostId) -> bool {
        match self.held {
            Some(Held { kind, .. }) if is_for_all(kind) => self.key_of(host).is_some(),
            Some(Held { holder, .. }) => holder == *host,
            None => false,
        }
    }

    /// What a host may not do: bits of [`access`].
    pub fn denied(&self, host: &HostId) -> u8 {
        self.held.map_or(0, |held| {
            let registrant = self.key_of(host).is_some();
            denied(held.kind, self.is_holder(host), registrant)
        })
    }

    /// Whether the state could have come of commands: what a file says is checked with it.
    pub fn is_sound(&self) -> bool {
        let hosts: std::collections::BTreeSet<HostId> =
            self.registrations.iter().map(|one| one.host).collect();
        hosts.len() == self.registrations.len()
            && hosts.len() <= REGISTRANTS_MAX
            && self.registrations.iter().all(|one| one.key != 0)
            && self.held.is_none_or(|held| hosts.contains(&held.holder))
    }

    /// Does what a host's command asks for. Nothing has changed when it fails.
    ///
    /// `keeps` says whether the state can be made to survive a power loss.
    ///
    /// # Errors
    /// The status to complete the command with.
    pub fn apply(&mut self, host: HostId, command: &Command, keeps: bool) -> Result<Effects, Status> {
        match *command {
            Command::Register(register, current, new) => self.register(host, register, current, new, keeps),
            Command::Acquire(acquire, current, preempt) => {
                self.check(&host, acquire.ignore_key, current)?;
                match acquire.action {
                    AcquireAction::Acquire => self.acquire(host, acquire.kind),
                    AcquireAction::Preempt => self.preempt(host, acquire.kind, preempt),
                    AcquireAction::PreemptAndAbort => {
                        let effects = self.preempt(host, acquire.kind, preempt)?;
                        Ok(Effects { abort: effects.preempted.clone(), ..effects })
                    }
                }
            }
            Command::Release(release, current) => {
                self.check(&host, release.ignore_key, current)?;
                match release.action {
                    ReleaseAction::Release => self.release(host, release.kind),
                    ReleaseAction::Clear => Ok(self.clear(host)),
                }
            }
        }
    }

    /// What Acquire and Release have in common: only registrants, and only with their key. IEKEY is to be clear
    /// (Base 2.0, sections 7.2 and 7.4).
    fn check(&self, host: &HostId, ignore_key: bool, current: u64) -> Result<(), Status> {
        if ignore_key {
            return Err(INVALID_FIELD);
        }
        if self.key_of(host) == Some(current) { Ok(()) } else { Err(CONFLICT) }
    }

    /// Base 2.0, sections 7.3, 8.19.3 and 8.19.4.
    fn register(
        &mut self,
        host: HostId,
        register: Register,
        current: u64,
        new: u64,
        keeps: bool,
    ) -> Result<Effects, Status> {
        if register.persist == PersistChange::Persistent && !keeps {
            return Err(INVALID_FIELD);
        }
        let known = self.key_of(&host);
        let mut effects = Effects::default();
        match (register.action, known) {
            // A key of 0 is how no key is written.
            (RegisterAction::Register | RegisterAction::Replace, _) if new == 0 => return Err(INVALID_FIELD),
            (RegisterAction::Register, Some(key)) if key != new => return Err(CONFLICT),
            (RegisterAction::Register, Some(_)) => {}
            (RegisterAction::Register, None) => self.enter(host, new)?,
            (RegisterAction::Replace, None) if register.ignore_key => self.enter(host, new)?,
            (RegisterAction::Replace, Some(key)) if register.ignore_key || key == current => {
                for one in self.registrations.iter_mut().filter(|one| one.host == host) {
                    one.key = new;
                }
            }
            (RegisterAction::Unregister, Some(key)) if register.ignore_key || key == current => {
                effects.released = self.remove(|one| one.host == host, &host).1;
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

    fn enter(&mut self, host: HostId, key: u64) -> Result<(), Status> {
        if self.registrations.len() == REGISTRANTS_MAX {
            return Err(Status::INTERNAL_ERROR.do_not_retry());
        }
        self.registrations.push(Registration { host, key });
        Ok(())
    }

    /// Unregisters hosts; which those were, and whom to tell that a reservation went with them. `by` is not told.
    fn remove(&mut self, which: impl Fn(&Registration) -> bool, by: &HostId) -> (Vec<HostId>, Vec<HostId>) {
        let gone = self.registrations.iter().filter(|one| which(one)).map(|one| one.host).collect();
        self.registrations.retain(|one| !which(one));
        let Some(held) = self.held else { return (gone, Vec::new()) };
        // A reservation for all registrants lasts as long as there is one (Base 2.0, section 8.19.4).
        let next = self.registrations.first().map(|one| one.host);
        match (self.key_of(&held.holder), next) {
            (Some(_), _) => {}
            (None, Some(holder)) if is_for_all(held.kind) => self.held = Some(Held { holder, ..held }),
            (None, _) => {
                self.held = None;
                return (gone, self.told_of_release(held.kind, by));
            }
        }
        (gone, Vec::new())
    }

    /// Whom a release is told to: the registrants that are left, where the type concerned registrants.
    fn told_of_release(&self, kind: ReservationType, by: &HostId) -> Vec<HostId> {
        match kind {
            ReservationType::WriteExclusive | ReservationType::ExclusiveAccess => Vec::new(),
            _ => self.others(by),
        }
    }

    fn others(&self, than: &HostId) -> Vec<HostId> {
        self.registrations.iter().map(|one| one.host).filter(|host| host != than).collect()
    }

    /// Base 2.0, section 8.19.5.
    fn acquire(&mut self, host: HostId, kind: ReservationType) -> Result<Effects, Status> {
        match self.held {
            None => self.held = Some(Held { kind, holder: host }),
            // Not an error, and not a change.
            Some(held) if held.kind == kind && self.is_holder(&host) => {}
            Some(_) => return Err(CONFLICT),
        }
        Ok(Effects::default())
    }

    /// Base 2.0, section 8.19.7.
    fn preempt(&mut self, host: HostId, kind: ReservationType, victim: u64) -> Result<Effects, Status> {
        let was = self.held;
        let takes_over = match was {
            None => false,
            Some(held) if is_for_all(held.kind) => victim == 0,
            Some(held) => match self.key_of(&held.holder) {
                Some(key) if key == victim => true,
                _ if victim == 0 => return Err(INVALID_FIELD),
                _ => false,
            },
        };
        let mut effects = Effects::default();
        if takes_over {
            // All or those of that key, but not who asks for it.
            let everyone = victim == 0;
            self.held = None;
            let (gone, _) = self.remove(|one| one.host != host && (everyone || one.key == victim), &host);
            effects.preempted = gone;
            self.held = Some(Held { kind, holder: host });
            if was.is_some_and(|held| held.kind != kind) {
                effects.released = self.others(&host);
            }
        } else {
            if !self.registrations.iter().any(|one| one.key == victim) {
                return Err(CONFLICT);
            }
            let (gone, released) = self.remove(|one| one.key == victim, &host);
            effects.preempted = gone.into_iter().filter(|one| *one != host).collect();
            effects.released = released;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// Base 2.0, section 8.19.6.
    fn release(&mut self, host: HostId, kind: ReservationType) -> Result<Effects, Status> {
        let mut effects = Effects::default();
        match self.held {
            None => {}
            Some(held) if held.kind != kind => return Err(INVALID_FIELD),
            Some(held) if self.is_holder(&host) => {
                self.held = None;
                effects.released = self.told_of_release(held.kind, &host);
            }
            // Who does not hold it has nothing to release, and that is no error.
            Some(_) => {}
        }
        Ok(effects)
    }

    /// Base 2.0, section 8.19.8.
    fn clear(&mut self, host: HostId) -> Effects {
        let cleared = self.others(&host);
        self.registrations.clear();
        self.held = None;
        self.generation = self.generation.wrapping_add(1);
        Effects { cleared, ..Effects::default() }
    }
}
