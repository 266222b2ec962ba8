//! The map in a real etcd that requires users: tokens that expire, passwords and rights that are missing or
//! change.
#![allow(clippy::unwrap_used)]

mod records;
mod rig;

use std::time::{Duration, Instant};

use cluster_map::*;
use records::record;
use rig::EtcdCluster;
use serde_json::json;
use uuid::Uuid;

/// Seconds after which a token that is not used has expired; etcd looks once a second.
const TOKEN_TTL: &str = "--auth-token-ttl=1";

fn start(name: &str) -> Option<EtcdCluster> {
    let etcd = EtcdCluster::start_with(name, 1, &[TOKEN_TTL])?;
    etcd.enable_users("secret", "/c/");
    Some(etcd)
}

fn open(etcd: &EtcdCluster, prefix: &str, user: &str) -> EtcdMap {
    let files = EtcdFiles { user: Some(etcd.file("user", user)), ..Default::default() };
    EtcdMap::with_files(&etcd.urls(prefix), &files).unwrap()
}

/// Waits until etcd takes a token no more.
fn wait_until_expired(etcd: &EtcdCluster, token: &str) {
    // A request would renew it, so nothing is asked until it must have expired.
    std::thread::sleep(Duration::from_millis(2500));
    let key = json!({ "key": "Lw==" });
    let answer = std::panic::catch_unwind(|| etcd.request("/v3/kv/range", Some(token), &key));
    assert!(answer.is_err(), "the token is taken still");
}

#[test]
fn a_user_with_rights_below_the_prefix_does_all_that_a_cluster_needs() {
    let Some(etcd) = start("user") else { return };
    let map = open(&etcd, "c", "ringbolt:secret");
    map.create().unwrap();
    let mut changes = map.changes();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);
    let node = map.create_node(&records::node(1)).unwrap();
    map.renew_lease(node, &records::holder(1, ""), 30).unwrap();
    assert_eq!(map.nodes_up().unwrap(), [node].into());
    let pool =
        PoolRecord { first_group: 0, groups: 8, replicas: 2, in_sync_min: 1, class: Default::default() };
    map.create_pool("p", &pool).unwrap();
    let many: Vec<_> = (0..8).map(|group| (GroupId(group), record(1, 1, &[1]))).collect();
    assert_eq!(map.propose_groups(&many).unwrap(), vec![Proposed::Accepted; 8]);
    assert_eq!(map.groups(0..8).unwrap().len(), 8);
    let image = map.create_image("p", "vol", 4096).unwrap();
    let larger = ImageEntry { bytes: 8192, ..image.clone() };
    assert!(map.change_image("p", "vol", &image, &larger).unwrap());
    let lock = ImageLock { attach_epoch: 1, holders: Vec::new() };
    assert!(map.change_image_lock("p", image.volume, None, &lock).unwrap());
    let holder = Uuid::new_v4();
    map.renew_holder(holder, 30).unwrap();
    map.renew_holder(holder, 30).unwrap();
    assert!(map.holder_age(holder).unwrap().is_some());
    map.end_holder(holder).unwrap();
    let removed = map.remove_image("p", "vol", None).unwrap();
    map.image_is_empty(&removed).unwrap();
    map.set_out(node, Some(OutReason::Operator)).unwrap();
    map.set_out(node, None).unwrap();
    map.remove_pool("p").unwrap();
    map.end_lease(node, &records::holder(1, "")).unwrap();
    map.remove().unwrap();
    assert!(matches!(map.cluster(), Err(MapError::Missing(_))));
}

