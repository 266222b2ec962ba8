//! The Discovery log page.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::LazyLock;

use wire_nvme::fabrics::Nqn;
use wire_nvme::log::{
    AddressFamily, DiscoveryEntry, DiscoveryHeader, ExtendedDiscoveryEntry, SecureChannel, SubsystemType,
    TransportAddress, discovery_option,
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
    /// Hosts must connect through a secure channel. It says nothing if not: nvme-cli 2.3 interprets "not
    /// required" as TLS.
    pub secure_channel: bool,
    /// The hosts that see the record.
    pub hosts: AllowedHosts,
    /// Admin Label, which only extended entries have; 1 to 256 bytes of ASCII.
    pub admin_label: Option<String>,
}

/// Which records a host sees, by the address that it has connected to: those whose listener has the same
/// transport, address or service, as far as each is set. Records of other targets are always seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryFilter {
    /// The transport type has to be the same.
    pub transport: bool,
    /// The address has to be the same. A wildcard is every address of its family.
    pub address: bool,
    /// The service has to be the same: the port, over TCP.
    pub svcid: bool,
}

impl DiscoveryFilter {
    fn admits(&self, record: &DiscoveryRecord, local: &TransportAddress) -> bool {
        let TransportAddress { trtype, adrfam, traddr, trsvcid } = &record.address;
        let same_address = || {
            *adrfam == local.adrfam && (record.has_wildcard() || traddr.eq_ignore_ascii_case(&local.traddr))
        };
        // A port of another target has the number 0.
        record.portid == 0
            || ((!self.transport || *trtype == local.trtype)
                && (!self.address || same_address())
                && (!self.svcid || *trsvcid == local.trsvcid))
    }
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
    filter: DiscoveryFilter,
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
    /// A log with this generation counter (GENCTR). `records` returns its records in the order of the log
    /// page; it is called at most once, on the core of the first controller that reads them.
    pub fn new(
        generation: u64,
        records: impl FnOnce() -> Vec<DiscoveryRecord> + Send + 'static,
    ) -> DiscoveryLog {
        let filter = DiscoveryFilter::default();
        DiscoveryLog { generation, filter, records: LazyLock::new(Box::new(records)) }
    }

    /// The same log, of which each host sees the records that the filter admits.
    pub fn with_filter(self, filter: DiscoveryFilter) -> DiscoveryLog {
        DiscoveryLog { filter, ..self }
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
    /// `local` is the address that the host connected to; `admin_queue_entries_max` is ASQSZ of every entry;
    /// `extended` entries have attributes.
    pub fn page(
        &self,
        host: &Nqn,
        local: &TransportAddress,
        admin_queue_entries_max: u16,
        extended: bool,
    ) -> Vec<u8> {
        let visible: Vec<&DiscoveryRecord> = self.visible(host, local).collect();
        let mut page = vec![0; DiscoveryHeader::SIZE];
        for record in &visible {
            let (entry, start) = (record.entry(local, admin_queue_entries_max), page.len());
            if extended {
                let entry = ExtendedDiscoveryEntry { entry, admin_label: record.admin_label.clone() };
                page.resize(start + entry.encoded_length(), 0);
                entry.encode(&mut page[start..]);
            } else {
                let mut bytes = [0; DiscoveryEntry::SIZE];
                entry.encode(&mut bytes);
                page.extend(bytes);
            }
        }
        let header = DiscoveryHeader {
            genctr: self.generation,
            numrec: visible.len() as u64,
            dlpf: if extended { discovery_option::EXTENDED } else { 0 },
            tdlpl: if extended { page.len() as u32 } else { 0 },
            ..DiscoveryHeader::default()
        };
        header.encode(page.first_chunk_mut().expect("a page has a header"));
        page
    }

    /// The records that a host sees which has connected to the address `local`.
    fn visible<'a>(
        &'a self,
        host: &'a Nqn,
        local: &'a TransportAddress,
    ) -> impl Iterator<Item = &'a DiscoveryRecord> {
        self.records.iter().filter(|record| record.hosts.allows(host) && self.filter.admits(record, local))
    }

    /// Whether a host that has connected to the address `local` sees different records in the other log.
    pub(crate) fn differs_for(&self, host: &Nqn, local: &TransportAddress, other: &DiscoveryLog) -> bool {
        // Without a change there is the same log, and it is not made for this.
        !std::ptr::eq(self, other) && !self.visible(host, local).eq(other.visible(host, local))
    }
}

impl DiscoveryRecord {
    /// Whether the listener is reached through every address of its family.
    fn has_wildcard(&self) -> bool {
        match self.address.adrfam {
            AddressFamily::Ipv4 => self.address.traddr == "0.0.0.0",
            AddressFamily::Ipv6 => self.address.traddr == "::",
            _ => false,
        }
    }

    fn entry(&self, local: &TransportAddress, admin_queue_entries_max: u16) -> DiscoveryEntry {
        let mut address = self.address.clone();
        if self.has_wildcard() && local.adrfam == address.adrfam && local.trtype == address.trtype {
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
