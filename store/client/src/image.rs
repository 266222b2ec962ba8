//! The block device of a cluster's image.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, InfoValue, IoLimits};
use block_io::Op;
use cluster_map::PoolClass;
use reactor::Core;
use sockets::{CoreNetwork, Sockets};
use store_image::IMAGE_BLOCK_BYTES;
use uuid::Uuid;
use wire_store::{BLOCK_BYTES, OBJECT_BYTES};

use crate::attach::{AttachOptions, AttachState, AttachStatus, Attachment, EntryFollower, ImageWatch};
use crate::channel::ImageChannel;
use crate::cluster::{ClientError, Cluster};
use crate::keeper::KeptChannel;
use crate::layers::{FoundImage, HeldImage, ImageChain, LayeredChannel, find_image, follow_chain};
use crate::placement::{DEPTH, Placement};
use crate::reclaim::Emptied;
use crate::sessions::GroupSessions;
use crate::watch::PoolWatch;

/// How often a channel without requests is looked after.
const KEEP_NS: u64 = GroupSessions::RENEW_NS / 4;

/// The module's object of an image, whose channels connect through `N`.
pub struct ClusterImage<N = Sockets> {
    pool: String,
    image: String,
    /// The volumes that it consists of.
    chain: Arc<ImageChain>,
    bytes: Arc<AtomicU64>,
    /// Of a logical block: those that share an image write whole blocks of 4 KiB.
    block_bytes: u32,
    watch: Arc<PoolWatch>,
    attachment: Attachment,
    /// Follows the image in the map.
    followed: OnceLock<Arc<ImageWatch>>,
    uuid: Uuid,
    /// Makes snapshots while the image is in use.
    _held: Option<Arc<HeldImage>>,
    network: PhantomData<fn() -> N>,
}

impl ClusterImage {
    /// Attaches an image of a pool, as the map has it now. Another one that wants it is refused while this
    /// one has it.
    ///
    /// # Errors
    /// [`ClientError::InUse`] if another one has it; else [`ClientError`].
    pub fn open(
        cluster: &Cluster,
        pool: &str,
        image: &str,
        options: AttachOptions,
    ) -> Result<ClusterImage, ClientError> {
        ClusterImage::with_network(cluster, pool, image, options)
    }
}

impl<N: CoreNetwork> ClusterImage<N> {
    /// An image that this process has attached already, also one that no client may open. It makes no
    /// snapshots that others request.
    pub(crate) fn of_attached(pool: &str, found: &FoundImage, held: Emptied) -> ClusterImage<N> {
        ClusterImage {
            pool: pool.to_string(),
            image: found.image.clone(),
            chain: Arc::new(ImageChain::new(found.chain(false))),
            bytes: Arc::new(AtomicU64::new(found.bytes())),
            block_bytes: IMAGE_BLOCK_BYTES,
            watch: held.watch,
            attachment: held.attachment,
            followed: OnceLock::new(),
            uuid: found.entry.uuid,
            _held: None,
            network: PhantomData,
        }
    }

