//! Big-endian integers at offsets, and a reader of fields in order.

use crate::DecodeError;

pub(crate) fn put<const N: usize>(out: &mut [u8], at: usize, value: [u8; N]) {
    out[at..at + N].copy_from_slice(&value);
}

/// Reads fields in order; every read past the end is an error that names the structure.
pub(crate) struct Fields<'a> {
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Fields<'a> {
        Fields { what, bytes, at: 0 }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let end = self.at.saturating_add(count);
        let Some(taken) = self.bytes.get(self.at..end) else {
            return Err(DecodeError::Length { what: self.what, got: self.bytes.len(), need: end });
        };
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string that follows its length.
    pub(crate) fn string(&mut self) -> Result<&'a str, DecodeError> {
        let length = self.u32()?;
        if length > crate::STRING_BYTES_MAX {
            return Err(DecodeError::Text { what: self.what, reason: "a string is too long" });
        }
        text(self.what, self.take(length as usize)?)
    }

    /// Rejects a wrong magic number.
    pub(crate) fn magic(&mut self, found: u64, expected: u64) -> Result<(), DecodeError> {
        if found == expected { Ok(()) } else { Err(DecodeError::value(self.what, 0, found)) }
    }

    /// The bytes that were not read.
    pub(crate) fn rest(self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// Rejects bytes that were not read.
    pub(crate) fn end(self) -> Result<(), DecodeError> {
        if self.at == self.bytes.len() {
            return Ok(());
        }
        Err(DecodeError::Length { what: self.what, got: self.bytes.len(), need: self.at })
    }
}

/// UTF-8 without NUL, as the protocol asks of strings.
pub(crate) fn text<'a>(what: &'static str, bytes: &'a [u8]) -> Result<&'a str, DecodeError> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(DecodeError::Text { what, reason: "a string is not UTF-8 without NUL" }),
    }
}
