//! Which path an I/O takes, and what becomes of it when the path fails.
//!
//! Sans-IO: [`Multipath`] is handed requests, completions, what is known of each path, and the time;
//! it says which request goes to which path and which completion goes to the caller. It never waits,
//! and knows nothing of transports.
//!
//! A path is *usable* while it is connected and its ANA state is optimized or non-optimized. Non-optimized
//! paths carry I/O only while there is no optimized one. A request whose path fails goes to another; where
//! none is usable it waits for as long as one may come back, and then fails with a path related status.
//!
//! Sending a command again is what NVMe hosts do: reads, writes, write zeroes, deallocation and flushes have
//! the same effect done once or twice, and nothing else passes through here. What that does not promise: a
//! controller that lost its host may still carry out a command that it had received, after the same command,
//! and one that overwrites it, were answered through another path. Controllers are to end the commands of an
//! association with it, but no host can see that they did.

use std::collections::VecDeque;

use ring::{Completion, Request, Status, Tag};
use slots::{Slab, Slot};
use wire_nvme::log::AnaState;

/// How a path is chosen among the usable ones of the best ANA state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One path, for as long as it lasts.
    ActivePassive,
    /// All paths, by the selector.
    ActiveActive(Selector),
}

/// How active-active shares I/O out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// In turn, so many I/Os each time; at least 1.
    RoundRobin {
        /// I/Os before the next path's turn.
        min_io: u32,
    },
    /// The path with the fewest I/Os in flight.
    QueueDepth,
}

/// What is known of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathView {
    /// Commands can be sent.
    pub connected: bool,
    /// How the controller reaches the namespace.
    pub ana: AnaState,
    /// Until when, in nanoseconds of the monotonic clock, I/O waits for the path to become usable: 0 for
    /// not at all, `u64::MAX` for however long it takes.
    pub waits_until_ns: u64,
    /// The caller's choice among equals, for [`Policy::ActivePassive`].
    pub preferred: bool,
}

/// Completions that a path gave, by what became of the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// I/Os sent.
    pub sent: u64,
    /// I/Os that came back and were sent again.
    pub retried: u64,
}

/// Most tries of one I/O, whatever the reasons: what ends a loop between paths that each say "not here".
const TRIES_MAX: u16 = 128;

/// The state machine. `B` is the buffer, which it never looks at.
pub struct Multipath<B> {
    policy: Policy,
    /// Times that an I/O is sent again for a reason that is not the path.
    retries_max: u16,
    entries: Slab<Entry>,
    paths: Vec<Path<B>>,
    /// What waits for a path, oldest first.
    waiting: VecDeque<Request<B>>,
    /// What is to be sent again later: when, and what.
    delayed: Vec<(u64, Request<B>)>,
    done: Vec<(u32, Completion<B>)>,
    /// The path of the previous I/O, and how many it had in a row.
    current: usize,
    burst: u32,
}

struct Entry {
    /// The caller's names.
    tag: Tag,
    note: u32,
    retries: u16,
    tries: u16,
    /// How it came back last.
    last: Status,
    /// The path that it came back from; another is better.
    avoid: Option<u32>,
}

struct Path<B> {
    view: PathView,
    /// The controller said that the ANA state is not what it was; it is to be read again.
    stale: bool,
    in_flight: u32,
    outgoing: Vec<Request<B>>,
    counts: PathCounts,
}

impl<B> Path<B> {
    fn rank(&self) -> Option<u8> {
        match self.view.ana {
            _ if !self.view.connected || self.stale => None,
            AnaState::Optimized => Some(0),
            AnaState::NonOptimized => Some(1),
            _ => None,
        }
    }

    fn may_return(&self, now_ns: u64) -> bool {
        self.view.ana != AnaState::PersistentLoss && now_ns < self.view.waits_until_ns
    }
}

/// Whether another path may do what this one could not.
fn is_path_related(status: Status) -> bool {
    status.status_code_type() == 3
        || status.same_code(Status::ABORTED_SQ_DELETION)
        || status.same_code(Status::TRANSIENT_TRANSPORT_ERROR)
}

fn is_ana(status: Status) -> bool {
    status.same_code(Status::ANA_INACCESSIBLE)
        || status.same_code(Status::ANA_TRANSITION)
        || status.same_code(Status::ANA_PERSISTENT_LOSS)
}

impl<B> Multipath<B> {
    /// Without paths. `capacity` is how many I/Os it holds, `retries_max` how often one is sent again for a
    /// reason that is not the path.
    pub fn new(policy: Policy, capacity: u32, retries_max: u16) -> Multipath<B> {
        Multipath {
            policy,
            retries_max,
            entries: Slab::with_capacity(capacity),
            paths: Vec::new(),
            waiting: VecDeque::new(),
            delayed: Vec::new(),
            done: Vec::new(),
            current: 0,
            burst: 0,
        }
    }

    /// I/Os that can still be taken.
    pub fn room(&self) -> usize {
        self.entries.capacity() - self.entries.len()
    }

