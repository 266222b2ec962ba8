//! The control plane: it holds the configuration and publishes snapshots of it to the poll groups.

mod ana;
mod info;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use bdev::{Access, Descriptor, DeviceEvent, Registry, Uuid};
use block_io::Op;
use nvme_controller::reservation::Reservations;
use nvme_controller::{
    AllowedHosts, ControllerDirectory, DiscoveryLog, DiscoveryRecord, Subsystem, SubsystemListener,
    SubsystemNamespace,
};
use reactor::{MailboxSender, Period, ReactorHandle, blocking};
use sockets::{CoreNetwork, Network, Sockets};
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::SubsystemType;

use crate::address::{ListenAddress, transport_address};
use crate::failure::NvmfTargetError;
use crate::group::{GroupStatus, TcpGroupMessage, TcpPollGroup};
use crate::group_poller::GroupPoller;
use crate::limits::TcpTransportConfig;
use crate::ptpl::{self, PtplError, PtplWriter};
use crate::snapshot::ConfigSnapshot;
use crate::vfio_user::{self, VfioUserConfig, VfioUserFault};

pub use info::{QpairInfo, SubsystemInfo, TargetControllerInfo, TargetNamespaceInfo, TargetStats};

type GroupSender<N> = MailboxSender<TcpGroupMessage<<N as Network>::Stream>>;

/// Name under which the target claims its block devices.
const CLAIM: &str = "NVMe-oF Target";
/// Messages that a poll group's mailbox holds.
const MESSAGES_MAX: usize = 1024;

/// The control plane of the NVMe-oF target, shared by all transports.
///
/// It owns the configuration (subsystems, namespaces, listeners, hosts), the claims on block devices and
/// the mailboxes of the poll groups. A change is validated and applied under one lock, then published as a
/// new `ConfigSnapshot`; the call returns when every poll group has applied it. I/O never takes the lock.
///
/// Calls block, so a reactor's thread must not make them. Order: [`create_transport`](Self::create_transport)
/// or [`create_vfio_user`](Self::create_vfio_user), subsystems, namespaces and hosts, then listeners;
/// [`shutdown`](Self::shutdown) before the reactors stop. Cheap to clone. `N` is the network of the TCP transport.
pub struct NvmfTarget<N: CoreNetwork = Sockets>(Arc<TargetInner<N>>);

struct TargetInner<N: CoreNetwork> {
    registry: Registry,
    remotes: Vec<ReactorHandle>,
    directory: Arc<ControllerDirectory>,
    state: Mutex<TargetState<N>>,
    subscription: Mutex<Option<bdev::SubscriptionId>>,
}

struct TargetState<N: CoreNetwork> {
    transport: Option<TcpTransport<N>>,
    vfio_user: Option<VfioUserTransport>,
    subsystems: BTreeMap<Nqn, ConfiguredSubsystem>,
    ports: Vec<ListenPort>,
    last_portid: u16,
    backends_allocated: u32,
    free_backends: Vec<u32>,
    generation: u64,
    ptpl: Option<PtplWriter>,
    stopping: bool,
}

struct TcpTransport<N: CoreNetwork> {
    config: TcpTransportConfig,
    groups: Vec<GroupSender<N>>,
}

struct VfioUserTransport {
    config: VfioUserConfig,
    groups: Vec<MailboxSender<vfio_user::VfioUserGroupMessage>>,
}

/// A subsystem and its configuration.
struct ConfiguredSubsystem {
    subsystem: Arc<Subsystem>,
    listeners: Vec<ListenAddress>,
    descriptors: BTreeMap<u32, Arc<Descriptor>>,
    /// The files that persist reservations through power loss, by NSID.
    ptpl_files: BTreeMap<u32, String>,
}

/// A listening address, shared by one or more subsystems.
struct ListenPort {
    portid: u16,
    address: ListenAddress,
    /// Index of the poll group that listens.
    group: usize,
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
    /// File that persists registrations and the reservation through power loss (PTPL) when a host requests it;
    /// with `None` reservations are lost when the target stops.
    pub ptpl_file: Option<String>,
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
        }
    }
}

impl<N: CoreNetwork> Clone for NvmfTarget<N> {
    fn clone(&self) -> Self {
        NvmfTarget(self.0.clone())
    }
}

