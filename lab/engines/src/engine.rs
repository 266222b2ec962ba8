//! What all engines share.

use std::io;

use memory::Buffer;
use ring::{Channel, Completion, Op, Request, Status};
use sys::Polling;

use crate::{Aio, File, Null, Passthrough, Sync, Uring};

/// A ring of block I/O that can wait.
///
/// Tags of requests in flight differ and lie below the depth that the engine was opened with. `flow` is
/// the index of the file; `lba` and `blocks` count its [`File::block_bytes`]. [`Op::Flush`] is `fsync`,
/// or `fdatasync` where the configuration says so. [`Op::Unmap`] discards, at once in `submit`, as the
/// kernel offers no other way to most engines.
pub trait Engine: Channel<Request = Request<Buffer>, Completion = Completion<Buffer>> {
    /// Returns when something can be polled, after `timeout_ns`, or at once when nothing is in flight.
    /// Signals may end it early.
    fn wait(&mut self, timeout_ns: u64);

    /// Requests taken and not yet polled.
    fn in_flight(&self) -> usize;

    /// The kernel thread that submits for it, where there is one.
    fn submission_thread(&self) -> Option<u32> {
        None
    }
}

/// The engines by fio's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// `null`: completes everything at the next poll.
    Null,
    /// `psync`: pread and pwrite, one at a time.
    #[default]
    Psync,
    /// `pvsync2`: preadv2 and pwritev2, one at a time.
    Pvsync2,
    /// `libaio`: io_submit and io_getevents.
    Libaio,
    /// `io_uring`.
    Uring,
    /// `io_uring_cmd`: NVMe commands to `/dev/ngXnY`.
    Passthrough,
}

impl Kind {
    /// Every engine and its name.
    pub const NAMES: [(Kind, &'static str); 6] = [
        (Kind::Null, "null"),
        (Kind::Psync, "psync"),
        (Kind::Pvsync2, "pvsync2"),
        (Kind::Libaio, "libaio"),
        (Kind::Uring, "io_uring"),
        (Kind::Passthrough, "io_uring_cmd"),
    ];

    /// From fio's name.
    pub fn from_name(name: &str) -> Option<Kind> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(kind, _)| *kind)
    }

    /// fio's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(kind, _)| *kind == self).map_or("null", |(_, name)| name)
    }

    /// Whether one I/O ends before the next begins, whatever the depth.
    pub const fn is_synchronous(self) -> bool {
        matches!(self, Kind::Psync | Kind::Pvsync2)
    }
}

/// How an engine is opened.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which one.
    pub kind: Kind,
    /// Most requests in flight.
    pub depth: u32,
    /// `sqthread_poll`, `sqthread_poll_cpu`, `sqthread_poll_idle` (fio's default is 1000 ms) and `hipri`:
    /// the papers' modes of io_uring. `hipri` is `RWF_HIPRI` for `pvsync2`.
    pub polling: Polling,
    /// `fixedbufs`: buffers are registered, so that the kernel does not map them for each I/O.
    pub fixed_buffers: bool,
    /// `registerfiles`: files are registered, so that the kernel does not look them up for each I/O.
    pub register_files: bool,
    /// `nonvectored`: one address an I/O, not a vector of one.
    pub nonvectored: bool,
    /// `userspace_reap` of `libaio`: events are read from the ring that the kernel shares.
    pub userspace_reap: bool,
    /// Whether a flush is `fdatasync` and not `fsync`.
    pub data_sync: bool,
    /// `iodepth_batch`: most requests in one submission; 0 for as many as there are.
    pub batch_max: u32,
    /// `iodepth_batch_complete_max`: most completions that one poll returns; 0 for as many as there are.
    pub reap_max: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            kind: Kind::default(),
            depth: 1,
            polling: Polling { submission_idle_ms: 1000, ..Polling::default() },
            fixed_buffers: false,
            register_files: false,
            nonvectored: true,
            userspace_reap: false,
            data_sync: false,
            batch_max: 0,
            reap_max: 0,
        }
    }
}

