//! The control plane's handle of the target.

mod groups;
mod nodes;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use bdev::{BlockDevice, Descriptor, DeviceEvent, Registry, ReservationLease};
use control::BalancedTarget;
use reactor::ReactorHandle;
use scsi::TargetPort;
use target_shell::{
    ConnectionLimits, ConnectionTotals, ControlledTarget, LazyCores, PeerConnections, ProtocolConnection,
    TargetControl,
};

use crate::chap::{AuthGroup, AuthPolicy};
use crate::config::{InitiatorGroup, IscsiConfig, IscsiOptions, NodeUnit, PortalGroup, TargetNode};
use crate::core::IscsiCore;
use crate::failure::IscsiTargetError;
use crate::limits::{
    CONNECTIONS_DEFAULT, CONNECTIONS_MAX, FIRST_BURST_BYTES_MAX, PORTALS_MAX, QUEUE_DEPTH_MAX,
    SESSION_CONNECTIONS_MAX, SESSIONS_MAX, TIME2WAIT_MAX_S,
};
use crate::sessions::Sessions;
use crate::settings::{ConnectionCounts, ConnectionInfo};

/// The iSCSI target of a program. Cheap to clone.
///
/// Calls block for up to [`CORE_TIMEOUT`](target_shell::CORE_TIMEOUT) and must not be made on a reactor. The
/// groups of connections start with the first portal group, so that a program without iSCSI does not pay for
/// them.
#[derive(Clone)]
pub struct IscsiTarget(TargetControl<TargetState>);

struct TargetState {
    cores: LazyCores<IscsiCore>,
    model: Model,
    last_portid: u16,
    last_id: u64,
}

/// What is configured. A change works on a copy, which replaces it when all cores have applied it.
#[derive(Clone, Default)]
struct Model {
    options: IscsiOptions,
    portal_groups: BTreeMap<u16, Arc<PortalGroup>>,
    initiator_groups: BTreeMap<u32, Arc<InitiatorGroup>>,
    auth_groups: BTreeMap<u32, Arc<AuthGroup>>,
    discovery_auth: AuthPolicy,
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
    ptpl_file: Option<PathBuf>,
    /// Keeps the device's reservations.
    _reservations: Arc<ReservationLease>,
}

impl IscsiTarget {
    /// A target without portals.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> IscsiTarget {
        IscsiTarget(TargetControl::new(registry, reactors, Arc::default(), TargetState::new()))
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
        let pools = &options.pools;
        for (name, value, range) in [
            ("first_burst_length", options.first_burst_bytes, 512..=FIRST_BURST_BYTES_MAX),
            ("max_connections_per_session", options.connections_max, 1..=SESSION_CONNECTIONS_MAX),
            ("max_sessions", options.sessions_max, 1..=SESSIONS_MAX),
            ("max_queue_depth", options.queue_depth_max, 1..=QUEUE_DEPTH_MAX),
            ("default_time2wait", options.time2wait_s, 0..=TIME2WAIT_MAX_S),
            ("max_large_datain_per_connection", pools.large_data_ins, 1..=u32::MAX),
            ("max_r2t_per_connection", pools.r2ts, 1..=u32::MAX),
            ("pdu_pool_size", pools.pdus, 1..=u32::MAX),
            ("immediate_data_pool_size", pools.immediate_data_buffers, 1..=u32::MAX),
            ("data_out_pool_size", pools.data_out_buffers, 1..=u32::MAX),
        ] {
            if !range.contains(&value) {
                let message = format!("{name}: expected {} to {}", range.start(), range.end());
                return Err(IscsiTargetError::Invalid(message));
            }
        }
        options.limits.check(CONNECTIONS_MAX, "node").map_err(IscsiTargetError::Invalid)?;
        let limits = options.limits.clone();
        self.change(|model| {
            model.options = options;
            Ok(())
        })?;
        self.lock_any().cores.set_limits(limits);
        Ok(())
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

