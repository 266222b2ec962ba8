use proptest::prelude::*;

use super::*;

fn values() -> impl Strategy<Value = Vec<f64>> {
    proptest::collection::vec(1e-3..1e9f64, 2..12)
}

proptest! {
    #[test]
    fn at_most_half_of_the_values_are_on_either_side_of_the_median(values in values()) {
        let middle = median(&values).unwrap();
        let below = values.iter().filter(|value| **value < middle).count();
        let above = values.iter().filter(|value| **value > middle).count();
        prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
    }

    #[test]
    fn quantiles_are_monotonic_and_within_the_range(values in values(), a in 0.0..1.0f64, b in 0.0..1.0f64) {
        let (a, b) = (a.min(b), a.max(b));
        let (low, high) = (quantile(&values, a).unwrap(), quantile(&values, b).unwrap());
        prop_assert!(low <= high);
        prop_assert!(quantile(&values, 0.0).unwrap() <= low && high <= quantile(&values, 1.0).unwrap());
    }

    #[test]
    fn a_median_interval_is_reproducible_and_contains_the_median(values in values(), seed: u64) {
        let interval = median_interval(&values, 0.95, seed).unwrap();
        prop_assert_eq!(interval, median_interval(&values, 0.95, seed).unwrap());
        prop_assert!(interval.contains(median(&values).unwrap()), "{:?} of {:?}", interval, values);
    }

    #[test]
    fn swapping_the_sides_inverts_the_ratio(a in values(), b in values()) {
        let (there, interval) = geometric_mean_ratio(&a, &b, 0.95).unwrap();
        let (back, _) = geometric_mean_ratio(&b, &a, 0.95).unwrap();
        prop_assert!((there * back - 1.0).abs() < 1e-9);
        if let Some(interval) = interval {
            prop_assert!(interval.low <= there * (1.0 + 1e-12) && there <= interval.high * (1.0 + 1e-12));
        }
    }

    #[test]
    fn scaling_one_side_scales_the_ratio(a in values(), factor in 0.01..100.0f64) {
        let b: Vec<f64> = a.iter().map(|value| value * factor).collect();
        let (ratio, _) = geometric_mean_ratio(&a, &b, 0.95).unwrap();
        prop_assert!((ratio / factor - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_single_configuration_equals_the_plain_ratio(a in values(), b in values()) {
        let (ratio, interval) = geometric_mean_ratio(&a, &b, 0.95).unwrap();
        prop_assert_eq!(matched_geometric_mean_ratio(&[(a, b)], 0.95).unwrap(), (ratio, interval));
    }

    #[test]
    fn unrepeated_configurations_need_four_for_an_interval(factor in 0.5..2.0f64, count in 1..9usize) {
        let jitter = |at: usize| 1.0 + 0.001 * (at % 2) as f64;
        let configurations: Vec<(Vec<f64>, Vec<f64>)> =
            (1..=count).map(|at| (vec![at as f64], vec![at as f64 * factor * jitter(at)])).collect();
        let (ratio, interval) = matched_geometric_mean_ratio(&configurations, 0.95).unwrap();
        prop_assert!((ratio / factor - 1.0).abs() < 0.002);
        prop_assert_eq!(interval.is_some(), count >= 4);
    }

    #[test]
    fn the_slope_tolerates_an_outlier(rise in -100.0..100.0f64, start in -1e6..1e6f64, outlier in -1e9..1e9f64) {
        let mut points: Vec<(f64, f64)> = (0..9).map(|x| (f64::from(x), start + rise * f64::from(x))).collect();
        points[4].1 = outlier;
        prop_assert!((slope(&points).unwrap() - rise).abs() <= 1e-6 * (1.0 + start.abs()));
    }

    #[test]
    fn the_knee_is_where_two_straight_lines_meet(bend in 1..8usize, flat in 0.0..0.2f64) {
        let at = |x: usize| if x <= bend { x as f64 } else { bend as f64 + flat * (x - bend) as f64 };
        let points: Vec<(f64, f64)> = (0..10).map(|x| (x as f64, at(x))).collect();
        // A bend near the end is too shallow to distinguish from noise.
        prop_assume!((1.0 - flat) * (9 - bend) as f64 > 0.1 * points[9].1 * 9.0 / bend as f64);
        prop_assert_eq!(knee(&points), Some(bend));
    }

    #[test]
    fn no_statistic_panics_on_arbitrary_values(values in proptest::collection::vec(any::<f64>(), 0..9),
                                     others in proptest::collection::vec(any::<f64>(), 0..9)) {
        let points: Vec<(f64, f64)> = values.iter().copied().zip(others.iter().copied()).collect();
        let _ = (median(&values), median_interval(&values, 0.95, 1), relative_spread(&values));
        let _ = (geometric_mean_ratio(&values, &others, 0.95), knee(&points), slope(&points));
        prop_assert!(saturation(&points, 0.95).is_none_or(|index| index < points.len()));
    }
}

#[test]
fn a_single_repetition_has_no_interval() {
    assert_eq!(median_interval(&[5.0], 0.95, 1), None);
    let (ratio, interval) = geometric_mean_ratio(&[5.0], &[10.0, 10.1], 0.95).unwrap();
    assert!((ratio - 2.01).abs() < 0.01);
    assert_eq!(interval, None);
}

#[test]
fn welch_agrees_with_a_published_example() {
    // The two-sample case of the NIST/SEMATECH handbook, reduced: logarithms with means 1 and 2.
    // Logs {0.9, 1.0, 1.1} and {1.9, 2.0, 2.1}: variance 0.01 each, standard error sqrt(0.02/3) = 0.08165,
    // 4 degrees of freedom, t(0.975, 4) = 2.776445, half-width 0.226693.
    let a = [0.9f64.exp(), 1.0f64.exp(), 1.1f64.exp()];
    let b = [1.9f64.exp(), 2.0f64.exp(), 2.1f64.exp()];
    let (ratio, interval) = geometric_mean_ratio(&a, &b, 0.95).unwrap();
    let interval = interval.unwrap();
    assert!((ratio.ln() - 1.0).abs() < 1e-12);
    assert!((interval.low.ln() - (1.0 - 0.226_693)).abs() < 1e-5, "{interval:?}");
    assert!((interval.high.ln() - (1.0 + 0.226_693)).abs() < 1e-5, "{interval:?}");
}

#[test]
fn a_straight_line_has_no_knee() {
    let points: Vec<(f64, f64)> = (0..10).map(|x| (f64::from(x), 3.0 * f64::from(x))).collect();
    assert_eq!(knee(&points), None);
    assert_eq!(knee(&points[..2]), None);
}

#[test]
fn the_published_device_saturates_at_depth_64() {
    // ICPE'24 figure 1a: 4 KiB on one core, KIOPS at depths 1 to 256.
    let kiops = [18.2, 39.8, 64.2, 95.5, 141.7, 259.1, 371.4, 373.0, 358.4];
    let points: Vec<(f64, f64)> =
        kiops.iter().enumerate().map(|(index, kiops)| (index as f64, *kiops)).collect();
    assert_eq!(saturation(&points, 0.95), Some(6));
}
