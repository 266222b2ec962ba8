//! Logical units.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use bdev::{BdevGeometry, BlockDevice, Uuid};
use block_io::Op;
use reservations::{
    ChangeWaker, LossEvent, PendingChange, PendingGuard, Registrant, ReservationNotice,
    ReservationSubscriber, Reservations,
};
use wire_scsi::mode::ModeSettings;
use wire_scsi::port_groups::{AccessReason, AccessState};
use wire_scsi::{AdditionalSense, SenseFormat};

use crate::functions::{ManagedTasks, TaskAction, TaskQuery, UnitFunction, UnitSubscriber};
use crate::limits::{NEXUSES_MAX, SUBSCRIBERS_MAX};
use crate::nexus::{AttachError, NexusPorts, UnitNexus};
use crate::ports::{TargetPort, UnitPorts};
use crate::sanitize::{SanitizeExecutor, SanitizeState};

/// What a logical unit is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitConfig {
    /// Identity: equal on every path, and after restarts.
    pub uuid: Uuid,
    /// Geometry of the device.
    pub geometry: BdevGeometry,
    /// Writes are rejected.
    pub read_only: bool,
    /// The device deallocates blocks.
    pub can_unmap: bool,
    /// The device writes zeroes without data.
    pub can_write_zeroes: bool,
    /// The device makes writes durable on request.
    pub can_flush: bool,
    /// PRODUCT IDENTIFICATION, at most 16 characters.
    pub product: String,
}

impl UnitConfig {
    /// A unit that can be read and written.
    pub fn new(uuid: Uuid, geometry: BdevGeometry) -> UnitConfig {
        UnitConfig {
            uuid,
            geometry,
            read_only: false,
            can_unmap: false,
            can_write_zeroes: false,
            can_flush: false,
            product: "Volume".to_string(),
        }
    }

    /// A unit that exports a device.
    pub fn of_device(device: &BlockDevice, read_only: bool) -> UnitConfig {
        UnitConfig {
            read_only: read_only || !device.supports(Op::Write),
            can_unmap: device.supports(Op::Unmap),
            can_write_zeroes: device.supports(Op::WriteZeroes),
            can_flush: device.supports(Op::Flush),
            ..UnitConfig::new(device.uuid(), device.geometry())
        }
    }
}

/// A logical unit: a block device as initiators see it.
///
/// It owns the unit's settings and the list of its nexuses and subscribers; reservations belong to the device. Commands
/// read atomics. Only attaching, task management and changes of settings take its lock.
#[derive(Debug)]
pub struct LogicalUnit {
    config: UnitConfig,
    reservations: Arc<Reservations>,
    blocks: AtomicU64,
    settings: AtomicU8,
    /// The nexus with a reservation by RESERVE; 0 for none.
    reserved_by: AtomicU64,
    sanitize: SanitizeState,
    sanitizer: OnceLock<Arc<dyn SanitizeExecutor>>,
    ports: UnitPorts,
    shared: Mutex<UnitShared>,
    this: Weak<LogicalUnit>,
}

#[derive(Debug, Default)]
struct UnitShared {
    nexuses: Vec<(u64, Weak<UnitNexus>)>,
    last_id: u64,
    subscribers: Vec<Weak<dyn UnitSubscriber>>,
}

const WRITE_CACHE: u8 = 1 << 0;
const DESCRIPTOR_SENSE: u8 = 1 << 1;
const WRITE_PROTECT: u8 = 1 << 2;

impl LogicalUnit {
    /// A unit on a device with these reservations.
    pub fn new(config: UnitConfig, reservations: Arc<Reservations>) -> Arc<LogicalUnit> {
        let unit = Arc::new_cyclic(|this: &Weak<LogicalUnit>| LogicalUnit {
            blocks: AtomicU64::new(config.geometry.blocks),
            settings: AtomicU8::new(default_settings(&config)),
            reserved_by: AtomicU64::new(0),
            config,
            reservations,
            sanitize: SanitizeState::default(),
            sanitizer: OnceLock::new(),
            ports: UnitPorts::default(),
            shared: Mutex::default(),
            this: this.clone(),
        });
        unit.reservations.subscribe(&unit);
        unit
    }

