//! The buffers of a device's shared receive queue, for messages of all connections of a core.

use std::ffi::c_void;
use std::ptr;

use dma::{BUFFER_BYTES_MAX, Buffer, DeviceBuffer, DmaError};
use reactor::Core;

use crate::RdmaError;
use crate::functions::{Context, LocalRange, ReceiveRequest};

/// First bit of the identifiers of receive requests, to tell them from work.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// Part of the memory of the program that the buffers of a core and a device take at most, if that is more
/// than [`RECEIVES_MIN`].
const MEMORY_SHARE: usize = 16;
/// As few receive buffers as there are.
const RECEIVES_MIN: usize = 16;

/// Buffers of a number of bytes each, in memory of the core's pool.
pub(crate) struct ReceiveBuffers {
    /// Several messages lie in each.
    memory: Vec<(DeviceBuffer, LocalRange)>,
    message_bytes: usize,
    per_buffer: u32,
    /// Those that the device has not.
    free: Vec<u32>,
}

impl ReceiveBuffers {
    /// As many buffers as wanted, or fewer if memory lacks or is small; at least one buffer of the pool.
    ///
    /// # Errors
    /// There is no memory, or the device does not register it.
    pub(crate) fn new(
        core: &Core,
        locate: impl Fn(&Buffer) -> Result<LocalRange, DmaError>,
        wanted: u32,
        message_bytes: usize,
    ) -> Result<ReceiveBuffers, RdmaError> {
        let affordable = affordable(core.pool().arena().limit_bytes(), message_bytes);
        if affordable < wanted {
            log::info!(target: "rdma", "{affordable} receive buffers instead of {wanted}: memory is small");
        }
        let wanted = wanted.min(affordable);
        let per_buffer = (BUFFER_BYTES_MAX / message_bytes).clamp(1, wanted.max(1) as usize) as u32;
        let mut buffers = ReceiveBuffers { memory: Vec::new(), message_bytes, per_buffer, free: Vec::new() };
        while buffers.count() < wanted {
            let taken = core.pool().take(per_buffer as usize * message_bytes);
            let Some(buffer) = taken.map(DeviceBuffer::new) else { break };
            let located = locate(buffer.buffer());
            let range = located.map_err(|error| failed(&error.to_string()))?;
            buffers.memory.push((buffer, range));
        }
        if buffers.memory.is_empty() {
            return Err(failed("no buffer memory is left; raise the limit"));
        }
        buffers.free = (0..buffers.count().min(wanted)).collect();
        Ok(buffers)
    }

    fn count(&self) -> u32 {
        self.memory.len() as u32 * self.per_buffer
    }

    /// The buffer of a message, and where it begins.
    fn place(&self, index: u32) -> (&(DeviceBuffer, LocalRange), usize) {
        let offset = (index % self.per_buffer) as usize * self.message_bytes;
        (&self.memory[(index / self.per_buffer) as usize], offset)
    }

    /// Copies bytes of a message. Beyond its end `out` keeps what it has.
    pub(crate) fn copy(&self, index: u32, offset: usize, out: &mut [u8]) {
        let length = out.len().min(self.message_bytes.saturating_sub(offset));
        let ((buffer, _), start) = self.place(index);
        buffer.read((start + offset) as u64, &mut out[..length]);
    }

    /// Takes a buffer back.
    pub(crate) fn release(&mut self, index: u32) {
        self.free.push(index);
    }

    /// Gives the device the buffers that it has not: those of its shared receive queue `srq`.
    pub(crate) fn post(&mut self, context: &Context, srq: *mut c_void) {
        if self.free.is_empty() {
            return;
        }
        let free = std::mem::take(&mut self.free);
        let mut ranges: Vec<LocalRange> = Vec::with_capacity(free.len());
        for index in &free {
            let ((_, range), start) = self.place(*index);
            ranges.push(LocalRange {
                address: range.address + start as u64,
                length: self.message_bytes as u32,
                key: range.key,
            });
        }
        let request = |(index, range): (&u32, &mut LocalRange)| ReceiveRequest {
            id: RECEIVE | u64::from(*index),
            next: ptr::null_mut(),
            ranges: range,
            range_count: 1,
        };
        let mut requests: Vec<ReceiveRequest> = free.iter().zip(&mut ranges).map(request).collect();
        let first = requests.as_mut_ptr();
        for (at, request) in requests.iter_mut().enumerate().take(free.len() - 1) {
            // SAFETY: the vector has an element behind this one.
            request.next = unsafe { first.add(at + 1) };
        }
        let mut rejected = ptr::null_mut();
        // SAFETY: the queue is open; the requests and ranges live during the call, which copies them; the
        // memory is registered, and lives as long as the queue.
        let posted = unsafe { context.post_srq_recv()(srq, first, &mut rejected) };
        if posted != 0 {
            // Those from the rejected one on were not taken, and are tried again with the next.
            let taken = requests.iter().position(|request| ptr::eq(request, rejected)).unwrap_or(free.len());
            self.free.extend_from_slice(&free[taken..]);
        }
    }
}

/// How many buffers a share of the program's memory has, at least [`RECEIVES_MIN`].
fn affordable(memory_bytes: usize, message_bytes: usize) -> u32 {
    let count = memory_bytes / MEMORY_SHARE / message_bytes;
    u32::try_from(count.max(RECEIVES_MIN)).unwrap_or(u32::MAX)
}

fn failed(why: &str) -> RdmaError {
    RdmaError::Call("making receive buffers", std::io::Error::other(why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_buffers_take_a_sixteenth_of_memory_or_sixteen_messages() {
        assert_eq!(affordable(64 << 20, 4096 + 64), 1008);
        assert!(affordable(64 << 20, 4096 + 64) as usize * (4096 + 64) <= (64 << 20) / 16);
        assert_eq!(affordable(1 << 40, 64), 1 << 30);
        assert_eq!(affordable(1 << 20, 65_600), 16);
        assert_eq!(affordable(0, 64), 16);
        assert_eq!(affordable(usize::MAX, 64), u32::MAX);
    }

    /// The buffers of a core's pool, whose memory is limited, are as many as the share has: whole buffers of
    /// the pool may have space for a few more, which are not used.
    #[test]
    fn fewer_buffers_than_wanted_are_made_if_memory_is_small() {
        let config = reactor::ReactorConfig::default();
        let reactor = reactor::Reactor::new(&config).unwrap();
        let core = reactor.core();
        let nowhere = |_: &Buffer| Ok(LocalRange { address: 0, length: 0, key: 0 });
        let limit = core.pool().arena().limit_bytes();
        let message_bytes = 4160;
        let all = affordable(limit, message_bytes);
        let few = ReceiveBuffers::new(&core, nowhere, 20, message_bytes).unwrap();
        assert_eq!(few.free.len(), 20);
        drop(few);
        let most = ReceiveBuffers::new(&core, nowhere, u32::MAX, message_bytes).unwrap();
        assert!(most.free.len() <= all as usize, "{} of {all}", most.free.len());
        assert!(most.free.len() * message_bytes <= limit / MEMORY_SHARE);
    }
}
