//! A session between a byte stream and its protocol.

use std::cell::RefCell;
use std::io::{IoSlice, IoSliceMut};

use sockets::{ByteStream, FlushStatus, HandshakeStatus, StreamLayer, TransferResult};

use crate::error::{TlsError, TlsFailure};
use crate::psk::Psk;
use crate::server::ServerCredentials;
use crate::session::{HANDSHAKE_BYTES_MAX, HandshakeProgress, PlainRead, TlsSession};

/// Bytes of records that one receive of the stream below takes.
const RECEIVE_BYTES: usize = 64 << 10;
/// Plaintext of one send of the stream below: four records.
const SEND_BYTES: usize = 64 << 10;
/// Bytes by which records are longer than their plaintext: each of 16 KiB by 22 bytes.
const OVERHEAD: usize = 1 << 10;
/// Plaintext of a record (RFC 8446, section 5.1).
const RECORD_BYTES: usize = 16 << 10;
/// Bytes that a peer may send beyond twice its plaintext. KeyUpdate costs as much as a record of data:
/// without this limit a peer with nothing but these would have a core for itself.
const EXCESS_BYTES_MAX: usize = 16 << 10;

thread_local! {
    /// Records on their way between a session and its stream, of one call: a thread has one such buffer each
    /// way.
    static RECEIVED: RefCell<Vec<u8>> = RefCell::new(vec![0; RECEIVE_BYTES]);
    static SENDING: RefCell<Vec<u8>> = RefCell::new(vec![0; SEND_BYTES + OVERHEAD]);
    /// Plaintext of several parts that becomes one record.
    static JOINED: RefCell<Vec<u8>> = RefCell::new(Vec::with_capacity(RECORD_BYTES));
}

/// Which end a layer is, before it has a session.
#[derive(Clone)]
enum Start {
    Client(Psk),
    Server(ServerCredentials),
}

/// TLS as a layer of a connection.
///
/// A server's session begins with the client's first byte, so that a peer that connects and stays silent
/// costs nothing. Beyond the session it has records that the stream below has not yet taken: of one send, at
/// most 65 KiB.
pub struct TlsLayer {
    start: Start,
    session: Option<TlsSession>,
    unsent: Vec<u8>,
    /// What has ended reading: reported when what was read before is.
    ended: Option<Ended>,
    failure: Option<TlsFailure>,
    /// Bytes of records beyond twice their plaintext.
    excess: usize,
}

#[derive(Clone, Copy, Debug)]
enum Ended {
    Closed,
    Failed(std::io::ErrorKind),
}

impl std::fmt::Debug for TlsLayer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("TlsLayer").field("session", &self.session).finish_non_exhaustive()
    }
}

impl TlsLayer {
    /// The end of a client with this key.
    pub fn client(psk: Psk) -> TlsLayer {
        TlsLayer::new(Start::Client(psk))
    }

    /// The end of a server.
    pub fn server(credentials: ServerCredentials) -> TlsLayer {
        TlsLayer::new(Start::Server(credentials))
    }

    fn new(start: Start) -> TlsLayer {
        TlsLayer { start, session: None, unsent: Vec::new(), ended: None, failure: None, excess: 0 }
    }

    /// Takes bytes of the peer that were received before there was a layer.
    ///
    /// # Errors
    /// As [`TlsSession::put_records`].
    pub fn put_received(&mut self, records: &[u8]) -> Result<(), TlsError> {
        self.session()?.put_records(records)
    }

    /// Whether there is a session: a client's from its first call, a server's from the peer's first byte.
    pub fn has_begun(&self) -> bool {
        self.session.is_some()
    }

    /// Whether the handshake is done.
    pub fn is_established(&self) -> bool {
        self.session.as_ref().is_some_and(TlsSession::is_established)
    }

    /// The key of both ends, after the handshake.
    pub fn psk(&self) -> Option<&Psk> {
        self.session.as_ref().filter(|session| session.is_established())?.psk()
    }

    /// As [`TlsSession::offered_identity`].
    pub fn offered_identity(&self) -> Option<&str> {
        self.session.as_ref()?.offered_identity()
    }

    /// Why the handshake or the session failed, if it did for a reason of TLS.
    pub fn failure(&self) -> Option<TlsFailure> {
        self.failure
    }

