//! Coalescing of the notifications of a virtqueue's driver.

/// How a controller coalesces notifications: SPDK's parameters.
///
/// A virtqueue that returns more than `iops_threshold` requests a second delays notifications by `delay_base_us` for each
/// multiple of the threshold beyond it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalescing {
    /// Microseconds; 0 for no delay.
    pub delay_base_us: u32,
    /// Requests a second of a virtqueue.
    pub iops_threshold: u32,
}

impl Default for Coalescing {
    /// No delay, and SPDK's threshold.
    fn default() -> Self {
        Coalescing { delay_base_us: 0, iops_threshold: 60_000 }
    }
}

impl Coalescing {
    /// Requests a second below which no rate is measured: one in an interval.
    pub(crate) const IOPS_THRESHOLD_MIN: u32 = (1_000_000_000 / INTERVAL_NS) as u32;

    /// Whether notifications are ever delayed.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.delay_base_us > 0
    }

    /// The delay for `used` requests in `interval_ns`.
    fn delay_ns(&self, used: u64, interval_ns: u64) -> u64 {
        let threshold = (u64::from(self.iops_threshold) * interval_ns / 1_000_000_000).max(1);
        let beyond = used.saturating_sub(threshold);
        ((u64::from(self.delay_base_us) * 1000).saturating_mul(beyond) / threshold).min(DELAY_NS_MAX)
    }
}

/// Interval in which the rate is measured: SPDK's.
const INTERVAL_NS: u64 = 10_000_000;
/// A driver is never kept waiting longer than the rate is measured.
const DELAY_NS_MAX: u64 = INTERVAL_NS;

/// The notifications of one virtqueue, sans-IO.
///
/// [`count`](Self::count) and [`notifies`](Self::notifies) are called where used chains are published, while the
/// virtqueue is polled, and [`take_due`](Self::take_due) in each poll as long as one [is pending](Self::is_pending).
#[derive(Default)]
pub(crate) struct NotificationPacer {
    interval_start_ns: u64,
    used: u64,
    delay_ns: u64,
    next_ns: u64,
    is_pending: bool,
}

impl NotificationPacer {
    /// So many chains were returned.
    #[inline]
    pub(crate) fn count(&mut self, coalescing: &Coalescing, used: u32, now_ns: u64) {
        self.used += u64::from(used);
        let interval_ns = now_ns.saturating_sub(self.interval_start_ns);
        if interval_ns >= INTERVAL_NS {
            self.delay_ns = coalescing.delay_ns(self.used, interval_ns);
            (self.interval_start_ns, self.used) = (now_ns, 0);
        }
    }

    /// The driver wants a notification. Returns whether it gets one now, rather than later.
    #[inline]
    pub(crate) fn notifies(&mut self, now_ns: u64) -> bool {
        self.is_pending = now_ns < self.next_ns;
        if !self.is_pending {
            self.next_ns = now_ns + self.delay_ns;
        }
        !self.is_pending
    }

    /// A notification is delayed.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.is_pending
    }

    /// Whether a delayed notification is due: it is to be sent then.
    #[inline]
    pub(crate) fn take_due(&mut self, now_ns: u64) -> bool {
        self.is_pending && self.notifies(now_ns)
    }

    /// Whether there was a delayed notification: it is to be sent at once.
    pub(crate) fn take_pending(&mut self) -> bool {
        std::mem::take(&mut self.is_pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_with_the_rate_beyond_the_threshold() {
        let coalescing = Coalescing { delay_base_us: 10, iops_threshold: 50_000 };
        // Requests in 10 ms, and microseconds.
        for (used, delay_us) in [(0, 0), (500, 0), (750, 5), (1000, 10), (2000, 30), (1_000_000, 10_000)] {
            assert_eq!(coalescing.delay_ns(used, INTERVAL_NS), delay_us * 1000, "{used}");
        }
        assert_eq!(Coalescing::default().delay_ns(1_000_000, INTERVAL_NS), 0);
    }

    #[test]
    fn a_busy_virtqueue_notifies_once_in_a_delay_and_loses_no_notification() {
        let coalescing = Coalescing { delay_base_us: 100, iops_threshold: 100_000 };
        let mut pacer = NotificationPacer::default();
        let mut sent = Vec::new();
        // Two requests each microsecond for 50 ms, then none.
        for now_us in 0..60_000_u64 {
            let now_ns = 1_000_000_000 + now_us * 1000;
            if pacer.take_due(now_ns) {
                sent.push(now_us);
            }
            if now_us < 50_000 {
                pacer.count(&coalescing, 2, now_ns);
                if pacer.notifies(now_ns) {
                    sent.push(now_us);
                }
            }
        }
        // The first interval has no rate yet. Then 2,000,000 a second are 19 times beyond the threshold: 1.9 ms.
        let later: Vec<u64> = sent.iter().copied().filter(|at| *at > 22_000).collect();
        assert!(later.len() <= 17, "{later:?}");
        assert!(later.windows(2).all(|pair| pair[1] - pair[0] >= 1800), "{later:?}");
        assert!(*sent.last().unwrap() >= 49_999 && !pacer.is_pending(), "the last request was not reported");
        // At a low rate there is no delay.
        for now_us in 0..100_u64 {
            let now_ns = 2_000_000_000 + now_us * 1_000_000;
            pacer.count(&coalescing, 1, now_ns);
            assert!(pacer.notifies(now_ns), "{now_us}");
        }
    }
}
