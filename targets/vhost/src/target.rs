//! The control plane's handle of the target: controllers and their sockets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::{Access, BlockDevice, Descriptor, DeviceEvent, Registry};
use reactor::ReactorHandle;
use sockets::StreamAddress;
use target_shell::{DeviceKeys, GroupLimits, Publisher, TargetCores};
use wire_virtio::blk::SECTOR_BYTES;

use crate::controller::{Controller, ControllerOptions, VhostConfig};
use crate::core::VhostCore;
use crate::failure::VhostTargetError;
use crate::limits::{CONNECTIONS_MAX, CONTROLLERS_MAX, LOGINS_MAX, NAME_BYTES_MAX};

/// A controller to create: a virtio block device.
#[derive(Clone, Debug)]
pub struct VhostBlkConfig {
    /// Name of the controller, unique in the target: the file name of its socket in the target's directory, or an
    /// absolute path.
    pub name: String,
    /// Name, alias or UUID of the block device.
    pub bdev_name: String,
    /// Whether writes are rejected.
    pub read_only: bool,
    /// Whether packed virtqueues are offered.
    pub packed_ring: bool,
}

impl VhostBlkConfig {
    /// A writable controller with split virtqueues.
    pub fn new(name: &str, bdev_name: &str) -> VhostBlkConfig {
        VhostBlkConfig {
            name: name.into(),
            bdev_name: bdev_name.into(),
            read_only: false,
            packed_ring: false,
        }
    }
}

/// A controller as it is.
#[derive(Clone, Debug)]
pub struct VhostControllerInfo {
    /// As it was created, with the bdev's own name.
    pub config: VhostBlkConfig,
    /// Whether writes are rejected, by configuration or by the device.
    pub read_only: bool,
    /// Path of its socket.
    pub socket: PathBuf,
    /// Open connections, on all cores.
    pub connections: usize,
}

/// The vhost-user target of a program. Cheap to clone.
///
/// Calls block for up to [`CORE_TIMEOUT`](target_shell::CORE_TIMEOUT) and must not be made on a reactor. The groups of
/// connections start with the first controller, so that a program without controllers does not pay for them.
#[derive(Clone)]
pub struct VhostTarget(Arc<TargetShared>);

struct TargetShared {
    registry: Registry,
    reactors: Vec<ReactorHandle>,
    publisher: Publisher<VhostConfig>,
    directory: PathBuf,
    state: Mutex<TargetState>,
}

#[derive(Default)]
struct TargetState {
    cores: Option<TargetCores<VhostCore>>,
    controllers: BTreeMap<String, Created>,
    last_id: u64,
    keys: DeviceKeys,
    stopping: bool,
}

#[derive(Clone)]
struct Created {
    controller: Arc<Controller>,
    /// `None` after the device was removed: requests fail.
    descriptor: Option<Arc<Descriptor>>,
    config: VhostBlkConfig,
    socket: PathBuf,
}

