//! Which commands a reservation denies to which hosts.

use block_io::Op;

use super::*;

/// Base 2.0, section 8.19, Command Behavior in the Presence of a Reservation: for each type the rows are read
/// and write, the columns other hosts, registrants, and holders; `A` is allowed and `C` a conflict.
const MATRIX: [(ReservationType, [&str; 2]); 6] = [
    (ReservationType::WriteExclusive, ["AAA", "CCA"]),
    (ReservationType::ExclusiveAccess, ["CCA", "CCA"]),
    (ReservationType::WriteExclusiveRegistrants, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessRegistrants, ["CAA", "CAA"]),
    (ReservationType::WriteExclusiveAll, ["AAA", "CAA"]),
    (ReservationType::ExclusiveAccessAll, ["CAA", "CAA"]),
];

/// Every command class of the specification's table, for every reservation type and role of the host.
#[test]
fn reservation_conflicts_match_the_specification() {
    use wire_nvme::io::{DatasetManagement, ReadWrite, WriteZeroes};
    use wire_nvme::opcode::NvmOpcode::{Compare, Flush, Read, Verify, Write};
    let rw = |opcode| Sqe {
        data: DataPointer::transport(512),
        ..ReadWrite { blocks: 1, ..ReadWrite::default() }.to_sqe(opcode)
    };
    let dsm = |deallocate| {
        let view = DatasetManagement { ranges: 1, integral_read: false, integral_write: false, deallocate };
        Sqe { data: DataPointer::transport(16), ..view.to_sqe() }
    };
    let zeroes = WriteZeroes {
        lba: 0,
        blocks: 1,
        fua: false,
        deallocate: false,
        prinfo: wire_nvme::io::Prinfo::empty(),
    };
    let flush = Sqe { data: DataPointer::transport(0), ..Sqe::new(Flush.to_wire()) };
    let all = Sqe { nsid: NSID_ALL, ..flush };
    let classes: [(usize, &[(&str, Sqe)]); 2] = [
        (0, &[("read", rw(Read)), ("compare", rw(Compare)), ("verify", rw(Verify))]),
        (
            1,
            &[
                ("write", rw(Write)),
                ("write zeroes", zeroes.to_sqe()),
                ("flush", flush),
                ("flush of all", all),
                ("deallocate", dsm(true)),
                ("access hints", dsm(false)),
            ],
        ),
    ];
    for (kind, rows) in MATRIX {
        let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
        let [other, registrant, holder] = [C, B, A].map(|host| test_host(&directory, &subsystem, host));
        registrant.register(0xb);
        holder.register(0xa);
        let sqe = acquire(AcquireAction::Acquire, kind).to_sqe();
        assert_eq!(holder.execute(sqe, &encode_keys(0xa, 0)), Status::SUCCESS);
        for (row, commands) in classes {
            for (member, expected) in [&other, &registrant, &holder].into_iter().zip(rows[row].bytes()) {
                for (name, sqe) in commands {
                    let sqe = Sqe { nsid: if sqe.nsid == 0 { 1 } else { sqe.nsid }, ..*sqe };
                    let answer = io::plan(&sqe, &member.table).map(|_| ());
                    let expected = if expected == b'A' { Ok(()) } else { Err(CONFLICT) };
                    assert_eq!(
                        answer, expected,
                        "{kind:?}: {name} of {:?}",
                        member.admin.registration.association
                    );
                    // The other namespace is not reserved.
                    if sqe.nsid == 1 && *name != "deallocate" {
                        let data =
                            if sqe.data.length() == 512 { DataPointer::transport(4096) } else { sqe.data };
                        assert!(io::plan(&Sqe { nsid: 3, data, ..sqe }, &member.table).is_ok(), "{name}");
                    }
                    let op = match *name {
                        "read" => Op::Read,
                        "write" => Op::Write,
                        _ => continue,
                    };
                    let transfer = io::plain_transfer(&sqe, op, &member.table);
                    assert_eq!(transfer.is_some(), expected.is_ok(), "{kind:?}: short path of {name}");
                }
            }
        }
        // Every host may send Register and Report; Acquire and Release require a registrant.
        other.register(0xc);
        let sqe = release(ReleaseAction::Release, kind).to_sqe();
        let stranger = test_host(&directory, &subsystem, [9; 16]);
        assert_eq!(stranger.execute(sqe, &0xau64.to_le_bytes()), CONFLICT);
        assert_eq!(
            stranger.execute(acquire(AcquireAction::Preempt, kind).to_sqe(), &encode_keys(0, 0xa)),
            CONFLICT
        );
        assert_eq!(holder.execute(sqe, &0xau64.to_le_bytes()), Status::SUCCESS);
        assert!(io::plan(&Sqe { nsid: 1, ..rw(Write) }, &stranger.table).is_ok(), "nothing is reserved");
    }
}

#[test]
fn deferred_plan_is_checked_against_new_reservation() {
    let (directory, subsystem) = (Arc::new(ControllerDirectory::new()), Arc::new(subsystem()));
    let [one, other] = [A, B].map(|host| test_host(&directory, &subsystem, host));
    let write = wire_nvme::io::ReadWrite { blocks: 1, ..Default::default() }.to_sqe(NvmOpcode::Write);
    let write = Sqe { nsid: 1, data: DataPointer::transport(512), ..write };
    let plan = io::plan(&write, &other.table).unwrap();
    one.register(7);
    let sqe = acquire(AcquireAction::Acquire, ReservationType::WriteExclusive).to_sqe();
    assert_eq!(one.execute(sqe, &encode_keys(7, 0)), Status::SUCCESS);
    assert_eq!(other.table.check_reservation(&plan), Err(CONFLICT));
    assert_eq!(one.table.check_reservation(&plan), Ok(()));
}
