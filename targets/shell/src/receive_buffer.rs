//! Bytes that were received and not used yet.

/// A buffer that bytes are appended to and consumed from the front of.
#[derive(Debug, Default)]
pub struct ReceiveBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    /// What was received and not consumed.
    #[inline]
    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Drops the first `count` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        assert!(self.start <= self.end, "consumed {} of {} bytes", self.start, self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The free space, all of it after the filled part.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// `count` bytes were written to [`room`](Self::room).
    ///
    /// # Panics
    /// If it is smaller.
    pub fn added(&mut self, count: usize) {
        self.end += count;
        assert!(self.end <= self.bytes.len(), "{} bytes in {}", self.end, self.bytes.len());
    }

    /// Makes room for `capacity` bytes, filled ones included.
    pub fn reserve(&mut self, capacity: usize) {
        if self.bytes.len() < capacity {
            self.bytes.resize(capacity, 0);
        }
    }
}
