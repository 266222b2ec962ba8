//! The directory of all controllers of a target, shared between cores and used when queues connect and
//! disconnect.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use block_io::Status;
use nvme_auth::TlsPsk;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::NotificationType;

use crate::Subsystem;
use crate::generated_keys::GeneratedKeys;
use crate::reservation::{HostId, ReservationNotifier, ReservationNotifiers};
use crate::subsystem::NamespaceIdentity;

/// The controllers of a target, by subsystem and controller identifier.
///
/// It allocates controller identifiers and owns the list of [`ReservationNotifier`]s, one per core. Its lock
/// is taken when queues connect, when controllers end, and by some admin commands and reservation commands,
/// never by other I/O.
#[derive(Debug, Default)]
pub struct ControllerDirectory {
    subsystems: Mutex<HashMap<Nqn, Controllers>>,
    notifiers: Arc<ReservationNotifiers>,
    generated_keys: Mutex<GeneratedKeys>,
}

#[derive(Debug, Default)]
struct Controllers {
    by_cntlid: BTreeMap<u16, Arc<ControllerAssociation>>,
    // Where the search for a free identifier starts, so that none is reused immediately.
    next: u16,
    // The subsystem was deleted: the entry goes with its last controller.
    subsystem_deleted: bool,
}

/// The association between a host and a controller: the state that the core of the admin queue shares with
/// the cores of the I/O queues.
///
/// The admin queue's [`Controller`](crate::Controller) writes it; I/O queues [`lease`](Self::lease) their
/// identifiers from it and poll [`QueueLease::is_valid`]. Locks are taken when queues connect and disconnect
/// and for reservation commands; the poll is two atomic loads.
#[derive(Debug)]
pub struct ControllerAssociation {
    subnqn: Nqn,
    cntlid: u16,
    hostnqn: Nqn,
    // Of the listener through which the host connected.
    portid: u16,
    // The host connects anew, with TLS, once it has generated a key for that.
    concatenates: bool,
    identity: Mutex<HostIdentity>,
    notifications: Mutex<NotificationQueue>,
    // Both change only under the lock of `queues`, so that no queue is added to a controller
    // that is being disabled. Reads need no lock.
    alive: AtomicBool,
    enabled: AtomicBool,
    keep_alive_deadline_ns: AtomicU64,
    queues: Mutex<IoQueueIds>,
    // What each namespace was when the host identified it last: at most one entry for each valid identifier.
    identified: Mutex<HashMap<u32, NamespaceIdentity>>,
    // The host knows extended LBA formats.
    extended_formats: AtomicBool,
    // The host retries failed commands after a delay, and there is one.
    retry_delay: AtomicBool,
    // An NVM Subsystem Reset was initiated, and the controller is not reset yet.
    subsystem_reset: AtomicBool,
    // The identity of the generated key with which its queues use TLS.
    generated_identity: Mutex<Option<String>>,
}

#[derive(Clone, Copy, Debug)]
struct HostIdentity {
    host_id: HostId,
    // Whether it has 128 bits, not 64; `None` for one that the target generated and the host may replace.
    extended: Option<bool>,
}

/// Reservation notifications that the controller's core has not fetched yet.
#[derive(Debug, Default)]
struct NotificationQueue {
    pending: VecDeque<(u32, NotificationType)>,
    dropped: u64,
}

/// Most notifications that are queued until the controller's core polls; more are counted as dropped.
const NOTIFICATIONS_MAX: usize = 256;

#[derive(Debug)]
struct IoQueueIds {
    in_use: BTreeSet<u16>,
    // I/O queue identifiers are 1 to this.
    max: u16,
}

