//! The task of a path over PCI Express or vfio-user: the driver resets controllers by itself, so that what is
//! left is to hear events, answer commands and notice the end.

use std::sync::Arc;

use nvme::{AdminError, Controller};
use reactor::Core;
use sys::clock::now_ns;
use wire_nvme::aer::AsyncEvent;

use super::learn::Admin;
use super::{Command, Path, PathStatus};
use crate::initiator::{Group, News};
use crate::reconnect::{Next, Reconnect};
use crate::view::Join;

/// How often the driver is asked for events, which it takes from the device by itself.
const LOOK_NS: u64 = 50_000_000;

/// Attaches the controller, and keeps it attached until it is told to stop or gives up.
pub(crate) async fn run(core: Core, path: Arc<Path>, group: Arc<Group>) {
    let mut epoch = 0;
    let mut reconnect: Option<Reconnect> = None;
    while !path.is_stopping() {
        if let Some(reconnect) = &mut reconnect {
            match reconnect.next() {
                Next::TryAt(due_ns) if now_ns() >= due_ns => reconnect.tried(now_ns()),
                Next::GiveUpAt(due_ns) if now_ns() >= due_ns => {
                    let why = path.failure().unwrap_or_default();
                    path.set_status(PathStatus::Failed, None);
                    group.tell(News::Lost { path: path.clone(), waits_until_ns: 0, why });
                    group.tell(News::GivenUp(path.clone()));
                    // Hot plug brings another device; this one is over.
                    while !path.is_stopping() {
                        path.asked_or(std::future::pending()).await;
                        refuse(&path);
                    }
                    break;
                }
                Next::TryAt(due_ns) | Next::GiveUpAt(due_ns) => {
                    refuse(&path);
                    path.asked_or(core.sleep_ns(due_ns.saturating_sub(now_ns()))).await;
                    continue;
                }
            }
        }
        epoch += 1;
        path.forget_complaint();
        let Some(outcome) = path.unless_stopped(establish(&core, &path, &group, epoch)).await else { break };
        let why = match outcome {
            Ok(controller) => serve(&core, &path, &group, &controller, &mut epoch).await,
            Err(why) if reconnect.is_none() => {
                path.set_status(PathStatus::Failed, Some(why.clone()));
                group.tell(News::NotAttached { path: path.clone(), why });
                return;
            }
            Err(why) => Some(why),
        };
        let Some(why) = why else { break };
        path.set_status(PathStatus::Reconnecting, Some(why.clone()));
        let state = reconnect.get_or_insert_with(|| Reconnect::lost(path.config.reconnect, now_ns()));
        group.tell(News::Lost { path: path.clone(), waits_until_ns: state.waits_until_ns(), why });
    }
    path.set_status(PathStatus::Deleting, None);
    path.drop_commands();
    group.tell(News::Stopped(path));
}

fn refuse(path: &Path) {
    while let Some(command) = path.take_command() {
        match command {
            Command::Admin { reply, .. } => {
                let _ = reply.send(Err(AdminError::Reset));
            }
            Command::Reset { reply } => {
                let _ = reply.send(Err("the controller is not there".into()));
            }
            Command::RefreshAna => {}
        }
    }
    path.forget_complaint();
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
    learn(path, group, &controller, epoch).await.map_err(|error| error.to_string())?;
    Ok(controller)
}

async fn learn(
    path: &Arc<Path>,
    group: &Arc<Group>,
    controller: &Controller,
    epoch: u64,
) -> Result<(), AdminError> {
    let identity = controller.identity().clone();
    path.set_identity(&identity, identity.cntlid);
    let mut admin = Admin::Direct(controller);
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

/// Looks after the controller; returns why it was lost, or nothing when told to stop.
async fn serve(
    core: &Core,
    path: &Arc<Path>,
    group: &Arc<Group>,
    controller: &Controller,
    epoch: &mut u64,
) -> Option<String> {
    loop {
        if path.is_stopping() {
            return None;
        }
        if let Some(failure) = controller.failure() {
            return Some(failure.to_string());
        }
        if path.is_complained_of(*epoch) {
            path.forget_complaint();
            // Its queues cannot be opened although it answers: a reset is all that may help.
            let _ = controller.reset().await;
        }
        while let Some(event) = controller.next_event() {
            let identity = controller.identity().clone();
            if event.0 == AsyncEvent::ANA_CHANGED {
                if let Ok(groups) = Admin::Direct(controller).ana(&identity).await {
                    group.tell(News::Ana { path: path.clone(), groups });
                }
            } else if event.0 == AsyncEvent::NAMESPACE_CHANGED {
                // What channels joined stays as it is: the same connection.
                let _ = learn(path, group, controller, *epoch).await;
            }
        }
        while let Some(command) = path.take_command() {
            match command {
                Command::Admin { sqe, length, reply } => {
                    let _ = reply.send(Admin::Direct(controller).read(sqe, length).await);
                }
                Command::Reset { reply } => {
                    path.resets.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let _ = reply.send(controller.reset().await.map_err(|failure| failure.to_string()));
                }
                Command::RefreshAna => {
                    let identity = controller.identity().clone();
                    if let Ok(groups) = Admin::Direct(controller).ana(&identity).await {
                        group.tell(News::Ana { path: path.clone(), groups });
                    }
                }
            }
        }
        path.asked_or(core.sleep_ns(LOOK_NS)).await;
    }
}
