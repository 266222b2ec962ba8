//! What is said of a group, from what its nodes answer.
#![allow(clippy::unwrap_used)]

use super::*;

fn view() -> GroupView {
    GroupView {
        group: 5,
        pool: Some("pool".to_string()),
        class: None,
        durability: None,
        epoch: 7,
        primary: 1,
        in_sync: vec![1, 2],
        replicas: vec![1, 2, 3],
        wanted: 3,
        is_moving: false,
        without_room: Vec::new(),
    }
}

fn map(up: &[u32]) -> MapContents {
    MapContents {
        settings: ClusterSettings::default(),
        nodes: BTreeMap::new(),
        up: up.iter().copied().map(NodeId).collect(),
        out: BTreeMap::new(),
        weights: BTreeMap::new(),
        pools: BTreeMap::new(),
        groups: Vec::new(),
        recovery: RecoverySettings::default(),
        scrub: Value::Null,
        position: MapPosition::default(),
    }
}

/// Nodes from 1 on, all on other machines.
fn answers(of: impl IntoIterator<Item = NodeReply>) -> NodeAnswers {
    (1..).zip(of).map(|(node, answer)| (node, NodeAnswer { answer, is_local: false })).collect()
}

fn report(replica: Value) -> NodeReply {
    let mut replica = replica;
    replica["group"] = 5.into();
    NodeReply::Report(json!({ "replicas": [replica] }))
}

fn primary(learner: Value) -> NodeReply {
    report(json!({ "state": "primary", "complete": true, "objects": 40, "learners": [learner] }))
}

fn secondary() -> NodeReply {
    report(json!({ "state": "replica", "complete": true }))
}

