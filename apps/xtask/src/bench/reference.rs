//! Reference figures of SPDK, measured on a two-core machine, and Ringbolt's goals.
//!
//! The figures are constants. They say little about another machine: with `--spdk DIR` the table has ratios
//! instead, measured in turn, and the multiples that are goals apply to those.

use super::metric::BenchMetric;

/// A goal for a metric of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum BenchGoal {
    None,
    /// A multiple of SPDK's figure.
    Times(f64),
    /// An absolute upper limit.
    AtMost(f64),
    /// An absolute lower limit.
    AtLeast(f64),
    /// At most the same metric of another benchmark plus this.
    Above(&'static str, f64),
    /// At least a multiple of the same metric of another benchmark.
    Scaled(&'static str, f64),
}

/// The fraction of linear scaling that is the goal: cores share a power budget and a cache.
const LINEAR: f64 = 0.9;

/// The fraction of the rate of bare sockets that is the goal.
const BARE: BenchGoal = BenchGoal::AtLeast(0.9);

/// The fraction of the rate of the least program for the same that is the goal, where that program does not
/// reach the goal itself.
const LEAST: BenchGoal = BenchGoal::AtLeast(0.85);

/// Where the constants come from.
pub(super) const ORIGIN: &str = "SPDK's figures are constants from another two-core virtual machine. Build SPDK here \
    and use --spdk DIR to compare.";

/// SPDK's figure and Ringbolt's goal for a metric of a benchmark.
pub(super) struct ReferenceFigure {
    case: &'static str,
    metric: BenchMetric,
    pub(super) spdk: Option<f64>,
    pub(super) goal: BenchGoal,
}

const fn entry(case: &'static str, metric: BenchMetric, spdk: f64, goal: BenchGoal) -> ReferenceFigure {
    ReferenceFigure { case, metric, spdk: Some(spdk), goal }
}

const fn goal(case: &'static str, metric: BenchMetric, goal: BenchGoal) -> ReferenceFigure {
    ReferenceFigure { case, metric, spdk: None, goal }
}

const ALL: &[ReferenceFigure] = &[
    entry("null-qd1", BenchMetric::Iops, 9.0e6, BenchGoal::Times(2.0)),
    entry("null-qd128", BenchMetric::Iops, 16.1e6, BenchGoal::Times(3.0)),
    entry("malloc-read", BenchMetric::Iops, 1.55e6, BenchGoal::None),
    entry("malloc-write", BenchMetric::Iops, 1.28e6, BenchGoal::None),
    goal("accel-copy", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.95)),
    goal("stacked-crypto-read", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.8)),
    goal("stacked-crypto-write", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.8)),
    goal("stacked-raid0", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.95)),
    goal("stacked-concat", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.95)),
    goal("stacked-raid1-read", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.95)),
    goal("stacked-split", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.98)),
    goal("stacked-gpt", BenchMetric::BaseRatio, BenchGoal::AtLeast(0.98)),
    entry("tcp-null-read-qd1", BenchMetric::Iops, 71e3, BenchGoal::None),
    entry("tcp-null-read-qd1", BenchMetric::MeanUs, 14.0, BenchGoal::AtMost(10.0)),
    entry("tcp-null-read-qd32", BenchMetric::Iops, 492e3, BenchGoal::Times(1.5)),
    entry("tcp-null-read-qd128", BenchMetric::Iops, 789e3, BenchGoal::Times(1.5)),
    entry("tcp-null-write-qd1", BenchMetric::Iops, 93e3, BenchGoal::None),
    goal("tcp-null-write-qd1", BenchMetric::MeanUs, BenchGoal::AtMost(10.0)),
    entry("tcp-null-write-qd32", BenchMetric::Iops, 573e3, BenchGoal::Times(1.5)),
    entry("tcp-null-write-qd128", BenchMetric::Iops, 888e3, BenchGoal::Times(1.5)),
    goal("tcp-null-read-qd1-adaptive", BenchMetric::P99Us, BenchGoal::Above("tcp-null-read-qd1", 5.0)),
    entry("iscsi-null-read-qd1", BenchMetric::Iops, 28e3, BenchGoal::Times(1.3)),
    entry("iscsi-null-read-qd32", BenchMetric::Iops, 269e3, BenchGoal::Times(1.5)),
    entry("iscsi-malloc-read-qd32", BenchMetric::Iops, 289e3, BenchGoal::Times(1.5)),
    // SPDK's figures are those of its own virtio initiator.
    goal("iscsi-null-two-sessions", BenchMetric::OneSessionRatio, BenchGoal::AtLeast(1.7)),
    goal("vhost-user-null-read-qd1", BenchMetric::QemuExportRatio, BenchGoal::AtLeast(1.5)),
    entry("vhost-user-null-read-qd32", BenchMetric::Iops, 2.87e6, BenchGoal::None),
    goal("vhost-user-null-read-qd32", BenchMetric::QemuExportRatio, BenchGoal::AtLeast(3.0)),
    entry("vhost-user-null-read-qd128", BenchMetric::Iops, 4.65e6, BenchGoal::None),
    goal("vhost-user-null-read-qd128", BenchMetric::QemuExportRatio, BenchGoal::AtLeast(3.0)),
    entry("vhost-user-malloc-read-qd1", BenchMetric::Iops, 521e3, BenchGoal::None),
    entry("vhost-user-malloc-read-qd32", BenchMetric::Iops, 1.35e6, BenchGoal::None),
    entry("vhost-user-malloc-read-qd128", BenchMetric::Iops, 1.47e6, BenchGoal::None),
    goal("vhost-user-idle", BenchMetric::CpuPercent, BenchGoal::AtMost(1.0)),
    goal("nbd-null-read-qd1", BenchMetric::QemuNbdRatio, BenchGoal::AtLeast(1.3)),
    goal("nbd-null-read-qd1", BenchMetric::QemuNbdCpuRatio, BenchGoal::AtMost(1.0)),
    goal("nbd-null-read-qd32", BenchMetric::QemuNbdRatio, BenchGoal::AtLeast(1.3)),
    goal("nbd-null-read-qd32", BenchMetric::QemuNbdCpuRatio, BenchGoal::AtMost(1.0)),
    goal("nbd-null-read-qd32-qemu-img", BenchMetric::QemuNbdRatio, BenchGoal::AtLeast(1.3)),
    goal("nbd-null-read-qd32-qemu-img", BenchMetric::QemuNbdCpuRatio, BenchGoal::AtMost(1.0)),
    goal("ublk-idle", BenchMetric::CpuPercent, BenchGoal::AtMost(1.0)),
    goal("nbd-idle", BenchMetric::CpuPercent, BenchGoal::AtMost(1.0)),
    goal("iscsi-idle", BenchMetric::CpuPercent, BenchGoal::AtMost(1.0)),
    goal("bare-read-qd1", BenchMetric::BareRatio, BARE),
    goal("bare-read-qd32", BenchMetric::BareRatio, BARE),
    goal("bare-read-qd128", BenchMetric::BareRatio, BARE),
    goal("bare-read-digest-qd32", BenchMetric::BareRatio, BARE),
    goal("bare-write-qd1", BenchMetric::BareRatio, BARE),
    goal("bare-write-qd32", BenchMetric::BareRatio, BARE),
    goal("bare-write-qd128", BenchMetric::BareRatio, BARE),
    goal("bare-write-digest-qd32", BenchMetric::BareRatio, BARE),
    entry("tcp-malloc-read", BenchMetric::Iops, 506e3, BenchGoal::Times(1.5)),
    entry("tcp-malloc-write", BenchMetric::Iops, 413e3, BenchGoal::Times(1.5)),
    goal("tls-read-128k", BenchMetric::TlsCpuRatio, BenchGoal::AtMost(1.15)),
    goal("tls-read-qd1", BenchMetric::TlsAddedUs, BenchGoal::AtMost(5.0)),
    entry("tcp-null-128k", BenchMetric::Gibps, 4.5, BenchGoal::None),
    entry("tcp-malloc-128k", BenchMetric::Gibps, 2.5, BenchGoal::Times(1.5)),
    goal("attack-66", BenchMetric::AttackRatio, BenchGoal::AtLeast(0.5)),
    goal("attack-66", BenchMetric::P99Us, BenchGoal::AtMost(50_000.0)),
    goal("attack-300", BenchMetric::AttackRatio, BenchGoal::AtLeast(0.5)),
    goal("attack-300", BenchMetric::P99Us, BenchGoal::AtMost(50_000.0)),
    goal("attack-300-reads", BenchMetric::AttackRatio, BenchGoal::AtLeast(0.5)),
    goal("attack-300-reads", BenchMetric::P99Us, BenchGoal::AtMost(50_000.0)),
    goal("attack-1000", BenchMetric::AttackRatio, BenchGoal::AtLeast(0.5)),
    goal("attack-1000", BenchMetric::P99Us, BenchGoal::AtMost(50_000.0)),
    goal("attack-1000-two", BenchMetric::AttackRatio, BenchGoal::AtLeast(0.5)),
    goal("attack-1000-two", BenchMetric::P99Us, BenchGoal::AtMost(50_000.0)),
    goal("idle", BenchMetric::CpuPercent, BenchGoal::AtMost(1.0)),
    goal("idle", BenchMetric::RssMib, BenchGoal::AtMost(64.0)),
    goal("startup", BenchMetric::StartMs, BenchGoal::AtMost(100.0)),
    goal("scale", BenchMetric::StartMs, BenchGoal::AtMost(3000.0)),
    goal("scale", BenchMetric::BdevKib, BenchGoal::AtMost(8.0)),
    entry("instructions-null-qd128", BenchMetric::Instructions, 720.0, BenchGoal::AtMost(150.0)),
    goal(
        "instructions-null-qos",
        BenchMetric::Instructions,
        BenchGoal::Above("instructions-null-qd128", 12.0),
    ),
    goal(
        "instructions-null-trace",
        BenchMetric::Instructions,
        BenchGoal::Above("instructions-null-qd128", 60.0),
    ),
    goal(
        "instructions-null-raid0",
        BenchMetric::Instructions,
        BenchGoal::Above("instructions-null-qd128", 60.0),
    ),
    goal("instructions-null-rate", BenchMetric::Instructions, BenchGoal::AtMost(300.0)),
    goal("instructions-null-poisson", BenchMetric::Instructions, BenchGoal::AtMost(300.0)),
    goal("instructions-driver", BenchMetric::Instructions, BenchGoal::AtMost(150.0)),
    goal("instructions-vfio-user", BenchMetric::Instructions, BenchGoal::AtMost(550.0)),
    entry("vfio-user-null-read-qd1", BenchMetric::Iops, 975e3, BenchGoal::None),
    entry("vfio-user-null-read-qd1", BenchMetric::MeanUs, 1.01, BenchGoal::AtMost(0.8)),
    entry("vfio-user-null-read-qd32", BenchMetric::Iops, 3.9e6, BenchGoal::Times(1.5)),
    entry("vfio-user-null-read-qd128", BenchMetric::Iops, 5.0e6, BenchGoal::Times(1.5)),
    entry("vfio-user-malloc-read-qd32", BenchMetric::Iops, 1.2e6, BenchGoal::Times(1.5)),
    goal("driver-qpairs-2", BenchMetric::Iops, BenchGoal::Scaled("driver-qpairs-1", 2.0 * LINEAR)),
    goal("driver-qpairs-4", BenchMetric::Iops, BenchGoal::Scaled("driver-qpairs-1", 4.0 * LINEAR)),
    goal("driver-qpairs-8", BenchMetric::Iops, BenchGoal::Scaled("driver-qpairs-1", 8.0 * LINEAR)),
    goal("fio-null", BenchMetric::FioRatio, BenchGoal::AtLeast(5.0)),
    goal("fio-io_uring", BenchMetric::FioRatio, BenchGoal::AtLeast(1.0)),
    goal("fio-io_uring", BenchMetric::FioCpuRatio, BenchGoal::AtMost(1.0)),
    goal("fio-ram-psync", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-libaio-qd1", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-libaio-qd32", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-libaio-qd128", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-io_uring-qd1", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-io_uring-qd32", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-ram-io_uring-qd128", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-psync", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-libaio-qd1", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-libaio-qd32", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-libaio-qd128", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-io_uring-qd1", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-io_uring-qd32", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("fio-zram-io_uring-qd128", BenchMetric::FioCpuRatio, BenchGoal::AtMost(0.9)),
    goal("store-write-qd1", BenchMetric::PlainCpuRatio, BenchGoal::AtMost(4.0)),
    goal("store-write-qd1", BenchMetric::PlainLatencyRatio, BenchGoal::AtMost(1.6)),
    goal("store-write-qd1", BenchMetric::WriteAmplification, BenchGoal::AtMost(2.0)),
    goal("store-write-flush-qd1", BenchMetric::WriteAmplification, BenchGoal::AtMost(2.2)),
    goal("store-write-qd16", BenchMetric::PlainCpuRatio, BenchGoal::AtMost(4.0)),
    goal("store-write-qd16", BenchMetric::WriteAmplification, BenchGoal::AtMost(1.38)),
    goal("store-write-qd64", BenchMetric::PlainCpuRatio, BenchGoal::AtMost(4.0)),
    goal("store-write-qd64", BenchMetric::WriteAmplification, BenchGoal::AtMost(1.14)),
    goal("store-write-qd128", BenchMetric::PlainCpuRatio, BenchGoal::AtMost(4.0)),
    goal("store-write-qd128", BenchMetric::WriteAmplification, BenchGoal::AtMost(1.13)),
    goal("store-ceph-write-qd16", BenchMetric::CephRatio, BenchGoal::AtLeast(15.0)),
    goal("store-write-logs-qd16", BenchMetric::WriteAmplification, BenchGoal::AtMost(1.05)),
    goal("store-kill", BenchMetric::StallMs, BenchGoal::AtMost(1000.0)),
    goal("store-kill", BenchMetric::RecoveryMs, BenchGoal::AtMost(10_000.0)),
    goal("store-stop", BenchMetric::StallMs, BenchGoal::AtMost(1000.0)),
    goal("store-stop", BenchMetric::RecoveryMs, BenchGoal::AtMost(10_000.0)),
    goal("store-out", BenchMetric::StallMs, BenchGoal::AtMost(1000.0)),
    goal("store-out", BenchMetric::CopyP99Ratio, BenchGoal::AtMost(2.0)),
    goal("store-churn", BenchMetric::ChurnRatio, BenchGoal::AtLeast(0.9)),
    goal("store-churn", BenchMetric::RssMib, BenchGoal::AtMost(256.0)),
    goal("store-large", BenchMetric::RssMib, BenchGoal::AtMost(256.0)),
    // A second a TB.
    goal("store-large", BenchMetric::StartMs, BenchGoal::AtMost(258.0)),
    goal("processes-256", BenchMetric::StartMs, BenchGoal::AtMost(1000.0)),
    goal("report-10k", BenchMetric::RenderMs, BenchGoal::AtMost(10_000.0)),
    goal("report-10k", BenchMetric::LoadMs, BenchGoal::AtMost(3000.0)),
    goal("lvol-thick-read-qd1", BenchMetric::LeastLayerRatio, LEAST),
    goal("lvol-thick-read-qd32", BenchMetric::LeastLayerRatio, LEAST),
    goal("lvol-thick-read-qd128", BenchMetric::LeastLayerRatio, LEAST),
    goal("lvol-thick-write-qd32", BenchMetric::BareDeviceRatio, BenchGoal::AtLeast(0.95)),
    goal("lvol-chain-read-qd32", BenchMetric::LeastLayerRatio, LEAST),
    goal("lvol-first-write-cluster", BenchMetric::FirstWriteRatio, BenchGoal::AtMost(2.2)),
    goal("lvol-first-write-4k", BenchMetric::FirstWriteRatio, BenchGoal::AtMost(3.2)),
    goal("lvol-load", BenchMetric::StoreLoadMs, BenchGoal::AtMost(1000.0)),
    goal("lvol-load-killed", BenchMetric::StoreLoadMs, BenchGoal::AtMost(5000.0)),
    goal("lvol-load-foreign", BenchMetric::MetadataReadRatio, BenchGoal::AtMost(1.5)),
    goal("instructions-lvol-thick-read", BenchMetric::Instructions, BenchGoal::AtMost(900.0)),
    goal("instructions-lvol-chain-read", BenchMetric::Instructions, BenchGoal::AtMost(950.0)),
];

