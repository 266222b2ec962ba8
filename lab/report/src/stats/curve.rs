//! Knee, saturation point and slope of a curve.

use super::quantiles::quantile_of_sorted;

/// Index of the knee of a concave rising curve: where throughput stops scaling with queue depth.
///
/// Uses the Kneedle method (Satopää et al., 2011): normalise both axes to 0..1 and take the point farthest
/// above the diagonal. `points` must be in ascending order of x. `None` for fewer than three points, for a
/// constant curve, or if no point is more than 0.05 above the diagonal: a straight line has no knee.
pub fn knee(points: &[(f64, f64)]) -> Option<usize> {
    /// Noise of a few per cent can lift a point by less than this.
    const HEIGHT_MIN: f64 = 0.05;
    let (first, last) = (points.first()?, points.last()?);
    let low = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let high = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    let (width, height) = (last.0 - first.0, high - low);
    let valid = width.is_finite() && height.is_finite() && width > 0.0 && height > 0.0;
    if points.len() < 3 || !valid {
        return None;
    }
    let above = |point: &(f64, f64)| (point.1 - low) / height - (point.0 - first.0) / width;
    let heights: Vec<f64> = points.iter().map(above).collect();
    let (best, most) =
        heights.iter().enumerate().fold((0, f64::NEG_INFINITY), |(best, most), (index, height)| {
            if *height > most { (index, *height) } else { (best, most) }
        });
    (most > HEIGHT_MIN && best + 1 < points.len()).then_some(best)
}

/// Index of the first point whose y reaches `fraction` of the maximum: the saturation point.
/// `None` if there are no points or the maximum is not positive.
pub fn saturation(points: &[(f64, f64)], fraction: f64) -> Option<usize> {
    let high = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    if !high.is_finite() || high <= 0.0 {
        return None;
    }
    points.iter().position(|point| point.1 >= high * fraction)
}

/// The slope by the Theil-Sen estimator: the median of the slopes of all pairs of points. It tolerates up to
/// a quarter of outliers. `None` if all x are equal.
pub fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let mut slopes = Vec::new();
    for (index, a) in points.iter().enumerate() {
        for b in &points[index + 1..] {
            let slope = (b.1 - a.1) / (b.0 - a.0);
            if a.0 != b.0 && slope.is_finite() {
                slopes.push(slope);
            }
        }
    }
    slopes.sort_by(f64::total_cmp);
    quantile_of_sorted(&slopes, 0.5)
}
