//! Open loop: when I/Os are to start, whether or not those before them have ended.

use sys::clock;

use crate::Random;
use crate::random::Exponential;

/// How arrivals are spread: fio's `rate_process`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arrivals {
    /// As even as can be.
    #[default]
    Linear,
    /// As strangers come: exponential times between them.
    Poisson,
}

/// Rates of a job. An I/O's latency counts from when it was to start, so that a device that stalls is
/// charged for everything that it kept waiting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// I/Os a second of reads, writes and trims.
    pub iops: [Option<u64>; 3],
    /// Bytes a second.
    pub bytes: [Option<u64>; 3],
    /// How arrivals are spread.
    pub arrivals: Arrivals,
}

impl Rates {
    /// Whether none is given.
    pub fn is_closed_loop(&self) -> bool {
        self.iops.iter().chain(&self.bytes).all(Option::is_none)
    }
}

/// The arrivals of one job: a stream for each direction that it has and that has a rate.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    streams: Vec<Stream>,
    /// A direction that the job has and that has no rate: it fills what the others leave.
    free: Option<usize>,
    /// Of arrivals that are drawn.
    times: Option<Exponential>,
    random: Random,
}

#[derive(Clone, Debug)]
struct Stream {
    direction: usize,
    /// When the next I/O is to start, and the time between I/Os, or between bytes: ticks and, in the lower
    /// half, their fraction, so that no rate drifts.
    next: u128,
    gap: u128,
    /// The same time as a number.
    gap_ticks: f64,
    by_bytes: bool,
}

/// Bits of a fraction of a tick.
const FRACTION_BITS: u32 = 64;
/// As many of them as a drawn time has: it is below 2^48 ticks, more than a day.
const DRAWN_BITS: u32 = 16;

impl Pace {
    /// For the directions that a job has; `None` where no rate is given for any of them.
    pub(crate) fn new(rates: &Rates, directions: [bool; 3], seed: u64) -> Option<Pace> {
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
            streams.push(Stream { direction, next: 0, gap, gap_ticks, by_bytes });
        }
        let random = Random::new(seed ^ 0x6172_7269_7661_6c73);
        let times = (rates.arrivals == Arrivals::Poisson).then(Exponential::new);
        (!streams.is_empty()).then_some(Pace { streams, free, times, random })
    }

    /// Time begins.
    pub(crate) fn begin(&mut self, now: u64) {
        for at in 0..self.streams.len() {
            self.streams[at].next = u128::from(now) << FRACTION_BITS;
            if self.times.is_some() {
                self.advance(self.streams[at].direction, 0);
            }
        }
    }

    /// The direction whose turn it is at `now`, and when it was; `None` while nobody's is.
    #[inline]
    pub(crate) fn due(&self, now: u64) -> Option<(usize, u64)> {
        let first = self.first();
        let start = first.start();
        if start <= now {
            return Some((first.direction, start));
        }
        self.free.map(|direction| (direction, now))
    }

    /// When somebody's turn is.
    pub(crate) fn next_start(&self) -> u64 {
        if self.free.is_some() { 0 } else { self.first().start() }
    }

    #[inline]
    fn first(&self) -> &Stream {
        // Nearly every job has one.
        let (mut first, rest) = self.streams.split_first().expect("a pace has a stream");
        for stream in rest {
            if stream.next < first.next {
                first = stream;
            }
        }
        first
    }

    /// An I/O of so many bytes has been started.
    #[inline]
    pub(crate) fn advance(&mut self, direction: usize, bytes: u64) {
        let Some(stream) = self.streams.iter_mut().find(|stream| stream.direction == direction) else {
            return;
        };
        let units = if stream.by_bytes { bytes } else { 1 };
        stream.next += match &self.times {
            None => stream.gap * u128::from(units),
            Some(times) => {
                let ticks = stream.gap_ticks * units as f64 * times.draw(&mut self.random);
                let drawn = (ticks * f64::from(1u32 << DRAWN_BITS)) as u64;
                u128::from(drawn) << (FRACTION_BITS - DRAWN_BITS)
            }
        };
    }
}

