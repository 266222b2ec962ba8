//! One queue pair over one TCP connection.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer.
//! The command identifier is the slot's index with some bits of its generation, so that what a
//! confused or hostile controller says of a command that is over, or never was, ends the connection
//! instead of touching memory that is someone else's by then.

use memory::Buffer;
use net::{ConnectionId, Network};
use nvme_tcp::{Consumer, Flushed, Place, Pumped, Receiver, Segments, Sender, pump};
use ring::{Request, Status};
use slots::{Slab, Slot};
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::{
    C2hData, CapsuleCmd, CapsuleResp, Fatal, FatalStatus, Framing, H2cData, IC_SIZE, IcReq, IcResp, Layout,
    PduType, R2t, SHORT_SIZE, TermReq,
};
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::error::Failure;

/// Most commands on a queue: what ten bits of index name.
pub(crate) const DEPTH_MAX: u32 = 1024;
const INDEX_BITS: u32 = DEPTH_MAX.ilog2();

/// A request whose command has completed.
pub(crate) struct Finished {
    pub(crate) request: Request<Buffer>,
    pub(crate) cqe: Cqe,
}

/// Which way a command's data goes, and how much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Data {
    None,
    In(u32),
    Out(u32),
}

pub(crate) struct Queue {
    connection: ConnectionId,
    receiver: Receiver,
    link: Link,
    /// Bytes of data that fit a command's capsule.
    in_capsule_max: u32,
    pub(crate) failure: Option<Failure>,
}

/// Everything but the receiver, which calls into this.
struct Link {
    table: Table,
    sender: Sender,
    finished: Vec<Finished>,
    state: State,
    /// What we send, and what we receive, once agreed on.
    outgoing: Framing,
    incoming: Framing,
    h2c_data_max: u32,
    current: Current,
    /// Commands whose response came before their data had left.
    early: u32,
    terminated: Option<Failure>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    AwaitingIcResp,
    Ready,
}

/// The PDU whose data is arriving.
#[derive(Clone, Copy)]
enum Current {
    None,
    Data { slot: Slot, start: u32, length: u32, last: bool, success: bool },
    Response(Slot, Cqe),
}

struct Table(Slab<Entry>);

struct Entry {
    request: Request<Buffer>,
    data: Data,
    /// Bytes received of a read, or asked for by R2T of a write.
    moved: u32,
    /// Data still queued to be sent; the buffer must stay.
    sending: u32,
    /// The data did not match its digest.
    corrupt: bool,
    /// The response that came while data was still queued.
    response: Option<Cqe>,
}

fn cid_of(slot: Slot) -> u16 {
    let generation = (slot.to_bits() >> 32) as u32;
    (slot.index() | generation << INDEX_BITS) as u16
}

impl Table {
    fn find(&self, cid: u16) -> Option<Slot> {
        let slot = self.0.slot_at(u32::from(cid) & (DEPTH_MAX - 1))?;
        (cid_of(slot) == cid).then_some(slot)
    }
}

impl Segments for Table {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        let entry = self.0.slot_at(slot).and_then(|slot| self.0.get(slot));
        let buffer = entry.and_then(|entry| entry.request.buffer.as_ref());
        &buffer.expect("a slot with data queued keeps its buffer").as_slice()[start..start + length]
    }

    fn sent(&mut self, slot: u32) {
        if let Some(entry) = self.0.slot_at(slot).and_then(|slot| self.0.get_mut(slot)) {
            entry.sending -= 1;
        }
    }
}

impl Queue {
    /// A queue on a connection, with its ICReq queued.
    pub(crate) fn new(connection: ConnectionId, depth: u32, header_digest: bool, data_digest: bool) -> Queue {
        let mut sender = Sender::default();
        let mut request = [0; IC_SIZE];
        IcReq { host_data_alignment_bytes: 4, header_digest, data_digest, r2t_max: 1 }.encode(&mut request);
        sender.push_bytes(&request);
        Queue {
            connection,
            receiver: Receiver::default(),
            link: Link {
                table: Table(Slab::with_capacity(depth.min(DEPTH_MAX))),
                sender,
                finished: Vec::with_capacity(depth as usize),
                state: State::AwaitingIcResp,
                outgoing: Framing::PLAIN,
                incoming: Framing::PLAIN,
                h2c_data_max: 0,
                current: Current::None,
                early: 0,
                terminated: None,
            },
            // 8192 is allowed for admin and Connect commands before anything is known (TCP 1.0,
            // section 3.3.2.2); Connect needs 1024.
            in_capsule_max: 8192,
            failure: None,
        }
    }

