//! Output lines. A closed pipe is ignored: the standard library's `println!` and `eprintln!` panic, which
//! would stop a server.

/// Prints a line to standard output.
macro_rules! stdout_line {
    ($($line:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($line)*)));
    }};
}

/// Prints a line to standard error.
macro_rules! stderr_line {
    ($($line:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($line)*)));
    }};
}

pub(crate) use {stderr_line, stdout_line};
