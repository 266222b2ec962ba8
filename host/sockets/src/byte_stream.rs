//! The byte stream that a protocol reads and writes, without knowing what secures or carries it.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use crate::{ConnectionId, Network, QueuePair, ReceivedDescriptors, RejectedSend, SendPart, TransferResult};

/// The result of sending everything that is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushStatus {
    /// Everything was sent.
    Empty,
    /// The socket's send buffer is full; retry when the connection is writable.
    Blocked,
    /// The connection failed.
    Failed(io::ErrorKind),
}

/// A byte stream to a peer: the layer between sockets and protocols, and the place of TLS.
///
/// A protocol is generic over it and borrows one for each call: a [`PlainStream`] is a network and a
/// connection, and costs nothing. TLS in user space is another implementation, which borrows its session
/// (keys, a partial record, plaintext that was not read yet), a [`StreamLayer`](crate::StreamLayer), and the
/// stream below it.
///
/// An implementation that keeps bytes of its own must obey two rules. A read that returns fewer bytes than
/// requested means that no more can be read until the connection is ready again, which includes bytes that
/// arrived earlier; a write of fewer bytes than offered, likewise, that no more can be written. Bytes that
/// `send` accepted and that were not written are written by [`flush`](Self::flush), or by any later call.
pub trait ByteStream {
    /// Reads into `parts`, in order. See [`Network::receive`].
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult;

    /// Writes from `parts`, in order. See [`Network::send`].
    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult;

    /// As [`receive`](Self::receive), with file descriptors. See [`Network::receive_with_descriptors`]. By
    /// default, as for TLS, there are none.
    #[inline]
    fn receive_with_descriptors(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        let _ = descriptors;
        self.receive(parts)
    }

    /// As [`send`](Self::send), with file descriptors. See [`Network::send_with_descriptors`]. By default it
    /// returns `Failed(Unsupported)` if there are any.
    #[inline]
    fn send_with_descriptors(
        &mut self,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        match descriptors {
            [] => self.send(parts),
            _ => TransferResult::Failed(io::ErrorKind::Unsupported),
        }
    }

    /// The number of bytes from which a [`send_owned`](Self::send_owned) is worth it; `None` where it would
    /// only copy.
    #[inline]
    fn zero_copy_min_bytes(&self) -> Option<usize> {
        None
    }

    /// Sends all parts, after those of earlier calls, without a copy if the kernel can; the stream owns them
    /// until the end of the send is reported with `tag`. [`send`](Self::send) must not be used before that.
    ///
    /// # Errors
    /// `Unsupported`, as by default; otherwise those of
    /// [`OwnedTransfers::submit_send`](crate::OwnedTransfers::submit_send).
    fn send_owned(&mut self, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        let _ = tag;
        Err(RejectedSend { reason: io::ErrorKind::Unsupported, parts })
    }

    /// The queue pair of a connection that has one, in place of the bytes. By default, as for every stream,
    /// there is none.
    #[inline]
    fn queue_pair(&mut self) -> Option<&mut dyn QueuePair> {
        None
    }

    /// Writes accepted bytes that the implementation keeps. By default there are none.
    #[inline]
    fn flush(&mut self) -> FlushStatus {
        FlushStatus::Empty
    }
}

/// The stream of a network's connection as it is: [`Network::stream`].
#[derive(Debug)]
pub struct PlainStream<'a, N> {
    pub(crate) network: &'a mut N,
    pub(crate) connection: ConnectionId,
}

impl<N: Network> ByteStream for PlainStream<'_, N> {
    #[inline]
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        self.network.receive(self.connection, parts)
    }

    #[inline]
    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        self.network.send(self.connection, parts)
    }

    #[inline]
    fn zero_copy_min_bytes(&self) -> Option<usize> {
        self.network.zero_copy_min_bytes(self.connection)
    }

    fn send_owned(&mut self, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        self.network.send_owned(self.connection, parts, tag)
    }

    #[inline]
    fn queue_pair(&mut self) -> Option<&mut dyn QueuePair> {
        self.network.queue_pair(self.connection)
    }

    #[inline]
    fn receive_with_descriptors(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        self.network.receive_with_descriptors(self.connection, parts, descriptors)
    }

    #[inline]
    fn send_with_descriptors(
        &mut self,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        self.network.send_with_descriptors(self.connection, parts, descriptors)
    }
}

impl<S: ByteStream> ByteStream for &mut S {
    #[inline]
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        (**self).receive(parts)
    }

    #[inline]
    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        (**self).send(parts)
    }

    #[inline]
    fn receive_with_descriptors(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        descriptors: &mut ReceivedDescriptors,
    ) -> TransferResult {
        (**self).receive_with_descriptors(parts, descriptors)
    }

    #[inline]
    fn send_with_descriptors(
        &mut self,
        parts: &[IoSlice<'_>],
        descriptors: &[BorrowedFd<'_>],
    ) -> TransferResult {
        (**self).send_with_descriptors(parts, descriptors)
    }

    #[inline]
    fn zero_copy_min_bytes(&self) -> Option<usize> {
        (**self).zero_copy_min_bytes()
    }

    fn send_owned(&mut self, parts: Vec<SendPart>, tag: u64) -> Result<(), RejectedSend> {
        (**self).send_owned(parts, tag)
    }

    #[inline]
    fn queue_pair(&mut self) -> Option<&mut dyn QueuePair> {
        (**self).queue_pair()
    }

    #[inline]
    fn flush(&mut self) -> FlushStatus {
        (**self).flush()
    }
}
