//! The configuration of the target, as the cores see it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use scsi::{AccessState, LogicalUnit};
use target_shell::{ConnectionLimits, DeviceMap, TargetConfig};

use crate::chap::{AuthGroup, AuthPolicy, ChapCredentials};
use crate::histogram::NodeHistogram;
use crate::limits::{
    CONNECTIONS_DEFAULT, FIRST_BURST_BYTES_MAX, QUEUE_DEPTH_MAX, SESSION_CONNECTIONS_DEFAULT,
    TIME2WAIT_DEFAULT_S,
};
use crate::parameters::DigestPolicy;

/// What all target nodes share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiOptions {
    /// What precedes a target node's name without `iqn.`, `eui.` or `naa.`.
    pub node_base: String,
    /// Interval after which a silent initiator is asked whether it is there; 0 for never. In seconds.
    pub nop_in_interval_s: u32,
    /// Time without an answer after which its connection is closed; 0 for never. In seconds.
    pub nop_timeout_s: u32,
    /// Most data that comes with a command or without an R2T, in bytes.
    pub first_burst_bytes: u32,
    /// Data may come with a command.
    pub immediate_data: bool,
    /// Connections of a session, at most.
    pub connections_max: u32,
    /// Sessions, at most, those of discovery included.
    pub sessions_max: u32,
    /// Commands of a session in flight, at most, whatever the target node says.
    pub queue_depth_max: u32,
    /// Least DefaultTime2Wait that a login results in, in seconds.
    pub time2wait_s: u32,
    /// Connections of initiators that have logged in.
    pub limits: ConnectionLimits,
    /// Sizes that SPDK has and this target does not.
    pub pools: IscsiPoolOptions,
}

/// Sizes of SPDK's pools. They are without effect, because the memory of each connection has a limit of its own; tools
/// that set them read them back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IscsiPoolOptions {
    /// Parts of large reads of a connection.
    pub large_data_ins: u32,
    /// R2Ts of a connection.
    pub r2ts: u32,
    /// PDUs of the target.
    pub pdus: u32,
    /// Buffers for data that comes with a command.
    pub immediate_data_buffers: u32,
    /// Buffers for Data-Out PDUs.
    pub data_out_buffers: u32,
}

impl Default for IscsiPoolOptions {
    /// SPDK's defaults.
    fn default() -> Self {
        IscsiPoolOptions {
            large_data_ins: 64,
            r2ts: 4,
            pdus: 36_864,
            immediate_data_buffers: 16_384,
            data_out_buffers: 2_048,
        }
    }
}

impl Default for IscsiOptions {
    fn default() -> Self {
        IscsiOptions {
            node_base: "iqn.2016-06.io.spdk".into(),
            nop_in_interval_s: 30,
            nop_timeout_s: 60,
            first_burst_bytes: FIRST_BURST_BYTES_MAX,
            immediate_data: true,
            connections_max: SESSION_CONNECTIONS_DEFAULT,
            sessions_max: CONNECTIONS_DEFAULT,
            queue_depth_max: QUEUE_DEPTH_MAX,
            time2wait_s: TIME2WAIT_DEFAULT_S,
            limits: ConnectionLimits::new(CONNECTIONS_DEFAULT),
            pools: IscsiPoolOptions::default(),
        }
    }
}

/// The configuration that is published to all cores.
#[derive(Default)]
pub(crate) struct IscsiConfig {
    pub(crate) options: IscsiOptions,
    pub(crate) portal_groups: Vec<Arc<PortalGroup>>,
    pub(crate) initiator_groups: Vec<Arc<InitiatorGroup>>,
    pub(crate) nodes: Vec<Arc<TargetNode>>,
    pub(crate) auth_groups: Vec<Arc<AuthGroup>>,
    /// Of discovery, unless the portal group says otherwise.
    pub(crate) discovery_auth: AuthPolicy,
    pub(crate) devices: DeviceMap,
}

/// Addresses under one portal group tag.
#[derive(Clone, Debug)]
pub(crate) struct PortalGroup {
    pub(crate) tag: u16,
    /// Discovery does not list it: initiators come by redirection.
    pub(crate) private: bool,
    /// Of discovery through it.
    pub(crate) discovery_auth: Option<AuthPolicy>,
    /// As they were given.
    pub(crate) addresses: Vec<SocketAddr>,
    /// With the ports that the kernel assigned; empty while nothing listens.
    pub(crate) portals: Vec<Portal>,
}

/// An address to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portal {
    pub(crate) portid: u16,
    pub(crate) address: SocketAddr,
}

/// Who may log in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InitiatorGroup {
    pub(crate) tag: u32,
    pub(crate) initiators: Vec<String>,
    pub(crate) netmasks: Vec<Netmask>,
}

