//! The newest command: what of it is not submitted yet, and the payload that arrives for it.

use block_io::{Op, RequestFlags};
use dma::{Buffer, Data};
use slots::Slot;
use target_shell::{IoContext, NoMemory, ReceiveBuffer, SendQueue, TransferReport};
use wire_nbd::{CommandFlags, NbdCommand};

use super::edge::Edge;
use super::scan::Scan;
use super::{Blocked, Role, Session, plain};
use crate::connection::NbdCore;
use crate::export::Export;
use crate::limits::{HOLE_BYTES_MIN, PIECES_MAX, READ_PIECE_BYTES, ZERO_PIECE_BLOCKS};

/// The newest command, from `position` on.
pub(super) struct Issuing {
    slot: Slot,
    command: NbdCommand,
    position: u64,
    end: u64,
    /// The part of a write whose payload is being received.
    piece: Option<WritePiece>,
}

/// A part of a write: whole blocks, or a part of one.
struct WritePiece {
    /// Among those of the session.
    number: u64,
    buffer: Buffer,
    target: PieceTarget,
    /// Payload goes to `from..from + length` of the buffer; `filled` bytes have arrived.
    from: usize,
    length: usize,
    filled: usize,
}

/// Which part of a range comes next.
#[derive(Clone, Copy)]
enum PieceTarget {
    Blocks { lba: u64, bytes: u64 },
    Edge { index: usize, lba: u64, within: usize, count: usize },
}

/// In the identifier of a transfer: payload of a write, and no reply.
const PIECE: u64 = 1 << 63;

/// Why a command is not submitted completely.
enum Pause {
    /// Payload, or the cause that [`Blocked`] names.
    Wait,
}

impl Issuing {
    pub(super) fn new(slot: Slot, command: NbdCommand, position: u64, end: u64) -> Issuing {
        Issuing { slot, command, position, end, piece: None }
    }

    pub(super) fn needs_payload(&self) -> bool {
        self.command == NbdCommand::Write
    }

    pub(super) fn transfers(&self, report: &mut TransferReport) {
        if let Some(piece) = &self.piece {
            report.waits_for_peer(PIECE | piece.number, piece.buffer.len(), piece.filled);
        }
    }

    #[inline]
    pub(super) fn payload_mut(&mut self) -> Option<&mut [u8]> {
        let piece = self.piece.as_mut()?;
        let rest = piece.from + piece.filled..piece.from + piece.length;
        Some(&mut piece.buffer.as_mut_slice()[rest])
    }

    pub(super) fn payload_received(&mut self, bytes: usize) {
        if let Some(piece) = &mut self.piece {
            piece.filled += bytes;
        }
    }

    /// The next part of a range to write: whole blocks up to `bytes_max`, of which all but the last part end
    /// at a multiple of the device's unit, or a part of a block.
    fn next_target(&self, export: &Export, bytes_max: u64) -> PieceTarget {
        let (block_size, unit) = (u64::from(export.block_size), export.write_unit_bytes);
        let (lba, within, left) =
            (self.position / block_size, self.position % block_size, self.end - self.position);
        if within == 0 && left >= block_size {
            let most = (self.position + bytes_max) / unit * unit - self.position;
            return PieceTarget::Blocks { lba, bytes: left.min(most) / block_size * block_size };
        }
        // Only the first and the last block can be partial; the first is at the beginning.
        let (index, count) = (usize::from(within == 0), left.min(block_size - within) as usize);
        PieceTarget::Edge { index, lba, within: within as usize, count }
    }
}

impl PieceTarget {
    /// Bytes of the range.
    fn length(self) -> u64 {
        match self {
            PieceTarget::Blocks { bytes, .. } => bytes,
            PieceTarget::Edge { count, .. } => count as u64,
        }
    }
}

