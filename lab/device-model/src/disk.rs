//! The model as a bdev module: a block device whose requests complete in real time.
//!
//! Cores share no lock and no queue on the data path. Each channel has a [share](shares) of the device's
//! rates, dies and buffer, proportional to its part of the commands in flight on all channels and updated
//! every 250 us: the average that a shared queue would give it. No core reads data that another core
//! writes for every command.

mod channel;
mod fifo;
mod shares;
#[cfg(test)]
mod tests;
mod timer_wheel;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bdev::{
    BadBlocks, Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, DeviceMemory, Durability, InfoValue,
    Registry, Uuid,
};
use block_io::Op;

use crate::faults::{ModelFault, ModelFaultRules};
use crate::flash::FlashState;
use crate::profile::{DeviceProfile, MediaState};
use crate::timing::TimingParams;

/// Parameters of a model bdev.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// Name of the bdev.
    pub name: String,
    /// UUID; generated if `None`.
    pub uuid: Option<Uuid>,
    /// Performance profile.
    pub profile: DeviceProfile,
    /// Seed of latencies and faults.
    pub seed: u64,
    /// Block size in bytes, a multiple of 512; that of the profile if `None`.
    pub block_size: Option<u32>,
    /// Number of blocks; the capacity of the profile if `None`. At least 1 MiB in all.
    pub num_blocks: Option<u64>,
    /// Preconditioning.
    pub state: MediaState,
    /// Data storage.
    pub store: Store,
}

/// Whether written data is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Store {
    /// Data is discarded; reads leave the buffer unchanged.
    #[default]
    None,
    /// Data is stored in memory and lost when the process exits.
    Memory,
}

impl Store {
    /// Parses `none` or `memory`.
    pub fn from_name(name: &str) -> Option<Store> {
        match name {
            "none" => Some(Store::None),
            "memory" => Some(Store::Memory),
            _ => None,
        }
    }

    /// The name in parameters and results of RPC methods.
    pub const fn name(self) -> &'static str {
        match self {
            Store::None => "none",
            Store::Memory => "memory",
        }
    }
}

impl ModelConfig {
    /// A device with the profile's capacity, in the steady state, without data storage.
    pub fn new(name: &str, profile: DeviceProfile) -> ModelConfig {
        ModelConfig {
            name: name.to_string(),
            uuid: None,
            profile,
            seed: 0,
            block_size: None,
            num_blocks: None,
            state: MediaState::Steady,
            store: Store::None,
        }
    }
}

/// The bdev that simulates an NVMe SSD.
///
/// It owns the state that channels share, which only the control plane changes, and the memory for data
/// if any. Each channel schedules its requests on its own [`TimingModel`] and so needs no lock; the
/// alternative, one owner core with a mailbox, costs more for a message each way than for a command.
pub struct ModelDisk {
    geometry: BdevGeometry,
    seed: u64,
    state: MediaState,
    /// Number of channels opened so far; gives each channel its own seed.
    opened: AtomicU64,
    shared: Arc<ModelDiskShared>,
    region: Option<Arc<DeviceMemory>>,
}

/// State shared by the channels of a device; modified only by the control plane.
struct ModelDiskShared {
    timing: Arc<TimingParams>,
    flash: Arc<FlashState>,
    shares: shares::ChannelShares,
    rules: Mutex<ModelFaultRules>,
    /// Incremented with every change of `rules`.
    rules_epoch: AtomicU64,
    bad_blocks: BadBlocks,
    presence: AtomicU8,
}

/// The device is present.
const PRESENT: u8 = 0;
/// The device was unregistered: commands in flight complete on time.
const REMOVED: u8 = 1;
/// Surprise removal: all commands fail.
const SURPRISE_REMOVED: u8 = 2;
/// The controller reports a fatal status (CSTS.CFS): nothing completes until a reset.
const FATAL: u8 = 3;

const PRODUCT: &str = "NVMe device model";
/// Maximum requests in flight per channel: that of four deep NVMe queues, at little memory.
const DEPTH: u32 = 4096;
/// Maximum number of fault rules; each is evaluated for every command.
const RULES_MAX: usize = 64;

