//! I/O queues that move between reactors, under load, and while what they belong to goes away.
//!
//! Queues are moved by the interface that the control plane's balancer uses.
#![allow(clippy::unwrap_used, dead_code)]

#[path = "../../shell/tests/moves/mod.rs"]
mod moves;
#[path = "hostile/peer.rs"]
mod peer;
#[path = "hostile/test_target.rs"]
mod test_target;

use std::sync::Arc;

use block_io::{Channel, Completion, Request, Status, Tag};
use control::BalancedTarget;
use control::json::json;
use dma::Data;
use moves::{Shuffler, ask, seed};
use nvmf::TcpTransportConfig;
use peer::{RawTcpHost, ReceivedPdu, on_host, pattern, read, write, write_in_capsule};
use random::WyRand;
use reactor::Core;
use test_target::{NQN, TcpTestTarget, wait_until};
use wire_nvme::Sqe;
use wire_nvme::fabrics::PropertySet;
use wire_nvme::registers::offset;

/// A target on two reactors; `None` on a machine with one processor.
fn rig(transport: TcpTransportConfig) -> Option<TcpTestTarget> {
    if os::CpuSet::allowed().cpus().len() < 2 {
        println!("SKIPPED: this machine has one processor, and so one reactor");
        return None;
    }
    Some(TcpTestTarget::with_transport(transport))
}

fn balanced(rig: &TcpTestTarget) -> Arc<dyn BalancedTarget> {
    rig.target.balanced().pop().expect("NVMe/TCP is balanced")
}

fn moved(rig: &TcpTestTarget) -> u64 {
    rig.target.connection_totals().iter().map(|(_, totals)| totals.moved).sum()
}

/// The reactor of a queue; `None` while it is between two.
fn reactor_of(rig: &TcpTestTarget, qid: u16) -> Option<usize> {
    let qpairs = rig.target.qpairs(NQN).unwrap();
    qpairs.iter().find(|qpair| qpair.qid == qid).map(|qpair| qpair.reactor)
}

/// Moves queue 1, the only one, to its other reactor.
fn move_over(rig: &TcpTestTarget) {
    let target = balanced(rig);
    let before = moved(rig);
    wait_until("the queue moves", || {
        if moved(rig) == before
            && let Some(from) = reactor_of(rig, 1)
        {
            ask(&*target, from, 1 - from);
        }
        moved(rig) > before
    });
}

async fn run(
    core: &Core,
    namespace: &mut nvme::Namespace,
    mut batch: Vec<Request<Data>>,
) -> Vec<Completion<Data>> {
    let (total, mut done) = (batch.len(), Vec::new());
    while done.len() < total {
        namespace.submit(&mut batch);
        if namespace.poll(&mut done) == 0 && namespace.deadline() != Some(0) {
            core.next_event().await;
        }
    }
    done
}

/// Regions of the device, each of which is written from its start.
const REGIONS: usize = 128;
const REGION_BYTES: usize = 64 << 10;

/// Writes and reads regions in random order, a number at a time, and compares what is read with what was
/// written. Each command completes once, with success.
async fn verified_load(core: &Core, uri: &nvme::Uri, rounds: usize, mut random: WyRand) {
    let mut namespace = nvme::Namespace::open(core, uri, &nvme::Options::default()).await.unwrap();
    let transfer_max = (namespace.transfer_max_bytes() as usize).min(REGION_BYTES);
    let mut written: Vec<(u8, usize)> = vec![(0, 0); REGIONS];
    for round in 0..rounds {
        let count = 1 + random.index(32);
        let first = random.index(REGIONS);
        let mut batch = Vec::new();
        for number in 0..count {
            // Distinct regions: the order of commands in flight is not defined.
            let region = (first + number * 3) % REGIONS;
            let (salt, length) = written[region];
            let lba = (region * REGION_BYTES / 512) as u64;
            let is_write = length == 0 || random.happens(500);
            let length = match is_write {
                true => [512, 4096, 8192, 16384, transfer_max][random.index(5)].min(transfer_max),
                false => length,
            };
            let mut data = core.pool().take_data(length).unwrap();
            let (tag, blocks) = (Tag(region as u64), (length / 512) as u32);
            if is_write {
                let salt = salt.wrapping_add(1 + round as u8 % 7);
                data.copy_from(0, &pattern(length, salt));
                written[region] = (salt, length);
                batch.push(Request::write(tag, lba, blocks, data));
            } else {
                batch.push(Request::read(tag, lba, blocks, data));
            }
        }
        let mut seen = [false; REGIONS];
        for done in run(core, &mut namespace, batch).await {
            let region = done.tag().0 as usize;
            assert!(!std::mem::replace(&mut seen[region], true), "region {region} completes twice");
            assert_eq!(done.status(), Status::SUCCESS, "round {round}, {:?}", namespace.failure());
            let (salt, length) = written[region];
            let mut got = vec![0; length];
            done.into_data().unwrap().copy_to(0, &mut got);
            // A write returns its buffer with what it has written.
            assert!(got == pattern(length, salt), "round {round}, region {region}");
        }
        assert_eq!(seen.iter().filter(|seen| **seen).count(), count);
    }
    assert_eq!(namespace.failure(), None);
}

