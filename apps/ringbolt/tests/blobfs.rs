//! `ringbolt blobfs` on a store in a file.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
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
        Some("3 files and directories, 57 MiB free, 5 of 160 metadata pages used, 0 problems")
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
    assert!(status == 1 && error.contains("there is a blobstore on it; --force overwrites it"), "{error}");
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

#[test]
fn a_store_is_opened_that_another_closes_a_moment_later() {
    let directory = scratch("blobfs-late");
    let image = made(&directory);
    let file = File::open(&image).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringbolt"));
    let mut child = command.args(["blobfs", "mkdir", &image, "/d"]).spawn().unwrap();
    // It waits for the lock when it has the image open.
    let files = format!("/proc/{}/fd", child.id());
    let is_open = || {
        let files = std::fs::read_dir(&files).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.any(|target| target == Path::new(&image))
    };
    while !is_open() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    drop(file);
    assert!(child.wait().unwrap().success());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_copy_into_the_store_destroys_no_other_file() {
    let directory = scratch("blobfs-temporary");
    let image = made(&directory);
    let write = |name: &str, content: &[u8]| {
        let path = directory.join(name).to_str().unwrap().to_string();
        std::fs::write(&path, content).unwrap();
        path
    };
    let (small, other) = (write("small", b"small"), write("other", b"other"));
    let cat = |path: &str| done(&["cat", &image, path]);
    done(&["cp", &image, &other, ":/x.part"]);
    done(&["mkdir", &image, "/y.part"]);
    for to in [":/x", ":/y", ":/x/"] {
        done(&["cp", &image, &small, to]);
    }
    assert_eq!((cat("/x"), cat("/x.part"), cat("/y")), ("small".into(), "other".into(), "small".into()));
    // From what was the temporary file once.
    done(&["cp", &image, ":/x.part", ":/x"]);
    assert_eq!((cat("/x"), cat("/x.part")), ("other".into(), "other".into()));
    // The longest name that a store has, and one that is longer.
    let longest = format!(":/{}", "n".repeat(255));
    done(&["cp", &image, &small, &longest]);
    assert_eq!(cat(&longest[1..]), "small");
    let (status, _, error) = blobfs(&["cp", &image, &small, &format!(":/{}", "n".repeat(256))]);
    assert!(status == 1 && error.contains("the name is too long"), "{error}");
    let (status, _, error) = blobfs(&["cp", &image, &small, ":/y.part"]);
    assert!(status == 1 && error.contains("it is a directory"), "{error}");
    // More than there is space for leaves what was there, and nothing else.
    let list = || done(&["ls", "--json", &image]);
    let before = list();
    let large = directory.join("large").to_str().unwrap().to_string();
    File::create(&large).unwrap().set_len(80 << 20).unwrap();
    let (status, _, error) = blobfs(&["cp", &image, &large, ":/x"]);
    assert!(status == 1 && error.contains("the store is full"), "{error}");
    assert_eq!((list(), cat("/x")), (before, "other".into()));
    done(&["check", &image]);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_device_that_lacks_a_part_is_not_said_to_be_free_to_be_formatted() {
    let directory = scratch("blobfs-short");
    let image = made(&directory);
    File::options().write(true).open(&image).unwrap().set_len(60 << 20).unwrap();
    let config = directory.join("bdevs.json").to_str().unwrap().to_string();
    let with_blocks = |bytes: u32| {
        let params = serde_json::json!({ "name": "Disk", "filename": image, "block_size": bytes });
        let call = serde_json::json!({ "method": "bdev_aio_create", "params": params });
        let bdevs = serde_json::json!({ "subsystems": [{ "subsystem": "bdev", "config": [call] }] });
        std::fs::write(&config, bdevs.to_string()).unwrap();
    };
    with_blocks(4096);
    for arguments in [&["check", &image][..], &["mkdir", "--config", &config, "Disk", "/d"]] {
        let (status, _, error) = blobfs(arguments);
        assert!(status == 1 && error.contains("its device only 62914560; a part of the device"), "{error}");
        assert!(!error.contains("format"), "{error}");
    }
    with_blocks(8192);
    let (status, _, error) = blobfs(&["ls", "--config", &config, "Disk"]);
    assert!(status == 4 && error.contains("Disk: its blocks have 8192 bytes"), "{status}: {error}");
    std::fs::remove_dir_all(directory).unwrap();
}

/// Detaches a loop device when a test ends.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_loop_device_of_a_file_in_use_is_refused() {
    let directory = scratch("blobfs-loop");
    let image = made(&directory);
    let made = std::process::Command::new("losetup").args(["--find", "--show", &image]).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else {
        return println!("SKIPPED: losetup sets up no loop device here");
    };
    let device = Loop(text(&made.stdout).trim().to_string());
    let file = File::open(&image).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let holder = format!("process {} (", std::process::id());
    for arguments in [
        &["blobfs", "format", "--force", &device.0][..],
        &["blobfs", "ls", &device.0],
        &["blob", "repair", "--apply", &device.0],
        &["blob", "check", &device.0],
    ] {
        let output = ringbolt(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{arguments:?}: {error}");
        assert!(
            error.contains(&holder) && error.contains(&format!("on its file {image} has it open")),
            "{error}"
        );
    }
    drop(file);
    done(&["mkdir", &device.0, "/d"]);
    // The store is on the file behind the destination.
    std::fs::write(directory.join("source"), "content").unwrap();
    done(&["cp", &image, directory.join("source").to_str().unwrap(), ":/f"]);
    let (status, _, error) = blobfs(&["cp", &image, ":/f", &device.0]);
    assert!(status == 1 && error.contains("has it open"), "{error}");
    assert_eq!(done(&["cat", &image, "/f"]), "content");
    drop(device);
    std::fs::remove_dir_all(directory).unwrap();
}

/// The names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_copy_out_replaces_a_whole_file_or_nothing_and_never_the_store() {
    let directory = scratch("blobfs-out");
    let image = made(&directory);
    let path = |name: &str| directory.join(name).to_str().unwrap().to_string();
    std::fs::write(path("source"), "content").unwrap();
    done(&["cp", &image, &path("source"), ":/f"]);
    let store = std::fs::read(&image).unwrap();
    std::fs::hard_link(&image, path("hard")).unwrap();
    std::os::unix::fs::symlink(&image, path("soft")).unwrap();
    for to in [image.clone(), path("hard"), path("soft")] {
        let (status, _, error) = blobfs(&["cp", &image, ":/f", &to]);
        assert!(status == 1 && error.contains("the store itself is there"), "{to}: {error}");
    }
    assert!(std::fs::read(&image).unwrap() == store);
    // An old file stays if there is nothing to replace it with, and keeps its permissions if there is.
    std::fs::write(path("old"), "old").unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(path("old"), mode(0o640)).unwrap();
    std::os::unix::fs::symlink("old", path("link")).unwrap();
    assert_eq!(blobfs(&["cp", &image, ":/none", &path("old")]).0, 1);
    assert_eq!(std::fs::read(path("old")).unwrap(), b"old");
    done(&["cp", &image, ":/f", &path("link")]);
    assert!(std::fs::symlink_metadata(path("link")).unwrap().is_symlink());
    let metadata = std::fs::metadata(path("old")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777, 0o640);
    done(&["cp", &image, ":/f", &path("new")]);
    for name in ["old", "new"] {
        assert_eq!(std::fs::read(path(name)).unwrap(), b"content", "{name}");
    }
    let (status, _, error) = blobfs(&["cp", &image, ":/f", directory.to_str().unwrap()]);
    assert!(status == 1 && error.contains("it is a directory"), "{error}");
    // What is no file is written as it is.
    assert_eq!(done(&["cp", &image, ":/f", "/dev/stdout"]), "content");
    let fifo = path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let reader = std::thread::spawn({
        let fifo = fifo.clone();
        move || std::fs::read(fifo).unwrap()
    });
    done(&["cp", &image, ":/f", &fifo]);
    assert_eq!(reader.join().unwrap(), b"content");
    assert_eq!(names(&directory), ["fifo", "files.img", "hard", "link", "new", "old", "soft", "source"]);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_copy_out_that_fails_keeps_the_old_file() {
    let directory = scratch("blobfs-out-fails");
    let image = made(&directory);
    let path = |name: &str| directory.join(name).to_str().unwrap().to_string();
    std::fs::write(path("source"), vec![7; 8 << 20]).unwrap();
    done(&["cp", &image, &path("source"), ":/f"]);
    std::fs::write(path("old"), "old").unwrap();
    // The shell's limit of a file's size, in blocks of 512 bytes or 1 KiB, and no signal of it.
    let script = "trap '' XFSZ; ulimit -f 1024; exec \"$@\"";
    let output = std::process::Command::new("sh")
        .args([
            "-c",
            script,
            "sh",
            env!("CARGO_BIN_EXE_ringbolt"),
            "blobfs",
            "cp",
            &image,
            ":/f",
            &path("old"),
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(path("old")).unwrap(), b"old");
    assert_eq!(names(&directory), ["files.img", "old", "source"]);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_store_has_as_many_names_as_it_is_made_for() {
    let directory = scratch("blobfs-names");
    let image = directory.join("files.img").to_str().unwrap().to_string();
    let made = done(&["format", "--size=64m", "--max-files=3", &image]);
    assert!(made.contains("metadata for 3 files"), "{made}");
    (0..6).for_each(|at| _ = done(&["mkdir", &image, &format!("/d{at}")]));
    for arguments in [&["mkdir", &image, "/more"][..], &["cp", &image, "Cargo.toml", ":/more"]] {
        let (status, _, error) = blobfs(arguments);
        assert!(status == 1 && error.contains("no metadata page is free"), "{error}");
        assert!(!error.contains("full") && error.contains("--max-files"), "{error}");
    }
    let listed = done(&["ls", &image]);
    assert_eq!(listed.lines().last(), Some("63 MiB free, 6 of 6 metadata pages used"));
    let checked: Value = serde_json::from_str(&done(&["check", "--json", &image])).unwrap();
    assert_eq!((&checked["metadata_pages"], &checked["metadata_pages_used"]), (&6.into(), &6.into()));
    // A file needs two.
    done(&["rm", "--recursive", &image, "/d3"]);
    assert_eq!(blobfs(&["cp", &image, "Cargo.toml", ":/more"]).0, 1);
    done(&["rm", "--recursive", &image, "/d4"]);
    done(&["cp", &image, "Cargo.toml", ":/more"]);
    for (files, name) in [("5000", "many.img"), ("4000000000", "too-many.img")] {
        let path = directory.join(name).to_str().unwrap().to_string();
        let (status, out, error) = blobfs(&["format", "--size=64m", &format!("--max-files={files}"), &path]);
        match name {
            "many.img" => assert!(status == 0 && out.contains("metadata for 500"), "{out}{error}"),
            _ => assert!(
                status == 1 && error.contains("metadata") && !Path::new(&path).exists(),
                "{out}{error}"
            ),
        }
    }
    // Clusters of another size leave the number as it is.
    let large = directory.join("large.img").to_str().unwrap().to_string();
    let made = done(&["format", "--size=64m", "--cluster=4m", &large]);
    assert!(made.contains("metadata for 80 files"), "{made}");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_format_that_is_refused_or_fails_changes_nothing() {
    let directory = scratch("blobfs-format");
    let path = |name: &str| directory.join(name).to_str().unwrap().to_string();
    let bytes = |name: &str| std::fs::metadata(path(name)).unwrap().len();
    let refused = |arguments: &[&str], with: &str| {
        let (status, _, error) = blobfs(&[&["format"], arguments].concat());
        assert!(status != 0 && error.contains(with), "{arguments:?}: {error}");
    };
    std::fs::write(path("used"), "used").unwrap();
    refused(&["--size=40m", &path("used")], "there is something on it, at byte 0; --force overwrites it");
    assert_eq!(std::fs::read(path("used")).unwrap(), b"used");
    let file = File::create(path("locked")).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    refused(&["--size=40m", "--force", &path("locked")], "has it open; end that first");
    assert_eq!(bytes("locked"), 0);
    drop(file);
    for (size, with) in [("64k", ""), ("1m", "no space for a file beside the metadata")] {
        refused(&[&format!("--size={size}"), &path("new")], with);
        refused(&[&format!("--size={size}"), &path("locked")], with);
    }
    refused(&["--size=64m", "--cluster=3", &path("new")], "");
    refused(&["--size=64m", "--cluster=3", &path("locked")], "");
    refused(&["--size=1", &path("used")], "has 4 bytes already");
    assert_eq!(bytes("locked"), 0);
    let fifo = path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    refused(&["--size=10m", &fifo], "neither a file nor a block device");
    assert_eq!(names(&directory), ["fifo", "locked", "used"]);
    done(&["format", "--size=64m", &path("locked")]);
    assert_eq!(bytes("locked"), 64 << 20);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn what_begins_late_or_is_at_the_end_of_a_device_is_not_overwritten() {
    const BYTES: u64 = 64 << 20;
    let directory = scratch("blobfs-foreign");
    let image = directory.join("image").to_str().unwrap().to_string();
    for (what, at, magic) in [
        ("the super block of btrfs", (64 << 10) + 64, &b"_BHRfS_M"[..]),
        ("that of UFS2 at its last place", (256 << 10) + 1372, &0x1954_0119_u32.to_le_bytes()),
        ("md metadata 0.90", (BYTES - (64 << 10)) & !0xffff, &0xa92b_4efc_u32.to_le_bytes()),
        ("md metadata 1.0", BYTES - 8192, &0xa92b_4efc_u32.to_le_bytes()),
        ("a backup GPT", BYTES - 512, b"EFI PART"),
    ] {
        let file = File::create(&image).unwrap();
        file.set_len(BYTES).unwrap();
        file.write_all_at(magic, at).unwrap();
        let first = at + magic.iter().position(|byte| *byte != 0).unwrap() as u64;
        let (status, _, error) = blobfs(&["format", &image]);
        let expected = format!("there is something on it, at byte {first}; --force overwrites it");
        assert!(status == 1 && error.contains(&expected), "{what}: {error}");
        let mut left = vec![0; magic.len()];
        File::open(&image).unwrap().read_exact_at(&mut left, at).unwrap();
        assert_eq!(left, magic, "{what}");
        done(&["format", "--force", &image]);
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// Unmounts when a test ends, however it does.
struct Mounted(std::process::Child);

impl Mounted {
    /// `None` where nothing can be mounted.
    fn new(image: &str, directory: &Path) -> Option<Mounted> {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ringbolt"))
            .args(["blobfs", "mount", image, directory.to_str().unwrap()])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let error = text(&child.wait_with_output().unwrap().stderr);
            assert!(error.contains("not permitted"), "{error}");
            println!("SKIPPED: {error}");
            return None;
        }
        assert!(line.contains("read-only"), "{line}");
        Some(Mounted(child))
    }

    fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The third ends it in any case.
        while let Ok(None) = self.0.try_wait() {
            self.terminate();
            std::thread::yield_now();
        }
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
    let Some(mut child) = Mounted::new(&image, &mounted) else { return };
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
    child.terminate();
    assert!(child.0.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(&mounted).unwrap().count(), 0);
    done(&["rm", &image, "/db/f"]);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_busy_mount_says_so_and_a_second_signal_detaches_it() {
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        println!("SKIPPED: /dev/fuse cannot be opened");
        return;
    }
    let directory = scratch("blobfs-busy");
    let image = made(&directory);
    let (source, mounted) = (directory.join("source"), directory.join("mounted"));
    std::fs::write(&source, vec![7; 3 << 20]).unwrap();
    done(&["cp", &image, source.to_str().unwrap(), ":/f"]);
    let (status, _, error) = blobfs(&["mount", &image, source.to_str().unwrap()]);
    assert!(status == 4 && error.contains("it is not a directory"), "{error}");
    std::fs::create_dir(&mounted).unwrap();
    let Some(mut child) = Mounted::new(&image, &mounted) else { return };
    let mut lines = BufReader::new(child.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut open = File::open(mounted.join("f")).unwrap();
    child.terminate();
    match lines.next() {
        Some(line) if line.contains("stays mounted") => assert!(line.contains("once more"), "{line}"),
        // Without root it is detached at once.
        other => return println!("SKIPPED: {other:?}"),
    }
    assert_eq!(names(&mounted), ["f"]);
    child.terminate();
    let line = lines.next().unwrap();
    assert!(line.contains("is detached"), "{line}");
    assert_eq!(names(&mounted), Vec::<String>::new());
    let mut content = Vec::new();
    open.read_to_end(&mut content).unwrap();
    assert!(content == [7; 3 << 20]);
    drop(open);
    assert!(child.0.wait().unwrap().success());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_store_on_a_bdev_of_a_configuration_is_read_and_changed() {
    let directory = scratch("blobfs-config");
    let image = made(&directory);
    let config = directory.join("files.json").to_str().unwrap().to_string();
    let source = directory.join("source");
    std::fs::write(&source, vec![7; 3 << 20]).unwrap();
    let base = serde_json::json!({ "method": "bdev_aio_create",
        "params": { "name": "Base", "filename": image, "block_size": 4096 } });
    let above = serde_json::json!({ "method": "bdev_passthru_create",
        "params": { "name": "Disk", "base_bdev_name": "Base" } });
    let calls = serde_json::json!({ "subsystems": [{ "subsystem": "bdev", "config": [base, above] }] });
    std::fs::write(&config, calls.to_string()).unwrap();
    let config = format!("--config={config}");
    done(&["mkdir", &config, "Disk", "/db"]);
    done(&["cp", &config, "Disk", source.to_str().unwrap(), ":/db/f"]);
    assert!(done(&["ls", &config, "Disk", "/db"]).contains("3145728"));
    assert!(done(&["check", &config, "Disk"]).contains("0 problems"));
    let (status, _, error) = blobfs(&["ls", &config, "Other"]);
    assert!(status == 4 && error.contains("makes no bdev Other; it makes Base, Disk"), "{error}");
    let (status, _, error) = blobfs(&["ls", "--config=/nonexistent.json", "Disk"]);
    assert!(status != 0 && error.contains("/nonexistent.json"), "{error}");
    // Another bdev may write its base at any moment.
    for arguments in [["ls", &config, "Base", "/db"], ["rm", &config, "Base", "/db/f"]] {
        let (status, _, error) = blobfs(&arguments);
        assert!(status == 4 && error.contains("claimed by passthru bdev Disk"), "{error}");
    }
    assert!(done(&["cat", &image, "/db/f"]).bytes().all(|byte| byte == 7));
    std::fs::remove_dir_all(directory).unwrap();
}
