//! PDUs that break the transport's rules end their connection, with the reason.

use wire_nvme::Sqe;
use wire_nvme::opcode::{AdminOpcode, NvmOpcode};
use wire_nvme::tcp::{Fatal, FatalStatus, Framing, PduType, R2t};

use crate::peer::{Peer, Said, capsule, connect, h2c_data, ic_req, write, write_in_capsule};
use crate::rig::Rig;

/// How far a connection has come before it goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    New,
    Initialized,
    InitializedWithDigests,
    Admin,
    Io,
    IoWithDigests,
    /// An I/O queue whose host was asked for 16 KiB.
    Asked,
}

/// The PDU to send, given what was asked for where something was.
type Pdu = fn(&R2t) -> Vec<u8>;

const fn of(status: FatalStatus) -> Fatal {
    Fatal::of(status)
}

/// A PDU with one byte changed.
fn with(mut pdu: Vec<u8>, at: usize, byte: u8) -> Vec<u8> {
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

/// A header of a kind, without a body.
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

fn piece(r2t: &R2t, offset: u32, bytes: usize, last: bool) -> Vec<u8> {
    h2c_data(&Framing::PLAIN, r2t, offset, &vec![0; bytes], last)
}

const DIGESTS: Framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };
const NOBODY: R2t = R2t { cccid: 7, ttag: 99, offset: 0, length: 512 };

