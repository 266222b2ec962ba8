//! The block device of a volume.

use std::sync::{Arc, Mutex};

use bdev::stacking::{BaseBdev, BaseChannel, UpperOutcome};
use bdev::{
    Access, Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Durability, InfoValue, IoLimits,
    Registry,
};
use block_io::Op;
use reactor::Core;

use crate::channel::{LvolChannel, OpenSource, READ_CLUSTERS_MAX};
use crate::store::{LvolStore, Volume};
use crate::volume_map::VolumeMap;

/// The module's object of a volume that can be read.
pub(crate) struct LvolBdev {
    store: Arc<LvolStore>,
    /// Index of the volume in the store.
    index: usize,
    below: Arc<BlockDevice>,
    external: Option<Arc<BlockDevice>>,
    /// `None` once it is closed. The store's claim ends with its last holder.
    bases: Mutex<Option<VolumeBases>>,
    geometry: BdevGeometry,
}

struct VolumeBases {
    base: Arc<BaseBdev>,
    external: Option<BaseBdev>,
}

/// Why a volume has no block device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    /// The device of its external snapshot is not there yet.
    #[error("its external snapshot {0} is not there")]
    NoExternal(String),
    #[error(
        "its external snapshot {name} has blocks of {found} bytes, or metadata, and the volume has {block_size}"
    )]
    ExternalBlocks { name: String, found: u32, block_size: u32 },
    #[error(transparent)]
    Bdev(#[from] BdevError),
}

/// Registers the volume of this index on `base`. A volume whose data is on an external snapshot takes that
/// device, if it is there.
pub(crate) fn register(
    registry: &Registry,
    store: &Arc<LvolStore>,
    index: usize,
    base: &Arc<BaseBdev>,
) -> Result<(), VolumeError> {
    let volume = &store.volumes[index];
    let (blobs, below) = (&store.blobs, base.device().clone());
    let block_size = blobs.super_block().io_unit_bytes;
    let external = match store.external_name(volume) {
        Some(name) => Some(open_external(registry, &name, block_size, &store.alias(volume))?),
        None => None,
    };
    let external_device = external.as_ref().map(|external| external.device().clone());
    let bytes = blobs.blob(volume.blob).map_or(0, |blob| blobs.blob_bytes(blob));
    let geometries =
        || [Some(&below), external_device.as_ref()].into_iter().flatten().map(|at| at.geometry());
    let module = LvolBdev {
        geometry: BdevGeometry {
            physical_block_size: below.geometry().physical_block_size.max(block_size),
            optimal_io_boundary_blocks: blobs.layout().cluster_bytes / block_size,
            buffer_alignment: geometries().map(|geometry| geometry.buffer_alignment).max().unwrap_or(1),
            ..BdevGeometry::new(block_size, bytes / u64::from(block_size))
        },
        store: store.clone(),
        index,
        below: below.clone(),
        external: external_device.clone(),
        bases: Mutex::new(Some(VolumeBases { base: base.clone(), external })),
    };
    let (uuid, alias) = (store.bdev_uuid(volume), store.alias(volume));
    let device = registry.register(&volume.bdev_name, Some(uuid), &[alias], Arc::new(module))?;
    registry.stack(&below, &device);
    if let Some(external) = &external_device {
        registry.stack(external, &device);
    }
    Ok(())
}

fn open_external(
    registry: &Registry,
    name: &str,
    block_size: u32,
    alias: &str,
) -> Result<BaseBdev, VolumeError> {
    if registry.find(name).is_none() {
        return Err(VolumeError::NoExternal(name.to_string()));
    }
    let by = format!("logical volume {alias}");
    let external = BaseBdev::open(registry, name, Access::ReadManyWriteNone { by: &by })?;
    let geometry = external.device().geometry();
    if !block_size.is_multiple_of(geometry.block_size) || geometry.metadata.bytes > 0 {
        let found = geometry.block_size;
        return Err(VolumeError::ExternalBlocks { name: name.to_string(), found, block_size });
    }
    Ok(external)
}

impl LvolBdev {
    /// Whether it is a volume of this store.
    pub(crate) fn is_of(&self, store: &Arc<LvolStore>) -> bool {
        Arc::ptr_eq(&self.store, store)
    }

    fn volume(&self) -> &Volume {
        &self.store.volumes[self.index]
    }

    fn sources(&self) -> impl Iterator<Item = &Arc<BlockDevice>> {
        [Some(&self.below), self.external.as_ref()].into_iter().flatten()
    }
}

impl Bdev for LvolBdev {
    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        self.sources().map(|source| source.durability()).min().unwrap_or(Durability::None)
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::SeekData | Op::SeekHole)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let bases = sync::lock(&self.bases);
        let removed = || BdevError::Removed { name: self.volume().bdev_name.clone() };
        let bases = bases.as_ref().ok_or_else(removed)?;
        let open = |base: &BaseBdev| {
            Ok::<_, BdevError>(OpenSource::new(BaseChannel::new(base.channel(core)?), base.device().clone()))
        };
        let base = open(&bases.base)?;
        let external = bases.external.as_ref().map(open).transpose()?;
        let map = VolumeMap { blobs: self.store.blobs.clone(), blob: self.volume().blob };
        Ok(Box::new(LvolChannel::new(map, self.geometry.block_size, self.depth(), base, external)))
    }

    fn io_limits(&self) -> IoLimits {
        // The channels of the devices below divide what these do not take.
        let cluster_bytes = self.store.blobs.layout().cluster_bytes;
        let bytes = cluster_bytes.saturating_mul(READ_CLUSTERS_MAX);
        // A whole number of blocks, also where that is the largest number.
        let bytes = bytes / self.geometry.block_size * self.geometry.block_size;
        IoLimits { transfer_bytes_max: bytes, ..IoLimits::NONE }
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        self.store.driver_specific(self.volume(), self.below.name())
    }

    fn reads_undefined(&self) -> bool {
        self.sources().any(|source| source.bdev().reads_undefined())
    }

    fn read_only(&self) -> bool {
        true
    }

    fn depth(&self) -> u32 {
        self.below.bdev().depth()
    }

    fn abort_in_flight(&self) {
        self.sources().for_each(|source| source.bdev().abort_in_flight());
    }

    fn on_base_resized(&self, _base: &BlockDevice) -> UpperOutcome {
        // The store says how large it is; reads of what is gone fail.
        UpperOutcome::Stays
    }

    fn on_closed(&self) {
        let bases = sync::lock(&self.bases).take();
        drop(bases);
    }
}
