//! The session of a vfio-user client: the handling of its requests, and its function.

use rustix::io::Errno;
use sockets::ByteStream;
use target_shell::{CloseReason, MoreToRead};
use wire_vfio_user::{
    DeviceInfo, DmaMap, DmaUnmap, Header, IoFdsRequest, IrqInfo, MultiWrites, ProtocolCapabilities,
    RegionAccess, RegionInfo, SetIrqs, VersionMessage, VfioUserCommand, device_flags, irq, region,
};

use super::function::VfioUserFunction;
use super::memory::{RANGES_MAX, UnmappedRanges};
use super::protocol::VfioUserContext;
use super::socket::{
    ClientMessage, ClientMessages, DATA_BYTES_MAX, DESCRIPTORS_MAX, DisconnectReason, VfioUserReply, invalid,
};

/// Maximum messages processed per poll, so that I/O is not starved.
const MESSAGES_PER_TURN_MAX: usize = 64;
/// Time that a client may be silent before it has enabled its controller, if another client waits: an endpoint serves
/// one. A guest's firmware enables the controller within milliseconds of the connection.
const SEAT_TIMEOUT_NS: u64 = 5_000_000_000;

/// A client that is served: its messages and the [`VfioUserFunction`] that it controls.
///
/// Requests are processed in order. A request that must wait for devices (unmap, reset) blocks those behind it until
/// [`flush`](Self::flush) finds that it need not wait any longer.
pub(super) struct ClientSession {
    messages: ClientMessages,
    pub(super) function: VfioUserFunction,
    /// The version was negotiated.
    negotiated: bool,
    /// The request whose reply waits for devices.
    pending: Option<PendingReply>,
    /// Requests behind one that waited may have arrived.
    pub(super) resumes_reading: bool,
    /// When the client was served first, or sent its last message.
    last_message_ns: u64,
    /// When the seat of a silent client was last checked.
    pub(super) seat_checked_ns: u64,
}

/// A request whose reply waits for devices.
struct PendingReply {
    header: Header,
    reply: VfioUserReply,
    condition: ReplyCondition,
}

enum ReplyCondition {
    /// No buffer of the unmapped ranges is lent to a device.
    BuffersReturned(UnmappedRanges),
    /// No device requests are outstanding.
    Idle,
}

/// The result of a request: reply now, or when a condition is met.
enum RequestOutcome {
    Reply(VfioUserReply),
    Wait(VfioUserReply, ReplyCondition),
}

impl ClientSession {
    pub(super) fn new(function: VfioUserFunction, now_ns: u64) -> ClientSession {
        ClientSession {
            messages: ClientMessages::new(),
            function,
            negotiated: false,
            pending: None,
            // Its first messages may have arrived while it waited.
            resumes_reading: true,
            last_message_ns: now_ns,
            seat_checked_ns: now_ns,
        }
    }

    /// Whether the client has not used its controller for long enough to leave to another that waits.
    pub(super) fn is_silent(&self, now_ns: u64) -> bool {
        !self.function.is_running() && self.last_message_ns.saturating_add(SEAT_TIMEOUT_NS) <= now_ns
    }

    /// When [`is_silent`](Self::is_silent) has to be checked; `None` while the client uses its controller.
    pub(super) fn seat_deadline_ns(&self) -> Option<u64> {
        let from_ns = self.last_message_ns.max(self.seat_checked_ns);
        (!self.function.is_running()).then(|| from_ns.saturating_add(SEAT_TIMEOUT_NS))
    }

    /// Whether a reply waits for devices.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Receives and processes requests, up to one that must wait.
    pub(super) fn receive<S: ByteStream>(
        &mut self,
        stream: &mut S,
        context: &mut VfioUserContext<'_>,
    ) -> Result<MoreToRead, CloseReason<DisconnectReason>> {
        let mut count = 0;
        // Requests execute in order (Command Concurrency): one that waits blocks those behind it.
        while self.pending.is_none() {
            if count == MESSAGES_PER_TURN_MAX {
                return Ok(MoreToRead::Yes);
            }
            let Some(message) = self.messages.receive(stream)? else { break };
            count += 1;
            self.last_message_ns = context.now_ns;
            self.handle_message(message, context)?;
            self.messages.flush(stream)?;
        }
        Ok(MoreToRead::No)
    }

    /// Signals interrupts, and sends replies and the pending one if its condition is met.
    #[inline]
    pub(super) fn flush<S: ByteStream>(
        &mut self,
        stream: &mut S,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        self.function.flush_completions();
        if self.pending.is_some() {
            self.resumes_reading |= self.complete_pending_reply()?;
        }
        self.messages.flush(stream)
    }

