//! Arbitrary bytes as a stream of PDUs: the result does not depend on how the stream is split or on how often
//! the consumer defers a PDU.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_tcp::{DataPlacement, PduConsumer, PduReceiver, ReceiveProgress};
use wire_nvme::tcp::{FatalError, Framing, PduLayout, PduType};

/// PDUs with more data are discarded.
const DATA_MAX: u32 = 1 << 16;

#[derive(Debug, Default, PartialEq)]
struct RecordingConsumer {
    deferrals: u8,
    deferred: u8,
    current: Option<(PduType, Vec<u8>, Vec<u8>)>,
    done: Vec<(PduType, Vec<u8>, Vec<u8>, bool)>,
}

impl PduConsumer for RecordingConsumer {
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError> {
        assert_eq!(header.len(), kind.header_length());
        if self.deferred < self.deferrals {
            self.deferred += 1;
            return Ok(DataPlacement::Wait);
        }
        self.deferred = 0;
        assert!(self.current.is_none(), "a PDU begins within another");
        let is_buffered = layout.data_length <= DATA_MAX;
        let data = vec![0; if is_buffered { layout.data_length as usize } else { 0 }];
        self.current = Some((kind, header.to_vec(), data));
        Ok(if is_buffered { DataPlacement::Buffer } else { DataPlacement::Discard })
    }

    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let (_, _, data) = self.current.as_mut().expect("data belongs to a PDU");
        &mut data[offset..offset + length]
    }

    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        let (kind, header, data) = self.current.take().expect("a PDU ends once");
        self.done.push((kind, header, data, digest_ok));
        Ok(())
    }
}

type ReceivedPdus = (Vec<(PduType, Vec<u8>, Vec<u8>, bool)>, Option<(FatalError, Vec<u8>)>);

fn receive(bytes: &[u8], framing: Framing, piece: usize, deferrals: u8) -> ReceivedPdus {
    let (mut receiver, mut consumer) =
        (PduReceiver::default(), RecordingConsumer { deferrals, ..RecordingConsumer::default() });
    receiver.set_framing(framing);
    let mut parts = bytes.chunks(piece);
    let mut outcome = Ok(ReceiveProgress::Ready);
    loop {
        match outcome {
            Ok(ReceiveProgress::Waiting) => outcome = receiver.resume(&mut consumer),
            Ok(ReceiveProgress::Ready) => {
                let Some(mut part) = parts.next() else { break };
                // Copy into the direct buffer first, as a vectored read does.
                let direct = receiver.direct_buffer(&mut consumer);
                let count = direct.len().min(part.len());
                direct[..count].copy_from_slice(&part[..count]);
                part = &part[count..];
                outcome = receiver
                    .advance(count, &mut consumer)
                    .and_then(|()| receiver.consume(part, &mut consumer));
            }
            Err(fatal) => {
                // How much of the invalid header arrived depends on the split; 8 bytes always did.
                let in_error = receiver.failed_header();
                assert!(!in_error.is_empty());
                return (consumer.done, Some((fatal, in_error[..8].to_vec())));
            }
        }
    }
    (consumer.done, None)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&[flags, alignment, piece], bytes)) = bytes.split_first_chunk::<3>() else { return };
    let framing = Framing {
        header_digest: flags & 1 != 0,
        data_digest: flags & 2 != 0,
        data_alignment_bytes: (alignment % 32 + 1) * 4,
    };
    let whole = receive(bytes, framing, bytes.len().max(1), 0);
    let split = receive(bytes, framing, usize::from(piece) + 1, flags >> 2 & 3);
    assert_eq!(split, whole);
});
