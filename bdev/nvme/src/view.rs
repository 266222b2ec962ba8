//! What the control core tells the channels of a namespace: its paths, and how to join each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wire_nvme::identify::IdentifyNamespace;
use wire_nvme::log::AnaState;

use crate::counts::{LinkCounts, PathStats};
use crate::multipath::Policy;
use crate::path::Path;
use crate::totals::Totals;

/// Names a path for as long as the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u64);

/// A namespace as its channels see it.
pub(crate) struct View {
    pub(crate) nsid: u32,
    /// Where channels book what their queues did.
    pub(crate) totals: Arc<Totals>,
    /// Counts changes; channels look at it every turn.
    version: AtomicU64,
    state: Mutex<State>,
    pub(crate) blocks: AtomicU64,
    /// Most bytes of a request on every path.
    pub(crate) transfer_max_bytes: AtomicU32,
    /// Whether every path offers these.
    pub(crate) unmap: AtomicBool,
    pub(crate) write_zeroes: AtomicBool,
    pub(crate) write_uncorrectable: AtomicBool,
}

struct State {
    paths: Vec<PathState>,
    policy: Policy,
    preferred: Option<PathId>,
    channels: BTreeMap<u64, Arc<ChannelBoard>>,
    channels_made: u64,
    /// What channels that are gone counted.
    counted: BTreeMap<PathId, PathStats>,
}

/// A path of a namespace.
#[derive(Clone)]
pub(crate) struct PathState {
    pub(crate) id: PathId,
    pub(crate) path: Arc<Path>,
    /// How to join, and the connection that it is for; `None` while there is none.
    pub(crate) join: Option<(u64, Join)>,
    /// The namespace's ANA group, and its state.
    pub(crate) anagrpid: u32,
    pub(crate) ana: AnaState,
    /// Counts readings of the ANA log page.
    pub(crate) ana_readings: u64,
    pub(crate) waits_until_ns: u64,
}

/// How a channel gets to a namespace.
#[derive(Clone)]
pub(crate) enum Join {
    Tcp(Arc<nvme::Membership>, Arc<IdentifyNamespace>),
    Direct(nvme::Controller),
}

/// What a channel lets the control plane see of it, and how it is woken.
pub(crate) struct ChannelBoard {
    pub(crate) core: usize,
    waker: sys::Waker,
    /// By path.
    links: Mutex<Vec<LinkBoard>>,
    /// The version of the view that the channel has taken over; the most there is once it is gone.
    seen: Mutex<u64>,
    moved: Condvar,
}

/// A channel's link to one path.
#[derive(Clone)]
pub(crate) struct LinkBoard {
    pub(crate) id: PathId,
    pub(crate) connected: bool,
    pub(crate) current: bool,
    /// What goes over it, where that is counted.
    pub(crate) counts: Option<Arc<LinkCounts>>,
}

