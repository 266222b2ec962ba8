//! Targets beside the one that always exists.

use super::*;

const OTHER: &str = "second";

/// A subsystem with a namespace on bdev `N` and a listener, under the NQN that the default target has too.
fn subsystem_of_other(machine: &TestApp) {
    machine.ok("bdev_malloc_create", json!({ "name": "N", "num_blocks": 64, "block_size": 512 }));
    let of_other = |mut params: Value| {
        params["tgt_name"] = json!(OTHER);
        params
    };
    machine.ok("nvmf_create_transport", of_other(json!({ "trtype": "TCP", "max_queue_depth": 64 })));
    machine.ok("nvmf_create_subsystem", of_other(json!({ "nqn": NQN, "serial_number": "RB2" })));
    let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": "N" } });
    assert_eq!(machine.ok("nvmf_subsystem_add_ns", of_other(namespace)), 1);
    let host = json!({ "nqn": NQN, "host": "nqn.2014-08.org.nvmexpress:g" });
    machine.ok("nvmf_subsystem_add_host", of_other(host));
    let address = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    machine.ok("nvmf_subsystem_add_listener", of_other(json!({ "nqn": NQN, "listen_address": address })));
}

#[test]
fn targets_have_transports_and_subsystems_of_their_own() {
    let machine = machine();
    machine.subsystem();
    let created = json!({ "name": OTHER, "discovery_filter": ["svcid"], "max_subsystems": 1 });
    assert_eq!(machine.ok("nvmf_create_target", created), OTHER);
    assert_eq!(machine.ok("nvmf_get_targets", Value::Null), json!(["nvmf_tgt", OTHER]));
    subsystem_of_other(&machine);
    let serial = |params: Value| machine.ok("nvmf_get_subsystems", params)[1]["serial_number"].clone();
    assert_eq!((serial(json!({})), serial(json!({ "tgt_name": OTHER }))), (json!("RB1"), json!("RB2")));
    assert_eq!(serial(json!({ "tgt_name": "nvmf_tgt" })), "RB1");
    let depth = machine.ok("nvmf_get_transports", json!({ "tgt_name": OTHER }))[0]["max_queue_depth"].clone();
    assert_eq!(depth, 64);
    let second = json!({ "nqn": "nqn.2025-01.io.ringbolt:b", "tgt_name": OTHER });
    assert_eq!(machine.code("nvmf_create_subsystem", second), -28, "max_subsystems is 1");
    machine.ok("nvmf_subsystem_get_controllers", json!({ "nqn": NQN, "tgt_name": OTHER }));
    machine.ok("nvmf_get_stats", json!({ "tgt_name": OTHER }));
    assert_eq!(machine.target.balanced().len(), 2, "their transports over TCP");

    // Only one of them may have a bdev.
    let namespace = json!({ "nqn": NQN, "tgt_name": OTHER, "namespace": { "bdev_name": "M" } });
    assert_eq!(machine.code("nvmf_subsystem_add_ns", namespace), -32602);
    machine.ok("nvmf_delete_target", json!({ "name": OTHER }));
    assert_eq!(machine.ok("nvmf_get_targets", Value::Null), json!(["nvmf_tgt"]));
    assert_eq!(machine.code("nvmf_get_subsystems", json!({ "tgt_name": OTHER })), -32603);
    // Its bdev is free for others.
    machine.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "N" } }));
}

#[test]
fn digests_groups_and_reactors_are_restricted_for_all_targets() {
    let machine = machine();
    let cpu = machine._reactors.handles()[0].cpu();
    let restricted = json!({ "dhchap_digests": ["sha512"], "poll_groups_mask": format!("[{cpu}]") });
    machine.ok("nvmf_set_config", restricted);
    machine.ok("nvmf_create_target", json!({ "name": OTHER }));
    let other = machine.target.named(Some(OTHER)).unwrap();
    let default = machine.target.target();
    assert_eq!(other.target.auth_options().hash_names(), ["sha512"]);
    assert_eq!(other.target.poll_groups_mask(), default.poll_groups_mask());
    machine.ok("nvmf_set_config", json!({ "dhchap_dhgroups": ["ffdhe8192"] }));
    assert_eq!(other.target.auth_options(), default.auth_options());
    assert_eq!(default.auth_options().group_names(), ["ffdhe8192"]);
}

#[test]
fn a_saved_configuration_recreates_targets() {
    let before = machine();
    before.subsystem();
    let created = json!({ "name": OTHER, "dup_host_policy": "restrict_per_listener" });
    before.ok("nvmf_create_target", created);
    subsystem_of_other(&before);
    let saved = before.app.save();
    before.ok("nvmf_delete_target", json!({ "name": OTHER }));
    before.ok("nvmf_delete_subsystem", json!({ "nqn": NQN }));
    drop(before);
    let after = machine();
    let config = ConfigFile::parse("saved", saved.to_string().as_bytes(), after.app.catalog()).unwrap();
    config.apply(&after.app).unwrap();
    assert_eq!(after.app.save(), saved);
}

#[test]
fn names_of_targets_are_checked() {
    let machine = machine();
    machine.ok("nvmf_create_target", json!({ "name": OTHER }));
    for (method, name, code) in [
        ("nvmf_create_target", OTHER, -32602),
        ("nvmf_create_target", "nvmf_tgt", -32602),
        ("nvmf_create_target", "", -32602),
        ("nvmf_create_target", "a b", -32602),
        ("nvmf_delete_target", "nvmf_tgt", -32602),
        ("nvmf_delete_target", "third", -32602),
    ] {
        assert_eq!(machine.code(method, json!({ "name": name })), code, "{method} {name}");
    }
    let invalid = json!({ "name": "third", "discovery_filter": ["match_any"] });
    assert_eq!(machine.code("nvmf_create_target", invalid), -32602);
    for number in 1..64 {
        machine.ok("nvmf_create_target", json!({ "name": format!("t{number}") }));
    }
    assert_eq!(machine.code("nvmf_create_target", json!({ "name": "one too many" })), -32602);
    assert_eq!(machine.code("nvmf_create_target", json!({ "name": "one-too-many" })), -28);
}
