use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use rustix::fs::{CWD, FileType as Kind, Mode};

use super::*;

/// A directory for a test, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("ringbolt-secret-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn file(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no FIFOs and sockets")]
fn files_that_are_refused_say_what_to_do_and_nothing_of_the_secret() {
    let directory = Directory::new("refused");
    let path = |name: &str| directory.0.join(name);
    directory.file("good", "swordfish", 0o600);
    directory.file("long", "swordfish!", 0o600);
    directory.file("empty", "", 0o600);
    symlink("good", path("link")).unwrap();
    symlink("gone", path("dangling")).unwrap();
    fs::create_dir(path("directory")).unwrap();
    rustix::fs::mknodat(CWD, path("fifo"), Kind::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let _listener = UnixListener::bind(path("socket")).unwrap();
    for (file, expected) in [
        (path("dangling"), "No such file or directory (os error 2)"),
        (
            path("directory"),
            "it is not a regular file, but a directory: name a file that has only the secret",
        ),
        (path("fifo"), "it is not a regular file, but a FIFO: name a file that has only the secret"),
        (path("socket"), "it is not a regular file, but a socket: name a file that has only the secret"),
        ("/dev/zero".into(), "it is not a regular file, but a device: name a file that has only the secret"),
        (path("long"), "it has more than 9 bytes, and is to have only the secret"),
        (path("empty"), "it is empty, and is to have the secret"),
        (path("gone"), "No such file or directory (os error 2)"),
        (path("good").join("x"), "Not a directory (os error 20)"),
    ] {
        let error = Secret::read(&file, 9).unwrap_err();
        assert_eq!(error.to_string(), expected, "{}", file.display());
        assert!(!format!("{error:?}").contains("fish"), "{error:?}");
        assert_eq!(io::Error::from(error).to_string(), expected);
    }
    for file in ["good", "link"] {
        assert_eq!(Secret::read(&path(file), 9).unwrap(), Secret::new("swordfish"));
    }
}

#[test]
fn a_file_that_others_may_use_is_refused_and_one_that_its_owner_may_read_is_not() {
    let directory = Directory::new("modes");
    for mode in [0o644, 0o640, 0o620, 0o610, 0o604, 0o602, 0o601, 0o660] {
        let error = Secret::read(&directory.file("a", "swordfish", mode), 9).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("others than its owner may use it, mode {mode:03o}: chmod 600")
        );
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::PermissionDenied);
        fs::remove_file(directory.0.join("a")).unwrap();
    }
    for mode in [0o600, 0o400, 0o700] {
        assert!(Secret::read(&directory.file(&format!("{mode}"), "swordfish", mode), 9).is_ok(), "{mode:o}");
    }
}

#[test]
fn a_file_belongs_to_this_user_or_to_root() {
    for (owner, user, refused) in [(0, 0, false), (0, 7, false), (7, 7, false), (8, 7, true), (7, 0, true)] {
        let error = check_access(0o100_600, owner, user).err().map(|error| error.to_string());
        let expected =
            refused.then(|| format!("it belongs to user {owner}, who could replace it: chown {user}"));
        assert_eq!(error, expected);
    }
    // Only root can make a file another user's.
    if rustix::process::geteuid().is_root() {
        let directory = Directory::new("owner");
        let path = directory.file("a", "swordfish", 0o600);
        std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
        let error = Secret::read(&path, 9).unwrap_err().to_string();
        assert_eq!(error, "it belongs to user 12345, who could replace it: chown 0");
    }
}

#[test]
fn a_new_file_is_its_owners_alone_and_replaces_none() {
    let directory = Directory::new("new");
    let path = directory.0.join("a");
    let secret = Secret::new("swordfish");
    secret.write_new(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(Secret::read(&path, 9).unwrap(), secret);
    assert_eq!(Secret::new("other").write_new(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(Secret::read(&path, 9).unwrap(), secret);
}
