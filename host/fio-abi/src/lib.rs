//! fio's interface for external I/O engines, as a safe trait.
//!
//! fio opens a shared library and calls its `get_ioengine`, which returns a table of functions. The table,
//! and the two structures that an engine shares with fio (`io_u` and `fio_file`), change between versions of
//! fio: [`FioVersion`] knows their layouts from 3.30 to 3.42, so that one library serves all. fio refuses any
//! other table as "bad ioops version"; here a line says which versions are known instead.
//!
//! A library implements [`FioEngine`], describes it in an [`EngineDefinition`], and exports it with
//! [`export_engine!`]. All `unsafe` code is here:
//!
//! ```
//! use std::time::Duration;
//! use fio_abi::{EngineDefinition, FinishedUnit, FioEngine, IoUnit, Queued};
//! /// Completes every I/O at once.
//! struct Nothing;
//! impl FioEngine for Nothing {
//!     fn open(&mut self, _name: &str) -> Result<(), String> { Ok(()) }
//!     fn close(&mut self, _name: &str) {}
//!     fn queue(&mut self, unit: IoUnit) -> Queued { Queued::Completed(unit.finish(Ok(()))) }
//!     fn commit(&mut self) {}
//!     fn reap(&mut self, _min: usize, _max: usize, _limit: Option<Duration>, _to: &mut Vec<FinishedUnit>) {}
//! }
//! static NOTHING: EngineDefinition = EngineDefinition {
//!     name: c"nothing",
//!     options: &[],
//!     file_bytes: |_| Ok(1 << 30),
//!     start: || Ok(Box::new(Nothing)),
//! };
//! ```
//!
//! # Panics
//! No panic leaves an engine: the job's engine is dead from then on, its memory is leaked, since a device may
//! still write to it, and all further calls are errors. A library must therefore be built with
//! `panic = "unwind"`; one that is not is refused when fio loads it.
//!
//! # Sources
//! The layouts are facts of fio's `ioengines.h`, `io_u.h`, `file.h` and `parse.h`; a test compares them with
//! the headers of a source tree.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod engine;
mod functions;
mod loaded;
mod table;
mod unit;
mod version;

/// Exports the library's engine, an [`EngineDefinition`] that is a `static`, as fio looks for it: the
/// function `get_ioengine`.
#[macro_export]
macro_rules! export_engine {
    ($definition:path) => {
        /// fio's entry: returns the table of functions.
        ///
        /// # Safety
        /// `ops` is where fio takes the address from.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn get_ioengine(ops: *mut *mut ::core::ffi::c_void) {
            // SAFETY: the caller's promise.
            unsafe { $definition.get_ioengine(ops) };
        }
    };
}

pub use engine::{EngineDefinition, EngineOption, FioEngine, OPTIONS_MAX, Queued};
pub use unit::{FinishedUnit, IoUnit, UnitKind};
pub use version::FioVersion;
