//! Why a call fails: what RocksDB can act on, and a text for its user.

use std::ffi::c_char;

/// What RocksDB can act on. The numbers are those of the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum ErrorKind {
    /// There is no such file or directory.
    NotFound = 1,
    /// The store is full.
    NoSpace = 2,
    /// The device failed, or something else that no retry repairs.
    Io = 3,
    /// What is stored is damaged, or is no store of files.
    Corruption = 4,
    /// Another has it.
    Busy = 5,
    /// The call makes no sense.
    Invalid = 6,
    /// There is no such operation.
    NotSupported = 7,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// What RocksDB can act on.
    pub kind: ErrorKind,
    /// A sentence for the user, without the path, which the shim adds.
    pub text: String,
}

impl FileError {
    /// An error with a text for the user.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> FileError {
        FileError { kind, text: text.into() }
    }
}

/// Bytes of a text with its terminator; longer ones are cut.
pub(crate) const TEXT_BYTES: usize = 1024;

/// An error as the shim has it.
#[repr(C)]
pub(crate) struct ErrorText {
    pub(crate) kind: i32,
    pub(crate) text: [c_char; TEXT_BYTES],
}

impl ErrorText {
    pub(crate) fn set(&mut self, error: &FileError) {
        self.kind = error.kind as i32;
        let mut end = error.text.len().min(TEXT_BYTES - 1);
        while !error.text.is_char_boundary(end) {
            end -= 1;
        }
        let bytes = error.text.as_bytes()[..end].iter().copied().chain([0]);
        for (to, byte) in self.text.iter_mut().zip(bytes) {
            *to = byte as c_char;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_too_long_is_cut_at_a_character() {
        let mut text = ErrorText { kind: 0, text: [1; TEXT_BYTES] };
        text.set(&FileError::new(ErrorKind::NoSpace, "ü".repeat(TEXT_BYTES)));
        assert_eq!(text.kind, 2);
        let length = text.text.iter().position(|byte| *byte == 0);
        assert_eq!(length, Some(TEXT_BYTES - 2), "1023 bytes hold 511 characters of two bytes");
    }
}
