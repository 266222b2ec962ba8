//! Compares two sides, each measured several times, in all cells of one metric at once.
//!
//! A replicate is a block of repetitions of a run, or a whole run if a side has several. The model of a
//! value's logarithm is `cell + side effect of the cell + effect of the replicate, common to all cells +
//! scatter of the cell`. The common effect is what makes two runs of the same program differ: temperature,
//! garbage collection, neighbours. It does not average out over cells, so the interval of each cell includes
//! it.

use std::collections::BTreeMap;

use lab_experiments::{Scatter, pooled_scatter};
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::compare::{ConfidenceInterval, t_reach};

/// How the replicates of both sides relate in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicateOrder {
    /// Blocks of two runs, one after the other. The runs may differ by more than their blocks do.
    SeparateRuns,
    /// Blocks of one run that alternate between the sides, or runs that were repeated.
    Exchangeable,
}

impl ReplicateOrder {
    /// The variance of the difference of both sides' common effects, in variances of a replicate's common
    /// effect.
    fn common_factor(self, a: f64, b: f64) -> f64 {
        match self {
            // If the common effect is a random walk, the means of two adjacent runs of R blocks differ with a
            // variance of q (2R² + 1) / 3R, and the blocks of a run scatter with q (R + 1) / 6, for a step
            // variance of q. The ratio is below 4; it is 3 R / (R + 1) for a steady drift, and 2 / R for
            // independent blocks.
            ReplicateOrder::SeparateRuns => 4.0,
            ReplicateOrder::Exchangeable => 1.0 / a + 1.0 / b,
        }
    }
}

/// The values of one metric of one cell: replicate and value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicatedCell {
    /// Values of the first side.
    pub a: Vec<(usize, f64)>,
    /// Values of the second side.
    pub b: Vec<(usize, f64)>,
}

/// The difference of both sides in one cell, or over all cells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplicateEffect {
    /// Geometric mean of the second side divided by that of the first.
    pub ratio: f64,
    /// The confidence interval of the ratio; `None` if a side has too few replicates.
    pub interval: Option<ConfidenceInterval>,
    /// Probability of a ratio at least this far from 1 if the sides are equal.
    pub p_value: Option<f64>,
}

/// The effects of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicateEffects {
    /// One for each cell, `None` where a side has no positive value.
    pub cells: Vec<Option<ReplicateEffect>>,
    /// The geometric mean of all cells' ratios.
    pub overall: Option<ReplicateEffect>,
}

/// A side of a cell in logarithms.
struct Side {
    logs: Vec<(usize, f64)>,
    mean: f64,
}

impl Side {
    fn new(values: &[(usize, f64)]) -> Option<Side> {
        let positive = values.iter().filter(|(_, value)| value.is_finite() && *value > 0.0);
        let logs: Vec<(usize, f64)> = positive.map(|(block, value)| (*block, value.ln())).collect();
        let mean = logs.iter().map(|(_, log)| log).sum::<f64>() / logs.len() as f64;
        (!logs.is_empty()).then_some(Side { logs, mean })
    }

    fn count(&self) -> f64 {
        self.logs.len() as f64
    }
}

/// The common effect of each replicate of a side: the median over the cells of the deviation from the cell's
/// mean. A median, because a single cell with an outlier is not a property of the replicate.
#[derive(Default)]
struct CommonEffects(BTreeMap<usize, f64>);

impl CommonEffects {
    fn new<'a>(sides: impl Iterator<Item = &'a Side>) -> CommonEffects {
        let mut deviations: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for side in sides.filter(|side| side.logs.len() > 1) {
            for (block, log) in &side.logs {
                deviations.entry(*block).or_default().push(log - side.mean);
            }
        }
        let median = |values: Vec<f64>| super::median(&values).unwrap_or(0.0);
        CommonEffects(deviations.into_iter().map(|(block, values)| (block, median(values))).collect())
    }

    /// Sum of squares around the mean, and degrees of freedom.
    fn squares(&self) -> (f64, f64) {
        let count = self.0.len() as f64;
        let mean = self.0.values().sum::<f64>() / count.max(1.0);
        (self.0.values().map(|effect| (effect - mean).powi(2)).sum(), (count - 1.0).max(0.0))
    }

    fn of(&self, block: usize) -> f64 {
        self.0.get(&block).copied().unwrap_or(0.0)
    }
}

