//! Requests without data on ranges of any length: deallocation, zeroes.

use std::collections::VecDeque;

use block_io::{Op, RequestFlags, Tag};

use super::{OperationContext, result_of};
use crate::limits::{RANGE_BLOCKS_MAX, RANGES_IN_FLIGHT_MAX};
use crate::response::Failure;

/// Ranges that one operation is applied to, a bounded number of requests at a time. The first failure ends it.
#[derive(Debug)]
pub(crate) struct RangeRequests {
    op: Op,
    flags: RequestFlags,
    /// First block and number of blocks, never 0.
    ranges: VecDeque<(u64, u64)>,
    in_flight: u32,
    failure: Option<Failure>,
}

impl RangeRequests {
    pub(crate) fn new(
        op: Op,
        flags: RequestFlags,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> RangeRequests {
        let ranges = ranges.filter(|(_, blocks)| *blocks > 0).collect();
        RangeRequests { op, flags, ranges, in_flight: 0, failure: None }
    }

    /// Submits what can be. Returns the result when all have ended.
    pub(crate) fn submit(&mut self, context: &mut OperationContext<'_>) -> Option<Result<(), Failure>> {
        while self.in_flight < RANGES_IN_FLIGHT_MAX
            && self.failure.is_none()
            && let Some((lba, blocks)) = self.ranges.pop_front()
        {
            let piece = blocks.min(RANGE_BLOCKS_MAX.into());
            if piece < blocks {
                self.ranges.push_front((lba + piece, blocks - piece));
            }
            let mut request = bdev::Request::new(Tag(0), self.op, lba, piece as u32);
            request.flags = self.flags;
            context.submit(request);
            self.in_flight += 1;
        }
        (self.in_flight == 0).then(|| self.failure.take().map_or(Ok(()), Err))
    }

    /// A request has completed.
    pub(crate) fn complete(
        &mut self,
        completion: &bdev::Completion,
        context: &mut OperationContext<'_>,
    ) -> Option<Result<(), Failure>> {
        self.in_flight -= 1;
        if let Err(failure) = result_of(completion) {
            self.failure.get_or_insert(failure);
        }
        self.submit(context)
    }
}
