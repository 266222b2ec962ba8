//! The metrics, with their units, and the summary of several values.

use std::fmt;

/// A quantity that a run measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BenchMetric {
    /// I/Os per second.
    Iops,
    /// 2^30 bytes per second.
    Gibps,
    /// Mean latency in microseconds.
    MeanUs,
    /// 99th percentile of latency in microseconds.
    P99Us,
    /// CPU time of the load generator per I/O, in nanoseconds.
    HostCpuNs,
    /// CPU time of the target per I/O, in nanoseconds.
    TargetCpuNs,
    /// Instructions per I/O.
    Instructions,
    /// CPU use in percent of one CPU.
    CpuPercent,
    /// Resident memory in 2^20 bytes.
    RssMib,
    /// Milliseconds from exec until the target accepts connections, or until all processes have done their
    /// I/O and exited.
    StartMs,
    /// Resident memory of an idle block device with its namespace, in 2^10 bytes.
    BdevKib,
    /// Microseconds of a call that removes a block device or subsystem.
    RemoveUs,
    /// Milliseconds to generate a page.
    RenderMs,
    /// Milliseconds until a browser has loaded the page.
    LoadMs,
    /// IOPS as a multiple of fio's.
    FioRatio,
    /// CPU time per I/O as a multiple of fio's.
    FioCpuRatio,
    /// CPU time of the load generator per I/O outside the kernel, in nanoseconds.
    HostUserNs,
    /// CPU time of the load generator per I/O in the kernel, in nanoseconds.
    HostSystemNs,
    /// CPU time of fio per I/O outside the kernel, in nanoseconds.
    FioUserNs,
    /// CPU time of fio per I/O in the kernel, in nanoseconds.
    FioSystemNs,
    /// Context switches of the load generator per I/O.
    HostSwitches,
    /// Context switches of fio per I/O.
    FioSwitches,
    /// CPU time per I/O outside the kernel as a multiple of fio's.
    FioUserRatio,
    /// The share of the kernel in fio's CPU time per I/O, from 0 to 1.
    FioSystemShare,
    /// CPU time of the servers per I/O as a multiple of that of an unreplicated volume.
    PlainCpuRatio,
    /// Mean latency as a multiple of that of an unreplicated volume.
    PlainLatencyRatio,
    /// Bytes written to each replica's device per byte written.
    WriteAmplification,
    /// Median completion latency as a multiple of fio's.
    FioMedianRatio,
    /// 99th percentile of completion latency as a multiple of fio's.
    FioP99Ratio,
    /// Messages per second of an echo of the same bytes over bare sockets.
    BareIops,
    /// IOPS as a multiple of that echo's.
    BareRatio,
    /// IOPS as a fraction of the messages of the least NVMe/TCP target and client.
    LeastPairRatio,
    /// Messages of the least NVMe/TCP target and client as a fraction of those of bare sockets.
    LeastPairBareRatio,
    /// IOPS as a multiple of those of SPDK's target, with SPDK's load generator for both.
    SpdkRatio,
    /// IOPS as a multiple of qemu-nbd's, with the same client.
    QemuNbdRatio,
    /// CPU time of the target per I/O as a multiple of qemu-nbd's.
    QemuNbdCpuRatio,
    /// IOPS as a multiple of those of qemu-storage-daemon's null device, with the same client.
    QemuExportRatio,
    /// IOPS of qemu-storage-daemon's null device, with the same client.
    QemuExportIops,
    /// IOPS of the least vhost-user device, with the same client.
    BareDeviceIops,
    /// IOPS as a multiple of those of the least vhost-user device.
    BareDeviceRatio,
    /// IOPS as a fraction of those of the least bdev above another.
    LeastLayerRatio,
    /// IOPS of the least vhost-user device as a multiple of qemu-storage-daemon's: what any device can reach.
    BareQemuRatio,
    /// IOPS of several sessions as a multiple of those of one.
    OneSessionRatio,
    /// IOPS beside stalled hosts as a fraction of those without them.
    AttackRatio,
    /// The longest completion latency while a node was lost, in milliseconds.
    StallMs,
    /// Median of the longest pauses of a queue that moves, in microseconds.
    MoveMedianUs,
    /// The longest pause of a queue that moves, in microseconds.
    MoveMaxUs,
    /// The same of a queue that stays: median and longest.
    StayMedianUs,
    StayMaxUs,
    /// IOPS as a fraction of those of an even start.
    EvenRatio,
    /// Milliseconds from the return of a lost node until all replicas are in sync.
    RecoveryMs,
    /// Milliseconds until all replicas of a node that was taken out are on others.
    MovedMs,
    /// 99th percentile while replicas are copied as a multiple of that before.
    CopyP99Ratio,
    /// CPU time of both ends per I/O without TLS, in nanoseconds.
    PlainCpuNs,
    /// CPU time of the cipher alone for the bytes of an I/O, at both ends, in nanoseconds.
    CipherCpuNs,
    /// CPU time of both ends per I/O with TLS as a multiple of those two together.
    TlsCpuRatio,
    /// Mean latency with TLS less that without, in microseconds.
    TlsAddedUs,
    /// IOPS of an image of Ceph.
    CephIops,
    /// CPU time of Ceph's OSDs per I/O, in nanoseconds.
    CephCpuNs,
    /// IOPS as a multiple of Ceph's.
    CephRatio,
    /// CPU time of the nodes per I/O as a multiple of that of Ceph's OSDs.
    CephCpuRatio,
    /// IOPS of what is below a layer: of all members together, or of the operation alone.
    BaseIops,
    /// IOPS as a multiple of those.
    BaseRatio,
    /// IOPS at the end of a long load as a multiple of those at its beginning.
    ChurnRatio,
    /// 99th percentile at the end of a long load as a multiple of that at its beginning.
    ChurnP99Ratio,
    /// Time of a first write to a cluster as a multiple of that of a later one.
    FirstWriteRatio,
    /// Milliseconds until a store is loaded and its volumes are there.
    StoreLoadMs,
    /// Milliseconds to read all metadata of a store in order.
    MetadataReadMs,
    /// Time of the load as a multiple of that.
    MetadataReadRatio,
    /// Milliseconds to read a store's metadata in order and to decode each page.
    MetadataDecodeMs,
    /// Time to load a store as a multiple of that.
    MetadataDecodeRatio,
}

