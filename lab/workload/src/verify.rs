//! Blocks that describe themselves, and the memory of what was written where.
//!
//! Each logical block that a verifying job writes says which block it is, which run wrote it, how
//! often that run had written there, and carries a CRC-32C. A read is checked against that memory,
//! so that a lost, late, torn or misplaced write is found and named.

use std::fmt;

use crate::Random;
use crate::place::SetupError;
use crate::spec::Verify;

/// "RBVERIFY", little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"RBVERIFY");
const MAGIC_AT: usize = 0;
const LBA_AT: usize = 8;
const SEED_AT: usize = 16;
const GENERATION_AT: usize = 24;
const CHECKSUM_AT: usize = 28;
const PAYLOAD_AT: usize = 32;

/// Most positions that a verifying job remembers: 4 bytes each, so 256 MiB.
const POSITIONS_MAX: u64 = 64 << 20;
/// Most mismatches that are kept to be shown; all are counted.
const SHOWN_MAX: usize = 16;
/// A write there failed, so that either content is right.
const UNKNOWN: u32 = u32::MAX;

/// One block that was not what it should have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The logical block.
    pub lba: u64,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Not a block that a verifying job wrote.
    Magic {
        /// The first eight bytes.
        got: u64,
    },
    /// A block written for another place.
    Lba {
        /// The place that it names.
        got: u64,
    },
    /// A block that another run wrote.
    Seed {
        /// This run's.
        expected: u64,
        /// The other's.
        got: u64,
    },
    /// An older or newer version.
    Generation {
        /// How often this run has written there.
        expected: u32,
        /// What the block says.
        got: u32,
    },
    /// The content does not match its checksum.
    Checksum {
        /// What the block carries.
        expected: u32,
        /// What its content gives.
        got: u32,
    },
    /// The checksum is right, but the content is not what was written.
    Content {
        /// First byte that differs.
        offset: u32,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lba = self.lba;
        match &self.fault {
            Fault::Magic { got } => {
                write!(
                    f,
                    "LBA {lba}: expected a block written with --verify, got one that begins {got:#018x}"
                )
            }
            Fault::Lba { got } => write!(f, "LBA {lba}: expected block {lba}, got block {got}"),
            Fault::Seed { expected, got } => {
                write!(f, "LBA {lba}: expected the block of seed {expected:#x}, got that of seed {got:#x}")
            }
            Fault::Generation { expected, got } => write!(
                f,
                "LBA {lba}: expected generation {expected}, got {got}: a write was lost, late or done twice"
            ),
            Fault::Checksum { expected, got } => {
                write!(f, "LBA {lba}: expected CRC-32C {expected:#010x}, got {got:#010x}: content is damaged")
            }
            Fault::Content { offset } => {
                write!(f, "LBA {lba}: byte {offset} differs from what was written, under a right checksum")
            }
        }
    }
}

/// What one job has written, and what it found wrong.
#[derive(Debug)]
pub struct Verifier {
    mode: Verify,
    seed: u64,
    block_bytes: usize,
    /// Whether every block must be one of ours: nothing is written by this job.
    strict: bool,
    /// Writes done at each position, 0 for none.
    generations: Vec<u32>,
    /// Positions with something in flight.
    busy: Vec<u64>,
    mismatches: Vec<Mismatch>,
    mismatch_count: u64,
    checked_blocks: u64,
}

impl Verifier {
    /// A memory of `positions` places of I/O, on a device of `block_bytes` blocks.
    pub(crate) fn new(
        mode: Verify,
        seed: u64,
        block_bytes: u32,
        positions: u64,
        strict: bool,
    ) -> Result<Verifier, SetupError> {
        if positions > POSITIONS_MAX {
            return Err(SetupError::VerifyTooLarge { positions, positions_max: POSITIONS_MAX });
        }
        Ok(Verifier {
            mode,
            seed,
            block_bytes: block_bytes as usize,
            strict,
            generations: vec![0; positions as usize],
            busy: vec![0; positions.div_ceil(64) as usize],
            mismatches: Vec::new(),
            mismatch_count: 0,
            checked_blocks: 0,
        })
    }

    /// The first free position from `from` on, now taken. There is one: fewer are in flight.
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

    /// Gives a position back.
    pub(crate) fn release(&mut self, position: u64) {
        self.busy[(position / 64) as usize] &= !(1 << (position % 64));
    }

    /// Fills a write to `position`.
    pub(crate) fn fill(&self, position: u64, lba: u64, data: &mut [u8]) {
        let generation = self.next_generation(position);
        for (block, lba) in data.chunks_exact_mut(self.block_bytes).zip(lba..) {
            fill_block(block, lba, self.seed, generation);
        }
    }

    /// Notes how a write ended.
    pub(crate) fn written(&mut self, position: u64, success: bool) {
        let generation = if success { self.next_generation(position) } else { UNKNOWN };
        self.generations[position as usize] = generation;
    }

    /// Notes that a position reads as zeroes, or whatever it likes, from now on.
    pub(crate) fn forget(&mut self, position: u64) {
        self.generations[position as usize] = UNKNOWN;
    }

    /// Checks what was read from `position`; returns how many blocks were wrong.
    pub(crate) fn check(&mut self, position: u64, lba: u64, data: &[u8]) -> u32 {
        let generation = self.generations[position as usize];
        let mut wrong = 0;
        for (block, lba) in data.chunks_exact(self.block_bytes).zip(lba..) {
            let ours = word(block, MAGIC_AT) == MAGIC;
            if !ours && (generation == UNKNOWN || (generation == 0 && !self.strict)) {
                continue;
            }
            self.checked_blocks += 1;
            let expected = match generation {
                0 | UNKNOWN => None,
                generation => Some((self.seed, generation)),
            };
            if let Err(fault) = check_block(block, lba, expected, self.mode == Verify::Pattern) {
                wrong += 1;
                self.mismatch_count += 1;
                if self.mismatches.len() < SHOWN_MAX {
                    self.mismatches.push(Mismatch { lba, fault });
                }
            }
        }
        wrong
    }

