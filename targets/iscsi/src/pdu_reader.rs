//! PDUs of the initiator, from bytes: header, additional segments, digests and data.

use codec::Crc32c;
use target_shell::ReceiveBuffer;
use wire_iscsi::{BasicHeader, DIGEST_BYTES, HEADER_BYTES, padded};

use crate::failure::IscsiViolation;
use crate::limits::{RECEIVE_BYTES, RECEIVE_DATA_MAX};

/// Additional header segments have at most 255 words.
const AHS_BYTES_MAX: usize = 255 * 4;
const _: () = assert!(HEADER_BYTES + AHS_BYTES_MAX + DIGEST_BYTES <= RECEIVE_BYTES);

/// Where the reader is in a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Before the end of the header.
    Header,
    /// In the data, which belongs to the consumer.
    Data,
    /// Before the end of padding and data digest.
    Trailer,
}

/// Divides a stream of bytes into PDUs.
///
/// [`read_header`](Self::read_header) gives a header; then the consumer takes the data, from
/// [`buffered`](Self::buffered) with [`data_taken`](Self::data_taken), or receives it directly and reports
/// that with [`data_received`](Self::data_received); then [`read_trailer`](Self::read_trailer) ends the PDU.
pub(crate) struct PduReader {
    pub(crate) inbound: ReceiveBuffer,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
    stage: Stage,
    /// The header of the current PDU.
    header: [u8; HEADER_BYTES],
    /// Its additional header segments.
    segments: Vec<u8>,
    data_length: usize,
    data_left: usize,
    checksum: Crc32c,
}

impl PduReader {
    pub(crate) fn new() -> PduReader {
        let mut inbound = ReceiveBuffer::default();
        inbound.reserve(RECEIVE_BYTES);
        PduReader {
            inbound,
            header_digest: false,
            data_digest: false,
            stage: Stage::Header,
            header: [0; HEADER_BYTES],
            segments: Vec::new(),
            data_length: 0,
            data_left: 0,
            checksum: Crc32c::new(),
        }
    }

    #[inline]
    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// The header of the current PDU.
    #[inline]
    pub(crate) fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// The additional header segments of the current PDU.
    pub(crate) fn segments(&self) -> &[u8] {
        &self.segments
    }

    /// Data of the current PDU that is not taken.
    #[inline]
    pub(crate) fn data_left(&self) -> usize {
        self.data_left
    }

    /// Whether a PDU has begun and not ended.
    pub(crate) fn is_within_pdu(&self) -> bool {
        self.stage != Stage::Header || !self.inbound.filled().is_empty()
    }

    /// Reads a header. Returns whether it is complete.
    ///
    /// # Errors
    /// Its digest does not match, or it announces too much data. Its opcode may be unknown.
    pub(crate) fn read_header(&mut self) -> Result<bool, IscsiViolation> {
        let filled = self.inbound.filled();
        let Some(header) = filled.first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let (segment_bytes, data_bytes) = BasicHeader::lengths(header);
        let length = HEADER_BYTES + segment_bytes as usize;
        let whole = length + if self.header_digest { DIGEST_BYTES } else { 0 };
        if filled.len() < whole {
            return Ok(false);
        }
        if self.header_digest && wire_iscsi::digest(&[&filled[..length]]) != filled[length..whole] {
            return Err(IscsiViolation::HeaderDigest);
        }
        if data_bytes > RECEIVE_DATA_MAX {
            return Err(IscsiViolation::DataLength(data_bytes));
        }
        self.header = *header;
        self.segments.clear();
        self.segments.extend_from_slice(&filled[HEADER_BYTES..length]);
        self.inbound.consume(whole);
        self.data_length = data_bytes as usize;
        self.data_left = self.data_length;
        self.checksum = Crc32c::new();
        self.stage = if data_bytes > 0 { Stage::Data } else { Stage::Trailer };
        Ok(true)
    }

    /// Data that has arrived already.
    #[inline]
    pub(crate) fn buffered(&self) -> &[u8] {
        let filled = self.inbound.filled();
        &filled[..filled.len().min(self.data_left)]
    }

    /// The consumer has taken the first `count` bytes of [`buffered`](Self::buffered).
    #[inline]
    pub(crate) fn data_taken(&mut self, count: usize) {
        if self.data_digest {
            self.checksum.update(&self.inbound.filled()[..count]);
        }
        self.inbound.consume(count);
        self.count_data(count);
    }

    /// The consumer has received these bytes of data directly.
    #[inline]
    pub(crate) fn data_received(&mut self, bytes: &[u8]) {
        if self.data_digest {
            self.checksum.update(bytes);
        }
        self.count_data(bytes.len());
    }

