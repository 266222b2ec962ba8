//! The NVMe over Fabrics target, over TCP and vfio-user.
//!
//! A [`Target`] is the control plane: subsystems, namespaces, listeners, hosts, changed from any
//! thread but a reactor's. Each reactor runs one group of connections; a connection belongs to one
//! group for life, and so does every I/O that comes over it, from the socket to the block device and
//! back. What groups know of the configuration is a picture that is made anew for every change.
//!
//! ```
//! use nvmf::{ListenAddress, NamespaceConfig, SubsystemConfig, Target, TransportConfig};
//! let registry = bdev::Registry::new();
//! bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let reactors = reactor::Reactors::start(&reactor::Config::default())?;
//! let target = Target::new(registry, reactors.remotes());
//! target.create_transport(TransportConfig::default())?;
//! let nqn = "nqn.2016-06.io.spdk:cnode1";
//! target.create_subsystem(nqn, SubsystemConfig { allow_any_host: true, ..SubsystemConfig::default() })?;
//! target.add_namespace(nqn, NamespaceConfig::new("Malloc0"))?;
//! let bound = target.add_listener(nqn, ListenAddress::tcp("127.0.0.1", "0"))?;
//! println!("nvme connect -t tcp -a {} -s {} -n {nqn}", bound.traddr, bound.trsvcid);
//! target.shutdown();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod address;
mod command;
mod connection;
mod execute;
mod failure;
mod fused;
mod group;
mod group_poller;
mod handler;
mod limits;
mod picture;
mod ptpl;
mod queue;
mod target;
mod vfio_user;

pub use address::ListenAddress;
pub use failure::TargetError;
#[cfg(any(test, fuzzing))]
pub use group::simulated;
pub use limits::TransportConfig;
pub use ptpl::PtplError;
pub use target::{
    ControllerInfo, NamespaceConfig, NamespaceInfo, QpairInfo, SubsystemConfig, SubsystemInfo, Target,
    TargetStats,
};
pub use vfio_user::{Fault, VfioUserConfig};
