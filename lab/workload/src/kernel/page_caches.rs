//! The page caches of a job's files: what buffered I/O finds in memory, and how the kernel reads ahead.

use dma::AccessOrder;
use io_engines::{EngineFile, PageCache};

use crate::jobfile::PerfJob;

/// The page caches of a job with buffered I/O. As in fio they are dropped before the job and before each further pass over its
/// files, and the kernel knows whether the I/O is random. Otherwise a pass after the first would measure memory.
#[derive(Debug, Default)]
pub(super) struct PageCaches {
    dropped_each_pass: Vec<PageCache>,
    pass: u64,
}

impl PageCaches {
    /// Applies `invalidate` and `fadvise_hint` to the files of a job.
    pub(super) fn new(job: &PerfJob, files: &[EngineFile]) -> PageCaches {
        if job.direct {
            return PageCaches::default();
        }
        let caches: Vec<PageCache> =
            files.iter().filter_map(|file| file.page_cache().ok().flatten()).collect();
        // Best effort: on tmpfs the page cache is the file and cannot be dropped.
        if job.invalidate {
            caches.iter().for_each(|cache| drop(cache.invalidate()));
        }
        if let Some(order) = expected_order(job) {
            caches.iter().for_each(|cache| drop(cache.expect_order(order)));
        }
        let has_passes = job.invalidate && !is_endless(job);
        PageCaches { dropped_each_pass: if has_passes { caches } else { Vec::new() }, pass: 0 }
    }

    /// Whether anything is dropped at the start of a pass.
    pub(super) fn has_passes(&self) -> bool {
        !self.dropped_each_pass.is_empty()
    }

    /// Drops the pages if another pass has begun, but those that are mapped.
    pub(super) fn begin_pass(&mut self, pass: u64) {
        if pass == self.pass {
            return;
        }
        self.pass = pass;
        self.dropped_each_pass.iter().for_each(|cache| drop(cache.invalidate()));
    }
}

/// Whether the job never completes a pass: offsets are drawn until the runtime has passed.
fn is_endless(job: &PerfJob) -> bool {
    let spec = &job.spec;
    spec.time_based && spec.workload.is_random() && !spec.random_map
}

