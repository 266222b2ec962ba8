//! The iSCSI target: block devices for open-iscsi, libiscsi, QEMU and whatever else speaks iSCSI.
//!
//! An [`IscsiTarget`] has portal groups (addresses), initiator groups (who may log in) and target nodes,
//! whose logical units are block devices behind [`scsi`]. The shell drives the connections on all cores;
//! every session that has a logical unit open executes its commands on the core of its connection, so that
//! one unit is served by many cores at once. RFC 7143 at error recovery level 0, with header and data
//! digests, immediate and unsolicited data, and several connections a session, which may be on different
//! cores.
//!
//! ```
//! use bdev::{Registry, malloc};
//! use iscsi::{InitiatorGroupConfig, IscsiTarget, PortalGroupConfig, TargetNodeConfig};
//! let reactors = reactor::Reactors::start(&reactor::ReactorConfig { pin: false, ..Default::default() }).expect("reactors");
//! let registry = Registry::new();
//! malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512)).expect("a device");
//! let target = IscsiTarget::new(registry, reactors.handles());
//! target.create_portal_group(PortalGroupConfig::new(1, vec!["127.0.0.1:0".parse().expect("an address")]))?;
//! target.create_initiator_group(InitiatorGroupConfig::anyone(2))?;
//! let node = TargetNodeConfig::new("disk1", vec![(1, 2)], vec![("Malloc0".into(), 0)]);
//! assert_eq!(target.create_node(node)?, "iqn.2016-06.io.spdk:disk1");
//! target.shutdown();
//! reactors.stop();
//! # Ok::<(), iscsi::IscsiTargetError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod chap;
mod config;
mod connection;
mod core;
mod deferred;
mod failure;
mod histogram;
mod limits;
mod login;
mod moving;
mod numbers;
mod parameters;
mod pdu_reader;
mod pdu_writer;
pub mod rpc;
mod session;
mod sessions;
mod settings;
mod sink;
mod target;
#[cfg(any(test, fuzzing))]
pub mod testing;

pub use chap::{AuthPolicy, ChapCredentials};
pub use config::{InvalidNetmask, IscsiOptions, IscsiPoolOptions, Netmask};
pub use failure::{IscsiTargetError, IscsiViolation};
pub use histogram::HistogramCounts;
pub use settings::{
    ConnectionCounts, ConnectionInfo, InitiatorGroupConfig, LunConfig, PortalGroupConfig, TargetNodeConfig,
};
pub use target::IscsiTarget;