    /// An image whose channels connect through another network.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn with_network(
        cluster: &Cluster,
        pool: &str,
        image: &str,
        options: AttachOptions,
    ) -> Result<ClusterImage<N>, ClientError> {
        let watch = PoolWatch::start(cluster, pool)?;
        let record = watch.view().0.pool.clone();
        let find = || find_image(&cluster.map().images()?, pool, image);
        let found = find()?;
        check_size(found.bytes())?;
        let block_bytes = if options.shared { BLOCK_BYTES as u32 } else { IMAGE_BLOCK_BYTES };
        if found.bytes() < block_bytes.into() {
            return Err(ClientError::Size(found.bytes()));
        }
        let options = options_of(options, &found, pool)?;
        let groups = record.first_group..record.first_group + record.groups;
        let attachment = Attachment::new(cluster, pool, &found.image, &found.entry, groups, options)?;
        // Its size, or the image of this name, may be another one since.
        let found = match find() {
            Ok(again) if again.head() == found.head() => again,
            again => {
                attachment.detach();
                again?;
                return Err(ClientError::Changed { pool: pool.to_string(), image: image.to_string() });
            }
        };
        let chain = Arc::new(ImageChain::new(found.chain(options.read_only)));
        if options.read_only && found.snapshot.is_none() {
            follow_chain(cluster, pool, found.entry.uuid, &chain);
        }
        let held = attachment.lock().filter(|_| !options.shared).map(|lock| {
            let image = Arc::new_cyclic(|own| HeldImage {
                own: own.clone(),
                cluster: cluster.clone(),
                pool: pool.to_string(),
                uuid: found.entry.uuid,
                chain: chain.clone(),
                lock: lock.clone(),
                state: attachment.state.clone(),
                watch: watch.clone(),
                seen: Mutex::new(found.entry.layers.request.as_ref().map(|request| request.id)),
            });
            let follower: Arc<dyn EntryFollower> = image.clone();
            lock.follow(Arc::downgrade(&follower));
            image
        });
        Ok(ClusterImage {
            pool: pool.to_string(),
            image: image.to_string(),
            chain,
            bytes: Arc::new(AtomicU64::new(found.bytes())),
            block_bytes,
            watch,
            attachment,
            followed: OnceLock::new(),
            uuid: found.entry.uuid,
            _held: held,
            network: PhantomData,
        })
    }

    /// Follows the image in the map: `resized` is called when it is larger, on a thread of its own. What cuts
    /// it off fences this one; a smaller size is otherwise that of a map that is an older copy of itself.
    pub fn follow(&self, resized: impl Fn() + Send + Sync + 'static) {
        let bytes = self.bytes.clone();
        let watch = ImageWatch {
            pool: self.pool.clone(),
            image: self.image.clone(),
            uuid: self.uuid,
            volume: match self.attachment.lock() {
                Some(lock) => lock.volume().clone(),
                None => Arc::new(AtomicU64::new(self.head())),
            },
            state: self.attachment.state.clone(),
            missing_since: Mutex::new(None),
            resized: Box::new(move |size| {
                if bytes.fetch_max(size, Ordering::Relaxed) < size {
                    resized();
                }
            }),
        };
        self.attachment.watch(self.followed.get_or_init(|| Arc::new(watch)));
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What is in flight fails, and is never sent again; so do later requests.
    pub fn abort(&self) {
        self.attachment.state.end(AttachStatus::Closed);
    }

    /// Others may attach the image. Waits for the map.
    pub fn detach(&self) {
        self.attachment.detach();
    }

    /// Its pool, and what its requests carry.
    pub(crate) fn parts(&self) -> (Arc<PoolWatch>, Arc<AttachState>) {
        (self.watch.clone(), self.attachment.state.clone())
    }

    /// The volumes that it consists of, the head first.
    pub(crate) fn volumes(&self) -> Vec<u64> {
        self.chain.get().0.volumes().collect()
    }

    fn head(&self) -> u64 {
        self.chain.get().0.head()
    }

    fn channel(&self, core: &Core) -> LayeredChannel<ImageChannel<N>> {
        let pool = self.watch.view().0.pool.clone();
        let placement = Placement { first_group: pool.first_group, groups: pool.groups, volume: self.head() };
        let attach = self.attachment.state.clone();
        let volumes = ImageChannel::new(core, self.watch.clone(), placement, attach, self.block_bytes);
        LayeredChannel::new(core, volumes, self.chain.clone(), self.block_bytes)
    }
}

