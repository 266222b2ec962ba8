//! Maps values to pixels.

/// The mapping of values to positions on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisScale {
    /// Linear; starts at 0 if all values are positive.
    Linear,
    /// Linear from the minimum of the data, for quantities whose distance from 0 is meaningless.
    LinearFromMin,
    /// Logarithmic with ticks at powers of ten.
    Log10,
    /// Logarithmic with ticks at powers of two: queue depths, processes.
    Log2,
    /// Equal steps between the values that occur, as the papers space 0, 1, 2, 4, … 32.
    Ordinal,
}

/// A scale fitted to the range of its data.
pub(super) struct FittedAxis {
    scale: AxisScale,
    low: f64,
    high: f64,
    /// The distinct values, ascending; for `Ordinal` only.
    steps: Vec<f64>,
    from_px: f64,
    to_px: f64,
}

impl FittedAxis {
    /// Fits `scale` to `values` and the pixel range `px`. `None` if no value can be shown.
    pub(super) fn new(
        scale: AxisScale,
        values: impl Iterator<Item = f64>,
        px: (f64, f64),
    ) -> Option<FittedAxis> {
        let positive = matches!(scale, AxisScale::Log10 | AxisScale::Log2);
        let mut values: Vec<f64> =
            values.filter(|value| value.is_finite() && (!positive || *value > 0.0)).collect();
        values.sort_by(f64::total_cmp);
        let (mut low, mut high) = (*values.first()?, *values.last()?);
        let mut steps = Vec::new();
        match scale {
            AxisScale::Linear | AxisScale::LinearFromMin => {
                if low > 0.0 && scale == AxisScale::Linear {
                    low = 0.0;
                }
                if high <= low {
                    high = low + 1.0;
                }
                let step = nice_step((high - low) / 5.0);
                high = (high / step - 1e-9).ceil() * step;
                low = (low / step + 1e-9).floor() * step;
            }
            AxisScale::Log10 => {
                (low, high) = (low / 1.06, high * 1.06);
                if high / low < 3.0 {
                    (low, high) = (low / 1.8, high * 1.8);
                }
            }
            AxisScale::Log2 => {
                if low == high {
                    (low, high) = (low / 2.0, high * 2.0);
                }
            }
            AxisScale::Ordinal => {
                values.dedup();
                steps = values;
            }
        }
        if positive {
            // Widened limits may be 0 or infinite, between which there is no end of ticks.
            low = low.clamp(f64::MIN_POSITIVE, f64::MAX / 4.0);
            high = if high <= low { 2.0 * low } else { high.min(f64::MAX) };
        }
        Some(FittedAxis { scale, low, high, steps, from_px: px.0, to_px: px.1 })
    }

    /// The pixel position of `value`; `None` if it is not on the scale.
    pub(super) fn position(&self, value: f64) -> Option<f64> {
        let fraction = match self.scale {
            AxisScale::Linear | AxisScale::LinearFromMin => (value - self.low) / (self.high - self.low),
            AxisScale::Log10 | AxisScale::Log2 => (value / self.low).ln() / (self.high / self.low).ln(),
            AxisScale::Ordinal if self.steps.len() == 1 => 0.5,
            AxisScale::Ordinal => {
                let index = self.steps.iter().position(|step| *step == value)?;
                index as f64 / (self.steps.len() - 1) as f64
            }
        };
        fraction.is_finite().then_some(self.from_px + fraction * (self.to_px - self.from_px))
    }

    /// The grid values, each with whether it has a label; at most about `most` labels.
    pub(super) fn ticks(&self, most: usize) -> Vec<(f64, bool)> {
        match self.scale {
            AxisScale::Linear | AxisScale::LinearFromMin => {
                let step = nice_step((self.high - self.low) / 5.0);
                let first = (self.low / step).round() as i64;
                let last = (self.high / step).round() as i64;
                (first..=last.min(first.saturating_add(20)))
                    .map(|index| (index as f64 * step, true))
                    .collect()
            }
            AxisScale::Log10 => self.log_ticks(),
            AxisScale::Log2 => {
                let first = self.low.log2().ceil() as i32;
                let last = self.high.log2().floor() as i32;
                let every = ((last - first) / most.max(1) as i32 + 1).max(1);
                (first..=last).map(|power| (2f64.powi(power), (power - first) % every == 0)).collect()
            }
            AxisScale::Ordinal => {
                let every = self.steps.len() / most.max(1) + 1;
                let labelled = |index: usize| index.is_multiple_of(every);
                self.steps.iter().enumerate().map(|(index, step)| (*step, labelled(index))).collect()
            }
        }
    }

    fn log_ticks(&self) -> Vec<(f64, bool)> {
        let decades = (self.high / self.low).log10();
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let mut ticks = Vec::new();
        for power in first..=last {
            for digit in 1..10 {
                let value = f64::from(digit) * 10f64.powi(power);
                if value < self.low || value > self.high {
                    continue;
                }
                let labelled = match digit {
                    1 => true,
                    2 | 5 => decades < 2.2,
                    3 | 7 => decades < 0.8,
                    _ => false,
                };
                // Minor grid lines would be too dense beyond four decades.
                if labelled || decades < 4.0 || digit == 1 {
                    ticks.push((value, labelled));
                }
            }
        }
        ticks
    }
}

/// The smallest of 1, 2 or 5 times a power of ten that is not below `rough`.
fn nice_step(rough: f64) -> f64 {
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough * 0.999);
    let step = factor.unwrap_or(10.0) * power;
    if step.is_finite() && step > 0.0 { step } else { 1.0 }
}
