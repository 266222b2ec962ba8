//! A front-end and driver that do anything, for fuzzing: messages, virtqueues and SCSI commands into a whole
//! target, whose cores take turns on one thread.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bdev::malloc::MallocConfig;
use bdev::{Access, Registry};
use dma::SharedRegion;
use os::CpuSet;
use reactor::{Reactor, ReactorConfig};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use scsi::{LogicalUnit, UnitConfig};
use sockets::{ConnectionId, Network, NetworkFaults, SimulatedNetwork, StreamAddress, TransferResult};
use target_shell::{ConnectionGroup, DeviceMap, GroupLimits, PollGroup};
use wire_vhost_user::inflight::InflightDescription;
use wire_vhost_user::{
    ConfigHeader, FrontendRequest, LogBase, MemoryRegion, MemoryTable, SingleRegion, U64Payload,
    VhostUserHeader, VringAddress, VringState,
};
use wire_virtio::Features;
use wire_virtio::blk::RequestHeader;
use wire_virtio::descriptor_flags;
use wire_virtio::scsi::{
    COMMAND_BYTES, CONTROL_QUEUE, CommandHeader, EVENT_QUEUE, RESPONSE_BYTES, UnitAddress,
};
use wire_virtio::split::{Descriptor, available, used};

use crate::any_ring::Input;
use crate::backend::{Backend, BlkBackend, ScsiBackend, ScsiUnit};
use crate::controller::{Controller, VhostConfig};
use crate::core::VhostCore;
use crate::links::CoreLinks;

/// Controllers, as ports.
const BLK: u16 = 1;
const SCSI: u16 = 2;
const DISK_BLOCKS: u64 = 256;
/// Simulated time of one poll.
const POLL_NS: u64 = 10_000;
/// Cores of the target: that of the connection, and those of two workers.
const CORES: usize = 3;
/// Virtqueues of the session that is set up. SCSI hosts have two for other things than commands, and one for
/// each core.
const QUEUES: u32 = 2 + CORES as u32;
const QUEUE_SIZE: u16 = 32;
/// Bytes of guest memory for each virtqueue.
const QUEUE_BYTES: u64 = 16 << 10;
/// Guest memory: two regions that touch.
const MEMORY_BYTES: u64 = 256 << 10;
const REGION_BYTES: u64 = MEMORY_BYTES / 2;
/// The front-end's address of the memory.
const USER: u64 = 0x7000_0000_0000;
/// Where requests and their data begin, behind the virtqueues.
const REQUESTS: u64 = QUEUES as u64 * QUEUE_BYTES;
/// Steps of one input.
const STEPS_MAX: usize = 256;
/// Polls within which a target ends a connection: its devices are in memory.
const END_POLLS_MAX: usize = 20_000;

/// Commands that the logical unit knows.
const OPCODES: [u8; 32] = [
    0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x34, 0x35,
    0x41, 0x42, 0x48, 0x55, 0x5a, 0x5e, 0x5f, 0x83, 0x84, 0x88, 0x89, 0x8a, 0x93, 0x9e, 0xa0,
];

/// A core of the target.
struct AnyCore {
    group: ConnectionGroup<VhostCore, SimulatedNetwork>,
    // Dropped last: the group uses its buffers.
    reactor: Reactor,
}

impl AnyCore {
    fn new(index: usize, network: SimulatedNetwork, links: &Arc<CoreLinks>) -> AnyCore {
        let cpus = CpuSet::new((0..CORES as u32).collect()).expect("a set of cores");
        let config = ReactorConfig { cpus, pin: false, ..ReactorConfig::default() };
        let reactor = Reactor::for_core(&config, index).expect("a reactor for a test");
        let core = reactor.core();
        // Each is polled whether or not another one wakes it.
        let vhost = VhostCore::new(&core, None, links.clone());
        let group = ConnectionGroup::standalone(&core, network, vhost, GroupLimits::default());
        AnyCore { group, reactor }
    }

    fn poll(&mut self, now_ns: u64) {
        // Notifications of the driver.
        self.reactor.core().event_loop().turn();
        self.group.poll(&self.reactor.core(), now_ns);
    }
}

