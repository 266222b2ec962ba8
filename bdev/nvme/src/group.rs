//! Controllers of one subsystem under one name, and the block devices that they make together.
//!
//! Paths tell what happens to them; one thread hears it all in order and changes the registry, which no reactor
//! may do: whoever is told of a device there may wait for reactors.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::Registry;
use sys::clock::now_ns;
use uuid::Uuid;
use wire_nvme::log::AnaState;

use crate::multipath::Policy;
use crate::namespace::{Learned, NvmeBdev};
use crate::path::{Groups, Path, PathStatus, lock, state_of, tell};
use crate::totals::Totals;
use crate::view::{Join, PathId, PathState, View};

/// How long users of a device that goes have for what they have in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long what paths told may take to be heard.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long channels with I/O may take to follow: a turn of their reactors. Those without follow later.
const LOOK_TIMEOUT: Duration = Duration::from_millis(250);

/// What a path's task tells, or a caller asks.
pub(crate) enum News {
    /// These are the namespaces, and this is how to join them.
    Namespaces { path: Arc<Path>, epoch: u64, namespaces: Vec<(Learned, Join)>, groups: Groups },
    /// ANA states were read again.
    Ana { path: Arc<Path>, groups: Groups },
    /// The connection is lost; I/O may wait for it until then.
    Lost { path: Arc<Path>, waits_until_ns: u64, why: String },
    /// It could not be attached in the first place.
    NotAttached { path: Arc<Path>, why: String },
    /// It is tried no more.
    GivenUp(Arc<Path>),
    /// Take it away.
    Detach(Arc<Path>, SyncSender<()>),
    /// Its task has ended.
    Stopped(Arc<Path>),
    /// Say when everything before this was heard.
    Heard(SyncSender<()>),
}

pub(crate) type Job = (Arc<Group>, News);

type AttachReply = SyncSender<Result<Vec<String>, String>>;

/// Controllers under one name.
pub(crate) struct Group {
    pub(crate) name: String,
    registry: Registry,
    jobs: Sender<Job>,
    retries_max: u16,
    paths: Mutex<Vec<Arc<Path>>>,
    namespaces: Mutex<BTreeMap<u32, Arc<Namespace>>>,
    attaching: Mutex<BTreeMap<PathId, AttachReply>>,
    detaching: Mutex<BTreeMap<PathId, Vec<SyncSender<()>>>>,
    policy: Mutex<Policy>,
    totals: Arc<Totals>,
    /// Made by a discovery service, which remembers it instead of the configuration.
    pub(crate) discovered: bool,
}

pub(crate) struct Namespace {
    pub(crate) bdev_name: String,
    pub(crate) view: Arc<View>,
    pub(crate) bdev: Arc<NvmeBdev>,
    /// The limits that each path set.
    limits: Mutex<BTreeMap<PathId, Learned>>,
}

impl Group {
    pub(crate) fn new(
        name: &str,
        registry: Registry,
        jobs: Sender<Job>,
        policy: Policy,
        retries_max: u16,
        discovered: bool,
        totals: Arc<Totals>,
    ) -> Group {
        Group {
            name: name.to_string(),
            registry,
            jobs,
            retries_max,
            paths: Mutex::default(),
            namespaces: Mutex::default(),
            attaching: Mutex::default(),
            detaching: Mutex::default(),
            policy: Mutex::new(policy),
            totals,
            discovered,
        }
    }

    pub(crate) fn paths(&self) -> Vec<Arc<Path>> {
        lock(&self.paths).clone()
    }

    pub(crate) fn add_path(&self, path: Arc<Path>, reply: AttachReply) {
        lock(&self.attaching).insert(path.number, reply);
        lock(&self.paths).push(path);
    }

    pub(crate) fn namespaces(&self) -> Vec<Arc<Namespace>> {
        lock(&self.namespaces).values().cloned().collect()
    }

    /// Waits until channels are what paths told before now, or will be at their next I/O; whether it was heard.
    pub(crate) fn settle(self: &Arc<Self>) -> bool {
        let (reply, heard) = sync_channel(1);
        self.tell(News::Heard(reply));
        let told = heard.recv_timeout(SETTLE_TIMEOUT).is_ok();
        self.namespaces().iter().for_each(|namespace| namespace.view.settle(LOOK_TIMEOUT));
        told
    }

    pub(crate) fn bdev_names(&self) -> Vec<String> {
        self.namespaces().iter().map(|namespace| namespace.bdev_name.clone()).collect()
    }

    pub(crate) fn tell(self: &Arc<Self>, news: News) {
        // Nobody listens any more when the program ends.
        let _ = self.jobs.send((self.clone(), news));
    }

