//! The control plane's handle of the target: controllers and their sockets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};

use bdev::{
    Access, BlockDevice, Closing, Descriptor, DeviceEvent, PreparedReservations, Registry, ReservationLease,
};
use reactor::ReactorHandle;
use scsi::{LogicalUnit, ReactorSanitizer, UnitConfig};
use sockets::StreamAddress;
use target_shell::{
    ConnectionLimits, ConnectionTotals, ControlledTarget, GroupLimits, LazyCores, PeerConnections,
    TargetControl, TargetCores, mask_of_reactors, reactors_of_mask,
};
use wire_virtio::blk::SECTOR_BYTES;

use crate::backend::{Backend, BlkBackend, ScsiUnit};
use crate::coalescing::Coalescing;
use crate::controller::{Controller, VhostConfig};
use crate::core::VhostCore;
use crate::failure::VhostTargetError;
use crate::info::{
    SessionShare, VhostBackendInfo, VhostBlkConfig, VhostControllerInfo, VhostScsiTargetInfo,
    VhostSessionInfo,
};
use crate::limits::{CONNECTIONS_MAX, CONTROLLERS_MAX, LOGINS_MAX, NAME_BYTES_MAX, SCSI_TARGETS};
use crate::links::CoreLinks;

/// The vhost-user target of a program. Cheap to clone.
///
/// Calls block for up to [`CORE_TIMEOUT`](target_shell::CORE_TIMEOUT) and must not be made on a reactor. The
/// groups of connections start with the first controller, so that a program without controllers does not pay
/// for them.
#[derive(Clone)]
pub struct VhostTarget(TargetControl<TargetState>);

struct TargetState {
    cores: LazyCores<VhostCore>,
    controllers: BTreeMap<String, Created>,
    last_id: u64,
}

#[derive(Clone)]
struct Created {
    controller: Arc<Controller>,
    devices: CreatedDevices,
    socket: PathBuf,
    cpumask: Option<String>,
}

#[derive(Clone)]
enum CreatedDevices {
    Blk {
        /// `None` after the device was removed: requests fail.
        descriptor: Option<Arc<Descriptor>>,
        config: VhostBlkConfig,
    },
    Scsi {
        is_started: bool,
        targets: BTreeMap<u8, TargetDevice>,
    },
}

/// The device of a SCSI target.
#[derive(Clone)]
struct TargetDevice {
    descriptor: Arc<Descriptor>,
    ptpl_file: Option<PathBuf>,
    _reservations: Arc<ReservationLease>,
}

