//! One NVMe/TCP connection of the target: PDUs in, requests to devices, PDUs out.
//!
//! Sans-IO but for [`Connection::receive`] and [`Connection::flush`], which move bytes between the
//! network and the state machine. What a connection needs from its core is lent to it as [`Lent`].

use controller::io::Pairing;
use controller::reservation::{Parked, Ticket};
use net::{ConnectionId, Network};
use nvme_tcp::{Flushed, Progress, Pumped, Receiver, Sender, pump};
use ring::{Completion, Status};
use slots::Slot;
use wire_nvme::Cqe;
use wire_nvme::digest::crc32c;
use wire_nvme::tcp::{C2hData, CapsuleResp, Fatal, Framing, PduType, R2t, SHORT_SIZE, TERM_MAX, TermReq};

use crate::command::{Command, Commands, Data, Work};
use crate::group::Lent;
use crate::handler::Handler;
use crate::queue::Role;

/// How long answers to what is under way are waited for when a queue is to end. Far less than hosts wait for
/// a controller to become ready (CAP.TO).
pub(crate) const LEAVE_NS_MAX: u64 = 3_000_000_000;

/// A connection.
pub(crate) struct Connection {
    pub(crate) id: ConnectionId,
    pub(crate) receiver: Receiver,
    pub(crate) state: State,
}

/// Everything of a connection but its receiver, which calls into this.
pub(crate) struct State {
    pub(crate) role: Role,
    pub(crate) commands: Commands,
    pub(crate) sender: Sender,
    /// What we send, and what we receive.
    pub(crate) outgoing: Framing,
    pub(crate) incoming: Framing,
    pub(crate) current: Current,
    /// This connection's name in tags of requests; see [`crate::group`].
    pub(crate) tag_base: u64,
    /// Which of the flows of a device this connection is.
    pub(crate) flow: u16,
    /// Where it came in.
    pub(crate) port: controller::Port,
    /// Who it is.
    pub(crate) peer: std::net::SocketAddr,
    /// When the handshake must be over.
    pub(crate) deadline_ns: u64,
    /// The network took less than we have.
    pub(crate) blocked: bool,
    /// Submission queue entries, and how far we have taken them.
    pub(crate) entries: u32,
    pub(crate) head: u16,
    /// The host does not look at SQHD.
    pub(crate) flow_control_off: bool,
    /// A read's data may say that the read succeeded, because the response would say no more.
    pub(crate) data_tells_success: bool,
    /// Commands that wait for a buffer, oldest first.
    pub(crate) aside: std::collections::VecDeque<Slot>,
    /// Whether the last command was the first of a fused operation.
    pub(crate) pairing: Pairing<Slot>,
    /// Copies whose next piece can be begun.
    pub(crate) going: Vec<Slot>,
    /// Reservation commands that are answered when there is nothing left to wait for.
    pub(crate) parked: Parked<Slot>,
    /// Others wait for what devices have of it; until that is back it takes no more commands.
    pub(crate) drains: Vec<Ticket>,
    /// It takes no more commands, and ends when those that it has are answered, or at this time.
    pub(crate) leaving_until_ns: Option<u64>,
    /// The host has told that it ends the connection. What it was stays until then: an I/O queue is not
    /// free while devices have its requests, and an admin queue takes others with it.
    pub(crate) terminated: bool,
    /// The controller's I/O queues, on whichever cores, are to look whether they are still wanted.
    pub(crate) close_io_queues: bool,
    pub(crate) stats: Counters,
}

/// The PDU whose data is arriving.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Current {
    None,
    /// Data that was asked for by R2T, from byte `start` of the command's data.
    Data {
        slot: Slot,
        start: u32,
        length: u32,
    },
    /// The data of a capsule; the command's own starts at `offset` of it.
    Capsule {
        slot: Slot,
        offset: u32,
    },
}

/// What went through a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commands: u64,
    pub(crate) errors: u64,
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The host closed it.
    Closed,
    /// The network failed.
    Network(std::io::ErrorKind),
    /// The host broke the protocol.
    Protocol(Fatal),
    /// The host said that it ends the connection.
    Terminated,
    /// The handshake took too long.
    Timeout,
    /// The controller that it belongs to is gone.
    Controller,
}

impl End {
    /// What the operator is told, where there is something to tell.
    pub(crate) fn complaint(self) -> Option<String> {
        match self {
            End::Protocol(fatal) => {
                Some(format!("broke the protocol: {:?} at {:#x}", fatal.status, fatal.information))
            }
            End::Timeout => Some("did not connect in time".into()),
            End::Closed | End::Network(_) | End::Terminated | End::Controller => None,
        }
    }
}