/// How an image is opened. A snapshot is only read, and one process writes an image with parents: it knows
/// what the head has.
fn options_of(options: AttachOptions, found: &FoundImage, pool: &str) -> Result<AttachOptions, ClientError> {
    let is_plain = found.parents.is_empty();
    if options.shared && !is_plain {
        return Err(ClientError::SharedLayers { pool: pool.to_string(), image: found.image.clone() });
    }
    let read_only = options.read_only || found.snapshot.is_some();
    Ok(AttachOptions { read_only, same_run: options.same_run && is_plain, ..options })
}

/// The geometry of an image. A block of 4 KiB is linearizable (docs/STORE-GUARANTEES.md), and a write within
/// one is an entry of its log: nothing larger is promised to be atomic.
fn geometry_of(bytes: u64, block_bytes: u32) -> BdevGeometry {
    let atomic_blocks = BLOCK_BYTES as u32 / block_bytes;
    BdevGeometry {
        block_size: block_bytes,
        blocks: bytes / u64::from(block_bytes),
        optimal_io_boundary_blocks: OBJECT_BYTES as u32 / block_bytes,
        atomic_write_blocks: atomic_blocks,
        atomic_write_boundary_blocks: atomic_blocks,
        ..store_image::geometry(bytes)
    }
}

/// Refuses sizes that no image has.
///
/// # Errors
/// [`ClientError::Size`].
pub fn check_size(bytes: u64) -> Result<(), ClientError> {
    if store_image::is_image_size(bytes) { Ok(()) } else { Err(ClientError::Size(bytes)) }
}

impl<N: CoreNetwork> Bdev for ClusterImage<N> {
    fn product_name(&self) -> &'static str {
        "Cluster image"
    }

    fn geometry(&self) -> BdevGeometry {
        geometry_of(self.bytes.load(Ordering::Relaxed), self.block_bytes)
    }

    /// As its attachment.
    fn read_only(&self) -> bool {
        self.attachment.state.epoch() == 0
    }

    /// The pool's class, as far as the devices of its replicas keep it.
    fn durability(&self) -> Durability {
        match self.watch.class() {
            PoolClass::Memory => Durability::Memory,
            PoolClass::Disk => Durability::Disk,
            PoolClass::Pmem => Durability::Pmem,
        }
    }

    fn supports(&self, op: Op) -> bool {
        store_image::supports(op)
    }

    fn io_limits(&self) -> IoLimits {
        IoLimits { boundary_blocks: OBJECT_BYTES as u32 / self.block_bytes, ..store_image::io_limits() }
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(KeptChannel::start(core, self.channel(core), KEEP_NS)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![("pool", self.pool.as_str().into()), ("image", self.image.as_str().into())];
        vec![("store", InfoValue::Object(object))]
    }

    fn depth(&self) -> u32 {
        DEPTH
    }

    fn abort_in_flight(&self) {
        if let Err(error) = self.attachment.abort_in_flight() {
            log::error!(
                "image {}/{}: requests in flight fail, but what was sent may still be written until the image is attached again: \
                 {error}",
                self.pool,
                self.image
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_block_of_the_store_is_written_atomically_and_never_a_part_of_two() {
        let geometry = geometry_of(64 << 20, IMAGE_BLOCK_BYTES);
        let atomic_bytes = geometry.atomic_write_blocks as usize * geometry.block_size as usize;
        assert_eq!(atomic_bytes, BLOCK_BYTES);
        assert_eq!(geometry.atomic_write_boundary_blocks, geometry.atomic_write_blocks);
        // Blocks do not cross objects, whose groups have logs of their own.
        assert_eq!(OBJECT_BYTES % atomic_bytes, 0);
        assert_eq!((geometry.blocks, geometry.physical_block_size), (131_072, 4096));
    }

    #[test]
    fn a_shared_image_has_blocks_that_are_written_whole() {
        let geometry = geometry_of((64 << 20) + 512, BLOCK_BYTES as u32);
        assert_eq!((geometry.block_size, geometry.blocks), (4096, 16_384));
        assert_eq!((geometry.atomic_write_blocks, geometry.optimal_io_boundary_blocks), (1, 1024));
    }
}
