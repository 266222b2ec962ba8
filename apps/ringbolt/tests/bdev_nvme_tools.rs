//! What is done to controllers and their commands, through the RPC server of one server in front of another.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use rig::{Server, ringbolt, scratch, text};
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.ringbolt:behind";
const FRONT: &str = "nqn.2025-01.io.ringbolt:front";
/// Identify Controller, and a read of eight blocks at 0, as base64 for URLs.
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
fn controllers_and_commands_are_at_the_callers_mercy_over_tcp_and_vfio_user() {
    let directory = scratch("mercy");
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
    let behind = Server::configured(&directory, "behind", &config(vec![malloc("N"), malloc("V")], nvmf));

    let bdev = vec![
        call("bdev_nvme_set_options", json!({ "bdev_retry_count": 0 })),
        call(
            "bdev_nvme_attach_controller",
            json!({ "name": "Net0", "trtype": "TCP", "traddr": "127.0.0.1", "adrfam": "IPv4",
                "trsvcid": behind.port(), "subnqn": NQN }),
        ),
        call("bdev_nvme_attach_controller", json!({ "name": "Vm0", "trtype": "VFIOUSER", "traddr": socket })),
    ];
    let mut nvmf = vec![call("nvmf_create_transport", json!({ "trtype": "TCP" }))];
    for (name, bdev) in [("net", "Net0n1"), ("vm", "Vm0n1")] {
        nvmf.extend(subsystem(&format!("{FRONT}-{name}"), bdev));
        nvmf.push(listener(&format!("{FRONT}-{name}"), tcp.clone()));
    }
    let front = Server::configured(&directory, "front", &config(bdev, nvmf));
    let ports: Vec<&str> = front
        .printed
        .iter()
        .filter_map(|line| line.strip_prefix("listening: TCP 127.0.0.1:")?.split(' ').next())
        .collect();
    assert_eq!(ports.len(), 2, "{:?}", front.printed);
    // Reads one block at a time; whether all went well.
    let reads = |name: &str, port: &str| {
        let uri = format!("--filename=nvme+tcp://127.0.0.1:{port}/{FRONT}-{name}?ns=1");
        let job = ["perf", &uri, "--rw=read", "--bs=512", "--iodepth=1", "--number_ios=50", "--size=1m"];
        ringbolt(&job).status.success()
    };
    let counts = |name: &str, trname: &str| -> [u64; 3] {
        let all = front.ok(&["bdev_nvme_get_transport_statistics"]);
        let groups = all["poll_groups"].as_array().unwrap().clone();
        let transports = groups.iter().flat_map(|group| group["transports"].as_array().unwrap());
        let ours: Vec<&Value> = transports.filter(|one| one["trname"] == trname).collect();
        [name, "submitted_requests", "polls"]
            .map(|name| ours.iter().map(|one| one[name].as_u64().unwrap()).sum())
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
        assert_eq!(after[0], after[1], "what was submitted has completed");

        // One read fails, which ends the job, then none does.
        let inject = ["cmd_type=io", "opc=2", "err_count=1", "sct=2", "sc=129"];
        assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
        assert!(!reads(name, port) && reads(name, port), "{controller}");
        assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
        assert_eq!(ok("bdev_nvme_remove_error_injection", &inject[..2]), true);
        assert!(reads(name, port));
        let held = ["do_not_submit=true", "timeout_in_us=1000"];
        assert_eq!(ok("bdev_nvme_add_error_injection", &[&inject[..], &held].concat()), true);
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

        let send = |kind: &str, command: &str| {
            let (kind, command) = (format!("cmd_type={kind}"), format!("cmdbuf={command}"));
            ok("bdev_nvme_send_cmd", &[&kind, "data_direction=c2h", &command, "data_len=4096"])
        };
        let identified = send("admin", IDENTIFY);
        assert_eq!(identified["cpl"], "AAAAAAAAAAAAAAAAAAAAAA==");
        assert_eq!(identified["data"].as_str().unwrap().len(), 4096usize.div_ceil(3) * 4);
        assert_eq!(send("io", READ)["data"], format!("{}==", "A".repeat(5462)));
        // The same through an injected error: Invalid Opcode, in bits 1 to 8 of the last two bytes.
        let inject = ["cmd_type=admin", "opc=6", "sc=1"];
        assert_eq!(ok("bdev_nvme_add_error_injection", &inject), true);
        assert_eq!(send("admin", IDENTIFY)["cpl"], "AAAAAAAAAAAAAAAAAAACAA==");
        // Our target keeps no firmware.
        let image = directory.join("image");
        std::fs::write(&image, [7; 8192]).unwrap();
        let output = front.rpc(&[
            "bdev_nvme_apply_firmware",
            &format!("filename={}", image.display()),
            &format!("bdev_name={controller}n1"),
        ]);
        assert!(text(&output.stderr).contains("firmware download failed"), "{}", text(&output.stderr));
    }
    drop(front);
    std::fs::remove_dir_all(directory).unwrap();
}
