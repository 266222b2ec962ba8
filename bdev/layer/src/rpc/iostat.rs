//! RPC methods for I/O statistics of bdevs.

use block_io::Op;
use control::json::{Value, json};
use control::{Method, RpcError, tick_rate};

use super::BdevModule;
use crate::{DeviceStats, OpStats};

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::query("bdev_get_iostat", get_iostat)
            .text(
                "I/O statistics since the start or the last reset.",
                "`tick_rate`, `ticks`, `bdevs` or `channels`",
            )
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EINVAL, "`per_channel` without exactly one name"),
            ]),
        Method::update("bdev_reset_iostat", reset_iostat)
            .text("Sets I/O statistics to zero.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such bdev")]),
    ]
}

control::choices! {
    #[derive(Default)]
    enum ResetMode {
        All = "all",
        Maxmin = "maxmin",
        Error = "error",
        #[default]
        None = "none",
    }
}

control::parameters! {
    struct GetIostat {
        /// Devices; all without
        names: Option<Vec<String>>,
        /// Statistics of each channel of one device
        per_channel: bool = false,
        /// What to reset after reading: only all and none are supported
        reset_mode: ResetMode = ResetMode::None,
    }
}

fn get_iostat(bdevs: &BdevModule, params: GetIostat) -> Result<Value, RpcError> {
    check(params.reset_mode)?;
    let devices = match &params.names {
        Some(names) => names.iter().map(|name| bdevs.find(name)).collect::<Result<Vec<_>, _>>()?,
        None => bdevs.registry.list(),
    };
    let mut result = json!({ "tick_rate": tick_rate(), "ticks": os::clock::ticks() });
    if params.per_channel {
        // Channels are listed for exactly one bdev, which must be named.
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
        let all = devices.iter().map(|device| {
            let mut counts = counts(&device.stats());
            counts["name"] = json!(device.name());
            counts
        });
        result["bdevs"] = all.collect();
    }
    if params.reset_mode == ResetMode::All {
        devices.iter().for_each(|device| device.reset_stats());
    }
    Ok(result)
}

control::parameters! {
    struct ResetIostat {
        /// One device; all without
        name: Option<String>,
        /// Only all and none are supported
        mode: ResetMode = ResetMode::All,
    }
}

fn reset_iostat(bdevs: &BdevModule, params: ResetIostat) -> Result<bool, RpcError> {
    let mode = params.mode;
    check(mode)?;
    if mode == ResetMode::None {
        return Ok(true);
    }
    let devices = match params.name {
        Some(name) => vec![bdevs.find(&name)?],
        None => bdevs.registry.list(),
    };
    devices.iter().for_each(|device| device.reset_stats());
    Ok(true)
}

fn check(mode: ResetMode) -> Result<(), RpcError> {
    match mode {
        ResetMode::All | ResetMode::None => Ok(()),
        ResetMode::Maxmin | ResetMode::Error => {
            Err(RpcError::invalid_params("counters cannot be reset separately; the modes are all and none"))
        }
    }
}

fn counts(stats: &DeviceStats) -> Value {
    counts_of(|op| stats.op(op), stats.errors())
}

/// Counters under SPDK's names. `of` returns the counters of an operation.
pub fn counts_of<'a>(of: impl Fn(Op) -> &'a OpStats, failed: u64) -> Value {
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
    // SPDK counts errors by bdev_io status; the bdev layer has one counter.
    counts["io_error"] = if failed > 0 { json!({ "failed": failed }) } else { json!({}) };
    counts
}
