//! For tests of targets whose connections move: two reactors, and a thread that moves connections all the
//! time.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use control::{
    BalancedTarget, ConnectionMove, ControlPlane, ManagedReactor, Method, Module, SchedulerModule,
};
use random::WyRand;
use reactor::{IdlePolicy, ReactorConfig, Reactors};

/// Two reactors; `None` on a machine with one processor.
pub(crate) fn reactors() -> Option<Reactors> {
    let mut cpus = os::CpuSet::allowed().cpus().to_vec();
    if cpus.len() < 2 {
        println!("SKIPPED: this machine has one processor, and so one reactor");
        return None;
    }
    cpus.truncate(2);
    let cpus = os::CpuSet::new(cpus).expect("two processors");
    let config = ReactorConfig { cpus, pin: false, idle: IdlePolicy::Sleep, ..ReactorConfig::default() };
    Some(Reactors::start(&config).expect("reactors"))
}

/// The seed of a test: random, or that of the environment.
pub(crate) fn seed() -> u64 {
    let given = std::env::var("RINGBOLT_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| os::clock::now_ns() & 0xffff_ffff);
    println!("RINGBOLT_SEED={seed}");
    seed
}

/// Waits until `condition` holds.
///
/// # Panics
/// After a minute.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Connections that can move, on each reactor.
pub(crate) fn counts(target: &dyn BalancedTarget) -> Vec<usize> {
    target.loads().unwrap_or_default().iter().map(Vec::len).collect()
}

/// Has all connections of a reactor move to the other.
pub(crate) fn ask(target: &dyn BalancedTarget, from: usize, to: usize) {
    let Some(loads) = target.loads() else { return };
    let moves: Vec<_> = loads[from].iter().map(|one| ConnectionMove { id: one.id, from, to }).collect();
    target.move_connections(&moves);
}

/// Moves connections all the time, until it is dropped.
pub(crate) struct Shuffler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Shuffler {
    pub(crate) fn start(target: Arc<dyn BalancedTarget>, seed: u64) -> Shuffler {
        let (stop, mut random) = (Arc::new(AtomicBool::new(false)), WyRand::new(seed));
        let stopped = stop.clone();
        let run = move || {
            while !stopped.load(Ordering::Relaxed) {
                let Some(loads) = target.loads() else { return };
                let mut moves = Vec::new();
                for (from, connections) in loads.iter().enumerate() {
                    let chosen = connections.iter().filter(|_| random.happens(500));
                    moves.extend(chosen.map(|one| ConnectionMove { id: one.id, from, to: 1 - from }));
                }
                target.move_connections(&moves);
            }
        };
        Shuffler { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Shuffler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

/// A control plane with the subsystem `scheduler`, which balances this target.
pub(crate) fn plane(reactors: &Reactors, target: Arc<dyn BalancedTarget>) -> Arc<ControlPlane> {
    let managed = |handle: &reactor::ReactorHandle| ManagedReactor { handle: handle.clone(), thread_id: 0 };
    let builder = ControlPlane::builder(reactors.handles().iter().map(managed).collect());
    let scheduler = SchedulerModule::new(builder.balancer());
    let module = Arc::new(Balanced(target));
    builder.module(&scheduler).module(&module).start(None).expect("a control plane")
}

struct Balanced(Arc<dyn BalancedTarget>);

impl Module for Balanced {
    const NAME: &'static str = "balanced";

    fn methods() -> Vec<Method<Balanced>> {
        Vec::new()
    }

    fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        vec![self.0.clone()]
    }
}
