//! What the shim passes: handles, ranges of memory and reads. The layouts are those of the shim.

use std::ffi::{c_char, c_void};

use crate::error::ErrorText;
use crate::files::{BegunRead, RocksFile, RocksFiles};

/// An open store.
pub(crate) type StoreHandle = *const std::sync::Arc<dyn RocksFiles>;
/// An open file.
pub(crate) type FileHandle = *const Box<dyn RocksFile>;
/// A read that was begun.
pub(crate) type ReadHandle = *const Box<dyn BegunRead>;

/// A range of bytes of the shim's.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    pub(crate) data: *const c_char,
    pub(crate) length: usize,
}

/// A read of the shim's, with its result.
#[repr(C)]
pub(crate) struct ReadOfShim {
    pub(crate) offset: u64,
    pub(crate) out: *mut c_char,
    pub(crate) length: usize,
    pub(crate) read: usize,
    pub(crate) error: ErrorText,
}

/// Called with a name, whether it is a directory, and its bytes.
pub(crate) type ListCallback = extern "C" fn(*mut c_void, Bytes, bool, u64);
