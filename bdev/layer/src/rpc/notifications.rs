//! RPC methods that report the block devices that came and went, changed their size, or lost their files: SPDK's `notify_*`.

use std::collections::VecDeque;

use control::json::{Value, json};
use control::{Method, NoParameters, RpcError};

use super::BdevModule;
use crate::DeviceEvent;

/// Most notifications kept, as in SPDK; older ones are forgotten.
const KEPT_MAX: usize = 1024;

const REGISTER: &str = "bdev_register";
const UNREGISTER: &str = "bdev_unregister";
/// Since SPDK 26.09.
const RESIZE: &str = "bdev_resize";
/// Not of SPDK: the file of a bdev was deleted.
const FILE_DELETED: &str = "bdev_file_deleted";

/// The last notifications. Each has a number, counted from 0 without a gap.
#[derive(Default)]
pub(super) struct Notifications {
    kept: VecDeque<(&'static str, String)>,
    /// Number of the oldest one.
    first_id: u64,
}

impl Notifications {
    /// Keeps what clients are notified of.
    pub(super) fn add(&mut self, event: &DeviceEvent) {
        let kind = match event {
            DeviceEvent::Registered(_) => REGISTER,
            DeviceEvent::Removed(_) => UNREGISTER,
            DeviceEvent::Resized(_) => RESIZE,
        };
        self.keep(kind, event.device().name());
    }

    pub(super) fn add_deleted_file(&mut self, bdev: &str) {
        self.keep(FILE_DELETED, bdev);
    }

    fn keep(&mut self, kind: &'static str, bdev: &str) {
        if self.kept.len() == KEPT_MAX {
            self.kept.pop_front();
            self.first_id += 1;
        }
        self.kept.push_back((kind, bdev.to_string()));
    }

    fn list(&self, id: u64, max: u64) -> Vec<Value> {
        let skipped = id.saturating_sub(self.first_id).min(KEPT_MAX as u64) as usize;
        let notifications = self.kept.iter().enumerate().skip(skipped).take(max as usize);
        let describe = |(index, (kind, name)): (usize, &(&str, String))| json!({ "type": kind, "ctx": name, "id": self.first_id + index as u64 });
        notifications.map(describe).collect()
    }
}

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::query("notify_get_types", |_: &BdevModule, _: NoParameters| {
            Ok::<_, RpcError>([REGISTER, UNREGISTER, RESIZE, FILE_DELETED])
        })
        .at_any_stage()
        .text("Lists the types of notifications.", "array of names"),
        Method::query("notify_get_notifications", get_notifications).at_any_stage().text(
            "Reports which bdevs came and went, changed their size, or lost their files. The last 1,024 notifications are kept.",
            "array of `type`, `ctx` (name of the bdev), `id`; ask for the next `id` the next time",
        ),
    ]
}

control::parameters! {
    struct GetNotifications {
        /// Number of the first
        id: u64 = 0,
        /// How many at most
        max: u64 = u64::MAX,
    }
}

fn get_notifications(bdevs: &BdevModule, params: GetNotifications) -> Result<Vec<Value>, RpcError> {
    Ok(sync::lock(&bdevs.notifications).list(params.id, params.max))
}
