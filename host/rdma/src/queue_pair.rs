//! A queue pair of one connection.

use std::collections::VecDeque;
use std::io;
use std::ptr;
use std::rc::Rc;

use dma::Data;
use slots::Slab;
use sockets::{
    PeerMemory, QueuePair, QueuePairEvent, ReceivedMessage, RejectedWork, SENT_MESSAGE_BYTES_MAX, Work,
};

use crate::RdmaError;
use crate::connection_manager::{ActiveId, ConnectionRequest, OwnedId};
use crate::device::RdmaDevice;
use crate::functions::{
    INLINE, LocalRange, QueuePairAttributes, QueuePairHandle, RELIABLE_CONNECTION, SIGNALED, SendRequest,
    WorkCompletion, opcode,
};
use crate::receive_buffers::RECEIVE;

/// Ranges of memory of one request at most.
const RANGES_MAX: usize = 16;
/// Requests that a connection can have in flight, for each command of its protocol: a read, or a write and a
/// message; with space for data in many pieces.
const REQUESTS_PER_COMMAND: u32 = 3;
/// Requests that one work can take.
const REQUESTS_PER_WORK_MAX: usize = 16;

/// A connected queue pair.
///
/// The order of its fields is that of their ends: [`Drop`] destroys the queue pair first, and then nothing
/// uses the data of what was in flight.
pub(crate) struct RdmaQueuePair {
    /// By index: the identifiers of requests. Its data is that which the device may access.
    work: Slab<WorkInFlight>,
    id: OwnedId,
    device: Rc<RdmaDevice>,
    /// Requests that can be posted.
    free_requests: u32,
    /// Entries of the completion queue that are reserved.
    entries: u32,
    ranges_max: usize,
    /// Requests that are not submitted yet.
    batch: Vec<BatchedRequest>,
    events: VecDeque<QueuePairEvent>,
    messages: VecDeque<ReceivedMessage>,
    has_failed: bool,
}

struct WorkInFlight {
    tag: u64,
    is_read: bool,
    data: Option<Data>,
    requests: u32,
}

struct BatchedRequest {
    request: SendRequest,
    ranges: [LocalRange; RANGES_MAX],
    message: [u8; SENT_MESSAGE_BYTES_MAX],
}

impl RdmaQueuePair {
    /// Makes the queue pair of a connection with `commands` in flight at most, and accepts the connection
    /// with a message.
    ///
    /// # Errors
    /// The device lacks resources, or the peer is gone.
    pub(crate) fn accept(
        request: ConnectionRequest,
        device: &Rc<RdmaDevice>,
        commands: u32,
        message: &[u8],
    ) -> Result<RdmaQueuePair, RdmaError> {
        let (entries, reads_max) = RdmaQueuePair::create(request.id(), device, commands)?;
        let id = request.accept(message, reads_max).inspect_err(|_| device.release(entries))?;
        Ok(RdmaQueuePair::new(id, device, entries))
    }

    /// As [`accept`](Self::accept), for a connection that this end requests.
    pub(crate) fn request(
        id: ActiveId,
        device: &Rc<RdmaDevice>,
        commands: u32,
        message: &[u8],
    ) -> Result<RdmaQueuePair, RdmaError> {
        let (entries, reads_max) = RdmaQueuePair::create(id.id(), device, commands)?;
        let id = id.request(message, reads_max).inspect_err(|_| device.release(entries))?;
        Ok(RdmaQueuePair::new(id, device, entries))
    }

    /// The requests that a queue pair with this number of commands has.
    pub(crate) fn requests(commands: u32) -> u32 {
        commands.saturating_mul(REQUESTS_PER_COMMAND).max(2 * REQUESTS_PER_WORK_MAX as u32)
    }

    /// Makes the queue pair of an identifier; returns how many requests it has, and how many reads.
    fn create(id: &OwnedId, device: &Rc<RdmaDevice>, commands: u32) -> Result<(u32, u8), RdmaError> {
        let limits = device.attributes();
        let entries = RdmaQueuePair::requests(commands).min(limits.qp_wr_max.max(1) as u32);
        if !device.reserve(entries) {
            let error = io::Error::other("the completion queue of the core has no entries left");
            return Err(RdmaError::Call("making a queue pair", error));
        }
        let mut attributes = QueuePairAttributes {
            qp_context: ptr::null_mut(),
            send_cq: device.cq(),
            recv_cq: device.cq(),
            srq: device.srq(),
            send_wr_max: entries,
            recv_wr_max: 0,
            send_sge_max: ranges_max(device) as u32,
            recv_sge_max: 1,
            inline_bytes_max: SENT_MESSAGE_BYTES_MAX as u32,
            qp_type: RELIABLE_CONNECTION,
            signal_all: 0,
        };
        let create = device.functions().cm.rdma_create_qp;
        // SAFETY: the identifier and the queues are of the same device, and open.
        if unsafe { create(id.as_ptr(), device.pd(), &mut attributes) } != 0 {
            let error = RdmaError::last("making a queue pair");
            device.release(entries);
            return Err(error);
        }
        Ok((entries, limits.qp_init_rd_atom_max.clamp(0, u8::MAX.into()) as u8))
    }