impl Stream {
    #[inline]
    fn start(&self) -> u64 {
        (self.next >> FRACTION_BITS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One server that takes `service` ticks an I/O, as a queue would see a pace: the mean time from the
    /// intended start to the end, in units of the service time. Virtual time.
    fn mean_stay(load: f64, service: u64, fixed: bool, seed: u64) -> f64 {
        let ticks_a_second = clock::ns_to_ticks(1_000_000_000) as f64;
        let iops = [Some((load * ticks_a_second / service as f64) as u64), None, None];
        let rates = Rates { iops, bytes: [None; 3], arrivals: Arrivals::Poisson };
        let mut pace = Pace::new(&rates, [true, false, false], seed).unwrap();
        let mut random = Random::new(seed + 1);
        pace.begin(0);
        let (mut free_at, mut stayed, count) = (0.0f64, 0.0, 400_000);
        for _ in 0..count {
            let (index, start) = pace.due(u64::MAX).unwrap();
            let work = service as f64 * if fixed { 1.0 } else { random.exponential() };
            free_at = free_at.max(start as f64) + work;
            stayed += free_at - start as f64;
            pace.advance(index, 4096);
        }
        stayed / f64::from(count) / service as f64
    }

    #[test]
    fn queues_are_as_long_as_theory_says() {
        let service = clock::ns_to_ticks(100_000);
        for load in [0.3, 0.5, 0.8] {
            // M/D/1 and M/M/1: the stay, in units of the service time (A. Erlang; Pollaczek and Khinchine).
            let fixed = 1.0 + load / (2.0 * (1.0 - load));
            let drawn = 1.0 / (1.0 - load);
            let (got_fixed, got_drawn) =
                (mean_stay(load, service, true, 7), mean_stay(load, service, false, 7));
            assert!((got_fixed / fixed - 1.0).abs() < 0.03, "M/D/1 at {load}: {got_fixed}, not {fixed}");
            assert!((got_drawn / drawn - 1.0).abs() < 0.05, "M/M/1 at {load}: {got_drawn}, not {drawn}");
        }
    }

    #[test]
    fn a_linear_pace_does_not_drift() {
        let rates = Rates { iops: [Some(3), None, None], ..Rates::default() };
        let mut pace = Pace::new(&rates, [true; 3], 1).unwrap();
        pace.begin(1000);
        for number in 0..30_000u64 {
            let (index, start) = pace.due(u64::MAX).unwrap();
            let exact = 1000.0 + number as f64 * clock::ns_to_ticks(1_000_000_000) as f64 / 3.0;
            assert!(
                index == 0 && (start as f64 - exact).abs() < 2.0 + exact * 1e-12,
                "{number}: {start} {exact}"
            );
            pace.advance(index, 4096);
        }
    }

    #[test]
    fn directions_have_rates_of_their_own() {
        let rates = Rates { iops: [Some(300), Some(100), None], ..Rates::default() };
        let mut pace = Pace::new(&rates, [true, true, false], 1).unwrap();
        pace.begin(0);
        let mut counts = [0; 3];
        for _ in 0..4000 {
            let (index, _) = pace.due(u64::MAX).unwrap();
            counts[index] += 1;
            pace.advance(index, 4096);
        }
        assert_eq!(counts, [3000, 1000, 0]);
        let bytes = Rates { bytes: [Some(8192), None, None], ..Rates::default() };
        let mut pace = Pace::new(&bytes, [true, false, false], 1).unwrap();
        pace.begin(0);
        pace.advance(0, 4096);
        let half = clock::ns_to_ticks(500_000_000);
        assert!(pace.next_start().abs_diff(half) <= 2);
    }

    #[test]
    fn a_direction_without_a_rate_fills_what_the_others_leave() {
        let rates = Rates { iops: [None, Some(1000), None], ..Rates::default() };
        let mut pace = Pace::new(&rates, [true, true, false], 1).unwrap();
        let second = clock::ns_to_ticks(1_000_000_000);
        pace.begin(0);
        let (mut writes, steps) = (0, 10_000);
        for step in 0..steps {
            let now = second * step / steps;
            let (direction, start) = pace.due(now).unwrap();
            assert!(start <= now && pace.next_start() <= now);
            writes += direction;
            pace.advance(direction, 4096);
        }
        assert_eq!(writes, 1000);
    }
}
