//! The initiator: attaches controllers and keeps them, for the control plane.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError, Sender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bdev::Registry;
use nvme::Uri;
use reactor::Remote;
use wire_nvme::identify::IdentifyController;
use wire_nvme::log::AnaState;

use crate::counts::PathStats;
use crate::discovery::Service;
use crate::group;
pub(crate) use crate::group::{Group, Job, News};
use crate::inject::ErrorInjection;
use crate::multipath::Policy;
use crate::path::{Command, Path, PathConfig, PathStatus, Refusal, TransportId, lock, run_direct, run_tcp};
use crate::totals::{Totals, TransportStats};
use crate::view::PathId;

/// Most paths of one subsystem.
pub const PATHS_MAX: usize = 32;
/// Most names of controllers.
const GROUPS_MAX: usize = 1024;
/// How long a reset or an admin command is waited for beyond the driver's own timeout.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// Why something could not be done to a controller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InitiatorError {
    /// No controller has that name.
    #[error("Controller {0} does not exist")]
    NotFound(String),
    /// The name is taken.
    #[error("{0}")]
    Exists(String),
    /// What was asked makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The controller could not be attached.
    #[error("{0}")]
    Attach(String),
    /// The controller answered with an error, or not at all.
    #[error("{0}")]
    Admin(String),
    /// There is no reactor to run it on.
    #[error("there is no reactor to attach controllers on")]
    NoReactor,
    /// Something else is being done to the controller.
    #[error("{0}")]
    Busy(String),
    /// It took too long.
    #[error("{0} took too long")]
    Timeout(&'static str),
}

/// What is done to controllers as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// They are connected to anew, or reset.
    Reset,
    /// They are let go of, and stay attached.
    Disable,
    /// They are connected to again.
    Enable,
}

/// Which queues of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The admin queue.
    Admin,
    /// I/O queues.
    Io,
}

/// What a second controller under a name means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Multipath {
    /// It is refused.
    Disable,
    /// It is a path that carries I/O when the first cannot.
    Failover,
    /// It is a path, used as the policy says.
    #[default]
    Multipath,
}

/// A controller to be attached.
#[derive(Clone, Debug)]
pub struct Attach {
    /// The name; namespace 1 becomes the bdev `NAMEn1`.
    pub name: String,
    /// The path.
    pub path: PathConfig,
    /// What it means where the name is taken.
    pub multipath: Multipath,
    /// How I/O is shared out; of the first path of a name.
    pub policy: Policy,
    /// Times that an I/O is tried again for reasons that are not the path.
    pub retries_max: u16,
    /// Whether a discovery service asks.
    pub discovered: bool,
}

/// A path, to be shown.
#[derive(Clone, Debug)]
pub struct PathInfo {
    /// Its number.
    pub number: PathId,
    /// How it was configured.
    pub config: PathConfig,
    /// How it is.
    pub status: PathStatus,
    /// Why it is not attached.
    pub failure: Option<String>,
    /// The controller's identifier.
    pub cntlid: u16,
    /// What it said of itself last.
    pub identity: Option<Arc<IdentifyController>>,
}

/// A name with its paths, to be shown.
#[derive(Clone, Debug)]
pub struct ControllerInfo {
    /// The name.
    pub name: String,
    /// Its bdevs.
    pub bdevs: Vec<String>,
    /// Its paths.
    pub paths: Vec<PathInfo>,
    /// Policy of new namespaces.
    pub policy: Policy,
    /// Whether a discovery service made it.
    pub discovered: bool,
}

/// The way from one core's channel to one path.
#[derive(Clone, Debug)]
pub struct IoPath {
    /// The bdev.
    pub bdev: String,
    /// The core, by index.
    pub core: usize,
    /// The path.
    pub path: PathInfo,
    /// I/O goes this way now.
    pub current: bool,
    /// Its queue is open.
    pub connected: bool,
    /// How the controller reaches the namespace.
    pub ana: AnaState,
}

/// The NVMe initiator of a program. Cheap to clone; for any thread but a reactor's.
#[derive(Clone)]
pub struct Initiator(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) registry: Registry,
    pub(crate) remotes: Vec<Remote>,
    groups: Mutex<BTreeMap<String, Arc<Group>>>,
    jobs: Mutex<Option<Sender<Job>>>,
    services: Mutex<BTreeMap<String, Service>>,
    totals: Arc<Totals>,
}

