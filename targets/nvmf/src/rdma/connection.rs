//! One NVMe/RDMA connection of the target, which carries one queue pair.

use std::net::SocketAddr;
use std::sync::Arc;

use block_io::{Completion, Status, Tag};
use dma::Data;
use nvme_controller::io_queue::{CommandData, CommandToken};
use nvme_controller::reservation::DrainGuards;
use nvme_controller::{ControllerAssociation, IoQueue, SubsystemPort};
use slots::Slot;
use sockets::{ByteStream, QueuePair, QueuePairEvent, ReceivedMessage};
use target_shell::{
    CloseReason, MemoryShare, MoreToRead, Notice, ProtocolConnection, TransferReport, turn_cost,
};
use wire_nvme::{Sqe, sqe};

use super::link::{Capsule, RdmaLink, RdmaLocation, RdmaTransport, keyed};
use super::protocol::{RdmaContext, RdmaProtocol, RdmaProtocolError};
use crate::fabrics::{
    BEFORE_CONNECT_BYTES_MAX, ConnectionRole, FabricsLink, FabricsQueue, is_authentication,
};
use crate::reservation_watch::ReservedConnection;

/// An NVMe/RDMA connection.
///
/// The shell calls [`receive`](Self::receive) when its queue pair has events, [`complete`](Self::complete)
/// for each completed device request, and [`flush`](Self::flush) once per poll, which gives the queue pair
/// the reads, writes and responses that were collected. A command capsule stays in its receive buffer until
/// there is a slot for it.
pub(crate) struct RdmaConnection {
    pub(crate) fabrics: FabricsQueue<RdmaLink>,
    /// Capsules are left in their buffers until commands that change reservations are done, of which no event
    /// of the connection tells. Whatever else they wait for ends with the end of a work.
    waits_for_reservations: bool,
}

/// Commands, answers and reads that may be unfinished, as a multiple of the queue's entries.
const UNFINISHED_MAX: usize = 3;
/// Identifies what waits for the host in a report of transfers.
const IN_FLIGHT: u64 = 1 << 63;

/// Why no further capsule is processed now.
#[derive(PartialEq, Eq)]
enum Stopped {
    /// There is none.
    Empty,
    /// Others have their turn first.
    TurnIsOver,
    /// Until a command ends, or what waits for the connection's requests is done.
    Blocked,
}

impl RdmaConnection {
    pub(crate) fn new(
        port: SubsystemPort,
        peer: SocketAddr,
        flow: u16,
        connect_deadline_ns: u64,
    ) -> RdmaConnection {
        let role = ConnectionRole::AwaitingConnect;
        let link = RdmaLink::default();
        let fabrics = FabricsQueue::new(role, link, port, peer, flow, connect_deadline_ns);
        RdmaConnection { fabrics, waits_for_reservations: false }
    }

    /// The queue, and what it executes commands with.
    fn io<'a, 'b>(
        &'a mut self,
        context: &'a mut RdmaContext<'b>,
        capsule: Option<Capsule<'a>>,
    ) -> (&'a mut IoQueue<RdmaLocation>, RdmaTransport<'a, 'b, RdmaProtocol>) {
        let FabricsQueue { queue, link, draining, flow, .. } = &mut self.fabrics;
        (queue, RdmaTransport { link, draining, context, flow: *flow, capsule })
    }

    /// Handles the ends of works.
    fn take_events(
        &mut self,
        pair: &mut dyn QueuePair,
        context: &mut RdmaContext<'_>,
    ) -> Result<(), CloseReason<RdmaProtocolError>> {
        while let Some(event) = pair.next_event() {
            match event {
                QueuePairEvent::Sent { tag } => {
                    if let Some(slot) = self.fabrics.link.ended(tag) {
                        self.fabrics.queue.sent(slot.index());
                    }
                }
                QueuePairEvent::Read { tag, data } => {
                    if let Some(slot) = self.fabrics.link.ended(tag) {
                        self.data_read(slot, data, context);
                    }
                }
                QueuePairEvent::Closed => return Err(CloseReason::Closed),
                QueuePairEvent::Failed(kind) => return Err(CloseReason::Network(kind)),
            }
        }
        Ok(())
    }

