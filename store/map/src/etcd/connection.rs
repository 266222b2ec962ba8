//! A connection to etcd's JSON gateway: requests and their answers, with a time limit.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::response::ResponseDecoder;

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
}

/// One of etcd's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// `HOST:PORT`, as in the URL.
    pub(super) authority: String,
}

/// A connection, on which one request after another is made.
pub(super) struct HttpConnection {
    stream: TcpStream,
    authority: String,
    /// What was received and not decoded.
    buffer: Vec<u8>,
    decoder: ResponseDecoder,
    body: Vec<u8>,
}

impl HttpConnection {
    /// Connects to the first address of the endpoint that accepts.
    pub(super) fn open(endpoint: &Endpoint, limit: Duration) -> Result<HttpConnection, HttpError> {
        let started = Instant::now();
        let mut failed = HttpError::Failed(io::ErrorKind::NotFound.into());
        for address in endpoint.authority.to_socket_addrs()? {
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(HttpError::TimedOut(limit));
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_write_timeout(Some(limit))?;
                    return Ok(HttpConnection {
                        stream,
                        authority: endpoint.authority.clone(),
                        buffer: Vec::new(),
                        decoder: ResponseDecoder::new(),
                        body: Vec::new(),
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    failed = HttpError::TimedOut(limit);
                }
                Err(error) => failed = error.into(),
            }
        }
        Err(failed)
    }

    /// Sends a request, with the value of its field `Authorization`.
    pub(super) fn send(
        &mut self,
        path: &str,
        authorization: Option<&str>,
        body: &[u8],
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
        self.stream.write_all(&[head.as_bytes(), body].concat())?;
        Ok(())
    }

    /// Waits for the whole answer. Returns its status and its body.
    pub(super) fn receive(&mut self, limit: Duration) -> Result<(u16, Vec<u8>), HttpError> {
        let deadline = Instant::now() + limit;
        loop {
            let is_open = self.read(deadline)?.ok_or(HttpError::TimedOut(limit))?;
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
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        self.stream.set_read_timeout(Some(left))?;
        let kept = self.buffer.len();
        self.buffer.resize(kept + READ_BYTES, 0);
        let count = self.stream.read(&mut self.buffer[kept..]);
        self.buffer.truncate(kept + *count.as_ref().unwrap_or(&0));
        match count {
            Ok(0) => return Ok(Some(false)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
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
