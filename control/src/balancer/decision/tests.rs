//! Tests, on a model of cores whose connections ask for some of their time.

use proptest::prelude::*;

use super::*;

/// Connections with what they would take of a core if they could, in millionths, and the core that each is
/// on.
#[derive(Clone, Debug)]
struct Machine {
    cores: usize,
    connections: Vec<(u32, usize)>,
}

impl Machine {
    /// What a period shows: a core that is asked for too much gives each connection its part.
    fn loads(&self) -> Vec<CoreLoad> {
        let mut loads = vec![CoreLoad::default(); self.cores];
        for (index, load) in loads.iter_mut().enumerate() {
            let own = || self.connections.iter().enumerate().filter(|(_, (_, core))| *core == index);
            let asked: u64 = own().map(|(_, (demand, _))| u64::from(*demand)).sum();
            load.busy_ppm = asked.min(1_000_000) as u32;
            load.connections = own()
                .map(|(id, (demand, _))| LoadedConnection {
                    target: 0,
                    id: id as u64,
                    cost_ppm: (u64::from(*demand) * u64::from(load.busy_ppm) / asked.max(1)) as u32,
                    is_movable: true,
                })
                .collect();
        }
        loads
    }

    /// Decides and moves. Returns how many moved.
    fn step(&mut self) -> usize {
        let decisions = decide(self.loads());
        for Decision { id, from, to, .. } in &decisions {
            let connection = &mut self.connections[*id as usize];
            assert_eq!(connection.1, *from);
            connection.1 = *to;
        }
        decisions.len()
    }

    /// Moves until nothing does. Returns the number of decisions with moves.
    fn settle(&mut self) -> usize {
        for round in 0..100 {
            if self.step() == 0 {
                return round;
            }
        }
        panic!("it never ends: {:?} {:?}", self.counts(), self);
    }

    fn counts(&self) -> Vec<usize> {
        (0..self.cores).map(|core| self.connections.iter().filter(|(_, own)| *own == core).count()).collect()
    }

    fn of(cores: &[usize], demand: u32) -> Machine {
        let connections = cores.iter().enumerate().flat_map(|(core, count)| vec![(demand, core); *count]);
        Machine { cores: cores.len(), connections: connections.collect() }
    }
}

/// A decision is at the end of a period; what was measured while connections moved, in the next one, is not
/// used.
fn assert_within_a_second(rounds: usize) {
    let us = 2 * rounds as u64 * crate::scheduler::PERIOD_DEFAULT_US;
    assert!(us <= 1_000_000, "{rounds} rounds take {us} us");
}

#[test]
fn queue_pairs_of_busy_cores_become_equally_many() {
    // Each would take a twentieth of a core.
    let mut machine = Machine::of(&[281, 40, 40, 39], 50_000);
    let rounds = machine.settle();
    assert_eq!(machine.counts(), [100; 4]);
    assert_within_a_second(rounds);
}

#[test]
fn connections_that_all_begin_on_one_core_spread() {
    let mut machine = Machine::of(&[16, 0], 200_000);
    let rounds = machine.settle();
    assert_eq!(machine.counts(), [8, 8]);
    assert_within_a_second(rounds);
}

#[test]
fn a_core_that_one_connection_keeps_busy_sheds_the_others_and_keeps_that_one() {
    let mut machine = Machine::of(&[8, 0], 10_000);
    machine.connections[3].0 = 2_000_000;
    let rounds = machine.settle();
    assert_eq!((machine.counts(), machine.connections[3].1), (vec![1, 7], 0));
    assert_eq!(rounds, 1);
    // Nor do the others come back when they make their core busy.
    for connection in &mut machine.connections {
        connection.0 = connection.0.max(300_000);
    }
    assert_eq!(machine.settle(), 0);
}

#[test]
fn a_machine_that_is_idle_or_even_moves_nothing() {
    for mut machine in [
        Machine::of(&[50, 0, 1], 100),
        Machine::of(&[4, 3], 100_000),
        Machine::of(&[10, 10], 200_000),
        Machine::of(&[104, 98, 98, 100], 200_000),
        Machine::of(&[1, 0], 2_000_000),
        Machine::of(&[], 0),
        Machine::of(&[9], 500_000),
    ] {
        assert_eq!(machine.settle(), 0, "{machine:?}");
    }
}

