//! What NVMe/TCP does for a queue: response capsules, C2HData, R2T, and where received data goes.

use block_io::{Request, Status};
use dma::Data;
use nvme_controller::io_queue::{
    CommandData, CommandToken, HostData, HostLink, HostTransfer, IoQueue, IoTransport, SharedPart,
    Transferred,
};
use nvme_controller::sgl::{self, DataSource};
use nvme_tcp::{PduSender, SegmentSource};
use slots::Slot;
use sockets::SendPart;
use wire_nvme::Sqe;
use wire_nvme::digest::{Crc32c, crc32c};
use wire_nvme::tcp::{C2hData, CapsuleResp, Framing, R2t, SHORT_SIZE};

use super::connection::IncomingPdu;
use super::protocol::TcpContext;
use crate::fabrics::{FabricsLink, Responses};

/// Where the host has a command's data: in the capsule, or to be requested by R2T.
#[derive(Debug, Default)]
pub(crate) struct TcpLocation {
    /// First byte of the command's data, relative to the start of the in-capsule data.
    capsule_offset: Option<u32>,
    /// Bytes requested by R2T, and bytes of them received.
    pub(crate) requested_bytes: u32,
    pub(crate) received_bytes: u32,
    /// A data digest (DDGST) did not match.
    pub(crate) data_digest_error: bool,
}

impl TcpLocation {
    /// Data that was requested by R2T has not arrived.
    pub(crate) fn waits_for_host(&self) -> bool {
        self.received_bytes < self.requested_bytes
    }
}

/// The way to the host: the PDUs to send.
#[derive(Debug)]
pub(crate) struct TcpLink {
    pub(crate) sender: PduSender,
    /// Digests and alignment of PDUs that are sent.
    pub(crate) framing: Framing,
    /// A C2HData PDU with the SUCCESS flag replaces the response capsule of a successful read.
    pub(crate) c2h_success: bool,
    pub(crate) responses: Responses,
    /// Bytes of data, apart from data in capsules.
    pub(crate) data_bytes: u64,
}

impl TcpLink {
    /// The link of a connection before Connect.
    pub(crate) fn new() -> TcpLink {
        let mut sender = PduSender::default();
        sender.enable_owned_sends();
        TcpLink {
            sender,
            framing: Framing::PLAIN,
            c2h_success: false,
            responses: Responses::default(),
            data_bytes: 0,
        }
    }

    /// Queues an R2T for all of a command's data.
    fn send_r2t(&mut self, slot: Slot, cid: u16, length: u32) {
        let mut header = [0; SHORT_SIZE];
        let pdu = R2t { cccid: cid, ttag: slot.index() as u16, offset: 0, length };
        let layout = pdu.encode(&self.framing, &mut header);
        self.sender.push_header(&header, &layout);
        self.data_bytes += u64::from(length);
    }

    /// Queues data that lies in several slices.
    #[cold]
    fn push_slices(&mut self, slot: Slot, data: &CommandData, length: usize, with_digest: bool) {
        let (mut digest, mut at) = (Crc32c::new(), 0);
        for part in data.parts(0, length) {
            if with_digest {
                digest.update(part);
            }
            let next = at + part.len();
            // The slices are sent in order, so that the last frees them all.
            self.sender.push_data(slot.index(), at as u32, part.len() as u32, next == length);
            at = next;
        }
        if with_digest {
            self.sender.push_bytes(&digest.value().to_le_bytes());
        }
    }
}

impl FabricsLink for TcpLink {
    #[inline]
    fn responses(&mut self) -> &mut Responses {
        &mut self.responses
    }

    #[inline]
    fn respond(&mut self, cid: u16, status: Status, result: u64) {
        let mut header = [0; SHORT_SIZE];
        let layout =
            CapsuleResp { cqe: self.responses.cqe(cid, status, result) }.encode(&self.framing, &mut header);
        self.sender.push_header(&header, &layout);
    }

    fn connected(&mut self) {
        self.c2h_success &= self.responses.sq_flow_control_disabled;
    }
}

