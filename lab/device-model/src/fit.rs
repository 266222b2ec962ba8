//! Comparison of a profile's model with the published results of the device.

use crate::profile::{DeviceProfile, FitMetric, FitTarget};
use crate::simulation::{Arrival, Load, LoadResult, MeasurementEnd, SimulationConfig, simulate};

/// A target and the model's result for it.
#[derive(Clone, Debug, PartialEq)]
pub struct FitRow {
    /// The published result.
    pub target: FitTarget,
    /// The model's value, including the host time of the target.
    pub model: f64,
    /// Relative error of the model in percent of the published value.
    pub error_percent: f64,
}

/// Results for every target of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct FitReport {
    /// The profile's name.
    pub profile: String,
    /// One row per target, in the order of the profile.
    pub rows: Vec<FitRow>,
}

/// Length of the simulations of a fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitEffort {
    /// Commands measured for read-only loads.
    pub reads: u64,
    /// Nanoseconds of measurement for loads with writes, after a ramp of the same length.
    pub write_ns: u64,
}

impl FitEffort {
    /// Enough for the 99.9th percentile of reads, also under concurrent writes.
    pub const FULL: FitEffort = FitEffort { reads: 400_000, write_ns: 10_000_000_000 };
    /// A smoke test: detects gross errors only.
    pub const QUICK: FitEffort = FitEffort { reads: 40_000, write_ns: 400_000_000 };
}

/// Maximum error in percent for a target to count as met.
pub const FIT_TOLERANCE_PERCENT: f64 = 5.0;

impl FitReport {
    /// Rows of targets that are not excluded.
    pub fn counted(&self) -> impl Iterator<Item = &FitRow> {
        self.rows.iter().filter(|row| row.target.excluded.is_none())
    }

    /// Number of counted targets within [`FIT_TOLERANCE_PERCENT`].
    pub fn met_count(&self) -> usize {
        self.counted().filter(|row| row.is_met()).count()
    }

    /// Mean absolute error of the counted targets in percent.
    pub fn mean_error_percent(&self) -> f64 {
        let sum: f64 = self.counted().map(|row| row.error_percent.abs()).sum();
        sum / self.counted().count().max(1) as f64
    }
}

impl FitRow {
    /// Whether the absolute error is within [`FIT_TOLERANCE_PERCENT`].
    pub fn is_met(&self) -> bool {
        self.error_percent.abs() <= FIT_TOLERANCE_PERCENT
    }
}

/// Simulates the load of each target and compares the results. Targets with the same load share a run.
pub fn fit(profile: &DeviceProfile, effort: &FitEffort, seed: u64) -> FitReport {
    let mut runs: Vec<(FitTarget, LoadResult)> = Vec::new();
    let mut rows = Vec::new();
    for target in &profile.target {
        let known = runs.iter().position(|(other, _)| same_load(other, target));
        let index = known.unwrap_or_else(|| {
            runs.push((target.clone(), simulate_target(profile, target, effort, seed)));
            runs.len() - 1
        });
        let model = metric(&runs[index].1, target.metric);
        let error_percent = (model / target.value - 1.0) * 100.0;
        rows.push(FitRow { target: target.clone(), model, error_percent });
    }
    FitReport { profile: profile.name.clone(), rows }
}

fn same_load(one: &FitTarget, other: &FitTarget) -> bool {
    let load = |target: &FitTarget| {
        let FitTarget { rw, bs, qd, devices, state, beside, host_us, wait_us, .. } = target;
        (*rw, *bs, *qd, *devices, *state, *beside, host_us.to_bits(), wait_us.to_bits())
    };
    load(one) == load(other)
}

fn simulate_target(profile: &DeviceProfile, target: &FitTarget, effort: &FitEffort, seed: u64) -> LoadResult {
    let ns = |us: f64| (us * 1000.0).round() as u64;
    let load = |rw, bytes, depth| Load {
        rw,
        bytes,
        arrival: Arrival::Closed { depth },
        host_ns: ns(target.host_us),
        wait_ns: ns(target.wait_us),
    };
    let mut loads = vec![load(target.rw, target.bs, target.qd)];
    loads.extend(target.beside.map(|beside| load(beside.rw, beside.bs, beside.qd)));
    let writes = loads.iter().any(|load| load.rw.writes());
    let config = SimulationConfig {
        devices: target.devices,
        bytes: profile.capacity_bytes(),
        state: target.state,
        ramp_ns: if writes { effort.write_ns } else { 20_000_000 },
        end: match writes {
            true => MeasurementEnd::AfterNs(effort.write_ns),
            false => MeasurementEnd::AfterCommands(effort.reads),
        },
        seed,
    };
    simulate(profile, &config, &loads).swap_remove(0)
}

fn metric(measured: &LoadResult, metric: FitMetric) -> f64 {
    let latency = &measured.latency;
    match metric {
        FitMetric::Iops => measured.iops,
        FitMetric::MeanUs => latency.mean_ns() / 1000.0,
        FitMetric::P50Us => latency.percentile_ns(50.0) / 1000.0,
        FitMetric::P90Us => latency.percentile_ns(90.0) / 1000.0,
        FitMetric::P99Us => latency.percentile_ns(99.0) / 1000.0,
        FitMetric::P999Us => latency.percentile_ns(99.9) / 1000.0,
    }
}

#[cfg(test)]
mod tests;
