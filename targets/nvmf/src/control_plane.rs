//! The control plane: it holds the configuration and publishes snapshots of it to the poll groups.

mod ana;
mod authentication;
mod commit;
mod hidden_metadata;
mod info;
mod listeners;
mod options;
mod referrals;
mod transports;
mod visibility;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Arc, MutexGuard};

use bdev::{
    Access, BlockDevice, Closing, Descriptor, DeviceEvent, PreparedReservations, Registry, ReservationLease,
    Uuid,
};
use block_io::{Op, ProtectionFlags};
use control::{BalancedTarget, Key};
use nvme_controller::reservation::NamespaceReservations;
use nvme_controller::{ControllerDirectory, PersistentEventLog, Subsystem, SubsystemNamespace};
use reactor::ReactorHandle;
use sockets::{ServerNetwork, Sockets};
use target_shell::{ConnectionTotals, ControlledTarget, TargetControl};
use wire_nvme::fabrics::Nqn;
use wire_nvme::protection::MetadataFormat;

use self::hidden_metadata::hidden_protection;
use crate::address::ListenAddress;
use crate::failure::NvmfTargetError;
use crate::snapshot::ConfigSnapshot;
use crate::transport::{MaskedCommands, Transport, TransportKind};

pub use authentication::{HostKeyNames, HostKeys, HostPsk};
pub use referrals::Referral;

pub use info::{
    PollCounts, PollGroupTotals, QpairInfo, SubsystemInfo, TargetControllerInfo, TargetNamespaceInfo,
    TargetStats, TransportStats,
};

/// Name under which the target claims its block devices.
const CLAIM: &str = "NVMe-oF Target";
/// The control plane of the NVMe-oF target, shared by all transports.
///
/// It owns the configuration (subsystems, namespaces, listeners, hosts), the claims on block devices and the
/// mailboxes of the poll groups. A change is validated and applied under one lock, then published as a new
/// `ConfigSnapshot`; the call returns when every poll group has applied it. If one does not in time, the
/// change is undone on all cores and the call fails; hosts that a removal disconnected in the meantime
/// reconnect. What cannot be undone is answered with [`NvmfTargetError::Pending`]. I/O never takes the lock.
///
/// Calls block, so a reactor's thread must not make them. Order: [`create_transport`](Self::create_transport)
/// for each, subsystems, namespaces and hosts, then listeners;
/// [`shutdown`](Self::shutdown) before the reactors stop. Cheap to clone. `N` is the network of the
/// transports that use one.
pub struct NvmfTarget<N: ServerNetwork = Sockets>(TargetControl<TargetState>, PhantomData<fn() -> N>);

struct TargetState {
    /// Those that are created, by their place in [`TRANSPORTS`](crate::transports::TRANSPORTS).
    transports: BTreeMap<usize, Box<dyn Transport>>,
    /// The commands that their controllers do not have.
    masked: BTreeMap<usize, MaskedCommands>,
    /// Indexes of the reactors that have poll groups, ascending; `None` for all.
    poll_groups: Option<Vec<usize>>,
    /// New namespaces hide the metadata of their devices.
    hides_metadata: bool,
    subsystems: BTreeMap<Nqn, ConfiguredSubsystem>,
    /// Shared with snapshots and checkpoints, until it changes.
    ports: Arc<Vec<ListenPort>>,
    /// Number of subsystems that listen on a port; ports without are not in it.
    port_users: HashMap<u16, u32>,
    /// The namespace on each block device, by its UUID. There is one at most, because it claims the device.
    namespaces_by_device: HashMap<Uuid, (Nqn, u32)>,
    /// Entries of the discovery log about other targets; shared like `ports`.
    referrals: Arc<Vec<Referral>>,
    /// Those in the latest snapshot.
    published_referrals: Arc<Vec<Referral>>,
    last_portid: u16,
    /// Of the discovery log.
    generation: u64,
    /// The latest snapshot, of which the next one shares what does not change.
    published: Arc<ConfigSnapshot>,
    /// The ports in it; `None` before the first.
    published_ports: Option<Arc<Vec<ListenPort>>>,
}

/// A subsystem and its configuration.
#[derive(Clone)]
struct ConfiguredSubsystem {
    subsystem: Arc<Subsystem>,
    listeners: Vec<ListenAddress>,
    descriptors: BTreeMap<u32, Arc<Descriptor>>,
    /// The reservations of the block devices, by NSID.
    reservations: BTreeMap<u32, Arc<ReservationLease>>,
    /// The keys of hosts that have to authenticate.
    host_keys: BTreeMap<Nqn, HostKeys>,
    /// The keys of hosts that have to use TLS, as the keyring has them.
    host_psks: BTreeMap<Nqn, Key>,
    /// The files that persist reservations through power loss, by NSID.
    ptpl_files: BTreeMap<u32, String>,
}

