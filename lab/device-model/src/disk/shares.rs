//! The share of a device that each of its channels has.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The channels of a device. Locked when a channel opens or closes, and by the others once after that.
#[derive(Default)]
pub(super) struct ChannelShares {
    channels: Mutex<Vec<Arc<ChannelDemand>>>,
    /// Incremented when a channel opens or closes.
    epoch: AtomicU64,
}

/// The demand of one channel, on its own cache line.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct ChannelDemand {
    /// Moving average of the commands in flight, with 8 fractional bits.
    in_flight: AtomicU64,
}

/// One channel's view of the demand of all channels.
pub(super) struct ChannelShare {
    own: Arc<ChannelDemand>,
    all: Vec<Arc<ChannelDemand>>,
    epoch: u64,
    average: u64,
}

/// Log2 of the time constant of the moving average: eight updates.
const AVERAGE_SHIFT: u32 = 3;

impl ChannelShares {
    pub(super) fn register(&self) -> ChannelShare {
        let own = Arc::new(ChannelDemand::default());
        self.lock().push(own.clone());
        self.epoch.fetch_add(1, Ordering::Release);
        ChannelShare { all: vec![own.clone()], own, epoch: 0, average: 0 }
    }

    pub(super) fn unregister(&self, share: &ChannelShare) {
        self.lock().retain(|other| !Arc::ptr_eq(other, &share.own));
        self.epoch.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<ChannelDemand>>> {
        // Every change is a single call, so a poisoned lock still holds consistent data.
        sync::lock(&self.channels)
    }
}

impl ChannelShare {
    /// Publishes the commands in flight of this channel and returns its share of the device, 0 to 1.
    pub(super) fn update(&mut self, shares: &ChannelShares, in_flight: usize) -> f64 {
        let epoch = shares.epoch.load(Ordering::Acquire);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.all.clone_from(&shares.lock());
        }
        let now = (in_flight as u64) << 8;
        self.average = self.average - (self.average >> AVERAGE_SHIFT) + (now >> AVERAGE_SHIFT);
        // A channel that just became active counts with at least one command.
        let own = self.average.max(now.min(256)).max(1);
        self.own.in_flight.store(own, Ordering::Relaxed);
        let sum: u64 = self.all.iter().map(|demand| demand.in_flight.load(Ordering::Relaxed)).sum();
        own as f64 / sum.max(own) as f64
    }

    /// Publishes a demand of zero until the next update.
    pub(super) fn mark_idle(&mut self) {
        self.average = 0;
        self.own.in_flight.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_proportional_to_commands_in_flight() {
        let shares = ChannelShares::default();
        let mut one = shares.register();
        assert_eq!(one.update(&shares, 4), 1.0);
        let mut other = shares.register();
        let mut parts = (0.0, 0.0);
        for _ in 0..100 {
            parts = (one.update(&shares, 30), other.update(&shares, 10));
        }
        assert!((parts.0 - 0.75).abs() < 0.01 && (parts.1 - 0.25).abs() < 0.01, "{parts:?}");
        other.mark_idle();
        assert!((one.update(&shares, 30) - 1.0).abs() < 1e-9, "an idle channel has no share");
        shares.unregister(&one);
        assert_eq!(other.update(&shares, 1), 1.0);
    }
}
