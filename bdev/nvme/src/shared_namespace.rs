//! The state of a namespace that the control plane shares with its channels: the paths, and how to connect to
//! each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use nvme::IoQueues;
use wire_nvme::identify::IdentifyNamespace;
use wire_nvme::log::AnaState;
use wire_nvme::protection::MetadataFormat;

use crate::counts::{LinkCounts, PathStats};
use crate::multipath::{IoWait, Policy};
use crate::path::ControllerPath;
use crate::path_id::PathId;
use crate::transport_stats::TransportTotals;

/// A namespace's state, shared by the control plane and its channels.
///
/// The control plane changes it under a lock, increments the version and wakes the channels. A channel
/// compares the version with the one that it has applied, a load per call, and takes a
/// [`snapshot`](Self::snapshot) on a change. Each channel publishes its links in a [`ChannelStatus`].
pub(crate) struct SharedNamespace {
    pub(crate) nsid: u32,
    /// Where channels register the statistics of their queues.
    pub(crate) totals: Arc<TransportTotals>,
    /// Incremented by each change; channels compare it at every `submit` and `poll`.
    version: AtomicU64,
    state: Mutex<NamespaceState>,
    pub(crate) blocks: AtomicU64,
    /// Maximum bytes of a command that every path supports.
    pub(crate) transfer_max_bytes: AtomicU32,
    /// Alignment and virtual boundary that suit every path; see [`bdev::IoLimits`].
    pub(crate) alignment: AtomicU32,
    pub(crate) virtual_boundary: AtomicU32,
    /// Writes that are atomic on every path: most blocks, and their boundary.
    pub(crate) atomic_blocks: AtomicU32,
    pub(crate) atomic_boundary: AtomicU32,
    /// Whether every path supports the operation.
    pub(crate) unmap: AtomicBool,
    pub(crate) write_zeroes: AtomicBool,
    pub(crate) write_uncorrectable: AtomicBool,
}

struct NamespaceState {
    paths: Vec<NamespacePath>,
    policy: Policy,
    preferred: Option<PathId>,
    channels: BTreeMap<u64, Arc<ChannelStatus>>,
    last_channel_id: u64,
    /// Counters of closed channels.
    closed_stats: BTreeMap<PathId, PathStats>,
}

/// A path of a namespace.
#[derive(Clone)]
pub(crate) struct NamespacePath {
    pub(crate) id: PathId,
    pub(crate) controller_path: Arc<ControllerPath>,
    /// `None` while the path is not connected.
    pub(crate) connection: Option<PathConnection>,
    /// The namespace's ANA group (ANAGRPID), and its state.
    pub(crate) anagrpid: u32,
    pub(crate) ana: AnaState,
    /// No I/O is sent until the namespace has been identified again.
    pub(crate) suspended: bool,
    /// Changes each time that the namespace is identified.
    pub(crate) scan_generation: u64,
    /// Changes with each read of the ANA log page.
    pub(crate) ana_generation: u64,
    /// How long I/O waits for the path.
    pub(crate) wait: IoWait,
}

/// A connection of a path, on which channels open their I/O queues.
#[derive(Clone)]
pub(crate) struct PathConnection {
    /// Unique among the connections of the path.
    pub(crate) epoch: u64,
    pub(crate) queues: Arc<dyn IoQueues>,
    pub(crate) identify: Arc<IdentifyNamespace>,
    pub(crate) metadata: MetadataFormat,
}

/// The state that a channel publishes to the control plane, and its waker.
pub(crate) struct ChannelStatus {
    pub(crate) core: usize,
    waker: os::Waker,
    /// The version that the channel has applied.
    pub(crate) applied_version: AtomicU64,
    /// One a path.
    links: Mutex<Vec<LinkStatus>>,
}

/// The published state of a channel's link to one path.
#[derive(Clone)]
pub(crate) struct LinkStatus {
    pub(crate) id: PathId,
    pub(crate) connected: bool,
    pub(crate) current: bool,
    /// The path is suspended, and none of the channel's I/O is in flight on it.
    pub(crate) quiesced: bool,
    /// I/O counters, if enabled for the path.
    pub(crate) counts: Option<Arc<LinkCounts>>,
}

impl SharedNamespace {
    pub(crate) fn new(nsid: u32, policy: Policy, totals: Arc<TransportTotals>) -> SharedNamespace {
        SharedNamespace {
            nsid,
            totals,
            version: AtomicU64::new(1),
            state: Mutex::new(NamespaceState {
                paths: Vec::new(),
                policy,
                preferred: None,
                channels: BTreeMap::new(),
                last_channel_id: 0,
                closed_stats: BTreeMap::new(),
            }),
            blocks: AtomicU64::new(0),
            transfer_max_bytes: AtomicU32::new(u32::MAX),
            alignment: AtomicU32::new(1),
            virtual_boundary: AtomicU32::new(1),
            atomic_blocks: AtomicU32::new(0),
            atomic_boundary: AtomicU32::new(0),
            unmap: AtomicBool::new(true),
            write_zeroes: AtomicBool::new(true),
            write_uncorrectable: AtomicBool::new(true),
        }
    }

    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, NamespaceState> {
        // No change under the lock can panic half-way, so that a poisoned lock is consistent.
        sync::lock(&self.state)
    }

