//! How much of a core's buffers each connection may hold, over all targets of the core.
//!
//! A peer that sends no data which it was asked for, or reads no answers, keeps the buffers of its commands.
//! Enough such peers would hold all of them, and the requests of all others would wait. So each connection
//! that takes buffers has a [`MemoryShare`], which counts what it holds among what its [peer](PeerMemory) and
//! its core ([`CoreMemory`]) hold:
//!
//! - A connection has a **window**: little at first, more each time that it has given back a window's worth
//!   of buffers while it wanted more and the core had enough.
//! - Up to half of the core's memory ([`MemoryLimits::shared`]) is for windows, and a peer has at most a part
//!   of that, apart from first windows.
//! - Beyond, a connection may hold its **first window** and no more. The last eighths are a **reserve**: only
//!   connections that have moved their data lately take first windows from it, so that silent newcomers never
//!   stop them. A peer may have half of what others leave of it: connections that moved their data and stop
//!   all at once do not stop those of other peers.
//! - One command always fits a connection that holds nothing, within the same bounds. A command that is
//!   larger than a first window waits for the half that is shared, or is the only one of the core beyond it.
//!
//! Nothing here is shared between cores, locks or allocates: a command costs three additions and a comparison
//! where it takes buffers, four and one where it gives them back. Who holds buffers for too long is found by
//! the [check of transfers](crate::TransferReport).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use dma::{Buffer, Data, Pool};

use crate::peers::PeerKey;

/// First windows of all connections together: this part of the core's memory, as long as that many are
/// useful.
const FIRST_WINDOWS_PART: usize = 8;
/// Least and most bytes of a first window: one and four commands of 128 KiB.
const FIRST_WINDOW_BYTES_MIN: usize = 128 << 10;
const FIRST_WINDOW_BYTES_MAX: usize = 512 << 10;

/// Bounds of a core's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimits {
    /// First windows of all connections together. Each is this, divided by the connections, within the next
    /// two.
    pub first_windows: usize,
    /// Least bytes of a first window.
    pub first_window_min: usize,
    /// Most bytes of a first window.
    pub first_window_max: usize,
    /// What all connections hold in their windows.
    pub shared: usize,
    /// What connections may fill up with their first windows.
    pub unproven: usize,
    /// What connections that have moved data lately may fill up with theirs, each peer with half of what
    /// others leave of it. The rest is for what is not counted.
    pub all: usize,
}

impl MemoryLimits {
    /// No limits.
    pub const UNLIMITED: MemoryLimits = MemoryLimits {
        first_windows: usize::MAX,
        first_window_min: usize::MAX,
        first_window_max: usize::MAX,
        shared: usize::MAX,
        unproven: usize::MAX,
        all: usize::MAX,
    };

    /// Those of one of `cores` cores, with `arena_bytes` for all of them.
    pub fn of_core(arena_bytes: usize, cores: usize) -> MemoryLimits {
        let bytes = arena_bytes / cores.max(1);
        MemoryLimits {
            first_windows: bytes / FIRST_WINDOWS_PART,
            first_window_min: FIRST_WINDOW_BYTES_MIN,
            first_window_max: FIRST_WINDOW_BYTES_MAX,
            shared: bytes / 2,
            unproven: bytes / 4 * 3,
            all: bytes / 8 * 7,
        }
    }

    /// Of [`shared`](Self::shared), what a peer holds at most with all its connections.
    pub fn of_peer(&self) -> usize {
        self.shared / 4 * 3
    }

    /// What is for connections that have moved data lately, and for no others.
    fn reserve(&self) -> usize {
        self.all - self.unproven
    }
}

/// What the connections of a core hold of its buffers. All targets of the core have it in common.
#[derive(Debug)]
pub struct CoreMemory {
    limits: Cell<MemoryLimits>,
    held: Cell<usize>,
    /// Of these, what was taken from the reserve.
    reserved: Cell<usize>,
    /// The limit of windows, apart from the others, as it is compared for each command.
    shared_max: Cell<usize>,
    first_window: Cell<usize>,
    shares: Cell<usize>,
    /// How often a connection was refused what others hold.
    refusals: Cell<u64>,
    /// A command larger than a first window is beyond the shared half.
    has_large: Cell<bool>,
    peers: RefCell<HashMap<MemoryOwner, Weak<PeerMemory>>>,
}

