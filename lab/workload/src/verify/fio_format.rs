//! The verification headers of fio 3.33: little-endian, before each I/O or each `verify_interval` of it.
//!
//! | byte | bytes | field |
//! | --- | --- | --- |
//! | 0 | 2 | 0xacca |
//! | 2 | 2 | number of the kind |
//! | 4 | 4 | bytes of the block, header included |
//! | 8 | 8 | seed of the payload |
//! | 16 | 8 | offset of the block in the file |
//! | 24 | 12 | time in seconds and nanoseconds, job and number of the I/O; not verified |
//! | 36 | 4 | CRC-32C of the bytes before, without the final inversion |
//! | 40 | by kind | digest of what follows it |

mod checksums;

use md5::{Digest, Md5};
use sha1::Sha1;
use sha2::block_api::compress256;
use sha3::{Sha3_224, Sha3_256, Sha3_384, Sha3_512};

use checksums::{CRC7, CRC16, CRC32, CRC64, xxh32};

use super::{FioHeaderField, VerifyFault, half_word, word};
use crate::WyRand;
use crate::spec::FioVerify;

const MAGIC: u16 = 0xacca;
const HEADER_CHECKSUM_AT: usize = 36;
const DIGEST_AT: usize = 40;
/// The longest digest, fio's of `sha512`.
const DIGEST_BYTES_MAX: usize = 128;
/// FIPS 180-4, 5.3.3.
const SHA256_INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

impl FioVerify {
    /// Every kind with its name and its number in headers. `pattern` has no header.
    pub const NAMES: [(FioVerify, &'static str, u16); 16] = [
        (FioVerify::Meta, "meta", 1),
        (FioVerify::Md5, "md5", 2),
        (FioVerify::Crc64, "crc64", 3),
        (FioVerify::Crc32, "crc32", 4),
        (FioVerify::Crc32c, "crc32c", 5),
        (FioVerify::Crc16, "crc16", 7),
        (FioVerify::Crc7, "crc7", 8),
        (FioVerify::Sha256, "sha256", 9),
        (FioVerify::Sha512, "sha512", 10),
        (FioVerify::Sha3_224, "sha3-224", 11),
        (FioVerify::Sha3_256, "sha3-256", 12),
        (FioVerify::Sha3_384, "sha3-384", 13),
        (FioVerify::Sha3_512, "sha3-512", 14),
        (FioVerify::Xxhash, "xxhash", 15),
        (FioVerify::Sha1, "sha1", 16),
        (FioVerify::Pattern, "pattern", 0),
    ];

    /// The kind of a name of fio's.
    pub fn from_name(name: &str) -> Option<FioVerify> {
        let name = if name == "crc32c-intel" { "crc32c" } else { name };
        Self::NAMES.iter().find(|(_, known, _)| *known == name).map(|(kind, _, _)| *kind)
    }

    /// The kind with this number in headers.
    pub(crate) fn from_number(number: u16) -> Option<FioVerify> {
        Self::NAMES.iter().find(|(_, _, known)| *known == number).map(|(kind, _, _)| *kind)
    }

    /// fio's name.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The number in headers.
    pub(crate) fn number(self) -> u16 {
        self.row().2
    }

    fn row(self) -> (FioVerify, &'static str, u16) {
        Self::NAMES.into_iter().find(|(kind, _, _)| *kind == self).expect("every kind has a row")
    }

    fn digest_bytes(self) -> usize {
        match self {
            FioVerify::Meta | FioVerify::Pattern => 0,
            FioVerify::Crc7 => 1,
            FioVerify::Crc16 => 2,
            FioVerify::Crc32 | FioVerify::Crc32c | FioVerify::Xxhash => 4,
            FioVerify::Crc64 => 8,
            FioVerify::Md5 => 16,
            FioVerify::Sha1 => 20,
            FioVerify::Sha3_224 => 28,
            FioVerify::Sha3_256 => 32,
            FioVerify::Sha3_384 => 48,
            FioVerify::Sha256 | FioVerify::Sha3_512 => 64,
            FioVerify::Sha512 => DIGEST_BYTES_MAX,
        }
    }

    fn payload_at(self) -> usize {
        if self == FioVerify::Pattern { 0 } else { DIGEST_AT + self.digest_bytes() }
    }

    /// The smallest block with a header. fio's `sha512` leaves bytes undefined if less than 128 bytes follow it.
    pub(crate) fn block_bytes_min(self) -> usize {
        match self {
            FioVerify::Sha512 => self.payload_at() + 128,
            _ => self.payload_at() + 1,
        }
    }
}

/// How the blocks of a job are written and verified.
#[derive(Debug)]
pub(super) struct FioFormat {
    pub(super) kind: FioVerify,
    /// The payload, repeated from the start of each I/O; empty for pseudo-random bytes.
    pub(super) pattern: Vec<u8>,
    /// Bytes of a block with a header.
    pub(super) interval: usize,
}

impl FioFormat {
    /// Fills the data of an I/O at `offset` bytes.
    pub(super) fn fill(&self, data: &mut [u8], offset: u64, seed: u64) {
        if self.pattern.is_empty() {
            let mut random = WyRand::new(seed);
            for chunk in data.chunks_mut(8) {
                chunk.copy_from_slice(&random.next_bits().to_le_bytes()[..chunk.len()]);
            }
        } else {
            data.iter_mut().zip(self.pattern.iter().cycle()).for_each(|(to, from)| *to = *from);
        }
        if self.kind == FioVerify::Pattern {
            return;
        }
        for (block, offset) in data.chunks_exact_mut(self.interval).zip((offset..).step_by(self.interval)) {
            self.fill_header(block, offset, seed);
        }
    }