/// A logical unit of a target node.
#[derive(Clone, Debug)]
pub(crate) struct NodeUnit {
    /// Identifies it as long as the target lives.
    pub(crate) id: u64,
    pub(crate) lun: u16,
    /// The device's key in the [`DeviceMap`].
    pub(crate) key: u32,
    pub(crate) unit: Arc<LogicalUnit>,
}

/// A target that initiators log in to.
#[derive(Clone, Debug)]
pub(crate) struct TargetNode {
    /// Identifies it as long as the target lives; changes keep it.
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) alias: String,
    /// Portal group tags, each with the tag of an initiator group that it admits.
    pub(crate) maps: Vec<(u16, u32)>,
    pub(crate) queue_depth: u32,
    pub(crate) digests: DigestPolicy,
    pub(crate) auth: AuthPolicy,
    /// Where initiators that log in through a portal group are sent instead.
    pub(crate) redirects: Vec<(u16, SocketAddr)>,
    /// Access states that the configuration has for portal groups; the others are optimized.
    pub(crate) access: Vec<(u16, AccessState)>,
    /// Latencies of commands, if they are counted.
    pub(crate) histogram: Option<Arc<NodeHistogram>>,
    pub(crate) units: Vec<NodeUnit>,
}

impl TargetNode {
    /// Removes what is configured for portal groups that the node is not offered through any more.
    pub(crate) fn forget_unmapped(&mut self) {
        let maps = &self.maps;
        let is_mapped = |tag: u16| maps.iter().any(|(mapped, _)| *mapped == tag);
        self.redirects.retain(|(tag, _)| is_mapped(*tag));
        self.access.retain(|(tag, _)| is_mapped(*tag));
    }
}

/// Whether an initiator group admits an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Admitted,
    Denied,
    NotNamed,
}

/// What admits every initiator, or every address.
pub(crate) const ANY: &str = "ANY";

impl InitiatorGroup {
    fn admission(&self, initiator: &str, peer: IpAddr) -> Admission {
        if !self.netmasks.iter().any(|netmask| netmask.contains(peer)) {
            return Admission::NotNamed;
        }
        for entry in &self.initiators {
            let (name, admission) = match entry.strip_prefix('!') {
                Some(name) => (name, Admission::Denied),
                None => (entry.as_str(), Admission::Admitted),
            };
            if name == ANY || name == initiator {
                return admission;
            }
        }
        Admission::NotNamed
    }
}

impl IscsiConfig {
    /// The portal group of a listener.
    pub(crate) fn portal_group(&self, portid: u16) -> Option<&Arc<PortalGroup>> {
        self.portal_groups.iter().find(|group| group.portals.iter().any(|portal| portal.portid == portid))
    }

    pub(crate) fn node(&self, name: &str) -> Option<&Arc<TargetNode>> {
        self.nodes.iter().find(|node| node.name == name)
    }

    /// What the initiators of a policy authenticate themselves with.
    pub(crate) fn credentials(&self, policy: AuthPolicy) -> Vec<ChapCredentials> {
        let group = self.auth_groups.iter().find(|group| group.tag == policy.group);
        group.map_or(Vec::new(), |group| group.credentials.clone())
    }

    /// Whether an initiator may log in to a node through a portal group. The first initiator group that names it decides.
    pub(crate) fn admits(&self, node: &TargetNode, tag: u16, initiator: &str, peer: IpAddr) -> bool {
        let groups = node.maps.iter().filter(|(portal_group, _)| *portal_group == tag);
        for (_, initiator_group) in groups {
            let group = self.initiator_groups.iter().find(|group| group.tag == *initiator_group);
            match group.map_or(Admission::NotNamed, |group| group.admission(initiator, peer)) {
                Admission::NotNamed => {}
                decided => return decided == Admission::Admitted,
            }
        }
        false
    }

    /// The portal groups through which an initiator may log in to a node and that discovery lists.
    pub(crate) fn visible_groups(
        &self,
        node: &TargetNode,
        initiator: &str,
        peer: IpAddr,
    ) -> impl Iterator<Item = &Arc<PortalGroup>> {
        let groups = self.portal_groups.iter().filter(|group| !group.private);
        groups.filter(move |group| self.admits(node, group.tag, initiator, peer))
    }
}

impl TargetConfig for IscsiConfig {
    fn devices(&self) -> &DeviceMap {
        &self.devices
    }
}

/// Addresses of initiators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Netmask {
    /// Every address.
    Any,
    /// Those that are equal in the first bits.
    Prefix(IpAddr, u8),
}

