//! Hosts that say nothing, stop in the middle, never listen, or vanish.

use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use nvmf::TransportConfig;
use ring::Status;
use wire_nvme::Sqe;
use wire_nvme::tcp::{Fatal, FatalStatus, Framing, PduType, TERM_MAX, TermReq};

use crate::peer::{Peer, Said, capsule, connect, h2c_data, ic_req, pattern, read, write, write_in_capsule};
use crate::rig::{NQN, Parts, Rig, eventually};

#[test]
fn a_handshake_that_takes_too_long_is_cut_off_wherever_it_stops() {
    let (ic, all) = (Duration::from_millis(300), Duration::from_millis(600));
    let rig = Rig::with_transport(TransportConfig {
        ic_timeout_ms: ic.as_millis() as u32,
        connect_timeout_ms: all.as_millis() as u32,
        ..TransportConfig::default()
    });
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    let connect_pdu = capsule(&Framing::PLAIN, sqe, &data);
    let fetched = Sqe { data: wire_nvme::DataPointer::transport(1024), ..sqe };
    let fetched = capsule(&Framing::PLAIN, fetched, &[]);
    // What is sent, how many PDUs come back for it, and how long the rest is waited for.
    let stops: &[(&str, Vec<u8>, usize, Duration)] = &[
        ("nothing", vec![], 0, ic),
        ("one byte", vec![0], 0, ic),
        ("all but the last byte of ICReq", ic_req(false)[..127].to_vec(), 0, ic),
        ("ICReq", ic_req(false).to_vec(), 1, all),
        ("half a capsule's header", [&ic_req(false), &connect_pdu[..36]].concat(), 1, all),
        ("Connect without the end of its data", [&ic_req(false), &connect_pdu[..1000]].concat(), 1, all),
        ("Connect whose data does not come", [&ic_req(false)[..], &fetched].concat(), 2, all),
        (
            "a refused command",
            [&ic_req(false)[..], &capsule(&Framing::PLAIN, read(1, 0, 512), &[])].concat(),
            2,
            all,
        ),
    ];
    let start = Instant::now();
    let mut peers: Vec<Peer> = stops.iter().map(|_| Peer::dial(&rig)).collect();
    for (peer, (_, bytes, ..)) in peers.iter_mut().zip(stops) {
        peer.send(bytes);
    }
    for (peer, (what, _, answers, least)) in peers.iter_mut().zip(stops) {
        for _ in 0..*answers {
            assert_ne!(peer.hear(), Said::Closed, "{what}");
        }
        assert_eq!(peer.hear(), Said::Closed, "{what}");
        assert!(start.elapsed() + Duration::from_millis(20) >= *least, "{what}: after {:?}", start.elapsed());
    }
    other.round_trip(1);
    assert_eq!(rig.target.qpairs(NQN).unwrap().len(), 2, "connected queues stay");
}

#[test]
fn half_a_pdu_on_a_queue_holds_nobody_up_and_goes_with_its_controller() {
    let rig = Rig::with_transport(TransportConfig::default());
    let (admin, bystander) = (Peer::admin(&rig), Peer::admin(&rig));
    let mut other = Peer::io(&rig, &bystander, 1, 16, false);
    let pdu = capsule(&Framing::PLAIN, write_in_capsule(1, 0, 4096), &pattern(4096, 1));
    let mut halves = Vec::new();
    for (n, bytes) in [1, 7, 8, 40, 72, 73, 4000, pdu.len() - 1].into_iter().enumerate() {
        let mut peer = Peer::io(&rig, &admin, n as u16 + 1, 16, false);
        peer.send(&pdu[..bytes]);
        halves.push(peer);
        other.round_trip(n as u8);
    }
    drop(admin);
    for peer in &mut halves {
        assert_eq!(peer.hear(), Said::Closed);
    }
    other.round_trip(99);
}

fn term_req() -> Vec<u8> {
    let mut pdu = [0; TERM_MAX];
    let term = TermReq { kind: PduType::H2cTermReq, fatal: Fatal::of(FatalStatus::SequenceError) };
    let length = term.encode(&[0; 24], &mut pdu);
    pdu[..length].to_vec()
}

#[test]
fn a_host_that_terminates_its_admin_queue_loses_its_io_queues() {
    let rig = Rig::with_transport(TransportConfig::default());
    let (mut admin, bystander) = (Peer::admin(&rig), Peer::admin(&rig));
    let mut other = Peer::io(&rig, &bystander, 1, 16, false);
    let mut peers: Vec<Peer> = (1..=4).map(|qid| Peer::io(&rig, &admin, qid, 16, false)).collect();
    admin.send(&term_req());
    admin.hear_end();
    for peer in &mut peers {
        assert_eq!(peer.hear(), Said::Closed);
    }
    other.round_trip(1);
    eventually("one controller is left", || rig.target.controllers(NQN).unwrap().len() == 1);
}