#[test]
fn a_verified_load_does_not_notice_that_its_queue_moves() {
    let seed = seed();
    let default = TcpTransportConfig::default;
    for (transport, options) in [
        (default(), ""),
        (default(), "&hdgst=1&ddgst=1"),
        (TcpTransportConfig { in_capsule_data_size: 0, ..default() }, "&hdgst=1&ddgst=1"),
        (TcpTransportConfig { in_capsule_data_size: 0, c2h_success: false, ..default() }, ""),
        (TcpTransportConfig { max_io_size: 8192, ..default() }, ""),
        (TcpTransportConfig { connection_bytes_max: 1, ..default() }, "&ddgst=1"),
    ] {
        let Some(rig) = rig(transport.clone()) else { return };
        let uri: nvme::Uri = format!("{}{options}", rig.uri_text()).parse().unwrap();
        let shuffler = Shuffler::start(balanced(&rig), seed);
        for round in 0..200 {
            let (uri, seed) = (uri.clone(), seed.wrapping_add(round));
            on_host(move |core| async move { verified_load(&core, &uri, 150, WyRand::new(seed)).await });
            if moved(&rig) >= 20 {
                break;
            }
        }
        drop(shuffler);
        let moved = moved(&rig);
        println!("{moved} moves with {transport:?} {options}");
        assert!(moved >= 20, "{moved} moves with {transport:?} {options}");
    }
}

