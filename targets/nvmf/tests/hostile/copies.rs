//! Copy, Write Uncorrectable and fused Compare and Write, valid and invalid.

use bdev::supports_fused;
use block_io::Status;
use wire_nvme::io::{COPY_RANGE_SIZE, CopyCommand, CopyRange, WriteUncorrectable};
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::peer::{RawTcpHost, capsule, pattern, read, write, write_in_capsule};
use crate::test_target::{TcpTestTarget, TestTargetConfig};

/// The first or second command of a fused operation.
fn fused(sqe: Sqe, bits: u8, cid: u16) -> Sqe {
    let opcode = if bits == 1 { NvmOpcode::Compare } else { NvmOpcode::Write };
    Sqe { opcode: opcode.to_wire(), flags: sqe.flags | bits, cid, ..sqe }
}

/// Executes a fused Compare and Write with in-capsule data and returns both statuses.
fn compare_and_write(peer: &mut RawTcpHost, lba: u64, expected: &[u8], new: &[u8]) -> [Status; 2] {
    peer.capsule(fused(write_in_capsule(1, lba, expected.len()), 1, 1), expected);
    peer.capsule(fused(write_in_capsule(1, lba, new.len()), 2, 2), new);
    let answers = [peer.expect_response(), peer.expect_response()];
    assert_eq!(answers.map(|answer| answer.cid), [1, 2], "the first command completes first");
    answers.map(|answer| answer.status)
}

fn copy(peer: &mut RawTcpHost, to: u64, ranges: &[(u64, u32)]) -> Cqe {
    let mut data = vec![0; ranges.len() * COPY_RANGE_SIZE];
    for (&(lba, blocks), into) in ranges.iter().zip(data.as_chunks_mut().0) {
        CopyRange { lba, blocks, ..CopyRange::default() }.encode(into);
    }
    let view = CopyCommand { lba: to, ranges: ranges.len() as u16, ..CopyCommand::default() };
    let data_pointer = DataPointer::capsule(0, data.len() as u32);
    peer.command(Sqe { nsid: 1, cid: 3, data: data_pointer, ..view.to_sqe() }, &data)
}

fn uncorrectable(peer: &mut RawTcpHost, lba: u64, blocks: u32) -> Status {
    let sqe = WriteUncorrectable { lba, blocks }.to_sqe();
    peer.command(Sqe { nsid: 1, cid: 4, ..sqe }, &[]).status
}

const FAILED: [Status; 2] = [Status::COMPARE_FAILURE.do_not_retry(), Status::FUSED_FAILED];
const BOTH: [Status; 2] = [Status::SUCCESS; 2];

#[test]
fn copy_writes_the_source_ranges_in_order() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    for lba in [0, 8, 16, 4000] {
        assert_eq!(peer.write(1, lba, &pattern(4096, lba as u8)), Status::SUCCESS);
    }
    let answer = copy(&mut peer, 100, &[(4000, 8), (3, 2), (16, 8)]);
    assert_eq!((answer.status, answer.result), (Status::SUCCESS, 0));
    assert_eq!(peer.read_back(1, 100, 4096).unwrap(), pattern(4096, 4000_u64 as u8));
    assert_eq!(peer.read_back(1, 108, 1024).unwrap(), pattern(4096, 0)[3 * 512..5 * 512]);
    assert_eq!(peer.read_back(1, 110, 4096).unwrap(), pattern(4096, 16));
    // More than the maximum transfer size.
    assert_eq!(copy(&mut peer, 8192, &[(0, 8000)]).status, Status::SUCCESS);
    assert_eq!(peer.read_back(1, 8192 + 4000, 4096).unwrap(), pattern(4096, 4000_u64 as u8));
    // The result is the range that cannot be read; the ranges before it are copied.
    assert_eq!(uncorrectable(&mut peer, 9, 1), Status::SUCCESS);
    let answer = copy(&mut peer, 200, &[(16, 8), (8, 8), (0, 8)]);
    assert!(answer.status.same_code(Status::UNRECOVERED_READ_ERROR), "{answer:?}");
    assert_eq!(answer.result as u32, 1);
    assert_eq!(peer.read_back(1, 200, 4096).unwrap(), pattern(4096, 16));
    for (to, ranges, expected) in [
        (0, &[(4, 8)][..], Status::INVALID_FIELD),
        (0, &[(16383, 2)], Status::LBA_OUT_OF_RANGE),
        (16383, &[(0, 1), (1, 1)], Status::LBA_OUT_OF_RANGE),
        (16384, &[(0, 1)], Status::LBA_OUT_OF_RANGE),
        (0, &[(1000, 32769)], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
    ] {
        let answer = copy(&mut peer, to, ranges);
        assert!(answer.status.same_code(expected), "{to} {ranges:?}: {answer:?}");
    }
}

