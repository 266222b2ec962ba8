//! From bytes to PDUs.

use std::io::{ErrorKind, IoSliceMut};

use net::{ConnectionId, Network, Transfer};
use wire_nvme::digest::{self, Crc32c, crc32c};
use wire_nvme::tcp::{COMMON_SIZE, CommonHeader, Fatal, FatalStatus, Framing, Layout, PduType};

/// Longest start of a PDU up to its data: PDO is one byte.
const PREFIX_MAX: usize = 256;

/// Where a PDU's data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Where [`Consumer::place`] says.
    Here,
    /// Nowhere: it is read and thrown away.
    Nowhere,
    /// There is no room for this PDU yet. Nothing more is taken until [`Receiver::resume`], which
    /// offers the same header again.
    Wait,
}

/// How far a call to the receiver came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Everything was taken in.
    Ready,
    /// The consumer has no room; what was not taken is kept. Read no more until it has.
    Waiting,
}

/// Whoever PDUs are for.
pub trait Consumer {
    /// A header has arrived and its digest was right. `header` is without digest and padding.
    ///
    /// # Errors
    /// What is wrong with it, to end the connection with.
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal>;

    /// Where the data of the current PDU from `offset` on goes: exactly `length` bytes.
    fn place(&mut self, offset: usize, length: usize) -> &mut [u8];

    /// The PDU is complete. `digest_ok` is false if its data did not match its data digest, which
    /// ends the command, not the connection (TCP 1.0, section 3.3.1.2).
    ///
    /// # Errors
    /// What is wrong with it, to end the connection with.
    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal>;
}

/// Cuts a stream into PDUs.
pub struct Receiver {
    framing: Framing,
    state: State,
    /// The start of a PDU that came in pieces, or that waits, or that was wrong.
    prefix: [u8; PREFIX_MAX],
    prefix_length: usize,
    layout: Layout,
    placed: bool,
    received: usize,
    crc: Crc32c,
    trailer: [u8; digest::SIZE],
    /// What arrived behind a PDU that waits.
    backlog: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Prefix,
    Waiting,
    Data,
    Trailer,
}

const NO_LAYOUT: Layout = Layout {
    header_length: 0,
    header_digest: false,
    data_offset: 0,
    data_length: 0,
    data_digest: false,
    length: 0,
};

impl Default for Receiver {
    fn default() -> Self {
        Receiver {
            framing: Framing::PLAIN,
            state: State::Prefix,
            prefix: [0; PREFIX_MAX],
            prefix_length: 0,
            layout: NO_LAYOUT,
            placed: false,
            received: 0,
            crc: Crc32c::new(),
            trailer: [0; digest::SIZE],
            backlog: Vec::new(),
        }
    }
}

impl Receiver {
    /// Sets what was agreed on for PDUs from now on. May be called from [`Consumer::header`]'s PDU
    /// on, after [`consume`](Self::consume) returned, never in the middle of one.
    pub fn set_framing(&mut self, framing: Framing) {
        self.framing = framing;
    }

