//! One queue pair over one RDMA connection.
//!
//! A command has a slot from submission to completion, and the slot owns the request and its buffer. The
//! controller reads and writes the buffer itself, with the key of its chunk, so the buffer stays until the
//! response has come or the queue pair is destroyed. The command identifier is the slot's index with some
//! bits of its generation, so that a response of a faulty controller matches no other command.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::SocketAddr;

use block_io::{Request, Status};
use dma::{Buffer, Data, Pool};
use rdma::{RdmaClient, RdmaClientConfig, RdmaClientState};
use reactor::Core;
use slots::{Slab, Slot};
use sockets::{PeerMemory, QueuePairEvent, RejectedWork, Work};
use wire_nvme::fabrics::Nqn;
use wire_nvme::rdma::{RdmaConnectError, RdmaConnectRequest, decode_reject};
use wire_nvme::sqe::Sgl;
use wire_nvme::{Cqe, DataPointer, Sqe, cqe, sqe};

use crate::error::{ControllerFailure, NvmeOpenError};
use crate::fabrics::{CommandData, FabricsCompletion, FabricsQueue, FabricsUri, QueuePurpose};
use crate::options::Options;
use crate::uri::RdmaUri;

/// Most commands on a queue: 10 bits of slot index.
const DEPTH_MAX: u32 = 1024;
const INDEX_BITS: u32 = DEPTH_MAX.ilog2();

/// Where a controller is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaRemote {
    /// Its address.
    pub address: SocketAddr,
}

impl fmt::Display for RdmaRemote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl FabricsUri for RdmaUri {
    fn subnqn(&self) -> &Nqn {
        &self.subnqn
    }

    fn nsid(&self) -> u32 {
        self.nsid
    }
}

/// A queue pair over one RDMA connection.
pub struct RdmaConnection {
    /// Dropped first: afterwards the controller accesses no buffer.
    client: RdmaClient,
    commands: Slab<InFlightCommand>,
    /// Capsules that the queue pair has no entry for yet.
    waiting: VecDeque<Work>,
    completions: Vec<FabricsCompletion>,
    failure: Option<ControllerFailure>,
    /// Most bytes of in-capsule data; none before the controller has said so (RDMA Transport 1.0, section
    /// 3.3.2).
    in_capsule_max: u32,
    pool: Pool,
}

struct InFlightCommand {
    request: Request<Data>,
    /// What the controller accesses in place of the request's data, which is in several slices or in memory
    /// that the device does not reach.
    bounced: Option<Buffer>,
    data: CommandData,
}

fn cid_of(slot: Slot) -> u16 {
    let generation = (slot.to_bits() >> 32) as u32;
    (slot.index() | generation << INDEX_BITS) as u16
}

impl FabricsQueue for RdmaConnection {
    type Uri = RdmaUri;
    type Remote = RdmaRemote;

    const HANDSHAKE: &'static str = "the RDMA connection";
    const DEPTH_MAX: u32 = DEPTH_MAX;
    const NO_METADATA: &'static str = "metadata is not supported over RDMA";

    fn resolve(uri: &RdmaUri) -> Result<RdmaRemote, NvmeOpenError> {
        Ok(RdmaRemote { address: uri.resolve()? })
    }

    fn connect(
        core: &Core,
        remote: &RdmaRemote,
        entries: u32,
        purpose: QueuePurpose,
        _options: &Options,
    ) -> Result<RdmaConnection, NvmeOpenError> {
        let qid = match purpose {
            QueuePurpose::Admin => 0,
            QueuePurpose::Io(qid) => qid,
        };
        // The receive queue has a buffer for each command's response.
        let receive_entries = u16::try_from(entries).unwrap_or(u16::MAX);
        let request = RdmaConnectRequest { qid, receive_entries, send_entries: entries, cntlid: 0 };
        let config = RdmaClientConfig {
            source: None,
            commands: entries,
            message_bytes: cqe::SIZE,
            request: request.encode().to_vec(),
        };
        let failed = |error: rdma::RdmaError| NvmeOpenError::Connect(remote.address, error.into_io());
        let client = RdmaClient::connect(core, remote.address, config).map_err(failed)?;
        Ok(RdmaConnection {
            client,
            // One entry of a queue always stays empty (Base 2.0, section 3.3.1.5).
            commands: Slab::with_capacity((entries - 1).min(DEPTH_MAX)),
            waiting: VecDeque::new(),
            completions: Vec::with_capacity(entries as usize),
            failure: None,
            in_capsule_max: 0,
            pool: core.pool().clone(),
        })
    }

