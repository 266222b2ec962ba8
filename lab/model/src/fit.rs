//! How well a profile's model meets what was published about the device.

use crate::drive::{Arrival, Load, Measured, Setting, drive};
use crate::profile::{Metric, Profile, Target};

/// One target and what the model makes of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What was published.
    pub target: Target,
    /// The same figure of the model, host software added as the target says.
    pub model: f64,
    /// How far the model is off, in percent of what was published.
    pub error_percent: f64,
}

/// Every target of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The profile's name.
    pub profile: String,
    /// Its targets, in their order.
    pub rows: Vec<Row>,
}

/// How much is simulated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Commands that are measured of loads that only read.
    pub reads: u64,
    /// Nanoseconds for which loads that write are measured, after as long a ramp.
    pub write_ns: u64,
}

impl Effort {
    /// Enough for a 99.9th percentile of reads, and for a reader that writes keep waiting.
    pub const FULL: Effort = Effort { reads: 400_000, write_ns: 10_000_000_000 };
    /// Enough to tell whether something is badly wrong.
    pub const QUICK: Effort = Effort { reads: 40_000, write_ns: 400_000_000 };
}

/// Error in percent up to which a target counts as met.
pub const GOAL_PERCENT: f64 = 5.0;

impl Report {
    /// Targets that are not excluded.
    pub fn counted(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.target.excluded.is_none())
    }

    /// Of those, how many are met within [`GOAL_PERCENT`].
    pub fn met(&self) -> usize {
        self.counted().filter(|row| row.is_met()).count()
    }

    /// Mean of their errors without their signs, in percent.
    pub fn mean_error_percent(&self) -> f64 {
        let sum: f64 = self.counted().map(|row| row.error_percent.abs()).sum();
        sum / self.counted().count().max(1) as f64
    }
}

impl Row {
    /// Whether the error is within [`GOAL_PERCENT`].
    pub fn is_met(&self) -> bool {
        self.error_percent.abs() <= GOAL_PERCENT
    }
}

/// Runs the model under the load of each target. Targets of the same load share a run.
pub fn fit(profile: &Profile, effort: &Effort, seed: u64) -> Report {
    let mut runs: Vec<(Target, Measured)> = Vec::new();
    let mut rows = Vec::new();
    for target in &profile.target {
        let known = runs.iter().position(|(other, _)| same_load(other, target));
        let index = known.unwrap_or_else(|| {
            runs.push((target.clone(), simulate(profile, target, effort, seed)));
            runs.len() - 1
        });
        let model = metric(&runs[index].1, target.metric);
        let error_percent = (model / target.value - 1.0) * 100.0;
        rows.push(Row { target: target.clone(), model, error_percent });
    }
    Report { profile: profile.name.clone(), rows }
}

fn same_load(one: &Target, other: &Target) -> bool {
    let load = |target: &Target| {
        let Target { rw, bs, qd, devices, state, beside, host_us, wait_us, .. } = target;
        (*rw, *bs, *qd, *devices, *state, *beside, host_us.to_bits(), wait_us.to_bits())
    };
    load(one) == load(other)
}

fn simulate(profile: &Profile, target: &Target, effort: &Effort, seed: u64) -> Measured {
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
    let setting = Setting {
        devices: target.devices,
        bytes: profile.capacity_bytes(),
        state: target.state,
        ramp_ns: if writes { effort.write_ns } else { 20_000_000 },
        measure_ns: if writes { effort.write_ns } else { u64::MAX / 4 },
        commands_max: if writes { u64::MAX } else { effort.reads },
        seed,
    };
    drive(profile, &setting, &loads).swap_remove(0)
}

fn metric(measured: &Measured, metric: Metric) -> f64 {
    let latency = &measured.latency;
    match metric {
        Metric::Iops => measured.iops,
        Metric::MeanUs => latency.mean_ns() / 1000.0,
        Metric::P50Us => latency.percentile_ns(50.0) / 1000.0,
        Metric::P90Us => latency.percentile_ns(90.0) / 1000.0,
        Metric::P99Us => latency.percentile_ns(99.0) / 1000.0,
        Metric::P999Us => latency.percentile_ns(99.9) / 1000.0,
    }
}

#[cfg(test)]
mod tests;
