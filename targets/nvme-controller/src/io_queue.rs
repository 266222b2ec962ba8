//! The commands of one queue, from the submission queue entry to the answer (sans-IO).
//!
//! [`IoQueue`] plans commands, waits for data and buffers, submits device requests, pairs fused commands and
//! advances copies. Its transport moves bytes and posts completions: [`HostLink`] answers the host, and
//! [`IoTransport`] also reaches the host's data, the core's buffers and the block devices. Calls to both are
//! resolved at compile time, so that a transport whose devices access the host's memory in place pays for
//! nothing else.
//!
//! ```text
//! command ──► plan ──► locate ──► Lent ────────────────► submit ──► complete ──► HostLink::complete
//!                             └─► Moved ─► buffer ─► receive ─► submit ──► complete ──► HostLink::send
//!                                          (deferred if there is none)
//! ```

mod command;
mod execute;
mod fused;
#[cfg(any(test, fuzzing))]
pub mod harness;
mod moving;
#[cfg(test)]
mod tests;

pub use command::{CommandData, CommandToken, SharedPart};
pub use moving::DetachedQueue;

use std::collections::VecDeque;
use std::rc::Rc;

use block_io::{Completion, Request, Status, Tag};
use dma::{Buffer, Data};
use slots::{Slab, Slot};
use target_shell::{MemoryShare, TransferReport};
use wire_nvme::{Sqe, sqe};

use command::{Command, CommandState};
use execute::Execution;

use crate::io::{FusedPairing, IoPlan, NamespaceTable};
use crate::reservation::PendingCommands;

/// How a queue answers its host.
pub trait HostLink {
    /// Where the host has the data of a command, if it has to be moved; the default is that of a command
    /// without data.
    type Location: Default;

    /// Answers a command that has no data for the host, or failed.
    fn complete(&mut self, token: CommandToken, status: Status, result: u64);

    /// Sends the first `length` bytes of `data` and answers the command. The data stays in `slot` until
    /// [`IoQueue::sent`] if [`Transferred::Later`].
    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &Self::Location,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred;
}

/// What a queue needs to execute commands.
pub trait IoTransport: HostLink {
    /// Most data is [lent](HostData::Lent), and the code that moves data is kept out of its way.
    const LENDS: bool = false;

    /// Lends the data of a Read or Write of `bytes` bytes, if its data pointer alone says that it is one
    /// range of memory, and that begins at a multiple of `alignment`: asked before [`locate`](Self::locate).
    /// By default it lends none.
    #[inline(always)]
    fn lend_range(&mut self, sqe: &Sqe, bytes: u32, to_host: bool, alignment: u32) -> Option<Buffer> {
        let _ = (sqe, bytes, to_host, alignment);
        None
    }

    /// Finds the data of a command at the host.
    ///
    /// # Errors
    /// The status to complete the command with: its data pointer is invalid.
    fn locate(&mut self, sqe: &Sqe, transfer: HostTransfer) -> Result<HostData<Self::Location>, Status>;

    /// Starts to receive the host's data into the memory of a command, which [`IoQueue::data_mut`] also
    /// returns. After [`Transferred::Later`] the transport calls [`IoQueue::data_received`].
    ///
    /// # Errors
    /// The status to complete the command with.
    fn receive(
        &mut self,
        slot: Slot,
        cid: u16,
        location: &mut Self::Location,
        into: &mut CommandData,
    ) -> Result<Transferred, Status>;

    /// Where the answer of an admin command without host data goes, should it have data. By default the
    /// transport needs no place: as over TCP, where data follows the command's identifier.
    fn answer_location(&mut self, sqe: &Sqe) -> Self::Location {
        let _ = sqe;
        Self::Location::default()
    }

    /// Memory of the core's pool, in one slice if there is one ([`Pool::take_data`](dma::Pool::take_data));
    /// `None` if there is too little at present.
    fn take_data(&mut self, bytes: usize) -> Option<Data>;

    /// Adds a request to the batch of a block device, by its key. Bits 32:0 of the tag are the queue's.
    ///
    /// # Errors
    /// The device was removed.
    fn submit(&mut self, backend: u32, request: Request<Data>) -> Result<(), Status>;

    /// The host sent Disconnect, which has been answered. Memory-based transports have no such command.
    fn disconnect(&mut self) {}
}

/// The transfer of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTransfer {
    /// Length in bytes, 1 at least.
    pub bytes: u32,
    /// To the host or from it.
    pub to_host: bool,
    /// A device may access the host's memory in place, with this alignment in bytes.
    pub lend_alignment: Option<u32>,
}

