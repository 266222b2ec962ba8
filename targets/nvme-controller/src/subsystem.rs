//! Immutable snapshots of a subsystem's configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use block_io::ProtectionFlags;
use nvme_auth::{AuthKeys, TlsPsk};
use uuid::Uuid;
use wire_nvme::fabrics::Nqn;
use wire_nvme::identify::NamespaceDescriptor;
use wire_nvme::log::{AnaState, ChangeNamespace};
use wire_nvme::protection::MetadataFormat;

use crate::PersistentEventLog;
use crate::reservation::NamespaceReservations;

/// The type of a subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubsystemKind {
    /// An NVM subsystem: I/O controllers with namespaces.
    Nvm,
    /// The discovery subsystem: discovery controllers without namespaces.
    Discovery,
}

/// A snapshot of a subsystem's configuration. Shared as `Arc<Subsystem>`; the control plane creates a new one
/// for every change and publishes it to controllers and I/O queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subsystem {
    /// NQN. A discovery subsystem may have a unique NQN besides the well-known one.
    pub nqn: Nqn,
    /// NVM or discovery.
    pub kind: SubsystemKind,
    /// Serial number, at most 20 bytes of ASCII.
    pub serial: String,
    /// Model number, at most 40 bytes of ASCII.
    pub model: String,
    /// Allow every host to connect, whatever `hosts` contains.
    pub allow_any_host: bool,
    /// The hosts that are allowed to connect.
    pub hosts: BTreeSet<Nqn>,
    /// The keys of hosts that have to authenticate on every queue.
    pub host_keys: BTreeMap<Nqn, AuthKeys>,
    /// The hosts that have to connect through TLS, with the keys that they may use.
    pub tls_hosts: BTreeMap<Nqn, Arc<[TlsPsk]>>,
    /// Smallest controller identifier, 1 at least.
    pub cntlid_min: u16,
    /// Largest controller identifier, FFEFh at most.
    pub cntlid_max: u16,
    /// Largest valid namespace identifier (NN).
    pub namespaces_max: u32,
    /// The namespaces, by ascending identifier.
    pub namespaces: Vec<SubsystemNamespace>,
    /// The ports that it listens on; empty for all.
    pub listeners: Vec<SubsystemListener>,
    /// Report asymmetric namespace access (ANA).
    pub ana_reporting: bool,
    /// Most blocks of a range of Dataset Management (DMRSL); 0 for no limit.
    pub unmap_range_max_blocks: u32,
    /// Most bytes of a Write Zeroes as a power of two of 4 KiB pages (WZSL); 0 for no limit.
    pub write_zeroes_max_log2: u8,
    /// A host may reset all controllers of the subsystem (CAP.NSSRS).
    pub subsystem_reset: bool,
    /// Text for the administrator in extended entries of the discovery log, 1 to 256 bytes of ASCII.
    pub admin_label: Option<String>,
    /// Persistent Event log, shared by all snapshots of the subsystem.
    pub persistent_events: Arc<PersistentEventLog>,
}

/// A port on which a subsystem listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubsystemListener {
    /// The port's number, the same in the discovery log.
    pub portid: u16,
    /// ANA state by group; groups that are not listed are optimized.
    pub ana: Vec<(u32, AnaState)>,
}

/// What makes a namespace another one to its hosts: its identifiers and its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamespaceIdentity {
    nguid: [u8; 16],
    eui64: [u8; 8],
    uuid: Uuid,
    block_size: u32,
    metadata: MetadataFormat,
}

/// A namespace of a [`Subsystem`] snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemNamespace {
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// Name of the block device behind it.
    pub bdev: String,
    /// The transport's key for the block device; opaque to this crate.
    pub backend: u32,
    /// Size in blocks.
    pub blocks: u64,
    /// Data bytes of a block: a power of two, 512 at least.
    pub block_size: u32,
    /// Metadata of a block, interleaved with its data.
    pub metadata: MetadataFormat,
    /// What the block device checks of protection information that it generates and strips, and hosts do not
    /// see; empty for none. A namespace with it has no `metadata`.
    pub hidden_protection: ProtectionFlags,
    /// NGUID (globally unique identifier); zero for none.
    pub nguid: [u8; 16],
    /// EUI-64 (extended unique identifier); zero for none.
    pub eui64: [u8; 8],
    /// UUID; nil for none.
    pub uuid: Uuid,
    /// Completed writes may be lost on power loss until they are flushed.
    pub volatile_cache: bool,
    /// Writes are rejected.
    pub read_only: bool,
    /// Supports deallocation (unmap); deallocated blocks read as zeroes.
    pub can_unmap: bool,
    /// Supports Write Zeroes.
    pub can_write_zeroes: bool,
    /// Supports Write Uncorrectable.
    pub can_write_uncorrectable: bool,
    /// Preferred I/O boundary in blocks; 0 for none.
    pub optimal_boundary_blocks: u16,
    /// Required alignment of buffer addresses in bytes, a power of two. Host memory with this alignment is
    /// used without a copy.
    pub buffer_alignment: u32,
    /// ANA group, from 1 to [`Subsystem::namespaces_max`].
    pub anagrpid: u32,
    /// The hosts that see it; `None` for all that may connect.
    pub visible_hosts: Option<BTreeSet<Nqn>>,
    /// Registrations and reservation, shared by all snapshots of the namespace.
    pub reservations: Arc<NamespaceReservations>,
}

