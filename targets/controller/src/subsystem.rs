//! What a controller belongs to: an immutable picture that is swapped when anything changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use uuid::Uuid;
use wire_nvme::fabrics::Nqn;
use wire_nvme::identify::NamespaceDescriptor;
use wire_nvme::log::AnaState;

use crate::reservation::Reservations;

/// Whether hosts find namespaces or other subsystems behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An NVM subsystem, with I/O controllers.
    Nvm,
    /// The discovery subsystem.
    Discovery,
}

/// A subsystem at one moment. Shared as `Arc<Subsystem>`; the control plane makes a new one for every
/// change and hands it to controllers and I/O queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subsystem {
    /// Its name. A discovery subsystem may also have a name of its own besides the well-known one.
    pub nqn: Nqn,
    /// What it is.
    pub kind: Kind,
    /// Serial number, at most 20 bytes of ASCII.
    pub serial: String,
    /// Model number, at most 40 bytes of ASCII.
    pub model: String,
    /// Every host may connect.
    pub allow_any_host: bool,
    /// The hosts that may connect.
    pub hosts: BTreeSet<Nqn>,
    /// Smallest controller identifier that is given out.
    pub cntlid_min: u16,
    /// Largest controller identifier that is given out, FFEFh at most.
    pub cntlid_max: u16,
    /// Largest namespace identifier that can be used.
    pub namespaces_max: u32,
    /// Its namespaces, by rising identifier.
    pub namespaces: Vec<Namespace>,
    /// Where it is reached. With none, it is reached everywhere.
    pub listeners: Vec<Listener>,
    /// Whether asymmetric namespace access is reported.
    pub ana_reporting: bool,
}

/// A port that leads to a subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listener {
    /// The port's number, the same in the discovery log.
    pub portid: u16,
    /// How ANA groups are reached through it; those not listed are optimized.
    pub ana: Vec<(u32, AnaState)>,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// Name of the block device behind it.
    pub bdev: String,
    /// The transport's key for the block device; opaque here.
    pub backend: u32,
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes of a block: a power of two, 512 at least.
    pub block_size: u32,
    /// Globally unique identifier; zero for none.
    pub nguid: [u8; 16],
    /// Extended unique identifier; zero for none.
    pub eui64: [u8; 8],
    /// UUID; nil for none.
    pub uuid: Uuid,
    /// What was acknowledged may be lost with the power until it is flushed.
    pub volatile_cache: bool,
    /// Nothing may be written.
    pub read_only: bool,
    /// Blocks can be deallocated, and read as zeroes then.
    pub can_unmap: bool,
    /// Blocks can be zeroed without sending zeroes.
    pub can_write_zeroes: bool,
    /// Blocks can be made unreadable.
    pub can_write_uncorrectable: bool,
    /// Preferred I/O boundary in blocks; 0 for none.
    pub optimal_boundary_blocks: u16,
    /// What the address of a buffer is to be a multiple of, a power of two: a host's own memory can then be used
    /// as it lies.
    pub buffer_alignment: u32,
    /// ANA group, from 1 to [`Subsystem::namespaces_max`].
    pub anagrpid: u32,
    /// Who has reserved it: the same in every picture of the namespace.
    pub reservations: Arc<Reservations>,
}

impl Subsystem {
    /// An NVM subsystem that no host may use and that has nothing to offer.
    pub fn new(nqn: Nqn) -> Subsystem {
        Subsystem {
            nqn,
            kind: Kind::Nvm,
            serial: "0".to_owned(),
            model: "Ringbolt bdev".to_owned(),
            allow_any_host: false,
            hosts: BTreeSet::new(),
            cntlid_min: 1,
            cntlid_max: 0xffef,
            namespaces_max: 32,
            namespaces: Vec::new(),
            listeners: Vec::new(),
            ana_reporting: false,
        }
    }

    /// The discovery subsystem, open to every host, under the well-known name or another.
    pub fn discovery(nqn: Nqn) -> Subsystem {
        Subsystem {
            kind: Kind::Discovery,
            allow_any_host: true,
            namespaces_max: 0,
            model: "Ringbolt discovery".to_owned(),
            ..Subsystem::new(nqn)
        }
    }

    /// Whether a host may connect.
    pub fn allows(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }

    /// Whether it is reached through a port.
    pub fn listens_on(&self, portid: u16) -> bool {
        self.listeners.is_empty() || self.listeners.iter().any(|listener| listener.portid == portid)
    }

    /// The namespace with this identifier.
    pub fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        let index = self.namespaces.binary_search_by_key(&nsid, |namespace| namespace.nsid).ok()?;
        Some(&self.namespaces[index])
    }

    /// Whether the identifier could be a namespace's (Base 2.0, section 3.2.1: valid NSIDs).
    pub fn is_valid_nsid(&self, nsid: u32) -> bool {
        (1..=self.namespaces_max).contains(&nsid)
    }

    /// How an ANA group is reached through a port.
    pub fn ana_state(&self, portid: u16, group: u32) -> AnaState {
        let listener = self.listeners.iter().find(|listener| listener.portid == portid);
        let state = listener.and_then(|listener| listener.ana.iter().find(|(id, _)| *id == group));
        match state {
            Some(&(_, state)) if self.ana_reporting => state,
            _ => AnaState::Optimized,
        }
    }

    /// The ANA groups that there are, rising.
    pub fn ana_groups(&self) -> BTreeSet<u32> {
        self.namespaces.iter().map(|namespace| namespace.anagrpid).collect()
    }

    /// Whether any namespace may lose what it acknowledged.
    pub fn has_volatile_cache(&self) -> bool {
        self.namespaces.iter().any(|namespace| namespace.volatile_cache)
    }

    /// Asserts what the rest of the crate relies on. Called where a picture comes in.
    ///
    /// # Panics
    /// When namespaces are out of order, out of range or have impossible blocks.
    pub(crate) fn check(&self) {
        assert!(
            self.cntlid_min >= 1 && self.cntlid_min <= self.cntlid_max && self.cntlid_max <= 0xffef,
            "controller identifiers {} to {}",
            self.cntlid_min,
            self.cntlid_max
        );
        let mut last = 0;
        for namespace in &self.namespaces {
            let Namespace { nsid, block_size, anagrpid, .. } = *namespace;
            assert!(
                nsid > last && nsid <= self.namespaces_max,
                "namespace {nsid} of {}",
                self.namespaces_max
            );
            assert!(block_size.is_power_of_two() && block_size >= 512, "blocks of {block_size} bytes");
            assert!(
                (1..=self.namespaces_max).contains(&anagrpid),
                "namespace {nsid} is in ANA group {anagrpid} of {}",
                self.namespaces_max
            );
            last = nsid;
        }
    }
}

impl Namespace {
    /// A namespace with 512-byte blocks that can do nothing special.
    pub fn new(nsid: u32, blocks: u64) -> Namespace {
        Namespace {
            nsid,
            bdev: String::new(),
            backend: 0,
            blocks,
            block_size: 512,
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
            reservations: Arc::default(),
        }
    }

    /// Its identification descriptors (Base 2.0, section 5.17.2.3).
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
