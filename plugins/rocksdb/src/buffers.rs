//! Memory of large writes, which is used again: new memory of this size is zeroed by the kernel, page by
//! page.

use std::sync::Mutex;

/// Bytes of a buffer.
pub(crate) const BUFFER_BYTES: usize = 4 << 20;
/// Buffers that wait to be used again: what two files that are written have in flight.
const BUFFERS_MAX: usize = 4;

/// The buffers of a store. The lock is taken once for each buffer.
#[derive(Default)]
pub(crate) struct WriteBuffers(Mutex<Vec<Vec<u8>>>);

impl WriteBuffers {
    /// An empty buffer.
    pub(crate) fn take(&self) -> Vec<u8> {
        sync::lock(&self.0).pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
    }

    /// Returns memory that is no longer used, if it is a buffer.
    pub(crate) fn put(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        let mut buffers = sync::lock(&self.0);
        if buffer.capacity() == BUFFER_BYTES && buffers.len() < BUFFERS_MAX {
            buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_up_to_a_limit() {
        let buffers = WriteBuffers::default();
        let mut buffer = buffers.take();
        buffer.push(1);
        let address = buffer.as_ptr();
        buffers.put(buffer);
        buffers.put(vec![1; 100]);
        let buffer = buffers.take();
        assert!(buffer.as_ptr() == address && buffer.is_empty());
        for _ in 0..BUFFERS_MAX + 1 {
            buffers.put(Vec::with_capacity(BUFFER_BYTES));
        }
        assert_eq!(sync::lock(&buffers.0).len(), BUFFERS_MAX);
    }
}
