//! PDUs of the target: sequence numbers, padding and digests.

use target_shell::{OutgoingPdu, PduData, SendQueue};
use wire_iscsi::{DIGEST_BYTES, HEADER_BYTES, padded};

/// The queue of PDUs to send, with the digests that are in force.
#[derive(Debug, Default)]
pub(crate) struct PduWriter {
    pub(crate) queue: SendQueue,
    pub(crate) header_digest: bool,
    pub(crate) data_digest: bool,
}

impl PduWriter {
    /// Appends a PDU whose header says how long `data` is, without buffers.
    #[inline]
    pub(crate) fn push(&mut self, header: &[u8; HEADER_BYTES], data: PduData) {
        self.push_part(header, data, 0);
    }

    /// As [`push`](Self::push), with a part of buffers; after the last part their `frees` bytes are free.
    #[inline]
    pub(crate) fn push_part(&mut self, header: &[u8; HEADER_BYTES], data: PduData, frees: usize) {
        let header_digest = self.header_digest;
        let pdu = OutgoingPdu::new(|head| {
            head[..HEADER_BYTES].copy_from_slice(header);
            if !header_digest {
                return HEADER_BYTES;
            }
            head[HEADER_BYTES..HEADER_BYTES + DIGEST_BYTES].copy_from_slice(&wire_iscsi::digest(&[header]));
            HEADER_BYTES + DIGEST_BYTES
        });
        let length = data.len();
        if length == 0 {
            return self.queue.push(pdu);
        }
        let mut tail = [0; 3 + DIGEST_BYTES];
        let mut tail_length = padded(length) - length;
        if self.data_digest {
            let mut checksum = codec::Crc32c::new();
            data.slices(0, |slice| {
                checksum.update(slice);
                true
            });
            checksum.update(&tail[..tail_length]);
            tail[tail_length..tail_length + DIGEST_BYTES].copy_from_slice(&checksum.to_bytes());
            tail_length += DIGEST_BYTES;
        }
        self.queue.push(pdu.with_part(data, frees).with_tail(&tail[..tail_length]));
    }
}