impl VhostTarget {
    /// A target without controllers, whose sockets are in `directory`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle], directory: PathBuf) -> VhostTarget {
        let shared = Arc::new(TargetShared {
            registry: registry.clone(),
            reactors: reactors.to_vec(),
            publisher: Publisher::default(),
            directory,
            state: Mutex::default(),
        });
        let target = Arc::downgrade(&shared);
        registry.subscribe(Box::new(move |event| {
            if let Some(shared) = target.upgrade() {
                VhostTarget(shared).device_event(event);
            }
        }));
        VhostTarget(shared)
    }

    /// Creates a controller for a block device.
    ///
    /// # Errors
    /// The name is invalid or in use, the device cannot be opened or has blocks that virtio does not know, the socket
    /// cannot be created, or a reactor does not respond; nothing has changed then.
    pub fn create(&self, config: VhostBlkConfig) -> Result<VhostControllerInfo, VhostTargetError> {
        check_name(&config.name)?;
        let mut state = self.lock()?;
        if state.controllers.contains_key(&config.name) {
            return Err(VhostTargetError::Exists(config.name));
        }
        if state.controllers.len() >= CONTROLLERS_MAX {
            return Err(VhostTargetError::TooMany(CONTROLLERS_MAX));
        }
        let access = if config.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry.open(&config.bdev_name, access)?;
        check_geometry(descriptor.device())?;
        let cores = match &state.cores {
            Some(cores) => cores.clone(),
            None => self.start(&mut state)?,
        };
        state.last_id += 1;
        let (id, portid) = (state.last_id, state.free_port());
        let key = state.keys.assign(self.0.publisher.applied_by_all());
        let socket = self.0.directory.join(&config.name);
        let options = ControllerOptions {
            name: config.name.clone(),
            read_only: config.read_only,
            packed_ring: config.packed_ring,
        };
        let controller = Arc::new(Controller::new(id, key, portid, options, descriptor.device()));
        let config = VhostBlkConfig { bdev_name: descriptor.device().name().into(), ..config };
        let name = config.name.clone();
        let created =
            Created { controller, descriptor: Some(Arc::new(descriptor)), config, socket: socket.clone() };
        let info = created.info(0);
        state.controllers.insert(name.clone(), created);
        let undo = |state: &mut TargetState| {
            state.controllers.remove(&name);
            state.keys.retire(key, self.0.publisher.generation());
        };
        if let Err(error) = self.0.publisher.change(Arc::new(state.config())) {
            undo(&mut state);
            return Err(VhostTargetError::NotApplied(error));
        }
        // Clients may connect at once, so the cores know the controller before.
        if let Err(error) = cores.listen(&StreamAddress::Unix(socket), portid) {
            undo(&mut state);
            let generation = self.0.publisher.publish(Arc::new(state.config()));
            state.keys.retire(key, generation);
            return Err(error.into());
        }
        Ok(info)
    }

    /// Deletes a controller.
    ///
    /// # Errors
    /// There is none of this name, clients use it, or a reactor does not respond; nothing has changed then.
    pub fn delete(&self, name: &str) -> Result<(), VhostTargetError> {
        let mut state = self.lock()?;
        let not_found = || VhostTargetError::NotFound(name.into());
        let controller = state.controllers.get(name).ok_or_else(not_found)?.controller.clone();
        if state.connections()?.contains(&controller.id) {
            return Err(VhostTargetError::Busy(name.into()));
        }
        let Some(created) = state.controllers.remove(name) else { return Err(not_found()) };
        if let Err(error) = self.0.publisher.change(Arc::new(state.config())) {
            state.controllers.insert(name.into(), created);
            return Err(VhostTargetError::NotApplied(error));
        }
        state.keys.retire(controller.key, self.0.publisher.generation());
        if let Some(cores) = &state.cores {
            // A core that does not respond closes it when it runs again.
            _ = cores.unlisten(Some(controller.portid));
        }
        Ok(())
    }

    /// The controllers by name.
    ///
    /// # Errors
    /// A reactor does not respond.
    pub fn controllers(&self) -> Result<Vec<VhostControllerInfo>, VhostTargetError> {
        let state = self.lock_any();
        let ids = state.connections()?;
        let connections = |id| ids.iter().filter(|of| **of == id).count();
        Ok(state.controllers.values().map(|one| one.info(connections(one.controller.id))).collect())
    }

    /// The controllers by name, without their connections.
    pub fn configured(&self) -> Vec<VhostControllerInfo> {
        self.lock_any().controllers.values().map(|one| one.info(0)).collect()
    }

    /// Closes the listeners and rejects changes. Clients are disconnected when the reactors stop.
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
        self.lock_any().controllers.clear();
        self.0.publisher.publish(Arc::default());
    }

    fn start(&self, state: &mut TargetState) -> Result<TargetCores<VhostCore>, VhostTargetError> {
        let limits = GroupLimits {
            connections_max: CONNECTIONS_MAX,
            logins_max: LOGINS_MAX,
            ..GroupLimits::default()
        };
        let make = |core: &reactor::Core, _: &target_shell::GroupWaker| VhostCore::new(core);
        let cores = TargetCores::start(&self.0.reactors, &self.0.publisher, limits, make)?;
        Ok(state.cores.insert(cores).clone())
    }

    /// A device was removed: requests of its controllers fail from now on. Or it was resized.
    fn device_event(&self, event: &DeviceEvent) {
        let mut state = self.lock_any();
        let device = event.device();
        let is_of = |created: &Created| {
            created.descriptor.as_ref().is_some_and(|descriptor| Arc::ptr_eq(descriptor.device(), device))
        };
        if state.stopping || !state.controllers.values().any(is_of) {
            return;
        }
        for created in state.controllers.values_mut().filter(|one| is_of(one)) {
            match event {
                DeviceEvent::Registered(_) => return,
                DeviceEvent::Removed(_) => {
                    log::warn!(
                        target: "vhost",
                        "{}: {} was removed, requests fail from now on",
                        created.config.name,
                        device.name()
                    );
                    created.descriptor = None;
                }
                DeviceEvent::Resized(_) => {
                    let sectors = device.geometry().bytes() / SECTOR_BYTES;
                    let controller = Controller { sectors, ..(*created.controller).clone() };
                    created.controller = Arc::new(controller);
                }
            }
        }
        self.0.publisher.publish(Arc::new(state.config()));
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, VhostTargetError> {
        let state = self.lock_any();
        if state.stopping { Err(VhostTargetError::Stopping) } else { Ok(state) }
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        sync::lock(&self.0.state)
    }
}

