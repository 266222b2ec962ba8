//! What a path does with its controller, over any transport: scans it, handles its events, and executes commands.

use std::marker::PhantomData;
use std::sync::Arc;

use nvme::{AdminError, AnyController, IoQueues, Uri};
use reactor::Core;
use sockets::CoreNetwork;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;

use super::machine::{OnLossTimeout, PathInput, PathNotice};
use super::scan::{AdminExecutor, is_unsupported};
use super::task::{PathSession, run};
use super::{ControllerPath, OperationError, PathCommand, PathStatus, ResultSender, send_reply};
use crate::initiator::{ControllerGroup, ControllerOperation, PathEvent};

/// Asynchronous events that a path enables.
const EVENTS: AsyncEventConfiguration =
    AsyncEventConfiguration::NAMESPACE.union(AsyncEventConfiguration::ANA);
/// Bytes read of an event's log page: of the Changed Namespace List all, of others enough to unmask the event.
const CHANGED_NAMESPACES_BYTES: u64 = 4096;
const LOG_BYTES: u64 = 512;

/// Starts the task of a path on the control core; `false` if the core has no room for it.
pub(crate) type StartPath = fn(&Core, &Arc<ControllerPath>, &Arc<ControllerGroup>) -> bool;

/// [`StartPath`] over the network `N`.
pub(crate) fn start<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
) -> bool {
    let is_tcp = matches!(path.id().0, Uri::Tcp(_));
    let on_loss_timeout = match path.config.reconnect.loss_timeout_ns {
        Some(0) if is_tcp => OnLossTimeout::Keep,
        // A device that replaces a local one is another device, attached by hot plug.
        _ => OnLossTimeout::Remove,
    };
    let session = ControllerSession::<N> {
        core: core.clone(),
        path: path.clone(),
        group: group.clone(),
        network: PhantomData,
    };
    core.spawn(run(core.clone(), path.clone(), session, on_loss_timeout))
}

/// What a path to a controller with namespaces does.
struct ControllerSession<N> {
    core: Core,
    path: Arc<ControllerPath>,
    group: Arc<ControllerGroup>,
    network: PhantomData<fn() -> N>,
}

impl<N: CoreNetwork> PathSession for ControllerSession<N> {
    type Connection = AnyController<N>;

    async fn connect(&mut self, epoch: u64) -> Result<AnyController<N>, String> {
        let config = &self.path.config;
        let attached =
            AnyController::attach(&self.core, &config.id.0, &config.options, config.num_io_queues).await;
        let mut controller = attached.map_err(|error| error.to_string())?;
        self.path.set_identity(controller.identity(), controller.cntlid());
        match controller.enable_events(EVENTS).await {
            // A controller may support no asynchronous events.
            Ok(()) => {}
            Err(AdminError::Status(status)) if is_unsupported(status) => {}
            Err(error) => return Err(format!("listening for events: {error}")),
        }
        self.scan(&mut controller, epoch).await.map_err(|(what, error)| format!("{what}: {error}"))?;
        Ok(controller)
    }

    async fn serve(&mut self, controller: &mut AnyController<N>, epoch: u64) -> PathInput<ResultSender> {
        let (path, is_fabrics) = (self.path.clone(), controller.is_fabrics());
        loop {
            if path.is_stopping() {
                return PathInput::Stop;
            }
            if let Some(failure) = controller.failure() {
                return PathInput::Lost(failure.to_string());
            }
            if path.is_reset_requested(epoch) {
                // I/O queues cannot be opened although the admin queue works: only a reset may help.
                let reset = controller.reset().await;
                if reset.is_none() {
                    return PathInput::Lost("I/O queues cannot be opened".into());
                }
            }
            path.clear_reset_request();
            let (event, command) = (controller.next_event(), path.take_command());
            if event.is_none() && command.is_none() {
                path.wait_for_command_or(controller.wait_event(&self.core)).await;
                continue;
            }
            let mut handled = Ok(());
            if let Some(event) = event {
                handled = self.handle_event(controller, epoch, event).await;
            }
            match command {
                Some(PathCommand::Operate(ControllerOperation::Reset, reply)) => {
                    match controller.reset().await {
                        Some(outcome) => send_reply(&reply, outcome.map_err(OperationError::failed)),
                        None => return PathInput::Operate(ControllerOperation::Reset, reply),
                    }
                }
                Some(PathCommand::Operate(ControllerOperation::Disable, reply)) => {
                    return PathInput::Operate(ControllerOperation::Disable, reply);
                }
                Some(PathCommand::Operate(ControllerOperation::Enable, reply)) => {
                    send_reply(&reply, Err(OperationError::Already));
                }
                Some(PathCommand::Admin { sqe, data, reply }) => {
                    send_reply(&reply, self.admin(controller).execute(sqe, data).await);
                }
                Some(command @ PathCommand::Io { .. }) => {
                    pass_through(&self.core, controller.io_queues(), command);
                }
                Some(PathCommand::RefreshAna) if handled.is_ok() => {
                    handled = self.refresh_ana(controller).await;
                }
                Some(PathCommand::RefreshAna) | None => {}
            }
            match handled {
                // A lost connection is detected at the start of the loop. The driver recovers memory-based controllers.
                Err(error) if is_fabrics && !matches!(error, AdminError::Failure(_)) => {
                    return PathInput::Lost(format!("an event could not be handled: {error}"));
                }
                Ok(()) | Err(_) => {}
            }
        }
    }

