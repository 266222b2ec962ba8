//! The client of the replicated store: images of a cluster as block devices.
//!
//! A [`ClusterImage`] is a bdev. Each of its channels has connections of its own to the nodes, and sends
//! every request to the primary of the object's logical group. A request without an answer is repeated with
//! its number, maybe to another replica, until it is answered: a write happens once. So the loss of a node is
//! a pause, not an error.
//!
//! An image that is open is attached: the map names who has it, and groups refuse what a holder before has in
//! flight.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod attach;
mod channel;
mod cluster;
mod connections;
mod copy;
mod diff;
mod image;
mod keeper;
mod lanes;
mod layers;
mod placement;
mod reclaim;
pub mod rpc;
mod sessions;
mod snapshots;
mod status;
mod sweep;
mod trash;
mod watch;

pub use attach::AttachOptions;
pub use cluster::{ClientError, Cluster};
pub use cluster_map::EtcdOptions;
pub use copy::{CopiedImage, CopyError, ImageName, copy_image};
pub use diff::{
    DiffError, DiffExport, DiffPosition, ExportedDiff, ImportOptions, ImportedDiff, StartedDiff, import_diff,
    read_started,
};
pub use image::{ClusterImage, check_size};
pub use reclaim::{
    ReclaimError, VolumeUse, empty_dropped, protect_image, reclaim_removed, reclaim_unknown, remove_image,
    resize_image, volumes_of_pool,
};
pub use snapshots::{
    clone_snapshot, create_snapshot, flatten_image, protect_snapshot, remove_snapshot, rollback_image,
};
pub use status::{StatusError, ask_nodes};
pub use store_image::IMAGE_BLOCK_BYTES;
pub use trash::{
    TrashEntry, check_plain_name, purge_image, rename_image, restore_image, trash, trash_image, trashed_image,
};
pub use wire_store::DIFF_MAGIC;
