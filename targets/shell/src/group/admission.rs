//! Which group gets a connection, and how many there may be.

use std::io;
use std::ops::AddAssign;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use bdev::TracePoint;
use slots::Slot;
use sockets::{Listen, ListenerId, StreamAddress};

use super::ConnectionGroup;
use super::polled::add_polled;
use crate::admissions::{Admissions, LimitExceeded};
use crate::cores::GroupMessage;
use crate::logins::GroupLimits;
use crate::mailboxes::CoreMailboxes;
use crate::memory::MemoryOwner;
use crate::moves::Transit;
use crate::peers::PeerKey;
use crate::protocol::{Accepted, CloseReason, Notice, Protocol, ProtocolConnection};

/// What the groups of a target share.
pub(crate) struct GroupShared<P: Protocol, S> {
    pub(super) limits: GroupLimits,
    pub(super) admissions: Arc<Admissions>,
    pub(super) registry: bdev::Registry,
    pub(super) statuses: Box<[GroupStatus]>,
    pub(super) peers: CoreMailboxes<GroupMessage<P, S>>,
    pub(super) transit: Arc<Transit>,
}

/// What other groups read and set: the load of a group, and a request to recheck its connections.
#[derive(Default)]
pub(super) struct GroupStatus {
    /// All connections, and those of them whose peers have not logged in.
    pub(super) connections: AtomicU32,
    pub(super) pending_logins: AtomicU32,
    pub(super) recheck: AtomicBool,
    /// It gets no accepted connections while others may have them.
    pub(super) is_excluded: AtomicBool,
    pub(super) counts: GroupCounts,
}

/// What has happened to the connections of a group since the target has started. Its core alone writes.
#[derive(Default)]
pub(super) struct GroupCounts {
    pub(super) accepted: AtomicU64,
    pub(super) logins: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) closed: AtomicU64,
    pub(super) moved: AtomicU64,
}

/// The connections of a target, on all its cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionTotals {
    /// Open ones.
    pub open: u64,
    /// Those of them whose peers have not logged in.
    pub pending_logins: u64,
    /// Accepted since the target has started.
    pub accepted: u64,
    /// Whose peers have logged in; of targets without a login all that were accepted.
    pub logins: u64,
    /// Refused or closed by a limit on connections.
    pub refused: u64,
    /// Closed.
    pub closed: u64,
    /// Moved from one core to another, each time that one was.
    pub moved: u64,
}

impl AddAssign for ConnectionTotals {
    fn add_assign(&mut self, other: ConnectionTotals) {
        let ConnectionTotals { open, pending_logins, accepted, logins, refused, closed, moved } = other;
        self.open += open;
        self.pending_logins += pending_logins;
        self.accepted += accepted;
        self.logins += logins;
        self.refused += refused;
        self.closed += closed;
        self.moved += moved;
    }
}

/// Counts one more; only the group's core calls it.
pub(super) fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

impl<P: Protocol, S> GroupShared<P, S> {
    pub(crate) fn new(
        limits: GroupLimits,
        cores: usize,
        peers: CoreMailboxes<GroupMessage<P, S>>,
    ) -> GroupShared<P, S> {
        let admissions = Arc::new(Admissions::new(limits.connections.clone()));
        let registry = limits.registry.clone().unwrap_or_default();
        GroupShared {
            limits,
            admissions,
            registry,
            statuses: (0..cores).map(|_| GroupStatus::default()).collect(),
            peers,
            transit: Arc::default(),
        }
    }

    /// Whether a group gets no accepted connections while others may have them.
    pub(crate) fn set_excluded(&self, group: usize, is_excluded: bool) {
        self.statuses[group].is_excluded.store(is_excluded, Ordering::Relaxed);
    }

    /// The connections between two groups.
    pub(crate) fn transit(&self) -> &Transit {
        &self.transit
    }

