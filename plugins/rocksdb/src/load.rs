//! Loading of a store: the reads of its loader, over a bdev.

use bdev::stacking::BaseBdev;
use bdev::{PlannedAction, PlannedIo, PlannedOutcome, Planner, run_plan};
use blobstore::{BlobStore, BlobStoreLoader, LoadError, LoadOptions};
use reactor::Core;

/// Bytes at the front of a device that have to be zero where a store is made: partition tables, super blocks
/// of file systems and of stores are in them.
const FOREIGN_BYTES: usize = 64 << 10;

struct LoadPlan {
    loader: BlobStoreLoader,
    outcome: Option<Result<BlobStore, LoadError>>,
}

impl Planner for LoadPlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        let read = self.loader.next_read()?;
        let action = PlannedAction::Read { offset: read.offset, bytes: read.length };
        Some(PlannedIo { id: read.id, action })
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        let content = outcome.ok().flatten().map(|data| {
            let mut content = vec![0; data.len()];
            data.copy_to(0, &mut content);
            content
        });
        self.loader.complete(id, content.as_deref());
        self.outcome = self.outcome.take().or_else(|| self.loader.outcome());
    }
}

/// Reads the front of a device.
struct FrontPlan {
    bytes: usize,
    is_begun: bool,
    is_empty: Option<bool>,
}

impl Planner for FrontPlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        let is_begun = std::mem::replace(&mut self.is_begun, true);
        let action = PlannedAction::Read { offset: 0, bytes: self.bytes };
        (!is_begun).then_some(PlannedIo { id: 0, action })
    }

    fn complete(&mut self, _id: u64, outcome: PlannedOutcome) {
        if let Ok(Some(data)) = outcome {
            self.is_empty =
                Some(data.slices().iter().all(|part| part.as_slice().iter().all(|byte| *byte == 0)));
        }
    }
}

/// Loads the store of a bdev.
///
/// # Errors
/// There is none, or it is damaged.
pub(crate) async fn load(core: &Core, base: &BaseBdev) -> Result<BlobStore, String> {
    let bytes = base.device().geometry().bytes();
    let mut plan = LoadPlan { loader: BlobStoreLoader::new(bytes, LoadOptions::default()), outcome: None };
    // A device without a super block is refused without a read.
    plan.outcome = plan.loader.outcome();
    if plan.outcome.is_none() {
        let channel = base.channel(core).map_err(|error| error.to_string())?;
        plan = run_plan(core, channel, plan).await;
    }
    match plan.outcome {
        Some(outcome) => outcome.map_err(|error| error.to_string()),
        None => Err("the device did not complete its reads".to_string()),
    }
}

/// Whether the front of a device is zero.
///
/// # Errors
/// It cannot be read.
pub(crate) async fn is_empty(core: &Core, base: &BaseBdev) -> Result<bool, String> {
    let geometry = base.device().geometry();
    let bytes = FOREIGN_BYTES.min(geometry.bytes() as usize);
    let channel = base.channel(core).map_err(|error| error.to_string())?;
    let plan = run_plan(core, channel, FrontPlan { bytes, is_begun: false, is_empty: None }).await;
    plan.is_empty.ok_or_else(|| "its first blocks cannot be read".to_string())
}
