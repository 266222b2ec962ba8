//! Ends a job when its rate is steady: fio's `steadystate`.
//!
//! IOPS and bandwidth are sampled each second. When there are samples for the whole duration, either their largest
//! deviation from the mean, or the slope of the line through them (least squares), is compared with the limit.

use std::collections::VecDeque;

use os::clock;

mod group;

pub(crate) use group::SteadyGroups;

/// Most samples that are kept: a week.
pub(crate) const DURATION_S_MAX: u32 = 7 * 86_400;
const INTERVAL_NS: u64 = 1_000_000_000;

/// When a job is in the steady state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SteadyCriterion {
    /// Bytes a second are compared, not I/Os a second.
    pub of_bandwidth: bool,
    /// The slope is compared, not the deviation from the mean.
    pub of_slope: bool,
    /// The value must be below this: I/Os or bytes a second, for slopes a second more.
    pub limit: f64,
    /// The limit is in percent of the mean.
    pub in_percent: bool,
}

impl SteadyCriterion {
    /// fio's default.
    pub(crate) const DEFAULT: SteadyCriterion =
        SteadyCriterion { of_bandwidth: false, of_slope: true, limit: 0.01, in_percent: true };

    /// fio's name of the metric.
    pub fn metric(&self) -> &'static str {
        match (self.of_bandwidth, self.of_slope) {
            (false, false) => "iops",
            (false, true) => "iops_slope",
            (true, false) => "bw",
            (true, true) => "bw_slope",
        }
    }
}

/// `steadystate`, `steadystate_duration` and `steadystate_ramp_time`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SteadyOptions {
    /// What is compared.
    pub criterion: SteadyCriterion,
    /// Seconds for which the rate must be steady; at least 2.
    pub duration_s: u32,
    /// Time before the first sample, after that of `ramp_time`.
    pub ramp_ns: u64,
    /// The jobs of a reporting group are judged together: each takes samples, and their sum decides.
    pub of_group: bool,
}

/// What the samples at the end of a job say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SteadyResult {
    /// Whether the steady state ended the job.
    pub attained: bool,
    /// The compared value; 0 without enough samples.
    pub criterion: f64,
    /// Largest deviation from the mean, if it is compared.
    pub deviation_max: f64,
    /// Slope, if it is compared.
    pub slope: f64,
    /// I/Os a second, oldest first.
    pub iops: Vec<u64>,
    /// Bytes a second, oldest first.
    pub bandwidth: Vec<u64>,
}

/// Samples a job. Call [`begin`](Self::begin) once, then [`update`](Self::update) when it is due.
pub(crate) struct SteadyDetector {
    options: SteadyOptions,
    /// When the next sample is due, ticks.
    due: u64,
    /// Time in ticks, I/Os and bytes at the last sample; `None` before the first.
    last: Option<(u64, u64, u64)>,
    iops: VecDeque<u64>,
    bandwidth: VecDeque<u64>,
    result: SteadyResult,
    /// Samples of a job whose group is judged, which were not taken yet: I/Os and bytes a second.
    untaken: Vec<(u64, u64)>,
}

impl SteadyDetector {
    pub(crate) fn new(options: SteadyOptions) -> SteadyDetector {
        let (iops, bandwidth) = (VecDeque::new(), VecDeque::new());
        let result = SteadyResult::default();
        SteadyDetector { options, due: 0, last: None, iops, bandwidth, result, untaken: Vec::new() }
    }

    /// The measurement starts; returns when the first update is due.
    pub(crate) fn begin(&mut self, now: u64) -> u64 {
        self.due = now.saturating_add(clock::ns_to_ticks(self.options.ramp_ns));
        self.due
    }

    /// Takes the sample that is due, if any, of I/Os and bytes since the start of the measurement; returns whether the state is
    /// steady, and when the next sample is due.
    pub(crate) fn update(&mut self, now: u64, ios: u64, bytes: u64) -> (bool, u64) {
        if now < self.due {
            return (false, self.due);
        }
        let step = clock::ns_to_ticks(INTERVAL_NS).max(1);
        let missed = (now - self.due) / step;
        self.due = self.due.saturating_add((missed + 1).saturating_mul(step));
        if let Some((then, ios_then, bytes_then)) = self.last.replace((now, ios, bytes)) {
            let elapsed_ns = u128::from(clock::ticks_to_ns(now - then).max(1));
            let rate = |count: u64| (u128::from(count) * 1_000_000_000 / elapsed_ns) as u64;
            let sample = (rate(ios - ios_then), rate(bytes - bytes_then));
            match self.options.of_group {
                false => self.add(sample.0, sample.1),
                // A sample a second, so that those of all jobs are of the same time.
                true => {
                    let count = (missed + 1).min(u64::from(self.options.duration_s)) as usize;
                    self.untaken.extend(std::iter::repeat_n(sample, count));
                }
            }
        }
        (self.result.attained, self.due)
    }