/// A listening address, shared by one or more subsystems.
#[derive(Clone)]
struct ListenPort {
    portid: u16,
    address: ListenAddress,
    kind: &'static dyn TransportKind,
    /// Connections begin with TLS.
    secure: bool,
}

/// Options of a new subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemConfig {
    /// Serial number, 1 to 20 printable ASCII characters.
    pub serial_number: String,
    /// Model number, 1 to 40 printable ASCII characters.
    pub model_number: String,
    /// Any host may connect, without an entry in the list of hosts.
    pub allow_any_host: bool,
    /// Maximum number of namespaces, and the largest NSID.
    pub max_namespaces: u32,
    /// Smallest controller identifier (CNTLID) to assign, from 1.
    pub min_cntlid: u16,
    /// Largest controller identifier (CNTLID) to assign, up to 65519.
    pub max_cntlid: u16,
    /// Asymmetric Namespace Access (ANA) is reported to hosts.
    pub ana_reporting: bool,
    /// Most blocks of a range of Dataset Management (DMRSL); 0 for no limit.
    pub dmrsl: u32,
    /// Most bytes of a Write Zeroes as a power of two of 4 KiB (WZSL); 0 for no limit.
    pub wzsl: u8,
    /// A host may reset all controllers of the subsystem (NSSR).
    pub enable_nssr: bool,
    /// Text in extended entries of the discovery log, 4 to 256 printable ASCII characters.
    pub admin_label: Option<String>,
}

impl Default for SubsystemConfig {
    fn default() -> Self {
        SubsystemConfig {
            serial_number: "00000000000000000000".into(),
            model_number: "Ringbolt bdev Controller".into(),
            allow_any_host: false,
            max_namespaces: 32,
            min_cntlid: 1,
            max_cntlid: 0xffef,
            ana_reporting: false,
            dmrsl: 0,
            wzsl: 0,
            enable_nssr: false,
            admin_label: None,
        }
    }
}

/// Options of a new namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// Name, alias or UUID of the block device.
    pub bdev_name: String,
    /// Namespace identifier (NSID); `None` selects the lowest free one.
    pub nsid: Option<u32>,
    /// NGUID; `None` derives it from the UUID.
    pub nguid: Option<[u8; 16]>,
    /// EUI-64; `None` reports none.
    pub eui64: Option<[u8; 8]>,
    /// UUID; `None` takes the block device's.
    pub uuid: Option<Uuid>,
    /// ANA group identifier; `None` uses the NSID.
    pub anagrpid: Option<u32>,
    /// File that persists registrations and the reservation through power loss (PTPL) when a host requests
    /// it; with `None` reservations are lost when the target stops.
    pub ptpl_file: Option<String>,
    /// Only hosts that [`NvmfTarget::add_namespace_host`] names see it, not all that may connect.
    pub no_auto_visible: bool,
    /// Hosts do not see the protection information of the block device, which generates, checks and strips
    /// it.
    pub hide_metadata: bool,
}

impl NamespaceConfig {
    /// A namespace on this block device, with the defaults for all identifiers.
    pub fn new(bdev_name: &str) -> NamespaceConfig {
        let bdev_name = bdev_name.into();
        NamespaceConfig {
            bdev_name,
            nsid: None,
            nguid: None,
            eui64: None,
            uuid: None,
            anagrpid: None,
            ptpl_file: None,
            no_auto_visible: false,
            hide_metadata: false,
        }
    }
}

impl<N: ServerNetwork> Clone for NvmfTarget<N> {
    fn clone(&self) -> Self {
        NvmfTarget(self.0.clone(), PhantomData)
    }
}

impl NvmfTarget {
    /// An empty target on these reactors. It subscribes to resize and removal events of block devices.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> NvmfTarget {
        NvmfTarget::with_network(registry, reactors)
    }
}

impl<N: ServerNetwork> NvmfTarget<N> {
    /// As [`new`](NvmfTarget::new), over another network than kernel sockets, such as a simulation's.
    pub fn with_network(registry: Registry, reactors: &[ReactorHandle]) -> NvmfTarget<N> {
        let directory = Arc::new(ControllerDirectory::new());
        let control = TargetControl::new(registry, reactors, directory, TargetState::new());
        NvmfTarget(control, PhantomData)
    }