/// The target, and the front-end with its guest.
struct AnyFrontend {
    clients: SimulatedNetwork,
    port: u16,
    connection: ConnectionId,
    now_ns: u64,
    memory: SharedRegion,
    file: OwnedFd,
    kick: OwnedFd,
    call: OwnedFd,
    available: [u16; QUEUES as usize],
    /// Chains that the target has returned in earlier sessions.
    used: usize,
    /// The target has closed the connection.
    is_closed: bool,
    /// The first one has the connections. Dropped last: the fields above use its buffers.
    cores: Vec<AnyCore>,
}

impl AnyFrontend {
    fn new(port: u16) -> AnyFrontend {
        let links = CoreLinks::new(CORES);
        let (mut clients, network) = SimulatedNetwork::pair(1, NetworkFaults::default());
        // Workers have no streams.
        let unused = (1..CORES).map(|_| SimulatedNetwork::pair(1, NetworkFaults::default()).1);
        let networks = std::iter::once(network).chain(unused).enumerate();
        let mut cores: Vec<AnyCore> =
            networks.map(|(index, network)| AnyCore::new(index, network, &links)).collect();
        for port in [BLK, SCSI] {
            cores[0].group.listen(&address(port), port).expect("room for a listener");
        }
        let config = Arc::new(config());
        for AnyCore { group, reactor } in &mut cores {
            group.apply(&reactor.core(), config.clone(), 1);
        }
        let file = memfd(MEMORY_BYTES);
        let memory =
            SharedRegion::map(file.as_fd(), 0, MEMORY_BYTES, true).expect("a mapping of its own file");
        let connection = connect(&mut clients, port);
        let [kick, call] = [(); 2].map(|()| new_eventfd());
        AnyFrontend {
            clients,
            port,
            connection,
            now_ns: 1,
            memory,
            file,
            kick,
            call,
            available: [0; QUEUES as usize],
            used: 0,
            is_closed: false,
            cores,
        }
    }

    /// Lets the target work, and reads its replies.
    fn poll(&mut self, count: usize) {
        self.poll_cores(0..CORES, count);
    }

    /// As [`poll`](Self::poll), but some of the cores do nothing meanwhile.
    fn poll_cores(&mut self, cores: Range<usize>, count: usize) {
        let mut bytes = vec![0; 8 << 10];
        for _ in 0..count {
            self.now_ns += POLL_NS;
            self.cores[cores.clone()].iter_mut().for_each(|core| core.poll(self.now_ns));
            let result = loop {
                let result = self.clients.receive(self.connection, &mut [IoSliceMut::new(&mut bytes)]);
                if !matches!(result, TransferResult::Bytes(1..)) {
                    break result;
                }
            };
            self.is_closed |= matches!(result, TransferResult::Closed | TransferResult::Failed(_));
        }
    }

    /// Sends a message. One that does not fit, or whose connection is closed, is lost.
    fn send(&mut self, header: &VhostUserHeader, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let bytes = [&header.to_bytes(), payload].concat();
        self.clients.send_with_descriptors(self.connection, &[IoSlice::new(&bytes)], descriptors);
    }

    fn request(&mut self, kind: FrontendRequest, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send(&VhostUserHeader::request(kind.to_wire(), payload.len() as u32), payload, descriptors);
    }

    /// Begins a session as a front-end does, and starts all virtqueues.
    fn set_up(&mut self, features: Features) {
        use FrontendRequest as Kind;
        let number = |value| U64Payload { value }.to_bytes();
        let state = |index, value| VringState { index, value }.to_bytes();
        let [file, kick, call] = [&self.file, &self.kick, &self.call]
            .map(|descriptor| descriptor.try_clone().expect("room for a descriptor"));
        self.request(Kind::SetOwner, &[], &[]);
        let features = features | Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES;
        self.request(Kind::SetFeatures, &number(features.bits()), &[]);
        let regions = [0, REGION_BYTES].map(|start| region(start, REGION_BYTES));
        self.request(
            Kind::SetMemTable,
            &MemoryTable(regions.to_vec()).to_bytes(),
            &[file.as_fd(), file.as_fd()],
        );
        for index in 0..QUEUES {
            self.request(Kind::SetVringNum, &state(index, QUEUE_SIZE.into()), &[]);
            self.request(Kind::SetVringAddr, &queue_address(index, 0).to_bytes(), &[]);
            self.request(Kind::SetVringCall, &number(index.into()), &[call.as_fd()]);
            self.request(Kind::SetVringKick, &number(index.into()), &[kick.as_fd()]);
            self.request(Kind::SetVringEnable, &state(index, 1), &[]);
        }
        // A message for a worker is answered in the next poll.
        self.poll(8 * QUEUES as usize);
    }

