//! Data that the target and Ringbolt's own initiator send without a copy: nothing changes it before the kernel has sent it.
//!
//! The switch is the process's, so that these tests have a process of their own.
#![allow(clippy::unwrap_used, dead_code)]

#[path = "hostile/peer.rs"]
mod peer;
#[path = "hostile/test_target.rs"]
mod test_target;

use std::sync::{Mutex, MutexGuard};

use block_io::{Channel, Completion, Op, Payload, Request, Status, Tag};
use dma::Data;
use peer::{RawTcpHost, ReceivedPdu, on_host, pattern, read};
use reactor::IdlePolicy;
use sockets::ZERO_COPY_SEND;
use test_target::{NQN, TcpTestTarget, TestTargetConfig, wait_until};
use wire_nvme::Sqe;

const COMMAND_BYTES: usize = 128 << 10;
const COMMANDS: u16 = 32;

/// One test at a time, with zero-copy on for accepted connections, opened ones, or none.
fn switched(server: bool, client: bool) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let guard = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    ZERO_COPY_SEND.set(true, server);
    ZERO_COPY_SEND.set(false, client);
    guard
}

/// Whether the kernel has zero-copy sends; otherwise says so.
fn kernel_can() -> bool {
    let events = os::EventLoop::new(&os::EventLoopConfig::default()).unwrap();
    let can = events.client().socket_capabilities().zero_copy_send;
    if !can {
        println!("SKIPPED: the kernel has no zero-copy send through io_uring");
    }
    can
}

fn rig(arena_bytes: usize) -> TcpTestTarget {
    TcpTestTarget::new(TestTargetConfig { reactors: 1, arena_bytes, ..TestTargetConfig::default() })
}

/// Writes the blocks of all commands, each with its own pattern.
fn fill(io: &mut RawTcpHost, salt: u8) {
    for number in 0..COMMANDS {
        let data = pattern(COMMAND_BYTES, number as u8 ^ salt);
        io.capsule(peer::write(1, lba(number), data.len()), &[]);
        let r2t = io.expect_r2t();
        io.data(&r2t, 0, &data, true);
        assert_eq!(io.expect_response().status, Status::SUCCESS);
    }
}

fn lba(number: u16) -> u64 {
    u64::from(number) * (COMMAND_BYTES / 512) as u64
}

/// A queue that submits all reads, and reads none of the answers.
fn late_reader(rig: &TcpTestTarget, admin: &RawTcpHost) -> RawTcpHost {
    let mut peer = RawTcpHost::io(rig, admin, 1, 128, true);
    // Whatever the machine's defaults are: what the kernel has received counts as sent.
    rustix::net::sockopt::set_socket_recv_buffer_size(&peer.stream, COMMAND_BYTES).unwrap();
    for cid in 0..COMMANDS {
        peer.capsule(Sqe { cid, ..read(1, lba(cid), COMMAND_BYTES) }, &[]);
    }
    peer
}

/// Commands of I/O queues that have completed: those whose data is being sent have not.
fn completed(rig: &TcpTestTarget) -> u64 {
    rig.target.stats().unwrap().totals[0].completed_commands
}

fn commands(rig: &TcpTestTarget, qid: u16) -> u64 {
    let qpairs = rig.target.qpairs(NQN).unwrap();
    qpairs.iter().find(|qpair| qpair.qid == qid).map_or(0, |qpair| qpair.commands)
}

#[test]
fn data_is_intact_when_the_peer_reads_late() {
    for server in [false, true] {
        let _turn = switched(server, false);
        let rig = rig(64 << 20);
        let admin = RawTcpHost::admin(&rig);
        let mut writer = RawTcpHost::io(&rig, &admin, 2, 32, false);
        fill(&mut writer, 0);
        let before = completed(&rig);
        let mut late = late_reader(&rig, &admin);
        wait_until("the reads arrive", || commands(&rig, 1) == u64::from(COMMANDS) + 1);
        // The blocks change, and the memory of other commands comes from the pool that these have theirs from.
        fill(&mut writer, 0x55);
        let done = completed(&rig) - before - 1 - u64::from(COMMANDS);
        let zero_copy = server && kernel_can();
        if zero_copy {
            // Without zero-copy the sockets' buffers can take all of them.
            assert!(done < u64::from(COMMANDS) - 8, "{done} reads completed that nothing has received");
        }
        let (mut seen, mut old) = (vec![false; COMMANDS.into()], 0);
        while seen.contains(&false) {
            match late.receive_pdu() {
                ReceivedPdu::Data(pdu, data) => {
                    // A read that waited for the queue's share of buffers finds the new data, and never some of each.
                    let is_old = data == pattern(COMMAND_BYTES, pdu.cccid as u8);
                    let is_new = data == pattern(COMMAND_BYTES, pdu.cccid as u8 ^ 0x55);
                    assert!(is_old || is_new, "data of {}", pdu.cccid);
                    old += u64::from(is_old);
                    assert!(!std::mem::replace(&mut seen[usize::from(pdu.cccid)], true));
                }
                ReceivedPdu::Response(cqe) => assert_eq!(cqe.status, Status::SUCCESS),
                other => panic!("{other:?}"),
            }
        }
        if zero_copy {
            assert!(old > done, "{old} reads have the old data, {done} of them were received in time");
        }
        // Everything is given back.
        let all = 2 + 3 * u64::from(COMMANDS);
        wait_until("all commands complete", || completed(&rig) == all);
        let sends = rig.target.stats().unwrap().tcp_sends[0];
        assert_eq!(sends.zero_copied + sends.copied > 0, zero_copy, "{sends:?}");
        writer.round_trip(7);
    }
}

