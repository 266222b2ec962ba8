//! The RPC methods for controllers: reset, disable, error injection, passthrough, firmware. The server under test
//! attaches controllers of a second server, the backend.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use rig::{ServerProcess, ringbolt, scratch, text};
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.ringbolt:backend";
const FRONT: &str = "nqn.2025-01.io.ringbolt:front";
/// Identify Controller, as URL-safe base64. [`READ`] reads eight blocks at LBA 0.
const IDENTIFY: &str =
    "BgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==";
const READ: &str = "AgAAAAEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABwAAAAAAAAAAAAAAAAAAAA==";

fn call(method: &str, params: Value) -> Value {
    json!({ "method": method, "params": params })
}

fn config(bdev: Vec<Value>, nvmf: Vec<Value>) -> Value {
    json!({ "subsystems": [{ "subsystem": "bdev", "config": bdev }, { "subsystem": "nvmf", "config": nvmf }] })
}

fn subsystem(nqn: &str, bdev: &str) -> Vec<Value> {
    vec![
        call("nvmf_create_subsystem", json!({ "nqn": nqn, "allow_any_host": true })),
        call("nvmf_subsystem_add_ns", json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } })),
    ]
}

fn listener(nqn: &str, address: Value) -> Value {
    call("nvmf_subsystem_add_listener", json!({ "nqn": nqn, "listen_address": address }))
}

#[test]
fn controllers_and_commands_are_controlled_by_rpc_over_tcp_and_vfio_user() {
    let directory = scratch("control");
    let socket = directory.join("vm");
    std::fs::create_dir(&socket).unwrap();
    let tcp = json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "0" });
    let mut nvmf = vec![
        call("nvmf_create_transport", json!({ "trtype": "TCP" })),
        call("nvmf_create_transport", json!({ "trtype": "VFIOUSER" })),
    ];
    nvmf.extend(subsystem(NQN, "N"));
    nvmf.push(listener(NQN, tcp.clone()));
    let local = format!("{NQN}-vm");
    nvmf.extend(subsystem(&local, "V"));
    nvmf.push(listener(&local, json!({ "trtype": "VFIOUSER", "traddr": socket })));
    let malloc =
        |name| call("bdev_malloc_create", json!({ "name": name, "num_blocks": 8192, "block_size": 512 }));
    let backend =
        ServerProcess::configured(&directory, "backend", &config(vec![malloc("N"), malloc("V")], nvmf));

    let bdev = vec![
        call("bdev_nvme_set_options", json!({ "bdev_retry_count": 0 })),
        call(
            "bdev_nvme_attach_controller",
            json!({ "name": "Net0", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4",
                "trsvcid": backend.port(), "subnqn": NQN }),
        ),
        call("bdev_nvme_attach_controller", json!({ "name": "Vm0", "trtype": "VFIOUSER", "traddr": socket })),
    ];
    let mut nvmf = vec![call("nvmf_create_transport", json!({ "trtype": "TCP" }))];
    for (name, bdev) in [("net", "Net0n1"), ("vm", "Vm0n1")] {
        nvmf.extend(subsystem(&format!("{FRONT}-{name}"), bdev));
        nvmf.push(listener(&format!("{FRONT}-{name}"), tcp.clone()));
    }
    let front = ServerProcess::configured(&directory, "front", &config(bdev, nvmf));
    let ports: Vec<&str> = front
        .printed
        .iter()
        .filter_map(|line| line.strip_prefix("listening: TCP 127.0.0.1:")?.split(' ').next())
        .collect();
    assert_eq!(ports.len(), 2, "{:?}", front.printed);
    // Reads one block at a time; true if all reads succeed.
    let reads = |name: &str, port: &str| {
        let uri = format!("--filename=nvme+tcp://127.0.0.1:{port}/{FRONT}-{name}?ns=1");
        let job = ["perf", &uri, "--rw=read", "--bs=512", "--iodepth=1", "--number_ios=50", "--size=1m"];
        ringbolt(&job).status.success()
    };
    let counts = |name: &str, trname: &str| -> [u64; 3] {
        let all = front.ok(&["bdev_nvme_get_transport_statistics"]);
        let groups = all["poll_groups"].as_array().unwrap().clone();
        let transports = groups.iter().flat_map(|group| group["transports"].as_array().unwrap());
        let selected: Vec<&Value> = transports.filter(|one| one["trname"] == trname).collect();
        [name, "submitted_requests", "polls"]
            .map(|name| selected.iter().map(|one| one[name].as_u64().unwrap()).sum())
    };
    for (controller, name, port, trname, completed) in [
        ("Net0", "net", ports[0], "TCP", "nvme_completions"),
        ("Vm0", "vm", ports[1], "VFIOUSER", "completions"),
    ] {
        let named = format!("name={controller}");
        let ok = |method: &str, more: &[&str]| front.ok(&[&[method, &named], more].concat());
        let before = counts(completed, trname);
        assert!(reads(name, port));
        let after = counts(completed, trname);
        assert!(after[0] >= before[0] + 50 && after[1] >= before[1] + 50 && after[2] > before[2]);
        assert_eq!(after[0], after[1], "every submitted command has completed");

        // One read fails, which ends the job; the next job succeeds.
        let inject = ["cmd_type=io", "opc=2", "err_count=1", "sct=2", "sc=129"];
        assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
        assert!(!reads(name, port) && reads(name, port), "{controller}");
        assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
        assert_eq!(ok("bdev_nvme_remove_error_injection", &inject[..2]), true);
        assert!(reads(name, port));
        let delayed = ["do_not_submit=true", "timeout_in_us=1000"];
        assert_eq!(ok("bdev_nvme_add_error_injection", &[&inject[..], &delayed].concat()), true);
        assert!(!reads(name, port) && reads(name, port), "{controller}");

        let state = || ok("bdev_nvme_get_controllers", &[])[0]["ctrlrs"][0]["state"].clone();
        for _ in 0..2 {
            assert_eq!(ok("bdev_nvme_disable_controller", &[]), true);
        }
        assert_eq!((state(), reads(name, port)), (json!("disabled"), false));
        assert_eq!(ok("bdev_nvme_enable_controller", &["cntlid=0"]), true);
        assert_eq!((state(), reads(name, port)), (json!("enabled"), true));
        assert_eq!(ok("bdev_nvme_reset_controller", &[]), true);
        assert!(reads(name, port));
        commands_pass_through(&front, controller, &directory);
    }
    firmware_download_is_a_job(&front, &directory);
    drop(front);
    std::fs::remove_dir_all(directory).unwrap();
}

