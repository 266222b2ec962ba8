//! The task of a path over TCP.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use nvme::{AdminError, Association, TcpUri};
use reactor::Core;
use sys::clock::now_ns;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::log::LogId;

use super::learn::{Admin, Groups, is_unknown};
use super::{Command, Path, PathStatus};
use crate::initiator::{Group, News};
use crate::namespace::Learned;
use crate::reconnect::{Next, Reconnect};
use crate::view::Join;

/// Events that a path listens to.
const EVENTS: u32 = AsyncEventConfiguration::NAMESPACE | AsyncEventConfiguration::ANA;
/// MPSMIN of every controller over fabrics.
const PAGE_LOG2: u32 = 12;

/// What ended a connection.
enum End {
    Stopped,
    Lost(String),
    Reset(SyncSender<Result<(), String>>),
}

/// Attaches the controller, and keeps it attached until it is told to stop or gives up.
pub(crate) async fn run(core: Core, path: Arc<Path>, uri: TcpUri, group: Arc<Group>) {
    let mut epoch = 0;
    let mut reconnect: Option<Reconnect> = None;
    let mut asker: Option<SyncSender<Result<(), String>>> = None;
    loop {
        match wait_for_turn(&core, &path, reconnect.as_mut()).await {
            Turn::Go => {}
            Turn::Stop => break,
            Turn::GiveUp => {
                let why = path.failure().unwrap_or_default();
                path.set_status(PathStatus::Failed, None);
                group.tell(News::Lost { path: path.clone(), waits_until_ns: 0, why: why.clone() });
                if let Some(reply) = asker.take() {
                    let _ = reply.send(Err(why));
                }
                if path.config.reconnect.loss_timeout_ns.is_some_and(|timeout| timeout > 0) {
                    group.tell(News::GivenUp(path.clone()));
                }
                match stay_failed(&path).await {
                    Some(reply) => {
                        asker = Some(reply);
                        reconnect = Some(Reconnect::lost(path.config.reconnect, now_ns()));
                        continue;
                    }
                    None => break,
                }
            }
        }
        epoch += 1;
        path.forget_complaint();
        let Some(outcome) = path.unless_stopped(establish(&core, &path, &uri)).await else { break };
        let mut association = match outcome {
            Ok((association, namespaces, ana)) => {
                path.set_status(PathStatus::Enabled, None);
                publish(&group, &path, epoch, &association, namespaces, ana);
                if let Some(reply) = asker.take() {
                    let _ = reply.send(Ok(()));
                }
                association
            }
            Err(why) if reconnect.is_none() => {
                path.set_status(PathStatus::Failed, Some(why.clone()));
                group.tell(News::NotAttached { path: path.clone(), why });
                return;
            }
            Err(why) => {
                path.set_status(PathStatus::Reconnecting, Some(why.clone()));
                let waits_until_ns = reconnect.as_ref().map_or(0, Reconnect::waits_until_ns);
                group.tell(News::Lost { path: path.clone(), waits_until_ns, why });
                continue;
            }
        };
        let end = serve(&path, &group, &mut association, epoch).await;
        drop(association);
        match end {
            End::Stopped => break,
            End::Lost(why) => {
                path.set_status(PathStatus::Reconnecting, Some(why.clone()));
                let lost = Reconnect::lost(path.config.reconnect, now_ns());
                group.tell(News::Lost { path: path.clone(), waits_until_ns: lost.waits_until_ns(), why });
                reconnect = Some(lost);
            }
            End::Reset(reply) => {
                path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                path.set_status(PathStatus::Reconnecting, Some("it is being reset".into()));
                let lost = Reconnect::lost(path.config.reconnect, now_ns());
                let why = "it is being reset".to_string();
                group.tell(News::Lost { path: path.clone(), waits_until_ns: lost.waits_until_ns(), why });
                reconnect = Some(lost);
                asker = Some(reply);
            }
        }
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.tell(News::Stopped(path));
}

enum Turn {
    Go,
    Stop,
    GiveUp,
}

/// Waits until the next try is due.
async fn wait_for_turn(core: &Core, path: &Path, reconnect: Option<&mut Reconnect>) -> Turn {
    let Some(reconnect) = reconnect else { return Turn::Go };
    loop {
        let now_ns = now_ns();
        if path.is_stopping() {
            return Turn::Stop;
        }
        let due_ns = match reconnect.next() {
            Next::TryAt(due_ns) | Next::GiveUpAt(due_ns) => due_ns,
        };
        if now_ns >= due_ns {
            return match reconnect.next() {
                Next::TryAt(_) => {
                    reconnect.tried(now_ns);
                    Turn::Go
                }
                Next::GiveUpAt(_) => Turn::GiveUp,
            };
        }
        refuse_commands(path);
        path.asked_or(core.sleep_ns(due_ns - now_ns)).await;
    }
}

/// Answers commands of a controller that is not there.
fn refuse_commands(path: &Path) {
    while let Some(command) = path.take_command() {
        match command {
            Command::Admin { reply, .. } => {
                let _ = reply.send(Err(AdminError::Reset));
            }
            Command::Reset { reply } => {
                let _ = reply.send(Err("the controller is being connected to".into()));
            }
            Command::RefreshAna => {}
        }
    }
    path.forget_complaint();
}

/// Waits for a reset, which is a new beginning, or the end.
async fn stay_failed(path: &Path) -> Option<SyncSender<Result<(), String>>> {
    loop {
        if path.is_stopping() {
            return None;
        }
        while let Some(command) = path.take_command() {
            match command {
                Command::Reset { reply } => return Some(reply),
                Command::Admin { reply, .. } => {
                    let _ = reply.send(Err(AdminError::Reset));
                }
                Command::RefreshAna => {}
            }
        }
        path.forget_complaint();
        path.asked_or(std::future::pending()).await;
    }
}

async fn establish(
    core: &Core,
    path: &Path,
    uri: &TcpUri,
) -> Result<(Association, Vec<Learned>, Groups), String> {
    let config = &path.config;
    let mut association = Association::open(core, uri, &config.options, config.num_io_queues)
        .await
        .map_err(|error| error.to_string())?;
    let identity = association.identity().clone();
    path.set_identity(&identity, association.membership().cntlid());
    match association.listen(EVENTS).await {
        // A controller may have no events.
        Ok(()) => {}
        Err(AdminError::Status(status)) if is_unknown(status) => {}
        Err(error) => return Err(format!("listening for events: {error}")),
    }
    let mut admin = Admin::Tcp(&mut association);
    let ana = admin.ana(&identity).await.map_err(|error| format!("the ANA log page: {error}"))?;
    let namespaces = admin.namespaces(&identity, PAGE_LOG2).await;
    let namespaces = namespaces.map_err(|error| format!("identifying namespaces: {error}"))?;
    Ok((association, namespaces, ana))
}

fn publish(
    group: &Arc<Group>,
    path: &Arc<Path>,
    epoch: u64,
    association: &Association,
    namespaces: Vec<Learned>,
    ana: Groups,
) {
    let membership = Arc::new(association.membership().clone());
    let of = |learned: Learned| {
        let join = Join::Tcp(membership.clone(), learned.identify.clone());
        (learned, join)
    };
    let namespaces = namespaces.into_iter().map(of).collect();
    group.tell(News::Namespaces { path: path.clone(), epoch, namespaces, groups: ana });
}

/// Looks after a controller until its connection ends.
async fn serve(path: &Arc<Path>, group: &Arc<Group>, association: &mut Association, epoch: u64) -> End {
    loop {
        if path.is_stopping() {
            return End::Stopped;
        }
        if let Some(failure) = association.failure() {
            return End::Lost(failure.to_string());
        }
        if path.is_complained_of(epoch) {
            return End::Lost("I/O queues cannot be opened".into());
        }
        path.forget_complaint();
        let outcome = match (association.next_event(), path.take_command()) {
            (None, None) => {
                path.asked_or(association.news()).await;
                continue;
            }
            (event, command) => {
                let mut outcome = Ok(());
                if let Some(event) = event {
                    outcome = heard(path, group, association, epoch, event).await;
                }
                match command {
                    Some(Command::Reset { reply }) => return End::Reset(reply),
                    Some(Command::Admin { sqe, length, reply }) => {
                        let answer = Admin::Tcp(association).read(sqe, length).await;
                        let _ = reply.send(answer);
                    }
                    Some(Command::RefreshAna) if outcome.is_ok() => {
                        outcome = refresh(path, group, association).await;
                    }
                    Some(Command::RefreshAna) | None => {}
                }
                outcome
            }
        };
        match outcome {
            // A lost connection shows at the next look.
            Ok(()) | Err(AdminError::Failure(_)) => {}
            Err(error) => return End::Lost(format!("an event could not be followed: {error}")),
        }
    }
}

async fn heard(
    path: &Arc<Path>,
    group: &Arc<Group>,
    association: &mut Association,
    epoch: u64,
    event: AsyncEvent,
) -> Result<(), AdminError> {
    if event == AsyncEvent::ANA_CHANGED {
        return refresh(path, group, association).await;
    }
    let mut admin = Admin::Tcp(association);
    if event == AsyncEvent::NAMESPACE_CHANGED {
        admin.acknowledge(LogId::ChangedNamespaces.to_wire(), 4096).await?;
        let identity = association.identity().clone();
        let mut admin = Admin::Tcp(association);
        let ana = admin.ana(&identity).await?;
        let namespaces = admin.namespaces(&identity, PAGE_LOG2).await?;
        publish(group, path, epoch, association, namespaces, ana);
        return Ok(());
    }
    admin.acknowledge(event.log_page, 512).await
}

async fn refresh(
    path: &Arc<Path>,
    group: &Arc<Group>,
    association: &mut Association,
) -> Result<(), AdminError> {
    let identity = association.identity().clone();
    let groups = Admin::Tcp(association).ana(&identity).await?;
    group.tell(News::Ana { path: path.clone(), groups });
    Ok(())
}
