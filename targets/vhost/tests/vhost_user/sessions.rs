//! What outlives a connection or changes during one: requests in flight, memory, the device, a migration.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bdev::null;
use dma::SharedRegion;
use sockets::{ReceivedDescriptors, Wait};
use vhost::VhostBlkConfig;
use wire_vhost_user::inflight::InflightDescription;
use wire_vhost_user::{
    BackendRequest, ConfigHeader, FrontendRequest, LogBase, SingleRegion, U64Payload, VhostUserHeader,
};
use wire_virtio::Features;
use wire_virtio::blk::{BlkConfig, RequestHeader, RequestKind};
use wire_virtio::split::used;

use crate::frontend::{
    Driver, Frontend, GUEST, MEMORY_BYTES, QUEUES, TIMEOUT, TestTarget, USER, memfd, wait_until,
};

const DATA: u64 = 1 << 20;

/// Has the target make memory for requests in flight.
pub(crate) fn inflight_memory(
    frontend: &Frontend,
    queues: u16,
    queue_size: u16,
) -> (InflightDescription, OwnedFd) {
    let asked = InflightDescription { mmap_size: 0, mmap_offset: 0, queues, queue_size };
    // With the padding that front-ends send.
    let payload = [&asked.to_bytes()[..], &[0; 4]].concat();
    frontend.send(FrontendRequest::GetInflightFd, &payload, &[]);
    let mut descriptors = ReceivedDescriptors::new(1);
    let mut bytes = [0; VhostUserHeader::SIZE + 24];
    let stream = frontend.stream.borrow();
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let count = sockets::receive_with_descriptors(&*stream, &mut parts, &mut descriptors, Wait::Yes).unwrap();
    assert_eq!(count, bytes.len());
    (InflightDescription::decode(&bytes[VhostUserHeader::SIZE..]).unwrap(), descriptors.pop().unwrap())
}

pub(crate) fn set_inflight(frontend: &Frontend, memory: &(InflightDescription, OwnedFd)) {
    frontend.set(FrontendRequest::SetInflightFd, &memory.0.to_bytes(), &[memory.1.as_fd()]);
}

/// Adds a request without waiting for it; each has 4 KiB of memory, in which the header and the status are.
pub(crate) fn add(queue: &mut Driver<'_>, number: u64, kind: RequestKind) -> u16 {
    let at = DATA + number * 4096;
    let header = RequestHeader { kind: kind.to_wire(), priority: 0, sector: number };
    queue.memory().write(at, &header.to_bytes());
    queue.memory().store_u8(at + 16, 0xff);
    queue.memory().store_u64(at + 512, 0);
    queue.add(&[(at, 16, false), (at + 512, 512, kind == RequestKind::In), (at + 16, 1, true)])
}

/// Adds three reads, and a write behind them: when it is used, they are in flight. On a busy machine a read
/// may complete before the write is added: then again.
pub(crate) fn put_three_reads_in_flight(queue: &mut Driver<'_>) {
    for _ in 0..20 {
        for number in 0..3 {
            add(queue, number, RequestKind::In);
        }
        let write = add(queue, 3, RequestKind::Out);
        queue.kick();
        let first = queue.used(3);
        if first == (write, 1) {
            return;
        }
        for _ in 0..3 {
            queue.used(3);
        }
    }
    panic!("a read of 50 ms never takes longer than a write");
}

/// Reads take 50 ms, and the writes between them are used first; where a machine is too slow for that, all
/// are used, and it is tried again. Returns the reads' ids.
fn put_four_reads_in_flight(queue: &mut Driver<'_>) -> Vec<u16> {
    for _ in 0..20 {
        let mut reads: Vec<u16> = Vec::new();
        let mut writes: Vec<u16> = Vec::new();
        for number in 0..4 {
            reads.push(add(queue, number, RequestKind::In));
            writes.push(add(queue, 4 + number, RequestKind::Out));
        }
        queue.kick();
        let used: Vec<u16> = (0..4).map(|_| queue.used(3).0).collect();
        if used.iter().all(|id| writes.contains(id)) {
            return reads;
        }
        for _ in 0..4 {
            queue.used(3);
        }
    }
    panic!("a read of 50 ms never takes longer than four writes");
}

