//! A front-end and driver that know only the specifications: sockets, memory and virtqueues of their own.

use std::cell::RefCell;
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bdev::{Registry, delay, malloc, null};
use dma::SharedRegion;
use reactor::{ReactorConfig, Reactors};
use rustix::event::{EventfdFlags, eventfd};
use sockets::Wait;
use vhost::{VhostBlkConfig, VhostTarget};
use wire_vhost_user::{
    FrontendRequest, MemoryRegion, MemoryTable, U64Payload, VhostUserHeader, VringAddress, VringDescriptor,
    VringState,
};
use wire_virtio::blk::{RequestHeader, RequestKind};
use wire_virtio::descriptor_flags::{INDIRECT, NEXT, WRITE};
use wire_virtio::packed::{EventSuppression, PackedDescriptor, RingPosition};
use wire_virtio::split::{Descriptor, UsedElement, available, used};
use wire_virtio::{Features, descriptor_flags};

/// Bytes of the guest's memory.
pub(crate) const MEMORY_BYTES: u64 = 4 << 20;
/// Its guest-physical address.
pub(crate) const GUEST: u64 = 0x1_0000_0000;
/// Its address in the front-end.
pub(crate) const USER: u64 = 0x7000_0000_0000;
/// A virtqueue of the connection's own core, and one of the other core.
pub(crate) const QUEUES: [u8; 2] = [0, 1];
/// Time that an answer may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// A target with one controller, in a directory of its own; of a malloc device unless it is configured
/// otherwise.
pub(crate) struct TestTarget {
    pub(crate) registry: Registry,
    pub(crate) target: VhostTarget,
    pub(crate) directory: PathBuf,
    reactors: Option<Reactors>,
}