impl Initiator {
    /// Without controllers. The first of the reactors keeps those that will be attached.
    pub fn new(registry: Registry, remotes: &[Remote]) -> Initiator {
        Initiator(Arc::new(Inner {
            registry,
            remotes: remotes.to_vec(),
            groups: Mutex::default(),
            jobs: Mutex::default(),
            services: Mutex::default(),
            totals: Arc::default(),
        }))
    }

    pub(crate) fn remote(&self) -> Result<Remote, InitiatorError> {
        self.0.remotes.first().cloned().ok_or(InitiatorError::NoReactor)
    }

    pub(crate) fn services(&self) -> MutexGuard<'_, BTreeMap<String, Service>> {
        lock(&self.0.services)
    }

    /// Where paths tell what happens; starts the thread that listens with the first of them.
    fn jobs(&self) -> Result<Sender<Job>, InitiatorError> {
        let mut jobs = lock(&self.0.jobs);
        if let Some(sender) = &*jobs {
            return Ok(sender.clone());
        }
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .name("bdev_nvme".into())
            .spawn(move || group::run(&receiver))
            .map_err(|error| InitiatorError::Attach(format!("no thread can be started: {error}")))?;
        Ok(jobs.insert(sender).clone())
    }

    /// Attaches a controller and returns its bdevs. Waits until it is identified.
    pub fn attach(&self, attach: Attach) -> Result<Vec<String>, InitiatorError> {
        let remote = self.remote()?;
        let path = Arc::new(Path::new(attach.path.clone()));
        let (reply, answer) = sync_channel(1);
        let group = self.enroll(&attach, &path, reply)?;
        let (task_path, task_group) = (path.clone(), group.clone());
        let posted = remote.post(move |core| {
            let (path, group) = (task_path, task_group);
            let refused = match path.id().0.clone() {
                Uri::Tcp(uri) => !core.spawn(run_tcp(core.clone(), path.clone(), uri, group.clone())),
                Uri::Pcie(_) | Uri::VfioUser(_) => {
                    !core.spawn(run_direct(core.clone(), path.clone(), group.clone()))
                }
            };
            if refused {
                let why = "the reactor runs too many tasks".to_string();
                group.tell(News::NotAttached { path, why });
            }
        });
        let outcome = match posted {
            Err(gone) => Err(InitiatorError::Attach(gone.to_string())),
            Ok(()) => match answer.recv() {
                Ok(Ok(names)) => Ok(names),
                Ok(Err(why)) => Err(InitiatorError::Attach(why)),
                Err(_) => Err(InitiatorError::Attach("the reactor ended".into())),
            },
        };
        if outcome.is_err() {
            // What was made of it is taken back.
            let (done, gone) = sync_channel(1);
            group.tell(News::Detach(path, done));
            let _ = gone.recv_timeout(GRACE);
            self.drop_if_empty(&attach.name);
        }
        outcome
    }

    /// Puts a path into the group of its name.
    fn enroll(
        &self,
        attach: &Attach,
        path: &Arc<Path>,
        reply: mpsc::SyncSender<Result<Vec<String>, String>>,
    ) -> Result<Arc<Group>, InitiatorError> {
        let name = &attach.name;
        if name.is_empty() || name.len() > 128 {
            return Err(InitiatorError::Invalid("a controller's name has 1 to 128 bytes".into()));
        }
        let jobs = self.jobs()?;
        let mut groups = lock(&self.0.groups);
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
            if attach.multipath == Multipath::Disable {
                return Err(InitiatorError::Exists(format!("A controller named {name} already exists")));
            }
            if paths.len() >= PATHS_MAX {
                return Err(InitiatorError::Invalid(format!("{name} has {PATHS_MAX} paths already")));
            }
            let other = paths.iter().find(|other| other.id().subnqn() != path.id().subnqn());
            if let Some(other) = other {
                return Err(InitiatorError::Invalid(format!(
                    "{name} is subsystem {}, of which this is no path",
                    other.id().subnqn().unwrap_or("of a local device")
                )));
            }
            group.add_path(path.clone(), reply);
            return Ok(group.clone());
        }
        if groups.len() >= GROUPS_MAX {
            return Err(InitiatorError::Invalid(format!("there are {GROUPS_MAX} controllers already")));
        }
        let policy =
            if attach.multipath == Multipath::Failover { Policy::ActivePassive } else { attach.policy };
        let group = Arc::new(Group::new(
            name,
            self.0.registry.clone(),
            jobs,
            policy,
            attach.retries_max,
            attach.discovered,
            self.0.totals.clone(),
        ));
        group.add_path(path.clone(), reply);
        groups.insert(name.clone(), group.clone());
        Ok(group)
    }

    fn drop_if_empty(&self, name: &str) {
        let mut groups = lock(&self.0.groups);
        if groups.get(name).is_some_and(|group| group.paths().is_empty()) {
            groups.remove(name);
        }
    }

    pub(crate) fn group(&self, name: &str) -> Result<Arc<Group>, InitiatorError> {
        let group = lock(&self.0.groups).get(name).cloned();
        group.ok_or_else(|| InitiatorError::NotFound(name.to_string()))
    }

    /// Detaches the paths of a name for which `which` is true, and removes the bdevs that are left without
    /// any. Waits until it is done.
    pub fn detach(&self, name: &str, which: impl Fn(&TransportId) -> bool) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let paths: Vec<_> = group.paths().into_iter().filter(|path| which(path.id())).collect();
        if paths.is_empty() {
            return Err(InitiatorError::NotFound(format!("{name} by that path")));
        }
        let mut answers = Vec::new();
        for path in paths {
            let (reply, answer) = sync_channel(1);
            group.tell(News::Detach(path, reply));
            answers.push(answer);
        }
        for answer in answers {
            // The answer is that the sender is gone.
            if let Err(RecvTimeoutError::Timeout) = answer.recv_timeout(Duration::from_secs(30)) {
                return Err(InitiatorError::Timeout("detaching"));
            }
        }
        self.drop_if_empty(name);
        Ok(())
    }

    /// Detaches everything, while the reactors still turn.
    pub fn shutdown(&self) {
        let services: Vec<String> = self.services().keys().cloned().collect();
        for name in services {
            let _ = self.stop_discovery(&name);
        }
        let names: Vec<String> = lock(&self.0.groups).keys().cloned().collect();
        for name in names {
            // Gone already, then.
            let _ = self.detach(&name, |_| true);
        }
        *lock(&self.0.jobs) = None;
    }

    /// Lets go of everything without waiting, once the reactors have stopped: they took the controllers with
    /// them.
    pub fn forget(&self) {
        for (_, service) in std::mem::take(&mut *self.services()) {
            service.path.stop();
        }
        for (_, group) in std::mem::take(&mut *lock(&self.0.groups)) {
            group.paths().iter().for_each(|path| path.stop());
        }
        *lock(&self.0.jobs) = None;
    }

    /// Resets every path of a name.
    pub fn reset(&self, name: &str) -> Result<(), InitiatorError> {
        self.operate(name, None, Operation::Reset)
    }

    /// Resets, disables or enables the paths of a name one after the other, or the one through the controller that
    /// has that identifier. What is that way already stays so. A controller that is disabled is let go of: I/O goes
    /// through other paths, or fails. Returns when I/O goes as it will from then on.
    pub fn operate(
        &self,
        name: &str,
        cntlid: Option<u16>,
        operation: Operation,
    ) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let mut paths = group.paths();
        if let Some(cntlid) = cntlid {
            paths.retain(|path| path.cntlid() == cntlid);
            if paths.is_empty() {
                return Err(InitiatorError::NotFound(format!("{cntlid} of {name}")));
            }
        }
        for path in paths {
            let (done, answer) = sync_channel(1);
            let command = match operation {
                Operation::Reset => Command::Reset(done),
                Operation::Disable => Command::Disable(done),
                Operation::Enable => Command::Enable(done),
            };
            if !path.ask(command) {
                return Err(InitiatorError::Admin("too much is being asked of the controller".into()));
            }
            let patience = Duration::from_nanos(path.config.options.timeout_ns).saturating_mul(2) + GRACE;
            match answer.recv_timeout(patience) {
                Ok(Ok(()) | Err(Refusal::Already)) => {}
                Ok(Err(Refusal::Busy)) => {
                    return Err(InitiatorError::Busy("the controller is being connected to".into()));
                }
                Ok(Err(Refusal::Failed(why))) => return Err(InitiatorError::Admin(why)),
                Err(RecvTimeoutError::Timeout) => return Err(InitiatorError::Timeout("the controller")),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(InitiatorError::Admin("the controller was detached meanwhile".into()));
                }
            }
        }
        if !group.settle() {
            return Err(InitiatorError::Timeout("telling reactors of it"));
        }
        Ok(())
    }

    /// Has commands of one opcode end otherwise on the first path of a name: on each I/O queue that it has now, or
    /// on its admin queue. One injection an opcode; `None` ends it.
    pub fn inject(
        &self,
        name: &str,
        queue: Queue,
        opcode: u8,
        injection: Option<ErrorInjection>,
    ) -> Result<(), InitiatorError> {
        let group = self.group(name)?;
        let path = group.paths().into_iter().next();
        let path = path.ok_or_else(|| InitiatorError::NotFound(name.to_string()))?;
        match queue {
            Queue::Admin => path.put_admin_fault(opcode, injection),
            Queue::Io => {
                path.orders.give(opcode, injection);
                if !group.settle() {
                    return Err(InitiatorError::Timeout("telling reactors of it"));
                }
            }
        }
        Ok(())
    }

    /// What the I/O queues of each core did over each transport since the start, those included that are gone. A
    /// queue tells what it has done whenever something completes.
    pub fn transport_stats(&self) -> Vec<TransportStats> {
        self.0.totals.all()
    }

    /// Bytes of a block of a namespace.
    pub(crate) fn block_size(&self, name: &str, nsid: u32) -> Option<u32> {
        let namespaces = self.group(name).ok()?.namespaces();
        let namespace = namespaces.into_iter().find(|namespace| namespace.view.nsid == nsid)?;
        Some(bdev::Bdev::geometry(&*namespace.bdev).block_size)
    }

    /// Every controller, by name.
    pub fn controllers(&self) -> Vec<ControllerInfo> {
        let groups: Vec<_> = lock(&self.0.groups).values().cloned().collect();
        let of = |group: Arc<Group>| ControllerInfo {
            name: group.name.clone(),
            bdevs: group.bdev_names(),
            paths: group.paths().iter().map(info).collect(),
            policy: group.policy(),
            discovered: group.discovered,
        };
        groups.into_iter().map(of).collect()
    }

    /// The ways from channels to paths; of one bdev or of all.
    pub fn io_paths(&self, bdev: Option<&str>) -> Vec<IoPath> {
        let groups: Vec<_> = lock(&self.0.groups).values().cloned().collect();
        let mut all = Vec::new();
        for namespace in groups.iter().flat_map(|group| group.namespaces()) {
            if bdev.is_some_and(|bdev| bdev != namespace.bdev_name) {
                continue;
            }
            let paths = namespace.view.paths();
            for board in namespace.view.boards() {
                for link in board.links().iter() {
                    let Some(state) = paths.iter().find(|state| state.id == link.id) else { continue };
                    all.push(IoPath {
                        bdev: namespace.bdev_name.clone(),
                        core: board.core,
                        path: info(&state.path),
                        current: link.current,
                        connected: link.connected,
                        ana: state.ana,
                    });
                }
            }
        }
        all
    }

    /// What went over each path of a bdev; zeroes for paths whose [`PathConfig::count_io`] is off.
    pub fn path_stats(&self, bdev: &str) -> Result<Vec<(PathInfo, PathStats)>, InitiatorError> {
        let stats = self.view(bdev)?.path_stats();
        Ok(stats.into_iter().map(|(path, stats)| (info(&path), stats)).collect())
    }

    fn view(&self, bdev: &str) -> Result<Arc<crate::view::View>, InitiatorError> {
        let groups: Vec<_> = lock(&self.0.groups).values().cloned().collect();
        let mut namespaces = groups.iter().flat_map(|group| group.namespaces());
        let found = namespaces.find(|namespace| namespace.bdev_name == bdev);
        found.map(|found| found.view.clone()).ok_or_else(|| InitiatorError::NotFound(bdev.to_string()))
    }

    /// Shares I/O of a bdev out in another way.
    pub fn set_policy(&self, bdev: &str, policy: Policy) -> Result<(), InitiatorError> {
        self.view(bdev)?.set_policy(policy);
        Ok(())
    }

    /// Makes the path through a controller the one that is taken among equals.
    pub fn set_preferred(&self, bdev: &str, cntlid: u16) -> Result<(), InitiatorError> {
        let view = self.view(bdev)?;
        let path = view.paths().into_iter().find(|state| state.path.cntlid() == cntlid);
        let path = path.ok_or_else(|| InitiatorError::NotFound(format!("{bdev} by controller {cntlid}")))?;
        view.set_preferred(path.id);
        Ok(())
    }
}

pub(crate) fn info(path: &Arc<Path>) -> PathInfo {
    PathInfo {
        number: path.number,
        config: path.config.clone(),
        status: path.status(),
        failure: path.failure(),
        cntlid: path.cntlid(),
        identity: path.identity(),
    }
}
