//! The task of a path over PCI Express or vfio-user: the driver resets controllers by itself, so that what is
//! left is to hear events, answer commands and notice the end.

use std::sync::Arc;

use nvme::{AdminError, Controller};
use reactor::Core;
use sys::clock::now_ns;
use wire_nvme::aer::AsyncEvent;

use super::learn::Admin;
use super::{Command, Done, Path, PathStatus, Refusal, stay_disabled, tell};
use crate::initiator::{Group, News};
use crate::reconnect::{Next, Reconnect};
use crate::view::Join;

/// How often the driver is asked for events, which it takes from the device by itself.
const LOOK_NS: u64 = 50_000_000;

/// What ended the time with a controller.
enum End {
    Stopped,
    Lost(String),
    Disabled(Done),
}

/// Attaches the controller, and keeps it attached until it is told to stop or gives up.
pub(crate) async fn run(core: Core, path: Arc<Path>, group: Arc<Group>) {
    let mut epoch = 0;
    let mut was_there = false;
    // The tries since the last loss.
    let mut reconnect: Option<Reconnect> = None;
    let mut asker: Option<Done> = None;
    while !path.is_stopping() {
        if let Some(state) = &mut reconnect {
            match state.next() {
                Next::TryAt(due_ns) if now_ns() >= due_ns => state.tried(now_ns()),
                Next::GiveUpAt(due_ns) if now_ns() >= due_ns => {
                    let why = path.failure().unwrap_or_default();
                    path.set_status(PathStatus::Failed, None);
                    group.tell(News::Lost { path: path.clone(), waits_until_ns: 0, why: why.clone() });
                    if let Some(done) = asker.take() {
                        tell(&done, Err(Refusal::Failed(why)));
                    }
                    group.tell(News::GivenUp(path.clone()));
                    // Hot plug brings another device; this one is over.
                    while !path.is_stopping() {
                        path.asked_or(std::future::pending()).await;
                        if let Some(done) = path.refuse_commands() {
                            tell(&done, Err(Refusal::Busy));
                        }
                    }
                    break;
                }
                Next::TryAt(due_ns) | Next::GiveUpAt(due_ns) => {
                    if let Some(done) = path.refuse_commands() {
                        if let Some(done) = asker.take() {
                            tell(&done, Err(Refusal::Failed("it was disabled meanwhile".into())));
                        }
                        asker = stay_disabled(&path, &group, done).await;
                        reconnect = Some(Reconnect::lost(path.config.reconnect, now_ns()));
                        continue;
                    }
                    path.asked_or(core.sleep_ns(due_ns.saturating_sub(now_ns()))).await;
                    continue;
                }
            }
        }
        epoch += 1;
        path.forget_complaint();
        let Some(outcome) = path.unless_stopped(establish(&core, &path, &group, epoch)).await else { break };
        let end = match outcome {
            Ok(controller) => {
                (was_there, reconnect) = (true, None);
                if let Some(done) = asker.take() {
                    tell(&done, Ok(()));
                }
                serve(&core, &path, &group, &controller, epoch).await
            }
            Err(why) if !was_there => {
                path.set_status(PathStatus::Failed, Some(why.clone()));
                group.tell(News::NotAttached { path: path.clone(), why });
                return;
            }
            Err(why) => End::Lost(why),
        };
        match end {
            End::Stopped => break,
            End::Lost(why) => {
                path.set_status(PathStatus::Reconnecting, Some(why.clone()));
                let state = reconnect.get_or_insert_with(|| Reconnect::lost(path.config.reconnect, now_ns()));
                group.tell(News::Lost { path: path.clone(), waits_until_ns: state.waits_until_ns(), why });
            }
            End::Disabled(done) => {
                asker = stay_disabled(&path, &group, done).await;
                reconnect = Some(Reconnect::lost(path.config.reconnect, now_ns()));
            }
        }
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.tell(News::Stopped(path));
}

async fn establish(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    epoch: u64,
) -> Result<Controller, String> {
    let controller = Controller::attach(core, &path.id().0, path.driver_options())
        .await
        .map_err(|error| error.to_string())?;
    learn(core, path, group, &controller, epoch).await.map_err(|error| error.to_string())?;
    Ok(controller)
}

async fn learn(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    controller: &Controller,
    epoch: u64,
) -> Result<(), AdminError> {
    let identity = controller.identity().clone();
    path.set_identity(&identity, identity.cntlid);
    let mut admin = Admin::direct(core, path, controller);
    let ana = admin.ana(&identity).await?;
    // CAP.MPSMIN is 0 with every controller that runs on 4 KiB pages; larger ones only make this smaller
    // than it could be.
    let namespaces = admin.namespaces(&identity, 12).await?;
    let mut usable = Vec::new();
    for learned in namespaces {
        // The driver knows what it can drive: metadata, for one.
        if controller.namespace(learned.nsid).await.is_ok() {
            usable.push((learned, Join::Direct(controller.clone())));
        }
    }
    path.set_status(PathStatus::Enabled, None);
    group.tell(News::Namespaces { path: path.clone(), epoch, namespaces: usable, groups: ana });
    Ok(())
}

/// Looks after the controller until it is lost, or not wanted.
async fn serve(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    controller: &Controller,
    epoch: u64,
) -> End {
    loop {
        if path.is_stopping() {
            return End::Stopped;
        }
        if let Some(failure) = controller.failure() {
            return End::Lost(failure.to_string());
        }
        if path.is_complained_of(epoch) {
            path.forget_complaint();
            // Its queues cannot be opened although it answers: a reset is all that may help.
            let _ = controller.reset().await;
        }
        while let Some(event) = controller.next_event() {
            if event.0 == AsyncEvent::ANA_CHANGED {
                refresh_ana(core, path, group, controller).await;
            } else if event.0 == AsyncEvent::NAMESPACE_CHANGED {
                // What channels joined stays as it is: the same connection.
                let _ = learn(core, path, group, controller, epoch).await;
            }
        }
        while let Some(command) = path.take_command() {
            match command {
                Command::Admin { sqe, data, reply } => {
                    tell(&reply, Admin::direct(core, path, controller).execute(sqe, data).await);
                }
                Command::Io { .. } => pass_through(core, controller.clone(), command),
                Command::Reset(done) => {
                    path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let outcome = controller.reset().await;
                    tell(&done, outcome.map_err(|failure| Refusal::Failed(failure.to_string())));
                }
                Command::Disable(done) => return End::Disabled(done),
                Command::Enable(done) => tell(&done, Err(Refusal::Already)),
                Command::RefreshAna => refresh_ana(core, path, group, controller).await,
            }
        }
        path.asked_or(core.sleep_ns(LOOK_NS)).await;
    }
}

/// Executes an I/O command beside everything else. A core with too many tasks refuses: the reply is then gone.
fn pass_through(core: &Core, controller: Controller, command: Command) {
    let Command::Io { sqe, data, metadata, timeout_ns, reply } = command else { return };
    let own = core.clone();
    core.spawn(async move {
        let answer = controller.execute_io(&own, sqe, &data, &metadata, timeout_ns).await;
        tell(&reply, answer.map_err(|error| error.to_string()));
    });
}

async fn refresh_ana(core: &Core, path: &Arc<Path>, group: &Arc<Group>, controller: &Controller) {
    let identity = controller.identity().clone();
    if let Ok(groups) = Admin::direct(core, path, controller).ana(&identity).await {
        group.tell(News::Ana { path: path.clone(), groups });
    }
}
