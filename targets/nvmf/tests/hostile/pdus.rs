//! PDUs that violate the transport's rules close their connection with a C2HTermReq.

use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::tcp::{FatalError, FatalStatus, Framing, PduType, R2t};

use crate::peer::{RawTcpHost, ReceivedPdu, capsule, connect, h2c_data, ic_req, write, write_in_capsule};
use crate::test_target::TcpTestTarget;

/// State of a connection before the invalid PDU is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    New,
    Initialized,
    InitializedWithDigests,
    Admin,
    Io,
    IoWithDigests,
    /// An I/O queue with an outstanding R2T for 16 KiB.
    R2tOutstanding,
}

/// Builds the PDU to send, given the outstanding R2T if there is one.
type Pdu = fn(&R2t) -> Vec<u8>;

const fn of(status: FatalStatus) -> FatalError {
    FatalError::from_status(status)
}

/// A PDU with one byte changed.
fn with_byte(mut pdu: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
    pdu[at] = byte;
    pdu
}

fn with_length(mut pdu: Vec<u8>, length: u32) -> Vec<u8> {
    pdu[4..8].copy_from_slice(&length.to_le_bytes());
    pdu
}

fn ic() -> Vec<u8> {
    ic_req(false).to_vec()
}

/// A header of a PDU type, without a body.
fn bare(kind: u8, hlen: u8) -> Vec<u8> {
    let mut pdu = vec![0; hlen.into()];
    (pdu[0], pdu[2], pdu[4]) = (kind, hlen, hlen);
    pdu
}

fn flush() -> Vec<u8> {
    capsule(&Framing::PLAIN, Sqe { nsid: 1, ..Sqe::new(NvmOpcode::Flush.to_wire()) }, &[])
}

fn small_write(bytes: usize) -> Vec<u8> {
    capsule(&Framing::PLAIN, write_in_capsule(1, 0, bytes), &vec![0; bytes])
}

fn h2c_part(r2t: &R2t, offset: u32, bytes: usize, last: bool) -> Vec<u8> {
    h2c_data(&Framing::PLAIN, r2t, offset, &vec![0; bytes], last)
}

const DIGESTS: Framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
const NO_R2T: R2t = R2t { cccid: 7, ttag: 99, offset: 0, length: 512 };