#[test]
fn requests_in_flight_survive_the_connection() {
    for ring in [Features::empty(), Features::EVENT_IDX, Features::RING_PACKED] {
        let name = format!("inflight-{}", ring.bits());
        let configure = |config| VhostBlkConfig { bdev_name: "Slow0".into(), packed_ring: true, ..config };
        let target = TestTarget::start(&name, configure);
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
        let memory = inflight_memory(&frontend, 2, 32);
        set_inflight(&frontend, &memory);
        let mut queue = frontend.start_queue(1, 32, 0);
        for sector in 0..8 {
            queue.memory().write(DATA, &[sector as u8 + 1; 512]);
            assert_eq!(queue.execute(RequestKind::Out, sector, &[(DATA, 512, false)]), (0, 1));
        }
        for round in 0..3 {
            let mut reads = put_four_reads_in_flight(&mut queue);
            // The front-end of a split virtqueue knows the used index; that of a packed one knows nothing.
            let used_index = queue.memory().load_u16(queue.used_at() + used::INDEX);
            let base = if queue.is_packed { 0x8000_8000 } else { used_index.into() };
            frontend.reconnect(&target.socket());
            set_inflight(&frontend, &memory);
            queue.start(base);
            for _ in 0..4 {
                let (id, written) = queue.used(3);
                let at = reads.iter().position(|read| *read == id);
                reads.remove(at.unwrap_or_else(|| panic!("{name} {round}: {id} is no read in flight")));
                assert_eq!(written, 513);
            }
            for number in 0..4 {
                let at = DATA + number * 4096;
                assert_eq!(queue.memory().load_u8(at + 16), 0, "{name} {round}: status");
                assert_eq!(queue.memory().snapshot::<8>(at + 512), [number as u8 + 1; 8], "{name} {round}");
            }
            assert_eq!(queue.try_used(3), None, "{name} {round}: each is used once");
            assert_eq!(queue.execute(RequestKind::Flush, 0, &[]), (0, 1), "{name} {round}");
        }
    }
}

#[test]
fn damaged_memory_of_requests_in_flight_is_harmless() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let target = TestTarget::start(&format!("damaged-{}", ring.bits()), |config| VhostBlkConfig {
            packed_ring: true,
            ..config
        });
        for byte in [0xff, 0x01, 0x55] {
            let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
            let memory = inflight_memory(&frontend, 1, 16);
            set_inflight(&frontend, &memory);
            let mut queue = frontend.start_queue(0, 16, 0);
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
            // While it runs, and then everything but version and size before it is started again.
            let damage = vec![byte; memory.0.mmap_size as usize - 12];
            rustix::io::pwrite(&memory.1, &damage, 12).unwrap();
            let other = frontend.start_queue(1, 16, 32 << 10);
            drop(other);
            queue.kick();
            frontend.reconnect(&target.socket());
            set_inflight(&frontend, &memory);
            queue.start(0x8000_8000);
            queue.kick();
        }
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let mut queue = frontend.start_queue(0, 16, 0);
        assert_eq!(
            queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]),
            (0, 513),
            "the target still works"
        );
    }
}

/// The configuration space's byte for the mode of the cache.
fn writeback(frontend: &Frontend) -> u8 {
    let header = ConfigHeader { offset: BlkConfig::WRITEBACK as u32, size: 1, flags: 0 };
    frontend.send(FrontendRequest::GetConfig, &[&header.to_bytes()[..], &[0]].concat(), &[]);
    frontend.reply(FrontendRequest::GetConfig).unwrap()[ConfigHeader::SIZE]
}

/// A driver that has switched to write-through does not flush, and does not know that the target is another
/// one.
#[test]
fn a_write_through_cache_survives_the_connection() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let target = TestTarget::start(&format!("cache-{}", ring.bits()), |config| VhostBlkConfig {
            packed_ring: true,
            ..config
        });
        let features = Features::VERSION_1 | Features::BLK_FLUSH | Features::BLK_CONFIG_WCE | ring;
        let frontend = Frontend::negotiated(&target.socket(), features);
        let memory = inflight_memory(&frontend, 2, 32);
        set_inflight(&frontend, &memory);
        assert_eq!(writeback(&frontend), 1);
        let header = ConfigHeader { offset: BlkConfig::WRITEBACK as u32, size: 1, flags: 0 };
        let write_through = [&header.to_bytes()[..], &[0]].concat();
        frontend.set(FrontendRequest::SetConfig, &write_through, &[]);
        for round in 0..2 {
            frontend.reconnect(&target.socket());
            assert_eq!(writeback(&frontend), 1, "round {round}: a new connection");
            set_inflight(&frontend, &memory);
            assert_eq!(writeback(&frontend), 0, "round {round}: the same device");
        }
        // The mode goes into memory that is set later, and a reset ends it.
        let other = inflight_memory(&frontend, 2, 32);
        set_inflight(&frontend, &other);
        frontend.reconnect(&target.socket());
        set_inflight(&frontend, &other);
        assert_eq!(writeback(&frontend), 0);
        frontend.set(FrontendRequest::ResetDevice, &[], &[]);
        frontend.reconnect(&target.socket());
        set_inflight(&frontend, &other);
        assert_eq!(writeback(&frontend), 1);
    }
}

