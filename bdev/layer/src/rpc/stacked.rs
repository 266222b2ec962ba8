//! RPC methods of virtual bdevs: delay, error, passthru and split, each on a base bdev.
//!
//! Their base may appear later, as SPDK allows and its `save_config` relies on: see
//! [`create_on_bases`](BdevModule::create_on_bases).

use std::sync::Arc;

use block_io::{Op, Status};
use control::{ByName, Method, RpcError};
use uuid::Uuid;

use super::devices::{MISSING, delete};
use super::{BdevModule, STILL_OPEN, conclude};
use crate::{BlockDevice, Closing, delay, error, passthru, split};

const STACKING: &[(i64, &str)] =
    &[(RpcError::EEXIST, "the name or UUID is in use"), (RpcError::EBUSY, "the base bdev is claimed")];

/// Product name of split devices.
const SPLIT: &str = "Split Disk";

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    let create = |method: Method<BdevModule>, text| method.text(text, "name of the bdev").errors(STACKING);
    vec![
        Method::update("bdev_error_create", error_create)
            .text(
                "Creates a bdev `EE_BASE` that injects errors into I/O of its base, at once or when the base appears, and again when it returns.",
                "true",
            )
            .assigns(&["uuid"])
            .errors(STACKING),
        delete("bdev_error_delete", "Error Injection Disk"),
        Method::update("bdev_error_inject_error", inject_error)
            .text("Injects errors into an error bdev, or removes them. `corrupt_data` changes what is read when the base has checked its protection information, so that only a user who checks it again detects that.", "true")
            .errors(&[MISSING, (RpcError::EINVAL, "corrupt_value is missing or 0")]),
        Method::update("bdev_error_resume_pending", |bdevs: &BdevModule, params: ByName| {
            error::resume_pending(&bdevs.registry, &params.name)?;
            Ok(true)
        })
        .text("Executes the I/Os that an error bdev keeps pending, and keeps no more.", "true")
        .errors(&[MISSING]),
        create(
            Method::update("bdev_delay_create", delay_create),
            "Creates a bdev that delays the I/O of its base, at once or when the base appears, and again when it returns.",
        )
        .assigns(&["uuid"])
        .canonical(|bdevs: &BdevModule, params: &mut DelayCreate| {
            params.base_bdev_name = bdevs.registry.name_of(&params.base_bdev_name);
            Ok(())
        }),
        delete("bdev_delay_delete", "delay"),
        Method::update("bdev_delay_update_latency", update_latency)
            .text("Changes a latency of a delay bdev.", "true")
            .errors(&[MISSING]),
        create(
            Method::update("bdev_passthru_create", passthru_create),
            "Creates a bdev that forwards all I/O to its base, at once or when the base appears, and again when it returns.",
        )
        .assigns(&["uuid"])
        .canonical(|bdevs: &BdevModule, params: &mut PassthruCreate| {
            params.base_bdev_name = bdevs.registry.name_of(&params.base_bdev_name);
            Ok(())
        }),
        delete("bdev_passthru_delete", "passthru"),
        Method::update("bdev_split_create", split_create)
            .text(
                "Divides a bdev into parts `BASEp0`, `BASEp1`, …, at once or when the base appears, and again when it returns.",
                "array of the parts' names",
            )
            .assigns(&["split_size_bytes"])
            .errors(&[
                (RpcError::EEXIST, "the base is split already, or the name of a part is in use"),
                (RpcError::EBUSY, "the base bdev is claimed"),
                (RpcError::EINVAL, "the parts do not fit the base"),
            ]),
        Method::concluded_update("bdev_split_delete", split_delete, conclude)
            .text("Deletes all parts of a bdev. I/O in flight completes first.", "true")
            .errors(&[(RpcError::ENODEV, "the bdev is not split"), STILL_OPEN]),
    ]
}

control::parameters! {
    struct ErrorCreate {
        /// Device below
        base_name: String,
        /// UUID; without, one that is derived from the base's
        uuid: Option<Uuid>,
    }
}

fn error_create(bdevs: &BdevModule, params: ErrorCreate) -> Result<bool, RpcError> {
    let (base, name) = (params.base_name.clone(), format!("EE_{}", params.base_name));
    bdevs.create_on_bases(&[&base], &name, "bdev_error_create", params, |registry, params| {
        let mut config = error::ErrorConfig::new(&params.base_name);
        config.uuid = params.uuid;
        let device = error::create(registry, config)?;
        params.uuid = Some(device.uuid());
        Ok(())
    })?;
    Ok(true)
}

