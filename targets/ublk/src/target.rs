//! The control plane's handle of the target.

mod driver;

use std::collections::BTreeMap;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};

use bdev::{Access, BlockDevice, Descriptor, DeviceEvent, Registry};
use os::UblkDevice;
use reactor::{ReactorHandle, blocking};
use target_shell::{
    ControlledTarget, CoreMailboxes, Publisher, TargetControl, WeakTargetControl, reactors_of_mask,
};
use wire_ublk::{DeviceInfo, UblkDeviceState};

use self::driver::{Driver, Found};
use crate::UblkError;
use crate::group::{UblkGroup, UblkMessage};
use crate::limits::{DISKS_MAX, EVENTS_MAX, QUEUE_DEPTH_MAX, QUEUES_MAX, STOP_TIMEOUT};
use crate::shape::DiskShape;

/// A disk, or what it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkDisk {
    /// The number N of `/dev/ublkbN`.
    pub number: u32,
    /// Name, alias or UUID of the block device.
    pub bdev_name: String,
    /// Queues, each served by one reactor.
    pub queues: u32,
    /// Requests in flight of a queue.
    pub queue_depth: u32,
    /// The disk of a process without CAP_SYS_ADMIN, which must be able to read and write `/dev/ublk-control`
    /// and `/dev/ublkcN`. It ends with the process.
    pub unprivileged: bool,
}

impl UblkDisk {
    /// A disk with one queue of 128 requests.
    pub fn new(bdev_name: &str, number: u32) -> UblkDisk {
        UblkDisk { number, bdev_name: bdev_name.into(), queues: 1, queue_depth: 128, unprivileged: false }
    }

    /// Path of the block device.
    pub fn device(&self) -> String {
        format!("/dev/ublkb{}", self.number)
    }

    fn kernel_device(&self) -> UblkDevice {
        UblkDevice { number: self.number, unprivileged: self.unprivileged }
    }
}

/// The ublk target of a program. Cheap to clone.
///
/// [`create`](Self::create) comes first. Calls block while the kernel works, up to a minute, and must not be
/// made on a reactor. A program without the target pays nothing for it.
#[derive(Clone)]
pub struct UblkTarget(TargetControl<TargetState>);

/// What device events need while the state is locked.
#[derive(Default)]
struct TargetShared {
    /// Never locked for long: device events need it.
    disks: Mutex<BTreeMap<u32, ServedDisk>>,
    events: Mutex<Option<SyncSender<DeviceEvent>>>,
}

/// Locked while the driver executes a command.
#[derive(Default)]
struct TargetState {
    created: Option<Created>,
    mailboxes: Option<CoreMailboxes<UblkMessage>>,
}

struct Created {
    driver: Driver,
    /// Indexes of the reactors that serve queues.
    cores: Vec<usize>,
    next_core: usize,
    cpumask: Option<String>,
}

/// A disk that is served.
struct ServedDisk {
    disk: UblkDisk,
    descriptor: Arc<Descriptor>,
    uses_pages: bool,
}

