//! The middle of some values, and how sure one can be of it.

use super::compare::Interval;

/// The value below which the fraction `q` (0 to 1) lies, interpolated between neighbours.
/// `None` where there is no finite value.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    quantile_of_sorted(&sorted(values), q)
}

/// The middle value. `None` where there is no finite value.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The median's interval at `level` (0.95, say), by resampling with a fixed seed.
///
/// `None` below two values: one repetition says nothing about the next. With fewer than about eight
/// values a resampled interval is narrower than it should be, so what it is compared with must not hang
/// on its last digit; [`ratio_of_means`](super::ratio_of_means) is what verdicts use.
pub fn median_interval(values: &[f64], level: f64, seed: u64) -> Option<Interval> {
    /// Enough for two digits of a 95 % interval; more changes only the third.
    const RESAMPLES: usize = 1_000;
    let values = sorted(values);
    if values.len() < 2 || !(0.0..1.0).contains(&level) {
        return None;
    }
    let mut random = Splitmix(seed);
    let mut resample = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for slot in &mut resample {
                *slot = values[random.below(values.len())];
            }
            resample.sort_by(f64::total_cmp);
            // The resample is never empty, so it has a median.
            quantile_of_sorted(&resample, 0.5).unwrap_or(values[0])
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let tail = (1.0 - level) / 2.0;
    Some(Interval {
        low: quantile_of_sorted(&medians, tail)?,
        high: quantile_of_sorted(&medians, 1.0 - tail)?,
    })
}

/// How far repetitions lie apart: (largest - smallest) / median, 0 for one value.
/// `None` where there is none or the median is 0.
pub fn relative_spread(values: &[f64]) -> Option<f64> {
    let values = sorted(values);
    let middle = quantile_of_sorted(&values, 0.5).filter(|middle| *middle != 0.0)?;
    Some(((values.last()? - values.first()?) / middle).abs())
}

pub(super) fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values
}

pub(super) fn quantile_of_sorted(values: &[f64], q: f64) -> Option<f64> {
    let last = values.len().checked_sub(1)?;
    let place = q.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    let (low, high) = (*values.get(below)?, *values.get(above)?);
    // Not low + (high - low) * t: that overflows for values at both ends of f64.
    let t = place - below as f64;
    Some(if low == high { low } else { (low * (1.0 - t) + high * t).clamp(low, high) })
}

/// splitmix64: small, well mixed, and the same on every machine.
struct Splitmix(u64);

impl Splitmix {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // The high half of the product: no bias that a thousand resamples could see.
        ((u128::from(z) * bound as u128) >> 64) as usize
    }
}
