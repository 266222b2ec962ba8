//! The initiator against our own target, over the kernel's loopback.
#![allow(clippy::unwrap_used, missing_docs)]

mod passthrough;

#[path = "tcp/data.rs"]
mod data;
#[path = "tcp/extended_protection.rs"]
mod extended_protection;
#[path = "tcp/keys.rs"]
mod keys;
#[path = "tcp/paths.rs"]
mod paths;
#[path = "tcp/replaced.rs"]
mod replaced;
#[path = "tcp/reservation.rs"]
mod reservation;
#[path = "tcp/sides.rs"]
mod sides;