/// What a host asks for with the Connect command of an admin queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControllerRequest<'a> {
    pub(crate) hostnqn: &'a Nqn,
    pub(crate) host_id: HostId,
    /// Whether the host identifier has 128 bits, not 64; `None` for one that the target generated.
    pub(crate) extended: Option<bool>,
    pub(crate) io_queues_max: u16,
    /// The listener.
    pub(crate) portid: u16,
    /// The host may have no other controller of the subsystem on this listener.
    pub(crate) exclusive: bool,
    /// The controller is for secure channel concatenation alone, and does not count as one of the host.
    pub(crate) concatenates: bool,
}

/// Why an I/O queue identifier cannot be leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseError {
    /// The controller terminated.
    ControllerGone,
    /// The controller is not enabled.
    ControllerDisabled,
    /// The identifier is 0 or exceeds the granted number of queues.
    OutOfRange,
    /// The identifier is already leased.
    InUse,
}

impl ControllerDirectory {
    /// An empty directory.
    pub fn new() -> ControllerDirectory {
        ControllerDirectory::default()
    }

    /// Allocates a controller of the subsystem; `None` if all identifiers are in use, or if the host may have
    /// only the one that it has.
    pub(crate) fn add_controller(
        &self,
        subsystem: &Subsystem,
        request: ControllerRequest<'_>,
    ) -> Option<Arc<ControllerAssociation>> {
        let ControllerRequest { hostnqn, host_id, extended, io_queues_max, portid, exclusive, concatenates } =
            request;
        let mut subsystems = sync::lock(&self.subsystems);
        let controllers = subsystems.entry(subsystem.nqn.clone()).or_default();
        controllers.subsystem_deleted = false;
        let is_duplicate = |other: &Arc<ControllerAssociation>| {
            let is_of_host = other.portid == portid && other.host_id() == host_id;
            is_of_host && !other.concatenates && other.is_alive()
        };
        if exclusive && controllers.by_cntlid.values().any(is_duplicate) {
            return None;
        }
        let (low, high) = (subsystem.cntlid_min, subsystem.cntlid_max);
        let start = controllers.next.clamp(low, high);
        let cntlid =
            (start..=high).chain(low..start).find(|cntlid| !controllers.by_cntlid.contains_key(cntlid))?;
        let association = Arc::new(ControllerAssociation {
            subnqn: subsystem.nqn.clone(),
            cntlid,
            hostnqn: hostnqn.clone(),
            portid,
            concatenates,
            identity: Mutex::new(HostIdentity { host_id, extended }),
            notifications: Mutex::default(),
            alive: AtomicBool::new(true),
            enabled: AtomicBool::new(false),
            keep_alive_deadline_ns: AtomicU64::new(u64::MAX),
            queues: Mutex::new(IoQueueIds { in_use: BTreeSet::new(), max: io_queues_max }),
            identified: Mutex::default(),
            extended_formats: AtomicBool::new(false),
            retry_delay: AtomicBool::new(false),
            subsystem_reset: AtomicBool::new(false),
            generated_identity: Mutex::default(),
        });
        controllers.by_cntlid.insert(cntlid, association.clone());
        controllers.next = if cntlid == high { low } else { cntlid + 1 };
        Some(association)
    }

    /// Adds a notifier for one core: `wake` makes the core call [`ReservationNotifier::take`], which it must
    /// do while it has controllers or I/O queues.
    pub fn add_notifier(&self, wake: Box<dyn Fn() + Send + Sync>) -> Arc<ReservationNotifier> {
        self.notifiers.add(wake)
    }

    pub(crate) fn notifiers(&self) -> Arc<ReservationNotifiers> {
        self.notifiers.clone()
    }

    /// The controller with this identifier, if it exists.
    pub fn find(&self, subnqn: &Nqn, cntlid: u16) -> Option<Arc<ControllerAssociation>> {
        sync::lock(&self.subsystems).get(subnqn)?.by_cntlid.get(&cntlid).cloned()
    }

    /// All controllers of a subsystem, by ascending identifier.
    pub fn controllers(&self, subnqn: &Nqn) -> Vec<Arc<ControllerAssociation>> {
        let subsystems = sync::lock(&self.subsystems);
        subsystems.get(subnqn).map(|found| found.by_cntlid.values().cloned().collect()).unwrap_or_default()
    }

