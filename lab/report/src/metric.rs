//! Metrics: display name, display unit, and whether higher or lower values are better.

/// Whether higher or lower values of a metric are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricDirection {
    /// Throughput, bandwidth, instructions per cycle.
    HigherIsBetter,
    /// Latency and cost.
    LowerIsBetter,
    /// Neither is better: shares, token counts.
    Neutral,
}

/// How values of a metric are displayed: divided by `per` and then have `unit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DisplayUnit {
    /// Divides a value in the metric's own unit.
    pub divisor: f64,
    /// The unit of the quotient; empty if dimensionless.
    pub unit: &'static str,
}

/// The direction of improvement of `metric`.
pub fn direction(metric: &str) -> MetricDirection {
    if metric.ends_with("iops") || metric == "bw_mib_s" || metric == "ipc" || metric == "iops_per_core" {
        return MetricDirection::HigherIsBetter;
    }
    let costs = ["_us", "_per_io", "_cores", "cpu_cores", "cache_miss_ratio", "context_switches_per_s"];
    if costs.iter().any(|cost| metric.ends_with(cost)) {
        MetricDirection::LowerIsBetter
    } else {
        MetricDirection::Neutral
    }
}

/// Chooses the display unit for values up to `largest`.
pub fn display_unit(metric: &str, largest: f64) -> DisplayUnit {
    let (per, unit) = if metric.ends_with("iops") || metric == "iops_per_core" {
        match largest {
            _ if largest >= 2e6 => (1e6, "MIOPS"),
            _ if largest >= 2e3 => (1e3, "KIOPS"),
            _ => (1.0, "IOPS"),
        }
    } else if metric.ends_with("_us") {
        match largest {
            _ if largest >= 2e6 => (1e6, "s"),
            _ if largest >= 5e3 => (1e3, "ms"),
            _ if largest >= 0.5 || largest <= 0.0 => (1.0, "µs"),
            _ => (1e-3, "ns"),
        }
    } else if metric.ends_with("_ns_per_io") {
        if largest >= 1e4 { (1e3, "µs per I/O") } else { (1.0, "ns per I/O") }
    } else if metric.ends_with("_per_io") {
        if largest >= 1e4 { (1e3, "thousand per I/O") } else { (1.0, "per I/O") }
    } else if metric.ends_with("_cores") {
        (1.0, "cores")
    } else if metric == "cache_miss_ratio" {
        (0.01, "%")
    } else if metric.ends_with("_pct") {
        (1.0, "%")
    } else if metric == "bw_mib_s" {
        if largest >= 4096.0 { (1024.0, "GiB/s") } else { (1.0, "MiB/s") }
    } else if metric.ends_with("_per_s") {
        (1.0, "/s")
    } else {
        (1.0, "")
    };
    DisplayUnit { divisor: per, unit }
}

/// Chooses the display unit of an axis for `values`: on a logarithmic axis for the middle of its range, so that neither
/// end has a long number.
pub fn axis_unit(metric: &str, values: impl Iterator<Item = f64>, logarithmic: bool) -> DisplayUnit {
    let positive = values.filter(|value| *value > 0.0 && value.is_finite());
    let (low, high) =
        positive.fold((f64::INFINITY, 0.0), |(low, high), value| (value.min(low), value.max(high)));
    display_unit(metric, if logarithmic && high > low { low.sqrt() * high.sqrt() } else { high })
}

