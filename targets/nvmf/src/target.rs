//! The control plane: what is configured, and how groups come to know of it.

mod ana;
mod info;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bdev::{Access, Descriptor, DeviceEvent, Registry, Uuid};
use controller::reservation::Reservations;
use controller::{Directory, DiscoveryLog, DiscoveryRecord, Hosts, Listener, Namespace, Subsystem};
use net::Sockets;
use reactor::{Period, Remote, Sender};
use ring::Op;
use wire_nvme::fabrics::Nqn;
use wire_nvme::log::SubsystemType;

use crate::address::{ListenAddress, transport_address};
use crate::failure::TargetError;
use crate::group::{Board, Group, Message};
use crate::group_poller::GroupPoller;
use crate::limits::TransportConfig;
use crate::picture::Picture;
use crate::ptpl::{self, PtplError, Writer};
use crate::vfio_user::{self, Fault, VfioUserConfig};

pub use info::{ControllerInfo, NamespaceInfo, QpairInfo, SubsystemInfo, TargetStats};

type GroupSender = Sender<Message<std::net::TcpStream>>;

/// Name under which the target claims block devices.
const CLAIM: &str = "NVMe-oF Target";
/// Messages that can wait at a group.
const MESSAGES_MAX: usize = 1024;

/// The target. Cheap to clone; for any thread but a reactor's: calls wait until every group has
/// taken the change over.
#[derive(Clone)]
pub struct Target(Arc<Inner>);

struct Inner {
    registry: Registry,
    remotes: Vec<Remote>,
    directory: Arc<Directory>,
    state: Mutex<State>,
    subscription: Mutex<Option<bdev::SubscriptionId>>,
}

#[derive(Default)]
struct State {
    transport: Option<Transport>,
    vfio_user: Option<VfioUser>,
    subsystems: BTreeMap<Nqn, Configured>,
    ports: Vec<Port>,
    ports_made: u16,
    keys_made: u32,
    keys_free: Vec<u32>,
    generation: u64,
    ptpl: Option<Writer>,
    stopping: bool,
}

struct Transport {
    config: TransportConfig,
    groups: Vec<GroupSender>,
}

struct VfioUser {
    config: VfioUserConfig,
    groups: Vec<Sender<vfio_user::Message>>,
}

/// A subsystem as it was configured.
struct Configured {
    subsystem: Arc<Subsystem>,
    listeners: Vec<ListenAddress>,
    descriptors: BTreeMap<u32, Arc<Descriptor>>,
    /// The files that reservations are kept in.
    ptpl_files: BTreeMap<u32, String>,
}

/// An address that is listened on, for one subsystem or several.
struct Port {
    portid: u16,
    address: ListenAddress,
    /// The group that listens.
    group: usize,
}

/// Options of a new subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemConfig {
    /// Serial number, 1 to 20 printable ASCII characters.
    pub serial_number: String,
    /// Model number, 1 to 40 printable ASCII characters.
    pub model_number: String,
    /// Every host may connect.
    pub allow_any_host: bool,
    /// Most namespaces; identifiers are 1 to this.
    pub max_namespaces: u32,
    /// Smallest controller identifier.
    pub min_cntlid: u16,
    /// Largest controller identifier.
    pub max_cntlid: u16,
    /// Asymmetric namespace access is reported.
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
    /// Identifier; `None` for the first that is free.
    pub nsid: Option<u32>,
    /// Globally unique identifier; `None` for one made from the UUID.
    pub nguid: Option<[u8; 16]>,
    /// Extended unique identifier; `None` for none.
    pub eui64: Option<[u8; 8]>,
    /// UUID; `None` for the block device's.
    pub uuid: Option<Uuid>,
    /// ANA group; `None` for the one with the namespace's identifier.
    pub anagrpid: Option<u32>,
    /// File in which registrations and the reservation survive a power loss, if a host wants that; with `None` none
    /// does.
    pub ptpl_file: Option<String>,
}

