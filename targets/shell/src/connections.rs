//! The connections of a core, and the lists of those that have work.

use std::rc::Rc;
use std::vec::Drain;

use slots::{Slab, Slot};
use sockets::{ConnectionId, StreamAddress};

use crate::admissions::Admitted;
use crate::memory::PeerMemory;
use crate::move_history::MoveHistory;
use crate::peers::PeerKey;
use crate::protocol::{Protocol, ProtocolConnection, REQUEST_TAG_BITS, REQUEST_TAG_MASK};
use crate::timers::NEVER_NS;
use crate::transfers::TransferCheck;

/// First bit of the connection's index in a request's tag; bits of its generation are between this and the
/// protocol's.
pub(crate) const CONNECTION_SHIFT: u32 = 50;
/// Connections of a core.
pub(crate) const CONNECTIONS_MAX: u32 = sockets::CONNECTIONS_MAX;
const _: () = assert!(CONNECTIONS_MAX <= 1 << (64 - CONNECTION_SHIFT));

/// In place of the identifier of a connection without a stream: no network has so many. Its transfers fail.
pub(crate) const NO_STREAM: ConnectionId = ConnectionId(Slot::from_bits(u64::MAX));

/// The connections of a core.
///
/// Each is on a list while it has work, so that a poll visits only those. Protocols reach them through
/// [`update`](Self::update), which visits all and is for changes of configuration and other uncommon events.
#[derive(Debug)]
pub struct Connections<C> {
    pub(crate) slab: Slab<ConnectionEntry<C>>,
    /// Those with something to send, or whose state may have changed otherwise.
    pub(crate) dirty: Vec<Slot>,
    /// The slot of each connection, by the index of its [`ConnectionId`].
    pub(crate) by_network: Vec<Option<Slot>>,
}

/// A connection with its state in the shell.
#[derive(Debug)]
pub struct ConnectionEntry<C> {
    /// The protocol's connection.
    pub connection: C,
    pub(crate) id: ConnectionId,
    /// The peer's address; that of the listener if the peer is unnamed.
    pub(crate) peer: StreamAddress,
    pub(crate) peer_key: PeerKey,
    /// Whose requests it submits; `None` for a share of a connection of another core, which has that one's.
    pub(crate) flow: Option<bdev::Flow>,
    /// Whose connections it counts among since its login.
    pub(crate) admitted: Option<Admitted>,
    pub(crate) requests: ConnectionRequests,
    pub(crate) transfers: TransferCheck,
    /// The time of its timer in [`Timers`](crate::timers::Timers); `NEVER_NS` without one.
    pub(crate) timer_ns: u64,
    /// When a draining connection is closed even if commands are in flight.
    pub(crate) drain_deadline_ns: u64,
    pub(crate) dirty: bool,
    pub(crate) waiting: bool,
    /// It is in the list of connections that have more to read.
    pub(crate) has_more: bool,
    /// It is on the group's list of polled connections.
    pub(crate) polled: bool,
    pub(crate) closing: bool,
    /// Its moves between cores.
    pub(crate) moves: MoveHistory,
    /// The peer has still to log in.
    pub(crate) awaits_login: bool,
    /// The stream is closed; the entry waits only for outstanding device requests.
    pub(crate) closed: bool,
}

/// The device requests of a connection.
#[derive(Debug, Default)]
pub(crate) struct ConnectionRequests {
    /// The upper bits of their tags: index and generation of the connection's slot.
    pub(crate) tag_base: u64,
    /// Requests in flight.
    pub(crate) outstanding: u32,
    /// What its peer holds of the core's memory; `None` without a stream.
    pub(crate) peer: Option<Rc<PeerMemory>>,
}

impl<C> ConnectionEntry<C> {
    /// Device requests in flight.
    pub fn outstanding_requests(&self) -> u32 {
        self.requests.outstanding
    }

    /// The stream is closed, and only outstanding device requests keep the connection.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The peer's address.
    pub fn peer(&self) -> &StreamAddress {
        &self.peer
    }
}

impl<C> Connections<C> {
    pub(crate) fn new() -> Connections<C> {
        Connections { slab: Slab::with_capacity(CONNECTIONS_MAX), dirty: Vec::new(), by_network: Vec::new() }
    }

    /// Number of connections, closed ones with device requests in flight included.
    pub fn len(&self) -> usize {
        self.slab.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// All connections that are not closed.
    pub fn open(&self) -> impl Iterator<Item = &C> {
        self.slab.iter().filter(|(_, entry)| !entry.closed).map(|(_, entry)| &entry.connection)
    }

    /// A connection; `None` if it is gone.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut ConnectionEntry<C>> {
        self.slab.get_mut(slot)
    }

