//! `lab plan`: what would run here, for how long, and what cannot and why.

use std::collections::BTreeMap;

use clap::Args;
use lab_experiments::plan;
use serde_json::json;

use super::bench::{self, Bench, duration};
use crate::command_error::CommandError;
use crate::console::stdout_line;

#[derive(Args)]
#[command(after_help = "Examples:\n  ringbolt lab plan quick\n  \
    ringbolt lab plan icpe24 --paper --device /dev/nvme0n1 --device /dev/nvme1n1\n  \
    ringbolt lab plan cheops23.fig5a --json")]
pub(crate) struct Plan {
    #[command(flatten)]
    bench: Bench,
    /// As JSON, with every cell
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Plan) -> Result<(), CommandError> {
    bench::restore_left_behind();
    let found = options.bench.find()?;
    if options.json {
        let devices: Vec<_> = found.devices.iter().map(|device| device.as_target()).collect();
        let document = json!({
            "scale": found.scale.name(), "generator": found.generator_use, "cores": found.cpus, "devices": devices,
            "seconds": plan::seconds(&found.experiments), "experiments": found.experiments,
        });
        stdout_line!("{}", serde_json::to_string_pretty(&document).map_err(CommandError::operation)?);
        return Ok(());
    }
    stdout_line!(
        "Scale {}, {} processors, load from {}.",
        found.scale.name(),
        found.cpus.len(),
        found.generator_use.version
    );
    if let Some(device) = found.devices.first() {
        stdout_line!("{} device(s): {}", found.devices.len(), device.described);
    }
    stdout_line!("");
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["EXPERIMENT", "RUN", "CANNOT", "TIME", "OTHERWISE THAN PUBLISHED"]);
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut scaled: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for experiment in &found.experiments {
        let skipped = experiment.cells.iter().filter(|cell| cell.skipped.is_some()).count();
        for cell in &experiment.cells {
            if let Some(reason) = &cell.skipped {
                let who = reasons.entry(reason.as_str()).or_default();
                let name = format!("{} {}", experiment.id, cell.series);
                if who.last() != Some(&name) {
                    who.push(name);
                }
            }
        }
        let derived = experiment.cells.is_empty();
        for line in experiment.cells.iter().flat_map(|cell| &cell.notes) {
            let who = scaled.entry(line.as_str()).or_default();
            if who.last() != Some(&experiment.id.as_str()) {
                who.push(&experiment.id);
            }
        }
        let time = duration(plan::seconds(std::slice::from_ref(experiment)));
        let repetitions = |count: u32| if count > 1 { format!(" x {count}") } else { String::new() };
        let run = experiment.cells.len() - skipped;
        let times = experiment.cells.first().map_or(String::new(), |cell| repetitions(cell.repetitions));
        table.add_row([
            experiment.id.clone(),
            if derived { "from others".into() } else { format!("{run}{times}") },
            if skipped == 0 { String::new() } else { skipped.to_string() },
            if derived { String::new() } else { time },
            if derived { String::new() } else { experiment.scaled.first().cloned().unwrap_or_default() },
        ]);
    }
    stdout_line!("{table}\n");
    for (line, who) in scaled {
        stdout_line!("Scaled: {line}\n  {}", who.join(", "));
    }
    for (reason, who) in reasons {
        let shown = who.iter().take(4).cloned().collect::<Vec<String>>().join(", ");
        let more = if who.len() > 4 { format!(" and {} more", who.len() - 4) } else { String::new() };
        stdout_line!("Cannot run: {reason}\n  {shown}{more}");
    }
    stdout_line!("In all about {}.", duration(plan::seconds(&found.experiments)));
    Ok(())
}
