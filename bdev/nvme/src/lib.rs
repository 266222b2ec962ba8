//! NVMe namespaces as block devices, with multipath, reconnection and discovery (SPDK's `bdev_nvme`).
//!
//! An [`Initiator`] attaches controllers over PCI Express, TCP and vfio-user and registers a bdev for each
//! namespace. Controllers of one subsystem under one name are paths: [`Multipath`] selects a path by ANA
//! state and [`Policy`], and retries I/O that failed on one path on another. A lost controller is reconnected
//! according to its [`ReconnectPolicy`], while I/O waits. [`Hotplug`] attaches what is inserted, and detaches
//! what is removed.
//!
//! ```no_run
//! use bdev_nvme::{Attach, Initiator, PathConfig, Policy, TransportId};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default())?;
//! let registry = bdev::Registry::new();
//! let initiator = Initiator::new(registry.clone(), reactors.handles());
//! let uri = "nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1".parse()?;
//! let bdevs = initiator.attach(Attach::new("Nvme0", PathConfig::new(TransportId(uri))))?;
//! println!("{bdevs:?}"); // ["Nvme0n1"]
//! initiator.shutdown();
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod attach;
mod channel;
mod controller_group;
mod counts;
mod discovery;
mod discovery_service;
mod hotplug;
mod initiator;
mod inject;
mod mdns_discovery;
mod multipath;
mod namespace;
mod passthrough;
mod path;
mod path_id;
mod reconnect;
mod reservation;
pub mod rpc;
mod scanned;
mod session;
mod shared_namespace;
mod suspension;
mod transport_stats;

pub use attach::{Attach, MultipathMode};
pub use counts::PathStats;
pub use discovery::discover;
pub use discovery_service::{DiscoveryConfig, DiscoveryInfo};
pub use hotplug::{
    AttachInserted, HOTPLUG_PERIOD_DEFAULT, HOTPLUG_PERIOD_MAX, Hotplug, HotplugBus, HotplugFunction, PciBus,
};
pub use initiator::{ControllerGroupInfo, Initiator, InitiatorError, IoPath, PATHS_MAX, PathInfo, QueueKind};
pub use inject::ErrorInjection;
pub use multipath::{IoWait, Multipath, PathCounts, PathView, Policy, Selector};
pub use passthrough::{PassthroughCommand, PassthroughReply};
pub use path::{ControllerOperation, PathConfig, PathStatus, TransportId};
pub use path_id::PathId;
pub use reconnect::ReconnectPolicy;
pub use reservation::PathReservation;
pub use transport_stats::TransportStats;

use wire_nvme::log::AnaState;

/// An ANA state as SPDK's JSON-RPC writes it.
pub fn ana_name(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        AnaState::Change => "change",
    }
}

/// A policy as SPDK's JSON-RPC writes it: `mp_policy`, `selector` and `rr_min_io`.
pub fn policy_names(policy: Policy) -> (&'static str, Option<&'static str>, Option<u32>) {
    match policy {
        Policy::ActivePassive => ("active_passive", None, None),
        Policy::ActiveActive(Selector::RoundRobin { min_io }) => {
            ("active_active", Some("round_robin"), Some(min_io))
        }
        Policy::ActiveActive(Selector::QueueDepth) => ("active_active", Some("queue_depth"), None),
    }
}
