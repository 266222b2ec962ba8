//! Sampling of queue depths: a thread reads, at each device's period, how many requests its channels have in flight.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use control::RpcError;
use control::json::{Value, json};

use crate::BlockDevice;

/// Shortest time between two samples: a timer of the kernel is late by about half of that.
const PERIOD_MIN: Duration = Duration::from_micros(100);
/// Longest time between two samples, so that the clock's arithmetic cannot overflow.
const PERIOD_MAX: Duration = Duration::from_secs(86_400);

/// The sampled devices. The thread runs while there are any, and ends when this is dropped.
#[derive(Default)]
pub(super) struct QueueDepthSampler {
    shared: Arc<SamplerShared>,
}

#[derive(Default)]
struct SamplerShared {
    table: Mutex<SamplerTable>,
    changed: Condvar,
}

#[derive(Default)]
struct SamplerTable {
    /// By name of the bdev.
    devices: BTreeMap<String, SampledDevice>,
    is_running: bool,
    is_stopped: bool,
}

struct SampledDevice {
    device: Weak<BlockDevice>,
    /// As it was requested.
    period_us: u64,
    sampled: Instant,
    depth: u64,
    busy: Duration,
    /// Nanoseconds times requests.
    weighted_ns: u128,
}

impl QueueDepthSampler {
    /// Samples a device from now on; a period of 0 ends that.
    pub(super) fn set_period(&self, device: &Arc<BlockDevice>, period_us: u64) -> Result<(), RpcError> {
        let mut table = sync::lock(&self.shared.table);
        device.set_sampled(period_us != 0);
        if period_us == 0 {
            table.devices.remove(device.name());
            return Ok(());
        }
        let sampled = SampledDevice {
            device: Arc::downgrade(device),
            period_us,
            sampled: Instant::now(),
            depth: 0,
            busy: Duration::ZERO,
            weighted_ns: 0,
        };
        table.devices.insert(device.name().to_string(), sampled);
        if !table.is_running {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("queue-depth".to_string());
            thread.spawn(move || shared.run()).map_err(RpcError::internal)?;
            table.is_running = true;
        }
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Adds what was sampled of a device to its statistics.
    pub(super) fn report(&self, name: &str, counts: &mut Value) {
        let table = sync::lock(&self.shared.table);
        let Some(sampled) = table.devices.get(name) else { return };
        counts["queue_depth_polling_period"] = json!(sampled.period_us);
        counts["queue_depth"] = json!(sampled.depth);
        counts["io_time"] = json!(sampled.busy.as_micros() as u64);
        counts["weighted_io_time"] = json!((sampled.weighted_ns / 1000) as u64);
    }
}

impl Drop for QueueDepthSampler {
    fn drop(&mut self) {
        sync::lock(&self.shared.table).is_stopped = true;
        self.shared.changed.notify_all();
    }
}

impl SamplerShared {
    fn run(&self) {
        let mut table = sync::lock(&self.table);
        while !table.is_stopped {
            let now = Instant::now();
            table.devices.retain(|_, sampled| sampled.sample(now));
            let Some(next) = table.devices.values().map(SampledDevice::next).min() else {
                table.is_running = false;
                return;
            };
            let pause = next.saturating_duration_since(Instant::now()).max(PERIOD_MIN / 2);
            table = sync::wait_timeout(&self.changed, table, pause);
        }
    }
}

impl SampledDevice {
    fn next(&self) -> Instant {
        self.sampled + Duration::from_micros(self.period_us).clamp(PERIOD_MIN, PERIOD_MAX)
    }

    /// Takes a sample if it is time. The depth counts for the time since the last one, which may be longer than the
    /// period. Returns whether the device still exists.
    fn sample(&mut self, now: Instant) -> bool {
        let Some(device) = self.device.upgrade().filter(|device| !device.is_removed()) else { return false };
        if now < self.next() {
            return true;
        }
        let since = now - self.sampled;
        (self.sampled, self.depth) = (now, device.in_flight());
        if self.depth > 0 {
            self.busy += since;
            self.weighted_ns += since.as_nanos() * u128::from(self.depth);
        }
        true
    }
}
