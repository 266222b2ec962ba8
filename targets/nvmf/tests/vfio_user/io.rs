//! I/O commands with every layout of data, completion queues, interrupts and shadow doorbells.

use std::os::fd::AsFd;

use block_io::Status;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use wire_nvme::doorbell::DoorbellBuffer;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::sqe::Sgl;
use wire_nvme::{DataPointer, NSID_ALL, Sqe};

use crate::host::{DATA, IOVA, VfioUserTestHost, transfer};
use crate::test_target::{BLOCKS, VfioUserTestTarget};

pub(crate) fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512) as u8 ^ (at as u8).wrapping_mul(31) ^ seed).collect()
}

pub(crate) fn bytes(host: &VfioUserTestHost, at: u64, count: usize) -> Vec<u8> {
    let mut out = vec![0; count];
    host.memory.read(at, &mut out);
    out
}

#[test]
fn written_data_is_read_back() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    for (lba, blocks) in [(0u64, 1u32), (8, 8), (BLOCKS - 1, 1)] {
        let length = blocks as usize * 512;
        host.memory.write(DATA, &pattern(lba as u8, length));
        let write = transfer(NvmOpcode::Write, lba, blocks, IOVA + DATA, 0);
        assert_eq!(host.execute(&mut queue, write).status, Status::SUCCESS);
        let read = transfer(NvmOpcode::Read, lba, blocks, IOVA + DATA + 0x1_0000, 0);
        assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
        assert_eq!(bytes(&host, DATA + 0x1_0000, length), pattern(lba as u8, length));
    }
    let outside = transfer(NvmOpcode::Read, BLOCKS, 1, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, outside).status, Status::LBA_OUT_OF_RANGE.do_not_retry());
    let other = Sqe { nsid: 2, ..transfer(NvmOpcode::Read, 0, 1, IOVA + DATA, 0) };
    assert_eq!(host.execute(&mut queue, other).status, Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
}

/// All forms of PRPs up to 128 KiB: contiguous or not, with or without an offset, in one list or a chain of
/// lists.
#[test]
fn all_forms_of_prps() {
    check_all_prp_forms(&VfioUserTestTarget::new());
}

/// The same with a device for which most data must be copied.
#[test]
fn all_forms_of_prps_with_a_device_that_requires_alignment() {
    check_all_prp_forms(&VfioUserTestTarget::with_file());
}

fn check_all_prp_forms(rig: &VfioUserTestTarget) {
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    let page = |number: u64| DATA + 0x10_0000 + number * 4096;
    let mut seed = 0;
    for blocks in [1, 7, 8, 9, 16, 17, 24, 64, 129, 255, 256] {
        for offset in [0, 4, 512, 4092] {
            for stride in [1, 3] {
                for list_at in [0, 8, 4088, 4096 - 5 * 8] {
                    seed += 1;
                    let length = blocks * 512;
                    let data = pattern(seed as u8, length);
                    // For each page: its offset in memory, and the range of the data in it.
                    let mut segments = Vec::new();
                    let mut at = 0;
                    while at < length {
                        let start = if at == 0 { offset } else { 0 };
                        let count = (4096 - start).min(length - at);
                        segments.push((page(segments.len() as u64 * stride) + start as u64, at, count));
                        at += count;
                    }
                    for (address, at, count) in &segments {
                        host.memory.write(*address, &data[*at..at + count]);
                    }
                    let rest: Vec<u64> = segments[1..].iter().map(|(address, ..)| IOVA + address).collect();
                    let second = match rest.len() {
                        0 => 0,
                        1 => rest[0],
                        _ => IOVA + write_prp_list(&host, DATA + 0x1_0000, list_at, &rest),
                    };
                    let first = IOVA + segments[0].0;
                    let write = transfer(NvmOpcode::Write, 100, blocks as u32, first, second);
                    let what = format!("{blocks} blocks at {offset}, stride {stride}, list at {list_at}");
                    assert_eq!(host.execute(&mut queue, write).status, Status::SUCCESS, "{what}");
                    for (address, _, count) in &segments {
                        host.memory.write(*address, &vec![0; *count]);
                    }
                    let read = transfer(NvmOpcode::Read, 100, blocks as u32, first, second);
                    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS, "{what}");
                    for (address, at, count) in &segments {
                        assert!(bytes(&host, *address, *count) == data[*at..at + count], "{what}: byte {at}");
                    }
                }
            }
        }
    }
}

