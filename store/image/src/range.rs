//! Requests for a range, without data, object by object.

use bdev::{Completion, Request};
use block_io::{RequestFlags, Status};
use wire_store::OBJECT_BYTES;

use crate::IMAGE_BLOCK_BYTES;

/// Parts of one range in flight.
const PARTS_MAX: u32 = 16;

/// A request to zero a range, which may be longer than an object, in parts of one object each. If the range is to have
/// space ([`RequestFlags::ALLOCATE`]), its objects are allocated when all of it is zero: zeroes give space up.
///
/// For each [`next_part`](Self::next_part), call [`part_sent`](Self::part_sent) when it is under way and
/// [`part_completed`](Self::part_completed) when it has ended, in any order.
#[derive(Debug)]
pub struct RangeRequest {
    request: Request,
    block_bytes: u64,
    /// The range is zero, and its objects are being allocated.
    allocates: bool,
    /// Offset of the next part, and the end, in bytes.
    next: u64,
    end: u64,
    in_flight: u32,
    status: Status,
}

/// A part of a range, in one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangePart {
    /// Offset in the image, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// The object is to be allocated; otherwise the part is to be zeroed.
    pub allocates: bool,
}

/// What follows when a part has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeProgress {
    /// Other parts are in flight, or are to be sent as before.
    InFlight,
    /// Every part was sent and has ended, and there are new ones.
    Again,
    /// The request has ended.
    Ended,
}

impl RangeRequest {
    /// A request none of whose parts was sent.
    pub fn new(request: Request) -> RangeRequest {
        RangeRequest::of_blocks(request, IMAGE_BLOCK_BYTES)
    }

    /// The same, of a device whose logical blocks have another size.
    pub fn of_blocks(request: Request, block_bytes: u32) -> RangeRequest {
        let block_bytes = u64::from(block_bytes);
        let (next, end) =
            (request.lba * block_bytes, (request.lba + u64::from(request.blocks)) * block_bytes);
        let (allocates, in_flight, status) = (false, 0, Status::SUCCESS);
        RangeRequest { request, block_bytes, allocates, next, end, in_flight, status }
    }

    /// Whether parts are to be sent: not after one has failed.
    pub fn is_unsent(&self) -> bool {
        self.next < self.end && self.status.is_success()
    }

    /// The next part, if it may be sent now.
    pub fn next_part(&self) -> Option<RangePart> {
        let may_send = self.is_unsent() && self.in_flight < PARTS_MAX;
        let in_object = OBJECT_BYTES as u64 - self.next % OBJECT_BYTES as u64;
        let length = in_object.min(self.end - self.next) as u32;
        may_send.then_some(RangePart { offset: self.next, length, allocates: self.allocates })
    }

    /// The next part is under way.
    pub fn part_sent(&mut self, part: RangePart) {
        self.next += u64::from(part.length);
        self.in_flight += 1;
    }

    /// A part has ended.
    pub fn part_completed(&mut self, status: Status) -> RangeProgress {
        self.in_flight -= 1;
        if self.status.is_success() {
            self.status = status;
        }
        if self.in_flight > 0 || self.is_unsent() {
            return RangeProgress::InFlight;
        }
        let is_to_allocate = self.request.flags.contains(RequestFlags::ALLOCATE) && !self.allocates;
        if !is_to_allocate || !self.status.is_success() {
            return RangeProgress::Ended;
        }
        (self.allocates, self.next) = (true, self.request.lba * self.block_bytes);
        RangeProgress::Again
    }

    /// The completion of a request that has ended.
    pub fn complete(self) -> Completion {
        self.request.complete(self.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block_io::{Op, Tag};

    const OBJECT_BLOCKS: u64 = OBJECT_BYTES as u64 / IMAGE_BLOCK_BYTES as u64;

    /// Sends what may be sent; returns offset and length of each part, and whether it allocates.
    fn send(range: &mut RangeRequest) -> Vec<(u64, u32, bool)> {
        let mut sent = Vec::new();
        while let Some(part) = range.next_part() {
            range.part_sent(part);
            sent.push((part.offset, part.length, part.allocates));
        }
        sent
    }

    #[test]
    fn a_range_is_zeroed_and_then_allocated_object_by_object() {
        let request = Request::new(Tag(7), Op::WriteZeroes, OBJECT_BLOCKS - 1, OBJECT_BLOCKS as u32 + 2);
        let mut range = RangeRequest::new(Request { flags: RequestFlags::ALLOCATE, ..request });
        let object = OBJECT_BYTES as u32;
        let parts = [(u64::from(object) - 512, 512), (object.into(), object), (u64::from(2 * object), 512)];
        let expected = |allocates| parts.map(|(offset, length)| (offset, length, allocates));
        assert_eq!(send(&mut range), expected(false));
        let completed = |range: &mut RangeRequest| range.part_completed(Status::SUCCESS);
        let three = [(); 3].map(|()| completed(&mut range));
        assert_eq!(three, [RangeProgress::InFlight, RangeProgress::InFlight, RangeProgress::Again]);
        assert_eq!(send(&mut range), expected(true));
        let three = [(); 3].map(|()| completed(&mut range));
        assert_eq!(three, [RangeProgress::InFlight, RangeProgress::InFlight, RangeProgress::Ended]);
        assert_eq!(range.complete().status(), Status::SUCCESS);
    }

    #[test]
    fn parts_in_flight_are_bounded_and_none_follows_a_failure() {
        let request = Request::new(Tag(7), Op::Unmap, 0, 40 * OBJECT_BLOCKS as u32);
        let mut range = RangeRequest::new(Request { flags: RequestFlags::ALLOCATE, ..request });
        assert_eq!(send(&mut range).len(), PARTS_MAX as usize);
        assert_eq!(range.part_completed(Status::SUCCESS), RangeProgress::InFlight);
        assert_eq!(send(&mut range).len(), 1);
        for left in (0..PARTS_MAX).rev() {
            let expected = if left > 0 { RangeProgress::InFlight } else { RangeProgress::Ended };
            assert_eq!(range.part_completed(Status::CAPACITY_EXCEEDED), expected);
            assert!(!range.is_unsent() && range.next_part().is_none());
        }
        assert_eq!(range.complete().status(), Status::CAPACITY_EXCEEDED);
    }
}
