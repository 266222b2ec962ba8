//! Connections that move between any two requests, on networks that cut and stall.

#[path = "../../tests/moving/load.rs"]
mod load;

use random::WyRand;
use wire_nbd::HeaderForm;

use super::tests::Client;
use super::tls_tests::SecureClient;
use super::*;
use load::NbdLoad;

/// Numbers of requests of a connection.
const REQUESTS: usize = 150;

fn faults(seed: u64) -> NetworkFaults {
    match seed % 3 {
        0 => NetworkFaults::default(),
        1 => NetworkFaults { cut_per_mille: 300, stall_per_mille: 200, ..NetworkFaults::default() },
        _ => NetworkFaults { cut_per_mille: 50, stall_per_mille: 500, ..NetworkFaults::default() },
    }
}

/// Runs seeds: those of `RINGBOLT_SEED` or all below `count`.
fn seeds(count: u64, mut run: impl FnMut(u64) -> u64) {
    let one = std::env::var("RINGBOLT_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let mut moves = 0;
    for seed in one.map_or(0..count, |seed| seed..seed + 1) {
        println!("RINGBOLT_SEED={seed}");
        moves += run(seed);
    }
    assert!(moves >= 5 * if one.is_some() { 1 } else { count }, "only {moves} moves");
}

fn form_of(seed: u64) -> (HeaderForm, &'static [wire_nbd::OptionCode]) {
    match seed / 3 % 3 {
        0 => (HeaderForm::Compact, &[]),
        1 => (HeaderForm::Compact, &[wire_nbd::OptionCode::StructuredReply]),
        _ => (HeaderForm::Extended, &[wire_nbd::OptionCode::ExtendedHeaders]),
    }
}

#[test]
fn every_request_is_answered_once_with_its_data_whenever_its_connection_moves() {
    seeds(36, |seed| {
        let mut target = SimulatedTarget::new(seed, faults(seed));
        let (form, options) = form_of(seed);
        let mut client = Client::begin_with(&mut target, options);
        let mut load = NbdLoad::new(seed, form, 1 + seed as usize % 20, REQUESTS);
        let mut random = WyRand::new(seed ^ 7);
        target.moves = true;
        let (mut unsent, mut polls) = (Vec::new(), 0);
        while !load.is_done() {
            polls += 1;
            assert!(polls < 1_000_000, "it stands still");
            // Headers arrive in parts, too.
            if unsent.is_empty() && random.happens(300) {
                unsent = load.requests();
            }
            let part = if random.happens(500) { unsent.len() } else { unsent.len().min(random.index(40)) };
            if let TransferResult::Bytes(count) = target.send(client.id, &unsent[..part]) {
                unsent.drain(..count);
            }
            target.poll();
            assert!(target.receive(client.id, &mut client.received).is_some(), "the connection is closed");
            load.receive(&client.received);
            client.received.clear();
        }
        assert_eq!(target.held_bytes(), 0);
        target.group.totals().moved
    });
}

#[test]
fn a_connection_with_tls_moves_with_records_that_are_not_read_yet() {
    seeds(12, |seed| {
        let mut target = SimulatedTarget::new(seed, faults(seed));
        target.moves = true;
        let mut client = SecureClient::connect(&mut target);
        client.start_tls(&mut target, client_key()).unwrap();
        client.go(&mut target, "private").unwrap();
        let mut load = NbdLoad::new(seed, HeaderForm::Compact, 24, REQUESTS);
        while !load.is_done() {
            let requests = load.requests();
            if !requests.is_empty() {
                client.send(&mut target, &requests);
            }
            let bytes = client.read(&mut target, 1).expect("the connection is open");
            load.receive(&bytes);
            load.receive(&client.take_received());
        }
        target.group.totals().moved
    });
}

#[test]
fn clients_that_leave_and_an_export_that_is_deleted_end_connections_wherever_they_are() {
    seeds(30, |seed| {
        let mut target = SimulatedTarget::new(seed, faults(seed));
        let mut random = WyRand::new(seed);
        let mut clients: Vec<Client> = (0..6).map(|_| Client::begin(&mut target)).collect();
        let loads = |at| NbdLoad::new(seed + at, HeaderForm::Compact, 16, 1000);
        let mut loads: Vec<NbdLoad> = (0..6).map(loads).collect();
        target.moves = true;
        for _ in 0..random.index(400) {
            for (client, load) in clients.iter_mut().zip(&mut loads) {
                // What does not fit into the network is lost, as is the end of what a client had to say.
                target.send(client.id, &load.requests());
                client.received.clear();
                target.receive(client.id, &mut client.received);
            }
            target.poll();
        }
        clients.drain(..3).for_each(|client| target.clients.close(client.id));
        if seed % 2 == 0 {
            target.delete_exports();
        }
        for _ in 0..200_000 {
            for client in &mut clients {
                client.received.clear();
                target.receive(client.id, &mut client.received);
            }
            target.poll();
            if seed % 2 == 1 && target.now_ns > 1_000_000_000 {
                clients.drain(..).for_each(|client| target.clients.close(client.id));
            }
            if target.group.connections().is_empty() {
                break;
            }
        }
        assert!(target.group.connections().is_empty());
        assert_eq!(target.held_bytes(), 0);
        target.group.totals().moved
    });
}

/// Connections move to a core that has no memory left for all of them, and wait there for each other's.
#[test]
fn connections_that_move_to_a_core_without_memory_wait_for_it() {
    seeds(4, |seed| {
        let mut target = SimulatedTarget::with_memory(4 << 20);
        let mut all: Vec<(Client, NbdLoad, Vec<u8>)> = (0..12)
            .map(|number| {
                let load = NbdLoad::new(seed + number, HeaderForm::Compact, 16, 60);
                (Client::begin(&mut target), load, Vec::new())
            })
            .collect();
        target.moves = true;
        let mut polls = 0;
        while all.iter().any(|(_, load, _)| !load.is_done()) {
            polls += 1;
            assert!(polls < 1_000_000, "they stand still");
            for (client, load, unsent) in &mut all {
                unsent.extend(load.requests());
                if let TransferResult::Bytes(count) = target.send(client.id, unsent) {
                    unsent.drain(..count);
                }
                assert!(target.receive(client.id, &mut client.received).is_some(), "a connection is closed");
                // All write to the same blocks.
                load.receive_unchecked(&std::mem::take(&mut client.received));
            }
            target.poll();
        }
        assert_eq!(target.held_bytes(), 0);
        target.group.totals().moved
    });
}
