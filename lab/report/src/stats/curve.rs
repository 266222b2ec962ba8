//! Where a curve bends, and how it rises.

use super::middle::quantile_of_sorted;

/// Index of the knee of a rising curve that flattens: where throughput stops following depth.
///
/// Kneedle's idea (Satopää and others, 2011): scale both axes to 0..1 and take the point that lies highest
/// above the diagonal. `points` are in ascending order of x. `None` below three points, where nothing
/// rises, or where no point lies more than a twentieth above the diagonal: a straight line has no knee.
pub fn knee(points: &[(f64, f64)]) -> Option<usize> {
    /// What noise of a few per cent lifts a point by is no knee.
    const LEAST_HEIGHT: f64 = 0.05;
    let (first, last) = (points.first()?, points.last()?);
    let low = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let high = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    let (width, height) = (last.0 - first.0, high - low);
    let sound = width.is_finite() && height.is_finite() && width > 0.0 && height > 0.0;
    if points.len() < 3 || !sound {
        return None;
    }
    let above = |point: &(f64, f64)| (point.1 - low) / height - (point.0 - first.0) / width;
    let heights: Vec<f64> = points.iter().map(above).collect();
    let (best, most) =
        heights.iter().enumerate().fold((0, f64::NEG_INFINITY), |(best, most), (index, height)| {
            if *height > most { (index, *height) } else { (best, most) }
        });
    (most > LEAST_HEIGHT && best + 1 < points.len()).then_some(best)
}

/// Index of the first point whose y reaches `fraction` of the largest: where more no longer helps.
/// `None` where there is no point or the largest is not positive.
pub fn saturation(points: &[(f64, f64)], fraction: f64) -> Option<usize> {
    let high = points.iter().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);
    if !high.is_finite() || high <= 0.0 {
        return None;
    }
    points.iter().position(|point| point.1 >= high * fraction)
}

/// How much y rises as x rises by one: the median of the slopes of all pairs (Theil and Sen), which a
/// quarter of wild points cannot move. `None` where no two x differ.
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
