//! The control plane: modules in order, their methods, start-up stages and life cycle.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use reactor::ReactorHandle;
use serde_json::{Map, Value, json};

use crate::RpcError;
use crate::balancer::Balancer;
use crate::config::ConfigFile;
use crate::examine::{Examiner, UsedBdevs};
use crate::framework::{Framework, collect_reactors};
use crate::jobs::Jobs;
use crate::method::{BoundMethod, Catalog, StartupStage};
use crate::metrics::MetricSamples;
use crate::module::{DynModule, Module};

/// How long a call of a configuration waits for what is found on disks: a large store takes a minute to read,
/// and a disk may not answer at all.
const FOUND_WAIT_MAX: Duration = Duration::from_secs(300);

/// A reactor, and the kernel's ID of its thread.
#[derive(Clone)]
pub struct ManagedReactor {
    /// The reactor.
    pub handle: ReactorHandle,
    /// The kernel's ID of its thread; 0 if it is not known.
    pub thread_id: u64,
}

/// The registered modules and their methods. Shared by the threads of the [RPC server](crate::RpcServer).
///
/// [`invoke`](Self::invoke) calls a method: updates run one at a time; queries and jobs run beside them. At
/// exit: [`drain`](Self::drain), then stop the reactors, then [`stop`](Self::stop). It costs nothing on a
/// reactor.
pub struct ControlPlane {
    /// In the order of their start.
    modules: Vec<Arc<dyn DynModule>>,
    methods: BTreeMap<&'static str, BoundMethod>,
    catalog: Catalog,
    reactors: Vec<ManagedReactor>,
    jobs: Arc<Jobs>,
    examiner: Arc<Examiner>,
    balancer: Arc<Balancer>,
    /// Held during each update.
    update_lock: Arc<Mutex<()>>,
    /// Updates in the order in which they were called.
    turns: Turns,
    initial: Value,
    startup: Mutex<Startup>,
    started: Condvar,
}

struct Startup {
    stage: StartupStage,
    /// Applied by `framework_start_init`.
    pending: Option<ConfigFile>,
}

/// An update that runs.
pub(crate) struct UpdateGuard<'a> {
    _lock: MutexGuard<'a, ()>,
    _turn: Turn<'a>,
}

/// A lock that those who wait get in the order in which they came, which a mutex does not promise.
#[derive(Default)]
struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Default)]
struct TurnState {
    last: u64,
    ended: u64,
}

/// The lock of [`Turns`].
struct Turn<'a>(&'a Turns);

impl Turns {
    fn wait(&self) -> Turn<'_> {
        let mut state = sync::lock(&self.state);
        let before = state.last;
        state.last += 1;
        while state.ended < before {
            state = sync::wait(&self.changed, state);
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        sync::lock(&self.0.state).ended += 1;
        self.0.changed.notify_all();
    }
}

/// Collects modules for a [`ControlPlane`].
pub struct ControlPlaneBuilder {
    modules: Vec<Arc<dyn DynModule>>,
    methods: BTreeMap<&'static str, BoundMethod>,
    catalog: Catalog,
    reactors: Vec<ManagedReactor>,
    jobs: Arc<Jobs>,
    examiner: Arc<Examiner>,
    balancer: Arc<Balancer>,
    update_lock: Arc<Mutex<()>>,
}

impl ControlPlaneBuilder {
    /// Registers a module. Panics if its name or one of its methods is registered already.
    pub fn module<M: Module>(mut self, module: &Arc<M>) -> ControlPlaneBuilder {
        assert!(
            !self.modules.iter().any(|other| other.name() == M::NAME),
            "two modules are called {}",
            M::NAME
        );
        self.catalog = self.catalog.with::<M>();
        self.bind(module);
        self.modules.push(module.clone());
        self
    }

    fn bind<M: Module>(&mut self, module: &Arc<M>) {
        for method in M::methods() {
            self.methods.insert(method.name(), method.bind(module));
        }
    }

    /// Where a module reports block devices that appear, to be examined by all modules.
    pub fn examiner(&self) -> Arc<Examiner> {
        self.examiner.clone()
    }

    /// What moves connections between the reactors, for the module that switches it on.
    pub fn balancer(&self) -> Arc<Balancer> {
        self.balancer.clone()
    }

