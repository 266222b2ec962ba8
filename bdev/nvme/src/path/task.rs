//! The task of a path: performs what its state machine decides.

use std::sync::Arc;

use reactor::Core;

use super::machine::{OnLossTimeout, PathAction, PathInput, PathMachine, PathNotice, PathState};
use super::{ControllerPath, ResultSender, send_reply};

/// What a path connects to, and what it does while it is connected.
pub(crate) trait PathSession {
    /// Dropping it disconnects.
    type Connection;

    /// Makes one attempt to connect.
    async fn connect(&mut self, epoch: u64) -> Result<Self::Connection, String>;

    /// Serves the connection until it is lost, or an operation or a stop ends it.
    async fn serve(&mut self, connection: &mut Self::Connection, epoch: u64) -> PathInput<ResultSender>;

    fn notify(&mut self, notice: PathNotice);
}

/// Connects a path and keeps it connected, until it is stopped or its first attempt fails. Each connection has an epoch
/// of its own, from 1.
pub(crate) async fn run(
    core: Core,
    path: Arc<ControllerPath>,
    mut session: impl PathSession,
    on_loss_timeout: OnLossTimeout,
) {
    let mut machine = PathMachine::new(path.config.reconnect, on_loss_timeout);
    let mut epoch = 0;
    while machine.state() != PathState::Ended {
        let input = if machine.state() == PathState::Connecting {
            epoch += 1;
            path.clear_reset_request();
            match path.unless_stopped(session.connect(epoch)).await {
                None => PathInput::Stop,
                Some(Err(why)) => PathInput::ConnectFailed(why),
                Some(Ok(mut connection)) => {
                    step(&mut machine, &core, &path, &mut session, PathInput::Connected);
                    session.serve(&mut connection, epoch).await
                }
            }
        } else {
            path.wait_disconnected(&core, machine.deadline_ns()).await
        };
        step(&mut machine, &core, &path, &mut session, input);
    }
}

fn step(
    machine: &mut PathMachine<ResultSender>,
    core: &Core,
    path: &ControllerPath,
    session: &mut impl PathSession,
    input: PathInput<ResultSender>,
) {
    let mut actions = Vec::new();
    machine.handle(input, core.now_ns(), &mut actions);
    for action in actions {
        match action {
            PathAction::SetStatus(status, why) => path.set_status(status, why),
            PathAction::Reply(requester, outcome) => send_reply(&requester, outcome),
            PathAction::Notify(notice) => {
                if notice == PathNotice::Stopped {
                    path.drop_commands();
                }
                session.notify(notice);
            }
        }
    }
}
