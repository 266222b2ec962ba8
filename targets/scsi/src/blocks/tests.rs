use block_io::{Op, RequestFlags, Status};
use proptest::prelude::*;
use wire_scsi::{AdditionalSense, ScsiStatus, SenseKey};

use crate::test_unit::{Reply, TestUnit, config};
use crate::{Residual, UnitConfig};

const BLOCK: usize = 512;
const BLOCKS: u64 = 64;

fn cdb_16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> Vec<u8> {
    let mut cdb = vec![opcode, flags];
    cdb.extend(lba.to_be_bytes());
    if opcode == 0x89 {
        cdb.extend([0, 0, 0, blocks as u8]);
    } else {
        cdb.extend(blocks.to_be_bytes());
    }
    cdb.extend([0, 0]);
    cdb
}

fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let length = ranges.len() * 16;
    let mut list = vec![0; 8];
    list[..2].copy_from_slice(&(length as u16 + 6).to_be_bytes());
    list[2..4].copy_from_slice(&(length as u16).to_be_bytes());
    for (lba, blocks) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

fn unmap_cdb(list: &[u8]) -> [u8; 10] {
    [0x42, 0, 0, 0, 0, 0, 0, (list.len() >> 8) as u8, list.len() as u8, 0]
}

fn filled() -> TestUnit {
    let mut test = TestUnit::new(config(BLOCK as u32, BLOCKS));
    test.disk.bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8 | 1);
    test
}

#[test]
fn compare_and_write_needs_both_halves_and_has_its_maximum() {
    let mut test = TestUnit::new(config(4096, 300));
    let nexus = test.nexus(1);
    let mut additional =
        |blocks, bytes| test.run(&nexus, &cdb_16(0x89, 0, 0, blocks), &vec![0; bytes], 0).additional();
    assert_eq!(additional(1, 8192), None);
    for (blocks, bytes) in [(1, 4096), (1, 16384), (3, 16384), (129, 129 * 8192)] {
        assert_eq!(
            additional(blocks, bytes),
            Some(AdditionalSense::INVALID_FIELD_IN_CDB),
            "{blocks} {bytes}"
        );
    }
    assert_eq!(additional(128, 128 * 8192), None);
    let limits = test.run(&nexus, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).good();
    assert_eq!((limits[5], &limits[8..12]), (128, &[0, 0, 1, 0][..]));
}

#[test]
fn failures_of_a_compare_and_write_are_those_of_the_device() {
    let mut test = filled();
    let nexus = test.nexus(1);
    test.disk.failure = Some(Status::UNRECOVERED_READ_ERROR);
    let reply = test.run(&nexus, &cdb_16(0x89, 0, 0, 1), &[0; 2 * BLOCK], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::UNRECOVERED_READ_ERROR));
    let before = test.disk.bytes.clone();
    let reply = test.run(&nexus, &cdb_16(0x89, 0, 0, 1), &[0; 2 * BLOCK], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::MISCOMPARE_DURING_VERIFY));
    assert_eq!(test.disk.bytes, before);
}

#[test]
fn a_miscompare_says_where_the_first_byte_differs() {
    let mut test = filled();
    let nexus = test.nexus(1);
    for offset in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1] {
        let mut data = test.disk.bytes[3 * BLOCK..5 * BLOCK].to_vec();
        data.extend([9; 2 * BLOCK]);
        // Further differences do not matter.
        data[offset] ^= 1;
        data[2 * BLOCK - 1] ^= 2;
        let sense = test.run(&nexus, &cdb_16(0x89, 0, 3, 2), &data, 0).sense.unwrap();
        let expected = (SenseKey::Miscompare, Some(offset as u64));
        assert_eq!((sense.key, sense.information), expected, "{offset}");
    }
    // What is no miscompare has no offset.
    test.disk.failure = Some(Status::UNRECOVERED_READ_ERROR);
    let reply = test.run(&nexus, &cdb_16(0x89, 0, 3, 2), &[0; 4 * BLOCK], 0);
    assert_eq!(reply.sense.unwrap().information, None);
}

