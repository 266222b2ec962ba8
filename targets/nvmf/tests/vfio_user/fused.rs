//! Fused Compare and Write: adjacent submission queue entries, and sequences that must be aborted.

use block_io::Status;
use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};

use crate::host::{DATA, HostQueuePair, IOVA, VfioUserTestHost, transfer};
use crate::test_target::VfioUserTestTarget;

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

fn completions(host: &VfioUserTestHost, queue: &mut HostQueuePair, count: usize) -> Vec<(u16, Status)> {
    let mut completions: Vec<_> =
        (0..count).map(|_| host.wait(queue)).map(|cqe| (cqe.cid, cqe.status)).collect();
    completions.sort_by_key(|(cid, _)| *cid);
    completions
}

fn compare_and_write(
    host: &VfioUserTestHost,
    queue: &mut HostQueuePair,
    expected: u8,
    new: u8,
) -> Vec<Status> {
    host.memory.write(EXPECTED, &[expected; 4096]);
    host.memory.write(NEW, &[new; 4096]);
    host.push_sqe(queue, &first(8, 1));
    host.push_sqe(queue, &second(8, 2));
    host.ring_doorbell(queue);
    completions(host, queue, 2).into_iter().map(|(_, status)| status).collect()
}

fn medium(host: &mut VfioUserTestHost, queue: &mut HostQueuePair) -> u8 {
    let read = transfer(NvmOpcode::Read, 8, 8, IOVA + READ, 0);
    assert_eq!(host.execute(queue, read).status, Status::SUCCESS);
    let mut bytes = [0; 4096];
    host.memory.read(READ, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a write is atomic");
    bytes[0]
}

#[test]
fn adjacent_fused_entries_are_one_operation() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    let failed = vec![Status::COMPARE_FAILURE.do_not_retry(), Status::FUSED_FAILED];
    assert_eq!(compare_and_write(&host, &mut queue, 1, 5), failed);
    assert_eq!(medium(&mut host, &mut queue), 0);
    assert_eq!(compare_and_write(&host, &mut queue, 0, 5), [Status::SUCCESS; 2]);
    assert_eq!(medium(&mut host, &mut queue), 5);
    // The compare buffer is not modified.
    let mut expected = [9; 4096];
    host.memory.read(EXPECTED, &mut expected);
    assert_eq!(expected, [0; 4096]);
    // Fetched separately, with another queue's command in between.
    let mut other = host.create_queue_pair(2, 64);
    host.memory.write(EXPECTED, &[5; 4096]);
    host.memory.write(NEW, &[6; 4096]);
    host.push_sqe(&mut queue, &first(8, 1));
    host.ring_doorbell(&queue);
    assert_eq!(medium(&mut host, &mut other), 5);
    host.push_sqe(&mut queue, &second(8, 2));
    host.ring_doorbell(&queue);
    assert_eq!(completions(&host, &mut queue, 2), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert_eq!(medium(&mut host, &mut other), 6);
}

/// Deferred commands were fetched before the first fused command, so they are not matched as its second when they
/// are retried.
#[test]
fn deferred_commands_do_not_separate_a_fused_pair() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    let rig = VfioUserTestTarget::with_few_buffers();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    host.memory.write(EXPECTED, &[0; 4096]);
    host.memory.write(NEW, &[5; 4096]);
    // 5 MiB, with 2 MiB of buffers.
    const VERIFIES: u16 = 40;
    let verify = Sqe { flags: 0, ..transfer(NvmOpcode::Verify, 0, 256, 0, 0) };
    for cid in 0..VERIFIES {
        host.push_sqe(&mut queue, &Sqe { cid: 10 + cid, ..verify });
    }
    host.push_sqe(&mut queue, &first(8, 1));
    host.ring_doorbell(&queue);
    let verified = completions(&host, &mut queue, usize::from(VERIFIES));
    assert!(verified.iter().all(|(cid, status)| *cid >= 10 && *status == Status::SUCCESS), "{verified:?}");
    host.push_sqe(&mut queue, &second(8, 2));
    host.ring_doorbell(&queue);
    assert_eq!(completions(&host, &mut queue, 2), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert_eq!(medium(&mut host, &mut queue), 5);
    let stats = rig.target.stats().unwrap();
    let waits: u64 = stats.totals.iter().map(|totals| totals.buffer_waits).sum();
    let [polls] = &stats.vfio_user_polls[..] else { panic!("one reactor: {stats:?}") };
    assert!(polls.busy > 0 && polls.polls >= polls.busy, "{polls:?}");
    assert!(waits > 0, "what waited for a buffer is counted");
}

#[test]
fn unpaired_and_invalid_fused_commands_are_aborted() {
    if !bdev::supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    let rig = VfioUserTestTarget::new();
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
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
            host.push_sqe(&mut queue, sqe);
        }
        host.ring_doorbell(&queue);
        let completed = completions(&host, &mut queue, expected.len());
        assert_eq!(completed.into_iter().map(|(_, status)| status).collect::<Vec<_>>(), expected, "{what}");
    }
    assert_eq!(medium(&mut host, &mut queue), 7);
    // A queue deletion and a controller reset while a first command is pending.
    host.push_sqe(&mut queue, &first(8, 1));
    host.ring_doorbell(&queue);
    let mut other = host.create_queue_pair(2, 64);
    assert_eq!(medium(&mut host, &mut other), 7);
    assert_eq!(host.delete(AdminOpcode::DeleteIoSq, 1), Status::SUCCESS);
    assert_eq!(completions(&host, &mut queue, 1), [(1, Status::ABORTED_SQ_DELETION)]);
    host.push_sqe(&mut other, &first(8, 1));
    host.ring_doorbell(&other);
    drop(host);
    let mut host = VfioUserTestHost::connect(&rig.directory);
    let mut queue = host.create_queue_pair(1, 64);
    assert_eq!(medium(&mut host, &mut queue), 7);
}
