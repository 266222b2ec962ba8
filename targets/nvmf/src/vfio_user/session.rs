//! A client: its connection, what it asks, and the function that it was given.

use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use wire_vfio_user::{
    Capabilities, Command, DeviceInfo, DmaMap, DmaUnmap, Header, IoFdsRequest, IrqInfo, MultiWrites,
    RegionAccess, RegionInfo, SetIrqs, Version, device_flags, irq, region,
};

use super::function::{Function, Lent};
use super::memory::{Leaving, RANGES_MAX};
use super::socket::{DATA_BYTES_MAX, DESCRIPTORS_MAX, End, Message, Reply, Stream};

/// Messages that are taken in one turn, so that I/O gets its share.
const MESSAGES_PER_TURN_MAX: usize = 64;

pub(super) struct Session {
    stream: Stream,
    pub(super) function: Function,
    /// A version has been agreed on.
    greeted: bool,
    /// What can only be answered when devices are done.
    pending: Option<Pending>,
    /// There may be more to receive.
    pub(super) readable: bool,
    /// The client has gone, or is to go.
    pub(super) ended: bool,
}

/// A request whose answer waits for devices.
struct Pending {
    header: Header,
    reply: Reply,
    until: Until,
}

enum Until {
    /// Nothing of the memory is with devices.
    Unused(Leaving),
    /// Nothing at all is with devices.
    Idle,
}

/// What becomes of a request.
enum Outcome {
    Answer(Reply),
    Wait(Reply, Until),
}

