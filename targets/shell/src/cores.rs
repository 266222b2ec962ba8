//! The control plane's handle of a target's groups, one on each core.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use ::control::{BalancedTarget, ConnectionLoad, ConnectionMove};
use reactor::{Core, ReactorHandle};
use sockets::{Network, SendStats, ServerNetwork, Sockets, StreamAddress};

use crate::DRAIN_TIMEOUT;
use crate::admissions::{ConnectionLimits, PeerConnections};
use crate::connections::Connections;
use crate::group::{ConnectionGroup, ConnectionTotals, GroupShared};
use crate::logins::GroupLimits;
use crate::mailboxes::{CoreMailboxes, GroupMail, GroupWaker, ShellError};
use crate::moves::{GroupMove, MovedConnection};
use crate::protocol::{Accepted, Protocol};
use crate::publisher::Publisher;
use crate::request::Responder;

/// A question of the control plane about the connections of a core.
pub(crate) type Query<P> = Box<dyn FnOnce(&mut P, &mut Connections<<P as Protocol>::Connection>) + Send>;

/// A message to a group of connections.
pub(crate) enum GroupMessage<P: Protocol, S> {
    /// Look at the configuration, at the recheck flag, and at what the protocol polls.
    Wake,
    /// A connection that another core accepted for this one.
    Incoming { stream: S, accepted: Accepted },
    /// A connection moves here from another core.
    Moved(Box<MovedConnection<P, S>>),
    /// Say what the connections that can move have cost since the last time.
    Loads(Responder<Vec<ConnectionLoad>>),
    /// Move connections to other groups, each as soon as it can.
    Move(Vec<GroupMove>),
    /// Listen on an address.
    Listen { address: StreamAddress, portid: u16, responder: Responder<io::Result<StreamAddress>> },
    /// Stop listening on a port, or on all.
    Unlisten { portid: Option<u16>, responder: Responder<()> },
    /// Disconnect all peers, and answer when no connection is left.
    Drain(Responder<()>),
    /// Answer a question.
    Query(Query<P>),
    /// Say how owned sends were sent.
    SendStats(Responder<SendStats>),
}

impl<P: Protocol, S: Send> GroupMail for GroupMessage<P, S> {
    const WAKE: Self = GroupMessage::Wake;
}

/// The groups of a target, one on each reactor; on kernel sockets, or on another network `N` such as a
/// simulation's.
///
/// The first core owns the listeners; a connection goes to the core with the fewest, and stays there unless
/// it is [moved](BalancedTarget::move_connections). Calls block for up to
/// [`CORE_TIMEOUT`](crate::CORE_TIMEOUT), so a reactor's thread must not make them. A program that ends calls
/// [`drain`](Self::drain); the groups end with their reactors, and drain what connections they have then.
/// Configuration goes through the [`Publisher`] that the target was started with. Cheap to clone.
pub struct TargetCores<P: Protocol, N: ServerNetwork = Sockets> {
    mailboxes: CoreMailboxes<GroupMessage<P, <N as Network>::Stream>>,
    shared: Arc<GroupShared<P, <N as Network>::Stream>>,
}

impl<P: Protocol, N: ServerNetwork> Clone for TargetCores<P, N> {
    fn clone(&self) -> Self {
        TargetCores { mailboxes: self.mailboxes.clone(), shared: self.shared.clone() }
    }
}

impl<P: Protocol, N: ServerNetwork> fmt::Debug for TargetCores<P, N> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("TargetCores").field(&P::NAME).finish()
    }
}

impl<P: Protocol, N: ServerNetwork> TargetCores<P, N> {
    /// Starts a group on every reactor; `protocol` makes the state of each, on its core. Waits for the
    /// reactors.
    ///
    /// # Errors
    /// A reactor has stopped, or does not respond.
    pub fn start(
        reactors: &[ReactorHandle],
        publisher: &Publisher<P::Config>,
        limits: GroupLimits,
        protocol: impl Fn(&Core, &GroupWaker) -> P + Clone + Send + 'static,
    ) -> Result<TargetCores<P, N>, ShellError> {
        let mailboxes = CoreMailboxes::default();
        let shared = Arc::new(GroupShared::new(limits, reactors.len(), mailboxes.clone()));
        let of_groups = shared.clone();
        mailboxes.start(reactors, publisher, move |core, inbox, waker| {
            let network = N::of_core(core);
            ConnectionGroup::new(core, network, protocol(core, waker), of_groups.clone(), Some(inbox))
        })?;
        Ok(TargetCores { mailboxes, shared })
    }

    /// Changes how many connections there may be, for those that log in from now on.
    pub fn set_limits(&self, limits: ConnectionLimits) {
        self.shared.admissions().set_limits(limits);
    }

    /// The peers that have logged in, those with the most connections first.
    pub fn peers(&self) -> Vec<PeerConnections> {
        self.shared.admissions().peers()
    }