/// Compares both sides in every cell, with intervals at `level` (0 to 1).
pub fn compare_replicates(cells: &[ReplicatedCell], order: ReplicateOrder, level: f64) -> ReplicateEffects {
    let sides: Vec<Option<(Side, Side)>> =
        cells.iter().map(|cell| Some((Side::new(&cell.a)?, Side::new(&cell.b)?))).collect();
    let both = || sides.iter().flatten();
    let (common_a, common_b) =
        (CommonEffects::new(both().map(|sides| &sides.0)), CommonEffects::new(both().map(|sides| &sides.1)));
    let ((squares_a, df_a), (squares_b, df_b)) = (common_a.squares(), common_b.squares());
    let common = Scatter {
        variance: (squares_a + squares_b) / (df_a + df_b).max(1.0),
        degrees_of_freedom: df_a + df_b,
    };
    let own: Vec<Scatter> = own_scatter(&sides, &common_a, &common_b);
    let pooled = pooled_scatter(&own);
    let mut total = (0.0f64, 0.0f64, 0.0f64);
    let effects: Vec<Option<ReplicateEffect>> = sides
        .iter()
        .zip(pooled)
        .map(|(sides, scatter)| {
            let (a, b) = sides.as_ref()?;
            let difference = b.mean - a.mean;
            let own = part(scatter, 1.0 / a.count() + 1.0 / b.count());
            let shared = part(common, order.common_factor(a.count(), b.count()));
            total = (total.0 + difference, total.1 + own.variance, total.2 + 1.0);
            // One measurement of a side decides nothing, even if others show how much it may scatter.
            let repeated = order == ReplicateOrder::Exchangeable || (a.count() > 1.0 && b.count() > 1.0);
            Some(effect(difference, if repeated { vec![own, shared] } else { Vec::new() }, level))
        })
        .collect();
    let (sum, variance, count) = total;
    let overall = (count > 0.0).then(|| {
        let (replicates_a, replicates_b) = (common_a.0.len().max(1), common_b.0.len().max(1));
        let own = Scatter { variance: variance / count.powi(2), degrees_of_freedom: count.max(2.0) };
        let factor = order.common_factor(replicates_a as f64, replicates_b as f64);
        let known = common.degrees_of_freedom > 0.0;
        effect(sum / count, if known { vec![own, part(common, factor)] } else { Vec::new() }, level)
    });
    ReplicateEffects { cells: effects, overall }
}

/// The scatter of each cell around its means and the common effects. With few cells, the common effect cannot
/// be told from the cells' own scatter and stays in it.
fn own_scatter(
    sides: &[Option<(Side, Side)>],
    common_a: &CommonEffects,
    common_b: &CommonEffects,
) -> Vec<Scatter> {
    const CELLS_MIN: usize = 4;
    let count = sides.iter().flatten().count();
    let separable = count >= CELLS_MIN;
    let squares = |side: &Side, common: &CommonEffects| {
        let deviation =
            |(block, log): &(usize, f64)| log - side.mean - if separable { common.of(*block) } else { 0.0 };
        side.logs.iter().map(|log| deviation(log).powi(2)).sum::<f64>()
    };
    let of = |sides: &Option<(Side, Side)>| {
        let Some((a, b)) = sides else { return Scatter { variance: 0.0, degrees_of_freedom: 0.0 } };
        let lost = if separable { 1.0 - 1.0 / count as f64 } else { 1.0 };
        let degrees_of_freedom = (a.count() + b.count() - 2.0) * lost;
        let squares = squares(a, common_a) + squares(b, common_b);
        Scatter { variance: squares / degrees_of_freedom.max(f64::MIN_POSITIVE), degrees_of_freedom }
    };
    sides.iter().map(of).collect()
}

fn part(scatter: Scatter, factor: f64) -> Scatter {
    Scatter { variance: scatter.variance * factor, ..scatter }
}

/// An effect whose variance is the sum of `parts`; without parts, or if one of them is unknown, it has no
/// interval.
fn effect(difference: f64, parts: Vec<Scatter>, level: f64) -> ReplicateEffect {
    let ratio = difference.exp();
    let unknown = ReplicateEffect { ratio, interval: None, p_value: None };
    if parts.is_empty() || parts.iter().any(|part| part.degrees_of_freedom <= 0.0) {
        return unknown;
    }
    let variance: f64 = parts.iter().map(|part| part.variance).sum();
    // Welch and Satterthwaite.
    let weights: f64 = parts.iter().map(|part| part.variance.powi(2) / part.degrees_of_freedom).sum();
    let degrees_of_freedom = if weights > 0.0 { variance.powi(2) / weights } else { 1.0 };
    let error = variance.sqrt();
    let (Some(reach), Ok(distribution)) =
        (t_reach(level, degrees_of_freedom), StudentsT::new(0.0, 1.0, degrees_of_freedom))
    else {
        return unknown;
    };
    let (low, high) = ((difference - reach * error).exp(), (difference + reach * error).exp());
    if !low.is_finite() || !high.is_finite() {
        return unknown;
    }
    let p_value = match error > 0.0 {
        true => 2.0 * distribution.cdf(-(difference / error).abs()),
        false => f64::from(difference == 0.0),
    };
    ReplicateEffect { ratio, interval: Some(ConfidenceInterval { low, high }), p_value: Some(p_value) }
}

/// The p-values corrected for their number by Benjamini and Hochberg: among those that are at most `x`, a
/// share of at most `x` is expected to be wrong.
pub fn corrected_p_values(p_values: &[f64]) -> Vec<f64> {
    let count = p_values.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|a, b| p_values[*a].total_cmp(&p_values[*b]));
    let mut corrected = vec![1.0; count];
    let mut least = 1.0f64;
    for (rank, index) in order.into_iter().enumerate().rev() {
        least = least.min(p_values[index] * count as f64 / (rank + 1) as f64);
        corrected[index] = least;
    }
    corrected
}

#[cfg(test)]
mod tests;
