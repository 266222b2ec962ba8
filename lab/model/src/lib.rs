//! NVMe devices made of software, with time in them: what the published studies measured, without the
//! hardware.
//!
//! A [`Profile`] says what a device is like: how many commands its controller takes, how many dies it
//! has and how long they are busy, what its write buffer, its garbage collection and its faults do. A
//! [`Model`] is such a device as a sans-IO state machine. [`drive`](drive()) runs loads on models in
//! virtual time, [`fit`](fit()) compares them with published figures, and [`disk`] makes a block device
//! of a profile that takes as long in real time as the model says.
//!
//! ```
//! use model::{Arrival, Load, Profile, Rw, Setting, State, drive};
//! let profile = Profile::shipped("samsung-980-pro")?;
//! let arrival = Arrival::Closed { depth: 32 };
//! let load = Load { rw: Rw::RandRead, bytes: 4096, arrival, host_ns: 300, wait_ns: 0 };
//! let setting = Setting {
//!     devices: 1,
//!     bytes: profile.capacity_bytes(),
//!     state: State::Steady,
//!     ramp_ns: 1_000_000,
//!     measure_ns: 20_000_000,
//!     commands_max: u64::MAX,
//!     seed: 1,
//! };
//! let measured = &drive(&profile, &setting, &[load])[0];
//! assert!((300e3..500e3).contains(&measured.iops));
//! # Ok::<(), model::ProfileError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod curve;
pub mod disk;
mod drive;
mod expected;
mod faults;
mod fit;
mod latency;
mod model;
mod profile;
mod random;
mod timing;
mod wear;

pub use curve::Component;
pub use drive::{Arrival, Load, Measured, OPEN_IN_FLIGHT_MAX, Setting, drive};
pub use expected::Expected;
pub use faults::{Fault, FaultKind, FaultOp};
pub use fit::{Effort, GOAL_PERCENT, Report, Row, fit};
pub use latency::Latencies;
pub use model::{Done, IN_FLIGHT_MAX, Model, Ticket};
pub use profile::{
    Beside, Front, Gc, Media, Metric, Profile, ProfileError, ReadPath, Rw, SCHEMA, Shape, Slc, State, Target,
    WritePath,
};
pub use ring::Op;
pub use timing::Io;