impl BenchMetric {
    /// The key in the JSON output.
    pub(super) fn key(self) -> &'static str {
        match self {
            BenchMetric::Iops => "iops",
            BenchMetric::Gibps => "gib_per_second",
            BenchMetric::MeanUs => "latency_mean_us",
            BenchMetric::P99Us => "latency_p99_us",
            BenchMetric::HostCpuNs => "host_cpu_ns_per_io",
            BenchMetric::TargetCpuNs => "target_cpu_ns_per_io",
            BenchMetric::Instructions => "instructions_per_io",
            BenchMetric::CpuPercent => "cpu_percent",
            BenchMetric::RssMib => "resident_mib",
            BenchMetric::StartMs => "start_ms",
            BenchMetric::BdevKib => "kib_per_bdev",
            BenchMetric::RemoveUs => "remove_us",
            BenchMetric::RenderMs => "made_ms",
            BenchMetric::LoadMs => "opened_ms",
            BenchMetric::FioRatio => "iops_of_fio",
            BenchMetric::FioCpuRatio => "cpu_of_fio",
            BenchMetric::HostUserNs => "host_user_ns_per_io",
            BenchMetric::HostSystemNs => "host_system_ns_per_io",
            BenchMetric::FioUserNs => "fio_user_ns_per_io",
            BenchMetric::FioSystemNs => "fio_system_ns_per_io",
            BenchMetric::HostSwitches => "host_switches_per_io",
            BenchMetric::FioSwitches => "fio_switches_per_io",
            BenchMetric::FioUserRatio => "user_of_fio",
            BenchMetric::FioSystemShare => "fio_system_share",
            BenchMetric::PlainCpuRatio => "cpu_of_unreplicated",
            BenchMetric::PlainLatencyRatio => "latency_of_unreplicated",
            BenchMetric::WriteAmplification => "write_amplification",
            BenchMetric::FioMedianRatio => "latency_median_of_fio",
            BenchMetric::FioP99Ratio => "latency_p99_of_fio",
            BenchMetric::BareIops => "bare_sockets_iops",
            BenchMetric::BareRatio => "iops_of_bare_sockets",
            BenchMetric::LeastPairRatio => "iops_of_least_pair",
            BenchMetric::LeastPairBareRatio => "least_pair_of_bare_sockets",
            BenchMetric::SpdkRatio => "iops_of_spdk",
            BenchMetric::QemuNbdRatio => "iops_of_qemu_nbd",
            BenchMetric::QemuNbdCpuRatio => "cpu_of_qemu_nbd",
            BenchMetric::QemuExportRatio => "iops_of_qemu_storage_daemon",
            BenchMetric::QemuExportIops => "qemu_storage_daemon_iops",
            BenchMetric::BareDeviceIops => "bare_device_iops",
            BenchMetric::BareDeviceRatio => "iops_of_bare_device",
            BenchMetric::LeastLayerRatio => "iops_of_split",
            BenchMetric::BareQemuRatio => "bare_device_of_qemu_storage_daemon",
            BenchMetric::OneSessionRatio => "iops_of_one_session",
            BenchMetric::AttackRatio => "iops_of_unattacked",
            BenchMetric::StallMs => "stall_ms",
            BenchMetric::MoveMedianUs => "move_median_us",
            BenchMetric::MoveMaxUs => "move_max_us",
            BenchMetric::StayMedianUs => "stay_median_us",
            BenchMetric::StayMaxUs => "stay_max_us",
            BenchMetric::EvenRatio => "iops_of_even",
            BenchMetric::RecoveryMs => "recovery_ms",
            BenchMetric::MovedMs => "moved_ms",
            BenchMetric::CopyP99Ratio => "latency_p99_of_undisturbed",
            BenchMetric::PlainCpuNs => "plain_cpu_ns_per_io",
            BenchMetric::CipherCpuNs => "cipher_cpu_ns_per_io",
            BenchMetric::TlsCpuRatio => "cpu_of_plain_and_cipher",
            BenchMetric::TlsAddedUs => "latency_added_us",
            BenchMetric::CephIops => "ceph_iops",
            BenchMetric::CephCpuNs => "ceph_cpu_ns_per_io",
            BenchMetric::CephRatio => "iops_of_ceph",
            BenchMetric::CephCpuRatio => "cpu_of_ceph",
            BenchMetric::BaseIops => "base_iops",
            BenchMetric::BaseRatio => "iops_of_base",
            BenchMetric::ChurnRatio => "iops_of_first",
            BenchMetric::ChurnP99Ratio => "latency_p99_of_first",
            BenchMetric::FirstWriteRatio => "latency_of_later_writes",
            BenchMetric::StoreLoadMs => "store_load_ms",
            BenchMetric::MetadataReadMs => "metadata_read_ms",
            BenchMetric::MetadataReadRatio => "load_of_metadata_read",
            BenchMetric::MetadataDecodeMs => "metadata_decode_ms",
            BenchMetric::MetadataDecodeRatio => "load_of_metadata_decode",
        }
    }

    /// The name in the table.
    pub(super) fn title(self) -> &'static str {
        match self {
            BenchMetric::Iops => "IOPS",
            BenchMetric::Gibps => "bandwidth",
            BenchMetric::MeanUs => "mean",
            BenchMetric::P99Us => "p99",
            BenchMetric::HostCpuNs | BenchMetric::TargetCpuNs => "CPU",
            BenchMetric::Instructions => "instructions",
            BenchMetric::CpuPercent => "CPU",
            BenchMetric::RssMib => "resident",
            BenchMetric::StartMs => "start",
            BenchMetric::BdevKib => "a bdev",
            BenchMetric::RemoveUs => "a removal",
            BenchMetric::RenderMs => "generated",
            BenchMetric::LoadMs => "loaded",
            BenchMetric::FioRatio => "IOPS / fio's",
            BenchMetric::FioCpuRatio => "CPU / fio's",
            BenchMetric::HostUserNs => "user",
            BenchMetric::HostSystemNs => "system",
            BenchMetric::FioUserNs => "fio's user",
            BenchMetric::FioSystemNs => "fio's system",
            BenchMetric::HostSwitches => "switches",
            BenchMetric::FioSwitches => "fio's switches",
            BenchMetric::FioUserRatio => "user / fio's",
            BenchMetric::FioSystemShare => "fio's system / its CPU",
            BenchMetric::PlainCpuRatio => "CPU / unreplicated",
            BenchMetric::PlainLatencyRatio => "mean / unreplicated",
            BenchMetric::WriteAmplification => "write amplification",
            BenchMetric::FioMedianRatio => "median / fio's",
            BenchMetric::FioP99Ratio => "p99 / fio's",
            BenchMetric::BareIops => "bare sockets",
            BenchMetric::BareRatio => "IOPS / bare sockets'",
            BenchMetric::LeastPairRatio => "IOPS / least pair's",
            BenchMetric::LeastPairBareRatio => "least pair / bare sockets'",
            BenchMetric::SpdkRatio => "IOPS / SPDK's target's",
            BenchMetric::QemuNbdRatio => "IOPS / qemu-nbd's",
            BenchMetric::QemuNbdCpuRatio => "CPU / qemu-nbd's",
            BenchMetric::QemuExportRatio => "IOPS / qemu-storage-daemon's",
            BenchMetric::QemuExportIops => "qemu-storage-daemon",
            BenchMetric::BareDeviceIops => "bare device",
            BenchMetric::BareDeviceRatio => "IOPS / bare device's",
            BenchMetric::LeastLayerRatio => "IOPS / split's",
            BenchMetric::BareQemuRatio => "bare device / qemu-storage-daemon's",
            BenchMetric::OneSessionRatio => "IOPS / one session",
            BenchMetric::AttackRatio => "IOPS / without them",
            BenchMetric::StallMs => "longest stall",
            BenchMetric::MoveMedianUs => "a move, median",
            BenchMetric::MoveMaxUs => "a move, longest",
            BenchMetric::StayMedianUs => "no move, median",
            BenchMetric::StayMaxUs => "no move, longest",
            BenchMetric::EvenRatio => "IOPS / even start's",
            BenchMetric::RecoveryMs => "healthy again",
            BenchMetric::MovedMs => "moved",
            BenchMetric::CopyP99Ratio => "p99 / before",
            BenchMetric::PlainCpuNs => "CPU without TLS",
            BenchMetric::CipherCpuNs => "cipher alone",
            BenchMetric::TlsCpuRatio => "CPU / plain and cipher",
            BenchMetric::TlsAddedUs => "added",
            BenchMetric::CephIops => "Ceph",
            BenchMetric::CephCpuNs => "Ceph's CPU",
            BenchMetric::CephRatio => "IOPS / Ceph's",
            BenchMetric::CephCpuRatio => "CPU / Ceph's",
            BenchMetric::BaseIops => "base",
            BenchMetric::BaseRatio => "IOPS / base's",
            BenchMetric::ChurnRatio => "IOPS / at first",
            BenchMetric::ChurnP99Ratio => "p99 / at first",
            BenchMetric::FirstWriteRatio => "first / later write",
            BenchMetric::StoreLoadMs => "loaded",
            BenchMetric::MetadataReadMs => "read in order",
            BenchMetric::MetadataDecodeMs => "read and decoded in order",
            BenchMetric::MetadataReadRatio => "loaded / read in order",
            BenchMetric::MetadataDecodeRatio => "loaded / decoded in order",
        }
    }

    pub(super) fn more_is_better(self) -> bool {
        use BenchMetric::{
            AttackRatio, BareDeviceIops, BareDeviceRatio, BareIops, BareQemuRatio, BareRatio, BaseIops,
            BaseRatio, CephIops, CephRatio, ChurnRatio, EvenRatio, FioRatio, Gibps, Iops, LeastLayerRatio,
            LeastPairBareRatio, LeastPairRatio, OneSessionRatio, QemuExportIops, QemuExportRatio,
            QemuNbdRatio, SpdkRatio,
        };
        matches!(
            self,
            Iops | Gibps
                | FioRatio
                | BareIops
                | BareRatio
                | LeastPairRatio
                | LeastPairBareRatio
                | SpdkRatio
                | QemuNbdRatio
                | QemuExportRatio
                | QemuExportIops
                | BareDeviceIops
                | BareDeviceRatio
                | LeastLayerRatio
                | BareQemuRatio
                | AttackRatio
                | OneSessionRatio
                | CephIops
                | CephRatio
                | BaseIops
                | BaseRatio
                | ChurnRatio
                | EvenRatio
        )
    }

    /// Formats a value with its unit.
    pub(super) fn format(self, value: f64) -> String {
        match self {
            BenchMetric::Iops
            | BenchMetric::BareIops
            | BenchMetric::QemuExportIops
            | BenchMetric::BareDeviceIops
            | BenchMetric::BaseIops
            | BenchMetric::CephIops => match value {
                1e6.. => format!("{:.2} M", value / 1e6),
                _ => format!("{:.1} k", value / 1e3),
            },
            BenchMetric::Gibps => format!("{value:.2} GiB/s"),
            BenchMetric::MeanUs | BenchMetric::P99Us if value < 1.0 => format!("{:.0} ns", value * 1e3),
            BenchMetric::MeanUs | BenchMetric::P99Us | BenchMetric::RemoveUs | BenchMetric::TlsAddedUs => {
                format!("{value:.1} µs")
            }
            BenchMetric::MoveMedianUs
            | BenchMetric::MoveMaxUs
            | BenchMetric::StayMedianUs
            | BenchMetric::StayMaxUs => format!("{value:.0} µs"),
            BenchMetric::BdevKib => format!("{value:.2} KiB"),
            BenchMetric::HostCpuNs | BenchMetric::TargetCpuNs | BenchMetric::CephCpuNs if value < 1000.0 => {
                format!("{value:.0} ns")
            }
            BenchMetric::HostCpuNs
            | BenchMetric::TargetCpuNs
            | BenchMetric::CephCpuNs
            | BenchMetric::PlainCpuNs
            | BenchMetric::CipherCpuNs => {
                format!("{:.1} µs", value / 1e3)
            }
            BenchMetric::HostUserNs
            | BenchMetric::HostSystemNs
            | BenchMetric::FioUserNs
            | BenchMetric::FioSystemNs => format!("{value:.0} ns"),
            BenchMetric::Instructions => format!("{value:.0}"),
            BenchMetric::CpuPercent => format!("{value:.2} %"),
            BenchMetric::RssMib => format!("{value:.1} MiB"),
            BenchMetric::StartMs | BenchMetric::RenderMs | BenchMetric::LoadMs => format!("{value:.1} ms"),
            BenchMetric::StoreLoadMs | BenchMetric::MetadataReadMs | BenchMetric::MetadataDecodeMs => {
                format!("{value:.0} ms")
            }
            BenchMetric::StallMs | BenchMetric::RecoveryMs | BenchMetric::MovedMs => {
                format!("{value:.0} ms")
            }
            BenchMetric::HostSwitches | BenchMetric::FioSwitches => format!("{value:.3}"),
            BenchMetric::FioRatio
            | BenchMetric::FioCpuRatio
            | BenchMetric::FioUserRatio
            | BenchMetric::FioSystemShare
            | BenchMetric::PlainCpuRatio
            | BenchMetric::PlainLatencyRatio
            | BenchMetric::WriteAmplification
            | BenchMetric::FioMedianRatio
            | BenchMetric::FioP99Ratio
            | BenchMetric::BareRatio
            | BenchMetric::LeastPairRatio
            | BenchMetric::LeastPairBareRatio
            | BenchMetric::SpdkRatio
            | BenchMetric::QemuNbdRatio
            | BenchMetric::QemuNbdCpuRatio
            | BenchMetric::QemuExportRatio
            | BenchMetric::BareDeviceRatio
            | BenchMetric::LeastLayerRatio
            | BenchMetric::BareQemuRatio
            | BenchMetric::AttackRatio
            | BenchMetric::CopyP99Ratio
            | BenchMetric::CephRatio
            | BenchMetric::BaseRatio
            | BenchMetric::CephCpuRatio
            | BenchMetric::ChurnRatio
            | BenchMetric::OneSessionRatio
            | BenchMetric::TlsCpuRatio
            | BenchMetric::EvenRatio
            | BenchMetric::FirstWriteRatio
            | BenchMetric::MetadataReadRatio
            | BenchMetric::MetadataDecodeRatio
            | BenchMetric::ChurnP99Ratio => format!("{value:.2}"),
        }
    }
}

impl fmt::Display for BenchMetric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title())
    }
}

/// Median, minimum and maximum of several values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunSummary {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl RunSummary {
    /// `None` without values.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<RunSummary> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(RunSummary { median, min, max })
    }

    /// The distance from minimum to maximum, in percent of the median.
    pub(super) fn spread_percent(self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.max - self.min) / self.median * 100.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_of_values_is_the_mean_of_the_middle_two() {
        assert_eq!(RunSummary::of([4.0, 1.0, 3.0]), Some(RunSummary { median: 3.0, min: 1.0, max: 4.0 }));
        assert_eq!(
            RunSummary::of([4.0, 1.0, 3.0, 2.0]),
            Some(RunSummary { median: 2.5, min: 1.0, max: 4.0 })
        );
        assert_eq!(RunSummary::of([]), None);
        assert_eq!(RunSummary { median: 2.0, min: 1.0, max: 4.0 }.spread_percent(), 150.0);
    }
}
