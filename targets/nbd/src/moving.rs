//! Connections that move to another core.
//!
//! A connection moves in the transmission phase, between two requests: with its session, what it has received
//! of the next request, and the layer of TLS. During the handshake it stays.

use target_shell::{IoContext, NEVER_NS, Reattach, ReceiveBuffer, SendQueue};
use tls::TlsLayer;

use crate::connection::{NbdConnection, NbdCore};
use crate::handshake::Handshake;
use crate::limits::QUOTA_BYTES;
use crate::session::{DetachedSession, Session};

/// A connection between two cores.
struct MovedConnection {
    flow: u16,
    inbound: ReceiveBuffer,
    handshake: Handshake,
    session: DetachedSession,
    tls: Option<Box<TlsLayer>>,
    received: usize,
}

impl NbdConnection {
    /// What its requests have cost, if it is in the transmission phase and stays open.
    pub(crate) fn movable_work(&self) -> Option<u64> {
        let is_settled = !self.draining && !self.logged_in && !self.awaits_tls();
        self.session.as_ref().filter(|_| is_settled).map(|session| session.work())
    }

    /// Whether everything is answered and sent.
    pub(crate) fn is_between_cores(&self) -> bool {
        self.movable_work().is_some()
            && self.out.is_empty()
            && !self.has_unsent_records()
            && self.session.as_ref().is_some_and(|session| session.is_detachable())
    }

    /// Takes a connection that is movable apart.
    pub(crate) fn take_apart(self) -> Option<Reattach<NbdCore>> {
        let NbdConnection { flow, inbound, handshake, session, tls, received, .. } = self;
        let session = session?.detach();
        let moved = MovedConnection { flow, inbound, handshake, session, tls, received };
        Some(Box::new(move |context: &mut IoContext<'_, NbdCore>| moved.put_together(context)))
    }
}

impl MovedConnection {
    /// The connection with the resources of another core, and as its configuration has it.
    fn put_together(self, context: &mut IoContext<'_, NbdCore>) -> NbdConnection {
        let MovedConnection { flow, inbound, handshake, session, tls, received } = self;
        let session = Session::attach(session, context.memory_share(QUOTA_BYTES));
        let mut connection = NbdConnection {
            flow,
            inbound,
            out: SendQueue::default(),
            handshake,
            session: Some(Box::new(session)),
            tls,
            draining: false,
            logged_in: false,
            deadline_ns: NEVER_NS,
            received,
        };
        // Its export may have been deleted when it was on no core.
        connection.apply(context.config);
        connection
    }
}
