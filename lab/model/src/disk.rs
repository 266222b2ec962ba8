//! A profile as a block device in real time.
//!
//! Cores do not share a lock or a queue here. Each channel has a [share](shares) of the device's rates,
//! dies and buffer, as large as its part of the commands that are in flight on all of them, looked at
//! again every quarter of a millisecond: what a common queue would give it on average. Nothing that
//! one core writes for every command is read by another.

mod calendar;
mod channel;
mod lane;
mod shares;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bdev::{BadBlocks, Bdev, BdevError, BoxedChannel, Device, Geometry, Registry, Uuid, Value};
use memory::SharedRegion;
use ring::Op;

use crate::faults::{Fault, Rules};
use crate::profile::{Profile, State};
use crate::timing::Plan;
use crate::wear::Wear;

/// How a device is made.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// Its name.
    pub name: String,
    /// Its UUID; made up where none is given.
    pub uuid: Option<Uuid>,
    /// What it is like.
    pub profile: Profile,
    /// Decides its latencies and faults.
    pub seed: u64,
    /// Bytes of a block, a multiple of 512; the profile's where none is given.
    pub block_size: Option<u32>,
    /// Number of blocks; the profile's capacity where none is given.
    pub num_blocks: Option<u64>,
    /// What was written to it before.
    pub state: State,
    /// What becomes of the data.
    pub store: Store,
}

/// What becomes of data that is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Store {
    /// Nothing; reads leave the buffer as it was.
    #[default]
    None,
    /// It is kept in memory, and gone with the process.
    Memory,
}

impl Store {
    /// From its name.
    pub fn from_name(name: &str) -> Option<Store> {
        match name {
            "none" => Some(Store::None),
            "memory" => Some(Store::Memory),
            _ => None,
        }
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Store::None => "none",
            Store::Memory => "memory",
        }
    }
}

impl ModelConfig {
    /// A device of the profile's size in the steady state that stores nothing.
    pub fn new(name: &str, profile: Profile) -> ModelConfig {
        ModelConfig {
            name: name.to_string(),
            uuid: None,
            profile,
            seed: 0,
            block_size: None,
            num_blocks: None,
            state: State::Steady,
            store: Store::None,
        }
    }
}

/// The module's object.
pub struct ModelDisk {
    geometry: Geometry,
    seed: u64,
    state: State,
    /// Makes each channel's seed its own.
    opened: AtomicU64,
    shared: Arc<Shared>,
    region: Option<Arc<SharedRegion>>,
}

/// What channels read of the device, changed by the control plane alone.
struct Shared {
    plan: Arc<Plan>,
    wear: Arc<Wear>,
    shares: shares::Shares,
    rules: Mutex<Rules>,
    /// Counts changes of `rules`.
    rules_epoch: AtomicU64,
    bad: BadBlocks,
    gone: AtomicU8,
}

/// The device is there.
const HERE: u8 = 0;
/// It was taken out of the registry: what is in flight completes in its time.
const REMOVED: u8 = 1;
/// It was pulled out: nothing completes any more, everything fails.
const PULLED: u8 = 2;
/// Its controller reports a fatal status: nothing completes until a reset.
const FATAL: u8 = 3;

const PRODUCT: &str = "NVMe device model";
/// Requests in flight on one channel: what four deep NVMe queues hold, and little memory.
const DEPTH: u32 = 4096;
/// Rules at a time; each is looked at for every command.
const RULES_MAX: usize = 64;