#[test]
fn a_request_and_a_watch_get_another_token_when_theirs_has_expired() {
    let Some(etcd) = start("expired") else { return };
    let map = open(&etcd, "c", "ringbolt:secret");
    let token = etcd.root_token();
    map.create().unwrap();
    let mut changes = map.changes();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);
    for epoch in 1..=2 {
        wait_until_expired(&etcd, &token);
        let wanted = record(epoch, 1, &[1, 2]);
        assert_eq!(map.propose_group(GroupId(7), &wanted).unwrap(), Proposed::Accepted);
        // No error of tokens: a watch is opened anew after 5 s, with a token that has expired meanwhile.
        let started = Instant::now();
        let mut is_streamed = false;
        while started.elapsed() < Duration::from_secs(8) {
            match changes.wait(Duration::from_secs(1)) {
                Ok(found) => is_streamed |= found.contains(&MapChange::Group(GroupId(7), wanted.clone())),
                // On a machine with much else to do.
                Err(error) => assert!(error.to_string().contains("did not answer"), "{error}"),
            }
        }
        assert!(is_streamed);
    }
}

#[test]
fn tokens_are_replaced_after_a_restart() {
    let Some(mut etcd) = start("restart") else { return };
    let map = open(&etcd, "c", "ringbolt:secret");
    let uuid = map.create().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    etcd.kill_server(0);
    etcd.start_server(0);
    etcd.wait_until_served();
    assert_eq!(map.cluster().unwrap(), uuid);
}

#[test]
fn signed_tokens_are_replaced_when_they_have_expired_or_rights_have_changed() {
    let key = std::env::temp_dir().join(format!("ringbolt-jwt-{}", std::process::id()));
    std::fs::write(&key, "a key of 32 bytes for HMAC-SHA256").unwrap();
    for (name, ttl, expires) in [("jwt-expired", 2, true), ("jwt-rights", 3600, false)] {
        let tokens = format!("--auth-token=jwt,sign-method=HS256,priv-key={},ttl={ttl}s", key.display());
        let Some(etcd) = EtcdCluster::start_with(name, 1, &[&tokens]) else { return };
        etcd.enable_users("secret", "/c/");
        let map = open(&etcd, "c", "ringbolt:secret");
        let uuid = map.create().unwrap();
        match expires {
            true => std::thread::sleep(Duration::from_millis(3500)),
            false => {
                std::thread::sleep(Duration::from_secs(1));
                etcd.grant("/d/", Some(&etcd.root_token()));
            }
        }
        assert_eq!(map.cluster().unwrap(), uuid, "{name}");
    }
    std::fs::remove_file(key).unwrap();
}

#[test]
fn missing_users_rights_and_passwords_are_errors_that_say_what_to_do() {
    let Some(etcd) = start("refused") else { return };
    let refused = |result: Result<uuid::Uuid, MapError>, text: &str, advice: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text) && error.contains(advice), "{error}");
        assert!(!error.contains("secret"), "{error}");
    };
    let anonymous = EtcdMap::new(&etcd.urls("c")).unwrap();
    refused(anonymous.cluster(), "user name is empty", "--etcd-user-file names it");
    let error = anonymous.changes().wait(Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains("user name is empty") && error.contains("--etcd-user-file"), "{error}");

    let map = open(&etcd, "c", "ringbolt:secret2");
    let wrong = "or its password is not one of etcd's";
    refused(map.cluster(), "invalid user ID or password", wrong);
    let error = map.changes().wait(Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains(wrong), "{error}");
    // It is corrected without a restart.
    etcd.file("user", "ringbolt:secret");
    map.create().unwrap();

    // No rights.
    let foreign = open(&etcd, "d", "ringbolt:secret");
    let grant = "etcdctl role grant-permission ROLE --prefix=true readwrite /d/";
    refused(foreign.cluster(), "permission denied", grant);
    let error = foreign.changes().wait(Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains("permission denied") && error.contains(grant), "{error}");
    // They are granted without a restart.
    std::thread::sleep(Duration::from_secs(1));
    etcd.grant("/d/", Some(&etcd.root_token()));
    foreign.create().unwrap();
}