impl VhostTarget {
    /// A target without controllers, whose sockets are in `directory`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], directory: PathBuf) -> VhostTarget {
        VhostTarget(TargetControl::new(registry, reactors, directory, TargetState::new()))
    }

    /// Creates a controller for a block device.
    ///
    /// # Errors
    /// The name is invalid or in use, the device cannot be opened or has blocks that virtio does not know,
    /// the socket cannot be created, or a reactor does not respond; nothing has changed then.
    pub fn create(&self, config: VhostBlkConfig) -> Result<VhostControllerInfo, VhostTargetError> {
        let mut state = self.begin_create(&config.name)?;
        let access = if config.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry().open(&config.bdev_name, access)?;
        check_geometry("dev_name", descriptor.device())?;
        let key = self.0.assign_key();
        let backend = BlkBackend::new(key, config.read_only, config.packed_ring, descriptor.device());
        let (name, cpumask) = (config.name.clone(), config.cpumask.clone());
        let config = VhostBlkConfig { bdev_name: descriptor.device().name().into(), ..config };
        let devices = CreatedDevices::Blk { descriptor: Some(Arc::new(descriptor)), config };
        let result = self.insert(&mut state, &name, Backend::Blk(backend), devices, cpumask);
        if result.is_err() {
            self.0.retire_keys([key]);
            return result;
        }
        let result = self.listen(&mut state, &name).and(result);
        if result.is_err() {
            self.withdraw(&mut state, &name);
        }
        result
    }

    /// Creates a controller that is a virtio SCSI host without targets. With `delay` its socket appears when
    /// it is [started](Self::start_scsi), so that a driver finds all targets.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_scsi(
        &self,
        name: &str,
        delay: bool,
        cpumask: Option<String>,
    ) -> Result<VhostControllerInfo, VhostTargetError> {
        let mut state = self.begin_create(name)?;
        let devices = CreatedDevices::Scsi { is_started: false, targets: BTreeMap::new() };
        let result = self.insert(&mut state, name, Backend::Scsi(Box::default()), devices, cpumask)?;
        if !delay && let Err(error) = self.listen(&mut state, name) {
            self.withdraw(&mut state, name);
            return Err(error);
        }
        Ok(result)
    }

    /// Starts a SCSI controller that was created with a delay.
    ///
    /// # Errors
    /// There is none of this name, it was started, or its socket cannot be created.
    pub fn start_scsi(&self, name: &str) -> Result<(), VhostTargetError> {
        let mut state = self.lock()?;
        let (is_started, _) = state.scsi_mut(name)?;
        if *is_started {
            return Err(VhostTargetError::Started(name.into()));
        }
        self.listen(&mut state, name)
    }

    /// Adds a target to a SCSI controller, `None` for the first free number. Returns the number. Drivers
    /// learn of it. With a file, the device's reservations can persist through power loss.
    ///
    /// # Errors
    /// There is no such controller, the number is invalid or in use, none is free, the device cannot be
    /// opened or has blocks that virtio does not know, a reactor does not respond, or those of
    /// [`Registry::open_reservations`]; nothing has changed then.
    pub fn add_target(
        &self,
        name: &str,
        number: Option<u8>,
        bdev_name: &str,
        ptpl_file: Option<PathBuf>,
    ) -> Result<u8, VhostTargetError> {
        let reservations = self.prepare_target(bdev_name, ptpl_file.as_deref())?;
        self.add_target_with(name, number, bdev_name, ptpl_file, reservations)
    }

    /// The first part of adding a target, which may wait for its file. That there is no such device is
    /// reported by the second part.
    pub(crate) fn prepare_target(
        &self,
        bdev_name: &str,
        ptpl_file: Option<&Path>,
    ) -> Result<PreparedReservations, VhostTargetError> {
        let device = self.0.registry().find(bdev_name);
        Ok(self.0.registry().prepare_reservations(device.as_deref(), ptpl_file)?)
    }

    /// The second part, with what the first one prepared.
    pub(crate) fn add_target_with(
        &self,
        name: &str,
        number: Option<u8>,
        bdev_name: &str,
        ptpl_file: Option<PathBuf>,
        reservations: PreparedReservations,
    ) -> Result<u8, VhostTargetError> {
        let mut state = self.lock()?;
        let (_, targets) = state.scsi_mut(name)?;
        let number = match number {
            Some(number) => check_number(number)?,
            None => (0..SCSI_TARGETS as u8)
                .find(|number| !targets.contains_key(number))
                .ok_or(VhostTargetError::NoFreeTarget)?,
        };
        if targets.contains_key(&number) {
            return Err(VhostTargetError::TargetExists(number));
        }
        let read_only = self.0.registry().find(bdev_name).is_some_and(|device| device.bdev().read_only());
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry().open_with_reservations(bdev_name, access)?;
        let device = descriptor.device();
        check_geometry("bdev_name", device)?;
        let lease = self.0.registry().finish_reservations(reservations, device)?;
        let lease = lease.ok_or_else(|| bdev::BdevError::NotFound { name: bdev_name.to_string() })?;
        let unit = LogicalUnit::new(UnitConfig::of_device(device, read_only), lease.reservations().clone());
        state.last_id += 1;
        let id = state.last_id;
        let key = self.0.assign_key();
        let descriptor = Arc::new(descriptor);
        if let Some(sanitizer) = ReactorSanitizer::new(self.0.reactors(), id, &descriptor) {
            unit.set_sanitizer(sanitizer);
        }
        let unit = ScsiUnit { id, key, blocks: unit.blocks(), is_announced: false, unit };
        let device = TargetDevice { descriptor, ptpl_file, _reservations: Arc::new(lease) };
        state.set_target(name, number, Some((unit, device)));
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.set_target(name, number, None);
            self.0.retire_keys([key]);
            return Err(VhostTargetError::NotApplied(error));
        }
        state.announce_target(name, number);
        self.0.publisher().publish(Arc::new(state.config()));
        Ok(number)
    }

    /// Removes a target from a SCSI controller. Drivers learn of it; commands in flight are executed. What it
    /// returns waits until the block device is free.
    ///
    /// # Errors
    /// There is no such controller or target, or a reactor does not respond; nothing has changed then.
    pub fn remove_target(&self, name: &str, number: u8) -> Result<Closing, VhostTargetError> {
        let mut state = self.lock()?;
        state.scsi_mut(name)?;
        check_number(number)?;
        let Some((unit, device)) = state.set_target(name, number, None) else {
            return Err(VhostTargetError::NoTarget(number));
        };
        let (key, closing) = (unit.key, Closing::of([&*device.descriptor]));
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.set_target(name, number, Some((unit, device)));
            return Err(VhostTargetError::NotApplied(error));
        }
        self.0.retire_keys([key]);
        Ok(closing)
    }

    /// Checks that a controller can be created.
    fn begin_create(&self, name: &str) -> Result<MutexGuard<'_, TargetState>, VhostTargetError> {
        check_name(name)?;
        let state = self.lock()?;
        if state.controllers.contains_key(name) {
            return Err(VhostTargetError::Exists(name.into()));
        }
        if state.controllers.len() >= CONTROLLERS_MAX {
            return Err(VhostTargetError::TooMany(CONTROLLERS_MAX));
        }
        Ok(state)
    }

    /// Adds a controller that does not listen.
    fn insert(
        &self,
        state: &mut TargetState,
        name: &str,
        backend: Backend,
        devices: CreatedDevices,
        cpumask: Option<String>,
    ) -> Result<VhostControllerInfo, VhostTargetError> {
        let reactors = reactors_of_mask(self.0.reactors(), cpumask.as_deref())?;
        self.start(state)?;
        state.last_id += 1;
        let controller = Controller::new(state.last_id, state.free_port(), name, backend, reactors.into());
        let socket = self.0.shared().join(name);
        let created = Created { controller: Arc::new(controller), devices, socket, cpumask };
        let info = created.info(self.0.reactors(), Vec::new());
        state.controllers.insert(name.into(), created);
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.controllers.remove(name);
            return Err(VhostTargetError::NotApplied(error));
        }
        Ok(info)
    }

    /// Has a controller listen. Clients may connect at once, so the cores know the controller before.
    fn listen(&self, state: &mut TargetState, name: &str) -> Result<(), VhostTargetError> {
        let TargetState { cores, controllers, .. } = state;
        let (Some(cores), Some(created)) = (cores.get(), controllers.get_mut(name)) else {
            return Err(VhostTargetError::NotFound(name.into()));
        };
        cores.listen(&StreamAddress::Unix(created.socket.clone()), created.controller.portid)?;
        if let CreatedDevices::Scsi { is_started, .. } = &mut created.devices {
            *is_started = true;
        }
        Ok(())
    }

    /// Removes a controller that could not listen.
    fn withdraw(&self, state: &mut TargetState, name: &str) {
        if let Some(created) = state.controllers.remove(name) {
            self.0.publisher().publish(Arc::new(state.config()));
            self.0.retire_keys(created.keys());
        }
    }

    /// Deletes a controller. What it returns waits until the block devices are free.
    ///
    /// # Errors
    /// There is none of this name, clients use it, or a reactor does not respond; nothing has changed then.
    pub fn delete(&self, name: &str) -> Result<Closing, VhostTargetError> {
        let mut state = self.lock()?;
        let not_found = || VhostTargetError::NotFound(name.into());
        let controller = state.controllers.get(name).ok_or_else(not_found)?.controller.clone();
        if state.sessions(self.0.reactors())?.iter().any(|(id, _)| *id == controller.id) {
            return Err(VhostTargetError::Busy(name.into()));
        }
        let Some(created) = state.controllers.remove(name) else { return Err(not_found()) };
        let keys: Vec<u32> = created.keys().collect();
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            state.controllers.insert(name.into(), created);
            return Err(VhostTargetError::NotApplied(error));
        }
        self.0.retire_keys(keys);
        state.cores.unlisten(Some(controller.portid));
        Ok(Closing::of(created.open_devices().iter().map(|(_, descriptor)| &**descriptor)))
    }

    /// Sets how the drivers of a controller are notified, now and later.
    ///
    /// # Errors
    /// There is none of this name, a value is too small, or a reactor does not respond; nothing has changed
    /// then.
    pub fn set_coalescing(&self, name: &str, coalescing: Coalescing) -> Result<(), VhostTargetError> {
        if coalescing.iops_threshold < Coalescing::IOPS_THRESHOLD_MIN {
            let reason = format!("iops_threshold: expected at least {}", Coalescing::IOPS_THRESHOLD_MIN);
            return Err(VhostTargetError::Invalid(reason));
        }
        let mut state = self.lock()?;
        let created =
            state.controllers.get_mut(name).ok_or_else(|| VhostTargetError::NotFound(name.into()))?;
        let controller = Controller { coalescing, ..(*created.controller).clone() };
        let previous = std::mem::replace(&mut created.controller, Arc::new(controller));
        if let Err(error) = self.0.publisher().change(Arc::new(state.config())) {
            if let Some(created) = state.controllers.get_mut(name) {
                created.controller = previous;
            }
            return Err(VhostTargetError::NotApplied(error));
        }
        Ok(())
    }

    /// The controllers by name.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn controllers(&self) -> Result<Vec<VhostControllerInfo>, VhostTargetError> {
        let state = self.lock_any();
        let sessions = state.sessions(self.0.reactors())?;
        let info = |one: &Created| {
            let own = sessions.iter().filter(|(id, _)| *id == one.controller.id);
            one.info(self.0.reactors(), own.map(|(_, session)| session.clone()).collect())
        };
        Ok(state.controllers.values().map(info).collect())
    }

    /// The controllers by name, without their connections.
    pub fn configured(&self) -> Vec<VhostControllerInfo> {
        let info = |one: &Created| one.info(self.0.reactors(), Vec::new());
        self.lock_any().controllers.values().map(info).collect()
    }

    /// The clients that have begun a session, those with the most connections first.
    pub fn peers(&self) -> Vec<PeerConnections> {
        self.lock_any().cores.peers()
    }

    /// How many connections there may be.
    pub fn limits(&self) -> ConnectionLimits {
        self.lock_any().cores.limits().clone()
    }

    /// Changes how many connections there may be, for clients that come from now on.
    ///
    /// # Errors
    /// A limit is 0 or beyond 512, or the target is stopping.
    pub fn set_limits(&self, limits: ConnectionLimits) -> Result<(), VhostTargetError> {
        limits.check(CONNECTIONS_MAX, "controller").map_err(VhostTargetError::Invalid)?;
        self.lock()?.cores.set_limits(limits);
        Ok(())
    }

    /// Rejects changes, closes the listeners and disconnects the clients, each after its requests in flight
    /// have completed ([`TargetCores::drain`]).
    pub fn shutdown(&self) {
        self.0.stop().cores.drain("vhost");
    }

    /// The name of the block device that `name` finds.
    pub(crate) fn bdev_name(&self, name: &str) -> String {
        self.0.registry().name_of(name)
    }

    /// Closes the devices. The reactors have stopped.
    pub fn close(&self) {
        self.lock_any().controllers.clear();
        self.0.publisher().publish(Arc::default());
    }

    /// Starts the cores, unless they have started.
    fn start(&self, state: &mut TargetState) -> Result<(), VhostTargetError> {
        state.cores.get_or_start(|connections| {
            let limits = GroupLimits { logins_max: LOGINS_MAX, ..self.0.group_limits(connections) };
            let links = CoreLinks::new(self.0.reactors().len());
            let make = move |core: &reactor::Core, waker: &target_shell::GroupWaker| {
                VhostCore::new(core, Some(waker), links.clone())
            };
            TargetCores::start(self.0.reactors(), self.0.publisher(), limits, make)
        })?;
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, VhostTargetError> {
        Ok(self.0.lock()?)
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock_any()
    }

    /// Connections of front-ends, for metrics.
    pub(crate) fn connection_totals(&self) -> ConnectionTotals {
        self.lock_any().cores.totals()
    }
}

