//! Which controllers there are: the one thing that cores share, used only when queues come and go.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wire_nvme::fabrics::Nqn;
use wire_nvme::log::NotificationType;

use crate::Subsystem;
use crate::reservation::{Bell, Bells, HostId};

/// The controllers of a target, by subsystem and controller identifier.
#[derive(Debug, Default)]
pub struct Directory {
    subsystems: Mutex<HashMap<Nqn, Controllers>>,
    bells: Arc<Bells>,
}

#[derive(Debug, Default)]
struct Controllers {
    by_cntlid: BTreeMap<u16, Arc<Association>>,
    // Where the search for a free identifier starts, so that one is not reused at once.
    next: u16,
}

/// What the admin queue's core and the I/O queues' cores both know of a controller.
#[derive(Debug)]
pub struct Association {
    subnqn: Nqn,
    cntlid: u16,
    hostnqn: Nqn,
    identity: Mutex<Identity>,
    notices: Mutex<Notices>,
    // Both only change under the lock of `queues`, so that a queue is never added to a controller
    // that is being disabled; reading them needs no lock.
    alive: AtomicBool,
    enabled: AtomicBool,
    queues: Mutex<Queues>,
}

#[derive(Clone, Copy, Debug)]
struct Identity {
    host_id: HostId,
    // Whether it has 128 bits or 64; `None` for one that the target made up and the host may replace.
    long: Option<bool>,
}

/// Reservation notifications that the controller has not taken yet.
#[derive(Debug, Default)]
struct Notices {
    waiting: VecDeque<(u32, NotificationType)>,
    lost: u64,
}

/// Notifications that can wait until the controller's core has its next turn.
const NOTICES_MAX: usize = 256;

#[derive(Debug)]
struct Queues {
    in_use: BTreeSet<u16>,
    // I/O queue identifiers are 1 to this.
    max: u16,
}

/// Why an I/O queue cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueRefused {
    /// The controller has ended.
    Dead,
    /// The controller is not enabled.
    Disabled,
    /// The identifier is 0 or more than the controller has.
    OutOfRange,
    /// The queue exists.
    InUse,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics with a lock held; if it did, the tables would still be whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Directory {
    /// No controllers.
    pub fn new() -> Directory {
        Directory::default()
    }

    /// Gives a host a controller of the subsystem; `None` when all identifiers are in use.
    pub(crate) fn admit(
        &self,
        subsystem: &Subsystem,
        hostnqn: &Nqn,
        host_id: HostId,
        long: Option<bool>,
        io_queues_max: u16,
    ) -> Option<Arc<Association>> {
        let mut subsystems = lock(&self.subsystems);
        let controllers = subsystems.entry(subsystem.nqn.clone()).or_default();
        let (low, high) = (subsystem.cntlid_min, subsystem.cntlid_max);
        let start = controllers.next.clamp(low, high);
        let cntlid =
            (start..=high).chain(low..start).find(|cntlid| !controllers.by_cntlid.contains_key(cntlid))?;
        let association = Arc::new(Association {
            subnqn: subsystem.nqn.clone(),
            cntlid,
            hostnqn: hostnqn.clone(),
            identity: Mutex::new(Identity { host_id, long }),
            notices: Mutex::default(),
            alive: AtomicBool::new(true),
            enabled: AtomicBool::new(false),
            queues: Mutex::new(Queues { in_use: BTreeSet::new(), max: io_queues_max }),
        });
        controllers.by_cntlid.insert(cntlid, association.clone());
        controllers.next = if cntlid == high { low } else { cntlid + 1 };
        Some(association)
    }

    /// A bell for one core: `wake` makes the core look at it. It is to be looked at as long as controllers or
    /// I/O queues are there.
    pub fn bell(&self, wake: Box<dyn Fn() + Send + Sync>) -> Arc<Bell> {
        self.bells.add(wake)
    }

    pub(crate) fn bells(&self) -> Arc<Bells> {
        self.bells.clone()
    }

    /// The controller with this identifier.
    pub fn find(&self, subnqn: &Nqn, cntlid: u16) -> Option<Arc<Association>> {
        lock(&self.subsystems).get(subnqn)?.by_cntlid.get(&cntlid).cloned()
    }

    /// Every controller of a subsystem, by rising identifier.
    pub fn controllers(&self, subnqn: &Nqn) -> Vec<Arc<Association>> {
        let subsystems = lock(&self.subsystems);
        subsystems.get(subnqn).map(|found| found.by_cntlid.values().cloned().collect()).unwrap_or_default()
    }

    /// Ends a controller: no queue joins it any more, and those it has are to end.
    pub(crate) fn remove(&self, association: &Arc<Association>) {
        {
            let _queues = lock(&association.queues);
            association.alive.store(false, Ordering::Release);
            association.enabled.store(false, Ordering::Release);
        }
        let mut subsystems = lock(&self.subsystems);
        if let Some(controllers) = subsystems.get_mut(&association.subnqn) {
            let is_it =
                controllers.by_cntlid.get(&association.cntlid).is_some_and(|at| Arc::ptr_eq(at, association));
            if is_it {
                controllers.by_cntlid.remove(&association.cntlid);
            }
        }
    }
}

