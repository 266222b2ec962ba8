//! The configuration as an immutable snapshot, published to every core and acknowledged by each.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use reactor::blocking;

use crate::CORE_TIMEOUT;

/// The current configuration, and how far each core is with it.
///
/// The control plane makes a snapshot and [`publish`](Self::publish)es it, which wakes the cores; each takes the latest
/// snapshot from its [`Subscription`], applies it and acknowledges. [`change`](Self::change) does this with a time limit
/// and a rollback. Snapshots are numbered; a core may skip numbers, and so never sees a snapshot that was rolled back
/// before it looked. Nothing here is on the path of an I/O: a core looks only when it was woken. Cheap to clone.
#[derive(Debug)]
pub struct Publisher<C>(Arc<PublisherInner<C>>);

/// A core's view of a [`Publisher`]. Dropped when the core's share of the target ends, which the publisher learns.
#[derive(Debug)]
pub struct Subscription<C> {
    publisher: Publisher<C>,
    id: usize,
}

/// A core has not applied a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotApplied {
    /// Index of the core.
    pub core: usize,
    /// It has stopped, and never will; otherwise it may when it runs again.
    pub stopped: bool,
}

impl fmt::Display for NotApplied {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = if self.stopped { "has stopped" } else { "does not respond" };
        write!(formatter, "reactor {} {reason}", self.core)
    }
}

struct PublisherInner<C> {
    state: Mutex<PublisherState<C>>,
    /// Notified when a core has acknowledged or stopped.
    acknowledged: Condvar,
}

struct PublisherState<C> {
    generation: u64,
    config: Arc<C>,
    subscribers: Vec<Subscriber>,
}

struct Subscriber {
    core: usize,
    /// The last snapshot that it took, and the last that it has applied.
    taken: u64,
    applied: u64,
    stopped: bool,
    wake: Box<dyn Fn() + Send>,
}

impl<C> Clone for Publisher<C> {
    fn clone(&self) -> Self {
        Publisher(self.0.clone())
    }
}

impl<C> fmt::Debug for PublisherInner<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Publisher").finish_non_exhaustive()
    }
}

impl<C: Default> Default for Publisher<C> {
    fn default() -> Self {
        Publisher::new(C::default())
    }
}

impl<C> Publisher<C> {
    /// A publisher of `config`, which is snapshot 1.
    pub fn new(config: C) -> Publisher<C> {
        let state = PublisherState { generation: 1, config: Arc::new(config), subscribers: Vec::new() };
        Publisher(Arc::new(PublisherInner { state: Mutex::new(state), acknowledged: Condvar::new() }))
    }

    /// The latest snapshot.
    pub fn latest(&self) -> Arc<C> {
        self.lock().config.clone()
    }

    /// The number of the latest snapshot.
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    /// Adds a core, which has yet to apply the latest snapshot. `wake` makes it look at its subscription; it is called
    /// with the publisher locked and must not block.
    pub fn subscribe(&self, core: usize, wake: impl Fn() + Send + 'static) -> Subscription<C> {
        let mut state = self.lock();
        let id = state.subscribers.len();
        wake();
        let wake = Box::new(wake);
        state.subscribers.push(Subscriber { core, taken: 0, applied: 0, stopped: false, wake });
        Subscription { publisher: self.clone(), id }
    }

    /// Publishes a snapshot and returns its number, without waiting.
    pub fn publish(&self, config: Arc<C>) -> u64 {
        let mut state = self.lock();
        state.generation += 1;
        state.config = config;
        for subscriber in &state.subscribers {
            (subscriber.wake)();
        }
        state.generation
    }

    /// Publishes a snapshot and waits until every core has applied it; otherwise publishes the previous one again.
    ///
    /// # Errors
    /// As [`change_with`](Self::change_with), which is for those whose previous snapshot is made anew.
    pub fn change(&self, config: Arc<C>) -> Result<u64, NotApplied> {
        let previous = self.latest();
        self.change_with(config, CORE_TIMEOUT, || previous)
    }

    /// Publishes a snapshot and waits until every core has applied it. Otherwise publishes what `rollback` returns, and
    /// waits until no core that responds uses the failed snapshot. Changes must not overlap.
    ///
    /// # Errors
    /// A core that has stopped, or that has not applied the snapshot within `timeout`. The snapshot of `rollback` is in
    /// force: on all cores that respond, and on others as soon as they do.
    pub fn change_with(
        &self,
        config: Arc<C>,
        timeout: Duration,
        rollback: impl FnOnce() -> Arc<C>,
    ) -> Result<u64, NotApplied> {
        let generation = self.publish(config);
        let Err(error) = self.wait_applied(generation, timeout) else { return Ok(generation) };
        let restored = self.publish(rollback());
        // A core that has not taken the failed snapshot skips it. One that was blocked while it applied it keeps this
        // waiting for the time limit only; it applies the restored snapshot next.
        let _ =
            self.wait(timeout, |core| core.taken < generation || core.applied >= restored || core.stopped);
        Err(error)
    }

    /// Waits until every core has applied snapshot `generation` or a later one.
    ///
    /// # Errors
    /// The first core that has stopped, or that has not applied it within `timeout`.
    pub fn wait_applied(&self, generation: u64, timeout: Duration) -> Result<(), NotApplied> {
        self.wait(timeout, |core| core.applied >= generation && !core.stopped)
    }

