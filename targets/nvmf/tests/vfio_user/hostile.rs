//! Malformed, malicious and crashing clients.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use block_io::Status;
use vfio_user::{ClientConfig, VfioUserError};
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::registers::offset;
use wire_nvme::{DataPointer, Sqe, admin, aer, log};
use wire_vfio_user::{
    DmaMap, DmaUnmap, Header, ProtocolCapabilities, RegionAccess, SetIrqs, VersionMessage, VfioUserCommand,
    irq, irq_set,
};

use crate::host::{DATA, HostQueuePair, IOVA, MEMORY, VfioUserTestHost, memory_file, prp, transfer};
use crate::raw_client::RawVfioUserClient;
use crate::test_target::VfioUserTestTarget;

const EINVAL: u32 = 22;
const EEXIST: u32 = 17;
const ENOENT: u32 = 2;

#[test]
fn protocol_violations_disconnect_the_client() {
    let rig = VfioUserTestTarget::new();
    let version =
        VersionMessage { major: 0, minor: 1, capabilities: ProtocolCapabilities::default() }.to_bytes();
    let other =
        VersionMessage { major: 1, minor: 0, capabilities: ProtocolCapabilities::default() }.to_bytes();
    let first = |command, payload: &[u8]| {
        [&Header::request(1, command, payload.len()).to_bytes()[..], payload].concat()
    };
    let mut too_long = Header::request(1, VfioUserCommand::Version, 0);
    too_long.size = u32::MAX;
    let mut too_short = Header::request(1, VfioUserCommand::Version, 0).to_bytes();
    too_short[4] = 3;
    let mut strange = Header::request(1, VfioUserCommand::Version, 0).to_bytes();
    strange[8] = 9;
    let reply = Header::request(1, VfioUserCommand::Version, 0).reply(0).to_bytes();
    for (what, bytes) in [
        ("another version", first(VfioUserCommand::Version, &other)),
        ("no version", first(VfioUserCommand::DeviceReset, &[])),
        ("invalid JSON", first(VfioUserCommand::Version, b"\0\0\x01\0nonsense\0")),
        ("a message of the maximum size", too_long.to_bytes().to_vec()),
        ("a message shorter than its header", too_short.to_vec()),
        ("an invalid message type", strange.to_vec()),
        ("a reply", reply.to_vec()),
        ("the end of the stream within a header", first(VfioUserCommand::Version, &version)[..7].to_vec()),
    ] {
        let mut raw = RawVfioUserClient::connect(&rig);
        raw.0.write_all(&bytes).unwrap();
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(raw.is_closed(), "{what}");
    }
    // The next client is served.
    drop(VfioUserTestHost::connect(&rig.directory));
}

#[test]
fn messages_may_arrive_byte_by_byte() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::connect(&rig);
    let version =
        VersionMessage { major: 0, minor: 7, capabilities: ProtocolCapabilities::default() }.to_bytes();
    let header = Header::request(3, VfioUserCommand::Version, version.len());
    for byte in header.to_bytes().iter().chain(&version) {
        raw.0.write_all(&[*byte]).unwrap();
    }
    let (header, payload) = raw.reply().unwrap();
    assert_eq!(header.id, 3);
    let version = VersionMessage::decode(&payload).unwrap();
    assert_eq!((version.major, version.minor), (0, 1));
}

