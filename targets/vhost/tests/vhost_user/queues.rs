//! Virtqueues of one connection on several cores.

use std::os::fd::AsFd;

use dma::SharedRegion;
use vhost::VhostBlkConfig;
use wire_vhost_user::{FrontendRequest, MemoryRegion, MemoryTable, VringState};
use wire_virtio::Features;
use wire_virtio::blk::RequestKind;
use wire_virtio::split::used;

use crate::frontend::{Driver, Frontend, GUEST, MEMORY_BYTES, TestTarget, USER, memfd};
use crate::sessions::{add, inflight_memory, put_three_reads_in_flight, set_inflight};

const DATA: u64 = 1 << 20;
/// Where the areas of the second virtqueue are.
const SECOND: u64 = 32 << 10;

fn cpus(target: &TestTarget) -> Vec<(usize, u32)> {
    let controllers = target.target.controllers().unwrap();
    assert_eq!(controllers[0].sessions.len(), 1, "workers are no sessions");
    controllers[0].sessions[0].running.clone()
}

/// Writes sectors over one virtqueue and reads them over the other, many rounds of the rings.
fn exchange<'a>(first: &mut Driver<'a>, second: &mut Driver<'a>, seed: u8) {
    for round in 0..40_u64 {
        let (writer, reader) =
            if round % 2 == 0 { (&mut *first, &mut *second) } else { (&mut *second, &mut *first) };
        let content = [round as u8 ^ seed; 4096];
        writer.memory().write(DATA, &content);
        assert_eq!(writer.execute(RequestKind::Out, round * 8, &[(DATA, 4096, false)]), (0, 1), "{round}");
        let parts = [(DATA + 8192, 512, true), (DATA + 16384, 3584, true)];
        assert_eq!(reader.execute(RequestKind::In, round * 8, &parts), (0, 4097), "{round}");
        let mut back = vec![0; 4096];
        reader.memory().read(DATA + 8192, &mut back[..512]);
        reader.memory().read(DATA + 16384, &mut back[512..]);
        assert!(back == content, "{round}");
    }
}

#[test]
fn virtqueues_of_a_connection_are_served_by_different_reactors() {
    for (name, ring) in [("spread", Features::empty()), ("spread-packed", Features::RING_PACKED)] {
        let target = TestTarget::start(name, |config| VhostBlkConfig { packed_ring: true, ..config });
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
        let (mut first, mut second) = (frontend.start_queue(0, 16, 0), frontend.start_queue(1, 16, SECOND));
        let _third = frontend.start_queue(2, 16, 2 * SECOND + (64 << 10));
        exchange(&mut first, &mut second, 0x10);
        let found = cpus(&target);
        let indexes: Vec<usize> = found.iter().map(|(index, _)| *index).collect();
        assert_eq!(indexes, [0, 1, 2]);
        assert!(found[0].1 != found[1].1 && found[0].1 == found[2].1, "{found:?}");
        let base = frontend.stop_queue(1);
        assert!(second.is_packed || base == 40, "{base}");
        assert_eq!(cpus(&target).len(), 2, "the stopped one is not reported");
    }
}

#[test]
fn a_mask_of_one_cpu_keeps_virtqueues_together() {
    let target =
        TestTarget::start("together", |config| VhostBlkConfig { cpumask: Some("0x2".into()), ..config });
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let (mut first, mut second) = (frontend.start_queue(0, 16, 0), frontend.start_queue(1, 16, SECOND));
    exchange(&mut first, &mut second, 0x20);
    assert_eq!(cpus(&target), [(0, 1), (1, 1)]);
}

