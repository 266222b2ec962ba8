//! Reloading over every method: what `save_config` writes, and what is written in another way, changes
//! nothing.

use std::collections::BTreeSet;
use std::path::Path;

use bdev::Registry;
use control::{ConfigFile, ControlPlane, ManagedReactor, MethodKind};
use reactor::{ReactorConfig, Reactors};
use serde_json::{Map, Value, json};

use super::{App, StartOptions, catalog};

/// Methods that change something and are not saved by their name. A method that is in neither list, nor in
/// [`configuration`] or [`elsewhere`], fails the test: its author says what a reload makes of it.
const UNDO: &[&str] = &[
    "accel_crypto_key_destroy",
    "bdev_aio_delete",
    "bdev_crypto_delete",
    "bdev_delay_delete",
    "bdev_error_delete",
    "bdev_gpt_delete",
    "bdev_malloc_delete",
    "bdev_model_delete",
    "bdev_null_delete",
    "bdev_nvme_detach_controller",
    "bdev_nvme_stop_discovery",
    "bdev_nvme_stop_mdns_discovery",
    "bdev_passthru_delete",
    "bdev_pmem_delete",
    "bdev_raid_delete",
    "bdev_rbd_delete",
    "bdev_rbd_unregister_cluster",
    "bdev_split_delete",
    "bdev_store_delete",
    "bdev_uring_delete",
    "iscsi_auth_group_remove_secret",
    "iscsi_delete_auth_group",
    "iscsi_delete_initiator_group",
    "iscsi_delete_portal_group",
    "iscsi_delete_target_node",
    "iscsi_initiator_group_remove_initiators",
    "iscsi_target_node_remove_pg_ig_maps",
    "keyring_file_remove_key",
    "nbd_export_delete",
    "nbd_stop_disk",
    "nvmf_delete_subsystem",
    "nvmf_delete_target",
    "nvmf_discovery_remove_referral",
    "nvmf_ns_remove_host",
    "nvmf_stop_mdns_prr",
    "nvmf_subsystem_remove_host",
    "nvmf_subsystem_remove_listener",
    "nvmf_subsystem_remove_ns",
    "store_close",
    "store_node_stop",
    "ublk_destroy_target",
    "ublk_stop_disk",
    "vhost_delete_controller",
    "vhost_scsi_controller_remove_target",
];

/// What is done once, is about data or faults, or is a choice of the moment: it is no configuration.
const ACTIONS: &[&str] = &[
    "accel_error_inject_error",
    "accel_set_driver",
    "bdev_aio_rescan",
    "bdev_error_inject_error",
    "bdev_error_resume_pending",
    "bdev_lvol_clone",
    "bdev_lvol_clone_bdev",
    "bdev_lvol_create",
    "bdev_lvol_create_lvstore",
    "bdev_lvol_decouple_parent",
    "bdev_lvol_delete",
    "bdev_lvol_delete_lvstore",
    "bdev_lvol_grow_lvstore",
    "bdev_lvol_inflate",
    "bdev_lvol_rename",
    "bdev_lvol_rename_lvstore",
    "bdev_lvol_resize",
    "bdev_lvol_set_low_space",
    "bdev_lvol_set_parent",
    "bdev_lvol_set_parent_bdev",
    "bdev_lvol_set_read_only",
    "bdev_lvol_snapshot",
    "bdev_lvol_start_shallow_copy",
    "bdev_model_inject",
    "bdev_nvme_add_error_injection",
    "bdev_nvme_apply_firmware",
    "bdev_nvme_disable_controller",
    "bdev_nvme_enable_controller",
    "bdev_nvme_remove_error_injection",
    "bdev_nvme_reset_controller",
    "bdev_nvme_set_keys",
    "bdev_nvme_set_multipath_policy",
    "bdev_nvme_set_preferred_path",
    "bdev_raid_add_base_bdev",
    "bdev_raid_remove_base_bdev",
    "bdev_raid_start_degraded",
    "bdev_rbd_resize",
    "bdev_reset_iostat",
    "bdev_set_qd_sampling_period",
    "bdev_uring_rescan",
    "iscsi_target_node_request_logout",
    "nvmf_subsystem_set_keys",
    "nvmf_vfio_user_inject",
    "store_format",
    "store_image_create",
    "store_image_delete",
    "store_image_resize",
    "trace_clear",
    "trace_clear_tpoint_mask",
    "trace_disable_tpoint_group",
    "trace_enable_tpoint_group",
    "trace_set_tpoint_mask",
    "ublk_recover_disk",
    "virtio_blk_create_transport",
];

