//! The engine trait, its configuration and [`open`].

use std::io;

use block_io::{Channel, Completion, Op, Request, Status};
use dma::{AccessOrder, Data};
use os::{RequestPriorities, UringPolling};

use crate::{
    AioEngine, EngineFile, FileKind, MetadataOperation, MetadataOperationEngine, NullEngine,
    PassthroughEngine, PosixAioEngine, SyncEngine, UringEngine,
};

/// A channel for block I/O through the kernel that can also block until completions arrive.
///
/// Tags of requests in flight are unique and below the depth of the engine. `flow` is the index of the
/// file; `lba` and `blocks` are in units of [`EngineFile::block_bytes`]. [`Op::Flush`] is `fsync`, or
/// `fdatasync` with [`EngineConfig::data_sync`]. [`Op::Unmap`] discards synchronously in `submit`, as most
/// kernel interfaces have no asynchronous discard.
pub trait IoEngine: Channel<Request = Request<Data>, Completion = Completion<Data>> {
    /// Blocks until a completion can be polled, for at most `timeout_ns`; returns at once if nothing is in
    /// flight. Signals may interrupt it.
    fn wait(&mut self, timeout_ns: u64);

    /// Requests submitted and not yet returned by `poll`.
    fn in_flight(&self) -> usize;

    /// Thread identifier of the kernel's submission polling thread (SQPOLL), if there is one.
    fn submission_thread(&self) -> Option<u32> {
        None
    }

    /// Thread identifiers of the engine's own threads, which execute requests.
    fn worker_threads(&self) -> Vec<u32> {
        Vec::new()
    }
}

/// The engines, named as in fio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// `null`: completes everything at the next poll.
    Null,
    /// `psync`: pread and pwrite, one at a time.
    #[default]
    Psync,
    /// `pvsync2`: preadv2 and pwritev2, one at a time.
    Pvsync2,
    /// `mmap`: copies to and from a mapping of the file, one at a time; a flush is msync.
    Mapped,
    /// `libaio`: io_submit and io_getevents.
    Libaio,
    /// `posixaio`: threads with pread and pwrite, one I/O of a file at a time.
    PosixAio,
    /// `io_uring`.
    Uring,
    /// `io_uring_cmd`: NVMe commands to `/dev/ngXnY`.
    Passthrough,
    /// `falloc`: fallocate, which extends the file for writes, keeps its size for reads, and punches holes
    /// for trims.
    Allocate,
    /// `ftruncate`: a write sets the file's size to its offset.
    Truncate,
    /// `filecreate` and its like: operations on names, without data.
    File(MetadataOperation),
}

impl EngineKind {
    /// Every engine with its name.
    pub const NAMES: [(EngineKind, &'static str); 16] = [
        (EngineKind::Null, "null"),
        (EngineKind::Psync, "psync"),
        (EngineKind::Pvsync2, "pvsync2"),
        (EngineKind::Mapped, "mmap"),
        (EngineKind::Libaio, "libaio"),
        (EngineKind::PosixAio, "posixaio"),
        (EngineKind::Uring, "io_uring"),
        (EngineKind::Passthrough, "io_uring_cmd"),
        (EngineKind::Allocate, "falloc"),
        (EngineKind::Truncate, "ftruncate"),
        (EngineKind::File(MetadataOperation::CreateFile), "filecreate"),
        (EngineKind::File(MetadataOperation::StatFile), "filestat"),
        (EngineKind::File(MetadataOperation::DeleteFile), "filedelete"),
        (EngineKind::File(MetadataOperation::CreateDirectory), "dircreate"),
        (EngineKind::File(MetadataOperation::StatDirectory), "dirstat"),
        (EngineKind::File(MetadataOperation::DeleteDirectory), "dirdelete"),
    ];

    /// Parses the name of the ioengine in fio.
    pub fn from_name(name: &str) -> Option<EngineKind> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// Name of the ioengine in fio.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(kind, _)| *kind == self).map_or("null", |(_, name)| name)
    }

    /// Whether only one I/O is in flight at a time, independent of the depth.
    pub const fn is_synchronous(self) -> bool {
        matches!(
            self,
            EngineKind::Psync
                | EngineKind::Pvsync2
                | EngineKind::Mapped
                | EngineKind::Allocate
                | EngineKind::Truncate
                | EngineKind::File(_)
        )
    }
}

