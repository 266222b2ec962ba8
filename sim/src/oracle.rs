//! What each block may contain, given which writes were acknowledged, failed or lost with the power.

use std::fmt;

use random::WyRand;

/// Bytes of a block: the unit that a disk writes whole.
pub(crate) const BLOCK_BYTES: usize = 512;

/// A block had contents that no correct system can return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The block.
    pub lba: u64,
    /// The version that was read; `None` if the contents are none that was ever written there.
    pub found: Option<u64>,
    /// The versions that it may have.
    pub allowed: Vec<u64>,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { lba, found, allowed } = self;
        match found {
            Some(found) => write!(formatter, "block {lba} has version {found}, which is none of {allowed:?}"),
            None => {
                write!(formatter, "block {lba} has contents that were never written, not one of {allowed:?}")
            }
        }
    }
}

/// When a request was submitted, as [`Oracle::now`] counts.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    change: u64,
    power_failures: u64,
}

/// The possible contents of each block of a disk.
///
/// The rules: an acknowledged write must be read back. A write that failed happened once or never: whichever a read
/// shows stays true. After a power failure a block has its last durable version or any later one that was written,
/// where an acknowledged write with FUA is durable, and an acknowledged one without it when a flush that was submitted
/// afterwards was acknowledged and the power did not fail in between. (A flush that was retried after a power failure
/// succeeds, although it cannot bring back what was lost: it promises nothing about earlier writes.) Requests that
/// overlap a write in flight are the caller's to avoid.
pub struct Oracle {
    blocks: Vec<Block>,
    last_version: u64,
    changes: u64,
    power_failures: u64,
}

struct Block {
    /// A read may return these.
    current: Vec<u64>,
    /// The disk may have these after a power failure.
    medium: Vec<u64>,
    /// Number of the last change.
    changed: u64,
    /// The last write was acknowledged, so that `current` is what a flush makes durable.
    settled: bool,
}

impl Oracle {
    /// A disk of zeroes: version 0.
    pub fn new(blocks: u64) -> Oracle {
        let block = || Block { current: vec![0], medium: vec![0], changed: 0, settled: true };
        let blocks = (0..blocks).map(|_| block()).collect();
        Oracle { blocks, last_version: 0, changes: 0, power_failures: 0 }
    }

    /// The time of a submission.
    pub fn now(&self) -> Moment {
        Moment { change: self.changes, power_failures: self.power_failures }
    }

    /// A new version for a write.
    pub fn next_version(&mut self) -> u64 {
        self.last_version += 1;
        self.last_version
    }

    /// A write was acknowledged.
    pub fn write_acknowledged(&mut self, lba: u64, blocks: u32, version: u64, fua: bool, submitted: Moment) {
        self.changes += 1;
        let power_failed = submitted.power_failures != self.power_failures;
        for block in Self::range(&mut self.blocks, lba, blocks) {
            block.changed = self.changes;
            if fua {
                (block.current, block.medium, block.settled) = (vec![version], vec![version], true);
            } else {
                add(&mut block.medium, version);
                block.settled = !power_failed;
                // The acknowledgement may be from before the power failure.
                block.current = if power_failed { block.medium.clone() } else { vec![version] };
            }
        }
    }

    /// A write failed: it happened, or never does.
    pub fn write_failed(&mut self, lba: u64, blocks: u32, version: u64) {
        self.changes += 1;
        for block in Self::range(&mut self.blocks, lba, blocks) {
            block.changed = self.changes;
            block.settled = false;
            add(&mut block.current, version);
            add(&mut block.medium, version);
        }
    }

    /// A flush was acknowledged.
    pub fn flush_acknowledged(&mut self, submitted: Moment) {
        if submitted.power_failures != self.power_failures {
            return;
        }
        for block in &mut self.blocks {
            if block.settled && block.changed <= submitted.change {
                block.medium.clone_from(&block.current);
            }
        }
    }

    /// The power of the disk failed.
    pub fn power_failed(&mut self) {
        self.changes += 1;
        self.power_failures += 1;
        for block in &mut self.blocks {
            block.changed = self.changes;
            block.settled = false;
            block.current.clone_from(&block.medium);
        }
    }

