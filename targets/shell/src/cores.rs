//! The control plane's handle of a target's groups, one on each core.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use reactor::{Core, MailboxSender, Period, ReactorHandle};
use sockets::{SocketStream, Sockets, StreamAddress};

use crate::CORE_TIMEOUT;
use crate::connections::Connections;
use crate::group::{ConnectionGroup, GroupLimits, GroupShared, Inbox};
use crate::poller::GroupPoller;
use crate::protocol::{Accepted, Protocol};
use crate::publisher::Publisher;
use crate::request::{NoAnswer, Request, Responder};

/// Messages that a group's mailbox holds.
const MESSAGES_MAX: usize = 1024;

/// A core could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ShellError {
    /// The core has stopped.
    #[error("reactor {0} has stopped")]
    Stopped(usize),
    /// The core did not answer in time. What it was asked for is not done.
    #[error("reactor {0} does not respond")]
    Unresponsive(usize),
    /// Binding or listening failed.
    #[error("cannot listen on {0}: {1}")]
    Listen(StreamAddress, io::Error),
}

impl ShellError {
    /// The error of a [`Request`] to a core.
    pub fn of(core: usize, error: NoAnswer) -> ShellError {
        match error {
            NoAnswer::Stopped => ShellError::Stopped(core),
            NoAnswer::Timeout => ShellError::Unresponsive(core),
        }
    }
}

/// A question of the control plane about the connections of a core.
pub(crate) type Query<P> = Box<dyn FnOnce(&mut P, &mut Connections<<P as Protocol>::Connection>) + Send>;

/// A message to a group of connections.
pub(crate) enum GroupMessage<P: Protocol, S> {
    /// Look at the configuration, at the recheck flag, and at what the protocol polls.
    Wake,
    /// A connection that another core accepted for this one.
    Incoming { stream: S, accepted: Accepted },
    /// Listen on an address.
    Listen { address: StreamAddress, portid: u16, responder: Responder<io::Result<StreamAddress>> },
    /// Stop listening on a port, or on all.
    Unlisten { portid: Option<u16>, responder: Responder<()> },
    /// Answer a question.
    Query(Query<P>),
}

/// The mailboxes of all groups of a target, by core. Set when all are there.
pub(crate) type Peers<P, S> = OnceLock<Box<[MailboxSender<GroupMessage<P, S>>]>>;

/// Wakes a group from any thread: its next poll calls [`Protocol::begin_poll`]. Cheap to clone.
#[derive(Clone)]
pub struct GroupWaker(Arc<dyn Fn() + Send + Sync>);

impl GroupWaker {
    pub(crate) fn of<P: Protocol, S: Send + 'static>(sender: MailboxSender<GroupMessage<P, S>>) -> GroupWaker
    where
        MailboxSender<GroupMessage<P, S>>: Send + Sync,
    {
        // A group with a full mailbox is awake anyway: the message may be lost.
        GroupWaker(Arc::new(move || _ = sender.send(GroupMessage::Wake)))
    }

    /// Wakes the group.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for GroupWaker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("GroupWaker")
    }
}

/// The groups of a target on kernel sockets, one on each reactor.
///
/// The first core owns the listeners; a connection goes to the core with the fewest, and stays there. Calls block for
/// up to [`CORE_TIMEOUT`], so a reactor's thread must not make them. The groups end with their reactors: each drains its
/// connections first. Configuration goes through the [`Publisher`] that the target was started with. Cheap to clone.
pub struct TargetCores<P: Protocol>(Arc<Peers<P, SocketStream>>);

impl<P: Protocol> Clone for TargetCores<P> {
    fn clone(&self) -> Self {
        TargetCores(self.0.clone())
    }
}

impl<P: Protocol> fmt::Debug for TargetCores<P> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("TargetCores").field(&P::NAME).finish()
    }
}

