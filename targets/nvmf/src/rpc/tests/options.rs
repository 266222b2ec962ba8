//! Options of the target, of transports and of subsystems.

use super::*;

/// The saved parameters of each call of a method.
fn saved(machine: &TestApp, method: &str) -> Vec<Value> {
    let calls = machine.ok("framework_get_config", json!({ "name": "nvmf" }));
    let all = calls.as_array().unwrap().iter().filter(|call| call["method"] == method);
    all.map(|call| call["params"].clone()).collect()
}

#[test]
fn options_of_the_target_are_set_and_saved() {
    let machine = machine();
    let digests = json!(["sha256", "sha384", "sha512"]);
    machine.ok("nvmf_set_config", json!({ "discovery_filters": [], "dup_host_policy": "allow" }));
    machine.ok("nvmf_set_config", json!({ "discovery_filter": "match_any", "poll_groups_mask": "" }));
    machine.ok("nvmf_set_crdt", json!({}));
    assert!(saved(&machine, "nvmf_set_config").is_empty() && saved(&machine, "nvmf_set_crdt").is_empty());

    machine.ok("nvmf_set_config", json!({ "discovery_filter": "svcid,transport" }));
    machine.ok("nvmf_set_config", json!({ "dup_host_policy": "restrict_per_listener" }));
    machine.ok("nvmf_set_crdt", json!({ "crdt1": 10, "crdt3": 65535 }));
    let of_config = &saved(&machine, "nvmf_set_config")[0];
    assert_eq!(of_config["discovery_filters"], json!(["transport", "svcid"]));
    assert_eq!(of_config["dup_host_policy"], "restrict_per_listener");
    assert_eq!(of_config["dhchap_digests"], digests);
    let delays = json!({ "crdt1": 10, "crdt2": 0, "crdt3": 65535 });
    assert_eq!(saved(&machine, "nvmf_set_crdt"), [delays]);
    // Other options stay.
    machine.ok("nvmf_set_config", json!({ "discovery_filters": ["address"] }));
    assert_eq!(saved(&machine, "nvmf_set_config")[0]["dup_host_policy"], "restrict_per_listener");
    assert_eq!(machine.code("nvmf_set_crdt", json!({ "crdt1": 65536 })), -32602);
}

#[test]
fn poll_groups_are_selected_before_transports() {
    let machine = machine();
    let cpu = machine._reactors.handles()[0].cpu();
    let mask = |mask: &str| json!({ "poll_groups_mask": mask });
    machine.ok("nvmf_set_config", mask(&format!("[{cpu}]")));
    let canonical = saved(&machine, "nvmf_set_config")[0]["poll_groups_mask"].clone();
    assert_eq!(
        Some(canonical.as_str().unwrap()),
        target_shell::canonical_mask(&format!("[{cpu}]")).ok().as_deref()
    );
    machine.ok("nvmf_create_transport", json!({ "trtype": "TCP" }));
    // The only reactor, by its mask or without one, is the same.
    machine.ok("nvmf_set_config", mask(""));
    assert!(saved(&machine, "nvmf_set_config").is_empty());
    let absent = machine.app.invoke("nvmf_set_config", mask(&format!("[{}]", cpu + 1))).unwrap_err();
    assert!(absent.message.contains("poll_groups_mask: there is no reactor on core"), "{absent}");
}

#[test]
fn masked_commands_of_transports_are_saved_once_each() {
    let machine = machine();
    let tcp =
        json!({ "trtype": "TCP", "masked_oncs": ["reservs", "nvmcpys", "reservs"], "disable_compare": true });
    machine.ok("nvmf_create_transport", tcp);
    machine.ok("nvmf_create_transport", json!({ "trtype": "VFIOUSER", "masked_fuses": ["fcws"] }));
    let described = machine.ok("nvmf_get_transports", json!({}));
    let masked =
        |index: usize| (described[index]["masked_oncs"].clone(), described[index]["masked_fuses"].clone());
    assert_eq!(masked(0), (json!(["nvmcmps", "reservs", "nvmcpys"]), json!(["fcws"])));
    assert_eq!(masked(1), (json!([]), json!(["fcws"])));
    let of_tcp = &saved(&machine, "nvmf_create_transport")[0];
    assert_eq!(of_tcp["masked_oncs"], json!(["nvmcmps", "reservs", "nvmcpys"]));
}

/// SPDK 26.01 writes the older names, later versions the others.
#[test]
fn limits_of_a_subsystem_are_accepted_as_each_version_of_spdk_saves_them() {
    let machine = machine();
    let create = |name: &str, limits: Value| {
        let mut params = json!({ "nqn": format!("nqn.2025-01.io.ringbolt:{name}") });
        params.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        params
    };
    let rows = [
        ("none", json!({ "max_discard_size_kib": 0, "max_write_zeroes_size_kib": 0 }), 0, 0),
        ("new", json!({ "dmrsl": 2_097_152, "wzsl": 12 }), 2_097_152, 12),
        (
            "old",
            json!({ "max_discard_size_kib": 1_048_576, "max_write_zeroes_size_kib": 16_384 }),
            2_097_152,
            12,
        ),
        ("small", json!({ "max_discard_size_kib": 4, "max_write_zeroes_size_kib": 9 }), 8, 1),
    ];
    for (name, limits, dmrsl, wzsl) in rows {
        let params = create(name, limits);
        machine.ok("nvmf_create_subsystem", params.clone());
        let described = machine.ok("nvmf_get_subsystems", json!({ "nqn": params["nqn"] }));
        assert_eq!((&described[0]["dmrsl"], &described[0]["wzsl"]), (&json!(dmrsl), &json!(wzsl)), "{name}");
        let calls = saved(&machine, "nvmf_create_subsystem");
        let call = calls.iter().find(|call| call["nqn"] == params["nqn"]).unwrap();
        assert_eq!((&call["dmrsl"], &call["wzsl"]), (&json!(dmrsl), &json!(wzsl)), "{name}");
    }
    let too_large = create("large", json!({ "max_discard_size_kib": 1u64 << 31 }));
    assert_eq!(machine.code("nvmf_create_subsystem", too_large), -32602);
}

#[test]
fn admin_labels_and_subsystem_resets_are_described_and_saved() {
    let machine = machine();
    let create = |label: &str| json!({ "nqn": NQN, "admin_label": label, "enable_nssr": true });
    for invalid in ["abc", "r\u{e4}ck-7", &"x".repeat(257)] {
        assert_eq!(machine.code("nvmf_create_subsystem", create(invalid)), -32602, "{invalid}");
    }
    machine.ok("nvmf_create_subsystem", create("rack-7"));
    assert_eq!(machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["admin_label"], "rack-7");
    let call = &saved(&machine, "nvmf_create_subsystem")[0];
    assert_eq!((&call["admin_label"], &call["enable_nssr"]), (&json!("rack-7"), &json!(true)));
}
