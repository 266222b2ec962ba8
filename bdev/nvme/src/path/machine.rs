//! The state machine of a path: when to connect, to wait, to give up, and what to report.
//!
//! Sans-IO: an input and the time go in, actions and a deadline come out. Every transport uses it, and so do discovery
//! services.

use crate::multipath::IoWait;
use crate::path::{OperationError, PathStatus};
use crate::reconnect::{Reconnect, ReconnectAction, ReconnectPolicy};

/// An operation on a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerOperation {
    /// Reset it: over TCP, reconnect.
    Reset,
    /// Disconnect it, and keep it configured.
    Disable,
    /// Connect it after a disable.
    Enable,
}

/// Delay before attempts start again after a loss timeout, for [`OnLossTimeout::Restart`].
const RESTART_NS: u64 = 1_000_000_000;

/// What happens to a path when its loss timeout expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnLossTimeout {
    /// It fails and is removed.
    Remove,
    /// It fails and stays, until it is reset or disabled.
    Keep,
    /// Attempts start again, and no attempt is the last, not even the first of all. The first attempt after a loss is
    /// delayed, as all hosts lose a discovery controller at the same time.
    Restart,
}

/// The state of a path's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathState {
    /// An attempt to connect is in progress.
    Connecting,
    Connected,
    /// It waits for the time of the next attempt or of the loss timeout.
    Waiting,
    Disabled,
    /// The loss timeout has expired.
    Failed,
    Ended,
}

/// An input of the machine. `R` is the requester of an operation, who gets one reply.
pub(crate) enum PathInput<R> {
    Connected,
    ConnectFailed(String),
    /// The connection is lost, for this reason.
    Lost(String),
    Operate(ControllerOperation, R),
    /// The [deadline](PathMachine::deadline_ns) has passed.
    Timeout,
    Stop,
}

/// An output of the machine, to be performed in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PathAction<R> {
    /// Publish the status, and why the path is not connected.
    SetStatus(PathStatus, Option<String>),
    Notify(PathNotice),
    Reply(R, Result<(), OperationError>),
}

/// What the owner of a path is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PathNotice {
    /// The path is not connected; I/O may wait for it.
    Lost { wait: IoWait, why: String },
    /// The first attempt failed; the task ends.
    AttachFailed(String),
    /// The loss timeout has expired, and the path is to be removed.
    LossTimeout,
    /// The task ends.
    Stopped,
}

/// The state machine of one path.
///
/// It starts in [`PathState::Connecting`]. Its user makes the attempt and reports the outcome, reports the end of the
/// connection, passes on operations, and calls [`handle`](Self::handle) with [`PathInput::Timeout`] at the deadline.
pub(crate) struct PathMachine<R> {
    policy: ReconnectPolicy,
    on_loss_timeout: OnLossTimeout,
    state: PathState,
    /// Attempts since the last loss; `None` until the first connection has ended.
    reconnect: Option<Reconnect>,
    /// The requester of the operation that ends with the next connection.
    requester: Option<R>,
    /// Why the path is not connected.
    why: String,
}

impl<R> PathMachine<R> {
    pub(crate) fn new(policy: ReconnectPolicy, on_loss_timeout: OnLossTimeout) -> PathMachine<R> {
        PathMachine {
            policy,
            on_loss_timeout,
            state: PathState::Connecting,
            reconnect: None,
            requester: None,
            why: String::new(),
        }
    }

    pub(crate) fn state(&self) -> PathState {
        self.state
    }

    /// When to pass [`PathInput::Timeout`], in nanoseconds; possibly past.
    pub(crate) fn deadline_ns(&self) -> Option<u64> {
        let reconnect = self.reconnect.as_ref().filter(|_| self.state == PathState::Waiting)?;
        match reconnect.next() {
            ReconnectAction::TryAt(due_ns) | ReconnectAction::GiveUpAt(due_ns) => Some(due_ns),
        }
    }

