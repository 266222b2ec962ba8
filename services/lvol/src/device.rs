//! What a bdev promises a blobstore.

use bdev::stacking::BaseBdev;
use blobstore::BlobStoreDevice;
use block_io::Op;

/// Sizes in bytes whose atomicity is asked for: metadata pages have 4 to 64 KiB.
const PAGE_SIZES: [u32; 5] = [4096, 8192, 16384, 32768, 65536];

/// The size of a bdev, and what a power failure leaves of writes to it.
pub fn blob_store_device(base: &BaseBdev) -> BlobStoreDevice {
    let device = base.device();
    let geometry = device.geometry();
    let atomic = PAGE_SIZES.into_iter().filter(|bytes| geometry.is_atomic(*bytes)).max();
    BlobStoreDevice {
        bytes: geometry.bytes(),
        block_bytes: geometry.block_size,
        has_volatile_cache: geometry.write_cache && device.supports(Op::Flush),
        atomic_write_bytes: atomic.unwrap_or(0),
    }
}
