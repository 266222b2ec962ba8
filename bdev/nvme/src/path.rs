//! A path: one controller, kept attached by a task on the control core.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use nvme::{AdminData, AdminError, Options, PcieUri, TcpUri, Uri};
use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::identify::IdentifyController;

use crate::initiator::{Group, News};
use crate::inject::{Active, ErrorInjection, Orders};
use crate::reconnect::ReconnectPolicy;
use crate::view::PathId;

mod direct;
mod learn;
mod tcp;

pub(crate) use direct::run as run_direct;
pub(crate) use learn::{Groups, state_of};
pub(crate) use tcp::run as run_tcp;

/// Commands that wait for a path's admin queue.
const COMMANDS_MAX: usize = 64;

/// Where a controller is: what tells paths apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportId(pub Uri);

impl TransportId {
    /// SPDK's name of the transport.
    pub fn trtype(&self) -> &'static str {
        match &self.0 {
            Uri::Tcp(_) => "TCP",
            Uri::Pcie(_) => "PCIe",
            Uri::VfioUser(_) => "VFIOUSER",
        }
    }

    /// The address in the transport's own form.
    pub fn traddr(&self) -> String {
        match &self.0 {
            Uri::Tcp(uri) => uri.host.clone(),
            Uri::Pcie(PcieUri { domain, bus, device, function, .. }) => {
                format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
            }
            Uri::VfioUser(uri) => uri.directory.display().to_string(),
        }
    }

    /// Address family and port, where there are such things.
    pub fn service(&self) -> Option<(&'static str, String)> {
        match &self.0 {
            Uri::Tcp(TcpUri { host, port, .. }) => {
                Some((if host.contains(':') { "IPv6" } else { "IPv4" }, port.to_string()))
            }
            _ => None,
        }
    }

    /// The subsystem, where the address says it.
    pub fn subnqn(&self) -> Option<&str> {
        match &self.0 {
            Uri::Tcp(uri) => Some(uri.subnqn.as_str()),
            _ => None,
        }
    }
}

/// How a path is attached and kept.
#[derive(Clone, Debug)]
pub struct PathConfig {
    /// Where the controller is.
    pub id: TransportId,
    /// The driver's part.
    pub options: Options,
    /// What happens when it is lost.
    pub reconnect: ReconnectPolicy,
    /// Most I/O queues.
    pub num_io_queues: u16,
    /// Count what goes over it: a look at the clock for each batch of completions, and six counters an I/O.
    pub count_io: bool,
}

/// How a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathStatus {
    /// It is being attached for the first time.
    Attaching,
    /// It is attached.
    Enabled,
    /// It was lost, and is tried again.
    Reconnecting,
    /// Somebody disabled it: it is attached, and nothing is connected.
    Disabled,
    /// It was given up.
    Failed,
    /// It is detached, or about to be.
    Deleting,
}

impl PathStatus {
    /// SPDK's word for it.
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

/// Answer to a command: its result and data.
pub(crate) type Answer = Result<(u64, Vec<u8>), AdminError>;

/// Answer to an I/O command that is passed through.
pub(crate) type IoAnswer = Result<nvme::IoAnswer, String>;

/// Whom to tell how a change of the controller went.
pub(crate) type Done = SyncSender<Result<(), Refusal>>;

/// Why a controller was not reset, disabled or enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is that way already.
    Already,
    /// It is being connected to.
    Busy,
    Failed(String),
}

/// What the task of a path is asked.
pub(crate) enum Command {
    Admin {
        sqe: Sqe,
        data: AdminData,
        reply: SyncSender<Answer>,
    },
    /// A command for a queue of its own.
    Io {
        sqe: Sqe,
        data: AdminData,
        metadata: AdminData,
        timeout_ns: u64,
        reply: SyncSender<IoAnswer>,
    },
    Reset(Done),
    Disable(Done),
    Enable(Done),
    RefreshAna,
}

/// What ended the time without a connection.
pub(crate) enum Rest {
    /// It is to be connected to.
    Connect(Done),
    Disable(Done),
    Stop,
}

