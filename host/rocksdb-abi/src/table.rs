//! The table of functions that the shim calls. Its layout is that of `struct FunctionTable` in the shim.

use std::ffi::{c_char, c_void};

use crate::error::ErrorText;
use crate::files::FilesDefinition;
use crate::functions;
use crate::raw::{Bytes, FileHandle, ListCallback, ReadHandle, ReadOfShim, StoreHandle};

/// The number of the layout, which the shim compares.
const LAYOUT: u32 = 3;

/// The functions. Each returns false if it fails, and then has set the error.
#[repr(C)]
pub struct FunctionTable {
    layout: u32,
    definition: &'static FilesDefinition,
    store_open: extern "C" fn(&FilesDefinition, Bytes, &mut StoreHandle, &mut ErrorText) -> bool,
    store_close: extern "C" fn(StoreHandle),
    close_all: extern "C" fn(&FilesDefinition),
    open: extern "C" fn(StoreHandle, Bytes, i32, &mut FileHandle, &mut ErrorText) -> bool,
    lock: extern "C" fn(StoreHandle, Bytes, &mut FileHandle, &mut ErrorText) -> bool,
    status: extern "C" fn(StoreHandle, Bytes, &mut bool, &mut u64, &mut ErrorText) -> bool,
    list: extern "C" fn(StoreHandle, Bytes, ListCallback, *mut c_void, &mut ErrorText) -> bool,
    unlink: extern "C" fn(StoreHandle, Bytes, &mut ErrorText) -> bool,
    make_directory: extern "C" fn(StoreHandle, Bytes, &mut ErrorText) -> bool,
    remove_directory: extern "C" fn(StoreHandle, Bytes, &mut ErrorText) -> bool,
    rename: extern "C" fn(StoreHandle, Bytes, Bytes, &mut ErrorText) -> bool,
    sync_directory: extern "C" fn(StoreHandle, Bytes, &mut ErrorText) -> bool,
    free_bytes: extern "C" fn(StoreHandle, &mut u64, &mut ErrorText) -> bool,
    size: extern "C" fn(FileHandle) -> u64,
    read: extern "C" fn(FileHandle, u64, *mut c_char, usize, &mut usize, &mut ErrorText) -> bool,
    read_many: extern "C" fn(FileHandle, *mut ReadOfShim, usize),
    begin_read: extern "C" fn(FileHandle, u64, usize, &mut ReadHandle, &mut ErrorText) -> bool,
    finish_read: extern "C" fn(ReadHandle, *mut c_char, usize, &mut usize, &mut ErrorText) -> bool,
    drop_read: extern "C" fn(ReadHandle),
    append: extern "C" fn(FileHandle, Bytes, &mut ErrorText) -> bool,
    write: extern "C" fn(FileHandle, u64, Bytes, &mut ErrorText) -> bool,
    write_out: extern "C" fn(FileHandle, &mut ErrorText) -> bool,
    allocate: extern "C" fn(FileHandle, u64, &mut ErrorText) -> bool,
    sync: extern "C" fn(FileHandle, &mut ErrorText) -> bool,
    truncate: extern "C" fn(FileHandle, u64, &mut ErrorText) -> bool,
    close: extern "C" fn(FileHandle, &mut ErrorText) -> bool,
    free: extern "C" fn(FileHandle),
}

impl FunctionTable {
    /// The table of a definition; it stays for the life of the process.
    pub fn of(definition: &'static FilesDefinition) -> *const FunctionTable {
        Box::leak(Box::new(FunctionTable {
            layout: LAYOUT,
            definition,
            store_open: functions::store_open,
            store_close: functions::store_close,
            close_all: functions::close_all,
            open: functions::open,
            lock: functions::lock,
            status: functions::status,
            list: functions::list,
            unlink: functions::unlink,
            make_directory: functions::make_directory,
            remove_directory: functions::remove_directory,
            rename: functions::rename,
            sync_directory: functions::sync_directory,
            free_bytes: functions::free_bytes,
            size: functions::size,
            read: functions::read,
            read_many: functions::read_many,
            begin_read: functions::begin_read,
            finish_read: functions::finish_read,
            drop_read: functions::drop_read,
            append: functions::append,
            write: functions::write,
            write_out: functions::write_out,
            allocate: functions::allocate,
            sync: functions::sync,
            truncate: functions::truncate,
            close: functions::close,
            free: functions::free,
        }))
    }
}
