//! Path selection, failover and retries.
//!
//! Sans-IO: the inputs of [`Multipath`] are requests, completions, the state of each path, and the time; its outputs
//! are the requests for each path and the completions for the caller. It does not depend on a transport.
//!
//! A path is *usable* while it is connected and its ANA state is optimized or non-optimized. Non-optimized paths
//! are used only while there is no optimized one. A request whose path fails is retried on another; where none is
//! usable, it waits for as long as a path may recover, and then fails with a path related status.
//!
//! Retrying a command on another path is what NVMe hosts do: reads, writes, write zeroes, deallocation and flushes
//! are idempotent, and no other command passes through here. A controller that fell silent may still execute a write that
//! it has received. Until it cannot any more, the write is neither repeated nor reported as failed: it could overwrite
//! what came after it.

use std::collections::VecDeque;

use block_io::{Completion, Request, Status, Tag};
use slots::{Slab, Slot};
use wire_nvme::log::AnaState;

/// How a path is selected among the usable ones of the best ANA state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One path, until it is not usable any more.
    ActivePassive,
    /// All paths, as the selector says.
    ActiveActive(Selector),
}

/// How active-active distributes I/O over the paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// Each path in turn.
    RoundRobin {
        /// I/Os in a row on one path; 0 counts as 1.
        min_io: u32,
    },
    /// The path with the fewest I/Os in flight.
    QueueDepth,
}

/// How long I/O waits for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoWait {
    /// Not at all.
    No,
    /// Until this time, in nanoseconds of the monotonic clock.
    Until(u64),
    /// Without a limit.
    Unlimited,
}

impl IoWait {
    fn is_over(self, now_ns: u64) -> bool {
        match self {
            IoWait::No => true,
            IoWait::Until(until_ns) => now_ns >= until_ns,
            IoWait::Unlimited => false,
        }
    }
}

/// The state of a path, as input of [`Multipath`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathView {
    /// Its I/O queue is open.
    pub connected: bool,
    /// ANA state of the namespace on this controller.
    pub ana: AnaState,
    /// How long I/O waits for the path to become usable.
    pub wait: IoWait,
    /// Preferred among paths of the same ANA state, for [`Policy::ActivePassive`].
    pub preferred: bool,
}

/// I/O counters of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// I/Os sent.
    pub sent: u64,
    /// I/Os that failed on the path and were retried.
    pub retried: u64,
}

/// Maximum attempts of one I/O for any reason: bounds a loop between paths that all return an ANA error.
const TRIES_MAX: u16 = 128;

/// The multipath state machine of one channel. `B` is the buffer, which it never accesses.
///
/// It owns every I/O from [`submit`](Self::submit) until its completion is in [`completed`](Self::completed), with a
/// slot for each. The caller sends what is in [`outgoing`](Self::outgoing) of each path, reports completions with
/// [`path_completed`](Self::path_completed) and changes of paths with [`set_path`](Self::set_path), and calls
/// [`dispatch`](Self::dispatch) at [`deadline_ns`](Self::deadline_ns). An I/O costs a slot and a scan of the paths.
pub struct Multipath<B> {
    policy: Policy,
    /// Maximum retries of an I/O for errors that are not path related.
    retries_max: u16,
    entries: Slab<PendingIo>,
    paths: Vec<TrackedPath<B>>,
    /// Requests that wait for a usable path, oldest first.
    waiting: VecDeque<Request<B>>,
    /// Requests to be retried after a delay: due time in nanoseconds, and request.
    delayed: Vec<(u64, Request<B>)>,
    completed: Vec<(u32, Completion<B>)>,
    /// The path of the previous I/O, and how many I/Os in a row used it.
    current: usize,
    burst: u32,
}

/// How often an I/O that a controller has refused because of its namespace is repeated at least, on another
/// path or after the namespace was identified again.
const NAMESPACE_RETRIES_MIN: u16 = 1;

struct PendingIo {
    /// The caller's tag and `user_data`.
    tag: Tag,
    user_data: u32,
    retries: u16,
    tries: u16,
    /// The last status from a path.
    last: Status,
    /// The path that failed it; another one is preferred.
    avoid: Option<u32>,
}