    /// The open connections, on all cores.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, IscsiTargetError> {
        let Some(cores) = self.lock_any().cores.get().cloned() else { return Ok(Vec::new()) };
        let by_core = cores.query(|_, connections| {
            let mut found = Vec::new();
            connections.update(|_, entry| {
                if !entry.is_closed() {
                    found.push(entry.connection.info(entry.peer()));
                }
                false
            });
            found
        })?;
        let of_core = |(core, found): (usize, Vec<ConnectionInfo>)| {
            let cpu = self.0.reactors().get(core).map_or(0, ReactorHandle::cpu);
            found.into_iter().map(move |one| ConnectionInfo { core, cpu, ..one })
        };
        Ok(by_core.into_iter().enumerate().flat_map(of_core).collect())
    }

    /// The initiators that have logged in, by address, those with the most connections first.
    pub fn peers(&self) -> Vec<PeerConnections> {
        self.lock_any().cores.peers()
    }

    /// The number of connections in each state, on all cores.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn connection_counts(&self) -> Result<ConnectionCounts, IscsiTargetError> {
        let Some(cores) = self.lock_any().cores.get().cloned() else {
            return Ok(ConnectionCounts::default());
        };
        let by_core = cores.query(|_, connections| {
            let mut counts = ConnectionCounts::default();
            connections.update(|_, entry| {
                let count = if entry.is_closed() {
                    &mut counts.closed
                } else if entry.connection.is_draining() {
                    &mut counts.draining
                } else if entry.connection.session().is_some() {
                    &mut counts.running
                } else {
                    &mut counts.logging_in
                };
                *count += 1;
                false
            });
            counts
        })?;
        Ok(by_core.into_iter().fold(ConnectionCounts::default(), |sum, one| ConnectionCounts {
            logging_in: sum.logging_in + one.logging_in,
            running: sum.running + one.running,
            draining: sum.draining + one.draining,
            closed: sum.closed + one.closed,
        }))
    }

    /// Rejects changes, closes the listeners and disconnects the initiators, each after its commands in
    /// flight have completed ([`TargetCores::drain`]).
    pub fn shutdown(&self) {
        self.0.stop().cores.drain("iscsi");
    }

    /// Closes the devices. The reactors have stopped.
    pub fn close(&self) {
        self.lock_any().model = Model::default();
        self.0.publisher().publish(Arc::default());
    }

    /// The latest configuration lacks these units.
    fn retire_units(&self, units: &[UnitDevice]) {
        self.0.retire_keys(units.iter().map(|one| one.unit.key));
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
        // Before sessions can use them.
        model.set_ports(&state.model);
        let config = Arc::new(model.config());
        if let Err(error) = self.0.publisher().change(config) {
            state.model.set_ports(&model);
            return Err(IscsiTargetError::NotApplied(error));
        }
        state.model = model;
        Ok(())
    }

    /// The name of the block device that `name` finds.
    pub(crate) fn bdev_name(&self, name: &str) -> String {
        self.0.registry().name_of(name)
    }

    /// The name of a target node as initiators use it.
    pub(crate) fn full_name(&self, name: &str) -> String {
        self.lock_any().model.full_name(name)
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, IscsiTargetError> {
        Ok(self.0.lock()?)
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock_any()
    }

    /// The target as the balancer sees it; `None` before the first portal group.
    pub fn balanced(&self) -> Option<Arc<dyn BalancedTarget>> {
        let cores = self.lock_any().cores.get().cloned()?;
        Some(Arc::new(cores))
    }

    /// Connections of initiators, for metrics.
    pub fn connection_totals(&self) -> ConnectionTotals {
        self.lock_any().cores.totals()
    }
}

impl ControlledTarget for TargetState {
    type Config = IscsiConfig;
    type Shared = Arc<Sessions>;

    /// A device was removed, and its units with it, or resized.
    fn device_event(control: &TargetControl<TargetState>, event: &DeviceEvent) {
        let Ok(mut state) = control.lock() else { return };
        let is_of = |one: &UnitDevice| Arc::ptr_eq(one.device(), event.device());
        if !state.model.nodes.values().any(|node| node.units.iter().any(is_of)) {
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
                control.publisher().publish(Arc::new(state.model.config()));
                control.retire_keys(removed.iter().map(|one| one.unit.key));
            }
            DeviceEvent::Resized(device) => {
                let units = state.model.nodes.values().flat_map(|node| &node.units);
                units.filter(|one| is_of(one)).for_each(|one| one.unit.unit.resize(device.geometry().blocks));
            }
        }
    }
}

impl TargetState {
    fn new() -> TargetState {
        TargetState {
            cores: LazyCores::new(ConnectionLimits::new(CONNECTIONS_DEFAULT)),
            model: Model::default(),
            last_portid: 0,
            last_id: 0,
        }
    }

    /// Closes the listeners of a portal group.
    fn unlisten(&mut self, group: &PortalGroup) {
        group.portals.iter().for_each(|portal| self.cores.unlisten(Some(portal.portid)));
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
            auth_groups: self.auth_groups.values().cloned().collect(),
            discovery_auth: self.discovery_auth,
            devices: units.map(|one| (one.unit.key, one.descriptor.clone())).collect(),
        }
    }

    /// Applies the ports of target nodes to their logical units, where they differ from what is in force. New
    /// units get the configured access states; what initiators have set for others stays.
    fn set_ports(&self, in_force: &Model) {
        for (name, node) in &self.nodes {
            let old = in_force.nodes.get(name);
            if old.is_some_and(|old| Arc::ptr_eq(&old.target, &node.target)) {
                continue;
            }
            let mut tags: Vec<u16> = node.target.maps.iter().map(|(tag, _)| *tag).collect();
            tags.sort_unstable();
            tags.dedup();
            for one in &node.units {
                let unit = &one.unit.unit;
                unit.set_ports(tags.iter().map(|tag| TargetPort::iscsi(&node.target.name, *tag)).collect());
                if old.is_none_or(|old| old.units.iter().all(|old| old.unit.id != one.unit.id)) {
                    node.target.access.iter().for_each(|(tag, state)| _ = unit.set_access(*tag, *state));
                }
            }
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
            if !node.target.maps.iter().all(&keep) {
                let target = Arc::make_mut(&mut node.target);
                target.maps.retain(|map| keep(map));
                target.forget_unmapped();
            }
        }
    }

    /// An authentication policy contradicts itself. A group that is not there has no users, and can be
    /// created later: SPDK saves groups after the target nodes that name them.
    fn check_policy(&self, policy: Option<AuthPolicy>) -> Result<(), IscsiTargetError> {
        let Some(AuthPolicy { disabled, required, mutual, group }) = policy else { return Ok(()) };
        let invalid = |reason: &str| Err(IscsiTargetError::Invalid(reason.to_string()));
        if disabled && required {
            return invalid("disable_chap and require_chap exclude each other");
        }
        if mutual && !required {
            return invalid("mutual_chap needs require_chap");
        }
        if required && group == 0 {
            return invalid("require_chap needs chap_group");
        }
        if group != 0 && !self.auth_groups.contains_key(&group) {
            log::warn!(target: "iscsi", "authentication group {group} does not exist yet: CHAP fails until it is created");
        }
        Ok(())
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
