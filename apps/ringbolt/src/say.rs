//! Lines for the operator. Nobody listening is no reason to stop serving, so that a closed pipe is
//! ignored here, where the standard library's macros panic.

/// A line on standard output.
macro_rules! say {
    ($($line:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($line)*)));
    }};
}

/// A line on standard error.
macro_rules! complain {
    ($($line:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($line)*)));
    }};
}

pub(crate) use {complain, say};
