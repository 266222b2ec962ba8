//! Header and data digests: CRC32C.
//!
//! TCP 1.0, section 3.3.1: the CRC32C of RFC 3720, sent as four little-endian bytes.

pub use codec::{CRC32C_SIZE as SIZE, Crc32c, crc32c};
