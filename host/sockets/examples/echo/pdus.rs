//! The least target and client of NVMe/TCP: they do what its framing demands of both ends, and nothing more.
//!
//! Each end looks at every header and finds the command by its CID; each message has a header of its own and its data in
//! the buffer of its command, all in one call to send. There are no devices, no checks beyond a PDU's type and length,
//! and no data is set. With `parts+copy` the receiver of the data has it in the buffers of the commands, as a host needs it,
//! and otherwise leaves it in its receive buffer.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use super::{DATA, EchoError, MessageEnd, MessageShape, received};

/// Offsets in a PDU: type, and the length of the whole PDU (TCP 1.0, section 3.6.1).
const TYPE: usize = 0;
const PLEN: usize = 4;
/// Most parts of one call to send (UIO_MAXIOV).
const PARTS_MAX: usize = 1024;
/// What an end receives at a time beyond the rest of a command's data: as much as the driver.
const RECEIVE_BYTES: usize = 48 << 10;

/// A kind of PDU.
#[derive(Clone, Copy)]
pub(super) struct PduKind {
    kind: u8,
    /// Offset of the CID: in the submission queue entry of a command capsule, in the header of C2HData, and in the
    /// completion queue entry of a response capsule.
    cid_at: usize,
}

pub(super) const COMMAND: PduKind = PduKind { kind: 4, cid_at: 8 + 2 };
const RESPONSE: PduKind = PduKind { kind: 5, cid_at: 8 + 12 };
const DATA_TO_HOST: PduKind = PduKind { kind: 7, cid_at: 8 };

impl PduKind {
    /// What answers a command: its data, with the flag that it has succeeded, or a response capsule.
    pub(super) fn answer(shape: MessageShape) -> PduKind {
        if shape.has_data { DATA_TO_HOST } else { RESPONSE }
    }
}

/// One direction's PDUs.
#[derive(Clone, Copy)]
pub(super) struct PduStream {
    pub(super) kind: PduKind,
    pub(super) shape: MessageShape,
}

/// One end of the connection.
pub(super) struct PduEnd {
    stream: TcpStream,
    incoming: PduStream,
    outgoing: PduStream,
    copies: bool,
    received: Vec<u8>,
    /// A header of which a part has arrived.
    header: Vec<u8>,
    /// The command of the data that arrives, and how much of it has not.
    command: usize,
    data_left: usize,
    /// A buffer for each command.
    data: Vec<u8>,
    headers: Vec<u8>,
    /// Commands whose PDU has arrived whole.
    complete: Vec<u16>,
}

