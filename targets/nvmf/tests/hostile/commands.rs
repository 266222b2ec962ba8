//! Invalid and unusual commands: the command completes with an error, the connection stays.

use block_io::Status;
use wire_nvme::sqe::Sgl;
use wire_nvme::tcp::{FatalError, FatalStatus, R2t};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{RawTcpHost, ReceivedPdu, h2c_data, pattern, read, write, write_in_capsule};
use crate::test_target::TcpTestTarget;

#[test]
fn every_h2cdata_digest_of_a_write_is_checked() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, true);
    let old = pattern(65536, 1);
    let new = pattern(65536, 2);
    let cuts = [0, 512, 516, 20_000, 20_004, 65_000, 65_536];
    let mut put = |data: &[u8], corrupt: Option<usize>| {
        peer.capsule(write(1, 0, data.len()), &[]);
        let r2t = peer.expect_r2t();
        assert_eq!((r2t.offset, r2t.length), (0, 65536));
        for (n, cut) in cuts.windows(2).enumerate() {
            let mut pdu =
                h2c_data(&peer.framing, &r2t, cut[0] as u32, &data[cut[0]..cut[1]], cut[1] == 65536);
            if corrupt == Some(n) {
                // The data starts after the header and the header digest.
                pdu[28] ^= 1;
            }
            peer.send(&pdu);
        }
        let status = peer.expect_response().status;
        (status, peer.read_back(1, 0, 65536).unwrap())
    };
    assert_eq!(put(&old, None), (Status::SUCCESS, old.clone()));
    for corrupt in 0..cuts.len() - 1 {
        let (status, medium) = put(&new, Some(corrupt));
        assert!(status.same_code(Status::TRANSIENT_TRANSPORT_ERROR), "PDU {corrupt}: {status}");
        assert!(!status.is_do_not_retry());
        assert!(medium == old, "PDU {corrupt}: nothing of a command with a wrong digest is written");
    }
    assert_eq!(put(&new, None), (Status::SUCCESS, new.clone()));
}

#[test]
fn a_data_digest_error_of_in_capsule_data_fails_only_the_command() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, true);
    assert_eq!(peer.write(1, 0, &pattern(4096, 1)), Status::SUCCESS);
    let mut pdu = crate::peer::capsule(&peer.framing, write_in_capsule(1, 0, 4096), &pattern(4096, 2));
    *pdu.last_mut().unwrap() ^= 0x80;
    peer.send(&pdu);
    let status = peer.expect_response().status;
    assert!(status.same_code(Status::TRANSIENT_TRANSPORT_ERROR), "{status}");
    assert_eq!(peer.read_back(1, 0, 4096), Ok(pattern(4096, 1)));
}

#[test]
fn a_write_that_fits_in_a_capsule_may_use_r2t() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    for (qid, digests) in [(1, false), (2, true)] {
        let mut peer = RawTcpHost::io(&rig, &admin, qid, 16, digests);
        for bytes in [512, 4096, 8192] {
            let data = pattern(bytes, qid as u8);
            peer.capsule(write(1, 8, bytes), &[]);
            let r2t = peer.expect_r2t();
            assert_eq!((r2t.cccid, r2t.offset, r2t.length), (7, 0, bytes as u32));
            peer.data(&r2t, 0, &data, true);
            assert_eq!(peer.expect_response().status, Status::SUCCESS);
            assert_eq!(peer.read_back(1, 8, bytes), Ok(data));
        }
    }
}

#[test]
fn data_may_start_anywhere_in_the_capsule() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    for (qid, digests) in [(1, false), (2, true)] {
        let mut peer = RawTcpHost::io(&rig, &admin, qid, 16, digests);
        for (offset, bytes, behind) in
            [(4, 512, 0), (512, 4096, 0), (4096, 4096, 0), (100, 512, 100), (7680, 512, 0)]
        {
            let capsule = pattern(offset + bytes + behind, offset as u8);
            let sqe = Sqe { data: DataPointer::capsule(offset as u64, bytes as u32), ..write(1, 0, bytes) };
            assert_eq!(peer.command(sqe, &capsule).status, Status::SUCCESS);
            let medium = peer.read_back(1, 0, bytes).unwrap();
            assert!(medium == capsule[offset..offset + bytes], "{bytes} bytes at {offset}");
        }
    }
}

