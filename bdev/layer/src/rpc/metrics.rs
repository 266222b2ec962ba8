//! Metrics of block devices and of the tenants that use them.

use block_io::Op;
use control::{HistogramSample, Metric, MetricSamples};
use os::clock;

use crate::{BdevHistogram, OpStats, Registry};

control::metrics! {
    /// Of block devices and tenants.
    pub(super) static BDEV_METRICS {
        /// Operations that have succeeded
        OPERATIONS = "ringbolt_bdev_operations": counter [bdev, operation];
        /// Bytes of operations that have succeeded
        BYTES = "ringbolt_bdev_bytes": counter ("bytes") [bdev, operation];
        /// Operations that have failed
        ERRORS = "ringbolt_bdev_errors": counter [bdev, operation];
        /// Time from submission to completion of operations that have succeeded; bounds are powers of four
        /// from a microsecond
        LATENCY = "ringbolt_bdev_latency_seconds": histogram ("seconds") [bdev, operation];
        /// Size of a bdev
        SIZE = "ringbolt_bdev_size_bytes": gauge ("bytes") [bdev];
        /// Channels that are open, on all cores
        CHANNELS = "ringbolt_bdev_channels": gauge [bdev];
        /// Connections of a tenant, on all cores; `ringbolt` is the program itself
        FLOWS = "ringbolt_tenant_flows": gauge [tenant];
    }
}

/// Bounds of latency: 1 us to 17.9 min.
const BOUNDS: usize = 16;

pub(super) fn collect(registry: &Registry, samples: &mut MetricSamples) {
    for device in registry.list() {
        let (name, geometry, stats) = (device.name(), device.geometry(), device.stats());
        samples.add(&SIZE, &[name], u64::from(geometry.block_size) * geometry.blocks);
        samples.add(&CHANNELS, &[name], device.channel_cores().len());
        for op in Op::ALL {
            let OpStats { ops, bytes, errors, latency_ticks, .. } = *stats.op(op);
            if ops == 0 && errors == 0 {
                continue;
            }
            let labels = [name, op.name()];
            samples.add(&OPERATIONS, &labels, ops);
            samples.add(&ERRORS, &labels, errors);
            if op.has_range() {
                samples.add(&BYTES, &labels, bytes);
            }
            samples.add(&LATENCY, &labels, latency(stats.histogram(op), latency_ticks));
        }
    }
    for tenant in registry.tenants().list() {
        samples.add(&FLOWS, &[&tenant.name], tenant.flows);
    }
}

/// A bucket counts where its middle is: it is at most a 32nd of its values wide.
fn latency(histogram: &BdevHistogram, ticks: u64) -> HistogramSample {
    let mut buckets: Vec<(f64, u64)> =
        (0..BOUNDS).map(|power| ((1_u64 << (2 * power)) as f64 / 1e6, 0)).collect();
    let mut count = 0;
    for (first, end, ops) in histogram.buckets() {
        count += ops;
        let seconds = clock::ticks_to_ns(first + (end - first) / 2) as f64 / 1e9;
        for (_, within) in buckets.iter_mut().filter(|(bound, _)| seconds <= *bound) {
            *within += ops;
        }
    }
    HistogramSample { buckets, count, sum: clock::ticks_to_ns(ticks) as f64 / 1e9 }
}

pub(super) fn declared() -> Vec<&'static Metric> {
    BDEV_METRICS.to_vec()
}

#[cfg(test)]
mod tests {
    use control::MetricValue;

    use super::*;
    use crate::{Access, AsyncChannel, malloc};

    #[test]
    fn metrics_agree_with_the_statistics_of_the_device() {
        let registry = Registry::new();
        malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 2048, 512)).unwrap();
        let reactor = reactor::Reactor::new(&reactor::ReactorConfig::default()).unwrap();
        let core = reactor.core();
        let descriptor = registry.open("Malloc0", Access::ReadWrite).unwrap();
        let io = AsyncChannel::new(&core, descriptor.channel(&core).unwrap());
        let take = || core.pool().take(4096).unwrap();
        let (buffer, beyond) = (take(), take());
        let _flow = registry.tenants().connect("nqn.host");
        // Open until the values are collected.
        let _io = reactor.block_on(async move {
            let buffer = io.write(8, buffer).await.unwrap();
            io.read(8, buffer).await.unwrap();
            io.read(4096, beyond).await.unwrap_err();
            io
        });
        let mut samples = MetricSamples::default();
        collect(&registry, &mut samples);
        let whole = |metric, labels: &[&str]| match samples.get(metric, labels) {
            Some(MetricValue::Whole(value)) => *value,
            other => panic!("{other:?}"),
        };
        let (read, write) = (["Malloc0", Op::Read.name()], ["Malloc0", Op::Write.name()]);
        assert_eq!((whole(&OPERATIONS, &read), whole(&ERRORS, &read), whole(&BYTES, &read)), (1, 1, 4096));
        assert_eq!((whole(&OPERATIONS, &write), whole(&ERRORS, &write)), (1, 0));
        assert_eq!((whole(&SIZE, &["Malloc0"]), whole(&CHANNELS, &["Malloc0"])), (1 << 20, 1));
        assert_eq!(whole(&FLOWS, &["nqn.host"]), 1);
        let Some(MetricValue::Histogram(latency)) = samples.get(&LATENCY, &read) else { panic!() };
        assert_eq!((latency.count, latency.buckets.len()), (1, BOUNDS));
        assert!(latency.sum > 0.0 && latency.buckets.is_sorted_by_key(|(_, count)| *count), "{latency:?}");
        // Even a busy machine reads memory within a minute.
        assert_eq!(latency.buckets.last().unwrap().1, 1);
        assert!(samples.get(&OPERATIONS, &["Malloc0", Op::Flush.name()]).is_none());
    }
}
