//! Signals of `ringbolt serve`: reload, state, and the orderly end.
#![allow(clippy::unwrap_used)]

mod rig;

use rig::{ServerProcess, scratch};
use serde_json::{Value, json};

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

fn null(name: &str, blocks: u64) -> Value {
    call("bdev_null_create", json!({ "name": name, "num_blocks": blocks, "block_size": 512 }))
}

const NQN: &str = "nqn.2025-01.io.ringbolt:reload";

fn subsystem(namespaces: &[&str]) -> Vec<Value> {
    let listener = json!({ "nqn": NQN, "listen_address":
        { "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0" } });
    let mut calls = vec![
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call("nvmf_create_subsystem", json!({ "nqn": NQN, "allow_any_host": true })),
    ];
    for name in namespaces {
        let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": name } });
        calls.push(call("nvmf_subsystem_add_ns", namespace));
    }
    calls.push(call("nvmf_subsystem_add_listener", listener));
    calls
}

fn config(bdevs: &[Value], nvmf: &[Value]) -> Value {
    json!({ "subsystems": [{ "subsystem": "bdev", "config": bdevs }, { "subsystem": "nvmf", "config": nvmf }] })
}

#[test]
fn hup_applies_the_difference_and_keeps_serving() {
    let directory = scratch("reload");
    let first = config(&[null("A", 8), null("B", 8), null("C", 8)], &subsystem(&["A", "B"]));
    let mut server = ServerProcess::configured(&directory, "reload", &first);
    let file = directory.join("reload.json");
    let reload = |server: &mut ServerProcess, text: &str| {
        std::fs::write(&file, text).unwrap();
        server.signal("SIGHUP", "reload: done")
    };
    let names = |server: &ServerProcess| {
        let bdevs = server.ok(&["bdev_get_bdevs"]);
        bdevs.as_array().unwrap().iter().map(|bdev| bdev["name"].clone()).collect::<Value>()
    };
    assert_eq!(reload(&mut server, &first.to_string()), ["reload: nothing has changed", "reload: done"]);

    // What was made by JSON-RPC stays; C has another size and is refused.
    server.ok(&["bdev_null_create", "name=R", "num_blocks=8", "block_size=512"]);
    let second = config(&[null("A", 8), null("C", 16), null("D", 8)], &subsystem(&["A", "D"]));
    let lines = reload(&mut server, &second.to_string());
    let begins = [
        "reload: removed: nvmf_subsystem_add_ns ",
        "reload: refused: bdev_null_create name=C num_blocks=8 block_size=512: it exists with other parameters",
        "reload: removed: bdev_null_create name=B",
        "reload: applied: bdev_null_create name=D",
        "reload: applied: nvmf_subsystem_add_ns ",
        "reload: done",
    ];
    assert_eq!(lines.len(), begins.len(), "{lines:#?}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(line.starts_with(begin), "{line}, expected {begin}");
    }
    assert_eq!(names(&server), json!(["A", "C", "D", "R"]));
    let described = server.ok(&["nvmf_get_subsystems", &format!("nqn={NQN}")]);
    let namespaces = described[0]["namespaces"].as_array().unwrap();
    let shown: Vec<&Value> = namespaces.iter().map(|namespace| &namespace["bdev_name"]).collect();
    assert_eq!(shown, [&json!("A"), &json!("D")]);
    assert_eq!(described[0]["listen_addresses"].as_array().unwrap().len(), 1);

    // A file that cannot be used changes nothing, and says where.
    let wrong = second.to_string().replacen("\"name\":\"D\"", "\"name\":\"D\",\"name\":\"E\"", 1);
    let lines = reload(&mut server, &wrong);
    assert!(lines[0].starts_with("reload: nothing is changed: "), "{lines:?}");
    assert!(
        lines[0].contains(": line 1 column ") && lines[0].contains("the key `name` stands twice"),
        "{lines:?}"
    );
    assert_eq!(names(&server), json!(["A", "C", "D", "R"]));
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn usr1_prints_state_and_quit_ends_in_order() {
    let directory = scratch("signals");
    let mut server = ServerProcess::configured(&directory, "signals", &config(&[null("A", 8)], &[]));
    let lines = server.signal("SIGUSR1", "state: {\"tick_rate\"");
    assert!(lines.iter().any(|line| line.contains("\"bdevs\":1")), "{lines:?}");
    for name in ["SIGINT", "SIGQUIT"] {
        let lines = server.signal(name, name);
        assert_eq!(lines.last().unwrap(), &format!("{name}: completing I/O in flight"));
        assert_eq!(server.wait(), Some(0), "{name}");
        server = ServerProcess::start(&directory, name, &[]);
    }
    std::fs::remove_dir_all(directory).unwrap();
}
