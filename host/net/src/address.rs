//! Addresses of stream sockets.

use std::fmt;
use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// The address of a stream socket.
///
/// Its text form, which [`FromStr`] takes back, is `127.0.0.1:4420`, `[::1]:4420` or `unix:/run/target.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StreamAddress {
    /// TCP over IPv4 or IPv6.
    Tcp(SocketAddr),
    /// A UNIX socket by the path of its file; empty for an unnamed socket, as a client's usually is.
    Unix(PathBuf),
}

/// Prefix of the text form of a UNIX socket's address.
const UNIX_PREFIX: &str = "unix:";

impl StreamAddress {
    /// The IP address and port; `None` for a UNIX socket.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            StreamAddress::Tcp(address) => Some(*address),
            StreamAddress::Unix(_) => None,
        }
    }
}

impl From<SocketAddr> for StreamAddress {
    fn from(address: SocketAddr) -> Self {
        StreamAddress::Tcp(address)
    }
}

impl FromStr for StreamAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        match text.strip_prefix(UNIX_PREFIX) {
            Some(path) => Ok(StreamAddress::Unix(path.into())),
            None => text.parse().map(StreamAddress::Tcp),
        }
    }
}

impl fmt::Display for StreamAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamAddress::Tcp(address) => address.fmt(formatter),
            StreamAddress::Unix(path) => write!(formatter, "{UNIX_PREFIX}{}", path.display()),
        }
    }
}
