//! The kernel's ways to do I/O, each as a ring: what the lab compares.
//!
//! An [`Engine`] is a [`ring::Channel`] that can also wait, as fio's engines queue, commit and reap.
//! [`open`] makes one of a [`Kind`] over [`File`]s: `psync`, `pvsync2`, `libaio` (the system calls, not
//! the library), `io_uring` in its modes, NVMe commands through `io_uring_cmd`, and `null`, which does
//! nothing and so costs what the caller costs. An engine belongs to one thread, and needs no reactor:
//! the thread is the caller's.
//!
//! What the kernel is handed belongs to [`sys::Aio`] and [`sys::Uring`] until it has completed.
//!
//! ```
//! use engines::{Config, Engine, Kind};
//! use ring::{Channel, Op, Request, Tag};
//! let mut engine = engines::open(&Config { kind: Kind::Null, depth: 4, ..Config::default() }, Vec::new(), &[])?;
//! let mut batch = vec![Request::new(Tag(0), Op::Flush, 0, 0)];
//! let mut done = Vec::new();
//! engine.submit(&mut batch);
//! assert_eq!(engine.poll(&mut done), 1);
//! # Ok::<(), engines::OpenError>(())
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod aio;
mod aside;
mod engine;
mod file;
mod null;
mod sync;
mod uring;
pub mod usage;

pub use aio::Aio;
pub use engine::{AnyEngine, Config, Engine, Kind, OpenError, open};
pub use file::{Access, File, FileError, FileKind, Layout, SyncMode};
pub use null::Null;
pub use sync::Sync;
pub use sys::Polling;
pub use uring::{Passthrough, Uring};
