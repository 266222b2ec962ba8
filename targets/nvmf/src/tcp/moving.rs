//! I/O queues that move to another core.
//!
//! A queue moves when no command of it is at a block device or holds a buffer, and everything is sent. To get
//! there it accepts no further capsule; the one that waits, and what has arrived behind it, moves with the
//! receiver. Data that was requested by R2T may come behind such a capsule. So while some is missing,
//! capsules are accepted, and their commands are deferred as if there were no buffers. An admin queue stays:
//! it has few commands, and its controller.

use std::sync::Arc;

use nvme_controller::io_queue::DetachedQueue;
use nvme_controller::{IoQueue, QueueLease, SecureChannel, Subsystem, SubsystemPort};
use nvme_tcp::PduReceiver;
use target_shell::{NEVER_NS, Notice, Reattach, TURN_COMMAND_BYTES};
use tls::TlsLayer;
use wire_nvme::tcp::Framing;

use super::connection::{ConnectionState, IncomingPdu, NvmfConnection};
use super::link::{TcpLink, TcpLocation};
use super::protocol::{TcpContext, TcpProtocol};
use crate::fabrics::{ConnectionRole, FabricsQueue, QueueAuthentication, TargetIoQueue};

/// An I/O queue between two cores.
struct MovedQueue {
    receiver: PduReceiver,
    tls: Option<Box<TlsLayer>>,
    queue: DetachedQueue<TcpLocation>,
    link: TcpLink,
    receive_framing: Framing,
    flow: u16,
    port: SubsystemPort,
    peer: std::net::SocketAddr,
    secure: Option<Box<SecureChannel>>,
    authentication: Option<Box<QueueAuthentication>>,
    lease: QueueLease,
    subsystem: Arc<Subsystem>,
    /// Commands that it has completed.
    completed: u64,
}

impl ConnectionState {
    /// Whether a capsule waits until the queue has moved.
    #[inline]
    pub(super) fn defers_capsules(&self) -> bool {
        self.moving && !self.fabrics.queue.awaits_host(TcpLocation::waits_for_host)
    }

    /// The cost of its commands, if it is an I/O queue whose host has logged in and does nothing else.
    pub(super) fn movable_work(&self) -> Option<u64> {
        let ConnectionRole::Io(queue) = &self.fabrics.role else { return None };
        let is_settled = self.fabrics.is_authenticated() && self.fabrics.handshake_deadline_ns == NEVER_NS;
        let is_open = !self.fabrics.draining && !self.terminated && queue.lease.is_valid();
        let link = &self.fabrics.link;
        let work = link.responses.commands.wrapping_add(link.data_bytes / TURN_COMMAND_BYTES);
        (is_settled && is_open).then_some(work)
    }

    pub(super) fn begin_move(&mut self) {
        self.moving = true;
        self.fabrics.queue.pause();
    }

    pub(super) fn cancel_move(&mut self) {
        self.moving = false;
        self.fabrics.queue.unpause();
    }

    pub(super) fn is_movable(&self) -> bool {
        self.moving
            && self.movable_work().is_some()
            && self.fabrics.drain_guards.is_empty()
            && self.fabrics.notice == Notice::default()
            && matches!(self.incoming_pdu, IncomingPdu::None)
            && self.fabrics.link.sender.is_empty()
            && self.fabrics.queue.is_detachable()
    }
}

impl NvmfConnection {
    /// Takes a queue that is movable apart.
    pub(super) fn take_apart(self) -> Option<Reattach<TcpProtocol>> {
        let NvmfConnection { receiver, state, tls } = self;
        let ConnectionState { mut fabrics, receive_framing, .. } = state;
        let completed = fabrics.completed_commands();
        let FabricsQueue { role, queue, link, flow, port, peer, secure, authentication, .. } = fabrics;
        let ConnectionRole::Io(TargetIoQueue { lease, subsystem, totals, completed_before }) = role else {
            return None;
        };
        totals.closed(completed - completed_before);
        let moved = MovedQueue {
            receiver,
            tls,
            queue: queue.detach(),
            link,
            receive_framing,
            flow,
            port,
            peer,
            secure,
            authentication,
            lease,
            subsystem,
            completed,
        };
        Some(Box::new(move |context: &mut TcpContext<'_>| moved.put_together(context)))
    }
}

impl MovedQueue {
    /// The queue with the resources of another core, and as its configuration has it.
    fn put_together(self, context: &mut TcpContext<'_>) -> NvmfConnection {
        let memory = FabricsQueue::<TcpLink>::memory_share(self.lease.association(), context);
        let role = ConnectionRole::Io(TargetIoQueue {
            lease: self.lease,
            subsystem: self.subsystem,
            totals: context.protocol.core.totals.clone(),
            completed_before: self.completed,
        });
        let mut connection = NvmfConnection::new(self.port, self.peer, self.flow, NEVER_NS);
        connection.receiver = self.receiver;
        connection.tls = self.tls;
        connection.state.receive_framing = self.receive_framing;
        let fabrics = &mut connection.state.fabrics;
        fabrics.role = role;
        fabrics.queue = IoQueue::attach(self.queue, memory);
        fabrics.link = self.link;
        fabrics.secure = self.secure;
        fabrics.authentication = self.authentication;
        fabrics.apply_keys(context.config);
        fabrics.apply_to_queue(&context.protocol.core, context.config);
        // Its controller may have closed its queues when it was on no core.
        fabrics.drain_if_orphaned();
        connection
    }
}
