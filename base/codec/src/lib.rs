//! What encodings share: [`DecodeError`], structures of little-endian [`fields!`], and the checksum CRC32C
//! ([`crc32c`], [`Crc32c`], [`Crc64`]).
//!
//! Every crate in `wire/` returns this error, so that callers of several formats handle one type.
//!
//! ```
//! use codec::{Crc32c, DecodeError, crc32c};
//! let mut checksum = Crc32c::new();
//! checksum.update(b"1234");
//! checksum.update(b"56789");
//! assert_eq!((checksum.value(), crc32c(b"123456789")), (0xe306_9283, 0xe306_9283));
//! let error = DecodeError::value("opcode", 0, 0x7f);
//! assert_eq!(error.to_string(), "opcode at byte 0 has the value 0x7f");
//! ```
#![forbid(unsafe_code)]

mod checksum;
mod error;
mod fields;

pub use checksum::{CRC32C_SIZE, Crc32c, Crc64, crc32, crc32c};
pub use error::DecodeError;
pub use fields::{next_field, put_field};
