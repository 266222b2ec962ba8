//! Latency histograms of bdevs, in SPDK's buckets.
//!
//! The layer counts latencies all the time. Enabling a histogram notes the counts of that moment, and
//! reading it gives what came since.

use std::collections::BTreeMap;

use ring::Op;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Table;
use super::bdev::find;
use super::framework::tick_rate;
use super::parameters::ByName;
use crate::rpc::RpcError;
use crate::state::App;

pub(super) fn add(table: &mut Table) {
    table.change("bdev_enable_histogram", enable);
    table.read("bdev_get_histogram", get);
}

/// What was counted when a histogram was enabled, and how it is to be shown.
pub(crate) struct HistogramStart {
    /// One operation, or all.
    op: Option<Op>,
    shape: Shape,
    counts: Counts,
}

/// Counts by first tick.
type Counts = BTreeMap<u64, u64>;

/// SPDK's buckets: ranges of `2^granularity` buckets, each range twice as wide as the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    granularity: u32,
    range_min: u32,
    range_max: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Enable {
    name: String,
    enable: bool,
    opc: Option<String>,
    granularity: Option<u8>,
    min_nsec: Option<u64>,
    max_nsec: Option<u64>,
}

const GRANULARITY_DEFAULT: u8 = 7;
const GRANULARITY_MAX: u8 = 16;
const MIN_NS_DEFAULT: u64 = 1_000;
const MAX_NS_DEFAULT: u64 = 120_000_000_000;

fn enable(app: &App, params: Enable) -> Result<bool, RpcError> {
    let device = find(app, &params.name)?;
    if !params.enable {
        app.state().histograms.remove(device.name());
        return Ok(true);
    }
    let op = match params.opc.as_deref() {
        None | Some("") => None,
        Some(name) => {
            let known = Op::ALL.into_iter().find(|op| op.name() == name);
            Some(known.ok_or_else(|| RpcError::invalid_params(format!("{name} is not an I/O type")))?)
        }
    };
    let granularity = params.granularity.unwrap_or(GRANULARITY_DEFAULT);
    let (min_ns, max_ns) =
        (params.min_nsec.unwrap_or(MIN_NS_DEFAULT), params.max_nsec.unwrap_or(MAX_NS_DEFAULT));
    if granularity == 0 || granularity > GRANULARITY_MAX || min_ns >= max_ns {
        let message = format!("granularity is 1 to {GRANULARITY_MAX}, and min_nsec is below max_nsec");
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    let shape =
        Shape::new(u32::from(granularity), sys::clock::ns_to_ticks(min_ns), sys::clock::ns_to_ticks(max_ns));
    let start = HistogramStart { op, shape, counts: counts(&device.stats(), op) };
    app.state().histograms.insert(device.name().to_string(), start);
    Ok(true)
}

fn get(app: &App, params: ByName) -> Result<Value, RpcError> {
    let device = find(app, &params.name)?;
    let state = app.state();
    let Some(start) = state.histograms.get(device.name()) else {
        let message = format!("{} has no histogram; enable it with bdev_enable_histogram", params.name);
        return Err(RpcError::new(RpcError::EFAULT, message));
    };
    let mut buckets = vec![0u64; start.shape.buckets()];
    for (tick, count) in counts(&device.stats(), start.op) {
        // Counts below the start's are those of a reset.
        let since = count.saturating_sub(start.counts.get(&tick).copied().unwrap_or(0));
        buckets[start.shape.index(tick)] += since;
    }
    let bytes: Vec<u8> = buckets.iter().flat_map(|count| count.to_le_bytes()).collect();
    Ok(json!({
        "histogram": base64(&bytes),
        "granularity": start.shape.granularity,
        "min_range": start.shape.range_min,
        "max_range": start.shape.range_max,
        "tsc_rate": tick_rate(),
    }))
}

/// The layer's counts, each at the middle of its bucket.
fn counts(stats: &::bdev::DeviceStats, op: Option<Op>) -> Counts {
    let mut counts = Counts::new();
    let ops = Op::ALL.into_iter().filter(|other| op.is_none_or(|op| op == *other));
    for op in ops {
        for (from, to, count) in stats.histogram(op).buckets() {
            *counts.entry(from + (to - from) / 2).or_default() += count;
        }
    }
    counts
}

impl Shape {
    fn new(granularity: u32, min_ticks: u64, max_ticks: u64) -> Shape {
        let range = |ticks| range_of(granularity, ticks);
        Shape { granularity, range_min: range(min_ticks), range_max: range(max_ticks) }
    }

    fn buckets(self) -> usize {
        ((self.range_max - self.range_min + 1) as usize) << self.granularity
    }

    /// What lies outside of the ranges goes into the first or the last bucket.
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

/// Range 0 holds what has at most `granularity` bits, each further range one bit more.
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
    fn base64_is_the_standards() {
        for (plain, encoded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn buckets_are_where_spdk_has_them() {
        // Ranges 0 and 1 hold one value a bucket, range 2 two, range 3 four: 128 buckets each.
        let shape = Shape::new(7, 0, 1023);
        assert_eq!((shape.range_min, shape.range_max, shape.buckets()), (0, 3, 512));
        let cases = [(0, 0), (127, 127), (128, 128), (255, 255), (256, 256), (258, 257), (511, 383)];
        for (ticks, index) in cases.into_iter().chain([(512, 384), (1023, 511), (99_999, 511)]) {
            assert_eq!(shape.index(ticks), index, "{ticks}");
        }
        let shape = Shape::new(7, 512, 1023);
        assert_eq!((shape.index(3), shape.index(512), shape.buckets()), (0, 0, 128));
    }
}
