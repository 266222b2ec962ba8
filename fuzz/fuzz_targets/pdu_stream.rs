//! Any bytes as a stream of PDUs: how it is cut, and whether a consumer has room at once, changes
//! nothing of what comes out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nvme_tcp::{Consumer, Place, Progress, Receiver};
use wire_nvme::tcp::{Fatal, Framing, Layout, PduType};

/// More data than this is thrown away unseen.
const DATA_MAX: u32 = 1 << 16;

#[derive(Debug, Default, PartialEq)]
struct Keeper {
    patience: u8,
    waited: u8,
    current: Option<(PduType, Vec<u8>, Vec<u8>)>,
    done: Vec<(PduType, Vec<u8>, Vec<u8>, bool)>,
}

impl Consumer for Keeper {
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal> {
        assert_eq!(header.len(), kind.header_length());
        if self.waited < self.patience {
            self.waited += 1;
            return Ok(Place::Wait);
        }
        self.waited = 0;
        assert!(self.current.is_none(), "a PDU begins within another");
        let here = layout.data_length <= DATA_MAX;
        let data = vec![0; if here { layout.data_length as usize } else { 0 }];
        self.current = Some((kind, header.to_vec(), data));
        Ok(if here { Place::Here } else { Place::Nowhere })
    }

    fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let (_, _, data) = self.current.as_mut().expect("data belongs to a PDU");
        &mut data[offset..offset + length]
    }

    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal> {
        let (kind, header, data) = self.current.take().expect("a PDU ends once");
        self.done.push((kind, header, data, digest_ok));
        Ok(())
    }
}

type Outcome = (Vec<(PduType, Vec<u8>, Vec<u8>, bool)>, Option<(Fatal, Vec<u8>)>);

fn receive(bytes: &[u8], framing: Framing, piece: usize, patience: u8) -> Outcome {
    let (mut receiver, mut keeper) = (Receiver::default(), Keeper { patience, ..Keeper::default() });
    receiver.set_framing(framing);
    let mut parts = bytes.chunks(piece);
    let mut outcome = Ok(Progress::Ready);
    loop {
        match outcome {
            Ok(Progress::Waiting) => outcome = receiver.resume(&mut keeper),
            Ok(Progress::Ready) => {
                let Some(mut part) = parts.next() else { break };
                // What may be read straight into place is.
                let direct = receiver.direct(&mut keeper);
                let count = direct.len().min(part.len());
                direct[..count].copy_from_slice(&part[..count]);
                part = &part[count..];
                outcome =
                    receiver.advance(count, &mut keeper).and_then(|()| receiver.consume(part, &mut keeper));
            }
            Err(fatal) => {
                // How much of the header in error is known depends on how it was cut.
                let in_error = receiver.header_in_error();
                assert!(!in_error.is_empty());
                return (keeper.done, Some((fatal, in_error[..8].to_vec())));
            }
        }
    }
    (keeper.done, None)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&[flags, alignment, piece], bytes)) = bytes.split_first_chunk::<3>() else { return };
    let framing = Framing {
        header_digest: flags & 1 != 0,
        data_digest: flags & 2 != 0,
        data_alignment_bytes: (alignment % 32 + 1) * 4,
    };
    let whole = receive(bytes, framing, bytes.len().max(1), 0);
    let cut = receive(bytes, framing, usize::from(piece) + 1, flags >> 2 & 3);
    assert_eq!(cut, whole);
});
