use std::sync::atomic::{AtomicUsize, Ordering};

use control::{Catalog, ConfigFile, ControlPlane};

use super::*;
use crate::Access;

fn plane() -> Arc<ControlPlane> {
    start(None)
}

fn start(pending: Option<ConfigFile>) -> Arc<ControlPlane> {
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(Registry::new(), builder.examiner());
    builder.module(&bdevs).start(pending).unwrap()
}

fn ok(plane: &ControlPlane, method: &str, params: Value) -> Value {
    plane.invoke(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
}

fn code(plane: &ControlPlane, method: &str, params: Value) -> i64 {
    plane.invoke(method, params).expect_err(method).code
}

#[test]
fn errors_have_spdks_codes() {
    let plane = plane();
    let malloc = json!({ "name": "M", "num_blocks": 64, "block_size": 512 });
    ok(&plane, "bdev_malloc_create", malloc.clone());
    let cases = [
        ("bdev_malloc_create", malloc, -17),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 64, "block_size": 100 }), -22),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 64 }), -32602),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": "64", "block_size": 512 }), -32602),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 8, "block_size": 512, "x": 1 }), -32602),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 512, "md_size": 9 }), -22),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 512, "dif_type": 1 }), -22),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 512, "dif_pi_format": 3 }), -22),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 512, "numa_id": 1 }), -32602),
        ("bdev_null_create", json!({ "name": "N", "num_blocks": 8, "block_size": 519, "md_size": 8 }), -22),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 511, "md_size": 8 }), -22),
        ("bdev_malloc_create", json!([1]), -32602),
        ("bdev_malloc_delete", json!({ "name": "Z" }), -19),
        ("bdev_null_delete", json!({ "name": "M" }), -19),
        ("bdev_get_bdevs", json!({ "name": "Z" }), -19),
        ("bdev_get_iostat", json!({ "names": ["Z"] }), -19),
        ("bdev_get_iostat", json!({ "per_channel": true }), -22),
        ("bdev_get_iostat", json!({ "name": "Z" }), -19),
        ("bdev_get_iostat", json!({ "name": "M", "names": ["M"] }), -22),
        ("bdev_get_histogram", json!({ "name": "M" }), -14),
        ("bdev_get_histogram_borders", json!({ "name": "M", "borders": [1] }), -14),
        ("bdev_get_histogram_borders", json!({ "name": "M", "borders": [] }), -22),
        ("bdev_get_histogram_borders", json!({ "name": "M", "borders": [2, 2] }), -22),
        ("bdev_reset_iostat", json!({ "name": "M", "mode": "some" }), -32602),
        ("bdev_set_qd_sampling_period", json!({ "name": "Z", "period": 1 }), -19),
        ("bdev_uring_create", json!({ "name": "U", "filename": "/nonexistent" }), -2),
        // `rpc.py` sends both flags always.
        (
            "bdev_aio_create",
            json!({ "name": "U", "filename": "/nonexistent", "fallocate": false, "nowait": false }),
            -2,
        ),
        ("bdev_aio_create", json!({ "name": "U", "filename": "/nonexistent", "nowait": true }), -2),
        ("bdev_crypto_create", json!({}), -32601),
        (
            "bdev_malloc_create",
            json!({ "name": "U", "num_blocks": 8, "block_size": 4096, "physical_block_size": 512 }),
            -22,
        ),
        (
            "bdev_null_create",
            json!({ "name": "U", "num_blocks": 8, "block_size": 512, "physical_block_size": 1000 }),
            -22,
        ),
        // On itself.
        ("bdev_passthru_create", json!({ "name": "U", "base_bdev_name": "U" }), -22),
        (
            "bdev_delay_create",
            json!({ "name": "U", "base_bdev_name": "U", "avg_read_latency": 1, "p99_read_latency": 1,
                "avg_write_latency": 1, "p99_write_latency": 1 }),
            -22,
        ),
        ("bdev_split_create", json!({ "base_bdev": "M", "split_count": 0 }), -22),
        ("bdev_split_create", json!({ "base_bdev": "M", "split_count": 65 }), -22),
        ("bdev_split_create", json!({ "base_bdev": "M", "split_count": 1, "split_size_mb": 1 }), -22),
        (
            "bdev_split_create",
            json!({ "base_bdev": "M", "split_count": 1, "split_size_mb": 1, "split_size_bytes": 512 }),
            -22,
        ),
        ("bdev_split_create", json!({ "base_bdev": "M", "split_count": 1, "split_size_bytes": 1000 }), -22),
        ("bdev_split_create", json!({ "base_bdev": "M", "split_count": 2, "split_size_bytes": 16896 }), -22),
        ("bdev_split_delete", json!({ "base_bdev": "M" }), -19),
        ("bdev_examine", json!({ "name": "Z" }), -19),
        ("bdev_set_qos_limit", json!({ "name": "Z", "rw_ios_per_sec": 1 }), -19),
        ("bdev_set_qos_limit", json!({ "name": "M" }), -22),
        ("bdev_set_qos_limit", json!({ "name": "M", "r_mbytes_per_sec": 1u64 << 50 }), -22),
        ("bdev_aio_delete", json!({ "name": "M" }), -19),
        ("frobnicate", json!({}), -32601),
        ("framework_start_init", json!({}), -1),
    ];
    for (method, params, expected) in cases {
        assert_eq!(code(&plane, method, params.clone()), expected, "{method} {params}");
    }
}

#[test]
fn statistics_of_one_device_are_selected_as_before_spdk_26_05() {
    let plane = plane();
    null(&plane, "N");
    null(&plane, "O");
    for selection in [json!({ "name": "O" }), json!({ "names": ["O"] })] {
        let stats = ok(&plane, "bdev_get_iostat", selection.clone());
        assert_eq!(
            (&stats["bdevs"][0]["name"], &stats["bdevs"][1]),
            (&json!("O"), &Value::Null),
            "{selection}"
        );
    }
    assert_eq!(ok(&plane, "bdev_get_iostat", json!({ "name": "O", "per_channel": true }))["name"], "O");
}