impl Association {
    /// Name of the subsystem.
    pub fn subnqn(&self) -> &Nqn {
        &self.subnqn
    }

    /// Controller identifier.
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Name of the host.
    pub fn hostnqn(&self) -> &Nqn {
        &self.hostnqn
    }

    /// Host identifier.
    pub fn host_id(&self) -> HostId {
        lock(&self.identity).host_id
    }

    /// Whether the host's identifier has 128 bits, not 64; `None` where the host has not said who it is and an
    /// identifier of its own was made up.
    pub fn id_is_long(&self) -> Option<bool> {
        lock(&self.identity).long
    }

    /// The host says who it is; whether it had not.
    pub(crate) fn set_host_id(&self, host_id: HostId, long: bool) -> bool {
        let mut identity = lock(&self.identity);
        let is_first = identity.long.is_none();
        if is_first {
            *identity = Identity { host_id, long: Some(long) };
        }
        is_first || (identity.host_id == host_id && identity.long == Some(long))
    }

    /// Tells the controller of what happened to reservations of a namespace.
    pub(crate) fn notify(&self, nsid: u32, kind: NotificationType) {
        let mut notices = lock(&self.notices);
        if notices.waiting.len() == NOTICES_MAX {
            notices.lost += 1;
        } else {
            notices.waiting.push_back((nsid, kind));
        }
    }

    /// What the controller was told of, and how many more it would have been.
    pub(crate) fn take_notices(&self) -> (VecDeque<(u32, NotificationType)>, u64) {
        let mut notices = lock(&self.notices);
        (std::mem::take(&mut notices.waiting), std::mem::take(&mut notices.lost))
    }

    /// Whether the controller still exists. An I/O queue of one that does not is to be closed.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether the controller is enabled. An I/O queue of one that is not is to be closed.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Acquire)
    }

    /// The I/O queues in use, rising.
    pub fn queues(&self) -> Vec<u16> {
        lock(&self.queues).in_use.iter().copied().collect()
    }

    /// The largest identifier that an I/O queue can have.
    pub fn queues_max(&self) -> u16 {
        lock(&self.queues).max
    }

    pub(crate) fn set_enabled(&self, enabled: bool) {
        let _queues = lock(&self.queues);
        self.enabled.store(enabled, Ordering::Release);
    }

    pub(crate) fn set_queues_max(&self, max: u16) {
        lock(&self.queues).max = max;
    }

    /// Reserves an I/O queue identifier until the lease is dropped.
    ///
    /// # Errors
    /// Why not.
    pub fn lease(self: &Arc<Self>, qid: u16) -> Result<QueueLease, QueueRefused> {
        let mut queues = lock(&self.queues);
        if !self.is_alive() {
            return Err(QueueRefused::Dead);
        }
        if qid == 0 || qid > queues.max {
            return Err(QueueRefused::OutOfRange);
        }
        if !self.is_enabled() {
            return Err(QueueRefused::Disabled);
        }
        if !queues.in_use.insert(qid) {
            return Err(QueueRefused::InUse);
        }
        drop(queues);
        Ok(QueueLease { association: self.clone(), qid })
    }
}

/// The right to be one of a controller's I/O queues. Dropping it gives the identifier back, so it is
/// dropped when the queue's last command has ended, not before.
#[derive(Debug)]
pub struct QueueLease {
    association: Arc<Association>,
    qid: u16,
}

impl QueueLease {
    /// The controller.
    pub fn association(&self) -> &Arc<Association> {
        &self.association
    }

    /// The queue.
    pub fn qid(&self) -> u16 {
        self.qid
    }

    /// Whether the controller wants the queue to exist. Two loads; ask it once per poll.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.association.is_enabled() && self.association.is_alive()
    }
}

impl Drop for QueueLease {
    fn drop(&mut self) {
        let was = lock(&self.association.queues).in_use.remove(&self.qid);
        assert!(was, "queue {} was leased once and given back twice", self.qid);
    }
}
