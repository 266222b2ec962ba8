//! The bdev of an array that is online.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::stacking::{BaseSet, UpperOutcome};
use bdev::{
    Bdev, BdevError, BdevGeometry, BlockDevice, BoxedChannel, Durability, InfoValue, IoLimits, Registry,
};
use block_io::Op;
use reactor::Core;
use wire_raid::MemberState;

use crate::array::{ArrayPhase, ArrayShape, RaidArray};
use crate::layout::StripeLayout;
use crate::mirror::Mirror;
use crate::striped::{PIECES_MAX, StripedChannel};

/// SPDK's name of the kind.
pub(crate) const PRODUCT_NAME: &str = "Raid Volume";
/// What raid5f passes on: others would need to change parts of stripes.
const PARITY_OPS: [Op; 3] = [Op::Read, Op::Write, Op::Flush];
/// What an array passes on if all members support it.
const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Unmap, Op::WriteZeroes];

/// The module's object of an array.
pub(crate) struct RaidBdev {
    array: Arc<RaidArray>,
    bases: Arc<BaseSet>,
    kind: RaidKind,
    /// It shrinks with a member.
    blocks: AtomicU64,
    geometry: BdevGeometry,
    durability: Durability,
    depth: u32,
    ops: Vec<Op>,
}

/// How requests get to the members.
pub(crate) enum RaidKind {
    Striped(Arc<StripeLayout>),
    Mirrored(Arc<Mirror>),
}

/// What the members of an array allow it.
pub(crate) struct MemberLimits {
    pub(crate) geometry: BdevGeometry,
    durability: Durability,
    pub(crate) depth: u32,
    pub(crate) ops: Vec<Op>,
}

impl MemberLimits {
    /// Of an array with this number of blocks on `members`, of which there is one at least.
    pub(crate) fn of(members: &[Arc<BlockDevice>], blocks: u64) -> MemberLimits {
        let first = members[0].geometry();
        let mut geometry = BdevGeometry::new(first.block_size, blocks);
        for member in members.iter().map(|member| member.geometry()) {
            geometry.write_cache |= member.write_cache;
            geometry.buffer_alignment = geometry.buffer_alignment.max(member.buffer_alignment);
            geometry.physical_block_size = geometry.physical_block_size.max(member.physical_block_size);
        }
        let supported = |op: &Op| members.iter().all(|member| member.bdev().supports(*op));
        MemberLimits {
            geometry,
            durability: members.iter().map(|member| member.durability()).min().unwrap_or(Durability::None),
            depth: members.iter().map(|member| member.bdev().depth()).min().unwrap_or(1),
            ops: OPS.into_iter().filter(supported).collect(),
        }
    }
}

impl RaidBdev {
    pub(crate) fn new(
        array: &Arc<RaidArray>,
        bases: &Arc<BaseSet>,
        kind: RaidKind,
        limits: MemberLimits,
    ) -> RaidBdev {
        let mut geometry = limits.geometry;
        if let RaidKind::Striped(layout) = &kind
            && let StripeLayout::Raid0 { members: 2.., shift } = &**layout
        {
            geometry.optimal_io_boundary_blocks = 1u32 << *shift;
        }
        let mut ops = limits.ops;
        if let RaidKind::Mirrored(mirror) = &kind
            && let Some(layout) = mirror.parity()
        {
            // A stripe has 256 MiB at most.
            geometry.optimal_io_boundary_blocks = layout.strip_blocks() as u32;
            geometry.write_unit_blocks = layout.stripe_blocks() as u32;
            ops.retain(|op| PARITY_OPS.contains(op));
        }
        RaidBdev {
            array: array.clone(),
            bases: bases.clone(),
            kind,
            blocks: AtomicU64::new(geometry.blocks),
            geometry,
            durability: limits.durability,
            depth: limits.depth,
            ops,
        }
    }

    /// The member in a place.
    pub(crate) fn place_of(&self, device: &BlockDevice) -> Option<usize> {
        self.bases.place_of(device)
    }

    /// The members.
    pub(crate) fn bases(&self) -> &Arc<BaseSet> {
        &self.bases
    }
}

