//! Tests.

use std::rc::Rc;

use block_io::{Op, RequestFlags};
use proptest::prelude::*;
use target_shell::{CoreMemory, MemoryOwner, MemoryShare};
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::{DataPointer, Sqe};

use super::harness::{QueueHarness, namespaces, window};
use super::*;

pub(super) fn io(opcode: NvmOpcode, nsid: u32, lba: u64, blocks: u32) -> Sqe {
    let sqe = ReadWrite { lba, blocks, ..ReadWrite::default() }.to_sqe(opcode);
    Sqe { nsid, flags: Sqe::FLAGS_SGL, data: DataPointer::transport(blocks * 512), ..sqe }
}

fn fused(second: bool, lba: u64) -> Sqe {
    let sqe = io(if second { NvmOpcode::Write } else { NvmOpcode::Compare }, 1, lba, 1);
    Sqe { flags: sqe.flags | if second { 2 } else { 1 }, ..sqe }
}

fn status(harness: &QueueHarness, cid: u16) -> Option<Status> {
    harness.answer(cid).map(|answer| answer.status)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn every_command_is_answered_once(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        QueueHarness::run(&bytes);
    }
}

/// The second command has its data when the namespace gets another device; the data of the first arrives
/// afterwards.
#[test]
fn a_change_of_namespaces_ends_both_commands_of_a_fused_pair() {
    let mut harness = QueueHarness::new(MemoryShare::unlimited());
    harness.transport.later = true;
    let first = harness.command(fused(false, 5));
    harness.transport.later = false;
    let second = harness.command(fused(true, 5));
    harness.queue.set_namespaces(namespaces(0xff, 1));
    harness.receive(0, Ok(0));
    let status = |cid| harness.answer(cid).expect("it is answered").status;
    assert_eq!(status(first), Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
    assert_eq!(status(second), Status::FUSED_FAILED);
    assert!(!harness.queue.has_pending(|_| false));
}

#[test]
fn a_second_fused_command_after_a_first_that_a_change_of_namespaces_ended_is_answered() {
    QueueHarness::run(&[
        172, 172, 132, 0, 0, 0, 0, 106, 199, 63, 173, 6, 172, 2, 0, 0, 211, 128, 0, 0, 107, 4, 223, 223, 159,
        96, 44, 223, 0, 223, 0, 168,
    ]);
}

/// A device completes the write of a fused pair before its compare; other requests follow.
#[test]
fn requests_follow_a_fused_pair_whose_write_completes_first() {
    QueueHarness::run(&[
        172, 172, 0, 0, 0, 0, 0, 106, 199, 63, 172, 106, 172, 0, 0, 0, 0, 0, 107, 4, 223, 223, 223, 223, 223,
        223, 223, 223, 223, 223, 223, 223, 0, 44, 96, 0, 168,
    ]);
}

#[test]
fn reads_send_the_devices_data_and_writes_submit_the_hosts() {
    for (later, immediate) in [(false, false), (true, false), (true, true)] {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        (harness.transport.later, harness.transport.immediate) = (later, immediate);
        harness.transport.host_byte = 7;
        let write = harness.command(io(NvmOpcode::Write, 1, 3, 2));
        if later {
            assert!(harness.transport.requests.is_empty(), "the data has not arrived");
            harness.receive(0, Ok(0));
        }
        let request = &harness.transport.requests[0];
        assert_eq!((request.op, request.lba, request.blocks), (Op::Write, 3, 2));
        let data = request.data().unwrap().single().unwrap();
        assert_eq!(data.as_slice(), [7; 1024]);
        harness.complete(0, Status::SUCCESS);
        assert_eq!(status(&harness, write), Some(Status::SUCCESS));

        let read = harness.command(io(NvmOpcode::Read, 2, 9, 1));
        let request = &mut harness.transport.requests[0];
        request.data_mut().unwrap().single_mut().unwrap().as_mut_slice().fill(5);
        harness.complete(0, Status::SUCCESS);
        assert_eq!(harness.answer(read).unwrap().data, [5; 512]);
        assert_eq!(
            harness.queue.free_slots(),
            if later { 15 } else { 16 },
            "the data stays until it is sent"
        );
        harness.settle();
        assert_eq!(harness.queue.free_slots(), 16);
    }
}

/// The pool has no buffer as large as the command: its data lies in several.
#[test]
fn a_command_whose_data_lies_in_several_slices_transfers_all_of_it() {
    for (later, immediate, lends) in
        [(false, false, false), (true, false, false), (true, true, false), (false, false, true)]
    {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        (harness.transport.later, harness.transport.immediate) = (later, immediate);
        (harness.transport.slice_bytes_max, harness.transport.lends) = (1536, lends);
        harness.transport.host_byte = 7;
        harness.command(io(NvmOpcode::Write, 1, 3, 8));
        if later {
            harness.receive(0, Ok(0));
        }
        let data = harness.transport.requests[0].data().unwrap();
        let lengths: Vec<usize> = data.slices().iter().map(dma::Buffer::len).collect();
        assert_eq!(lengths, [1536, 1536, 1024]);
        assert!(lends || data.parts(0, 4096).flatten().all(|byte| *byte == 7));
        harness.complete(0, Status::SUCCESS);

        let read = harness.command(io(NvmOpcode::Read, 2, 9, 8));
        let expected: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
        harness.transport.requests[0].data_mut().unwrap().copy_from(0, &expected);
        harness.complete(0, Status::SUCCESS);
        assert_eq!(harness.answer(read).unwrap().data, if lends { &[][..] } else { &expected });
        harness.settle();
        assert_eq!(harness.queue.free_slots(), 16);
    }
}

/// Data in a capsule may begin anywhere in it.
#[test]
fn data_that_begins_inside_of_a_capsule_is_kept_whole() {
    for slice_bytes_max in [usize::MAX, 512] {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        (harness.transport.later, harness.transport.immediate) = (true, true);
        (harness.transport.slice_bytes_max, harness.transport.room_before) = (slice_bytes_max, 700);
        harness.command(io(NvmOpcode::Write, 1, 3, 2));
        let slot = harness.transport.receiving[0];
        let memory = harness.queue.data_mut(slot).unwrap();
        assert_eq!(memory.len(), 700 + 1024);
        let mut at = 0;
        for part in memory.parts_mut(0, 1724) {
            for byte in part {
                *byte = (at % 251) as u8;
                at += 1;
            }
        }
        harness.receive(0, Ok(700));
        let data = harness.transport.requests[0].data().unwrap();
        assert_eq!(data.len(), 1024);
        let expected = (700..1724).map(|at| (at % 251) as u8);
        assert!(data.parts(0, 1024).flatten().copied().eq(expected));
        harness.settle();
    }
}

#[test]
fn lent_memory_needs_no_slot() {
    let mut harness = QueueHarness::new(window(0, 0));
    (harness.transport.lends, harness.transport.starved) = (true, true);
    let read = harness.command(io(NvmOpcode::Read, 1, 0, 8));
    assert_eq!((harness.queue.free_slots(), harness.queue.device_requests()), (16, 1));
    harness.complete(0, Status::UNRECOVERED_READ_ERROR);
    assert_eq!(status(&harness, read), Some(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(harness.queue.device_requests(), 0);
}

#[test]
fn commands_wait_for_buffers_in_their_order() {
    let mut harness = QueueHarness::new(window(8192, 8192));
    let first = harness.command(io(NvmOpcode::Read, 1, 0, 16));
    let large = harness.command(io(NvmOpcode::Read, 1, 0, 16));
    // It would fit beside neither, and must not overtake the large one later.
    let small = harness.command(io(NvmOpcode::Write, 1, 0, 1));
    assert_eq!(harness.transport.requests.len(), 1);
    assert!(harness.queue.is_waiting());
    harness.complete(0, Status::SUCCESS);
    harness.queue.retry(&mut harness.transport);
    let [request] = &harness.transport.requests[..] else { panic!("one command fits at a time") };
    assert_eq!((request.op, request.blocks), (Op::Read, 16));
    harness.settle();
    for cid in [first, large, small] {
        assert_eq!(status(&harness, cid), Some(Status::SUCCESS));
    }
}

#[test]
fn a_fused_pair_is_submitted_when_both_have_their_data() {
    for order in [[0, 0], [1, 0]] {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        harness.transport.later = true;
        let first = harness.command(fused(false, 5));
        let second = harness.command(fused(true, 5));
        harness.receive(order[0], Ok(0));
        assert!(harness.transport.requests.is_empty());
        harness.receive(order[1], Ok(0));
        let flags: Vec<_> =
            harness.transport.requests.iter().map(|request| (request.op, request.flags)).collect();
        assert_eq!(flags, [(Op::Compare, RequestFlags::FUSED), (Op::Write, RequestFlags::NONE)]);
        harness.settle();
        assert_eq!([first, second].map(|cid| status(&harness, cid)), [Some(Status::SUCCESS); 2]);
    }
}

/// Base 2.0, section 6.1: the commands of a pair are adjacent in their queue.
#[test]
fn a_read_after_the_first_of_a_fused_pair_ends_it() {
    let mut harness = QueueHarness::new(MemoryShare::unlimited());
    let first = harness.command(fused(false, 5));
    let read = harness.command(io(NvmOpcode::Read, 1, 5, 1));
    assert_eq!(status(&harness, first), Some(Status::FUSED_MISSING));
    let second = harness.command(fused(true, 5));
    assert_eq!(status(&harness, second), Some(Status::FUSED_MISSING));
    harness.settle();
    assert_eq!(status(&harness, read), Some(Status::SUCCESS));
}

#[test]
fn one_failed_half_aborts_the_other() {
    let error = Status::TRANSIENT_TRANSPORT_ERROR;
    // The failed one, and the statuses of both.
    for (failed, expected) in [(0, [error, Status::FUSED_FAILED]), (1, [Status::FUSED_FAILED, error])] {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        harness.transport.later = true;
        let pair = [harness.command(fused(false, 5)), harness.command(fused(true, 5))];
        harness.receive(failed, Err(error));
        harness.settle();
        assert_eq!(pair.map(|cid| status(&harness, cid).unwrap()), expected);
    }
    // The first fails before the second arrives, or is followed by an ordinary command or another range.
    let mut harness = QueueHarness::new(MemoryShare::unlimited());
    harness.transport.later = true;
    let first = harness.command(fused(false, 5));
    harness.receive(0, Err(error));
    let second = harness.command(fused(true, 5));
    assert_eq!([first, second].map(|cid| status(&harness, cid).unwrap()), [error, Status::FUSED_FAILED]);
    harness.transport.later = false;
    let first = harness.command(fused(false, 5));
    let read = harness.command(io(NvmOpcode::Read, 1, 0, 1));
    harness.settle();
    assert_eq!(
        [first, read].map(|cid| status(&harness, cid).unwrap()),
        [Status::FUSED_MISSING, Status::SUCCESS]
    );
    let pair = [harness.command(fused(false, 5)), harness.command(fused(true, 6))];
    let invalid = Status::INVALID_FIELD.do_not_retry();
    assert_eq!(pair.map(|cid| status(&harness, cid).unwrap()), [invalid; 2]);
}

#[test]
fn commands_of_a_removed_or_replaced_namespace_are_rejected_before_submission() {
    for table in [namespaces(0, 0), namespaces(0xff, 1)] {
        let mut harness = QueueHarness::new(MemoryShare::unlimited());
        (harness.transport.later, harness.transport.starved) = (true, true);
        let deferred = harness.command(io(NvmOpcode::Read, 1, 0, 1));
        harness.transport.immediate = true;
        let receiving = harness.command(io(NvmOpcode::Write, 1, 0, 1));
        harness.queue.set_namespaces(table);
        harness.settle();
        let rejected = Some(Status::INVALID_NAMESPACE_OR_FORMAT.do_not_retry());
        assert_eq!([deferred, receiving].map(|cid| status(&harness, cid)), [rejected; 2]);
    }
}

#[test]
fn the_queues_of_a_host_share_what_it_may_hold() {
    let account = |bytes| {
        let owner = MemoryOwner::Name(b"host"[..].into());
        Rc::new(CoreMemory::default()).strict_peer(owner, bytes)
    };
    let host = account(3 * 4096);
    let [mut one, mut other] =
        [(); 2].map(|()| QueueHarness::new(MemoryShare::new(host.clone(), usize::MAX)));
    let reads = [(); 2].map(|()| one.command(io(NvmOpcode::Read, 1, 0, 8)));
    other.command(io(NvmOpcode::Read, 1, 0, 8));
    assert_eq!(host.held(), 3 * 4096);
    let late = other.command(io(NvmOpcode::Read, 1, 0, 8));
    assert!(other.queue.is_waiting() && !one.queue.is_waiting(), "the host holds all that it may");
    other.queue.retry(&mut other.transport);
    assert!(other.queue.is_waiting());

    one.complete(0, Status::SUCCESS);
    assert_eq!(status(&one, reads[0]), Some(Status::SUCCESS));
    other.queue.retry(&mut other.transport);
    assert!(!other.queue.is_waiting() && status(&other, late).is_none(), "the read is at the device");
    assert_eq!(host.held(), 3 * 4096);
    // A queue that ends gives back what it holds.
    drop((one, other));
    assert_eq!(host.held(), 0);

    // One command fits, however large.
    let small = account(1);
    let mut harness = QueueHarness::new(MemoryShare::new(small.clone(), usize::MAX));
    harness.command(io(NvmOpcode::Read, 1, 0, 8));
    assert_eq!((small.held(), harness.queue.is_waiting()), (4096, false));
}

#[test]
fn an_aborted_queue_answers_what_is_not_at_a_device() {
    let aborted = Status::ABORTED_SQ_DELETION;
    let mut harness = QueueHarness::new(window(4096, 4096));
    let at_device = harness.command(io(NvmOpcode::Read, 1, 0, 8));
    let deferred = harness.command(io(NvmOpcode::Read, 1, 0, 8));
    let half = harness.command(fused(false, 5));
    harness.queue.abort_pending(aborted, &mut harness.transport);
    assert_eq!(
        [at_device, deferred, half].map(|cid| status(&harness, cid)),
        [None, Some(aborted), Some(aborted)]
    );
    harness.complete(0, Status::SUCCESS);
    assert_eq!(status(&harness, at_device), Some(Status::SUCCESS));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "command 0x7 was not answered")]
fn a_token_must_be_answered() {
    drop(CommandToken::new(7));
}

#[test]
fn the_window_grows_while_commands_are_finished_and_only_then() {
    let mut harness = QueueHarness::new(window(1024, 4096));
    harness.transport.later = true;
    let receiving = |harness: &QueueHarness| harness.transport.receiving.len();
    for _ in 0..8 {
        harness.command(io(NvmOpcode::Write, 1, 0, 1));
    }
    assert_eq!(receiving(&harness), 2, "1024 bytes");
    for _ in 0..100 {
        harness.queue.retry(&mut harness.transport);
    }
    assert_eq!(receiving(&harness), 2, "the host has sent nothing");
    // The third command found the window full: once it is finished, the window doubles, and once more.
    let mut widest = 0;
    for n in 0..24 {
        harness.receive(0, Ok(0));
        harness.complete(0, Status::SUCCESS);
        harness.queue.retry(&mut harness.transport);
        if n < 16 {
            harness.command(io(NvmOpcode::Write, 1, 0, 1));
        }
        widest = widest.max(receiving(&harness));
    }
    assert_eq!(widest, 8, "4096 bytes");
    harness.settle();
    assert_eq!(harness.queue.free_slots(), 16);
}
