//! Open loop: the schedule of I/O starts, independent of completions.

use os::clock;

use crate::WyRand;
use crate::exponential::Exponential;

/// Distribution of the times between I/O starts: fio's `rate_process`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArrivalProcess {
    /// Constant intervals.
    #[default]
    Linear,
    /// Poisson process: exponentially distributed intervals.
    Poisson,
}

/// Rates of a job. An I/O's latency counts from its scheduled start, so that a stall of the device is charged
/// to every I/O that it delays (no coordinated omission).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// I/Os a second of reads, writes and trims.
    pub iops: [Option<u64>; 3],
    /// Bytes a second of reads, writes and trims.
    pub bytes: [Option<u64>; 3],
    /// Distribution of intervals.
    pub process: ArrivalProcess,
}

impl Rates {
    /// Whether no rate is given.
    pub fn is_closed_loop(&self) -> bool {
        self.iops.iter().chain(&self.bytes).all(Option::is_none)
    }
}

/// The arrivals of one job: a stream for each of its directions with a rate.
#[derive(Clone, Debug)]
pub(crate) struct ArrivalSchedule {
    streams: Vec<ArrivalStream>,
    /// A direction of the job without a rate: it uses all idle requests.
    unpaced_direction: Option<usize>,
    /// For Poisson arrivals.
    exponential: Option<Exponential>,
    random: WyRand,
}

#[derive(Clone, Debug)]
struct ArrivalStream {
    direction: usize,
    /// Start of the next I/O and interval between I/Os, or between bytes: fixed-point ticks with 64 fraction
    /// bits, so that rates do not drift.
    next: u128,
    interval: u128,
    /// The interval in ticks, as floating point.
    interval_ticks: f64,
    by_bytes: bool,
}

/// Bits of a fraction of a tick.
const FRACTION_BITS: u32 = 64;
/// Fraction bits of a random interval, which is below 2^48 ticks, more than a day.
const DRAWN_BITS: u32 = 16;

impl ArrivalSchedule {
    /// For the directions of a job; `None` if none of them has a rate.
    pub(crate) fn new(rates: &Rates, directions: [bool; 3], seed: u64) -> Option<ArrivalSchedule> {
        let ticks_a_second = clock::ns_to_ticks(1_000_000_000);
        let (mut streams, mut free) = (Vec::new(), None);
        for direction in (0..3).filter(|direction| directions[*direction]) {
            let (rate, by_bytes) = match (rates.iops[direction], rates.bytes[direction]) {
                (Some(iops), _) => (iops.max(1), false),
                (None, Some(bytes)) => (bytes.max(1), true),
                (None, None) => {
                    free = Some(direction);
                    continue;
                }
            };
            let gap = (u128::from(ticks_a_second) << FRACTION_BITS) / u128::from(rate);
            let gap_ticks = ticks_a_second as f64 / rate as f64;
            streams.push(ArrivalStream {
                direction,
                next: 0,
                interval: gap,
                interval_ticks: gap_ticks,
                by_bytes,
            });
        }
        let random = WyRand::new(seed ^ 0x6172_7269_7661_6c73);
        let exponential = (rates.process == ArrivalProcess::Poisson).then(Exponential::new);
        (!streams.is_empty()).then_some(ArrivalSchedule {
            streams,
            unpaced_direction: free,
            exponential,
            random,
        })
    }

    /// Starts the schedule at `now`, in ticks.
    pub(crate) fn begin(&mut self, now: u64) {
        for at in 0..self.streams.len() {
            self.streams[at].next = u128::from(now) << FRACTION_BITS;
            if self.exponential.is_some() {
                self.advance(self.streams[at].direction, 0);
            }
        }
    }

    /// The direction of an I/O that is due at `now` and its scheduled start; `None` if none is due.
    #[inline]
    pub(crate) fn due(&self, now: u64) -> Option<(usize, u64)> {
        let first = self.earliest();
        let start = first.start();
        if start <= now {
            return Some((first.direction, start));
        }
        self.unpaced_direction.map(|direction| (direction, now))
    }

    /// When the next I/O is due, in ticks.
    pub(crate) fn next_start(&self) -> u64 {
        if self.unpaced_direction.is_some() { 0 } else { self.earliest().start() }
    }

    #[inline]
    fn earliest(&self) -> &ArrivalStream {
        // Most jobs have exactly one stream.
        let (mut first, rest) = self.streams.split_first().expect("a schedule has a stream");
        for stream in rest {
            if stream.next < first.next {
                first = stream;
            }
        }
        first
    }

