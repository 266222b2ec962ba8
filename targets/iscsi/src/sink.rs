//! Where received data goes.

use slots::Slot;

/// Where the data of the PDU that is being received goes.
#[derive(Debug, Default)]
pub(crate) enum Sink {
    /// Nowhere.
    #[default]
    Discard,
    /// Into memory, for [`Session::end_pdu`](crate::session::Session::end_pdu).
    Collect(Vec<u8>),
    /// Into the memory of a command.
    Command(Slot),
    /// Into the memory of a command that has none yet: bytes that come with the command, and those that
    /// follow unasked.
    NeedsMemory(Slot, u32, u32),
    /// Into memory, for a command that begins when its connection has moved.
    Defer(Vec<u8>),
}