impl Bdev for RaidBdev {
    fn product_name(&self) -> &'static str {
        PRODUCT_NAME
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.geometry }
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    fn supports(&self, op: Op) -> bool {
        self.ops.contains(&op)
    }

    fn open(&self, core: &Core) -> Result<BoxedChannel, BdevError> {
        let channels = self.bases.open(core)?;
        Ok(match &self.kind {
            RaidKind::Striped(layout) => Box::new(StripedChannel::new(layout.clone(), channels, self.depth)),
            RaidKind::Mirrored(mirror) => mirror.open(core, channels, self.depth),
        })
    }

    fn io_limits(&self) -> IoLimits {
        // The channels of the members divide what their modules do not take.
        let layout = match &self.kind {
            RaidKind::Striped(layout) => layout,
            // A write is a stripe, and a read within one.
            RaidKind::Mirrored(_) => {
                let boundary_blocks = match self.geometry.write_unit_blocks {
                    0 | 1 => 0,
                    stripe_blocks => stripe_blocks,
                };
                return IoLimits { boundary_blocks, ..IoLimits::NONE };
            }
        };
        let StripeLayout::Raid0 { members: 2.., shift } = &**layout else { return IoLimits::NONE };
        // One piece more than whole strips, where the range begins inside a strip.
        let strip_bytes = u64::from(self.geometry.block_size) << *shift;
        let bytes = strip_bytes.saturating_mul(PIECES_MAX as u64 - 1);
        IoLimits { transfer_bytes_max: u32::try_from(bytes).unwrap_or(u32::MAX), ..IoLimits::NONE }
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn driver_specific(&self) -> Vec<(&'static str, InfoValue)> {
        vec![("raid", InfoValue::Object(self.array.describe()))]
    }

    fn abort_in_flight(&self) {
        for base in self.bases.bases() {
            base.device().bdev().abort_in_flight();
        }
    }

    fn on_base_removed(&self, base: &BlockDevice) -> UpperOutcome {
        let Some(place) = self.bases.place_of(base) else { return UpperOutcome::Stays };
        let survives = match &self.kind {
            RaidKind::Striped(_) => false,
            RaidKind::Mirrored(mirror) => mirror.lose(place, MemberState::Missing),
        };
        // So that the base can go.
        self.bases.remove(place);
        if survives { UpperOutcome::Stays } else { UpperOutcome::Removed }
    }

    fn on_base_resized(&self, _base: &BlockDevice) -> UpperOutcome {
        let (least, strip) = {
            let state = self.array.lock();
            let bases = self.bases.bases();
            let room =
                bases.iter().map(|base| base.device().geometry().blocks.saturating_sub(base.first_lba()));
            (room.min().unwrap_or(0), state.slots.len() as u64)
        };
        match &self.kind {
            // Its size is in no superblock, and strips stay where they are.
            RaidKind::Striped(layout) if !self.array.has_superblock => {
                let StripeLayout::Raid0 { shift, .. } = &**layout else { return UpperOutcome::Stays };
                let data_blocks = (least >> *shift) << *shift;
                self.array.lock().slots.iter_mut().for_each(|slot| slot.data_blocks = data_blocks);
                self.blocks.store(data_blocks * strip, Ordering::Relaxed);
            }
            RaidKind::Mirrored(mirror) if mirror.parity().is_some() => return UpperOutcome::Stays,
            RaidKind::Mirrored(_) => _ = self.blocks.fetch_min(least, Ordering::Relaxed),
            RaidKind::Striped(_) => return UpperOutcome::Stays,
        }
        UpperOutcome::Resized
    }

    fn on_removed(&self) {
        if let RaidKind::Mirrored(mirror) = &self.kind {
            mirror.end_copies();
        }
        let mut state = self.array.lock();
        state.phase = ArrayPhase::Offline;
        (state.device, state.mirror) = (None, None);
        for slot in &mut state.slots {
            slot.is_configured = false;
        }
    }

    fn on_closed(&self) {
        self.bases.release();
    }
}

/// The kind of a shape; what is redundant is made by `mirror`.
pub(crate) fn kind_of(shape: ArrayShape, mirror: impl FnOnce() -> Arc<Mirror>) -> RaidKind {
    match shape.layout {
        Some(layout) => RaidKind::Striped(Arc::new(layout)),
        None => RaidKind::Mirrored(mirror()),
    }
}

/// The registered device, as an array.
pub(crate) fn raid_of(device: &BlockDevice) -> Option<&RaidBdev> {
    device.module::<RaidBdev>()
}

/// Says that the members are below the array.
pub(crate) fn stack_all(registry: &Registry, device: &Arc<BlockDevice>, bases: &BaseSet) {
    for base in bases.bases() {
        registry.stack(base.device(), device);
    }
}
