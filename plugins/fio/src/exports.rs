//! What fio looks for in the library.
#![allow(unsafe_code)]

use std::ffi::c_void;

/// fio's entry: returns the table of functions.
///
/// # Safety
/// `ops` is where fio takes the address from.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn get_ioengine(ops: *mut *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { crate::DEFINITION.get_ioengine(ops) };
}