    fn fill_header(&self, block: &mut [u8], offset: u64, seed: u64) {
        let length = block.len() as u32;
        block[..2].copy_from_slice(&MAGIC.to_le_bytes());
        block[2..4].copy_from_slice(&self.kind.number().to_le_bytes());
        block[4..8].copy_from_slice(&length.to_le_bytes());
        block[8..16].copy_from_slice(&seed.to_le_bytes());
        block[16..24].copy_from_slice(&offset.to_le_bytes());
        block[24..HEADER_CHECKSUM_AT].fill(0);
        let checksum = plain_crc32c(&block[..HEADER_CHECKSUM_AT]);
        block[HEADER_CHECKSUM_AT..DIGEST_AT].copy_from_slice(&checksum.to_le_bytes());
        let (header, payload) = block.split_at_mut(self.kind.payload_at());
        let found = digest(self.kind, payload);
        header[DIGEST_AT..].copy_from_slice(&found[..self.kind.digest_bytes()]);
    }

    /// Whether the block has a header of this kind, whichever program wrote it. Patterns have none.
    pub(super) fn has_header(&self, block: &[u8]) -> bool {
        let starts = (u32::from(MAGIC) | u32::from(self.kind.number()) << 16) == half_word(block, 0);
        let stored = half_word(block, HEADER_CHECKSUM_AT);
        self.kind != FioVerify::Pattern && starts && stored == plain_crc32c(&block[..HEADER_CHECKSUM_AT])
    }

