//! The control plane's handle of the target: portal groups, initiator groups and target nodes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::{Access, BlockDevice, Descriptor, DeviceEvent, Registry, ReservationLease};
use reactor::ReactorHandle;
use scsi::{LogicalUnit, UnitConfig};
use sockets::StreamAddress;
use target_shell::{DeviceKeys, GroupLimits, Publisher, TargetCores};

use crate::config::{
    InitiatorGroup, IscsiConfig, IscsiOptions, Netmask, NodeUnit, Portal, PortalGroup, TargetNode,
    is_iscsi_name,
};
use crate::core::IscsiCore;
use crate::failure::IscsiTargetError;
use crate::limits::{
    CONNECTIONS_MAX, FIRST_BURST_BYTES_MAX, GROUP_ENTRIES_MAX, LUNS_MAX, OBJECTS_MAX, PORTALS_MAX,
    QUEUE_DEPTH_DEFAULT, QUEUE_DEPTH_MAX,
};
use crate::parameters::DigestPolicy;
use crate::session::isid_number;
use crate::sessions::Sessions;

/// Addresses to listen at, under one portal group tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortalGroupConfig {
    /// The tag, from 1.
    pub tag: u16,
    /// The addresses; port 0 for any free one.
    pub portals: Vec<SocketAddr>,
    /// Discovery does not list it.
    pub private: bool,
}

/// Who may log in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitiatorGroupConfig {
    /// The tag, from 1.
    pub tag: u32,
    /// Names of initiators, or `ANY`; `!` before a name denies it. The first that matches decides.
    pub initiators: Vec<String>,
    /// Addresses of initiators, one of which has to match.
    pub netmasks: Vec<Netmask>,
}

/// A target that initiators log in to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetNodeConfig {
    /// An iSCSI name, or what follows the node base in it.
    pub name: String,
    /// A text for humans.
    pub alias: String,
    /// Tags of portal groups, each with the tag of an initiator group that it admits.
    pub maps: Vec<(u16, u32)>,
    /// Block devices by name, alias or UUID, each with its LUN.
    pub luns: Vec<(String, u16)>,
    /// Commands of a session in flight.
    pub queue_depth: u32,
    /// Initiators have to use header digests.
    pub header_digest: bool,
    /// Initiators have to use data digests.
    pub data_digest: bool,
}

/// A connection of an initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The reactor that serves it.
    pub core: usize,
    /// Name of the initiator.
    pub initiator: String,
    /// The initiator's part of the session's identifier.
    pub isid: u64,
    /// The target's part of it.
    pub tsih: u16,
    /// The initiator's name of the connection.
    pub cid: u16,
    /// Name of the target node; `None` in a discovery session.
    pub node: Option<String>,
    /// Tag of the portal group.
    pub portal_group: u16,
    /// Address of the initiator.
    pub peer: StreamAddress,
    /// Whether header digests are in use.
    pub header_digest: bool,
    /// Whether data digests are in use.
    pub data_digest: bool,
}

impl PortalGroupConfig {
    /// A public portal group.
    pub fn new(tag: u16, portals: Vec<SocketAddr>) -> PortalGroupConfig {
        PortalGroupConfig { tag, portals, private: false }
    }
}

impl InitiatorGroupConfig {
    /// A group that admits every initiator.
    pub fn anyone(tag: u32) -> InitiatorGroupConfig {
        InitiatorGroupConfig {
            tag,
            initiators: vec![crate::config::ANY.to_string()],
            netmasks: vec![Netmask::Any],
        }
    }
}

impl TargetNodeConfig {
    /// A target node with default parameters.
    pub fn new(name: &str, maps: Vec<(u16, u32)>, luns: Vec<(String, u16)>) -> TargetNodeConfig {
        TargetNodeConfig {
            name: name.to_string(),
            alias: String::new(),
            maps,
            luns,
            queue_depth: QUEUE_DEPTH_DEFAULT,
            header_digest: false,
            data_digest: false,
        }
    }
}

/// The iSCSI target of a program. Cheap to clone.
///
/// Calls block for up to [`CORE_TIMEOUT`](target_shell::CORE_TIMEOUT) and must not be made on a reactor. The groups of
/// connections start with the first portal group, so that a program without iSCSI does not pay for them.
#[derive(Clone)]
pub struct IscsiTarget(Arc<TargetShared>);