#[test]
fn what_may_not_move_stays_and_counts() {
    let connection = |id, cost_ppm, is_movable| LoadedConnection { target: 1, id, cost_ppm, is_movable };
    let load = |busy_ppm, connections| CoreLoad { busy_ppm, connections, is_excluded: false };
    let fixed = vec![connection(1, 500_000, false), connection(2, 400_000, false)];
    assert_eq!(decide(vec![load(900_000, fixed), load(0, Vec::new())]), []);
    let mixed = vec![connection(1, 500_000, false), connection(2, 300_000, true)];
    let expected = Decision { target: 1, id: 2, from: 0, to: 1 };
    assert_eq!(decide(vec![load(900_000, mixed), load(0, Vec::new())]), [expected]);
    // What is not a connection keeps a core busy, too.
    assert_eq!(decide(vec![load(1_000_000, Vec::new()), load(0, Vec::new())]), []);
}

#[test]
fn excluded_cores_neither_give_nor_get() {
    for (counts, demand) in [([40, 0, 2], 50_000), ([90, 30, 90], 50_000), ([4, 8, 0], 200_000)] {
        let mut loads = Machine::of(&counts, demand).loads();
        loads[1].is_excluded = true;
        for round in decide(loads) {
            assert!(round.from != 1 && round.to != 1, "{round:?}");
        }
    }
    // There is a difference that is too large, but only to a core that is excluded.
    let mut loads = Machine::of(&[8, 0], 100_000).loads();
    loads[1].is_excluded = true;
    assert_eq!(decide(loads), []);
}

/// A connection stays for this many decisions after its first move, and each time for twice as many, up to 64
/// times: five decisions a second, and the times of targets.
const STAY: usize = 5;
const DOUBLED_MAX: u32 = 6;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// However equal connections are spread and whatever they ask for: moves come to an end, and nothing
    /// moves any more afterwards.
    #[test]
    fn equal_connections_settle(counts in prop::collection::vec(0..200usize, 1..6), demand in 1..2_000_000u32) {
        let mut machine = Machine::of(&counts, demand);
        machine.settle();
        let settled = machine.connections.clone();
        prop_assert_eq!(machine.step(), 0);
        prop_assert_eq!(machine.connections, settled);
    }

    /// Whatever each asks for: it moves seven times at first, and then as often as the longest stay allows.
    #[test]
    fn no_connection_moves_for_ever(
        cores in 1..6usize,
        connections in prop::collection::vec(
            (prop_oneof![1..2_000u32, 1..300_000u32, 1..9_000_000u32], 0..8usize), 0..60),
    ) {
        const DECISIONS: usize = 1000;
        let connections: Vec<_> = connections.into_iter().map(|(demand, core)| (demand, core % cores)).collect();
        let mut moves = vec![(0u32, 0usize); connections.len()];
        let mut machine = Machine { cores, connections };
        for now in 0..DECISIONS {
            let mut loads = machine.loads();
            for one in loads.iter_mut().flat_map(|load| &mut load.connections) {
                one.is_movable = moves[one.id as usize].1 <= now;
            }
            for Decision { id, from, to, .. } in decide(loads) {
                let (count, stays_until) = &mut moves[id as usize];
                prop_assert!(*stays_until <= now && machine.connections[id as usize].1 == from);
                machine.connections[id as usize].1 = to;
                *stays_until = now + (STAY << (*count).min(DOUBLED_MAX));
                *count += 1;
            }
        }
        let bound = 8 + DECISIONS / (STAY << DOUBLED_MAX);
        prop_assert!(moves.iter().all(|(count, _)| *count as usize <= bound), "{:?}", moves);
    }

    /// Where no core is saturated, costs are what connections ask for, and the busiest core only gets less.
    #[test]
    fn the_busiest_core_never_gets_busier(
        cores in 2..6usize, connections in prop::collection::vec((1..20_000u32, 0..8usize), 0..44),
    ) {
        let connections: Vec<_> = connections.into_iter().map(|(demand, core)| (demand, core % cores)).collect();
        let mut machine = Machine { cores, connections };
        let busiest = |machine: &Machine| machine.loads().iter().map(|load| load.busy_ppm).max();
        let mut before = busiest(&machine);
        while machine.step() > 0 {
            let now = busiest(&machine);
            prop_assert!(now < before, "{now:?} after {before:?}");
            before = now;
        }
    }

    #[test]
    fn no_connection_moves_twice_in_a_decision(
        counts in prop::collection::vec(0..200usize, 2..6), demand in 1..400_000u32,
    ) {
        let decisions = decide(Machine::of(&counts, demand).loads());
        let mut ids: Vec<u64> = decisions.iter().map(|decision| decision.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), decisions.len());
        prop_assert!(decisions.len() <= MOVES_MAX);
        prop_assert!(decisions.iter().all(|decision| decision.from != decision.to));
    }
}