    /// Queues the pending reply if its condition is met. Returns whether it was.
    fn complete_pending_reply(&mut self) -> Result<bool, CloseReason<DisconnectReason>> {
        let done = match &self.pending {
            None => return Ok(false),
            Some(pending) => match &pending.condition {
                ReplyCondition::BuffersReturned(ranges) => ranges.is_unused(),
                ReplyCondition::Idle => self.function.is_idle(),
            },
        };
        if done && let Some(PendingReply { header, reply, .. }) = self.pending.take() {
            self.push_reply(&header, Ok(reply))?;
        }
        Ok(done)
    }

    fn handle_message(
        &mut self,
        message: ClientMessage,
        context: &mut VfioUserContext<'_>,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        let header = message.header;
        match self.execute(message, context)? {
            Ok(RequestOutcome::Reply(reply)) => self.push_reply(&header, Ok(reply)),
            Ok(RequestOutcome::Wait(reply, condition)) => {
                self.pending = Some(PendingReply { header, reply, condition });
                self.complete_pending_reply().map(|_| ())
            }
            Err(errno) => self.push_reply(&header, Err(errno)),
        }
    }

    fn push_reply(
        &mut self,
        header: &Header,
        result: Result<VfioUserReply, Errno>,
    ) -> Result<(), CloseReason<DisconnectReason>> {
        if header.no_reply {
            return Ok(());
        }
        match result {
            Ok(reply) => self.messages.push(&header.reply(reply.payload.len()), &reply),
            Err(errno) => {
                self.messages.push(&header.failure(errno.raw_os_error() as u32), &VfioUserReply::default())
            }
        }
    }

    fn execute(
        &mut self,
        message: ClientMessage,
        context: &mut VfioUserContext<'_>,
    ) -> Result<Result<RequestOutcome, Errno>, CloseReason<DisconnectReason>> {
        let ClientMessage { header, payload, mut descriptors } = message;
        let command = VfioUserCommand::from_wire(header.command);
        if !self.negotiated {
            // The first message must be a version.
            if command != Some(VfioUserCommand::Version) {
                return Err(invalid("no version was negotiated"));
            }
            return self.negotiate_version(&payload).map(Ok);
        }
        let descriptors_max = match command {
            // SPDK's driver also sends the file descriptor with an unmap, where it is ignored.
            Some(VfioUserCommand::DmaMap | VfioUserCommand::DmaUnmap) => 1,
            Some(VfioUserCommand::DeviceSetIrqs) => DESCRIPTORS_MAX,
            _ => 0,
        };
        if descriptors.len() > descriptors_max {
            return Ok(Err(Errno::INVAL));
        }
        let function = &mut self.function;
        let trapped = context.protocol.limits.doorbells_trapped;
        let result = match command {
            Some(VfioUserCommand::DmaMap) => decode(DmaMap::decode(&payload))
                .and_then(|map| function.map(&map, descriptors.pop(), context.pool))
                .map(|()| RequestOutcome::Reply(VfioUserReply::default())),
            Some(VfioUserCommand::DmaUnmap) => decode(DmaUnmap::decode(&payload)).and_then(|unmap| {
                let ranges = function.unmap(&unmap)?;
                let reply = DmaUnmap { argsz: DmaUnmap::SIZE as u32, ..unmap };
                Ok(RequestOutcome::Wait(
                    payload_of(&reply.to_bytes()),
                    ReplyCondition::BuffersReturned(ranges),
                ))
            }),
            Some(VfioUserCommand::DeviceGetInfo) => device_info(&payload),
            Some(VfioUserCommand::DeviceGetRegionInfo) => decode(RegionInfo::decode(&payload))
                .and_then(|request| function.region_info(&request, trapped))
                .map(RequestOutcome::Reply),
            Some(VfioUserCommand::DeviceGetRegionIoFds) => region_io_fds(&payload),
            Some(VfioUserCommand::DeviceGetIrqInfo) => decode(IrqInfo::decode(&payload))
                .and_then(|request| function.interrupt_info(&request))
                .map(|info| RequestOutcome::Reply(payload_of(&info.to_bytes()))),
            Some(VfioUserCommand::DeviceSetIrqs) => decode(SetIrqs::decode(&payload))
                .and_then(|set| function.set_interrupts(&set, &payload[SetIrqs::SIZE..], descriptors))
                .map(|()| RequestOutcome::Reply(VfioUserReply::default())),
            Some(VfioUserCommand::RegionRead) => read(function, &payload),
            Some(VfioUserCommand::RegionWrite) => write(function, &payload, context.now_ns),
            Some(VfioUserCommand::RegionWriteMulti) => write_multi(function, &payload, context.now_ns),
            Some(VfioUserCommand::DeviceReset) => {
                function.begin_reset();
                Ok(RequestOutcome::Wait(VfioUserReply::default(), ReplyCondition::Idle))
            }
            Some(VfioUserCommand::Version) => Err(Errno::INVAL),
            // Migration is not supported; the others are sent only by servers.
            Some(
                VfioUserCommand::DeviceFeature
                | VfioUserCommand::MigrationRead
                | VfioUserCommand::MigrationWrite
                | VfioUserCommand::DmaRead
                | VfioUserCommand::DmaWrite,
            )
            | None => Err(Errno::NOTSUP),
        };
        Ok(result)
    }

