//! Preconditioning, and when a device is in its steady state.
//!
//! A flash device that was just erased writes faster than it will for the rest of its life. It is
//! written over until the last rounds are alike, as the SNIA's performance test specification asks:
//! within a window of five rounds the spread is at most a fifth of their mean, and the line of best
//! fit rises or falls by at most a tenth of it.

use std::fmt;

/// Rounds of a window.
pub const WINDOW: usize = 5;
/// Most rounds before the device is taken as it is, as in the specification.
pub const ROUNDS_MAX: usize = 25;
/// A round of random writes, in seconds, as in the specification.
pub const ROUND_S: u64 = 60;
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

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Window { range_pct, slope_pct } = self;
        write!(
            f,
            "the last {WINDOW} spread {range_pct:.0} % (at most {RANGE_PCT_MAX}) and drift {slope_pct:+.0} % (at most {SLOPE_PCT_MAX})"
        )
    }
}

/// What came of preconditioning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The last rounds are alike.
    Steady {
        /// How many there were.
        rounds: usize,
        /// What the last ones say.
        window: Window,
    },
    /// There were [`ROUNDS_MAX`] rounds, and the last ones are not alike.
    Unsteady {
        /// What the last ones say; nothing where nothing was written.
        window: Option<Window>,
    },
    /// The user wanted an end.
    Stopped,
}

impl Outcome {
    /// Whether what is measured now is the device's long-term behaviour, as far as rounds can tell.
    pub fn is_steady(&self) -> bool {
        matches!(self, Outcome::Steady { .. })
    }
}

/// The sentence for the user and for the report.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Steady { rounds, window } => {
                write!(f, "the devices are steady after {rounds} rounds of {ROUND_S} s: {window}")
            }
            Outcome::Unsteady { window } => {
                write!(f, "the devices are not steady after {ROUNDS_MAX} rounds of {ROUND_S} s")?;
                if let Some(window) = window {
                    write!(f, ": {window}")?;
                }
                f.write_str(
                    "; what writes is measured as it is. Other load, heat, or a disk that is shared or is a file does \
                     that: remove it and run again, or repeat (--repetitions) and trust ratios alone",
                )
            }
            Outcome::Stopped => f.write_str("stopped before the devices were steady"),
        }
    }
}

/// Does rounds until the last are alike, the user wants an end (a round gives none), or there were enough, and
/// tells of each. A round gives its I/Os a second.
///
/// # Errors
/// What a round says.
pub fn settle<E>(
    mut round: impl FnMut() -> Result<Option<f64>, E>,
    tell: &mut dyn FnMut(String),
) -> Result<Outcome, E> {
    let mut rounds: Vec<f64> = Vec::new();
    let mut window = None;
    while rounds.len() < ROUNDS_MAX {
        let Some(iops) = round()? else { return Ok(Outcome::Stopped) };
        rounds.push(iops);
        window = Window::of(&rounds);
        let count = rounds.len();
        let said = window.map_or(String::new(), |window| format!("; {window}"));
        tell(format!("round {count} of at most {ROUNDS_MAX}: {iops:.0} IOPS{said}"));
        if let Some(window) = window.filter(|window| window.is_steady()) {
            return Ok(Outcome::Steady { rounds: count, window });
        }
    }
    Ok(Outcome::Unsteady { window })
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

    /// A device of flash in the time of a model: filled, then written over at random, round for round.
    fn rounds_on_a_model(state: device_model::MediaState, seconds: f64) -> (Outcome, Vec<String>) {
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
        let round = || {
            let began = write(&mut device, 0, 4096);
            let (mut now, mut count) = (began, 0u32);
            while ((now - began) as f64) < seconds * 1e9 {
                now = write(&mut device, random.below(BYTES >> 12) << 12, 4096);
                count += 1;
            }
            Ok::<_, ()>(Some(f64::from(count) / seconds))
        };
        let mut lines = Vec::new();
        let outcome = settle(round, &mut |line| lines.push(line)).unwrap();
        (outcome, lines)
    }

    #[test]
    fn a_fresh_device_is_written_over_until_it_is_steady() {
        let (fresh, lines) = rounds_on_a_model(device_model::MediaState::Fresh, 0.05);
        let Outcome::Steady { rounds, window } = fresh else { panic!("{fresh:?} {lines:?}") };
        assert!(rounds > WINDOW, "what a fresh device does at first is not what it does for long: {lines:?}");
        assert!(window.is_steady());
        let iops = |line: &String| line.split(' ').nth(6).unwrap().parse::<f64>().unwrap();
        assert!(iops(&lines[0]) > 1.1 * iops(&lines[rounds - 1]), "{lines:?}");
        let (settled, lines) = rounds_on_a_model(device_model::MediaState::Steady, 0.05);
        let Outcome::Steady { rounds: sooner, .. } = settled else { panic!("{settled:?} {lines:?}") };
        assert!(sooner < rounds, "{lines:?}");
        let said = settled.to_string();
        assert!(
            said.starts_with(&format!(
                "the devices are steady after {sooner} rounds of 60 s: the last 5 spread"
            )),
            "{said}"
        );
    }

    #[test]
    fn a_noisy_device_is_taken_as_it_is_and_that_is_said() {
        let (mut count, mut lines) = (0, 0);
        let round = || {
            count += 1;
            Ok::<_, ()>(Some(if count % 2 == 0 { 100.0 } else { 140.0 }))
        };
        let outcome = settle(round, &mut |_| lines += 1).unwrap();
        assert_eq!((count, lines), (ROUNDS_MAX, ROUNDS_MAX), "it ends");
        assert!(!outcome.is_steady());
        let said = outcome.to_string();
        assert!(said.contains("not steady after 25 rounds") && said.contains("at most 20"), "{said}");
        assert!(said.contains("run again"), "{said}");
        let nothing = settle(|| Ok::<_, ()>(Some(0.0)), &mut |_| ()).unwrap();
        assert_eq!(nothing, Outcome::Unsteady { window: None });
        assert_eq!(settle(|| Ok::<_, ()>(None), &mut |_| ()), Ok(Outcome::Stopped));
        assert_eq!(settle(|| Err("broken"), &mut |_| ()), Err("broken"));
    }
}