    pub(crate) fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Whether commands may be sent.
    pub(crate) fn is_ready(&self) -> bool {
        self.link.state == State::Ready && self.failure.is_none()
    }

    pub(crate) fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes;
    }

    pub(crate) fn is_full(&self) -> bool {
        self.link.table.0.is_full()
    }

    /// Commands that can still be submitted.
    pub(crate) fn room(&self) -> usize {
        self.link.table.0.capacity() - self.link.table.0.len()
    }

    /// Queues a command for `request`; `small` is data that goes into the capsule without a buffer.
    /// The queue must not be full.
    #[inline]
    pub(crate) fn submit(&mut self, mut sqe: Sqe, request: Request<Buffer>, data: Data, small: &[u8]) {
        let link = &mut self.link;
        let entry = Entry { request, data, moved: 0, sending: 0, corrupt: false, response: None };
        let Ok(slot) = link.table.0.insert(entry) else { panic!("a command was submitted to a full queue") };
        sqe.cid = cid_of(slot);
        let mut in_capsule = small.len() as u32;
        match data {
            Data::Out(length) if length <= self.in_capsule_max => {
                in_capsule = length;
                sqe.data = DataPointer::capsule(0, length);
            }
            Data::In(length) | Data::Out(length) => sqe.data = DataPointer::transport(length),
            Data::None if in_capsule > 0 => sqe.data = DataPointer::capsule(0, in_capsule),
            Data::None => sqe.data = DataPointer::transport(0),
        }
        let mut header = [0; wire_nvme::tcp::CAPSULE_CMD_SIZE];
        let layout = CapsuleCmd { sqe, data_length: in_capsule }.encode(&link.outgoing, &mut header);
        link.sender.push_header(&header, &layout);
        if in_capsule == 0 {
            return;
        }
        if small.is_empty() {
            link.push_data(slot, 0, in_capsule, &layout);
        } else {
            link.sender.push_bytes(small);
            if layout.data_digest {
                link.sender.push_bytes(&crc32c(small).to_le_bytes());
            }
        }
    }

    /// Sends what is queued.
    #[inline]
    pub(crate) fn flush<N: Network>(&mut self, network: &mut N) {
        if self.failure.is_some() || self.link.sender.is_empty() {
            return;
        }
        match self.link.sender.flush(network, self.connection, &mut self.link.table) {
            Flushed::Empty | Flushed::Blocked => self.link.complete_early(),
            Flushed::Failed(kind) => self.fail(Failure::Network(kind)),
        }
    }

    /// Takes in what arrived, answers what must be answered, and says if more may have arrived.
    pub(crate) fn receive<N: Network>(&mut self, network: &mut N, scratch: &mut [u8]) -> bool {
        if self.failure.is_some() {
            return false;
        }
        self.flush(network);
        let pumped = pump(&mut self.receiver, &mut self.link, network, self.connection, scratch);
        if self.link.state == State::Ready {
            self.receiver.set_framing(self.link.incoming);
        }
        self.flush(network);
        match pumped {
            Ok(Pumped::Drained | Pumped::Waiting) => return false,
            Ok(Pumped::More) => return true,
            Ok(Pumped::Closed) => self.fail(self.link.terminated.unwrap_or(Failure::Closed)),
            Ok(Pumped::Failed(kind)) => self.fail(self.link.terminated.unwrap_or(Failure::Network(kind))),
            Err(fatal) => {
                let failure = self.link.terminated.unwrap_or(Failure::Protocol(fatal));
                self.terminate(network, fatal);
                self.fail(failure);
            }
        }
        false
    }

    /// Takes the requests whose commands are over.
    #[inline]
    pub(crate) fn finished(&mut self) -> &mut Vec<Finished> {
        &mut self.link.finished
    }

    /// Tells the controller why we end the connection, as far as it takes that at once.
    fn terminate<N: Network>(&mut self, network: &mut N, fatal: Fatal) {
        let mut pdu = [0; wire_nvme::tcp::TERM_MAX];
        let term = TermReq { kind: PduType::H2cTermReq, fatal };
        let length = term.encode(self.receiver.header_in_error(), &mut pdu);
        self.link.sender.push_bytes(&pdu[..length]);
        let _ = self.link.sender.flush(network, self.connection, &mut self.link.table);
    }

    /// Ends the queue: every command in flight is over.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failure = Some(failure);
        let slots: Vec<Slot> = self.link.table.0.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if let Some(entry) = self.link.table.0.remove(slot) {
                // Nothing is in the kernel's hands: sends are copied when they are made.
                let cqe = Cqe::new(cid_of(slot), Status::HOST_PATHING_ERROR);
                self.link.finished.push(Finished { request: entry.request, cqe });
            }
        }
    }
}

