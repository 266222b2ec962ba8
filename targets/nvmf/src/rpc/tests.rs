//! The target, configured through RPC methods.

use std::sync::Arc;

use bdev::Registry;
use bdev::rpc::BdevModule;
use control::json::json;
use control::{ConfigFile, ControlPlane, DecodeLog, Keyring, KeyringModule, ParameterType};

use super::*;

mod options;
mod targets;

const NQN: &str = "nqn.2025-01.io.ringbolt:a";

struct TestApp {
    _reactors: reactor::Reactors,
    app: Arc<ControlPlane>,
    target: Arc<NvmfModule>,
}

fn machine() -> TestApp {
    let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(Registry::new(), builder.examiner());
    let keyring = Keyring::default();
    let keys = Arc::new(KeyringModule::new(keyring.clone()));
    let target = NvmfModule::new(bdevs.registry().clone(), reactors.handles(), keyring);
    let app = builder.module(&keys).module(&target).module(&bdevs).start(None).unwrap();
    TestApp { _reactors: reactors, app, target }
}

impl TestApp {
    fn ok(&self, method: &str, params: Value) -> Value {
        self.app.invoke(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    fn code(&self, method: &str, params: Value) -> i64 {
        self.app.invoke(method, params).expect_err(method).code
    }

    fn subsystem(&self) {
        let device = json!({ "name": "M", "num_blocks": 2048, "block_size": 512 });
        self.ok("bdev_malloc_create", device);
        self.ok("nvmf_create_transport", json!({ "trtype": "TCP", "zcopy": false, "max_io_size": 131072 }));
        self.ok("nvmf_create_subsystem", json!({ "nqn": NQN, "serial_number": "RB1" }));
        let nguid = "0123456789abcdef0123456789ABCDEF";
        let namespace = json!({ "bdev_name": "M", "nsid": 7, "nguid": nguid, "no_auto_visible": false });
        assert_eq!(self.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": namespace })), 7);
        self.ok("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": "nqn.2014-08.org.nvmexpress:h" }));
        let address = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0", "adrfam": "ipv4" });
        self.ok("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address }));
    }
}

#[test]
fn a_saved_configuration_recreates_the_target() {
    let before = machine();
    before.subsystem();
    before.ok("bdev_malloc_create", json!({ "name": "H", "num_blocks": 2048, "block_size": 512 }));
    let hidden = json!({ "bdev_name": "H", "nsid": 9, "no_auto_visible": true });
    before.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": hidden }));
    before.ok("nvmf_ns_add_host", json!({ "nqn": NQN, "nsid": 9, "host": "nqn.2014-08.org.nvmexpress:h" }));
    let elsewhere = json!({ "trtype": "rdma", "traddr": "192.0.2.7", "trsvcid": 4420, "adrfam": "ipv4" });
    before.ok(
        "nvmf_discovery_add_referral",
        json!({ "address": elsewhere, "subnqn": NQN, "secure_channel": true }),
    );
    let saved = before.app.save();
    before.ok("nvmf_delete_subsystem", json!({ "nqn": NQN }));
    drop(before);
    let after = machine();
    let text = saved.to_string();
    let config = ConfigFile::parse("saved", text.as_bytes(), after.app.catalog()).unwrap();
    config.apply(&after.app).unwrap();
    assert_eq!(after.app.save(), saved);
}

#[test]
fn nvmf_get_subsystems_has_spdks_fields() {
    let machine = machine();
    machine.subsystem();
    let all = machine.ok("nvmf_get_subsystems", Value::Null);
    assert_eq!((&all[0]["subtype"], &all[1]["subtype"]), (&json!("Discovery"), &json!("NVMe")));
    let one = &machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }))[0];
    assert_eq!(one["serial_number"], "RB1");
    assert_eq!(one["hosts"][0]["nqn"], "nqn.2014-08.org.nvmexpress:h");
    assert_eq!(one["namespaces"][0]["name"], "M");
    assert_eq!(one["namespaces"][0]["nguid"], "0123456789ABCDEF0123456789ABCDEF");
    assert_eq!(one["listen_addresses"][0]["adrfam"], "IPv4");
    let listener = &machine.ok("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }))[0];
    assert_eq!(listener["address"], one["listen_addresses"][0]);
    for method in ["nvmf_subsystem_get_controllers", "nvmf_subsystem_get_qpairs"] {
        assert_eq!(machine.ok(method, json!({ "nqn": NQN })), json!([]));
    }
    let stats = machine.ok("nvmf_get_stats", json!({ "tgt_name": "nvmf_tgt" }));
    let group = &stats["poll_groups"][0];
    let tcp = json!({
        "trtype": "TCP", "zerocopy_sends": 0, "zerocopy_sends_copied": 0, "zerocopy_connections_off": 0,
    });
    assert_eq!((&group["current_io_qpairs"], &group["transports"]), (&json!(0), &json!([tcp])));
    machine.ok("nvmf_create_transport", json!({ "trtype": "VFIOUSER" }));
    let stats = machine.ok("nvmf_get_stats", Value::Null);
    let transports = &stats["poll_groups"][0]["transports"];
    assert_eq!((&transports[0], &transports[1]["trtype"]), (&tcp, &json!("VFIOUSER")));
    let polls = |name: &str| transports[1][name].as_u64().unwrap();
    assert!(polls("polls_spurious") <= polls("polls"), "{stats}");
}

