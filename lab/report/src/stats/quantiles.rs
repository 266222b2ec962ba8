//! Quantiles, medians and the bootstrap confidence interval of a median.

use random::WyRand;

use super::compare::ConfidenceInterval;

/// The quantile `q` (0 to 1) with linear interpolation. `None` if there is no finite value.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    quantile_of_sorted(&sorted(values), q)
}

/// The median. `None` if there is no finite value.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The bootstrap confidence interval of the median at `level` (0 to 1), reproducible for a given `seed`.
///
/// `None` for fewer than two finite values. With fewer than about eight values, a bootstrap interval is too
/// narrow, so it is for display only; verdicts use [`geometric_mean_ratio`](super::geometric_mean_ratio).
pub fn median_interval(values: &[f64], level: f64, seed: u64) -> Option<ConfidenceInterval> {
    /// Enough for two significant digits of a 95 % interval.
    const RESAMPLES: usize = 1_000;
    let values = sorted(values);
    if values.len() < 2 || !(0.0..1.0).contains(&level) {
        return None;
    }
    let mut random = WyRand::new(seed);
    let mut resample = vec![0.0; values.len()];
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for slot in &mut resample {
                *slot = values[random.index(values.len())];
            }
            resample.sort_by(f64::total_cmp);
            // The resample is never empty, so the median exists.
            quantile_of_sorted(&resample, 0.5).unwrap_or(values[0])
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let tail = (1.0 - level) / 2.0;
    Some(ConfidenceInterval {
        low: quantile_of_sorted(&medians, tail)?,
        high: quantile_of_sorted(&medians, 1.0 - tail)?,
    })
}

/// The relative range of repetitions: (maximum - minimum) / median, 0 for one value.
/// `None` if there is no finite value or the median is 0.
pub fn relative_spread(values: &[f64]) -> Option<f64> {
    let values = sorted(values);
    let median = quantile_of_sorted(&values, 0.5).filter(|median| *median != 0.0)?;
    Some(((values.last()? - values.first()?) / median).abs())
}

pub(super) fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values
}

pub(super) fn quantile_of_sorted(values: &[f64], q: f64) -> Option<f64> {
    let last = values.len().checked_sub(1)?;
    let position = q.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (position.floor() as usize, position.ceil() as usize);
    let (low, high) = (*values.get(below)?, *values.get(above)?);
    // `low + (high - low) * t` would overflow for values near both limits of `f64`.
    let t = position - below as f64;
    Some(if low == high { low } else { (low * (1.0 - t) + high * t).clamp(low, high) })
}