impl Connection {
    /// Takes in what has arrived. `Ok(true)` if more may have.
    pub(crate) fn receive<N: Network>(
        &mut self,
        network: &mut N,
        lent: &mut Lent<'_>,
        scratch: &mut [u8],
    ) -> Result<bool, End> {
        self.state.blocked = false;
        let Connection { id, receiver, state } = self;
        let pumped = pump(receiver, &mut Handler { state, lent }, network, *id, scratch);
        self.after(pumped)
    }

    /// Tries again what had no room. `Ok(true)` if bytes may have come meanwhile.
    pub(crate) fn resume(&mut self, lent: &mut Lent<'_>) -> Result<bool, End> {
        let Connection { receiver, state, .. } = self;
        let mut handler = Handler { state, lent };
        handler.go_on();
        handler.serve_aside();
        if !receiver.is_waiting() {
            return Ok(false);
        }
        match receiver.resume(&mut handler) {
            Ok(Progress::Ready) => self.after(Ok(Pumped::More)),
            Ok(Progress::Waiting) => Ok(false),
            Err(fatal) => self.after(Err(fatal)),
        }
    }

    /// Whether something waits for room.
    pub(crate) fn is_waiting(&self) -> bool {
        self.receiver.is_waiting() || !self.state.aside.is_empty()
    }

    /// Of a connection that leaves: whether there is nothing more to say.
    ///
    /// Not waited for are event requests, and data that is behind a command which is not taken any more. The
    /// admin queue goes last: a host that sees it go gives up what it has on the others.
    pub(crate) fn has_answered(&self) -> bool {
        let State { role, commands, sender, .. } = &self.state;
        let is_last = match role {
            Role::Admin(controller) => controller.association().queues().is_empty(),
            _ => true,
        };
        is_last && sender.is_empty() && !commands.are_under_way(self.receiver.is_waiting())
    }

    fn after(&mut self, pumped: Result<Pumped, Fatal>) -> Result<bool, End> {
        // Both directions change with ICReq, which is a PDU of its own and answered before the next.
        self.receiver.set_framing(self.state.incoming);
        if self.state.terminated {
            return Err(End::Terminated);
        }
        match pumped {
            Ok(Pumped::Drained | Pumped::Waiting) => Ok(false),
            Ok(Pumped::More) => Ok(true),
            Ok(Pumped::Closed) => Err(End::Closed),
            Ok(Pumped::Failed(kind)) => Err(End::Network(kind)),
            Err(fatal) => {
                self.terminate(fatal);
                Err(End::Protocol(fatal))
            }
        }
    }

    /// Tells the host why the connection ends (TCP 1.0, section 3.5.3).
    fn terminate(&mut self, fatal: Fatal) {
        let mut pdu = [0; TERM_MAX];
        let term = TermReq { kind: PduType::C2hTermReq, fatal };
        let length = term.encode(self.receiver.header_in_error(), &mut pdu);
        self.state.sender.push_bytes(&pdu[..length]);
    }

    /// Sends what is queued, as far as the network takes it.
    #[inline]
    pub(crate) fn flush<N: Network>(&mut self, network: &mut N) -> Result<(), End> {
        let state = &mut self.state;
        match state.sender.flush(network, self.id, &mut state.commands) {
            Flushed::Empty => state.blocked = false,
            Flushed::Blocked => state.blocked = true,
            Flushed::Failed(kind) => return Err(End::Network(kind)),
        }
        Ok(())
    }
}

impl State {
    /// The tag of a request for the command in `slot`.
    #[inline]
    pub(crate) fn tag(&self, slot: Slot) -> ring::Tag {
        let generation = slot.to_bits() >> 32 & 0xffff;
        ring::Tag(self.tag_base | generation << 16 | u64::from(slot.index()))
    }

    /// The command that a tag names, unless it is over.
    #[inline]
    pub(crate) fn slot_of(&mut self, tag: ring::Tag) -> Option<Slot> {
        let (slot, _) = self.commands.by_index(tag.0 as u32 & 0xffff)?;
        (slot.to_bits() >> 32 & 0xffff == tag.0 >> 16 & 0xffff).then_some(slot)
    }

    /// Whether commands have to wait.
    #[inline]
    pub(crate) fn takes_nothing(&self) -> bool {
        self.leaving_until_ns.is_some() || !self.drains.is_empty()
    }

