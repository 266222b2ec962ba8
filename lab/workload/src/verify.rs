//! Data verification: a header in every block, and the generation that each position must hold.
//!
//! Each logical block that a verifying job writes has a header with its LBA, the seed of the run, a
//! generation (how often that run has written the block) and a CRC-32C. A read is checked against the
//! expected generation, which detects and identifies lost, late, torn and misplaced writes. [`fio_format`]
//! has fio's headers.

mod fio_format;

use std::fmt;

use crate::WyRand;
use crate::access_pattern::SetupError;
use crate::spec::{FioVerify, JobSpec, Verify};
use fio_format::FioFormat;

/// "RBVERIFY", little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"RBVERIFY");
const MAGIC_AT: usize = 0;
const LBA_AT: usize = 8;
const SEED_AT: usize = 16;
const GENERATION_AT: usize = 24;
const CHECKSUM_AT: usize = 28;
const PAYLOAD_AT: usize = 32;

/// Most positions that a verifying job tracks: 4 bytes each, so 256 MiB.
const POSITIONS_MAX: u64 = 64 << 20;
/// Mismatches whose details are kept for the report; all are counted.
const MISMATCHES_KEPT_MAX: usize = 16;
/// The generation of a position with unknown content, after a failed write or a trim.
const UNKNOWN: u32 = u32::MAX;

/// A block that did not verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyMismatch {
    /// LBA of the block.
    pub lba: u64,
    /// What is wrong with it.
    pub fault: VerifyFault,
}

/// A field of fio's header, in the order in which they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FioHeaderField {
    /// The magic number.
    Magic,
    /// The header's checksum.
    Checksum,
    /// The number of the kind of verification.
    Kind,
    /// Bytes of the block.
    Length,
    /// Offset of the block in the file, bytes.
    Offset,
    /// Seed, which identifies run and generation.
    Seed,
}

impl FioHeaderField {
    /// Every field, in order.
    pub const ALL: [FioHeaderField; 6] = [
        FioHeaderField::Magic,
        FioHeaderField::Checksum,
        FioHeaderField::Kind,
        FioHeaderField::Length,
        FioHeaderField::Offset,
        FioHeaderField::Seed,
    ];

    fn name(self) -> &'static str {
        ["magic number", "checksum", "kind", "length", "offset", "seed"][self as usize]
    }
}

/// What is wrong with a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerifyFault {
    /// The block has no verification header.
    Magic {
        /// The first eight bytes.
        got: u64,
    },
    /// The block was written for another LBA.
    Lba {
        /// LBA in the block's header.
        got: u64,
    },
    /// The block was written by another run.
    Seed {
        /// Seed of this run.
        expected: u64,
        /// Seed in the block's header.
        got: u64,
    },
    /// The block holds an older or newer version.
    Generation {
        /// Generation that this run wrote last.
        expected: u32,
        /// Generation in the block's header.
        got: u32,
    },
    /// The content does not match its checksum.
    Checksum {
        /// Checksum in the block's header.
        expected: u32,
        /// Checksum of the block's content.
        got: u32,
    },
    /// A field of fio's header is wrong. The seed identifies the job and the generation.
    Header {
        /// The field.
        field: FioHeaderField,
        /// Its value for this block.
        expected: u64,
        /// The value in the header.
        got: u64,
    },
    /// The content does not match the digest in fio's header.
    Digest {
        /// Kind of the digest.
        kind: FioVerify,
    },
    /// The content differs from `verify_pattern`.
    PatternByte {
        /// Offset of the first differing byte from the start of the block.
        offset: u32,
        /// Byte of the pattern.
        expected: u8,
        /// Byte that was read.
        got: u8,
    },
    /// The checksum is right, but the content is not what was written.
    Content {
        /// Offset of the first differing chunk, in bytes from the start of the block.
        offset: u32,
    },
}

