//! Header and data digests: CRC32C.
//!
//! TCP 1.0, section 3.3.1: the CRC32C of RFC 3720 with its initial value of ones and its final
//! inversion, sent as four little-endian bytes.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

/// Bytes of a header or data digest.
pub const SIZE: usize = 4;

/// The digest of `data` in one go. About 8 ns for a header, 85 ns for 4 KiB on current x86-64.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// A digest over data that arrives in pieces. Four bytes of state, so a connection can keep one.
///
/// ```
/// use wire_nvme::digest::{Crc32c, crc32c};
/// let mut digest = Crc32c::new();
/// digest.update(b"1234");
/// digest.update(b"56789");
/// assert_eq!(digest.value(), 0xe306_9283);
/// assert_eq!(digest.value(), crc32c(b"123456789"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    // The digest of everything so far, as it would be sent.
    value: u32,
}

impl Crc32c {
    /// The digest of nothing.
    #[inline]
    pub const fn new() -> Self {
        Crc32c { value: 0 }
    }

    /// Takes the next piece.
    #[inline]
    pub fn update(&mut self, piece: &[u8]) {
        let mut digest = crc_fast::Digest::new_with_init_state(Crc32Iscsi, u64::from(!self.value));
        digest.update(piece);
        self.value = digest.finalize() as u32;
    }

    /// The digest of everything taken so far.
    #[inline]
    pub const fn value(&self) -> u32 {
        self.value
    }

    /// The digest as it is sent.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; SIZE] {
        self.value.to_le_bytes()
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 3720, appendix B.4. The RFC prints them in the order they are sent.
    #[test]
    fn matches_the_examples_of_rfc_3720() {
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc32c(&[0xff; 32]).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&ascending).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&descending).to_le_bytes(), [0x5c, 0xdb, 0x3f, 0x11]);
    }

    proptest! {
        #[test]
        fn pieces_give_the_same_as_the_whole_and_as_another_implementation(
            data in proptest::collection::vec(any::<u8>(), 0..9000),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(data.len() + 1)).collect();
            cuts.sort_unstable();
            cuts.push(data.len());
            let mut digest = Crc32c::new();
            let mut from = 0;
            for cut in cuts {
                digest.update(&data[from..cut]);
                from = cut;
            }
            prop_assert_eq!(digest.value(), crc32c(&data));
            prop_assert_eq!(digest.value(), ::crc32c::crc32c(&data));
        }
    }
}
