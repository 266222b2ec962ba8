//! Connections that move between reactors, under load, and while what they belong to goes away.
//!
//! They are moved by the interface that the control plane's balancer uses.
#![allow(clippy::unwrap_used)]

#[path = "moving/load.rs"]
mod load;
#[path = "../../shell/tests/moves/mod.rs"]
mod moves;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use bdev::{Registry, malloc};
use control::BalancedTarget;
use control::json::json;
use iscsi::{InitiatorGroupConfig, IscsiTarget, PortalGroupConfig, TargetNodeConfig};
use load::{DataStyle, IscsiLoad, LOAD_BYTES};
use moves::{Shuffler, counts, seed, wait_until};
use reactor::Reactors;

const NODE: &str = "iqn.2016-06.io.spdk:disk";

/// A target on two reactors.
struct Rig {
    reactors: Option<Reactors>,
    registry: Registry,
    target: IscsiTarget,
    port: u16,
}

impl Rig {
    fn new() -> Option<Rig> {
        let reactors = moves::reactors()?;
        let registry = Registry::new();
        malloc::create(&registry, malloc::MallocConfig::new("disk", LOAD_BYTES as u64 / 512, 512)).unwrap();
        let target = IscsiTarget::new(registry.clone(), reactors.handles());
        let address = "127.0.0.1:0".parse().unwrap();
        target.create_portal_group(PortalGroupConfig::new(1, vec![address])).unwrap();
        target.create_initiator_group(InitiatorGroupConfig::anyone(2)).unwrap();
        target.create_node(TargetNodeConfig::new(NODE, vec![(1, 2)], vec![("disk".into(), 0)])).unwrap();
        let port = target.portal_groups()[0].portals[0].port();
        Some(Rig { reactors: Some(reactors), registry, target, port })
    }

    fn balanced(&self) -> Arc<dyn BalancedTarget> {
        self.target.balanced().expect("it has a portal group")
    }

    fn moved(&self) -> u64 {
        self.target.connection_totals().moved
    }

    fn initiator(&self) -> Initiator {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_nodelay(true).unwrap();
        Initiator(stream)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.target.shutdown();
        drop(self.reactors.take());
    }
}

/// A connection of an initiator.
struct Initiator(TcpStream);

impl Initiator {
    /// Sends what a load has, and receives once. Returns whether the connection is open.
    fn step(&mut self, load: &mut IscsiLoad) -> bool {
        let requests = load.requests();
        if self.0.write_all(&requests).is_err() {
            return false;
        }
        let mut bytes = vec![0; 64 << 10];
        let count = self.0.read(&mut bytes).unwrap_or(0);
        load.receive(&bytes[..count]);
        count > 0
    }

    fn run(&mut self, load: &mut IscsiLoad) {
        while !load.is_done() {
            assert!(self.step(load), "the connection is closed");
        }
    }
}

fn name(number: u64) -> String {
    format!("iqn.2026-11.io.ringbolt:host{number}")
}

#[test]
fn verified_loads_do_not_notice_that_their_connections_move() {
    let seed = seed();
    for number in 0..8 {
        // A device of zeros for each: a load knows what it has written only.
        let Some(rig) = Rig::new() else { return };
        let _shuffler = Shuffler::start(rig.balanced(), seed);
        let style = DataStyle::of_seed(number);
        let mut load = IscsiLoad::new(seed, (&name(number), NODE), style, 16, 300);
        let mut initiator = rig.initiator();
        for _ in 0..200 {
            load.add(300);
            initiator.run(&mut load);
            if rig.moved() >= 10 {
                break;
            }
        }
        let moved = rig.moved();
        println!("{moved} moves with {style:?}");
        assert!(moved >= 10, "{moved} moves with {style:?}");
    }
}

#[test]
fn what_is_removed_closes_connections_that_move() {
    type Remove = fn(&Rig);
    let removals: [(&str, Remove); 4] = [
        // Waits until the device is free.
        ("the node", |rig| rig.target.delete_node(NODE).unwrap().wait().unwrap()),
        ("the portal group", |rig| rig.target.delete_portal_group(1).unwrap()),
        ("the target", |rig| rig.target.shutdown()),
        ("the initiators", |_| {}),
    ];
    for (what, remove) in removals {
        for round in 0..6 {
            let Some(rig) = Rig::new() else { return };
            let shuffler = Shuffler::start(rig.balanced(), seed() + round);
            let mut all: Vec<(Initiator, IscsiLoad)> = (0..4)
                .map(|number| {
                    let style = DataStyle::of_seed(number + round);
                    let mut load = IscsiLoad::new(number, (&name(number), NODE), style, 8, 100_000);
                    load.is_shared = true;
                    (rig.initiator(), load)
                })
                .collect();
            for _ in 0..20 * (round + 1) {
                assert!(all.iter_mut().all(|(initiator, load)| initiator.step(load)));
            }
            remove(&rig);
            if what == "the initiators" {
                all.clear();
            }
            for (initiator, _) in &mut all {
                let mut bytes = vec![0; 64 << 10];
                while initiator.0.read(&mut bytes).is_ok_and(|count| count > 0) {}
            }
            wait_until(what, || rig.target.connection_totals().open == 0);
            drop(shuffler);
        }
    }
}

