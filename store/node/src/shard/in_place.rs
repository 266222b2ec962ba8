//! Writing entries in place: the blocks that a batch of them changes, each written once.

use std::cell::RefCell;
use std::collections::BTreeMap;

use objects::{BlockBase, PieceSource, WritePiece};
use wire_store::{BLOCK_BYTES, crc32c};

use super::checksums::{BlockReader, stored_checksum};
use super::overlay::EntryData;
use crate::StoreError;
use crate::device::{StoreDevice, join_all};

/// Writes in flight, and blocks of one.
const WRITES_MAX: usize = 16;
const WRITE_BLOCKS_MAX: usize = 64;

/// The blocks that entries change.
#[derive(Default)]
pub(super) struct InPlaceBatch {
    pub(super) blocks: BTreeMap<u64, BlockChange>,
    /// The data of the entries.
    pub(super) data: Vec<EntryData>,
}

pub(super) struct BlockChange {
    base: BlockBase,
    patches: Vec<Patch>,
}

struct Patch {
    skip: u32,
    length: u32,
    source: PatchSource,
}

/// Where the bytes of a patch come from.
#[derive(Clone, Copy)]
enum PatchSource {
    Zeroes,
    /// The data with this index, from this offset.
    Data(u32, u32),
}

impl InPlaceBatch {
    /// Adds the pieces of the next entry, but for blocks that are not to be changed.
    pub(super) fn add(&mut self, pieces: &[WritePiece], data: &EntryData, skips: impl Fn(u64) -> bool) {
        if pieces.is_empty() {
            return;
        }
        let entry = self.data.len() as u32;
        self.data.push(data.clone());
        for piece in pieces {
            let mut from = 0;
            for block in piece.block..piece.block + u64::from(piece.blocks) {
                let length = (piece.length - from).min(BLOCK_BYTES as u32 - piece.skip);
                let source = match piece.source {
                    PieceSource::Data(at) => PatchSource::Data(entry, at + from),
                    PieceSource::Zeroes => PatchSource::Zeroes,
                };
                from += length;
                if skips(block) {
                    continue;
                }
                let patch = (length > 0).then_some(Patch { skip: piece.skip, length, source });
                match (&piece.base, self.blocks.get_mut(&block)) {
                    (BlockBase::Stored, Some(change)) => change.patches.extend(patch),
                    (base, _) => {
                        let patches = patch.into_iter().collect();
                        self.blocks.insert(block, BlockChange { base: base.clone(), patches });
                    }
                }
            }
        }
    }

    /// The blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.blocks.keys().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Writes the blocks, and sets their checksums. Blocks that keep bytes are read first, and verified if
    /// `verify`.
    pub(super) async fn write(
        self,
        reader: &RefCell<impl BlockReader>,
        device: &StoreDevice,
        verify: bool,
    ) -> Result<(), StoreError> {
        let mut runs: Vec<Vec<(u64, BlockChange)>> = Vec::new();
        let InPlaceBatch { blocks, data } = self;
        for (block, change) in blocks {
            match runs.last_mut() {
                Some(run) if run.len() < WRITE_BLOCKS_MAX && run[0].0 + run.len() as u64 == block => {
                    run.push((block, change));
                }
                _ => runs.push(vec![(block, change)]),
            }
        }
        join_all(WRITES_MAX, runs.into_iter().map(|run| write_run(run, &data, reader, device, verify))).await
    }
}

/// Writes adjacent blocks.
async fn write_run(
    run: Vec<(u64, BlockChange)>,
    data: &[EntryData],
    reader: &RefCell<impl BlockReader>,
    device: &StoreDevice,
    verify: bool,
) -> Result<(), StoreError> {
    let mut buffer = device.buffer(run.len() * BLOCK_BYTES).await?;
    for (index, (block, change)) in run.iter().enumerate() {
        let range = index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES;
        match &change.base {
            BlockBase::Whole => {}
            BlockBase::Zeroes => buffer.as_mut_slice()[range.clone()].fill(0),
            BlockBase::Inline(bytes) => {
                let out = &mut buffer.as_mut_slice()[range.clone()];
                out[..bytes.len()].copy_from_slice(bytes);
                out[bytes.len()..].fill(0);
            }
            BlockBase::Stored => {
                let stored = device.read(block * BLOCK_BYTES as u64, BLOCK_BYTES).await?;
                if verify && crc32c(stored.as_slice()) != stored_checksum(reader, device, *block).await? {
                    return Err(StoreError::Checksum { block: *block });
                }
                buffer.as_mut_slice()[range.clone()].copy_from_slice(stored.as_slice());
            }
        }
        let out = &mut buffer.as_mut_slice()[range];
        for patch in &change.patches {
            let out = &mut out[patch.skip as usize..(patch.skip + patch.length) as usize];
            match patch.source {
                PatchSource::Zeroes => out.fill(0),
                PatchSource::Data(entry, from) => {
                    out.copy_from_slice(&data[entry as usize].bytes_from(from)[..out.len()]);
                }
            }
        }
        let crc32c = crc32c(out);
        reader.borrow_mut().checksums().set(*block, crc32c);
    }
    device.write_buffer(run[0].0 * BLOCK_BYTES as u64, buffer).await
}
