//! The mapping of a region, and the devices that reach it.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::sigbus::SigbusGuard;

/// The mapping of a [`SharedRegion`](crate::SharedRegion): it stays until the region and every other
/// reference to it are dropped.
///
/// A device that has the region mapped leaves what undoes that with [`keep`](Self::keep); it is dropped
/// before the memory is unmapped, because the address may be other memory afterwards. Since a device unpins
/// page by page, both happen on a thread of their own then.
pub struct RegionMapping {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
    id: u64,
    /// What it maps from offset 0, if another process may map it too.
    file: OnceLock<Arc<OwnedFd>>,
    /// For an untrusted file: handles SIGBUS after a truncation.
    guard: OnceLock<SigbusGuard>,
    devices: Mutex<Vec<Box<dyn Send>>>,
}

// SAFETY: it has the address of the bytes and never accesses them.
unsafe impl Send for RegionMapping {}
// SAFETY: as above.
unsafe impl Sync for RegionMapping {}

impl RegionMapping {
    /// # Safety
    /// The bytes must be a mapping that nothing else unmaps.
    pub(super) unsafe fn new(start: NonNull<u8>, bytes: usize, writable: bool) -> RegionMapping {
        static LAST_ID: AtomicU64 = AtomicU64::new(0);
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed);
        let (file, guard) = (OnceLock::new(), OnceLock::new());
        RegionMapping { start, bytes, writable, id, file, guard, devices: Mutex::default() }
    }

    pub(super) fn set_file(&self, file: Arc<OwnedFd>) {
        assert!(self.file.set(file).is_ok(), "a mapping is of one file");
    }

    pub(super) fn guard(&self, guard: SigbusGuard) {
        assert!(self.guard.set(guard).is_ok(), "a mapping is guarded once");
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.guard.get().is_some_and(SigbusGuard::is_poisoned)
    }

    /// A number that no other mapping of this process has, or had.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Address of the first byte.
    pub fn start(&self) -> usize {
        self.start.as_ptr().addr()
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether the length is 0, which no mapping's is.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether it may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The file that it maps from offset 0, for devices in other processes; `None` for memory of this
    /// process.
    pub fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.file.get()
    }

    /// Keeps what undoes a device's mapping of the memory, until the memory is unmapped.
    pub fn keep(&self, device: Box<dyn Send>) {
        sync::lock(&self.devices).push(device);
    }
}

/// What is released with a mapping, in this order. Dropped by a thread that could not be started, it is the
/// same.
struct Release {
    devices: Vec<Box<dyn Send>>,
    memory: OwnedPages,
}

struct OwnedPages {
    start: NonNull<u8>,
    bytes: usize,
    guard: Option<SigbusGuard>,
}

// SAFETY: it owns the mapping, and accesses none of its bytes.
unsafe impl Send for OwnedPages {}

impl Drop for RegionMapping {
    fn drop(&mut self) {
        let memory = OwnedPages { start: self.start, bytes: self.bytes, guard: self.guard.take() };
        let devices = std::mem::take(&mut *sync::lock(&self.devices));
        let release = Release { devices, memory };
        if !release.devices.is_empty() {
            let release = move || {
                let Release { devices, memory } = release;
                drop(devices);
                drop(memory);
            };
            // Without a thread the closure is dropped here, and `Release` with its fields in order.
            let _ = std::thread::Builder::new().name("unmap".to_string()).spawn(release);
        }
    }
}

impl Drop for OwnedPages {
    fn drop(&mut self) {
        // Unregister first: the kernel may reuse the addresses as soon as they are unmapped.
        self.guard = None;
        // SAFETY: exactly the mapping that was made for the region; no reference into it exists, and buffers
        // of it keep the region alive.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