#[test]
fn invalid_dma_ranges_are_rejected() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let file = memory_file(1 << 20);
    let fd = [file.as_fd()];
    let good = DmaMap::new(0x10000, 0x10000, 0, true);
    let bad = [
        DmaMap { size: 0, ..good },
        DmaMap { size: 0x1234, ..good },
        DmaMap { address: 0x10001, ..good },
        DmaMap { address: u64::MAX - 0xfff, ..good },
        DmaMap { offset: 0x800, ..good },
        DmaMap { offset: u64::MAX - 0xfff, ..good },
        DmaMap { flags: 0, ..good },
        DmaMap { flags: 0x80, ..good },
        DmaMap { argsz: 8, ..good },
        // Longer than the file.
        DmaMap { size: 2 << 20, ..good },
        DmaMap { offset: 1 << 20, ..good },
        DmaMap { size: 1 << 60, ..good },
    ];
    for map in bad {
        assert_eq!(raw.errno(VfioUserCommand::DmaMap, &map.to_bytes(), &fd), EINVAL, "{map:?}");
    }
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &good.to_bytes()[..31], &fd), EINVAL);
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &good.to_bytes(), &fd), 0);
    for (address, size) in [(0x10000, 0x10000), (0x18000, 0x1000), (0x8000, 0x9000), (0x1f000, 0x10000)] {
        let overlap = DmaMap { address, size, ..good };
        assert_eq!(raw.errno(VfioUserCommand::DmaMap, &overlap.to_bytes(), &fd), EEXIST, "{overlap:?}");
    }
    // Two file descriptors instead of one, one instead of none, and more than the maximum.
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &good.to_bytes(), &[file.as_fd(); 2]), EINVAL);
    assert_eq!(raw.errno(VfioUserCommand::DeviceReset, &[], &fd), EINVAL);
    for unmap in [DmaUnmap::new(0x10000, 0x8000), DmaUnmap::new(0x11000, 0x10000), DmaUnmap::new(0, 0)] {
        assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &unmap.to_bytes(), &[]), ENOENT, "{unmap:?}");
    }
    let all = DmaUnmap { flags: 2, address: 1, ..DmaUnmap::new(0, 0) };
    assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &all.to_bytes(), &[]), EINVAL);
    let all = DmaUnmap { flags: 2, ..DmaUnmap::new(0, 0) };
    assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &all.to_bytes(), &[]), 0);
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &good.to_bytes(), &fd), 0);
    let header = Header::request(1, VfioUserCommand::DmaMap, DmaMap::SIZE);
    raw.send(&header, &good.to_bytes(), &[file.as_fd(); 20]);
    assert!(raw.is_closed());
}

/// SPDK's driver sends the file descriptor with the unmap, too.
#[test]
fn dma_unmap_with_a_file_descriptor_is_accepted() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let (map, unmap) = (DmaMap::new(0x10000, 0x10000, 0, true), DmaUnmap::new(0x10000, 0x10000));
    for _ in 0..3 {
        let file = memory_file(1 << 20);
        assert_eq!(raw.errno(VfioUserCommand::DmaMap, &map.to_bytes(), &[file.as_fd()]), 0);
        assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &unmap.to_bytes(), &[file.as_fd()]), 0);
        assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &unmap.to_bytes(), &[file.as_fd()]), ENOENT);
    }
}

#[test]
fn dma_ranges_are_limited_to_max_dma_maps() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let file = memory_file(4096);
    let map = |index: u64| DmaMap::new(index * 8192, 4096, 0, true).to_bytes();
    for index in 0..8192 {
        assert_eq!(raw.errno(VfioUserCommand::DmaMap, &map(index), &[file.as_fd()]), 0, "{index}");
    }
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &map(8192), &[file.as_fd()]), 28, "ENOSPC");
    assert_eq!(raw.errno(VfioUserCommand::DmaUnmap, &DmaUnmap::new(8192, 4096).to_bytes(), &[]), 0);
    assert_eq!(raw.errno(VfioUserCommand::DmaMap, &map(8192), &[file.as_fd()]), 0);
}

