//! Advisory locks of the files behind devices: readers share a file, a writer has it alone.
//!
//! [`lock`] takes a [`LockMode`] with `flock(2)` and otherwise returns the [`LockHolder`], by process. The
//! lock belongs to the open file description: it ends when all its descriptors are closed, those in an
//! io_uring included. Every program of this project that opens a file as a device, to serve or to measure it,
//! takes it.
//!
//! ```
//! use std::time::Duration;
//! let path = std::env::temp_dir().join(format!("file-lock-example-{}", std::process::id()));
//! let server = std::fs::File::create(&path)?;
//! file_lock::lock(&server, file_lock::LockMode::Shared, Duration::ZERO).expect("the file is new");
//! let writer = std::fs::File::open(&path)?;
//! let holder = file_lock::lock(&writer, file_lock::LockMode::Exclusive, Duration::ZERO).unwrap_err();
//! println!("locked by {holder}");
//! # std::fs::remove_file(&path)?;
//! # Ok::<(), std::io::Error>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, OFlags, Stat, fstat, major, minor};
use rustix::io::Errno;

/// What the owner does with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Reads: any number of readers, no writer.
    Shared,
    /// Writes: the only user.
    Exclusive,
}

/// The process that has locked a file, where `/proc/locks` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    pid: Option<u32>,
    program: Option<String>,
    /// The file behind the loop device, if that is what is locked.
    backing: Option<PathBuf>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.program) {
            (Some(pid), _) if pid == std::process::id() && self.backing.is_some() => {
                write!(f, "this process")
            }
            (Some(pid), _) if pid == std::process::id() => write!(f, "this process, which has the file open"),
            (Some(pid), Some(program)) => write!(f, "process {pid} ({program})"),
            // The descriptors of a killed process's io_uring, or those that it passed on, outlive it.
            (Some(pid), None) => write!(f, "process {pid}, which has ended but whose files are still open"),
            (None, _) => write!(f, "another process"),
        }?;
        match &self.backing {
            Some(path) => write!(f, " on its file {}", path.display()),
            None => Ok(()),
        }
    }
}

/// Locks an open file, and waits up to `timeout` while others have locked it: the kernel closes the files of
/// a killed process's io_uring some time after its end, and no event announces that. File systems without
/// locks are used without one. A loop device's file has a lock of its own: see [`lock_device`].
///
/// # Errors
/// The process that has locked the file in a way that excludes `mode`.
pub fn lock(file: impl AsFd, mode: LockMode, timeout: Duration) -> Result<(), LockHolder> {
    let operation = match mode {
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    let deadline = Instant::now() + timeout;
    loop {
        match rustix::fs::flock(&file, operation) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
            Err(Errno::WOULDBLOCK) => return Err(holder(&file)),
            _ => return Ok(()),
        }
    }
}

/// Locks a file or block device as [`lock`] does, and the file behind a loop device. The lock of that file
/// ends when what is returned is dropped.
///
/// Users of several parts of one file do not disturb each other: its lock is a shared one for a partition,
/// and for a loop device that does not have all of it. A file that is not found by its name any more is not
/// locked, nor is one below another layer, as the device mapper.
///
/// # Errors
/// As [`lock`].
pub fn lock_device(device: impl AsFd, mode: LockMode, timeout: Duration) -> Result<Option<File>, LockHolder> {
    lock(&device, mode, timeout)?;
    let Some((path, file, is_part)) = backing_file(&device) else { return Ok(None) };
    let mode = if is_part { LockMode::Shared } else { mode };
    // This process, which waits here, does not end the lock.
    let locked = lock(&file, mode, Duration::ZERO).or_else(|holder| match holder.pid {
        Some(pid) if pid == std::process::id() => Err(holder),
        _ => lock(&file, mode, timeout),
    });
    match locked {
        Ok(()) => Ok(Some(file)),
        Err(holder) => Err(LockHolder { backing: Some(path), ..holder }),
    }
}

/// The file behind a loop device or a partition of one, and whether that is a part of it.
fn backing_file(device: impl AsFd) -> Option<(PathBuf, File, bool)> {
    let status = fstat(&device).ok()?;
    if !FileType::from_raw_mode(status.st_mode).is_block_device() {
        return None;
    }
    let own = format!("/sys/dev/block/{}:{}", major(status.st_rdev), minor(status.st_rdev));
    let own = std::fs::canonicalize(own).ok()?;
    let is_partition = own.join("partition").exists();
    let disk = if is_partition { own.parent()? } else { &own };
    let name = std::fs::read(disk.join("loop/backing_file")).ok()?;
    let path = PathBuf::from(OsStr::from_bytes(name.strip_suffix(b"\n").unwrap_or(&name)));
    let behind = os::device::loop_file(&device).ok()?;
    // Without waiting, should a pipe be there now.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(&path).ok()?;
    let found = fstat(&file).ok()?;
    let is_part = is_partition || behind.offset != 0 || behind.size_limit != 0;
    ((found.st_dev, found.st_ino) == (behind.device, behind.inode)).then_some((path, file, is_part))
}

/// The environment variable with the descriptors, separated by commas, of files that a process has locked and
/// shares with the processes that it starts. Who would lock such a file uses the descriptor, whose lock it is
/// too.
pub const SHARED_LOCKS_VARIABLE: &str = "RINGBOLT_SHARED_LOCKS";

const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Bytes of `/proc/locks` that are searched: about 16,000 locks.
const LOCKS_BYTES_MAX: u64 = 1 << 20;