    /// Visits every connection. `update` returns whether it has changed it: it is then flushed in the same
    /// poll, and closed if it is drained.
    pub fn update(&mut self, mut update: impl FnMut(Slot, &mut ConnectionEntry<C>) -> bool) {
        for (slot, entry) in self.slab.iter_mut() {
            if update(slot, entry) && !entry.dirty {
                entry.dirty = true;
                self.dirty.push(slot);
            }
        }
    }

    #[inline]
    pub(crate) fn mark_dirty(&mut self, slot: Slot) {
        if let Some(entry) = self.slab.get_mut(slot)
            && !entry.dirty
        {
            entry.dirty = true;
            self.dirty.push(slot);
        }
    }

    /// Passes the next `count` completed requests to their connection, and removes a closed one after its
    /// last. `tag_base` is the upper part of their tags. Some may be left, which are to be dropped; returns
    /// how many.
    #[inline]
    pub(crate) fn complete<P: Protocol<Connection = C>>(
        &mut self,
        tag_base: u64,
        completions: &mut Drain<'_, bdev::Completion>,
        count: usize,
    ) -> usize
    where
        C: ProtocolConnection<P>,
    {
        let Some(slot) = self.slab.slot_at((tag_base >> CONNECTION_SHIFT) as u32) else { return count };
        let Some(entry) = self.slab.get_mut(slot).filter(|entry| entry.requests.tag_base == tag_base) else {
            return count;
        };
        entry.requests.outstanding -= count as u32;
        probe::probe!(ringbolt, connection_completed, slot.index(), count);
        if entry.closed {
            if entry.requests.outstanding == 0 {
                self.slab.remove(slot);
            }
            return count;
        }
        let is_done = entry.connection.complete_in_place(&completions.as_slice()[..count]);
        if !is_done {
            for completion in completions.by_ref().take(count) {
                entry.connection.complete(completion.tag().0 & REQUEST_TAG_MASK, completion);
            }
        }
        if !entry.dirty {
            entry.dirty = true;
            self.dirty.push(slot);
        }
        if is_done { count } else { 0 }
    }

    /// The connection of a network's identifier.
    #[inline]
    pub(crate) fn by_id(&self, id: ConnectionId) -> Option<Slot> {
        self.by_network.get(id.0.index() as usize).copied().flatten()
    }

    /// Adds a connection without a stream: a share of a connection of another core, with work of its own. It
    /// is flushed in the same poll, nothing is received on it, and [`GroupLimits`](crate::GroupLimits) do not
    /// count it. Log lines name `peer`.
    ///
    /// # Errors
    /// There is no room: the connection.
    pub fn attach(&mut self, connection: C, peer: StreamAddress) -> Result<Slot, C> {
        if self.slab.is_full() {
            return Err(connection);
        }
        let slot = self.add_entry(connection, NO_STREAM, peer);
        self.mark_dirty(slot);
        Ok(slot)
    }

    /// Adds a connection. There must be room.
    pub(crate) fn insert(&mut self, connection: C, id: ConnectionId, peer: StreamAddress) -> Slot {
        let slot = self.add_entry(connection, id, peer);
        let index = id.0.index() as usize;
        if self.by_network.len() <= index {
            self.by_network.resize(index + 1, None);
        }
        self.by_network[index] = Some(slot);
        slot
    }

    fn add_entry(&mut self, connection: C, id: ConnectionId, peer: StreamAddress) -> Slot {
        let entry = ConnectionEntry {
            connection,
            id,
            peer,
            peer_key: PeerKey::Unknown,
            flow: None,
            admitted: None,
            requests: ConnectionRequests::default(),
            transfers: TransferCheck::default(),
            timer_ns: NEVER_NS,
            drain_deadline_ns: NEVER_NS,
            dirty: false,
            waiting: false,
            has_more: false,
            polled: false,
            closing: false,
            moves: MoveHistory::default(),
            awaits_login: false,
            closed: false,
        };
        let Ok(slot) = self.slab.insert(entry) else { panic!("a slab with room has none") };
        if let Some(entry) = self.slab.get_mut(slot) {
            // The index alone names the connection, which stays until its last request has completed.
            let generation = slot.to_bits() >> 32 << REQUEST_TAG_BITS & ((1 << CONNECTION_SHIFT) - 1);
            entry.requests.tag_base = u64::from(slot.index()) << CONNECTION_SHIFT | generation;
        }
        slot
    }
}
