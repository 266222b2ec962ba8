//! The scatter of repetitions, pooled over cells.
//!
//! A cell with two or three repetitions tells little about its own scatter. The cells of a run resemble each other, so
//! their variances are combined: a scaled inverse chi-squared distribution is fitted to all of them, and each cell's
//! variance is moved towards it (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential
//! expression", section 6.2). The fit measures how different the cells are: if they differ much, each keeps its own.
//! A cell that scatters more than the others is never given less than its own variance.

/// An estimate of a variance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scatter {
    /// The variance.
    pub variance: f64,
    /// Degrees of freedom of the estimate; 0 if nothing is known.
    pub degrees_of_freedom: f64,
}

/// With fewer cells, their diversity cannot be estimated.
const CELLS_MIN: usize = 4;
/// Smallest variance of a logarithm: a standard deviation of 0.001 %, below every clock.
const VARIANCE_MIN: f64 = 1e-10;

/// Pools the variances of cells. Elements without degrees of freedom get the common variance, or none if there are
/// too few others.
pub fn pooled_scatter(own: &[Scatter]) -> Vec<Scatter> {
    let floor = |scatter: &Scatter| Scatter { variance: scatter.variance.max(VARIANCE_MIN), ..*scatter };
    let own: Vec<Scatter> = own.iter().map(floor).collect();
    let known: Vec<Scatter> = own.iter().copied().filter(|one| one.degrees_of_freedom > 0.0).collect();
    if known.len() < CELLS_MIN {
        return own;
    }
    let common = common_scatter(&known);
    let total: f64 = known.iter().map(|one| one.degrees_of_freedom).sum();
    let pool = |one: &Scatter| {
        let degrees_of_freedom = common.degrees_of_freedom + one.degrees_of_freedom;
        let sum = common.degrees_of_freedom * common.variance + one.degrees_of_freedom * one.variance;
        let own = if one.degrees_of_freedom > 0.0 { one.variance } else { 0.0 };
        Scatter {
            variance: (sum / degrees_of_freedom).max(own),
            degrees_of_freedom: degrees_of_freedom.min(total),
        }
    };
    own.iter().map(pool).collect()
}

/// The distribution from which the cells' variances seem to be drawn: its scale and its degrees of freedom, which are
/// large if the cells are alike.
fn common_scatter(known: &[Scatter]) -> Scatter {
    let count = known.len() as f64;
    let half = |one: &Scatter| one.degrees_of_freedom / 2.0;
    let logs: Vec<f64> =
        known.iter().map(|one| one.variance.ln() - digamma(half(one)) + half(one).ln()).collect();
    let mean = logs.iter().sum::<f64>() / count;
    let spread = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let expected = known.iter().map(|one| trigamma(half(one))).sum::<f64>() / count;
    let total: f64 = known.iter().map(|one| one.degrees_of_freedom).sum();
    let excess = spread - expected;
    if excess <= 0.0 {
        return Scatter { variance: mean.exp(), degrees_of_freedom: total };
    }
    let half = trigamma_inverse(excess);
    Scatter {
        variance: (mean + digamma(half) - half.ln()).exp(),
        degrees_of_freedom: (2.0 * half).min(total),
    }
}

/// The derivative of the logarithm of the gamma function, for positive `x` (Abramowitz and Stegun 6.3.5, 6.3.18).
fn digamma(mut x: f64) -> f64 {
    let mut sum = 0.0;
    while x < 10.0 {
        sum -= 1.0 / x;
        x += 1.0;
    }
    let square = 1.0 / (x * x);
    sum + x.ln() - 0.5 / x - square * (1.0 / 12.0 - square * (1.0 / 120.0 - square / 252.0))
}

/// The derivative of [`digamma`] (Abramowitz and Stegun 6.4.6, 6.4.12).
fn trigamma(mut x: f64) -> f64 {
    let mut sum = 0.0;
    while x < 10.0 {
        sum += 1.0 / (x * x);
        x += 1.0;
    }
    let square = 1.0 / (x * x);
    sum + 1.0 / x + square / 2.0 + square / x * (1.0 / 6.0 - square * (1.0 / 30.0 - square / 42.0))
}