    /// The data of a command has been read from the host's memory.
    fn data_read(&mut self, slot: Slot, data: Data, context: &mut RdmaContext<'_>) {
        // One that was aborted is gone.
        let Some(place) = self.fabrics.queue.data_mut(slot) else { return };
        match place {
            CommandData::Bytes(bytes) => data.copy_to(0, bytes),
            other => *other = CommandData::Pool(data),
        }
        let received = self.fabrics.accepts_data().map(|()| 0);
        let (queue, mut transport) = self.io(context, None);
        let ready = queue.data_received(slot, received, &mut transport);
        self.fabrics.execute(ready, context);
    }

    /// Commands that change reservations wait for the connection's.
    fn has_drain_guards(&self) -> bool {
        !self.fabrics.drain_guards.is_empty()
    }

    /// Processes capsules while they can be accepted.
    fn take_capsules(
        &mut self,
        pair: &mut dyn QueuePair,
        context: &mut RdmaContext<'_>,
    ) -> Result<Stopped, CloseReason<RdmaProtocolError>> {
        // A host has no more commands in flight than its queue has entries. Those that are answered may have
        // a slot still, until the device says that the host has the answer: a few, unless the host takes
        // none.
        let entries = self.fabrics.link.responses.sq_entries as usize;
        let waiting = pair.message_count();
        if waiting > entries || waiting + self.fabrics.link.unfinished() > UNFINISHED_MAX * entries {
            return Err(CloseReason::Protocol(RdmaProtocolError::TooManyCommands));
        }
        let mut turn = context.turn_commands();
        loop {
            if pair.message_count() == 0 {
                return Ok(Stopped::Empty);
            }
            if turn == 0 {
                return Ok(Stopped::TurnIsOver);
            }
            let is_quiesced = self.fabrics.draining || self.has_drain_guards();
            let waits_for_answers = self.fabrics.waits_for_answers();
            if is_quiesced || waits_for_answers || self.fabrics.queue.free_slots() == 0 {
                return Ok(Stopped::Blocked);
            }
            let Some(message) = pair.next_message() else { return Ok(Stopped::Empty) };
            let processed = self.capsule(pair, &message, context);
            pair.release(message);
            turn = turn.saturating_sub(processed? as usize);
        }
    }

    /// Processes a command capsule; returns as how many commands it counts in a turn.
    fn capsule(
        &mut self,
        pair: &dyn QueuePair,
        message: &ReceivedMessage,
        context: &mut RdmaContext<'_>,
    ) -> Result<u32, CloseReason<RdmaProtocolError>> {
        let capsule = Capsule { pair, message };
        if message.length < sqe::SIZE as u32 || capsule.data_bytes() > self.capsule_bytes_max(context) {
            return Err(CloseReason::Protocol(RdmaProtocolError::CapsuleLength(message.length)));
        }
        let mut entry = [0; sqe::SIZE];
        pair.copy_message(message, 0, &mut entry);
        let sqe = Sqe::decode(&entry);
        self.fabrics.link.responses.consume_sq_entry();
        let cost = turn_cost(sqe.data.length().into());
        let authenticates = self.fabrics.authentication.is_some();
        if authenticates && self.fabrics.rejects_unauthenticated(&sqe) {
            return Ok(cost);
        }
        let token = CommandToken::new(sqe.cid);
        match &self.fabrics.role {
            ConnectionRole::Io(_) if !(authenticates && is_authentication(&sqe)) => {
                let (queue, mut transport) = self.io(context, Some(capsule));
                queue.command(token, &sqe, &mut transport);
            }
            _ => match self.fabrics.admin_bytes(&sqe, keyed_length) {
                Ok(bytes) => {
                    let (queue, mut transport) = self.io(context, Some(capsule));
                    let ready = queue.admin_command(token, &sqe, bytes, &mut transport);
                    self.fabrics.execute(ready, context);
                }
                Err(status) => self.fabrics.link.respond(token.answered(), status, 0),
            },
        }
        Ok(cost)
    }

    /// Maximum bytes of in-capsule data in the current role.
    fn capsule_bytes_max(&self, context: &mut RdmaContext<'_>) -> u32 {
        match self.fabrics.role {
            ConnectionRole::AwaitingConnect => BEFORE_CONNECT_BYTES_MAX,
            _ => context.protocol.core.limits.controller.in_capsule_bytes.max(BEFORE_CONNECT_BYTES_MAX),
        }
    }
}