    /// What it is made of. The number of blocks may have changed.
    pub fn config(&self) -> &UnitConfig {
        &self.config
    }

    /// Number of blocks.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Bytes of a block.
    #[inline]
    pub fn block_bytes(&self) -> u32 {
        self.config.geometry.block_size
    }

    /// The reservations of the device.
    pub fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    pub(crate) fn sanitize(&self) -> &SanitizeState {
        &self.sanitize
    }

    /// Gives the unit what executes its sanitize operations, once, before it is attached.
    pub fn set_sanitizer(&self, sanitizer: Arc<dyn SanitizeExecutor>) {
        let is_first = self.sanitizer.set(sanitizer).is_ok();
        debug_assert!(is_first, "a unit has one executor");
    }

    pub(crate) fn sanitizer(&self) -> Option<&Arc<dyn SanitizeExecutor>> {
        self.sanitizer.get()
    }

    pub(crate) fn ports(&self) -> &UnitPorts {
        &self.ports
    }

    /// Applies the target ports through which the unit is reached. Initiators can ask for their groups' access states,
    /// and change them, if there are any. Nexuses that are attached before their port is there have full access.
    pub fn set_ports(&self, ports: Vec<TargetPort>) {
        self.ports.set(ports);
    }

    /// Changes the access state of a target port group, of which initiators get unit attentions. Returns whether there
    /// is such a group.
    pub fn set_access(&self, group: u16, state: AccessState) -> bool {
        self.change_access(&[(group, state)], AccessReason::Implicit, None)
    }

    /// Changes access states, of all groups or none. Returns whether all groups are there.
    pub(crate) fn change_access(
        &self,
        states: &[(u16, AccessState)],
        reason: AccessReason,
        by: Option<&UnitNexus>,
    ) -> bool {
        let changed = self.ports.change(states, reason);
        if changed == Some(true) {
            let by = by.map_or(0, UnitNexus::id);
            self.set_attentions(AdditionalSense::ASYMMETRIC_ACCESS_CHANGED, |nexus| nexus.id() != by);
        }
        changed.is_some()
    }

    /// Aborts the tasks of all other nexuses, because the unit is sanitized: those that have some get a unit attention.
    /// The change is complete when they have ended.
    pub(crate) fn abort_others(&self, nexus: &UnitNexus, waker: Arc<dyn ChangeWaker>) -> Arc<PendingChange> {
        let (pending, guard) = PendingChange::new(waker);
        let others: Arc<[u64]> =
            self.nexuses().iter().map(|other| other.id()).filter(|id| *id != nexus.id()).collect();
        if !others.is_empty() {
            self.abort_tasks(Some(others), &guard);
        }
        pending
    }

