//! What is measured, its unit, and which way is better.

use std::fmt;

/// A quantity that a run yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    /// I/Os a second.
    Iops,
    /// 2^30 bytes a second.
    Gibps,
    /// Mean latency in microseconds.
    MeanUs,
    /// 99th percentile of latency in microseconds.
    P99Us,
    /// Processor time of the load generator an I/O, in nanoseconds.
    HostCpuNs,
    /// Processor time of the target an I/O, in nanoseconds.
    TargetCpuNs,
    /// Instructions an I/O.
    Instructions,
    /// Percent of one processor.
    CpuPercent,
    /// Resident memory in 2^20 bytes.
    RssMib,
    /// Milliseconds from exec until it has started: accepts connections, or all of its processes did an I/O.
    StartMs,
    /// Milliseconds until a page is made.
    MadeMs,
    /// Milliseconds until a browser has loaded it.
    OpenedMs,
    /// I/Os a second as a multiple of fio's.
    FioRatio,
    /// Processor time an I/O as a multiple of fio's.
    FioCpuRatio,
}

impl Metric {
    /// Its key in JSON.
    pub(super) fn key(self) -> &'static str {
        match self {
            Metric::Iops => "iops",
            Metric::Gibps => "gib_per_second",
            Metric::MeanUs => "latency_mean_us",
            Metric::P99Us => "latency_p99_us",
            Metric::HostCpuNs => "host_cpu_ns_per_io",
            Metric::TargetCpuNs => "target_cpu_ns_per_io",
            Metric::Instructions => "instructions_per_io",
            Metric::CpuPercent => "cpu_percent",
            Metric::RssMib => "resident_mib",
            Metric::StartMs => "start_ms",
            Metric::MadeMs => "made_ms",
            Metric::OpenedMs => "opened_ms",
            Metric::FioRatio => "iops_of_fio",
            Metric::FioCpuRatio => "cpu_of_fio",
        }
    }

    /// Its name in the table.
    pub(super) fn title(self) -> &'static str {
        match self {
            Metric::Iops => "IOPS",
            Metric::Gibps => "bandwidth",
            Metric::MeanUs => "mean",
            Metric::P99Us => "p99",
            Metric::HostCpuNs | Metric::TargetCpuNs => "CPU",
            Metric::Instructions => "instructions",
            Metric::CpuPercent => "CPU",
            Metric::RssMib => "resident",
            Metric::StartMs => "start",
            Metric::MadeMs => "made",
            Metric::OpenedMs => "opened",
            Metric::FioRatio => "IOPS of fio",
            Metric::FioCpuRatio => "CPU of fio",
        }
    }

    pub(super) fn more_is_better(self) -> bool {
        matches!(self, Metric::Iops | Metric::Gibps | Metric::FioRatio)
    }

    /// `value` in its unit.
    pub(super) fn show(self, value: f64) -> String {
        match self {
            Metric::Iops if value >= 1e6 => format!("{:.2} M", value / 1e6),
            Metric::Iops => format!("{:.1} k", value / 1e3),
            Metric::Gibps => format!("{value:.2} GiB/s"),
            Metric::MeanUs | Metric::P99Us if value < 1.0 => format!("{:.0} ns", value * 1e3),
            Metric::MeanUs | Metric::P99Us => format!("{value:.1} µs"),
            Metric::HostCpuNs | Metric::TargetCpuNs if value < 1000.0 => format!("{value:.0} ns"),
            Metric::HostCpuNs | Metric::TargetCpuNs => format!("{:.1} µs", value / 1e3),
            Metric::Instructions => format!("{value:.0}"),
            Metric::CpuPercent => format!("{value:.2} %"),
            Metric::RssMib => format!("{value:.1} MiB"),
            Metric::StartMs | Metric::MadeMs | Metric::OpenedMs => format!("{value:.1} ms"),
            Metric::FioRatio | Metric::FioCpuRatio => format!("{value:.2}"),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// The middle of several values, and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Summary {
    /// `None` where there is no value.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Summary> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Summary { median, min, max })
    }

    /// From the least to the most, in percent of the median.
    pub(super) fn spread_percent(self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) / self.median * 100.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_two_in_the_middle() {
        assert_eq!(Summary::of([4.0, 1.0, 3.0]), Some(Summary { median: 3.0, min: 1.0, max: 4.0 }));
        assert_eq!(Summary::of([4.0, 1.0, 3.0, 2.0]), Some(Summary { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(Summary::of([]), None);
        assert_eq!(Summary { median: 2.0, min: 1.0, max: 4.0 }.spread_percent(), 150.0);
    }
}