    /// Initiates an NVM Subsystem Reset: every controller of the subsystem resets itself, on its core.
    pub(crate) fn request_subsystem_reset(&self, subnqn: &Nqn) {
        for association in self.controllers(subnqn) {
            association.subsystem_reset.store(true, Ordering::Release);
        }
        self.notifiers.notify_all(None);
    }

    /// Removes a controller: no more queues can be leased, and existing leases become invalid.
    pub(crate) fn remove(&self, association: &Arc<ControllerAssociation>) {
        {
            let _queues = sync::lock(&association.queues);
            association.alive.store(false, Ordering::Release);
            association.enabled.store(false, Ordering::Release);
        }
        self.drop_generated_key(association);
        let mut subsystems = sync::lock(&self.subsystems);
        if let Some(controllers) = subsystems.get_mut(&association.subnqn) {
            let is_same = controllers
                .by_cntlid
                .get(&association.cntlid)
                .is_some_and(|entry| Arc::ptr_eq(entry, association));
            if is_same {
                controllers.by_cntlid.remove(&association.cntlid);
            }
            if controllers.subsystem_deleted && controllers.by_cntlid.is_empty() {
                subsystems.remove(&association.subnqn);
            }
        }
    }

    /// Forgets a subsystem that was deleted, once its last controller is removed: subsystems with ever new
    /// names must not accumulate. A controller that is added later, because a subsystem of this name was
    /// created again, revokes it.
    pub fn remove_subsystem(&self, subnqn: &Nqn) {
        let mut subsystems = sync::lock(&self.subsystems);
        if let Some(controllers) = subsystems.get_mut(subnqn) {
            controllers.subsystem_deleted = true;
            if controllers.by_cntlid.is_empty() {
                subsystems.remove(subnqn);
            }
        }
    }

    /// Number of subsystems that the directory remembers: those that have had a controller and are not
    /// deleted.
    pub fn subsystems(&self) -> usize {
        sync::lock(&self.subsystems).len()
    }
}

/// Keys of TLS that hosts have generated. Where both are locked, the keys are locked before the identity.
impl ControllerDirectory {
    /// Adds a key that the host of this association, whose connection has no TLS, has generated. Until
    /// `until_ns` it can connect an admin queue with it.
    pub fn add_generated_key(
        &self,
        association: &ControllerAssociation,
        psk: TlsPsk,
        now_ns: u64,
        until_ns: u64,
    ) {
        let mut keys = sync::lock(&self.generated_keys);
        keys.add_unused(&association.hostnqn, &association.subnqn, psk, now_ns, until_ns);
    }

    /// Replaces the key of an association with one that its host has generated through it. Queues that are
    /// connected stay so.
    pub fn replace_generated_key(&self, association: &ControllerAssociation, psk: TlsPsk) {
        let mut keys = sync::lock(&self.generated_keys);
        let replaced = sync::lock(&association.generated_identity).replace(psk.identity.clone());
        if let Some(replaced) = replaced {
            keys.remove(&replaced);
        }
        keys.add_used(&association.hostnqn, &association.subnqn, psk);
    }

    /// The key with an identity, for a handshake that begins at `now_ns`.
    pub fn generated_key(&self, identity: &str, now_ns: u64) -> Option<TlsPsk> {
        sync::lock(&self.generated_keys).find(identity, now_ns)
    }

    /// Drops the keys that a host has generated for a subsystem and has not connected with: its
    /// authentication keys are others now.
    pub fn drop_unused_generated_keys(&self, host: &Nqn, subsystem: &Nqn) {
        sync::lock(&self.generated_keys).drop_unused(host, subsystem);
    }

    /// Number of generated keys that the target remembers.
    pub fn generated_keys(&self) -> usize {
        sync::lock(&self.generated_keys).len()
    }

