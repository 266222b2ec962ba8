//! Data pointers of commands: PRPs and SGLs (Base 2.0, sections 4.1.1 and 4.1.2).

use block_io::Status;
use wire_nvme::DataPointer;
use wire_nvme::sqe::Sgl;

use super::memory::ClientMemory;

/// Memory page size (CC.MPS), in bytes.
pub(super) const PAGE: u64 = 4096;
/// Maximum SGL descriptors of one command: more than a page's worth for every page of the largest transfer.
const DESCRIPTORS_MAX: usize = 1024;

/// A contiguous range of client memory, by I/O address, or a bit bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataSegment {
    pub(super) address: u64,
    pub(super) bytes: u32,
    /// Data of a read that is not transferred (Base 2.1, section 4.3.2.1); `address` is 0.
    pub(super) is_discarded: bool,
}

/// Collects the segments of a command's `bytes` bytes of data from its PRPs or SGL; adjacent segments are
/// merged.
///
/// The data addresses are not translated here, because a range may be unmapped before the copy. Only
/// transfers `to_host` have discarded segments.
///
/// # Errors
/// The status to complete the command with.
#[inline]
pub(super) fn parse_data_pointer(
    memory: &ClientMemory,
    (pointer, is_sgl): (DataPointer, bool),
    to_host: bool,
    bytes: u32,
    segments: &mut Vec<DataSegment>,
) -> Result<(), Status> {
    segments.clear();
    if is_sgl {
        return sgl(memory, pointer, to_host, bytes, segments);
    }
    let offset = pointer.low % PAGE;
    // Bits 1:0 of the first entry (Base 2.0, section 4.1.1).
    if offset & 3 != 0 {
        return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
    }
    let first = bytes.min((PAGE - offset) as u32);
    segments.push(DataSegment { address: pointer.low, bytes: first, is_discarded: false });
    if first == bytes {
        return Ok(());
    }
    prps(memory, pointer.high, bytes - first, segments)
}

/// Follows the second PRP entry: a page, or a PRP list.
fn prps(
    memory: &ClientMemory,
    second: u64,
    bytes: u32,
    segments: &mut Vec<DataSegment>,
) -> Result<(), Status> {
    if u64::from(bytes) <= PAGE {
        return page(second, bytes, segments);
    }
    let (mut remaining, mut list) = (bytes, second);
    // Each list must have at least one page of data; this bounds chains of empty lists.
    let mut lists_left = u64::from(bytes).div_ceil(PAGE) + 1;
    loop {
        if !list.is_multiple_of(8) {
            return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
        }
        lists_left -= 1;
        if lists_left == 0 {
            return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
        }
        let room = (PAGE - list % PAGE) / 8;
        let need = u64::from(remaining).div_ceil(PAGE);
        // The last entry of a list page points to the next list if more entries are needed.
        let (entries, more) = if need > room { (room - 1, true) } else { (need, false) };
        let mapped =
            memory.translate(list, (entries + u64::from(more)) * 8).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let region = mapped.external.region();
        for index in 0..entries {
            let bytes = remaining.min(PAGE as u32);
            page(region.load_u64(mapped.offset + index * 8), bytes, segments)?;
            remaining -= bytes;
        }
        if !more {
            return Ok(());
        }
        list = region.load_u64(mapped.offset + entries * 8);
    }
}

/// Adds a whole page, or the first part of the last one.
#[inline]
fn page(address: u64, bytes: u32, segments: &mut Vec<DataSegment>) -> Result<(), Status> {
    if !address.is_multiple_of(PAGE) {
        return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
    }
    push_merged(address, bytes, segments);
    Ok(())
}

#[inline]
fn push_merged(address: u64, bytes: u32, segments: &mut Vec<DataSegment>) {
    match segments.last_mut() {
        Some(last) if !last.is_discarded && last.address.wrapping_add(last.bytes.into()) == address => {
            last.bytes += bytes
        }
        _ => segments.push(DataSegment { address, bytes, is_discarded: false }),
    }
}

/// Adds a bit bucket: bytes of a read that are discarded. In the SGL of a source buffer, as of a write, it
/// counts as one of no bytes (Base 2.1, section 4.3.2.1).
fn push_bit_bucket(
    length: u32,
    to_host: bool,
    remaining: &mut u32,
    segments: &mut Vec<DataSegment>,
) -> Result<(), Status> {
    let bytes = if to_host { length } else { 0 };
    let rest = remaining.checked_sub(bytes);
    *remaining = rest.ok_or(Status::DATA_SGL_LENGTH_INVALID.do_not_retry())?;
    match segments.last_mut() {
        _ if bytes == 0 => {}
        Some(last) if last.is_discarded => last.bytes += bytes,
        _ => segments.push(DataSegment { address: 0, bytes, is_discarded: true }),
    }
    Ok(())
}

