//! The block-device layer: device registration, claims, I/O channels, statistics, and the basic modules.
//!
//! A [`Registry`] maps names to [`BlockDevice`]s, keeps claims and returns [`Descriptor`]s. A descriptor
//! opens one [`BdevChannel`] a core, which validates each request, limits the queue depth, shares the device
//! fairly between [`Tenants`] and their flows, and keeps statistics; another [`Scheduler`] takes a policy's
//! place. The layer itself implements compare and [fused](block_io::RequestFlags::FUSED) compare-and-write,
//! which is atomic with respect to writes from every core. Modules ([`malloc`], [`null`], [`uring`],
//! [`pmem`], [`error`], [`delay`]) implement [`Bdev`]; [`stacking`] is for those that stand on others.
//! [`AsyncChannel`] is the `async` interface of a channel, for control code.
//!
//! ```
//! use bdev::{Access, AsyncChannel, Registry, malloc};
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).expect("a reactor");
//! let core = reactor.core();
//! let descriptor = registry.open("Malloc0", Access::ReadWrite)?;
//! let io = AsyncChannel::new(&core, descriptor.channel(&core)?);
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

mod async_channel;
mod bad_blocks;
mod channel;
mod claims;
mod closing;
mod compare;
mod device;
mod device_reader;
mod device_reservations;
mod disk_reader;
mod durability;
mod failure;
mod fair_queue;
mod internal;
mod memory_budget;
mod modules;
mod parts;
mod plan_runner;
mod qos;
mod range_locks;
mod registry;
pub mod rpc;
mod scheduler;
pub mod stacking;
mod stats;
mod tenants;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod testing;
mod trace;

pub use async_channel::AsyncChannel;
pub use bad_blocks::{BadBlocks, TooManyRanges};
pub use channel::BdevChannel;
pub use claims::{Access, ClaimType};
pub use closing::{CLOSE_TIMEOUT, Closing, StillOpen};
pub use device::{Bdev, BdevGeometry, BlockDevice, BlockingReader, DEPTH_DEFAULT, InfoValue, IoLimits};
pub use device_reader::DeviceReader;
pub use device_reservations::{OpenReservationsError, PreparedReservations, ReservationLease};
pub use disk_reader::{DiskReadError, DiskReader};
pub use durability::Durability;
pub use failure::BdevError;
pub use memory_budget::DeviceMemory;
pub use modules::{MetadataConfig, delay, error, malloc, null, passthru, pmem, split, uring};
pub use plan_runner::{PlanRunner, PlannedAction, PlannedData, PlannedIo, PlannedOutcome, Planner, run_plan};
pub use qos::RateLimits;
pub use registry::{Descriptor, DeviceEvent, Registry, STACK_LEVELS_MAX, SubscriptionId};
pub use scheduler::{Scheduler, SchedulerContext, SchedulerPolicy};
pub use stats::{BdevHistogram, ChannelStats, DeviceStats, OpCounters, OpStats, StatsReset};
pub use tenants::{Flow, TenantId, TenantInfo, Tenants};
pub use trace::{TargetTrace, TraceEvent, TraceGroup, TracePoint, TracedConnection, TracedIo};
pub use uuid::Uuid;
pub use wire_nvme::protection::{MetadataFormat, Protection, ProtectionType};

/// Whether channels accept fused compare-and-write ([`block_io::RequestFlags::FUSED`]): its range locks need
/// the `membarrier` system call.
pub fn supports_fused() -> bool {
    os::barrier::is_supported()
}

/// An I/O request of a block device; it owns its buffer.
pub type Request = block_io::Request<dma::Data>;
/// A completed request, which returns the buffer.
pub type Completion = block_io::Completion<dma::Data>;
// A completion fits a cache line.
const _: () = assert!(size_of::<Completion>() == 64);
/// A module's I/O channel, used on the core that opened it.
pub type BoxedChannel = Box<dyn block_io::Channel<Request = Request, Completion = Completion>>;