/// Saved methods that need what a test lacks (the kernel's drivers, persistent memory, a cluster), with a
/// call as a person writes it, and as it is saved.
fn elsewhere() -> Vec<(&'static str, Value, Value)> {
    let node = json!({ "bdev_name": "M0", "cluster": "/c", "node": 3, "listen": "127.0.0.1:0",
        "allow_plain_network": false, "lease_s": 5, "out_after_s": 600, "atomic_blocks": false,
        "read_policy": "overlay", "flush_entries": 16, "flush_after_ms": 100, "threads": "run-to-completion",
        "checksum_cache_bytes": store_node::StoreTuning::default().checksum_cache_bytes });
    vec![
        (
            "bdev_nvme_start_mdns_discovery",
            json!({ "name": "D", "svcname": "_nvme-disc._tcp", "hostnqn": null }),
            json!({ "svcname": "_nvme-disc._tcp", "name": "D" }),
        ),
        ("nvmf_publish_mdns_prr", json!({ "tgt_name": null }), json!({})),
        (
            "bdev_pmem_create",
            json!({ "name": "p", "pmem_file": "/p", "uuid": "{00000000-0000-0000-0000-00000000000A}" }),
            json!({ "pmem_file": "/p", "name": "p", "block_size": 512,
                "uuid": "00000000-0000-0000-0000-00000000000a" }),
        ),
        (
            "bdev_rbd_create",
            json!({ "name": "r", "rbd_name": "i", "pool_name": "p", "block_size": 512, "user_id": null,
                "config": { "mon_host": "h", "keyring": "/k" }, "uuid": "{00000000-0000-0000-0000-00000000000B}" }),
            json!({ "name": "r", "pool_name": "p", "rbd_name": "i", "block_size": 512,
                "config": { "keyring": "/k", "mon_host": "h" }, "uuid": "00000000-0000-0000-0000-00000000000b" }),
        ),
        (
            "bdev_rbd_register_cluster",
            json!({ "config_file": "/c", "name": "c", "user_id": null }),
            json!({ "name": "c", "config_file": "/c" }),
        ),
        (
            "bdev_store_create",
            json!({ "pool": "p", "image": "i", "cluster": "/c", "background": true }),
            json!({ "name": "p/i", "pool": "p", "image": "i", "cluster": "/c" }),
        ),
        (
            "ioat_scan_accel_module",
            json!({ "addresses": ["vfio-user:/run/ioat0", "00:04.0", "vfio-user:/run/ioat0"] }),
            json!({ "addresses": ["0000:00:04.0", "vfio-user:/run/ioat0"] }),
        ),
        (
            "nbd_start_disk",
            json!({ "bdev_name": "0a000000-0000-0000-0000-000000000000", "nbd_device": "/dev/nbd0" }),
            json!({ "bdev_name": "M0", "nbd_device": "/dev/nbd0", "connections": 1, "reconnect_timeout_s": 60 }),
        ),
        ("store_node_start", json!({ "bdev_name": "M0", "cluster": "/c", "node": 3 }), node),
        ("ublk_create_target", json!({ "cpumask": "[0,1]" }), json!({ "cpumask": "0x3" })),
        (
            "ublk_start_disk",
            json!({ "ublk_id": 1, "bdev_name": "0A000000-0000-0000-0000-000000000000" }),
            json!({ "bdev_name": "M0", "ublk_id": 1, "num_queues": 1, "queue_depth": 128 }),
        ),
    ]
}