    /// The lowest number among the last snapshots that each core has applied. What only earlier snapshots name is in
    /// use on no core.
    pub fn applied_by_all(&self) -> u64 {
        let state = self.lock();
        let running = state.subscribers.iter().filter(|subscriber| !subscriber.stopped);
        running.map(|subscriber| subscriber.applied).min().unwrap_or(state.generation)
    }

    fn wait(&self, timeout: Duration, is_done: impl Fn(&Subscriber) -> bool) -> Result<(), NotApplied> {
        let not_applied = |failed: &Subscriber| NotApplied { core: failed.core, stopped: failed.stopped };
        let waited = blocking::wait_until(&self.0.state, &self.0.acknowledged, timeout, |state| {
            let mut pending = state.subscribers.iter().filter(|subscriber| !is_done(subscriber)).peekable();
            if pending.peek().is_none() {
                return Some(Ok(()));
            }
            pending.find(|subscriber| subscriber.stopped).map(|stopped| Err(not_applied(stopped)))
        });
        match waited {
            Ok(result) => result,
            Err(state) => {
                let pending = state.subscribers.iter().find(|subscriber| !is_done(subscriber));
                pending.map_or(Ok(()), |pending| Err(not_applied(pending)))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, PublisherState<C>> {
        sync::lock(&self.0.state)
    }
}

impl<C> Subscription<C> {
    /// The latest snapshot, if it was not taken yet. [`acknowledge`](Self::acknowledge) it when it is applied.
    pub fn take(&mut self) -> Option<(u64, Arc<C>)> {
        let mut state = self.publisher.lock();
        let (generation, config) = (state.generation, state.config.clone());
        let subscriber = &mut state.subscribers[self.id];
        if subscriber.taken == generation {
            return None;
        }
        subscriber.taken = generation;
        Some((generation, config))
    }

    /// The core has applied the snapshot with this number.
    pub fn acknowledge(&mut self, generation: u64) {
        self.publisher.lock().subscribers[self.id].applied = generation;
        self.publisher.0.acknowledged.notify_all();
    }
}

impl<C> Drop for Subscription<C> {
    fn drop(&mut self) {
        self.publisher.lock().subscribers[self.id].stopped = true;
        self.publisher.0.acknowledged.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    fn apply(core: &mut Subscription<&'static str>) -> Option<&'static str> {
        let (generation, config) = core.take()?;
        core.acknowledge(generation);
        Some(*config)
    }

    #[test]
    fn a_change_is_complete_when_every_core_has_applied_it() {
        let publisher = Publisher::new("none");
        let (woken, wakes) = std::sync::mpsc::channel();
        let mut one = publisher.subscribe(0, move || _ = woken.send(()));
        let changing = publisher.clone();
        let change = std::thread::spawn(move || changing.change(Arc::new("one")));
        // The first wake-up is that of the subscription.
        wakes.recv().unwrap();
        wakes.recv().unwrap();
        assert_eq!(apply(&mut one), Some("one"));
        assert_eq!(change.join().unwrap(), Ok(2));
        assert_eq!((apply(&mut one), publisher.applied_by_all()), (None, 2));
    }

    #[test]
    fn a_core_that_was_blocked_never_sees_what_was_rolled_back() {
        let publisher = Publisher::new("old");
        let mut blocked = publisher.subscribe(7, || ());
        assert_eq!(apply(&mut blocked), Some("old"));
        let failed = publisher.change_with(Arc::new("new"), SHORT, || Arc::new("restored"));
        assert_eq!(failed, Err(NotApplied { core: 7, stopped: false }));
        assert_eq!(publisher.applied_by_all(), 1, "what the old snapshot names may still be in use");
        assert_eq!((apply(&mut blocked), publisher.applied_by_all()), (Some("restored"), 3));
    }

    #[test]
    fn a_rollback_ends_when_the_cores_that_had_applied_the_change_have_reverted_it() {
        let publisher = Publisher::new("old");
        let stopping = publisher.subscribe(0, || ());
        let (woken, wakes) = std::sync::mpsc::channel();
        let mut running = publisher.subscribe(1, move || _ = woken.send(()));
        apply(&mut running);
        let core = std::thread::spawn(move || {
            let (mut stopping, mut seen) = (Some(stopping), Vec::new());
            while seen.last() != Some(&"restored") {
                wakes.recv().unwrap();
                seen.extend(apply(&mut running));
                if seen.last() == Some(&"new") {
                    // Core 0 ends now, and the change fails.
                    stopping = None;
                }
            }
            drop(stopping);
            (seen, running)
        });
        let failed = publisher.change_with(Arc::new("new"), LONG, || Arc::new("restored"));
        assert_eq!(failed, Err(NotApplied { core: 0, stopped: true }));
        let reverted = publisher.lock().subscribers[1].applied;
        assert_eq!(reverted, 3, "the call returned before core 1 had reverted the change");
        assert_eq!(core.join().unwrap().0, ["new", "restored"]);
    }

    #[test]
    fn a_stopped_core_fails_a_change_at_once_and_holds_no_snapshot() {
        let publisher = Publisher::new("old");
        drop(publisher.subscribe(3, || ()));
        let failed = publisher.change_with(Arc::new("new"), LONG, || Arc::new("restored"));
        assert_eq!(failed, Err(NotApplied { core: 3, stopped: true }));
        assert_eq!((*publisher.latest(), publisher.applied_by_all()), ("restored", 3));
    }
}
