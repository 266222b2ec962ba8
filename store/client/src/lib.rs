//! The client of the replicated store: images of a cluster as block devices.
//!
//! A [`ClusterImage`] is a bdev. Each of its channels has connections of its own to the nodes, and sends every request
//! to the primary of the object's logical group. A request without an answer is repeated with its number, maybe to another
//! replica, until it is answered: a write happens once. So the loss of a node is a pause, not an error.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod cluster;
mod connections;
mod image;
pub mod rpc;
mod status;
mod watch;

pub use cluster::{ClientError, Cluster};
pub use cluster_map::EtcdOptions;
pub use image::{ClusterImage, check_size};
pub use status::{StatusError, ask_nodes};
pub use store_image::IMAGE_BLOCK_BYTES;