    fn connect_error(remote: &RdmaRemote, failure: ControllerFailure) -> NvmeOpenError {
        failure.while_connecting(remote.address)
    }

    fn is_ready(&self) -> bool {
        self.failure.is_none() && *self.client.state() == RdmaClientState::Connected
    }

    #[inline]
    fn failure(&self) -> Option<ControllerFailure> {
        self.failure
    }

    /// Fails the queue. Its commands complete when the connection is closed, since the controller may access
    /// their buffers before.
    fn fail(&mut self, failure: ControllerFailure) {
        if self.failure.is_some() {
            return;
        }
        self.failure = Some(failure);
        self.waiting.clear();
        self.client.close();
        let slots: Vec<Slot> = self.commands.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if let Some(command) = self.commands.remove(slot) {
                let cqe = Cqe::new(cid_of(slot), Status::HOST_PATHING_ERROR);
                self.completions.push(FabricsCompletion { request: command.request, cqe });
            }
        }
    }

    fn is_full(&self) -> bool {
        self.commands.is_full()
    }

    #[inline]
    fn free_slots(&self) -> usize {
        self.commands.capacity() - self.commands.len()
    }

    fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes;
    }

    fn submit(&mut self, mut sqe: Sqe, request: Request<Data>, data: CommandData, inline_data: &[u8]) {
        let command = InFlightCommand { request, bounced: None, data };
        let Ok(slot) = self.commands.insert(command) else {
            panic!("a command was submitted to a full queue")
        };
        sqe.cid = cid_of(slot);
        match self.capsule(slot, sqe, inline_data) {
            Some(work) => self.waiting.push_back(work),
            None => self.reject(slot, Status::COMMAND_INTERRUPTED),
        }
    }

    fn flush(&mut self) {
        let Some(pair) = self.client.pair().filter(|_| self.failure.is_none()) else { return };
        while let Some(work) = self.waiting.pop_front() {
            match pair.post(work) {
                Ok(()) => {}
                Err(RejectedWork::Full(work)) => {
                    self.waiting.push_front(work);
                    break;
                }
                Err(RejectedWork::Memory(_, error)) => {
                    log::warn!(target: "nvme", "the RDMA device cannot access a buffer: {error}");
                    return self.fail(ControllerFailure::Network(io::ErrorKind::OutOfMemory));
                }
            }
        }
        if let Err(kind) = pair.submit() {
            self.fail(ControllerFailure::Network(kind));
        }
    }

    fn receive(&mut self) -> u64 {
        let count = self.client.poll();
        if self.failure.is_some() {
            return count;
        }
        if let RdmaClientState::Ended(kind, message) = self.client.state() {
            let kind = *kind;
            if let Ok(reason) = decode_reject(message) {
                log::warn!(target: "nvme", "the controller rejects the connection: {}", describe(reason));
            }
            self.fail(match kind {
                io::ErrorKind::ConnectionReset => ControllerFailure::Closed,
                kind => ControllerFailure::Network(kind),
            });
            return count;
        }
        let mut failed = None;
        let mut responses = Vec::new();
        if let Some(pair) = self.client.pair() {
            while let Some(event) = pair.next_event() {
                match event {
                    QueuePairEvent::Sent { .. } | QueuePairEvent::Read { .. } => {}
                    QueuePairEvent::Closed => failed = Some(ControllerFailure::Closed),
                    QueuePairEvent::Failed(kind) => failed = Some(ControllerFailure::Network(kind)),
                }
            }
            while let Some(message) = pair.next_message() {
                let mut entry = [0; cqe::SIZE];
                let is_whole = message.length as usize == cqe::SIZE;
                pair.copy_message(&message, 0, &mut entry);
                pair.release(message);
                match is_whole {
                    true => responses.push(Cqe::decode(&entry)),
                    false => failed = Some(ControllerFailure::InvalidResponse("a command")),
                }
            }
        }
        for cqe in responses {
            if !self.complete(cqe) {
                failed = Some(ControllerFailure::InvalidResponse("a command that is not in flight"));
            }
        }
        match failed {
            Some(failure) => self.fail(failure),
            None if !self.waiting.is_empty() => self.flush(),
            None => {}
        }
        count
    }

    #[inline]
    fn completions(&mut self) -> &mut Vec<FabricsCompletion> {
        &mut self.completions
    }

    #[inline]
    fn is_pending(&self) -> bool {
        self.client.is_pending()
    }
}

