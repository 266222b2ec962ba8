//! Referrals: entries of the discovery log about discovery services and subsystems of other targets.

use std::net::IpAddr;
use std::sync::Arc;

use nvme_controller::{AllowedHosts, DiscoveryRecord};
use sockets::ServerNetwork;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::{AddressFamily, SubsystemType, TransportAddress, TransportType};

use super::{NvmfTarget, parse_nqn};
use crate::{ListenAddress, NvmfTargetError};

/// Most referrals: hosts follow each of them whenever the log changes.
const REFERRALS_MAX: usize = 256;

/// An entry of the discovery log about another target. All hosts see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referral {
    /// Where it listens: an IP address and a port, over `TCP` or `RDMA`.
    pub address: ListenAddress,
    /// The well-known NQN of discovery services, or that of an NVM subsystem.
    pub subnqn: Nqn,
    /// Hosts must connect through a secure channel.
    pub secure_channel: bool,
}

impl Referral {
    /// Checks an address. Without `subnqn` it is that of a discovery service.
    pub fn new(
        address: &ListenAddress,
        subnqn: Option<&str>,
        secure_channel: bool,
    ) -> Result<Referral, NvmfTargetError> {
        let trtype = address.trtype.to_ascii_uppercase();
        if !["TCP", "RDMA"].contains(&trtype.as_str()) {
            let reason = format!(
                "address.trtype: '{}' is not a transport of referrals; TCP and RDMA are",
                address.trtype
            );
            return Err(NvmfTargetError::Parameter(reason));
        }
        // Both transports have IP addresses and ports.
        let socket = ListenAddress { trtype: "TCP".to_string(), ..address.clone() }.socket()?;
        if socket.port() == 0 || socket.ip().is_unspecified() {
            let reason = format!("address: {socket} is not an address to connect to");
            return Err(NvmfTargetError::Parameter(reason));
        }
        let address = ListenAddress { trtype, ..ListenAddress::from_socket(socket) };
        let subnqn = subnqn.map_or_else(|| Ok(Nqn::discovery()), parse_nqn)?;
        Ok(Referral { address, subnqn, secure_channel })
    }

    /// Whether both are about the same service.
    fn is_same(&self, other: &Referral) -> bool {
        self.address == other.address && self.subnqn == other.subnqn
    }

    pub(super) fn record(&self) -> DiscoveryRecord {
        let is_ipv4 = self.address.traddr.parse::<IpAddr>().is_ok_and(|address| address.is_ipv4());
        let subtype = match self.subnqn.is_discovery() {
            true => SubsystemType::Referral,
            false => SubsystemType::Nvm,
        };
        DiscoveryRecord {
            subnqn: self.subnqn.clone(),
            subtype,
            address: TransportAddress {
                trtype: if self.address.trtype == "RDMA" { TransportType::Rdma } else { TransportType::Tcp },
                adrfam: if is_ipv4 { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 },
                traddr: self.address.traddr.clone(),
                trsvcid: self.address.trsvcid.clone(),
            },
            portid: 0,
            secure_channel: self.secure_channel,
            hosts: AllowedHosts::Any,
            admin_label: None,
        }
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// Adds a referral to the discovery log; hosts that asked for it get an event. Without effect if it is
    /// there already, as with SPDK.
    pub fn add_referral(&self, referral: Referral) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        if state.referrals.iter().any(|one| one.is_same(&referral)) {
            return Ok(());
        }
        if state.referrals.len() == REFERRALS_MAX {
            return Err(NvmfTargetError::Parameter(format!(
                "there are {REFERRALS_MAX} referrals, the most that there can be"
            )));
        }
        let before = state.checkpoint(&Nqn::discovery());
        Arc::make_mut(&mut state.referrals).push(referral);
        self.commit(&mut state, before)
    }

    /// Removes a referral from the discovery log.
    ///
    /// # Errors
    /// There is no such referral.
    pub fn remove_referral(&self, referral: &Referral) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let Some(index) = state.referrals.iter().position(|one| one.is_same(referral)) else {
            let ListenAddress { trtype, traddr, trsvcid, .. } = &referral.address;
            let reason = format!("there is no referral to {trtype} {traddr} {trsvcid} {}", referral.subnqn);
            return Err(NvmfTargetError::Parameter(reason));
        };
        let before = state.checkpoint(&Nqn::discovery());
        Arc::make_mut(&mut state.referrals).remove(index);
        self.commit(&mut state, before)
    }

    /// The referrals, in the order in which they were added.
    pub fn referrals(&self) -> Vec<Referral> {
        self.lock_any().referrals.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use bdev::Registry;

    use super::*;

    #[test]
    fn a_referral_is_a_record_of_a_new_discovery_log() {
        let target = NvmfTarget::new(Registry::new(), &[]);
        let log = || target.lock_any().published.discovery.clone();
        let before = log().generation();
        let address = ListenAddress { trtype: "rdma".to_string(), ..ListenAddress::tcp("192.0.2.7", "4420") };
        let subsystem = Referral::new(&address, Some("nqn.2016-06.io.spdk:cnode1"), true).unwrap();
        let service = Referral::new(&ListenAddress::tcp("2001:db8::7", "8009"), None, false).unwrap();
        for referral in [&subsystem, &service] {
            target.add_referral(referral.clone()).unwrap();
        }
        assert_eq!(log().generation(), before + 2);
        let found: Vec<_> = log()
            .records()
            .iter()
            .map(|one| {
                let (trtype, adrfam) = (one.address.trtype, one.address.adrfam);
                (one.subtype, trtype, adrfam, one.address.traddr.clone(), one.secure_channel)
            })
            .collect();
        let expected = [
            (SubsystemType::Nvm, TransportType::Rdma, AddressFamily::Ipv4, "192.0.2.7".to_string(), true),
            (
                SubsystemType::Referral,
                TransportType::Tcp,
                AddressFamily::Ipv6,
                "2001:db8::7".to_string(),
                false,
            ),
        ];
        assert_eq!(found, expected);
        target.remove_referral(&subsystem).unwrap();
        assert_eq!((log().generation(), log().records().len()), (before + 3, 1));
    }
}
