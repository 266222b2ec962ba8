//! The shell blocks of documents, run from top to bottom in one shell.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::rig::{scratch, text};

/// A block that begins so is left out: it needs root, a guest, a device or a build.
const LEFT_OUT: &str = "# Needs ";

/// The most seconds for the blocks of a document, on a machine that builds keep busy.
const SECONDS_MAX: &str = "120";

/// The shell blocks of a document. Every fenced block has to name its language.
fn blocks(document: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.strip_prefix("```") else { continue };
        assert!(!language.is_empty(), "a fenced block without a language");
        let block: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("```")).collect();
        if language == "sh" {
            all.push(block.join("\n") + "\n");
        }
    }
    all
}

/// Runs a document with ports of this test, and with an RPC socket of its own in the place of the default.
/// Returns what it printed.
fn run(name: &str, document: &str, ports: &[&str], run_min: usize) -> String {
    let directory = scratch(name);
    let bin = directory.join("bin");
    std::fs::create_dir(&bin).unwrap();
    let program = env!("CARGO_BIN_EXE_ringbolt");
    let socket = directory.join("rpc.sock");
    let wrapper = format!(
        "#!/bin/sh\ncase $1 in\n\
         image) exec '{program}' \"$@\" -r '{socket}' ;;\n\
         serve|rpc|trace) command=$1; shift; exec '{program}' $command -r '{socket}' \"$@\" ;;\n\
         lvol) command=$2; shift 2; exec '{program}' lvol $command -r '{socket}' \"$@\" ;;\n\
         esac\nexec '{program}' \"$@\"\n",
        socket = socket.display()
    );
    std::fs::write(bin.join("ringbolt"), wrapper).unwrap();
    std::fs::set_permissions(bin.join("ringbolt"), std::fs::Permissions::from_mode(0o755)).unwrap();

    let all = blocks(document);
    let (left_out, blocks): (Vec<String>, Vec<String>) =
        all.into_iter().partition(|block| block.starts_with(LEFT_OUT));
    assert!(blocks.len() >= run_min, "{name}: {} blocks run, {} are left out", blocks.len(), left_out.len());
    // Servers end with the shell, however that ends.
    let mut script = "set -eu\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n".to_string();
    script.push_str(&blocks.concat());
    let listeners: Vec<TcpListener> =
        ports.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    // By way of names, because a new port may contain the digits of another one.
    for (index, port) in ports.iter().enumerate() {
        assert!(script.contains(port), "{name}: no block has the port {port}");
        script = script.replace(port, &format!("{{port {index}}}"));
    }
    for (index, listener) in listeners.iter().enumerate() {
        let port = listener.local_addr().unwrap().port().to_string();
        script = script.replace(&format!("{{port {index}}}"), &port);
    }
    drop(listeners);
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let output = Command::new("timeout")
        .args([SECONDS_MAX, "bash", "-c", &script])
        .current_dir(&directory)
        .env("PATH", path)
        .output()
        .unwrap();
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{name}: {}\n{printed}\n{}", output.status, text(&output.stderr));
    std::fs::remove_dir_all(directory).unwrap();
    printed
}

#[test]
fn the_readme_runs_from_top_to_bottom_in_one_shell() {
    let readme = include_str!("../../../../README.md");
    let printed = run("readme", readme, &["4420", "4421"], 4);
    for part in ["10240 blocks checked, 0 wrong", "\"Malloc1\"", "burst: rw=randwrite", "steady: rw=randread"]
    {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert_eq!(printed.lines().filter(|line| *line == "ready").count(), 2, "{printed}");
}

#[test]
fn the_guide_to_first_volumes_runs_from_top_to_bottom_in_one_shell() {
    let guide = include_str!("../../../../docs/operator/first-volume.md");
    let printed = run("first-volume", guide, &["4420", "3260"], 5);
    for part in ["store/vol", "0 problems", "nbd+unix:///scratch", " blocks checked, 0 wrong"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
}

#[test]
fn the_page_of_the_dma_engine_runs_from_top_to_bottom_in_one_shell() {
    let printed = run("ioat", include_str!("../../../../docs/IOAT.md"), &["4420"], 2);
    for part in ["\"copy\": \"ioat\"", "\"state\": \"in use\"", " blocks checked, 0 wrong"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    // By the server, and by the two jobs that measure.
    let executed = printed.lines().find_map(|line| line.strip_suffix(" descriptors were executed"));
    assert!(executed.unwrap().parse::<u64>().unwrap() > 20_000, "{printed}");
}

#[test]
fn blocks_are_found_by_their_language() {
    let document = "a\n```sh\nb\n\nc\n```\n```json\nd\n```\n```sh\n# Needs root\n```\n";
    assert_eq!(blocks(document), ["b\n\nc\n", "# Needs root\n"]);
}