impl RdmaConnection {
    /// The capsule of a command; `None` if memory lacks.
    fn capsule(&mut self, slot: Slot, mut sqe: Sqe, inline_data: &[u8]) -> Option<Work> {
        let command = self.commands.get_mut(slot)?;
        let (mut in_capsule, length) = (0, inline_data.len() as u32);
        match command.data {
            CommandData::Out(length) if length <= self.in_capsule_max => {
                in_capsule = length;
                sqe.data = DataPointer::capsule(0, length);
            }
            CommandData::None if (1..=self.in_capsule_max).contains(&length) => {
                in_capsule = length;
                sqe.data = DataPointer::capsule(0, length);
            }
            CommandData::None if length > 0 => {
                let mut buffer = self.pool.take(length as usize)?;
                buffer.copy_from(0, inline_data);
                sqe.data = keyed(self.client.peer_memory(&buffer).ok()?, length);
                command.bounced = Some(buffer);
            }
            CommandData::None => sqe.data = keyed(PeerMemory::default(), 0),
            CommandData::In(length) | CommandData::Out(length) => {
                let own = command.request.data().and_then(Data::single);
                let own = own.and_then(|buffer| self.client.peer_memory(buffer).ok());
                let place = match own {
                    Some(place) => place,
                    None => {
                        let mut buffer = self.pool.take(length as usize)?;
                        if let (CommandData::Out(_), Some(data)) = (command.data, command.request.data()) {
                            data.copy_to(0, buffer.as_mut_slice());
                        }
                        let place = self.client.peer_memory(&buffer).ok()?;
                        command.bounced = Some(buffer);
                        place
                    }
                };
                sqe.data = keyed(place, length);
            }
        }
        let mut capsule = self.pool.take(sqe::SIZE + in_capsule as usize)?;
        let (entry, behind) = capsule.as_mut_slice().split_at_mut(sqe::SIZE);
        sqe.encode(entry.first_chunk_mut()?);
        match command.request.data() {
            _ if in_capsule == 0 => {}
            _ if !inline_data.is_empty() => behind.copy_from_slice(inline_data),
            Some(data) => data.copy_to(0, behind),
            None => {}
        }
        Some(Work::SendData { tag: slot.to_bits(), data: capsule.into() })
    }

    /// Completes a command that is not sent.
    #[cold]
    fn reject(&mut self, slot: Slot, status: Status) {
        if let Some(command) = self.commands.remove(slot) {
            let cqe = Cqe::new(cid_of(slot), status);
            self.completions.push(FabricsCompletion { request: command.request, cqe });
        }
    }

    /// Completes the command of a response; `false` if there is none.
    fn complete(&mut self, cqe: Cqe) -> bool {
        let slot = self.commands.slot_at(u32::from(cqe.cid) & (DEPTH_MAX - 1));
        let Some(slot) = slot.filter(|slot| cid_of(*slot) == cqe.cid) else { return false };
        let Some(mut command) = self.commands.remove(slot) else { return false };
        if let (CommandData::In(_), Some(buffer)) = (command.data, &command.bounced)
            && let Some(data) = command.request.data_mut()
        {
            data.copy_from(0, buffer.as_slice());
        }
        self.completions.push(FabricsCompletion { request: command.request, cqe });
        true
    }
}

/// A descriptor of memory that the controller accesses.
fn keyed(memory: PeerMemory, length: u32) -> DataPointer {
    Sgl::Keyed { address: memory.address, length, key: memory.key, invalidate: false }.into()
}

fn describe(reason: RdmaConnectError) -> &'static str {
    match reason {
        RdmaConnectError::PrivateDataLength => "invalid private data length",
        RdmaConnectError::RecordFormat => "invalid record format",
        RdmaConnectError::QueueId => "invalid queue identifier",
        RdmaConnectError::HostSendQueueSize => "invalid size of the send queue",
        RdmaConnectError::HostReceiveQueueSize => "invalid size of the receive queue",
        RdmaConnectError::NoResources => "no resources",
        RdmaConnectError::InboundReads => "invalid number of inbound reads",
        RdmaConnectError::OutboundReads => "invalid number of outbound reads",
        RdmaConnectError::ControllerId => "invalid controller identifier",
    }
}
