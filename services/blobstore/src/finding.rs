//! What is wrong with a store, in words.

use std::fmt;

use wire_blob::{BlobId, DecodeError, MaskKind};

use crate::blob::BlobDamage;
use crate::recover::RecoveredOperation;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreSeverity {
    /// Nothing is wrong: a store that was not unloaded, or an operation that its end cut in two.
    Note,
    /// Space that cannot be used until the masks are rebuilt.
    Leak,
    /// Data is lost, or will be by the next write.
    Damage,
}

/// Numbers in ranges, as few as possible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumberRanges {
    ranges: Vec<(u32, u32)>,
    count: u64,
}

impl NumberRanges {
    /// Ranges that are printed; more are counted.
    const SHOWN_MAX: usize = 8;

    /// How many numbers there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The ranges, each with its first and last number.
    pub fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }
}

impl FromIterator<u32> for NumberRanges {
    /// Collects ascending numbers.
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> NumberRanges {
        let mut collected = NumberRanges::default();
        for number in numbers {
            collected.count += 1;
            match collected.ranges.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
                _ => collected.ranges.push((number, number)),
            }
        }
        collected
    }
}

impl fmt::Display for NumberRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().take(Self::SHOWN_MAX).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        match self.ranges.len().saturating_sub(Self::SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more ranges"),
        }
    }
}

/// Something that is not as it is in a store that was unloaded properly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreFinding {
    /// The store was not unloaded: what is used was found by reading all metadata.
    NotUnloaded,
    /// The mask cannot be used, so that all metadata was read.
    Mask {
        /// Which one.
        kind: MaskKind,
        /// Why.
        error: DecodeError,
    },
    /// The number of bits of a mask is not that of what it is of.
    MaskLength {
        /// Which one.
        kind: MaskKind,
        /// Its bits.
        found: u32,
        /// What the bits are of.
        expected: u32,
    },
    /// An operation was cut in two, and was finished or undone.
    Recovered(RecoveredOperation),
    /// A snapshot was being made or deleted, and what became of that is not clear.
    Unclear {
        /// The snapshot.
        snapshot: BlobId,
        /// The blob of which it is a snapshot, if the store says so.
        clone: Option<BlobId>,
    },
    /// A blob was being resized: its extent pages are those of another size than its extent table.
    Resize {
        /// The blob.
        blob: BlobId,
        /// The clusters that its extent table says.
        table: u32,
        /// The clusters of its extent pages, up to the last that was read.
        extents: u32,
        /// The clusters that it has.
        clusters: u32,
    },
    /// A blob cannot be used.
    Unusable {
        /// The blob.
        blob: BlobId,
        /// Why.
        damage: BlobDamage,
    },
    /// A blob's snapshot is not there, or cannot be used.
    NoParent {
        /// The blob.
        blob: BlobId,
        /// Its snapshot.
        parent: BlobId,
    },
    /// A blob is its own ancestor.
    ParentCycle {
        /// The blob.
        blob: BlobId,
    },
    /// The super blob is not there, or cannot be used.
    NoSuperBlob {
        /// The super blob.
        blob: BlobId,
    },
    /// A cluster or metadata page has several owners.
    Shared {
        /// Whether it is a cluster or a page.
        kind: MaskKind,
        /// The cluster or page.
        number: u32,
        /// The owners; one that has it twice is there twice.
        owners: Vec<BlobId>,
    },
    /// Clusters or pages are marked as used, but have no owner.
    Leaked {
        /// Whether they are clusters or pages.
        kind: MaskKind,
        /// Which.
        numbers: NumberRanges,
    },
    /// Clusters or pages have owners, but are not marked as used: the next allocation may take them.
    Unmarked {
        /// Whether they are clusters or pages.
        kind: MaskKind,
        /// Which.
        numbers: NumberRanges,
    },
    /// Metadata pages are neither empty nor have a right CRC.
    ///
    /// In a store that was not unloaded, a power failure may have left half of a page that no blob had yet.
    /// Half of a blob's first page, which SPDK replaces without a copy, looks the same.
    InvalidPages {
        /// Which.
        numbers: NumberRanges,
        /// Whether the store was unloaded.
        unloaded: bool,
    },
    /// Metadata pages that may be half of the first page of a blob, whose pages and clusters are not known. Only
    /// a repair says so: see [`StoreRepair::left`](crate::StoreRepair::left).
    Doubtful {
        /// Which.
        numbers: NumberRanges,
    },
    /// Metadata pages, or the super block, were half written, and are as their copies say.
    Restored {
        /// The metadata pages.
        pages: NumberRanges,
        /// Whether the super block was.
        super_block: bool,
    },
    /// The metadata has a blob that the mask of blob ids lacks.
    Unlisted {
        /// The blob.
        blob: BlobId,
    },
    /// There are more findings than are listed.
    More {
        /// Findings that are not listed.
        count: u64,
    },
}

