//! The task of a path over a memory-based transport (PCI Express, vfio-user). The driver resets the controller by
//! itself; the task handles events and commands, and detects when the controller has failed.

use std::sync::Arc;

use nvme::{AdminError, Controller};
use reactor::Core;
use wire_nvme::aer::AsyncEvent;

use super::scan::AdminExecutor;
use super::{
    ControllerPath, OperationError, PathCommand, PathStatus, ResultSender, send_reply, wait_while_disabled,
};
use crate::initiator::{ControllerGroup, PathEvent};
use crate::reconnect::{Reconnect, ReconnectAction};
use crate::shared_namespace::ConnectTarget;

/// Interval at which the driver is polled for asynchronous events.
const EVENT_POLL_NS: u64 = 50_000_000;

/// Why the task stopped serving the controller.
enum AttachmentEnd {
    Stopped,
    Lost(String),
    Disabled(ResultSender),
}

/// Attaches the controller and keeps it attached, until the path is stopped or reconnection times out.
pub(crate) async fn run(core: Core, path: Arc<ControllerPath>, group: Arc<ControllerGroup>) {
    let mut epoch = 0;
    let mut attached_before = false;
    // The reconnection attempts since the last loss.
    let mut reconnect: Option<Reconnect> = None;
    let mut requester: Option<ResultSender> = None;
    while !path.is_stopping() {
        if let Some(state) = &mut reconnect {
            match state.next() {
                ReconnectAction::TryAt(due_ns) if core.now_ns() >= due_ns => {
                    state.record_attempt(core.now_ns())
                }
                ReconnectAction::GiveUpAt(due_ns) if core.now_ns() >= due_ns => {
                    let why = path.failure().unwrap_or_default();
                    path.set_status(PathStatus::Failed, None);
                    group.send_event(PathEvent::Lost {
                        path: path.clone(),
                        waits_until_ns: 0,
                        why: why.clone(),
                    });
                    if let Some(reply) = requester.take() {
                        send_reply(&reply, Err(OperationError::Failed(why)));
                    }
                    group.send_event(PathEvent::ReconnectTimedOut(path.clone()));
                    // A replacement would be another device, attached by hot plug.
                    while !path.is_stopping() {
                        path.wait_for_command_or(std::future::pending()).await;
                        if let Some(reply) = path.reject_commands() {
                            send_reply(&reply, Err(OperationError::Busy));
                        }
                    }
                    break;
                }
                ReconnectAction::TryAt(due_ns) | ReconnectAction::GiveUpAt(due_ns) => {
                    if let Some(reply) = path.reject_commands() {
                        if let Some(reply) = requester.take() {
                            send_reply(
                                &reply,
                                Err(OperationError::Failed("the controller was disabled meanwhile".into())),
                            );
                        }
                        requester = wait_while_disabled(&path, &group, reply).await;
                        reconnect = Some(Reconnect::lost(path.config.reconnect, core.now_ns()));
                        continue;
                    }
                    path.wait_for_command_or(core.sleep_ns(due_ns.saturating_sub(core.now_ns()))).await;
                    continue;
                }
            }
        }
        epoch += 1;
        path.clear_reset_request();
        let Some(outcome) = path.unless_stopped(establish(&core, &path, &group, epoch)).await else { break };
        let end = match outcome {
            Ok(controller) => {
                (attached_before, reconnect) = (true, None);
                if let Some(reply) = requester.take() {
                    send_reply(&reply, Ok(()));
                }
                serve(&core, &path, &group, &controller, epoch).await
            }
            Err(why) if !attached_before => {
                path.set_status(PathStatus::Failed, Some(why.clone()));
                group.send_event(PathEvent::AttachFailed { path: path.clone(), why });
                return;
            }
            Err(why) => AttachmentEnd::Lost(why),
        };
        match end {
            AttachmentEnd::Stopped => break,
            AttachmentEnd::Lost(why) => {
                path.set_status(PathStatus::Reconnecting, Some(why.clone()));
                let state =
                    reconnect.get_or_insert_with(|| Reconnect::lost(path.config.reconnect, core.now_ns()));
                group.send_event(PathEvent::Lost {
                    path: path.clone(),
                    waits_until_ns: state.waits_until_ns(),
                    why,
                });
            }
            AttachmentEnd::Disabled(reply) => {
                requester = wait_while_disabled(&path, &group, reply).await;
                reconnect = Some(Reconnect::lost(path.config.reconnect, core.now_ns()));
            }
        }
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.send_event(PathEvent::Stopped(path));
}

async fn establish(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    epoch: u64,
) -> Result<Controller, String> {
    let controller = Controller::attach(core, &path.id().0, path.driver_options())
        .await
        .map_err(|error| error.to_string())?;
    scan(core, path, group, &controller, epoch).await.map_err(|error| error.to_string())?;
    Ok(controller)
}

async fn scan(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    controller: &Controller,
    epoch: u64,
) -> Result<(), AdminError> {
    let identity = controller.identity().clone();
    path.set_identity(&identity, identity.cntlid);
    let mut admin = AdminExecutor::memory_based(core, path, controller);
    let ana = admin.ana(&identity).await?;
    // CAP.MPSMIN is 0 for every controller that supports 4 KiB pages; for larger pages the limit is only smaller than
    // necessary.
    let namespaces = admin.namespaces(&identity, 12).await?;
    let mut usable = Vec::new();
    for scanned in namespaces {
        // The driver rejects formats that it does not support, such as some with metadata.
        if controller.namespace(scanned.nsid).await.is_ok() {
            usable.push((scanned, ConnectTarget::Memory(controller.clone())));
        }
    }
    path.set_status(PathStatus::Enabled, None);
    group.send_event(PathEvent::NamespacesScanned {
        path: path.clone(),
        epoch,
        namespaces: usable,
        groups: ana,
    });
    Ok(())
}

/// Handles events and commands until the controller is lost, disabled or detached.
async fn serve(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    controller: &Controller,
    epoch: u64,
) -> AttachmentEnd {
    loop {
        if path.is_stopping() {
            return AttachmentEnd::Stopped;
        }
        if let Some(failure) = controller.failure() {
            return AttachmentEnd::Lost(failure.to_string());
        }
        if path.is_reset_requested(epoch) {
            path.clear_reset_request();
            // I/O queues cannot be opened although the admin queue works: only a reset may help.
            let _ = controller.reset().await;
        }
        while let Some(event) = controller.next_event() {
            if event.0 == AsyncEvent::ANA_CHANGED {
                refresh_ana(core, path, group, controller).await;
            } else if event.0 == AsyncEvent::NAMESPACE_CHANGED {
                // Channels keep their queues: the epoch is unchanged.
                let _ = scan(core, path, group, controller, epoch).await;
            }
        }
        while let Some(command) = path.take_command() {
            match command {
                PathCommand::Admin { sqe, data, reply } => {
                    send_reply(
                        &reply,
                        AdminExecutor::memory_based(core, path, controller).execute(sqe, data).await,
                    );
                }
                PathCommand::Io { .. } => pass_through(core, controller.clone(), command),
                PathCommand::Reset(reply) => {
                    path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let outcome = controller.reset().await;
                    send_reply(
                        &reply,
                        outcome.map_err(|failure| OperationError::Failed(failure.to_string())),
                    );
                }
                PathCommand::Disable(reply) => return AttachmentEnd::Disabled(reply),
                PathCommand::Enable(reply) => send_reply(&reply, Err(OperationError::Already)),
                PathCommand::RefreshAna => refresh_ana(core, path, group, controller).await,
            }
        }
        path.wait_for_command_or(core.sleep_ns(EVENT_POLL_NS)).await;
    }
}

/// Executes an I/O command in a task of its own. If the core rejects the task, the reply channel closes.
fn pass_through(core: &Core, controller: Controller, command: PathCommand) {
    let PathCommand::Io { sqe, data, metadata, timeout_ns, reply } = command else { return };
    let own = core.clone();
    core.spawn(async move {
        let answer = controller.execute_io(&own, sqe, &data, &metadata, timeout_ns).await;
        send_reply(&reply, answer.map_err(|error| error.to_string()));
    });
}

async fn refresh_ana(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    controller: &Controller,
) {
    let identity = controller.identity().clone();
    if let Ok(groups) = AdminExecutor::memory_based(core, path, controller).ana(&identity).await {
        group.send_event(PathEvent::AnaChanged { path: path.clone(), groups });
    }
}
