//! The controllers under one name (the paths of a subsystem), and the block devices of their namespaces.
//!
//! Paths send events; one thread handles them in order and changes the registry. No reactor may do that,
//! because a registry subscriber may wait for reactors.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::Registry;
use nvme::IoQueues;
use os::clock::Clock;
use reactor::{ReactorHandle, blocking};
use uuid::Uuid;
use wire_nvme::log::AnaState;

use crate::attach::Attach;
use crate::multipath::{IoWait, Policy};
use crate::namespace::NvmeBdev;
use crate::path::{
    AnaGroups, ChangedNamespaces, ControllerPath, NamespaceScan, PathStatus, ana_state_of, send_reply,
};
use crate::path_id::PathId;
use crate::scanned::{AtomicUnit, ScannedNamespace};
use crate::shared_namespace::{NamespacePath, PathConnection, SharedNamespace};
use crate::suspension::Suspension;
use crate::transport_stats::TransportTotals;

/// How long removal waits for users of the device to close it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long to wait until pending path events are handled.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for a turn of each reactor that has a channel. One that is blocked applies a change
/// later.
const APPLY_TIMEOUT: Duration = Duration::from_millis(250);

/// An event from a path's task, or a request from a caller.
pub(crate) enum PathEvent {
    /// The path is connected; its namespaces, and how to open I/O queues to them.
    NamespacesScanned {
        path: Arc<ControllerPath>,
        epoch: u64,
        scan: NamespaceScan,
        queues: Arc<dyn IoQueues>,
        groups: AnaGroups,
    },
    /// Namespaces of the path have changed: no I/O is sent to them until they are scanned.
    Suspend { path: Arc<ControllerPath>, changed: ChangedNamespaces, suspension: Arc<Suspension> },
    /// The ANA log page was read again.
    AnaChanged { path: Arc<ControllerPath>, groups: AnaGroups },
    /// The connection is lost; I/O may wait for the next.
    Lost { path: Arc<ControllerPath>, wait: IoWait, why: String },
    /// The first attempt to attach failed.
    AttachFailed { path: Arc<ControllerPath>, why: String },
    /// Reconnection timed out: no further attempt is made.
    ReconnectTimedOut(Arc<ControllerPath>),
    /// Detach the path; the reply channel closes when that is done.
    Detach(Arc<ControllerPath>, SyncSender<()>),
    /// The path's task has ended.
    Stopped(Arc<ControllerPath>),
    /// Reply when all earlier events are handled.
    Barrier(SyncSender<()>),
}

pub(crate) type GroupEvent = (Arc<ControllerGroup>, PathEvent);

type AttachReply = SyncSender<Result<Vec<String>, String>>;

/// The controllers under one name (SPDK's `nvme_bdev_ctrlr`).
///
/// It owns the paths and the namespaces. All changes are made by [`handle`](Self::handle) on the event
/// thread; other threads read, or send a [`PathEvent`].
pub(crate) struct ControllerGroup {
    pub(crate) name: String,
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    events: Sender<GroupEvent>,
    clock: Clock,
    retries_max: u16,
    paths: Mutex<Vec<Arc<ControllerPath>>>,
    namespaces: Mutex<BTreeMap<u32, Arc<AttachedNamespace>>>,
    /// Namespaces of paths that could not be attached, for another path has a different one, or its name or
    /// an identifier is in use. They are scanned again when a namespace goes.
    refused: Mutex<BTreeSet<(PathId, u32)>>,
    attaching: Mutex<BTreeMap<PathId, AttachReply>>,
    detaching: Mutex<BTreeMap<PathId, Vec<SyncSender<()>>>>,
    policy: Mutex<Policy>,
    totals: Arc<TransportTotals>,
    /// Created by a discovery service; not saved in the configuration, as the service creates it again.
    pub(crate) discovered: bool,
}

/// A namespace of the group, and its block device.
pub(crate) struct AttachedNamespace {
    pub(crate) bdev_name: String,
    pub(crate) shared: Arc<SharedNamespace>,
    pub(crate) bdev: Arc<NvmeBdev>,
    /// The properties of the namespace on each path; a request must fit all of them.
    limits: Mutex<BTreeMap<PathId, ScannedNamespace>>,
}

