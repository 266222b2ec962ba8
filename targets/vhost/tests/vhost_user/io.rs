//! A driver's requests, over split and packed virtqueues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::frontend::{Driver, Frontend, MEMORY_BYTES, Part, QUEUES, TestTarget, wait_until};
use reservations::{ChangeWaker, Registrant, ReservationCommand, ReservationType};
use vhost::{Coalescing, VhostBlkConfig};
use wire_vhost_user::{ConfigHeader, FrontendRequest, VringState};
use wire_virtio::Features;
use wire_virtio::blk::{BlkConfig, RangeSegment, RequestHeader, RequestKind};
use wire_virtio::packed::EventSuppression;

const DATA: u64 = 1 << 20;

/// Every kind of virtqueue.
const RINGS: [(&str, Features); 4] = [
    ("split", Features::VERSION_1),
    ("split-event", Features::VERSION_1.union(Features::EVENT_IDX)),
    ("packed", Features::VERSION_1.union(Features::RING_PACKED)),
    ("packed-event", Features::VERSION_1.union(Features::RING_PACKED).union(Features::EVENT_IDX)),
];

fn all_of_blk() -> Features {
    Features::BLK_FLUSH | Features::BLK_CONFIG_WCE | Features::BLK_DISCARD | Features::BLK_WRITE_ZEROES
}

#[test]
fn requests_are_executed_over_every_kind_of_virtqueue() {
    for index in QUEUES {
        for (name, ring) in RINGS {
            let target = TestTarget::start(name, |config| VhostBlkConfig { packed_ring: true, ..config });
            let frontend = Frontend::negotiated(&target.socket(), ring | all_of_blk());
            let mut queue = frontend.start_queue(index, 16, 0);
            // More rounds than the ring has descriptors, so that indices and counters wrap.
            for round in 0..20_u64 {
                let bytes: Vec<u8> = (0..4096).map(|at| (at as u64 * 7 + round) as u8).collect();
                frontend.memory.write(DATA, &bytes);
                let parts = [(DATA, 512, false), (DATA + 512, 3584, false)];
                assert_eq!(queue.execute(RequestKind::Out, round * 8, &parts), (0, 1), "{name}");
                let back = [(DATA + 8192, 1024, true), (DATA + 16384, 3072, true)];
                assert_eq!(queue.execute(RequestKind::In, round * 8, &back), (0, 4097), "{name}");
                let mut read = vec![0; 4096];
                frontend.memory.read(DATA + 8192, &mut read[..1024]);
                frontend.memory.read(DATA + 16384, &mut read[1024..]);
                assert!(read == bytes, "{name}, round {round}");
            }
            assert_eq!(queue.execute(RequestKind::Flush, 0, &[]), (0, 1), "{name}");
            assert_eq!(queue.execute(RequestKind::GetId, 0, &[(DATA, 20, true)]), (0, 21), "{name}");
            assert_eq!(frontend.memory.snapshot::<20>(DATA), *b"Malloc0\0\0\0\0\0\0\0\0\0\0\0\0\0");
            for (kind, flags, sector) in [(RequestKind::Discard, 0, 0), (RequestKind::WriteZeroes, 1, 8)] {
                let range = RangeSegment { sector, sectors: 8, flags };
                frontend.memory.write(DATA, &range.to_bytes());
                assert_eq!(queue.execute(kind, 0, &[(DATA, 16, false)]), (0, 1), "{name} {kind:?}");
                assert_eq!(queue.execute(RequestKind::In, sector, &[(DATA, 4096, true)]), (0, 4097));
                assert_eq!(frontend.memory.snapshot::<64>(DATA), [0; 64], "{name} {kind:?}");
            }
        }
    }
}

/// The buffers of a request for a sector, with 4 KiB of memory of its own.
fn parts(queue: &Driver<'_>, number: u64, kind: RequestKind) -> [Part; 3] {
    let at = DATA + number * 4096;
    let header = RequestHeader { kind: kind.to_wire(), priority: 0, sector: number };
    queue.memory().write(at, &header.to_bytes());
    queue.memory().store_u8(at + 16, 0xff);
    [(at, 16, false), (at + 512, 512, kind == RequestKind::In), (at + 16, 1, true)]
}

