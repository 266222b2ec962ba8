//! The thread that balances connections over reactors.

mod decision;
mod sampler;
mod target;

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use reactor::{ReactorHandle, blocking};

use sampler::Sampler;
pub use target::{BalancedTarget, ConnectionLoad, ConnectionMove};

/// Longest sleep of a balancer that is off; it is woken when it is switched on.
const OFF_PERIOD: Duration = Duration::from_secs(3600);

/// Moves connections between reactors while it is on: one of a program, from its start to its end.
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
    state: Mutex<BalancerState>,
    changed: Condvar,
}

#[derive(Default)]
struct BalancerState {
    /// `None` before the program has modules.
    targets: Option<ListTargets>,
    /// `None` while it is off.
    period: Option<Duration>,
    /// Counts changes of the period.
    changes: u64,
    is_stopped: bool,
}

impl Balancer {
    pub(crate) fn new(reactors: Vec<ReactorHandle>) -> Arc<Balancer> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Arc::new(Balancer {
            shared: Arc::new(BalancerShared { reactors, state, changed }),
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
        let mut thread = sync::lock(&self.thread);
        if period.is_some() && thread.is_none() {
            let shared = self.shared.clone();
            let run = move || shared.run();
            *thread = Some(std::thread::Builder::new().name("balancer".to_string()).spawn(run)?);
        }
        let mut state = sync::lock(&self.shared.state);
        state.period = period;
        state.changes += 1;
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Ends it. No move begins afterwards.
    pub(crate) fn stop(&self) {
        sync::lock(&self.shared.state).is_stopped = true;
        self.shared.changed.notify_all();
        if let Some(thread) = sync::lock(&self.thread).take() {
            // A panic was reported on standard error.
            _ = thread.join();
        }
    }
}

impl BalancerShared {
    fn run(&self) {
        let mut sampler = Sampler::default();
        loop {
            let (period, changes) = {
                let state = sync::lock(&self.state);
                (state.period, state.changes)
            };
            let ended =
                blocking::wait_until(&self.state, &self.changed, period.unwrap_or(OFF_PERIOD), |state| {
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
            if let Some(targets) = targets.filter(|_| period.is_some()) {
                sampler.end_period(&self.reactors, &targets());
            }
        }
    }
}