impl UblkTarget {
    /// A target that is not created.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> UblkTarget {
        let (shared, state) = (TargetShared::default(), TargetState::default());
        UblkTarget(TargetControl::new(registry, reactors, shared, state))
    }

    /// Creates the target: opens the driver. Queues are served by the reactors of `cpumask`, SPDK's format of
    /// a set of CPUs; by all if it is `None`.
    ///
    /// # Errors
    /// The target was created, no reactor is in the mask, or the kernel has no ublk of Linux 6.5 or later.
    pub fn create(&self, cpumask: Option<&str>) -> Result<(), UblkError> {
        let mut state = self.lock()?;
        if state.created.is_some() {
            return Err(UblkError::Created);
        }
        let cores = reactors_of_mask(self.0.reactors(), cpumask)?;
        let driver = Driver::open()?;
        if state.mailboxes.is_none() {
            self.start_worker()?;
            let mailboxes = CoreMailboxes::default();
            mailboxes.start(self.0.reactors(), &Publisher::default(), |core, inbox, _| {
                UblkGroup::new(core, inbox)
            })?;
            state.mailboxes = Some(mailboxes);
        }
        let cpumask = cpumask.map(str::to_string);
        state.created = Some(Created { driver, cores, next_core: 0, cpumask });
        Ok(())
    }

    /// Stops all disks, and closes the driver.
    ///
    /// # Errors
    /// There is no target, or a disk does not stop; those before it have.
    pub fn destroy(&self) -> Result<(), UblkError> {
        let mut state = self.lock()?;
        self.stop_all(&mut state)?;
        state.created = None;
        Ok(())
    }

    /// Makes a block device `/dev/ublkbN`, and returns its number. If the number is that of a disk of the
    /// same block device whose server was killed, the disk is [recovered](Self::recover).
    ///
    /// # Errors
    /// The block device is missing or does not suit, the number is in use, the kernel refuses, or a reactor
    /// does not respond; nothing has changed then.
    pub fn start(&self, disk: &UblkDisk) -> Result<u32, UblkError> {
        if disk.queues == 0 || disk.queue_depth == 0 {
            return Err(UblkError::Invalid("num_queues and queue_depth: expected at least 1".into()));
        }
        let mut guard = self.lock()?;
        let (state, mailboxes) = created(&mut guard)?;
        let (descriptor, shape) = self.open(disk.number, &disk.bdev_name)?;
        let name = descriptor.device().name().to_string();
        let info = DeviceInfo {
            queues: disk.queues.min(QUEUES_MAX) as u16,
            queue_depth: disk.queue_depth.min(QUEUE_DEPTH_MAX) as u16,
            device: disk.number,
            ..DeviceInfo::default()
        };
        let info = match state.driver.add(&name, &info, disk.unprivileged, &shape)? {
            Found::Added(info) => info,
            Found::Left(info) => {
                log::info!(target: "ublk", "/dev/ublkb{}: it was left by a process that was killed", disk.number);
                return self.recover_left(state, mailboxes, &info, descriptor, shape);
            }
        };
        let served = state.serve(mailboxes, &info, &descriptor, &shape);
        let device = UblkDevice::of(&info);
        match served.and_then(|()| state.driver.start(device)) {
            Ok(()) => Ok(self.insert(&info, descriptor, &shape)),
            Err(error) => {
                if let Err(error) = state.remove(mailboxes, device) {
                    log::warn!(target: "ublk", "/dev/ublkb{}: {error}", info.device);
                }
                Err(error)
            }
        }
    }

    /// Serves a disk whose server was killed, and returns its number. The kernel sends the requests that were
    /// in flight again; none of them fails.
    ///
    /// # Errors
    /// There is no such disk, it has a server, or the block device has another size; the disk waits then as
    /// before.
    pub fn recover(&self, bdev_name: &str, number: u32) -> Result<u32, UblkError> {
        let mut guard = self.lock()?;
        let (state, mailboxes) = created(&mut guard)?;
        let (descriptor, shape) = self.open(number, bdev_name)?;
        let info = state.driver.info(number)?;
        if UblkDeviceState::from_number(info.state) == Some(UblkDeviceState::Dead) {
            return Err(UblkError::NotFound(number));
        }
        self.recover_left(state, mailboxes, &info, descriptor, shape)
    }

    fn recover_left(
        &self,
        state: &mut Created,
        mailboxes: &CoreMailboxes<UblkMessage>,
        info: &DeviceInfo,
        descriptor: Arc<Descriptor>,
        mut shape: DiskShape,
    ) -> Result<u32, UblkError> {
        state.driver.begin_recovery(info, &mut shape)?;
        state.serve(mailboxes, info, &descriptor, &shape)?;
        state.driver.end_recovery(UblkDevice::of(info))?;
        Ok(self.insert(info, descriptor, &shape))
    }

    /// Removes a disk. Its requests complete first.
    ///
    /// # Errors
    /// There is no such disk, or the kernel does not answer within a minute: the disk is there still then.
    pub fn stop(&self, number: u32) -> Result<(), UblkError> {
        let mut guard = self.lock()?;
        let device = self.device(number)?;
        let (state, mailboxes) = created(&mut guard)?;
        self.stop_disk(state, mailboxes, device)
    }

    /// The name of the block device that `name` finds.
    pub(crate) fn bdev_name(&self, name: &str) -> String {
        self.0.registry().name_of(name)
    }

    /// The disks, by number.
    pub fn disks(&self) -> Vec<UblkDisk> {
        sync::lock(&self.0.shared().disks).values().map(|served| served.disk.clone()).collect()
    }

    /// Whether reads and writes of a disk are operations on the kernel's own pages, without a copy.
    pub fn uses_pages(&self, number: u32) -> bool {
        sync::lock(&self.0.shared().disks).get(&number).is_some_and(|served| served.uses_pages)
    }

    /// The CPU mask that the target was created with, if it was created.
    pub fn created_with(&self) -> Option<Option<String>> {
        self.lock_any().created.as_ref().map(|created| created.cpumask.clone())
    }

    /// Stops all disks, at the end of the program.
    pub fn shutdown(&self) {
        let mut state = self.0.stop();
        if state.created.is_some()
            && let Err(error) = self.stop_all(&mut state)
        {
            log::warn!(target: "ublk", "{error}");
        }
        *sync::lock(&self.0.shared().events) = None;
    }

    /// The device of a disk that is served.
    fn device(&self, number: u32) -> Result<UblkDevice, UblkError> {
        let disks = sync::lock(&self.0.shared().disks);
        disks.get(&number).map(|served| served.disk.kernel_device()).ok_or(UblkError::NotFound(number))
    }

    fn stop_all(&self, state: &mut TargetState) -> Result<(), UblkError> {
        let (state, mailboxes) = created(state)?;
        self.disks().into_iter().try_for_each(|disk| self.stop_disk(state, mailboxes, disk.kernel_device()))
    }

    fn stop_disk(
        &self,
        state: &mut Created,
        mailboxes: &CoreMailboxes<UblkMessage>,
        device: UblkDevice,
    ) -> Result<(), UblkError> {
        state.remove(mailboxes, device)?;
        // The descriptor closes the device, which calls its module.
        let served = sync::lock(&self.0.shared().disks).remove(&device.number);
        drop(served);
        Ok(())
    }

    /// Opens the block device of a disk that is not there.
    fn open(&self, number: u32, bdev_name: &str) -> Result<(Arc<Descriptor>, DiskShape), UblkError> {
        let disks = sync::lock(&self.0.shared().disks);
        if disks.contains_key(&number) {
            return Err(UblkError::Busy(number));
        }
        if disks.len() >= DISKS_MAX {
            return Err(UblkError::TooMany(format!("there are {DISKS_MAX} disks already")));
        }
        drop(disks);
        let device = self.0.registry().find(bdev_name);
        let read_only = device.is_some_and(|device| device.bdev().read_only());
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let descriptor = self.0.registry().open(bdev_name, access)?;
        let shape = DiskShape::of(descriptor.device())?;
        Ok((Arc::new(descriptor), shape))
    }

    fn insert(&self, info: &DeviceInfo, descriptor: Arc<Descriptor>, shape: &DiskShape) -> u32 {
        let disk = UblkDisk {
            number: info.device,
            bdev_name: descriptor.device().name().to_string(),
            queues: info.queues.into(),
            queue_depth: info.queue_depth.into(),
            unprivileged: UblkDevice::of(info).unprivileged,
        };
        let device = descriptor.device().clone();
        let removed = {
            let mut disks = sync::lock(&self.0.shared().disks);
            disks.insert(info.device, ServedDisk { disk, descriptor, uses_pages: shape.uses_pages(info) });
            device.is_removed()
        };
        if removed {
            // Its event may have come before the disk was known.
            TargetState::device_event(&self.0, &DeviceEvent::Removed(device));
        }
        info.device
    }

    /// Starts the thread that handles changes of devices: their reporter must not be blocked.
    fn start_worker(&self) -> Result<(), UblkError> {
        let (sender, receiver) = sync_channel(EVENTS_MAX);
        let target = self.0.downgrade();
        blocking::spawn_worker("ublk", receiver, move |event| handle_event(&target, &event))
            .map_err(crate::failure::kernel("a thread cannot be created"))?;
        *sync::lock(&self.0.shared().events) = Some(sender);
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, TargetState>, UblkError> {
        Ok(self.0.lock()?)
    }

    fn lock_any(&self) -> MutexGuard<'_, TargetState> {
        self.0.lock_any()
    }
}

