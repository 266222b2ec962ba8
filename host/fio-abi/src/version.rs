//! The versions of fio whose layouts are known.

use std::ffi::{CStr, c_char};

/// What differs between versions of fio. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FioVersion {
    /// The first version with these layouts, as 3.`minor`.
    pub minor: u32,
    /// `FIO_IOOPS_VERSION`.
    pub ioops: i32,
    /// Whether the table has `cancel`, between `errdetails` and `cleanup`.
    pub has_cancel: bool,
    /// Where the table has `option_struct_size`; `options` follows 8 bytes later and is the last.
    pub options_at: usize,
    /// The flag of engines that must submit on the job's own thread.
    pub no_offload: i32,
    /// Where `io_u` has `offset`. `xfer_buf`, `xfer_buflen`, `resid` and `error` follow at fixed distances.
    pub unit_offset_at: usize,
}

/// In ascending order. A version has the layouts of the last entry that is not newer.
const KNOWN: [FioVersion; 7] = [
    FioVersion {
        minor: 30,
        ioops: 31,
        has_cancel: true,
        options_at: 248,
        no_offload: 1 << 15,
        unit_offset_at: 72,
    },
    FioVersion {
        minor: 34,
        ioops: 32,
        has_cancel: true,
        options_at: 264,
        no_offload: 1 << 15,
        unit_offset_at: 72,
    },
    FioVersion {
        minor: 36,
        ioops: 33,
        has_cancel: true,
        options_at: 272,
        no_offload: 1 << 15,
        unit_offset_at: 72,
    },
    FioVersion {
        minor: 38,
        ioops: 36,
        has_cancel: true,
        options_at: 272,
        no_offload: 1 << 15,
        unit_offset_at: 72,
    },
    FioVersion {
        minor: 40,
        ioops: 37,
        has_cancel: true,
        options_at: 280,
        no_offload: 1 << 15,
        unit_offset_at: 72,
    },
    FioVersion {
        minor: 41,
        ioops: 39,
        has_cancel: false,
        options_at: 272,
        no_offload: 1 << 15,
        unit_offset_at: 80,
    },
    FioVersion {
        minor: 42,
        ioops: 39,
        has_cancel: false,
        options_at: 272,
        no_offload: 1 << 16,
        unit_offset_at: 80,
    },
];
/// The newest version whose headers were read.
const MINOR_MAX: u32 = 42;

impl FioVersion {
    /// The layouts of a version as fio names itself: `fio-3.33`, or `fio-3.39-12-gabcdef` for one that was
    /// built from a repository.
    ///
    /// # Errors
    /// Why the version cannot be served.
    pub fn named(name: &str) -> Result<FioVersion, String> {
        let known = || format!("this engine knows fio 3.{} to 3.{MINOR_MAX}", KNOWN[0].minor);
        let minor = name.strip_prefix("fio-3.").map(|rest| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            digits.parse::<u32>()
        });
        let Some(Ok(minor)) = minor else {
            return Err(format!("this is {name}, and {}", known()));
        };
        let layouts = KNOWN.iter().rev().find(|layouts| layouts.minor <= minor);
        match layouts {
            Some(layouts) if minor <= MINOR_MAX => Ok(*layouts),
            _ => Err(format!("this is fio 3.{minor}, and {}", known())),
        }
    }

    /// The layouts of the fio that this process is.
    ///
    /// # Errors
    /// Why it cannot be served.
    pub(crate) fn of_process() -> Result<FioVersion, String> {
        // SAFETY: the arguments are a valid handle and a name with a terminator.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"fio_version_string".as_ptr()) };
        if symbol.is_null() {
            return Err("this program is not fio: it has no fio_version_string".to_string());
        }
        // SAFETY: in fio, the symbol is a constant array of characters with a terminator.
        let name = unsafe { CStr::from_ptr(symbol.cast::<c_char>()) };
        FioVersion::named(&name.to_string_lossy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_distributions_and_repositories_have_their_layouts() {
        let minor = |name| FioVersion::named(name).map(|layouts| (layouts.minor, layouts.ioops));
        assert_eq!(minor("fio-3.33"), Ok((30, 31)));
        assert_eq!(minor("fio-3.39"), Ok((38, 36)));
        assert_eq!(minor("fio-3.41-12-gabcdef-dirty"), Ok((41, 39)));
    }

    #[test]
    fn an_unknown_version_is_named_with_those_that_are_known() {
        for name in ["fio-3.29", "fio-3.43", "fio-4.0", "fio-3.", "fio-3.99999999999999999999", ""] {
            let error = FioVersion::named(name).unwrap_err();
            assert!(error.contains("knows fio 3.30 to 3.42"), "{name}: {error}");
        }
    }
}