    /// Makes a chain of these buffers available: address, length, and whether the device writes it.
    fn add(&mut self, queue: u32, parts: &[(u64, u32, bool)]) {
        let area = u64::from(queue) * QUEUE_BYTES;
        let index = &mut self.available[queue as usize];
        // Few parts at the place of the chain before, so that several are there at a time.
        let first = (*index * 4) % QUEUE_SIZE;
        for (at, (address, length, writes)) in (0_u16..).zip(parts) {
            let next = (first + at + 1) % QUEUE_SIZE;
            let more = if usize::from(at) + 1 < parts.len() { descriptor_flags::NEXT } else { 0 };
            let flags = more | if *writes { descriptor_flags::WRITE } else { 0 };
            let descriptor = Descriptor { address: *address, length: *length, flags, next };
            let place = area + Descriptor::SIZE as u64 * u64::from((first + at) % QUEUE_SIZE);
            self.memory.write(place, &descriptor.to_bytes());
        }
        let available_at = area + (4 << 10);
        self.memory.store_u16(available_at + available::entry(*index, QUEUE_SIZE), first);
        *index = index.wrapping_add(1);
        self.memory.store_u16(available_at + available::INDEX, *index);
    }

    /// Chains that the target has returned, as it says.
    fn count_used(&self) -> usize {
        (0..QUEUES)
            .map(|queue| {
                let used_at = u64::from(queue) * QUEUE_BYTES + (8 << 10);
                usize::from(self.memory.load_u16(used_at + used::INDEX))
            })
            .sum()
    }

    /// A buffer: usually in memory, and not always where nothing else is.
    fn buffer(&self, input: &mut Input<'_>, writes: bool) -> (u64, u32, bool) {
        let (place, length) = (input.u8(), input.u16());
        let address = match place {
            0xff => u64::MAX - u64::from(length),
            place => u64::from(place) * MEMORY_BYTES / 0xfe,
        };
        (address, u32::from(length) << (length & 7), writes)
    }

