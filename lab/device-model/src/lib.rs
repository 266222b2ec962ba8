//! Performance models of NVMe SSDs: latency, throughput and faults of published devices without the
//! hardware.
//!
//! A [`DeviceProfile`] describes a device: the command and byte rates of its controller, the number of
//! dies and their service times, its write buffer, garbage collection and faults. A [`DeviceModel`]
//! simulates such a device as a sans-IO state machine. [`simulate`](simulate()) runs loads on models in
//! virtual time, [`fit`](fit()) compares the results with published figures, and [`disk`] provides a
//! block device whose requests complete in real time when the model says.
//!
//! ```
//! use device_model::{Arrival, DeviceProfile, Load, MeasurementEnd, MediaState, Rw, SimulationConfig, simulate};
//! let profile = DeviceProfile::shipped("samsung-980-pro")?;
//! let arrival = Arrival::Closed { depth: 32 };
//! let load = Load { rw: Rw::RandRead, bytes: 4096, arrival, host_ns: 300, wait_ns: 0 };
//! let config = SimulationConfig {
//!     devices: 1,
//!     bytes: profile.capacity_bytes(),
//!     state: MediaState::Steady,
//!     ramp_ns: 1_000_000,
//!     end: MeasurementEnd::AfterNs(20_000_000),
//!     seed: 1,
//! };
//! let result = &simulate(&profile, &config, &[load])[0];
//! assert!((300e3..500e3).contains(&result.iops));
//! # Ok::<(), device_model::ProfileError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod disk;
mod expected;
mod faults;
mod fit;
mod flash;
mod latency;
mod model;
mod profile;
mod quantile;
mod rng;
pub mod rpc;
mod simulation;
mod timing;

pub use block_io::Op;
pub use expected::ExpectedLatency;
pub use faults::{FaultKind, FaultOp, ModelFault};
pub use fit::{FIT_TOLERANCE_PERCENT, FitEffort, FitReport, FitRow, fit};
pub use latency::LatencyHistogram;
pub use model::{CommandId, DeviceModel, IN_FLIGHT_MAX, ModelCompletion};
pub use profile::{
    ConcurrentLoad, DeviceGeometry, DeviceProfile, FitMetric, FitTarget, FrontEnd, GarbageCollection, Media,
    MediaState, ProfileError, ReadPath, Rw, SCHEMA, SlcCache, WritePath,
};
pub use quantile::MixtureComponent;
pub use simulation::{
    Arrival, Load, LoadResult, MeasurementEnd, OPEN_IN_FLIGHT_MAX, SimulationConfig, simulate,
};
pub use timing::IoCommand;
