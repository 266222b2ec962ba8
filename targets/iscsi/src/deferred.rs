//! Commands that have arrived and wait until their connection has moved.
//!
//! A connection that moves to another core completes the commands that have begun, and begins no other. An
//! initiator may send commands before the data that it owes to earlier ones, so that these have to be
//! received on the way: their PDUs wait as they are, in their order, and begin on the other core, or on this
//! one if the move does not take place.

use std::collections::VecDeque;

use wire_iscsi::{BasicHeader, HEADER_BYTES, Opcode};

use crate::limits::{DEFERRED_BYTES_MAX, QUEUE_DEPTH_MAX};
use crate::sink::Sink;

/// A PDU of a command that has not begun, with its data.
pub(crate) struct DeferredPdu {
    pub(crate) header: [u8; HEADER_BYTES],
    pub(crate) segments: Vec<u8>,
    pub(crate) data: Vec<u8>,
    /// Its digest matches.
    pub(crate) is_intact: bool,
    /// Where its data goes, once it has begun.
    pub(crate) sink: Option<Sink>,
    /// Bytes of the data that the command has taken.
    pub(crate) taken: usize,
}

/// The PDUs in the order of their arrival.
#[derive(Default)]
pub(crate) struct DeferredPdus {
    pdus: VecDeque<DeferredPdu>,
    bytes: usize,
}

impl DeferredPdus {
    pub(crate) fn is_empty(&self) -> bool {
        self.pdus.is_empty()
    }

    /// Whether the PDU with this header may wait here: a command whose data is in its own PDU.
    pub(crate) fn admits(&self, header: &[u8; HEADER_BYTES]) -> bool {
        let Ok(common) = BasicHeader::decode(header) else { return false };
        let (_, data_bytes) = BasicHeader::lengths(header);
        common.opcode == Opcode::ScsiCommand
            && common.is_final
            && self.pdus.len() < QUEUE_DEPTH_MAX as usize
            && self.bytes + data_bytes as usize <= DEFERRED_BYTES_MAX
    }

    pub(crate) fn push(
        &mut self,
        header: &[u8; HEADER_BYTES],
        segments: &[u8],
        data: Vec<u8>,
        is_intact: bool,
    ) {
        self.bytes += data.len();
        let (header, segments) = (*header, segments.to_vec());
        self.pdus.push_back(DeferredPdu { header, segments, data, is_intact, sink: None, taken: 0 });
    }

    /// The oldest.
    pub(crate) fn first(&mut self) -> Option<&mut DeferredPdu> {
        self.pdus.front_mut()
    }

    /// Removes the oldest, which was handled.
    pub(crate) fn remove_first(&mut self) -> Option<DeferredPdu> {
        let pdu = self.pdus.pop_front()?;
        self.bytes -= pdu.data.len();
        Some(pdu)
    }

    /// Whether the oldest has begun.
    pub(crate) fn has_begun(&self) -> bool {
        self.pdus.front().is_some_and(|pdu| pdu.sink.is_some())
    }
}