#[test]
fn many_requests_are_in_flight_with_and_without_indirect_descriptors() {
    const REQUESTS: u64 = 10;
    const TABLES: u64 = 2 << 20;
    for (name, ring) in RINGS {
        let name = format!("depth-{name}");
        let configure = |config| VhostBlkConfig { bdev_name: "Slow0".into(), packed_ring: true, ..config };
        let target = TestTarget::start(&name, configure);
        let frontend = Frontend::negotiated(&target.socket(), ring | Features::INDIRECT_DESC);
        let mut queue = frontend.start_queue(0, 32, 0);
        for is_indirect in [false, true] {
            for kind in [RequestKind::Out, RequestKind::In] {
                let mut ids: Vec<u16> = Vec::new();
                for number in 0..REQUESTS {
                    let parts = parts(&queue, number, kind);
                    let content = if kind == RequestKind::Out { [number as u8 + 1; 512] } else { [0; 512] };
                    queue.memory().write(parts[1].0, &content);
                    ids.push(match is_indirect {
                        true => queue.add_indirect(TABLES + number * 64, &parts),
                        false => queue.add(&parts),
                    });
                }
                queue.kick();
                let written = if kind == RequestKind::In { 513 } else { 1 };
                for _ in 0..REQUESTS {
                    let used = queue.used(if is_indirect { 1 } else { 3 });
                    assert_eq!(used.1, written, "{name} {kind:?}");
                    let at = ids.iter().position(|id| *id == used.0);
                    ids.remove(at.unwrap_or_else(|| panic!("{name}: {} is not in flight: {ids:?}", used.0)));
                }
                for number in 0..REQUESTS {
                    let at = DATA + number * 4096;
                    assert_eq!(queue.memory().load_u8(at + 16), 0, "{name} {kind:?} {number}");
                    let content = queue.memory().snapshot::<512>(at + 512);
                    assert_eq!(content, [number as u8 + 1; 512], "{name} {kind:?} {number}");
                }
            }
        }
    }
}

#[test]
fn a_packed_virtqueue_signals_when_it_passes_the_event_descriptor() {
    let target = TestTarget::start("event", |config| VhostBlkConfig { packed_ring: true, ..config });
    let features = Features::VERSION_1 | Features::RING_PACKED | Features::EVENT_IDX;
    let frontend = Frontend::negotiated(&target.socket(), features);
    let mut queue = frontend.start_queue(0, 16, 0);
    let suppression = queue.available_at();
    // The ring has 16 descriptors and a round 9, so that the event lies on each side of the wrap.
    for round in 0..32 {
        let event = queue.used_position.advanced(6, 16);
        frontend.memory.store_u16(suppression, event.to_bits());
        frontend.memory.store_u16(suppression + 2, EventSuppression::DESCRIPTOR);
        for _ in 0..3 {
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513), "{round}");
        }
        let mut calls = 0;
        wait_until("the device signals", || {
            calls += queue.calls();
            calls > 0
        });
        assert_eq!(calls, 1, "once, for the third request of round {round}");
    }
}

#[test]
fn an_idle_device_is_notified_and_notifies() {
    for index in QUEUES {
        for (name, ring) in RINGS {
            let name = format!("idle-{name}");
            let target = TestTarget::start(&name, |config| VhostBlkConfig { packed_ring: true, ..config });
            let frontend = Frontend::negotiated(&target.socket(), ring);
            let mut queue = frontend.start_queue(index, 8, 0);
            for round in 0..5 {
                // The driver's notifications are enabled once the device has been idle.
                wait_until("the device asks for notifications", || queue.wants_notification(0));
                queue.was_called();
                assert_eq!(
                    queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]),
                    (0, 513),
                    "{name} {round}"
                );
                wait_until("the device notifies", || queue.was_called());
            }
        }
    }
}

#[test]
fn invalid_requests_are_answered() {
    let target = TestTarget::start("invalid", |config| config);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | all_of_blk());
    let mut queue = frontend.start_queue(0, 16, 0);
    let (io_error, unsupported) = (1, 2);
    for (kind, sector, data, expected) in [
        // No whole sectors, none at all, beyond the end, outside of memory.
        (0, 0, vec![(DATA, 100, true)], io_error),
        (0, 0, vec![], io_error),
        (0, 4096, vec![(DATA, 512, true)], io_error),
        (0, u64::MAX, vec![(DATA, 512, true)], io_error),
        (0, 0, vec![(MEMORY_BYTES, 512, true)], io_error),
        (0, 0, vec![(MEMORY_BYTES - 256, 512, true)], io_error),
        (0, 0, vec![(DATA, u32::MAX, true)], io_error),
        (1, 4095, vec![(DATA, 1024, false)], io_error),
        // Discards of no range, two ranges, and with a flag.
        (11, 0, vec![], io_error),
        (11, 0, vec![(DATA, 32, false)], io_error),
        (99, 0, vec![], unsupported),
    ] {
        assert_eq!(queue.execute_raw(kind, sector, &data), (expected, 1), "{kind} {sector} {data:?}");
    }
    for flags in [1, 2] {
        frontend.memory.write(DATA, &RangeSegment { sector: 0, sectors: 8, flags }.to_bytes());
        assert_eq!(queue.execute(RequestKind::Discard, 0, &[(DATA, 16, false)]), (unsupported, 1));
    }
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513), "the queue still works");
}