struct TrackedPath<B> {
    view: PathView,
    /// What commands have shown to be outdated, until it was read again; [`STALE_ANA`] and
    /// [`STALE_NAMESPACE`].
    stale: u8,
    in_flight: u32,
    outgoing: Vec<Request<B>>,
    counts: PathCounts,
}

/// A command failed with an ANA status, which contradicts the known state: the log page must be read.
const STALE_ANA: u8 = 1;
/// A command failed because its namespace is not what it was: it must be identified again.
const STALE_NAMESPACE: u8 = 2;

impl<B> TrackedPath<B> {
    fn rank(&self) -> Option<u8> {
        match self.view.ana {
            _ if !self.view.connected || self.stale != 0 => None,
            AnaState::Optimized => Some(0),
            AnaState::NonOptimized => Some(1),
            _ => None,
        }
    }

    fn may_recover(&self, now_ns: u64) -> bool {
        self.view.ana != AnaState::PersistentLoss && !self.view.wait.is_over(now_ns)
    }
}

/// Whether the error is path related, so that a retry on another path may succeed.
fn is_path_related(status: Status) -> bool {
    status.status_code_type() == 3
        || status.same_code(Status::ABORTED_SQ_DELETION)
        || status.same_code(Status::TRANSIENT_TRANSPORT_ERROR)
}

fn is_ana_status(status: Status) -> bool {
    status.same_code(Status::ANA_INACCESSIBLE)
        || status.same_code(Status::ANA_TRANSITION)
        || status.same_code(Status::ANA_PERSISTENT_LOSS)
}

/// Whether the error says that the controller does not have the namespace, or not in the format that it was
/// identified with.
fn is_namespace_status(status: Status) -> bool {
    status.same_code(Status::INVALID_NAMESPACE_OR_FORMAT)
}

impl<B> Multipath<B> {
    /// Without paths. `capacity` is the maximum number of I/Os, `retries_max` that of retries for errors that are not
    /// path related.
    pub fn new(policy: Policy, capacity: u32, retries_max: u16) -> Multipath<B> {
        Multipath {
            policy,
            retries_max,
            entries: Slab::with_capacity(capacity),
            paths: Vec::new(),
            waiting: VecDeque::new(),
            delayed: Vec::new(),
            completed: Vec::new(),
            current: 0,
            burst: 0,
        }
    }

    /// Number of further I/Os that can be submitted.
    pub fn room(&self) -> usize {
        self.entries.capacity() - self.entries.len()
    }

    /// I/Os that were submitted and are not completed.
    pub fn outstanding(&self) -> usize {
        self.entries.len()
    }

