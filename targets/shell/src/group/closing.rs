//! The end of connections.

use std::sync::atomic::Ordering;

use bdev::TracePoint;
use slots::Slot;
use sockets::Listen;

use super::admission::count;
use super::{ConnectionGroup, RELEASE_DELAY_NS};
use crate::connections::NO_STREAM;
use crate::cores::GroupMessage;
use crate::protocol::{CloseReason, Protocol, ProtocolConnection};

impl<P: Protocol, N: Listen> ConnectionGroup<P, N> {
    /// Closes connections that are drained, and those whose drain timed out.
    pub(super) fn close_drained(&mut self, now_ns: u64) {
        let mut closing = std::mem::take(&mut self.closing);
        closing.retain(|slot| {
            let Some(entry) = self.connections.slab.get_mut(*slot).filter(|entry| !entry.closed) else {
                return false;
            };
            let is_done = entry.drain_deadline_ns <= now_ns || entry.connection.is_drained();
            if is_done {
                self.close(*slot, CloseReason::Drained, now_ns);
            }
            !is_done
        });
        // The close of these may have begun the drain of others.
        closing.append(&mut self.closing);
        self.closing = closing;
    }

    /// Has every connection close once it is drained, and accepts no others. Whether none is left.
    pub(super) fn end_connections(&mut self) -> bool {
        self.stopping = true;
        self.unlisten(None);
        self.connections.update(|_, entry| {
            entry.connection.begin_drain();
            true
        });
        self.connections.is_empty()
    }

    /// Continues what [`TargetCores::drain`](crate::TargetCores::drain) has asked for.
    #[cold]
    pub(super) fn continue_drain(&mut self) {
        if self.end_connections()
            && self.shared.transit.is_empty()
            && let Some(responder) = self.drained.take()
        {
            // It may not wait any longer.
            _ = responder.answer(());
        }
    }

    /// Closes a connection. The protocol's part stays until outstanding device requests complete, so that a
    /// late write cannot overwrite a newer one.
    pub(super) fn close(&mut self, slot: Slot, reason: CloseReason<P::Error>, now_ns: u64) {
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if entry.closed {
            return;
        }
        let peer = &entry.peer;
        match &reason {
            CloseReason::Protocol(error) => log::warn!(target: P::LOG_TARGET, "{peer}: {error}"),
            CloseReason::Closed => log::debug!(target: P::LOG_TARGET, "{peer}: closed by the peer"),
            CloseReason::Network(kind) => log::debug!(target: P::LOG_TARGET, "{peer}: {kind}"),
            CloseReason::Limit => log::debug!(target: P::LOG_TARGET, "{peer}: closed, too many connections"),
            CloseReason::TransferTimeout => log::warn!(
                target: P::LOG_TARGET,
                "{peer}: did not send requested data or read answers in time, and is disconnected"
            ),
            CloseReason::Drained => {
                log::debug!(target: P::LOG_TARGET, "{peer}: closed after its last answers")
            }
        }
        // Best effort: a message with the reason may be queued.
        _ = entry.connection.flush(&mut self.network.stream(entry.id));
        self.network.close(entry.id);
        if let Some(known) = self.connections.by_network.get_mut(entry.id.0.index() as usize) {
            *known = None;
        }
        entry.closed = true;
        self.timers.arm_group(now_ns.saturating_add(RELEASE_DELAY_NS));
        self.end_pending_login(slot);
        let Some(entry) = self.connections.slab.get_mut(slot) else { return };
        if let Some(flow) = &entry.flow {
            let name = P::NAME;
            probe::probe!(ringbolt, connection_closed, self.core, flow.id(), name.as_ptr(), name.len());
            self.trace.record(TracePoint::ConnectionClose, flow);
            count(&self.shared.statuses[self.index].counts.closed);
        }
        if entry.id != NO_STREAM {
            self.shared.statuses[self.index].connections.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(admitted) = entry.admitted.take() {
            self.shared.admissions.remove(admitted);
        }
        let recheck = entry.connection.on_close();
        if entry.requests.outstanding == 0 {
            self.connections.slab.remove(slot);
        }
        if recheck {
            self.recheck_all_groups(now_ns);
        }
    }

    pub(super) fn recheck_all_groups(&mut self, now_ns: u64) {
        for group in 0..self.shared.peers.len() {
            if group != self.index {
                // The flag is authoritative; the message only wakes. A group with a full mailbox is awake.
                self.shared.statuses[group].recheck.store(true, Ordering::Release);
                _ = self.shared.peers.send(group, GroupMessage::Wake);
            }
        }
        self.protocol.recheck(&mut self.connections, now_ns);
    }
}
