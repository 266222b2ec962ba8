//! Measures a vhost-user block device with a driver that costs little.
//!
//! `vhost_blk measure [DEPTH [SECONDS]]` reads 4 KiB blocks of a null device from another thread, and prints
//! the reads a second. `vhost_blk count [DEPTH [TURNS]]` runs the driver on the target's core, polls both
//! alternately, and exits after TURNS polls. The instructions per read at a depth are the difference between
//! two runs with different TURNS under `valgrind --tool=callgrind --toggle-collect='*GroupPoller*poll*'`.
//!
//! Virtqueue and requests lie in memory as those of libblkio do: a split virtqueue, a header and a status
//! together and not aligned, the data in a region of its own, and chains of three descriptors.

use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use bdev::{Registry, null};
use dma::SharedRegion;
use reactor::{IdlePolicy, Period, PollResult, Poller, ReactorConfig, Reactors, Shutdown};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sockets::Wait;
use vhost::{VhostBlkConfig, VhostTarget};
use wire_vhost_user::{
    FrontendRequest, MemoryRegion, MemoryTable, U64Payload, VhostUserHeader, VringAddress, VringState,
};
use wire_virtio::blk::{BlkStatus, RequestHeader, RequestKind};
use wire_virtio::split::{Descriptor, available, used};
use wire_virtio::{Features, descriptor_flags, needs_event};

type ExampleError = Box<dyn std::error::Error>;

/// Size of the virtqueue.
const SIZE: u16 = 512;
/// Descriptors of a read: its header, its data and its status.
const CHAIN: u16 = 3;
const DEPTH_MAX: u16 = SIZE / CHAIN;
const BYTES: u64 = 4096;
/// Sectors of the device.
const SECTORS: u64 = 1 << 21;
/// Offsets in the region of the virtqueue.
const AVAILABLE: u64 = 16 << 10;
const USED: u64 = 24 << 10;
const HEADERS: u64 = 32 << 10;
/// Bytes from a header to the next one, the status between them included.
const HEADER_BYTES: u64 = 33;
const QUEUE_BYTES: u64 = 64 << 10;
/// Guest addresses of the regions.
const QUEUE: u64 = 0x1_0000_0000;
const DATA: u64 = 0x2_0000_0000;

/// A driver of one virtqueue, in memory that it shares with the device.
struct ExampleDriver {
    _stream: UnixStream,
    queue: SharedRegion,
    kick: OwnedFd,
    available: u16,
    /// What of `available` the device knows.
    published: u16,
    used: u16,
    sector: u64,
}