/// Whose connections are bounded together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MemoryOwner {
    /// The peer by its address, or by its process.
    Peer(PeerKey),
    /// By a name that the protocol knows.
    Name(Box<[u8]>),
}

/// What the connections of a peer hold on one core.
#[derive(Debug)]
pub struct PeerMemory {
    core: Rc<CoreMemory>,
    held: Cell<usize>,
    reserved: Cell<usize>,
    max: usize,
    /// First windows are within the limit too.
    is_strict: bool,
    refusals: Cell<u64>,
}

/// What a connection holds of its core's buffers, and how much it may.
///
/// Who takes a buffer asks [`admits`](Self::admits) and [`add`](Self::add)s its bytes, or does all of it by
/// [`take`](Self::take); who gives it back [`remove`](Self::remove)s them. The drop of a share gives back the
/// rest.
#[derive(Debug)]
pub struct MemoryShare {
    core: Rc<CoreMemory>,
    peer: Rc<PeerMemory>,
    /// Whose part of the reserve it uses: the peer by its address, whatever name it gives itself.
    source: Rc<PeerMemory>,
    held: usize,
    /// Bytes for data that came at once, which are not subject to the window.
    held_at_once: usize,
    window: usize,
    window_max: usize,
    /// Bytes ever given back, wrapping: the progress of its commands.
    returned: usize,
    /// `returned` when the window was found full, from which it has to give back as much again to widen.
    filled_at: Option<usize>,
    /// Bytes from the reserve, at most what it holds.
    reserved: usize,
    /// It has moved data lately, and may use the reserve.
    makes_progress: bool,
    /// It has the core's only large command beyond the shared half.
    has_large: bool,
}

/// Why there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoMemory {
    /// The connection holds what it may: it continues when it has given some back ([`MemoryShare::fits`]).
    Full,
    /// Others hold it. No event says when it is back: retry each millisecond
    /// ([`is_waiting`](crate::ProtocolConnection::is_waiting)).
    Lacking,
}

impl Default for CoreMemory {
    fn default() -> Self {
        CoreMemory::new(MemoryLimits::UNLIMITED)
    }
}

impl CoreMemory {
    /// The memory of a core, of which nothing is held.
    pub fn new(limits: MemoryLimits) -> CoreMemory {
        CoreMemory {
            limits: Cell::new(limits),
            held: Cell::new(0),
            reserved: Cell::new(0),
            shared_max: Cell::new(limits.shared),
            first_window: Cell::new(limits.first_window_max),
            shares: Cell::new(0),
            refusals: Cell::new(0),
            has_large: Cell::new(false),
            peers: RefCell::default(),
        }
    }

    pub(crate) fn set_limits(&self, limits: MemoryLimits) {
        self.limits.set(limits);
        self.shared_max.set(limits.shared);
        self.count_shares(self.shares.get());
    }

    /// The bounds.
    pub fn limits(&self) -> MemoryLimits {
        self.limits.get()
    }

    /// Bytes that all connections of the core hold.
    pub fn held(&self) -> usize {
        self.held.get()
    }

    /// The account of a peer, whose connections hold `bytes_max` beside their first windows. For one that is
    /// known, that stays what it was.
    pub fn peer(self: &Rc<Self>, owner: MemoryOwner, bytes_max: usize) -> Rc<PeerMemory> {
        self.account(owner, || PeerMemory::new(self.clone(), bytes_max))
    }

    /// As [`peer`](Self::peer), with first windows, but for those of connections that make progress.
    pub fn strict_peer(self: &Rc<Self>, owner: MemoryOwner, bytes_max: usize) -> Rc<PeerMemory> {
        self.account(owner, || PeerMemory { is_strict: true, ..PeerMemory::new(self.clone(), bytes_max) })
    }