/// Creates a model bdev and registers it.
pub fn create(registry: &Registry, config: ModelConfig) -> Result<Arc<BlockDevice>, BdevError> {
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
    let mut geometry = BdevGeometry { buffer_alignment: 1, ..BdevGeometry::new(block_size, blocks) };
    geometry.physical_block_size = block_size.max(config.profile.device.page_bytes);
    geometry.write_cache = config.profile.is_buffered() && !config.profile.device.power_loss_protection;
    let region = match config.store {
        Store::None => None,
        Store::Memory => Some(registry.allocate_memory(&config.name, bytes)?),
    };
    let shared = ModelDiskShared {
        flash: Arc::new(FlashState::new(&config.profile, bytes, config.state)),
        rules: Mutex::new(ModelFaultRules::new(&config.profile.faults)),
        timing: Arc::new(TimingParams::new(config.profile)),
        shares: shares::ChannelShares::default(),
        rules_epoch: AtomicU64::new(1),
        bad_blocks: BadBlocks::default(),
        presence: AtomicU8::new(PRESENT),
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

/// Adds a fault rule to a device; it applies to commands submitted from now on.
pub fn inject_fault(registry: &Registry, name: &str, fault: &ModelFault) -> Result<(), BdevError> {
    fault.check("fault").map_err(|error| BdevError::Invalid { field: "fault", reason: error.to_string() })?;
    with_disk(registry, name, |shared| {
        let mut rules = sync::lock(&shared.rules);
        if rules.len() >= RULES_MAX {
            let reason = format!("there are already {RULES_MAX} rules; clear them first");
            return Err(BdevError::Invalid { field: "fault", reason });
        }
        rules.push(fault);
        shared.rules_epoch.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

/// Removes all fault rules, including those of the profile. Commands that already time out stay pending.
pub fn clear_faults(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_disk(registry, name, |shared| {
        *sync::lock(&shared.rules) = ModelFaultRules::default();
        shared.rules_epoch.fetch_add(1, Ordering::Release);
        Ok(())
    })
}

/// Surprise removal: the device is unregistered, and all commands in flight fail at once.
pub fn surprise_remove(registry: &Registry, name: &str) -> Result<(), BdevError> {
    with_disk(registry, name, |shared| {
        shared.presence.store(SURPRISE_REMOVED, Ordering::Release);
        Ok(())
    })?;
    registry.unregister(name).map(drop)
}

fn with_disk(
    registry: &Registry,
    name: &str,
    act: impl FnOnce(&ModelDiskShared) -> Result<(), BdevError>,
) -> Result<(), BdevError> {
    let device = registry.find(name).ok_or_else(|| BdevError::NotFound { name: name.to_string() })?;
    match device.module::<ModelDisk>() {
        Some(disk) => act(&disk.shared),
        None => Err(BdevError::WrongKind { name: name.to_string(), expected: PRODUCT }),
    }
}

impl Bdev for ModelDisk {
    fn product_name(&self) -> &'static str {
        PRODUCT
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        if self.region.is_some() { Durability::Process } else { Durability::None }
    }

    fn supports(&self, op: Op) -> bool {
        // The bdev layer implements the others.
        !matches!(op, Op::Compare | Op::Copy | Op::Abort | Op::SeekData | Op::SeekHole)
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.wrapping_add(number << 32);
        Ok(Box::new(channel::ModelChannel::new(&self.shared, self.region.clone(), self.geometry, seed)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let rules = sync::lock(&self.shared.rules).len();
        let stores = self.region.is_some();
        let object = vec![
            ("profile", self.shared.timing.profile.name.as_str().into()),
            ("title", self.shared.timing.profile.title.as_str().into()),
            ("state", self.state.name().into()),
            ("seed", InfoValue::Number(self.seed)),
            ("store", if stores { "memory".into() } else { "none".into() }),
            ("faults", InfoValue::Number(rules as u64)),
        ];
        vec![("model", InfoValue::Object(object))]
    }

    fn reads_undefined(&self) -> bool {
        self.region.is_none()
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn on_removed(&self) {
        let unless_surprise_removed = |gone| (gone != SURPRISE_REMOVED).then_some(REMOVED);
        let _ =
            self.shared.presence.fetch_update(Ordering::AcqRel, Ordering::Relaxed, unless_surprise_removed);
    }
}