impl PduEnd {
    /// With `copies`, received data is copied to the buffers of the commands.
    pub(super) fn new(
        stream: TcpStream,
        incoming: PduStream,
        outgoing: PduStream,
        depth: usize,
        copies: bool,
    ) -> Result<PduEnd, EchoError> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut header = vec![0; outgoing.shape.header];
        header[TYPE] = outgoing.kind.kind;
        header[PLEN..PLEN + 4].copy_from_slice(&(outgoing.shape.length() as u32).to_le_bytes());
        Ok(PduEnd {
            stream,
            incoming,
            outgoing,
            copies,
            received: vec![0; RECEIVE_BYTES],
            header: Vec::with_capacity(incoming.shape.header),
            command: 0,
            data_left: 0,
            // Data other than zeros.
            data: (0..depth * DATA).map(|at| at as u8).collect(),
            headers: header.repeat(depth),
            complete: Vec::with_capacity(depth),
        })
    }

    /// So many bytes of the current command's data are where they belong.
    fn pass_data(&mut self, count: usize) {
        self.data_left -= count;
        if count > 0 && self.data_left == 0 {
            self.complete.push(self.command as u16);
        }
    }

    fn parse(&mut self, mut bytes: &[u8]) -> Result<(), EchoError> {
        let length = self.incoming.shape.header;
        while !bytes.is_empty() {
            if self.data_left > 0 {
                let (data, rest) = bytes.split_at(self.data_left.min(bytes.len()));
                if self.copies {
                    let at = self.command * DATA + DATA - self.data_left;
                    self.data[at..at + data.len()].copy_from_slice(data);
                }
                self.pass_data(data.len());
                bytes = rest;
            } else if self.header.is_empty() && bytes.len() >= length {
                let (header, rest) = bytes.split_at(length);
                self.begin(header)?;
                bytes = rest;
            } else {
                let (part, rest) = bytes.split_at((length - self.header.len()).min(bytes.len()));
                self.header.extend_from_slice(part);
                bytes = rest;
                if self.header.len() == length {
                    let header = std::mem::take(&mut self.header);
                    self.begin(&header)?;
                    self.header = header;
                    self.header.clear();
                }
            }
        }
        Ok(())
    }

    /// A header has arrived.
    fn begin(&mut self, header: &[u8]) -> Result<(), EchoError> {
        let PduStream { kind, shape } = self.incoming;
        let word = |at| header[at..at + 4].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        if header[TYPE] != kind.kind || word(PLEN) != Some(shape.length() as u32) {
            return Err("a PDU of another type or length".into());
        }
        let cid = u16::from_le_bytes([header[kind.cid_at], header[kind.cid_at + 1]]);
        if usize::from(cid) * DATA >= self.data.len() {
            return Err("a PDU of an unknown command".into());
        }
        (self.command, self.data_left) = (cid.into(), shape.data_length());
        if self.data_left == 0 {
            self.complete.push(cid);
        }
        Ok(())
    }

    /// Sends the PDUs of these commands with one call, or as many as the socket's buffer takes.
    fn send_commands(&mut self, commands: &[u16]) -> Result<(), EchoError> {
        let PduStream { kind, shape } = self.outgoing;
        let headers = &mut self.headers[..commands.len() * shape.header];
        for (header, cid) in headers.chunks_exact_mut(shape.header).zip(commands) {
            header[kind.cid_at..kind.cid_at + 2].copy_from_slice(&cid.to_le_bytes());
        }
        if !shape.has_data {
            return send_all(&mut self.stream, &mut [IoSlice::new(headers)]);
        }
        let mut parts = Vec::with_capacity(2 * commands.len());
        for (header, cid) in headers.chunks_exact(shape.header).zip(commands) {
            let at = usize::from(*cid) * DATA;
            parts.extend([IoSlice::new(header), IoSlice::new(&self.data[at..at + DATA])]);
        }
        send_all(&mut self.stream, &mut parts)
    }
}

impl MessageEnd for PduEnd {
    fn start(&mut self, depth: usize) -> Result<(), EchoError> {
        let commands: Vec<u16> = (0..depth as u16).collect();
        self.send_commands(&commands)
    }

    fn receive(&mut self) -> Result<Option<usize>, EchoError> {
        self.complete.clear();
        let direct = if self.copies { self.data_left } else { 0 };
        let at = self.command * DATA + DATA - self.data_left;
        let mut parts =
            [IoSliceMut::new(&mut self.data[at..at + direct]), IoSliceMut::new(&mut self.received)];
        let parts = if direct == 0 { &mut parts[1..] } else { &mut parts[..] };
        let Some(count) = received(self.stream.read_vectored(parts))? else { return Ok(None) };
        let in_place = count.min(direct);
        self.pass_data(in_place);
        let bytes = std::mem::take(&mut self.received);
        let parsed = self.parse(&bytes[..count - in_place]);
        self.received = bytes;
        parsed?;
        Ok(Some(self.complete.len()))
    }

    /// Sends the PDUs of the commands that are complete.
    fn answer(&mut self, _count: usize) -> Result<(), EchoError> {
        let complete = std::mem::take(&mut self.complete);
        let sent = self.send_commands(&complete);
        self.complete = complete;
        sent
    }
}

fn send_all(stream: &mut TcpStream, mut parts: &mut [IoSlice<'_>]) -> Result<(), EchoError> {
    while !parts.is_empty() {
        let count = parts.len().min(PARTS_MAX);
        match stream.write_vectored(&parts[..count]) {
            Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