/// Every violation that closes the connection: description, state, PDU, and the expected fatal error.
const CASES: &[(&str, Stage, Pdu, FatalError)] = {
    use FatalStatus::*;
    use Stage::*;
    &[
        // TCP 1.0, section 3.6.1: the common header.
        ("a reserved type", New, |_| bare(0x08, 24), FatalError::field(0)),
        ("the largest type", New, |_| bare(0xff, 24), FatalError::field(0)),
        ("a reserved type on a queue", Io, |_| bare(0x0a, 24), FatalError::field(0)),
        ("ICReq with a wrong HLEN", New, |_| with_byte(ic(), 2, 127), FatalError::field(2)),
        ("ICReq with HLEN 0", New, |_| with_byte(ic(), 2, 0), FatalError::field(2)),
        ("a capsule with the HLEN of an entry", Io, |_| with_byte(flush(), 2, 64), FatalError::field(2)),
        (
            "H2CData with a wrong HLEN",
            R2tOutstanding,
            |r2t| with_byte(h2c_part(r2t, 0, 512, false), 2, 25),
            FatalError::field(2),
        ),
        ("ICReq with PLEN 0", New, |_| with_length(ic(), 0), FatalError::field(4)),
        ("ICReq with PLEN 127", New, |_| with_length(ic(), 127), FatalError::field(4)),
        ("ICReq with PLEN 129", New, |_| with_length(ic(), 129), FatalError::field(4)),
        ("ICReq with the largest PLEN", New, |_| with_length(ic(), u32::MAX), FatalError::field(4)),
        ("a capsule with PLEN 0", Io, |_| with_length(flush(), 0), FatalError::field(4)),
        ("a capsule with PLEN 71", Io, |_| with_length(flush(), 71), FatalError::field(4)),
        (
            "a capsule whose data starts at its end",
            Io,
            |_| with_byte(with_length(small_write(512), 76), 3, 76),
            FatalError::field(4),
        ),
        (
            "H2CData with PLEN 0",
            R2tOutstanding,
            |r2t| with_length(h2c_part(r2t, 0, 512, false), 0),
            FatalError::field(4),
        ),
        (
            "H2CData without data",
            R2tOutstanding,
            |r2t| with_length(h2c_part(r2t, 0, 512, false), 24),
            FatalError::field(4),
        ),
        (
            "data that starts within the header",
            Io,
            |_| with_byte(small_write(512), 3, 68),
            FatalError::field(3),
        ),
        ("data that starts at 0", Io, |_| with_byte(small_write(512), 3, 0), FatalError::field(3)),
        ("data that starts off a dword", Io, |_| with_byte(small_write(512), 3, 73), FatalError::field(3)),
        (
            "H2CData that starts within the header",
            R2tOutstanding,
            |r2t| with_byte(h2c_part(r2t, 0, 512, false), 3, 16),
            FatalError::field(3),
        ),
        ("ICReq with a header digest", New, |_| with_byte(ic(), 1, 1), FatalError::field(1)),
        ("a header digest that was not negotiated", Io, |_| with_byte(flush(), 1, 1), FatalError::field(1)),
        (
            "a data digest that was not negotiated",
            Io,
            |_| with_byte(small_write(512), 1, 2),
            FatalError::field(1),
        ),
        ("no header digest where one was negotiated", IoWithDigests, |_| flush(), FatalError::field(1)),
        (
            "no data digest where one was negotiated",
            IoWithDigests,
            |_| with_byte(capsule(&DIGESTS, write_in_capsule(1, 0, 512), &[0; 512]), 1, 1),
            FatalError::field(1),
        ),
        // TCP 1.0, section 3.6.2: ICReq.
        ("an unknown PFV", New, |_| with_byte(ic(), 8, 1), FatalError::unsupported(8)),
        ("an HPDA of 32", New, |_| with_byte(ic(), 10, 32), FatalError::field(10)),
        ("reserved digest bits", New, |_| with_byte(ic(), 11, 4), FatalError::field(11)),
        // TCP 1.0, section 3.5.1: sequence of PDUs.
        ("a capsule before ICReq", New, |_| flush(), of(SequenceError)),
        ("H2CData before ICReq", New, |_| h2c_part(&NO_R2T, 0, 512, true), of(SequenceError)),
        ("ICResp before ICReq", New, |_| bare(PduType::IcResp as u8, 128), of(SequenceError)),
        ("a second ICReq", Initialized, |_| ic(), of(SequenceError)),
        ("ICReq on an admin queue", Admin, |_| ic(), of(SequenceError)),
        ("ICReq on an I/O queue", Io, |_| ic(), of(SequenceError)),
        ("ICReq with digests in use", InitializedWithDigests, |_| ic(), of(SequenceError)),
        // TCP 1.0, section 3.6.1: only controllers send these.
        ("ICResp from a host", Initialized, |_| bare(PduType::IcResp as u8, 128), FatalError::field(0)),
        ("CapsuleResp from a host", Io, |_| bare(PduType::CapsuleResp as u8, 24), FatalError::field(0)),
        (
            "C2HData from a host",
            Io,
            |_| with_byte(h2c_part(&NO_R2T, 0, 512, true), 0, 7),
            FatalError::field(0),
        ),
        ("R2T from a host", Io, |_| bare(PduType::R2t as u8, 24), FatalError::field(0)),
        ("C2HTermReq from a host", Io, |_| bare(PduType::C2hTermReq as u8, 24), FatalError::field(0)),
        // TCP 1.0, section 3.3.2.1: data in capsules.
        (
            "a Connect with too much data",
            Initialized,
            |_| {
                let (sqe, data) = connect(0, 32, 0xffff);
                capsule(&Framing::PLAIN, sqe, &[&data[..], &[0; 4]].concat())
            },
            of(LimitExceeded),
        ),
        (
            "an admin command with too much data",
            Admin,
            |_| capsule(&Framing::PLAIN, Sqe::new(AdminOpcode::KeepAlive.to_wire()), &[0; 8196]),
            of(LimitExceeded),
        ),
        ("more data than IOCCSZ allows", Io, |_| small_write(8192 + 512), of(LimitExceeded)),
        ("4 GiB of data", Io, |_| with_length(small_write(512), u32::MAX), of(LimitExceeded)),
        // TCP 1.0, section 3.3.2.2: H2CData.
        ("data before Connect", Initialized, |_| h2c_part(&NO_R2T, 0, 512, true), FatalError::field(10)),
        ("data without an R2T", Io, |_| h2c_part(&NO_R2T, 0, 512, true), FatalError::field(10)),
        (
            "data for another tag",
            R2tOutstanding,
            |r2t| h2c_part(&R2t { ttag: r2t.ttag + 1, ..*r2t }, 0, 512, false),
            FatalError::field(10),
        ),
        (
            "data for the last tag",
            R2tOutstanding,
            |r2t| h2c_part(&R2t { ttag: 0xffff, ..*r2t }, 0, 512, false),
            FatalError::field(10),
        ),
        (
            "data for another command",
            R2tOutstanding,
            |r2t| h2c_part(&R2t { cccid: r2t.cccid + 1, ..*r2t }, 0, 512, false),
            FatalError::field(8),
        ),
        (
            "data that starts in the middle",
            R2tOutstanding,
            |r2t| h2c_part(r2t, 512, 512, false),
            of(DataOutOfRange),
        ),
        (
            "data that starts at the end",
            R2tOutstanding,
            |r2t| h2c_part(r2t, 16384, 512, true),
            of(DataOutOfRange),
        ),
        (
            "data that starts far beyond the end",
            R2tOutstanding,
            |r2t| h2c_part(r2t, u32::MAX, 512, true),
            of(DataOutOfRange),
        ),
        (
            "more data than the R2T requests",
            R2tOutstanding,
            |r2t| h2c_part(r2t, 0, 16384 + 4, true),
            of(DataOutOfRange),
        ),
        (
            "more data than a PDU may have",
            R2tOutstanding,
            |r2t| {
                let mut pdu = with_length(h2c_part(r2t, 0, 512, true), 24 + (4 << 20));
                pdu[16..20].copy_from_slice(&(4u32 << 20).to_le_bytes());
                pdu
            },
            of(LimitExceeded),
        ),
        (
            "the same data again",
            R2tOutstanding,
            |r2t| [h2c_part(r2t, 0, 4096, false), h2c_part(r2t, 0, 4096, false)].concat(),
            of(DataOutOfRange),
        ),
        (
            "a gap in the data",
            R2tOutstanding,
            |r2t| [h2c_part(r2t, 0, 4096, false), h2c_part(r2t, 8192, 4096, false)].concat(),
            of(DataOutOfRange),
        ),
        (
            "data after the last",
            R2tOutstanding,
            |r2t| [h2c_part(r2t, 0, 16384, true), h2c_part(r2t, 0, 512, true)].concat(),
            FatalError::field(10),
        ),
        (
            "a length that is not the PDU's",
            R2tOutstanding,
            |r2t| with_byte(h2c_part(r2t, 0, 512, false), 16, 4),
            FatalError::field(16),
        ),
        (
            "the last data without LAST_PDU",
            R2tOutstanding,
            |r2t| h2c_part(r2t, 0, 16384, false),
            FatalError::field(1),
        ),
        (
            "LAST_PDU before the last data",
            R2tOutstanding,
            |r2t| h2c_part(r2t, 0, 4096, true),
            FatalError::field(1),
        ),
    ]
};

