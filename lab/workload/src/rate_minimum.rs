//! Ends a job whose rate is too low: fio's `rate_min`, `rate_iops_min` and `rate_cycle`.

use os::clock;

use crate::result::Direction;
use crate::spec::RateMinima;

/// Compares the rates of each cycle with their minima. The last cycle of a job, which its end cuts short, is not judged.
#[derive(Debug)]
pub(crate) struct RateMinimumCheck {
    minima: RateMinima,
    due_ticks: u64,
    /// At the start of the cycle: ticks, and I/Os and bytes of each direction.
    start_ticks: u64,
    seen: [(u64, u64); 3],
}

impl RateMinimumCheck {
    pub(crate) fn new(minima: RateMinima) -> RateMinimumCheck {
        RateMinimumCheck { minima, due_ticks: u64::MAX, start_ticks: 0, seen: [(0, 0); 3] }
    }

    /// Starts with the measurement; returns when the first cycle ends, in ticks.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        self.start_ticks = now;
        self.due_ticks = now.saturating_add(clock::ns_to_ticks(self.minima.cycle_ns));
        self.due_ticks
    }

    /// Judges a cycle that has ended, by the I/Os and bytes so far; returns when the next one ends, or which rate is too
    /// low.
    pub(crate) fn update(&mut self, now: u64, totals: [(u64, u64); 3]) -> Result<u64, String> {
        if now < self.due_ticks {
            return Ok(self.due_ticks);
        }
        let seconds = clock::ticks_to_ns(now.saturating_sub(self.start_ticks)) as f64 / 1e9;
        for (direction, name) in
            Direction::ALL.iter().map(|direction| (*direction as usize, direction.name()))
        {
            let (now, before) = (totals[direction], self.seen[direction]);
            let rates = [
                ((now.0 - before.0) as f64 / seconds, self.minima.iops[direction], "IOPS", "rate_iops_min"),
                ((now.1 - before.1) as f64 / seconds, self.minima.bytes[direction], "B/s", "rate_min"),
            ];
            for (rate, minimum, unit, option) in rates {
                if let Some(minimum) = minimum.filter(|minimum| rate < *minimum as f64) {
                    return Err(format!("{name}: {rate:.0} {unit}, below the {minimum} of --{option}"));
                }
            }
        }
        self.seen = totals;
        Ok(self.begin(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_below_the_minimum_is_an_error() {
        let minima = RateMinima { bytes: [Some(4096), None, None], ..RateMinima::default() };
        let mut check = RateMinimumCheck::new(minima);
        let second = clock::ns_to_ticks(1_000_000_000);
        let first_end = check.begin(0);
        assert_eq!(check.update(first_end - 1, [(0, 0); 3]), Ok(first_end));
        let second_end = check.update(first_end, [(2, 8192), (0, 0), (0, 0)]).unwrap();
        assert!(second_end.abs_diff(first_end + second) <= 1);
        let error = check.update(second_end, [(2, 8192 + 4000), (0, 0), (0, 0)]).unwrap_err();
        assert!(error.starts_with("read: 4000 B/s, below the 4096 of --rate_min"), "{error}");
    }
}
