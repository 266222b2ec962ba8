//! RPC methods that create, change and delete bdevs of each module.

use std::sync::atomic::{AtomicU64, Ordering};

use block_io::{Op, Status};
use control::{ByName, Method, RpcError};
use uuid::Uuid;

use super::BdevModule;
use crate::{delay, error, malloc, null, uring};

const MISSING: (i64, &str) = (RpcError::ENODEV, "there is no such bdev, or it is of another module");
const CREATION: &[(i64, &str)] = &[
    (RpcError::EEXIST, "the name or UUID is in use"),
    (RpcError::EINVAL, "the geometry is invalid"),
    (RpcError::ENOMEM, "there is not enough memory"),
];
const STACKING: &[(i64, &str)] = &[
    (RpcError::EEXIST, "the name or UUID is in use"),
    (RpcError::ENODEV, "there is no such base bdev"),
    (RpcError::EBUSY, "the base bdev is claimed"),
];

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    let create = |method: Method<BdevModule>, text| method.text(text, "name of the bdev");
    let delete = |method: Method<BdevModule>| method.text("Deletes the bdev.", "true").errors(&[MISSING]);
    vec![
        create(Method::update("bdev_malloc_create", malloc_create), "Creates a bdev in memory.")
            .errors(CREATION),
        delete(Method::update("bdev_malloc_delete", |bdevs, params: ByName| {
            bdevs.delete(&params.name, "Malloc disk")
        })),
        create(
            Method::update("bdev_null_create", null_create),
            "Creates a bdev that discards writes and leaves buffers of reads unchanged.",
        )
        .errors(CREATION),
        delete(Method::update("bdev_null_delete", |bdevs, params: ByName| {
            bdevs.delete(&params.name, "Null disk")
        })),
        Method::update("bdev_null_resize", null_resize)
            .text("Resizes a null bdev.", "true")
            .errors(&[MISSING]),
        create(
            Method::update("bdev_uring_create", uring_create),
            "Creates a bdev on a file or a block device, through io_uring.",
        )
        .errors(&[
            (RpcError::EEXIST, "the name or UUID is in use"),
            (RpcError::EBUSY, "the file is in use by another bdev"),
            (RpcError::ENOTSUP, "io_uring is not allowed"),
            (-2, "and any other errno of opening the file"),
        ]),
        delete(Method::update("bdev_uring_delete", |bdevs, params: ByName| {
            bdevs.delete(&params.name, "URING bdev")
        })),
        Method::update("bdev_uring_rescan", uring_rescan)
            .text("Applies the present size of the file.", "true")
            .errors(&[MISSING]),
        Method::update("bdev_error_create", error_create)
            .text("Creates a bdev `EE_BASE` that injects errors into I/O of its base.", "true")
            .errors(STACKING),
        delete(Method::update("bdev_error_delete", |bdevs, params: ByName| {
            bdevs.delete(&params.name, "Error Disk")
        })),
        Method::update("bdev_error_inject_error", inject_error)
            .text("Injects errors into an error bdev, or removes them.", "true")
            .errors(&[MISSING, (RpcError::EINVAL, "corrupt_value is missing or 0")]),
        create(
            Method::update("bdev_delay_create", delay_create),
            "Creates a bdev that delays the I/O of its base.",
        )
        .errors(STACKING),
        delete(Method::update("bdev_delay_delete", |bdevs, params: ByName| {
            bdevs.delete(&params.name, "Delay bdev")
        })),
        Method::update("bdev_delay_update_latency", update_latency)
            .text("Changes a latency of a delay bdev.", "true")
            .errors(&[MISSING]),
    ]
}

control::parameters! {
    struct MallocCreate {
        /// Name; without, the next unused of Malloc0, Malloc1, …
        name: Option<String>,
        /// Number of blocks
        num_blocks: u64 ["blocks"],
        /// Size of a block
        block_size: u32 ["bytes"],
        /// Size of a physical block; 0 is `block_size`
        physical_block_size: u32 ["bytes"] = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
        /// I/O should not cross multiples of this; 0 is no boundary
        optimal_io_boundary: u32 ["blocks"] = 0,
    }
    only {
        numa_id: i32 = -1,
        md_size: u32 = 0,
        md_interleave: bool = false,
        dif_type: i32 = 0,
        dif_is_head_of_md: bool = false,
        dif_pi_format: u32 = 0,
    }
}