const HOST: &str = "nqn.2014-08.org.nvmexpress:h";
const NQN: &str = "nqn.2026-11.io.ringbolt:reload";
const ANA: &str = "nqn.2026-11.io.ringbolt:ana";
const M0: &str = "0A000000-0000-0000-0000-000000000000";

/// Calls as a person writes them: with defaults left out, bdevs by other names, addresses in other spellings.
/// Each method that is saved is in it, and those of which the effect is saved with another call.
fn configuration(directory: &str, port: u16) -> Vec<(&'static str, Value)> {
    [
        options(directory),
        bdevs(directory),
        nvmf(directory, port),
        initiator(port),
        exports(directory),
        iscsi(),
    ]
    .concat()
}

fn options(directory: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("keyring_linux_set_options", json!({ "enable": true })),
        ("keyring_file_add_key", json!({ "name": ":key0", "path": format!("{directory}/key") })),
        ("keyring_file_add_key", json!({ "name": "key1", "path": format!("{directory}/key") })),
        ("keyring_file_add_key", json!({ "name": "xts", "path": format!("{directory}/xts") })),
        ("framework_set_scheduler", json!({ "name": "static" })),
        ("sock_impl_set_options", json!({ "enable_zerocopy_send_server": false })),
        ("iobuf_set_options", json!({ "small_pool_count": 10_000 })),
        ("fsdev_set_opts", json!({ "fsdev_io_cache_size": 8 })),
        ("accel_set_options", json!({ "task_count": 100 })),
        ("accel_assign_opc", json!({ "opname": "crc32c", "module": "error" })),
        (
            "accel_crypto_key_create",
            json!({ "cipher": "AES_XTS", "key": "000102030405060708090a0b0c0d0e0f",
            "key2": "6465666768696a6b6c6d6e6f70717273", "name": "by value" }),
        ),
        (
            "accel_crypto_key_create",
            json!({ "cipher": "AES_XTS", "keyring_key": "xts", "name": "of the keyring" }),
        ),
        ("bdev_set_options", json!({ "bdev_auto_examine": false, "bdev_io_pool_size": 65_535 })),
        (
            "bdev_nvme_set_options",
            json!({ "bdev_retry_count": -1, "timeout_us": 1000, "action_on_timeout": "abort",
            "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 1, "multipath_opts": { "policy": "active_active" } }),
        ),
        // Off: the controllers of the machine are none of the test's.
        ("bdev_nvme_set_hotplug", json!({ "enable": false, "period_us": 0 })),
    ]
}

fn bdevs(directory: &str) -> Vec<(&'static str, Value)> {
    let file = |name: &str| format!("{directory}/{name}");
    let bdev = |name: &str| json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
    vec![
        (
            "bdev_malloc_create",
            json!({ "name": "M0", "num_blocks": 2048, "block_size": 512, "uuid": M0, "numa_id": -1 }),
        ),
        ("bdev_malloc_create", json!({ "num_blocks": 64, "block_size": 4096 })),
        ("bdev_malloc_create", bdev("M1")),
        ("bdev_malloc_create", bdev("M2")),
        ("bdev_malloc_create", json!({ "name": "S", "num_blocks": 65_536, "block_size": 4096 })),
        ("bdev_null_create", bdev("N")),
        ("bdev_null_resize", json!({ "name": "N", "new_size": 8 })),
        ("bdev_aio_create", json!({ "name": "A", "filename": file("a"), "fallocate": true })),
        ("bdev_uring_create", json!({ "name": "U", "filename": file("u"), "block_size": 512 })),
        (
            "bdev_model_create",
            json!({ "name": "model", "profile": device_model::DeviceProfile::shipped_names().next().unwrap(),
            "size": 1 << 30 }),
        ),
        (
            "bdev_delay_create",
            json!({ "name": "D", "base_bdev_name": "N", "avg_read_latency": 1, "p99_read_latency": 2,
            "avg_write_latency": 3, "p99_write_latency": 4 }),
        ),
        (
            "bdev_delay_update_latency",
            json!({ "delay_bdev_name": "D", "latency_type": "avg_read", "latency_us": 9 }),
        ),
        ("bdev_error_create", json!({ "base_name": "A" })),
        ("bdev_passthru_create", json!({ "name": "P", "base_bdev_name": M0 })),
        ("bdev_split_create", json!({ "base_bdev": "U", "split_count": 3 })),
        ("bdev_passthru_create", json!({ "name": "waits", "base_bdev_name": "not there" })),
        ("bdev_gpt_create", json!({ "base_bdev_name": "not there", "part_type": "Linux" })),
        ("bdev_raid_set_options", json!({ "process_max_bandwidth_mb_sec": 100 })),
        ("bdev_null_create", json!({ "name": "RA", "num_blocks": 2048, "block_size": 512 })),
        ("bdev_null_create", json!({ "name": "RB", "num_blocks": 2048, "block_size": 512 })),
        (
            "bdev_raid_create",
            json!({ "name": "R", "raid_level": "0", "strip_size_kb": 4, "base_bdevs": ["RA", "RB"] }),
        ),
        ("bdev_crypto_create", json!({ "name": "C", "base_bdev_name": "M2", "key_name": "by value" })),
        ("bdev_set_qos_limit", json!({ "name": M0, "rw_ios_per_sec": 100_000 })),
        ("bdev_enable_histogram", json!({ "name": "P", "enable": true, "opc": "" })),
    ]
}

fn nvmf(directory: &str, port: u16) -> Vec<(&'static str, Value)> {
    let file = |name: &str| format!("{directory}/{name}");
    let address = |trtype: &str, adrfam: &str, traddr: &str| json!({ "trtype": trtype, "adrfam": adrfam, "traddr": traddr, "trsvcid": port });
    vec![
        ("nvmf_set_max_subsystems", json!({ "max_subsystems": 100 })),
        (
            "nvmf_set_config",
            json!({ "dhchap_digests": ["sha512", "sha256"], "discovery_filter": "transport",
            "dup_host_policy": "allow" }),
        ),
        ("nvmf_set_crdt", json!({ "crdt2": 9 })),
        ("nvmf_create_target", json!({ "name": "second", "discovery_filter": ["svcid", "transport"] })),
        ("nvmf_create_subsystem", json!({ "nqn": NQN, "tgt_name": "second" })),
        (
            "nvmf_create_transport",
            json!({ "trtype": "tcp", "zcopy": false, "disable_compare": true, "masked_oncs": ["nvmcpys"] }),
        ),
        (
            "nvmf_create_transport",
            json!({ "trtype": "vfiouser", "max_aq_depth": 32, "max_connections": 9,
            "max_connections_per_peer": 8, "max_connections_per_subsystem": 7 }),
        ),
        ("nvmf_discovery_add_referral", json!({ "address": address("tcp", "ipv4", "192.0.2.1") })),
        (
            "nvmf_create_subsystem",
            json!({ "nqn": NQN, "max_namespaces": 0, "max_discard_size_kib": 9, "admin_label": "" }),
        ),
        ("nvmf_subsystem_add_host", json!({ "nqn": NQN, "host": HOST })),
        (
            "nvmf_subsystem_add_ns",
            json!({ "nqn": NQN, "namespace": { "bdev_name": "P",
            "uuid": "{0B000000-0000-0000-0000-000000000000}" } }),
        ),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": NQN, "listen_address": address("tcp", "ipv4", "127.0.0.1") }),
        ),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": NQN, "listen_address":
            { "trtype": "vfiouser", "traddr": format!("{}/", file("vfio")) } }),
        ),
        ("nvmf_create_subsystem", json!({ "nqn": ANA, "ana_reporting": true, "serial_number": "RB1" })),
        ("nvmf_subsystem_allow_any_host", json!({ "nqn": ANA, "allow_any_host": false })),
        (
            "nvmf_subsystem_add_ns",
            json!({ "nqn": ANA, "namespace":
            { "bdev_name": "M1", "nguid": "0123456789abcdef-0123456789abcdef", "no_auto_visible": true } }),
        ),
        ("nvmf_ns_add_host", json!({ "nqn": ANA, "nsid": 1, "host": HOST })),
        ("nvmf_subsystem_set_ns_ana_group", json!({ "nqn": ANA, "nsid": 1, "anagrpid": 3 })),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": ANA, "listen_address":
            { "trtype": "TCP", "traddr": "::1", "trsvcid": "0" }, "ana_state": "inaccessible" }),
        ),
        (
            "nvmf_subsystem_add_listener",
            json!({ "nqn": ANA, "listen_address": address("Tcp", "IPV4", "127.0.0.1") }),
        ),
        (
            "nvmf_subsystem_listener_set_ana_state",
            json!({ "nqn": ANA, "ana_state": "non_optimized", "anagrpid": 3,
            "listen_address": address("tcp", "ipv4", "127.0.0.1") }),
        ),
    ]
}

