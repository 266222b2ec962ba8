//! Connections that move between the groups of a target.
//!
//! The group that has a connection asks it to complete its commands ([`ProtocolConnection::begin_move`]) and
//! looks in each poll whether it has. Then it takes the stream out of its network and the state out of the
//! connection, and sends both by mailbox. The other group applies the latest configuration, adds the stream
//! to its own network and makes the connection anew. In between, the connection has no request in flight and
//! nothing to send, and what its peer sends stays in the socket.

use std::sync::atomic::{AtomicU32, Ordering};

use ::control::ConnectionLoad;
use slots::Slot;
use sockets::Listen;

use super::admission::count;
use super::polled::add_polled;
use super::{ConnectionGroup, RELEASE_DELAY_NS};
use crate::admissions::Admitted;
use crate::connections::{CONNECTIONS_MAX, ConnectionEntry, ConnectionRequests};
use crate::cores::GroupMessage;
use crate::memory::MemoryOwner;
use crate::move_history::MoveHistory;
use crate::moves::{GroupMove, MovedConnection, MovingConnection, Transit};
use crate::protocol::{IoContext, MoreToRead, Protocol, ProtocolConnection, Turn};

/// Time in which a connection has to complete its commands for a move, so that its peer does not notice. One
/// that could not, as on a slow device, has twice the time at the next attempt.
const MOVE_TIMEOUT_NS: u64 = 1_000_000;
/// How often that time is doubled: a device that needs more than 16 ms is slower than any core.
const DOUBLED_MAX: u8 = 4;
/// Connections of a group that complete their commands at the same time. The other group makes each anew in
/// some tens of microseconds.
const MOVING_MAX: usize = 8;
/// Moves that wait for others. A decision of the control plane has fewer.
const QUEUED_MAX: usize = 1024;
/// Of a group's connections, those that are left for accepted ones.
const ACCEPTED_SPARE: u32 = 64;

/// How far a connection is that completes its commands.
enum MoveProgress {
    Waiting,
    Ready,
    /// It closes, or its time is over.
    Cancelled,
    Gone,
}

