//! What the target is configured with, and what it reports.

use std::net::SocketAddr;
use std::path::PathBuf;

use scsi::AccessState;
use sockets::StreamAddress;
use wire_iscsi::LoginStage;

use crate::chap::AuthPolicy;
use crate::config::{ANY, Netmask};
use crate::limits::QUEUE_DEPTH_DEFAULT;

/// Addresses to listen at, under one portal group tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortalGroupConfig {
    /// The tag, from 1.
    pub tag: u16,
    /// The addresses; port 0 for any free one.
    pub portals: Vec<SocketAddr>,
    /// Discovery does not list it.
    pub private: bool,
    /// Nothing listens until [`IscsiTarget::start_portal_group`](crate::IscsiTarget::start_portal_group).
    pub wait: bool,
    /// How initiators authenticate themselves for discovery through it; the target's policy if it is `None`.
    pub discovery_auth: Option<AuthPolicy>,
}

/// Who may log in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitiatorGroupConfig {
    /// The tag, from 1.
    pub tag: u32,
    /// Names of initiators, or `ANY`; `!` before a name denies it. The first that matches decides.
    pub initiators: Vec<String>,
    /// Addresses of initiators, one of which has to match.
    pub netmasks: Vec<Netmask>,
}

/// A logical unit of a target node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunConfig {
    /// The block device, by name, alias or UUID.
    pub bdev_name: String,
    /// The LUN.
    pub lun: u16,
    /// The file with the device's reservations that persist through power loss (APTPL); they cannot without one.
    pub ptpl_file: Option<PathBuf>,
}

/// A target that initiators log in to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetNodeConfig {
    /// An iSCSI name, or what follows the node base in it.
    pub name: String,
    /// A text for humans.
    pub alias: String,
    /// Tags of portal groups, each with the tag of an initiator group that it admits.
    pub maps: Vec<(u16, u32)>,
    /// The logical units.
    pub luns: Vec<LunConfig>,
    /// Commands of a session in flight.
    pub queue_depth: u32,
    /// Initiators have to use header digests.
    pub header_digest: bool,
    /// Initiators have to use data digests.
    pub data_digest: bool,
    /// How initiators authenticate themselves.
    pub auth: AuthPolicy,
    /// Where initiators that log in through a portal group are sent instead.
    pub redirects: Vec<(u16, SocketAddr)>,
    /// Access states of portal groups, each a target port group; the others are optimized.
    pub access: Vec<(u16, AccessState)>,
    /// Latencies of commands are counted.
    pub histogram: bool,
}

/// Connections by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Initiators that have not logged in.
    pub logging_in: usize,
    /// Those that have.
    pub running: usize,
    /// Connections that complete what is in flight.
    pub draining: usize,
    /// Connections that are closed, with requests to devices in flight.
    pub closed: usize,
}

/// A connection of an initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The reactor that serves it.
    pub core: usize,
    /// That reactor's CPU.
    pub cpu: u32,
    /// The stage of the login; full-feature once the initiator has logged in.
    pub stage: LoginStage,
    /// It completes what is in flight, and is closed then.
    pub is_draining: bool,
    /// Name of the initiator; empty until it has named itself, and so are the identifiers below 0.
    pub initiator: String,
    /// The initiator's part of the session's identifier.
    pub isid: u64,
    /// The target's part of it, once the initiator has logged in.
    pub tsih: Option<u16>,
    /// The initiator's name of the connection.
    pub cid: u16,
    /// Name of the target node; `None` in a discovery session, and until the initiator has named it.
    pub node: Option<String>,
    /// Tag of the portal group.
    pub portal_group: u16,
    /// Address of the initiator.
    pub peer: StreamAddress,
    /// The address that it has connected to.
    pub local: Option<SocketAddr>,
    /// Whether header digests are in use.
    pub header_digest: bool,
    /// Whether data digests are in use.
    pub data_digest: bool,
}

impl PortalGroupConfig {
    /// A public portal group.
    pub fn new(tag: u16, portals: Vec<SocketAddr>) -> PortalGroupConfig {
        PortalGroupConfig { tag, portals, private: false, wait: false, discovery_auth: None }
    }
}

impl InitiatorGroupConfig {
    /// A group that admits every initiator.
    pub fn anyone(tag: u32) -> InitiatorGroupConfig {
        InitiatorGroupConfig { tag, initiators: vec![ANY.to_string()], netmasks: vec![Netmask::Any] }
    }
}

impl TargetNodeConfig {
    /// A target node with default parameters. Each logical unit is a device with its LUN.
    pub fn new(name: &str, maps: Vec<(u16, u32)>, luns: Vec<(String, u16)>) -> TargetNodeConfig {
        TargetNodeConfig {
            name: name.to_string(),
            alias: String::new(),
            maps,
            luns: luns
                .into_iter()
                .map(|(bdev_name, lun)| LunConfig { bdev_name, lun, ptpl_file: None })
                .collect(),
            queue_depth: QUEUE_DEPTH_DEFAULT,
            header_digest: false,
            data_digest: false,
            auth: AuthPolicy::default(),
            redirects: Vec::new(),
            access: Vec::new(),
            histogram: false,
        }
    }
}
