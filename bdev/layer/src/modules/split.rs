//! Split devices: parts of equal size of a base, as SPDK's `bdev_split_*`.
//!
//! The parts of a base share one claim on it, which ends with the last of them.

use std::sync::Arc;

use uuid::Uuid;

use crate::stacking::{BaseBdev, PartBdev, PartKind};
use crate::{BdevError, BdevGeometry, BlockDevice, InfoValue, Registry};

/// Configuration of the parts of one base.
#[derive(Clone, Debug)]
pub struct SplitConfig {
    /// Name of the base bdev; the parts are called `BASEp0`, `BASEp1`, ….
    pub base: String,
    /// Number of parts, 1 to [`PARTS_MAX`].
    pub count: u32,
    /// Size of a part.
    pub part_size: PartSize,
}

/// Size of the parts of a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartSize {
    /// The base is divided evenly, and what does not divide is left out. So parts of another size, with other
    /// data, come of it when the base has another size: who creates them again asks for the
    /// [bytes](Self::Bytes) that they got.
    Even,
    /// In MiB, rounded down to whole blocks.
    Mib(u64),
    /// In bytes, which have to be whole blocks.
    Bytes(u64),
}

/// Most parts of a base.
pub const PARTS_MAX: u32 = 4096;

/// Namespace of the UUIDs, which are made of the base's and of first and number of blocks: SPDK's, so that a volume that
/// moves here keeps its UUID.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0x976b_899e_3e1e_4d71_ab69_c2b0_8e9d_f8b8);

/// The module's object of one part.
pub type SplitBdev = PartBdev<SplitPart>;

/// A part that a split device is.
pub struct SplitPart;

impl PartKind for SplitPart {
    const PRODUCT_NAME: &'static str = "Split Disk";

    fn describe(&self, base_name: &str, first_lba: u64) -> Vec<(&'static str, InfoValue)> {
        let object = vec![("base_bdev", base_name.into()), ("offset_blocks", InfoValue::Number(first_lba))];
        vec![("split", InfoValue::Object(object))]
    }
}

/// Names of the parts of `base`.
pub fn part_names(base: &str, count: u32) -> Vec<String> {
    (0..count).map(|index| format!("{base}p{index}")).collect()
}

/// Creates the parts of a base, which they claim. If one cannot be created, none is.
///
/// # Errors
/// [`BdevError::Invalid`] if there are no parts or too many, or if they do not fit the base;
/// [`BdevError::Exists`] if the name of a part is in use.
pub fn create(registry: &Registry, config: &SplitConfig) -> Result<Vec<Arc<BlockDevice>>, BdevError> {
    if config.count == 0 || config.count > PARTS_MAX {
        let reason = format!("{} is not 1 to {PARTS_MAX}", config.count);
        return Err(BdevError::invalid("split_count", reason));
    }
    let base = Arc::new(BaseBdev::claim(registry, &config.base, &format!("split bdevs of {}", config.base))?);
    let below = base.device().clone();
    let geometry = below.geometry();
    let blocks = part_blocks(&geometry, config)?;
    let mut parts: Vec<Arc<BlockDevice>> = Vec::new();
    for (index, name) in part_names(&config.base, config.count).into_iter().enumerate() {
        let first_lba = blocks * index as u64;
        let name_of_part =
            [&below.uuid().as_bytes()[..], &first_lba.to_le_bytes(), &blocks.to_le_bytes()].concat();
        let uuid = Uuid::new_v5(&UUID_NAMESPACE, &name_of_part);
        let registered = PartBdev::new(base.clone(), first_lba, blocks, SplitPart)
            .and_then(|module| registry.register(&name, Some(uuid), &[], Arc::new(module)));
        match registered {
            Ok(part) => parts.push(part),
            Err(error) => {
                parts.iter().for_each(|part| drop(registry.unregister(part.name())));
                return Err(error);
            }
        }
    }
    parts.iter().for_each(|part| registry.stack(&below, part));
    Ok(parts)
}

/// Blocks of a part.
fn part_blocks(base: &BdevGeometry, config: &SplitConfig) -> Result<u64, BdevError> {
    let (count, block_size) = (u64::from(config.count), u64::from(base.block_size));
    let (blocks, size) = match config.part_size {
        PartSize::Even => (base.blocks / count, "that size".to_string()),
        PartSize::Mib(mib) => (mib.saturating_mul(1 << 20) / block_size, format!("{mib} MiB")),
        PartSize::Bytes(bytes) if !bytes.is_multiple_of(block_size) => {
            let reason =
                format!("{bytes} is not a multiple of the {block_size} bytes of a block of {}", config.base);
            return Err(BdevError::invalid("split_size_bytes", reason));
        }
        PartSize::Bytes(bytes) => (bytes / block_size, format!("{bytes} bytes")),
    };
    if blocks == 0 || blocks.checked_mul(count).is_none_or(|total| total > base.blocks) {
        let bytes = base.bytes();
        let reason = format!("{count} parts of {size} do not fit {}, which has {bytes} bytes", config.base);
        let field =
            if let PartSize::Bytes(_) = config.part_size { "split_size_bytes" } else { "split_size_mb" };
        return Err(BdevError::invalid(field, reason));
    }
    Ok(blocks)
}
