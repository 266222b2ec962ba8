//! Connections that move to another core.
//!
//! A connection moves after its login, when the commands that have begun are answered and everything is sent:
//! with its session's part, what it has received of the next PDU, and commands that [have
//! waited](crate::deferred). Other connections of its session stay: commands keep their order by their
//! numbers, whichever cores they are on.

use std::net::{IpAddr, SocketAddr};

use target_shell::{IoContext, Reattach};

use crate::connection::{IscsiConnection, Phase};
use crate::core::IscsiCore;
use crate::deferred::DeferredPdus;
use crate::pdu_reader::{PduReader, Stage};
use crate::pdu_writer::PduWriter;
use crate::session::{DetachedSession, Session};
use crate::sink::Sink;

/// A connection between two cores.
struct MovedConnection {
    flow: u16,
    local: Option<SocketAddr>,
    peer: IpAddr,
    reader: PduReader,
    /// Digests of what is sent: of headers, and of data.
    digests: (bool, bool),
    is_deferred: bool,
    deferred: DeferredPdus,
    session: DetachedSession,
    deadline_ns: u64,
    last_received_ns: u64,
    pinged_ns: u64,
}

impl IscsiConnection {
    /// What its commands have cost, if its initiator has logged in and it stays open.
    pub(crate) fn movable_work(&self) -> Option<u64> {
        let is_settled = !self.draining && !self.aborted && !self.logged_in;
        self.session().filter(|session| is_settled && !session.is_over()).map(Session::work_done)
    }

    /// Whether everything that has begun is answered and sent.
    pub(crate) fn is_between_cores(&self) -> bool {
        let is_between_pdus = self.is_deferred || self.reader.stage() == Stage::Header;
        self.moving
            && self.movable_work().is_some()
            && is_between_pdus
            && !self.deferred.has_begun()
            && self.out.queue.is_empty()
            && self.session().is_some_and(Session::is_detachable)
    }

    /// Takes a connection that is movable apart.
    pub(crate) fn take_apart(self) -> Option<Reattach<IscsiCore>> {
        let Phase::Session(session) = self.phase else { return None };
        let moved = MovedConnection {
            flow: self.flow,
            local: self.local,
            peer: self.peer,
            reader: self.reader,
            digests: (self.out.header_digest, self.out.data_digest),
            is_deferred: self.is_deferred,
            deferred: self.deferred,
            session: session.detach(),
            deadline_ns: self.deadline_ns,
            last_received_ns: self.last_received_ns,
            pinged_ns: self.pinged_ns,
        };
        Some(Box::new(move |context: &mut IoContext<'_, IscsiCore>| moved.put_together(context)))
    }
}

impl MovedConnection {
    /// The connection with the resources of another core, and as its configuration has it.
    fn put_together(self, context: &mut IoContext<'_, IscsiCore>) -> IscsiConnection {
        let (header_digest, data_digest) = self.digests;
        let mut connection = IscsiConnection {
            flow: self.flow,
            local: self.local,
            peer: self.peer,
            reader: self.reader,
            out: PduWriter { header_digest, data_digest, ..PduWriter::default() },
            sink: Sink::default(),
            is_deferred: self.is_deferred,
            turn_is_over: false,
            phase: Phase::Session(Box::new(Session::attach(self.session, context))),
            draining: false,
            aborted: false,
            logged_in: false,
            moving: false,
            deferred: self.deferred,
            deadline_ns: self.deadline_ns,
            last_received_ns: self.last_received_ns,
            reinstatement_deadline_ns: None,
            pinged_ns: self.pinged_ns,
            nop_interval_ns: 0,
            nop_timeout_ns: 0,
        };
        // Its target node may have been deleted, and others may have asked it to end, when it was on no core.
        connection.apply(context.config);
        connection.heed_control();
        connection
    }
}
