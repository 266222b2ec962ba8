//! Preconditioning until the devices are in steady state.
//!
//! A freshly erased flash device writes faster than it will later. It is overwritten until it is in steady state by
//! SNIA's performance test specification: within a window of five rounds, the range is at most 20 % of the mean, and
//! the slope of the best fit changes by at most 10 % of it.

use std::fmt;

/// Rounds of the window.
pub const WINDOW: usize = 5;
/// Most rounds; from the specification.
pub const ROUNDS_MAX: usize = 25;
/// Duration of a round of random writes, in seconds; from the specification.
pub const ROUND_S: u64 = 60;
/// Largest range within the window, in percent of the mean.
const RANGE_PCT_MAX: f64 = 20.0;
/// Largest change of the best fit over the window, in percent of the mean.
const SLOPE_PCT_MAX: f64 = 10.0;

/// Range and slope of the last rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SteadyStateWindow {
    /// Maximum minus minimum, in percent of the mean.
    pub range_pct: f64,
    /// Change of the best fit over the window, in percent of the mean.
    pub slope_pct: f64,
}

impl SteadyStateWindow {
    /// The window at the end of `rounds`; `None` if there are too few, or the mean is 0.
    pub fn from_rounds(rounds: &[f64]) -> Option<SteadyStateWindow> {
        let window = rounds.get(rounds.len().checked_sub(WINDOW)?..)?;
        let count = window.len() as f64;
        let mean = window.iter().sum::<f64>() / count;
        if mean <= 0.0 || !mean.is_finite() {
            return None;
        }
        let (minimum, maximum) =
            window.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), v| (l.min(*v), m.max(*v)));
        let center = (count - 1.0) / 2.0;
        let (mut product, mut square) = (0.0, 0.0);
        for (at, value) in window.iter().enumerate() {
            product += (at as f64 - center) * (value - mean);
            square += (at as f64 - center).powi(2);
        }
        let gain = product / square * (count - 1.0);
        Some(SteadyStateWindow {
            range_pct: (maximum - minimum) / mean * 100.0,
            slope_pct: gain / mean * 100.0,
        })
    }

    /// Whether range and slope are within the limits.
    pub fn is_steady(self) -> bool {
        self.range_pct <= RANGE_PCT_MAX && self.slope_pct.abs() <= SLOPE_PCT_MAX
    }
}

impl fmt::Display for SteadyStateWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SteadyStateWindow { range_pct, slope_pct } = self;
        write!(
            f,
            "range {range_pct:.0} % (at most {RANGE_PCT_MAX}) and slope {slope_pct:+.0} % (at most {SLOPE_PCT_MAX}) in the last {WINDOW}"
        )
    }
}

/// Result of preconditioning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PreconditionOutcome {
    /// The devices are in steady state.
    Steady {
        /// Number of rounds.
        rounds: usize,
        /// The last window.
        window: SteadyStateWindow,
    },
    /// Not in steady state after [`ROUNDS_MAX`] rounds.
    Unsteady {
        /// The last window; `None` if nothing was written.
        window: Option<SteadyStateWindow>,
    },
    /// The user stopped the run.
    Stopped,
}

impl PreconditionOutcome {
    /// Whether measurements now show the devices' long-term behaviour, so far as rounds can show.
    pub fn is_steady(&self) -> bool {
        matches!(self, PreconditionOutcome::Steady { .. })
    }
}

/// A sentence for the user and the report.
impl fmt::Display for PreconditionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PreconditionOutcome::Steady { rounds, window } => {
                write!(f, "the devices are steady after {rounds} rounds of {ROUND_S} s: {window}")
            }
            PreconditionOutcome::Unsteady { window } => {
                write!(f, "the devices are not steady after {ROUNDS_MAX} rounds of {ROUND_S} s")?;
                if let Some(window) = window {
                    write!(f, ": {window}")?;
                }
                f.write_str(
                    "; writes are measured nevertheless. Causes are other load, heat, and a disk that is shared or is a \
                     file: remove the cause and run again, or use --repetitions and trust only ratios",
                )
            }
            PreconditionOutcome::Stopped => f.write_str("stopped before the devices were steady"),
        }
    }
}