impl fmt::Display for VerifyMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lba = self.lba;
        match &self.fault {
            VerifyFault::Magic { got } => {
                write!(
                    f,
                    "LBA {lba}: expected a block written with --verify, got one that starts with {got:#018x}"
                )
            }
            VerifyFault::Lba { got } => write!(f, "LBA {lba}: expected block {lba}, got block {got}"),
            VerifyFault::Seed { expected, got } => {
                write!(f, "LBA {lba}: expected the block of seed {expected:#x}, got that of seed {got:#x}")
            }
            VerifyFault::Generation { expected, got } => write!(
                f,
                "LBA {lba}: expected generation {expected}, got {got}: a write was lost, late or done twice"
            ),
            VerifyFault::Checksum { expected, got } => {
                write!(f, "LBA {lba}: expected CRC-32C {expected:#010x}, got {got:#010x}: content is damaged")
            }
            VerifyFault::Header { field, expected, got } => {
                let field = field.name();
                write!(f, "LBA {lba}: expected {field} {expected:#x} in fio's header, got {got:#x}")
            }
            VerifyFault::Digest { kind } => {
                write!(f, "LBA {lba}: content does not match the {} in fio's header", kind.name())
            }
            VerifyFault::PatternByte { offset, expected, got } => {
                write!(
                    f,
                    "LBA {lba}: expected byte {expected:#04x} of the pattern at {offset}, got {got:#04x}"
                )
            }
            VerifyFault::Content { offset } => {
                write!(f, "LBA {lba}: byte {offset} differs from what was written, under a right checksum")
            }
        }
    }
}

/// Tracks what one job has written at each position, and collects mismatches.
///
/// A position is claimed while an I/O on it is in flight, so that no two I/Os overlap, filled
/// before a write, recorded or checked at completion, and released. It costs 4 bytes and a bit per position.
#[derive(Debug)]
pub struct Verifier {
    mode: Verify,
    /// Of fio's kinds.
    fio: Option<FioFormat>,
    seed: u64,
    /// Bytes of a logical block.
    block_bytes: usize,
    /// Whether every block must have a header: the job only reads data of an earlier run.
    strict: bool,
    /// Generation of each position; 0 if not written by this job.
    generations: Vec<u32>,
    /// Bitmap of positions with an I/O in flight.
    busy: Vec<u64>,
    mismatches: Vec<VerifyMismatch>,
    mismatch_count: u64,
    checked_blocks: u64,
}

impl Verifier {
    /// Tracks `positions` I/O positions of a device with logical blocks of `block_bytes`.
    pub(crate) fn new(spec: &JobSpec, block_bytes: u32, positions: u64) -> Result<Verifier, SetupError> {
        if positions > POSITIONS_MAX {
            return Err(SetupError::VerifyTooLarge { positions, positions_max: POSITIONS_MAX });
        }
        let fio = match spec.verify {
            Verify::Fio(kind) => Some(fio_format(spec, kind)?),
            _ => None,
        };
        Ok(Verifier {
            mode: spec.verify,
            fio,
            seed: spec.seed,
            block_bytes: block_bytes as usize,
            strict: !spec.workload.writes(),
            generations: vec![0; positions as usize],
            busy: vec![0; positions.div_ceil(64) as usize],
            mismatches: Vec::new(),
            mismatch_count: 0,
            checked_blocks: 0,
        })
    }

    /// Claims the first free position from `from` on, with wrap-around. There is always one: the I/O depth is
    /// checked against the number of positions.
    pub(crate) fn claim(&mut self, from: u64) -> u64 {
        let positions = self.generations.len() as u64;
        for ahead in 0..positions {
            let position = (from + ahead) % positions;
            let (word, bit) = ((position / 64) as usize, 1 << (position % 64));
            if self.busy[word] & bit == 0 {
                self.busy[word] |= bit;
                return position;
            }
        }
        panic!("all {positions} positions are in flight, though the depth was checked against them")
    }

    /// Releases a claimed position.
    pub(crate) fn release(&mut self, position: u64) {
        self.busy[(position / 64) as usize] &= !(1 << (position % 64));
    }

    /// Fills the buffer of a write to `position` with headers and payload.
    pub(crate) fn fill(&self, position: u64, lba: u64, data: &mut [u8]) {
        let generation = self.next_generation(position);
        if let Some(format) = &self.fio {
            return format.fill(data, lba * self.block_bytes as u64, fio_seed(lba, self.seed, generation));
        }
        for (block, lba) in data.chunks_exact_mut(self.block_bytes).zip(lba..) {
            fill_block(block, lba, self.seed, generation);
        }
    }

    /// Records the completion of a write.
    pub(crate) fn record_write(&mut self, position: u64, success: bool) {
        let generation = if success { self.next_generation(position) } else { UNKNOWN };
        self.generations[position as usize] = generation;
    }

    /// Marks a position's content as unknown, after a trim.
    pub(crate) fn mark_unknown(&mut self, position: u64) {
        self.generations[position as usize] = UNKNOWN;
    }

