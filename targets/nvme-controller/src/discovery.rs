//! The Discovery log page.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::LazyLock;

use wire_nvme::fabrics::Nqn;
use wire_nvme::log::{
    AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType, TransportAddress,
};

/// The hosts that a discovery record is visible to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedHosts {
    /// All hosts.
    Any,
    /// The listed hosts.
    Only(BTreeSet<Nqn>),
}

impl AllowedHosts {
    /// Whether the record is visible to this host.
    pub fn allows(&self, host: &Nqn) -> bool {
        match self {
            AllowedHosts::Any => true,
            AllowedHosts::Only(hosts) => hosts.contains(host),
        }
    }
}

/// An entry of the discovery log: one path to a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryRecord {
    /// NQN of the subsystem.
    pub subnqn: Nqn,
    /// An NVM subsystem, this discovery service itself, or a referral to another.
    pub subtype: SubsystemType,
    /// The transport address. A wildcard (0.0.0.0, ::) is replaced by the address that the host connected to.
    pub address: TransportAddress,
    /// The port's number (PORTID); 0 for one of another target.
    pub portid: u16,
    /// Hosts must connect through a secure channel. It says nothing if not: nvme-cli 2.3 interprets "not required" as TLS.
    pub secure_channel: bool,
    /// The hosts that see the record.
    pub hosts: AllowedHosts,
}

/// TSAS of a TCP port with TLS 1.3 (TCP 1.0, section 3.5.1: SECTYPE).
const TCP_SECURITY_TLS_1_3: u8 = 2;

/// A snapshot of the discovery log. Shared as `Arc<DiscoveryLog>`; the target creates a new one, with the
/// next generation, for every change.
///
/// The records are made when a discovery controller first needs them, so that a change of one subsystem among
/// thousands costs the same as a change of the only one.
pub struct DiscoveryLog {
    generation: u64,
    records: LazyLock<Vec<DiscoveryRecord>, RecordSource>,
}

type RecordSource = Box<dyn FnOnce() -> Vec<DiscoveryRecord> + Send>;

impl fmt::Debug for DiscoveryLog {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DiscoveryLog").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Default for DiscoveryLog {
    fn default() -> Self {
        DiscoveryLog::new(0, Vec::new)
    }
}

impl DiscoveryLog {
    /// A log with this generation counter (GENCTR). `records` returns its records in the order of the log page; it is
    /// called at most once, on the core of the first controller that reads them.
    pub fn new(
        generation: u64,
        records: impl FnOnce() -> Vec<DiscoveryRecord> + Send + 'static,
    ) -> DiscoveryLog {
        DiscoveryLog { generation, records: LazyLock::new(Box::new(records)) }
    }

    /// Generation counter (GENCTR).
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The records, in the order of the log page.
    pub fn records(&self) -> &[DiscoveryRecord] {
        &self.records
    }

    /// The log page for one host (Base 2.0, section 5.16.1.23).
    ///
    /// `local` is the address that the host connected to; `admin_queue_entries_max` is ASQSZ of every entry.
    pub fn page(&self, host: &Nqn, local: &TransportAddress, admin_queue_entries_max: u16) -> Vec<u8> {
        let visible: Vec<&DiscoveryRecord> =
            self.records.iter().filter(|record| record.hosts.allows(host)).collect();
        let mut page = vec![0; DiscoveryHeader::SIZE + visible.len() * DiscoveryEntry::SIZE];
        let header = DiscoveryHeader {
            genctr: self.generation,
            numrec: visible.len() as u64,
            ..DiscoveryHeader::default()
        };
        let (head, entries) = page.split_first_chunk_mut().expect("a page has a header");
        header.encode(head);
        for (record, into) in visible.iter().zip(entries.as_chunks_mut().0) {
            record.entry(local, admin_queue_entries_max).encode(into);
        }
        page
    }

    /// Whether the host sees different records in the other log.
    pub(crate) fn differs_for(&self, host: &Nqn, other: &DiscoveryLog) -> bool {
        let visible = |log: &DiscoveryLog| -> Vec<DiscoveryRecord> {
            log.records.iter().filter(|record| record.hosts.allows(host)).cloned().collect()
        };
        // Without a change there is the same log, and it is not made for this.
        !std::ptr::eq(self, other) && visible(self) != visible(other)
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
        // EPCSD: a host that sets a keep alive timeout may keep its connection to a discovery service.
        let eflags = match self.subtype {
            SubsystemType::Nvm => 0,
            SubsystemType::Referral | SubsystemType::CurrentDiscovery => DiscoveryEntry::EXPLICIT_PERSISTENT,
        };
        DiscoveryEntry {
            address,
            subtype: self.subtype,
            // As the Linux target.
            secure_channel: match self.secure_channel {
                true => SecureChannel::Required,
                false => SecureChannel::NotSpecified,
            },
            flow_control_optional: true,
            portid: self.portid,
            cntlid: wire_nvme::fabrics::CNTLID_DYNAMIC,
            admin_queue_entries_max,
            eflags,
            subnqn: self.subnqn.clone(),
            tcp_security: if self.secure_channel { TCP_SECURITY_TLS_1_3 } else { 0 },
        }
    }
}
