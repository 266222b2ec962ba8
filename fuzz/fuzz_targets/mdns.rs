//! Multicast DNS: the decoder, a search and a responder with packets of any bytes. Decoded messages
//! round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mdns::{Browser, MdnsService, Responder};
use wire_mdns::{DnsMessage, MESSAGE_BYTES_MAX, RecordData};

const KIND: &str = "_nvme-disc._tcp";

fuzz_target!(|bytes: &[u8]| {
    let mut browser = Browser::new(KIND).expect("a name");
    let address = [192, 0, 2, 1].into();
    let service = MdnsService::new(KIND, "one", "host", address, 8009, &["p=tcp"]).expect("names");
    let mut responder = Responder::new(vec![service], 1);
    let mut rest = bytes;
    let mut now_ms = 0;
    // Each packet begins with its length and the time until it comes.
    while let Some((&[high, low, tenths], after)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_be_bytes([high, low])) % (MESSAGE_BYTES_MAX + 1);
        let (packet, next) = after.split_at(length.min(after.len()));
        rest = next;
        now_ms += u64::from(tenths) * 100;
        let found = browser.receive(packet, now_ms);
        assert!(found.iter().all(|one| one.text.len() <= MESSAGE_BYTES_MAX));
        responder.receive(packet, now_ms);
        let answers = responder.poll(now_ms).into_iter().map(|(_, answer)| answer);
        for sent in browser.poll(now_ms).into_iter().chain(answers) {
            DnsMessage::decode(&sent).expect("what is sent is a message");
        }
        if let Ok(message) = DnsMessage::decode(packet) {
            let mut records = message.answers.iter().chain(&message.additional);
            let is_known = records.all(|one| !matches!(one.data, RecordData::Other(_) | RecordData::Text(_)));
            // Names are not compressed.
            let encoded = message.encode();
            if is_known && encoded.len() <= MESSAGE_BYTES_MAX {
                assert_eq!(DnsMessage::decode(&encoded), Ok(message));
            }
        }
    }
});
