//! Whatever is sent arrives the same, however the stream is cut.

use net::{Event, Faults, Network, Simulation};
use proptest::prelude::*;
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::{C2hData, Fatal, FatalStatus, Framing, Layout, PduType, SHORT_SIZE};

use super::*;

/// Keeps every PDU's data; makes each header wait `patience` times.
#[derive(Default)]
struct Keeper {
    patience: u32,
    waited: u32,
    current: Vec<u8>,
    done: Vec<(u16, Vec<u8>, bool)>,
    cccid: u16,
}

impl Consumer for Keeper {
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal> {
        assert_eq!(kind, PduType::C2hData);
        if self.waited < self.patience {
            self.waited += 1;
            return Ok(Place::Wait);
        }
        self.waited = 0;
        let data = C2hData::decode(header.first_chunk::<SHORT_SIZE>().unwrap());
        self.cccid = data.cccid;
        self.current = vec![0; layout.data_length as usize];
        if data.cccid.is_multiple_of(7) { Ok(Place::Nowhere) } else { Ok(Place::Here) }
    }

    fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
        &mut self.current[offset..offset + length]
    }

    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal> {
        self.done.push((self.cccid, std::mem::take(&mut self.current), digest_ok));
        Ok(())
    }
}

/// Data by slot.
struct Owner {
    data: Vec<Vec<u8>>,
    sent: Vec<u32>,
}

impl Segments for Owner {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        &self.data[slot as usize][start..start + length]
    }

    fn sent(&mut self, slot: u32) {
        self.sent.push(slot);
    }
}

fn queue(sender: &mut Sender, framing: &Framing, slot: u32, data: &[u8]) {
    let mut header = [0; SHORT_SIZE];
    let length = data.len() as u32;
    let pdu = C2hData { cccid: slot as u16, offset: 0, length, last: true, success: true };
    let layout = pdu.encode(framing, &mut header);
    sender.push_header(&header, &layout);
    sender.push_data(slot, 0, length, true);
    if layout.data_digest {
        sender.push_bytes(&crc32c(data).to_le_bytes());
    }
}

fn framings() -> impl Strategy<Value = Framing> {
    (any::<bool>(), any::<bool>(), 1u8..=32).prop_map(|(header_digest, data_digest, dwords)| Framing {
        header_digest,
        data_digest,
        data_alignment_bytes: dwords * 4,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 200 }))]

    #[test]
    fn pdus_survive_cuts_stalls_and_waiting(
        framing in framings(),
        sizes in prop::collection::vec(1usize..9000, 1..40),
        seed: u64,
        patience in 0u32..3,
        scratch in 1usize..6000,
    ) {
        let data: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(n, size)| (0..*size).map(|at| (at * 31 + n) as u8).collect()).collect();
        let faults = Faults { cut_per_mille: 400, stall_per_mille: 100, break_per_mille: 0 };
        let (mut near, mut far) = Simulation::pair(seed, faults);
        let address = "10.0.0.1:4420".parse().unwrap();
        far.listen(address).unwrap();
        let stream = near.connect(address);
        let near_id = near.add(stream).unwrap();
        let mut events = Vec::new();
        far.poll(&mut events);
        let Some(Event::Incoming { stream, .. }) = events.pop() else { panic!("no connection") };
        let far_id = far.add(stream).unwrap();

        let (mut sender, mut receiver, mut keeper) =
            (Sender::default(), Receiver::default(), Keeper { patience, ..Keeper::default() });
        receiver.set_framing(framing);
        let mut owner = Owner { data: data.clone(), sent: Vec::new() };
        for (slot, data) in data.iter().enumerate() {
            queue(&mut sender, &framing, slot as u32, data);
        }
        let mut scratch = vec![0; scratch];
        while keeper.done.len() < data.len() {
            let flushed = sender.flush(&mut near, near_id, &mut owner);
            prop_assert!(!matches!(flushed, Flushed::Failed(_)));
            let pumped = pump(&mut receiver, &mut keeper, &mut far, far_id, &mut scratch).unwrap();
            prop_assert!(!matches!(pumped, Pumped::Closed | Pumped::Failed(_)));
        }
        prop_assert!(receiver.is_between_pdus());
        prop_assert_eq!(&owner.sent, &(0..data.len() as u32).collect::<Vec<_>>());
        for (slot, (cccid, received, digest_ok)) in keeper.done.iter().enumerate() {
            prop_assert_eq!(usize::from(*cccid), slot);
            prop_assert!(*digest_ok);
            if slot % 7 != 0 {
                prop_assert_eq!(received, &data[slot]);
            }
        }
    }

    #[test]
    fn any_bytes_are_pdus_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..600), framing in framings()) {
        struct Any(Vec<u8>);
        impl Consumer for Any {
            fn header(&mut self, _: PduType, _: &[u8], layout: &Layout) -> Result<Place, Fatal> {
                self.0 = vec![0; (layout.data_length as usize).min(1 << 16)];
                Ok(if layout.data_length < 1 << 16 { Place::Here } else { Place::Nowhere })
            }
            fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
                &mut self.0[offset..offset + length]
            }
            fn end(&mut self, _: bool) -> Result<(), Fatal> {
                Ok(())
            }
        }
        let mut receiver = Receiver::default();
        receiver.set_framing(framing);
        let _ = receiver.consume(&bytes, &mut Any(Vec::new()));
    }
}

#[test]
fn wrong_digests_are_told_apart() {
    let framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
    let mut stream = Vec::new();
    let mut header = [0; SHORT_SIZE];
    let data = C2hData { cccid: 1, offset: 0, length: 4, last: true, success: true };
    let layout = data.encode(&framing, &mut header);
    stream.extend(header);
    stream.extend(crc32c(&header).to_le_bytes());
    assert_eq!(stream.len(), layout.prefix_length());
    stream.extend(b"data");
    stream.extend(crc32c(b"data").to_le_bytes());

    let receive = |stream: &[u8]| {
        let (mut receiver, mut keeper) = (Receiver::default(), Keeper::default());
        receiver.set_framing(framing);
        let result = receiver.consume(stream, &mut keeper);
        (result, keeper.done, receiver.header_in_error().to_vec())
    };
    assert_eq!(receive(&stream).1, [(1, b"data".to_vec(), true)]);
    let mut bad = stream.clone();
    bad[30] ^= 1;
    let (result, done, _) = receive(&bad);
    assert_eq!((result, done[0].2), (Ok(Progress::Ready), false), "a data digest error is the command's");
    let mut bad = stream.clone();
    bad[9] ^= 1;
    let (result, done, in_error) = receive(&bad);
    let information = u32::from_le_bytes(*bad[SHORT_SIZE..].first_chunk().unwrap());
    assert_eq!(result, Err(Fatal { status: FatalStatus::HeaderDigestError, information }));
    assert_eq!((done.len(), &in_error[..]), (0, &bad[..SHORT_SIZE]));
}