/// A path, as every thread sees it.
pub(crate) struct Path {
    pub(crate) number: PathId,
    pub(crate) config: PathConfig,
    state: Mutex<State>,
    commands: Mutex<VecDeque<Command>>,
    task: Mutex<Option<Waker>>,
    stop: AtomicBool,
    cntlid: AtomicU16,
    /// The connection of which a channel complained; 0 for none.
    complaint: AtomicU64,
    /// Command retry delays 1 to 3 in 100 ms.
    retry_delays: [AtomicU16; 3],
    pub(crate) resets: AtomicU64,
    /// What is to become of commands, on I/O queues and on the admin queue.
    pub(crate) orders: Orders,
    admin_faults: Mutex<Active>,
}

struct State {
    status: PathStatus,
    failure: Option<String>,
    identity: Option<Arc<IdentifyController>>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is whole before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says that the controller was let go of, and waits until somebody wants it back; `None` when the path ends.
async fn stay_disabled(path: &Arc<Path>, group: &Arc<Group>, done: Done) -> Option<Done> {
    path.set_status(PathStatus::Disabled, None);
    group.tell(News::Lost { path: path.clone(), waits_until_ns: 0, why: "it is disabled".into() });
    tell(&done, Ok(()));
    match path.rest(true).await {
        Rest::Connect(done) => {
            path.set_status(PathStatus::Reconnecting, Some("it is being enabled".into()));
            Some(done)
        }
        Rest::Disable(_) | Rest::Stop => None,
    }
}

/// Tells somebody who may have given up waiting.
pub(crate) fn tell<T>(whom: &SyncSender<T>, what: T) {
    let _ = whom.send(what);
}

impl Command {
    /// Answers it for a controller that is not there.
    fn refuse(self) {
        match self {
            Command::Admin { reply, .. } => tell(&reply, Err(AdminError::Reset)),
            Command::Io { reply, .. } => tell(&reply, Err("the controller is not there".into())),
            Command::Reset(done) | Command::Disable(done) | Command::Enable(done) => {
                tell(&done, Err(Refusal::Busy));
            }
            Command::RefreshAna => {}
        }
    }
}

impl Path {
    pub(crate) fn new(config: PathConfig) -> Path {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        Path {
            number: PathId(COUNT.fetch_add(1, Ordering::Relaxed)),
            config,
            state: Mutex::new(State { status: PathStatus::Attaching, failure: None, identity: None }),
            commands: Mutex::default(),
            task: Mutex::default(),
            stop: AtomicBool::new(false),
            cntlid: AtomicU16::new(0),
            complaint: AtomicU64::new(0),
            retry_delays: Default::default(),
            resets: AtomicU64::new(0),
            orders: Orders::default(),
            admin_faults: Mutex::default(),
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
        if self.is_stopping() { PathStatus::Deleting } else { lock(&self.state).status }
    }

    /// Why it is not attached, if it is not.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.state).failure.clone()
    }

    pub(crate) fn identity(&self) -> Option<Arc<IdentifyController>> {
        lock(&self.state).identity.clone()
    }

    pub(crate) fn set_status(&self, status: PathStatus, failure: Option<String>) {
        let mut state = lock(&self.state);
        state.status = status;
        if failure.is_some() || matches!(status, PathStatus::Enabled | PathStatus::Disabled) {
            state.failure = failure;
        }
    }

    pub(crate) fn set_identity(&self, identity: &IdentifyController, cntlid: u16) {
        lock(&self.state).identity = Some(Arc::new(identity.clone()));
        self.cntlid.store(cntlid, Ordering::Relaxed);
        for (delay, crdt) in self.retry_delays.iter().zip(identity.crdt_100ms) {
            delay.store(crdt, Ordering::Relaxed);
        }
    }

    /// How long the controller wants a command to be held back before it is sent again (Base 2.0, section
    /// 4.2.3, Command Retry Delay).
    #[inline]
    pub(crate) fn retry_delay_ns(&self, status: Status) -> u64 {
        match status.field() >> 11 & 3 {
            0 => 0,
            which => {
                let crdt = self.retry_delays[usize::from(which) - 1].load(Ordering::Relaxed);
                u64::from(crdt) * 100_000_000
            }
        }
    }