fn malloc_create(bdevs: &BdevModule, mut params: MallocCreate) -> Result<String, RpcError> {
    let name = params.name.take().unwrap_or_else(|| next_malloc_name(bdevs));
    let mut config = malloc::MallocConfig::new(&name, params.num_blocks, params.block_size);
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    config.optimal_io_boundary_blocks = params.optimal_io_boundary;
    let device = malloc::create(&bdevs.registry, config)?;
    params.name = Some(name);
    params.physical_block_size = device.geometry().physical_block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_malloc_create", &params))
}

/// The next unused name of `Malloc0`, `Malloc1`, …, as in SPDK.
fn next_malloc_name(bdevs: &BdevModule) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let name = format!("Malloc{}", COUNT.fetch_add(1, Ordering::Relaxed));
        if bdevs.registry.find(&name).is_none() {
            return name;
        }
    }
}

control::parameters! {
    struct NullCreate {
        /// Name
        name: String,
        /// Number of blocks
        num_blocks: u64 ["blocks"],
        /// Size of a block
        block_size: u32 ["bytes"],
        /// Size of a physical block; 0 is `block_size`
        physical_block_size: u32 ["bytes"] = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
    }
    only {
        md_size: u32 = 0,
        dif_type: i32 = 0,
        dif_is_head_of_md: bool = false,
        dif_pi_format: u32 = 0,
        preferred_write_granularity: u32 = 0,
        preferred_write_alignment: u32 = 0,
        optimal_write_size: u32 = 0,
        preferred_unmap_granularity: u32 = 0,
        preferred_unmap_alignment: u32 = 0,
    }
}

fn null_create(bdevs: &BdevModule, mut params: NullCreate) -> Result<String, RpcError> {
    let mut config = null::NullConfig::new(&params.name, params.num_blocks, params.block_size);
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    let device = null::create(&bdevs.registry, config)?;
    params.physical_block_size = device.geometry().physical_block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_null_create", &params))
}

control::parameters! {
    struct UringCreate {
        /// Name
        name: String,
        /// File or block device
        filename: String,
        /// Size of a block; 0 is that of the file
        block_size: u32 ["bytes"] = 0,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
    }
}

fn uring_create(bdevs: &BdevModule, mut params: UringCreate) -> Result<String, RpcError> {
    let mut config = uring::UringConfig::new(&params.name, &params.filename);
    config.block_size = Some(params.block_size).filter(|bytes| *bytes != 0);
    config.uuid = params.uuid;
    let device = uring::create(&bdevs.registry, config)?;
    params.block_size = device.geometry().block_size;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_uring_create", &params))
}

control::parameters! {
    struct NullResize {
        /// Name
        name: String,
        /// New size
        new_size: u64 ["MiB"],
    }
}

fn null_resize(bdevs: &BdevModule, params: NullResize) -> Result<bool, RpcError> {
    let device = bdevs.find(&params.name)?;
    let bytes = params.new_size.saturating_mul(1 << 20);
    let num_blocks = bytes / u64::from(device.geometry().block_size);
    null::resize(&bdevs.registry, device.name(), num_blocks)?;
    bdevs.created.set_parameter(device.name(), "num_blocks", num_blocks);
    Ok(true)
}

fn uring_rescan(bdevs: &BdevModule, params: ByName) -> Result<bool, RpcError> {
    uring::rescan(&bdevs.registry, &params.name)?;
    Ok(true)
}

control::parameters! {
    struct ErrorCreate {
        /// Device below
        base_name: String,
        /// UUID; without, a random one
        uuid: Option<Uuid>,
    }
}

fn error_create(bdevs: &BdevModule, mut params: ErrorCreate) -> Result<bool, RpcError> {
    let mut config = error::ErrorConfig::new(&params.base_name);
    config.uuid = params.uuid;
    let device = error::create(&bdevs.registry, config)?;
    params.uuid = Some(device.uuid());
    bdevs.record(&device, "bdev_error_create", &params);
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
        /// Operation; clear removes all errors
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
        /// UUID; without, a random one
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

fn delay_create(bdevs: &BdevModule, mut params: DelayCreate) -> Result<String, RpcError> {
    let mut config = delay::DelayConfig::new(&params.base_bdev_name, &params.name, 0);
    config.uuid = params.uuid;
    config.avg_read_latency_us = params.avg_read_latency;
    config.p99_read_latency_us = params.p99_read_latency;
    config.avg_write_latency_us = params.avg_write_latency;
    config.p99_write_latency_us = params.p99_write_latency;
    let device = delay::create(&bdevs.registry, config)?;
    params.uuid = Some(device.uuid());
    Ok(bdevs.record(&device, "bdev_delay_create", &params))
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