impl Subsystem {
    /// Whether a host may use secure channel concatenation: it has keys to authenticate with, and no
    /// configured key of TLS.
    pub fn concatenates(&self, host: &Nqn) -> bool {
        self.host_keys.contains_key(host) && !self.tls_hosts.contains_key(host)
    }

    /// An NVM subsystem without namespaces that allows no host.
    pub fn new(nqn: Nqn) -> Subsystem {
        Subsystem {
            nqn,
            kind: SubsystemKind::Nvm,
            serial: "0".to_owned(),
            model: "Ringbolt bdev".to_owned(),
            allow_any_host: false,
            hosts: BTreeSet::new(),
            host_keys: BTreeMap::new(),
            tls_hosts: BTreeMap::new(),
            cntlid_min: 1,
            cntlid_max: 0xffef,
            namespaces_max: 32,
            namespaces: Vec::new(),
            listeners: Vec::new(),
            ana_reporting: false,
            unmap_range_max_blocks: 0,
            write_zeroes_max_log2: 0,
            subsystem_reset: false,
            admin_label: None,
            persistent_events: Arc::default(),
        }
    }

    /// A discovery subsystem that allows every host, under the well-known NQN or another one.
    pub fn discovery(nqn: Nqn) -> Subsystem {
        Subsystem {
            kind: SubsystemKind::Discovery,
            allow_any_host: true,
            namespaces_max: 0,
            model: "Ringbolt discovery".to_owned(),
            ..Subsystem::new(nqn)
        }
    }

    /// Whether the host is allowed to connect.
    pub fn allows(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }

    /// The subsystem as a host sees it: without the namespaces that are visible to other hosts only. What a
    /// namespace's list of hosts says is not a part of it, so that a change of the list is none for the hosts
    /// that it does not concern.
    pub fn view_of(self: &Arc<Self>, host: &Nqn) -> Arc<Subsystem> {
        if self.namespaces.iter().all(|namespace| namespace.visible_hosts.is_none()) {
            return self.clone();
        }
        let mut view = Subsystem::clone(self);
        view.namespaces.retain(|namespace| namespace.is_visible_to(host));
        view.namespaces.iter_mut().for_each(|namespace| namespace.visible_hosts = None);
        Arc::new(view)
    }

    /// Whether the subsystem listens on the port.
    pub fn listens_on(&self, portid: u16) -> bool {
        self.listeners.is_empty() || self.listeners.iter().any(|listener| listener.portid == portid)
    }

    /// The namespace with this identifier, if it exists.
    pub fn namespace(&self, nsid: u32) -> Option<&SubsystemNamespace> {
        let index = self.namespaces.binary_search_by_key(&nsid, |namespace| namespace.nsid).ok()?;
        Some(&self.namespaces[index])
    }

    /// Whether the identifier is a valid NSID, active or not (Base 2.0, section 3.2.1).
    pub fn is_valid_nsid(&self, nsid: u32) -> bool {
        (1..=self.namespaces_max).contains(&nsid)
    }

    /// The ANA state of a group on a port.
    pub fn ana_state(&self, portid: u16, group: u32) -> AnaState {
        let listener = self.listeners.iter().find(|listener| listener.portid == portid);
        let state = listener.and_then(|listener| listener.ana.iter().find(|(id, _)| *id == group));
        match state {
            Some(&(_, state)) if self.ana_reporting => state,
            _ => AnaState::Optimized,
        }
    }

    /// The ANA groups of the namespaces, ascending.
    pub fn ana_groups(&self) -> BTreeSet<u32> {
        self.namespaces.iter().map(|namespace| namespace.anagrpid).collect()
    }

