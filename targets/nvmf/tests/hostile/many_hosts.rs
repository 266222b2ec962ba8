//! Many hosts at once, and limits on connections and buffers.

use std::time::Duration;

use block_io::{Channel, Request, Status, Tag};
use nvmf::TcpTransportConfig;

use crate::peer::{RawTcpHost, ReceivedPdu, capsule, connect, ic_req, on_host};
use crate::test_target::{NQN, TcpTestTarget, TestTargetConfig, wait_until};

#[test]
fn idle_connections_hold_no_buffers_and_do_not_block_new_hosts() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig {
        max_pending_logins_per_peer: 512,
        ic_timeout_ms: 60_000,
        connect_timeout_ms: 60_000,
        ..TcpTransportConfig::default()
    });
    let mut idle = Vec::new();
    for n in 0..300 {
        let mut peer =
            if n % 3 == 0 { RawTcpHost::open(&rig) } else { RawTcpHost::initialized(&rig, n % 2 == 0) };
        if n % 3 == 2 {
            // A partial Connect.
            let (sqe, data) = connect(0, 32, 0xffff);
            let pdu = capsule(&peer.framing, sqe, &data);
            peer.send(&pdu[..500]);
        }
        idle.push(peer);
    }
    let groups = || rig.target.stats().unwrap().groups;
    wait_until("300 connections are open", || groups().iter().map(|(.., other)| other).sum::<usize>() == 300);
    assert_eq!(rig.arena.allocated_bytes(), 0, "no controller exists yet");
    let uri = rig.uri();
    on_host(|core| async move {
        let mut namespace = nvme::Namespace::open(&core, &uri, &nvme::Options::default()).await.unwrap();
        let mut buffer = core.pool().take(65536).unwrap();
        buffer.as_mut_slice().fill(0x5a);
        let (mut batch, mut done) = (vec![Request::write(Tag(0), 0, 128, buffer)], Vec::new());
        while done.is_empty() {
            namespace.submit(&mut batch);
            namespace.poll(&mut done);
            core.sleep_ns(10_000).await;
        }
        assert_eq!(done.pop().unwrap().status(), Status::SUCCESS);
    });
    drop(idle);
    wait_until("the idle connections are closed", || groups().iter().all(|(.., other)| *other == 0));
}

#[test]
fn connections_above_max_connections_are_closed_until_others_disconnect() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig {
        max_connections: Some(4),
        ..TcpTransportConfig::default()
    });
    let admin = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &admin, 1, 16, false);
    // Those that have not sent Connect do not count.
    let _silent = [RawTcpHost::initialized(&rig, false), RawTcpHost::open(&rig)];
    let others = [RawTcpHost::admin_as(&rig, [2; 16]), RawTcpHost::admin_as(&rig, [3; 16])];
    for _ in 0..20 {
        assert_eq!(RawTcpHost::open(&rig).receive_pdu(), ReceivedPdu::Closed);
    }
    io.round_trip(1);
    drop(others);
    wait_until("the others are disconnected", || rig.target.controllers(NQN).unwrap().len() == 1);
    let _second = RawTcpHost::admin(&rig);
    io.round_trip(2);
}

#[test]
fn silent_connections_make_room_for_hosts() {
    let rig = TcpTestTarget::with_transport(TcpTransportConfig {
        max_connections: Some(8),
        max_pending_logins: 32,
        max_pending_logins_per_peer: 16,
        ic_timeout_ms: 60_000,
        connect_timeout_ms: 60_000,
        ..TcpTransportConfig::default()
    });
    let member = RawTcpHost::admin(&rig);
    let mut io = RawTcpHost::io(&rig, &member, 1, 16, false);
    let mut silent = Vec::new();
    for n in 0..1000 {
        silent.push(RawTcpHost::open(&rig));
        if n % 50 == 0 {
            let _newcomer = RawTcpHost::admin_as(&rig, [2; 16]);
            io.round_trip(n as u8);
        }
    }
    let pending = || rig.target.stats().unwrap().groups.iter().map(|(.., other)| other).sum::<usize>();
    wait_until("newcomers have disconnected", || rig.target.controllers(NQN).unwrap().len() == 1);
    assert!(pending() <= 16, "{} silent connections of one peer are open", pending());
    // The last are open, the first are closed.
    assert_eq!(silent[0].receive_pdu(), ReceivedPdu::Closed);
    silent.pop().unwrap().send(&ic_req(false));
    drop(silent);
    wait_until("the silent connections are closed", || pending() == 0);
}

#[test]
fn eight_deep_queues_make_progress_with_four_mebibytes_of_buffers() {
    const DEPTH: u64 = 64;
    const BYTES: usize = 128 << 10;
    const BLOCKS: u64 = BYTES as u64 / 512;
    // One core: chunks belong to the core that allocated them.
    let rig = TcpTestTarget::new(TestTargetConfig {
        arena_bytes: 4 << 20,
        reactors: 1,
        ..TestTargetConfig::default()
    });
    let (uri, arena) = (rig.uri(), rig.arena.clone());
    on_host(|core| async move {
        let mut hosts = Vec::new();
        for n in 0..8 {
            let options = nvme::Options { host_id: [n + 1; 16], ..nvme::Options::default() };
            hosts.push(nvme::Namespace::open(&core, &uri, &options).await.unwrap());
        }
        let filled = |salt: u64| {
            let mut buffer = core.pool().take(BYTES).unwrap();
            for (at, word) in buffer.as_mut_slice().chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&(at as u64 ^ salt << 32).to_le_bytes());
            }
            buffer
        };
        // Each host has 1 MiB of the device. All write, then half of them read while the others write the
        // same data again, then all read.
        let rounds: [fn(usize) -> bool; 4] = [|_| true, |n| n % 2 == 0, |n| n % 2 == 1, |_| false];
        for writes in rounds {
            let mut batches: Vec<Vec<_>> = (0..8)
                .map(|n| {
                    let request = |tag: u64| {
                        let lba = n as u64 * 2048 + tag % 8 * BLOCKS;
                        if writes(n) {
                            Request::write(Tag(tag), lba, BLOCKS as u32, filled(lba))
                        } else {
                            Request::read(Tag(tag), lba, BLOCKS as u32, core.pool().take(BYTES).unwrap())
                        }
                    };
                    (0..DEPTH).map(request).collect()
                })
                .collect();
            let mut done: Vec<Vec<_>> = (0..8).map(|_| Vec::new()).collect();
            let start = std::time::Instant::now();
            while done.iter().any(|done| done.len() < DEPTH as usize) {
                for ((host, batch), done) in hosts.iter_mut().zip(&mut batches).zip(&mut done) {
                    host.submit(batch);
                    host.poll(done);
                    assert_eq!(host.failure(), None);
                }
                let finished: Vec<usize> = done.iter().map(Vec::len).collect();
                assert!(start.elapsed() < Duration::from_secs(60), "no progress: {finished:?}");
                core.sleep_ns(50_000).await;
            }
            for (n, done) in done.into_iter().enumerate() {
                for completion in done {
                    assert_eq!(completion.status(), Status::SUCCESS);
                    let lba = n as u64 * 2048 + completion.tag().0 % 8 * BLOCKS;
                    let buffer = completion.into_request().take_data().unwrap().into_single().unwrap();
                    assert!(buffer.as_slice() == filled(lba).as_slice(), "host {n}, block {lba}");
                }
            }
        }
    });
    assert!(arena.allocated_bytes() <= 4 << 20);
    wait_until("the hosts are disconnected", || rig.target.controllers(NQN).unwrap().is_empty());
}