    /// Starts the modules. With `pending` the control plane is in the start-up stage, and
    /// `framework_start_init` applies that configuration; without, it is in the runtime stage. Panics if the
    /// dependencies of modules have a cycle or name a module that is not registered.
    pub fn start(mut self, pending: Option<ConfigFile>) -> Result<Arc<ControlPlane>, RpcError> {
        self.bind(&Arc::new(Framework));
        let modules = in_order(self.modules);
        for module in &modules {
            module.start()?;
        }
        let stage = if pending.is_some() { StartupStage::Startup } else { StartupStage::Runtime };
        self.examiner.start(&modules, &self.update_lock).map_err(RpcError::internal)?;
        let balanced: Vec<_> = modules.iter().map(Arc::downgrade).collect();
        self.balancer.set_targets(Arc::new(move || {
            balanced.iter().filter_map(Weak::upgrade).flat_map(|module| module.balanced()).collect()
        }));
        Ok(Arc::new(ControlPlane {
            initial: saved(&modules),
            modules,
            methods: self.methods,
            catalog: self.catalog,
            reactors: self.reactors,
            jobs: self.jobs,
            examiner: self.examiner,
            balancer: self.balancer,
            update_lock: self.update_lock,
            turns: Turns::default(),
            startup: Mutex::new(Startup { stage, pending }),
            started: Condvar::new(),
        }))
    }
}

/// Sorts modules so that each comes after those that it depends on; otherwise in the order of registration.
fn in_order(mut waiting: Vec<Arc<dyn DynModule>>) -> Vec<Arc<dyn DynModule>> {
    let mut ordered: Vec<Arc<dyn DynModule>> = Vec::new();
    while !waiting.is_empty() {
        let is_started = |name: &&str| ordered.iter().any(|module| module.name() == *name);
        let next = waiting.iter().position(|module| module.depends_on().iter().all(&is_started));
        let names = || waiting.iter().map(|module| module.name()).collect::<Vec<_>>().join(", ");
        let next = next.unwrap_or_else(|| panic!("dependencies of {} are missing or form a cycle", names()));
        ordered.push(waiting.remove(next));
    }
    ordered
}

fn subsystems(modules: &[Arc<dyn DynModule>]) -> impl Iterator<Item = &Arc<dyn DynModule>> {
    modules.iter().filter(|module| module.is_subsystem())
}

fn saved(modules: &[Arc<dyn DynModule>]) -> Value {
    let section =
        |module: &Arc<dyn DynModule>| json!({ "subsystem": module.name(), "config": module.save() });
    json!({ "subsystems": subsystems(modules).map(section).collect::<Vec<_>>() })
}

impl ControlPlane {
    /// Without modules yet, for a program with these reactors.
    pub fn builder(reactors: Vec<ManagedReactor>) -> ControlPlaneBuilder {
        let update_lock = Arc::default();
        let jobs = Jobs::new(&update_lock);
        let handles = reactors.iter().map(|reactor| reactor.handle.clone()).collect();
        ControlPlaneBuilder {
            balancer: Balancer::new(handles),
            modules: Vec::new(),
            methods: BTreeMap::new(),
            catalog: Catalog::new(),
            reactors,
            examiner: Examiner::new(&jobs),
            jobs,
            update_lock,
        }
    }

    /// Calls a method. Fails if it does not exist or may not be called in the present stage.
    pub fn invoke(&self, name: &str, params: Value) -> Result<Value, RpcError> {
        let (Some(method), Some(info)) = (self.methods.get(name), self.catalog.get(name)) else {
            return Err(Catalog::not_found(name));
        };
        let stage = self.stage();
        if !info.stages.contains(&stage) {
            let when = match stage {
                StartupStage::Startup => "after the framework is initialized (framework_start_init)",
                StartupStage::Runtime => "before the framework is initialized",
            };
            let message = format!("Method may only be called {when}");
            return Err(RpcError::new(RpcError::INVALID_STATE, message));
        }
        (method.call)(self, params)
    }

    /// [`invoke`](Self::invoke) for a call of a configuration. It may name a device that is found on a disk,
    /// such as a logical volume, which the calls before it do not wait for: a call that fails while disks are
    /// read is made once more when they have been.
    pub(crate) fn invoke_configured(&self, name: &str, params: Value) -> Result<Value, RpcError> {
        let is_examining = self.examiner.is_examining();
        match self.invoke(name, params.clone()) {
            Err(error) if is_examining => {
                log::info!(target: "config", "{name} is called again when disks have been read: {error}");
                if !self.examiner.wait_within(FOUND_WAIT_MAX) {
                    log::warn!(target: "config", "disks take longer than {FOUND_WAIT_MAX:?} to be read");
                }
                self.invoke(name, params)
            }
            result => result,
        }
    }