    /// Adds a request of a block device or SCSI host: the header at a place of its own, data and answer as
    /// the bytes say.
    fn add_request(&mut self, input: &mut Input<'_>) {
        let (choice, queue) = (input.u8(), u32::from(input.u8()) % QUEUES);
        let place = REQUESTS + 512 * (u64::from(self.available[queue as usize]) % 64);
        let (header, answer_bytes) = match (self.port, queue as usize) {
            (BLK, _) => (blk_header(input), 1),
            (_, CONTROL_QUEUE) => (control_request(input), 4),
            (_, EVENT_QUEUE) => (Vec::new(), 16),
            _ => (command(input), RESPONSE_BYTES as u32),
        };
        self.memory.write(place, &header);
        let mut parts = Vec::new();
        if !header.is_empty() {
            parts.push((place, header.len() as u32, false));
        }
        let answer = (place + 128, answer_bytes, true);
        let is_scsi = self.port == SCSI;
        let data: Vec<_> = (0..choice & 3).map(|_| self.buffer(input, choice & 4 != 0)).collect();
        match (is_scsi, choice & 4 != 0) {
            // A SCSI answer is before the data, a block device's status behind it.
            (true, true) => {
                parts.push(answer);
                parts.extend(data);
            }
            _ => {
                parts.extend(data);
                parts.push(answer);
            }
        }
        if choice & 0x80 != 0 {
            parts.truncate(usize::from(choice >> 4 & 7));
        }
        self.add(queue, &parts);
        if choice & 8 != 0 {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).ok();
        }
    }

    /// Sends a message whose fields are usually of the right kind.
    fn add_message(&mut self, input: &mut Input<'_>) {
        let (choice, kind) = (input.u8(), input.u8());
        let known = FrontendRequest::ALL[usize::from(kind) % FrontendRequest::ALL.len()];
        let payload = match choice & 7 {
            0 => (0..input.u8()).map(|_| input.u8()).collect(),
            _ => payload(known, self.port, input),
        };
        let small = memfd(4096);
        let other = new_eventfd();
        let file = self.file.try_clone().expect("room for a descriptor");
        let files = [file.as_fd(), other.as_fd(), small.as_fd(), file.as_fd()];
        let descriptors: Vec<BorrowedFd<'_>> = match choice >> 4 & 3 {
            0 => expected_descriptors(known, file.as_fd(), other.as_fd()),
            count => (0..count).map(|_| files[usize::from(input.u8()) % files.len()]).collect(),
        };
        let request = if choice & 7 == 1 { kind.into() } else { known.to_wire() };
        let mut header = VhostUserHeader::request(request, payload.len() as u32);
        header.needs_reply = choice & 8 != 0;
        header.is_reply = choice & 0xf7 == 0xf7;
        if choice & 0xc0 == 0xc0 {
            header.payload_bytes = header.payload_bytes.wrapping_add(u32::from(input.u16()) << (choice & 7));
        }
        self.send(&header, &payload, &descriptors);
    }

    /// Begins a session anew.
    fn reconnect(&mut self, features: Features) {
        self.used += self.count_used();
        self.clients.close(self.connection);
        self.connection = connect(&mut self.clients, self.port);
        self.is_closed = false;
        self.memory.zero(0, REQUESTS);
        self.available = [0; QUEUES as usize];
        self.set_up(features);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        if self.is_closed {
            self.reconnect(Features::empty());
        }
        match input.u8() {
            0..0x50 => self.add_request(input),
            0x50..0x90 => self.add_message(input),
            0x90..0xb0 => {
                let (address, bytes) =
                    (u64::from(input.u16()) * 4, [input.u8(), input.u8(), input.u8(), input.u8()]);
                self.memory.write(address % (MEMORY_BYTES - 4), &bytes);
            }
            0xb0..0xb8 => {
                let bytes: Vec<u8> = (0..input.u8()).map(|_| input.u8()).collect();
                self.clients.send(self.connection, &[IoSlice::new(&bytes)]);
            }
            0xb8..0xbc => self.reconnect(features(input.u8())),
            polls => {
                let cores = match polls {
                    0xc0..0xd0 => 0..1,
                    0xd0..0xd8 => 1..2,
                    0xd8..0xe0 => 1..CORES,
                    _ => 0..CORES,
                };
                self.poll_cores(cores, usize::from(polls & 0xf) + 1);
            }
        }
    }

    /// Disconnects. Everything of the connection is freed.
    fn end(&mut self) {
        self.clients.close(self.connection);
        for _ in 0..END_POLLS_MAX {
            if self.cores.iter().all(|core| core.group.connections().is_empty()) {
                return;
            }
            self.now_ns += POLL_NS;
            self.cores.iter_mut().for_each(|core| core.poll(self.now_ns));
        }
        panic!("a connection is left");
    }
}

fn address(port: u16) -> StreamAddress {
    StreamAddress::Tcp(([10, 0, 0, 1], port).into())
}

fn connect(clients: &mut SimulatedNetwork, port: u16) -> ConnectionId {
    let stream = clients.connect(address(port));
    clients.add(stream).expect("room for a connection")
}

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, bytes).expect("memory");
    file
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd")
}

