//! Addresses of connections and listeners.

use std::fmt;
use std::net::{AddrParseError, IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// Where peers connect to: the address of a stream socket, or of another transport.
///
/// The text form of a socket's, which [`FromStr`] takes back, is `127.0.0.1:4420`, `[::1]:4420` or
/// `unix:/run/target.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StreamAddress {
    /// TCP over IPv4 or IPv6.
    Tcp(SocketAddr),
    /// A UNIX socket by the path of its file; empty for an unnamed socket, as a client's usually is.
    Unix(PathBuf),
    /// What only the network of its transport understands.
    Other(OtherAddress),
}

/// An address of a transport that is not a stream socket of the kernel. Two are equal if their texts are: the
/// transport writes them in one way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OtherAddress {
    /// The transport, such as `rdma`.
    pub transport: &'static str,
    /// The address, as the transport writes it.
    pub text: Arc<str>,
}

/// Prefix of the text form of a UNIX socket's address.
const UNIX_PREFIX: &str = "unix:";

impl StreamAddress {
    /// The IP address and port of TCP; `None` for the others.
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            StreamAddress::Tcp(address) => Some(*address),
            StreamAddress::Unix(_) | StreamAddress::Other(_) => None,
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
            StreamAddress::Other(OtherAddress { transport, text }) => write!(formatter, "{transport}:{text}"),
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
