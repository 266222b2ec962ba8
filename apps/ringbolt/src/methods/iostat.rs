//! Counters of bdevs.

use ::bdev::{DeviceStats, OpStats};
use ring::Op;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Table;
use super::bdev::find;
use super::framework::tick_rate;
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.read("bdev_get_iostat", get_iostat);
    table.change("bdev_reset_iostat", reset_iostat);
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum ResetMode {
    All,
    Maxmin,
    Error,
    #[default]
    None,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GetIostat {
    names: Option<Vec<String>>,
    #[serde(default)]
    per_channel: bool,
    #[serde(default)]
    reset_mode: ResetMode,
}

fn get_iostat(app: &App, params: GetIostat) -> Result<Value, RpcError> {
    check(params.reset_mode)?;
    let devices = match &params.names {
        Some(names) => names.iter().map(|name| find(app, name)).collect::<Result<Vec<_>, _>>()?,
        None => app.registry.list(),
    };
    let mut result = json!({ "tick_rate": tick_rate(), "ticks": sys::clock::ticks() });
    if params.per_channel {
        // Channels are listed of one device at a time, which must be named.
        let ([device], true) = (devices.as_slice(), params.names.is_some()) else {
            return Err(RpcError::new(RpcError::EINVAL, "per_channel needs exactly one name in names"));
        };
        result["name"] = json!(device.name());
        let channels = device.channel_stats().into_iter().map(|channel| {
            let mut counts = counts(&channel.stats);
            counts["thread_id"] = json!(channel.core + 1);
            counts
        });
        result["channels"] = channels.collect();
    } else {
        let bdevs = devices.iter().map(|device| {
            let mut counts = counts(&device.stats());
            counts["name"] = json!(device.name());
            counts
        });
        result["bdevs"] = bdevs.collect();
    }
    if params.reset_mode == ResetMode::All {
        devices.iter().for_each(|device| device.reset_stats());
    }
    Ok(result)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResetIostat {
    name: Option<String>,
    mode: Option<ResetMode>,
}

fn reset_iostat(app: &App, params: ResetIostat) -> Result<bool, RpcError> {
    let mode = params.mode.unwrap_or(ResetMode::All);
    check(mode)?;
    if mode == ResetMode::None {
        return Ok(true);
    }
    let devices = match params.name {
        Some(name) => vec![find(app, &name)?],
        None => app.registry.list(),
    };
    devices.iter().for_each(|device| device.reset_stats());
    Ok(true)
}

fn check(mode: ResetMode) -> Result<(), RpcError> {
    match mode {
        ResetMode::All | ResetMode::None => Ok(()),
        ResetMode::Maxmin | ResetMode::Error => {
            Err(RpcError::invalid_params("counters are reset together; the modes are all and none"))
        }
    }
}

fn counts(stats: &DeviceStats) -> Value {
    counts_of(|op| stats.op(op), stats.errors())
}

/// Counts in SPDK's words.
pub(super) fn counts_of<'a>(of: impl Fn(Op) -> &'a OpStats, failed: u64) -> Value {
    let shortest = |op: &OpStats| if op.ops == 0 { 0 } else { op.latency_min_ticks };
    let (read, write, unmap) = (of(Op::Read), of(Op::Write), of(Op::Unmap));
    let mut counts = json!({
        "bytes_read": read.bytes,
        "num_read_ops": read.ops,
        "bytes_written": write.bytes,
        "num_write_ops": write.ops,
        "bytes_unmapped": unmap.bytes,
        "num_unmap_ops": unmap.ops,
        "bytes_copied": 0,
        "num_copy_ops": 0,
        "read_latency_ticks": read.latency_ticks,
        "max_read_latency_ticks": read.latency_max_ticks,
        "min_read_latency_ticks": shortest(read),
        "write_latency_ticks": write.latency_ticks,
        "max_write_latency_ticks": write.latency_max_ticks,
        "min_write_latency_ticks": shortest(write),
        "unmap_latency_ticks": unmap.latency_ticks,
        "max_unmap_latency_ticks": unmap.latency_max_ticks,
        "min_unmap_latency_ticks": shortest(unmap),
        "copy_latency_ticks": 0,
        "max_copy_latency_ticks": 0,
        "min_copy_latency_ticks": 0,
    });
    // SPDK sorts errors by its own statuses; the layer counts them as one.
    counts["io_error"] = if failed > 0 { json!({ "failed": failed }) } else { json!({}) };
    counts
}
