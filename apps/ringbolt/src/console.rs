//! Standard output and standard error. The standard library's `println!` and `eprintln!` panic where these
//! cannot be written, which would stop a server.
//!
//! A closed pipe, as with `head`, is no error. Another error of standard output, such as a full disk, is
//! kept, and [`finish`] returns it at the end of the command.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;

use crate::command_error::CommandError;

/// The first error of standard output but a closed pipe.
static STDOUT_ERROR: OnceLock<io::Error> = OnceLock::new();

/// Keeps an error of standard output for [`finish`].
pub(crate) fn record(result: io::Result<()>) {
    if let Err(error) = result
        && error.kind() != ErrorKind::BrokenPipe
    {
        // The first one says enough.
        let _ = STDOUT_ERROR.set(error);
    }
}

/// Writes to standard output.
pub(crate) fn print(bytes: impl AsRef<[u8]>) {
    record(io::stdout().write_all(bytes.as_ref()));
}

/// Writes a line to standard output.
pub(crate) fn print_line(line: fmt::Arguments<'_>) {
    record(io::stdout().write_fmt(format_args!("{line}\n")));
}

/// Flushes standard output.
///
/// # Errors
/// Something could not be written.
pub(crate) fn finish() -> Result<(), CommandError> {
    record(io::stdout().flush());
    match STDOUT_ERROR.get() {
        Some(error) => Err(CommandError::operation(format!("standard output: {error}"))),
        None => Ok(()),
    }
}

/// Prints a line to standard output.
macro_rules! stdout_line {
    ($($line:tt)*) => {
        $crate::console::print_line(format_args!($($line)*))
    };
}

/// Prints a line to standard error.
macro_rules! stderr_line {
    ($($line:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($line)*)));
    }};
}

pub(crate) use {stderr_line, stdout_line};