/// Writes a PRP list that starts at offset `at` of a page and continues in others; returns its address.
fn write_prp_list(host: &VfioUserTestHost, place: u64, at: u64, pages: &[u64]) -> u64 {
    let (mut remaining, mut place) = (pages, place + at);
    let begin = place;
    loop {
        let room = ((4096 - place % 4096) / 8) as usize;
        if remaining.len() <= room {
            for (index, page) in remaining.iter().enumerate() {
                host.memory.store_u64(place + index as u64 * 8, *page);
            }
            return begin;
        }
        let (now, later) = remaining.split_at(room - 1);
        for (index, page) in now.iter().enumerate() {
            host.memory.store_u64(place + index as u64 * 8, *page);
        }
        let next = place / 4096 * 4096 + 0x2000;
        host.memory.store_u64(place + now.len() as u64 * 8, IOVA + next);
        (remaining, place) = (later, next);
    }
}

#[test]
fn sgls_with_and_without_segments_and_invalid_sgls() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    let sgl = |opcode, blocks, pointer: DataPointer| Sqe {
        flags: Sqe::FLAGS_SGL,
        data: pointer,
        ..transfer(opcode, 7, blocks, 0, 0)
    };
    let block = |address: u64, length: u32| Sgl::DataBlock { address: IOVA + address, length };
    let put = |host: &VfioUserTestHost, at: u64, all: &[Sgl]| {
        for (index, one) in all.iter().enumerate() {
            let pointer = DataPointer::from(*one);
            host.memory.store_u64(at + index as u64 * 16, pointer.low);
            host.memory.store_u64(at + index as u64 * 16 + 8, pointer.high);
        }
    };
    let data = pattern(9, 4096);
    host.memory.write(DATA, &data);
    let whole = block(DATA, 4096).into();
    assert_eq!(host.execute(&mut queue, sgl(NvmOpcode::Write, 8, whole)).status, Status::SUCCESS);
    // Data blocks of arbitrary size and alignment, in two segments.
    let (one, two) = (DATA + 0x8000, DATA + 0x9000);
    put(&host, two, &[block(DATA + 0x2_0001, 95), block(DATA + 0x3_0000, 3000)]);
    let link = Sgl::Segment { offset: false, last: true, address: IOVA + two, length: 32 };
    put(&host, one, &[block(DATA + 0x4_0000, 1), block(DATA + 0x5_0000, 1000), link]);
    let first = Sgl::Segment { offset: false, last: false, address: IOVA + one, length: 48 };
    assert_eq!(host.execute(&mut queue, sgl(NvmOpcode::Read, 8, first.into())).status, Status::SUCCESS);
    let parts = [(0x4_0000, 1), (0x5_0000, 1000), (0x2_0001, 95), (0x3_0000, 3000)];
    let read: Vec<u8> = parts.iter().flat_map(|(at, count)| bytes(&host, DATA + at, *count)).collect();
    assert!(read == data);
    // Invalid SGLs.
    let run = |host: &mut VfioUserTestHost, queue: &mut _, pointer: Sgl| {
        host.execute(queue, sgl(NvmOpcode::Read, 8, pointer.into())).status
    };
    let length = Status::DATA_SGL_LENGTH_INVALID.do_not_retry();
    assert_eq!(run(&mut host, &mut queue, block(DATA, 4095)), length);
    assert_eq!(run(&mut host, &mut queue, block(DATA, 4097)), length);
    let kind = Status::SGL_TYPE_INVALID.do_not_retry();
    assert_eq!(run(&mut host, &mut queue, Sgl::Transport { length: 4096 }), kind);
    let segment = Status::INVALID_SGL_SEGMENT.do_not_retry();
    for (length, last) in [(0, true), (24, true), (16, false), (48, true)] {
        let bad = Sgl::Segment { offset: false, last, address: IOVA + one, length };
        assert_eq!(run(&mut host, &mut queue, bad), segment, "{length} {last}");
    }
    // A segment that points to itself.
    let around = Sgl::Segment { offset: false, last: false, address: IOVA + one, length: 16 };
    put(&host, one, &[around]);
    assert_eq!(run(&mut host, &mut queue, around), Status::INVALID_SGL_COUNT.do_not_retry());
}

