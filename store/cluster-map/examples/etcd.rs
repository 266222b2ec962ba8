//! What etcd does for a map: proposals a second, by groups of a request, lease renewals a second, and how long a lost rack's
//! records take at these rates: `cargo run --release -p ringbolt-cluster-map --example etcd -- http://HOST:PORT/PREFIX [SECONDS]`.
//! It writes below the prefix, and removes that when it ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cluster_map::{
    ClusterMap, EtcdMap, GroupConfig, GroupId, GroupRecord, LeaseHolder, MapChange, MapError, NodeId,
    Proposed, ReplicaId,
};

/// Connections at a time: more wait for each other in etcd.
const CLIENTS: u32 = 16;
/// Groups and nodes of docs/STORE-SCALE.md: a rack of 40 is lost.
const NODES_LEFT: f64 = 975.0;
const GROUPS_CHANGED: f64 = 14_990.0;

fn record(epoch: u32) -> GroupRecord {
    let replicas = vec![ReplicaId(1234), ReplicaId(5678), ReplicaId(9012)];
    let config = GroupConfig { epoch, primary: replicas[0], in_sync: replicas.clone() };
    GroupRecord { config, replicas }
}

fn holder(client: u32) -> LeaseHolder {
    LeaseHolder { id: uuid::Uuid::from_u128(client.into()), address: String::new(), place: String::new() }
}

/// How often `work` is done in a second by all clients together.
fn rate(
    urls: &str,
    seconds: f64,
    work: impl Fn(&EtcdMap, u32, u32) -> Result<(), MapError> + Sync,
) -> Result<f64, MapError> {
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let begin = Instant::now();
    let results: Vec<Result<(), MapError>> = std::thread::scope(|scope| {
        let client = |client: u32| {
            let (work, done, is_over) = (&work, &done, &is_over);
            scope.spawn(move || {
                let map = EtcdMap::new(urls)?;
                for round in 1.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    work(&map, client, round)?;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        std::thread::sleep(Duration::from_secs_f64(seconds));
        is_over.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().expect("a client panicked")).collect()
    });
    results.into_iter().collect::<Result<(), _>>()?;
    Ok(done.into_inner() as f64 / begin.elapsed().as_secs_f64())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let urls = arguments.next().ok_or("which URLs?")?;
    let seconds: f64 = arguments.next().map_or(Ok(3.0), |seconds| seconds.parse())?;
    let map = EtcdMap::new(&urls)?;
    map.create()?;
    for (index, groups) in [1, 15, 64].into_iter().enumerate() {
        let requests = rate(&urls, seconds, |map, client, round| {
            let first = (index as u32 * CLIENTS + client) * 1000;
            let proposals: Vec<_> =
                (first..first + groups).map(|group| (GroupId(group), record(round))).collect();
            let outcomes = map.propose_groups(&proposals)?;
            assert!(outcomes.iter().all(|outcome| *outcome == Proposed::Accepted), "{outcomes:?}");
            Ok(())
        })?;
        println!(
            "requests of {groups:2} proposals: {requests:.0} a second, {:.0} records a second",
            requests * f64::from(groups)
        );
        if groups == 15 {
            println!(
                "a lost rack: {GROUPS_CHANGED} records of {NODES_LEFT} nodes are changed in {:.2} s",
                NODES_LEFT / requests
            );
        }
    }
    let renewals = rate(&urls, seconds, |map, client, _| {
        map.renew_lease(NodeId(client), &holder(client), 60).map(drop)
    })?;
    println!("lease renewals: {renewals:.0} a second");

    let mut changes = map.changes();
    while !changes.wait(Duration::from_secs(1))?.contains(&MapChange::Everything) {}
    let (mut delays, id) = (Vec::new(), GroupId(1_000_000));
    for epoch in 1..=100 {
        map.propose_group(id, &record(epoch))?;
        let proposed = Instant::now();
        while !changes.wait(Duration::from_secs(1))?.contains(&MapChange::Group(id, record(epoch))) {}
        delays.push(proposed.elapsed());
    }
    delays.sort_unstable();
    println!(
        "a change is seen by another after its proposer: median {:?}, longest {:?}",
        delays[50], delays[99]
    );
    map.remove()?;
    Ok(())
}