fn at(rig: &TcpTestTarget, admin: &RawTcpHost, qid: u16, stage: Stage) -> (RawTcpHost, R2t) {
    let mut r2t = NO_R2T;
    let peer = match stage {
        Stage::New => RawTcpHost::open(rig),
        Stage::Initialized => RawTcpHost::initialized(rig, false),
        Stage::InitializedWithDigests => RawTcpHost::initialized(rig, true),
        Stage::Admin => RawTcpHost::admin(rig),
        Stage::Io => RawTcpHost::io(rig, admin, qid, 16, false),
        Stage::IoWithDigests => RawTcpHost::io(rig, admin, qid, 16, true),
        Stage::R2tOutstanding => {
            let mut peer = RawTcpHost::io(rig, admin, qid, 16, false);
            peer.capsule(write(1, 1024, 16384), &[]);
            r2t = peer.expect_r2t();
            peer
        }
    };
    (peer, r2t)
}

#[test]
fn a_malformed_pdu_gets_c2htermreq_and_closes_only_its_connection() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    for (n, (what, stage, pdu, fatal)) in CASES.iter().enumerate() {
        let (mut peer, r2t) = at(&rig, &admin, 2 + n as u16, *stage);
        let pdu = pdu(&r2t);
        peer.send(&pdu);
        // A write that completed before the invalid PDU may be answered first.
        let received = match peer.receive_pdu() {
            ReceivedPdu::Response(_) => peer.receive_pdu(),
            received => received,
        };
        let ReceivedPdu::Term(received, in_error) = received else {
            panic!("{what} at {stage:?}: answered with {received:?}")
        };
        assert_eq!(received, *fatal, "{what} at {stage:?}");
        // The header in error is returned, so that the host can identify the PDU.
        let copied = !in_error.is_empty() && pdu.windows(in_error.len()).any(|header| header == in_error);
        assert!(copied, "{what} at {stage:?}: {in_error:x?} was never sent");
        peer.receive_until_closed();
        other.round_trip(n as u8);
    }
}

#[test]
fn a_header_digest_error_reports_the_received_digest() {
    let rig = TcpTestTarget::with_transport(Default::default());
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, true);
    let mut peer = RawTcpHost::io(&rig, &admin, 2, 16, true);
    peer.capsule(write(1, 0, 4096), &[]);
    let r2t = peer.expect_r2t();
    // Byte 20 is reserved: only the digest detects the change.
    let pdu = with_byte(h2c_data(&DIGESTS, &r2t, 0, &[0; 4096], true), 20, 1);
    peer.send(&pdu);
    let ReceivedPdu::Term(fatal, in_error) = peer.receive_pdu() else {
        panic!("a header digest error is not detected")
    };
    let digest = u32::from_le_bytes(*pdu[24..].first_chunk().unwrap());
    assert_eq!(fatal, FatalError { status: FatalStatus::HeaderDigestError, information: digest });
    assert_eq!(in_error, pdu[..24]);
    peer.receive_until_closed();
    other.round_trip(1);
}