/// The positive number whose [`trigamma`] is `y`, by bisection of its logarithm; trigamma falls monotonically.
fn trigamma_inverse(y: f64) -> f64 {
    let (mut low, mut high) = (-12.0f64, 12.0f64);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if trigamma(middle.exp()) > y { low = middle } else { high = middle }
    }
    ((low + high) / 2.0).exp()
}

#[cfg(test)]
mod tests {
    use random::WyRand;

    use super::*;

    /// The sample variance of `count` numbers with this deviation.
    fn sample(random: &mut WyRand, deviation: f64, count: usize) -> Scatter {
        let values: Vec<f64> = (0..count).map(|_| deviation * random.normal()).collect();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let degrees_of_freedom = count as f64 - 1.0;
        Scatter { variance: squares / degrees_of_freedom, degrees_of_freedom }
    }

    #[test]
    fn polygamma_functions_agree_with_tables() {
        // Abramowitz and Stegun, tables 6.1 and 6.2, and the known values at 1/2.
        assert!((digamma(1.0) + 0.577_215_664_9).abs() < 1e-9);
        assert!((digamma(0.5) + 1.963_510_026_0).abs() < 1e-9);
        assert!((trigamma(1.0) - 1.644_934_066_8).abs() < 1e-9);
        assert!((trigamma(0.5) - 4.934_802_200_5).abs() < 1e-9);
        for x in [0.3, 1.0, 4.5, 70.0] {
            assert!((trigamma_inverse(trigamma(x)) / x - 1.0).abs() < 1e-6, "{x}");
        }
    }

    #[test]
    fn cells_that_are_alike_are_pooled() {
        let mut random = WyRand::new(1);
        let own: Vec<Scatter> = (0..200).map(|_| sample(&mut random, 0.02, 3)).collect();
        let pooled = pooled_scatter(&own);
        // A cell alone has two.
        assert!(pooled.iter().all(|one| one.degrees_of_freedom > 6.0), "{:?}", pooled[0]);
        let low = pooled.iter().map(|one| one.variance).fold(f64::INFINITY, f64::min);
        assert!((1.6e-4..4e-4).contains(&low), "{low}: no cell has far less than the common variance");
    }

    #[test]
    fn cells_that_differ_keep_their_own_scatter() {
        let mut random = WyRand::new(2);
        let own: Vec<Scatter> =
            (0..60).map(|at| sample(&mut random, if at % 2 == 0 { 0.001 } else { 0.1 }, 5)).collect();
        let pooled = pooled_scatter(&own);
        for (own, pooled) in own.iter().zip(&pooled) {
            assert!(pooled.variance >= own.variance);
            assert!(pooled.degrees_of_freedom < 8.0, "{pooled:?}");
        }
        let quiet = pooled.iter().step_by(2).map(|one| one.variance).sum::<f64>() / 30.0;
        assert!(quiet < 1e-3, "{quiet}");
    }

    #[test]
    fn a_single_wild_cell_is_not_tamed() {
        let mut random = WyRand::new(3);
        let mut own: Vec<Scatter> = (0..40).map(|_| sample(&mut random, 0.01, 3)).collect();
        own[7].variance = 0.25;
        assert!(pooled_scatter(&own)[7].variance >= 0.25);
    }

    #[test]
    fn an_unrepeated_cell_gets_the_common_scatter_if_there_is_one() {
        let mut random = WyRand::new(4);
        let mut own: Vec<Scatter> = (0..40).map(|_| sample(&mut random, 0.01, 3)).collect();
        own.push(Scatter { variance: 0.0, degrees_of_freedom: 0.0 });
        let last = pooled_scatter(&own)[40];
        assert!((last.variance / 1e-4 - 1.0).abs() < 0.5 && last.degrees_of_freedom > 2.0, "{last:?}");
        let few = pooled_scatter(&own[38..]);
        assert_eq!(few[2].degrees_of_freedom, 0.0);
        assert!(pooled_scatter(&[]).is_empty());
        // Equal values have no scatter, which must not become infinite certainty.
        let equal = [Scatter { variance: 0.0, degrees_of_freedom: 2.0 }; 5];
        assert!(pooled_scatter(&equal).iter().all(|one| one.variance > 0.0 && one.variance.is_finite()));
    }
}
