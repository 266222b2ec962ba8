//! The super block, the first 4 KiB of a store.

use codec::DecodeError;

use crate::fields::{array, open, put, seal, u32_at, u64_at};
use crate::{BlobId, FORMAT_VERSION, PAGE_BYTES};

/// Bytes of the name of a store's type.
pub const STORE_TYPE_BYTES: usize = 16;

const SIGNATURE: [u8; 8] = *b"SPDKBLOB";
/// The field that says that no blob is the super blob.
const NO_BLOB: u64 = u64::MAX;
/// Metadata pages larger than any device's block are an error of the device, not a wish.
const METADATA_PAGE_BYTES_MAX: u32 = 1 << 20;

const VERSION_AT: usize = 8;
const LENGTH_AT: usize = 12;
const CLEAN_AT: usize = 16;
const SUPER_BLOB_AT: usize = 20;
const CLUSTER_BYTES_AT: usize = 28;
const USED_PAGES_AT: usize = 32;
const USED_CLUSTERS_AT: usize = 40;
const METADATA_AT: usize = 48;
const STORE_TYPE_AT: usize = 56;
const USED_BLOB_IDS_AT: usize = 72;
const SIZE_AT: usize = 80;
const IO_UNIT_AT: usize = 88;
const METADATA_PAGE_AT: usize = 92;
const RESERVED_AT: usize = 96;
const _: () =
    assert!(METADATA_AT + 8 == STORE_TYPE_AT && STORE_TYPE_AT + STORE_TYPE_BYTES == USED_BLOB_IDS_AT);

/// A range of metadata pages, counted from the start of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageRange {
    /// The first page.
    pub start: u32,
    /// Number of pages.
    pub pages: u32,
}

impl PageRange {
    /// The page after the last one.
    pub const fn end(self) -> u64 {
        self.start as u64 + self.pages as u64
    }

    const fn overlaps(self, other: PageRange) -> bool {
        (self.start as u64) < other.end() && (other.start as u64) < self.end()
    }
}

/// What a store is: its geometry, where its parts are, and whether it was unloaded properly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SuperBlock {
    /// Version of the format, 1 to 3.
    pub version: u32,
    /// Whether the masks are those of the metadata: the store was unloaded, and not changed since.
    pub clean: bool,
    /// The blob from which the store's owner finds the others.
    pub super_blob: Option<BlobId>,
    /// Bytes of a cluster, a multiple of 4096.
    pub cluster_bytes: u32,
    /// The mask of used metadata pages.
    pub used_pages: PageRange,
    /// The mask of used clusters. What follows it up to the next part is for when the store grows.
    pub used_clusters: PageRange,
    /// The mask of used blob ids, which versions 1 and 2 lack.
    pub used_blob_ids: Option<PageRange>,
    /// The metadata region, from whose start pages count.
    pub metadata: PageRange,
    /// The name of the store's owner, as `LVOLSTORE`, padded with zeroes.
    pub store_type: [u8; STORE_TYPE_BYTES],
    /// Bytes of the store; without, it is as large as its device.
    pub size_bytes: Option<u64>,
    /// Bytes of the smallest read or write, a power of two; 4096 in stores that do not say it.
    pub io_unit_bytes: u32,
    /// Bytes of a metadata page, a power of two; 4096 in stores that do not say it.
    pub metadata_page_bytes: u32,
}

impl SuperBlock {
    /// Decodes the first [`PAGE_BYTES`] of a device. Whether the parts are within the device is the caller's
    /// to check.
    ///
    /// # Errors
    /// The first field that no super block of versions 1 to 3 has.
    pub fn decode(from: &[u8]) -> Result<SuperBlock, DecodeError> {
        if from.len() >= SIGNATURE.len() && from[..SIGNATURE.len()] != SIGNATURE {
            let found = u64::from_be_bytes(array(from, 0));
            return Err(DecodeError::value("the signature of the super block", 0, found));
        }
        let from = open(from, "the super block", "the CRC of the super block")?;
        let word = |at| u32_at(from, at);
        let range = |at| PageRange { start: word(at), pages: word(at + 4) };
        let wrong = |what, at| Err(DecodeError::value(what, at as u32, word(at).into()));
        if !(1..=FORMAT_VERSION).contains(&word(VERSION_AT)) {
            return wrong("the version of the super block", VERSION_AT);
        }
        if word(LENGTH_AT) != PAGE_BYTES as u32 {
            return wrong("the length of the super block", LENGTH_AT);
        }
        if word(CLEAN_AT) > 1 {
            return wrong("the clean field of the super block", CLEAN_AT);
        }
        if let Some(at) = (RESERVED_AT..PAGE_BYTES - 4).find(|at| from[*at] != 0) {
            return Err(DecodeError::value("a reserved byte of the super block", at as u32, from[at].into()));
        }
        let or_page = |value| if value == 0 { PAGE_BYTES as u32 } else { value };
        let blob_ids = range(USED_BLOB_IDS_AT);
        let super_block = SuperBlock {
            version: word(VERSION_AT),
            clean: word(CLEAN_AT) == 1,
            super_blob: Some(u64_at(from, SUPER_BLOB_AT)).filter(|id| *id != NO_BLOB).map(BlobId),
            cluster_bytes: word(CLUSTER_BYTES_AT),
            used_pages: range(USED_PAGES_AT),
            used_clusters: range(USED_CLUSTERS_AT),
            used_blob_ids: (blob_ids.pages > 0).then_some(blob_ids),
            metadata: range(METADATA_AT),
            store_type: array(from, STORE_TYPE_AT),
            size_bytes: Some(u64_at(from, SIZE_AT)).filter(|bytes| *bytes > 0),
            io_unit_bytes: or_page(word(IO_UNIT_AT)),
            metadata_page_bytes: or_page(word(METADATA_PAGE_AT)),
        };
        super_block.check()?;
        Ok(super_block)
    }

