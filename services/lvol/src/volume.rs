//! The block device of a volume.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bdev::stacking::{BaseBdev, BaseChannel, BaseSet, UpperOutcome};
use bdev::{
    Access, Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Durability, InfoValue, IoLimits,
    Registry,
};
use block_io::Op;
use reactor::Core;

use crate::chain_end::{chain_end, external_of};
use crate::channel::{ALLOCATIONS_MAX, CLUSTERS_MAX, LvolChannel, LvolChannelParts, OpenSource};
use crate::shared::VolumeShared;
use crate::store::{LvolStore, Volume};

/// The place of the external snapshot in its set.
const EXTERNAL: usize = 0;

/// The module's object of a volume.
pub(crate) struct LvolBdev {
    store: Arc<LvolStore>,
    bdev_name: String,
    shared: Arc<VolumeShared>,
    below: Arc<BlockDevice>,
    /// `None` once it is closed. The store's claim ends with its last holder.
    base: Mutex<Option<Arc<BaseBdev>>>,
    /// Empty if no data is on an external snapshot.
    external: Arc<BaseSet>,
    geometry: BdevGeometry,
    blocks: AtomicU64,
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

/// Registers a volume. One whose data is on an external snapshot takes that device, if it is there.
pub(crate) fn register(
    registry: &Registry,
    store: &Arc<LvolStore>,
    volume: &Volume,
) -> Result<(), VolumeError> {
    let (blobs, below) = (store.shared.published(), store.base.device().clone());
    let block_size = blobs.super_block().io_unit_bytes;
    let bytes = blobs.blob(volume.blob).map_or(0, |blob| blobs.blob_bytes(blob));
    let geometry = below.geometry();
    let module = Arc::new(LvolBdev {
        geometry: BdevGeometry {
            physical_block_size: geometry.physical_block_size.max(block_size),
            optimal_io_boundary_blocks: blobs.layout().cluster_bytes / block_size,
            buffer_alignment: geometry.buffer_alignment,
            write_cache: geometry.write_cache,
            ..BdevGeometry::new(block_size, bytes / u64::from(block_size))
        },
        blocks: AtomicU64::new(bytes / u64::from(block_size)),
        store: store.clone(),
        bdev_name: volume.bdev_name.clone(),
        shared: VolumeShared::new(&store.shared, volume.blob),
        below: below.clone(),
        base: Mutex::new(Some(store.base.clone())),
        external: BaseSet::new(1),
    });
    let external = match external_of(&blobs, chain_end(&blobs, volume.blob)) {
        Some(name) => Some(module.open_external(registry, &name)?),
        None => None,
    };
    let (uuid, alias) = (store.bdev_uuid(volume), store.alias(volume));
    let device = registry.register(&volume.bdev_name, Some(uuid), &[alias], module)?;
    registry.stack(&below, &device);
    if let Some(external) = &external {
        registry.stack(external.device(), &device);
    }
    Ok(())
}

/// Opens a device as external snapshot of a volume with blocks of `block_size`.
pub(crate) fn open_external(
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

    pub(crate) fn store(&self) -> &Arc<LvolStore> {
        &self.store
    }

    /// The volume, unless it was deleted.
    pub(crate) fn volume(&self) -> Option<Arc<Volume>> {
        self.store.volume(self.shared.blob)
    }

    /// The device of the external snapshot that is open.
    pub(crate) fn external(&self) -> Option<Arc<BlockDevice>> {
        self.external.base(EXTERNAL).map(|base| base.device().clone())
    }

    /// Opens the external snapshot `name`, unless one is open. The registry is to be notified of what stands
    /// on it.
    pub(crate) fn open_external(
        &self,
        registry: &Registry,
        name: &str,
    ) -> Result<Arc<BaseBdev>, VolumeError> {
        let alias = self.volume().map_or_else(|| self.bdev_name.clone(), |volume| self.store.alias(&volume));
        let external = open_external(registry, name, self.geometry.block_size, &alias)?;
        let external = match self.external.insert(EXTERNAL, external) {
            Ok(external) => external,
            Err(_) => match self.external.base(EXTERNAL) {
                Some(external) => external,
                None => return Err(VolumeError::NoExternal(name.to_string())),
            },
        };
        self.store.shared.add_external(name, &external);
        Ok(external)
    }

    /// Closes the external snapshot, when no read of it is in flight.
    pub(crate) fn close_external(&self) -> Option<Arc<BlockDevice>> {
        self.external.remove(EXTERNAL).map(|base| base.device().clone())
    }

    /// Sets the number of blocks to that of the blob; the registry is to be notified.
    pub(crate) fn resize(&self) {
        let blobs = self.store.shared.published();
        if let Some(blob) = blobs.blob(self.shared.blob) {
            let blocks = blobs.blob_bytes(blob) / u64::from(self.geometry.block_size);
            self.blocks.store(blocks, Ordering::Relaxed);
        }
    }

    /// Sets a smaller number of blocks, before the blob becomes smaller.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.blocks.store(bytes / u64::from(self.geometry.block_size), Ordering::Relaxed);
    }

    fn sources(&self) -> impl Iterator<Item = Arc<BlockDevice>> {
        [Some(self.below.clone()), self.external()].into_iter().flatten()
    }
}

impl Bdev for LvolBdev {
    fn product_name(&self) -> &'static str {
        "Logical Volume"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        self.sources().map(|source| source.durability()).min().unwrap_or(Durability::None)
    }

    fn supports(&self, op: Op) -> bool {
        match op {
            Op::Read | Op::SeekData | Op::SeekHole => true,
            Op::Write | Op::WriteZeroes | Op::Unmap => !self.read_only() && self.below.bdev().supports(op),
            Op::Flush => self.store.shared.is_writable() && self.below.bdev().supports(op),
            _ => false,
        }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let base = sync::lock(&self.base).clone();
        let base = base.ok_or_else(|| BdevError::Removed { name: self.bdev_name.clone() })?;
        let base = OpenSource::new(BaseChannel::new(base.channel(core)?), base.device());
        let external = self.external.open(core)?;
        let (replies, messages) = core.mailbox(4 * ALLOCATIONS_MAX);
        let seat = self.shared.add_seat(core.event_loop().waker(), replies);
        Ok(Box::new(LvolChannel::new(LvolChannelParts {
            volume: self.shared.clone(),
            seat,
            messages,
            block_bytes: self.geometry.block_size,
            depth: self.depth(),
            base,
            external,
            external_set: self.external.clone(),
        })))
    }

    fn io_limits(&self) -> IoLimits {
        // The channels of the devices below divide what these do not take.
        let cluster_bytes = self.store.shared.published().layout().cluster_bytes;
        let bytes = cluster_bytes.saturating_mul(CLUSTERS_MAX);
        // A whole number of blocks, also where that is the largest number.
        let bytes = bytes / self.geometry.block_size * self.geometry.block_size;
        IoLimits { transfer_bytes_max: bytes, ..IoLimits::NONE }
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        self.volume().map_or(Vec::new(), |volume| self.store.driver_specific(&volume))
    }

    fn reads_undefined(&self) -> bool {
        self.sources().any(|source| source.bdev().reads_undefined())
    }

    fn read_only(&self) -> bool {
        let is_writable = |blob: &blobstore::Blob| !blob.is_read_only();
        !self.store.shared.is_writable()
            || !self.store.shared.published().blob(self.shared.blob).is_some_and(is_writable)
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
        let base = sync::lock(&self.base).take();
        drop(base);
        self.external.release();
    }
}