/// A text is no netmask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no netmask; expected ANY, an address, or ADDRESS/BITS as 192.0.2.0/24 or [2001:db8::]/32")]
pub struct InvalidNetmask(String);

impl Netmask {
    fn contains(self, address: IpAddr) -> bool {
        let Netmask::Prefix(network, bits) = self else { return true };
        match (network, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let differs = network.to_bits() ^ address.to_bits();
                bits == 0 || differs >> (32 - u32::from(bits)) == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let differs = network.to_bits() ^ address.to_bits();
                bits == 0 || differs >> (128 - u32::from(bits)) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Netmask {
    type Err = InvalidNetmask;

    fn from_str(text: &str) -> Result<Netmask, InvalidNetmask> {
        if text == ANY || text == "ALL" {
            return Ok(Netmask::Any);
        }
        let invalid = || InvalidNetmask(text.to_string());
        let (address, bits) = match text.rsplit_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| invalid())?)),
            None => (text, None),
        };
        let address = sockets::parse_ip(address).map_err(|_| invalid())?;
        let bits_max = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(bits_max);
        if bits > bits_max { Err(invalid()) } else { Ok(Netmask::Prefix(address, bits)) }
    }
}

impl fmt::Display for Netmask {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Netmask::Any => formatter.write_str(ANY),
            Netmask::Prefix(IpAddr::V4(address), bits) => write!(formatter, "{address}/{bits}"),
            Netmask::Prefix(IpAddr::V6(address), bits) => write!(formatter, "[{address}]/{bits}"),
        }
    }
}

/// Whether a text is a name of a target or initiator (RFC 7143, section 4.2.7).
pub(crate) fn is_iscsi_name(name: &str) -> bool {
    let has_type = ["iqn.", "eui.", "naa."].iter().any(|prefix| name.starts_with(prefix));
    let is_allowed =
        |c: char| !c.is_control() && !c.is_whitespace() && !c.is_ascii_uppercase() && !"/=,".contains(c);
    has_type && name.len() <= wire_iscsi::text::NAME_BYTES_MAX && name.chars().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(initiators: &[&str], netmasks: &[&str]) -> InitiatorGroup {
        InitiatorGroup {
            tag: 1,
            initiators: initiators.iter().map(ToString::to_string).collect(),
            netmasks: netmasks.iter().map(|mask| mask.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn the_first_entry_that_names_an_initiator_decides() {
        let address: IpAddr = "10.0.0.7".parse().unwrap();
        let admission = |initiators: &[&str], name| group(initiators, &["ANY"]).admission(name, address);
        assert_eq!(admission(&["ANY"], "iqn.a"), Admission::Admitted);
        assert_eq!(admission(&["!iqn.a", "ANY"], "iqn.a"), Admission::Denied);
        assert_eq!(admission(&["!iqn.a", "ANY"], "iqn.b"), Admission::Admitted);
        assert_eq!(admission(&["iqn.a", "!ANY"], "iqn.b"), Admission::Denied);
        assert_eq!(admission(&["iqn.a"], "iqn.b"), Admission::NotNamed);
        assert_eq!(group(&["ANY"], &["10.0.1.0/24"]).admission("iqn.a", address), Admission::NotNamed);
    }

    #[test]
    fn netmasks_are_those_of_spdk() {
        for (mask, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.1", "11.0.0.1"),
            ("10.1.2.3", "10.1.2.3", "10.1.2.4"),
            ("[2001:db8::]/32", "2001:db8:1::1", "2001:db9::1"),
            ("10.0.0.0/8", "::ffff:10.0.0.1", "::1"),
        ] {
            let netmask: Netmask = mask.parse().unwrap();
            assert!(netmask.contains(inside.parse().unwrap()), "{mask} {inside}");
            assert!(!netmask.contains(outside.parse().unwrap()), "{mask} {outside}");
            assert_eq!(netmask.to_string().parse(), Ok(netmask));
        }
        assert!("ANY".parse::<Netmask>().unwrap().contains("1.2.3.4".parse().unwrap()));
        assert!("0.0.0.0/0".parse::<Netmask>().unwrap().contains("1.2.3.4".parse().unwrap()));
        for text in ["", "10.0.0.0/33", "all", "10.0.0/8", "[::1"] {
            assert!(text.parse::<Netmask>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_those_of_rfc_7143() {
        for name in ["iqn.2016-06.io.spdk:disk1", "eui.02004567a425678d", "naa.52004567ba64678d"] {
            assert!(is_iscsi_name(name), "{name}");
        }
        for name in
            ["", "disk1", "iqn.2016-06.io.Spdk", "iqn.a b", "iqn.a,b", &format!("iqn.{}", "a".repeat(220))]
        {
            assert!(!is_iscsi_name(name), "{name}");
        }
    }
}