    /// Where the next bytes of the current PDU's data go, if that is known; else empty.
    #[inline]
    pub fn direct<'c>(&self, consumer: &'c mut impl Consumer) -> &'c mut [u8] {
        if self.state != State::Data || !self.placed {
            return &mut [];
        }
        let left = self.layout.data_length as usize - self.received;
        consumer.place(self.received, left)
    }

    /// `count` bytes were read into [`direct`](Self::direct)'s slice.
    #[inline]
    pub fn advance(&mut self, count: usize, consumer: &mut impl Consumer) -> Result<(), Fatal> {
        if count == 0 {
            return Ok(());
        }
        if self.layout.data_digest {
            self.crc.update(consumer.place(self.received, count));
        }
        self.received += count;
        if self.received == self.layout.data_length as usize { self.data_complete(consumer) } else { Ok(()) }
    }

    /// Takes in bytes that follow those of all calls before.
    ///
    /// # Errors
    /// What is wrong with the PDU whose header [`header_in_error`](Self::header_in_error) gives. The
    /// receiver is of no more use.
    pub fn consume(&mut self, mut bytes: &[u8], consumer: &mut impl Consumer) -> Result<Progress, Fatal> {
        while !bytes.is_empty() {
            let taken = match self.state {
                State::Prefix => self.take_prefix(bytes, consumer)?,
                State::Data => self.take_data(bytes, consumer)?,
                State::Trailer => self.take_trailer(bytes, consumer)?,
                State::Waiting => {
                    self.backlog.extend_from_slice(bytes);
                    return Ok(Progress::Waiting);
                }
            };
            bytes = &bytes[taken..];
        }
        Ok(if self.state == State::Waiting { Progress::Waiting } else { Progress::Ready })
    }

    /// Offers the PDU that waits again, and takes in what was kept behind it.
    ///
    /// # Errors
    /// As [`consume`](Self::consume).
    pub fn resume(&mut self, consumer: &mut impl Consumer) -> Result<Progress, Fatal> {
        if self.state != State::Waiting {
            return Ok(Progress::Ready);
        }
        self.state = State::Prefix;
        let prefix = self.prefix;
        let length = std::mem::take(&mut self.prefix_length);
        self.whole_prefix(&prefix[..length], consumer)?;
        if self.state == State::Waiting {
            return Ok(Progress::Waiting);
        }
        let kept = std::mem::take(&mut self.backlog);
        self.consume(&kept, consumer)
    }

    /// Bytes to read beyond the current PDU's data, out of `most`.
    ///
    /// What is read there is copied once more. With small PDUs that is cheaper than a system call for
    /// each; behind a large one, only the next header is wanted.
    fn read_ahead(&self, most: usize) -> usize {
        if self.layout.data_length < LARGE_BYTES { most } else { most.min(READ_AHEAD_LARGE_BYTES) }
    }

    /// Whether a PDU waits for room.
    pub fn is_waiting(&self) -> bool {
        self.state == State::Waiting
    }

    /// Whether no PDU is half received.
    pub fn is_between_pdus(&self) -> bool {
        self.state == State::Prefix && self.prefix_length == 0
    }

    /// The header of the PDU that was at fault, as far as it arrived.
    pub fn header_in_error(&self) -> &[u8] {
        &self.prefix[..self.prefix_length.min(wire_nvme::tcp::HEADER_MAX)]
    }

    /// Takes from `bytes` what completes the start of a PDU, up to its data.
    #[inline]
    fn take_prefix(&mut self, bytes: &[u8], consumer: &mut impl Consumer) -> Result<usize, Fatal> {
        if self.prefix_length == 0
            && let Some(common) = bytes.first_chunk::<COMMON_SIZE>()
        {
            // The usual case: all of it is here, and is read where it lies.
            let needed = self.measure(common)?;
            if let Some(prefix) = bytes.get(..needed) {
                self.whole_prefix(prefix, consumer)?;
                return Ok(needed);
            }
        }
        let mut taken = 0;
        if self.prefix_length < COMMON_SIZE {
            taken = self.gather(bytes, COMMON_SIZE);
            if self.prefix_length < COMMON_SIZE {
                return Ok(taken);
            }
        }
        let common =
            *self.prefix.first_chunk::<COMMON_SIZE>().expect("a prefix is longer than a common header");
        let needed = self.measure(&common)?;
        taken += self.gather(&bytes[taken..], needed);
        if self.prefix_length == needed {
            let prefix = self.prefix;
            self.prefix_length = 0;
            self.whole_prefix(&prefix[..needed], consumer)?;
        }
        Ok(taken)
    }

    fn gather(&mut self, bytes: &[u8], until: usize) -> usize {
        let count = bytes.len().min(until - self.prefix_length);
        self.prefix[self.prefix_length..self.prefix_length + count].copy_from_slice(&bytes[..count]);
        self.prefix_length += count;
        count
    }

    /// Bytes up to the data, from the common header; keeps the layout.
    #[inline]
    fn measure(&mut self, common: &[u8; COMMON_SIZE]) -> Result<usize, Fatal> {
        let layout = CommonHeader::decode(common).and_then(|header| header.layout(&self.framing));
        match layout {
            Ok(layout) => {
                self.layout = layout;
                Ok(layout.prefix_length())
            }
            Err(fatal) => {
                self.keep(common);
                Err(fatal)
            }
        }
    }

    fn keep(&mut self, prefix: &[u8]) {
        self.prefix[..prefix.len()].copy_from_slice(prefix);
        self.prefix_length = prefix.len();
    }

    #[inline]
    fn whole_prefix(&mut self, prefix: &[u8], consumer: &mut impl Consumer) -> Result<(), Fatal> {
        let header_length = usize::from(self.layout.header_length);
        let (header, rest) = prefix.split_at(header_length);
        if self.layout.header_digest {
            let expected = rest.first_chunk::<{ digest::SIZE }>().expect("the layout counts the digest");
            let expected = u32::from_le_bytes(*expected);
            if crc32c(header) != expected {
                self.keep(header);
                // The information is the digest that came (TCP 1.0, section 3.6.2).
                return Err(Fatal { status: FatalStatus::HeaderDigestError, information: expected });
            }
        }
        let Some(kind) = PduType::from_u8(header[0]) else {
            unreachable!("the common header was decoded when the prefix was measured")
        };
        let place = match consumer.header(kind, header, &self.layout) {
            Ok(place) => place,
            Err(fatal) => {
                self.keep(header);
                return Err(fatal);
            }
        };
        if place == Place::Wait {
            self.keep(prefix);
            self.state = State::Waiting;
            return Ok(());
        }
        if self.layout.data_length == 0 {
            return consumer.end(true);
        }
        self.placed = place == Place::Here;
        self.received = 0;
        self.crc = Crc32c::new();
        self.state = State::Data;
        Ok(())
    }

    #[inline]
    fn take_data(&mut self, bytes: &[u8], consumer: &mut impl Consumer) -> Result<usize, Fatal> {
        let count = bytes.len().min(self.layout.data_length as usize - self.received);
        let bytes = &bytes[..count];
        if self.placed {
            consumer.place(self.received, count).copy_from_slice(bytes);
        }
        if self.layout.data_digest {
            self.crc.update(bytes);
        }
        self.received += count;
        if self.received == self.layout.data_length as usize {
            self.data_complete(consumer)?;
        }
        Ok(count)
    }

    fn data_complete(&mut self, consumer: &mut impl Consumer) -> Result<(), Fatal> {
        if self.layout.data_digest {
            self.state = State::Trailer;
            self.received = 0;
            return Ok(());
        }
        self.state = State::Prefix;
        consumer.end(true)
    }

    fn take_trailer(&mut self, bytes: &[u8], consumer: &mut impl Consumer) -> Result<usize, Fatal> {
        let count = bytes.len().min(digest::SIZE - self.received);
        self.trailer[self.received..self.received + count].copy_from_slice(&bytes[..count]);
        self.received += count;
        if self.received == digest::SIZE {
            self.state = State::Prefix;
            consumer.end(self.crc.value() == u32::from_le_bytes(self.trailer))?;
        }
        Ok(count)
    }
}

