//! SIGBUS handling for mapped files that another process can truncate, and for persistent memory, which can fail.
//!
//! Access to a mapped page beyond the end of a truncated file raises SIGBUS, so a peer that shares a file
//! with us could kill the process. Mappings of untrusted files are registered here, and a SIGBUS handler
//! replaces the mapping that faulted with zeroed anonymous memory. The access is then repeated and
//! succeeds, and the region reports from then on that it is poisoned. The same happens when memory of a region for which that
//! was asked has an error that the hardware cannot correct. Every other SIGBUS is forwarded to
//! the previous handler.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

use rustix::mm::{MapFlags, ProtFlags};

/// Maximum number of registered regions: the default limit of mappings per process.
const REGIONS_MAX: usize = 65_536;

/// A registered region, as the signal handler reads it. `bytes` is 0 if the entry is free.
struct RegionEntry {
    start: AtomicUsize,
    bytes: AtomicUsize,
    poisoned: AtomicBool,
    /// [`SigbusCauses::TruncationAndFailure`].
    includes_failure: AtomicBool,
}

/// What a region is replaced for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SigbusCauses {
    /// The file has no such page.
    Truncation,
    /// That, or the memory of the page failed.
    TruncationAndFailure,
}

static ENTRIES: [RegionEntry; REGIONS_MAX] = [const {
    RegionEntry {
        start: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
        includes_failure: AtomicBool::new(false),
    }
}; REGIONS_MAX];
/// Entries from this index on were never used.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);
/// Indices of entries that were used and are free again.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Number of regions that the handler has replaced.
static FAULTS: AtomicU32 = AtomicU32::new(0);
/// The previous SIGBUS action; written once, before the handler is installed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Number of times that the process accessed a truncated region of an untrusted file. When it changes,
/// check [`SharedRegion::is_poisoned`](crate::SharedRegion::is_poisoned) of the regions.
pub fn sigbus_fault_count() -> u32 {
    FAULTS.load(Ordering::Relaxed)
}

/// Registration of a region with the SIGBUS handler; dropping it unregisters the region.
pub(crate) struct SigbusGuard(usize);

impl SigbusGuard {
    /// Registers a mapping; `None` if there are too many. Must be dropped before the mapping is unmapped.
    pub(crate) fn new(start: NonNull<u8>, bytes: usize, causes: SigbusCauses) -> Option<SigbusGuard> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let mut free = sync::lock(&FREE);
        let index = match free.pop() {
            Some(index) => index,
            None => {
                let index = ENTRIES_USED.load(Ordering::Relaxed);
                if index == REGIONS_MAX {
                    return None;
                }
                ENTRIES_USED.store(index + 1, Ordering::Release);
                index
            }
        };
        let entry = &ENTRIES[index];
        entry.poisoned.store(false, Ordering::Relaxed);
        entry.includes_failure.store(causes == SigbusCauses::TruncationAndFailure, Ordering::Relaxed);
        entry.start.store(start.as_ptr().addr(), Ordering::Relaxed);
        entry.bytes.store(bytes, Ordering::Release);
        Some(SigbusGuard(index))
    }

    /// Whether the handler has replaced the region.
    pub(crate) fn is_poisoned(&self) -> bool {
        ENTRIES[self.0].poisoned.load(Ordering::Acquire)
    }
}

impl Drop for SigbusGuard {
    fn drop(&mut self) {
        ENTRIES[self.0].bytes.store(0, Ordering::Release);
        sync::lock(&FREE).push(self.0);
    }
}

fn install() {
    // SAFETY: all zeroes is a valid `sigaction`: the default action, no flags, an empty mask.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: queries the current action; `previous` is valid for the write.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) };
    PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    // On the thread's alternate signal stack if it has one, which the standard library's handler expects.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is an `extern "C"` function with the signature that SA_SIGINFO requires, it exists
    // as long as the program, and it calls only async-signal-safe functions.
    let outcome = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
    assert_eq!(outcome, 0, "sigaction(SIGBUS) does not fail with valid arguments");
}

/// Async-signal-safe: atomics and system calls only, no lock, no allocation.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a handler with SA_SIGINFO a valid pointer and does not modify the target.
    let siginfo = unsafe { &*info };
    // SAFETY: SIGBUS carries an address.
    let address = unsafe { siginfo.si_addr() }.addr();
    let causes = match siginfo.si_code {
        libc::BUS_ADRERR => Some(SigbusCauses::Truncation),
        // A hardware memory error in what is being accessed.
        libc::BUS_MCEERR_AR => Some(SigbusCauses::TruncationAndFailure),
        _ => None,
    };
    if causes.is_some_and(|cause| replace_region(address, cause)) {
        return;
    }
    forward(signal, info, context);
}

