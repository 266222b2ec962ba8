//! The socket of multicast DNS.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

/// Port and group of multicast DNS (RFC 6762, section 3).
pub(crate) const PORT: u16 = 5353;
const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);
/// Time to live of all packets (RFC 6762, section 11).
const TTL: u32 = 255;

/// A socket that shares port 5353 with other programs, in the group on the networks of some addresses.
pub(crate) struct MulticastSocket {
    pub(crate) socket: UdpSocket,
}

/// Messages that are handled between two looks at the time and at the request to stop.
const BURST: u32 = 64;

impl MulticastSocket {
    /// # Errors
    /// The port is used by a program that does not share it, or none of the addresses is of an interface that
    /// can join.
    pub(crate) fn open(addresses: &[Ipv4Addr]) -> io::Result<MulticastSocket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        sockopt::set_socket_reuseport(&socket, true)?;
        // Only what is sent to the group is received: nothing of other networks (RFC 6762, section 11), and
        // no answer that is meant for another program with this port.
        bind(&socket, &SocketAddrV4::new(GROUP, PORT))?;
        let socket = UdpSocket::from(socket);
        socket.set_multicast_ttl_v4(TTL)?;
        socket.set_multicast_loop_v4(true)?;
        let mut joined = Err(io::Error::other("there is no interface with an IPv4 address"));
        for address in addresses {
            match socket.join_multicast_v4(&GROUP, address) {
                Ok(()) => joined = Ok(()),
                // Two addresses of one interface.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => joined = Ok(()),
                Err(error) if joined.is_err() => joined = Err(error),
                Err(_) => {}
            }
        }
        joined?;
        Ok(MulticastSocket { socket })
    }

    /// Handles received messages with the ports that they come from, at most a burst of them.
    pub(crate) fn receive(&self, mut handle: impl FnMut(&[u8], u16)) {
        let mut buffer = [0; wire_mdns::MESSAGE_BYTES_MAX + 1];
        for _ in 0..BURST {
            // An error is that of an earlier send, or there is nothing more.
            let Ok((bytes, from)) = self.socket.recv_from(&mut buffer) else { return };
            handle(&buffer[..bytes], from.port());
        }
    }

    /// Multicasts from an address. A network that is down loses the message.
    pub(crate) fn send(&self, from: Ipv4Addr, message: &[u8]) {
        let sent = sockopt::set_ip_multicast_if(&self.socket, &from)
            .map_err(io::Error::from)
            .and_then(|()| self.socket.send_to(message, SocketAddrV4::new(GROUP, PORT)));
        if let Err(error) = sent {
            log::debug!(target: "mdns", "{from}: {error}");
        }
    }
}
