//! Where a target listens.

use std::net::{IpAddr, SocketAddr};

use wire_nvme::log::{AddressFamily, TransportAddress, TransportType};

use crate::failure::TargetError;

/// The vfio-user transport's name.
const VFIO_USER: &str = "VFIOUSER";

/// An address as the management interface spells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress {
    /// Transport: `TCP` or `VFIOUSER`.
    pub trtype: String,
    /// Address family: `IPv4` or `IPv6`; empty to tell from the address. Of no meaning for vfio-user.
    pub adrfam: String,
    /// Address of an interface, or of none for all; for vfio-user a directory, in which the socket is made.
    pub traddr: String,
    /// Port. Of no meaning for vfio-user.
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

    /// A directory for a vfio-user socket.
    pub fn vfio_user(traddr: &str) -> ListenAddress {
        ListenAddress {
            trtype: VFIO_USER.into(),
            adrfam: String::new(),
            traddr: traddr.into(),
            trsvcid: "0".into(),
        }
    }

    /// Whether it is an address of the vfio-user transport.
    pub fn is_vfio_user(&self) -> bool {
        self.trtype.eq_ignore_ascii_case(VFIO_USER)
    }

    /// The address in the one way that it is kept and compared.
    pub(crate) fn normal(&self) -> Result<ListenAddress, TargetError> {
        if !self.is_vfio_user() {
            return Ok(ListenAddress::from_socket(self.socket()?));
        }
        // A socket's name has room for 107 bytes, of which "/cntrl" takes some.
        let fits = self.traddr.starts_with('/') && self.traddr.len() <= 100 && !self.traddr.contains('\0');
        if !fits {
            return Err(TargetError::Address(format!("{} (an absolute directory)", self.traddr)));
        }
        let directory = self.traddr.trim_end_matches('/');
        Ok(ListenAddress::vfio_user(if directory.is_empty() { "/" } else { directory }))
    }

    /// The socket address that this is.
    ///
    /// # Errors
    /// Another transport, an address that is none or of the other family, a port that is none.
    pub fn socket(&self) -> Result<SocketAddr, TargetError> {
        if !self.trtype.eq_ignore_ascii_case("tcp") {
            return Err(TargetError::Transport(self.trtype.clone()));
        }
        let bad = || TargetError::Address(format!("{}:{}", self.traddr, self.trsvcid));
        let address: IpAddr = self.traddr.trim_matches(['[', ']']).parse().map_err(|_| bad())?;
        let family = match address {
            IpAddr::V4(_) => "ipv4",
            IpAddr::V6(_) => "ipv6",
        };
        if !self.adrfam.is_empty() && !self.adrfam.eq_ignore_ascii_case(family) {
            return Err(TargetError::Address(format!("{} as {}", self.traddr, self.adrfam)));
        }
        Ok(SocketAddr::new(address, self.trsvcid.parse().map_err(|_| bad())?))
    }

    /// The same from a socket address.
    pub fn from_socket(address: SocketAddr) -> ListenAddress {
        ListenAddress {
            trtype: "TCP".into(),
            adrfam: if address.is_ipv4() { "IPv4" } else { "IPv6" }.into(),
            traddr: address.ip().to_string(),
            trsvcid: address.port().to_string(),
        }
    }
}

/// A socket address as the discovery log has it.
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
    fn addresses_of_both_families_and_nothing_else() {
        for (text, adrfam) in [("127.0.0.1", "IPv4"), ("::1", "ipv6"), ("0.0.0.0", "")] {
            let address = ListenAddress { adrfam: adrfam.into(), ..ListenAddress::tcp(text, "4420") };
            let socket = address.socket().unwrap();
            assert_eq!(ListenAddress::from_socket(socket).socket().unwrap(), socket);
        }
        let error = |address: ListenAddress| address.socket().is_err();
        assert!(error(ListenAddress::tcp("localhost", "4420")));
        assert!(error(ListenAddress::tcp("127.0.0.1", "http")));
        assert!(error(ListenAddress::tcp("127.0.0.1", "65536")));
        assert!(error(ListenAddress { adrfam: "IPv6".into(), ..ListenAddress::tcp("127.0.0.1", "1") }));
        assert!(error(ListenAddress { trtype: "RDMA".into(), ..ListenAddress::tcp("127.0.0.1", "1") }));
    }
}
