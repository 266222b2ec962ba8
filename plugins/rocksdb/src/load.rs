//! Loading of a store, and a look at a bdev without one: reads over a bdev.

use bdev::stacking::BaseBdev;
use bdev::{PlannedAction, PlannedIo, PlannedOutcome, Planner, run_plan};
use blobfs::{DeviceContent, DeviceLook};
use blobstore::{BlobStore, BlobStoreLoader, LoadError, LoadOptions};
use reactor::Core;

/// Why no store is loaded.
pub(crate) enum NotLoaded {
    /// The device cannot be opened or read.
    Device(String),
    /// There is none on it, or it is damaged.
    Store(LoadError),
}

struct LoadPlan {
    loader: BlobStoreLoader,
    outcome: Option<Result<BlobStore, LoadError>>,
}

/// What a read has returned; `None` if the device failed.
fn bytes_of(outcome: PlannedOutcome) -> Option<Vec<u8>> {
    let data = outcome.ok().flatten()?;
    let mut bytes = vec![0; data.len()];
    data.copy_to(0, &mut bytes);
    Some(bytes)
}

impl Planner for LoadPlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        let read = self.loader.next_read()?;
        let action = PlannedAction::Read { offset: read.offset, bytes: read.length };
        Some(PlannedIo { id: read.id, action })
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        self.loader.complete(id, bytes_of(outcome).as_deref());
        self.outcome = self.outcome.take().or_else(|| self.loader.outcome());
    }
}

/// Looks at what is on a device. Reads are named by where they begin.
struct LookPlan {
    look: DeviceLook,
    failed_at: Option<u64>,
}

impl Planner for LookPlan {
    fn next_io(&mut self) -> Option<PlannedIo> {
        let range = self.look.next_range()?;
        let bytes = (range.end - range.start) as usize;
        Some(PlannedIo { id: range.start, action: PlannedAction::Read { offset: range.start, bytes } })
    }

    fn complete(&mut self, id: u64, outcome: PlannedOutcome) {
        match bytes_of(outcome) {
            Some(data) => self.look.add(id, &data),
            None => self.failed_at = Some(id),
        }
    }
}

/// Loads the store of a bdev.
///
/// # Errors
/// The bdev cannot be read, there is no store on it, or it is damaged.
pub(crate) async fn load(core: &Core, base: &BaseBdev) -> Result<BlobStore, NotLoaded> {
    let bytes = base.device().geometry().bytes();
    let mut plan = LoadPlan { loader: BlobStoreLoader::new(bytes, LoadOptions::default()), outcome: None };
    // A device without space for a super block is refused without a read.
    plan.outcome = plan.loader.outcome();
    if plan.outcome.is_none() {
        let channel = base.channel(core).map_err(|error| NotLoaded::Device(error.to_string()))?;
        plan = run_plan(core, channel, plan).await;
    }
    match plan.outcome {
        Some(Ok(store)) => Ok(store),
        Some(Err(error @ LoadError::Read { .. })) => Err(NotLoaded::Device(error.to_string())),
        Some(Err(error)) => Err(NotLoaded::Store(error)),
        None => Err(NotLoaded::Device("the device did not complete its reads".to_string())),
    }
}

/// What is on a bdev that has no store.
///
/// # Errors
/// It cannot be read.
pub(crate) async fn content(core: &Core, base: &BaseBdev) -> Result<DeviceContent, String> {
    let geometry = base.device().geometry();
    let channel = base.channel(core).map_err(|error| error.to_string())?;
    let look = DeviceLook::new(geometry.bytes(), geometry.block_size);
    let plan = run_plan(core, channel, LookPlan { look, failed_at: None }).await;
    match plan.failed_at {
        Some(at) => Err(format!("it cannot be read at {at}")),
        None => Ok(plan.look.content()),
    }
}
