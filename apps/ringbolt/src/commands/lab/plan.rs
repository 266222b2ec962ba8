//! `ringbolt lab plan`: reports what would run, for how long, and why some cells cannot.

use std::collections::BTreeMap;

use clap::Args;
use lab_experiments::plan;
use serde_json::json;

use super::options::{self, ExperimentArgs, duration};
use crate::command_error::CommandError;
use crate::console::stdout_line;

#[derive(Args)]
#[command(after_help = "Examples:\n  ringbolt lab plan quick\n  \
    ringbolt lab plan icpe24 --paper --device /dev/nvme0n1 --device /dev/nvme1n1\n  \
    ringbolt lab plan cheops23.fig5a --json")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    experiments: ExperimentArgs,
    /// Print JSON, with every cell
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &PlanArgs) -> Result<(), CommandError> {
    options::restore_killed_runs();
    let resolved = options.experiments.resolve()?;
    if options.json {
        let devices: Vec<_> = resolved.devices.iter().map(|device| device.to_planned()).collect();
        let document = json!({
            "scale": resolved.scale.name(), "generator": resolved.generator_info, "cores": resolved.cpus, "devices": devices,
            "seconds": plan::seconds(&resolved.experiments), "experiments": resolved.experiments,
        });
        stdout_line!("{}", serde_json::to_string_pretty(&document).map_err(CommandError::operation)?);
        return Ok(());
    }
    stdout_line!(
        "Scale {}, {} CPUs, load from {}.",
        resolved.scale.name(),
        resolved.cpus.len(),
        resolved.generator_info.version
    );
    if let Some(device) = resolved.devices.first() {
        stdout_line!("{} device(s): {}", resolved.devices.len(), device.described);
    }
    stdout_line!("");
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["EXPERIMENT", "RUN", "SKIPPED", "TIME", "DEVIATION FROM THE STUDY"]);
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut scaled: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for experiment in &resolved.experiments {
        let skipped = experiment.cells.iter().filter(|cell| cell.skipped.is_some()).count();
        for cell in &experiment.cells {
            if let Some(reason) = &cell.skipped {
                let users = reasons.entry(reason.as_str()).or_default();
                let name = format!("{} {}", experiment.id, cell.series);
                if users.last() != Some(&name) {
                    users.push(name);
                }
            }
        }
        let derived = experiment.cells.is_empty();
        for line in experiment.cells.iter().flat_map(|cell| &cell.notes) {
            let users = scaled.entry(line.as_str()).or_default();
            if users.last() != Some(&experiment.id.as_str()) {
                users.push(&experiment.id);
            }
        }
        let time = duration(plan::seconds(std::slice::from_ref(experiment)));
        let repetitions = |count: u32| if count > 1 { format!(" x {count}") } else { String::new() };
        let run = experiment.cells.len() - skipped;
        let times = experiment.cells.first().map_or(String::new(), |cell| repetitions(cell.repetitions));
        table.add_row([
            experiment.id.clone(),
            if derived { "derived".into() } else { format!("{run}{times}") },
            if skipped == 0 { String::new() } else { skipped.to_string() },
            if derived { String::new() } else { time },
            if derived { String::new() } else { experiment.scaled.first().cloned().unwrap_or_default() },
        ]);
    }
    stdout_line!("{table}\n");
    for (line, users) in scaled {
        stdout_line!("Scaled: {line}\n  {}", users.join(", "));
    }
    for (reason, users) in reasons {
        let shown = users.iter().take(4).cloned().collect::<Vec<String>>().join(", ");
        let more = if users.len() > 4 { format!(" and {} more", users.len() - 4) } else { String::new() };
        stdout_line!("Cannot run: {reason}\n  {shown}{more}");
    }
    stdout_line!("Total: about {}.", duration(plan::seconds(&resolved.experiments)));
    Ok(())
}