    fn add(&mut self, iops: u64, bandwidth: u64) {
        if self.iops.len() == self.options.duration_s as usize {
            self.iops.pop_front();
            self.bandwidth.pop_front();
        }
        self.iops.push_back(iops);
        self.bandwidth.push_back(bandwidth);
        if self.iops.len() < self.options.duration_s as usize {
            return;
        }
        let criterion = self.options.criterion;
        let samples = if criterion.of_bandwidth { &self.bandwidth } else { &self.iops };
        let mean = mean(samples);
        let value = if criterion.of_slope { slope(samples, mean) } else { deviation_max(samples, mean) };
        *(if criterion.of_slope { &mut self.result.slope } else { &mut self.result.deviation_max }) = value;
        self.result.criterion = if criterion.in_percent { 100.0 * value / mean } else { value };
        // A job that does no I/O has no percentage, and is not steady.
        self.result.attained = self.result.criterion.abs() < criterion.limit;
    }

    /// Takes the samples of a job whose group is judged.
    pub(crate) fn take_samples(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.untaken)
    }

    /// Whether the job's group is judged, not the job.
    pub(crate) fn is_of_group(&self) -> bool {
        self.options.of_group
    }

    pub(crate) fn into_result(self) -> SteadyResult {
        let criterion = if self.result.criterion.is_finite() { self.result.criterion } else { 0.0 };
        SteadyResult { criterion, iops: self.iops.into(), bandwidth: self.bandwidth.into(), ..self.result }
    }
}

fn mean(samples: &VecDeque<u64>) -> f64 {
    samples.iter().map(|sample| *sample as f64).sum::<f64>() / samples.len() as f64
}

fn deviation_max(samples: &VecDeque<u64>, mean: f64) -> f64 {
    samples.iter().map(|sample| (*sample as f64 - mean).abs()).fold(0.0, f64::max)
}

/// The least-squares slope a sample.
fn slope(samples: &VecDeque<u64>, mean: f64) -> f64 {
    let middle = (samples.len() - 1) as f64 / 2.0;
    let (mut product, mut square) = (0.0, 0.0);
    for (index, sample) in samples.iter().enumerate() {
        let x = index as f64 - middle;
        product += x * (*sample as f64 - mean);
        square += x * x;
    }
    product / square
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detector(of_bandwidth: bool, of_slope: bool, limit: f64, in_percent: bool) -> SteadyDetector {
        let criterion = SteadyCriterion { of_bandwidth, of_slope, limit, in_percent };
        SteadyDetector::new(SteadyOptions { criterion, duration_s: 3, ramp_ns: 0, of_group: false })
    }

    #[test]
    fn values_are_those_of_fio() {
        // Samples and results of fio 3.33: iops:50%, bw_slope:50% and iops_slope:0.5.
        let mut one = detector(false, false, 50.0, true);
        for iops in [8100, 7961, 7471] {
            assert!(!one.result.attained);
            one.add(iops, 0);
        }
        let result = one.into_result();
        assert!(result.attained && result.deviation_max == 373.0 && result.slope == 0.0);
        assert!((result.criterion - 4.755_227).abs() < 1e-6, "{}", result.criterion);
        let mut one = detector(true, true, 50.0, true);
        [38_559_744, 34_280_936, 28_086_857].into_iter().for_each(|rate| one.add(0, rate));
        let result = one.into_result();
        assert!(result.attained && result.deviation_max == 0.0 && result.slope == -5_236_443.5);
        assert!((result.criterion + 15.564_96).abs() < 1e-6, "{}", result.criterion);
        let mut one = detector(false, true, 0.5, false);
        [7904, 7553, 6576].into_iter().for_each(|iops| one.add(iops, 0));
        let result = one.into_result();
        assert!(!result.attained && result.criterion == -664.0);
    }

    #[test]
    fn only_the_last_samples_count() {
        let mut one = detector(false, false, 1.0, true);
        for iops in [1, 100, 100] {
            one.add(iops, 1);
        }
        assert!(!one.result.attained);
        one.add(100, 1);
        let result = one.into_result();
        assert_eq!((result.attained, result.iops, result.bandwidth), (true, vec![100; 3], vec![1; 3]));
    }

    #[test]
    fn a_job_without_io_is_not_steady() {
        let mut one = detector(false, false, 1.0, true);
        (0..4).for_each(|_| one.add(0, 0));
        assert_eq!((one.result.attained, one.into_result().criterion), (false, 0.0));
    }

    #[test]
    fn samples_are_rates_between_updates_after_the_ramp() {
        let mut one = detector(false, false, 1.0, true);
        one.options.ramp_ns = 500_000_000;
        let at = |ms: u64| 1000 + clock::ns_to_ticks(ms * 1_000_000);
        assert_eq!(one.begin(1000), at(500));
        assert_eq!(one.update(at(400), 7, 7), (false, at(500)));
        assert!(!one.update(at(500), 100, 1).0);
        // Two seconds late: the rate is over the whole time.
        let (_, due) = one.update(at(3600), 100 + 3100, 1);
        // Each of the five conversions rounds down.
        assert!(due.abs_diff(at(4500)) <= 5, "{due}");
        assert!(one.iops[0].abs_diff(1000) <= 1 && one.iops.len() == 1, "{:?}", one.iops);
    }
}
