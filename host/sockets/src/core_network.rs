//! The network of a core, and connections that the core opens itself.

use std::io;

use reactor::Core;
use rustix::net::sockopt;

use crate::{ConnectOptions, Listen, Network, SocketStream, Sockets, StreamAddress, ZERO_COPY_SEND};

/// A [`Network`] that exists on every core: kernel sockets, or a simulation's links.
///
/// Components that run on cores (the NVMe/TCP driver, the target's poll groups) are generic over it and
/// create one for themselves, so that the same code runs over both. Nothing is decided per call.
pub trait CoreNetwork: Network + Sized + 'static {
    /// A network for one component of a core.
    fn of_core(core: &Core) -> Self;

    /// Starts a connect, which never blocks. Until it completes, I/O on the stream returns
    /// [`TransferResult::Blocked`](crate::TransferResult::Blocked); if it fails, so does I/O.
    ///
    /// # Errors
    /// As of [`connect`](crate::connect()).
    fn connect(&mut self, address: &StreamAddress) -> io::Result<Self::Stream>;

    /// The same with options, which a network without them ignores.
    ///
    /// # Errors
    /// As of [`connect_with`](crate::connect_with()).
    fn connect_with(
        &mut self,
        address: &StreamAddress,
        options: &ConnectOptions,
    ) -> io::Result<Self::Stream> {
        let _ = options;
        self.connect(address)
    }

    /// Has a TCP connection fail with `TimedOut` when the peer has not acknowledged what was sent for so many
    /// milliseconds (RFC 5482). By default, as for a network without such a limit, there is none.
    ///
    /// # Errors
    /// The kernel does not accept the time.
    fn set_ack_timeout(&mut self, stream: &Self::Stream, timeout_ms: u32) -> io::Result<()> {
        let _ = (stream, timeout_ms);
        Ok(())
    }
}

/// A [`CoreNetwork`] that listens too: for targets and servers.
pub trait ServerNetwork: CoreNetwork + Listen {}

impl<N: CoreNetwork + Listen> ServerNetwork for N {}

impl CoreNetwork for Sockets {
    /// Busy connections are polled without readiness events if the core spins. [`ZERO_COPY_SEND`] applies.
    fn of_core(core: &Core) -> Sockets {
        Sockets::new(core.event_loop()).with_busy_poll(core.spins()).with_zero_copy(
            core.event_loop(),
            core.pool(),
            &ZERO_COPY_SEND,
        )
    }

    fn connect(&mut self, address: &StreamAddress) -> io::Result<Self::Stream> {
        crate::connect(address)
    }

    fn connect_with(
        &mut self,
        address: &StreamAddress,
        options: &ConnectOptions,
    ) -> io::Result<Self::Stream> {
        crate::connect_with(address, options)
    }

    fn set_ack_timeout(&mut self, stream: &SocketStream, timeout_ms: u32) -> io::Result<()> {
        match stream.is_unix {
            true => Ok(()),
            false => Ok(sockopt::set_tcp_user_timeout(&stream.socket, timeout_ms)?),
        }
    }
}
