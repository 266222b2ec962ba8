//! Snapshots of the extents of files, and when they end.

use std::sync::Arc;

use blobstore::BlobSegment;

use super::BlobFs;
use crate::extents::{FileExtent, FileExtents, ReadLease};
use crate::index::FileNumber;
use crate::request::OpenNumber;

impl BlobFs {
    /// Where an open file is on the device, so that other threads can read it. `None` while it has a writer
    /// or data in memory, and of a store that takes no requests: the file is to be read by requests then.
    ///
    /// The opener is to be open while the snapshot is used.
    pub fn extents(&mut self, open: OpenNumber) -> Option<FileExtents> {
        if self.is_broken() || self.is_unloaded {
            return None;
        }
        let file = self.openers.get(&open)?.file;
        let node = self.files.get(&file)?;
        if node.writer.is_some() || node.buffer.is_some() {
            return None;
        }
        let size = node.size;
        let plan = self.blobs().read(node.blob, 0, size.next_multiple_of(self.block)).ok()?;
        let (mut extents, mut start) = (Vec::new(), 0);
        for segment in plan {
            let segment = segment.ok()?;
            let offset = match segment {
                BlobSegment::Device { offset, .. } => Some(offset),
                BlobSegment::Zeroes { .. } => None,
                BlobSegment::External { .. } => return None,
            };
            let length = segment.length();
            extents.push(FileExtent { start, length, offset });
            start += length;
        }
        let lease = self.leases.entry(file).or_default().clone();
        Some(FileExtents { size, block: self.block, extents: extents.into(), lease, open })
    }

    /// Threads have ended reads of a snapshot that was revoked: clusters may be free that they used.
    pub fn reads_ended(&mut self) {
        self.run();
    }

    /// Revokes the snapshots of a file. Its clusters are not allocated again while a thread reads them.
    pub(super) fn revoke_extents(&mut self, file: FileNumber) {
        if let Some(lease) = self.leases.remove(&file) {
            self.revoke(&lease);
        }
    }

    /// Revokes all snapshots.
    pub(super) fn revoke_all_extents(&mut self) {
        for lease in std::mem::take(&mut self.leases).into_values() {
            self.revoke(&lease);
        }
    }

    fn revoke(&mut self, lease: &Arc<ReadLease>) {
        lease.revoke();
        if lease.is_read() {
            let epoch = self.store.as_ref().map_or(0, |store| store.epoch());
            self.revoked.push((epoch, lease.clone()));
        }
    }

    /// The oldest state of the store that a thread reads by.
    pub(super) fn oldest_read(&mut self) -> Option<u64> {
        self.revoked.retain(|(_, lease)| lease.is_read());
        self.revoked.iter().map(|(epoch, _)| *epoch).min()
    }
}
