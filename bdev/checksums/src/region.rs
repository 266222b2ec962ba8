//! The checksums of a region in memory, which all cores share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wire_blob::{CHECKSUMS_PER_REGION, ChecksumPage};

/// Writes may begin: the region's bit is durable.
const OPEN: u64 = 1 << 63;
/// A write has begun since the owner looked last.
const TOUCHED: u64 = 1 << 62;

/// The checksums of a region, and who writes to it.
///
/// A write begins only while the region is open, which it is while its bit is set on the device. The owner
/// closes it, which takes that no write is in flight, writes its checksums, and clears the bit.
#[derive(Debug)]
pub(crate) struct ChecksumRegion {
    pub(crate) index: u32,
    /// [`OPEN`], [`TOUCHED`], and the number of writes in flight.
    state: AtomicU64,
    blocks: [AtomicU64; CHECKSUMS_PER_REGION],
}

/// What is known of a block, in one word, so that cores change it without a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockState(u64);

/// What a read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The checksum is that of the data.
    Match,
    /// It is not known, or the block is being written.
    Unknown,
    /// It is another one. The block was in this state.
    Mismatch(BlockState),
}

/// What a write leaves in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Data with this checksum.
    Data(u32),
    /// What only the device knows: a part of the block was written, or the write has failed.
    Other,
    /// What no user relies on.
    Nothing,
}

impl BlockState {
    const WRITERS: u64 = 0xffff;
    const KNOWN: u64 = 1 << 16;
    /// To be read from the device before the region is clean.
    const STALE: u64 = 1 << 17;
    /// Writes overlapped: which of them the device did last is not known.
    const OVERLAP: u64 = 1 << 18;
    /// Changes with each write.
    const SEQUENCE: u64 = 1 << 19;
    const SEQUENCE_MASK: u64 = 0x1fff << 19;

    fn of(sum: u32) -> BlockState {
        BlockState(u64::from(sum) << 32 | BlockState::KNOWN)
    }

    fn sum(self) -> Option<u32> {
        (self.0 & BlockState::KNOWN > 0).then_some((self.0 >> 32) as u32)
    }

    fn writers(self) -> u64 {
        self.0 & BlockState::WRITERS
    }

    fn begun(self) -> BlockState {
        assert!(self.writers() < BlockState::WRITERS, "too many writes to a block: {self:?}");
        let overlap = if self.writers() > 0 { BlockState::OVERLAP } else { 0 };
        let sequence = self.0.wrapping_add(BlockState::SEQUENCE) & BlockState::SEQUENCE_MASK;
        let kept = BlockState::STALE | BlockState::OVERLAP | BlockState::WRITERS;
        BlockState((self.0 & kept | overlap | sequence) + 1)
    }

    fn ended(self, written: Written) -> BlockState {
        assert!(self.writers() > 0, "the end of a write that has not begun: {self:?}");
        let sequence = self.0 & BlockState::SEQUENCE_MASK;
        if self.writers() > 1 {
            return BlockState(self.0 - 1);
        }
        match written {
            Written::Data(sum) if self.0 & BlockState::OVERLAP == 0 => {
                BlockState(BlockState::of(sum).0 | sequence)
            }
            Written::Nothing if self.0 & BlockState::OVERLAP == 0 => BlockState(sequence),
            _ => BlockState(sequence | BlockState::STALE),
        }
    }
}

impl ChecksumRegion {
    fn with(index: u32, block: impl Fn(usize) -> BlockState) -> Arc<ChecksumRegion> {
        let blocks = std::array::from_fn(|at| AtomicU64::new(block(at).0));
        Arc::new(ChecksumRegion { index, state: AtomicU64::new(0), blocks })
    }

    /// A region with the checksums that the device has.
    pub(crate) fn new(index: u32, page: Option<&ChecksumPage>) -> Arc<ChecksumRegion> {
        let sum = |at: usize| page.and_then(|page| page.sums[at]);
        ChecksumRegion::with(index, |at| sum(at).map_or(BlockState(0), BlockState::of))
    }

    /// A region whose checksums the device does not have: a program ended before they were written.
    pub(crate) fn stale(index: u32) -> Arc<ChecksumRegion> {
        ChecksumRegion::with(index, |_| BlockState(BlockState::STALE))
    }

    /// Lets writes begin.
    pub(crate) fn open(&self) {
        self.state.fetch_or(OPEN | TOUCHED, Ordering::AcqRel);
    }

