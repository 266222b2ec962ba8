//! The functions of librados and librbd that are used, loaded at run time.
//!
//! Their types are those of the libraries' headers (`rados/librados.h`, `rbd/librbd.h`), which keep them for
//! a version of the file name: `librados.so.2`, `librbd.so.1`.

use std::ffi::{CStr, c_char, c_int, c_void};
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

/// Declares a table of the functions of one library.
macro_rules! library {
    ($(#[$doc:meta])* $name:ident { $( $symbol:ident: fn($($argument:ty),*) $(-> $result:ty)?; )* }) => {
        $(#[$doc])*
        pub(crate) struct $name {
            $( pub(crate) $symbol: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
        }

        impl $name {
            fn load(file: &CStr) -> Result<$name, LibraryLoadError> {
                let library = open(file)?;
                Ok($name {
                    $( $symbol: {
                        let name = concat!(stringify!($symbol), "\0");
                        let address = symbol(library, name)?;
                        // SAFETY: the address is of a function of this name, whose type is that of the
                        // header.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                                address,
                            )
                        }
                    }, )*
                })
            }
        }
    };
}

library! {
    /// Functions of librados.
    RadosFunctions {
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

library! {
    /// Functions of librbd.
    RbdFunctions {
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
    let rados = RadosFunctions::load(c"librados.so.2")?;
    let rbd = RbdFunctions::load(c"librbd.so.1")?;
    Ok(LOADED.get_or_init(|| Functions { rados, rbd }))
}

fn open(file: &CStr) -> Result<Handle, LibraryLoadError> {
    // SAFETY: the name is a string. The library's initializers are those of a program that links it.
    let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err(last_error()) } else { Ok(library) }
}

/// The address of a function; `name` ends with a NUL byte.
fn symbol(library: Handle, name: &str) -> Result<*mut c_void, LibraryLoadError> {
    let Ok(name) = CStr::from_bytes_with_nul(name.as_bytes()) else { unreachable!("{name:?} is a symbol") };
    // SAFETY: the library is open, and the name is a string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() { Err(last_error()) } else { Ok(address) }
}

fn last_error() -> LibraryLoadError {
    // SAFETY: it takes nothing; the result is of this thread.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return LibraryLoadError { reason: "unknown error".to_string() };
    }
    // SAFETY: dlerror returns a string, which stays until the thread's next call of this kind.
    let text = unsafe { CStr::from_ptr(error) };
    LibraryLoadError { reason: text.to_string_lossy().into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_or_function_says_what_to_install() {
        let message = open(c"libnosuch.so.1").unwrap_err().to_string();
        assert!(
            message.contains("libnosuch.so.1") && message.contains("apt-get install librbd1"),
            "{message}"
        );
        let libc = open(c"libc.so.6").unwrap();
        let message = symbol(libc, "rbd_nosuch\0").unwrap_err().to_string();
        assert!(message.contains("rbd_nosuch"), "{message}");
    }
}
