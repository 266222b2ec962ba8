//! Where the blocks of a volume are.

use blobstore::{BlobId, BlobParent, BlobReadError, BlobSegment, BlobStore};
use block_io::Op;

/// Segments that a seek looks at: it runs on a core, and a blob may have as many as clusters.
const SEEK_SEGMENTS_MAX: usize = 4096;

/// The map of one volume: its blob in the store as it is published.
#[derive(Clone, Copy)]
pub(crate) struct VolumeMap<'a> {
    pub(crate) blobs: &'a BlobStore,
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

/// A piece of a write, or of another operation that changes a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangePiece {
    /// On the store's device, in clusters that the volume has.
    Device {
        /// Byte offset there.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// In a cluster that the volume does not have yet; within one.
    Allocate {
        /// Index of the cluster in the volume.
        index: u32,
        /// Bytes.
        length: u64,
    },
    /// A whole cluster that the volume has and does not need any more.
    Release {
        /// Index of the cluster in the volume.
        index: u32,
        /// Bytes.
        length: u64,
    },
    /// It is zero, and is to be.
    Nothing {
        /// Bytes.
        length: u64,
    },
}

impl ChangePiece {
    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        match self {
            ChangePiece::Device { length, .. }
            | ChangePiece::Allocate { length, .. }
            | ChangePiece::Release { length, .. }
            | ChangePiece::Nothing { length } => *length,
        }
    }
}

/// How an operation changes a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    /// It has data, or wants space.
    Data,
    /// It makes zeroes.
    Zeroes,
    /// It makes zeroes, and gives space back.
    Deallocate,
}

/// Why a range of a volume cannot be read or changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// A snapshot is missing, or the volume.
    Missing,
    /// It is beyond the end, as the volume has become smaller.
    BeyondEnd,
    /// The volume is read-only.
    ReadOnly,
}

impl From<BlobReadError> for Unusable {
    fn from(error: BlobReadError) -> Unusable {
        match error {
            BlobReadError::Range { .. } => Unusable::BeyondEnd,
            _ => Unusable::Missing,
        }
    }
}

impl VolumeMap<'_> {
    /// Appends the pieces of a range of bytes, as few as possible. The external snapshot has
    /// `external_bytes`, and zeroes beyond them.
    pub(crate) fn pieces(
        &self,
        offset: u64,
        length: u64,
        external_bytes: impl Fn() -> u64,
        pieces: &mut Vec<ReadPiece>,
    ) -> Result<(), Unusable> {
        for segment in self.blobs.read(self.blob, offset, length)? {
            let length = segment.as_ref().map_or(0, BlobSegment::length);
            match segment? {
                BlobSegment::Device { offset, .. } => push(pieces, PieceSource::Base, offset, length),
                BlobSegment::Zeroes { .. } => push(pieces, PieceSource::Zeroes, 0, length),
                BlobSegment::External { offset, .. } => {
                    let there = external_bytes().saturating_sub(offset).min(length);
                    push(pieces, PieceSource::External, offset, there);
                    push(pieces, PieceSource::Zeroes, 0, length - there);
                }
            }
        }
        Ok(())
    }

    /// Appends the pieces of a range of bytes that is changed, as few as possible and `max` at most. Returns
    /// how many bytes they have.
    pub(crate) fn change_pieces(
        &self,
        kind: ChangeKind,
        offset: u64,
        length: u64,
        max: usize,
        pieces: &mut Vec<ChangePiece>,
    ) -> Result<u64, Unusable> {
        let blob = self.blobs.blob(self.blob).ok_or(Unusable::Missing)?;
        if blob.is_read_only() {
            return Err(Unusable::ReadOnly);
        }
        let (layout, clusters) = (self.blobs.layout(), blob.clusters());
        let cluster_bytes = u64::from(layout.cluster_bytes);
        let end = offset.checked_add(length).filter(|end| *end <= self.blobs.blob_bytes(blob));
        let end = end.ok_or(Unusable::BeyondEnd)?;
        let releases = kind == ChangeKind::Deallocate && blob.is_thin() && *blob.parent() == BlobParent::None;
        let mut at = offset;
        while at < end && pieces.len() < max {
            // The blob has at most 2^32 clusters.
            let (index, within) = ((at / cluster_bytes) as u32, at % cluster_bytes);
            let left_in_cluster = (cluster_bytes - within).min(end - at);
            // At most all clusters of the blob.
            let wanted = (within + (end - at)).div_ceil(cluster_bytes) as u32;
            let run = clusters.run_within(index, wanted);
            let piece = match run.cluster {
                Some(_) if releases && left_in_cluster == cluster_bytes => {
                    ChangePiece::Release { index, length: cluster_bytes }
                }
                Some(cluster) => {
                    let whole = u64::from(run.length) * cluster_bytes - within;
                    let length = if releases { left_in_cluster } else { whole.min(end - at) };
                    ChangePiece::Device { offset: layout.cluster_offset(cluster) + within, length }
                }
                None if kind == ChangeKind::Data => ChangePiece::Allocate { index, length: left_in_cluster },
                None => match self.blobs.read(self.blob, at, end - at)?.next() {
                    Some(Ok(BlobSegment::Zeroes { length })) => ChangePiece::Nothing { length },
                    Some(Ok(_)) | None => ChangePiece::Allocate { index, length: left_in_cluster },
                    Some(Err(error)) => return Err(error.into()),
                },
            };
            at += piece.length();
            match (pieces.last_mut(), piece) {
                (
                    Some(ChangePiece::Device { offset: first, length }),
                    ChangePiece::Device { offset, length: more },
                ) if *first + *length == offset => *length += more,
                (Some(ChangePiece::Nothing { length }), ChangePiece::Nothing { length: more }) => {
                    *length += more;
                }
                _ => pieces.push(piece),
            }
        }
        Ok(at - offset)
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
