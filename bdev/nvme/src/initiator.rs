//! The initiator: the control-plane interface to attach, operate and detach controllers.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bdev::Registry;
use control::JobHandle;
use reactor::{ReactorHandle, blocking};
use sockets::{CoreNetwork, Sockets};
use wire_nvme::identify::IdentifyController;
use wire_nvme::log::AnaState;

use crate::attach::{Attach, MultipathMode};
use crate::controller_group::{self, ControllerGroup, GroupEvent, PathEvent};
use crate::counts::PathStats;
use crate::discovery_service::DiscoveryService;
use crate::inject::ErrorInjection;
use crate::multipath::Policy;
use crate::path::{
    ControllerOperation, ControllerPath, OperationError, PathCommand, PathConfig, PathStatus, TransportId,
};
use crate::path_id::PathId;
use crate::session::StartPath;
use crate::transport_stats::{TransportStats, TransportTotals};

/// Maximum number of paths of one subsystem.
pub const PATHS_MAX: usize = 32;
/// Maximum number of controller names.
const GROUPS_MAX: usize = 1024;
/// How long to wait until a path is detached.
const DETACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a waiting job checks whether it is cancelled.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// How long to wait for a reset or an admin command beyond the driver's timeout.
pub(crate) const TIMEOUT_MARGIN: Duration = Duration::from_secs(5);

/// Why an operation on a controller failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitiatorError {
    /// No controller has that name.
    #[error("Controller {0} does not exist")]
    NotFound(String),
    /// The name or the controller is in use.
    #[error("{0}")]
    Exists(String),
    /// A parameter is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The controller could not be attached.
    #[error("{0}")]
    Attach(String),
    /// An admin command failed, or the controller is not available.
    #[error("{0}")]
    Admin(String),
    /// The initiator was created without reactors.
    #[error("there is no reactor to attach controllers on")]
    NoReactor,
    /// Another operation on the controller is in progress.
    #[error("{0}")]
    Busy(String),
    /// The operation timed out.
    #[error("{0} timed out")]
    Timeout(&'static str),
    /// The job was cancelled; what it has done stays.
    #[error("the operation was cancelled")]
    Cancelled,
}

/// A kind of queue of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// The admin queue.
    Admin,
    /// I/O queues.
    Io,
}

/// Information about a path.
#[derive(Clone, Debug)]
pub struct PathInfo {
    /// Identifies the path in the process.
    pub number: PathId,
    /// Its configuration.
    pub config: PathConfig,
    /// Its current state.
    pub status: PathStatus,
    /// Why it is not attached, if it is not.
    pub failure: Option<String>,
    /// Controller identifier (CNTLID).
    pub cntlid: u16,
    /// The latest Identify Controller data.
    pub identity: Option<Arc<IdentifyController>>,
}

/// Information about the controllers under one name.
#[derive(Clone, Debug)]
pub struct ControllerGroupInfo {
    /// Name of the controllers.
    pub name: String,
    /// Names of its block devices.
    pub bdevs: Vec<String>,
    /// Paths, in the order of their attachment.
    pub paths: Vec<PathInfo>,
    /// Path selection policy of new namespaces.
    pub policy: Policy,
    /// Whether a discovery service attached it.
    pub discovered: bool,
}

/// Information about the link from one channel to one path.
#[derive(Clone, Debug)]
pub struct IoPath {
    /// Name of the block device.
    pub bdev: String,
    /// Index of the channel's core.
    pub core: usize,
    /// The path that the link belongs to.
    pub path: PathInfo,
    /// Whether it is the path of the next I/O.
    pub current: bool,
    /// Whether its I/O queue is open.
    pub connected: bool,
    /// ANA state of the namespace on the path.
    pub ana: AnaState,
}

/// The NVMe initiator of a program. Cheap to clone; usable from any thread except a reactor's, as most
/// methods block.
///
/// It owns the controller groups, the discovery services, and the thread that handles path events. Call
/// [`shutdown`](Self::shutdown) before the reactors stop, or [`stop_all`](Self::stop_all) after.
#[derive(Clone)]
pub struct Initiator(Arc<InitiatorInner>);

pub(crate) struct InitiatorInner {
    pub(crate) registry: Registry,
    pub(crate) reactors: Vec<ReactorHandle>,
    groups: Mutex<BTreeMap<String, Arc<ControllerGroup>>>,
    events: Mutex<Option<Sender<GroupEvent>>>,
    services: Mutex<BTreeMap<String, DiscoveryService>>,
    totals: Arc<TransportTotals>,
    start_path: StartPath,
}

