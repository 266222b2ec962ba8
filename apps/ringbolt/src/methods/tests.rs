//! Methods as callers see them, without a socket between.

use serde_json::json;

use super::*;
use crate::config::{self, Config};

pub(crate) fn app() -> std::sync::Arc<App> {
    App::new(::bdev::Registry::new(), Vec::new(), None)
}

fn ok(app: &App, method: &str, params: Value) -> Value {
    app.invoke(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
}

fn code(app: &App, method: &str, params: Value) -> i64 {
    app.invoke(method, params).expect_err(method).code
}

#[test]
fn errors_have_spdks_codes() {
    let app = app();
    let malloc = json!({ "name": "M", "num_blocks": 64, "block_size": 512 });
    ok(&app, "bdev_malloc_create", malloc.clone());
    let cases = [
        ("bdev_malloc_create", malloc, -17),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 64, "block_size": 100 }), -22),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 64 }), -32602),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": "64", "block_size": 512 }), -32602),
        ("bdev_malloc_create", json!({ "name": "N", "num_blocks": 8, "block_size": 512, "x": 1 }), -32602),
        ("bdev_malloc_create", json!({ "num_blocks": 8, "block_size": 512, "md_size": 8 }), -32602),
        ("bdev_malloc_create", json!([1]), -32602),
        ("bdev_malloc_delete", json!({ "name": "Z" }), -19),
        ("bdev_null_delete", json!({ "name": "M" }), -19),
        ("bdev_get_bdevs", json!({ "name": "Z" }), -19),
        ("bdev_get_iostat", json!({ "names": ["Z"] }), -19),
        ("bdev_get_iostat", json!({ "per_channel": true }), -22),
        ("bdev_get_histogram", json!({ "name": "M" }), -14),
        ("bdev_uring_create", json!({ "name": "U", "filename": "/nonexistent" }), -2),
        ("bdev_aio_create", json!({}), -32601),
        ("frobnicate", json!({}), -32601),
        ("framework_start_init", json!({}), -1),
    ];
    for (method, params, expected) in cases {
        assert_eq!(code(&app, method, params.clone()), expected, "{method} {params}");
    }
}

#[test]
fn what_is_missing_is_told_from_what_never_was() {
    assert!(not_found("bdev_aio_create").message.contains("is SPDK's"));
    assert_eq!(not_found("bdev_aio_creat").message, "no method is called bdev_aio_creat");
    for name in table().names(None) {
        let named = ["save_config", "load_config", "nvmf_vfio_user_inject"];
        let ours = named.contains(&name) || name.starts_with("bdev_model_");
        assert!(SPDK_METHODS.lines().any(|known| known == name) || ours, "{name}");
    }
}

#[test]
fn a_saved_configuration_makes_the_same_devices() {
    let app_before = app();
    ok(&app_before, "bdev_malloc_create", json!({ "num_blocks": 64, "block_size": 4096 }));
    let base = json!({ "name": "Base", "num_blocks": 64, "block_size": 512, "md_size": 0 });
    ok(&app_before, "bdev_null_create", base);
    ok(&app_before, "bdev_error_create", json!({ "base_name": "Base" }));
    let delay = json!({ "name": "Slow", "base_bdev_name": "EE_Base", "avg_read_latency": 1,
        "p99_read_latency": 2, "avg_write_latency": 3, "p99_write_latency": 4 });
    ok(&app_before, "bdev_delay_create", delay);
    let faster = json!({ "delay_bdev_name": "Slow", "latency_type": "p99_write", "latency_us": 9 });
    ok(&app_before, "bdev_delay_update_latency", faster);
    ok(&app_before, "bdev_null_create", json!({ "name": "Gone", "num_blocks": 64, "block_size": 512 }));
    ok(&app_before, "bdev_null_delete", json!({ "name": "Gone" }));

    let saved = config::save(&app_before);
    let app_after = app();
    Config::parse("saved", saved.to_string().as_bytes()).unwrap().apply(&app_after).unwrap();
    assert_eq!(config::save(&app_after), saved);
    let bdevs = |app: &App| ok(app, "bdev_get_bdevs", Value::Null);
    assert_eq!(bdevs(&app_after), bdevs(&app_before));
    assert_eq!(saved["subsystems"][0]["config"][3]["params"]["p99_write_latency"], 9);
}

#[test]
fn options_of_what_is_not_there_are_accepted() {
    let app = app();
    let options = json!({ "bdev_io_pool_size": 65535, "bdev_io_cache_size": 256, "whatever": true });
    assert_eq!(ok(&app, "bdev_set_options", options), json!(true));
    assert_eq!(ok(&app, "bdev_wait_for_examine", Value::Null), json!(true));
}

#[test]
fn start_up_waits_until_it_is_told_to_go_on() {
    let text = json!({ "subsystems": [{ "subsystem": "bdev", "config": [
        { "method": "bdev_null_create", "params": { "name": "N", "num_blocks": 8, "block_size": 512 } }] }] });
    let pending = Config::parse("later", text.to_string().as_bytes()).unwrap();
    let app = App::new(::bdev::Registry::new(), Vec::new(), Some(pending));
    assert_eq!(code(&app, "bdev_get_bdevs", Value::Null), -1);
    let names = ok(&app, "rpc_get_methods", json!({ "current": true }));
    assert!(names.as_array().unwrap().contains(&json!("framework_start_init")));
    assert!(!names.as_array().unwrap().contains(&json!("bdev_get_bdevs")));
    ok(&app, "framework_start_init", Value::Null);
    ok(&app, "framework_wait_init", Value::Null);
    assert_eq!(ok(&app, "bdev_get_bdevs", json!({ "name": "N" }))[0]["num_blocks"], 8);
}

#[test]
fn a_device_describes_itself_as_in_spdk() {
    let app = app();
    let uuid = "913fc008-79a7-447f-b2c4-c73543638c31";
    ok(&app, "bdev_malloc_create", json!({ "name": "M", "num_blocks": 64, "block_size": 512, "uuid": uuid }));
    let described = &ok(&app, "bdev_get_bdevs", json!({ "name": uuid }))[0];
    assert_eq!(described["product_name"], "Malloc disk");
    assert_eq!((&described["num_blocks"], &described["block_size"]), (&json!(64), &json!(512)));
    assert_eq!((&described["claimed"], &described["zoned"]), (&json!(false), &json!(false)));
    let types = &described["supported_io_types"];
    for (name, expected) in [("read", true), ("write_zeroes", true), ("reset", true), ("compare", false)] {
        assert_eq!(types[name], expected, "{name}");
    }
    let counts = ok(&app, "bdev_get_iostat", json!({ "names": ["M"] }));
    assert_eq!(counts["bdevs"][0]["num_read_ops"], 0);
    assert_eq!(counts["bdevs"][0]["name"], "M");
    ok(&app, "bdev_enable_histogram", json!({ "name": "M", "enable": true, "opc": "read" }));
    let histogram = ok(&app, "bdev_get_histogram", json!({ "name": "M" }));
    assert_eq!((&histogram["granularity"], histogram["histogram"].is_string()), (&json!(7), true));
}
