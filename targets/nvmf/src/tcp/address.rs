//! Addresses of NVMe/TCP listeners.

use std::net::{IpAddr, SocketAddr};

use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use crate::{ListenAddress, NvmfTargetError};

/// `trtype` of the transport.
pub(super) const NAME: &str = "TCP";

impl ListenAddress {
    /// A TCP address.
    pub fn tcp(traddr: &str, trsvcid: &str) -> ListenAddress {
        ListenAddress {
            trtype: NAME.into(),
            adrfam: String::new(),
            traddr: traddr.into(),
            trsvcid: trsvcid.into(),
        }
    }

    /// The socket address of a TCP listener.
    ///
    /// # Errors
    /// The transport is not TCP, the address is invalid or of the other family, or the port is invalid.
    pub fn socket(&self) -> Result<SocketAddr, NvmfTargetError> {
        self.socket_of(NAME)
    }

    /// The socket address of a listener of the transport `trtype`, which has IP addresses and ports.
    pub(crate) fn socket_of(&self, trtype: &str) -> Result<SocketAddr, NvmfTargetError> {
        if !self.trtype.eq_ignore_ascii_case(trtype) {
            return Err(NvmfTargetError::Address(format!("{} {}", self.trtype, self.text())));
        }
        let invalid = || NvmfTargetError::Address(format!("{}:{}", self.traddr, self.trsvcid));
        let address: IpAddr = self.traddr.trim_matches(['[', ']']).parse().map_err(|_| invalid())?;
        let family = match address {
            IpAddr::V4(_) => "ipv4",
            IpAddr::V6(_) => "ipv6",
        };
        if !self.adrfam.is_empty() && !self.adrfam.eq_ignore_ascii_case(family) {
            return Err(NvmfTargetError::Address(format!("{} as {}", self.traddr, self.adrfam)));
        }
        // One of IPv4 in the form of IPv6 is that of IPv4.
        Ok(SocketAddr::new(address.to_canonical(), self.trsvcid.parse().map_err(|_| invalid())?))
    }

    /// A TCP address from a socket address.
    pub fn from_socket(address: SocketAddr) -> ListenAddress {
        ListenAddress {
            trtype: NAME.into(),
            adrfam: if address.is_ipv4() { "IPv4" } else { "IPv6" }.into(),
            traddr: address.ip().to_string(),
            trsvcid: address.port().to_string(),
        }
    }
}

/// A socket address in the format of a discovery log entry.
pub(crate) fn transport_address(address: SocketAddr) -> TransportAddress {
    TransportAddress {
        trtype: TransportType::Tcp,
        adrfam: if address.is_ipv4() { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 },
        traddr: address.ip().to_string(),
        trsvcid: address.port().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ip_addresses_with_numeric_ports_are_accepted() {
        for (text, adrfam) in [("127.0.0.1", "IPv4"), ("::1", "ipv6"), ("0.0.0.0", "")] {
            let address = ListenAddress { adrfam: adrfam.into(), ..ListenAddress::tcp(text, "4420") };
            let socket = address.socket().unwrap();
            assert_eq!(ListenAddress::from_socket(socket).socket().unwrap(), socket);
        }
        let mapped = ListenAddress { adrfam: "IPv6".into(), ..ListenAddress::tcp("::ffff:127.0.0.1", "1") };
        assert_eq!(mapped.normalized().unwrap(), ListenAddress::tcp("127.0.0.1", "1").normalized().unwrap());
        let is_rejected = |address: ListenAddress| address.socket().is_err();
        assert!(is_rejected(ListenAddress::tcp("localhost", "4420")));
        assert!(is_rejected(ListenAddress::tcp("127.0.0.1", "http")));
        assert!(is_rejected(ListenAddress::tcp("127.0.0.1", "65536")));
        assert!(is_rejected(ListenAddress { adrfam: "IPv6".into(), ..ListenAddress::tcp("127.0.0.1", "1") }));
        assert!(is_rejected(ListenAddress { trtype: "RDMA".into(), ..ListenAddress::tcp("127.0.0.1", "1") }));
    }
}
