//! CRC32C (Castagnoli): the checksum of NVMe/TCP, iSCSI and many disk formats; and the older CRC32.
//!
//! The parameters of RFC 3720: an initial value of all ones and a final inversion. Measured on current x86-64, crc-fast
//! takes 85 ns for 4 KiB and the crate crc32c 302 ns, which therefore serves as the tests' second implementation only.

use crc_fast::CrcAlgorithm::{Crc32Iscsi, Crc64Nvme};

/// Size in bytes of a CRC32C.
pub const CRC32C_SIZE: usize = 4;

/// The CRC32C of `data`. About 8 ns for 64 bytes and 85 ns for 4 KiB on current x86-64.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// The CRC32 of `data` as in Ethernet, zlib and GUID partition tables: another polynomial than CRC32C.
#[inline]
pub fn crc32(data: &[u8]) -> u32 {
    crc_fast::crc32_iso_hdlc(data)
}

/// An incremental CRC32C with four bytes of state.
///
/// ```
/// use codec::{Crc32c, crc32c};
/// let mut checksum = Crc32c::new();
/// checksum.update(b"1234");
/// checksum.update(b"56789");
/// assert_eq!(checksum.value(), 0xe306_9283);
/// assert_eq!(checksum.value(), crc32c(b"123456789"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    // The CRC of all data so far, including the final inversion.
    value: u32,
}

impl Crc32c {
    /// The CRC of an empty message.
    #[inline]
    pub const fn new() -> Self {
        Crc32c { value: 0 }
    }

    /// Appends `piece` to the message.
    #[inline]
    pub fn update(&mut self, piece: &[u8]) {
        let mut checksum = crc_fast::Digest::new_with_init_state(Crc32Iscsi, u64::from(!self.value));
        checksum.update(piece);
        self.value = checksum.finalize() as u32;
    }

    /// The CRC of all data so far.
    #[inline]
    pub const fn value(&self) -> u32 {
        self.value
    }

    /// The CRC in little-endian order.
    #[inline]
    pub const fn to_bytes(&self) -> [u8; CRC32C_SIZE] {
        self.value.to_le_bytes()
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// An incremental CRC of 64 bits, as NVMe has it (CRC-64/NVME, also known as Rocksoft), with eight bytes of
/// state.
///
/// ```
/// use codec::Crc64;
/// let mut checksum = Crc64::new();
/// checksum.update(b"1234");
/// checksum.update(b"56789");
/// assert_eq!(checksum.value(), 0xae8b_1486_0a79_9888);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc64 {
    // The CRC of all data so far, including the final inversion.
    value: u64,
}

impl Crc64 {
    /// The CRC of an empty message.
    #[inline]
    pub const fn new() -> Self {
        Crc64 { value: 0 }
    }

    /// Appends `piece` to the message.
    #[inline]
    pub fn update(&mut self, piece: &[u8]) {
        let mut checksum = crc_fast::Digest::new_with_init_state(Crc64Nvme, !self.value);
        checksum.update(piece);
        self.value = checksum.finalize();
    }

    /// The CRC of all data so far.
    #[inline]
    pub const fn value(&self) -> u64 {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 3720, appendix B.4, in the order of transmission.
    #[test]
    fn matches_the_examples_of_rfc_3720() {
        assert_eq!(crc32c(&[0; 32]).to_le_bytes(), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc32c(&[0xff; 32]).to_le_bytes(), [0x43, 0xab, 0xa8, 0x62]);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&ascending).to_le_bytes(), [0x4e, 0x79, 0xdd, 0x46]);
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&descending).to_le_bytes(), [0x5c, 0xdb, 0x3f, 0x11]);
    }

    /// The check value of CRC-32/ISO-HDLC, and the end of an Ethernet frame.
    #[test]
    fn crc32_is_that_of_ethernet() {
        assert_eq!((crc32(b"123456789"), crc32(b"")), (0xcbf4_3926, 0));
        let mut frame = b"any data".to_vec();
        frame.extend(crc32(&frame).to_le_bytes());
        assert_eq!(crc32(&frame), 0x2144_df1c);
    }

    proptest! {
        #[test]
        fn incremental_crc_matches_one_shot_and_another_implementation(
            data in proptest::collection::vec(any::<u8>(), 0..9000),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(data.len() + 1)).collect();
            cuts.sort_unstable();
            cuts.push(data.len());
            let mut checksum = Crc32c::new();
            let mut from = 0;
            for cut in cuts {
                checksum.update(&data[from..cut]);
                from = cut;
            }
            prop_assert_eq!(checksum.value(), crc32c(&data));
            prop_assert_eq!(checksum.value(), crc32c_oracle::crc32c(&data));
        }
    }
}