#[test]
fn invalid_interrupt_settings_are_rejected() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let flags = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
    let good = SetIrqs { argsz: 20, flags, index: irq::MSIX, start: 0, count: 1 };
    let mut errno = |set: SetIrqs, descriptors: &[&OwnedFd]| {
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(|one| one.as_fd()).collect();
        raw.errno(VfioUserCommand::DeviceSetIrqs, &set.to_bytes(), &descriptors)
    };
    assert_eq!(errno(good, &[&event]), 0);
    for set in [
        SetIrqs { index: irq::INTX, ..good },
        SetIrqs { index: 9, ..good },
        SetIrqs { start: 128, ..good },
        SetIrqs { start: u32::MAX, ..good },
        SetIrqs { count: 2, ..good },
        SetIrqs { count: 0, ..good },
        SetIrqs { flags: 0, ..good },
        SetIrqs { flags: flags | irq_set::DATA_NONE, ..good },
        SetIrqs { flags: irq_set::DATA_EVENTFD | irq_set::ACTION_MASK, ..good },
        SetIrqs { flags: irq_set::DATA_NONE | irq_set::ACTION_TRIGGER, ..good },
        SetIrqs { argsz: 4, ..good },
    ] {
        assert_eq!(errno(set, &[&event]), EINVAL, "{set:?}");
    }
    // Writes to a full pipe would block the target.
    assert_eq!(errno(good, &[&writer]), EINVAL);
}

#[test]
fn a_full_and_blocking_eventfd_does_not_stop_the_target() {
    use rustix::fs::{OFlags, fcntl_setfl};
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let flags = irq_set::DATA_EVENTFD | irq_set::ACTION_TRIGGER;
    let assign = SetIrqs { argsz: 20, flags, index: irq::MSIX, start: 0, count: 1 };
    assert_eq!(raw.errno(VfioUserCommand::DeviceSetIrqs, &assign.to_bytes(), &[event.as_fd()]), 0);
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    fcntl_setfl(&event, OFlags::empty()).unwrap();
    let trigger = SetIrqs { flags: irq_set::DATA_NONE | irq_set::ACTION_TRIGGER, ..assign };
    for _ in 0..100 {
        assert_eq!(raw.errno(VfioUserCommand::DeviceSetIrqs, &trigger.to_bytes(), &[]), 0);
    }
}

#[test]
fn invalid_region_accesses_are_rejected() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    for (region, offset, count) in [
        (0, 0x2000, 4),
        (0, 0x1ffd, 4),
        (0, 0, 0),
        (0, u64::MAX, 4),
        (3, 0, 4),
        (9, 0, 4),
        (7, 0, 4097),
        (7, 0, u32::MAX),
    ] {
        let access = RegionAccess { offset, region, count };
        assert_eq!(raw.errno(VfioUserCommand::RegionRead, &access.to_bytes(), &[]), EINVAL, "{access:?}");
    }
    let access = RegionAccess { offset: 0x14, region: 0, count: 4 };
    assert_eq!(
        raw.errno(VfioUserCommand::RegionWrite, &[&access.to_bytes()[..], &[0; 3]].concat(), &[]),
        EINVAL
    );
    assert_eq!(
        raw.errno(VfioUserCommand::RegionWrite, &[&access.to_bytes()[..], &[0; 5]].concat(), &[]),
        EINVAL
    );
    for command in [VfioUserCommand::DeviceFeature, VfioUserCommand::DmaRead, VfioUserCommand::MigrationRead]
    {
        assert_ne!(raw.errno(command, &[0; 16], &[]), 0);
    }
    let unknown = Header { command: 14, ..Header::request(5, VfioUserCommand::Version, 0) };
    raw.send(&unknown, &[], &[]);
    let (reply, _) = raw.reply().unwrap();
    assert!(reply.failed && reply.id == 5 && reply.command == 14);
}

#[test]
fn a_client_that_does_not_read_is_disconnected() {
    let rig = VfioUserTestTarget::new();
    let mut raw = RawVfioUserClient::negotiated(&rig);
    let access = RegionAccess { offset: 0, region: 7, count: 4096 };
    let request =
        [&Header::request(1, VfioUserCommand::RegionRead, 16).to_bytes()[..], &access.to_bytes()].concat();
    raw.0.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    for _ in 0..100_000 {
        if raw.0.write_all(&request).is_err() {
            break;
        }
    }
    // The replies that were sent arrive, then the stream ends.
    let mut received = Vec::new();
    let _ = raw.0.read_to_end(&mut received);
    assert!(received.len() < 8 << 20);
    drop(raw);
    drop(VfioUserTestHost::connect(&rig.directory));
}

