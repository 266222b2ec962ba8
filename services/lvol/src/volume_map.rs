//! Where the blocks of a volume are.

use std::sync::Arc;

use blobstore::{BlobId, BlobSegment, BlobStore};
use block_io::Op;

/// Segments that a seek looks at: it runs on a core, and a blob may have as many as clusters.
const SEEK_SEGMENTS_MAX: usize = 4096;

/// The map of one volume: its store, which does not change, and its blob. Cheap to clone.
#[derive(Clone)]
pub(crate) struct VolumeMap {
    pub(crate) blobs: Arc<BlobStore>,
    pub(crate) blob: BlobId,
}

/// Where a piece of a read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceSource {
    /// On the store's device.
    Base,
    /// On the external snapshot.
    External,
    /// Nowhere: it is zero.
    Zeroes,
}

/// A piece of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadPiece {
    pub(crate) source: PieceSource,
    /// Byte offset on the source.
    pub(crate) offset: u64,
    /// Bytes, at least 1.
    pub(crate) length: u64,
}

/// The range has no data that can be read: a snapshot is missing.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

impl VolumeMap {
    /// Appends the pieces of a range of bytes, as few as possible. The external snapshot has
    /// `external_bytes`, and zeroes beyond them.
    pub(crate) fn pieces(
        &self,
        offset: u64,
        length: u64,
        external_bytes: u64,
        pieces: &mut Vec<ReadPiece>,
    ) -> Result<(), Unreadable> {
        for segment in self.blobs.read(self.blob, offset, length).map_err(|_| Unreadable)? {
            let length = segment.as_ref().map_or(0, BlobSegment::length);
            match segment.map_err(|_| Unreadable)? {
                BlobSegment::Device { offset, .. } => push(pieces, PieceSource::Base, offset, length),
                BlobSegment::Zeroes { .. } => push(pieces, PieceSource::Zeroes, 0, length),
                BlobSegment::External { offset, .. } => {
                    let there = external_bytes.saturating_sub(offset).min(length);
                    push(pieces, PieceSource::External, offset, there);
                    push(pieces, PieceSource::Zeroes, 0, length - there);
                }
            }
        }
        Ok(())
    }

    /// The byte offset of the first data (`op` [`Op::SeekData`]) or hole ([`Op::SeekHole`]) in a range. What
    /// the external snapshot has counts as data. A search that takes too long ends early: as if there were
    /// data, and no more holes.
    pub(crate) fn seek(&self, op: Op, offset: u64, length: u64) -> Option<u64> {
        let wants_data = op == Op::SeekData;
        let mut at = offset;
        for segment in self.blobs.read(self.blob, offset, length).ok()?.take(SEEK_SEGMENTS_MAX) {
            let is_data = !matches!(segment, Ok(BlobSegment::Zeroes { .. }));
            if is_data == wants_data {
                return Some(at);
            }
            at += segment.as_ref().map_or(0, BlobSegment::length);
        }
        (wants_data && at < offset + length).then_some(at)
    }
}

fn push(pieces: &mut Vec<ReadPiece>, source: PieceSource, offset: u64, length: u64) {
    if length == 0 {
        return;
    }
    match pieces.last_mut() {
        Some(last)
            if last.source == source
                && (source == PieceSource::Zeroes || last.offset + last.length == offset) =>
        {
            last.length += length;
        }
        _ => pieces.push(ReadPiece { source, offset, length }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_one_source_are_one_piece() {
        let mut pieces = Vec::new();
        for (source, offset, length) in [
            (PieceSource::Base, 8, 4),
            (PieceSource::Base, 12, 4),
            (PieceSource::External, 16, 0),
            (PieceSource::Zeroes, 0, 4),
            (PieceSource::Zeroes, 0, 4),
            (PieceSource::Base, 24, 4),
            (PieceSource::Base, 8, 4),
        ] {
            push(&mut pieces, source, offset, length);
        }
        let found: Vec<_> = pieces.iter().map(|piece| (piece.source, piece.offset, piece.length)).collect();
        assert_eq!(
            found,
            [
                (PieceSource::Base, 8, 8),
                (PieceSource::Zeroes, 0, 8),
                (PieceSource::Base, 24, 4),
                (PieceSource::Base, 8, 4)
            ]
        );
    }
}