/// Ends an I/O queue with a write at a slow device, and proves that the queue is not to be had again
/// before the device has let go, so that the late write cannot follow a newer one.
fn late_writes_come_before_the_next_life_of_a_queue(end: impl FnOnce(Peer)) {
    let latency = Duration::from_millis(400);
    let rig = Rig::new(Parts { latency_us: latency.as_micros() as u64, ..Parts::default() });
    let admin = Peer::admin(&rig);
    let mut peer = Peer::io(&rig, &admin, 1, 16, false);
    let start = Instant::now();
    for lba in 0..4 {
        peer.capsule(write_in_capsule(1, lba, 512), &pattern(512, 1));
    }
    // A read whose answer is never read, and half of what an R2T asked for.
    peer.capsule(write(1, 64, 16384), &[]);
    let r2t = peer.hear_r2t();
    let piece = h2c_data(&Framing::PLAIN, &r2t, 0, &pattern(8192, 1), false);
    peer.send(&piece[..5000]);
    std::thread::sleep(Duration::from_millis(50));
    end(peer);
    let mut again = None;
    eventually("the queue is free again", || {
        let mut peer = Peer::initialized(&rig, false);
        let (sqe, data) = connect(1, 16, admin.cntlid);
        let status = peer.command(sqe, &data).status;
        assert!(status.is_success() || status.same_code(Status::COMMAND_SEQUENCE_ERROR), "{status}");
        again = Some(peer);
        status.is_success()
    });
    assert!(start.elapsed() >= latency, "the queue was given away with writes under way");
    let mut again = again.unwrap();
    for lba in 0..4 {
        assert_eq!(again.write(1, lba, &pattern(512, 2)), Status::SUCCESS);
    }
    for lba in 0..4 {
        assert!(again.read_back(1, lba, 512) == Ok(pattern(512, 2)), "a late write at {lba}");
    }
}

#[test]
fn a_host_that_vanishes_within_its_data_leaves_no_write_behind() {
    late_writes_come_before_the_next_life_of_a_queue(drop);
}

#[test]
fn a_host_that_resets_within_its_data_leaves_no_write_behind() {
    late_writes_come_before_the_next_life_of_a_queue(|mut peer| {
        // What was never read when a socket is closed makes the kernel reset the connection.
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
fn a_host_that_terminates_with_writes_under_way_leaves_none_behind() {
    late_writes_come_before_the_next_life_of_a_queue(|mut peer| {
        // The piece of data under way is completed first.
        peer.send(&[0; 8192 + 24 - 5000]);
        peer.send(&term_req());
        peer.hear_end();
    });
}

/// Sends the same PDU until the target takes no more, or ends the connection.
fn flood(peer: &mut Peer, pdu: &[u8], bytes_max: usize) {
    let many = pdu.repeat(1000);
    peer.stream.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let mut sent = 0;
    loop {
        match peer.stream.write(&many[sent % many.len()..]) {
            Ok(count) => sent += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return,
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                return;
            }
            Err(error) => panic!("{error} after {sent} bytes"),
        }
        assert!(sent < bytes_max, "the target took {sent} bytes and still takes more");
    }
}

#[test]
fn answers_that_nobody_reads_do_not_pile_up() {
    let rig = Rig::with_transport(TransportConfig::default());
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, false);
    let mut peer = Peer::io(&rig, &admin, 2, 16, false);
    // Every one is answered and none is in flight for long. Both sockets' buffers hold some 10 MB.
    let nothing = Sqe { nsid: 1, ..Sqe::new(0x7e) };
    flood(&mut peer, &capsule(&Framing::PLAIN, nothing, &[]), 256 << 20);
    other.round_trip(1);
    drop(peer);
    eventually("the flooded queue is gone", || rig.target.qpairs(NQN).unwrap().len() == 2);
    other.round_trip(2);
}

#[test]
fn a_host_that_neither_reads_nor_keeps_alive_is_dropped() {
    let rig = Rig::with_transport(TransportConfig::default());
    let bystander = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &bystander, 1, 16, false);
    let mut peer = Peer::initialized(&rig, false);
    let (sqe, data) = connect(0, 32, 0xffff);
    assert_eq!(peer.command(Sqe { cdw12: 1000, ..sqe }, &data).status, Status::SUCCESS);
    flood(&mut peer, &capsule(&Framing::PLAIN, Sqe::new(0x7e), &[]), 256 << 20);
    eventually("one controller is left", || rig.target.controllers(NQN).unwrap().len() == 1);
    other.round_trip(1);
}

#[test]
fn data_that_nobody_reads_holds_one_queue_of_buffers_and_nobody_else() {
    let transport = TransportConfig { connection_bytes_max: 8 << 20, ..TransportConfig::default() };
    let rig = Rig::new(Parts { transport, reactors: 1, ..Parts::default() });
    let admin = Peer::admin(&rig);
    let mut other = Peer::io(&rig, &admin, 1, 16, false);
    other.round_trip(0);
    let mut peers = Vec::new();
    for qid in 2..6 {
        let mut peer = Peer::io(&rig, &admin, qid, 128, false);
        for n in 0..127 {
            peer.capsule(Sqe { cid: n, ..read(1, 0, 128 << 10) }, &[]);
        }
        peers.push(peer);
    }
    for n in 0..50 {
        other.round_trip(n);
    }
    // 8 MiB a queue, and a chunk or two for small buffers.
    let taken = rig.arena.taken_bytes();
    assert!(taken <= 4 * (8 << 20) + (4 << 20), "{taken} bytes for queues of 8 MiB");
    // Whoever comes late gets everything.
    let mut late = peers.pop().unwrap();
    for _ in 0..127 {
        assert!(matches!(late.hear(), Said::Data(_, data) if data.len() == 128 << 10));
        assert_eq!(late.hear_response().status, Status::SUCCESS);
    }
    drop(peers);
    eventually("the queues are gone", || rig.target.qpairs(NQN).unwrap().len() == 3);
    other.round_trip(100);
}
