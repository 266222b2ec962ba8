//! The acceleration framework: operations on memory that an engine executes, as SPDK's `accel`.
//!
//! [`Accel`] says which engine executes an operation, and has the keys of encryption ([`CryptoKeys`]), the
//! errors that are injected and the statistics of all cores. An [`AccelChannel`] is a core's side of it: its
//! calls execute an operation at once, inline, on the CPU. An [`AccelQueue`] has a device execute copies and
//! fills, which complete later. [`AccelModule`] has the methods `accel_*`.
//!
//! ```
//! use accel::{Accel, AccelOp};
//! let accel = Accel::default();
//! let channel = accel.channel(0);
//! let (mut to, from) = ([0; 4096], [7; 4096]);
//! let checksum = channel.copy_crc32c(&mut to, &from)?;
//! assert_eq!((to, checksum), (from, channel.crc32c(&from)?));
//! assert_eq!(accel.stats()[AccelOp::Crc32c.index()].bytes, 4096);
//! # Ok::<(), accel::AccelFailure>(())
//! ```
//!
//! There are three engines: `software`, the CPU's own instructions, chosen at run time where there are wider
//! ones; `error`, which is `software` with the faults of `accel_error_inject_error`; and `ioat`, which is a
//! DMA engine for what works on memory that it reaches, and `software` for the rest.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod engine;
mod framework;
mod inject;
mod ioat_engine;
mod key;
mod keys;
mod op;
mod queue;
mod rpc;
mod software;
mod stats;
mod xts;

pub use channel::{AccelChannel, AccelFailure, Effect};
pub use engine::Engine;
pub use framework::Accel;
pub use inject::{InjectType, Injection};
pub use ioat::IoatOp;
pub use ioat_engine::{DeviceFailure, DeviceOutcome, IoatChannelInfo};
pub use key::{Cipher, CryptoKey, CryptoKeyError, TweakMode};
pub use keys::CryptoKeys;
pub use op::AccelOp;
pub use queue::{AccelQueue, KnownRegion};
pub use rpc::{AccelModule, NewCryptoKey, PreparedKey};
pub use stats::AccelOpStats;
pub use xts::{XTS_BLOCK_BYTES, XtsKey};