/// Replaces the registered region that contains `address` with anonymous memory; `false` if there is none for this cause.
fn replace_region(address: usize, cause: SigbusCauses) -> bool {
    let used = ENTRIES_USED.load(Ordering::Acquire);
    for entry in &ENTRIES[..used] {
        let bytes = entry.bytes.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if address.wrapping_sub(start) >= bytes {
            continue;
        }
        if cause == SigbusCauses::TruncationAndFailure && !entry.includes_failure.load(Ordering::Relaxed) {
            return false;
        }
        // Before the region is ordinary memory: a thread that stored to that finds the region poisoned.
        entry.poisoned.store(true, Ordering::Release);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let place = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: exactly the pages of an existing mapping: its owner registers it while it is mapped
        // and unregisters it before it unmaps it, and the thread that faulted is using it. They are accessed only
        // as bytes that others may change at any time.
        let mapped = unsafe { rustix::mm::mmap_anonymous(place, bytes, protection, flags) };
        if mapped.is_err() {
            return false;
        }
        FAULTS.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    false
}

/// Forwards a signal that is not ours to the previous handler.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: set before the handler was installed, and never changed or freed.
    let previous = unsafe { &*previous };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the previous action. On return the access is repeated and kills the process,
            // as without this handler; a synchronous SIGBUS cannot be ignored.
            unsafe { libc::sigaction(signal, previous, std::ptr::null_mut()) };
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type SigactionHandler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: a handler that was installed with SA_SIGINFO has this signature.
            let handler = unsafe { std::mem::transmute::<usize, SigactionHandler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: a handler that was installed without SA_SIGINFO has this signature.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
            handler(signal);
        }
    }
}

#[cfg(all(test, not(miri)))]
pub(crate) mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::SharedRegion;

    pub(crate) fn memfd(bytes: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        file
    }

    #[test]
    fn a_truncated_file_reads_as_zeroes_and_poisons_its_region() {
        let file = memfd(64 << 10);
        let region = SharedRegion::map_untrusted(file.as_fd(), 0, 64 << 10, true).unwrap();
        let other = SharedRegion::map_untrusted(file.as_fd(), 0, 4096, true).unwrap();
        region.write(0, &[7; 64 << 10]);
        let before = sigbus_fault_count();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut bytes = [1; 4096];
        region.read(60 << 10, &mut bytes);
        assert_eq!(bytes, [0; 4096]);
        assert!(region.is_poisoned() && !other.is_poisoned());
        assert!(sigbus_fault_count() > before);
        // From now on the region is ordinary memory.
        region.store_u32(60 << 10, 9);
        assert_eq!(region.load_u32(60 << 10), 9);
        // A region that the file still backs keeps its contents.
        let mut byte = [0; 1];
        other.read(0, &mut byte);
        assert_eq!(byte, [7]);
    }

    #[test]
    fn a_write_to_a_truncated_file_succeeds() {
        let file = memfd(8192);
        let region = SharedRegion::map_untrusted(file.as_fd(), 4096, 4096, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        region.write(0, &[5; 4096]);
        assert!(region.is_poisoned());
        assert_eq!(region.load_u8(4095), 5);
    }

    /// Sends this thread what the kernel sends for an access to memory that failed.
    fn report_failure(address: usize) {
        // SAFETY: all zeroes is a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        info.si_signo = libc::SIGBUS;
        info.si_code = libc::BUS_MCEERR_AR;
        // The address follows the three first fields, at the alignment of a pointer: sigaction(2), `si_addr`.
        let field = (&raw mut info).cast::<usize>().wrapping_add(2);
        // SAFETY: the offset and a pointer are inside the structure.
        unsafe { field.write(address) };
        let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get());
        let (number, info) = (libc::SYS_rt_tgsigqueueinfo, &raw const info);
        // SAFETY: a signal to this thread, with a structure that the kernel copies; this process has a handler for it.
        let sent = unsafe { libc::syscall(number, process, thread, libc::SIGBUS, info) };
        assert_eq!(sent, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn failed_memory_poisons_a_region_for_which_that_was_asked() {
        let file = memfd(8192);
        let region = SharedRegion::map_guarded(file.as_fd(), 8192, true, MapFlags::SHARED).unwrap();
        let untrusted = SharedRegion::map_untrusted(file.as_fd(), 0, 8192, true).unwrap();
        region.write(0, &[7; 8192]);
        report_failure(region.as_ptr().addr() + 4096);
        assert!(region.is_poisoned() && !untrusted.is_poisoned());
        assert_eq!((region.load_u8(4096), untrusted.load_u8(4096)), (0, 7));
        let of_untrusted = untrusted.as_ptr().addr();
        assert!(!replace_region(of_untrusted, SigbusCauses::TruncationAndFailure));
        assert!(!untrusted.is_poisoned());
    }

    #[test]
    fn entries_are_reused() {
        let file = memfd(4096);
        for _ in 0..3 {
            let region = SharedRegion::map_untrusted(file.as_fd(), 0, 4096, false).unwrap();
            assert!(!region.is_poisoned());
        }
        assert!(ENTRIES_USED.load(Ordering::Relaxed) < 100);
    }

    /// Runs in a separate process; see the next test.
    #[test]
    #[ignore = "ends the process by a signal"]
    fn access_a_truncated_trusted_file() {
        let guarded = memfd(4096);
        let _region = SharedRegion::map_untrusted(guarded.as_fd(), 0, 4096, true).unwrap();
        let file = memfd(4096);
        let region = SharedRegion::map(file.as_fd(), 0, 4096, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        region.load_u8(0);
    }

    #[test]
    fn any_other_sigbus_still_kills_the_process() {
        let this = std::env::current_exe().unwrap();
        let name = "sigbus::tests::access_a_truncated_trusted_file";
        let output = std::process::Command::new(this).args(["--ignored", "--exact", name]).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    }
}