impl HostLink for TcpLink {
    type Location = TcpLocation;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.respond(token.answered(), status, result);
    }

    /// Queues C2HData, followed by a response capsule unless the SUCCESS flag replaces it.
    #[inline]
    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        _location: &TcpLocation,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        let cid = token.answered();
        let success = self.c2h_success && result == 0;
        let mut header = [0; SHORT_SIZE];
        let pdu = C2hData { cccid: cid, offset: 0, length: length as u32, last: true, success };
        let layout = pdu.encode(&self.framing, &mut header);
        self.sender.push_header(&header, &layout);
        self.data_bytes += length as u64;
        match data.contiguous() {
            Some(bytes) => {
                self.sender.push_data(slot.index(), 0, length as u32, true);
                if layout.data_digest {
                    self.sender.push_bytes(&crc32c(&bytes[..length]).to_le_bytes());
                }
            }
            None => self.push_slices(slot, data, length, layout.data_digest),
        }
        if !success {
            self.respond(cid, Status::SUCCESS, result);
        }
        Transferred::Later
    }
}

/// The data of a queue's commands, for the sender.
pub(crate) struct SendingData<'a>(pub(crate) &'a mut IoQueue<TcpLocation>);

impl SegmentSource for SendingData<'_> {
    #[inline]
    fn bytes(&self, slot: u32, start: usize, length: usize) -> &[u8] {
        self.0.sending(slot).part(start, length)
    }

    fn share(&mut self, slot: u32, start: usize, length: usize) -> SendPart {
        let data = self.0.sending_mut(slot).expect("a command stays until its data is sent");
        match data.share(start, length) {
            SharedPart::Buffer { buffer, start } => {
                SendPart::Buffer { buffer, start: start as u32, length: length as u32 }
            }
            SharedPart::Bytes(bytes) => SendPart::Bytes(bytes),
        }
    }

    #[inline]
    fn sent(&mut self, slot: u32) {
        self.0.sent(slot);
    }
}

/// A connection's link while a command is executed, with the resources that its group lends it.
pub(crate) struct TcpTransport<'a, 'b> {
    pub(crate) link: &'a mut TcpLink,
    pub(crate) incoming_pdu: &'a mut IncomingPdu,
    pub(crate) draining: &'a mut bool,
    pub(crate) context: &'a mut TcpContext<'b>,
    /// Flow identifier for fair queueing in the block device layer.
    pub(crate) flow: u16,
    /// Bytes of data in the capsule that is processed.
    pub(crate) capsule_bytes: u32,
}

impl HostLink for TcpTransport<'_, '_> {
    type Location = TcpLocation;

    #[inline]
    fn complete(&mut self, token: CommandToken, status: Status, result: u64) {
        self.link.complete(token, status, result);
    }

    #[inline]
    fn send(
        &mut self,
        token: CommandToken,
        slot: Slot,
        location: &TcpLocation,
        data: &CommandData,
        length: usize,
        result: u64,
    ) -> Transferred {
        self.link.send(token, slot, location, data, length, result)
    }
}

impl IoTransport for TcpTransport<'_, '_> {
    #[inline]
    fn locate(&mut self, sqe: &Sqe, transfer: HostTransfer) -> Result<HostData<TcpLocation>, Status> {
        let moved = |location, room, immediate| Ok(HostData::Moved { location, room, immediate });
        if transfer.to_host {
            sgl::to_host(sqe.data)?;
            return moved(TcpLocation::default(), transfer.bytes, false);
        }
        let source = sgl::from_host(sqe.data, self.capsule_bytes)?;
        if source.length() != transfer.bytes {
            return Err(Status::DATA_SGL_LENGTH_INVALID.do_not_retry());
        }
        match source {
            DataSource::Transport { .. } => moved(TcpLocation::default(), transfer.bytes, false),
            DataSource::Capsule { offset, .. } => {
                let location = TcpLocation { capsule_offset: Some(offset), ..TcpLocation::default() };
                moved(location, self.capsule_bytes, true)
            }
        }
    }

    /// Requests the data by R2T, or names the memory that the rest of the capsule goes to.
    #[inline]
    fn receive(
        &mut self,
        slot: Slot,
        cid: u16,
        location: &mut TcpLocation,
        into: &mut CommandData,
    ) -> Result<Transferred, Status> {
        match location.capsule_offset {
            Some(offset) => *self.incoming_pdu = IncomingPdu::Capsule { slot, offset },
            None => {
                location.requested_bytes = into.len() as u32;
                self.link.send_r2t(slot, cid, location.requested_bytes);
            }
        }
        Ok(Transferred::Later)
    }

    #[inline]
    fn take_data(&mut self, bytes: usize) -> Option<Data> {
        let data = self.context.pool.take_data(bytes);
        if data.is_none() {
            self.context.protocol.core.totals.waited_for_buffer();
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