struct TargetShared {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    publisher: Publisher<IscsiConfig>,
    sessions: Arc<Sessions>,
    state: Mutex<TargetState>,
}

#[derive(Default)]
struct TargetState {
    cores: Option<TargetCores<IscsiCore>>,
    model: Model,
    keys: DeviceKeys,
    last_portid: u16,
    last_id: u64,
    stopping: bool,
}

/// What is configured. A change works on a copy, which replaces it when all cores have applied it.
#[derive(Clone, Default)]
struct Model {
    options: IscsiOptions,
    portal_groups: BTreeMap<u16, Arc<PortalGroup>>,
    initiator_groups: BTreeMap<u32, Arc<InitiatorGroup>>,
    nodes: BTreeMap<String, Node>,
}

#[derive(Clone)]
struct Node {
    target: Arc<TargetNode>,
    units: Vec<UnitDevice>,
}

/// The device of a logical unit.
#[derive(Clone)]
struct UnitDevice {
    unit: NodeUnit,
    descriptor: Arc<Descriptor>,
    /// Keeps the device's reservations.
    _reservations: Arc<ReservationLease>,
}

impl IscsiTarget {
    /// A target without portals.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> IscsiTarget {
        let shared = Arc::new(TargetShared {
            registry: registry.clone(),
            reactors: reactors.to_vec(),
            publisher: Publisher::default(),
            sessions: Arc::default(),
            state: Mutex::default(),
        });
        let target = Arc::downgrade(&shared);
        registry.subscribe(Box::new(move |event| {
            if let Some(shared) = target.upgrade() {
                IscsiTarget(shared).device_event(event);
            }
        }));
        IscsiTarget(shared)
    }

    /// The options.
    pub fn options(&self) -> IscsiOptions {
        self.lock_any().model.options.clone()
    }

    /// Changes the options.
    ///
    /// # Errors
    /// One is invalid, or a reactor does not respond; nothing has changed then.
    pub fn set_options(&self, options: IscsiOptions) -> Result<(), IscsiTargetError> {
        if !(512..=FIRST_BURST_BYTES_MAX).contains(&options.first_burst_bytes) {
            let message = format!("first_burst_length: expected 512 to {FIRST_BURST_BYTES_MAX}");
            return Err(IscsiTargetError::Invalid(message));
        }
        self.change(|model| {
            model.options = options;
            Ok(())
        })
    }

    /// Creates a portal group and listens at its addresses. Returns them with the ports that the kernel assigned.
    ///
    /// # Errors
    /// The tag is in use, an address cannot be listened at, or a reactor does not respond; nothing has changed then.
    pub fn create_portal_group(
        &self,
        config: PortalGroupConfig,
    ) -> Result<Vec<SocketAddr>, IscsiTargetError> {
        let mut state = self.lock()?;
        if config.tag == 0 {
            return Err(IscsiTargetError::Invalid("tag: 0 is no tag of a portal group".into()));
        }
        if state.model.portal_groups.contains_key(&config.tag) {
            return Err(IscsiTargetError::Exists(format!("portal group {}", config.tag)));
        }
        check_count(state.model.portal_groups.len(), OBJECTS_MAX)?;
        check_count(config.portals.len().saturating_sub(1), PORTALS_MAX)?;
        let mut group = PortalGroup { tag: config.tag, private: config.private, portals: Vec::new() };
        let result = self.listen(&mut state, &config.portals, &mut group).and_then(|()| {
            let group = Arc::new(group.clone());
            self.change_locked(&mut state, |model| {
                model.portal_groups.insert(group.tag, group);
                Ok(())
            })
        });
        if let Err(error) = result {
            state.unlisten(&group);
            return Err(error);
        }
        Ok(group.portals.iter().map(|portal| portal.address).collect())
    }

    /// Deletes a portal group: its listeners, its connections, and the maps of target nodes that name it.
    ///
    /// # Errors
    /// There is none, or a reactor does not respond; nothing has changed then.
    pub fn delete_portal_group(&self, tag: u16) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        let group = state.model.portal_groups.get(&tag).cloned();
        let group = group.ok_or_else(|| IscsiTargetError::NotFound(format!("portal group {tag}")))?;
        self.change_locked(&mut state, |model| {
            model.portal_groups.remove(&tag);
            model.retain_maps(|(portal_group, _)| *portal_group != tag);
            Ok(())
        })?;
        state.unlisten(&group);
        Ok(())
    }

    /// The portal groups by tag, with the ports that the kernel assigned.
    pub fn portal_groups(&self) -> Vec<PortalGroupConfig> {
        let state = self.lock_any();
        let groups = state.model.portal_groups.values().map(|group| PortalGroupConfig {
            tag: group.tag,
            portals: group.portals.iter().map(|portal| portal.address).collect(),
            private: group.private,
        });
        groups.collect()
    }

    /// Creates an initiator group.
    ///
    /// # Errors
    /// The tag is in use, an entry is invalid, or a reactor does not respond; nothing has changed then.
    pub fn create_initiator_group(&self, config: InitiatorGroupConfig) -> Result<(), IscsiTargetError> {
        let InitiatorGroupConfig { tag, initiators, netmasks } = config;
        let group = Arc::new(InitiatorGroup { tag, initiators, netmasks });
        self.change(|model| {
            if tag == 0 {
                return Err(IscsiTargetError::Invalid("tag: 0 is no tag of an initiator group".into()));
            }
            if model.initiator_groups.contains_key(&tag) {
                return Err(IscsiTargetError::Exists(format!("initiator group {tag}")));
            }
            check_count(model.initiator_groups.len(), OBJECTS_MAX)?;
            check_group(&group)?;
            model.initiator_groups.insert(tag, group);
            Ok(())
        })
    }

    /// Changes the entries of an initiator group. Sessions that exist go on.
    ///
    /// # Errors
    /// There is no such group, `change` fails, an entry is invalid, or a reactor does not respond; nothing has changed
    /// then.
    pub fn change_initiator_group(
        &self,
        tag: u32,
        change: impl FnOnce(&mut Vec<String>, &mut Vec<Netmask>) -> Result<(), IscsiTargetError>,
    ) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let group = model.initiator_groups.get_mut(&tag);
            let group = group.ok_or_else(|| IscsiTargetError::NotFound(format!("initiator group {tag}")))?;
            let group = Arc::make_mut(group);
            change(&mut group.initiators, &mut group.netmasks)?;
            check_group(group)
        })
    }

    /// Deletes an initiator group, and the maps of target nodes that name it. Sessions that exist go on.
    ///
    /// # Errors
    /// There is none, or a reactor does not respond; nothing has changed then.
    pub fn delete_initiator_group(&self, tag: u32) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let removed = model.initiator_groups.remove(&tag);
            removed.ok_or_else(|| IscsiTargetError::NotFound(format!("initiator group {tag}")))?;
            model.retain_maps(|(_, initiator_group)| *initiator_group != tag);
            Ok(())
        })
    }

    /// The initiator groups by tag.
    pub fn initiator_groups(&self) -> Vec<InitiatorGroupConfig> {
        let state = self.lock_any();
        let groups = state.model.initiator_groups.values().map(|group| InitiatorGroupConfig {
            tag: group.tag,
            initiators: group.initiators.clone(),
            netmasks: group.netmasks.clone(),
        });
        groups.collect()
    }

    /// Creates a target node. Returns its full name.
    ///
    /// # Errors
    /// The name is invalid or in use, a group or device is missing, or a reactor does not respond; nothing has changed
    /// then.
    pub fn create_node(&self, config: TargetNodeConfig) -> Result<String, IscsiTargetError> {
        let mut state = self.lock()?;
        let name = state.model.full_name(&config.name);
        if !is_iscsi_name(&name) {
            return Err(IscsiTargetError::Invalid(format!("name: {name} is no iSCSI name")));
        }
        if state.model.nodes.contains_key(&name) {
            return Err(IscsiTargetError::Exists(format!("the target node {name}")));
        }
        check_count(state.model.nodes.len(), OBJECTS_MAX)?;
        if !(1..=QUEUE_DEPTH_MAX).contains(&config.queue_depth) {
            let message = format!("queue_depth: expected 1 to {QUEUE_DEPTH_MAX}");
            return Err(IscsiTargetError::Invalid(message));
        }
        state.model.check_maps(&config.maps)?;
        check_luns(config.luns.iter().map(|(_, lun)| *lun))?;
        let mut units = Vec::new();
        for (device, lun) in &config.luns {
            match self.open_unit(&mut state, device, *lun) {
                Ok(unit) => units.push(unit),
                Err(error) => {
                    self.retire_units(&mut state, &units);
                    return Err(error);
                }
            }
        }
        state.last_id += 1;
        let target = TargetNode {
            id: state.last_id,
            name: name.clone(),
            alias: config.alias,
            maps: config.maps,
            queue_depth: config.queue_depth,
            digests: DigestPolicy {
                header_required: config.header_digest,
                data_required: config.data_digest,
            },
            units: Vec::new(),
        };
        let node = Node { target: Arc::new(target), units: units.clone() }.updated();
        let created = self.change_locked(&mut state, |model| {
            model.nodes.insert(name.clone(), node);
            Ok(())
        });
        if created.is_err() {
            self.retire_units(&mut state, &units);
        }
        created.map(|()| name)
    }

    /// Deletes a target node. Its connections complete what is in flight and are closed.
    ///
    /// # Errors
    /// There is none of this name, or a reactor does not respond; nothing has changed then.
    pub fn delete_node(&self, name: &str) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        let mut units = Vec::new();
        self.change_locked(&mut state, |model| {
            let name = model.full_name(name);
            units = model.nodes.remove(&name).ok_or_else(|| no_node(&name))?.units;
            Ok(())
        })?;
        self.retire_units(&mut state, &units);
        Ok(())
    }

    /// Adds a logical unit to a target node: with the smallest LUN that is free if none is given. Returns the LUN.
    ///
    /// # Errors
    /// There is no such node or device, the LUN is in use, or a reactor does not respond; nothing has changed then.
    pub fn add_lun(&self, name: &str, device: &str, lun: Option<u16>) -> Result<u16, IscsiTargetError> {
        let mut state = self.lock()?;
        let name = state.model.full_name(name);
        let node = state.model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
        let used: Vec<u16> = node.units.iter().map(|one| one.unit.lun).collect();
        let free = (0..LUNS_MAX as u16).find(|lun| !used.contains(lun));
        let lun = lun.or(free).ok_or(IscsiTargetError::TooMany(LUNS_MAX))?;
        check_luns(used.iter().copied().chain([lun]))?;
        let unit = self.open_unit(&mut state, device, lun)?;
        let added = self.change_locked(&mut state, |model| {
            model.change_node(&name, |node| node.units.push(unit.clone()))
        });
        if added.is_err() {
            self.retire_units(&mut state, &[unit]);
        }
        added.map(|()| lun)
    }

    /// Adds maps to a target node.
    ///
    /// # Errors
    /// There is no such node or group, or a reactor does not respond; nothing has changed then.
    pub fn add_maps(&self, name: &str, maps: &[(u16, u32)]) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            model.check_maps(maps)?;
            let name = model.full_name(name);
            let node = model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
            let new: Vec<_> = maps.iter().filter(|map| !node.target.maps.contains(map)).copied().collect();
            model.change_node(&name, |node| Arc::make_mut(&mut node.target).maps.extend(new))
        })
    }

    /// Removes maps from a target node. Sessions that exist go on.
    ///
    /// # Errors
    /// There is no such node or map, or a reactor does not respond; nothing has changed then.
    pub fn remove_maps(&self, name: &str, maps: &[(u16, u32)]) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let name = model.full_name(name);
            let node = model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
            if let Some((portals, initiators)) = maps.iter().find(|map| !node.target.maps.contains(map)) {
                let map = format!("map of portal group {portals} to initiator group {initiators}");
                return Err(IscsiTargetError::NotFound(map));
            }
            model.change_node(&name, |node| {
                Arc::make_mut(&mut node.target).maps.retain(|map| !maps.contains(map));
            })
        })
    }

    /// The target nodes by name, with the names of their devices.
    pub fn nodes(&self) -> Vec<TargetNodeConfig> {
        let state = self.lock_any();
        let nodes = state.model.nodes.values().map(|node| TargetNodeConfig {
            name: node.target.name.clone(),
            alias: node.target.alias.clone(),
            maps: node.target.maps.clone(),
            luns: node.units.iter().map(|one| (one.device().name().to_string(), one.unit.lun)).collect(),
            queue_depth: node.target.queue_depth,
            header_digest: node.target.digests.header_required,
            data_digest: node.target.digests.data_required,
        });
        nodes.collect()
    }

    /// The addresses of logical units for initiators: one for each portal of a target node, of its first LUN.
    pub fn uris(&self) -> Vec<String> {
        let state = self.lock_any();
        let mut uris = Vec::new();
        for node in state.model.nodes.values() {
            let tags = node.target.maps.iter().map(|(tag, _)| tag);
            let groups = tags.filter_map(|tag| state.model.portal_groups.get(tag));
            let lun = node.units.iter().map(|one| one.unit.lun).min().unwrap_or(0);
            for portal in groups.flat_map(|group| &group.portals) {
                uris.push(format!("iscsi://{}/{}/{lun}", portal.address, node.target.name));
            }
        }
        uris
    }

    /// The connections whose initiators have logged in, on all cores.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, IscsiTargetError> {
        let Some(cores) = self.lock_any().cores.clone() else { return Ok(Vec::new()) };
        let by_core = cores.query(|_, connections| {
            let mut found = Vec::new();
            connections.update(|_, entry| {
                if let Some(session) = entry.connection.session().filter(|_| !entry.is_closed()) {
                    let identity = session.identity();
                    found.push(ConnectionInfo {
                        core: 0,
                        initiator: identity.initiator.clone(),
                        isid: isid_number(identity.isid),
                        tsih: session.tsih(),
                        cid: identity.cid,
                        node: identity.node.as_ref().map(|node| node.name.clone()),
                        portal_group: identity.tag,
                        peer: entry.peer().clone(),
                        header_digest: session.parameters.header_digest,
                        data_digest: session.parameters.data_digest,
                    });
                }
                false
            });
            found
        })?;
        let of_core = |(core, found): (usize, Vec<ConnectionInfo>)| {
            found.into_iter().map(move |one| ConnectionInfo { core, ..one })
        };
        Ok(by_core.into_iter().enumerate().flat_map(of_core).collect())
    }

    /// Asks the initiators of a target node to log out within so many seconds; those of one portal group if it is given.
    ///
    /// # Errors
    /// There is no such node, or a reactor does not respond.
    pub fn request_logout(
        &self,
        name: &str,
        portal_group: Option<u16>,
        seconds: u16,
    ) -> Result<(), IscsiTargetError> {
        let state = self.lock()?;
        let name = state.model.full_name(name);
        let id = state.model.nodes.get(&name).ok_or_else(|| no_node(&name))?.target.id;
        let Some(cores) = state.cores.clone() else { return Ok(()) };
        drop(state);
        cores.query(move |_, connections| {
            connections.update(|_, entry| {
                let identity = entry.connection.session().map(crate::session::Session::identity);
                let is_concerned = identity.is_some_and(|identity| {
                    identity.node.as_ref().is_some_and(|node| node.id == id)
                        && portal_group.is_none_or(|tag| tag == identity.tag)
                });
                if is_concerned && !entry.is_closed() {
                    entry.connection.request_logout(seconds);
                }
                is_concerned
            });
        })?;
        Ok(())
    }

    /// Closes the listeners and rejects changes. Initiators are disconnected when the reactors stop.
    pub fn shutdown(&self) {
        let mut state = self.lock_any();
        state.stopping = true;
        if let Some(cores) = &state.cores {
            // Fails only without reactors, and then nothing listens.
            _ = cores.unlisten(None);
        }
    }

    /// Closes the devices. The reactors have stopped.
    pub fn close(&self) {
        self.lock_any().model = Model::default();
        self.0.publisher.publish(Arc::default());
    }

    fn listen(
        &self,
        state: &mut TargetState,
        addresses: &[SocketAddr],
        group: &mut PortalGroup,
    ) -> Result<(), IscsiTargetError> {
        let cores = match &state.cores {
            Some(cores) => cores.clone(),
            None => {
                let limits = GroupLimits { connections_max: CONNECTIONS_MAX, ..GroupLimits::default() };
                let sessions = self.0.sessions.clone();
                let core = move |_: &reactor::Core, waker: &target_shell::GroupWaker| {
                    IscsiCore::new(sessions.clone(), Some(waker.clone()))
                };
                let cores = TargetCores::start(&self.0.reactors, &self.0.publisher, limits, core)?;
                state.cores.insert(cores).clone()
            }
        };
        for address in addresses {
            let portid = state.last_portid.wrapping_add(1).max(1);
            let bound = cores.listen(&StreamAddress::Tcp(*address), portid)?;
            state.last_portid = portid;
            group.portals.push(Portal { portid, address: bound.tcp().unwrap_or(*address) });
        }
        Ok(())
    }

    /// Opens a device for a logical unit.
    fn open_unit(
        &self,
        state: &mut TargetState,
        name: &str,
        lun: u16,
    ) -> Result<UnitDevice, IscsiTargetError> {
        let read_only = self.0.registry.find(name).is_some_and(|device| device.bdev().read_only());
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry.open(name, access)?;
        let device = descriptor.device();
        let lease = self.0.registry.open_reservations(device, None)?;
        let unit = LogicalUnit::new(UnitConfig::of_device(device, read_only), lease.reservations().clone());
        state.last_id += 1;
        let key = state.keys.assign(self.0.publisher.applied_by_all());
        Ok(UnitDevice {
            unit: NodeUnit { id: state.last_id, lun, key, unit },
            descriptor: Arc::new(descriptor),
            _reservations: Arc::new(lease),
        })
    }

    /// The latest configuration lacks these units.
    fn retire_units(&self, state: &mut TargetState, units: &[UnitDevice]) {
        let generation = self.0.publisher.generation();
        units.iter().for_each(|one| state.keys.retire(one.unit.key, generation));
    }

    /// Makes a change on all cores, or none.
    fn change(
        &self,
        change: impl FnOnce(&mut Model) -> Result<(), IscsiTargetError>,
    ) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        self.change_locked(&mut state, change)
    }

    fn change_locked(
        &self,
        state: &mut TargetState,
        change: impl FnOnce(&mut Model) -> Result<(), IscsiTargetError>,
    ) -> Result<(), IscsiTargetError> {
        let mut model = state.model.clone();
        change(&mut model)?;
        let config = Arc::new(model.config());
        self.0.publisher.change(config).map_err(IscsiTargetError::NotApplied)?;
        state.model = model;
        Ok(())
    }

    /// A device was removed, and its units with it, or resized.
    fn device_event(&self, event: &DeviceEvent) {
        let mut state = self.lock_any();
        let is_of = |one: &UnitDevice| Arc::ptr_eq(one.device(), event.device());
        let is_used = state.model.nodes.values().any(|node| node.units.iter().any(is_of));
        if state.stopping || !is_used {
            return;
        }
        match event {
            DeviceEvent::Registered(_) => {}
            DeviceEvent::Removed(device) => {
                let mut removed = Vec::new();
                for node in state.model.nodes.values_mut() {
                    removed.extend(node.units.extract_if(.., |one| is_of(one)));
                    *node = node.clone().updated();
                }
                log::info!(target: "iscsi", "{}: removed with its {} LUN(s)", device.name(), removed.len());
                self.0.publisher.publish(Arc::new(state.model.config()));
                self.retire_units(&mut state, &removed);
            }
            DeviceEvent::Resized(device) => {
                let units = state.model.nodes.values().flat_map(|node| &node.units);
                units.filter(|one| is_of(one)).for_each(|one| one.unit.unit.resize(device.geometry().blocks));
            }
        }
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, IscsiTargetError> {
        let state = self.lock_any();
        if state.stopping { Err(IscsiTargetError::Stopping) } else { Ok(state) }
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        sync::lock(&self.0.state)
    }
}

