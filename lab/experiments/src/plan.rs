//! Plans a run: which cells can run on this machine, for how long, and why others cannot.
//!
//! Pure: the machine is described by [`MachineCapabilities`].

use crate::definition::{ExperimentDefinition, Scale};
use crate::job_file;
use crate::record::{CellParameters, ParameterValue, PlannedCell, PlannedExperiment};
use crate::{reference, scaling};

/// Time per cell in addition to ramp and measurement, in seconds: process start, scheduler switch, results.
const OVERHEAD_S: f64 = 0.45;
/// The value of `cores` for all cores, which is the default.
const ALL_CORES: &str = "all";

/// What the machine offers to a run.
#[derive(Clone, Debug, Default)]
pub struct MachineCapabilities {
    /// CPUs that cells may use.
    pub cpus: Vec<u32>,
    /// Number of devices that exist or can be created.
    pub devices: usize,
    /// Whether the kernel drives the devices; otherwise they are bdevs.
    pub kernel_devices: bool,
    /// Schedulers that every device offers; empty if none can be set.
    pub schedulers: Vec<String>,
    /// Why no scheduler can be set.
    pub schedulers_unavailable: String,
    /// Whether every device supports polled completions.
    pub polled_io: bool,
    /// Why the devices must not be written to; `None` if they may be.
    pub read_only: Option<String>,
    /// Why io_uring cannot be used; `None` if it can.
    pub io_uring_unavailable: Option<String>,
    /// Whether our user-space driver controls the devices, as SPDK's does in the studies.
    pub user_space_driver: bool,
    /// Whether the generator can drive bdevs: ringbolt can, fio cannot.
    pub bdev_engine: bool,
    /// Most bdevs that one cell can use.
    pub bdev_devices_max: usize,
    /// Names of the available NVMe-oF targets, as in definitions.
    pub network_targets: Vec<String>,
}

/// Durations that the user gives instead of the scale's.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimeOverrides {
    /// Duration of the measurement, in seconds.
    pub runtime_s: Option<f64>,
    /// Warm-up before it, in seconds.
    pub ramp_s: Option<f64>,
    /// Measurements of each cell.
    pub repetitions: Option<u32>,
}

/// Plans the experiments at a scale.
///
/// # Errors
/// A definition with too many cells.
pub fn plan_experiments(
    definitions: &[&ExperimentDefinition],
    scale: Scale,
    times: TimeOverrides,
    capabilities: &MachineCapabilities,
) -> Result<Vec<PlannedExperiment>, String> {
    definitions.iter().map(|definition| experiment(definition, scale, times, capabilities)).collect()
}

/// Ramp and measurement, in seconds, and repetitions at a scale.
pub fn cell_times(definition: &ExperimentDefinition, scale: Scale, times: TimeOverrides) -> (f64, f64, u32) {
    let (ramp, runtime, repetitions) = match scale {
        // Without repetitions nothing can be decided; two suffice only because the scatter of all cells is pooled.
        Scale::Quick => (0.1, 0.4, 2),
        Scale::Default => (0.5, 2.0, 3),
        Scale::Paper => (definition.time.ramp_s, definition.time.runtime_s, definition.time.repetitions),
    };
    (
        times.ramp_s.unwrap_or(ramp),
        times.runtime_s.unwrap_or(runtime),
        times.repetitions.unwrap_or(repetitions),
    )
}

fn experiment(
    definition: &ExperimentDefinition,
    scale: Scale,
    times: TimeOverrides,
    capabilities: &MachineCapabilities,
) -> Result<PlannedExperiment, String> {
    let (ramp, runtime, repetitions) = cell_times(definition, scale, times);
    let mut scaled = Vec::new();
    if (ramp, runtime) != (definition.time.ramp_s, definition.time.runtime_s) {
        scaled.push(format!(
            "{runtime} s after {ramp} s instead of {} after {}",
            definition.time.runtime_s, definition.time.ramp_s
        ));
    }
    if scale == Scale::Quick && (!definition.quick.is_empty() || !definition.also.is_empty()) {
        scaled.push("only some of the published parameters".to_string());
    }
    let mut cells = Vec::new();
    let testbed = reference::testbed_cores(definition.study());
    for mut parameters in definition.cells(scale)? {
        let mut notes = Vec::new();
        notes.extend(scaling::scale_to_devices(definition, &mut parameters, scale, capabilities.devices));
        let requested = parameters.get("cores").map(ParameterValue::to_string).unwrap_or_default();
        let skipped = resolve_cell(&mut parameters, scale, capabilities, testbed, &mut notes);
        if skipped.is_some() {
            notes.clear();
        }
        for note in &notes {
            if !scaled.contains(note) {
                scaled.push(note.clone());
            }
        }
        let stand_in = stand_in(&parameters, &requested, capabilities, testbed).filter(|_| skipped.is_none());
        if let Some(reason) = stand_in.iter().find(|reason| !scaled.contains(reason)) {
            scaled.push(reason.clone());
        }
        cells.push(PlannedCell {
            stand_in,
            series: definition.series_of(&parameters),
            parameters,
            repetitions,
            seconds: ramp + runtime + OVERHEAD_S,
            runtime_s: runtime,
            ramp_s: ramp,
            skipped,
            notes,
        });
    }
    let skipped_cells = cells.iter().filter_map(|cell| cell.skipped.as_ref()).count();
    if skipped_cells > 0 {
        scaled.push(format!("{skipped_cells} of {} cells cannot run here", cells.len()));
    }
    let definition_text = toml::to_string(definition).map_err(|error| error.to_string())?;
    Ok(PlannedExperiment { id: definition.id.clone(), definition: definition_text, scaled, cells })
}

