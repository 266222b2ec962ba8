//! Values round-trip; arbitrary bytes, also with a valid checksum, are decoded or rejected.
#![allow(clippy::unwrap_used)]

use codec::Crc32c;
use proptest::prelude::*;
use wire_store::*;

/// Gives bytes the head that makes decoders look at the rest.
fn sealed(mut bytes: Vec<u8>, magic: &[u8; 4]) -> Vec<u8> {
    bytes[..4].copy_from_slice(magic);
    bytes[4..6].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    checksummed(bytes)
}

fn checksummed(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut checksum = Crc32c::new();
    checksum.update(&bytes[..8]);
    checksum.update(&[0; 4]);
    checksum.update(&bytes[12..]);
    bytes[8..12].copy_from_slice(&checksum.to_bytes());
    bytes
}

/// Mostly zeroes, so that reserved fields often are.
fn sparse(length: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec((0..length, any::<u8>()), 0..12).prop_map(move |set| {
        let mut bytes = vec![0; length];
        set.into_iter().for_each(|(at, value)| bytes[at] = value);
        bytes
    })
}

proptest! {
    #[test]
    fn whatever_is_decoded_is_encoded_to_the_same_bytes(sector in sparse(512), kind in 0u8..3) {
        let mut with_kind = sector.clone();
        with_kind[6] = kind;
        let place = u32::from_le_bytes(sector[12..16].try_into().unwrap());
        let location = u64::from_le_bytes(sector[16..24].try_into().unwrap());
        let bytes = sealed(sector.clone(), b"RBSB");
        if let Ok(value) = Superblock::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let mut second = bytes.clone();
        second[4] = 2;
        let second = checksummed(second);
        if let Ok(value) = Superblock::decode(&second, location) {
            prop_assert_eq!(&value.encode(location)[..], &second[..]);
        }
        let bytes = sealed(sector.clone(), b"RBLS");
        if let Ok(value) = LogSuperblock::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(sector.clone(), b"RBDS");
        if let Ok(Some(value)) = DeviceState::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(sector.clone(), b"RBPT");
        if let Ok(value) = PartitionHeader::decode(&bytes, location) {
            prop_assert_eq!(&value.encode(location)[..], &bytes[..]);
        }
        let bytes = sealed(with_kind.clone(), b"RBON");
        if let Ok(Some(value)) = Onode::decode(&bytes, place) {
            prop_assert_eq!(&value.encode(place)[..], &bytes[..]);
        }
        let mut with_sizes = sector;
        with_sizes[48..50].copy_from_slice(&[0, 0x10]);
        with_sizes[56..58].copy_from_slice(&[0, 0x20]);
        with_sizes[88] = kind.min(1);
        with_sizes[84..88].copy_from_slice(&(LogSector::ALL[usize::from(kind) % 2] as u32).to_le_bytes());
        let bytes = sealed(with_sizes, b"RBLH");
        if let Ok(value) = LogHeader::decode(&bytes, place) {
            prop_assert_eq!(&value.encode(place)[..], &bytes[..]);
        }
        let mut second = bytes;
        second[4] = 2;
        let second = checksummed(second);
        if let Ok(value) = LogHeader::decode(&second, place) {
            prop_assert_eq!(&value.encode(place)[..], &second[..]);
        }
        let bytes = sealed(with_kind[..128].to_vec(), b"RBLE");
        let (log, at) = (bytes[104..120].try_into().unwrap(), u64::from_le_bytes(bytes[96..104].try_into().unwrap()));
        if let Ok(value) = EntryHeader::decode(&bytes, log, at) {
            prop_assert_eq!(&value.encode(log, at)[..], &bytes[..]);
        }
        let bytes = sealed(with_kind[..ImageRecord::SIZE].to_vec(), b"RBIM");
        if let Ok(value) = ImageRecord::decode(&bytes) {
            prop_assert_eq!(&value.encode()[..], &bytes[..]);
        }
    }

    #[test]
    fn onodes_round_trip(
        numbers in any::<(u32, u64, u32, u64)>(),
        data in proptest::collection::vec(any::<u8>(), 0..=INLINE_BYTES_MAX),
        written in proptest::collection::vec(0..BLOCKS_PER_OBJECT, 0..50),
        place in any::<u32>(),
    ) {
        let id = ObjectId { group: numbers.0, volume: numbers.1, index: numbers.2, suffix: numbers.3 };
        let mut map = Box::<ObjectBlockMap>::default();
        for block in written {
            map.extents[block / BLOCKS_PER_EXTENT] = 1 + block as u32;
            map.set_written(block, true);
        }
        for content in [OnodeContent::Inline(data.clone()), OnodeContent::Mapped(map.clone())] {
            let onode = Onode { version: numbers.1, epoch: numbers.0, ..Onode::new(id, content) };
            prop_assert_eq!(Onode::decode(&onode.encode(place), place), Ok(Some(onode)));
        }
    }
}

/// What one record of a stream is made of: the blocks before it, its blocks, and whether it has data.
type Piece = (u64, u64, bool);

fn diff_header(bytes: u64) -> DiffHeader {
    let snapshot = |id, name: &str| DiffSnapshot { id: [id; 16], bytes, name: name.to_string() };
    let (to, from) = (snapshot(1, "b"), Some(snapshot(2, "a")));
    DiffHeader { image: [3; 16], image_name: "vol".to_string(), to, from, created: 4, chain: 5 }
}