#[test]
fn a_saved_configuration_names_the_hosts_of_a_namespace_and_the_referrals() {
    let machine = machine();
    machine.subsystem();
    machine.ok("bdev_malloc_create", json!({ "name": "H", "num_blocks": 2048, "block_size": 512 }));
    let hidden = json!({ "bdev_name": "H", "nsid": 9, "no_auto_visible": true });
    machine.ok("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": hidden }));
    let of = |nsid: u32, host: &str| json!({ "nqn": NQN, "nsid": nsid, "host": host });
    let saved = |method: &str| -> Vec<Value> {
        let calls = machine.ok("framework_get_config", json!({ "name": "nvmf" }));
        let all = calls.as_array().unwrap().iter().filter(|call| call["method"] == method);
        all.map(|call| call["params"].clone()).collect()
    };
    let host = "nqn.2014-08.org.nvmexpress:h";
    machine.ok("nvmf_ns_add_host", of(9, host));
    // As with SPDK, a second time is no error.
    machine.ok("nvmf_ns_add_host", of(9, host));
    assert_eq!(saved("nvmf_ns_add_host"), [of(9, host)]);
    assert_eq!(saved("nvmf_subsystem_add_ns")[1]["namespace"]["no_auto_visible"], true);
    let described = machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }));
    assert_eq!(
        described[0]["namespaces"][1].get("no_auto_visible"),
        None,
        "SPDK has it in the configuration only"
    );
    machine.ok("nvmf_ns_remove_host", of(9, host));
    assert_eq!(saved("nvmf_ns_add_host"), [] as [Value; 0]);
    for params in [of(7, host), of(8, host), of(9, "h")] {
        assert_eq!(machine.code("nvmf_ns_add_host", params), -32602);
    }

    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.7", "trsvcid": "8009" });
    let referral = json!({ "address": address, "secure_channel": false,
        "subnqn": "nqn.2014-08.org.nvmexpress.discovery" });
    for _ in 0..2 {
        machine.ok("nvmf_discovery_add_referral", json!({ "address": address }));
    }
    assert_eq!(machine.ok("nvmf_discovery_get_referrals", Value::Null), json!([referral]));
    assert_eq!(saved("nvmf_discovery_add_referral"), [referral]);
    machine.ok("nvmf_discovery_remove_referral", json!({ "address": address }));
    assert_eq!(machine.ok("nvmf_discovery_get_referrals", Value::Null), json!([]));
    assert_eq!(machine.code("nvmf_discovery_remove_referral", json!({ "address": address })), -32602);
    for (key, value) in [("trtype", "VFIOUSER"), ("traddr", "0.0.0.0"), ("traddr", "host"), ("trsvcid", "0")]
    {
        let mut invalid = address.clone();
        invalid[key] = json!(value);
        assert_eq!(
            machine.code("nvmf_discovery_add_referral", json!({ "address": invalid })),
            -32602,
            "{invalid}"
        );
    }
}