    /// Takes no more commands from now on; the connection ends when those that it has are answered.
    pub(crate) fn leave(&mut self, now_ns: u64) {
        self.leaving_until_ns.get_or_insert(now_ns.saturating_add(LEAVE_NS_MAX));
    }

    /// Answers what has nothing left to wait for.
    pub(crate) fn unpark(&mut self) {
        while let Some((slot, status)) = self.parked.pop_done() {
            self.finish(slot, status, 0);
        }
    }

    /// Queues a response capsule.
    #[inline]
    pub(crate) fn respond(&mut self, cid: u16, status: Status, result: u64) {
        self.stats.errors += u64::from(!status.is_success());
        let mut header = [0; SHORT_SIZE];
        // Without flow control SQHD means nothing and is all ones (Base 2.0, section 6.3: CATTR).
        let sqhd = if self.flow_control_off { 0xffff } else { self.head };
        let cqe = Cqe { sqhd, ..Cqe::new(cid, status).with_result(result) };
        let layout = CapsuleResp { cqe }.encode(&self.outgoing, &mut header);
        self.sender.push_header(&header, &layout);
    }

    /// Ends a command with a response and no data.
    #[inline]
    pub(crate) fn finish(&mut self, slot: Slot, status: Status, result: u64) {
        if let Some(command) = self.commands.get_mut(slot) {
            let cid = command.cid;
            self.commands.remove(slot);
            self.respond(cid, status, result);
        }
    }

    /// Ends a command with data to the host, then a response unless the data says it all.
    #[inline]
    pub(crate) fn finish_with_data(&mut self, slot: Slot, data: Data, result: u64) {
        let Some(command) = self.commands.get_mut(slot) else { return };
        let length = (data.as_slice().len() as u32).min(command.length);
        if length == 0 {
            return self.finish(slot, Status::SUCCESS, result);
        }
        let cid = command.cid;
        command.work = Work::Leaving;
        let success = self.data_tells_success && result == 0;
        let mut header = [0; SHORT_SIZE];
        let pdu = C2hData { cccid: cid, offset: 0, length, last: true, success };
        let layout = pdu.encode(&self.outgoing, &mut header);
        self.sender.push_header(&header, &layout);
        self.sender.push_data(slot.index(), 0, length, true);
        if layout.data_digest {
            self.sender.push_bytes(&crc32c(&data.as_slice()[..length as usize]).to_le_bytes());
        }
        command.data = data;
        if !success {
            self.respond(cid, Status::SUCCESS, result);
        }
    }

    /// Asks the host for a command's data.
    pub(crate) fn ready_to_transfer(&mut self, slot: Slot, cid: u16, length: u32) {
        let mut header = [0; SHORT_SIZE];
        let pdu = R2t { cccid: cid, ttag: slot.index() as u16, offset: 0, length };
        let layout = pdu.encode(&self.outgoing, &mut header);
        self.sender.push_header(&header, &layout);
    }

    /// A device is done with a request of this connection.
    #[inline]
    pub(crate) fn complete(&mut self, completion: Completion<memory::Buffer>) {
        // Stale only if the command was given up meanwhile; its buffer goes back to the pool.
        let Some(slot) = self.slot_of(completion.tag()) else { return };
        let status = completion.status();
        let Some(command) = self.commands.get_mut(slot) else { return };
        match &mut command.work {
            Work::Read => match completion.into_request().buffer {
                Some(buffer) if status.is_success() => self.finish_with_data(slot, Data::Buffer(buffer), 0),
                _ => self.finish(slot, status, 0),
            },
            Work::Requests { left, status: worst } => {
                if worst.is_success() {
                    *worst = status;
                }
                *left -= 1;
                let (left, worst) = (*left, *worst);
                if left == 0 {
                    self.finish(slot, worst, 0);
                }
            }
            Work::Copying { copying, has_read } if status.is_success() => {
                if *has_read {
                    copying.done();
                }
                *has_read = !*has_read;
                command.data = completion.into_request().buffer.map_or(Data::None, Data::Buffer);
                self.going.push(slot);
            }
            Work::Copying { copying, .. } => {
                let range = copying.range().into();
                self.finish(slot, status, range);
            }
            _ => self.finish(slot, status, 0),
        }
    }

    pub(crate) fn new_command(&mut self, cid: u16, work: Work, data: Data, length: u32) -> Slot {
        self.commands.insert(Command::new(cid, work, data, length))
    }
}
