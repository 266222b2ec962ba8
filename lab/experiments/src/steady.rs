//! Preconditioning, and when a device is in its steady state.
//!
//! A flash device that was just erased writes faster than it will for the rest of its life. It is
//! written over until the last rounds are alike, as the SNIA's performance test specification asks:
//! within a window of five rounds the spread is at most a fifth of their mean, and the line of best
//! fit rises or falls by at most a tenth of it.

/// Rounds of a window.
pub const WINDOW: usize = 5;
/// Most rounds before the device is taken as it is, as in the specification.
pub const ROUNDS_MAX: usize = 25;
/// Most spread within the window, in percent of its mean.
const RANGE_PCT_MAX: f64 = 20.0;
/// Most drift along the window, in percent of its mean.
const SLOPE_PCT_MAX: f64 = 10.0;

/// What the last rounds say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Largest less smallest, in percent of the mean.
    pub range_pct: f64,
    /// What the line of best fit gains along the window, in percent of the mean.
    pub slope_pct: f64,
}

impl Window {
    /// Of the last rounds. None where there are too few, or the mean is 0.
    pub fn of(rounds: &[f64]) -> Option<Window> {
        let window = rounds.get(rounds.len().checked_sub(WINDOW)?..)?;
        let count = window.len() as f64;
        let mean = window.iter().sum::<f64>() / count;
        if mean <= 0.0 || !mean.is_finite() {
            return None;
        }
        let (least, most) =
            window.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), v| (l.min(*v), m.max(*v)));
        let middle = (count - 1.0) / 2.0;
        let (mut product, mut square) = (0.0, 0.0);
        for (at, value) in window.iter().enumerate() {
            product += (at as f64 - middle) * (value - mean);
            square += (at as f64 - middle).powi(2);
        }
        let gained = product / square * (count - 1.0);
        Some(Window { range_pct: (most - least) / mean * 100.0, slope_pct: gained / mean * 100.0 })
    }

    /// Whether the device is steady.
    pub fn is_steady(self) -> bool {
        self.range_pct <= RANGE_PCT_MAX && self.slope_pct.abs() <= SLOPE_PCT_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_steady_when_its_last_rounds_are_alike() {
        assert_eq!(Window::of(&[1.0; WINDOW - 1]), None);
        assert_eq!(Window::of(&[0.0; WINDOW]), None);
        let steady = |rounds: &[f64]| Window::of(rounds).is_some_and(Window::is_steady);
        assert!(steady(&[100.0; WINDOW]));
        assert!(steady(&[900.0, 500.0, 101.0, 99.0, 100.0, 98.0, 102.0]), "what was before does not count");
        assert!(!steady(&[100.0, 97.0, 94.0, 91.0, 88.0]), "it falls all the time, if slowly");
        assert!(!steady(&[100.0, 130.0, 100.0, 100.0, 100.0]), "one round is far off");
        let window = Window::of(&[100.0, 102.0, 104.0, 106.0, 108.0]).unwrap();
        assert!((window.slope_pct - 8.0 / 104.0 * 100.0).abs() < 1e-9, "{window:?}");
        assert!(
            (window.range_pct - window.slope_pct).abs() < 1e-9,
            "a straight line's range is what it gains"
        );
    }
}