fn progress<P: Protocol>(
    entry: &ConnectionEntry<P::Connection>,
    deadline_ns: u64,
    now_ns: u64,
) -> MoveProgress {
    if entry.closed {
        return MoveProgress::Gone;
    }
    if entry.closing || entry.connection.is_draining() {
        return MoveProgress::Cancelled;
    }
    if !entry.dirty && entry.requests.outstanding == 0 && entry.connection.is_movable() {
        return MoveProgress::Ready;
    }
    if now_ns >= deadline_ns { MoveProgress::Cancelled } else { MoveProgress::Waiting }
}

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    /// What the connections that can move have cost since the last call.
    pub(super) fn take_loads(&mut self, now_ns: u64) -> Vec<ConnectionLoad> {
        let mut loads = Vec::new();
        for (slot, entry) in self.connections.slab.iter_mut() {
            if entry.closed || entry.closing || entry.awaits_login {
                continue;
            }
            let Some(work) = entry.connection.work() else { continue };
            let before = std::mem::replace(&mut entry.moves.work_seen, work);
            loads.push(ConnectionLoad {
                id: slot.to_bits(),
                work: work.wrapping_sub(before),
                is_movable: !entry.moves.is_moving && entry.moves.stays_until_ns <= now_ns,
                can_begin: entry.moves.can_begin(now_ns),
            });
        }
        loads
    }

    /// Has every connection that can move do so, for simulations of a group
    /// [without others](ConnectionGroup::standalone): each comes back to it.
    pub fn move_all(&mut self, now_ns: u64) {
        let to = self.index;
        let all = self.connections.slab.iter().map(|(slot, _)| GroupMove { id: slot.to_bits(), to });
        let all = all.collect();
        self.begin_moves(all, now_ns);
    }

    /// Begins moves, or queues them.
    pub(super) fn begin_moves(&mut self, moves: Vec<GroupMove>, now_ns: u64) {
        let free = QUEUED_MAX - self.moves.queued.len();
        self.moves.queued.extend(moves.into_iter().take(free));
        self.begin_queued_moves(now_ns);
    }

    fn begin_queued_moves(&mut self, now_ns: u64) {
        while self.moves.moving.len() < MOVING_MAX
            && let Some(GroupMove { id, to }) = self.moves.queued.pop_front()
        {
            let slot = Slot::from_bits(id);
            // A group without others stands for them.
            let is_other = to != self.index || self.shared.peers.is_empty();
            let is_other = is_other && to < self.shared.statuses.len();
            let Some(entry) = self.connections.slab.get_mut(slot).filter(|_| is_other) else { continue };
            let is_open = !entry.closed && !entry.closing && !entry.awaits_login && !entry.moves.is_moving;
            if !is_open || entry.connection.work().is_none() {
                continue;
            }
            entry.moves.is_moving = true;
            entry.connection.begin_move();
            let timeout_ns = MOVE_TIMEOUT_NS << entry.moves.failures.min(DOUBLED_MAX);
            let deadline_ns = now_ns.saturating_add(timeout_ns);
            self.moves.moving.push(MovingConnection { slot, to, deadline_ns });
        }
    }

    /// Moves the connections that have completed their commands, and cancels the moves of those that have not
    /// in time.
    #[cold]
    pub(super) fn continue_moves(&mut self, now_ns: u64) {
        if self.stopping {
            self.moves.queued.clear();
        }
        let mut index = 0;
        while let Some(MovingConnection { slot, to, deadline_ns }) = self.moves.moving.get(index).copied() {
            let progress = match self.connections.slab.get(slot) {
                Some(_) if self.stopping => MoveProgress::Cancelled,
                Some(entry) => progress::<P>(entry, deadline_ns, now_ns),
                None => MoveProgress::Gone,
            };
            match progress {
                MoveProgress::Waiting => {
                    index += 1;
                    continue;
                }
                MoveProgress::Ready => self.send_connection(slot, to, now_ns),
                MoveProgress::Cancelled => self.cancel_move(slot, now_ns),
                MoveProgress::Gone => {}
            }
            self.moves.moving.swap_remove(index);
        }
        self.begin_queued_moves(now_ns);
    }

    fn cancel_move(&mut self, slot: Slot, now_ns: u64) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        let moves = &mut entry.moves;
        *moves = moves.after_failure(now_ns);
        entry.connection.cancel_move();
        self.process(slot, now_ns, |connection, _, _, context| connection.resume(context));
    }

    /// Sends a connection that is movable to another group.
    fn send_connection(&mut self, slot: Slot, to: usize, now_ns: u64) {
        let has_space =
            |connections: &AtomicU32| connections.load(Ordering::Relaxed) < CONNECTIONS_MAX - ACCEPTED_SPARE;
        let passage =
            Transit::enter(&self.shared.transit).filter(|_| has_space(&self.shared.statuses[to].connections));
        let id = self.connections.slab.get(slot).map(|entry| entry.id);
        let (Some(passage), Some(id)) = (passage, id) else { return self.cancel_move(slot, now_ns) };
        let Some(stream) = self.network.remove(id) else { return self.cancel_move(slot, now_ns) };
        if let Some(known) = self.connections.by_network.get_mut(id.0.index() as usize) {
            *known = None;
        }
        let Some(entry) = self.connections.slab.remove(slot) else { return };
        let ConnectionEntry { connection, peer, peer_key, flow, admitted, moves, .. } = entry;
        let moves = moves.after_move(now_ns);
        let (own, other) = (&self.shared.statuses[self.index], &self.shared.statuses[to]);
        own.connections.fetch_sub(1, Ordering::Relaxed);
        self.timers.arm_group(now_ns.saturating_add(RELEASE_DELAY_NS));
        let Some(reattach) = connection.detach() else {
            return self.drop_moved(admitted);
        };
        other.connections.fetch_add(1, Ordering::Relaxed);
        let to_core = self.shared.peers.reactor(to);
        log::debug!(target: P::LOG_TARGET, "{peer}: moves from core {} to {to_core}", self.core);
        let moved = MovedConnection { stream, reattach, peer, peer_key, flow, admitted, moves, passage };
        if let Err(GroupMessage::Moved(moved)) =
            self.shared.peers.send(to, GroupMessage::Moved(Box::new(moved)))
        {
            // Its mailbox is full, so the group is overloaded, and the connection is better off here.
            other.connections.fetch_sub(1, Ordering::Relaxed);
            own.connections.fetch_add(1, Ordering::Relaxed);
            self.attach_moved(*moved, now_ns);
        }
    }

    /// Adds a connection that comes from another group. The configuration must be the latest.
    pub(super) fn attach_moved(&mut self, moved: MovedConnection<P, N::Stream>, now_ns: u64) {
        let MovedConnection { stream, reattach, peer, peer_key, flow, admitted, moves, passage } = moved;
        let has_space = !self.connections.slab.is_full();
        let added = if has_space { self.network.add(stream).ok() } else { None };
        let Some(id) = added else {
            let core = self.core;
            log::warn!(target: P::LOG_TARGET, "{peer}: closed, as core {core} has too many connections");
            self.shared.statuses[self.index].connections.fetch_sub(1, Ordering::Relaxed);
            return self.drop_moved(admitted);
        };
        let peer_max = self.memory.limits().of_peer();
        let account = self.memory.peer(MemoryOwner::Peer(peer_key), peer_max);
        let mut requests = ConnectionRequests { peer: Some(account), ..ConnectionRequests::default() };
        let connection = reattach(&mut IoContext {
            pool: &self.pool,
            protocol: &mut self.protocol,
            config: &self.config,
            now_ns,
            turn: Turn::new(true, false),
            devices: &mut self.devices,
            requests: &mut requests,
        });
        let slot = self.connections.insert(connection, id, peer);
        drop(passage);
        count(&self.shared.statuses[self.index].counts.moved);
        if let Some(entry) = self.connections.slab.get_mut(slot) {
            entry.peer_key = peer_key;
            (entry.flow, entry.admitted) = (flow, admitted);
            entry.requests.peer = requests.peer;
            entry.moves = MoveHistory { work_seen: entry.connection.work().unwrap_or(0), ..moves };
            if self.stopping {
                entry.connection.begin_drain();
            }
            self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
            add_polled::<P>(&mut self.polled, slot, entry);
        }
        // Commands that it has accepted and not begun. Then it is received from, whether or not there is an
        // event: a layer of the stream may have taken from the socket what it has not passed on.
        let resume = |connection: &mut P::Connection, context: &mut IoContext<'_, P>| {
            connection.resume(context).map(|_| MoreToRead::Yes)
        };
        self.process(slot, now_ns, |connection, _, _, context| resume(connection, context));
        self.connections.mark_dirty(slot);
    }

    /// A connection ends between two groups.
    fn drop_moved(&self, admitted: Option<Admitted>) {
        count(&self.shared.statuses[self.index].counts.closed);
        if let Some(admitted) = admitted {
            self.shared.admissions.remove(admitted);
        }
    }
}