impl ExampleDriver {
    fn connect(socket: &Path, depth: u16) -> Result<ExampleDriver, ExampleError> {
        use FrontendRequest as Kind;
        let mut stream = UnixStream::connect(socket)?;
        let (queue_file, data_file) = (memfd(QUEUE_BYTES)?, memfd(u64::from(DEPTH_MAX) * BYTES)?);
        let queue = SharedRegion::map(queue_file.as_fd(), 0, QUEUE_BYTES, true)?;
        let region = |guest_address, size| MemoryRegion {
            guest_address,
            size,
            user_address: guest_address,
            mmap_offset: 0,
        };
        let table = MemoryTable(vec![region(QUEUE, QUEUE_BYTES), region(DATA, u64::from(DEPTH_MAX) * BYTES)]);
        let state = |value: u32| VringState { index: 0, value }.to_bytes();
        let number = |value: u64| U64Payload { value }.to_bytes();
        let address = VringAddress {
            index: 0,
            flags: 0,
            descriptors: QUEUE,
            available: QUEUE + AVAILABLE,
            used: QUEUE + USED,
            log: 0,
        };
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let (kick, call) = (event()?, event()?);
        let features = Features::VERSION_1 | Features::EVENT_IDX | Features::VHOST_USER_PROTOCOL_FEATURES;
        let messages: [(Kind, &[u8], &[BorrowedFd<'_>]); 10] = [
            (Kind::SetOwner, &[], &[]),
            (Kind::SetFeatures, &number(features.bits()), &[]),
            (Kind::SetMemTable, &table.to_bytes(), &[queue_file.as_fd(), data_file.as_fd()]),
            (Kind::SetVringNum, &state(SIZE.into()), &[]),
            (Kind::SetVringBase, &state(0), &[]),
            (Kind::SetVringAddr, &address.to_bytes(), &[]),
            (Kind::SetVringCall, &number(0), &[call.as_fd()]),
            (Kind::SetVringKick, &number(0), &[kick.as_fd()]),
            (Kind::SetVringEnable, &state(1), &[]),
            // Answered when the others are executed.
            (Kind::GetFeatures, &[], &[]),
        ];
        for (kind, payload, descriptors) in messages {
            let header = VhostUserHeader::request(kind.to_wire(), payload.len() as u32).to_bytes();
            let bytes = [&header[..], payload].concat();
            sockets::send_with_descriptors(&stream, &[IoSlice::new(&bytes)], descriptors, Wait::Yes)?;
        }
        stream.read_exact(&mut [0; VhostUserHeader::SIZE + U64Payload::SIZE])?;
        let mut driver =
            ExampleDriver { _stream: stream, queue, kick, available: 0, published: 0, used: 0, sector: 0 };
        (0..depth).for_each(|read| driver.describe(read));
        (0..depth).for_each(|read| driver.push_read(read));
        driver.publish()?;
        Ok(driver)
    }

    /// Writes the descriptors of a read, which stay as they are.
    fn describe(&self, read: u16) {
        let head = read * CHAIN;
        let header = QUEUE + HEADERS + u64::from(read) * HEADER_BYTES;
        let (next, writes) = (descriptor_flags::NEXT, descriptor_flags::WRITE);
        let parts = [
            (header, RequestHeader::SIZE as u32, next),
            (DATA + u64::from(read) * BYTES, BYTES as u32, next | writes),
            (header + RequestHeader::SIZE as u64, 1, writes),
        ];
        for (index, (address, length, flags)) in (head..).zip(parts) {
            let descriptor = Descriptor { address, length, flags, next: index + 1 };
            self.queue.write(u64::from(index) * Descriptor::SIZE as u64, &descriptor.to_bytes());
        }
    }

    fn push_read(&mut self, read: u16) {
        self.sector = (self.sector + 8 * 7919) % SECTORS;
        let header = RequestHeader { kind: RequestKind::In as u32, priority: 0, sector: self.sector };
        let at = HEADERS + u64::from(read) * HEADER_BYTES;
        self.queue.write(at, &header.to_bytes());
        self.queue.store_u8(at + RequestHeader::SIZE as u64, u8::MAX);
        self.queue.store_u16(AVAILABLE + available::entry(self.available, SIZE), read * CHAIN);
        self.available = self.available.wrapping_add(1);
    }

    /// Makes the reads available, and notifies the device if it is not polling.
    fn publish(&mut self) -> rustix::io::Result<()> {
        // No notification of the driver: the index that asks for one is behind.
        self.queue.store_u16(AVAILABLE + available::used_event(SIZE), self.used.wrapping_sub(1));
        self.queue.store_u16(AVAILABLE + available::INDEX, self.available);
        fence(Ordering::SeqCst);
        let event = self.queue.load_u16(USED + used::available_event(SIZE));
        let old = std::mem::replace(&mut self.published, self.available);
        if needs_event(event, self.available, old) {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Reaps completions and submits a new read for each. Returns their number.
    fn poll(&mut self) -> u64 {
        let count = self.queue.load_u16(USED + used::INDEX).wrapping_sub(self.used);
        for _ in 0..count {
            let read = self.queue.load_u32(USED + used::entry(self.used, SIZE)) as u16 / CHAIN;
            let status =
                self.queue.load_u8(HEADERS + u64::from(read) * HEADER_BYTES + RequestHeader::SIZE as u64);
            assert_eq!(status, BlkStatus::Ok.to_wire(), "read {read} failed");
            self.used = self.used.wrapping_add(1);
            self.push_read(read);
        }
        if count > 0 {
            self.publish().expect("room in the counter of an eventfd");
        }
        count.into()
    }
}

fn memfd(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create("example", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// Polls a driver on the target's core.
struct DriverPoller {
    driver: ExampleDriver,
    turns: u64,
    reads: u64,
    /// Receives the number of completed reads at the end.
    done: SyncSender<u64>,
}

impl Poller for DriverPoller {
    fn name(&self) -> &str {
        "driver"
    }

    fn poll(&mut self, _now_ns: u64) -> PollResult {
        if self.turns > 0 {
            self.turns -= 1;
            self.reads += self.driver.poll();
            if self.turns == 0 {
                let _ = self.done.send(self.reads);
            }
        }
        PollResult::Busy(1)
    }

    fn shutdown(&mut self, _now_ns: u64) -> Shutdown {
        Shutdown::Done
    }
}

fn with_device(
    depth: u16,
    job: impl FnOnce(ExampleDriver, &Reactors) -> Result<(), ExampleError>,
) -> Result<(), ExampleError> {
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(format!("DEPTH is a number from 1 to {DEPTH_MAX}").into());
    }
    let directory = std::env::temp_dir();
    let name = format!("ringbolt-vhost-{}", std::process::id());
    let registry = Registry::new();
    null::create(&registry, null::NullConfig::new("Null0", SECTORS, 512))?;
    let cpus = "0".parse()?;
    let reactors =
        Reactors::start(&ReactorConfig { cpus, idle: IdlePolicy::Spin, ..ReactorConfig::default() })?;
    let target = VhostTarget::new(registry.clone(), reactors.handles(), directory.clone());
    let controller = target.create(VhostBlkConfig::new(&name, "Null0"))?;
    let done = ExampleDriver::connect(&controller.socket, depth).and_then(|driver| job(driver, &reactors));
    target.shutdown();
    reactors.stop();
    target.close();
    done
}

fn measure(depth: u16, seconds: u64) -> Result<(), ExampleError> {
    with_device(depth, |mut driver, _| {
        let (start, mut count) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(seconds) {
            for _ in 0..1000 {
                count += driver.poll();
            }
        }
        let rate = count as f64 / start.elapsed().as_secs_f64();
        println!("depth {depth}: {:.2} M reads/s", rate / 1e6);
        Ok(())
    })
}

fn count(depth: u16, turns: u64) -> Result<(), ExampleError> {
    with_device(depth, |driver, reactors| {
        let (done, reads) = std::sync::mpsc::sync_channel(1);
        let start = Instant::now();
        reactors.handles()[0].call(move |core| {
            core.add_poller(Box::new(DriverPoller { driver, turns, reads: 0, done }), Period::EveryTurn);
        })?;
        let reads = reads.recv()?;
        let each_ns = start.elapsed().as_nanos() as f64 / reads as f64;
        println!("{reads} reads at depth {depth} in {turns} turns, {each_ns:.1} ns each");
        Ok(())
    })
}

fn main() -> Result<(), ExampleError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, default: u64| arguments.get(index).map_or(Ok(default), |text| text.parse());
    match arguments.first().map(String::as_str) {
        Some("measure") => measure(number(1, 32)?.try_into()?, number(2, 5)?),
        Some("count") => count(number(1, 32)?.try_into()?, number(2, 10_000)?),
        _ => Err("vhost_blk measure [DEPTH [SECONDS]] | count [DEPTH [TURNS]]".into()),
    }
}