/// A stream of these records, and what it says.
fn diff_stream(pieces: &[Piece]) -> (Vec<u8>, Vec<(u64, Vec<u8>)>) {
    let blocks: u64 = pieces.iter().map(|(before, length, _)| before + length).sum();
    let header = diff_header((blocks + 1) * BLOCK_BYTES as u64);
    let mut encoder = DiffEncoder::new(&header, 0);
    let (mut stream, mut ranges, mut at) = (header.encode().to_vec(), Vec::new(), 0);
    for (before, length, has_data) in pieces {
        at += before * BLOCK_BYTES as u64;
        let bytes = length * BLOCK_BYTES as u64;
        let data = vec![u8::from(*has_data); bytes as usize];
        match has_data {
            true => {
                stream.extend(encoder.data(at, &data));
                stream.extend(&data);
            }
            false => stream.extend(encoder.zeroes(at, bytes)),
        }
        ranges.push((at, data));
        at += bytes;
    }
    stream.extend(encoder.end());
    (stream, ranges)
}

/// Decodes as far as it goes. Returns whether the stream was whole.
fn decode_diff(mut rest: &[u8]) -> (bool, Vec<(u64, Vec<u8>)>) {
    let (mut decoder, mut ranges) = (DiffDecoder::new(), Vec::new());
    while decoder.needs() > 0 {
        let Some((piece, after)) = rest.split_at_checked(decoder.needs()) else { return (false, ranges) };
        rest = after;
        match decoder.take(piece) {
            Err(_) => return (false, ranges),
            Ok(Some(DiffItem::Data { offset, data })) => ranges.push((offset, data.to_vec())),
            Ok(Some(DiffItem::Zeroes { offset, length })) => {
                // A stream may say so of more than memory has.
                ranges.push((offset, vec![0; length.min(1 << 20) as usize]));
            }
            Ok(_) => {}
        }
    }
    (rest.is_empty(), ranges)
}

proptest! {
    #[test]
    fn a_stream_is_what_was_encoded_or_ends_before_it_differs(
        pieces in proptest::collection::vec((0_u64..4, 1_u64..33, any::<bool>()), 0..12),
        cut in any::<proptest::sample::Index>(),
        (at, bits) in (any::<proptest::sample::Index>(), 1_u8..),
    ) {
        let (stream, ranges) = diff_stream(&pieces);
        prop_assert_eq!(decode_diff(&stream), (true, ranges.clone()));
        let (whole, begin) = decode_diff(&stream[..cut.index(stream.len())]);
        prop_assert!(!whole && ranges.starts_with(&begin));
        let mut damaged = stream;
        let at = at.index(damaged.len());
        damaged[at] ^= bits;
        let (whole, begin) = decode_diff(&damaged);
        prop_assert!(!whole && ranges.starts_with(&begin));
    }

    #[test]
    fn any_header_and_record_of_a_diff_is_refused_or_encoded_to_the_same_bytes(
        sector in sparse(512),
        kind in 0_u8..5,
        names in proptest::array::uniform3(0_u8..70),
        numbers in proptest::array::uniform3(0_u64..1 << 20),
    ) {
        let mut header = sector.clone();
        for (index, length) in names.into_iter().enumerate() {
            header[96 + index] = length;
            let at = 112 + 64 * index;
            header[at..at + usize::from(length.min(64))].fill(b'x');
        }
        header[64..80].fill(0);
        header[65] = 2;
        let bytes = sealed(header, b"RBDH");
        if let Ok(value) = DiffHeader::decode(&bytes) {
            prop_assert_eq!(&value.encode()[..], &bytes[..]);
        }
        let mut record = sector[..DiffRecord::SIZE].to_vec();
        record[6] = kind;
        let [offset, length, number] = numbers;
        record[16..24].copy_from_slice(&(offset & !4095).to_le_bytes());
        record[24..32].copy_from_slice(&(length & !511).to_le_bytes());
        record[32..40].copy_from_slice(&number.to_le_bytes());
        for sealed in [sealed(record, b"RBDR"), sealed(sector[..DiffRecord::SIZE].to_vec(), b"RBDR")] {
            if let Ok(value) = DiffRecord::decode(&sealed) {
                prop_assert_eq!(&value.encode()[..], &sealed[..]);
            }
        }
    }

    #[test]
    fn any_bytes_are_a_stream_or_are_refused(
        bytes in proptest::collection::vec(any::<u8>(), 0..2048),
        kind in 1_u8..4,
    ) {
        let _ = decode_diff(&bytes);
        // Behind a header, a record of it with any fields.
        let header = diff_header(1 << 40).encode();
        let mut stream = header.to_vec();
        let mut record = bytes;
        record.resize(DiffRecord::SIZE + 4096, 0);
        record[6] = kind;
        record[7] = 0;
        record[24..32].copy_from_slice(&4096_u64.to_le_bytes());
        record[32..40].fill(0);
        record[40..44].copy_from_slice(&header[8..12]);
        record[44..48].fill(0);
        let data = record.split_off(DiffRecord::SIZE);
        stream.extend(sealed(record, b"RBDR"));
        stream.extend(data);
        prop_assert!(!decode_diff(&stream).0);
    }
}
