//! The functions of librados and librbd that are used, loaded at run time.
//!
//! Their types are those of the libraries' headers (`rados/librados.h`, `rbd/librbd.h`), which keep them for
//! a version of the file name: `librados.so.2`, `librbd.so.1`.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The libraries cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error(
    "Ceph's libraries cannot be used ({reason}); install librbd.so.1 and librados.so.2, as with \
     `apt-get install librbd1` or `dnf install librbd1`"
)]
pub struct LibraryLoadError {
    reason: String,
}

/// A handle of a cluster (`rados_t`), an I/O context, an image or a completion.
pub(crate) type Handle = *mut c_void;
/// `rbd_callback_t`.
pub(crate) type CompletionCallback = extern "C" fn(Handle, *mut c_void);
/// `rbd_update_callback_t`.
pub(crate) type UpdateCallback = extern "C" fn(*mut c_void);

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct ImageInfo {
    bytes: u64,
    pub(crate) object_bytes: u64,
    objects: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [[c_char; 32]; 3],
}

const _: () = assert!(size_of::<ImageInfo>() == 160);

shared_library::functions! {
    /// Functions of librados.
    pub(crate) struct RadosFunctions {
        rados_create: fn(*mut Handle, *const c_char) -> c_int;
        rados_conf_read_file: fn(Handle, *const c_char) -> c_int;
        rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int;
        rados_connect: fn(Handle) -> c_int;
        rados_shutdown: fn(Handle);
        rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int;
        rados_ioctx_set_namespace: fn(Handle, *const c_char);
        rados_ioctx_destroy: fn(Handle);
    }
}

shared_library::functions! {
    /// Functions of librbd.
    pub(crate) struct RbdFunctions {
        rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
        rbd_close: fn(Handle) -> c_int;
        rbd_get_size: fn(Handle, *mut u64) -> c_int;
        rbd_stat: fn(Handle, *mut ImageInfo, usize) -> c_int;
        rbd_resize: fn(Handle, u64) -> c_int;
        rbd_update_watch: fn(Handle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
        rbd_update_unwatch: fn(Handle, u64) -> c_int;
        rbd_aio_create_completion: fn(*mut c_void, CompletionCallback, *mut Handle) -> c_int;
        rbd_aio_get_return_value: fn(Handle) -> isize;
        rbd_aio_release: fn(Handle);
        rbd_aio_readv: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_writev: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_flush: fn(Handle, Handle) -> c_int;
        rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    }
}

/// Both libraries; they stay loaded.
pub(crate) struct Functions {
    pub(crate) rados: RadosFunctions,
    pub(crate) rbd: RbdFunctions,
}

/// The libraries, which the first successful call loads.
pub(crate) fn functions() -> Result<&'static Functions, LibraryLoadError> {
    static LOADED: OnceLock<Functions> = OnceLock::new();
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let failed = |reason| LibraryLoadError { reason };
    let rados = RadosFunctions::load(c"librados.so.2").map_err(failed)?;
    let rbd = RbdFunctions::load(c"librbd.so.1").map_err(failed)?;
    Ok(LOADED.get_or_init(|| Functions { rados, rbd }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_install() {
        let message = LibraryLoadError { reason: "libnosuch.so.1: no file".to_string() }.to_string();
        assert!(
            message.contains("libnosuch.so.1") && message.contains("apt-get install librbd1"),
            "{message}"
        );
    }
}
