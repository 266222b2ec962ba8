//! What a module implements, and the device that the layer makes of it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ring::Op;
use uuid::Uuid;

use crate::locks::Locks;
use crate::stats::StatsTable;
use crate::{BdevError, BoxedChannel, ChannelStats, DeviceStats};

/// The size and shape of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Number of logical blocks.
    pub blocks: u64,
    /// Bytes that the medium writes without reading first; at least `block_size`.
    pub physical_block_size: u32,
    /// I/O that crosses a multiple of this many blocks is slower; 0 where it does not matter.
    pub optimal_io_boundary_blocks: u32,
    /// Whether an acknowledged write may be lost with the power until a flush or FUA.
    pub write_cache: bool,
    /// What the address of a buffer is to be a multiple of, at most 4096; 1 where the device copies. Buffers of a
    /// pool are aligned well enough for all.
    pub buffer_alignment: u32,
}

impl Geometry {
    /// A device of `blocks` blocks with nothing special about it, but that it takes buffers of a pool alone.
    pub const fn new(block_size: u32, blocks: u64) -> Geometry {
        Geometry {
            block_size,
            blocks,
            physical_block_size: block_size,
            optimal_io_boundary_blocks: 0,
            write_cache: false,
            buffer_alignment: 4096,
        }
    }

    /// Size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.blocks * self.block_size as u64
    }
}

/// A value that a module reports about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Yes or no.
    Bool(bool),
    /// A count or size.
    Number(u64),
    /// Words.
    Text(String),
    /// Several.
    List(Vec<Value>),
    /// Several, each with a name.
    Object(Vec<(&'static str, Value)>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_string())
    }
}

/// In-flight limit of a channel whose module names none: what a busy NVMe queue pair holds.
pub const DEPTH_DEFAULT: u32 = 1024;

/// What a module implements: one object a device, used from any thread.
pub trait Bdev: Any + Send + Sync {
    /// The kind of device, in SPDK's words.
    fn product_name(&self) -> &'static str;

    /// Size and shape now. Only `blocks` may change, told by [`Registry::notify_resized`].
    ///
    /// [`Registry::notify_resized`]: crate::Registry::notify_resized
    fn geometry(&self) -> Geometry;

    /// Whether channels take this operation. Where [`Op::Reset`] is not supported the layer answers
    /// it once what is in flight has completed; where it is, it reaches the module even beyond
    /// [`depth`](Self::depth). [`Op::Compare`] reaches no module and is not asked about: channels take it where they
    /// take reads.
    fn supports(&self, op: Op) -> bool;

    /// A ring to the device, on the core that will use it.
    ///
    /// Requests that reach it were inside the device, of supported operations and with the right
    /// buffer when they were checked; a device that shrinks checks again. The range of an operation
    /// that has none is whatever the caller left there.
    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError>;

    /// What `bdev_get_bdevs` shows under `driver_specific`.
    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        Vec::new()
    }

    /// Whether a read leaves the buffer as it was. Who shows data to strangers clears it first.
    fn reads_undefined(&self) -> bool {
        false
    }

    /// Whether the device takes no writes from anybody, however it is opened.
    fn read_only(&self) -> bool {
        false
    }

    /// Most requests in flight on one channel.
    fn depth(&self) -> u32 {
        DEPTH_DEFAULT
    }

    /// What the device stands on, if that may be used only once: two devices with the same medium
    /// are not registered together. A file's device and inode number.
    fn medium(&self) -> Option<(u64, u64)> {
        None
    }

    /// Called once, at removal: lets go on whatever it holds back, as nobody can ask for that later.
    fn removed(&self) {}

    /// Called once, after removal, when the last descriptor and channel are gone; gives up what the
    /// device holds of others.
    fn closed(&self) {}
}

/// A registered device. It outlives its registration for those who still have it open.
pub struct Device {
    name: String,
    aliases: Vec<String>,
    uuid: Uuid,
    bdev: Arc<dyn Bdev>,
    /// Read by channels at every submit, written by the control plane.
    pub(crate) blocks: AtomicU64,
    pub(crate) removed: AtomicBool,
    pub(crate) stats: StatsTable,
    pub(crate) locks: Locks,
    opens: Mutex<Opens>,
    released: Condvar,
}

