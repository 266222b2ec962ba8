//! Malformed, stalled, disconnected and excessive hosts against a TCP target on real reactors.
//!
//! Each host is a plain socket that sends arbitrary bytes. The invariants are the same everywhere: the target
//! reports the error, closes at most that host's connections, and other hosts are not affected.
#![allow(clippy::unwrap_used)]

#[path = "hostile/authentication.rs"]
mod authentication;
#[path = "hostile/commands.rs"]
mod commands;
#[path = "hostile/connects.rs"]
mod connects;
#[path = "hostile/copies.rs"]
mod copies;
#[path = "hostile/disconnects.rs"]
mod disconnects;
#[path = "hostile/many_hosts.rs"]
mod many_hosts;
#[path = "hostile/options.rs"]
mod options;
#[path = "hostile/pdus.rs"]
mod pdus;
#[path = "hostile/peer.rs"]
mod peer;
#[path = "hostile/removals.rs"]
mod removals;
#[path = "hostile/reservations.rs"]
mod reservations;
#[path = "hostile/stalls.rs"]
mod stalls;
#[path = "hostile/test_target.rs"]
mod test_target;
#[path = "hostile/visibility.rs"]
mod visibility;
