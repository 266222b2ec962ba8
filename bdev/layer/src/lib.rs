//! The block-device layer: who has which device open, and what every I/O goes through on its way.
//!
//! A [`Registry`] names [`Device`]s, guards claims and hands out [`Descriptor`]s. A descriptor opens
//! one [`Channel`] a core, which checks each request, limits what is in flight, shares the device
//! between flows, and counts. Compares it does itself, and a write that is [fused](ring::Flags::FUSED) to one as
//! well, with no other write of the range in between, whichever core it comes from. Modules ([`malloc`],
//! [`null`], [`uring`], [`error`], [`delay`]) implement [`Bdev`]. [`Io`] is the `async` face of a channel, for
//! control code.
//!
//! ```
//! use bdev::{Access, Io, Registry, malloc};
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let reactor = reactor::Reactor::new(&reactor::Config::default()).expect("a reactor");
//! let core = reactor.core();
//! let descriptor = registry.open("Malloc0", Access::ReadWrite)?;
//! let io = Io::new(&core, descriptor.channel(&core)?);
//! let mut buffer = core.pool().take(4096).expect("a buffer");
//! buffer.as_mut_slice().fill(7);
//! let buffer = reactor.block_on(async move {
//!     let buffer = io.write(8, buffer).await.expect("written");
//!     io.read(8, buffer).await.expect("read")
//! });
//! assert!(buffer.as_slice().iter().all(|byte| *byte == 7));
//! # Ok::<(), bdev::BdevError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bad_blocks;
mod channel;
mod compare;
mod device;
mod failure;
mod fair;
mod io;
mod locks;
mod modules;
mod registry;
mod stats;
pub mod testing;

pub use bad_blocks::{BadBlocks, TooManyRanges};
pub use channel::Channel;
pub use device::{Bdev, DEPTH_DEFAULT, Device, Geometry, Value};
pub use failure::BdevError;
pub use io::Io;
pub use modules::{delay, error, malloc, null, uring};
pub use registry::{Access, Descriptor, DeviceEvent, Registry, SubscriptionId};
pub use stats::{ChannelStats, DeviceStats, Histogram, OpCounters, OpStats};
pub use uuid::Uuid;

/// Whether channels take fused compares ([`ring::Flags::FUSED`]): what makes them atomic takes a kernel that knows
/// `membarrier`.
pub fn can_fuse() -> bool {
    sys::barrier::is_there()
}

/// A request as it travels through the layer.
pub type Request = ring::Request<memory::Buffer>;
/// Its way back.
pub type Completion = ring::Completion<memory::Buffer>;
/// A module's ring, on the core that opened it.
pub type BoxedChannel = Box<dyn ring::Channel<Request = Request, Completion = Completion>>;