#[test]
fn uncorrectable_blocks_fail_reads_until_they_are_written() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    assert_eq!(peer.write(1, 0, &pattern(4096, 1)), Status::SUCCESS);
    assert_eq!(uncorrectable(&mut peer, 3, 2), Status::SUCCESS);
    let bad = Status::UNRECOVERED_READ_ERROR;
    assert_eq!(peer.read_back(1, 0, 4096), Err(bad));
    let compare = Sqe { opcode: NvmOpcode::Compare.to_wire(), ..write_in_capsule(1, 0, 4096) };
    assert_eq!(peer.command(compare, &pattern(4096, 1)).status, bad);
    let verify = Sqe { opcode: NvmOpcode::Verify.to_wire(), ..read(1, 4, 512) };
    assert_eq!(peer.command(verify, &[]).status, bad);
    assert_eq!(peer.read_back(1, 0, 1536).unwrap(), pattern(4096, 1)[..1536]);
    assert_eq!(peer.write(1, 3, &pattern(1024, 9)), Status::SUCCESS);
    assert_eq!(peer.read_back(1, 3, 1024).unwrap(), pattern(1024, 9));
}

#[test]
fn a_fused_operation_writes_only_what_was_expected() {
    if !supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let (old, new) = (pattern(4096, 1), pattern(4096, 2));
    assert_eq!(peer.write(1, 8, &old), Status::SUCCESS);
    assert_eq!(compare_and_write(&mut peer, 8, &new, &pattern(4096, 3)), FAILED);
    assert_eq!(peer.read_back(1, 8, 4096), Ok(old.clone()));
    assert_eq!(compare_and_write(&mut peer, 8, &old, &new), BOTH);
    assert_eq!(peer.read_back(1, 8, 4096), Ok(new.clone()));
    // With R2T, and the second command's data before the first's.
    let (expected, last) = (new, pattern(4096, 4));
    peer.capsule(fused(write(1, 8, 4096), 1, 1), &[]);
    peer.capsule(fused(write(1, 8, 4096), 2, 2), &[]);
    let (first, second) = (peer.expect_r2t(), peer.expect_r2t());
    peer.data(&second, 0, &last, true);
    peer.data(&first, 0, &expected, true);
    let answers = [peer.expect_response(), peer.expect_response()];
    assert_eq!(
        answers.map(|answer| (answer.cid, answer.status)),
        [(1, Status::SUCCESS), (2, Status::SUCCESS)]
    );
    assert_eq!(peer.read_back(1, 8, 4096), Ok(last));
}

#[test]
fn unpaired_and_invalid_fused_commands_are_aborted() {
    if !supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, true);
    let data = pattern(512, 1);
    let first = |lba, cid| fused(write_in_capsule(1, lba, 512), 1, cid);
    let second = |lba, cid| fused(write_in_capsule(1, lba, 512), 2, cid);
    let medium = peer.read_back(1, 0, 8192).unwrap();
    let (missing, failed) = (Status::FUSED_MISSING, Status::FUSED_FAILED);
    let expect = |peer: &mut RawTcpHost, what: &str, answers: &[(u16, Status)]| {
        for (cid, status) in answers {
            let response = peer.expect_response();
            assert!(
                response.cid == *cid && response.status.same_code(*status),
                "{what}: {response:?}, not {answers:?}"
            );
        }
    };
    peer.capsule(second(0, 2), &data);
    expect(&mut peer, "a second alone", &[(2, missing)]);
    peer.capsule(first(0, 1), &data);
    peer.capsule(Sqe { cid: 5, ..Sqe::new(NvmOpcode::Flush.to_wire()) }, &[]);
    expect(
        &mut peer,
        "a first and a command that is not its second",
        &[(1, missing), (5, Status::INVALID_NAMESPACE_OR_FORMAT)],
    );
    peer.capsule(first(0, 1), &data);
    peer.capsule(first(0, 2), &data);
    expect(&mut peer, "two firsts", &[(1, missing)]);
    peer.capsule(second(8, 3), &data);
    let invalid = Status::INVALID_FIELD;
    expect(&mut peer, "a second with another range", &[(2, invalid), (3, invalid)]);
    peer.capsule(first(16384, 1), &data);
    peer.capsule(second(0, 2), &data);
    expect(&mut peer, "an invalid first", &[(1, Status::LBA_OUT_OF_RANGE), (2, failed)]);
    peer.capsule(first(0, 1), &data);
    peer.capsule(second(16384, 2), &data);
    expect(&mut peer, "an invalid second", &[(1, failed), (2, Status::LBA_OUT_OF_RANGE)]);
    // A first command completes only after its data has arrived.
    peer.capsule(fused(write(1, 0, 512), 1, 1), &[]);
    let r2t = peer.expect_r2t();
    peer.capsule(second(8, 2), &data);
    expect(&mut peer, "a second with another range, before the first's data", &[(2, invalid)]);
    peer.data(&r2t, 0, &data, true);
    expect(&mut peer, "the first, after its data", &[(1, invalid)]);
    // Data digest errors.
    for corrupt in [1, 2] {
        for (bits, sqe) in [(1, first(0, 1)), (2, second(0, 2))] {
            let mut pdu = capsule(&peer.framing, sqe, &medium[..512]);
            *pdu.last_mut().unwrap() ^= if bits == corrupt { 1 } else { 0 };
            peer.send(&pdu);
        }
        let mut answers = [peer.expect_response(), peer.expect_response()];
        answers.sort_by_key(|answer| answer.cid);
        let transient = Status::TRANSIENT_TRANSPORT_ERROR;
        let expected = if corrupt == 1 { [transient, failed] } else { [failed, transient] };
        for (answer, expected) in answers.iter().zip(expected) {
            assert!(answer.status.same_code(expected), "digest {corrupt}: {answers:?}");
        }
    }
    assert_eq!(peer.read_back(1, 0, 8192).unwrap(), medium, "nothing was written");
    assert_eq!(peer.write(1, 0, &data), Status::SUCCESS);
    // A pending first command does not block other hosts after its host disconnects.
    peer.capsule(first(0, 1), &data);
    drop(peer);
    RawTcpHost::io(&rig, &admin, 2, 16, false).round_trip(1);
}

