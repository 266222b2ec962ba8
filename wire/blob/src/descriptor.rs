//! Descriptors: the content of metadata pages.

use codec::DecodeError;

use crate::DESCRIPTOR_AREA_BYTES;
use crate::fields::{u16_at, u32_at, u64_at};

const PADDING: u8 = 0;
const EXTENT_RLE: u8 = 1;
const XATTR: u8 = 2;
const FLAGS: u8 = 3;
const XATTR_INTERNAL: u8 = 4;
const EXTENT_TABLE: u8 = 5;
const EXTENT_PAGE: u8 = 6;

/// Bytes before a descriptor's content: its type, and the length of the content.
const HEADER_BYTES: usize = 5;
/// Bytes of a run of clusters, or of pages of an extent table.
const RUN_BYTES: usize = 8;

/// Flags of a blob in three sets, by what a program that does not know one of them may do with the blob.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlobFlags {
    /// Flags without whose knowledge the blob must not be opened.
    pub invalid: u64,
    /// Flags without whose knowledge neither data nor metadata may be changed.
    pub data_read_only: u64,
    /// Flags without whose knowledge the metadata must not be changed.
    pub metadata_read_only: u64,
}

impl BlobFlags {
    /// In `invalid`: clusters may be unallocated.
    pub const THIN: u64 = 1 << 0;
    /// In `invalid`: the blob has internal xattrs.
    pub const INTERNAL_XATTRS: u64 = 1 << 1;
    /// In `invalid`: clusters are in extent pages rather than runs.
    pub const EXTENT_TABLE: u64 = 1 << 2;
    /// In `invalid`: unallocated clusters are those of a device outside the store.
    pub const EXTERNAL_SNAPSHOT: u64 = 1 << 3;
    /// In `data_read_only`: data and metadata are not changed.
    pub const READ_ONLY: u64 = 1 << 0;
    /// In `metadata_read_only`: how clusters are cleared that the blob no longer needs.
    pub const CLEAR_METHOD: u64 = 3;

    const INVALID_KNOWN: u64 =
        Self::THIN | Self::INTERNAL_XATTRS | Self::EXTENT_TABLE | Self::EXTERNAL_SNAPSHOT;

    /// Whether clusters may be unallocated.
    pub const fn is_thin(&self) -> bool {
        self.invalid & Self::THIN != 0
    }

    /// Whether the blob is a clone of an external snapshot.
    pub const fn has_external_snapshot(&self) -> bool {
        self.invalid & Self::EXTERNAL_SNAPSHOT != 0
    }

    /// The flags of `invalid` that the format does not define.
    pub const fn unknown_invalid(&self) -> u64 {
        self.invalid & !Self::INVALID_KNOWN
    }

    /// Whether data must not be changed: it is read-only, or has flags that the format does not define.
    pub const fn is_data_read_only(&self) -> bool {
        self.data_read_only != 0
    }

    /// Whether metadata must not be changed.
    pub const fn is_metadata_read_only(&self) -> bool {
        self.data_read_only != 0 || self.metadata_read_only & !Self::CLEAR_METHOD != 0
    }
}

/// An extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xattr {
    /// The name, without a terminator.
    pub name: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
}

/// Consecutive clusters of a blob that are consecutive on the device, or all unallocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobClusterRun {
    /// The first cluster on the device; 0 if they are unallocated.
    pub cluster: u32,
    /// Number of clusters.
    pub length: u32,
}

/// Consecutive extent pages: one that is allocated, or several that are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentTableRun {
    /// The metadata page; 0 if they are unallocated.
    pub page: u32,
    /// Number of extent pages; 1 if allocated.
    pub length: u32,
}

/// A part of the table of a blob's extent pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentTable {
    /// Clusters of the whole blob, the same in each part.
    pub clusters: u64,
    /// The extent pages, in order.
    pub runs: Vec<ExtentTableRun>,
}

/// The content of an extent page, which is the only descriptor of a page outside the blob's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentPage {
    /// Index within the blob of the first cluster.
    pub first: u32,
    /// Clusters on the device; 0 for those that are unallocated.
    pub clusters: Vec<u32>,
}

