//! Answers of an HTTP/1.1 server (RFC 9112), sans-IO: bytes in, body out.

use crate::etcd::HttpError;

/// Most bytes of the status line and the header fields.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Most bytes of a body that are not taken yet. A page of a range has at most [`super::client::PAGE_RECORDS`] records.
pub(super) const BODY_BYTES_MAX: usize = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    StatusLine,
    Fields,
    /// Bytes of the body that are missing.
    Length(u64),
    ChunkSize,
    Chunk(u64),
    ChunkEnd,
    Trailer,
    UntilClose,
    Done,
}

/// Decodes one answer.
pub(super) struct ResponseDecoder {
    state: ParserState,
    status: u16,
    head_bytes: usize,
    length: Option<u64>,
    is_chunked: bool,
    closes: bool,
}

impl ResponseDecoder {
    pub(super) fn new() -> ResponseDecoder {
        let state = ParserState::StatusLine;
        ResponseDecoder { state, status: 0, head_bytes: 0, length: None, is_chunked: false, closes: false }
    }

    /// Takes bytes, and appends those of the body to `body`. Returns how many it took; the rest is to be offered again
    /// with what follows it.
    pub(super) fn decode(&mut self, input: &[u8], body: &mut Vec<u8>) -> Result<usize, HttpError> {
        let mut taken = 0;
        loop {
            let rest = &input[taken..];
            let wanted = match self.state {
                ParserState::Done => return Ok(taken),
                ParserState::Length(0) => {
                    self.state = ParserState::Done;
                    continue;
                }
                ParserState::Length(missing) | ParserState::Chunk(missing) => {
                    missing.min(rest.len() as u64) as usize
                }
                ParserState::UntilClose => rest.len(),
                _ => {
                    let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
                        let too_long = self.head_bytes + rest.len() > HEAD_BYTES_MAX;
                        return if too_long { Err(HttpError::TooLarge(HEAD_BYTES_MAX)) } else { Ok(taken) };
                    };
                    taken += end + 1;
                    let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
                    self.take_line(line)?;
                    continue;
                }
            };
            if body.len() + wanted > BODY_BYTES_MAX {
                return Err(HttpError::TooLarge(BODY_BYTES_MAX));
            }
            body.extend_from_slice(&rest[..wanted]);
            taken += wanted;
            match &mut self.state {
                ParserState::Length(missing) => *missing -= wanted as u64,
                ParserState::Chunk(missing) => {
                    *missing -= wanted as u64;
                    if *missing == 0 {
                        self.state = ParserState::ChunkEnd;
                        continue;
                    }
                }
                _ => {}
            }
            if taken == input.len() && self.state != ParserState::Length(0) {
                return Ok(taken);
            }
        }
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), HttpError> {
        let malformed = |what| Err(HttpError::Malformed(what));
        match self.state {
            ParserState::StatusLine => {
                let text = str::from_utf8(line).unwrap_or_default();
                let status = text.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
                let Some(status) = status.filter(|status| (100..600).contains(status)) else {
                    return malformed("its first line is no status of HTTP/1.1");
                };
                (self.status, self.state) = (status, ParserState::Fields);
                self.closes = text.starts_with("HTTP/1.0");
            }
            ParserState::Fields => {
                self.head_bytes += line.len() + 2;
                if self.head_bytes > HEAD_BYTES_MAX {
                    return Err(HttpError::TooLarge(HEAD_BYTES_MAX));
                }
                if line.is_empty() {
                    self.state = self.body_state();
                } else {
                    return self.take_field(line);
                }
            }
            ParserState::ChunkSize => {
                let size = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
                let size = str::from_utf8(size).ok().filter(|size| size.len() <= 8);
                let Some(size) = size.and_then(|size| u64::from_str_radix(size, 16).ok()) else {
                    return malformed("a chunk has no size");
                };
                self.state = if size == 0 { ParserState::Trailer } else { ParserState::Chunk(size) };
            }
            ParserState::ChunkEnd if line.is_empty() => self.state = ParserState::ChunkSize,
            ParserState::ChunkEnd => return malformed("a chunk is longer than its size"),
            ParserState::Trailer if line.is_empty() => self.state = ParserState::Done,
            // Trailer fields say nothing that is needed.
            _ => self.head_bytes += line.len() + 2,
        }
        if self.head_bytes > HEAD_BYTES_MAX {
            return Err(HttpError::TooLarge(HEAD_BYTES_MAX));
        }
        Ok(())
    }

    fn take_field(&mut self, line: &[u8]) -> Result<(), HttpError> {
        let line = str::from_utf8(line).map_err(|_| HttpError::Malformed("a header field is no text"))?;
        let (name, value) = line.split_once(':').ok_or(HttpError::Malformed("a header field has no name"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().map_err(|_| HttpError::Malformed("its length is no number"))?;
            if self.length.replace(length).is_some_and(|earlier| earlier != length) {
                return Err(HttpError::Malformed("it has two lengths"));
            }
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            if !value.eq_ignore_ascii_case("chunked") {
                return Err(HttpError::Malformed("its transfer encoding is not `chunked`"));
            }
            self.is_chunked = true;
        } else if name.eq_ignore_ascii_case("connection") {
            self.closes |= value.eq_ignore_ascii_case("close");
        }
        Ok(())
    }

    /// What follows the header fields (RFC 9112, 6.3).
    fn body_state(&mut self) -> ParserState {
        if (100..200).contains(&self.status) {
            *self = ResponseDecoder::new();
            return ParserState::StatusLine;
        }
        match self.length {
            _ if self.status == 204 || self.status == 304 => ParserState::Done,
            _ if self.is_chunked => ParserState::ChunkSize,
            Some(length) => ParserState::Length(length),
            None => {
                self.closes = true;
                ParserState::UntilClose
            }
        }
    }

    /// The status; 0 before it arrived.
    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// Whether the header fields have arrived.
    pub(super) fn has_head(&self) -> bool {
        !matches!(self.state, ParserState::StatusLine | ParserState::Fields)
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == ParserState::Done
    }

    /// The peer closed the connection. Whether the answer is whole.
    pub(super) fn ends_with_connection(&self) -> bool {
        matches!(self.state, ParserState::Done | ParserState::UntilClose)
    }

    /// Whether another request may follow on the connection.
    pub(super) fn keeps_connection(&self) -> bool {
        self.is_done() && !self.closes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes an answer that arrives in pieces.
    fn decode(answer: &[u8], piece: usize) -> Result<(u16, Vec<u8>, bool, bool), String> {
        let (mut decoder, mut body, mut buffer) = (ResponseDecoder::new(), Vec::new(), Vec::new());
        for piece in answer.chunks(piece) {
            buffer.extend_from_slice(piece);
            let taken = decoder.decode(&buffer, &mut body).map_err(|error| error.to_string())?;
            buffer.drain(..taken);
        }
        Ok((decoder.status(), body, decoder.is_done(), decoder.keeps_connection()))
    }

    #[test]
    fn answers_are_decoded_whatever_pieces_they_arrive_in() {
        let body = || b"{\"a\":1}".to_vec();
        let cases: [(&[u8], _); 6] = [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}", (200, body(), true, true)),
            (
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n3\r\n{\"a\r\n4;x=y\r\n\":1}\r\n0\r\nGrpc: 1\r\n\r\n",
                (200, body(), true, true),
            ),
            (b"HTTP/1.1 503 No\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", (503, vec![], true, false)),
            (b"HTTP/1.0 200 OK\r\n\r\n{\"a\":1}", (200, body(), false, false)),
            (
                b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{\"a\":1}",
                (200, body(), true, true),
            ),
            // Truncated.
            (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"a\":1}", (200, body(), false, false)),
        ];
        for (answer, expected) in cases {
            for piece in [1, 2, 3, 7, 1000] {
                assert_eq!(decode(answer, piece), Ok(expected.clone()), "{}", answer.escape_ascii());
            }
        }
    }

    #[test]
    fn malformed_and_endless_answers_are_errors() {
        let endless_field = [&b"HTTP/1.1 200 OK\r\nA: "[..], &vec![b'x'; 20 << 10]].concat();
        let endless_fields = [&b"HTTP/1.1 200 OK\r\n"[..], &b"A: b\r\n".repeat(4 << 10)].concat();
        let too_long = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", u64::MAX);
        let too_long = [too_long.as_bytes(), &vec![0; BODY_BYTES_MAX + 1]].concat();
        let cases: [(&[u8], &str); 9] = [
            (b"SSH-2.0-OpenSSH\r\n", "no status"),
            (b"HTTP/1.1 999 ?\r\n", "no status"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "length is no number"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "two lengths"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no size"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"),
            (&endless_field, "more than 16384 bytes"),
            (&endless_fields, "more than 16384 bytes"),
            (&too_long, "more than 16777216 bytes"),
        ];
        for (answer, reason) in cases {
            let error = decode(answer, 4096).unwrap_err();
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }

    #[test]
    fn any_bytes_are_an_answer_or_an_error() {
        let mut rng = random::WyRand::new(1);
        let parts: [&[u8]; 9] = [
            b"HTTP/1.1 200 OK\r\n",
            b"Content-Length: 12\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"\r\n",
            b"5\r\n",
            b"0\r\n",
            b"hello",
            b"\n",
            b"HTTP/1.1 100 \r\n",
        ];
        for _ in 0..20_000 {
            let mut answer = Vec::new();
            for _ in 0..rng.below(12) {
                answer.extend_from_slice(parts[rng.index(parts.len())]);
            }
            if rng.below(2) == 0 && !answer.is_empty() {
                let at = rng.index(answer.len());
                answer[at] = rng.below(256) as u8;
            }
            let whole = decode(&answer, answer.len().max(1));
            assert_eq!(decode(&answer, 1), whole, "{}", answer.escape_ascii());
        }
    }
}