/// Parameters of an engine; named after the options of fio.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The engine.
    pub kind: EngineKind,
    /// `iodepth`: maximum requests in flight, at least 1.
    pub depth: u32,
    /// `sqthread_poll`, `sqthread_poll_cpu`, `sqthread_poll_idle` (default 1000 ms, as in fio) and `hipri`:
    /// the io_uring modes of the published studies. `hipri` is `RWF_HIPRI` for `pvsync2`.
    pub polling: UringPolling,
    /// `fixedbufs`: registers the buffers, so the kernel does not map them for each I/O.
    pub fixed_buffers: bool,
    /// `registerfiles`: registers the files, so the kernel does not look them up for each I/O.
    pub register_files: bool,
    /// `nonvectored`: uses non-vectored reads and writes instead of an iovec of one element.
    pub nonvectored: bool,
    /// `userspace_reap` of `libaio`: reads events from the mapped completion ring without a system call.
    pub userspace_reap: bool,
    /// A flush is `fdatasync` instead of `fsync`.
    pub data_sync: bool,
    /// `iodepth_batch`: maximum requests per submission; 0 for no limit.
    pub batch_max: u32,
    /// `iodepth_batch_complete_max`: maximum completions per poll; 0 for no limit.
    pub reap_max: u32,
    /// I/O priorities of single requests, for `libaio` and `io_uring`; `None` for that of the thread.
    pub priorities: Option<RequestPriorities>,
    /// The expected order of I/O through mappings (`mmap`), by which the kernel reads ahead; `None` for its
    /// default.
    pub access_order: Option<AccessOrder>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            kind: EngineKind::default(),
            depth: 1,
            polling: UringPolling { sqpoll_idle_ms: 1000, ..UringPolling::default() },
            fixed_buffers: false,
            register_files: false,
            nonvectored: true,
            userspace_reap: false,
            data_sync: false,
            batch_max: 0,
            reap_max: 0,
            priorities: None,
            access_order: None,
        }
    }
}

/// Error of opening an engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineOpenError {
    /// A system call failed.
    #[error("ioengine={engine}: {call}: {error}{hint}")]
    Kernel {
        /// Name of the engine.
        engine: &'static str,
        /// The system call or option.
        call: &'static str,
        /// The error it returned.
        error: io::Error,
        /// A hint for the user, preceded by a semicolon, or empty.
        hint: &'static str,
    },
    /// The engine does not support this type of file.
    #[error("ioengine={engine}: {path} {reason}")]
    File {
        /// Name of the engine.
        engine: &'static str,
        /// Path of the file.
        path: String,
        /// The reason, as the rest of a sentence that starts with the path.
        reason: &'static str,
    },
    /// More entries or files than the kernel supports.
    #[error("ioengine={engine}: {count} {what} exceed the kernel's limit of {max}")]
    TooMany {
        /// Name of the engine.
        engine: &'static str,
        /// Requested number.
        count: usize,
        /// The resource, in the plural.
        what: &'static str,
        /// Limit of the kernel.
        max: usize,
    },
}

/// Any of the engines. Match on it to monomorphize a loop per engine, without a dynamic call per I/O.
pub enum AnyEngine {
    /// `null`.
    Null(NullEngine),
    /// `psync`, `pvsync2`, `mmap`, `falloc` and `ftruncate`.
    Sync(SyncEngine),
    /// `libaio`.
    Aio(AioEngine),
    /// `posixaio`.
    PosixAio(PosixAioEngine),
    /// `io_uring`.
    Uring(UringEngine),
    /// `io_uring_cmd`.
    Passthrough(PassthroughEngine),
    /// `filecreate` and its like.
    File(MetadataOperationEngine),
}

