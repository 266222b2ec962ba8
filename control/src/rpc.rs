//! JSON-RPC over a UNIX socket: server, client and the protocol that they share.

mod calls;
pub mod client;
pub mod framing;
mod protocol;
pub(crate) mod server;
pub(crate) mod socket;
