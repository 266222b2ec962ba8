//! Faults that tests plant, to see that the crash tests would find them.

/// Something that is left out, or done too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum FileFault {
    /// A sync writes the length before the data.
    LengthBeforeData,
    /// A sync does not flush.
    FlushLeftOut,
    /// A sync does not write the length.
    LengthLeftOut,
    /// A new file is not marked until its first sync.
    NewNotMarked,
    /// A file that is unlinked while open is not marked.
    UnlinkedNotMarked,
    /// A rename deletes the file that it replaces before.
    ReplacedDeletedFirst,
    /// A rename does not say that the file is newer.
    NotNewer,
    /// A rename does not write the data of the file.
    RenamedWithoutData,
    /// What a write leaves between the end of the file and itself is not zero.
    HoleNotZeroed,
    /// Clusters are freed, but the length stays.
    TrimmedNotShortened,
    /// Blocks that are written in part lose the rest.
    PatchWithoutRest,
    /// What was read ahead is not forgotten when it is written.
    CacheNotInvalidated,
    /// What is ahead of a log is not zero.
    LogNotZeroed,
    /// Blocks of a log are written in any order.
    LogBlocksUnordered,
    /// A log that is closed keeps its length ahead.
    LogNotShortened,
    /// A sync of a log leaves its write in the device's cache.
    LogInCache,
}

impl FileFault {
    #[cfg(test)]
    pub(crate) const ALL: [FileFault; 16] = [
        FileFault::LengthBeforeData,
        FileFault::FlushLeftOut,
        FileFault::LengthLeftOut,
        FileFault::NewNotMarked,
        FileFault::UnlinkedNotMarked,
        FileFault::ReplacedDeletedFirst,
        FileFault::NotNewer,
        FileFault::RenamedWithoutData,
        FileFault::HoleNotZeroed,
        FileFault::TrimmedNotShortened,
        FileFault::PatchWithoutRest,
        FileFault::CacheNotInvalidated,
        FileFault::LogNotZeroed,
        FileFault::LogBlocksUnordered,
        FileFault::LogNotShortened,
        FileFault::LogInCache,
    ];
}