    /// The name of the block device that `name` finds.
    pub(crate) fn bdev_name(&self, name: &str) -> String {
        self.0.registry().name_of(name)
    }

    /// Creates a subsystem. The discovery subsystem always exists.
    pub fn create_subsystem(&self, nqn: &str, config: SubsystemConfig) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        check_text("serial_number", &config.serial_number, 1..=20)?;
        check_text("model_number", &config.model_number, 1..=40)?;
        // The range that SPDK has.
        config.admin_label.iter().try_for_each(|label| check_text("admin_label", label, 4..=256))?;
        let parameter = |text: String| Err(NvmfTargetError::Parameter(text));
        if config.max_namespaces == 0 || config.max_namespaces > NAMESPACES_MAX {
            return parameter(format!(
                "max_namespaces of {} is not 1 to {NAMESPACES_MAX}",
                config.max_namespaces
            ));
        }
        if config.min_cntlid == 0 || config.min_cntlid > config.max_cntlid || config.max_cntlid > 0xffef {
            let (min, max) = (config.min_cntlid, config.max_cntlid);
            return parameter(format!("controller identifiers {min} to {max} are not within 1 to 65519"));
        }
        let mut state = self.lock()?;
        if nqn.is_discovery() || state.subsystems.contains_key(&nqn) {
            return Err(NvmfTargetError::SubsystemExists(nqn.as_str().into()));
        }
        let subsystem = Arc::new(Subsystem {
            serial: config.serial_number,
            model: config.model_number,
            allow_any_host: config.allow_any_host,
            cntlid_min: config.min_cntlid,
            cntlid_max: config.max_cntlid,
            namespaces_max: config.max_namespaces,
            ana_reporting: config.ana_reporting,
            unmap_range_max_blocks: config.dmrsl,
            write_zeroes_max_log2: config.wzsl,
            subsystem_reset: config.enable_nssr,
            admin_label: config.admin_label,
            persistent_events: Arc::new(PersistentEventLog::new(commit::unix_ms)),
            ..Subsystem::new(nqn.clone())
        });
        let configured = ConfiguredSubsystem {
            subsystem,
            listeners: Vec::new(),
            descriptors: BTreeMap::new(),
            reservations: BTreeMap::new(),
            host_keys: BTreeMap::new(),
            host_psks: BTreeMap::new(),
            ptpl_files: BTreeMap::new(),
        };
        let before = state.checkpoint(&nqn);
        state.subsystems.insert(nqn, configured);
        self.commit(&mut state, before)
    }

    /// Removes a subsystem: its hosts are disconnected and its block devices released.
    ///
    /// Connections are drained, as with every removal: no new commands are accepted, and commands in flight
    /// complete within three seconds. This returns before the drain ends; what it returns waits until the
    /// block devices are free.
    pub fn delete_subsystem(&self, nqn: &str) -> Result<Closing, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        let removed = state.subsystems.remove(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        state.release_ports(&removed);
        let unused = state.take_unused_ports(&removed.listeners);
        self.commit(&mut state, before)?;
        self.0.shared().remove_subsystem(&nqn);
        for namespace in &removed.subsystem.namespaces {
            self.0.retire_keys([namespace.backend]);
        }
        for descriptor in removed.descriptors.values() {
            state.namespaces_by_device.remove(&descriptor.device().uuid());
        }
        let closing = Closing::of(removed.descriptors.values().map(|descriptor| &**descriptor));
        listeners::close_ports(&state, &unused)?;
        Ok(closing)
    }

    /// Adds a namespace and returns its identifier. Its `ptpl_file` is opened before any lock is taken.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, NvmfTargetError> {
        let reservations = self.prepare_namespace(nqn, &config)?;
        self.add_namespace_with(nqn, config, reservations)
    }

    /// The first part of adding a namespace, which may wait for its `ptpl_file`. That there is no such
    /// subsystem or device is reported by the second part.
    pub(crate) fn prepare_namespace(
        &self,
        nqn: &str,
        config: &NamespaceConfig,
    ) -> Result<PreparedReservations, NvmfTargetError> {
        let Some(file) = &config.ptpl_file else { return Ok(PreparedReservations::default()) };
        let exists = self.lock()?.subsystems.contains_key(&parse_nqn(nqn)?);
        let device = self.0.registry().find(&config.bdev_name).filter(|_| exists);
        Ok(self.0.registry().prepare_reservations(device.as_deref(), Some(Path::new(file)))?)
    }

    /// The second part of adding a namespace, with the reservations that the first one opened.
    pub(crate) fn add_namespace_with(
        &self,
        nqn: &str,
        mut config: NamespaceConfig,
        reservations: PreparedReservations,
    ) -> Result<u32, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let configured = state.subsystems.get(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        let subsystem = configured.subsystem.clone();
        let reject = |nsid, reason| Err(NvmfTargetError::Namespace(nqn.as_str().into(), nsid, reason));
        let nsid = match config.nsid {
            Some(nsid) if !subsystem.is_valid_nsid(nsid) => {
                return reject(nsid, "the identifier is not 1 to max_namespaces");
            }
            Some(nsid) if subsystem.namespace(nsid).is_some() => return reject(nsid, "it exists"),
            Some(nsid) => nsid,
            None => match lowest_free(&subsystem) {
                Some(nsid) => nsid,
                None => return reject(subsystem.namespaces_max, "all identifiers are in use"),
            },
        };
        if let Some(group) = config.anagrpid {
            ana::check_group(group, subsystem.namespaces_max)?;
        }
        let descriptor = Arc::new(
            self.0.registry().open_with_reservations(&config.bdev_name, Access::Exclusive { by: CLAIM })?,
        );
        let geometry = descriptor.device().geometry();
        let block_size = geometry.data_block_size();
        if !block_size.is_power_of_two() || block_size < 512 {
            return reject(nsid, "the block size is not a power of 2 of at least 512");
        }
        let hides = config.hide_metadata || state.hides_metadata;
        if hides && geometry.metadata.bytes > 0 && hidden_protection(&geometry).is_empty() {
            return reject(
                nsid,
                "only metadata that is protection information and nothing else can be hidden",
            );
        }
        if !hides && geometry.metadata.bytes > 0 && !geometry.metadata.extended {
            return reject(
                nsid,
                "its metadata is separate; create the bdev with md_interleave, or set hide_metadata",
            );
        }
        config.hide_metadata = hides;
        let lease = self.0.registry().finish_reservations(reservations, descriptor.device())?;
        // Or the subsystem was created since the first part.
        let Some(lease) = lease else { return reject(nsid, "it was changed meanwhile") };
        let key = self.0.assign_key();
        let before = state.checkpoint(&nqn);
        let reservations = Arc::new(NamespaceReservations::new(lease.reservations().clone()));
        let namespace = SubsystemNamespace { reservations, ..namespace_of(&descriptor, nsid, key, &config) };
        let device = descriptor.device().uuid();
        let Some(configured) = state.subsystems.get_mut(&nqn) else { return Err(no_subsystem(&nqn)) };
        configured.descriptors.insert(nsid, descriptor);
        configured.reservations.insert(nsid, Arc::new(lease));
        configured.ptpl_files.extend(config.ptpl_file.map(|file| (nsid, file)));
        configured.change(|subsystem| {
            let at = subsystem.namespaces.partition_point(|namespace| namespace.nsid < nsid);
            subsystem.namespaces.insert(at, namespace);
        });
        if let Err(error) = self.commit(&mut state, before) {
            self.0.retire_keys([key]);
            return Err(error);
        }
        state.namespaces_by_device.insert(device, (nqn, nsid));
        Ok(nsid)
    }

    /// Removes a namespace. Hosts get a Namespace Attribute Changed event; commands in flight complete. What
    /// it returns waits until the block device is free: the claim ends when the last channel closes.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<Closing, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        let (backend, descriptor) = state.take_namespace(&nqn, nsid)?;
        self.commit(&mut state, before)?;
        self.0.retire_keys([backend]);
        if let Some(descriptor) = &descriptor {
            state.namespaces_by_device.remove(&descriptor.device().uuid());
        }
        Ok(Closing::of(descriptor.as_deref()))
    }

    /// Allows a host to connect to a subsystem.
    pub fn add_host(&self, nqn: &str, host: &str) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change(&nqn, |subsystem| {
            if subsystem.hosts.insert(host.clone()) {
                Ok(())
            } else {
                Err(NvmfTargetError::HostExists(host.as_str().into(), nqn.as_str().into()))
            }
        })
    }

    /// Removes a host from the list of allowed hosts and disconnects it after its commands in flight
    /// complete.
    pub fn remove_host(&self, nqn: &str, host: &str) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        let mut state = self.lock()?;
        let before = state.checkpoint(&nqn);
        let configured = state.subsystems.get_mut(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        if !configured.subsystem.hosts.contains(&host) {
            return Err(NvmfTargetError::NoHost(host.as_str().into(), nqn.as_str().into()));
        }
        configured.change(|subsystem| {
            subsystem.hosts.remove(&host);
            subsystem.host_keys.remove(&host);
            subsystem.tls_hosts.remove(&host);
        });
        configured.host_keys.remove(&host);
        configured.host_psks.remove(&host);
        self.commit(&mut state, before)?;
        self.0.shared().drop_unused_generated_keys(&host, &nqn);
        Ok(())
    }

    /// Allows any host, or only those on the list; hosts that are no longer allowed are disconnected as by
    /// [`remove_host`](Self::remove_host).
    pub fn allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        self.change(&nqn, |subsystem| {
            subsystem.allow_any_host = allow;
            Ok(())
        })
    }

    /// Rejects further calls with [`NvmfTargetError::Stopping`]. Hosts that
    /// [`disconnect_all`](Self::disconnect_all) has not disconnected are when the reactors stop, each after
    /// its commands in flight complete.
    pub fn shutdown(&self) {
        drop(self.0.stop());
    }

    fn change(
        &self,
        nqn: &Nqn,
        change: impl FnOnce(&mut Subsystem) -> Result<(), NvmfTargetError>,
    ) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let before = state.checkpoint(nqn);
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let mut subsystem = (*configured.subsystem).clone();
        change(&mut subsystem)?;
        configured.subsystem = Arc::new(subsystem);
        self.commit(&mut state, before)
    }

    /// Handles the resize or removal of a block device.
    fn device_event(&self, event: &DeviceEvent) {
        let Ok(mut state) = self.lock() else { return };
        let name = event.device().name().to_string();
        let Some((nqn, nsid)) = state.namespace_on(event.device()) else { return };
        let subsystem = state.subsystems.get(&nqn).map(|configured| configured.subsystem.clone());
        // The device has changed: there is no way back.
        let result = match event {
            DeviceEvent::Removed(device) => match state.take_namespace(&nqn, nsid) {
                Ok((backend, _)) => {
                    state.namespaces_by_device.remove(&device.uuid());
                    if let Some(subsystem) = &subsystem
                        && let Some(namespace) = subsystem.namespace(nsid)
                    {
                        subsystem.persistent_events.namespace_deleted(namespace);
                    }
                    let result = self.commit_always(&mut state, &nqn);
                    self.0.retire_keys([backend]);
                    result
                }
                Err(error) => Err(error),
            },
            DeviceEvent::Resized(device) => {
                let blocks = device.geometry().blocks;
                if let Some(configured) = state.subsystems.get_mut(&nqn) {
                    configured.change(|subsystem| {
                        let matches = |namespace: &&mut SubsystemNamespace| namespace.nsid == nsid;
                        if let Some(namespace) = subsystem.namespaces.iter_mut().find(matches) {
                            namespace.blocks = blocks;
                        }
                    });
                }
                self.commit_always(&mut state, &nqn)
            }
            DeviceEvent::Registered(_) => Ok(()),
        };
        if let Err(error) = result {
            log::error!(target: "nvmf", "{nqn}: namespace {nsid} on {name}: {error}");
        }
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, NvmfTargetError> {
        Ok(self.0.lock()?)
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock_any()
    }

    /// Connections of hosts by transport, for metrics.
    pub fn connection_totals(&self) -> Vec<(&'static str, ConnectionTotals)> {
        self.lock_any().transports.values().map(|transport| transport.connections()).collect()
    }

    /// The transports as the balancer sees them.
    pub fn balanced(&self) -> Vec<Arc<dyn BalancedTarget>> {
        self.lock_any().transports.values().filter_map(|transport| transport.balanced()).collect()
    }
}