#[test]
fn each_command_is_answered_once_and_the_queue_head_only_advances() {
    const ENTRIES: u16 = 32;
    let seed = seed();
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let admin = RawTcpHost::admin(&rig);
    let mut queue = RawTcpHost::io(&rig, &admin, 1, ENTRIES.into(), true);
    let _shuffler = Shuffler::start(balanced(&rig), seed);
    let mut random = WyRand::new(seed ^ 1);
    // Connect was the first command.
    let mut head = 1;
    for _ in 0..300 {
        let count = 1 + random.index(16) as u16;
        for cid in 0..count {
            match random.happens(500) {
                true => queue.capsule(Sqe { cid, ..read(1, u64::from(cid) * 8, 4096) }, &[]),
                false => {
                    let write = write_in_capsule(1, u64::from(cid) * 8, 4096);
                    queue.capsule(Sqe { cid, ..write }, &pattern(4096, cid as u8));
                }
            }
        }
        let (mut answered, mut advanced) = (vec![false; count.into()], 0);
        while answered.contains(&false) {
            match queue.receive_pdu() {
                ReceivedPdu::Data(..) => {}
                ReceivedPdu::Response(cqe) => {
                    assert_eq!(cqe.status, Status::SUCCESS);
                    assert!(!std::mem::replace(&mut answered[usize::from(cqe.cid)], true), "{cqe:?}");
                    let now = (cqe.sqhd + ENTRIES - head) % ENTRIES;
                    assert!((advanced..=count).contains(&now), "{cqe:?}: {head}, {advanced} of {count}");
                    advanced = now;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(advanced, count, "the last answer reports all commands");
        head = (head + count) % ENTRIES;
    }
    assert!(moved(&rig) > 0);
}

#[test]
fn a_header_that_has_half_arrived_moves_with_its_queue() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let admin = RawTcpHost::admin(&rig);
    for digests in [false, true] {
        let mut queue = RawTcpHost::io(&rig, &admin, 1, 32, digests);
        for cut in [1, 7, 8, 40, 71] {
            let data = pattern(4096, cut as u8);
            let pdu = peer::capsule(&queue.framing, write_in_capsule(1, 0, data.len()), &data);
            queue.send(&pdu[..cut]);
            move_over(&rig);
            queue.send(&pdu[cut..]);
            assert_eq!(queue.expect_response().status, Status::SUCCESS);
            assert_eq!(queue.read_back(1, 0, data.len()), Ok(data));
        }
        drop(queue);
        wait_until("the queue is closed", || reactor_of(&rig, 1).is_none());
    }
}

#[test]
fn a_queue_whose_host_owes_data_stays_and_executes_what_follows() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let target = balanced(&rig);
    let admin = RawTcpHost::admin(&rig);
    let mut queue = RawTcpHost::io(&rig, &admin, 1, 32, true);
    for round in 0..20 {
        let data = pattern(32 << 10, round);
        queue.capsule(Sqe { cid: 1, ..write(1, 512, data.len()) }, &[]);
        let r2t = queue.expect_r2t();
        let (before, from) = (moved(&rig), reactor_of(&rig, 1).unwrap());
        ask(&*target, from, 1 - from);
        // It arrives while the queue waits for the data, or after it has given up to move.
        assert_eq!(queue.write(1, 0, &pattern(4096, round)), Status::SUCCESS);
        assert_eq!(queue.read_back(1, 0, 4096), Ok(pattern(4096, round)));
        assert_eq!(moved(&rig), before, "data was missing");
        queue.data(&r2t, 0, &data, true);
        let answer = queue.expect_response();
        assert_eq!((answer.cid, answer.status), (1, Status::SUCCESS));
        move_over(&rig);
        assert_eq!(queue.read_back(1, 512, data.len()), Ok(data));
    }
}

#[test]
fn commands_that_arrive_in_one_burst_move_with_their_queue() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let admin = RawTcpHost::admin(&rig);
    let mut queue = RawTcpHost::io(&rig, &admin, 1, 128, true);
    let _shuffler = Shuffler::start(balanced(&rig), seed());
    for round in 0..40 {
        let mut burst = Vec::new();
        for cid in 0..100 {
            let write = Sqe { cid, ..write_in_capsule(1, u64::from(cid) * 8, 4096) };
            burst.extend(peer::capsule(&queue.framing, write, &pattern(4096, cid as u8 ^ round)));
        }
        queue.send(&burst);
        let mut answered = [false; 100];
        for _ in 0..100 {
            let answer = queue.expect_response();
            assert_eq!(answer.status, Status::SUCCESS);
            assert!(!std::mem::replace(&mut answered[usize::from(answer.cid)], true), "{answer:?}");
        }
        let cid = u16::from(round) * 2;
        assert_eq!(queue.read_back(1, u64::from(cid) * 8, 4096), Ok(pattern(4096, cid as u8 ^ round)));
    }
    assert!(moved(&rig) > 0);
}

#[test]
fn hosts_that_close_while_their_queues_move_leave_nothing() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let shuffler = Shuffler::start(balanced(&rig), seed());
    for number in 0..60 {
        let admin = RawTcpHost::admin(&rig);
        let mut queues: Vec<_> = (1..4).map(|qid| RawTcpHost::io(&rig, &admin, qid, 32, false)).collect();
        for queue in &mut queues {
            queue.capsule(read(1, 0, 64 << 10), &[]);
            let pdu = peer::capsule(&queue.framing, write_in_capsule(1, 0, 4096), &pattern(4096, 1));
            queue.send(&pdu[..number * 60]);
        }
    }
    // On a busy machine none has moved before it closed.
    let admin = RawTcpHost::admin(&rig);
    let queue = RawTcpHost::io(&rig, &admin, 1, 32, false);
    wait_until("a queue moves", || moved(&rig) > 0);
    drop((queue, admin, shuffler));
    wait_until("all queues are closed", || rig.target.qpairs(NQN).unwrap().is_empty());
    let admin = RawTcpHost::admin(&rig);
    RawTcpHost::io(&rig, &admin, 1, 32, false).round_trip(1);
}

#[test]
fn a_reset_controller_closes_its_queues_wherever_they_are() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let _shuffler = Shuffler::start(balanced(&rig), seed());
    for _ in 0..30 {
        let mut admin = RawTcpHost::admin(&rig);
        let mut queues: Vec<_> = (1..5).map(|qid| RawTcpHost::io(&rig, &admin, qid, 32, false)).collect();
        queues.iter_mut().for_each(|queue| queue.round_trip(3));
        let disable = PropertySet { wide: false, offset: offset::CC, value: 0x0046_0000 };
        assert_eq!(admin.command(disable.to_sqe(), &[]).status, Status::SUCCESS);
        queues.iter_mut().for_each(RawTcpHost::receive_until_closed);
    }
}