impl Link {
    fn push_data(&mut self, slot: Slot, start: u32, length: u32, layout: &Layout) {
        self.sender.push_data(slot.index(), start, length, true);
        if layout.data_digest {
            let digest = crc32c(self.table.bytes(slot.index(), start as usize, length as usize));
            self.sender.push_bytes(&digest.to_le_bytes());
        }
        if let Some(entry) = self.table.0.get_mut(slot) {
            entry.sending += 1;
        }
    }

    fn initialized(&mut self, response: &IcResp) {
        let framing = |data_alignment_bytes| Framing {
            header_digest: response.header_digest,
            data_digest: response.data_digest,
            data_alignment_bytes,
        };
        self.outgoing = framing(response.controller_data_alignment_bytes);
        self.incoming = framing(4);
        self.h2c_data_max = response.h2c_data_max_bytes;
        self.state = State::Ready;
    }

    /// The controller asks for a part of a write's data (TCP 1.0, section 3.3.2.2).
    fn ready_to_transfer(&mut self, r2t: &R2t) -> Result<(), Fatal> {
        let slot = self.table.find(r2t.cccid).ok_or(Fatal::field(8))?;
        let entry = self.table.0.get_mut(slot).ok_or(Fatal::field(8))?;
        let Data::Out(total) = entry.data else { return Err(Fatal::of(FatalStatus::SequenceError)) };
        let end = r2t.offset.checked_add(r2t.length).filter(|end| *end <= total && r2t.length > 0);
        let Some(end) = end else { return Err(Fatal::of(FatalStatus::DataOutOfRange)) };
        if r2t.offset != entry.moved {
            return Err(Fatal::of(FatalStatus::DataOutOfRange));
        }
        entry.moved = end;
        let mut offset = r2t.offset;
        while offset < end {
            let length = self.h2c_data_max.min(end - offset);
            let last = offset + length == end;
            let mut header = [0; SHORT_SIZE];
            let pdu = H2cData { cccid: r2t.cccid, ttag: r2t.ttag, offset, length, last };
            let layout = pdu.encode(&self.outgoing, &mut header);
            self.sender.push_header(&header, &layout);
            self.push_data(slot, offset, length, &layout);
            offset += length;
        }
        Ok(())
    }

    /// A part of a read's data is about to arrive.
    #[inline]
    fn data_announced(&mut self, pdu: &C2hData, layout: &Layout) -> Result<Place, Fatal> {
        let slot = self.table.find(pdu.cccid).ok_or(Fatal::field(8))?;
        let entry = self.table.0.get_mut(slot).ok_or(Fatal::field(8))?;
        let Data::In(total) = entry.data else { return Err(Fatal::of(FatalStatus::SequenceError)) };
        if pdu.length != layout.data_length {
            return Err(Fatal::field(16));
        }
        let fits = pdu.offset == entry.moved && pdu.length <= total - entry.moved;
        if !fits || pdu.success && !pdu.last {
            return Err(Fatal::of(FatalStatus::DataOutOfRange));
        }
        let C2hData { offset, length, last, success, .. } = *pdu;
        self.current = Current::Data { slot, start: offset, length, last, success };
        Ok(Place::Here)
    }