impl ControlledTarget for TargetState {
    type Config = ConfigSnapshot;
    type Shared = Arc<ControllerDirectory>;

    fn device_event(control: &TargetControl<TargetState>, event: &DeviceEvent) {
        // Devices have nothing to do with a network.
        NvmfTarget::<Sockets>(control.clone(), PhantomData).device_event(event);
    }
}

/// Maximum namespaces of a subsystem. Each costs 32 bytes in the table of every I/O queue.
const NAMESPACES_MAX: u32 = 8192;

impl ConfiguredSubsystem {
    fn change(&mut self, change: impl FnOnce(&mut Subsystem)) {
        change(Arc::make_mut(&mut self.subsystem));
    }
}

impl TargetState {
    fn new() -> TargetState {
        TargetState {
            transports: BTreeMap::new(),
            masked: BTreeMap::new(),
            poll_groups: None,
            hides_metadata: false,
            subsystems: BTreeMap::new(),
            ports: Arc::default(),
            port_users: HashMap::new(),
            namespaces_by_device: HashMap::new(),
            referrals: Arc::default(),
            published_referrals: Arc::default(),
            last_portid: 0,
            generation: 0,
            published: Arc::default(),
            published_ports: None,
        }
    }

    /// The namespace on a block device: subsystem and NSID.
    fn namespace_on(&self, device: &Arc<BlockDevice>) -> Option<(Nqn, u32)> {
        let (nqn, nsid) = self.namespaces_by_device.get(&device.uuid())?;
        let descriptor = self.subsystems.get(nqn)?.descriptors.get(nsid)?;
        Arc::ptr_eq(descriptor.device(), device).then(|| (nqn.clone(), *nsid))
    }