    /// Makes a key that of an association, whose admin queue has been connected with it. Returns false if it
    /// is that of another, or was dropped.
    pub(crate) fn use_generated_key(&self, identity: &str, association: &ControllerAssociation) -> bool {
        let mut keys = sync::lock(&self.generated_keys);
        let is_unused = keys.begin_use(identity, &association.hostnqn, &association.subnqn);
        if is_unused {
            *sync::lock(&association.generated_identity) = Some(identity.to_string());
        }
        is_unused
    }

    /// Drops the key of an association that ends.
    fn drop_generated_key(&self, association: &ControllerAssociation) {
        let mut keys = sync::lock(&self.generated_keys);
        if let Some(identity) = sync::lock(&association.generated_identity).take() {
            keys.remove(&identity);
        }
    }
}

impl ControllerAssociation {
    /// NQN of the subsystem.
    pub fn subnqn(&self) -> &Nqn {
        &self.subnqn
    }

    /// Controller identifier.
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// NQN of the host.
    pub fn hostnqn(&self) -> &Nqn {
        &self.hostnqn
    }

    /// The identity of the generated key with which its queues use TLS; `None` if it has none.
    pub fn generated_identity(&self) -> Option<String> {
        sync::lock(&self.generated_identity).clone()
    }

    /// Whether the controller is for secure channel concatenation alone: the host connects anew with TLS.
    pub(crate) fn concatenates(&self) -> bool {
        self.concatenates
    }

    /// Host identifier; a 64-bit one occupies the first eight bytes.
    pub fn host_id(&self) -> HostId {
        sync::lock(&self.identity).host_id
    }

    /// Whether the host identifier has 128 bits, not 64; `None` if the host has not set one and the target
    /// generated it.
    pub fn host_id_is_extended(&self) -> Option<bool> {
        sync::lock(&self.identity).extended
    }

    /// Sets the host identifier. Returns false if another one was already set.
    pub(crate) fn set_host_id(&self, host_id: HostId, extended: bool) -> bool {
        let mut identity = sync::lock(&self.identity);
        let is_first = identity.extended.is_none();
        if is_first {
            *identity = HostIdentity { host_id, extended: Some(extended) };
        }
        is_first || (identity.host_id == host_id && identity.extended == Some(extended))
    }

    /// Whether the host has said that it knows extended LBA formats (LBAFEE), or not.
    pub(crate) fn set_extended_formats(&self, are_known: bool) {
        self.extended_formats.store(are_known, Ordering::Release);
    }

    /// See [`set_extended_formats`](Self::set_extended_formats).
    pub(crate) fn knows_extended_formats(&self) -> bool {
        self.extended_formats.load(Ordering::Acquire)
    }

    /// Whether the host honours retry delays (ACRE) and there is one, or not.
    pub(crate) fn set_retry_delay(&self, has_delay: bool) {
        self.retry_delay.store(has_delay, Ordering::Release);
    }

    /// The status of a failed command, with a retry delay (CRD) if the host may retry it and honours delays.
    pub fn with_retry_delay(&self, status: Status) -> Status {
        let delays = !status.is_do_not_retry() && self.retry_delay.load(Ordering::Acquire);
        if delays { status.with_retry_delay(1) } else { status }
    }

    /// Whether the controller has to be reset. Takes the request.
    pub(crate) fn take_subsystem_reset(&self) -> bool {
        self.subsystem_reset.load(Ordering::Acquire) && self.subsystem_reset.swap(false, Ordering::AcqRel)
    }

    /// The host has identified a namespace: from now on it may use this one.
    pub(crate) fn set_identified(&self, nsid: u32, identity: NamespaceIdentity) {
        sync::lock(&self.identified).insert(nsid, identity);
    }

    /// Whether the host may believe that another namespace has this identifier: it has identified one that
    /// did, and not this one since. A host that has identified none may use any.
    pub(crate) fn takes_for_another(&self, nsid: u32, identity: &NamespaceIdentity) -> bool {
        sync::lock(&self.identified).get(&nsid).is_some_and(|known| known != identity)
    }