/// How [`pump`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    /// Everything that had arrived was taken in.
    Drained,
    /// More may have arrived; call again.
    More,
    /// The consumer has no room; call again when it has.
    Waiting,
    /// The peer has closed its end.
    Closed,
    /// The connection is broken.
    Failed(ErrorKind),
}

/// From so many bytes of data on, a PDU is worth a system call of its own.
const LARGE_BYTES: u32 = 32 << 10;
/// Read behind the data of a large PDU: the next header and a little.
const READ_AHEAD_LARGE_BYTES: usize = 4096;

/// Reads taken in one call, so that one busy connection does not starve the others.
const READS_MAX: usize = 16;

/// Takes in what has arrived on a connection: data of the current PDU straight into its place, the
/// rest by way of `scratch`.
///
/// # Errors
/// As [`Receiver::consume`].
pub fn pump<N: Network>(
    receiver: &mut Receiver,
    consumer: &mut impl Consumer,
    network: &mut N,
    connection: ConnectionId,
    scratch: &mut [u8],
) -> Result<Pumped, Fatal> {
    if receiver.is_waiting() && receiver.resume(consumer)? == Progress::Waiting {
        return Ok(Pumped::Waiting);
    }
    for _ in 0..READS_MAX {
        let ahead = receiver.read_ahead(scratch.len());
        let scratch = &mut scratch[..ahead];
        let direct = receiver.direct(consumer);
        let direct_length = direct.len();
        let asked = direct_length + scratch.len();
        let transfer = if direct_length == 0 {
            network.receive(connection, &mut [IoSliceMut::new(scratch)])
        } else {
            network.receive(connection, &mut [IoSliceMut::new(direct), IoSliceMut::new(scratch)])
        };
        let count = match transfer {
            Transfer::Bytes(count) => count,
            Transfer::Blocked => return Ok(Pumped::Drained),
            Transfer::Closed => return Ok(Pumped::Closed),
            Transfer::Failed(kind) => return Ok(Pumped::Failed(kind)),
        };
        let placed = count.min(direct_length);
        receiver.advance(placed, consumer)?;
        if receiver.consume(&scratch[..count - placed], consumer)? == Progress::Waiting {
            return Ok(Pumped::Waiting);
        }
        if count < asked {
            return Ok(Pumped::Drained);
        }
    }
    Ok(Pumped::More)
}