impl ControlledTarget for TargetState {
    type Config = VhostConfig;
    /// The directory of the sockets.
    type Shared = PathBuf;

    /// A device was removed: requests of its controllers fail from now on, and its SCSI targets are removed.
    /// Or it was resized.
    fn device_event(control: &TargetControl<TargetState>, event: &DeviceEvent) {
        let Ok(mut state) = control.lock() else { return };
        let device = event.device();
        let is_removed = matches!(event, DeviceEvent::Removed(_));
        let mut has_changed = false;
        let mut keys = Vec::new();
        for (name, created) in &mut state.controllers {
            let mut controller = (*created.controller).clone();
            match (&mut created.devices, &mut controller.backend) {
                (CreatedDevices::Blk { descriptor, .. }, Backend::Blk(blk)) => {
                    if !descriptor.as_ref().is_some_and(|one| Arc::ptr_eq(one.device(), device)) {
                        continue;
                    }
                    if is_removed {
                        let bdev = device.name();
                        log::warn!(target: "vhost", "{name}: {bdev} was removed, requests fail from now on");
                        *descriptor = None;
                    }
                    blk.sectors = device.geometry().bytes() / SECTOR_BYTES;
                }
                (CreatedDevices::Scsi { targets, .. }, Backend::Scsi(scsi)) => {
                    let of_device =
                        targets.iter().filter(|(_, one)| Arc::ptr_eq(one.descriptor.device(), device));
                    let numbers: Vec<u8> = of_device.map(|(number, _)| *number).collect();
                    if numbers.is_empty() {
                        continue;
                    }
                    for number in numbers {
                        let place = &mut scsi.targets[usize::from(number)];
                        if is_removed {
                            log::warn!(target: "vhost", "{name}: {} was removed, and target {number}", device.name());
                            targets.remove(&number);
                            keys.extend(place.take().map(|unit| unit.key));
                        } else if let Some(unit) = place {
                            unit.blocks = device.geometry().blocks;
                            unit.unit.resize(unit.blocks);
                        }
                    }
                }
                _ => continue,
            }
            created.controller = Arc::new(controller);
            has_changed = true;
        }
        if has_changed {
            control.publisher().publish(Arc::new(state.config()));
            control.retire_keys(keys);
        }
    }
}

