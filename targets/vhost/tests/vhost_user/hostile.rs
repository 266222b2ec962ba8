//! Front-ends and drivers that violate the specifications: they lose their virtqueue or connection, nothing
//! else.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost::VhostBlkConfig;
use wire_vhost_user::{
    FrontendRequest, MemoryRegion, MemoryTable, SingleRegion, VhostUserHeader, VringAddress, VringState,
};
use wire_virtio::Features;
use wire_virtio::blk::{RequestHeader, RequestKind};
use wire_virtio::descriptor_flags::{INDIRECT, NEXT, WRITE};
use wire_virtio::split::{Descriptor, available};

use crate::frontend::{
    Driver, Frontend, GUEST, MEMORY_BYTES, QUEUES, TIMEOUT, TestTarget, USER, memfd, new_eventfd, wait_until,
};

const DATA: u64 = 1 << 20;

/// A well-behaved client works.
fn check_service(target: &TestTarget) {
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let mut queue = frontend.start_queue(0, 16, 0);
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
}

fn descriptor(offset: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { address: GUEST.wrapping_add(offset), length, flags, next }
}

/// Makes a virtqueue of 8 fail in a way of its own. `make` adds chains.
fn breaks_virtqueue(target: &TestTarget, features: Features, make: impl Fn(&mut Driver<'_>)) {
    breaks_virtqueue_after(target, features, None, make);
}

/// [`breaks_virtqueue`], where a chain before the invalid one is used: its head, and what is written.
fn breaks_virtqueue_after(
    target: &TestTarget,
    features: Features,
    first: Option<(u16, u32)>,
    make: impl Fn(&mut Driver<'_>),
) {
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | features);
    let mut queue = frontend.start_queue(0, 8, 0);
    let error = new_eventfd();
    frontend.set(FrontendRequest::SetVringErr, &0_u64.to_le_bytes(), &[error.as_fd()]);
    make(&mut queue);
    queue.kick();
    wait_until("the error is signalled", || rustix::io::read(&error, &mut [0; 8]).is_ok());
    if let Some(first) = first {
        assert_eq!(queue.used(1), first);
    }
    assert_eq!(queue.try_used(1), None, "a broken virtqueue uses nothing");
    // Another virtqueue of the same connection still works, and so does this one after a reset.
    let mut other = frontend.start_queue(1, 8, 32 << 10);
    assert_eq!(other.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    frontend.stop_queue(0);
    frontend.memory.write(0, &[0; 32 << 10]);
    let mut again = frontend.start_queue(0, 8, 0);
    assert_eq!(again.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
}

#[test]
fn chains_that_loop_or_point_outside_break_their_virtqueue_only() {
    let target = TestTarget::start("chains", |config| config);
    let none = Features::empty();
    // A loop, of one descriptor and of all.
    breaks_virtqueue(&target, none, |queue| {
        queue.write_descriptor(0, descriptor(DATA, 16, NEXT, 0));
        queue.make_available(0);
    });
    breaks_virtqueue(&target, none, |queue| {
        for index in 0..8 {
            queue.write_descriptor(index, descriptor(DATA, 16, NEXT, (index + 1) % 8));
        }
        queue.make_available(3);
    });
    // Indices outside of the table and of the ring.
    breaks_virtqueue(&target, none, |queue| queue.make_available(8));
    breaks_virtqueue(&target, none, |queue| {
        queue.write_descriptor(0, descriptor(DATA, 16, NEXT, 0xffff));
        queue.make_available(0);
    });
    breaks_virtqueue(&target, none, |queue| {
        queue.frontend.memory.store_u16(queue.available_at() + available::INDEX, 9);
    });
    // No place for a status: nothing writable, outside of memory, empty.
    for (offset, length, flags) in
        [(DATA, 16, 0), (MEMORY_BYTES, 1, WRITE), (u64::MAX, 1, WRITE), (DATA, 0, WRITE)]
    {
        breaks_virtqueue(&target, none, |queue| {
            queue.write_descriptor(0, descriptor(DATA, 16, NEXT, 1));
            queue.write_descriptor(1, descriptor(offset, length, flags, 0));
            queue.make_available(0);
        });
    }
    // A chain that is in flight: it is used once.
    breaks_virtqueue_after(&target, none, Some((0, 513)), |queue| {
        queue.write_descriptor(0, descriptor(DATA, 16, NEXT, 1));
        queue.write_descriptor(1, descriptor(DATA + 512, 513, WRITE, 0));
        let header = RequestHeader { kind: RequestKind::In.to_wire(), priority: 0, sector: 0 };
        queue.frontend.memory.write(DATA, &header.to_bytes());
        queue.make_available(0);
        queue.make_available(0);
    });
    // A readable buffer after a writable one.
    breaks_virtqueue(&target, none, |queue| {
        queue.write_descriptor(0, descriptor(DATA, 16, NEXT | WRITE, 1));
        queue.write_descriptor(1, descriptor(DATA, 16, 0, 0));
        queue.make_available(0);
    });
    check_service(&target);
}

#[test]
fn invalid_indirect_tables_break_their_virtqueue_only() {
    let target = TestTarget::start("indirect", |config| config);
    let table = |queue: &mut Driver<'_>, length: u32, flags: u16, entries: &[Descriptor]| {
        for (index, entry) in entries.iter().enumerate() {
            queue.frontend.memory.write(DATA + 16 * index as u64, &entry.to_bytes());
        }
        queue.write_descriptor(0, descriptor(DATA, length, INDIRECT | flags, 1));
        queue.make_available(0);
    };
    let one = [descriptor(DATA, 16, WRITE, 0)];
    // Not negotiated.
    breaks_virtqueue(&target, Features::empty(), |queue| table(queue, 16, 0, &one));
    let indirect = Features::INDIRECT_DESC;
    for (length, flags) in [(0, 0), (8, 0), (24, 0), (16, NEXT), (u32::MAX - 15, 0)] {
        breaks_virtqueue(&target, indirect, |queue| table(queue, length, flags, &one));
    }
    // A loop, a table in a table, an index outside.
    for entry in
        [descriptor(DATA, 16, NEXT, 0), descriptor(DATA, 16, INDIRECT, 0), descriptor(DATA, 16, NEXT, 1)]
    {
        breaks_virtqueue(&target, indirect, |queue| table(queue, 16, 0, &[entry]));
    }
    check_service(&target);
}

#[test]
fn a_virtqueue_that_changes_while_it_is_read_harms_no_other_client() {
    let target = TestTarget::start("changing", |config| config);
    for features in [Features::INDIRECT_DESC, Features::INDIRECT_DESC | Features::EVENT_IDX] {
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1 | features);
        let queue = frontend.start_queue(0, 64, 0);
        let header = RequestHeader { kind: RequestKind::In.to_wire(), priority: 0, sector: 0 };
        frontend.memory.write(DATA, &header.to_bytes());
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let end = std::time::Instant::now() + Duration::from_millis(300);
        while std::time::Instant::now() < end {
            for _ in 0..64 {
                let random = next();
                let flags = (random >> 8) as u16 & 7;
                let target = DATA + random % 4096;
                let length = (random >> 20) as u32 & 0x3ff;
                let entry = descriptor(target, length, flags, (random >> 40) as u16 & 63);
                queue.write_descriptor((random >> 50) as u16 & 63, entry);
                frontend.memory.write(DATA + (random >> 16 & 0xff0), &entry.to_bytes());
            }
            let index = queue.available_at() + available::INDEX;
            frontend.memory.store_u16(index, frontend.memory.load_u16(index).wrapping_add(1));
            queue.kick();
        }
        drop(queue);
        drop(frontend);
        target.wait_for_no_connections();
    }
    check_service(&target);
}

#[test]
fn memory_that_is_truncated_costs_the_connection() {
    for index in QUEUES {
        let target = TestTarget::start("truncated", |config| config);
        let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let mut queue = frontend.start_queue(index, 16, 0);
        assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
        // This end must not touch the memory any more.
        rustix::fs::ftruncate(&frontend.file, 0).unwrap();
        queue.kick();
        assert!(frontend.is_closed());
        check_service(&target);
    }
}

#[test]
fn messages_that_violate_the_protocol_cost_the_connection() {
    let target = TestTarget::start("messages", |config| config);
    let state = |index: u32, value: u32| VringState { index, value }.to_bytes().to_vec();
    let messages: Vec<(u32, Vec<u8>)> = vec![
        // Unknown, too short, of a virtqueue or a size that cannot be, with features that are not offered.
        (0, vec![]),
        (99, vec![]),
        (FrontendRequest::SetFeatures.to_wire(), vec![0; 7]),
        (FrontendRequest::SetFeatures.to_wire(), u64::MAX.to_le_bytes().to_vec()),
        (FrontendRequest::SetProtocolFeatures.to_wire(), u64::MAX.to_le_bytes().to_vec()),
        (FrontendRequest::SetVringNum.to_wire(), state(256, 16)),
        (FrontendRequest::SetVringNum.to_wire(), state(0, 0)),
        (FrontendRequest::SetVringNum.to_wire(), state(0, 65536)),
        (FrontendRequest::SetVringBase.to_wire(), state(u32::MAX, 0)),
        (FrontendRequest::SetVringAddr.to_wire(), vec![0xff; VringAddress::SIZE]),
        (FrontendRequest::SetVringKick.to_wire(), 0_u64.to_le_bytes().to_vec()),
        (FrontendRequest::SetMemTable.to_wire(), 9_u64.to_le_bytes().to_vec()),
        (FrontendRequest::SetMemTable.to_wire(), 1_u64.to_le_bytes().to_vec()),
        (FrontendRequest::AddMemReg.to_wire(), vec![0; SingleRegion::SIZE]),
        (FrontendRequest::RemMemReg.to_wire(), vec![0; SingleRegion::SIZE]),
        (FrontendRequest::GetConfig.to_wire(), vec![0; 11]),
        (FrontendRequest::SetConfig.to_wire(), vec![0xff; 12]),
    ];
    for (request, payload) in messages {
        let frontend = Frontend::connect(&target.socket());
        let header = VhostUserHeader::request(request, payload.len() as u32);
        frontend.send_message(&header, &payload, &[]);
        assert!(frontend.is_closed(), "request {request} with {payload:?}");
    }
    // A header of another version, a payload without end, a reply.
    for bytes in [[1, 2, 0], [1, 1, u32::MAX], [1, 5, 0]] {
        let frontend = Frontend::connect(&target.socket());
        let bytes = bytes.map(u32::to_le_bytes).concat();
        std::io::Write::write_all(&mut &*frontend.stream.borrow(), &bytes).unwrap();
        assert!(frontend.is_closed(), "{bytes:?}");
    }
    target.wait_for_no_connections();
    check_service(&target);
}

#[test]
fn a_virtqueue_of_a_size_or_with_a_base_that_cannot_be_is_rejected() {
    let target = TestTarget::start("sizes", |config| VhostBlkConfig { packed_ring: true, ..config });
    let packed = Features::VERSION_1 | Features::RING_PACKED;
    // Of any virtqueue: the size does not depend on what it is for.
    for index in [0, 1, 2, 255] {
        let split = Frontend::negotiated(&target.socket(), Features::VERSION_1);
        let other = Frontend::negotiated(&target.socket(), packed);
        let ask = |frontend: &Frontend, value: u32| {
            let state = VringState { index, value }.to_bytes();
            frontend.ask(FrontendRequest::SetVringNum, &state, &[])
        };
        for (size, is_split, is_packed) in [
            (0, false, false),
            (1, true, true),
            (3, false, true),
            (16, true, true),
            (100, false, true),
            (32767, false, true),
            (32768, true, true),
            (32769, false, false),
            (65536, false, false),
            (1 << 16 | 16, false, false),
        ] {
            let accepted = |is: bool| Some(u64::from(!is));
            assert_eq!(ask(&split, size), accepted(is_split), "split, {index}: {size}");
            assert_eq!(ask(&other, size), accepted(is_packed), "packed, {index}: {size}");
        }
    }
    // What is set before the features is checked when the virtqueue is started.
    let frontend = Frontend::negotiated(&target.socket(), packed);
    let state = |value: u32| VringState { index: 0, value }.to_bytes();
    let kick = new_eventfd();
    let start = || frontend.ask(FrontendRequest::SetVringKick, &0_u64.to_le_bytes(), &[kick.as_fd()]);
    frontend.set(FrontendRequest::SetVringNum, &state(3), &[]);
    for (base, expected) in [(0x8003_8002, 1), (0x8000_8003, 1), (0x8002_8002, 0)] {
        frontend.set(FrontendRequest::SetVringBase, &state(base), &[]);
        assert_eq!(start(), Some(expected), "{base:x}");
    }
    let features = (Features::VERSION_1 | Features::VHOST_USER_PROTOCOL_FEATURES).bits();
    frontend.set(FrontendRequest::SetFeatures, &features.to_le_bytes(), &[]);
    assert_eq!(start(), Some(1), "three entries of a split virtqueue");
    drop(frontend);
    target.wait_for_no_connections();
    check_service(&target);
}

#[test]
fn memory_tables_that_lie_are_rejected() {
    let target = TestTarget::start("tables", |config| config);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let region = |guest_address: u64, size: u64, user_address: u64, mmap_offset: u64| MemoryRegion {
        guest_address,
        size,
        user_address,
        mmap_offset,
    };
    let file = memfd(1 << 20);
    let pipe = rustix::pipe::pipe().unwrap().0;
    let null = std::fs::File::open("/dev/zero").unwrap();
    let add = |region: MemoryRegion, files: &[std::os::fd::BorrowedFd<'_>]| {
        frontend.ask(FrontendRequest::AddMemReg, &SingleRegion::from(region).to_bytes(), files)
    };
    let fine = region(0, 1 << 20, 0, 0);
    for (bad, file) in [
        // Longer than the file, of no size, beyond the end of addresses, over other memory, of a wrong file.
        (region(0, 2 << 20, 0, 0), file.as_fd()),
        (region(0, 1 << 20, 0, 4096), file.as_fd()),
        (region(0, 0, 0, 0), file.as_fd()),
        (region(u64::MAX - 4095, 1 << 20, 0, 0), file.as_fd()),
        (region(0, 1 << 20, u64::MAX, 0), file.as_fd()),
        (region(0, 1 << 20, 0, u64::MAX - 4095), file.as_fd()),
        (region(GUEST + MEMORY_BYTES - 4096, 1 << 20, 0, 0), file.as_fd()),
        (region(GUEST - 4096, 1 << 20, 0, 0), file.as_fd()),
        (fine, pipe.as_fd()),
        (fine, null.as_fd()),
    ] {
        assert_eq!(add(bad, &[file]), Some(1), "{bad:?}");
    }
    assert_eq!(add(fine, &[]), Some(1), "without its file");
    assert_eq!(add(fine, &[file.as_fd(), file.as_fd()]), Some(1), "with two");
    assert_eq!(add(fine, &[file.as_fd()]), Some(0));
    let remove = SingleRegion::from(fine).to_bytes();
    frontend.set(FrontendRequest::RemMemReg, &remove, &[]);
    assert_eq!(frontend.ask(FrontendRequest::RemMemReg, &remove, &[]), Some(1), "it is gone");
    // Two regions of a table overlap: it has no effect.
    let table = MemoryTable(vec![fine, fine]).to_bytes();
    let rejected = frontend.ask(FrontendRequest::SetMemTable, &table, &[file.as_fd(), file.as_fd()]);
    assert_eq!(rejected, Some(1));
    frontend.share_memory();
    let mut queue = frontend.start_queue(0, 16, 0);
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    // Areas of a virtqueue outside of memory: it does not run.
    let address = VringAddress { index: 2, descriptors: USER + MEMORY_BYTES - 64, ..VringAddress::default() };
    frontend.set(FrontendRequest::SetVringNum, &VringState { index: 2, value: 8 }.to_bytes(), &[]);
    frontend.set(FrontendRequest::SetVringAddr, &address.to_bytes(), &[]);
    let kick = new_eventfd();
    frontend.set(FrontendRequest::SetVringKick, &2_u64.to_le_bytes(), &[kick.as_fd()]);
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    // What is no eventfd is not watched or signalled.
    let not_eventfd = frontend.ask(FrontendRequest::SetVringCall, &2_u64.to_le_bytes(), &[pipe.as_fd()]);
    assert_eq!(not_eventfd, Some(1));
}

#[test]
fn a_removed_device_fails_requests() {
    let target = TestTarget::start("removed", |config| config);
    let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
    let mut queue = frontend.start_queue(0, 16, 0);
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (0, 513));
    assert!(target.target.delete("disk").is_err(), "it is in use");
    target.registry.unregister("Malloc0").unwrap();
    assert_eq!(queue.execute(RequestKind::In, 0, &[(DATA, 512, true)]), (1, 1));
    drop(queue);
    drop(frontend);
    target.wait_for_no_connections();
    target.target.delete("disk").unwrap();
    assert!(!target.socket().exists());
}

#[test]
fn silent_clients_do_not_keep_others_out() {
    let target = TestTarget::start("silent", |config| config);
    let silent: Vec<UnixStream> = (0..300).map(|_| UnixStream::connect(target.socket()).unwrap()).collect();
    check_service(&target);
    // The oldest made room for the others.
    silent[0].set_read_timeout(Some(TIMEOUT)).unwrap();
    assert_eq!((&silent[0]).read(&mut [0]).unwrap(), 0);
    drop(silent);
    target.wait_for_no_connections();
}

#[test]
fn eventfds_without_number_do_not_keep_others_out() {
    _ = os::raise_descriptor_limit();
    let target = TestTarget::start("watches", |config| config);
    let kick = new_eventfd();
    let frontends: Vec<Frontend> = (0..17)
        .map(|_| {
            let frontend = Frontend::negotiated(&target.socket(), Features::VERSION_1);
            for queue in 0..256_u64 {
                frontend.set(FrontendRequest::SetVringKick, &queue.to_le_bytes(), &[kick.as_fd()]);
            }
            frontend
        })
        .collect();
    check_service(&target);
    drop(frontends);
    target.wait_for_no_connections();
    check_service(&target);
}
