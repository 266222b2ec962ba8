//! Hosts that send nothing, stop within a PDU, never read, or disconnect.

use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use block_io::Status;
use nvmf::TcpTransportConfig;
use wire_nvme::Sqe;
use wire_nvme::tcp::{FatalError, FatalStatus, Framing, PduType, TERM_MAX, TermReq};

use crate::peer::{
    RawTcpHost, ReceivedPdu, capsule, connect, h2c_data, ic_req, pattern, read, write, write_in_capsule,
};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig, wait_until};

#[test]
fn a_handshake_times_out_wherever_it_stops() {
    let (ic, all) = (Duration::from_millis(300), Duration::from_millis(600));
    let rig = TcpTestTarget::with_transport(TcpTransportConfig {
        ic_timeout_ms: ic.as_millis() as u32,
        connect_timeout_ms: all.as_millis() as u32,
        ..TcpTransportConfig::default()
    });
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    let connect_pdu = capsule(&Framing::PLAIN, sqe, &data);
    let fetched = Sqe { data: wire_nvme::DataPointer::transport(1024), ..sqe };
    let fetched = capsule(&Framing::PLAIN, fetched, &[]);
    // Description, bytes to send, number of PDUs in response, and the timeout.
    let stops: &[(&str, Vec<u8>, usize, Duration)] = &[
        ("nothing", vec![], 0, ic),
        ("one byte", vec![0], 0, ic),
        ("all but the last byte of ICReq", ic_req(false)[..127].to_vec(), 0, ic),
        ("ICReq", ic_req(false).to_vec(), 1, all),
        ("half a capsule's header", [&ic_req(false), &connect_pdu[..36]].concat(), 1, all),
        ("Connect with truncated data", [&ic_req(false), &connect_pdu[..1000]].concat(), 1, all),
        ("Connect whose R2T is not answered", [&ic_req(false)[..], &fetched].concat(), 2, all),
        (
            "a rejected command",
            [&ic_req(false)[..], &capsule(&Framing::PLAIN, read(1, 0, 512), &[])].concat(),
            2,
            all,
        ),
    ];
    let start = Instant::now();
    let mut peers: Vec<RawTcpHost> = stops.iter().map(|_| RawTcpHost::open(&rig)).collect();
    for (peer, (_, bytes, ..)) in peers.iter_mut().zip(stops) {
        peer.send(bytes);
    }
    for (peer, (what, _, answers, least)) in peers.iter_mut().zip(stops) {
        for _ in 0..*answers {
            assert_ne!(peer.receive_pdu(), ReceivedPdu::Closed, "{what}");
        }
        assert_eq!(peer.receive_pdu(), ReceivedPdu::Closed, "{what}");
        assert!(start.elapsed() + Duration::from_millis(20) >= *least, "{what}: after {:?}", start.elapsed());
    }
    other.round_trip(1);
    assert_eq!(rig.target.qpairs(NQN).unwrap().len(), 2, "connected queues stay");
}

#[test]
fn a_partial_pdu_blocks_no_other_queue_and_closes_with_its_controller() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig::default());
    let (admin, bystander) = (RawTcpHost::admin(&rig), RawTcpHost::admin(&rig));
    let mut other = RawTcpHost::io(&rig, &bystander, 1, 16, false);
    let pdu = capsule(&Framing::PLAIN, write_in_capsule(1, 0, 4096), &pattern(4096, 1));
    let mut halves = Vec::new();
    for (n, bytes) in [1, 7, 8, 40, 72, 73, 4000, pdu.len() - 1].into_iter().enumerate() {
        let mut peer = RawTcpHost::io(&rig, &admin, n as u16 + 1, 16, false);
        peer.send(&pdu[..bytes]);
        halves.push(peer);
        other.round_trip(n as u8);
    }
    drop(admin);
    for peer in &mut halves {
        assert_eq!(peer.receive_pdu(), ReceivedPdu::Closed);
    }
    other.round_trip(99);
}

fn term_req() -> Vec<u8> {
    let mut pdu = [0; TERM_MAX];
    let term =
        TermReq { kind: PduType::H2cTermReq, fatal: FatalError::from_status(FatalStatus::SequenceError) };
    let length = term.encode(&[0; 24], &mut pdu);
    pdu[..length].to_vec()
}

#[test]
fn h2ctermreq_on_the_admin_queue_closes_the_io_queues() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig::default());
    let (mut admin, bystander) = (RawTcpHost::admin(&rig), RawTcpHost::admin(&rig));
    let mut other = RawTcpHost::io(&rig, &bystander, 1, 16, false);
    let mut peers: Vec<RawTcpHost> =
        (1..=4).map(|qid| RawTcpHost::io(&rig, &admin, qid, 16, false)).collect();
    admin.send(&term_req());
    admin.receive_until_closed();
    for peer in &mut peers {
        assert_eq!(peer.receive_pdu(), ReceivedPdu::Closed);
    }
    other.round_trip(1);
    wait_until("one controller remains", || rig.target.controllers(NQN).unwrap().len() == 1);
}

