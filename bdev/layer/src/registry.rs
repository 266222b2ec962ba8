//! Names, claims and events: the control plane's table of devices.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use uuid::Uuid;

use crate::device::Open;
use crate::{Bdev, BdevError, Channel, Device};

/// The table of devices. Cheap to clone; for any thread; never touched by an I/O.
#[derive(Clone, Default)]
pub struct Registry(Arc<Inner>);

/// A registry that may be gone by the time it is needed.
pub(crate) struct WeakRegistry(Weak<Inner>);

#[derive(Default)]
struct Inner {
    table: Mutex<Table>,
}

type Subscriber = Arc<dyn Fn(&DeviceEvent) + Send + Sync>;

#[derive(Default)]
struct Table {
    devices: BTreeMap<String, Arc<Device>>,
    subscribers: Vec<(u64, Subscriber)>,
    subscriptions: u64,
}

/// What happened to a device.
#[derive(Clone, Debug)]
pub enum DeviceEvent {
    /// It can be found and opened.
    Registered(Arc<Device>),
    /// Its number of blocks changed.
    Resized(Arc<Device>),
    /// It cannot be found any more, and every new I/O fails.
    Removed(Arc<Device>),
}

/// Names a subscription, to end it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubscriptionId(u64);

/// How a device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access<'a> {
    /// Writes are refused. Possible beside every other opening.
    ReadOnly,
    /// Reads and writes, beside others who do.
    ReadWrite,
    /// Reads and writes, and nobody else writes while this is open.
    Exclusive {
        /// Who, for the error that others get.
        by: &'a str,
    },
}

/// An open device. May be sent to the core that makes channels of it; dropped with its channels, it
/// gives up its claim.
pub struct Descriptor(Arc<Open>);

impl DeviceEvent {
    /// The device that it happened to.
    pub fn device(&self) -> &Arc<Device> {
        match self {
            DeviceEvent::Registered(device) | DeviceEvent::Resized(device) | DeviceEvent::Removed(device) => {
                device
            }
        }
    }
}

impl Registry {
    /// An empty table.
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Puts a device in. Its name, aliases, UUID and medium must be its own.
    pub fn register(
        &self,
        name: &str,
        uuid: Option<Uuid>,
        aliases: &[String],
        bdev: Arc<dyn Bdev>,
    ) -> Result<Arc<Device>, BdevError> {
        check_name(name)?;
        check_geometry(&*bdev)?;
        let device = Arc::new(Device::new(name, uuid, aliases, bdev));
        let mut table = self.lock();
        let uuid_text = device.uuid().to_string();
        let names = std::iter::once(name).chain(aliases.iter().map(String::as_str));
        for taken in names.chain([uuid_text.as_str()]) {
            if table.find(taken).is_some() {
                return Err(BdevError::Exists { name: taken.to_string() });
            }
        }
        if let Some(medium) = device.bdev().medium()
            && let Some(holder) = table.medium_holder(medium)
        {
            let by = format!("the bdev {holder}, which stands on the same file");
            return Err(BdevError::Claimed { name: name.to_string(), by });
        }
        table.devices.insert(name.to_string(), device.clone());
        drop(table);
        self.tell(&DeviceEvent::Registered(device.clone()));
        Ok(device)
    }

    /// Takes a device out at once: it is not found any more, new I/O fails, what is in flight
    /// completes. Waits for nothing; [`Device::wait_closed`] does.
    pub fn unregister(&self, name: &str) -> Result<Arc<Device>, BdevError> {
        let mut table = self.lock();
        let found = table.find(name).map(|device| device.name().to_string());
        let device = found.and_then(|name| table.devices.remove(&name));
        drop(table);
        let device = device.ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        device.remove();
        self.tell(&DeviceEvent::Removed(device.clone()));
        Ok(device)
    }

    /// The device of that name, alias or UUID.
    pub fn find(&self, name: &str) -> Option<Arc<Device>> {
        self.lock().find(name).cloned()
    }

    /// Every device, by name.
    pub fn list(&self) -> Vec<Arc<Device>> {
        self.lock().devices.values().cloned().collect()
    }

