//! The block I/O interface: [`Channel`], [`Request`], [`Completion`] and [`Status`].
//!
//! A caller submits a batch of tagged [`Request`]s to a [`Channel`] and later polls for
//! [`Completion`]s, which return the tag and the data. [`Status`] is the NVMe status of the I/O.
//! An NVMe queue pair, an io_uring instance, a fabrics connection and a block device all have
//! this interface.
//!
//! ```
//! use block_io::{Op, Request, Status, Tag};
//! let request: Request<Vec<u8>> = Request::read(Tag(7), 0, 8, vec![0; 4096]);
//! assert_eq!(request.op, Op::Read);
//! let completion = request.complete(Status::SUCCESS);
//! assert_eq!((completion.tag(), completion.status()), (Tag(7), Status::SUCCESS));
//! assert_eq!(completion.into_request().take_data().map(|data| data.len()), Some(4096));
//! ```
#![forbid(unsafe_code)]

mod channel;
mod protection;
mod request;
mod status;

pub use channel::Channel;
pub use protection::{ProtectedData, ProtectionFlags, ProtectionTags};
pub use request::{Completion, Mismatch, Op, Payload, RegisteredPages, Request, RequestFlags, Tag};
pub use status::{Errno, FabricsStatus, Status};

/// Whether data is zeroes.
#[inline]
pub fn is_zero(data: &[u8]) -> bool {
    // Nearly all data has other bytes among the first. Of the rest, 64 bytes are looked at together.
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    let chunks = data.chunks_exact(64);
    data.first_chunk::<16>().is_none_or(|first| *first == [0; 16])
        && is_zero(chunks.remainder())
        && chunks.clone().all(is_zero)
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_byte_makes_data_other_than_zeroes() {
        for length in [0, 1, 16, 63, 64, 65, 200] {
            assert!(super::is_zero(&vec![0; length]));
            for at in 0..length {
                let mut data = vec![0; length];
                data[at] = 1;
                assert!(!super::is_zero(&data), "byte {at} of {length}");
            }
        }
    }
}
