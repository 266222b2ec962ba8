//! Images of a Ceph cluster as block devices, as SPDK's module `rbd`: [`RbdModule`] has the methods.
//!
//! librbd and librados execute the requests and are loaded when the first cluster connects. Requests that a
//! cluster does not answer wait, or fail after the time that its options give (`rados_osd_op_timeout`); no
//! core waits with them. The size of an image is that which the cluster has: other clients may change it.
//! [`RbdBdev`] is the object of a device.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod device;
mod image;
mod methods;
mod options;

pub use device::RbdBdev;
pub use methods::RbdModule;
