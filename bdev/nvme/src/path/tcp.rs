//! The task of a path over TCP: connects, handles events and commands, and reconnects.

use std::sync::Arc;

use nvme::{AdminData, AdminError, AssociationHandle, TcpAssociation, TcpIoQueue, TcpUri};
use reactor::Core;
use sockets::CoreNetwork;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::IdentifyNamespace;
use wire_nvme::log::LogId;

use super::scan::{AdminExecutor, AnaGroups, is_unsupported};
use super::{
    ControllerPath, DisconnectedEvent, OperationError, PathCommand, PathStatus, ResultSender, send_reply,
    wait_while_disabled,
};
use crate::initiator::{ControllerGroup, PathEvent};
use crate::namespace::ScannedNamespace;
use crate::reconnect::{Reconnect, ReconnectAction};
use crate::shared_namespace::{ConnectTarget, OpeningQueue};
use crate::transport_queue::TransportQueue;

/// Asynchronous events that a path enables.
const EVENTS: AsyncEventConfiguration =
    AsyncEventConfiguration::NAMESPACE.union(AsyncEventConfiguration::ANA);
/// log2 of the page size of every controller over fabrics (CAP.MPSMIN is 0).
const PAGE_LOG2: u32 = 12;

/// Why a connection ended.
enum ConnectionEnd {
    Stopped,
    Lost(String),
    Reset(ResultSender),
    Disabled(ResultSender),
}

/// Starts the task of a path on the control core; `false` if the core has no room for it.
pub(crate) type StartTcpPath = fn(&Core, &Arc<ControllerPath>, TcpUri, &Arc<ControllerGroup>) -> bool;

/// [`StartTcpPath`] over the network `N`.
pub(crate) fn start<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    uri: TcpUri,
    group: &Arc<ControllerGroup>,
) -> bool {
    core.spawn(run::<N>(core.clone(), path.clone(), uri, group.clone()))
}

/// [`OpenTcpQueue`](crate::shared_namespace::OpenTcpQueue) over the network `N`.
fn open_queue<N: CoreNetwork>(
    core: Core,
    association: Arc<AssociationHandle>,
    nsid: u32,
    identify: Arc<IdentifyNamespace>,
) -> OpeningQueue {
    Box::pin(async move {
        let queue = TcpIoQueue::<N>::open_over(&core, &association, nsid, &identify).await?;
        Ok(Box::new(queue) as Box<dyn TransportQueue>)
    })
}

