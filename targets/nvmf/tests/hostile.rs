//! Hosts that lie, stall, vanish or ask too much, before a target on real reactors.
//!
//! Each is a plain socket that sends whatever bytes it likes; what must hold is always the same: it is
//! told what is wrong, at most its own connection ends, and others do not notice.
#![allow(clippy::unwrap_used)]

#[path = "hostile/commands.rs"]
mod commands;
#[path = "hostile/connects.rs"]
mod connects;
#[path = "hostile/copies.rs"]
mod copies;
#[path = "hostile/crowds.rs"]
mod crowds;
#[path = "hostile/endings.rs"]
mod endings;
#[path = "hostile/pdus.rs"]
mod pdus;
#[path = "hostile/peer.rs"]
mod peer;
#[path = "hostile/removals.rs"]
mod removals;
#[path = "hostile/reservations.rs"]
mod reservations;
#[path = "hostile/rig.rs"]
mod rig;
