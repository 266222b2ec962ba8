//! Checksums of what a replica has in a range: a fetch of an object that never exists, so that releases
//! without them answer zeroes.

use wire_store::{ObjectId, crc32c};

/// The upper half of the suffix of objects whose fetches ask for checksums of the object with the lower half.
const CHECKSUMS_MARK: u64 = 0x4352_4353 << 32;
const MARK_BITS: u64 = 0xffff_ffff << 32;
/// What an answer begins with.
const MAGIC: [u8; 4] = *b"RBCS";

/// The object whose fetch asks for the checksums of another one; `None` if the suffix of that has no place
/// for the mark.
pub fn checksums_object(object: ObjectId) -> Option<ObjectId> {
    let has_place = object.suffix & MARK_BITS == 0;
    has_place.then_some(ObjectId { suffix: object.suffix | CHECKSUMS_MARK, ..object })
}

/// The object whose checksums a fetch asks for; `None` if it fetches data.
pub fn object_of_checksums(object: ObjectId) -> Option<ObjectId> {
    let is_marked = object.suffix & MARK_BITS == CHECKSUMS_MARK;
    is_marked.then_some(ObjectId { suffix: object.suffix & !MARK_BITS, ..object })
}

/// The answer: a magic number, then the CRC-32C of each block.
pub fn encode_checksums(data: &[u8], block_bytes: usize) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    data.chunks(block_bytes).for_each(|block| out.extend_from_slice(&crc32c(block).to_le_bytes()));
    out
}

/// The checksums of an answer; `None` if it is none for this number of blocks, as from a release that does
/// not know them.
pub fn decode_checksums(answer: &[u8], blocks: usize) -> Option<Vec<u32>> {
    let (checksums, rest) = answer.strip_prefix(&MAGIC)?.as_chunks();
    let is_whole = checksums.len() == blocks && rest.is_empty();
    is_whole.then(|| checksums.iter().map(|checksum| u32::from_le_bytes(*checksum)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_checksum_for_each_block_and_zeroes_are_none() {
        let data = [[1; 4096], [2; 4096]].concat();
        let encoded = encode_checksums(&data, 4096);
        assert_eq!(encoded.len(), 12);
        assert_eq!(decode_checksums(&encoded, 2), Some(vec![crc32c(&[1; 4096]), crc32c(&[2; 4096])]));
        for blocks in [0, 1, 3] {
            assert_eq!(decode_checksums(&encoded, blocks), None);
        }
        assert_eq!(decode_checksums(&[0; 8192], 2), None);
        assert_eq!(decode_checksums(&encoded[..11], 2), None);
    }

    #[test]
    fn checksums_are_those_of_one_object() {
        let object = ObjectId { group: 3, volume: u64::MAX, index: 9, suffix: 7 };
        let marked = checksums_object(object).unwrap();
        assert_eq!((object_of_checksums(marked), object_of_checksums(object)), (Some(object), None));
        assert_eq!(checksums_object(marked), None);
    }
}