impl ControllerGroup {
    pub(crate) fn new(
        attach: &Attach,
        policy: Policy,
        registry: Registry,
        reactors: Vec<ReactorHandle>,
        events: Sender<GroupEvent>,
        totals: Arc<TransportTotals>,
    ) -> ControllerGroup {
        let clock = reactors.first().map_or_else(Clock::monotonic, |reactor| reactor.clock().clone());
        ControllerGroup {
            name: attach.name.clone(),
            registry,
            reactors,
            events,
            clock,
            retries_max: attach.retries_max,
            paths: Mutex::default(),
            namespaces: Mutex::default(),
            refused: Mutex::default(),
            attaching: Mutex::default(),
            detaching: Mutex::default(),
            policy: Mutex::new(policy),
            totals,
            discovered: attach.discovered,
        }
    }

    pub(crate) fn paths(&self) -> Vec<Arc<ControllerPath>> {
        sync::lock(&self.paths).clone()
    }

    pub(crate) fn add_path(&self, path: Arc<ControllerPath>, reply: AttachReply) {
        sync::lock(&self.attaching).insert(path.number, reply);
        sync::lock(&self.paths).push(path);
    }

    pub(crate) fn namespaces(&self) -> Vec<Arc<AttachedNamespace>> {
        sync::lock(&self.namespaces).values().cloned().collect()
    }

    /// Waits until channels have applied all earlier events: for one turn of each reactor that has some. A
    /// channel that has I/O in flight is polled in each turn; an idle one, which is not, applies them before
    /// its next I/O. `false` if the event thread did not get to them in time.
    pub(crate) fn wait_applied(self: &Arc<Self>) -> bool {
        let (reply, barrier) = sync_channel(1);
        self.send_event(PathEvent::Barrier(reply));
        let handled = blocking::receive_timeout(&barrier, EVENTS_TIMEOUT).is_ok();
        let cores: BTreeSet<usize> =
            self.namespaces().iter().flat_map(|namespace| namespace.shared.request_update()).collect();
        let (turned, turns) = sync_channel(cores.len());
        for reactor in self.reactors.iter().filter(|reactor| cores.contains(&reactor.index())) {
            let turned = turned.clone();
            // Tasks run after the pollers of the turn. A reactor that has stopped drops the message.
            let _ = reactor.post(move |core| {
                core.spawn(async move { drop(turned) });
            });
        }
        drop(turned);
        // Disconnected once every reactor has dropped its sender.
        let _: Result<(), _> = blocking::receive_timeout(&turns, APPLY_TIMEOUT);
        handled
    }

    pub(crate) fn bdev_names(&self) -> Vec<String> {
        self.namespaces().iter().map(|namespace| namespace.bdev_name.clone()).collect()
    }

    pub(crate) fn send_event(self: &Arc<Self>, event: PathEvent) {
        // The receiver is closed at shutdown.
        let _ = self.events.send((self.clone(), event));
    }