impl NamespaceConfig {
    /// The block device with identifiers of its own.
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

impl Target {
    /// A target without subsystems, on these reactors.
    pub fn new(registry: Registry, reactors: &[Remote]) -> Target {
        let inner = Arc::new(Inner {
            registry,
            remotes: reactors.to_vec(),
            directory: Arc::new(Directory::new()),
            state: Mutex::default(),
            subscription: Mutex::new(None),
        });
        let weak: Weak<Inner> = Arc::downgrade(&inner);
        let id = inner.registry.subscribe(Box::new(move |event| {
            if let Some(inner) = weak.upgrade() {
                Target(inner).device_event(event);
            }
        }));
        *inner.subscription.lock().unwrap_or_else(PoisonError::into_inner) = Some(id);
        Target(inner)
    }

    /// Makes the TCP transport and a group on every reactor.
    pub fn create_transport(&self, config: TransportConfig) -> Result<(), TargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.transport.is_some() {
            return Err(TargetError::TransportExists("TCP"));
        }
        let boards: Arc<[Board]> = self.0.remotes.iter().map(|_| Board::default()).collect();
        let mut groups = Vec::new();
        for remote in &self.0.remotes {
            let (limits, directory, boards) = (limits.clone(), self.0.directory.clone(), boards.clone());
            let sender = remote.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let network = Sockets::new(core.events()).spinning(core.spins());
                let (me, all) = (sender.clone(), directory.clone());
                let mut group = Group::new(core, network, limits, directory, boards, messages);
                // A group whose mailbox is full is awake without the message.
                group.bell = Some(all.bell(Box::new(move || _ = me.send(Message::Look))));
                core.add_poller(Box::new(GroupPoller { core: core.clone(), group }), Period::EveryTurn);
                sender
            });
            groups.push(sender.map_err(|_| TargetError::Stopping)?);
        }
        for group in &groups {
            send(group, Message::Peers(groups.clone()))?;
        }
        state.transport = Some(Transport { config, groups });
        self.publish(&mut state)
    }

    /// Makes the vfio-user transport and a group on every reactor.
    pub fn create_vfio_user(&self, config: VfioUserConfig) -> Result<(), TargetError> {
        let limits = config.limits()?;
        let mut state = self.lock()?;
        if state.vfio_user.is_some() {
            return Err(TargetError::TransportExists("VFIOUSER"));
        }
        let mut groups = Vec::new();
        for remote in &self.0.remotes {
            let (limits, directory) = (limits.clone(), self.0.directory.clone());
            let sender = remote.call(move |core| {
                let (sender, messages) = core.mailbox(MESSAGES_MAX);
                let shared = vfio_user::Shared { limits, directory, picture: Arc::default() };
                let me = sender.clone();
                let wake = Box::new(move || _ = me.send(vfio_user::Message::Look));
                let bell = shared.directory.bell(wake);
                let group = vfio_user::Group::new(core, shared, messages, bell);
                let poller = GroupPoller { core: core.clone(), group };
                core.add_poller(Box::new(poller), Period::EveryTurn);
                sender
            });
            groups.push(sender.map_err(|_| TargetError::Stopping)?);
        }
        state.vfio_user = Some(VfioUser { config, groups });
        self.publish(&mut state)
    }

    /// The vfio-user transport's options, if it was made.
    pub fn vfio_user(&self) -> Option<VfioUserConfig> {
        self.lock_any().vfio_user.as_ref().map(|transport| transport.config.clone())
    }

    /// Lets something go wrong with the controller that a vfio-user listener has given its client.
    pub fn inject(&self, traddr: &str, fault: Fault) -> Result<(), TargetError> {
        let wanted = ListenAddress::vfio_user(traddr).normal()?;
        let state = self.lock()?;
        let none = || TargetError::Parameter(format!("no client is connected at {}", wanted.traddr));
        let port = state.ports.iter().find(|port| port.address == wanted).ok_or_else(none)?;
        let transport = state.vfio_user.as_ref().ok_or(TargetError::NoTransport("VFIOUSER"))?;
        let (answer, outcome) = sync_channel(1);
        let message = vfio_user::Message::Inject { portid: port.portid, fault, answer };
        send(&transport.groups[port.group], message)?;
        if wait(&outcome)? { Ok(()) } else { Err(none()) }
    }

    /// The transport's options, if it was made.
    pub fn transports(&self) -> Vec<TransportConfig> {
        let state = self.lock_any();
        state.transport.iter().map(|transport| transport.config.clone()).collect()
    }

    /// Makes a subsystem. The discovery subsystem is always there.
    pub fn create_subsystem(&self, nqn: &str, config: SubsystemConfig) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        check_text("serial_number", &config.serial_number, 20)?;
        check_text("model_number", &config.model_number, 40)?;
        let parameter = |text: String| Err(TargetError::Parameter(text));
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
            return Err(TargetError::SubsystemExists(nqn.as_str().into()));
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
        let configured = Configured {
            subsystem,
            listeners: Vec::new(),
            descriptors: BTreeMap::new(),
            ptpl_files: BTreeMap::new(),
        };
        state.subsystems.insert(nqn, configured);
        self.publish(&mut state)
    }

    /// Removes a subsystem: hosts are disconnected, block devices given back.
    ///
    /// As with everything that takes a host's way away, what it has under way is answered first, for three
    /// seconds at most, and nothing more is taken from it. This returns before that.
    pub fn delete_subsystem(&self, nqn: &str) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let removed = state.subsystems.remove(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        self.publish(&mut state)?;
        let keys = removed.subsystem.namespaces.iter().map(|namespace| namespace.backend);
        state.keys_free.extend(keys);
        for address in &removed.listeners {
            self.drop_port(&mut state, address)?;
        }
        Ok(())
    }

    /// Adds a namespace and returns its identifier.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, TargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        let configured = state.subsystems.get(&nqn).ok_or_else(|| no_subsystem(&nqn))?;
        let subsystem = configured.subsystem.clone();
        let refuse = |nsid, why| Err(TargetError::Namespace(nqn.as_str().into(), nsid, why));
        let nsid = match config.nsid {
            Some(nsid) if !subsystem.is_valid_nsid(nsid) => {
                return refuse(nsid, "the identifier is not 1 to max_namespaces");
            }
            Some(nsid) if subsystem.namespace(nsid).is_some() => return refuse(nsid, "it exists"),
            Some(nsid) => nsid,
            None => match (1..=subsystem.namespaces_max).find(|nsid| subsystem.namespace(*nsid).is_none()) {
                Some(nsid) => nsid,
                None => return refuse(subsystem.namespaces_max, "all identifiers are in use"),
            },
        };
        let descriptor = Arc::new(self.0.registry.open(&config.bdev_name, Access::Exclusive { by: CLAIM })?);
        let block_size = descriptor.device().geometry().block_size;
        if !block_size.is_power_of_two() || block_size < 512 {
            return refuse(nsid, "the block size is no power of 2 from 512 on");
        }
        let reservations = match &config.ptpl_file {
            Some(file) => state.kept(file, descriptor.device().uuid())?,
            None => Reservations::default(),
        };
        let key = state.keys_free.pop().unwrap_or_else(|| {
            state.keys_made += 1;
            state.keys_made - 1
        });
        let reservations = Arc::new(reservations);
        let namespace = Namespace { reservations, ..namespace_of(&descriptor, nsid, key, &config) };
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

    /// Removes a namespace. Hosts are told; what is under way completes.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        let mut state = self.lock()?;
        self.take_namespace(&mut state, &nqn, nsid)
    }

    fn take_namespace(&self, state: &mut State, nqn: &Nqn, nsid: u32) -> Result<(), TargetError> {
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let Some(namespace) = configured.subsystem.namespace(nsid) else {
            return Err(TargetError::NoNamespace(nqn.as_str().into(), nsid));
        };
        let key = namespace.backend;
        configured.change(|subsystem| subsystem.namespaces.retain(|namespace| namespace.nsid != nsid));
        let descriptor = configured.descriptors.remove(&nsid);
        configured.ptpl_files.remove(&nsid);
        self.publish(state)?;
        // Every group has let go of the key; the claim ends with the last channel.
        state.keys_free.push(key);
        drop(descriptor);
        Ok(())
    }

    /// Lets hosts reach a subsystem at an address; listens there if nobody did. Returns the address,
    /// with the port that was found for port 0.
    pub fn add_listener(&self, nqn: &str, address: ListenAddress) -> Result<ListenAddress, TargetError> {
        let nqn = parse_nqn(nqn)?;
        let wanted = address.normal()?;
        if wanted.is_vfio_user() {
            return self.add_endpoint(nqn, wanted);
        }
        let socket = address.socket()?;
        let mut state = self.lock()?;
        if !nqn.is_discovery() && !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        let known = state.ports.iter().find(|port| port.address == wanted).map(|port| port.portid);
        if known.is_some() && nqn.is_discovery() {
            return Ok(wanted);
        }
        let portid = match known {
            Some(portid) => portid,
            None => {
                let portid = state.ports_made.wrapping_add(1).max(1);
                let transport = state.transport.as_ref().ok_or(TargetError::NoTransport("TCP"))?;
                let (answer, outcome) = sync_channel(1);
                let first = transport.groups.first().ok_or(TargetError::NoTransport("TCP"))?;
                send(first, Message::Listen { address: socket, portid, answer })?;
                let bound = wait(&outcome)?;
                let bound = bound.map_err(|error| TargetError::Listen(socket.to_string(), error))?;
                state.ports_made = portid;
                state.ports.push(Port { portid, address: ListenAddress::from_socket(bound), group: 0 });
                portid
            }
        };
        let port = state.ports.iter().find(|port| port.portid == portid);
        let bound = port.map_or(wanted, |port| port.address.clone());
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            if configured.listeners.contains(&bound) {
                return Err(TargetError::ListenerExists(nqn.as_str().into(), socket.to_string()));
            }
            configured.listeners.push(bound.clone());
            configured.change(|subsystem| subsystem.listeners.push(Listener { portid, ana: Vec::new() }));
        }
        self.publish(&mut state)?;
        Ok(bound)
    }

    /// Serves a subsystem in a directory: one socket, one subsystem, and one client at a time.
    fn add_endpoint(&self, nqn: Nqn, address: ListenAddress) -> Result<ListenAddress, TargetError> {
        let mut state = self.lock()?;
        if !state.subsystems.contains_key(&nqn) {
            return Err(no_subsystem(&nqn));
        }
        if state.ports.iter().any(|port| port.address == address) {
            return Err(TargetError::ListenerExists("there".into(), address.traddr));
        }
        let portid = state.ports_made.wrapping_add(1).max(1);
        let transport = state.vfio_user.as_ref().ok_or(TargetError::NoTransport("VFIOUSER"))?;
        // Where the fewest are.
        let load = |group: &usize| {
            state.ports.iter().filter(|port| port.address.is_vfio_user() && port.group == *group).count()
        };
        let group = (0..transport.groups.len()).min_by_key(load);
        let group = group.ok_or(TargetError::NoTransport("VFIOUSER"))?;
        let sender = transport.groups[group].clone();
        // The subsystem is to be reached through the port before the first client is there.
        state.ports_made = portid;
        state.ports.push(Port { portid, address: address.clone(), group });
        if let Some(configured) = state.subsystems.get_mut(&nqn) {
            configured.listeners.push(address.clone());
            configured.change(|subsystem| subsystem.listeners.push(Listener { portid, ana: Vec::new() }));
        }
        self.publish(&mut state)?;
        let (answer, outcome) = sync_channel(1);
        let directory = address.traddr.clone();
        send(&sender, vfio_user::Message::Listen { directory, nqn: nqn.clone(), portid, answer })?;
        if let Err(error) = wait(&outcome)? {
            state.ports.retain(|port| port.portid != portid);
            if let Some(configured) = state.subsystems.get_mut(&nqn) {
                configured.listeners.retain(|listener| *listener != address);
                configured.change(|subsystem| subsystem.listeners.retain(|one| one.portid != portid));
            }
            self.publish(&mut state)?;
            return Err(TargetError::Listen(address.traddr, error));
        }
        Ok(address)
    }

    /// Hosts can no longer reach a subsystem at an address; those that came that way are disconnected, after
    /// what they have under way is answered.
    pub fn remove_listener(&self, nqn: &str, address: ListenAddress) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        let wanted = address.normal()?;
        let mut state = self.lock()?;
        if nqn.is_discovery() {
            state.port(&nqn, &wanted)?;
        } else {
            let (portid, configured) = state.listener(&nqn, &wanted)?;
            configured.listeners.retain(|listener| *listener != wanted);
            configured.change(|subsystem| subsystem.listeners.retain(|listener| listener.portid != portid));
        }
        self.publish(&mut state)?;
        self.drop_port(&mut state, &wanted)
    }

    /// Stops listening where no subsystem is reached any more.
    fn drop_port(&self, state: &mut State, address: &ListenAddress) -> Result<(), TargetError> {
        if state.subsystems.values().any(|configured| configured.listeners.contains(address)) {
            return Ok(());
        }
        let Some(position) = state.ports.iter().position(|port| port.address == *address) else {
            return Ok(());
        };
        let Port { portid, group, .. } = state.ports.remove(position);
        if address.is_vfio_user() {
            if let Some(transport) = &state.vfio_user {
                let (answer, outcome) = sync_channel(1);
                send(&transport.groups[group], vfio_user::Message::Unlisten { portid, answer })?;
                wait(&outcome)?;
            }
        } else {
            unlisten(state, portid)?;
        }
        self.publish(state)
    }

    /// Takes no more connections over TCP; hosts that are connected stay. Each port is free when this
    /// returns: what io_uring holds of a process that has ended, the kernel gives back only a while later.
    pub fn stop_listening(&self) -> Result<(), TargetError> {
        let state = self.lock()?;
        let mut ports = state.ports.iter().filter(|port| !port.address.is_vfio_user());
        ports.try_for_each(|port| unlisten(&state, port.portid))
    }

    /// Lets a host connect.
    pub fn add_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change(&nqn, |subsystem| {
            if subsystem.hosts.insert(host.clone()) {
                Ok(())
            } else {
                Err(TargetError::HostExists(host.as_str().into(), nqn.as_str().into()))
            }
        })
    }

    /// A host can no longer connect, and is disconnected after what it has under way is answered.
    pub fn remove_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        let (nqn, host) = (parse_nqn(nqn)?, parse_nqn(host)?);
        self.change(&nqn, |subsystem| {
            if subsystem.hosts.remove(&host) {
                Ok(())
            } else {
                Err(TargetError::NoHost(host.as_str().into(), nqn.as_str().into()))
            }
        })
    }

    /// Lets every host connect, or only those on the list; others are disconnected as by
    /// [`remove_host`](Self::remove_host).
    pub fn allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), TargetError> {
        let nqn = parse_nqn(nqn)?;
        self.change(&nqn, |subsystem| {
            subsystem.allow_any_host = allow;
            Ok(())
        })
    }

    /// Takes no further calls. Hosts are disconnected when the reactors stop, each after what it had
    /// under way has been answered.
    pub fn shutdown(&self) {
        self.lock_any().stopping = true;
        let subscription = self.0.subscription.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(id) = subscription {
            self.0.registry.unsubscribe(id);
        }
    }

    fn change(
        &self,
        nqn: &Nqn,
        change: impl FnOnce(&mut Subsystem) -> Result<(), TargetError>,
    ) -> Result<(), TargetError> {
        let mut state = self.lock()?;
        let configured = state.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        let mut subsystem = (*configured.subsystem).clone();
        change(&mut subsystem)?;
        configured.subsystem = Arc::new(subsystem);
        self.publish(&mut state)
    }

    /// A block device was resized or removed.
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
            let done = match event {
                DeviceEvent::Removed(_) => self.take_namespace(&mut state, &nqn, nsid),
                DeviceEvent::Resized(device) => {
                    let blocks = device.geometry().blocks;
                    if let Some(configured) = state.subsystems.get_mut(&nqn) {
                        configured.change(|subsystem| {
                            let of = |namespace: &&mut Namespace| namespace.nsid == nsid;
                            if let Some(namespace) = subsystem.namespaces.iter_mut().find(of) {
                                namespace.blocks = blocks;
                            }
                        });
                    }
                    self.publish(&mut state)
                }
                DeviceEvent::Registered(_) => Ok(()),
            };
            if let Err(error) = done {
                eprintln!("nvmf: {nqn}: namespace {nsid} on {name}: {error}");
            }
        }
    }

    /// Makes a new picture and waits until every group has it.
    fn publish(&self, state: &mut State) -> Result<(), TargetError> {
        state.generation += 1;
        let mut picture = Picture { discovery: Arc::new(state.discovery()), ..Picture::default() };
        let discovery = Nqn::discovery();
        let listeners = state.ports.iter().map(|port| Listener { portid: port.portid, ana: Vec::new() });
        let service = Subsystem { listeners: listeners.collect(), ..Subsystem::discovery(discovery.clone()) };
        picture.subsystems.insert(discovery, Arc::new(service));
        for (nqn, configured) in &state.subsystems {
            // A subsystem without listeners cannot be reached; with an empty list it could everywhere.
            if configured.subsystem.listeners.is_empty() {
                let nowhere = vec![Listener { portid: 0, ana: Vec::new() }];
                let hidden = Subsystem { listeners: nowhere, ..(*configured.subsystem).clone() };
                picture.subsystems.insert(nqn.clone(), Arc::new(hidden));
            } else {
                picture.subsystems.insert(nqn.clone(), configured.subsystem.clone());
            }
            for namespace in &configured.subsystem.namespaces {
                if let Some(descriptor) = configured.descriptors.get(&namespace.nsid) {
                    picture.devices.insert(namespace.backend, descriptor.clone());
                }
            }
        }
        let picture = Arc::new(picture);
        let mut outcomes = Vec::new();
        for group in state.transport.iter().flat_map(|transport| &transport.groups) {
            let (answer, outcome) = sync_channel(1);
            send(group, Message::Apply(picture.clone(), answer))?;
            outcomes.push(outcome);
        }
        for group in state.vfio_user.iter().flat_map(|transport| &transport.groups) {
            let (answer, outcome) = sync_channel(1);
            send(group, vfio_user::Message::Apply(picture.clone(), answer))?;
            outcomes.push(outcome);
        }
        for outcome in &outcomes {
            wait(outcome)?;
        }
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, State>, TargetError> {
        let state = self.lock_any();
        if state.stopping { Err(TargetError::Stopping) } else { Ok(state) }
    }

    fn lock_any(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Most namespaces of a subsystem. Each costs 32 bytes in the table of every I/O queue.
const NAMESPACES_MAX: u32 = 8192;

impl Configured {
    fn change(&mut self, change: impl FnOnce(&mut Subsystem)) {
        change(Arc::make_mut(&mut self.subsystem));
    }
}

impl State {
    /// Reservations of a device that a file keeps. The file is written at once, so that what cannot be kept is
    /// refused now, not when it counts.
    fn kept(&mut self, file: &str, device: Uuid) -> Result<Reservations, TargetError> {
        let path = Path::new(file);
        let mut files = self.subsystems.values().flat_map(|configured| configured.ptpl_files.values());
        if files.any(|other| other == file) {
            return Err(TargetError::Parameter(format!(
                "ptpl_file {file} keeps another namespace's reservations"
            )));
        }
        let state = ptpl::load(path, device)?;
        let failed = |error| PtplError::Io(path.into(), error);
        sys::replace_file(path, &ptpl::encode(&state, device)).map_err(failed)?;
        let writer = match &self.ptpl {
            Some(writer) => writer.clone(),
            None => self.ptpl.insert(Writer::start().map_err(failed)?).clone(),
        };
        Ok(Reservations::kept(state, writer.keeper(path, device)))
    }

    /// The number of a port through which some subsystem is reached.
    fn port(&self, nqn: &Nqn, address: &ListenAddress) -> Result<u16, TargetError> {
        let port = self.ports.iter().find(|port| port.address == *address);
        port.map(|port| port.portid).ok_or_else(|| no_listener(nqn, address))
    }

    /// A subsystem, and the number of the port through which it is reached at an address.
    fn listener(
        &mut self,
        nqn: &Nqn,
        address: &ListenAddress,
    ) -> Result<(u16, &mut Configured), TargetError> {
        let portid = self.port(nqn, address);
        let configured = self.subsystems.get_mut(nqn).ok_or_else(|| no_subsystem(nqn))?;
        if !configured.listeners.contains(address) {
            return Err(no_listener(nqn, address));
        }
        Ok((portid?, configured))
    }

    /// What there is to discover: every way to every subsystem, and to this discovery service.
    fn discovery(&self) -> DiscoveryLog {
        let mut records = Vec::new();
        let nvm = self.subsystems.iter().flat_map(|(nqn, configured)| {
            let hosts = if configured.subsystem.allow_any_host {
                Hosts::Any
            } else {
                Hosts::Only(configured.subsystem.hosts.clone())
            };
            let ports = self.ports.iter().filter(|port| configured.listeners.contains(&port.address));
            ports.map(move |port| (nqn.clone(), SubsystemType::Nvm, port, hosts.clone()))
        });
        let service = self
            .ports
            .iter()
            .map(|port| (Nqn::discovery(), SubsystemType::CurrentDiscovery, port, Hosts::Any));
        for (subnqn, subtype, port, hosts) in service.chain(nvm) {
            let Ok(socket) = port.address.socket() else { continue };
            let address = transport_address(socket);
            records.push(DiscoveryRecord { subnqn, subtype, address, portid: port.portid, hosts });
        }
        DiscoveryLog { generation: self.generation, records }
    }
}

fn namespace_of(descriptor: &Descriptor, nsid: u32, key: u32, config: &NamespaceConfig) -> Namespace {
    let device = descriptor.device();
    let geometry = device.geometry();
    let uuid = config.uuid.unwrap_or_else(|| device.uuid());
    Namespace {
        bdev: device.name().to_string(),
        backend: key,
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
        ..Namespace::new(nsid, geometry.blocks)
    }
}

fn parse_nqn(text: &str) -> Result<Nqn, TargetError> {
    Nqn::new(text).map_err(|_| TargetError::Nqn(text.into()))
}

fn no_listener(nqn: &Nqn, address: &ListenAddress) -> TargetError {
    TargetError::NoListener(nqn.as_str().into(), format!("{}:{}", address.traddr, address.trsvcid))
}

fn no_subsystem(nqn: &Nqn) -> TargetError {
    TargetError::NoSubsystem(nqn.as_str().into())
}

fn check_text(name: &str, text: &str, max: usize) -> Result<(), TargetError> {
    let printable = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    if printable && (1..=max).contains(&text.len()) {
        return Ok(());
    }
    Err(TargetError::Parameter(format!("{name} '{text}' is not 1 to {max} printable ASCII characters")))
}

/// The first group listens for all.
fn unlisten(state: &State, portid: u16) -> Result<(), TargetError> {
    let Some(first) = state.transport.as_ref().and_then(|transport| transport.groups.first()) else {
        return Ok(());
    };
    let (answer, outcome) = sync_channel(1);
    send(first, Message::Unlisten { portid, answer })?;
    wait(&outcome)
}

fn send<M>(group: &Sender<M>, message: M) -> Result<(), TargetError> {
    group.send(message).map_err(|_| TargetError::Stopping)
}

/// Waits for a group's answer; a group that has stopped drops what it was sent.
fn wait<T>(outcome: &Receiver<T>) -> Result<T, TargetError> {
    // A reactor that stops at this moment may leave the message unread; two seconds are thousands of
    // turns.
    outcome.recv_timeout(std::time::Duration::from_secs(2)).map_err(|_| TargetError::Stopping)
}
