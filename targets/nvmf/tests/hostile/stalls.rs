//! Hosts that keep the memory of their commands: they never send data that they were asked for, or never read.

use std::time::{Duration, Instant};

use block_io::Status;
use nvmf::TcpTransportConfig;
use wire_nvme::Sqe;

use crate::peer::{RawTcpHost, ReceivedPdu, pattern, read, write};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig, wait_until};

/// Bytes of each stalled command.
const COMMAND_BYTES: usize = 128 << 10;
/// Commands of each stalled queue.
const DEPTH: u16 = 127;

fn rig(arena_bytes: usize, transfer_timeout_ms: u32) -> TcpTestTarget {
    let transport = TcpTransportConfig { transfer_timeout_ms, ..TcpTransportConfig::default() };
    TcpTestTarget::new(TestTargetConfig { transport, arena_bytes, ..TestTargetConfig::default() })
}

/// Queues of one host that each submit as many commands as they can, and then do nothing.
fn stalled_queues(rig: &TcpTestTarget, count: u16, command: Sqe) -> (RawTcpHost, Vec<RawTcpHost>) {
    stalled_queues_of(rig, [9; 16], count, command)
}

/// The same for a host with this host identifier.
fn stalled_queues_of(
    rig: &TcpTestTarget,
    host_id: [u8; 16],
    count: u16,
    command: Sqe,
) -> (RawTcpHost, Vec<RawTcpHost>) {
    let admin = RawTcpHost::admin_as(rig, host_id);
    let queue = |qid| {
        let mut peer = RawTcpHost::io_as(rig, &admin, qid, 128, false, host_id);
        // So that the kernel does not read megabytes for each of hundreds of queues.
        rustix::net::sockopt::set_socket_recv_buffer_size(&peer.stream, 4096).unwrap();
        let commands = (0..DEPTH).flat_map(|cid| {
            crate::peer::capsule(&wire_nvme::tcp::Framing::PLAIN, Sqe { cid, ..command }, &[])
        });
        peer.send(&commands.collect::<Vec<u8>>());
        peer
    };
    let queues = (1..=count).map(queue).collect();
    (admin, queues)
}

/// Writes and reads back through R2T, and returns how long that took.
fn round_trip(io: &mut RawTcpHost, salt: u8) -> Duration {
    let start = Instant::now();
    let data = pattern(COMMAND_BYTES, salt);
    io.capsule(write(1, 0, data.len()), &[]);
    let r2t = io.expect_r2t();
    io.data(&r2t, 0, &data, true);
    assert_eq!(io.expect_response().status, Status::SUCCESS);
    assert_eq!(io.read_back(1, 0, data.len()), Ok(data));
    start.elapsed()
}

#[test]
fn queues_that_never_send_their_data_hold_little_memory_and_are_closed() {
    let rig = rig(256 << 20, 2000);
    let honest = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &honest, 1, 16, false);
    round_trip(&mut io, 0);
    let (_admin, mut stalled) = stalled_queues(&rig, 66, write(1, 0, COMMAND_BYTES));
    for salt in 0..50 {
        round_trip(&mut io, salt);
    }
    // Without a bound they would take all of it: 66 queues of 16 MiB.
    let allocated = rig.arena.allocated_bytes();
    assert!(allocated <= 66 * (512 << 10) + (8 << 20), "{allocated} bytes are allocated");
    for peer in &mut stalled {
        peer.receive_until_closed();
    }
    wait_until("the honest host's queue is left", || rig.target.qpairs(NQN).unwrap().len() == 3);
    round_trip(&mut io, 1);
}

#[test]
fn queues_that_never_read_are_closed() {
    let rig = rig(256 << 20, 1000);
    let honest = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &honest, 1, 16, false);
    let (_admin, _stalled) = stalled_queues(&rig, 100, read(1, 0, COMMAND_BYTES));
    for salt in 0..50 {
        round_trip(&mut io, salt);
    }
    // The kernel reads some data for them, so that their windows grow, but not beyond half of the memory.
    let allocated = rig.arena.allocated_bytes();
    assert!(allocated <= (128 << 20) + 100 * (512 << 10) + (8 << 20), "{allocated} bytes are allocated");
    wait_until("the honest host's queue is left", || rig.target.qpairs(NQN).unwrap().len() == 3);
    wait_until("memory is given back", || rig.arena.allocated_bytes() <= 2 * (10 << 20));
    round_trip(&mut io, 1);
}

#[test]
fn stalled_queues_that_exhaust_the_memory_are_closed_before_their_time() {
    // One minute is far more than the test waits.
    let rig = rig(8 << 20, 60_000);
    let honest = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &honest, 1, 16, false);
    // One host may not hold all of the memory. Five together do.
    let mut hosts: Vec<_> = (20..25)
        .map(|number| stalled_queues_of(&rig, [number; 16], 20, write(1, 0, COMMAND_BYTES)))
        .collect();
    round_trip(&mut io, 3);
    // The first ones hold all of it.
    hosts[0].1[0].receive_until_closed();
}

