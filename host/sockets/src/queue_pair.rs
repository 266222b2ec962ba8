//! Messages, and reads and writes of the peer's memory: what connections of RDMA have instead of a byte
//! stream.

use std::io;

use dma::Data;

/// Bytes of a message that is sent, at most: it travels with the request to send it.
pub const SENT_MESSAGE_BYTES_MAX: usize = 16;

/// A queue pair, as its connection's protocol uses it.
///
/// Events and messages are taken by [`next_event`](Self::next_event) and [`next_message`](Self::next_message)
/// when the connection is ready. Work is collected by [`post`](Self::post), and given to the device by
/// [`submit`](Self::submit), in order. It owns its data until its event.
pub trait QueuePair {
    /// The next event; `None` if there is none at present.
    fn next_event(&mut self) -> Option<QueuePairEvent>;

    /// Messages that have arrived and were not taken.
    fn message_count(&self) -> usize;

    /// The next message that has arrived; it stays where it is until this takes it.
    fn next_message(&mut self) -> Option<ReceivedMessage>;

    /// Copies bytes of a message, from `offset` on, which it has.
    fn copy_message(&self, message: &ReceivedMessage, offset: usize, out: &mut [u8]);

    /// Gives the buffer of a message back, so that another peer's message can use it.
    fn release(&mut self, message: ReceivedMessage);

    /// Adds work to what is submitted next.
    ///
    /// # Errors
    /// The work, and why it was not added.
    fn post(&mut self, work: Work) -> Result<(), RejectedWork>;

    /// Gives the device what was posted.
    ///
    /// # Errors
    /// The connection has failed.
    fn submit(&mut self) -> Result<(), io::ErrorKind>;
}

/// Work of a queue pair.
#[derive(Debug)]
pub enum Work {
    /// Writes data to the peer's memory, if there is any, and then sends a message.
    Send {
        /// Names it in its event.
        tag: u64,
        /// The memory, the data, and how many bytes of it.
        write: Option<(PeerMemory, Data, u32)>,
        /// The message.
        message: [u8; SENT_MESSAGE_BYTES_MAX],
        /// A key of the peer that ends with the message.
        invalidated_key: Option<u32>,
    },
    /// Sends data as a message.
    SendData {
        /// Names it in its event.
        tag: u64,
        /// The message, in at most 16 slices.
        data: Data,
    },
    /// Reads the peer's memory into data that is as long.
    Read {
        /// Names it in its event.
        tag: u64,
        /// The memory.
        from: PeerMemory,
        /// The data.
        into: Data,
    },
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerMemory {
    /// Its address, as the peer has registered it.
    pub address: u64,
    /// The key that permits access.
    pub key: u32,
}

/// Why work was not added.
#[derive(Debug)]
pub enum RejectedWork {
    /// As much is in flight as there may be; an event follows that ends some.
    Full(Work),
    /// The device cannot access its data, for this reason.
    Memory(Work, dma::DmaError),
}

/// A message that was received, in a buffer of the core.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its buffer is given back by QueuePair::release"]
pub struct ReceivedMessage {
    /// Names the buffer.
    pub index: u32,
    /// Length in bytes.
    pub length: u32,
}

/// What has happened to a queue pair.
#[derive(Debug)]
pub enum QueuePairEvent {
    /// A [`Work::Send`] or [`Work::SendData`] has ended: the peer has the message, and the data before it.
    Sent {
        /// Its tag.
        tag: u64,
    },
    /// A [`Work::Read`] has ended, with its data.
    Read {
        /// Its tag.
        tag: u64,
        /// The data.
        data: Data,
    },
    /// The peer has disconnected.
    Closed,
    /// The connection has failed: work in flight does not end.
    Failed(io::ErrorKind),
}
