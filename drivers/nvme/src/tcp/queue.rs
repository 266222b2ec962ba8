//! One queue pair over one TCP connection.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer.
//! The command identifier is the slot's index with some bits of its generation. A PDU from a faulty or hostile
//! controller for a command that has completed or never existed therefore closes the connection instead of touching
//! memory that has been reused.

use std::io::{ErrorKind, IoSliceMut};

use block_io::{Request, Status};
use dma::Data;
use nvme_tcp::{
    DataParts, DataPlacement, FlushStatus, PduConsumer, PduReceiver, PduSender, ReceiveStatus, SegmentSource,
    receive_pdus,
};
use slots::{Slab, Slot};
use sockets::{ByteStream, ConnectionId, HandshakeStatus, Network, SendPart, StreamLayer};
use tls::TlsLayer;
use wire_nvme::digest::{Crc32c, crc32c};
use wire_nvme::tcp::{
    C2hData, CapsuleCmd, CapsuleResp, FatalError, FatalStatus, Framing, H2cData, IC_SIZE, IcReq, IcResp,
    PduLayout, PduType, R2t, SHORT_SIZE, TermReq,
};
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::error::ControllerFailure;
use crate::fabrics::{CommandData, FabricsCompletion};

/// Most commands on a queue: 10 bits of slot index.
pub(crate) const DEPTH_MAX: u32 = 1024;
const INDEX_BITS: u32 = DEPTH_MAX.ilog2();

/// A queue pair over one TCP connection: protocol state without the socket, which callers pass as a [`Network`].
///
/// [`submit`](Self::submit) queues a command, [`flush`](Self::flush) sends, [`receive`](Self::receive) processes what
/// arrived, and [`completions`](Self::completions) returns the completed requests. After
/// [`fail`](Self::fail), or a protocol or network error, all commands complete with
/// [`Status::HOST_PATHING_ERROR`] and `failure` is set.
pub(crate) struct TcpQueue {
    connection: ConnectionId,
    /// The layer below, with a key of TLS.
    tls: Option<Box<TlsLayer>>,
    receiver: PduReceiver,
    protocol: QueueProtocol,
    /// Most bytes of in-capsule data.
    in_capsule_max: u32,
    pub(crate) failure: Option<ControllerFailure>,
}

/// Protocol state of the queue: everything but the receiver, which calls into it as a [`PduConsumer`].
struct QueueProtocol {
    table: InFlightTable,
    sender: PduSender,
    completions: Vec<FabricsCompletion>,
    state: HandshakeState,
    /// PDU framing per direction, as negotiated by ICReq and ICResp.
    outgoing: Framing,
    incoming: Framing,
    h2c_data_max: u32,
    current: CurrentPdu,
    /// Number of commands whose response arrived before all their data was sent.
    early_responses: u32,
    terminated: Option<ControllerFailure>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum HandshakeState {
    AwaitingIcResp,
    Ready,
}

/// The PDU being received.
#[derive(Clone, Copy)]
enum CurrentPdu {
    None,
    Data { slot: Slot, start: u32, length: u32, last: bool, success: bool },
    Response(Slot, Cqe),
}

struct InFlightTable(Slab<InFlightCommand>);

struct InFlightCommand {
    request: Request<Data>,
    data: CommandData,
    /// Bytes received of a read, or requested by R2T of a write.
    transferred: u32,
    /// Data segments still queued for sending, which refer to the buffer.
    unsent_segments: u32,
    /// A data digest did not match.
    corrupt: bool,
    /// An owned send shares the data, which is read-only meanwhile.
    is_shared: bool,
    /// A response that arrived while data was still queued.
    response: Option<Cqe>,
}

impl InFlightCommand {
    /// The network has dropped its parts of the data.
    #[cold]
    fn make_writable(&mut self) {
        self.is_shared = false;
        if let Some(data) = self.request.data_mut() {
            data.make_writable();
        }
    }
}

fn cid_of(slot: Slot) -> u16 {
    let generation = (slot.to_bits() >> 32) as u32;
    (slot.index() | generation << INDEX_BITS) as u16
}

impl InFlightTable {
    fn find(&self, cid: u16) -> Option<Slot> {
        let slot = self.0.slot_at(u32::from(cid) & (DEPTH_MAX - 1))?;
        (cid_of(slot) == cid).then_some(slot)
    }
}

impl SegmentSource for InFlightTable {
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        let entry = self.0.slot_at(slot).and_then(|slot| self.0.get(slot));
        let data = entry.and_then(|entry| entry.request.data());
        match data.expect("a slot with data queued keeps its data") {
            Data::One(buffer) => &buffer.as_slice()[start..start + length],
            many => many.parts(start, length).next().unwrap_or_default(),
        }
    }