#[test]
fn an_orwrite_starts_again_when_another_write_was_first() {
    let mut test = filled();
    let nexus = test.nexus(1);
    let before = test.disk.bytes.clone();
    // The first compare fails, as if the block had changed after it was read.
    test.disk.failures.extend([Status::SUCCESS, Status::COMPARE_FAILURE]);
    test.run(&nexus, &cdb_16(0x8b, 0x08, 3, 2), &[0x82; 2 * BLOCK], 0).good();
    let expected: Vec<u8> = before[3 * BLOCK..5 * BLOCK].iter().map(|byte| byte | 0x82).collect();
    assert_eq!(test.disk.bytes[3 * BLOCK..5 * BLOCK], expected);
    let ops: Vec<Op> = test.disk.log.iter().map(|(op, _)| *op).collect();
    assert_eq!(ops, [Op::Read, Op::Compare, Op::Read, Op::Compare, Op::Write]);
    assert_eq!(test.disk.log[4].1, RequestFlags::FUA);
}

#[test]
fn verify_compares_one_block_or_all_or_reads_the_medium() {
    let mut test = filled();
    let nexus = test.nexus(1);
    let data = test.disk.bytes[..4 * BLOCK].to_vec();
    let mut other = data.clone();
    other[4 * BLOCK - 1] ^= 1;
    let miscompare = Some(AdditionalSense::MISCOMPARE_DURING_VERIFY);
    assert_eq!(test.run(&nexus, &cdb_16(0x8f, 0x02, 0, 4), &data, 0).additional(), None);
    assert_eq!(test.run(&nexus, &cdb_16(0x8f, 0x02, 0, 4), &other, 0).additional(), miscompare);
    // Without BYTCHK data is ignored, and a defect is found.
    let reply = test.run(&nexus, &cdb_16(0x8f, 0, 0, 4), &other, 0);
    assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, Residual::Underflow(4 * 512)));
    test.disk.failure = Some(Status::UNRECOVERED_READ_ERROR);
    let reply = test.run(&nexus, &cdb_16(0x8f, 0, 0, BLOCKS as u32), &[], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::UNRECOVERED_READ_ERROR));
    // BYTCHK 3: every block is equal to one.
    test.disk.bytes[BLOCK..].fill(7);
    assert_eq!(test.run(&nexus, &cdb_16(0x8f, 0x06, 1, 63), &[7; BLOCK], 0).additional(), None);
    assert_eq!(test.run(&nexus, &cdb_16(0x8f, 0x06, 0, 64), &[7; BLOCK], 0).additional(), miscompare);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_CDB);
    assert_eq!(test.run(&nexus, &cdb_16(0x8f, 0x04, 0, 1), &[7; BLOCK], 0).additional(), invalid);
}

#[test]
fn write_and_verify_writes_to_the_medium_and_compares() {
    let mut test = filled();
    let nexus = test.nexus(1);
    test.run(&nexus, &[0x2e, 2, 0, 0, 0, 9, 0, 0, 2, 0], &[3; 2 * BLOCK], 0).good();
    assert_eq!(test.disk.bytes[9 * BLOCK..11 * BLOCK], [3; 2 * BLOCK]);
    assert_eq!(test.disk.log, [(Op::Write, RequestFlags::FUA), (Op::Compare, RequestFlags::NONE)]);
    let reply = test.run(&nexus, &[0x2e, 0, 0, 0, 0, 9, 0, 0, 2, 0], &[4; 700], 0);
    assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, Residual::Overflow(324)));
    assert_eq!(test.disk.bytes[9 * BLOCK..10 * BLOCK], [4; BLOCK]);
    assert_eq!(test.disk.bytes[10 * BLOCK..11 * BLOCK], [3; BLOCK]);
    test.disk.failures.extend([Status::SUCCESS, Status::COMPARE_FAILURE]);
    let reply = test.run(&nexus, &[0xae, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0], &[4; BLOCK], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::MISCOMPARE_DURING_VERIFY));
}

