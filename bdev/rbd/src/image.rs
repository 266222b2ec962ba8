//! An image that is open: its size, which other clients change, and its watch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use bdev::Registry;
use rbd::{Image, ImageClosed};

/// Requests in flight on one channel.
pub(crate) const DEPTH: u32 = 256;

/// State of an image that the device, its channels and the watch share.
pub(crate) struct ImageState {
    /// `None` once the device is closed.
    pub(crate) image: Mutex<Option<Arc<Image>>>,
    /// The registered device.
    pub(crate) name: OnceLock<String>,
    block_size: u32,
    /// Read per request.
    pub(crate) blocks: AtomicU64,
}

impl ImageState {
    pub(crate) fn image(&self) -> Option<Arc<Image>> {
        sync::lock(&self.image).clone()
    }
}

/// Where the watch of an image sends what has changed: a thread that may wait.
pub(crate) type ChangeSender = std::sync::mpsc::Sender<Weak<ImageState>>;

/// An image that is open and watched, for a device.
pub(crate) struct WatchedImage {
    pub(crate) state: Arc<ImageState>,
    pub(crate) closed: Arc<ImageClosed>,
    pub(crate) object_bytes: u64,
}

/// Reads the size of an open image and watches it. Waits for the cluster.
///
/// # Errors
/// [`rbd::RbdError::Call`].
pub(crate) fn watch(
    mut image: Image,
    block_size: u32,
    changes: ChangeSender,
) -> Result<WatchedImage, rbd::RbdError> {
    let object_bytes = image.object_bytes()?;
    let state = Arc::new(ImageState {
        image: Mutex::new(None),
        name: OnceLock::new(),
        block_size,
        blocks: AtomicU64::new(0),
    });
    let weak = Arc::downgrade(&state);
    // Before the size is read, so that no later change is missed. The receiver ends with the program.
    image.watch(move || _ = changes.send(weak.clone()))?;
    state.blocks.store(image.bytes()? / u64::from(block_size.max(1)), Ordering::Relaxed);
    let closed = image.closed();
    *sync::lock(&state.image) = Some(Arc::new(image));
    Ok(WatchedImage { state, closed, object_bytes })
}

/// Reads the size of an image again and announces it if it has changed. Waits for the cluster.
pub(crate) fn refresh(registry: &Registry, state: &ImageState) {
    let (Some(image), Some(name)) = (state.image(), state.name.get()) else { return };
    match image.bytes() {
        Ok(bytes) => {
            let blocks = bytes / u64::from(state.block_size);
            if state.blocks.swap(blocks, Ordering::Relaxed) != blocks {
                log::info!(target: "bdev_rbd", "{name} has {blocks} blocks of {} bytes now", state.block_size);
                // An error means that it is removed.
                _ = registry.notify_resized(name);
            }
        }
        Err(error) => log::warn!(target: "bdev_rbd", "{name}: {error}"),
    }
}