/// A disk, and a SCSI host with two targets.
fn config() -> VhostConfig {
    let registry = Registry::new();
    let open = |name: &str| {
        bdev::malloc::create(&registry, MallocConfig::new(name, DISK_BLOCKS, 512)).expect("a new name");
        Arc::new(registry.open(name, Access::ReadWrite).expect("it was just made"))
    };
    let descriptors = [0, 1, 2].map(|key| (key, open(&format!("Malloc{key}"))));
    let unit = |key: u32| {
        let config = UnitConfig::of_device(descriptors[key as usize].1.device(), false);
        let unit = LogicalUnit::new(config, Arc::default());
        Some(ScsiUnit { id: key.into(), key, blocks: unit.blocks(), is_announced: true, unit })
    };
    let mut scsi = ScsiBackend::default();
    (scsi.targets[0], scsi.targets[3]) = (unit(1), unit(2));
    let blk = Backend::Blk(BlkBackend::new(0, false, true, descriptors[0].1.device()));
    let controller = |port: u16, name, backend| {
        Arc::new(Controller::new(port.into(), port, name, backend, (0..CORES).collect()))
    };
    VhostConfig {
        controllers: vec![
            controller(BLK, "disk", blk),
            controller(SCSI, "host", Backend::Scsi(Box::new(scsi))),
        ],
        devices: DeviceMap::from(descriptors.clone()),
    }
}

fn region(start: u64, bytes: u64) -> MemoryRegion {
    MemoryRegion { guest_address: start, size: bytes, user_address: USER + start, mmap_offset: start }
}

/// The areas of a virtqueue, moved by so many bytes.
fn queue_address(index: u32, moved: u64) -> VringAddress {
    let area = USER + u64::from(index) * QUEUE_BYTES + moved;
    VringAddress {
        index,
        flags: 0,
        descriptors: area,
        used: area + (8 << 10),
        available: area + (4 << 10),
        log: 0,
    }
}

fn features(choice: u8) -> Features {
    let known = [
        Features::EVENT_IDX,
        Features::INDIRECT_DESC,
        Features::BLK_FLUSH,
        Features::BLK_CONFIG_WCE,
        Features::VHOST_LOG_ALL,
    ];
    let chosen = known.into_iter().enumerate().filter(|(bit, _)| choice >> bit & 1 != 0);
    chosen.fold(Features::empty(), |all, (_, feature)| all | feature)
}

fn blk_header(input: &mut Input<'_>) -> Vec<u8> {
    let kind = u32::from(input.u8() % 16);
    let sector = u64::from(input.u16() % (DISK_BLOCKS as u16 + 8));
    RequestHeader { kind, priority: 0, sector }.to_bytes().to_vec()
}

fn unit_address(choice: u8) -> u64 {
    match choice {
        0..0x60 => UnitAddress { target: 0, lun: 0 }.to_field(),
        0x60..0xc0 => UnitAddress { target: 3, lun: 0 }.to_field(),
        choice => u64::from(choice).wrapping_mul(0x0101_0001_0100_4001),
    }
}

/// A command's header and CDB.
fn command(input: &mut Input<'_>) -> Vec<u8> {
    let lun = unit_address(input.u8());
    let tag = u64::from(input.u8() % 8);
    let header = CommandHeader { lun, tag, attribute: 0, priority: 0, reference_number: 0 };
    let mut bytes = header.to_bytes().to_vec();
    let opcode = input.u8();
    bytes.push(if opcode & 0x80 == 0 { OPCODES[usize::from(opcode) % OPCODES.len()] } else { input.u8() });
    let is_wild = opcode & 0x40 != 0;
    for at in 1..16 {
        // High bytes of addresses and lengths are usually 0, so that blocks are on the unit.
        let is_low =
            matches!((bytes[CommandHeader::SIZE], at), (_, 1) | (0x80.., 9 | 13) | (..0x80, 3..=5 | 8));
        bytes.push(if is_wild || is_low { input.u8() } else { 0 });
    }
    bytes.resize(COMMAND_BYTES, 0);
    bytes
}

/// A request of the control queue: a task management function, or a query for or subscription of events.
fn control_request(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = u32::from(input.u8() % 4).to_le_bytes().to_vec();
    bytes.extend(u32::from(input.u8() % 9).to_le_bytes());
    bytes.extend(unit_address(input.u8()).to_le_bytes());
    bytes.extend(u64::from(input.u8() % 8).to_le_bytes());
    bytes.truncate(usize::from(input.u8() % 32).max(4));
    bytes
}