impl StoreFinding {
    /// How bad it is.
    pub fn severity(&self) -> StoreSeverity {
        use StoreFinding::*;
        match self {
            NotUnloaded
            | Recovered(_)
            | Resize { .. }
            | Restored { .. }
            | InvalidPages { unloaded: false, .. } => StoreSeverity::Note,
            Leaked { .. } => StoreSeverity::Leak,
            Mask { .. }
            | MaskLength { .. }
            | Unclear { .. }
            | Unusable { .. }
            | NoParent { .. }
            | ParentCycle { .. }
            | NoSuperBlob { .. }
            | Shared { .. }
            | Unmarked { .. }
            | InvalidPages { unloaded: true, .. }
            | Doubtful { .. }
            | Unlisted { .. }
            | More { .. } => StoreSeverity::Damage,
        }
    }
}

/// What a mask is of: one, and several.
pub(crate) fn names(kind: MaskKind) -> (&'static str, &'static str) {
    match kind {
        MaskKind::Pages => ("metadata page", "metadata pages"),
        MaskKind::Clusters => ("cluster", "clusters"),
        MaskKind::BlobIds => ("blob id", "blob ids"),
    }
}

impl fmt::Display for StoreFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use StoreFinding::*;
        match self {
            NotUnloaded => {
                write!(f, "the store was not unloaded; what is used was found by reading all metadata")
            }
            Mask { kind, error } => {
                write!(
                    f,
                    "the mask of used {} cannot be used, so that all metadata was read: {error}",
                    names(*kind).1
                )
            }
            MaskLength { kind, found, expected } => {
                write!(
                    f,
                    "the mask of used {} has {found} bits, but the store has {expected}",
                    names(*kind).1
                )
            }
            Recovered(operation) => write!(f, "{operation}"),
            Unclear { snapshot, clone: Some(clone) } => write!(
                f,
                "snapshot {snapshot} of blob {clone} was being made or deleted, and blob {clone} does not say which of both is valid"
            ),
            Unclear { snapshot, clone: None } => {
                write!(f, "snapshot {snapshot} was being made or deleted, and does not name its blob")
            }
            Resize { blob, table, extents, clusters } => write!(
                f,
                "blob {blob} was being resized: its table says {table} clusters and its extent pages {extents}; it has {clusters}"
            ),
            Unusable { blob, damage } => write!(f, "blob {blob} cannot be used: {damage}"),
            NoParent { blob, parent } => {
                write!(f, "blob {blob} is a clone of snapshot {parent}, which is not there or cannot be used")
            }
            ParentCycle { blob } => {
                write!(f, "blob {blob} is a clone of itself, by the snapshots that it names")
            }
            NoSuperBlob { blob } => write!(f, "the super blob {blob} is not there or cannot be used"),
            Shared { kind, number, owners } => {
                write!(f, "{} {number} has several owners: blobs", names(*kind).0)?;
                let comma = |index| if index == 0 { " " } else { ", " };
                owners.iter().enumerate().try_for_each(|(index, owner)| write!(f, "{}{owner}", comma(index)))
            }
            Leaked { kind, numbers } => match (numbers.count(), names(*kind)) {
                (1, (what, _)) => write!(f, "1 {what} is marked as used, but has no owner: {numbers}"),
                (count, (_, what)) => {
                    write!(f, "{count} {what} are marked as used, but have no owner: {numbers}")
                }
            },
            Unmarked { kind, numbers } => match (numbers.count(), names(*kind)) {
                (1, (what, _)) => write!(f, "1 {what} has an owner, but is not marked as used: {numbers}"),
                (count, (_, what)) => {
                    write!(f, "{count} {what} have an owner, but are not marked as used: {numbers}")
                }
            },
            Restored { pages, super_block: true } if pages.count() == 0 => {
                write!(f, "the super block was half written, and is as it was before or after")
            }
            Restored { pages, super_block } => {
                let also = if *super_block { "; so was the super block" } else { "" };
                write!(f, "metadata pages were half written, and are as their copies say: {pages}{also}")
            }
            InvalidPages { numbers, .. } => match numbers.count() {
                1 => write!(f, "1 metadata page is neither empty nor valid: {numbers}"),
                count => write!(f, "{count} metadata pages are neither empty nor valid: {numbers}"),
            },
            Doubtful { numbers } => match numbers.count() {
                1 => write!(f, "metadata page {numbers} may be half of the first page of a blob"),
                _ => write!(f, "metadata pages {numbers} may be halves of first pages of blobs"),
            },
            Unlisted { blob } => write!(f, "the mask of blob ids lacks blob {blob}, which the metadata has"),
            More { count } => write!(f, "{count} more findings are not listed"),
        }
    }
}
