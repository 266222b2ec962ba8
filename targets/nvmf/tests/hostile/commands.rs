//! Commands that are wrong or unusual: the command is answered, the connection stays.

use ring::Status;
use wire_nvme::sqe::Sgl;
use wire_nvme::tcp::{Fatal, FatalStatus, R2t};
use wire_nvme::{DataPointer, Sqe};

use crate::peer::{Peer, Said, h2c_data, pattern, read, write, write_in_capsule};
use crate::rig::Rig;

#[test]
fn data_in_several_pdus_is_checked_digest_by_digest() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, true);
    let old = pattern(65536, 1);
    let new = pattern(65536, 2);
    let cuts = [0, 512, 516, 20_000, 20_004, 65_000, 65_536];
    let mut put = |data: &[u8], corrupt: Option<usize>| {
        peer.capsule(write(1, 0, data.len()), &[]);
        let r2t = peer.hear_r2t();
        assert_eq!((r2t.offset, r2t.length), (0, 65536));
        for (n, cut) in cuts.windows(2).enumerate() {
            let mut pdu =
                h2c_data(&peer.framing, &r2t, cut[0] as u32, &data[cut[0]..cut[1]], cut[1] == 65536);
            if corrupt == Some(n) {
                // Behind header and header digest comes the data.
                pdu[28] ^= 1;
            }
            peer.send(&pdu);
        }
        let status = peer.hear_response().status;
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
fn a_wrong_digest_of_in_capsule_data_fails_the_command_only() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, true);
    assert_eq!(peer.write(1, 0, &pattern(4096, 1)), Status::SUCCESS);
    let mut pdu = crate::peer::capsule(&peer.framing, write_in_capsule(1, 0, 4096), &pattern(4096, 2));
    *pdu.last_mut().unwrap() ^= 0x80;
    peer.send(&pdu);
    let status = peer.hear_response().status;
    assert!(status.same_code(Status::TRANSIENT_TRANSPORT_ERROR), "{status}");
    assert_eq!(peer.read_back(1, 0, 4096), Ok(pattern(4096, 1)));
}

#[test]
fn a_write_that_would_fit_its_capsule_may_be_fetched() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    for (qid, digests) in [(1, false), (2, true)] {
        let mut peer = Peer::io(&rig, &admin, qid, 16, digests);
        for bytes in [512, 4096, 8192] {
            let data = pattern(bytes, qid as u8);
            peer.capsule(write(1, 8, bytes), &[]);
            let r2t = peer.hear_r2t();
            assert_eq!((r2t.cccid, r2t.offset, r2t.length), (7, 0, bytes as u32));
            peer.data(&r2t, 0, &data, true);
            assert_eq!(peer.hear_response().status, Status::SUCCESS);
            assert_eq!(peer.read_back(1, 8, bytes), Ok(data));
        }
    }
}

#[test]
fn data_may_start_anywhere_in_the_capsule() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    for (qid, digests) in [(1, false), (2, true)] {
        let mut peer = Peer::io(&rig, &admin, qid, 16, digests);
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

type Spoil = fn(&mut Sqe);

const SPOILT_WRITES: &[(&str, Spoil, Status)] = &[
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
    ("an identifier that is none", |sqe| sqe.data.high |= 0xff << 56, Status::SGL_TYPE_INVALID),
    ("an offset behind the capsule", |sqe| sqe.data.low = 4097, Status::SGL_OFFSET_INVALID),
    ("an offset far behind", |sqe| sqe.data.low = u64::MAX, Status::SGL_OFFSET_INVALID),
    ("an end behind the capsule's", |sqe| sqe.data.low = 512, Status::DATA_SGL_LENGTH_INVALID),
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
    ("as many blocks as there can be", |sqe| sqe.cdw12 = 0xffff, Status::LBA_OUT_OF_RANGE),
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
    ("an opcode of nothing", |sqe| sqe.opcode = 0x7e, Status::INVALID_OPCODE),
];

#[test]
fn a_command_that_is_wrong_is_answered_and_its_data_dropped() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, false);
    let medium = pattern(4096, 1);
    assert_eq!(peer.write(1, 0, &medium), Status::SUCCESS);
    for (what, spoil, status) in SPOILT_WRITES {
        let mut sqe = write_in_capsule(1, 0, 4096);
        spoil(&mut sqe);
        // With its data in the capsule, and with none.
        for data in [&pattern(4096, 2)[..], &[]] {
            let answer = peer.command(sqe, data);
            let expected = match data {
                [] if sqe.data.identifier() == DataPointer::CAPSULE
                    && *what == "an end behind the capsule's" =>
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
fn a_read_needs_a_descriptor_for_the_transport() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, false);
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
fn commands_under_one_identifier_are_all_answered() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 64, false);
    for _ in 0..40 {
        peer.capsule(write(1, 0, 512), &[]);
    }
    let asked: Vec<R2t> = (0..40).map(|_| peer.hear_r2t()).collect();
    for (n, r2t) in asked.iter().enumerate() {
        assert_eq!(r2t.cccid, 7);
        peer.data(r2t, 0, &pattern(512, n as u8), true);
    }
    for _ in 0..40 {
        assert_eq!(peer.hear_response().status, Status::SUCCESS);
    }
    peer.round_trip(1);
}

#[test]
fn more_commands_than_entries_end_the_connection_and_harm_nobody() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, false);
    let mut peer = Peer::io(&rig, &admin, 2, 4, false);
    // As many as there are entries, which is one more than a queue of a ring can hold.
    for n in 0..4 {
        peer.capsule(Sqe { cid: n, ..write(1, 0, 4096) }, &[]);
    }
    let asked: Vec<R2t> = (0..4).map(|_| peer.hear_r2t()).collect();
    peer.data(&asked[0], 0, &pattern(4096, 0), true);
    assert_eq!(peer.hear_response().status, Status::SUCCESS);
    peer.capsule(write(1, 0, 4096), &[]);
    peer.hear_r2t();
    other.round_trip(2);
    peer.capsule(write(1, 0, 4096), &[]);
    let Said::Term(fatal, _) = peer.hear() else { panic!("a fifth command is taken") };
    assert_eq!(fatal, Fatal::of(FatalStatus::SequenceError));
    peer.hear_end();
    let mut again = None;
    crate::rig::eventually("queue 2 is free again", || {
        let mut peer = Peer::initialized(&rig, false);
        let (sqe, data) = crate::peer::connect(2, 4, admin.cntlid);
        let connected = peer.command(sqe, &data).status.is_success();
        again = Some(peer);
        connected
    });
    again.unwrap().round_trip(3);
    other.round_trip(4);
}