/// The parts of a target that was created.
fn created(state: &mut TargetState) -> Result<(&mut Created, &CoreMailboxes<UblkMessage>), UblkError> {
    match (&mut state.created, &state.mailboxes) {
        (Some(created), Some(mailboxes)) => Ok((created, mailboxes)),
        _ => Err(UblkError::NoTarget),
    }
}

impl Created {
    /// Serves all queues of a device, each on the next reactor.
    fn serve(
        &mut self,
        mailboxes: &CoreMailboxes<UblkMessage>,
        info: &DeviceInfo,
        descriptor: &Arc<Descriptor>,
        shape: &DiskShape,
    ) -> Result<(), UblkError> {
        let queues = driver::map_queues(info, descriptor, shape)?;
        for queue in queues {
            let core = self.cores[self.next_core % self.cores.len()];
            self.next_core += 1;
            let start = Box::new(queue);
            mailboxes.ask(core, |responder| UblkMessage::Start(start, responder))??;
        }
        Ok(())
    }

    /// Stops a device, waits for the end of its queues, and deletes it.
    fn remove(
        &mut self,
        mailboxes: &CoreMailboxes<UblkMessage>,
        device: UblkDevice,
    ) -> Result<(), UblkError> {
        self.driver.stop(device)?;
        for core in 0..mailboxes.len() {
            let wait = |responder| UblkMessage::WaitEnd(device.number, responder);
            let request = mailboxes.request(core, wait)?;
            request.wait(STOP_TIMEOUT).map_err(|_| target_shell::ShellError::Unresponsive(core))?;
        }
        self.driver.delete(device)
    }
}

