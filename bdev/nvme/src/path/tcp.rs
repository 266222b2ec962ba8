//! The task of a path over TCP.

use std::sync::Arc;

use nvme::{AdminData, AdminError, Association, Membership, TcpUri};
use reactor::Core;
use sys::clock::now_ns;
use wire_nvme::aer::AsyncEvent;
use wire_nvme::feature::AsyncEventConfiguration;
use wire_nvme::log::LogId;

use super::learn::{Admin, Groups, is_unknown};
use super::{Command, Done, Path, PathStatus, Refusal, Rest, stay_disabled, tell};
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
    Reset(Done),
    Disabled(Done),
}

/// Attaches the controller, and keeps it attached until it is told to stop or gives up.
pub(crate) async fn run(core: Core, path: Arc<Path>, uri: TcpUri, group: Arc<Group>) {
    let mut epoch = 0;
    let mut reconnect: Option<Reconnect> = None;
    let mut asker: Option<Done> = None;
    loop {
        let rest = match wait_for_turn(&core, &path, reconnect.as_mut()).await {
            Turn::Go => None,
            Turn::Stop => break,
            Turn::Disable(done) => Some(Rest::Disable(done)),
            Turn::GiveUp => {
                let why = path.failure().unwrap_or_default();
                path.set_status(PathStatus::Failed, None);
                group.tell(News::Lost { path: path.clone(), waits_until_ns: 0, why: why.clone() });
                if let Some(done) = asker.take() {
                    tell(&done, Err(Refusal::Failed(why)));
                }
                if path.config.reconnect.loss_timeout_ns.is_some_and(|timeout| timeout > 0) {
                    group.tell(News::GivenUp(path.clone()));
                }
                Some(path.rest(false).await)
            }
        };
        if let Some(rest) = rest {
            if let Some(done) = asker.take() {
                tell(&done, Err(Refusal::Failed("it was disabled meanwhile".into())));
            }
            asker = match rest {
                Rest::Connect(done) => Some(done),
                Rest::Disable(done) => stay_disabled(&path, &group, done).await,
                Rest::Stop => None,
            };
            if asker.is_none() {
                break;
            }
            reconnect = Some(Reconnect::lost(path.config.reconnect, now_ns()));
            continue;
        }
        epoch += 1;
        path.forget_complaint();
        let Some(outcome) = path.unless_stopped(establish(&core, &path, &uri)).await else { break };
        let mut association = match outcome {
            Ok((association, namespaces, ana)) => {
                path.set_status(PathStatus::Enabled, None);
                publish(&group, &path, epoch, &association, namespaces, ana);
                if let Some(done) = asker.take() {
                    tell(&done, Ok(()));
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
        let end = serve(&core, &path, &group, &mut association, epoch).await;
        drop(association);
        let why = match end {
            End::Stopped => break,
            End::Lost(why) => why,
            End::Reset(done) => {
                path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                asker = Some(done);
                "it is being reset".to_string()
            }
            End::Disabled(done) => {
                asker = stay_disabled(&path, &group, done).await;
                if asker.is_none() {
                    break;
                }
                reconnect = Some(Reconnect::lost(path.config.reconnect, now_ns()));
                continue;
            }
        };
        path.set_status(PathStatus::Reconnecting, Some(why.clone()));
        let lost = Reconnect::lost(path.config.reconnect, now_ns());
        group.tell(News::Lost { path: path.clone(), waits_until_ns: lost.waits_until_ns(), why });
        reconnect = Some(lost);
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.tell(News::Stopped(path));
}

enum Turn {
    Go,
    Stop,
    GiveUp,
    Disable(Done),
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
        if let Some(done) = path.refuse_commands() {
            return Turn::Disable(done);
        }
        path.asked_or(core.sleep_ns(due_ns - now_ns)).await;
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
    let mut admin = Admin::tcp(core, path, &mut association);
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
async fn serve(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    association: &mut Association,
    epoch: u64,
) -> End {
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
                    outcome = heard(core, path, group, association, epoch, event).await;
                }
                match command {
                    Some(Command::Reset(done)) => return End::Reset(done),
                    Some(Command::Disable(done)) => return End::Disabled(done),
                    Some(Command::Enable(done)) => tell(&done, Err(Refusal::Already)),
                    Some(Command::Admin { sqe, data, reply }) => {
                        tell(&reply, Admin::tcp(core, path, association).execute(sqe, data).await);
                    }
                    Some(command @ Command::Io { .. }) => {
                        pass_through(core, association.membership().clone(), command);
                    }
                    Some(Command::RefreshAna) if outcome.is_ok() => {
                        outcome = refresh(core, path, group, association).await;
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

/// Executes an I/O command beside everything else. A core with too many tasks refuses: the reply is then gone.
fn pass_through(core: &Core, membership: Membership, command: Command) {
    let Command::Io { sqe, data, metadata, timeout_ns, reply } = command else { return };
    if metadata != AdminData::None {
        tell(&reply, Err("there is no metadata over TCP".into()));
        return;
    }
    let own = core.clone();
    core.spawn(async move {
        let answer = membership.execute_io(&own, sqe, &data, timeout_ns).await;
        tell(&reply, answer.map_err(|error| error.to_string()));
    });
}

async fn heard(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    association: &mut Association,
    epoch: u64,
    event: AsyncEvent,
) -> Result<(), AdminError> {
    if event == AsyncEvent::ANA_CHANGED {
        return refresh(core, path, group, association).await;
    }
    let identity = association.identity().clone();
    let mut admin = Admin::tcp(core, path, association);
    if event == AsyncEvent::NAMESPACE_CHANGED {
        admin.acknowledge(LogId::ChangedNamespaces.to_wire(), 4096).await?;
        let ana = admin.ana(&identity).await?;
        let namespaces = admin.namespaces(&identity, PAGE_LOG2).await?;
        publish(group, path, epoch, association, namespaces, ana);
        return Ok(());
    }
    admin.acknowledge(event.log_page, 512).await
}

async fn refresh(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    association: &mut Association,
) -> Result<(), AdminError> {
    let identity = association.identity().clone();
    let groups = Admin::tcp(core, path, association).ana(&identity).await?;
    group.tell(News::Ana { path: path.clone(), groups });
    Ok(())
}