    /// The connections of all groups.
    pub(crate) fn totals(&self) -> ConnectionTotals {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.statuses.iter().fold(ConnectionTotals::default(), |sum, status| ConnectionTotals {
            open: sum.open + u64::from(status.connections.load(Ordering::Relaxed)),
            pending_logins: sum.pending_logins + u64::from(status.pending_logins.load(Ordering::Relaxed)),
            accepted: sum.accepted + load(&status.counts.accepted),
            logins: sum.logins + load(&status.counts.logins),
            refused: sum.refused + load(&status.counts.refused),
            closed: sum.closed + load(&status.counts.closed),
            moved: sum.moved + load(&status.counts.moved),
        })
    }

    /// How many connections each peer has and may have.
    pub(crate) fn admissions(&self) -> &Arc<Admissions> {
        &self.admissions
    }
}

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    /// Assigns an accepted connection to the group with the fewest connections, of those that the protocol
    /// allows and that are not excluded.
    pub(super) fn assign_connection(
        &mut self,
        listener: ListenerId,
        stream: N::Stream,
        peer: StreamAddress,
        now_ns: u64,
    ) {
        let Some((_, portid)) = self.listeners.iter().find(|(id, _)| *id == listener) else { return };
        let order = |group: &usize| {
            let status = &self.shared.statuses[*group];
            (status.is_excluded.load(Ordering::Relaxed), status.connections.load(Ordering::Relaxed))
        };
        if self.stopping {
            return;
        }
        let peer_key = PeerKey::of(&peer, N::peer_credentials_of(&stream));
        if let Err(limit) = self.shared.admissions.check(peer_key) {
            count(&self.shared.statuses[self.index].counts.refused);
            // Dropping the stream closes it. The peer may retry when others have disconnected.
            let local = self.network.local_address(listener);
            return log_refused::<P>(local.as_ref().unwrap_or(&peer), limit);
        }
        let local = N::local_address_of(&stream).or_else(|| self.network.local_address(listener));
        let Some(local) = local else { return };
        // The group that adds it assigns the flow.
        let accepted = Accepted { portid: *portid, local, peer, peer_key, flow: 0 };
        let serves = |group: &usize| self.protocol.may_serve(&self.config, accepted.portid, *group);
        let groups = (0..self.shared.statuses.len()).filter(serves);
        let group = groups.min_by_key(order).unwrap_or(self.index);
        // It counts as a pending login until its group knows better.
        let status = &self.shared.statuses[group];
        status.pending_logins.fetch_add(1, Ordering::Relaxed);
        status.connections.fetch_add(1, Ordering::Relaxed);
        if group == self.index || self.shared.peers.is_empty() {
            return self.add_connection(stream, accepted, now_ns);
        }
        if self.shared.peers.send(group, GroupMessage::Incoming { stream, accepted }).is_err() {
            // Its mailbox is full, so the group is overloaded: the connection is closed and the peer retries.
            let status = &self.shared.statuses[group];
            status.connections.fetch_sub(1, Ordering::Relaxed);
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Logs that a connection was not accepted; the network retries.
    #[cold]
    pub(super) fn log_failed_accept(&mut self, listener: ListenerId, error: &io::Error) {
        if let Some(local) = self.network.local_address(listener) {
            log::warn!(target: P::LOG_TARGET, "{local}: a connection was not accepted: {error}");
        }
    }

    pub(super) fn add_connection(&mut self, stream: N::Stream, accepted: Accepted, now_ns: u64) {
        // What its peer logs in as is not known yet.
        let flow = self.shared.registry.tenants().connect(&format!("peer {}", accepted.peer_key));
        let accepted = Accepted { flow: flow.id(), ..accepted };
        let (peer, peer_key) = (accepted.peer.clone(), accepted.peer_key);
        // A client's UNIX socket usually has no name; log lines have the listener's.
        let name = if peer == StreamAddress::Unix(PathBuf::new()) { &accepted.local } else { &peer }.clone();
        // Another core may have accepted it before it began to drain.
        let added = if self.connections.slab.is_full() || self.stopping {
            None
        } else {
            self.protocol.accept(accepted, &self.config, now_ns)
        };
        let added = added.and_then(|connection| Some((connection, self.network.add(stream).ok()?)));
        let status = &self.shared.statuses[self.index];
        let Some((connection, id)) = added else {
            status.connections.fetch_sub(1, Ordering::Relaxed);
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let awaits_login = connection.awaits_login();
        count(&status.counts.accepted);
        // A static probe point, as all of these: one NOP until a tracer attaches.
        probe::probe!(ringbolt, connection_accepted, self.core, flow.id(), P::NAME.as_ptr(), P::NAME.len());
        log::debug!(target: P::LOG_TARGET, "{name}: connected, on core {}", self.core);
        let slot = self.connections.insert(connection, id, name);
        if let Some(entry) = self.connections.slab.get_mut(slot) {
            entry.awaits_login = awaits_login;
            entry.peer_key = peer_key;
            self.trace.record(TracePoint::ConnectionAccept, &flow);
            entry.flow = Some(flow);
            let peer_max = self.memory.limits().of_peer();
            entry.requests.peer = Some(self.memory.peer(MemoryOwner::Peer(peer_key), peer_max));
            self.timers.arm(slot, entry.connection.deadline_ns(), &mut entry.timer_ns);
            add_polled::<P>(&mut self.polled, slot, entry);
        }
        if !awaits_login {
            status.pending_logins.fetch_sub(1, Ordering::Relaxed);
            self.admit(slot, now_ns);
        } else if let Some(replaced) = self.logins.add(slot, peer_key) {
            log::warn!(
                target: P::LOG_TARGET,
                "too many connections have not logged in, with those of {peer_key}; the oldest is closed"
            );
            self.close(replaced, CloseReason::Limit, now_ns);
        }
        // It may want to speak first.
        self.connections.mark_dirty(slot);
    }

    #[cold]
    pub(super) fn process_notice(&mut self, slot: Slot, notice: Notice, now_ns: u64) {
        if notice.logged_in {
            self.end_pending_login(slot);
            // Others may have logged in since it was accepted.
            self.admit(slot, now_ns);
        }
        if notice.recheck {
            self.recheck_all_groups(now_ns);
        }
    }

    /// Names the tenant of a connection. Counts it among those of its peer, and of what it has logged in to,
    /// and closes it if there are too many.
    fn admit(&mut self, slot: Slot, now_ns: u64) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if entry.closed || entry.admitted.is_some() {
            return;
        }
        if let (Some(flow), Some(tenant)) = (&entry.flow, entry.connection.tenant()) {
            flow.set_tenant(&tenant);
        }
        let counts = &self.shared.statuses[self.index].counts;
        if let Some(flow) = &entry.flow {
            let (name, tenant) = (P::NAME, flow.tenant().index());
            probe::probe!(
                ringbolt,
                connection_login,
                self.core,
                flow.id(),
                tenant,
                name.as_ptr(),
                name.len()
            );
            self.trace.record(TracePoint::ConnectionLogin, flow);
            count(&counts.logins);
        }
        match self.shared.admissions.add(entry.peer_key, entry.connection.object()) {
            Ok(admitted) => entry.admitted = Some(admitted),
            Err(limit) => {
                count(&counts.refused);
                log_refused::<P>(&entry.peer, limit);
                self.close(slot, CloseReason::Limit, now_ns);
            }
        }
    }

    /// The peer of a connection has logged in, or the connection is closed.
    pub(super) fn end_pending_login(&mut self, slot: Slot) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if std::mem::take(&mut entry.awaits_login) {
            self.logins.remove(slot);
            self.shared.statuses[self.index].pending_logins.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// `address` is that of the listener, or of the peer; `limit` names the peer.
#[cold]
fn log_refused<P: Protocol>(address: &StreamAddress, limit: LimitExceeded) {
    log::warn!(target: P::LOG_TARGET, "{address}: a connection is refused: {limit}");
}
