//! The submission and completion interface that every block I/O layer implements.

/// An asynchronous I/O channel: takes batches of requests and returns batches of completions.
///
/// The caller alternates [`submit`](Self::submit) and [`poll`](Self::poll) from one core; a channel
/// shares nothing with other cores. Neither method blocks, allocates on the I/O path or calls back
/// into the caller.
pub trait Channel {
    /// The type that is submitted; a request owns its buffer.
    type Request;
    /// The type that is polled; a completion returns the buffer.
    type Completion;

    /// Takes requests from the front of `batch`, in order, until it is empty or the channel is full.
    ///
    /// Accepted requests are removed from `batch`; the others stay in it and still belong to the
    /// caller. Every accepted request is returned by [`poll`](Self::poll) exactly once.
    fn submit(&mut self, batch: &mut Vec<Self::Request>);

    /// Appends the available completions to `sink` and returns their number.
    ///
    /// Appends at most as many as [`submit`](Self::submit) accepted and `poll` has not returned yet.
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize;

    /// The time of the last [`poll`](Self::poll) that returned a completion, in clock ticks, so that
    /// the caller need not read the clock again; 0 if that poll did not read it.
    fn last_poll_ticks(&self) -> u64 {
        0
    }

    /// When [`poll`](Self::poll) must be called next even without an event, in nanoseconds of the
    /// monotonic clock: `Some(0)` means immediately, `None` means not before an event.
    fn deadline(&self) -> Option<u64> {
        None
    }
}