    /// Whether controllers report a volatile write cache. Hosts read that once, when they connect, and Linux
    /// sends no flush to a controller without one: not either to a namespace with a cache that is added
    /// later. A namespace without a cache says so in its own data.
    pub fn has_volatile_cache(&self) -> bool {
        self.kind == SubsystemKind::Nvm
    }

    /// Asserts the invariants that this crate relies on. Called for every new snapshot.
    ///
    /// # Panics
    /// If controller identifiers, namespace identifiers, ANA groups or block sizes are out of range or out of
    /// order.
    pub(crate) fn check(&self) {
        assert!(
            self.cntlid_min >= 1 && self.cntlid_min <= self.cntlid_max && self.cntlid_max <= 0xffef,
            "controller identifiers {} to {}",
            self.cntlid_min,
            self.cntlid_max
        );
        let mut last = 0;
        for namespace in &self.namespaces {
            let SubsystemNamespace { nsid, block_size, anagrpid, .. } = *namespace;
            assert!(
                nsid > last && nsid <= self.namespaces_max,
                "namespace {nsid} of {}",
                self.namespaces_max
            );
            assert!(block_size.is_power_of_two() && block_size >= 512, "blocks of {block_size} bytes");
            let format = namespace.metadata;
            assert!(format.extended == (format.bytes > 0), "separate metadata in namespace {nsid}");
            let hides = !namespace.hidden_protection.is_empty();
            assert!(!hides || format.bytes == 0, "hidden metadata in namespace {nsid}");
            assert!(
                (1..=self.namespaces_max).contains(&anagrpid),
                "namespace {nsid} is in ANA group {anagrpid} of {}",
                self.namespaces_max
            );
            last = nsid;
        }
    }
}

impl PersistentEventLog {
    /// Records that a namespace was created. One that only some hosts see is not recorded, because every host
    /// of the subsystem may read the log.
    pub fn namespace_created(&self, namespace: &SubsystemNamespace, ana_reporting: bool) {
        let SubsystemNamespace { nsid, blocks, anagrpid, .. } = *namespace;
        let anagrpid = if ana_reporting { anagrpid } else { 0 };
        if namespace.visible_hosts.is_none() {
            self.record_namespace(&ChangeNamespace { deleted: false, blocks, shared: true, anagrpid, nsid });
        }
    }

    /// Records that a namespace was deleted; as [`namespace_created`](Self::namespace_created).
    pub fn namespace_deleted(&self, namespace: &SubsystemNamespace) {
        if namespace.visible_hosts.is_none() {
            let nsid = namespace.nsid;
            self.record_namespace(&ChangeNamespace { deleted: true, nsid, ..ChangeNamespace::default() });
        }
    }
}

impl SubsystemNamespace {
    /// A namespace with 512-byte blocks and no optional capabilities.
    pub fn new(nsid: u32, blocks: u64) -> SubsystemNamespace {
        SubsystemNamespace {
            nsid,
            bdev: String::new(),
            backend: 0,
            blocks,
            block_size: 512,
            metadata: MetadataFormat::NONE,
            hidden_protection: ProtectionFlags::empty(),
            nguid: [0; 16],
            eui64: [0; 8],
            uuid: Uuid::nil(),
            volatile_cache: false,
            read_only: false,
            can_unmap: false,
            can_write_zeroes: false,
            can_write_uncorrectable: false,
            buffer_alignment: 4096,
            optimal_boundary_blocks: 0,
            anagrpid: 1,
            visible_hosts: None,
            reservations: Arc::default(),
        }
    }

    pub(crate) fn identity(&self) -> NamespaceIdentity {
        let SubsystemNamespace { nguid, eui64, uuid, block_size, metadata, .. } = *self;
        NamespaceIdentity { nguid, eui64, uuid, block_size, metadata }
    }

    /// Whether the host sees it.
    pub fn is_visible_to(&self, host: &Nqn) -> bool {
        self.visible_hosts.as_ref().is_none_or(|hosts| hosts.contains(host))
    }

    /// The namespace identification descriptors (Base 2.0, section 5.17.2.3).
    pub(crate) fn descriptors(&self) -> Vec<NamespaceDescriptor> {
        let mut list = Vec::new();
        if self.eui64 != [0; 8] {
            list.push(NamespaceDescriptor::Eui64(self.eui64));
        }
        if self.nguid != [0; 16] {
            list.push(NamespaceDescriptor::Nguid(self.nguid));
        }
        if !self.uuid.is_nil() {
            list.push(NamespaceDescriptor::Uuid(*self.uuid.as_bytes()));
        }
        list.push(NamespaceDescriptor::Csi(wire_nvme::identify::Csi::Nvm));
        list
    }
}
