//! A path: one controller, and the task on the control core that keeps it attached.

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use block_io::Status;
use nvme::{AdminData, AdminError, AdminOutput, Options, PcieUri, RdmaUri, TcpUri, Uri};
use reactor::Core;
use wire_nvme::Sqe;
use wire_nvme::identify::IdentifyController;

use crate::inject::{ActiveInjections, ErrorInjection, Injections};
use crate::path_id::PathId;
use crate::reconnect::ReconnectPolicy;
use crate::reservation::PathReservation;

mod machine;
mod scan;
mod task;

pub use machine::ControllerOperation;
pub(crate) use machine::{OnLossTimeout, PathInput, PathNotice};
pub(crate) use scan::{
    AdminExecutor, AnaGroups, ChangedNamespaces, NamespaceScan, ana_state_of, is_unsupported,
};
pub(crate) use task::{PathSession, run};

/// Commands that are queued for a path's task.
const COMMANDS_MAX: usize = 64;

/// The address of a controller, which identifies a path (SPDK's `trid`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportId(pub Uri);

impl TransportId {
    /// Transport type, as SPDK writes it: `TCP`, `RDMA`, `PCIe` or `VFIOUSER`.
    pub fn trtype(&self) -> &'static str {
        match &self.0 {
            Uri::Tcp(_) => "TCP",
            Uri::Rdma(_) => "RDMA",
            Uri::Pcie(_) => "PCIe",
            Uri::VfioUser(_) => "VFIOUSER",
        }
    }

    /// Transport address: host, PCI address, or directory of the vfio-user socket.
    pub fn traddr(&self) -> String {
        match &self.0 {
            Uri::Tcp(uri) => uri.host.clone(),
            Uri::Rdma(uri) => uri.host.clone(),
            Uri::Pcie(PcieUri { domain, bus, device, function, .. }) => {
                format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
            }
            Uri::VfioUser(uri) => uri.directory.display().to_string(),
        }
    }

    /// Address family and port (`adrfam`, `trsvcid`); `None` for local transports.
    pub fn service(&self) -> Option<(&'static str, String)> {
        match &self.0 {
            Uri::Tcp(TcpUri { host, port, .. }) | Uri::Rdma(RdmaUri { host, port, .. }) => {
                Some((if host.contains(':') { "IPv6" } else { "IPv4" }, port.to_string()))
            }
            _ => None,
        }
    }

    /// The address of this machine that connections come from, if it was chosen.
    pub fn source(&self) -> Option<SocketAddr> {
        match &self.0 {
            Uri::Tcp(uri) => uri.source,
            _ => None,
        }
    }

    /// Whether it is reached over a fabric.
    pub fn is_fabrics(&self) -> bool {
        self.subnqn().is_some()
    }

    /// NQN of the subsystem; `None` for local transports.
    pub fn subnqn(&self) -> Option<&str> {
        match &self.0 {
            Uri::Tcp(uri) => Some(uri.subnqn.as_str()),
            Uri::Rdma(uri) => Some(uri.subnqn.as_str()),
            _ => None,
        }
    }
}

/// Configuration of a path.
#[derive(Clone, Debug)]
pub struct PathConfig {
    /// Address of the controller.
    pub id: TransportId,
    /// Options of the NVMe driver.
    pub options: Options,
    /// Reconnection after a loss of the controller.
    pub reconnect: ReconnectPolicy,
    /// Maximum number of I/O queues.
    pub num_io_queues: u16,
    /// Keep I/O statistics of the path: costs a clock read for each batch of completions, and six counters an
    /// I/O.
    pub count_io: bool,
    /// The reservation that is taken on each namespace; over fabrics only. The
    /// host identifier of `options` has to be another one in each program: [`PathReservation::host_id`].
    pub reservation: Option<PathReservation>,
}

