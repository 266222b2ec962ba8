//! Requests of virtio-blk: from a chain of buffers to a request of a block device.

use block_io::{Op, Payload, RequestFlags, Tag};
use dma::Data;
use wire_virtio::blk::{BlkStatus, ID_BYTES, RangeSegment, RequestHeader, RequestKind, SECTOR_BYTES};

use crate::backend::BlkBackend;
use crate::chain::{self, Chain, Unmapped};
use crate::failure::RingError;
use crate::limits::{RANGE_SECTORS_MAX, REQUEST_BYTES_MAX};
use crate::memory::{GuestMemory, GuestPlace};

/// What becomes of a chain.
pub(crate) struct BlkPlan {
    /// Where its status is written.
    pub(crate) status: GuestPlace,
    pub(crate) step: BlkStep,
}

/// What a request needs.
pub(crate) enum BlkStep {
    /// A request of the device, whose tag is set later. If it succeeds, so many bytes are written with the status.
    Submit(bdev::Request, u32),
    /// Nothing: it is completed, with so many bytes written without the status.
    Complete(BlkStatus, u32),
}

/// A request of the device, whose tag is set later. If it succeeds, so many bytes are written with the status.
pub(crate) struct Transfer {
    pub(crate) request: bdev::Request,
    pub(crate) written: u32,
    /// As in [`BlkPlan`].
    pub(crate) status: GuestPlace,
}

/// The transfer that a chain asks for, if it is as drivers make nearly all: a header, the data and a status in a
/// descriptor each. [`plan`] finds the same with three times the instructions, and answers everything else.
#[inline]
pub(crate) fn transfer(
    memory: &GuestMemory,
    chain: &Chain,
    backend: &BlkBackend,
    write_through: bool,
) -> Option<Transfer> {
    let (op, header, data, status) = match (chain.readable(), chain.writable()) {
        ([header], [data, status]) => (Op::Read, header, data, status),
        ([header, data], [status]) if !backend.read_only => (Op::Write, header, data, status),
        _ => return None,
    };
    if header.length as usize != RequestHeader::SIZE || status.length != 1 {
        return None;
    }
    let header = memory.whole(header)?;
    let header = RequestHeader::from_words(header.region().snapshot_u64_pair(header.offset));
    let (kind, flags, written) = match op {
        Op::Read => (RequestKind::In, RequestFlags::NONE, data.length),
        _ => (RequestKind::Out, write_flags(backend, write_through), 0),
    };
    if header.kind != kind.to_wire() {
        return None;
    }
    let (lba, blocks) = range(backend, header.sector, data.length.into())?;
    let status = memory.whole(status)?.place();
    let data = Payload::Data(Data::One(memory.whole(data)?.buffer()?));
    let request = bdev::Request { flags, ..bdev::Request::with_payload(Tag(0), op, lba, blocks, data) };
    Some(Transfer { request, written, status })
}

#[inline]
fn write_flags(backend: &BlkBackend, write_through: bool) -> RequestFlags {
    if write_through && backend.write_cache { RequestFlags::FUA } else { RequestFlags::NONE }
}

/// Plans the execution of a chain. Whatever is wrong in the request, rather than in the chain, is answered.
///
/// With `write_through`, writes are durable when they complete.
///
/// # Errors
/// There is no place for a status.
#[inline(never)]
pub(crate) fn plan(
    memory: &GuestMemory,
    chain: &Chain,
    backend: &BlkBackend,
    write_through: bool,
) -> Result<BlkPlan, RingError> {
    let status = chain::last_byte(memory, chain.writable()).ok_or(RingError::NoStatus)?;
    let step = step(memory, chain, backend, write_through);
    Ok(BlkPlan { status, step: step.unwrap_or(BlkStep::Complete(BlkStatus::IoError, 0)) })
}

