//! Latency histograms of bdevs, in SPDK's buckets.
//!
//! The bdev layer counts latencies all the time. Enabling a histogram stores a baseline of the counts, and
//! reading it returns the counts since the baseline.

use std::collections::BTreeMap;

use block_io::Op;
use control::json::{Value, json};
use control::{ByName, Method, Parameters, RpcError, tick_rate};

use super::BdevModule;
use crate::DeviceStats;

pub(super) fn methods() -> Vec<Method<BdevModule>> {
    vec![
        Method::update("bdev_enable_histogram", enable)
            .text("Starts or ends a latency histogram of a device.", "true")
            .canonical(|bdevs: &BdevModule, params: &mut EnableHistogram| {
                params.name = bdevs.registry.name_of(&params.name);
                params.opc = params.opc.take().filter(|op| !op.is_empty());
                Ok(())
            })
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EINVAL, "granularity or range is not supported"),
            ]),
        Method::query("bdev_get_histogram", get)
            .text("The latency histogram since it was enabled.",
                "`histogram` (base64 of 64-bit counters), `granularity`, `min_range`, `max_range`, `tsc_rate`")
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EFAULT, "the histogram is not enabled"),
            ]),
        Method::query("bdev_get_histogram_borders", get_borders)
            .text("Counts the I/Os since the histogram was enabled between latencies of the caller's choice.",
                "`borders_count`: I/Os up to the first border, up to each further one, and beyond the last")
            .errors(&[
                (RpcError::ENODEV, "there is no such bdev"),
                (RpcError::EFAULT, "the histogram is not enabled"),
                (RpcError::EINVAL, "there are no borders, more than 256, or they do not ascend"),
            ]),
    ]
}

/// The counts at the time at which a histogram was enabled, and the layout of the result.
pub(super) struct HistogramBaseline {
    /// The device, of those that have had its name ([`BlockDevice::trace_id`](crate::BlockDevice::trace_id)).
    device: u32,
    /// Parameters of the call that enabled it.
    params: Value,
    /// The operation counted; `None` is all.
    op: Option<Op>,
    shape: BucketLayout,
    counts: Counts,
}

/// Number of I/Os by latency in ticks.
type Counts = BTreeMap<u64, u64>;

/// SPDK's bucket layout: ranges of `2^granularity` buckets, each range twice as wide as the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BucketLayout {
    granularity: u32,
    range_min: u32,
    range_max: u32,
}

control::parameters! {
    struct EnableHistogram {
        /// Device
        name: String,
        /// Start or end
        enable: bool,
        /// Operation to count, as read; all without
        opc: Option<String>,
        /// Buckets of a range, as a power of two: 1 to 16
        granularity: u8 = GRANULARITY_DEFAULT,
        /// Shortest latency that has a bucket of its own
        min_nsec: u64 ["ns"] = MIN_NS_DEFAULT,
        /// Longest latency that has a bucket of its own
        max_nsec: u64 ["ns"] = MAX_NS_DEFAULT,
    }
}

const GRANULARITY_DEFAULT: u8 = 7;
const GRANULARITY_MAX: u8 = 16;
const MIN_NS_DEFAULT: u64 = 1_000;
const MAX_NS_DEFAULT: u64 = 120_000_000_000;