#[test]
fn an_invalid_admin_queue_sets_the_fatal_status() {
    let rig = VfioUserTestTarget::new();
    let host = VfioUserTestHost::attach(&rig.directory);
    for (aqa, asq, acq) in [
        (0x001f_001f, IOVA + 8, IOVA + 0x1000),
        (0x001f_001f, 0x1000, IOVA + 0x1000),
        (0x001f_001f, IOVA, IOVA + MEMORY),
        (0x0000_001f, IOVA, IOVA + 0x1000),
        (0x001f_0000, IOVA, IOVA + 0x1000),
        (0x0fff_0fff, IOVA + MEMORY - 4096, IOVA),
    ] {
        host.write(offset::AQA, aqa);
        host.client.write_u64(0, offset::ASQ.into(), asq).unwrap();
        host.client.write_u64(0, offset::ACQ.into(), acq).unwrap();
        host.write(offset::CC, 0x0046_0001);
        assert_eq!(host.read(offset::CSTS) & 2, 2, "{aqa:#x} {asq:#x} {acq:#x}");
        host.write(offset::CC, 0);
        host.wait_status(3, 0);
    }
    // Unsupported queue entry sizes, page sizes and command sets.
    for cc in [0x0046_0081, 0x0000_0001, 0x0046_0071, 0x0046_0031] {
        host.write(offset::CC, cc);
        assert_eq!(host.read(offset::CSTS) & 2, 2, "{cc:#x}");
        host.write(offset::CC, 0);
        host.wait_status(1, 0);
    }
}

#[test]
fn unmapped_data_fails_with_data_transfer_error() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let read_only = memory_file(1 << 20);
    let address = IOVA + 2 * MEMORY;
    host.client.dma_map_file(address, read_only.as_fd(), 0, 1 << 20, false).unwrap();
    let unreachable = Status::DATA_TRANSFER_ERROR;
    let offset = Status::PRP_OFFSET_INVALID.do_not_retry();
    let end = IOVA + MEMORY;
    for (opcode, blocks, first, second, status) in [
        (NvmOpcode::Read, 8, 0, 0, unreachable),
        (NvmOpcode::Write, 8, !4095, 0, unreachable),
        (NvmOpcode::Read, 8, end - 2048, end, unreachable),
        // PRP lists that are not mapped, and misaligned PRPs.
        (NvmOpcode::Read, 64, IOVA + DATA, 0x1000, unreachable),
        (NvmOpcode::Read, 64, IOVA + DATA, IOVA + DATA + 4, offset),
        (NvmOpcode::Read, 8, IOVA + DATA + 2, 0, offset),
        (NvmOpcode::Read, 16, IOVA + DATA, IOVA + DATA + 8, offset),
        // Read-only memory.
        (NvmOpcode::Read, 8, address, 0, unreachable),
        (NvmOpcode::Read, 1, address + 512, 0, unreachable),
        (NvmOpcode::Write, 8, address, 0, Status::SUCCESS),
        (NvmOpcode::Write, 1, address + 512, 0, Status::SUCCESS),
    ] {
        let sqe = transfer(opcode, 0, blocks, first, second);
        assert_eq!(
            host.execute(&mut queue, sqe).status,
            status,
            "{opcode:?} {blocks} {first:#x} {second:#x}"
        );
    }
    // A PRP list whose last entry points to itself.
    let last = IOVA + DATA + 4088;
    host.memory.store_u64(DATA + 4088, last);
    let around = transfer(NvmOpcode::Read, 0, 256, IOVA + DATA, last);
    assert_eq!(host.execute(&mut queue, around).status, offset);
    // A completion queue in read-only memory.
    let create =
        wire_nvme::queue::CreateIoCq { address, qid: 2, entries: 16, contiguous: true, ..Default::default() };
    assert_eq!(host.admin(create.to_sqe()).status, unreachable);
    let identify = admin::Identify { cns: 1, ..Default::default() };
    assert_eq!(host.admin(prp(identify.to_sqe(0), address, 0)).status, unreachable);
}

