//! Commands of a queue: their state, their data, and the token that each of them is answered with.

use block_io::Status;
use dma::{Buffer, Data};
use slots::Slot;
use wire_nvme::Sqe;

use crate::io::{CopyOperation, IoPlan};

/// The duty to answer one command, once.
///
/// A transport makes one for each command that it accepts; the queue returns it with the command's status. A token
/// that is dropped unanswered is a command that its host waits for forever: builds with debug assertions panic.
#[derive(Debug)]
#[must_use = "the host waits for an answer to the command"]
pub struct CommandToken {
    cid: u16,
}

impl CommandToken {
    /// A token for a command that has just been accepted.
    #[inline(always)]
    pub const fn new(cid: u16) -> CommandToken {
        CommandToken { cid }
    }

    /// Command identifier.
    #[inline(always)]
    pub const fn cid(&self) -> u16 {
        self.cid
    }

    /// Ends the duty: the completion is posted or queued. Returns the command identifier.
    #[inline(always)]
    pub const fn answered(self) -> u16 {
        let cid = self.cid;
        std::mem::forget(self);
        cid
    }

    /// Ends the duty without an answer: the queue is gone, and its host expects none.
    #[inline(always)]
    pub const fn abandon(self) {
        std::mem::forget(self);
    }
}

#[cfg(debug_assertions)]
impl Drop for CommandToken {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "command {:#x} was not answered", self.cid);
    }
}

/// A command with a slot.
#[derive(Debug)]
pub(super) struct Command<L> {
    /// `None` once the command is answered; its slot then holds data that is being sent.
    pub(super) token: Option<CommandToken>,
    pub(super) state: CommandState,
    /// Where the host has the command's data.
    pub(super) location: L,
    /// Receives the host's data, or holds data while it is sent.
    pub(super) data: CommandData,
    /// Transfer length in bytes.
    pub(super) length: u32,
    /// Bytes of pool buffers charged to the command, even while a device owns the buffer.
    pub(super) buffer_bytes: u32,
}

impl<L> Command<L> {
    #[inline(always)]
    pub(super) fn new(token: CommandToken, state: CommandState, location: L, length: u32) -> Command<L> {
        Command { token: Some(token), state, location, data: CommandData::None, length, buffer_bytes: 0 }
    }

    /// Of a command that ends: the bytes of buffers that it is charged for, and its token if it is not answered.
    #[inline]
    pub(super) fn take_charge(&mut self) -> (usize, Option<CommandToken>) {
        (self.buffer_bytes as usize, self.token.take())
    }
}

/// What a command waits for, or what happens next.
#[derive(Debug)]
pub(super) enum CommandState {
    /// A device reads into a buffer, which is then sent to the host.
    Reading,
    /// Waits for a buffer, the host's data, or both; then the plan is executed.
    Planned(IoPlan),
    /// Its namespace was removed before submission: fails once its data has been received.
    Rejected,
    /// One command of a fused operation: waits for its data, the other command, or buffers.
    Fused(Box<FusedHalf>),
    /// `remaining` device requests are outstanding. The command completes with the first error among them.
    Submitted { remaining: u16, status: Status },
    /// A Copy: a device copies the current range, or the command is listed in `ready_copies`.
    Copying(Box<CopyOperation>),
    /// A reservation command that waits for drains or a file write.
    ReservationPending,
    /// An admin or Connect command: handed to the owner when all its data has been received.
    Admin(Box<Sqe>),
    /// The owner executes it, and completes it later if it is an Asynchronous Event Request.
    AtOwner,
    /// Answered, but for its data, which is being sent.
    Sending,
}

/// One of the two commands of a fused operation.
#[derive(Debug)]
pub(super) struct FusedHalf {
    pub(super) plan: IoPlan,
    /// The other command, once both have been received.
    pub(super) partner: Option<Slot>,
    pub(super) is_first: bool,
    pub(super) has_data: bool,
    /// Set when it must not be executed: the status to complete it with once its data has been received.
    pub(super) abort_status: Option<Status>,
}

/// Data of a command, and who allocated it.
#[derive(Debug, Default)]
pub enum CommandData {
    /// The command has none, or a device has it.
    #[default]
    None,
    /// Buffers of the core's pool, for device I/O: one, or several if no buffer was as large.
    Pool(Data),
    /// Heap memory: for data that the controller itself reads or writes, and for data that arrives while no buffer is
    /// available.
    Bytes(Vec<u8>),
}