    fn account(&self, owner: MemoryOwner, new: impl FnOnce() -> PeerMemory) -> Rc<PeerMemory> {
        let mut peers = self.peers.borrow_mut();
        if let Some(known) = peers.get(&owner).and_then(Weak::upgrade) {
            return known;
        }
        // Those without a connection have left, so that there are never more than connections.
        peers.retain(|_, peer| peer.strong_count() > 0);
        let peer = Rc::new(new());
        peers.insert(owner, Rc::downgrade(&peer));
        peer
    }

    fn count_shares(&self, shares: usize) {
        let limits = self.limits.get();
        self.shares.set(shares);
        let each = limits.first_windows / shares.max(1);
        self.first_window.set(each.clamp(limits.first_window_min, limits.first_window_max));
    }

    /// How often a connection was refused what others hold.
    pub(crate) fn refusals(&self) -> u64 {
        self.refusals.get()
    }
}

impl PeerMemory {
    /// An account that no other connection finds.
    pub fn new(core: Rc<CoreMemory>, bytes_max: usize) -> PeerMemory {
        PeerMemory {
            core,
            held: Cell::new(0),
            reserved: Cell::new(0),
            max: bytes_max,
            is_strict: false,
            refusals: Cell::new(0),
        }
    }

    /// Bytes that its connections hold.
    pub fn held(&self) -> usize {
        self.held.get()
    }

    /// The core's memory.
    pub fn core(&self) -> &Rc<CoreMemory> {
        &self.core
    }

    /// Whether its connections may take this many bytes from the reserve: half of what others leave, or one
    /// command.
    fn may_reserve(&self, bytes: usize) -> bool {
        let reserved = self.reserved.get();
        let of_others = self.core.reserved.get() - reserved;
        let left = self.core.limits.get().reserve().saturating_sub(of_others);
        reserved == 0 || reserved + bytes <= left / 2
    }
}

fn add(counter: &Cell<usize>, bytes: usize) {
    counter.set(counter.get() + bytes);
}

fn subtract(counter: &Cell<usize>, bytes: usize) {
    counter.set(counter.get() - bytes);
}

fn count(counter: &Cell<u64>) {
    counter.set(counter.get().wrapping_add(1));
}

impl MemoryShare {
    /// A connection's share, of at most `window_max` bytes, or one command.
    pub fn new(peer: Rc<PeerMemory>, window_max: usize) -> MemoryShare {
        let core = peer.core.clone();
        core.count_shares(core.shares.get() + 1);
        let window = core.first_window.get().min(window_max);
        MemoryShare {
            core,
            source: peer.clone(),
            peer,
            held: 0,
            held_at_once: 0,
            window,
            window_max,
            returned: 0,
            filled_at: None,
            reserved: 0,
            makes_progress: false,
            has_large: false,
        }
    }

    /// Has it use another peer's part of the reserve.
    #[must_use]
    pub(crate) fn with_source(mut self, source: Rc<PeerMemory>) -> MemoryShare {
        self.source = source;
        self
    }

    /// A share without a bound, which is not counted among others: for what holds buffers only while its own
    /// core works.
    pub fn unlimited() -> MemoryShare {
        MemoryShare::new(Rc::new(PeerMemory::new(Rc::default(), usize::MAX)), usize::MAX)
    }

    /// Bytes that it holds.
    #[inline]
    pub fn held(&self) -> usize {
        self.held + self.held_at_once
    }

    /// Bytes that it may hold while the core has enough.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Bytes ever given back, wrapping.
    pub(crate) fn returned(&self) -> usize {
        self.returned
    }

    /// How often its peer's connections were refused what the peer itself holds.
    pub(crate) fn peer_refusals(&self) -> u64 {
        self.peer.refusals.get()
    }

    /// Whether this many more bytes are within its window, or it holds nothing.
    #[inline]
    pub fn fits(&self, bytes: usize) -> bool {
        self.held == 0 || self.held + bytes <= self.window
    }