    /// Whether accepted bytes wait for the stream below.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub(crate) fn session(&mut self) -> Result<&mut TlsSession, TlsError> {
        if self.session.is_none() {
            self.session = Some(match &self.start {
                Start::Client(psk) => TlsSession::client(psk.clone())?,
                Start::Server(credentials) => TlsSession::server(credentials)?,
            });
        }
        self.session.as_mut().ok_or(TlsError(TlsFailure::Library(0)))
    }

    fn step(&mut self, records: &[u8]) -> Result<HandshakeProgress, TlsError> {
        let session = self.session()?;
        session.put_records(records)?;
        session.handshake()
    }

    /// Sends what there is to send. What the stream does not take is kept.
    fn flush_to<S: ByteStream>(&mut self, below: &mut S) -> FlushStatus {
        while !self.unsent.is_empty() {
            match below.send(&[IoSlice::new(&self.unsent)]) {
                TransferResult::Bytes(count) if count >= self.unsent.len() => self.unsent = Vec::new(),
                TransferResult::Bytes(count) => drop(self.unsent.drain(..count)),
                TransferResult::Blocked => return FlushStatus::Blocked,
                TransferResult::Closed => return FlushStatus::Failed(std::io::ErrorKind::BrokenPipe),
                TransferResult::Failed(kind) => return FlushStatus::Failed(kind),
            }
        }
        let Some(session) = &mut self.session else { return FlushStatus::Empty };
        let unsent = &mut self.unsent;
        SENDING.with_borrow_mut(|sending| {
            loop {
                let count = session.take_records(sending);
                let mut rest = &sending[..count];
                if rest.is_empty() {
                    return FlushStatus::Empty;
                }
                while !rest.is_empty() {
                    match below.send(&[IoSlice::new(rest)]) {
                        TransferResult::Bytes(count) => rest = &rest[count.min(rest.len())..],
                        TransferResult::Blocked => {
                            unsent.extend_from_slice(rest);
                            let start = unsent.len();
                            unsent.resize(start + session.records_len(), 0);
                            let count = session.take_records(&mut unsent[start..]);
                            unsent.truncate(start + count);
                            return FlushStatus::Blocked;
                        }
                        TransferResult::Closed => return FlushStatus::Failed(std::io::ErrorKind::BrokenPipe),
                        TransferResult::Failed(kind) => return FlushStatus::Failed(kind),
                    }
                }
            }
        })
    }

    fn fail(&mut self, error: TlsError) -> std::io::ErrorKind {
        self.failure = Some(error.0);
        error.0.kind()
    }
}

impl StreamLayer for TlsLayer {
    /// A session, the records of the handshake, and a buffer of OpenSSL for one record each way.
    const BYTES_MAX: usize = 2 * HANDSHAKE_BYTES_MAX + (48 << 10);

    type Stream<'a, S: ByteStream + 'a> = TlsStream<'a, S>;

    /// As [`StreamLayer::handshake`]. A failure's alert is sent if the stream takes it at once;
    /// [`failure`](TlsLayer::failure) says which step it was.
    fn handshake<S: ByteStream>(&mut self, stream: &mut S, scratch: &mut [u8]) -> HandshakeStatus {
        let mut received = 0;
        // A client begins.
        let mut is_due = matches!(self.start, Start::Client(_)) && self.session.is_none();
        // Small parts: what follows the handshake stays in the stream.
        let limit = scratch.len().min(4 << 10);
        loop {
            if received > 0 || is_due {
                let stepped = self.step(&scratch[..received]);
                is_due = false;
                let flushed = self.flush_to(stream);
                match (stepped, flushed) {
                    (Err(error), _) => return HandshakeStatus::Failed(self.fail(error)),
                    (_, FlushStatus::Failed(kind)) => return HandshakeStatus::Failed(kind),
                    (Ok(HandshakeProgress::Done), _) => return HandshakeStatus::Done,
                    (Ok(HandshakeProgress::Pending), _) => {}
                }
            } else if let FlushStatus::Failed(kind) = self.flush_to(stream) {
                return HandshakeStatus::Failed(kind);
            }
            received = match stream.receive(&mut [IoSliceMut::new(&mut scratch[..limit])]) {
                TransferResult::Bytes(count) => count,
                TransferResult::Blocked => return HandshakeStatus::Pending,
                TransferResult::Closed => return HandshakeStatus::Closed,
                TransferResult::Failed(kind) => return HandshakeStatus::Failed(kind),
            };
        }
    }

    fn stream<'a, S: ByteStream>(&'a mut self, below: &'a mut S) -> TlsStream<'a, S> {
        TlsStream { layer: self, below }
    }
}

/// Plaintext over the records of a stream, after the handshake of its [`TlsLayer`].
pub struct TlsStream<'a, S> {
    layer: &'a mut TlsLayer,
    below: &'a mut S,
}

impl<S> std::fmt::Debug for TlsStream<'_, S> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.layer.fmt(formatter)
    }
}

