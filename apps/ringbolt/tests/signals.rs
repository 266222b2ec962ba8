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

/// A SCSI host that starts when its targets are there, with settings that have no reverse.
#[test]
fn hup_removes_and_adds_scsi_hosts_of_virtual_machines() {
    let directory = scratch("reload-vhost");
    let socket = directory.join("scsi.sock");
    let scsi = |targets: &[&str]| {
        let mut calls = vec![call("vhost_create_scsi_controller", json!({ "ctrlr": socket, "delay": true }))];
        let coalescing = json!({ "ctrlr": socket, "delay_base_us": 10, "iops_threshold": 60000 });
        calls.push(call("vhost_controller_set_coalescing", coalescing));
        calls.extend(targets.iter().map(|bdev| {
            let target = json!({ "ctrlr": socket, "scsi_target_num": -1, "bdev_name": bdev });
            call("vhost_scsi_controller_add_target", target)
        }));
        calls.push(call("vhost_start_scsi_controller", json!({ "ctrlr": socket })));
        calls
    };
    let bdevs = [null("A", 8), null("B", 8)];
    let config = |calls: &[Value]| {
        json!({ "subsystems": [
            { "subsystem": "bdev", "config": bdevs },
            { "subsystem": "vhost_scsi", "config": calls },
        ] })
    };
    let first = config(&scsi(&["A", "B"]));
    let mut server = ServerProcess::configured(&directory, "reload-vhost", &first);
    let file = directory.join("reload-vhost.json");
    let reload = |server: &mut ServerProcess, config: &Value| {
        std::fs::write(&file, config.to_string()).unwrap();
        let lines = server.signal("SIGHUP", "reload: done");
        let refused: Vec<&String> = lines.iter().filter(|line| line.contains("refused")).collect();
        assert!(refused.is_empty(), "{refused:#?}");
    };
    let targets = |server: &ServerProcess| {
        let controllers = server.ok(&["vhost_get_controllers"]);
        let scsi = controllers[0]["backend_specific"]["scsi"].as_array().cloned().unwrap_or_default();
        let delay = controllers[0]["delay_base_us"].clone();
        (delay, scsi.iter().map(|one| one["luns"][0]["bdev_name"].clone()).collect::<Value>())
    };
    assert_eq!(targets(&server), (json!(10), json!(["A", "B"])));
    reload(&mut server, &config(&scsi(&["B"])));
    assert_eq!(
        targets(&server),
        (json!(10), json!(["B"])),
        "the target of A, whose number was assigned, is removed"
    );
    reload(&mut server, &config(&[]));
    assert_eq!(server.ok(&["vhost_get_controllers"]), json!([]));
    assert!(!socket.exists());
    reload(&mut server, &first);
    assert_eq!(targets(&server), (json!(10), json!(["A", "B"])));
    assert!(std::os::unix::net::UnixStream::connect(&socket).is_ok(), "it was started");
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