    /// Whether it may take buffers of this many bytes now.
    #[inline]
    pub fn admits(&mut self, bytes: usize) -> bool {
        let is_within = self.held + bytes <= self.window
            && self.peer.held.get() + bytes <= self.peer.max
            && self.core.held.get() + bytes <= self.core.shared_max.get();
        is_within || self.admits_beyond(bytes)
    }

    /// Whether it may take this many bytes for data that comes at once. The window is no limit while the core
    /// has enough, and beyond it is the first one.
    fn admits_at_once(&self, bytes: usize) -> bool {
        let is_of_peer = self.peer.held.get() + bytes <= self.peer.max;
        let core_held = self.core.held.get() + bytes;
        if is_of_peer && core_held <= self.core.shared_max.get() {
            return true;
        }
        let is_small = self.held() + bytes <= self.core.first_window.get();
        if !is_of_peer && !self.may_exceed_peer(is_small) {
            return false;
        }
        let is_admitted = is_small && self.has_unshared(bytes);
        if !is_admitted {
            count(&self.core.refusals);
        }
        is_admitted
    }

    /// What is beyond the window, or beyond what the peer or the core has for windows.
    #[cold]
    fn admits_beyond(&mut self, bytes: usize) -> bool {
        let (is_first, held) = (self.held == 0, self.held + bytes);
        if !is_first && held > self.window {
            self.widen();
            if held > self.window {
                return false;
            }
        }
        let limits = self.core.limits.get();
        let first_window = self.core.first_window.get().min(self.window_max);
        let is_small = held <= first_window || is_first && bytes <= limits.first_window_max;
        let peer_held = self.peer.held.get();
        let is_of_peer = peer_held == 0 || peer_held + bytes <= self.peer.max;
        if !is_of_peer && !self.may_exceed_peer(is_small) {
            return false;
        }
        let is_admitted = self.core.held.get() + bytes <= limits.shared
            || (is_small || is_first && self.makes_progress) && self.has_unshared(bytes)
            || is_first && !is_small && self.begin_large();
        if !is_admitted {
            count(&self.core.refusals);
        }
        is_admitted
    }

    /// Whether the core has this many bytes for it apart from windows.
    fn has_unshared(&self, bytes: usize) -> bool {
        let limits = self.core.limits.get();
        let core_held = self.core.held.get() + bytes;
        core_held <= limits.unproven
            || self.makes_progress && core_held <= limits.all && self.source.may_reserve(bytes)
    }

    /// Whether it may have its first window although its peer holds what it may.
    fn may_exceed_peer(&self, is_small: bool) -> bool {
        let may_exceed = is_small && (self.makes_progress || !self.peer.is_strict);
        if !may_exceed {
            count(&self.peer.refusals);
        }
        may_exceed
    }

    /// The window is full: it doubles if as much as it holds was given back since it was, and the core has
    /// enough.
    fn widen(&mut self) {
        let has_moved = |from: usize| self.returned.wrapping_sub(from) >= self.window;
        if self.filled_at.is_some_and(|from| !has_moved(from)) {
            return;
        }
        let is_free = self.core.held.get().saturating_add(self.window) <= self.core.shared_max.get();
        if self.filled_at.replace(self.returned).is_some() && is_free {
            self.window = self.window.saturating_mul(2).min(self.window_max);
        }
    }

    /// Whether the core's only large command is its own: it may have been before, as for a command for which
    /// the pool had no buffers then.
    fn begin_large(&mut self) -> bool {
        self.has_large = self.has_large || !self.core.has_large.replace(true);
        self.has_large
    }

    fn end_large(&mut self) {
        if std::mem::take(&mut self.has_large) {
            self.core.has_large.set(false);
        }
    }

    /// It has taken buffers of this many bytes, which were [admitted](Self::admits).
    #[inline]
    pub fn add(&mut self, bytes: usize) {
        self.held += bytes;
        self.count_taken(bytes);
    }

    #[inline]
    fn count_taken(&mut self, bytes: usize) {
        add(&self.peer.held, bytes);
        add(&self.core.held, bytes);
        if self.core.held.get() > self.core.shared_max.get() {
            self.count_reserved(bytes);
        }
    }