impl Initiator {
    /// Without controllers. The first of `reactors` is the control core, which runs the tasks of all paths.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Initiator {
        Initiator::with_network::<Sockets>(registry, reactors)
    }

    /// As [`new`](Self::new), with paths over the network `N`, such as a simulation's. Discovery services use
    /// kernel sockets.
    pub fn with_network<N: CoreNetwork>(registry: Registry, reactors: &[ReactorHandle]) -> Initiator {
        Initiator(Arc::new(InitiatorInner {
            registry,
            reactors: reactors.to_vec(),
            groups: Mutex::default(),
            events: Mutex::default(),
            services: Mutex::default(),
            totals: Arc::default(),
            start_path: crate::session::start::<N>,
        }))
    }

    pub(crate) fn control_reactor(&self) -> Result<ReactorHandle, InitiatorError> {
        self.0.reactors.first().cloned().ok_or(InitiatorError::NoReactor)
    }

    pub(crate) fn discovery_services(&self) -> MutexGuard<'_, BTreeMap<String, DiscoveryService>> {
        sync::lock(&self.0.services)
    }

    /// The sender of path events; starts the event thread on first use.
    fn event_sender(&self) -> Result<Sender<GroupEvent>, InitiatorError> {
        let mut events = sync::lock(&self.0.events);
        if let Some(sender) = &*events {
            return Ok(sender.clone());
        }
        let (sender, receiver) = mpsc::channel();
        blocking::spawn_worker("bdev_nvme", receiver, controller_group::handle)
            .map_err(|error| InitiatorError::Attach(format!("no thread can be started: {error}")))?;
        Ok(events.insert(sender).clone())
    }

    /// Attaches a controller and returns the names of its block devices. Blocks until its namespaces are
    /// scanned.
    pub fn attach(&self, attach: Attach) -> Result<Vec<String>, InitiatorError> {
        let reactor = self.control_reactor()?;
        let path = Arc::new(ControllerPath::new(attach.path.clone()));
        let (reply, answer) = sync_channel(1);
        let group = self.add_to_group(&attach, &path, reply)?;
        let (task_path, task_group) = (path.clone(), group.clone());
        let start_path = self.0.start_path;
        let posted = reactor.post(move |core| {
            let (path, group) = (task_path, task_group);
            if !start_path(core, &path, &group) {
                let why = "the reactor runs too many tasks".to_string();
                group.send_event(PathEvent::AttachFailed { path, why });
            }
        });
        let outcome = match posted {
            Err(error) => Err(InitiatorError::Attach(error.to_string())),
            Ok(()) => match blocking::receive(&answer) {
                Ok(Ok(names)) => Ok(names),
                Ok(Err(why)) => Err(InitiatorError::Attach(why)),
                Err(_) => Err(InitiatorError::Attach("the reactor has stopped".into())),
            },
        };
        if outcome.is_err() {
            // Remove the path and what was created for it.
            let (reply, detached) = sync_channel(1);
            group.send_event(PathEvent::Detach(path, reply));
            let _ = blocking::receive_timeout(&detached, TIMEOUT_MARGIN);
            self.drop_if_empty(&attach.name);
        }
        outcome
    }

    /// Adds a path to the group of its name; creates the group for the first path.
    fn add_to_group(
        &self,
        attach: &Attach,
        path: &Arc<ControllerPath>,
        reply: mpsc::SyncSender<Result<Vec<String>, String>>,
    ) -> Result<Arc<ControllerGroup>, InitiatorError> {
        let name = &attach.name;
        if name.is_empty() || name.len() > 128 {
            return Err(InitiatorError::Invalid("a controller's name has 1 to 128 bytes".into()));
        }
        let events = self.event_sender()?;
        let mut groups = sync::lock(&self.0.groups);
        let holder = groups.values().find(|group| {
            group.paths().iter().any(|other| other.id().0.controller() == path.id().0.controller())
        });
        if let Some(holder) = holder {
            let controller = path.id().0.controller();
            return Err(InitiatorError::Exists(format!(
                "{controller} is attached already, as {}",
                holder.name
            )));
        }
        if let Some(group) = groups.get(name) {
            let paths = group.paths();
            if attach.multipath == MultipathMode::Disable {
                return Err(InitiatorError::Exists(format!("A controller named {name} already exists")));
            }
            if paths.len() >= PATHS_MAX {
                return Err(InitiatorError::Invalid(format!(
                    "{name} already has the maximum of {PATHS_MAX} paths"
                )));
            }
            let other = paths.iter().find(|other| other.id().subnqn() != path.id().subnqn());
            if let Some(other) = other {
                return Err(InitiatorError::Invalid(format!(
                    "{name} is subsystem {}, to which this controller does not belong",
                    other.id().subnqn().unwrap_or("of a local device")
                )));
            }
            group.add_path(path.clone(), reply);
            return Ok(group.clone());
        }
        if groups.len() >= GROUPS_MAX {
            return Err(InitiatorError::Invalid(format!(
                "the maximum of {GROUPS_MAX} controllers is reached"
            )));
        }
        let policy =
            if attach.multipath == MultipathMode::Failover { Policy::ActivePassive } else { attach.policy };
        let group = Arc::new(ControllerGroup::new(
            attach,
            policy,
            self.0.registry.clone(),
            self.0.reactors.clone(),
            events,
            self.0.totals.clone(),
        ));
        group.add_path(path.clone(), reply);
        groups.insert(name.clone(), group.clone());
        Ok(group)
    }

    fn drop_if_empty(&self, name: &str) {
        let mut groups = sync::lock(&self.0.groups);
        if groups.get(name).is_some_and(|group| group.paths().is_empty()) {
            groups.remove(name);
        }
    }

    /// Drops names of which the last path has ended by itself.
    pub(crate) fn drop_empty(&self) {
        sync::lock(&self.0.groups).retain(|_, group| !group.paths().is_empty());
    }

    pub(crate) fn group(&self, name: &str) -> Result<Arc<ControllerGroup>, InitiatorError> {
        let group = sync::lock(&self.0.groups).get(name).cloned();
        group.ok_or_else(|| InitiatorError::NotFound(name.to_string()))
    }

    /// Detaches the paths of a name that `which` selects, one after the other, and removes block devices
    /// without a path. Blocks until that is done. If `job` is cancelled, the remaining paths stay.
    pub fn detach(
        &self,
        name: &str,
        which: impl Fn(&TransportId) -> bool,
        job: &JobHandle,
    ) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let paths: Vec<_> = group.paths().into_iter().filter(|path| which(path.id())).collect();
        if paths.is_empty() {
            return Err(InitiatorError::NotFound(format!("{name} by that path")));
        }
        job.set_total(paths.len() as u64, "paths");
        for path in paths {
            if job.is_cancelled() {
                return Err(InitiatorError::Cancelled);
            }
            let (reply, answer) = sync_channel(1);
            group.send_event(PathEvent::Detach(path, reply));
            // The event thread drops the sender when the path is detached.
            if let Err(RecvTimeoutError::Timeout) = blocking::receive_timeout(&answer, DETACH_TIMEOUT) {
                return Err(InitiatorError::Timeout("detaching"));
            }
            job.advance(1);
        }
        self.drop_if_empty(name);
        Ok(())
    }

    /// Stops discovery and detaches all controllers. The reactors must still run.
    pub fn shutdown(&self) {
        let services: Vec<String> = self.discovery_services().keys().cloned().collect();
        for name in services {
            let _ = self.stop_discovery(&name, &JobHandle::standalone());
        }
        let names: Vec<String> = sync::lock(&self.0.groups).keys().cloned().collect();
        for name in names {
            // Fails only if it is detached already.
            let _ = self.detach(&name, |_| true, &JobHandle::standalone());
        }
        *sync::lock(&self.0.events) = None;
    }

    /// Stops all paths and discovery services without waiting. For use after the reactors have stopped, which
    /// dropped the controllers.
    pub fn stop_all(&self) {
        for (_, service) in std::mem::take(&mut *self.discovery_services()) {
            service.path.stop();
        }
        for (_, group) in std::mem::take(&mut *sync::lock(&self.0.groups)) {
            group.paths().iter().for_each(|path| path.stop());
        }
        *sync::lock(&self.0.events) = None;
    }

    /// Has the connected paths of a name authenticate with new keys: their admin queues at once, I/O queues
    /// after these, while they are polled. Paths that are not connected use the keys when they are.
    ///
    /// # Errors
    /// A controller does not accept the keys, or does not answer: its path is lost, and is connected anew.
    pub fn authenticate(&self, name: &str) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let job = JobHandle::standalone();
        let mut answers = Vec::new();
        for path in group.paths() {
            let (done, answer) = sync_channel(1);
            if !path.submit(PathCommand::Authenticate(done)) {
                return Err(InitiatorError::Admin("the command queue of the controller is full".into()));
            }
            // Each message of the exchange has this time.
            let wait =
                Duration::from_nanos(path.config.options.timeout_ns).saturating_mul(2) + TIMEOUT_MARGIN;
            answers.push((answer, wait));
        }
        let outcome =
            |(answer, wait): (Receiver<_>, Duration)| match receive_unless_cancelled(&answer, wait, &job) {
                Ok(Err(OperationError::Failed(why))) => Err(InitiatorError::Admin(why)),
                Ok(_) | Err(RecvTimeoutError::Disconnected) => Ok(()),
                Err(RecvTimeoutError::Timeout) => Err(InitiatorError::Timeout("the controller")),
            };
        // Each path is waited for, whatever becomes of the others.
        answers.into_iter().map(outcome).fold(Ok(()), Result::and)
    }

    /// Gives up the reservations that connected paths have, each through one path of its name. For the end of
    /// the program: I/O that is sent later fails once another host has reserved the namespace.
    pub fn release_reservations(&self) {
        let groups: Vec<_> = sync::lock(&self.0.groups).values().cloned().collect();
        let mut answers = Vec::new();
        for group in groups {
            let has_reserved = |path: &Arc<ControllerPath>| {
                path.config.reservation.is_some() && path.status() == PathStatus::Enabled
            };
            let (done, answer) = sync_channel(1);
            if group
                .paths()
                .into_iter()
                .find(has_reserved)
                .is_some_and(|path| path.submit(PathCommand::Release(done)))
            {
                answers.push(answer);
            }
        }
        for answer in answers {
            // The next program takes over what is not released.
            _ = blocking::receive_timeout(&answer, DETACH_TIMEOUT);
        }
    }

    /// Resets all paths of a name, one after the other.
    pub fn reset(&self, name: &str) -> Result<(), InitiatorError> {
        self.operate(name, None, ControllerOperation::Reset, &JobHandle::standalone())
    }

    /// Resets, disables or enables the paths of a name one after the other, or only the controller `cntlid`.
    /// No effect if it is in the requested state already. A disabled controller is disconnected: I/O uses
    /// other paths, or fails. Blocks until active channels have applied the change. If `job` is cancelled,
    /// the operation in progress goes on, and the remaining paths stay as they are.
    pub fn operate(
        &self,
        name: &str,
        cntlid: Option<u16>,
        operation: ControllerOperation,
        job: &JobHandle,
    ) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let mut paths = group.paths();
        if let Some(cntlid) = cntlid {
            paths.retain(|path| path.cntlid() == cntlid);
            if paths.is_empty() {
                return Err(InitiatorError::NotFound(format!("{cntlid} of {name}")));
            }
        }
        job.set_total(paths.len() as u64, "paths");
        for path in paths {
            if job.is_cancelled() {
                return Err(InitiatorError::Cancelled);
            }
            let (done, answer) = sync_channel(1);
            if !path.submit(PathCommand::Operate(operation, done)) {
                return Err(InitiatorError::Admin("the command queue of the controller is full".into()));
            }
            let wait =
                Duration::from_nanos(path.config.options.timeout_ns).saturating_mul(2) + TIMEOUT_MARGIN;
            match receive_unless_cancelled(&answer, wait, job) {
                Ok(Ok(()) | Err(OperationError::Already)) => job.advance(1),
                Ok(Err(OperationError::Busy)) => {
                    return Err(InitiatorError::Busy(
                        "a connection to the controller is being established".into(),
                    ));
                }
                Ok(Err(OperationError::Failed(why))) => return Err(InitiatorError::Admin(why)),
                Err(RecvTimeoutError::Timeout) if job.is_cancelled() => {
                    return Err(InitiatorError::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) => return Err(InitiatorError::Timeout("the controller")),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(InitiatorError::Admin("the controller was detached meanwhile".into()));
                }
            }
        }
        if !group.wait_applied() {
            return Err(InitiatorError::Timeout("applying the change on the reactors"));
        }
        Ok(())
    }

    /// Injects an error into commands of one opcode on the first path of a name: on each I/O queue that is
    /// open now, or on the admin queue. There is one injection an opcode; `None` removes it.
    pub fn inject(
        &self,
        name: &str,
        queue: QueueKind,
        opcode: u8,
        injection: Option<ErrorInjection>,
    ) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let path = group.paths().into_iter().next();
        let path = path.ok_or_else(|| InitiatorError::NotFound(name.to_string()))?;
        match queue {
            QueueKind::Admin => path.set_admin_injection(opcode, injection),
            QueueKind::Io => {
                path.injections.set(opcode, injection);
                if !group.wait_applied() {
                    return Err(InitiatorError::Timeout("applying the change on the reactors"));
                }
            }
        }
        Ok(())
    }

    /// Statistics of the I/O queues of each core and transport since the start, closed ones included. A queue
    /// publishes its counters when commands complete.
    pub fn transport_stats(&self) -> Vec<TransportStats> {
        self.0.totals.all()
    }

    /// Block size of a namespace in bytes.
    pub(crate) fn block_size(&self, name: &str, nsid: u32) -> Option<u32> {
        let namespaces = self.group(name).ok()?.namespaces();
        let namespace = namespaces.into_iter().find(|namespace| namespace.shared.nsid == nsid)?;
        Some(bdev::Bdev::geometry(&*namespace.bdev).block_size)
    }

    /// All controllers, sorted by name.
    pub fn controllers(&self) -> Vec<ControllerGroupInfo> {
        let groups: Vec<_> = sync::lock(&self.0.groups).values().cloned().collect();
        let info_of = |group: Arc<ControllerGroup>| ControllerGroupInfo {
            name: group.name.clone(),
            bdevs: group.bdev_names(),
            paths: group.paths().iter().map(path_info).collect(),
            policy: group.policy(),
            discovered: group.discovered,
        };
        groups.into_iter().map(info_of).collect()
    }

    /// The links from channels to paths, of one block device or of all.
    pub fn io_paths(&self, bdev: Option<&str>) -> Vec<IoPath> {
        let groups: Vec<_> = sync::lock(&self.0.groups).values().cloned().collect();
        let mut all = Vec::new();
        for namespace in groups.iter().flat_map(|group| group.namespaces()) {
            if bdev.is_some_and(|bdev| bdev != namespace.bdev_name) {
                continue;
            }
            let paths = namespace.shared.paths();
            for status in namespace.shared.channel_statuses() {
                for link in status.links().iter() {
                    let Some(state) = paths.iter().find(|state| state.id == link.id) else { continue };
                    all.push(IoPath {
                        bdev: namespace.bdev_name.clone(),
                        core: status.core,
                        path: path_info(&state.controller_path),
                        current: link.current,
                        connected: link.connected,
                        ana: state.ana,
                    });
                }
            }
        }
        all
    }

    /// I/O statistics of each path of a block device; zeroes for paths without [`PathConfig::count_io`].
    pub fn path_stats(&self, bdev: &str) -> Result<Vec<(PathInfo, PathStats)>, InitiatorError> {
        let stats = self.shared_namespace(bdev)?.path_stats();
        Ok(stats.into_iter().map(|(path, stats)| (path_info(&path), stats)).collect())
    }

    fn shared_namespace(
        &self,
        bdev: &str,
    ) -> Result<Arc<crate::shared_namespace::SharedNamespace>, InitiatorError> {
        let groups: Vec<_> = sync::lock(&self.0.groups).values().cloned().collect();
        let mut namespaces = groups.iter().flat_map(|group| group.namespaces());
        let found = namespaces.find(|namespace| namespace.bdev_name == bdev);
        found.map(|found| found.shared.clone()).ok_or_else(|| InitiatorError::NotFound(bdev.to_string()))
    }

    /// Changes the path selection policy of a block device.
    pub fn set_policy(&self, bdev: &str, policy: Policy) -> Result<(), InitiatorError> {
        self.shared_namespace(bdev)?.set_policy(policy);
        Ok(())
    }

    /// Makes a controller the preferred path among those of the same ANA state.
    pub fn set_preferred(&self, bdev: &str, cntlid: u16) -> Result<(), InitiatorError> {
        let view = self.shared_namespace(bdev)?;
        let path = view.paths().into_iter().find(|state| state.controller_path.cntlid() == cntlid);
        let path = path.ok_or_else(|| InitiatorError::NotFound(format!("{bdev} by controller {cntlid}")))?;
        view.set_preferred(path.id);
        Ok(())
    }
}

/// Receives a reply. Ends with a timeout when the job is cancelled.
fn receive_unless_cancelled<T>(
    replies: &Receiver<T>,
    timeout: Duration,
    job: &JobHandle,
) -> Result<T, RecvTimeoutError> {
    let mut left = timeout;
    loop {
        if job.is_cancelled() {
            return Err(RecvTimeoutError::Timeout);
        }
        let step = left.min(CANCEL_CHECK_INTERVAL);
        left -= step;
        match blocking::receive_timeout(replies, step) {
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            received => return received,
        }
    }
}

pub(crate) fn path_info(path: &Arc<ControllerPath>) -> PathInfo {
    PathInfo {
        number: path.number,
        config: path.config.clone(),
        status: path.status(),
        failure: path.failure(),
        cntlid: path.cntlid(),
        identity: path.identity(),
    }
}