impl TestTarget {
    pub(crate) fn start(name: &str, configure: impl Fn(VhostBlkConfig) -> VhostBlkConfig) -> TestTarget {
        let directory = std::env::temp_dir().join(format!("vhost-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        // The second one serves every other virtqueue.
        let cpus = os::CpuSet::new(vec![0, 1]).unwrap();
        let config = ReactorConfig { cpus, pin: false, ..Default::default() };
        let reactors = Reactors::start(&config).unwrap();
        let registry = Registry::new();
        malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 4096, 512)).unwrap();
        null::create(&registry, null::NullConfig::new("Null0", 4096, 512)).unwrap();
        malloc::create(&registry, malloc::MallocConfig::new("Malloc1", 4096, 512)).unwrap();
        // Writes overtake reads.
        let slow = delay::DelayConfig::new("Malloc1", "Slow0", 1000);
        let reads = 50_000;
        let slow = delay::DelayConfig { avg_read_latency_us: reads, p99_read_latency_us: reads, ..slow };
        delay::create(&registry, slow).unwrap();
        let target = VhostTarget::new(registry.clone(), reactors.handles(), directory.clone());
        target.create(configure(VhostBlkConfig::new("disk", "Malloc0"))).unwrap();
        TestTarget { registry, target, directory, reactors: Some(reactors) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("disk")
    }

    /// Waits until no client is connected.
    pub(crate) fn wait_for_no_connections(&self) {
        wait_until("the end of the connection", || {
            self.target.controllers().unwrap().iter().all(|one| one.sessions.is_empty())
        });
    }
}

impl Drop for TestTarget {
    fn drop(&mut self) {
        self.target.shutdown();
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
        self.target.close();
        _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A connection of a front-end, and the guest's memory.
pub(crate) struct Frontend {
    pub(crate) stream: RefCell<UnixStream>,
    pub(crate) memory: SharedRegion,
    pub(crate) file: OwnedFd,
    pub(crate) features: Features,
}

pub(crate) fn memfd(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

impl Frontend {
    /// Connects without sending anything.
    pub(crate) fn connect(socket: &Path) -> Frontend {
        let stream = RefCell::new(connect(socket));
        let file = memfd(MEMORY_BYTES);
        let memory = SharedRegion::map(file.as_fd(), 0, MEMORY_BYTES, true).unwrap();
        Frontend { stream, memory, file, features: Features::empty() }
    }

    /// Connects, negotiates those of `features` that are offered, and shares the memory.
    pub(crate) fn negotiated(socket: &Path, features: Features) -> Frontend {
        let mut frontend = Frontend::connect(socket);
        let offered = Features::from_bits_retain(frontend.get(FrontendRequest::GetFeatures));
        assert!(offered.contains(Features::VHOST_USER_PROTOCOL_FEATURES));
        frontend.features = offered & (features | Features::VHOST_USER_PROTOCOL_FEATURES);
        frontend.negotiate();
        frontend
    }

    /// Connects again, to what may be another target. The guest does not notice.
    pub(crate) fn reconnect(&self, socket: &Path) {
        self.stream.replace(connect(socket));
        self.negotiate();
    }

    fn negotiate(&self) {
        let protocol = self.get(FrontendRequest::GetProtocolFeatures);
        self.send(FrontendRequest::SetProtocolFeatures, &protocol.to_le_bytes(), &[]);
        self.set(FrontendRequest::SetOwner, &[], &[]);
        self.set(FrontendRequest::SetFeatures, &self.features.bits().to_le_bytes(), &[]);
        self.share_memory();
    }

    pub(crate) fn share_memory(&self) {
        let region =
            MemoryRegion { guest_address: GUEST, size: MEMORY_BYTES, user_address: USER, mmap_offset: 0 };
        let table = MemoryTable(vec![region]).to_bytes();
        self.set(FrontendRequest::SetMemTable, &table, &[self.file.as_fd()]);
    }

    pub(crate) fn send_message(
        &self,
        header: &VhostUserHeader,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) {
        let bytes = [&header.to_bytes(), payload].concat();
        let sent = sockets::send_with_descriptors(
            &*self.stream.borrow(),
            &[IoSlice::new(&bytes)],
            descriptors,
            Wait::Yes,
        );
        // A connection that was closed is noticed by who reads.
        _ = sent;
    }

    /// Sends a request that is not acknowledged.
    pub(crate) fn send(&self, request: FrontendRequest, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send_message(
            &VhostUserHeader::request(request.to_wire(), payload.len() as u32),
            payload,
            descriptors,
        );
    }

    /// Sends a request and returns its acknowledgement.
    pub(crate) fn ask(
        &self,
        request: FrontendRequest,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<u64> {
        let header = VhostUserHeader::request(request.to_wire(), payload.len() as u32);
        self.send_message(&VhostUserHeader { needs_reply: true, ..header }, payload, descriptors);
        let bytes = self.reply(request)?;
        Some(U64Payload::decode(&bytes).unwrap().value)
    }

    /// Sends a request that has to be accepted.
    pub(crate) fn set(&self, request: FrontendRequest, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        assert_eq!(self.ask(request, payload, descriptors), Some(0), "{request:?}");
    }

    /// Sends a request for a number.
    pub(crate) fn get(&self, request: FrontendRequest) -> u64 {
        self.send(request, &[], &[]);
        U64Payload::decode(&self.reply(request).unwrap()).unwrap().value
    }

    /// Stops a virtqueue, and returns its base.
    pub(crate) fn stop_queue(&self, index: u32) -> u32 {
        self.send(FrontendRequest::GetVringBase, &VringState { index, value: 0 }.to_bytes(), &[]);
        let state = VringState::decode(&self.reply(FrontendRequest::GetVringBase).unwrap()).unwrap();
        assert_eq!(state.index, index);
        state.value
    }

    /// Receives the payload of a reply; `None` if the connection is closed.
    pub(crate) fn reply(&self, request: FrontendRequest) -> Option<Vec<u8>> {
        let mut header = [0; VhostUserHeader::SIZE];
        (&*self.stream.borrow()).read_exact(&mut header).ok()?;
        let header = VhostUserHeader::decode(&header).unwrap();
        assert!(header.is_reply && header.request == request.to_wire(), "{header:?} answers {request:?}");
        let mut payload = vec![0; header.payload_bytes as usize];
        (&*self.stream.borrow()).read_exact(&mut payload).ok()?;
        Some(payload)
    }

    /// Whether the target has closed the connection, which it is given time to do.
    pub(crate) fn is_closed(&self) -> bool {
        match (&*self.stream.borrow()).read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            // Not the time-out.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Starts a virtqueue whose areas begin at an offset of the memory, and take 32 KiB.
    pub(crate) fn start_queue(&self, index: u8, size: u16, offset: u64) -> Driver<'_> {
        let driver = Driver {
            frontend: self,
            index,
            size,
            offset,
            is_packed: self.features.contains(Features::RING_PACKED),
            kick: new_eventfd(),
            call: new_eventfd(),
            next_descriptor: 0,
            available: 0,
            used: 0,
            position: RingPosition::START,
            used_position: RingPosition::START,
        };
        let base = u32::from(RingPosition::START.to_bits());
        driver.start(if driver.is_packed { base | base << 16 } else { 0 });
        driver
    }
}

/// Connects to a target that may be about to listen.
fn connect(socket: &Path) -> UnixStream {
    let mut stream = None;
    wait_until("a connection", || {
        stream = UnixStream::connect(socket).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// A buffer of a chain: offset in the memory, length, and whether the device writes it.
pub(crate) type Part = (u64, u32, bool);

/// The driver of a virtqueue: chains of descriptors in, used chains out.
pub(crate) struct Driver<'a> {
    pub(crate) frontend: &'a Frontend,
    index: u8,

    pub(crate) size: u16,
    pub(crate) offset: u64,
    pub(crate) is_packed: bool,
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    next_descriptor: u16,
    pub(crate) available: u16,
    used: u16,
    position: RingPosition,
    pub(crate) used_position: RingPosition,
}

impl Driver<'_> {
    /// Has the device start the virtqueue, where `base` says.
    pub(crate) fn start(&self, base: u32) {
        let index = self.index;
        let state = |value: u32| VringState { index: index.into(), value }.to_bytes();
        let which = VringDescriptor { index, is_absent: false }.to_bits().to_le_bytes();
        let address = VringAddress {
            index: index.into(),
            flags: 0,
            descriptors: USER + self.offset,
            available: USER + self.available_at(),
            used: USER + self.used_at(),
            log: 0,
        };
        let set =
            |request, payload: &[u8], files: &[BorrowedFd<'_>]| self.frontend.set(request, payload, files);
        set(FrontendRequest::SetVringNum, &state(self.size.into()), &[]);
        set(FrontendRequest::SetVringBase, &state(base), &[]);
        set(FrontendRequest::SetVringAddr, &address.to_bytes(), &[]);
        set(FrontendRequest::SetVringCall, &which, &[self.call.as_fd()]);
        set(FrontendRequest::SetVringKick, &which, &[self.kick.as_fd()]);
        set(FrontendRequest::SetVringEnable, &state(1), &[]);
    }

    pub(crate) fn memory(&self) -> &SharedRegion {
        &self.frontend.memory
    }

    pub(crate) fn available_at(&self) -> u64 {
        self.offset + (8 << 10)
    }

    pub(crate) fn used_at(&self) -> u64 {
        self.offset + (16 << 10)
    }

    /// Writes a descriptor of a split virtqueue.
    pub(crate) fn write_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.memory().write(self.offset + 16 * u64::from(index), &descriptor.to_bytes());
    }

    /// Makes a chain available that begins at a descriptor of a split virtqueue.
    pub(crate) fn make_available(&mut self, head: u16) {
        let at = self.available_at() + available::entry(self.available, self.size);
        self.memory().store_u16(at, head);
        self.available = self.available.wrapping_add(1);
        self.memory().store_u16(self.available_at() + available::INDEX, self.available);
    }

    /// Makes a chain of these buffers available. Descriptors are used in turn. Returns its identifier.
    pub(crate) fn add(&mut self, parts: &[Part]) -> u16 {
        self.add_with(parts, 0)
    }

    /// Makes a chain of these buffers available, described by an indirect table at an offset of the memory.
    pub(crate) fn add_indirect(&mut self, table: u64, parts: &[Part]) -> u16 {
        for (index, (offset, length, writes)) in (0_u16..).zip(parts) {
            let is_last = usize::from(index) + 1 == parts.len();
            let flags = if *writes { WRITE } else { 0 };
            let bytes = if self.is_packed {
                // The table's order is the chain's: there is no flag.
                PackedDescriptor { address: GUEST + offset, length: *length, id: 0, flags }.to_bytes()
            } else {
                let flags = flags | if is_last { 0 } else { NEXT };
                Descriptor { address: GUEST + offset, length: *length, flags, next: index + 1 }.to_bytes()
            };
            self.memory().write(table + 16 * u64::from(index), &bytes);
        }
        self.add_with(&[(table, 16 * parts.len() as u32, false)], INDIRECT)
    }

    fn add_with(&mut self, parts: &[Part], more_flags: u16) -> u16 {
        if self.is_packed {
            return self.add_packed(parts, more_flags);
        }
        let head = self.next_descriptor;
        for (at, (offset, length, writes)) in parts.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (self.next_descriptor + 1) % self.size;
            let more = more_flags | if at + 1 < parts.len() { NEXT } else { 0 };
            let flags = more | if *writes { WRITE } else { 0 };
            let address = GUEST + offset;
            self.write_descriptor(
                index,
                Descriptor { address, length: *length, flags, next: self.next_descriptor },
            );
        }
        self.make_available(head);
        head
    }

    fn add_packed(&mut self, parts: &[Part], more_flags: u16) -> u16 {
        let id = self.next_descriptor;
        self.next_descriptor = (id + 1) % self.size;
        let first = self.position;
        let mut first_flags = 0;
        for (at, (offset, length, writes)) in parts.iter().enumerate() {
            let more = more_flags | if at + 1 < parts.len() { NEXT } else { 0 };
            let flags = more | if *writes { WRITE } else { 0 } | self.position.available_flags();
            let place = self.offset + 16 * u64::from(self.position.index);
            // The first descriptor becomes available last.
            let written = if at == 0 { 0 } else { flags };
            first_flags = if at == 0 { flags } else { first_flags };
            let unavailable = descriptor_flags::AVAILABLE | descriptor_flags::USED;
            let written = if at == 0 && !first.wrap { written | unavailable } else { written };
            let descriptor =
                PackedDescriptor { address: GUEST + offset, length: *length, id, flags: written };
            self.memory().write(place, &descriptor.to_bytes());
            self.position = self.position.advanced(1, self.size);
        }
        self.memory().store_u16(self.offset + 16 * u64::from(first.index) + 14, first_flags);
        id
    }

    /// Whether the device wants to be signalled when the next chain, after `added` others, is made available.
    pub(crate) fn wants_notification(&self, added: u16) -> bool {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        if self.is_packed {
            self.memory().load_u16(self.used_at() + 2) != EventSuppression::DISABLE
        } else if self.frontend.features.contains(Features::EVENT_IDX) {
            let event = self.memory().load_u16(self.used_at() + used::available_event(self.size));
            event == self.available.wrapping_sub(added)
        } else {
            self.memory().load_u16(self.used_at() + used::FLAGS) & used::NO_NOTIFY == 0
        }
    }

    /// Signals the device if it wants that, after a chain was added.
    pub(crate) fn notify(&self) {
        if self.wants_notification(1) {
            self.kick();
        }
    }

    /// Signals the device.
    pub(crate) fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// The next used chain: its identifier and the bytes written.
    pub(crate) fn try_used(&mut self, descriptors: u16) -> Option<(u16, u32)> {
        if self.is_packed {
            let at = self.offset + 16 * u64::from(self.used_position.index);
            let flags =
                self.memory().load_u16(at + 14) & (descriptor_flags::AVAILABLE | descriptor_flags::USED);
            if flags != self.used_position.used_flags() {
                return None;
            }
            let used = PackedDescriptor::decode(&self.memory().snapshot::<16>(at)).unwrap();
            self.used_position = self.used_position.advanced(descriptors, self.size);
            return Some((used.id, used.length));
        }
        if self.memory().load_u16(self.used_at() + used::INDEX) == self.used {
            return None;
        }
        let at = self.used_at() + used::entry(self.used, self.size);
        let element = UsedElement::decode(&self.memory().snapshot::<8>(at)).unwrap();
        self.used = self.used.wrapping_add(1);
        // Asks to be notified of the next.
        let event = self.available_at() + available::used_event(self.size);
        self.memory().store_u16(event, self.used);
        Some((element.id as u16, element.written))
    }

    /// Waits for the next used chain.
    pub(crate) fn used(&mut self, descriptors: u16) -> (u16, u32) {
        let mut found = None;
        wait_until("completion of a request", || {
            found = self.try_used(descriptors);
            found.is_some()
        });
        found.unwrap()
    }

    /// Whether the device has signalled since the last call.
    pub(crate) fn was_called(&self) -> bool {
        self.calls() > 0
    }

    /// How often the device has signalled since the last call.
    pub(crate) fn calls(&self) -> u64 {
        let mut count = [0; 8];
        if rustix::io::read(&self.call, &mut count).is_ok() { u64::from_ne_bytes(count) } else { 0 }
    }

    /// Executes a request whose header and status are at fixed offsets. Returns the status and the bytes
    /// written.
    pub(crate) fn execute(&mut self, kind: RequestKind, sector: u64, data: &[Part]) -> (u8, u32) {
        self.execute_raw(kind.to_wire(), sector, data)
    }

    pub(crate) fn execute_raw(&mut self, kind: u32, sector: u64, data: &[Part]) -> (u8, u32) {
        const HEADER: u64 = 64 << 10;
        const STATUS: u64 = HEADER + 16;
        let header = RequestHeader { kind, priority: 0, sector };
        self.memory().write(HEADER, &header.to_bytes());
        self.memory().store_u8(STATUS, 0xff);
        let mut parts = vec![(HEADER, 16, false)];
        parts.extend(data);
        parts.push((STATUS, 1, true));
        let id = self.add(&parts);
        self.notify();
        let (used, written) = self.used(parts.len() as u16);
        assert_eq!(used, id, "another chain was used");
        (self.memory().load_u8(STATUS), written)
    }
}