impl TargetState {
    /// Closes the listeners of a portal group. A core that does not respond closes them when it runs again.
    fn unlisten(&mut self, group: &PortalGroup) {
        if let Some(cores) = &self.cores {
            group.portals.iter().for_each(|portal| _ = cores.unlisten(Some(portal.portid)));
        }
    }
}

impl Model {
    fn config(&self) -> IscsiConfig {
        let units = self.nodes.values().flat_map(|node| &node.units);
        IscsiConfig {
            options: self.options.clone(),
            portal_groups: self.portal_groups.values().cloned().collect(),
            initiator_groups: self.initiator_groups.values().cloned().collect(),
            nodes: self.nodes.values().map(|node| node.target.clone()).collect(),
            devices: units.map(|one| (one.unit.key, one.descriptor.clone())).collect(),
        }
    }

    /// A name as initiators use it.
    fn full_name(&self, name: &str) -> String {
        let is_full = ["iqn.", "eui.", "naa."].iter().any(|prefix| name.starts_with(prefix));
        if is_full { name.to_string() } else { format!("{}:{name}", self.options.node_base) }
    }

    fn change_node(&mut self, name: &str, change: impl FnOnce(&mut Node)) -> Result<(), IscsiTargetError> {
        let node = self.nodes.get_mut(name).ok_or_else(|| no_node(name))?;
        change(node);
        *node = node.clone().updated();
        Ok(())
    }