#[test]
fn write_same_deallocates_writes_zeroes_or_repeats_its_block() {
    let mut test = filled();
    let nexus = test.nexus(1);
    test.run(&nexus, &[0x41, 0x08, 0, 0, 0, 1, 0, 0, 2, 0], &[0; BLOCK], 0).good();
    test.run(&nexus, &[0x41, 0, 0, 0, 0, 3, 0, 0, 2, 0], &[0; BLOCK], 0).good();
    // Data that is not zero is written in spite of UNMAP.
    test.run(&nexus, &cdb_16(0x93, 0x08, 5, 2), &[9; BLOCK], 0).good();
    test.run(&nexus, &cdb_16(0x93, 0x01, 7, 2), &[], 0).good();
    let ops: Vec<Op> = test.disk.log.iter().map(|(op, _)| *op).collect();
    assert_eq!(ops, [Op::Unmap, Op::WriteZeroes, Op::Write, Op::WriteZeroes]);
    let mut expected = filled().disk.bytes;
    expected[BLOCK..9 * BLOCK].fill(0);
    expected[5 * BLOCK..7 * BLOCK].fill(9);
    assert_eq!(test.disk.bytes, expected);
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_CDB);
    for bytes in [BLOCK / 2, BLOCK * 2, 0] {
        assert_eq!(test.run(&nexus, &cdb_16(0x93, 0, 0, 1), &vec![1; bytes], 0).additional(), invalid);
    }
    assert_eq!(test.run(&nexus, &cdb_16(0x93, 0, 0, 0), &[1; BLOCK], 0).additional(), invalid, "WSNZ");
    assert_eq!(test.run(&nexus, &cdb_16(0x93, 0x18, 0, 1), &[1; BLOCK], 0).additional(), invalid, "ANCHOR");
    let mut full =
        TestUnit::new(UnitConfig { can_unmap: false, can_write_zeroes: false, ..config(512, 2000) });
    let nexus = full.nexus(1);
    assert_eq!(full.run(&nexus, &cdb_16(0x93, 0x08, 0, 1), &[0; BLOCK], 0).additional(), invalid);
    full.disk.bytes.fill(1);
    full.run(&nexus, &cdb_16(0x93, 0x01, 1, 1998), &[], 0).good();
    assert_eq!((full.disk.bytes[511], full.disk.bytes[1999 * 512]), (1, 1));
    assert!(full.disk.bytes[512..1999 * 512].iter().all(|byte| *byte == 0));
    assert_eq!(full.disk.log.len(), 4, "in pieces of 256 KiB");
}

#[test]
fn unmap_deallocates_its_ranges_or_none() {
    let mut test = filled();
    let nexus = test.nexus(1);
    let list = unmap_list(&[(1, 1), (5, 0), (60, 4)]);
    let reply = test.run(&nexus, &unmap_cdb(&list), &list, 0);
    assert_eq!((reply.status, reply.residual), (ScsiStatus::Good, Residual::None));
    let mut expected = filled().disk.bytes;
    expected[BLOCK..2 * BLOCK].fill(0);
    expected[60 * BLOCK..].fill(0);
    assert_eq!(test.disk.bytes, expected);
    assert_eq!(test.disk.log.len(), 2);
    let list = unmap_list(&[(8, 1), (60, 5)]);
    let reply = test.run(&nexus, &unmap_cdb(&list), &list, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    let list = unmap_list(&[(0, 0); 256]);
    let reply = test.run(&nexus, &unmap_cdb(&list), &list, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST));
    let list = unmap_list(&[(8, 1)]);
    for length in [7, 20] {
        let reply = test.run(&nexus, &unmap_cdb(&list[..length]), &list, 0);
        assert_eq!(reply.additional(), Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    }
    let reply = test.run(&nexus, &unmap_cdb(&list), &list[..20], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR));
    test.run(&nexus, &unmap_cdb(&[]), &[], 0).good();
    test.run(&nexus, &unmap_cdb(&unmap_list(&[])), &unmap_list(&[]), 0).good();
    assert_eq!(test.disk.bytes, expected, "nothing of a list that fails is executed");
    let list = unmap_list(&[(0, 1); 40]);
    test.disk.failure = Some(Status::WRITE_FAULT);
    let reply = test.run(&nexus, &unmap_cdb(&list), &list, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::WRITE_FAULT));
    let mut full = TestUnit::new(UnitConfig { can_unmap: false, ..config(512, 8) });
    let nexus = full.nexus(1);
    let reply = full.run(&nexus, &unmap_cdb(&list), &list, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE));
}