impl TargetState {
    fn new() -> TargetState {
        TargetState {
            cores: LazyCores::new(ConnectionLimits::new(CONNECTIONS_MAX)),
            controllers: BTreeMap::new(),
            last_id: 0,
        }
    }

    fn config(&self) -> VhostConfig {
        VhostConfig {
            controllers: self.controllers.values().map(|one| one.controller.clone()).collect(),
            devices: self.controllers.values().flat_map(Created::open_devices).collect(),
        }
    }

    /// Whether a SCSI controller has started, and its targets.
    fn scsi_mut(
        &mut self,
        name: &str,
    ) -> Result<(&mut bool, &mut BTreeMap<u8, TargetDevice>), VhostTargetError> {
        match self.controllers.get_mut(name).map(|created| &mut created.devices) {
            Some(CreatedDevices::Scsi { is_started, targets }) => Ok((is_started, targets)),
            Some(CreatedDevices::Blk { .. }) => {
                Err(VhostTargetError::Invalid(format!("ctrlr: {name} is no SCSI controller")))
            }
            None => Err(VhostTargetError::NotFound(name.into())),
        }
    }

    /// Sets or removes a target of a SCSI controller. Returns the one before.
    fn set_target(
        &mut self,
        name: &str,
        number: u8,
        new: Option<(ScsiUnit, TargetDevice)>,
    ) -> Option<(ScsiUnit, TargetDevice)> {
        let created = self.controllers.get_mut(name)?;
        let mut controller = (*created.controller).clone();
        let (CreatedDevices::Scsi { targets, .. }, Backend::Scsi(scsi)) =
            (&mut created.devices, &mut controller.backend)
        else {
            return None;
        };
        let (unit, device) = new.unzip();
        let old_device = match device {
            Some(device) => targets.insert(number, device),
            None => targets.remove(&number),
        };
        let old_unit = std::mem::replace(scsi.targets.get_mut(usize::from(number))?, unit);
        created.controller = Arc::new(controller);
        old_unit.zip(old_device)
    }