#[test]
fn transports_that_strip_protection_hide_metadata_of_namespaces() {
    let protected = |name: &str, md_interleave: bool| {
        json!({ "name": name, "num_blocks": 64, "block_size": 512, "md_size": 8, "dif_type": 1,
            "md_interleave": md_interleave })
    };
    let add = |bdev: &str, more: Value| {
        let mut namespace = json!({ "bdev_name": bdev });
        namespace.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "nqn": NQN, "namespace": namespace })
    };
    let machine = machine();
    let saved = |method: &str, place: &str| -> Vec<Value> {
        let calls = machine.ok("framework_get_config", json!({ "name": "nvmf" }));
        let all = calls.as_array().unwrap().iter().filter(|call| call["method"] == method);
        all.map(|call| call["params"].pointer(place).cloned().unwrap_or_default()).collect()
    };
    for (name, md_interleave) in [("A", true), ("B", false), ("C", true)] {
        machine.ok("bdev_malloc_create", protected(name, md_interleave));
    }
    machine.ok("bdev_malloc_create", json!({ "name": "D", "num_blocks": 64, "block_size": 512 }));
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    machine.ok("nvmf_subsystem_add_ns", add("A", json!({})));
    let strips = json!({ "trtype": "TCP", "dif_insert_or_strip": true });
    assert_eq!(machine.code("nvmf_create_transport", strips.clone()), -32602, "A shows its metadata");
    machine.ok("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 }));
    assert_eq!(machine.code("nvmf_subsystem_add_ns", add("B", json!({}))), -32602, "it is separate");
    machine.ok("nvmf_create_transport", strips);
    let shows = json!({ "trtype": "VFIOUSER" });
    assert_eq!(machine.code("nvmf_create_transport", shows), -32602, "transports differ");
    for bdev in ["A", "B", "D"] {
        machine.ok("nvmf_subsystem_add_ns", add(bdev, json!({})));
    }
    machine.ok("nvmf_subsystem_add_ns", add("C", json!({ "hide_metadata": true })));
    assert_eq!(machine.ok("nvmf_get_transports", json!({}))[0]["dif_insert_or_strip"], true);
    assert_eq!(saved("nvmf_create_transport", "/dif_insert_or_strip"), [json!(true)]);
    let hidden = saved("nvmf_subsystem_add_ns", "/namespace/hide_metadata");
    assert_eq!(hidden, [json!(true), json!(true), Value::Null, json!(true)], "D has no metadata");
}

#[test]
fn errors_have_spdks_codes() {
    let machine = machine();
    let address = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let tls = json!({ "nqn": NQN, "listen_address": address, "secure_channel": true });
    let keyed = json!({ "nqn": NQN, "host": "nqn.2014-08.org.nvmexpress:h", "dhchap_key": "k" });
    let early = json!({ "nqn": NQN, "listen_address": address });
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let cases = [
        ("nvmf_subsystem_add_listener", early, -32602),
        ("nvmf_get_transports", json!({ "trtype": "TCP" }), -19),
        ("nvmf_create_transport", json!({ "trtype": "FC" }), -32602),
        ("nvmf_create_transport", json!({ "trtype": "TCP", "max_io_size": 5000 }), -32602),
        ("nvmf_create_transport", json!({ "trtype": "TCP", "masked_oncs": ["vwc"] }), -32602),
        ("nvmf_create_subsystem", json!({ "nqn": NQN }), -32603),
        ("nvmf_create_subsystem", json!({ "nqn": "a" }), -32602),
        ("nvmf_create_subsystem", json!({ "nqn": NQN, "tgt_name": "other" }), -32603),
        ("nvmf_delete_subsystem", json!({ "nqn": "nqn.2025-01.io.ringbolt:z" }), -32602),
        ("nvmf_get_subsystems", json!({ "nqn": "nqn.2025-01.io.ringbolt:z" }), -19),
        ("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": { "bdev_name": "Z" } }), -32602),
        ("nvmf_subsystem_add_listener", tls, -32602),
        ("nvmf_subsystem_add_host", keyed, -32602),
    ];
    for (method, params, expected) in cases {
        assert_eq!(machine.code(method, params.clone()), expected, "{method} {params}");
    }
}

