//! Open loop: when I/Os are to start, whether or not those before them have ended.

use sys::clock;

use crate::Random;

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

/// The arrivals of one job: a stream for each direction that it has.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    streams: [Option<Stream>; 3],
    arrivals: Arrivals,
    random: Random,
}

#[derive(Clone, Debug)]
struct Stream {
    /// When the next I/O is to start, in ticks; a fraction, so that no rate drifts.
    next: f64,
    /// Ticks between I/Os, or between bytes.
    gap: f64,
    by_bytes: bool,
}

impl Pace {
    /// For the directions that a job has; `None` where no rate is given for any of them.
    pub(crate) fn new(rates: &Rates, directions: [bool; 3], seed: u64) -> Option<Pace> {
        let ticks_a_second = clock::ns_to_ticks(1_000_000_000) as f64;
        let stream = |index: usize| {
            if !directions[index] {
                return None;
            }
            let (rate, by_bytes) = match (rates.iops[index], rates.bytes[index]) {
                (Some(iops), _) => (iops, false),
                (None, Some(bytes)) => (bytes, true),
                (None, None) => return None,
            };
            Some(Stream { next: 0.0, gap: ticks_a_second / rate.max(1) as f64, by_bytes })
        };
        let streams = [stream(0), stream(1), stream(2)];
        let any = streams.iter().any(Option::is_some);
        let random = Random::new(seed ^ 0x6172_7269_7661_6c73);
        any.then_some(Pace { streams, arrivals: rates.arrivals, random })
    }

    /// Time begins.
    pub(crate) fn begin(&mut self, now: u64) {
        for stream in self.streams.iter_mut().flatten() {
            stream.next = now as f64;
        }
        if self.arrivals == Arrivals::Poisson {
            for index in 0..3 {
                self.advance(index, 0);
            }
        }
    }

    /// The direction whose turn it is, and when it is.
    #[inline]
    pub(crate) fn next(&self) -> (usize, u64) {
        let mut first = (0, f64::MAX);
        for (index, stream) in self.streams.iter().enumerate() {
            if let Some(stream) = stream
                && stream.next < first.1
            {
                first = (index, stream.next);
            }
        }
        (first.0, first.1 as u64)
    }

    /// An I/O of so many bytes has been started.
    #[inline]
    pub(crate) fn advance(&mut self, index: usize, bytes: u64) {
        if let Some(stream) = &mut self.streams[index] {
            let mut gap = if stream.by_bytes { stream.gap * bytes as f64 } else { stream.gap };
            if self.arrivals == Arrivals::Poisson {
                gap *= self.random.exponential();
            }
            stream.next += gap;
        }
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
            let (index, start) = pace.next();
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
            let (index, start) = pace.next();
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
            let (index, _) = pace.next();
            counts[index] += 1;
            pace.advance(index, 4096);
        }
        assert_eq!(counts, [3000, 1000, 0]);
        let bytes = Rates { bytes: [Some(8192), None, None], ..Rates::default() };
        let mut pace = Pace::new(&bytes, [true; 3], 1).unwrap();
        pace.begin(0);
        pace.advance(0, 4096);
        let half = clock::ns_to_ticks(500_000_000);
        assert!(pace.next().1.abs_diff(half) <= 2);
    }
}
