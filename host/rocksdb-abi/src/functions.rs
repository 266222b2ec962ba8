//! The functions of the table. None of them unwinds into RocksDB.
//!
//! The shim passes handles that `store_open`, `open`, `lock` and `begin_read` returned and that were not
//! freed, ranges of memory that it has for the time of a call, and errors of its own: that is what every
//! `SAFETY` here rests on.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::error::{ErrorKind, ErrorText, FileError};
use crate::files::{BegunRead, FileOpen, FileRead, FilesDefinition, RocksFile, RocksFiles};
use crate::raw::{Bytes, FileHandle, ListCallback, ReadHandle, ReadOfShim, StoreHandle};

/// Runs a call; `None` if it fails, and the error is set then.
fn guarded<R>(error: &mut ErrorText, call: impl FnOnce() -> Result<R, FileError>) -> Option<R> {
    let outcome = catch_unwind(AssertUnwindSafe(call));
    // The panic has printed its own line.
    let panicked =
        || FileError::new(ErrorKind::Io, "a panic in Ringbolt: please report the lines it printed");
    match outcome.unwrap_or_else(|_| Err(panicked())) {
        Ok(value) => Some(value),
        Err(failure) => {
            error.set(&failure);
            None
        }
    }
}

/// The bytes of a range of the shim's, for the time of the call.
fn bytes<'a>(range: Bytes) -> &'a [u8] {
    if range.length == 0 {
        return &[];
    }
    // SAFETY: the shim has this memory for the time of the call, see above.
    unsafe { std::slice::from_raw_parts(range.data.cast(), range.length) }
}

/// Memory of the shim's that a call fills.
fn bytes_mut<'a>(out: *mut c_char, length: usize) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: the shim has this memory for the time of the call and uses it for nothing else, see above.
    unsafe { std::slice::from_raw_parts_mut(out.cast(), length) }
}

fn store<'a>(handle: StoreHandle) -> &'a dyn RocksFiles {
    // SAFETY: the handle is of `store_open` and not closed, see above.
    unsafe { &**handle }
}

fn file<'a>(handle: FileHandle) -> &'a dyn RocksFile {
    // SAFETY: the handle is of `open` or `lock` and not freed, see above.
    unsafe { &**handle }
}

pub(crate) extern "C" fn store_open(
    definition: &FilesDefinition,
    uri: Bytes,
    handle: &mut StoreHandle,
    error: &mut ErrorText,
) -> bool {
    let opened = guarded(error, || {
        let uri = std::str::from_utf8(bytes(uri));
        let uri = uri.map_err(|_| FileError::new(ErrorKind::Invalid, "the URI is not UTF-8"))?;
        (definition.open)(uri)
    });
    let is_open = opened.is_some();
    if let Some(opened) = opened {
        *handle = Box::into_raw(Box::new(opened));
    }
    is_open
}

pub(crate) extern "C" fn store_close(handle: StoreHandle) {
    // SAFETY: the handle is of `store_open`, and closed once, see above.
    let store: Box<Arc<dyn RocksFiles>> = unsafe { Box::from_raw(handle.cast_mut()) };
    // A panic has printed its line, and this call returns nothing.
    _ = catch_unwind(AssertUnwindSafe(|| drop(store)));
}

pub(crate) extern "C" fn close_all(definition: &FilesDefinition) {
    // As above.
    _ = catch_unwind(AssertUnwindSafe(|| (definition.close_all)()));
}

fn opened(
    handle: &mut FileHandle,
    error: &mut ErrorText,
    open: impl FnOnce() -> Result<Box<dyn RocksFile>, FileError>,
) -> bool {
    match guarded(error, open) {
        Some(file) => {
            *handle = Box::into_raw(Box::new(file));
            true
        }
        None => false,
    }
}

pub(crate) extern "C" fn open(
    handle: StoreHandle,
    path: Bytes,
    how: i32,
    file: &mut FileHandle,
    error: &mut ErrorText,
) -> bool {
    opened(file, error, || {
        let how = FileOpen::from_number(how);
        let how = how.ok_or_else(|| FileError::new(ErrorKind::Invalid, "a way to open that is not known"))?;
        store(handle).open(bytes(path), how)
    })
}

pub(crate) extern "C" fn lock(
    handle: StoreHandle,
    path: Bytes,
    file: &mut FileHandle,
    error: &mut ErrorText,
) -> bool {
    opened(file, error, || store(handle).lock(bytes(path)))
}

pub(crate) extern "C" fn status(
    handle: StoreHandle,
    path: Bytes,
    is_directory: &mut bool,
    size: &mut u64,
    error: &mut ErrorText,
) -> bool {
    let found = guarded(error, || store(handle).status(bytes(path)));
    if let Some(status) = found {
        (*is_directory, *size) = (status.is_directory, status.bytes);
    }
    found.is_some()
}

pub(crate) extern "C" fn list(
    handle: StoreHandle,
    path: Bytes,
    callback: ListCallback,
    context: *mut c_void,
    error: &mut ErrorText,
) -> bool {
    let Some(names) = guarded(error, || store(handle).list(bytes(path))) else { return false };
    for item in &names {
        let name = Bytes { data: item.name.as_ptr().cast(), length: item.name.len() };
        callback(context, name, item.status.is_directory, item.status.bytes);
    }
    true
}

pub(crate) extern "C" fn unlink(handle: StoreHandle, path: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || store(handle).unlink(bytes(path))).is_some()
}

pub(crate) extern "C" fn make_directory(handle: StoreHandle, path: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || store(handle).make_directory(bytes(path))).is_some()
}

