//! Addresses of stream sockets.

use std::fmt;
use std::net::{AddrParseError, IpAddr, SocketAddr};
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

/// An IP address as people write it: in brackets, as before a port, or without. An IPv4 address that is
/// written as one of IPv6 (`::ffff:10.0.0.7`) is the IPv4 address.
///
/// # Errors
/// It is no address.
pub fn parse_ip(text: &str) -> Result<IpAddr, AddrParseError> {
    let address = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    Ok(address.parse::<IpAddr>()?.to_canonical())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ip_address_is_taken_with_and_without_brackets() {
        for text in ["::1", "[::1]", "[0:0::1]"] {
            assert_eq!(parse_ip(text).unwrap().to_string(), "::1", "{text}");
        }
        for text in ["10.0.0.7", "[10.0.0.7]", "::ffff:10.0.0.7", "[::ffff:a00:7]"] {
            assert_eq!(parse_ip(text).unwrap().to_string(), "10.0.0.7", "{text}");
        }
        for text in ["", "[]", "[::1", "::1]", "[[::1]]", "localhost"] {
            assert!(parse_ip(text).is_err(), "{text}");
        }
    }
}
