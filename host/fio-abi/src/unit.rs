//! fio's `io_u`, one I/O, and `fio_file`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// `io_u.file` and `io_u.ddir`, the same in all versions.
const FILE_AT: usize = 32;
const DIRECTION_AT: usize = 44;
/// From `io_u.offset` on.
const BUFFER_AFTER_OFFSET: usize = 32;
const LENGTH_AFTER_OFFSET: usize = 40;
const RESIDUAL_AFTER_OFFSET: usize = 64;
const ERROR_AFTER_OFFSET: usize = 72;
/// `fio_file.filetype`, `.file_name` and `.real_file_size`.
const FILE_TYPE_AT: usize = 16;
const FILE_NAME_AT: usize = 40;
const FILE_BYTES_AT: usize = 48;
/// A block device as a file's type: fio neither creates nor extends one.
const FILE_TYPE_BLOCK: c_uint = 2;

/// What is used of the structures, for versions with `io_u.offset` at this place.
pub(crate) fn offsets(offset_at: usize) -> impl Iterator<Item = (&'static str, usize)> {
    [
        ("io_u.file", FILE_AT),
        ("io_u.ddir", DIRECTION_AT),
        ("io_u.offset", offset_at),
        ("io_u.xfer_buf", offset_at + BUFFER_AFTER_OFFSET),
        ("io_u.xfer_buflen", offset_at + LENGTH_AFTER_OFFSET),
        ("io_u.resid", offset_at + RESIDUAL_AFTER_OFFSET),
        ("io_u.error", offset_at + ERROR_AFTER_OFFSET),
        ("fio_file.filetype", FILE_TYPE_AT),
        ("fio_file.file_name", FILE_NAME_AT),
        ("fio_file.real_file_size", FILE_BYTES_AT),
        ("FIO_TYPE_BLOCK", FILE_TYPE_BLOCK as usize),
    ]
    .into_iter()
}

/// What an I/O does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    /// Reads into the data.
    Read,
    /// Writes the data.
    Write,
    /// Deallocates the range.
    Trim,
    /// Makes writes durable.
    Sync,
    /// Anything else, which an engine refuses.
    Other,
}

/// An I/O that fio has queued, with its data, until it is [finished](Self::finish).
#[derive(Debug)]
pub struct IoUnit {
    unit: NonNull<c_void>,
    offset_at: usize,
    /// fio uses a unit on one thread at a time.
    not_send: PhantomData<*mut c_void>,
}

/// An I/O that fio gets back.
#[derive(Debug)]
pub struct FinishedUnit(pub(crate) NonNull<c_void>);

impl IoUnit {
    /// # Safety
    /// `unit` is an `io_u` that fio has queued and not got back, and `offset_at` is its version's.
    pub(crate) unsafe fn new(unit: NonNull<c_void>, offset_at: usize) -> IoUnit {
        IoUnit { unit, offset_at, not_send: PhantomData }
    }

    fn field<T: Copy>(&self, at: usize) -> T {
        // SAFETY: the layouts of the version have a `T` at this offset, aligned in the structure.
        unsafe { self.unit.as_ptr().wrapping_byte_add(at).cast::<T>().read() }
    }

    /// What it does.
    pub fn kind(&self) -> UnitKind {
        match self.field::<c_int>(DIRECTION_AT) {
            0 => UnitKind::Read,
            1 => UnitKind::Write,
            2 => UnitKind::Trim,
            3 | 4 => UnitKind::Sync,
            _ => UnitKind::Other,
        }
    }

    /// Where it begins in its file, in bytes.
    pub fn offset(&self) -> u64 {
        self.field(self.offset_at)
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.field(self.offset_at + LENGTH_AFTER_OFFSET)
    }

    /// Tells files apart that are open at the same time.
    pub fn file(&self) -> usize {
        self.field(FILE_AT)
    }

    /// The name of its file.
    pub fn file_name(&self) -> Option<String> {
        let file = NonNull::new(self.field::<*mut c_void>(FILE_AT))?;
        // SAFETY: it is the `fio_file` of a queued I/O.
        unsafe { file_name(file) }
    }

    fn buffer(&self) -> (*mut u8, usize) {
        let buffer: *mut u8 = self.field(self.offset_at + BUFFER_AFTER_OFFSET);
        // An address space has no more than this.
        let length = usize::try_from(self.length()).unwrap_or(0);
        if buffer.is_null() { (NonNull::dangling().as_ptr(), 0) } else { (buffer, length) }
    }