/// The order of I/O that the kernel is to expect.
pub(super) fn expected_order(job: &PerfJob) -> Option<AccessOrder> {
    use crate::jobfile::FadviseHint;
    match job.fadvise_hint {
        FadviseHint::None => None,
        FadviseHint::Workload if !job.spec.workload.is_random() => Some(AccessOrder::Sequential),
        FadviseHint::Random | FadviseHint::Workload => Some(AccessOrder::Random),
        FadviseHint::Sequential => Some(AccessOrder::Sequential),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use io_engines::{FileAccess, FileOpenOptions, SyncMode};
    use rustix::io::{ReadWriteFlags, preadv2};

    use super::*;
    use crate::spec::Workload;

    const BYTES: usize = 4 << 20;

    /// A file on disk, not in memory; `None` where the directory for temporary files has no such files.
    fn file_on_disk(name: &str) -> Option<(std::path::PathBuf, EngineFile)> {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let path = std::env::temp_dir().join(format!("ringbolt-page-cache-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![0x5a; BYTES]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let options = FileOpenOptions {
            access: FileAccess::ReadOnly,
            direct: false,
            sync: SyncMode::None,
            buffered_block_bytes: 4096,
            allow_mounted_write: false,
            grows_to: 0,
        };
        let file = EngineFile::open(path.to_str().unwrap(), &options).unwrap();
        if rustix::fs::statfs(&path).unwrap().f_type as i64 == TMPFS_MAGIC {
            println!("SKIPPED {name}: {} is in memory", path.display());
            std::fs::remove_file(&path).unwrap();
            return None;
        }
        Some((path, file))
    }

    /// Whether the page at an offset is in memory: reads that would wait fail.
    fn is_cached(path: &std::path::Path, offset: u64) -> bool {
        let mut buffer = [0; 1];
        let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
        preadv2(File::open(path).unwrap(), &mut parts, offset, ReadWriteFlags::NOWAIT).is_ok()
    }

    fn job(invalidate: bool) -> PerfJob {
        let mut job = PerfJob::default();
        job.invalidate = invalidate;
        job
    }

    #[test]
    fn the_cache_is_dropped_before_each_pass() {
        let Some((path, file)) = file_on_disk("pass") else { return };
        let last = BYTES as u64 - 4096;
        let read = || assert_eq!(std::fs::read(&path).unwrap().len(), BYTES);
        for invalidate in [false, true] {
            read();
            assert!(is_cached(&path, last));
            let mut caches = PageCaches::new(&job(invalidate), std::slice::from_ref(&file));
            assert_eq!(is_cached(&path, last), !invalidate, "before the first pass");
            read();
            caches.begin_pass(0);
            assert!(is_cached(&path, last), "during a pass");
            caches.begin_pass(1);
            assert_eq!(is_cached(&path, last), !invalidate, "before the second pass");
        }
        read();
        let mut direct = job(true);
        direct.direct = true;
        PageCaches::new(&direct, std::slice::from_ref(&file));
        assert!(is_cached(&path, last), "direct I/O");
        // Random offsets that may repeat have no passes while they are limited by time alone.
        let mut endless = job(true);
        (endless.spec.time_based, endless.spec.workload) = (true, Workload::RandRead);
        let mut caches = PageCaches::new(&endless, std::slice::from_ref(&file));
        read();
        caches.begin_pass(1);
        assert!(is_cached(&path, last), "random offsets");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_mapping_reads_nothing_around_random_pages() {
        use block_io::{Channel, Request, Tag};
        use io_engines::{EngineConfig, EngineKind};
        let Some((path, file)) = file_on_disk("mapped") else { return };
        let (mut job, kind) = (job(true), EngineKind::Mapped);
        job.spec.workload = Workload::RandRead;
        let mut caches = PageCaches::new(&job, std::slice::from_ref(&file));
        let config = EngineConfig { kind, access_order: expected_order(&job), ..EngineConfig::default() };
        let mut engine = io_engines::open(&config, vec![file], &[]).unwrap();
        let pool =
            dma::Pool::new(&dma::Arena::new(dma::ArenaConfig { hugepages: false, ..Default::default() }));
        let (block, mut done) = (1 << 20, Vec::new());
        engine.submit(&mut vec![Request::read(Tag(0), block / 4096, 1, pool.take(4096).unwrap())]);
        assert_eq!((engine.poll(&mut done), done[0].status()), (1, block_io::Status::SUCCESS));
        let are_cached = || [block - 4096, block, block + 4096].map(|at| is_cached(&path, at));
        assert_eq!(are_cached(), [false, true, false]);
        // As with fio, a later pass finds what was mapped.
        caches.begin_pass(1);
        assert_eq!(are_cached(), [false, true, false]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn random_reads_read_nothing_ahead() {
        let Some((path, file)) = file_on_disk("ahead") else { return };
        let read_first = |workload, hint| {
            let mut job = job(true);
            (job.spec.workload, job.fadvise_hint) = (workload, hint);
            PageCaches::new(&job, std::slice::from_ref(&file));
            let mut buffer = vec![0; 4096];
            rustix::io::pread(&file, &mut buffer, 0).unwrap();
        };
        let is_read_ahead = || is_cached(&path, 4096);
        use crate::jobfile::FadviseHint::{None, Random, Sequential, Workload as FromWorkload};
        for (workload, hint, expected) in [
            (Workload::Read, FromWorkload, true),
            (Workload::RandRead, FromWorkload, false),
            (Workload::RandRead, Sequential, true),
            (Workload::Read, Random, false),
        ] {
            read_first(workload, hint);
            // What is read ahead arrives later than what is read.
            let began = Instant::now();
            while expected && !is_read_ahead() && began.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
            }
            assert_eq!(is_read_ahead(), expected, "{workload:?} {hint:?}");
        }
        let mut unadvised = job(true);
        unadvised.fadvise_hint = None;
        assert_eq!(expected_order(&unadvised), Option::None);
        std::fs::remove_file(path).unwrap();
    }
}
