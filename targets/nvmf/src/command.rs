//! Commands in flight on one queue, and the data buffers that they own.

use block_io::Status;
use dma::Buffer;
use nvme_controller::io::{CopyOperation, IoPlan};
use nvme_tcp::SegmentSource;
use slots::{Slab, Slot};
use wire_nvme::Sqe;

use crate::fused::FusedHalf;

/// A command in flight, from its capsule to its response.
pub(crate) struct NvmfCommand {
    pub(crate) cid: u16,
    pub(crate) state: CommandState,
    /// The data buffer: receives a write's data, holds a read's data while it is sent.
    pub(crate) data: CommandData,
    /// Transfer length in bytes.
    pub(crate) length: u32,
    /// Bytes requested by R2T, and bytes of them received.
    pub(crate) requested_bytes: u32,
    pub(crate) received_bytes: u32,
    /// A data digest (DDGST) did not match.
    pub(crate) data_digest_error: bool,
    /// Bytes of buffer charged to the command, even while a device owns the buffer.
    buffer_bytes: u32,
}

impl NvmfCommand {
    pub(crate) fn new(cid: u16, work: CommandState, data: CommandData, length: u32) -> NvmfCommand {
        NvmfCommand {
            cid,
            state: work,
            data,
            length,
            requested_bytes: 0,
            received_bytes: 0,
            data_digest_error: false,
            buffer_bytes: 0,
        }
    }
}

/// What a command waits for, or what happens next.
pub(crate) enum CommandState {
    /// A device reads into a buffer, which is then sent to the host.
    Read,
    /// Waits for a buffer, the host's data, or both; then the plan is executed.
    Planned(IoPlan),
    /// Its namespace was removed before submission: fails once its data has been received.
    Rejected,
    /// One command of a fused operation: waits for its data, the other command, or buffers.
    Fused(Box<FusedHalf>),
    /// `remaining` device requests are outstanding. The command completes with the first error among them.
    Submitted { remaining: u16, status: Status },
    /// A Copy in progress: the current piece is read next, or written next if `has_read`, or is at a device.
    CopyInProgress { copying: Box<CopyOperation>, has_read: bool },
    /// An admin command or a Connect: executed when all its data has been received.
    AdminOrConnect(Box<Sqe>),
    /// The controller processes it, and completes it later if it is an Asynchronous Event Request.
    AtController,
    /// A reservation command that waits for drains or a file write; see
    /// [`crate::connection::ConnectionState::pending_reservations`].
    ReservationPending,
    /// The response is queued; its data is being sent.
    SendingData,
}

/// Data of a command, and who allocated it.
pub(crate) enum CommandData {
    None,
    /// A pool buffer, for device I/O.
    Buffer(Buffer),
    /// Heap memory, for admin commands and for data received while no buffer was available.
    Bytes(Vec<u8>),
}

impl CommandData {
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            CommandData::None => &[],
            CommandData::Buffer(buffer) => buffer.as_slice(),
            CommandData::Bytes(bytes) => bytes,
        }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            CommandData::None => &mut [],
            CommandData::Buffer(buffer) => buffer.as_mut_slice(),
            CommandData::Bytes(bytes) => bytes,
        }
    }
}

impl CommandData {
    /// Shortens the data to `length` bytes.
    pub(crate) fn truncate(&mut self, length: usize) {
        match self {
            CommandData::Buffer(buffer) if buffer.len() > length && length > 0 => buffer.resize(length),
            CommandData::Bytes(bytes) => bytes.truncate(length),
            _ => {}
        }
    }
}

/// The commands in flight on one queue: a slab with one slot per queue entry.
pub(crate) struct CommandTable {
    slab: Slab<NvmfCommand>,
    /// Bytes of buffers that all commands hold. Bounded, so that one connection cannot exhaust the pool.
    pub(crate) buffer_bytes: usize,
}

impl CommandTable {
    pub(crate) fn new(depth: u32) -> CommandTable {
        CommandTable { slab: Slab::with_capacity(depth), buffer_bytes: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.slab.is_full()
    }

    pub(crate) fn insert(&mut self, command: NvmfCommand) -> Slot {
        match self.slab.insert(command) {
            Ok(slot) => slot,
            Err(_) => panic!("a command was accepted without a free slot"),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut NvmfCommand> {
        self.slab.get_mut(slot)
    }

    /// The command with this transfer tag (TTAG), which is the slot's index.
    pub(crate) fn by_index(&mut self, index: u32) -> Option<(Slot, &mut NvmfCommand)> {
        let slot = self.slab.slot_at(index)?;
        Some((slot, self.slab.get_mut(slot)?))
    }

    /// The command with this CID that is pending at the controller.
    pub(crate) fn by_cid(&self, cid: u16) -> Option<Slot> {
        let is_pending =
            |command: &NvmfCommand| command.cid == cid && matches!(command.state, CommandState::AtController);
        self.slab.iter().find(|(_, command)| is_pending(command)).map(|(slot, _)| slot)
    }

    /// Rejects commands that are not yet submitted and whose plan is stale after a configuration change.
    pub(crate) fn reject_stale(&mut self, is_current: impl Fn(&IoPlan) -> bool) {
        for (_, command) in self.slab.iter_mut() {
            match &mut command.state {
                CommandState::Planned(plan) if !is_current(plan) => command.state = CommandState::Rejected,
                CommandState::Fused(half) if !is_current(&half.plan) => {
                    half.abort_status = Some(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
                }
                _ => {}
            }
        }
    }

    /// Whether commands are pending that complete without further PDUs from the host. H2CData that was
    /// requested by R2T still counts, unless `stream_blocked`: then it cannot arrive.
    pub(crate) fn has_pending(&self, stream_blocked: bool) -> bool {
        self.slab.iter().any(|(_, command)| {
            let waits_for_data = stream_blocked && command.received_bytes < command.requested_bytes;
            let lacks_partner = matches!(&command.state, CommandState::Fused(half) if half.partner.is_none());
            !matches!(command.state, CommandState::AtController) && !lacks_partner && !waits_for_data
        })
    }

    /// Removes a command and frees its buffer.
    #[inline]
    pub(crate) fn remove(&mut self, slot: Slot) {
        if let Some(command) = self.slab.remove(slot) {
            self.buffer_bytes -= command.buffer_bytes as usize;
        }
    }

    /// Charges a buffer to a command.
    #[inline]
    pub(crate) fn account_buffer(&mut self, slot: Slot, bytes: u32) {
        if let Some(command) = self.slab.get_mut(slot) {
            command.buffer_bytes += bytes;
            self.buffer_bytes += bytes as usize;
        }
    }

    /// Moves a command's data out, for a device request.
    #[inline]
    pub(crate) fn take_data(&mut self, slot: Slot) -> CommandData {
        self.slab
            .get_mut(slot)
            .map_or(CommandData::None, |command| std::mem::replace(&mut command.data, CommandData::None))
    }
}

impl SegmentSource for CommandTable {
    #[inline]
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        let command = self.slab.slot_at(slot).and_then(|slot| self.slab.get(slot));
        &command.expect("a command stays until its data is sent").data.as_slice()[start..start + length]
    }

    #[inline]
    fn sent(&mut self, slot: u32) {
        if let Some(slot) = self.slab.slot_at(slot) {
            self.remove(slot);
        }
    }
}

/// The buffer of a completed request, which was submitted with one or none.
#[inline]
pub(crate) fn into_buffer(completion: bdev::Completion) -> Option<Buffer> {
    completion.into_request().take_data().and_then(|data| data.into_single().ok())
}
