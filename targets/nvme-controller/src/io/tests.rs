use proptest::prelude::*;
use wire_nvme::DataPointer;
use wire_nvme::fabrics::{Connect, Disconnect, PropertyGet};
use wire_nvme::io::{
    COPY_RANGE_SIZE, CopyCommand, CopyRange, Prinfo, ReadWrite, WriteUncorrectable, WriteZeroes,
};
use wire_nvme::log::AnaState;
use wire_nvme::protection::{GuardFormat, MetadataFormat, Protection, ProtectionType};

use super::*;
use crate::harness::subsystem;
use crate::{ControllerLimits, SubsystemListener, SubsystemNamespace};

const DNR: fn(Status) -> Status = Status::do_not_retry;

/// Namespace 1 has 2048 blocks of 512 bytes and all capabilities, 3 has 256 blocks of 4096 bytes and
/// no unmap, 4 is read-only, and 5 to 7 are in inaccessible ANA groups.
fn table() -> NamespaceTable {
    let mut subsystem = subsystem();
    subsystem.namespaces.push(SubsystemNamespace {
        read_only: true,
        can_unmap: true,
        can_write_zeroes: true,
        can_write_uncorrectable: true,
        ..SubsystemNamespace::new(4, 64)
    });
    for (nsid, anagrpid) in [(5, 5), (6, 6), (7, 7)] {
        subsystem.namespaces.push(SubsystemNamespace { anagrpid, ..SubsystemNamespace::new(nsid, 64) });
    }
    subsystem.ana_reporting = true;
    let ana = vec![(5, AnaState::Inaccessible), (6, AnaState::PersistentLoss), (7, AnaState::Change)];
    subsystem.listeners = vec![SubsystemListener { portid: 1, ana }];
    NamespaceTable::new(&subsystem, 1, &ControllerLimits::default())
}

fn rw(opcode: NvmOpcode, nsid: u32, lba: u64, blocks: u32, bytes: u32) -> Sqe {
    let sqe = ReadWrite { lba, blocks, ..ReadWrite::default() }.to_sqe(opcode);
    Sqe { nsid, data: DataPointer::transport(bytes), ..sqe }
}

fn dsm(nsid: u32, ranges: u16, deallocate: bool, bytes: u32) -> Sqe {
    let command = DatasetManagement { ranges, integral_read: true, integral_write: true, deallocate };
    Sqe { nsid, data: DataPointer::transport(bytes), ..command.to_sqe() }
}

fn zeroes(nsid: u32, lba: u64, blocks: u32) -> Sqe {
    let command = WriteZeroes { lba, blocks, fua: false, deallocate: false, prinfo: Prinfo::empty() };
    Sqe { nsid, ..command.to_sqe() }
}

fn uncorrectable(nsid: u32, lba: u64, blocks: u32) -> Sqe {
    Sqe { nsid, ..WriteUncorrectable { lba, blocks }.to_sqe() }
}

fn copy_to(nsid: u32, lba: u64, ranges: u16, bytes: u32) -> Sqe {
    let command = CopyCommand { lba, ranges, ..CopyCommand::default() };
    Sqe { nsid, data: DataPointer::transport(bytes), ..command.to_sqe() }
}

fn fused(sqe: Sqe, bits: u8) -> Sqe {
    Sqe { flags: sqe.flags | bits, ..sqe }
}

fn flush(nsid: u32) -> Sqe {
    Sqe { nsid, ..Sqe::new(NvmOpcode::Flush.to_wire()) }
}

