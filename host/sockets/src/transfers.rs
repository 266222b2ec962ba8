//! Transfers whose memory belongs to the network until the kernel no longer uses it.

use std::io;

use dma::Buffer;
use os::{RejectedSend, SendPart};

use crate::{ConnectionId, Network};

/// Configuration of [`Sockets::with_owned_transfers`](crate::Sockets::with_owned_transfers).
#[derive(Clone, Copy, Debug)]
pub struct OwnedTransferConfig {
    /// Number of buffers for received data that wait in the kernel, shared by all connections: a power of two, at most
    /// 32,768. They are taken from the pool at once.
    pub receive_buffers: u16,
    /// Size of each of these buffers in bytes, at most [`dma::BUFFER_BYTES_MAX`]. Every read uses a buffer, however
    /// little there is to read.
    pub receive_buffer_bytes: usize,
    /// Send without a copy where the kernel can, until a connection turns out to copy: see [`SendStats`].
    pub zero_copy_send: bool,
    /// Sends of fewer bytes are copied, which takes less time than to have their memory returned.
    pub zero_copy_min_bytes: usize,
    /// Zero-copy sends in a row that the kernel copies before their connection turns zero-copy off. More than one, because
    /// a device that does not copy may do so for lack of memory.
    pub zero_copy_copies_max: u32,
    /// Let the kernel select buffers and receive into them without being asked again, where it can.
    pub multishot_receive: bool,
}

impl Default for OwnedTransferConfig {
    fn default() -> Self {
        // 4 MiB: enough for a millisecond of 25 Gbit/s.
        OwnedTransferConfig {
            receive_buffers: 256,
            receive_buffer_bytes: 16 << 10,
            zero_copy_send: true,
            zero_copy_min_bytes: 32 << 10,
            zero_copy_copies_max: 8,
            multishot_receive: true,
        }
    }
}

/// How the owned sends of a core were sent. Each is counted once, when its memory is no longer used.
///
/// The kernel reports whether it has sent a connection's memory or a copy of it, as it does over the loopback interface
/// and on devices without scatter-gather. After [`zero_copy_copies_max`](OwnedTransferConfig::zero_copy_copies_max)
/// such copies in a row a connection copies by itself, since a zero-copy send that ends in a copy costs more. Before
/// Linux 6.7 the report is not used: such sends count as `zero_copied`, and nothing is turned off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendStats {
    /// Without a copy.
    pub zero_copied: u64,
    /// Copied by the kernel although they were submitted as zero-copy.
    pub copied: u64,
    /// Copied by the fallback although they are large enough: zero-copy is off for the core or the connection, or the
    /// kernel refused it.
    pub fallback: u64,
    /// Copied because they are small.
    pub small: u64,
    /// Connections that turned zero-copy off because their sends were copied.
    pub turned_off: u64,
}

/// The end of a send of [`Network::send_owned`]: its memory is no longer used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentEvent {
    /// The connection, which may be closed by now.
    pub connection: ConnectionId,
    /// The tag of the send.
    pub tag: u64,
    /// Whether the kernel accepted all bytes.
    pub result: Result<(), io::ErrorKind>,
}

/// An event of an owned transfer.
#[derive(Debug)]
pub enum TransferEvent {
    /// A send is complete, and its memory no longer used. The sends of a connection may complete in another order than
    /// they were submitted, although their data is sent in order.
    Sent {
        /// The connection, which may be closed by now.
        connection: ConnectionId,
        /// The tag of the send.
        tag: u64,
        /// Whether the kernel accepted all bytes. If not, some may have been sent, and the connection is unusable.
        result: Result<(), io::ErrorKind>,
        /// What was sent.
        parts: Vec<SendPart>,
        /// The data was copied: by the fallback or, as far as it is reported (Linux 6.7), by the kernel.
        copied: bool,
    },
    /// The next bytes of the stream arrived: all of the buffer.
    Received {
        /// The connection.
        connection: ConnectionId,
        /// The bytes.
        buffer: Buffer,
    },
    /// No more is received unless the receive is started again.
    ReceiveEnded {
        /// The connection.
        connection: ConnectionId,
        /// The reason.
        end: ReceiveEnd,
    },
}

/// Why an owned receive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveEnd {
    /// The peer closed its end of the stream.
    Closed,
    /// [`OwnedTransfers::stop_receive`].
    Stopped,
    /// The connection failed.
    Failed(io::ErrorKind),
}

/// A [`Network`] that takes over the memory of transfers until the kernel no longer uses it, so that data need not be
/// copied: zero-copy sends, and receives into buffers that the kernel selects when data arrives.
///
/// Memory comes back with a [`TransferEvent`], also when the connection is closed first; what the network or the event
/// loop still has when it is dropped is released when the kernel no longer uses it, or leaked. Where the kernel cannot
/// do it, or may not, data is copied, with the same events.
///
/// Simulated networks do not implement it: they copy.
pub trait OwnedTransfers: Network {
    /// Sends all parts, after those of earlier sends on the connection. [`TransferEvent::Sent`] returns them, once.
    /// [`Network::send`] must not be used before that.
    ///
    /// # Errors
    /// `WouldBlock` for more than 64 sends that wait for earlier ones, `NotConnected` for a connection that does not
    /// exist, `InvalidInput` for no bytes or more than [`os::SEND_PARTS_MAX`] parts.
    fn submit_send(
        &mut self,
        connection: ConnectionId,
        parts: Vec<SendPart>,
        tag: u64,
    ) -> Result<(), RejectedSend>;

    /// Receives everything that arrives into buffers of the pool, until [`TransferEvent::ReceiveEnded`]; while the
    /// pool has no buffer, nothing is received. The connection is not reported ready meanwhile, and
    /// [`Network::receive`] must not be used.
    ///
    /// # Errors
    /// `NotConnected` for a connection that does not exist, `AlreadyExists` if it receives already, `QuotaExceeded` at
    /// the event loop's limit of operations.
    fn start_receive(&mut self, connection: ConnectionId) -> io::Result<()>;

    /// Stops receiving; what has arrived is still reported, then [`TransferEvent::ReceiveEnded`].
    fn stop_receive(&mut self, connection: ConnectionId);

    /// Appends the events since the last call to `out`; returns their number. Call it after [`Network::poll`].
    fn reap_transfers(&mut self, out: &mut Vec<TransferEvent>) -> usize;
}