    fn share(&mut self, slot: u32, start: usize, length: usize) -> SendPart {
        let entry = self.0.slot_at(slot).and_then(|slot| self.0.get_mut(slot));
        let entry = entry.expect("a slot with data queued has its command");
        entry.is_shared = true;
        let part = entry.request.data_mut().and_then(|data| data.slice_at_mut(start));
        let (buffer, start) = part.expect("a slot with data queued keeps its data");
        // What cannot be made writable again is copied, unless it is not writable anyway.
        if buffer.is_writable() && !buffer.is_whole() {
            return SendPart::Bytes(buffer.as_slice()[start..start + length].to_vec());
        }
        SendPart::Buffer { buffer: buffer.share(), start: start as u32, length: length as u32 }
    }

    fn sent(&mut self, slot: u32) {
        if let Some(entry) = self.0.slot_at(slot).and_then(|slot| self.0.get_mut(slot)) {
            entry.unsent_segments -= 1;
            if entry.is_shared && entry.unsent_segments == 0 {
                entry.make_writable();
            }
        }
    }
}

impl TcpQueue {
    /// Creates a queue on a connection and queues its ICReq.
    pub(crate) fn new(
        connection: ConnectionId,
        depth: u32,
        header_digest: bool,
        data_digest: bool,
    ) -> TcpQueue {
        let mut sender = PduSender::default();
        let mut request = [0; IC_SIZE];
        IcReq { host_data_alignment_bytes: 4, header_digest, data_digest, r2t_max: 1 }.encode(&mut request);
        sender.push_bytes(&request);
        TcpQueue {
            connection,
            tls: None,
            receiver: PduReceiver::default(),
            protocol: QueueProtocol {
                table: InFlightTable(Slab::with_capacity(depth.min(DEPTH_MAX))),
                sender,
                completions: Vec::with_capacity(depth as usize),
                state: HandshakeState::AwaitingIcResp,
                outgoing: Framing::PLAIN,
                incoming: Framing::PLAIN,
                h2c_data_max: 0,
                current: CurrentPdu::None,
                early_responses: 0,
                terminated: None,
            },
            // Admin and Connect commands may carry 8192 bytes before IOCCSZ is known (TCP 1.0, section 3.3.2.2);
            // Connect needs 1024.
            in_capsule_max: 8192,
            failure: None,
        }
    }

    /// Puts TLS between the connection and the queue, before anything is sent.
    pub(crate) fn secure(&mut self, layer: TlsLayer) {
        self.tls = Some(Box::new(layer));
    }

    pub(crate) fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// Whether commands may be sent.
    pub(crate) fn is_ready(&self) -> bool {
        self.protocol.state == HandshakeState::Ready && self.failure.is_none()
    }

