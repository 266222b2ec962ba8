use PathInput::{ConnectFailed, Connected, Lost, Operate, Stop, Timeout};

use super::*;
use crate::path::ControllerOperation::{Disable, Enable, Reset};

const SECOND: u64 = 1_000_000_000;

/// A loss timeout of 10 s, attempts after 2 s.
const POLICY: ReconnectPolicy =
    ReconnectPolicy { loss_timeout_ns: Some(10 * SECOND), delay_ns: 2 * SECOND, fast_fail_ns: None };
/// One attempt.
const ONE_ATTEMPT: ReconnectPolicy =
    ReconnectPolicy { loss_timeout_ns: Some(0), delay_ns: 0, fast_fail_ns: None };

struct Path {
    machine: PathMachine<u32>,
    now_ns: u64,
    /// Replies, in order.
    replies: Vec<(u32, Result<(), OperationError>)>,
    notices: Vec<PathNotice>,
    status: PathStatus,
}

impl Path {
    fn new(policy: ReconnectPolicy, on_loss_timeout: OnLossTimeout) -> Path {
        Path {
            machine: PathMachine::new(policy, on_loss_timeout),
            now_ns: 0,
            replies: Vec::new(),
            notices: Vec::new(),
            status: PathStatus::Attaching,
        }
    }

    fn connected(policy: ReconnectPolicy, on_loss_timeout: OnLossTimeout) -> Path {
        let mut path = Path::new(policy, on_loss_timeout);
        path.handle(Connected);
        path.status = PathStatus::Enabled;
        path
    }

    fn handle(&mut self, input: PathInput<u32>) -> PathState {
        let mut actions = Vec::new();
        self.machine.handle(input, self.now_ns, &mut actions);
        for action in actions {
            match action {
                PathAction::SetStatus(status, _) => self.status = status,
                PathAction::Notify(notice) => self.notices.push(notice),
                PathAction::Reply(requester, outcome) => self.replies.push((requester, outcome)),
            }
        }
        self.machine.state()
    }

    /// Passes the time until the deadline.
    fn timeout(&mut self) -> PathState {
        self.now_ns = self.machine.deadline_ns().expect("nothing is due").max(self.now_ns);
        self.handle(Timeout)
    }

    /// Fails every attempt; returns the seconds at which they were made, at most eight.
    fn fail_attempts(&mut self) -> Vec<u64> {
        let mut attempts = Vec::new();
        while attempts.len() < 8 && self.machine.deadline_ns().is_some() {
            if self.timeout() == PathState::Connecting {
                attempts.push(self.now_ns / SECOND);
                self.handle(ConnectFailed("refused".into()));
            }
        }
        attempts
    }
}

fn lost(wait: IoWait, why: &str) -> PathNotice {
    PathNotice::Lost { wait, why: why.into() }
}

#[test]
fn a_path_whose_first_attempt_fails_ends() {
    let mut path = Path::new(POLICY, OnLossTimeout::Remove);
    assert_eq!(path.handle(ConnectFailed("refused".into())), PathState::Ended);
    assert_eq!(path.notices, [PathNotice::AttachFailed("refused".into())]);
    assert_eq!((path.status, path.machine.deadline_ns()), (PathStatus::Failed, None));
}

#[test]
fn a_lost_path_reconnects_until_the_loss_timeout() {
    let mut path = Path::connected(POLICY, OnLossTimeout::Remove);
    path.handle(Lost("closed".into()));
    assert_eq!(path.status, PathStatus::Reconnecting);
    assert_eq!(path.fail_attempts(), [0, 2, 6]);
    assert_eq!(
        (path.machine.state(), path.status, path.now_ns),
        (PathState::Failed, PathStatus::Failed, 10 * SECOND)
    );
    let refused = lost(IoWait::Until(10 * SECOND), "refused");
    let expected = [
        lost(IoWait::Until(10 * SECOND), "closed"),
        refused.clone(),
        refused.clone(),
        refused,
        lost(IoWait::No, "refused"),
        PathNotice::LossTimeout,
    ];
    assert_eq!(path.notices, expected);
}

#[test]
fn each_loss_starts_to_count_again() {
    let mut path = Path::connected(POLICY, OnLossTimeout::Remove);
    for _ in 0..3 {
        path.handle(Lost("closed".into()));
        assert_eq!(path.timeout(), PathState::Connecting);
        path.handle(ConnectFailed("refused".into()));
        assert_eq!(path.timeout(), PathState::Connecting);
        assert_eq!(path.handle(Connected), PathState::Connected);
        path.now_ns += 9 * SECOND;
    }
    assert!(!path.notices.contains(&PathNotice::LossTimeout));
}

