//! A connection to etcd's JSON gateway: requests and their answers, with a time limit.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::files::EtcdFileError;
use super::response::ResponseDecoder;
use super::tls::{TlsSettings, TlsStream};

/// Bytes read at a time.
const READ_BYTES: usize = 64 << 10;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("{0}")]
    Failed(#[from] io::Error),
    #[error("it did not answer within {} ms", .0.as_millis())]
    TimedOut(Duration),
    #[error("it closed the connection before the end of its answer")]
    Truncated,
    #[error("its answer is malformed: {0}")]
    Malformed(&'static str),
    #[error("its answer has more than {0} bytes")]
    TooLarge(usize),
    #[error("it does not take the request")]
    NotSent,
    #[error("the handshake takes too long")]
    SlowHandshake,
    #[error("{0}")]
    Tls(String),
    #[error("{0}")]
    File(#[from] EtcdFileError),
}

impl HttpError {
    /// Whether the endpoint said nothing in the time that it had.
    pub(super) fn is_silence(&self) -> bool {
        matches!(self, HttpError::TimedOut(_) | HttpError::NotSent | HttpError::SlowHandshake)
    }
}

/// One of etcd's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// `HOST:PORT`, as in the URL.
    pub(super) authority: String,
}

impl Endpoint {
    /// The host, as a certificate has it.
    fn host(&self) -> &str {
        let host = self.authority.rsplit_once(':').map_or(&*self.authority, |(host, _)| host);
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }
}

/// The time until a deadline, if there is any.
pub(super) fn time_left(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}

enum Transport {
    Plain(TcpStream),
    Tls(TlsStream),
}

impl Transport {
    fn write_all(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), HttpError> {
        match self {
            Transport::Plain(socket) => {
                socket.set_write_timeout(Some(time_left(deadline).ok_or(HttpError::NotSent)?))?;
                Ok(socket.write_all(bytes)?)
            }
            Transport::Tls(stream) => stream.write_all(bytes, deadline),
        }
    }

    /// As of a socket: 0 bytes are the end. `None` at the deadline.
    fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> Result<Option<usize>, HttpError> {
        let socket = match self {
            Transport::Plain(socket) => socket,
            Transport::Tls(stream) => return stream.read(buffer, deadline),
        };
        while let Some(left) = time_left(deadline) {
            socket.set_read_timeout(Some(left))?;
            match socket.read(buffer) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

/// A connection, on which one request after another is made.
pub(super) struct HttpConnection {
    transport: Transport,
    authority: String,
    /// What was received and not decoded.
    buffer: Vec<u8>,
    decoder: ResponseDecoder,
    body: Vec<u8>,
}

impl HttpConnection {
    /// Connects to the first address of the endpoint that accepts, and makes the handshake of TLS.
    pub(super) fn open(
        endpoint: &Endpoint,
        tls: Option<&TlsSettings>,
        limit: Duration,
    ) -> Result<HttpConnection, HttpError> {
        let deadline = Instant::now() + limit;
        let socket = connect(endpoint, deadline, limit)?;
        socket.set_nodelay(true)?;
        let transport = match tls {
            None => Transport::Plain(socket),
            Some(tls) => Transport::Tls(TlsStream::open(socket, tls, endpoint.host(), deadline)?),
        };
        Ok(HttpConnection {
            transport,
            authority: endpoint.authority.clone(),
            buffer: Vec::new(),
            decoder: ResponseDecoder::new(),
            body: Vec::new(),
        })
    }

    /// Sends a request, with the value of its field `Authorization`.
    pub(super) fn send(
        &mut self,
        path: &str,
        authorization: Option<&str>,
        body: &[u8],
        limit: Duration,
    ) -> Result<(), HttpError> {
        self.decoder = ResponseDecoder::new();
        self.body.clear();
        let authorization = authorization.map(|value| format!("Authorization: {value}\r\n"));
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n",
            self.authority,
            body.len(),
            authorization.unwrap_or_default()
        );
        self.transport.write_all(&[head.as_bytes(), body].concat(), Instant::now() + limit)
    }

    /// Waits for the whole answer, `limit` for its first bytes and `limit_of_all` for all of it. Returns its
    /// status and its body.
    pub(super) fn receive(
        &mut self,
        limit: Duration,
        limit_of_all: Duration,
    ) -> Result<(u16, Vec<u8>), HttpError> {
        let sent = Instant::now();
        let mut limit = limit;
        loop {
            let is_open = self.read(sent + limit)?.ok_or(HttpError::TimedOut(limit))?;
            limit = limit_of_all;
            if self.decoder.is_done() || (!is_open && self.decoder.ends_with_connection()) {
                return Ok((self.decoder.status(), std::mem::take(&mut self.body)));
            }
            if !is_open {
                return Err(HttpError::Truncated);
            }
        }
    }

    /// Waits for the next line of an answer that does not end; `None` if there is none in this time.
    pub(super) fn receive_line(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, HttpError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(end) = self.body.iter().position(|byte| *byte == b'\n') {
                let rest = self.body.split_off(end + 1);
                return Ok(Some(std::mem::replace(&mut self.body, rest)));
            }
            if self.decoder.is_done() {
                return Err(HttpError::Truncated);
            }
            match self.read(deadline)? {
                None => return Ok(None),
                Some(true) => {}
                Some(false) => return Err(HttpError::Truncated),
            }
        }
    }

    /// Whether the answer's status says success; `None` before it arrived.
    pub(super) fn is_success(&self) -> Option<bool> {
        self.decoder.has_head().then(|| self.decoder.status() == 200)
    }

    /// Reads once and decodes. Returns whether the connection is open; `None` at the deadline.
    fn read(&mut self, deadline: Instant) -> Result<Option<bool>, HttpError> {
        let kept = self.buffer.len();
        self.buffer.resize(kept + READ_BYTES, 0);
        let count = self.transport.read(&mut self.buffer[kept..], deadline);
        self.buffer.truncate(kept + count.as_ref().ok().copied().flatten().unwrap_or(0));
        match count? {
            None => return Ok(None),
            Some(0) => return Ok(Some(false)),
            Some(_) => {}
        }
        let taken = self.decoder.decode(&self.buffer, &mut self.body)?;
        self.buffer.drain(..taken);
        Ok(Some(true))
    }

    /// Whether another request may follow.
    pub(super) fn is_reusable(&self) -> bool {
        self.decoder.keeps_connection() && self.buffer.is_empty()
    }
}

fn connect(endpoint: &Endpoint, deadline: Instant, limit: Duration) -> Result<TcpStream, HttpError> {
    let mut failed = HttpError::Failed(io::ErrorKind::NotFound.into());
    for address in endpoint.authority.to_socket_addrs()? {
        let left = time_left(deadline).ok_or(HttpError::TimedOut(limit))?;
        match TcpStream::connect_timeout(&address, left) {
            Ok(socket) => return Ok(socket),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => failed = HttpError::TimedOut(limit),
            Err(error) => failed = error.into(),
        }
    }
    Err(failed)
}
