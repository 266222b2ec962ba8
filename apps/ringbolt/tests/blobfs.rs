//! `ringbolt blobfs` on a store in a file.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rig::{ringbolt, scratch, text};
use serde_json::Value;

/// Exit status, standard output and standard error.
fn blobfs(arguments: &[&str]) -> (i32, String, String) {
    let output = ringbolt(&[&["blobfs"], arguments].concat());
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn done(arguments: &[&str]) -> String {
    let (status, out, error) = blobfs(arguments);
    assert_eq!(status, 0, "{arguments:?}: {error}");
    out
}

fn made(directory: &Path) -> String {
    let image = directory.join("files.img").to_str().unwrap().to_string();
    done(&["format", "--size=64m", &image]);
    image
}

#[test]
fn files_are_copied_in_listed_printed_and_removed() {
    let directory = scratch("blobfs-files");
    let image = made(&directory);
    let (source, copy) = (directory.join("source"), directory.join("copy"));
    let content: Vec<u8> = (0..3_000_001u32).map(|at| (at * 7 / 3) as u8).collect();
    std::fs::write(&source, &content).unwrap();
    done(&["mkdir", &image, "/db"]);
    done(&["cp", &image, source.to_str().unwrap(), ":/db/f"]);
    done(&["cp", &image, ":/db/f", ":/g"]);
    done(&["cp", &image, ":/g", copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).unwrap() == content);
    let printed = ringbolt(&["blobfs", "cat", &image, "db/f"]).stdout;
    assert!(printed == content);
    let listed: Value = serde_json::from_str(&done(&["ls", "--json", &image])).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["directory"]), (&"db".into(), &true.into()));
    assert_eq!((&listed[1]["name"], &listed[1]["bytes"]), (&"g".into(), &3_000_001.into()));
    assert_eq!(listed[1]["allocated_bytes"], 3 << 20);
    assert!(done(&["ls", &image, "db"]).lines().nth(1).unwrap().contains("3000001"));
    assert_eq!(
        done(&["check", &image]).lines().last(),
        Some("3 files and directories, 57 MiB free, 0 problems")
    );
    let (status, _, error) = blobfs(&["rm", &image, "db"]);
    assert!(status == 1 && error.contains("the directory is not empty"), "{error}");
    done(&["rm", "--recursive", &image, "db"]);
    done(&["rm", &image, "g"]);
    assert_eq!(done(&["ls", "--json", &image]).trim(), "[]");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn what_is_no_store_or_is_in_use_is_refused_with_what_to_do() {
    let directory = scratch("blobfs-refused");
    let image = made(&directory);
    let (status, _, error) = blobfs(&["format", &image]);
    assert!(status == 1 && error.contains("there is something on it; --force overwrites it"), "{error}");
    let file = File::options().read(true).write(true).open(&image).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (status, _, error) = blobfs(&["ls", &image]);
    assert!(status == 4 && error.contains("has it open; end that first"), "{error}");
    drop(file);
    let (status, _, error) = blobfs(&["cat", &image, "none"]);
    assert!(status == 1 && error.contains("none: there is no such file or directory"), "{error}");
    let (status, _, error) = blobfs(&["cp", &image, "a", "b"]);
    assert!(status == 2 && error.contains("paths in the store begin with a colon"), "{error}");
    let other = directory.join("other").to_str().unwrap().to_string();
    std::fs::write(&other, vec![0; 1 << 20]).unwrap();
    let (status, _, error) = blobfs(&["ls", &other]);
    assert!(status == 1 && error.contains("`ringbolt blobfs format` makes a store"), "{error}");
    // The type is at byte 56 of the super block; the CRC is then wrong.
    File::options().write(true).open(&image).unwrap().write_all_at(b"X", 56).unwrap();
    assert_eq!(blobfs(&["check", &image]).0, 1);
    std::fs::remove_dir_all(directory).unwrap();
}

/// Unmounts when a test ends, however it does.
struct Mounted(std::process::Child);

impl Drop for Mounted {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn a_mounted_store_is_read_by_ordinary_programs() {
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        println!("SKIPPED: /dev/fuse cannot be opened");
        return;
    }
    let directory = scratch("blobfs-mount");
    let image = made(&directory);
    let (source, mounted) = (directory.join("source"), directory.join("mounted"));
    let content: Vec<u8> = (0..3_000_001u32).map(|at| (at * 7 / 3) as u8).collect();
    std::fs::write(&source, &content).unwrap();
    std::fs::create_dir(&mounted).unwrap();
    done(&["mkdir", &image, "/db"]);
    done(&["cp", &image, source.to_str().unwrap(), ":/db/f"]);
    for name in ["/db/d0", "/db/d1"] {
        done(&["mkdir", &image, name]);
    }
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ringbolt"))
        .args(["blobfs", "mount", &image, mounted.to_str().unwrap()])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    if line.is_empty() {
        let error = text(&child.wait_with_output().unwrap().stderr);
        assert!(error.contains("not permitted"), "{error}");
        println!("SKIPPED: {error}");
        return;
    }
    let mut child = Mounted(child);
    assert!(line.contains("read-only"), "{line}");
    assert!(std::fs::read(mounted.join("db/f")).unwrap() == content);
    let mut names: Vec<String> = std::fs::read_dir(mounted.join("db"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["d0", "d1", "f"]);
    let metadata = std::fs::metadata(mounted.join("db/f")).unwrap();
    assert!(metadata.is_file() && metadata.len() == 3_000_001);
    assert_eq!(std::fs::read(mounted.join("db/g")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let refused = std::fs::write(mounted.join("db/g"), b"x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    // The store is in use.
    let (status, _, error) = blobfs(&["rm", &image, "/db/f"]);
    assert!(status != 0 && error.contains("has it open"), "{error}");
    let pid = rustix::process::Pid::from_child(&child.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(child.0.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(&mounted).unwrap().count(), 0);
    done(&["rm", &image, "/db/f"]);
    std::fs::remove_dir_all(directory).unwrap();
}
