//! Target nodes and their logical units.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bdev::{Access, Closing, PreparedReservations};
use scsi::{AccessState, LogicalUnit, ReactorSanitizer, UnitConfig};

use super::{IscsiTarget, Node, TargetState, UnitDevice, check_count, no_node};
use crate::chap::AuthPolicy;
use crate::config::{NodeUnit, TargetNode, is_iscsi_name};
use crate::failure::IscsiTargetError;
use crate::histogram::{HistogramCounts, NodeHistogram};
use crate::limits::{LUNS_MAX, OBJECTS_MAX, QUEUE_DEPTH_MAX};
use crate::parameters::DigestPolicy;
use crate::settings::{LunConfig, TargetNodeConfig};

impl IscsiTarget {
    /// Creates a target node. Returns its full name.
    ///
    /// # Errors
    /// The name is invalid or in use, a group or device is missing, or a reactor does not respond; nothing
    /// has changed then.
    pub fn create_node(&self, config: TargetNodeConfig) -> Result<String, IscsiTargetError> {
        let reservations = self.prepare_units(&config.luns)?;
        self.create_node_with(config, reservations)
    }

    /// The first part of adding logical units, which may wait for their files. That there is no such device
    /// is reported by the second part.
    pub(crate) fn prepare_units(
        &self,
        luns: &[LunConfig],
    ) -> Result<Vec<PreparedReservations>, IscsiTargetError> {
        let registry = self.0.registry();
        let prepare = |lun: &LunConfig| {
            let device = registry.find(&lun.bdev_name);
            registry.prepare_reservations(device.as_deref(), lun.ptpl_file.as_deref())
        };
        Ok(luns.iter().map(prepare).collect::<Result<_, _>>()?)
    }