    /// Queues a reservation notification for the controller.
    pub(crate) fn notify(&self, nsid: u32, kind: NotificationType) {
        let mut notifications = sync::lock(&self.notifications);
        if notifications.pending.len() == NOTIFICATIONS_MAX {
            notifications.dropped += 1;
        } else {
            notifications.pending.push_back((nsid, kind));
        }
    }

    /// Takes the queued notifications and the number of dropped ones.
    pub(crate) fn take_notifications(&self) -> (VecDeque<(u32, NotificationType)>, u64) {
        let mut notifications = sync::lock(&self.notifications);
        (std::mem::take(&mut notifications.pending), std::mem::take(&mut notifications.dropped))
    }

    /// Whether the controller still exists; if not, its I/O queues must be closed.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether the controller is enabled; if not, its I/O queues must be closed.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Acquire)
    }

    /// When the keep alive timer expires, `u64::MAX` for never. From then on its queues must not execute what
    /// they have received: the host may have repeated it on another path (NVM Express TP 4129).
    #[inline]
    pub fn keep_alive_deadline_ns(&self) -> u64 {
        self.keep_alive_deadline_ns.load(Ordering::Acquire)
    }

    pub(crate) fn set_keep_alive_deadline(&self, deadline_ns: u64) {
        self.keep_alive_deadline_ns.store(deadline_ns, Ordering::Release);
    }

    /// The leased I/O queue identifiers, ascending.
    pub fn queues(&self) -> Vec<u16> {
        sync::lock(&self.queues).in_use.iter().copied().collect()
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        let _queues = sync::lock(&self.queues);
        self.enabled.store(enabled, Ordering::Release);
    }

    pub(crate) fn set_queues_max(&self, max: u16) {
        sync::lock(&self.queues).max = max;
    }

    /// Leases an I/O queue identifier until the lease is dropped.
    ///
    /// # Errors
    /// The identifier is out of range or leased, or the controller is disabled or terminated.
    pub fn lease(self: &Arc<Self>, qid: u16) -> Result<QueueLease, LeaseError> {
        let mut queues = sync::lock(&self.queues);
        if !self.is_alive() {
            return Err(LeaseError::ControllerGone);
        }
        if qid == 0 || qid > queues.max {
            return Err(LeaseError::OutOfRange);
        }
        if !self.is_enabled() {
            return Err(LeaseError::ControllerDisabled);
        }
        if !queues.in_use.insert(qid) {
            return Err(LeaseError::InUse);
        }
        drop(queues);
        // A static probe point, as that of the end: one NOP until a tracer attaches.
        let host = self.hostnqn.as_str();
        probe::probe!(ringbolt, nvme_queue_created, self.cntlid, qid, host.as_ptr(), host.len());
        Ok(QueueLease { association: self.clone(), qid })
    }
}

/// The lease of an I/O queue identifier. Dropping it releases the identifier and lets a reset or shutdown
/// complete, so drop it only after the queue's last command has completed.
#[derive(Debug)]
pub struct QueueLease {
    association: Arc<ControllerAssociation>,
    qid: u16,
}

impl QueueLease {
    /// The association of the queue's controller.
    pub fn association(&self) -> &Arc<ControllerAssociation> {
        &self.association
    }

    /// The leased queue identifier, from 1.
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Whether the controller is enabled and alive; if not, the queue must be closed. Two atomic loads: call
    /// it once per poll.
    #[inline]
    pub fn is_valid(&self) -> bool {
        self.association.is_enabled() && self.association.is_alive()
    }
}

impl Drop for QueueLease {
    fn drop(&mut self) {
        let was_leased = sync::lock(&self.association.queues).in_use.remove(&self.qid);
        assert!(was_leased, "queue {} was leased once and released twice", self.qid);
        probe::probe!(ringbolt, nvme_queue_deleted, self.association.cntlid, self.qid);
    }
}
