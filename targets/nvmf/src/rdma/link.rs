//! What NVMe/RDMA does for a queue: responses, and the transfers between the host's memory and ours.

use std::collections::{HashMap, VecDeque};
use std::io;

use block_io::{Request, Status};
use dma::{Data, Pool};
use nvme_controller::IoQueue;
use nvme_controller::io_queue::{
    CommandData, CommandToken, HostData, HostLink, HostTransfer, IoTransport, Transferred,
};
use nvme_controller::sgl::{self, DataSource};
use slots::Slot;
use sockets::{PeerMemory, QueuePair, ReceivedMessage, RejectedWork, SENT_MESSAGE_BYTES_MAX, Work};
use wire_nvme::sqe::Sgl;
use wire_nvme::{Sqe, cqe, sqe};

use crate::fabrics::{FabricsLink, FabricsProtocol, Responses};
use target_shell::IoContext;

/// Tag of a response without data: no slot has it.
const NO_SLOT: u64 = u64::MAX;

const _: () = assert!(cqe::SIZE == SENT_MESSAGE_BYTES_MAX);

/// Where a command's data is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum RdmaLocation {
    /// It has none.
    #[default]
    None,
    /// In the host's memory.
    Peer(PeerMemory),
    /// In the capsule, from this byte of its data on.
    Capsule(u32),
}

/// What is to be given to the queue pair.
enum Outgoing {
    /// Work as it is.
    Work(Work),
    /// The data of a command, which is still in its slot, and the response.
    Data { slot: Slot, to: PeerMemory, length: u32, message: [u8; cqe::SIZE], invalidated_key: Option<u32> },
}

/// The way to the host.
#[derive(Default)]
pub(crate) struct RdmaLink {
    pub(crate) responses: Responses,
    outgoing: VecDeque<Outgoing>,
    /// Works of the queue pair that have not ended.
    in_flight: u32,
    /// Works that have ended, ever; wraps.
    ended: u64,
    /// Keys that the host wants to be invalidated with the response, by command identifier.
    invalidated_keys: HashMap<u16, u32>,
    /// For data that the device cannot access; set by the first turn.
    pub(crate) pool: Option<Pool>,
    /// Data waits for memory of the pool.
    waits_for_memory: bool,
    /// Each work is given to the device at once.
    pub(crate) is_unbatched: bool,
}

