//! Chunks of memory, taken from the machine up to a limit.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a chunk: one hugepage.
pub const CHUNK_BYTES: usize = 2 << 20;

/// How an arena takes memory.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most bytes that all pools together may hold. Rounded down to whole chunks, at least one.
    pub limit_bytes: usize,
    /// Whether hugepages are tried first, and the kernel's transparent ones where none are free. Without, a
    /// chunk costs what is touched of it: a few pages, and not the time to clear 2 MiB.
    pub hugepages: bool,
    /// Whether chunks can be mapped by another process: they then lie in a file in memory.
    pub shared: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config { limit_bytes: 1 << 30, hugepages: true, shared: false }
    }
}

/// What kind of pages the chunks came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Nothing was taken yet.
    None,
    /// Every chunk is a 2 MiB hugepage.
    Hugepages,
    /// Every chunk is ordinary pages.
    OrdinaryPages,
    /// Hugepages ran out on the way.
    Mixed,
}

/// The process's buffer memory: chunks that per-core pools carve up.
///
/// Chunks stay mapped until the last pool and the arena are gone: a device may be writing them.
pub struct Arena {
    config: Config,
    limit_chunks: usize,
    state: Mutex<State>,
    huge_count: AtomicU32,
    ordinary_count: AtomicU32,
}

/// One chunk, as devices, the kernel and other processes are told of it.
#[derive(Clone, Debug)]
pub struct ChunkMemory {
    /// Its index in the arena.
    pub index: u32,
    /// Address of its first byte.
    pub start: *mut u8,
    /// Its size, [`CHUNK_BYTES`].
    pub bytes: usize,
    /// The file that it lies in, from its beginning, if other processes can map it.
    pub file: Option<Arc<OwnedFd>>,
    /// Whether it is one 2 MiB hugepage, and so contiguous in physical memory.
    pub huge: bool,
}

#[derive(Default)]
struct State {
    chunks: Vec<Chunk>,
    /// Chunks that no pool has.
    free: Vec<Chunk>,
    /// Pools that have no chunk yet. One is kept for each, so that no core can starve another.
    pools_without: usize,
}

/// One mapping of [`CHUNK_BYTES`] bytes, zeroed when it was made.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: NonNull<u8>,
    pub(crate) index: u32,
    file: Option<Arc<OwnedFd>>,
    huge: bool,
}

// SAFETY: a chunk is an address; only the pool that a chunk was given to, on one core, reaches its bytes.
unsafe impl Send for Chunk {}

impl Arena {
    /// An arena that takes nothing until a pool asks.
    pub fn new(config: Config) -> Arc<Arena> {
        let limit_chunks = (config.limit_bytes / CHUNK_BYTES).max(1);
        Arc::new(Arena {
            config,
            limit_chunks,
            state: Mutex::default(),
            huge_count: AtomicU32::new(0),
            ordinary_count: AtomicU32::new(0),
        })
    }

    /// What the chunks taken so far are made of.
    pub fn backing(&self) -> Backing {
        match (self.huge_count.load(Ordering::Relaxed), self.ordinary_count.load(Ordering::Relaxed)) {
            (0, 0) => Backing::None,
            (_, 0) => Backing::Hugepages,
            (0, _) => Backing::OrdinaryPages,
            _ => Backing::Mixed,
        }
    }

    /// One line for the operator: what backs the buffers, and what that costs.
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

    /// Most bytes that the arena hands out.
    pub fn limit_bytes(&self) -> usize {
        self.limit_chunks * CHUNK_BYTES
    }

    /// Bytes handed out to pools so far.
    pub fn taken_bytes(&self) -> usize {
        let state = self.lock();
        (state.chunks.len() - state.free.len()) * CHUNK_BYTES
    }

    /// Takes one more chunk, or `None` at the limit, when what is left is kept for others, or when the
    /// machine has none. `first` says that the pool has no chunk yet.
    pub(crate) fn take_chunk(&self, first: bool) -> Option<Chunk> {
        let mut state = self.lock();
        let left = self.limit_chunks - state.chunks.len() + state.free.len();
        if left == 0 || !first && left <= state.pools_without {
            return None;
        }
        let chunk = match state.free.pop() {
            Some(chunk) => chunk,
            None => {
                let chunk = self.map_chunk(state.chunks.len() as u32)?;
                state.chunks.push(chunk.clone());
                chunk
            }
        };
        if first {
            state.pools_without -= 1;
        }
        Some(chunk)
    }

    /// A pool came to be, without a chunk.
    pub(crate) fn pool_made(&self) {
        self.lock().pools_without += 1;
    }

    /// A pool is gone, and so are its buffers; its chunks are for others.
    pub(crate) fn pool_gone(&self, chunks: impl Iterator<Item = u32>) {
        let mut state = self.lock();
        let before = state.free.len();
        for index in chunks {
            let chunk = state.chunks[index as usize].clone();
            state.free.push(chunk);
        }
        if state.free.len() == before {
            state.pools_without -= 1;
        }
    }

    pub(crate) fn chunk_start(&self, index: u32) -> NonNull<u8> {
        self.lock().chunks[index as usize].start
    }

    pub(crate) fn chunk(&self, index: u32) -> ChunkMemory {
        let Chunk { start, file, huge, .. } = self.lock().chunks[index as usize].clone();
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
                    map_as_is(CHUNK_BYTES, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::POPULATE)
                }
                (false, true) => map(CHUNK_BYTES, MapFlags::PRIVATE),
                (false, false) => map_as_is(CHUNK_BYTES, MapFlags::PRIVATE),
            };
            return Some((start?, None));
        }
        let huge_flags = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge_flags;
        let file = rustix::fs::memfd_create("ringbolt-buffers", flags).ok()?;
        rustix::fs::ftruncate(&file, CHUNK_BYTES as u64).ok()?;
        // Who maps it need not fear that it shrinks.
        let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals).ok()?;
        let start = map_file(&file, if huge { MapFlags::POPULATE } else { MapFlags::empty() })?;
        if self.config.hugepages {
            advise_huge(start, CHUNK_BYTES);
        }
        Some((start, Some(Arc::new(file))))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Nothing panics with the lock held but on a broken invariant of ours.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for chunk in &self.lock().chunks {
            // SAFETY: `map_chunk` mapped exactly these bytes, and pools and buffers keep the arena
            // alive, so that nothing refers to them any more.
            let _ = unsafe { rustix::mm::munmap(chunk.start.as_ptr().cast(), CHUNK_BYTES) };
        }
    }
}

/// Maps `bytes` of zeroed private memory, of transparent hugepages if there are, or `None` if the machine
/// has none.
pub(crate) fn map(bytes: usize, flags: MapFlags) -> Option<NonNull<u8>> {
    let start = map_as_is(bytes, flags)?;
    if bytes >= CHUNK_BYTES {
        advise_huge(start, bytes);
    }
    Some(start)
}

fn map_as_is(bytes: usize, flags: MapFlags) -> Option<NonNull<u8>> {
    let flags = if cfg!(miri) { MapFlags::PRIVATE } else { flags };
    // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    };
    NonNull::new(start.ok()?.cast::<u8>())
}

/// Asks for transparent hugepages, of a mapping that was just made.
fn advise_huge(start: NonNull<u8>, bytes: usize) {
    // Miri knows no advice.
    if !cfg!(miri) {
        // SAFETY: the advice changes no contents, whatever is mapped there.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    }
}

/// Maps the first [`CHUNK_BYTES`] of a file of ours.
fn map_file(file: &OwnedFd, flags: MapFlags) -> Option<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
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
