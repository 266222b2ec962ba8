//! What the devices of an open node remember of its past, for all threads of the node.
//!
//! A task on the node's first core has the devices. It writes what was changed until then, so changes that
//! come together are one write, and answers when that is durable. A store on two devices has the state on
//! both: each may be put back from a copy alone.

use std::sync::{Arc, Mutex};

use reactor::Core;
use wire_store::{DeviceState, LogSuperblock, Superblock};

use crate::device_state;
use crate::disks::{StoreDescriptors, StoreDisks, read_log_superblock};
use crate::once::{OnceReceiver, OnceSender, once};
use crate::{StoreCores, StoreError};

/// The state of the devices, as the node knows it. Clones are the same state.
#[derive(Clone)]
pub(crate) struct DeviceMemory(Arc<Mutex<Shared>>);

struct Shared {
    /// What is durable with the next write. A device that is older than the other one has what that has then.
    state: DeviceState,
    /// Those that wait for it.
    waiting: Vec<OnceSender<Result<(), String>>>,
    /// Wakes the task.
    wake: Option<OnceSender<()>>,
    is_closed: bool,
    /// Gone with the task.
    ended: Option<OnceReceiver<()>>,
}

/// What the state is written with.
struct Heads {
    data: Superblock,
    log: Option<LogSuperblock>,
}

impl DeviceMemory {
    /// Reads the states of a node's devices. The incarnation is that of the older one; of all else the newest
    /// counts.
    pub(crate) async fn open(
        cores: &StoreCores<'_>,
        descriptors: StoreDescriptors,
        superblock: Superblock,
    ) -> Result<DeviceMemory, StoreError> {
        let open = move |core: Core| async move {
            let disks = descriptors.disks(&core)?;
            let read = read(&disks, superblock).await;
            disks.close().await;
            let (state, heads) = read?;
            let (ends, ended) = once();
            let (waiting, wake) = (Vec::new(), None);
            let shared = Shared { state, waiting, wake, is_closed: false, ended: Some(ended) };
            let memory = DeviceMemory(Arc::new(Mutex::new(shared)));
            let (task, core_of_task) = (memory.clone(), core.clone());
            core.spawn(async move {
                task.write_changes(&core_of_task, &descriptors, &heads).await;
                drop((descriptors, ends));
            });
            Ok(memory)
        };
        cores.run(0, open).await
    }

    /// The state as it is, or will be with the next write.
    pub(crate) fn state(&self) -> DeviceState {
        sync::lock(&self.0).state.clone()
    }

    /// Changes the state. It is durable on all devices of the node when this returns.
    ///
    /// # Errors
    /// [`StoreError::Memory`] with what a device reports, [`StoreError::Closed`].
    pub(crate) async fn update(&self, change: impl FnOnce(&mut DeviceState)) -> Result<(), StoreError> {
        let written = {
            let mut shared = sync::lock(&self.0);
            if shared.is_closed {
                return Err(StoreError::Closed);
            }
            let before = shared.state.clone();
            change(&mut shared.state);
            if shared.state == before && shared.waiting.is_empty() {
                return Ok(());
            }
            let (sender, written) = once();
            shared.waiting.push(sender);
            drop(shared.wake.take());
            written
        };
        written.await.ok_or(StoreError::Closed)?.map_err(StoreError::Memory)
    }

    /// Ends the task, which has the devices open.
    pub(crate) async fn close(&self) {
        let ended = {
            let mut shared = sync::lock(&self.0);
            shared.is_closed = true;
            drop(shared.wake.take());
            shared.ended.take()
        };
        if let Some(ended) = ended {
            ended.await;
        }
    }

    async fn write_changes(&self, core: &Core, descriptors: &StoreDescriptors, heads: &Heads) {
        loop {
            let (wake, woken) = once();
            let next = {
                let mut shared = sync::lock(&self.0);
                let waiting = std::mem::take(&mut shared.waiting);
                match waiting.is_empty() {
                    true if shared.is_closed => return,
                    true => {
                        shared.wake = Some(wake);
                        None
                    }
                    false => {
                        shared.state.generation += 1;
                        Some((waiting, shared.state.clone()))
                    }
                }
            };
            let Some((waiting, state)) = next else {
                woken.await;
                continue;
            };
            let written = write(core, descriptors, heads, &state).await;
            let written = written.map_err(|error| error.to_string());
            waiting.into_iter().for_each(|sender| sender.send(written.clone()));
        }
    }
}

async fn read(disks: &StoreDisks, superblock: Superblock) -> Result<(DeviceState, Heads), StoreError> {
    let data = device_state::read(&disks.data, &superblock).await?;
    if !disks.has_separate_log() {
        return Ok((data, Heads { data: superblock, log: None }));
    }
    let log = read_log_superblock(disks.log()).await?.map_err(StoreError::NoLogs)?;
    let other = device_state::read(disks.log(), &log).await?;
    let state = DeviceState {
        device: data.device,
        generation: data.generation.max(other.generation),
        incarnation: data.incarnation.min(other.incarnation),
        map_revision: data.map_revision.max(other.map_revision),
        volumes_end: data.volumes_end.max(other.volumes_end),
        groups_end: data.groups_end.max(other.groups_end),
    };
    Ok((state, Heads { data: superblock, log: Some(log) }))
}

async fn write(
    core: &Core,
    descriptors: &StoreDescriptors,
    heads: &Heads,
    state: &DeviceState,
) -> Result<(), StoreError> {
    let disks = descriptors.disks(core)?;
    let mut written = device_state::write(&disks.data, &heads.data, state).await;
    if let Some(log) = heads.log.as_ref().filter(|_| written.is_ok()) {
        written = device_state::write(disks.log(), log, state).await;
    }
    disks.close().await;
    written
}