#[test]
fn concurrent_compare_and_write_loses_no_increment() {
    if !supports_fused() {
        return println!("SKIPPED: membarrier is not available");
    }
    const EACH: u64 = 100;
    const HOSTS: u64 = 4;
    let rig = TcpTestTarget::new(TestTargetConfig { latency_us: 100, ..TestTargetConfig::default() });
    let admin = RawTcpHost::admin(&rig);
    let block = |value: u64| {
        let mut block = vec![0; 512];
        block[..8].copy_from_slice(&value.to_le_bytes());
        block
    };
    let value = |block: &[u8]| u64::from_le_bytes(*block.first_chunk().unwrap());
    std::thread::scope(|scope| {
        for host in 1..=HOSTS {
            let mut peer = RawTcpHost::io(&rig, &admin, host as u16, 16, false);
            scope.spawn(move || {
                for _ in 0..EACH {
                    loop {
                        let known = value(&peer.read_back(1, 0, 512).unwrap());
                        let answer = compare_and_write(&mut peer, 0, &block(known), &block(known + 1));
                        // An unrelated write from the same core.
                        assert_eq!(peer.write(1, host, &block(known)), Status::SUCCESS);
                        if answer == BOTH {
                            break;
                        }
                        assert_eq!(answer, FAILED);
                    }
                }
            });
        }
    });
    let mut peer = RawTcpHost::io(&rig, &admin, 10, 16, false);
    assert_eq!(value(&peer.read_back(1, 0, 512).unwrap()), HOSTS * EACH);
}

#[test]
fn commands_without_a_buffer_are_deferred_and_complete() {
    let rig = TcpTestTarget::new(TestTargetConfig {
        arena_bytes: 4 << 20,
        latency_us: 200,
        reactors: 1,
        ..TestTargetConfig::default()
    });
    let admin = RawTcpHost::admin(&rig);
    let mut peers: Vec<RawTcpHost> =
        (1..=4).map(|qid| RawTcpHost::io(&rig, &admin, qid, 64, false)).collect();
    let zeroes = vec![0; 8192];
    // Four times the available memory.
    for peer in &mut peers {
        for cid in 0..32 {
            let verify = Sqe { opcode: NvmOpcode::Verify.to_wire(), cid, ..read(1, 0, 128 << 10) };
            peer.capsule(verify, &[]);
            let compare = Sqe { opcode: NvmOpcode::Compare.to_wire(), ..write_in_capsule(1, 64, 8192) };
            if cid % 2 == 0 {
                peer.capsule(Sqe { cid: 100 + cid, ..compare }, &zeroes);
            } else if supports_fused() && cid == 1 {
                peer.capsule(fused(write_in_capsule(1, 64, 8192), 1, 200), &zeroes);
                peer.capsule(fused(write_in_capsule(1, 64, 8192), 2, 201), &zeroes);
            }
        }
        send_copy(peer);
    }
    for peer in &mut peers {
        for _ in 0..32 + 16 + if supports_fused() { 2 } else { 0 } + 1 {
            assert_eq!(peer.expect_response().status, Status::SUCCESS);
        }
    }
}

/// Sends a Copy without waiting for its completion.
fn send_copy(peer: &mut RawTcpHost) {
    let mut data = [0; COPY_RANGE_SIZE];
    CopyRange { lba: 0, blocks: 4096, ..CopyRange::default() }.encode(&mut data);
    let view = CopyCommand { lba: 8192, ranges: 1, ..CopyCommand::default() };
    let sqe = Sqe { nsid: 1, cid: 300, data: DataPointer::capsule(0, 32), ..view.to_sqe() };
    peer.capsule(sqe, &data);
}
