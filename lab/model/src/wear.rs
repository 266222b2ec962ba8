//! What writing has done to the flash: space that is left, and how much work each write makes.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::profile::{Profile, State};

/// Steps of the table from how full the device is to the amplification.
const STEPS: usize = 64;
/// Writes that are further apart leave the device a pause: longer than any stall of its own.
const PAUSE_US: u64 = 1_000_000;
/// Fixed-point position of an amplification.
pub(crate) const AMPLIFICATION_SHIFT: u32 = 10;

/// The state of a device, shared by all that book time on it. Counters are moved on once per unit of
/// the write buffer and tolerate that two cores move them at once: they are statistics of a medium.
#[derive(Debug)]
pub(crate) struct Wear {
    user_bytes: u64,
    physical_bytes: u64,
    /// Bytes that hold something, as far as writes and deallocations can be told by their volume.
    valid: AtomicU64,
    /// Bytes that may be written before garbage collection begins.
    unused: AtomicU64,
    slc_bytes: u64,
    slc_left: AtomicU64,
    /// Bytes a microsecond, as fixed point.
    slc_refill: u64,
    /// When the last unit was written, in nanoseconds of the model.
    written_at: AtomicU64,
    /// Amplification in the steady state by how full the device is, fixed point.
    amplification: Vec<u32>,
}

/// Where a unit goes and what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// To the part that is programmed faster.
    pub(crate) fast: bool,
    /// Work for each byte written, fixed point; 1 is the write itself.
    pub(crate) amplification: u32,
}

const ONE: u32 = 1 << AMPLIFICATION_SHIFT;

impl Wear {
    pub(crate) fn new(profile: &Profile, user_bytes: u64, state: State) -> Wear {
        let spare = profile.gc.as_ref().map_or(0.0, |gc| gc.spare_percent) / 100.0;
        let physical_bytes = user_bytes + (user_bytes as f64 * spare) as u64;
        let full = profile.gc.as_ref().map_or(1.0, |gc| gc.amplification);
        // The profile says what a full device does; the theory says how that falls as it empties.
        let shape = |share: f64| cleaning(share / (1.0 + spare)) - 1.0;
        let at = |step: usize| {
            let extra = (full - 1.0) * shape(step as f64 / STEPS as f64) / shape(1.0).max(1e-9);
            ((1.0 + extra) * f64::from(ONE)) as u32
        };
        let slc_gb = profile.slc.as_ref().map_or(0.0, |slc| slc.gb);
        // A device that is made smaller than the real one keeps the proportions.
        let scale = user_bytes as f64 / profile.capacity_bytes().max(1) as f64;
        let slc_bytes = (slc_gb * 1e9 * scale.min(1.0)) as u64;
        let refill_mb_s = profile.slc.as_ref().map_or(0.0, |slc| slc.refill_mb_s);
        let fresh = state == State::Fresh;
        Wear {
            user_bytes,
            physical_bytes,
            valid: AtomicU64::new(if fresh { 0 } else { user_bytes }),
            unused: AtomicU64::new(if fresh { physical_bytes } else { 0 }),
            slc_bytes,
            slc_left: AtomicU64::new(if fresh { slc_bytes } else { 0 }),
            slc_refill: (refill_mb_s * 1024.0) as u64,
            written_at: AtomicU64::new(0),
            amplification: (0..=STEPS).map(at).collect(),
        }
    }

    /// Takes a unit of `bytes` in; `random` is the share of random writes, 0 to 255.
    pub(crate) fn write(&self, now_ns: u64, bytes: u64, random: u32) -> Charge {
        let fast = self.take_fast(now_ns, bytes);
        let valid = self.valid.load(Ordering::Relaxed);
        // Of a write anywhere, this part lands where nothing was.
        let fresh = (u128::from(bytes) * u128::from(self.user_bytes.saturating_sub(valid))
            / u128::from(self.user_bytes)) as u64;
        if fresh > 0 {
            self.valid.fetch_add(fresh, Ordering::Relaxed);
        }
        let less = |unused: u64| Some(unused.saturating_sub(bytes));
        let unused = self.unused.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or(0);
        if unused > 0 {
            return Charge { fast, amplification: ONE };
        }
        let step =
            (valid.min(self.user_bytes) as u128 * STEPS as u128 / u128::from(self.user_bytes)) as usize;
        let extra = self.amplification[step] - ONE;
        Charge { fast, amplification: ONE + (u64::from(extra) * u64::from(random) / 255) as u32 }
    }

