//! State of the flash: free space, SLC cache and write amplification.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::profile::{DeviceProfile, MediaState};

/// Steps of the table from utilization to write amplification.
const STEPS: usize = 64;
/// A longer gap between writes counts as idle time; longer than any stall of the device itself.
const IDLE_MIN_US: u64 = 1_000_000;
/// Fractional bits of a write amplification.
pub(crate) const AMPLIFICATION_SHIFT: u32 = 10;

/// The state of a device's flash, shared by all cores. Counters are updated once per unit of the write
/// buffer. Updates of two cores may interleave: the counters are statistics of the medium.
#[derive(Debug)]
pub(crate) struct FlashState {
    user_bytes: u64,
    physical_bytes: u64,
    /// Bytes of valid data, estimated from the volume of writes and deallocations.
    valid: AtomicU64,
    /// Bytes that can be written before garbage collection starts.
    unused: AtomicU64,
    slc_bytes: u64,
    slc_left: AtomicU64,
    /// Bytes per microsecond that the SLC cache drains while idle, with 10 fractional bits.
    slc_refill: u64,
    /// Time of the last write of a unit, in nanoseconds of the model.
    written_at: AtomicU64,
    /// Steady-state write amplification by utilization, fixed point.
    amplification: Vec<u32>,
}

/// Destination and cost of programming a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProgramCost {
    /// The unit is programmed in the SLC cache.
    pub(crate) to_slc: bool,
    /// Write amplification, fixed point; 1 is the host write itself.
    pub(crate) amplification: u32,
}

const ONE: u32 = 1 << AMPLIFICATION_SHIFT;

impl FlashState {
    pub(crate) fn new(profile: &DeviceProfile, user_bytes: u64, state: MediaState) -> FlashState {
        let spare = profile.gc.as_ref().map_or(0.0, |gc| gc.spare_percent) / 100.0;
        let physical_bytes = user_bytes + (user_bytes as f64 * spare) as u64;
        let full = profile.gc.as_ref().map_or(1.0, |gc| gc.amplification);
        // The profile gives the value of a full device; the theory how it falls with utilization.
        let shape = |share: f64| fifo_write_amplification(share / (1.0 + spare)) - 1.0;
        let at = |step: usize| {
            let extra = (full - 1.0) * shape(step as f64 / STEPS as f64) / shape(1.0).max(1e-9);
            ((1.0 + extra) * f64::from(ONE)) as u32
        };
        let slc_gb = profile.slc.as_ref().map_or(0.0, |slc| slc.gb);
        // A device smaller than the profile's keeps the proportions.
        let scale = user_bytes as f64 / profile.capacity_bytes().max(1) as f64;
        let slc_bytes = (slc_gb * 1e9 * scale.min(1.0)) as u64;
        let refill_mb_s = profile.slc.as_ref().map_or(0.0, |slc| slc.refill_mb_s);
        let fresh = state == MediaState::Fresh;
        FlashState {
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

    /// Accounts for a unit of `bytes`; `random` is the share of random writes, 0 to 255.
    pub(crate) fn write(&self, now_ns: u64, bytes: u64, random: u32) -> ProgramCost {
        let fast = self.take_slc_space(now_ns, bytes);
        let valid = self.valid.load(Ordering::Relaxed);
        // The expected part of a random write that hits unmapped blocks.
        let fresh = (u128::from(bytes) * u128::from(self.user_bytes.saturating_sub(valid))
            / u128::from(self.user_bytes)) as u64;
        if fresh > 0 {
            self.valid.fetch_add(fresh, Ordering::Relaxed);
        }
        let less = |unused: u64| Some(unused.saturating_sub(bytes));
        let unused = self.unused.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or(0);
        if unused > 0 {
            return ProgramCost { to_slc: fast, amplification: ONE };
        }
        let step =
            (valid.min(self.user_bytes) as u128 * STEPS as u128 / u128::from(self.user_bytes)) as usize;
        let extra = self.amplification[step] - ONE;
        ProgramCost { to_slc: fast, amplification: ONE + (u64::from(extra) * u64::from(random) / 255) as u32 }
    }

    fn take_slc_space(&self, now_ns: u64, bytes: u64) -> bool {
        if self.slc_bytes == 0 {
            return false;
        }
        let idle_us = now_ns.saturating_sub(self.written_at.swap(now_ns, Ordering::Relaxed)) / 1000;
        let moved = if idle_us > IDLE_MIN_US { (idle_us.saturating_mul(self.slc_refill)) >> 10 } else { 0 };
        let take = |left: u64| {
            let left = left.saturating_add(moved).min(self.slc_bytes);
            Some(left.saturating_sub(bytes))
        };
        let before = self.slc_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        before.saturating_add(moved) >= bytes
    }

    /// Accounts for a deallocation; one of the whole device resets it to the fresh state.
    pub(crate) fn deallocate(&self, bytes: u64) {
        let valid = self.valid.load(Ordering::Relaxed);
        let bytes = bytes.min(self.user_bytes);
        // The expected part of a random range that holds valid data.
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

/// Write amplification of uniform random writes under FIFO garbage collection, where the fraction `used`
/// of the flash holds valid data: the probability `p` that a page is still valid when its block is
/// collected solves `p = exp(-(1 - p) / used)`, and each block yields `1 - p`.
fn fifo_write_amplification(used: f64) -> f64 {
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
    fn fifo_write_amplification_matches_the_published_model() {
        // Desnoyers, "Analytic modeling of SSD write performance", 2012: FIFO cleaning with 10 %
        // overprovisioning (used 0.909) amplifies about 5.4 times; half used, 1.25 times.
        assert!(
            (fifo_write_amplification(1.0 / 1.1) - 5.4).abs() < 0.3,
            "{}",
            fifo_write_amplification(1.0 / 1.1)
        );
        assert!((fifo_write_amplification(0.5) - 1.25).abs() < 0.02, "{}", fifo_write_amplification(0.5));
        assert_eq!(fifo_write_amplification(0.0), 1.0);
    }

    fn flash(state: MediaState) -> FlashState {
        let profile = DeviceProfile::shipped("samsung-980-pro").unwrap();
        FlashState::new(&profile, 1 << 30, state)
    }

    #[test]
    fn a_fresh_device_collects_garbage_once_its_flash_is_full() {
        let flash = flash(MediaState::Fresh);
        let unit = 1 << 20;
        assert_eq!(flash.write(0, unit, 255).amplification, ONE);
        let first_amplified = (0..3000).find(|_| flash.write(0, unit, 255).amplification > ONE).unwrap();
        // 1 GiB and its overprovisioning, in MiB.
        assert!((1020..1200).contains(&first_amplified), "{first_amplified}");
        assert_eq!(flash.write(0, unit, 0).amplification, ONE, "sequential writes invalidate whole blocks");
    }

    #[test]
    fn deallocation_reduces_write_amplification() {
        let flash = flash(MediaState::Steady);
        let full = flash.write(0, 4096, 255).amplification;
        assert!(full > ONE);
        flash.deallocate(1 << 29);
        for _ in 0..600 {
            flash.write(0, 1 << 20, 255);
        }
        let half = flash.write(0, 4096, 255).amplification;
        assert!(half < full, "{half} {full}");
        flash.deallocate(1 << 30);
        let cost = flash.write(0, 4096, 255);
        assert_eq!((cost.amplification, cost.to_slc), (ONE, true));
    }
}
