//! Methods that make, change and delete bdevs of each kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ::bdev::{Device, delay, error, malloc, null, uring};
use ring::{Op, Status};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::Table;
use super::bdev::find;
use super::parameters::{ByName, Metadata, off};
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.change("bdev_malloc_create", malloc_create);
    table.change("bdev_malloc_delete", |app, params: ByName| delete(app, &params.name, "Malloc disk"));
    table.change("bdev_null_create", null_create);
    table.change("bdev_null_delete", |app, params: ByName| delete(app, &params.name, "Null disk"));
    table.change("bdev_null_resize", null_resize);
    table.change("bdev_uring_create", uring_create);
    table.change("bdev_uring_delete", |app, params: ByName| delete(app, &params.name, "URING bdev"));
    table.change("bdev_uring_rescan", uring_rescan);
    table.change("bdev_error_create", error_create);
    table.change("bdev_error_delete", |app, params: ByName| delete(app, &params.name, "Error Disk"));
    table.change("bdev_error_inject_error", inject_error);
    table.change("bdev_delay_create", delay_create);
    table.change("bdev_delay_delete", |app, params: ByName| delete(app, &params.name, "Delay bdev"));
    table.change("bdev_delay_update_latency", update_latency);
}

/// Remembers what would make the device again, and gives its name.
pub(super) fn remember(
    app: &App,
    device: &Arc<Device>,
    method: &'static str,
    params: Value,
) -> Result<String, RpcError> {
    app.state().journal.created(device.name(), method, params);
    Ok(device.name().to_string())
}

