//! The registry of block devices: names, claims and events. Control plane only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use accel::Accel;
use uuid::Uuid;

use crate::device::OpenHandle;
use crate::device_reservations::{
    OpenReservationsError, PreparedReservations, ReservationLease, ReservationTable,
};
use crate::memory_budget::MemoryBudget;
use crate::stacking::UpperOutcome;
use crate::trace::{TargetTrace, Trace, TraceEvent, TraceGroup};
use crate::{Access, Bdev, BdevChannel, BdevError, BlockDevice, DeviceMemory, Tenants};

/// Most levels of devices on each other: each adds to the stack of the reactor that submits a request, and of
/// the thread that removes the lowest.
pub const STACK_LEVELS_MAX: usize = 64;

/// The registry of block devices. Cheap to clone; usable from any thread; not used on the I/O path.
#[derive(Clone, Default)]
pub struct Registry(Arc<RegistryInner>);

#[derive(Default)]
struct RegistryInner {
    table: Mutex<RegistryTable>,
    reservations: Arc<ReservationTable>,
    /// Why files cannot be used, if they cannot.
    no_file_io: OnceLock<String>,
    memory: MemoryBudget,
    trace: Arc<Trace>,
    accel: Accel,
    tenants: Tenants,
}

type Subscriber = Arc<dyn Fn(&DeviceEvent) + Send + Sync>;

#[derive(Default)]
struct RegistryTable {
    devices: BTreeMap<String, Arc<BlockDevice>>,
    /// Names of devices by their aliases, UUIDs and backing files.
    by_alias: HashMap<String, String>,
    by_uuid: HashMap<Uuid, String>,
    by_backing: HashMap<(u64, u64), String>,
    /// The devices on top of a device, and the devices below each of them, by UUIDs. A base that is gone is
    /// neither; the entry of its upper stays, be it empty.
    uppers: HashMap<Uuid, Vec<Weak<BlockDevice>>>,
    bases: HashMap<Uuid, Vec<Uuid>>,
    subscribers: Vec<(u64, Subscriber)>,
    last_subscription: u64,
}

/// A change of a device, sent to subscribers.
#[derive(Clone, Debug)]
pub enum DeviceEvent {
    /// It can be found and opened.
    Registered(Arc<BlockDevice>),
    /// Its number of blocks changed.
    Resized(Arc<BlockDevice>),
    /// It is not registered any more, and every new I/O fails.
    Removed(Arc<BlockDevice>),
}

/// Identifies a subscription; see [`Registry::unsubscribe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubscriptionId(u64);

/// An open device (SPDK's `spdk_bdev_desc`). It may be sent to the core that opens channels. The device is
/// closed, and its claim released, when the descriptor and all its channels are dropped.
pub struct Descriptor(Arc<OpenHandle>);

impl DeviceEvent {
    /// The device that changed.
    pub fn device(&self) -> &Arc<BlockDevice> {
        match self {
            DeviceEvent::Registered(device) | DeviceEvent::Resized(device) | DeviceEvent::Removed(device) => {
                device
            }
        }
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Registry").field(&self.lock().devices.len()).finish()
    }
}

impl Registry {
    /// A registry without devices.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Rejects devices on files from now on: the reactors have no io_uring, so that each I/O would fail.
    pub fn refuse_files(&self, reason: impl Into<String>) {
        // The first reason is as good as another.
        _ = self.0.no_file_io.set(reason.into());
    }