    fn new(id: OwnedId, device: &Rc<RdmaDevice>, entries: u32) -> RdmaQueuePair {
        RdmaQueuePair {
            work: Slab::with_capacity(entries),
            id,
            device: device.clone(),
            free_requests: entries,
            entries,
            ranges_max: ranges_max(device),
            batch: Vec::new(),
            events: VecDeque::new(),
            messages: VecDeque::new(),
            has_failed: false,
        }
    }

    fn handle(&self) -> *mut QueuePairHandle {
        self.id.queue_pair()
    }

    /// Its number on the device.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the identifier has a queue pair until the drop.
        unsafe { (*self.handle()).number }
    }

    /// Names it in events of the connection manager.
    pub(crate) fn key(&self) -> usize {
        self.id.key()
    }

    pub(crate) fn device(&self) -> &Rc<RdmaDevice> {
        &self.device
    }

    /// A completion of one of its requests. Its receive buffer is given back by [`QueuePair::release`], or,
    /// if the request failed, by the caller.
    pub(crate) fn completed(&mut self, completion: &WorkCompletion) {
        if completion.status != 0 {
            return self.fail(io::ErrorKind::ConnectionReset);
        }
        if completion.id & RECEIVE != 0 {
            let message = ReceivedMessage { index: completion.id as u32, length: completion.length };
            return self.messages.push_back(message);
        }
        let Some(slot) = self.work.slot_at(completion.id as u32) else { return };
        let Some(done) = self.work.remove(slot) else { return };
        self.free_requests += done.requests;
        self.events.push_back(match (done.is_read, done.data) {
            (true, Some(data)) => QueuePairEvent::Read { tag: done.tag, data },
            _ => QueuePairEvent::Sent { tag: done.tag },
        });
    }

    /// The connection manager says that the connection has ended.
    pub(crate) fn ended(&mut self) {
        self.events.push_back(QueuePairEvent::Closed);
    }

    fn fail(&mut self, kind: io::ErrorKind) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.events.push_back(QueuePairEvent::Failed(kind));
        }
    }

    /// The ranges of data, in order, up to `length` bytes.
    fn locate(&self, data: &Data, length: usize) -> Result<Vec<LocalRange>, dma::DmaError> {
        let mut left = length;
        let mut ranges = Vec::with_capacity(data.slices().len());
        for buffer in data.slices() {
            let bytes = buffer.len().min(left);
            if bytes == 0 {
                break;
            }
            ranges.push(LocalRange { length: bytes as u32, ..self.device.locate(buffer)? });
            left -= bytes;
        }
        Ok(ranges)
    }

    /// Adds requests that move data to or from the peer's memory.
    fn batch_transfer(&mut self, opcode: i32, id: u64, peer: PeerMemory, ranges: &[LocalRange]) {
        let mut address = peer.address;
        for part in ranges.chunks(self.ranges_max) {
            let mut request = BatchedRequest {
                request: SendRequest {
                    id,
                    range_count: part.len() as i32,
                    opcode,
                    remote_address: address,
                    remote_key: peer.key,
                    ..SendRequest::EMPTY
                },
                ranges: [LocalRange::default(); RANGES_MAX],
                message: [0; SENT_MESSAGE_BYTES_MAX],
            };
            request.ranges[..part.len()].copy_from_slice(part);
            self.batch.push(request);
            address = address.wrapping_add(part.iter().map(|range| u64::from(range.length)).sum());
        }
    }
}

/// Ranges of memory of one request.
fn ranges_max(device: &RdmaDevice) -> usize {
    (device.attributes().sge_max.max(1) as usize).min(RANGES_MAX)
}

impl QueuePair for RdmaQueuePair {
    fn next_event(&mut self) -> Option<QueuePairEvent> {
        self.events.pop_front()
    }

    fn message_count(&self) -> usize {
        self.messages.len()
    }

    fn next_message(&mut self) -> Option<ReceivedMessage> {
        self.messages.pop_front()
    }

    fn copy_message(&self, message: &ReceivedMessage, offset: usize, out: &mut [u8]) {
        self.device.copy_message(message.index, offset, out);
    }