#[derive(Default)]
struct Opens {
    descriptors: u32,
    writers: u32,
    claim: Option<String>,
    closed: bool,
}

/// One opening of a device; held by its descriptor and by the descriptor's channels.
pub(crate) struct Open {
    pub(crate) device: Arc<Device>,
    pub(crate) writes: bool,
    claims: bool,
}

impl Device {
    pub(crate) fn new(name: &str, uuid: Option<Uuid>, aliases: &[String], bdev: Arc<dyn Bdev>) -> Device {
        Device {
            name: name.to_string(),
            aliases: aliases.to_vec(),
            uuid: uuid.unwrap_or_else(Uuid::new_v4),
            blocks: AtomicU64::new(bdev.geometry().blocks),
            bdev,
            removed: AtomicBool::new(false),
            stats: StatsTable::default(),
            locks: Locks::default(),
            opens: Mutex::new(Opens::default()),
            released: Condvar::new(),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its other names.
    pub fn aliases(&self) -> &[String] {
        &self.aliases
    }

    /// Its UUID, made up at registration where none was given.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Size and shape, as channels check against them.
    pub fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.bdev.geometry() }
    }

    /// The module's object.
    pub fn bdev(&self) -> &Arc<dyn Bdev> {
        &self.bdev
    }

    /// The module's object as what it is, if it is a `T`.
    pub fn module<T: Bdev>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.bdev;
        any.downcast_ref()
    }

    /// Whether it was unregistered.
    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Relaxed)
    }

    /// Who holds it exclusively.
    pub fn claimed_by(&self) -> Option<String> {
        self.lock().claim.clone()
    }

    /// Openings that are not closed yet.
    pub fn open_count(&self) -> u32 {
        self.lock().descriptors
    }

    /// Waits until it is removed and nobody has it open; `false` after `timeout`. Not for reactors.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut opens = self.lock();
        while !opens.closed {
            let Some(left) = end.checked_duration_since(Instant::now()) else { return false };
            opens = self.released.wait_timeout(opens, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// What its channels have done, all together.
    pub fn stats(&self) -> DeviceStats {
        self.stats.total()
    }

    /// What each open channel has done.
    pub fn channel_stats(&self) -> Vec<ChannelStats> {
        self.stats.channels()
    }

    /// Counts from zero again.
    pub fn reset_stats(&self) {
        self.stats.reset();
    }

    /// Opens it; `claim` is who wants it alone.
    pub(crate) fn open(self: &Arc<Self>, writes: bool, claim: Option<&str>) -> Result<Open, BdevError> {
        let mut opens = self.lock();
        if self.is_removed() {
            return Err(BdevError::Removed { name: self.name.clone() });
        }
        if writes && let Some(by) = &opens.claim {
            return Err(BdevError::Claimed { name: self.name.clone(), by: by.clone() });
        }
        if claim.is_some() && opens.writers > 0 {
            let by = format!("{} other writer(s)", opens.writers);
            return Err(BdevError::Claimed { name: self.name.clone(), by });
        }
        opens.descriptors += 1;
        opens.writers += u32::from(writes);
        if let Some(by) = claim {
            opens.claim = Some(by.to_string());
        }
        Ok(Open { device: self.clone(), writes, claims: claim.is_some() })
    }

    /// From here on every new I/O fails.
    pub(crate) fn remove(&self) {
        let mut opens = self.lock();
        self.removed.store(true, Ordering::Relaxed);
        self.bdev.removed();
        let last = opens.descriptors == 0 && !opens.closed;
        opens.closed |= last;
        drop(opens);
        if last {
            self.bdev.closed();
            self.released.notify_all();
        }
    }

    fn close(&self, open: &Open) {
        let mut opens = self.lock();
        opens.descriptors -= 1;
        opens.writers -= u32::from(open.writes);
        if open.claims {
            opens.claim = None;
        }
        let last = opens.descriptors == 0 && self.is_removed() && !opens.closed;
        opens.closed |= last;
        drop(opens);
        if last {
            self.bdev.closed();
            self.released.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Opens> {
        // Every change under the lock is whole before anything can panic.
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let device = self.device.clone();
        device.close(self);
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {}, {:?})", self.name, self.bdev.product_name(), self.geometry())
    }
}
