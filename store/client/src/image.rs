//! The block device of a cluster's image.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Bdev, BdevError, BdevGeometry, BoxedChannel, Durability, InfoValue, IoLimits};
use block_io::Op;
use cluster_map::{ImageEntry, PoolClass};
use reactor::Core;
use sockets::{CoreNetwork, Sockets};
use store_image::IMAGE_BLOCK_BYTES;
use wire_store::{BLOCK_BYTES, OBJECT_BYTES, ObjectId};

use crate::channel::ImageChannel;
use crate::cluster::{ClientError, Cluster};
use crate::watch::PoolWatch;

/// Requests in flight on one channel: fewer than a client's numbers that replicas tell apart.
pub(crate) const DEPTH: u32 = 512;

/// The module's object of an image, whose channels connect through `N`.
pub struct ClusterImage<N = Sockets> {
    pool: String,
    image: String,
    volume: u64,
    bytes: AtomicU64,
    watch: Arc<PoolWatch>,
    network: PhantomData<fn() -> N>,
}

/// The objects of a volume: each belongs to a logical group of the pool.
pub(crate) struct Placement {
    pub(crate) first_group: u32,
    pub(crate) groups: u32,
    pub(crate) volume: u64,
}

impl Placement {
    /// The object with the bytes from `offset` of the volume on, and the offset in it.
    pub(crate) fn locate(&self, offset: u64) -> (ObjectId, u32) {
        let index = (offset / OBJECT_BYTES as u64) as u32;
        let number = (self.volume + u64::from(index)) % u64::from(self.groups);
        let group = self.first_group + number as u32;
        (ObjectId { group, volume: self.volume, index, suffix: 0 }, (offset % OBJECT_BYTES as u64) as u32)
    }
}

impl ClusterImage {
    /// An image of a pool, as the map has it now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn open(cluster: &Cluster, pool: &str, image: &str) -> Result<ClusterImage, ClientError> {
        let entry = cluster.image(pool, image)?;
        ClusterImage::with_network(cluster, pool, image, &entry)
    }
}

impl<N: CoreNetwork> ClusterImage<N> {
    /// An image whose channels connect through another network.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn with_network(
        cluster: &Cluster,
        pool: &str,
        image: &str,
        entry: &ImageEntry,
    ) -> Result<ClusterImage<N>, ClientError> {
        check_size(entry.bytes)?;
        Ok(ClusterImage {
            pool: pool.to_string(),
            image: image.to_string(),
            volume: entry.volume,
            bytes: AtomicU64::new(entry.bytes),
            watch: PoolWatch::start(cluster, pool)?,
            network: PhantomData,
        })
    }

    /// The image has another size. The registry is told afterwards.
    pub fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

/// The geometry of an image. A block of 4 KiB is linearizable (docs/STORE-GUARANTEES.md), and a write within one is an entry
/// of its log: nothing larger is promised to be atomic.
fn geometry_of(bytes: u64) -> BdevGeometry {
    let atomic_blocks = BLOCK_BYTES as u32 / IMAGE_BLOCK_BYTES;
    BdevGeometry {
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
        geometry_of(self.bytes.load(Ordering::Relaxed))
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
        store_image::io_limits()
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let pool = self.watch.view().0.pool.clone();
        let placement = Placement { first_group: pool.first_group, groups: pool.groups, volume: self.volume };
        Ok(Box::new(ImageChannel::<N>::new(core, self.watch.clone(), placement)))
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![("pool", self.pool.as_str().into()), ("image", self.image.as_str().into())];
        vec![("store", InfoValue::Object(object))]
    }

    fn depth(&self) -> u32 {
        DEPTH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_block_of_the_store_is_written_atomically_and_never_a_part_of_two() {
        let geometry = geometry_of(64 << 20);
        let atomic_bytes = geometry.atomic_write_blocks as usize * geometry.block_size as usize;
        assert_eq!(atomic_bytes, BLOCK_BYTES);
        assert_eq!(geometry.atomic_write_boundary_blocks, geometry.atomic_write_blocks);
        // Blocks do not cross objects, whose groups have logs of their own.
        assert_eq!(OBJECT_BYTES % atomic_bytes, 0);
        assert_eq!((geometry.blocks, geometry.physical_block_size), (131_072, 4096));
    }
}