/// The display name of a metric, without its unit.
pub fn display_name(metric: &str) -> String {
    let known = [
        ("iops", "throughput"),
        ("iops_per_core", "throughput per core"),
        ("read_iops", "reads"),
        ("write_iops", "writes"),
        ("bw_mib_s", "bandwidth"),
        ("cpu_cores", "CPU use"),
        ("cpu_user_cores", "CPU use in user mode"),
        ("cpu_system_cores", "CPU use in the kernel"),
        ("kernel_thread_cores", "CPU use of kernel threads"),
        ("cpu_ns_per_io", "CPU time"),
        ("instructions_per_io", "instructions"),
        ("cycles_per_io", "cycles"),
        ("ipc", "instructions per cycle"),
        ("cache_miss_ratio", "cache miss ratio"),
        ("lock_share_pct", "cycles in lock functions"),
        ("context_switches_per_s", "context switches"),
        ("read_tokens", "read tokens"),
        ("write_tokens", "write tokens"),
        ("iops_slope_pct", "drift of throughput in the window"),
        ("iops_range_pct", "spread of throughput in the window"),
    ];
    if let Some((_, words)) = known.iter().find(|(name, _)| *name == metric) {
        return (*words).to_string();
    }
    let (kind, rest) = match metric.split_once('_') {
        Some(("clat", rest)) => ("completion latency", rest),
        Some(("lat", rest)) => ("latency", rest),
        Some(("slat", rest)) => ("submission latency", rest),
        Some(("share", rest)) => return rest.trim_end_matches("_pct").replace('_', " "),
        _ => return metric.replace('_', " "),
    };
    match rest.trim_end_matches("_us") {
        "mean" => format!("mean {kind}"),
        "max" => format!("maximum {kind}"),
        "stddev" => format!("standard deviation of {kind}"),
        // `p999` is P99.9.
        percentile => match percentile.strip_prefix('p') {
            Some(digits) if digits.len() > 2 && digits.is_ascii() => {
                format!("P{}.{} {kind}", &digits[..2], &digits[2..])
            }
            Some(digits) => format!("P{digits} {kind}"),
            None => format!("{kind}, {percentile}"),
        },
    }
}

/// Display name and unit, for axis labels and column headers.
pub fn label_with_unit(metric: &str, shown: DisplayUnit) -> String {
    let words = display_name(metric);
    if shown.unit.is_empty() { words } else { format!("{words}, {}", shown.unit) }
}

/// The display name of a cell parameter.
pub fn parameter_name(name: &str) -> String {
    let known = [
        ("api", "API"),
        ("scheduler", "scheduler"),
        ("devices", "devices"),
        ("jobs", "processes"),
        ("iodepth", "queue depth"),
        ("block_bytes", "request size, bytes"),
        ("rw", "pattern"),
        ("cores", "cores"),
        ("background", "background applications"),
        ("background_rw", "background pattern"),
        ("background_block_bytes", "background request size, bytes"),
        ("read_target_us", "read target, µs"),
        ("write_target_us", "write target, µs"),
    ];
    known
        .iter()
        .find(|(other, _)| *other == name)
        .map_or_else(|| name.replace('_', " "), |(_, words)| (*words).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_labels_have_a_name_and_a_unit() {
        for (metric, largest, text) in [
            ("iops", 783_000.0, "throughput, KIOPS"),
            ("iops", 3.4e6, "throughput, MIOPS"),
            ("clat_p99_us", 405_000.0, "P99 completion latency, ms"),
            ("clat_p999_us", 80.0, "P99.9 completion latency, µs"),
            ("lat_mean_us", 68.0, "mean latency, µs"),
            ("clat_p50_us", 0.2, "P50 completion latency, ns"),
            ("cpu_cores", 9.9, "CPU use, cores"),
            ("share_block_layer_pct", 66.0, "block layer, %"),
            ("cache_miss_ratio", 0.9, "cache miss ratio, %"),
            ("write_tokens", 128.0, "write tokens"),
            ("clat_é_us", 1.0, "completion latency, é, µs"),
            ("clat_pé9_us", 1.0, "P\u{e9}9 completion latency, µs"),
        ] {
            assert_eq!(label_with_unit(metric, display_unit(metric, largest)), text);
        }
    }

    #[test]
    fn the_unit_of_a_logarithmic_axis_suits_both_ends() {
        let latencies = || [0.1, 3.0, 5_000.0].into_iter();
        assert_eq!(axis_unit("clat_us", latencies(), true).unit, "µs");
        assert_eq!(axis_unit("clat_us", latencies(), false).unit, "ms");
        assert_eq!(axis_unit("clat_us", std::iter::empty(), true).unit, "µs");
    }

    #[test]
    fn each_metric_has_a_direction_of_improvement() {
        assert_eq!(direction("read_iops"), MetricDirection::HigherIsBetter);
        assert_eq!(direction("clat_p99_us"), MetricDirection::LowerIsBetter);
        assert_eq!(direction("kernel_thread_cores"), MetricDirection::LowerIsBetter);
        assert_eq!(direction("share_driver_pct"), MetricDirection::Neutral);
    }
}