/// Bytes of the host's memory that a keyed descriptor names.
fn keyed_length(sqe: &Sqe) -> Result<u32, Status> {
    keyed(sqe, 0)?;
    Ok(sqe.data.length())
}

impl ProtocolConnection<RdmaProtocol> for RdmaConnection {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        _scratch: &mut [u8],
        context: &mut RdmaContext<'_>,
    ) -> Result<MoreToRead, CloseReason<RdmaProtocolError>> {
        let Some(pair) = stream.queue_pair() else {
            return Err(CloseReason::Network(std::io::ErrorKind::Unsupported));
        };
        if self.fabrics.link.pool.is_none() {
            self.fabrics.link.pool = Some(context.pool.clone());
        }
        self.take_events(pair, context)?;
        let stopped = self.take_capsules(pair, context)?;
        self.waits_for_reservations = stopped == Stopped::Blocked && self.has_drain_guards();
        Ok(if stopped == Stopped::TurnIsOver { MoreToRead::Yes } else { MoreToRead::No })
    }

    /// Retries ready Copy commands and deferred commands; capsules that need not wait any more follow in
    /// [`receive`](Self::receive).
    fn resume(
        &mut self,
        context: &mut RdmaContext<'_>,
    ) -> Result<MoreToRead, CloseReason<RdmaProtocolError>> {
        let (queue, mut transport) = self.io(context, None);
        queue.retry(&mut transport);
        let can_continue = self.waits_for_reservations && !self.has_drain_guards();
        Ok(if can_continue { MoreToRead::Yes } else { MoreToRead::No })
    }

    #[inline]
    fn complete(&mut self, tag: u64, completion: Completion<Data>) {
        self.fabrics.queue.complete(Tag(tag), completion, &mut self.fabrics.link);
    }

    #[inline]
    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<RdmaProtocolError>> {
        let Some(pair) = stream.queue_pair() else { return Ok(()) };
        let FabricsQueue { queue, link, .. } = &mut self.fabrics;
        link.flush(queue, pair).map_err(CloseReason::Network)
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        self.fabrics.queue.has_ready()
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        self.fabrics.queue.is_waiting() || self.fabrics.link.waits_for_memory() || self.waits_for_reservations
    }

    fn begin_drain(&mut self) {
        self.fabrics.begin_drain();
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.fabrics.draining
    }

    fn is_drained(&self) -> bool {
        self.fabrics.may_close() && self.fabrics.link.is_empty() && !self.fabrics.queue.has_pending(|_| false)
    }

    #[inline]
    fn deadline_ns(&self) -> u64 {
        self.fabrics.deadline_ns()
    }

    fn on_deadline(
        &mut self,
        protocol: &mut RdmaProtocol,
        now_ns: u64,
    ) -> Result<(), CloseReason<RdmaProtocolError>> {
        let expired = self.fabrics.on_deadline(&mut protocol.core, now_ns);
        expired.map_err(|timeout| CloseReason::Protocol(RdmaProtocolError::Timeout(timeout)))
    }

    fn object(&self) -> Option<u64> {
        self.fabrics.object()
    }

    fn tenant(&self) -> Option<String> {
        self.fabrics.tenant()
    }

    /// The device of a host repeats a message as long as there is no receive for it.
    fn transfers(&self, report: &mut TransferReport) {
        if let Some(ended) = self.fabrics.link.waits_for_host() {
            report.waits_for_peer(IN_FLIGHT | ended, 0, 0);
        }
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        Some(self.fabrics.queue.memory())
    }

    fn awaits_login(&self) -> bool {
        true
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        std::mem::take(&mut self.fabrics.notice)
    }

    fn on_close(&mut self) -> bool {
        self.fabrics.on_close()
    }
}

impl ReservedConnection for RdmaConnection {
    fn io_association(&self) -> Option<Arc<ControllerAssociation>> {
        self.fabrics.io_association()
    }

    fn drain_guards(&mut self) -> &mut DrainGuards {
        &mut self.fabrics.drain_guards
    }

    fn on_reservation_change(&mut self, now_ns: u64) {
        self.fabrics.on_reservation_change(now_ns);
    }

    fn begin_drain(&mut self) {
        self.fabrics.begin_drain();
    }
}
