//! Records of images, each the inline data of an object of its own.

use codec::DecodeError;

use crate::fields::{array, check_zero, open, put, seal, u64_at};
use crate::{INLINE_BYTES_MAX, ObjectId};

const IMAGE_MAGIC: [u8; 4] = *b"RBIM";
const NAME: usize = 56;

/// A volume of the store: its objects are those with its number, each with the data of [`OBJECT_BYTES`](crate::OBJECT_BYTES).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRecord {
    /// Identity of the block device.
    pub uuid: [u8; 16],
    /// The volume in the objects' identifiers, from 1.
    pub volume: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// When it was created, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Its objects are being removed; the record is removed last.
    pub removing: bool,
    /// Name, 1 to [`NAME_BYTES_MAX`](Self::NAME_BYTES_MAX) bytes.
    pub name: String,
}

impl ImageRecord {
    /// The volume whose objects are the records.
    pub const VOLUME: u64 = 0;

    /// Bytes of a record.
    pub const SIZE: usize = 312;

    /// Most bytes of a name.
    pub const NAME_BYTES_MAX: usize = Self::SIZE - NAME;

    /// The object that has the record of a volume, in its logical group.
    pub const fn object(group: u32, volume: u32) -> ObjectId {
        ObjectId { group, volume: Self::VOLUME, index: volume, suffix: 0 }
    }

    /// Encodes the record. A longer name is cut: it was checked.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        let name = &self.name.as_bytes()[..self.name.len().min(Self::NAME_BYTES_MAX)];
        out[6] = self.removing.into();
        put(&mut out, 12, (name.len() as u16).to_le_bytes());
        put(&mut out, 16, self.uuid);
        put(&mut out, 32, self.volume.to_le_bytes());
        put(&mut out, 40, self.bytes.to_le_bytes());
        put(&mut out, 48, self.created_ns.to_le_bytes());
        out[NAME..NAME + name.len()].copy_from_slice(name);
        seal(&mut out, IMAGE_MAGIC);
        out
    }

    /// Decodes what an object has.
    ///
    /// # Errors
    /// The first field that no record of this version has.
    pub fn decode(from: &[u8]) -> Result<ImageRecord, DecodeError> {
        open("the image record", from, Self::SIZE, IMAGE_MAGIC)?;
        if from[6] > 1 {
            return Err(DecodeError::value("the state of the image", 6, from[6].into()));
        }
        check_zero("a reserved field of the image record", from, 7..8)?;
        check_zero("a reserved field of the image record", from, 14..16)?;
        let length = usize::from(u16::from_le_bytes(array(from, 12)));
        if length == 0 || length > Self::NAME_BYTES_MAX {
            return Err(DecodeError::value("the length of the image's name", 12, length as u64));
        }
        check_zero("the end of the image's name", from, NAME + length..Self::SIZE)?;
        let name = str::from_utf8(&from[NAME..NAME + length]).ok();
        let name =
            name.ok_or(DecodeError::Text { what: "the image's name", reason: "it is not valid UTF-8" })?;
        Ok(ImageRecord {
            uuid: array(from, 16),
            volume: u64_at(from, 32),
            bytes: u64_at(from, 40),
            created_ns: u64_at(from, 48),
            removing: from[6] == 1,
            name: name.to_string(),
        })
    }
}

const _: () = assert!(ImageRecord::SIZE <= INLINE_BYTES_MAX);
