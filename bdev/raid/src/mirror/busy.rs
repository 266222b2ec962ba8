//! Stripes that are written or reconstructed at present, on any core.

use std::sync::atomic::{AtomicU64, Ordering};

/// Stripes that differ by a multiple of this wait for each other, in vain.
const SLOTS: usize = 1024;

/// Two writes of one stripe at the same time would leave a parity that is neither's, and a reconstruction
/// beside a write blocks that were never written: one of both waits, by trying later.
pub(super) struct BusyStripes(Box<[AtomicU64]>);

impl BusyStripes {
    pub(super) fn new() -> BusyStripes {
        BusyStripes((0..SLOTS).map(|_| AtomicU64::new(0)).collect())
    }

    fn slot(&self, stripe: u64) -> &AtomicU64 {
        &self.0[(stripe % SLOTS as u64) as usize]
    }

    /// Whether the stripe is the caller's now.
    #[inline]
    pub(super) fn try_claim(&self, stripe: u64) -> bool {
        self.slot(stripe).compare_exchange(0, stripe + 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends a claim.
    #[inline]
    pub(super) fn release(&self, stripe: u64) {
        let before = self.slot(stripe).swap(0, Ordering::Release);
        assert_eq!(before, stripe + 1, "stripe {stripe} is released by who has claimed it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stripe_is_claimed_once() {
        let busy = BusyStripes::new();
        assert!(busy.try_claim(5) && busy.try_claim(6));
        assert!(!busy.try_claim(5) && !busy.try_claim(5 + SLOTS as u64));
        busy.release(5);
        assert!(busy.try_claim(5 + SLOTS as u64));
    }
}