impl<S: ByteStream> TlsStream<'_, S> {
    /// Receives records; returns whether the stream below may have more. `None` if there were none.
    fn fill(&mut self) -> Result<Option<bool>, Ended> {
        if let Some(ended) = self.layer.ended {
            return Err(ended);
        }
        RECEIVED
            .with_borrow_mut(|records| {
                let count = match self.below.receive(&mut [IoSliceMut::new(records)]) {
                    TransferResult::Bytes(count) => count,
                    TransferResult::Blocked => return Ok(None),
                    TransferResult::Closed => return Err(Ended::Closed),
                    TransferResult::Failed(kind) => return Err(Ended::Failed(kind)),
                };
                self.layer.excess += count;
                if self.layer.excess > EXCESS_BYTES_MAX + RECEIVE_BYTES {
                    return Err(Ended::Failed(self.layer.fail(TlsError(TlsFailure::NoData))));
                }
                let put = self.layer.session().and_then(|session| session.put_records(&records[..count]));
                put.map(|()| Some(count == records.len()))
                    .map_err(|error| Ended::Failed(self.layer.fail(error)))
            })
            .inspect_err(|ended| self.layer.ended = Some(*ended))
    }

    fn ended(&mut self, ended: Ended, total: usize) -> TransferResult {
        self.layer.ended = Some(ended);
        match ended {
            _ if total > 0 => TransferResult::Bytes(total),
            Ended::Closed => TransferResult::Closed,
            Ended::Failed(kind) => TransferResult::Failed(kind),
        }
    }

    fn receive_parts(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let mut total = 0;
        // A read of the stream below that was short has emptied it.
        let mut is_drained = false;
        for part in parts {
            let mut at = 0;
            while at < part.len() {
                let read = self.layer.session().and_then(|session| session.read(&mut part[at..]));
                match read {
                    Ok(PlainRead::Bytes(count)) => {
                        at += count;
                        total += count;
                        self.layer.excess = self.layer.excess.saturating_sub(2 * count);
                    }
                    Ok(PlainRead::Closed) => return self.ended(Ended::Closed, total),
                    Err(error) => {
                        let kind = self.layer.fail(error);
                        return self.ended(Ended::Failed(kind), total);
                    }
                    Ok(PlainRead::Starved) => {
                        let filled = match is_drained {
                            true => Ok(None),
                            false => self.fill(),
                        };
                        match filled {
                            Ok(Some(more)) => is_drained = !more,
                            Ok(None) if total > 0 => return TransferResult::Bytes(total),
                            Ok(None) => return TransferResult::Blocked,
                            Err(ended) => return self.ended(ended, total),
                        }
                    }
                }
            }
        }
        TransferResult::Bytes(total)
    }

    /// Encrypts up to [`SEND_BYTES`] of the parts from byte `from`; returns how many.
    fn encrypt(&mut self, parts: &[IoSlice<'_>], from: usize) -> Result<usize, TlsError> {
        let session = self.layer.session()?;
        let mut skip = from;
        let mut taken = 0;
        JOINED.with_borrow_mut(|joined| {
            joined.clear();
            for part in parts {
                let skipped = skip.min(part.len());
                skip -= skipped;
                let mut rest = &part[skipped..];
                while !rest.is_empty() && taken < SEND_BYTES {
                    let count = rest.len().min(RECORD_BYTES - joined.len()).min(SEND_BYTES - taken);
                    taken += count;
                    // A record of its own need not be copied.
                    if joined.is_empty() && count == RECORD_BYTES {
                        session.write(&rest[..count])?;
                    } else {
                        joined.extend_from_slice(&rest[..count]);
                    }
                    rest = &rest[count..];
                    if joined.len() == RECORD_BYTES {
                        session.write(joined)?;
                        joined.clear();
                    }
                }
            }
            session.write(joined)?;
            Ok(taken)
        })
    }
}

impl<S: ByteStream> ByteStream for TlsStream<'_, S> {
    fn receive(&mut self, parts: &mut [IoSliceMut<'_>]) -> TransferResult {
        let result = self.receive_parts(parts);
        // Answers to KeyUpdate. A peer that requests keys without end and reads none of them is not served.
        if self.layer.session.as_ref().is_some_and(|session| session.records_len() > 0) {
            let flushed = self.layer.flush_to(self.below);
            if flushed == FlushStatus::Blocked && self.layer.unsent.len() > 2 * SEND_BYTES {
                let kind = self.layer.fail(TlsError(TlsFailure::UnreadAnswers));
                return self.ended(Ended::Failed(kind), 0);
            }
        }
        result
    }

    fn send(&mut self, parts: &[IoSlice<'_>]) -> TransferResult {
        let offered: usize = parts.iter().map(|part| part.len()).sum();
        let mut accepted = 0;
        loop {
            match self.layer.flush_to(self.below) {
                FlushStatus::Empty if accepted < offered => {}
                FlushStatus::Failed(kind) => return TransferResult::Failed(kind),
                FlushStatus::Empty | FlushStatus::Blocked => break,
            }
            match self.encrypt(parts, accepted) {
                Ok(count) => accepted += count,
                Err(error) => return TransferResult::Failed(self.layer.fail(error)),
            }
        }
        match accepted {
            0 if offered > 0 => TransferResult::Blocked,
            accepted => TransferResult::Bytes(accepted),
        }
    }

    fn flush(&mut self) -> FlushStatus {
        self.layer.flush_to(self.below)
    }
}