    /// I/Os that were taken and not given back.
    pub fn outstanding(&self) -> usize {
        self.entries.len()
    }

    /// Chooses by another policy from now on.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
        self.burst = 0;
    }

    /// Adds a path and returns its index.
    pub fn add_path(&mut self, view: PathView) -> usize {
        self.paths.push(Path {
            view,
            stale: false,
            in_flight: 0,
            outgoing: Vec::new(),
            counts: PathCounts::default(),
        });
        self.paths.len() - 1
    }

    /// Puts another path in the place of one that has nothing in flight and will not be heard of again.
    pub fn replace_path(&mut self, index: usize, view: PathView) {
        let path = &mut self.paths[index];
        assert!(path.in_flight == 0 && path.outgoing.is_empty(), "path {index} is in use");
        (path.view, path.stale, path.counts) = (view, false, PathCounts::default());
    }

    /// What is known of a path now. Where it is not usable any more, what was not sent yet goes elsewhere.
    pub fn set_path(&mut self, path: usize, view: PathView, now_ns: u64) {
        self.paths[path].view = view;
        self.recall(path);
        self.dispatch(now_ns);
    }

    /// The ANA log page was read since the controller contradicted it.
    pub fn refreshed(&mut self, path: usize, now_ns: u64) {
        self.paths[path].stale = false;
        self.dispatch(now_ns);
    }

    /// Whether the path's ANA state is to be read again.
    pub fn is_stale(&self, path: usize) -> bool {
        self.paths[path].stale
    }

    /// Whether I/O goes through the path while it stays as it is.
    pub fn is_usable(&self, path: usize) -> bool {
        self.paths[path].rank().is_some()
    }

    /// The path that the next I/O would take.
    pub fn current(&self) -> Option<usize> {
        self.best(None).map(|_| self.peek())
    }

    /// What a path did.
    pub fn counts(&self, path: usize) -> PathCounts {
        self.paths[path].counts
    }

    /// I/Os that a path has, or is about to get.
    pub fn in_flight(&self, path: usize) -> u32 {
        self.paths[path].in_flight
    }

    /// Takes a request; there must be [`room`](Self::room). `note` comes back with its completion.
    #[inline]
    pub fn submit(&mut self, mut request: Request<B>, note: u32, now_ns: u64) {
        let entry =
            Entry { tag: request.tag, note, retries: 0, tries: 0, last: Status::SUCCESS, avoid: None };
        let Ok(slot) = self.entries.insert(entry) else { panic!("a request was submitted without room") };
        request.tag = Tag(slot.to_bits());
        // What waits was there before.
        if self.waiting.is_empty()
            && let Some(path) = self.choose(None)
        {
            self.send(path, request);
            return;
        }
        self.waiting.push_back(request);
        self.dispatch(now_ns);
    }

    /// What is to be sent through a path, in order. What does not fit there stays here.
    #[inline]
    pub fn outgoing(&mut self, path: usize) -> &mut Vec<Request<B>> {
        &mut self.paths[path].outgoing
    }

    /// A request came back from a path.
    #[inline]
    pub fn returned(&mut self, path: usize, completion: Completion<B>, now_ns: u64) {
        let slot = Slot::from_bits(completion.tag().0);
        let Some(entry) = self.entries.get_mut(slot) else {
            panic!("path {path} returned a request that it was not given: {:?}", completion.tag())
        };
        self.paths[path].in_flight -= 1;
        let status = completion.status();
        if status.is_success() || status.is_do_not_retry() {
            self.finish(slot, completion);
            return;
        }
        entry.last = status;
        entry.avoid = Some(path as u32);
        let by_path = is_path_related(status);
        // An ANA status takes the path out until its state was read again, and a path that was lost is out by
        // itself: those tries are bounded by TRIES_MAX. Everything else is by the number of retries.
        if by_path && is_ana(status) {
            self.paths[path].stale = true;
            self.recall(path);
        } else if !by_path || self.paths[path].view.connected {
            entry.retries += 1;
        }
        let entry = self.entries.get_mut(slot).expect("it was there a moment ago");
        if entry.retries > self.retries_max || entry.tries >= TRIES_MAX {
            self.finish(slot, completion);
            return;
        }
        self.paths[path].counts.retried += 1;
        let request = completion.into_request();
        self.waiting.push_back(request);
        self.dispatch(now_ns);
    }

    /// Like [`returned`](Self::returned), to be sent again `delay_ns` from now at the earliest where it is to
    /// be sent again: the command retry delay that the controller asked for.
    pub fn returned_later(&mut self, path: usize, completion: Completion<B>, delay_ns: u64, now_ns: u64) {
        let status = completion.status();
        let slot = Slot::from_bits(completion.tag().0);
        let again = self.entries.get(slot).is_some_and(|entry| entry.retries < self.retries_max);
        if delay_ns == 0 || status.is_success() || status.is_do_not_retry() || !again {
            self.returned(path, completion, now_ns);
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

    /// Completions for the caller, with their notes.
    pub fn done(&mut self) -> &mut Vec<(u32, Completion<B>)> {
        &mut self.done
    }

    /// When [`dispatch`](Self::dispatch) is next worth calling although nothing was told.
    pub fn deadline_ns(&self) -> Option<u64> {
        let delayed = self.delayed.iter().map(|(due_ns, _)| *due_ns);
        let waits = self.paths.iter().map(|path| path.view.waits_until_ns);
        let ends = waits.filter(|until| !self.waiting.is_empty() && *until != 0 && *until != u64::MAX);
        delayed.chain(ends).min()
    }

    /// Sends what waits, as far as there are paths, and fails what waits for nothing.
    pub fn dispatch(&mut self, now_ns: u64) {
        if !self.delayed.is_empty() {
            let due = self.delayed.extract_if(.., |(due_ns, _)| *due_ns <= now_ns);
            self.waiting.extend(due.map(|(_, request)| request));
        }
        while !self.waiting.is_empty() {
            let avoid = self.waiting.front().and_then(|request| {
                self.entries.get(Slot::from_bits(request.tag.0)).and_then(|entry| entry.avoid)
            });
            let Some(path) = self.choose(avoid) else { break };
            if let Some(request) = self.waiting.pop_front() {
                self.send(path, request);
            }
        }
        if !self.waiting.is_empty() && !self.paths.iter().any(|path| path.may_return(now_ns)) {
            self.fail_waiting();
        }
    }

    #[cold]
    fn fail_waiting(&mut self) {
        let lost = self.paths.iter().any(|path| path.view.ana == AnaState::PersistentLoss);
        let status = if lost { Status::ANA_PERSISTENT_LOSS } else { Status::HOST_PATHING_ERROR };
        while let Some(request) = self.waiting.pop_front() {
            let slot = Slot::from_bits(request.tag.0);
            let last = self.entries.get(slot).map(|entry| entry.last);
            let status = last.filter(|last| is_path_related(*last)).unwrap_or(status);
            self.finish(slot, request.complete(status));
        }
    }

    /// Takes back what a path that is not usable was not sent yet.
    fn recall(&mut self, path: usize) {
        if self.paths[path].rank().is_some() {
            return;
        }
        let back = std::mem::take(&mut self.paths[path].outgoing);
        self.paths[path].in_flight -= back.len() as u32;
        for request in back.into_iter().rev() {
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
        self.done.push((entry.note, request.complete(status)));
    }

    /// The best rank among usable paths other than `avoid`.
    fn best(&self, avoid: Option<usize>) -> Option<u8> {
        let others = self.paths.iter().enumerate().filter(|(index, _)| Some(*index) != avoid);
        others.filter_map(|(_, path)| path.rank()).min()
    }

    /// The path of the next I/O, without taking note of it.
    fn peek(&self) -> usize {
        let rank = self.best(None);
        let fits = |index: usize| self.paths[index].rank() == rank;
        let preferred = (0..self.paths.len()).find(|index| fits(*index) && self.paths[*index].view.preferred);
        match self.policy {
            Policy::ActivePassive if preferred.is_some() => preferred.unwrap_or_default(),
            Policy::ActiveActive(Selector::QueueDepth) => self.emptiest(rank, None),
            _ if self.current < self.paths.len() && fits(self.current) => self.current,
            _ => (0..self.paths.len()).find(|index| fits(*index)).unwrap_or_default(),
        }
    }

    fn emptiest(&self, rank: Option<u8>, avoid: Option<usize>) -> usize {
        let fits = |index: &usize| self.paths[*index].rank() == rank && Some(*index) != avoid;
        let paths = (0..self.paths.len()).filter(fits);
        paths.min_by_key(|index| self.paths[*index].in_flight).unwrap_or_default()
    }

    /// The path of the next I/O; another than `avoid` where there is one.
    #[inline]
    fn choose(&mut self, avoid: Option<u32>) -> Option<usize> {
        let avoid = avoid.map(|path| path as usize).filter(|avoid| self.best(Some(*avoid)).is_some());
        let rank = self.best(avoid)?;
        let count = self.paths.len();
        let fits = |index: usize| self.paths[index].rank() == Some(rank) && Some(index) != avoid;
        let chosen = match self.policy {
            Policy::ActivePassive => {
                let preferred = (0..count).find(|index| fits(*index) && self.paths[*index].view.preferred);
                match preferred {
                    Some(path) => path,
                    None if self.current < count && fits(self.current) => self.current,
                    None => (0..count).find(|index| fits(*index))?,
                }
            }
            Policy::ActiveActive(Selector::QueueDepth) => self.emptiest(Some(rank), avoid),
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
        if chosen != self.current {
            self.current = chosen;
            self.burst = 0;
        }
        self.burst = self.burst.saturating_add(1);
        Some(chosen)
    }
}

#[cfg(test)]
mod tests;
