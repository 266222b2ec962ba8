//! The program's command line: help, exit statuses, server life cycle, load generator, demonstration.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "program/documents.rs"]
mod documents;
mod rig;

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rig::{ServerProcess, ringbolt, scratch, text};
use serde_json::{Value, json};

/// Exit status and standard error of a command.
fn failure(arguments: &[&str]) -> (i32, String) {
    let output = ringbolt(arguments);
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn every_help_text_has_examples() {
    for command in ["serve", "rpc", "perf", "demo", "objects", "blob", "image", "trace", "completions"] {
        let output = ringbolt(&[command, "--help"]);
        let help = text(&output.stdout);
        assert!(output.status.success(), "{command}");
        assert!(help.contains("Example") && help.contains(&format!("ringbolt {command}")), "{help}");
    }
    let help = text(&ringbolt(&["nvme", "bind", "--help"]).stdout);
    assert!(help.contains("ringbolt nvme bind --undo") && help.contains("--force-signature"), "{help}");
    let completions = text(&ringbolt(&["completions", "bash"]).stdout);
    assert!(completions.contains("_ringbolt()") && completions.contains("blobfs"));
    assert!(!completions.contains("rpc-reference") && !completions.contains("metrics-reference"));
}

#[test]
fn output_that_cannot_be_written_is_an_error_unless_it_is_closed() {
    use std::process::{Command, Stdio};
    let run = |arguments: &[&str], stdout: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringbolt"));
        let output = command.args(arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    for arguments in [
        ["lab", "plan", "quick", "--json"].as_slice(),
        &["lab", "list"],
        &["model", "list"],
        &["nvme", "list", "--json"],
        &["nvme", "bind", "--status"],
        &["completions", "bash"],
        &["completions", "zsh"],
        &["rpc-reference"],
        &["perf", "--cmdhelp"],
        &["--help"],
        &["perf", "--help"],
        &["--version"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (status, error) = run(arguments, full.into());
        assert_eq!(status, Some(1), "{arguments:?}: {error}");
        assert!(error.starts_with("ringbolt: standard output: No space left"), "{arguments:?}: {error}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(run(arguments, writer.into()), (Some(0), String::new()), "{arguments:?}");
    }
}

#[test]
fn serve_refuses_a_fifo_at_the_place_of_its_lock_file() {
    let directory = scratch("lock-fifo");
    let lock = directory.join("a.sock.lock");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &lock, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let (status, error) = failure(&["serve", "-r", directory.join("a.sock").to_str().unwrap()]);
    let expected = format!("ringbolt: {}: exists and is not a regular file", lock.display());
    assert!(status == 4 && error.starts_with(&expected), "{status}: {error}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn perf_describes_its_options_and_engines() {
    let help = |word: &str| text(&ringbolt(&["perf", word]).stdout);
    let one = help("--cmdhelp=iodepth");
    assert!(one.starts_with("  --iodepth=") && one.lines().count() == 1, "{one}");
    assert!(help("--cmdhelp=iodepth_low").contains("rejected: the queue is refilled"));
    assert!(help("--cmdhelp=gtod-reduce").contains("accepted with a warning: latencies are measured"));
    assert!(help("--cmdhelp").lines().count() > 250);
    assert!(help("--enghelp").lines().any(|line| line == "io_uring"));
    let names = |text: String| -> Vec<String> {
        let options = text.lines().filter_map(|line| line.trim().strip_prefix("--"));
        options.map(|line| line.split([' ', '=']).next().unwrap().to_string()).collect()
    };
    assert!(names(help("--enghelp=iou-s")).contains(&"sqthread_poll_cpu".to_string()));
    assert_eq!(help("--enghelp=psync"), "psync has no options of its own\n");
    assert_eq!(names(help("--enghelp=libaio,userspace_reap")), ["userspace_reap"]);
    assert!(failure(&["perf", "--enghelp=rbd"]).1.contains("another project"));
    assert!(failure(&["perf", "--enghelp=disk"]).1.contains("it is one of null, psync"));
    assert!(failure(&["perf", "--enghelp=psync,hipri"]).1.contains("psync has no option hipri"));
    for engine in help("--enghelp").lines() {
        assert!(!help(&format!("--enghelp={engine}")).is_empty(), "{engine}: an option that does not exist");
    }
    assert!(help("--version").starts_with("ringbolt "));
}

#[test]
fn errors_are_one_line_with_distinct_exit_statuses() {
    let directory = scratch("errors");
    let config = directory.join("bad.json");
    let bad = r#"{"subsystems":[{"subsystem":"bdev","config":[{"method":"bdev_null_create","params":{}}]}]}"#;
    std::fs::write(&config, bad).unwrap();
    let (config, nowhere) = (config.to_str().unwrap(), directory.join("none.sock"));
    let socket = directory.join("a.sock");
    let (nowhere, socket) = (nowhere.to_str().unwrap(), socket.to_str().unwrap());
    let cases: &[(&[&str], i32, &str)] = &[
        (&["perf", "--filename=null:1g", "--rw=up"], 2, "it is one of read, write"),
        (&["perf", "--filename=null:0"], 2, "for example null:1g"),
        (&["perf", "--filename=null:1m", "--bs=700"], 2, "--bs=700 is not a multiple"),
        (&["perf", "--filename=Nobody"], 2, "no bdev is called Nobody"),
        (&["perf", "--filename=null:1g", "--cpus_allowed=1000"], 2, "core 1000 is not among"),
        (&["perf", "--filename=null:1g", "--iodpeth=4"], 2, "did you mean iodepth?"),
        (&["perf", "--filename=/nonexistent/f", "--ioengine=iou"], 2, "give --size"),
        (&["perf", "/dev/zero"], 2, "/dev/zero: a job file has at most"),
        (&["perf", "--cmdhelp=iodpeth"], 2, "did you mean iodepth?"),
        (&["perf", "-filename=null:1g", "-rw=up"], 2, "it is one of read, write"),
        (&["lab", "import", "/dev/null"], 1, "holds no fio results"),
        (&["frobnicate"], 2, "unrecognized subcommand 'frobnicate'; see `ringbolt --help`"),
        (&["nvme", "discover", "nvme+tcp://127.0.0.1:1"], 1, "127.0.0.1:1/"),
        (&["nvme", "bind", "nvme0"], 2, "'nvme0' is not a PCI address such as 0000:00:03.0"),
        (
            &["nvme", "bind", "00:03.0", "--driver", "vfio"],
            2,
            "expected one of vfio-pci, uio_pci_generic, nvme",
        ),
        (&["nvme", "bind", "--dry-run"], 2, "nothing to bind"),
        (&["nvme", "bind", "--undo", "--all"], 2, "cannot be used with"),
        (&["nvme", "bind", "ffff:ff:1f.7", "--driver", "nvme", "--dry-run"], 1, "nothing was changed"),
        (&["rpc", "-r", nowhere, "rpc_get_methods"], 5, "is `ringbolt serve` running"),
        (&["rpc", "x", "y"], 2, "KEY=VALUE"),
        (&["serve", "-r", socket, "-c", "/nonexistent.json"], 3, "/nonexistent.json: No such file"),
        (&["serve", "-r", socket, "-c", config], 3, "config[0] (bdev): bdev_null_create: Invalid parameters"),
        (
            &["serve", "-r", socket, "--memory=1024t"],
            2,
            "--memory=1024t: this machine, or its control group, has",
        ),
        (&["serve", "-r", "/nonexistent/a.sock"], 4, "name another place with --rpc-socket"),
    ];
    for (arguments, status, message) in cases {
        let (got, stderr) = failure(arguments);
        assert_eq!(got, *status, "{arguments:?}: {stderr}");
        assert!(stderr.contains(message), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn perf_fails_where_a_target_cannot_be_reached() {
    let (status, error) =
        failure(&["perf", "--filename=nvme+tcp://127.0.0.1:1/nqn.2025-01.io.ringbolt:a?ns=1"]);
    assert!(status == 1 && error.contains("cannot connect to 127.0.0.1:1"), "{status}: {error}");
}

#[test]
fn nvme_bind_reports_status_and_rejections_on_any_machine() {
    let output = ringbolt(&["nvme", "bind", "--status", "--json"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success() && shown["functions"].is_array(), "{shown}");
    let output = ringbolt(&["nvme", "bind", "ffff:ff:1f.7", "--driver=nvme", "--dry-run", "--json"]);
    let planned: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(planned["plan"]["refusals"][0]["reasons"][0]["kind"], "missing", "{planned}");
    assert_eq!(planned["applied"], false);
}

#[test]
fn a_saved_configuration_restores_the_server() {
    let directory = scratch("serve");
    let server = ServerProcess::start(&directory, "rpc", &[]);
    for start in ["memory: ", "engine: ", "cores: ", "rpc: "] {
        assert!(server.printed.iter().any(|line| line.starts_with(start)), "{:?}", server.printed);
    }
    let mode = std::fs::metadata(&server.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    server.ok(&["bdev_malloc_create", "name=M", "num_blocks=2048", "block_size=512"]);
    server.ok(&["nvmf_create_transport", "trtype=TCP"]);
    let nqn = "nqn=nqn.2025-01.io.ringbolt:a";
    server.ok(&["nvmf_create_subsystem", nqn, "allow_any_host=true"]);
    server.ok(&["nvmf_subsystem_add_ns", nqn, "namespace.bdev_name=M"]);
    let address =
        ["listen_address.trtype=TCP", "listen_address.traddr=127.0.0.1", "listen_address.trsvcid=0"];
    server.ok(&[&["nvmf_subsystem_add_listener", nqn], address.as_slice()].concat());
    let saved = server.ok(&["save_config"]);
    let second = failure(&["serve", "-r", server.socket.to_str().unwrap()]);
    assert!(second.0 == 4 && second.1.contains("another process answers"), "{second:?}");
    // 16 TiB: the address space has room, and no machine so much memory.
    let large = server.rpc(&["bdev_malloc_create", "name=L", "num_blocks=4294967296", "block_size=4096"]);
    let message = text(&large.stderr);
    assert!(
        message.contains("L needs 16777216 MiB of memory") && message.contains("(code -12)"),
        "{message}"
    );
    let wrong = server.rpc(&["bdev_malloc_delete", "name=Z"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("bdev_malloc_delete: no bdev is called Z (code -19)"));
    assert_eq!(server.stop(), Some(0));

    let config = directory.join("saved.json");
    std::fs::write(&config, saved.to_string()).unwrap();
    let server = ServerProcess::start(&directory, "rpc", &["-c", config.to_str().unwrap()]);
    assert_eq!(server.ok(&["save_config"]), saved);
    let listening = server.printed.iter().find(|line| line.starts_with("listening: TCP 127.0.0.1:"));
    let port = listening.and_then(|line| line.split([':', ' ']).nth(4)).unwrap();
    let uri = format!("--filename=nvme+tcp://127.0.0.1:{port}/nqn.2025-01.io.ringbolt:a?ns=1");
    let output = ringbolt(&["perf", &uri, "--rw=randrw", "--iodepth=16", "--number_ios=2000", "--verify"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("blocks checked, 0 wrong"), "{}", text(&output.stdout));
    let counts = server.ok(&["bdev_get_iostat", "names=[\"M\"]"]);
    let done = |name: &str| counts["bdevs"][0][name].as_u64().unwrap();
    // What the job wrote it reads back at the end.
    let all = done("num_read_ops") + done("num_write_ops");
    assert!((2001..4000).contains(&all), "{all}");
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn scsi_controllers_are_described_and_saved_as_by_spdk() {
    let directory = scratch("vhost-scsi");
    let server = ServerProcess::start(&directory, "rpc", &["-S", directory.to_str().unwrap()]);
    server.ok(&["bdev_malloc_create", "name=M", "num_blocks=2048", "block_size=512"]);
    server.ok(&["bdev_null_create", "name=N", "num_blocks=2048", "block_size=512"]);
    let socket = directory.join("host");
    let ctrlr = format!("ctrlr={}", socket.display());
    let add = |number: &str, bdev: &str| {
        let (number, bdev) = (format!("scsi_target_num={number}"), format!("bdev_name={bdev}"));
        server.rpc(&["vhost_scsi_controller_add_target", &ctrlr, &number, &bdev])
    };
    let core = server.ok(&["framework_get_reactors"])["reactors"][0]["lcore"].as_u64().unwrap();
    server.ok(&[
        "vhost_create_scsi_controller",
        &ctrlr,
        "delay=true",
        &format!("cpumask={:#x}", 1_u128 << core),
    ]);
    server.ok(&["vhost_controller_set_coalescing", &ctrlr, "delay_base_us=100", "iops_threshold=50000"]);
    for (number, bdev, result) in [("5", "M", "5"), ("-1", "N", "0")] {
        assert_eq!(text(&add(number, bdev).stdout).trim(), result);
    }
    for (number, bdev) in [("8", "N"), ("300", "N"), ("5", "N"), ("1", "Missing")] {
        assert!(text(&add(number, bdev).stderr).contains("(code -32602)"), "{number} {bdev}");
    }
    for number in ["scsi_target_num=8", "scsi_target_num=1"] {
        let removed = server.rpc(&["vhost_scsi_controller_remove_target", &ctrlr, number]);
        assert!(text(&removed.stderr).contains("(code -32602)"), "{number}");
    }
    assert!(!socket.exists());
    server.ok(&["vhost_start_scsi_controller", &ctrlr]);
    assert!(socket.exists());
    let target = |number: u8, bdev: &str| {
        let name = format!("Target {number}");
        let luns = [json!({ "id": 0, "bdev_name": bdev })];
        json!({ "scsi_dev_num": number, "id": number, "target_name": name, "luns": luns })
    };
    let described = server.ok(&["vhost_get_controllers"]);
    assert_eq!(described[0]["backend_specific"], json!({ "scsi": [target(0, "N"), target(5, "M")] }));
    assert_eq!([&described[0]["delay_base_us"], &described[0]["iops_threshold"]], [100, 50000]);
    assert_eq!(described[0]["sessions"], json!([]));
    let saved = server.ok(&["save_config"]);
    assert_eq!(server.stop(), Some(0));
    let server = ServerProcess::configured(&directory, "again", &saved);
    assert_eq!(server.ok(&["save_config"]), saved);
    assert_eq!(server.ok(&["vhost_get_controllers"]), described);
    assert!(socket.exists());
    server.ok(&["vhost_delete_controller", &ctrlr]);
    assert!(!socket.exists());
    std::fs::remove_dir_all(&directory).unwrap();
}

/// The file has the calls and parameters that `save_config` of SPDK 26.09 writes for malloc, null, error,
/// delay and uring bdevs and two subsystems over TCP and vfio-user, with an overlay before its base.
#[test]
fn a_configuration_saved_by_spdk_starts_the_server() {
    let directory = scratch("spdk-config");
    std::fs::File::create(directory.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let config = include_str!("data/spdk_26_09_save_config.json");
    let file = directory.join("spdk.json");
    std::fs::write(&file, config.replace("{directory}", directory.to_str().unwrap())).unwrap();
    let server = ServerProcess::start(&directory, "spdk", &["-c", file.to_str().unwrap()]);
    let bdevs = server.ok(&["bdev_get_bdevs"]);
    let names: Vec<&str> =
        bdevs.as_array().unwrap().iter().map(|bdev| bdev["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["Delay0", "EE_Malloc1", "Malloc0", "Malloc1", "Null0", "Null1", "Uring0"]);
    let subsystems = server.ok(&["nvmf_get_subsystems"]);
    let namespaces = |index: usize| subsystems[index]["namespaces"].as_array().map_or(0, Vec::len);
    assert_eq!((namespaces(1), namespaces(2)), (2, 1), "{subsystems}");
    assert_eq!(subsystems[2]["namespaces"][0]["uuid"], bdevs[0]["uuid"]);
    // What is saved here starts another server with the same devices.
    let saved = server.ok(&["save_config"]);
    assert_eq!(server.stop(), Some(0));
    let server = ServerProcess::configured(&directory, "again", &saved);
    assert_eq!(server.ok(&["save_config"]), saved);
    assert_eq!(server.ok(&["bdev_get_bdevs"]), bdevs);
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Also what `save_config` of SPDK writes: every kind of bdev and target that is here, and a CHAP group after
/// its user.
#[test]
fn all_targets_and_devices_saved_by_spdk_start_the_server() {
    let directory = scratch("spdk-all");
    for name in ["disk.img", "other.img"] {
        std::fs::File::create(directory.join(name)).unwrap().set_len(1 << 20).unwrap();
    }
    let folder = directory.to_str().unwrap();
    let file = directory.join("spdk.json");
    let config = include_str!("data/spdk_26_09_all_targets.json");
    std::fs::write(&file, config.replace("{directory}", folder)).unwrap();
    let server =
        ServerProcess::start(&directory, "spdk", &["-c", file.to_str().unwrap(), "-S", folder, "-m", "0x1"]);
    let bdevs = server.ok(&["bdev_get_bdevs"]);
    let names: Vec<&str> =
        bdevs.as_array().unwrap().iter().map(|bdev| bdev["name"].as_str().unwrap()).collect();
    let expected = "A0 A2 D0 EE_N0 F0 I0 I1 M0 M1 MD N0 N1 N2 N2p0 N2p1 N2p2 N2p3 P0 V0 V1";
    assert_eq!(names, expected.split(' ').collect::<Vec<_>>());
    assert_eq!((&bdevs[9]["block_size"], &bdevs[9]["md_interleave"]), (&json!(520), &json!(true)), "MD");
    assert_eq!(bdevs[11]["assigned_rate_limits"]["rw_ios_per_sec"], 20_000, "N1");
    let nodes = server.ok(&["iscsi_get_target_nodes"]);
    assert_eq!((&nodes[1]["chap_group"], &nodes[1]["luns"][0]["bdev_name"]), (&json!(1), &json!("I1")));
    let options = server.ok(&["iscsi_get_options"]);
    let mut of_spdk = options.clone();
    // SPDK has no such limit.
    assert_eq!(of_spdk.as_object_mut().unwrap().remove("max_connections"), Some(json!(1024)));
    let subsystems: Value = serde_json::from_str(config).unwrap();
    let calls = subsystems["subsystems"].as_array().unwrap().iter().flat_map(|one| one["config"].as_array());
    let mut saved_options =
        calls.flatten().find(|call| call["method"] == "iscsi_set_options").unwrap()["params"].clone();
    // A session ends with its last connection.
    saved_options["default_time2retain"] = json!(0);
    assert_eq!(of_spdk, saved_options);
    for (name, value) in [
        ("max_sessions", json!(0)),
        ("max_queue_depth", json!(257)),
        ("default_time2wait", json!(3601)),
        ("default_time2retain", json!(60)),
        ("pdu_pool_size", json!(0)),
        ("allow_duplicated_isid", json!(true)),
        ("error_recovery_level", json!(1)),
        ("auth_file", json!("/etc/chap")),
    ] {
        let refused = server.rpc(&["iscsi_set_options", &format!("{name}={value}")]);
        let message = text(&refused.stderr);
        assert!(!refused.status.success() && message.contains(name), "{name}: {message}");
    }
    assert_eq!(server.ok(&["iscsi_get_options"]), options);
    assert_eq!(server.ok(&["vhost_get_controllers"])[1]["ctrlr"], "vb1");
    let scheduler = server.ok(&["framework_get_scheduler"]);
    assert_eq!((&scheduler["scheduling_core"], &scheduler["isolated_core_mask"]), (&json!(0), &json!("0")));
    let reactor = &server.ok(&["framework_get_reactors"])["reactors"][0];
    let has_times = ["irq", "sys", "usr", "numa_id"].iter().all(|name| reactor[*name].is_i64());
    assert!(has_times && reactor["usr"].as_i64() > Some(0), "{reactor}");
    let saved = server.ok(&["save_config"]);
    assert_eq!(server.stop(), Some(0));
    let file = directory.join("again.json");
    std::fs::write(&file, saved.to_string()).unwrap();
    let server =
        ServerProcess::start(&directory, "again", &["-c", file.to_str().unwrap(), "-S", folder, "-m", "0x1"]);
    assert_eq!(server.ok(&["save_config"]), saved);
    assert_eq!(server.ok(&["bdev_get_bdevs"]), bdevs);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn the_rpc_socket_accepts_fragmented_calls_and_closes_at_garbage() {
    let directory = scratch("frames");
    let server = ServerProcess::start(&directory, "rpc", &[]);
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let call = |id: u32| json!({ "id": id, "method": "spdk_get_version" }).to_string();
    let (first, second) = (call(1), call(2));
    stream.write_all(&first.as_bytes()[..10]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    stream.write_all(&first.as_bytes()[10..]).unwrap();
    stream.write_all(second.as_bytes()).unwrap();
    stream.write_all(b"\n[{\"method\":\"x\",\"id\":3},{\"method\":\"framework_wait_init\"}] {]").unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    let answers: Vec<Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 4, "{answers:?}");
    assert_eq!((&answers[0]["id"], &answers[1]["id"]), (&json!(1), &json!(2)));
    assert_eq!(answers[2].as_array().map(Vec::len), Some(1));
    assert_eq!(answers[2][0]["error"]["code"], -32601);
    assert_eq!((&answers[3]["error"]["code"], &answers[3]["id"]), (&json!(-32700), &Value::Null));
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn perf_writes_fios_json() {
    let arguments =
        ["--filename=null:1g", "--rw=randread", "--iodepth=8", "--number_ios=100k", "--numjobs=2"];
    let output =
        ringbolt(&[&["perf", "--group_reporting", "--output-format=json"], arguments.as_slice()].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["jobs"].as_array().map(Vec::len), Some(1));
    let read = &document["jobs"][0]["read"];
    assert_eq!(read["total_ios"], 2 * 102_400);
    assert!(read["iops"].as_f64().unwrap() > 0.0 && read["clat_ns"]["percentile"]["99.000000"].is_number());
    let normal = text(&ringbolt(&[&["perf"], arguments.as_slice()].concat()).stdout);
    assert_eq!(normal.matches("perf: rw=randread bs=4096 iodepth=8 jobs=1").count(), 2, "{normal}");
    assert!(document["jobs"][0]["generator_cost_ns_per_io"].as_f64().unwrap() > 0.0);
    for figure in ["IOPS", "p50", "p90", "p99 ", "p99.9 ", "p99.99 ", "per I/O"] {
        assert!(normal.contains(figure), "{figure}: {normal}");
    }
}

/// Runs `ringbolt perf` and returns its JSON document.
fn perf_json(arguments: &[&str]) -> Value {
    let fixed = ["perf", "--output-format=json", "--generator_cost=0"];
    let output = ringbolt(&[fixed.as_slice(), arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn kernel_engines_run_in_processes_and_threads() {
    let directory = scratch("engines");
    let file = format!("--filename={}", directory.join("f").to_str().unwrap());
    let job = [file.as_str(), "--size=4m", "--rw=randrw", "--iodepth=8", "--number_ios=500", "--numjobs=2"];
    for engine in ["psync", "pvsync2", "libaio", "posixaio", "iou", "null"] {
        for thread in ["--thread=0", "--thread=1"] {
            let engine = format!("--ioengine={engine}");
            let document = perf_json(&[job.as_slice(), &[engine.as_str(), thread]].concat());
            let jobs = document["jobs"].as_array().unwrap();
            assert_eq!(jobs.len(), 2, "{engine} {thread}");
            for one in jobs {
                let ios = |side: &str| one[side]["total_ios"].as_u64().unwrap();
                assert_eq!((ios("read") + ios("write"), &one["error"]), (500, &json!(0)), "{engine}");
            }
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn the_threads_of_posixaio_are_part_of_the_cpu_time_of_their_job() {
    let directory = scratch("posixaio");
    let file = format!("--filename={}", directory.join("f").to_str().unwrap());
    // A read of a MiB from the page cache is a copy, whose time the submission does not have.
    let job = [file.as_str(), "--size=16m", "--bs=1m", "--rw=randread", "--norandommap", "--number_ios=2000"];
    let cpu = |engine: &str, more: &[&str]| {
        let document = perf_json(&[&job[..], &[engine], more].concat());
        let job = &document["jobs"][0];
        assert_eq!(job["read"]["total_ios"], 2000);
        (job["cpu_ns_per_io"].as_f64().unwrap(), job["sys_cpu"].as_f64().unwrap())
    };
    let (one_at_a_time, _) = cpu("--ioengine=psync", &[]);
    for thread in ["--thread=0", "--thread=1"] {
        let (by_threads, system) = cpu("--ioengine=posixaio", &["--iodepth=8", thread]);
        assert!(by_threads > 0.5 * one_at_a_time, "{by_threads} ns, psync {one_at_a_time} ns");
        assert!(system > 20.0, "{system} %");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn job_files_run_in_stonewall_order_and_write_logs() {
    let directory = scratch("jobfile");
    let path = |name: &str| directory.join(name).to_str().unwrap().to_string();
    let job = format!(
        "[global]\nfilename={}\nsize=1m\nioengine=libaio\niodepth=4\n\
         [fill]\nrw=write\nverify=crc32c\nfsync=64\n[check]\nstonewall\nrw=randread\nwrite_lat_log={}\n\
         bssplit=4k/50:8k/50\n[rate]\nstonewall\nrw=randread\nrate_iops=2000\nrate_process=poisson\n\
         number_ios=100\n",
        path("f"),
        path("log/l")
    );
    std::fs::write(path("j.fio"), job).unwrap();
    let document = perf_json(&[&path("j.fio")]);
    let jobs = document["jobs"].as_array().unwrap();
    let names: Vec<&str> = jobs.iter().map(|job| job["jobname"].as_str().unwrap()).collect();
    assert_eq!(names, ["fill", "check", "rate"]);
    let (writes, flushes) = (&jobs[0]["write"]["total_ios"], &jobs[0]["sync"]["total_ios"]);
    assert_eq!((writes, flushes), (&json!(256), &json!(3)), "none follows the last write");
    assert_eq!((&jobs[0]["read"]["total_ios"], &jobs[1]["groupid"]), (&json!(256), &json!(1)));
    let read = jobs[1]["read"]["total_ios"].as_u64().unwrap();
    let log = std::fs::read_to_string(path("log/l_lat.2.log")).unwrap();
    assert_eq!(log.lines().count() as u64, read);
    // 100 I/Os at 2000 a second take at least 50 ms on average, however busy the machine is.
    let (paced, elapsed_ms) = (&jobs[2]["read"]["total_ios"], jobs[2]["read"]["runtime"].as_u64().unwrap());
    assert!(*paced == 100 && elapsed_ms >= 30 && jobs[2]["open_loop"] == true, "{paced} in {elapsed_ms} ms");
    assert!(jobs[2]["read"]["lat_ns"]["percentile"].is_object());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn lab_import_prints_fio_results_as_csv() {
    let directory = scratch("import");
    let path = directory.join("out.json");
    let document = perf_json(&["--ioengine=null", "--rw=randread", "--number_ios=1000", "--name=a,b"]);
    std::fs::write(&path, format!("a warning\n{document:#}\n")).unwrap();
    let table = text(&ringbolt(&["lab", "import", path.to_str().unwrap()]).stdout);
    let mut lines = table.lines();
    assert!(lines.next().unwrap().starts_with("jobname,group,direction,rw,engine,bs_kib,procs,qd,iops"));
    assert!(lines.next().unwrap().starts_with("\"a,b\",0,read,randread,null,4,1,1,"), "{table}");
    // A file of another program is named, and those after it are imported, told apart by their paths.
    let (other, foreign) = (directory.join("again/out.json"), directory.join("foreign.json"));
    std::fs::create_dir_all(other.parent().unwrap()).unwrap();
    std::fs::copy(&path, &other).unwrap();
    std::fs::write(&foreign, "{\"version\": 1}").unwrap();
    let files = [&path, &foreign, &other].map(|path| path.to_str().unwrap());
    let output = ringbolt(&[&["lab", "import"], &files[..]].concat());
    let (table, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("foreign.json holds no fio results") && stderr.contains("1 of 3 files"),
        "{stderr}"
    );
    let sources: Vec<&str> = table.lines().skip(1).filter_map(|line| line.rsplit(',').next()).collect();
    assert_eq!(sources, [files[0], files[2]], "{table}");
    // A run that failed is no result.
    let failed = directory.join("failed.json");
    let mut broken = document.clone();
    broken["jobs"][0]["error"] = json!(42);
    std::fs::write(&failed, broken.to_string()).unwrap();
    let output = ringbolt(&["lab", "import", path.to_str().unwrap(), failed.to_str().unwrap()]);
    let (table, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("failed.json: job a,b failed") && stderr.contains("os error 42"), "{stderr}");
    assert!(table.lines().nth(1).unwrap().ends_with(",0,out.json"), "{table}");
    assert!(table.lines().nth(2).unwrap().ends_with(",1,1,,,,,,,,,,,,,,,,,,42,failed.json"), "{table}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn verify_finds_corrupted_data() {
    let directory = scratch("damage");
    let config = directory.join("error.json");
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let file = json!({ "subsystems": [{ "subsystem": "bdev", "config": [
        call("bdev_malloc_create", json!({ "name": "M", "num_blocks": 1024, "block_size": 512 })),
        call("bdev_error_create", json!({ "base_name": "M" })),
        call("bdev_error_inject_error", json!({ "name": "EE_M", "io_type": "write",
            "error_type": "corrupt_data", "corrupt_offset": 700, "corrupt_value": 255, "num": 1 })),
    ]}]});
    std::fs::write(&config, file.to_string()).unwrap();
    let config = config.to_str().unwrap();
    let job = ["perf", "-c", config, "--rw=write", "--iodepth=4", "--verify"];
    let (status, stderr) = failure(&[job.as_slice(), &["--filename=EE_M"]].concat());
    assert_eq!(status, 1, "{stderr}");
    // The first write starts at LBA 0 and has one header.
    let message = "1 block(s) wrong; the first: LBA 0: content does not match the crc32c in fio's header";
    assert!(stderr.contains(message), "{stderr}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn demo_once_exits_with_success() {
    let output = ringbolt(&["demo", "--once", "--runtime=300ms"]);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    for part in
        ["device: ", "IOPS", "CPU per I/O: target ", ", 0 wrong", "nvme connect -t tcp -a 127.0.0.1 -s "]
    {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
}

#[test]
fn a_store_survives_a_killed_server() {
    let directory = scratch("objects");
    let image = directory.join("store.img");
    let image = image.to_str().unwrap();
    let format = ringbolt(&["objects", "format", "--size=64m", "--partitions=2", image]);
    assert!(format.status.success(), "{}", text(&format.stderr));
    let (status, stderr) = failure(&["objects", "format", image]);
    assert!(status == 1 && stderr.contains("force formats it again"), "{stderr}");
    let config = json!({"subsystems": [
        {"subsystem": "bdev", "config": [
            {"method": "bdev_uring_create", "params": {"name": "Disk", "filename": image}}]},
        {"subsystem": "store", "config": [{"method": "store_open", "params": {"bdev_name": "Disk"}}]}]});
    let server = ServerProcess::configured(&directory, "first", &config);
    let socket = server.socket.clone();
    let images = |arguments: &[&str]| {
        let output = ringbolt(&[&["image"], arguments, &["-r", socket.to_str().unwrap()]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    assert_eq!(images(&["create", "vol", "16m"]), "store/vol\n");
    images(&["create", "other", "1m"]);
    images(&["resize", "other", "2m"]);
    let listed: Value = serde_json::from_str(&images(&["list", "--json"])).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["size"]), (&json!("other"), &json!(2 << 20)));
    images(&["remove", "other"]);
    assert!(images(&["list"]).contains("store/vol") && !images(&["list"]).contains("other"));
    server.kill();
    // The kernel closes the files of the killed server's io_uring some time after its end.
    let dump = loop {
        let dump = ringbolt(&["objects", "dump", "--json", image]);
        if !text(&dump.stderr).contains("whose files are still open") {
            break dump;
        }
    };
    assert!(dump.status.success(), "{}", text(&dump.stderr));
    let dump: Value = serde_json::from_slice(&dump.stdout).unwrap();
    assert_eq!(dump["images"][0]["name"], "vol");
    let server = ServerProcess::configured(&directory, "second", &config);
    assert_eq!(server.ok(&["bdev_get_bdevs", "name=store/vol"])[0]["num_blocks"], 32768);
    server.stop();
    let check = ringbolt(&["objects", "check", image]);
    assert!(check.status.success() && text(&check.stdout).contains("0 problems"), "{}", text(&check.stdout));
    std::fs::File::options().write(true).open(image).unwrap().set_len(32 << 20).unwrap();
    let (status, stderr) = failure(&["objects", "check", image]);
    assert!(status == 1 && stderr.contains("it was truncated"), "{stderr}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn log_lines_have_the_time_unless_they_go_to_the_journal() {
    let directory = scratch("log");
    let path = directory.join("log");
    let line = "NOTICE: rpc: fsdev_set_opts changes nothing else";
    for in_journal in [false, true] {
        let file = std::fs::File::create(&path).unwrap();
        let device = file.metadata().unwrap();
        // As systemd sets it.
        let journal = format!("{}:{}", device.dev(), device.ino() + u64::from(!in_journal));
        let server = ServerProcess::start_with(&directory, "log", &[], |command| {
            command.stderr(file).env("JOURNAL_STREAM", journal);
        });
        server.ok(&["fsdev_set_opts"]);
        server.ok(&["log_enable_timestamps", &format!("enabled={in_journal}")]);
        server.ok(&["fsdev_set_opts"]);
        assert_eq!(server.stop(), Some(0));
        let log = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = log.lines().filter(|it| it.contains(line)).collect();
        let has_time = |it: &str| {
            let (time, rest) = it.split_once(' ').unwrap();
            // 2026-02-28T12:34:56.789Z
            rest.starts_with(line) && time.len() == 24 && time.ends_with('Z') && time.as_bytes()[10] == b'T'
        };
        let timed: Vec<bool> = lines.iter().map(|it| has_time(it)).collect();
        assert_eq!(timed, [!in_journal, in_journal], "{log}");
        assert!(lines[usize::from(!in_journal)].starts_with(line), "{log}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn the_flag_of_a_target_logs_its_connections() {
    let directory = scratch("connections");
    let path = directory.join("log");
    let server = ServerProcess::start_with(&directory, "connections", &[], |command| {
        command.stderr(std::fs::File::create(&path).unwrap());
    });
    let socket = directory.join("nbd");
    server.ok(&["bdev_null_create", "name=A", "num_blocks=8", "block_size=4096"]);
    server.ok(&["nbd_export_create", "bdev_name=A", &format!("path={}", socket.display())]);
    server.ok(&["log_set_flag", "flag=nbd"]);
    server.ok(&["log_set_print_level", "level=INFO"]);
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    drop(stream);
    assert_eq!(server.stop(), Some(0));
    let log = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> =
        log.lines().filter_map(|line| line.split_once("INFO: nbd: ")).map(|it| it.1).collect();
    let [connected, closed] = lines.as_slice() else { panic!("{log}") };
    assert!(connected.ends_with(": connected, on core 0") && connected.contains("nbd"), "{log}");
    assert!(closed.ends_with(": closed by the peer") || closed.ends_with("last answers"), "{log}");
}
