//! Statistics that a few outliers cannot bend: medians, intervals, knees and slopes.
//!
//! A storage measurement has few repetitions and a long tail. So the middle is the median, its interval
//! comes from resampling with a fixed seed (the same data always gives the same digits), two runs are
//! compared by the ratio of their geometric means with Welch's interval, and a slope is the median of
//! all pairwise slopes.
//!
//! Values that are not finite are left out everywhere: a cell that failed has no number.

mod compare;
mod curve;
mod middle;
#[cfg(test)]
mod tests;

pub use compare::{Interval, ratio_of_means, ratio_over_situations};
pub use curve::{knee, saturation, slope};
pub use middle::{median, median_interval, quantile, relative_spread};
