//! Requests in flight in the kernel, by tag, with their buffers.

use std::os::fd::AsFd;

use block_io::{Completion, Op, Request, Status};
use dma::Data;

use crate::vectors::check_access;

/// A file for I/O through an [`AioQueue`](crate::AioQueue) or a [`UringQueue`](crate::UringQueue), which owns it, so
/// that its descriptor stays open.
pub trait BlockFile: AsFd {
    /// Block size in bytes: the unit of a request's `lba` and `blocks`.
    fn block_bytes(&self) -> u32;

    /// The namespace identifier for NVMe commands, if the file is an NVMe generic device.
    fn namespace_id(&self) -> u32 {
        0
    }
}

/// Interval in nanoseconds of the timer that ends the long waits of a queue: shorter than any pause after which its user
/// must look at something else.
pub(crate) const TICK_NS: u64 = 20_000_000;

/// A negative file offset, with which every read and write fails with `EINVAL`. Not -1, which is the file's own
/// position to io_uring.
const OFFSET_INVALID: u64 = i64::MIN as u64;

/// The file offset of a request, and the number of bytes of its data that the kernel may use: 0 for a request
/// without data. An LBA whose offset exceeds a file's maximum has [`OFFSET_INVALID`]: its request fails. Must be
/// called once, before the request is added to those in flight.
///
/// # Panics
/// If the data is missing or too short, or a read's data is shared.
#[inline]
pub(crate) fn byte_range<F: BlockFile>(file: &F, request: &Request<Data>) -> (u64, u32) {
    let unit = u64::from(file.block_bytes());
    let offset = request.lba.checked_mul(unit).filter(|offset| *offset <= i64::MAX as u64);
    let offset = offset.unwrap_or(OFFSET_INVALID);
    if !request.op.has_data() {
        return (offset, 0);
    }
    let bytes = u64::from(request.blocks) * unit;
    check_access(request.data(), 0, bytes, request.op == Op::Read);
    (offset, bytes as u32)
}

/// The accessors of a queue whose files and [`InFlightRequests`] are at these fields.
macro_rules! queue_accessors {
    ($($files:ident).+, $requests:ident) => {
        /// The files, indexed by a request's `flow`.
        #[inline]
        pub fn files(&self) -> &[F] {
            &self.$($files).+
        }

        /// Number of requests that are submitted and not reaped.
        #[inline]
        pub fn in_flight(&self) -> usize {
            self.$requests.len()
        }

        /// Number of requests that can be submitted now.
        #[inline]
        pub fn room(&self) -> usize {
            self.$requests.room()
        }
    };
}
pub(crate) use queue_accessors;

/// Requests that the kernel executes.
///
/// They own their buffers, so safe code cannot free memory that the kernel still reads or writes: a request can be
/// removed only by a tag that the kernel has completed, or never received.
pub(crate) struct InFlightRequests {
    slots: Box<[Option<Request<Data>>]>,
    count: usize,
}

impl InFlightRequests {
    pub(crate) fn new(depth: u32) -> InFlightRequests {
        InFlightRequests { slots: (0..depth).map(|_| None).collect(), count: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.slots.len() - self.count
    }

    /// Stores a request, and so its buffer, until it is removed. Returns a reference to the stored request, so that
    /// it is moved only once.
    ///
    /// # Panics
    /// If its tag is in flight already, or not below the depth.
    #[inline]
    pub(crate) fn insert(&mut self, request: Request<Data>) -> &Request<Data> {
        let tag = request.tag.0;
        let slot = &mut self.slots[tag as usize];
        assert!(slot.is_none(), "tag {tag} is in flight already");
        self.count += 1;
        slot.insert(request)
    }

    /// Completes the request with this tag with the status that `status` returns.
    ///
    /// # Panics
    /// If the tag is not in flight, which is a bug of the kernel or ours.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        tag: u64,
        status: impl FnOnce(&Request<Data>) -> Status,
    ) -> Completion<Data> {
        let slot = &mut self.slots[tag as usize];
        let Some(request) = slot else { not_in_flight(tag) };
        let status = status(request);
        let Some(request) = slot.take() else { not_in_flight(tag) };
        self.count -= 1;
        request.complete(status)
    }

    /// Removes the request with this tag.
    ///
    /// # Panics
    /// As [`complete`](Self::complete).
    #[inline]
    pub(crate) fn take(&mut self, tag: u64) -> Request<Data> {
        let Some(request) = self.slots[tag as usize].take() else { not_in_flight(tag) };
        self.count -= 1;
        request
    }

