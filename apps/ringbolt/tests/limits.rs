//! `ringbolt serve` under limits of the operating system: it works, or says which limit to raise.
#![allow(clippy::unwrap_used)]

mod rig;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rig::{scratch, text};
use serde_json::json;

/// A user without privileges: root's memory is not counted.
const UNPRIVILEGED: u32 = 65534;

/// Runs a server of two reactors with a bdev on a file until it is ready or fails; `None` where that cannot be tried.
fn serve(directory: &Path, locked_kib: u32) -> Option<(i32, String)> {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -l {locked_kib} && exec \"$@\""), "sh"])
        .args([
            env!("CARGO_BIN_EXE_ringbolt"),
            "serve",
            "--until-stdin-closes",
            "--cores=0-1",
            "-r",
            "s",
            "-c",
            "c",
        ])
        .current_dir(directory)
        .stdin(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    let output = command.output().ok()?;
    let both = text(&output.stdout) + &text(&output.stderr);
    let not_here = ["not found", "ermission denied", "ulimit:", "is not among"];
    if let Some(line) = both.lines().find(|line| not_here.iter().any(|reason| line.contains(reason))) {
        println!("SKIPPED a limit of {locked_kib} KiB: {line}");
        return None;
    }
    Some((output.status.code().unwrap(), both))
}

#[test]
fn too_little_locked_memory_is_named_and_a_server_that_starts_can_use_its_files() {
    let directory = scratch("limits");
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).unwrap();
    let nqn = "nqn.2025-01.io.ringbolt:limits";
    let uring = json!({ "name": "F", "filename": "file", "block_size": 512 });
    let bdev = json!([{ "method": "bdev_uring_create", "params": uring }]);
    let nvmf = json!([
        { "method": "nvmf_create_transport", "params": { "trtype": "TCP" } },
        { "method": "nvmf_create_subsystem", "params": { "nqn": nqn, "allow_any_host": true } },
        { "method": "nvmf_subsystem_add_ns", "params": { "nqn": nqn, "namespace": { "bdev_name": "F" } } },
    ]);
    let config = json!({ "subsystems": [{ "subsystem": "bdev", "config": bdev }, { "subsystem": "nvmf", "config": nvmf }] });
    std::fs::write(directory.join("c"), config.to_string()).unwrap();
    let file = directory.join("file");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    // Enough for no ring, for that of one reactor, and for both, wherever the kernel of this machine draws the lines.
    for locked_kib in [64, 128, 256, 384, 512, 768, 1024, 2048] {
        let Some((status, printed)) = serve(&directory, locked_kib) else { break };
        match status {
            0 => assert!(!printed.contains("cannot be used"), "{locked_kib} KiB: {printed}"),
            _ => assert!(status == 3 && printed.contains("RLIMIT_MEMLOCK"), "{locked_kib} KiB: {printed}"),
        }
    }
    std::fs::remove_dir_all(directory).unwrap();
}
