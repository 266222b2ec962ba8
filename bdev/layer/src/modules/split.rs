//! Split devices: parts of equal size of a base, as SPDK's `bdev_split_*`.
//!
//! The parts of a base share one claim on it, which ends with the last of them.

use std::sync::{Arc, Mutex};

use block_io::{Op, Payload};
use uuid::Uuid;

use crate::stacking::{BaseBdev, BaseChannel};
use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, InfoValue, IoLimits,
    Registry, Request,
};

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
pub struct SplitBdev {
    /// `None` once the part is closed. The last part to close releases the claim.
    base: Mutex<Option<Arc<BaseBdev>>>,
    below: Arc<BlockDevice>,
    first_lba: u64,
    geometry: BdevGeometry,
}

impl SplitBdev {
    /// Name of the device that it is a part of.
    pub fn base_name(&self) -> &str {
        self.below.name()
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
    if geometry.metadata.protection.is_some() {
        let reason =
            format!("{} has protection information, which names its own block addresses", config.base);
        return Err(BdevError::invalid("base_bdev", reason));
    }
    let blocks = part_blocks(&geometry, config)?;
    let mut parts: Vec<Arc<BlockDevice>> = Vec::new();
    for (index, name) in part_names(&config.base, config.count).into_iter().enumerate() {
        let first_lba = blocks * index as u64;
        let module = SplitBdev {
            base: Mutex::new(Some(base.clone())),
            below: below.clone(),
            first_lba,
            geometry: BdevGeometry { blocks, ..geometry.at(first_lba) },
        };
        let name_of_part =
            [&below.uuid().as_bytes()[..], &first_lba.to_le_bytes(), &blocks.to_le_bytes()].concat();
        let uuid = Uuid::new_v5(&UUID_NAMESPACE, &name_of_part);
        match registry.register(&name, Some(uuid), &[], Arc::new(module)) {
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

impl Bdev for SplitBdev {
    fn product_name(&self) -> &'static str {
        "Split Disk"
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        self.below.durability()
    }

    fn supports(&self, op: Op) -> bool {
        // A reset only drains the part, which the layer does: it must not abort the I/O of other parts.
        let moves = matches!(
            op,
            Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes | Op::WriteUncorrectable
        );
        (moves || matches!(op, Op::SeekData | Op::SeekHole)) && self.below.bdev().supports(op)
    }

    fn io_limits(&self) -> IoLimits {
        // The base's channel divides what its module does not take.
        IoLimits::NONE
    }

    fn open(&self, core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        let base = sync::lock(&self.base);
        let removed = || BdevError::Removed { name: self.below.name().to_string() };
        let base = base.as_ref().ok_or_else(removed)?.channel(core)?;
        Ok(Box::new(SplitChannel { base: BaseChannel::new(base), first_lba: self.first_lba }))
    }

    fn registered_page_alignment(&self) -> Option<u32> {
        self.below.bdev().registered_page_alignment()
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        let object = vec![
            ("base_bdev", self.below.name().into()),
            ("offset_blocks", InfoValue::Number(self.first_lba)),
        ];
        vec![("split", InfoValue::Object(object))]
    }

    fn reads_undefined(&self) -> bool {
        self.below.bdev().reads_undefined()
    }

    fn read_only(&self) -> bool {
        self.below.bdev().read_only()
    }

    fn depth(&self) -> u32 {
        self.below.bdev().depth()
    }

    fn abort_in_flight(&self) {
        self.below.bdev().abort_in_flight();
    }

    fn on_closed(&self) {
        let base = sync::lock(&self.base).take();
        drop(base);
    }
}

struct SplitChannel {
    base: BaseChannel,
    first_lba: u64,
}

impl block_io::Channel for SplitChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for mut request in batch.drain(..) {
            // Not used by a flush, whose value may be anything.
            request.lba = request.lba.wrapping_add(self.first_lba);
            self.base.push(request);
        }
        self.base.submit();
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        for completion in self.base.poll() {
            let status = completion.status();
            let mut request = completion.into_request();
            request.lba = request.lba.wrapping_sub(self.first_lba);
            if let Payload::Found(Some(lba)) = &mut request.payload {
                *lba = lba.wrapping_sub(self.first_lba);
            }
            sink.push(request.complete(status));
        }
        sink.len() - before
    }

    fn deadline(&self) -> Option<u64> {
        self.base.deadline()
    }
}
