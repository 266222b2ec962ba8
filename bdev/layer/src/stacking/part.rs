//! Devices that are a range of blocks of a base, which several share: [`PartBdev`] and its [`OffsetChannel`].

use std::sync::{Arc, Mutex};

use block_io::{Op, Payload};

use super::{BaseBdev, BaseChannel};
use crate::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Completion, Durability, InfoValue, IoLimits,
    Request,
};

/// What a kind of parts says about each of them.
pub trait PartKind: Send + Sync + 'static {
    /// See [`Bdev::product_name`].
    const PRODUCT_NAME: &'static str;

    /// See [`Bdev::driver_specific`]; `base_name` and `first_lba` are those of the part.
    fn describe(&self, base_name: &str, first_lba: u64) -> Vec<(&'static str, InfoValue)>;
}

/// The module's object of a part of a base, with the blocks from `first_lba` on. Parts share the open base:
/// its claim ends when the last of them is closed. A reset only drains the part, which the layer does, as it
/// must not abort the I/O of the others.
pub struct PartBdev<K> {
    /// `None` once the part is closed.
    base: Mutex<Option<Arc<BaseBdev>>>,
    below: Arc<BlockDevice>,
    first_lba: u64,
    geometry: BdevGeometry,
    kind: K,
}

impl<K: PartKind> PartBdev<K> {
    /// A part of `blocks` blocks from `first_lba` on, which are to be within the base: what is not fails. Who
    /// registers it [stacks](crate::Registry::stack) it on the base.
    ///
    /// # Errors
    /// [`BdevError::Invalid`] if the base has protection information, which names its own block addresses.
    pub fn new(base: Arc<BaseBdev>, first_lba: u64, blocks: u64, kind: K) -> Result<PartBdev<K>, BdevError> {
        let below = base.device().clone();
        let geometry = below.geometry();
        if geometry.metadata.protection.is_some() {
            let reason =
                format!("{} has protection information, which names its own block addresses", below.name());
            return Err(BdevError::invalid("base_bdev", reason));
        }
        let geometry = BdevGeometry { blocks, ..geometry.at(first_lba) };
        Ok(PartBdev { base: Mutex::new(Some(base)), below, first_lba, geometry, kind })
    }

    /// The device that it is a part of.
    pub fn base(&self) -> &Arc<BlockDevice> {
        &self.below
    }

    /// What it is beside its range.
    pub fn kind(&self) -> &K {
        &self.kind
    }
}

impl<K: PartKind> Bdev for PartBdev<K> {
    fn product_name(&self) -> &'static str {
        K::PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        self.geometry
    }

    fn durability(&self) -> Durability {
        self.below.durability()
    }

    fn supports(&self, op: Op) -> bool {
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
        Ok(Box::new(OffsetChannel::new(BaseChannel::new(base), self.first_lba)))
    }

    fn registered_page_alignment(&self) -> Option<u32> {
        self.below.bdev().registered_page_alignment()
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        self.kind.describe(self.below.name(), self.first_lba)
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

/// A channel whose block 0 is another block of its base: adds the offset to requests, and takes it from
/// completions and from the addresses that they report.
pub struct OffsetChannel {
    base: BaseChannel,
    offset_blocks: u64,
}

impl OffsetChannel {
    /// The blocks of `base` from `offset_blocks` on. Their end is for the layer to check.
    pub fn new(base: BaseChannel, offset_blocks: u64) -> OffsetChannel {
        OffsetChannel { base, offset_blocks }
    }
}

impl block_io::Channel for OffsetChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in &mut *batch {
            // Not used by a flush, whose value may be anything.
            request.lba = request.lba.wrapping_add(self.offset_blocks);
        }
        self.base.submit_batch(batch);
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let before = sink.len();
        let count = self.base.poll_into(sink);
        for completion in &mut sink[before..] {
            let request = completion.request_mut();
            request.lba = request.lba.wrapping_sub(self.offset_blocks);
            if let Payload::Found(Some(lba)) = &mut request.payload {
                *lba = lba.wrapping_sub(self.offset_blocks);
            }
        }
        count
    }

    fn deadline(&self) -> Option<u64> {
        self.base.deadline()
    }
}
