//! Listening addresses.

use std::net::{IpAddr, SocketAddr};

/// A listening address, with the field names of SPDK's RPC methods. Each transport has its constructors.
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
    /// The address in a message: IP address and port as they are written together, others by their `traddr`.
    pub(crate) fn text(&self) -> String {
        match (self.traddr.parse::<IpAddr>(), self.trsvcid.parse()) {
            (Ok(address), Ok(port)) => SocketAddr::new(address, port).to_string(),
            _ => self.traddr.clone(),
        }
    }
}