    #[cold]
    fn count_reserved(&mut self, bytes: usize) {
        if self.makes_progress && self.core.held.get() > self.core.limits.get().unproven {
            self.reserved += bytes;
            add(&self.source.reserved, bytes);
            add(&self.core.reserved, bytes);
        }
    }

    #[inline]
    fn count_returned(&mut self, bytes: usize) {
        self.returned = self.returned.wrapping_add(bytes);
        subtract(&self.peer.held, bytes);
        subtract(&self.core.held, bytes);
        if self.reserved > self.held() {
            self.return_reserved();
        }
    }

    #[cold]
    fn return_reserved(&mut self) {
        let bytes = self.reserved - self.held();
        self.reserved -= bytes;
        subtract(&self.source.reserved, bytes);
        subtract(&self.core.reserved, bytes);
    }

    /// Buffers of this many bytes are free again, or were given away.
    #[inline]
    pub fn remove(&mut self, bytes: usize) {
        self.held -= bytes;
        self.count_returned(bytes);
    }

    /// Takes buffers of this many bytes together, in one slice if there is one.
    ///
    /// # Errors
    /// There is no memory for it now.
    pub fn take(&mut self, bytes: usize, pool: &Pool) -> Result<Data, NoMemory> {
        if !self.admits(bytes) {
            return Err(self.refusal(bytes));
        }
        let data = pool.take_data(bytes).ok_or(NoMemory::Lacking)?;
        self.add(bytes);
        Ok(data)
    }

    /// Takes one buffer of this many bytes, a multiple of `unit`; if the pool has none as large, one of fewer
    /// units.
    ///
    /// # Errors
    /// There is no memory for it now.
    pub fn take_buffer(&mut self, bytes: usize, unit: usize, pool: &Pool) -> Result<Buffer, NoMemory> {
        if !self.admits(bytes) {
            return Err(self.refusal(bytes));
        }
        let mut length = bytes;
        loop {
            if let Some(buffer) = pool.take(length) {
                self.add(length);
                return Ok(buffer);
            }
            length = length / 2 / unit * unit;
            if length == 0 {
                return Err(NoMemory::Lacking);
            }
        }
    }

    /// Takes buffers for data that the peer sends unasked, which cannot wait for the window: while the core
    /// has enough, there is no limit but the protocol's own. [`remove_at_once`](Self::remove_at_once) gives
    /// them back.
    ///
    /// # Errors
    /// Others hold the memory ([`NoMemory::Lacking`]).
    pub fn take_at_once(&mut self, bytes: usize, pool: &Pool) -> Result<Data, NoMemory> {
        if !self.admits_at_once(bytes) {
            return Err(NoMemory::Lacking);
        }
        let data = pool.take_data(bytes).ok_or(NoMemory::Lacking)?;
        self.held_at_once += bytes;
        self.count_taken(bytes);
        Ok(data)
    }

    /// Buffers of [`take_at_once`](Self::take_at_once) are free again.
    pub fn remove_at_once(&mut self, bytes: usize) {
        self.held_at_once -= bytes;
        self.count_returned(bytes);
    }

    #[cold]
    fn refusal(&self, bytes: usize) -> NoMemory {
        if self.fits(bytes) { NoMemory::Lacking } else { NoMemory::Full }
    }

    /// Its transfers were checked. One without any since the last check stays what it was; one that is slow
    /// while others lack memory has to earn its window again.
    pub(crate) fn checked(&mut self, makes_progress: bool, is_slow: bool, is_lacking: bool) {
        self.makes_progress = (self.makes_progress || makes_progress) && !is_slow;
        if is_slow && is_lacking {
            self.window = self.window.min(self.core.first_window.get());
            self.filled_at = None;
        }
        if self.held <= self.core.limits.get().first_window_max {
            self.end_large();
        }
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.remove(self.held);
        self.remove_at_once(self.held_at_once);
        self.end_large();
        self.core.count_shares(self.core.shares.get() - 1);
    }
}

#[cfg(test)]
mod tests;
