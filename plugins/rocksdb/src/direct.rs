//! Reads of a file by the thread that calls, without the reactor: many readers do not wait for each other.
//!
//! It needs a file that is not open for writing, whose extents are known then, and a bdev that any thread can
//! read ([`bdev::DeviceReader`]). What cannot be read so, for whatever reason, is read by a request: that
//! also finds out which error it is.

use std::sync::OnceLock;

use bdev::DeviceReader;
use blobfs::{FileExtents, OpenNumber};

use crate::store::Store;

/// Bytes of memory of one read of the device, which is copied where it is wanted.
const COPY_BYTES_MAX: usize = 1 << 20;

/// The extents of an open file, once they are known.
#[derive(Default)]
pub(crate) struct DirectFile(OnceLock<FileExtents>);

impl DirectFile {
    /// Reads. `None` if the file has to be read by a request.
    pub(crate) fn read(&self, store: &Store, open: OpenNumber, offset: u64, out: &mut [u8]) -> Option<usize> {
        let reader = store.reader()?;
        let extents = match self.0.get() {
            Some(extents) => extents,
            None => {
                let extents = store.extents(open)?;
                self.0.get_or_init(|| extents)
            }
        };
        let done = read(reader, extents, offset, out);
        if extents.is_revoked() {
            store.reads_ended();
        }
        done
    }
}

/// Reads what the file has of a range.
fn read(reader: &DeviceReader, extents: &FileExtents, offset: u64, out: &mut [u8]) -> Option<usize> {
    let left = extents.size().saturating_sub(offset);
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(out.len());
    let out = &mut out[..length];
    let (block, align) = (extents.block_bytes(), reader.alignment());
    let is_whole = offset.is_multiple_of(block) && (length as u64).is_multiple_of(block);
    if is_whole && out.as_ptr().addr().is_multiple_of(align) {
        return read_blocks(reader, extents, offset, out).then_some(length);
    }
    let mut at = 0;
    let mut memory = Vec::new();
    while at < length {
        let first = (offset + at as u64) / block * block;
        let before = (offset + at as u64 - first) as usize;
        let bytes = (length - at).min(COPY_BYTES_MAX - before);
        let blocks = (before + bytes).next_multiple_of(block as usize);
        if memory.is_empty() {
            memory = vec![0; blocks + align];
        }
        let start = memory.as_ptr().addr().next_multiple_of(align) - memory.as_ptr().addr();
        let blocks = &mut memory[start..start + blocks];
        if !read_blocks(reader, extents, first, blocks) {
            return None;
        }
        out[at..at + bytes].copy_from_slice(&blocks[before..before + bytes]);
        at += bytes;
    }
    Some(length)
}

/// Reads whole blocks. False if the extents were revoked, or the device failed.
fn read_blocks(reader: &DeviceReader, extents: &FileExtents, start: u64, out: &mut [u8]) -> bool {
    let Some(reading) = extents.begin_read() else { return false };
    let mut rest = out;
    for part in reading.parts(start, rest.len()) {
        let (to, after) = std::mem::take(&mut rest).split_at_mut(part.bytes);
        rest = after;
        match part.offset {
            Some(offset) if reader.read(offset, to).is_err() => return false,
            Some(_) => {}
            None => to.fill(0),
        }
    }
    rest.is_empty()
}