#[test]
fn compare_verify_flush_write_zeroes_and_unmap() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    host.memory.write(DATA, &pattern(3, 4096));
    let write = transfer(NvmOpcode::Write, 0, 8, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, write).status, Status::SUCCESS);
    let compare = transfer(NvmOpcode::Compare, 0, 8, IOVA + DATA, 0);
    assert_eq!(host.execute(&mut queue, compare).status, Status::SUCCESS);
    host.memory.store_u8(DATA + 4095, 0xee);
    assert_eq!(host.execute(&mut queue, compare).status, Status::COMPARE_FAILURE.do_not_retry());
    // Verify transfers no data.
    let verify = |lba| Sqe { flags: 0, ..transfer(NvmOpcode::Verify, lba, 8, 0, 0) };
    assert_eq!(host.execute(&mut queue, verify(0)).status, Status::SUCCESS);
    let outside = host.execute(&mut queue, verify(BLOCKS - 7)).status;
    assert_eq!(outside, Status::LBA_OUT_OF_RANGE.do_not_retry());
    for nsid in [1, NSID_ALL] {
        let flush = Sqe { nsid, flags: 0, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
        assert_eq!(host.execute(&mut queue, flush).status, Status::SUCCESS);
    }
    // One block, at LBA 0.
    let zeroes = Sqe { nsid: 1, flags: 0, ..Sqe::new(NvmOpcode::WriteZeroes.to_wire()) };
    assert_eq!(host.execute(&mut queue, zeroes).status, Status::SUCCESS);
    // Two ranges, in a buffer of exactly that length.
    let ranges = [(2u32, 1u64), (1, 5)];
    for (index, (blocks, lba)) in ranges.iter().enumerate() {
        let at = DATA + 0x1000 + index as u64 * 16;
        host.memory.store_u32(at + 4, *blocks);
        host.memory.store_u64(at + 8, *lba);
    }
    let trim = Sqe { nsid: 1, cdw10: 1, cdw11: 4, ..Sqe::new(NvmOpcode::DatasetManagement.to_wire()) };
    let trim = crate::host::prp(trim, IOVA + DATA + 0x1000, 0);
    assert_eq!(host.execute(&mut queue, trim).status, Status::SUCCESS);
    let read = transfer(NvmOpcode::Read, 0, 8, IOVA + DATA + 0x2000, 0);
    assert_eq!(host.execute(&mut queue, read).status, Status::SUCCESS);
    let mut expected = pattern(3, 4096);
    for block in [0, 1, 2, 5] {
        expected[block * 512..(block + 1) * 512].fill(0);
    }
    assert!(bytes(&host, DATA + 0x2000, 4096) == expected);
    // Disconnect is a Fabrics command.
    let fabrics = Sqe { nsid: 8, flags: 0, ..Sqe::new(0x7f) };
    assert_eq!(host.execute(&mut queue, fabrics).status, Status::INVALID_OPCODE.do_not_retry());
}

#[test]
fn commands_are_not_fetched_while_the_completion_queue_is_full() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    // More commands than the completion queue holds.
    let mut queue = host.create_queue_pair(1, 8);
    let total = 100u16;
    let (mut sent, mut completed) = (0, Vec::new());
    while completed.len() < usize::from(total) {
        let before = queue.tail;
        while sent < total
            && (queue.tail + 1) % queue.entries != (u32::from(completed.len() as u16)) % queue.entries
        {
            let read = Sqe { cid: sent, ..transfer(NvmOpcode::Read, sent.into(), 1, IOVA + DATA, 0) };
            host.push_sqe(&mut queue, &read);
            sent += 1;
        }
        if queue.tail != before {
            host.ring_doorbell(&queue);
        }
        let cqe = host.wait(&mut queue);
        assert_eq!(cqe.status, Status::SUCCESS);
        completed.push(cqe.cid);
    }
    completed.sort_unstable();
    assert!(completed.into_iter().eq(0..total), "each command completes once");
}