/// Expected duration of all cells that can run, in seconds.
pub fn seconds(experiments: &[PlannedExperiment]) -> f64 {
    let cells = experiments.iter().flat_map(|experiment| &experiment.cells);
    cells.filter(|cell| cell.skipped.is_none()).map(|cell| cell.seconds * f64::from(cell.repetitions)).sum()
}

/// Sets the number of cores of a cell, adds notes about deviations, and returns why it cannot run here, if so.
/// `testbed` is the number of cores of the study's machine.
fn resolve_cell(
    cell: &mut CellParameters,
    scale: Scale,
    capabilities: &MachineCapabilities,
    testbed: Option<usize>,
    notes: &mut Vec<String>,
) -> Option<String> {
    let available_cores = capabilities.cpus.len().max(1);
    let number = |cell: &CellParameters, name: &str| {
        cell.get(name).and_then(ParameterValue::as_f64).unwrap_or(0.0) as usize
    };
    let text =
        |cell: &CellParameters, name: &str| cell.get(name).map(ParameterValue::to_string).unwrap_or_default();
    let api = text(cell, "api");
    let jobs = number(cell, "jobs").max(1);
    let cores_per_job = if api == "iou-s" { 2 } else { 1 };
    let requested = text(cell, "cores");
    let cores = match requested.as_str() {
        "jobs" => jobs * cores_per_job,
        "apart" => 2,
        ALL_CORES | "" => available_cores,
        count => count.parse().unwrap_or(1),
    };
    cell.insert("cores".into(), ParameterValue::Integer(cores.min(available_cores) as i64));
    if requested == "jobs" && cores > available_cores {
        return Some(format!("needs {cores} cores; there are {available_cores}"));
    }
    let published =
        if matches!(requested.as_str(), ALL_CORES | "") { testbed.unwrap_or(available_cores) } else { cores };
    if published > available_cores {
        let meet = if requested == "apart" { ": foreground and background share it" } else { "" };
        notes.push(format!(
            "{available_cores} {} instead of {published}{meet}",
            if available_cores == 1 { "core" } else { "cores" }
        ));
    }
    let devices = scaling::requested_devices(cell);
    if devices > capabilities.devices {
        let there = match capabilities.devices {
            1 => "there is 1".to_string(),
            count => format!("there are {count}"),
        };
        let scale = match scale {
            Scale::Paper => " (--paper requires the published number; other scales use fewer)",
            Scale::Quick | Scale::Default => "",
        };
        return Some(format!("needs {devices} devices; {there}{scale}"));
    }
    let writes = |name: &str| text(cell, name).contains("write") || text(cell, name).contains("rw");
    let writing = writes("rw") || (number(cell, "background") > 0 && writes("background_rw"));
    if writing && let Some(reason) = &capabilities.read_only {
        return Some(reason.clone());
    }
    if api == "nvme-tcp" {
        let target = text(cell, "target");
        if !capabilities.network_targets.contains(&target) {
            return Some(format!("no target {target}; --nvmet URI gives one"));
        }
        return None;
    }
    let Some((engine, modes)) = job_file::engine(&api) else {
        if !capabilities.bdev_engine && api != "spdk-perf" {
            return Some("fio cannot drive bdevs; --generator ringbolt can".to_string());
        }
        let many = devices > capabilities.bdev_devices_max;
        return many.then(|| {
            format!(
                "without job files, the generator drives {} bdev at a time",
                capabilities.bdev_devices_max
            )
        });
    };
    if !capabilities.kernel_devices {
        return Some(format!("{api} is a kernel API, and these devices are bdevs"));
    }
    if engine == "io_uring"
        && let Some(reason) = &capabilities.io_uring_unavailable
    {
        return Some(reason.clone());
    }
    if modes.iter().any(|(mode, _)| *mode == "hipri") && !capabilities.polled_io {
        return Some(
            "the device cannot be polled (queue/io_poll is 0; nvme.poll_queues=N at boot makes it so)".into(),
        );
    }
    let scheduler = text(cell, "scheduler");
    if !scheduler.is_empty() && scheduler != "none" && !capabilities.schedulers.contains(&scheduler) {
        let reason = if capabilities.schedulers.is_empty() {
            capabilities.schedulers_unavailable.clone()
        } else {
            format!("the devices offer {}, not {scheduler}", capabilities.schedulers.join(", "))
        };
        return Some(reason);
    }
    None
}

/// Why a cell would measure something else than the study's. Such a cell is measured, but no finding is judged by it.
///
/// `requested` is the cell's `cores` before it was limited to this machine.
fn stand_in(
    cell: &CellParameters,
    requested: &str,
    capabilities: &MachineCapabilities,
    testbed: Option<usize>,
) -> Option<String> {
    let number = |name: &str| cell.get(name).and_then(ParameterValue::as_f64).unwrap_or(1.0) as usize;
    let api = cell.get("api").and_then(ParameterValue::as_str).unwrap_or_default();
    let spdk = matches!(api, "spdk" | "spdk-perf");
    if spdk && !capabilities.user_space_driver {
        return Some(
            "Ringbolt's block layer stands in for SPDK: no user-space driver controls this device"
                .to_string(),
        );
    }
    let jobs = number("jobs");
    let polling = match api {
        "iou-s" => 2 * jobs,
        _ if spdk => jobs,
        _ => 0,
    };
    let cores = number("cores");
    let published = match requested {
        "jobs" => polling,
        "apart" => 2,
        ALL_CORES | "" => testbed.unwrap_or(cores),
        count => count.parse().unwrap_or(1),
    };
    (polling > cores && published > cores)
        .then(|| format!("{api}: {polling} polling threads on {cores} of the study's {published} cores"))
}

#[cfg(test)]
mod tests;
