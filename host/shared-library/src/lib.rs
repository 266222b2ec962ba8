//! C libraries that are loaded when they are first used, so that a program without them needs none.
//!
//! [`functions!`] declares a table of the functions of one library, which `load` fills. A library that is
//! loaded stays.
//!
//! ```
//! use std::ffi::{c_char, c_int};
//! shared_library::functions! {
//!     /// Of the C library.
//!     pub struct CFunctions {
//!         atoi: fn(*const c_char) -> c_int;
//!     }
//! }
//! assert!(CFunctions::load(c"libc.so.6").is_ok());
//! assert!(CFunctions::load(c"libnosuch.so.1").is_err());
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::ffi::{CStr, c_void};

/// An open library.
#[derive(Clone, Copy, Debug)]
pub struct SharedLibrary(*mut c_void);

impl SharedLibrary {
    /// Opens a library by its file name, as `libibverbs.so.1`.
    ///
    /// # Errors
    /// The loader's text: there is no such file, or it lacks another one.
    pub fn open(file: &CStr) -> Result<SharedLibrary, String> {
        // SAFETY: the name is a string. The library's initializers are those of a program that links it.
        let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() { Err(last_error()) } else { Ok(SharedLibrary(library)) }
    }

    /// The address of a function.
    ///
    /// # Errors
    /// The loader's text: the library has none of this name.
    pub fn symbol(self, name: &CStr) -> Result<*mut c_void, String> {
        // SAFETY: the library is open, as it is never closed, and the name is a string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() { Err(last_error()) } else { Ok(address) }
    }
}

fn last_error() -> String {
    // SAFETY: it takes nothing; the result is of this thread.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return "unknown error".to_string();
    }
    // SAFETY: dlerror returns a string, which stays until the thread's next call of this kind.
    unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned()
}

/// Declares a table of functions of one library, by their names and the types of the library's header, with
/// `load(file: &CStr) -> Result<Self, String>`.
#[macro_export]
macro_rules! functions {
    ($(#[$doc:meta])* $visibility:vis struct $name:ident {
        $( $symbol:ident: fn($($argument:ty),* $(,)?) $(-> $result:ty)?; )*
    }) => {
        $(#[$doc])*
        $visibility struct $name {
            $( $visibility $symbol: unsafe extern "C" fn($($argument),*) $(-> $result)?, )*
        }

        impl $name {
            /// Loads the library, unless it is loaded, and finds its functions.
            $visibility fn load(file: &std::ffi::CStr) -> Result<$name, String> {
                let library = $crate::SharedLibrary::open(file)?;
                Ok($name {
                    $( $symbol: {
                        let name = concat!(stringify!($symbol), "\0");
                        let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).map_err(|error| error.to_string())?;
                        let address = library.symbol(name)?;
                        // SAFETY: the address is of a function of this name, whose type is that of the
                        // header.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    }, )*
                })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert!(SharedLibrary::open(c"libnosuch.so.1").unwrap_err().contains("libnosuch.so.1"));
        let libc = SharedLibrary::open(c"libc.so.6").unwrap();
        assert!(libc.symbol(c"rbd_nosuch").unwrap_err().contains("rbd_nosuch"));
        assert!(libc.symbol(c"atoi").is_ok());
    }
}