#[test]
fn every_random_submission_queue_entry_completes() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let mut generator = random::WyRand::new(0);
    let mut random = || generator.next_bits();
    for round in 0..20_000 {
        let mut bytes = [0; 64];
        bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()));
        let mut sqe = Sqe::decode(&bytes);
        // Some fields must be valid to reach deeper code.
        sqe.opcode &= 0xf;
        if random() & 3 > 0 {
            (sqe.nsid, sqe.flags, sqe.mptr) = (1, (random() & 1) as u8 * 0x40, 0);
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = ((random() & 0xff) as u32, 0, (random() & 0x1ff) as u32);
            sqe.data =
                DataPointer::prp((IOVA + random() % (2 * MEMORY)) & !3, IOVA + random() % (2 * MEMORY));
        }
        if random() & 7 == 0 {
            sqe.cid = host.cid();
            let admin_sqe = Sqe { opcode: sqe.opcode | if random() & 1 == 0 { 0x80 } else { 0 }, ..sqe };
            // Event requests do not complete, and queue 1 must not be deleted.
            let skipped = matches!(
                AdminOpcode::from_wire(admin_sqe.opcode),
                Some(AdminOpcode::AsyncEventRequest | AdminOpcode::DeleteIoSq | AdminOpcode::DeleteIoCq)
            );
            if !skipped {
                host.admin(admin_sqe);
            }
        } else {
            host.execute(&mut queue, sqe);
        }
        // The controller must still be ready.
        if round % 1000 == 0 {
            assert_eq!(host.read(offset::CSTS), 1, "round {round}");
        }
    }
}

#[test]
fn invalid_doorbell_writes_are_reported_once() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let request = |host: &mut VfioUserTestHost, cid| {
        let mut admin = std::mem::replace(&mut host.admin, HostQueuePair::placeholder());
        host.push_sqe(
            &mut admin,
            &Sqe { cid, flags: 0, ..Sqe::new(AdminOpcode::AsyncEventRequest.to_wire()) },
        );
        host.ring_doorbell(&admin);
        host.admin = admin;
    };
    let event = |host: &mut VfioUserTestHost| {
        let mut admin = std::mem::replace(&mut host.admin, HostQueuePair::placeholder());
        let cqe = host.wait(&mut admin);
        host.admin = admin;
        (cqe.cid, aer::AsyncEvent::from_result(cqe.result).unwrap())
    };
    request(&mut host, 100);
    request(&mut host, 101);
    host.mapped_doorbells().store_u32(8, 16);
    assert_eq!(event(&mut host), (100, aer::AsyncEvent::INVALID_DOORBELL_VALUE));
    // The queue continues when its doorbell is valid again.
    let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
    // A doorbell of a queue that does not exist; only a write by message can be detected.
    host.client.write_u32(0, 0x1000 + 8 * 9, 1).unwrap();
    assert_eq!(event(&mut host), (101, aer::AsyncEvent::INVALID_DOORBELL));
    // Reading the log re-arms the event.
    let page = admin::GetLogPage {
        lid: log::LogId::ErrorInformation.to_wire(),
        length_bytes: 64,
        ..Default::default()
    };
    assert_eq!(host.admin(prp(page.to_sqe(0), IOVA + DATA, 0)).status, Status::SUCCESS);
    request(&mut host, 102);
    host.mapped_doorbells().store_u32(8, u32::MAX);
    assert_eq!(event(&mut host).0, 102);
}