/// Opens an engine over `files`, which `flow` indexes. `requests` are those that will be submitted; their
/// buffers are registered if the configuration says so.
pub fn open(
    config: &EngineConfig,
    files: Vec<EngineFile>,
    requests: &[Request<Data>],
) -> Result<AnyEngine, EngineOpenError> {
    assert!(config.depth > 0, "the depth of an engine is at least 1");
    let engine = config.kind.name();
    let is_mismatch = |file: &EngineFile| file.is_nvme_generic() != (config.kind == EngineKind::Passthrough);
    if config.kind != EngineKind::Null
        && let Some(file) = files.iter().find(|file| is_mismatch(file))
    {
        let path = file.path().to_string();
        let reason = match file.is_nvme_generic() {
            true => "accepts only NVMe commands: use ioengine=io_uring_cmd, or the block device /dev/nvmeXnY",
            false => "is not an NVMe generic device such as /dev/ng0n1, which this engine requires",
        };
        return Err(EngineOpenError::File { engine, path, reason });
    }
    if matches!(config.kind, EngineKind::Allocate | EngineKind::Truncate)
        && let Some(file) = files.iter().find(|file| file.kind() != FileKind::Regular)
    {
        let path = file.path().to_string();
        return Err(EngineOpenError::File { engine, path, reason: "is not a regular file" });
    }
    Ok(match config.kind {
        EngineKind::Null => AnyEngine::Null(NullEngine::new(config)),
        EngineKind::Psync | EngineKind::Pvsync2 | EngineKind::Allocate | EngineKind::Truncate => {
            AnyEngine::Sync(SyncEngine::new(config, files))
        }
        EngineKind::Mapped => AnyEngine::Sync(SyncEngine::mapped(config, files)?),
        EngineKind::Libaio => AnyEngine::Aio(AioEngine::open(config, files)?),
        EngineKind::PosixAio => AnyEngine::PosixAio(PosixAioEngine::new(config, files)),
        EngineKind::Uring => AnyEngine::Uring(UringEngine::open(config, files, requests)?),
        EngineKind::Passthrough => AnyEngine::Passthrough(PassthroughEngine::open(config, files, requests)?),
        EngineKind::File(operation) => {
            let paths = files.iter().map(|file| file.path().to_string()).collect();
            AnyEngine::File(MetadataOperationEngine::new(operation, paths))
        }
    })
}

macro_rules! each {
    ($any:expr, $engine:ident => $body:expr) => {
        match $any {
            AnyEngine::Null($engine) => $body,
            AnyEngine::Sync($engine) => $body,
            AnyEngine::Aio($engine) => $body,
            AnyEngine::PosixAio($engine) => $body,
            AnyEngine::Uring($engine) => $body,
            AnyEngine::Passthrough($engine) => $body,
            AnyEngine::File($engine) => $body,
        }
    };
}

impl Channel for AnyEngine {
    type Request = Request<Data>;
    type Completion = Completion<Data>;

    fn submit(&mut self, batch: &mut Vec<Request<Data>>) {
        each!(self, engine => engine.submit(batch));
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Data>>) -> usize {
        each!(self, engine => engine.poll(sink))
    }
}

impl IoEngine for AnyEngine {
    fn wait(&mut self, timeout_ns: u64) {
        each!(self, engine => engine.wait(timeout_ns));
    }

    fn in_flight(&self) -> usize {
        each!(self, engine => engine.in_flight())
    }

    fn submission_thread(&self) -> Option<u32> {
        each!(self, engine => engine.submission_thread())
    }

    fn worker_threads(&self) -> Vec<u32> {
        each!(self, engine => engine.worker_threads())
    }
}

/// The status of an I/O of `wanted` bytes from the kernel's `result`: a number of bytes or a negative errno.
/// A short transfer is an error: the range extends beyond the end of the file.
pub(crate) fn status_of(op: Op, result: i64, wanted: u64) -> Status {
    if result >= 0 {
        let is_complete = !op.has_data() || result as u64 == wanted;
        return if is_complete { Status::SUCCESS } else { Status::DATA_TRANSFER_ERROR };
    }
    match -result as i32 {
        libc::EIO if op == Op::Read => Status::UNRECOVERED_READ_ERROR,
        libc::EIO => Status::WRITE_FAULT,
        libc::ENODATA => Status::UNRECOVERED_READ_ERROR,
        libc::EINVAL => Status::INVALID_FIELD,
        libc::EOPNOTSUPP => Status::INVALID_OPCODE,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Status::CAPACITY_EXCEEDED,
        libc::EAGAIN => Status::NAMESPACE_NOT_READY,
        libc::EROFS | libc::EPERM | libc::EBADF => Status::NAMESPACE_WRITE_PROTECTED,
        libc::ETIMEDOUT | libc::EINTR => Status::COMMAND_INTERRUPTED,
        libc::EILSEQ => Status::GUARD_CHECK_ERROR,
        libc::ENOLINK => Status::INTERNAL_PATH_ERROR,
        _ => Status::INTERNAL_ERROR,
    }
}
