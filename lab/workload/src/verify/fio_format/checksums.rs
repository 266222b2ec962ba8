//! Checksums in fio's headers: CRCs that begin with 0 and are not inverted, and XXH32.

use crate::verify::half_word;

/// CRC-7 of MMC.
pub(super) const CRC7: &Crc = &Crc::msb_first(7, 0x09);
/// CRC-16/ARC.
pub(super) const CRC16: &Crc = &Crc::lsb_first(0xa001);
/// The CRC-32 of POSIX `cksum`, without its length and its inversion.
pub(super) const CRC32: &Crc = &Crc::msb_first(32, 0x04c1_1db7);
/// CRC-64 of Jones, as in Redis.
pub(super) const CRC64: &Crc = &Crc::lsb_first(0x95ac_9329_ac4b_c9b5);

/// A CRC of up to 64 bits with its table for one byte.
pub(super) struct Crc {
    /// Bits, where the most significant one of each byte is first, kept at the top of the register.
    msb_first_bits: Option<u32>,
    table: [u64; 256],
}

impl Crc {
    const fn msb_first(bits: u32, polynomial: u64) -> Crc {
        let polynomial = polynomial << (64 - bits);
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut register = (index as u64) << 56;
            let mut bit = 0;
            while bit < 8 {
                let carry = register >> 63 != 0;
                register = (register << 1) ^ if carry { polynomial } else { 0 };
                bit += 1;
            }
            table[index] = register;
            index += 1;
        }
        Crc { msb_first_bits: Some(bits), table }
    }

    /// The polynomial is reflected.
    const fn lsb_first(polynomial: u64) -> Crc {
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut register = index as u64;
            let mut bit = 0;
            while bit < 8 {
                let carry = register & 1 != 0;
                register = (register >> 1) ^ if carry { polynomial } else { 0 };
                bit += 1;
            }
            table[index] = register;
            index += 1;
        }
        Crc { msb_first_bits: None, table }
    }

    /// The checksum of the data.
    pub(super) fn of(&self, data: &[u8]) -> u64 {
        let at = |index: u64| self.table[(index & 0xff) as usize];
        match self.msb_first_bits {
            Some(bits) => {
                let end = data.iter().fold(0u64, |sum, byte| (sum << 8) ^ at((sum >> 56) ^ u64::from(*byte)));
                end >> (64 - bits)
            }
            None => data.iter().fold(0u64, |sum, byte| (sum >> 8) ^ at(sum ^ u64::from(*byte))),
        }
    }
}

/// XXH32 (the xxHash specification, "XXH32 algorithm description").
pub(super) fn xxh32(data: &[u8], seed: u32) -> u32 {
    const PRIMES: [u32; 5] = [0x9e37_79b1, 0x85eb_ca77, 0xc2b2_ae3d, 0x27d4_eb2f, 0x1656_67b1];
    let round = |lane: u32, at: &[u8]| {
        let input = half_word(at, 0).wrapping_mul(PRIMES[1]);
        lane.wrapping_add(input).rotate_left(13).wrapping_mul(PRIMES[0])
    };
    let (stripes, tail) = data.split_at(data.len() / 16 * 16);
    let mut hash = if stripes.is_empty() {
        seed.wrapping_add(PRIMES[4])
    } else {
        let start = seed.wrapping_add(PRIMES[0]);
        let mut lanes =
            [start.wrapping_add(PRIMES[1]), seed.wrapping_add(PRIMES[1]), seed, seed.wrapping_sub(PRIMES[0])];
        for stripe in stripes.chunks_exact(16) {
            for (lane, at) in lanes.iter_mut().zip(stripe.chunks_exact(4)) {
                *lane = round(*lane, at);
            }
        }
        let turns = [1, 7, 12, 18];
        lanes.into_iter().zip(turns).fold(0u32, |sum, (lane, turn)| sum.wrapping_add(lane.rotate_left(turn)))
    };
    hash = hash.wrapping_add(data.len() as u32);
    let words = tail.chunks_exact(4);
    for at in words.clone() {
        hash = hash
            .wrapping_add(half_word(at, 0).wrapping_mul(PRIMES[2]))
            .rotate_left(17)
            .wrapping_mul(PRIMES[3]);
    }
    for byte in words.remainder() {
        hash = hash
            .wrapping_add(u32::from(*byte).wrapping_mul(PRIMES[4]))
            .rotate_left(11)
            .wrapping_mul(PRIMES[0]);
    }
    hash = (hash ^ (hash >> 15)).wrapping_mul(PRIMES[1]);
    hash = (hash ^ (hash >> 13)).wrapping_mul(PRIMES[2]);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_their_published_values() {
        let values = [(CRC7, 0x75), (CRC16, 0xbb3d), (CRC32, 0x89a1_897f), (CRC64, 0xe9c6_d914_c4b8_d9ca)];
        for (crc, value) in values {
            assert_eq!(crc.of(b"123456789"), value, "{value:#x}");
        }
        for (text, seed, hash) in [("", 0, 0x02cc_5d05), ("a", 0, 0x550d_7456), ("abc", 0, 0x32d1_53ff)] {
            assert_eq!(xxh32(text.as_bytes(), seed), hash, "{text}");
        }
    }
}
