//! The vfio-user transport and our own client, with queues that the test keeps itself.
#![allow(clippy::unwrap_used)]

#[path = "vfio_user/host.rs"]
mod host;
#[path = "vfio_user/rig.rs"]
mod rig;

#[path = "vfio_user/admin.rs"]
mod admin;
#[path = "vfio_user/endings.rs"]
mod endings;
#[path = "vfio_user/fused.rs"]
mod fused;
#[path = "vfio_user/hostile.rs"]
mod hostile;
#[path = "vfio_user/io.rs"]
mod io;