    pub(crate) fn check_file_io(&self) -> Result<(), BdevError> {
        match self.0.no_file_io.get() {
            Some(reason) => Err(BdevError::NoFileIo { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// The acceleration framework that modules copy and encrypt with.
    pub fn accel(&self) -> &Accel {
        &self.0.accel
    }

    /// Limits the memory of all devices in memory together. Without a call there is no limit.
    pub fn limit_memory(&self, limit_bytes: u64) {
        self.0.memory.set_limit(limit_bytes);
    }

    /// Allocates the contents of the device `name`: zeroes, whose pages come with the first write. Memory
    /// that is allocated after the engine `ioat` was enabled can be reached by its devices, which pin it.
    ///
    /// # Errors
    /// [`BdevError::NoMemoryLeft`] beyond the limit; [`BdevError::Memory`] if the address space has no such
    /// range.
    pub fn allocate_memory(&self, name: &str, bytes: u64) -> Result<Arc<DeviceMemory>, BdevError> {
        let shared = self.0.accel.is_enabled(accel::Engine::Ioat);
        self.0.memory.allocate(name, bytes, shared).map(Arc::new)
    }

    /// For whom the requests of all devices are.
    pub fn tenants(&self) -> &Tenants {
        &self.0.tenants
    }

    /// Registers a device. Fails if its name, an alias, its UUID or its backing file is in use. The null UUID
    /// stands for none, as in SPDK: the device gets a random one.
    pub fn register(
        &self,
        name: &str,
        uuid: Option<Uuid>,
        aliases: &[String],
        bdev: Arc<dyn Bdev>,
    ) -> Result<Arc<BlockDevice>, BdevError> {
        check_name(name)?;
        check_geometry(&*bdev)?;
        let uuid = uuid.filter(|uuid| !uuid.is_nil());
        let device = Arc::new(BlockDevice::new(name, uuid, aliases, bdev, &self.0.trace, &self.0.tenants));
        let mut table = self.lock();
        let uuid_text = device.uuid().to_string();
        let names = std::iter::once(name).chain(aliases.iter().map(String::as_str));
        for taken in names.chain([uuid_text.as_str()]) {
            if table.find(taken).is_some() {
                return Err(BdevError::Exists { name: taken.to_string() });
            }
        }
        if let Some(medium) = device.bdev().backing_id()
            && let Some(holder) = table.backing_user(medium)
        {
            let by = format!("the bdev {holder}, which uses the same file");
            return Err(BdevError::Claimed { name: name.to_string(), by });
        }
        device.sync_traced();
        self.0.reservations.attach(&device);
        table.insert(&device);
        drop(table);
        self.notify(&DeviceEvent::Registered(device.clone()));
        Ok(device)
    }

    /// Unregisters a device at once: it cannot be found any more, new I/O fails, I/O in flight completes.
    /// Does not wait for users; [`BlockDevice::wait_closed`] does.
    pub fn unregister(&self, name: &str) -> Result<Arc<BlockDevice>, BdevError> {
        let mut table = self.lock();
        let found = table.find(name).map(|device| device.name().to_string());
        let device = found.and_then(|name| table.remove(&name));
        let device = device.ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        // Now, as a device with its UUID may be registered and stacked on at once.
        let uppers = table.unstack_removed(&device);
        drop(table);
        device.remove();
        self.notify(&DeviceEvent::Removed(device.clone()));
        uppers.iter().for_each(|upper| self.lose_base(&device, upper));
        Ok(device)
    }

    /// Gives a device other aliases, instead of those that it has. No user of the device is affected.
    ///
    /// # Errors
    /// [`BdevError::Exists`] if another device has one of them; [`BdevError::NotFound`]. Nothing has changed.
    pub fn set_aliases(&self, name: &str, aliases: &[String]) -> Result<(), BdevError> {
        let mut table = self.lock();
        let device = table.find(name).cloned();
        let device = device.ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        for alias in aliases {
            if table.find(alias).is_some_and(|other| !Arc::ptr_eq(other, &device)) {
                return Err(BdevError::Exists { name: alias.clone() });
            }
        }
        for alias in device.aliases().iter() {
            table.by_alias.remove(alias);
        }
        device.set_aliases(aliases);
        for alias in aliases {
            table.by_alias.insert(alias.clone(), device.name().to_string());
        }
        Ok(())
    }

    /// Opens the reservations of a device, which all its users share. With a file they can persist through
    /// power loss; it is read, and written, when the first user opens it. Blocks until then, for at most ten
    /// seconds: to be called without a lock.
    ///
    /// # Errors
    /// The file is unusable, or in use for another device, or the device is in use with another file or none.
    pub fn open_reservations(
        &self,
        device: &BlockDevice,
        file: Option<&Path>,
    ) -> Result<ReservationLease, OpenReservationsError> {
        let lease = self.0.reservations.open(device.uuid(), file)?;
        // A device that is registered later is attached then.
        let registered = self.find(&device.uuid().to_string());
        if let Some(device) = registered {
            lease.reservations().attach_device(&device);
        }
        Ok(lease)
    }

    /// The first part of opening the reservations of a device for a user with a lock, who calls it without
    /// the lock: opens those with a file, as [`open_reservations`](Self::open_reservations). A device that is
    /// not there is no error yet.
    ///
    /// # Errors
    /// As [`open_reservations`](Self::open_reservations).
    pub fn prepare_reservations(
        &self,
        device: Option<&BlockDevice>,
        file: Option<&Path>,
    ) -> Result<PreparedReservations, OpenReservationsError> {
        let lease = match (device, file) {
            (Some(device), Some(file)) => Some(self.open_reservations(device, Some(file))?),
            _ => None,
        };
        Ok(PreparedReservations { has_file: file.is_some(), lease })
    }

    /// The second part, with the lock and the device that is open: does not wait. `None` if the device was
    /// created, or created again, since the first part.
    ///
    /// # Errors
    /// As [`open_reservations`](Self::open_reservations).
    pub fn finish_reservations(
        &self,
        prepared: PreparedReservations,
        device: &BlockDevice,
    ) -> Result<Option<ReservationLease>, OpenReservationsError> {
        match prepared.lease {
            Some(lease) => Ok(Some(lease).filter(|lease| lease.device() == device.uuid())),
            None if prepared.has_file => Ok(None),
            None => self.open_reservations(device, None).map(Some),
        }
    }

    /// Finds a device by name, alias or UUID.
    pub fn find(&self, name: &str) -> Option<Arc<BlockDevice>> {
        self.lock().find(name).cloned()
    }

    /// The name of the device that `name` finds, or `name` if there is none.
    pub fn name_of(&self, name: &str) -> String {
        self.find(name).map_or_else(|| name.to_string(), |device| device.name().to_string())
    }

    /// All devices, sorted by name.
    pub fn list(&self) -> Vec<Arc<BlockDevice>> {
        self.lock().devices.values().cloned().collect()
    }

    /// As [`open`](Self::open), for a target that checks the device's [reservations](Self::open_reservations)
    /// itself, for each of its registrants. What all other users submit is checked by the layer: it fails
    /// with a reservation conflict where a reservation denies it to those that are not registered.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_reservations(&self, name: &str, access: Access<'_>) -> Result<Descriptor, BdevError> {
        let mut open = self.open_handle(name, access)?;
        open.checks_reservations = true;
        Ok(Descriptor(Arc::new(open)))
    }

    /// Opens a device by name, alias or UUID.
    ///
    /// # Errors
    /// There is none, it was removed, or a claim excludes the access.
    pub fn open(&self, name: &str, access: Access<'_>) -> Result<Descriptor, BdevError> {
        Ok(Descriptor(Arc::new(self.open_handle(name, access)?)))
    }

    fn open_handle(&self, name: &str, access: Access<'_>) -> Result<OpenHandle, BdevError> {
        let device = self.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        device.open(access)
    }

    /// The enabled trace points of a group: bit [`TracePoint::number`](crate::TracePoint::number) of each.
    pub fn trace_mask(&self, group: TraceGroup) -> u64 {
        self.0.trace.mask(group)
    }

    /// Enables and disables trace points of a group, on all devices and targets and on those that come later.
    pub fn set_trace_mask(&self, group: TraceGroup, mask: u64) {
        let table = self.lock();
        self.0.trace.set_mask(group, mask);
        table.devices.values().for_each(|device| device.sync_traced());
    }

    /// Where a target records the events of its connections on a core.
    pub fn target_trace(&self, core: usize, target: &'static str) -> TargetTrace {
        self.0.trace.of_target(core, target)
    }

    /// Forgets the trace events so far.
    pub fn clear_trace(&self) {
        self.0.trace.clear();
    }

    /// The last `max` trace events of all cores, or of `core`, the oldest first. Each core keeps 8,191 at
    /// most.
    pub fn trace_events(&self, core: Option<usize>, max: usize) -> Vec<TraceEvent> {
        self.0.trace.events(core, max)
    }

    /// All claims: device and holder.
    pub fn claims(&self) -> Vec<(String, String)> {
        let claims = |device: Arc<BlockDevice>| {
            let holders = device.claim().map_or(Vec::new(), |(_, holders)| holders);
            holders.into_iter().map(move |by| (device.name().to_string(), by))
        };
        self.list().into_iter().flat_map(claims).collect()
    }

    /// Calls `subscriber` for every later event, on the thread that caused it and outside the registry's
    /// lock. It must not block.
    pub fn subscribe(&self, subscriber: Box<dyn Fn(&DeviceEvent) + Send + Sync>) -> SubscriptionId {
        let mut table = self.lock();
        table.last_subscription += 1;
        let id = table.last_subscription;
        table.subscribers.push((id, subscriber.into()));
        SubscriptionId(id)
    }

    /// Ends a subscription. An event that is being delivered may still arrive.
    pub fn unsubscribe(&self, id: SubscriptionId) {
        self.lock().subscribers.retain(|(other, _)| *other != id.0);
    }

    /// Applies the number of blocks that the module reports now, and notifies subscribers. Channels see it at
    /// their next submit. No effect if the number is unchanged.
    pub fn notify_resized(&self, name: &str) -> Result<(), BdevError> {
        let device = self.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        let blocks = device.bdev().geometry().blocks;
        if device.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            self.notify(&DeviceEvent::Resized(device.clone()));
            for upper in self.uppers(&device) {
                self.apply(&upper, upper.bdev().on_base_resized(&device));
            }
        }
        Ok(())
    }

    /// Says that `upper` stands on `base`, so that its module decides what becomes of it when the base is
    /// removed or resized ([`Bdev::on_base_removed`]): at once, if the base was removed meanwhile. A device
    /// may stand on several, and several on one. Costs the events of other devices nothing, however many such
    /// pairs there are.
    pub fn stack(&self, base: &BlockDevice, upper: &Arc<BlockDevice>) {
        let mut table = self.lock();
        if !table.has(upper) {
            return;
        }
        if table.has(base) {
            table.uppers.entry(base.uuid()).or_default().push(Arc::downgrade(upper));
            table.bases.entry(upper.uuid()).or_default().push(base.uuid());
            return;
        }
        table.bases.entry(upper.uuid()).or_default();
        drop(table);
        self.lose_base(base, upper);
    }

    /// Ends what [`stack`](Self::stack) said: a module does without a base that is still there.
    pub fn unstack(&self, base: &BlockDevice, upper: &BlockDevice) {
        let mut table = self.lock();
        table.remove_upper(base.uuid(), upper);
        if let Some(bases) = table.bases.get_mut(&upper.uuid()) {
            bases.retain(|uuid| *uuid != base.uuid());
        }
    }

    /// The devices that stand on a device.
    pub fn uppers(&self, base: &BlockDevice) -> Vec<Arc<BlockDevice>> {
        self.lock().uppers.get(&base.uuid()).into_iter().flatten().filter_map(Weak::upgrade).collect()
    }

    /// The devices that a device stands on, and these do, each once: those that are nearer first.
    pub fn below(&self, device: &BlockDevice) -> Vec<Arc<BlockDevice>> {
        let table = self.lock();
        let mut below: Vec<Arc<BlockDevice>> = Vec::new();
        let mut seen = BTreeSet::from([device.uuid()]);
        let mut level = vec![device.uuid()];
        while !level.is_empty() {
            let bases = level.iter().filter_map(|uuid| table.bases.get(uuid)).flatten();
            level = bases.copied().filter(|uuid| seen.insert(*uuid)).collect();
            let names = level.iter().filter_map(|uuid| table.by_uuid.get(uuid));
            below.extend(names.filter_map(|name| table.devices.get(name)).cloned());
        }
        below
    }

    /// Fails if a device on `base`, or `upper` with all that stands on it, would have more than
    /// [`STACK_LEVELS_MAX`] levels.
    ///
    /// # Errors
    /// [`BdevError::Invalid`].
    pub fn check_levels(&self, base: &BlockDevice, upper: Option<&BlockDevice>) -> Result<(), BdevError> {
        let table = self.lock();
        let levels = count_levels(base.uuid(), |uuid| table.bases.get(&uuid).cloned().unwrap_or_default());
        let above = upper.map_or(1, |upper| {
            count_levels(upper.uuid(), |uuid| {
                let uppers = table.uppers.get(&uuid).into_iter().flatten().filter_map(Weak::upgrade);
                uppers.map(|upper| upper.uuid()).collect()
            })
        });
        if levels + above <= STACK_LEVELS_MAX {
            return Ok(());
        }
        let reason = format!(
            "{} has {levels} levels, and bdevs stand on each other in at most {STACK_LEVELS_MAX}",
            base.name()
        );
        Err(BdevError::Invalid { field: "base", reason })
    }

    /// Whether the device stands on other ones, or did.
    pub(crate) fn is_stacked(&self, upper: &BlockDevice) -> bool {
        self.lock().bases.contains_key(&upper.uuid())
    }

    /// Unregisters a device after all that stands on it.
    pub(crate) fn unregister_stack(&self, name: &str) {
        let mut stack = vec![name.to_string()];
        while let Some(top) = stack.last() {
            let uppers = self.find(top).map_or(Vec::new(), |device| self.uppers(&device));
            if uppers.is_empty() {
                // An error means that it is gone already.
                let _ = self.unregister(top);
                stack.pop();
            } else {
                stack.extend(uppers.iter().map(|upper| upper.name().to_string()));
            }
        }
    }

    fn lose_base(&self, base: &BlockDevice, upper: &Arc<BlockDevice>) {
        self.apply(upper, upper.bdev().on_base_removed(base));
    }

    fn apply(&self, upper: &BlockDevice, outcome: UpperOutcome) {
        // It may have been removed meanwhile.
        let _ = match outcome {
            UpperOutcome::Stays => Ok(()),
            UpperOutcome::Resized => self.notify_resized(upper.name()),
            UpperOutcome::Removed => self.unregister(upper.name()).map(drop),
        };
    }

    /// Name of the device that uses a backing file.
    pub(crate) fn backing_user(&self, medium: (u64, u64)) -> Option<String> {
        self.lock().backing_user(medium)
    }

    fn notify(&self, event: &DeviceEvent) {
        let subscribers = self.lock().subscribers.clone();
        for (_, subscriber) in subscribers {
            subscriber(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, RegistryTable> {
        // No user code runs under the lock and each change is one call: a poisoned lock is consistent.
        sync::lock(&self.0.table)
    }
}

impl RegistryTable {
    fn insert(&mut self, device: &Arc<BlockDevice>) {
        let name = device.name().to_string();
        for alias in device.aliases().iter() {
            self.by_alias.insert(alias.clone(), name.clone());
        }
        self.by_uuid.insert(device.uuid(), name.clone());
        if let Some(medium) = device.bdev().backing_id() {
            self.by_backing.insert(medium, name.clone());
        }
        self.devices.insert(name, device.clone());
    }

    fn remove(&mut self, name: &str) -> Option<Arc<BlockDevice>> {
        let device = self.devices.remove(name)?;
        for alias in device.aliases().iter() {
            self.by_alias.remove(alias);
        }
        self.by_uuid.remove(&device.uuid());
        if let Some(medium) = device.bdev().backing_id()
            && self.by_backing.get(&medium).is_some_and(|user| user == name)
        {
            self.by_backing.remove(&medium);
        }
        Some(device)
    }

    /// Whether it is this device that is registered by its name.
    fn has(&self, device: &BlockDevice) -> bool {
        let registered = self.devices.get(device.name());
        registered.is_some_and(|registered| std::ptr::eq(Arc::as_ptr(registered), device))
    }

    /// The devices on top of a device that was removed, which is not above or below others any more.
    fn unstack_removed(&mut self, device: &BlockDevice) -> Vec<Arc<BlockDevice>> {
        for base in self.bases.remove(&device.uuid()).unwrap_or_default() {
            self.remove_upper(base, device);
        }
        let uppers = self.uppers.remove(&device.uuid()).unwrap_or_default();
        let uppers: Vec<Arc<BlockDevice>> = uppers.iter().filter_map(Weak::upgrade).collect();
        for upper in &uppers {
            if let Some(bases) = self.bases.get_mut(&upper.uuid()) {
                bases.retain(|uuid| *uuid != device.uuid());
            }
        }
        uppers
    }

    fn remove_upper(&mut self, base: Uuid, device: &BlockDevice) {
        if let Some(uppers) = self.uppers.get_mut(&base) {
            uppers.retain(|upper| !std::ptr::eq(upper.as_ptr(), device));
            if uppers.is_empty() {
                self.uppers.remove(&base);
            }
        }
    }

    fn backing_user(&self, medium: (u64, u64)) -> Option<String> {
        self.by_backing.get(&medium).cloned()
    }

    fn find(&self, name: &str) -> Option<&Arc<BlockDevice>> {
        if let Some(device) = self.devices.get(name) {
            return Some(device);
        }
        let by_uuid = || self.by_uuid.get(&Uuid::try_parse(name).ok()?);
        self.devices.get(self.by_alias.get(name).or_else(by_uuid)?)
    }
}

impl Descriptor {
    /// The open device.
    pub fn device(&self) -> &Arc<BlockDevice> {
        &self.0.device
    }

    /// The number of its open.
    pub(crate) fn open_number(&self) -> u64 {
        self.0.number()
    }

    /// Whether the access mode allows writes.
    pub fn writes(&self) -> bool {
        self.0.writes
    }

    /// Opens an I/O channel on this core. Fails if the device is removed or the module cannot open one.
    pub fn channel(&self, core: &reactor::Core) -> Result<BdevChannel, BdevError> {
        if self.0.device.is_removed() {
            return Err(BdevError::Removed { name: self.0.device.name().to_string() });
        }
        BdevChannel::new(self.0.clone(), core)
    }
}

impl std::fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Descriptor({})", self.0.device.name())
    }
}

/// Number of levels from a device on, with the devices that are `next` to each: 1 if there is none. The count
/// ends beyond [`STACK_LEVELS_MAX`].
fn count_levels(device: Uuid, next: impl Fn(Uuid) -> Vec<Uuid>) -> usize {
    let mut levels = 0;
    let mut level = BTreeSet::from([device]);
    while !level.is_empty() && levels <= STACK_LEVELS_MAX {
        levels += 1;
        level = level.iter().flat_map(|uuid| next(*uuid)).collect();
    }
    levels
}

/// Longest name, in bytes: fits SPDK's tools and a log line.
const NAME_BYTES_MAX: usize = 255;

fn check_name(name: &str) -> Result<(), BdevError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
        let reason = format!("{name:?} is not a name of 1 to {NAME_BYTES_MAX} printable bytes");
        return Err(BdevError::invalid("name", reason));
    }
    Ok(())
}

fn check_geometry(bdev: &dyn Bdev) -> Result<(), BdevError> {
    let geometry = bdev.geometry();
    if geometry.block_size == 0 || !geometry.block_size.is_multiple_of(8) {
        let reason = format!("{} bytes is not a valid block size", geometry.block_size);
        return Err(BdevError::invalid("block_size", reason));
    }
    if geometry.blocks.checked_mul(u64::from(geometry.block_size)).is_none() {
        let reason = format!("the capacity of {} blocks overflows 64 bits", geometry.blocks);
        return Err(BdevError::invalid("num_blocks", reason));
    }
    if bdev.depth() == 0 {
        return Err(BdevError::invalid("depth", "the queue depth is 0"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{null, passthru};

    #[test]
    fn the_null_uuid_is_none() {
        let registry = Registry::new();
        let of = |name: &str| {
            let uuid = Some(Uuid::nil());
            null::create(&registry, null::NullConfig { uuid, ..null::NullConfig::new(name, 8, 512) })
                .unwrap()
                .uuid()
        };
        let uuids = [of("A"), of("B")];
        assert!(uuids.iter().all(|uuid| !uuid.is_nil()) && uuids[0] != uuids[1], "{uuids:?}");
        assert!(registry.find(&Uuid::nil().to_string()).is_none());
    }

    #[test]
    fn other_aliases_take_the_place_of_those_before_unless_another_device_has_one() {
        let registry = Registry::new();
        for name in ["A", "B"] {
            null::create(&registry, null::NullConfig::new(name, 8, 512)).unwrap();
        }
        let set = |name: &str, aliases: &[&str]| {
            let aliases: Vec<String> = aliases.iter().map(|alias| alias.to_string()).collect();
            registry.set_aliases(name, &aliases)
        };
        let found = |name: &str| registry.find(name).map(|device| device.name().to_string());
        set("A", &["one", "two"]).unwrap();
        set("A", &["two", "three"]).unwrap();
        assert_eq!(["one", "two", "three"].map(&found), [None, Some("A".into()), Some("A".into())]);
        for taken in ["A", "two"] {
            assert!(matches!(set("B", &["free", taken]), Err(BdevError::Exists { name }) if name == taken));
        }
        assert_eq!(found("free"), None);
        registry.unregister("A").unwrap();
        set("B", &["two"]).unwrap();
        assert_eq!((found("two"), found("three")), (Some("B".into()), None));
    }

    #[test]
    fn devices_stand_on_each_other_up_to_the_limit() {
        let registry = Registry::new();
        null::create(&registry, null::NullConfig::new("1", 8, 512)).unwrap();
        let create = |base: usize| {
            let (base, name) = (base.to_string(), (base + 1).to_string());
            passthru::create(&registry, passthru::PassthruConfig { base, name, uuid: None })
        };
        (1..STACK_LEVELS_MAX).for_each(|base| _ = create(base).unwrap());
        let top = registry.find(&STACK_LEVELS_MAX.to_string()).unwrap();
        let error = create(STACK_LEVELS_MAX).map(drop).unwrap_err();
        assert!(matches!(error, BdevError::Invalid { .. }), "{error:?}");
        assert!(error.to_string().contains("64 has 64 levels, and bdevs stand on each other"), "{error}");
        // A device comes below others too: an array gets another member.
        let other = null::create(&registry, null::NullConfig::new("other", 8, 512)).unwrap();
        let upper = |name: &str| registry.find(name).unwrap();
        assert!(registry.check_levels(&other, Some(&upper("1"))).is_err());
        assert!(registry.check_levels(&other, Some(&upper("2"))).is_ok());
        registry.unregister("other").unwrap();
        // The base is not claimed by the attempt, and the whole stack goes with its lowest device.
        assert!(top.claim().is_none());
        registry.unregister("1").unwrap();
        assert!(registry.list().is_empty());
    }

    #[test]
    fn what_stands_on_a_device_is_known_while_both_exist_and_goes_with_it() {
        let registry = Registry::new();
        let sizes = |registry: &Registry| {
            let table = registry.lock();
            (table.uppers.len(), table.uppers.values().map(Vec::len).sum::<usize>(), table.bases.len())
        };
        let base = |name: &str| null::create(&registry, null::NullConfig::new(name, 8, 512)).unwrap();
        let upper = |name: &str, base: &str| {
            let config = passthru::PassthruConfig { base: base.into(), name: name.into(), uuid: None };
            passthru::create(&registry, config).unwrap()
        };
        for name in ["A", "B"] {
            base(name);
        }
        for (name, below) in [("on A", "A"), ("on B", "B"), ("on that", "on A")] {
            upper(name, below);
        }
        assert_eq!(sizes(&registry), (3, 3, 3));
        registry.unregister("on B").unwrap();
        assert_eq!(sizes(&registry), (2, 2, 2), "a device may be used again and again");
        upper("on B", "B");
        null::resize(&registry, "A", 16).unwrap();
        assert_eq!(registry.find("on that").unwrap().geometry().blocks, 16);
        registry.unregister("A").unwrap();
        let names: Vec<String> = registry.list().iter().map(|device| device.name().to_string()).collect();
        assert_eq!((names, sizes(&registry)), (vec!["B".into(), "on B".into()], (1, 1, 1)));
    }
}
