//! Pages of a blob from its state.

use wire_blob::{
    BlobClusterRun, BlobFlags, BlobId, CLUSTERS_PER_EXTENT_PAGE, DESCRIPTOR_AREA_BYTES, ExtentPage,
    ExtentTable, ExtentTableRun, MetadataDescriptor, MetadataPage, PAGE_BYTES, PageCopy, Xattr,
};

use super::change::ChangeError;
use crate::blob::Blob;

/// Bytes of descriptors in a first page: it is replaced in place, so that a copy of it must be possible.
const FIRST_AREA_BYTES: usize = PageCopy::CONTENT_BYTES_MAX - (PAGE_BYTES - DESCRIPTOR_AREA_BYTES - 8);
/// Bytes of a descriptor before its content.
const DESCRIPTOR_BYTES: usize = 5;
const RUN_BYTES: usize = 8;
/// A descriptor with fewer runs than this is not begun at the end of a page.
const RUNS_MIN: usize = 4;

/// Encodes a page.
pub(super) fn page(
    id: BlobId,
    sequence: u32,
    descriptors: Vec<MetadataDescriptor>,
    next: Option<u32>,
) -> Result<Vec<u8>, ChangeError> {
    let page = MetadataPage { id, sequence, descriptors, next };
    page.encode().map(|page| page.to_vec()).ok_or(ChangeError::Invalid("an attribute is too large"))
}

/// The extent page of a blob with this index.
pub(super) fn extent_page(id: BlobId, index: u32, clusters: &[u32]) -> Result<Vec<u8>, ChangeError> {
    let first = index * CLUSTERS_PER_EXTENT_PAGE;
    let extents = ExtentPage { first, clusters: clusters.to_vec() };
    page(id, 0, vec![MetadataDescriptor::ExtentPage(extents)], None)
}

/// The descriptors of each page of a blob's chain.
pub(super) fn chain(blob: &Blob) -> Result<Vec<Vec<MetadataDescriptor>>, ChangeError> {
    let mut chain = Chain { pages: vec![Vec::new()], left: FIRST_AREA_BYTES };
    let mut flags = blob.flags;
    let set =
        |flags: &mut u64, flag: u64, is_set: bool| if is_set { *flags |= flag } else { *flags &= !flag };
    set(&mut flags.invalid, BlobFlags::INTERNAL_XATTRS, !blob.internal_xattrs.is_empty());
    set(&mut flags.invalid, BlobFlags::EXTENT_TABLE, blob.has_extent_table);
    chain.add(MetadataDescriptor::Flags(flags))?;
    for xattr in &blob.xattrs {
        check(xattr)?;
        chain.add(MetadataDescriptor::Xattr(xattr.clone()))?;
    }
    for xattr in &blob.internal_xattrs {
        check(xattr)?;
        chain.add(MetadataDescriptor::XattrInternal(xattr.clone()))?;
    }
    if blob.has_extent_table {
        let clusters = u64::from(blob.clusters.length());
        chain.add_runs(8, table_runs(blob), |runs| {
            MetadataDescriptor::ExtentTable(ExtentTable { clusters, runs })
        })?;
    } else {
        chain.add_runs(0, cluster_runs(blob), MetadataDescriptor::ExtentRuns)?;
    }
    Ok(chain.pages)
}

fn check(xattr: &Xattr) -> Result<(), ChangeError> {
    match DESCRIPTOR_BYTES + 4 + xattr.name.len() + xattr.value.len() <= DESCRIPTOR_AREA_BYTES {
        true => Ok(()),
        false => Err(ChangeError::Invalid("an attribute is too large")),
    }
}

struct Chain {
    pages: Vec<Vec<MetadataDescriptor>>,
    left: usize,
}

impl Chain {
    fn next_page(&mut self) {
        self.pages.push(Vec::new());
        self.left = DESCRIPTOR_AREA_BYTES;
    }

    fn add(&mut self, descriptor: MetadataDescriptor) -> Result<(), ChangeError> {
        let bytes = descriptor.encoded_bytes();
        if bytes > self.left {
            self.next_page();
        }
        self.left = self.left.checked_sub(bytes).ok_or(ChangeError::Invalid("an attribute is too large"))?;
        self.pages.last_mut().ok_or(ChangeError::Broken)?.push(descriptor);
        Ok(())
    }

    /// Adds runs in as many descriptors as they take, each with `head` bytes besides.
    fn add_runs<T: Clone>(
        &mut self,
        head: usize,
        runs: Vec<T>,
        descriptor: impl Fn(Vec<T>) -> MetadataDescriptor,
    ) -> Result<(), ChangeError> {
        if runs.is_empty() && head > 0 {
            return self.add(descriptor(Vec::new()));
        }
        let mut rest = &runs[..];
        while !rest.is_empty() {
            let mut now = self.left.saturating_sub(DESCRIPTOR_BYTES + head) / RUN_BYTES;
            if now < RUNS_MIN.min(rest.len()) {
                self.next_page();
                now = (self.left - DESCRIPTOR_BYTES - head) / RUN_BYTES;
            }
            let (part, after) = rest.split_at(now.min(rest.len()));
            self.add(descriptor(part.to_vec()))?;
            rest = after;
        }
        Ok(())
    }
}

fn table_runs(blob: &Blob) -> Vec<ExtentTableRun> {
    let mut runs = Vec::new();
    let mut index = 0;
    let end = blob.clusters.length().div_ceil(CLUSTERS_PER_EXTENT_PAGE);
    for (at, page) in blob.extent_pages.iter().copied().chain([(end, 0)]) {
        if at > index {
            runs.push(ExtentTableRun { page: 0, length: at - index });
        }
        if at < end {
            runs.push(ExtentTableRun { page, length: 1 });
        }
        index = at + 1;
    }
    runs
}

fn cluster_runs(blob: &Blob) -> Vec<BlobClusterRun> {
    let mut runs: Vec<BlobClusterRun> = Vec::new();
    let mut index = 0;
    while index < blob.clusters.length() {
        let run = blob.clusters.run(index);
        index += run.length;
        let cluster = run.cluster.unwrap_or(0);
        match runs.last_mut() {
            Some(last) if cluster == 0 && last.cluster == 0 => last.length += run.length,
            Some(last) if cluster > 0 && last.cluster > 0 && last.cluster + last.length == cluster => {
                last.length += run.length;
            }
            _ => runs.push(BlobClusterRun { cluster, length: run.length }),
        }
    }
    runs
}
