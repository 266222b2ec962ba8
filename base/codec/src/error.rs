//! The error of decoding.

/// Why bytes cannot be decoded.
///
/// It names the structure or field and holds numbers only, so that a hostile peer costs no allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The input is shorter than the structure.
    #[error("{what} is {got} bytes long, but {need} are needed")]
    Length {
        /// Name of the structure.
        what: &'static str,
        /// Length of the input in bytes.
        got: usize,
        /// Required length in bytes.
        need: usize,
    },
    /// A reserved or invalid value.
    #[error("{what} at byte {at} has the value {value:#x}")]
    Value {
        /// Name of the field.
        what: &'static str,
        /// Byte offset of the field in the structure.
        at: u32,
        /// The value found.
        value: u64,
    },
    /// Text within a structure that does not have its format, such as JSON.
    #[error("{what}: {reason}")]
    Text {
        /// Name of the text.
        what: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl DecodeError {
    /// A [`DecodeError::Value`].
    pub const fn value(what: &'static str, at: u32, value: u64) -> DecodeError {
        DecodeError::Value { what, at, value }
    }
}
