//! Requests of a malloc device that a DMA engine executes.

use accel::{Accel, AccelOp, AccelQueue, DeviceOutcome, IoatOp, KnownRegion};
use block_io::Op;

use crate::{DeviceMemory, Request};

/// Reads, writes and writes of zeroes, as copies and fills between the device's memory and that of requests.
pub(super) struct DeviceCopies {
    queue: AccelQueue,
    region: KnownRegion,
    parts: Vec<IoatOp>,
    /// Something was queued since the last flush.
    has_queued: bool,
}

/// What an engine executes a request with.
#[inline]
pub(super) fn operation(op: Op) -> Option<AccelOp> {
    match op {
        Op::Read | Op::Write => Some(AccelOp::Copy),
        Op::Unmap | Op::WriteZeroes => Some(AccelOp::Fill),
        _ => None,
    }
}

impl DeviceCopies {
    pub(super) fn new(accel: &Accel, core: &reactor::Core) -> DeviceCopies {
        let (region, parts) = (KnownRegion::default(), Vec::new());
        DeviceCopies { queue: accel.queue(core), region, parts, has_queued: false }
    }

    /// Whether an engine executes requests of this kind now.
    #[inline]
    pub(super) fn takes(&self, op: Op) -> bool {
        operation(op).is_some_and(|op| self.queue.takes(op))
    }

    /// Queues a request on the `bytes` bytes from `offset` of a device's memory.
    ///
    /// # Errors
    /// The request, if the engine does not reach its memory, or that of the device.
    pub(super) fn submit(
        &mut self,
        request: Request,
        memory: &DeviceMemory,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Request> {
        let Some(start) = self.queue.region_address(memory.mapping(), &mut self.region) else {
            return Err(request);
        };
        let mut here = start + offset;
        self.parts.clear();
        match (request.op, request.data()) {
            (Op::Read | Op::Write, Some(data)) => {
                for slice in data.slices() {
                    let Some(there) = self.queue.buffer_address(slice) else { return Err(request) };
                    let bytes = slice.len() as u64;
                    self.parts.push(match request.op {
                        Op::Read => IoatOp::Copy { from: here, to: there, bytes },
                        _ => IoatOp::Copy { from: there, to: here, bytes },
                    });
                    here += bytes;
                }
            }
            (Op::Unmap | Op::WriteZeroes, _) => self.parts.push(IoatOp::Fill { pattern: 0, to: here, bytes }),
            _ => return Err(request),
        }
        self.has_queued = true;
        self.queue.submit(&mut self.parts, request, None)
    }

    /// Gives the engine what was queued.
    #[inline]
    pub(super) fn flush(&mut self) {
        if std::mem::take(&mut self.has_queued) {
            self.queue.flush();
        }
    }

    /// Requests that the engine has.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Returns the requests that the engine is done with.
    pub(super) fn poll(&mut self, sink: &mut Vec<DeviceOutcome>) {
        self.queue.poll(sink);
    }
}