#[test]
fn a_read_only_controller_rejects_writes() {
    let target = TestTarget::start("readonly", |config| VhostBlkConfig { read_only: true, ..config });
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | Features::BLK_RO);
    assert!(frontend.features.contains(Features::BLK_RO));
    let mut queue = frontend.start_queue(0, 16, 0);
    assert_eq!(queue.execute(RequestKind::Out, 0, &[(DATA, 512, false)]), (1, 1));
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
}

#[derive(Debug)]
struct NoWaker;

impl ChangeWaker for NoWaker {
    fn wake(&self) {}
}

#[test]
fn a_reservation_of_another_host_fails_requests_of_a_running_virtqueue() {
    let target = TestTarget::start("reserved", |config| config);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | all_of_blk());
    let device = target.registry.find("Malloc0").unwrap();
    let lease = target.registry.open_reservations(&device, None).unwrap();
    let execute = |command| {
        let holder = Registrant::nvme_host([1; 16]);
        let change = lease.reservations().execute(&holder, command, Arc::new(NoWaker));
        assert_eq!(change.outcome(), Some(Ok(())));
    };
    for index in QUEUES {
        let mut queue = frontend.start_queue(index, 16, u64::from(index) << 15);
        let data = [7; 512];
        frontend.memory.write(DATA, &data);
        assert_eq!(queue.execute(RequestKind::Out, 0, &[(DATA, 512, false)]), (0, 1));
        for (kind, reads) in
            [(ReservationType::WriteExclusive, true), (ReservationType::ExclusiveAccess, false)]
        {
            execute(ReservationCommand::Register { key: 1, persist: None });
            execute(ReservationCommand::Acquire { key: 1, kind });
            frontend.memory.write(DATA, &[9; 512]);
            assert_eq!(queue.execute(RequestKind::Out, 0, &[(DATA, 512, false)]), (1, 1), "{kind:?}");
            assert_eq!(queue.execute(RequestKind::Flush, 0, &[]), (1, 1));
            let range = RangeSegment { sector: 0, sectors: 8, flags: 0 };
            frontend.memory.write(DATA, &range.to_bytes());
            for command in [RequestKind::Discard, RequestKind::WriteZeroes] {
                assert_eq!(queue.execute(command, 0, &[(DATA, 16, false)]), (1, 1), "{kind:?} {command:?}");
            }
            let expected = if reads { (0, 513) } else { (1, 1) };
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), expected, "{kind:?}");
            execute(ReservationCommand::Clear { key: 1 });
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
            assert_eq!(frontend.memory.snapshot::<512>(DATA), data);
        }
        drop(queue);
        frontend.stop_queue(index.into());
    }
}

#[test]
fn a_stopped_virtqueue_continues_where_it_was() {
    for (name, ring) in RINGS {
        let name = format!("stop-{name}");
        let target = TestTarget::start(&name, |config| VhostBlkConfig { packed_ring: true, ..config });
        let frontend = Frontend::negotiated(&target.socket(), ring);
        let mut queue = frontend.start_queue(1, 8, 0);
        for _ in 0..3 {
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
        }
        let base = VringState { index: 1, value: frontend.stop_queue(1) };
        if !queue.is_packed {
            assert_eq!(base.value, 3);
        }
        frontend.set(FrontendRequest::SetVringBase, &base.to_bytes(), &[]);
        let which = 1_u64.to_le_bytes();
        frontend.set(FrontendRequest::SetVringKick, &which, &[std::os::fd::AsFd::as_fd(&queue.kick)]);
        for _ in 0..10 {
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513), "{name}");
        }
    }
}

#[test]
fn the_configuration_space_describes_the_device() {
    let target = TestTarget::start("config", |config| config);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | all_of_blk());
    let read = |offset: u32, size: u32| {
        let header = ConfigHeader { offset, size, flags: 0 };
        let bytes = [&header.to_bytes()[..], &vec![0; size as usize]].concat();
        frontend.send(FrontendRequest::GetConfig, &bytes, &[]);
        frontend.reply(FrontendRequest::GetConfig).unwrap()
    };
    let bytes = read(0, BlkConfig::SIZE as u32);
    let config = BlkConfig::decode(&bytes[ConfigHeader::SIZE..]).unwrap();
    assert_eq!((config.capacity, config.block_size, config.writeback), (4096, 512, 1));
    assert!(read(200, 100).is_empty(), "a range beyond the end");
    let writeback = [&ConfigHeader { offset: 32, size: 1, flags: 0 }.to_bytes()[..], &[0]].concat();
    frontend.set(FrontendRequest::SetConfig, &writeback, &[]);
    assert_eq!(read(32, 1)[ConfigHeader::SIZE..], [0]);
    let capacity = [&ConfigHeader { offset: 0, size: 1, flags: 0 }.to_bytes()[..], &[0]].concat();
    assert_eq!(frontend.ask(FrontendRequest::SetConfig, &capacity, &[]), Some(1), "it cannot be written");
}

