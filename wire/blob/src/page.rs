//! Metadata pages.

use codec::DecodeError;

use crate::fields::{array, crc_is_valid, open, put, seal, u32_at, u64_at};
use crate::{BlobId, DESCRIPTOR_AREA_BYTES, ExtentPage, MetadataDescriptor, PAGE_BYTES};

const ID_AT: usize = 0;
const SEQUENCE_AT: usize = 8;
const DESCRIPTORS_AT: usize = 16;
const NEXT_AT: usize = 4088;
const NO_PAGE: u32 = u32::MAX;
const _: () = assert!(DESCRIPTORS_AT + DESCRIPTOR_AREA_BYTES == NEXT_AT && NEXT_AT + 8 == PAGE_BYTES);

/// Why a metadata page cannot be decoded, with its index in the metadata region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("metadata page {page}: {error}")]
pub struct PageError {
    /// Index of the page in the metadata region.
    pub page: u32,
    /// The field.
    pub error: DecodeError,
}

/// The fields of a page around its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageHeader {
    /// The blob that wrote the page. An extent page may be another one's by now.
    pub id: BlobId,
    /// Index of the page in its chain; 0 for extent pages.
    pub sequence: u32,
    /// The next page of the chain.
    pub next: Option<u32>,
}

impl PageHeader {
    /// Decodes the header of a page whose descriptors may be damaged; `None` if `from` is shorter than a
    /// page.
    pub fn decode(from: &[u8]) -> Option<PageHeader> {
        let from = from.first_chunk::<PAGE_BYTES>()?;
        Some(PageHeader {
            id: BlobId(u64_at(from, ID_AT)),
            sequence: u32_at(from, SEQUENCE_AT),
            next: Some(u32_at(from, NEXT_AT)).filter(|next| *next != NO_PAGE),
        })
    }
}

/// A page of a blob's chain, or an extent page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataPage {
    /// The blob that wrote the page.
    pub id: BlobId,
    /// Index of the page in its chain; 0 for extent pages.
    pub sequence: u32,
    /// What the page says, without padding.
    pub descriptors: Vec<MetadataDescriptor>,
    /// The next page of the chain.
    pub next: Option<u32>,
}

impl MetadataPage {
    /// Decodes the page with this index from the first [`PAGE_BYTES`] of `from`.
    ///
    /// # Errors
    /// The page's CRC is wrong, or a descriptor has a field that none has.
    pub fn decode(from: &[u8], page: u32) -> Result<MetadataPage, PageError> {
        let wrong = |error| PageError { page, error };
        let from = open(from, "the page", "the CRC").map_err(wrong)?;
        let area: [u8; DESCRIPTOR_AREA_BYTES] = array(from, DESCRIPTORS_AT);
        let descriptors = MetadataDescriptor::decode_all(&area, DESCRIPTORS_AT).map_err(wrong)?;
        let header = PageHeader::decode(from).expect("the length was checked");
        Ok(MetadataPage { id: header.id, sequence: header.sequence, descriptors, next: header.next })
    }

    /// Encodes the page; the inverse of [`decode`](Self::decode). `None` if the descriptors are larger than
    /// [`DESCRIPTOR_AREA_BYTES`].
    pub fn encode(&self) -> Option<[u8; PAGE_BYTES]> {
        let bytes: usize = self.descriptors.iter().map(MetadataDescriptor::encoded_bytes).sum();
        if bytes > DESCRIPTOR_AREA_BYTES {
            return None;
        }
        let mut area = Vec::with_capacity(bytes);
        self.descriptors.iter().for_each(|descriptor| descriptor.encode(&mut area));
        let mut out = [0; PAGE_BYTES];
        put(&mut out, ID_AT, &self.id.0.to_le_bytes());
        put(&mut out, SEQUENCE_AT, &self.sequence.to_le_bytes());
        put(&mut out, DESCRIPTORS_AT, &area);
        put(&mut out, NEXT_AT, &self.next.unwrap_or(NO_PAGE).to_le_bytes());
        seal(&mut out);
        Some(out)
    }

    /// The clusters of an extent page; `None` if the page is none, which has one descriptor, sequence 0 and
    /// no next page.
    pub fn extent_page(&self) -> Option<&ExtentPage> {
        match (&self.descriptors[..], self.sequence, self.next) {
            ([MetadataDescriptor::ExtentPage(extents)], 0, None) => Some(extents),
            _ => None,
        }
    }
}

/// Whether the CRC32C of a metadata page is that of its content. A page of zeroes, which no blob uses, has
/// none.
pub fn has_valid_crc(page: &[u8]) -> bool {
    page.first_chunk::<PAGE_BYTES>().is_some_and(crc_is_valid)
}
