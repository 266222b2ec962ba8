//! Connections that move between any two commands, on networks that cut and stall.

#[path = "../../../tests/moving/load.rs"]
mod load;

use super::*;
use load::{DataStyle, IscsiLoad};

const COMMANDS: usize = 120;

fn faults(seed: u64) -> NetworkFaults {
    match seed % 3 {
        0 => NetworkFaults::default(),
        1 => NetworkFaults { cut_per_mille: 300, stall_per_mille: 200, ..NetworkFaults::default() },
        _ => NetworkFaults { cut_per_mille: 50, stall_per_mille: 500, ..NetworkFaults::default() },
    }
}

/// Runs seeds: that of `RINGBOLT_SEED`, or all below `count`. `run` returns the moves.
fn seeds(count: u64, mut run: impl FnMut(u64) -> u64) {
    let one = std::env::var("RINGBOLT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let mut moves = 0;
    for seed in one.map_or(0..count, |seed| seed..seed + 1) {
        println!("RINGBOLT_SEED={seed}");
        moves += run(seed);
    }
    assert!(one.is_some() || moves >= 5 * count, "only {moves} moves");
}

/// Sends what a load has, in parts, until it is done. Returns the number of polls.
fn run(target: &mut SimulatedTarget, load: &mut IscsiLoad, seed: u64) {
    let mut random = WyRand::new(seed ^ 7);
    let id = target.connect();
    let (mut unsent, mut received) = (Vec::new(), Vec::new());
    for _ in 0..1_000_000 {
        if unsent.is_empty() && random.happens(300) {
            unsent = load.requests();
        }
        let part = if random.happens(600) { unsent.len() } else { unsent.len().min(random.index(80)) };
        if let TransferResult::Bytes(count) = target.send(id, &unsent[..part]) {
            unsent.drain(..count);
        }
        target.poll();
        assert!(target.receive(id, &mut received).is_some(), "the connection is closed");
        load.receive(&received);
        received.clear();
        if load.is_done() {
            return;
        }
    }
    panic!("it stands still");
}

#[test]
fn every_command_is_answered_once_in_order_with_its_data_whenever_its_connection_moves() {
    seeds(48, |seed| {
        let mut target = SimulatedTarget::new(seed, faults(seed));
        target.moves = true;
        let style = DataStyle::of_seed(seed / 3);
        let mut load = IscsiLoad::new(seed, (INITIATOR, NODE), style, 1 + seed as usize % 8, COMMANDS);
        run(&mut target, &mut load, seed);
        assert_eq!((target.held_bytes(), load.attentions), (0, 1));
        target.group.totals().moved
    });
}

/// Commands arrive before the data that the initiator owes to others, so that the connection can only move if
/// it receives them and begins none.
#[test]
fn a_connection_moves_whose_writes_never_cease() {
    // The number after that of the last write.
    const WRITES: u32 = 300;
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No"), ("InitialR2T", "Yes")]);
    let write = |initiator: &mut Initiator, target: &mut SimulatedTarget| {
        let lba = initiator.cmd_sn % 512 * 8;
        initiator.command(target, transfer(WRITE, lba, 8), 4096, (false, true), &[], true);
    };
    (0..3).for_each(|_| write(&mut initiator, &mut target));
    target.moves = true;
    let mut answers = 0;
    // Number 1 was the command that has taken the unit attention.
    while answers < WRITES - 2 {
        let received = initiator.read(&mut target);
        match received.opcode() {
            Opcode::R2t => {
                // A further write goes first.
                if initiator.cmd_sn < WRITES {
                    write(&mut initiator, &mut target);
                }
                let r2t = R2t::decode(&received.header).unwrap();
                initiator.answer(&mut target, &r2t, &[initiator.cmd_sn as u8; 4096], 4096);
            }
            _ => {
                assert_eq!(received.response().status, 0);
                answers += 1;
            }
        }
    }
    let moved = target.group.totals().moved;
    assert!(moved > 10, "{moved} moves");
}

#[test]
fn a_move_that_takes_too_long_ends_and_what_has_waited_for_it_begins() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "Yes"), ("InitialR2T", "Yes")]);
    for round in 1..4u8 {
        let owed = [round; 16384];
        let tag = initiator.command(&mut target, transfer(WRITE, 0, 32), 16384, (false, true), &[], true);
        let r2t = R2t::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(r2t.initiator_task_tag, tag);
        // The data is missing, and what comes in its place waits: with its data, and in its order.
        let before = target.group.totals().moved;
        target.group.move_all(target.now_ns);
        let first =
            initiator.command(&mut target, transfer(WRITE, 64, 8), 4096, (false, true), &[round; 4096], true);
        let second = initiator.command(&mut target, transfer(READ, 64, 8), 4096, (true, false), &[], true);
        assert_eq!(initiator.read(&mut target).response().initiator_task_tag, first);
        let read = initiator.read(&mut target);
        assert_eq!(DataIn::decode(&read.header).unwrap().initiator_task_tag, second);
        assert_eq!(read.data, [round; 4096]);
        assert_eq!(target.group.totals().moved, before);
        initiator.answer(&mut target, &r2t, &owed, 5000);
        assert_eq!(initiator.read(&mut target).response().initiator_task_tag, tag);
        target.group.move_all(target.now_ns);
        assert_eq!(initiator.read_blocks(&mut target, 0, 32, 16384), owed);
        assert!(target.group.totals().moved > before, "it moves when nothing is missing");
    }
}