/// The data of a command, as found at the host.
#[derive(Debug)]
pub enum HostData<L> {
    /// Memory of the host that a device accesses in place, in one slice or several.
    Lent(Data),
    /// The transport moves it.
    Moved {
        /// For [`IoTransport::receive`] and [`HostLink::send`].
        location: L,
        /// Bytes of memory to receive it into: the transfer's, or more if it arrives with other bytes.
        room: u32,
        /// It follows the command in a stream and cannot wait for a buffer.
        immediate: bool,
    },
}

/// Whether data was moved at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transferred {
    /// It was.
    Now,
    /// The transport reports later that it was.
    Later,
}

/// An admin or Connect command whose data has been received, for the queue's owner to execute.
#[derive(Debug)]
#[must_use = "the owner executes the command"]
pub struct AdminCommand {
    /// For [`IoQueue::answer`] and [`IoQueue::answer_with_data`].
    pub slot: Slot,
    /// The command.
    pub sqe: Box<Sqe>,
    /// The host's data.
    pub data: Vec<u8>,
}

/// Bit of a request's tag that holds a command identifier instead of a slot.
const DIRECT: u64 = 1 << 32;

/// The commands in flight on one queue, and what they wait for. `L` is the transport's
/// [`HostLink::Location`].
///
/// It owns a slot for each command that moves data or has more than one step, with its token and its buffer.
/// A read or write of memory that the host lends needs no slot: the request's tag holds its command
/// identifier. Nothing is allocated for a read or write unless no buffer is available.
///
/// Order of calls: [`entry`](Self::entry) or [`command`](Self::command) for each command while
/// [`free_slots`](Self::free_slots) is not 0; [`data_received`](Self::data_received) when data has arrived;
/// [`complete`](Self::complete) for each completed request; [`retry`](Self::retry) while
/// [`is_waiting`](Self::is_waiting) or [`has_ready`](Self::has_ready). A queue that is deleted answers with
/// [`abort_pending`](Self::abort_pending); one whose host is gone is dropped when
/// [`device_requests`](Self::device_requests) is 0. A command that waits for a buffer never blocks those
/// behind it, because their data may be what frees a buffer.
#[derive(Debug)]
pub struct IoQueue<L> {
    namespaces: Rc<NamespaceTable>,
    commands: Slab<Command<L>>,
    /// Device requests in flight.
    device_requests: u32,
    /// What all commands hold of the pool's buffers, and how much they may. One command always fits.
    memory: MemoryShare,
    /// Commands deferred until a buffer is available, oldest first.
    deferred: VecDeque<Slot>,
    /// The first command of a fused operation, while its second is expected.
    pairing: FusedPairing<Slot>,
    /// Copy commands whose next range can start.
    ready_copies: Vec<Slot>,
    /// Reservation commands that complete when their drains and file writes are done.
    pending_reservations: PendingCommands<Slot>,
    /// No memory is taken for commands, so that the queue can move.
    paused: bool,
    /// Set by [`abort_pending`](Self::abort_pending): the status of commands that would need another device
    /// request.
    aborted: Option<Status>,
}

impl<L: Default> IoQueue<L> {
    /// A queue with a slot for each of `slots` commands, whose buffers count in `memory`.
    pub fn new(slots: u32, memory: MemoryShare, namespaces: Rc<NamespaceTable>) -> IoQueue<L> {
        IoQueue {
            namespaces,
            commands: Slab::with_capacity(slots),
            device_requests: 0,
            memory,
            deferred: VecDeque::new(),
            pairing: FusedPairing::None,
            ready_copies: Vec::new(),
            pending_reservations: PendingCommands::default(),
            paused: false,
            aborted: None,
        }
    }