#[test]
fn a_connection_that_closes_with_sends_in_flight_gives_its_memory_back() {
    let _turn = switched(true, false);
    // Room for the reads of two queues.
    let rig = rig(10 << 20);
    let admin = RawTcpHost::admin(&rig);
    let mut writer = RawTcpHost::io(&rig, &admin, 2, 32, false);
    fill(&mut writer, 0);
    let mut stalled = Vec::new();
    for salt in 0..4 {
        let mut late = late_reader(&rig, &admin);
        wait_until("the reads arrive", || commands(&rig, 1) == u64::from(COMMANDS) + 1);
        // Behind the reads on the target's only reactor.
        writer.round_trip(salt);
        // A violation: the target closes the connection. This end neither reads nor closes.
        late.send(&[0xff; 128]);
        wait_until("the target closes", || commands(&rig, 1) == 0);
        stalled.push(late);
    }
    fill(&mut writer, 1);
    let mut last = late_reader(&rig, &admin);
    let mut seen = 0;
    while seen < COMMANDS {
        match last.receive_pdu() {
            ReceivedPdu::Data(pdu, data) => {
                assert!(data == pattern(COMMAND_BYTES, pdu.cccid as u8 ^ 1), "data of {}", pdu.cccid);
                seen += 1;
            }
            ReceivedPdu::Response(cqe) => assert_eq!(cqe.status, Status::SUCCESS),
            other => panic!("{other:?}"),
        }
    }
    drop(stalled);
}

/// The host submits the next command as soon as it has the answer of one, before the kernel says that the data is sent: a
/// core that spins reads the socket first. A connection makes few sends without a copy over loopback, so there are many.
#[test]
fn a_full_queue_goes_on_while_the_kernel_has_its_data() {
    const CONNECTIONS: usize = 50;
    const DEPTH: u32 = 8;
    let _turn = switched(true, false);
    let config = TestTargetConfig { reactors: 1, idle: IdlePolicy::Spin, ..TestTargetConfig::default() };
    let rig = TcpTestTarget::new(config);
    let admin = RawTcpHost::admin(&rig);
    let mut writer = RawTcpHost::io(&rig, &admin, 2, 32, false);
    fill(&mut writer, 0);
    for _ in 0..CONNECTIONS {
        let mut host = RawTcpHost::io(&rig, &admin, 1, DEPTH + 1, false);
        let mut next = 0..COMMANDS;
        let mut submit = |host: &mut RawTcpHost| {
            let cid = next.next();
            cid.map(|cid| host.capsule(Sqe { cid, ..read(1, lba(cid), COMMAND_BYTES) }, &[])).is_some()
        };
        let mut outstanding = (0..DEPTH).filter(|_| submit(&mut host)).count();
        while outstanding > 0 {
            let has_answer = match host.receive_pdu() {
                ReceivedPdu::Data(pdu, data) => {
                    assert!(data == pattern(COMMAND_BYTES, pdu.cccid as u8), "data of {}", pdu.cccid);
                    pdu.success
                }
                ReceivedPdu::Response(cqe) => cqe.status == Status::SUCCESS,
                other => panic!("{other:?}"),
            };
            outstanding -= usize::from(has_answer && !submit(&mut host));
        }
        drop(host);
        wait_until("the connection is closed", || commands(&rig, 1) == 0);
    }
}

#[test]
fn the_initiators_writes_arrive_and_their_buffers_are_writable_again() {
    for (client, digest) in [(false, ""), (true, ""), (true, "&ddgst=1")] {
        let _turn = switched(false, client);
        let rig = rig(64 << 20);
        let uri = format!("{}{digest}", rig.uri()).parse().unwrap();
        on_host(|core| async move {
            let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
            // Half of them are parts of an allocation.
            let pair = |_| {
                let mut two = core.pool().take_data(2 * COMMAND_BYTES).unwrap();
                let tail = two.split_off(COMMAND_BYTES);
                [two, tail]
            };
            let mut buffers: Vec<Data> = (0..COMMANDS / 4).flat_map(pair).collect();
            buffers.extend((0..COMMANDS / 2).map(|_| core.pool().take_data(COMMAND_BYTES).unwrap()));
            for round in 0..8 {
                let op = if round % 2 == 0 { Op::Write } else { Op::Read };
                let fill = |(number, mut data): (usize, Data)| {
                    // Fails if the network still shares a buffer.
                    let bytes = data.single_mut().unwrap().as_mut_slice();
                    match op {
                        Op::Write => bytes.copy_from_slice(&pattern(COMMAND_BYTES, number as u8 ^ round)),
                        _ => bytes.fill(0),
                    }
                    let (tag, blocks) = (Tag(number as u64), (COMMAND_BYTES / 512) as u32);
                    Request::with_payload(tag, op, lba(number as u16), blocks, Payload::Data(data))
                };
                let mut batch: Vec<Request<Data>> = buffers.drain(..).enumerate().map(fill).collect();
                let mut done: Vec<Completion<Data>> = Vec::new();
                while done.len() < COMMANDS.into() {
                    namespace.submit(&mut batch);
                    if namespace.poll(&mut done) == 0 && namespace.deadline() != Some(0) {
                        core.next_event().await;
                    }
                }
                done.sort_by_key(Completion::tag);
                for (number, completion) in done.into_iter().enumerate() {
                    assert_eq!(completion.status(), Status::SUCCESS);
                    let data = completion.into_data().unwrap();
                    if op == Op::Read {
                        let expected = pattern(COMMAND_BYTES, number as u8 ^ (round - 1));
                        assert!(data.single().unwrap().as_slice() == expected, "data of {number}");
                    }
                    buffers.push(data);
                }
            }
        });
    }
}