control::choices! {
    enum InjectIoType {
        Clear = "clear",
        Read = "read",
        Write = "write",
        Unmap = "unmap",
        Flush = "flush",
        All = "all",
    }
}

control::choices! {
    enum InjectErrorType {
        Failure = "failure",
        Pending = "pending",
        CorruptData = "corrupt_data",
        Nomem = "nomem",
        NvmeFailure = "nvme_failure",
    }
}

control::parameters! {
    struct InjectError {
        /// Error bdev
        name: String,
        /// Operation; clear removes all errors, and I/Os that are pending stay so until
        /// `bdev_error_resume_pending`
        io_type: InjectIoType,
        /// What happens to it
        error_type: InjectErrorType,
        /// Status code type of nvme_failure
        nvme_sct: u8 = 0,
        /// Status code of nvme_failure
        nvme_sc: u8 = 0,
        /// How often
        num: u32 = 1,
        /// Only while this many I/Os are in flight
        queue_depth: u64 = 0,
        /// Position of the byte that corrupt_data changes
        corrupt_offset: u64 ["bytes"] = 0,
        /// With what that byte is XORed: 1 to 255
        corrupt_value: u8 = 0,
    }
}

fn inject_error(bdevs: &BdevModule, params: InjectError) -> Result<bool, RpcError> {
    let op = match params.io_type {
        InjectIoType::Clear => {
            error::clear(&bdevs.registry, &params.name)?;
            return Ok(true);
        }
        InjectIoType::Read => Some(Op::Read),
        InjectIoType::Write => Some(Op::Write),
        InjectIoType::Unmap => Some(Op::Unmap),
        InjectIoType::Flush => Some(Op::Flush),
        InjectIoType::All => None,
    };
    let action = match params.error_type {
        InjectErrorType::Failure => error::FaultAction::Fail(Status::INTERNAL_ERROR),
        InjectErrorType::Nomem => error::FaultAction::Fail(Status::COMMAND_INTERRUPTED),
        InjectErrorType::Pending => error::FaultAction::Pending,
        InjectErrorType::NvmeFailure => {
            let status = Status::new(params.nvme_sct, params.nvme_sc);
            if status.is_success() {
                return Err(RpcError::invalid_params(
                    "nvme_sct and nvme_sc mean success; give an error status",
                ));
            }
            error::FaultAction::Fail(status)
        }
        InjectErrorType::CorruptData => match params.corrupt_value {
            0 => {
                let message = "corrupt_value must be 1 to 255: the byte is XORed with it";
                return Err(RpcError::new(RpcError::EINVAL, message));
            }
            xor => error::FaultAction::Corrupt { offset: params.corrupt_offset as usize, xor },
        },
    };
    let mut injection = error::FaultInjection::once(op, action);
    injection.count = Some(u64::from(params.num));
    injection.queue_depth = u32::try_from(params.queue_depth).unwrap_or(u32::MAX);
    error::inject(&bdevs.registry, &params.name, injection)?;
    Ok(true)
}

control::parameters! {
    struct DelayCreate {
        /// Name
        name: String,
        /// Device below
        base_bdev_name: String,
        /// UUID; without, one that is derived from the base's
        uuid: Option<Uuid>,
        /// Average latency of reads
        avg_read_latency: u64 ["us"],
        /// 99th percentile of reads
        p99_read_latency: u64 ["us"],
        /// Average latency of writes
        avg_write_latency: u64 ["us"],
        /// 99th percentile of writes
        p99_write_latency: u64 ["us"],
    }
}

fn delay_create(bdevs: &BdevModule, params: DelayCreate) -> Result<String, RpcError> {
    let (base, name) = (params.base_bdev_name.clone(), params.name.clone());
    bdevs.create_on_bases(&[&base], &name, "bdev_delay_create", params, |registry, params| {
        let mut config = delay::DelayConfig::new(&params.base_bdev_name, &params.name, 0);
        config.uuid = params.uuid;
        config.avg_read_latency_us = params.avg_read_latency;
        config.p99_read_latency_us = params.p99_read_latency;
        config.avg_write_latency_us = params.avg_write_latency;
        config.p99_write_latency_us = params.p99_write_latency;
        let device = delay::create(registry, config)?;
        params.uuid = Some(device.uuid());
        Ok(())
    })?;
    Ok(name)
}

control::choices! {
    enum LatencyType {
        AvgRead = "avg_read",
        P99Read = "p99_read",
        AvgWrite = "avg_write",
        P99Write = "p99_write",
    }
}

control::parameters! {
    struct UpdateLatency {
        /// Delay bdev
        delay_bdev_name: String,
        /// Which latency
        latency_type: LatencyType,
        /// Its new value
        latency_us: u64 ["us"],
    }
}

