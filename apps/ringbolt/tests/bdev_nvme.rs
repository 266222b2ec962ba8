//! A server that exports the namespace of another server: behaviour for hosts while the backend is restarted.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rig::{ServerProcess, ringbolt, scratch, text};
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.ringbolt:backend";
const FRONT: &str = "nqn.2025-01.io.ringbolt:front";

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

/// The configuration of a target that exports one bdev, which the calls `bdevs` create.
fn target(mut bdevs: Vec<Value>, bdev: &str, nqn: &str, port: &str) -> Value {
    let address = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port });
    let nvmf = vec![
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true, "ana_reporting": true })),
        call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } })),
        call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address })),
    ];
    bdevs.push(call("bdev_wait_for_examine", json!({})));
    json!({ "subsystems": [{ "subsystem": "bdev", "config": bdevs }, { "subsystem": "nvmf", "config": nvmf }] })
}

#[test]
fn io_is_retried_across_a_restart_of_the_backend() {
    let directory = scratch("restart");
    let medium = directory.join("medium");
    std::fs::File::create(&medium).unwrap().set_len(64 << 20).unwrap();
    let uuid = "913fc008-79a7-447f-b2c4-c73543638c31";
    let file = call(
        "bdev_uring_create",
        json!({ "name": "File", "filename": medium, "uuid": uuid, "block_size": 512 }),
    );
    let backend =
        ServerProcess::configured(&directory, "backend", &target(vec![file.clone()], "File", NQN, "0"));
    let attach = call(
        "bdev_nvme_attach_controller",
        json!({ "name": "Nvme0", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": backend.port(),
            "subnqn": NQN, "ctrlr_loss_timeout_sec": 60, "reconnect_delay_sec": 1 }),
    );
    let counting = call("bdev_nvme_set_options", json!({ "io_path_stat": true }));
    let front = ServerProcess::configured(
        &directory,
        "front",
        &target(vec![counting, attach], "Nvme0n1", FRONT, "0"),
    );
    assert_eq!(front.ok(&["bdev_get_bdevs", "name=Nvme0n1"])[0]["uuid"], uuid);
    let saved = front.ok(&["save_config"]);
    let subsystems = saved["subsystems"].as_array().unwrap();
    let bdev = subsystems.iter().find(|subsystem| subsystem["subsystem"] == "bdev").unwrap();
    let first = &bdev["config"][1];
    assert_eq!(
        (&first["method"], &first["params"]["name"]),
        (&json!("bdev_nvme_attach_controller"), &json!("Nvme0"))
    );

    let uri = format!("--filename=nvme+tcp://127.0.0.1:{}/{FRONT}?ns=1", front.port());
    let load = Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args([
            "perf",
            &uri,
            "--rw=randrw",
            "--iodepth=8",
            "--bs=4k",
            "--verify",
            "--time_based",
            "--runtime=8s",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let done = |server: &ServerProcess| {
        let counts = server.ok(&["bdev_get_iostat", "names=[\"Nvme0n1\"]"]);
        counts["bdevs"][0]["num_write_ops"].as_u64().unwrap()
    };
    let wait_for = |what: &str, condition: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end, "timeout: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for("load", &|| done(&front) > 100);
    let port = backend.port();
    backend.kill();
    let state =
        |server: &ServerProcess| server.ok(&["bdev_nvme_get_controllers"])[0]["ctrlrs"][0]["state"].clone();
    wait_for("loss of the controller", &|| state(&front) == "resetting");
    let _backend = ServerProcess::configured(&directory, "backend", &target(vec![file], "File", NQN, &port));
    wait_for("reconnect", &|| state(&front) == "enabled");
    let before = done(&front);
    wait_for("writes after the reconnect", &|| done(&front) > before);
    let counted = front.ok(&["bdev_nvme_get_path_iostat", "name=Nvme0n1"]);
    let path = &counted["stats"][0];
    assert_eq!((&counted["name"], &path["trid"]["subnqn"]), (&json!("Nvme0n1"), &json!(NQN)));
    assert!(path["stat"]["num_write_ops"].as_u64().unwrap() > before, "{counted} {before}");
    let output = load.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("blocks checked, 0 wrong"), "{}", text(&output.stdout));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn nvme_tools_attach_a_controller_without_an_rpc_server() {
    let directory = scratch("tools");
    let malloc = call("bdev_malloc_create", json!({ "name": "M", "num_blocks": 2048, "block_size": 512 }));
    let server = ServerProcess::configured(&directory, "server", &target(vec![malloc], "M", NQN, "0"));
    let uri = format!("nvme+tcp://127.0.0.1:{}/{NQN}", server.port());
    let show = |arguments: &[&str]| -> Value {
        let output = ringbolt(&[&["nvme"], arguments, &["--json"]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(show(&["list", &uri])["controllers"][0]["namespaces"][0]["blocks"], 2048);
    assert_eq!(show(&["identify", &uri])["subnqn"], NQN);
    let namespace = show(&["identify", &uri, "--ns", "1"]);
    assert_eq!((&namespace["nsze"], &namespace["formats"][0]["data_bytes"]), (&json!(2048), &json!(512)));
    assert!(show(&["log", &uri, "smart"])["temperature_celsius"].is_number());
    assert!(show(&["log", &uri, "error"])["errors"].is_array());
    assert_eq!(show(&["log", &uri, "ana"])["groups"][0]["state"], "optimized");
    assert!(show(&["log", &uri, "effects"])["io"].as_array().unwrap().len() > 2);
    let discovered = show(&["discover", &format!("127.0.0.1:{}", server.port())]);
    let records = discovered.as_array().unwrap();
    let ours = records.iter().find(|record| record["subnqn"] == NQN).unwrap();
    assert_eq!((&ours["trsvcid"], &ours["subtype"]), (&json!(server.port()), &json!("nvm")));
    assert_eq!(ringbolt(&["nvme", "identify", &uri, "--raw"]).stdout.len(), 4096);
    let failure = |arguments: &[&str]| {
        let output = ringbolt(&[&["nvme"], arguments].concat());
        (output.status.code().unwrap(), text(&output.stderr))
    };
    let cases: &[(&[&str], i32, &str)] = &[
        (&["identify", &uri, "--ns", "7"], 1, "namespace"),
        (&["format", &uri, "--ns", "1", "--lbaf", "0"], 2, "--yes-destroy-data"),
        (&["reset", &uri], 1, "bdev_nvme_reset_controller"),
        (&["identify", "nvme+pcie://zz"], 2, "is not a PCI address"),
        (&["log", "nvme+tcp://127.0.0.1:1/nqn.2025-01.io.ringbolt:a", "health"], 1, "127.0.0.1:1"),
    ];
    for (arguments, status, message) in cases {
        let (got, stderr) = failure(arguments);
        assert!(got == *status && stderr.contains(message), "{arguments:?}: {got} {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    for command in ["list", "identify", "log", "format", "reset", "discover"] {
        let help = text(&ringbolt(&["nvme", command, "--help"]).stdout);
        assert!(help.contains("Example") && help.contains(&format!("ringbolt nvme {command}")), "{help}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_store_of_files_that_another_program_has_reserved_is_refused() {
    let directory = scratch("reserved");
    let image = directory.join("files.img").to_str().unwrap().to_string();
    let blobfs = |arguments: &[&str]| ringbolt(&[&["blobfs"], arguments].concat());
    assert!(blobfs(&["format", "--size=64m", &image]).status.success());
    let file = call("bdev_uring_create", json!({ "name": "File", "filename": image, "block_size": 4096 }));
    let target = ServerProcess::configured(&directory, "target", &target(vec![file], "File", NQN, "0"));
    let attach = call(
        "bdev_nvme_attach_controller",
        json!({ "name": "Nvme0", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4", "trsvcid": target.port(),
            "subnqn": NQN, "reservation": "write_exclusive" }),
    );
    let config = json!({ "subsystems": [{ "subsystem": "bdev", "config": [attach] }] });
    let file = directory.join("files.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let option = format!("--config={}", file.to_str().unwrap());
    let run = |command: &str, path: &str| {
        let output = blobfs(&[command, &option, "Nvme0n1", path]);
        let error = text(&output.stderr);
        output.status.success().then(|| text(&output.stdout)).ok_or(error)
    };
    run("mkdir", "/db").unwrap();
    let other = ServerProcess::configured(&directory, "other", &config);
    for command in ["ls", "rm"] {
        let error = run(command, "/db").unwrap_err();
        assert!(error.contains("namespace 1: reserved by another program: host "), "{error}");
    }
    assert_eq!(other.stop(), Some(0));
    run("mkdir", "/other").unwrap();
    // One that was killed has it until the target has closed its connection.
    ServerProcess::configured(&directory, "other", &config).kill();
    let started = Instant::now();
    let listed = std::iter::repeat_with(|| run("ls", "/"))
        .find(|listed| listed.is_ok() || started.elapsed() > Duration::from_secs(30));
    assert!(listed.unwrap().unwrap().contains("other"));
    target.stop();
    std::fs::remove_dir_all(directory).unwrap();
}