/// Commands of users, with an injected error too, and a download that the target does not support.
fn commands_pass_through(front: &ServerProcess, controller: &str, directory: &std::path::Path) {
    let named = format!("name={controller}");
    let ok = |method: &str, more: &[&str]| front.ok(&[&[method, &named], more].concat());
    let send = |kind: &str, command: &str| {
        let (kind, command) = (format!("cmd_type={kind}"), format!("cmdbuf={command}"));
        ok("bdev_nvme_send_cmd", &[&kind, "data_direction=c2h", &command, "data_len=4096"])
    };
    let identified = send("admin", IDENTIFY);
    assert_eq!(identified["cpl"], "AAAAAAAAAAAAAAAAAAAAAA==");
    assert_eq!(identified["data"].as_str().unwrap().len(), 4096usize.div_ceil(3) * 4);
    assert_eq!(send("io", READ)["data"], format!("{}==", "A".repeat(5462)));
    // With an injected error: Invalid Command Opcode, in bits 1 to 8 of the last two bytes.
    let inject = ["cmd_type=admin", "opc=6", "sc=1"];
    assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
    assert_eq!(send("admin", IDENTIFY)["cpl"], "AAAAAAAAAAAAAAAAAAACAA==");
    // The target does not support firmware download.
    let image = directory.join("image");
    std::fs::write(&image, [7; 8192]).unwrap();
    let output = front.rpc(&[
        "bdev_nvme_apply_firmware",
        &format!("filename={}", image.display()),
        &format!("bdev_name={controller}n1"),
    ]);
    assert!(text(&output.stderr).contains("firmware download failed"), "{}", text(&output.stderr));
}

/// Downloads an image with commands that an injection completes after 5 ms each, and cancels the download.
fn firmware_download_is_a_job(server: &ServerProcess, directory: &std::path::Path) {
    let inject = ["name=Net0", "cmd_type=admin", "opc=17", "err_count=100000", "do_not_submit=true"];
    server.ok(&[&["bdev_nvme_add_error_injection"], &inject[..], &["timeout_in_us=5000"]].concat());
    let image = directory.join("image");
    std::fs::write(&image, vec![7; 16 << 20]).unwrap();
    let filename = format!("filename={}", image.display());
    let job = server.ok(&["bdev_nvme_apply_firmware", &filename, "bdev_name=Net0n1", "background=true"]);
    let handle = format!("job={}", job["job"]);
    let state = || server.ok(&["job_get", &handle])[0].clone();
    while state()["done"] == 0 {
        assert_eq!(state()["state"], "running", "{}", state());
    }
    assert_eq!((&state()["total"], &state()["unit"]), (&json!(16 << 20), &json!("bytes")));
    // An update is made meanwhile.
    server.ok(&["bdev_null_create", "name=Beside", "num_blocks=8", "block_size=512"]);
    assert_eq!(state()["state"], "running");
    server.ok(&["job_cancel", &handle]);
    while state()["state"] == "running" {}
    assert_eq!(state()["state"], "cancelled", "{}", state());
    server.ok(&[&["bdev_nvme_remove_error_injection"], &inject[..3]].concat());
    // What is not a regular file is refused at once.
    let fifo = server.rpc(&["bdev_nvme_apply_firmware", "filename=/dev/zero", "bdev_name=Net0n1"]);
    assert!(text(&fifo.stderr).contains("not a regular file"), "{}", text(&fifo.stderr));
}