    /// Verifies a block that is `within` bytes from the start of its I/O and at `offset` of the file. The seed is
    /// checked if this job wrote the block.
    pub(super) fn check(
        &self,
        block: &[u8],
        within: usize,
        offset: u64,
        expected_seed: Option<u64>,
    ) -> Result<(), VerifyFault> {
        let kind = self.kind;
        if kind != FioVerify::Pattern {
            check_header(kind, block, offset, expected_seed)?;
            let found = digest(kind, &block[kind.payload_at()..]);
            let bytes = kind.digest_bytes();
            if block[DIGEST_AT..DIGEST_AT + bytes] != found[..bytes] {
                return Err(VerifyFault::Digest { kind });
            }
        }
        if matches!(kind, FioVerify::Meta | FioVerify::Pattern) && !self.pattern.is_empty() {
            let start = within + kind.payload_at();
            let expected = self.pattern.iter().cycle().skip(start % self.pattern.len());
            let pairs = block[kind.payload_at()..].iter().zip(expected).enumerate();
            if let Some((at, (got, expected))) =
                pairs.into_iter().find(|(_, (got, expected))| got != expected)
            {
                let offset = (kind.payload_at() + at) as u32;
                return Err(VerifyFault::PatternByte { offset, expected: *expected, got: *got });
            }
        }
        Ok(())
    }
}

fn check_header(
    kind: FioVerify,
    block: &[u8],
    offset: u64,
    expected_seed: Option<u64>,
) -> Result<(), VerifyFault> {
    let two = |at: usize| u64::from(u16::from_le_bytes([block[at], block[at + 1]]));
    let checksum = plain_crc32c(&block[..HEADER_CHECKSUM_AT]);
    let fields = [
        (FioHeaderField::Magic, u64::from(MAGIC), two(0)),
        (FioHeaderField::Checksum, u64::from(checksum), u64::from(half_word(block, HEADER_CHECKSUM_AT))),
        (FioHeaderField::Kind, u64::from(kind.number()), two(2)),
        (FioHeaderField::Length, block.len() as u64, u64::from(half_word(block, 4))),
        (FioHeaderField::Offset, offset, word(block, 16)),
        (FioHeaderField::Seed, expected_seed.unwrap_or(word(block, 8)), word(block, 8)),
    ];
    match fields.into_iter().find(|(_, expected, got)| expected != got) {
        Some((field, expected, got)) => Err(VerifyFault::Header { field, expected, got }),
        None => Ok(()),
    }
}

/// What fio 3.33 stores as the digest of `payload`.
fn digest(kind: FioVerify, payload: &[u8]) -> [u8; DIGEST_BYTES_MAX] {
    let mut stored = [0; DIGEST_BYTES_MAX];
    match kind {
        FioVerify::Meta | FioVerify::Pattern => {}
        FioVerify::Crc32c => stored[..4].copy_from_slice(&plain_crc32c(payload).to_le_bytes()),
        FioVerify::Xxhash => stored[..4].copy_from_slice(&xxh32(payload, 1).to_le_bytes()),
        FioVerify::Crc7 => stored[0] = CRC7.of(payload) as u8,
        FioVerify::Crc16 => stored[..2].copy_from_slice(&(CRC16.of(payload) as u16).to_le_bytes()),
        FioVerify::Crc32 => stored[..4].copy_from_slice(&(CRC32.of(payload) as u32).to_le_bytes()),
        FioVerify::Crc64 => stored[..8].copy_from_slice(&CRC64.of(payload).to_le_bytes()),
        FioVerify::Sha3_224 => stored[..28].copy_from_slice(&Sha3_224::digest(payload)),
        FioVerify::Sha3_256 => stored[..32].copy_from_slice(&Sha3_256::digest(payload)),
        FioVerify::Sha3_384 => stored[..48].copy_from_slice(&Sha3_384::digest(payload)),
        FioVerify::Sha3_512 => stored[..64].copy_from_slice(&Sha3_512::digest(payload)),
        FioVerify::Md5 => stored[..16].copy_from_slice(&Md5::digest(payload)),
        FioVerify::Sha1 => {
            // Five words in the host's order.
            stored[..20].copy_from_slice(&Sha1::digest(payload));
            stored[..20].chunks_exact_mut(4).for_each(<[u8]>::reverse);
        }
        FioVerify::Sha256 => stored[..64].copy_from_slice(&fio_sha256(payload)),
        // Not the hash: fio stores the block that it collects, with the last bytes of the input.
        FioVerify::Sha512 => {
            let tail = payload.len() % 128;
            let whole = payload.len().min(128);
            stored[..whole].copy_from_slice(&payload[..whole]);
            stored[..tail].copy_from_slice(&payload[payload.len() - tail..]);
        }
    }
    stored
}

/// What fio keeps of SHA-256 in 64 bytes: the last block of its input, the first bytes of which are replaced by the low
/// bytes of the state's words. It pads with the length in bits little-endian, so that the state is no SHA-256.
fn fio_sha256(payload: &[u8]) -> [u8; 64] {
    let (blocks, tail) = payload.as_chunks::<64>();
    let mut state = SHA256_INITIAL;
    compress256(&mut state, blocks);
    let mut last = [0; 64];
    last[..tail.len()].copy_from_slice(tail);
    last[tail.len()] = 0x80;
    if tail.len() >= 56 {
        compress256(&mut state, &[last]);
        last = [0; 64];
    }
    last[56..].copy_from_slice(&(payload.len() as u64 * 8).to_le_bytes());
    compress256(&mut state, &[last]);
    for (byte, word) in last.iter_mut().zip(state) {
        *byte = word as u8;
    }
    last
}

/// CRC-32C without the final inversion.
fn plain_crc32c(data: &[u8]) -> u32 {
    !codec::crc32c(data)
}

#[cfg(test)]
mod tests;