    /// Whether no command is in flight.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.commands.is_empty()
    }

    /// Its share of the core's memory.
    pub fn memory(&mut self) -> &mut MemoryShare {
        &mut self.memory
    }

    /// Reports the commands that hold memory until the host has acted: those whose data is being sent, and
    /// those whose data is missing, for which `arrived` says how much has arrived. For checks now and then:
    /// it visits every command.
    pub fn transfers(&self, arrived: impl Fn(Slot, &L) -> Option<usize>, report: &mut TransferReport) {
        for (slot, command) in self.commands.iter() {
            let moved = match command.state {
                CommandState::Sending => Some(0),
                _ => arrived(slot, &command.location),
            };
            if let Some(moved) = moved {
                // Data that is being sent is counted for its command; without a buffer of the pool it is on
                // the heap.
                let bytes = (command.buffer_bytes as usize).max(command.data.len());
                report.waits_for_peer(slot.to_bits() & u64::MAX >> 1, bytes, moved);
            }
        }
    }

    /// Bytes on the heap of commands that are answered, but for their data, which the host has not taken yet.
    /// It visits every command.
    pub fn unsent_bytes(&self) -> usize {
        let bytes = |(_, command): (Slot, &Command<L>)| match (&command.state, &command.data) {
            (CommandState::Sending, CommandData::Bytes(bytes)) => bytes.len(),
            _ => 0,
        };
        self.commands.iter().map(bytes).sum()
    }

    /// Number of commands that were accepted and have not completed.
    pub fn in_flight(&self) -> usize {
        self.commands.len()
    }

    /// Number of commands that can be accepted.
    #[inline]
    pub fn free_slots(&self) -> usize {
        self.commands.capacity() - self.commands.len()
    }

    /// Device requests in flight.
    #[inline]
    pub fn device_requests(&self) -> u32 {
        self.device_requests
    }

    /// Whether commands are deferred: no event reports the buffer that they wait for.
    #[inline]
    pub fn is_waiting(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Whether a command can continue at once by [`retry`](Self::retry).
    #[inline]
    pub fn has_ready(&self) -> bool {
        !self.ready_copies.is_empty()
    }

    /// Whether commands are pending that complete without another command of the host. `waits_for_host` says
    /// whether the host has not sent data that it was asked for, and will not.
    pub fn has_pending(&self, waits_for_host: impl Fn(&L) -> bool) -> bool {
        self.device_requests > 0
            || self.commands.iter().any(|(_, command)| {
                let lacks_partner =
                    matches!(&command.state, CommandState::Fused(half) if half.partner.is_none());
                let is_at_owner = matches!(command.state, CommandState::AtOwner);
                !is_at_owner && !lacks_partner && !waits_for_host(&command.location)
            })
    }

    /// Replaces the table of namespaces. Commands that are not submitted yet and whose namespace has another
    /// block device now, or none, are rejected.
    pub fn set_namespaces(&mut self, namespaces: Rc<NamespaceTable>) {
        let old = std::mem::replace(&mut self.namespaces, namespaces);
        let is_stale = |plan: &IoPlan| old.backend(plan) != self.namespaces.backend(plan);
        for (_, command) in self.commands.iter_mut() {
            match &mut command.state {
                CommandState::Planned(plan) if is_stale(plan) => command.state = CommandState::Rejected,
                CommandState::Fused(half) if is_stale(&half.plan) => {
                    half.abort_status = Some(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
                }
                _ => {}
            }
        }
    }

    /// Accepts commands to a namespace that has replaced another one, if the host has identified it since;
    /// returns whether it has.
    fn open_identified(&mut self, nsid: u32) -> bool {
        let is_identified = self.namespaces.is_identified(nsid);
        if is_identified {
            Rc::make_mut(&mut self.namespaces).open_replaced(nsid);
        }
        is_identified
    }

    /// Executes the I/O command of a submission queue entry, or as much of it as is possible at present.
    #[inline(always)]
    pub fn entry<T: IoTransport<Location = L>>(&mut self, entry: &[u8; sqe::SIZE], transport: &mut T) {
        Execution { queue: self, transport }.entry(entry);
    }

    /// As [`entry`](Self::entry), of a command that a message has brought.
    #[inline(always)]
    pub fn command<T: IoTransport<Location = L>>(
        &mut self,
        token: CommandToken,
        sqe: &Sqe,
        transport: &mut T,
    ) {
        Execution { queue: self, transport }.command(token, sqe);
    }

    /// Accepts an admin or Connect command with `bytes` bytes of host data. Returns it when its data has been
    /// received, here or by [`data_received`](Self::data_received).
    pub fn admin_command<T: IoTransport<Location = L>>(
        &mut self,
        token: CommandToken,
        sqe: &Sqe,
        bytes: u32,
        transport: &mut T,
    ) -> Option<AdminCommand> {
        Execution { queue: self, transport }.admin_command(token, sqe, bytes)
    }

    /// The location of a command's data and the memory that receives it, by the index of its slot.
    #[inline]
    pub fn receiving(&mut self, index: u32) -> Option<(Slot, u16, &mut L)> {
        let slot = self.commands.slot_at(index)?;
        let command = self.commands.get_mut(slot)?;
        Some((slot, command.token.as_ref()?.cid(), &mut command.location))
    }

    /// The memory that receives a command's data; `None` if there is no such command.
    #[inline]
    pub fn data_mut(&mut self, slot: Slot) -> Option<&mut CommandData> {
        self.commands.get_mut(slot).map(|command| &mut command.data)
    }

    /// All data of a command has been received, from byte `offset` of its memory, or could not be: then the
    /// command fails with the status. Returns an admin command that can be executed now.
    #[inline]
    pub fn data_received<T: IoTransport<Location = L>>(
        &mut self,
        slot: Slot,
        received: Result<usize, Status>,
        transport: &mut T,
    ) -> Option<AdminCommand> {
        Execution { queue: self, transport }.data_received(slot, received)
    }

    /// Continues copies and deferred commands, oldest first, until one is deferred again.
    pub fn retry<T: IoTransport<Location = L>>(&mut self, transport: &mut T) {
        Execution { queue: self, transport }.retry();
    }

    /// Handles the completion of a device request. `tag` is the one that it was submitted with.
    #[inline]
    pub fn complete<T: HostLink<Location = L>>(
        &mut self,
        tag: Tag,
        completion: Completion<Data>,
        link: &mut T,
    ) {
        self.device_requests -= 1;
        let status = completion.status();
        if let Some(token) = Self::direct_token(tag) {
            return link.complete(token, status, 0);
        }
        // Stale only if the command was aborted; its buffer returns to the pool.
        let Some(slot) = self.slot_of(tag) else { return };
        let Some(command) = self.commands.get_mut(slot) else { return };
        match &mut command.state {
            CommandState::Reading => match completion.into_data() {
                Some(data) if status.is_success() => self.send(slot, CommandData::Pool(data), 0, link),
                _ => self.finish(slot, status, 0, link),
            },
            CommandState::Submitted { remaining, status: first_error } => {
                if first_error.is_success() {
                    *first_error = status;
                }
                *remaining -= 1;
                let (remaining, first_error) = (*remaining, *first_error);
                if remaining == 0 {
                    self.finish(slot, first_error, 0, link);
                }
            }
            CommandState::Copying(copying) if status.is_success() => {
                copying.complete_range();
                match self.aborted {
                    Some(status) => self.finish(slot, status, 0, link),
                    None => self.ready_copies.push(slot),
                }
            }
            CommandState::Copying(copying) => {
                let range = copying.index().into();
                self.finish(slot, status, range, link);
            }
            _ => self.finish(slot, status, 0, link),
        }
    }

    /// Accounts for completed requests of lent memory, which the transport answers itself: see
    /// [`direct_token`](Self::direct_token).
    #[inline]
    pub fn complete_direct(&mut self, count: u32) {
        self.device_requests -= count;
    }

    /// The token of a completed request of lent memory; `None` if the request belongs to a slot. Each such
    /// completion is either answered with its token, and counted by
    /// [`complete_direct`](Self::complete_direct), or passed to [`complete`](Self::complete).
    #[inline(always)]
    pub fn direct_token(tag: Tag) -> Option<CommandToken> {
        (tag.0 & DIRECT != 0).then(|| CommandToken::new(tag.0 as u16))
    }

    /// Completes reservation commands that no longer wait for anything.
    pub fn complete_reservations<T: HostLink<Location = L>>(&mut self, link: &mut T) {
        while let Some((slot, status)) = self.pending_reservations.pop_completed() {
            self.finish(slot, status, 0, link);
        }
    }

    /// Answers every command that is not at a block device with `status`. Those that are complete as usual,
    /// but make no further request.
    pub fn abort_pending<T: HostLink<Location = L>>(&mut self, status: Status, link: &mut T) {
        self.aborted = Some(status);
        self.deferred.clear();
        self.pairing = FusedPairing::None;
        self.pending_reservations.drain().for_each(drop);
        let ready = std::mem::take(&mut self.ready_copies);
        let is_pending = |(slot, command): (Slot, &Command<L>)| {
            let is_pending = match command.state {
                CommandState::Planned(_) | CommandState::Rejected | CommandState::Fused(_) => true,
                CommandState::ReservationPending => true,
                CommandState::Copying(_) => ready.contains(&slot),
                _ => false,
            };
            is_pending.then_some(slot)
        };
        let pending: Vec<Slot> = self.commands.iter().filter_map(is_pending).collect();
        for slot in pending {
            self.finish(slot, status, 0, link);
        }
    }

    /// The slot of the command with this identifier that its owner executes.
    pub fn at_owner(&self, cid: u16) -> Option<Slot> {
        let is_at_owner = |command: &Command<L>| {
            matches!(command.state, CommandState::AtOwner)
                && command.token.as_ref().is_some_and(|token| token.cid() == cid)
        };
        self.commands.iter().find(|(_, command)| is_at_owner(command)).map(|(slot, _)| slot)
    }

    /// Answers a command without data for the host.
    pub fn answer<T: HostLink<Location = L>>(
        &mut self,
        slot: Slot,
        status: Status,
        result: u64,
        link: &mut T,
    ) {
        self.finish(slot, status, result, link);
    }

    /// Answers a command with data, as much as the host asked for.
    pub fn answer_with_data<T: HostLink<Location = L>>(
        &mut self,
        slot: Slot,
        data: Vec<u8>,
        result: u64,
        link: &mut T,
    ) {
        self.send(slot, CommandData::Bytes(data), result, link);
    }

    /// The data of a command that is being sent, by the index of its slot.
    #[inline]
    pub fn sending(&self, index: u32) -> &CommandData {
        &self.commands.value_at(index).expect("a command stays until its data is sent").data
    }

    /// As [`sending`](Self::sending), to share it with the network.
    pub fn sending_mut(&mut self, index: u32) -> Option<&mut CommandData> {
        let slot = self.commands.slot_at(index)?;
        self.commands.get_mut(slot).map(|command| &mut command.data)
    }

    /// The data of a command was sent: frees it.
    #[inline]
    pub fn sent(&mut self, index: u32) {
        if let Some((bytes, _)) = self.commands.drop_value_at(index, Command::take_charge) {
            self.memory.remove(bytes);
        }
    }

    #[inline(always)]
    fn insert(&mut self, command: Command<L>) -> Slot {
        match self.commands.insert(command) {
            Ok(slot) => slot,
            Err(_) => panic!("a command was accepted without a free slot"),
        }
    }

    /// Removes a command with its buffer, and returns its token if it is not answered.
    #[inline]
    fn remove(&mut self, slot: Slot) -> Option<CommandToken> {
        let (bytes, token) = self.commands.drop_value(slot, Command::take_charge)?;
        self.memory.remove(bytes);
        token
    }

    #[inline]
    fn finish<T: HostLink<Location = L>>(&mut self, slot: Slot, status: Status, result: u64, link: &mut T) {
        if let Some(token) = self.remove(slot) {
            link.complete(token, status, result);
        }
    }

    #[inline]
    fn send<T: HostLink<Location = L>>(&mut self, slot: Slot, data: CommandData, result: u64, link: &mut T) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let length = data.len().min(command.length as usize);
        if length == 0 {
            return self.finish(slot, Status::SUCCESS, result, link);
        }
        let Some(token) = command.token.take() else { return };
        command.state = CommandState::Sending;
        command.data = data;
        if link.send(token, slot, &command.location, &command.data, length, result) == Transferred::Now {
            self.remove(slot);
        }
    }

    #[inline]
    fn set_state(&mut self, slot: Slot, state: CommandState) {
        if let Some(command) = self.commands.get_mut(slot) {
            command.state = state;
        }
    }

    #[inline]
    fn take_data(&mut self, slot: Slot) -> CommandData {
        self.commands.get_mut(slot).map_or(CommandData::None, |command| std::mem::take(&mut command.data))
    }

    /// The tag of a device request for the command in `slot`: bits 31:16 its generation, bits 15:0 its index.
    #[inline]
    fn tag(&self, slot: Slot) -> Tag {
        let generation = slot.to_bits() >> 32 & 0xffff;
        Tag(generation << 16 | u64::from(slot.index()))
    }

    /// The command of a tag; `None` if the tag is stale.
    #[inline]
    fn slot_of(&self, tag: Tag) -> Option<Slot> {
        let slot = self.commands.slot_at(tag.0 as u32 & 0xffff)?;
        (slot.to_bits() >> 32 & 0xffff == tag.0 >> 16 & 0xffff).then_some(slot)
    }
}

impl<L> Drop for IoQueue<L> {
    fn drop(&mut self) {
        // The host is gone, or expects no answers after a reset.
        for (_, command) in self.commands.iter_mut() {
            if let Some(token) = command.token.take() {
                token.abandon();
            }
        }
    }
}