    /// How many connections an object may have at present
    /// ([`ProtocolConnection::object`](crate::ProtocolConnection::object)).
    pub fn object_connections_max(&self, object: u64) -> u32 {
        self.shared.admissions().object_max(object)
    }

    /// The connections on all cores. Neither waits for a core nor disturbs one.
    pub fn totals(&self) -> ConnectionTotals {
        self.shared.totals()
    }

    /// Listens on an address. Connections carry `portid`. Returns the address with the port that the kernel
    /// assigned for port 0.
    ///
    /// # Errors
    /// The address cannot be used, or the first core does not answer; nothing listens then.
    pub fn listen(&self, address: &StreamAddress, portid: u16) -> Result<StreamAddress, ShellError> {
        let to = address.clone();
        let bound =
            self.mailboxes.ask(0, |responder| GroupMessage::Listen { address: to, portid, responder })?;
        bound.map_err(|error| ShellError::Listen(address.clone(), error))
    }

    /// Closes the listeners with this port identifier, or all; existing connections stay.
    ///
    /// # Errors
    /// The first core does not answer. It closes them when it runs again.
    pub fn unlisten(&self, portid: Option<u16>) -> Result<(), ShellError> {
        self.mailboxes.ask(0, |responder| GroupMessage::Unlisten { portid, responder })
    }

    /// Closes the listeners and disconnects the peers, on all cores at once: each connection closes after its
    /// commands in flight have completed, as when the reactors stop, and none is accepted any more. Waits
    /// until there is none, for up to [`DRAIN_TIMEOUT`](crate::DRAIN_TIMEOUT).
    ///
    /// # Errors
    /// The first core that has connections left, or does not answer. It disconnects them when it can.
    pub fn drain(&self) -> Result<(), ShellError> {
        let end = Instant::now() + DRAIN_TIMEOUT;
        self.shared.transit().stop();
        let mut requests = Vec::new();
        for core in 0..self.mailboxes.len() {
            requests.push(self.mailboxes.request(core, GroupMessage::Drain));
        }
        let waits = requests.into_iter().enumerate().map(|(core, request)| {
            self.mailboxes.wait_for(core, request?, end.saturating_duration_since(Instant::now()))
        });
        // Each core is waited for, whatever becomes of the others.
        waits.fold(Ok(()), Result::and)
    }

    /// Runs `query` on every core, and returns the results by core.
    ///
    /// # Errors
    /// The first core that does not answer.
    pub fn query<R: Send + 'static>(
        &self,
        query: impl Fn(&mut P, &mut Connections<P::Connection>) -> R + Clone + Send + 'static,
    ) -> Result<Vec<R>, ShellError> {
        let mut requests = Vec::new();
        for core in 0..self.mailboxes.len() {
            let query = query.clone();
            requests.push(self.mailboxes.request(core, |responder| {
                GroupMessage::Query(Box::new(move |protocol, connections| {
                    if !responder.is_abandoned() {
                        _ = responder.answer(query(protocol, connections));
                    }
                }))
            })?);
        }
        requests.into_iter().enumerate().map(|(core, request)| self.mailboxes.wait(core, request)).collect()
    }

    /// How the owned sends of each core's connections were sent, those included that are closed.
    ///
    /// # Errors
    /// The first core that does not answer.
    pub fn send_stats(&self) -> Result<Vec<SendStats>, ShellError> {
        (0..self.mailboxes.len()).map(|core| self.mailboxes.ask(core, GroupMessage::SendStats)).collect()
    }
}

impl<P: Protocol, N: ServerNetwork> BalancedTarget for TargetCores<P, N> {
    fn name(&self) -> &'static str {
        P::NAME
    }

    fn reactors(&self) -> Vec<usize> {
        self.mailboxes.reactors()
    }

    fn loads(&self) -> Option<Vec<Vec<ConnectionLoad>>> {
        let mut requests = Vec::new();
        for core in 0..self.mailboxes.len() {
            requests.push(self.mailboxes.request(core, GroupMessage::Loads).ok()?);
        }
        requests
            .into_iter()
            .enumerate()
            .map(|(core, request)| self.mailboxes.wait(core, request).ok())
            .collect()
    }

    fn exclude_reactors(&self, reactors: &[usize]) {
        for (group, reactor) in self.mailboxes.reactors().iter().enumerate() {
            self.shared.set_excluded(group, reactors.contains(reactor));
        }
    }

    fn move_connections(&self, moves: &[ConnectionMove]) {
        for core in 0..self.mailboxes.len() {
            let own = moves.iter().filter(|one| one.from == core);
            let own: Vec<GroupMove> = own.map(|one| GroupMove { id: one.id, to: one.to }).collect();
            if !own.is_empty() {
                // A group with a full mailbox is busy with other things; the next decision comes soon.
                _ = self.mailboxes.send(core, GroupMessage::Move(own));
            }
        }
    }
}
