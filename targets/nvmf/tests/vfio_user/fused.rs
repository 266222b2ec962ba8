//! Fused Compare and Write: entries next to each other in a queue, and some that are not.

use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};

use crate::host::{DATA, Host, IOVA, Queue, transfer};
use crate::rig::Rig;

const EXPECTED: u64 = DATA;
const NEW: u64 = DATA + 0x1_0000;
const READ: u64 = DATA + 0x2_0000;

fn first(lba: u64, cid: u16) -> Sqe {
    let sqe = transfer(NvmOpcode::Compare, lba, 8, IOVA + EXPECTED, 0);
    Sqe { flags: 1, cid, ..sqe }
}

fn second(lba: u64, cid: u16) -> Sqe {
    let sqe = transfer(NvmOpcode::Write, lba, 8, IOVA + NEW, 0);
    Sqe { flags: 2, cid, ..sqe }
}

fn answers(host: &Host, queue: &mut Queue, count: usize) -> Vec<(u16, Status)> {
    let mut answers: Vec<_> = (0..count).map(|_| host.wait(queue)).map(|cqe| (cqe.cid, cqe.status)).collect();
    answers.sort_by_key(|(cid, _)| *cid);
    answers
}

fn swap(host: &Host, queue: &mut Queue, expected: u8, new: u8) -> Vec<Status> {
    host.memory.write(EXPECTED, &[expected; 4096]);
    host.memory.write(NEW, &[new; 4096]);
    host.put(queue, &first(8, 1));
    host.put(queue, &second(8, 2));
    host.ring(queue);
    answers(host, queue, 2).into_iter().map(|(_, status)| status).collect()
}

fn medium(host: &mut Host, queue: &mut Queue) -> u8 {
    let read = transfer(NvmOpcode::Read, 8, 8, IOVA + READ, 0);
    assert_eq!(host.run(queue, read).status, Status::SUCCESS);
    let mut bytes = [0; 4096];
    host.memory.read(READ, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "what is written is written as a whole");
    bytes[0]
}

#[test]
fn entries_next_to_each_other_are_one_operation() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let rig = Rig::new();
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 64);
    let failed = vec![Status::COMPARE_FAILURE.do_not_retry(), Status::FUSED_FAILED];
    assert_eq!(swap(&host, &mut queue, 1, 5), failed);
    assert_eq!(medium(&mut host, &mut queue), 0);
    assert_eq!(swap(&host, &mut queue, 0, 5), [Status::SUCCESS; 2]);
    assert_eq!(medium(&mut host, &mut queue), 5);
    // What the host compares with is left as it was.
    let mut expected = [9; 4096];
    host.memory.read(EXPECTED, &mut expected);
    assert_eq!(expected, [0; 4096]);
    // Seen one after the other, with another queue's command in between.
    let mut other = host.queue(2, 64);
    host.memory.write(EXPECTED, &[5; 4096]);
    host.memory.write(NEW, &[6; 4096]);
    host.put(&mut queue, &first(8, 1));
    host.ring(&queue);
    assert_eq!(medium(&mut host, &mut other), 5);
    host.put(&mut queue, &second(8, 2));
    host.ring(&queue);
    assert_eq!(answers(&host, &mut queue, 2), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert_eq!(medium(&mut host, &mut other), 6);
}

/// What waited for a buffer came before the first of the two, and is not its follower when it gets one.
#[test]
fn what_had_no_buffer_does_not_come_between() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let rig = Rig::starved();
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 64);
    host.memory.write(EXPECTED, &[0; 4096]);
    host.memory.write(NEW, &[5; 4096]);
    // 5 MiB, and there are 2 MiB of buffers.
    const VERIFIES: u16 = 40;
    let verify = Sqe { flags: 0, ..transfer(NvmOpcode::Verify, 0, 256, 0, 0) };
    for cid in 0..VERIFIES {
        host.put(&mut queue, &Sqe { cid: 10 + cid, ..verify });
    }
    host.put(&mut queue, &first(8, 1));
    host.ring(&queue);
    let verified = answers(&host, &mut queue, usize::from(VERIFIES));
    assert!(verified.iter().all(|(cid, status)| *cid >= 10 && *status == Status::SUCCESS), "{verified:?}");
    host.put(&mut queue, &second(8, 2));
    host.ring(&queue);
    assert_eq!(answers(&host, &mut queue, 2), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert_eq!(medium(&mut host, &mut queue), 5);
}

#[test]
fn half_a_fused_operation_is_aborted() {
    if !bdev::can_fuse() {
        return println!("SKIPPED: membarrier is not there");
    }
    let rig = Rig::new();
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 64);
    let (missing, failed) = (Status::FUSED_MISSING, Status::FUSED_FAILED);
    let wrong = Status::INVALID_FIELD.do_not_retry();
    let outside = Status::LBA_OUT_OF_RANGE.do_not_retry();
    let flush = Sqe { nsid: 1, cid: 2, flags: 0, ..Sqe::new(NvmOpcode::Flush.to_wire()) };
    let rows: [(&str, Vec<Sqe>, Vec<Status>); 6] = [
        ("a second alone", vec![second(8, 1)], vec![missing]),
        ("a first and a flush", vec![first(8, 1), flush], vec![missing, Status::SUCCESS]),
        ("another range", vec![first(8, 1), second(9, 2)], vec![wrong, wrong]),
        ("a first outside", vec![first(1 << 40, 1), second(8, 2)], vec![outside, failed]),
        ("a second outside", vec![first(8, 1), second(1 << 40, 2)], vec![failed, outside]),
        (
            "two firsts",
            vec![first(8, 1), first(8, 2), second(8, 3)],
            vec![missing, Status::SUCCESS, Status::SUCCESS],
        ),
    ];
    host.memory.write(EXPECTED, &[0; 4096]);
    host.memory.write(NEW, &[7; 4096]);
    for (what, entries, expected) in rows {
        assert_eq!(medium(&mut host, &mut queue), 0, "before {what}");
        for sqe in &entries {
            host.put(&mut queue, sqe);
        }
        host.ring(&queue);
        let heard = answers(&host, &mut queue, expected.len());
        assert_eq!(heard.into_iter().map(|(_, status)| status).collect::<Vec<_>>(), expected, "{what}");
    }
    assert_eq!(medium(&mut host, &mut queue), 7);
    // A queue that is deleted while the first waits, and a controller that is reset.
    host.put(&mut queue, &first(8, 1));
    host.ring(&queue);
    let mut other = host.queue(2, 64);
    assert_eq!(medium(&mut host, &mut other), 7);
    assert_eq!(host.delete(AdminOpcode::DeleteIoSq, 1), Status::SUCCESS);
    assert_eq!(answers(&host, &mut queue, 1), [(1, Status::ABORTED_SQ_DELETION)]);
    host.put(&mut other, &first(8, 1));
    host.ring(&other);
    drop(host);
    let mut host = Host::connect(&rig.directory);
    let mut queue = host.queue(1, 64);
    assert_eq!(medium(&mut host, &mut queue), 7);
}
