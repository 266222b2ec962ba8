//! What SPDK does on a machine of two cores of the same kind, and what Ringbolt is to reach.
//!
//! These are fixed figures: `bench` does not run SPDK. On another kind of machine compare Ringbolt
//! with SPDK built and run there, not with these.

use super::metric::Metric;

/// What is to be reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    None,
    /// So many times SPDK's.
    Times(f64),
    /// No more than this, whatever SPDK's is.
    AtMost(f64),
    /// At least this, whatever SPDK's is.
    AtLeast(f64),
    /// No more than the same quantity of another benchmark and this much.
    Above(&'static str, f64),
    /// So many times the same quantity of another benchmark.
    Scaled(&'static str, f64),
}

/// Of linear scaling, what passes for it: cores share a clock budget and a cache.
const LINEAR: f64 = 0.9;

/// A figure to compare with.
pub(super) struct Reference {
    case: &'static str,
    metric: Metric,
    pub(super) spdk: Option<f64>,
    pub(super) goal: Goal,
}

const fn entry(case: &'static str, metric: Metric, spdk: f64, goal: Goal) -> Reference {
    Reference { case, metric, spdk: Some(spdk), goal }
}

const fn goal(case: &'static str, metric: Metric, goal: Goal) -> Reference {
    Reference { case, metric, spdk: None, goal }
}

const ALL: &[Reference] = &[
    entry("null-qd1", Metric::Iops, 9.0e6, Goal::Times(2.0)),
    entry("null-qd128", Metric::Iops, 16.1e6, Goal::Times(3.0)),
    entry("malloc-read", Metric::Iops, 1.55e6, Goal::None),
    entry("malloc-write", Metric::Iops, 1.28e6, Goal::None),
    entry("tcp-null-read-qd1", Metric::Iops, 71e3, Goal::None),
    entry("tcp-null-read-qd1", Metric::MeanUs, 14.0, Goal::AtMost(10.0)),
    entry("tcp-null-read-qd32", Metric::Iops, 492e3, Goal::Times(1.5)),
    entry("tcp-null-read-qd128", Metric::Iops, 789e3, Goal::Times(1.5)),
    entry("tcp-null-write-qd1", Metric::Iops, 93e3, Goal::None),
    goal("tcp-null-write-qd1", Metric::MeanUs, Goal::AtMost(10.0)),
    entry("tcp-null-write-qd32", Metric::Iops, 573e3, Goal::Times(1.5)),
    entry("tcp-null-write-qd128", Metric::Iops, 888e3, Goal::Times(1.5)),
    goal("tcp-null-read-qd1-adaptive", Metric::P99Us, Goal::Above("tcp-null-read-qd1", 5.0)),
    entry("tcp-malloc-read", Metric::Iops, 506e3, Goal::Times(1.5)),
    entry("tcp-malloc-write", Metric::Iops, 413e3, Goal::Times(1.5)),
    entry("tcp-null-128k", Metric::Gibps, 4.5, Goal::None),
    entry("tcp-malloc-128k", Metric::Gibps, 2.5, Goal::Times(1.5)),
    goal("idle", Metric::CpuPercent, Goal::AtMost(1.0)),
    goal("idle", Metric::RssMib, Goal::AtMost(64.0)),
    goal("startup", Metric::StartMs, Goal::AtMost(100.0)),
    entry("instructions-null-qd128", Metric::Instructions, 720.0, Goal::AtMost(150.0)),
    goal("instructions-null-rate", Metric::Instructions, Goal::AtMost(300.0)),
    goal("instructions-null-poisson", Metric::Instructions, Goal::AtMost(300.0)),
    goal("instructions-driver", Metric::Instructions, Goal::AtMost(150.0)),
    entry("vfio-user-null-read-qd1", Metric::Iops, 975e3, Goal::None),
    entry("vfio-user-null-read-qd1", Metric::MeanUs, 1.01, Goal::AtMost(0.8)),
    entry("vfio-user-null-read-qd32", Metric::Iops, 3.9e6, Goal::Times(1.5)),
    entry("vfio-user-null-read-qd128", Metric::Iops, 5.0e6, Goal::Times(1.5)),
    entry("vfio-user-malloc-read-qd32", Metric::Iops, 1.2e6, Goal::Times(1.5)),
    goal("driver-qpairs-2", Metric::Iops, Goal::Scaled("driver-qpairs-1", 2.0 * LINEAR)),
    goal("driver-qpairs-4", Metric::Iops, Goal::Scaled("driver-qpairs-1", 4.0 * LINEAR)),
    goal("driver-qpairs-8", Metric::Iops, Goal::Scaled("driver-qpairs-1", 8.0 * LINEAR)),
    goal("fio-null", Metric::FioRatio, Goal::AtLeast(5.0)),
    goal("fio-io_uring", Metric::FioRatio, Goal::AtLeast(1.0)),
    goal("fio-io_uring", Metric::FioCpuRatio, Goal::AtMost(1.0)),
    goal("processes-256", Metric::StartMs, Goal::AtMost(1000.0)),
    goal("report-10k", Metric::MadeMs, Goal::AtMost(10_000.0)),
    goal("report-10k", Metric::OpenedMs, Goal::AtMost(3000.0)),
];

/// The figure for a quantity of a benchmark, if there is one.
pub(super) fn find(case: &str, metric: Metric) -> Option<&'static Reference> {
    ALL.iter().find(|reference| reference.case == case && reference.metric == metric)
}

impl Reference {
    /// The goal as a number. `other` gives the same quantity of another benchmark, if it was measured.
    pub(super) fn limit(&self, other: impl Fn(&str) -> Option<f64>) -> Option<f64> {
        match self.goal {
            Goal::None => None,
            Goal::Times(times) => self.spdk.map(|spdk| spdk * times),
            Goal::AtMost(limit) | Goal::AtLeast(limit) => Some(limit),
            Goal::Above(case, more) => other(case).map(|value| value + more),
            Goal::Scaled(case, times) => other(case).map(|value| value * times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_belongs_to_a_benchmark() {
        for reference in ALL {
            let known = |name: &str| super::super::cases::ALL.iter().any(|case| case.name == name);
            assert!(known(reference.case), "{}", reference.case);
            if let Goal::Above(case, _) | Goal::Scaled(case, _) = reference.goal {
                assert!(known(case), "{case}");
            }
        }
    }

    #[test]
    fn a_goal_is_relative_to_spdk_or_absolute_or_relative_to_another_benchmark() {
        let limit = |case, metric| find(case, metric).and_then(|r| r.limit(|_| Some(20.0)));
        assert_eq!(limit("null-qd1", Metric::Iops), Some(18.0e6));
        assert_eq!(limit("tcp-null-read-qd1", Metric::MeanUs), Some(10.0));
        assert_eq!(limit("tcp-null-read-qd1-adaptive", Metric::P99Us), Some(25.0));
        assert_eq!(limit("driver-qpairs-2", Metric::Iops), Some(36.0));
        assert_eq!(limit("fio-null", Metric::FioRatio), Some(5.0));
        assert_eq!(limit("malloc-read", Metric::Iops), None);
    }
}
