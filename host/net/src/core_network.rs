//! The network of a core, and connections that the core opens itself.

use std::io;

use reactor::Core;

use crate::{Network, Sockets, StreamAddress, ZERO_COPY_SEND};

/// A [`Network`] that exists on every core: kernel sockets, or a simulation's links.
///
/// Components that run on cores (the NVMe/TCP driver, the target's poll groups) are generic over it and create one for
/// themselves, so that the same code runs over both. Nothing is decided per call.
pub trait CoreNetwork: Network + Sized + 'static {
    /// A network for one component of a core.
    fn of_core(core: &Core) -> Self;

    /// Starts a connect, which never blocks. Until it completes, I/O on the stream returns
    /// [`TransferResult::Blocked`](crate::TransferResult::Blocked); if it fails, so does I/O.
    ///
    /// # Errors
    /// As of [`connect`](crate::connect()).
    fn connect(&mut self, address: &StreamAddress) -> io::Result<Self::Stream>;
}

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
}