/// A logical unit that goes away fails its commands, wherever the connections are; they stay.
#[test]
fn a_device_that_is_removed_leaves_connections_that_move_open() {
    for round in 0..6 {
        let Some(rig) = Rig::new() else { return };
        let shuffler = Shuffler::start(rig.balanced(), seed() + round);
        let mut all: Vec<(Initiator, IscsiLoad)> = (0..4)
            .map(|number| {
                let mut load =
                    IscsiLoad::new(number, (&name(number), NODE), DataStyle::of_seed(number), 8, 200);
                (load.is_shared, load.may_fail) = (true, true);
                (rig.initiator(), load)
            })
            .collect();
        for _ in 0..5 * (round + 1) {
            assert!(all.iter_mut().all(|(initiator, load)| initiator.step(load)));
        }
        rig.registry.unregister("disk").unwrap();
        for (initiator, load) in &mut all {
            initiator.run(load);
        }
        let before = rig.moved();
        wait_until("connections move on", || rig.moved() > before + 4);
        for (initiator, load) in &mut all {
            load.add(5);
            initiator.run(load);
        }
        drop(shuffler);
    }
}

#[test]
fn connections_that_move_are_asked_to_log_out_once() {
    let Some(rig) = Rig::new() else { return };
    let shuffler = Shuffler::start(rig.balanced(), seed());
    let mut all: Vec<(Initiator, IscsiLoad)> = (0..6)
        .map(|number| {
            let mut load = IscsiLoad::new(number, (&name(number), NODE), DataStyle::of_seed(number), 8, 10);
            load.is_shared = true;
            let mut initiator = rig.initiator();
            initiator.run(&mut load);
            (initiator, load)
        })
        .collect();
    for round in 1..60 {
        rig.target.request_logout(NODE, Some(1), 30).unwrap();
        for (initiator, load) in &mut all {
            while load.logout_requests < round {
                load.add(2);
                initiator.run(load);
            }
        }
    }
    drop(shuffler);
    assert!(all.iter().all(|(_, load)| load.logout_requests == 59));
    assert!(rig.moved() > 0);
}

/// An initiator that logs in again while its connection is between two reactors replaces that session.
#[test]
fn a_session_that_moves_is_replaced_when_its_initiator_logs_in_again() {
    let Some(rig) = Rig::new() else { return };
    let _shuffler = Shuffler::start(rig.balanced(), seed());
    let mut before: Option<Initiator> = None;
    for round in 0..150 {
        let mut load = IscsiLoad::new(round, (&name(1), NODE), DataStyle::of_seed(round), 8, 20);
        load.is_shared = true;
        let mut initiator = rig.initiator();
        initiator.run(&mut load);
        if let Some(mut replaced) = before.replace(initiator) {
            // Its session has ended, and nothing is left of it.
            let mut bytes = vec![0; 64 << 10];
            while replaced.0.read(&mut bytes).is_ok_and(|count| count > 0) {}
        }
    }
    drop(before);
    wait_until("all connections are closed", || rig.target.connection_totals().open == 0);
    assert!(rig.moved() > 0);
}

#[test]
fn sessions_leave_a_thread_whose_mask_is_without_its_core_and_logins_end_elsewhere() {
    const SESSIONS: usize = 6;
    let Some(rig) = Rig::new() else { return };
    let target = rig.balanced();
    let plane = moves::plane(rig.reactors.as_ref().unwrap(), target.clone());
    let start = |number: usize| {
        let style = DataStyle::of_seed(number as u64);
        let mut load = IscsiLoad::new(1, (&name(number as u64), NODE), style, 4, 30);
        load.is_shared = true;
        let mut initiator = rig.initiator();
        initiator.run(&mut load);
        (initiator, load)
    };
    let mut all: Vec<(Initiator, IscsiLoad)> = (0..SESSIONS).map(start).collect();
    assert!(counts(&*target).iter().all(|count| *count > 0));
    let handles = rig.reactors.as_ref().unwrap().handles();
    for (thread, other) in [(1, 1), (2, 0)] {
        // A connection whose initiator has not logged in yet.
        let mut late = rig.initiator();
        let mask = json!({ "id": thread, "cpumask": format!("[{}]", handles[other].cpu()) });
        plane.invoke("thread_set_cpumask", mask).unwrap();
        let mut load = IscsiLoad::new(1, (&name(90 + other as u64), NODE), DataStyle::of_seed(1), 4, 30);
        load.is_shared = true;
        late.run(&mut load);
        all.push((late, load));
        wait_until("all sessions are on the other reactor", || counts(&*target)[other] == all.len());
        for (initiator, load) in &mut all {
            load.add(20);
            initiator.run(load);
        }
        let own = json!({ "id": thread, "cpumask": format!("[{}]", handles[1 - other].cpu()) });
        plane.invoke("thread_set_cpumask", own).unwrap();
    }
    let both = json!({ "id": 1, "cpumask": format!("[{}]", handles[1].cpu()) });
    plane.invoke("thread_set_cpumask", both).unwrap();
    let refused = json!({ "id": 2, "cpumask": format!("[{}]", handles[0].cpu()) });
    let error = plane.invoke("thread_set_cpumask", refused).unwrap_err();
    assert!(error.message.contains("kept away"), "{}", error.message);
    plane.drain();
}