#[test]
fn metadata_and_protection_are_described_as_spdk_does() {
    let plane = plane();
    let malloc = json!({ "name": "M", "num_blocks": 64, "block_size": 512, "md_size": 8, "md_interleave": true,
        "dif_type": 1 });
    ok(&plane, "bdev_malloc_create", malloc);
    let null = json!({ "name": "N", "num_blocks": 64, "block_size": 4160, "md_size": 64, "dif_type": 3,
        "dif_is_head_of_md": true });
    ok(&plane, "bdev_null_create", null);
    // `rpc.py` gives the size of the data, and SPDK's `save_config` that with interleaved metadata. The flag
    // is not in it.
    let by_data = json!({ "name": "D", "num_blocks": 64, "block_size": 4096, "md_size": 8, "dif_type": 1 });
    ok(&plane, "bdev_null_create", by_data);
    let saved = json!({ "name": "S", "num_blocks": 64, "block_size": 520, "physical_block_size": 512, "md_size": 8,
        "dif_type": 1, "dif_is_head_of_md": false, "dif_pi_format": 0, "numa_id": -1 });
    ok(&plane, "bdev_malloc_create", saved);
    for (name, dif_pi_format) in [("W32", 1), ("W64", 2)] {
        let wide = json!({ "name": name, "num_blocks": 64, "block_size": 4096, "md_size": 16, "md_interleave": true,
            "dif_type": 1, "dif_pi_format": dif_pi_format });
        ok(&plane, "bdev_malloc_create", wide);
    }
    let checks = |reftag| json!({ "reftag": reftag, "apptag": false, "guard": true });
    for (name, expected) in [
        ("M", [json!(520), json!(8), json!(true), json!(1), json!(false), checks(true), json!(0)]),
        ("N", [json!(4160), json!(64), json!(true), json!(3), json!(true), checks(false), json!(0)]),
        ("D", [json!(4104), json!(8), json!(true), json!(1), json!(false), checks(true), json!(0)]),
        ("S", [json!(520), json!(8), json!(true), json!(1), json!(false), checks(true), json!(0)]),
        ("W32", [json!(4112), json!(16), json!(true), json!(1), json!(false), checks(true), json!(1)]),
        ("W64", [json!(4112), json!(16), json!(true), json!(1), json!(false), checks(true), json!(2)]),
    ] {
        let described = ok(&plane, "bdev_get_bdevs", json!({ "name": name }));
        let keys = [
            "block_size",
            "md_size",
            "md_interleave",
            "dif_type",
            "dif_is_head_of_md",
            "enabled_dif_check_types",
            "dif_pi_format",
        ];
        assert_eq!(keys.map(|key| described[0][key].clone()), expected, "{name}");
    }
}

#[test]
fn a_saved_configuration_recreates_the_same_bdevs() {
    let before = plane();
    ok(&before, "bdev_malloc_create", json!({ "num_blocks": 64, "block_size": 4096 }));
    let base = json!({ "name": "Base", "num_blocks": 64, "block_size": 512, "md_size": 0 });
    ok(&before, "bdev_null_create", base);
    let wide = json!({ "name": "Wide", "num_blocks": 64, "block_size": 512, "md_size": 16, "dif_type": 1,
        "dif_pi_format": 2 });
    ok(&before, "bdev_null_create", wide);
    ok(&before, "bdev_error_create", json!({ "base_name": "Base" }));
    let delay = json!({ "name": "Slow", "base_bdev_name": "EE_Base", "avg_read_latency": 1,
        "p99_read_latency": 2, "avg_write_latency": 3, "p99_write_latency": 4 });
    ok(&before, "bdev_delay_create", delay);
    let faster = json!({ "delay_bdev_name": "Slow", "latency_type": "p99_write", "latency_us": 9 });
    ok(&before, "bdev_delay_update_latency", faster);
    ok(&before, "bdev_null_create", json!({ "name": "Gone", "num_blocks": 64, "block_size": 512 }));
    ok(&before, "bdev_null_delete", json!({ "name": "Gone" }));

    let saved = before.save();
    let after = plane();
    ConfigFile::parse("saved", saved.to_string().as_bytes(), after.catalog()).unwrap().apply(&after).unwrap();
    assert_eq!(after.save(), saved);
    let bdevs = |plane: &ControlPlane| ok(plane, "bdev_get_bdevs", Value::Null);
    assert_eq!(bdevs(&after), bdevs(&before));
    assert_eq!(saved["subsystems"][0]["config"][4]["params"]["p99_write_latency"], 9);
}

#[test]
fn wait_for_rpc_defers_the_configuration_until_framework_start_init() {
    let text = json!({ "subsystems": [{ "subsystem": "bdev", "config": [
        { "method": "bdev_null_create", "params": { "name": "N", "num_blocks": 8, "block_size": 512 } }] }] });
    let pending =
        ConfigFile::parse("later", text.to_string().as_bytes(), &Catalog::new().with::<BdevModule>())
            .unwrap();
    let plane = start(Some(pending));
    assert_eq!(code(&plane, "bdev_get_bdevs", Value::Null), -1);
    let names = ok(&plane, "rpc_get_methods", json!({ "current": true }));
    assert!(names.as_array().unwrap().contains(&json!("framework_start_init")));
    assert!(!names.as_array().unwrap().contains(&json!("bdev_get_bdevs")));
    ok(&plane, "framework_start_init", Value::Null);
    ok(&plane, "framework_wait_init", Value::Null);
    assert_eq!(ok(&plane, "bdev_get_bdevs", json!({ "name": "N" }))[0]["num_blocks"], 8);
}