/// The reference for a metric of a benchmark, if there is one.
pub(super) fn find(case: &str, metric: BenchMetric) -> Option<&'static ReferenceFigure> {
    ALL.iter().find(|reference| reference.case == case && reference.metric == metric)
}

impl ReferenceFigure {
    /// The multiple of SPDK's figure that is the goal.
    pub(super) fn times_spdk(&self) -> Option<f64> {
        match self.goal {
            BenchGoal::Times(times) => Some(times),
            _ => None,
        }
    }

    /// The goal as a number. `other` returns the same metric of another benchmark, if that was measured.
    pub(super) fn limit(&self, other: impl Fn(&str) -> Option<f64>) -> Option<f64> {
        match self.goal {
            BenchGoal::None => None,
            BenchGoal::Times(times) => self.spdk.map(|spdk| spdk * times),
            BenchGoal::AtMost(limit) | BenchGoal::AtLeast(limit) => Some(limit),
            BenchGoal::Above(case, more) => other(case).map(|value| value + more),
            BenchGoal::Scaled(case, times) => other(case).map(|value| value * times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_belongs_to_a_benchmark_and_is_shown() {
        for reference in ALL {
            let known = |name: &str| super::super::cases::ALL.iter().any(|case| case.name == name);
            assert!(known(reference.case), "{}", reference.case);
            assert!(
                super::super::report::ROWS.contains(&reference.metric),
                "{} is not shown",
                reference.case
            );
            if let BenchGoal::Above(case, _) | BenchGoal::Scaled(case, _) = reference.goal {
                assert!(known(case), "{case}");
            }
        }
    }

    #[test]
    fn goals_are_absolute_or_relative_to_spdk_or_another_benchmark() {
        let limit = |case, metric| find(case, metric).and_then(|r| r.limit(|_| Some(20.0)));
        assert_eq!(limit("null-qd1", BenchMetric::Iops), Some(18.0e6));
        assert_eq!(limit("tcp-null-read-qd1", BenchMetric::MeanUs), Some(10.0));
        assert_eq!(limit("tcp-null-read-qd1-adaptive", BenchMetric::P99Us), Some(25.0));
        assert_eq!(limit("driver-qpairs-2", BenchMetric::Iops), Some(36.0));
        assert_eq!(limit("fio-null", BenchMetric::FioRatio), Some(5.0));
        assert_eq!(limit("malloc-read", BenchMetric::Iops), None);
    }
}