/// A part of a command's data for another owner, which reads it: [`CommandData::share`].
#[derive(Debug)]
pub enum SharedPart {
    /// From byte `start` of a buffer.
    Buffer {
        /// The buffer.
        buffer: Buffer,
        /// The first byte.
        start: usize,
    },
    /// A copy.
    Bytes(Vec<u8>),
}

impl CommandData {
    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            CommandData::None => 0,
            CommandData::Pool(data) => data.len(),
            CommandData::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes, if they are contiguous.
    #[inline]
    pub fn contiguous(&self) -> Option<&[u8]> {
        match self {
            CommandData::None => Some(&[]),
            CommandData::Pool(data) => data.single().map(Buffer::as_slice),
            CommandData::Bytes(bytes) => Some(bytes),
        }
    }

    /// The parameters of a command, which the controller itself reads: they are never received into several buffers.
    pub(super) fn parameters(&self) -> &[u8] {
        self.contiguous().expect("parameters are contiguous")
    }

    /// Bytes from `start`: `length`, or those of the first slice if there are several. Empty if there is none at `start`.
    #[inline]
    pub fn part(&self, start: usize, length: usize) -> &[u8] {
        match self {
            CommandData::Pool(Data::One(buffer)) => buffer.as_slice().get(start..start + length),
            CommandData::Bytes(bytes) => bytes.get(start..start + length),
            _ => self.parts(start, length).next(),
        }
        .unwrap_or_default()
    }

    /// As [`part`](Self::part), to write them.
    #[inline]
    pub fn part_mut(&mut self, start: usize, length: usize) -> &mut [u8] {
        match self {
            CommandData::Pool(Data::One(buffer)) => buffer.as_mut_slice().get_mut(start..start + length),
            CommandData::Bytes(bytes) => bytes.get_mut(start..start + length),
            many => many.parts_mut(start, length).next(),
        }
        .unwrap_or_default()
    }

    /// Bytes from `start`, all in one slice, which stay as they are while the part exists: the data cannot be written any
    /// more. Heap memory is copied.
    pub fn share(&mut self, start: usize, length: usize) -> SharedPart {
        if let CommandData::Pool(data) = self
            && let Some((buffer, start)) = data.slice_at_mut(start)
        {
            return SharedPart::Buffer { buffer: buffer.share(), start };
        }
        SharedPart::Bytes(self.part(start, length).to_vec())
    }

    /// The `length` bytes from `start`, in one part for each slice.
    pub fn parts(&self, start: usize, length: usize) -> impl Iterator<Item = &[u8]> {
        let (pool, bytes) = match self {
            CommandData::None => (None, None),
            CommandData::Pool(data) => (Some(data.parts(start, length)), None),
            CommandData::Bytes(bytes) => (None, bytes.get(start..start + length)),
        };
        pool.into_iter().flatten().chain(bytes)
    }

    /// As [`parts`](Self::parts), to write them.
    pub fn parts_mut(&mut self, start: usize, length: usize) -> impl Iterator<Item = &mut [u8]> {
        let (pool, bytes) = match self {
            CommandData::None => (None, None),
            CommandData::Pool(data) => (Some(data.parts_mut(start, length)), None),
            CommandData::Bytes(bytes) => (None, bytes.get_mut(start..start + length)),
        };
        pool.into_iter().flatten().chain(bytes)
    }

    /// Keeps the `length` bytes from `offset`: at the front if they are contiguous, where they are otherwise.
    #[inline]
    pub(super) fn keep(&mut self, offset: usize, length: usize) {
        match self {
            CommandData::Pool(Data::One(buffer)) => {
                if offset > 0 {
                    buffer.as_mut_slice().copy_within(offset..offset + length, 0);
                }
                if buffer.len() > length && length > 0 {
                    buffer.resize(length);
                }
            }
            CommandData::Bytes(bytes) => {
                if offset > 0 {
                    bytes.copy_within(offset..offset + length, 0);
                }
                bytes.truncate(length);
            }
            CommandData::Pool(many) => keep_slices(many, offset, length),
            CommandData::None => {}
        }
    }

    /// Copies everything to the front of `to`, which has room for it.
    pub(super) fn copy_to(&self, to: &mut Data) {
        let mut at = 0;
        for part in self.parts(0, self.len()) {
            to.copy_from(at, part);
            at += part.len();
        }
    }
}

#[cold]
fn keep_slices(data: &mut Data, offset: usize, length: usize) {
    if offset > 0 && offset < data.len() {
        *data = data.split_off(offset);
    }
    if length > 0 && length < data.len() {
        drop(data.split_off(length));
    }
}