#[test]
fn bdev_get_bdevs_has_spdks_fields() {
    let plane = plane();
    let uuid = "913fc008-79a7-447f-b2c4-c73543638c31";
    ok(
        &plane,
        "bdev_malloc_create",
        json!({ "name": "M", "num_blocks": 64, "block_size": 512, "uuid": uuid }),
    );
    let described = &ok(&plane, "bdev_get_bdevs", json!({ "name": uuid }))[0];
    assert_eq!(described["product_name"], "Malloc disk");
    assert_eq!((&described["num_blocks"], &described["block_size"]), (&json!(64), &json!(512)));
    assert_eq!((&described["claimed"], &described["zoned"]), (&json!(false), &json!(false)));
    let types = &described["supported_io_types"];
    let all = [
        ("read", true),
        ("reset", true),
        ("compare", true),
        ("copy", true),
        ("abort", true),
        ("zcopy", false),
    ];
    for (name, expected) in all {
        assert_eq!(types[name], expected, "{name}");
    }
    let fields = [
        "aliases",
        "numa_id",
        "preferred_write_alignment",
        "optimal_write_size",
        "preferred_unmap_granularity",
    ];
    assert!(fields.into_iter().all(|name| !described[name].is_null()), "{described}");
    assert_eq!(described["aliases"], json!([uuid]));
    let counts = ok(&plane, "bdev_get_iostat", json!({ "names": ["M"] }));
    assert_eq!(counts["bdevs"][0]["num_read_ops"], 0);
    assert_eq!(counts["bdevs"][0]["name"], "M");
    ok(&plane, "bdev_enable_histogram", json!({ "name": "M", "enable": true, "opc": "read" }));
    let histogram = ok(&plane, "bdev_get_histogram", json!({ "name": "M" }));
    assert_eq!((&histogram["granularity"], histogram["histogram"].is_string()), (&json!(7), true));
}

#[test]
fn claims_are_shown_as_spdk_shows_them() {
    let builder = ControlPlane::builder(Vec::new());
    let registry = Registry::new();
    let plane = builder.module(&BdevModule::new(registry.clone(), Arc::default())).start(None).unwrap();
    null(&plane, "N");
    for (access, expected) in [
        (Access::ReadWrite, [json!(false), Value::Null, Value::Null]),
        (Access::Exclusive { by: "x" }, [json!(true), json!("exclusive_write"), json!("x")]),
        (Access::ReadManyWriteOne { by: "x" }, [json!(true), json!("read_many_write_one"), json!("x")]),
        (Access::ReadManyWriteNone { by: "x" }, [json!(true), json!("read_many_write_none"), json!("x")]),
        (
            Access::ReadManyWriteShared { by: "x", key: 1 },
            [json!(true), json!("read_many_write_shared"), json!("x")],
        ),
    ] {
        let _open = registry.open("N", access).unwrap();
        let shown = ok(&plane, "bdev_get_bdevs", json!({ "name": "N" }));
        assert_eq!(["claimed", "claim_type", "claimed_by"].map(|key| shown[0][key].clone()), expected);
    }
}

/// Creates a null bdev on each device that appears, as a module of partitions would.
struct Partitions {
    registry: Registry,
    examined: AtomicUsize,
}

impl Module for Partitions {
    const NAME: &'static str = "partitions";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<Partitions>> {
        Vec::new()
    }

    fn examine_config(&self, bdev: &str) {
        self.examined.fetch_add(1, Ordering::Relaxed);
        if !bdev.ends_with("p1") {
            let config = crate::null::NullConfig::new(&format!("{bdev}p1"), 8, 512);
            crate::null::create(&self.registry, config).unwrap();
        }
    }
}

#[test]
fn every_device_that_appears_is_examined_before_the_wait_ends() {
    let builder = ControlPlane::builder(Vec::new());
    let registry = Registry::new();
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let partitions = Arc::new(Partitions { registry: registry.clone(), examined: AtomicUsize::new(0) });
    let plane = builder.module(&bdevs).module(&partitions).start(None).unwrap();
    for index in 0..10 {
        let create = json!({ "name": format!("N{index}"), "num_blocks": 8, "block_size": 512 });
        ok(&plane, "bdev_null_create", create);
    }
    // Devices that appear because of an examination are waited for too.
    ok(&plane, "bdev_wait_for_examine", Value::Null);
    assert_eq!((registry.list().len(), partitions.examined.load(Ordering::Relaxed)), (20, 20));
    assert_eq!(ok(&plane, "framework_get_modules", Value::Null)[0]["report"]["bdevs"], 20);
    plane.stop();
    assert_eq!(registry.list().len(), 10, "those of methods are removed");
}

fn names(plane: &ControlPlane) -> Vec<String> {
    let bdevs = ok(plane, "bdev_get_bdevs", Value::Null);
    bdevs.as_array().unwrap().iter().map(|bdev| bdev["name"].as_str().unwrap().to_string()).collect()
}

fn null(plane: &ControlPlane, name: &str) {
    ok(plane, "bdev_null_create", json!({ "name": name, "num_blocks": 4096, "block_size": 512 }));
}

#[test]
fn virtual_bdevs_are_created_when_their_base_appears() {
    let plane = plane();
    let delay = json!({ "name": "D", "base_bdev_name": "EE_N", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1 });
    assert_eq!(ok(&plane, "bdev_delay_create", delay.clone()), json!("D"));
    assert_eq!(code(&plane, "bdev_delay_create", delay), -17, "a name is pending once");
    assert_eq!(ok(&plane, "bdev_error_create", json!({ "base_name": "N" })), json!(true));
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "D" }));
    let split = json!({ "base_bdev": "P", "split_count": 2 });
    assert_eq!(ok(&plane, "bdev_split_create", split), json!(["Pp0", "Pp1"]));
    assert_eq!(names(&plane), [""; 0]);
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved.as_array().unwrap().len(), 4, "pending bdevs are saved: {saved}");

    null(&plane, "N");
    ok(&plane, "bdev_wait_for_examine", Value::Null);
    assert_eq!(names(&plane), ["D", "EE_N", "N", "P", "Pp0", "Pp1"]);
    let part = ok(&plane, "bdev_get_bdevs", json!({ "name": "Pp1" }));
    assert_eq!(part[0]["num_blocks"], json!(2048));
    assert_eq!(part[0]["driver_specific"]["split"], json!({ "base_bdev": "P", "offset_blocks": 2048 }));

    ok(&plane, "bdev_split_delete", json!({ "base_bdev": "P" }));
    ok(&plane, "bdev_passthru_delete", json!({ "name": "P" }));
    assert_eq!(names(&plane), ["D", "EE_N", "N"]);
}

