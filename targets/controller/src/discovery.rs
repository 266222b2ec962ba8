//! What the discovery controller tells.

use std::collections::BTreeSet;

use wire_nvme::fabrics::Nqn;
use wire_nvme::log::{
    AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType, TransportAddress,
};

/// Which hosts are told of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// All.
    Any,
    /// These.
    Only(BTreeSet<Nqn>),
}

impl Hosts {
    /// Whether this host is.
    pub fn allows(&self, host: &Nqn) -> bool {
        match self {
            Hosts::Any => true,
            Hosts::Only(hosts) => hosts.contains(host),
        }
    }
}

/// One way to one subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryRecord {
    /// The subsystem.
    pub subnqn: Nqn,
    /// What it is: an NVM subsystem, this discovery service itself, or a referral to another.
    pub subtype: SubsystemType,
    /// Where. An address of all zeroes stands for the one that the asking host came to.
    pub address: TransportAddress,
    /// The port's number.
    pub portid: u16,
    /// Who may know.
    pub hosts: Hosts,
}

/// Everything that there is to discover, at one moment. Shared as `Arc<DiscoveryLog>`; the target makes
/// a new one, with another generation, for every change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryLog {
    /// Generation counter (GENCTR).
    pub generation: u64,
    /// The records, in the order in which hosts are told.
    pub records: Vec<DiscoveryRecord>,
}

impl DiscoveryLog {
    /// The log page for one host (Base 2.0, section 5.16.1.23).
    ///
    /// `local` is where the host came to; `admin_queue_entries_max` goes into every entry.
    pub fn page(&self, host: &Nqn, local: &TransportAddress, admin_queue_entries_max: u16) -> Vec<u8> {
        let told: Vec<&DiscoveryRecord> =
            self.records.iter().filter(|record| record.hosts.allows(host)).collect();
        let mut page = vec![0; DiscoveryHeader::SIZE + told.len() * DiscoveryEntry::SIZE];
        let header = DiscoveryHeader {
            genctr: self.generation,
            numrec: told.len() as u64,
            ..DiscoveryHeader::default()
        };
        let (head, entries) = page.split_first_chunk_mut().expect("a page has a header");
        header.encode(head);
        for (record, into) in told.iter().zip(entries.as_chunks_mut().0) {
            record.entry(local, admin_queue_entries_max).encode(into);
        }
        page
    }

    /// Whether the host would be told something else by the other log.
    pub(crate) fn differs_for(&self, host: &Nqn, other: &DiscoveryLog) -> bool {
        let told = |log: &DiscoveryLog| -> Vec<DiscoveryRecord> {
            log.records.iter().filter(|record| record.hosts.allows(host)).cloned().collect()
        };
        told(self) != told(other)
    }
}

impl DiscoveryRecord {
    fn entry(&self, local: &TransportAddress, admin_queue_entries_max: u16) -> DiscoveryEntry {
        let mut address = self.address.clone();
        let wildcard = match address.adrfam {
            AddressFamily::Ipv4 => address.traddr == "0.0.0.0",
            AddressFamily::Ipv6 => address.traddr == "::",
            _ => false,
        };
        if wildcard && local.adrfam == address.adrfam && local.trtype == address.trtype {
            address.traddr.clone_from(&local.traddr);
        }
        // A discovery service is kept connected by a keep alive timeout (EPCSD).
        let eflags = match self.subtype {
            SubsystemType::Nvm => 0,
            SubsystemType::Referral | SubsystemType::CurrentDiscovery => DiscoveryEntry::EXPLICIT_PERSISTENT,
        };
        DiscoveryEntry {
            address,
            subtype: self.subtype,
            // What Linux's own target says; nvme-cli 2.3 takes "not required" for TLS.
            secure_channel: SecureChannel::NotSpecified,
            flow_control_optional: true,
            portid: self.portid,
            cntlid: wire_nvme::fabrics::CNTLID_DYNAMIC,
            admin_queue_entries_max,
            eflags,
            subnqn: self.subnqn.clone(),
            tcp_security: 0,
        }
    }
}