/// The descriptors that a request has when it is right.
fn expected_descriptors<'a>(
    kind: FrontendRequest,
    file: BorrowedFd<'a>,
    eventfd: BorrowedFd<'a>,
) -> Vec<BorrowedFd<'a>> {
    use FrontendRequest as Kind;
    match kind {
        Kind::SetMemTable => vec![file; 2],
        Kind::AddMemReg | Kind::RemMemReg | Kind::SetLogBase | Kind::SetInflightFd => vec![file],
        Kind::SetVringKick | Kind::SetVringCall | Kind::SetVringErr | Kind::SetLogFd => vec![eventfd],
        _ => Vec::new(),
    }
}

/// A payload of the right form.
fn payload(kind: FrontendRequest, port: u16, input: &mut Input<'_>) -> Vec<u8> {
    use FrontendRequest as Kind;
    let pages = |input: &mut Input<'_>| u64::from(input.u8()) << 12;
    let any_region = |input: &mut Input<'_>| {
        let start = pages(input);
        MemoryRegion { mmap_offset: pages(input), ..region(start, pages(input)) }
    };
    match kind {
        Kind::SetMemTable => MemoryTable(vec![any_region(input), any_region(input)]).to_bytes(),
        Kind::AddMemReg | Kind::RemMemReg => SingleRegion::from(any_region(input)).to_bytes().to_vec(),
        Kind::SetVringNum | Kind::SetVringBase | Kind::GetVringBase | Kind::SetVringEnable => {
            VringState { index: (input.u8() % (QUEUES as u8 + 1)).into(), value: input.u16().into() }
                .to_bytes()
                .to_vec()
        }
        Kind::SetVringAddr => {
            let (index, moved) = (input.u8() % (QUEUES as u8 + 1), pages(input) >> 4);
            VringAddress { flags: (input.u8() & 1).into(), ..queue_address(index.into(), moved) }
                .to_bytes()
                .to_vec()
        }
        Kind::SetLogBase => {
            LogBase { size: input.u16().into(), mmap_offset: pages(input) }.to_bytes().to_vec()
        }
        Kind::GetInflightFd | Kind::SetInflightFd => {
            let (mmap_offset, queues) = (pages(input), input.u8() % 8);
            let mmap_size = u64::from(input.u16()) << 4;
            InflightDescription { mmap_size, mmap_offset, queues: queues.into(), queue_size: input.u16() }
                .to_bytes()
                .to_vec()
        }
        Kind::GetConfig | Kind::SetConfig => {
            let size = input.u8();
            let header = ConfigHeader { offset: input.u8().into(), size: size.into(), flags: 0 };
            let bytes = (0..size).map(|_| input.u8());
            header.to_bytes().into_iter().chain(bytes).collect()
        }
        Kind::SetFeatures => {
            let own = if port == BLK { Features::empty() } else { Features::SCSI_HOTPLUG };
            let chosen = features(input.u8()) | Features::VHOST_USER_PROTOCOL_FEATURES | own;
            U64Payload { value: chosen.bits() }.to_bytes().to_vec()
        }
        _ => U64Payload { value: input.u16().into() }.to_bytes().to_vec(),
    }
}

/// A front-end whose messages, memory, virtqueues and requests are what the bytes say; the first byte selects
/// a block device or a SCSI host, and its features. The target must not panic, and must free everything of a
/// client that disconnects.
///
/// # Panics
/// If it does not.
pub fn any_frontend(bytes: &[u8]) {
    serve(bytes);
}

/// As [`any_frontend`]. Returns the number of chains that the target has returned.
fn serve(bytes: &[u8]) -> usize {
    let mut input = Input(bytes);
    let how = input.u8();
    let mut any = AnyFrontend::new(if how & 1 == 0 { BLK } else { SCSI });
    if how & 2 == 0 {
        any.set_up(features(how >> 2));
    }
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        any.step(&mut input);
    }
    any.poll(16);
    let used = any.used + any.count_used();
    any.end();
    used
}

#[cfg(test)]
mod tests {
    use random::WyRand;

    use super::*;

    /// Sixteen polls of all cores.
    const POLLS: u8 = 0xff;