    /// Asks the path's task; `false` when too much is being asked.
    pub(crate) fn ask(&self, command: Command) -> bool {
        let mut commands = lock(&self.commands);
        if commands.len() >= COMMANDS_MAX || self.is_stopping() {
            return false;
        }
        commands.push_back(command);
        drop(commands);
        self.wake();
        true
    }

    /// Puts an injection for admin commands in the place of the one of its opcode, or takes that away.
    pub(crate) fn put_admin_fault(&self, opcode: u8, injection: Option<ErrorInjection>) {
        lock(&self.admin_faults).put(opcode, injection);
    }

    /// What becomes of an admin command, before it is sent or after it went well.
    pub(crate) fn take_admin_fault(&self, opcode: u8, sent: bool) -> Option<ErrorInjection> {
        lock(&self.admin_faults).take(opcode, sent)
    }

    /// Answers what is asked of a controller that is being waited for; returns whoever wants it disabled.
    pub(crate) fn refuse_commands(&self) -> Option<Done> {
        self.forget_complaint();
        while let Some(command) = self.take_command() {
            match command {
                Command::Disable(done) => return Some(done),
                Command::Enable(done) | Command::Reset(done) => tell(&done, Err(Refusal::Busy)),
                other => other.refuse(),
            }
        }
        None
    }

    /// Waits without a connection until somebody wants one: what `disabled` or failing for good means.
    pub(crate) async fn rest(&self, disabled: bool) -> Rest {
        loop {
            if self.is_stopping() {
                return Rest::Stop;
            }
            self.forget_complaint();
            match self.take_command() {
                Some(Command::Enable(done)) if disabled => return Rest::Connect(done),
                Some(Command::Reset(done)) if !disabled => return Rest::Connect(done),
                Some(Command::Disable(done)) if !disabled => return Rest::Disable(done),
                Some(Command::Enable(done) | Command::Reset(done) | Command::Disable(done)) => {
                    tell(&done, Err(Refusal::Already));
                }
                Some(other) => other.refuse(),
                None => self.asked_or(std::future::pending()).await,
            }
        }
    }

    pub(crate) fn take_command(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }

    /// Ends whoever waits for an answer that will not come.
    pub(crate) fn drop_commands(&self) {
        lock(&self.commands).clear();
    }

    /// A channel wants the ANA log page read again.
    pub(crate) fn refresh_ana(&self) {
        // A full queue holds one already, or is served soon.
        let _ = self.ask(Command::RefreshAna);
    }

    /// A channel cannot open its queue of this connection, although the admin queue is there.
    pub(crate) fn complain(&self, epoch: u64) {
        self.complaint.store(epoch, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_complained_of(&self, epoch: u64) -> bool {
        self.complaint.load(Ordering::Acquire) == epoch
    }

    /// Tells the task to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn wake(&self) {
        if let Some(task) = lock(&self.task).take() {
            task.wake();
        }
    }

    /// Ends when somebody asked for something since the last look, or when `other` does.
    pub(crate) async fn asked_or(&self, other: impl Future<Output = ()>) {
        let mut other = std::pin::pin!(other);
        std::future::poll_fn(|context| {
            *lock(&self.task) = Some(context.waker().clone());
            let asked = self.is_stopping()
                || !lock(&self.commands).is_empty()
                || self.complaint.load(Ordering::Acquire) != 0;
            if asked || other.as_mut().poll(context).is_ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Runs `work` to its end, or gives it up when the path is to stop.
    pub(crate) async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        std::future::poll_fn(|context| {
            *lock(&self.task) = Some(context.waker().clone());
            if self.is_stopping() {
                return Poll::Ready(None);
            }
            work.as_mut().poll(context).map(Some)
        })
        .await
    }

    pub(crate) fn forget_complaint(&self) {
        self.complaint.store(0, Ordering::Release);
    }
}
