//! A device on an open image.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bdev::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Durability, InfoValue, IoLimits, Registry,
};
use block_io::Op;
use rbd::{ImageClosed, ImageQueue, SLICES_MAX};
use uuid::Uuid;

use crate::channel::RbdChannel;
use crate::image::{DEPTH, ImageState, WatchedImage};

/// The product name of the devices, as in SPDK.
pub(crate) const PRODUCT_NAME: &str = "Ceph Rbd Disk";

/// Most bytes of one request: 8 objects of the default size. The layer divides larger ones.
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

/// What a device is made of.
#[derive(Clone, Debug)]
pub(crate) struct RbdConfig {
    /// Name of the device.
    pub(crate) name: String,
    /// UUID; `None` for a random one.
    pub(crate) uuid: Option<Uuid>,
    /// Size of a block in bytes.
    pub(crate) block_size: u32,
    /// The members of `driver_specific.rbd`.
    pub(crate) info: Vec<(&'static str, InfoValue)>,
    /// The registered cluster, if the device is on one.
    pub(crate) cluster_name: Option<String>,
}

/// The module's object of a device.
pub struct RbdBdev {
    config: RbdConfig,
    geometry: BdevGeometry,
    state: Arc<ImageState>,
    closed: Arc<ImageClosed>,
}

/// Registers a device on an open image.
///
/// # Errors
/// [`BdevError::Invalid`] for a block size that is no multiple of 512, and for an image that is smaller than
/// a block; [`BdevError::Exists`].
pub(crate) fn create(
    registry: &Registry,
    config: RbdConfig,
    image: WatchedImage,
) -> Result<Arc<BlockDevice>, BdevError> {
    check_block_size(config.block_size)?;
    let (name, uuid, state) = (config.name.clone(), config.uuid, image.state.clone());
    let blocks = state.blocks.load(Ordering::Relaxed);
    if blocks == 0 {
        return Err(BdevError::invalid("block_size", "the image is smaller than a block"));
    }
    let boundary = u32::try_from(image.object_bytes / u64::from(config.block_size)).unwrap_or(0);
    let geometry = BdevGeometry {
        buffer_alignment: 1,
        // librbd's cache, and the OSDs' own.
        write_cache: true,
        optimal_io_boundary_blocks: boundary,
        ..BdevGeometry::new(config.block_size, blocks)
    };
    let module = RbdBdev { config, geometry, state: image.state, closed: image.closed };
    let device = registry.register(&name, uuid, &[], Arc::new(module))?;
    _ = state.name.set(device.name().to_string());
    // A change since the size was read had no name to announce.
    if state.blocks.load(Ordering::Relaxed) != blocks {
        _ = registry.notify_resized(device.name());
    }
    Ok(device)
}

/// # Errors
/// [`BdevError::Invalid`] if it is no multiple of 512.
pub(crate) fn check_block_size(block_size: u32) -> Result<(), BdevError> {
    if block_size < 512 || !block_size.is_multiple_of(512) {
        return Err(BdevError::invalid("block_size", format!("{block_size} is not a multiple of 512")));
    }
    Ok(())
}

impl RbdBdev {
    pub(crate) fn state(&self) -> &Arc<ImageState> {
        &self.state
    }

    /// What to wait for after the device is removed.
    pub(crate) fn closed(&self) -> Arc<ImageClosed> {
        self.closed.clone()
    }

    /// The registered cluster that it is on.
    pub fn cluster_name(&self) -> Option<&str> {
        self.config.cluster_name.as_deref()
    }
}

impl Bdev for RbdBdev {
    fn product_name(&self) -> &'static str {
        PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.state.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        Durability::Disk
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits {
            transfer_bytes_max: TRANSFER_BYTES_MAX.max(self.geometry.block_size),
            segments_max: SLICES_MAX as u32,
            ..IoLimits::NONE
        }
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let removed = || BdevError::Removed { name: self.config.name.clone() };
        let image = self.state.image().ok_or_else(removed)?;
        let queue = ImageQueue::new(&image, core, DEPTH);
        Ok(Box::new(RbdChannel::new(core, queue, self.state.clone(), self.config.block_size)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        vec![("rbd", InfoValue::Object(self.config.info.clone()))]
    }

    /// Closes the image, on a thread.
    fn on_closed(&self) {
        let image = sync::lock(&self.state.image).take();
        drop(image);
    }
}