pub(crate) extern "C" fn remove_directory(handle: StoreHandle, path: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || store(handle).remove_directory(bytes(path))).is_some()
}

pub(crate) extern "C" fn rename(handle: StoreHandle, from: Bytes, to: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || store(handle).rename(bytes(from), bytes(to))).is_some()
}

pub(crate) extern "C" fn sync_directory(handle: StoreHandle, path: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || store(handle).sync_directory(bytes(path))).is_some()
}

pub(crate) extern "C" fn free_bytes(handle: StoreHandle, free: &mut u64, error: &mut ErrorText) -> bool {
    let found = guarded(error, || store(handle).free_bytes());
    *free = found.unwrap_or(0);
    found.is_some()
}

pub(crate) extern "C" fn size(handle: FileHandle) -> u64 {
    catch_unwind(AssertUnwindSafe(|| file(handle).size())).unwrap_or(0)
}

pub(crate) extern "C" fn read(
    handle: FileHandle,
    offset: u64,
    out: *mut c_char,
    length: usize,
    read: &mut usize,
    error: &mut ErrorText,
) -> bool {
    let done = guarded(error, || file(handle).read(offset, bytes_mut(out, length)));
    *read = done.unwrap_or(0);
    done.is_some()
}

pub(crate) extern "C" fn read_many(handle: FileHandle, reads: *mut ReadOfShim, count: usize) {
    if count == 0 {
        return;
    }
    // SAFETY: the shim passes an array of this length, see above.
    let of_shim = unsafe { std::slice::from_raw_parts_mut(reads, count) };
    let begun = |read: &mut ReadOfShim| FileRead {
        offset: read.offset,
        out: bytes_mut(read.out, read.length),
        result: Err(FileError::new(ErrorKind::Io, "a panic in Ringbolt: please report the lines it printed")),
    };
    let mut reads: Vec<FileRead<'_>> = of_shim.iter_mut().map(begun).collect();
    // After a panic, each has the result that it has here at first.
    _ = catch_unwind(AssertUnwindSafe(|| file(handle).read_many(&mut reads)));
    let results: Vec<Result<usize, FileError>> = reads.into_iter().map(|read| read.result).collect();
    for (read, result) in of_shim.iter_mut().zip(results) {
        match result {
            Ok(bytes) => (read.read, read.error.kind) = (bytes, 0),
            Err(failure) => read.error.set(&failure),
        }
    }
}

pub(crate) extern "C" fn begin_read(
    handle: FileHandle,
    offset: u64,
    length: usize,
    read: &mut ReadHandle,
    error: &mut ErrorText,
) -> bool {
    match guarded(error, || file(handle).begin_read(offset, length)) {
        Some(begun) => {
            *read = Box::into_raw(Box::new(begun));
            true
        }
        None => false,
    }
}

/// The read of a handle, which is over then.
fn begun_read(handle: ReadHandle) -> Box<dyn BegunRead> {
    // SAFETY: the handle is of `begin_read`, and passed once to one of its two ends, see above.
    *unsafe { Box::from_raw(handle.cast_mut()) }
}

pub(crate) extern "C" fn finish_read(
    handle: ReadHandle,
    out: *mut c_char,
    length: usize,
    read: &mut usize,
    error: &mut ErrorText,
) -> bool {
    let begun = begun_read(handle);
    let done = guarded(error, || begun.finish(bytes_mut(out, length)));
    *read = done.unwrap_or(0);
    done.is_some()
}

pub(crate) extern "C" fn drop_read(handle: ReadHandle) {
    let begun = begun_read(handle);
    // A panic has printed its line, and this call returns nothing.
    _ = catch_unwind(AssertUnwindSafe(|| drop(begun)));
}

pub(crate) extern "C" fn append(handle: FileHandle, data: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).append(bytes(data))).is_some()
}

pub(crate) extern "C" fn write(handle: FileHandle, offset: u64, data: Bytes, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).write(offset, bytes(data))).is_some()
}

pub(crate) extern "C" fn write_out(handle: FileHandle, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).write_out()).is_some()
}

pub(crate) extern "C" fn allocate(handle: FileHandle, size: u64, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).allocate(size)).is_some()
}

pub(crate) extern "C" fn sync(handle: FileHandle, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).sync()).is_some()
}

pub(crate) extern "C" fn truncate(handle: FileHandle, size: u64, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).truncate(size)).is_some()
}

pub(crate) extern "C" fn close(handle: FileHandle, error: &mut ErrorText) -> bool {
    guarded(error, || file(handle).close()).is_some()
}

pub(crate) extern "C" fn free(handle: FileHandle) {
    // SAFETY: the handle is of `open` or `lock`, and freed once, see above.
    let file: Box<Box<dyn RocksFile>> = unsafe { Box::from_raw(handle.cast_mut()) };
    // A panic has printed its line, and this call returns nothing.
    _ = catch_unwind(AssertUnwindSafe(|| drop(file)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_of_the_call() {
        fn open(_: &str) -> Result<Arc<dyn RocksFiles>, FileError> {
            panic!("as a test wants it")
        }
        let definition = FilesDefinition { open, close_all: || panic!("as a test wants it") };
        let mut handle: StoreHandle = std::ptr::null();
        let mut error = ErrorText { kind: 0, text: [0; crate::error::TEXT_BYTES] };
        let uri = Bytes { data: c"x".as_ptr(), length: 1 };
        assert!(!store_open(&definition, uri, &mut handle, &mut error));
        assert_eq!(error.kind, ErrorKind::Io as i32);
        assert!(handle.is_null());
        close_all(&definition);
    }
}