    /// The parameters of a call in their canonical form: equal for calls that ask for the same, however they
    /// are written. Fails if the method does not exist, or would reject them whatever exists.
    pub fn canonical(&self, name: &str, params: Value) -> Result<Map<String, Value>, RpcError> {
        let method = self.methods.get(name).ok_or_else(|| Catalog::not_found(name))?;
        (method.canonical)(params)
    }

    /// Keeps other updates waiting, in the order of their calls. Poisoning is ignored: what a method had
    /// changed when it panicked stays.
    pub(crate) fn lock_updates(&self) -> UpdateGuard<'_> {
        let turn = self.turns.wait();
        self.wait_for_examinations();
        UpdateGuard { _lock: sync::lock(&self.update_lock), _turn: turn }
    }

    /// Waits until the devices of earlier updates are examined by configuration: a saved configuration names
    /// a virtual bdev right after the base with which it appears. A disk may take for ever to be read, and
    /// keeps no update waiting.
    pub(crate) fn wait_for_examinations(&self) {
        self.examiner.wait_configured();
    }

    /// While what is returned exists, devices with these names are not read when they appear: a configuration
    /// is being applied that uses them.
    pub(crate) fn use_bdevs(&self, names: BTreeSet<String>) -> UsedBdevs {
        self.examiner.use_bdevs(names)
    }

    /// The registered methods.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The reactors of the program.
    pub fn reactors(&self) -> &[ManagedReactor] {
        &self.reactors
    }

    /// Jobs that run and that have ended lately.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.jobs
    }

    /// The present stage.
    pub fn stage(&self) -> StartupStage {
        self.startup().stage
    }

    fn startup(&self) -> MutexGuard<'_, Startup> {
        sync::lock(&self.startup)
    }

    /// Ends the start-up stage and returns the pending configuration.
    pub(crate) fn finish_startup(&self) -> Option<ConfigFile> {
        let mut startup = self.startup();
        startup.stage = StartupStage::Runtime;
        let pending = startup.pending.take();
        drop(startup);
        self.started.notify_all();
        pending
    }

    /// Blocks until the start-up stage has ended.
    pub(crate) fn wait_started(&self) {
        let mut startup = self.startup();
        while startup.stage == StartupStage::Startup {
            startup = sync::wait(&self.started, startup);
        }
    }

    /// The running configuration, as a file that recreates it: a section for each subsystem, in order of
    /// start.
    pub fn save(&self) -> Value {
        saved(&self.modules)
    }

    /// What [`save`](Self::save) returned when nothing was configured yet: options with their defaults.
    pub(crate) fn initial(&self) -> &Value {
        &self.initial
    }

    /// The calls that recreate one subsystem; `None` if there is no such subsystem.
    pub fn save_subsystem(&self, name: &str) -> Option<Vec<Value>> {
        self.subsystems().find(|module| module.name() == name).map(|module| module.save())
    }

    pub(crate) fn subsystems(&self) -> impl Iterator<Item = &Arc<dyn DynModule>> {
        subsystems(&self.modules)
    }

    pub(crate) fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    pub(crate) fn modules(&self) -> &[Arc<dyn DynModule>] {
        &self.modules
    }

    /// The present values of all metrics.
    pub fn metrics(&self) -> MetricSamples {
        let mut samples = MetricSamples::default();
        collect_reactors(self, &mut samples);
        self.modules.iter().for_each(|module| module.collect(&mut samples));
        samples
    }

    /// Stops accepting work from outside: ends balancing, cancels jobs and drains modules in reverse order.
    /// The reactors must still run.
    pub fn drain(&self) {
        self.balancer.stop();
        self.jobs.cancel_all();
        self.modules.iter().rev().for_each(|module| module.drain());
    }

    /// Stops the modules in reverse order. The reactors must have stopped.
    pub fn stop(&self) {
        self.examiner.stop();
        self.modules.iter().rev().for_each(|module| module.stop());
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        self.balancer.stop();
        self.examiner.stop();
    }
}

#[cfg(test)]
mod tests;
