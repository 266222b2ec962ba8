//! Records, and a race of proposals, for every kind of map.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::sync::Mutex;

use cluster_map::*;
use uuid::Uuid;

pub(crate) fn record(epoch: u32, primary: u32, in_sync: &[u32]) -> GroupRecord {
    let in_sync = in_sync.iter().copied().map(ReplicaId).collect();
    GroupRecord {
        config: GroupConfig { epoch, primary: ReplicaId(primary), in_sync },
        replicas: [1, 2, 3].map(ReplicaId).into(),
    }
}

pub(crate) fn node(number: u128) -> NodeRecord {
    let addresses = vec!["127.0.0.1:7000".to_string()];
    NodeRecord { uuid: Uuid::from_u128(number), addresses, domain: "rack".to_string(), out: false }
}

/// Three users of a map, each as another process would, propose records of one group until its epoch is `end` at least.
/// Returns how many proposals were accepted for each epoch after the first.
pub(crate) fn race<M: ClusterMap>(open: impl Fn() -> M + Sync, end: u32) -> BTreeMap<u32, u32> {
    let id = GroupId(1);
    open().propose_group(id, &record(1, 1, &[1, 2, 3])).unwrap();
    let accepted = Mutex::new(BTreeMap::<u32, u32>::new());
    std::thread::scope(|scope| {
        for primary in 1..=3 {
            let (open, accepted) = (&open, &accepted);
            scope.spawn(move || {
                let map = open();
                let mut epoch = 2;
                while epoch < end {
                    match map.propose_group(id, &record(epoch, primary, &[primary])).unwrap() {
                        Proposed::Accepted => *accepted.lock().unwrap().entry(epoch).or_default() += 1,
                        Proposed::Superseded(known) => assert!(known.config.epoch >= epoch),
                        Proposed::Missing => panic!("it was there"),
                    }
                    epoch = map.group(id).unwrap().unwrap().config.epoch + 1;
                }
            });
        }
    });
    accepted.into_inner().unwrap()
}