    /// Decodes a super block that a power failure left half written: parts of the one before, and parts of
    /// the one after. They differ in few fields, all of the first 512 bytes, and in the CRC; this tries the
    /// values of `clean`. The result is not clean in any case. `None` if none of them has the CRC.
    pub fn restore(from: &[u8]) -> Option<SuperBlock> {
        let page = from.first_chunk::<PAGE_BYTES>()?;
        let mut candidates = [*page, *page];
        put(&mut candidates[0], CLEAN_AT, &0u32.to_le_bytes());
        put(&mut candidates[1], CLEAN_AT, &1u32.to_le_bytes());
        let found = candidates.iter().find_map(|candidate| SuperBlock::decode(candidate).ok())?;
        Some(SuperBlock { clean: false, ..found })
    }

    /// Decodes a super block whatever its CRC is: where its masks are, before and after a write that a power
    /// failure cut in two.
    ///
    /// # Errors
    /// The first field that no super block of versions 1 to 3 has.
    pub fn decode_torn(from: &[u8]) -> Result<SuperBlock, DecodeError> {
        let Some(page) = from.first_chunk::<PAGE_BYTES>() else {
            return SuperBlock::decode(from);
        };
        let mut sealed = *page;
        seal(&mut sealed);
        SuperBlock::decode(&sealed)
    }

    /// Checks sizes, and that masks and metadata region do not overlap.
    fn check(&self) -> Result<(), DecodeError> {
        let wrong = |what, at: usize, value: u32| Err(DecodeError::value(what, at as u32, value.into()));
        let cluster = self.cluster_bytes;
        if cluster == 0 || !cluster.is_multiple_of(PAGE_BYTES as u32) {
            return wrong("the cluster size", CLUSTER_BYTES_AT, cluster);
        }
        let unit = self.io_unit_bytes;
        if !unit.is_power_of_two() || unit < 512 || !cluster.is_multiple_of(unit) {
            return wrong("the I/O unit size", IO_UNIT_AT, unit);
        }
        let page = self.metadata_page_bytes;
        let is_page = page.is_power_of_two() && (PAGE_BYTES as u32..=METADATA_PAGE_BYTES_MAX).contains(&page);
        if !is_page || page > cluster {
            return wrong("the metadata page size", METADATA_PAGE_AT, page);
        }
        if self.metadata.pages == 0 {
            return wrong("the length of the metadata region", METADATA_AT + 4, 0);
        }
        let mut parts = vec![
            ("the start of the metadata region", METADATA_AT, self.metadata),
            ("the start of the mask of pages", USED_PAGES_AT, self.used_pages),
            ("the start of the mask of clusters", USED_CLUSTERS_AT, self.used_clusters),
        ];
        let blob_ids =
            self.used_blob_ids.map(|part| ("the start of the mask of blob ids", USED_BLOB_IDS_AT, part));
        parts.extend(blob_ids);
        let super_block = PageRange { start: 0, pages: 1 };
        for (index, (what, at, part)) in parts.iter().enumerate() {
            let overlaps = parts[..index].iter().any(|(_, _, before)| before.overlaps(*part));
            if overlaps || part.overlaps(super_block) {
                return wrong(what, *at, part.start);
            }
        }
        Ok(())
    }

    /// Encodes the super block; the inverse of [`decode`](Self::decode).
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        let mut out = [0; PAGE_BYTES];
        let mut word = |at, value: u32| put(&mut out, at, &value.to_le_bytes());
        let blob_ids = self.used_blob_ids.unwrap_or_default();
        let ranges = [
            (USED_PAGES_AT, self.used_pages),
            (USED_CLUSTERS_AT, self.used_clusters),
            (USED_BLOB_IDS_AT, blob_ids),
            (METADATA_AT, self.metadata),
        ];
        for (at, range) in ranges {
            word(at, range.start);
            word(at + 4, range.pages);
        }
        word(VERSION_AT, self.version);
        word(LENGTH_AT, PAGE_BYTES as u32);
        word(CLEAN_AT, self.clean.into());
        word(CLUSTER_BYTES_AT, self.cluster_bytes);
        word(IO_UNIT_AT, self.io_unit_bytes);
        word(METADATA_PAGE_AT, self.metadata_page_bytes);
        put(&mut out, 0, &SIGNATURE);
        put(&mut out, SUPER_BLOB_AT, &self.super_blob.map_or(NO_BLOB, |id| id.0).to_le_bytes());
        put(&mut out, STORE_TYPE_AT, &self.store_type);
        put(&mut out, SIZE_AT, &self.size_bytes.unwrap_or(0).to_le_bytes());
        seal(&mut out);
        out
    }

    /// The name of the store's owner without its padding.
    pub fn store_type_text(&self) -> String {
        let end = self.store_type.iter().position(|byte| *byte == 0).unwrap_or(STORE_TYPE_BYTES);
        String::from_utf8_lossy(&self.store_type[..end]).into_owned()
    }
}