/// An element of a metadata page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataDescriptor {
    /// Clusters of the blob, after those of earlier descriptors.
    ExtentRuns(Vec<BlobClusterRun>),
    /// An attribute of the blob's owner.
    Xattr(Xattr),
    /// Flags.
    Flags(BlobFlags),
    /// An attribute of the blobstore itself.
    XattrInternal(Xattr),
    /// Extent pages of the blob, after those of earlier descriptors.
    ExtentTable(ExtentTable),
    /// Clusters of an extent page.
    ExtentPage(ExtentPage),
    /// A descriptor that the format does not define. A blob that must not be opened without it has a flag
    /// that says so.
    Unknown {
        /// The type.
        kind: u8,
        /// The content.
        content: Vec<u8>,
    },
}

impl MetadataDescriptor {
    /// Decodes the descriptors of a page's area, from `base` bytes after the start of the page on.
    pub(crate) fn decode_all(
        area: &[u8; DESCRIPTOR_AREA_BYTES],
        base: usize,
    ) -> Result<Vec<MetadataDescriptor>, DecodeError> {
        let mut descriptors = Vec::new();
        let mut at = 0;
        while at + HEADER_BYTES <= area.len() {
            let kind = area[at];
            let length = u32_at(area, at + 1);
            if kind == PADDING && length == 0 {
                break;
            }
            let start = at + HEADER_BYTES;
            let end = start.checked_add(length as usize).filter(|end| *end <= area.len());
            let Some(end) = end else {
                let at = (base + at + 1) as u32;
                return Err(DecodeError::value("the length of a descriptor", at, length.into()));
            };
            if kind != PADDING {
                descriptors.push(MetadataDescriptor::decode(kind, &area[start..end], base + start)?);
            }
            at = end;
        }
        Ok(descriptors)
    }

    /// Decodes a descriptor's content, which begins `at` bytes after the start of the page.
    fn decode(kind: u8, content: &[u8], at: usize) -> Result<MetadataDescriptor, DecodeError> {
        let length = content.len();
        let wrong_length = |what| Err(DecodeError::value(what, (at - 4) as u32, length as u64));
        match kind {
            EXTENT_RLE => {
                if length == 0 || !length.is_multiple_of(RUN_BYTES) {
                    return wrong_length("the length of the extents");
                }
                let run = |(cluster, length)| BlobClusterRun { cluster, length };
                let runs: Vec<BlobClusterRun> = pairs(content).map(run).collect();
                let too_long =
                    |run: &BlobClusterRun| run.cluster != 0 && run.cluster.checked_add(run.length).is_none();
                match runs.iter().position(|run| run.length == 0 || too_long(run)) {
                    Some(index) => {
                        let at = (at + index * RUN_BYTES + 4) as u32;
                        Err(DecodeError::value("the length of an extent", at, runs[index].length.into()))
                    }
                    None => Ok(MetadataDescriptor::ExtentRuns(runs)),
                }
            }
            XATTR => decode_xattr(content, at).map(MetadataDescriptor::Xattr),
            XATTR_INTERNAL => decode_xattr(content, at).map(MetadataDescriptor::XattrInternal),
            FLAGS => {
                if length != 24 {
                    return wrong_length("the length of the flags");
                }
                Ok(MetadataDescriptor::Flags(BlobFlags {
                    invalid: u64_at(content, 0),
                    data_read_only: u64_at(content, 8),
                    metadata_read_only: u64_at(content, 16),
                }))
            }
            EXTENT_TABLE => {
                if length < 8 || !(length - 8).is_multiple_of(RUN_BYTES) {
                    return wrong_length("the length of the extent table");
                }
                let run = |(page, length)| ExtentTableRun { page, length };
                let runs: Vec<ExtentTableRun> = pairs(&content[8..]).map(run).collect();
                let is_wrong = |run: &ExtentTableRun| run.length == 0 || run.page != 0 && run.length != 1;
                match runs.iter().position(is_wrong) {
                    Some(index) => {
                        let at = (at + 8 + index * RUN_BYTES + 4) as u32;
                        let length = runs[index].length.into();
                        Err(DecodeError::value("the number of pages of an extent table's run", at, length))
                    }
                    None => Ok(MetadataDescriptor::ExtentTable(ExtentTable {
                        clusters: u64_at(content, 0),
                        runs,
                    })),
                }
            }
            EXTENT_PAGE => {
                if length < 4 || !length.is_multiple_of(4) {
                    return wrong_length("the length of the extent page");
                }
                let clusters = content[4..].as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
                let clusters = clusters.collect();
                Ok(MetadataDescriptor::ExtentPage(ExtentPage { first: u32_at(content, 0), clusters }))
            }
            _ => Ok(MetadataDescriptor::Unknown { kind, content: content.to_vec() }),
        }
    }

