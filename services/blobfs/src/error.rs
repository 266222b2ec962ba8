//! Why a request on files fails, and why a store is not opened.

use blobstore::{BlobId, ChangeError};

/// Why a request on files failed. Each has an errno.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlobFsError {
    /// There is no such file or directory, or no directory that would have it. `ENOENT`.
    #[error("there is no such file or directory")]
    NotFound,
    /// There is a file or directory of that name. `EEXIST`.
    #[error("there is a file or directory of that name")]
    Exists,
    /// The path is a directory. `EISDIR`.
    #[error("it is a directory")]
    IsDirectory,
    /// The path, or a part of it, is a file. `ENOTDIR`.
    #[error("it is not a directory")]
    NotDirectory,
    /// The directory has entries. `ENOTEMPTY`.
    #[error("the directory is not empty")]
    NotEmpty,
    /// Another opener writes the file, or has locked it. `EWOULDBLOCK`.
    #[error("another opener writes the file or has locked it")]
    Locked,
    /// There are too few free clusters. `ENOSPC`.
    #[error("the store is full")]
    NoSpace,
    /// There is no free metadata page. `ENOSPC`.
    #[error(
        "no metadata page is free, and each file and directory needs one or more: remove some, or copy them \
         to a store that `ringbolt blobfs format --max-files` has made with more"
    )]
    NoPages,
    /// The store, the file or the opener is read-only. `EROFS`.
    #[error("it is read-only")]
    ReadOnly,
    /// A component of the path is longer than [`NAME_BYTES_MAX`](crate::NAME_BYTES_MAX). `ENAMETOOLONG`.
    #[error("the name is too long")]
    NameTooLong,
    /// The request makes no sense. `EINVAL`.
    #[error("{0}")]
    Invalid(&'static str),
    /// No file is open by that number. `EBADF`.
    #[error("the file is not open")]
    NotOpen,
    /// More requests wait than [`REQUESTS_MAX`](crate::REQUESTS_MAX). `EAGAIN`.
    #[error("too many requests wait")]
    Busy,
    /// The device failed. `EIO`.
    #[error("the device failed")]
    Io,
    /// An earlier flush or write of metadata failed, so that what is on the device is not known; or the store
    /// was closed. It has to be opened again. `EIO`.
    #[error("the store takes no requests any more: open it again")]
    Broken,
}

impl BlobFsError {
    /// The Linux error number.
    pub fn errno(&self) -> i32 {
        match self {
            BlobFsError::NotFound => 2,
            BlobFsError::Exists => 17,
            BlobFsError::IsDirectory => 21,
            BlobFsError::NotDirectory => 20,
            BlobFsError::NotEmpty => 39,
            BlobFsError::Locked | BlobFsError::Busy => 11,
            BlobFsError::NoSpace | BlobFsError::NoPages => 28,
            BlobFsError::ReadOnly => 30,
            BlobFsError::NameTooLong => 36,
            BlobFsError::Invalid(_) => 22,
            BlobFsError::NotOpen => 9,
            BlobFsError::Io | BlobFsError::Broken => 5,
        }
    }
}

impl From<ChangeError> for BlobFsError {
    fn from(error: ChangeError) -> BlobFsError {
        match error {
            ChangeError::NoClusters { .. } => BlobFsError::NoSpace,
            ChangeError::NoPages => BlobFsError::NoPages,
            ChangeError::ReadOnly(_) => BlobFsError::ReadOnly,
            ChangeError::Io => BlobFsError::Io,
            ChangeError::Invalid(what) => BlobFsError::Invalid(what),
            ChangeError::NotReleased => BlobFsError::Invalid("the file's blob is not thin, or has a parent"),
            ChangeError::HasClones(_) => BlobFsError::Invalid("the file's blob has clones"),
            ChangeError::NoBlob(_) => BlobFsError::NotFound,
            ChangeError::Exists | ChangeError::Cancelled | ChangeError::Broken => BlobFsError::Broken,
        }
    }
}

/// Why a blobstore is not opened as files.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoBlobFs {
    /// The type in the super block is another.
    #[error("the store is of type {found}, not {expected}", expected = crate::record::STORE_TYPE_TEXT)]
    OtherType {
        /// The type.
        found: String,
    },
    /// The store has no type, and there is no file in it, or a blob that is none.
    #[error("it is a blobstore without files: it has no type, and {}", match .blob {
        Some(blob) => format!("blob {blob} is no file"),
        None => "no blobs".to_string(),
    })]
    NoFiles {
        /// A blob that is no file.
        blob: Option<BlobId>,
    },
}
