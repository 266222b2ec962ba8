//! Signals of `ringbolt serve`: reload, state, and the orderly end.
#![allow(clippy::unwrap_used)]

mod rig;

use std::process::{Child, Command, Stdio};

use rig::{ServerProcess, scratch, text};
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
fn hup_with_a_fifo_in_the_place_of_the_file_changes_nothing_and_the_next_one_is_applied() {
    let directory = scratch("reload-fifo");
    let first = config(&[null("A", 8)], &[]);
    let mut server = ServerProcess::configured(&directory, "reload-fifo", &first);
    let file = directory.join("reload-fifo.json");
    std::fs::remove_file(&file).unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let lines = server.signal("SIGHUP", "reload: done");
    assert!(lines[0].starts_with("reload: nothing is changed: ") && lines[0].ends_with("not a regular file"));
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, first.to_string()).unwrap();
    assert_eq!(server.signal("SIGHUP", "reload: done"), ["reload: nothing has changed", "reload: done"]);
    server.stop();
    std::fs::remove_dir_all(directory).unwrap();
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
        "reload: refused: bdev_null_create name=C num_blocks=16 block_size=512: it exists with other \
         parameters",
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

/// `ringbolt perf` against a namespace, ended on drop.
struct Load(Child);

impl Load {
    /// Starts, and returns once the bdev has completed reads of it.
    fn start(server: &ServerProcess, port: &str, nqn: &str, bdev: &str) -> Load {
        let reads =
            || server.ok(&["bdev_get_iostat", &format!("name={bdev}")])["bdevs"][0]["num_read_ops"].as_u64();
        let before = reads();
        let uri = format!("--filename=nvme+tcp://127.0.0.1:{port}/{nqn}?ns=1");
        let options =
            ["perf", &uri, "--rw=randread", "--bs=4k", "--iodepth=16", "--time_based", "--runtime=60s"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        let child = command.args(options).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let load = Load(child);
        while reads() <= before {
            std::thread::yield_now();
        }
        load
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn malloc(name: &str) -> Value {
    call("bdev_malloc_create", json!({ "name": name, "num_blocks": 8192, "block_size": 512 }))
}

/// A server whose file changes.
struct Reloaded {
    server: ServerProcess,
    file: std::path::PathBuf,
}

impl Reloaded {
    fn start(directory: &std::path::Path, name: &str, config: &Value) -> Reloaded {
        let server = ServerProcess::configured(directory, name, config);
        Reloaded { server, file: directory.join(format!("{name}.json")) }
    }

    fn reload(&mut self, config: &Value) -> Vec<String> {
        std::fs::write(&self.file, config.to_string()).unwrap();
        self.server.signal("SIGHUP", "reload: done")
    }
}

#[test]
fn hup_with_the_same_in_other_words_keeps_hosts_connected() {
    let directory = scratch("reload-same");
    let nvmf = |transport: &str, namespace: Value, adrfam: &str, port: Value| {
        let address =
            json!({ "trsvcid": port, "traddr": "127.0.0.1", "adrfam": adrfam, "trtype": transport });
        [
            call("nvmf_create_transport", json!({ "trtype": transport })),
            call("nvmf_create_subsystem", json!({ "nqn": NQN, "allow_any_host": true })),
            call("nvmf_subsystem_add_ns", json!({ "nqn": NQN, "namespace": namespace })),
            call("nvmf_subsystem_add_listener", json!({ "nqn": NQN, "listen_address": address })),
        ]
    };
    let bdevs = [malloc("M")];
    let first = config(&bdevs, &nvmf("tcp", json!({ "bdev_name": "M" }), "IPv4", json!("0")));
    let mut target = Reloaded::start(&directory, "same", &first);
    let port = target.server.port();
    let mut load = Load::start(&target.server, &port, NQN, "M");
    let number: u16 = port.parse().unwrap();
    let written_out = json!({ "bdev_name": "M", "nsid": 1, "anagrpid": 1 });
    for other in [
        config(&bdevs, &nvmf("TCP", written_out, "ipv4", json!(number))),
        first.clone(),
        target.server.ok(&["save_config"]),
        config(&bdevs, &nvmf("Tcp", json!({ "nsid": 0, "bdev_name": "M" }), "IPV4", json!(port))),
    ] {
        assert_eq!(target.reload(&other), ["reload: nothing has changed", "reload: done"], "{other}");
    }
    // An address that cannot be listened at changes nothing either.
    let mut name = nvmf("tcp", json!({ "bdev_name": "M" }), "IPv4", json!(port));
    name[3]["params"]["listen_address"]["traddr"] = json!("localhost");
    let lines = target.reload(&config(&bdevs, &name));
    assert!(lines[0].starts_with("reload: nothing is changed: ") && lines.len() == 2, "{lines:?}");
    assert!(load.is_running(), "no request has failed");
    let qpairs = target.server.ok(&["nvmf_subsystem_get_qpairs", &format!("nqn={NQN}")]);
    assert!(qpairs.as_array().is_some_and(|qpairs| !qpairs.is_empty()), "{qpairs}");
    drop(load);
    assert_eq!(target.server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn hup_moves_a_namespace_with_requests_in_flight() {
    let directory = scratch("reload-move");
    let nqns = ["nqn.2025-01.io.ringbolt:one", "nqn.2025-01.io.ringbolt:two"];
    // Requests take a while, so that some are in flight when the namespace goes.
    let delay = json!({ "name": "D", "base_bdev_name": "M", "avg_read_latency": 50_000, "p99_read_latency": 50_000,
        "avg_write_latency": 0, "p99_write_latency": 0 });
    let bdevs = [malloc("M"), call("bdev_delay_create", delay)];
    let with_namespace_of = |owner: usize| {
        let listener = |nqn: &str| json!({ "nqn": nqn, "listen_address": { "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "0" } });
        let mut calls = vec![call("nvmf_create_transport", json!({ "trtype": "TCP" }))];
        for nqn in nqns {
            calls.push(call("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true })));
            calls.push(call("nvmf_subsystem_add_listener", listener(nqn)));
        }
        let namespace = json!({ "nqn": nqns[owner], "namespace": { "bdev_name": "D" } });
        calls.push(call("nvmf_subsystem_add_ns", namespace));
        config(&bdevs, &calls)
    };
    let mut target = Reloaded::start(&directory, "move", &with_namespace_of(0));
    let port_of = |target: &Reloaded, nqn: &str| {
        let described = target.server.ok(&["nvmf_get_subsystems", &format!("nqn={nqn}")]);
        described[0]["listen_addresses"][0]["trsvcid"].as_str().unwrap().to_string()
    };
    for moved in 0..4 {
        let (from, to) = (moved % 2, (moved + 1) % 2);
        let load = Load::start(&target.server, &port_of(&target, nqns[from]), nqns[from], "D");
        let lines = target.reload(&with_namespace_of(to));
        let begins = ["removed: nvmf_subsystem_add_ns", "applied: nvmf_subsystem_add_ns", "done"];
        for (line, begin) in lines.iter().zip(begins) {
            assert!(line.starts_with(&format!("reload: {begin}")), "{lines:#?}");
        }
        let described = target.server.ok(&["nvmf_get_subsystems", &format!("nqn={}", nqns[to])]);
        assert_eq!(described[0]["namespaces"][0]["name"], "D");
        drop(load);
    }
    assert_eq!(target.server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn hup_restores_what_stands_on_a_bdev_that_is_made_again() {
    let directory = scratch("reload-again");
    let backend = ServerProcess::configured(
        &directory,
        "backend",
        &config(&[malloc("M")], &[subsystem(&["M"]), subsystem(&[])[2..].to_vec()].concat()),
    );
    let described = backend.ok(&["nvmf_get_subsystems", &format!("nqn={NQN}")]);
    let ports: Vec<String> = described[0]["listen_addresses"]
        .as_array()
        .unwrap()
        .iter()
        .map(|address| address["trsvcid"].as_str().unwrap().to_string())
        .collect();
    let with_port = |port: &str| {
        let attach = json!({ "name": "Nvme0", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port, "subnqn": NQN });
        let passthru = json!({ "name": "P", "base_bdev_name": "Nvme0n1" });
        let split = json!({ "base_bdev": "P", "split_count": 3 });
        let bdevs = [
            call("bdev_nvme_attach_controller", attach),
            call("bdev_passthru_create", passthru),
            call("bdev_split_create", split),
        ];
        let export =
            |bdev: &str| json!({ "bdev_name": bdev, "path": directory.join(format!("{bdev}.sock")) });
        let node = json!({ "name": "disk", "pg_ig_maps": [], "luns": [{ "bdev_name": "Pp1", "lun_id": 0 }] });
        let blk = json!({ "ctrlr": directory.join("blk.sock"), "dev_name": "Pp2" });
        json!({ "subsystems": [
            { "subsystem": "bdev", "config": bdevs },
            { "subsystem": "nvmf", "config": subsystem(&["Pp0"]) },
            { "subsystem": "nbd", "config": [call("nbd_export_create", export("Pp1"))] },
            { "subsystem": "iscsi", "config": [call("iscsi_create_target_node", node)] },
            { "subsystem": "vhost_blk", "config": [call("vhost_create_blk_controller", blk)] },
        ] })
    };
    let mut target = Reloaded::start(&directory, "again", &with_port(&ports[0]));
    let calls = |target: &Reloaded| {
        let saved = target.server.ok(&["save_config"]);
        let sections = saved["subsystems"].as_array().unwrap();
        sections.iter().map(|section| section["config"].as_array().unwrap().len()).sum::<usize>()
    };
    let before = calls(&target);
    let lines = target.reload(&with_port(&ports[1]));
    assert!(lines.iter().all(|line| !line.contains("refused")), "{lines:#?}");
    assert_eq!(calls(&target), before, "{lines:#?}");
    let controllers = target.server.ok(&["bdev_nvme_get_controllers"]);
    assert_eq!(controllers[0]["ctrlrs"][0]["trid"]["trsvcid"], ports[1].as_str());
    let exports = target.server.ok(&["nbd_export_get"]);
    assert_eq!(exports[0]["bdev_name"], "Pp1");
    let subsystem = target.server.ok(&["nvmf_get_subsystems", &format!("nqn={NQN}")]);
    assert_eq!(subsystem[0]["namespaces"][0]["name"], "Pp0");
    let nodes = target.server.ok(&["iscsi_get_target_nodes"]);
    assert_eq!(nodes[0]["luns"][0]["bdev_name"], "Pp1");
    assert_eq!(target.reload(&with_port(&ports[1])), ["reload: nothing has changed", "reload: done"]);
    assert_eq!(target.server.stop(), Some(0));
    assert_eq!(backend.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

/// With a log of everything: keys in files, and a secret by value.
#[test]
fn secrets_of_the_keyring_are_in_no_configuration_answer_or_log() {
    use std::os::unix::fs::PermissionsExt;
    let directory = scratch("keyring");
    let (path, log) = (directory.join("key"), directory.join("log"));
    std::fs::write(&path, "swordfish").unwrap();
    let stderr = std::fs::File::create(&log).unwrap();
    let mut server =
        ServerProcess::start_with(&directory, "first", &[], |command| _ = command.stderr(stderr));
    for method in ["log_set_level", "log_set_print_level"] {
        server.ok(&[method, "level=DEBUG"]);
    }
    let path_parameter = format!("path={}", path.display());
    let add = ["keyring_file_add_key", "name=key0", &path_parameter];
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let refused = text(&server.rpc(&add).stderr);
    assert!(refused.contains("mode 640: chmod 600 (code -1)") && !refused.contains("fish"), "{refused}");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(server.ok(&add), json!(true));
    server.ok(&[
        "iscsi_create_auth_group",
        "tag=1",
        r#"secrets=[{"user":"u","secret":"a marlin by value"}]"#,
    ]);
    let keys = json!([{ "name": "key0", "module": "keyring_file", "removed": false, "probed": false,
        "refcnt": 1, "path": path }]);
    assert_eq!(server.ok(&["keyring_get_keys"]), keys);

    let saved = server.ok(&["save_config"]);
    assert_eq!(
        server.ok(&["framework_get_config", "name=keyring"]),
        json!([{ "method": "keyring_file_add_key", "params": { "name": "key0", "path": path } }])
    );
    // As SPDK's: what came by value is written by value.
    let shown = saved.to_string();
    assert!(!shown.contains("fish") && shown.contains("a marlin by value"), "{shown}");
    assert_eq!(server.ok(&["keyring_file_remove_key", "name=key0"]), json!(true));
    assert_eq!(server.ok(&["keyring_get_keys"]), json!([]));
    let gone = text(&server.rpc(&["keyring_file_remove_key", "name=key0"]).stderr);
    assert!(gone.contains("no key is called key0 (code -126)"), "{gone}");
    let printed = server.signal("SIGUSR1", "state: {");
    server.kill();

    let mut server = ServerProcess::configured(&directory, "second", &saved);
    assert_eq!((server.ok(&["save_config"]), server.ok(&["keyring_get_keys"])), (saved, keys));
    let reloaded = server.signal("SIGHUP", "reload: done");
    assert_eq!(reloaded, ["reload: nothing has changed", "reload: done"]);
    server.kill();
    let logged = std::fs::read_to_string(&log).unwrap() + &printed.concat();
    assert!(!logged.contains("fish") && !logged.contains("marlin"), "{logged}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_stop_that_waits_for_a_bdev_names_it() {
    let directory = scratch("slow-stop");
    let mut server = ServerProcess::configured(&directory, "slow", &config(&[null("A", 8)], &[]));
    let slow = ["avg_read_latency", "p99_read_latency", "avg_write_latency", "p99_write_latency"];
    let slow = slow.map(|latency| format!("{latency}=4000000"));
    let mut create = vec!["bdev_delay_create", "base_bdev_name=A", "name=Slow"];
    create.extend(slow.iter().map(String::as_str));
    // It is read when it appears, to be examined.
    server.ok(&create);
    let lines = server.signal("SIGTERM", "waiting for I/O");
    assert_eq!(lines.last().unwrap(), "waiting for I/O of Slow");
    assert_eq!(server.wait(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}