fn initiator(port: u16) -> Vec<(&'static str, Value)> {
    vec![
        (
            "bdev_nvme_attach_controller",
            json!({ "name": "Nvme0", "trtype": "tcp", "traddr": "localhost", "trsvcid": port,
            "subnqn": NQN, "hostnqn": HOST, "multipath": "multipath", "fabrics_connect_timeout_us": 0,
            "priority": 3 }),
        ),
        (
            "bdev_nvme_start_discovery",
            json!({ "name": "found", "trtype": "tcp", "traddr": "127.0.0.1", "adrfam": "ipv4",
            "trsvcid": port, "hostnqn": "nqn.2014-08.org.nvmexpress:other", "wait_for_attach": true }),
        ),
    ]
}

fn iscsi() -> Vec<(&'static str, Value)> {
    vec![
        ("nbd_set_options", json!({ "max_connections": 100 })),
        ("vhost_set_options", json!({ "max_connections": 100 })),
        ("iscsi_set_options", json!({ "nop_timeout": 30, "chap_group": 0 })),
        (
            "iscsi_create_auth_group",
            json!({ "tag": 1, "secrets": [{ "user": "u", "secret": "a secret of one" }] }),
        ),
        ("iscsi_auth_group_add_secret", json!({ "tag": 1, "user": "v", "secret": "a secret of another" })),
        ("iscsi_set_discovery_auth", json!({ "require_chap": true, "chap_group": 1 })),
        (
            "iscsi_create_portal_group",
            json!({ "tag": 1, "portals": [{ "host": "127.0.0.1", "port": 0 }], "wait": true }),
        ),
        ("iscsi_start_portal_group", json!({ "tag": 1 })),
        ("iscsi_portal_group_set_auth", json!({ "tag": 1, "chap_group": 1 })),
        (
            "iscsi_create_initiator_group",
            json!({ "tag": 1, "initiators": ["ALL"], "netmasks": ["127.0.0.1/8"] }),
        ),
        ("iscsi_initiator_group_add_initiators", json!({ "tag": 1, "netmasks": ["[::1]/128"] })),
        (
            "iscsi_create_initiator_group",
            json!({ "tag": 2, "initiators": ["iqn.2026-11.test:i"], "netmasks": ["ALL"] }),
        ),
        (
            "iscsi_create_target_node",
            json!({ "name": "disk", "pg_ig_maps": [{ "pg_tag": 1, "ig_tag": 1 }],
            "luns": [{ "bdev_name": "Up1", "lun_id": 1 }, { "bdev_name": "Up0" }] }),
        ),
        ("iscsi_target_node_add_lun", json!({ "name": "iqn.2016-06.io.spdk:disk", "bdev_name": "Up2" })),
        (
            "iscsi_target_node_add_pg_ig_maps",
            json!({ "name": "iqn.2016-06.io.spdk:disk",
            "pg_ig_maps": [{ "pg_tag": 1, "ig_tag": 2 }] }),
        ),
        ("iscsi_target_node_set_auth", json!({ "name": "iqn.2016-06.io.spdk:disk", "disable_chap": true })),
        (
            "iscsi_target_node_set_redirect",
            json!({ "name": "iqn.2016-06.io.spdk:disk", "pg_tag": 1,
            "redirect_host": "[0:0:0:0:0:0:0:1]", "redirect_port": 3261 }),
        ),
        (
            "iscsi_target_node_set_access_state",
            json!({ "name": "iqn.2016-06.io.spdk:disk", "pg_tag": 1, "access_state": "standby" }),
        ),
        ("iscsi_enable_histogram", json!({ "name": "iqn.2016-06.io.spdk:disk", "enable": true })),
    ]
}