    fn retain_maps(&mut self, keep: impl Fn(&(u16, u32)) -> bool) {
        for node in self.nodes.values_mut() {
            Arc::make_mut(&mut node.target).maps.retain(|map| keep(map));
        }
    }

    fn check_maps(&self, maps: &[(u16, u32)]) -> Result<(), IscsiTargetError> {
        check_count(maps.len().saturating_sub(1), PORTALS_MAX)?;
        for (portal_group, initiator_group) in maps {
            if !self.portal_groups.contains_key(portal_group) {
                return Err(IscsiTargetError::NotFound(format!("portal group {portal_group}")));
            }
            if !self.initiator_groups.contains_key(initiator_group) {
                return Err(IscsiTargetError::NotFound(format!("initiator group {initiator_group}")));
            }
        }
        Ok(())
    }
}

impl Node {
    /// The node with its present units.
    fn updated(mut self) -> Node {
        let units = self.units.iter().map(|one| one.unit.clone()).collect();
        Arc::make_mut(&mut self.target).units = units;
        self
    }
}

impl UnitDevice {
    fn device(&self) -> &Arc<BlockDevice> {
        self.descriptor.device()
    }
}

fn no_node(name: &str) -> IscsiTargetError {
    IscsiTargetError::NotFound(format!("target node {name}"))
}