#[test]
fn connections_end_wherever_they_are_when_initiators_leave_or_the_node_is_deleted() {
    seeds(30, |seed| {
        let mut target = SimulatedTarget::new(seed, faults(seed));
        let mut random = WyRand::new(seed);
        let names: Vec<String> = (0..5).map(|number| format!("{INITIATOR}{number}")).collect();
        let mut all: Vec<(ConnectionId, IscsiLoad, Vec<u8>)> = names
            .iter()
            .map(|name| {
                let mut load = IscsiLoad::new(seed, (name, NODE), DataStyle::of_seed(seed), 8, 10_000);
                load.is_shared = true;
                (target.connect(), load, Vec::new())
            })
            .collect();
        target.moves = true;
        for _ in 0..200 + random.index(300) {
            for (id, load, unsent) in &mut all {
                unsent.extend(load.requests());
                if let TransferResult::Bytes(count) = target.send(*id, unsent) {
                    unsent.drain(..count);
                }
                let mut received = Vec::new();
                target.receive(*id, &mut received);
                load.receive(&received);
            }
            target.poll();
        }
        all.drain(..2).for_each(|(id, ..)| target.initiators.close(id));
        let moved = target.group.totals().moved;
        if seed % 2 == 0 {
            let core = target.reactor.core();
            target.group.apply(&core, Arc::default(), target.now_ns);
        } else {
            all.drain(..).for_each(|(id, ..)| target.initiators.close(id));
        }
        for _ in 0..400_000 {
            for (id, ..) in &all {
                target.receive(*id, &mut Vec::new());
            }
            target.poll();
            if target.group.connections().is_empty() {
                break;
            }
        }
        assert!(target.group.connections().is_empty());
        assert_eq!(target.held_bytes(), 0);
        moved
    });
}

/// Connections move to a core that has no memory left for all of them, and wait there for each other's.
#[test]
fn connections_that_move_to_a_core_without_memory_wait_for_it() {
    seeds(4, |seed| {
        let mut target = SimulatedTarget::with_memory(4 << 20);
        let names: Vec<String> = (0..12).map(|number| format!("{INITIATOR}{number}")).collect();
        let mut all: Vec<(ConnectionId, IscsiLoad, Vec<u8>)> = names
            .iter()
            .map(|name| {
                let mut load = IscsiLoad::new(seed, (name, NODE), DataStyle::of_seed(2), 8, 60);
                load.is_shared = true;
                (target.connect(), load, Vec::new())
            })
            .collect();
        target.moves = true;
        let mut polls = 0;
        while all.iter().any(|(_, load, _)| !load.is_done()) {
            polls += 1;
            assert!(polls < 1_000_000, "they stand still");
            for (id, load, unsent) in &mut all {
                unsent.extend(load.requests());
                if let TransferResult::Bytes(count) = target.send(*id, unsent) {
                    unsent.drain(..count);
                }
                let mut received = Vec::new();
                assert!(target.receive(*id, &mut received).is_some(), "a connection is closed");
                load.receive(&received);
            }
            target.poll();
        }
        assert_eq!(target.held_bytes(), 0);
        target.group.totals().moved
    });
}
