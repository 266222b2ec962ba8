//! Small stores that a test makes page by page.

use wire_blob::{
    BitMask, BlobFlags, BlobId, ExtentPage, ExtentTable, ExtentTableRun, MaskKind, MetadataDescriptor,
    MetadataPage, PageRange, SuperBlock, Xattr,
};

use super::Device;

/// Bytes of a cluster: 8 metadata pages.
pub(crate) const CLUSTER: u64 = 32 << 10;
pub(crate) const CLUSTERS: u32 = 64;
pub(crate) const PAGES: u32 = 24;
/// The first cluster for data: 4 pages and the metadata region are before it.
pub(crate) const FIRST: u32 = 4;

/// A store of 64 clusters with 24 metadata pages, whose masks are those of its pages unless a test changes
/// them.
#[derive(Clone)]
pub(crate) struct MadeStore {
    pub(crate) device: Device,
    pub(crate) super_block: SuperBlock,
    pub(crate) pages: BitMask,
    pub(crate) clusters: BitMask,
    pub(crate) blob_ids: BitMask,
}

/// Adds a mark of an extent table's flag.
pub(crate) fn flags(invalid: u64) -> MetadataDescriptor {
    MetadataDescriptor::Flags(BlobFlags {
        invalid: invalid | BlobFlags::EXTENT_TABLE,
        ..BlobFlags::default()
    })
}

pub(crate) fn table(clusters: u64, pages: &[u32]) -> MetadataDescriptor {
    let runs = pages.iter().map(|page| ExtentTableRun { page: *page, length: 1 }).collect();
    MetadataDescriptor::ExtentTable(ExtentTable { clusters, runs })
}

pub(crate) fn internal(name: &[u8], blob: u64) -> MetadataDescriptor {
    MetadataDescriptor::XattrInternal(Xattr { name: name.to_vec(), value: blob.to_le_bytes().to_vec() })
}

pub(crate) fn id(page: u32) -> BlobId {
    BlobId::from_page(page)
}

impl MadeStore {
    pub(crate) fn new() -> MadeStore {
        let super_block = SuperBlock {
            version: 3,
            clean: false,
            super_blob: None,
            cluster_bytes: CLUSTER as u32,
            used_pages: PageRange { start: 1, pages: 1 },
            used_clusters: PageRange { start: 2, pages: 1 },
            used_blob_ids: Some(PageRange { start: 3, pages: 1 }),
            metadata: PageRange { start: 4, pages: PAGES },
            store_type: *b"test\0\0\0\0\0\0\0\0\0\0\0\0",
            size_bytes: Some(u64::from(CLUSTERS) * CLUSTER),
            io_unit_bytes: 512,
            metadata_page_bytes: 4096,
        };
        let mut clusters = BitMask::new(MaskKind::Clusters, CLUSTERS);
        (0..FIRST).for_each(|cluster| assert!(!clusters.set(cluster)));
        let store = MadeStore {
            device: Device::new(u64::from(CLUSTERS) * CLUSTER),
            super_block,
            pages: BitMask::new(MaskKind::Pages, PAGES),
            clusters,
            blob_ids: BitMask::new(MaskKind::BlobIds, PAGES),
        };
        store.sealed()
    }

    /// The store after its super block or masks were changed.
    pub(crate) fn sealed(mut self) -> MadeStore {
        self.device.write(0, &self.super_block.encode());
        for (range, mask) in [
            (Some(self.super_block.used_pages), &self.pages),
            (Some(self.super_block.used_clusters), &self.clusters),
            (self.super_block.used_blob_ids, &self.blob_ids),
        ] {
            if let Some(range) = range {
                self.device.write(u64::from(range.start) * 4096, &mask.encode());
            }
        }
        self
    }

    /// The store as if it had been unloaded.
    pub(crate) fn unloaded(mut self) -> MadeStore {
        self.super_block.clean = true;
        self.sealed()
    }

    /// Where a metadata page is.
    pub(crate) fn offset(page: u32) -> u64 {
        4096 * (4 + u64::from(page))
    }

    /// Writes a page of blob `blob`, which is marked as used.
    pub(crate) fn page(
        mut self,
        page: u32,
        blob: u32,
        sequence: u32,
        next: Option<u32>,
        descriptors: Vec<MetadataDescriptor>,
    ) -> Self {
        let content = MetadataPage { id: id(blob), sequence, descriptors, next }.encode().unwrap();
        self.device.write(Self::offset(page), &content);
        self.pages.set(page);
        if page == blob {
            self.blob_ids.set(page);
        }
        self.sealed()
    }

    /// Writes a blob of one page.
    pub(crate) fn blob(self, page: u32, descriptors: Vec<MetadataDescriptor>) -> Self {
        self.page(page, page, 0, None, descriptors)
    }

    /// Writes an extent page whose clusters are marked as used.
    pub(crate) fn extents(mut self, page: u32, blob: u32, clusters: &[u32]) -> Self {
        for cluster in clusters.iter().filter(|cluster| (1..CLUSTERS).contains(*cluster)) {
            self.clusters.set(*cluster);
        }
        let extents = MetadataDescriptor::ExtentPage(ExtentPage { first: 0, clusters: clusters.to_vec() });
        self.page(page, blob, 0, None, vec![extents])
    }
}