#[test]
fn a_replica_that_failed_says_why() {
    let failed =
        || report(json!({ "state": "failed", "complete": true, "failure": "write of the device at byte 8" }));
    let of_secondary =
        describe(&view(), &answers([primary(json!({})), secondary(), failed()]), Some(&map(&[1, 2, 3])));
    assert_eq!(
        (&of_secondary["state"], &of_secondary["catching_up"]),
        (&"degraded".into(), &"3 (failed)".into())
    );
    let why =
        "the replica on node 3 failed: write of the device at byte 8; start that node again, or replace it";
    assert_eq!(of_secondary["why"], why);
    let of_primary =
        describe(&view(), &answers([failed(), secondary(), secondary()]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_primary["state"], "waiting");
    assert_eq!(of_primary["why"], "its primary, node 1, failed: write of the device at byte 8");
    // A primary that waits because of it says no more than that it waits.
    let waits = report(json!({ "state": "waiting", "complete": true, "waits_for": "fewer are in sync" }));
    let of_waiting = describe(&view(), &answers([waits, secondary(), failed()]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_waiting["why"], format!("fewer are in sync; {why}"));
}

#[test]
fn a_damaged_partition_is_named_with_what_a_person_can_decide() {
    let refused = json!([{ "group": 5, "partition": 2, "why": "block 9: it is damaged" }]);
    let failed = json!([
        { "partition": 2, "group": 5, "why": "block 9" },
        { "partition": 4, "group": null, "why": "log 4" },
    ]);
    let without =
        || NodeReply::Report(json!({ "replicas": [], "refused": refused, "failed_partitions": failed }));
    let learns = GroupView { in_sync: vec![1, 2], ..view() };
    let of_third =
        describe(&learns, &answers([primary(json!({})), secondary(), without()]), Some(&map(&[1, 2, 3])));
    assert_eq!((&of_third["state"], &of_third["catching_up"]), (&"degraded".into(), &"3 (failed)".into()));
    let why =
        "partition 2 of node 3 is damaged: block 9: it is damaged; start that node again, or replace it";
    assert_eq!(of_third["why"], why);
    let alone = GroupView { in_sync: vec![1], ..view() };
    let of_only = describe(&alone, &answers([without(), secondary(), secondary()]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_only["state"], "down");
    let why = of_only["why"].as_str().unwrap();
    assert!(why.contains("no other replica in sync has what it had, so it is kept"), "{why}");
    let all = GroupView { in_sync: vec![1, 2, 3], ..view() };
    let of_all = describe(&all, &answers([without(), without(), without()]), Some(&map(&[1, 2, 3])));
    let why = of_all["why"].as_str().unwrap();
    assert!(why.contains("so it is kept: put the device of node 1, 2, 3 in order"), "{why}");
    let of_node = answers([without()]);
    let named = failed_partitions(of_node[&1].report().unwrap());
    assert_eq!(named, "; damaged partitions: 2 (group 5), 4 (group not known)");
}

#[test]
fn a_replica_that_catches_up_says_how_far_and_how_fast() {
    let copied = json!({ "node": 3, "entries_behind": 9, "copied_objects": 12, "copied_bytes_per_second": 36_700_160 });
    let copying = report(json!({ "state": "copying", "complete": false }));
    let of_copy =
        describe(&view(), &answers([primary(copied), secondary(), copying]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_copy["state"], "degraded");
    assert_eq!(of_copy["catching_up"], "3 (copying: 12 of 40 objects, 35.0 MiB/s)");
    assert_eq!(copy_speed(&[of_copy]), 36_700_160);
    let behind =
        json!({ "node": 3, "entries_behind": 120, "copied_objects": null, "copied_bytes_per_second": null });
    let of_log =
        describe(&view(), &answers([primary(behind), secondary(), secondary()]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_log["catching_up"], "3 (120 entries behind)");
    assert_eq!(copy_speed(&[of_log]), 0);
}

#[test]
fn a_replica_that_lacks_what_it_had_is_named() {
    let older = || {
        report(
            json!({ "state": "waiting", "complete": true, "stale": "its device is an older copy of itself" }),
        )
    };
    let of_older =
        describe(&view(), &answers([primary(json!({})), secondary(), older()]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_older["why"], "the replica on node 3 catches up: its device is an older copy of itself");
    assert_eq!(of_older["stale"], json!([{ "node": 3, "why": "its device is an older copy of itself" }]));
    let newer = report(json!({ "state": "replica", "complete": true, "has_more_than_primary": true }));
    let of_newer =
        describe(&view(), &answers([primary(json!({})), secondary(), newer]), Some(&map(&[1, 2, 3])));
    assert_eq!(of_newer["catching_up"], "3 (has more than the primary)");
    assert!(
        of_newer["why"].as_str().unwrap().contains("node 3 has committed entries that its primary lacks")
    );
}

#[test]
fn a_primary_that_does_not_answer_is_unknown_while_it_is_up_and_down_after_that() {
    let silent = || {
        answers([NodeReply::Silent("timed out".into()), secondary(), NodeReply::Silent("timed out".into())])
    };
    let up = describe(&view(), &silent(), Some(&map(&[1, 2, 3])));
    assert_eq!(
        (up["state"].as_str(), up["why"].as_str()),
        (Some("unknown"), Some("its primary, node 1, is up, and does not answer this machine: timed out"))
    );
    assert_eq!(up["catching_up"], "3 (no answer)");
    let down = describe(&view(), &silent(), Some(&map(&[2])));
    assert_eq!(
        (down["state"].as_str(), down["why"].as_str()),
        (Some("down"), Some("its primary, node 1, does not answer: timed out"))
    );
    assert_eq!(down["catching_up"], "3 (down)");
    // A node of an earlier version has proved that it serves.
    let earlier = answers([NodeReply::Unreported("closed".into()), secondary(), secondary()]);
    assert_eq!(describe(&view(), &earlier, Some(&map(&[1, 2, 3])))["state"], "degraded");
    assert_eq!(describe_nodes(&earlier, None, &[])[0]["state"], "up");
}

#[test]
fn nodes_say_of_how_many_groups_they_are_primary_and_that_they_leave() {
    let report = |state: &str| NodeReply::Report(json!({ "state": state, "replicas": [] }));
    let answers = answers([report("leaving"), report("serves"), secondary()]);
    let of = |group, primary| GroupView { group, primary, ..view() };
    let nodes = describe_nodes(&answers, None, &[of(5, 1), of(6, 2), of(7, 1)]);
    let described = nodes.iter().map(|node| (node["state"].as_str().unwrap(), &node["primaries"]));
    assert_eq!(
        described.collect::<Vec<_>>(),
        [("leaving", &2.into()), ("serves", &1.into()), ("serves", &0.into())]
    );
}

#[test]
fn replicas_that_share_a_failure_domain_are_named() {
    let of = |domains: [&str; 3], is_moving: bool| {
        let node = |(id, domain): (u32, &str)| {
            let (uuid, domain) = (Default::default(), domain.to_string());
            (
                NodeId(id),
                NodeRecord {
                    uuid,
                    addresses: Vec::new(),
                    domain,
                    tls: cluster_map::TlsPolicy::Off,
                    out: false,
                },
            )
        };
        let map = MapContents { nodes: (1..).zip(domains).map(node).collect(), ..map(&[1, 2, 3]) };
        let view = GroupView { in_sync: vec![1, 2, 3], is_moving, ..view() };
        describe(&view, &answers([primary(json!({})), secondary(), secondary()]), Some(&map))
    };
    let shared = of(["a", "b", "a"], false);
    assert_eq!(
        (&shared["state"], &shared["shared_domain"], &shared["why"]),
        (&"healthy".into(), &"a".into(), &"several replicas are in failure domain a".into())
    );
    assert!(of(["a", "b", "c"], false)["why"].is_null());
    assert_eq!(of(["a", "b", "a"], true)["why"], "replicas move to other nodes");
}

#[test]
fn a_node_with_prioritized_threads_shows_their_cores() {
    let of = |threads: Value| prioritized_threads(&json!({ "threads": threads }));
    assert_eq!(of(json!(null)) + &of(json!({ "mode": "run-to-completion" })), "");
    let mut threads = json!({ "mode": "prioritized", "priority_cores": "0", "non_priority_cores": "1-3",
        "pools_overlap": false });
    assert_eq!(of(threads.clone()), ", prioritized threads on cores 0 and 1-3");
    threads["pools_overlap"] = true.into();
    assert_eq!(of(threads), ", prioritized threads on cores 0 and 1-3, which overlap");
}

#[test]
fn reports_that_make_no_sense_are_shown_as_nothing() {
    let strange = [
        json!(null),
        json!({ "replicas": 7, "refused": {}, "without_room": [1], "failed_partitions": 3 }),
        json!({ "replicas": [{ "group": 5, "state": [], "learners": 3, "in_sync": "all" }, null, "x"] }),
        json!({ "replicas": [{ "group": u64::MAX, "epoch": -1, "in_sync": [u64::MAX, {}], "damaged_blocks": "many" }] }),
    ];
    for report in strange {
        let answers = answers([(); 3].map(|()| NodeReply::Report(report.clone())));
        let of_map = describe(&view(), &answers, Some(&map(&[1])));
        assert_ne!(of_map["state"], "healthy", "{report}");
        for known in known_groups(&answers) {
            describe(&known, &answers, None);
        }
        assert_eq!(format!("{}{}", damage(&report), failed_partitions(&report)), "");
        let most = json!({ "replicas": [{ "damaged_blocks": u64::MAX }, { "damaged_blocks": 1, "repaired_ranges": 2 }] });
        assert_eq!(damage(&most), format!("; {} damaged blocks found, 2 ranges repaired", u64::MAX));
        assert_eq!(used_by(5, &answers), PartitionSize::default());
    }
}
