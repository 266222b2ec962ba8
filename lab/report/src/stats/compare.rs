//! Whether sets of repetitions differ.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// From `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end; never below `low`.
    pub high: f64,
}

impl Interval {
    /// Whether `value` lies inside.
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// Both ends divided by `per`, which is positive.
    #[must_use]
    pub fn per(&self, per: f64) -> Interval {
        Interval { low: self.low / per, high: self.high / per }
    }
}

/// `b` over `a`: the ratio of their geometric means, and Welch's interval of it at `level`.
///
/// The logarithms are compared, because what disturbs a measurement scales it. The interval is `None`
/// where either side has fewer than two positive values. `None` altogether where a side has none.
pub fn ratio_of_means(a: &[f64], b: &[f64], level: f64) -> Option<(f64, Option<Interval>)> {
    let sides = [(Logs::of(a)?, Logs::of(b)?)];
    let middle = sides[0].1.mean - sides[0].0.mean;
    Some((middle.exp(), from_repetitions(&sides).and_then(|error| error.around(middle, level))))
}

/// `b` over `a` where both were measured in several situations: the geometric mean of the situations'
/// ratios, and its interval at `level`.
///
/// Where every situation was repeated on both sides the interval comes from the repetitions. Where not,
/// and there are at least four situations, it comes from how far the situations disagree. `None`
/// otherwise: then nothing says how far chance reaches. `None` altogether without a situation that has
/// a positive value on both sides.
pub fn ratio_over_situations(
    situations: &[(Vec<f64>, Vec<f64>)],
    level: f64,
) -> Option<(f64, Option<Interval>)> {
    let sides: Vec<(Logs, Logs)> =
        situations.iter().filter_map(|(a, b)| Some((Logs::of(a)?, Logs::of(b)?))).collect();
    if sides.is_empty() {
        return None;
    }
    let middle = sides.iter().map(|(a, b)| b.mean - a.mean).sum::<f64>() / sides.len() as f64;
    let error = from_repetitions(&sides).or_else(|| from_disagreement(&sides, middle));
    Some((middle.exp(), error.and_then(|error| error.around(middle, level))))
}

/// How far a difference of logarithms may be off.
struct StandardError {
    size: f64,
    freedom: f64,
}

impl StandardError {
    /// The interval of the ratio around the logarithm `middle`.
    fn around(&self, middle: f64, level: f64) -> Option<Interval> {
        let reach = if self.size == 0.0 {
            0.0
        } else {
            StudentsT::new(0.0, 1.0, self.freedom).ok()?.inverse_cdf(0.5 + level / 2.0) * self.size
        };
        let (low, high) = ((middle - reach).exp(), (middle + reach).exp());
        (low.is_finite() && high.is_finite()).then_some(Interval { low, high })
    }
}

/// Welch's error and Satterthwaite's freedom. `None` where any side was measured once.
fn from_repetitions(sides: &[(Logs, Logs)]) -> Option<StandardError> {
    let situations = sides.len() as f64;
    let (mut sum, mut weights) = (0.0, 0.0);
    for side in sides.iter().flat_map(|(a, b)| [a, b]) {
        let part = side.variance? / side.count / situations.powi(2);
        sum += part;
        weights += part.powi(2) / (side.count - 1.0);
    }
    let freedom = if weights > 0.0 { sum.powi(2) / weights } else { 1.0 };
    Some(StandardError { size: sum.sqrt(), freedom })
}

fn from_disagreement(sides: &[(Logs, Logs)], middle: f64) -> Option<StandardError> {
    /// With fewer the quantile of t is so large that the interval says nothing.
    const SITUATIONS_MIN: usize = 4;
    if sides.len() < SITUATIONS_MIN {
        return None;
    }
    let freedom = sides.len() as f64 - 1.0;
    let squares: f64 = sides.iter().map(|(a, b)| (b.mean - a.mean - middle).powi(2)).sum();
    Some(StandardError { size: (squares / freedom / sides.len() as f64).sqrt(), freedom })
}

/// Of the logarithms of some positive values.
struct Logs {
    count: f64,
    mean: f64,
    variance: Option<f64>,
}

impl Logs {
    fn of(values: &[f64]) -> Option<Logs> {
        let logs: Vec<f64> = values
            .iter()
            .filter(|value| value.is_finite() && **value > 0.0)
            .map(|value| value.ln())
            .collect();
        let count = logs.len() as f64;
        if logs.is_empty() {
            return None;
        }
        let mean = logs.iter().sum::<f64>() / count;
        let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
        Some(Logs { count, mean, variance: (logs.len() > 1).then(|| squares / (count - 1.0)) })
    }
}
