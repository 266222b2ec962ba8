//! Where the bytes of a file are, for threads that read without the core of the store.
//!
//! [`FileExtents`] is a snapshot of a file that has no writer. It stays right until [`BlobFs`](crate::BlobFs)
//! revokes it: before a writer opens the file, when its last opener closes it, and with the store. A read
//! that began before may go on: clusters that are freed are not allocated again until it has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::request::OpenNumber;

/// Set in the state of a lease that was revoked; the other bits count the reads in progress.
const REVOKED: u64 = 1 << 63;

/// What the snapshots of a file share: whether they are right, and how many threads read by them.
#[derive(Debug, Default)]
pub(crate) struct ReadLease(AtomicU64);

impl ReadLease {
    /// No read begins afterwards.
    pub(crate) fn revoke(&self) {
        self.0.fetch_or(REVOKED, Ordering::AcqRel);
    }

    /// Whether reads are in progress.
    pub(crate) fn is_read(&self) -> bool {
        self.0.load(Ordering::Acquire) & !REVOKED != 0
    }
}

/// Bytes of a file at one place of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileExtent {
    /// Where they begin in the file.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Where they begin on the device; `None` for zeroes.
    pub(crate) offset: Option<u64>,
}

/// A snapshot of the extents of an open file, for any thread. See
/// [`BlobFs::extents`](crate::BlobFs::extents).
#[derive(Clone, Debug)]
pub struct FileExtents {
    pub(crate) size: u64,
    pub(crate) block: u64,
    /// In the order of the file, without gaps, up to the end of the last block.
    pub(crate) extents: Arc<[FileExtent]>,
    pub(crate) lease: Arc<ReadLease>,
    pub(crate) open: OpenNumber,
}

/// A part of a read, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentPart {
    /// Where it is on the device; `None` for zeroes.
    pub offset: Option<u64>,
    /// Bytes.
    pub bytes: usize,
}

/// A read in progress. Dropped, it has ended.
#[derive(Debug)]
pub struct ExtentRead<'a>(&'a FileExtents);

impl FileExtents {
    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a block: reads of the device begin and end with one.
    pub fn block_bytes(&self) -> u64 {
        self.block
    }

    /// The opener that the snapshot was made for.
    pub fn open(&self) -> OpenNumber {
        self.open
    }

    /// Begins a read. `None` if the snapshot was revoked: the file is to be read by a request.
    pub fn begin_read(&self) -> Option<ExtentRead<'_>> {
        let before = self.lease.0.fetch_add(1, Ordering::AcqRel);
        let read = ExtentRead(self);
        (before & REVOKED == 0).then_some(read)
    }

    /// Whether the snapshot was revoked. A thread that finds so at the end of a read tells the store, which
    /// may wait for the clusters ([`BlobFs::reads_ended`](crate::BlobFs::reads_ended)).
    pub fn is_revoked(&self) -> bool {
        self.lease.0.load(Ordering::Acquire) & REVOKED != 0
    }
}

impl ExtentRead<'_> {
    /// The parts of a range of whole blocks, in order.
    pub fn parts(&self, start: u64, bytes: usize) -> impl Iterator<Item = ExtentPart> {
        let end = start + bytes as u64;
        let first = self.0.extents.partition_point(|extent| extent.start + extent.length <= start);
        let inside = self.0.extents[first..].iter().take_while(move |extent| extent.start < end);
        inside.map(move |extent| {
            let (from, to) = (start.max(extent.start), end.min(extent.start + extent.length));
            let offset = extent.offset.map(|offset| offset + (from - extent.start));
            ExtentPart { offset, bytes: (to - from) as usize }
        })
    }
}

impl Drop for ExtentRead<'_> {
    fn drop(&mut self) {
        self.0.lease.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents() -> FileExtents {
        let extent = |start, length, offset| FileExtent { start, length, offset };
        let extents = [extent(0, 1000, Some(5000)), extent(1000, 500, None), extent(1500, 1000, Some(0))];
        FileExtents {
            size: 2400,
            block: 100,
            extents: extents.into(),
            lease: Arc::default(),
            open: OpenNumber(1),
        }
    }

    #[test]
    fn a_read_is_divided_where_the_file_is() {
        let extents = extents();
        let read = extents.begin_read().unwrap();
        let parts = |start, bytes| -> Vec<(Option<u64>, usize)> {
            read.parts(start, bytes).map(|part| (part.offset, part.bytes)).collect()
        };
        assert_eq!(parts(200, 300), [(Some(5200), 300)]);
        assert_eq!(parts(900, 1000), [(Some(5900), 100), (None, 500), (Some(0), 400)]);
        assert_eq!(parts(2400, 100), [(Some(900), 100)]);
    }

    #[test]
    fn no_read_begins_after_the_snapshot_was_revoked_and_those_before_are_counted() {
        let extents = extents();
        let read = extents.begin_read().unwrap();
        extents.lease.revoke();
        assert!(extents.begin_read().is_none() && extents.is_revoked());
        assert!(extents.lease.is_read(), "the first read goes on");
        drop(read);
        assert!(!extents.lease.is_read());
    }
}