/// The stack on `N`, as it is reported: names and UUIDs.
fn uuids(plane: &ControlPlane) -> Vec<(String, String)> {
    let bdevs = ok(plane, "bdev_get_bdevs", Value::Null);
    let text = |bdev: &Value, name: &str| bdev[name].as_str().unwrap().to_string();
    bdevs.as_array().unwrap().iter().map(|bdev| (text(bdev, "name"), text(bdev, "uuid"))).collect()
}

#[test]
fn virtual_bdevs_return_with_their_base() {
    let plane = plane();
    let base = "7a1c5d04-0d2b-4c1e-9a3f-0b2f4d6e8c10";
    let create_base = |uuid: &str| {
        ok(
            &plane,
            "bdev_null_create",
            json!({ "name": "N", "num_blocks": 4096, "block_size": 512, "uuid": uuid }),
        );
        ok(&plane, "bdev_wait_for_examine", Value::Null);
    };
    create_base(base);
    ok(&plane, "bdev_error_create", json!({ "base_name": "N" }));
    let delay = json!({ "name": "D", "base_bdev_name": "EE_N", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1 });
    ok(&plane, "bdev_delay_create", delay);
    let changed = json!({ "delay_bdev_name": "D", "latency_type": "p99_read", "latency_us": 77 });
    ok(&plane, "bdev_delay_update_latency", changed);
    let given = "0f0f0f0f-0f0f-4f0f-8f0f-0f0f0f0f0f0f";
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "D", "uuid": given }));
    ok(&plane, "bdev_split_create", json!({ "base_bdev": "P", "split_count": 2 }));
    let (before, saved) = (uuids(&plane), ok(&plane, "framework_get_config", json!({ "name": "bdev" })));
    for _ in 0..3 {
        ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
        ok(&plane, "bdev_wait_for_examine", Value::Null);
        assert_eq!(names(&plane), [""; 0]);
        let pending = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
        assert_eq!(
            pending.as_array().unwrap()[..],
            saved.as_array().unwrap()[1..],
            "all but the base are saved"
        );
        create_base(base);
        assert_eq!(uuids(&plane), before);
    }
    let now = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(now, saved, "what was changed after the creation included");

    // Another device of that name: whose UUID depends on the base's has another one.
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    create_base("7a1c5d04-0d2b-4c1e-9a3f-0b2f4d6e8c11");
    let (now, of) = (uuids(&plane), |all: &[(String, String)], name: &str| {
        all.iter().find(|(other, _)| other == name).unwrap().1.clone()
    });
    assert_eq!(of(&now, "P"), given);
    for name in ["EE_N", "D"] {
        assert_ne!(of(&now, name), of(&before, name), "{name}");
    }

    // What is deleted while its base is away does not return, and neither does what a split had.
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    assert_eq!(ok(&plane, "bdev_split_delete", json!({ "base_bdev": "P" })), json!(true));
    assert_eq!(ok(&plane, "bdev_passthru_delete", json!({ "name": "P" })), json!(true));
    create_base(base);
    assert_eq!(names(&plane), ["D", "EE_N", "N"]);
    // Nor does what is deleted while it is there.
    ok(&plane, "bdev_delay_delete", json!({ "name": "D" }));
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    create_base(base);
    assert_eq!(names(&plane), ["EE_N", "N"]);
    assert_eq!(ok(&plane, "framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().len(), 2);
}

/// A split whose parts do not fit the base that returned stays configured.
#[test]
fn a_virtual_bdev_that_cannot_return_stays_pending() {
    let plane = plane();
    let null = |blocks: u32| {
        ok(&plane, "bdev_null_create", json!({ "name": "N", "num_blocks": blocks, "block_size": 512 }));
        ok(&plane, "bdev_wait_for_examine", Value::Null);
    };
    null(8192);
    ok(&plane, "bdev_split_create", json!({ "base_bdev": "N", "split_count": 2, "split_size_mb": 2 }));
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    null(4096);
    assert_eq!(names(&plane), ["N"]);
    assert_eq!(ok(&plane, "framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().len(), 2);
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    null(8192);
    assert_eq!(names(&plane), ["N", "Np0", "Np1"]);
}

/// The call of the base is recorded after the base can be found, in the same update.
#[test]
fn saved_calls_of_virtual_bdevs_follow_that_of_their_base() {
    for _ in 0..50 {
        let plane = plane();
        ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "EE_N" }));
        ok(&plane, "bdev_error_create", json!({ "base_name": "N" }));
        null(&plane, "N");
        ok(&plane, "bdev_wait_for_examine", Value::Null);
        let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
        let calls = saved.as_array().unwrap().iter();
        let methods: Vec<&str> = calls.map(|call| call["method"].as_str().unwrap()).collect();
        assert_eq!(methods, ["bdev_null_create", "bdev_error_create", "bdev_passthru_create"]);
    }
}

#[test]
fn a_pending_virtual_bdev_can_be_deleted_and_a_failed_one_is_forgotten() {
    let plane = plane();
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "N" }));
    ok(&plane, "bdev_passthru_delete", json!({ "name": "P" }));
    assert_eq!(code(&plane, "bdev_passthru_delete", json!({ "name": "P" })), -19);
    // Two that claim the same base: the second, by name, cannot be created.
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "N" }));
    ok(&plane, "bdev_passthru_create", json!({ "name": "Q", "base_bdev_name": "N" }));
    null(&plane, "N");
    ok(&plane, "bdev_wait_for_examine", Value::Null);
    assert_eq!(names(&plane), ["N", "P"]);
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved.as_array().unwrap().len(), 2, "{saved}");
}

#[test]
fn without_auto_examination_a_method_examines() {
    let plane = plane();
    ok(&plane, "bdev_set_options", json!({ "bdev_auto_examine": false, "bdev_io_pool_size": 65535 }));
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "N" }));
    null(&plane, "N");
    ok(&plane, "bdev_wait_for_examine", Value::Null);
    assert_eq!(names(&plane), ["N"]);
    ok(&plane, "bdev_examine", json!({ "name": "N" }));
    assert_eq!(names(&plane), ["N", "P"]);
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    let option = json!({ "method": "bdev_set_options", "params": { "bdev_auto_examine": false } });
    assert_eq!(saved[0], option);
    ok(&plane, "bdev_set_options", json!({ "bdev_auto_examine": true }));
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved.as_array().unwrap().len(), 2, "{saved}");
}