/// Runs rounds until the devices are in steady state, a round returns `None`, or [`ROUNDS_MAX`] is reached; reports
/// each round. A round returns its IOPS.
///
/// # Errors
/// The error of a round.
pub fn run_rounds<E>(
    mut run_round: impl FnMut() -> Result<Option<f64>, E>,
    report: &mut dyn FnMut(String),
) -> Result<PreconditionOutcome, E> {
    let mut rounds: Vec<f64> = Vec::new();
    let mut window = None;
    while rounds.len() < ROUNDS_MAX {
        let Some(iops) = run_round()? else { return Ok(PreconditionOutcome::Stopped) };
        rounds.push(iops);
        window = SteadyStateWindow::from_rounds(&rounds);
        let count = rounds.len();
        let message = window.map_or(String::new(), |window| format!("; {window}"));
        report(format!("round {count} of at most {ROUNDS_MAX}: {iops:.0} IOPS{message}"));
        if let Some(window) = window.filter(|window| window.is_steady()) {
            return Ok(PreconditionOutcome::Steady { rounds: count, window });
        }
    }
    Ok(PreconditionOutcome::Unsteady { window })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steady_state_needs_a_small_range_and_slope() {
        assert_eq!(SteadyStateWindow::from_rounds(&[1.0; WINDOW - 1]), None);
        assert_eq!(SteadyStateWindow::from_rounds(&[0.0; WINDOW]), None);
        let steady =
            |rounds: &[f64]| SteadyStateWindow::from_rounds(rounds).is_some_and(SteadyStateWindow::is_steady);
        assert!(steady(&[100.0; WINDOW]));
        assert!(steady(&[900.0, 500.0, 101.0, 99.0, 100.0, 98.0, 102.0]), "what was before does not count");
        assert!(!steady(&[100.0, 97.0, 94.0, 91.0, 88.0]), "it falls all the time, if slowly");
        assert!(!steady(&[100.0, 130.0, 100.0, 100.0, 100.0]), "one round is far off");
        let window = SteadyStateWindow::from_rounds(&[100.0, 102.0, 104.0, 106.0, 108.0]).unwrap();
        assert!((window.slope_pct - 8.0 / 104.0 * 100.0).abs() < 1e-9, "{window:?}");
        assert!(
            (window.range_pct - window.slope_pct).abs() < 1e-9,
            "a straight line's range is what it gains"
        );
    }

    /// Preconditions a simulated flash device: filled, then overwritten at random offsets.
    fn rounds_on_a_model(
        state: device_model::MediaState,
        seconds: f64,
    ) -> (PreconditionOutcome, Vec<String>) {
        const BYTES: u64 = 64 << 20;
        let profile = device_model::DeviceProfile::shipped("samsung-980-pro").unwrap();
        let mut device = device_model::DeviceModel::with_state(&profile, BYTES, state, 7);
        let (mut now, mut random, mut done) = (0, random::WyRand::new(0), Vec::new());
        let mut write = |device: &mut device_model::DeviceModel, offset, bytes| {
            let io = device_model::IoCommand { op: block_io::Op::Write, offset, bytes, fua: false };
            while device.in_flight() >= 32 {
                now = device.deadline().unwrap();
                device.poll(now, &mut done);
            }
            done.clear();
            device.submit(now, &io).unwrap();
            now
        };
        for chunk in 0..BYTES >> 17 {
            write(&mut device, chunk << 17, 128 << 10);
        }
        let run_round = || {
            let began = write(&mut device, 0, 4096);
            let (mut now, mut count) = (began, 0u32);
            while ((now - began) as f64) < seconds * 1e9 {
                now = write(&mut device, random.below(BYTES >> 12) << 12, 4096);
                count += 1;
            }
            Ok::<_, ()>(Some(f64::from(count) / seconds))
        };
        let mut lines = Vec::new();
        let outcome = run_rounds(run_round, &mut |line| lines.push(line)).unwrap();
        (outcome, lines)
    }

    #[test]
    fn a_fresh_device_is_overwritten_until_steady() {
        let (fresh, lines) = rounds_on_a_model(device_model::MediaState::Fresh, 0.05);
        let PreconditionOutcome::Steady { rounds, window } = fresh else { panic!("{fresh:?} {lines:?}") };
        assert!(rounds > WINDOW, "what a fresh device does at first is not what it does for long: {lines:?}");
        assert!(window.is_steady());
        let iops = |line: &String| line.split(' ').nth(6).unwrap().parse::<f64>().unwrap();
        assert!(iops(&lines[0]) > 1.1 * iops(&lines[rounds - 1]), "{lines:?}");
        let (settled, lines) = rounds_on_a_model(device_model::MediaState::Steady, 0.05);
        let PreconditionOutcome::Steady { rounds: sooner, .. } = settled else {
            panic!("{settled:?} {lines:?}")
        };
        assert!(sooner < rounds, "{lines:?}");
        let message = settled.to_string();
        assert!(
            message.starts_with(&format!("the devices are steady after {sooner} rounds of 60 s: range ")),
            "{message}"
        );
    }

    #[test]
    fn a_noisy_device_is_reported_as_not_steady() {
        let (mut count, mut lines) = (0, 0);
        let run_round = || {
            count += 1;
            Ok::<_, ()>(Some(if count % 2 == 0 { 100.0 } else { 140.0 }))
        };
        let outcome = run_rounds(run_round, &mut |_| lines += 1).unwrap();
        assert_eq!((count, lines), (ROUNDS_MAX, ROUNDS_MAX), "it ends");
        assert!(!outcome.is_steady());
        let message = outcome.to_string();
        assert!(
            message.contains("not steady after 25 rounds") && message.contains("at most 20"),
            "{message}"
        );
        assert!(message.contains("run again"), "{message}");
        let nothing = run_rounds(|| Ok::<_, ()>(Some(0.0)), &mut |_| ()).unwrap();
        assert_eq!(nothing, PreconditionOutcome::Unsteady { window: None });
        assert_eq!(run_rounds(|| Ok::<_, ()>(None), &mut |_| ()), Ok(PreconditionOutcome::Stopped));
        assert_eq!(run_rounds(|| Err("broken"), &mut |_| ()), Err("broken"));
    }
}