#[test]
fn identifiers_have_exactly_two_digits_a_byte() {
    let decode = |text: &str| Identifier::<2>::decode(json!(text), &mut DecodeLog::default()).map(|id| id.0);
    assert_eq!(decode("0aF-f"), Ok([0x0a, 0xff]));
    for text in ["0aff0", "0g", "", "zz0aff"] {
        assert!(decode(text).is_err(), "{text}");
    }
}

#[test]
fn the_number_of_subsystems_can_be_limited() {
    let machine = machine();
    let create = |name: &str| json!({ "nqn": format!("nqn.2025-01.io.ringbolt:{name}") });
    machine.ok("nvmf_create_subsystem", create("a"));
    machine.ok("nvmf_create_subsystem", create("b"));
    assert_eq!(machine.code("nvmf_set_max_subsystems", json!({ "max_subsystems": 1 })), -16);
    machine.ok("nvmf_set_max_subsystems", json!({ "max_subsystems": 2 }));
    assert_eq!(machine.code("nvmf_create_subsystem", create("c")), -28);
    let saved = machine.app.save();
    let limit = json!({ "method": "nvmf_set_max_subsystems", "params": { "max_subsystems": 2 } });
    assert!(saved.to_string().contains(&limit.to_string()), "{saved}");
    machine.ok("nvmf_delete_subsystem", create("a"));
    machine.ok("nvmf_create_subsystem", create("c"));
}

#[test]
fn a_namespace_moves_between_ana_groups_that_exist() {
    let machine = machine();
    let device = |name: &str| json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
    machine.ok("bdev_malloc_create", device("M"));
    let reporting = json!({ "nqn": NQN, "ana_reporting": true, "max_namespaces": 4 });
    machine.ok("nvmf_create_subsystem", reporting);
    let namespace = |group: u32| json!({ "nqn": NQN, "namespace": { "bdev_name": "M", "anagrpid": group } });
    // A controller asserts that groups exist: this must never reach it.
    assert_eq!(machine.code("nvmf_subsystem_add_ns", namespace(5)), -32602);
    assert_eq!(machine.ok("nvmf_subsystem_add_ns", namespace(2)), 1);
    let group = |nsid: u32, group: u32| json!({ "nqn": NQN, "nsid": nsid, "anagrpid": group });
    machine.ok("nvmf_subsystem_set_ns_ana_group", group(1, 4));
    let shown = |machine: &TestApp| {
        machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["namespaces"][0]["anagrpid"].clone()
    };
    for (nsid, to) in [(1, 0), (1, 5), (2, 1)] {
        let code = machine.code("nvmf_subsystem_set_ns_ana_group", group(nsid, to));
        assert_eq!((code, shown(&machine)), (-32602, json!(4)), "namespace {nsid} to {to}");
    }
    let saved = machine.app.save().to_string();
    assert!(saved.contains("\"anagrpid\":4"), "{saved}");
    let plain = "nqn.2025-01.io.ringbolt:plain";
    machine.ok("nvmf_create_subsystem", json!({ "nqn": plain }));
    let of_plain = json!({ "nqn": plain, "nsid": 1, "anagrpid": 1 });
    assert_eq!(machine.code("nvmf_subsystem_set_ns_ana_group", of_plain), -32602);
}