    /// Applies another number of blocks.
    pub fn resize(&self, blocks: u64) {
        if self.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            self.set_attentions(AdditionalSense::CAPACITY_CHANGED, |_| true);
        }
    }

    /// The mode settings in force.
    pub fn settings(&self) -> ModeSettings {
        let bits = self.settings.load(Ordering::Relaxed);
        ModeSettings {
            write_cache: bits & WRITE_CACHE != 0,
            descriptor_sense: bits & DESCRIPTOR_SENSE != 0,
            write_protect: bits & WRITE_PROTECT != 0,
        }
    }

    /// The settings at power on.
    pub(crate) fn default_settings(&self) -> ModeSettings {
        ModeSettings { write_cache: self.config.geometry.write_cache, ..ModeSettings::default() }
    }

    /// Applies settings of a MODE SELECT.
    pub(crate) fn apply_settings(&self, settings: ModeSettings) {
        let mut bits = 0;
        for (is_set, bit) in [
            (settings.write_cache, WRITE_CACHE),
            (settings.descriptor_sense, DESCRIPTOR_SENSE),
            (settings.write_protect, WRITE_PROTECT),
        ] {
            bits |= if is_set { bit } else { 0 };
        }
        self.settings.store(bits, Ordering::Relaxed);
    }

    /// Whether another nexus has reserved the unit by RESERVE (SPC-2, section 5.5.1).
    #[inline]
    pub(crate) fn is_reserved_by_other(&self, nexus: &UnitNexus) -> bool {
        let holder = self.reserved_by.load(Ordering::Acquire);
        holder != 0 && holder != nexus.id()
    }

    /// Whether a nexus has reserved the unit by RESERVE, so that persistent reservations are refused.
    pub(crate) fn is_reserved(&self) -> bool {
        self.reserved_by.load(Ordering::Acquire) != 0
    }

    /// RESERVE. Returns whether the nexus has the reservation: registrations of persistent reservations
    /// exclude it. It holds for all users of the device, of this unit or not.
    pub(crate) fn reserve(&self, nexus: &UnitNexus) -> bool {
        // A nexus has connections on several cores: what the unit and the device know changes together.
        let _shared = sync::lock(&self.shared);
        match self.reserved_by.load(Ordering::Acquire) {
            0 if self.reservations.reserve_unit(nexus.registrant()) => {
                self.reserved_by.store(nexus.id(), Ordering::Release);
                true
            }
            holder => holder == nexus.id(),
        }
    }

    /// RELEASE, which has no effect for another nexus.
    pub(crate) fn release(&self, nexus: &UnitNexus) {
        self.release_of(nexus.id());
    }

    fn release_of(&self, id: u64) {
        let _shared = sync::lock(&self.shared);
        if id != 0 && self.reserved_by.load(Ordering::Acquire) == id {
            self.reserved_by.store(0, Ordering::Release);
            self.reservations.release_unit();
        }
    }

    pub(crate) fn sense_format(&self) -> SenseFormat {
        let is_descriptor = self.settings.load(Ordering::Relaxed) & DESCRIPTOR_SENSE != 0;
        if is_descriptor { SenseFormat::Descriptor } else { SenseFormat::Fixed }
    }

    /// Whether SWP is set.
    #[inline]
    pub(crate) fn is_software_protected(&self) -> bool {
        self.settings.load(Ordering::Relaxed) & WRITE_PROTECT != 0
    }

    /// Whether the device has a volatile cache that the settings disable, so that each write has to reach the medium.
    #[inline]
    pub(crate) fn writes_through(&self) -> bool {
        self.config.geometry.write_cache && self.settings.load(Ordering::Relaxed) & WRITE_CACHE == 0
    }

    /// Attaches a nexus, whose first command reports POWER ON.
    ///
    /// # Errors
    /// The name of a port is invalid, or there are too many nexuses.
    pub fn attach(&self, ports: &NexusPorts) -> Result<Arc<UnitNexus>, AttachError> {
        let registrant = Registrant::scsi_nexus(&ports.initiator, &ports.target)?;
        let deny = self.reservations.deny_mask(&registrant);
        // A reference to `self` comes from an `Arc`.
        let unit = self.this.upgrade().ok_or(AttachError::TooMany)?;
        let mut shared = sync::lock(&self.shared);
        if shared.nexuses.len() >= NEXUSES_MAX {
            return Err(AttachError::TooMany);
        }
        shared.last_id += 1;
        let access = self.ports.access(ports.port_group);
        let nexus = Arc::new(UnitNexus::new(unit, shared.last_id, ports.clone(), registrant, deny, access));
        nexus.set_attention(AdditionalSense::POWER_ON);
        shared.nexuses.push((nexus.id(), Arc::downgrade(&nexus)));
        Ok(nexus)
    }

    /// A nexus is dropped.
    pub(crate) fn detach(&self, id: u64) {
        self.release_of(id);
        sync::lock(&self.shared).nexuses.retain(|(other, _)| *other != id);
    }

    /// Establishes a unit attention for nexuses.
    pub fn set_attentions(&self, what: AdditionalSense, whose: impl Fn(&UnitNexus) -> bool) {
        self.nexuses().iter().filter(|nexus| whose(nexus)).for_each(|nexus| nexus.set_attention(what));
    }

    /// The nexuses. Their drop takes the lock, so that they are not visited under it.
    fn nexuses(&self) -> Vec<Arc<UnitNexus>> {
        sync::lock(&self.shared).nexuses.iter().filter_map(|(_, nexus)| nexus.upgrade()).collect()
    }

    /// Adds a subscriber. Dropping it removes it.
    pub fn subscribe(&self, subscriber: &Arc<impl UnitSubscriber + 'static>) {
        let mut shared = sync::lock(&self.shared);
        shared.subscribers.retain(|one| one.strong_count() > 0);
        debug_assert!(shared.subscribers.len() < SUBSCRIBERS_MAX);
        let subscriber = Arc::downgrade(subscriber);
        shared.subscribers.push(subscriber);
    }

    /// Executes a task management function of a nexus. It is complete when the change is: when all tasks that it aborts
    /// have ended. The change may be complete already; otherwise `waker` is called.
    pub fn manage(
        &self,
        function: UnitFunction,
        nexus: &UnitNexus,
        waker: Arc<dyn ChangeWaker>,
    ) -> Arc<PendingChange> {
        let (pending, guard) = PendingChange::new(waker);
        let own = || Some(Arc::from([nexus.id()]));
        match function {
            UnitFunction::AbortTask(tag) => {
                self.manage_tasks(self.tasks(own(), TaskAction::Abort).with_tag(Some(tag)), &guard);
            }
            UnitFunction::AbortTaskSet => self.abort_tasks(own(), &guard),
            UnitFunction::ClearTaskSet => {
                self.abort_tasks(None, &guard);
                let is_other = |other: &UnitNexus| other.id() != nexus.id();
                self.set_attentions(AdditionalSense::COMMANDS_CLEARED, is_other);
            }
            UnitFunction::LogicalUnitReset => {
                self.manage_tasks(self.tasks(None, TaskAction::Reset), &guard);
                self.settings.store(default_settings(&self.config), Ordering::Relaxed);
                self.release_of(self.reserved_by.load(Ordering::Acquire));
                self.set_attentions(AdditionalSense::BUS_DEVICE_RESET, |_| true);
            }
            UnitFunction::NexusReset => {
                self.manage_tasks(self.tasks(own(), TaskAction::Reset), &guard);
                nexus.set_attention(AdditionalSense::NEXUS_LOSS);
            }
        }
        pending
    }

    /// Asks all cores whether a task of a nexus has this tag of the transport, or whether there is any.
    pub fn query(&self, nexus: &UnitNexus, tag: Option<u64>, waker: Arc<dyn ChangeWaker>) -> TaskQuery {
        let (query, action, guard) = TaskQuery::new(waker);
        self.manage_tasks(self.tasks(Some(Arc::from([nexus.id()])), action).with_tag(tag), &guard);
        query
    }

    fn abort_tasks(&self, nexuses: Option<Arc<[u64]>>, guard: &PendingGuard) {
        self.manage_tasks(self.tasks(nexuses, TaskAction::Abort), guard);
    }

    fn tasks(&self, nexuses: Option<Arc<[u64]>>, action: TaskAction) -> ManagedTasks {
        ManagedTasks::new(self.this.clone(), nexuses, action)
    }

    fn manage_tasks(&self, tasks: ManagedTasks, guard: &PendingGuard) {
        let subscribers = sync::lock(&self.shared).subscribers.clone();
        for subscriber in subscribers.iter().filter_map(Weak::upgrade) {
            subscriber.manage(&tasks, guard);
        }
    }
}

fn default_settings(config: &UnitConfig) -> u8 {
    if config.geometry.write_cache { WRITE_CACHE } else { 0 }
}

impl ReservationSubscriber for LogicalUnit {
    fn notify(&self, notices: &[ReservationNotice]) {
        for nexus in self.nexuses() {
            for notice in notices.iter().filter(|notice| notice.registrant == *nexus.registrant()) {
                nexus.set_attention(match notice.event {
                    LossEvent::RegistrationPreempted => AdditionalSense::REGISTRATIONS_PREEMPTED,
                    LossEvent::ReservationReleased => AdditionalSense::RESERVATIONS_RELEASED,
                    LossEvent::ReservationPreempted => AdditionalSense::RESERVATIONS_PREEMPTED,
                });
            }
        }
    }

    fn abort(&self, registrants: &[Registrant], guard: &PendingGuard) {
        let nexuses = self.nexuses();
        let concerned = nexuses.iter().filter(|nexus| registrants.contains(nexus.registrant()));
        let ids: Arc<[u64]> = concerned.map(|nexus| nexus.id()).collect();
        if !ids.is_empty() {
            self.abort_tasks(Some(ids), guard);
        }
    }
}
