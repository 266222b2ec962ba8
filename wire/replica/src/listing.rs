//! Lists of what a group has: reads of objects that never exist, so that versions without lists answer
//! zeroes.

use codec::DecodeError;
use wire_store::{BlockBitmap, ObjectId};

/// The upper half of the suffix of objects whose reads list what a group has.
const LISTING_MARK: u64 = 0x4c49_5354 << 32;
const OBJECTS: u64 = LISTING_MARK;
const VOLUMES: u64 = LISTING_MARK | 1;
const WRITTEN: u64 = LISTING_MARK | 2;
/// What an answer begins with.
const MAGIC: [u8; 4] = *b"RBLS";
const HEAD_BYTES: usize = 12;

/// What is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listing {
    /// The objects of a volume, from an index on.
    Objects {
        /// The volume.
        volume: u64,
        /// The first index.
        from: u32,
    },
    /// The volumes that have objects, from a number on.
    Volumes {
        /// The first number.
        from: u64,
    },
    /// The blocks of an object that are written: one item, of which [`WRITTEN_BYTES`](Listing::WRITTEN_BYTES)
    /// has room. An object that there is not has none.
    Written {
        /// The volume.
        volume: u64,
        /// The index of the object.
        index: u32,
    },
}

/// A volume of which a group has objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedVolume {
    /// Its number.
    pub volume: u64,
    /// Objects.
    pub objects: u32,
    /// Extents of 64 KiB.
    pub extents: u32,
}

/// An item of a list, of a fixed length.
pub trait ListItem: Sized {
    /// Bytes of one.
    const BYTES: usize;
    /// Appends the encoding.
    fn encode(&self, out: &mut Vec<u8>);
    /// Decodes [`BYTES`](Self::BYTES).
    fn decode(from: &[u8]) -> Self;
}

impl Listing {
    /// Bytes of the answer to a list of written blocks.
    pub const WRITTEN_BYTES: usize = HEAD_BYTES + BlockBitmap::SIZE;

    /// What the read of an object lists; `None` if it reads data.
    pub fn of(object: ObjectId) -> Option<Listing> {
        match object.suffix {
            OBJECTS => Some(Listing::Objects { volume: object.volume, from: object.index }),
            VOLUMES => Some(Listing::Volumes { from: object.volume }),
            WRITTEN => Some(Listing::Written { volume: object.volume, index: object.index }),
            _ => None,
        }
    }

    /// The object whose read is this list.
    pub fn object(self, group: u32) -> ObjectId {
        match self {
            Listing::Objects { volume, from } => ObjectId { group, volume, index: from, suffix: OBJECTS },
            Listing::Volumes { from } => ObjectId { group, volume: from, index: 0, suffix: VOLUMES },
            Listing::Written { volume, index } => ObjectId { group, volume, index, suffix: WRITTEN },
        }
    }
}

impl ListItem for u32 {
    const BYTES: usize = 4;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }

    fn decode(from: &[u8]) -> u32 {
        u32_at(from, 0)
    }
}

impl ListItem for ListedVolume {
    const BYTES: usize = 16;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.volume.to_le_bytes());
        out.extend_from_slice(&self.objects.to_le_bytes());
        out.extend_from_slice(&self.extents.to_le_bytes());
    }

    fn decode(from: &[u8]) -> ListedVolume {
        let volume = u64::from(u32_at(from, 0)) | u64::from(u32_at(from, 4)) << 32;
        ListedVolume { volume, objects: u32_at(from, 8), extents: u32_at(from, 12) }
    }
}

impl ListItem for BlockBitmap {
    const BYTES: usize = BlockBitmap::SIZE;

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_bytes());
    }

    fn decode(from: &[u8]) -> BlockBitmap {
        let mut bytes = [0; BlockBitmap::SIZE];
        bytes.copy_from_slice(&from[..BlockBitmap::SIZE]);
        BlockBitmap::from_bytes(&bytes)
    }
}

fn u32_at(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]])
}

/// Encodes as many items as have room in the answer to a read of this many bytes: magic number, number of
/// items, 1 if there may be more, the items, zeroes.
pub fn encode_list<T: ListItem>(items: impl IntoIterator<Item = T>, bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes);
    out.extend_from_slice(&MAGIC);
    out.resize(HEAD_BYTES.min(bytes), 0);
    let (mut count, mut has_more) = (0_u32, 0_u32);
    for item in items {
        if out.len() + T::BYTES > bytes {
            has_more = 1;
            break;
        }
        item.encode(&mut out);
        count += 1;
    }
    out.resize(bytes, 0);
    for (at, number) in [(4, count), (8, has_more)] {
        if let Some(field) = out.get_mut(at..at + 4) {
            field.copy_from_slice(&number.to_le_bytes());
        }
    }
    out
}

/// The items of an answer, and whether there may be more; `None` from a node whose version has no lists.
///
/// # Errors
/// Another length than the number of items says.
pub fn decode_list<T: ListItem>(answer: &[u8]) -> Result<Option<(Vec<T>, bool)>, DecodeError> {
    if answer.len() < HEAD_BYTES || answer[..4] != MAGIC {
        return Ok(None);
    }
    let (count, has_more) = (u32_at(answer, 4) as usize, u32_at(answer, 8) != 0);
    let items = &answer[HEAD_BYTES..];
    let need = count.saturating_mul(T::BYTES);
    if need > items.len() {
        return Err(DecodeError::Length { what: "a list of a group", got: items.len(), need });
    }
    Ok(Some((items[..need].chunks_exact(T::BYTES).map(T::decode).collect(), has_more)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_says_whether_there_is_more_and_zeroes_are_none() {
        let encoded = encode_list(10..15_u32, 4096);
        assert_eq!(encoded.len(), 4096);
        assert_eq!(decode_list::<u32>(&encoded), Ok(Some((vec![10, 11, 12, 13, 14], false))));
        let short = encode_list(10..15_u32, HEAD_BYTES + 3 * 4 + 2);
        assert_eq!(decode_list::<u32>(&short), Ok(Some((vec![10, 11, 12], true))));
        let volumes = [ListedVolume { volume: u64::MAX - 1, objects: 3, extents: 7 }];
        assert_eq!(decode_list(&encode_list(volumes, 4096)), Ok(Some((volumes.to_vec(), false))));
        assert_eq!(decode_list::<u32>(&[0; 4096]), Ok(None));
        let written = [BlockBitmap::of(5..77)];
        let encoded = encode_list(written, Listing::WRITTEN_BYTES);
        assert_eq!(decode_list(&encoded), Ok(Some((written.to_vec(), false))));
        assert_eq!(decode_list::<BlockBitmap>(&[0; Listing::WRITTEN_BYTES]), Ok(None));
        let mut wrong = encode_list(0..3_u32, HEAD_BYTES + 12);
        wrong[4] = 4;
        assert!(decode_list::<u32>(&wrong).is_err());
        for bytes in 0..HEAD_BYTES {
            assert_eq!(encode_list(0..3_u32, bytes).len(), bytes);
        }
    }

    #[test]
    fn a_listing_is_the_read_of_an_object_that_has_no_data() {
        let (written, all) = (Listing::Written { volume: 9, index: 4 }, Listing::Volumes { from: u64::MAX });
        for listing in [Listing::Objects { volume: 9, from: 4 }, all, written] {
            assert_eq!(Listing::of(listing.object(3)), Some(listing));
        }
        assert_eq!(Listing::of(ObjectId { group: 3, volume: 9, index: 0, suffix: 0 }), None);
    }
}
