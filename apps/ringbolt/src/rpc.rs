//! JSON-RPC over a UNIX socket.

pub(crate) mod client;
mod framing;
pub(crate) mod protocol;
pub(crate) mod server;
pub(crate) mod socket;

pub(crate) use protocol::RpcError;
