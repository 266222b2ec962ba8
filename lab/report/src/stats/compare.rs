//! Whether two sets of repetitions differ.

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
}

/// `b` over `a`: the ratio of their geometric means, and Welch's interval of it at `level`.
///
/// The logarithms are compared, because what disturbs a measurement scales it. The interval is `None`
/// where either side has fewer than two positive values. `None` altogether where a side has none.
pub fn ratio_of_means(a: &[f64], b: &[f64], level: f64) -> Option<(f64, Option<Interval>)> {
    let (a, b) = (Logs::of(a)?, Logs::of(b)?);
    let difference = b.mean - a.mean;
    let interval = a.variance.zip(b.variance).and_then(|(var_a, var_b)| {
        let (part_a, part_b) = (var_a / a.count, var_b / b.count);
        let error = (part_a + part_b).sqrt();
        if error == 0.0 {
            return Some(Interval { low: difference.exp(), high: difference.exp() });
        }
        let freedom =
            (part_a + part_b).powi(2) / (part_a.powi(2) / (a.count - 1.0) + part_b.powi(2) / (b.count - 1.0));
        let reach = StudentsT::new(0.0, 1.0, freedom).ok()?.inverse_cdf(0.5 + level / 2.0) * error;
        let (low, high) = ((difference - reach).exp(), (difference + reach).exp());
        (low.is_finite() && high.is_finite()).then_some(Interval { low, high })
    });
    Some((difference.exp(), interval))
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