    /// All cores have a target: drivers learn of it.
    fn announce_target(&mut self, name: &str, number: u8) {
        let Some(created) = self.controllers.get_mut(name) else { return };
        let mut controller = (*created.controller).clone();
        if let Backend::Scsi(scsi) = &mut controller.backend
            && let Some(unit) = &mut scsi.targets[usize::from(number)]
        {
            unit.is_announced = true;
        }
        created.controller = Arc::new(controller);
    }

    /// The controller of each open connection, and what is reported of it.
    fn sessions(&self, reactors: &[ReactorHandle]) -> Result<Vec<(u64, VhostSessionInfo)>, VhostTargetError> {
        let Some(cores) = self.cores.get() else { return Ok(Vec::new()) };
        let shares = cores.query(|core, connections| {
            connections.open().map(|one| one.share(core.index())).collect::<Vec<SessionShare>>()
        })?;
        Ok(SessionShare::merge(&shares.concat(), reactors))
    }

    /// A port identifier that no controller has. There are fewer controllers than identifiers.
    fn free_port(&self) -> u16 {
        let is_used = |portid: &u16| self.controllers.values().any(|one| one.controller.portid == *portid);
        (1..=u16::MAX).find(|portid| !is_used(portid)).unwrap_or(u16::MAX)
    }
}

