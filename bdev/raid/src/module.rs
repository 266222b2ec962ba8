//! The module: examination, and what the control plane sees.

use std::sync::Arc;
use std::time::Duration;

use bdev::rpc::BdevModule;
use bdev::{BdevError, DeviceEvent};
use block_io::Status;
use control::json::{Value, json};
use control::{CallRecorder, Examination, Method, Module, RpcError};
use reactor::ReactorHandle;
use uuid::Uuid;

use crate::array::ArrayPhase;
use crate::assembly::Arrays;
use crate::on_disk::{NoSuperblock, can_have_superblock, read_member};

/// How long the end of the program waits for mirrors to be marked clean, each.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(2);

/// RAID arrays as a [`Module`].
pub struct RaidModule {
    pub(crate) arrays: Arc<Arrays>,
    pub(crate) bdevs: Arc<BdevModule>,
    /// Calls of arrays without superblocks.
    pub(crate) recorder: CallRecorder,
    pub(crate) options_recorder: CallRecorder,
}

/// What holds for arrays that are made, and copies that start, later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RaidOptions {
    pub(crate) process_window_size_kb: u32,
    /// 0 for no limit.
    pub(crate) process_max_bandwidth_mb_sec: u32,
    /// Bitmaps are not believed.
    pub(crate) resyncs_all: bool,
}

impl Default for RaidOptions {
    /// SPDK's.
    fn default() -> RaidOptions {
        RaidOptions { process_window_size_kb: 1024, process_max_bandwidth_mb_sec: 0, resyncs_all: false }
    }
}

/// Why something of an array fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RaidError {
    #[error(transparent)]
    Bdev(#[from] BdevError),
    #[error("there is no array {name}")]
    NotFound { name: String },
    #[error("{bdev} is no member of an array")]
    NoMember { bdev: String },
    #[error(
        "{bdev} has the superblock of the array {name} ({uuid}); bdev_raid_delete with clear_sb removes it"
    )]
    ForeignSuperblock { bdev: String, name: String, uuid: Uuid },
    #[error("the superblock of {bdev} cannot be read: {error}")]
    Unread { bdev: String, error: NoSuperblock },
    #[error("{bdev} is a member of the array {name} already")]
    IsMember { bdev: String, name: String },
    #[error("the array {name} copies to a member already")]
    Copying { name: String },
    #[error("the array {name} has no free place for a member")]
    NoFreeSlot { name: String },
    #[error("the array {name} has the UUID {uuid} too, and has no superblock")]
    OtherArray { name: String, uuid: Uuid },
    #[error("{bdev} with the UUID {uuid} is not a member that the superblock of the array {name} lists")]
    NotListed { bdev: String, uuid: Uuid, name: String },
    #[error(
        "it is newer than that of the array {name}, which runs; delete the array, and examine its members"
    )]
    Newer { name: String },
    #[error(
        "{bdev} was used without the present members of the array {name}, so that both have data which the other lacks; wipe one of both"
    )]
    Diverged { bdev: String, name: String },
    #[error(
        "too few of its members have its newest data; bdev_raid_start_degraded takes the older data all the same"
    )]
    OnlyStale { name: String },
    #[error("writing the superblock to {bdev} failed: {status}")]
    Write { bdev: String, status: Status },
    #[error("there is no reactor that could read and write members in time")]
    Unavailable,
    #[error("the removal of the member is not recorded yet; the array does without it all the same")]
    NotRecorded,
}

impl From<RaidError> for RpcError {
    fn from(error: RaidError) -> RpcError {
        let code = match error {
            RaidError::Bdev(error) => return error.into(),
            RaidError::NotFound { .. } | RaidError::NoMember { .. } => RpcError::ENODEV,
            RaidError::ForeignSuperblock { .. }
            | RaidError::OtherArray { .. }
            | RaidError::IsMember { .. } => RpcError::EEXIST,
            RaidError::Copying { .. } => EPERM,
            RaidError::NoFreeSlot { .. } | RaidError::NotListed { .. } | RaidError::Diverged { .. } => {
                RpcError::EINVAL
            }
            RaidError::Newer { .. } => RpcError::EBUSY,
            RaidError::OnlyStale { .. } => RpcError::EINVAL,
            RaidError::NotRecorded => RpcError::EINPROGRESS,
            RaidError::Unread { .. } | RaidError::Write { .. } | RaidError::Unavailable => RpcError::EIO,
        };
        RpcError::new(code, error.to_string())
    }
}

