//! Tests whether sets of repetitions differ.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// The closed interval from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ConfidenceInterval {
    /// The lower bound.
    pub low: f64,
    /// The upper bound; never below `low`.
    pub high: f64,
}

impl ConfidenceInterval {
    /// Whether `value` is within the bounds, both included.
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    /// Both bounds divided by `divisor`, which must be positive.
    #[must_use]
    pub fn divided_by(&self, divisor: f64) -> ConfidenceInterval {
        ConfidenceInterval { low: self.low / divisor, high: self.high / divisor }
    }
}

/// The ratio of the geometric means, `b / a`, with Welch's confidence interval at `level` (0 to 1).
///
/// The test uses logarithms because disturbances of a measurement are multiplicative. The interval is `None`
/// if either side has fewer than two positive values; the result is `None` if a side has no positive value.
pub fn geometric_mean_ratio(a: &[f64], b: &[f64], level: f64) -> Option<(f64, Option<ConfidenceInterval>)> {
    let sides = [(LogSample::new(a)?, LogSample::new(b)?)];
    let mean_log = sides[0].1.mean - sides[0].0.mean;
    Some((
        mean_log.exp(),
        error_from_repetitions(&sides).and_then(|error| error.interval_around(mean_log, level)),
    ))
}

/// The ratio `b / a` over matched configurations: the geometric mean of the ratios of all configurations, with
/// its confidence interval at `level` (0 to 1). Each element of `configurations` holds the repetitions of `a`
/// and of `b`.
///
/// If both sides of every configuration have repetitions, the interval is derived from the variance of the
/// repetitions. Otherwise, with at least four configurations, it is derived from the variance between
/// configurations; with fewer the interval is `None`. The result is `None` if no configuration has a positive
/// value on both sides.
pub fn matched_geometric_mean_ratio(
    configurations: &[(Vec<f64>, Vec<f64>)],
    level: f64,
) -> Option<(f64, Option<ConfidenceInterval>)> {
    let sides: Vec<(LogSample, LogSample)> =
        configurations.iter().filter_map(|(a, b)| Some((LogSample::new(a)?, LogSample::new(b)?))).collect();
    if sides.is_empty() {
        return None;
    }
    let mean_log = sides.iter().map(|(a, b)| b.mean - a.mean).sum::<f64>() / sides.len() as f64;
    let error = error_from_repetitions(&sides).or_else(|| error_between_configurations(&sides, mean_log));
    Some((mean_log.exp(), error.and_then(|error| error.interval_around(mean_log, level))))
}

/// Half the width of a confidence interval at `level` (0 to 1), in standard errors: a quantile of Student's t.
pub fn t_reach(level: f64, degrees_of_freedom: f64) -> Option<f64> {
    Some(StudentsT::new(0.0, 1.0, degrees_of_freedom).ok()?.inverse_cdf(0.5 + level / 2.0))
}

/// The standard error of a difference of mean logarithms.
struct StandardError {
    size: f64,
    degrees_of_freedom: f64,
}

impl StandardError {
    /// The confidence interval of the ratio whose logarithm is `mean_log`.
    fn interval_around(&self, mean_log: f64, level: f64) -> Option<ConfidenceInterval> {
        let reach = if self.size == 0.0 { 0.0 } else { t_reach(level, self.degrees_of_freedom)? * self.size };
        let (low, high) = ((mean_log - reach).exp(), (mean_log + reach).exp());
        (low.is_finite() && high.is_finite()).then_some(ConfidenceInterval { low, high })
    }
}

/// Welch's standard error with Welch-Satterthwaite degrees of freedom. `None` if any side has one repetition.
fn error_from_repetitions(sides: &[(LogSample, LogSample)]) -> Option<StandardError> {
    let configurations = sides.len() as f64;
    let (mut sum, mut weights) = (0.0, 0.0);
    for side in sides.iter().flat_map(|(a, b)| [a, b]) {
        let part = side.variance? / side.count / configurations.powi(2);
        sum += part;
        weights += part.powi(2) / (side.count - 1.0);
    }
    let degrees_of_freedom = if weights > 0.0 { sum.powi(2) / weights } else { 1.0 };
    Some(StandardError { size: sum.sqrt(), degrees_of_freedom })
}

fn error_between_configurations(sides: &[(LogSample, LogSample)], mean_log: f64) -> Option<StandardError> {
    /// With fewer, the quantile of the t distribution is so large that the interval is useless.
    const CONFIGURATIONS_MIN: usize = 4;
    if sides.len() < CONFIGURATIONS_MIN {
        return None;
    }
    let degrees_of_freedom = sides.len() as f64 - 1.0;
    let squares: f64 = sides.iter().map(|(a, b)| (b.mean - a.mean - mean_log).powi(2)).sum();
    Some(StandardError {
        size: (squares / degrees_of_freedom / sides.len() as f64).sqrt(),
        degrees_of_freedom,
    })
}

/// Count, mean and variance of the logarithms of the positive values of a sample.
struct LogSample {
    count: f64,
    mean: f64,
    variance: Option<f64>,
}

impl LogSample {
    fn new(values: &[f64]) -> Option<LogSample> {
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
        Some(LogSample { count, mean, variance: (logs.len() > 1).then(|| squares / (count - 1.0)) })
    }
}