/// Attaches the controller and keeps it attached, until the path is stopped.
async fn run<N: CoreNetwork>(
    core: Core,
    path: Arc<ControllerPath>,
    uri: TcpUri,
    group: Arc<ControllerGroup>,
) {
    let mut epoch = 0;
    let mut reconnect: Option<Reconnect> = None;
    let mut requester: Option<ResultSender> = None;
    loop {
        let event = match wait_for_retry(&core, &path, reconnect.as_mut()).await {
            RetryDecision::Connect => None,
            RetryDecision::Stop => break,
            RetryDecision::Disable(reply) => Some(DisconnectedEvent::Disable(reply)),
            RetryDecision::GiveUp => {
                let why = path.failure().unwrap_or_default();
                path.set_status(PathStatus::Failed, None);
                group.send_event(PathEvent::Lost { path: path.clone(), waits_until_ns: 0, why: why.clone() });
                if let Some(reply) = requester.take() {
                    send_reply(&reply, Err(OperationError::Failed(why)));
                }
                if path.config.reconnect.loss_timeout_ns.is_some_and(|timeout| timeout > 0) {
                    group.send_event(PathEvent::ReconnectTimedOut(path.clone()));
                }
                Some(path.wait_disconnected(false).await)
            }
        };
        if let Some(event) = event {
            if let Some(reply) = requester.take() {
                send_reply(
                    &reply,
                    Err(OperationError::Failed("the controller was disabled meanwhile".into())),
                );
            }
            requester = match event {
                DisconnectedEvent::Connect(reply) => Some(reply),
                DisconnectedEvent::Disable(reply) => wait_while_disabled(&path, &group, reply).await,
                DisconnectedEvent::Stop => None,
            };
            if requester.is_none() {
                break;
            }
            reconnect = Some(Reconnect::lost(path.config.reconnect, core.now_ns()));
            continue;
        }
        epoch += 1;
        path.clear_reset_request();
        let Some(outcome) = path.unless_stopped(establish::<N>(&core, &path, &uri)).await else { break };
        let mut association = match outcome {
            Ok((association, namespaces, ana)) => {
                path.set_status(PathStatus::Enabled, None);
                publish(&group, &path, epoch, &association, namespaces, ana);
                if let Some(reply) = requester.take() {
                    send_reply(&reply, Ok(()));
                }
                association
            }
            Err(why) if reconnect.is_none() => {
                path.set_status(PathStatus::Failed, Some(why.clone()));
                group.send_event(PathEvent::AttachFailed { path: path.clone(), why });
                return;
            }
            Err(why) => {
                path.set_status(PathStatus::Reconnecting, Some(why.clone()));
                let waits_until_ns = reconnect.as_ref().map_or(0, Reconnect::waits_until_ns);
                group.send_event(PathEvent::Lost { path: path.clone(), waits_until_ns, why });
                continue;
            }
        };
        let end = serve(&core, &path, &group, &mut association, epoch).await;
        drop(association);
        let why = match end {
            ConnectionEnd::Stopped => break,
            ConnectionEnd::Lost(why) => why,
            ConnectionEnd::Reset(reply) => {
                path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                requester = Some(reply);
                "it is being reset".to_string()
            }
            ConnectionEnd::Disabled(reply) => {
                requester = wait_while_disabled(&path, &group, reply).await;
                if requester.is_none() {
                    break;
                }
                reconnect = Some(Reconnect::lost(path.config.reconnect, core.now_ns()));
                continue;
            }
        };
        path.set_status(PathStatus::Reconnecting, Some(why.clone()));
        let lost = Reconnect::lost(path.config.reconnect, core.now_ns());
        group.send_event(PathEvent::Lost { path: path.clone(), waits_until_ns: lost.waits_until_ns(), why });
        reconnect = Some(lost);
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.send_event(PathEvent::Stopped(path));
}

/// What to do after the wait for the next connection attempt.
enum RetryDecision {
    Connect,
    Stop,
    GiveUp,
    Disable(ResultSender),
}

/// Waits until the next connection attempt is due.
async fn wait_for_retry(
    core: &Core,
    path: &ControllerPath,
    reconnect: Option<&mut Reconnect>,
) -> RetryDecision {
    let Some(reconnect) = reconnect else { return RetryDecision::Connect };
    loop {
        let now_ns = core.now_ns();
        if path.is_stopping() {
            return RetryDecision::Stop;
        }
        let due_ns = match reconnect.next() {
            ReconnectAction::TryAt(due_ns) | ReconnectAction::GiveUpAt(due_ns) => due_ns,
        };
        if now_ns >= due_ns {
            return match reconnect.next() {
                ReconnectAction::TryAt(_) => {
                    reconnect.record_attempt(now_ns);
                    RetryDecision::Connect
                }
                ReconnectAction::GiveUpAt(_) => RetryDecision::GiveUp,
            };
        }
        if let Some(reply) = path.reject_commands() {
            return RetryDecision::Disable(reply);
        }
        path.wait_for_command_or(core.sleep_ns(due_ns - now_ns)).await;
    }
}

async fn establish<N: CoreNetwork>(
    core: &Core,
    path: &ControllerPath,
    uri: &TcpUri,
) -> Result<(TcpAssociation<N>, Vec<ScannedNamespace>, AnaGroups), String> {
    let config = &path.config;
    let mut association = TcpAssociation::<N>::open_over(core, uri, &config.options, config.num_io_queues)
        .await
        .map_err(|error| error.to_string())?;
    let identity = association.identity().clone();
    path.set_identity(&identity, association.handle().cntlid());
    match association.enable_events(EVENTS).await {
        // A controller may support no asynchronous events.
        Ok(()) => {}
        Err(AdminError::Status(status)) if is_unsupported(status) => {}
        Err(error) => return Err(format!("listening for events: {error}")),
    }
    let mut admin = AdminExecutor::tcp(core, path, &mut association);
    let ana = admin.ana(&identity).await.map_err(|error| format!("the ANA log page: {error}"))?;
    let namespaces = admin.namespaces(&identity, PAGE_LOG2).await;
    let namespaces = namespaces.map_err(|error| format!("identifying namespaces: {error}"))?;
    Ok((association, namespaces, ana))
}

fn publish<N: CoreNetwork>(
    group: &Arc<ControllerGroup>,
    path: &Arc<ControllerPath>,
    epoch: u64,
    association: &TcpAssociation<N>,
    namespaces: Vec<ScannedNamespace>,
    ana: AnaGroups,
) {
    let membership = Arc::new(association.handle().clone());
    let with_target = |scanned: ScannedNamespace| {
        let join = ConnectTarget::Tcp(membership.clone(), scanned.identify.clone(), open_queue::<N>);
        (scanned, join)
    };
    let namespaces = namespaces.into_iter().map(with_target).collect();
    group.send_event(PathEvent::NamespacesScanned { path: path.clone(), epoch, namespaces, groups: ana });
}

/// Handles events and commands until the connection ends.
async fn serve<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    association: &mut TcpAssociation<N>,
    epoch: u64,
) -> ConnectionEnd {
    loop {
        if path.is_stopping() {
            return ConnectionEnd::Stopped;
        }
        if let Some(failure) = association.failure() {
            return ConnectionEnd::Lost(failure.to_string());
        }
        if path.is_reset_requested(epoch) {
            return ConnectionEnd::Lost("I/O queues cannot be opened".into());
        }
        path.clear_reset_request();
        let outcome = match (association.next_event(), path.take_command()) {
            (None, None) => {
                path.wait_for_command_or(association.wait_event()).await;
                continue;
            }
            (event, command) => {
                let mut outcome = Ok(());
                if let Some(event) = event {
                    outcome = handle_event(core, path, group, association, epoch, event).await;
                }
                match command {
                    Some(PathCommand::Reset(reply)) => return ConnectionEnd::Reset(reply),
                    Some(PathCommand::Disable(reply)) => return ConnectionEnd::Disabled(reply),
                    Some(PathCommand::Enable(reply)) => send_reply(&reply, Err(OperationError::Already)),
                    Some(PathCommand::Admin { sqe, data, reply }) => {
                        send_reply(
                            &reply,
                            AdminExecutor::tcp(core, path, association).execute(sqe, data).await,
                        );
                    }
                    Some(command @ PathCommand::Io { .. }) => {
                        pass_through::<N>(core, association.handle().clone(), command);
                    }
                    Some(PathCommand::RefreshAna) if outcome.is_ok() => {
                        outcome = refresh_ana(core, path, group, association).await;
                    }
                    Some(PathCommand::RefreshAna) | None => {}
                }
                outcome
            }
        };
        match outcome {
            // A lost connection is detected at the start of the loop.
            Ok(()) | Err(AdminError::Failure(_)) => {}
            Err(error) => return ConnectionEnd::Lost(format!("an event could not be handled: {error}")),
        }
    }
}