    /// The first position at or after `from` whose content is known.
    pub(crate) fn known_from(&self, from: u64) -> Option<u64> {
        let known = |generation: &u32| *generation != 0 && *generation != UNKNOWN;
        let rest = self.generations.get(from as usize..)?;
        rest.iter().position(known).map(|ahead| from + ahead as u64)
    }

    /// The first mismatches.
    pub fn mismatches(&self) -> &[Mismatch] {
        &self.mismatches
    }

    /// How many blocks were wrong.
    pub fn mismatch_count(&self) -> u64 {
        self.mismatch_count
    }

    /// How many blocks were checked.
    pub fn checked_blocks(&self) -> u64 {
        self.checked_blocks
    }

    /// Generations run from 1 and skip the two words that mean something else.
    fn next_generation(&self, position: u64) -> u32 {
        match self.generations[position as usize] {
            UNKNOWN => UNKNOWN / 2,
            generation if generation >= UNKNOWN - 1 => 1,
            generation => generation + 1,
        }
    }
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

fn check_block(block: &[u8], lba: u64, expected: Option<(u64, u32)>, content: bool) -> Result<(), Fault> {
    let magic = word(block, MAGIC_AT);
    if magic != MAGIC {
        return Err(Fault::Magic { got: magic });
    }
    let carried = half_word(block, CHECKSUM_AT);
    let got = checksum(block);
    if carried != got {
        return Err(Fault::Checksum { expected: carried, got });
    }
    if word(block, LBA_AT) != lba {
        return Err(Fault::Lba { got: word(block, LBA_AT) });
    }
    let (seed, generation) = (word(block, SEED_AT), half_word(block, GENERATION_AT));
    if let Some((expected_seed, expected_generation)) = expected {
        if seed != expected_seed {
            return Err(Fault::Seed { expected: expected_seed, got: seed });
        }
        if generation != expected_generation {
            return Err(Fault::Generation { expected: expected_generation, got: generation });
        }
    }
    if content {
        let mut random = payload(lba, seed, generation);
        for (number, chunk) in block[PAYLOAD_AT..].chunks(8).enumerate() {
            if chunk != &random.next_bits().to_le_bytes()[..chunk.len()] {
                return Err(Fault::Content { offset: (PAYLOAD_AT + number * 8) as u32 });
            }
        }
    }
    Ok(())
}

fn payload(lba: u64, seed: u64, generation: u32) -> Random {
    Random::new(seed ^ lba.rotate_left(24) ^ u64::from(generation))
}

/// CRC-32C of the block without the field that carries it.
fn checksum(block: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&block[..CHECKSUM_AT]), &block[PAYLOAD_AT..])
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

    fn verifier(strict: bool) -> Verifier {
        Verifier::new(Verify::Pattern, 5, 512, 8, strict).unwrap()
    }

    #[test]
    fn what_was_written_is_accepted_and_any_flipped_bit_is_not() {
        let mut verifier = verifier(false);
        let mut data = vec![0; 1024];
        verifier.fill(2, 4, &mut data);
        verifier.written(2, true);
        assert_eq!(verifier.check(2, 4, &data), 0);
        for byte in 0..data.len() {
            data[byte] ^= 0x10;
            assert_eq!(verifier.check(2, 4, &data), 1, "byte {byte}");
            data[byte] ^= 0x10;
        }
        assert_eq!((verifier.mismatch_count(), verifier.mismatches().len()), (1024, SHOWN_MAX));
    }

    #[test]
    fn misplaced_lost_and_foreign_writes_are_named() {
        let mut verifier = verifier(false);
        let (mut first, mut second) = (vec![0; 512], vec![0; 512]);
        verifier.fill(0, 0, &mut first);
        verifier.written(0, true);
        verifier.fill(0, 0, &mut second);
        verifier.written(0, true);
        verifier.written(1, true);
        assert_eq!(verifier.check(0, 0, &second), 0);
        verifier.check(0, 0, &first);
        verifier.check(1, 1, &second);
        verifier.check(1, 1, &[0; 512]);
        let mut foreign = vec![0; 512];
        fill_block(&mut foreign, 1, 99, 1);
        verifier.check(1, 1, &foreign);
        let faults: Vec<Fault> =
            verifier.mismatches().iter().map(|mismatch| mismatch.fault.clone()).collect();
        let expected = [
            Fault::Generation { expected: 2, got: 1 },
            Fault::Lba { got: 0 },
            Fault::Magic { got: 0 },
            Fault::Seed { expected: 5, got: 99 },
        ];
        assert_eq!(faults, expected);
    }

    #[test]
    fn what_nobody_wrote_is_wrong_only_for_a_reader() {
        for (strict, wrong) in [(false, 0), (true, 1)] {
            assert_eq!(verifier(strict).check(3, 3, &[0; 512]), wrong);
        }
        let mut verifier = verifier(false);
        verifier.written(3, false);
        assert_eq!(verifier.check(3, 3, &[7; 512]), 0, "a write that failed may have left anything");
    }

    #[test]
    fn a_claimed_position_is_not_given_twice() {
        let mut verifier = verifier(false);
        let taken: Vec<u64> = (0..8).map(|_| verifier.claim(5)).collect();
        assert_eq!(taken, [5, 6, 7, 0, 1, 2, 3, 4]);
        verifier.release(6);
        assert_eq!(verifier.claim(0), 6);
    }
}
