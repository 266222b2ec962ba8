//! Memory that somebody else can take away: what happens when it is gone.
//!
//! A file that is shrunk while it is mapped leaves pages behind that raise SIGBUS. Whoever shares a file
//! with us could end the process that way, so regions of foreign files are noted here, and a handler of
//! SIGBUS puts zeroed memory of our own in the place of the region that was reached. The access is
//! then repeated and succeeds; the region says from then on that it is poisoned. Every other SIGBUS goes
//! to the handler that was there before.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

/// Regions that are noted at a time: as many as a process may have mappings.
const REGIONS_MAX: usize = 65_536;

/// What the handler knows of a region. `bytes` is 0 where there is none.
struct Entry {
    start: AtomicUsize,
    bytes: AtomicUsize,
    poisoned: AtomicBool,
}

static ENTRIES: [Entry; REGIONS_MAX] = [const {
    Entry { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0), poisoned: AtomicBool::new(false) }
}; REGIONS_MAX];
/// Entries from here on were never used.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);
/// Entries that were used and are free again.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// How often the handler has put memory of our own in place.
static FAULTS: AtomicU32 = AtomicU32::new(0);
/// What SIGBUS did before; written once, before the handler is there.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// How often memory that others share with this process was found to be gone. Whoever sees it change
/// asks its regions which of them it was.
pub fn foreign_faults() -> u32 {
    FAULTS.load(Ordering::Relaxed)
}

/// A region that the handler knows, until this is dropped.
pub(crate) struct Guard(usize);

impl Guard {
    /// Notes a mapping; `None` when there are too many. To be dropped before it is unmapped.
    pub(crate) fn new(start: NonNull<u8>, bytes: usize) -> Option<Guard> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
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
        entry.start.store(start.as_ptr().addr(), Ordering::Relaxed);
        entry.bytes.store(bytes, Ordering::Release);
        Some(Guard(index))
    }

    /// Whether memory of our own has taken the region's place.
    pub(crate) fn is_poisoned(&self) -> bool {
        ENTRIES[self.0].poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        ENTRIES[self.0].bytes.store(0, Ordering::Release);
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

fn install() {
    // SAFETY: all zeroes is a valid `sigaction`: the default action, no flags, an empty mask.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks for what is installed; `previous` is a valid place for it.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) };
    PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    action.sa_sigaction = handler as usize;
    // On the thread's alternate stack where it has one, as the handler of the standard library wants it.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is an `extern "C"` function of the signature that SA_SIGINFO asks for, it lives
    // as long as the program, and it calls nothing that is not async-signal-safe.
    let outcome = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
    assert_eq!(outcome, 0, "SIGBUS can be handled");
}

/// Async-signal-safe: atomics and system calls only, no lock, no allocation.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a valid pointer, and leaves what it points to alone.
    let what = unsafe { &*info };
    // SAFETY: SIGBUS carries an address.
    let address = unsafe { what.si_addr() }.addr();
    // Not for memory that failed, which is another matter.
    if what.si_code == libc::BUS_ADRERR && replace(address) {
        return;
    }
    forward(signal, info, context);
}

/// Puts memory of our own in the place of the region that has this address, if it is one of ours.
fn replace(address: usize) -> bool {
    let used = ENTRIES_USED.load(Ordering::Acquire);
    for entry in &ENTRIES[..used] {
        let bytes = entry.bytes.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if address.wrapping_sub(start) >= bytes {
            continue;
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let place = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: exactly the pages of a mapping that is there: its owner notes it while it is mapped, and
        // whoever faulted is using it. They are reached only as bytes that others may change at any moment.
        let mapped = unsafe { rustix::mm::mmap_anonymous(place, bytes, protection, flags) };
        if mapped.is_err() {
            return false;
        }
        entry.poisoned.store(true, Ordering::Release);
        FAULTS.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    false
}

/// Does what would have been done without us.
fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: set before the handler was, and never changed or freed.
    let previous = unsafe { &*previous };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: puts back what was there. Returning repeats the access, which then ends the process
            // as it would have without us; ignoring it is not possible.
            unsafe { libc::sigaction(signal, previous, std::ptr::null_mut()) };
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: a handler that was installed with SA_SIGINFO has this signature.
            let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
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
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::SharedRegion;

    fn file(bytes: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        file
    }

    #[test]
    fn a_file_that_shrinks_reads_as_zeroes_and_poisons_its_region() {
        let file = file(64 << 10);
        let region = SharedRegion::map_foreign(file.as_fd(), 0, 64 << 10, true).unwrap();
        let other = SharedRegion::map_foreign(file.as_fd(), 0, 4096, true).unwrap();
        region.write(0, &[7; 64 << 10]);
        let before = foreign_faults();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut bytes = [1; 4096];
        region.read(60 << 10, &mut bytes);
        assert_eq!(bytes, [0; 4096]);
        assert!(region.is_poisoned() && !other.is_poisoned());
        assert!(foreign_faults() > before);
        // From now on it is memory like any other.
        region.store_u32(60 << 10, 9);
        assert_eq!(region.load_u32(60 << 10), 9);
        // What is still there is not touched.
        let mut byte = [0; 1];
        other.read(0, &mut byte);
        assert_eq!(byte, [7]);
    }

    #[test]
    fn writes_find_memory_too() {
        let file = file(8192);
        let region = SharedRegion::map_foreign(file.as_fd(), 4096, 4096, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        region.write(0, &[5; 4096]);
        assert!(region.is_poisoned());
        assert_eq!(region.load_u8(4095), 5);
    }

    #[test]
    fn entries_are_used_again() {
        let file = file(4096);
        for _ in 0..3 {
            let region = SharedRegion::map_foreign(file.as_fd(), 0, 4096, false).unwrap();
            assert!(!region.is_poisoned());
        }
        assert!(ENTRIES_USED.load(Ordering::Relaxed) < 100);
    }

    /// Runs in a process of its own: see the test after it.
    #[test]
    #[ignore = "ends the process by a signal"]
    fn touch_memory_that_is_nobodys() {
        let guarded = file(4096);
        let _region = SharedRegion::map_foreign(guarded.as_fd(), 0, 4096, true).unwrap();
        let file = file(4096);
        let region = SharedRegion::map(file.as_fd(), 0, 4096, true).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        region.load_u8(0);
    }

    #[test]
    fn every_other_sigbus_still_ends_the_process() {
        let this = std::env::current_exe().unwrap();
        let name = "guard::tests::touch_memory_that_is_nobodys";
        let output = std::process::Command::new(this).args(["--ignored", "--exact", name]).output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    }
}