    /// # Panics
    /// If the input is impossible in the present state.
    pub(crate) fn handle(&mut self, input: PathInput<R>, now_ns: u64, actions: &mut Vec<PathAction<R>>) {
        use ControllerOperation::{Disable, Enable, Reset};
        use PathState::{Connected, Connecting, Disabled, Ended, Failed, Waiting};
        match (self.state, input) {
            (Connecting, PathInput::Connected) => {
                self.state = Connected;
                actions.extend(self.requester.take().map(|requester| PathAction::Reply(requester, Ok(()))));
            }
            (Connecting, PathInput::ConnectFailed(why)) => match self.reconnect {
                None if self.on_loss_timeout != OnLossTimeout::Restart => {
                    self.state = Ended;
                    actions.push(PathAction::SetStatus(PathStatus::Failed, Some(why.clone())));
                    actions.push(PathAction::Notify(PathNotice::AttachFailed(why)));
                }
                None => self.lose(why, now_ns, actions),
                Some(reconnect) => self.wait(reconnect, why, actions),
            },
            (Connected, PathInput::Lost(why)) => self.lose(why, now_ns, actions),
            (Connected, PathInput::Operate(Reset, requester)) => {
                self.requester = Some(requester);
                self.lose("it is being reset".into(), now_ns, actions);
            }
            (Connected | Waiting | Failed, PathInput::Operate(Disable, requester)) => {
                self.disable(requester, actions);
            }
            (Disabled, PathInput::Operate(Enable, requester)) => {
                let why = Some("it is being enabled".to_string());
                actions.push(PathAction::SetStatus(PathStatus::Reconnecting, why));
                self.connect_for(requester, now_ns, actions);
            }
            (Failed, PathInput::Operate(Reset, requester)) => self.connect_for(requester, now_ns, actions),
            (Connecting | Waiting, PathInput::Operate(_, requester)) => {
                actions.push(PathAction::Reply(requester, Err(OperationError::Busy)));
            }
            (Connected | Disabled | Failed, PathInput::Operate(_, requester)) => {
                actions.push(PathAction::Reply(requester, Err(OperationError::Already)));
            }
            (Waiting, PathInput::Timeout) => self.advance(now_ns, actions),
            (_, PathInput::Stop) => {
                self.state = Ended;
                actions.push(PathAction::SetStatus(PathStatus::Deleting, None));
                actions.push(PathAction::Notify(PathNotice::Stopped));
            }
            (state, _) => panic!("impossible input to a path that is {state:?}"),
        }
    }

    /// Starts to count attempts from now, and waits for the first.
    fn lose(&mut self, why: String, now_ns: u64, actions: &mut Vec<PathAction<R>>) {
        let mut reconnect = Reconnect::lost(self.policy, now_ns);
        if self.on_loss_timeout == OnLossTimeout::Restart {
            reconnect.record_attempt(now_ns);
        }
        self.wait(reconnect, why, actions);
    }

    fn wait(&mut self, reconnect: Reconnect, why: String, actions: &mut Vec<PathAction<R>>) {
        (self.state, self.reconnect, self.why) = (PathState::Waiting, Some(reconnect), why.clone());
        actions.push(PathAction::SetStatus(PathStatus::Reconnecting, Some(why.clone())));
        actions.push(PathAction::Notify(PathNotice::Lost { wait: reconnect.io_wait(), why }));
    }

    fn connect_for(&mut self, requester: R, now_ns: u64, actions: &mut Vec<PathAction<R>>) {
        (self.state, self.requester) = (PathState::Waiting, Some(requester));
        self.reconnect = Some(Reconnect::lost(self.policy, now_ns));
        self.advance(now_ns, actions);
    }

    /// Starts the next attempt, or gives up, if that is due.
    fn advance(&mut self, now_ns: u64, actions: &mut Vec<PathAction<R>>) {
        let Some(reconnect) = &mut self.reconnect else { return };
        match reconnect.next() {
            ReconnectAction::TryAt(due_ns) if due_ns <= now_ns => {
                reconnect.record_attempt(now_ns);
                self.state = PathState::Connecting;
            }
            ReconnectAction::GiveUpAt(due_ns) if due_ns <= now_ns => self.give_up(now_ns, actions),
            ReconnectAction::TryAt(_) | ReconnectAction::GiveUpAt(_) => {}
        }
    }

    fn give_up(&mut self, now_ns: u64, actions: &mut Vec<PathAction<R>>) {
        if self.on_loss_timeout == OnLossTimeout::Restart {
            self.reconnect = Some(Reconnect::lost(self.policy, now_ns.saturating_add(RESTART_NS)));
            return;
        }
        self.state = PathState::Failed;
        actions.push(PathAction::SetStatus(PathStatus::Failed, None));
        actions.push(PathAction::Notify(PathNotice::Lost { wait: IoWait::No, why: self.why.clone() }));
        if let Some(requester) = self.requester.take() {
            let failed = Err(OperationError::Failed(self.why.clone()));
            actions.push(PathAction::Reply(requester, failed));
        }
        if self.on_loss_timeout == OnLossTimeout::Remove {
            actions.push(PathAction::Notify(PathNotice::LossTimeout));
        }
    }

    fn disable(&mut self, requester: R, actions: &mut Vec<PathAction<R>>) {
        if let Some(pending) = self.requester.take() {
            let why = "the controller was disabled meanwhile".to_string();
            actions.push(PathAction::Reply(pending, Err(OperationError::Failed(why))));
        }
        self.state = PathState::Disabled;
        actions.push(PathAction::SetStatus(PathStatus::Disabled, None));
        let why = "it is disabled".to_string();
        actions.push(PathAction::Notify(PathNotice::Lost { wait: IoWait::No, why }));
        actions.push(PathAction::Reply(requester, Ok(())));
    }
}

#[cfg(test)]
mod tests;