    fn handle(self: &Arc<Self>, news: News) {
        match news {
            News::Namespaces { path, epoch, namespaces, groups } => {
                let outcome = self.namespaces_learned(&path, epoch, namespaces, groups);
                if let Some(reply) = lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(outcome.clone());
                }
                if let Err(why) = outcome {
                    eprintln!("bdev_nvme: {}: {why}", self.name);
                }
            }
            News::Ana { path, groups } => self.ana_learned(&path, &groups),
            News::Lost { path, waits_until_ns, why } => {
                if path.status() == PathStatus::Reconnecting {
                    eprintln!("bdev_nvme: {}: {} lost: {why}", self.name, path.id().0.controller());
                }
                for namespace in self.namespaces() {
                    namespace.view.with_path(path.number, |state| {
                        state.join = None;
                        state.waits_until_ns = waits_until_ns;
                    });
                }
            }
            News::Heard(reply) => tell(&reply, ()),
            News::NotAttached { path, why } => {
                self.forget(&path);
                if let Some(reply) = lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(Err(why));
                }
            }
            News::GivenUp(path) => {
                eprintln!("bdev_nvme: {}: {} was given up", self.name, path.id().0.controller());
                self.take_away(&path);
                path.stop();
            }
            News::Detach(path, reply) => {
                self.take_away(&path);
                if self.paths().iter().any(|other| Arc::ptr_eq(other, &path)) {
                    lock(&self.detaching).entry(path.number).or_default().push(reply);
                    path.stop();
                }
            }
            News::Stopped(path) => {
                self.take_away(&path);
                self.forget(&path);
                lock(&self.detaching).remove(&path.number);
                if let Some(reply) = lock(&self.attaching).remove(&path.number) {
                    let _ = reply.send(Err("it was detached meanwhile".into()));
                }
            }
        }
    }

    fn forget(&self, path: &Arc<Path>) {
        lock(&self.paths).retain(|other| !Arc::ptr_eq(other, path));
    }

    /// Takes over what a path offers now; returns the names of its devices.
    fn namespaces_learned(
        &self,
        path: &Arc<Path>,
        epoch: u64,
        namespaces: Vec<(Learned, Join)>,
        groups: Groups,
    ) -> Result<Vec<String>, String> {
        if path.is_stopping() {
            return Err("it is being detached".into());
        }
        let mut names = Vec::new();
        let mut trouble = None;
        let there: Vec<u32> = namespaces.iter().map(|(learned, _)| learned.nsid).collect();
        for (learned, join) in namespaces {
            let ana = state_of(groups.as_deref(), learned.identify.anagrpid);
            match self.namespace_learned(path, epoch, learned, join, ana) {
                Ok(name) => names.push(name),
                Err(why) => trouble = Some(why),
            }
        }
        for namespace in self.namespaces() {
            let has = namespace.view.paths().iter().any(|state| state.id == path.number);
            if has && !there.contains(&namespace.view.nsid) {
                self.remove_path_of(&namespace, path);
            }
        }
        match trouble {
            Some(why) if names.is_empty() => Err(why),
            Some(why) => {
                eprintln!("bdev_nvme: {}: {why}", self.name);
                Ok(names)
            }
            None => Ok(names),
        }
    }

    fn namespace_learned(
        &self,
        path: &Arc<Path>,
        epoch: u64,
        learned: Learned,
        join: Join,
        ana: AnaState,
    ) -> Result<String, String> {
        let nsid = learned.nsid;
        let known = lock(&self.namespaces).get(&nsid).cloned();
        let namespace = match known {
            Some(namespace) => {
                let first = &namespace.bdev;
                if first.identity != learned.identity {
                    return Err(format!(
                        "namespace {nsid} of {} is not that of the other paths: its identifiers differ",
                        path.id().0.controller()
                    ));
                }
                if bdev::Bdev::geometry(&**first).block_size != learned.block_size {
                    return Err(format!("namespace {nsid} was formatted to blocks of another size"));
                }
                namespace
            }
            None => self.make(path, &learned)?,
        };
        namespace.set_limits(path.number, &learned);
        let blocks = learned.identify.nsze;
        if namespace.view.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            // Who removed it meanwhile need not be told.
            let _ = self.registry.notify_resized(&namespace.bdev_name);
        }
        namespace.view.put_path(PathState {
            id: path.number,
            path: path.clone(),
            join: Some((epoch, join)),
            anagrpid: learned.identify.anagrpid,
            ana,
            ana_readings: next_reading(),
            waits_until_ns: self.waits_until_ns(path, ana),
        });
        if !lock(&self.namespaces).contains_key(&nsid) {
            let device: Arc<dyn bdev::Bdev> = namespace.bdev.clone();
            let uuid = learned.identity.uuid.filter(|uuid| !uuid.is_nil());
            let nguid = Uuid::from_bytes(learned.identity.nguid);
            let uuid = uuid.or((!nguid.is_nil()).then_some(nguid));
            self.registry
                .register(&namespace.bdev_name, uuid, &[], device)
                .map_err(|error| format!("namespace {nsid}: {error}"))?;
            lock(&self.namespaces).insert(nsid, namespace.clone());
        }
        Ok(namespace.bdev_name.clone())
    }

    fn make(&self, path: &Path, learned: &Learned) -> Result<Arc<Namespace>, String> {
        let identity = path.identity().ok_or("the controller was not identified")?;
        let view = Arc::new(View::new(learned.nsid, *lock(&self.policy), self.totals.clone()));
        view.blocks.store(learned.identify.nsze, Ordering::Relaxed);
        let subnqn = path.id().subnqn().unwrap_or(&identity.subnqn);
        let bdev = Arc::new(NvmeBdev::new(&view, learned, &identity, subnqn, self.retries_max));
        let bdev_name = format!("{}n{}", self.name, learned.nsid);
        Ok(Arc::new(Namespace { bdev_name, view, bdev, limits: Mutex::default() }))
    }

    /// I/O waits through a transition for as long as the controller says that one takes (Base 2.0, section
    /// 8.1.3, ANATT).
    fn waits_until_ns(&self, path: &Path, ana: AnaState) -> u64 {
        let anatt_s = path.identity().map_or(0, |identity| identity.anatt_s);
        match ana {
            AnaState::Inaccessible | AnaState::Change if anatt_s > 0 => {
                now_ns().saturating_add(u64::from(anatt_s) * 1_000_000_000)
            }
            AnaState::PersistentLoss => 0,
            _ => u64::MAX,
        }
    }

    fn ana_learned(&self, path: &Arc<Path>, groups: &Groups) {
        for namespace in self.namespaces() {
            namespace.view.with_path(path.number, |state| {
                let ana = state_of(groups.as_deref(), state.anagrpid);
                let may_wait = |ana| matches!(ana, AnaState::Inaccessible | AnaState::Change);
                // The time runs from the first of several states that are no use.
                if !(may_wait(ana) && may_wait(state.ana)) {
                    state.waits_until_ns = self.waits_until_ns(path, ana);
                }
                state.ana = ana;
                state.ana_readings = next_reading();
            });
        }
    }

    fn take_away(&self, path: &Arc<Path>) {
        for namespace in self.namespaces() {
            if namespace.view.paths().iter().any(|state| state.id == path.number) {
                self.remove_path_of(&namespace, path);
            }
        }
    }

    /// The namespace is not reached through the path any more; without paths it is no device.
    fn remove_path_of(&self, namespace: &Arc<Namespace>, path: &Arc<Path>) {
        let last = namespace.view.paths().iter().all(|state| state.id == path.number);
        if last {
            lock(&self.namespaces).remove(&namespace.view.nsid);
            // Somebody may have removed it by name.
            if let Ok(device) = self.registry.unregister(&namespace.bdev_name) {
                // What is in flight may still complete; what is then left fails with the path.
                device.wait_closed(CLOSE_TIMEOUT);
            }
        }
        namespace.view.remove_path(path.number);
        lock(&namespace.limits).remove(&path.number);
    }

    pub(crate) fn policy(&self) -> Policy {
        *lock(&self.policy)
    }
}

impl Namespace {
    /// A request must fit every path, as it may take any.
    fn set_limits(&self, path: PathId, learned: &Learned) {
        let mut limits = lock(&self.limits);
        limits.insert(path, learned.clone());
        let view = &self.view;
        let most = limits.values().map(|one| one.transfer_max_bytes).min().unwrap_or(0);
        view.transfer_max_bytes.store(most.max(learned.block_size), Ordering::Relaxed);
        view.unmap.store(limits.values().all(|one| one.unmap), Ordering::Relaxed);
        view.write_zeroes.store(limits.values().all(|one| one.write_zeroes), Ordering::Relaxed);
        let uncorrectable = limits.values().all(|one| one.write_uncorrectable);
        view.write_uncorrectable.store(uncorrectable, Ordering::Relaxed);
    }
}

fn next_reading() -> u64 {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    COUNT.fetch_add(1, Ordering::Relaxed)
}

/// Hears what paths tell until the last that could is gone.
pub(crate) fn run(jobs: &Receiver<Job>) {
    while let Ok((group, news)) = jobs.recv() {
        group.handle(news);
    }
}
