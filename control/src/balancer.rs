//! The thread that balances connections over reactors.

mod decision;
mod masks;
mod sampler;
mod target;

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use reactor::{ReactorHandle, blocking};

pub(crate) use masks::MaskError;
use masks::ThreadMasks;
use sampler::Sampler;
pub use target::{BalancedTarget, ConnectionLoad, ConnectionMove};

/// How often connections are looked for that are on a core without being allowed to, while there is such a
/// core: those that could not move at once, as during a login.
const MASKS_PERIOD: Duration = Duration::from_millis(100);
/// Longest sleep of a balancer that is off; it is woken when it is switched on.
const OFF_PERIOD: Duration = Duration::from_secs(3600);

/// Moves connections between reactors while it is on, and away from those whose masks say so: one of a
/// program, from its start to its end.
///
/// At the end of each period it asks reactors and targets what they did, decides who moves, and has the
/// targets move them. Its thread starts when it is switched on first; reactors spend some microseconds a
/// period on the answers, and nothing while it is off.
pub struct Balancer {
    shared: Arc<BalancerShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Lists the targets whose connections can move, at present.
pub(crate) type ListTargets = Arc<dyn Fn() -> Vec<Arc<dyn BalancedTarget>> + Send + Sync>;

struct BalancerShared {
    reactors: Vec<ReactorHandle>,
    /// Locked while masks are read and applied to the targets, so that the newest are applied last. Locked
    /// before the state.
    applying: Mutex<()>,
    state: Mutex<BalancerState>,
    changed: Condvar,
}

#[derive(Default)]
struct BalancerState {
    /// `None` before the program has modules.
    targets: Option<ListTargets>,
    /// `None` while it is off.
    period: Option<Duration>,
    masks: ThreadMasks,
    /// Counts changes of the period and of masks.
    changes: u64,
    is_stopped: bool,
}

impl Balancer {
    pub(crate) fn new(reactors: Vec<ReactorHandle>) -> Arc<Balancer> {
        let (applying, state, changed) = (Mutex::default(), Mutex::default(), Condvar::new());
        Arc::new(Balancer {
            shared: Arc::new(BalancerShared { reactors, applying, state, changed }),
            thread: Mutex::default(),
        })
    }

    /// Says what it balances.
    pub(crate) fn set_targets(&self, targets: ListTargets) {
        sync::lock(&self.shared.state).targets = Some(targets);
    }

    /// The CPU of the first reactor; 0 without reactors.
    pub(crate) fn first_cpu(&self) -> u32 {
        self.shared.reactors.first().map_or(0, ReactorHandle::cpu)
    }

    /// The period, while it is on.
    pub(crate) fn period(&self) -> Option<Duration> {
        sync::lock(&self.shared.state).period
    }

    /// Switches it on with a period, or off.
    ///
    /// # Errors
    /// The thread cannot be created; nothing is changed.
    pub(crate) fn set_period(&self, period: Option<Duration>) -> io::Result<()> {
        if period.is_some() {
            self.start()?;
        }
        let mut state = sync::lock(&self.shared.state);
        state.period = period;
        state.changes += 1;
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Starts the thread, if it has not started.
    fn start(&self) -> io::Result<()> {
        let mut thread = sync::lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let run = move || shared.run();
            *thread = Some(std::thread::Builder::new().name("balancer".to_string()).spawn(run)?);
        }
        Ok(())
    }

    /// Sets on which cores the connections of a reactor may be: if its own is not among them, they move to
    /// the reactors on these, and it gets no others. Those that can move have been asked to when it returns.
    ///
    /// # Errors
    /// The connections could be on no core, or the thread cannot be created. Nothing is changed.
    pub(crate) fn set_mask(&self, reactor: usize, cpus: &[u32]) -> Result<(), MaskError> {
        let cores: Vec<u32> = self.shared.reactors.iter().map(ReactorHandle::cpu).collect();
        let applying = sync::lock(&self.shared.applying);
        let masks = sync::lock(&self.shared.state).masks.with(reactor, cpus, &cores)?;
        if !masks.excluded().is_empty() {
            self.start().map_err(|error| MaskError::Thread(error.kind()))?;
        }
        let mut state = sync::lock(&self.shared.state);
        if state.is_stopped {
            return Err(MaskError::Stopped);
        }
        state.masks = masks.clone();
        state.changes += 1;
        let targets = state.targets.clone();
        self.shared.changed.notify_all();
        drop(state);
        if let Some(targets) = targets {
            move_away(&targets(), &masks);
        }
        drop(applying);
        Ok(())
    }

    /// The cores of the mask that was set for a reactor.
    pub(crate) fn mask(&self, reactor: usize) -> Option<Vec<u32>> {
        sync::lock(&self.shared.state).masks.cpus(reactor).map(<[u32]>::to_vec)
    }

    /// Ends it. No move begins afterwards.
    pub(crate) fn stop(&self) {
        sync::lock(&self.shared.state).is_stopped = true;
        self.shared.changed.notify_all();
        let thread = sync::lock(&self.thread).take();
        if let Some(thread) = thread {
            // A panic was reported on standard error.
            _ = thread.join();
        }
    }
}

impl BalancerShared {
    fn run(&self) {
        let mut sampler = Sampler::default();
        loop {
            let (period, has_excluded, changes) = {
                let state = sync::lock(&self.state);
                (state.period, !state.masks.excluded().is_empty(), state.changes)
            };
            let sleep = period.unwrap_or(if has_excluded { MASKS_PERIOD } else { OFF_PERIOD });
            let ended = blocking::wait_until(&self.state, &self.changed, sleep, |state| {
                (state.is_stopped || state.changes != changes).then_some(state.is_stopped)
            });
            let targets = match ended {
                Ok(true) => return,
                Ok(false) => {
                    sampler = Sampler::default();
                    continue;
                }
                Err(state) => state.targets.clone(),
            };
            let Some(targets) = targets.filter(|_| period.is_some() || has_excluded) else { continue };
            let targets = targets();
            let _applying = sync::lock(&self.applying);
            let masks = sync::lock(&self.state).masks.clone();
            if period.is_none() {
                move_away(&targets, &masks);
                continue;
            }
            exclude(&targets, &masks);
            sampler.end_period(&self.reactors, &targets, &masks);
        }
    }
}

/// Keeps connections away from reactors whose masks say so: also those of targets that have started since.
fn exclude(targets: &[Arc<dyn BalancedTarget>], masks: &ThreadMasks) {
    let excluded = masks.excluded();
    targets.iter().for_each(|target| target.exclude_reactors(&excluded));
}

/// The same, and moves those that are there.
fn move_away(targets: &[Arc<dyn BalancedTarget>], masks: &ThreadMasks) {
    exclude(targets, masks);
    for target in targets {
        let Some(loads) = target.loads() else { continue };
        let moves = masks.moves(&target.reactors(), &loads);
        if !moves.is_empty() {
            target.move_connections(&moves);
        }
    }
}
