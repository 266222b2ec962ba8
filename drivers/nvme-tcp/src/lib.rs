//! The byte stream of NVMe/TCP, as both ends see it.
//!
//! [`Receiver`] cuts PDUs out of what arrives, in whatever pieces, checks their digests and puts
//! their data where a [`Consumer`] says. [`Sender`] queues headers and data and hands them to a
//! [`net::Network`] in as few calls as possible. Neither knows what the PDUs are for; neither has a
//! clock or a socket of its own.
//!
//! Data that is still to come for a PDU can be read straight into place: give
//! [`Receiver::direct`]'s slice to the network as the first part of a read.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod receive;
mod send;

pub use receive::{Consumer, Place, Progress, Pumped, Receiver, pump};
pub use send::{Flushed, Segments, Sender};

#[cfg(test)]
mod tests;