#[test]
fn a_slow_host_that_makes_progress_stays_connected() {
    let rig = rig(256 << 20, 400);
    let admin = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &admin, 1, 128, false);
    for cid in 0..8 {
        io.capsule(Sqe { cid, ..write(1, 0, 4096) }, &[]);
    }
    // Only four fit if the window is four; with 4 KiB all do.
    let r2ts: Vec<_> = (0..8).map(|_| io.expect_r2t()).collect();
    let data = pattern(4096, 5);
    for r2t in &r2ts {
        // One transfer within each time-out; all together take twice as long as that.
        std::thread::sleep(Duration::from_millis(150));
        io.data(r2t, 0, &data, true);
        assert_eq!(io.expect_response().status, Status::SUCCESS);
    }
    // An idle connection is not checked.
    std::thread::sleep(Duration::from_millis(1000));
    assert_eq!(io.read_back(1, 0, 4096), Ok(data));
    io.capsule(write(1, 0, 4096), &[]);
    _ = io.expect_r2t();
    let ReceivedPdu::Response(cqe) = io.receive_pdu() else { panic!("the write is not answered") };
    assert_eq!(cqe.status, Status::TRANSIENT_TRANSPORT_ERROR);
    assert_eq!(io.receive_pdu(), ReceivedPdu::Closed);
}

/// Hosts with so many stalled queues in all, an honest one beside them, and the memory that all may take.
fn honest_host_beside(queues: u16, command: Sqe, arena_bytes: usize) {
    /// Most I/O queues of a controller.
    const QUEUES_PER_HOST: u16 = 125;
    let rig = rig(arena_bytes, 3000);
    let honest = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &honest, 1, 16, false);
    round_trip(&mut io, 0);
    let mut hosts = Vec::new();
    for number in 0..queues.div_ceil(QUEUES_PER_HOST) {
        let count = QUEUES_PER_HOST.min(queues - number * QUEUES_PER_HOST);
        hosts.push(stalled_queues_of(&rig, [10 + number as u8; 16], count, command));
        // It makes progress while they connect, and keeps its queue.
        round_trip(&mut io, number as u8);
    }
    for salt in 0..30 {
        round_trip(&mut io, salt);
    }
    let allocated = rig.arena.allocated_bytes();
    assert!(allocated <= arena_bytes, "{allocated} bytes are allocated");
    // A host that comes now finds its place too.
    let newcomer = RawTcpHost::admin_as(&rig, [2; 16]);
    let mut second = RawTcpHost::io_as(&rig, &newcomer, 1, 16, false, [2; 16]);
    round_trip(&mut second, 1);
    wait_until("the stalled queues are closed", || rig.target.qpairs(NQN).unwrap().len() == 4 + hosts.len());
    drop(hosts);
    wait_until("memory is given back", || rig.arena.allocated_bytes() <= 3 * (10 << 20));
    round_trip(&mut io, 2);
}

#[test]
fn three_hundred_queues_that_never_send_their_data_do_not_stop_an_honest_host() {
    honest_host_beside(300, write(1, 0, COMMAND_BYTES), 256 << 20);
}

#[test]
fn three_hundred_queues_that_never_read_do_not_stop_an_honest_host() {
    honest_host_beside(300, read(1, 0, COMMAND_BYTES), 256 << 20);
}

#[test]
fn a_thousand_queues_that_never_send_their_data_do_not_stop_an_honest_host() {
    // One command each fits.
    honest_host_beside(1000, write(1, 0, COMMAND_BYTES), 256 << 20);
}

#[test]
fn a_thousand_queues_that_exhaust_the_memory_do_not_stop_an_honest_host() {
    honest_host_beside(1000, write(1, 0, COMMAND_BYTES), 64 << 20);
}

#[test]
fn the_stalled_queues_of_one_host_hold_no_more_than_a_host_may() {
    let transport = TcpTransportConfig {
        transfer_timeout_ms: 60_000,
        host_bytes_max: Some(1 << 20),
        ..TcpTransportConfig::default()
    };
    let rig = TcpTestTarget::new(TestTargetConfig { transport, ..TestTargetConfig::default() });
    let honest = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &honest, 1, 16, false);
    let (_admin, mut stalled) = stalled_queues(&rig, 100, write(1, 0, COMMAND_BYTES));
    let mut requested = 0;
    for peer in &mut stalled {
        peer.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let mut pdu = [0; 24];
        while std::io::Read::read_exact(&mut peer.stream, &mut pdu).is_ok() {
            requested += 1;
        }
    }
    // Eight commands of 128 KiB on each of two reactors; without the bound it would be four or more a queue.
    assert!((8..=16).contains(&requested), "data of {requested} commands was requested");
    round_trip(&mut io, 4);
}
