//! The groups of a target on all reactors: how they start, and how messages reach them.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use reactor::{Core, MailboxReceiver, MailboxSender, Period, ReactorHandle};

use crate::CORE_TIMEOUT;
use crate::poller::{GroupPoller, PollGroup};
use crate::publisher::{Publisher, Subscription};
use crate::request::{NoAnswer, Request, Responder};

/// Messages that a group's mailbox holds.
const MESSAGES_MAX: usize = 1024;

/// A core could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ShellError {
    /// The core has stopped.
    #[error("reactor {0} has stopped")]
    Stopped(usize),
    /// The core did not answer in time. What it was asked for is not done, unless its method says otherwise.
    #[error("reactor {0} does not respond")]
    Unresponsive(usize),
    /// Binding or listening failed.
    #[error("cannot listen on {0}: {1}")]
    Listen(sockets::StreamAddress, std::io::Error),
}

impl ShellError {
    fn of(core: usize, error: NoAnswer) -> ShellError {
        match error {
            NoAnswer::Stopped => ShellError::Stopped(core),
            NoAnswer::Timeout => ShellError::Unresponsive(core),
        }
    }
}

/// A message to a group.
pub trait GroupMail: Send {
    /// The message that only wakes: to look at the configuration, and at what the group polls.
    const WAKE: Self;
}

/// The mailboxes of a target's groups, one on each of its reactors. Groups are counted from 0 in the order of
/// these reactors, which may be some of the program's. Cheap to clone.
pub struct CoreMailboxes<M>(Arc<OnceLock<Box<[GroupMailbox<M>]>>>);

struct GroupMailbox<M> {
    /// Index of the reactor.
    reactor: usize,
    sender: MailboxSender<M>,
}

/// Where a group's messages and configuration come from.
pub struct Inbox<M, C> {
    /// Index of the group among those of the target.
    pub index: usize,
    /// Its messages. To be received in each poll.
    pub messages: MailboxReceiver<M>,
    /// The configuration. To be taken when a message was received: if a wake-up was lost, the mailbox was
    /// full of others.
    pub subscription: Subscription<C>,
}

/// Wakes a group from any thread. Cheap to clone.
#[derive(Clone)]
pub struct GroupWaker(Arc<dyn Fn() + Send + Sync>);

impl GroupWaker {
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

impl<M> fmt::Debug for CoreMailboxes<M> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("CoreMailboxes").field(&self.len()).finish()
    }
}

impl<M> Clone for CoreMailboxes<M> {
    fn clone(&self) -> Self {
        CoreMailboxes(self.0.clone())
    }
}

impl<M> Default for CoreMailboxes<M> {
    fn default() -> Self {
        CoreMailboxes(Arc::default())
    }
}

impl<M: GroupMail> CoreMailboxes<M> {
    /// Starts a group on every reactor; `group` makes each, on its core. Waits for the reactors. To be called
    /// once.
    ///
    /// # Errors
    /// A reactor has stopped, or does not respond.
    pub fn start<C: Send + Sync + 'static, G: PollGroup + 'static>(
        &self,
        reactors: &[ReactorHandle],
        publisher: &Publisher<C>,
        group: impl Fn(&Core, Inbox<M, C>, &GroupWaker) -> G + Clone + Send + 'static,
    ) -> Result<(), ShellError>
    where
        M: 'static,
    {
        check_responsive(reactors)?;
        let mut mailboxes = Vec::new();
        for (index, reactor) in reactors.iter().enumerate() {
            let (publisher, group) = (publisher.clone(), group.clone());
            let started = reactor.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let woken = sender.clone();
                // A group with a full mailbox is awake anyway: the message may be lost.
                let waker = GroupWaker(Arc::new(move || _ = woken.send(M::WAKE)));
                let wake = waker.clone();
                let subscription = publisher.subscribe(core.index(), move || wake.wake());
                let group = group(core, Inbox { index, messages, subscription }, &waker);
                core.add_poller(Box::new(GroupPoller { core: core.clone(), group }), Period::EveryTurn);
                sender
            });
            let sender = started.map_err(|_| ShellError::Stopped(reactor.index()))?;
            mailboxes.push(GroupMailbox { reactor: reactor.index(), sender });
        }
        let first = self.0.set(mailboxes.into());
        assert!(first.is_ok(), "the groups of a target are started once");
        Ok(())
    }

    /// Sends a request to a group. [`wait`](Self::wait) for the answer.
    ///
    /// # Errors
    /// The core has a thousand messages to process.
    pub fn request<T>(
        &self,
        core: usize,
        message: impl FnOnce(Responder<T>) -> M,
    ) -> Result<Request<T>, ShellError> {
        let (request, responder) = Request::new();
        self.send(core, message(responder)).map_err(|_| ShellError::Unresponsive(self.reactor(core)))?;
        Ok(request)
    }

    /// Waits up to [`CORE_TIMEOUT`] for an answer. On a reactor's thread it would block the core.
    ///
    /// # Errors
    /// There is none.
    pub fn wait<T>(&self, core: usize, request: Request<T>) -> Result<T, ShellError> {
        self.wait_for(core, request, CORE_TIMEOUT)
    }

    /// [`wait`](Self::wait), for another time.
    pub(crate) fn wait_for<T>(
        &self,
        core: usize,
        request: Request<T>,
        timeout: Duration,
    ) -> Result<T, ShellError> {
        request.wait(timeout).map_err(|error| ShellError::of(self.reactor(core), error))
    }

    /// Sends a request to a core and waits for the answer.
    ///
    /// # Errors
    /// There is none.
    pub fn ask<T>(&self, core: usize, message: impl FnOnce(Responder<T>) -> M) -> Result<T, ShellError> {
        let request = self.request(core, message)?;
        self.wait(core, request)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The mailbox is full, or there is no such core: the message.
    pub fn send(&self, core: usize, message: M) -> Result<(), M> {
        match self.0.get().and_then(|mailboxes| mailboxes.get(core)) {
            Some(mailbox) => mailbox.sender.send(message),
            None => Err(message),
        }
    }
}

impl<M> CoreMailboxes<M> {
    /// Number of cores; 0 before all groups are started.
    pub fn len(&self) -> usize {
        self.0.get().map_or(0, |mailboxes| mailboxes.len())
    }

    /// Index of the reactor of a group, for messages to people.
    pub(crate) fn reactor(&self, core: usize) -> usize {
        let mailbox = self.0.get().and_then(|mailboxes| mailboxes.get(core));
        mailbox.map_or(core, |mailbox| mailbox.reactor)
    }

    /// Indexes of the reactors that have groups, in the order of these.
    pub(crate) fn reactors(&self) -> Vec<usize> {
        self.0.get().map_or(Vec::new(), |mailboxes| mailboxes.iter().map(|one| one.reactor).collect())
    }

    /// Whether the groups are not started.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Finds a reactor that does not respond before anything is started on the others.
fn check_responsive(reactors: &[ReactorHandle]) -> Result<(), ShellError> {
    let mut requests = Vec::new();
    for reactor in reactors {
        let (request, responder) = Request::new();
        let posted = reactor.post(move |_| _ = responder.answer(()));
        posted.map_err(|_| ShellError::Stopped(reactor.index()))?;
        requests.push((reactor.index(), request));
    }
    requests.into_iter().try_for_each(|(reactor, request)| {
        request.wait(CORE_TIMEOUT).map_err(|error| ShellError::of(reactor, error))
    })
}