    fn negotiate_version(&mut self, payload: &[u8]) -> Result<RequestOutcome, CloseReason<DisconnectReason>> {
        let requested = VersionMessage::decode(payload).map_err(|_| invalid("invalid version"))?;
        if requested.major != VersionMessage::MAJOR {
            return Err(invalid("unsupported major version"));
        }
        let capabilities = ProtocolCapabilities {
            max_msg_fds: DESCRIPTORS_MAX as u32,
            max_data_xfer_size: DATA_BYTES_MAX,
            max_dma_maps: RANGES_MAX as u32,
            write_multiple: requested.capabilities.write_multiple,
            ..ProtocolCapabilities::default()
        };
        let minor = requested.minor.min(VersionMessage::MINOR);
        self.negotiated = true;
        let reply = VersionMessage { major: VersionMessage::MAJOR, minor, capabilities };
        Ok(RequestOutcome::Reply(payload_of(&reply.to_bytes())))
    }
}

fn decode<T, E>(decoded: Result<T, E>) -> Result<T, Errno> {
    decoded.map_err(|_| Errno::INVAL)
}

fn payload_of(bytes: &[u8]) -> VfioUserReply {
    VfioUserReply { payload: bytes.to_vec(), descriptor: None }
}

fn device_info(payload: &[u8]) -> Result<RequestOutcome, Errno> {
    let request = decode(DeviceInfo::decode(payload))?;
    if (request.argsz as usize) < DeviceInfo::SIZE {
        return Err(Errno::INVAL);
    }
    let info = DeviceInfo {
        argsz: DeviceInfo::SIZE as u32,
        flags: device_flags::PCI | device_flags::RESET,
        regions: region::COUNT,
        irqs: irq::COUNT,
    };
    Ok(RequestOutcome::Reply(payload_of(&info.to_bytes())))
}

/// Replies that no region has ioeventfds: doorbells are polled.
fn region_io_fds(payload: &[u8]) -> Result<RequestOutcome, Errno> {
    let request = decode(IoFdsRequest::decode(payload))?;
    let is_invalid = request.flags != 0 || request.count != 0 || request.index >= region::COUNT;
    if is_invalid || (request.argsz as usize) < IoFdsRequest::SIZE {
        return Err(Errno::INVAL);
    }
    let info = IoFdsRequest { argsz: IoFdsRequest::SIZE as u32, flags: 0, index: request.index, count: 0 };
    Ok(RequestOutcome::Reply(payload_of(&info.to_bytes())))
}

fn read(function: &mut VfioUserFunction, payload: &[u8]) -> Result<RequestOutcome, Errno> {
    let access = decode(RegionAccess::decode(payload))?;
    if access.count > DATA_BYTES_MAX {
        return Err(Errno::INVAL);
    }
    let mut reply = access.to_bytes().to_vec();
    reply.resize(RegionAccess::SIZE + access.count as usize, 0);
    function.region_read(access.region, access.offset, &mut reply[RegionAccess::SIZE..])?;
    Ok(RequestOutcome::Reply(VfioUserReply { payload: reply, descriptor: None }))
}

fn write(function: &mut VfioUserFunction, payload: &[u8], now_ns: u64) -> Result<RequestOutcome, Errno> {
    let access = decode(RegionAccess::decode(payload))?;
    let data = &payload[RegionAccess::SIZE..];
    if data.len() != access.count as usize {
        return Err(Errno::INVAL);
    }
    let resets = function.region_write(access.region, access.offset, data, now_ns)?;
    let reply = payload_of(&access.to_bytes());
    Ok(finish_write(function, resets, reply))
}

fn write_multi(
    function: &mut VfioUserFunction,
    payload: &[u8],
    now_ns: u64,
) -> Result<RequestOutcome, Errno> {
    let writes = decode(MultiWrites::decode(payload))?;
    let mut resets = false;
    for write in &writes.0 {
        resets |= function.region_write(write.access.region, write.access.offset, write.bytes(), now_ns)?;
    }
    let reply = payload_of(&(writes.0.len() as u64).to_le_bytes());
    Ok(finish_write(function, resets, reply))
}

fn finish_write(function: &mut VfioUserFunction, resets: bool, reply: VfioUserReply) -> RequestOutcome {
    if resets {
        function.begin_reset();
        return RequestOutcome::Wait(reply, ReplyCondition::Idle);
    }
    RequestOutcome::Reply(reply)
}
