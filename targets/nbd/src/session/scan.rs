//! BLOCK_STATUS: what of a range is allocated, found by searching for data and holes in turn.

use block_io::{Op, Payload, RequestFlags};
use dma::Buffer;
use slots::Slot;
use target_shell::{IoContext, NoMemory, OutgoingPdu, PduData, SendQueue};
use wire_nbd::{ChunkFlags, ChunkHeader, ChunkKind, CommandFlags, Extent, HeaderForm, state};

use super::{Retry, Role, Session, plain};
use crate::connection::NbdCore;
use crate::handshake::ALLOCATION_ID;
use crate::status::error_of;

/// The extents of a range that are known so far.
pub(super) struct Scan {
    /// The first byte that is not in an extent, and the end of the range.
    position: u64,
    end: u64,
    seek: Op,
    /// The extents, encoded.
    buffer: Buffer,
    used: usize,
    count: u32,
    count_max: u32,
}

impl Scan {
    /// Extents of one reply; the client asks again for what follows.
    pub(super) const BUFFER_BYTES: usize = 4096;

    /// Adds an extent up to byte `end`, or to the end of the range. Returns whether nothing more can be added.
    fn add(&mut self, end: u64, flags: u64, form: HeaderForm) -> bool {
        let end = end.min(self.end);
        if end > self.position {
            let extent = Extent { length: end - self.position, flags };
            self.used += extent.encode(form, &mut self.buffer.as_mut_slice()[self.used..]);
            self.position = end;
            self.count += 1;
        }
        self.position == self.end || self.count == self.count_max
    }
}

impl Session {
    pub(super) fn begin_scan(
        &mut self,
        slot: Slot,
        buffer: Buffer,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) {
        let (form, can_seek) = (self.form, self.export.can_seek);
        let Some(command) = self.commands.get_mut(slot) else { return };
        let one = command.flags.contains(CommandFlags::REQ_ONE);
        let count_max = if one { 1 } else { Scan::BUFFER_BYTES / Extent::size(form) };
        let (position, end) = (command.offset, command.offset + command.length);
        let (used, count, count_max) = (0, 0, count_max as u32);
        let mut scan = Scan { position, end, seek: Op::SeekData, buffer, used, count, count_max };
        command.pending += 1;
        if !can_seek {
            // All of such a device is allocated.
            scan.add(end, 0, form);
            command.pending -= 1;
        }
        command.scan = Some(Box::new(scan));
        if can_seek {
            // Never fails: it takes no buffer.
            _ = self.scan_again(slot, out, context);
        }
    }

    /// Searches on.
    pub(super) fn scan_again(
        &mut self,
        slot: Slot,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), NoMemory> {
        let block_size = u64::from(self.export.block_size);
        let Some(scan) = self.commands.get(slot).and_then(|command| command.scan.as_ref()) else {
            return Ok(());
        };
        let lba = scan.position / block_size;
        let blocks = (scan.end.div_ceil(block_size) - lba).min(u64::from(u32::MAX));
        let seek = plain(Role::Scan.tag(slot), scan.seek, lba, blocks, RequestFlags::NONE);
        self.submit(slot, seek, out, context);
        Ok(())
    }

    pub(super) fn scan_done(&mut self, slot: Slot, completion: &bdev::Completion, out: &mut SendQueue) {
        let (form, block_size) = (self.form, u64::from(self.export.block_size));
        let Some(command) = self.commands.get_mut(slot) else { return };
        let status = completion.status();
        let Some(scan) = command.scan.as_mut().filter(|_| status.is_success()) else {
            command.fail(error_of(status));
            return self.end_piece(slot, out);
        };
        let request = completion.request();
        let end = match request.payload {
            Payload::Found(Some(lba)) => lba * block_size,
            _ => (request.lba + u64::from(request.blocks)) * block_size,
        };
        let flags = if request.op == Op::SeekData { state::HOLE | state::ZERO } else { 0 };
        let is_complete = scan.add(end, flags, form);
        scan.seek = if request.op == Op::SeekData { Op::SeekHole } else { Op::SeekData };
        if is_complete {
            return self.end_piece(slot, out);
        }
        self.retries.push_back((slot, Retry::Scan));
    }

    /// Queues the reply.
    pub(super) fn send_extents(&self, cookie: u64, offset: u64, scan: Scan, out: &mut SendQueue) {
        let form = self.form;
        let (kind, prefix) = match form {
            HeaderForm::Compact => (ChunkKind::BlockStatus, 4),
            HeaderForm::Extended => (ChunkKind::BlockStatusExt, 8),
        };
        let length = (prefix + scan.used) as u64;
        let chunk = ChunkHeader { flags: ChunkFlags::DONE, kind, cookie, offset, length };
        let reply = OutgoingPdu::new(|head| {
            let size = chunk.encode(form, head);
            head[size..size + 4].copy_from_slice(&ALLOCATION_ID.to_be_bytes());
            if form == HeaderForm::Extended {
                head[size + 4..size + 8].copy_from_slice(&scan.count.to_be_bytes());
            }
            size + prefix
        });
        out.push(reply.with_data(PduData::Buffer(scan.buffer.into(), 0, scan.used)));
    }
}