/// Closes an I/O queue with writes at a slow device, and proves that the queue cannot be connected again before
/// the device has completed them, so that a late write cannot overwrite a newer one.
fn outstanding_writes_complete_before_the_queue_is_reused(disconnect: impl FnOnce(RawTcpHost)) {
    let latency = Duration::from_millis(400);
    let rig = TcpTestTarget::new(TestTargetConfig {
        latency_us: latency.as_micros() as u64,
        ..TestTargetConfig::default()
    });
    let admin = RawTcpHost::admin(&rig);
    let mut peer = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let start = Instant::now();
    for lba in 0..4 {
        peer.capsule(write_in_capsule(1, lba, 512), &pattern(512, 1));
    }
    // A write with only part of the data that its R2T requests.
    peer.capsule(write(1, 64, 16384), &[]);
    let r2t = peer.expect_r2t();
    let pdu = h2c_data(&Framing::PLAIN, &r2t, 0, &pattern(8192, 1), false);
    peer.send(&pdu[..5000]);
    std::thread::sleep(Duration::from_millis(50));
    disconnect(peer);
    let mut reconnected = None;
    wait_until("the queue can be connected again", || {
        let mut peer = RawTcpHost::initialized(&rig, false);
        let (sqe, data) = connect(1, 16, admin.cntlid);
        let status = peer.command(sqe, &data).status;
        assert!(status.is_success() || status.same_code(Status::COMMAND_SEQUENCE_ERROR), "{status}");
        reconnected = Some(peer);
        status.is_success()
    });
    assert!(start.elapsed() >= latency, "the queue was reused while writes were outstanding");
    let mut reconnected = reconnected.unwrap();
    for lba in 0..4 {
        assert_eq!(reconnected.write(1, lba, &pattern(512, 2)), Status::SUCCESS);
    }
    for lba in 0..4 {
        assert!(reconnected.read_back(1, lba, 512) == Ok(pattern(512, 2)), "a late write at {lba}");
    }
}

#[test]
fn a_close_within_h2cdata_leaves_no_late_write() {
    outstanding_writes_complete_before_the_queue_is_reused(drop);
}

#[test]
fn a_tcp_reset_within_h2cdata_leaves_no_late_write() {
    outstanding_writes_complete_before_the_queue_is_reused(|mut peer| {
        // The kernel resets a connection that is closed with unread data.
        peer.send(&h2c_data(
            &Framing::PLAIN,
            &wire_nvme::tcp::R2t { cccid: 0, ttag: 0, offset: 0, length: 4 },
            0,
            &[0; 4],
            true,
        ));
        drop(peer);
    });
}

#[test]
fn h2ctermreq_with_outstanding_writes_leaves_no_late_write() {
    outstanding_writes_complete_before_the_queue_is_reused(|mut peer| {
        // Complete the partial H2CData PDU first.
        peer.send(&[0; 8192 + 24 - 5000]);
        peer.send(&term_req());
        peer.receive_until_closed();
    });
}

/// Sends the same PDU until the target stops reading or closes the connection.
fn flood(peer: &mut RawTcpHost, pdu: &[u8], bytes_max: usize) {
    let pdus = pdu.repeat(1000);
    peer.stream.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let mut sent = 0;
    loop {
        match peer.stream.write(&pdus[sent % pdus.len()..]) {
            Ok(count) => sent += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return,
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                return;
            }
            Err(error) => panic!("{error} after {sent} bytes"),
        }
        assert!(sent < bytes_max, "the target has read {sent} bytes without backpressure");
    }
}

#[test]
fn unread_responses_apply_backpressure() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig::default());
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    let mut peer = RawTcpHost::io(&rig, &admin, 2, 16, false);
    // Every command fails immediately. The buffers of both sockets hold about 10 MB.
    let unsupported = Sqe { nsid: 1, ..Sqe::new(0x7e) };
    flood(&mut peer, &capsule(&Framing::PLAIN, unsupported, &[]), 256 << 20);
    other.round_trip(1);
    drop(peer);
    wait_until("the flooded queue is closed", || rig.target.qpairs(NQN).unwrap().len() == 2);
    other.round_trip(2);
}

#[test]
fn a_host_that_does_not_read_is_disconnected_by_keep_alive() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig::default());
    let bystander = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &bystander, 1, 16, false);
    let mut peer = RawTcpHost::initialized(&rig, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    assert_eq!(peer.command(Sqe { cdw12: 1000, ..sqe }, &data).status, Status::SUCCESS);
    flood(&mut peer, &capsule(&Framing::PLAIN, Sqe::new(0x7e), &[]), 256 << 20);
    wait_until("one controller remains", || rig.target.controllers(NQN).unwrap().len() == 1);
    other.round_trip(1);
}

#[test]
fn unread_read_data_holds_at_most_connection_bytes_max_per_queue() {
    let transport = TcpTransportConfig { connection_bytes_max: 8 << 20, ..TcpTransportConfig::default() };
    let rig = TcpTestTarget::new(TestTargetConfig { transport, reactors: 1, ..TestTargetConfig::default() });
    let admin = RawTcpHost::admin(&rig);
    let mut other = RawTcpHost::io(&rig, &admin, 1, 16, false);
    other.round_trip(0);
    let mut peers = Vec::new();
    for qid in 2..6 {
        let mut peer = RawTcpHost::io(&rig, &admin, qid, 128, false);
        for n in 0..127 {
            peer.capsule(Sqe { cid: n, ..read(1, 0, 128 << 10) }, &[]);
        }
        peers.push(peer);
    }
    for n in 0..50 {
        other.round_trip(n);
    }
    // 8 MiB a queue, and a chunk or two for small buffers.
    let allocated = rig.arena.allocated_bytes();
    assert!(allocated <= 4 * (8 << 20) + (4 << 20), "{allocated} bytes for queues of 8 MiB");
    // A host that reads late gets all its data.
    let mut late = peers.pop().unwrap();
    for _ in 0..127 {
        assert!(matches!(late.receive_pdu(), ReceivedPdu::Data(_, data) if data.len() == 128 << 10));
        assert_eq!(late.expect_response().status, Status::SUCCESS);
    }
    drop(peers);
    wait_until("the queues are closed", || rig.target.qpairs(NQN).unwrap().len() == 3);
    other.round_trip(100);
}