impl<P: Protocol> TargetCores<P> {
    /// Starts a group on every reactor; `protocol` makes the state of each, on its core. Waits for the reactors.
    ///
    /// # Errors
    /// A reactor has stopped.
    pub fn start(
        reactors: &[ReactorHandle],
        publisher: &Publisher<P::Config>,
        limits: GroupLimits,
        protocol: impl Fn(&Core, &GroupWaker) -> P + Clone + Send + 'static,
    ) -> Result<TargetCores<P>, ShellError> {
        let peers = Arc::new(OnceLock::new());
        let shared = Arc::new(GroupShared::new(limits, reactors.len(), peers.clone()));
        let mut senders = Vec::new();
        for reactor in reactors {
            let (shared, publisher, protocol) = (shared.clone(), publisher.clone(), protocol.clone());
            let started = reactor.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let waker = GroupWaker::of(sender.clone());
                let protocol = protocol(core, &waker);
                let subscription = publisher.subscribe(core.index(), move || waker.wake());
                let network = Sockets::new(core.event_loop()).with_busy_poll(core.spins());
                let inbox = Inbox { messages, subscription };
                let group = ConnectionGroup::new(core, network, protocol, shared, Some(inbox));
                core.add_poller(Box::new(GroupPoller { core: core.clone(), group }), Period::EveryTurn);
                sender
            });
            senders.push(started.map_err(|_| ShellError::Stopped(reactor.index()))?);
        }
        _ = peers.set(senders.into());
        Ok(TargetCores(peers))
    }

    /// Listens on an address. Connections carry `portid`. Returns the address with the port that the kernel assigned
    /// for port 0.
    ///
    /// # Errors
    /// The address cannot be used, or the first core does not answer; nothing listens then.
    pub fn listen(&self, address: &StreamAddress, portid: u16) -> Result<StreamAddress, ShellError> {
        let (request, responder) = Request::new();
        self.send(0, GroupMessage::Listen { address: address.clone(), portid, responder })?;
        let bound = request.wait(CORE_TIMEOUT).map_err(|error| ShellError::of(0, error))?;
        bound.map_err(|error| ShellError::Listen(address.clone(), error))
    }

    /// Closes the listeners with this port identifier, or all; existing connections stay.
    ///
    /// # Errors
    /// The first core does not answer. It closes them when it runs again.
    pub fn unlisten(&self, portid: Option<u16>) -> Result<(), ShellError> {
        let (request, responder) = Request::new();
        self.send(0, GroupMessage::Unlisten { portid, responder })?;
        request.wait(CORE_TIMEOUT).map_err(|error| ShellError::of(0, error))
    }

    /// Runs `query` on every core, and returns the results by core.
    ///
    /// # Errors
    /// The first core that does not answer.
    pub fn query<R: Send + 'static>(
        &self,
        query: impl Fn(&mut P, &mut Connections<P::Connection>) -> R + Clone + Send + 'static,
    ) -> Result<Vec<R>, ShellError> {
        let count = self.0.get().map_or(0, |peers| peers.len());
        let mut requests = Vec::new();
        for core in 0..count {
            let (request, responder) = Request::new();
            let query = query.clone();
            let run: Query<P> = Box::new(move |protocol, connections| {
                if !responder.is_abandoned() {
                    _ = responder.answer(query(protocol, connections));
                }
            });
            self.send(core, GroupMessage::Query(run))?;
            requests.push(request);
        }
        let answers = requests.into_iter().enumerate();
        answers
            .map(|(core, request)| request.wait(CORE_TIMEOUT).map_err(|error| ShellError::of(core, error)))
            .collect()
    }

    fn send(&self, core: usize, message: GroupMessage<P, SocketStream>) -> Result<(), ShellError> {
        let peer = self.0.get().and_then(|peers| peers.get(core)).ok_or(ShellError::Stopped(core))?;
        // A full mailbox is that of a core that has not polled for a thousand messages.
        peer.send(message).map_err(|_| ShellError::Unresponsive(core))
    }
}