#[test]
fn get_lba_status_lists_extents_as_far_as_there_is_room() {
    let mut test = filled();
    let nexus = test.nexus(1);
    test.disk.bytes[..2 * BLOCK].fill(0);
    test.disk.bytes[10 * BLOCK..12 * BLOCK].fill(0);
    let status = |lba: u64, allocation: u8| {
        let mut cdb = cdb_16(0x9e, 0x12, lba, allocation.into());
        cdb[1] = 0x12;
        cdb
    };
    let all = test.run(&nexus, &status(1, 200), &[], 200).good();
    assert_eq!(all[..8], [0, 0, 0, 68, 0, 0, 0, 0]);
    let extents: Vec<(u8, u8, u8)> =
        all[8..].chunks(16).map(|extent| (extent[7], extent[11], extent[12])).collect();
    assert_eq!(extents, [(1, 1, 1), (2, 8, 0), (10, 2, 1), (12, 52, 0)]);
    let first = test.run(&nexus, &status(3, 24), &[], 24).good();
    assert_eq!((first[3], first[15], first[19], first.len()), (20, 3, 7, 24));
    let reply = test.run(&nexus, &status(64, 24), &[], 24);
    assert_eq!(reply.additional(), Some(AdditionalSense::LBA_OUT_OF_RANGE));
}

#[test]
fn prefetch_checks_its_range() {
    let mut test = filled();
    let nexus = test.nexus(1);
    for cdb in [cdb_16(0x90, 2, 0, 64), vec![0x34, 0, 0, 0, 0, 64, 0, 0, 0, 0]] {
        assert_eq!(test.run(&nexus, &cdb, &[], 0).status, ScsiStatus::Good);
    }
    let reply = test.run(&nexus, &cdb_16(0x90, 0, 1, 64), &[], 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::LBA_OUT_OF_RANGE));
}

/// A command, and what an oracle expects.
#[derive(Clone, Debug)]
struct Random {
    /// 0 read, 1 write, 2 COMPARE AND WRITE, 3 ORWRITE, 4 WRITE SAME, 5 UNMAP, 6 VERIFY.
    kind: u8,
    lba: u64,
    blocks: u32,
    /// Bytes that the initiator has or expects, more or less than the command's.
    difference: i32,
    value: u8,
    /// COMPARE AND WRITE and VERIFY have the right data, but for a byte if there is an offset.
    wrong: Option<u16>,
}

fn random() -> impl Strategy<Value = Random> {
    let difference = prop_oneof![4 => Just(0), 1 => -1200..1200i32];
    let value = prop_oneof![Just(0), any::<u8>()];
    (0..7u8, 0..68u64, 0..6u32, difference, value, prop::option::of(any::<u16>())).prop_map(
        |(kind, lba, blocks, difference, value, wrong)| Random {
            kind,
            lba,
            blocks,
            difference,
            value,
            wrong,
        },
    )
}

/// Executes a command on the oracle. Returns what the unit answers.
fn expected(oracle: &mut [u8], random: &Random, data: &[u8], expected_in: u32) -> Reply {
    let (start, bytes) = (random.lba as usize * BLOCK, random.blocks as usize * BLOCK);
    let available = data.len();
    let length = if random.kind == 2 { 2 * bytes } else { bytes };
    let fails = |additional: Option<AdditionalSense>, residual| (additional, Vec::new(), residual);
    let nothing = Residual::Underflow(available as u32 + expected_in);
    let nothing = if nothing == Residual::Underflow(0) { Residual::None } else { nothing };
    let invalid = fails(Some(AdditionalSense::INVALID_FIELD_IN_CDB), nothing);
    let whole = available.min(bytes) / BLOCK * BLOCK;
    let of_out = Residual::of(length as u64, available as u32);
    let result = if start + bytes > oracle.len() {
        // An UNMAP's ranges are in its data.
        let residual = if random.kind == 5 { Residual::None } else { nothing };
        fails(Some(AdditionalSense::LBA_OUT_OF_RANGE), residual)
    } else {
        match random.kind {
            0 => {
                let read = bytes.min(expected_in as usize);
                (None, oracle[start..start + read].to_vec(), Residual::of(bytes as u64, expected_in))
            }
            1 => {
                // Of a block of which the initiator has a part, the rest stays.
                let written = available.min(bytes);
                oracle[start..start + written].copy_from_slice(&data[..written]);
                fails(None, of_out)
            }
            2 if available != 2 * bytes => invalid,
            2 if oracle[start..start + bytes] != data[..bytes] => {
                fails(Some(AdditionalSense::MISCOMPARE_DURING_VERIFY), Residual::None)
            }
            2 => {
                oracle[start..start + bytes].copy_from_slice(&data[bytes..]);
                fails(None, of_out)
            }
            3 if available < bytes => invalid,
            3 => {
                oracle[start..start + bytes].iter_mut().zip(data).for_each(|(byte, bits)| *byte |= bits);
                fails(None, of_out)
            }
            4 if random.blocks == 0 || available != BLOCK => invalid,
            4 => {
                oracle[start..start + bytes].chunks_mut(BLOCK).for_each(|block| block.copy_from_slice(data));
                fails(None, Residual::None)
            }
            5 => {
                oracle[start..start + bytes].fill(0);
                fails(None, Residual::None)
            }
            _ if oracle[start..start + whole] != data[..whole] => {
                let residual = Residual::of(whole as u64, available as u32);
                fails(Some(AdditionalSense::MISCOMPARE_DURING_VERIFY), residual)
            }
            _ => fails(None, of_out),
        }
    };
    let (additional, data, residual) = result;
    let sense = additional.map(|additional| wire_scsi::Sense { additional, ..Default::default() });
    let status = if sense.is_some() { ScsiStatus::CheckCondition } else { ScsiStatus::Good };
    Reply { status, sense, data, residual }
}

