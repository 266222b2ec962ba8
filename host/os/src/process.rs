//! What the kernel gives a process: a signal when its parent ends, and file descriptors.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{
    Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};

/// Raises the soft limit of open files (RLIMIT_NOFILE) to the hard limit, and returns it; `u64::MAX` without one.
pub fn raise_descriptor_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // A failure leaves the limit as it is.
    _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    descriptor_limit()
}

/// Files that this process may have open at a time (the soft limit of RLIMIT_NOFILE); `u64::MAX` without a limit.
pub fn descriptor_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Has the kernel send SIGKILL to the command's process when the thread that spawns it ends, however that
/// ends. Spawn it from a thread that lives as long as the process should: the main thread, or one that waits
/// for it.
///
/// The setting is not inherited by the processes that the command forks, and the kernel drops it when a
/// program with the set-user-ID bit or capabilities is executed.
pub fn kill_with_parent(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let before_exec = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before the setting was made; the kernel sends nothing then.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    };
    // SAFETY: the closure runs between fork and exec and makes two system calls. It does not allocate, takes
    // no lock and owns nothing but a number.
    unsafe { command.pre_exec(before_exec) }
}

/// The files that the parent process left open for this one, by the numbers of their descriptors in an environment
/// variable, separated by commas. Numbers that name no open file are left out. A file shares its description with the
/// parent's, its locks included.
pub fn inherited_files(variable: &str) -> Vec<File> {
    let numbers = std::env::var(variable).unwrap_or_default();
    let open = |number: RawFd| {
        // SAFETY: F_GETFD reads and writes no memory, and fails for a number that is not open.
        if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
            return None;
        }
        // SAFETY: it is open, as was checked, and nothing of this process closes what it inherited.
        unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok()
    };
    numbers.split(',').filter_map(|number| open(number.parse().ok()?)).map(File::from).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri starts no processes")]
    fn a_process_ends_with_the_thread_that_started_it() {
        let spawn = || {
            let mut command = Command::new("cat");
            kill_with_parent(&mut command).stdin(Stdio::piped()).spawn().unwrap()
        };
        let mut child = std::thread::spawn(spawn).join().unwrap();
        // `cat` waits for its input, which `child` keeps open until the status is known.
        let input = child.stdin.take();
        let status = child.wait().unwrap();
        drop(input);
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }
}
