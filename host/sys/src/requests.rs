//! What the kernel holds: requests with their buffers, by tag.

use std::os::fd::AsFd;

use memory::Buffer;
use ring::{Completion, Request, Status};

/// A file that a ring of requests does I/O on. The ring owns it, so that its descriptor stays open.
pub trait RingFile: AsFd {
    /// The unit of a request's `lba` and `blocks`.
    fn block_bytes(&self) -> u32;

    /// The namespace that NVMe commands name, of an NVMe generic device.
    fn namespace(&self) -> u32 {
        0
    }
}

/// Where a request begins in its file, and how many bytes of its buffer the kernel may use: none of a request
/// without data. To be asked once, before the request is put among those in flight.
///
/// # Panics
/// If its buffer is shorter, or not there.
#[inline]
pub(crate) fn span<F: RingFile>(file: &F, request: &Request<Buffer>) -> (u64, u32) {
    let unit = u64::from(file.block_bytes());
    // What the multiplication loses the kernel finds, which knows where its file ends: no memory is named by it.
    let offset = request.lba.wrapping_mul(unit);
    if !request.op.has_data() {
        return (offset, 0);
    }
    let bytes = u64::from(request.blocks) * unit;
    let room = request.buffer.as_ref().map_or(0, Buffer::len);
    assert!(bytes <= room as u64, "{bytes} bytes in a buffer of {room}");
    (offset, bytes as u32)
}

/// Requests that the kernel works on. They own their buffers, and so no safe code can free memory that the
/// kernel still reads or writes: the only ways out take a tag that the kernel has completed, or never saw.
pub(crate) struct Requests {
    slots: Box<[Option<Request<Buffer>>]>,
    count: usize,
}

impl Requests {
    pub(crate) fn new(depth: u32) -> Requests {
        Requests { slots: (0..depth).map(|_| None).collect(), count: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.slots.len() - self.count
    }

    /// Keeps a request, and so its buffer, until it is taken, and shows it where it lies: read there, it is
    /// moved once and as a whole.
    ///
    /// # Panics
    /// If its tag is in flight, or not below the depth.
    #[inline]
    pub(crate) fn put(&mut self, request: Request<Buffer>) -> &Request<Buffer> {
        let tag = request.tag.0;
        let slot = &mut self.slots[tag as usize];
        assert!(slot.is_none(), "tag {tag} is in flight already");
        self.count += 1;
        slot.insert(request)
    }

    /// Ends the request that the kernel names by its tag, in the way that `status` sees.
    ///
    /// # Panics
    /// If it is not in flight, which is the kernel's, or our, bug.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        tag: u64,
        status: impl FnOnce(&Request<Buffer>) -> Status,
    ) -> Completion<Buffer> {
        let slot = &mut self.slots[tag as usize];
        let Some(request) = slot else { not_in_flight(tag) };
        let status = status(request);
        let Some(request) = slot.take() else { not_in_flight(tag) };
        self.count -= 1;
        request.complete(status)
    }

    /// The request of a tag, as it was put.
    ///
    /// # Panics
    /// As [`complete`](Self::complete).
    #[inline]
    pub(crate) fn take(&mut self, tag: u64) -> Request<Buffer> {
        let Some(request) = self.slots[tag as usize].take() else { not_in_flight(tag) };
        self.count -= 1;
        request
    }

    /// What is in flight keeps its memory for ever: nobody knows when the kernel is done with it.
    pub(crate) fn forget(&mut self) {
        for slot in &mut self.slots {
            std::mem::forget(slot.take());
        }
        self.count = 0;
    }
}

#[cold]
fn not_in_flight(tag: u64) -> ! {
    panic!("tag {tag} is completed, and not in flight")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    use memory::{Arena, Pool};
    use ring::{Op, Tag};

    use super::*;

    /// A file in blocks of 512 bytes.
    pub(crate) struct Blocks(pub(crate) OwnedFd);

    impl AsFd for Blocks {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    impl RingFile for Blocks {
        fn block_bytes(&self) -> u32 {
            512
        }
    }

    fn pool() -> Pool {
        let config = memory::Config { limit_bytes: 2 << 20, hugepages: false, ..memory::Config::default() };
        Pool::new(&Arena::new(config))
    }

    #[test]
    fn a_request_is_held_with_its_buffer_until_it_is_taken() {
        let pool = pool();
        let mut requests = Requests::new(2);
        requests.put(Request::read(Tag(1), 7, 1, pool.take(4096).unwrap()));
        assert_eq!((requests.len(), requests.room()), (1, 1));
        assert_eq!(requests.take(1).lba, 7);
        assert_eq!((requests.len(), requests.room()), (0, 2));
        requests.put(Request::read(Tag(0), 9, 1, pool.take(4096).unwrap()));
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
    fn a_tag_is_in_flight_once() {
        let mut requests = Requests::new(2);
        requests.put(Request::new(Tag(1), Op::Flush, 0, 0));
        requests.put(Request::new(Tag(1), Op::Flush, 0, 0));
    }

    #[test]
    #[should_panic(expected = "not in flight")]
    fn what_is_not_in_flight_does_not_complete() {
        Requests::new(2).take(1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "what is forgotten is a leak")]
    fn what_is_forgotten_never_comes_back_to_its_pool() {
        let pool = pool();
        let large = memory::BUFFER_BYTES_MAX;
        let mut requests = Requests::new(2);
        requests.put(Request::read(Tag(0), 0, 1, pool.take(large).unwrap()));
        let other = pool.take(large).unwrap();
        let forgotten = other.as_ptr();
        requests.put(Request::read(Tag(1), 0, 1, other));
        drop(requests.take(0));
        requests.forget();
        drop(requests);
        assert_ne!(pool.take(large).unwrap().as_ptr(), forgotten);
    }

    #[test]
    #[should_panic(expected = "in a buffer of 512")]
    fn no_more_than_the_buffer_is_named_to_the_kernel() {
        struct Bytes(std::fs::File);
        impl AsFd for Bytes {
            fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
                self.0.as_fd()
            }
        }
        impl RingFile for Bytes {
            fn block_bytes(&self) -> u32 {
                1
            }
        }
        let file = Bytes(std::fs::File::open("/dev/null").unwrap());
        let mut request = Request::read(Tag(0), 5, 512, pool().take(512).unwrap());
        assert_eq!(span(&file, &request), (5, 512));
        request.blocks = 513;
        request.op = Op::Flush;
        assert_eq!(span(&file, &request), (5, 0), "a flush has no data");
        request.op = Op::Write;
        span(&file, &request);
    }
}