/// Every way to be wrong that ends the connection: where, what, and what the target says to it.
const CASES: &[(&str, Stage, Pdu, Fatal)] = {
    use FatalStatus::*;
    use Stage::*;
    &[
        // TCP 1.0, section 3.6.1: the common header.
        ("a reserved type", New, |_| bare(0x08, 24), Fatal::field(0)),
        ("a type beyond all", New, |_| bare(0xff, 24), Fatal::field(0)),
        ("a reserved type on a queue", Io, |_| bare(0x0a, 24), Fatal::field(0)),
        ("ICReq with a wrong HLEN", New, |_| with(ic(), 2, 127), Fatal::field(2)),
        ("ICReq with HLEN 0", New, |_| with(ic(), 2, 0), Fatal::field(2)),
        ("a capsule with the HLEN of an entry", Io, |_| with(flush(), 2, 64), Fatal::field(2)),
        ("H2CData with a wrong HLEN", Asked, |r2t| with(piece(r2t, 0, 512, false), 2, 25), Fatal::field(2)),
        ("ICReq with PLEN 0", New, |_| with_length(ic(), 0), Fatal::field(4)),
        ("ICReq with PLEN 127", New, |_| with_length(ic(), 127), Fatal::field(4)),
        ("ICReq with PLEN 129", New, |_| with_length(ic(), 129), Fatal::field(4)),
        ("ICReq with the largest PLEN", New, |_| with_length(ic(), u32::MAX), Fatal::field(4)),
        ("a capsule with PLEN 0", Io, |_| with_length(flush(), 0), Fatal::field(4)),
        ("a capsule with PLEN 71", Io, |_| with_length(flush(), 71), Fatal::field(4)),
        (
            "a capsule whose data starts at its end",
            Io,
            |_| with(with_length(small_write(512), 76), 3, 76),
            Fatal::field(4),
        ),
        ("H2CData with PLEN 0", Asked, |r2t| with_length(piece(r2t, 0, 512, false), 0), Fatal::field(4)),
        ("H2CData without data", Asked, |r2t| with_length(piece(r2t, 0, 512, false), 24), Fatal::field(4)),
        ("data that starts within the header", Io, |_| with(small_write(512), 3, 68), Fatal::field(3)),
        ("data that starts at 0", Io, |_| with(small_write(512), 3, 0), Fatal::field(3)),
        ("data that starts off a dword", Io, |_| with(small_write(512), 3, 73), Fatal::field(3)),
        (
            "H2CData that starts within the header",
            Asked,
            |r2t| with(piece(r2t, 0, 512, false), 3, 16),
            Fatal::field(3),
        ),
        ("ICReq with a header digest", New, |_| with(ic(), 1, 1), Fatal::field(1)),
        ("a header digest that was not agreed on", Io, |_| with(flush(), 1, 1), Fatal::field(1)),
        ("a data digest that was not agreed on", Io, |_| with(small_write(512), 1, 2), Fatal::field(1)),
        ("no header digest where one was agreed on", IoWithDigests, |_| flush(), Fatal::field(1)),
        (
            "no data digest where one was agreed on",
            IoWithDigests,
            |_| with(capsule(&DIGESTS, write_in_capsule(1, 0, 512), &[0; 512]), 1, 1),
            Fatal::field(1),
        ),
        // TCP 1.0, section 3.6.2: ICReq.
        ("an unknown PFV", New, |_| with(ic(), 8, 1), Fatal::unsupported(8)),
        ("an HPDA of 32", New, |_| with(ic(), 10, 32), Fatal::field(10)),
        ("reserved digest bits", New, |_| with(ic(), 11, 4), Fatal::field(11)),
        // TCP 1.0, section 3.5.1: what comes when.
        ("a capsule before ICReq", New, |_| flush(), of(SequenceError)),
        ("H2CData before ICReq", New, |_| piece(&NOBODY, 0, 512, true), of(SequenceError)),
        ("ICResp before ICReq", New, |_| bare(PduType::IcResp as u8, 128), of(SequenceError)),
        ("a second ICReq", Initialized, |_| ic(), of(SequenceError)),
        ("ICReq on an admin queue", Admin, |_| ic(), of(SequenceError)),
        ("ICReq on an I/O queue", Io, |_| ic(), of(SequenceError)),
        ("ICReq with digests in use", InitializedWithDigests, |_| ic(), of(SequenceError)),
        // TCP 1.0, section 3.6.1: only controllers send these.
        ("ICResp from a host", Initialized, |_| bare(PduType::IcResp as u8, 128), Fatal::field(0)),
        ("CapsuleResp from a host", Io, |_| bare(PduType::CapsuleResp as u8, 24), Fatal::field(0)),
        ("C2HData from a host", Io, |_| with(piece(&NOBODY, 0, 512, true), 0, 7), Fatal::field(0)),
        ("R2T from a host", Io, |_| bare(PduType::R2t as u8, 24), Fatal::field(0)),
        ("C2HTermReq from a host", Io, |_| bare(PduType::C2hTermReq as u8, 24), Fatal::field(0)),
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
        // TCP 1.0, section 3.3.2.2: data that was asked for.
        ("data before Connect", Initialized, |_| piece(&NOBODY, 0, 512, true), Fatal::field(10)),
        ("data that nobody asked for", Io, |_| piece(&NOBODY, 0, 512, true), Fatal::field(10)),
        (
            "data for another tag",
            Asked,
            |r2t| piece(&R2t { ttag: r2t.ttag + 1, ..*r2t }, 0, 512, false),
            Fatal::field(10),
        ),
        (
            "data for the last tag",
            Asked,
            |r2t| piece(&R2t { ttag: 0xffff, ..*r2t }, 0, 512, false),
            Fatal::field(10),
        ),
        (
            "data for another command",
            Asked,
            |r2t| piece(&R2t { cccid: r2t.cccid + 1, ..*r2t }, 0, 512, false),
            Fatal::field(8),
        ),
        ("data from the middle on", Asked, |r2t| piece(r2t, 512, 512, false), of(DataOutOfRange)),
        ("data from beyond the end on", Asked, |r2t| piece(r2t, 16384, 512, true), of(DataOutOfRange)),
        ("data from far beyond on", Asked, |r2t| piece(r2t, u32::MAX, 512, true), of(DataOutOfRange)),
        ("more data than was asked for", Asked, |r2t| piece(r2t, 0, 16384 + 4, true), of(DataOutOfRange)),
        (
            "more data than a PDU may have",
            Asked,
            |r2t| {
                let mut pdu = with_length(piece(r2t, 0, 512, true), 24 + (4 << 20));
                pdu[16..20].copy_from_slice(&(4u32 << 20).to_le_bytes());
                pdu
            },
            of(LimitExceeded),
        ),
        (
            "the same data again",
            Asked,
            |r2t| [piece(r2t, 0, 4096, false), piece(r2t, 0, 4096, false)].concat(),
            of(DataOutOfRange),
        ),
        (
            "a gap in the data",
            Asked,
            |r2t| [piece(r2t, 0, 4096, false), piece(r2t, 8192, 4096, false)].concat(),
            of(DataOutOfRange),
        ),
        (
            "data after the last",
            Asked,
            |r2t| [piece(r2t, 0, 16384, true), piece(r2t, 0, 512, true)].concat(),
            Fatal::field(10),
        ),
        (
            "a length that is not the PDU's",
            Asked,
            |r2t| with(piece(r2t, 0, 512, false), 16, 4),
            Fatal::field(16),
        ),
        ("the last data without LAST_PDU", Asked, |r2t| piece(r2t, 0, 16384, false), Fatal::field(1)),
        ("LAST_PDU before the last data", Asked, |r2t| piece(r2t, 0, 4096, true), Fatal::field(1)),
    ]
};