impl PathConfig {
    /// Defaults: the driver's default options, 1024 I/O queues, one reconnection attempt after a loss, no I/O
    /// counters, no reservation.
    pub fn new(id: TransportId) -> PathConfig {
        PathConfig {
            id,
            options: Options::default(),
            reconnect: ReconnectPolicy { loss_timeout_ns: Some(0), delay_ns: 0, fast_fail_ns: None },
            num_io_queues: 1024,
            count_io: false,
            reservation: None,
        }
    }
}

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathStatus {
    /// It is being attached for the first time.
    Attaching,
    /// It is attached.
    Enabled,
    /// It was lost, and is being reconnected.
    Reconnecting,
    /// It was disabled by an operation: it stays configured, but is not connected.
    Disabled,
    /// Reconnection timed out.
    Failed,
    /// It is being detached.
    Deleting,
}

impl PathStatus {
    /// The state as SPDK's JSON-RPC writes it.
    pub fn name(self) -> &'static str {
        match self {
            PathStatus::Attaching | PathStatus::Reconnecting => "resetting",
            PathStatus::Enabled => "enabled",
            PathStatus::Disabled => "disabled",
            PathStatus::Failed => "failed",
            PathStatus::Deleting => "deleting",
        }
    }
}

/// Reply to an admin command.
pub(crate) type AdminReply = Result<AdminOutput, AdminError>;

/// Reply to a passthrough I/O command.
pub(crate) type IoReply = Result<nvme::PassthroughOutput, String>;

/// Where the result of a reset, disable or enable is sent.
pub(crate) type ResultSender = SyncSender<Result<(), OperationError>>;

/// Why a controller could not be reset, disabled or enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OperationError {
    /// It is in the requested state already.
    Already,
    /// A connection attempt is in progress.
    Busy,
    Failed(String),
}

impl OperationError {
    pub(crate) fn failed(why: impl std::fmt::Display) -> OperationError {
        OperationError::Failed(why.to_string())
    }
}

/// A command to the task of a path.
pub(crate) enum PathCommand {
    Admin {
        sqe: Sqe,
        data: AdminData,
        reply: SyncSender<AdminReply>,
    },
    /// An I/O command, executed on a temporary queue.
    Io {
        sqe: Sqe,
        data: AdminData,
        metadata: AdminData,
        timeout_ns: u64,
        reply: SyncSender<IoReply>,
    },
    Operate(ControllerOperation, ResultSender),
    /// Authenticate with new keys on the admin queue.
    Authenticate(ResultSender),
    /// Give up the reservations of its namespaces.
    Release(ResultSender),
    RefreshAna,
}

/// A path to a controller, shared by its task, the channels and the control plane (SPDK's `nvme_ctrlr`).
///
/// The task on the control core owns the connection. Other threads queue commands with
/// [`submit`](Self::submit), which wakes the task; a channel that cannot open its queue calls
/// [`request_reset`](Self::request_reset); [`stop`](Self::stop) ends the task. Everything else is state that
/// the task publishes.
pub(crate) struct ControllerPath {
    pub(crate) number: PathId,
    pub(crate) config: PathConfig,
    state: Mutex<ControllerPathState>,
    commands: Mutex<VecDeque<PathCommand>>,
    task_waker: Mutex<Option<Waker>>,
    stop: AtomicBool,
    cntlid: AtomicU16,
    /// Namespaces that have to be identified again, besides those of events.
    rescan: Mutex<Option<ChangedNamespaces>>,
    /// Epoch of the connection that a channel requested to reset; 0 for none.
    reset_request: AtomicU64,
    /// Command retry delay times 1 to 3 (CRDT), in units of 100 ms.
    retry_delays: [AtomicU16; 3],
    /// Error injections for I/O queues; those for the admin queue are below.
    pub(crate) injections: Injections,
    admin_injections: Mutex<ActiveInjections>,
}

struct ControllerPathState {
    status: PathStatus,
    failure: Option<String>,
    identity: Option<Arc<IdentifyController>>,
}

/// Sends a reply; the receiver may have timed out.
pub(crate) fn send_reply<T>(sender: &SyncSender<T>, value: T) {
    let _ = sender.send(value);
}