fn exports(directory: &str) -> Vec<(&'static str, Value)> {
    let file = |name: &str| format!("{directory}/{name}");
    vec![
        ("store_open", json!({ "bdev_name": "S" })),
        ("nbd_set_tls", json!({ "psk_file": file("keys.psk") })),
        ("nbd_export_create", json!({ "bdev_name": "model", "port": 0, "require_tls": true })),
        ("nbd_export_create", json!({ "bdev_name": "EE_A", "path": file("nbd.sock") })),
        ("vhost_create_blk_controller", json!({ "ctrlr": "blk", "dev_name": "D", "readonly": true })),
        (
            "vhost_controller_set_coalescing",
            json!({ "ctrlr": "blk", "delay_base_us": 10, "iops_threshold": 60_000 }),
        ),
        ("vhost_create_scsi_controller", json!({ "ctrlr": "scsi", "delay": true })),
        (
            "vhost_scsi_controller_add_target",
            json!({ "ctrlr": "scsi", "scsi_target_num": -7, "bdev_name": "Malloc0" }),
        ),
        ("vhost_start_scsi_controller", json!({ "ctrlr": "scsi" })),
    ]
}

fn file(calls: &[(&str, Value)]) -> ConfigFile {
    let calls = calls.iter().map(|(method, params)| json!({ "method": method, "params": params }));
    let text =
        json!({ "subsystems": [{ "subsystem": "all", "config": calls.collect::<Vec<_>>() }] }).to_string();
    ConfigFile::parse("all.json", text.as_bytes(), &catalog()).unwrap()
}