    /// The data of a write.
    pub fn data(&self) -> &[u8] {
        let (buffer, length) = self.buffer();
        // SAFETY: between queueing and completion the buffer is the engine's, and has this length.
        unsafe { std::slice::from_raw_parts(buffer, length) }
    }

    /// Where the data of a read goes.
    pub fn data_mut(&mut self) -> &mut [u8] {
        let (buffer, length) = self.buffer();
        // SAFETY: as in `data`; the unit is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(buffer, length) }
    }

    /// Ends the I/O: with all bytes done, or with an `errno`.
    pub fn finish(self, outcome: Result<(), i32>) -> FinishedUnit {
        let (error, residual) = match outcome {
            Ok(()) => (0, 0),
            Err(errno) => (errno.unsigned_abs(), self.length()),
        };
        let put = |at: usize| self.unit.as_ptr().wrapping_byte_add(self.offset_at + at);
        // SAFETY: `io_u` has `resid`, 8 bytes, at this offset, and fio does not use it before the completion.
        unsafe { put(RESIDUAL_AFTER_OFFSET).cast::<u64>().write(residual) };
        // SAFETY: the same for `error`.
        unsafe { put(ERROR_AFTER_OFFSET).cast::<c_uint>().write(error) };
        FinishedUnit(self.unit)
    }
}

/// The name of a file.
///
/// # Safety
/// `file` is a `fio_file` with a name.
pub(crate) unsafe fn file_name(file: NonNull<c_void>) -> Option<String> {
    // SAFETY: a `fio_file` has the pointer at this offset.
    let name = unsafe { file.as_ptr().wrapping_byte_add(FILE_NAME_AT).cast::<*const c_char>().read() };
    if name.is_null() {
        return None;
    }
    // SAFETY: fio's names have a terminator, and live as long as their files.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// Says how large a file is.
///
/// # Safety
/// `file` is a `fio_file` that is not in use.
pub(crate) unsafe fn set_file_bytes(file: NonNull<c_void>, bytes: u64) {
    let put = |at: usize| file.as_ptr().wrapping_byte_add(at);
    // SAFETY: a `fio_file` has `real_file_size`, 8 bytes, at this offset.
    unsafe { put(FILE_BYTES_AT).cast::<u64>().write(bytes) };
    // SAFETY: the same for `filetype`, an enumeration.
    unsafe { put(FILE_TYPE_AT).cast::<c_uint>().write(FILE_TYPE_BLOCK) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of an `io_u`, for versions with `offset` at this place.
    fn unit(offset_at: usize, memory: &mut [u64; 32], buffer: &mut [u8]) -> IoUnit {
        memory[DIRECTION_AT / 8] = 1 << 32;
        memory[offset_at / 8] = 8192;
        memory[(offset_at + BUFFER_AFTER_OFFSET) / 8] = buffer.as_mut_ptr() as u64;
        memory[(offset_at + LENGTH_AFTER_OFFSET) / 8] = buffer.len() as u64;
        let unit = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the memory is laid out as an `io_u`, and outlives the unit in these tests.
        unsafe { IoUnit::new(unit, offset_at) }
    }

    #[test]
    fn an_io_is_read_and_ended_in_the_layouts_of_both_kinds() {
        for offset_at in [72, 80] {
            let (mut memory, mut buffer) = ([0; 32], [7; 512]);
            let unit = unit(offset_at, &mut memory, &mut buffer);
            assert_eq!((unit.kind(), unit.offset(), unit.length()), (UnitKind::Write, 8192, 512));
            assert_eq!(unit.data(), [7; 512]);
            unit.finish(Err(28));
            assert_eq!(memory[(offset_at + RESIDUAL_AFTER_OFFSET) / 8], 512);
            assert_eq!(memory[(offset_at + ERROR_AFTER_OFFSET) / 8], 28);
        }
    }

    #[test]
    fn an_io_without_data_has_an_empty_buffer() {
        let mut memory = [0; 32];
        memory[(72 + LENGTH_AFTER_OFFSET) / 8] = 4096;
        let at = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the memory is laid out as an `io_u`, and outlives the unit.
        let mut unit = unsafe { IoUnit::new(at, 72) };
        assert!(unit.data().is_empty() && unit.data_mut().is_empty() && unit.file_name().is_none());
    }
}
