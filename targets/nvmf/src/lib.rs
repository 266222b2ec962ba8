//! The NVMe over Fabrics target, over TCP, RDMA and vfio-user.
//!
//! An [`NvmfTarget`] is the control plane: it configures subsystems, namespaces, listeners and hosts, and is
//! called from any thread except a reactor's. Each reactor runs one poll group per transport. A connection
//! stays in one poll group for its lifetime, and so does every I/O on it, from the socket to the block device
//! and back. A transport is a folder, and a line in the list of transports. Poll groups read the
//! configuration from an immutable snapshot; every change publishes a new one.
//!
//! ```
//! use nvmf::{ListenAddress, NamespaceConfig, NvmfTarget, SubsystemConfig, TcpTransportConfig};
//! let registry = bdev::Registry::new();
//! bdev::malloc::create(&registry, bdev::malloc::MallocConfig::new("Malloc0", 2048, 512))?;
//! let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default())?;
//! let target = NvmfTarget::new(registry, reactors.handles());
//! target.create_transport(TcpTransportConfig::default())?;
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
mod control_plane;
mod fabrics;
mod failure;
mod module;
mod published;
mod queue_report;
mod queue_totals;
mod rdma;
mod reservation_watch;
pub mod rpc;
mod snapshot;
mod tcp;
#[cfg(test)]
mod test_transport;
mod transport;
mod transports;
mod vfio_user;

pub use address::ListenAddress;
pub use control_plane::{
    HostKeyNames, HostKeys, HostPsk, NamespaceConfig, NvmfTarget, PollCounts, PollGroupTotals, QpairInfo,
    Referral, SubsystemConfig, SubsystemInfo, TargetControllerInfo, TargetNamespaceInfo, TargetStats,
    TransportStats,
};
pub use failure::NvmfTargetError;
pub use rdma::RdmaTransportConfig;
pub use snapshot::TargetOptions;
pub use tcp::TcpTransportConfig;
#[cfg(any(test, fuzzing))]
pub use tcp::testing;
pub use transport::{
    AddressText, CoreQueues, Counters, Listening, MaskedCommands, Transport, TransportConfig, TransportKind,
    TransportParameters, TransportParts,
};
pub use vfio_user::{VfioUserConfig, VfioUserFault};