impl View {
    pub(crate) fn new(nsid: u32, policy: Policy, totals: Arc<Totals>) -> View {
        View {
            nsid,
            totals,
            version: AtomicU64::new(1),
            state: Mutex::new(State {
                paths: Vec::new(),
                policy,
                preferred: None,
                channels: BTreeMap::new(),
                channels_made: 0,
                counted: BTreeMap::new(),
            }),
            blocks: AtomicU64::new(0),
            transfer_max_bytes: AtomicU32::new(u32::MAX),
            unmap: AtomicBool::new(true),
            write_zeroes: AtomicBool::new(true),
            write_uncorrectable: AtomicBool::new(true),
        }
    }

    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is whole before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        self.version.fetch_add(1, Ordering::AcqRel);
        let boards: Vec<_> = state.channels.values().cloned().collect();
        drop(state);
        boards.iter().for_each(|board| board.waker.wake());
        result
    }

    /// What there is now, and which version that is.
    pub(crate) fn look(&self) -> (u64, Vec<PathState>, Policy, Option<PathId>) {
        let state = self.lock();
        (self.version(), state.paths.clone(), state.policy, state.preferred)
    }

    pub(crate) fn paths(&self) -> Vec<PathState> {
        self.lock().paths.clone()
    }

    /// Adds a path, or says what is known of it now.
    pub(crate) fn put_path(&self, path: PathState) {
        self.change(|state| match state.paths.iter_mut().find(|known| known.id == path.id) {
            Some(known) => *known = path,
            None => state.paths.push(path),
        });
    }

    /// Changes what is known of a path, if it is one of this namespace's.
    pub(crate) fn with_path(&self, id: PathId, change: impl FnOnce(&mut PathState)) {
        if self.lock().paths.iter().any(|path| path.id == id) {
            self.change(|state| {
                state.paths.iter_mut().filter(|path| path.id == id).for_each(change_once(change))
            });
        }
    }

    /// Takes a path away; says whether any is left.
    pub(crate) fn remove_path(&self, id: PathId) -> bool {
        self.change(|state| {
            state.paths.retain(|path| path.id != id);
            state.counted.remove(&id);
            !state.paths.is_empty()
        })
    }

    pub(crate) fn policy(&self) -> Policy {
        self.lock().policy
    }

    pub(crate) fn set_policy(&self, policy: Policy) {
        self.change(|state| state.policy = policy);
    }

    pub(crate) fn set_preferred(&self, id: PathId) {
        self.change(|state| state.preferred = Some(id));
    }

    pub(crate) fn join_board(&self, core: &reactor::Core) -> (u64, Arc<ChannelBoard>) {
        let waker = core.events().waker();
        let board = Arc::new(ChannelBoard {
            core: core.index(),
            waker,
            links: Mutex::default(),
            seen: Mutex::default(),
            moved: Condvar::new(),
        });
        let mut state = self.lock();
        state.channels_made += 1;
        let id = state.channels_made;
        state.channels.insert(id, board.clone());
        (id, board)
    }

    pub(crate) fn leave_board(&self, id: u64) {
        let mut state = self.lock();
        let Some(board) = state.channels.remove(&id) else { return };
        board.set_seen(u64::MAX);
        for link in board.links().iter() {
            if let Some(counts) = &link.counts
                && state.paths.iter().any(|path| path.id == link.id)
            {
                state.counted.entry(link.id).or_default().add(counts);
            }
        }
    }

    /// What went over each path, on every channel that there is or was.
    pub(crate) fn path_stats(&self) -> Vec<(Arc<Path>, PathStats)> {
        let state = self.lock();
        let of = |path: &PathState| {
            let mut stats = state.counted.get(&path.id).cloned().unwrap_or_default();
            for board in state.channels.values() {
                let links = board.links();
                let counted = links.iter().filter(|link| link.id == path.id);
                counted.filter_map(|link| link.counts.as_ref()).for_each(|counts| stats.add(counts));
            }
            (path.path.clone(), stats)
        };
        state.paths.iter().map(of).collect()
    }

    /// Has every channel look, and waits for those that are polled: one without I/O looks before its next.
    pub(crate) fn settle(&self, timeout: Duration) {
        let version = self.change(|_| self.version() + 1);
        let end = Instant::now() + timeout;
        self.boards().iter().for_each(|board| board.wait_seen(version, end));
    }

    pub(crate) fn boards(&self) -> Vec<Arc<ChannelBoard>> {
        self.lock().channels.values().cloned().collect()
    }
}

impl ChannelBoard {
    /// Every change under the lock is whole before anything can panic.
    pub(crate) fn links(&self) -> MutexGuard<'_, Vec<LinkBoard>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The channel is what this version of the view says.
    pub(crate) fn set_seen(&self, version: u64) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = version;
        self.moved.notify_all();
    }

    fn wait_seen(&self, version: u64, end: Instant) {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let left = end.saturating_duration_since(Instant::now());
        drop(self.moved.wait_timeout_while(seen, left, |seen| *seen < version));
    }
}

/// Lets a closure that may run once stand where one that may run often is asked for: names are unique.
fn change_once(change: impl FnOnce(&mut PathState)) -> impl FnMut(&mut PathState) {
    let mut change = Some(change);
    move |path| {
        if let Some(change) = change.take() {
            change(path);
        }
    }
}
