use proptest::prelude::*;
use wire_nvme::DataPointer;
use wire_nvme::fabrics::{Connect, Disconnect, PropertyGet};
use wire_nvme::io::{Prinfo, ReadWrite, WriteZeroes};

use super::*;
use crate::harness::subsystem;
use crate::{Listener, Namespace};

const DNR: fn(Status) -> Status = Status::do_not_retry;

/// Namespace 1 has 2048 blocks of 512 bytes and can do everything, 3 has 256 blocks of 4096 bytes and
/// cannot unmap, 4 is read-only and can do nothing else, 5 to 7 are behind ANA groups that are not
/// reachable.
fn table() -> NamespaceTable {
    let mut subsystem = subsystem();
    subsystem.namespaces.push(Namespace {
        read_only: true,
        can_unmap: true,
        can_write_zeroes: true,
        ..Namespace::new(4, 64)
    });
    for (nsid, anagrpid) in [(5, 5), (6, 6), (7, 7)] {
        subsystem.namespaces.push(Namespace { anagrpid, ..Namespace::new(nsid, 64) });
    }
    subsystem.ana_reporting = true;
    let ana = vec![(5, AnaState::Inaccessible), (6, AnaState::PersistentLoss), (7, AnaState::Change)];
    subsystem.listeners = vec![Listener { portid: 1, ana }];
    NamespaceTable::new(&subsystem, 1, &Limits::default())
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
    let command = WriteZeroes { lba, blocks, fua: false, deallocate: false, prinfo: Prinfo(0) };
    Sqe { nsid, ..command.to_sqe() }
}

fn flush(nsid: u32) -> Sqe {
    Sqe { nsid, ..Sqe::new(NvmOpcode::Flush.to_wire()) }
}

#[test]
fn commands_become_plans() {
    use NvmOpcode::{Compare, Read, Verify, Write};
    let fua = |sqe: Sqe| Sqe { cdw12: sqe.cdw12 | FUA, ..sqe };
    let deac = |sqe: Sqe| Sqe { cdw12: sqe.cdw12 | DEAC, ..sqe };
    let on = |op, namespace, lba, blocks, data| Plan { op, namespace, lba, blocks, data, flags: Flags::NONE };
    let rows = [
        ("read", rw(Read, 1, 16, 8, 4096), on(Op::Read, 0, 16, 8, Transfer::ToHost(4096))),
        ("last block", rw(Read, 1, 2047, 1, 512), on(Op::Read, 0, 2047, 1, Transfer::ToHost(512))),
        ("all of MDTS", rw(Read, 1, 0, 256, 128 << 10), on(Op::Read, 0, 0, 256, Transfer::ToHost(128 << 10))),
        (
            "limited retry",
            Sqe { cdw12: 1 << 31, ..rw(Read, 1, 0, 1, 512) },
            on(Op::Read, 0, 0, 1, Transfer::ToHost(512)),
        ),
        ("write", rw(Write, 3, 255, 1, 4096), on(Op::Write, 2, 255, 1, Transfer::FromHost(4096))),
        (
            "write through",
            fua(rw(Write, 3, 1, 2, 8192)),
            Plan { flags: Flags::FUA, ..on(Op::Write, 2, 1, 2, Transfer::FromHost(8192)) },
        ),
        // What the data pointer says has no meaning.
        ("verify", rw(Verify, 1, 7, 256, 0), on(Op::Verify, 0, 7, 256, Transfer::None)),
        ("verify, read-only", rw(Verify, 4, 0, 1, 99), on(Op::Verify, 3, 0, 1, Transfer::None)),
        ("compare", rw(Compare, 1, 7, 2, 1024), on(Op::Compare, 0, 7, 2, Transfer::FromHost(1024))),
        ("flush", flush(3), on(Op::Flush, 2, 0, 0, Transfer::None)),
        ("flush of all", flush(NSID_ALL), on(Op::FlushAll, 0, 0, 0, Transfer::None)),
        ("zeroes", zeroes(1, 0, 2048), on(Op::WriteZeroes, 0, 0, 2048, Transfer::None)),
        (
            "zeroes that deallocate, through",
            fua(deac(zeroes(3, 1, 1))),
            Plan {
                flags: Flags::FUA.with(Flags::DEALLOCATE),
                ..on(Op::WriteZeroes, 2, 1, 1, Transfer::None)
            },
        ),
        ("deallocate", dsm(1, 2, true, 32), on(Op::Unmap, 0, 0, 2, Transfer::FromHost(32))),
        ("deallocate as Linux", dsm(1, 1, true, 4096), on(Op::Unmap, 0, 0, 1, Transfer::FromHost(4096))),
        ("deallocate in vain", dsm(3, 1, true, 16), on(Op::Nothing, 2, 0, 1, Transfer::FromHost(16))),
        ("advice", dsm(4, 256, false, 4096), on(Op::Nothing, 3, 0, 256, Transfer::FromHost(4096))),
        ("disconnect", Disconnect { record_format: 0 }.to_sqe(), on(Op::Disconnect, 0, 0, 0, Transfer::None)),
    ];
    let table = table();
    for (name, sqe, expected) in rows {
        assert_eq!(plan(&sqe, &table), Ok(expected), "{name}");
    }
}

#[test]
fn wrong_commands_are_refused_for_their_reason() {
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
        ("write uncorrectable", Sqe { opcode: 0x04, ..good }, DNR(Status::INVALID_OPCODE)),
        ("copy", Sqe { opcode: 0x19, ..good }, DNR(Status::INVALID_OPCODE)),
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
    // Write Zeroes where it is not supported.
    let mut poor = subsystem();
    poor.namespaces[0].can_write_zeroes = false;
    let poor = NamespaceTable::new(&poor, 0, &Limits::default());
    assert_eq!(plan(&zeroes(1, 0, 1), &poor), Err(DNR(Status::INVALID_OPCODE)));
}

#[test]
fn tables_say_where_data_goes() {
    let table = table();
    let plan = plan(&rw(NvmOpcode::Read, 3, 0, 1, 4096), &table).unwrap();
    assert_eq!((table.entry(&plan).backend, table.entry(&plan).block_log2), (33, 12));
    assert_eq!(table.backends().collect::<Vec<_>>(), [11, 33, 0, 0, 0, 0]);
}

#[test]
fn ranges_are_all_checked_before_the_first_is_deallocated() {
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
        Ok(unmaps(&plan_of(ranges.len() as u16), &table, &data(ranges))?.collect())
    };
    assert_eq!(list(&[(0, 8), (100, 0), (2047, 1)]), Ok(vec![(0, 8), (2047, 1)]));
    assert_eq!(list(&[(0, 2048)]), Ok(vec![(0, 2048)]));
    for bad in [(2048, 1), (1, 2048), (u64::MAX, 1), (u64::MAX - 1, u32::MAX), (2049, 0)] {
        assert_eq!(list(&[(0, 8), bad]), Err(DNR(Status::LBA_OUT_OF_RANGE)), "{bad:?}");
    }
    let short = unmaps(&plan_of(2), &table, &[0; 31]).map(Iterator::count);
    assert_eq!(short, Err(DNR(Status::DATA_SGL_LENGTH_INVALID)));
    assert_eq!(compare(b"same", b"same"), Status::SUCCESS);
    assert_eq!(compare(b"same", b"diff"), DNR(Status::COMPARE_FAILURE));
}

proptest! {
    /// Against arithmetic that cannot overflow.
    #[test]
    fn ranges_are_accepted_exactly_when_they_fit(
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
}