impl ControlledTarget for TargetState {
    type Config = ();
    type Shared = TargetShared;

    /// Sends a change of a device that has disks to the worker.
    fn device_event(control: &TargetControl<TargetState>, event: &DeviceEvent) {
        let TargetShared { disks, events } = control.shared();
        if !sync::lock(disks).values().any(|served| served.is_of(event.device())) {
            return;
        }
        let sent = sync::lock(events).as_ref().map(|events| events.try_send(event.clone()));
        if let Some(Err(_)) = sent {
            log::error!(target: "ublk", "{}: too many changes at once; its disks are not changed", event.device().name());
        }
    }
}

impl ServedDisk {
    fn is_of(&self, device: &Arc<BlockDevice>) -> bool {
        Arc::ptr_eq(self.descriptor.device(), device)
    }
}

/// Follows a change of a device, on the worker's thread.
fn handle_event(target: &WeakTargetControl<TargetState>, event: &DeviceEvent) {
    let Some(control) = target.upgrade() else { return };
    let target = UblkTarget(control);
    let numbers: Vec<u32> = {
        let disks = sync::lock(&target.0.shared().disks);
        let of = disks.values().filter(|served| served.is_of(event.device()));
        of.map(|served| served.disk.number).collect()
    };
    for number in numbers {
        let name = event.device().name();
        let result = match event {
            DeviceEvent::Registered(_) => Ok(()),
            DeviceEvent::Removed(_) => {
                log::info!(target: "ublk", "/dev/ublkb{number}: removed with {name}");
                target.stop(number)
            }
            DeviceEvent::Resized(device) => target.lock().and_then(|mut state| {
                let (state, _) = created(&mut state)?;
                state.driver.resize(target.device(number)?, DiskShape::of(device)?.sectors())
            }),
        };
        if let Err(error) = result {
            log::warn!(target: "ublk", "/dev/ublkb{number}: {name} has changed: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