fn enable(bdevs: &BdevModule, params: EnableHistogram) -> Result<bool, RpcError> {
    let device = bdevs.find(&params.name)?;
    let saved = params.to_object();
    if !params.enable {
        bdevs.histograms().remove(device.name());
        return Ok(true);
    }
    let op = match params.opc.as_deref() {
        None | Some("") => None,
        Some(name) => {
            let known = Op::ALL.into_iter().find(|op| op.name() == name);
            Some(known.ok_or_else(|| RpcError::invalid_params(format!("{name} is not an I/O type")))?)
        }
    };
    let granularity = params.granularity;
    let (min_ns, max_ns) = (params.min_nsec, params.max_nsec);
    if granularity == 0 || granularity > GRANULARITY_MAX || min_ns >= max_ns {
        let message = format!("granularity is 1 to {GRANULARITY_MAX}, and min_nsec is below max_nsec");
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    let shape = BucketLayout::new(
        u32::from(granularity),
        os::clock::ns_to_ticks(min_ns),
        os::clock::ns_to_ticks(max_ns),
    );
    let counts = counts(&device.stats(), op);
    let start = HistogramBaseline { device: device.trace_id(), params: saved.into(), op, shape, counts };
    bdevs.histograms().insert(device.name().to_string(), start);
    Ok(true)
}

/// The calls that enable the histograms again.
pub(super) fn saved(bdevs: &BdevModule) -> Vec<Value> {
    let histograms = bdevs.histograms();
    let is_there = |(name, start): &(&String, &HistogramBaseline)| {
        bdevs.registry.find(name).is_some_and(|device| device.trace_id() == start.device)
    };
    let enabled = histograms.iter().filter(is_there);
    enabled.map(|(_, start)| json!({ "method": "bdev_enable_histogram", "params": start.params })).collect()
}

fn get(bdevs: &BdevModule, params: ByName) -> Result<Value, RpcError> {
    let (shape, since) = counts_since_enabled(bdevs, &params.name)?;
    let mut buckets = vec![0u64; shape.buckets()];
    for (tick, count) in since {
        buckets[shape.index(tick)] += count;
    }
    let bytes: Vec<u8> = buckets.iter().flat_map(|count| count.to_le_bytes()).collect();
    Ok(json!({
        "histogram": base64(&bytes),
        "granularity": shape.granularity,
        "min_range": shape.range_min,
        "max_range": shape.range_max,
        "tsc_rate": tick_rate(),
    }))
}

control::parameters! {
    struct GetHistogramBorders {
        /// Device
        name: String,
        /// 1 to 256 latencies, ascending
        borders: Vec<u64> ["us"],
    }
}

/// Most borders, as in SPDK.
const BORDERS_MAX: usize = 256;

fn get_borders(bdevs: &BdevModule, params: GetHistogramBorders) -> Result<Value, RpcError> {
    let borders = &params.borders;
    if borders.is_empty() || borders.len() > BORDERS_MAX || !borders.is_sorted_by(|one, next| one < next) {
        let message = format!("borders: 1 to {BORDERS_MAX} ascending latencies are expected");
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    let ticks = |us: &u64| os::clock::ns_to_ticks(us.saturating_mul(1000));
    let borders: Vec<u64> = borders.iter().map(ticks).collect();
    let mut counts = vec![0u64; borders.len() + 1];
    for (tick, count) in counts_since_enabled(bdevs, &params.name)?.1 {
        counts[borders.partition_point(|border| *border < tick)] += count;
    }
    Ok(json!({ "borders_count": counts }))
}

/// The counts since the histogram of a device was enabled, and the layout that was selected for it.
fn counts_since_enabled(bdevs: &BdevModule, name: &str) -> Result<(BucketLayout, Counts), RpcError> {
    let device = bdevs.find(name)?;
    let histograms = bdevs.histograms();
    let start = histograms.get(device.name()).filter(|start| start.device == device.trace_id());
    let Some(start) = start else {
        let message = format!("{name} has no histogram; enable it with bdev_enable_histogram");
        return Err(RpcError::new(RpcError::EFAULT, message));
    };
    let mut counts = counts(&device.stats(), start.op);
    for (tick, count) in &mut counts {
        // Lower than the baseline only after a reset of the statistics.
        *count = count.saturating_sub(start.counts.get(tick).copied().unwrap_or(0));
    }
    Ok((start.shape, counts))
}

/// The bdev layer's counts, each at the middle of its bucket.
fn counts(stats: &DeviceStats, op: Option<Op>) -> Counts {
    let mut counts = Counts::new();
    let ops = Op::ALL.into_iter().filter(|other| op.is_none_or(|op| op == *other));
    for op in ops {
        for (from, to, count) in stats.histogram(op).buckets() {
            *counts.entry(from + (to - from) / 2).or_default() += count;
        }
    }
    counts
}

impl BucketLayout {
    fn new(granularity: u32, min_ticks: u64, max_ticks: u64) -> BucketLayout {
        let range = |ticks| range_of(granularity, ticks);
        BucketLayout { granularity, range_min: range(min_ticks), range_max: range(max_ticks) }
    }

    fn buckets(self) -> usize {
        ((self.range_max - self.range_min + 1) as usize) << self.granularity
    }

    /// The bucket of a latency. A latency below or above all ranges is in the first or last bucket.
    fn index(self, ticks: u64) -> usize {
        let range = range_of(self.granularity, ticks);
        if range < self.range_min {
            return 0;
        }
        if range > self.range_max {
            return self.buckets() - 1;
        }
        let within = (ticks >> range.saturating_sub(1)) & ((1 << self.granularity) - 1);
        (((range - self.range_min) as usize) << self.granularity) + within as usize
    }
}

/// Range 0 holds values of at most `granularity` bits; each further range has one bit more.
fn range_of(granularity: u32, ticks: u64) -> u32 {
    (u64::BITS - ticks.leading_zeros()).saturating_sub(granularity)
}

/// RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let word = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let filled = digit <= chunk.len();
            let sextet = (word >> (18 - 6 * digit) & 63) as usize;
            text.push(if filled { char::from(ALPHABET[sextet]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_the_vectors_of_rfc_4648() {
        for (plain, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn bucket_layout_matches_spdks() {
        // 128 buckets a range: of width 1 in ranges 0 and 1, 2 in range 2, 4 in range 3.
        let shape = BucketLayout::new(7, 0, 1023);
        assert_eq!((shape.range_min, shape.range_max, shape.buckets()), (0, 3, 512));
        let cases = [(0, 0), (127, 127), (128, 128), (255, 255), (256, 256), (258, 257), (511, 383)];
        for (ticks, index) in cases.into_iter().chain([(512, 384), (1023, 511), (99_999, 511)]) {
            assert_eq!(shape.index(ticks), index, "{ticks}");
        }
        let shape = BucketLayout::new(7, 512, 1023);
        assert_eq!((shape.index(3), shape.index(512), shape.buckets()), (0, 0, 128));
    }
}
