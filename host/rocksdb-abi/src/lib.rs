//! The interface between RocksDB's `FileSystem` and Rust, as safe traits.
//!
//! RocksDB's types are C++ classes. A shim in C++ (`plugins/rocksdb/src/filesystem.cc`) implements them over
//! a table of C functions, which this crate makes of a library's [`RocksFiles`] and [`RocksFile`]: a handle
//! is a pointer to a boxed trait object, an error an [`ErrorKind`] and a text. All `unsafe` code is here:
//!
//! ```
//! use std::sync::Arc;
//! use rocksdb_abi::{FileError, ErrorKind, FilesDefinition, RocksFiles};
//! /// Opens nothing.
//! fn open(uri: &str) -> Result<Arc<dyn RocksFiles>, FileError> {
//!     Err(FileError::new(ErrorKind::NotSupported, format!("{uri}: there are no files")))
//! }
//! static NOTHING: FilesDefinition = FilesDefinition { open, close_all: || {} };
//! ```
//!
//! # Panics
//! No panic leaves a function: the call fails with [`ErrorKind::Io`], and the process goes on. A library must
//! therefore be built with `panic = "unwind"`.
//!
//! # Sources
//! The meaning of the calls is that of `rocksdb/file_system.h` of RocksDB 7.8.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod error;
mod files;
mod functions;
mod raw;
mod table;

/// Exports the library's files, a [`FilesDefinition`] that is a `static`, as the shim looks for them: the
/// function `ringbolt_rocksdb_functions`.
#[macro_export]
macro_rules! export_files {
    ($definition:path) => {
        /// The shim's entry: the table of functions.
        #[unsafe(no_mangle)]
        pub extern "C" fn ringbolt_rocksdb_functions() -> *const $crate::FunctionTable {
            $crate::FunctionTable::of(&$definition)
        }
    };
}

pub use error::{ErrorKind, FileError};
pub use files::{
    BegunRead, FileAttributes, FileOpen, FileRead, FilesDefinition, ListedName, RocksFile, RocksFiles,
};
pub use table::FunctionTable;
