//! TLS 1.3 with external pre-shared keys (RFC 8446, section 2.2) or a server's certificate, by OpenSSL 3 over
//! memory buffers.
//!
//! A [`TlsSession`] is one connection, sans-IO: records go in and out, and so does plaintext. [`TlsLayer`] is
//! a session as a [`StreamLayer`](sockets::StreamLayer), with a [`TlsStream`] over any byte stream after its
//! handshake. A [`Psk`] is a key with its identity; a server looks keys up in a [`PskSource`], and may have
//! [`Certificates`] for clients that offer none of them ([`ServerCredentials`]).
//!
//! Only what storage protocols need is possible: version 1.3, no tickets, no early data, each connection with
//! an ephemeral key exchange, and the suites of [`PskHash`]. A client has a key, and accepts no certificate.
//! The server selects the suite of the key that the client offers.
//!
//! ```
//! use secret::Secret;
//! use tls::{HandshakeProgress, Psk, PskHash, ServerCredentials, TlsSession};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let psk = Psk::new("a host", Secret::new([7; 32]), PskHash::Sha256).ok_or("not 32 bytes")?;
//! let server = ServerCredentials::of_keys(std::sync::Arc::new(vec![psk.clone()]));
//! let (mut client, mut server) = (TlsSession::client(psk)?, TlsSession::server(&server)?);
//! let mut records = [0; 4096];
//! while client.handshake()? == HandshakeProgress::Pending || server.handshake()? == HandshakeProgress::Pending {
//!     let count = client.take_records(&mut records);
//!     server.put_records(&records[..count])?;
//!     server.handshake()?;
//!     let count = server.take_records(&mut records);
//!     client.put_records(&records[..count])?;
//! }
//! assert_eq!(server.psk().map(|psk| psk.identity()), Some("a host"));
//! # Ok(())
//! # }
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod callbacks;
mod certificates;
mod context;
mod error;
mod ffi;
mod layer;
mod psk;
mod server;
mod session;

#[cfg(test)]
mod tests;

pub use certificates::{CertificateError, CertificateFiles, Certificates};
pub use error::{TlsError, TlsFailure};
pub use layer::{TlsLayer, TlsStream};
pub use psk::{Psk, PskHash, PskSource};
pub use server::ServerCredentials;
pub use session::{HandshakeProgress, PlainRead, TlsSession};