    fn count_data(&mut self, count: usize) {
        self.data_left -= count;
        if self.data_left == 0 {
            self.stage = Stage::Trailer;
        }
    }

    /// Reads padding and the data digest. `None` if they have not arrived; otherwise whether the digest
    /// matches.
    #[inline]
    pub(crate) fn read_trailer(&mut self) -> Option<bool> {
        let padding = padded(self.data_length) - self.data_length;
        let has_digest = self.data_digest && self.data_length > 0;
        let whole = padding + if has_digest { DIGEST_BYTES } else { 0 };
        let filled = self.inbound.filled();
        if filled.len() < whole {
            return None;
        }
        let matches = if has_digest {
            let mut checksum = self.checksum;
            checksum.update(&filled[..padding]);
            checksum.to_bytes() == filled[padding..whole]
        } else {
            true
        };
        self.inbound.consume(whole);
        self.stage = Stage::Header;
        Some(matches)
    }
}

#[cfg(test)]
mod tests {
    use wire_iscsi::{NopOut, Opcode, RESERVED_TAG};

    use super::*;

    fn ping(data: &[u8], digests: bool) -> Vec<u8> {
        let header = NopOut {
            immediate: true,
            initiator_task_tag: 1,
            target_transfer_tag: RESERVED_TAG,
            data_length: data.len() as u32,
            ..NopOut::default()
        };
        let mut bytes = header.to_bytes().to_vec();
        if digests {
            bytes.extend(wire_iscsi::digest(&[&bytes]));
        }
        let mut padded_data = data.to_vec();
        padded_data.resize(padded(data.len()), 0);
        bytes.extend(&padded_data);
        if digests && !data.is_empty() {
            bytes.extend(wire_iscsi::digest(&[&padded_data]));
        }
        bytes
    }

    /// Feeds bytes in pieces; the data of each PDU, and whether its digest matched.
    fn read(
        reader: &mut PduReader,
        bytes: &[u8],
        piece: usize,
    ) -> Result<Vec<(Vec<u8>, bool)>, IscsiViolation> {
        let (mut all, mut data) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            reader.inbound.room()[..piece.len()].copy_from_slice(piece);
            reader.inbound.added(piece.len());
            loop {
                match reader.stage() {
                    Stage::Header if !reader.read_header()? => break,
                    Stage::Header => {
                        assert_eq!(BasicHeader::decode(reader.header()).unwrap().opcode, Opcode::NopOut);
                    }
                    Stage::Data if reader.buffered().is_empty() => break,
                    Stage::Data => {
                        data.extend_from_slice(reader.buffered());
                        reader.data_taken(reader.buffered().len());
                    }
                    Stage::Trailer => match reader.read_trailer() {
                        None => break,
                        Some(matches) => all.push((std::mem::take(&mut data), matches)),
                    },
                }
            }
        }
        Ok(all)
    }

    #[test]
    fn pdus_are_found_however_the_stream_is_cut() {
        for digests in [false, true] {
            let bytes = [ping(b"hello", digests), ping(b"", digests), ping(b"four", digests)].concat();
            for piece in [1, 3, 7, 48, 1000] {
                let mut reader = PduReader::new();
                (reader.header_digest, reader.data_digest) = (digests, digests);
                let expected = [b"hello".as_slice(), b"", b"four"].map(|data| (data.to_vec(), true));
                assert_eq!(read(&mut reader, &bytes, piece).unwrap(), expected);
                assert!(!reader.is_within_pdu());
            }
        }
    }

    #[test]
    fn digests_find_changes() {
        let mut reader = PduReader::new();
        (reader.header_digest, reader.data_digest) = (true, true);
        let mut bytes = ping(b"hello", true);
        bytes[53] ^= 1;
        assert_eq!(
            read(&mut reader, &bytes, 100).unwrap(),
            [(b"iello".to_vec(), false)].map(|(_, matches)| (bytes[52..57].to_vec(), matches))
        );
        bytes = ping(b"hello", true);
        bytes[20] ^= 1;
        assert_eq!(read(&mut reader, &bytes, 100), Err(IscsiViolation::HeaderDigest));
    }

    #[test]
    fn too_much_data_is_a_violation() {
        let mut bytes = ping(b"", false);
        bytes[5] = 0xff;
        let result = read(&mut PduReader::new(), &bytes, 100);
        assert_eq!(result, Err(IscsiViolation::DataLength(0xff0000)));
    }
}
