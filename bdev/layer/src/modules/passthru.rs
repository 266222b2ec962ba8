//! The passthru device: a virtual device that forwards all I/O to its base, as SPDK's `bdev_passthru_*`.
//!
//! It shows how little a module on top of a base needs, and gives a device a second name and identity. Its channel is
//! the base's own, so that it costs nothing per I/O.

use std::sync::Arc;

use uuid::Uuid;

use crate::stacking::{BaseBdev, BaseChannel, VirtualBdev, create_on};
use crate::{BdevError, BlockDevice, BoxedChannel, InfoValue, Registry};

/// Configuration of a passthru device.
#[derive(Clone, Debug)]
pub struct PassthruConfig {
    /// Name of the base bdev.
    pub base: String,
    /// Name of the device.
    pub name: String,
    /// UUID; made from that of the base and the name if none is given, so that it is the same each time.
    pub uuid: Option<Uuid>,
}

/// The module's object of a passthru device.
pub struct PassthruBdev {
    name: String,
    base: BaseBdev,
}

/// Namespace of the UUIDs, which are made of the base's: SPDK's, so that a volume that moves here keeps its UUID.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x7e25_812e_c8c0_4d3f_8599_16d7_9055_5b85);

/// Creates a passthru device on a base, which it claims.
pub fn create(registry: &Registry, config: PassthruConfig) -> Result<Arc<BlockDevice>, BdevError> {
    create_on(registry, "passthru", &config.base, &config.name, |base| {
        let derived = || Uuid::new_v5(&UUID_NAMESPACE, base.device().uuid().as_bytes());
        let uuid = config.uuid.unwrap_or_else(derived);
        (uuid, PassthruBdev { name: config.name.clone(), base })
    })
}

impl VirtualBdev for PassthruBdev {
    const PRODUCT_NAME: &'static str = "passthru";

    fn base(&self) -> &BaseBdev {
        &self.base
    }

    fn open_on(&self, base: BaseChannel, _core: &reactor::Core) -> BoxedChannel {
        Box::new(base.into_channel())
    }

    fn describe(&self) -> Vec<(&'static str, InfoValue)> {
        let object =
            vec![("name", self.name.as_str().into()), ("base_bdev_name", self.base.device().name().into())];
        vec![("passthru", InfoValue::Object(object))]
    }
}
