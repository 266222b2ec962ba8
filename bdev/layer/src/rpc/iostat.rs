//! RPC methods for I/O statistics of bdevs.

use block_io::Op;
use control::json::{Value, json};
use control::{Method, RpcError, tick_rate};

use super::BdevModule;
use crate::{DeviceStats, OpStats, StatsReset};

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::query("bdev_get_iostat", get_iostat)
            .text(
                "I/O statistics since the start or the last reset.",
                "`tick_rate`, `ticks`, `bdevs` or `channels`",
            )
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EINVAL, "`per_channel` without exactly one name, or both `name` and `names`"),
            ]),
        Method::update("bdev_reset_iostat", reset_iostat)
            .text("Sets I/O statistics to zero.", "true")
            .errors(&[(RpcError::ENODEV, "there is no such bdev")]),
        Method::update("bdev_set_qd_sampling_period", set_sampling_period)
            .text("Samples the queue depth of a device. `bdev_get_iostat` then has `queue_depth_polling_period`, \
                `queue_depth` (the last sample), `io_time` (time with I/O in flight, in microseconds) and \
                `weighted_io_time` (the same, times the queue depth).", "true")
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
        /// One device: the parameter of SPDK up to 26.01, where `names` is not there
        name: Option<String>,
        /// Statistics of each channel of one device
        per_channel: bool = false,
        /// What to reset after reading: all, the shortest and longest latencies, the errors, or nothing
        reset_mode: ResetMode = ResetMode::None,
    }
}

fn get_iostat(bdevs: &BdevModule, params: GetIostat) -> Result<Value, RpcError> {
    let names = match (params.names, params.name) {
        (Some(_), Some(_)) => {
            return Err(RpcError::new(RpcError::EINVAL, "name and names exclude each other"));
        }
        (names, name) => names.or_else(|| name.map(|name| vec![name])),
    };
    let devices = match &names {
        Some(names) => names.iter().map(|name| bdevs.find(name)).collect::<Result<Vec<_>, _>>()?,
        None => bdevs.registry.list(),
    };
    let mut result = json!({ "tick_rate": tick_rate(), "ticks": os::clock::ticks() });
    if params.per_channel {
        // Channels are listed for exactly one bdev, which must be named.
        let ([device], true) = (devices.as_slice(), names.is_some()) else {
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
            bdevs.sampler.report(device.name(), &mut counts);
            counts
        });
        result["bdevs"] = all.collect();
    }
    if let Some(what) = params.reset_mode.resets() {
        devices.iter().for_each(|device| device.reset_stats(what));
    }
    Ok(result)
}

control::parameters! {
    struct ResetIostat {
        /// One device; all without
        name: Option<String>,
        /// All, the shortest and longest latencies, the errors, or nothing
        mode: ResetMode = ResetMode::All,
    }
}

fn reset_iostat(bdevs: &BdevModule, params: ResetIostat) -> Result<bool, RpcError> {
    let Some(what) = params.mode.resets() else { return Ok(true) };
    let devices = match params.name {
        Some(name) => vec![bdevs.find(&name)?],
        None => bdevs.registry.list(),
    };
    devices.iter().for_each(|device| device.reset_stats(what));
    Ok(true)
}

impl ResetMode {
    fn resets(self) -> Option<StatsReset> {
        match self {
            ResetMode::All => Some(StatsReset::All),
            ResetMode::Maxmin => Some(StatsReset::MaxMin),
            ResetMode::Error => Some(StatsReset::Errors),
            ResetMode::None => None,
        }
    }
}

control::parameters! {
    struct SetSamplingPeriod {
        /// Name, alias or UUID
        name: String,
        /// Time from sample to sample, in practice at least 100; 0 ends the sampling
        period: u64 ["us"],
    }
}

fn set_sampling_period(bdevs: &BdevModule, params: SetSamplingPeriod) -> Result<bool, RpcError> {
    bdevs.sampler.set_period(&bdevs.find(&params.name)?, params.period)?;
    Ok(true)
}

fn counts(stats: &DeviceStats) -> Value {
    counts_of(|op| stats.op(op), stats.errors())
}

/// Counters under SPDK's names. `of` returns the counters of an operation.
pub fn counts_of<'a>(of: impl Fn(Op) -> &'a OpStats, failed: u64) -> Value {
    let shortest = |op: &OpStats| if op.latency_min_ticks == u64::MAX { 0 } else { op.latency_min_ticks };
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
