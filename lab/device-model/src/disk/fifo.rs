//! A FIFO for requests whose completion times are in order of arrival.
//!
//! It needs no search: insertion and removal cost little more than the copy.

use std::collections::VecDeque;

use bdev::{Completion, Request};
use block_io::Status;

/// Pending completions with their due times, in order.
pub(super) struct CompletionFifo {
    completions: VecDeque<Completion>,
    /// Due time of each of them.
    due: VecDeque<u64>,
    /// Due time of the last one; 0 if the FIFO is empty.
    last: u64,
}

/// Initial capacity; small, so a shallow queue stays in the CPU cache. It grows with the queue.
const INITIAL_CAPACITY: usize = 64;

impl CompletionFifo {
    pub(super) fn new() -> CompletionFifo {
        CompletionFifo {
            completions: VecDeque::with_capacity(INITIAL_CAPACITY),
            due: VecDeque::with_capacity(INITIAL_CAPACITY),
            last: 0,
        }
    }

    /// Due time of the last one; requests due then or later may be appended.
    #[inline]
    pub(super) fn last_due(&self) -> u64 {
        self.last
    }

    /// Appends a completion.
    #[inline]
    pub(super) fn push(&mut self, due: u64, done: Completion) {
        debug_assert!(due >= self.last, "{due} before {}", self.last);
        self.last = due;
        self.due.push_back(due);
        self.completions.push_back(done);
    }

    /// Appends requests that complete successfully, with their due times in order.
    #[inline]
    pub(super) fn extend(&mut self, requests: std::vec::Drain<'_, Request>, due: &[u64]) {
        assert_eq!(requests.len(), due.len(), "one due time per request");
        self.last = due.last().copied().unwrap_or(self.last);
        self.due.extend(due);
        self.completions.extend(requests.map(|request| request.complete(Status::SUCCESS)));
    }

    /// Moves the completions that are due to `sink`.
    #[inline]
    pub(super) fn expire(&mut self, now: u64, sink: &mut Vec<Completion>) {
        if self.due.front().is_none_or(|due| *due > now) {
            return;
        }
        let count = self.due.partition_point(|due| *due <= now);
        self.due.drain(..count);
        sink.extend(self.completions.drain(..count));
        if self.due.is_empty() {
            self.last = 0;
        }
    }

    /// Due time of the first one.
    #[inline]
    pub(super) fn earliest(&self) -> Option<u64> {
        self.due.front().copied()
    }

    /// Removes all completions.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Completion> {
        self.last = 0;
        self.due.clear();
        self.completions.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use block_io::{Op, Tag};

    use super::*;

    #[test]
    fn completions_are_returned_in_order_when_they_are_due() {
        let mut fifo = CompletionFifo::new();
        let request = |tag| Request::new(Tag(tag), Op::Flush, 0, 0);
        fifo.push(100, request(0).complete(Status::SUCCESS));
        fifo.extend(vec![request(1), request(2)].drain(..), &[100, 300]);
        assert_eq!((fifo.last_due(), fifo.earliest()), (300, Some(100)));
        let mut sink = Vec::new();
        fifo.expire(99, &mut sink);
        assert!(sink.is_empty());
        fifo.expire(200, &mut sink);
        let tags: Vec<Tag> = sink.drain(..).map(|done| done.tag()).collect();
        assert_eq!(tags, [Tag(0), Tag(1)]);
        assert_eq!((fifo.last_due(), fifo.earliest()), (300, Some(300)));
        fifo.expire(300, &mut sink);
        assert_eq!(
            (fifo.last_due(), fifo.earliest(), sink.len()),
            (0, None, 1),
            "an empty FIFO accepts any due time"
        );
        fifo.push(5, request(3).complete(Status::WRITE_FAULT));
        assert_eq!(fifo.drain().count(), 1);
        assert_eq!((fifo.last_due(), fifo.earliest()), (0, None));
    }
}