    fn release(&mut self, message: ReceivedMessage) {
        self.device.release_message(message.index);
    }

    fn post(&mut self, work: Work) -> Result<(), RejectedWork> {
        let located = match &work {
            Work::Send { write: Some((_, data, length)), .. } => self.locate(data, *length as usize),
            Work::Send { .. } => Ok(Vec::new()),
            Work::SendData { data, .. } => self.locate(data, data.len()),
            Work::Read { into, .. } => self.locate(into, into.len()),
        };
        let ranges = match located {
            Ok(ranges) => ranges,
            Err(error) => return Err(RejectedWork::Memory(work, error)),
        };
        let transfers = ranges.len().div_ceil(self.ranges_max) as u32;
        let requests = transfers + u32::from(matches!(work, Work::Send { .. }));
        if requests > self.free_requests || self.work.is_full() {
            return Err(RejectedWork::Full(work));
        }
        self.free_requests -= requests;
        let is_message = matches!(work, Work::SendData { .. });
        let (tag, is_read, data, peer, message) = match work {
            Work::Send { tag, write, message, invalidated_key } => {
                let (peer, data) = write.map(|(peer, data, _)| (peer, data)).unzip();
                (tag, false, data, peer.unwrap_or_default(), Some((message, invalidated_key)))
            }
            Work::SendData { tag, data } => (tag, false, Some(data), PeerMemory::default(), None),
            Work::Read { tag, from, into } => (tag, true, Some(into), from, None),
        };
        let slot = self.work.insert(WorkInFlight { tag, is_read, data, requests });
        let id = u64::from(slot.unwrap_or_else(|_| unreachable!("it is not full")).index());
        let opcode = match (is_read, is_message) {
            (true, _) => opcode::RDMA_READ,
            (_, true) => opcode::SEND,
            _ => opcode::RDMA_WRITE,
        };
        self.batch_transfer(opcode, id, peer, &ranges);
        if let Some((message, invalidated_key)) = message {
            let opcode = match invalidated_key {
                Some(_) => opcode::SEND_WITH_INVALIDATE,
                None => opcode::SEND,
            };
            self.batch.push(BatchedRequest {
                request: SendRequest {
                    id,
                    range_count: 1,
                    opcode,
                    flags: INLINE,
                    invalidated_key: invalidated_key.unwrap_or(0),
                    ..SendRequest::EMPTY
                },
                ranges: [LocalRange::default(); RANGES_MAX],
                message,
            });
        }
        // The last request of a work says when all of it is done.
        if let Some(last) = self.batch.last_mut() {
            last.request.flags |= SIGNALED;
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<(), io::ErrorKind> {
        if self.has_failed {
            return Err(io::ErrorKind::ConnectionReset);
        }
        let count = self.batch.len();
        if count == 0 {
            return Ok(());
        }
        // The requests follow each other in memory.
        let mut requests: Vec<SendRequest> = Vec::with_capacity(count);
        let first = requests.as_mut_ptr();
        for (at, batched) in self.batch.iter_mut().enumerate() {
            if batched.request.flags & INLINE != 0 {
                batched.ranges[0] = LocalRange {
                    address: batched.message.as_ptr().addr() as u64,
                    length: SENT_MESSAGE_BYTES_MAX as u32,
                    key: 0,
                };
            }
            batched.request.ranges = batched.ranges.as_mut_ptr();
            batched.request.next = match at + 1 < count {
                true => first.wrapping_add(at + 1),
                false => ptr::null_mut(),
            };
            requests.push(batched.request);
        }
        let mut rejected = ptr::null_mut();
        // SAFETY: the queue pair is open; requests, ranges and messages live during the call, which copies
        // them; the data is registered, and owned by `work` until its completion or the end of the queue
        // pair.
        let posted = unsafe { self.device.context().post_send()(self.handle(), first, &mut rejected) };
        self.batch.clear();
        if posted != 0 {
            self.fail(io::ErrorKind::ConnectionReset);
            return Err(io::ErrorKind::ConnectionReset);
        }
        Ok(())
    }
}

impl Drop for RdmaQueuePair {
    fn drop(&mut self) {
        // Of messages that were not taken.
        for message in self.messages.drain(..) {
            self.device.release_message(message.index);
        }
        let cm = &self.device.functions().cm;
        // SAFETY: the identifier has a queue pair. It fails if the peer has disconnected, which is the same.
        unsafe { (cm.rdma_disconnect)(self.id.as_ptr()) };
        // SAFETY: as above. After this the device accesses none of the data in flight.
        unsafe { (cm.rdma_destroy_qp)(self.id.as_ptr()) };
        self.device.release(self.entries);
    }
}