    /// Verifies data read from `position`; returns the number of mismatching blocks.
    pub(crate) fn check(&mut self, position: u64, lba: u64, data: &[u8]) -> u32 {
        let generation = self.generations[position as usize];
        let is_known = !matches!(generation, 0 | UNKNOWN);
        let needs_header = !is_known && (generation == UNKNOWN || !self.strict);
        let unit = self.fio.as_ref().map_or(self.block_bytes, |format| format.interval);
        let expected = is_known.then_some((self.seed, generation));
        let mut mismatching = 0;
        for (block, within) in data.chunks_exact(unit).zip((0..).step_by(unit)) {
            let block_lba = lba + (within / self.block_bytes) as u64;
            let (has_header, offset) = match &self.fio {
                None => (word(block, MAGIC_AT) == MAGIC, 0),
                Some(format) => (format.has_header(block), lba * self.block_bytes as u64 + within as u64),
            };
            if needs_header && !has_header {
                continue;
            }
            self.checked_blocks += 1;
            let outcome = match &self.fio {
                None => check_block(block, block_lba, expected, self.mode == Verify::Pattern),
                Some(format) => {
                    let seed = expected.map(|(seed, generation)| fio_seed(lba, seed, generation));
                    format.check(block, within, offset, seed)
                }
            };
            if let Err(fault) = outcome {
                mismatching += 1;
                self.mismatch_count += 1;
                if self.mismatches.len() < MISMATCHES_KEPT_MAX {
                    self.mismatches.push(VerifyMismatch { lba: block_lba, fault });
                }
            }
        }
        mismatching
    }

    /// The first position at or after `from` whose content is known.
    pub(crate) fn next_known(&self, from: u64) -> Option<u64> {
        let known = |generation: &u32| *generation != 0 && *generation != UNKNOWN;
        let rest = self.generations.get(from as usize..)?;
        rest.iter().position(known).map(|ahead| from + ahead as u64)
    }

    /// Details of the first mismatches.
    pub fn mismatches(&self) -> &[VerifyMismatch] {
        &self.mismatches
    }

    /// Blocks that did not verify.
    pub fn mismatch_count(&self) -> u64 {
        self.mismatch_count
    }

    /// Blocks that were checked.
    pub fn checked_blocks(&self) -> u64 {
        self.checked_blocks
    }

    /// The generation of the next write: from 1, skipping 0 and the reserved values at the top.
    fn next_generation(&self, position: u64) -> u32 {
        match self.generations[position as usize] {
            UNKNOWN => UNKNOWN / 2,
            generation if generation >= UNKNOWN - 1 => 1,
            generation => generation + 1,
        }
    }
}

/// fio's format of a job. An interval above the I/O size means one header an I/O.
fn fio_format(spec: &JobSpec, kind: FioVerify) -> Result<FioFormat, SetupError> {
    let bs = spec.block_bytes;
    let interval = spec.verify_interval.filter(|bytes| (1..=bs).contains(bytes)).unwrap_or(bs) as usize;
    let min = kind.block_bytes_min();
    if interval < min || !(bs as usize).is_multiple_of(interval) {
        return Err(SetupError::VerifyInterval { interval, bs, min });
    }
    Ok(FioFormat { kind, pattern: spec.verify_pattern.clone(), interval })
}

/// The seed in fio's header, and of the payload: it identifies the run, the place and the generation.
fn fio_seed(lba: u64, seed: u64, generation: u32) -> u64 {
    payload(lba, seed, generation).next_bits()
}

fn fill_block(block: &mut [u8], lba: u64, seed: u64, generation: u32) {
    let put = |block: &mut [u8], at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(block, MAGIC_AT, &MAGIC.to_le_bytes());
    put(block, LBA_AT, &lba.to_le_bytes());
    put(block, SEED_AT, &seed.to_le_bytes());
    put(block, GENERATION_AT, &generation.to_le_bytes());
    let mut random = payload(lba, seed, generation);
    for chunk in block[PAYLOAD_AT..].chunks_mut(8) {
        chunk.copy_from_slice(&random.next_bits().to_le_bytes()[..chunk.len()]);
    }
    let checksum = checksum(block);
    put(block, CHECKSUM_AT, &checksum.to_le_bytes());
}

