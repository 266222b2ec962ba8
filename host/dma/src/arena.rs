//! Allocation of 2 MiB chunks from the kernel, up to a limit.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Size of a chunk in bytes: one hugepage.
pub const CHUNK_BYTES: usize = 2 << 20;

/// Most chunks of an arena, 128 GiB: a buffer's index of its chunk is 16 bits wide.
const CHUNKS_MAX: usize = 1 << 16;

/// How an [`Arena`] allocates memory.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// Limit of all pools together, in bytes. Rounded down to whole chunks, at least one and at most 128 GiB.
    pub limit_bytes: usize,
    /// Whether to try hugetlb pages first, and transparent hugepages if none are free. If false, a chunk
    /// costs only the pages that are touched, and saves the time to clear 2 MiB.
    pub hugepages: bool,
    /// Whether other processes can map the chunks: each is then a memfd.
    pub shared: bool,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        ArenaConfig { limit_bytes: 1 << 30, hugepages: true, shared: false }
    }
}

/// The kind of pages behind the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Nothing is allocated yet.
    None,
    /// Every chunk is a 2 MiB hugetlb page.
    Hugepages,
    /// Every chunk consists of ordinary pages.
    OrdinaryPages,
    /// Some chunks are hugetlb pages, others ordinary pages, because hugepages ran out.
    Mixed,
}

/// The process's I/O memory, in chunks that the per-core pools divide into buffers.
///
/// It owns the mappings and enforces the limit. One chunk is reserved for each registered pool that has
/// none yet. Chunks stay mapped until the arena and its last pool are dropped, because a device may still
/// write to them; those that pools give back lose their pages if no device or other process knows them. A mutex guards the state; pools take it only to get a chunk, never per buffer.
pub struct Arena {
    config: ArenaConfig,
    limit_chunks: usize,
    state: Mutex<ArenaState>,
    huge_count: AtomicU32,
    ordinary_count: AtomicU32,
}

/// What devices, the kernel and other processes need to map or register a chunk.
#[derive(Clone, Debug)]
pub struct ChunkMemory {
    /// Index in the arena.
    pub index: u32,
    /// Address of its first byte.
    pub start: *mut u8,
    /// Size in bytes, [`CHUNK_BYTES`].
    pub bytes: usize,
    /// The memfd that contains it at offset 0, if other processes can map it.
    pub file: Option<Arc<OwnedFd>>,
    /// Whether it is one 2 MiB hugetlb page, and so physically contiguous.
    pub huge: bool,
}

#[derive(Default)]
struct ArenaState {
    chunks: Vec<Chunk>,
    /// Whether a chunk may be known to a device or another process, by index.
    is_exposed: Vec<bool>,
    /// Chunks that no pool owns.
    free: Vec<Chunk>,
    /// Pools without a chunk. One chunk is reserved for each, so that no core can starve another.
    pools_without_chunk: usize,
}

/// One mapping of [`CHUNK_BYTES`] bytes, initially zero.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: NonNull<u8>,
    pub(crate) index: u32,
    file: Option<Arc<OwnedFd>>,
    huge: bool,
}

// SAFETY: a chunk is an address; its bytes are accessed only by the pool that owns it, on one core.
unsafe impl Send for Chunk {}

impl Arena {
    /// An arena; it allocates nothing until a pool needs a chunk.
    pub fn new(config: ArenaConfig) -> Arc<Arena> {
        let limit_chunks = (config.limit_bytes / CHUNK_BYTES).clamp(1, CHUNKS_MAX);
        Arc::new(Arena {
            config,
            limit_chunks,
            state: Mutex::default(),
            huge_count: AtomicU32::new(0),
            ordinary_count: AtomicU32::new(0),
        })
    }

    /// The kind of pages behind the chunks allocated so far.
    pub fn backing(&self) -> Backing {
        match (self.huge_count.load(Ordering::Relaxed), self.ordinary_count.load(Ordering::Relaxed)) {
            (0, 0) => Backing::None,
            (_, 0) => Backing::Hugepages,
            (0, _) => Backing::OrdinaryPages,
            _ => Backing::Mixed,
        }
    }

    /// One line for the operator: the kind of pages, their cost and the limit.
    pub fn describe(&self) -> String {
        let free = free_hugepages();
        if self.config.hugepages && free > 0 {
            format!(
                "memory: hugepages ({free} of 2 MiB free), up to {} MiB of buffers",
                self.limit_bytes() >> 20
            )
        } else {
            format!(
                "memory: ordinary pages, up to {} MiB of buffers (no hugepages free: more TLB misses; \
                 `echo 64 > /proc/sys/vm/nr_hugepages` as root provides 128 MiB)",
                self.limit_bytes() >> 20
            )
        }
    }

    /// The limit in bytes.
    pub fn limit_bytes(&self) -> usize {
        self.limit_chunks * CHUNK_BYTES
    }

    /// Bytes that pools own now.
    pub fn allocated_bytes(&self) -> usize {
        let state = self.lock();
        (state.chunks.len() - state.free.len()) * CHUNK_BYTES
    }

    /// Allocates a chunk; `None` at the limit, if the remaining chunks are reserved for other pools, or if
    /// the kernel has no memory. `first` means that the pool has no chunk yet.
    pub(crate) fn take_chunk(&self, first: bool) -> Option<Chunk> {
        let mut state = self.lock();
        let left = self.limit_chunks - state.chunks.len() + state.free.len();
        if left == 0 || !first && left <= state.pools_without_chunk {
            return None;
        }
        let chunk = match state.free.pop() {
            Some(chunk) => chunk,
            None => {
                let chunk = self.map_chunk(state.chunks.len() as u32)?;
                state.chunks.push(chunk.clone());
                state.is_exposed.push(false);
                chunk
            }
        };
        if first {
            state.pools_without_chunk -= 1;
        }
        Some(chunk)
    }