    fn handle(self: &Arc<Self>, event: PathEvent) {
        match event {
            PathEvent::NamespacesScanned { path, epoch, scan, queues, groups } => {
                let outcome = self.apply_scan(&path, epoch, scan, &queues, &groups);
                if let Some(reply) = sync::lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(outcome.clone());
                }
                if let Err(why) = outcome {
                    log::warn!(target: "bdev_nvme", "{}: {why}", self.name);
                }
            }
            PathEvent::Suspend { path, changed, suspension } => {
                let namespaces = self.namespaces();
                let listed = namespaces.iter().map(|namespace| namespace.shared.clone());
                let listed = listed.filter(|shared| changed.contains(shared.nsid));
                suspension.add(&path, listed, &self.reactors);
            }
            PathEvent::AnaChanged { path, groups } => self.apply_ana(&path, &groups),
            PathEvent::Lost { path, wait, why } => {
                if path.status() == PathStatus::Reconnecting {
                    log::warn!(target: "bdev_nvme", "{}: {} lost: {why}", self.name, path.id().0.controller());
                }
                for namespace in self.namespaces() {
                    namespace.shared.update_path(path.number, |state| {
                        state.connection = None;
                        // A new connection identifies all namespaces before it is used.
                        state.suspended = false;
                        state.wait = wait;
                    });
                }
            }
            PathEvent::Barrier(reply) => send_reply(&reply, ()),
            PathEvent::AttachFailed { path, why } => {
                self.drop_path(&path);
                if let Some(reply) = sync::lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(Err(why));
                }
            }
            PathEvent::ReconnectTimedOut(path) => {
                log::warn!(target: "bdev_nvme", "{}: {}: reconnection timed out", self.name, path.id().0.controller());
                self.remove_path(&path);
                path.stop();
            }
            PathEvent::Detach(path, reply) => {
                self.remove_path(&path);
                if self.paths().iter().any(|other| Arc::ptr_eq(other, &path)) {
                    sync::lock(&self.detaching).entry(path.number).or_default().push(reply);
                    path.stop();
                }
            }
            PathEvent::Stopped(path) => {
                self.remove_path(&path);
                self.drop_path(&path);
                sync::lock(&self.detaching).remove(&path.number);
                if let Some(reply) = sync::lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(Err("the controller was detached meanwhile".into()));
                }
            }
        }
    }

    fn drop_path(&self, path: &Arc<ControllerPath>) {
        sync::lock(&self.paths).retain(|other| !Arc::ptr_eq(other, path));
        sync::lock(&self.refused).retain(|(number, _)| *number != path.number);
    }

    /// The namespaces that are attached on a path.
    pub(crate) fn nsids_on(&self, path: &ControllerPath) -> BTreeSet<u32> {
        let namespaces = self.namespaces();
        let on_path = namespaces.iter().filter(|namespace| namespace.shared.has_path(path.number));
        on_path.map(|namespace| namespace.shared.nsid).collect()
    }

    /// Applies the namespaces of a connected path; returns the names of its block devices.
    fn apply_scan(
        &self,
        path: &Arc<ControllerPath>,
        epoch: u64,
        scan: NamespaceScan,
        queues: &Arc<dyn IoQueues>,
        groups: &AnaGroups,
    ) -> Result<Vec<String>, String> {
        if path.is_stopping() {
            return Err("the controller is being detached".into());
        }
        // All that has gone first: what has come in its place may have the identifiers of another of them.
        self.remove_absent(path, &scan);
        self.apply_ana(path, groups);
        let mut names = Vec::new();
        let mut errors = Vec::new();
        for scanned in &scan.identified {
            let ana = ana_state_of(groups.as_deref(), scanned.identify.anagrpid);
            let (queues, identify) = (queues.clone(), scanned.identify.clone());
            let connection = PathConnection { epoch, queues, identify, metadata: scanned.metadata };
            let refused = (path.number, scanned.nsid);
            match self.apply_namespace(path, connection, scanned, ana) {
                Ok(name) => {
                    sync::lock(&self.refused).remove(&refused);
                    names.push(name);
                }
                Err(why) => {
                    sync::lock(&self.refused).insert(refused);
                    errors.push(why);
                }
            }
        }
        if errors.is_empty() {
            return Ok(names);
        }
        let why = joined(&errors);
        if names.is_empty() {
            return Err(why);
        }
        log::warn!(target: "bdev_nvme", "{}: {why}", self.name);
        Ok(names)
    }

    /// Removes a path from the namespaces that it does not have any more, or under whose identifier it has
    /// another one.
    fn remove_absent(&self, path: &Arc<ControllerPath>, scan: &NamespaceScan) {
        let controller = path.identity();
        for namespace in self.namespaces() {
            let nsid = namespace.shared.nsid;
            if !namespace.shared.has_path(path.number) || scan.unchanged.contains(&nsid) {
                continue;
            }
            if let Some(scanned) = scan.identified.iter().find(|scanned| scanned.nsid == nsid) {
                let Some(why) = namespace.bdev.difference(scanned, controller.as_deref()) else { continue };
                let (name, path) = (&namespace.bdev_name, path.id().0.controller());
                log::warn!(target: "bdev_nvme", "{name} loses its path {path}: namespace {nsid} was replaced: {why}");
            }
            // At once: what waits for the namespace must not reach another one.
            namespace.shared.remove_path(path.number);
            self.remove_namespace_path(&namespace, path);
        }
    }

    fn apply_namespace(
        &self,
        path: &Arc<ControllerPath>,
        connection: PathConnection,
        scanned: &ScannedNamespace,
        ana: AnaState,
    ) -> Result<String, String> {
        let nsid = scanned.nsid;
        let known = sync::lock(&self.namespaces).get(&nsid).cloned();
        let namespace = match known {
            Some(namespace) => {
                if let Some(why) = namespace.bdev.difference(scanned, path.identity().as_deref()) {
                    return Err(format!(
                        "namespace {nsid} of {} differs from that of the other paths: {why}",
                        path.id().0.controller()
                    ));
                }
                namespace
            }
            None => self.create_namespace(path, scanned)?,
        };
        namespace.set_limits(path.number, scanned);
        let blocks = scanned.identify.nsze;
        if namespace.shared.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            // Fails only if the device was removed meanwhile.
            let _ = self.registry.notify_resized(&namespace.bdev_name);
        }
        namespace.shared.set_path(NamespacePath {
            id: path.number,
            controller_path: path.clone(),
            connection: Some(connection),
            anagrpid: scanned.identify.anagrpid,
            ana,
            ana_generation: next_generation(),
            suspended: false,
            scan_generation: next_generation(),
            wait: self.io_wait(path, ana),
        });
        if !sync::lock(&self.namespaces).contains_key(&nsid) {
            let device: Arc<dyn bdev::Bdev> = namespace.bdev.clone();
            let uuid = scanned.identity.uuid.filter(|uuid| !uuid.is_nil());
            let nguid = Uuid::from_bytes(scanned.identity.nguid);
            let uuid = uuid.or((!nguid.is_nil()).then_some(nguid));
            self.registry
                .register(&namespace.bdev_name, uuid, &[], device)
                .map_err(|error| format!("namespace {nsid}: {error}"))?;
            sync::lock(&self.namespaces).insert(nsid, namespace.clone());
        }
        Ok(namespace.bdev_name.clone())
    }

    fn create_namespace(
        &self,
        path: &ControllerPath,
        scanned: &ScannedNamespace,
    ) -> Result<Arc<AttachedNamespace>, String> {
        let identity = path.identity().ok_or("the controller was not identified")?;
        let view =
            Arc::new(SharedNamespace::new(scanned.nsid, *sync::lock(&self.policy), self.totals.clone()));
        view.blocks.store(scanned.identify.nsze, Ordering::Relaxed);
        let subnqn = path.id().subnqn().unwrap_or(&identity.subnqn);
        let bdev = Arc::new(NvmeBdev::new(&view, scanned, &identity, subnqn, self.retries_max));
        let bdev_name = format!("{}n{}", self.name, scanned.nsid);
        Ok(Arc::new(AttachedNamespace { bdev_name, shared: view, bdev, limits: Mutex::default() }))
    }

    /// How long I/O waits for a path in an ANA state: in a transition for the ANA transition time that the
    /// controller reports (Base 2.0, section 8.1.3, ANATT).
    fn io_wait(&self, path: &ControllerPath, ana: AnaState) -> IoWait {
        let anatt_s = path.identity().map_or(0, |identity| identity.anatt_s);
        match ana {
            AnaState::Inaccessible | AnaState::Change if anatt_s > 0 => {
                IoWait::Until(self.clock.now_ns().saturating_add(u64::from(anatt_s) * 1_000_000_000))
            }
            AnaState::PersistentLoss => IoWait::No,
            _ => IoWait::Unlimited,
        }
    }

    fn apply_ana(&self, path: &Arc<ControllerPath>, groups: &AnaGroups) {
        for namespace in self.namespaces() {
            namespace.shared.update_path(path.number, |state| {
                let ana = ana_state_of(groups.as_deref(), state.anagrpid);
                let may_wait = |ana| matches!(ana, AnaState::Inaccessible | AnaState::Change);
                // The time runs from the first of consecutive unusable states.
                if !(may_wait(ana) && may_wait(state.ana)) {
                    state.wait = self.io_wait(path, ana);
                }
                state.ana = ana;
                state.ana_generation = next_generation();
            });
        }
    }

    fn remove_path(&self, path: &Arc<ControllerPath>) {
        for namespace in self.namespaces() {
            if namespace.shared.has_path(path.number) {
                self.remove_namespace_path(&namespace, path);
            }
        }
    }

    /// Removes a path of a namespace; removes the block device with its last path.
    fn remove_namespace_path(&self, namespace: &Arc<AttachedNamespace>, path: &Arc<ControllerPath>) {
        let last = namespace.shared.paths().iter().all(|state| state.id == path.number);
        if last {
            sync::lock(&self.namespaces).remove(&namespace.shared.nsid);
            // It may have been removed by name already.
            if let Ok(device) = self.registry.unregister(&namespace.bdev_name) {
                // I/O in flight may still complete; what remains fails with the path.
                device.wait_closed(CLOSE_TIMEOUT);
            }
        }
        namespace.shared.remove_path(path.number);
        sync::lock(&namespace.limits).remove(&path.number);
        if last {
            self.rescan_refused();
        }
    }

    /// A namespace has gone: another one may be attached now.
    fn rescan_refused(&self) {
        let refused = std::mem::take(&mut *sync::lock(&self.refused));
        for path in self.paths() {
            let nsids: BTreeSet<u32> =
                refused.iter().filter(|(number, _)| *number == path.number).map(|(_, nsid)| *nsid).collect();
            if !nsids.is_empty() {
                path.request_rescan(ChangedNamespaces::Some(nsids));
            }
        }
    }

    pub(crate) fn policy(&self) -> Policy {
        *sync::lock(&self.policy)
    }
}

