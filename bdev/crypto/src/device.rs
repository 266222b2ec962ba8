//! The device.

use std::sync::{Arc, Mutex};

use accel::{Accel, CryptoKey};
use bdev::stacking::{BaseBdev, BaseChannel, VirtualBdev, create_on};
use bdev::{BdevError, BlockDevice, BoxedChannel, InfoValue, Registry, Uuid};
use block_io::Op;

use crate::channel::CryptoChannel;

/// Largest block: a block is in one buffer, of which each channel keeps one.
pub const BLOCK_BYTES_MAX: u32 = 64 << 10;

/// Namespace of the UUIDs, which are made of the base's: SPDK's, so that a volume that moves here keeps its
/// UUID.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x078e_3cf7_f4b4_4545_b2c3_d400_45a6_4ae2);

/// The module's object of an encrypted device.
pub struct CryptoBdev {
    name: String,
    base: BaseBdev,
    accel: Accel,
    key_name: String,
    /// Until the device is closed.
    key: Mutex<Option<Arc<CryptoKey>>>,
}

/// Creates an encrypted device on a base, which it claims.
///
/// # Errors
/// As [`create_on`]; [`BdevError::Invalid`] for a base with metadata, or with blocks that are no whole data
/// units of the key or larger than [`BLOCK_BYTES_MAX`].
pub fn create(
    registry: &Registry,
    base: &str,
    name: &str,
    key: Arc<CryptoKey>,
) -> Result<Arc<BlockDevice>, BdevError> {
    if let Some(device) = registry.find(base) {
        check(&device, &key)?;
    }
    create_on(registry, "crypto", base, name, |base| {
        let uuid = Uuid::new_v5(&UUID_NAMESPACE, base.device().uuid().as_bytes());
        let (name, key_name) = (name.to_string(), key.name().to_string());
        let accel = registry.accel().clone();
        (uuid, CryptoBdev { name, base, accel, key_name, key: Mutex::new(Some(key)) })
    })
}

fn check(base: &BlockDevice, key: &CryptoKey) -> Result<(), BdevError> {
    let (name, geometry) = (base.name(), base.geometry());
    let invalid = |reason| Err(BdevError::invalid("base_bdev_name", reason));
    if geometry.metadata.bytes > 0 {
        return invalid(format!("{name} has metadata, which is not encrypted"));
    }
    if geometry.block_size > BLOCK_BYTES_MAX {
        return invalid(format!("{name} has blocks of more than {BLOCK_BYTES_MAX} bytes"));
    }
    if !key.takes_blocks(geometry.block_size as usize) {
        let mode = key.tweak_mode().name();
        return invalid(format!(
            "{name} has blocks of {} bytes, and {mode} needs others",
            geometry.block_size
        ));
    }
    Ok(())
}

impl CryptoBdev {
    /// Name of its key.
    pub fn key_name(&self) -> &str {
        &self.key_name
    }
}

impl VirtualBdev for CryptoBdev {
    const PRODUCT_NAME: &'static str = "crypto";

    fn base(&self) -> &BaseBdev {
        &self.base
    }

    fn open_on(&self, base: BaseChannel, core: &reactor::Core) -> BoxedChannel {
        let geometry = self.base.device().geometry();
        let accel = self.accel.channel(core.index());
        let depth = self.base.device().bdev().depth();
        let Some(key) = sync::lock(&self.key).clone() else {
            unreachable!("{} opens a channel after it was closed", self.name)
        };
        Box::new(CryptoChannel::new(base, core, accel, key, geometry.block_size as usize, depth))
    }

    fn supports(&self, op: Op) -> bool {
        let base = self.base.device().bdev();
        match op {
            Op::Reset => true,
            // Encrypted zeroes are written.
            Op::WriteZeroes => base.supports(Op::Write),
            op => base.supports(op),
        }
    }

    /// The pages of another request have no address here.
    fn registered_page_alignment(&self) -> Option<u32> {
        None
    }

    fn closed(&self) {
        // It can be destroyed from now on.
        sync::lock(&self.key).take();
    }

    fn describe(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![
            ("base_bdev_name", self.base.device().name().into()),
            ("name", self.name.as_str().into()),
            ("key_name", self.key_name.as_str().into()),
        ];
        vec![("crypto", InfoValue::Object(object))]
    }
}
