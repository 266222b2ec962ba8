//! What a node keeps outside of its device, in the map: how often it was started, and what its replicas have
//! as committed. A device that was put back from a copy has less.
//!
//! The device's own count is raised first, then that of the map: a crash in between is no older device. An
//! older device keeps its count until all its replicas are in sync again, so that a crash does not make it
//! believed.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cluster_map::{ClusterMap, EntryId, GroupProgress, MapError, NodeId, NodeMemory, ReplicaId};
use reactor::blocking;
use replica::GroupMemory;
use uuid::Uuid;

use crate::{ReplicaDescription, ReplicaNode, StoreError};

/// What is committed is kept in the map this often, if it changes. An older copy of a device that was made
/// since the last time may be believed, if no other replica is there.
const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The memory of a node. Clones are the same.
#[derive(Clone)]
pub(super) struct KeptMemory {
    map: Arc<dyn ClusterMap>,
    node: NodeId,
    store: Arc<ReplicaNode>,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    /// As it is in the map, or is to be.
    memory: NodeMemory,
    /// By group, the epoch up to which a person accepted a loss.
    losses: BTreeMap<u32, u32>,
    /// It was compared with the map: before that nothing is written.
    is_compared: bool,
    /// The map has something else.
    is_changed: bool,
}

/// What the map says of the node's replicas.
pub(super) struct Remembered {
    /// The device is an older copy of itself.
    pub(super) is_older: bool,
    /// By group.
    pub(super) groups: BTreeMap<u32, GroupMemory>,
}

impl KeptMemory {
    pub(super) fn new(map: Arc<dyn ClusterMap>, node: ReplicaId, store: Arc<ReplicaNode>) -> KeptMemory {
        KeptMemory { map, node: NodeId(node.0), store, kept: Arc::default() }
    }

    /// Compares the device with the map, and counts this start in both. The map must have answered before a
    /// replica acts.
    ///
    /// # Errors
    /// The map's, if it cannot be read.
    pub(super) fn compare(&self) -> Result<Remembered, MapError> {
        let memories = self.map.node_memories()?;
        let losses = self.map.accepted_losses()?;
        let losses: BTreeMap<u32, u32> =
            losses.into_iter().map(|(group, loss)| (group.0, loss.epoch)).collect();
        let device = Uuid::from_bytes(self.store.superblock().device);
        let mut own = memories.get(&self.node).cloned().unwrap_or_default();
        if own.device != device {
            // Another device than before: what its node had as committed is true as well.
            (own.device, own.incarnation) = (device, 0);
        }
        let on_device = self.store.memory().state().incarnation;
        let is_older = on_device < own.incarnation;
        let groups = self.store.groups().into_iter().map(|group| {
            let loss_epoch = losses.get(&group).copied().unwrap_or(0);
            let of_group = memories.values().filter_map(|memory| memory.groups.get(&group).copied());
            let later = of_group.fold(GroupProgress::default(), |one, other| one.later(other, loss_epoch));
            (group, GroupMemory { committed: later.committed, is_older, loss_epoch })
        });
        let groups = groups.collect();
        {
            let mut kept = sync::lock(&self.kept);
            (kept.memory, kept.losses, kept.is_compared) = (own, losses, true);
        }
        if is_older {
            log::error!(
                "the device was put back from a copy, or its writes were lost: it was started {on_device} times, and the map has more. \
                 Its replicas catch up from others"
            );
        } else {
            self.count_start();
        }
        Ok(Remembered { is_older, groups })
    }

    /// Counts a start, on the device first. If the device or the map does not take it, nothing is mistaken
    /// for older.
    fn count_start(&self) {
        let next = self.store.memory().state().incarnation.max(sync::lock(&self.kept).memory.incarnation) + 1;
        let counted = self.store.memory().update(|state| state.incarnation = next);
        if let Err(error) = blocking::block_on(counted).map_err(|_| StoreError::Closed).flatten() {
            return log::warn!("this start of the node is not counted: {error}");
        }
        let mut kept = sync::lock(&self.kept);
        (kept.memory.incarnation, kept.is_changed) = (next, true);
        self.write(&mut kept);
    }

    /// The device that was older has all that it is to have.
    pub(super) fn is_restored(&self) {
        log::info!("the replicas of the device that was an older copy are in sync again");
        self.count_start();
    }

    /// Takes what people have accepted since.
    pub(super) fn accept(&self, losses: &BTreeMap<u32, u32>) {
        sync::lock(&self.kept).losses.extend(losses);
    }

    fn write(&self, kept: &mut Kept) {
        match self.map.put_node_memory(self.node, &kept.memory) {
            Ok(()) => kept.is_changed = false,
            Err(error) => log::debug!("what this node has seen is not kept in the map: {error}"),
        }
    }

    /// Keeps what replicas have as committed.
    fn keep(&self) {
        let Ok(Ok(status)) = blocking::block_on(self.store.status()) else { return };
        let kept = &mut *sync::lock(&self.kept);
        if !kept.is_compared {
            return;
        }
        let replicas: Vec<ReplicaDescription> = status.into_iter().filter_map(|it| it.replica).collect();
        let before = kept.memory.groups.clone();
        kept.memory.groups.retain(|group, _| {
            replicas.iter().any(|replica| replica.group == *group) || self.store.may_have_failed(*group)
        });
        for replica in &replicas {
            let Some(now) = progress(replica) else { continue };
            let loss_epoch = kept.losses.get(&replica.group).copied().unwrap_or(0);
            let known = kept.memory.groups.entry(replica.group).or_default();
            *known = known.later(now, loss_epoch);
        }
        kept.is_changed |= kept.memory.groups != before;
        if kept.is_changed {
            self.write(kept);
        }
    }
}

/// How far a replica is that may be believed.
fn progress(replica: &ReplicaDescription) -> Option<GroupProgress> {
    let is_believed = replica.status.stale.is_none() && !replica.status.contradicts;
    let committed = replica.committed.filter(|it| is_believed && *it != EntryId::default())?;
    Some(GroupProgress { epoch: replica.config.epoch, committed })
}

/// The thread that keeps what replicas have as committed: the map's answers may take long.
pub(super) struct Keeper {
    wake: SyncSender<bool>,
    thread: JoinHandle<()>,
}

impl Keeper {
    pub(super) fn start(memory: KeptMemory) -> Keeper {
        let (wake, woken) = sync_channel(1);
        Keeper { wake, thread: std::thread::spawn(move || run(&memory, &woken)) }
    }

    pub(super) fn waker(&self) -> KeeperWake {
        KeeperWake(self.wake.clone())
    }

    /// Ends, and keeps what was committed last.
    pub(super) fn stop(self) {
        let _ = self.wake.send(true);
        let _ = self.thread.join();
    }
}

/// Has it look at all groups soon.
pub(super) struct KeeperWake(SyncSender<bool>);

impl KeeperWake {
    /// The record of a group has changed.
    pub(super) fn wake(&self) {
        // One that is awake looks at all groups.
        let _ = self.0.try_send(false);
    }
}

fn run(memory: &KeptMemory, woken: &Receiver<bool>) {
    loop {
        let is_last = match woken.recv_timeout(KEEP_EVERY) {
            Ok(is_last) => is_last,
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        memory.keep();
        if is_last {
            return;
        }
    }
}
