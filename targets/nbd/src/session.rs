//! The transmission phase: requests of a client become requests to its block device.

mod completion;
mod edge;
mod issue;
mod moving;
mod scan;

use std::collections::VecDeque;
use std::sync::Arc;

use block_io::{Op, RequestFlags, Status, Tag};
use dma::Data;
use slots::{Slab, Slot};
use target_shell::{
    IoContext, MemoryShare, NoMemory, OutgoingPdu, PduData, ReceiveBuffer, SendQueue, TransferReport,
    turn_cost,
};
use wire_nbd::{
    ChunkFlags, ChunkHeader, ChunkKind, CommandFlags, ErrorChunk, HeaderForm, NbdCommand, NbdError,
    RequestHeader, SimpleReply,
};

use crate::connection::NbdCore;
use crate::export::Export;
use crate::failure::NbdViolation;
use crate::handshake::Handshake;
use crate::limits::{COMMANDS_MAX, PAYLOAD_MAX, PIECES_MAX, REPLIES_MAX, SKIPPED_PAYLOAD_MAX};
use crate::status::error_of;

use edge::{Edge, EdgeTurns};
use issue::Issuing;
pub(crate) use moving::DetachedSession;
use scan::Scan;

/// The commands of a connection.
///
/// A request is read when there is a slot for it, and becomes pieces: requests to the device, at most
/// [`PIECES_MAX`] at a time. Only the newest request can have pieces that are not submitted
/// ([`issuing`](Self::issuing)), because the payload of a write is next in the stream. A piece that needs a
/// further request after its completion waits in `retries` until the next [`resume`](Self::resume). A command
/// ends when all of it was submitted and nothing of it is pending. A read's buffer belongs to the device,
/// then to the reply, until it is sent; all buffers together are limited by its share of the core's memory.
pub(crate) struct Session {
    export: Arc<Export>,
    form: HeaderForm,
    structured: bool,
    /// `base:allocation` was selected.
    allocation: bool,
    flow: u16,
    commands: Slab<CommandState>,
    issuing: Option<Issuing>,
    /// Payload of a rejected request that has to be skipped, and the request's reply after it.
    skip: u64,
    rejected: Option<(RequestHeader, NbdError)>,
    retries: VecDeque<(Slot, Retry)>,
    edge_turns: EdgeTurns,
    /// Requests to the device in flight.
    outstanding: u32,
    memory: MemoryShare,
    /// Parts of writes whose payload was or is being received.
    pieces_begun: u64,
    blocked: Blocked,
    /// The core has no buffer for it: retried each millisecond.
    waiting: bool,
    /// A request is read in the next turn, because others have theirs first.
    turn_is_over: bool,
    /// No request is read, as the connection moves to another core.
    paused: bool,
    /// What its requests have cost so far, wrapping: see [`turn_cost`].
    work: u64,
}

/// A command that is not answered.
struct CommandState {
    cookie: u64,
    command: NbdCommand,
    flags: CommandFlags,
    offset: u64,
    length: u64,
    error: Option<NbdError>,
    /// Pieces in flight or in `retries`.
    pending: u32,
    /// All of it was submitted.
    issued: bool,
    /// Of a write that begins or ends within a block; uncommon, so allocated.
    edges: Option<Box<[Option<Edge>; 2]>>,
    scan: Option<Box<Scan>>,
}

/// What a request to the device is for: part of its tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Piece,
    /// The search for data before a read.
    Hole,
    Scan,
    EdgeRead(usize),
    EdgeCompare(usize),
    EdgeWrite(usize),
}

/// A further step of a piece.
#[derive(Clone, Copy)]
enum Retry {
    Read { lba: u64, blocks: u32 },
    Scan,
    Edge(usize),
}

/// Why no request is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blocked {
    No,
    /// There are [`COMMANDS_MAX`] commands.
    Slots,
    /// There are [`REPLIES_MAX`] replies.
    Replies,
    /// With these bytes it would have more memory than it may.
    Memory(usize),
    /// The newest command has [`PIECES_MAX`] pieces in flight.
    Pieces(Slot),
}

impl Role {
    const ALL: [Role; 9] = [
        Role::Piece,
        Role::Hole,
        Role::Scan,
        Role::EdgeRead(0),
        Role::EdgeRead(1),
        Role::EdgeCompare(0),
        Role::EdgeCompare(1),
        Role::EdgeWrite(0),
        Role::EdgeWrite(1),
    ];