impl PathCommand {
    /// Rejects the command while the controller is not connected.
    fn reject(self) {
        match self {
            PathCommand::Admin { reply, .. } => send_reply(&reply, Err(AdminError::Reset)),
            PathCommand::Io { reply, .. } => {
                send_reply(&reply, Err("the controller is not connected".into()))
            }
            PathCommand::Operate(_, reply)
            | PathCommand::Authenticate(reply)
            | PathCommand::Release(reply) => {
                send_reply(&reply, Err(OperationError::Busy));
            }
            PathCommand::RefreshAna => {}
        }
    }
}

impl ControllerPath {
    pub(crate) fn new(config: PathConfig) -> ControllerPath {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        ControllerPath {
            number: PathId(COUNT.fetch_add(1, Ordering::Relaxed)),
            config,
            state: Mutex::new(ControllerPathState {
                status: PathStatus::Attaching,
                failure: None,
                identity: None,
            }),
            commands: Mutex::default(),
            task_waker: Mutex::default(),
            stop: AtomicBool::new(false),
            cntlid: AtomicU16::new(0),
            rescan: Mutex::default(),
            reset_request: AtomicU64::new(0),
            retry_delays: Default::default(),
            injections: Injections::default(),
            admin_injections: Mutex::default(),
        }
    }

    pub(crate) fn id(&self) -> &TransportId {
        &self.config.id
    }

    pub(crate) fn counts_io(&self) -> bool {
        self.config.count_io
    }