type ModifyWrite = fn(&mut Sqe);

const INVALID_WRITES: &[(&str, ModifyWrite, Status)] = &[
    (
        "a data block",
        |sqe| sqe.data = Sgl::DataBlock { address: 0, length: 4096 }.into(),
        Status::SGL_TYPE_INVALID,
    ),
    (
        "a keyed block",
        |sqe| sqe.data = Sgl::Keyed { address: 0, length: 4096, key: 0x100, invalidate: false }.into(),
        Status::SGL_TYPE_INVALID,
    ),
    (
        "a segment",
        |sqe| sqe.data = Sgl::Segment { offset: true, last: true, address: 0, length: 4096 }.into(),
        Status::SGL_TYPE_INVALID,
    ),
    ("an invalid SGL identifier", |sqe| sqe.data.high |= 0xff << 56, Status::SGL_TYPE_INVALID),
    ("an offset after the capsule", |sqe| sqe.data.low = 4097, Status::SGL_OFFSET_INVALID),
    ("an offset far after the capsule", |sqe| sqe.data.low = u64::MAX, Status::SGL_OFFSET_INVALID),
    ("an end after the capsule", |sqe| sqe.data.low = 512, Status::DATA_SGL_LENGTH_INVALID),
    (
        "fewer bytes than blocks",
        |sqe| sqe.data = DataPointer::capsule(0, 3584),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    (
        "more bytes than blocks",
        |sqe| sqe.data = DataPointer::transport(8192),
        Status::DATA_SGL_LENGTH_INVALID,
    ),
    ("no bytes", |sqe| sqe.data = DataPointer::capsule(0, 0), Status::DATA_SGL_LENGTH_INVALID),
    (
        "more than MDTS",
        |sqe| {
            sqe.cdw12 = 256;
            sqe.data = DataPointer::transport(257 * 512);
        },
        Status::INVALID_FIELD,
    ),
    ("the maximum number of blocks", |sqe| sqe.cdw12 = 0xffff, Status::LBA_OUT_OF_RANGE),
    ("the last block and one more", |sqe| sqe.cdw10 = 16384 - 7, Status::LBA_OUT_OF_RANGE),
    (
        "an LBA that wraps around",
        |sqe| (sqe.cdw10, sqe.cdw11) = (u32::MAX, u32::MAX),
        Status::LBA_OUT_OF_RANGE,
    ),
    ("FUSE 01b", |sqe| sqe.flags |= 1, Status::INVALID_FIELD),
    ("FUSE 10b", |sqe| sqe.flags |= 2, Status::FUSED_MISSING),
    ("FUSE 11b", |sqe| sqe.flags |= 3, Status::INVALID_FIELD),
    ("PSDT 00b", |sqe| sqe.flags = 0, Status::INVALID_FIELD),
    ("PSDT 10b", |sqe| sqe.flags = 0x80, Status::INVALID_FIELD),
    ("PSDT 11b", |sqe| sqe.flags = 0xc0, Status::INVALID_FIELD),
    ("namespace 0", |sqe| sqe.nsid = 0, Status::INVALID_NAMESPACE_OR_FORMAT),
    ("namespace 2", |sqe| sqe.nsid = 2, Status::INVALID_NAMESPACE_OR_FORMAT),
    ("every namespace", |sqe| sqe.nsid = u32::MAX, Status::INVALID_NAMESPACE_OR_FORMAT),
    ("protection information", |sqe| sqe.cdw12 |= 1 << 29, Status::INVALID_PROTECTION_INFORMATION),
    ("an unsupported opcode", |sqe| sqe.opcode = 0x7e, Status::INVALID_OPCODE),
];

#[test]
fn an_invalid_command_fails_and_its_data_is_discarded() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let medium = pattern(4096, 1);
    assert_eq!(peer.write(1, 0, &medium), Status::SUCCESS);
    for (what, modify, status) in INVALID_WRITES {
        let mut sqe = write_in_capsule(1, 0, 4096);
        modify(&mut sqe);
        // With in-capsule data, and without.
        for data in [&pattern(4096, 2)[..], &[]] {
            let answer = peer.command(sqe, data);
            let expected = match data {
                [] if sqe.data.identifier() == DataPointer::CAPSULE
                    && *what == "an end after the capsule" =>
                {
                    Status::SGL_OFFSET_INVALID
                }
                _ => *status,
            };
            assert!(answer.status.same_code(expected), "{what}: {answer:?}");
        }
        assert!(peer.read_back(1, 0, 4096).as_ref() == Ok(&medium), "{what}: the medium is changed");
    }
}

