//! `ringbolt blob check --data`: compares all data with its checksums, if the store has some.

use std::io;

use bdev_checksums::ChecksumLayout;
use blobstore::{Blob, BlobId, BlobStore};
use codec::crc32c;
use wire_blob::{
    CHECKSUM_BLOCK_BYTES, CHECKSUM_REGION_BYTES, ChecksumHeader, ChecksumPage, ChecksumsId, DirtyRegions,
    PAGE_BYTES,
};

const BLOCK: u64 = CHECKSUM_BLOCK_BYTES as u64;
/// Damaged blocks that are named; more are counted.
const NAMED_MAX: usize = 20;

/// What was found.
pub(super) struct DataCheck {
    /// Blocks that are as they were written.
    pub(super) verified: u64,
    /// Blocks without a checksum.
    pub(super) unknown: u64,
    /// Blocks that are not as they were written, or that cannot be read, and pages of checksums that are
    /// damaged.
    pub(super) damaged: u64,
    /// The first of these, in words.
    pub(super) named: Vec<String>,
}

/// The file or device of a store.
pub(super) struct DataImage<'a> {
    pub(super) bytes: u64,
    pub(super) read_at: &'a dyn Fn(u64, &mut [u8]) -> io::Result<()>,
    /// How a blob is called.
    pub(super) name: &'a dyn Fn(BlobId) -> String,
}

impl DataImage<'_> {
    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let mut content = vec![0; bytes];
        (self.read_at)(offset, &mut content)
            .map_err(|error| format!("{bytes} bytes at {offset}: {error}"))?;
        Ok(content)
    }
}

/// The checksums of an image.
struct Checksums<'a> {
    image: &'a DataImage<'a>,
    id: ChecksumsId,
    layout: ChecksumLayout,
    bits: Vec<u8>,
    /// The region that was read last.
    region: Option<(u32, Option<ChecksumPage>)>,
    /// Regions whose checksums are damaged.
    damaged: Vec<u32>,
}

impl Checksums<'_> {
    /// The checksum of the block at a byte, if it is known.
    fn sum(&mut self, offset: u64) -> Result<Option<u32>, String> {
        // The layout has fewer regions than 2^32.
        let region = (offset / CHECKSUM_REGION_BYTES) as u32;
        if self.region.as_ref().is_none_or(|(index, _)| *index != region) {
            let is_dirty = self.bits[region as usize / 8] >> (region % 8) & 1 == 1;
            let page = match is_dirty {
                true => None,
                false => {
                    let content = self.image.read(self.layout.checksums_offset(region), PAGE_BYTES)?;
                    if ChecksumPage::is_damaged(&content, region, self.id) {
                        self.damaged.push(region);
                    }
                    ChecksumPage::decode(&content, region, self.id)
                }
            };
            self.region = Some((region, page));
        }
        let at = (offset % CHECKSUM_REGION_BYTES / BLOCK) as usize;
        Ok(self.region.as_ref().and_then(|(_, page)| page.as_ref()?.sums[at]))
    }
}

/// Compares the data of all blobs with its checksums.
///
/// # Errors
/// There are no checksums that can be believed, or they cannot be read: the reason.
pub(super) fn check(image: &DataImage<'_>, store: &BlobStore) -> Result<DataCheck, String> {
    let Some((header, layout)) = find(image, store) else {
        return Err(match store.checksums() {
            Some(_) => {
                "the store has checksums of its data, but they cannot be read: their first page, after \
                the end of the store, is damaged, or the device is shorter than it was"
            }
            None => "the store has no checksums of its data; it is made with --data-checksums",
        }
        .to_string());
    };
    if store.checksums() != Some(header.id) {
        return Err("another program has changed the store since its checksums were written, or it ended \
            before it said whose they are: they say nothing of the data, and are computed anew when the \
            store is used next"
            .to_string());
    }
    let mut bits = Vec::new();
    for page in 0..layout.dirty_pages() {
        let content = image.read(layout.dirty_offset(page), PAGE_BYTES)?;
        bits.extend(DirtyRegions::decode(&content, page, header.id));
    }
    let mut checksums = Checksums { image, id: header.id, layout, bits, region: None, damaged: Vec::new() };
    let mut found = DataCheck { verified: 0, unknown: 0, damaged: 0, named: Vec::new() };
    for blob in store.blobs().values() {
        check_blob(&mut checksums, store, blob, &mut found)?;
    }
    // Blobs may have clusters of one region.
    checksums.damaged.sort_unstable();
    checksums.damaged.dedup();
    for region in checksums.damaged {
        found.damaged += 1;
        if found.named.len() < NAMED_MAX {
            let first = u64::from(region) * CHECKSUM_REGION_BYTES;
            found.named.push(format!(
                "the checksums of the MiB at {first} of the device, whose data is not verified"
            ));
        }
    }
    Ok(found)
}

/// The header of the checksums that follow the store's end.
fn find(image: &DataImage<'_>, store: &BlobStore) -> Option<(ChecksumHeader, ChecksumLayout)> {
    let offset = store.layout().store_bytes;
    if offset.checked_add(PAGE_BYTES as u64)? > image.bytes {
        return None;
    }
    let header = ChecksumHeader::decode(&image.read(offset, PAGE_BYTES).ok()?)?;
    let layout = ChecksumLayout::of(&header, image.bytes).filter(|layout| layout.data_bytes == offset)?;
    Some((header, layout))
}

fn check_blob(
    checksums: &mut Checksums<'_>,
    store: &BlobStore,
    blob: &Blob,
    found: &mut DataCheck,
) -> Result<(), String> {
    let cluster_bytes = store.layout().cluster_bytes;
    let mut content = vec![0; cluster_bytes as usize];
    for (index, cluster) in blob.clusters().iter() {
        let offset = store.layout().cluster_offset(cluster);
        let is_read = (checksums.image.read_at)(offset, &mut content).is_ok();
        for (at, block) in content.chunks_exact(BLOCK as usize).enumerate() {
            let at = at as u64 * BLOCK;
            let is_damaged = match checksums.sum(offset + at)? {
                _ if !is_read => {
                    (checksums.image.read_at)(offset + at, &mut vec![0; BLOCK as usize]).is_err()
                }
                None => {
                    found.unknown += 1;
                    continue;
                }
                Some(sum) => sum != crc32c(block),
            };
            match is_damaged {
                false => found.verified += 1,
                true => {
                    found.damaged += 1;
                    if found.named.len() < NAMED_MAX {
                        let byte = u64::from(index) * u64::from(cluster_bytes) + at;
                        let (name, device) = ((checksums.image.name)(blob.id()), offset + at);
                        found.named.push(format!("{name}: byte {byte}, at {device} of the device"));
                    }
                }
            }
        }
    }
    Ok(())
}