    /// Changes the policy for later I/Os.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
        self.burst = 0;
    }

    /// Adds a path and returns its index.
    pub fn add_path(&mut self, view: PathView) -> usize {
        self.paths.push(TrackedPath {
            view,
            stale: 0,
            in_flight: 0,
            outgoing: Vec::new(),
            counts: PathCounts::default(),
        });
        self.paths.len() - 1
    }

    /// Replaces a removed path that has no I/O in flight.
    ///
    /// # Panics
    /// If it has I/O in flight.
    pub fn replace_path(&mut self, index: usize, view: PathView) {
        let path = &mut self.paths[index];
        assert!(path.in_flight == 0 && path.outgoing.is_empty(), "path {index} is in use");
        (path.view, path.stale, path.counts) = (view, 0, PathCounts::default());
    }

    /// Changes the state of a path. If it is not usable any more, its unsent requests move to other paths.
    pub fn set_path(&mut self, path: usize, view: PathView, now_ns: u64) {
        self.paths[path].view = view;
        self.requeue_unsent(path);
        self.dispatch(now_ns);
    }

    /// The ANA log page was read after [`is_ana_stale`](Self::is_ana_stale).
    pub fn ana_refreshed(&mut self, path: usize, now_ns: u64) {
        self.paths[path].stale &= !STALE_ANA;
        self.dispatch(now_ns);
    }

    /// The namespace was identified again after [`is_namespace_stale`](Self::is_namespace_stale).
    pub fn namespace_identified(&mut self, path: usize, now_ns: u64) {
        self.paths[path].stale &= !STALE_NAMESPACE;
        self.dispatch(now_ns);
    }

    /// Whether the path is not used until its ANA log page was read or its namespace identified again.
    #[inline]
    pub fn is_stale(&self, path: usize) -> bool {
        self.paths[path].stale != 0
    }

    /// Whether the path's namespace must be identified again.
    pub fn is_namespace_stale(&self, path: usize) -> bool {
        self.paths[path].stale & STALE_NAMESPACE != 0
    }

    /// Whether the path's ANA log page must be read again.
    pub fn is_ana_stale(&self, path: usize) -> bool {
        self.paths[path].stale & STALE_ANA != 0
    }

    /// Whether the path is usable: connected, with a current ANA state of optimized or non-optimized.
    pub fn is_usable(&self, path: usize) -> bool {
        self.paths[path].rank().is_some()
    }

    /// The path that the next I/O would use.
    pub fn current(&self) -> Option<usize> {
        self.best_rank(None).map(|_| self.next_path())
    }

    /// I/O counters of a path.
    pub fn counts(&self, path: usize) -> PathCounts {
        self.paths[path].counts
    }

    /// I/Os in flight on a path, unsent ones included.
    pub fn in_flight(&self, path: usize) -> u32 {
        self.paths[path].in_flight
    }

    /// Submits a request; there must be [`room`](Self::room). `user_data` is returned with its completion.
    #[inline]
    pub fn submit(&mut self, mut request: Request<B>, user_data: u32, now_ns: u64) {
        let entry = PendingIo {
            tag: request.tag,
            user_data,
            retries: 0,
            tries: 0,
            last: Status::SUCCESS,
            avoid: None,
        };
        let Ok(slot) = self.entries.insert(entry) else {
            panic!("a request was submitted beyond the capacity")
        };
        request.tag = Tag(slot.to_bits());
        // Waiting requests go first.
        if self.waiting.is_empty()
            && let Some(path) = self.select_path(None)
        {
            self.send(path, request);
            return;
        }
        self.waiting.push_back(request);
        self.dispatch(now_ns);
    }

    /// The requests to be sent on a path, in order. Those that its queue does not accept stay here.
    #[inline]
    pub fn outgoing(&mut self, path: usize) -> &mut Vec<Request<B>> {
        &mut self.paths[path].outgoing
    }

    /// A request completed on a path: completes it to the caller, or retries it.
    #[inline]
    pub fn path_completed(&mut self, path: usize, completion: Completion<B>, now_ns: u64) {
        let slot = Slot::from_bits(completion.tag().0);
        let Some(entry) = self.entries.get_mut(slot) else {
            panic!("path {path} completed an unknown request: {:?}", completion.tag())
        };
        self.paths[path].in_flight -= 1;
        let status = completion.status();
        if status.is_success() || status.is_do_not_retry() && !is_namespace_status(status) {
            self.finish(slot, completion);
            return;
        }
        entry.last = status;
        entry.avoid = Some(path as u32);
        let path_related = is_path_related(status);
        let mut retries_max = self.retries_max;
        // An ANA status makes the path unusable until its state was read again, and a lost path is not connected:
        // those attempts are bounded by TRIES_MAX, all others by `retries_max`.
        if path_related && is_ana_status(status) {
            self.paths[path].stale |= STALE_ANA;
            self.requeue_unsent(path);
        } else if is_namespace_status(status) {
            entry.retries += 1;
            retries_max = retries_max.max(NAMESPACE_RETRIES_MIN);
            self.paths[path].stale |= STALE_NAMESPACE;
            self.requeue_unsent(path);
        } else if !path_related || self.paths[path].view.connected {
            entry.retries += 1;
        }
        let entry = self.entries.get_mut(slot).expect("the slot was valid above");
        if entry.retries > retries_max || entry.tries >= TRIES_MAX {
            self.finish(slot, completion);
            return;
        }
        self.paths[path].counts.retried += 1;
        let request = completion.into_request();
        self.waiting.push_back(request);
        self.dispatch(now_ns);
    }

    /// Like [`path_completed`](Self::path_completed), but a retry waits at least `delay_ns`: the controller's command
    /// retry delay (CRD).
    pub fn path_completed_after(
        &mut self,
        path: usize,
        completion: Completion<B>,
        delay_ns: u64,
        now_ns: u64,
    ) {
        let status = completion.status();
        let slot = Slot::from_bits(completion.tag().0);
        let will_retry = self.entries.get(slot).is_some_and(|entry| entry.retries < self.retries_max);
        if delay_ns == 0 || status.is_success() || status.is_do_not_retry() || !will_retry {
            self.path_completed(path, completion, now_ns);
            return;
        }
        if let Some(entry) = self.entries.get_mut(slot) {
            entry.retries += 1;
            entry.last = status;
        }
        self.paths[path].in_flight -= 1;
        self.paths[path].counts.retried += 1;
        self.delayed.push((now_ns.saturating_add(delay_ns), completion.into_request()));
    }

    /// Like [`path_completed`](Self::path_completed), for a request whose path is lost and may still execute it until
    /// `quiesced_ns`: a write is retried only then.
    pub fn path_lost(&mut self, path: usize, completion: Completion<B>, quiesced_ns: u64, now_ns: u64) {
        let status = completion.status();
        if quiesced_ns <= now_ns || !completion.request().op.is_write() || !is_path_related(status) {
            self.path_completed(path, completion, now_ns);
            return;
        }
        if let Some(entry) = self.entries.get_mut(Slot::from_bits(completion.tag().0)) {
            entry.last = status;
            entry.avoid = Some(path as u32);
        }
        self.paths[path].in_flight -= 1;
        self.paths[path].counts.retried += 1;
        self.delayed.push((quiesced_ns, completion.into_request()));
    }

    /// Completions for the caller, with their `user_data`.
    pub fn completed(&mut self) -> &mut Vec<(u32, Completion<B>)> {
        &mut self.completed
    }

    /// When [`dispatch`](Self::dispatch) must be called next if nothing else happens, in nanoseconds.
    pub fn deadline_ns(&self) -> Option<u64> {
        let delayed = self.delayed.iter().map(|(due_ns, _)| *due_ns);
        let waits = self.paths.iter().filter(|_| !self.waiting.is_empty());
        let ends = waits.filter_map(|path| match path.view.wait {
            IoWait::Until(until_ns) => Some(until_ns),
            IoWait::No | IoWait::Unlimited => None,
        });
        delayed.chain(ends).min()
    }

    /// Assigns waiting requests to usable paths; fails them if no path can recover.
    pub fn dispatch(&mut self, now_ns: u64) {
        if !self.delayed.is_empty() {
            let due = self.delayed.extract_if(.., |(due_ns, _)| *due_ns <= now_ns);
            self.waiting.extend(due.map(|(_, request)| request));
        }
        while !self.waiting.is_empty() {
            let avoid = self.waiting.front().and_then(|request| {
                self.entries.get(Slot::from_bits(request.tag.0)).and_then(|entry| entry.avoid)
            });
            let Some(path) = self.select_path(avoid) else { break };
            if let Some(request) = self.waiting.pop_front() {
                self.send(path, request);
            }
        }
        if !self.waiting.is_empty() && !self.paths.iter().any(|path| path.may_recover(now_ns)) {
            self.fail_waiting();
        }
    }

    #[cold]
    fn fail_waiting(&mut self) {
        let ana_lost = self.paths.iter().any(|path| path.view.ana == AnaState::PersistentLoss);
        let status = if ana_lost { Status::ANA_PERSISTENT_LOSS } else { Status::HOST_PATHING_ERROR };
        while let Some(request) = self.waiting.pop_front() {
            let slot = Slot::from_bits(request.tag.0);
            let last = self.entries.get(slot).map(|entry| entry.last);
            let says_why = |last: &Status| is_path_related(*last) || is_namespace_status(*last);
            let status = last.filter(says_why).unwrap_or(status);
            self.finish(slot, request.complete(status));
        }
    }

    /// Requeues the unsent requests of a path that is not usable.
    fn requeue_unsent(&mut self, path: usize) {
        if self.paths[path].rank().is_some() {
            return;
        }
        let unsent = std::mem::take(&mut self.paths[path].outgoing);
        self.paths[path].in_flight -= unsent.len() as u32;
        for request in unsent.into_iter().rev() {
            self.waiting.push_front(request);
        }
    }

    #[inline]
    fn send(&mut self, path: usize, request: Request<B>) {
        if let Some(entry) = self.entries.get_mut(Slot::from_bits(request.tag.0)) {
            entry.tries += 1;
        }
        let path = &mut self.paths[path];
        path.in_flight += 1;
        path.counts.sent += 1;
        path.outgoing.push(request);
    }

    fn finish(&mut self, slot: Slot, completion: Completion<B>) {
        let Some(entry) = self.entries.remove(slot) else { return };
        let status = completion.status();
        let mut request = completion.into_request();
        request.tag = entry.tag;
        self.completed.push((entry.user_data, request.complete(status)));
    }

    /// The best rank among usable paths other than `avoid`.
    fn best_rank(&self, avoid: Option<usize>) -> Option<u8> {
        let others = self.paths.iter().enumerate().filter(|(index, _)| Some(*index) != avoid);
        others.filter_map(|(_, path)| path.rank()).min()
    }

    /// The path of the next I/O, without a change of state.
    fn next_path(&self) -> usize {
        let rank = self.best_rank(None);
        let fits = |index: usize| self.paths[index].rank() == rank;
        let preferred = (0..self.paths.len()).find(|index| fits(*index) && self.paths[*index].view.preferred);
        match self.policy {
            Policy::ActivePassive if preferred.is_some() => preferred.unwrap_or_default(),
            Policy::ActiveActive(Selector::QueueDepth) => self.least_busy(rank, None),
            _ if self.current < self.paths.len() && fits(self.current) => self.current,
            _ => (0..self.paths.len()).find(|index| fits(*index)).unwrap_or_default(),
        }
    }

    fn least_busy(&self, rank: Option<u8>, avoid: Option<usize>) -> usize {
        let fits = |index: &usize| self.paths[*index].rank() == rank && Some(*index) != avoid;
        let paths = (0..self.paths.len()).filter(fits);
        paths.min_by_key(|index| self.paths[*index].in_flight).unwrap_or_default()
    }

    /// Selects the path of the next I/O; another one than `avoid` if possible.
    #[inline]
    fn select_path(&mut self, avoid: Option<u32>) -> Option<usize> {
        let avoid = avoid.map(|path| path as usize).filter(|avoid| self.best_rank(Some(*avoid)).is_some());
        let rank = self.best_rank(avoid)?;
        let count = self.paths.len();
        let fits = |index: usize| self.paths[index].rank() == Some(rank) && Some(index) != avoid;
        let selected = match self.policy {
            Policy::ActivePassive => {
                let preferred = (0..count).find(|index| fits(*index) && self.paths[*index].view.preferred);
                match preferred {
                    Some(path) => path,
                    None if self.current < count && fits(self.current) => self.current,
                    None => (0..count).find(|index| fits(*index))?,
                }
            }
            Policy::ActiveActive(Selector::QueueDepth) => self.least_busy(Some(rank), avoid),
            Policy::ActiveActive(Selector::RoundRobin { min_io }) => {
                let stays = self.current < count && fits(self.current) && self.burst < min_io.max(1);
                if stays {
                    self.current
                } else {
                    let next =
                        (1..=count).map(|step| (self.current + step) % count).find(|index| fits(*index));
                    self.burst = 0;
                    next?
                }
            }
        };
        if selected != self.current {
            self.current = selected;
            self.burst = 0;
        }
        self.burst = self.burst.saturating_add(1);
        Some(selected)
    }
}

#[cfg(test)]
mod tests;