#[test]
fn coalescing_delays_the_signals_of_a_busy_virtqueue_and_loses_none() {
    for (name, ring) in [RINGS[0], RINGS[2]] {
        let name = format!("coalescing-{name}");
        let target = TestTarget::start(&name, |config| VhostBlkConfig { packed_ring: true, ..config });
        let frontend = Frontend::negotiated(&target.socket(), ring);
        let mut queue = frontend.start_queue(0, 16, 0);
        // Every rate above 100 requests a second is delayed, by 10 ms.
        let coalescing = Coalescing { delay_base_us: 10_000, iops_threshold: 100 };
        target.target.set_coalescing("disk", coalescing).unwrap();
        let begin = Instant::now();
        let (mut requests, mut signals) = (0, 0);
        while requests < 3000 || begin.elapsed() < Duration::from_millis(100) {
            assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513), "{name}");
            requests += 1;
            signals += queue.calls();
        }
        // One signal in 10 ms, and those of the first interval, which has no rate yet.
        assert!(signals < requests / 2, "{name}: {signals} signals of {requests} requests");
        // The signal of the last request comes, though nothing follows it.
        queue.calls();
        assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
        wait_until("the device signals", || queue.was_called());
        let saved = &target.target.controllers().unwrap()[0];
        assert_eq!((saved.coalescing, saved.sessions.len()), (coalescing, 1));
        assert!(saved.sessions[0].is_started && saved.sessions[0].queues >= 1);
    }
    let target = TestTarget::start("coalescing-limits", |config| config);
    let slow = Coalescing { delay_base_us: 1, iops_threshold: 99 };
    let error = target.target.set_coalescing("disk", slow).unwrap_err();
    assert_eq!(error.to_string(), "iops_threshold: expected at least 100");
    assert!(target.target.set_coalescing("other", Coalescing::default()).is_err());
}

#[test]
fn a_mask_without_a_reactor_is_refused() {
    let target = TestTarget::start("mask", |config| config);
    for mask in ["0x0", "[1000]", "mask"] {
        let config = VhostBlkConfig { cpumask: Some(mask.into()), ..VhostBlkConfig::new("other", "Malloc0") };
        let error = target.target.create(config).unwrap_err().to_string();
        assert!(error.starts_with("cpumask: "), "{error}");
    }
    assert_eq!(target.target.configured().len(), 1);
}

#[test]
fn a_mask_selects_the_reactors_of_a_controller() {
    let directory = std::env::temp_dir().join(format!("vhost-cpumask-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let cpus = os::CpuSet::new(vec![0, 1]).unwrap();
    let config = reactor::ReactorConfig { cpus, pin: false, ..Default::default() };
    let reactors = reactor::Reactors::start(&config).unwrap();
    let registry = bdev::Registry::new();
    bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 4096, 512)).unwrap();
    let target = vhost::VhostTarget::new(registry, reactors.handles(), directory.clone());
    // Identifiers of sessions are counted on each core.
    for (mask, shown, ids) in [(None, "0x3", [1, 1, 2]), (Some("0x2".to_string()), "0x2", [3, 4, 5])] {
        let config = VhostBlkConfig { cpumask: mask, ..VhostBlkConfig::new("disk", "Malloc0") };
        target.create(config).unwrap();
        let frontends: Vec<Frontend> =
            (0..3).map(|_| Frontend::negotiated(&directory.join("disk"), Features::VERSION_1)).collect();
        let info = &target.controllers().unwrap()[0];
        let mut found: Vec<u64> = info.sessions.iter().map(|session| session.id).collect();
        found.sort_unstable();
        let first = found[0];
        let relative: Vec<u64> = found.iter().map(|id| id - first).collect();
        assert_eq!(info.cpumask, shown);
        assert_eq!(relative, ids.map(|id| id - ids[0]), "{found:?}");
        drop(frontends);
        wait_until("the end of the connections", || target.controllers().unwrap()[0].sessions.is_empty());
        target.delete("disk").unwrap();
    }
    target.shutdown();
    reactors.stop();
    target.close();
    _ = std::fs::remove_dir_all(&directory);
}
