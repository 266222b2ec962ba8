//! What a blob says about its file, in xattrs.
//!
//! | xattr | value | written by |
//! | --- | --- | --- |
//! | `name` | the path below the parent, with a byte 0 at its end | SPDK too |
//! | `length` | bytes of the file, u64 | SPDK too |
//! | `is_deleted` | 1: the blob is removed when the store is opened | SPDK too |
//! | `parent` | the directory that the name is below, u64; without it the root | |
//! | `directory` | the blob is a directory, with this number, u64 | |
//! | `sequence` | of two files of one name, the one with the larger number is the file, u64 | |
//!
//! Numbers are little-endian. SPDK has neither directories nor sequences: its names are whole paths.

use blobstore::{Blob, Xattr};

/// The type in the super block, padded with zeroes.
pub const STORE_TYPE: [u8; 16] = *b"BLOBFS\0\0\0\0\0\0\0\0\0\0";
/// The type as text.
pub const STORE_TYPE_TEXT: &str = "BLOBFS";

pub(crate) const NAME: &[u8] = b"name";
pub(crate) const LENGTH: &[u8] = b"length";
pub(crate) const IS_DELETED: &[u8] = b"is_deleted";
pub(crate) const PARENT: &[u8] = b"parent";
pub(crate) const DIRECTORY: &[u8] = b"directory";
pub(crate) const SEQUENCE: &[u8] = b"sequence";

/// The record of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileRecord {
    pub(crate) name: Vec<u8>,
    pub(crate) length: u64,
    pub(crate) is_deleted: bool,
    pub(crate) parent: Option<u64>,
    pub(crate) directory: Option<u64>,
    pub(crate) sequence: u64,
}

/// Why a blob is no file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRecord {
    /// There is no name, or it is empty.
    #[error("it has no name")]
    Name,
    /// There is no length, or it has not 8 bytes.
    #[error("it has no length")]
    Length,
    /// A number has not 8 bytes.
    #[error("one of its numbers has not 8 bytes")]
    Number,
}

impl FileRecord {
    pub(crate) fn decode(blob: &Blob) -> Result<FileRecord, NoRecord> {
        let number = |name: &[u8]| match blob.xattr(name) {
            None => Ok(None),
            Some(value) => value.try_into().map(u64::from_le_bytes).map(Some).map_err(|_| NoRecord::Number),
        };
        let is_deleted = blob.xattr(IS_DELETED).is_some();
        let name = blob.xattr(NAME).and_then(|name| name.split(|byte| *byte == 0).next());
        let name = name.filter(|name| !name.is_empty()).ok_or(NoRecord::Name)?.to_vec();
        let directory = number(DIRECTORY)?;
        let length = number(LENGTH).map_err(|_| NoRecord::Length)?;
        let length = if directory.is_some() { 0 } else { length.ok_or(NoRecord::Length)? };
        let (parent, sequence) = (number(PARENT)?, number(SEQUENCE)?.unwrap_or(0));
        Ok(FileRecord { name, length, is_deleted, parent, directory, sequence })
    }

    /// All xattrs.
    pub(crate) fn encode(&self) -> Vec<Xattr> {
        let mut xattrs = vec![name_xattr(&self.name), number_xattr(LENGTH, self.length)];
        xattrs.extend(self.is_deleted.then(deleted_xattr));
        xattrs.extend(self.parent.map(|parent| number_xattr(PARENT, parent)));
        xattrs.extend(self.directory.map(|number| number_xattr(DIRECTORY, number)));
        xattrs.push(number_xattr(SEQUENCE, self.sequence));
        xattrs
    }
}

pub(crate) fn name_xattr(name: &[u8]) -> Xattr {
    Xattr { name: NAME.to_vec(), value: [name, b"\0"].concat() }
}

pub(crate) fn number_xattr(name: &[u8], number: u64) -> Xattr {
    Xattr { name: name.to_vec(), value: number.to_le_bytes().to_vec() }
}

pub(crate) fn deleted_xattr() -> Xattr {
    Xattr { name: IS_DELETED.to_vec(), value: vec![1] }
}