impl Session {
    pub(super) fn new(stream: UnixStream, function: Function) -> Session {
        Session {
            stream: Stream::new(stream),
            function,
            greeted: false,
            pending: None,
            readable: true,
            ended: false,
        }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether something of the client's can be dropped only when devices are done.
    pub(super) fn is_done(&self) -> bool {
        self.ended && self.function.is_idle()
    }

    /// Whether an answer waits for devices.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes in what the client has sent, as far as the order of things allows; how many messages.
    pub(super) fn receive(&mut self, lent: &mut Lent<'_>) -> Result<usize, End> {
        self.stream.flush()?;
        let mut count = 0;
        // Requests are served in their order (Command Concurrency): behind one that waits, all wait.
        while self.pending.is_none() && count < MESSAGES_PER_TURN_MAX {
            let Some(message) = self.stream.receive()? else {
                self.readable = false;
                return Ok(count);
            };
            count += 1;
            self.serve(message, lent)?;
        }
        Ok(count)
    }

    /// Answers what waited for devices, if they are done.
    pub(super) fn settle(&mut self) -> Result<bool, End> {
        let done = match &self.pending {
            None => return Ok(false),
            Some(pending) => match &pending.until {
                Until::Unused(leaving) => leaving.is_unused(),
                Until::Idle => self.function.is_idle(),
            },
        };
        if done && let Some(Pending { header, reply, .. }) = self.pending.take() {
            self.answer(&header, Ok(reply))?;
        }
        Ok(done)
    }

    fn serve(&mut self, message: Message, lent: &mut Lent<'_>) -> Result<(), End> {
        let header = message.header;
        match self.execute(message, lent)? {
            Ok(Outcome::Answer(reply)) => self.answer(&header, Ok(reply)),
            Ok(Outcome::Wait(reply, until)) => {
                self.pending = Some(Pending { header, reply, until });
                self.settle().map(|_| ())
            }
            Err(errno) => self.answer(&header, Err(errno)),
        }
    }

    fn answer(&mut self, header: &Header, outcome: Result<Reply, Errno>) -> Result<(), End> {
        if header.no_reply {
            return Ok(());
        }
        match outcome {
            Ok(reply) => self.stream.send(&header.reply(reply.payload.len()), &reply),
            Err(errno) => self.stream.send(&header.failure(errno.raw_os_error() as u32), &Reply::default()),
        }
    }

    fn execute(&mut self, message: Message, lent: &mut Lent<'_>) -> Result<Result<Outcome, Errno>, End> {
        let Message { header, payload, mut descriptors } = message;
        let command = Command::from_wire(header.command);
        if !self.greeted {
            // Whoever does not begin with a version is no client.
            if command != Some(Command::Version) {
                return Err(End::Garbage("no version was agreed on"));
            }
            return self.greet(&payload).map(Ok);
        }
        let takes = match command {
            // SPDK's driver sends the file when it takes memory away, too; it says nothing then.
            Some(Command::DmaMap | Command::DmaUnmap) => 1,
            Some(Command::DeviceSetIrqs) => DESCRIPTORS_MAX,
            _ => 0,
        };
        if descriptors.len() > takes {
            return Ok(Err(Errno::INVAL));
        }
        let function = &mut self.function;
        let trapped = lent.shared.limits.doorbells_trapped;
        let done = match command {
            Some(Command::DmaMap) => decode(DmaMap::decode(&payload))
                .and_then(|map| function.map(&map, descriptors.pop(), lent.pool))
                .map(|()| Outcome::Answer(Reply::default())),
            Some(Command::DmaUnmap) => decode(DmaUnmap::decode(&payload)).and_then(|unmap| {
                let leaving = function.unmap(&unmap)?;
                let reply = DmaUnmap { argsz: DmaUnmap::SIZE as u32, ..unmap };
                Ok(Outcome::Wait(payload_of(&reply.to_bytes()), Until::Unused(leaving)))
            }),
            Some(Command::DeviceGetInfo) => device_info(&payload),
            Some(Command::DeviceGetRegionInfo) => decode(RegionInfo::decode(&payload))
                .and_then(|asked| function.region_info(&asked, trapped))
                .map(Outcome::Answer),
            Some(Command::DeviceGetRegionIoFds) => no_descriptors(&payload),
            Some(Command::DeviceGetIrqInfo) => decode(IrqInfo::decode(&payload))
                .and_then(|asked| function.interrupt_info(&asked))
                .map(|info| Outcome::Answer(payload_of(&info.to_bytes()))),
            Some(Command::DeviceSetIrqs) => decode(SetIrqs::decode(&payload))
                .and_then(|set| function.set_interrupts(&set, &payload[SetIrqs::SIZE..], descriptors))
                .map(|()| Outcome::Answer(Reply::default())),
            Some(Command::RegionRead) => read(function, &payload),
            Some(Command::RegionWrite) => write(function, &payload, lent.now_ns),
            Some(Command::RegionWriteMulti) => write_multi(function, &payload, lent.now_ns),
            Some(Command::DeviceReset) => {
                function.begin_reset();
                Ok(Outcome::Wait(Reply::default(), Until::Idle))
            }
            Some(Command::Version) => Err(Errno::INVAL),
            // Migration, and what only servers ask.
            Some(
                Command::DeviceFeature
                | Command::MigrationRead
                | Command::MigrationWrite
                | Command::DmaRead
                | Command::DmaWrite,
            )
            | None => Err(Errno::NOTSUP),
        };
        Ok(done)
    }

    fn greet(&mut self, payload: &[u8]) -> Result<Outcome, End> {
        let theirs = Version::decode(payload).map_err(|_| End::Garbage("its version"))?;
        if theirs.major != Version::MAJOR {
            return Err(End::Garbage("it speaks another version"));
        }
        let capabilities = Capabilities {
            max_msg_fds: DESCRIPTORS_MAX as u32,
            max_data_xfer_size: DATA_BYTES_MAX,
            max_dma_maps: RANGES_MAX as u32,
            write_multiple: theirs.capabilities.write_multiple,
            ..Capabilities::default()
        };
        let minor = theirs.minor.min(Version::MINOR);
        self.greeted = true;
        let ours = Version { major: Version::MAJOR, minor, capabilities };
        Ok(Outcome::Answer(payload_of(&ours.to_bytes())))
    }
}

fn decode<T, E>(decoded: Result<T, E>) -> Result<T, Errno> {
    decoded.map_err(|_| Errno::INVAL)
}

fn payload_of(bytes: &[u8]) -> Reply {
    Reply { payload: bytes.to_vec(), descriptor: None }
}

fn device_info(payload: &[u8]) -> Result<Outcome, Errno> {
    let asked = decode(DeviceInfo::decode(payload))?;
    if (asked.argsz as usize) < DeviceInfo::SIZE {
        return Err(Errno::INVAL);
    }
    let info = DeviceInfo {
        argsz: DeviceInfo::SIZE as u32,
        flags: device_flags::PCI | device_flags::RESET,
        regions: region::COUNT,
        irqs: irq::COUNT,
    };
    Ok(Outcome::Answer(payload_of(&info.to_bytes())))
}

/// No region has descriptors that tell of writes: doorbells are mapped and looked at.
fn no_descriptors(payload: &[u8]) -> Result<Outcome, Errno> {
    let asked = decode(IoFdsRequest::decode(payload))?;
    let wrong = asked.flags != 0 || asked.count != 0 || asked.index >= region::COUNT;
    if wrong || (asked.argsz as usize) < IoFdsRequest::SIZE {
        return Err(Errno::INVAL);
    }
    let info = IoFdsRequest { argsz: IoFdsRequest::SIZE as u32, flags: 0, index: asked.index, count: 0 };
    Ok(Outcome::Answer(payload_of(&info.to_bytes())))
}

fn read(function: &mut Function, payload: &[u8]) -> Result<Outcome, Errno> {
    let access = decode(RegionAccess::decode(payload))?;
    if access.count > DATA_BYTES_MAX {
        return Err(Errno::INVAL);
    }
    let mut reply = access.to_bytes().to_vec();
    reply.resize(RegionAccess::SIZE + access.count as usize, 0);
    function.region_read(access.region, access.offset, &mut reply[RegionAccess::SIZE..])?;
    Ok(Outcome::Answer(Reply { payload: reply, descriptor: None }))
}

fn write(function: &mut Function, payload: &[u8], now_ns: u64) -> Result<Outcome, Errno> {
    let access = decode(RegionAccess::decode(payload))?;
    let data = &payload[RegionAccess::SIZE..];
    if data.len() != access.count as usize {
        return Err(Errno::INVAL);
    }
    let resets = function.region_write(access.region, access.offset, data, now_ns)?;
    let reply = payload_of(&access.to_bytes());
    Ok(written(function, resets, reply))
}

fn write_multi(function: &mut Function, payload: &[u8], now_ns: u64) -> Result<Outcome, Errno> {
    let writes = decode(MultiWrites::decode(payload))?;
    let mut resets = false;
    for write in &writes.0 {
        resets |= function.region_write(write.access.region, write.access.offset, write.bytes(), now_ns)?;
    }
    let reply = payload_of(&(writes.0.len() as u64).to_le_bytes());
    Ok(written(function, resets, reply))
}

fn written(function: &mut Function, resets: bool, reply: Reply) -> Outcome {
    if resets {
        function.begin_reset();
        return Outcome::Wait(reply, Until::Idle);
    }
    Outcome::Answer(reply)
}