    fn complete(&mut self, slot: Slot, cqe: Cqe) {
        let Some(entry) = self.table.0.get_mut(slot) else { return };
        if entry.sending > 0 {
            // Rare: an answer before the data has left, such as an error.
            if entry.response.replace(cqe).is_none() {
                self.early += 1;
            }
            return;
        }
        let short = matches!(entry.data, Data::In(total) if entry.moved < total);
        let status = match cqe.status {
            status if !status.is_success() => status,
            _ if entry.corrupt => Status::TRANSIENT_TRANSPORT_ERROR,
            _ if short && entry.request.op.has_data() => Status::DATA_TRANSFER_ERROR,
            status => status,
        };
        if let Some(entry) = self.table.0.remove(slot) {
            self.finished.push(Finished { request: entry.request, cqe: Cqe { status, ..cqe } });
        }
    }
}

impl Link {
    /// Completes commands whose response came before their data had left.
    fn complete_early(&mut self) {
        if self.early == 0 {
            return;
        }
        let ready: Vec<(Slot, Cqe)> = self
            .table
            .0
            .iter()
            .filter_map(|(slot, entry)| entry.response.filter(|_| entry.sending == 0).map(|cqe| (slot, cqe)))
            .collect();
        for (slot, cqe) in ready {
            self.early -= 1;
            self.complete(slot, cqe);
        }
    }
}

impl Consumer for Link {
    #[inline]
    fn header(&mut self, kind: PduType, header: &[u8], layout: &Layout) -> Result<Place, Fatal> {
        let out_of_turn = Fatal::of(FatalStatus::SequenceError);
        if kind == PduType::C2hTermReq {
            let short = header.first_chunk().expect("the layout gave this header its length");
            let fatal = TermReq::decode(kind, short).map_or_else(|fatal| fatal, |term| term.fatal);
            self.terminated = Some(Failure::Terminated(fatal));
            return Ok(Place::Nowhere);
        }
        if self.state == State::AwaitingIcResp {
            if kind != PduType::IcResp {
                return Err(out_of_turn);
            }
            let response = header.first_chunk().expect("the layout gave this header its length");
            let response = IcResp::decode(response)?;
            self.initialized(&response);
            return Ok(Place::Nowhere);
        }
        let Some(short) = header.first_chunk::<SHORT_SIZE>() else { return Err(out_of_turn) };
        match kind {
            PduType::C2hData => self.data_announced(&C2hData::decode(short), layout),
            PduType::CapsuleResp => {
                let cqe = CapsuleResp::decode(short);
                let slot = self.table.find(cqe.cid).ok_or(Fatal::field(20))?;
                self.current = Current::Response(slot, cqe);
                Ok(Place::Nowhere)
            }
            PduType::R2t => {
                self.ready_to_transfer(&R2t::decode(short))?;
                Ok(Place::Nowhere)
            }
            _ => {
                self.terminated = Some(Failure::Unexpected(kind));
                Err(out_of_turn)
            }
        }
    }

    #[inline]
    fn place(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let Current::Data { slot, start, .. } = self.current else { return &mut [] };
        let buffer = self.table.0.get_mut(slot).and_then(|entry| entry.request.buffer.as_mut());
        let start = start as usize + offset;
        &mut buffer.expect("a read keeps its buffer while its data arrives").as_mut_slice()
            [start..start + length]
    }

    #[inline]
    fn end(&mut self, digest_ok: bool) -> Result<(), Fatal> {
        match std::mem::replace(&mut self.current, Current::None) {
            Current::None => {}
            Current::Response(slot, cqe) => self.complete(slot, cqe),
            Current::Data { slot, start, length, last, success } => {
                if let Some(entry) = self.table.0.get_mut(slot) {
                    entry.moved = start + length;
                    entry.corrupt |= !digest_ok;
                }
                if last && success {
                    self.complete(slot, Cqe::new(cid_of(slot), Status::SUCCESS));
                }
            }
        }
        Ok(())
    }
}