#[test]
fn what_is_removed_disconnects_queues_that_move() {
    type Remove = fn(&TcpTestTarget);
    let removals: [(&str, Remove); 3] = [
        ("subsystem", |rig| drop(rig.target.delete_subsystem(NQN).unwrap())),
        ("listener", |rig| rig.target.remove_listener(NQN, rig.address.clone()).unwrap()),
        ("target", |rig| rig.target.disconnect_all().unwrap()),
    ];
    for (what, remove) in removals {
        for round in 0..8 {
            let Some(rig) = rig(TcpTransportConfig::default()) else { return };
            let shuffler = Shuffler::start(balanced(&rig), seed() + round);
            let admin = RawTcpHost::admin(&rig);
            let mut queues: Vec<_> = (1..5).map(|qid| RawTcpHost::io(&rig, &admin, qid, 32, false)).collect();
            queues.iter_mut().for_each(|queue| queue.round_trip(3));
            remove(&rig);
            queues.iter_mut().for_each(RawTcpHost::receive_until_closed);
            let is_open = || rig.target.connection_totals().iter().any(|(_, totals)| totals.open > 0);
            drop(admin);
            wait_until(what, || !is_open());
            drop(shuffler);
        }
    }
}

#[test]
fn a_host_without_keep_alive_loses_queues_that_move() {
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let _shuffler = Shuffler::start(balanced(&rig), seed());
    let admin = RawTcpHost::admin_with_keep_alive(&rig, 1000);
    let mut queues: Vec<_> = (1..5).map(|qid| RawTcpHost::io(&rig, &admin, qid, 32, false)).collect();
    queues.iter_mut().for_each(|queue| queue.round_trip(3));
    queues.iter_mut().for_each(RawTcpHost::receive_until_closed);
    wait_until("all queues are closed", || rig.target.qpairs(NQN).unwrap().is_empty());
}

/// Queues of a program whose scheduler is `dynamic`, all of which begin on its first reactor.
#[test]
fn the_dynamic_scheduler_divides_queues_that_all_begin_on_one_reactor() {
    const QUEUES: u16 = 16;
    let Some(rig) = rig(TcpTransportConfig::default()) else { return };
    let target = balanced(&rig);
    let admin = RawTcpHost::admin(&rig);
    let mut queues: Vec<_> = (1..=QUEUES).map(|qid| RawTcpHost::io(&rig, &admin, qid, 32, false)).collect();
    let count_on = |reactor: usize| {
        let qpairs = rig.target.qpairs(NQN).unwrap();
        qpairs.iter().filter(|qpair| qpair.qid > 0 && qpair.reactor == reactor).count()
    };
    wait_until("all queues are on the first reactor", || {
        ask(&*target, 1, 0);
        count_on(0) == usize::from(QUEUES)
    });
    let before = moved(&rig);

    let plane = moves::plane(rig.reactors.as_ref().unwrap(), target);
    let set = |params| plane.invoke("framework_set_scheduler", params).unwrap();
    set(json!({ "name": "dynamic", "period": 50_000 }));
    wait_until("both reactors have queues", || {
        for _ in 0..20 {
            for queue in &mut queues {
                (0..4).for_each(|cid| queue.capsule(Sqe { cid, ..read(1, 0, 128 << 10) }, &[]));
            }
            queues.iter_mut().for_each(|queue| receive_reads(queue, 4));
        }
        count_on(1) >= 4
    });
    set(json!({ "name": "static" }));
    println!("{} and {} queues", count_on(0), count_on(1));
    assert!(count_on(0) >= 4, "they do not all go to the other");
    assert!(moved(&rig) >= before + 4);
    plane.drain();
}

/// Receives the data and the responses of this number of reads.
fn receive_reads(queue: &mut RawTcpHost, count: usize) {
    let mut answered = 0;
    while answered < count {
        if let ReceivedPdu::Response(cqe) = queue.receive_pdu() {
            assert_eq!(cqe.status, Status::SUCCESS);
            answered += 1;
        }
    }
}