#[test]
fn valid_commands_are_planned() {
    use NvmOpcode::{Compare, Read, Verify, Write};
    let fua = |sqe: Sqe| Sqe { cdw12: sqe.cdw12 | FUA, ..sqe };
    let deac = |sqe: Sqe| Sqe { cdw12: sqe.cdw12 | DEAC, ..sqe };
    let on = |op, namespace, lba, blocks, data| IoPlan { op, namespace, lba, blocks, data, ..EMPTY_PLAN };
    let rows = [
        ("read", rw(Read, 1, 16, 8, 4096), on(IoOp::Read, 0, 16, 8, DataTransfer::ToHost(4096))),
        ("last block", rw(Read, 1, 2047, 1, 512), on(IoOp::Read, 0, 2047, 1, DataTransfer::ToHost(512))),
        (
            "all of MDTS",
            rw(Read, 1, 0, 256, 128 << 10),
            on(IoOp::Read, 0, 0, 256, DataTransfer::ToHost(128 << 10)),
        ),
        (
            "limited retry",
            Sqe { cdw12: 1 << 31, ..rw(Read, 1, 0, 1, 512) },
            on(IoOp::Read, 0, 0, 1, DataTransfer::ToHost(512)),
        ),
        ("write", rw(Write, 3, 255, 1, 4096), on(IoOp::Write, 2, 255, 1, DataTransfer::FromHost(4096))),
        (
            "write with FUA",
            fua(rw(Write, 3, 1, 2, 8192)),
            IoPlan { flags: RequestFlags::FUA, ..on(IoOp::Write, 2, 1, 2, DataTransfer::FromHost(8192)) },
        ),
        // Verify ignores the data pointer.
        ("verify", rw(Verify, 1, 7, 256, 0), on(IoOp::Verify, 0, 7, 256, DataTransfer::None)),
        ("verify, read-only", rw(Verify, 4, 0, 1, 99), on(IoOp::Verify, 3, 0, 1, DataTransfer::None)),
        ("compare", rw(Compare, 1, 7, 2, 1024), on(IoOp::Compare, 0, 7, 2, DataTransfer::FromHost(1024))),
        ("flush", flush(3), on(IoOp::Flush, 2, 0, 0, DataTransfer::None)),
        ("flush of all", flush(NSID_ALL), on(IoOp::FlushAll, 0, 0, 0, DataTransfer::None)),
        ("zeroes", zeroes(1, 0, 2048), on(IoOp::WriteZeroes, 0, 0, 2048, DataTransfer::None)),
        (
            "zeroes with deallocate and FUA",
            fua(deac(zeroes(3, 1, 1))),
            IoPlan {
                flags: RequestFlags::FUA | RequestFlags::DEALLOCATE,
                ..on(IoOp::WriteZeroes, 2, 1, 1, DataTransfer::None)
            },
        ),
        ("deallocate", dsm(1, 2, true, 32), on(IoOp::Unmap, 0, 0, 2, DataTransfer::FromHost(32))),
        (
            "deallocate as Linux",
            dsm(1, 1, true, 4096),
            on(IoOp::Unmap, 0, 0, 1, DataTransfer::FromHost(4096)),
        ),
        ("deallocate, unsupported", dsm(3, 1, true, 16), on(IoOp::NoOp, 2, 0, 1, DataTransfer::FromHost(16))),
        (
            "access hints only",
            dsm(4, 256, false, 4096),
            on(IoOp::NoOp, 3, 0, 256, DataTransfer::FromHost(4096)),
        ),
        (
            "write uncorrectable",
            uncorrectable(1, 4, 2),
            on(IoOp::WriteUncorrectable, 0, 4, 2, DataTransfer::None),
        ),
        ("copy", copy_to(1, 9, 2, 64), on(IoOp::Copy, 0, 9, 2, DataTransfer::FromHost(64))),
        (
            "copy of a page of ranges",
            copy_to(3, 0, 1, 4096),
            on(IoOp::Copy, 2, 0, 1, DataTransfer::FromHost(4096)),
        ),
        (
            "copy with FUA",
            fua(copy_to(3, 255, 128, 4096)),
            IoPlan { flags: RequestFlags::FUA, ..on(IoOp::Copy, 2, 255, 128, DataTransfer::FromHost(4096)) },
        ),
        (
            "fused compare",
            fused(rw(Compare, 1, 7, 2, 1024), 1),
            on(IoOp::FusedCompare, 0, 7, 2, DataTransfer::Fused(1024)),
        ),
        (
            "fused write",
            fua(fused(rw(Write, 1, 7, 128, 64 << 10), 2)),
            IoPlan {
                flags: RequestFlags::FUA,
                ..on(IoOp::FusedWrite, 0, 7, 128, DataTransfer::Fused(64 << 10))
            },
        ),
        (
            "disconnect",
            Disconnect { record_format: 0 }.to_sqe(),
            on(IoOp::Disconnect, 0, 0, 0, DataTransfer::None),
        ),
    ];
    let table = table();
    for (name, sqe, expected) in rows {
        assert_eq!(plan(&sqe, &table), Ok(expected), "{name}");
    }
}