impl RdmaLink {
    /// Whether everything was sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.outgoing.is_empty() && self.in_flight == 0
    }

    /// Answers and reads that are not done.
    pub(crate) fn unfinished(&self) -> usize {
        self.outgoing.len() + self.in_flight as usize
    }

    /// What the host's device has still to do, by the number of what it has done; `None` if nothing.
    pub(crate) fn waits_for_host(&self) -> Option<u64> {
        (self.in_flight > 0).then_some(self.ended)
    }

    /// Whether data waits for memory.
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.waits_for_memory
    }

    /// The message of a response.
    fn message(&mut self, cid: u16, status: Status, result: u64) -> ([u8; cqe::SIZE], Option<u32>) {
        let mut message = [0; cqe::SIZE];
        self.responses.cqe(cid, status, result).encode(&mut message);
        (message, self.invalidated_keys.remove(&cid))
    }

    /// Gives the queue pair what is queued, as far as it takes it.
    pub(crate) fn flush(
        &mut self,
        queue: &mut IoQueue<RdmaLocation>,
        pair: &mut dyn QueuePair,
    ) -> Result<(), io::ErrorKind> {
        self.waits_for_memory = false;
        while let Some(next) = self.outgoing.pop_front() {
            let work = match next {
                Outgoing::Work(work) => work,
                Outgoing::Data { slot, to, length, message, invalidated_key } => {
                    let Some(data) = self.shared(queue, slot, length) else {
                        let next = Outgoing::Data { slot, to, length, message, invalidated_key };
                        self.outgoing.push_front(next);
                        self.waits_for_memory = true;
                        break;
                    };
                    let write = Some((to, data, length));
                    Work::Send { tag: slot.to_bits(), write, message, invalidated_key }
                }
            };
            match pair.post(work) {
                Ok(()) => {
                    self.in_flight += 1;
                    if self.is_unbatched {
                        pair.submit()?;
                    }
                }
                Err(RejectedWork::Full(work)) => {
                    self.outgoing.push_front(Outgoing::Work(work));
                    break;
                }
                Err(RejectedWork::Memory(_, error)) => {
                    log::warn!(target: "nvmf", "the RDMA device cannot access a buffer: {error}");
                    return Err(io::ErrorKind::OutOfMemory);
                }
            }
        }
        pair.submit()
    }

    /// A work has ended; the command of its tag, whose data was sent.
    pub(crate) fn ended(&mut self, tag: u64) -> Option<Slot> {
        self.in_flight -= 1;
        self.ended = self.ended.wrapping_add(1);
        (tag != NO_SLOT).then(|| Slot::from_bits(tag))
    }

    /// The data of a command, in memory that the device can access: its buffers, or a copy. `None` if there
    /// is no memory for one.
    fn shared(&self, queue: &mut IoQueue<RdmaLocation>, slot: Slot, length: u32) -> Option<Data> {
        let data = queue.sending_mut(slot.index()).expect("a command stays until its data is sent");
        match data {
            CommandData::Pool(data) if !data.is_external() => Some(data.share()),
            other => {
                let mut copy = self.pool.as_ref()?.take_data(length as usize)?;
                let mut at = 0;
                for part in other.parts(0, length as usize) {
                    copy.copy_from(at, part);
                    at += part.len();
                }
                Some(copy)
            }
        }
    }
}

impl FabricsLink for RdmaLink {
    #[inline]
    fn responses(&mut self) -> &mut Responses {
        &mut self.responses
    }

    #[inline]
    fn respond(&mut self, cid: u16, status: Status, result: u64) {
        let (message, invalidated_key) = self.message(cid, status, result);
        let work = Work::Send { tag: NO_SLOT, write: None, message, invalidated_key };
        self.outgoing.push_back(Outgoing::Work(work));
    }
}

impl HostLink for RdmaLink {
    type Location = RdmaLocation;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.respond(token.answered(), status, result);
    }

    /// Queues the data, followed by the response.
    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &RdmaLocation,
        _data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        let RdmaLocation::Peer(to) = *location else {
            self.respond(token.answered(), Status::INTERNAL_ERROR, 0);
            return Transferred::Now;
        };
        let (message, invalidated_key) = self.message(token.answered(), Status::SUCCESS, result);
        let length = length as u32;
        self.outgoing.push_back(Outgoing::Data { slot, to, length, message, invalidated_key });
        Transferred::Later
    }
}

/// A capsule that was received.
pub(crate) struct Capsule<'a> {
    pub(crate) pair: &'a dyn QueuePair,
    pub(crate) message: &'a ReceivedMessage,
}

impl Capsule<'_> {
    /// Bytes of data behind the command.
    pub(crate) fn data_bytes(&self) -> u32 {
        self.message.length.saturating_sub(sqe::SIZE as u32)
    }
}

/// A connection's link while a command is executed, with the resources that its group lends it.
pub(crate) struct RdmaTransport<'a, 'b, P: FabricsProtocol> {
    pub(crate) link: &'a mut RdmaLink,
    pub(crate) draining: &'a mut bool,
    pub(crate) context: &'a mut IoContext<'b, P>,
    /// Flow identifier for fair queueing in the block device layer.
    pub(crate) flow: u16,
    /// The capsule that is processed.
    pub(crate) capsule: Option<Capsule<'a>>,
}

impl<P: FabricsProtocol> HostLink for RdmaTransport<'_, '_, P> {
    type Location = RdmaLocation;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.link.complete(token, status, result);
    }

    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &RdmaLocation,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        self.link.send(token, slot, location, data, length, result)
    }
}