#[test]
fn completions_signal_their_interrupt_vector() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let events: Vec<_> = (0..3).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
    let borrowed: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    host.client.set_interrupts(&borrowed).unwrap();
    let mut queue = host.create_queue_pair(2, 16);
    let signalled = |index: usize| {
        let mut polled = [PollFd::new(&events[index], PollFlags::IN)];
        let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&patience)).unwrap(), 1, "vector {index}");
        let mut count = [0; 8];
        rustix::io::read(&events[index], &mut count).unwrap();
        u64::from_ne_bytes(count)
    };
    // For the two commands that created the queue pair.
    assert!(signalled(0) >= 1);
    let read = Sqe { cid: 5, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    host.push_sqe(&mut queue, &read);
    host.ring_doorbell(&queue);
    assert_eq!(signalled(2), 1);
    // The completion was visible when the interrupt was signalled.
    assert_eq!(host.poll(&mut queue).map(|cqe| cqe.cid), Some(5));
    let mut nothing = [PollFd::new(&events[1], PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut nothing, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 0);
    // Without eventfds nothing is signalled.
    host.client.set_interrupts(&[]).unwrap();
    host.execute(&mut queue, read);
    let mut nothing = [PollFd::new(&events[2], PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut nothing, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap(), 0);
}

#[test]
fn queues_that_share_a_vector_signal_it_once_a_turn() {
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let events: Vec<_> = (0..2).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
    let borrowed: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    host.client.set_interrupts(&borrowed).unwrap();
    let mut queues = [1, 2].map(|qid| host.create_queue_pair_on(qid, 16, 1));
    let signalled = || {
        let mut count = [0; 8];
        rustix::io::read(&events[1], &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    let read = transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0);
    let mut counts = Vec::new();
    for round in 0..200 {
        for queue in &mut queues {
            host.push_sqe(queue, &Sqe { cid: round, ..read });
        }
        // The target sees both doorbells in one turn, but for the few times when it polls between the two
        // stores.
        queues.iter().for_each(|queue| host.ring_doorbell(queue));
        queues.iter_mut().for_each(|queue| assert_eq!(host.wait(queue).cid, round));
        // A register is read in a later turn than that of the completions, which ends with their interrupts.
        host.read(wire_nvme::registers::offset::CSTS);
        counts.push(signalled());
    }
    assert!(counts.iter().all(|count| matches!(count, 1 | 2)), "{counts:?}");
    assert!(counts.contains(&1), "every turn signalled once for each queue");
}

/// Shadow doorbell and EventIdx pages, as a host uses them.
struct HostShadowDoorbells {
    doorbells: u64,
    events: u64,
}

impl HostShadowDoorbells {
    const AT: HostShadowDoorbells =
        HostShadowDoorbells { doorbells: DATA + 0x20_0000, events: DATA + 0x20_1000 };

    fn config(&self) -> Sqe {
        DoorbellBuffer { shadow: IOVA + self.doorbells, events: IOVA + self.events }.to_sqe()
    }

    /// Writes a shadow doorbell. Returns whether the doorbell itself must be written (Base 2.0, annex B.5).
    fn write(&self, host: &VfioUserTestHost, index: u64, value: u32) -> bool {
        let old = host.memory.load_u32(self.doorbells + index * 4) as u16;
        host.memory.store_u32(self.doorbells + index * 4, value);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let event = host.memory.load_u32(self.events + index * 4) as u16;
        (value as u16).wrapping_sub(event).wrapping_sub(1) < (value as u16).wrapping_sub(old)
    }
}

#[test]
fn shadow_doorbells_are_supported_only_if_bar0_is_not_mappable() {
    for disable_mappable_bar0 in [false, true] {
        let rig =
            VfioUserTestTarget::with(nvmf::VfioUserConfig { disable_mappable_bar0, ..Default::default() });
        let mut host = VfioUserTestHost::connect(&rig.directory);
        let page = host.identify(1, 0);
        let offers = u16::from_le_bytes([page[256], page[257]]);
        assert_eq!(offers == wire_nvme::identify::oacs::DOORBELL_BUFFER, disable_mappable_bar0);
        let status = host.admin(HostShadowDoorbells::AT.config()).status;
        let expected =
            if disable_mappable_bar0 { Status::SUCCESS } else { Status::INVALID_OPCODE.do_not_retry() };
        assert_eq!(status, expected);
    }
}

fn trapped() -> VfioUserTestTarget {
    VfioUserTestTarget::with(nvmf::VfioUserConfig { disable_mappable_bar0: true, ..Default::default() })
}

#[test]
fn shadow_doorbells_replace_the_doorbells_of_io_queues() {
    let rig = trapped();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    // One queue that was used before, and one that is created afterwards.
    let mut before = host.create_queue_pair(1, 8);
    let read = |cid| Sqe { cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    assert_eq!(host.execute(&mut before, read(0)).status, Status::SUCCESS);
    assert_eq!(host.admin(HostShadowDoorbells::AT.config()).status, Status::SUCCESS);
    assert_eq!(
        host.memory.load_u32(HostShadowDoorbells::AT.doorbells + 8),
        1,
        "the current doorbell value is copied"
    );
    let mut after = host.create_queue_pair(2, 8);
    for queue in [&mut before, &mut after] {
        for round in 0..20 {
            host.push_sqe(queue, &read(round));
            if HostShadowDoorbells::AT.write(&host, u64::from(queue.qid) * 2, queue.tail) {
                // The value of the doorbell is ignored; the message only wakes the core.
                host.write(0x1000 + u32::from(queue.qid) * 8, 7);
            }
            assert_eq!(host.wait_without_doorbell(queue).cid, round);
            if HostShadowDoorbells::AT.write(&host, u64::from(queue.qid) * 2 + 1, queue.head) {
                host.write(0x1000 + u32::from(queue.qid) * 8 + 4, 7);
            }
        }
    }
    // The admin queue's doorbells stay in BAR0, and a controller reset ends the use of shadow doorbells.
    host.identify(1, 0);
    host.write(wire_nvme::registers::offset::CC, 0);
    host.wait_status(1, 0);
    host.enable();
    let mut queue = host.create_queue_pair(1, 8);
    assert_eq!(host.execute(&mut queue, read(0)).status, Status::SUCCESS);
}

#[test]
fn shadow_doorbells_save_messages_and_lose_no_command() {
    let rig = trapped();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    assert_eq!(host.admin(HostShadowDoorbells::AT.config()).status, Status::SUCCESS);
    let mut queue = host.create_queue_pair(1, 8);
    let (mut doorbell_writes, total) = (0u32, 2000u16);
    for cid in 0..total {
        let read = Sqe { cid, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
        host.push_sqe(&mut queue, &read);
        if HostShadowDoorbells::AT.write(&host, 2, queue.tail) {
            doorbell_writes += 1;
            host.ring_doorbell(&queue);
        }
        // The core may have been about to sleep when the doorbell was written.
        assert_eq!(host.wait_without_doorbell(&mut queue).cid, cid);
        if HostShadowDoorbells::AT.write(&host, 3, queue.head) {
            host.write(0x1000 + 12, queue.head);
        }
    }
    println!("{doorbell_writes} of {total} doorbell writes were sent as messages");
}

#[test]
fn invalid_shadow_doorbell_pages_fail_and_pages_may_be_unmapped() {
    let rig = trapped();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let odd = DoorbellBuffer { shadow: IOVA + DATA + 8, events: IOVA + DATA };
    assert_eq!(host.admin(odd.to_sqe()).status, Status::INVALID_FIELD.do_not_retry());
    let unmapped = DoorbellBuffer { shadow: 0, events: IOVA + DATA };
    assert_eq!(host.admin(unmapped.to_sqe()).status, Status::DATA_TRANSFER_ERROR);
    // Pages in a separate DMA range that is unmapped and mapped again.
    let address = IOVA + 2 * crate::host::MEMORY;
    let file = crate::host::memory_file(8192);
    let pages = dma::SharedRegion::map(file.as_fd(), 0, 8192, true).unwrap();
    host.client.dma_map_file(address, file.as_fd(), 0, 8192, true).unwrap();
    let config = DoorbellBuffer { shadow: address, events: address + 4096 };
    assert_eq!(host.admin(config.to_sqe()).status, Status::SUCCESS);
    let mut queue = host.create_queue_pair(1, 8);
    host.client.dma_unmap(address, 8192).unwrap();
    let read = Sqe { cid: 3, ..transfer(NvmOpcode::Read, 0, 8, IOVA + DATA, 0) };
    host.push_sqe(&mut queue, &read);
    pages.store_u32(8, queue.tail);
    host.ring_doorbell(&queue);
    host.identify(1, 0);
    assert!(host.poll(&mut queue).is_none(), "the shadow page is not mapped");
    host.client.dma_map_file(address, file.as_fd(), 0, 8192, true).unwrap();
    assert_eq!(host.wait(&mut queue).cid, 3);
}

#[test]
fn doorbells_can_be_written_by_message() {
    let rig =
        VfioUserTestTarget::with(nvmf::VfioUserConfig { disable_mappable_bar0: true, ..Default::default() });
    let client = vfio_user::VfioUserClient::connect(&rig.directory, &Default::default()).unwrap();
    assert!(client.regions()[0].areas.is_empty());
    assert!(client.map_region(vfio_user::BAR0, 0x1000, 0x1000).is_err());
    let file = crate::host::memory_file(1 << 20);
    let memory = dma::SharedRegion::map(file.as_fd(), 0, 1 << 20, true).unwrap();
    client.dma_map_file(IOVA, file.as_fd(), 0, 1 << 20, true).unwrap();
    client.write_u32(0, 0x24, 0x001f_001f).unwrap();
    client.write_u64(0, 0x28, IOVA).unwrap();
    client.write_u64(0, 0x30, IOVA + 0x1000).unwrap();
    client.write_u32(0, 0x14, 0x0046_0001).unwrap();
    let identify = wire_nvme::admin::Identify { cns: 1, ..Default::default() };
    let sqe = Sqe { cid: 9, ..crate::host::prp(identify.to_sqe(0), IOVA + 0x2000, 0) };
    memory.write(0, &sqe.to_bytes());
    client.write_u32(0, 0x1000, 1).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while memory.load_u64(0x1008) >> 48 & 1 == 0 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert_eq!(memory.load_u64(0x1008) >> 32 & 0xffff, 9);
}