#[test]
fn invalid_commands_fail_with_the_specified_status() {
    use NvmOpcode::{Compare, Read, Verify, Write};
    let good = rw(Read, 1, 0, 8, 4096);
    let flags = |flags| Sqe { flags, ..good };
    let connect =
        Connect { record_format: 0, qid: 1, queue_entries: 32, attributes: Default::default(), kato_ms: 0 }
            .to_sqe();
    let rows = [
        ("fused first", flags(0x41), DNR(Status::INVALID_FIELD)),
        ("fused second", flags(0x42), DNR(Status::INVALID_FIELD)),
        ("fused reserved", flags(0x43), DNR(Status::INVALID_FIELD)),
        ("PRPs", flags(0x00), DNR(Status::INVALID_FIELD)),
        ("SGL metadata", flags(0x80), DNR(Status::INVALID_FIELD)),
        ("reserved data pointer", flags(0xc0), DNR(Status::INVALID_FIELD)),
        ("fused flush", Sqe { flags: 0x41, ..flush(1) }, DNR(Status::INVALID_FIELD)),
        ("unknown opcode", Sqe { opcode: 0x99, ..good }, DNR(Status::INVALID_OPCODE)),
        ("fused write first", fused(rw(Write, 1, 0, 8, 4096), 1), DNR(Status::INVALID_FIELD)),
        ("fused compare second", fused(rw(Compare, 1, 0, 8, 4096), 2), DNR(Status::INVALID_FIELD)),
        ("fused with PRPs", Sqe { flags: 0x01, ..rw(Compare, 1, 0, 8, 4096) }, DNR(Status::INVALID_FIELD)),
        ("fused beyond the end", fused(rw(Compare, 1, 2047, 2, 1024), 1), DNR(Status::LBA_OUT_OF_RANGE)),
        ("fused, too long", fused(rw(Compare, 1, 0, 129, 129 * 512), 1), DNR(Status::INVALID_FIELD)),
        ("fused, read-only", fused(rw(Write, 4, 0, 1, 512), 2), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("write uncorrectable, unsupported", uncorrectable(3, 0, 1), DNR(Status::INVALID_OPCODE)),
        ("write uncorrectable, read-only", uncorrectable(4, 0, 1), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("write uncorrectable beyond the end", uncorrectable(1, 2047, 2), DNR(Status::LBA_OUT_OF_RANGE)),
        ("copy to read-only", copy_to(4, 0, 1, 32), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("copy to beyond the end", copy_to(1, 2048, 1, 32), DNR(Status::LBA_OUT_OF_RANGE)),
        ("copy of more than MSRC", copy_to(1, 0, 129, 4128), DNR(Status::COMMAND_SIZE_LIMIT_EXCEEDED)),
        ("copy with too few ranges", copy_to(1, 0, 2, 63), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("copy with too much data", copy_to(1, 0, 2, 4097), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("copy of format 1", Sqe { cdw12: 1 << 8, ..copy_to(1, 0, 1, 32) }, DNR(Status::INVALID_FIELD)),
        (
            "copy with PRINFOR",
            Sqe { cdw12: 1 << 12, ..copy_to(1, 0, 1, 32) },
            DNR(Status::INVALID_PROTECTION_INFORMATION),
        ),
        (
            "copy with PRINFOW",
            Sqe { cdw12: 1 << 29, ..copy_to(1, 0, 1, 32) },
            DNR(Status::INVALID_PROTECTION_INFORMATION),
        ),
        ("namespace 0", Sqe { nsid: 0, ..good }, DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("no namespace", Sqe { nsid: 2, ..good }, DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("beyond the last", Sqe { nsid: 8, ..good }, DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("read of all", Sqe { nsid: NSID_ALL, ..good }, DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("zeroes of all", zeroes(NSID_ALL, 0, 1), DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("flush of none", flush(2), DNR(Status::INVALID_NAMESPACE_OR_FORMAT)),
        ("one beyond the end", rw(Read, 1, 2041, 8, 4096), DNR(Status::LBA_OUT_OF_RANGE)),
        ("start at the end", rw(Write, 1, 2048, 1, 512), DNR(Status::LBA_OUT_OF_RANGE)),
        ("end wraps around", rw(Read, 1, u64::MAX, 8, 4096), DNR(Status::LBA_OUT_OF_RANGE)),
        ("end wraps to the start", rw(Read, 1, u64::MAX - 7, 8, 4096), DNR(Status::LBA_OUT_OF_RANGE)),
        ("zeroes beyond the end", zeroes(1, 1, 2048), DNR(Status::LBA_OUT_OF_RANGE)),
        ("over MDTS", rw(Read, 1, 0, 257, 257 * 512), DNR(Status::INVALID_FIELD)),
        ("too little data", rw(Write, 1, 0, 8, 4095), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("too much data", rw(Read, 1, 0, 8, 8192), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("more than VSL", rw(Verify, 1, 0, 257, 0), DNR(Status::INVALID_FIELD)),
        ("verify beyond the end", rw(Verify, 1, 2047, 2, 0), DNR(Status::LBA_OUT_OF_RANGE)),
        ("no data", rw(Compare, 1, 0, 8, 0), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("length of 512-byte blocks", rw(Write, 3, 0, 8, 4096), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("metadata", Sqe { mptr: 1, ..good }, DNR(Status::INVALID_FIELD)),
        ("PRACT", Sqe { cdw12: good.cdw12 | 1 << 29, ..good }, DNR(Status::INVALID_PROTECTION_INFORMATION)),
        ("PRCHK", Sqe { cdw12: good.cdw12 | 1 << 26, ..good }, DNR(Status::INVALID_PROTECTION_INFORMATION)),
        (
            "storage tag check",
            Sqe { cdw12: good.cdw12 | 1 << 24, ..good },
            DNR(Status::INVALID_PROTECTION_INFORMATION),
        ),
        ("directive", Sqe { cdw12: good.cdw12 | 1 << 20, ..good }, DNR(Status::INVALID_FIELD)),
        (
            "PRCHK of zeroes",
            Sqe { cdw12: 1 << 26, ..zeroes(1, 0, 1) },
            DNR(Status::INVALID_PROTECTION_INFORMATION),
        ),
        ("write to read-only", rw(Write, 4, 0, 1, 512), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("zeroes to read-only", zeroes(4, 0, 1), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("deallocate read-only", dsm(4, 1, true, 16), DNR(Status::NAMESPACE_WRITE_PROTECTED)),
        ("too few ranges", dsm(1, 2, true, 31), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("too much for ranges", dsm(1, 2, true, 4097), DNR(Status::DATA_SGL_LENGTH_INVALID)),
        ("inaccessible", rw(Read, 5, 0, 1, 512), Status::ANA_INACCESSIBLE),
        ("lost", rw(Read, 6, 0, 1, 512), Status::ANA_PERSISTENT_LOSS),
        ("in transition", flush(7), Status::ANA_TRANSITION),
        ("connect", connect, DNR(Status::COMMAND_SEQUENCE_ERROR)),
        ("property", PropertyGet { wide: false, offset: 0x1c }.to_sqe(), Status::new(1, 0x85).do_not_retry()),
        ("unknown fabrics", Sqe { nsid: 2, ..Sqe::new(0x7f) }, DNR(Status::INVALID_OPCODE)),
        ("disconnect", Disconnect { record_format: 1 }.to_sqe(), DNR(Status::CONNECT_INCOMPATIBLE_FORMAT)),
    ];
    let table = table();
    for (name, sqe, expected) in rows {
        assert_eq!(plan(&sqe, &table), Err(expected), "{name}");
    }
    // Fused operations and Write Zeroes, if unsupported.
    let mut limited = subsystem();
    limited.namespaces[0].can_write_zeroes = false;
    let limits = ControllerLimits { compare_and_write: false, ..ControllerLimits::default() };
    let unfused = NamespaceTable::new(&limited, 0, &limits);
    let first = fused(rw(Compare, 1, 7, 2, 1024), 1);
    assert_eq!(plan(&first, &unfused), Err(DNR(Status::INVALID_FIELD)));
    let limited = NamespaceTable::new(&limited, 0, &ControllerLimits::default());
    assert_eq!(plan(&zeroes(1, 0, 1), &limited), Err(DNR(Status::INVALID_OPCODE)));
}

#[test]
fn table_returns_backend_and_block_size() {
    let table = table();
    let plan = plan(&rw(NvmOpcode::Read, 3, 0, 1, 4096), &table).unwrap();
    assert_eq!((table.entry(&plan).backend, table.entry(&plan).block_log2), (33, 12));
    assert_eq!(table.backends().collect::<Vec<_>>(), [11, 33, 0, 0, 0, 0]);
}

#[test]
fn unmap_validates_all_ranges_first() {
    let table = table();
    let plan_of = |ranges| plan(&dsm(1, ranges, true, 4096), &table).unwrap();
    let data = |ranges: &[(u64, u32)]| {
        let mut data = vec![0; 4096];
        for ((lba, blocks), into) in ranges.iter().zip(data.as_chunks_mut().0) {
            DsmRange { attributes: 7, blocks: *blocks, lba: *lba }.encode(into);
        }
        data
    };
    let list = |ranges: &[(u64, u32)]| -> Result<Vec<(u64, u32)>, Status> {
        Ok(unmap_ranges(&plan_of(ranges.len() as u16), &table, &data(ranges))?.collect())
    };
    assert_eq!(list(&[(0, 8), (100, 0), (2047, 1)]), Ok(vec![(0, 8), (2047, 1)]));
    assert_eq!(list(&[(0, 2048)]), Ok(vec![(0, 2048)]));
    for bad in [(2048, 1), (1, 2048), (u64::MAX, 1), (u64::MAX - 1, u32::MAX), (2049, 0)] {
        assert_eq!(list(&[(0, 8), bad]), Err(DNR(Status::LBA_OUT_OF_RANGE)), "{bad:?}");
    }
    let too_short = unmap_ranges(&plan_of(2), &table, &[0; 31]).map(Iterator::count);
    assert_eq!(too_short, Err(DNR(Status::DATA_SGL_LENGTH_INVALID)));
}

fn copying(lba: u64, ranges: &[(u64, u32)], table: &NamespaceTable) -> Result<CopyOperation, Status> {
    let mut data = vec![0; ranges.len() * COPY_RANGE_SIZE];
    for (&(lba, blocks), into) in ranges.iter().zip(data.as_chunks_mut().0) {
        CopyRange { lba, blocks, ..CopyRange::default() }.encode(into);
    }
    let bytes = data.len() as u32;
    CopyOperation::new(&plan(&copy_to(1, lba, ranges.len() as u16, bytes), table).unwrap(), table, &data)
}

#[test]
fn copy_validates_all_ranges_first() {
    let mut subsystem = subsystem();
    subsystem.namespaces[0].blocks = 200_000;
    let table = NamespaceTable::new(&subsystem, 0, &ControllerLimits::default());
    let out_of_range = Err(DNR(Status::LBA_OUT_OF_RANGE));
    let too_long = Err(DNR(Status::COMMAND_SIZE_LIMIT_EXCEEDED));
    type CopyCase = (&'static str, u64, &'static [(u64, u32)], Result<(), Status>);
    let rows: [CopyCase; 9] = [
        ("source beyond the end", 0, &[(10, 1), (199_999, 2)], out_of_range),
        ("source overflows", 0, &[(u64::MAX, 1)], out_of_range),
        ("destination beyond the end", 199_999, &[(0, 1), (1, 1)], out_of_range),
        ("more than MCL", 100_000, &[(0, 32_768), (40_000, 1)], too_long),
        ("more than MSSRL", 100_000, &[(0, 32_769)], too_long),
        ("source within the destination", 8, &[(100, 4), (9, 1)], Err(DNR(Status::INVALID_FIELD))),
        ("source overlaps the start of the destination", 8, &[(7, 2)], Err(DNR(Status::INVALID_FIELD))),
        ("adjacent", 8, &[(0, 8)], Ok(())),
        ("MCL", 100_000, &[(0, 32_000), (40_000, 768)], Ok(())),
    ];
    for (name, lba, ranges, expected) in rows {
        assert_eq!(copying(lba, ranges, &table).map(|_| ()), expected, "{name}");
    }
    let one = plan(&copy_to(1, 0, 2, 64), &table).unwrap();
    assert_eq!(CopyOperation::new(&one, &table, &[0; 63]), Err(DNR(Status::DATA_SGL_LENGTH_INVALID)));
}

#[test]
fn fused_operation_requires_adjacent_commands() {
    use NvmOpcode::{Compare, Write};
    let table = table();
    let missing = Status::FUSED_MISSING;
    let compare = fused(rw(Compare, 1, 7, 2, 1024), 1);
    let write = fused(rw(Write, 1, 7, 2, 1024), 2);
    let first = plan(&compare, &table).unwrap();
    let match_next = |pairing: &mut FusedPairing<u8>, sqe: &Sqe| pairing.match_next(sqe, &plan(sqe, &table));
    let pending = FusedPairing::FirstPending(5, first);
    let other_ranges = [rw(Write, 1, 8, 2, 1024), rw(Write, 1, 7, 1, 512), rw(Write, 3, 7, 2, 8192)];
    let mut rows = vec![
        (pending, write, FusedMatch::Matched(5, plan(&write, &table).unwrap())),
        (pending, compare, FusedMatch::FirstAborted(5, missing)),
        (pending, flush(1), FusedMatch::FirstAborted(5, missing)),
        (pending, fused(rw(Write, 4, 0, 1, 512), 2), {
            FusedMatch::BothAborted(5, Status::FUSED_FAILED, DNR(Status::NAMESPACE_WRITE_PROTECTED))
        }),
        (FusedPairing::FirstRejected, write, FusedMatch::Rejected(Status::FUSED_FAILED)),
        (FusedPairing::FirstRejected, flush(1), FusedMatch::Independent),
        (FusedPairing::None, write, FusedMatch::Rejected(missing)),
        (FusedPairing::None, flush(1), FusedMatch::Independent),
        (FusedPairing::None, compare, FusedMatch::Independent),
    ];
    let both_invalid = FusedMatch::BothAborted(5, DNR(Status::INVALID_FIELD), DNR(Status::INVALID_FIELD));
    rows.extend(other_ranges.map(|write| (pending, fused(write, 2), both_invalid)));
    for (mut pairing, sqe, expected) in rows {
        assert_eq!(match_next(&mut pairing, &sqe), expected, "{pairing:?} and {sqe:?}");
        assert!(!pairing.expects_second(), "the next command resets the pairing");
    }
}

proptest! {
    /// Compares with arithmetic that cannot overflow.
    #[test]
    fn block_range_must_fit_namespace_and_mdts(
        lba in prop_oneof![0..2100u64, u64::MAX - 300..=u64::MAX, any::<u64>()],
        blocks in 1..=300u32,
        length in prop_oneof![Just(None), (0..200_000u32).prop_map(Some)],
    ) {
        let bytes = length.unwrap_or(blocks * 512);
        let answer = plan(&rw(NvmOpcode::Read, 1, lba, blocks, bytes), &table());
        let expected = if u128::from(lba) + u128::from(blocks) > 2048 {
            Err(DNR(Status::LBA_OUT_OF_RANGE))
        } else if blocks > 256 {
            Err(DNR(Status::INVALID_FIELD))
        } else if bytes != blocks * 512 {
            Err(DNR(Status::DATA_SGL_LENGTH_INVALID))
        } else {
            Ok(())
        };
        prop_assert_eq!(answer.map(|plan| assert_eq!((plan.lba, plan.blocks), (lba, blocks))), expected);
    }

    /// The short path takes exactly the reads and writes that the plan transfers as they are; the matrix of
    /// reservations has its own test.
    #[test]
    fn plain_transfers_are_the_planned_ones(
        is_write in any::<bool>(),
        nsid in prop_oneof![Just(1u32), Just(3), Just(4), 0..=9u32],
        lba in prop_oneof![0..10u64, 250..2100u64, any::<u64>()],
        blocks in 1..=300u32,
        flags in prop_oneof![Just(0x40u8), Just(0), any::<u8>()],
        dword_12 in prop_oneof![Just(0u32), (16..32u32).prop_map(|bit| 1 << bit)],
        mptr in prop_oneof![Just(0u64), any::<u64>()],
        wrong_length in any::<bool>(),
        memory_based in any::<bool>(),
    ) {
        let table = NamespaceTable { memory_based, ..table() };
        let (opcode, op) =
            if is_write { (NvmOpcode::Write, Op::Write) } else { (NvmOpcode::Read, Op::Read) };
        let block_bytes = if nsid == 3 { 4096 } else { 512 };
        let bytes = blocks * block_bytes + u32::from(wrong_length);
        let plain = rw(opcode, nsid, lba, blocks, bytes);
        let sqe = Sqe { flags, mptr, cdw12: plain.cdw12 | dword_12, ..plain };
        let planned = plan(&sqe, &table).ok().filter(|plan| matches!(plan.op, IoOp::Read | IoOp::Write));
        let transfer = plain_transfer(&sqe, op, &table);
        prop_assert_eq!(transfer.map(PlainTransfer::plan), planned);
        if let Some(transfer) = transfer {
            let entry = table.entry(&transfer.plan());
            let expected = (op, blocks * block_bytes, entry.backend, entry.buffer_alignment);
            let PlainTransfer { op, bytes, backend, buffer_alignment, .. } = transfer;
            prop_assert_eq!((op, bytes, backend, buffer_alignment), expected);
        }
    }

    /// Compares with a list of all blocks.
    #[test]
    fn copies_cover_every_block_once_in_order(
        to in 1500..1600u64,
        ranges in prop::collection::vec((0..1000u64, 1..=300u32), 1..5),
    ) {
        let total: u64 = ranges.iter().map(|(_, blocks)| u64::from(*blocks)).sum();
        let table = table();
        let operation = copying(to, &ranges, &table);
        if to + total > 2048 {
            prop_assert_eq!(operation.map(|_| ()), Err(DNR(Status::LBA_OUT_OF_RANGE)));
            return Ok(());
        }
        let mut copying = operation.unwrap();
        let expected: Vec<u64> = ranges.iter().flat_map(|&(lba, blocks)| lba..lba + u64::from(blocks)).collect();
        let (mut got, mut index) = (Vec::new(), 0);
        while let Some(range) = copying.current_range() {
            prop_assert_eq!((copying.index(), range.to), (index, to + got.len() as u64));
            got.extend(range.from..range.from + u64::from(range.blocks));
            copying.complete_range();
            index += 1;
        }
        prop_assert_eq!(got, expected);
        prop_assert_eq!(copying.index() as usize, ranges.len());
    }
}

/// A table with one namespace of 64 blocks of 512 bytes and 8 or 16 bytes of interleaved metadata.
fn protected_table(bytes: u16, kind: Option<ProtectionType>) -> NamespaceTable {
    let mut subsystem = subsystem();
    let protection = kind.map(|kind| Protection::new(kind, false));
    subsystem.namespaces = vec![SubsystemNamespace {
        metadata: MetadataFormat { bytes, extended: true, protection },
        can_write_zeroes: true,
        ..SubsystemNamespace::new(1, 64)
    }];
    NamespaceTable::new(&subsystem, 1, &ControllerLimits::default())
}

#[test]
fn hidden_protection_is_the_devices_for_every_command() {
    use NvmOpcode::{Compare, Read, Verify, Write};
    let mut subsystem = subsystem();
    let checks = Prinfo::CHECK_GUARD | Prinfo::CHECK_REFERENCE_TAG;
    subsystem.namespaces =
        vec![SubsystemNamespace { hidden_protection: checks, ..SubsystemNamespace::new(1, 64) }];
    let table = NamespaceTable::new(&subsystem, 1, &ControllerLimits::default());
    let invalid = DNR(Status::INVALID_PROTECTION_INFORMATION);
    for (opcode, prinfo, length, expected) in [
        (Read, Prinfo::empty(), 1024, Ok(IoOp::ProtectedRead)),
        (Write, Prinfo::empty(), 1024, Ok(IoOp::ProtectedWrite)),
        (Verify, Prinfo::empty(), 0, Ok(IoOp::Verify)),
        (Write, Prinfo::empty(), 1040, Err(DNR(Status::DATA_SGL_LENGTH_INVALID))),
        (Compare, Prinfo::empty(), 1024, Err(DNR(Status::INVALID_OPCODE))),
        // Hosts see no protection information.
        (Read, Prinfo::CHECK_GUARD, 1024, Err(invalid)),
        (Write, Prinfo::ACTION, 1024, Err(invalid)),
    ] {
        let command = ReadWrite { lba: 7, blocks: 2, prinfo, ..ReadWrite::default() };
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(length), ..command.to_sqe(opcode) };
        let planned = plan(&sqe, &table);
        let ops = planned.map(|plan| plan.op);
        assert_eq!(ops, expected, "{opcode:?} {prinfo:?}");
        if let Ok(plan) = planned {
            assert_eq!(plan.protection, checks | Prinfo::ACTION, "{opcode:?}");
            assert_eq!(table.entry(&plan).block_bytes(plan.protection), 512);
        }
    }
    let out = rw(Read, 1, 63, 2, 1024);
    assert_eq!(plan(&out, &table), Err(DNR(Status::LBA_OUT_OF_RANGE)));
    assert!(super::plain_transfer(&rw(Read, 1, 7, 2, 1024), Op::Read, &table).is_none());
}

#[test]
fn commands_of_namespaces_with_metadata_transfer_it_unless_it_is_stripped() {
    use NvmOpcode::{Compare, Read, Verify, Write};
    let (action, guard, reference) = (Prinfo::ACTION, Prinfo::CHECK_GUARD, Prinfo::CHECK_REFERENCE_TAG);
    let none = Prinfo::empty();
    let invalid = DNR(Status::INVALID_PROTECTION_INFORMATION);
    let type1 = Some(ProtectionType::Type1);
    // Metadata, type, opcode, PRINFO, reference tag at LBA 7, bytes of two blocks; operation or status.
    let table = [
        (8, type1, Read, none, 0, 1040, Ok(IoOp::Read)),
        (8, type1, Write, none, 0, 1040, Ok(IoOp::Write)),
        (8, type1, Read, guard | reference, 7, 1040, Ok(IoOp::ProtectedRead)),
        (8, type1, Write, guard | reference, 7, 1040, Ok(IoOp::ProtectedWrite)),
        (8, type1, Read, action | guard, 7, 1024, Ok(IoOp::ProtectedRead)),
        (8, type1, Write, action, 7, 1024, Ok(IoOp::ProtectedWrite)),
        (8, type1, Write, action, 7, 1040, Err(DNR(Status::DATA_SGL_LENGTH_INVALID))),
        (8, type1, Write, none, 7, 1024, Err(DNR(Status::DATA_SGL_LENGTH_INVALID))),
        (16, type1, Write, action, 7, 1056, Ok(IoOp::ProtectedWrite)),
        (8, type1, Write, action, 8, 1024, Err(invalid)),
        (8, type1, Write, guard, 8, 1040, Ok(IoOp::ProtectedWrite)),
        (8, type1, Write, reference, 8, 1040, Err(invalid)),
        (8, Some(ProtectionType::Type2), Read, reference, 8, 1040, Err(invalid)),
        (8, Some(ProtectionType::Type3), Read, guard | reference, 8, 1040, Ok(IoOp::ProtectedRead)),
        (8, None, Read, none, 0, 1040, Ok(IoOp::Read)),
        (8, None, Read, guard, 0, 1040, Err(invalid)),
        (8, type1, Compare, none, 0, 1040, Ok(IoOp::Compare)),
        (8, type1, Compare, guard, 0, 1040, Err(invalid)),
        (8, type1, Verify, guard | reference, 7, 0, Ok(IoOp::Verify)),
    ];
    for (bytes, kind, opcode, prinfo, reference_tag, length, expected) in table {
        let command = ReadWrite {
            lba: 7,
            blocks: 2,
            prinfo,
            reference_tag,
            application_tag: 0x1234,
            application_tag_mask: 0xff00,
            ..ReadWrite::default()
        };
        let sqe = Sqe { nsid: 1, data: DataPointer::transport(length), ..command.to_sqe(opcode) };
        let planned = plan(&sqe, &protected_table(bytes, kind));
        let text = format!("{opcode:?} {prinfo:?} of {length} bytes, {bytes} bytes of metadata, {kind:?}");
        assert_eq!(planned.map(|plan| plan.op), expected, "{text}");
        if let Ok(plan) = planned {
            let tags = (plan.protection, plan.application_tag, plan.application_mask);
            assert_eq!(tags, (prinfo, 0x1234, 0xff00), "{text}");
        }
    }
    let out = rw(Read, 1, 63, 2, 1040);
    assert_eq!(plan(&out, &protected_table(8, type1)), Err(DNR(Status::LBA_OUT_OF_RANGE)));
    let zeroes = WriteZeroes { lba: 1, blocks: 2, fua: false, deallocate: false, prinfo: action };
    let zeroes = Sqe { nsid: 1, ..zeroes.to_sqe() };
    assert_eq!(plan(&zeroes, &protected_table(8, type1)).map(|plan| plan.op), Ok(IoOp::WriteZeroes));
    assert_eq!(plan(&zeroes, &protected_table(8, None)), Err(invalid));
}

#[test]
fn commands_of_extended_formats_have_wider_tags() {
    let (action, reference) = (Prinfo::ACTION, Prinfo::CHECK_REFERENCE_TAG);
    let invalid = DNR(Status::INVALID_PROTECTION_INFORMATION);
    // An LBA beyond 32 bits.
    const LBA: u64 = 5 << 32 | 7;
    for (guard, first_wrong) in
        [(GuardFormat::Crc64, 7), (GuardFormat::Crc32, 7), (GuardFormat::Crc16, LBA ^ 1)]
    {
        let protection = Protection::new(ProtectionType::Type1, false).with_guard(guard);
        let bytes = guard.bytes() as u16;
        let mut subsystem = subsystem();
        subsystem.namespaces = vec![SubsystemNamespace {
            metadata: MetadataFormat { bytes, extended: true, protection: Some(protection) },
            ..SubsystemNamespace::new(1, 1 << 40)
        }];
        let table = NamespaceTable::new(&subsystem, 1, &ControllerLimits::default());
        let planned = |prinfo, reference_tag, storage_tag_check| {
            let command =
                ReadWrite { lba: LBA, blocks: 2, prinfo, storage_tag_check, ..ReadWrite::default() };
            let length = 2 * table.entries[0].block_bytes(prinfo);
            let data = DataPointer::transport(length);
            let mut sqe = Sqe { nsid: 1, data, ..command.to_sqe(NvmOpcode::Read) };
            wire_nvme::io::set_block_tags(&mut sqe, &protection, 0xbeef, reference_tag);
            plan(&sqe, &table)
        };
        assert_eq!(planned(action | reference, LBA, false).map(|plan| plan.op), Ok(IoOp::ProtectedRead));
        assert_eq!(planned(action | reference, first_wrong, false), Err(invalid), "{guard:?}");
        let checked = planned(reference, LBA, true);
        match guard {
            GuardFormat::Crc32 => {
                let plan = checked.unwrap();
                assert_eq!(plan.protection, reference | Prinfo::CHECK_STORAGE_TAG);
                assert_eq!(plan.storage_tag, 0xbeef);
                let only = planned(Prinfo::empty(), LBA, true).unwrap();
                assert_eq!((only.op, only.protection), (IoOp::ProtectedRead, Prinfo::CHECK_STORAGE_TAG));
            }
            // There is no storage tag to check.
            _ => assert_eq!(checked, Err(invalid), "{guard:?}"),
        }
    }
}
