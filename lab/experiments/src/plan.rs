//! From definitions to cells: what would run here, for how long, and what cannot and why.
//!
//! Nothing here looks at the machine: what it is like is handed in as [`Surroundings`].

use crate::definition::{Definition, Scale};
use crate::job;
use crate::record::{Parameters, PlannedCell, PlannedExperiment, Value};
use crate::{reference, scaling};

/// Time that a cell takes besides ramp and measuring, in seconds: starting, switching, reading back.
const OVERHEAD_S: f64 = 0.45;
/// Cores of a cell that says none: all.
const ALL: &str = "all";

/// What the machine offers to a run.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Processors that may be used.
    pub cpus: Vec<u32>,
    /// Devices that there are, or could be made.
    pub devices: usize,
    /// Whether the kernel drives them; otherwise the generator's own block layer does.
    pub kernel_devices: bool,
    /// Schedulers that all of them offer. Empty, with the reason, where none can be set.
    pub schedulers: Vec<String>,
    /// Why no scheduler can be set.
    pub schedulers_missing: String,
    /// Whether all of them can be polled for completions.
    pub polls: bool,
    /// Why they must not be written to, where they must not.
    pub read_only: Option<String>,
    /// Why io_uring cannot be used, where it cannot.
    pub no_io_uring: Option<String>,
    /// Whether the generator knows our block layer: ringbolt does, fio does not.
    pub own_engine: bool,
    /// Devices that our block layer drives at a time.
    pub own_devices: usize,
    /// Targets that can be driven over the network, by their name in definitions.
    pub network_targets: Vec<String>,
}

/// Times, where the user says other ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Measuring, in seconds.
    pub runtime_s: Option<f64>,
    /// Before it, in seconds.
    pub ramp_s: Option<f64>,
    /// How often.
    pub repetitions: Option<u32>,
}

/// What the definitions come to here.
///
/// # Errors
/// A definition with too many cells.
pub fn make(
    definitions: &[&Definition],
    scale: Scale,
    times: Times,
    around: &Surroundings,
) -> Result<Vec<PlannedExperiment>, String> {
    definitions.iter().map(|definition| experiment(definition, scale, times, around)).collect()
}

/// Seconds of ramp and of measuring, and how often, at a scale.
pub fn times_of(definition: &Definition, scale: Scale, times: Times) -> (f64, f64, u32) {
    let (ramp, runtime, repetitions) = match scale {
        Scale::Quick => (0.2, 0.8, 1),
        Scale::Default => (1.0, 4.0, 1),
        Scale::Paper => (definition.time.ramp_s, definition.time.runtime_s, definition.time.repetitions),
    };
    (
        times.ramp_s.unwrap_or(ramp),
        times.runtime_s.unwrap_or(runtime),
        times.repetitions.unwrap_or(repetitions),
    )
}