fn execute(
    test: &mut TestUnit,
    nexus: &crate::UnitNexus,
    random: &Random,
    data: &[u8],
    expected_in: u32,
) -> Reply {
    let Random { kind, lba, blocks, .. } = *random;
    match kind {
        0 => test.run(nexus, &cdb_16(0x88, 0, lba, blocks), &[], expected_in),
        1 => test.run(nexus, &cdb_16(0x8a, 0, lba, blocks), data, 0),
        2 => test.run(nexus, &cdb_16(0x89, 0, lba, blocks), data, 0),
        3 => test.run(nexus, &cdb_16(0x8b, 0, lba, blocks), data, 0),
        4 => test.run(nexus, &cdb_16(0x93, 0, lba, blocks), data, 0),
        5 => {
            let list = unmap_list(&[(lba, blocks)]);
            test.run(nexus, &unmap_cdb(&list), &list, 0)
        }
        _ => test.run(nexus, &cdb_16(0x8f, 0x02, lba, blocks), data, 0),
    }
}

proptest! {
    #[test]
    fn any_sequence_of_commands_has_the_results_and_residuals_of_an_oracle(
        commands in prop::collection::vec(random(), 1..40),
    ) {
        let mut test = TestUnit::new(config(BLOCK as u32, BLOCKS));
        let nexus = test.nexus(1);
        let mut oracle = test.disk.bytes.clone();
        for (number, random) in commands.iter().enumerate() {
            let start = (random.lba as usize * BLOCK).min(oracle.len());
            let bytes = random.blocks as usize * BLOCK;
            let length = match random.kind { 2 => 2 * bytes, 4 => BLOCK, _ => bytes };
            let length = (length as i32 + random.difference).max(0) as usize;
            let expected_in = if random.kind == 0 { length as u32 } else { 0 };
            // The data is a pattern; the part that is compared is right, unless it is to be wrong.
            let mut data: Vec<u8> = (0..length).map(|at| random.value.wrapping_add(((at / 100) as u8).wrapping_mul(random.value))).collect();
            if matches!(random.kind, 2 | 6) {
                let right = bytes.min(length).min(oracle.len() - start);
                data[..right].copy_from_slice(&oracle[start..start + right]);
                if let Some(at) = random.wrong && right > 0 {
                    data[at as usize % right] ^= 1;
                }
            }
            let list_bytes = unmap_list(&[(0, 0)]);
            let out: &[u8] = match random.kind { 0 => &[], 5 => &list_bytes, _ => &data };
            let mut reply = execute(&mut test, &nexus, random, out, expected_in);
            let expected = expected(&mut oracle, random, out, expected_in);
            reply.sense = reply.sense.map(|sense| wire_scsi::Sense { additional: sense.additional, ..Default::default() });
            prop_assert_eq!(&reply, &expected, "command {}: {:?}", number, random);
            prop_assert!(test.disk.bytes == oracle, "command {}: {:?}", number, random);
        }
    }
}

