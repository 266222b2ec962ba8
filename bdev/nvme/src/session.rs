//! What a path does with its controller, over any transport: scans it, handles its events, and executes
//! commands.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::Arc;

use nvme::{AdminError, AnyController, IoQueues};
use reactor::Core;
use sockets::CoreNetwork;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::identify::oncs;

use crate::controller_group::{ControllerGroup, PathEvent};
use crate::path::{
    AdminExecutor, AnaGroups, ChangedNamespaces, ControllerOperation, ControllerPath, NamespaceScan,
    OnLossTimeout, OperationError, PathCommand, PathInput, PathNotice, PathSession, PathStatus, ResultSender,
    is_unsupported, run, send_reply,
};
use crate::reservation::NamespaceReservation;
use crate::suspension::Suspension;

/// Asynchronous events that a path enables.
const EVENTS: AsyncEventConfiguration =
    AsyncEventConfiguration::NAMESPACE.union(AsyncEventConfiguration::ANA);
/// Bytes read of an event's log page: enough to unmask the event.
const LOG_BYTES: u64 = 512;
/// How long I/O to a namespace that has changed may take to complete before the namespace is identified all
/// the same: what a controller has begun by then it began on the namespace that was there.
const QUIESCE_TIMEOUT_NS: u64 = 2_000_000_000;
/// Interval between attempts to scan a controller that is being reset.
const RESCAN_RETRY_NS: u64 = 100_000_000;

/// Starts the task of a path on the control core; `false` if the core has no room for it.
pub(crate) type StartPath = fn(&Core, &Arc<ControllerPath>, &Arc<ControllerGroup>) -> bool;

/// [`StartPath`] over the network `N`.
pub(crate) fn start<N: CoreNetwork>(
    core: &Core,
    path: &Arc<ControllerPath>,
    group: &Arc<ControllerGroup>,
) -> bool {
    let is_fabrics = path.id().is_fabrics();
    let on_loss_timeout = match path.config.reconnect.loss_timeout_ns {
        Some(0) if is_fabrics => OnLossTimeout::Keep,
        // A device that replaces a local one is another device, attached by hot plug.
        _ => OnLossTimeout::Remove,
    };
    let session = ControllerSession::<N> {
        core: core.clone(),
        path: path.clone(),
        group: group.clone(),
        network: PhantomData,
        resets: 0,
        reserved: BTreeSet::new(),
    };
    core.spawn(run(core.clone(), path.clone(), session, on_loss_timeout))
}

/// What a path to a controller with namespaces does.
struct ControllerSession<N> {
    core: Core,
    path: Arc<ControllerPath>,
    group: Arc<ControllerGroup>,
    network: PhantomData<fn() -> N>,
    /// Resets of the connection when its namespaces were last scanned.
    resets: u64,
    /// Namespaces of which this path took the reservation.
    reserved: BTreeSet<u32>,
}

impl<N: CoreNetwork> PathSession for ControllerSession<N> {
    type Connection = AnyController;

    async fn connect(&mut self, epoch: u64) -> Result<AnyController, String> {
        let config = &self.path.config;
        let attached =
            AnyController::attach_over::<N>(&self.core, &config.id.0, &config.options, config.num_io_queues)
                .await;
        let mut controller = attached.map_err(|error| error.to_string())?;
        self.path.set_identity(controller.identity(), controller.cntlid());
        self.resets = controller.resets();
        match controller.enable_events(EVENTS).await {
            // A controller may support no asynchronous events.
            Ok(()) => {}
            Err(AdminError::Status(status)) if is_unsupported(status) => {}
            Err(error) => return Err(format!("listening for events: {error}")),
        }
        let scanned = self.identify(&mut controller, &ChangedNamespaces::All).await;
        let (scan, groups) = scanned.map_err(|(what, error)| format!("{what}: {error}"))?;
        let before = self.reserved.clone();
        for namespace in &scan.identified {
            if let Err(why) = self.reserve(&controller, namespace.nsid).await {
                // What it has taken must not stay, unless it had that before.
                let taken = self.reserved.difference(&before).copied().collect();
                self.release(&controller, taken).await;
                self.reserved = before;
                return Err(why);
            }
        }
        self.publish(&controller, epoch, scan, groups);
        Ok(controller)
    }

