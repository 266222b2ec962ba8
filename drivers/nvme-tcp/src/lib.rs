//! PDU framing on the byte stream of NVMe/TCP, for hosts and controllers (sans-IO).
//!
//! [`PduReceiver`] parses PDUs from a stream that arrives in arbitrary pieces, verifies their digests and
//! stores their data in buffers of a [`PduConsumer`]. [`PduSender`] queues headers and data and passes them
//! to a [`sockets::ByteStream`] in few calls. Neither interprets PDUs beyond their layout; neither has a clock or a
//! socket.
//!
//! The rest of a PDU's data can be read without a copy: pass the slice of [`PduReceiver::direct_buffer`] to
//! the stream as the first part of a read, as [`receive_pdus`] does.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod receive;
mod send;

pub use receive::{
    DataParts, DataPlacement, PduConsumer, PduReceiver, ReceiveProgress, ReceiveStatus, receive_pdus,
};
pub use send::{PduSender, SegmentSource, SendPosition};
pub use sockets::FlushStatus;

#[cfg(test)]
mod tests;