    /// Opens the device of that name, alias or UUID.
    pub fn open(&self, name: &str, access: Access<'_>) -> Result<Descriptor, BdevError> {
        let device = self.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        let open = match access {
            Access::ReadOnly => device.open(false, None)?,
            Access::ReadWrite => device.open(true, None)?,
            Access::Exclusive { by } => device.open(true, Some(by))?,
        };
        Ok(Descriptor(Arc::new(open)))
    }

    /// Every exclusive claim: device and holder.
    pub fn claims(&self) -> Vec<(String, String)> {
        let claim = |device: Arc<Device>| Some((device.name().to_string(), device.claimed_by()?));
        self.list().into_iter().filter_map(claim).collect()
    }

    /// Calls `subscriber` for every event from now on, on the thread that caused it and outside the
    /// registry's lock. It must not block.
    pub fn subscribe(&self, subscriber: Box<dyn Fn(&DeviceEvent) + Send + Sync>) -> SubscriptionId {
        let mut table = self.lock();
        table.subscriptions += 1;
        let id = table.subscriptions;
        table.subscribers.push((id, subscriber.into()));
        SubscriptionId(id)
    }

    /// Ends a subscription. An event that is being told may still arrive.
    pub fn unsubscribe(&self, id: SubscriptionId) {
        self.lock().subscribers.retain(|(other, _)| *other != id.0);
    }

    /// Takes over the number of blocks that the module reports now. Every channel sees it at its
    /// next submit. Nothing happens where the number is the same.
    pub fn notify_resized(&self, name: &str) -> Result<(), BdevError> {
        let device = self.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
        let blocks = device.bdev().geometry().blocks;
        if device.blocks.swap(blocks, Ordering::Relaxed) != blocks {
            self.tell(&DeviceEvent::Resized(device));
        }
        Ok(())
    }

    /// The device that stands on a medium.
    pub(crate) fn medium_holder(&self, medium: (u64, u64)) -> Option<String> {
        self.lock().medium_holder(medium)
    }

    pub(crate) fn downgrade(&self) -> WeakRegistry {
        WeakRegistry(Arc::downgrade(&self.0))
    }

    fn tell(&self, event: &DeviceEvent) {
        let subscribers = self.lock().subscribers.clone();
        for (_, subscriber) in subscribers {
            subscriber(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No user code runs under the lock and each change is one call, so that it is never half done.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeakRegistry {
    pub(crate) fn upgrade(&self) -> Option<Registry> {
        self.0.upgrade().map(Registry)
    }
}

impl Table {
    fn medium_holder(&self, medium: (u64, u64)) -> Option<String> {
        let holder = self.devices.values().find(|device| device.bdev().medium() == Some(medium));
        holder.map(|device| device.name().to_string())
    }

    fn find(&self, name: &str) -> Option<&Arc<Device>> {
        if let Some(device) = self.devices.get(name) {
            return Some(device);
        }
        let uuid = Uuid::try_parse(name).ok();
        self.devices
            .values()
            .find(|device| device.aliases().iter().any(|alias| alias == name) || Some(device.uuid()) == uuid)
    }
}

impl Descriptor {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Whether writes are allowed.
    pub fn writes(&self) -> bool {
        self.0.writes
    }

    /// A channel to the device on this core.
    pub fn channel(&self, core: &reactor::Core) -> Result<Channel, BdevError> {
        if self.0.device.is_removed() {
            return Err(BdevError::Removed { name: self.0.device.name().to_string() });
        }
        Channel::new(self.0.clone(), core)
    }
}

impl std::fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Descriptor({})", self.0.device.name())
    }
}

/// Longest name: what SPDK's tools and a log line bear.
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
        let reason = format!("{} bytes is not a block size", geometry.block_size);
        return Err(BdevError::invalid("block_size", reason));
    }
    if geometry.blocks.checked_mul(u64::from(geometry.block_size)).is_none() {
        let reason = format!("{} blocks are more bytes than 64 bits count", geometry.blocks);
        return Err(BdevError::invalid("num_blocks", reason));
    }
    if bdev.depth() == 0 {
        return Err(BdevError::invalid("depth", "a channel that takes nothing is of no use"));
    }
    Ok(())
}
