//! Layers between a connection's bytes and its protocol, which begin with a handshake of their own.

use std::io;

use crate::ByteStream;

/// How far the handshake of a [`StreamLayer`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeStatus {
    /// It waits for the peer, or for the stream to take more bytes; continue when the stream is ready.
    Pending,
    /// The layer carries the protocol's bytes from now on.
    Done,
    /// The peer closed the stream.
    Closed,
    /// The stream failed; or the peer violated the layer's protocol (`InvalidData`), or is not who it has to
    /// be (`PermissionDenied`).
    Failed(io::ErrorKind),
}

/// What one connection has between its bytes and its protocol: the session of TLS in user space, for example.
/// TLS in the kernel is one whose [`stream`](Self::stream) is the stream below.
///
/// While the [`handshake`](Self::handshake) is pending, the protocol does not see the peer, and the layer
/// keeps at most [`BYTES_MAX`](Self::BYTES_MAX) bytes, however much arrives. Its user bounds the time, and
/// how many connections are in their handshakes. Afterwards, each call of the protocol gets a
/// [`stream`](Self::stream), which obeys the rules of [`ByteStream`]; bytes that came with the end of the
/// handshake are the first that it returns.
pub trait StreamLayer: 'static {
    /// Most bytes that a handshake keeps, on the heap or beside the connection.
    const BYTES_MAX: usize;

    /// The stream of plain bytes, over a stream of type `S`.
    type Stream<'a, S: ByteStream + 'a>: ByteStream
    where
        Self: 'a;

    /// Continues the handshake as far as the stream permits, which is ready. `scratch` is the core's, and its
    /// content is lost afterwards.
    fn handshake<S: ByteStream>(&mut self, stream: &mut S, scratch: &mut [u8]) -> HandshakeStatus;

    /// The stream of plain bytes, after the handshake.
    fn stream<'a, S: ByteStream>(&'a mut self, below: &'a mut S) -> Self::Stream<'a, S>;
}

/// No layer: the protocol's bytes are the stream's, from the beginning.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoLayer;

impl StreamLayer for NoLayer {
    const BYTES_MAX: usize = 0;

    type Stream<'a, S: ByteStream + 'a> = &'a mut S;

    #[inline]
    fn handshake<S: ByteStream>(&mut self, _stream: &mut S, _scratch: &mut [u8]) -> HandshakeStatus {
        HandshakeStatus::Done
    }

    #[inline]
    fn stream<'a, S: ByteStream>(&'a mut self, below: &'a mut S) -> &'a mut S {
        below
    }
}