    /// Reserves a chunk for a new pool.
    pub(crate) fn register_pool(&self) {
        self.lock().pools_without_chunk += 1;
    }

    /// Takes back the chunks of a pool that was dropped together with all its buffers.
    pub(crate) fn unregister_pool(&self, chunks: impl Iterator<Item = u32>) {
        let mut state = self.lock();
        let before = state.free.len();
        for index in chunks {
            let chunk = state.chunks[index as usize].clone();
            state.free.push(chunk);
        }
        if state.free.len() == before {
            state.pools_without_chunk -= 1;
        }
    }

    /// Takes back chunks of a pool, which keeps others. Returns their pages to the kernel where that is possible: the
    /// caller asserts that nothing refers to their bytes.
    pub(crate) fn release_chunks(&self, indices: &[u32]) {
        let mut state = self.lock();
        for &index in indices {
            let chunk = state.chunks[index as usize].clone();
            if !self.config.shared && !state.is_exposed[index as usize] && !cfg!(miri) {
                // SAFETY: `map_chunk` mapped exactly these private bytes, and nothing refers to them: no buffer of the
                // chunk is held, and no device was given its address. It reads as zeroes afterwards. On failure, as
                // with hugetlb pages of older kernels, it keeps its pages.
                let _ = unsafe {
                    rustix::mm::madvise(chunk.start.as_ptr().cast(), CHUNK_BYTES, Advice::LinuxDontNeed)
                };
            }
            state.free.push(chunk);
        }
    }

    pub(crate) fn chunk(&self, index: u32) -> ChunkMemory {
        let mut state = self.lock();
        state.is_exposed[index as usize] = true;
        let Chunk { start, file, huge, .. } = state.chunks[index as usize].clone();
        ChunkMemory { index, start: start.as_ptr(), bytes: CHUNK_BYTES, file, huge }
    }

    fn map_chunk(&self, index: u32) -> Option<Chunk> {
        let wanted = self.config.hugepages && free_hugepages() > 0;
        let (huge, (start, file)) = match wanted.then(|| self.map_pages(true)).flatten() {
            Some(mapped) => (true, mapped),
            None => (false, self.map_pages(false)?),
        };
        let count = if huge { &self.huge_count } else { &self.ordinary_count };
        count.fetch_add(1, Ordering::Relaxed);
        Some(Chunk { start, index, file, huge })
    }

    fn map_pages(&self, huge: bool) -> Option<(NonNull<u8>, Option<Arc<OwnedFd>>)> {
        if !self.config.shared {
            let start = match (huge, self.config.hugepages) {
                (true, _) => {
                    map_anonymous(CHUNK_BYTES, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::POPULATE)
                }
                (false, true) => map(CHUNK_BYTES, MapFlags::PRIVATE),
                (false, false) => map_anonymous(CHUNK_BYTES, MapFlags::PRIVATE),
            };
            return Some((start?, None));
        }
        let huge_flags = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge_flags;
        let file = rustix::fs::memfd_create("ringbolt-buffers", flags).ok()?;
        rustix::fs::ftruncate(&file, CHUNK_BYTES as u64).ok()?;
        // Sealed, so that a process that maps it cannot get SIGBUS because the file shrank.
        let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals).ok()?;
        let start = map_file(&file, if huge { MapFlags::POPULATE } else { MapFlags::empty() })?;
        if self.config.hugepages {
            advise_huge(start, CHUNK_BYTES);
        }
        Some((start, Some(Arc::new(file))))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ArenaState> {
        // The lock is poisoned only if one of our own invariants was violated under it.
        sync::lock(&self.state)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for chunk in &self.lock().chunks {
            // SAFETY: `map_chunk` mapped exactly these bytes, and nothing refers to them any more: pools and
            // buffers keep the arena alive.
            let _ = unsafe { rustix::mm::munmap(chunk.start.as_ptr().cast(), CHUNK_BYTES) };
        }
    }
}

/// Maps `bytes` of zeroed private memory, with transparent hugepages if available; `None` if the kernel has
/// no memory.
pub(crate) fn map(bytes: usize, flags: MapFlags) -> Option<NonNull<u8>> {
    let start = map_anonymous(bytes, flags)?;
    if bytes >= CHUNK_BYTES {
        advise_huge(start, bytes);
    }
    Some(start)
}

fn map_anonymous(bytes: usize, flags: MapFlags) -> Option<NonNull<u8>> {
    let flags = if cfg!(miri) { MapFlags::PRIVATE } else { flags };
    // SAFETY: a new anonymous mapping at an address that the kernel chooses aliases nothing.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    };
    NonNull::new(start.ok()?.cast::<u8>())
}

/// Requests transparent hugepages for a new mapping.
fn advise_huge(start: NonNull<u8>, bytes: usize) {
    // Miri does not implement madvise.
    if !cfg!(miri) {
        // SAFETY: the advice changes no contents, whatever is mapped there.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
}

/// Maps the first [`CHUNK_BYTES`] of our own memfd.
fn map_file(file: &OwnedFd, flags: MapFlags) -> Option<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses aliases no Rust object.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), CHUNK_BYTES, protection, MapFlags::SHARED | flags, file, 0)
    };
    NonNull::new(start.ok()?.cast::<u8>())
}

fn free_hugepages() -> u32 {
    static FILE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    static KNOWN: OnceLock<bool> = OnceLock::new();
    if !KNOWN.get_or_init(|| std::path::Path::new(FILE).exists()) {
        return 0;
    }
    std::fs::read_to_string(FILE).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