    pub(crate) fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes;
    }

    pub(crate) fn is_full(&self) -> bool {
        self.protocol.table.0.is_full()
    }

    /// Commands that can be submitted now.
    pub(crate) fn room(&self) -> usize {
        self.protocol.table.0.capacity() - self.protocol.table.0.len()
    }

    /// Queues a command for `request`; `inline_data` is in-capsule data without a buffer. The queue must not be full.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        mut sqe: Sqe,
        request: Request<Data>,
        data: CommandData,
        inline_data: &[u8],
    ) {
        let protocol = &mut self.protocol;
        let entry = InFlightCommand {
            request,
            data,
            transferred: 0,
            unsent_segments: 0,
            corrupt: false,
            is_shared: false,
            response: None,
        };
        let Ok(slot) = protocol.table.0.insert(entry) else {
            panic!("a command was submitted to a full queue")
        };
        sqe.cid = cid_of(slot);
        let mut in_capsule = inline_data.len() as u32;
        match data {
            CommandData::Out(length) if length <= self.in_capsule_max => {
                in_capsule = length;
                sqe.data = DataPointer::capsule(0, length);
            }
            CommandData::In(length) | CommandData::Out(length) => sqe.data = DataPointer::transport(length),
            CommandData::None if in_capsule > 0 => sqe.data = DataPointer::capsule(0, in_capsule),
            CommandData::None => sqe.data = DataPointer::transport(0),
        }
        let mut header = [0; wire_nvme::tcp::CAPSULE_CMD_SIZE];
        let layout = CapsuleCmd { sqe, data_length: in_capsule }.encode(&protocol.outgoing, &mut header);
        protocol.sender.push_header(&header, &layout);
        if in_capsule == 0 {
            return;
        }
        if inline_data.is_empty() {
            protocol.push_data(slot, 0, in_capsule, &layout);
        } else {
            protocol.sender.push_bytes(inline_data);
            if layout.data_digest {
                protocol.sender.push_bytes(&crc32c(inline_data).to_le_bytes());
            }
        }
    }

    /// Sends queued PDUs until the socket blocks.
    #[inline]
    pub(crate) fn flush<N: Network>(&mut self, network: &mut N) {
        if self.failure.is_some() {
            return;
        }
        if self.tls.is_some() {
            return self.flush_secure(network);
        }
        if self.protocol.sender.is_empty() {
            return;
        }
        match self.protocol.sender.flush(&mut network.stream(self.connection), &mut self.protocol.table) {
            FlushStatus::Empty | FlushStatus::Blocked => self.protocol.complete_early(),
            FlushStatus::Failed(kind) => self.fail(ControllerFailure::Network(kind)),
        }
    }

    /// Processes received PDUs and sends responses to R2T; returns whether more data may be available.
    pub(crate) fn receive<N: Network>(&mut self, network: &mut N, scratch: &mut [u8]) -> bool {
        if self.failure.is_some() {
            return false;
        }
        if self.awaits_tls() && !self.handshake(network, scratch) {
            return false;
        }
        self.flush(network);
        let stream = &mut network.stream(self.connection);
        let pumped = match &mut self.tls {
            None => receive_pdus(&mut self.receiver, &mut self.protocol, stream, scratch),
            Some(tls) => {
                receive_pdus(&mut self.receiver, &mut self.protocol, &mut tls.stream(stream), scratch)
            }
        };
        if pumped == Ok(ReceiveStatus::Empty) {
            return false;
        }
        if self.protocol.state == HandshakeState::Ready {
            self.receiver.set_framing(self.protocol.incoming);
        }
        self.flush(network);
        // A controller that has terminated the connection answers nothing more, whether it closes or not.
        if let (Ok(_), Some(failure)) = (&pumped, self.protocol.terminated) {
            self.fail(failure);
            return false;
        }
        match pumped {
            Ok(ReceiveStatus::Empty | ReceiveStatus::Drained | ReceiveStatus::Waiting) => return false,
            Ok(ReceiveStatus::More) => return true,
            Ok(ReceiveStatus::Closed) => self.fail(ControllerFailure::Closed),
            Ok(ReceiveStatus::Failed(kind)) => self.fail(self.stream_failure(kind)),
            Err(fatal) => {
                self.terminate(network, fatal);
                self.fail(ControllerFailure::Protocol(fatal));
            }
        }
        false
    }

    /// Lets the network send data without a copy; the caller passes on the ends of such sends.
    pub(crate) fn enable_owned_sends(&mut self) {
        self.protocol.sender.enable_owned_sends();
    }

    /// Whether the network uses data of commands, which after a failure complete when it does not any more.
    pub(crate) fn has_owned_sends(&self) -> bool {
        self.protocol.sender.owned_sends() > 0
    }

    /// An owned send has ended.
    pub(crate) fn owned_sent(&mut self, tag: u64, result: Result<(), ErrorKind>) {
        let QueueProtocol { sender, table, .. } = &mut self.protocol;
        sender.owned_sent(tag, table);
        self.protocol.complete_early();
        if let Err(kind) = result
            && self.failure.is_none()
        {
            self.fail(ControllerFailure::Network(kind));
        }
    }

    /// Completed requests, for the caller to drain.
    #[inline]
    pub(crate) fn completions(&mut self) -> &mut Vec<FabricsCompletion> {
        &mut self.protocol.completions
    }

    /// Sends H2CTermReq with the reason, if the socket accepts it at once.
    fn terminate<N: Network>(&mut self, network: &mut N, fatal: FatalError) {
        let mut pdu = [0; wire_nvme::tcp::TERM_MAX];
        let term = TermReq { kind: PduType::H2cTermReq, fatal };
        let length = term.encode(self.receiver.failed_header(), &mut pdu);
        self.protocol.sender.push_bytes(&pdu[..length]);
        self.flush(network);
    }

    fn awaits_tls(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| !tls.is_established())
    }

    /// Continues the handshake of TLS; returns whether it is done.
    #[cold]
    fn handshake<N: Network>(&mut self, network: &mut N, scratch: &mut [u8]) -> bool {
        let Some(tls) = &mut self.tls else { return true };
        match tls.handshake(&mut network.stream(self.connection), scratch) {
            HandshakeStatus::Done => return true,
            HandshakeStatus::Pending => {}
            HandshakeStatus::Closed => self.fail(ControllerFailure::TlsClosed),
            HandshakeStatus::Failed(kind) => self.fail(self.stream_failure(kind)),
        }
        false
    }

    /// Sends queued PDUs, and records that the socket has not taken yet, once the handshake is done.
    #[cold]
    fn flush_secure<N: Network>(&mut self, network: &mut N) {
        let Some(tls) = self.tls.as_mut().filter(|tls| tls.is_established()) else { return };
        let mut below = network.stream(self.connection);
        let mut plain = tls.stream(&mut below);
        let sent = match self.protocol.sender.is_empty() {
            true => FlushStatus::Empty,
            false => self.protocol.sender.flush(&mut plain, &mut self.protocol.table),
        };
        match (sent, plain.flush()) {
            (FlushStatus::Failed(kind), _) | (_, sockets::FlushStatus::Failed(kind)) => {
                self.fail(self.stream_failure(kind));
            }
            _ => self.protocol.complete_early(),
        }
    }

    /// Why the stream has failed.
    fn stream_failure(&self, kind: ErrorKind) -> ControllerFailure {
        let failure = self.tls.as_ref().and_then(|tls| tls.failure());
        failure.map_or(ControllerFailure::Network(kind), ControllerFailure::Tls)
    }

    /// Fails the queue: commands in flight complete with [`Status::HOST_PATHING_ERROR`], those whose data an owned send
    /// uses when it has ended.
    pub(crate) fn fail(&mut self, failure: ControllerFailure) {
        // What the controller has said, or what happened first: a connection that was refused looks closed
        // afterwards.
        self.failure = self.protocol.terminated.or(self.failure).or(Some(failure));
        let QueueProtocol { table, sender, completions, early_responses, .. } = &mut self.protocol;
        let in_use = sender.abandon();
        let slots: Vec<Slot> = table.0.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            let cqe = Cqe::new(cid_of(slot), Status::HOST_PATHING_ERROR);
            if in_use.binary_search(&slot.index()).is_ok() {
                let Some(entry) = table.0.get_mut(slot) else { continue };
                entry.unsent_segments = 1;
                *early_responses += u32::from(entry.response.replace(cqe).is_none());
            } else if let Some(entry) = table.0.remove(slot) {
                // The kernel has no reference to the buffer: the socket has copied what was sent.
                *early_responses -= u32::from(entry.response.is_some());
                completions.push(FabricsCompletion { request: entry.request, cqe });
            }
        }
    }
}