    /// A read returned `data`.
    ///
    /// # Errors
    /// A block has contents that it cannot have.
    pub fn read_returned(&mut self, lba: u64, data: &[u8], submitted: Moment) -> Result<(), Violation> {
        // A read from before a power failure may show what was lost.
        let check = submitted.power_failures == self.power_failures;
        let blocks = Self::range(&mut self.blocks, lba, (data.len() / BLOCK_BYTES) as u32);
        for ((lba, block), data) in (lba..).zip(blocks).zip(data.chunks(BLOCK_BYTES)) {
            let found = decode(lba, data);
            let allowed = found.is_some_and(|version| block.current.contains(&version));
            if found.is_none() || check && !allowed {
                return Err(Violation { lba, found, allowed: block.current.clone() });
            }
            if check {
                block.current = found.into_iter().collect();
            }
        }
        Ok(())
    }

    fn range(blocks: &mut [Block], lba: u64, count: u32) -> &mut [Block] {
        &mut blocks[lba as usize..][..count as usize]
    }
}

fn add(versions: &mut Vec<u64>, version: u64) {
    if !versions.contains(&version) {
        versions.push(version);
    }
}

/// Fills a block with a version.
pub(crate) fn encode(lba: u64, version: u64, block: &mut [u8]) {
    if version == 0 {
        return block.fill(0);
    }
    let mut random = WyRand::new(version ^ lba << 40);
    block[..8].copy_from_slice(&version.to_le_bytes());
    for word in block[8..].chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_bits().to_le_bytes());
    }
}

/// The version of a block; `None` if it is torn or another block's.
fn decode(lba: u64, block: &[u8]) -> Option<u64> {
    let version = u64::from_le_bytes(*block.first_chunk()?);
    let mut expected = [0; BLOCK_BYTES];
    encode(lba, version, &mut expected);
    (block == expected).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(lba: u64, version: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        encode(lba, version, &mut block);
        block
    }

    fn reads(oracle: &mut Oracle, version: u64) -> bool {
        let now = oracle.now();
        oracle.read_returned(0, &block(0, version), now).is_ok()
    }

    #[test]
    fn an_acknowledged_write_is_read_back() {
        let mut oracle = Oracle::new(2);
        let (before, version) = (oracle.now(), oracle.next_version());
        assert!(reads(&mut oracle, 0));
        oracle.write_acknowledged(0, 1, version, false, before);
        assert!(reads(&mut oracle, version) && !reads(&mut oracle, 0));
        assert!(oracle.read_returned(1, &block(1, 0), before).is_ok());
        // Torn, or of another block.
        let mut torn = block(0, version);
        torn[300] ^= 1;
        assert_eq!(oracle.read_returned(0, &torn, before).unwrap_err().found, None);
        assert_eq!(oracle.read_returned(1, &block(0, version), before).unwrap_err().found, None);
    }

    #[test]
    fn a_failed_write_happened_once_or_never() {
        for happened in [false, true] {
            let mut oracle = Oracle::new(1);
            let version = oracle.next_version();
            oracle.write_failed(0, 1, version);
            let (seen, other) = if happened { (version, 0) } else { (0, version) };
            assert!(reads(&mut oracle, seen) && reads(&mut oracle, seen));
            assert!(!reads(&mut oracle, other), "it happened late, or was undone");
        }
    }

    #[test]
    fn a_power_failure_keeps_what_is_durable_and_may_keep_what_is_not() {
        for (fua, flush) in [(false, false), (true, false), (false, true)] {
            let mut oracle = Oracle::new(1);
            let (before, version) = (oracle.now(), oracle.next_version());
            oracle.write_acknowledged(0, 1, version, fua, before);
            if flush {
                let now = oracle.now();
                oracle.flush_acknowledged(now);
            }
            oracle.power_failed();
            assert_eq!(oracle.blocks[0].current.contains(&0), !fua && !flush, "{fua} {flush}");
            assert!(reads(&mut oracle, version));
        }
    }

    #[test]
    fn a_flush_that_outlives_a_power_failure_promises_nothing() {
        let mut oracle = Oracle::new(1);
        let (before, version) = (oracle.now(), oracle.next_version());
        oracle.write_acknowledged(0, 1, version, false, before);
        let submitted = oracle.now();
        oracle.power_failed();
        oracle.flush_acknowledged(submitted);
        assert!(reads(&mut oracle, 0), "the write is lost");
        // Acknowledged on the way when the power failed.
        let late = oracle.next_version();
        oracle.power_failed();
        oracle.write_acknowledged(0, 1, late, false, submitted);
        assert!(oracle.blocks[0].current.len() > 1);
    }
}