fn check_block(
    block: &[u8],
    lba: u64,
    expected: Option<(u64, u32)>,
    content: bool,
) -> Result<(), VerifyFault> {
    let magic = word(block, MAGIC_AT);
    if magic != MAGIC {
        return Err(VerifyFault::Magic { got: magic });
    }
    let stored = half_word(block, CHECKSUM_AT);
    let got = checksum(block);
    if stored != got {
        return Err(VerifyFault::Checksum { expected: stored, got });
    }
    if word(block, LBA_AT) != lba {
        return Err(VerifyFault::Lba { got: word(block, LBA_AT) });
    }
    let (seed, generation) = (word(block, SEED_AT), half_word(block, GENERATION_AT));
    if let Some((expected_seed, expected_generation)) = expected {
        if seed != expected_seed {
            return Err(VerifyFault::Seed { expected: expected_seed, got: seed });
        }
        if generation != expected_generation {
            return Err(VerifyFault::Generation { expected: expected_generation, got: generation });
        }
    }
    if content {
        let mut random = payload(lba, seed, generation);
        for (number, chunk) in block[PAYLOAD_AT..].chunks(8).enumerate() {
            if chunk != &random.next_bits().to_le_bytes()[..chunk.len()] {
                return Err(VerifyFault::Content { offset: (PAYLOAD_AT + number * 8) as u32 });
            }
        }
    }
    Ok(())
}

fn payload(lba: u64, seed: u64, generation: u32) -> WyRand {
    WyRand::new(seed ^ lba.rotate_left(24) ^ u64::from(generation))
}

/// CRC-32C of the block without the checksum field.
fn checksum(block: &[u8]) -> u32 {
    let mut checksum = codec::Crc32c::new();
    checksum.update(&block[..CHECKSUM_AT]);
    checksum.update(&block[PAYLOAD_AT..]);
    checksum.value()
}

fn word(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"))
}

fn half_word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Workload;

    fn verifier(strict: bool) -> Verifier {
        let workload = if strict { Workload::Read } else { Workload::Write };
        let spec = JobSpec { verify: Verify::Pattern, seed: 5, workload, ..JobSpec::default() };
        Verifier::new(&spec, 512, 8).unwrap()
    }

    #[test]
    fn written_data_verifies_and_a_flip_in_any_byte_is_detected() {
        let mut verifier = verifier(false);
        let mut data = vec![0; 1024];
        verifier.fill(2, 4, &mut data);
        verifier.record_write(2, true);
        assert_eq!(verifier.check(2, 4, &data), 0);
        for byte in 0..data.len() {
            data[byte] ^= 0x10;
            assert_eq!(verifier.check(2, 4, &data), 1, "byte {byte}");
            data[byte] ^= 0x10;
        }
        assert_eq!((verifier.mismatch_count(), verifier.mismatches().len()), (1024, MISMATCHES_KEPT_MAX));
    }

    #[test]
    fn misplaced_lost_and_foreign_writes_are_identified() {
        let mut verifier = verifier(false);
        let (mut first, mut second) = (vec![0; 512], vec![0; 512]);
        verifier.fill(0, 0, &mut first);
        verifier.record_write(0, true);
        verifier.fill(0, 0, &mut second);
        verifier.record_write(0, true);
        verifier.record_write(1, true);
        assert_eq!(verifier.check(0, 0, &second), 0);
        verifier.check(0, 0, &first);
        verifier.check(1, 1, &second);
        verifier.check(1, 1, &[0; 512]);
        let mut foreign = vec![0; 512];
        fill_block(&mut foreign, 1, 99, 1);
        verifier.check(1, 1, &foreign);
        let faults: Vec<VerifyFault> =
            verifier.mismatches().iter().map(|mismatch| mismatch.fault.clone()).collect();
        let expected = [
            VerifyFault::Generation { expected: 2, got: 1 },
            VerifyFault::Lba { got: 0 },
            VerifyFault::Magic { got: 0 },
            VerifyFault::Seed { expected: 5, got: 99 },
        ];
        assert_eq!(faults, expected);
    }

    #[test]
    fn an_unwritten_block_is_a_mismatch_only_for_a_read_only_job() {
        for (strict, mismatching) in [(false, 0), (true, 1)] {
            assert_eq!(verifier(strict).check(3, 3, &[0; 512]), mismatching);
        }
        let mut verifier = verifier(false);
        verifier.record_write(3, false);
        assert_eq!(verifier.check(3, 3, &[7; 512]), 0, "a write that failed may have left anything");
    }

    #[test]
    fn a_claimed_position_is_not_claimed_twice() {
        let mut verifier = verifier(false);
        let taken: Vec<u64> = (0..8).map(|_| verifier.claim(5)).collect();
        assert_eq!(taken, [5, 6, 7, 0, 1, 2, 3, 4]);
        verifier.release(6);
        assert_eq!(verifier.claim(0), 6);
    }
}