/// What the request of a chain needs; an error of the request is `Unmapped`, whatever it is.
fn step(
    memory: &GuestMemory,
    chain: &Chain,
    backend: &BlkBackend,
    write_through: bool,
) -> Result<BlkStep, Unmapped> {
    let (readable, writable) = (chain.readable(), chain.writable());
    let header = RequestHeader::decode(&chain::first_bytes::<{ RequestHeader::SIZE }>(memory, readable)?);
    let header = header.map_err(|_| Unmapped)?;
    let kind = RequestKind::from_wire(header.kind);
    let unsupported = BlkStep::Complete(BlkStatus::Unsupported, 0);
    let fua = write_flags(backend, write_through);
    Ok(match kind {
        Some(RequestKind::In) => {
            let bytes = chain::total(writable) - 1;
            let (lba, blocks) = range(backend, header.sector, bytes).ok_or(Unmapped)?;
            let data = chain::data(memory, writable, 0, bytes)?;
            let request = bdev::Request::with_payload(Tag(0), Op::Read, lba, blocks, Payload::Data(data));
            BlkStep::Submit(request, bytes as u32)
        }
        Some(RequestKind::Out) if !backend.read_only => {
            let skipped = RequestHeader::SIZE as u64;
            let bytes = chain::total(readable) - skipped;
            let (lba, blocks) = range(backend, header.sector, bytes).ok_or(Unmapped)?;
            let data = chain::data(memory, readable, skipped, bytes)?;
            let mut request =
                bdev::Request::with_payload(Tag(0), Op::Write, lba, blocks, Payload::Data(data));
            request.flags = fua;
            BlkStep::Submit(request, 0)
        }
        Some(RequestKind::Flush) if backend.can_flush => {
            BlkStep::Submit(bdev::Request::new(Tag(0), Op::Flush, 0, 0), 0)
        }
        // Without a cache that can be flushed there is none.
        Some(RequestKind::Flush) => BlkStep::Complete(BlkStatus::Ok, 0),
        Some(RequestKind::GetId) => identify(memory, chain, backend)?,
        Some(RequestKind::Discard) if backend.can_unmap => zero(memory, chain, backend, Op::Unmap, fua)?,
        Some(RequestKind::WriteZeroes) if backend.can_write_zeroes => {
            zero(memory, chain, backend, Op::WriteZeroes, fua)?
        }
        Some(RequestKind::Out | RequestKind::Discard | RequestKind::WriteZeroes) if backend.read_only => {
            return Err(Unmapped);
        }
        Some(RequestKind::Out | RequestKind::Discard | RequestKind::WriteZeroes) | None => unsupported,
    })
}

/// Blocks of a range of sectors and bytes; `None` if they are none, too many, or no whole blocks.
#[inline]
fn range(backend: &BlkBackend, sector: u64, bytes: u64) -> Option<(u64, u32)> {
    let sectors = bytes / SECTOR_BYTES;
    if bytes == 0 || bytes > REQUEST_BYTES_MAX || !bytes.is_multiple_of(SECTOR_BYTES) {
        return None;
    }
    // The layer checks the range against the size of the device.
    let per_block = u64::from(backend.sectors_per_block());
    if per_block == 1 {
        return Some((sector, sectors as u32));
    }
    let is_whole = sector.is_multiple_of(per_block) && sectors.is_multiple_of(per_block);
    is_whole.then(|| (sector / per_block, (sectors / per_block) as u32))
}

/// Writes the serial number.
fn identify(memory: &GuestMemory, chain: &Chain, backend: &BlkBackend) -> Result<BlkStep, Unmapped> {
    let room = (chain::total(chain.writable()) - 1).min(ID_BYTES as u64) as usize;
    let written = chain::write_bytes(memory, chain.writable(), &backend.serial[..room])?;
    Ok(BlkStep::Complete(BlkStatus::Ok, written as u32))
}

/// A discard or a write of zeroes, of one range.
fn zero(
    memory: &GuestMemory,
    chain: &Chain,
    backend: &BlkBackend,
    op: Op,
    fua: RequestFlags,
) -> Result<BlkStep, Unmapped> {
    const BYTES: usize = RequestHeader::SIZE + RangeSegment::SIZE;
    // More than one range is more than the configuration allows.
    if chain::total(chain.readable()) != BYTES as u64 {
        return Err(Unmapped);
    }
    let bytes: [u8; BYTES] = chain::first_bytes(memory, chain.readable())?;
    let segment = RangeSegment::decode(&bytes[RequestHeader::SIZE..]).map_err(|_| Unmapped)?;
    let unmaps = segment.flags & RangeSegment::UNMAP != 0;
    if segment.flags & !RangeSegment::UNMAP != 0 || op == Op::Unmap && unmaps {
        return Ok(BlkStep::Complete(BlkStatus::Unsupported, 0));
    }
    let per_block = backend.sectors_per_block();
    let is_whole =
        segment.sector.is_multiple_of(per_block.into()) && segment.sectors.is_multiple_of(per_block);
    if !is_whole || segment.sectors == 0 || segment.sectors > RANGE_SECTORS_MAX {
        return Err(Unmapped);
    }
    let lba = segment.sector / u64::from(per_block);
    let mut request = bdev::Request::new(Tag(0), op, lba, segment.sectors / per_block);
    if op == Op::WriteZeroes {
        request.flags = fua;
        request.flags.set(RequestFlags::DEALLOCATE, unmaps);
    }
    Ok(BlkStep::Submit(request, 0))
}

const _: () = assert!(REQUEST_BYTES_MAX / SECTOR_BYTES <= u32::MAX as u64);