/// Why an engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The kernel does not want to.
    #[error("ioengine={engine}: {call}: {error}{hint}")]
    Kernel {
        /// The engine.
        engine: &'static str,
        /// What was asked.
        call: &'static str,
        /// What it answered.
        error: io::Error,
        /// What may help, led by a semicolon.
        hint: &'static str,
    },
    /// The files are not of the engine's kind.
    #[error("ioengine={engine}: {path} {reason}")]
    File {
        /// The engine.
        engine: &'static str,
        /// The file.
        path: String,
        /// Why not.
        reason: &'static str,
    },
    /// More than the kernel registers.
    #[error("ioengine={engine}: {count} {what} are above the kernel's {max}")]
    TooMany {
        /// The engine.
        engine: &'static str,
        /// How many.
        count: usize,
        /// Of what.
        what: &'static str,
        /// The most.
        max: usize,
    },
}

/// Any of the engines. Match on it to have a loop compiled for each, without a dynamic call an I/O.
pub enum AnyEngine {
    /// `null`.
    Null(Null),
    /// `psync` and `pvsync2`.
    Sync(Sync),
    /// `libaio`.
    Aio(Aio),
    /// `io_uring`.
    Uring(Uring),
    /// `io_uring_cmd`.
    Passthrough(Passthrough),
}

/// Opens an engine over files, in the order in which `flow` counts them. `requests` are those that
/// will be submitted; the memory of their buffers is registered where the configuration asks for it.
pub fn open(config: &Config, files: Vec<File>, requests: &[Request<Buffer>]) -> Result<AnyEngine, OpenError> {
    assert!(config.depth > 0, "an engine of no depth does nothing");
    let engine = config.kind.name();
    let generic = |file: &File| file.is_nvme_generic() != (config.kind == Kind::Passthrough);
    if config.kind != Kind::Null
        && let Some(file) = files.iter().find(|file| generic(file))
    {
        let path = file.path().to_string();
        let reason = match file.is_nvme_generic() {
            true => "takes NVMe commands only: use ioengine=io_uring_cmd, or its block device /dev/nvmeXnY",
            false => "is no NVMe generic device as /dev/ng0n1, which this engine needs",
        };
        return Err(OpenError::File { engine, path, reason });
    }
    Ok(match config.kind {
        Kind::Null => AnyEngine::Null(Null::new(config)),
        Kind::Psync | Kind::Pvsync2 => AnyEngine::Sync(Sync::new(config, files)),
        Kind::Libaio => AnyEngine::Aio(Aio::open(config, files)?),
        Kind::Uring => AnyEngine::Uring(Uring::open(config, files, requests)?),
        Kind::Passthrough => AnyEngine::Passthrough(Passthrough::open(config, files, requests)?),
    })
}

macro_rules! each {
    ($any:expr, $engine:ident => $body:expr) => {
        match $any {
            AnyEngine::Null($engine) => $body,
            AnyEngine::Sync($engine) => $body,
            AnyEngine::Aio($engine) => $body,
            AnyEngine::Uring($engine) => $body,
            AnyEngine::Passthrough($engine) => $body,
        }
    };
}

impl Channel for AnyEngine {
    type Request = Request<Buffer>;
    type Completion = Completion<Buffer>;

    fn submit(&mut self, batch: &mut Vec<Request<Buffer>>) {
        each!(self, engine => engine.submit(batch));
    }

    fn poll(&mut self, sink: &mut Vec<Completion<Buffer>>) -> usize {
        each!(self, engine => engine.poll(sink))
    }
}

impl Engine for AnyEngine {
    fn wait(&mut self, timeout_ns: u64) {
        each!(self, engine => engine.wait(timeout_ns));
    }

    fn in_flight(&self) -> usize {
        each!(self, engine => engine.in_flight())
    }

    fn submission_thread(&self) -> Option<u32> {
        each!(self, engine => engine.submission_thread())
    }
}

/// The status of an I/O of `blocks` blocks to which the kernel answered `result`: bytes, or a negative
/// error number. Fewer bytes than asked for are an error: the range ends behind the file.
pub(crate) fn status_of(op: Op, result: i64, wanted: u64) -> Status {
    if result >= 0 {
        let whole = !op.has_data() || result as u64 == wanted;
        return if whole { Status::SUCCESS } else { Status::DATA_TRANSFER_ERROR };
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