    #[test]
    fn an_honest_front_end_is_served() {
        // A read of a sector into a buffer at half of the memory, on each of the queues.
        let read = |queue: u8| [0, 0x0d, queue, 0, 1, 0, 0x80, 0, 2];
        let blk: Vec<u8> = [0].into_iter().chain((0..5).flat_map(read)).chain([POLLS]).collect();
        assert_eq!(super::serve(&blk), 5);
        // TEST UNIT READY and INQUIRY on a request queue, a reset of the unit on the control queue.
        let mut scsi = vec![1];
        scsi.extend([0, 0x0c, 2, 0, 1, 0, 0, 0, 0, 0, 0]);
        scsi.extend([0, 0x0d, 3, 0, 1, 4, 0, 0, 0, 0, 0, 0x80, 0, 2]);
        scsi.extend([0, 0x08, 0, 0, 5, 0, 0, 24, POLLS]);
        assert_eq!(super::serve(&scsi), 3);
    }

    /// And only by them: a core that is not polled returns nothing.
    #[test]
    fn workers_serve_virtqueues_of_both_kinds_of_controllers() {
        for (port, queue) in [(BLK, 1), (SCSI, 3)] {
            let mut any = AnyFrontend::new(port);
            any.set_up(Features::empty());
            let connections = any.cores.iter().map(|core| core.group.connections().len());
            assert_eq!(connections.collect::<Vec<_>>(), [1; CORES]);
            let request = match port {
                BLK => vec![0x0d, queue, 0, 1, 0, 0x80, 0, 2],
                _ => vec![0x0c, queue, 0, 1, 0, 0, 0, 0, 0, 0],
            };
            any.add_request(&mut Input(&request));
            any.poll_cores(0..1, 16);
            any.poll_cores(2..CORES, 16);
            assert_eq!(any.count_used(), 0, "{port}");
            any.poll_cores(1..2, 16);
            assert_eq!(any.count_used(), 1, "{port}");
            any.end();
        }
    }

    /// Two connections share the virtqueues, so that both find the same requests.
    #[test]
    fn one_of_several_connections_fetches_a_limited_number_of_requests() {
        let of_queue = usize::from(QUEUE_SIZE) / 4;
        // Reads of the disk, each of which counts as four requests, in the two virtqueues of the first core.
        for (connections, in_first_turn) in
            [(1, 2 * of_queue), (2, target_shell::TURN_COMMANDS_MAX as usize / 4)]
        {
            let mut any = AnyFrontend::new(BLK);
            any.set_up(Features::empty());
            let first = any.connection;
            if connections == 2 {
                any.connection = connect(&mut any.clients, BLK);
                any.set_up(Features::empty());
            }
            let header = RequestHeader { kind: 0, priority: 0, sector: 0 }.to_bytes();
            any.memory.write(REQUESTS, &header);
            let parts = [
                (REQUESTS, header.len() as u32, false),
                (REGION_BYTES, DISK_BLOCKS as u32 * 512, true),
                (REQUESTS + 128, 1, true),
            ];
            // All of them find one request by the notification and one in a poll, so that each counts as
            // busy.
            for number in 0..2 {
                any.add(0, &parts);
                rustix::io::write(&any.kick, &1_u64.to_ne_bytes()).expect("an eventfd takes it");
                while any.count_used() == number {
                    any.poll_cores(0..1, 1);
                }
            }
            for queue in [0, CORES as u32] {
                (0..of_queue).for_each(|_| any.add(queue, &parts));
            }
            any.poll_cores(0..1, 1);
            assert_eq!(any.count_used(), 2 + in_first_turn, "of {connections} connections");
            any.poll_cores(0..1, 16);
            assert_eq!(any.count_used(), 2 + 2 * of_queue, "all are served");
            if connections == 2 {
                any.clients.close(first);
            }
            any.end();
        }
    }

    #[test]
    fn any_front_end_is_survived() {
        let mut random = WyRand::new(1);
        let mut used = 0;
        for round in 0..100_u16 {
            let mut bytes = vec![(round % 2) as u8 | ((round % 7) as u8) << 2];
            bytes.extend((0..600).map(|_| random.next_bits() as u8));
            used += super::serve(&bytes);
        }
        assert!(used > 100, "{used} chains are too few");
    }
}