impl QueueProtocol {
    fn push_data(&mut self, slot: Slot, start: u32, length: u32, layout: &PduLayout) {
        let Some(entry) = self.table.0.get_mut(slot) else { return };
        if let Some(data @ Data::Many(_)) = entry.request.data() {
            // Only the last part counts: parts are sent in order.
            let (mut digest, mut at, end) = (Crc32c::new(), start, start + length);
            for part in data.parts(start as usize, length as usize) {
                if layout.data_digest {
                    digest.update(part);
                }
                let next = at + part.len() as u32;
                self.sender.push_data(slot.index(), at, next - at, next == end);
                at = next;
            }
            if layout.data_digest {
                self.sender.push_bytes(&digest.value().to_le_bytes());
            }
            entry.unsent_segments += 1;
            return;
        }
        entry.unsent_segments += 1;
        self.sender.push_data(slot.index(), start, length, true);
        if layout.data_digest {
            let digest = crc32c(self.table.bytes(slot.index(), start as usize, length as usize));
            self.sender.push_bytes(&digest.to_le_bytes());
        }
    }

    fn on_ic_resp(&mut self, response: &IcResp) {
        let framing = |data_alignment_bytes| Framing {
            header_digest: response.header_digest,
            data_digest: response.data_digest,
            data_alignment_bytes,
        };
        self.outgoing = framing(response.controller_data_alignment_bytes);
        self.incoming = framing(4);
        self.h2c_data_max = response.h2c_data_max_bytes;
        self.state = HandshakeState::Ready;
    }