fn update_latency(bdevs: &BdevModule, params: UpdateLatency) -> Result<bool, RpcError> {
    let (which, parameter) = match params.latency_type {
        LatencyType::AvgRead => (delay::LatencyClass::AvgRead, "avg_read_latency"),
        LatencyType::P99Read => (delay::LatencyClass::P99Read, "p99_read_latency"),
        LatencyType::AvgWrite => (delay::LatencyClass::AvgWrite, "avg_write_latency"),
        LatencyType::P99Write => (delay::LatencyClass::P99Write, "p99_write_latency"),
    };
    let device = bdevs.find(&params.delay_bdev_name)?;
    delay::update_latency(&bdevs.registry, device.name(), which, params.latency_us)?;
    bdevs.created.set_parameter(device.name(), parameter, params.latency_us);
    Ok(true)
}

control::parameters! {
    struct PassthruCreate {
        /// Device below
        base_bdev_name: String,
        /// Name
        name: String,
        /// UUID; without, one made from that of the base and the name
        uuid: Option<Uuid>,
    }
}

fn passthru_create(bdevs: &BdevModule, params: PassthruCreate) -> Result<String, RpcError> {
    let (base, name) = (params.base_bdev_name.clone(), params.name.clone());
    bdevs.create_on_bases(&[&base], &name, "bdev_passthru_create", params, |registry, params| {
        let config = passthru::PassthruConfig {
            base: params.base_bdev_name.clone(),
            name: params.name.clone(),
            uuid: params.uuid,
        };
        let device = passthru::create(registry, config)?;
        params.uuid = Some(device.uuid());
        Ok(())
    })?;
    Ok(name)
}

control::parameters! {
    struct SplitCreate {
        /// Device to divide
        base_bdev: String,
        /// Number of parts, at most 4096
        split_count: u32,
        /// Size of each part; 0 divides the device evenly
        split_size_mb: u64 ["MiB"] = 0,
        /// Size of each part, instead: `save_config` writes it for a device that was divided evenly, whose
        /// parts stay where they are when it has another size; not in SPDK
        split_size_bytes: Option<u64> ["bytes"],
    }
}

/// The name under which the parts of a base are recorded together.
fn split_name(base: &str) -> String {
    format!("{base}p0")
}

fn split_create(bdevs: &BdevModule, params: SplitCreate) -> Result<Vec<String>, RpcError> {
    let (base, count) = (params.base_bdev.clone(), params.split_count);
    if count == 0 || count > split::PARTS_MAX {
        let message = format!("split_count: {count} is not 1 to {}", split::PARTS_MAX);
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    if params.split_size_mb != 0 && params.split_size_bytes.is_some() {
        let message = "split_size_bytes is in place of split_size_mb; give one of them";
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    bdevs.create_on_bases(
        &[&base],
        &split_name(&base),
        "bdev_split_create",
        params,
        |registry, params| {
            let part_size = match (params.split_size_bytes, params.split_size_mb) {
                (Some(bytes), _) => split::PartSize::Bytes(bytes),
                (None, 0) => split::PartSize::Even,
                (None, mib) => split::PartSize::Mib(mib),
            };
            let config =
                split::SplitConfig { base: params.base_bdev.clone(), count: params.split_count, part_size };
            let parts = split::create(registry, &config)?;
            if part_size == split::PartSize::Even {
                // All have the same. The base may have another size when they are created again.
                params.split_size_bytes = parts.first().map(|part| part.geometry().bytes());
            }
            Ok(())
        },
    )?;
    Ok(split::part_names(&base, count))
}

control::parameters! {
    struct SplitDelete {
        /// The divided device
        base_bdev: String,
    }
}

fn split_delete(bdevs: &BdevModule, params: SplitDelete) -> Result<Closing, RpcError> {
    let base = params.base_bdev;
    // First: otherwise it would be split again.
    let is_known = bdevs.forget_virtual(&split_name(&base));
    let of_base = |device: &Arc<BlockDevice>| {
        device.module::<split::SplitBdev>().is_some_and(|part| part.base().name() == base)
    };
    let parts: Vec<Arc<BlockDevice>> = bdevs.registry.list().into_iter().filter(of_base).collect();
    if parts.is_empty() && !is_known {
        return Err(RpcError::new(RpcError::ENODEV, format!("{base} is not split")));
    }
    for part in &parts {
        // All are being deleted before the first is waited for.
        bdevs.delete(part.name(), SPLIT)?;
    }
    Ok(Closing::removed(parts))
}
