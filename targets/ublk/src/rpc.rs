//! The module of the target for the control plane: the methods `ublk_*`.

use std::sync::Arc;

use bdev::Registry;
use control::json::{Value, json};
use control::{Method, Module, NoParameters, RpcError};
use reactor::ReactorHandle;
use target_shell::canonical_mask;

use crate::{UblkDisk, UblkError, UblkTarget};

/// The ublk target as a [`Module`].
pub struct UblkModule {
    target: UblkTarget,
}

impl UblkModule {
    /// A target that is not created, on `reactors`, for the devices of `registry`.
    pub fn new(registry: Registry, reactors: &[ReactorHandle]) -> Arc<UblkModule> {
        Arc::new(UblkModule { target: UblkTarget::new(registry, reactors) })
    }
}

const UNRESPONSIVE: (i64, &str) =
    (RpcError::ETIMEDOUT, "a reactor or the kernel does not respond; the kernel may still do it");
const NO_TARGET: (i64, &str) = (RpcError::ENODEV, "there is no target, no such bdev, or no such disk");
const REFUSED: (i64, &str) = (RpcError::INTERNAL, "the kernel refuses");

impl Module for UblkModule {
    const NAME: &'static str = "ublk";
    const DEPENDS_ON: &'static [&'static str] = &["bdev"];
    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<UblkModule>> {
        vec![
            Method::update("ublk_create_target", create_target)
                .text(
                    "Opens the kernel's ublk driver, for disks that follow. Needs Linux 6.5 or later, and root except for \
                     disks of unprivileged users.",
                    "true",
                )
                .canonical(|_: &UblkModule, params: &mut CreateTarget| {
                    params.cpumask = params.cpumask.as_deref().map(canonical_mask).transpose().map_err(UblkError::from)?;
                    Ok(())
                })
                .errors(&[
                    (RpcError::INVALID_PARAMS, "no reactor runs on a core of the mask"),
                    (RpcError::EBUSY, "the target was created already"),
                    (RpcError::ENOTSUP, "the kernel has no ublk driver, or an older one"),
                    (RpcError::EPERM, "the process may not use /dev/ublk-control or io_uring"),
                    UNRESPONSIVE,
                ]),
            Method::update("ublk_destroy_target", destroy_target)
                .text("Stops all disks and closes the driver.", "true")
                .errors(&[(RpcError::ENODEV, "there is no target"), UNRESPONSIVE]),
            Method::update("ublk_start_disk", start_disk)
                .text(
                    "Makes a bdev the block device /dev/ublkbN of this machine. If a killed process left that disk, of a \
                     bdev of the same name, it is recovered.",
                    "number of the disk",
                )
                .canonical(|module: &UblkModule, params: &mut StartDisk| {
                    params.bdev_name = module.target.bdev_name(&params.bdev_name);
                    Ok(())
                })
                .errors(&[
                    (RpcError::INVALID_PARAMS, "a parameter is invalid, or the bdev does not suit"),
                    NO_TARGET,
                    (RpcError::EBUSY, "the number is in use"),
                    (RpcError::ENOSPC, "there are too many disks or queues"),
                    (RpcError::EPERM, "the process has no CAP_SYS_ADMIN, or with `unprivileged` no right to /dev/ublkcN"),
                    (RpcError::ENOTSUP, "the kernel has no disks of unprivileged users"),
                    REFUSED,
                    UNRESPONSIVE,
                ]),
            Method::update("ublk_recover_disk", recover_disk)
                .text(
                    "Serves a disk that a killed process left. Its users have waited; none of their requests fails.",
                    "number of the disk",
                )
                .errors(&[
                    (RpcError::INVALID_PARAMS, "the bdev has not the size, blocks, cache or maximum request of the disk"),
                    NO_TARGET,
                    (RpcError::EBUSY, "the disk has a server"),
                    (RpcError::ENOTSUP, "the disk was added without recovery and user copy, as those of unprivileged users are"),
                    (RpcError::ENOSPC, "there are too many disks or queues"),
                    REFUSED,
                    UNRESPONSIVE,
                ]),
            Method::update("ublk_stop_disk", stop_disk)
                .text("Removes a disk. Its requests complete first.", "true")
                .errors(&[(RpcError::ENODEV, "there is no such disk"), REFUSED, UNRESPONSIVE]),
            Method::query("ublk_get_disks", get_disks)
                .text(
                    "Lists the disks.",
                    "array of disks with `ublk_device`, `id`, `queue_depth`, `num_queues` and `bdev_name`, and `unprivileged` \
                     and `registered_pages` where they are true",
                )
                .errors(&[(RpcError::ENODEV, "there is no such disk")]),
        ]
    }

    fn drain(&self) {
        self.target.shutdown();
    }

    fn save(&self) -> Vec<Value> {
        let Some(cpumask) = self.target.created_with() else { return Vec::new() };
        let params = cpumask.map_or_else(|| json!({}), |cpumask| json!({ "cpumask": cpumask }));
        let start = |disk: UblkDisk| {
            let params = json!({
                "bdev_name": disk.bdev_name,
                "ublk_id": disk.number,
                "num_queues": disk.queues,
                "queue_depth": disk.queue_depth,
            });
            json!({ "method": "ublk_start_disk", "params": marked(params, &disk) })
        };
        let create = json!({ "method": "ublk_create_target", "params": params });
        [create].into_iter().chain(self.target.disks().into_iter().map(start)).collect()
    }

    fn report(&self) -> Value {
        json!({ "disks": self.target.disks().len() })
    }
}

