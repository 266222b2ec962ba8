//! How much of a device each of its channels has.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The channels of a device. Locked when one opens or closes, and by the others once after that.
#[derive(Default)]
pub(super) struct Shares {
    channels: Mutex<Vec<Arc<Demand>>>,
    /// Counts openings and closings.
    epoch: AtomicU64,
}

/// What one channel wants, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct Demand {
    /// Commands in flight, averaged, as fixed point of 8 bits.
    in_flight: AtomicU64,
}

/// One channel's view of the others.
pub(super) struct Share {
    own: Arc<Demand>,
    all: Vec<Arc<Demand>>,
    epoch: u64,
    average: u64,
}

/// How fast the average follows, as a shift: eight looks.
const FOLLOW: u32 = 3;

impl Shares {
    pub(super) fn join(&self) -> Share {
        let own = Arc::new(Demand::default());
        self.lock().push(own.clone());
        self.epoch.fetch_add(1, Ordering::Release);
        Share { all: vec![own.clone()], own, epoch: 0, average: 0 }
    }

    pub(super) fn leave(&self, share: &Share) {
        self.lock().retain(|other| !Arc::ptr_eq(other, &share.own));
        self.epoch.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Demand>>> {
        // Every change is one call, so that it is never half done.
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// Says how many commands are in flight here, and gives this channel's part of the device.
    pub(super) fn look(&mut self, shares: &Shares, in_flight: usize) -> f64 {
        let epoch = shares.epoch.load(Ordering::Acquire);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.all.clone_from(&shares.lock());
        }
        let now = (in_flight as u64) << 8;
        self.average = self.average - (self.average >> FOLLOW) + (now >> FOLLOW);
        // Who just began is not held to an average of nothing.
        let own = self.average.max(now.min(256)).max(1);
        self.own.in_flight.store(own, Ordering::Relaxed);
        let sum: u64 = self.all.iter().map(|demand| demand.in_flight.load(Ordering::Relaxed)).sum();
        own as f64 / sum.max(own) as f64
    }

    /// Wants nothing until the next look.
    pub(super) fn rest(&mut self) {
        self.average = 0;
        self.own.in_flight.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_shared_by_what_is_in_flight() {
        let shares = Shares::default();
        let mut one = shares.join();
        assert_eq!(one.look(&shares, 4), 1.0);
        let mut other = shares.join();
        let mut parts = (0.0, 0.0);
        for _ in 0..100 {
            parts = (one.look(&shares, 30), other.look(&shares, 10));
        }
        assert!((parts.0 - 0.75).abs() < 0.01 && (parts.1 - 0.25).abs() < 0.01, "{parts:?}");
        other.rest();
        assert!((one.look(&shares, 30) - 1.0).abs() < 1e-9, "who rests leaves the device to the others");
        shares.leave(&one);
        assert_eq!(other.look(&shares, 1), 1.0);
    }
}