    /// A tag of a slot: its index, the role, and 16 bits of the generation.
    fn tag(self, slot: Slot) -> Tag {
        let role = Role::ALL.iter().position(|role| *role == self).unwrap_or(0) as u64;
        Tag(u64::from(slot.index()) | role << 8 | (slot.to_bits() >> 32 & 0xffff) << 16)
    }
}

const _: () = assert!(COMMANDS_MAX <= 1 << 8);

impl Session {
    pub(crate) fn new(export: Arc<Export>, handshake: &Handshake, flow: u16, memory: MemoryShare) -> Session {
        Session::attach(DetachedSession::new(export, handshake, flow), memory)
    }

    pub(crate) fn export_id(&self) -> u64 {
        self.export.id
    }

    /// Whether nothing is received until [`resume`](Self::resume).
    #[inline]
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked != Blocked::No || self.waiting || (self.paused && self.is_between_requests())
    }

    #[inline]
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// Whether the next request was not read because others have their turn first.
    #[inline]
    pub(crate) fn turn_is_over(&self) -> bool {
        self.turn_is_over
    }

    /// Whether a request that was read has payload that did not arrive yet.
    pub(crate) fn needs_payload(&self) -> bool {
        self.skip > 0 || self.issuing.as_ref().is_some_and(Issuing::needs_payload)
    }

    /// Whether [`resume`](Self::resume) makes progress.
    #[inline]
    pub(crate) fn wants_resume(&self, replies: usize, draining: bool) -> bool {
        if self.waiting {
            return false;
        }
        let unblocked = match self.blocked {
            Blocked::No => false,
            Blocked::Slots => !self.commands.is_full(),
            Blocked::Replies => replies < REPLIES_MAX,
            Blocked::Memory(bytes) => self.memory.fits(bytes),
            Blocked::Pieces(slot) => {
                self.commands.get(slot).is_none_or(|command| command.pending < PIECES_MAX)
            }
        };
        !self.retries.is_empty() || (unblocked && !draining)
    }

    /// Nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.retries.is_empty() && !self.edge_turns.are_waiting()
    }

    /// Drops what was not submitted: the connection drains.
    pub(crate) fn abandon(&mut self) {
        self.issuing = None;
        self.blocked = Blocked::No;
    }

    pub(crate) fn buffers_freed(&mut self, bytes: usize) {
        self.memory.remove(bytes);
    }

    /// Its share of the core's memory.
    pub(crate) fn memory(&mut self) -> &mut MemoryShare {
        &mut self.memory
    }

    /// Reports the payload that is being received.
    pub(crate) fn transfers(&self, report: &mut TransferReport) {
        if let Some(issuing) = &self.issuing {
            issuing.transfers(report);
        }
    }

    /// Where payload is received directly.
    #[inline]
    pub(crate) fn payload_mut(&mut self) -> Option<&mut [u8]> {
        self.issuing.as_mut().and_then(Issuing::payload_mut)
    }

    #[inline]
    pub(crate) fn payload_received(&mut self, bytes: usize) {
        if let Some(issuing) = &mut self.issuing {
            issuing.payload_received(bytes);
        }
    }

    /// Continues what was deferred.
    pub(crate) fn resume(&mut self, out: &mut SendQueue, context: &mut IoContext<'_, NbdCore>) {
        (self.blocked, self.waiting) = (Blocked::No, false);
        for _ in 0..self.retries.len() {
            let Some((slot, retry)) = self.retries.pop_front() else { return };
            let continued = match retry {
                Retry::Read { lba, blocks } => self.read_again(slot, lba, blocks, out, context),
                Retry::Scan => self.scan_again(slot, out, context),
                Retry::Edge(index) => self.edge_again(slot, index, out, context),
            };
            if continued.is_err() {
                self.retries.push_front((slot, retry));
                self.waiting = true;
                return;
            }
        }
    }

    /// Handles requests and payload. Returns whether the client ends the session.
    pub(crate) fn advance(
        &mut self,
        inbound: &mut ReceiveBuffer,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> Result<bool, NbdViolation> {
        self.turn_is_over = false;
        loop {
            if self.skip > 0 {
                let skipped = (inbound.filled().len() as u64).min(self.skip);
                inbound.consume(skipped as usize);
                self.skip -= skipped;
                if self.skip > 0 {
                    return Ok(false);
                }
            }
            if let Some((header, error)) = self.rejected.take() {
                self.reply(
                    header.cookie,
                    header.offset,
                    NbdCommand::from_number(header.command),
                    Some(error),
                    out,
                );
            }
            if self.issuing.is_some() && !self.issue(inbound, out, context) {
                return Ok(false);
            }
            if self.paused || inbound.filled().len() < self.form.request_size() {
                return Ok(false);
            }
            if self.commands.is_full() {
                self.blocked = Blocked::Slots;
                return Ok(false);
            }
            if out.len() >= REPLIES_MAX {
                self.blocked = Blocked::Replies;
                return Ok(false);
            }
            if context.turn_commands() == 0 {
                self.turn_is_over = true;
                return Ok(false);
            }
            let header = RequestHeader::decode(self.form, inbound.filled())?;
            inbound.consume(self.form.request_size());
            let bytes = data_bytes(&header);
            context.count_command(bytes);
            self.work = self.work.wrapping_add(turn_cost(bytes).into());
            if self.start(header, out)? {
                return Ok(true);
            }
        }
    }

    /// Begins a command, or rejects it. Returns whether the client ends the session.
    fn start(&mut self, header: RequestHeader, out: &mut SendQueue) -> Result<bool, NbdViolation> {
        let command = NbdCommand::from_number(header.command);
        if command == Some(NbdCommand::Disc) {
            return Ok(true);
        }
        let payload = self.payload_of(&header, command);
        if let Err(error) = self.check(&header, command) {
            if payload > SKIPPED_PAYLOAD_MAX {
                return Err(NbdViolation::PayloadLength(payload));
            }
            self.skip = payload;
            self.rejected = Some((header, error));
            return Ok(false);
        }
        let Some(command) = command else { return Ok(false) };
        let RequestHeader { flags, cookie, offset, length, .. } = header;
        // What is accepted and needs no device.
        let nothing = match command {
            NbdCommand::Flush => !self.export.can_flush,
            NbdCommand::Cache => true,
            _ => length == 0,
        };
        if nothing {
            self.reply(cookie, offset, Some(command), None, out);
            return Ok(false);
        }
        let state = CommandState {
            cookie,
            command,
            flags,
            offset,
            length,
            error: None,
            pending: 0,
            issued: false,
            edges: None,
            scan: None,
        };
        if let Ok(slot) = self.commands.insert(state) {
            // A flush has no range, whatever its fields say; those of other commands were checked.
            self.issuing = Some(Issuing::new(slot, command, offset, offset.saturating_add(length)));
        }
        Ok(false)
    }

    /// Bytes that follow the header. A write has them even without the flag: QEMU 10 negotiates extended
    /// headers and does not set it.
    fn payload_of(&self, header: &RequestHeader, command: Option<NbdCommand>) -> u64 {
        let flagged = self.form == HeaderForm::Extended && header.flags.contains(CommandFlags::PAYLOAD_LEN);
        if flagged || command == Some(NbdCommand::Write) { header.length } else { 0 }
    }

    /// Rejects what is invalid before anything is done.
    fn check(&self, header: &RequestHeader, command: Option<NbdCommand>) -> Result<(), NbdError> {
        let export = &*self.export;
        let command = command.ok_or(NbdError::Inval)?;
        let allowed = match command {
            NbdCommand::Read if self.structured => CommandFlags::DF,
            NbdCommand::Write if self.form == HeaderForm::Extended => CommandFlags::PAYLOAD_LEN,
            NbdCommand::WriteZeroes => CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
            NbdCommand::BlockStatus => CommandFlags::REQ_ONE,
            _ => CommandFlags::empty(),
        } | CommandFlags::FUA;
        if !allowed.contains(header.flags) {
            return Err(NbdError::Inval);
        }
        let writes = matches!(command, NbdCommand::Write | NbdCommand::Trim | NbdCommand::WriteZeroes);
        if writes && export.read_only {
            return Err(NbdError::Perm);
        }
        if command == NbdCommand::Flush {
            return Ok(());
        }
        let RequestHeader { offset, length, .. } = *header;
        if offset.checked_add(length).is_none_or(|end| end > export.size) {
            let beyond = matches!(command, NbdCommand::Write | NbdCommand::WriteZeroes);
            return Err(if beyond { NbdError::NoSpc } else { NbdError::Inval });
        }
        let has_data = matches!(command, NbdCommand::Read | NbdCommand::Write);
        match command {
            NbdCommand::Read if length > PAYLOAD_MAX && header.flags.contains(CommandFlags::DF) => {
                Err(NbdError::Overflow)
            }
            _ if has_data && length > PAYLOAD_MAX => Err(NbdError::Inval),
            NbdCommand::Write | NbdCommand::WriteZeroes if !export.can_write(offset, length) => {
                Err(NbdError::Inval)
            }
            NbdCommand::Trim if !export.can_unmap => Err(NbdError::Inval),
            NbdCommand::WriteZeroes
                if header.flags.contains(CommandFlags::FAST_ZERO) && !export.can_write_zeroes =>
            {
                Err(NbdError::NotSup)
            }
            NbdCommand::BlockStatus if !self.allocation || length == 0 => Err(NbdError::Inval),
            _ => Ok(()),
        }
    }

    /// Queues the reply of a command, or its last chunk.
    fn reply(
        &self,
        cookie: u64,
        offset: u64,
        command: Option<NbdCommand>,
        error: Option<NbdError>,
        out: &mut SendQueue,
    ) {
        let chunks = self.form == HeaderForm::Extended
            || (self.structured && matches!(command, Some(NbdCommand::Read | NbdCommand::BlockStatus)));
        if !chunks {
            let error = error.map_or(0, NbdError::value);
            return out.push(OutgoingPdu::new(|head| SimpleReply { error, cookie }.encode(head)));
        }
        let (kind, length) = match error {
            None => (ChunkKind::None, 0),
            Some(_) => (ChunkKind::Error, ErrorChunk::SIZE as u64),
        };
        let chunk = ChunkHeader { flags: ChunkFlags::DONE, kind, cookie, offset, length };
        out.push(OutgoingPdu::new(|head| {
            let size = chunk.encode(self.form, head);
            size + error.map_or(0, |error| ErrorChunk { error: error.value() }.encode(&mut head[size..]))
        }));
    }

    /// Takes buffers of `bytes` together.
    fn take(&mut self, bytes: usize, context: &IoContext<'_, NbdCore>) -> Result<Data, NoMemory> {
        let mut data = self.memory.take(bytes, context.pool)?;
        // The shell does this for a single buffer only.
        if self.export.reads_undefined && data.single().is_none() {
            data.clear();
        }
        Ok(data)
    }

    /// Submits a request of a command. If the device is gone the command fails, and what is pending ends.
    #[inline]
    fn submit(
        &mut self,
        slot: Slot,
        mut request: bdev::Request,
        out: &mut SendQueue,
        context: &mut IoContext<'_, NbdCore>,
    ) -> bool {
        request.flow = self.flow;
        let held = request.data().map_or(0, Data::len);
        match context.submit(self.export.key, request) {
            Ok(()) => {
                self.outstanding += 1;
                true
            }
            Err(status) => {
                self.memory.remove(held);
                if let Some(command) = self.commands.get_mut(slot) {
                    command.fail(error_of(status));
                }
                self.end_piece(slot, out);
                false
            }
        }
    }

    /// Counts a piece that is about to be submitted.
    fn begin_piece(&mut self, slot: Slot) {
        if let Some(command) = self.commands.get_mut(slot) {
            command.pending += 1;
        }
    }
}

impl CommandState {
    /// Keeps the first error.
    fn fail(&mut self, error: NbdError) {
        self.error.get_or_insert(error);
    }

    fn fua(&self) -> RequestFlags {
        if self.flags.contains(CommandFlags::FUA) { RequestFlags::FUA } else { RequestFlags::NONE }
    }
}

/// Bytes that a request transfers.
#[inline]
fn data_bytes(header: &RequestHeader) -> u64 {
    match NbdCommand::from_number(header.command) {
        Some(NbdCommand::Read | NbdCommand::Write) => header.length,
        _ => 0,
    }
}

/// A request of an operation without payload.
fn plain(tag: Tag, op: Op, lba: u64, blocks: u64, flags: RequestFlags) -> bdev::Request {
    bdev::Request { flags, ..bdev::Request::new(tag, op, lba, blocks as u32) }
}

/// The status of what the target itself gives up.
fn gave_up() -> NbdError {
    error_of(Status::INTERNAL_ERROR)
}