    fn take_fast(&self, now_ns: u64, bytes: u64) -> bool {
        if self.slc_bytes == 0 {
            return false;
        }
        let idle_us = now_ns.saturating_sub(self.written_at.swap(now_ns, Ordering::Relaxed)) / 1000;
        let moved = if idle_us > PAUSE_US { (idle_us.saturating_mul(self.slc_refill)) >> 10 } else { 0 };
        let take = |left: u64| {
            let left = left.saturating_add(moved).min(self.slc_bytes);
            Some(left.saturating_sub(bytes))
        };
        let before = self.slc_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        before.saturating_add(moved) >= bytes
    }

    /// Gives bytes back.
    pub(crate) fn deallocate(&self, bytes: u64) {
        let valid = self.valid.load(Ordering::Relaxed);
        let bytes = bytes.min(self.user_bytes);
        // Of a range anywhere, this part held something.
        let freed = (u128::from(bytes) * u128::from(valid) / u128::from(self.user_bytes)) as u64;
        let less = |valid: u64| Some(valid.saturating_sub(freed));
        let _ = self.valid.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let more = |unused: u64| Some((unused + freed).min(self.physical_bytes));
        let _ = self.unused.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        if bytes == self.user_bytes {
            self.valid.store(0, Ordering::Relaxed);
            self.unused.store(self.physical_bytes, Ordering::Relaxed);
            self.slc_left.store(self.slc_bytes, Ordering::Relaxed);
        }
    }
}

/// Bytes that flash writes for each byte of random writes, where blocks are cleaned in the order in
/// which they were filled and `used` of the flash holds data: the probability `p` that a page is still
/// valid when its block's turn comes solves `p = exp(-(1 - p) / used)`, and each block yields `1 - p`.
fn cleaning(used: f64) -> f64 {
    if used <= 0.0 {
        return 1.0;
    }
    let mut valid = 0.0f64;
    for _ in 0..200 {
        valid = (-(1.0 - valid) / used).exp();
    }
    1.0 / (1.0 - valid.min(0.99))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleaning_costs_what_theory_says() {
        // Desnoyers, "Analytic modeling of SSD write performance", 2012: 10 % spare (used 0.909) makes
        // first-in first-out cleaning write about 5.4 times; half used, 1.25 times.
        assert!((cleaning(1.0 / 1.1) - 5.4).abs() < 0.3, "{}", cleaning(1.0 / 1.1));
        assert!((cleaning(0.5) - 1.25).abs() < 0.02, "{}", cleaning(0.5));
        assert_eq!(cleaning(0.0), 1.0);
    }

    fn wear(state: State) -> Wear {
        let profile = Profile::shipped("samsung-980-pro").unwrap();
        Wear::new(&profile, 1 << 30, state)
    }

    #[test]
    fn a_fresh_device_pays_once_its_flash_is_used_up() {
        let wear = wear(State::Fresh);
        let unit = 1 << 20;
        assert_eq!(wear.write(0, unit, 255).amplification, ONE);
        let paying = (0..3000).find(|_| wear.write(0, unit, 255).amplification > ONE).unwrap();
        // A gibibyte and the spare part of it, in mebibytes.
        assert!((1020..1200).contains(&paying), "{paying}");
        assert_eq!(wear.write(0, unit, 0).amplification, ONE, "sequential writes invalidate whole blocks");
    }

    #[test]
    fn deallocation_makes_writes_cheap_again() {
        let wear = wear(State::Steady);
        let full = wear.write(0, 4096, 255).amplification;
        assert!(full > ONE);
        wear.deallocate(1 << 29);
        for _ in 0..600 {
            wear.write(0, 1 << 20, 255);
        }
        let half = wear.write(0, 4096, 255).amplification;
        assert!(half < full, "{half} {full}");
        wear.deallocate(1 << 30);
        let charge = wear.write(0, 4096, 255);
        assert_eq!((charge.amplification, charge.fast), (ONE, true));
    }
}
