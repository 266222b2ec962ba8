//! Tests of the subsystems that have options and no counterpart here.

use bdev::Registry;
use control::ConfigFile;

use control::json::{Value, json};

use super::{App, OPTIONS_OF_PROCESS, StartOptions, catalog};

fn app() -> App {
    App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap()
}

fn config(app: &App, subsystem: &str) -> Value {
    app.control.invoke("framework_get_config", json!({ "name": subsystem })).unwrap()
}

#[test]
fn defaults_are_those_that_spdk_saves() {
    let text = include_str!("../../tests/data/spdk_26_09_save_config.json");
    let spdk: Value = control::json::from_str(text).unwrap();
    let app = app();
    for name in ["accel", "fsdev", "iobuf", "scheduler"] {
        let sections = spdk["subsystems"].as_array().unwrap();
        let section = sections.iter().find(|section| section["subsystem"] == name).unwrap();
        assert_eq!(config(&app, name), section["config"], "{name}");
    }
}

#[test]
fn what_is_set_is_saved_and_loads_again() {
    let _turn = sync::lock(&OPTIONS_OF_PROCESS);
    let first = app();
    for (method, params) in [
        ("accel_set_options", json!({ "task_count": 4096 })),
        ("fsdev_set_opts", json!({ "fsdev_io_cache_size": 64 })),
        ("iobuf_set_options", json!({ "small_pool_count": 65_536, "enable_numa": true })),
        ("framework_set_scheduler", json!({ "name": "static", "period": 500 })),
    ] {
        first.control.invoke(method, params).unwrap();
    }
    let saved = first.control.invoke("save_config", Value::Null).unwrap();
    let second = app();
    let file = ConfigFile::parse("saved", saved.to_string().as_bytes(), &catalog()).unwrap();
    file.apply(&second.control).unwrap();
    for (name, option, value) in [
        ("accel", "task_count", 4096),
        ("fsdev", "fsdev_io_cache_size", 64),
        ("iobuf", "small_pool_count", 65_536),
        ("scheduler", "period", 500),
    ] {
        assert_eq!(config(&second, name)[0]["params"][option], value, "{name}");
    }
    assert_eq!(second.control.invoke("save_config", Value::Null).unwrap(), saved);
    // An option that a call leaves out has its default again.
    second.control.invoke("accel_set_options", json!({ "buf_count": 1 })).unwrap();
    assert_eq!(config(&second, "accel")[0]["params"]["task_count"], 2048);
}