impl Session {
    /// Submits what is possible of the newest command. Returns whether all of it is submitted.
    pub(super) fn issue(
        &mut self,
        inbound: &mut ReceiveBuffer,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> bool {
        let Some(mut issuing) = self.issuing.take() else { return true };
        let issued = match issuing.command {
            NbdCommand::Read => self.issue_read(&mut issuing, out, context),
            NbdCommand::Write => self.issue_write(&mut issuing, inbound, out, context),
            NbdCommand::WriteZeroes => self.issue_zeroes(&mut issuing, out, context),
            NbdCommand::Trim => self.issue_trim(&mut issuing, out, context),
            NbdCommand::Flush => {
                self.begin_piece(issuing.slot);
                let flush = plain(Role::Piece.tag(issuing.slot), Op::Flush, 0, 0, RequestFlags::NONE);
                self.submit(issuing.slot, flush, out, context);
                Ok(())
            }
            NbdCommand::BlockStatus => self.issue_scan(&issuing, out, context),
            NbdCommand::Cache | NbdCommand::Disc => Ok(()),
        };
        if let Err(Pause::Wait) = issued {
            self.issuing = Some(issuing);
            return false;
        }
        if let Some(command) = self.commands.get_mut(issuing.slot) {
            command.issued = true;
        }
        self.finish(issuing.slot, out);
        true
    }

    /// Admits a piece.
    #[inline]
    fn admit(&mut self, slot: Slot) -> Result<(), Pause> {
        let pending = self.commands.get(slot).map_or(0, |command| command.pending);
        if pending < PIECES_MAX {
            return Ok(());
        }
        self.blocked = Blocked::Pieces(slot);
        Err(Pause::Wait)
    }

    fn take_for(
        &mut self,
        slot: Slot,
        bytes: usize,
        context: &IoContext<'_, NbdCore>,
    ) -> Result<Data, Pause> {
        self.admit(slot)?;
        self.take(bytes, context).map_err(|reason| self.pause(bytes, reason))
    }

    /// Takes a buffer of `bytes`, a multiple of `unit`, or of fewer units if there is none as large.
    fn take_piece(
        &mut self,
        slot: Slot,
        (bytes, unit): (u64, u64),
        context: &IoContext<'_, NbdCore>,
    ) -> Result<Buffer, Pause> {
        self.admit(slot)?;
        let (bytes, unit) = (bytes as usize, unit as usize);
        self.memory.take_buffer(bytes, unit, context.pool).map_err(|reason| self.pause(bytes, reason))
    }

    /// There is no memory for a piece.
    #[cold]
    fn pause(&mut self, bytes: usize, reason: NoMemory) -> Pause {
        match reason {
            NoMemory::Full => self.blocked = Blocked::Memory(bytes),
            NoMemory::Lacking => self.waiting = true,
        }
        Pause::Wait
    }

    /// Takes a buffer of one block, which a command needs to end: it may exceed what the connection may have.
    pub(super) fn take_block(&mut self, context: &IoContext<'_, NbdCore>) -> Result<Data, NoMemory> {
        let block = self.export.block_size as usize;
        let buffer = context.pool.take(block).ok_or(NoMemory::Lacking)?;
        self.memory.add(block);
        Ok(buffer.into())
    }

    fn issue_read(
        &mut self,
        issuing: &mut Issuing,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), Pause> {
        let slot = issuing.slot;
        let block_size = u64::from(self.export.block_size);
        let one_chunk =
            self.commands.get(slot).is_some_and(|command| command.flags.contains(CommandFlags::DF));
        let divides = self.structured && !one_chunk;
        while issuing.position < issuing.end {
            let lba = issuing.position / block_size;
            let piece_end = lba * block_size + READ_PIECE_BYTES / block_size * block_size;
            let stop = if divides { issuing.end.min(piece_end) } else { issuing.end };
            let blocks = stop.div_ceil(block_size) - lba;
            let looks = divides && self.export.can_seek && stop - issuing.position >= HOLE_BYTES_MIN;
            let request = if looks {
                self.admit(slot)?;
                plain(Role::Hole.tag(slot), Op::SeekData, lba, blocks, RequestFlags::NONE)
            } else {
                let data = self.take_for(slot, (blocks * block_size) as usize, context)?;
                bdev::Request::read(Role::Piece.tag(slot), lba, blocks as u32, data)
            };
            issuing.position = stop;
            self.begin_piece(slot);
            if !self.submit(slot, request, out, context) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn issue_write(
        &mut self,
        issuing: &mut Issuing,
        inbound: &mut ReceiveBuffer,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), Pause> {
        loop {
            if issuing.piece.is_none() {
                if issuing.position == issuing.end {
                    return Ok(());
                }
                let target = issuing.next_target(&self.export, self.export.write_piece_bytes());
                let (buffer, target) = self.take_target(issuing.slot, target, context)?;
                let from = match target {
                    PieceTarget::Blocks { .. } => 0,
                    PieceTarget::Edge { within, .. } => within,
                };
                let length = target.length() as usize;
                self.pieces_begun += 1;
                let number = self.pieces_begun;
                issuing.piece = Some(WritePiece { number, buffer, target, from, length, filled: 0 });
            }
            if let Some(rest) = issuing.payload_mut() {
                let count = rest.len().min(inbound.filled().len());
                rest[..count].copy_from_slice(&inbound.filled()[..count]);
                inbound.consume(count);
                issuing.payload_received(count);
            }
            let Some(piece) = issuing.piece.take_if(|piece| piece.filled == piece.length) else {
                return Err(Pause::Wait);
            };
            issuing.position += piece.length as u64;
            self.write_piece(issuing.slot, piece.target, piece.buffer, out, context);
        }
    }

    /// Takes the buffer of a part of a range. If there is none for all of its units, it has fewer.
    fn take_target(
        &mut self,
        slot: Slot,
        target: PieceTarget,
        context: &IoContext<'_, NbdCore>,
    ) -> Result<(Buffer, PieceTarget), Pause> {
        match target {
            PieceTarget::Blocks { lba, bytes } => {
                let buffer = self.take_piece(slot, (bytes, self.export.write_unit_bytes), context)?;
                let bytes = buffer.len() as u64;
                Ok((buffer, PieceTarget::Blocks { lba, bytes }))
            }
            PieceTarget::Edge { .. } => {
                let block_size = u64::from(self.export.block_size);
                Ok((self.take_piece(slot, (block_size, block_size), context)?, target))
            }
        }
    }

    /// Submits a part of a write; `buffer` is whole blocks, or a block with the part at its place.
    fn write_piece(
        &mut self,
        slot: Slot,
        target: PieceTarget,
        buffer: Buffer,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let flags = command.fua();
        match target {
            PieceTarget::Blocks { lba, bytes } => {
                command.pending += 1;
                let blocks = (bytes / u64::from(self.export.block_size)) as u32;
                let write = bdev::Request::write(Role::Piece.tag(slot), lba, blocks, buffer);
                self.submit(slot, bdev::Request { flags, ..write }, out, context);
            }
            PieceTarget::Edge { index, lba, within, count } => {
                self.begin_edge(slot, index, Edge::new(lba, within, count, flags, buffer));
            }
        }
    }

    fn issue_zeroes(
        &mut self,
        issuing: &mut Issuing,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), Pause> {
        let slot = issuing.slot;
        let block_size = u64::from(self.export.block_size);
        let native = self.export.can_write_zeroes;
        let bytes_max = if native { ZERO_PIECE_BLOCKS * block_size } else { self.export.write_piece_bytes() };
        while issuing.position < issuing.end {
            let target = issuing.next_target(&self.export, bytes_max);
            match target {
                PieceTarget::Blocks { lba, bytes } if native => {
                    self.admit(slot)?;
                    let Some(command) = self.commands.get_mut(slot) else { return Ok(()) };
                    let mut flags = command.fua();
                    let no_hole = command.flags.contains(CommandFlags::NO_HOLE);
                    flags |= if no_hole { RequestFlags::ALLOCATE } else { RequestFlags::DEALLOCATE };
                    command.pending += 1;
                    let blocks = bytes / block_size;
                    let request = plain(Role::Piece.tag(slot), Op::WriteZeroes, lba, blocks, flags);
                    self.submit(slot, request, out, context);
                }
                _ => {
                    let (mut buffer, target) = self.take_target(slot, target, context)?;
                    buffer.clear();
                    issuing.position += target.length();
                    self.write_piece(slot, target, buffer, out, context);
                    continue;
                }
            }
            issuing.position += target.length();
        }
        Ok(())
    }

    /// Deallocates whole blocks; what is left of others stays, as TRIM is advice.
    fn issue_trim(
        &mut self,
        issuing: &mut Issuing,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), Pause> {
        let slot = issuing.slot;
        let block_size = u64::from(self.export.block_size);
        let end = issuing.end / block_size;
        loop {
            let lba = issuing.position.div_ceil(block_size);
            if lba >= end {
                return Ok(());
            }
            self.admit(slot)?;
            let blocks = (end - lba).min(ZERO_PIECE_BLOCKS);
            let Some(command) = self.commands.get_mut(slot) else { return Ok(()) };
            command.pending += 1;
            let request = plain(Role::Piece.tag(slot), Op::Unmap, lba, blocks, command.fua());
            issuing.position = (lba + blocks) * block_size;
            self.submit(slot, request, out, context);
        }
    }

    fn issue_scan(
        &mut self,
        issuing: &Issuing,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<(), Pause> {
        let data = self.take_for(issuing.slot, Scan::BUFFER_BYTES, context)?;
        let Ok(buffer) = data.into_single() else { unreachable!("the smallest allocation is one buffer") };
        self.begin_scan(issuing.slot, buffer, out, context);
        Ok(())
    }
}