    pub(crate) fn driver_options(&self) -> &Options {
        &self.config.options
    }

    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid.load(Ordering::Relaxed)
    }

    pub(crate) fn status(&self) -> PathStatus {
        if self.is_stopping() { PathStatus::Deleting } else { sync::lock(&self.state).status }
    }

    /// The reason why it is not attached.
    pub(crate) fn failure(&self) -> Option<String> {
        sync::lock(&self.state).failure.clone()
    }

    pub(crate) fn identity(&self) -> Option<Arc<IdentifyController>> {
        sync::lock(&self.state).identity.clone()
    }

    pub(crate) fn set_status(&self, status: PathStatus, failure: Option<String>) {
        let mut state = sync::lock(&self.state);
        state.status = status;
        if failure.is_some() || matches!(status, PathStatus::Enabled | PathStatus::Disabled) {
            state.failure = failure;
        }
    }

    pub(crate) fn set_identity(&self, identity: &IdentifyController, cntlid: u16) {
        sync::lock(&self.state).identity = Some(Arc::new(identity.clone()));
        self.cntlid.store(cntlid, Ordering::Relaxed);
        for (delay, crdt) in self.retry_delays.iter().zip(identity.crdt_100ms) {
            delay.store(crdt, Ordering::Relaxed);
        }
    }

    /// The delay before a retry that the controller requests in a status (Base 2.0, section 4.2.3, Command
    /// Retry Delay).
    #[inline]
    pub(crate) fn retry_delay_ns(&self, status: Status) -> u64 {
        match status.retry_delay() {
            0 => 0,
            which => {
                let crdt = self.retry_delays[usize::from(which) - 1].load(Ordering::Relaxed);
                u64::from(crdt) * 100_000_000
            }
        }
    }

    /// Queues a command for the path's task; `false` if the queue is full or the path is stopping.
    pub(crate) fn submit(&self, command: PathCommand) -> bool {
        let mut commands = sync::lock(&self.commands);
        if commands.len() >= COMMANDS_MAX || self.is_stopping() {
            return false;
        }
        commands.push_back(command);
        drop(commands);
        self.wake();
        true
    }

    /// Sets, replaces or removes the error injection for an admin opcode.
    pub(crate) fn set_admin_injection(&self, opcode: u8, injection: Option<ErrorInjection>) {
        sync::lock(&self.admin_injections).set(opcode, injection);
    }

    /// The injection that applies to an admin command, before it is sent or after it succeeded.
    pub(crate) fn take_admin_injection(&self, opcode: u8, sent: bool) -> Option<ErrorInjection> {
        sync::lock(&self.admin_injections).take(opcode, sent)
    }

    /// Waits without a connection for an operation, the deadline or a stop; rejects other commands.
    pub(crate) async fn wait_disconnected(
        &self,
        core: &Core,
        deadline_ns: Option<u64>,
    ) -> PathInput<ResultSender> {
        loop {
            let left_ns = deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(core.now_ns()));
            if self.is_stopping() {
                return PathInput::Stop;
            }
            if left_ns == Some(0) {
                return PathInput::Timeout;
            }
            self.clear_reset_request();
            // A new connection identifies all namespaces.
            let _ = self.take_rescan();
            match (self.take_command(), left_ns) {
                (Some(PathCommand::Operate(operation, reply)), _) => {
                    return PathInput::Operate(operation, reply);
                }
                (Some(other), _) => other.reject(),
                (None, Some(left_ns)) => self.wait_for_command_or(core.sleep_ns(left_ns)).await,
                (None, None) => self.wait_for_command_or(std::future::pending()).await,
            }
        }
    }

    pub(crate) fn take_command(&self) -> Option<PathCommand> {
        sync::lock(&self.commands).pop_front()
    }

    /// Drops queued commands, whose requesters see the reply channel close.
    pub(crate) fn drop_commands(&self) {
        sync::lock(&self.commands).clear();
    }

    /// Requests a read of the ANA log page, for a channel.
    pub(crate) fn refresh_ana(&self) {
        // If the queue is full, the channel sees another ANA error and requests again.
        let _ = self.submit(PathCommand::RefreshAna);
    }

    /// Requests that namespaces are identified again.
    pub(crate) fn request_rescan(&self, changed: ChangedNamespaces) {
        let mut rescan = sync::lock(&self.rescan);
        *rescan = Some(match rescan.take() {
            Some(earlier) => earlier.and(changed),
            None => changed,
        });
        drop(rescan);
        self.wake();
    }

    pub(crate) fn take_rescan(&self) -> Option<ChangedNamespaces> {
        sync::lock(&self.rescan).take()
    }

    /// Requests a reset of a connection, for a channel that cannot open its I/O queue on it.
    pub(crate) fn request_reset(&self, epoch: u64) {
        self.reset_request.store(epoch, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_reset_requested(&self, epoch: u64) -> bool {
        self.reset_request.load(Ordering::Acquire) == epoch
    }

    /// Stops the task.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Has the path's task look again at what it waits for.
    pub(crate) fn wake(&self) {
        if let Some(task) = sync::lock(&self.task_waker).take() {
            task.wake();
        }
    }

    /// Returns when a command, a reset request or a stop is pending, or when `other` completes.
    pub(crate) async fn wait_for_command_or(&self, other: impl Future<Output = ()>) {
        let mut other = std::pin::pin!(other);
        std::future::poll_fn(|context| {
            *sync::lock(&self.task_waker) = Some(context.waker().clone());
            let pending = self.is_stopping()
                || !sync::lock(&self.commands).is_empty()
                || sync::lock(&self.rescan).is_some()
                || self.reset_request.load(Ordering::Acquire) != 0;
            if pending || other.as_mut().poll(context).is_ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Runs `work` to completion; `None` if the path is stopped before.
    pub(crate) async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|context| {
            *sync::lock(&self.task_waker) = Some(context.waker().clone());
            if self.is_stopping() {
                return Poll::Ready(None);
            }
            work.as_mut().poll(context).map(Some)
        })
        .await
    }

    /// Waits until `is_done`, which is asked after each [`wake`](Self::wake), or until the path is stopped or
    /// `other` completes.
    pub(crate) async fn wait_until(&self, is_done: impl Fn() -> bool, other: impl Future<Output = ()>) {
        let mut other = std::pin::pin!(other);
        std::future::poll_fn(|context| {
            *sync::lock(&self.task_waker) = Some(context.waker().clone());
            let ends = self.is_stopping() || is_done() || other.as_mut().poll(context).is_ready();
            if ends { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub(crate) fn clear_reset_request(&self) {
        self.reset_request.store(0, Ordering::Release);
    }
}