/// The host's memory that a keyed descriptor names (Base 2.0, section 4.1.2), of at least `bytes` bytes, and
/// the key to invalidate.
pub(crate) fn keyed(sqe: &Sqe, bytes: u32) -> Result<(PeerMemory, Option<u32>), Status> {
    match sqe.data.sgl() {
        Ok(Sgl::Keyed { address, length, key, invalidate }) => {
            if length < bytes {
                return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
            }
            Ok((PeerMemory { address, key }, invalidate.then_some(key)))
        }
        _ => Err(Status::SGL_TYPE_INVALID.do_not_retry()),
    }
}

impl<P: FabricsProtocol> IoTransport for RdmaTransport<'_, '_, P> {
    fn locate(&mut self, sqe: &Sqe, transfer: HostTransfer) -> Result<HostData<RdmaLocation>, Status> {
        let room = transfer.bytes;
        if !transfer.to_host && sqe.data.identifier() == wire_nvme::DataPointer::CAPSULE {
            let available = self.capsule.as_ref().map_or(0, Capsule::data_bytes);
            return match sgl::from_host(sqe.data, available)? {
                DataSource::Capsule { offset, length } if length == room => {
                    Ok(HostData::Moved { location: RdmaLocation::Capsule(offset), room, immediate: true })
                }
                _ => Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry()),
            };
        }
        let (peer, invalidated_key) = keyed(sqe, room)?;
        if let Some(key) = invalidated_key {
            self.link.invalidated_keys.insert(sqe.cid, key);
        }
        Ok(HostData::Moved { location: RdmaLocation::Peer(peer), room, immediate: false })
    }

    /// Copies the data out of the capsule, or has the device read it from the host's memory.
    fn receive(
        &mut self,
        slot: Slot,
        _cid: u16,
        location: &mut RdmaLocation,
        into: &mut CommandData,
    ) -> Result<Transferred, Status> {
        match *location {
            RdmaLocation::None => Err(Status::INTERNAL_ERROR),
            RdmaLocation::Capsule(offset) => {
                let Some(capsule) = &self.capsule else { return Err(Status::INTERNAL_ERROR) };
                let mut at = sqe::SIZE + offset as usize;
                for part in into.parts_mut(0, into.len()) {
                    capsule.pair.copy_message(capsule.message, at, part);
                    at += part.len();
                }
                Ok(Transferred::Now)
            }
            RdmaLocation::Peer(from) => {
                let into = match std::mem::take(into) {
                    CommandData::Pool(data) => data,
                    heap => {
                        // The device reads into a buffer, which is copied when it has.
                        let buffer = self.context.pool.take_data(heap.len());
                        *into = heap;
                        buffer.ok_or(Status::TRANSIENT_TRANSPORT_ERROR)?
                    }
                };
                let work = Work::Read { tag: slot.to_bits(), from, into };
                self.link.outgoing.push_back(Outgoing::Work(work));
                Ok(Transferred::Later)
            }
        }
    }

    fn answer_location(&mut self, sqe: &Sqe) -> RdmaLocation {
        let Ok((peer, invalidated_key)) = keyed(sqe, 0) else { return RdmaLocation::None };
        if let Some(key) = invalidated_key {
            self.link.invalidated_keys.insert(sqe.cid, key);
        }
        RdmaLocation::Peer(peer)
    }

    #[inline]
    fn take_data(&mut self, bytes: usize) -> Option<Data> {
        let data = self.context.pool.take_data(bytes);
        if data.is_none() {
            self.context.protocol.core().totals.waited_for_buffer();
        }
        data
    }

    #[inline]
    fn submit(&mut self, backend: u32, mut request: Request<Data>) -> Result<(), Status> {
        request.flow = self.flow;
        self.context.submit(backend, request)
    }

    fn disconnect(&mut self) {
        *self.draining = true;
    }
}
