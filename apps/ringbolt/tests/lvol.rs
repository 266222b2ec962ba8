//! `ringbolt lvol` against a server.
#![allow(clippy::unwrap_used)]

mod rig;

use std::fs::File;
use std::os::unix::fs::FileExt;

use rig::{ServerProcess, ringbolt, scratch, text};

/// Exit status and standard error.
fn lvol(server: &ServerProcess, arguments: &[&str]) -> (i32, String) {
    let [command, rest @ ..] = arguments else { panic!() };
    let socket = server.socket.to_str().unwrap();
    let output = ringbolt(&[&["lvol", *command, "-r", socket], rest].concat());
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn a_store_is_not_created_over_something_without_force() {
    let directory = scratch("lvol-force");
    let server = ServerProcess::start(&directory, "server", &[]);
    // A signature of ext4, the end of a partition table, a blobstore, the header of a GUID partition table.
    for (name, at, content) in [
        ("ext4", 1080, &b"\x53\xef"[..]),
        ("mbr", 510, b"\x55\xaa"),
        ("blob", 0, b"SPDKBLOB"),
        ("gpt", 512, b"EFI PART"),
    ] {
        let path = directory.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(content, at).unwrap();
        server.ok(&[
            "bdev_aio_create",
            &format!("filename={}", path.display()),
            &format!("name={name}"),
            "block_size=512",
        ]);
        let (status, error) = lvol(&server, &["create", "--on", name, name]);
        assert!(status != 0 && error.contains(&format!("there is something on {name}")), "{status} {error}");
        assert!(error.contains("--force"), "{error}");
        let mut found = vec![0; content.len()];
        File::open(&path).unwrap().read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, content, "{name} is as it was");
        let (status, error) = lvol(&server, &["create", "--on", name, "--force", name]);
        assert_eq!(status, 0, "{error}");
    }
    server.ok(&["bdev_malloc_create", "name=new", "num_blocks=131072", "block_size=512"]);
    assert_eq!(lvol(&server, &["create", "--on", "new", "new"]), (0, String::new()));
    let (status, error) = lvol(&server, &["create", "--force", "new/v", "4m"]);
    assert!(status == 2 && error.contains("--on"), "{error}");
    assert_eq!(server.stop(), Some(0));
    std::fs::remove_dir_all(directory).unwrap();
}