    /// Lets no write begin any more; fails if one is in flight.
    pub(crate) fn close(&self) -> bool {
        let close = |state: u64| (state & !(OPEN | TOUCHED) == 0).then_some(0);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, close).is_ok()
    }

    /// Whether a write has begun since this was asked last, or is in flight.
    pub(crate) fn take_touched(&self) -> bool {
        self.state.fetch_and(!TOUCHED, Ordering::AcqRel) & !OPEN > 0
    }

    /// Begins a write; `false` if the region is not open. Each ends with [`end_write`](Self::end_write).
    pub(crate) fn begin_write(&self) -> bool {
        let begin = |state: u64| (state & OPEN > 0).then_some((state | TOUCHED) + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin).is_ok()
    }

    pub(crate) fn end_write(&self) {
        let before = self.state.fetch_sub(1, Ordering::AcqRel);
        assert!(
            before & !(OPEN | TOUCHED) > 0,
            "the end of a write to region {} that has not begun",
            self.index
        );
    }

    /// A write to a block is in flight.
    pub(crate) fn begin_block(&self, at: usize) {
        let begin = |state: u64| Some(BlockState(state).begun().0);
        // It never refuses.
        _ = self.blocks[at].fetch_update(Ordering::AcqRel, Ordering::Acquire, begin);
    }

    /// A write to a block has ended.
    pub(crate) fn end_block(&self, at: usize, written: Written) {
        let end = |state: u64| Some(BlockState(state).ended(written).0);
        // It never refuses.
        _ = self.blocks[at].fetch_update(Ordering::AcqRel, Ordering::Acquire, end);
    }

    pub(crate) fn block(&self, at: usize) -> BlockState {
        BlockState(self.blocks[at].load(Ordering::Acquire))
    }

    /// Compares what was read of a block with its checksum.
    pub(crate) fn verify(&self, at: usize, sum: impl FnOnce() -> u32) -> Verdict {
        let state = self.block(at);
        match state.sum().filter(|_| state.writers() == 0) {
            None => Verdict::Unknown,
            Some(known) if known == sum() => Verdict::Match,
            Some(_) => Verdict::Mismatch(state),
        }
    }

    /// Whether blocks have to be read from the device before the region is clean.
    pub(crate) fn has_stale(&self) -> bool {
        (0..CHECKSUMS_PER_REGION).any(|at| self.block(at).0 & BlockState::STALE > 0)
    }

    /// Sets the checksums of stale blocks from what the device has; without, it could not be read. No write
    /// may be in flight.
    pub(crate) fn set_read(&self, content: Option<&[u8]>) {
        for (at, block) in self.blocks.iter().enumerate() {
            let bytes = wire_blob::CHECKSUM_BLOCK_BYTES as usize;
            let read = content.and_then(|content| content.get(at * bytes..(at + 1) * bytes));
            let set = |state: u64| {
                let is_stale = state & BlockState::STALE > 0 && BlockState(state).writers() == 0;
                let sequence = state & BlockState::SEQUENCE_MASK;
                let known = read.map_or(0, |read| BlockState::of(codec::crc32c(read)).0);
                is_stale.then_some(known | sequence)
            };
            // A block that is not stale stays.
            _ = block.fetch_update(Ordering::AcqRel, Ordering::Acquire, set);
        }
    }

    /// The checksums as the device is to have them.
    pub(crate) fn page(&self) -> ChecksumPage {
        ChecksumPage { region: self.index, sums: std::array::from_fn(|at| self.block(at).sum()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_leaves_its_checksum() {
        let region = ChecksumRegion::new(0, None);
        assert_eq!(region.verify(3, || 7), Verdict::Unknown);
        region.begin_block(3);
        assert_eq!(region.verify(3, || 7), Verdict::Unknown);
        region.end_block(3, Written::Data(7));
        assert_eq!(region.verify(3, || 7), Verdict::Match);
        assert_eq!(region.verify(3, || 8), Verdict::Mismatch(region.block(3)));
        assert_eq!(region.page().sums[3], Some(7));
        assert!(!region.has_stale());
    }

    #[test]
    fn writes_that_overlap_leave_what_only_the_device_knows() {
        for last in [Written::Data(8), Written::Nothing] {
            let region = ChecksumRegion::new(0, None);
            region.begin_block(0);
            region.begin_block(0);
            region.end_block(0, Written::Data(7));
            region.end_block(0, last);
            assert_eq!(region.verify(0, || 9), Verdict::Unknown);
            assert!(region.has_stale());
            region.set_read(Some(&[1; 1 << 20]));
            assert_eq!(region.verify(0, || codec::crc32c(&[1; 4096])), Verdict::Match);
            // The next write is one of its own again.
            region.begin_block(0);
            region.end_block(0, Written::Data(5));
            assert_eq!(region.verify(0, || 5), Verdict::Match);
        }
    }

    #[test]
    fn a_part_that_was_written_makes_a_block_stale_and_a_deallocation_unknown() {
        let region = ChecksumRegion::new(0, None);
        for (at, written) in [(0, Written::Other), (1, Written::Nothing)] {
            region.begin_block(at);
            region.end_block(at, Written::Data(7));
            region.begin_block(at);
            region.end_block(at, written);
            assert_eq!(region.verify(at, || 7), Verdict::Unknown);
        }
        assert_ne!(region.block(0).0 & BlockState::STALE, 0);
        assert_eq!(region.block(1).0 & BlockState::STALE, 0);
        // What cannot be read is not known.
        region.set_read(None);
        assert!(!region.has_stale());
        assert_eq!(region.page().sums[0], None);
    }

    #[test]
    fn each_write_changes_the_state_of_a_block_also_with_the_same_data() {
        let region = ChecksumRegion::new(0, None);
        let write = || {
            region.begin_block(0);
            region.end_block(0, Written::Data(7));
            region.block(0)
        };
        let (first, second) = (write(), write());
        assert_ne!(first, second);
        (0..100_000).for_each(|_| _ = write());
        assert_eq!(region.page().sums[0], Some(7));
        assert_eq!(region.page().sums[1], None);
    }

    #[test]
    fn a_region_closes_only_without_writes_and_takes_none_then() {
        let region = ChecksumRegion::new(0, None);
        assert!(!region.begin_write());
        region.open();
        assert!(region.begin_write());
        assert!(!region.close());
        region.end_write();
        assert!(region.take_touched());
        assert!(!region.take_touched());
        assert!(region.close());
        assert!(!region.begin_write());
    }
}
