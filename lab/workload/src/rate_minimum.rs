//! Ends a job whose rate is too low: fio's `rate_min`, `rate_iops_min` and `rate_cycle`.

use os::clock;

use crate::result::Direction;
use crate::spec::RateMinima;

/// How long a job may take to reach its rates, with its ramp: as fio.
const SETTLE_NS: u64 = 2_000_000_000;

/// Compares the rates of each cycle with their minima, from 2 s after the job's start. The last cycle of a job, which its
/// end cuts short, is not judged.
#[derive(Debug)]
pub(crate) struct RateMinimumCheck {
    minima: RateMinima,
    settle_ns: u64,
    due_ticks: u64,
    /// At the start of the cycle: ticks, and I/Os and bytes of each direction.
    start_ticks: u64,
    seen: [(u64, u64); 3],
}

impl RateMinimumCheck {
    /// A check of the `directions` that the job has, after a ramp of `ramp_ns`. A single value of an option is a minimum of
    /// all directions, and one without I/O has no rate to judge.
    pub(crate) fn new(mut minima: RateMinima, directions: [bool; 3], ramp_ns: u64) -> RateMinimumCheck {
        for (direction, _) in directions.iter().enumerate().filter(|(_, used)| !**used) {
            minima.bytes[direction] = None;
            minima.iops[direction] = None;
        }
        let settle_ns = SETTLE_NS.saturating_sub(ramp_ns);
        RateMinimumCheck { minima, settle_ns, due_ticks: u64::MAX, start_ticks: 0, seen: [(0, 0); 3] }
    }

    /// Starts with the measurement; returns when the next call of `update` is due, in ticks.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        if self.settle_ns > 0 {
            self.due_ticks = now.saturating_add(clock::ns_to_ticks(self.settle_ns));
            return self.due_ticks;
        }
        self.begin_cycle(now)
    }

    fn begin_cycle(&mut self, now: u64) -> u64 {
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
        if self.settle_ns > 0 {
            self.settle_ns = 0;
            self.seen = totals;
            return Ok(self.begin_cycle(now));
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
        Ok(self.begin_cycle(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_below_the_minimum_is_an_error() {
        let minima = RateMinima { bytes: [Some(4096); 3], iops: [Some(1); 3], ..RateMinima::default() };
        let mut check = RateMinimumCheck::new(minima, [true, false, false], 1_500_000_000);
        let second = clock::ns_to_ticks(1_000_000_000);
        let settled = check.begin(0);
        assert_eq!(settled, clock::ns_to_ticks(500_000_000));
        let first_end = check.update(settled, [(0, 0); 3]).unwrap();
        assert_eq!(check.update(first_end - 1, [(0, 0); 3]), Ok(first_end));
        let second_end = check.update(first_end, [(2, 8192), (0, 0), (0, 0)]).unwrap();
        assert!(second_end.abs_diff(first_end + second) <= 1);
        let error = check.update(second_end, [(3, 8192 + 4000), (0, 0), (0, 0)]).unwrap_err();
        assert!(error.starts_with("read: 4000 B/s, below the 4096 of --rate_min"), "{error}");
    }

    #[test]
    fn directions_without_io_are_not_judged() {
        let minima = RateMinima { bytes: [Some(1); 3], iops: [Some(1); 3], ..RateMinima::default() };
        let totals = [(9, 9), (0, 0), (0, 0)];
        for (directions, error) in [
            ([true, false, false], None),
            ([true, true, false], Some("write: 0 IOPS, below the 1 of --rate_iops_min")),
            ([true, false, true], Some("trim: 0 IOPS, below the 1 of --rate_iops_min")),
        ] {
            let mut check = RateMinimumCheck::new(minima, directions, 2_000_000_000);
            let end = check.begin(0);
            assert_eq!(check.update(end, totals).err().as_deref(), error);
        }
    }
}