    /// Bytes of the encoded descriptor.
    pub fn encoded_bytes(&self) -> usize {
        let content = match self {
            MetadataDescriptor::ExtentRuns(runs) => runs.len() * RUN_BYTES,
            MetadataDescriptor::Xattr(xattr) | MetadataDescriptor::XattrInternal(xattr) => {
                4 + xattr.name.len() + xattr.value.len()
            }
            MetadataDescriptor::Flags(_) => 24,
            MetadataDescriptor::ExtentTable(table) => 8 + table.runs.len() * RUN_BYTES,
            MetadataDescriptor::ExtentPage(page) => 4 + page.clusters.len() * 4,
            MetadataDescriptor::Unknown { content, .. } => content.len(),
        };
        HEADER_BYTES + content
    }

    /// Appends the encoded descriptor.
    ///
    /// # Panics
    /// If it is larger than a page.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let bytes = self.encoded_bytes();
        assert!(bytes <= DESCRIPTOR_AREA_BYTES, "a descriptor of {bytes} bytes");
        let mut head = |kind: u8| {
            out.push(kind);
            out.extend_from_slice(&((bytes - HEADER_BYTES) as u32).to_le_bytes());
        };
        match self {
            MetadataDescriptor::ExtentRuns(runs) => {
                head(EXTENT_RLE);
                runs.iter().for_each(|run| put_pair(out, run.cluster, run.length));
            }
            MetadataDescriptor::Xattr(xattr) => {
                head(XATTR);
                put_xattr(out, xattr);
            }
            MetadataDescriptor::XattrInternal(xattr) => {
                head(XATTR_INTERNAL);
                put_xattr(out, xattr);
            }
            MetadataDescriptor::Flags(flags) => {
                head(FLAGS);
                let sets = [flags.invalid, flags.data_read_only, flags.metadata_read_only];
                sets.iter().for_each(|set| out.extend_from_slice(&set.to_le_bytes()));
            }
            MetadataDescriptor::ExtentTable(table) => {
                head(EXTENT_TABLE);
                out.extend_from_slice(&table.clusters.to_le_bytes());
                table.runs.iter().for_each(|run| put_pair(out, run.page, run.length));
            }
            MetadataDescriptor::ExtentPage(page) => {
                head(EXTENT_PAGE);
                out.extend_from_slice(&page.first.to_le_bytes());
                page.clusters.iter().for_each(|cluster| out.extend_from_slice(&cluster.to_le_bytes()));
            }
            MetadataDescriptor::Unknown { kind, content } => {
                head(*kind);
                out.extend_from_slice(content);
            }
        }
    }
}

fn pairs(content: &[u8]) -> impl Iterator<Item = (u32, u32)> + '_ {
    content.as_chunks::<RUN_BYTES>().0.iter().map(|pair| (u32_at(pair, 0), u32_at(pair, 4)))
}

fn put_pair(out: &mut Vec<u8>, first: u32, second: u32) {
    out.extend_from_slice(&first.to_le_bytes());
    out.extend_from_slice(&second.to_le_bytes());
}

fn decode_xattr(content: &[u8], at: usize) -> Result<Xattr, DecodeError> {
    let wrong = |value| DecodeError::value("the length of an xattr", (at - 4) as u32, value);
    if content.len() < 4 {
        return Err(wrong(content.len() as u64));
    }
    let (name, value) = (usize::from(u16_at(content, 0)), usize::from(u16_at(content, 2)));
    if content.len() != 4 + name + value {
        return Err(wrong(content.len() as u64));
    }
    Ok(Xattr { name: content[4..4 + name].to_vec(), value: content[4 + name..].to_vec() })
}

fn put_xattr(out: &mut Vec<u8>, xattr: &Xattr) {
    // Both fit in 16 bits: the descriptor is smaller than a page.
    out.extend_from_slice(&(xattr.name.len() as u16).to_le_bytes());
    out.extend_from_slice(&(xattr.value.len() as u16).to_le_bytes());
    out.extend_from_slice(&xattr.name);
    out.extend_from_slice(&xattr.value);
}