    /// Handles R2T: queues the requested part of a write's data (TCP 1.0, section 3.3.2.2).
    fn on_r2t(&mut self, r2t: &R2t) -> Result<(), FatalError> {
        let slot = self.table.find(r2t.cccid).ok_or(FatalError::field(8))?;
        let entry = self.table.0.get_mut(slot).ok_or(FatalError::field(8))?;
        let CommandData::Out(total) = entry.data else {
            return Err(FatalError::from_status(FatalStatus::SequenceError));
        };
        let end = r2t.offset.checked_add(r2t.length).filter(|end| *end <= total && r2t.length > 0);
        let Some(end) = end else { return Err(FatalError::from_status(FatalStatus::DataOutOfRange)) };
        if r2t.offset != entry.transferred {
            return Err(FatalError::from_status(FatalStatus::DataOutOfRange));
        }
        entry.transferred = end;
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

    /// Handles a C2HData header: checks that its data is the next part of a read.
    #[inline]
    fn on_c2h_data(&mut self, pdu: &C2hData, layout: &PduLayout) -> Result<DataPlacement, FatalError> {
        let slot = self.table.find(pdu.cccid).ok_or(FatalError::field(8))?;
        let entry = self.table.0.get_mut(slot).ok_or(FatalError::field(8))?;
        let CommandData::In(total) = entry.data else {
            return Err(FatalError::from_status(FatalStatus::SequenceError));
        };
        if pdu.length != layout.data_length {
            return Err(FatalError::field(16));
        }
        let fits = pdu.offset == entry.transferred && pdu.length <= total - entry.transferred;
        if !fits || pdu.success && !pdu.last {
            return Err(FatalError::from_status(FatalStatus::DataOutOfRange));
        }
        let C2hData { offset, length, last, success, .. } = *pdu;
        self.current = CurrentPdu::Data { slot, start: offset, length, last, success };
        Ok(DataPlacement::Buffer)
    }

    fn complete(&mut self, slot: Slot, cqe: Cqe) {
        let Some(entry) = self.table.0.get_mut(slot) else { return };
        if entry.unsent_segments > 0 {
            // Uncommon: a response before all data was sent, such as an error.
            if entry.response.replace(cqe).is_none() {
                self.early_responses += 1;
            }
            return;
        }
        let short = matches!(entry.data, CommandData::In(total) if entry.transferred < total);
        let status = match cqe.status {
            status if !status.is_success() => status,
            _ if entry.corrupt => Status::TRANSIENT_TRANSPORT_ERROR,
            _ if short && entry.request.op.has_data() => Status::DATA_TRANSFER_ERROR,
            status => status,
        };
        if let Some(entry) = self.table.0.remove(slot) {
            self.completions.push(FabricsCompletion { request: entry.request, cqe: Cqe { status, ..cqe } });
        }
    }
}

impl QueueProtocol {
    /// Completes commands whose response arrived early and whose data has been sent by now.
    fn complete_early(&mut self) {
        if self.early_responses == 0 {
            return;
        }
        let ready: Vec<(Slot, Cqe)> = self
            .table
            .0
            .iter()
            .filter_map(|(slot, entry)| {
                entry.response.filter(|_| entry.unsent_segments == 0).map(|cqe| (slot, cqe))
            })
            .collect();
        for (slot, cqe) in ready {
            self.early_responses -= 1;
            self.complete(slot, cqe);
        }
    }
}

impl PduConsumer for QueueProtocol {
    #[inline]
    fn header(
        &mut self,
        kind: PduType,
        header: &[u8],
        layout: &PduLayout,
    ) -> Result<DataPlacement, FatalError> {
        let out_of_turn = FatalError::from_status(FatalStatus::SequenceError);
        if kind == PduType::C2hTermReq {
            let short = header.first_chunk().expect("the layout gave this header its length");
            let fatal = TermReq::decode(kind, short).map_or_else(|fatal| fatal, |term| term.fatal);
            self.terminated = Some(ControllerFailure::Terminated(fatal));
            return Ok(DataPlacement::Discard);
        }
        if self.state == HandshakeState::AwaitingIcResp {
            if kind != PduType::IcResp {
                return Err(out_of_turn);
            }
            let response = header.first_chunk().expect("the layout gave this header its length");
            let response = IcResp::decode(response)?;
            self.on_ic_resp(&response);
            return Ok(DataPlacement::Discard);
        }
        let Some(short) = header.first_chunk::<SHORT_SIZE>() else { return Err(out_of_turn) };
        match kind {
            PduType::C2hData => self.on_c2h_data(&C2hData::decode(short), layout),
            PduType::CapsuleResp => {
                let cqe = CapsuleResp::decode(short);
                let slot = self.table.find(cqe.cid).ok_or(FatalError::field(20))?;
                self.current = CurrentPdu::Response(slot, cqe);
                Ok(DataPlacement::Discard)
            }
            PduType::R2t => {
                self.on_r2t(&R2t::decode(short))?;
                Ok(DataPlacement::Discard)
            }
            _ => {
                self.terminated = Some(ControllerFailure::Unexpected(kind));
                Err(out_of_turn)
            }
        }
    }