    async fn serve(&mut self, controller: &mut AnyController, epoch: u64) -> PathInput<ResultSender> {
        let (path, is_fabrics) = (self.path.clone(), controller.is_fabrics());
        loop {
            if path.is_stopping() {
                self.release_reservations(controller).await;
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
            if controller.resets() != self.resets {
                // The driver has reset it, and may have missed its events.
                self.resets = controller.resets();
                path.request_rescan(ChangedNamespaces::All);
            }
            let (event, command, rescan) = (controller.next_event(), path.take_command(), path.take_rescan());
            if event.is_none() && command.is_none() && rescan.is_none() {
                path.wait_for_command_or(controller.wait_event(&self.core)).await;
                continue;
            }
            let mut handled = Ok(());
            if let Some(event) = event {
                handled = self.handle_event(controller, epoch, event).await;
            }
            if let Some(changed) = rescan
                && handled.is_ok()
            {
                handled = self.rescan(controller, epoch, changed).await;
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
                Some(PathCommand::Authenticate(reply)) => {
                    let authenticated = controller.reauthenticate().await;
                    send_reply(&reply, authenticated.map_err(OperationError::failed));
                }
                Some(PathCommand::Release(reply)) => {
                    let reserved = std::mem::take(&mut self.reserved);
                    self.release(controller, reserved).await;
                    send_reply(&reply, Ok(()));
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
                // A lost connection is detected at the start of the loop. The driver recovers memory-based
                // controllers.
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
    fn admin<'a>(&'a self, controller: &'a mut AnyController) -> AdminExecutor<'a> {
        AdminExecutor { controller, path: &self.path, core: &self.core }
    }

    /// Identifies namespaces that have changed, or may have, again: with no I/O to them in flight. What was
    /// sent before has reached the namespace that it was meant for, or none, if the controller does not serve
    /// a new namespace before it was identified.
    async fn rescan(
        &mut self,
        controller: &mut AnyController,
        epoch: u64,
        changed: ChangedNamespaces,
    ) -> Result<(), AdminError> {
        let (path, suspension) = (self.path.clone(), Arc::new(Suspension::default()));
        let event = PathEvent::Suspend { path, changed: changed.clone(), suspension: suspension.clone() };
        self.group.send_event(event);
        self.path.wait_until(|| suspension.is_applied(), std::future::pending()).await;
        let is_over = || suspension.is_quiesced(&self.path) || controller.failure().is_some();
        self.path.wait_until(is_over, self.core.sleep_ns(QUIESCE_TIMEOUT_NS)).await;
        let scanned = self.identify(controller, &changed).await;
        if scanned.is_err() && !controller.is_fabrics() && controller.failure().is_none() {
            // The driver is resetting it. The namespaces stay suspended.
            self.path.request_rescan(changed);
            self.path.unless_stopped(self.core.sleep_ns(RESCAN_RETRY_NS)).await;
        }
        let (mut scan, groups) = scanned.map_err(|(_, error)| error)?;
        let mut reserved = Vec::new();
        for namespace in scan.identified {
            match self.reserve(controller, namespace.nsid).await {
                Ok(()) => reserved.push(namespace),
                Err(why) => log::warn!(target: "bdev_nvme", "{}: {why}", self.path.id().0.controller()),
            }
        }
        scan.identified = reserved;
        self.publish(controller, epoch, scan, groups);
        Ok(())
    }

    /// Identifies the namespaces that have changed, and reads their ANA states; fails with the name of the
    /// step.
    async fn identify(
        &self,
        controller: &mut AnyController,
        changed: &ChangedNamespaces,
    ) -> Result<(NamespaceScan, AnaGroups), (&'static str, AdminError)> {
        let identity = controller.identity().clone();
        let mut admin = self.admin(controller);
        let groups = admin.ana(&identity).await.map_err(|error| ("the ANA log page", error))?;
        // A new connection scans all. Otherwise its earlier scans have been applied, or are before this one.
        let known = self.group.nsids_on(&self.path);
        let scanned = admin.namespaces(&identity, &known, changed).await;
        let mut scan = scanned.map_err(|error| ("identifying namespaces", error))?;
        let mut supported = Vec::new();
        for namespace in scan.identified {
            if controller.supports_namespace(namespace.nsid).await {
                supported.push(namespace);
            }
        }
        scan.identified = supported;
        Ok((scan, groups))
    }

    fn publish(&self, controller: &AnyController, epoch: u64, scan: NamespaceScan, groups: AnaGroups) {
        self.path.set_status(PathStatus::Enabled, None);
        let (path, queues) = (self.path.clone(), controller.io_queues());
        self.group.send_event(PathEvent::NamespacesScanned { path, epoch, scan, queues, groups });
    }

    /// Takes the reservation of a namespace, if the path is configured to.
    async fn reserve(&mut self, controller: &AnyController, nsid: u32) -> Result<(), String> {
        let Some(reservation) = self.path.config.reservation else { return Ok(()) };
        if controller.identity().oncs & oncs::RESERVATIONS == 0 {
            return Err("the controller does not support reservations; attach it without".into());
        }
        let queues = controller.io_queues();
        let had_it = self.reserved.contains(&nsid);
        let taken = self.reservation_of(&*queues, nsid).take(reservation, had_it).await;
        taken.map_err(|error| format!("namespace {nsid}: {error}"))?;
        self.reserved.insert(nsid);
        Ok(())
    }

    /// Gives up what the path has reserved, unless other paths of the name have it too, connected or not.
    async fn release_reservations(&mut self, controller: &AnyController) {
        let paths = self.group.paths();
        let is_last =
            paths.iter().all(|one| Arc::ptr_eq(one, &self.path) || one.config.reservation.is_none());
        let reserved = std::mem::take(&mut self.reserved);
        if is_last {
            self.release(controller, reserved).await;
        }
    }

    /// Gives reservations up. What cannot be released is taken over by the next host, once this one has no
    /// controller.
    async fn release(&self, controller: &AnyController, reserved: BTreeSet<u32>) {
        let queues = controller.io_queues();
        for nsid in reserved {
            if let Err(error) = self.reservation_of(&*queues, nsid).release().await {
                let address = self.path.id().0.controller();
                log::warn!(target: "bdev_nvme", "{address}: namespace {nsid}: {error}");
            }
        }
    }

    fn reservation_of<'a>(&'a self, queues: &'a dyn IoQueues, nsid: u32) -> NamespaceReservation<'a> {
        let options = &self.path.config.options;
        let (host_id, timeout_ns) = (options.host_id, options.timeout_ns);
        NamespaceReservation { core: &self.core, queues, nsid, host_id, timeout_ns }
    }

    async fn handle_event(
        &mut self,
        controller: &mut AnyController,
        epoch: u64,
        event: AsyncEvent,
    ) -> Result<(), AdminError> {
        if event == AsyncEvent::ANA_CHANGED {
            return self.refresh_ana(controller).await;
        }
        if event == AsyncEvent::NAMESPACE_CHANGED {
            let changed = match controller.is_fabrics() {
                true => self.admin(controller).changed_namespaces().await?,
                // The driver has read the list.
                false => ChangedNamespaces::All,
            };
            // Channels keep their queues: the epoch is unchanged.
            return self.rescan(controller, epoch, changed).await;
        }
        if controller.is_fabrics() {
            self.admin(controller).acknowledge(event.log_page, LOG_BYTES).await?;
        }
        Ok(())
    }

    async fn refresh_ana(&self, controller: &mut AnyController) -> Result<(), AdminError> {
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
