//! Error values of replies.

/// An error of the transmission phase. The values are Linux error numbers; clients treat others as `Inval`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum NbdError {
    /// Operation not permitted: a write to a read-only export.
    Perm = 1,
    /// Input/output error.
    Io = 5,
    /// Cannot allocate memory.
    NoMem = 12,
    /// Invalid argument.
    Inval = 22,
    /// No space left, or a write beyond the end.
    NoSpc = 28,
    /// The reply to a request with DF would be too large.
    Overflow = 75,
    /// Not supported; a fast zero that would not be fast.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl NbdError {
    /// All values.
    pub const ALL: [NbdError; 8] = [
        NbdError::Perm,
        NbdError::Io,
        NbdError::NoMem,
        NbdError::Inval,
        NbdError::NoSpc,
        NbdError::Overflow,
        NbdError::NotSup,
        NbdError::Shutdown,
    ];

    /// The value in a reply.
    pub const fn value(self) -> u32 {
        self as u32
    }
}
