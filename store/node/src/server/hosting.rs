//! The thread that makes and removes replicas of a node, one after another: both write to the device.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use reactor::{ReactorHandle, blocking};

use super::map_watch::MapRequest;
use crate::{PoolOptions, ReplicaNode, StoreCores, StoreError};

/// What the thread does.
pub(super) enum HostRequest {
    Add {
        group: u32,
        /// Nothing of the group is written anywhere.
        is_new: bool,
        pool: PoolOptions,
    },
    Remove {
        group: u32,
    },
    /// Makes a partition that failed a spare one.
    Discard {
        partition: u32,
    },
}

/// Carries out requests until their sender is gone. The outcomes are requests of the map's thread.
pub(super) fn run(
    node: &Arc<ReplicaNode>,
    reactors: &[ReactorHandle],
    requests: &Receiver<HostRequest>,
    outcomes: &SyncSender<MapRequest>,
) {
    let cores = StoreCores::Reactors(reactors);
    for request in requests {
        let outcome = match request {
            HostRequest::Add { group, is_new, pool } => {
                let added = node.add_group(&cores, group, is_new, pool);
                let added = blocking::block_on(added).map_err(|_| StoreError::Closed);
                MapRequest::Hosted { group, replica: added.flatten() }
            }
            HostRequest::Remove { group } => {
                let removed = blocking::block_on(node.remove_group(&cores, group));
                match removed.map_err(|_| StoreError::Closed).flatten() {
                    Ok(()) => log::info!("group {group}: this node has no replica any more"),
                    Err(error) => log::error!("group {group}: its replica cannot be removed: {error}"),
                }
                MapRequest::Removed { group }
            }
            HostRequest::Discard { partition } => {
                let discarded = blocking::block_on(node.discard_partition(&cores, partition));
                MapRequest::Discarded {
                    partition,
                    outcome: discarded.map_err(|_| StoreError::Closed).flatten(),
                }
            }
        };
        if outcomes.send(outcome).is_err() {
            return;
        }
    }
}
