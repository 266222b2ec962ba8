//! How a store uses memory, and when entries go in place.

use std::time::Duration;

/// How the partitions of an open store run. The contents of its devices are the same with all values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreTuning {
    /// Limit for checksums in memory, which all partitions share equally: 1 MiB has those of 1 GiB.
    pub checksum_cache_bytes: u64,
    /// A partition with more committed entries than this writes them in place: the flush threshold of the
    /// paper (Oh et al., section V-A). At most [`FLUSH_ENTRIES_MAX`](Self::FLUSH_ENTRIES_MAX).
    pub flush_entries: u32,
    /// A committed entry goes in place after this time even if there are few. At most
    /// [`FLUSH_AFTER_MAX`](Self::FLUSH_AFTER_MAX).
    pub flush_after: Duration,
}

impl StoreTuning {
    /// The highest threshold: as many entries as a batch has.
    pub const FLUSH_ENTRIES_MAX: u32 = 1024;
    /// The longest time.
    pub const FLUSH_AFTER_MAX: Duration = Duration::from_secs(60);
}

impl Default for StoreTuning {
    fn default() -> StoreTuning {
        StoreTuning {
            checksum_cache_bytes: 64 << 20,
            flush_entries: 16,
            flush_after: Duration::from_millis(100),
        }
    }
}