    fn update<R>(&self, change: impl FnOnce(&mut NamespaceState) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        self.version.fetch_add(1, Ordering::AcqRel);
        let statuses: Vec<_> = state.channels.values().cloned().collect();
        drop(state);
        statuses.iter().for_each(|status| status.waker.wake());
        result
    }

    /// The current version, paths, policy and preferred path.
    pub(crate) fn snapshot(&self) -> (u64, Vec<NamespacePath>, Policy, Option<PathId>) {
        let state = self.lock();
        (self.version(), state.paths.clone(), state.policy, state.preferred)
    }

    pub(crate) fn paths(&self) -> Vec<NamespacePath> {
        self.lock().paths.clone()
    }

    /// Adds a path, or replaces its state.
    pub(crate) fn set_path(&self, path: NamespacePath) {
        self.update(|state| match state.paths.iter_mut().find(|known| known.id == path.id) {
            Some(known) => *known = path,
            None => state.paths.push(path),
        });
    }

    /// Changes the state of a path, if this namespace has it.
    pub(crate) fn update_path(&self, id: PathId, change: impl FnOnce(&mut NamespacePath)) {
        if self.has_path(id) {
            self.update(|state| {
                state.paths.iter_mut().filter(|path| path.id == id).for_each(change_once(change))
            });
        }
    }

    /// Has channels send no more I/O on a path. Returns the version from which on they do not, if the
    /// namespace has it.
    pub(crate) fn suspend_path(&self, id: PathId) -> Option<u64> {
        if !self.has_path(id) {
            return None;
        }
        self.update_path(id, |state| state.suspended = true);
        Some(self.version())
    }

    /// Whether no channel has I/O in flight on a path that was suspended by `version`, provided that each
    /// core has made a turn since: a channel that has I/O in flight is polled in each turn, so that one which
    /// has not applied the version by then has none, and applies it before it sends any.
    pub(crate) fn is_quiesced(&self, id: PathId, version: u64) -> bool {
        self.channel_statuses().iter().all(|status| {
            let links = status.links();
            status.applied_version.load(Ordering::Acquire) < version
                || links.iter().all(|link| link.id != id || link.quiesced)
        })
    }

    pub(crate) fn has_path(&self, id: PathId) -> bool {
        self.lock().paths.iter().any(|path| path.id == id)
    }

    /// Removes a path; returns whether any is left.
    pub(crate) fn remove_path(&self, id: PathId) -> bool {
        self.update(|state| {
            state.paths.retain(|path| path.id != id);
            state.closed_stats.remove(&id);
            !state.paths.is_empty()
        })
    }

    pub(crate) fn policy(&self) -> Policy {
        self.lock().policy
    }

    pub(crate) fn set_policy(&self, policy: Policy) {
        self.update(|state| state.policy = policy);
    }

    pub(crate) fn set_preferred(&self, id: PathId) {
        self.update(|state| state.preferred = Some(id));
    }

    pub(crate) fn register_channel(&self, core: &reactor::Core) -> (u64, Arc<ChannelStatus>) {
        let waker = core.event_loop().waker();
        let (core, applied_version) = (core.index(), AtomicU64::new(0));
        let status = Arc::new(ChannelStatus { core, waker, applied_version, links: Mutex::default() });
        let mut state = self.lock();
        state.last_channel_id += 1;
        let id = state.last_channel_id;
        state.channels.insert(id, status.clone());
        (id, status)
    }

    pub(crate) fn unregister_channel(&self, id: u64) {
        let mut state = self.lock();
        let Some(status) = state.channels.remove(&id) else { return };
        for link in status.links().iter() {
            if let Some(counts) = &link.counts
                && state.paths.iter().any(|path| path.id == link.id)
            {
                state.closed_stats.entry(link.id).or_default().add(counts);
            }
        }
    }

    /// I/O counters of each path, summed over all channels, closed ones included.
    pub(crate) fn path_stats(&self) -> Vec<(Arc<ControllerPath>, PathStats)> {
        let state = self.lock();
        let stats_of = |path: &NamespacePath| {
            let mut stats = state.closed_stats.get(&path.id).cloned().unwrap_or_default();
            for status in state.channels.values() {
                let links = status.links();
                let counted = links.iter().filter(|link| link.id == path.id);
                counted.filter_map(|link| link.counts.as_ref()).for_each(|counts| stats.add(counts));
            }
            (path.controller_path.clone(), stats)
        };
        state.paths.iter().map(stats_of).collect()
    }

    /// Has the channels apply the current state once more, with what they read besides, such as error
    /// injections: at their next poll or I/O. Returns the cores of the channels.
    pub(crate) fn request_update(&self) -> Vec<usize> {
        self.update(|state| state.channels.values().map(|status| status.core).collect())
    }

    pub(crate) fn channel_statuses(&self) -> Vec<Arc<ChannelStatus>> {
        self.lock().channels.values().cloned().collect()
    }
}

impl ChannelStatus {
    /// No change under the lock can panic half-way, so that a poisoned lock is consistent.
    pub(crate) fn links(&self) -> MutexGuard<'_, Vec<LinkStatus>> {
        sync::lock(&self.links)
    }
}

/// Adapts an `FnOnce` to `for_each`; path ids are unique, so that it is called at most once.
fn change_once(change: impl FnOnce(&mut NamespacePath)) -> impl FnMut(&mut NamespacePath) {
    let mut change = Some(change);
    move |path| {
        if let Some(change) = change.take() {
            change(path);
        }
    }
}
