//! Commands in flight on one queue, and the data that they own.

use controller::io::{Copying, Plan};
use memory::Buffer;
use nvme_tcp::Segments;
use ring::Status;
use slots::{Slab, Slot};
use wire_nvme::Sqe;

use crate::fused::Half;

/// One command, from its capsule to its response.
pub(crate) struct Command {
    pub(crate) cid: u16,
    pub(crate) work: Work,
    /// The data: where a write's arrives, where a read's leaves from.
    pub(crate) data: Data,
    /// Bytes that the command moves.
    pub(crate) length: u32,
    /// Bytes that the host was asked for by R2T, and how many of them have arrived.
    pub(crate) asked: u32,
    pub(crate) arrived: u32,
    /// Data did not match its digest.
    pub(crate) corrupt: bool,
    /// Bytes of buffer that the command has, wherever the buffer is.
    holds: u32,
}

impl Command {
    pub(crate) fn new(cid: u16, work: Work, data: Data, length: u32) -> Command {
        Command { cid, work, data, length, asked: 0, arrived: 0, corrupt: false, holds: 0 }
    }
}

/// What a command is for.
pub(crate) enum Work {
    /// The device fills a buffer, which then goes to the host.
    Read,
    /// A buffer, the host's data, or both are awaited; then it goes as the plan says.
    Planned(Plan),
    /// As planned, but its namespace has gone meanwhile: the data is awaited, then refused.
    Refused,
    /// One of the commands of a fused operation: its data, the other command or buffers are awaited.
    Fused(Box<Half>),
    /// So many requests are with devices; the worst of their outcomes is the command's.
    Requests { left: u16, status: Status },
    /// A Copy that goes on: the next piece is to be read, unless it has been, or a device has it.
    Copying { copying: Box<Copying>, has_read: bool },
    /// A command of the admin queue, or a Connect: the whole of it is needed when its data is here.
    Whole(Box<Sqe>),
    /// The controller has it, and will answer.
    AtController,
    /// It is done, but waits for others before it is answered; see [`crate::connection::State::parked`].
    Parked,
    /// Answered; its data is leaving.
    Leaving,
}

/// Data of a command.
pub(crate) enum Data {
    None,
    /// Of an I/O: what the device reads and writes.
    Buffer(Buffer),
    /// Of a control command.
    Bytes(Vec<u8>),
}

impl Data {
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Data::None => &[],
            Data::Buffer(buffer) => buffer.as_slice(),
            Data::Bytes(bytes) => bytes,
        }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Data::None => &mut [],
            Data::Buffer(buffer) => buffer.as_mut_slice(),
            Data::Bytes(bytes) => bytes,
        }
    }
}

impl Data {
    /// Drops what is beyond `length`.
    pub(crate) fn truncate(&mut self, length: usize) {
        match self {
            Data::Buffer(buffer) if buffer.len() > length && length > 0 => buffer.resize(length),
            Data::Bytes(bytes) => bytes.truncate(length),
            _ => {}
        }
    }
}

/// The commands of one queue.
pub(crate) struct Commands {
    slab: Slab<Command>,
    /// Bytes of buffers held, bounded so that one connection cannot hold all there are.
    pub(crate) held_bytes: usize,
}

impl Commands {
    pub(crate) fn new(depth: u32) -> Commands {
        Commands { slab: Slab::with_capacity(depth), held_bytes: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.slab.is_full()
    }

    pub(crate) fn insert(&mut self, command: Command) -> Slot {
        match self.slab.insert(command) {
            Ok(slot) => slot,
            Err(_) => panic!("a command was taken without room for it"),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut Command> {
        self.slab.get_mut(slot)
    }

    /// The command whose transfer tag an H2CData PDU carries: the slot's index.
    pub(crate) fn by_index(&mut self, index: u32) -> Option<(Slot, &mut Command)> {
        let slot = self.slab.slot_at(index)?;
        Some((slot, self.slab.get_mut(slot)?))
    }

    /// The command of the host that waits for the controller under this identifier.
    pub(crate) fn by_cid(&self, cid: u16) -> Option<Slot> {
        let waits = |command: &Command| command.cid == cid && matches!(command.work, Work::AtController);
        self.slab.iter().find(|(_, command)| waits(command)).map(|(slot, _)| slot)
    }

    /// Refuses the commands that still wait for data or a buffer and whose plan no longer holds.
    pub(crate) fn refuse(&mut self, holds: impl Fn(&Plan) -> bool) {
        for (_, command) in self.slab.iter_mut() {
            match &mut command.work {
                Work::Planned(plan) if !holds(plan) => command.work = Work::Refused,
                Work::Fused(half) if !holds(&half.plan) => {
                    half.doom = Some(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
                }
                _ => {}
            }
        }
    }

    /// Whether some commands will be answered without another word of the host's, and, unless it is `cut_off`,
    /// with the data that it was asked for.
    pub(crate) fn are_under_way(&self, cut_off: bool) -> bool {
        self.slab.iter().any(|(_, command)| {
            let is_cut_off = cut_off && command.arrived < command.asked;
            let is_half = matches!(&command.work, Work::Fused(half) if half.other.is_none());
            !matches!(command.work, Work::AtController) && !is_half && !is_cut_off
        })
    }

    /// Ends a command; its memory is free again.
    #[inline]
    pub(crate) fn remove(&mut self, slot: Slot) {
        if let Some(command) = self.slab.remove(slot) {
            self.held_bytes -= command.holds as usize;
        }
    }

    /// Counts a buffer that a command was given.
    #[inline]
    pub(crate) fn hold(&mut self, slot: Slot, bytes: u32) {
        if let Some(command) = self.slab.get_mut(slot) {
            command.holds += bytes;
            self.held_bytes += bytes as usize;
        }
    }

    /// Takes a command's data away, to the device.
    #[inline]
    pub(crate) fn take_data(&mut self, slot: Slot) -> Data {
        self.slab.get_mut(slot).map_or(Data::None, |command| std::mem::replace(&mut command.data, Data::None))
    }
}

impl Segments for Commands {
    #[inline]
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        let command = self.slab.slot_at(slot).and_then(|slot| self.slab.get(slot));
        &command.expect("a command stays while its data leaves").data.as_slice()[start..start + length]
    }

    #[inline]
    fn sent(&mut self, slot: u32) {
        if let Some(slot) = self.slab.slot_at(slot) {
            self.remove(slot);
        }
    }
}