#[test]
fn the_memory_table_changes_while_virtqueues_run_on_two_reactors() {
    let target = TestTarget::start("tables", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let (mut first, mut second) = (frontend.start_queue(0, 16, 0), frontend.start_queue(1, 16, SECOND));
    let main = MemoryRegion { guest_address: GUEST, size: MEMORY_BYTES, user_address: USER, mmap_offset: 0 };
    let beyond = (MEMORY_BYTES, 512, true);
    for round in 0..3 {
        let file = memfd(1 << 20);
        let other = SharedRegion::map(file.as_fd(), 0, 1 << 20, true).unwrap();
        let more = MemoryRegion {
            guest_address: GUEST + MEMORY_BYTES,
            size: 1 << 20,
            user_address: 0x1000,
            mmap_offset: 0,
        };
        let table = MemoryTable(vec![main, more]).to_bytes();
        frontend.set(FrontendRequest::SetMemTable, &table, &[frontend.file.as_fd(), file.as_fd()]);
        // A read into the new memory over each virtqueue, and a write behind it: when that is used, it is in flight.
        for (number, queue) in [&mut first, &mut second].into_iter().enumerate() {
            let at = DATA + 65536 * (1 + number as u64);
            let header =
                wire_virtio::blk::RequestHeader { kind: RequestKind::In.to_wire(), priority: 0, sector: 0 };
            queue.memory().write(at, &header.to_bytes());
            queue.memory().store_u8(at + 16, 0xff);
            queue.add(&[
                (at, 16, false),
                (MEMORY_BYTES + 4096 * number as u64, 512, true),
                (at + 16, 1, true),
            ]);
            let write = add(queue, 8 + number as u64, RequestKind::Out);
            queue.kick();
            assert_eq!(queue.used(3), (write, 1), "{round}");
        }
        // The table without the memory is acknowledged when both reads have completed.
        frontend.set(
            FrontendRequest::SetMemTable,
            &MemoryTable(vec![main]).to_bytes(),
            &[frontend.file.as_fd()],
        );
        for queue in [&mut first, &mut second] {
            assert_eq!(queue.try_used(3).map(|(_, written)| written), Some(513), "{round}");
            assert_eq!(queue.execute(RequestKind::In, 0, &[beyond]), (1, 1), "{round}");
        }
        drop(other);
    }
    exchange(&mut first, &mut second, 0x30);
}

#[test]
fn requests_of_both_reactors_survive_the_connection() {
    for ring in [Features::empty(), Features::RING_PACKED] {
        let name = format!("survive-{}", ring.bits());
        let configure = |config| VhostBlkConfig { bdev_name: "Slow0".into(), packed_ring: true, ..config };
        let target = TestTarget::start(&name, configure);
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | ring);
        let memory = inflight_memory(&frontend, 2, 32);
        set_inflight(&frontend, &memory);
        let (mut first, mut second) = (frontend.start_queue(0, 32, 0), frontend.start_queue(1, 32, SECOND));
        for round in 0..3 {
            let mut ids = Vec::new();
            for (queue, number) in [(&mut first, 0), (&mut second, 16)] {
                ids.push(add(queue, number, RequestKind::In));
                let write = add(queue, number + 1, RequestKind::Out);
                queue.kick();
                assert_eq!(queue.used(3), (write, 1), "{name} {round}");
            }
            let bases = [&first, &second].map(|queue| match queue.is_packed {
                true => 0x8000_8000,
                false => queue.memory().load_u16(queue.used_at() + used::INDEX).into(),
            });
            frontend.reconnect(&target.socket());
            set_inflight(&frontend, &memory);
            for ((queue, base), id) in [&mut first, &mut second].into_iter().zip(bases).zip(&ids) {
                queue.start(base);
                assert_eq!(queue.used(3), (*id, 513), "{name} {round}");
                assert_eq!(queue.try_used(3), None, "{name} {round}: it is used once");
            }
        }
        exchange(&mut first, &mut second, 0x40);
    }
}

#[test]
fn features_are_not_changed_and_a_reset_waits_while_another_reactor_serves_a_virtqueue() {
    let target =
        TestTarget::start("elsewhere", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let mut queue = frontend.start_queue(1, 16, 0);
    put_three_reads_in_flight(&mut queue);
    let other = (frontend.features | Features::EVENT_IDX).bits().to_le_bytes();
    assert_eq!(frontend.ask(FrontendRequest::SetFeatures, &other, &[]), Some(1));
    let wrong = VringState { index: 1, value: 8 }.to_bytes();
    assert_eq!(frontend.ask(FrontendRequest::SetVringNum, &wrong, &[]), Some(1), "it runs");
    frontend.set(FrontendRequest::ResetDevice, &[], &[]);
    for _ in 0..3 {
        assert!(queue.try_used(3).is_some());
    }
    assert_eq!(cpus(&target), []);
    frontend.set(FrontendRequest::SetFeatures, &other, &[]);
    frontend.memory.write(0, &[0; 32 << 10]);
    let mut queue = frontend.start_queue(1, 16, 0);
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    drop(queue);
    // A request of the front-end that only the other core rejects, and no acknowledgement: it is disconnected.
    frontend.send(FrontendRequest::SetVringNum, &VringState { index: 1, value: 0 }.to_bytes(), &[]);
    assert!(frontend.is_closed());
    target.wait_for_no_connections();
    target.target.delete("disk").unwrap();
}

/// A late write of a connection that has ended must not follow one of its successor.
#[test]
fn requests_of_another_reactor_complete_before_those_of_the_next_connection() {
    let target = TestTarget::start("late", |config| VhostBlkConfig { bdev_name: "Slow0".into(), ..config });
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let mut queue = frontend.start_queue(1, 16, 0);
    let begin = std::time::Instant::now();
    put_three_reads_in_flight(&mut queue);
    let used_index = frontend.memory.load_u16(queue.used_at() + used::INDEX);
    frontend.stream.replace(std::os::unix::net::UnixStream::pair().unwrap().0);
    target.wait_for_no_connections();
    let next = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let mut writer = next.start_queue(0, 16, 0);
    assert_eq!(writer.execute(RequestKind::Out, 0, &[(DATA, 512, false)]), (0, 1));
    assert!(begin.elapsed() >= std::time::Duration::from_millis(50), "the reads take 50 ms");
    assert_eq!(
        frontend.memory.load_u16((16 << 10) + used::INDEX),
        used_index,
        "nothing is used after the end"
    );
}