impl Created {
    fn info(&self, reactors: &[ReactorHandle], sessions: Vec<VhostSessionInfo>) -> VhostControllerInfo {
        let backend = match (&self.devices, &self.controller.backend) {
            (CreatedDevices::Blk { config, .. }, backend) => {
                let read_only = matches!(backend, Backend::Blk(blk) if blk.read_only);
                VhostBackendInfo::Blk { config: config.clone(), read_only }
            }
            (CreatedDevices::Scsi { is_started, targets }, _) => {
                let info = |(number, one): (&u8, &TargetDevice)| VhostScsiTargetInfo {
                    number: *number,
                    bdev_name: one.descriptor.device().name().to_string(),
                    ptpl_file: one.ptpl_file.clone(),
                };
                let targets = targets.iter().map(info).collect();
                VhostBackendInfo::Scsi { is_started: *is_started, targets }
            }
        };
        VhostControllerInfo {
            name: self.controller.name.clone(),
            socket: self.socket.clone(),
            sessions,
            cpumask: mask_of_reactors(reactors, &self.controller.reactors),
            configured_cpumask: self.cpumask.clone(),
            coalescing: self.controller.coalescing,
            is_without_bdev: matches!(self.devices, CreatedDevices::Blk { descriptor: None, .. }),
            backend,
        }
    }

    /// Its devices that are open, by key.
    fn open_devices(&self) -> Vec<(u32, Arc<Descriptor>)> {
        match (&self.devices, &self.controller.backend) {
            (CreatedDevices::Blk { descriptor, .. }, Backend::Blk(blk)) => {
                descriptor.iter().map(|one| (blk.key, one.clone())).collect()
            }
            (CreatedDevices::Scsi { targets, .. }, Backend::Scsi(scsi)) => {
                let units = scsi.targets.iter().zip(0_u8..);
                let open = |(unit, number): (&Option<ScsiUnit>, u8)| {
                    Some((unit.as_ref()?.key, targets.get(&number)?.descriptor.clone()))
                };
                units.filter_map(open).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The keys of its devices, those that were removed included.
    fn keys(&self) -> impl Iterator<Item = u32> + use<> {
        let keys: Vec<u32> = match &self.controller.backend {
            Backend::Blk(blk) => vec![blk.key],
            Backend::Scsi(scsi) => scsi.targets.iter().flatten().map(|unit| unit.key).collect(),
        };
        keys.into_iter()
    }
}

fn check_number(number: u8) -> Result<u8, VhostTargetError> {
    if usize::from(number) < SCSI_TARGETS {
        return Ok(number);
    }
    let last = SCSI_TARGETS - 1;
    Err(VhostTargetError::Invalid(format!("scsi_target_num: {number}: expected 0 to {last}")))
}

fn check_name(name: &str) -> Result<(), VhostTargetError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        let reason = format!("ctrlr: expected 1 to {NAME_BYTES_MAX} bytes without control characters");
        return Err(VhostTargetError::Invalid(reason));
    }
    Ok(())
}

/// Virtio knows sectors of 512 bytes and no metadata.
fn check_geometry(parameter: &str, device: &BlockDevice) -> Result<(), VhostTargetError> {
    let geometry = device.geometry();
    if geometry.block_size.is_multiple_of(SECTOR_BYTES as u32) && !geometry.metadata.extended {
        return Ok(());
    }
    let (name, bytes) = (device.name(), geometry.block_size);
    Err(VhostTargetError::Invalid(format!(
        "{parameter}: {name} has blocks of {bytes} bytes, metadata included; virtio needs multiples of 512"
    )))
}
