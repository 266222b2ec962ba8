//! The vfio-user transport against Ringbolt's own client; the tests implement the queues themselves.
#![allow(clippy::unwrap_used)]

#[path = "vfio_user/host.rs"]
mod host;
#[path = "vfio_user/raw_client.rs"]
mod raw_client;
#[path = "vfio_user/test_target.rs"]
mod test_target;

#[path = "vfio_user/admin.rs"]
mod admin;
#[path = "vfio_user/bit_buckets.rs"]
mod bit_buckets;
#[path = "vfio_user/fused.rs"]
mod fused;
#[path = "vfio_user/hostile.rs"]
mod hostile;
#[path = "vfio_user/io.rs"]
mod io;
#[path = "vfio_user/resets.rs"]
mod resets;
#[path = "vfio_user/seats.rs"]
mod seats;
#[path = "vfio_user/turns.rs"]
mod turns;