/// SPDK's code while an array copies.
pub(crate) const EPERM: i64 = -1;

impl RaidModule {
    /// Makes arrays of the devices of `bdevs`; the reactors read and write superblocks, and copy.
    pub fn new(bdevs: &Arc<BdevModule>, reactors: &[ReactorHandle]) -> Arc<RaidModule> {
        let arrays = Arrays::new(bdevs.registry(), reactors);
        let known = arrays.clone();
        let recorder = bdevs.saved_calls().recorder(move |name| known.find(name).is_some());
        let options_recorder = bdevs.saved_calls().recorder(|_| true);
        Arc::new(RaidModule { arrays, bdevs: bdevs.clone(), recorder, options_recorder })
    }
}

impl Module for RaidModule {
    const NAME: &'static str = "bdev_raid";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];

    fn methods() -> Vec<Method<RaidModule>> {
        crate::methods::methods()
    }

    fn start(&self) -> Result<(), RpcError> {
        let arrays = Arc::downgrade(&self.arrays);
        self.arrays.registry.subscribe(Box::new(move |event| {
            if let DeviceEvent::Removed(device) = event
                && let Some(arrays) = arrays.upgrade()
            {
                arrays.device_removed(device);
            }
        }));
        Ok(())
    }

    /// Mirrors without writes in flight are marked clean while the reactors run.
    fn drain(&self) {
        for array in self.arrays.all() {
            let mirror = array.lock().mirror.clone();
            if let Some(mirror) = mirror {
                mirror.clean_now(CLEAN_TIMEOUT);
            }
        }
    }

    /// The arrays go before their members.
    fn stop(&self) {
        for array in self.arrays.all() {
            if array.phase() == ArrayPhase::Online {
                // An error means that it is gone already.
                _ = self.arrays.registry.unregister(&array.name);
            }
            self.arrays.remove(&array);
        }
    }

    fn examine_config(&self, bdev: &str) {
        match self.arrays.registry.find(bdev) {
            Some(device) => self.arrays.configure_named(&device, false),
            // An array that has just gone with a member, which is back already.
            None => {
                if let Some(array) = self.arrays.find(bdev)
                    && array.phase() == ArrayPhase::Offline
                {
                    self.arrays.restart(&array);
                }
            }
        }
    }

    fn examine_disk(&self, bdev: &str, examination: Examination) {
        let arrays = &self.arrays;
        let (Some(reader), Some(device)) = (&arrays.reader, arrays.registry.find(bdev)) else { return };
        if device.claim().is_some() || !can_have_superblock(&device) {
            return;
        }
        let arrays = arrays.clone();
        read_member(reader, &device.clone(), move |found| match found {
            Ok(on_disk) => examination.finish(move || {
                if let Err(error) = arrays.assemble(&device, on_disk) {
                    let name = device.name();
                    log::warn!(target: "bdev_raid", "the RAID superblock of {name} is not used: {error}");
                }
            }),
            Err(error) => {
                let name = device.name();
                let (level, what) = without_superblock(&error, device.is_removed());
                log::log!(target: "bdev_raid", level, "{name}: {what}: {error}");
                if let NoSuperblock::Decode(_) = error {
                    examination.finish(move || arrays.configure_named(&device, true));
                }
            }
        });
    }

    fn report(&self) -> Value {
        let arrays = self.arrays.all();
        let online = arrays.iter().filter(|array| array.phase() == ArrayPhase::Online).count();
        json!({ "arrays": arrays.len(), "online": online })
    }
}

/// How the log says that nothing was found on a device: loudly only if there may be something on a device
/// that is still there.
fn without_superblock(error: &NoSuperblock, is_removed: bool) -> (log::Level, &'static str) {
    match error {
        _ if is_removed => (log::Level::Debug, "it was removed before it was examined"),
        NoSuperblock::Read(_) => (log::Level::Warn, "it could not be examined for a RAID superblock"),
        NoSuperblock::Decode(_) if error.is_absent() => (log::Level::Debug, "it has no RAID superblock"),
        NoSuperblock::Decode(_) => (log::Level::Warn, "its RAID superblock is not used"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_removed_before_it_is_examined_is_no_warning() {
        let unread = NoSuperblock::Read(BdevError::NotFound { name: "M".to_string() }.into());
        assert_eq!(without_superblock(&unread, true).0, log::Level::Debug);
        assert_eq!(
            without_superblock(&unread, false),
            (log::Level::Warn, "it could not be examined for a RAID superblock")
        );
    }
}