fn holder(file: impl AsFd) -> LockHolder {
    let mut locks = String::new();
    let pid = fstat(file).ok().and_then(|status| {
        File::open("/proc/locks").ok()?.take(LOCKS_BYTES_MAX).read_to_string(&mut locks).ok()?;
        holder_in(&locks, &status)
    });
    let name = |pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let program = pid.and_then(name).map(|name| name.trim_end().to_string());
    LockHolder { pid, program, backing: None }
}

/// The process of the first `flock` on a file, from the text of `/proc/locks` (proc(5)). Locks that a process
/// waits for have `->` as their second field, and processes of other namespaces the number 0 or -1.
fn holder_in(locks: &str, status: &Stat) -> Option<u32> {
    let device = status.st_dev;
    let file = format!("{:02x}:{:02x}:{}", major(device), minor(device), status.st_ino);
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        (fields.next() == Some("FLOCK")).then_some(())?;
        let pid = fields.nth(2)?.parse().ok().filter(|pid| *pid > 0);
        (fields.next() == Some(&file)).then_some(pid)?
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("ringbolt-{name}-{}", std::process::id()));
            std::fs::write(&path, "").unwrap();
            Scratch(path)
        }

        fn open(&self) -> File {
            File::open(&self.0).unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// One test at a time: a child that another one forks has the locks of this process until it executes its
    /// program.
    fn alone() -> MutexGuard<'static, ()> {
        static TESTS: Mutex<()> = Mutex::new(());
        TESTS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn readers_share_a_file_and_a_writer_has_it_alone() {
        let _alone = alone();
        let scratch = Scratch::new("file-lock-modes");
        let try_lock = |mode| {
            let file = scratch.open();
            lock(&file, mode, Duration::ZERO).map(|()| file)
        };
        let readers = [(); 2].map(|()| try_lock(LockMode::Shared).unwrap());
        let refused = try_lock(LockMode::Exclusive).unwrap_err();
        assert_eq!(refused.pid, Some(std::process::id()), "{refused}");
        assert_eq!(refused.to_string(), "this process, which has the file open");
        drop(readers);
        let writer = try_lock(LockMode::Exclusive).unwrap();
        for mode in [LockMode::Shared, LockMode::Exclusive] {
            assert!(try_lock(mode).is_err(), "{mode:?}");
        }
        drop(writer);
        try_lock(LockMode::Shared).unwrap();
    }

    #[test]
    fn the_holder_is_found_among_locks_of_other_kinds_and_files() {
        let scratch = Scratch::new("file-lock-holder");
        let status = fstat(scratch.open()).unwrap();
        let device = format!("{:02x}:{:02x}", major(status.st_dev), minor(status.st_dev));
        let inode = status.st_ino;
        let text = format!(
            "1: POSIX  ADVISORY  WRITE 11 {device}:{inode} 0 EOF\n\
             2: FLOCK  ADVISORY  WRITE 12 {device}:{} 0 EOF\n\
             2: -> FLOCK  ADVISORY  WRITE 13 {device}:{inode} 0 EOF\n\
             3: FLOCK  ADVISORY  READ 0 {device}:{inode} 0 EOF\n\
             nonsense\n4: FLOCK\n\
             5: FLOCK  ADVISORY  READ 14 {device}:{inode} 0 EOF\n",
            inode + 1
        );
        assert_eq!(holder_in(&text, &status), Some(14));
        assert_eq!(holder_in("", &status), None);
        let unknown = LockHolder { pid: None, program: None, backing: None };
        assert_eq!(unknown.to_string(), "another process");
        let behind = LockHolder { backing: Some("/d".into()), ..unknown };
        assert_eq!(behind.to_string(), "another process on its file /d");
    }

    /// A loop device of a file, or of what is after its first 4096 bytes; detached at the end.
    struct Loop(String);

    impl Loop {
        fn new(file: &Scratch, offset: u32) -> Option<Loop> {
            let offset = format!("--offset={offset}");
            let arguments = ["--find", "--show", &offset];
            let made = std::process::Command::new("losetup").args(arguments).arg(&file.0).output();
            let made = made.ok().filter(|made| made.status.success())?;
            Some(Loop(String::from_utf8(made.stdout).unwrap().trim().to_string()))
        }

        fn lock(&self, mode: LockMode) -> Result<(File, Option<File>), LockHolder> {
            let device = File::open(&self.0).unwrap();
            let backing = lock_device(&device, mode, Duration::ZERO)?;
            Ok((device, backing))
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
        }
    }

    #[test]
    fn a_loop_device_and_its_file_exclude_each_other_and_parts_of_it_do_not() {
        let _alone = alone();
        let scratch = Scratch::new("file-lock-loop");
        std::fs::write(&scratch.0, vec![0; 1 << 20]).unwrap();
        let (Some(whole), Some(part)) = (Loop::new(&scratch, 0), Loop::new(&scratch, 4096)) else {
            return eprintln!("SKIPPED: losetup sets up no loop device here");
        };
        let file = scratch.open();
        lock_device(&file, LockMode::Exclusive, Duration::ZERO).unwrap();
        for device in [&whole, &part] {
            let refused = device.lock(LockMode::Exclusive).unwrap_err();
            assert_eq!(refused.to_string(), format!("this process on its file {}", scratch.0.display()));
        }
        drop(file);
        let locked = whole.lock(LockMode::Exclusive).unwrap();
        assert!(lock(scratch.open(), LockMode::Shared, Duration::ZERO).is_err());
        assert!(part.lock(LockMode::Exclusive).is_err());
        drop(locked);
        let locked = part.lock(LockMode::Exclusive).unwrap();
        let other = Loop::new(&scratch, 4096).unwrap();
        other.lock(LockMode::Exclusive).unwrap();
        assert!(whole.lock(LockMode::Exclusive).is_err());
        drop(locked);
        whole.lock(LockMode::Exclusive).unwrap();
    }
}
