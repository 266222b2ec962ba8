//! Commands that are due in the order in which they came, in a ring.
//!
//! Nothing has to be looked for there: putting one in and taking one out are little more than the copy.

use std::collections::VecDeque;

use bdev::{Completion, Request};
use ring::Status;

/// Commands as they will end, and when.
pub(super) struct Lane {
    commands: VecDeque<Completion>,
    /// When each of them is due.
    due: VecDeque<u64>,
    /// When the last one is due; 0 where there is none.
    last: u64,
}

/// Room at the beginning, small so that a shallow queue stays in the cache; it grows with the queue.
const ROOM: usize = 64;

impl Lane {
    pub(super) fn new() -> Lane {
        Lane { commands: VecDeque::with_capacity(ROOM), due: VecDeque::with_capacity(ROOM), last: 0 }
    }

    /// When the last one is due: one that is due later or then may stand behind it.
    #[inline]
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Puts a command behind the others.
    #[inline]
    pub(super) fn push(&mut self, due: u64, done: Completion) {
        debug_assert!(due >= self.last, "{due} before {}", self.last);
        self.last = due;
        self.due.push_back(due);
        self.commands.push_back(done);
    }

    /// Puts commands that succeed behind the others, each due as `due` says, in order.
    #[inline]
    pub(super) fn extend(&mut self, requests: std::vec::Drain<'_, Request>, due: &[u64]) {
        assert_eq!(requests.len(), due.len(), "each command is due at a time");
        self.last = due.last().copied().unwrap_or(self.last);
        self.due.extend(due);
        self.commands.extend(requests.map(|request| request.complete(Status::SUCCESS)));
    }

    /// Takes out what is due.
    #[inline]
    pub(super) fn expire(&mut self, now: u64, sink: &mut Vec<Completion>) {
        if self.due.front().is_none_or(|due| *due > now) {
            return;
        }
        let count = self.due.partition_point(|due| *due <= now);
        self.due.drain(..count);
        sink.extend(self.commands.drain(..count));
        if self.due.is_empty() {
            self.last = 0;
        }
    }

    /// When the first is due.
    #[inline]
    pub(super) fn earliest(&self) -> Option<u64> {
        self.due.front().copied()
    }

    /// Takes everything out.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Completion> {
        self.last = 0;
        self.due.clear();
        self.commands.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use ring::{Op, Tag};

    use super::*;

    #[test]
    fn commands_come_out_in_their_order_when_they_are_due() {
        let mut lane = Lane::new();
        let request = |tag| Request::new(Tag(tag), Op::Flush, 0, 0);
        lane.push(100, request(0).complete(Status::SUCCESS));
        lane.extend(vec![request(1), request(2)].drain(..), &[100, 300]);
        assert_eq!((lane.last(), lane.earliest()), (300, Some(100)));
        let mut sink = Vec::new();
        lane.expire(99, &mut sink);
        assert!(sink.is_empty());
        lane.expire(200, &mut sink);
        let tags: Vec<Tag> = sink.drain(..).map(|done| done.tag()).collect();
        assert_eq!(tags, [Tag(0), Tag(1)]);
        assert_eq!((lane.last(), lane.earliest()), (300, Some(300)));
        lane.expire(300, &mut sink);
        assert_eq!((lane.last(), lane.earliest(), sink.len()), (0, None, 1), "an empty lane takes anything");
        lane.push(5, request(3).complete(Status::WRITE_FAULT));
        assert_eq!(lane.drain().count(), 1);
        assert_eq!((lane.last(), lane.earliest()), (0, None));
    }
}
