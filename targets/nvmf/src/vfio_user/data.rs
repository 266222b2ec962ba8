//! Where a command's data lies: PRPs and SGLs (Base 2.0, sections 4.1.1 and 4.1.2).

use ring::Status;
use wire_nvme::DataPointer;
use wire_nvme::sqe::Sgl;

use super::memory::Memory;

/// Memory pages as CC.MPS has them.
pub(super) const PAGE: u64 = 4096;
/// SGL descriptors of one command: more than a page's worth for every page of the largest transfer.
const DESCRIPTORS_MAX: usize = 1024;

/// A stretch of the client's memory, by the address that the device knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) bytes: u32,
}

/// Appends where the `bytes` bytes of a command's data lie; neighbours are joined.
///
/// Addresses are looked up by whoever copies: what is a list here may be gone by then.
///
/// # Errors
/// The status to complete the command with.
#[inline]
pub(super) fn walk(
    memory: &Memory,
    pointer: DataPointer,
    is_sgl: bool,
    bytes: u32,
    pieces: &mut Vec<Piece>,
) -> Result<(), Status> {
    pieces.clear();
    if is_sgl {
        return sgl(memory, pointer, bytes, pieces);
    }
    let offset = pointer.low % PAGE;
    // Bits 1:0 of the first entry (Base 2.0, section 4.1.1).
    if offset & 3 != 0 {
        return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
    }
    let first = bytes.min((PAGE - offset) as u32);
    pieces.push(Piece { address: pointer.low, bytes: first });
    if first == bytes {
        return Ok(());
    }
    prps(memory, pointer.high, bytes - first, pieces)
}

/// What the second PRP entry leads to: a page, or a list of them.
fn prps(memory: &Memory, second: u64, bytes: u32, pieces: &mut Vec<Piece>) -> Result<(), Status> {
    if u64::from(bytes) <= PAGE {
        return page(second, bytes, pieces);
    }
    let (mut left, mut list) = (bytes, second);
    // Each list has at least one page of data, or it leads nowhere.
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
        let need = u64::from(left).div_ceil(PAGE);
        // The last entry of a page of them leads to the next list where more are needed.
        let (entries, more) = if need > room { (room - 1, true) } else { (need, false) };
        let spot = memory.find(list, (entries + u64::from(more)) * 8).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let region = spot.loan.region();
        for index in 0..entries {
            let bytes = left.min(PAGE as u32);
            page(region.load_u64(spot.offset + index * 8), bytes, pieces)?;
            left -= bytes;
        }
        if !more {
            return Ok(());
        }
        list = region.load_u64(spot.offset + entries * 8);
    }
}

/// A whole page, or the beginning of the last one.
#[inline]
fn page(address: u64, bytes: u32, pieces: &mut Vec<Piece>) -> Result<(), Status> {
    if !address.is_multiple_of(PAGE) {
        return Err(Status::PRP_OFFSET_INVALID.do_not_retry());
    }
    join(address, bytes, pieces);
    Ok(())
}

#[inline]
fn join(address: u64, bytes: u32, pieces: &mut Vec<Piece>) {
    match pieces.last_mut() {
        Some(last) if last.address.wrapping_add(last.bytes.into()) == address => last.bytes += bytes,
        _ => pieces.push(Piece { address, bytes }),
    }
}

fn sgl(memory: &Memory, first: DataPointer, bytes: u32, pieces: &mut Vec<Piece>) -> Result<(), Status> {
    let mut left = bytes;
    let mut descriptors = 0;
    // The one in the command is a segment of one.
    let mut segment = match descriptor(first)? {
        Sgl::DataBlock { address, length } => {
            block(address, length, &mut left, pieces)?;
            return finish(left);
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
        let spot = memory.find(address, length.into()).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let region = spot.loan.region();
        let mut next = None;
        for index in 0..count {
            let at = spot.offset + index as u64 * 16;
            let pointer = DataPointer { low: region.load_u64(at), high: region.load_u64(at + 8) };
            match descriptor(pointer)? {
                Sgl::DataBlock { address, length } => block(address, length, &mut left, pieces)?,
                // Only the last descriptor leads on, and only from a segment that is not the last.
                Sgl::Segment { offset: false, last, address, length } if !is_last && index + 1 == count => {
                    next = Some((address, length, last));
                }
                Sgl::Segment { .. } => return invalid,
                _ => return Err(Status::SGL_TYPE_INVALID.do_not_retry()),
            }
        }
        match next {
            Some(next) => segment = next,
            None if is_last => return finish(left),
            None => return invalid,
        }
    }
}

fn descriptor(pointer: DataPointer) -> Result<Sgl, Status> {
    pointer.sgl().map_err(|_| Status::SGL_TYPE_INVALID.do_not_retry())
}

fn block(address: u64, length: u32, left: &mut u32, pieces: &mut Vec<Piece>) -> Result<(), Status> {
    // More than the command moves is not supported (SGLS).
    let Some(rest) = left.checked_sub(length) else {
        return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
    };
    *left = rest;
    if length > 0 {
        join(address, length, pieces);
    }
    Ok(())
}

fn finish(left: u32) -> Result<(), Status> {
    if left == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()) }
}

/// Copies from the client's memory.
pub(super) fn gather(memory: &Memory, pieces: &[Piece], out: &mut [u8]) -> Result<(), Status> {
    let mut at = 0;
    for piece in pieces {
        let spot = memory.find(piece.address, piece.bytes.into()).ok_or(Status::DATA_TRANSFER_ERROR)?;
        let end = at + piece.bytes as usize;
        spot.loan.region().read(spot.offset, &mut out[at..end]);
        at = end;
    }
    assert_eq!(at, out.len(), "pieces make up the whole");
    Ok(())
}

/// Copies to the client's memory.
pub(super) fn scatter(memory: &Memory, pieces: &[Piece], data: &[u8]) -> Result<(), Status> {
    let mut at = 0;
    for piece in pieces {
        let spot = memory.find(piece.address, piece.bytes.into()).filter(|spot| spot.writable);
        let spot = spot.ok_or(Status::DATA_TRANSFER_ERROR)?;
        let end = at + piece.bytes as usize;
        spot.loan.region().write(spot.offset, &data[at..end]);
        at = end;
    }
    assert_eq!(at, data.len(), "pieces make up the whole");
    Ok(())
}