fn at(rig: &Rig, admin: &Peer, qid: u16, stage: Stage) -> (Peer, R2t) {
    let mut r2t = NOBODY;
    let peer = match stage {
        Stage::New => Peer::dial(rig),
        Stage::Initialized => Peer::initialized(rig, false),
        Stage::InitializedWithDigests => Peer::initialized(rig, true),
        Stage::Admin => Peer::admin(rig),
        Stage::Io => Peer::io(rig, admin, qid, 16, false),
        Stage::IoWithDigests => Peer::io(rig, admin, qid, 16, true),
        Stage::Asked => {
            let mut peer = Peer::io(rig, admin, qid, 16, false);
            peer.capsule(write(1, 1024, 16384), &[]);
            r2t = peer.hear_r2t();
            peer
        }
    };
    (peer, r2t)
}

#[test]
fn a_malformed_pdu_is_answered_with_the_reason_and_ends_only_its_connection() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, false);
    for (n, (what, stage, pdu, fatal)) in CASES.iter().enumerate() {
        let (mut peer, r2t) = at(&rig, &admin, 2 + n as u16, *stage);
        let pdu = pdu(&r2t);
        peer.send(&pdu);
        // A write that was complete before the mistake may be answered first.
        let said = match peer.hear() {
            Said::Response(_) => peer.hear(),
            said => said,
        };
        let Said::Term(said, in_error) = said else { panic!("{what} at {stage:?}: answered with {said:?}") };
        assert_eq!(said, *fatal, "{what} at {stage:?}");
        // The header in error comes back, so that the host can tell which PDU it was.
        let copied = !in_error.is_empty() && pdu.windows(in_error.len()).any(|part| part == in_error);
        assert!(copied, "{what} at {stage:?}: {in_error:x?} was never sent");
        peer.hear_end();
        other.round_trip(n as u8);
    }
}

#[test]
fn a_wrong_header_digest_is_reported_with_the_digest_that_came() {
    let rig = Rig::with_transport(Default::default());
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, true);
    let mut peer = Peer::io(&rig, &admin, 2, 16, true);
    peer.capsule(write(1, 0, 4096), &[]);
    let r2t = peer.hear_r2t();
    // Byte 20 is reserved: nothing but the digest can tell.
    let pdu = with(h2c_data(&DIGESTS, &r2t, 0, &[0; 4096], true), 20, 1);
    peer.send(&pdu);
    let Said::Term(fatal, in_error) = peer.hear() else { panic!("a wrong header digest is let pass") };
    let digest = u32::from_le_bytes(*pdu[24..].first_chunk().unwrap());
    assert_eq!(fatal, Fatal { status: FatalStatus::HeaderDigestError, information: digest });
    assert_eq!(in_error, pdu[..24]);
    peer.hear_end();
    other.round_trip(1);
}
