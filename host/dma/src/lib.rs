//! Memory for DMA and socket I/O: buffer pools, request data, shared regions and queue rings.
//!
//! An [`Arena`] allocates 2 MiB chunks up to a limit, from hugepages if available and from ordinary pages
//! otherwise. Each core divides chunks into [`Buffer`]s through its own [`Pool`]; a dropped buffer returns to
//! its pool. A request carries [`Data`], which is one buffer or several in order, split, joined and shared
//! without copying; a [`Parcel`] takes data to another core, and returns it when it is dropped there.
//! [`SharedRegion`] is memory that several cores, a device or another process access concurrently; an
//! [`ExternalMemory`] makes buffers of parts of it without a copy. [`DeviceBuffer`] is a buffer that a device
//! accesses concurrently, and [`EntryRing`] is a queue in such a buffer. [`DeviceMappings`] is a device with
//! the memory that is mapped for it, and [`DeviceAddresses`] has the device addresses of one core's buffers;
//! a driver implements [`Dma`] for its transport. [`PersistentRegion`] is a file on persistent memory.
//!
//! ```
//! let arena = dma::Arena::new(dma::ArenaConfig { limit_bytes: 4 << 20, ..Default::default() });
//! let pool = dma::Pool::new(&arena);
//! let mut buffer = pool.take(4096).expect("below the limit");
//! buffer.as_mut_slice().fill(7);
//! assert_eq!(buffer.as_slice()[4095], 7);
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod arena;
mod buffer;
mod cache_flush;
mod data;
mod device;
mod entry_ring;
mod external;
mod parcel;
mod persistent;
mod pool;
mod region;
mod sigbus;

pub use arena::{Arena, ArenaConfig, Backing, CHUNK_BYTES, ChunkMemory};
pub use buffer::{Buffer, DeviceBuffer};
pub use data::{Data, Slices};
pub use device::{ChunkAddress, DeviceAddresses, DeviceMappings, Dma, DmaError, MappingConfig, RegionState};
pub use entry_ring::{EntryRing, EntryRingView};
pub use external::ExternalMemory;
pub use parcel::Parcel;
pub use persistent::PersistentRegion;
pub use pool::{BUFFER_BYTES_MAX, BUFFER_BYTES_MIN, Pool, PoolCounts};
pub use region::{AccessOrder, RegionError, RegionMapping, SharedRegion, VolatileBytes};
pub use sigbus::sigbus_fault_count;