/// The UUIDs are those of `spdk_tgt` 26.09-pre with the same devices.
#[test]
fn virtual_bdevs_have_the_uuids_that_they_have_in_spdk() {
    let plane = plane();
    let malloc = |name: &str, uuid: &str| {
        let params = json!({ "name": name, "num_blocks": 8192, "block_size": 512, "uuid": uuid });
        ok(&plane, "bdev_malloc_create", params);
    };
    let uuid = |name: &str| ok(&plane, "bdev_get_bdevs", json!({ "name": name }))[0]["uuid"].clone();
    malloc("SB", "11111111-1111-1111-1111-111111111119");
    ok(&plane, "bdev_split_create", json!({ "base_bdev": "SB", "split_count": 3, "split_size_mb": 1 }));
    let parts = [
        "a1cb24eb-ea94-5e42-b2e5-f862aa19da74",
        "2593d8bf-7e5f-531d-b356-43c1c402fea9",
        "90381207-2734-560e-abd1-6ebae4d760f1",
    ];
    assert_eq!(["SBp0", "SBp1", "SBp2"].map(uuid), parts);
    malloc("A1", "026daef1-41d8-41be-b64e-1ab08bc3455a");
    ok(&plane, "bdev_passthru_create", json!({ "name": "P", "base_bdev_name": "A1" }));
    assert_eq!(uuid("P"), "b2983131-a3d0-55e0-8142-e626c23d5593");
    malloc("A3p0", "4ab70ead-e99e-52ed-9a52-5770e71f2ead");
    let delay = json!({ "name": "D", "base_bdev_name": "A3p0", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1 });
    ok(&plane, "bdev_delay_create", delay);
    assert_eq!(uuid("D"), "0ae4803f-1ede-5efd-ab51-26fd3c181706");
    let shown = ok(&plane, "bdev_get_bdevs", json!({ "name": "D" }));
    assert_eq!(
        (&shown[0]["driver_specific"]["delay"]["uuid"], &shown[0]["product_name"]),
        (&uuid("D"), &json!("delay"))
    );
}

#[test]
fn parts_stay_where_they_are_when_a_base_has_another_size_after_a_restart() {
    let base = |blocks: u64| {
        let uuid = "11111111-1111-1111-1111-111111111119";
        json!({ "name": "B", "num_blocks": blocks, "block_size": 512, "uuid": uuid })
    };
    let parts = |plane: &ControlPlane| {
        ["Bp0", "Bp1", "Bp2"].map(|name| {
            let part = ok(plane, "bdev_get_bdevs", json!({ "name": name }))[0].clone();
            let first = part["driver_specific"]["split"]["offset_blocks"].clone();
            (first, part["num_blocks"].clone(), part["uuid"].clone())
        })
    };
    let split = |plane: &ControlPlane| {
        let saved = ok(plane, "framework_get_config", json!({ "name": "bdev" }));
        let mut calls = saved.as_array().unwrap().iter();
        calls.find(|call| call["method"] == "bdev_split_create").unwrap()["params"].clone()
    };
    // In each order: the base may appear after the split was asked for.
    for base_first in [true, false] {
        let plane = plane();
        let evenly = json!({ "base_bdev": "B", "split_count": 3 });
        if base_first {
            ok(&plane, "bdev_malloc_create", base(10_000));
        }
        ok(&plane, "bdev_split_create", evenly);
        if !base_first {
            ok(&plane, "bdev_malloc_create", base(10_000));
        }
        ok(&plane, "bdev_wait_for_examine", Value::Null);
        let before = parts(&plane);
        assert_eq!(before[1].0, json!(3333));
        let saved = split(&plane);
        assert_eq!(saved["split_size_bytes"], json!(3333 * 512), "{saved}");
        for blocks in [10_000, 9_999, 20_000] {
            let restarted = start(None);
            ok(&restarted, "bdev_malloc_create", base(blocks));
            ok(&restarted, "bdev_split_create", saved.clone());
            assert_eq!(parts(&restarted), before, "{blocks} blocks");
            assert_eq!(split(&restarted), saved);
        }
        let smaller = start(None);
        ok(&smaller, "bdev_malloc_create", base(9_998));
        let refused = smaller.invoke("bdev_split_create", saved).unwrap_err();
        assert_eq!(
            (refused.code, refused.message.as_str()),
            (-22, "split_size_bytes: 3 parts of 1706496 bytes do not fit B, which has 5118976 bytes")
        );
    }
}

#[test]
fn a_null_bdev_is_resized_to_what_can_be_created() {
    let plane = plane();
    let null = json!({ "name": "N", "num_blocks": 8, "block_size": 512, "md_size": 8 });
    ok(&plane, "bdev_null_create", null);
    let blocks = || ok(&plane, "bdev_get_bdevs", json!({ "name": "N" }))[0]["num_blocks"].as_u64().unwrap();
    // No block, and 2^64 bytes or more.
    for new_size in [0, 1 << 44, u64::MAX, u64::MAX / 512] {
        assert_eq!(code(&plane, "bdev_null_resize", json!({ "name": "N", "new_size": new_size })), -22);
        assert_eq!(blocks(), 8);
    }
    let most = (1_u64 << 44) - 1;
    ok(&plane, "bdev_null_resize", json!({ "name": "N", "new_size": most }));
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }))[0]["params"].clone();
    assert_eq!(saved["num_blocks"], json!(blocks()));
    // What is saved can be created.
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    ok(&plane, "bdev_null_create", saved);
}

