//! The shape of every hop.

/// A ring: takes requests in batches, gives completions in batches.
///
/// A channel belongs to one core; nothing in it is shared. Neither method blocks, allocates on a
/// path that an I/O takes, or runs code of the caller's.
pub trait Channel {
    /// What is put in; it owns its buffer.
    type Request;
    /// What comes out; it gives the buffer back.
    type Completion;

    /// Takes requests from the front of `batch`, in order, until it is empty or the channel is full.
    ///
    /// What was taken is removed from `batch`; what did not fit stays, still the caller's. Every
    /// request that was taken comes out of [`poll`](Self::poll) exactly once.
    fn submit(&mut self, batch: &mut Vec<Self::Request>);

    /// Appends what has completed to `sink` and returns how many that were.
    ///
    /// Appends at most as many as were taken by [`submit`](Self::submit) and not yet returned.
    fn poll(&mut self, sink: &mut Vec<Self::Completion>) -> usize;

    /// When the last [`poll`](Self::poll) that returned something looked at the clock, in ticks, for
    /// whoever would look again right after it; 0 if it did not look.
    fn polled_at(&self) -> u64 {
        0
    }

    /// When [`poll`](Self::poll) is next worth calling although no event announces it, in
    /// nanoseconds of the monotonic clock: `Some(0)` for at once, `None` for not before an event.
    fn deadline(&self) -> Option<u64> {
        None
    }
}
