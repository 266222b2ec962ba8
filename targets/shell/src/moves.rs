//! Moves of connections between the groups of a target: what is asked for, what is under way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use slots::Slot;
use sockets::StreamAddress;

use crate::admissions::Admitted;
use crate::move_history::MoveHistory;
use crate::peers::PeerKey;
use crate::protocol::{Protocol, Reattach};

/// A move, as a group is asked for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupMove {
    /// [`ConnectionLoad::id`].
    pub(crate) id: u64,
    /// The other group.
    pub(crate) to: usize,
}

/// The moves of a group's connections.
#[derive(Debug, Default)]
pub(crate) struct GroupMoves {
    /// Connections that complete their commands.
    pub(crate) moving: Vec<MovingConnection>,
    /// Moves that begin when others have ended.
    pub(crate) queued: VecDeque<GroupMove>,
}

/// A connection that completes its commands for a move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MovingConnection {
    pub(crate) slot: Slot,
    /// The other group.
    pub(crate) to: usize,
    /// When it gives up.
    pub(crate) deadline_ns: u64,
}

/// A connection between two groups.
pub(crate) struct MovedConnection<P: Protocol, S> {
    pub(crate) stream: S,
    pub(crate) reattach: Reattach<P>,
    pub(crate) peer: StreamAddress,
    pub(crate) peer_key: PeerKey,
    pub(crate) flow: Option<bdev::Flow>,
    pub(crate) admitted: Option<Admitted>,
    pub(crate) moves: MoveHistory,
    /// Dropped when the connection is in a group again.
    pub(crate) passage: Passage,
}

/// How many connections of a target are between two groups.
///
/// A group that has none may end only while no other sends it one: `stop` comes before it looks, and each
/// connection is counted before its group looks whether moves have stopped.
#[derive(Debug, Default)]
pub(crate) struct Transit {
    stopped: AtomicBool,
    connections: AtomicU32,
}

/// A connection's part in [`Transit`].
#[derive(Debug)]
pub(crate) struct Passage(Arc<Transit>);

impl Transit {
    /// Lets no further connection begin to move.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Whether no connection is between two groups.
    pub(crate) fn is_empty(&self) -> bool {
        self.connections.load(Ordering::SeqCst) == 0
    }

    /// Counts a connection that begins to move; `None` if moves have stopped.
    pub(crate) fn enter(transit: &Arc<Transit>) -> Option<Passage> {
        transit.connections.fetch_add(1, Ordering::SeqCst);
        let passage = Passage(transit.clone());
        (!transit.stopped.load(Ordering::SeqCst)).then_some(passage)
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::SeqCst);
    }
}

impl GroupMoves {
    /// Whether no connection completes its commands for a move.
    #[inline]
    pub(crate) fn are_none(&self) -> bool {
        self.moving.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_connection_begins_to_move_after_the_stop_and_one_before_is_counted() {
        let transit = Arc::new(Transit::default());
        let passage = Transit::enter(&transit);
        assert!(passage.is_some() && !transit.is_empty());
        transit.stop();
        assert!(Transit::enter(&transit).is_none(), "after the stop");
        assert!(!transit.is_empty(), "the first is still under way");
        drop(passage);
        assert!(transit.is_empty());
    }
}
