//! I/O engines: the Linux kernel's I/O interfaces behind one trait, for the lab to compare.
//!
//! An [`IoEngine`] is a [`block_io::Channel`] that can also wait, like an ioengine of fio. [`open`] opens an
//! [`EngineKind`] over [`EngineFile`]s: `psync`, `pvsync2`, `mmap`, `libaio` (the system calls, not the
//! library), `posixaio` (threads, without the C library's), `io_uring` in its modes, NVMe passthrough with
//! `io_uring_cmd`, and `null`, which performs no I/O and so measures the cost of the caller;
//! [`MetadataOperation`]s create, query and delete files. An engine belongs to one thread and needs no
//! reactor.
//!
//! [`os::AioQueue`], [`os::ThreadQueue`] and [`os::UringQueue`] own the buffers of requests in flight until
//! they are complete.
//!
//! ```
//! use io_engines::{EngineConfig, EngineKind, IoEngine};
//! use block_io::{Channel, Op, Request, Tag};
//! let config = EngineConfig { kind: EngineKind::Null, depth: 4, ..EngineConfig::default() };
//! let mut engine = io_engines::open(&config, Vec::new(), &[])?;
//! let mut batch = vec![Request::new(Tag(0), Op::Flush, 0, 0)];
//! let mut done = Vec::new();
//! engine.submit(&mut batch);
//! assert_eq!(engine.poll(&mut done), 1);
//! # Ok::<(), io_engines::EngineOpenError>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod aio;
mod engine;
mod file;
mod file_operations;
mod mapped;
mod null;
mod posix_aio;
mod sync;
mod synchronous;
mod uring;
pub mod usage;

pub use aio::AioEngine;
pub use engine::{AnyEngine, EngineConfig, EngineKind, EngineOpenError, IoEngine, open};
pub use file::{
    DeviceZones, EngineFile, EngineFileError, FileAccess, FileKind, FileOpenOptions, FileZones, PageCache,
    SyncMode, WriteLock,
};
pub use file_operations::{MetadataOperation, MetadataOperationEngine};
pub use null::NullEngine;
pub use os::UringPolling;
pub use posix_aio::PosixAioEngine;
pub use sync::SyncEngine;
pub use uring::{PassthroughEngine, UringEngine};