    /// Schedules the next I/O of a direction after one of `bytes` has started.
    #[inline]
    pub(crate) fn advance(&mut self, direction: usize, bytes: u64) {
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.direction == direction) else {
            return;
        };
        let units = if stream.by_bytes { bytes } else { 1 };
        stream.next += match &self.exponential {
            None => stream.interval * u128::from(units),
            Some(exponential) => {
                let ticks = stream.interval_ticks * units as f64 * exponential.draw(&mut self.random);
                let drawn = (ticks * f64::from(1u32 << DRAWN_BITS)) as u64;
                u128::from(drawn) << (FRACTION_BITS - DRAWN_BITS)
            }
        };
    }
}

impl ArrivalStream {
    #[inline]
    fn start(&self) -> u64 {
        (self.next >> FRACTION_BITS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a queue with one server and a mean service time of `service` ticks: returns the mean time
    /// from scheduled start to completion, in units of the service time.
    fn mean_sojourn(load: f64, service: u64, fixed: bool, seed: u64) -> f64 {
        let ticks_a_second = clock::ns_to_ticks(1_000_000_000) as f64;
        let iops = [Some((load * ticks_a_second / service as f64) as u64), None, None];
        let rates = Rates { iops, bytes: [None; 3], process: ArrivalProcess::Poisson };
        let mut schedule = ArrivalSchedule::new(&rates, [true, false, false], seed).unwrap();
        let mut random = WyRand::new(seed + 1);
        schedule.begin(0);
        let (mut free_at, mut total_sojourn, count) = (0.0f64, 0.0, 400_000);
        for _ in 0..count {
            let (index, start) = schedule.due(u64::MAX).unwrap();
            let work = service as f64 * if fixed { 1.0 } else { random.exponential() };
            free_at = free_at.max(start as f64) + work;
            total_sojourn += free_at - start as f64;
            schedule.advance(index, 4096);
        }
        total_sojourn / f64::from(count) / service as f64
    }

    #[test]
    fn poisson_arrivals_match_queueing_theory() {
        let service = clock::ns_to_ticks(100_000);
        for load in [0.3, 0.5, 0.8] {
            // Sojourn times of M/D/1 and M/M/1 in units of the service time (Pollaczek-Khinchine formula).
            let fixed = 1.0 + load / (2.0 * (1.0 - load));
            let drawn = 1.0 / (1.0 - load);
            let (got_fixed, got_drawn) =
                (mean_sojourn(load, service, true, 7), mean_sojourn(load, service, false, 7));
            assert!((got_fixed / fixed - 1.0).abs() < 0.03, "M/D/1 at {load}: {got_fixed}, not {fixed}");
            assert!((got_drawn / drawn - 1.0).abs() < 0.05, "M/M/1 at {load}: {got_drawn}, not {drawn}");
        }
    }

    #[test]
    fn linear_arrivals_do_not_drift() {
        let rates = Rates { iops: [Some(3), None, None], ..Rates::default() };
        let mut schedule = ArrivalSchedule::new(&rates, [true; 3], 1).unwrap();
        schedule.begin(1000);
        for number in 0..30_000u64 {
            let (index, start) = schedule.due(u64::MAX).unwrap();
            let exact = 1000.0 + number as f64 * clock::ns_to_ticks(1_000_000_000) as f64 / 3.0;
            assert!(
                index == 0 && (start as f64 - exact).abs() < 2.0 + exact * 1e-12,
                "{number}: {start} {exact}"
            );
            schedule.advance(index, 4096);
        }
    }

    #[test]
    fn directions_have_independent_rates() {
        let rates = Rates { iops: [Some(300), Some(100), None], ..Rates::default() };
        let mut schedule = ArrivalSchedule::new(&rates, [true, true, false], 1).unwrap();
        schedule.begin(0);
        let mut counts = [0; 3];
        for _ in 0..4000 {
            let (index, _) = schedule.due(u64::MAX).unwrap();
            counts[index] += 1;
            schedule.advance(index, 4096);
        }
        assert_eq!(counts, [3000, 1000, 0]);
        let bytes = Rates { bytes: [Some(8192), None, None], ..Rates::default() };
        let mut schedule = ArrivalSchedule::new(&bytes, [true, false, false], 1).unwrap();
        schedule.begin(0);
        schedule.advance(0, 4096);
        let half = clock::ns_to_ticks(500_000_000);
        assert!(schedule.next_start().abs_diff(half) <= 2);
    }

    #[test]
    fn a_direction_without_a_rate_is_always_due() {
        let rates = Rates { iops: [None, Some(1000), None], ..Rates::default() };
        let mut schedule = ArrivalSchedule::new(&rates, [true, true, false], 1).unwrap();
        let second = clock::ns_to_ticks(1_000_000_000);
        schedule.begin(0);
        let (mut writes, steps) = (0, 10_000);
        for step in 0..steps {
            let now = second * step / steps;
            let (direction, start) = schedule.due(now).unwrap();
            assert!(start <= now && schedule.next_start() <= now);
            writes += direction;
            schedule.advance(direction, 4096);
        }
        assert_eq!(writes, 1000);
    }
}
