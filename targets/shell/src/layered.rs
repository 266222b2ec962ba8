//! A connection whose peer completes a handshake before its protocol sees it.

use sockets::{ByteStream, FlushStatus, HandshakeStatus, StreamLayer};

use crate::memory::MemoryShare;
use crate::protocol::{CloseReason, IoContext, MoreToRead, Notice, Polling, Protocol, ProtocolConnection};
use crate::timers::NEVER_NS;
use crate::transfers::TransferReport;

/// A connection `C` over a layer `L`, such as TLS, that begins with a handshake. A target uses it as its
/// [`Protocol::Connection`]; targets without it pay nothing.
///
/// Until the handshake is done, nothing of the peer reaches the protocol. It is bounded as a login is: the
/// connection counts among those that have not logged in
/// ([`GroupLimits::logins_max`](crate::GroupLimits::logins_max)), of which the oldest makes room for the
/// newest; it is closed when `handshake_deadline_ns` has passed; and it keeps no more than
/// [`StreamLayer::BYTES_MAX`]. The protocol's own login follows, with deadlines of its own.
#[derive(Debug)]
pub struct Layered<L, C> {
    layer: L,
    connection: C,
    /// `None` after the handshake.
    handshake_deadline_ns: Option<u64>,
    /// The handshake has ended, and with it what the peer had to do before it counts as logged in.
    logged_in: bool,
}

impl<L: StreamLayer, C> Layered<L, C> {
    /// A connection that has just been accepted.
    pub fn new(layer: L, connection: C, handshake_deadline_ns: u64) -> Layered<L, C> {
        let handshake_deadline_ns = Some(handshake_deadline_ns);
        Layered { layer, connection, handshake_deadline_ns, logged_in: false }
    }

    /// The connection.
    pub fn connection(&self) -> &C {
        &self.connection
    }

    /// As [`connection`](Self::connection).
    pub fn connection_mut(&mut self) -> &mut C {
        &mut self.connection
    }

    /// Whether the handshake is done.
    pub fn is_established(&self) -> bool {
        self.handshake_deadline_ns.is_none()
    }
}

impl<P: Protocol, L: StreamLayer, C: ProtocolConnection<P>> ProtocolConnection<P> for Layered<L, C> {
    fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        scratch: &mut [u8],
        context: &mut IoContext<'_, P>,
    ) -> Result<MoreToRead, CloseReason<P::Error>> {
        if !self.is_established() {
            match self.layer.handshake(stream, scratch) {
                HandshakeStatus::Pending => return Ok(MoreToRead::No),
                HandshakeStatus::Done => {}
                HandshakeStatus::Closed => return Err(CloseReason::Closed),
                HandshakeStatus::Failed(kind) => return Err(CloseReason::Network(kind)),
            }
            self.handshake_deadline_ns = None;
            self.logged_in = !self.connection.awaits_login();
        }
        self.connection.receive(&mut self.layer.stream(stream), scratch, context)
    }

    fn resume(&mut self, context: &mut IoContext<'_, P>) -> Result<MoreToRead, CloseReason<P::Error>> {
        self.connection.resume(context)
    }

    fn complete(&mut self, tag: u64, completion: bdev::Completion) {
        self.connection.complete(tag, completion);
    }

    #[inline]
    fn complete_in_place(&mut self, completions: &[bdev::Completion]) -> bool {
        self.connection.complete_in_place(completions)
    }

    fn flush<S: ByteStream>(&mut self, stream: &mut S) -> Result<(), CloseReason<P::Error>> {
        if !self.is_established() {
            return Ok(());
        }
        let mut plain = self.layer.stream(stream);
        self.connection.flush(&mut plain)?;
        match plain.flush() {
            FlushStatus::Empty | FlushStatus::Blocked => Ok(()),
            FlushStatus::Failed(kind) => Err(CloseReason::Network(kind)),
        }
    }

    fn sent(&mut self, tag: u64) {
        self.connection.sent(tag);
    }

    #[inline]
    fn polling(&self) -> Polling {
        if self.is_established() { self.connection.polling() } else { Polling::Off }
    }

    #[inline]
    fn poll(&mut self, context: &mut IoContext<'_, P>) -> usize {
        self.connection.poll(context)
    }

    #[inline]
    fn wants_resume(&self) -> bool {
        self.is_established() && self.connection.wants_resume()
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        self.is_established() && self.connection.is_waiting()
    }

    #[inline]
    fn is_draining(&self) -> bool {
        self.connection.is_draining()
    }

    fn begin_drain(&mut self) {
        self.connection.begin_drain();
    }

    fn is_drained(&self) -> bool {
        !self.is_established() || self.connection.is_drained()
    }

    #[inline]
    fn deadline_ns(&self) -> u64 {
        self.handshake_deadline_ns.unwrap_or(NEVER_NS).min(self.connection.deadline_ns())
    }

    fn on_deadline(&mut self, protocol: &mut P, now_ns: u64) -> Result<(), CloseReason<P::Error>> {
        if self.handshake_deadline_ns.is_some_and(|deadline_ns| now_ns >= deadline_ns) {
            return Err(CloseReason::Network(std::io::ErrorKind::TimedOut));
        }
        if self.connection.deadline_ns() > now_ns {
            return Ok(());
        }
        self.connection.on_deadline(protocol, now_ns)
    }

    fn transfers(&self, report: &mut TransferReport) {
        self.connection.transfers(report);
    }

    fn memory(&mut self) -> Option<&mut MemoryShare> {
        self.connection.memory()
    }

    fn abandon_transfers(&mut self) {
        self.connection.abandon_transfers();
    }

    #[inline]
    fn take_notice(&mut self) -> Notice {
        let notice = self.connection.take_notice();
        Notice { logged_in: notice.logged_in || std::mem::take(&mut self.logged_in), ..notice }
    }

    fn object(&self) -> Option<u64> {
        self.connection.object()
    }

    fn awaits_login(&self) -> bool {
        !self.is_established() || self.connection.awaits_login()
    }

    fn on_close(&mut self) -> bool {
        self.connection.on_close()
    }
}