fn check_count(count: usize, max: usize) -> Result<(), IscsiTargetError> {
    if count >= max { Err(IscsiTargetError::TooMany(max)) } else { Ok(()) }
}

/// LUNs are different and within what every initiator knows.
fn check_luns(luns: impl Iterator<Item = u16>) -> Result<(), IscsiTargetError> {
    let mut used = std::collections::BTreeSet::new();
    for lun in luns {
        if usize::from(lun) >= LUNS_MAX {
            let message = format!("lun_id: {lun}: expected 0 to {}", LUNS_MAX - 1);
            return Err(IscsiTargetError::Invalid(message));
        }
        if !used.insert(lun) {
            return Err(IscsiTargetError::Exists(format!("LUN {lun}")));
        }
    }
    Ok(())
}

fn check_group(group: &InitiatorGroup) -> Result<(), IscsiTargetError> {
    check_count(group.initiators.len().saturating_sub(1), GROUP_ENTRIES_MAX)?;
    check_count(group.netmasks.len().saturating_sub(1), GROUP_ENTRIES_MAX)?;
    let is_valid = |entry: &String| {
        let name = entry.strip_prefix('!').unwrap_or(entry);
        name == crate::config::ANY || is_iscsi_name(name)
    };
    match group.initiators.iter().find(|entry| !is_valid(entry)) {
        Some(entry) => {
            Err(IscsiTargetError::Invalid(format!("initiators: {entry} is neither ANY nor an iSCSI name")))
        }
        None => Ok(()),
    }
}