#[test]
fn histograms_are_saved_and_belong_to_one_device() {
    let plane = plane();
    let count = || ok(&plane, "framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().len();
    null(&plane, "N");
    let params = json!({ "name": "N", "enable": true, "opc": "read", "granularity": 5 });
    ok(&plane, "bdev_enable_histogram", params);
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!((saved.as_array().unwrap().len(), &saved[1]["method"]), (2, &json!("bdev_enable_histogram")));
    let before = ok(&plane, "bdev_get_histogram", json!({ "name": "N" }));
    ok(&plane, "bdev_enable_histogram", json!({ "name": "N", "enable": false }));
    assert_eq!(count(), 1);
    // What was saved enables the same histogram.
    ok(&plane, "bdev_enable_histogram", saved[1]["params"].clone());
    assert_eq!(ok(&plane, "bdev_get_histogram", json!({ "name": "N" })), before);
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    null(&plane, "N");
    assert_eq!((count(), code(&plane, "bdev_get_histogram", json!({ "name": "N" }))), (1, -14));
}

#[test]
fn rate_limits_are_reported_and_saved() {
    let plane = plane();
    null(&plane, "N");
    let rates = |plane: &ControlPlane| {
        ok(plane, "bdev_get_bdevs", json!({ "name": "N" }))[0]["assigned_rate_limits"].clone()
    };
    ok(&plane, "bdev_set_qos_limit", json!({ "name": "N", "rw_ios_per_sec": 20000 }));
    ok(&plane, "bdev_set_qos_limit", json!({ "name": "N", "w_mbytes_per_sec": 100 }));
    let expected = json!({ "rw_ios_per_sec": 20000, "rw_mbytes_per_sec": 0, "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 100 });
    assert_eq!(rates(&plane), expected);
    let saved = ok(&plane, "framework_get_config", json!({ "name": "bdev" }));
    assert_eq!(saved[1]["method"], "bdev_set_qos_limit");
    ok(&plane, "bdev_set_qos_limit", json!({ "name": "N", "rw_ios_per_sec": 0, "w_mbytes_per_sec": 0 }));
    assert_eq!(rates(&plane)["w_mbytes_per_sec"], 0);
    assert_eq!(ok(&plane, "framework_get_config", json!({ "name": "bdev" })).as_array().unwrap().len(), 1);
    // What was saved sets the limits again.
    ok(&plane, "bdev_set_qos_limit", saved[1]["params"].clone());
    assert_eq!(rates(&plane), expected);
}

#[test]
fn devices_in_memory_share_the_memory_of_the_machine() {
    let registry = Registry::new();
    registry.limit_memory(3 << 20);
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry, builder.examiner());
    let plane = builder.module(&bdevs).start(None).unwrap();
    let malloc = |name: &str, mib: u64| {
        let params = json!({ "name": name, "num_blocks": mib << 11, "block_size": 512 });
        plane.invoke("bdev_malloc_create", params).map_err(|error| (error.code, error.message))
    };
    malloc("A", 2).unwrap();
    let (code, message) = malloc("B", 2).unwrap_err();
    let expected = "B needs 2 MiB of memory, but 1 of 3 MiB are left for bdevs in memory";
    assert!(code == -12 && message.starts_with(expected), "{code}: {message}");
    // A device that cannot be registered returns its memory.
    assert_eq!(malloc("A", 1).unwrap_err().0, -17);
    malloc("B", 1).unwrap();
    // Null bdevs have none.
    null(&plane, "N");
    ok(&plane, "bdev_malloc_delete", json!({ "name": "A" }));
    malloc("C", 2).unwrap();
}

#[test]
fn notifications_number_what_came_and_went() {
    let plane = plane();
    null(&plane, "N");
    null(&plane, "O");
    ok(&plane, "bdev_null_delete", json!({ "name": "N" }));
    ok(&plane, "bdev_null_resize", json!({ "name": "O", "new_size": 8 }));
    let expected = json!([
        { "type": "bdev_register", "ctx": "O", "id": 1 },
        { "type": "bdev_unregister", "ctx": "N", "id": 2 },
        { "type": "bdev_resize", "ctx": "O", "id": 3 },
    ]);
    assert_eq!(ok(&plane, "notify_get_notifications", json!({ "id": 1, "max": 5 })), expected);
    assert_eq!(ok(&plane, "notify_get_notifications", json!({ "id": 4 })), json!([]));
    let types = ["bdev_register", "bdev_unregister", "bdev_resize", "bdev_file_deleted"];
    assert_eq!(ok(&plane, "notify_get_types", Value::Null), json!(types));
    // Only the last are kept, and keep their numbers.
    for _ in 0..600 {
        null(&plane, "P");
        ok(&plane, "bdev_null_delete", json!({ "name": "P" }));
    }
    let kept = ok(&plane, "notify_get_notifications", json!({}));
    let ids = |index: usize| kept[index]["id"].as_u64().unwrap();
    assert_eq!((kept.as_array().unwrap().len(), ids(0), ids(1023)), (1024, 180, 1203));
}

/// A file of 1 MiB in a directory of the test, which are removed at its end.
struct DiskFile(std::path::PathBuf);

impl DiskFile {
    fn new(name: &str) -> DiskFile {
        let path = std::env::temp_dir().join(format!("ringbolt-bdev-{}-{name}", std::process::id()));
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        DiskFile(path)
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn durability_and_write_cache_are_reported() {
    let plane = plane();
    null(&plane, "N");
    ok(&plane, "bdev_malloc_create", json!({ "name": "M", "num_blocks": 4096, "block_size": 512 }));
    ok(&plane, "bdev_split_create", json!({ "base_bdev": "M", "split_count": 2 }));
    ok(&plane, "bdev_wait_for_examine", Value::Null);
    let shown = |name: &str| {
        let described = ok(&plane, "bdev_get_bdevs", json!({ "name": name }));
        (described[0]["durability"].clone(), described[0]["write_cache"].clone())
    };
    assert_eq!(shown("N"), (json!("none"), json!(false)));
    assert_eq!(shown("Mp1"), (json!("memory"), json!(false)));
}

#[test]
fn a_deleted_file_is_reported_and_served_on() {
    let plane = plane();
    let [first, second] = ["first", "second"].map(DiskFile::new);
    for (name, file) in [("A", &first), ("B", &second)] {
        let params = json!({ "name": name, "filename": file.0, "block_size": 512 });
        match plane.invoke("bdev_uring_create", params) {
            Err(error) if error.code == -95 => return println!("SKIPPED: {error}"),
            created => created.unwrap(),
        };
    }
    let is_deleted = |name: &str| {
        let shown = ok(&plane, "bdev_get_bdevs", json!({ "name": name }));
        shown[0]["driver_specific"]["uring"]["file_deleted"].clone()
    };
    let notified = || {
        let all = ok(&plane, "notify_get_notifications", json!({}));
        let is_one = |one: &&Value| one["type"] == "bdev_file_deleted";
        all.as_array().unwrap().iter().filter(is_one).map(|one| one["ctx"].clone()).collect::<Vec<_>>()
    };
    // For at most a minute, so that a failure does not hang.
    let wait_for = |count: usize| {
        for _ in 0..60_000 {
            if notified().len() >= count {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        notified()
    };
    // Another name is as good; a change of the mode is no deletion.
    let moved = DiskFile(first.0.with_extension("moved"));
    std::fs::rename(&first.0, &moved.0).unwrap();
    std::fs::set_permissions(&moved.0, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    assert_eq!((is_deleted("A"), is_deleted("B")), (Value::Null, Value::Null));
    std::fs::remove_file(&second.0).unwrap();
    assert_eq!((is_deleted("A"), is_deleted("B")), (Value::Null, json!(true)));
    // The event of `A`, if there were one, would have come before.
    assert_eq!(wait_for(1), ["B"]);
    // Replaced by another file.
    let other = DiskFile::new("other");
    std::fs::rename(&other.0, &moved.0).unwrap();
    assert_eq!(wait_for(2), ["B", "A"]);
    // A bdev on the new file of this path has a watch of its own.
    ok(&plane, "bdev_uring_delete", json!({ "name": "A" }));
    ok(&plane, "bdev_uring_create", json!({ "name": "A", "filename": moved.0, "block_size": 512 }));
    assert_eq!(is_deleted("A"), Value::Null);
    std::fs::remove_file(&moved.0).unwrap();
    assert_eq!(wait_for(3), ["B", "A", "A"]);
    let types = ok(&plane, "notify_get_types", json!({}));
    assert!(types.as_array().unwrap().contains(&json!("bdev_file_deleted")), "{types}");
}

/// A reactor with a channel of the device `name`.
fn opened(plane: &ControlPlane, registry: &Registry, name: &str) -> (reactor::Reactor, crate::BdevChannel) {
    null(plane, "Base");
    let delay = json!({ "name": name, "base_bdev_name": "Base", "avg_read_latency": 2000, "p99_read_latency": 2000,
        "avg_write_latency": 2000, "p99_write_latency": 2000 });
    ok(plane, "bdev_delay_create", delay);
    // Nothing but this test polls the channel, so that the reactor must not sleep.
    let config = reactor::ReactorConfig { idle: reactor::IdlePolicy::Spin, ..Default::default() };
    let reactor = reactor::Reactor::new(&config).unwrap();
    let descriptor = registry.open(name, crate::Access::ReadWrite).unwrap();
    let channel = descriptor.channel(&reactor.core()).unwrap();
    (reactor, channel)
}

/// Submits `count` reads of a block and polls them to their end.
fn read_all(
    reactor: &mut reactor::Reactor,
    channel: &mut crate::BdevChannel,
    count: u64,
    mut in_flight: impl FnMut(),
) {
    use block_io::{Channel, Tag};
    let core = reactor.core();
    let read = |tag| {
        let buffer = core.pool().take(512).unwrap();
        let mut request = crate::Request::new(Tag(tag), block_io::Op::Read, tag, 1);
        request.set_data(Some(buffer));
        request
    };
    let (mut batch, mut done) = ((0..count).map(read).collect(), Vec::new());
    channel.submit(&mut batch);
    assert!(batch.is_empty());
    while done.len() < count as usize {
        in_flight();
        reactor.turn();
        channel.poll(&mut done);
    }
}

#[test]
fn queue_depths_are_sampled_and_latencies_counted_between_borders() {
    let builder = ControlPlane::builder(Vec::new());
    let registry = Registry::new();
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let plane = builder.module(&bdevs).start(None).unwrap();
    let (mut reactor, mut channel) = opened(&plane, &registry, "D");
    let stats = || ok(&plane, "bdev_get_iostat", json!({ "names": ["D"] }))["bdevs"][0].clone();
    read_all(&mut reactor, &mut channel, 3, || ());
    assert_eq!(stats()["queue_depth"], Value::Null, "not sampled yet");

    ok(&plane, "bdev_enable_histogram", json!({ "name": "D", "enable": true }));
    ok(&plane, "bdev_set_qd_sampling_period", json!({ "name": "D", "period": 100 }));
    let mut deepest = 0;
    // Until a sample was taken while they were in flight, however rarely this machine runs the sampler.
    while deepest == 0 {
        read_all(&mut reactor, &mut channel, 7, || {
            deepest = deepest.max(stats()["queue_depth"].as_u64().unwrap());
        });
    }
    assert!((2..=7).contains(&deepest), "{deepest}");
    let sampled = stats();
    let number = |name: &str| sampled[name].as_u64().unwrap();
    assert_eq!(number("queue_depth_polling_period"), 100);
    assert!(number("io_time") > 0 && number("weighted_io_time") > number("io_time"), "{sampled}");

    let borders = json!({ "name": "D", "borders": [1, 1500, 3_600_000_000u64] });
    let counted = ok(&plane, "bdev_get_histogram_borders", borders);
    let since_enabled = number("num_read_ops") - 3;
    assert_eq!(counted["borders_count"], json!([0, 0, since_enabled, 0]), "each took 2 ms or more");

    ok(&plane, "bdev_set_qd_sampling_period", json!({ "name": "D", "period": 0 }));
    assert_eq!(stats()["queue_depth"], Value::Null);
    ok(&plane, "bdev_reset_iostat", json!({ "name": "D", "mode": "maxmin" }));
    let reset = stats();
    assert_eq!(
        (&reset["max_read_latency_ticks"], &reset["num_read_ops"]),
        (&json!(0), &sampled["num_read_ops"])
    );
}

#[test]
fn the_trace_has_what_channels_did_while_its_points_were_enabled() {
    let registry = Registry::new();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(registry.clone(), builder.examiner());
    let plane = builder.module(&bdevs).start(None).unwrap();
    let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).unwrap();
    let core = reactor.core();
    let mut channels = Vec::new();
    let mut create = |name: &str| {
        ok(&plane, "bdev_null_create", json!({ "name": name, "num_blocks": 64, "block_size": 512 }));
        channels.push(registry.open(name, crate::Access::ReadWrite).unwrap().channel(&core).unwrap());
    };
    create("before");
    let off = ok(&plane, "trace_get_tpoint_group_mask", Value::Null);
    assert_eq!((&off["tpoint_group_mask"], &off["bdev"]["enabled"]), (&json!("0x0"), &json!(false)));
    assert_eq!((&off["bdev"]["mask"], &off["bdev"]["tpoint_mask"]), (&json!("0x8"), &json!("0x0")));
    ok(&plane, "trace_set_tpoint_mask", json!({ "name": "bdev", "tpoint_mask": 0xf }));
    ok(&plane, "trace_clear_tpoint_mask", json!({ "name": "bdev", "tpoint_mask": 8 }));
    let info = json!({ "tpoint_shm_path": "", "tpoint_group_mask": "0x8",
        "bdev": { "mask": "0x8", "tpoint_mask": "0x7" },
        "target": { "mask": "0x100000000", "tpoint_mask": "0x0" } });
    assert_eq!(ok(&plane, "trace_get_info", Value::Null), info);
    create("after");
    // Half of this batch is invalid; an invalid request is traced too.
    let batch = |tag| {
        [(tag, 8), (tag + 1, 65)]
            .map(|(tag, lba)| crate::Request::new(block_io::Tag(tag), block_io::Op::WriteZeroes, lba, 2))
    };
    for (tag, channel) in channels.iter_mut().enumerate() {
        use block_io::Channel;
        channel.submit(&mut batch(tag as u64 * 16).into());
        let mut done = Vec::new();
        while done.len() < 2 {
            channel.poll(&mut done);
        }
    }
    drop(channels);
    ok(&plane, "bdev_null_delete", json!({ "name": "before" }));
    ok(&plane, "trace_disable_tpoint_group", json!({ "name": "all" }));
    let events = ok(&plane, "trace_get_events", Value::Null)["events"].clone();
    let summary = |event: &Value| {
        ["tpoint", "bdev", "tag", "lba", "status"]
            .map(|key| event[key].as_str().map_or(event[key].to_string(), str::to_string))
            .join(" ")
    };
    let mut lines: Vec<String> = events.as_array().unwrap().iter().map(summary).collect();
    let ticks: Vec<u64> =
        events.as_array().unwrap().iter().map(|event| event["tsc"].as_u64().unwrap()).collect();
    assert!(ticks.is_sorted() && ticks[0] > 0, "{ticks:?}");
    lines.sort();
    let failed = "LBA Out of Range (00/80), do not retry";
    let success = "Successful Completion (00/00)";
    let expected = [
        "BDEV_IOCH_CREATE after null null null".to_string(),
        format!("BDEV_IO_DONE after 0x10 8 {success}"),
        format!("BDEV_IO_DONE after 0x11 65 {failed}"),
        format!("BDEV_IO_DONE null 0x0 8 {success}"),
        format!("BDEV_IO_DONE null 0x1 65 {failed}"),
        "BDEV_IO_START after 0x10 8 null".to_string(),
        "BDEV_IO_START after 0x11 65 null".to_string(),
        "BDEV_IO_START null 0x0 8 null".to_string(),
        "BDEV_IO_START null 0x1 65 null".to_string(),
    ];
    assert_eq!(lines, expected);
    assert_eq!(ok(&plane, "trace_get_events", json!({ "count": 3, "core": 0 }))["events"][2], events[8]);
    assert_eq!(ok(&plane, "trace_get_events", json!({ "core": 1 }))["events"], json!([]));
    assert_eq!(ok(&plane, "trace_clear", Value::Null), true);
    assert_eq!(ok(&plane, "trace_get_events", Value::Null)["events"], json!([]));
    assert_eq!(ok(&plane, "trace_enable_tpoint_group", json!({ "name": "bdev" })), true);
    let all = ok(&plane, "trace_get_info", Value::Null)["bdev"]["tpoint_mask"].clone();
    assert_eq!(all, "0xffffffffffffffff");
    ok(&plane, "trace_clear_tpoint_mask", json!({ "name": "bdev", "tpoint_mask": 2 }));
    let group = ok(&plane, "trace_get_tpoint_group_mask", Value::Null)["bdev"].clone();
    let point = json!({ "name": "BDEV_IO_DONE", "tpoint_id": 1, "enabled": false });
    assert_eq!((&group["tpoint_mask"], &group["tpoints"][1]), (&json!("0xfffffffffffffffd"), &point));
    assert_eq!((&group["enabled"], &group["tpoints"][0]["enabled"]), (&json!(true), &json!(true)));
    // The other group has a mask of its own.
    ok(&plane, "trace_clear", Value::Null);
    ok(&plane, "trace_set_tpoint_mask", json!({ "name": "target", "tpoint_mask": 1 }));
    ok(&plane, "trace_disable_tpoint_group", json!({ "name": "bdev" }));
    let masks = ok(&plane, "trace_get_tpoint_group_mask", Value::Null);
    assert_eq!(
        (&masks["tpoint_group_mask"], &masks["bdev"]["enabled"]),
        (&json!("0x100000000"), &json!(false))
    );
    let flow = registry.tenants().connect("nqn.host");
    registry.target_trace(2, "echo").record(crate::TracePoint::ConnectionAccept, &flow);
    let event = ok(&plane, "trace_get_events", json!({ "core": 2 }))["events"][0].clone();
    let expected = json!({ "tsc": event["tsc"], "core": 2, "tpoint": "TARGET_CONN_ACCEPT", "target": "echo",
        "flow": flow.id(), "tenant": "nqn.host", "tenant_id": flow.tenant().index() });
    assert_eq!(event, expected);
    drop(flow);
    assert_eq!(ok(&plane, "trace_get_events", Value::Null)["events"][0]["tenant"], Value::Null);
    for (method, params) in [
        ("trace_enable_tpoint_group", json!({ "name": "scsi" })),
        ("trace_set_tpoint_mask", json!({ "name": "all", "tpoint_mask": 1 })),
    ] {
        assert_eq!(code(&plane, method, params), -32602);
    }
}