#[test]
fn a_user_is_not_needed_before_etcd_requires_one() {
    let Some(etcd) = EtcdCluster::start("enabled", 1) else { return };
    let map = open(&etcd, "c", "ringbolt:secret");
    let uuid = map.create().unwrap();
    let mut changes = map.changes();
    assert_eq!(changes.wait(Duration::from_secs(30)).unwrap(), [MapChange::Everything]);
    etcd.enable_users("secret", "/c/");
    assert_eq!(map.cluster().unwrap(), uuid);
}

/// What keys of clients do not limit: nodes do not see what is done to images.
#[test]
fn users_limit_what_a_client_does_to_images() {
    let Some(etcd) = start("images") else { return };
    let map = open(&etcd, "c", "ringbolt:secret");
    map.create().unwrap();
    for (name, first_group) in [("p", 0), ("q", 4)] {
        let pool =
            PoolRecord { first_group, groups: 4, replicas: 1, in_sync_min: 1, class: Default::default() };
        map.create_pool(name, &pool).unwrap();
        map.create_image(name, "vol", 4096).unwrap();
        let groups: Vec<_> =
            (first_group..first_group + 4).map(|group| (GroupId(group), record(1, 1, &[1]))).collect();
        map.propose_groups(&groups).unwrap();
    }
    let denied = |result: Result<(), MapError>| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("permission denied"), "{error}");
    };
    etcd.add_user("reader", "/c/", &[]);
    etcd.add_user("writer", "/c/", &["/c/attached/p/", "/c/image-holders/"]);
    etcd.add_user("owner", "/c/", &["/c/images/p/", "/c/removed-images/p/"]);
    let reader = EtcdMap::with_files(
        &etcd.urls("c"),
        &EtcdFiles { user: Some(etcd.file("reader", "reader:reader")), ..Default::default() },
    );
    let owner = EtcdMap::with_files(
        &etcd.urls("c"),
        &EtcdFiles { user: Some(etcd.file("owner", "owner:owner")), ..Default::default() },
    );
    let writer = EtcdMap::with_files(
        &etcd.urls("c"),
        &EtcdFiles { user: Some(etcd.file("writer", "writer:writer")), ..Default::default() },
    );
    let (reader, owner, writer) = (reader.unwrap(), owner.unwrap(), writer.unwrap());
    let image = map.images().unwrap()[&("p".to_string(), "vol".to_string())].clone();
    let larger = ImageEntry { bytes: 8192, ..image.clone() };
    // What a client reads to use an image.
    for client in [&reader, &owner, &writer] {
        client.cluster().unwrap();
        assert_eq!((client.pools().unwrap().len(), client.images().unwrap().len()), (2, 2));
        assert_eq!(client.groups(0..8).unwrap().len(), 8);
        assert!(client.nodes().unwrap().is_empty() && client.devices().unwrap().is_empty());
        denied(client.create_image("q", "new", 4096).map(drop));
        denied(client.remove_image("q", "vol", None).map(drop));
        let of_q = map.images().unwrap()[&("q".to_string(), "vol".to_string())].clone();
        denied(client.change_image("q", "vol", &of_q, &ImageEntry { bytes: 8192, ..of_q.clone() }).map(drop));
        denied(client.set_out(NodeId(1), Some(OutReason::Operator)));
    }
    for client in [&reader, &writer] {
        denied(client.change_image("p", "vol", &image, &larger).map(drop));
        denied(client.remove_image("p", "vol", None).map(drop));
    }
    denied(reader.create_image("p", "new", 4096).map(drop));
    owner.create_image("p", "new", 4096).unwrap();
    // Who writes an image attaches it.
    let lock = ImageLock { attach_epoch: 1, holders: Vec::new() };
    denied(reader.change_image_lock("p", image.volume, None, &lock).map(drop));
    denied(writer.change_image_lock("q", image.volume, None, &lock).map(drop));
    assert!(writer.change_image_lock("p", image.volume, None, &lock).unwrap());
    writer.renew_holder(Uuid::new_v4(), 30).unwrap();
    assert!(owner.change_image("p", "vol", &image, &larger).unwrap());
    owner.remove_image("p", "vol", None).unwrap();
}