impl From<UblkError> for RpcError {
    fn from(error: UblkError) -> RpcError {
        use std::io::ErrorKind;
        let code = match &error {
            UblkError::Bdev(bdev::BdevError::NotFound { .. })
            | UblkError::NotFound(_)
            | UblkError::NoTarget => RpcError::ENODEV,
            UblkError::Bdev(_) | UblkError::Stopping => RpcError::INTERNAL,
            UblkError::Shell(_) => RpcError::ETIMEDOUT,
            UblkError::Created | UblkError::Busy(_) => RpcError::EBUSY,
            UblkError::Invalid(_) | UblkError::CpuMask(_) => RpcError::INVALID_PARAMS,
            UblkError::TooMany(_) => RpcError::ENOSPC,
            UblkError::Unsupported(_) => RpcError::ENOTSUP,
            UblkError::NotPermitted(_) => RpcError::EPERM,
            UblkError::Kernel { source, .. } => match source.kind() {
                ErrorKind::TimedOut => RpcError::ETIMEDOUT,
                ErrorKind::PermissionDenied => RpcError::EPERM,
                _ => RpcError::INTERNAL,
            },
        };
        RpcError::new(code, error.to_string())
    }
}

control::parameters! {
    struct CreateTarget {
        /// Cores whose reactors serve queues, as a mask such as 0x3 or a list such as [0,1]; all if left out
        cpumask: Option<String>,
    }
    only("data is copied where the kernel or the bdev cannot do without") { disable_user_copy: bool = false }
}

control::parameters! {
    struct StartDisk {
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// The number N of /dev/ublkbN
        ublk_id: u32,
        /// Queues, at most 32 and one for each CPU of the machine, spread over the reactors
        num_queues: u32 = 1,
        /// Requests in flight of a queue, at most 1024
        queue_depth: u32 = 128,
        /// The disk of a server without CAP_SYS_ADMIN, which its user alone can open; it ends with the server
        unprivileged: bool = false,
    }
}

control::parameters! {
    struct RecoverDisk {
        /// The bdev, by name, alias or UUID
        bdev_name: String,
        /// The number N of /dev/ublkbN
        ublk_id: u32,
    }
}

control::parameters! {
    struct StopDisk {
        /// The number N of /dev/ublkbN
        ublk_id: u32,
    }
}

control::parameters! {
    struct GetDisks {
        /// The number of a disk; all if left out
        ublk_id: Option<u32>,
    }
}

fn create_target(module: &UblkModule, params: CreateTarget) -> Result<bool, RpcError> {
    module.target.create(params.cpumask.as_deref())?;
    Ok(true)
}

fn destroy_target(module: &UblkModule, _: NoParameters) -> Result<bool, RpcError> {
    module.target.destroy()?;
    Ok(true)
}

fn start_disk(module: &UblkModule, params: StartDisk) -> Result<u32, RpcError> {
    let StartDisk { bdev_name, ublk_id, num_queues, queue_depth, unprivileged } = params;
    let disk = UblkDisk { number: ublk_id, bdev_name, queues: num_queues, queue_depth, unprivileged };
    Ok(module.target.start(&disk)?)
}

fn recover_disk(module: &UblkModule, params: RecoverDisk) -> Result<u32, RpcError> {
    Ok(module.target.recover(&params.bdev_name, params.ublk_id)?)
}

fn stop_disk(module: &UblkModule, params: StopDisk) -> Result<bool, RpcError> {
    module.target.stop(params.ublk_id)?;
    Ok(true)
}

fn get_disks(module: &UblkModule, params: GetDisks) -> Result<Vec<Value>, RpcError> {
    let mut disks = module.target.disks();
    if let Some(number) = params.ublk_id {
        disks.retain(|disk| disk.number == number);
        if disks.is_empty() {
            return Err(UblkError::NotFound(number).into());
        }
    }
    let describe = |disk: UblkDisk| {
        let described = json!({
            "ublk_device": disk.device(),
            "id": disk.number,
            "queue_depth": disk.queue_depth,
            "num_queues": disk.queues,
            "bdev_name": disk.bdev_name,
        });
        let mut described = marked(described, &disk);
        if module.target.uses_pages(disk.number) {
            described["registered_pages"] = true.into();
        }
        described
    };
    Ok(disks.into_iter().map(describe).collect())
}

/// With `unprivileged` where the disk is: SPDK has no such member.
fn marked(mut object: Value, disk: &UblkDisk) -> Value {
    if disk.unprivileged {
        object["unprivileged"] = true.into();
    }
    object
}