/// Two keys of the keyring, in files of a directory that is removed on drop.
struct KeyFiles(std::path::PathBuf);

impl Drop for KeyFiles {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SECRET: &str = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n";

fn key_files(machine: &TestApp, test: &str) -> KeyFiles {
    let files = KeyFiles(std::env::temp_dir().join(format!("nvmf-keys-{test}-{}", std::process::id())));
    std::fs::create_dir_all(&files.0).unwrap();
    for (name, text) in [
        ("host", format!("DHHC-1:00:{SECRET}:")),
        ("ctrlr", format!("DHHC-1:00:{SECRET}:\n")),
        ("bad", "x".into()),
    ] {
        let path = files.0.join(name);
        secret::Secret::new(text).write_new(&path).unwrap();
        machine.ok("keyring_file_add_key", json!({ "name": name, "path": path.to_str().unwrap() }));
    }
    files
}

#[test]
fn keys_of_hosts_are_saved_and_described_by_name_only() {
    let machine = machine();
    let _files = key_files(&machine, "saved");
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = |name: &str| format!("nqn.2014-08.org.nvmexpress:{name}");
    let keyed = json!({ "nqn": NQN, "host": host("a"), "dhchap_key": "host", "dhchap_ctrlr_key": "ctrlr" });
    machine.ok("nvmf_subsystem_add_host", keyed.clone());
    machine.ok("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": host("b"), "dhchap_key": "" }));
    let hosts = || machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["hosts"].clone();
    let of_a = json!({ "nqn": host("a"), "dhchap_key": "host", "dhchap_ctrlr_key": "ctrlr" });
    assert_eq!(hosts(), json!([of_a, { "nqn": host("b") }]));
    let saved = || machine.app.save().to_string();
    assert!(!saved().contains(SECRET) && !hosts().to_string().contains(SECRET));
    assert!(saved().contains(r#""dhchap_key":"host","dhchap_ctrlr_key":"ctrlr""#), "{}", saved());
    machine.ok("nvmf_subsystem_set_keys", json!({ "nqn": NQN, "host": host("a"), "dhchap_key": "ctrlr" }));
    machine.ok("nvmf_subsystem_set_keys", json!({ "nqn": NQN, "host": host("b"), "dhchap_key": "host" }));
    let expected =
        json!([{ "nqn": host("a"), "dhchap_key": "ctrlr" }, { "nqn": host("b"), "dhchap_key": "host" }]);
    assert_eq!(hosts(), expected);
    machine.ok("nvmf_subsystem_set_keys", json!({ "nqn": NQN, "host": host("a") }));
    assert_eq!(hosts()[0], json!({ "nqn": host("a") }));
    // Removed with their host.
    machine.ok("nvmf_subsystem_remove_host", json!({ "nqn": NQN, "host": host("b") }));
    machine.ok("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": host("b") }));
    assert_eq!(hosts()[1], json!({ "nqn": host("b") }));
}

#[test]
fn what_is_no_key_is_refused_without_its_contents() {
    let machine = machine();
    let _files = key_files(&machine, "refused");
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = "nqn.2014-08.org.nvmexpress:h";
    machine.ok("keyring_file_remove_key", json!({ "name": "ctrlr" }));
    for (keys, reason) in [
        (json!({ "dhchap_key": "bad" }), "bad: a key has the form"),
        (json!({ "dhchap_key": "ctrlr" }), "no key is called ctrlr"),
        (json!({ "dhchap_key": "host", "dhchap_ctrlr_key": "bad" }), "bad: a key has the form"),
        (json!({ "dhchap_ctrlr_key": "host" }), "dhchap_ctrlr_key needs a dhchap_key"),
    ] {
        let mut params = json!({ "nqn": NQN, "host": host });
        params.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let error = machine.app.invoke("nvmf_subsystem_add_host", params).unwrap_err();
        assert!(error.code == -32602 && error.message.contains(reason), "{error}");
    }
    assert_eq!(
        machine.code("nvmf_subsystem_set_keys", json!({ "nqn": NQN, "host": host, "dhchap_key": "host" })),
        -32602
    );
}