impl AttachedNamespace {
    /// Updates the limits: a request must fit every path, as it may use any.
    fn set_limits(&self, path: PathId, scanned: &ScannedNamespace) {
        let mut limits = sync::lock(&self.limits);
        limits.insert(path, scanned.clone());
        let view = &self.shared;
        let transfer_max = limits.values().map(|one| one.transfer_max_bytes).min().unwrap_or(0);
        view.transfer_max_bytes.store(transfer_max.max(scanned.block_size), Ordering::Relaxed);
        let most = |of: fn(&ScannedNamespace) -> u32| limits.values().map(of).max().unwrap_or(1);
        view.alignment.store(most(|one| one.alignment), Ordering::Relaxed);
        view.virtual_boundary.store(most(|one| one.virtual_boundary), Ordering::Relaxed);
        let atomic = limits.values().map(|one| one.atomic).reduce(AtomicUnit::and).unwrap_or_default();
        view.atomic_blocks.store(atomic.blocks, Ordering::Relaxed);
        view.atomic_boundary.store(atomic.boundary_blocks, Ordering::Relaxed);
        view.unmap.store(limits.values().all(|one| one.unmap), Ordering::Relaxed);
        view.write_zeroes.store(limits.values().all(|one| one.write_zeroes), Ordering::Relaxed);
        let uncorrectable = limits.values().all(|one| one.write_uncorrectable);
        view.write_uncorrectable.store(uncorrectable, Ordering::Relaxed);
    }
}

/// What is wrong with several namespaces, in one line.
fn joined(errors: &[String]) -> String {
    // A controller may have thousands of namespaces; the line stays readable.
    const NAMED_MAX: usize = 32;
    let named = &errors[..errors.len().min(NAMED_MAX)];
    match errors.len() - named.len() {
        0 => named.join("; "),
        more => format!("{}; and {more} more", named.join("; ")),
    }
}

fn next_generation() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

/// Handles a path event; runs on the event thread.
pub(crate) fn handle((group, event): GroupEvent) {
    group.handle(event);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_namespace_that_collides_is_named_up_to_a_limit() {
        let errors: Vec<String> = (1..=34).map(|nsid| format!("namespace {nsid}: taken")).collect();
        assert_eq!(joined(&errors[..2]), "namespace 1: taken; namespace 2: taken");
        let all = joined(&errors);
        assert!(all.ends_with("namespace 32: taken; and 2 more"), "{all}");
    }
}