/// Makes a device of a profile and registers it.
pub fn create(registry: &Registry, config: ModelConfig) -> Result<Arc<Device>, BdevError> {
    let invalid = |field, reason: String| BdevError::Invalid { field, reason };
    config.profile.check().map_err(|error| invalid("profile", error.to_string()))?;
    let block_size = config.block_size.unwrap_or(config.profile.device.block_bytes);
    if block_size < 512 || !block_size.is_multiple_of(512) {
        return Err(invalid("block_size", format!("{block_size} is not a multiple of 512")));
    }
    let blocks = config.num_blocks.unwrap_or(config.profile.capacity_bytes() / u64::from(block_size));
    let bytes = blocks.checked_mul(u64::from(block_size)).filter(|bytes| *bytes >= 1 << 20);
    let Some(bytes) = bytes else {
        let reason =
            format!("{blocks} blocks of {block_size} bytes are less than 1 MiB or too many to count");
        return Err(invalid("num_blocks", reason));
    };
    let mut geometry = Geometry { buffer_alignment: 1, ..Geometry::new(block_size, blocks) };
    geometry.physical_block_size = block_size.max(config.profile.device.page_bytes);
    geometry.write_cache = config.profile.is_buffered() && !config.profile.device.power_loss_protection;
    let region = match config.store {
        Store::None => None,
        Store::Memory => Some(Arc::new(SharedRegion::new(bytes)?)),
    };
    let shared = Shared {
        wear: Arc::new(Wear::new(&config.profile, bytes, config.state)),
        rules: Mutex::new(Rules::new(&config.profile.faults)),
        plan: Arc::new(Plan::new(config.profile)),
        shares: shares::Shares::default(),
        rules_epoch: AtomicU64::new(1),
        bad: BadBlocks::default(),
        gone: AtomicU8::new(HERE),
    };
    let disk = ModelDisk {
        geometry,
        seed: config.seed,
        state: config.state,
        opened: AtomicU64::new(0),
        shared: Arc::new(shared),
        region,
    };
    registry.register(&config.name, config.uuid, &[], Arc::new(disk))
}

/// Adds a rule to a device's faults, for the commands that arrive from now on.
pub fn inject(registry: &Registry, name: &str, fault: &Fault) -> Result<(), BdevError> {
    fault.check("fault").map_err(|error| BdevError::Invalid { field: "fault", reason: error.to_string() })?;
    with_disk(registry, name, |shared| {
        let mut rules = shared.rules.lock().unwrap_or_else(PoisonError::into_inner);
        if rules.len() >= RULES_MAX {
            let reason = format!("there are {RULES_MAX} rules already; clear them first");
            return Err(BdevError::Invalid { field: "fault", reason });
        }
        rules.push(fault);
        shared.rules_epoch.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

/// Removes every rule, those of the profile too. Commands that never end stay that way.
pub fn clear(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_disk(registry, name, |shared| {
        *shared.rules.lock().unwrap_or_else(PoisonError::into_inner) = Rules::default();
        shared.rules_epoch.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

/// Pulls a device out of the machine: it is unregistered, and everything in flight fails at once.
pub fn pull(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_disk(registry, name, |shared| {
        shared.gone.store(PULLED, Ordering::Release);
        Ok(())
    })?;
    registry.unregister(name).map(drop)
}

fn with_disk(
    registry: &Registry,
    name: &str,
    act: impl FnOnce(&Shared) -> Result<(), BdevError>,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    match device.module::<ModelDisk>() {
        Some(disk) => act(&disk.shared),
        None => Err(BdevError::WrongKind { name: name.to_string(), wanted: PRODUCT }),
    }
}

impl Bdev for ModelDisk {
    fn product_name(&self) -> &'static str {
        PRODUCT
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn supports(&self, op: Op) -> bool {
        // The layer's own compare does all that there is to do.
        op != Op::Compare
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.wrapping_add(number << 32);
        Ok(Box::new(channel::Channel::new(&self.shared, self.region.clone(), self.geometry, seed)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, Value)> {
        let rules = self.shared.rules.lock().unwrap_or_else(PoisonError::into_inner).len();
        let stores = self.region.is_some();
        let object = vec![
            ("profile", self.shared.plan.profile.name.as_str().into()),
            ("title", self.shared.plan.profile.title.as_str().into()),
            ("state", self.state.name().into()),
            ("seed", Value::Number(self.seed)),
            ("store", if stores { "memory".into() } else { "none".into() }),
            ("faults", Value::Number(rules as u64)),
        ];
        let durability = if stores { "memory" } else { "none: nothing is stored" };
        vec![("model", Value::Object(object)), ("durability", durability.into())]
    }

    fn reads_undefined(&self) -> bool {
        self.region.is_none()
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn removed(&self) {
        let unless_pulled = |gone| (gone != PULLED).then_some(REMOVED);
        let _ = self.shared.gone.fetch_update(Ordering::AcqRel, Ordering::Relaxed, unless_pulled);
    }
}