/// Executes an I/O command in a task of its own. If the core rejects the task, the reply channel closes.
fn pass_through<N: CoreNetwork>(core: &Core, membership: AssociationHandle, command: PathCommand) {
    let PathCommand::Io { sqe, data, metadata, timeout_ns, reply } = command else { return };
    if metadata != AdminData::None {
        send_reply(&reply, Err("metadata is not supported over TCP".into()));
        return;
    }
    let own = core.clone();
    core.spawn(async move {
        let answer = membership.execute_io::<N>(&own, sqe, &data, timeout_ns).await;
        send_reply(&reply, answer.map_err(|error| error.to_string()));
    });
}

async fn handle_event<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    association: &mut TcpAssociation<N>,
    epoch: u64,
    event: AsyncEvent,
) -> Result<(), AdminError> {
    if event == AsyncEvent::ANA_CHANGED {
        return refresh_ana(core, path, group, association).await;
    }
    let identity = association.identity().clone();
    let mut admin = AdminExecutor::tcp(core, path, association);
    if event == AsyncEvent::NAMESPACE_CHANGED {
        admin.acknowledge(LogId::ChangedNamespaces.to_wire(), 4096).await?;
        let ana = admin.ana(&identity).await?;
        let namespaces = admin.namespaces(&identity, PAGE_LOG2).await?;
        publish(group, path, epoch, association, namespaces, ana);
        return Ok(());
    }
    admin.acknowledge(event.log_page, 512).await
}

async fn refresh_ana<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
    association: &mut TcpAssociation<N>,
) -> Result<(), AdminError> {
    let identity = association.identity().clone();
    let groups = AdminExecutor::tcp(core, path, association).ana(&identity).await?;
    group.send_event(PathEvent::AnaChanged { path: path.clone(), groups });
    Ok(())
}
