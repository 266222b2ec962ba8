//! Rings: the one shape that every hop of an I/O has.
//!
//! A caller submits a batch of tagged [`Request`]s to a [`Channel`] and later polls for
//! [`Completion`]s that carry the tag, and the buffer, back. [`Status`] says how it ended.
//! The same shape stands for an NVMe queue pair, an io_uring, a fabrics connection and a block
//! device.
//!
//! ```
//! use ring::{Op, Request, Status, Tag};
//! let request: Request<Vec<u8>> = Request::read(Tag(7), 0, 8, vec![0; 4096]);
//! assert_eq!(request.op, Op::Read);
//! let completion = request.complete(Status::SUCCESS);
//! assert_eq!((completion.tag(), completion.status()), (Tag(7), Status::SUCCESS));
//! assert_eq!(completion.into_request().buffer.map(|b| b.len()), Some(4096));
//! ```
#![forbid(unsafe_code)]

mod channel;
mod request;
mod status;

pub use channel::Channel;
pub use request::{Completion, Flags, Op, Request, Tag};
pub use status::{Errno, Status};