impl NvmfTarget {
    /// An empty target on these reactors. It subscribes to resize and removal events of block devices.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> NvmfTarget {
        NvmfTarget::with_network(registry, reactors)
    }
}

impl<N: CoreNetwork> NvmfTarget<N> {
    /// As [`new`](NvmfTarget::new), over another network than kernel sockets, such as a simulation's.
    pub fn with_network(registry: Registry, reactors: &[ReactorHandle]) -> NvmfTarget<N> {
        let inner = Arc::new(TargetInner {
            registry,
            remotes: reactors.to_vec(),
            directory: Arc::new(ControllerDirectory::new()),
            state: Mutex::new(TargetState::new()),
            subscription: Mutex::new(None),
        });
        let weak: Weak<TargetInner<N>> = Arc::downgrade(&inner);
        let id = inner.registry.subscribe(Box::new(move |event| {
            if let Some(inner) = weak.upgrade() {
                NvmfTarget(inner).device_event(event);
            }
        }));
        *sync::lock(&inner.subscription) = Some(id);
        NvmfTarget(inner)
    }

    /// Creates the TCP transport, with a poll group on every reactor.
    ///
    /// # Errors
    /// An option is out of range, or the transport exists.
    pub fn create_transport(&self, config: TcpTransportConfig) -> Result<(), NvmfTargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.transport.is_some() {
            return Err(NvmfTargetError::TransportExists("TCP"));
        }
        let statuses: Arc<[GroupStatus]> = self.0.remotes.iter().map(|_| GroupStatus::default()).collect();
        let mut groups = Vec::new();
        for remote in &self.0.remotes {
            let (limits, directory, statuses) = (limits.clone(), self.0.directory.clone(), statuses.clone());
            let sender = remote.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let network = N::of_core(core);
                let (wake, notifiers) = (sender.clone(), directory.clone());
                let mut group = TcpPollGroup::new(core, network, limits, directory, statuses, messages);
                // A group with a full mailbox is awake anyway: the message may be lost.
                group.notifier =
                    Some(notifiers.add_notifier(Box::new(move || _ = wake.send(TcpGroupMessage::Recheck))));
                core.add_poller(Box::new(GroupPoller { core: core.clone(), group }), Period::EveryTurn);
                sender
            });
            groups.push(sender.map_err(|_| NvmfTargetError::Stopping)?);
        }
        for group in &groups {
            send(group, TcpGroupMessage::Peers(groups.clone()))?;
        }
        state.transport = Some(TcpTransport { config, groups });
        self.publish(&mut state)
    }

    /// Creates the vfio-user transport, with a poll group on every reactor.
    ///
    /// # Errors
    /// An option is out of range, or the transport exists.
    pub fn create_vfio_user(&self, config: VfioUserConfig) -> Result<(), NvmfTargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.vfio_user.is_some() {
            return Err(NvmfTargetError::TransportExists("VFIOUSER"));
        }
        let mut groups = Vec::new();
        for remote in &self.0.remotes {
            let (limits, directory) = (limits.clone(), self.0.directory.clone());
            let sender = remote.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let shared = vfio_user::VfioUserShared { limits, directory, snapshot: Arc::default() };
                let sender_to_self = sender.clone();
                let wake = Box::new(move || _ = sender_to_self.send(vfio_user::VfioUserGroupMessage::Wake));
                let notifier = shared.directory.add_notifier(wake);
                let group = vfio_user::VfioUserPollGroup::new(core, shared, messages, notifier);
                let poller = GroupPoller { core: core.clone(), group };
                core.add_poller(Box::new(poller), Period::EveryTurn);
                sender
            });
            groups.push(sender.map_err(|_| NvmfTargetError::Stopping)?);
        }
        state.vfio_user = Some(VfioUserTransport { config, groups });
        self.publish(&mut state)
    }

    /// Options of the vfio-user transport; `None` before it is created.
    pub fn vfio_user_config(&self) -> Option<VfioUserConfig> {
        self.lock_any().vfio_user.as_ref().map(|transport| transport.config.clone())
    }

    /// Injects a fault into the controller of the client at a vfio-user listener.
    ///
    /// # Errors
    /// No client is connected at the address.
    pub fn inject(&self, traddr: &str, fault: VfioUserFault) -> Result<(), NvmfTargetError> {
        let address = ListenAddress::vfio_user(traddr).normalized()?;
        let state = self.lock()?;
        let not_connected =
            || NvmfTargetError::Parameter(format!("no client is connected at {}", address.traddr));
        let port = state.ports.iter().find(|port| port.address == address).ok_or_else(not_connected)?;
        let transport = state.vfio_user.as_ref().ok_or(NvmfTargetError::NoTransport("VFIOUSER"))?;
        let (reply, outcome) = sync_channel(1);
        let message = vfio_user::VfioUserGroupMessage::Inject { portid: port.portid, fault, reply };
        send(&transport.groups[port.group], message)?;
        if wait(&outcome)? { Ok(()) } else { Err(not_connected()) }
    }

    /// Options of the TCP transport; empty before it is created.
    pub fn transports(&self) -> Vec<TcpTransportConfig> {
        let state = self.lock_any();
        state.transport.iter().map(|transport| transport.config.clone()).collect()
    }

    /// Creates a subsystem. The discovery subsystem always exists.
    pub fn create_subsystem(&self, nqn: &str, config: SubsystemConfig) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        check_text("serial_number", &config.serial_number, 20)?;
        check_text("model_number", &config.model_number, 40)?;
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
            ..Subsystem::new(nqn.clone())
        });
        let configured = ConfiguredSubsystem {
            subsystem,
            listeners: Vec::new(),
            descriptors: BTreeMap::new(),
            ptpl_files: BTreeMap::new(),
        };
        state.subsystems.insert(nqn, configured);
        self.publish(&mut state)
    }

    /// Removes a subsystem: its hosts are disconnected and its block devices released.
    ///
    /// Connections are drained, as with every removal: no new commands are accepted, and commands in flight
    /// complete within three seconds. This returns before the drain ends.
    pub fn delete_subsystem(&self, nqn: &str) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let removed = state.subsystems.remove(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        self.publish(&mut state)?;
        self.0.directory.remove_subsystem(&nqn);
        let keys = removed.subsystem.namespaces.iter().map(|namespace| namespace.backend);
        state.free_backends.extend(keys);
        for address in &removed.listeners {
            self.drop_port(&mut state, address)?;
        }
        Ok(())
    }

    /// Adds a namespace and returns its identifier.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, NvmfTargetError> {
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
            None => match (1..=subsystem.namespaces_max).find(|nsid| subsystem.namespace(*nsid).is_none()) {
                Some(nsid) => nsid,
                None => return reject(subsystem.namespaces_max, "all identifiers are in use"),
            },
        };
        let descriptor = Arc::new(self.0.registry.open(&config.bdev_name, Access::Exclusive { by: CLAIM })?);
        let block_size = descriptor.device().geometry().block_size;
        if !block_size.is_power_of_two() || block_size < 512 {
            return reject(nsid, "the block size is not a power of 2 of at least 512");
        }
        let reservations = match &config.ptpl_file {
            Some(file) => state.open_ptpl(file, descriptor.device().uuid())?,
            None => Reservations::default(),
        };
        let key = state.free_backends.pop().unwrap_or_else(|| {
            state.backends_allocated += 1;
            state.backends_allocated - 1
        });
        let reservations = Arc::new(reservations);
        let namespace = SubsystemNamespace { reservations, ..namespace_of(&descriptor, nsid, key, &config) };
        let Some(configured) = state.subsystems.get_mut(&nqn) else { return Err(no_subsystem(&nqn)) };
        configured.descriptors.insert(nsid, descriptor);
        configured.ptpl_files.extend(config.ptpl_file.map(|file| (nsid, file)));
        configured.change(|subsystem| {
            let at = subsystem.namespaces.partition_point(|namespace| namespace.nsid < nsid);
            subsystem.namespaces.insert(at, namespace);
        });
        self.publish(&mut state)?;
        Ok(nsid)
    }

    /// Removes a namespace. Hosts get a Namespace Attribute Changed event; commands in flight complete.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        self.take_namespace(&mut state, &nqn, nsid)
    }

    fn take_namespace(
        &self,
        state: &mut TargetState<N>,
        nqn: &Nqn,
        nsid: u32,
    ) -> Result<(), NvmfTargetError> {
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let Some(namespace) = configured.subsystem.namespace(nsid) else {
            return Err(NvmfTargetError::NoNamespace(nqn.as_str().into(), nsid));
        };
        let backend = namespace.backend;
        configured.change(|subsystem| subsystem.namespaces.retain(|namespace| namespace.nsid != nsid));
        let descriptor = configured.descriptors.remove(&nsid);
        configured.ptpl_files.remove(&nsid);
        self.publish(state)?;
        // No poll group uses the key any longer; the claim ends when the last channel closes.
        state.free_backends.push(backend);
        drop(descriptor);
        Ok(())
    }

    /// Adds a listener to a subsystem; opens the address if no other subsystem listens on it. Returns the
    /// address, with the port that the kernel assigned for port 0.
    pub fn add_listener(&self, nqn: &str, address: ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let normalized = address.normalized()?;
        if normalized.is_vfio_user() {
            return self.add_endpoint(nqn, normalized);
        }
        let socket = address.socket()?;
        let mut state = self.lock()?;
        if !nqn.is_discovery() && !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        let existing = state.ports.iter().find(|port| port.address == normalized).map(|port| port.portid);
        if existing.is_some() && nqn.is_discovery() {
            return Ok(normalized);
        }
        let portid = match existing {
            Some(portid) => portid,
            None => {
                let portid = state.last_portid.wrapping_add(1).max(1);
                let transport = state.transport.as_ref().ok_or(NvmfTargetError::NoTransport("TCP"))?;
                let (reply, outcome) = sync_channel(1);
                let first = transport.groups.first().ok_or(NvmfTargetError::NoTransport("TCP"))?;
                send(first, TcpGroupMessage::Listen { address: socket, portid, reply })?;
                let bound = wait(&outcome)?;
                let bound = bound.map_err(|error| NvmfTargetError::Listen(socket.to_string(), error))?;
                state.last_portid = portid;
                state.ports.push(ListenPort { portid, address: ListenAddress::from_socket(bound), group: 0 });
                portid
            }
        };
        let port = state.ports.iter().find(|port| port.portid == portid);
        let bound = port.map_or(normalized, |port| port.address.clone());
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            if configured.listeners.contains(&bound) {
                return Err(NvmfTargetError::ListenerExists(nqn.as_str().into(), socket.to_string()));
            }
            configured.listeners.push(bound.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
        }
        self.publish(&mut state)?;
        Ok(bound)
    }

    /// Adds a vfio-user endpoint: a directory with one socket, one subsystem, and one client at a time.
    fn add_endpoint(&self, nqn: Nqn, address: ListenAddress) -> Result<ListenAddress, NvmfTargetError> {
        let mut state = self.lock()?;
        if !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        if state.ports.iter().any(|port| port.address == address) {
            return Err(NvmfTargetError::ListenerExists("there".into(), address.traddr));
        }
        let portid = state.last_portid.wrapping_add(1).max(1);
        let transport = state.vfio_user.as_ref().ok_or(NvmfTargetError::NoTransport("VFIOUSER"))?;
        // The group with the fewest endpoints.
        let load = |group: &usize| {
            state.ports.iter().filter(|port| port.address.is_vfio_user() && port.group == *group).count()
        };
        let group = (0..transport.groups.len()).min_by_key(load);
        let group = group.ok_or(NvmfTargetError::NoTransport("VFIOUSER"))?;
        let sender = transport.groups[group].clone();
        // The subsystem must list the port before the first client connects.
        state.last_portid = portid;
        state.ports.push(ListenPort { portid, address: address.clone(), group });
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            configured.listeners.push(address.clone());
            configured
                .change(|subsystem| subsystem.listeners.push(SubsystemListener { portid, ana: Vec::new() }));
        }
        self.publish(&mut state)?;
        let (reply, outcome) = sync_channel(1);
        let directory = address.traddr.clone();
        send(
            &sender,
            vfio_user::VfioUserGroupMessage::Listen { directory, nqn: nqn.clone(), portid, reply },
        )?;
        if let Err(error) = wait(&outcome)? {
            state.ports.retain(|port| port.portid != portid);
            if let Some(configured) = state.subsystems.get_mut(&nqn) {
                configured.listeners.retain(|listener| *listener != address);
                configured.change(|subsystem| subsystem.listeners.retain(|one| one.portid != portid));
            }
            self.publish(&mut state)?;
            return Err(NvmfTargetError::Listen(address.traddr, error));
        }
        Ok(address)
    }

    /// Removes a listener from a subsystem. Hosts connected through it are disconnected after their commands
    /// in flight complete.
    pub fn remove_listener(&self, nqn: &str, address: ListenAddress) -> Result<(), NvmfTargetError> {
        let nqn = parse_nqn(nqn)?;
        let normalized = address.normalized()?;
        let mut state = self.lock()?;
        if nqn.is_discovery() {
            state.port(&nqn, &normalized)?;
        } else {
            let (portid, configured) = state.listener(&nqn, &normalized)?;
            configured.listeners.retain(|listener| *listener != normalized);
            configured.change(|subsystem| subsystem.listeners.retain(|listener| listener.portid != portid));
        }
        self.publish(&mut state)?;
        self.drop_port(&mut state, &normalized)
    }

    /// Closes an address that no subsystem listens on any longer.
    fn drop_port(&self, state: &mut TargetState<N>, address: &ListenAddress) -> Result<(), NvmfTargetError> {
        if state.subsystems.values().any(|configured| configured.listeners.contains(address)) {
            return Ok(());
        }
        let Some(position) = state.ports.iter().position(|port| port.address == *address) else {
            return Ok(());
        };
        let ListenPort { portid, group, .. } = state.ports.remove(position);
        if address.is_vfio_user() {
            if let Some(transport) = &state.vfio_user {
                let (reply, outcome) = sync_channel(1);
                send(&transport.groups[group], vfio_user::VfioUserGroupMessage::Unlisten { portid, reply })?;
                wait(&outcome)?;
            }
        } else {
            unlisten(state, portid)?;
        }
        self.publish(state)
    }

    /// Closes all TCP listeners; existing connections stay. Each port is free when this returns. Without this
    /// call, the kernel releases what io_uring holds of an exited process only some time later.
    pub fn stop_listening(&self) -> Result<(), NvmfTargetError> {
        let state = self.lock()?;
        let mut ports = state.ports.iter().filter(|port| !port.address.is_vfio_user());
        ports.try_for_each(|port| unlisten(&state, port.portid))
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

    /// Removes a host from the list of allowed hosts and disconnects it after its commands in flight complete.
    pub fn remove_host(&self, nqn: &str, host: &str) -> Result<(), NvmfTargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change(&nqn, |subsystem| {
            if subsystem.hosts.remove(&host) {
                Ok(())
            } else {
                Err(NvmfTargetError::NoHost(host.as_str().into(), nqn.as_str().into()))
            }
        })
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

    /// Rejects further calls with [`NvmfTargetError::Stopping`]. Hosts are disconnected when the reactors stop,
    /// each after its commands in flight complete.
    pub fn shutdown(&self) {
        self.lock_any().stopping = true;
        let subscription = sync::lock(&self.0.subscription).take();
        if let Some(id) = subscription {
            self.0.registry.unsubscribe(id);
        }
    }

    fn change(
        &self,
        nqn: &Nqn,
        change: impl FnOnce(&mut Subsystem) -> Result<(), NvmfTargetError>,
    ) -> Result<(), NvmfTargetError> {
        let mut state = self.lock()?;
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let mut subsystem = (*configured.subsystem).clone();
        change(&mut subsystem)?;
        configured.subsystem = Arc::new(subsystem);
        self.publish(&mut state)
    }

    /// Handles the resize or removal of a block device.
    fn device_event(&self, event: &DeviceEvent) {
        let Ok(mut state) = self.lock() else { return };
        let name = event.device().name().to_string();
        let mut affected = Vec::new();
        for (nqn, configured) in &state.subsystems {
            for (nsid, descriptor) in &configured.descriptors {
                if Arc::ptr_eq(descriptor.device(), event.device()) {
                    affected.push((nqn.clone(), *nsid));
                }
            }
        }
        for (nqn, nsid) in affected {
            let result = match event {
                DeviceEvent::Removed(_) => self.take_namespace(&mut state, &nqn, nsid),
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
                    self.publish(&mut state)
                }
                DeviceEvent::Registered(_) => Ok(()),
            };
            if let Err(error) = result {
                log::error!(target: "nvmf", "{nqn}: namespace {nsid} on {name}: {error}");
            }
        }
    }

    /// Publishes a new snapshot and waits until every poll group has applied it.
    fn publish(&self, state: &mut TargetState<N>) -> Result<(), NvmfTargetError> {
        state.generation += 1;
        let mut snapshot =
            ConfigSnapshot { discovery: Arc::new(state.discovery()), ..ConfigSnapshot::default() };
        let discovery = Nqn::discovery();
        let listeners =
            state.ports.iter().map(|port| SubsystemListener { portid: port.portid, ana: Vec::new() });
        let discovery_subsystem =
            Subsystem { listeners: listeners.collect(), ..Subsystem::discovery(discovery.clone()) };
        snapshot.subsystems.insert(discovery, Arc::new(discovery_subsystem));
        for (nqn, configured) in &state.subsystems {
            // An empty list would mean every port. A subsystem without listeners gets a port that does not exist.
            if configured.subsystem.listeners.is_empty() {
                let unreachable = vec![SubsystemListener { portid: 0, ana: Vec::new() }];
                let hidden = Subsystem { listeners: unreachable, ..(*configured.subsystem).clone() };
                snapshot.subsystems.insert(nqn.clone(), Arc::new(hidden));
            } else {
                snapshot.subsystems.insert(nqn.clone(), configured.subsystem.clone());
            }
            for namespace in &configured.subsystem.namespaces {
                if let Some(descriptor) = configured.descriptors.get(&namespace.nsid) {
                    snapshot.devices.insert(namespace.backend, descriptor.clone());
                }
            }
        }
        let snapshot = Arc::new(snapshot);
        let mut outcomes = Vec::new();
        for group in state.transport.iter().flat_map(|transport| &transport.groups) {
            let (reply, outcome) = sync_channel(1);
            send(group, TcpGroupMessage::Apply(snapshot.clone(), reply))?;
            outcomes.push(outcome);
        }
        for group in state.vfio_user.iter().flat_map(|transport| &transport.groups) {
            let (reply, outcome) = sync_channel(1);
            send(group, vfio_user::VfioUserGroupMessage::Apply(snapshot.clone(), reply))?;
            outcomes.push(outcome);
        }
        for outcome in &outcomes {
            wait(outcome)?;
        }
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState<N>>, NvmfTargetError> {
        let state = self.lock_any();
        if state.stopping { Err(NvmfTargetError::Stopping) } else { Ok(state) }
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState<N>> {
        sync::lock(&self.0.state)
    }
}

/// Maximum namespaces of a subsystem. Each costs 32 bytes in the table of every I/O queue.
const NAMESPACES_MAX: u32 = 8192;

impl ConfiguredSubsystem {
    fn change(&mut self, change: impl FnOnce(&mut Subsystem)) {
        change(Arc::make_mut(&mut self.subsystem));
    }
}

impl<N: CoreNetwork> TargetState<N> {
    fn new() -> TargetState<N> {
        TargetState {
            transport: None,
            vfio_user: None,
            subsystems: BTreeMap::new(),
            ports: Vec::new(),
            last_portid: 0,
            backends_allocated: 0,
            free_backends: Vec::new(),
            generation: 0,
            ptpl: None,
            stopping: false,
        }
    }

    /// Reservations of a device that are persisted in a file. The file is written immediately, so that an
    /// unusable file is rejected at configuration time and not at the first reservation.
    fn open_ptpl(&mut self, file: &str, device: Uuid) -> Result<Reservations, NvmfTargetError> {
        let path = Path::new(file);
        let mut files = self.subsystems.values().flat_map(|configured| configured.ptpl_files.values());
        if files.any(|other| other == file) {
            return Err(NvmfTargetError::Parameter(format!(
                "ptpl_file {file} keeps another namespace's reservations"
            )));
        }
        let state = ptpl::load(path, device)?;
        let failed = |error| PtplError::Io(path.into(), error);
        os::replace_file(path, 0o666, &ptpl::encode(&state, device)).map_err(failed)?;
        let writer = match &self.ptpl {
            Some(writer) => writer.clone(),
            None => self.ptpl.insert(PtplWriter::start().map_err(failed)?).clone(),
        };
        Ok(Reservations::with_store(state, writer.store(path, device)))
    }

    /// The port identifier of a listening address.
    fn port(&self, nqn: &Nqn, address: &ListenAddress) -> Result<u16, NvmfTargetError> {
        let port = self.ports.iter().find(|port| port.address == *address);
        port.map(|port| port.portid).ok_or_else(|| no_listener(nqn, address))
    }

    /// A subsystem, and the port identifier of one of its listeners.
    fn listener(
        &mut self,
        nqn: &Nqn,
        address: &ListenAddress,
    ) -> Result<(u16, &mut ConfiguredSubsystem), NvmfTargetError> {
        let portid = self.port(nqn, address);
        let configured = self.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        if !configured.listeners.contains(address) {
            return Err(no_listener(nqn, address));
        }
        Ok((portid?, configured))
    }

    /// The discovery log: one record for each listener of each subsystem, and of the discovery service itself.
    fn discovery(&self) -> DiscoveryLog {
        let mut records = Vec::new();
        let nvm = self.subsystems.iter().flat_map(|(nqn, configured)| {
            let hosts = if configured.subsystem.allow_any_host {
                AllowedHosts::Any
            } else {
                AllowedHosts::Only(configured.subsystem.hosts.clone())
            };
            let ports = self.ports.iter().filter(|port| configured.listeners.contains(&port.address));
            ports.map(move |port| (nqn.clone(), SubsystemType::Nvm, port, hosts.clone()))
        });
        let service = self
            .ports
            .iter()
            .map(|port| (Nqn::discovery(), SubsystemType::CurrentDiscovery, port, AllowedHosts::Any));
        for (subnqn, subtype, port, hosts) in service.chain(nvm) {
            let Ok(socket) = port.address.socket() else { continue };
            let address = transport_address(socket);
            records.push(DiscoveryRecord { subnqn, subtype, address, portid: port.portid, hosts });
        }
        DiscoveryLog { generation: self.generation, records }
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
    SubsystemNamespace {
        bdev: device.name().to_string(),
        backend,
        block_size: geometry.block_size,
        nguid: config.nguid.unwrap_or(*uuid.as_bytes()),
        eui64: config.eui64.unwrap_or([0; 8]),
        uuid,
        volatile_cache: geometry.write_cache,
        can_unmap: device.bdev().supports(Op::Unmap),
        can_write_zeroes: device.bdev().supports(Op::WriteZeroes),
        can_write_uncorrectable: device.bdev().supports(Op::WriteUncorrectable),
        buffer_alignment: geometry.buffer_alignment,
        optimal_boundary_blocks: u16::try_from(geometry.optimal_io_boundary_blocks).unwrap_or(0),
        anagrpid: config.anagrpid.unwrap_or(nsid),
        ..SubsystemNamespace::new(nsid, geometry.blocks)
    }
}

fn parse_nqn(text: &str) -> Result<Nqn, NvmfTargetError> {
    Nqn::new(text).map_err(|_| NvmfTargetError::Nqn(text.into()))
}

fn no_listener(nqn: &Nqn, address: &ListenAddress) -> NvmfTargetError {
    NvmfTargetError::NoListener(nqn.as_str().into(), format!("{}:{}", address.traddr, address.trsvcid))
}

fn no_subsystem(nqn: &Nqn) -> NvmfTargetError {
    NvmfTargetError::NoSubsystem(nqn.as_str().into())
}

fn check_text(name: &str, text: &str, max: usize) -> Result<(), NvmfTargetError> {
    let printable = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if printable && (1..=max).contains(&text.len()) {
        return Ok(());
    }
    Err(NvmfTargetError::Parameter(format!("{name} '{text}' is not 1 to {max} printable ASCII characters")))
}

/// Closes a TCP port. The first group owns all TCP listeners.
fn unlisten<N: CoreNetwork>(state: &TargetState<N>, portid: u16) -> Result<(), NvmfTargetError> {
    let Some(first) = state.transport.as_ref().and_then(|transport| transport.groups.first()) else {
        return Ok(());
    };
    let (reply, outcome) = sync_channel(1);
    send(first, TcpGroupMessage::Unlisten { portid, reply })?;
    wait(&outcome)
}

fn send<M>(group: &MailboxSender<M>, message: M) -> Result<(), NvmfTargetError> {
    group.send(message).map_err(|_| NvmfTargetError::Stopping)
}

/// Waits for a group's reply. A group that has stopped drops the message, which is `Stopping`.
fn wait<T>(outcome: &Receiver<T>) -> Result<T, NvmfTargetError> {
    // A reactor that is stopping may leave the message unread. Two seconds are thousands of poll iterations.
    blocking::receive_timeout(outcome, std::time::Duration::from_secs(2))
        .map_err(|_| NvmfTargetError::Stopping)
}