/// What runs, as a file, with keys and calls in the opposite order.
fn saved_in_reverse(plane: &ControlPlane) -> ConfigFile {
    let mut saved = plane.save();
    reverse(&mut saved);
    ConfigFile::parse("saved.json", saved.to_string().as_bytes(), plane.catalog()).unwrap()
}

/// Reverses the order of keys, and of sections and calls, which makes no difference. That of other lists may.
fn reverse(value: &mut Value) {
    if let Value::Object(object) = value {
        let mut pairs: Vec<(String, Value)> = std::mem::take(object).into_iter().rev().collect();
        for (key, value) in &mut pairs {
            if let (Value::Array(list), "subsystems" | "config") = (&mut *value, key.as_str()) {
                list.reverse();
                list.iter_mut().for_each(reverse);
            }
            reverse(value);
        }
        *object = Map::from_iter(pairs);
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(directory: &Path) -> (Reactors, App) {
    let reactors = Reactors::start(&ReactorConfig::default()).unwrap();
    let managed =
        reactors.handles().iter().map(|handle| ManagedReactor { handle: handle.clone(), thread_id: 0 });
    let options = StartOptions { vhost_socket_dir: directory.to_path_buf(), ..StartOptions::default() };
    options.keyring.set_folder(&directory.join("keys")).unwrap();
    let app = App::start(Registry::new(), managed.collect(), options).unwrap();
    (reactors, app)
}

#[test]
fn a_target_node_is_the_same_with_its_parts_in_one_call_or_in_several() {
    let _turn = sync::lock(&super::OPTIONS_OF_PROCESS);
    let (reactors, app) = start(&std::env::temp_dir());
    let plane = &app.control;
    let null = |name: &str| ("bdev_null_create", json!({ "name": name, "num_blocks": 8, "block_size": 512 }));
    let groups = [
        null("A"),
        null("B"),
        null("C"),
        (
            "iscsi_create_portal_group",
            json!({ "tag": 1, "portals": [{ "host": "127.0.0.1", "port": free_port() }] }),
        ),
        ("iscsi_create_initiator_group", json!({ "tag": 1, "initiators": ["ANY"], "netmasks": ["ANY"] })),
    ];
    let node = |luns: Value, maps: Value| {
        let params = json!({ "name": "disk1", "pg_ig_maps": maps, "luns": luns, "disable_chap": true });
        ("iscsi_create_target_node", params)
    };
    let with = |calls: &[(&'static str, Value)]| file(&[&groups[..], calls].concat());
    let (lun_a, lun_b) = (json!({ "bdev_name": "A", "lun_id": 0 }), json!({ "bdev_name": "B", "lun_id": 1 }));
    let maps = json!([{ "pg_tag": 1, "ig_tag": 1 }]);
    let add_lun = |bdev: &str| ("iscsi_target_node_add_lun", json!({ "name": "disk1", "bdev_name": bdev }));
    let add_maps = ("iscsi_target_node_add_pg_ig_maps", json!({ "name": "disk1", "pg_ig_maps": maps }));
    let whole = with(&[node(json!([lun_a, lun_b]), maps.clone())]);
    let in_parts = with(&[node(json!([lun_a]), json!([])), add_lun("B"), add_maps]);
    in_parts.apply(plane).unwrap();
    let saved = plane.save();
    let mut in_force = in_parts.clone();
    for new in [&whole, &in_parts, &whole, &whole, &in_parts] {
        let (now, lines) = in_force.reload(new, plane);
        assert_eq!((lines, plane.save()), (vec!["nothing has changed".to_string()], saved.clone()));
        in_force = now;
    }
    // One more part is added.
    let more = with(&[node(json!([lun_a]), maps.clone()), add_lun("B"), add_lun("C")]);
    let (in_force, lines) = in_force.reload(&more, plane);
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("applied: iscsi_target_node_add_lun"), "{lines:?}");
    assert_eq!(in_force.reload(&more, plane).1, ["nothing has changed"]);
    // What the file lacks is not forgotten.
    let fewer = with(&[node(json!([lun_a]), maps.clone()), add_lun("C")]);
    let lines = in_force.reload(&fewer, plane).1;
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("refused: iscsi_target_node_add_lun name=disk1 bdev_name=B"), "{lines:?}");

    // A log has no secret.
    let secret = json!({ "tag": 7, "secrets": [{ "user": "a", "secret": "not to be read", "muser": "b",
        "msecret": "neither is this" }] });
    let with_secret = with(&[
        node(json!([lun_a]), maps),
        add_lun("B"),
        add_lun("C"),
        ("iscsi_create_auth_group", secret),
        ("iscsi_auth_group_add_secret", json!({ "tag": 7, "user": "c", "secret": "not to be read, too" })),
    ]);
    let lines = in_force.reload(&with_secret, plane).1.concat();
    assert!(lines.contains("user=c") && !lines.contains("read") && !lines.contains("neither"), "{lines}");

    plane.drain();
    reactors.stop();
    plane.stop();
}

#[test]
fn a_saved_configuration_and_other_spellings_change_nothing_for_every_method() {
    let _turn = sync::lock(&super::OPTIONS_OF_PROCESS);
    let directory = std::env::temp_dir().join(format!("ringbolt-reload-all-{}", std::process::id()));
    std::fs::create_dir_all(directory.join("vfio")).unwrap();
    for name in ["a", "u"] {
        std::fs::File::create(directory.join(name)).unwrap().set_len(8 << 20).unwrap();
    }
    secret::Secret::new("swordfish").write_new(&directory.join("key")).unwrap();
    secret::Secret::new(format!("{:064}", 1)).write_new(&directory.join("xts")).unwrap();
    secret::Secret::new(format!("alice:{:064}\n", 1)).write_new(&directory.join("keys.psk")).unwrap();
    let (reactors, app) = start(&directory);
    let plane = &app.control;

    let calls = configuration(directory.to_str().unwrap(), free_port());
    for (method, params) in &calls {
        if *method == "store_open" {
            plane.invoke("store_format", json!({ "bdev_name": "S", "partitions": 1 })).unwrap();
        }
        plane.invoke(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"));
    }
    let saved = plane.save();
    let mut in_force = file(&calls);
    for (what, new) in [
        ("itself", file(&calls)),
        ("what is saved, in another order", saved_in_reverse(plane)),
        (
            "what is saved",
            ConfigFile::parse("saved.json", saved.to_string().as_bytes(), plane.catalog()).unwrap(),
        ),
    ] {
        let (now, lines) = in_force.reload(&new, plane);
        assert_eq!(lines, ["nothing has changed"], "{what}");
        assert_eq!(plane.save(), saved, "{what}");
        in_force = now;
    }
    // Back from one call for each object to those that made it step by step: some are made again, and nothing
    // goes but a listener whose port was assigned, and whose ANA state is saved in a call of its own.
    let (_, lines) = in_force.reload(&file(&calls), plane);
    let is_kept = |line: &String| !(line.starts_with("removed: ") || line.starts_with("restored: "));
    let gone: Vec<&String> = lines.iter().filter(|line| !is_kept(line)).collect();
    assert!(gone.iter().all(|line| line.contains("listener") && line.contains("::1")), "{gone:#?}");
    let of_others = |saved: &Value| {
        let sections = saved["subsystems"].as_array().unwrap().iter();
        sections.filter(|section| section["subsystem"] != "nvmf").cloned().collect::<Vec<_>>()
    };
    for (now, before) in of_others(&plane.save()).iter().zip(of_others(&saved)) {
        assert_eq!(*now, before);
    }

    // Each method is known to this test.
    let saved_methods: BTreeSet<&str> = saved["subsystems"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|section| section["config"].as_array().unwrap())
        .map(|call| call["method"].as_str().unwrap())
        .collect();
    let made: BTreeSet<&str> = calls.iter().map(|(method, _)| *method).collect();
    for info in plane.catalog().iter() {
        let changes = info.kind != MethodKind::Query || saved_methods.contains(info.name);
        let is_described = elsewhere().iter().any(|(method, ..)| *method == info.name);
        let places = [
            made.contains(info.name),
            is_described,
            UNDO.contains(&info.name) || ACTIONS.contains(&info.name),
            // What is so anyway.
            info.kind == MethodKind::Query && info.default_only.is_some(),
        ];
        let known = places.iter().filter(|is_there| **is_there).count();
        assert!(!changes || known == 1, "{}: how is it reloaded? Add it to one list of this test", info.name);
        assert!(!saved_methods.contains(info.name) || !places[2], "{} is saved", info.name);
    }
    for (method, written, saved) in elsewhere() {
        let canonical = |params: Value| {
            let mut params = Value::Object(plane.canonical(method, params).unwrap());
            params.sort_all_objects();
            params
        };
        assert_eq!(canonical(written), canonical(saved), "{method}");
    }

    plane.drain();
    reactors.stop();
    plane.stop();
    std::fs::remove_dir_all(directory).unwrap();
}