#[test]
fn a_resize_is_announced_and_seen() {
    let configure = |config| VhostBlkConfig { bdev_name: "Null0".into(), ..config };
    let target = TestTarget::start("resize", configure);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    frontend.set(FrontendRequest::SetBackendReqFd, &[], &[theirs.as_fd()]);
    null::resize(&target.registry, "Null0", 8192).unwrap();
    let mut message = [0; VhostUserHeader::SIZE];
    (&ours).read_exact(&mut message).unwrap();
    let expected = VhostUserHeader::request(BackendRequest::ConfigChange.to_wire(), 0);
    assert_eq!(VhostUserHeader::decode(&message), Ok(expected));
    let request = [&ConfigHeader { offset: 0, size: 8, flags: 0 }.to_bytes()[..], &[0; 8]].concat();
    frontend.send(FrontendRequest::GetConfig, &request, &[]);
    let reply = frontend.reply(FrontendRequest::GetConfig).unwrap();
    assert_eq!(reply[ConfigHeader::SIZE..], 8192_u64.to_le_bytes());
    let mut queue = frontend.start_queue(0, 16, 0);
    assert_eq!(queue.execute(RequestKind::In, 8191, &[(DATA, 512, true)]), (0, 513));
}

#[test]
fn written_pages_are_logged_for_a_migration() {
    for index in QUEUES {
        for ring in [Features::empty(), Features::RING_PACKED] {
            let target = TestTarget::start(&format!("log-{}", ring.bits()), |config| VhostBlkConfig {
                packed_ring: true,
                ..config
            });
            let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
            let mut queue = frontend.start_queue(index, 16, 0);
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
            let log = memfd((GUEST + MEMORY_BYTES) / 4096 / 8);
            let base = LogBase { size: (GUEST + MEMORY_BYTES) / 4096 / 8, mmap_offset: 0 };
            frontend.send(FrontendRequest::SetLogBase, &base.to_bytes(), &[log.as_fd()]);
            assert_eq!(frontend.reply(FrontendRequest::SetLogBase), Some(vec![0; U64Payload::SIZE]));
            let is_logged = |offset: u64| {
                let page = (GUEST + offset) / 4096;
                let mut byte = [0];
                rustix::io::pread(&log, &mut byte, page / 8).unwrap();
                byte[0] >> (page % 8) & 1 == 1
            };
            let logging = frontend.features | Features::VHOST_LOG_ALL;
            frontend.set(FrontendRequest::SetFeatures, &logging.bits().to_le_bytes(), &[]);
            assert_eq!(
                queue.execute(RequestKind::In, 0, &[(DATA, 4096, true), (DATA + 65536, 4096, true)]),
                (0, 8193)
            );
            wait_until("the virtqueue is logged", || {
                is_logged(if queue.is_packed { 0 } else { queue.used_at() })
            });
            for offset in [DATA, DATA + 65536, 64 << 10] {
                assert!(is_logged(offset), "data and status at {offset:#x}");
            }
            for offset in [DATA + 4096, DATA - 4096, queue.available_at(), MEMORY_BYTES - 4096] {
                assert!(!is_logged(offset), "nothing at {offset:#x}");
            }
            assert_eq!(queue.execute(RequestKind::Out, 0, &[(DATA + 8192, 4096, false)]), (0, 1));
            assert!(!is_logged(DATA + 8192), "what was only read");
            // What is answered at once: an identity, and an unknown request, which writes its status alone.
            assert_eq!(queue.execute(RequestKind::GetId, 0, &[(DATA + 16384, 20, true)]), (0, 21));
            assert!(is_logged(DATA + 16384));
            assert_eq!(queue.execute_raw(77, 0, &[(DATA + 49152, 4096, true)]), (2, 1));
            assert!(!is_logged(DATA + 49152), "nothing was written");
        }
    }
}

/// Memory behind that of the front-end.
const ADDED_REGION: SingleRegion = SingleRegion {
    padding: 0,
    guest_address: GUEST + MEMORY_BYTES,
    size: 1 << 20,
    user_address: 0x1000,
    mmap_offset: 0,
};

