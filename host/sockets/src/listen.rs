//! Listening, apart from the connections that result.

use std::io;

use crate::{ListenerId, Network, StreamAddress};

/// The listeners of one core: what only a server needs of its network.
///
/// What they accept is a [`NetworkEvent`](crate::NetworkEvent) of [`Network::poll`], so that one call a turn
/// serves listeners and connections. What an address is depends on the network: one that does not know an
/// address of [`StreamAddress`] returns `Unsupported`.
pub trait Listen: Network {
    /// Starts listening. Port 0 selects a free port; see [`local_address`](Self::local_address). The file of
    /// a UNIX socket has mode 0600 and is removed when the listener is closed.
    fn listen(&mut self, address: &StreamAddress) -> io::Result<ListenerId>;

    /// Closes a listener; accepted connections stay open.
    fn close_listener(&mut self, listener: ListenerId);

    /// The address that a listener is bound to.
    fn local_address(&self, listener: ListenerId) -> Option<StreamAddress>;
}
