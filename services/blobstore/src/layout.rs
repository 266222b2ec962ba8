//! Where the parts of a store are on its device, in bytes.

use wire_blob::{BitMask, PageRange, SuperBlock};

use crate::load::LoadError;

/// The geometry of a store. Every range that it returns is within the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlobStoreLayout {
    /// Bytes of the store; its device may be larger.
    pub store_bytes: u64,
    /// Bytes of a cluster.
    pub cluster_bytes: u32,
    /// Clusters of the store. A last part of less than a cluster is not used.
    pub clusters: u32,
    /// Clusters of the super block, masks and metadata: the first ones.
    pub metadata_clusters: u32,
    /// Bytes of a metadata page.
    pub page_bytes: u32,
    /// Pages of the metadata region.
    pub pages: u32,
    /// Where the metadata region begins.
    pub metadata_offset: u64,
}

impl BlobStoreLayout {
    /// The layout of a store on a device of this size.
    ///
    /// # Errors
    /// The store is larger than the device, or its parts are larger than the store.
    pub fn new(super_block: &SuperBlock, device_bytes: u64) -> Result<BlobStoreLayout, LoadError> {
        let store_bytes = super_block.size_bytes.unwrap_or(device_bytes);
        if store_bytes > device_bytes {
            return Err(LoadError::DeviceTooSmall { store_bytes, device_bytes });
        }
        let page_bytes = super_block.metadata_page_bytes;
        let cluster_bytes = super_block.cluster_bytes;
        let clusters = store_bytes / u64::from(cluster_bytes);
        let too_many = LoadError::TooManyClusters { clusters };
        let clusters = u32::try_from(clusters).map_err(|_| too_many)?;
        let metadata_clusters = super_block.metadata.end().div_ceil(u64::from(cluster_bytes / page_bytes));
        if metadata_clusters > u64::from(clusters) {
            let metadata_bytes = super_block.metadata.end() * u64::from(page_bytes);
            return Err(LoadError::MetadataTooLarge { metadata_bytes, store_bytes });
        }
        let layout = BlobStoreLayout {
            store_bytes,
            cluster_bytes,
            clusters,
            metadata_clusters: metadata_clusters as u32,
            page_bytes,
            pages: super_block.metadata.pages,
            metadata_offset: u64::from(super_block.metadata.start) * u64::from(page_bytes),
        };
        let masks = [
            ("pages", Some(super_block.used_pages), layout.pages),
            ("clusters", Some(super_block.used_clusters), layout.clusters),
            ("blob ids", super_block.used_blob_ids, layout.pages),
        ];
        for (mask, range, bits) in masks {
            let Some(range) = range else { continue };
            let bytes = u64::from(range.pages) * u64::from(page_bytes);
            let is_before_metadata = range.end() <= super_block.metadata.end();
            if bytes < BitMask::encoded_bytes(bits) || !is_before_metadata {
                return Err(LoadError::MaskTooSmall { mask, bytes, bits });
            }
        }
        Ok(layout)
    }

    /// Where a range of pages begins that counts from the start of the device.
    pub(crate) fn range_offset(&self, range: PageRange) -> u64 {
        u64::from(range.start) * u64::from(self.page_bytes)
    }

    /// Where a metadata page begins.
    pub fn page_offset(&self, page: u32) -> u64 {
        self.metadata_offset + u64::from(page) * u64::from(self.page_bytes)
    }

    /// Where a cluster begins.
    pub fn cluster_offset(&self, cluster: u32) -> u64 {
        u64::from(cluster) * u64::from(self.cluster_bytes)
    }

    /// Whether a cluster is one that blobs may have.
    pub fn is_data_cluster(&self, cluster: u32) -> bool {
        (self.metadata_clusters..self.clusters).contains(&cluster)
    }
}
