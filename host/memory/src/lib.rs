//! Memory that devices and sockets read and write.
//!
//! An [`Arena`] takes chunks from the machine, from hugepages when there are any and from ordinary
//! pages when not, up to a limit. Each core carves [`Buffer`]s out of chunks through its own
//! [`Pool`]; a buffer goes back to its pool when it is dropped. [`SharedRegion`] is memory that
//! several cores, a device or another process write at once; a core hands out parts of it as buffers
//! through a [`Loan`]. [`DeviceBuffer`] is a buffer that a device writes while we look, and
//! [`Entries`] makes a queue of it.
//!
//! ```
//! let arena = memory::Arena::new(memory::Config { limit_bytes: 4 << 20, ..Default::default() });
//! let pool = memory::Pool::new(&arena);
//! let mut buffer = pool.take(4096).expect("below the limit");
//! buffer.as_mut_slice().fill(7);
//! assert_eq!(buffer.as_slice()[4095], 7);
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod arena;
mod buffer;
mod entries;
mod guard;
mod region;

pub use arena::{Arena, Backing, CHUNK_BYTES, ChunkMemory, Config};
pub use buffer::{BUFFER_BYTES_MAX, BUFFER_BYTES_MIN, Buffer, DeviceBuffer, Loan, Pool};
pub use entries::{Cursor, Entries};
pub use guard::foreign_faults;
pub use region::{Cells, RegionError, SharedRegion};