    /// Leaks the requests in flight and their buffers, because it is unknown when the kernel stops using them.
    pub(crate) fn leak(&mut self) {
        for slot in &mut self.slots {
            std::mem::forget(slot.take());
        }
        self.count = 0;
    }
}

#[cold]
fn not_in_flight(tag: u64) -> ! {
    panic!("tag {tag} was completed but is not in flight")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use block_io::{Op, Tag};
    use dma::{Arena, Pool};

    use super::*;

    /// A file with 512-byte blocks.
    pub(crate) struct BlockFile512(pub(crate) OwnedFd);

    impl AsFd for BlockFile512 {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl BlockFile for BlockFile512 {
        fn block_bytes(&self) -> u32 {
            512
        }
    }

    fn pool() -> Pool {
        let config =
            dma::ArenaConfig { limit_bytes: 2 << 20, hugepages: false, ..dma::ArenaConfig::default() };
        Pool::new(&Arena::new(config))
    }

    #[test]
    fn a_request_stays_in_flight_until_it_is_removed() {
        let pool = pool();
        let mut requests = InFlightRequests::new(2);
        requests.insert(Request::read(Tag(1), 7, 1, pool.take(4096).unwrap()));
        assert_eq!((requests.len(), requests.room()), (1, 1));
        assert_eq!(requests.take(1).lba, 7);
        assert_eq!((requests.len(), requests.room()), (0, 2));
        requests.insert(Request::read(Tag(0), 9, 1, pool.take(4096).unwrap()));
        let done = requests.complete(
            0,
            |request| {
                if request.lba == 9 { Status::WRITE_FAULT } else { Status::SUCCESS }
            },
        );
        assert_eq!((done.status(), done.into_request().lba, requests.len()), (Status::WRITE_FAULT, 9, 0));
    }

    #[test]
    #[should_panic(expected = "in flight already")]
    fn a_tag_cannot_be_in_flight_twice() {
        let mut requests = InFlightRequests::new(2);
        requests.insert(Request::new(Tag(1), Op::Flush, 0, 0));
        requests.insert(Request::new(Tag(1), Op::Flush, 0, 0));
    }

    #[test]
    #[should_panic(expected = "not in flight")]
    fn completing_an_unknown_tag_panics() {
        InFlightRequests::new(2).take(1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "the test leaks memory")]
    fn leaked_buffers_do_not_return_to_the_pool() {
        let pool = pool();
        let large = dma::BUFFER_BYTES_MAX;
        let mut requests = InFlightRequests::new(2);
        requests.insert(Request::read(Tag(0), 0, 1, pool.take(large).unwrap()));
        let other = pool.take(large).unwrap();
        let forgotten = other.as_ptr();
        requests.insert(Request::read(Tag(1), 0, 1, other));
        drop(requests.take(0));
        requests.leak();
        drop(requests);
        assert_ne!(pool.take(large).unwrap().as_ptr(), forgotten);
    }

    #[test]
    fn an_lba_beyond_the_largest_offset_never_wraps_to_a_valid_one() {
        let file = BlockFile512(std::fs::File::open("/dev/null").unwrap().into());
        let range = |lba| byte_range(&file, &Request::read(Tag(0), lba, 1, pool().take(512).unwrap()));
        assert_eq!(range((1 << 54) - 1), ((1 << 63) - 512, 512));
        for lba in [1 << 54, 1 << 55, (1 << 55) + 8, u64::MAX] {
            assert_eq!(range(lba), (OFFSET_INVALID, 512), "{lba:#x}");
        }
    }

    #[test]
    #[should_panic(expected = "in a buffer of 512")]
    fn a_byte_range_beyond_the_buffer_panics() {
        struct ByteFile(std::fs::File);
        impl AsFd for ByteFile {
            fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
                self.0.as_fd()
            }
        }
        impl BlockFile for ByteFile {
            fn block_bytes(&self) -> u32 {
                1
            }
        }
        let file = ByteFile(std::fs::File::open("/dev/null").unwrap());
        let mut request = Request::read(Tag(0), 5, 512, pool().take(512).unwrap());
        assert_eq!(byte_range(&file, &request), (5, 512));
        request.blocks = 513;
        request.op = Op::Flush;
        assert_eq!(byte_range(&file, &request), (5, 0), "a flush has no data");
        request.op = Op::Write;
        byte_range(&file, &request);
    }
}