    /// Removes a namespace. Returns the key and the descriptor of its block device.
    fn take_namespace(
        &mut self,
        nqn: &Nqn,
        nsid: u32,
    ) -> Result<(u32, Option<Arc<Descriptor>>), NvmfTargetError> {
        let configured = self.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let Some(namespace) = configured.subsystem.namespace(nsid) else {
            return Err(NvmfTargetError::NoNamespace(nqn.as_str().into(), nsid));
        };
        let backend = namespace.backend;
        configured.change(|subsystem| subsystem.namespaces.retain(|namespace| namespace.nsid != nsid));
        configured.ptpl_files.remove(&nsid);
        configured.reservations.remove(&nsid);
        Ok((backend, configured.descriptors.remove(&nsid)))
    }
}

fn namespace_of(
    descriptor: &Descriptor,
    nsid: u32,
    backend: u32,
    config: &NamespaceConfig,
) -> SubsystemNamespace {
    let device = descriptor.device();
    let geometry = device.geometry();
    let uuid = config.uuid.unwrap_or_else(|| device.uuid());
    let (metadata, hidden_protection) = match config.hide_metadata {
        true => (MetadataFormat::NONE, hidden_protection(&geometry)),
        false => (geometry.metadata, ProtectionFlags::empty()),
    };
    SubsystemNamespace {
        bdev: device.name().to_string(),
        backend,
        block_size: geometry.data_block_size(),
        metadata,
        hidden_protection,
        nguid: config.nguid.unwrap_or(*uuid.as_bytes()),
        eui64: config.eui64.unwrap_or([0; 8]),
        uuid,
        volatile_cache: geometry.write_cache,
        read_only: device.bdev().read_only() || !device.bdev().supports(Op::Write),
        can_unmap: device.bdev().supports(Op::Unmap),
        can_write_zeroes: device.bdev().supports(Op::WriteZeroes),
        can_write_uncorrectable: device.bdev().supports(Op::WriteUncorrectable),
        buffer_alignment: geometry.buffer_alignment,
        optimal_boundary_blocks: u16::try_from(geometry.optimal_io_boundary_blocks).unwrap_or(0),
        anagrpid: config.anagrpid.unwrap_or(nsid),
        visible_hosts: config.no_auto_visible.then(BTreeSet::new),
        ..SubsystemNamespace::new(nsid, geometry.blocks)
    }
}

/// The lowest identifier that no namespace has; namespaces are in ascending order.
fn lowest_free(subsystem: &Subsystem) -> Option<u32> {
    let gap = (1..).zip(&subsystem.namespaces).find(|(nsid, namespace)| namespace.nsid != *nsid);
    let nsid = gap.map_or(subsystem.namespaces.len() as u32 + 1, |(nsid, _)| nsid);
    Some(nsid).filter(|nsid| *nsid <= subsystem.namespaces_max)
}

fn parse_nqn(text: &str) -> Result<Nqn, NvmfTargetError> {
    Nqn::new(text).map_err(|_| NvmfTargetError::Nqn(text.into()))
}

fn no_subsystem(nqn: &Nqn) -> NvmfTargetError {
    NvmfTargetError::NoSubsystem(nqn.as_str().into())
}

fn check_text(name: &str, text: &str, length: RangeInclusive<usize>) -> Result<(), NvmfTargetError> {
    let printable = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if printable && length.contains(&text.len()) {
        return Ok(());
    }
    let (min, max) = (length.start(), length.end());
    let text = format!("{name} '{text}' is not {min} to {max} printable ASCII characters");
    Err(NvmfTargetError::Parameter(text))
}
