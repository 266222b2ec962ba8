//! Listening addresses.

use std::net::{IpAddr, SocketAddr};

use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use crate::failure::NvmfTargetError;

/// `trtype` of the vfio-user transport.
const VFIO_USER: &str = "VFIOUSER";

/// A listening address, with the field names of SPDK's RPC methods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// Transport: `TCP` or `VFIOUSER`.
    pub trtype: String,
    /// Address family: `IPv4` or `IPv6`; empty derives it from the address. Ignored for vfio-user.
    pub adrfam: String,
    /// IP address of an interface, or the wildcard address; for vfio-user the directory of the socket.
    pub traddr: String,
    /// TCP port; 0 lets the kernel select one. Ignored for vfio-user.
    pub trsvcid: String,
}

impl ListenAddress {
    /// A TCP address.
    pub fn tcp(traddr: &str, trsvcid: &str) -> ListenAddress {
        ListenAddress {
            trtype: "TCP".into(),
            adrfam: String::new(),
            traddr: traddr.into(),
            trsvcid: trsvcid.into(),
        }
    }

    /// The directory of a vfio-user socket.
    pub fn vfio_user(traddr: &str) -> ListenAddress {
        ListenAddress {
            trtype: VFIO_USER.into(),
            adrfam: String::new(),
            traddr: traddr.into(),
            trsvcid: "0".into(),
        }
    }

    /// The transport is vfio-user.
    pub fn is_vfio_user(&self) -> bool {
        self.trtype.eq_ignore_ascii_case(VFIO_USER)
    }

    /// The canonical form, which is stored and compared.
    pub(crate) fn normalized(&self) -> Result<ListenAddress, NvmfTargetError> {
        if !self.is_vfio_user() {
            return Ok(ListenAddress::from_socket(self.socket()?));
        }
        // The path of a UNIX socket has at most 107 bytes, and "/cntrl" is appended.
        let is_valid =
            self.traddr.starts_with('/') && self.traddr.len() <= 100 && !self.traddr.contains('\0');
        if !is_valid {
            return Err(NvmfTargetError::Address(format!("{} (an absolute directory)", self.traddr)));
        }
        let directory = self.traddr.trim_end_matches('/');
        Ok(ListenAddress::vfio_user(if directory.is_empty() { "/" } else { directory }))
    }

    /// The socket address of a TCP listener.
    ///
    /// # Errors
    /// The transport is not TCP, the address is invalid or of the other family, or the port is invalid.
    pub fn socket(&self) -> Result<SocketAddr, NvmfTargetError> {
        if !self.trtype.eq_ignore_ascii_case("tcp") {
            return Err(NvmfTargetError::Transport(self.trtype.clone()));
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
            trtype: "TCP".into(),
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
