//! Who is at the other end of a connection, as far as connections and memory are counted.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use os::PeerCredentials;
use serde::{Serialize, Serializer};
use sockets::StreamAddress;

/// A peer: its IPv4 address, the network that an IPv6 host chooses its address from, or its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerKey {
    /// An IPv4 address.
    Ipv4(Ipv4Addr),
    /// A /64 network, by its first address.
    Ipv6Network(Ipv6Addr),
    /// A process at the other end of a UNIX socket, by user and process identifier.
    Process {
        /// Its effective user.
        user: u32,
        /// Its identifier; 0 if it is in another namespace.
        process: u32,
    },
    /// This process itself, as for the kernel's NBD devices: it does not keep others out.
    Own,
    /// At the other end of a UNIX socket, and the kernel does not say more. These are not told apart.
    Unknown,
}

impl PeerKey {
    /// The peer of a connection. `credentials` are those of a UNIX socket.
    pub fn of(peer: &StreamAddress, credentials: Option<PeerCredentials>) -> PeerKey {
        match (peer.tcp().map(|address| address.ip().to_canonical()), credentials) {
            (Some(IpAddr::V4(address)), _) => PeerKey::Ipv4(address),
            (Some(IpAddr::V6(address)), _) => {
                PeerKey::Ipv6Network(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64))
            }
            (None, Some(PeerCredentials { process_id, .. })) if process_id == std::process::id() => {
                PeerKey::Own
            }
            (None, Some(PeerCredentials { user_id: user, process_id: process, .. })) => {
                PeerKey::Process { user, process }
            }
            (None, None) => PeerKey::Unknown,
        }
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerKey::Ipv4(address) => write!(formatter, "{address}"),
            PeerKey::Ipv6Network(address) => write!(formatter, "{address}/64"),
            PeerKey::Process { user, process } => write!(formatter, "process {process} of user {user}"),
            PeerKey::Own => formatter.write_str("this process"),
            PeerKey::Unknown => formatter.write_str("an unknown process"),
        }
    }
}

/// As its text.
impl Serialize for PeerKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_told_apart_by_address_network_and_process() {
        let key = |text: &str| PeerKey::of(&text.parse().unwrap(), None).to_string();
        assert_eq!(key("10.0.0.1:7"), "10.0.0.1");
        assert_eq!(key("[::ffff:10.0.0.1]:8"), "10.0.0.1", "the same host by way of an IPv6 socket");
        assert_eq!(key("[2001:db8::1:2:3:4]:7"), "2001:db8::/64");
        assert_eq!(key("unix:/run/one.sock"), "an unknown process");
        let of = |process_id, user_id| {
            let credentials = PeerCredentials { process_id, user_id, group_id: 5 };
            PeerKey::of(&"unix:".parse().unwrap(), Some(credentials))
        };
        assert_eq!(of(12, 1000).to_string(), "process 12 of user 1000");
        assert_ne!(of(12, 1000), of(13, 1000));
        assert_ne!(of(0, 1000), of(0, 1001));
        assert_eq!(of(std::process::id(), 0), PeerKey::Own);
    }
}