    #[inline]
    fn data_buffer(&mut self, offset: usize, length: usize) -> &mut [u8] {
        let CurrentPdu::Data { slot, start, .. } = self.current else { return &mut [] };
        let data = self.table.0.get_mut(slot).and_then(|entry| entry.request.data_mut());
        let start = start as usize + offset;
        match data.expect("a read keeps its data while it arrives") {
            Data::One(buffer) => &mut buffer.as_mut_slice()[start..start + length],
            many => many.parts_mut(start, length).next().unwrap_or_default(),
        }
    }

    fn data_buffers<'c>(&'c mut self, offset: usize, length: usize, parts: &mut DataParts<'c>) {
        let CurrentPdu::Data { slot, start, .. } = self.current else { return };
        let Some(entry) = self.table.0.get_mut(slot) else { return };
        let Some(data) = entry.request.data_mut() else { return };
        let slices = data.parts_mut(start as usize + offset, length);
        parts.extend(slices.take(parts.remaining_capacity()).map(IoSliceMut::new));
    }

    #[inline]
    fn pdu_complete(&mut self, digest_ok: bool) -> Result<(), FatalError> {
        match std::mem::replace(&mut self.current, CurrentPdu::None) {
            CurrentPdu::None => {}
            CurrentPdu::Response(slot, cqe) => self.complete(slot, cqe),
            CurrentPdu::Data { slot, start, length, last, success } => {
                if let Some(entry) = self.table.0.get_mut(slot) {
                    entry.transferred = start + length;
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
