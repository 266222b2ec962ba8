//! Connected stream sockets that belong to no network, and the set-up of sockets.

use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use os::PeerCredentials;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::StreamAddress;

/// A connected TCP or UNIX stream socket that belongs to no network. Dropping it closes the connection.
#[derive(Debug)]
pub struct SocketStream {
    pub(crate) socket: OwnedFd,
    pub(crate) is_unix: bool,
    /// A listener of this process accepted it.
    pub(crate) is_accepted: bool,
}

impl SocketStream {
    /// The process that created the peer's end of a UNIX socket, as of its `connect`.
    ///
    /// # Errors
    /// `Unsupported` for a TCP socket.
    pub fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        match self.is_unix {
            true => os::peer_credentials(self.socket.as_fd()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// The local address; `None` for a UNIX socket that was accepted, whose address is its listener's.
    pub fn local_address(&self) -> Option<StreamAddress> {
        local_tcp_address(self.socket.as_fd())
    }
}

impl From<TcpStream> for SocketStream {
    fn from(stream: TcpStream) -> Self {
        SocketStream { socket: stream.into(), is_unix: false, is_accepted: false }
    }
}

impl From<UnixStream> for SocketStream {
    fn from(stream: UnixStream) -> Self {
        SocketStream { socket: stream.into(), is_unix: true, is_accepted: false }
    }
}

impl From<SocketStream> for OwnedFd {
    fn from(stream: SocketStream) -> Self {
        stream.socket
    }
}

impl AsFd for SocketStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Starts a non-blocking connect. Until it completes, I/O on the stream returns
/// [`TransferResult::Blocked`](crate::TransferResult::Blocked); if it fails, so does I/O.
///
/// # Errors
/// `Unsupported` for an address of another transport. For a UNIX socket every failure is reported here:
/// `ConnectionRefused` without a listener, `WouldBlock` if the listener's accept queue is full, which a later
/// attempt may not meet.
pub fn connect(address: &StreamAddress) -> io::Result<SocketStream> {
    connect_with(address, &ConnectOptions::default())
}

/// How a TCP connection is made. A UNIX socket has none of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectOptions {
    /// The address of this machine that it comes from; port 0 is any.
    pub source: Option<SocketAddr>,
    /// Type of service of its packets, or their traffic class (`IP_TOS`, `IPV6_TCLASS`; RFC 2474).
    pub type_of_service: u8,
    /// Priority of its packets on this machine (`SO_PRIORITY`); 0 leaves it as it is.
    pub priority: u32,
}

/// The same as [`connect`].
///
/// # Errors
/// As of [`connect`]; `PermissionDenied` for a priority above 6 without `CAP_NET_ADMIN`; `AddrNotAvailable`
/// for a source that is no address of this machine, `AddrInUse` for one whose port is in use, and
/// `InvalidInput` for one of another family.
pub fn connect_with(address: &StreamAddress, options: &ConnectOptions) -> io::Result<SocketStream> {
    let socket = open(address)?;
    if let StreamAddress::Tcp(to) = address {
        options.apply(&socket, to)?;
    }
    let connected = match address {
        StreamAddress::Tcp(address) => rustix::net::connect(&socket, address),
        StreamAddress::Unix(path) => rustix::net::connect(&socket, &SocketAddrUnix::new(path.as_path())?),
        StreamAddress::Other(_) => return Err(io::ErrorKind::Unsupported.into()),
    };
    match connected {
        Ok(()) | Err(Errno::INPROGRESS) => {
            let is_unix = matches!(address, StreamAddress::Unix(_));
            Ok(SocketStream { socket, is_unix, is_accepted: false })
        }
        Err(error) => Err(error.into()),
    }
}

impl ConnectOptions {
    fn apply(&self, socket: &OwnedFd, to: &SocketAddr) -> io::Result<()> {
        if let Some(source) = &self.source {
            if source.is_ipv4() != to.is_ipv4() {
                let message = format!("{source} and {to} are addresses of different families");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            }
            if source.port() != 0 {
                // A connection from this port that has ended does not make another one fail.
                sockopt::set_socket_reuseaddr(socket, true)?;
            }
            rustix::net::bind(socket, source)?;
        }
        match self.type_of_service {
            0 => {}
            service if to.is_ipv4() => sockopt::set_ip_tos(socket, service)?,
            service => sockopt::set_ipv6_tclass(socket, service.into())?,
        }
        // After the type of service, which sets a priority of its own.
        match self.priority {
            0 => Ok(()),
            priority => os::set_socket_priority(socket, priority).map_err(|error| {
                io::Error::new(error.kind(), format!("socket priority {priority}: {error}"))
            }),
        }
    }
}

/// Opens a non-blocking stream socket of the address's family.
pub(crate) fn open(address: &StreamAddress) -> io::Result<OwnedFd> {
    let family = match address {
        StreamAddress::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
        StreamAddress::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
        StreamAddress::Unix(_) => AddressFamily::UNIX,
        StreamAddress::Other(_) => return Err(io::ErrorKind::Unsupported.into()),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Binds a TCP socket with SO_REUSEADDR, so that connections in TIME_WAIT do not make it fail, and listens.
pub(crate) fn listen_tcp(address: SocketAddr, backlog: i32) -> io::Result<OwnedFd> {
    let socket = open(&StreamAddress::Tcp(address))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// The address that a TCP socket is bound to.
pub(crate) fn local_tcp_address(socket: BorrowedFd<'_>) -> Option<StreamAddress> {
    let address = rustix::net::getsockname(socket).ok()?;
    SocketAddr::try_from(address).ok().map(StreamAddress::Tcp)
}

/// Accepts a connection as a non-blocking stream, with the address of its peer.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<(SocketStream, StreamAddress), Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (socket, peer) = rustix::net::acceptfrom_with(listener, flags)?;
    let tcp = peer.clone().and_then(|peer| SocketAddr::try_from(peer).ok());
    let peer = tcp.map_or_else(|| StreamAddress::Unix(unix_path(peer)), StreamAddress::Tcp);
    Ok((SocketStream { socket, is_unix: tcp.is_none(), is_accepted: true }, peer))
}

fn unix_path(address: Option<SocketAddrAny>) -> PathBuf {
    let address = address.and_then(|address| SocketAddrUnix::try_from(address).ok());
    let path = address.as_ref().and_then(|address| address.path_bytes());
    // The bytes may include the terminating zero.
    PathBuf::from(OsStr::from_bytes(
        path.unwrap_or_default().strip_suffix(b"\0").unwrap_or(path.unwrap_or_default()),
    ))
}