pub(super) fn delete(app: &App, name: &str, product: &str) -> Result<bool, RpcError> {
    let device = find(app, name)?;
    if !device.bdev().product_name().eq_ignore_ascii_case(product) {
        let message = format!("{name} is a {}, not a {product}", device.bdev().product_name());
        return Err(RpcError::new(RpcError::ENODEV, message));
    }
    app.registry.unregister(device.name())?;
    let mut state = app.state();
    state.journal.deleted(device.name());
    state.histograms.remove(device.name());
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MallocCreate {
    name: Option<String>,
    block_size: u32,
    num_blocks: u64,
    uuid: Option<Uuid>,
    #[serde(default)]
    optimal_io_boundary: u32,
    #[serde(default)]
    physical_block_size: u32,
    numa_id: Option<i32>,
    md_size: Option<u32>,
    md_interleave: Option<bool>,
    dif_type: Option<i32>,
    dif_is_head_of_md: Option<bool>,
    dif_pi_format: Option<u32>,
}

fn malloc_create(app: &App, params: MallocCreate) -> Result<String, RpcError> {
    let MallocCreate { md_size, md_interleave, dif_type, dif_is_head_of_md, dif_pi_format, .. } = params;
    Metadata { md_size, md_interleave, dif_type, dif_is_head_of_md, dif_pi_format }.refuse()?;
    off("numa_id", params.numa_id, -1)?;
    let name = params.name.unwrap_or_else(|| fresh_malloc_name(app));
    let mut config = malloc::MallocConfig::new(&name, params.num_blocks, params.block_size);
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    config.optimal_io_boundary_blocks = params.optimal_io_boundary;
    let device = malloc::create(&app.registry, config)?;
    let again = json!({
        "name": name,
        "num_blocks": params.num_blocks,
        "block_size": params.block_size,
        "physical_block_size": device.geometry().physical_block_size,
        "uuid": device.uuid(),
        "optimal_io_boundary": params.optimal_io_boundary,
    });
    remember(app, &device, "bdev_malloc_create", again)
}

/// `Malloc0`, `Malloc1`, …, as SPDK counts them.
fn fresh_malloc_name(app: &App) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let name = format!("Malloc{}", COUNT.fetch_add(1, Ordering::Relaxed));
        if app.registry.find(&name).is_none() {
            return name;
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NullCreate {
    name: String,
    block_size: u32,
    num_blocks: u64,
    uuid: Option<Uuid>,
    #[serde(default)]
    physical_block_size: u32,
    md_size: Option<u32>,
    dif_type: Option<i32>,
    dif_is_head_of_md: Option<bool>,
    dif_pi_format: Option<u32>,
    preferred_write_granularity: Option<u32>,
    preferred_write_alignment: Option<u32>,
    optimal_write_size: Option<u32>,
    preferred_unmap_granularity: Option<u32>,
    preferred_unmap_alignment: Option<u32>,
}

fn null_create(app: &App, params: NullCreate) -> Result<String, RpcError> {
    let NullCreate { md_size, dif_type, dif_is_head_of_md, dif_pi_format, .. } = params;
    Metadata { md_size, md_interleave: None, dif_type, dif_is_head_of_md, dif_pi_format }.refuse()?;
    off("preferred_write_granularity", params.preferred_write_granularity, 0)?;
    off("preferred_write_alignment", params.preferred_write_alignment, 0)?;
    off("optimal_write_size", params.optimal_write_size, 0)?;
    off("preferred_unmap_granularity", params.preferred_unmap_granularity, 0)?;
    off("preferred_unmap_alignment", params.preferred_unmap_alignment, 0)?;
    let mut config = null::NullConfig::new(&params.name, params.num_blocks, params.block_size);
    config.uuid = params.uuid;
    config.physical_block_size = params.physical_block_size;
    let device = null::create(&app.registry, config)?;
    let again = json!({
        "name": params.name,
        "num_blocks": params.num_blocks,
        "block_size": params.block_size,
        "physical_block_size": device.geometry().physical_block_size,
        "uuid": device.uuid(),
    });
    remember(app, &device, "bdev_null_create", again)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UringCreate {
    filename: String,
    name: String,
    block_size: Option<u32>,
    uuid: Option<Uuid>,
}

fn uring_create(app: &App, params: UringCreate) -> Result<String, RpcError> {
    let mut config = uring::UringConfig::new(&params.name, &params.filename);
    // SPDK's tools send 0 for "the file's own".
    config.block_size = params.block_size.filter(|bytes| *bytes != 0);
    config.uuid = params.uuid;
    let device = uring::create(&app.registry, config)?;
    let again = json!({
        "name": params.name,
        "filename": params.filename,
        "block_size": device.geometry().block_size,
        "uuid": device.uuid(),
    });
    remember(app, &device, "bdev_uring_create", again)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NullResize {
    name: String,
    /// In MiB.
    new_size: u64,
}

fn null_resize(app: &App, params: NullResize) -> Result<bool, RpcError> {
    let device = find(app, &params.name)?;
    let bytes = params.new_size.saturating_mul(1 << 20);
    let num_blocks = bytes / u64::from(device.geometry().block_size);
    null::resize(&app.registry, device.name(), num_blocks)?;
    app.state().journal.changed(device.name(), "num_blocks", json!(num_blocks));
    Ok(true)
}

fn uring_rescan(app: &App, params: ByName) -> Result<bool, RpcError> {
    uring::rescan(&app.registry, &params.name)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorCreate {
    base_name: String,
    uuid: Option<Uuid>,
}

fn error_create(app: &App, params: ErrorCreate) -> Result<bool, RpcError> {
    let mut config = error::ErrorConfig::new(&params.base_name);
    config.uuid = params.uuid;
    let device = error::create(&app.registry, config)?;
    let again = json!({ "base_name": params.base_name, "uuid": device.uuid() });
    remember(app, &device, "bdev_error_create", again).map(|_| true)
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InjectOn {
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum InjectWhat {
    Failure,
    Pending,
    CorruptData,
    Nomem,
    NvmeFailure,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InjectError {
    name: String,
    io_type: InjectOn,
    error_type: InjectWhat,
    nvme_sct: Option<u32>,
    nvme_sc: Option<u32>,
    num: Option<u32>,
    queue_depth: Option<u64>,
    corrupt_offset: Option<u64>,
    corrupt_value: Option<u8>,
}

fn inject_error(app: &App, params: InjectError) -> Result<bool, RpcError> {
    let op = match params.io_type {
        InjectOn::Clear => {
            error::clear(&app.registry, &params.name)?;
            return Ok(true);
        }
        InjectOn::Read => Some(Op::Read),
        InjectOn::Write => Some(Op::Write),
        InjectOn::Unmap => Some(Op::Unmap),
        InjectOn::Flush => Some(Op::Flush),
        InjectOn::All => None,
    };
    let byte = |name: &str, value: Option<u32>| {
        u8::try_from(value.unwrap_or(0)).map_err(|_| RpcError::invalid_params(format!("{name} is 0 to 255")))
    };
    let action = match params.error_type {
        InjectWhat::Failure => error::Action::Fail(Status::INTERNAL_ERROR),
        InjectWhat::Nomem => error::Action::Fail(Status::COMMAND_INTERRUPTED),
        InjectWhat::Pending => error::Action::Pending,
        InjectWhat::NvmeFailure => {
            let status = Status::new(byte("nvme_sct", params.nvme_sct)?, byte("nvme_sc", params.nvme_sc)?);
            if status.is_success() {
                return Err(RpcError::invalid_params("nvme_sct and nvme_sc are a success; name an error"));
            }
            error::Action::Fail(status)
        }
        InjectWhat::CorruptData => match params.corrupt_value {
            None | Some(0) => {
                let message = "corrupt_value is 1 to 255: what the byte is XORed with";
                return Err(RpcError::new(RpcError::EINVAL, message));
            }
            Some(xor) => error::Action::Corrupt { offset: params.corrupt_offset.unwrap_or(0) as usize, xor },
        },
    };
    let mut injection = error::Injection::once(op, action);
    injection.count = Some(u64::from(params.num.unwrap_or(1)));
    injection.queue_depth = u32::try_from(params.queue_depth.unwrap_or(0)).unwrap_or(u32::MAX);
    error::inject(&app.registry, &params.name, injection)?;
    Ok(true)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DelayCreate {
    name: String,
    base_bdev_name: String,
    avg_read_latency: u64,
    p99_read_latency: u64,
    avg_write_latency: u64,
    p99_write_latency: u64,
    uuid: Option<Uuid>,
}

fn delay_create(app: &App, params: DelayCreate) -> Result<String, RpcError> {
    let mut config = delay::DelayConfig::new(&params.base_bdev_name, &params.name, 0);
    config.uuid = params.uuid;
    config.avg_read_latency_us = params.avg_read_latency;
    config.p99_read_latency_us = params.p99_read_latency;
    config.avg_write_latency_us = params.avg_write_latency;
    config.p99_write_latency_us = params.p99_write_latency;
    let device = delay::create(&app.registry, config)?;
    let again = json!({
        "name": params.name,
        "base_bdev_name": params.base_bdev_name,
        "uuid": device.uuid(),
        "avg_read_latency": params.avg_read_latency,
        "p99_read_latency": params.p99_read_latency,
        "avg_write_latency": params.avg_write_latency,
        "p99_write_latency": params.p99_write_latency,
    });
    remember(app, &device, "bdev_delay_create", again)
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LatencyType {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UpdateLatency {
    delay_bdev_name: String,
    latency_type: LatencyType,
    latency_us: u64,
}

fn update_latency(app: &App, params: UpdateLatency) -> Result<bool, RpcError> {
    let (which, parameter) = match params.latency_type {
        LatencyType::AvgRead => (delay::Latency::AvgRead, "avg_read_latency"),
        LatencyType::P99Read => (delay::Latency::P99Read, "p99_read_latency"),
        LatencyType::AvgWrite => (delay::Latency::AvgWrite, "avg_write_latency"),
        LatencyType::P99Write => (delay::Latency::P99Write, "p99_write_latency"),
    };
    let device = find(app, &params.delay_bdev_name)?;
    delay::update_latency(&app.registry, device.name(), which, params.latency_us)?;
    app.state().journal.changed(device.name(), parameter, json!(params.latency_us));
    Ok(true)
}