#[test]
fn a_read_requires_a_transport_sgl_descriptor() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    for (data, status) in [
        (DataPointer::capsule(0, 4096), Status::SGL_TYPE_INVALID),
        (Sgl::DataBlock { address: 0, length: 4096 }.into(), Status::SGL_TYPE_INVALID),
        (Sgl::BitBucket { length: 4096 }.into(), Status::SGL_TYPE_INVALID),
        (DataPointer::transport(4095), Status::DATA_SGL_LENGTH_INVALID),
        (DataPointer::transport(0), Status::DATA_SGL_LENGTH_INVALID),
    ] {
        let answer = peer.command(Sqe { data, ..read(1, 0, 4096) }, &[]);
        assert!(answer.status.same_code(status), "{data:?}: {answer:?}");
    }
    let beyond = Sqe { cdw12: 256, data: DataPointer::transport(257 * 512), ..read(1, 0, 4096) };
    assert!(peer.command(beyond, &[]).status.same_code(Status::INVALID_FIELD), "more than MDTS");
    peer.round_trip(1);
}

#[test]
fn commands_with_the_same_cid_all_complete() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 64, false);
    for _ in 0..40 {
        peer.capsule(write(1, 0, 512), &[]);
    }
    let r2ts: Vec<R2t> = (0..40).map(|_| peer.expect_r2t()).collect();
    for (n, r2t) in r2ts.iter().enumerate() {
        assert_eq!(r2t.cccid, 7);
        peer.data(r2t, 0, &pattern(512, n as u8), true);
    }
    for _ in 0..40 {
        assert_eq!(peer.expect_response().status, Status::SUCCESS);
    }
    peer.round_trip(1);
}

#[test]
fn exceeding_the_queue_depth_closes_only_that_connection() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let mut peer = RawTcpHost::io(&rig, &admin, 2, 4, false);
    // As many commands as entries, one more than a ring queue can hold.
    for n in 0..4 {
        peer.capsule(Sqe { cid: n, ..write(1, 0, 4096) }, &[]);
    }
    let r2ts: Vec<R2t> = (0..4).map(|_| peer.expect_r2t()).collect();
    peer.data(&r2ts[0], 0, &pattern(4096, 0), true);
    assert_eq!(peer.expect_response().status, Status::SUCCESS);
    peer.capsule(write(1, 0, 4096), &[]);
    peer.expect_r2t();
    other.round_trip(2);
    peer.capsule(write(1, 0, 4096), &[]);
    let ReceivedPdu::Term(fatal, _) = peer.receive_pdu() else { panic!("a fifth command is accepted") };
    assert_eq!(fatal, FatalError::from_status(FatalStatus::SequenceError));
    peer.receive_until_closed();
    let mut again = None;
    crate::test_target::wait_until("queue 2 can be connected again", || {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (sqe, data) = crate::peer::connect(2, 4, admin.cntlid);
        let connected = peer.command(sqe, &data).status.is_success();
        again = Some(peer);
        connected
    });
    again.unwrap().round_trip(3);
    other.round_trip(4);
}