#[test]
fn digests_and_groups_of_authentication_are_set_and_saved() {
    let machine = machine();
    machine.ok("nvmf_set_config", json!({ "dhchap_digests": ["sha256", "sha384", "sha512"] }));
    assert!(!machine.app.save().to_string().contains("nvmf_set_config"), "the default is not saved");
    machine.ok(
        "nvmf_set_config",
        json!({ "dhchap_digests": ["sha512"], "dhchap_dhgroups": ["ffdhe3072", "null"] }),
    );
    machine.ok("nvmf_set_config", json!({}));
    // Other changes keep it.
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let saved = machine.app.save().to_string();
    let expected = r#"{"dhchap_digests":["sha512"],"dhchap_dhgroups":["null","ffdhe3072"]}"#;
    assert!(saved.contains(expected), "{saved}");
    for params in [
        json!({ "dhchap_digests": ["md5"] }),
        json!({ "dhchap_digests": [] }),
        json!({ "dhchap_dhgroups": ["null", "ffdhe1024"] }),
        json!({ "dup_host_policy": "deny" }),
        json!({ "discovery_filters": ["match_any"] }),
        json!({ "discovery_filter": "match_any,svcid" }),
        json!({ "discovery_filter": "svcid", "discovery_filters": ["svcid"] }),
        json!({ "poll_groups_mask": "[4095]" }),
        json!({ "poll_groups_mask": "0x0" }),
        json!({ "admin_cmd_passthru": { "sanitize": true } }),
    ] {
        assert_eq!(machine.code("nvmf_set_config", params.clone()), -32602, "{params}");
    }
}

#[test]
fn tls_of_hosts_and_listeners_is_saved_by_the_names_of_keys() {
    const PSK: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR";
    let machine = machine();
    let files = key_files(&machine, "tls");
    let path = files.0.join("tls");
    secret::Secret::new(format!("NVMeTLSkey-1:01:{PSK}:")).write_new(&path).unwrap();
    machine.ok("keyring_file_add_key", json!({ "name": "tls", "path": path.to_str().unwrap() }));
    machine.ok("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let host = "nqn.2014-08.org.nvmexpress:h";
    let keyed = |psk: &str| json!({ "nqn": NQN, "host": host, "psk": psk });
    let refused = machine.app.invoke("nvmf_subsystem_add_host", keyed("host")).unwrap_err();
    assert!(refused.message.contains("host: a key has the form NVMeTLSkey-1"), "{refused}");
    machine.ok("nvmf_subsystem_add_host", keyed("tls"));
    let hosts = || machine.ok("nvmf_get_subsystems", json!({ "nqn": NQN }))[0]["hosts"].clone();
    assert_eq!(hosts(), json!([{ "nqn": host, "psk": "tls" }]));
    machine.ok("nvmf_subsystem_set_keys", json!({ "nqn": NQN, "host": host, "dhchap_key": "host" }));
    assert_eq!(hosts(), json!([{ "nqn": host, "dhchap_key": "host", "psk": "tls" }]));
    machine.ok("nvmf_create_transport", json!({ "trtype": "TCP" }));
    let address = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" });
    let listen = |secure: bool| json!({ "nqn": NQN, "listen_address": address, "secure_channel": secure });
    machine.ok("nvmf_subsystem_add_listener", listen(true));
    let saved = machine.app.save().to_string();
    assert!(saved.contains(r#""secure_channel":true"#), "{saved}");
    assert!(saved.contains(r#""psk":"tls""#) && !saved.contains(PSK), "{saved}");
}