fn sgl(
    memory: &ClientMemory,
    first: DataPointer,
    to_host: bool,
    bytes: u32,
    segments: &mut Vec<DataSegment>,
) -> Result<(), Status> {
    let mut remaining = bytes;
    let mut descriptors = 0;
    // The descriptor in the command is a segment with one descriptor.
    let mut segment = match descriptor(first)? {
        Sgl::DataBlock { address, length } => {
            push_data_block(address, length, &mut remaining, segments)?;
            return check_length(remaining);
        }
        Sgl::BitBucket { length } => {
            push_bit_bucket(length, to_host, &mut remaining, segments)?;
            return check_length(remaining);
        }
        Sgl::Segment { offset: false, last, address, length } => (address, length, last),
        _ => return Err(Status::SGL_TYPE_INVALID.do_not_retry()),
    };
    loop {
        let (address, length, is_last) = segment;
        let invalid = Err(Status::INVALID_SGL_SEGMENT.do_not_retry());
        if length == 0 || !length.is_multiple_of(16) || !address.is_multiple_of(8) {
            return invalid;
        }
        let count = length as usize / 16;
        descriptors += count;
        if descriptors > DESCRIPTORS_MAX {
            return Err(Status::INVALID_SGL_COUNT.do_not_retry());
        }
        let mapped = memory.translate(address, length.into()).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let region = mapped.external.region();
        let mut next = None;
        for index in 0..count {
            let at = mapped.offset + index as u64 * 16;
            let pointer = DataPointer { low: region.load_u64(at), high: region.load_u64(at + 8) };
            match descriptor(pointer)? {
                Sgl::DataBlock { address, length } => {
                    push_data_block(address, length, &mut remaining, segments)?
                }
                Sgl::BitBucket { length } => push_bit_bucket(length, to_host, &mut remaining, segments)?,
                // Only the last descriptor of a segment may be a Segment, and not in a Last Segment.
                Sgl::Segment { offset: false, last, address, length } if !is_last && index + 1 == count => {
                    next = Some((address, length, last));
                }
                Sgl::Segment { .. } => return invalid,
                _ => return Err(Status::SGL_TYPE_INVALID.do_not_retry()),
            }
        }
        match next {
            Some(next) => segment = next,
            None if is_last => return check_length(remaining),
            None => return invalid,
        }
    }
}

fn descriptor(pointer: DataPointer) -> Result<Sgl, Status> {
    pointer.sgl().map_err(|_| Status::SGL_TYPE_INVALID.do_not_retry())
}

fn push_data_block(
    address: u64,
    length: u32,
    remaining: &mut u32,
    segments: &mut Vec<DataSegment>,
) -> Result<(), Status> {
    // An SGL longer than the transfer is not supported (SGLS).
    let Some(rest) = remaining.checked_sub(length) else {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    };
    *remaining = rest;
    if length > 0 {
        push_merged(address, length, segments);
    }
    Ok(())
}

fn check_length(remaining: u32) -> Result<(), Status> {
    if remaining == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()) }
}

/// Copies from client memory to `parts`, which together are as long as the segments, of which none is
/// discarded.
pub(super) fn gather<'p>(
    memory: &ClientMemory,
    segments: &[DataSegment],
    parts: impl Iterator<Item = &'p mut [u8]>,
) -> Result<(), Status> {
    let mut rest = SegmentCursor { segments, done: 0 };
    for part in parts {
        let mut at = 0;
        while let Some((Some(address), bytes)) = rest.take(part.len() - at) {
            let mapped = memory.translate(address, bytes as u64).ok_or(Status::DATA_TRANSFER_ERROR)?;
            mapped.external.region().read(mapped.offset, &mut part[at..at + bytes]);
            at += bytes;
        }
    }
    assert!(rest.segments.is_empty(), "the segments cover the transfer");
    Ok(())
}

/// Copies `parts` to client memory, but for those of discarded segments; together they are as long as the
/// segments.
pub(super) fn scatter<'p>(
    memory: &ClientMemory,
    segments: &[DataSegment],
    parts: impl Iterator<Item = &'p [u8]>,
) -> Result<(), Status> {
    let mut rest = SegmentCursor { segments, done: 0 };
    for part in parts {
        let mut at = 0;
        while let Some((address, bytes)) = rest.take(part.len() - at) {
            if let Some(address) = address {
                let mapped = memory.translate(address, bytes as u64).filter(|mapped| mapped.writable);
                let mapped = mapped.ok_or(Status::DATA_TRANSFER_ERROR)?;
                mapped.external.region().write(mapped.offset, &part[at..at + bytes]);
            }
            at += bytes;
        }
    }
    assert!(rest.segments.is_empty(), "the segments cover the transfer");
    Ok(())
}

/// The segments that are not copied yet; of the first, `done` bytes are.
struct SegmentCursor<'a> {
    segments: &'a [DataSegment],
    done: u32,
}

impl SegmentCursor<'_> {
    /// The address and length of the next bytes, at most `bytes_max`; `None` of none. Those of a discarded
    /// segment have no address.
    fn take(&mut self, bytes_max: usize) -> Option<(Option<u64>, usize)> {
        let (segment, rest) = self.segments.split_first()?;
        let bytes = bytes_max.min((segment.bytes - self.done) as usize);
        let address = (!segment.is_discarded).then(|| segment.address + u64::from(self.done));
        self.done += bytes as u32;
        if self.done == segment.bytes {
            (self.segments, self.done) = (rest, 0);
        }
        (bytes > 0).then_some((address, bytes))
    }
}