impl TargetState {
    fn config(&self) -> VhostConfig {
        let device = |one: &Created| Some((one.controller.key, one.descriptor.clone()?));
        VhostConfig {
            controllers: self.controllers.values().map(|one| one.controller.clone()).collect(),
            devices: self.controllers.values().filter_map(device).collect(),
        }
    }

    /// The controller of each open connection.
    fn connections(&self) -> Result<Vec<u64>, VhostTargetError> {
        let Some(cores) = &self.cores else { return Ok(Vec::new()) };
        let ids = cores.query(|_, connections| {
            connections.open().map(|connection| connection.controller_id()).collect::<Vec<u64>>()
        })?;
        Ok(ids.concat())
    }

    /// A port identifier that no controller has. There are fewer controllers than identifiers.
    fn free_port(&self) -> u16 {
        let is_used = |portid: &u16| self.controllers.values().any(|one| one.controller.portid == *portid);
        (1..=u16::MAX).find(|portid| !is_used(portid)).unwrap_or(u16::MAX)
    }
}

impl Created {
    fn info(&self, connections: usize) -> VhostControllerInfo {
        VhostControllerInfo {
            config: self.config.clone(),
            read_only: self.controller.read_only,
            socket: self.socket.clone(),
            connections,
        }
    }
}

fn check_name(name: &str) -> Result<(), VhostTargetError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
        let reason = format!("ctrlr: expected 1 to {NAME_BYTES_MAX} bytes without control characters");
        return Err(VhostTargetError::Invalid(reason));
    }
    Ok(())
}

/// Virtio knows sectors of 512 bytes and no metadata.
fn check_geometry(device: &BlockDevice) -> Result<(), VhostTargetError> {
    let geometry = device.geometry();
    if geometry.block_size.is_multiple_of(SECTOR_BYTES as u32) && !geometry.metadata.extended {
        return Ok(());
    }
    let (name, bytes) = (device.name(), geometry.block_size);
    Err(VhostTargetError::Invalid(format!(
        "dev_name: {name} has blocks of {bytes} bytes, metadata included; virtio needs multiples of 512"
    )))
}
