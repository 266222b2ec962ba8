//! Every decoder of the store's on-disk formats and messages with arbitrary bytes. Decoded values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_replica::{AppliedRequests, EncodedFrame, Frame, FrameHeader, Greeting, MESSAGE_VERSION};
use wire_store::{
    CheckpointRecord, DeviceState, DiffDecoder, DiffHeader, DiffRecord, EntryHeader, FORMAT_VERSION,
    ImageRecord, LogHeader, LogSuperblock, Onode, PartitionHeader, Superblock,
};

/// Gives bytes the magic number, version and checksum that make decoders look at the rest.
fn sealed(bytes: &[u8], size: usize, magic: &[u8; 4]) -> Vec<u8> {
    let mut sealed = bytes.to_vec();
    sealed.resize(size, 0);
    sealed[..4].copy_from_slice(magic);
    sealed[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    checksum(&mut sealed);
    sealed
}

fn checksum(sealed: &mut [u8]) {
    sealed[8..12].fill(0);
    let checksum = wire_store::crc32c(sealed);
    sealed[8..12].copy_from_slice(&checksum.to_le_bytes());
}

fuzz_target!(|bytes: &[u8]| {
    let _ = (Superblock::decode(bytes, 0), PartitionHeader::decode(bytes, 0), Onode::decode(bytes, 0));
    let _ = (LogHeader::decode(bytes, 0), EntryHeader::decode(bytes, [0; 16], 0));
    let sector = sealed(bytes, 512, b"RBSB");
    let location = u64::from_le_bytes(sector[16..24].try_into().expect("8 bytes"));
    let place = u32::from_le_bytes(sector[12..16].try_into().expect("4 bytes"));
    if let Ok(value) = Superblock::decode(&sector, location) {
        assert_eq!(value.encode(location)[..], sector);
    }
    let mut second = sector.clone();
    second[4] = 2;
    checksum(&mut second);
    if let Ok(value) = Superblock::decode(&second, location) {
        assert_eq!(value.encode(location)[..], second);
    }
    let sector = sealed(bytes, 512, b"RBLS");
    if let Ok(value) = LogSuperblock::decode(&sector, location) {
        assert_eq!(value.encode(location)[..], sector);
    }
    let sector = sealed(bytes, 512, b"RBDS");
    if let Ok(Some(value)) = DeviceState::decode(&sector, location) {
        assert_eq!(value.encode(location)[..], sector);
    }
    let sector = sealed(bytes, 512, b"RBPT");
    if let Ok(value) = PartitionHeader::decode(&sector, location) {
        assert_eq!(value.encode(location)[..], sector);
    }
    let sector = sealed(bytes, 512, b"RBON");
    if let Ok(Some(value)) = Onode::decode(&sector, place) {
        assert_eq!(value.encode(place)[..], sector);
    }
    let sector = sealed(bytes, 512, b"RBLH");
    if let Ok(value) = LogHeader::decode(&sector, place) {
        assert_eq!(value.encode(place)[..], sector);
    }
    let mut second = sector.clone();
    second[4] = 2;
    checksum(&mut second);
    if let Ok(value) = LogHeader::decode(&second, place) {
        assert_eq!(value.encode(place)[..], second);
    }
    let entry = sealed(bytes, EntryHeader::SIZE, b"RBLE");
    let position = u64::from_le_bytes(entry[96..104].try_into().expect("8 bytes"));
    let log = entry[104..120].try_into().expect("16 bytes");
    if let Ok(value) = EntryHeader::decode(&entry, log, position) {
        assert_eq!(value.encode(log, position)[..], entry);
    }
    let mut slot = sealed(bytes.get(..512).unwrap_or(bytes), 512, b"RBCK");
    let log = slot[16..32].try_into().expect("16 bytes");
    slot.extend_from_slice(bytes.get(512..).unwrap_or(&[]));
    if let Ok(value) = CheckpointRecord::decode(&slot, log, u32::from(slot[12])) {
        assert_eq!(value.encode(), slot[..512]);
    }
    let _ = ImageRecord::decode(bytes);
    let record = sealed(bytes, ImageRecord::SIZE, b"RBIM");
    if let Ok(value) = ImageRecord::decode(&record) {
        assert_eq!(value.encode()[..], record);
    }
    let header = sealed(bytes, DiffHeader::SIZE, b"RBDH");
    if let Ok(value) = DiffHeader::decode(&header) {
        assert_eq!(value.encode()[..], header);
    }
    let record = sealed(bytes, DiffRecord::SIZE, b"RBDR");
    if let Ok(value) = DiffRecord::decode(&record) {
        assert_eq!(value.encode()[..], record);
    }
    decode_diff(bytes);
    let _ = AppliedRequests::decode(bytes);
    if let Some(greeting) = bytes.first_chunk()
        && let Ok(value) = Greeting::decode(greeting)
    {
        assert_eq!(value.encode(), *greeting);
    }
    // One with what the decoder looks at first: arbitrary names of keys would not be reached otherwise.
    if let Some(mut greeting) = bytes.first_chunk::<{ Greeting::SIZE }>().copied() {
        greeting[..4].copy_from_slice(b"RBGR");
        greeting[4..6].copy_from_slice(&MESSAGE_VERSION.to_le_bytes());
        greeting[6] = 1 + greeting[6] % 3;
        greeting[7..16].copy_from_slice(&[0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
        if let Ok(value) = Greeting::decode(&greeting) {
            assert_eq!(value.encode(), greeting);
        }
    }
    decode_message(bytes.to_vec());
});

/// A stream of differences whose header and records have right checksums.
fn decode_diff(bytes: &[u8]) {
    let (mut decoder, mut rest, mut stream) = (DiffDecoder::new(), bytes, [0; 4]);
    while decoder.needs() > 0 && rest.len() >= decoder.needs() {
        let (piece, after) = rest.split_at(decoder.needs());
        rest = after;
        let piece = match piece.len() {
            DiffHeader::SIZE if decoder.whole_bytes() == 0 => {
                let header = sealed(piece, DiffHeader::SIZE, b"RBDH");
                stream.copy_from_slice(&header[8..12]);
                header
            }
            DiffRecord::SIZE => {
                let mut record = piece.to_vec();
                record[32..40].copy_from_slice(&decoder.records().to_le_bytes());
                record[40..44].copy_from_slice(&stream);
                sealed(&record, DiffRecord::SIZE, b"RBDR")
            }
            _ => piece.to_vec(),
        };
        let before = decoder.end_offset();
        if decoder.take(&piece).is_err() {
            return;
        }
        assert!(decoder.end_offset() >= before);
    }
}

/// A message with these kind, group, numbers of bytes, body and data, and a right checksum.
fn decode_message(mut bytes: Vec<u8>) {
    if bytes.len() < FrameHeader::SIZE {
        return;
    }
    bytes[..4].copy_from_slice(b"RBMS");
    bytes[4..6].copy_from_slice(&wire_replica::MESSAGE_VERSION.to_le_bytes());
    bytes[24..32].fill(0);
    let body = (bytes.len() - FrameHeader::SIZE).min(usize::from(bytes[16]) + usize::from(bytes[17]) * 256);
    let data = bytes.len() - FrameHeader::SIZE - body;
    bytes[16..20].copy_from_slice(&(body as u32).to_le_bytes());
    bytes[20..24].copy_from_slice(&(data as u32).to_le_bytes());
    bytes[8..12].fill(0);
    let checksum = wire_store::crc32c(&bytes[..FrameHeader::SIZE + body]);
    bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
    let (header, rest) = bytes.split_first_chunk().expect("a header");
    let Ok(header) = FrameHeader::decode(header) else {
        return;
    };
    if let Ok(frame) = Frame::decode(&header, &rest[..body], &rest[body..]) {
        let EncodedFrame { head, data } = frame.encode(header.group);
        assert_eq!([head, data.concat()].concat(), bytes);
    }
}
