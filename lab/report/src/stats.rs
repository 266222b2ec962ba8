//! Robust statistics: medians, confidence intervals, knees and slopes.
//!
//! Storage measurements have few repetitions and long tails. The location estimate is therefore the median,
//! with a bootstrap confidence interval (fixed seed, so the same data always gives the same digits). Two runs
//! are compared by the ratio of their geometric means, with an interval that covers the variation between
//! runs. Slopes use the Theil-Sen estimator.
//!
//! All functions ignore values that are not finite: a failed cell has no number.

mod compare;
mod curve;
mod quantiles;
mod replicates;
#[cfg(test)]
mod tests;

pub use compare::{ConfidenceInterval, geometric_mean_ratio, matched_geometric_mean_ratio, t_reach};
pub use curve::{knee, saturation, slope};
pub use quantiles::{median, median_interval, quantile, relative_spread};
pub use replicates::{
    ReplicateEffect, ReplicateEffects, ReplicateOrder, ReplicatedCell, compare_replicates, corrected_p_values,
};