#[test]
fn an_invalid_head_is_reported_while_the_completion_queue_has_room() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let mut admin = std::mem::replace(&mut host.admin, HostQueuePair::placeholder());
    let request = Sqe::new(AdminOpcode::AsyncEventRequest.to_wire());
    host.push_sqe(&mut admin, &Sqe { cid: 100, flags: 0, ..request });
    host.ring_doorbell(&admin);
    let read = transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0);
    let submit = |host: &mut VfioUserTestHost, queue: &mut HostQueuePair, count: u16| {
        for cid in 0..count {
            host.push_sqe(queue, &Sqe { cid, ..read });
        }
        host.ring_doorbell(queue);
    };
    // Ten completions are not acknowledged: five entries are left, too few for eight commands, so that the
    // target reads the doorbell, which is out of range, and executes five.
    submit(&mut host, &mut queue, 10);
    for _ in 0..10 {
        host.wait_without_doorbell(&mut queue);
    }
    host.mapped_doorbells().store_u32(12, 99);
    submit(&mut host, &mut queue, 8);
    for _ in 0..5 {
        host.wait_without_doorbell(&mut queue);
    }
    let cqe = host.wait(&mut admin);
    let event = aer::AsyncEvent::from_result(cqe.result);
    assert_eq!((cqe.cid, event), (100, Some(aer::AsyncEvent::INVALID_DOORBELL_VALUE)));
    // A valid head lets the other three complete.
    host.mapped_doorbells().store_u32(12, queue.head);
    for _ in 0..3 {
        assert_eq!(host.wait(&mut queue).status, Status::SUCCESS);
    }
}

#[test]
fn truncating_shared_memory_disconnects_only_that_client() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    let write = transfer(NvmOpcode::Write, 0, 8, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, write).status, Status::SUCCESS);
    // The queues are not in the part that is removed.
    rustix::fs::ftruncate(&host.file, DATA).unwrap();
    let write = Sqe { cid: 1, ..write };
    host.push_sqe(&mut queue, &write);
    host.ring_doorbell(&queue);
    let start = std::time::Instant::now();
    loop {
        match host.client.read_u32(0, 0) {
            Ok(_) => assert!(start.elapsed() < Duration::from_secs(20)),
            Err(VfioUserError::Disconnected) => break,
            Err(other) => panic!("{other}"),
        }
    }
    drop(host);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    assert_eq!(host.identify(1, 0).len(), 4096);
}

#[test]
fn regular_files_are_not_mapped() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 16);
    // A page fault on a regular file may block for an unbounded time.
    let path = rig.directory.join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let on_disk = rustix::fs::fcntl_get_seals(&file).is_err();
    host.client.dma_map_file(2 * IOVA, file.as_fd(), 0, 4096, true).unwrap();
    let read = transfer(NvmOpcode::Read, 0, 1, 2 * IOVA, 0);
    let expected = if on_disk { Status::DATA_TRANSFER_ERROR } else { Status::SUCCESS };
    assert_eq!(host.execute(&mut queue, read).status, expected);
    host.client.dma_unmap(2 * IOVA, 4096).unwrap();
}

#[test]
fn the_target_survives_clients_that_disconnect_at_any_point() {
    let rig = VfioUserTestTarget::new();
    for round in 0..50 {
        let mut host = VfioUserTestHost::attach(&rig.directory);
        if round % 5 > 0 {
            host.enable();
        }
        if round % 5 > 1 {
            let mut queue = host.create_queue_pair(1, 16);
            for cid in 0..round as u16 % 15 {
                let length = 1 + u32::from(cid) * 16;
                host.push_sqe(
                    &mut queue,
                    &Sqe { cid, ..transfer(NvmOpcode::Write, 0, length, IOVA + DATA, IOVA + DATA) },
                );
            }
            host.ring_doorbell(&queue);
        }
    }
    let config = ClientConfig { timeout: Duration::from_secs(20), ..ClientConfig::default() };
    drop(vfio_user::VfioUserClient::connect(&rig.directory, &config).unwrap());
}