    /// The second part of creating a target node, with what the first part prepared for its logical units.
    pub(crate) fn create_node_with(
        &self,
        config: TargetNodeConfig,
        reservations: Vec<PreparedReservations>,
    ) -> Result<String, IscsiTargetError> {
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
        state.model.check_policy(Some(config.auth))?;
        check_luns(config.luns.iter().map(|lun| lun.lun))?;
        let mut units = Vec::new();
        for (lun, reservations) in config.luns.iter().zip(reservations) {
            match self.open_unit(&mut state, lun, reservations) {
                Ok(unit) => units.push(unit),
                Err(error) => {
                    self.retire_units(&units);
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
            auth: config.auth,
            redirects: config.redirects,
            access: config.access,
            histogram: config.histogram.then(|| Arc::new(NodeHistogram::new())),
            units: Vec::new(),
        };
        let node = Node { target: Arc::new(target), units: units.clone() }.updated();
        let created = self.change_locked(&mut state, |model| {
            model.nodes.insert(name.clone(), node);
            Ok(())
        });
        if created.is_err() {
            self.retire_units(&units);
        }
        created.map(|()| name)
    }

    /// Deletes a target node. Its connections complete what is in flight and are closed. What it returns
    /// waits until the block devices are free.
    ///
    /// # Errors
    /// There is none of this name, or a reactor does not respond; nothing has changed then.
    pub fn delete_node(&self, name: &str) -> Result<Closing, IscsiTargetError> {
        let mut state = self.lock()?;
        let mut units = Vec::new();
        self.change_locked(&mut state, |model| {
            let name = model.full_name(name);
            units = model.nodes.remove(&name).ok_or_else(|| no_node(&name))?.units;
            Ok(())
        })?;
        self.retire_units(&units);
        Ok(Closing::of(units.iter().map(|unit| &*unit.descriptor)))
    }

    /// Adds a logical unit to a target node: with the smallest LUN that is free if none is given. Returns the
    /// LUN.
    ///
    /// # Errors
    /// There is no such node or device, the LUN or the file is in use, the file is unusable, or a reactor
    /// does not respond; nothing has changed then.
    pub fn add_lun(
        &self,
        name: &str,
        bdev_name: &str,
        lun: Option<u16>,
        ptpl_file: Option<PathBuf>,
    ) -> Result<u16, IscsiTargetError> {
        let config = LunConfig { bdev_name: bdev_name.to_string(), lun: 0, ptpl_file };
        let reservations = self.prepare_units(std::slice::from_ref(&config))?;
        self.add_lun_with(name, lun, config, reservations)
    }

    /// The second part of adding a logical unit, whose LUN is `lun` and not that of `config`.
    pub(crate) fn add_lun_with(
        &self,
        name: &str,
        lun: Option<u16>,
        mut config: LunConfig,
        reservations: Vec<PreparedReservations>,
    ) -> Result<u16, IscsiTargetError> {
        let mut state = self.lock()?;
        let name = state.model.full_name(name);
        let node = state.model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
        let used: Vec<u16> = node.units.iter().map(|one| one.unit.lun).collect();
        let free = (0..LUNS_MAX as u16).find(|lun| !used.contains(lun));
        let lun = lun.or(free).ok_or(IscsiTargetError::TooMany(LUNS_MAX))?;
        check_luns(used.iter().copied().chain([lun]))?;
        config.lun = lun;
        let reservations = reservations.into_iter().next().unwrap_or_default();
        let unit = self.open_unit(&mut state, &config, reservations)?;
        let added = self.change_locked(&mut state, |model| {
            model.change_node(&name, |node| node.units.push(unit.clone()))
        });
        if added.is_err() {
            self.retire_units(&[unit]);
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
                let target = Arc::make_mut(&mut node.target);
                target.maps.retain(|map| !maps.contains(map));
                target.forget_unmapped();
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
            luns: node.units.iter().map(describe_unit).collect(),
            queue_depth: node.target.queue_depth,
            header_digest: node.target.digests.header_required,
            data_digest: node.target.digests.data_required,
            auth: node.target.auth,
            redirects: node.target.redirects.clone(),
            access: node.target.access.clone(),
            histogram: node.target.histogram.is_some(),
        });
        nodes.collect()
    }

    /// Sets how the initiators of a target node authenticate themselves. Sessions that exist go on.
    ///
    /// # Errors
    /// There is no such node or group, or a reactor does not respond; nothing has changed then.
    pub fn set_node_auth(&self, name: &str, policy: AuthPolicy) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            model.check_policy(Some(policy))?;
            let name = model.full_name(name);
            model.change_node(&name, |node| Arc::make_mut(&mut node.target).auth = policy)
        })
    }

    /// Sends initiators that log in through a portal group to another address, or ends that. Sessions that
    /// exist go on; [`request_logout`](Self::request_logout) has them come back.
    ///
    /// # Errors
    /// There is no such node, or it is not offered through the portal group, or a reactor does not respond;
    /// nothing has changed then.
    pub fn set_redirect(
        &self,
        name: &str,
        portal_group: u16,
        to: Option<SocketAddr>,
    ) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let name = model.full_name(name);
            let node = model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
            if !node.target.maps.iter().any(|(tag, _)| *tag == portal_group) {
                let map = format!("map of {name} to portal group {portal_group}");
                return Err(IscsiTargetError::NotFound(map));
            }
            model.change_node(&name, |node| {
                let redirects = &mut Arc::make_mut(&mut node.target).redirects;
                redirects.retain(|(tag, _)| *tag != portal_group);
                redirects.extend(to.map(|to| (portal_group, to)));
            })
        })
    }

    /// Sets the access state of a portal group for all logical units of a target node.
    ///
    /// # Errors
    /// There is no such node, or it is not offered through the portal group, or a reactor does not respond;
    /// nothing has changed then.
    pub fn set_access_state(
        &self,
        name: &str,
        portal_group: u16,
        access: AccessState,
    ) -> Result<(), IscsiTargetError> {
        let mut state = self.lock()?;
        let name = state.model.full_name(name);
        self.change_locked(&mut state, |model| {
            let node = model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
            if !node.target.maps.iter().any(|(tag, _)| *tag == portal_group) {
                let map = format!("map of {name} to portal group {portal_group}");
                return Err(IscsiTargetError::NotFound(map));
            }
            model.change_node(&name, |node| {
                let states = &mut Arc::make_mut(&mut node.target).access;
                states.retain(|(tag, _)| *tag != portal_group);
                states.extend((access != AccessState::Optimized).then_some((portal_group, access)));
            })
        })?;
        // An initiator may have changed it, so that it is set whatever the configuration had.
        for one in state.model.nodes.get(&name).iter().flat_map(|node| &node.units) {
            one.unit.unit.set_access(portal_group, access);
        }
        Ok(())
    }

    /// Begins to count the latencies of a target node's commands, or ends it. One that counts already
    /// continues.
    ///
    /// # Errors
    /// There is no such node, or a reactor does not respond; nothing has changed then.
    pub fn enable_histogram(&self, name: &str, enable: bool) -> Result<(), IscsiTargetError> {
        self.change(|model| {
            let name = model.full_name(name);
            model.change_node(&name, |node| {
                let target = Arc::make_mut(&mut node.target);
                let present = target.histogram.take();
                target.histogram = enable.then(|| present.unwrap_or_else(|| Arc::new(NodeHistogram::new())));
            })
        })
    }

    /// The latencies of a target node's commands since they are counted; `None` if they are not.
    ///
    /// # Errors
    /// There is no such node.
    pub fn histogram(&self, name: &str) -> Result<Option<HistogramCounts>, IscsiTargetError> {
        let state = self.lock_any();
        let name = state.model.full_name(name);
        let node = state.model.nodes.get(&name).ok_or_else(|| no_node(&name))?;
        Ok(node.target.histogram.as_ref().map(|histogram| histogram.counts()))
    }

    /// Asks the initiators of a target node to log out within this number of seconds; those of one portal
    /// group if it is given.
    ///
    /// # Errors
    /// There is no such node, or the target is stopping.
    pub fn request_logout(
        &self,
        name: &str,
        portal_group: Option<u16>,
        seconds: u16,
    ) -> Result<(), IscsiTargetError> {
        let state = self.lock()?;
        let name = state.model.full_name(name);
        let id = state.model.nodes.get(&name).ok_or_else(|| no_node(&name))?.target.id;
        drop(state);
        self.0.shared().request_logouts(id, portal_group, seconds);
        Ok(())
    }

    /// Opens a device for a logical unit.
    fn open_unit(
        &self,
        state: &mut TargetState,
        config: &LunConfig,
        reservations: PreparedReservations,
    ) -> Result<UnitDevice, IscsiTargetError> {
        let LunConfig { bdev_name: name, lun, ptpl_file } = config;
        let read_only = self.0.registry().find(name).is_some_and(|device| device.bdev().read_only());
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry().open_with_reservations(name, access)?;
        let device = descriptor.device();
        let lease = self.0.registry().finish_reservations(reservations, device)?;
        let lease =
            lease.ok_or_else(|| IscsiTargetError::Invalid(format!("{name} was changed meanwhile")))?;
        let unit = LogicalUnit::new(UnitConfig::of_device(device, read_only), lease.reservations().clone());
        state.last_id += 1;
        let descriptor = Arc::new(descriptor);
        if let Some(sanitizer) = ReactorSanitizer::new(self.0.reactors(), state.last_id, &descriptor) {
            unit.set_sanitizer(sanitizer);
        }
        let key = self.0.assign_key();
        Ok(UnitDevice {
            unit: NodeUnit { id: state.last_id, lun: *lun, key, unit },
            descriptor,
            ptpl_file: ptpl_file.clone(),
            _reservations: Arc::new(lease),
        })
    }
}

fn describe_unit(unit: &UnitDevice) -> LunConfig {
    LunConfig {
        bdev_name: unit.device().name().to_string(),
        lun: unit.unit.lun,
        ptpl_file: unit.ptpl_file.clone(),
    }
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