#[test]
fn a_failed_path_that_stays_is_reset_or_disabled() {
    let mut path = Path::connected(ONE_ATTEMPT, OnLossTimeout::Keep);
    path.handle(Lost("closed".into()));
    assert_eq!(path.fail_attempts(), [0]);
    assert_eq!(path.machine.state(), PathState::Failed);
    assert!(!path.notices.contains(&PathNotice::LossTimeout));
    assert_eq!(path.handle(Operate(Enable, 1)), PathState::Failed);
    assert_eq!(path.handle(Operate(Reset, 2)), PathState::Connecting);
    path.handle(ConnectFailed("refused".into()));
    assert_eq!(path.timeout(), PathState::Failed);
    assert_eq!(path.handle(Operate(Disable, 3)), PathState::Disabled);
    let refused = Err(OperationError::Failed("refused".into()));
    assert_eq!(path.replies, [(1, Err(OperationError::Already)), (2, refused), (3, Ok(()))]);
}

/// Every operation in every state: its reply, if it gets one at once, and the next state.
#[test]
fn operations_are_accepted_or_rejected_by_state() {
    use PathState as S;
    let (busy, already) = (Some(Err(OperationError::Busy)), Some(Err(OperationError::Already)));
    let table = [
        (S::Connecting, Reset, busy.clone(), S::Connecting),
        (S::Connecting, Disable, busy.clone(), S::Connecting),
        (S::Connecting, Enable, busy.clone(), S::Connecting),
        (S::Connected, Reset, None, S::Waiting),
        (S::Connected, Disable, Some(Ok(())), S::Disabled),
        (S::Connected, Enable, already.clone(), S::Connected),
        (S::Waiting, Reset, busy.clone(), S::Waiting),
        (S::Waiting, Disable, Some(Ok(())), S::Disabled),
        (S::Waiting, Enable, busy, S::Waiting),
        (S::Disabled, Reset, already.clone(), S::Disabled),
        (S::Disabled, Disable, already.clone(), S::Disabled),
        (S::Disabled, Enable, None, S::Connecting),
        (S::Failed, Reset, None, S::Connecting),
        (S::Failed, Disable, Some(Ok(())), S::Disabled),
        (S::Failed, Enable, already, S::Failed),
    ];
    for (state, operation, reply, next) in table {
        let mut path = match state {
            S::Connecting => Path::new(POLICY, OnLossTimeout::Keep),
            _ => Path::connected(POLICY, OnLossTimeout::Keep),
        };
        match state {
            S::Waiting => drop(path.handle(Lost("closed".into()))),
            S::Disabled => drop(path.handle(Operate(Disable, 0))),
            S::Failed => {
                path.handle(Lost("closed".into()));
                path.fail_attempts();
            }
            S::Connecting | S::Connected | S::Ended => {}
        }
        assert_eq!(path.machine.state(), state);
        path.replies.clear();
        assert_eq!(path.handle(Operate(operation, 7)), next, "{operation:?} while {state:?}");
        let expected: Vec<_> = reply.into_iter().map(|reply| (7, reply)).collect();
        assert_eq!(path.replies, expected, "{operation:?} while {state:?}");
        // A stop ends it in every state.
        assert_eq!(path.handle(Stop), S::Ended);
        assert_eq!((path.status, path.notices.last()), (PathStatus::Deleting, Some(&PathNotice::Stopped)));
    }
}

#[test]
fn a_reset_is_answered_by_the_next_connection_or_by_a_disable() {
    let mut path = Path::connected(POLICY, OnLossTimeout::Remove);
    path.handle(Operate(Reset, 1));
    assert_eq!(path.notices, [lost(IoWait::Until(10 * SECOND), "it is being reset")]);
    assert_eq!(path.timeout(), PathState::Connecting);
    path.handle(ConnectFailed("refused".into()));
    assert!(path.replies.is_empty(), "attempts go on");
    path.timeout();
    path.handle(Connected);
    assert_eq!(path.replies, [(1, Ok(()))]);
    path.handle(Operate(Reset, 2));
    path.handle(Operate(Disable, 3));
    let disabled = Err(OperationError::Failed("the controller was disabled meanwhile".into()));
    assert_eq!(path.replies[1..], [(2, disabled), (3, Ok(()))]);
}

#[test]
fn a_discovery_service_never_gives_up() {
    let mut path = Path::new(ONE_ATTEMPT, OnLossTimeout::Restart);
    assert_eq!(path.handle(ConnectFailed("refused".into())), PathState::Waiting);
    assert_eq!(path.fail_attempts(), [1, 2, 3, 4, 5, 6, 7, 8]);
    while path.timeout() != PathState::Connecting {}
    path.handle(Connected);
    let since = path.now_ns;
    path.handle(Lost("closed".into()));
    while path.timeout() != PathState::Connecting {}
    assert_eq!(path.now_ns - since, SECOND, "the first attempt is delayed");
}
