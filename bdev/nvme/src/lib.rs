//! NVMe namespaces as block devices, through as many paths as there are.
//!
//! An [`Initiator`] attaches controllers over PCI Express, TCP and vfio-user and registers a bdev for each
//! namespace. Controllers of one subsystem under one name are paths: [`Multipath`] chooses among them by ANA
//! state and [`Policy`], and sends what a path failed through another. A lost controller is tried again as its
//! [`ReconnectPolicy`] says, while I/O waits.
//!
//! ```no_run
//! use bdev_nvme::{Attach, Initiator, PathConfig, Policy, TransportId};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let reactors = reactor::Reactors::start(&reactor::Config::default())?;
//! let registry = bdev::Registry::new();
//! let initiator = Initiator::new(registry.clone(), reactors.remotes());
//! let uri = "nvme+tcp://127.0.0.1:4420/nqn.2016-06.io.spdk:cnode1".parse()?;
//! let bdevs = initiator.attach(Attach::new("Nvme0", PathConfig::new(TransportId(uri))))?;
//! println!("{bdevs:?}"); // ["Nvme0n1"]
//! initiator.shutdown();
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod channel;
mod counts;
mod discovery;
mod group;
mod initiator;
mod inject;
mod multipath;
mod namespace;
mod passthrough;
mod path;
mod reconnect;
mod totals;
mod view;

pub use counts::PathStats;
pub use discovery::{Discovery, DiscoveryInfo, discover};
pub use initiator::{
    Attach, ControllerInfo, Initiator, InitiatorError, IoPath, Multipath as Multipathing, Operation,
    PATHS_MAX, PathInfo, Queue,
};
pub use inject::ErrorInjection;
pub use multipath::{Multipath, PathCounts, PathView, Policy, Selector};
pub use passthrough::{Passed, PassedThrough};
pub use path::{PathConfig, PathStatus, TransportId};
pub use reconnect::{Next, Reconnect, ReconnectPolicy};
pub use totals::TransportStats;
pub use view::PathId;

use wire_nvme::log::AnaState;

/// SPDK's word for an ANA state.
pub fn ana_name(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non_optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent_loss",
        AnaState::Change => "change",
    }
}

/// SPDK's words for a policy: policy, selector and I/Os a turn.
pub fn policy_names(policy: Policy) -> (&'static str, Option<&'static str>, Option<u32>) {
    match policy {
        Policy::ActivePassive => ("active_passive", None, None),
        Policy::ActiveActive(Selector::RoundRobin { min_io }) => {
            ("active_active", Some("round_robin"), Some(min_io))
        }
        Policy::ActiveActive(Selector::QueueDepth) => ("active_active", Some("queue_depth"), None),
    }
}

impl PathConfig {
    /// A controller with everything else as it is by default: a lost controller is tried once.
    pub fn new(id: TransportId) -> PathConfig {
        PathConfig {
            id,
            options: nvme::Options::default(),
            reconnect: ReconnectPolicy { loss_timeout_ns: Some(0), delay_ns: 0, fast_fail_ns: None },
            num_io_queues: 1024,
            count_io: false,
        }
    }
}

impl Attach {
    /// A controller with everything else as it is by default.
    pub fn new(name: &str, path: PathConfig) -> Attach {
        Attach {
            name: name.to_string(),
            path,
            multipath: Multipathing::default(),
            policy: Policy::ActivePassive,
            retries_max: 3,
            discovered: false,
        }
    }
}
