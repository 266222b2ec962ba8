//! Copies to a volume what it has from parents, so that it needs them no more.
//!
//! What is copied does not change what the volume looks like from above, so that it may end at any moment and
//! be repeated: what was copied before is not copied again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use cluster_map::ParentVolume;
use reactor::Core;
use store_image::TRANSFER_BYTES_MAX;
use wire_store::{BlockBitmap, OBJECT_BYTES};

use super::channel::zero_from;
use super::object::{ParentData, limit_in};
use super::plan::{Action, ParentPart, plan_read};
use super::volume_io::VolumeIo;
use crate::attach::AttachState;
use crate::lanes::{LANES, Lane, run_lanes};
use crate::reclaim::{ReclaimError, sweep};
use crate::sweep::SweepKind;
use crate::watch::PoolWatch;

/// What the lanes share.
struct Pulling<'a> {
    core: Core,
    io: VolumeIo,
    volume: u64,
    parents: &'a [ParentVolume],
    waiting: RefCell<Vec<u32>>,
    copied: Cell<u64>,
}

/// Copies to a volume, which `attach` has attached, the blocks of its parents that it lacks. `progress` gets
/// the objects that are done, and how many there are.
pub(crate) async fn pull(
    core: &Core,
    (watch, attach): (Arc<PoolWatch>, Arc<AttachState>),
    volume: u64,
    parents: &[ParentVolume],
    mut progress: impl FnMut(u64, u64),
) -> Result<(), ReclaimError> {
    let pool = watch.view().0.pool.clone();
    // Parents do not change. With the attach epoch of the child, groups would refuse the lower one of whoever
    // removes a parent later.
    let reads = Arc::new(AttachState::new(0, pool.first_group..pool.first_group + pool.groups));
    let mut indices = BTreeSet::new();
    for parent in parents {
        let kind = SweepKind::Indices { end: parent.bytes.div_ceil(OBJECT_BYTES as u64) };
        let swept = sweep(core, watch.clone(), parent.volume, reads.clone(), kind, |_, _| {}).await;
        indices.extend(swept.map_err(ReclaimError::of_list)?.indices);
    }
    let count = indices.len() as u64;
    let pulling = Pulling {
        core: core.clone(),
        io: VolumeIo::new(core, watch, attach, volume),
        volume,
        parents,
        waiting: RefCell::new(indices.into_iter().rev().collect()),
        copied: Cell::new(0),
    };
    let mut lanes: Vec<Lane<'_, ReclaimError>> = Vec::new();
    for _ in 0..LANES {
        lanes.push(Box::pin(pulling.pull_objects()));
    }
    run_lanes(lanes, || progress(pulling.copied.get(), count)).await
}

impl Pulling<'_> {
    async fn pull_objects(&self) -> Result<(), ReclaimError> {
        loop {
            let Some(index) = self.waiting.borrow_mut().pop() else { return Ok(()) };
            self.pull_object(index).await?;
            self.copied.set(self.copied.get() + 1);
        }
    }

    async fn pull_object(&self, index: u32) -> Result<(), ReclaimError> {
        let mut written = Vec::new();
        for parent in self.parents.iter().filter(|parent| limit_in(parent, index) > 0) {
            written.push((*parent, self.written(parent.volume, index).await?));
        }
        let parents = ParentData::new(index, written.into_iter());
        if parents.blocks.is_empty() {
            return Ok(());
        }
        let inherited = parents.blocks.without(&self.written(self.volume, index).await?);
        for step in plan_read(0..OBJECT_BYTES as u32, &inherited, &parents) {
            let Action::ReadParent(parent) = step.action else { continue };
            let mut start = step.bytes.start;
            while start < step.bytes.end {
                let end = step.bytes.end.min(start + TRANSFER_BYTES_MAX);
                self.copy(index, parent, start, (end - start) as usize).await?;
                start = end;
            }
        }
        Ok(())
    }

    async fn copy(
        &self,
        index: u32,
        parent: ParentPart,
        offset: u32,
        length: usize,
    ) -> Result<(), ReclaimError> {
        let buffer = self.core.pool().take(length).ok_or(ReclaimError::NoMemory)?;
        let start = u64::from(index) * OBJECT_BYTES as u64 + u64::from(offset);
        let mut data = self.io.read(parent.volume, start, buffer).await.map_err(ReclaimError::Uncopied)?;
        zero_from(&mut data, parent.limit.saturating_sub(offset) as usize);
        self.io.write(start, data).await.map_err(ReclaimError::Uncopied)
    }

    async fn written(&self, volume: u64, index: u32) -> Result<BlockBitmap, ReclaimError> {
        self.io.written(volume, index).await.map_err(ReclaimError::Unlisted)
    }
}