    fn notify(&mut self, notice: PathNotice) {
        let path = self.path.clone();
        self.group.send_event(match notice {
            PathNotice::Lost { wait, why } => PathEvent::Lost { path, wait, why },
            PathNotice::AttachFailed(why) => PathEvent::AttachFailed { path, why },
            PathNotice::LossTimeout => PathEvent::ReconnectTimedOut(path),
            PathNotice::Stopped => PathEvent::Stopped(path),
        });
    }
}

impl<N: CoreNetwork> ControllerSession<N> {
    fn admin<'a>(&'a self, controller: &'a mut AnyController<N>) -> AdminExecutor<'a, N> {
        AdminExecutor { controller, path: &self.path, core: &self.core }
    }

    /// Scans the namespaces and publishes them; fails with the name of the step.
    async fn scan(
        &self,
        controller: &mut AnyController<N>,
        epoch: u64,
    ) -> Result<(), (&'static str, AdminError)> {
        let identity = controller.identity().clone();
        let mut admin = self.admin(controller);
        let groups = admin.ana(&identity).await.map_err(|error| ("the ANA log page", error))?;
        let scanned = admin.namespaces(&identity).await;
        let scanned = scanned.map_err(|error| ("identifying namespaces", error))?;
        let mut namespaces = Vec::new();
        for namespace in scanned {
            if controller.supports_namespace(namespace.nsid).await {
                namespaces.push(namespace);
            }
        }
        self.path.set_status(PathStatus::Enabled, None);
        let (path, queues) = (self.path.clone(), controller.io_queues());
        self.group.send_event(PathEvent::NamespacesScanned { path, epoch, namespaces, queues, groups });
        Ok(())
    }

    async fn handle_event(
        &self,
        controller: &mut AnyController<N>,
        epoch: u64,
        event: AsyncEvent,
    ) -> Result<(), AdminError> {
        if event == AsyncEvent::ANA_CHANGED {
            return self.refresh_ana(controller).await;
        }
        let namespaces_changed = event == AsyncEvent::NAMESPACE_CHANGED;
        if controller.is_fabrics() {
            let length = if namespaces_changed { CHANGED_NAMESPACES_BYTES } else { LOG_BYTES };
            self.admin(controller).acknowledge(event.log_page, length).await?;
        }
        if namespaces_changed {
            // Channels keep their queues: the epoch is unchanged.
            self.scan(controller, epoch).await.map_err(|(_, error)| error)?;
        }
        Ok(())
    }

    async fn refresh_ana(&self, controller: &mut AnyController<N>) -> Result<(), AdminError> {
        let identity = controller.identity().clone();
        let groups = self.admin(controller).ana(&identity).await?;
        self.group.send_event(PathEvent::AnaChanged { path: self.path.clone(), groups });
        Ok(())
    }
}

/// Executes an I/O command in a task of its own. If the core rejects the task, the reply channel closes.
fn pass_through(core: &Core, queues: Arc<dyn IoQueues>, command: PathCommand) {
    let PathCommand::Io { sqe, data, metadata, timeout_ns, reply } = command else { return };
    let own = core.clone();
    core.spawn(async move {
        let answer = queues.execute(&own, sqe, &data, &metadata, timeout_ns).await;
        send_reply(&reply, answer.map_err(|error| error.to_string()));
    });
}