fn experiment(
    definition: &Definition,
    scale: Scale,
    times: Times,
    around: &Surroundings,
) -> Result<PlannedExperiment, String> {
    let (ramp, runtime, repetitions) = times_of(definition, scale, times);
    let mut scaled = Vec::new();
    if (ramp, runtime) != (definition.time.ramp_s, definition.time.runtime_s) {
        scaled.push(format!(
            "{runtime} s after {ramp} s instead of {} after {}",
            definition.time.runtime_s, definition.time.ramp_s
        ));
    }
    if scale == Scale::Quick && (!definition.quick.is_empty() || !definition.also.is_empty()) {
        scaled.push("some of the published parameters only".to_string());
    }
    let mut cells = Vec::new();
    let testbed = reference::testbed_cores(definition.study());
    for mut parameters in definition.cells(scale)? {
        let mut notes = Vec::new();
        notes.extend(scaling::to_devices(definition, &mut parameters, scale, around.devices));
        let skipped = fit(&mut parameters, scale, around, testbed, &mut notes);
        if skipped.is_some() {
            notes.clear();
        }
        for note in &notes {
            if !scaled.contains(note) {
                scaled.push(note.clone());
            }
        }
        cells.push(PlannedCell {
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
    let fewer = cells.iter().filter_map(|cell| cell.skipped.as_ref()).count();
    if fewer > 0 {
        scaled.push(format!("{fewer} of {} cells cannot run here", cells.len()));
    }
    let definition_text = toml::to_string(definition).map_err(|error| error.to_string())?;
    Ok(PlannedExperiment { id: definition.id.clone(), definition: definition_text, scaled, cells })
}

/// Seconds that cells take in all.
pub fn seconds(experiments: &[PlannedExperiment]) -> f64 {
    let cells = experiments.iter().flat_map(|experiment| &experiment.cells);
    cells.filter(|cell| cell.skipped.is_none()).map(|cell| cell.seconds * f64::from(cell.repetitions)).sum()
}

/// Says how many cores a cell gets here, and why it cannot run, where it cannot. `testbed` are the cores
/// that the study had.
fn fit(
    cell: &mut Parameters,
    scale: Scale,
    around: &Surroundings,
    testbed: Option<usize>,
    notes: &mut Vec<String>,
) -> Option<String> {
    let here = around.cpus.len().max(1);
    let number =
        |cell: &Parameters, name: &str| cell.get(name).and_then(Value::as_f64).unwrap_or(0.0) as usize;
    let text = |cell: &Parameters, name: &str| cell.get(name).map(Value::to_string).unwrap_or_default();
    let api = text(cell, "api");
    let jobs = number(cell, "jobs").max(1);
    let each = if api == "iou-s" { 2 } else { 1 };
    let asked = text(cell, "cores");
    let cores = match asked.as_str() {
        "jobs" => jobs * each,
        "apart" => 2,
        ALL | "" => here,
        count => count.parse().unwrap_or(1),
    };
    cell.insert("cores".into(), Value::Integer(cores.min(here) as i64));
    if asked == "jobs" && cores > here {
        return Some(format!("needs {cores} cores; there are {here}"));
    }
    let published = if matches!(asked.as_str(), ALL | "") { testbed.unwrap_or(here) } else { cores };
    if published > here {
        let meet = if asked == "apart" { ": foreground and background share it" } else { "" };
        notes.push(format!(
            "{here} {} instead of {published}{meet}",
            if here == 1 { "core" } else { "cores" }
        ));
    }
    let devices = scaling::devices(cell);
    if devices > around.devices {
        let there = match around.devices {
            1 => "there is 1".to_string(),
            count => format!("there are {count}"),
        };
        let scale = match scale {
            Scale::Paper => " (--paper keeps to the published number; without it fewer do)",
            Scale::Quick | Scale::Default => "",
        };
        return Some(format!("needs {devices} devices; {there}{scale}"));
    }
    let writes = |name: &str| text(cell, name).contains("write") || text(cell, name).contains("rw");
    let writing = writes("rw") || (number(cell, "background") > 0 && writes("background_rw"));
    if writing && let Some(reason) = &around.read_only {
        return Some(reason.clone());
    }
    if api == "nvme-tcp" {
        let target = text(cell, "target");
        if !around.network_targets.contains(&target) {
            return Some(format!("no target {target} to reach; --nvmet URI names one that is set up"));
        }
        return None;
    }
    let Some((engine, modes)) = job::engine(&api) else {
        if !around.own_engine && api != "spdk-perf" {
            return Some("fio has no engine for our block layer; --generator ringbolt has".to_string());
        }
        let many = devices > around.own_devices;
        return many.then(|| {
            format!("our generator drives {} device at a time without job files", around.own_devices)
        });
    };
    if !around.kernel_devices {
        return Some(format!("{api} is the kernel's, and these devices are not"));
    }
    if engine == "io_uring"
        && let Some(reason) = &around.no_io_uring
    {
        return Some(reason.clone());
    }
    if modes.iter().any(|(mode, _)| *mode == "hipri") && !around.polls {
        return Some(
            "the device cannot be polled (queue/io_poll is 0; nvme.poll_queues=N at boot makes it so)".into(),
        );
    }
    let scheduler = text(cell, "scheduler");
    if !scheduler.is_empty() && scheduler != "none" && !around.schedulers.contains(&scheduler) {
        let reason = if around.schedulers.is_empty() {
            around.schedulers_missing.clone()
        } else {
            format!("the devices offer {}, and not {scheduler}", around.schedulers.join(", "))
        };
        return Some(reason);
    }
    None
}

#[cfg(test)]
mod tests;