#[test]
fn memory_is_added_and_removed_while_virtqueues_run() {
    for index in QUEUES {
        let target =
            TestTarget::start("slots", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let mut queue = frontend.start_queue(index, 16, 0);
        let file = memfd(1 << 20);
        let beyond = (MEMORY_BYTES, 512, true);
        assert_eq!(queue.execute(RequestKind::In, 0, &[beyond]), (1, 1));
        frontend.set(FrontendRequest::AddMemReg, &ADDED_REGION.to_bytes(), &[file.as_fd()]);
        assert_eq!(queue.execute(RequestKind::In, 0, &[beyond]), (0, 513));
        // A segment across the border of both.
        assert_eq!(queue.execute(RequestKind::In, 0, &[(MEMORY_BYTES - 512, 1024, true)]), (0, 1025));
        // The removal is acknowledged when a read into the memory has completed.
        queue.add(&[(64 << 10, 16, false), beyond, (DATA, 1, true)]);
        // When the write is used, the read is in flight.
        let write = add(&mut queue, 1, RequestKind::Out);
        queue.kick();
        assert_eq!(queue.used(3), (write, 1));
        let used_index = || frontend.memory.load_u16((16 << 10) + used::INDEX);
        let before = used_index();
        frontend.set(FrontendRequest::RemMemReg, &ADDED_REGION.to_bytes(), &[]);
        assert_eq!(used_index(), before.wrapping_add(1));
        queue.used(3);
        assert_eq!(queue.execute(RequestKind::In, 0, &[beyond]), (1, 1));
    }
}

#[test]
fn a_virtqueue_stops_when_its_requests_have_completed() {
    for index in QUEUES {
        let target =
            TestTarget::start("drain", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let mut queue = frontend.start_queue(index, 16, 0);
        put_three_reads_in_flight(&mut queue);
        let base = frontend.stop_queue(index.into());
        assert_eq!((base, frontend.memory.load_u16(queue.used_at() + used::INDEX)), (4, 4));
        // Reset: features and virtqueues are gone.
        frontend.set(FrontendRequest::ResetDevice, &[], &[]);
        frontend.set(FrontendRequest::SetFeatures, &frontend.features.bits().to_le_bytes(), &[]);
        frontend.memory.write(0, &[0; 32 << 10]);
        let mut queue = frontend.start_queue(index, 16, 0);
        assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    }
}

#[test]
fn a_reset_waits_for_requests_in_flight() {
    for index in QUEUES {
        for ring in [Features::empty(), Features::RING_PACKED] {
            let name = format!("reset-{}", ring.bits());
            let configure =
                |config| VhostBlkConfig { bdev_name: "Slow0".into(), packed_ring: true, ..config };
            let target = TestTarget::start(&name, configure);
            let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
            let mut queue = frontend.start_queue(index, 16, 0);
            put_three_reads_in_flight(&mut queue);
            frontend.set(FrontendRequest::ResetDevice, &[], &[]);
            for _ in 0..3 {
                assert!(queue.try_used(3).is_some(), "{name}: it was used before the acknowledgement");
            }
            // Nothing is left of virtqueues and features.
            frontend.set(FrontendRequest::SetFeatures, &frontend.features.bits().to_le_bytes(), &[]);
            frontend.memory.write(0, &[0; 32 << 10]);
            let mut queue = frontend.start_queue(index, 16, 0);
            assert_eq!(queue.execute(RequestKind::In, 3, &[(DATA, 512, true)]), (0, 513));
        }
    }
}

#[test]
fn the_removal_of_memory_waits_for_what_is_written_there() {
    for index in QUEUES {
        let target =
            TestTarget::start("status", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let mut queue = frontend.start_queue(index, 16, 0);
        let file = memfd(1 << 20);
        let other = SharedRegion::map(file.as_fd(), 0, 1 << 20, true).unwrap();
        frontend.set(FrontendRequest::AddMemReg, &ADDED_REGION.to_bytes(), &[file.as_fd()]);
        // A read, of which only the status is in the memory that is removed.
        let header = RequestHeader { kind: RequestKind::In.to_wire(), priority: 0, sector: 0 };
        frontend.memory.write(64 << 10, &header.to_bytes());
        other.store_u8(0, 0xff);
        queue.add(&[(64 << 10, 16, false), (DATA, 512, true), (MEMORY_BYTES, 1, true)]);
        let write = add(&mut queue, 1, RequestKind::Out);
        queue.kick();
        assert_eq!(queue.used(3), (write, 1));
        assert_eq!(other.load_u8(0), 0xff, "the read is in flight");
        frontend.set(FrontendRequest::RemMemReg, &ADDED_REGION.to_bytes(), &[]);
        assert_eq!(other.load_u8(0), 0, "the status was written before the acknowledgement");
        // The virtqueue's own memory: what was in flight is used before the acknowledgement, nothing is
        // fetched after it.
        queue.used(3);
        add(&mut queue, 0, RequestKind::In);
        let write = add(&mut queue, 1, RequestKind::Out);
        queue.kick();
        assert_eq!(queue.used(3), (write, 1));
        let main =
            SingleRegion { guest_address: GUEST, size: MEMORY_BYTES, user_address: USER, ..ADDED_REGION };
        frontend.set(FrontendRequest::RemMemReg, &main.to_bytes(), &[]);
        assert!(queue.try_used(3).is_some());
        frontend.set(FrontendRequest::AddMemReg, &main.to_bytes(), &[frontend.file.as_fd()]);
        assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513), "it continues");
    }
}
