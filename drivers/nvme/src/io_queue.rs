//! An I/O queue to one namespace, whatever its transport.

use std::any::Any;

use block_io::{Channel, Completion, Request};
use dma::Data;

use crate::error::ControllerFailure;
use crate::stats::QueueStats;

/// An I/O queue to one namespace, whatever its transport. It is called through the vtable, once a batch. What
/// only one transport has is a method of its own type.
pub trait IoQueue: Channel<Request = Request<Data>, Completion = Completion<Data>> + Any {
    /// Logical block size in bytes.
    fn block_size(&self) -> u32;

    /// Number of logical blocks.
    fn blocks(&self) -> u64;

    /// Most bytes of one request.
    fn transfer_max_bytes(&self) -> u32;

    /// Whether a device accesses `data`, which has memory of a peer, where it lies. Otherwise its user copies it, before
    /// the request or, where the driver can do so too, at the risk that it finds no buffer. Asked for the first time, it
    /// has the memory mapped in the background if that is possible.
    fn can_access(&mut self, _data: &Data) -> bool {
        false
    }

    /// Counters of the queue.
    fn stats(&self) -> QueueStats;

    /// Why the queue can no longer be used, if it has failed.
    fn failure(&self) -> Option<ControllerFailure>;

    /// After a failure: until when the controller may still execute commands that this queue sent, in nanoseconds; 0 if
    /// it does not any more, or nothing is known. A write must be repeated, or reported as failed, only then: otherwise
    /// the first one may overwrite what came after it.
    fn quiesced_ns(&self) -> u64 {
        0
    }

    /// Ends the commands in flight if the transport can: memory-based ones wait for the driver's reset or detach.
    fn detach(&mut self) {}
}