#[test]
fn an_atomic_write_of_a_device_with_units_is_a_power_of_two_at_a_multiple_of_its_length() {
    let mut config = config(BLOCK as u32, BLOCKS);
    (config.geometry.atomic_write_blocks, config.geometry.atomic_write_unit_min_blocks) = (13, 2);
    let mut test = TestUnit::new(config.clone());
    let nexus = test.nexus(1);
    let bytes = [7; 16 * BLOCK];
    let mut run = |lba: u64, blocks: u32| {
        test.disk.log.clear();
        let reply = test.run(&nexus, &cdb_16(0x9c, 0, lba, blocks), &bytes[..blocks as usize * BLOCK], 0);
        assert_eq!(test.disk.log.len(), usize::from(reply.additional().is_none() && blocks > 0));
        reply.additional()
    };
    let invalid = Some(AdditionalSense::INVALID_FIELD_IN_CDB);
    for (lba, blocks, expected) in [
        (0, 8, None),
        (12, 4, None),
        (6, 2, None),
        (5, 0, None),
        // Shorter than the unit, longer than the longest power of two, no power of two, and at no multiple of the length.
        (0, 1, invalid),
        (0, 16, invalid),
        (0, 6, invalid),
        (2, 4, invalid),
        (3, 2, invalid),
    ] {
        assert_eq!(run(lba, blocks), expected, "{blocks} blocks at {lba}");
    }
    let page = test.run(&nexus, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).good();
    assert_eq!(page[44..56], [0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 2]);
    // A transfer is shorter than its unit.
    config.geometry.atomic_write_unit_min_blocks = 16;
    let mut test = TestUnit::new(config);
    let nexus = test.nexus(1);
    let page = test.run(&nexus, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).good();
    assert_eq!(page[44..56], [0; 12]);
}

#[test]
fn an_atomic_write_is_one_request_within_the_devices_limits() {
    let mut config = config(BLOCK as u32, BLOCKS);
    (config.geometry.atomic_write_blocks, config.geometry.atomic_write_boundary_blocks) = (8, 16);
    let mut test = TestUnit::new(config.clone());
    let nexus = test.nexus(1);
    let cdb = |flags: u8, lba: u64, boundary: u16, blocks: u16| {
        let mut cdb = cdb_16(0x9c, flags, lba, blocks.into());
        cdb[10..12].copy_from_slice(&boundary.to_be_bytes());
        cdb
    };
    let bytes = [7; 8 * BLOCK];
    test.run(&nexus, &cdb(0x08, 16, 0, 8), &bytes, 0).good();
    assert_eq!(test.disk.bytes[16 * BLOCK..24 * BLOCK], bytes);
    assert_eq!(test.disk.log, [(Op::Write, RequestFlags::ATOMIC | RequestFlags::FUA)]);
    let reply = test.run(&nexus, &cdb(0, 0, 0, 3), &bytes, 0);
    assert_eq!(reply.residual, Residual::Underflow(5 * BLOCK as u32));
    reply.good();
    test.run(&nexus, &cdb(0, 8, 0, 0), &[], 0).good();
    test.run(&nexus, &cdb(0, 9, 0, 7), &bytes, 0).good();
    test.disk.log.clear();
    let invalid = AdditionalSense::INVALID_FIELD_IN_CDB;
    // Too long, with a boundary, across one of the device, and with less data than blocks, of which a part would be written.
    for (cdb, bytes) in [
        (cdb(0, 0, 0, 9), &[7; 9 * BLOCK][..]),
        (cdb(0, 0, 4, 8), &bytes),
        (cdb(0, 12, 0, 5), &bytes),
        (cdb(0, 0, 0, 8), &bytes[1..]),
        (cdb(0x20, 0, 0, 8), &bytes),
    ] {
        assert_eq!(test.run(&nexus, &cdb, bytes, 0).additional(), Some(invalid), "{cdb:?}");
    }
    let reply = test.run(&nexus, &cdb(0, BLOCKS, 0, 8), &bytes, 0);
    assert_eq!(reply.additional(), Some(AdditionalSense::LBA_OUT_OF_RANGE));
    assert!(test.disk.log.is_empty());
    let page = test.run(&nexus, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).good();
    assert_eq!(page[44..], [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let supported = [0xa3, 0x0c, 1, 0x9c, 0, 0, 0, 0, 0, 64, 0, 0];
    assert_eq!(test.run(&nexus, &supported, &[], 64).good()[1] & 7, 3);
    // A device that promises nothing.
    config.geometry.atomic_write_blocks = 0;
    let mut test = TestUnit::new(config);
    let nexus = test.nexus(1);
    let unknown = Some(AdditionalSense::INVALID_COMMAND_OPERATION_CODE);
    assert_eq!(test.run(&nexus, &cdb(0, 0, 0, 1), &bytes, 0).additional(), unknown);
    let page = test.run(&nexus, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).good();
    assert_eq!(page[44..52], [0; 8]);
    assert_eq!(test.run(&nexus, &supported, &[], 64).good()[1] & 7, 1);
}
